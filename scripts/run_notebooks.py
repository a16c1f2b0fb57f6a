"""Run the notebooks in docs/notebooks and save them with their outputs.

python scripts/run_notebooks.py                  # all
python scripts/run_notebooks.py grpo             # some, by name

Each runs in a temporary folder. Paths of this machine and of its Python are not kept.
"""

import os
import re
import sys
import sysconfig
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "notebooks"
CODE_TIMES = ("execution", "ExecuteTime")  # metadata of a cell


def run(notebook: nbformat.NotebookNode, folder: str | Path) -> None:
    """Run all cells in `folder`. Raises nbclient's CellExecutionError if one fails."""
    places = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=900, resources=places, coalesce_streams=True).execute()


def without_machine(text: str, folder: str) -> str:
    """The text without the places of this machine, and without warnings of libraries about it."""
    text = text.replace(f"{folder}/", "").replace(str(Path.home()), "~")
    return re.sub(rf"{re.escape(sysconfig.get_path('purelib'))}|/tmp/ipykernel_\d+", "...", text)


def main(names: list[str]) -> None:
    files = [FOLDER / f"{name}.ipynb" for name in names] or sorted(FOLDER.glob("*.ipynb"))
    for file in files:
        notebook = nbformat.read(file, as_version=4)
        with tempfile.TemporaryDirectory() as folder:
            os.environ["LEAN_FT_CACHE"] = f"{folder}/cache"  # the outputs are those of a first run
            run(notebook, folder)
            for cell in notebook.cells:
                for name in CODE_TIMES:
                    cell.metadata.pop(name, None)
            text = without_machine(nbformat.writes(notebook), folder)
        file.write_text(text.rstrip("\n") + "\n", encoding="utf-8")
        print(f"{file}: {file.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main(sys.argv[1:])
