"""What a run says while it works: lines that begin with a word for what they are about."""

from pathlib import Path

from rich.console import Console

from lean_ft.system.redaction import printable
from lean_ft.system.whole_files import open_in_place

console = Console(highlight=False, markup=False, soft_wrap=True)


def log_to(path: Path) -> None:
    """From now on lines go to the end of a file, and no longer to the terminal."""
    console.file = file = open_in_place(path, "a")
    file.reconfigure(line_buffering=True)  # type: ignore[attr-defined]


def say(label: str, text: str) -> None:
    """Print one line of the log: a word for what it is about, then the text. Goes above the bar where one is shown."""
    console.print(printable(f"{label:<12}{text}"))
