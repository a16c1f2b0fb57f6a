"""`leanft plan`: predict the memory of a run, and find settings that fit a budget."""

import math
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.text import Text

from lean_ft.cli.arguments import Debug, Overrides, Preset, Recipe, load_run
from lean_ft.cli.output import print_table, progress, stdout
from lean_ft.settings import GenerationConfig, OptimizerConfig, ParallelConfig
from lean_ft.system.units import counted, duration, gibibytes, parse_bytes

if TYPE_CHECKING:
    from lean_ft.plan.devices import Device, Machines
    from lean_ft.plan.result import Rehearsal
    from lean_ft.plan.search import Candidate, Search
    from lean_ft.settings import RecipeConfig

_ASSUMED = "A100 80GB"  # for --gpus, if this machine has no GPU and none is named
_SHOWN = 5  # settings listed of those that fit
_LEDGER_SHOWN = 25  # rows of the ledger; the rest is summed up
_COUNTED_TOKENS = 10**6  # for time and cost, if the number of steps depends on the data


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
        typer.Option(
            metavar='"RTX 4090"',
            help="Card to plan for. Its memory is the default budget. Separate several cards by commas to compare them "
            "in a table.",
        ),
    ] = None,
    price: Annotated[
        str | None,
        typer.Option(
            metavar="2.49",
            help="Price of one card per hour. Give one number, or one for each card, separated by commas.",
        ),
    ] = None,
    ledger: Annotated[
        bool, typer.Option("--ledger", help="List the step's kernels by module, the longest first.")
    ] = False,
    gpus: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Number of GPUs per machine."),
    ] = None,
    nodes: Annotated[int, typer.Option(metavar="M", min=1, help="Number of machines.")] = 1,
    engine_share: Annotated[
        float,
        typer.Option(
            metavar="0.4",
            help="With generation.engine=vllm on the GPU that trains: the server's --gpu-memory-utilization. Without "
            "this option, the server has its own GPU.",
        ),
    ] = 0.0,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="Plot memory over the step.")] = None,
    debug: Debug = False,
) -> None:
    """Predict a run's peak memory, time and cost.

    Simulates one step of the recipe on tensor shapes, with the longest batch that the settings allow.
    Needs the model's config.json, but no weights, data or GPU.
    With --gpus, one process simulates a step of `leanft run --nproc-per-node N --nnodes M`.
    """
    if gpus is None and nodes > 1:
        raise ValueError(f"--nodes {nodes} needs --gpus N, the number of GPUs per machine.")
    module, cfg = load_run(recipe, config, overrides, processes=(gpus or 1) * nodes)

    # Imported here because torch is slow to import and most verbs do not need it.
    from lean_ft.plan.devices import CUDA_CONTEXT_BYTES, DEVICES, Machines, choose_device
    from lean_ft.plan.known_plans import known_or_new, todays_cpu
    from lean_ft.plan.result import NotSimulatedError
    from lean_ft.plan.search import search, search_adapters

    names = [None] if device_name is None else device_name.split(",")
    machines = Machines(gpus or 1, nodes, _engine_share(engine_share, cfg))
    devices = [choose_device(name, cfg.device) for name in names]
    device, prices = devices[0], _prices(price, len(devices))
    if gpus is not None and device.is_cpu and cfg.device != "cpu":
        device = DEVICES[_ASSUMED]
    if device.is_cpu:
        device = todays_cpu()
    if len(devices) > 1 and (png is not None or ledger):
        raise ValueError("--png and --ledger show one card, and --device-name has several. Name one card.")
    if machines.num_devices > 1 and cfg.group(ParallelConfig) is None:
        raise ValueError(
            f"--gpus {machines.num_devices}: this recipe has no `parallel` settings, so it runs on one device. Plan "
            "finetune instead, or remove --gpus."
        )
    budget_bytes = parse_bytes(budget, "--budget") if budget is not None else device.memory_bytes
    context_bytes = 0 if device.is_cpu else CUDA_CONTEXT_BYTES
    if len(devices) > 1:
        _compare(module, cfg, devices, prices, machines, None if budget is None else budget_bytes)
        return
    started = time.perf_counter()
    with progress() as tell:
        tell("simulating a step on shapes")
        try:
            rehearsal = known_or_new(module, cfg, device, machines, needs_timeline=png is not None)
        except NotSimulatedError as error:
            raise ValueError(f"{error}") from error
    _print_rehearsal(rehearsal, device, time.perf_counter() - started)
    _print_engine(rehearsal, device)
    _print_time(rehearsal, cfg.max_steps, prices[0])
    if ledger:
        _print_ledger(rehearsal)
    if png is not None:
        from lean_ft.plan.picture import draw_timeline

        draw_timeline(rehearsal, png, f"{cfg.model.path} on {device.name}", budget_bytes)
        typer.echo(f"\ndrawn: {png}")
    if budget_bytes is None:
        return
    held = MemoryBudget(budget_bytes, context_bytes, rehearsal.engine_bytes)
    room_bytes = held.room_bytes
    _print_fit(rehearsal, held)
    sys.stdout.flush()  # the search takes up to minutes
    with progress() as tell:
        found = search(module, cfg, device, room_bytes, lambda s: tell(f"simulating {s}"), rehearsal, machines)
    typer.echo("")
    _print_search(found, rehearsal, cfg, held)
    sys.stdout.flush()
    with progress() as tell:
        adapters = search_adapters(module, cfg, device, room_bytes, lambda s: tell(f"simulating {s}"), machines)
    _print_adapters(adapters, rehearsal, cfg, is_gpu=context_bytes > 0)


class MemoryBudget(NamedTuple):
    """The memory to fit, and the parts of it that others take, in bytes."""

    num_bytes: int
    context_bytes: int
    engine_bytes: int

    @property
    def room_bytes(self) -> int:
        """What is left for the training."""
        return self.num_bytes - self.context_bytes - self.engine_bytes

    @property
    def kept(self) -> str:
        """The parts of others, in parentheses."""
        parts = {"the driver": self.context_bytes, "the engine": self.engine_bytes}
        told = [f"{gibibytes(count)} kept for {name}" for name, count in parts.items() if count > 0]
        return f" ({', '.join(told)})" if told else ""


def _engine_share(share: float, cfg: "RecipeConfig") -> float:
    generation = cfg.group(GenerationConfig)
    if not 0 <= share < 1:
        raise ValueError(f"--engine-share is {share:g}; expected a share of a GPU's memory below 1, such as 0.4.")
    if share and (generation is None or generation.engine == "own"):
        raise ValueError(
            f"--engine-share {share:g} is a server's share of the GPU, and this run samples without one. Set "
            "generation.engine=vllm, or remove --engine-share."
        )
    return share


def _prices(text: str | None, num_cards: int) -> list[float | None]:
    """The price of each card; None if no price is given."""
    if text is None:
        return [None] * num_cards
    try:
        prices = [float(part) for part in text.split(",")]
    except ValueError:
        prices = []
    if not prices or not all(0 <= price < math.inf for price in prices):
        raise ValueError(
            f"--price is {text!r}; expected a number per hour, such as 2.49, or one for each card: 2.49,0.69."
        )
    if len(prices) not in (1, num_cards):
        raise ValueError(
            f"--price has {len(prices)} prices for {num_cards} cards. Give one price, or one for each card."
        )
    return [*prices] * (num_cards // len(prices))


def _run_seconds(rehearsal: "Rehearsal", max_steps: int | None) -> tuple[str, float]:
    """What is counted and the time it takes: `max_steps`, or a million tokens, because the number of rows is
    unknown."""
    if max_steps is not None:
        return counted(max_steps, "steps"), max_steps * rehearsal.whole_step_seconds
    return f"{_COUNTED_TOKENS:,} tokens", _COUNTED_TOKENS / rehearsal.tokens_per_second


def _cost(seconds: float, price: float, rehearsal: "Rehearsal") -> str:
    samples_apart = rehearsal.engine is not None and not rehearsal.engine.shares_device
    return f"${seconds / 3600 * price * (rehearsal.machines.num_devices + samples_apart):,.2f}"


def _short(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 10 else duration(seconds)


def _print_time(rehearsal: "Rehearsal", max_steps: int | None, price: float | None) -> None:
    counted, seconds = _run_seconds(rehearsal, max_steps)
    cost = "" if price is None else f" and cost {_cost(seconds, price, rehearsal)}"
    stdout().print(
        f"speed: {rehearsal.tokens_per_second:,.0f} tokens/s, {_short(rehearsal.whole_step_seconds)} a step; {counted} "
        f"take {_short(seconds)} ({seconds / 3600:,.2f} h){cost}"
    )


def _print_ledger(rehearsal: "Rehearsal") -> None:
    from lean_ft.plan.result import Launches

    rows = sorted(rehearsal.ledger.items(), key=lambda row: -row[1].seconds)
    rest, total = Launches(), Launches()
    for i, (_, launches) in enumerate(rows):
        total = total.plus(launches)
        rest = rest.plus(launches) if i >= _LEDGER_SHOWN else rest
    shown = [(*place, launches) for place, launches in rows[:_LEDGER_SHOWN]]
    if rest.number > 0:
        shown.append(("", f"{len(rows) - _LEDGER_SHOWN} others", rest))
    cells = [
        (
            module,
            name,
            f"{costs.number:,.0f}",
            f"{costs.flops / 1e12:,.2f}",
            gibibytes(int(costs.moved_bytes)),
            f"{costs.seconds * 1e3:,.2f} ms",
            f"{costs.seconds / total.seconds:.1%}",
        )
        for module, name, costs in [*shown, ("", "all", total)]
    ]
    stdout().print()
    print_table(("module", "kernel", ">launches", ">TFLOP", ">moved", ">time", ">share"), cells)
    stdout().print(
        f"the step takes {_short(rehearsal.step_seconds)}; its kernels take {rehearsal.share_at_limit:.0%} of "
        "that at the card's published rates"
    )


def _compare(
    module: ModuleType,
    cfg: "RecipeConfig",
    devices: "list[Device]",
    prices: list[float | None],
    machines: "Machines",
    budget_bytes: int | None,
) -> None:
    """Print a row per card."""
    from lean_ft.plan.devices import CUDA_CONTEXT_BYTES
    from lean_ft.plan.known_plans import known_or_new
    from lean_ft.plan.result import NotSimulatedError

    rows, counted = [], ""
    with progress() as tell:
        for device, price in zip(devices, prices, strict=True):
            tell(f"simulating a step on {device.name}")
            try:
                rehearsal = known_or_new(module, cfg, device, machines)
            except NotSimulatedError as error:
                raise ValueError(f"{error}") from error
            room = MemoryBudget(budget_bytes or device.memory_bytes or 0, CUDA_CONTEXT_BYTES, rehearsal.engine_bytes)
            samples = rehearsal.engine is None or rehearsal.engine.rows > 0
            fits = "yes" if samples and rehearsal.reserved_bytes <= room.room_bytes else "no"
            counted, seconds = _run_seconds(rehearsal, cfg.max_steps)
            rows.append(
                (
                    device.name,
                    fits,
                    gibibytes(rehearsal.peak_bytes),
                    f"{rehearsal.tokens_per_second:,.0f}",
                    _short(rehearsal.whole_step_seconds),
                    f"{seconds / 3600:,.2f} h",
                    *([] if price is None else [_cost(seconds, price, rehearsal)]),
                )
            )
    cost = [] if prices[0] is None else [">cost"]
    print_table(("card", "fits", ">peak", ">tokens/s", ">step", f">{counted}", *cost), rows)


def _print_rehearsal(rehearsal: "Rehearsal", device: "Device", seconds: float) -> None:
    console, machines = stdout(), rehearsal.machines
    is_alone = machines.num_devices == 1
    places = f" on {machines.count} machines" if machines.count > 1 else ""
    devices = device.name if is_alone else f"{machines.num_devices} x {device.name}{places}"
    console.print(
        f"{rehearsal.num_parameters:,} parameters, {rehearsal.tokens:,} tokens a step, planned for {devices} "
        f"in {duration(seconds)}"
    )
    for remark in rehearsal.remarks:
        console.print(remark)
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
    for slow_path in rehearsal.slow_paths:
        console.print(slow_path, markup=False, soft_wrap=True)
    if rehearsal.pinned_bytes:
        console.print(f"pinned host memory: {gibibytes(rehearsal.pinned_bytes)}")
    if not is_alone:
        away = f" and {gibibytes(rehearsal.sent_away_bytes)} to other machines" if machines.count > 1 else ""
        console.print(
            f"each GPU sends {gibibytes(rehearsal.sent_bytes)} within its machine{away} per step; this takes "
            f"{duration(rehearsal.exchange_seconds)} during the computation, and the step "
            f"{duration(rehearsal.step_seconds)}"
        )
        console.print("Times are estimates from the speeds of the card and its links. NCCL's buffers are not counted.")


def _print_engine(rehearsal: "Rehearsal", device: "Device") -> None:
    """What a server takes that samples for the run, and a round's time with and without generation.ahead."""
    if (engine := rehearsal.engine) is None:
        return
    console, held = stdout(), engine.weight_bytes + engine.cache_bytes
    place = f"the same {device.name}" if engine.shares_device else f"a separate {device.name}"
    limit = "" if engine.memory_bytes is None else f" of the {gibibytes(engine.memory_bytes)} that it may take"
    console.print(Text(f"engine on {place}: {gibibytes(held)}{limit}", style="bold"))
    rows = counted(max(1, engine.rows), "completions")
    print_table(
        ("", ">"),
        [("  weights", gibibytes(engine.weight_bytes)), (f"  KV cache of {rows}", gibibytes(engine.cache_bytes))],
    )
    if not engine.rows:
        console.print(
            f"the engine does not fit: its weights and one completion need {gibibytes(held)}, and it may take "
            f"{gibibytes(engine.memory_bytes or 0)}. Raise --engine-share, or use a larger GPU for it. Sampling is not "
            "counted."
        )
        return
    training = rehearsal.step_seconds * engine.steps
    console.print(
        f"round: {counted(engine.completions, 'completions')} of {counted(engine.new_tokens, 'tokens')}; weights "
        f"{_short(engine.publication_seconds)} ({engine.way}, {gibibytes(engine.published_bytes)}), sampling "
        f"{_short(engine.sampling_seconds)} ({engine.token_seconds * 1e3:.1f} ms for a token of {rows}), training "
        f"{_short(training)}"
    )
    after, ahead = (engine.seconds(rehearsal.step_seconds, is_ahead) for is_ahead in (False, True))
    gain = f"{after / ahead:.2f}x as fast" if not engine.shares_device else "no gain on one device"
    console.print(
        f"a round takes {_short(after)} one after the other, and {_short(ahead)} with generation.ahead=1 ({gain}). "
        "Rewards, tools, and the engine's activations and CUDA graphs are not counted."
    )


def _print_fit(rehearsal: "Rehearsal", budget: MemoryBudget) -> None:
    """Whether the given settings fit, before the search."""
    left = budget.room_bytes - rehearsal.reserved_bytes
    fit = f"fit, with {gibibytes(left)} left" if left >= 0 else f"do not fit: {gibibytes(-left)} too much"
    stdout().print(
        f"\nbudget {gibibytes(budget.num_bytes)}{budget.kept}: the given settings {fit}. Searching for faster settings "
        "that fit.",
    )


def _print_search(search: "Search", rehearsal: "Rehearsal", cfg: "RecipeConfig", budget: MemoryBudget) -> None:
    from lean_ft.plan.search import compares_steps, with_overrides

    console, is_gpu = stdout(), budget.context_bytes > 0
    if not search.fitting:
        nearest = search.too_large[0]
        console.print(
            f"no settings fit {gibibytes(budget.num_bytes)}{budget.kept}. The smallest need "
            f"{gibibytes(nearest.reserved_bytes)}: {nearest.command_line or 'the given settings'}"
        )
        console.print("Lower data.max_length, or use a smaller model.")
        return
    console.print(f"settings that fit {gibibytes(budget.num_bytes)}{budget.kept}, fastest first:")
    _print_candidates(search.fitting[:_SHOWN], rehearsal, is_gpu)
    fastest = search.fitting[0].command_line or "nothing, the given settings are the fastest"
    console.print(f"\nto use the fastest, add: {fastest}", highlight=False)
    if compares_steps(cfg):
        chosen = with_overrides(cfg, search.fitting[0].overrides)
        size, number = chosen.batch_size, chosen.gradient_accumulation_steps
        console.print(
            f"micro-batches {size} x {number}: batch_size={size} gradient_accumulation_steps={number} "
            f"({size * number:,} rows per step, all compared with each other)",
            highlight=False,
        )
    if search.more_rows:
        console.print("\nwith more rows per step, which fit too and may need another learning rate:")
        _print_candidates(search.more_rows[:_SHOWN], rehearsal, is_gpu)
    console.print("Speeds are estimates relative to the given settings.")


def _print_candidates(candidates: "list[Candidate]", rehearsal: "Rehearsal", is_gpu: bool) -> None:
    columns = _columns(candidates, is_gpu)
    rows = [
        ("" if i else "  *", *_cells(candidate, rehearsal, columns), candidate.command_line or "(as given)")
        for i, candidate in enumerate(candidates)
    ]
    print_table(("", *columns, "overrides"), rows)


def _columns(candidates: "list[Candidate]", is_gpu: bool) -> list[str]:
    pins = any(candidate.rehearsal.pinned_bytes for candidate in candidates)
    return [">peak", *[">reserved"] * is_gpu, *[">pinned"] * pins, ">speed"]


def _cells(candidate: "Candidate", rehearsal: "Rehearsal", columns: list[str]) -> list[str]:
    """Memory and speed of a candidate. `pinned` is host memory."""
    cells = {
        ">peak": gibibytes(candidate.peak_bytes),
        ">reserved": gibibytes(candidate.reserved_bytes),
        ">pinned": gibibytes(candidate.rehearsal.pinned_bytes),
        ">speed": f"{candidate.tokens_per_second / rehearsal.tokens_per_second:.2f}x",
    }
    return [cells[column] for column in columns]


def _print_adapters(adapters: "dict[str, Search]", rehearsal: "Rehearsal", cfg: "RecipeConfig", is_gpu: bool) -> None:
    if not adapters:
        return
    best = {command: [*search.fitting, *search.too_large][:1] for command, search in adapters.items()}
    columns, rows, refused = _columns([one for found in best.values() for one in found], is_gpu), [], []
    for command, search in adapters.items():
        name = "QLoRA" if "nf4" in command else "LoRA"
        for candidate in best[command]:
            fits, cells = "yes" if search.fitting else "no", _cells(candidate, rehearsal, columns)
            rows.append((name, fits, *cells, f"{command} {candidate.command_line}"))
        refused += [f"{name} is refused: {reason}" for reason in search.refused.values() if not best[command]]
    stdout().print("\nwith an adapter instead, whose frozen weights are as they are (LoRA) or in 4 bits (QLoRA):")
    print_table(("", "fits", *columns, "recipe and overrides"), rows)
    optimizer, usual = cfg.needed(OptimizerConfig), cfg.usual_lr.adapter
    is_set = "lr" in optimizer.model_fields_set
    rate = f"An adapter trains with optimizer.lr={usual:g}, unless you set another."
    if is_set and optimizer.peak_lr < usual / 2:
        rate = f"Set optimizer.lr={usual:g} too, the default for an adapter: {optimizer.peak_lr:g} is set."
    stdout().print("\n".join([*refused, rate]), markup=False, highlight=False)
