"""Models with images on simulated cards equal the CPU, no family's tower waits for the device, and a training step
waits once."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from lean_ft.losses import linear_cross_entropy
from lean_ft.models import Decoder, load_model
from lean_ft.training import Run
from tests.models.vision.documents import CASES, Case, draw_all, inputs, save
from tests.pretended_gpu.test_families import TYPES, distance
from tests.pretended_gpu.test_waits import Waits
from tests.recipes.conftest import run_recipe
from tests.training.image_runs import model_folder, write_rows

pytestmark = pytest.mark.cards("T4", "H100")


@pytest.mark.first(len(CASES))
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("type_name", TYPES)
def test_loss_and_gradients_are_the_cpus(name: str, type_name: str, layout: str, tmp_path: Path) -> None:
    case, tolerance = CASES[name], max(TYPES[type_name], 5e-5)
    folder = save(case, tmp_path)
    dtype = torch.bfloat16 if type_name == "bfloat16" else torch.float32  # float16's weights are float32

    def results(device: str, exactly: bool = False) -> dict[str, Tensor]:
        model = load_model(folder, images="train", dtype=dtype).to(device, torch.float32 if exactly else dtype)
        return backward(case, model, device, layout == "packed", type_name == "float16" and not exactly)

    found, expected = results("cuda"), results("cpu")
    if type_name != "float32":
        # The card rounds at other places than the CPU, so compare both with the exact result.
        exact = results("cpu", exactly=True)
        tolerance, expected = max(tolerance, 3 * distance(expected, exact)), exact
    assert distance(found, expected) <= tolerance


@pytest.mark.first(len(CASES))
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("type_name", TYPES)
def test_no_family_waits_forward_or_backward(name: str, type_name: str, tmp_path: Path) -> None:
    case, dtype = CASES[name], torch.bfloat16 if type_name == "bfloat16" else torch.float32
    model = load_model(save(case, tmp_path), images="train", dtype=dtype).cuda()
    for waits in (Waits(), Waits()):  # the first pass fills caches such as rotary frequencies
        backward(case, model, "cuda", True, type_name == "float16", waits)
    assert not waits, waits


def backward(
    case: Case, model: Decoder, device: str, packed: bool, autocast: bool, waits: Waits | None = None
) -> dict[str, Tensor]:
    """The loss of one batch and all gradients, on the CPU; `waits` counts the waits between."""
    kwargs = inputs(case, model, draw_all(case, [1, 0, 2]), packed=packed)
    images = kwargs.pop("images")
    images = images._replace(**{name: getattr(images, name).to(device) for name in ("patches", "places", "rows")})
    kwargs = {name: value.to(device) for name, value in kwargs.items()}
    labels, cap = kwargs["input_ids"].roll(-1, 1), model.config.logits_softcap
    model.zero_grad()
    with waits or nullcontext():
        with torch.autocast(device, torch.float16, enabled=autocast):
            hidden = model(**kwargs, images=images, return_hidden=True)
            loss = linear_cross_entropy(hidden, model.output_weight, labels, num_targets=labels.numel(), softcap=cap)
        loss = loss / labels.numel()
        loss.backward()
    gradients = {name: p.grad.float().cpu() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach().cpu()} | gradients


@pytest.mark.cards("H100")
@pytest.mark.parametrize("images", ["frozen", "train"])
@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_a_step_with_images_waits_once(family: str, images: str, tmp_path: Path) -> None:
    folder, rows = model_folder(family, tmp_path / "model"), write_rows(family, tmp_path / "rows")
    own = [f"model.path={folder}", f"data.source={rows}", f"model.images={images}", "device=cuda", "plan=false"]
    own += ["epochs=3", "batch_size=2", "data.max_length=128", "data.packing=bfd", f"data.cache_dir={tmp_path}"]
    steps, waits = Run.steps, Waits()

    def watched(run: Run) -> Iterator[int]:
        for step in steps(run):
            if step == 2:  # the first steps fill caches
                with waits:
                    yield step
            else:
                yield step

    with mock.patch.object(Run, "steps", watched):
        run_recipe("finetune", tmp_path / "run", *own)
    assert sum(waits.values()) == 1, waits
