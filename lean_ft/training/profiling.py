"""`profile=true`: the time and memory of a few steps, in output_dir/profile.

trace.json.gz    every operation, for https://ui.perfetto.dev or chrome://tracing
operations.txt   the largest operations by module; backward counts for the module of its forward pass
memory.csv       seconds and bytes every few milliseconds: allocated on a GPU, resident on a CPU

The profiler is PyTorch's, with its waiting and warm-up steps. Module names come from hooks, which would recompile compiled
layers. So with compile=true operations have no module, and kernels have the compiler's names.
"""

import re
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from lean_ft.settings import RecipeConfig
from lean_ft.system.log import say
from lean_ft.training.process_memory import rss_bytes

FOLDER, MEMORY_FILE, OPERATIONS_FILE, TRACE_FILE = "profile", "memory.csv", "operations.txt", "trace.json.gz"
_MODULE = "module: "
_NODE = "autograd::engine::evaluate_function: "
_SAMPLE_SECONDS = 0.003
_ROWS = 40


@contextmanager
def profiled(
    cfg: RecipeConfig, model: nn.Module, device: torch.device, writes: bool
) -> Iterator["StepProfiler | None"]:
    """Context manager with the profiler, whose `step()` is called after each step; None if nothing is profiled."""
    if not cfg.profile or not writes:
        yield None
        return
    profiler = StepProfiler(cfg.output_dir / FOLDER, model, device, cfg.profile_steps, names_modules=not cfg.compile)
    try:
        yield profiler
    finally:
        profiler.stop()


class StepProfiler:
    """Profiles training steps. `steps`: how many steps to wait, to warm up and to profile."""

    def __init__(
        self, folder: Path, model: nn.Module, device: torch.device, steps: tuple[int, int, int], names_modules: bool
    ) -> None:
        self._folder: Path | None = folder
        self._device, self._steps, self._done = device, steps, 0
        self._samples: list[tuple[float, int]] = []
        self._samples_memory = False
        self._hooks = _name_modules(model) if names_modules else []
        folder.mkdir(parents=True, exist_ok=True)
        wait, warmup, active = steps
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
        self._profile: Any = profile(
            activities=activities,
            schedule=schedule(wait=wait, warmup=warmup, active=active, repeat=1),
            on_trace_ready=self._write,
            acc_events=True,
        )
        self._profile.start()
        self._watch()

    def step(self) -> None:
        """Call this after each step."""
        self._done += 1
        if self._done <= sum(self._steps):
            if self._done == sum(self._steps):  # the profiler now takes memory itself
                self._samples_memory = False
            self._profile.step()
            self._watch()

    def stop(self) -> None:
        if self._done < sum(self._steps):
            say(
                "profile",
                f"not written: it needs {sum(self._steps)} steps (profile_steps), and the run made {self._done}",
            )
            self._folder = None  # an incomplete profile is not written
            self._profile.stop()
        self._samples_memory = False
        for hook in self._hooks:
            hook.remove()

    def _watch(self) -> None:
        """Start to sample the memory at the first profiled step."""
        if self._done == self._steps[0] + self._steps[1]:
            self._samples_memory = True
            threading.Thread(target=self._sample, daemon=True).start()

    def _sample(self) -> None:
        started = time.perf_counter()
        while self._samples_memory:
            cuda = self._device.type == "cuda"
            taken = torch.cuda.memory_allocated(self._device) if cuda else rss_bytes()
            self._samples.append((time.perf_counter() - started, taken or 0))
            time.sleep(_SAMPLE_SECONDS)

    def _write(self, profile: Any) -> None:
        if self._folder is None:
            return
        profile.export_chrome_trace(str(self._folder / TRACE_FILE))
        table = _table(profile.events(), self._steps[2], self._device.type == "cuda")
        (self._folder / OPERATIONS_FILE).write_text(table, encoding="utf-8")
        lines = [f"{seconds:.4f},{taken}\n" for seconds, taken in self._samples]
        (self._folder / MEMORY_FILE).write_text("seconds,bytes\n" + "".join(lines), encoding="utf-8")
        say("profile", f"{self._folder}: {TRACE_FILE}, {OPERATIONS_FILE}, {MEMORY_FILE}")


def _name_modules(model: nn.Module) -> list[Any]:
    """Register hooks that name each module in the profile."""
    hooks, open_names = [], list[Any]()

    def opens(name: str) -> Any:
        def open_name(module: nn.Module, inputs: Any) -> None:
            open_names.append(record_function(_MODULE + name))
            open_names[-1].__enter__()

        return open_name

    def close_name(module: nn.Module, inputs: Any, output: Any) -> None:
        open_names.pop().__exit__(None, None, None)

    for name, module in model.named_modules():
        if name:
            hooks.append(module.register_forward_pre_hook(opens(name)))
            # Also if checkpointing leaves a layer early by an exception, once backward has all it needs.
            hooks.append(module.register_forward_hook(close_name, always_call=True))
    return hooks


def _table(events: list[Any], steps: int, on_gpu: bool) -> str:
    """A table of the operations with the most self time, summed over layers, per step."""
    of_sequence = {e.sequence_nr: module for e in events if e.sequence_nr >= 0 and (module := _within(e, _MODULE))}
    seconds, calls = defaultdict[tuple[str, str], float](float), defaultdict[tuple[str, str], int](int)
    for event in events:
        if event.name.startswith((_MODULE, "ProfilerStep", _NODE)) or event.device_type.name != "CPU":
            continue
        own = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        module, node = _within(event, _MODULE), _within(event, _NODE)
        if module is None and node is not None:
            module = of_sequence.get(node.sequence_nr)
        name = "-" if module is None else re.sub(r"\.\d+(?=\.|$)", ".*", module.name.removeprefix(_MODULE))
        key = (name + (", backward" if node is not None else ""), event.name)
        seconds[key] += own / 1e6 / steps
        calls[key] += 1
    total = sum(seconds.values()) or 1.0
    lines = [f"{'module':<44}  {'operation':<44}  {'calls':>7}  {'ms':>9}  {'share':>6}     per step, of {steps}"]
    for key in sorted(seconds, key=lambda key: -seconds[key])[:_ROWS]:
        module, operation = (text if len(text) <= 44 else text[:41] + "..." for text in key)
        share = seconds[key] / total
        lines.append(
            f"{module:<44}  {operation:<44}  {calls[key] / steps:>7.0f}  {1e3 * seconds[key]:>9.2f}  {share:>6.1%}"
        )
    lines.append(f"{len(seconds) - min(_ROWS, len(seconds))} more; {1e3 * total:.2f} ms in all")
    return "\n".join(lines) + "\n"


def _within(event: Any, prefix: str) -> Any:
    """The innermost event, from this one outwards, whose name begins with `prefix`."""
    while event is not None and not event.name.startswith(prefix):
        event = event.cpu_parent
    return event
