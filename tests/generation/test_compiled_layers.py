"""Compiled layers generate the same tokens as eager layers, for any text length and number of rows."""

from types import MethodType

import pytest
import torch

from lean_ft.generation import Sampling, compiled_layers, sample
from lean_ft.models import load_model

PROMPTS = [[5, 17, 3], [9], [44, 2, 71, 90, 13, 8, 60], [1, 2, 3, 4]]
CASES = [(case, torch.float32) for case in ("qwen2", "gemma2", "gemma3_text", "qwen3_5_text")]
CASES.append(("qwen2", torch.bfloat16))


@pytest.mark.long
@pytest.mark.parametrize(("case", "dtype"), CASES)
def test_layers_are_compiled_once_for_texts_of_all_lengths_and_any_number_of_rows(
    make_checkpoint, monkeypatch, case, dtype
):
    graphs = []

    def as_captured(graph, _):
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    compiled = torch.compile(compiled_layers._run, backend=as_captured, dynamic=True, fullgraph=True)
    monkeypatch.setattr(compiled_layers, "_compiled", lambda: compiled)
    model = load_model(make_checkpoint(case)[0], dtype=dtype)
    counts = []
    for prompts in (PROMPTS, [prompt * 2 for prompt in PROMPTS + PROMPTS[:2]]):
        written, found = (sample(model, prompts, Sampling(12, 1.4), compile=compile) for compile in (False, True))
        assert found == written
        counts.append(len(graphs))
    assert 0 < counts[0] == counts[1] < len(model.layers) + 1
    ending = Sampling(12, 1.4, stop_ids=frozenset(written[0].ids[4:5] + written[2].ids[7:8]))
    assert sample(model, prompts, ending, compile=True) == sample(model, prompts, ending)


@pytest.mark.long
def test_what_the_compiler_makes_of_it_draws_the_same_tokens(make_checkpoint):
    model = load_model(make_checkpoint("qwen2")[0])
    for prompts in (PROMPTS, [PROMPTS[2]] * 3, PROMPTS[:1]):
        written, compiled = (sample(model, prompts, Sampling(12, 1.4), compile=compile) for compile in (False, True))
        assert [one.ids for one in compiled] == [one.ids for one in written]
        for one, other in zip(compiled, written, strict=True):
            assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)


def test_how_layers_are_compiled_and_checkpointed_for_training_has_no_part_in_it(make_checkpoint, monkeypatch):
    monkeypatch.setattr(compiled_layers, "_compiled", lambda: compiled_layers._run)
    model, calls = load_model(make_checkpoint("qwen2")[0]), []

    def checkpointed(layer, *args):
        calls.append(layer)
        return type(layer).forward(layer, *args)

    def refuses(*_):
        raise AssertionError("compiled as for training")

    for layer in model.layers:
        layer.forward = MethodType(checkpointed, layer)
        layer.compile(backend=refuses)
    before = [dict(vars(layer)) for layer in model.layers]
    sample(model, PROMPTS, Sampling(5), compile=True)
    assert calls == list(model.layers)  # once, for the prompts
    assert [dict(vars(layer)) for layer in model.layers] == before
