"""`leanft check` against damage: each of these is found, by the check that is there for it, and by no other."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from lean_ft import check, load_model
from lean_ft.hub.paths import resolve_model_path
from lean_ft.models import Decoder
from lean_ft.settings.text import load_config
from lean_ft.system import catalog

TECHNIQUES = (
    *("memory.tile_mlp=4", "data.packing=bfd", "optimizer.name=adamw_8bit optimizer.in_backward=true"),
    *("optimizer.stochastic_rounding=true", "lora.rank=4 memory.activation_checkpointing=full", "lora.quantize=nf4"),
)


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Few rows and tokens, to save time."""
    monkeypatch.setattr(check, "NUM_ROWS", 3)
    monkeypatch.setattr(check, "NUM_GREEDY_TOKENS", 16)


def rows_of(names: tuple[str, ...] = (), folder: Path | None = None) -> dict[str, check.Row]:
    """The table's rows by check; with `names` of those checks alone."""
    folder = folder or resolve_model_path("tiny")
    recipe = catalog.load_recipe(catalog.find_recipe("finetune"))

    def configure(overrides):
        settings = ["output_dir=unused", f"model.path={folder}", "data.source=tiny/train.jsonl", "data.max_length=64"]
        return load_config(recipe.Config, None, [*settings, "device=cpu", *overrides])

    checks = check.Check(folder, configure, dict(zip(TECHNIQUES, TECHNIQUES, strict=True)), None)
    return {row[0]: row for name, rows in checks.run() if not names or name in names for row in rows()}


@pytest.mark.long
def test_a_sound_model_passes_every_check():
    rows = rows_of()
    assert len(rows) == 10 + len(TECHNIQUES) + 1
    assert {name: row[-1] for name, row in rows.items() if row[-1] != "ok"} == {"3 training steps": "skipped: --quick"}


def with_another_rope(tmp_path: Path):
    """A folder that tells ours a different base of the rotations than transformers."""
    folder = resolve_model_path("tiny")
    shutil.copytree(folder, tmp_path / "lies")
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] *= 1.01
    (tmp_path / "lies" / "config.json").write_text(json.dumps(config))

    def load(path, *arguments, **settings):
        return load_model(tmp_path / "lies", *arguments, **settings)

    return "load_model", load


def with_a_wrong_step(tmp_path: Path):
    def build(model, cfg):
        optimizer = build_optimizer(model, cfg)
        set_lr = optimizer.set_lr
        optimizer.set_lr = lambda lr: set_lr(lr * 1.1)
        return optimizer

    build_optimizer = check.build_optimizer
    return "build_optimizer", build


def with_a_changed_gradient(tmp_path: Path):
    """What a technique that forgets a tenth of a layer's tokens would do."""

    def apply(model: Decoder, memory, *, compile):
        if memory.tile_mlp:
            weight = model.layers[1].mlp.up_proj.weight
            weight.register_hook(lambda gradient: gradient * 1.001)

    return "apply_memory", apply


def with_rounding_to_nearest(tmp_path: Path):
    def build(model, cfg):
        plain = cfg.optimizer.model_copy(update={"stochastic_rounding": False})
        return build_optimizer(model, cfg.model_copy(update={"optimizer": plain}))

    build_optimizer = check.build_optimizer
    return "build_optimizer", build


def with_a_changed_bit(tmp_path: Path):
    def save(model, folder):
        with torch.no_grad():
            model.layers[2].input_layernorm.weight[3] *= 1.01
        save_model(model, folder)

    save_model = check.save_model
    return "save_model", save


def with_another_tokenizer(tmp_path: Path):
    def load(*arguments):
        tokenizer = load_tokenizer(*arguments)
        encode, render = tokenizer.encode, tokenizer.render
        tokenizer.encode = lambda text, *rest: encode(text.strip(), *rest)
        tokenizer.render = lambda messages, **rest: render(messages[-1:], **rest)
        return tokenizer

    load_tokenizer = check.load_tokenizer
    return "load_tokenizer", load


TILED, PACKED, UPDATE, ROUNDING, LORA, QLORA = TECHNIQUES


@pytest.mark.first(2)
@pytest.mark.parametrize(
    ("damage", "checks", "found"),
    [
        (with_a_changed_bit, ("saved weights",), {"save and read back", "export and read back"}),
        (with_another_tokenizer, ("token ids",), {"token ids", "chat template"}),
        (with_a_changed_gradient, ("plain step", TILED, PACKED), {TILED}),
        (with_another_rope, ("plain step", "logits and gradients"), {"logits", "gradients"}),
        (with_a_wrong_step, ("plain step", UPDATE, LORA), {UPDATE}),
        (with_rounding_to_nearest, ("plain step", ROUNDING, UPDATE), {ROUNDING}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_damage_is_found(damage, checks, found, monkeypatch, tmp_path):
    monkeypatch.setattr(check, *damage(tmp_path))
    rows = rows_of(checks)
    assert len(rows) >= len(checks)
    assert (
        found
        <= {name for name, row in rows.items() if row[-1] == "DIFFERS"}
        <= found | {"logits in bfloat16", "gradients in bfloat16", "greedy tokens"}
    )


@pytest.mark.long
def test_without_transformers_its_rows_say_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    rows = rows_of(("token ids", "plain step", "logits and gradients", PACKED))
    assert [row[-1] for row in rows.values()] == [
        *("skipped: transformers is not installed", "ok", "skipped: transformers is not installed", "ok"),
    ]


def test_without_memory_for_it_nothing_is_compared(monkeypatch):
    monkeypatch.setattr(check, "available_bytes", lambda: 2**20)
    assert rows_of((PACKED,))[PACKED][-1] == "skipped: needs 16.9 MiB, and 1.0 MiB is free"
