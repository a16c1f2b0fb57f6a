"""The embedded models are small, and their scripts make the same rows and tokenizers."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Folder -> its largest size in bytes, and the number of files that its script makes.
FOLDERS = {"tiny": (3_600_000, 12), "tiny-images": (2_000_000, 8), "tiny-tools": (1_000_000, 8)}


@pytest.mark.parametrize("name", FOLDERS)
def test_everything_together_is_small(name: str) -> None:
    files = (ROOT / "lean_ft" / "assets" / name).rglob("*")
    assert sum(file.stat().st_size for file in files if file.is_file()) < FOLDERS[name][0]


@pytest.mark.long
@pytest.mark.parametrize("name", FOLDERS)
def test_the_script_makes_the_same_rows_and_tokenizer(name: str, tmp_path: Path) -> None:
    script = ROOT / "scripts" / f"make_{name.replace('-', '_')}.py"
    for part in ("data", "tokenizer"):
        command = [sys.executable, script, "--only", part, "--out", tmp_path]
        subprocess.run(command, check=True, capture_output=True)
    made = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert len(made) == FOLDERS[name][1]
    for file in made:
        ours = ROOT / "lean_ft" / "assets" / name / file.relative_to(tmp_path)
        assert file.read_bytes() == ours.read_bytes(), file.name


def test_the_script_of_notes_makes_the_same_rows(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "scripts" / "make_tiny_notes.py", tmp_path], check=True, capture_output=True)
    for file in tmp_path.iterdir():
        assert file.read_bytes() == (ROOT / "lean_ft" / "assets" / "tiny" / "data" / file.name).read_bytes()
    assert len(list(tmp_path.iterdir())) == 2
