"""Any two settings work together, or are refused with the reason.

Two steps of the recipe's loop with both settings are compared with two plain steps: all logits at once, torch's
cross-entropy, torch's clipping, unmodified layers, and the update rule after backward. Only the rule is the same code;
it has its own tests. Settings that need a GPU are tested twice: refused on this device, and over a link with the latest
possible copies.
"""

import copy
import itertools
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lean_ft import memory, optim
from lean_ft.losses import linear_cross_entropy, loss_chunk_tokens
from lean_ft.memory import apply_memory
from lean_ft.models.config_json import decoder_config
from lean_ft.models.decoder import Decoder
from lean_ft.peft import apply_lora
from lean_ft.settings import LoRAConfig, LossConfig, MemoryConfig
from tests.late_link import LateLink
from tests.optim.tiny_training import build

# Settings that change no number.
SILENT: dict[str, dict[str, Any]] = {
    "full": {"memory.activation_checkpointing": "full"},
    "every_n": {"memory.activation_checkpointing": "every_n"},
    "selective": {"memory.activation_checkpointing": "selective"},
    "selective products": {"memory.activation_checkpointing": "selective", "memory.selective_keeps": "products"},
    "tiles": {"memory.tile_mlp": 3},
    "chunks": {"memory.loss_chunk_tokens": 7},
    "sums": {"memory.loss_accumulation_dtype": "weight"},
    "separate": {"memory.tied_gradient": "separate"},
    "host": {"memory.tied_gradient": "host"},
    "offload": {"memory.activation_offload": True},
    "in backward": {"optimizer.in_backward": True},
    "streamed": {"optimizer.state": "streamed"},
    "micro-batches": {"micro_batches": 2},
}
# Settings that the plain steps use too.
NUMERIC: dict[str, dict[str, Any]] = {
    "adamw_8bit": {"optimizer.name": "adamw_8bit"},
    "adamw_8bit_torchao": {"optimizer.name": "adamw_8bit_torchao"},
    "adamw_4bit": {"optimizer.name": "adamw_4bit"},
    "adafactor": {"optimizer.name": "adafactor"},
    "muon": {"optimizer.name": "muon"},
    "apollo_mini": {"optimizer.name": "apollo_mini"},
    "sgd": {"optimizer.name": "sgd"},
    "update clipping": {"optimizer.update_clipping": True},
    "clipping": {"clip_grad_norm": 0.01},
    "smoothing": {"loss.label_smoothing": 0.2},
    "z-loss": {"loss.z_loss": 0.01},
    "lora": {"lora.rank": 8},
    "dora": {"lora.rank": 8, "lora.dora": True},
    "embeddings": {"lora.rank": 8, "memory.frozen_embeddings": "host"},
    "rounding": {"optimizer.stochastic_rounding": True},
}
SETTINGS = {**SILENT, **NUMERIC}
COMPILED = [("selective products", "lora"), ("tiles", "in backward"), ("offload", "dora")]
REFUSED = {
    frozenset(("in backward", "clipping")): "needs every gradient before any update",
    frozenset(("update clipping", "adamw_8bit_torchao")): "needs AdamW.s second moment",
    frozenset(("update clipping", "adafactor")): "adafactor already limits its updates",
    frozenset(("update clipping", "muon")): "needs AdamW.s second moment",
    frozenset(("update clipping", "apollo_mini")): "needs AdamW.s second moment",
    frozenset(("update clipping", "sgd")): "needs AdamW.s second moment",
    frozenset(("rounding", "lora")): "is for bfloat16 weights, but .*lora_A is torch.float32",
    frozenset(("rounding", "dora")): "is for bfloat16 weights, but .*lora_A is torch.float32",
    frozenset(("rounding", "embeddings")): "is for bfloat16 weights, but .*lora_A is torch.float32",
}
# Tolerances for sums in another order: a bfloat16 rounding step is as large as an update, and a change of a gradient by
# 1e-6 turns Muon's direction, five bfloat16 products, by up to 1.3% per step.
ROUNDING = {"rounding": 0.4, "muon": 0.05}
LR, STEPS = 3e-3, 2
# By default each setting that changes numbers with one that changes none, and the refused pairs; all others are long.
DIAGONAL = {*zip(itertools.cycle(SILENT), NUMERIC)} | {tuple(sorted(pair, key=[*SETTINGS].index)) for pair in REFUSED}
PAIRS = [
    pytest.param(pair, marks=[pytest.mark.long] * (pair not in DIAGONAL))
    for pair in itertools.combinations(SETTINGS, 2)
]


@cache
def model_of(dtype: torch.dtype) -> Decoder:
    """A small tied decoder whose embedding and feed-forward layers are large enough for 8-bit state."""
    sizes = {"hidden_size": 32, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    fields = {"model_type": "llama", "vocab_size": 160, "num_hidden_layers": 2, "rms_norm_eps": 1e-6, **sizes}
    model = Decoder(decoder_config({**fields, "tie_word_embeddings": True, "max_position_embeddings": 64}))
    generator = torch.Generator().manual_seed(0)
    for param in model.parameters():
        nn.init.normal_(param, std=0.2, generator=generator) if param.ndim == 2 else nn.init.ones_(param)
    return model.to(dtype)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 160, (4, 12), generator=generator)
    labels = torch.randint(0, 160, ids.shape, generator=generator)
    labels[0, 3:] = labels[2, :5] = -100
    return ids, labels


def group(settings: dict[str, Any], name: str) -> dict[str, Any]:
    return {key.partition(".")[2]: value for key, value in settings.items() if key.startswith(name + ".")}


def started(settings: dict[str, Any]) -> Decoder:
    dtype = torch.bfloat16 if settings.get("optimizer.stochastic_rounding") else torch.float32
    model = copy.deepcopy(model_of(dtype))
    torch.manual_seed(3)  # for stochastic rounding and the adapter
    if adapter := group(settings, "lora"):
        apply_lora(model, LoRAConfig.model_validate(adapter))
        for name, param in model.named_parameters():
            if name.endswith("lora_B"):  # if it were zero, A would get no gradient
                nn.init.normal_(param, std=0.2)
    return model


def optimizer_of(model: Decoder, settings: dict[str, Any]) -> optim.Optimizer:
    optimizer_cfg = {"weight_decay": 0.1, **group(settings, "optimizer")}
    optimizer = build(model, optimizer_cfg, clip_grad_norm=settings.get("clip_grad_norm"))
    optimizer.set_lr(LR)
    return optimizer


def recipe_steps(settings: dict[str, Any], compile: bool = False) -> Decoder:
    model, (ids, labels) = started(settings), batch()
    memory_cfg = MemoryConfig.model_validate(group(settings, "memory"))
    loss_cfg = LossConfig.model_validate(group(settings, "loss"))
    apply_memory(model, memory_cfg, compile=compile)
    optimizer = optimizer_of(model, settings)
    parts = settings.get("micro_batches", 1)
    for _ in range(STEPS):
        for i, (some_ids, some_labels) in enumerate(zip(ids.chunk(parts), labels.chunk(parts), strict=True)):
            loss = linear_cross_entropy(
                model(some_ids, return_hidden=True),
                model.output_weight,
                some_labels,
                chunk_tokens=loss_chunk_tokens(model, memory_cfg.loss_chunk_tokens),
                accumulation_dtype=memory_cfg.loss_accumulation_dtype,
                label_smoothing=loss_cfg.label_smoothing,
                z_loss=loss_cfg.z_loss,
            )
            optimizer.scale(loss / int((labels >= 0).sum()), last=i == parts - 1).backward()
        optimizer.finish_gradients(settings.get("clip_grad_norm"))
        optimizer.step()
        optimizer.zero_grad()
    return model


def plain_steps(settings: dict[str, Any]) -> Decoder:
    model, (ids, labels) = started(settings), batch()
    smoothing, z_loss = settings.get("loss.label_smoothing", 0.0), settings.get("loss.z_loss", 0.0)
    optimizer = optimizer_of(model, {key: value for key, value in settings.items() if key != "clip_grad_norm"})
    for _ in range(STEPS):
        logits, targets = model(ids).flatten(0, 1).float(), labels.flatten()
        loss = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)
        loss = loss + z_loss * logits[targets >= 0].logsumexp(1).square().sum()
        (loss / (targets >= 0).sum()).backward()
        if "clip_grad_norm" in settings:
            nn.utils.clip_grad_norm_(model.parameters(), settings["clip_grad_norm"])
        optimizer.step()
        optimizer.zero_grad()
    return model


@cache
def plain_result(names: tuple[str, ...]) -> Decoder:
    return plain_steps({key: value for name in names for key, value in NUMERIC[name].items()})


def check(names: tuple[str, ...], model: Decoder, bound: float) -> None:
    numeric = tuple(name for name in names if name in NUMERIC)
    plain = plain_result(numeric)
    start = started({key: value for name in numeric for key, value in NUMERIC[name].items()})
    for (name, param), expected, before in zip(
        model.named_parameters(), plain.parameters(), start.parameters(), strict=True
    ):
        if not param.requires_grad:
            assert torch.equal(param, before), name
            continue
        # Sums of magnitudes: for a gradient near zero, rounding may flip AdamW's first step of that element.
        moved = (expected.double() - before.double()).abs().sum()
        assert moved > 0, name
        assert (param.double() - expected.double()).abs().sum() <= bound * moved, name


@pytest.fixture
def late_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces a GPU's link to host memory by one with the largest delays, also for small tensors."""

    def offload(model: nn.Module) -> None:
        memory.offload.offload_to(model, LateLink())._smallest_bytes = 512

    monkeypatch.setattr(memory, "offload_activations", offload)
    monkeypatch.setattr(memory, "open_link", lambda *_: LateLink())
    monkeypatch.setattr(
        memory,
        "_place_tied_gradient",
        lambda model, choice: (
            None if choice == "separate" else memory.fuse_tied_gradient(model, LateLink() if choice == "host" else None)
        ),
    )
    monkeypatch.setattr(
        optim.build,
        "stream_state",
        lambda device: optim.streamed.StreamedState(LateLink(), smallest_bytes=512, ahead_bytes=2**13),
    )


@pytest.mark.parametrize("pair", PAIRS, ids=" + ".join)
def test_two_settings_compose_or_are_refused(pair: tuple[str, str], late_links: None) -> None:
    first, second = (SETTINGS[name] for name in pair)
    if any(first[key] != second[key] for key in first.keys() & second.keys()):
        pytest.skip("one setting with two values")
    if (reason := REFUSED.get(frozenset(pair))) is not None:
        with pytest.raises(ValueError, match=reason):
            recipe_steps({**first, **second})
        return
    check(pair, recipe_steps({**first, **second}), max(ROUNDING.get(name, 0.02) for name in pair))


@pytest.mark.long
@pytest.mark.parametrize("names", COMPILED, ids=" + ".join)
def test_compiled_layers_compose(names: tuple[str, ...], late_links: None, without_codegen: None) -> None:
    settings = {key: value for name in names for key, value in SETTINGS[name].items()}
    check(names, recipe_steps(settings, compile=True), 0.02)


@pytest.mark.long
def test_the_compilers_budget_composes_with_offload(late_links: None, without_codegen: None) -> None:
    settings = {"memory.activation_checkpointing": "budget", "memory.activation_budget": 0.3}
    check(("offload",), recipe_steps({**SETTINGS["offload"], **settings}, compile=True), 0.02)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"memory.activation_offload": True}, "which already uses host memory"),
        ({"memory.tied_gradient": "host"}, "which already uses host memory"),
        ({"memory.frozen_embeddings": "host"}, "which already uses host memory"),
        ({"memory.float8_products": True}, "which has none"),
        ({"memory.activation_checkpointing": "budget"}, "budget needs the compiler"),
        ({"optimizer.name": "adamw_8bit", "optimizer.state": "paged"}, "CUDA managed memory"),
        ({"optimizer.state": "streamed"}, "which already uses host memory"),
        ({"optimizer.state": "paged"}, "works only with bitsandbytes. kernel"),
        (
            {"optimizer.name": "paged_adamw_8bit", "optimizer.state": "streamed"},
            "pinned host memory. Set optimizer.name=adamw_8bit",
        ),
    ],
    ids=str,
)
def test_settings_that_this_device_does_not_support_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        recipe_steps(settings)
