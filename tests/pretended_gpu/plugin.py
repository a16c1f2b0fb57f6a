"""Pytest plugin: tests on the simulated GPU see correct values, which the CPU computes in the same memory.

Triton kernels stay empty. torch.compile therefore traces and partitions as usual, then runs operation by operation.
With PRETENDED_GPU_VALUES=0, kernels compute nothing and Inductor compiles: for tests that count launches or bytes.
"""

import os
from typing import Any

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("PRETENDED_GPU_VALUES") == "0":
        return
    from tests.pretended_gpu import device_values

    device_values.install()
    compile_without_triton()


def pytest_runtest_teardown() -> None:
    """Reset the compiler: all tests of a process share one recompilation limit."""
    import torch

    torch._dynamo.reset()


def compile_without_triton() -> None:
    """Make torch.compile run the traced graph with PyTorch's operations instead of Inductor's kernels."""
    import torch
    from torch._dynamo.backends import registry

    compile = torch.compile
    registry.lookup_backend("inductor")  # registers all backends, before one is replaced

    def traced(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("backend", "inductor") == "inductor":
            kwargs["backend"] = "aot_eager"
            kwargs.pop("mode", None)
            kwargs.pop("options", None)
        return compile(*args, **kwargs)

    torch.compile = traced
    registry.lookup_backend("inductor")  # it registers itself and fails if the name is taken
    registry._COMPILER_FNS["inductor"] = registry.lookup_backend("aot_eager_decomp_partition")
