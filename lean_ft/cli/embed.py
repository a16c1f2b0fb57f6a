"""`leanft embed`: write the vectors of a file's texts, or search the texts."""

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from lean_ft.cli.arguments import Debug, OwnFamily
from lean_ft.settings import DataConfig, Settings
from lean_ft.system.redaction import on_one_line
from lean_ft.system.units import counted

_TEXT_CHARACTERS = 200  # of a row that a search prints


class _Rows(Settings):
    data: DataConfig


def embed(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A model: a run, a checkpoint, a folder, or org/name.", show_default=False
        ),
    ],
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="File of rows with texts, as for data.source.", show_default=False)
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[DEST] [KEY=VALUE]",
            help="New .npy or .parquet file, not needed with --search; and settings of the rows: "
            "data.split=train[:100]",
            show_default=False,
        ),
    ] = None,
    field: Annotated[str, typer.Option("--field", metavar="NAME", help="Field of the text in a row.")] = "text",
    used_as: Annotated[
        str | None,
        typer.Option(
            "--as",
            metavar="query|passage",
            help="Put the model's prompt of queries or passages before each text. Default: passage with --search, else "
            "no prompt.",
            show_default=False,
        ),
    ] = None,
    search: Annotated[
        list[str] | None,
        typer.Option("--search", metavar="QUESTION", help="Print the rows most similar to a question. Repeatable."),
    ] = None,
    top: Annotated[int, typer.Option("--top", metavar="K", min=1, help="Rows that --search prints.")] = 5,
    dimensions: Annotated[
        int | None,
        typer.Option("--dimensions", metavar="D", help="Keep the first D numbers, of a model trained for it."),
    ] = None,
    device: Annotated[str, typer.Option("--device", metavar="auto|cuda|cpu|mps", help="Device.")] = "auto",
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype", metavar="bfloat16|float32", help="Dtype of the computation. Default: the stored dtype."
        ),
    ] = None,
    family: OwnFamily = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Overwrite DEST.")] = False,
    debug: Debug = False,
) -> None:
    """Write one vector per row of a file, as an array (.npy) or a table with the texts (.parquet), or search the rows.

    Pooling, prompts and the longest text are those that the model was saved with, by lean_ft or sentence-transformers.
    """
    from lean_ft.embedding.encode import open_embedder
    from lean_ft.embedding.rows import RowSearch, check_destination, embed_rows, new_file
    from lean_ft.settings.text import load_config
    from lean_ft.system.log import say, show

    overrides = [argument for argument in arguments or [] if "=" in argument]
    destinations = [Path(argument).expanduser() for argument in arguments or [] if "=" not in argument]
    data = load_config(_Rows, None, [f"data.source={file}", *overrides]).data
    if len(destinations) > 1:
        names = ", ".join(map(str, destinations))
        raise ValueError(f"expected one DEST, found {names}. Write settings as key=value.")
    if not destinations and not search:
        raise ValueError("expected DEST, a new .npy or .parquet file, or --search QUESTION.")
    destination = destinations[0] if destinations else None
    if used_as not in (None, "query", "passage"):
        raise ValueError(f"--as is {used_as!r}; expected query or passage.")
    if destination is not None:
        check_destination(destination, force)
    embedder = open_embedder(model, device, dtype)
    if embedder.is_guess:
        say("note", f"{model} does not say how vectors are made: each is the last token's hidden state, of length 1")
    searches = [RowSearch(embedder, question, top, dimensions) for question in search or []]
    size, count = embedder.size if dimensions is None else dimensions, 0
    with nullcontext() if destination is None else new_file(destination, size, field) as write:
        for some in embed_rows(embedder, data, field, used_as or ("passage" if search else None), dimensions):
            count += len(some.texts)
            for one in searches:
                one.add(some)
            if write is not None:
                write(some.texts, some.vectors)
    for question, one in zip(search or [], searches, strict=True):
        show(question)
        for match in one.matches:
            show(f"  {match.similarity:7.4f}  {match.place}: {on_one_line(match.text)[:_TEXT_CHARACTERS]}")
    if destination is not None:
        length = ", of length 1" if embedder.how.normalize else ""
        typer.echo(f"embedded {counted(count, 'texts')}: {destination}, {count} x {size} in float32{length}")
