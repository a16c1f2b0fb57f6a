"""A frozen model with streamed layers computes the same, and no layer's weights stay on the device."""

import pytest
import torch

from lean_ft.memory import stream_weights
from tests.late_link import LateLink
from tests.memory.tiny_step import tiny


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)])
def test_it_computes_the_same_from_copies_that_come_late(compiled: bool) -> None:
    model = tiny(torch.bfloat16).requires_grad_(False)
    ids = torch.randint(0, 500, (2, 16), generator=torch.Generator().manual_seed(0))
    for layer in model.layers if compiled else ():
        layer.compile(fullgraph=True, backend="aot_eager")
    expected = [model(batch) for batch in (ids, ids[:1, :9])]
    layer_bytes = [sum(param.nbytes for param in layer.parameters()) for layer in model.layers]
    link = LateLink()
    stream_weights(model, link)
    assert all(torch.equal(model(batch), one) for batch, one in zip((ids, ids[:1, :9]), expected, strict=True))
    assert sum(num_bytes for kind, num_bytes in link.log if kind == "copy") == 2 * sum(layer_bytes)  # once per pass
    assert sum(param.nbytes for layer in model.layers for param in layer.parameters()) == 0


def test_the_next_layer_is_on_its_way_while_one_computes() -> None:
    model = tiny(torch.float32).requires_grad_(False)
    link = LateLink()
    stream_weights(model, link)
    first = model.model.layers[0]
    begun: list[int] = []
    first.layer.register_forward_pre_hook(lambda *_: begun.append(sum(kind == "copy" for kind, _ in link.log)))
    model(torch.zeros(1, 4, dtype=torch.int64))
    num_weights = [len(list(layer.parameters())) for layer in model.layers]
    assert begun == [num_weights[0] + num_weights[1]]
