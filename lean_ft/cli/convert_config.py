"""`leanft convert-config`: convert a configuration of torchtune, axolotl or LLaMA-Factory into a preset."""

import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from lean_ft.cli.arguments import Debug, run_command
from lean_ft.settings.from_other_tools import convert_config as convert
from lean_ft.settings.text import load_config
from lean_ft.system import catalog
from lean_ft.system.log import show
from lean_ft.system.whole_files import write_whole


def convert_config(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="A YAML file of torchtune, axolotl or LLaMA-Factory.", show_default=False),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write the preset to. Default: print it.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Convert a configuration of torchtune, axolotl or LLaMA-Factory into a preset. Keys without an equivalent are reported and
    become comments."""
    if output is not None and output.exists():
        raise ValueError(f"--output {output} exists already. Choose another name.")
    preset = convert(file)
    text = preset.text(file.name)
    with TemporaryDirectory() as folder:  # check that the recipe accepts the preset
        (written := Path(folder) / "preset.yaml").write_text(text, encoding="utf-8")
        loggers = ["log.to=[jsonl]"] if "log.to" in preset.settings else []  # which need not be installed here
        try:
            load_config(catalog.load_recipe(catalog.recipes()[preset.recipe]).Config, written, loggers)
        except ValueError as error:
            named = re.sub(rf"{re.escape(str(written))}(, line \d+)?", lambda _: str(file), str(error))
            raise ValueError(named) from None
    if preset.converted:
        typer.echo(f"converted: {', '.join(preset.converted)}", err=True)
    for remark in preset.remarks:
        typer.echo(remark, err=True)
    if output is None:
        show(text, end="")
        return
    with write_whole(output) as part:
        part.write_text(text, encoding="utf-8")
    typer.echo(f"{output}: {run_command(preset.recipe, '--config', output, preset=output)}")
