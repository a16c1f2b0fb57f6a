"""The gate: short runs and plans whose numbers are committed in tests/assets/gate, to prove that a change of structure
moves none.

`tests/test_gate.py` compares them and `scripts/write_gate.py` writes them. A run has the losses and norms of 20 steps
in float32 on one thread, and a hash of the whole numbers in its batches: ids, labels, positions, pixels.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from lean_ft.data import Batch
from lean_ft.hub.paths import resolve_model_path
from lean_ft.plan.devices import Device, find_device
from lean_ft.plan.rehearsal import rehearse
from lean_ft.settings.text import load_config, preset_recipe, preset_values
from lean_ft.system import catalog
from lean_ft.system.units import GIB
from lean_ft.training import Run
from tests.models.family_cases import CASES, SIZES

FOLDER = Path(__file__).parent / "assets" / "gate"
COMMON = ("model.dtype=float32", "device=cpu", "plan=false", "max_steps=20", "save_every=0", "eval_every=0")
OFFLINE = ("data.validation_source=null", "schedule.warmup_steps=5")  # then the learning rate falls
ONLINE = ("data.validation_source=null", "sample_every=0", "batch_size=8")
ALONE = (*OFFLINE, "eval_answers=0", "batch_size=4")
ON_POLICY = ("data.train_on=assistant", "distill.on_policy=1", "generation.max_new_tokens=12")
PAIRS = (*OFFLINE, "batch_size=2")
# Name -> recipe, preset, settings.
RECIPES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "finetune": ("finetune", "tiny/full", ALONE),
    "dpo": ("dpo", "tiny/dpo", PAIRS),
    "grpo": ("grpo", "tiny/grpo", ONLINE),
    "full": ("full_finetune_single_device", "tiny/full", ALONE),
    "lora": ("finetune", "tiny/lora", ALONE),
    "images": ("finetune", "tiny/images", ALONE),
    "classify": ("classify", "tiny/classify", (*OFFLINE, "batch_size=4")),
    "distill": ("distill", "tiny/distill", (*OFFLINE, "batch_size=4")),
    "on_policy": ("distill", "tiny/distill", (*OFFLINE, "batch_size=4", *ON_POLICY)),
    "self_distill": ("distill", "tiny/self_distill", (*OFFLINE, "batch_size=4")),
    "kto": ("kto", "tiny/kto", PAIRS),
    "reward": ("reward", "tiny/reward", PAIRS),
    "online_dpo": ("online_dpo", "tiny/online_dpo", (*ONLINE, "batch_size=2")),
    "ppo": ("ppo", "tiny/ppo", ONLINE),
    "tools": ("grpo", "tiny/tools", ONLINE),
    "embed": ("embed", "tiny/embed", (*OFFLINE, "batch_size=4")),
    "rerank": ("rerank", "tiny/rerank", (*OFFLINE, "batch_size=4")),
    "tag": ("classify", "tiny/tag", (*OFFLINE, "batch_size=4")),
}
FAMILIES = ("llama", "qwen3_next", "gemma4_text", "gemma3n_text", "gpt_oss")
FAMILIES += ("deepseek_v2", "lfm2_moe", "nemotron_h", "falcon_h1", "granitemoehybrid")
OF_FAMILIES = ("data.source=tiny/train.jsonl", "data.max_length=48", "batch_size=4", "optimizer.lr=1e-3")
OF_FAMILIES += ("schedule.warmup_steps=5", "clip_grad_norm=1.0", "model.random_init=true")
# eps is above the rounding of a gradient that is 0, which AdamW would else take to full size.
OF_FAMILIES += ("optimizer.eps=1e-4",)
# Its gradients are large. At the rate of the others, differences of rounding grow by about half in each step.
SLOWER = {"gemma4_text": ("optimizer.lr=1e-4",)}
FIRST = ("finetune", "grpo")  # in the default tests
CURVES = (*FIRST, *(name for name in (*RECIPES, *FAMILIES) if name not in FIRST))
ONE_BLOCK, ONE_SEGMENT = 128, 20 * 2**20  # bytes; a segment of PyTorch's caching allocator
FIRST_PLANS = ("tiny/full",)
PLANS = sorted(catalog.presets(), key=lambda name: (name not in FIRST_PLANS, not name.startswith("tiny/"), name))
# CPUs with other vector units add in another order, and each update passes the difference on. Between AVX2 and AVX-512
# with AMX (and SSE, for seven runs), losses differ by at most 34 roundings of float32 (2 ** -24) in 20 steps, and norms
# by at most 2409. Eight times as much is allowed. Muon brings small parts of a gradient to the size of large ones, and
# their rounding too: its losses differ by 946 roundings.
ROUNDING = 2.0**-24
TOLERANCES = {"loss": 300 * ROUNDING, "grad_norm": 20_000 * ROUNDING}
OF_MUON = 25
LEAST = {"loss": 1.0, "grad_norm": 0.01}  # losses near 0 are sums of terms of size 1


def read(file: str) -> dict[str, Any]:
    path = FOLDER / f"{file}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def write(file: str, numbers: dict[str, Any]) -> None:
    """One line per name, so that a diff shows which ones moved."""
    lines = (f"{json.dumps(name)}: {json.dumps(one)}" for name, one in sorted(numbers.items()))
    (FOLDER / f"{file}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


def run(name: str, folder: Path, *settings: str) -> dict[str, Any]:
    """Train; return `loss` and `grad_norm` of each step, and `batches`, a hash."""
    if name in RECIPES:
        recipe, preset, own = RECIPES[name]
        preset = catalog.find_preset(preset)
    else:
        model = f"model.path={write_family(name, folder / 'model')}"
        recipe, preset, own = "finetune", None, (*OF_FAMILIES, *SLOWER.get(name, ()), model)
    module = catalog.load_recipe(catalog.find_recipe(recipe))
    cfg = load_config(module.Config, preset, [*COMMON, *own, f"output_dir={folder}/run", *settings])
    with hashed_batches() as batches:
        module.main(cfg)
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "grad_norm" in line]
    numbers = {key: [float(f"{line[key]:.7g}") for line in steps] for key in ("loss", "grad_norm")}
    return numbers | {"batches": batches.hexdigest()[:16]}


def moved_of_run(name: str, before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What moved: the first step with another loss or norm, and the batches."""
    moved = [] if now["batches"] == before["batches"] else [f"batches: {before['batches']} -> {now['batches']}"]
    for key, tolerance in TOLERANCES.items():
        tolerance *= OF_MUON if name == "images" else 1
        for step, (old, new) in enumerate(zip(before[key], now[key], strict=True), 1):
            if not abs(new - old) <= tolerance * max(abs(old), LEAST[key]):  # NaN moved too
                moved.append(f"{key} of step {step}: {old} -> {new}, tolerance {tolerance:.1e}")
                break
    return moved


def write_family(case: str, folder: Path) -> Path:
    """A folder with the config.json of a tiny model and the embedded model's tokenizer. Large random weights show each
    part."""
    tiny = resolve_model_path("tiny")
    model_type, settings = CASES[case]
    vocab_size = json.loads((tiny / "config.json").read_text())["vocab_size"]
    sizes = {**SIZES, **settings, "initializer_range": 0.1}
    sizes |= {field: vocab_size for field in sizes if field.startswith("vocab_size")}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, **sizes}))
    for file in tiny.glob("*token*"):
        shutil.copy(file, folder)
    return folder


@contextmanager
def hashed_batches() -> Iterator[Any]:
    """A hash of the batches that runs log inside. It knows no names of fields, which may change."""
    digest, log = hashlib.blake2b(), Run.log

    def log_and_hash(self: Run, **values: Any) -> None:
        for batch in values["micro_batches"]:
            digest.update(b"".join(sorted(map(hash_of, whole_numbers(batch.built)))))
        log(self, **values)

    with patch.object(Run, "log", log_and_hash):
        yield digest


def whole_numbers(value: Any) -> Iterator[torch.Tensor]:
    """Tensors without rounding in a batch and its parts."""
    if isinstance(value, torch.Tensor) and not value.is_floating_point():
        yield value
    elif isinstance(value, Batch):
        yield from whole_numbers(vars(value))
    elif isinstance(value, dict | tuple | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from whole_numbers(one)


def hash_of(tensor: torch.Tensor) -> bytes:
    return hashlib.blake2b(
        f"{tensor.dtype} {tuple(tensor.shape)}".encode() + tensor.contiguous().numpy().tobytes()
    ).digest()


def moved_of_plan(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What moved. The first plan of an 8-bit optimizer in a process counts one block of 128 bytes more than later ones,
    and reserved memory may have a segment more or less, as Python collects its garbage at another time."""

    def is_equal(one: Any, other: Any, most: int) -> bool:
        if isinstance(one, dict):
            return all(is_equal(one.get(name, 0), other.get(name, 0), most) for name in one.keys() | other.keys())
        return abs(one - other) <= most

    allowed = {"reserved": ONE_SEGMENT}
    return [
        f"{key}: {before[key]} -> {now[key]}"
        for key in now
        if not is_equal(before[key], now[key], allowed.get(key, ONE_BLOCK))
    ]


# By the last part of a preset's name: settings that shorten its plan, whose time grows with the number of images or
# completions.
SHORTER = {
    "images": ("data.max_length=1024",),
    "ppo": ("batch_size=8",),
    "tools": ("batch_size=8",),
}


def shorter(preset: str) -> tuple[str, ...]:
    """The settings that shorten a preset's plan. The comment of a planned preset of a published model needs the whole
    plan."""
    values, settings = preset_values(catalog.find_preset(preset)), SHORTER.get(preset.partition("/")[2], ())
    return tuple(word for word in settings if word != f"batch_size={values.get('batch_size', 8)}")


def plan(name: str, folder: Path, *settings: str) -> dict[str, Any]:
    """Plan a preset from the config.json next to it; return `peak`, `reserved` and the peak's `labels`, in bytes."""
    file = catalog.find_preset(name)
    recipe = catalog.load_recipe(catalog.find_recipe(preset_recipe(file) or ""))
    own = [] if name.startswith("tiny/") else [f"model.path={file.parent}"]  # never a model of the Hub's cache
    own += shorter(name)
    cfg = load_config(recipe.Config, file, [*own, f"output_dir={folder}/run", "device=cuda", *settings])
    found = rehearse(recipe, cfg, card_of(file))
    return {"peak": found.peak_bytes, "reserved": found.reserved_bytes, "labels": found.peak.bytes_by_label}


def card_of(preset: Path) -> Device:
    """The GPU of the size in a preset's comment, or 24 GB for the embedded models. The driver keeps about 2% of its
    memory."""
    found = re.search(r"on a GPU with (\d+) GB", preset.read_text())
    gb = int(found[1]) if found else 24
    return replace(find_device("A100 80GB" if gb in (40, 80) else "RTX 4090"), memory_bytes=int(0.98 * gb * GIB))
