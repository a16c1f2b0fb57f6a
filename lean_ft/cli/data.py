"""`leanft data`: inspect training data before a run. Loads the tokenizer, never the weights."""

import io
import json
import re
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from shlex import quote
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, get_origin

import typer
import yaml
from pydantic import BaseModel, create_model
from rich.console import Console
from rich.style import Style
from rich.text import Text

from lean_ft.cli.arguments import Debug, Overrides, Preset, load_run
from lean_ft.cli.output import print_note, print_table, progress, stdout
from lean_ft.cli.repeats import print_repeats
from lean_ft.hub.paths import EMBEDDED
from lean_ft.settings import (
    DataConfig,
    OnlineConfig,
    PromptDataConfig,
    PromptRowsConfig,
    RecipeConfig,
    RowsConfig,
)
from lean_ft.system import catalog
from lean_ft.system.redaction import escaped
from lean_ft.system.spelling import did_you_mean
from lean_ft.system.units import gibibytes

if TYPE_CHECKING:
    from lean_ft.data.embedded_models import EmbeddedModel
    from lean_ft.data.rows import Row
    from lean_ft.tokenizers import Tokenizer

TRAINED, MASKED = Style(color="green", bold=True), Style(dim=True)
REJECTED = Style(color="red", bold=True)
CONTROL = Style(color="magenta")
BAR_WIDTH = 40
PAGE_WIDTH = 100_000  # characters; the browser wraps the lines
NOTES_SHOWN = 5
EXAMPLES = Path(__file__).parents[1] / "assets" / "examples.yaml"
# The page of `preview --html`. rich escapes the rows; the policy is a second line of defense: no scripts, no requests.
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>leanft data preview</title>
<style>
{stylesheet}
body {{ color: {foreground}; background: {background}; }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; }}
</style>
</head>
<body><pre>{code}</pre></body>
</html>
"""

THUMBNAIL = "\ufdd2"  # around the data URL of a small picture; rich writes texts alone
DataOrRecipe = Annotated[
    str | None,
    typer.Argument(
        metavar="FILE|RECIPE", help="Data file, glob, Hub data set (org/name), or a run's recipe.", show_default=False
    ),
]

app = typer.Typer(
    help="Inspect the data of a run: sequence lengths, or rows as the model sees them.",
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def data(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def stats(
    recipe: DataOrRecipe = None,
    overrides: Overrides = None,
    config: Preset = None,
    peak: Annotated[
        bool, typer.Option("--peak", help="Also predict the peak memory of a step at each length. Slow.")
    ] = False,
    duplicates: Annotated[
        bool, typer.Option("--duplicates", help="Instead, find rows that nearly repeat others, with examples.")
    ] = False,
    contamination: Annotated[
        str | None,
        typer.Option(
            "--contamination",
            metavar="TASKS",
            help="Instead, find questions of evaluation tasks in training rows. As tasks=TASKS of `leanft evaluate`.",
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Print the lengths of a file's or a run's rows, and the cost of each maximum length.

    For a FILE, the fields of its rows decide the recipe, and model.path=tiny is the default.
    RECIPE and settings are the same as for `leanft run`.
    """
    module, cfg = _settings(recipe, config, overrides, takes_step=peak)
    from lean_ft.data import statistics
    from lean_ft.data.objective import objective_of
    from lean_ft.tokenizers import load_tokenizer

    tokenizer = load_tokenizer(cfg.model, cfg.data.chat_template)
    if duplicates or contamination is not None:
        print_repeats(cfg.data, tokenizer, duplicates, contamination, peak)
        return
    cfg = _with_tools(cfg, tokenizer)
    prompts_only = isinstance(cfg.data, PromptRowsConfig)
    if prompts_only and peak:
        raise ValueError("--peak predicts steps on rows of a length, and this recipe samples its rows. Remove it.")
    facts = statistics.gather_statistics(cfg.data, tokenizer)
    console = stdout()
    console.print(Text(escaped(f"{facts.report}\n")))
    _print_sources(console, cfg, tokenizer)
    _print_histogram(console, statistics.histogram(facts.lengths))
    shares = [0.05, 0.5, 0.95, 0.99, 1.0]
    lengths = statistics.quantiles(facts.lengths, shares)
    quantiles = ", ".join(f"{share:.0%} {length:,}" for share, length in zip(shares, lengths, strict=True))
    console.print(Text(f"tokens per row, at most: {quantiles}\n"))
    for name, beside in facts.beside.items():
        lengths = statistics.quantiles(beside, shares)
        quantiles = ", ".join(f"{share:.0%} {length:,}" for share, length in zip(shares, lengths, strict=True))
        console.print(Text(escaped(f"tokens of the {name}'s sequence, at most: {quantiles}\n")))
    for unit, tokens in facts.of_kinds.items():
        if len(tokens):
            typical, high, most = statistics.quantiles(tokens, [0.5, 0.99, 1.0])
            console.print(Text(f"tokens per {unit}, at most: 50% {typical:,}, 99% {high:,}, 100% {most:,}\n"))
    if prompts_only:
        too_long = int((facts.lengths > cfg.data.max_length).sum())
        console.print(Text(f"{too_long:,} longer than max_prompt_length={cfg.data.max_length}, which a run drops"))
        return
    for remark in objective_of(cfg.data).remarks(facts.lengths, facts.num_targets):
        console.print(Text(escaped(f"{remark}\n")))
    candidates = sorted({*statistics.CANDIDATES, cfg.data.max_length})
    rows = [
        statistics.at_length(facts.lengths, length, batch_size=cfg.batch_size, seed=cfg.seed, sides=len(cfg.data.sides))
        for length in candidates
    ]
    peaks = _peaks(module, cfg, cfg.data, candidates) if peak else {}
    is_stand_in = cfg.model.path in EMBEDDED  # its short context says nothing about the user's model
    column = (">peak",) if peak else ()
    print_table(
        (">max_length", ">rows cut", ">tokens lost", ">padding", ">packed", ">full", *column, ""),
        [
            (
                f"{row.max_length:,}",
                f"{row.rows_cut:,} ({row.rows_cut / len(facts.lengths):.1%})",
                f"{row.lost_tokens:,} ({row.lost_tokens / facts.lengths.sum():.1%})",
                f"{row.padding:.1%}",
                f"{row.packed_rows:,}",
                f"{row.packing_efficiency:.2%}",
                *((peaks[row.max_length],) if peak else ()),
                _remark(row.max_length, cfg.data.max_length, None if is_stand_in else tokenizer.context_length),
            )
            for row in rows
        ],
    )
    console.print(Text(f"padding: in batches of {cfg.batch_size} without packing; packed: rows with data.packing=bfd"))
    if peak:
        console.print(Text("peak: of a step whose rows are all that long, as `leanft plan` predicts it"))


@app.command()
def preview(
    recipe: DataOrRecipe = None,
    overrides: Overrides = None,
    config: Preset = None,
    rows: Annotated[int, typer.Option("--rows", "-n", min=1, metavar="N", help="Number of rows to show.")] = 3,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page to share, and print no rows.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Print the first rows of a file or a run as the model sees them: trained, masked and control tokens.

    For a FILE, the fields of its rows decide the recipe, and model.path=tiny is the default.
    RECIPE and settings are the same as for `leanft run`.
    """
    _, cfg = _settings(recipe, config, overrides)
    from lean_ft.data.preview import preview as look
    from lean_ft.tokenizers import load_tokenizer

    tokenizer = load_tokenizer(cfg.model, cfg.data.chat_template)
    cfg = _with_tools(cfg, tokenizer)
    shown = look(cfg.data, tokenizer, num_rows=rows, batch_size=cfg.batch_size)
    page = Console(file=io.StringIO(), record=True, force_terminal=True, highlight=False, width=PAGE_WIDTH)
    console = stdout() if html is None else page
    for number, row in enumerate(shown.rows, start=1):
        _print_row(console, number, row, packed=len(row.documents) > 1 or row.padding is not None)
    more = len(shown.notes) - NOTES_SHOWN
    for note in [*shown.notes[:NOTES_SHOWN], *([f"... and {more:,} more, cut or left out"] if more > 0 else [])]:
        console.print(Text(escaped(note), style="yellow"))
    console.print(Text(escaped(f"from {shown.report}")))
    if html is not None:
        html.parent.mkdir(parents=True, exist_ok=True)
        picture = r'<img alt="" src="\1">'
        written = re.sub(f"{THUMBNAIL}([\\w:;,+/=]+){THUMBNAIL}", picture, page.export_html(code_format=PAGE))
        html.write_text(written, encoding="utf-8")
        stdout().print(Text(escaped(f"wrote {html}: {len(shown.rows)} rows from {shown.report}")))


def _remark(length: int, set_length: int, context_length: int | None) -> str:
    beyond = f"beyond the model's context of {context_length:,}" if length > (context_length or length) else ""
    return ", ".join(filter(None, ("as set" if length == set_length else "", beyond)))


def _settings(
    recipe: str | None, config: str | None, overrides: list[str] | None, takes_step: bool = False
) -> tuple[ModuleType, Any]:
    """Return the recipe and the settings of the run. Without `takes_step`, only `data` is required: an embedded model
    reads the rows if there is no `model.path`, and other settings, such as `rewards`, may be missing. Raise
    ValueError if the recipe has no data."""
    if recipe is not None and _names_data(recipe):
        recipe, overrides = _run_on_file(recipe, config, overrides or [])
    else:  # RECIPE FILE; a mistyped setting such as `data.packing` is no file
        files = {word for word in overrides or [] if _names_data(word) and ({*"/*?"} & {*word} or Path(word).exists())}
        overrides = [f"data.source={word}" if word in files else word for word in overrides or []]
    stand_in: EmbeddedModel | None = None

    def prepare(config_class: type[BaseModel], given: Mapping[str, str]) -> tuple[type[BaseModel], list[str]]:
        nonlocal stand_in
        fields = config_class.model_fields
        if issubclass(config_class, RecipeConfig) and {"model", "data"} <= fields.keys() and "model.path" not in given:
            stand_in = _stand_in(given)
        return config_class if takes_step else _of_rows(config_class), [*stand_in.settings] if stand_in else []

    module, cfg = load_run(recipe, config, overrides, prepare=prepare)
    if stand_in is not None:
        if cfg.has_turns:
            from lean_ft.data.embedded_models import FOR_TURNS  # here, because it imports numpy

            stand_in = FOR_TURNS
            cfg = cfg.model_copy(update={"model": cfg.model.model_copy(update={"path": stand_in.path})})
        _note_stand_in(stand_in)
    data: Any = getattr(cfg, "data", None)
    data = data.rows([]) if isinstance(data, PromptDataConfig) else data
    if not isinstance(data, DataConfig) or not hasattr(cfg, "model"):
        raise ValueError(
            f"the recipe {recipe or config} has no `data` or no `model` settings, so it has no rows to show."
        )
    from lean_ft.data.objective import objective_of

    return module, cfg.model_copy(update={"data": objective_of(data).completed(data)})


def _of_rows(config_class: type[BaseModel]) -> type[BaseModel]:
    """Return a recipe's Config in which only `data` and `model` are required. Others are None or an empty list."""
    optional: dict[str, Any] = {}
    for name, field in config_class.model_fields.items():
        annotation: Any = field.annotation
        if field.is_required() and name not in ("data", "model"):
            optional[name] = (annotation, []) if get_origin(annotation) is list else (annotation | None, None)
    return create_model("Config", __base__=config_class, __module__=config_class.__module__, **optional)


def _stand_in(given: Mapping[str, str]) -> "EmbeddedModel":
    """Return the embedded model that reads the first rows of the data of these settings."""
    from lean_ft.data.embedded_models import FOR_TEXTS, embedded_model

    if "data.source" not in given:
        return FOR_TEXTS
    data, rows = _first_rows([f"{key}={value}" for key, value in given.items()])
    names = data.columns.items()
    fields = ({**row.fields, **{ours: row.fields.get(theirs) for ours, theirs in names}} for row in rows)
    return embedded_model(fields)


def _note_stand_in(model: "EmbeddedModel") -> None:
    from lean_ft.data.embedded_models import FOR_TEXTS

    settings = " ".join(model.settings)
    because = f", because {model.because}" if model.because else ""
    tokens, than = ("about 2.5 times as many", "as") if model == FOR_TEXTS else ("more", "than")
    print_note(
        f"tokens and chat template are those of {settings}{because}. It makes {tokens} tokens {than} a large "
        "model. To see those of your model, add model.path=MODEL"
    )


def _with_tools(cfg: Any, tokenizer: "Tokenizer") -> Any:
    """Return the settings with the schemas of the run's tools and environment methods, which each prompt includes."""
    if not isinstance(cfg, OnlineConfig) or not cfg.has_turns:
        return cfg
    from lean_ft.online.episodes import Episodes  # here, because it imports torch

    schemas = Episodes(cfg, tokenizer).schemas()
    if cfg.environment is not None:
        print_note(
            f"environment={cfg.environment} is not reset here, so the text that reset adds to a prompt is not shown "
            "or counted"
        )
    return cfg.model_copy(update={"data": cfg.data.model_copy(update={"tools": schemas})})


def _names_data(word: str) -> bool:
    """Whether the first word is data and not a recipe."""
    if "=" in word or word.endswith(".py") or word in {*catalog.recipes(), *catalog.aliases(), *catalog.presets()}:
        return False
    return bool({*"/.*?["} & {*word}) or Path(word).exists()


def _run_on_file(file: str, config: str | None, overrides: list[str]) -> tuple[str | None, list[str]]:
    """Return the recipe that the first rows of a file are for (None with a preset, which names it), and the settings of
    a run on it. Print what was chosen.

    Raises ValueError if the rows cannot be read.
    """
    settings = [f"data.source={file}", *overrides]
    if config is not None:
        return None, settings
    from lean_ft.data.formats import meant_fields
    from lean_ft.data.objective import objectives

    data, rows = _first_rows(settings)
    fields = next((list(row.fields) for row in rows if row.problem is None), [])
    names = meant_fields({*fields, *(ours for ours, theirs in data.columns.items() if theirs in fields)})
    objective = next((candidate for candidate in objectives() if candidate.is_of_file(names, data.format)), None)
    recipe = "finetune" if objective is None else objective.recipe
    print_note(
        f"shown as the recipe {recipe} reads the rows. For another, name it before the file: RECIPE {quote(file)}"
    )
    return recipe, [*([] if objective is None else objective.settings_of_file(names)), *settings]


def _first_rows(settings: list[str]) -> tuple[DataConfig, list["Row"]]:
    """Return the first rows of a run with these settings, and the settings of rows."""
    from lean_ft.data.formats import NUM_ROWS_TO_DETECT
    from lean_ft.data.sources import RowSources

    of_rows = tuple(f"data.{name}" for name in RowsConfig.model_fields)
    of_file = [word for word in settings if word.startswith(of_rows)]
    data = load_run("finetune", None, ["model.path=tiny", *of_file])[1].data
    return data, RowSources.of(data).first_rows(NUM_ROWS_TO_DETECT)


def _peaks(module: ModuleType, cfg: RecipeConfig, data: DataConfig, candidates: list[int]) -> dict[int, str]:
    """Return the predicted peak memory at each maximum length, or a dash if batch_tokens is too small for such a
    row."""
    from lean_ft.plan.devices import choose_device
    from lean_ft.plan.rehearsal import rehearse

    device = choose_device(None, cfg.device)
    peaks = dict.fromkeys(candidates, "-")
    with progress() as tell:
        for length in candidates:
            if data.batch_tokens is None or length * len(data.sides) <= data.batch_tokens:
                tell(f"simulating a step with rows of {length:,} tokens")
                changed = {"data": data.model_copy(update={"max_length": length})}
                peak_bytes = rehearse(module, cfg.model_copy(update=changed), device).peak_bytes
                peaks[length] = gibibytes(peak_bytes)
    return peaks


def _print_sources(console: Console, cfg: Any, tokenizer: "Tokenizer") -> None:
    """Print what an epoch uses of each source, if there are several, or weights. Prepares the data of the run."""
    from lean_ft.data.mixing import SourceMix
    from lean_ft.data.prepare import Preparation
    from lean_ft.data.statistics import most_used_rows

    mix = SourceMix.of(cfg.data, cfg.seed)
    if mix.is_plain and len(mix.names) == 1:
        return
    uses, mixture = Preparation(cfg.data, tokenizer, cfg.batch_size, cfg.seed).uses()
    assert mixture is not None
    of_shares = (">target", ">off") if mix.shares else ()
    of_labels = (">trained",) if any(use.trained for use in uses) else ()
    print_table(
        ("source", ">rows", ">used", ">tokens", *of_labels, ">part", *of_shares, ">epochs"),
        [
            (
                use.name,
                f"{use.num_rows:,}",
                f"{use.rows:,}",
                f"{use.tokens:,}",
                *([f"{use.trained:,}"] if of_labels else ()),
                f"{use.reached:.2%}",
                *([f"{use.target:,}", f"{use.off:+,}"] if of_shares else ()),
                f"{use.epochs:.2f}",
            )
            for use in uses
        ],
    )
    console.print(Text(f"in an epoch of the run, after truncation; part: of the {uses[0].unit}\n"))
    rows = list[tuple[str, str, str, str]]()
    for i, use in enumerate(uses):
        places = most_used_rows(cfg.data, tokenizer, mixture, i)
        counts = sorted(use.times.items())
        rows += [(use.name, f"{n:,}", f"{number:,}", places * (n == counts[-1][0])) for n, number in counts]
    print_table(("source", ">times used", ">rows", "such as"), rows)
    console.print()


def _print_histogram(console: Console, bins: list[tuple[int, int | None, int]]) -> None:
    labels = [f"{first:,}+" if last is None else f"{first:,}-{last:,}" for first, last, _ in bins]
    width, most = max(map(len, labels)), max(count for _, _, count in bins)
    digits = len(f"{most:,}")
    for label, (_, _, count) in zip(labels, bins, strict=True):
        line = Text(f"  {label:>{width}}  {count:>{digits},}  ").append(
            "█" * -(-count * BAR_WIDTH // most), style="cyan"
        )
        line.rstrip()
        console.print(line)
    console.print()


def _print_row(console: Console, number: int, row: Any, *, packed: bool) -> None:
    from lean_ft.data.preview import visible

    for document in row.documents:
        console.print(Text(escaped(f"── row {number}: {document.heading}"), style="bold"))
        text = Text()
        for trained, stretches in groupby(document.stretches, key=lambda stretch: stretch.trained):
            # Without colors, brackets mark the trained tokens.
            opening, closing = ("⟦", "⟧") if trained and not console.is_terminal else ("", "")
            text.append(opening)
            for stretch in stretches:
                style = MASKED if not trained else REJECTED if document.is_rejected else TRAINED
                text.append(visible(stretch.text), style=style + CONTROL if stretch.control else style)
                if stretch.picture is not None and console.record:
                    text.append(f"{THUMBNAIL}{stretch.picture()}{THUMBNAIL}")
            text.append(closing)
        console.print(text, soft_wrap=True)
        for name, value in document.columns.items():
            console.print(Text(visible(f"{name}: {value}")), soft_wrap=True)
    if packed and row.padding:
        console.print(Text(f"── row {number}: {row.padding:,} positions of padding", style="bold"))
    console.print()


@app.command()
def example(
    name: Annotated[str | None, typer.Argument(metavar="[FORMAT]", help="A format; all are listed without it.")] = None,
    debug: Debug = False,
) -> None:
    """Print example rows of a format as JSONL, or list the formats.

    `leanft data example messages > my.jsonl` starts a file of your own.
    """
    examples: dict[str, dict[str, Any]] = yaml.safe_load(EXAMPLES.read_text(encoding="utf-8"))
    if name is None:
        print_table(
            ("format", "recipes", "rows"),
            [(name, ", ".join(each["recipes"]), each["about"]) for name, each in examples.items()],
        )
    elif name in examples:
        for row in examples[name]["rows"]:
            typer.echo(json.dumps(row, ensure_ascii=False))
    else:
        of_recipe = [each for each, about in examples.items() if name in about["recipes"]]
        if of_recipe:
            raise ValueError(f"{name} is a recipe. Its formats are {', '.join(of_recipe)}.")
        raise ValueError(f"no such format: {name}. Choose one of {', '.join(examples)}.{did_you_mean(name, examples)}")
