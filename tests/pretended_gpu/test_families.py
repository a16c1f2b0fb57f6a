"""Every family's tiny checkpoint on pretended cards of three generations: what the CPU computes, in every type and layout."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING

from lean_ft.losses import linear_cross_entropy
from lean_ft.models import load_model
from tests.models.family_cases import CASES, SIZES

pytestmark = pytest.mark.cards("T4", "A100", "H100")

BATCH = (2, 48)
CU_SEQLENS = [0, 7, 48, 70, 96, 96]  # documents over the two rows, the end repeated as batches do
# (type of the weights, whether float16 computes, largest difference of the loss, and of all gradients together): sums of
# another order in the type that computes.
TYPES: dict[str, tuple[torch.dtype, bool, float, float]] = {
    "bfloat16": (torch.bfloat16, False, 1e-3, 2e-2),
    "float16": (torch.float32, True, 1e-4, 3e-3),
    "float32": (torch.float32, False, 1e-5, 1e-5),
}


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_the_cpus(case: str, type_name: str, layout: str, tmp_path: Path) -> None:
    model_type, settings = CASES[case]
    config = CONFIG_MAPPING[model_type](**{**SIZES, **settings}).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config))
    dtype, mixed, loss_tolerance, tolerance = TYPES[type_name]
    packed = layout == "packed"
    found, expected = (backward(tmp_path, device, dtype, mixed=mixed, packed=packed) for device in ("cuda", "cpu"))
    assert found.keys() == expected.keys()
    assert abs(found["loss"] - expected["loss"]) <= loss_tolerance * abs(expected["loss"])
    assert norm_of([found[name] - expected[name] for name in found]) <= tolerance * norm_of(expected.values())


def backward(folder: Path, device: str, dtype: torch.dtype, *, mixed: bool, packed: bool) -> dict[str, Tensor]:
    """The loss of one batch and each parameter's gradient, on the CPU, as a recipe has them."""
    torch.manual_seed(0)
    model = load_model(folder, device="cpu", dtype=dtype, random_init=True).to(device)
    generator = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(3, 100, BATCH, generator=generator).to(device) for _ in range(2))
    bounds = torch.tensor(CU_SEQLENS, dtype=torch.int32).to(device) if packed else None
    with torch.autocast(device, torch.float16, enabled=mixed):
        hidden = model(ids, None, bounds, return_hidden=True)
        loss = linear_cross_entropy(
            hidden, model.output_weight, labels, num_targets=96, chunk_tokens=32, softcap=model.config.logits_softcap
        )
    loss = loss / labels.numel()
    loss.backward()
    return {"loss": loss.detach().cpu()} | {
        name: param.grad.float().cpu() for name, param in model.named_parameters() if param.grad is not None
    }


def norm_of(tensors: Any) -> float:
    return float(torch.stack([tensor.double().norm() for tensor in tensors]).norm())
