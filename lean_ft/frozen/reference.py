"""The frozen reference model of preference and policy losses, and the cache of its log-probabilities.

The reference is the model at `model.path`, also if the run resumes from a checkpoint. So it is loaded, or its
log-probabilities are computed, before `Run` restores a checkpoint.

    cached        two float32 per pair, computed once with the model itself, on disk with the prepared data
    adapter_off   the model without its adapter: one more forward pass per batch, no memory
    model, nf4    a second model in memory, in full or with 4-bit linear layers
    streamed      a second model in host memory; its layers are copied to the GPU one at a time
    none          zeros

A NaN in the cache marks a value that is not computed yet. The cache is filled in the batch order of the first epoch, up
to the run's last step, so an interrupted start can continue. The first step's margins are exactly 0, since the cache
uses the same batches and matrix products. The cache key covers the weights and their dtype, the device type, the
truncated documents, and `loss.ld_alpha`. Filling the cache draws no random numbers.

If a loss uses mismatched prompts and completions (`UnpairedBatch.mismatched`), these are drawn with the batches. The
cache then has a value for each epoch's mismatched pairs, and its key includes the seed and the batch size. Ranks divide
the batches among them to fill the cache, and each rank writes all values to its disk. A second model is sharded like
the first.

Source: our own; TRL and torchtune store whole columns of log-probabilities without a key.
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
from lean_ft.data.keys import hash_of
from lean_ft.data.unpaired import Unpaired
from lean_ft.frozen.frozen_model import load_frozen
from lean_ft.losses import AnswerLogProbs, TokenLogProbs
from lean_ft.models import Decoder
from lean_ft.models.families import own_row
from lean_ft.peft import adapter_off, base_modules, has_adapter, quantize_as_loaded
from lean_ft.settings import (
    AnswerDataConfig,
    AnswersConfig,
    GenerationConfig,
    PreferenceLossConfig,
    ReferencedLossConfig,
)
from lean_ft.system.cache import cache_folder, growing_array
from lean_ft.system.host_link import open_link
from lean_ft.system.log import say
from lean_ft.system.passes import evaluating
from lean_ft.system.shards import ALONE, Ranks, local, part_of
from lean_ft.training.progress import shown
from lean_ft.training.records import facts_that_ranks_share

Reference = Callable[[PairBatch], Tensor]
"""Returns log-probabilities (P, 2) of a batch on the model's device, without gradients; (P, 1) for an
`UnpairedBatch`."""

SECOND_MODELS = ("model", "streamed", "nf4")  # kinds with a second model
FORMAT = 1  # version of the cache format; part of the key
SAMPLED_VALUES = 4096  # values of each tensor in the key, next to the sum of all its bits
SLICE_VALUES = 2**22  # values summed at a time: 32 MiB as int64
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes


def load_reference(
    cfg: AnswersConfig,
    model: Decoder,
    log_probs: AnswerLogProbs,
    batches: Batches | None = None,
    held_out: EvalBatches | None = None,
    ranks: Ranks = ALONE,
) -> Reference:
    """Return the reference for `cfg.reference` and the recipe's loss, and log its kind.

    model: the model to train, sharded over `ranks` and with the memory settings applied; log_probs: built from the same
    settings; batches: the training batches to cache, or None for sampled completions.
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
    assert batches is not None
    table = _filled(cfg, model, without_adapter, batches, held_out, ranks).to(device)
    return lambda batch: table[batch.pairs]


def load_policy_reference(
    cfg: AnswersConfig, model: Decoder, log_probs: TokenLogProbs, ranks: Ranks = ALONE
) -> Callable[[PolicyBatch], Tensor] | None:
    """Return a function that computes the reference's log-probabilities of sampled tokens, (B, A), without gradients.

    Return None if the recipe's loss does not use a reference. `auto` means adapter_off with an adapter, else a second
    model: completions are new in every round, so caching does not help.
    """
    kind, why = choose_kind(cfg)
    if kind == "none":
        return None
    say("reference", f"{kind}{why}")
    if kind in SECOND_MODELS:
        return _of_second_model(cfg, kind, model.device, log_probs, ranks)
    return _without_adapter(model, log_probs)


def _of_second_model(
    cfg: AnswersConfig, kind: str, device: torch.device, log_probs: Callable[..., Any], ranks: Ranks
) -> Callable[[Any], Tensor]:
    link = open_link(device, "reference.kind=streamed", "reference.kind=model") if kind == "streamed" else None
    quantize = quantize_as_loaded("nf4" if kind == "nf4" else "none")
    frozen = load_frozen(cfg.model, device, cfg, ranks, link, quantize=quantize)

    @torch.no_grad()
    def ask(batch: Any) -> Tensor:
        values = log_probs(frozen, batch).log_probs
        ranks.gather_no_more(frozen)  # no backward pass frees the gathered weights
        return values

    return ask


def _without_adapter(model: Decoder, log_probs: Callable[..., Any]) -> Callable[[Any], Tensor]:
    def ask(batch: Any) -> Tensor:
        with evaluating(model), adapter_off(model) if has_adapter(model) else nullcontext():
            batch.encode_once(model)  # the policy's pass follows
            return log_probs(model, batch).log_probs

    return ask


def choose_kind(cfg: AnswersConfig) -> tuple[str, str]:
    """Return the kind of reference, and the reason if the user did not choose it."""
    choice, loss = cfg.reference.kind, cfg.needed(ReferencedLossConfig)
    setting = f"loss.name={loss.name}" if isinstance(loss, PreferenceLossConfig) else "loss.kl_weight=0"
    if not loss.needs_reference:
        return "none", f", because {setting} uses no reference model"
    if choice == "none":
        return choice, ", zeros take the place of the reference's log-probabilities"
    if choice != "auto":
        return choice, ""
    if cfg.group(GenerationConfig) is not None:
        return ("model" if cfg.lora is None else "adapter_off"), ""
    if cfg.lora is not None and cfg.epochs <= 1:
        return "adapter_off", ", which takes no memory, and with one epoch no more time than a cache"
    return "cached", ", computed once for all epochs, with no second model in memory"


def _settings_of_values(
    cfg: AnswersConfig, data: AnswerDataConfig, loss: ReferencedLossConfig, device_type: str, num_epochs: int
) -> list[Any]:
    """The settings that the values depend on. Mismatched completions follow the order of the batches."""
    ld_alpha = loss.ld_alpha if isinstance(loss, PreferenceLossConfig) else 1.0
    settings: list[Any] = [str(ld_alpha), device_type]
    if loss.needs_mismatched:
        order = cfg.seed if data.shuffle else None
        settings += [order, cfg.batch_size, data.batch_tokens, data.packing, num_epochs]
    return settings


def _filled(
    cfg: AnswersConfig,
    model: Decoder,
    reference: Reference,
    batches: Batches,
    held_out: EvalBatches | None,
    ranks: Ranks,
) -> Tensor:
    """Fill the cache as far as the run needs it, and return its values (pairs, 2): training pairs, then held-out pairs.

    For single completions the shape is (completions, 1), followed by the mismatched ones if the loss needs them.
    """
    ranks.check_same(facts_that_ranks_share(cfg, batches))  # before the first collective operation
    columns = [part.layout.columns for part in (batches, held_out) if part is not None]
    sides, objective = batches.layout.arrangement.sides, batches.layout.objective
    num_pairs = columns[0].num_in_all // sides
    data, loss = cfg.needed(AnswerDataConfig), cfg.needed(ReferencedLossConfig)
    num_epochs = math.ceil(cfg.epochs) if loss.needs_mismatched else 1
    if loss.needs_mismatched:
        assert isinstance(objective, Unpaired)
        num_pairs = objective.num_numbers(columns[0], num_epochs)
    settings = [cfg.model.dtype, *_settings_of_values(cfg, data, loss, model.device.type, num_epochs)]
    key = hash_of(FORMAT, _weights_digest(model, ranks), [part.content() for part in columns], settings)
    kept = torch.from_numpy(growing_array(cache_folder(data.cache_dir), f"reference-{key}", sides * num_pairs))
    kept = kept.view(-1, sides)  # memory-mapped: writes go to the file
    device = model.device

    num_batches = batches.batches_per_epoch * num_epochs
    if cfg.max_steps is not None:
        num_batches = min(num_batches, cfg.max_steps * cfg.gradient_accumulation_steps)
    all_batches: Any = chain(batches.first(num_batches), held_out or ())
    total = num_batches + len(held_out or ())
    # Merge the values of all ranks first: each rank writes to its file, which other ranks may have mapped too.
    values = ranks.highest_of(kept.nan_to_num(nan=-math.inf))
    is_missing = values.isinf()
    parts = (
        part
        for batch in shown(all_batches, total, "reference")
        for part in ((batch, batch.mismatched) if loss.needs_mismatched else (batch,))
    )
    missing = (part for part in parts if is_missing[part.pairs].any())
    num_computed = 0
    while some := list(islice(missing, ranks.size)):
        for batch, _ in ranks.share(some):
            values[batch.pairs] = kept[batch.pairs] = reference(batch.to(device)).float().cpu()
        for batch in some:  # a later epoch has its texts again, in other batches
            num_computed += int(is_missing[batch.pairs][:, 0].sum())
            is_missing[batch.pairs] = False
    ranks.gather_no_more(model)
    values = ranks.highest_of(values)
    is_missing = values.isinf()
    if ranks.size > 1:
        kept[~is_missing] = values[~is_missing]
    say(
        "reference",
        f"computed log-probabilities of {num_computed:,} of {num_pairs:,} "
        f"{'mismatched and other ' * loss.needs_mismatched}{objective.unit}; the others are cached or not needed",
    )
    return values.masked_fill(is_missing, math.nan)


def _weights_digest(model: Decoder, ranks: Ranks) -> str:
    """Fingerprint of the frozen weights: config.json, the sum of each tensor's bits, and some of its values.

    The fingerprint is the same on all ranks, and for any number of ranks.
    """
    digest = hashlib.blake2b(json.dumps(model.source.config, sort_keys=True, default=str).encode(), digest_size=16)
    if model.vision is not None:
        digest.update(repr(model.config.vision).encode())
    if own_row(model.source.config["model_type"]) is not None:  # the user may edit the row
        digest.update(repr(model.config).encode())
    samples: list[Tensor] = []  # int64
    for name, module in base_modules(model):
        for tensor_name, tensor in chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False)):
            part = part_of(tensor)
            size = math.prod(part.shape)
            digest.update(f"{name} {tensor_name} {tensor.dtype} {list(part.shape)}".encode())
            bits = part.values.flatten().view(_INTEGERS[tensor.element_size()])
            step = max(1, size // SAMPLED_VALUES)
            sampled = torch.zeros(-(-size // step) + 1, dtype=torch.int64, device=bits.device)
            if local(tensor) is not tensor or ranks.shard == 0:  # a replicated tensor counts once
                # In slices: a sum with another dtype first converts its input, which takes 4x a bfloat16 tensor.
                sampled[-1] = sum(s.sum(dtype=torch.int64) for s in bits.split(SLICE_VALUES))
                # The sampled values that are on this rank. Its values are in runs that start `stride` apart.
                place = torch.arange(0, size, step, device=bits.device) - part.first
                run, stride = part.run or bits.numel(), part.stride or size
                is_here = (place >= 0) & (place % stride < run) & (place // stride * run < bits.numel())
                sampled[:-1][is_here] = bits[(place // stride * run + place % stride)[is_here]].to(torch.int64)
            samples.append(sampled)
    digest.update(ranks.sum_shards(torch.cat(samples)).cpu().numpy().tobytes())
    return digest.hexdigest()
