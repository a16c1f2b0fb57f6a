"""The held-out losses of single sources: in the log, as the loss that a run watches, and in curves.

A line of metrics.jsonl has the mean of a source as `METRIC/NAME`, such as `eval_loss/chats`, if the held-out rows have
several sources.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from lean_ft.data import Prompt
from lean_ft.data.batches import EvalBatches
from lean_ft.losses import TokenStatistics
from lean_ft.models import Decoder
from lean_ft.quantize.held_out_loss import mean_loss
from lean_ft.settings import RecipeConfig
from lean_ft.system.log import say
from lean_ft.system.units import counted, number
from lean_ft.training.metrics import Row, is_number

MOST_SHOWN = 6  # sources in a line of the log, and panels of curves
_LOWEST_SHOWN = 2  # of them in a line, if there are more sources
_MOST_IN_TABLE = 3
LOSS = "eval_loss"


def values_of(row: Row, metric: str) -> dict[str, float | None]:
    """Return the values of single sources in a line of metrics, by name; None for a value that is not finite."""
    return {
        name.removeprefix(f"{metric}/"): value
        for name, value in row.items()
        if name.startswith(f"{metric}/") and (is_number(value) or name in row.get("non_finite", {}))
    }


def in_brackets(
    values: Mapping[str, float | None],
    shown: Callable[[float | None], str],
    first: str | None = None,
    ends: tuple[str, str] = ("highest", "lowest"),
) -> str:
    """Return ` (chats 1.9, maths 2.1)` for a number, or an empty string.

    Of many sources, those with the highest and the lowest values are shown, after the source `first`. A value that is
    not finite counts as high. ends: words for both.
    """

    def listed(names: Iterable[str]) -> str:
        return ", ".join(f"{name} {shown(values[name])}" for name in names)

    if len(values) <= MOST_SHOWN:
        return f" ({listed(values)})" if values else ""
    falling = sorted(values, key=lambda name: (values[name] is not None, -(values[name] or 0.0)))
    parts = [listed([first])] if first is not None and first in values else []
    parts += [f"{ends[0]} of {len(values)}: {listed(falling[: MOST_SHOWN - _LOWEST_SHOWN])}"]
    parts += [f"{ends[1]}: {listed(falling[-_LOWEST_SHOWN:])}"]
    return f" ({'; '.join(parts)})"


def held_out_losses(model: Decoder, held_out: EvalBatches) -> dict[str, Any]:
    """Return and say the mean loss over the targets of held-out rows as `loss`, and the losses of several sources as
    `loss_by_source`."""
    statistics, device = TokenStatistics(), model.output_weight.device
    loss = mean_loss(model, (batch.to(device) for batch in statistics.following(held_out)), statistics)
    of_sources = {name.removeprefix("loss/"): mean.item() for name, mean in statistics.source_means().items()}
    say("loss", number(loss) + in_brackets(of_sources, number))
    return {"loss": loss, **({"loss_by_source": of_sources} if of_sources else {})}


def describe_held_out(held_out: object) -> str | None:
    """Return how many held-out rows or prompts each source has, for the log; None unless they have several sources."""
    if isinstance(held_out, EvalBatches) and (column := held_out.layout.columns.sources) is not None:
        counts, what = column.num_rows(held_out.layout.columns, held_out.layout.arrangement.sides), "rows"
    elif isinstance(held_out, list) and held_out and isinstance(held_out[0], Prompt) and held_out[0].source is not None:
        counts, what = Counter[str](prompt.source for prompt in held_out), "prompts"
    else:
        return None
    shown = in_brackets(dict(counts), lambda count: f"{count:,.0f}", ends=("most rows", "fewest rows"))
    return counted(sum(counts.values()), what) + shown


# The loss that a run watches ------------------------------------------------------------------------------------------


def watched_metric(cfg: RecipeConfig) -> str:
    """Return the metric that decides for `stop_after_evals` and `keep_best`."""
    return LOSS if cfg.watched_source is None else f"{LOSS}/{cfg.watched_source}"


def watched_loss(cfg: RecipeConfig, row: Row) -> float | None:
    """Return the watched loss in the line of an evaluation; None if it is not finite or no token has a label.

    Raises ValueError if the recipe's evaluation has no means per source.
    """
    metric = watched_metric(cfg)
    if metric not in row and row[LOSS] is not None and not values_of(row, LOSS):
        raise ValueError(
            f"watched_source={cfg.watched_source}: the evaluation of this recipe has no loss of each source. In the "
            "recipe, loop over statistics.following(held_out), and call statistics.add_rows(loss=losses), as the "
            "recipes of lean_ft do."
        )
    return row.get(metric)


def check_is_held_out(cfg: RecipeConfig, held_out: object) -> None:
    """Raise ValueError if no row of the watched source is held out."""
    if cfg.watched_source is None or not isinstance(held_out, EvalBatches):
        return
    layout = held_out.layout
    column = layout.columns.sources
    counts = {} if column is None else column.num_rows(layout.columns, layout.arrangement.sides)
    if not counts.get(cfg.watched_source):
        raise ValueError(
            f"watched_source={cfg.watched_source}: none of its rows is held out. Raise data.validation_fraction, or "
            "set data.validation_source."
        )


# Curves ---------------------------------------------------------------------------------------------------------------


def undrawn(names: Iterable[str], rows: Iterable[Row]) -> dict[str, list[str]]:
    """Return the metrics of single sources that get no panel, by the metric of which they are parts: of many sources,
    all but those with the highest last values.

    names: of all metrics; rows: of all runs.
    """
    listed, last = {*names}, dict[str, float]()
    for row in rows:
        last |= {name: value for name, value in row.items() if is_number(value)}
    parts = dict[str, list[str]]()
    for name in listed:
        if is_of_source(name, listed):
            parts.setdefault(name.rpartition("/")[0], []).append(name)
    return {
        whole: sorted(some, key=lambda name: (-last.get(name, 0.0), name))[MOST_SHOWN:]
        for whole, some in sorted(parts.items())
        if len(some) > MOST_SHOWN
    }


def is_of_source(name: str, names: Collection[str]) -> bool:
    """Whether a metric is that of a single source, among the names of all metrics."""
    whole, _, source = name.rpartition("/")
    return bool(source) and whole.startswith("eval_") and whole in names


def title_of(name: str, names: Collection[str] = ()) -> str:
    """Return the title of a metric's panel, such as `held-out loss: chats`. names: of all metrics."""
    whole, source = name.rsplit("/", 1) if is_of_source(name, names) else (name, "")
    return whole.replace("eval_", "held-out ").replace("_", " ") + (f": {source}" if source else "")


def last_losses(rows: Iterable[Row]) -> dict[str, float]:
    """Return the last held-out loss of each source of a run."""
    found = dict[str, float]()
    for row in rows:
        found |= {name: value for name, value in values_of(row, LOSS).items() if value is not None}
    return found


def shown_losses(losses: Mapping[str, float]) -> str:
    """Return the losses of few sources for a table, `chats 1.9, maths 2.1`, or the highest one."""
    if len(losses) <= _MOST_IN_TABLE:
        return in_brackets(losses, number)[2:-1]
    highest = max(losses, key=lambda name: losses[name])
    return f"highest of {len(losses)}: {highest} {number(losses[highest])}"
