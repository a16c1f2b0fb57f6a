"""A pytest plugin: tests on the pretended GPU see right values, which the CPU computes over the same memory.

Kernels that Triton makes stay empty, so torch.compile traces and partitions as ever and then runs operation by operation.
PRETENDED_GPU_VALUES=0 leaves kernels empty and compilation to Inductor: for what is counted, and not computed.
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


def compile_without_triton() -> None:
    """Has torch.compile run what it traced by PyTorch's own operations, where Inductor was to make kernels of it."""
    import torch
    from torch._dynamo.backends import registry

    compile = torch.compile
    registry.lookup_backend("inductor")  # registers all there are, before one is replaced

    def traced(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("backend", "inductor") == "inductor":
            kwargs["backend"] = "aot_eager"
            kwargs.pop("mode", None)
            kwargs.pop("options", None)
        return compile(*args, **kwargs)

    torch.compile = traced
    registry.lookup_backend("inductor")  # it registers itself, and may not find its name taken
    registry._COMPILER_FNS["inductor"] = registry.lookup_backend("aot_eager_decomp_partition")
