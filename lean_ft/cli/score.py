"""`leanft score`: score rows with a reward model, or store a teacher's likeliest next tokens."""

from pathlib import Path
from typing import Annotated

import typer

from lean_ft.cli.arguments import Debug, OwnFamily
from lean_ft.settings import DataConfig, KeepTeacherConfig, Settings
from lean_ft.system.units import counted


class _Rows(Settings):
    data: DataConfig


def score(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A reward model or classifier: a run, a checkpoint, a folder.", show_default=False
        ),
    ],
    file: Annotated[str, typer.Argument(metavar="FILE", help="File of rows, as for data.source.", show_default=False)],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[DEST] [KEY=VALUE]",
            help="New JSONL file (default: print), or a new folder with --top-k; and settings of the rows: "
            "data.columns.completion=answer",
            show_default=False,
        ),
    ] = None,
    per_token: Annotated[
        bool, typer.Option("--per-token", help="Also write the score at each token of a completion.")
    ] = False,
    top_k: Annotated[
        int | None,
        typer.Option(
            "--top-k", metavar="K", help="Store the K likeliest next tokens of each target, for distill.cached."
        ),
    ] = None,
    temperature: Annotated[
        float, typer.Option("--temperature", help="With --top-k: the value of distill.temperature.")
    ] = 1.0,
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
    """Score the rows of a file with a reward model and write them as JSON lines with a `score`.

    A preference pair gets a `chosen_score` and a `rejected_score`. Rows are never truncated.

    With --top-k, MODEL is a teacher, and its likeliest next tokens at each target are stored in the folder DEST.
    Set KEY=VALUE to the `data.*` settings of the distillation run.
    """
    from lean_ft.frozen.scoring import open_reward_model, score_lines
    from lean_ft.settings.text import load_config
    from lean_ft.system.log import show
    from lean_ft.system.whole_files import write_whole

    overrides = [argument for argument in arguments or [] if "=" in argument]
    destinations = [Path(argument).expanduser() for argument in arguments or [] if "=" not in argument]
    if len(destinations) > 1:
        names = ", ".join(map(str, destinations))
        raise ValueError(f"expected one DEST, found {names}. Write settings as key=value.")
    destination = destinations[0] if destinations else None
    if top_k is not None:
        from lean_ft.frozen.teacher_cache import keep_teacher

        if per_token or force:
            raise ValueError("--top-k cannot be combined with --per-token or --force. Remove them.")
        if destination is None:
            raise ValueError("--top-k needs DEST, the folder to write: leanft score MODEL FILE DEST --top-k K.")
        settings = {"model.path": model, "data.source": file, "destination": destination, "device": device}
        settings |= {"top_k": top_k, "temperature": temperature} | ({} if dtype is None else {"model.dtype": dtype})
        words = [f"{key}={value}" for key, value in settings.items()]
        keep_teacher(load_config(KeepTeacherConfig, None, [*words, *overrides]))
        return
    data = load_config(_Rows, None, [f"data.source={file}", *overrides]).data
    if destination is not None and destination.exists() and not force:
        raise ValueError(f"{destination} exists already. Choose another name, or overwrite it with --force.")
    opened = open_reward_model(model, device, dtype, data.chat_template)
    lines = score_lines(*opened, data, per_token)
    if destination is None:
        for line in lines:
            show(line)
        return
    with write_whole(destination) as temporary, temporary.open("w", encoding="utf-8") as out:
        count = sum(1 for line in lines if out.write(line + "\n"))
    typer.echo(f"scored {counted(count, 'rows')}: {destination}")
