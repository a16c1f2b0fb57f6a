"""Run a few steps of a recipe on a simulated or a real GPU and print the peaks of PyTorch's CUDA allocator as JSON.

    tests/pretended_gpu/run.sh python benchmarks/pretended_steps.py RECIPE [--config PRESET] [--plan] KEY=VALUE ...

Runs the recipe's own `main` on the CUDA build of PyTorch. Tensors are allocated and freed, streams and events exist,
and Inductor compiles for the GPU, but kernels do nothing, so a model of any size needs no memory and no time. Values
that decide something, such as whether the loss is finite, are replaced. Batches are the longest that the settings
allow, as in a plan. `--plan` prints the planner's prediction instead, with `--card NAME` for a card that this machine
lacks.

On a real GPU, tokens are random, and the answer has the seconds of the timed steps, and the number and the seconds of
the kernels of one more step by name, as PyTorch's profiler counts them. With the environment variable GPU_LOCK, the
name of a file, processes that share the GPU load and compile side by side. After its first step, each writes
`GPU_LOCK.<its process id>` and waits for a file `GPU_LOCK.go`; then one at a time does its other steps.
"""

import fcntl
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lean_ft.system.before_torch import prepare_torch  # noqa: E402

prepare_torch()

import torch  # noqa: E402

import lean_ft.optim.optimizer as optimizer_module  # noqa: E402
from lean_ft.data import Batch, largest_batch  # noqa: E402
from lean_ft.data.images import ImageKind  # noqa: E402
from lean_ft.optim.optimizer import Optimizer  # noqa: E402
from lean_ft.optim.rule import ParameterState  # noqa: E402
from lean_ft.settings.text import load_config  # noqa: E402
from lean_ft.system.catalog import find_preset, find_recipe, load_recipe  # noqa: E402
from tests.pretended_gpu.cards import IS_SIMULATED  # noqa: E402

if IS_SIMULATED:
    from tests.pretended_gpu.counters import counters
else:

    def counters() -> dict[str, int]:
        return {"kernels": 0, "host_waits": 0}


NUM_STEPS = 3  # step 1 compiles; from step 2 on, state is prefetched
NUM_TIMED = 4  # further steps on a real GPU, before one that is profiled


class Longest:
    """Batches of the maximum length."""

    def __init__(self, cfg: Any) -> None:
        rules = None
        if cfg.model.images != "none":
            from lean_ft.images.rules import image_rules

            rules = image_rules(Path(cfg.model.path), cfg.data.image_tokens)
        self._batch = largest_batch(cfg.data, cfg.batch_size, kinds=() if rules is None else (ImageKind(rules),))
        if not IS_SIMULATED and rules is None:
            self._fill(cfg)

    def _fill(self, cfg: Any) -> None:
        """Let each row be one document of random tokens, so that all experts get tokens."""
        config = json.loads((Path(cfg.model.path) / "config.json").read_text())
        vocab_size = config.get("text_config", config)["vocab_size"]
        ids, bounds = self._batch.input_ids, self._batch.cu_seqlens
        generator = torch.Generator().manual_seed(0)
        for tensor in (ids, self._batch.labels):
            tensor.copy_(torch.randint(vocab_size, ids.shape, generator=generator))
        self._batch.positions.copy_(torch.arange(ids.shape[1]).expand_as(ids))
        if bounds is not None:
            bounds.copy_((torch.arange(len(bounds)) * ids.shape[1]).clamp(max=ids.numel()))

    def take(self, n: int) -> list[Batch]:
        return [self._batch] * n


class Peaks:
    """The allocator's peaks and the launches of each step, and the peak workspace of an update in the last step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, int]] = []
        self.update_bytes = 0
        self._allocated = self._reserved = 0
        self._before = counters()
        self.seconds: list[float] = []
        self.kernels: dict[str, tuple[int, float]] = {}

    def begin(self) -> None:
        torch.cuda.reset_peak_memory_stats()
        self._allocated = self._reserved = self.update_bytes = 0
        self._before = counters()

    def note(self) -> None:
        """Record the peaks before they are reset."""
        self._allocated = max(self._allocated, torch.cuda.max_memory_allocated())
        self._reserved = max(self._reserved, torch.cuda.max_memory_reserved())

    def end(self) -> None:
        self.note()
        counts = {name: after - self._before[name] for name, after in counters().items()}
        peaks = {"allocated_bytes": self._allocated, "reserved_bytes": self._reserved}
        self.steps.append({**peaks, "launches": counts["kernels"], "host_waits": counts["host_waits"]})

    def timed_steps(self) -> Iterator[int]:
        """Yield steps to time, and one to profile."""
        for step in range(NUM_TIMED):
            torch.cuda.synchronize()
            started = time.perf_counter()
            yield NUM_STEPS + step
            torch.cuda.synchronize()
            self.seconds.append(time.perf_counter() - started)
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            yield NUM_STEPS + NUM_TIMED
            torch.cuda.synchronize()
        for event in profile.key_averages():
            if event.self_device_time_total > 0:
                self.kernels[event.key] = event.count, event.self_device_time_total / 1e6

    def watch(self, update: Callable[..., None]) -> Callable[..., None]:
        def watched(optimizer: Optimizer, states: Sequence[ParameterState]) -> None:
            self.note()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            update(optimizer, states)
            self.update_bytes = max(self.update_bytes, torch.cuda.max_memory_allocated() - before)
            self.note()

        return watched


def wait_for_the_gpu(lock: str) -> None:
    """Return when all processes have compiled, and this one alone uses the GPU until it ends."""
    Path(f"{lock}.{os.getpid()}").touch()
    while not Path(f"{lock}.go").exists():
        time.sleep(0.05)
    fcntl.flock(os.open(lock, os.O_CREAT | os.O_RDWR), fcntl.LOCK_EX)


def stand_in_for_run(peaks: Peaks) -> type:
    """A replacement for `Run` that counts and writes nothing."""

    class FewSteps:
        total_steps = NUM_STEPS

        def __init__(self, cfg: Any, *, optimizer: Optimizer, **parts: Any) -> None:
            self.state_bytes = optimizer.state_bytes

        def steps(self) -> Iterator[int]:
            for step in range(self.total_steps):
                if step == 1 and "GPU_LOCK" in os.environ:
                    wait_for_the_gpu(os.environ["GPU_LOCK"])
                peaks.begin()
                yield step
            if not IS_SIMULATED:
                yield from peaks.timed_steps()

        def log(self, **values: Any) -> None:
            peaks.end()

        def evaluation_due(self) -> bool:
            return False

    return FewSteps


def measure(recipe: ModuleType, cfg: Any) -> dict[str, Any]:
    """The peaks of the first and the last step, in bytes."""
    peaks = Peaks()
    if IS_SIMULATED:
        torch.backends.cuda.enable_cudnn_sdp(False)  # it has no cuDNN; attention saves the same tensors
    stand_ins = {
        "load_tokenizer": lambda *args, **kwargs: None,
        "prepare_batches": lambda *args, **kwargs: (Longest(cfg), None),
        "Run": stand_in_for_run(peaks),
    }
    patches = [mock.patch.object(recipe, name, value) for name, value in stand_ins.items()]
    if IS_SIMULATED:
        patches += [
            mock.patch.object(optimizer_module, "all_finite", return_value=True),
            mock.patch.object(Optimizer, "apply_rules", peaks.watch(Optimizer.apply_rules)),
        ]
    for patch in patches:
        patch.start()
    recipe.main(cfg)
    first, last = peaks.steps[0], peaks.steps[NUM_STEPS - 1]
    of_time = {"seconds": peaks.seconds, "kernels": peaks.kernels} if peaks.seconds else {}
    return {
        **of_time,
        **last,
        **{f"first_{name}": count for name, count in first.items()},
        "update_bytes": peaks.update_bytes,
        "device": torch.cuda.get_device_name(),
        "memory_bytes": torch.cuda.get_device_properties(0).total_memory,
    }


def predict(recipe: ModuleType, cfg: Any, card: str | None) -> dict[str, Any]:
    """The planner's prediction for the same, for a card or this machine's."""
    from lean_ft.plan.devices import choose_device
    from lean_ft.plan.rehearsal import rehearse

    rehearsal = rehearse(recipe, cfg, choose_device(card, "cuda"))
    return {
        "predicted_bytes": rehearsal.peak_bytes,
        "predicted_reserved_bytes": getattr(rehearsal, "reserved_bytes", None),
        "predicted_launches": sum(launches.number for launches in rehearsal.ledger.values()),
        "predicted_seconds": rehearsal.step_seconds,
        "tokens": rehearsal.tokens,
        "where": rehearsal.peak.where,
        "bytes_by_label": rehearsal.peak.bytes_by_label,
        "planning_seconds": rehearsal.planning_seconds,
    }


def main(arguments: list[str]) -> None:
    plans, preset, card = "--plan" in arguments, None, None
    arguments = [argument for argument in arguments if argument != "--plan"]
    if "--card" in arguments:
        at = arguments.index("--card")
        card = arguments[at + 1]
        del arguments[at : at + 2]
    if "--config" in arguments:
        at = arguments.index("--config")
        preset = find_preset(arguments[at + 1])
        del arguments[at : at + 2]
    recipe = load_recipe(find_recipe(arguments[0]))
    own = ["device=cuda", "plan=false", "model.random_init=true", "data.source=not-read.jsonl"]
    cfg = load_config(recipe.Config, preset, [*own, *arguments[1:]])
    print(json.dumps(predict(recipe, cfg, card) if plans else measure(recipe, cfg)), flush=True)
    os._exit(0)  # skip the exit handlers of CUDA libraries, which a simulated GPU does not support


if __name__ == "__main__":
    main(sys.argv[1:])
