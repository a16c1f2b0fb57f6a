"""A text encoder with layers after pooling, on several ranks: vectors, gradients and folders equal one process's."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lean_ft.models import save_model
from lean_ft.models.config import DenseConfig
from lean_ft.models.hf_format import without_output
from lean_ft.settings import MemoryConfig, OptimizerConfig, ParallelConfig
from tests.parallel.processes import needs_parts, on_ranks
from tests.parallel.small_training import Config, build, make_batch, small_model, whole_tensors

ALONE, SHARDS, TENSOR = ParallelConfig(), ParallelConfig(shard=2), ParallelConfig(tensor=2)
DENSE = (DenseConfig("2_Dense", 64, 96, False, "Identity"), DenseConfig("3_Dense", 96, 40, True, "Tanh"))


def outcome(parallel: ParallelConfig, folder: Path) -> tuple[list[float], dict[str, torch.Tensor], dict[str, bytes]]:
    """Losses, weights and optimizer state after two steps, and the saved weights of the last layer."""
    optimizer_config, memory = OptimizerConfig(name="adamw", eps=1e-2), MemoryConfig()  # rounding moves no weight
    cfg = Config(parallel=parallel, memory=memory, optimizer=optimizer_config, gradient_accumulation_steps=2)
    config = without_output(small_model(bidirectional=True).config, DENSE)
    model, optimizer, ranks = build(cfg, config=config)
    model.source.config = {"model_type": "eurobert"}
    model.source.is_bare, model.source.dense = True, ("2_Dense", "3_Dense")
    losses = []
    for step in range(2):
        optimizer.set_lr(1e-2)
        total = 0.0
        for batch, is_last in ranks.share([make_batch(2 * step + i) for i in range(2)]):
            hidden = model(**batch.inputs, return_hidden=True).flatten(0, 1)
            if model.sharding.row_tokens is not None:
                hidden = model.sharding.row_tokens.gather(hidden.view(2, -1, 64)).flatten(0, 1)
            vectors = model.through_dense(hidden[batch.inputs["cu_seqlens"][1:].long() - 1])
            seed = int(batch.inputs["cu_seqlens"].sum())
            weights = torch.randn(vectors.shape, generator=torch.Generator().manual_seed(seed))
            loss = (vectors * weights).sum() / 12
            total += loss.item()
            loss = loss / (1 if model.sharding.row_tokens is None else model.sharding.row_tokens.num_ranks)
            optimizer.scale(loss, last=is_last).backward()
        optimizer.finish_gradients(max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    save_model(model, folder, ranks=ranks)
    saved = {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*.safetensors")}
    return losses, whole_tensors(model, optimizer), saved


def work(folder: Path) -> dict[str, Any]:
    return {name: outcome(parallel, folder / name) for name, parallel in (("shards", SHARDS), ("tensor", TENSOR))}


@needs_parts
@pytest.mark.long
def test_two_ranks_equal_one_process(tmp_path):
    expected, whole, alone = outcome(ALONE, tmp_path / "alone")
    assert alone.keys() == {"model.safetensors", "2_Dense/model.safetensors", "3_Dense/model.safetensors"}
    ranks = on_ranks(2, work, tmp_path, timeout=600)
    for name in ("shards", "tensor"):
        losses, tensors, saved = zip(*(of_rank[name] for of_rank in ranks), strict=True)
        added = [sum(of_step) if name == "shards" else of_step[0] for of_step in zip(*losses, strict=True)]
        assert added == pytest.approx(expected, rel=1e-5), name
        assert tensors[0].keys() == whole.keys()
        for key, tensor in whole.items():
            torch.testing.assert_close(tensors[0][key], tensor, rtol=1e-4, atol=1e-5, msg=lambda text, k=key: k + text)
        assert saved[0].keys() == alone.keys()
        sizes = [{place: len(content) for place, content in files.items()} for files in (saved[0], alone)]
        assert sizes[0] == sizes[1]
