"""Make the pictures of the terminal in README.md: run commands in a terminal of 120 columns, and draw what they print.
A picture named `_narrow`, for phones, is what the same command prints in a terminal of 50 columns.

    python scripts/make_terminal_pictures.py                     # all pictures, in about 4 minutes
    python scripts/make_terminal_pictures.py plan plan_narrow    # some of them

The commands run in an empty folder with the file that README.md makes, so that nothing
is downloaded. Writes docs/assets/NAME.svg. The pictures use the reader's own monospaced font.
"""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
COLUMNS, NARROW_COLUMNS = 120, 50
COMMANDS = {
    "data_preview": "leanft data preview my_chats.jsonl",
    "plan": 'leanft plan --config llama3_2_3b/full --device-name "RTX 4090"',
}
_COLORS = [
    "48 54 61",
    "255 123 114",
    "86 211 100",
    "227 179 65",
    "121 192 255",
    "210 168 255",
    "86 212 221",
    "230 237 243",
]
_RGB = [(int(red), int(green), int(blue)) for red, green, blue in map(str.split, _COLORS)]
THEME = TerminalTheme((13, 17, 23), _RGB[-1], _RGB)  # readable on light and on dark pages


def printed(command: str, folder: Path, columns: int) -> str:
    """What a command prints in a terminal, with its colors. Progress, which goes to stderr, is left out."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    python = f'PYTHONPATH="{ROOT}" "{sys.executable}" -m lean_ft {command.removeprefix("leanft ")}'
    environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    running = subprocess.Popen(
        ["bash", "-c", python], cwd=folder, env=environment, stdout=theirs, stderr=subprocess.PIPE
    )
    os.close(theirs)
    found = b""
    try:
        while piece := os.read(ours, 4096):
            found += piece
    except OSError:  # the terminal is closed when the program ends
        pass
    error = running.communicate()[1]
    if running.returncode:
        raise SystemExit(f"{command}\n{error.decode()}")
    return found.decode().replace("\r\n", "\n")


def draw(command: str, output: str, path: Path, columns: int) -> None:
    """Draw a command and its output as an SVG."""
    console = Console(record=True, width=columns, file=io.StringIO(), force_terminal=True, legacy_windows=False)
    console.print(Text.assemble(("$ ", "green"), (command, "bold")))
    console.print(Text.from_ansi(output.rstrip()))
    svg = console.export_svg(title="", theme=THEME, unique_id=path.stem)
    # rich's pictures load a font from another server: use the reader's own
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font-family: Fira Code, monospace", "font-family: ui-monospace, Menlo, Consolas, monospace", svg)
    svg = re.sub(r' clip-path="url\(#[\w-]+-line-\d+\)"', "", svg)  # which cuts underscores off in some fonts
    path.write_text(svg + "\n", encoding="utf-8")


def main() -> None:
    rows = re.search(r"<<'EOF'\n(.*?)^EOF$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert rows, "README.md makes no file"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "my_chats.jsonl").write_text(rows[1])
        for name in sys.argv[1:] or [form for command in COMMANDS for form in (command, f"{command}_narrow")]:
            path, command = ROOT / "docs" / "assets" / f"{name}.svg", COMMANDS[name.removesuffix("_narrow")]
            columns = NARROW_COLUMNS if name.endswith("_narrow") else COLUMNS
            draw(command, printed(command, Path(folder), columns), path, columns)
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
