"""`leanft env`: print the machine and versions for a bug report, and check whether training works."""

import json
from typing import Annotated

import typer

from lean_ft.cli.arguments import Debug
from lean_ft.cli.output import print_lines, stdout
from lean_ft.system.redaction import redact_values


def env(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="Train the embedded model for a few steps with each technique. Takes minutes."),
    ] = False,
    device: Annotated[str, typer.Option("--device", help="Device for --check: auto, cuda, cpu or mps.")] = "auto",
    debug: Debug = False,
) -> None:
    """Print versions, devices and what they support."""
    from lean_ft.system.environment import describe_environment

    facts = redact_values(describe_environment())
    if as_json and not check:
        typer.echo(json.dumps(facts, indent=2))
        return
    if not as_json:
        width = max(map(len, facts))
        for name, value in facts.items():
            text = ", ".join(value) if isinstance(value, list) else str(value)
            print_lines(text, before=f"{name:<{width}}  ")
    if check:
        _check(device, facts if as_json else None)


def _report_private_names() -> None:
    """Print which private names of torch are missing, and what fails without them."""
    import torch

    from lean_ft.torch_private import PRIVATE_NAMES, missing_names

    missing = missing_names()
    stdout().print(
        f"\nprivate names of torch {torch.__version__}: {len(PRIVATE_NAMES) - len(missing)} of {len(PRIVATE_NAMES)} "
        "found",
        markup=False,
    )
    for entry in missing.values():
        print_lines(f"missing {entry.path}: {entry.without}", before="  ")


def _check(device: str, facts: dict | None) -> None:
    """Print the result of each technique as its check ends, or with `facts` everything as JSON at the end. Exit with 1
    if a technique failed that this device supports."""
    from lean_ft.models.device import resolve_device
    from lean_ft.system.device_check import check_device
    from lean_ft.torch_private import missing_names

    device = resolve_device(device).type  # raises ValueError for a missing device
    if facts is None:
        _report_private_names()
        stdout().print(f"\non {device}:", markup=False)
    outcomes = []
    for outcome in check_device(device):
        outcomes.append(outcome)
        if facts is None:
            print_lines(outcome.why, before=f"{outcome.technique:<24}  {outcome.result:<8}  ")
    if facts is not None:
        typer.echo(
            json.dumps(
                facts
                | {
                    "missing_private_names": sorted(missing_names()),
                    "check": [outcome._asdict() for outcome in outcomes],
                },
                indent=2,
            )
        )
    if any(outcome.result == "FAILED" for outcome in outcomes):
        raise typer.Exit(1)
