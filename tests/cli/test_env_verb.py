"""`leanft env`: facts without secrets."""

import json

import pytest
import torch

from lean_ft.system import device_check


def test_versions_and_devices_are_printed(leanft):
    answer = leanft.ok("env")
    lines = dict(line.split(maxsplit=1) for line in answer.out.splitlines())
    assert lines["torch"] == torch.__version__
    assert {"lean_ft", "python", "cores", "memory", "gpus", "bitsandbytes", "torchao", "compiler"} <= set(lines)
    assert json.loads(leanft("env", "--json").out)["torch"] == torch.__version__


def test_secrets_stay_where_they_are(leanft, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_do_not_print_me")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    answer = leanft("env")
    assert "expandable_segments:True" in answer.out
    assert "do_not_print_me" not in answer.out


@pytest.mark.long
def test_check_tells_what_works_what_cannot_and_what_fails(leanft, monkeypatch):
    full = {"--config": "tiny/full", "optimizer.lr": "3e-3"}
    monkeypatch.setattr(device_check, "STEPS", 3)
    monkeypatch.setitem(device_check._ALWAYS, "max_steps", "3")
    techniques = {
        "rounded": full | {"model.dtype": "bfloat16"},
        "never updates": full | {"model.dtype": "float32", "optimizer.lr": "0"},
        "for a GPU": full | {"model.dtype": "float32", "optimizer.state": "streamed"},
    }
    monkeypatch.setattr(device_check, "_TECHNIQUES", techniques)
    answer = leanft("env", "--check", "--device", "cpu")
    assert answer.code == 1
    found = {name: line for line in answer.out.splitlines() for name in techniques if line.startswith(name)}
    assert "works     3 steps, losses within" in found["rounded"]
    assert "FAILED" in found["never updates"]
    assert "not here  optimizer.state=streamed" in found["for a GPU"]


def test_check_of_an_absent_device(leanft):
    answer = leanft("env", "--check", "--device", "cuda")
    if not torch.cuda.is_available():
        assert answer.code == 2
        assert "device=cuda needs a cuda device" in answer.err
