"""`leanft env`: the machine and the versions, for a bug report."""

import json
from typing import Annotated

import typer

from lean_ft.cli.arguments import Debug
from lean_ft.cli.output import stdout


def env(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False, debug: Debug = False) -> None:
    """Print versions, devices and what they support."""
    from lean_ft.environment import describe_environment

    facts = describe_environment()
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        text = ", ".join(value) if isinstance(value, list) else str(value)
        stdout().print(f"{name:<{width}}  {text}", markup=False)
