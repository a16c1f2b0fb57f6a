"""`leanft`: the verbs and the handling of errors.

Exit codes: 0 success, 1 failed run, 2 wrong input. An error prints one message to stderr, after its traceback with
`--debug`.
"""

import os
import sys
from typing import Annotated, NoReturn

import typer

import lean_ft
from lean_ft.cli import (
    cat,
    check,
    convert_config,
    cp,
    data,
    download,
    embed,
    env,
    export,
    ls,
    merge,
    plan,
    plot,
    push,
    run,
    runs,
    score,
    serve,
    validate,
)
from lean_ft.cli.cat import help_of_recipe
from lean_ft.cli.errors import explain
from lean_ft.cli.output import print_error, print_traceback
from lean_ft.system import catalog
from lean_ft.system.launch import report_to_launcher
from lean_ft.system.user_functions import OWN_FAMILIES

app = typer.Typer(
    name="leanft",
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start with: [bold]leanft run full_finetune_single_device --config tiny/full[/bold]. Then use the run: "
    "[bold]leanft chat RUN[/bold], [bold]leanft generate RUN prompt=TEXT[/bold], "
    "[bold]leanft evaluate RUN data.source=FILE[/bold], [bold]leanft quantize RUN[/bold]. These four are recipes, and "
    "the name of a recipe is a command: [bold]leanft ls[/bold] lists them.",
)
# Each module has a function with the module's name.
VERBS = (
    run,
    ls,
    cp,
    cat,
    convert_config,
    validate,
    check,
    plan,
    plot,
    runs,
    score,
    embed,
    serve,
    download,
    export,
    merge,
    push,
    env,
)
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
    OWN_FAMILIES.clear()  # of an earlier command of this process
    if version:
        typer.echo(lean_ft.__version__)
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def run_command_line(arguments: list[str] | None = None) -> NoReturn:
    """Run `leanft` with the arguments, by default those of the process, and exit with its code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        arguments = _as_meant(arguments)
        if sum(word in ("--config", "-c") or word.startswith("--config=") for word in arguments) > 1:
            raise ValueError("--config is given more than once. A run has one preset: copy its settings into one file.")
        if "_LEANFT_COMPLETE" in os.environ:  # a shell requests completions
            app(prog_name="leanft")
        named = next((word for word in arguments if word in _recipe_names() or word.endswith(".py")), None)
        if arguments[:1] == ["run"] and {"-h", "--help"} & {*arguments} and named is not None:
            typer.echo(help_of_recipe(named))
            raise typer.Exit
        # Not `app()`, which prints its own error messages and uses its own exit codes.
        command = typer.main.get_command(app)
        with command.make_context("leanft", list(arguments)) as context:
            command.invoke(context)
        code = 0
    except typer.Exit as done:
        code = done.exit_code
    except BrokenPipeError:  # the reader of a printing verb (`| head`) closed the pipe
        code = 0
    except SystemExit:
        raise
    except BaseException as error:  # includes exception groups and Rust panics
        message, code = explain(error, arguments)
        if not report_to_launcher(message, code):  # otherwise the launching process prints it
            print_error(message, traceback_of=error if "--debug" in arguments else None)
        elif "--debug" in arguments:
            print_traceback(error)
    _close_stdout()
    sys.exit(code)


def _recipe_names() -> set[str]:
    return {*catalog.recipes(), *catalog.aliases()}


def _as_meant(arguments: list[str]) -> list[str]:
    """Replace `help` by --help, move options before the verb behind it, and insert `run` before a recipe's name, as in
    `leanft chat runs/first`."""
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:2], "--help"]
    verbs = {verb.__name__.rpartition(".")[2].replace("_", "-") for verb in VERBS} | {"data"}
    flags = next((place for place, word in enumerate(arguments) if word != "--debug"), 0)
    first = next((place for place, word in enumerate(arguments) if word in verbs | _recipe_names()), flags)
    if first and arguments[0].startswith("-"):
        arguments = [arguments[first], *arguments[:first], *arguments[first + 1 :]]
    return ["run", *arguments] if {*arguments[:1]} & (_recipe_names() - verbs) else arguments


def _close_stdout() -> None:
    """Flush stdout. If its reader is gone, discard the rest, so that Python prints no error at exit."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
