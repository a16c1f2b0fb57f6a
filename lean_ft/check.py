"""Prove a checkpoint on this machine, with its own weights, tokenizer and chat template.

The plain step runs each document alone, in float32, with all logits at once and torch's own cross-entropy. Its logits
and gradients are compared with transformers, if it is installed, and each technique is compared with the plain step.
Techniques of the optimizer are compared with AdamW's closed form: with constant gradients g, step 3 moves a weight by
lr * g / (|g| + eps). Steps 1 and 2 have learning rate 0, so step 3 uses the quantized state that they left. An adapter
that has learned nothing computes the plain model, so the gradient of its B is scaling * G A^T.

Tolerances follow from the dtype and the model. The plain step is repeated with every weight changed at random by
float32's rounding (relative 1.2e-7). The change of each result is its rounding noise, and float32 results may differ by
`MARGIN` times that. 16-bit results have no such bound, so both sides' distances to float32 are reported and compared.
"""

import gc
import importlib
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lean_ft.data.arrangement import arrange
from lean_ft.data.collate import collate
from lean_ft.data.columns import Columns
from lean_ft.data.documents import renderer_of
from lean_ft.data.objective import objective_of
from lean_ft.data.rows import IGNORED
from lean_ft.data.sources import RowSources
from lean_ft.export import export_folder
from lean_ft.generation import Sampling, sample
from lean_ft.gguf.cache import gguf_file
from lean_ft.losses import CrossEntropy
from lean_ft.memory import apply_memory
from lean_ft.models import Decoder, load_model, save_model, stored_labels
from lean_ft.models.config_json import gives_scores, labels_tokens
from lean_ft.models.device import resolve_device
from lean_ft.models.frozen_weight import quantized_weights
from lean_ft.models.source import name_in_language_model
from lean_ft.models.stored_weights import stored_dtype, stored_tensors
from lean_ft.optim import build_optimizer
from lean_ft.peft import adapted_layers, load_with_adapter
from lean_ft.settings import LoRAConfig, SFTDataConfig, TrainingConfig
from lean_ft.settings.base import Device
from lean_ft.system.environment import available_bytes
from lean_ft.system.passes import evaluating
from lean_ft.system.units import gibibytes
from lean_ft.system.whole_files import read_json
from lean_ft.tokenizers import load_tokenizer

MARGIN = 32  # a float32 result may differ by this many times its rounding noise
MARGIN_16_BIT = 1.5  # our distance to float32 in 16 bits may be this many times transformers'
# The largest relative error of an update by state codes: 64 levels from 0.1 to 1 are 0.007 off at most.
CODE_ERROR = {"adamw": 0.0, "adamw_8bit": 0.07, "adamw_8bit_torchao": 0.07, "paged_adamw_8bit": 0.07}
NUM_ROWS, NUM_GREEDY_TOKENS = 8, 64
EPS, SMALLEST = torch.finfo(torch.float32).eps, torch.finfo(torch.float32).tiny
PLAIN = ("model.dtype=float32", "memory.loss_chunk_tokens=0", f"batch_size={NUM_ROWS}")
TECHNIQUES = (
    *(f"memory.activation_checkpointing={kind}" for kind in ("full", "every_n", "selective")),
    *("memory.activation_offload=true", "memory.tile_mlp=4", "memory.loss_chunk_tokens=16"),
    *(f"data.packing={kind}" for kind in ("none", "bfd", "padding_free")),
    *("compile=true", "compile=true memory.activation_checkpointing=budget", "optimizer.name=adamw"),
    *("optimizer.in_backward=true", "optimizer.name=adamw_8bit", "optimizer.stochastic_rounding=true"),
    *("lora.rank=16", "lora.quantize=nf4"),
)
TEXTS = (
    "  don't, it's $3.50 (50%)!\tand\n\n1,234.5 \r\n",
    "def f(x):\n    return x ** 2  # code",
    "Größe, naïve, Ελληνικά, русский, العربية, हिन्दी, 日本語, 한국어, 🙂👩‍👧 e\u0301 \x07 \u200b",
    "",
)
USER, ANSWER = {"role": "user", "content": "What is 17 + 25?"}, {"role": "assistant", "content": "17 + 25 = 42."}
AGAIN, SYSTEM = {"role": "user", "content": "  And\n\ntwice? 🙂 日本 "}, {"role": "system", "content": "Be brief."}
CHATS = ([USER], [USER, ANSWER], [USER, ANSWER, AGAIN], [SYSTEM, USER, ANSWER])


class CheckedConfig(TrainingConfig, Protocol):
    """The settings of the recipe `finetune` that the checks read."""

    data: SFTDataConfig
    lora: LoRAConfig | None
    batch_size: int
    device: Device


Row = tuple[str, str, str, str, str]  # check, what was compared, result, allowed, verdict
Tensors = dict[str, Tensor]


class Check:
    """The checks of one model folder.

    `configure` returns the settings of the recipe `finetune` for overrides; `techniques` are overrides by name, several
    in one text separated by spaces; `command` is a `leanft run` without `output_dir` to time, or None.
    """

    def __init__(
        self,
        folder: Path,
        configure: Callable[[Sequence[str]], CheckedConfig],
        techniques: Mapping[str, str],
        command: Sequence[str] | None,
    ) -> None:
        self.folder, self.techniques, self.command, self._configure = folder, techniques, command, configure
        self.cfg = cfg = self.configure()
        self.device = resolve_device(cfg.device)
        torch.set_float32_matmul_precision("highest")
        self.tokenizer = load_tokenizer(cfg.model, cfg.data.chat_template)
        rows = RowSources.of(cfg.data).first_rows(NUM_ROWS)[:NUM_ROWS]
        documents, _ = renderer_of(cfg.data, self.tokenizer)(rows)
        self.documents = Columns.join(documents, self.tokenizer.pad_id)
        self.num_targets = int(self.documents.num_targets.sum())
        if not self.num_targets:
            raise ValueError(f"data.source={cfg.data.source}: its first {NUM_ROWS} rows have no token to train on.")
        self.hf_config = read_json(folder / "config.json")
        self.ids = self.documents.values["ids"][: cfg.data.max_length].tolist()
        self.transformers: Any = None
        with suppress(ImportError):
            self.transformers = importlib.import_module("transformers")  # only here: the library does not depend on it
            self.transformers.utils.logging.disable_progress_bar()

    def run(self) -> Iterator[tuple[str, Callable[[], Iterable[Row]]]]:
        """Yield each check by name. Calling it, in this order, returns its rows of the table, or raises ValueError if
        the model or the device does not have what it checks."""
        needed = 20 * sum(math.prod(tensor.shape) for tensor in stored_tensors(self.folder).values())
        free = torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else available_bytes()
        absent = "" if self.transformers else "transformers is not installed"
        small = "" if free is None or needed <= free else f"needs {gibibytes(needed)}, and {gibibytes(free)} is free"
        checks: list[tuple[str, Callable[[], Iterable[Row]], str]] = [
            ("token ids", self._token_ids, absent),
            ("saved weights", self._weights, ""),
            *([("scores", self._scores, small or absent)] if gives_scores(self.hf_config) else []),
            ("plain step", self._plain, small),
            ("logits and gradients", self._against_transformers, small or absent),
            *((name, partial(self._technique, name, text.split()), small) for name, text in self.techniques.items()),
            ("3 training steps", self._timed, "" if self.command else "--quick"),
        ]
        after_plain = {"logits and gradients", *self.techniques, *([] if small else ["3 training steps"])}
        for name, work, reason in checks:
            gc.collect()
            if name in after_plain and not hasattr(self, "noise"):
                reason = reason or "the plain step has no result"
            yield name, partial(list, [(name, "", "", "", f"skipped: {reason}")]) if reason else work

    def configure(self, *overrides: str) -> CheckedConfig:
        return self._configure([*PLAIN, *overrides])

    def _token_ids(self) -> Iterator[Row]:
        theirs = self.transformers.AutoTokenizer.from_pretrained(self.folder)
        ids = [theirs.encode(text) for text in TEXTS]
        wrong = [text for text, i in zip(TEXTS, ids, strict=True) if self.tokenizer.encode(text, True) != i]
        wrong += [f"{i}" for i in ids if self.tokenizer.decode(i) != theirs.decode(i)]
        what = f"{len(TEXTS)} texts encoded and decoded, with transformers"
        yield _row("token ids", what, f"{len(wrong)} differ {wrong[:1] or ''}", "0", not wrong)
        if self.tokenizer.chat_template is None:
            return
        chats = [(chat, prompt) for chat in CHATS for prompt in (False, True)]
        ours = [_or_refused(self.tokenizer.render, chat, add_generation_prompt=prompt) for chat, prompt in chats]
        other = [_or_refused(theirs.apply_chat_template, chat, add_generation_prompt=prompt) for chat, prompt in chats]
        wrong = [c for c, a, b in zip(chats, ours, other, strict=True) if (a and a[0]) != (b and b["input_ids"])]
        what = f"ids of {len(chats)} chats ({ours.count(None)} refused), with transformers"
        yield _row("chat template", what, f"{len(wrong)} differ {wrong[:1] or ''}", "0", not wrong)

    def _weights(self) -> Iterator[Row]:
        if "quantization_config" in self.hf_config:
            raise ValueError("the folder's weights are quantized, and are saved in full")
        stored = {name_in_language_model(name) or name: tensor for name, tensor in stored_tensors(self.folder).items()}
        dtype, labels = stored_dtype(self.folder), stored_labels(self.folder)
        model = load_model(self.folder, dtype=dtype, scores=labels)
        if model.source.stacks:
            raise ValueError(
                "the folder stacks the weights of all experts, and each expert's are saved as their own tensors"
            )
        with tempfile.TemporaryDirectory() as temporary:
            saved, exported = Path(temporary) / "saved", Path(temporary) / "exported"
            save_model(model, saved)
            del model
            self.tokenizer.save(saved)
            export_folder(saved, exported)  # compares the logits of what it wrote
            for name, folder in (("save and read back", saved), ("export and read back", exported)):
                written = stored_tensors(folder)
                pairs = [(tensor, stored[n]) for n, tensor in written.items() if n in stored]
                same = sum(_same_bits(a.read(), b.read()) for a, b in pairs)
                what = "tensors equal to the folder's, byte by byte"
                yield _row(name, what, f"{same}", f"{len(written)}", same == len(written))

    def _plain(self) -> Iterator[Row]:
        model = load_model(self.cfg.model, self.device)
        self.margin_16_bit = math.inf if model.mixture else MARGIN_16_BIT  # rounding changes the choice of experts
        # transformers' names are those on disk, except for some experts, which it stacks as we do.
        self.names = {name: model.source.module_name(name, in_whole=False) for name, _ in model.named_parameters()}
        self.logits, self.gradients, loss = self._results(model)
        squares = sum(gradient.square().sum().item() for gradient in self.gradients.values())
        # With AdamW's eps as large as the gradients, an update changes as smoothly as they do, and not by their signs.
        self.eps = (squares / sum(gradient.numel() for gradient in self.gradients.values())) ** 0.5
        _change_by_rounding(model)
        logits, gradients, _ = self._results(model)
        self.noise = _distances(gradients, self.gradients) | _distances({"": logits}, {"": self.logits})
        what, noise = "float32: loss, rounding noise of logits", self.noise[""] / self.logits.norm().item()
        yield _row("plain step", what, f"{loss:.4f}, {noise:.1e}", "finite", math.isfinite(loss + noise))

    @torch.no_grad()
    def _scores(self) -> Iterator[Row]:
        model = load_model(self.folder, self.device, scores=stored_labels(self.folder))
        ours = self._logits(model, self.ids)[-1]
        _change_by_rounding(model)
        noise = _distances({"": self._logits(model, self.ids)[-1]}, {"": ours})
        theirs = self._logits(self._load_theirs("float32"), self.ids)
        theirs = theirs[-1] if labels_tokens(self.hf_config) else theirs
        what = f"of {len(self.ids)} tokens in float32, with transformers"
        yield self._compared("scores", what, {"": ours}, {"": theirs}, noise)

    def _against_transformers(self) -> Iterator[Row]:
        model = self._load_theirs("float32")
        logits, gradients, _ = self._results(model)
        what = f"{len(self.ids)} tokens in float32, with transformers"
        yield self._compared("logits", what, {"": self.logits}, {"": logits})
        what = f"{len(gradients)} of {len(self.names)} tensors in float32, with transformers"
        yield self._compared("gradients", what, self.gradients, gradients)
        yield self._greedy(model)
        del model, logits, gradients
        theirs = self._results(self._load_theirs("bfloat16"))[:2]
        ours = self._results(load_model(self.configure("model.dtype=bfloat16").model, self.device))[:2]
        for name, exact, a, b in zip(("logits", "gradients"), (self.logits, self.gradients), ours, theirs, strict=True):
            ours_off, other = _relative(a, exact), _relative(b, exact)
            result, allowed = f"{ours_off:.1e}; transformers {other:.1e}", self.margin_16_bit * other
            what = "distance to float32, with transformers' distance"
            yield _row(f"{name} in bfloat16", what, result, f"{allowed:.1e}", ours_off <= allowed)

    @torch.no_grad()
    def _greedy(self, model: nn.Module) -> Row:
        """Check that each of our tokens is transformers' likeliest token, or ties with it within the rounding noise."""
        prompt = self.ids[: self.documents.lengths[0]]
        if self.tokenizer.chat_template is not None:
            prompt, _ = self.tokenizer.render([USER], add_generation_prompt=True)
        ours = sample(load_model(self.cfg.model, self.device), [prompt], Sampling(NUM_GREEDY_TOKENS))[0].ids
        logits = self._logits(model, [*prompt, *ours[:-1]])[-len(ours) :]
        gaps = logits.amax(-1) - logits.gather(1, torch.tensor(ours, device=self.device)[:, None])[:, 0]
        tie = 2 * MARGIN * self.noise[""] / self.logits.numel() ** 0.5  # both logits may be off
        same = int((gaps <= tie).long().cumprod(0).sum())
        return _row("greedy tokens", "equal to transformers' in float32", f"{same}", f"{len(ours)}", same == len(ours))

    def _technique(self, name: str, overrides: Sequence[str]) -> Iterator[Row]:
        cfg = self.configure(*overrides)
        if cfg.lora is not None:
            yield self._adapter(name, self.configure(*overrides, "lora.dropout=0"))
        elif any(override.startswith("optimizer.") for override in overrides):
            yield self._update(name, overrides)
        else:
            yield self._compared(name, "gradients, with the plain step", self._gradients(cfg)[1], self.gradients)

    def _adapter(self, name: str, cfg: CheckedConfig) -> Row:
        model, gradients = self._gradients(cfg)
        layers = {n: layer for n, layer in adapted_layers(model).items() if f"{n}.weight" in self.gradients}
        plain, what = self.gradients, "gradients of lora_B, with the plain step"
        if quantized := quantized_weights(model):
            whole = load_model(self.cfg.model, self.device)
            for n, weight in quantized.items():
                whole.get_parameter(n.replace(".base_layer", "")).data = weight.frozen.whole().float()
            logits, plain, _ = self._results(whole)
            what += f" on quantized weights (logits {_relative(logits, self.logits):.0%} off)"
        factors = {f"{n}.lora_B": layer.shape.scaling * layer.lora_A.detach().float() for n, layer in layers.items()}
        of_weight = {n: n.replace("lora_B", "weight") for n in factors}
        expected = {n: plain[of_weight[n]] @ factor.T for n, factor in factors.items()}
        noise = {n: self.noise[of_weight[n]] * factor.norm().item() for n, factor in factors.items()}
        return self._compared(name, what, {n: gradients[n].float() for n in factors}, expected, noise)

    def _update(self, name: str, overrides: Sequence[str]) -> Row:
        rounds = "optimizer.stochastic_rounding=true" in overrides
        lr, dtype = (1e-4, "bfloat16") if rounds else (1.0, "float32")
        cfg = self.configure(*overrides, f"model.dtype={dtype}", f"optimizer.eps={self.eps}")
        if cfg.optimizer.name not in CODE_ERROR:
            raise ValueError(f"the closed form of an update by optimizer.name={cfg.optimizer.name} is not known here.")
        gradients = self._gradients(cfg)[1] if rounds else self.gradients
        moved, start = self._stepped(cfg, lr), load_model(cfg.model, self.device)
        weights = {n: p.detach().float() for n, p in start.named_parameters()}
        expected = {n: -lr * g.float() / (g.float().abs() + self.eps) for n, g in gradients.items()}
        changes = {n: moved[n].float() - weights[n] for n in weights}
        if rounds:  # to one of the two neighbors, without losing small updates; bfloat16 moments are up to 1% off
            w, e, d = (torch.cat([tensors[n].flatten() for n in weights]) for tensors in (weights, expected, changes))
            spacing = torch.exp2(torch.maximum(w + e, w + d).abs().clamp(min=SMALLEST).log2().floor() - 7)
            off = (d - e) / (spacing + e.abs() / 100)
            furthest, lost = off.abs().max().item(), abs((off * e.sign()).mean().item())
            allowed = 5 * 0.5 / len(off) ** 0.5 + 0.01 * (e.abs() / spacing).mean().item()
            result, passed = f"at most {furthest:.3f}, mean {lost:.1e}", furthest <= 1.01 and lost <= allowed
            return _row(name, "bfloat16 spacings off AdamW's closed form", result, f"1.010, {allowed:.1e}", passed)
        noise = {n: (self.noise[n] * lr / self.eps) + EPS * (weights[n] + expected[n]).norm().item() for n in weights}
        coded = {n: CODE_ERROR[cfg.optimizer.name] * expected[n].norm().item() / MARGIN for n in weights}
        noise = {n: noise[n] + coded[n] for n in weights}
        return self._compared(name, "change of the weights, with AdamW's closed form", changes, expected, noise)

    def _timed(self) -> Iterator[Row]:
        command = [*(self.command or ()), "max_steps=3", "save_every=0"]
        with tempfile.TemporaryDirectory() as temporary:
            run = [sys.executable, "-P", "-m", "lean_ft", "run", *command, f"output_dir={temporary}/run"]
            done = subprocess.run(run, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(done.stderr.strip())
            lines = (Path(temporary) / "run" / "metrics.jsonl").read_text().splitlines()
        last = [line for line in map(json.loads, lines) if "step_seconds" in line][-1]
        result = f"{last['step_seconds']:.2f} s, peak {gibibytes(last['peak_memory_bytes'])}"
        yield _row("3 training steps", "time of the last step and peak memory, by leanft run", result, "", True)

    # ----------------------------------------------------------------------------------------------------------------

    def _logits(self, model: nn.Module, ids: Sequence[int]) -> Tensor:
        """Return logits (T, V) in float32, of our model or transformers'."""
        output = model(torch.tensor([ids], device=self.device))
        return getattr(output, "logits", output)[0].float()

    def _results(self, model: nn.Module) -> tuple[Tensor, Tensors, float]:
        """Return the logits of all rows as one text, and gradients (with our parameter names) and loss of the plain
        step."""
        total = 0.0
        for document in self.documents:
            ids, trained = document.ids, document.trained
            labels = torch.from_numpy(ids[1:]).long().masked_fill(~torch.from_numpy(trained[1:]), IGNORED)
            logits = self._logits(model, ids.tolist())[:-1]
            loss = F.cross_entropy(logits, labels.to(self.device), reduction="sum") / self.num_targets
            loss.backward()
            total += loss.item()
        named = {name_in_language_model(name) or name: p.grad for name, p in model.named_parameters()}
        if not isinstance(model, Decoder):
            named = {ours: named.get(theirs, named.get(ours)) for ours, theirs in self.names.items()}
        model.zero_grad()
        with evaluating(model):
            return self._logits(model, self.ids), {n: g for n, g in named.items() if g is not None}, total

    def _load_theirs(self, dtype: str) -> nn.Module:
        head = "SequenceClassification" if gives_scores(self.hf_config) else "CausalLM"
        head = "TokenClassification" if labels_tokens(self.hf_config) else head
        load = getattr(self.transformers, f"AutoModelFor{head}").from_pretrained
        with tempfile.TemporaryDirectory() as copy:
            folder = self.folder
            if gguf_file(folder) is not None:  # transformers' own reader supports fewer GGUF files
                save_model(load_model(folder, dtype=stored_dtype(folder)), copy)
                folder = copy
            try:
                model = load(folder, dtype=getattr(torch, dtype), attn_implementation="eager").to(self.device)
            except Exception as error:
                raise ValueError(f"transformers cannot open the model: {error}") from None
        # transformers drops the gradient of the pad token's embedding, even where that token also ends every turn.
        model.get_input_embeddings().padding_idx = None
        return model

    def _prepared(self, cfg: CheckedConfig) -> tuple[Decoder, list[tuple[Any, bool]]]:
        """Return the model as a recipe prepares it, and its batches, each with a flag for the last."""
        model = load_with_adapter(cfg.model, cfg.lora, self.device, memory=cfg.memory)
        apply_memory(model, cfg.memory, compile=cfg.compile)
        arrangement, objective = arrange(self.documents.lengths, cfg.data, cfg.batch_size), objective_of(cfg.data)
        batches = [collate(arrangement, self.documents, objective, rows) for rows in arrangement.plan(None)]
        return model, [(batch.to(self.device), i == len(batches) - 1) for i, batch in enumerate(batches)]

    def _gradients(self, cfg: CheckedConfig) -> tuple[Decoder, Tensors]:
        model, batches = self._prepared(cfg)
        cross_entropy = CrossEntropy(model, cfg)
        for batch, _ in batches:
            (cross_entropy(model, batch) / self.num_targets).backward()
        return model, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    def _stepped(self, cfg: CheckedConfig, lr: float) -> Tensors:
        """Return the weights after 3 steps on the same rows. Only the 3rd step changes them."""
        model, batches = self._prepared(cfg)
        optimizer, cross_entropy = build_optimizer(model, cfg), CrossEntropy(model, cfg)
        for lr_of_step in (0.0, 0.0, lr):
            optimizer.set_lr(lr_of_step)
            for batch, is_last in batches:
                optimizer.scale(cross_entropy(model, batch) / self.num_targets, last=is_last).backward()
            optimizer.finish_gradients(max_norm=None)
            optimizer.step()
            optimizer.zero_grad()
        return {name: p.detach() for name, p in model.named_parameters()}

    def _compared(
        self, name: str, what: str, ours: Tensors, exact: Tensors, noise: Mapping[str, float] | None = None
    ) -> Row:
        """Return the row of the tensor with the largest error relative to its tolerance."""
        errors = _distances(ours, exact)
        allowed = {n: MARGIN * (noise or self.noise)[n] for n in errors}
        worst = max(errors, key=lambda n: math.inf if math.isnan(errors[n]) else errors[n] / max(allowed[n], SMALLEST))
        size = max(exact[worst].float().norm().item(), SMALLEST)
        passed = ours.keys() == exact.keys() and all(errors[n] <= allowed[n] for n in errors)
        return _row(name, what, f"{errors[worst] / size:.1e} {worst}", f"{allowed[worst] / size:.1e}", passed)


@torch.no_grad()
def _change_by_rounding(model: nn.Module) -> None:
    """Change every weight at random by float32's rounding."""
    generator = torch.Generator(device := next(model.parameters()).device).manual_seed(0)
    for p in model.parameters():
        p.mul_(1 + EPS * torch.randn(p.shape, generator=generator, device=device))


def _row(check: str, compared: str, result: str, allowed: str, passed: bool) -> Row:
    return check, compared, result.strip(), allowed, "ok" if passed else "DIFFERS"


def _or_refused(render: Callable[..., Any], chat: object, **settings: object) -> Any:
    try:
        return render(chat, **settings)
    except Exception:  # the two sides raise different errors
        return None


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (a, b)))


def _distances(ours: Tensors, exact: Tensors) -> dict[str, float]:
    return {n: (ours[n].float() - exact[n].float()).norm().item() for n in exact}


def _relative(ours: Any, exact: Any) -> float:
    """Return the relative distance of a tensor, or the mean over several tensors."""
    ours, exact = (x if isinstance(x, dict) else {"": x} for x in (ours, exact))
    errors = _distances(ours, {n: exact[n] for n in ours})
    return sum(error / max(exact[n].norm().item(), SMALLEST) for n, error in errors.items()) / len(errors)
