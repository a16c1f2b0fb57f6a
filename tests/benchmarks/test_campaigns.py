"""Short runs of the campaigns of crashes, disk faults and fuzzing. Long runs are started by hand; docs/ has their
results."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "arguments", "least_cases"),
    [
        ("crashes", "--kills 1 --budget-seconds 60 --only save_async", 1),
        ("crashes", "--kills 12 --budget-seconds 200 --only online", 9),
        ("crashes", "--ranks 2 --kills 5 --budget-seconds 120", 5),
        ("disk_faults", "--flips 1 --faults 1 --budget-seconds 60", 8 * 4),
        ("fuzzing", "--cases 600 --budget-seconds 60", 100),
    ],
)
def test_a_short_campaign_has_no_failure(script, arguments, least_cases, tmp_path):
    # In a separate process, because the campaign forks and pytest has threads.
    done = subprocess.run(
        [sys.executable, BENCHMARKS / f"{script}.py", *arguments.split(), "--results-dir", tmp_path],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    [result] = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert sum(row["kills" if "crashes" in script else "cases"] for row in result["rows"]) >= least_cases
    if "crashes" in script:
        assert all(row["equal_runs"] == row["runs"] for row in result["rows"])
        assert not any(row["failures"] for row in result["rows"])
    if script == "disk_faults":
        for row in result["rows"]:
            if row["status"] == "ok":
                assert row["told"] == row["whole"] == row["cases"]
                assert row["equal"] >= 1
    if script == "fuzzing":
        assert sum(row["failed"] for row in result["rows"]) == 0
        assert all(row["refused"] for row in result["rows"])
