"""The device of a model: what is there, and in which dtypes it computes."""

import pytest
import torch

from lean_ft.models.device import check_dtype, resolve_device

CUDA = torch.device("cuda", 0)


def test_auto_takes_what_is_there(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto").type == "cpu"
    with pytest.raises(ValueError, match=r"device=cuda needs a cuda device.*It sees: cpu\. Set device=cpu"):
        resolve_device("cuda")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert resolve_device("auto").type == "mps"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert resolve_device("auto") == torch.device("cuda", 1)
    assert resolve_device("cpu").type == "cpu"


def test_bfloat16_needs_a_device_that_computes_in_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    for capability in ((8, 0), (9, 0), (12, 0), (7, 5)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert check_dtype("float16", CUDA) == check_dtype("float32", CUDA) == []
        if capability >= (8, 0):
            assert check_dtype("bfloat16", CUDA) == []
    with pytest.raises(ValueError, match=r"Tesla T4 has 7\.5.*model\.dtype=float16"):
        check_dtype("bfloat16", CUDA)
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda *version: False)
    with pytest.raises(ValueError, match="macOS 14"):
        check_dtype("bfloat16", torch.device("mps"))


def test_bfloat16_on_a_cpu_without_its_instructions_is_said(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"sse2": True, "avx2": True}, raising=False)
    assert "bfloat16 products are computed in float32" in check_dtype("bfloat16", cpu)[0]
    assert check_dtype("float32", cpu) == []
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    told = {"sse2": True, "avx512_bf16": True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: told, raising=False)
    assert check_dtype("bfloat16", cpu) == []
