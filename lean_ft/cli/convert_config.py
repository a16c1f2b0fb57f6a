"""`leanft convert-config`: convert a configuration of torchtune, axolotl or LLaMA-Factory into a preset."""

from pathlib import Path
from typing import Annotated

import typer

from lean_ft.cli.arguments import Debug, run_command
from lean_ft.cli.output import print_remark
from lean_ft.settings.converted_config import convert_config as convert
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
    """Convert a configuration of torchtune, axolotl or LLaMA-Factory into a preset. Keys without an equivalent are
    reported and become comments."""
    if output is not None and output.exists():
        raise ValueError(f"--output {output} exists already. Choose another name.")
    preset = convert(file)
    text = preset.text(file.name)
    if preset.converted:
        print_remark(f"converted: {', '.join(preset.converted)}")
    for remark in preset.remarks:
        print_remark(remark)
    if output is None:
        show(text, end="")
        return
    with write_whole(output) as part:
        part.write_text(text, encoding="utf-8")
    typer.echo(f"wrote {output}. Run it: {run_command(preset.recipe, '--config', output, preset=output)}")
