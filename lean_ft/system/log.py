"""The log of a run: lines that begin with a label."""

from pathlib import Path

from rich.console import Console

from lean_ft.system.redaction import printable
from lean_ft.system.whole_files import open_in_place

console = Console(highlight=False, markup=False, soft_wrap=True)


def log_to(path: Path) -> None:
    """Append further lines to a file instead of printing them."""
    console.file = file = open_in_place(path, "a")
    file.reconfigure(line_buffering=True)  # type: ignore[attr-defined]


def say(label: str, text: str) -> None:
    """Print a label and a text, above the progress bar if there is one."""
    console.print(printable(f"{label:<12}{text}"))
