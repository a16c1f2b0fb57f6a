from collections.abc import Iterator

import pytest
import torch

from lean_ft.losses import chunked_softmax


@pytest.fixture(params=["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compiled passes are traced as by Inductor, by default without generated code."""
    settings = {"dynamic": True, "fullgraph": True, "backend": request.param}
    if request.param != "inductor":
        monkeypatch.setattr(chunked_softmax, "_COMPILER", settings)
    made = (chunked_softmax._compiled, chunked_softmax._compiled_cap)
    torch._dynamo.reset()
    for cached in made:
        cached.cache_clear()
    yield
    for cached in made:
        cached.cache_clear()
