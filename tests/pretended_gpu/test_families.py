"""Each family's tiny checkpoint on simulated cards of 3 generations equals the CPU, in each dtype and layout."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING

from lean_ft.losses import linear_cross_entropy
from lean_ft.models import load_model
from tests.models.family_cases import CASES, COVER, IN_ORDER, SIZES, with_all_experts
from tests.pretended_gpu.cards import IS_SIMULATED

pytestmark = pytest.mark.cards("T4", "A100", "H100")

BATCH = (2, 48)
CU_SEQLENS = [0, 7, 48, 70, 96, 96]  # documents over the two rows, the end repeated as batches do
# dtype: relative tolerance of all gradients together. A real card sums in another order than a CPU.
TYPES = {"bfloat16": 3e-2, "float16": 4e-3, "float32": 1e-5 if IS_SIMULATED else 2e-4}


@pytest.mark.first(len(COVER))
@pytest.mark.parametrize("case", IN_ORDER)
@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("type_name", TYPES)
def test_loss_and_gradients_are_the_cpus(case: str, type_name: str, layout: str, tmp_path: Path) -> None:
    model_type, settings = CASES[case]
    if type_name != "float32":
        settings = {**settings, **with_all_experts(case)}
    config = CONFIG_MAPPING[model_type](**{**SIZES, **settings}).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config))
    packed, tolerance = layout == "packed", TYPES[type_name]
    if (
        CASES[case][1].get("hidden_act") == "relu"
    ):  # a feature near 0 can round to the other side, and has another gradient then
        tolerance = max(tolerance, 1e-2)
    found, expected = (backward(tmp_path, device, type_name, packed=packed) for device in ("cuda", "cpu"))
    assert found.keys() == expected.keys()
    if type_name != "float32":
        # The card rounds at other places than the CPU, so compare both with the exact result.
        exact = backward(tmp_path, "cpu", type_name, packed=packed, exactly=True)
        tolerance = max(tolerance, 3 * distance(expected, exact))
        expected = exact
    assert distance(found, expected) <= tolerance


def backward(folder: Path, device: str, type_name: str, *, packed: bool, exactly: bool = False) -> dict[str, Tensor]:
    """Return the loss of one batch and all gradients, on the CPU; `exactly`: same weights, float32 arithmetic."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if type_name == "bfloat16" else torch.float32  # float16's weights are float32
    model = load_model(folder, device="cpu", dtype=dtype, random_init=True)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # weights, norms and biases large enough to expose a wrong formula
        for param in model.parameters():
            param.add_(0.2 * torch.randn(param.shape, generator=generator).to(dtype))
    model.to(device, torch.float32 if exactly else dtype)
    ids, labels = (torch.randint(3, 100, BATCH, generator=generator).to(device) for _ in range(2))
    bounds = torch.tensor(CU_SEQLENS, dtype=torch.int32).to(device) if packed else None
    with torch.autocast(device, torch.float16, enabled=type_name == "float16" and not exactly):
        hidden = model(ids, None, bounds, return_hidden=True)
        loss = linear_cross_entropy(
            hidden, model.output_weight, labels, num_targets=96, chunk_tokens=32, softcap=model.config.logits_softcap
        )
    loss = loss / labels.numel()
    loss.backward()
    return {"loss": loss.detach().cpu()} | {
        name: param.grad.float().cpu() for name, param in model.named_parameters() if param.grad is not None
    }


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the larger relative error: of the loss, or of all gradients together."""
    loss = abs(float(found["loss"]) / float(expected["loss"]) - 1)
    names = [name for name in expected if name != "loss"]
    differences, norms = (
        [(x[name]).double().norm() for name in names]
        for x in ({name: found[name] - expected[name] for name in names}, expected)
    )
    return max(loss, float(torch.stack(differences).norm() / torch.stack(norms).norm()))
