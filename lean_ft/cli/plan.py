"""`leanft plan`: predict the memory of a run, and find settings that fit a budget."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from lean_ft.cli.arguments import Debug, Overrides, Preset, Recipe, load_run
from lean_ft.cli.output import print_table, progress, stdout
from lean_ft.settings import ParallelConfig
from lean_ft.system.units import duration, gibibytes, parse_bytes

if TYPE_CHECKING:
    from lean_ft.plan.devices import Device
    from lean_ft.plan.rehearsal import Rehearsal
    from lean_ft.plan.search import Search

_ASSUMED = "A100 80GB"  # for --gpus, if this machine has no GPU and none is named
_SHOWN = 5  # settings listed of those that fit


def plan(
    recipe: Recipe = None,
    overrides: Overrides = None,
    config: Preset = None,
    budget: Annotated[
        str | None,
        typer.Option(metavar="24GiB", help="Find the fastest settings whose peak fits into this amount of memory."),
    ] = None,
    device_name: Annotated[
        str | None,
        typer.Option(metavar='"RTX 4090"', help="Card to plan for. Its memory is the default budget."),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Number of GPUs per machine."),
    ] = None,
    nodes: Annotated[int, typer.Option(metavar="M", min=1, help="Number of machines.")] = 1,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="Plot memory over the step.")] = None,
    debug: Debug = False,
) -> None:
    """Predict a run's peak memory and when it occurs.

    Simulates one step of the recipe on tensor shapes, with the longest batch that the settings allow.
    Needs the model's config.json, but no weights, data or GPU.
    With --gpus, one process simulates a step of `leanft run --nproc-per-node N --nnodes M`.
    """
    if gpus is None and nodes > 1:
        raise ValueError(f"--nodes {nodes} needs --gpus N, the number of GPUs per machine.")
    module, cfg = load_run(recipe, config, overrides, writes=False, processes=(gpus or 1) * nodes)

    # Imported here because torch is slow to import and most verbs do not need it.
    from lean_ft.plan.devices import CUDA_CONTEXT_BYTES, DEVICES, Machines, choose_device
    from lean_ft.plan.rehearsal import NotSimulatedError, rehearse
    from lean_ft.plan.search import search

    device, machines = choose_device(device_name, cfg.device), Machines(gpus or 1, nodes)
    if gpus is not None and device.is_cpu and cfg.device != "cpu":
        device = DEVICES[_ASSUMED]
    if machines.num_devices > 1 and cfg.group(ParallelConfig) is None:
        raise ValueError(
            f"--gpus {machines.num_devices}: this recipe has no `parallel` settings, so it runs on one device. Plan finetune "
            "instead, or remove --gpus."
        )
    budget_bytes = parse_bytes(budget, "--budget") if budget is not None else device.memory_bytes
    context_bytes = 0 if device.is_cpu else CUDA_CONTEXT_BYTES
    started, found = time.perf_counter(), None
    with progress() as tell:
        tell("simulating a step on shapes")
        try:
            own = rehearse(module, cfg, device, machines)
        except NotSimulatedError as error:
            raise ValueError(f"{error}") from error
        if budget_bytes is not None:
            peak = f"peak {gibibytes(own.peak_bytes)} with the given settings; simulating "
            found = search(module, cfg, device, budget_bytes - context_bytes, lambda s: tell(peak + s), own, machines)
    _print_rehearsal(own, device, time.perf_counter() - started)
    if png is not None:
        from lean_ft.plan.picture import draw_timeline

        draw_timeline(own, png, f"{cfg.model.path} on {device.name}", budget_bytes)
        typer.echo(f"\ndrawn: {png}")
    if found is not None and budget_bytes is not None:
        typer.echo("")
        _print_search(found, own, budget_bytes, context_bytes)


def _print_rehearsal(rehearsal: "Rehearsal", device: "Device", seconds: float) -> None:
    console, machines = stdout(), rehearsal.machines
    is_alone = machines.num_devices == 1
    places = f" on {machines.count} machines" if machines.count > 1 else ""
    devices = device.name if is_alone else f"{machines.num_devices} x {device.name}{places}"
    console.print(
        f"{rehearsal.num_parameters:,} parameters, {rehearsal.tokens:,} tokens a step, planned for {devices} "
        f"in {duration(seconds)}"
    )
    each = "" if is_alone else " on each"
    console.print(Text(f"peak {gibibytes(rehearsal.peak_bytes)}{each}, {rehearsal.peak.where}", style="bold"))
    labels = sorted(rehearsal.peak.bytes_by_label.items(), key=lambda item: -item[1])
    shown = [("  " + label, gibibytes(count)) for label, count in labels if count >= 2**20]
    print_table(("", ">"), shown)
    if not device.is_cpu:
        reserved = gibibytes(rehearsal.reserved_bytes)
        console.print(f"reserved by the allocator: {reserved}, plus the driver's context")
    else:
        console.print("plus about 0.5 GiB for the process and its libraries")
    if rehearsal.pinned_bytes:
        console.print(f"pinned host memory: {gibibytes(rehearsal.pinned_bytes)}")
    if not is_alone:
        away = f" and {gibibytes(rehearsal.sent_away_bytes)} to other machines" if machines.count > 1 else ""
        console.print(
            f"each GPU sends {gibibytes(rehearsal.sent_bytes)} within its machine{away} per step; this takes "
            f"{duration(rehearsal.exchange_seconds)} during the computation, and the step {duration(rehearsal.step_seconds)}"
        )
        console.print("Times are estimates from the speeds of the card and its links. NCCL's buffers are not counted.")


def _print_search(found: "Search", rehearsal: "Rehearsal", budget_bytes: int, context_bytes: int) -> None:
    console, is_gpu = stdout(), context_bytes > 0
    held_back = f" ({gibibytes(context_bytes)} kept for the driver)" if is_gpu else ""
    if not found.fitting:
        nearest = found.too_large[0]
        console.print(
            f"no settings fit {gibibytes(budget_bytes)}{held_back}. The smallest need {gibibytes(nearest.reserved_bytes)}: "
            f"{nearest.command_line or 'the given settings'}"
        )
        console.print("Lower data.max_length, or use a smaller model.")
        return
    own_speed = rehearsal.tokens / rehearsal.step_seconds
    console.print(f"settings that fit {gibibytes(budget_bytes)}{held_back}, fastest first:")
    rows = [
        (
            "" if i else "  *",
            gibibytes(candidate.peak_bytes),
            *([gibibytes(candidate.reserved_bytes)] if is_gpu else []),
            f"{candidate.tokens_per_second / own_speed:.2f}x",
            candidate.command_line or "(as given)",
        )
        for i, candidate in enumerate(found.fitting[:_SHOWN])
    ]
    print_table(("", ">peak", *([">reserved"] if is_gpu else []), ">speed", "overrides"), rows)
    console.print(f"\nto use the fastest, add: {found.fitting[0].command_line or 'nothing'}", highlight=False)
    console.print("Speeds are estimates relative to the given settings.")
