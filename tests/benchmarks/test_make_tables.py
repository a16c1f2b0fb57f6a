"""Tables in pages show the results and what they were measured on."""

import json

import make_tables
import pytest
import typer
from typer.testing import CliRunner

HARDWARE = {"device": "cpu", "cpu": "Some CPU", "cpu_features": ["avx512_bf16"], "cores": 4, "threads": 4}
RESULT = {
    "benchmark": "memory_ladder",
    "measured_at": "2026-01-02T03:04:05+00:00",
    "commit": "abc123",
    "hardware": {**HARDWARE, "memory_bytes": 16 * 2**30, "gpu": None},
    "versions": {"torch": "2.13.0"},
    "settings": {"shape": "tiny", "parameters": 598_592, "batch_size": 2, "length": 64, "packing": "none", "steps": 4},
    "rows": [
        {"label": "plain", "status": "ok", "peak_memory_bytes": 3 * 2**30, "peak_rss_bytes": 2**32,
            "tokens_per_second": 1234.0},
        {"label": "paged", "status": "failed", "reason": "no such thing | here"},
    ],
}  # fmt: skip
PAGE = "# Numbers\n\n<!-- table:memory_ladder -->\nold\n<!-- /table -->\n\nAfter.\n"


@pytest.fixture
def tables(tmp_path):
    """Run the command on a test page and a test result."""
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "memory_ladder_tiny.json").write_text(json.dumps(RESULT))
    (tmp_path / "README.md").write_text(PAGE)
    app = typer.Typer()
    app.command()(make_tables.main)
    paths = ("--results-dir", str(tmp_path / "results"), "--pages-dir", str(tmp_path))
    return lambda *arguments: CliRunner().invoke(app, [*arguments, *paths])


def test_a_table_shows_its_result_and_on_what_it_was_measured(tables, tmp_path):
    assert tables().exit_code == 0
    page = (tmp_path / "README.md").read_text()
    assert page.startswith("# Numbers\n\n<!-- table:memory_ladder -->\n| setting ")
    assert page.endswith("\n<!-- /table -->\n\nAfter.\n")
    assert "| plain | 3.00 GiB | - | 4.00 GiB | 1,234 | - |" in page
    assert "| paged | failed | - | - | - | - |" in page
    for shown in (
        *("Some CPU, 4 cores with avx512_bf16", "torch 2.13.0", "2026-01-02", "abc123", "no such thing \\| here"),
    ):
        assert shown in page
    assert "old" not in page


def test_check_tells_a_stale_table_and_changes_nothing(tables, tmp_path):
    assert tables("--check").exit_code == 1
    assert (tmp_path / "README.md").read_text() == PAGE
    tables()
    assert tables("--check").exit_code == 0
    (tmp_path / "results" / "memory_ladder_tiny.json").write_text(json.dumps(RESULT | {"commit": "def456"}))
    assert tables("--check").exit_code == 1


def test_the_tables_of_this_repository_are_those_of_its_results():
    app = typer.Typer()
    app.command()(make_tables.main)
    answer = CliRunner().invoke(app, ["--check"])
    assert answer.exit_code == 0, answer.output
