"""Two ranks that each load their rows of a checkpoint folder train like one process."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lean_ft.models import load_model
from lean_ft.optim import build_optimizer
from lean_ft.parallel import join, parallelize
from lean_ft.settings import MemoryConfig, OptimizerConfig
from tests.models.conftest import reference_model
from tests.models.family_cases import CASES as CASES_OF_FAMILIES
from tests.models.test_dequantized import BLOCK, SIZES, edit, in_8_bits
from tests.parallel.processes import on_ranks
from tests.parallel.small_training import CPU, TOKENS, Config, train, whole_tensors

pytestmark = pytest.mark.long

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": BLOCK, "activation_scheme": "dynamic"}


CASES = {  # dtype, and tolerances: of losses and norms, relative and absolute of weights
    "fp8": (torch.float32, 1e-5, 1e-4, 1e-5),  # with blocks across shard borders
    "gemma4_text": (torch.float32, 1e-5, 1e-4, 1e-5),  # layers that share keys, and per-layer embeddings
    "ernie4_5_moe": (torch.bfloat16, 1e-2, 2e-2, 2e-3),  # whose routers are in float32
}


def outcome(folder: Path, dtype: torch.dtype) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    cfg = Config(
        optimizer=OptimizerConfig(name="sgd"), gradient_accumulation_steps=2, memory=MemoryConfig(loss_chunk_tokens=16)
    )
    ranks = join(cfg.parallel, CPU)
    model = load_model(folder, CPU if ranks.size == 1 else "meta", dtype=dtype)
    parallelize(model, cfg.parallel, ranks, tokens=2 * TOKENS)
    optimizer = build_optimizer(model, cfg, ranks=ranks)
    return list(train(cfg, model, optimizer, ranks, steps=2)), whole_tensors(model, optimizer)


def work(folder: Path) -> dict[str, Any]:
    return {name: outcome(folder / name, dtype) for name, (dtype, *_) in CASES.items()}


def test_two_ranks_read_and_train_what_one_does(tmp_path):
    experts = reference_model("qwen3_moe", {**CASES_OF_FAMILIES["qwen3_moe"][1], **SIZES})
    experts.to(torch.bfloat16).save_pretrained(tmp_path / "fp8")
    edit(tmp_path / "fp8", in_8_bits(BLOCK), FP8)
    for name in ("gemma4_text", "ernie4_5_moe"):
        reference_model(*CASES_OF_FAMILIES[name]).to(CASES[name][0]).save_pretrained(tmp_path / name)
    ranks = on_ranks(2, work, tmp_path, timeout=1200)
    for name, (dtype, rel, rtol, atol) in CASES.items():
        expected, whole = outcome(tmp_path / name, dtype)
        for numbers, tensors in (of_rank[name] for of_rank in ranks):
            assert [*map(list, numbers)] == [pytest.approx(list(step), rel=rel) for step in expected], name
            assert tensors.keys() == whole.keys()
            for key, tensor in whole.items():
                torch.testing.assert_close(tensors[key], tensor, rtol=rtol, atol=atol, msg=lambda text, k=key: k + text)
    assert whole["model.layers.1.mlp.gate.weight"].dtype == torch.float32
