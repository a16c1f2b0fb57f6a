"""Check that training works on a device: the embedded model trains for a few steps with one technique after another.

Each check runs a shipped recipe in its own process, so a crash is reported and the other checks continue. The losses
are compared with those of a CPU in float32, with a tolerance that broken kernels and missing updates exceed by far. If
a device cannot run a technique by design, the recipe rejects it with the reason.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

STEPS = 6
_TIME_LIMIT_SECONDS = 300
_TOLERANCE = 0.15  # relative; rounding causes up to 10% after a few large steps, and missing updates 80%
_FULL = {"--config": "tiny/full", "optimizer.lr": "3e-3"}
_LORA = {"--config": "tiny/lora", "optimizer.lr": "5e-3"}
_ALWAYS = {
    "schedule.warmup_steps": "0",
    "max_steps": str(STEPS),
    "eval_answers": "0",
    "data.validation_source": "null",
    "save_every": "0",
    "plan": "false",
}
_BF16 = {"model.dtype": "bfloat16"}
_OFFLOADED = {"memory.activation_checkpointing": "full", "memory.activation_offload": "true"}
_DECIDES_LOSSES = ("--config", "data.packing", "clip_grad_norm")  # other settings must not change the losses
_IN_BACKWARD = {"optimizer.in_backward": "true", "clip_grad_norm": "null"}

# technique -> settings
_TECHNIQUES: dict[str, dict[str, str]] = {
    "float32": _FULL,
    "bfloat16": _FULL | _BF16,
    "float16, loss scaled": _FULL | {"model.dtype": "float16"},
    "packed documents": _FULL | _BF16 | {"data.packing": "padding_free"},
    "torch.compile": _FULL | _BF16 | {"compile": "true"},
    "8-bit AdamW, in backward": _FULL | _BF16 | _IN_BACKWARD | {"optimizer.name": "adamw_8bit"},
    "8-bit AdamW, paged": _FULL | _BF16 | {"optimizer.name": "paged_adamw_8bit"},
    "8-bit AdamW, torchao": _FULL | _BF16 | {"optimizer.name": "adamw_8bit_torchao"},
    "states streamed": _FULL | _BF16 | {"optimizer.state": "streamed"},
    "activations offloaded": _FULL | _BF16 | _OFFLOADED,
    "LoRA": _LORA | _BF16,
    "LoRA, embeddings on the host": _LORA | _BF16 | {"memory.frozen_embeddings": "host"},
    "QLoRA": _LORA | _BF16 | {"lora.quantize": "nf4"},
}


class Outcome(NamedTuple):
    """The result of a technique: `works`, `not here` (unsupported by design) or `FAILED`, and the reason."""

    technique: str
    result: str
    why: str


def check_device(device: str) -> Iterator[Outcome]:
    """Check every technique on `device` (auto, cpu, cuda, mps). Takes one to a few minutes."""
    with tempfile.TemporaryDirectory(prefix="lean_ft-check-") as name:
        folder = Path(name)
        references: dict[tuple[str | None, ...], list[float] | Outcome] = {}
        for technique, settings in _TECHNIQUES.items():
            key = tuple(settings.get(name) for name in _DECIDES_LOSSES)
            if key not in references:
                plain = (_FULL if settings["--config"] == _FULL["--config"] else _LORA) | {"model.dtype": "float32"}
                same_batches = {name: settings[name] for name in _DECIDES_LOSSES if name in settings}
                references[key] = _train(folder, plain | same_batches, "cpu")
            losses, reference = _train(folder, settings, device), references[key]
            if isinstance(losses, Outcome) or isinstance(reference, Outcome):
                refused = losses if isinstance(losses, Outcome) else reference
                assert isinstance(refused, Outcome)
                yield refused._replace(technique=technique)
                continue
            worst = max(abs(ours / theirs - 1) for ours, theirs in zip(losses, reference, strict=True))
            why = f"{STEPS} steps, losses within {worst:.1%} of a CPU's in float32"
            yield Outcome(technique, "works" if worst <= _TOLERANCE else "FAILED", why)


def _train(folder: Path, settings: dict[str, str], device: str) -> list[float] | Outcome:
    """Return the losses of a short run, or the outcome if it failed."""
    run = Path(tempfile.mkdtemp(dir=folder)) / "run"
    values = {**settings, **_ALWAYS, "device": device, "output_dir": str(run)}
    preset = values.pop("--config")
    arguments = ["run", "--config", preset, *(f"{k}={v}" for k, v in values.items())]
    command = [sys.executable, "-P", "-m", "lean_ft", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIME_LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        return Outcome("", "FAILED", f"not finished after {_TIME_LIMIT_SECONDS} s")
    if done.returncode == 0:
        lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
        return [line["loss"] for line in lines if "loss" in line]
    errors = [line.removeprefix("error: ") for line in done.stderr.splitlines() if line.startswith("error: ")]
    why = errors[-1] if errors else f"the process ended with {done.returncode}: {done.stderr.strip()[-300:]}"
    return Outcome("", "not here" if done.returncode == 2 else "FAILED", why)
