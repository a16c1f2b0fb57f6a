from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend

from lean_ft import torch_private
from lean_ft.memory import compiling


@pytest.fixture
def without_codegen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes compiled layers traced and split into forward and backward as by Inductor, but without generated code."""
    torch._dynamo.reset()
    compiling._inductor_within.cache_clear()
    backend, real = lookup_backend("aot_eager_decomp_partition"), torch.compile
    monkeypatch.setattr(torch_private, "lookup_backend", lambda _: backend)
    monkeypatch.setattr(torch, "compile", lambda f, **kwargs: real(f, **{"backend": backend, **kwargs}))
    yield
    compiling._inductor_within.cache_clear()
