"""`leanft`: the verbs, and what becomes of an error.

Exit codes: 0 done, 1 the run failed, 2 the user's input is wrong. An error is one message on stderr; with
`--debug` its traceback comes before it.
"""

import os
import sys
import traceback
from typing import Annotated, NoReturn

import typer

import lean_ft
from lean_ft.cli import (
    cat,
    convert_config,
    cp,
    data,
    download,
    env,
    export,
    ls,
    plan,
    plot,
    push,
    run,
    score,
    serve,
    slurm,
    validate,
)
from lean_ft.cli.errors import explain
from lean_ft.cli.output import print_error
from lean_ft.launch import leave_word

app = typer.Typer(
    name="leanft",
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start with: [bold]leanft run full_finetune_single_device --config tiny/full[/bold]",
)
# Each has a function of its own name.
VERBS = (run, ls, cp, cat, convert_config, validate, plan, plot, score, serve, download, export, push, slurm, env)
for verb in VERBS:
    name = verb.__name__.rpartition(".")[2]
    app.command(name.replace("_", "-"))(getattr(verb, name))
app.add_typer(data.app, name="data")


@app.callback(invoke_without_command=True)
def leanft(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Fine-tuning recipes for language models in plain PyTorch."""
    if version:
        typer.echo(lean_ft.__version__)
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def run_command_line(arguments: list[str] | None = None) -> NoReturn:
    """Runs `leanft` with the given arguments (those of the process by default) and exits with its code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if "_LEANFT_COMPLETE" in os.environ:  # a shell asks what could come next
            app(prog_name="leanft")
        # Not `app()`, which answers errors in its own voice and with its own codes.
        command = typer.main.get_command(app)
        with command.make_context("leanft", list(arguments)) as context:
            command.invoke(context)
        code = 0
    except typer.Exit as done:
        code = done.exit_code
    except BrokenPipeError:  # from a verb that prints: its reader (`| head`) has enough
        code = 0
    except (Exception, KeyboardInterrupt) as error:
        message, code = explain(error)
        if not leave_word(message, code):  # else the process that started this one says it
            print_error(message, traceback_of=error if "--debug" in arguments else None)
        elif "--debug" in arguments:
            traceback.print_exception(error)
    _close_stdout()
    sys.exit(code)


def _close_stdout() -> None:
    """Writes what is left; where nobody reads it any more, drops it, or Python would complain at its own exit."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
