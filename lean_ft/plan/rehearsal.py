"""Rehearse one step of a real recipe on shapes, and count its memory and time.

The recipe's `main` runs in the world of a plan (`lean_ft.plan.world`), on tensors without contents. The batch is the
largest possible: every row has `data.max_length` tokens, every token is a target, and each row is full of what the
run's kinds of columns add (`lean_ft.data.kinds`).

With several devices, rank 0's step is simulated (`lean_ft.plan.ranks`).
"""

import contextlib
import gc
import logging
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch

from lean_ft.memory import wants_host_pool
from lean_ft.models.attention.kernels import planned_attention
from lean_ft.models.vision.describing import planned_towers
from lean_ft.plan.devices import ONE_DEVICE, Device, Machines
from lean_ft.plan.fusion import fusing_backend
from lean_ft.plan.ranks import pretended_ranks
from lean_ft.plan.result import NotSimulatedError, Rehearsal
from lean_ft.plan.step import StepTaken
from lean_ft.plan.trace import Trace
from lean_ft.plan.world import PlannedWorld, without_contents
from lean_ft.settings import MemoryConfig, ParallelConfig, RecipeConfig
from lean_ft.system.catalog import is_shipped
from lean_ft.system.log import console
from lean_ft.system.world import inside
from lean_ft.torch_private import functorch_config


def rehearse(
    recipe: ModuleType, cfg: RecipeConfig, device: Device, machines: Machines = ONE_DEVICE, *, takes_step: bool = True
) -> Rehearsal:
    """Run one step of `recipe.main(cfg)` for `device` without weights, data or the device; with several devices, rank
    0's step. With `takes_step=False`, stop before the step: this only raises the errors that a run would raise before
    it.

    Raises ValueError as the recipe for contradictory settings, for a model folder without a config.json, and for a
    recipe that takes no step; NotSimulatedError for a line of user code that needs values.
    """
    started = time.perf_counter()
    memory, parallel = cfg.group(MemoryConfig), cfg.group(ParallelConfig)
    trace = Trace(device, host_pool=memory is not None and wants_host_pool(memory), machines=machines)
    num_sharing = 1 if parallel is None else parallel.context * parallel.tensor
    planned = PlannedWorld(trace, num_sharing, takes_step)
    torch.compiler.reset()
    gc.freeze()  # the collections of `fusing_backend` then visit the objects of this rehearsal alone
    try:
        with (
            pretended_ranks(trace),
            inside(planned),
            planned_attention("auto" if memory is None else memory.attention),
            _quiet(),
            functorch_config.patch(activation_memory_budget=functorch_config.activation_memory_budget),
            torch.compiler.set_stance("default", force_backend=fusing_backend(trace)),
            planned.fake_mode,
            trace,
        ):
            recipe.main(without_contents(cfg))
        raise ValueError(
            "the recipe ended without a step. To plan it, it must take a step between steps() and log() of "
            "lean_ft.training.Run."
        )
    except StepTaken:
        pass
    except ValueError:
        raise
    except Exception as error:
        _raise_with_line(recipe, error)
        raise
    finally:
        gc.unfreeze()
        torch.compiler.reset()
    return _counted(trace, planned, time.perf_counter() - started)


def _counted(trace: Trace, planned: PlannedWorld, planning_seconds: float) -> Rehearsal:
    return Rehearsal(
        peak=trace.memory.peak,
        reserved_bytes=trace.memory.reserved_bytes,
        step_seconds=trace.time.step_seconds,
        tokens=planned.num_tokens,
        num_parameters=planned.num_parameters,
        tower_bytes=planned.tower_bytes,
        in_batch=dict(planned.in_batch),
        remarks=planned_towers(planned.tower_bytes, planned.in_batch),
        pinned_bytes=trace.memory.pinned_bytes,
        timeline=trace.timeline,
        planning_seconds=planning_seconds,
        machines=trace.machines,
        sent_bytes=int(trace.time.spent.sent_bytes),
        sent_away_bytes=int(trace.time.spent.sent_away_bytes),
        exchange_seconds=trace.time.spent.exchange_seconds,
        ledger=trace.time.spent.ledger,
        slow_paths=list(trace.slow_paths),
        model_files=planned.model_files,
        engine=planned.observer.engine,
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Print none of the recipe's log lines and compiler warnings: the run prints them."""
    before = logging.root.manager.disable, console.quiet
    logging.disable(logging.ERROR)
    console.quiet = True
    try:
        yield
    finally:
        logging.disable(before[0])
        console.quiet = before[1]


def _raise_with_line(recipe: ModuleType, error: Exception) -> None:
    """Raise NotSimulatedError with the line of the user's own recipe or function that failed; return if none is
    involved."""
    own = {module.__file__ for name, module in sys.modules.items() if name.startswith("user_functions.")}
    folder = None if is_shipped(recipe) else Path(recipe.__file__ or "").parent
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename in own or Path(frame.filename).parent == folder
    ]
    if frames:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise NotSimulatedError(
            f"{frames[-1].filename}, line {frames[-1].lineno}: `{frames[-1].line}` cannot be simulated ({reason}). The "
            "plan runs the recipe on tensors that have shapes and no values, so shapes that depend on values, such as "
            "x[mask] or nonzero(), are unknown. The run itself can still work. Use torch.where or multiply by the "
            "mask; or measure the peak of a short run: max_steps=5."
        ) from error
