"""A model on packed batches: documents do not attend to each other, and layers are compiled once."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from lean_ft.data import Batch, prepare_batches
from lean_ft.models import load_model
from lean_ft.settings import SFTDataConfig
from lean_ft.tokenizers import load_tokenizer

PACKINGS = ["bfd", "bfd_split", "padding_free"]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Texts of various lengths, so that rows hold 1 to 12 documents."""
    generator = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    lengths = [*generator.integers(1, 12, size=60), *generator.integers(30, 90, size=12)]
    words = np.array(list("abcdefghijklmnop"))
    path.write_text("".join(f'{{"text": "{"".join(generator.choice(words, size=n))}"}}\n' for n in lengths))
    return str(path)


def batches_of(source: str, packing: str, **settings: Any):
    config = SFTDataConfig(source=source, max_length=48, packing=packing, **settings)  # pyright: ignore
    return prepare_batches(config, load_tokenizer("tiny"), batch_size=3, seed=0)


def spans(batch: Batch) -> Iterator[slice]:
    """Bounds of the documents with a label, in the flattened batch."""
    assert batch.cu_seqlens is not None
    labels = batch.labels.flatten()
    for first, last in itertools.pairwise(batch.cu_seqlens.tolist()):
        if (labels[first:last] != -100).any():
            yield slice(first, last)


def logits(model: torch.nn.Module, batch: Batch) -> Tensor:
    with torch.no_grad():
        return model(batch.input_ids, batch.positions, batch.cu_seqlens).flatten(0, 1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("packing", PACKINGS)
def test_changing_one_document_leaves_all_others_bit_identical(source: str, packing: str, device: str):
    model = load_model("tiny", device=device, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    [batch, *_] = batches_of(source, packing)[0].take(1)
    batch = batch.to(device)
    before = logits(model, batch)
    documents = list(spans(batch))
    assert len(documents) > 2
    changed = documents[len(documents) // 2]
    batch.input_ids.view(-1)[changed] = batch.input_ids.view(-1)[changed].flip(0) + 1
    after = logits(model, batch)
    assert not torch.equal(after[changed], before[changed])
    for document in documents:
        if document != changed:
            assert torch.equal(after[document], before[document])


@pytest.mark.parametrize("device", DEVICES)
def test_the_repeated_end_of_cu_seqlens_changes_nothing(source: str, device: str):
    model = load_model("tiny", device=device, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    longest = 0
    for batch in batches_of(source, "bfd")[0].take(3):
        batch = batch.to(device)
        assert batch.cu_seqlens is not None
        needed = torch.unique_consecutive(batch.cu_seqlens)
        longest = max(longest, len(batch.cu_seqlens) - len(needed))
        with torch.no_grad():
            expected = model(batch.input_ids, batch.positions, needed)
        assert torch.equal(logits(model, batch).view_as(expected), expected)
    assert longest > 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("packing", "most"),
    [("bfd", 1), ("bfd_split", 1), ("wrapped", 1), ("padding_free", 2)],  # 2: recompiled once for dynamic row length
)
def test_layers_are_compiled_once_for_training_and_evaluation(source: str, packing: str, most: int):
    torch._dynamo.reset()
    model, counter = load_model("tiny"), CompileCounter()
    for layer in model.layers:
        layer.compile(fullgraph=True, backend=counter)
    batches, held_out = batches_of(source, packing, validation_fraction=0.3)
    assert held_out is not None
    every = [*batches.take(4), *held_out]
    assert len({len(torch.unique(batch.cu_seqlens)) for batch in every if batch.cu_seqlens is not None}) > 1
    with torch.no_grad():
        for batch in every:
            model(batch.input_ids, batch.positions, batch.cu_seqlens)
    assert 1 <= counter.frame_count <= most
