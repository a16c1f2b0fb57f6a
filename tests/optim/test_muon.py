"""Muon equals torch's, and uses AdamW for embeddings and vectors."""

import pytest
import torch

from lean_ft.optim.muon import orthogonal
from tests.optim.tiny_training import TinyModel, build, train_both


@pytest.mark.parametrize("shape", [(48, 20), (20, 48), (32, 32)], ids=str)
def test_matrices_equal_torchs_muon(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    start = torch.randn(shape)
    ours, theirs, _, _ = train_both(
        start,
        {"name": "muon", "weight_decay": 0.1, "momentum": 0.9},
        lambda params: torch.optim.Muon(
            params, lr=1e-2, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw"
        ),
        [torch.randn(shape) for _ in range(4)],
    )
    # Both use five chained bfloat16 products, with sums in a different order.
    assert (ours - theirs).norm() < 0.01 * (ours - start).norm()


def test_experts_matrices_are_each_made_orthogonal() -> None:
    torch.manual_seed(0)
    stack = torch.randn(3, 24, 40)
    for matrix, made in zip(stack, orthogonal(stack), strict=True):
        torch.testing.assert_close(made, orthogonal(matrix), rtol=0.05, atol=0.02)
        values = torch.linalg.svdvals(made.float())
        assert values.min() > 0.4 and values.max() < 1.5


def test_embeddings_and_vectors_are_adamws() -> None:
    ours, adamw = TinyModel(torch.float32), TinyModel(torch.float32)
    torch.manual_seed(1)
    for model, settings in ((ours, {"name": "muon"}), (adamw, {"name": "adamw"})):
        optimizer = build(model, settings)
        optimizer.set_lr(1e-2)
        for param in model.parameters():
            param.grad = torch.ones_like(param) * torch.arange(param.shape[-1])
        optimizer.step()
    for name, same in {
        "embed.weight": True,
        "norm.weight": True,
        "layers.0.bias": True,
        "layers.0.weight": False,
    }.items():
        assert torch.equal(ours.get_parameter(name), adamw.get_parameter(name)) is same
