"""`profile=true`: the time and memory of the operations of a few steps, in output_dir/profile.

trace.json.gz    every operation and allocation, for https://ui.perfetto.dev or chrome://tracing
operations.txt   PyTorch's table of operations by self time, summed over the profiled steps

The profiler is PyTorch's, with its waiting and warm-up steps. The trace names the modules, by hooks, which would
recompile compiled layers. So with compile=true the trace has no modules, and kernels have the compiler's names.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from torch.utils.hooks import RemovableHandle

from lean_ft.settings import RecipeConfig
from lean_ft.system.log import say
from lean_ft.system.observer import Observer

FOLDER, OPERATIONS_FILE, TRACE_FILE = "profile", "operations.txt", "trace.json.gz"
_MODULE = "module: "
_ROWS = 40  # of operations.txt


@contextmanager
def profiled(cfg: RecipeConfig, model: nn.Module, device: torch.device, writes: bool) -> Iterator[Observer]:
    """Context manager with the profiler, which observes the steps; an observer that does nothing if nothing is
    profiled."""
    if not cfg.profile or not writes:
        yield Observer()
        return
    profiler = StepProfiler(cfg.output_dir / FOLDER, model, device, cfg.profile_steps, names_modules=not cfg.compile)
    try:
        yield profiler
    finally:
        profiler.stop()


class StepProfiler(Observer):
    """Profiles training steps. `steps`: how many steps to wait, to warm up and to profile."""

    def __init__(
        self, folder: Path, model: nn.Module, device: torch.device, steps: tuple[int, int, int], names_modules: bool
    ) -> None:
        self._folder: Path | None = folder
        self._device, self._steps, self._done = device, steps, 0
        self._hooks = _name_modules(model) if names_modules else []
        folder.mkdir(parents=True, exist_ok=True)
        wait, warmup, active = steps
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(
            activities=activities,
            schedule=schedule(wait=wait, warmup=warmup, active=active, repeat=1),
            on_trace_ready=self._write,
            profile_memory=True,
            acc_events=True,
        )
        self._profile.start()

    def end_step(self) -> None:
        self._done += 1
        if self._done <= sum(self._steps):
            self._profile.step()

    def stop(self) -> None:
        if self._done < sum(self._steps):
            say(
                "profile",
                f"not written: it needs {sum(self._steps)} steps (profile_steps), and the run made {self._done}",
            )
            self._folder = None  # an incomplete profile is not written
            self._profile.stop()
        for hook in self._hooks:
            hook.remove()

    def _write(self, done: profile) -> None:
        if self._folder is None:
            return
        done.export_chrome_trace(str(self._folder / TRACE_FILE))
        own_time = "self_device_time_total" if self._device.type == "cuda" else "self_cpu_time_total"
        table = done.key_averages().table(sort_by=own_time, row_limit=_ROWS, max_name_column_width=60)
        (self._folder / OPERATIONS_FILE).write_text(table, encoding="utf-8")
        say("profile", f"{self._folder}: {TRACE_FILE}, {OPERATIONS_FILE}")


def _name_modules(model: nn.Module) -> list[RemovableHandle]:
    """Register hooks that name each module in the profile."""
    hooks, open_names = [], list[record_function]()

    def opens(name: str) -> Callable[[nn.Module, object], None]:
        def open_name(module: nn.Module, inputs: object) -> None:
            open_names.append(record_function(_MODULE + name))
            open_names[-1].__enter__()

        return open_name

    def close_name(module: nn.Module, inputs: object, output: object) -> None:
        open_names.pop().__exit__(None, None, None)

    for name, module in model.named_modules():
        if name:
            hooks.append(module.register_forward_pre_hook(opens(name)))
            # Also if checkpointing leaves a layer early by an exception, once backward has all it needs.
            hooks.append(module.register_forward_hook(close_name, always_call=True))
    return hooks
