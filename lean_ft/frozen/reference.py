"""The frozen model that preferences are measured against, and where its log-probabilities come from.

It is the model that training begins with: that of model.path, whatever checkpoint the run goes on from. So it is loaded,
or its log-probabilities are computed, before `Run` restores a checkpoint.

    cached        two float32 a pair, computed once with the model itself, on disk beside the prepared data
    adapter_off   the model without its adapter: another forward pass a batch, and no memory
    model, nf4    a second model in memory, whole or with its linear layers in 4 bits
    streamed      a second model in the host's memory, whose layers travel to the GPU as they compute
    none          zeros

The cache holds a NaN where nothing was computed yet. It is filled in the order in which the first epoch takes its
batches, and no further than the run goes, so a start that is broken off loses nothing, and the first step's margins are
exactly 0: the same products in the same batches. Its key covers the weights and their dtype, the device's type, the
documents as they were cut, and what `loss.ld_alpha` makes of their tokens. It draws no random number.

Where a loss looks at prompts with answers of others (`UnpairedBatch.mismatched`), which answers these are is drawn with the
batches. The cache then has a value for each of an epoch's, its key the seed and the rows of a batch as well.
Many ranks share out the batches to fill it, and each keeps on its disk what any of them found. A second model is cut over
them as the first is.

Source: our own; TRL and torchtune keep whole columns of log-probabilities, under no key.
"""

import hashlib
import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from lean_ft.data import Batches, EvalBatches, PairBatch, PolicyBatch
from lean_ft.data.cache import cache_folder, growing_array
from lean_ft.data.prepare import hash_of
from lean_ft.data.unpaired import Unpaired
from lean_ft.frozen.frozen_model import load_frozen
from lean_ft.losses import AnswerLogProbs, TokenLogProbs
from lean_ft.models import Decoder
from lean_ft.peft import AdaptedLayer, TrainedRows, adapter_off, has_adapter
from lean_ft.settings import GenerationConfig, ParallelConfig
from lean_ft.system.host_link import open_link
from lean_ft.system.log import say
from lean_ft.system.shapes_only import stage
from lean_ft.system.shards import ALONE, Ranks, local, part_of
from lean_ft.training.progress import shown
from lean_ft.training.run_directory import facts_that_ranks_share

Reference = Callable[[PairBatch], Tensor]
"""Of a batch on the model's device the log-probabilities (P, 2), without gradients; (P, 1) of an `UnpairedBatch`."""

SECOND_MODELS = ("model", "streamed", "nf4")  # the kinds that are
FORMAT = 1  # of the cache's values; part of their key
SAMPLED_VALUES = 4096  # of every tensor, in the key; beside them the sum of all its bits
SLICE_VALUES = 2**22  # summed at a time: 32 MiB as int64
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # of as many bytes


def load_reference(
    cfg: Any,
    model: Decoder,
    log_probs: AnswerLogProbs,
    batches: Batches | None = None,
    held_out: EvalBatches | None = None,
    ranks: Ranks = ALONE,
) -> Reference:
    """Returns the reference that `cfg.reference` asks for and `cfg.loss` needs, and says which.

    `model` is the one that is about to train, with the memory settings applied and cut over `ranks`; `log_probs` is of its
    settings. `batches` are what is cached; where the answers are sampled there are none.
    """
    kind, why = choose_kind(cfg)
    say("reference", f"{kind}{why}")
    device = model.device
    if kind == "none":
        return lambda batch: torch.zeros(batch.answer_tokens.shape, device=device)
    if kind in SECOND_MODELS:
        return _of_second_model(cfg, kind, device, log_probs, ranks)
    without_adapter = _without_adapter(model, log_probs)
    if kind == "adapter_off":
        return without_adapter
    if stage() is not None:
        return lambda batch: torch.zeros(batch.answer_tokens.shape, device=device)
    assert batches is not None
    table = _filled(cfg, model, without_adapter, batches, held_out, ranks).to(device)
    return lambda batch: table[batch.pairs]


def load_policy_reference(
    cfg: Any, model: Decoder, log_probs: TokenLogProbs, ranks: Ranks = ALONE
) -> Callable[[PolicyBatch], Tensor] | None:
    """Returns what gives the reference's log-probabilities of sampled tokens, (B, A), without gradients; None where
    `cfg.loss` measures no divergence from it.

    `auto` is adapter_off for an adapter, and else a second model: answers are new in every round, so nothing is cached.
    """
    kind, why = choose_kind(cfg)
    if kind == "none":
        return None
    say("reference", f"{kind}{why}")
    if kind in SECOND_MODELS:
        return _of_second_model(cfg, kind, model.device, log_probs, ranks)
    return _without_adapter(model, log_probs)


def _of_second_model(cfg: Any, kind: str, device: torch.device, log_probs: Callable[..., Any], ranks: Ranks) -> Any:
    link = open_link(device, "reference.kind=streamed", "reference.kind=model") if kind == "streamed" else None
    frozen = load_frozen(
        cfg.model,
        device,
        nf4=kind == "nf4",
        link=link,
        memory=cfg.memory,
        compile=cfg.compile,
        parallel=cfg.group(ParallelConfig),
        ranks=ranks,
    )

    @torch.no_grad()
    def ask(batch: Any) -> Tensor:
        values = log_probs(frozen, batch).log_probs
        ranks.gather_no_more(frozen)  # as no backward pass does
        return values

    return ask


def _without_adapter(model: Decoder, log_probs: Callable[..., Any]) -> Any:
    @torch.no_grad()
    def ask(batch: Any) -> Tensor:
        with adapter_off(model) if has_adapter(model) else nullcontext():
            return log_probs(model, batch).log_probs

    return ask


def choose_kind(cfg: Any) -> tuple[str, str]:
    """The kind of reference, and why if it was not the user's choice."""
    asked, loss = cfg.reference.kind, cfg.loss
    if not loss.needs_reference:
        unread = "loss.kl_weight=0" if hasattr(loss, "kl_weight") else f"loss.name={loss.name}"
        return "none", f", as with {unread} nothing reads it"
    if asked == "none":
        return asked, f": loss.name={loss.name} measures the answers against nothing"
    if asked != "auto":
        return asked, ""
    if isinstance(getattr(cfg, "generation", None), GenerationConfig):
        return ("model" if cfg.lora is None else "adapter_off"), ""
    if cfg.lora is not None and cfg.epochs <= 1:
        return "adapter_off", ", which takes no memory, and no more time than to compute each answer beforehand"
    return "cached", ", each answer's log-probability once for all epochs, and no second model in memory"


def _filled(
    cfg: Any,
    model: Decoder,
    reference: Reference,
    batches: Batches,
    held_out: EvalBatches | None,
    ranks: Ranks,
) -> Tensor:
    """The cached values (pairs, 2): those trained on, then those held out, as far as the run is going to need them; of
    single answers (answers, 1), with those of mismatched ones behind them where the loss needs such."""
    ranks.check_same(facts_that_ranks_share(cfg, batches))  # before they compute together
    layouts = [batches.layout, *([held_out.layout] if held_out is not None else [])]
    sides = batches.layout.sides
    num_pairs = sum(len(layout.starts) // sides for layout in layouts)
    settings = [cfg.model.dtype, str(getattr(cfg.loss, "ld_alpha", 1.0)), model.device.type]
    num_epochs, needs_mismatched = 1, getattr(cfg.loss, "needs_mismatched", False)
    if needs_mismatched:
        num_epochs, objective = math.ceil(cfg.epochs), batches.layout.objective
        assert isinstance(objective, Unpaired)
        num_pairs = objective.num_numbers(batches.layout, num_epochs)
        settings += [
            cfg.seed if cfg.data.shuffle else None,
            cfg.batch_size,
            cfg.data.batch_tokens,
            cfg.data.packing,
            num_epochs,
        ]
    key = hash_of(FORMAT, _weights_digest(model, ranks), [layout.content() for layout in layouts], settings)
    kept = torch.from_numpy(growing_array(cache_folder(cfg.data.cache_dir), f"reference-{key}", sides * num_pairs))
    kept = kept.view(-1, sides)  # what is written to it lies in the file
    device = model.device

    num_batches = batches.batches_per_epoch * num_epochs
    if cfg.max_steps is not None:
        num_batches = min(num_batches, cfg.max_steps * cfg.gradient_accumulation_steps)
    all_batches: Any = chain(batches.first(num_batches), held_out or ())
    total = num_batches + len(held_out or ())
    # All ranks have to see the same, while each of them writes to a file that others may have mapped as well.
    values = ranks.highest_of(kept.nan_to_num(nan=-math.inf))
    is_missing = values.isinf()
    parts = (
        part
        for batch in shown(all_batches, total, "reference")
        for part in ((batch, batch.mismatched) if needs_mismatched else (batch,))
    )
    missing = (part for part in parts if is_missing[part.pairs].any())
    num_computed = 0
    while some := list(islice(missing, ranks.size)):
        for batch, _ in ranks.share(some):
            values[batch.pairs] = kept[batch.pairs] = reference(batch.to(device)).float().cpu()
        num_computed += sum(batch.num_pairs for batch in some)
    ranks.gather_no_more(model)
    values = ranks.highest_of(values)
    is_missing = values.isinf()
    if ranks.size > 1:
        kept[~is_missing] = values[~is_missing]
    say(
        "reference",
        f"log-probabilities of {num_computed:,} {batches.layout.objective.unit} computed, the others of {num_pairs:,} kept or "
        "not needed",
    )
    return values.masked_fill(is_missing, math.nan)


def _weights_digest(model: Decoder, ranks: Ranks) -> str:
    """Tells the frozen model from others: what config.json says, the sum of every tensor's bits, and some of its values.
    The same on all ranks, however many they are."""
    digest = hashlib.blake2b(json.dumps(model.source.config, sort_keys=True, default=str).encode(), digest_size=16)
    found: list[Tensor] = []  # int64
    for name, module in model.named_modules():
        if isinstance(module, AdaptedLayer | TrainedRows):
            continue  # its own tensors are the adapter's
        for own, tensor in chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False)):
            part = part_of(tensor)
            size = math.prod(part.shape)
            digest.update(f"{name} {own} {tensor.dtype} {list(part.shape)}".encode())
            bits = part.values.flatten().view(_INTEGERS[tensor.element_size()])
            step = max(1, size // SAMPLED_VALUES)
            sampled = torch.zeros(-(-size // step) + 1, dtype=torch.int64, device=bits.device)
            if local(tensor) is not tensor or ranks.shard == 0:  # of a tensor that is not cut each rank has all
                # In slices: a sum in another type begins with a copy in it, four times a bfloat16 tensor.
                sampled[-1] = sum(s.sum(dtype=torch.int64) for s in bits.split(SLICE_VALUES))
                # Of the values sampled those that are here, in runs of which each begins a stride behind the one before.
                place = torch.arange(0, size, step, device=bits.device) - part.first
                run, stride = part.run or bits.numel(), part.stride or size
                is_here = (place >= 0) & (place % stride < run) & (place // stride * run < bits.numel())
                sampled[:-1][is_here] = bits[(place // stride * run + place % stride)[is_here]].to(torch.int64)
            found.append(sampled)
    digest.update(ranks.sum_shards(torch.cat(found)).cpu().numpy().tobytes())
    return digest.hexdigest()
