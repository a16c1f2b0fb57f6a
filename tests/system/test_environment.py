"""Facts about this machine equal those of the system's own tools, and bitsandbytes without kernels is detected."""

import os
import platform
import sys
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch

import lean_ft
from lean_ft.system import environment
from lean_ft.system.environment import bitsandbytes_problem, describe_environment


def test_versions_and_cores():
    facts = describe_environment()
    assert facts["lean_ft"] == lean_ft.__version__
    assert facts["python"] == platform.python_version()
    assert facts["torch"] == torch.__version__
    assert facts["tokenizers"] == version("tokenizers")
    assert int(facts["cores"]) <= (os.cpu_count() or 1)
    assert facts["threads"] == str(torch.get_num_threads())


def test_missing_packages_and_failing_tools_are_reported(monkeypatch, tmp_path):
    for name in ("nvidia-smi", "c++"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 9\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(environment, "_PACKAGES", ("no-such-package",))
    for compiler, said in ((str(tmp_path / "c++"), "failed"), ("/no/such/compiler", "none")):
        monkeypatch.setenv("CXX", compiler)
        facts = describe_environment()
        assert said in facts["compiler"]
    assert facts["no-such-package"] == "not installed"
    assert "failed" in facts["driver"]


class FailedToLoad(SimpleNamespace):
    compiled_with_cuda = False


@pytest.mark.parametrize("on_gpu", [False, True])
def test_bitsandbytes_that_is_missing_or_has_no_kernels(on_gpu: bool, monkeypatch: pytest.MonkeyPatch):
    import bitsandbytes.cextension

    monkeypatch.setattr(bitsandbytes.cextension, "lib", SimpleNamespace(compiled_with_cuda=True))
    assert bitsandbytes_problem(on_gpu=on_gpu) is None
    monkeypatch.setattr(bitsandbytes.cextension, "lib", FailedToLoad(error_msg="CUDA binary not found"))
    reason = bitsandbytes_problem(on_gpu=on_gpu)
    assert (reason is not None and "CUDA binary not found" in reason) if on_gpu else reason is None
    monkeypatch.setitem(sys.modules, "bitsandbytes.cextension", None)
    reason = bitsandbytes_problem(on_gpu=on_gpu)
    assert reason is not None and "cannot be imported" in reason


@pytest.mark.gpu
def test_gpus_are_named():
    assert torch.cuda.get_device_name(0) in describe_environment()["gpus"][0]
