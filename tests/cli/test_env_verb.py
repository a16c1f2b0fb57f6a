"""`leanft env`: facts, and no secrets."""

import json

import torch


def test_versions_and_devices_are_printed(leanft):
    answer = leanft("env")
    assert answer.code == 0
    lines = dict(line.split(maxsplit=1) for line in answer.out.splitlines())
    assert lines["torch"] == torch.__version__
    assert {"lean_ft", "python", "cores", "memory", "gpus", "bitsandbytes", "torchao", "compiler"} <= set(lines)


def test_json(leanft):
    facts = json.loads(leanft("env", "--json").out)
    assert facts["torch"] == torch.__version__


def test_secrets_stay_where_they_are(leanft, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_do_not_print_me")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    answer = leanft("env")
    assert "expandable_segments:True" in answer.out
    assert "do_not_print_me" not in answer.out
