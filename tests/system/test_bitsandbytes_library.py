"""bitsandbytes imports without its compiled library; that is known before a kernel is asked for."""

import sys
from types import SimpleNamespace

import pytest

from lean_ft.system.bitsandbytes_library import why_unusable


class FailedToLoad(SimpleNamespace):
    compiled_with_cuda = False


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_package_that_is_missing_or_has_no_kernels_is_told_of(on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import bitsandbytes.cextension

    monkeypatch.setattr(bitsandbytes.cextension, "lib", SimpleNamespace(compiled_with_cuda=True))
    assert why_unusable(on_gpu=on_gpu) is None
    failed = FailedToLoad(error_msg="CUDA binary not found")
    monkeypatch.setattr(bitsandbytes.cextension, "lib", failed)
    reason = why_unusable(on_gpu=on_gpu)
    assert (reason is not None and "CUDA binary not found" in reason) if on_gpu else reason is None
    monkeypatch.setitem(sys.modules, "bitsandbytes.cextension", None)
    reason = why_unusable(on_gpu=on_gpu)
    assert reason is not None and "cannot be imported" in reason
