"""The frozen model that preferences are measured against, and where its log-probabilities come from.

It is the model that training begins with: that of model.path, whatever checkpoint the run goes on from. So it is loaded,
or its log-probabilities are computed, before `Run` restores a checkpoint.

    cached        two float32 a pair, computed once with the model itself, on disk beside the prepared data
    adapter_off   the model without its adapter: another forward pass a batch, and no memory
    model, nf4    a second model in memory, whole or with its linear layers in 4 bits
    none          zeros

The cache holds a NaN where nothing was computed yet. It is filled in the order in which the first epoch takes its
batches, and no further than the run goes, so a start that is broken off loses nothing, and the first step's margins are
exactly 0: the same products in the same batches. Its key covers the weights and their dtype, the device's type, the
documents as they were cut, and what `loss.ld_alpha` makes of their tokens. It draws no random number.

Source: our own; TRL and torchtune keep whole columns of log-probabilities, under no key.
"""

import hashlib
import json
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lean_ft.data import Batches, EvalBatches, PairBatch
from lean_ft.data.cache import cache_folder, growing_array
from lean_ft.data.prepare import hash_of
from lean_ft.log import say
from lean_ft.losses import AnswerLogProbs
from lean_ft.models import Decoder
from lean_ft.peft import AdaptedLayer, adapted_layers, adapter_off
from lean_ft.shapes_only import stage
from lean_ft.training.frozen_model import load_frozen
from lean_ft.training.progress import shown

Reference = Callable[[PairBatch], Tensor]
"""Of a batch on the model's device the log-probabilities (P, 2), without gradients."""

FORMAT = 1  # of the cache's values; part of their key
SAMPLED_VALUES = 4096  # of every tensor, in the key; beside them the sum of all its bits


def load_reference(
    cfg: Any, model: Decoder, log_probs: AnswerLogProbs, batches: Batches, held_out: EvalBatches | None
) -> Reference:
    """Returns the reference that `cfg.reference` asks for and `cfg.loss` needs, and says which.

    `model` is the one that is about to train, with the memory settings applied; `log_probs` is of its settings.
    Raises ValueError where the loss reads no reference but one is asked for, or the model has no adapter to be off.
    """
    kind, why = choose_kind(cfg)
    if stage() is None:
        say("reference", f"{kind}{why}")
    device = model.output_weight.device
    if kind == "none":
        return lambda batch: torch.zeros(batch.num_pairs, 2, device=device)
    if kind in ("model", "nf4"):
        frozen = load_frozen(cfg.model, device, nf4=kind == "nf4", memory=cfg.memory, compile=cfg.compile)
        return torch.no_grad()(lambda batch: log_probs(frozen, batch).log_probs)

    @torch.no_grad()
    def without_adapter(batch: PairBatch) -> Tensor:
        if not adapted_layers(model):
            return log_probs(model, batch).log_probs
        with adapter_off(model):
            return log_probs(model, batch).log_probs

    if kind == "adapter_off":
        return without_adapter
    if stage() is not None:
        return lambda batch: torch.zeros(batch.num_pairs, 2, device=device)
    table = _filled(cfg, model, without_adapter, batches, held_out).to(device)
    return lambda batch: table[batch.pairs]


def choose_kind(cfg: Any) -> tuple[str, str]:
    """The kind of reference, and why if it was not the user's choice. Raises ValueError as `load_reference` does."""
    asked = cfg.reference.kind
    if not cfg.loss.needs_reference:
        if asked not in ("auto", "none"):
            raise ValueError(
                f"reference.kind={asked}, and the loss {cfg.loss.name} reads no reference. Leave it out, or choose another "
                "loss.name."
            )
        return "none", f", as loss.name={cfg.loss.name} reads none"
    if asked == "adapter_off" and cfg.lora is None:
        raise ValueError(
            "reference.kind=adapter_off is for a model with an adapter, and lora is null: all parameters train, and the "
            "model that it began with is gone. Set reference.kind=cached or model, or turn lora on."
        )
    if asked == "none":
        return asked, f": loss.name={cfg.loss.name} measures the answers against nothing"
    if asked != "auto":
        return asked, ""
    if cfg.lora is not None and cfg.epochs <= 1:
        return "adapter_off", ", which takes no memory, and no more time than to compute each answer beforehand"
    return "cached", ", each answer's log-probability once for all epochs, and no second model in memory"


def _filled(
    cfg: Any,
    model: Decoder,
    reference: Reference,
    batches: Batches,
    held_out: EvalBatches | None,
) -> Tensor:
    """The cached values (pairs, 2): those trained on, then those held out, as far as the run is going to need them."""
    layouts = [batches.layout, *([held_out.layout] if held_out is not None else [])]
    num_pairs = sum(len(layout.starts) // 2 for layout in layouts)
    settings = [cfg.model.dtype, str(cfg.loss.ld_alpha), model.output_weight.device.type]
    key = hash_of(FORMAT, _weights_digest(model), [layout.content() for layout in layouts], settings)
    values = torch.from_numpy(growing_array(cache_folder(cfg.data.cache_dir), f"reference-{key}", 2 * num_pairs))
    values = values.view(-1, 2)  # what is written to it lies in the file
    device = model.output_weight.device

    num_batches = batches.batches_per_epoch
    if cfg.max_steps is not None:
        num_batches = min(num_batches, cfg.max_steps * cfg.gradient_accumulation_steps)
    all_batches: Any = chain(batches.first(num_batches), held_out or ())
    total = num_batches + len(held_out or ())
    num_computed = 0
    for batch in shown(all_batches, total, "reference"):
        if values[batch.pairs].isnan().any():
            values[batch.pairs] = reference(batch.to(device)).float().cpu()
            num_computed += batch.num_pairs
    say(
        "reference",
        f"log-probabilities of {num_computed:,} pairs computed, the others of {num_pairs:,} kept or not needed",
    )
    return values


def _weights_digest(model: Decoder) -> str:
    """Tells the frozen model from others: what config.json says, the sum of every tensor's bits, and some of its values."""
    digest = hashlib.blake2b(json.dumps(model.hf_config, sort_keys=True, default=str).encode(), digest_size=16)
    for name, module in model.named_modules():
        if isinstance(module, AdaptedLayer):
            continue  # its own tensors are the adapter's
        for own, tensor in chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False)):
            flat = tensor.detach().flatten()
            bits = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
            some = bits[:: max(1, len(bits) // SAMPLED_VALUES)].cpu().numpy()
            said = f"{name} {own} {tensor.dtype} {list(tensor.shape)} {int(bits.sum(dtype=torch.int64))}"
            digest.update(said.encode())
            digest.update(some.tobytes())
    return digest.hexdigest()
