"""`leanft env --check` on a GPU. Its runs are separate processes, which compute values here as the tests do."""

import shlex
import sys
from pathlib import Path

import pytest

from lean_ft.system import device_check
from tests.pretended_gpu.cards import IS_SIMULATED

TECHNIQUES = {
    "H100": ("float16, loss scaled", "packed documents", "8-bit AdamW, paged", "states streamed", "QLoRA"),
    "T4": ("bfloat16", "float16, loss scaled"),
}


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Return the results of some techniques by name. Without `values`, kernels compute nothing."""

    def results(techniques: tuple[str, ...], *, with_values: bool) -> dict[str, str]:
        monkeypatch.setattr(device_check, "_TECHNIQUES", {name: device_check._TECHNIQUES[name] for name in techniques})
        if with_values and IS_SIMULATED:
            python = tmp_path / "python"
            script = Path(__file__).with_name("with_values.py")
            python.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, str(script)])} "$@"\n')
            python.chmod(0o755)
            monkeypatch.setattr(sys, "executable", str(python))
        return {outcome.technique: f"{outcome.result}: {outcome.why}" for outcome in device_check.check_device("cuda")}

    return results


@pytest.mark.cards("H100")
def test_techniques_work(check) -> None:
    found = check(TECHNIQUES["H100"], with_values=True)
    assert all(result.startswith("works: 6 steps") for result in found.values()), found
    assert tuple(found) == TECHNIQUES["H100"]


@pytest.mark.cards("T4")
def test_what_a_card_cannot_do_is_no_failure(check) -> None:
    found = check(TECHNIQUES["T4"], with_values=True)
    assert found["bfloat16"].startswith("not here: model.dtype=bfloat16 needs a CUDA card of compute capability 8.0")
    assert found["float16, loss scaled"].startswith("works"), found


@pytest.mark.simulated
@pytest.mark.cards("H100")
def test_a_gpu_that_computes_nothing_is_found_out(check) -> None:
    assert check(("states streamed",), with_values=False)["states streamed"].startswith("FAILED")
