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
from tests.models.family_cases import CASES
from tests.models.test_dequantized import BLOCK, SIZES, edit, in_8_bits
from tests.parallel.processes import on_ranks
from tests.parallel.small_training import CPU, TOKENS, Config, train, whole_tensors

pytestmark = pytest.mark.long

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": BLOCK, "activation_scheme": "dynamic"}


def outcome(
    folder: Path, dtype: torch.dtype = torch.float32
) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    cfg = Config(
        optimizer=OptimizerConfig(name="sgd"), gradient_accumulation_steps=2, memory=MemoryConfig(loss_chunk_tokens=16)
    )
    ranks = join(cfg.parallel, CPU)
    model = load_model(folder, CPU if ranks.size == 1 else "meta", dtype)
    parallelize(model, cfg.parallel, ranks, tokens=2 * TOKENS)
    optimizer = build_optimizer(model, cfg, ranks=ranks)
    return list(train(cfg, model, optimizer, ranks, steps=2)), whole_tensors(model, optimizer)


def work(folders: dict[str, Path]) -> dict[str, Any]:
    return {name: outcome(folder) for name, folder in folders.items()}


def work_in_bfloat16(folder: Path) -> Any:
    return outcome(folder, torch.bfloat16)


def test_two_ranks_train_routers_in_float32_beside_weights_that_are_not(tmp_path):
    reference_model(*CASES["ernie4_5_moe"]).to(torch.bfloat16).save_pretrained(tmp_path)
    numbers, whole = work_in_bfloat16(tmp_path)
    assert whole["model.layers.1.mlp.gate.weight"].dtype == torch.float32
    for found, tensors in on_ranks(2, work_in_bfloat16, tmp_path, timeout=1200):
        for step, known in zip(found, numbers, strict=True):
            assert step == pytest.approx(known, rel=1e-2)
        for key, tensor in whole.items():
            torch.testing.assert_close(tensors[key], tensor, rtol=2e-2, atol=2e-3, msg=lambda text, k=key: k + text)


def test_two_ranks_read_what_one_reads(tmp_path):
    """In fp8, with blocks across shard borders; and with layers that share keys and use per-layer embeddings."""
    folders = {"fp8": tmp_path / "fp8", "gemma4": tmp_path / "gemma4"}
    reference_model("qwen3_moe", {**CASES["qwen3_moe"][1], **SIZES}).to(torch.bfloat16).save_pretrained(folders["fp8"])
    edit(folders["fp8"], in_8_bits(BLOCK), FP8)
    reference_model(*CASES["gemma4_text"]).save_pretrained(folders["gemma4"])
    for found in on_ranks(2, work, folders, timeout=1200):
        for name, folder in folders.items():
            (numbers, tensors), (expected, whole) = found[name], outcome(folder)
            for step, known in zip(numbers, expected, strict=True):
                assert step == pytest.approx(known, rel=1e-5)
            assert tensors.keys() == whole.keys()
            for key, tensor in whole.items():
                torch.testing.assert_close(tensors[key], tensor, rtol=1e-4, atol=1e-5, msg=lambda text, k=key: k + text)
