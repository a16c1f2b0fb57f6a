"""Two ranks that each load their rows of a model with images compute and save what one process does."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lean_ft.models import load_model, save_model
from lean_ft.parallel import join, parallelize
from tests.models.vision.documents import CASES, draw_all, inputs, save, stack_experts
from tests.parallel.processes import on_ranks
from tests.parallel.small_training import CPU, Config

pytestmark = pytest.mark.long

NAMES = "qwen3_vl", "qwen3_vl_moe", "gemma3", "gemma4"


def work(folder: Path) -> dict[str, Any]:
    results = {}
    for name in NAMES:
        cfg = Config()
        ranks = join(cfg.parallel, CPU)
        model = load_model(folder / name, CPU if ranks.size == 1 else "meta", images="train")
        parallelize(model, cfg.parallel, ranks, tokens=64)
        kwargs = inputs(CASES[name], model, draw_all(CASES[name], [1, 2]), packed=True)
        logits = model(**kwargs)
        logits.square().mean().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        save_model(model, folder / f"{name}_of_{ranks.size}", ranks=ranks)
        results[name] = logits.detach()
    return results


def test_two_ranks_compute_and_save_what_one_does(tmp_path: Path):
    for name in NAMES:
        save(CASES[name], tmp_path / name)
        if name == "qwen3_vl_moe":
            stack_experts(tmp_path / name, transposed=True)
    ranks, alone = on_ranks(2, work, tmp_path, timeout=600), work(tmp_path)
    for name in NAMES:
        assert all(torch.equal(of_rank[name], alone[name]) for of_rank in ranks)
        source, copy = (tmp_path / folder / "model.safetensors" for folder in (name, f"{name}_of_2"))
        assert source.read_bytes() == copy.read_bytes()
