"""Registers, spills and occupancy of Triton kernels on five architectures stay within the committed results."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.simulated

ROOT = Path(__file__).resolve().parents[2]
SHAPES = ("smollm2_135m", "mixtures of experts", "attention", "recurrent layers")
SLACK = 1.1  # other versions of Triton allocate registers a little differently


@pytest.mark.cards("H100")
def test_kernels_keep_their_registers_and_their_occupancy(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", ROOT / "benchmarks" / "kernel_resources.py", "--only", ",".join(SHAPES)]
    environment = {**os.environ, "PRETENDED_GPU_TOUCH": "65536", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    done = subprocess.run(
        [*command, "--results-dir", tmp_path], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (found,), (committed,) = (
        [json.loads(file.read_text())["rows"] for file in folder.glob("kernel_resources_*.json")]
        for folder in (tmp_path, ROOT / "benchmarks" / "results")
    )
    limits = {(row["shape"], row["capability"]): row for row in committed}
    assert len(found) == 5 * len(SHAPES)
    for row in found:
        limit = limits[row["shape"], row["capability"]]
        assert row["spilled_bytes"] <= limit["spilled_bytes"], row
        assert row["registers"] <= SLACK * limit["registers"], row
        assert row["shared_bytes"] <= SLACK * limit["shared_bytes"], row
        assert row["occupancy"] >= limit["occupancy"] / SLACK, row
