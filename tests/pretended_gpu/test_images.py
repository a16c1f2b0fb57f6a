"""Models that read images on simulated cards: the values are the CPU's, and a training step waits once."""

import functools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from lean_ft.losses import linear_cross_entropy
from lean_ft.models import load_model
from lean_ft.models.vision import tower
from lean_ft.training import Run
from tests.models.vision.documents import CASES, Case, draw_all, inputs, save
from tests.pretended_gpu.test_families import TYPES, distance
from tests.pretended_gpu.test_waits import Waits
from tests.recipes.conftest import run_recipe
from tests.training.image_runs import model_folder, write_rows

# Heads of 16 features, as PyTorch's kernel for images of different sizes needs.
WIDER = {"hidden_size": 32, "head_dim": 16}


def wider(name: str) -> Case:
    case = CASES[name]
    fields = {field: size for field, size in WIDER.items() if field in case.vision}
    return replace(case, vision=case.vision | fields)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return functools.cache(lambda name: save(wider(name), tmp_path_factory.mktemp(name)))


def backward(folder: Path, name: str, device: str, type_name: str, *, exactly: bool = False) -> dict[str, Tensor]:
    """The loss of packed documents with 1, 2 and no images, and all gradients, on the CPU; `exactly`: in float32."""
    case, dtype = wider(name), getattr(torch, type_name)
    model = load_model(folder, dtype=dtype, images="train").to(device, torch.float32 if exactly else dtype)
    arguments = inputs(case, model, draw_all(case, [1, 2, 0]), packed=True)
    images = arguments.pop("images", None)
    arguments = {key: value.to(device) for key, value in arguments.items()}
    images = images._replace(**{part: getattr(images, part).to(device) for part in ("patches", "places", "rows")})
    hidden, labels = model(**arguments, images=images, return_hidden=True), arguments["input_ids"].roll(-1)
    loss = linear_cross_entropy(hidden, model.output_weight, labels, num_targets=1, softcap=model.config.logits_softcap)
    (loss / labels.numel()).backward()
    gradients = {key: part.grad.float().cpu() for key, part in model.named_parameters() if part.grad is not None}
    return {"loss": loss.detach().cpu()} | gradients


@pytest.mark.cards("T4", "H100")
@pytest.mark.parametrize("type_name", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_the_cpus(name: str, type_name: str, saved) -> None:
    tolerance, has_kernel = TYPES[type_name], torch.cuda.get_device_capability() >= (8, 0)
    with mock.patch.object(tower, "varlen_attn", wraps=tower.varlen_attn) as kernel:
        found = backward(saved(name), name, "cuda", type_name)
    num_layers = len(load_model(saved(name), images="frozen").vision.blocks)
    assert kernel.call_count == (num_layers if has_kernel and type_name == "bfloat16" else 0)
    expected = backward(saved(name), name, "cpu", type_name)
    assert found.keys() == expected.keys()
    if type_name != "float32":
        exact = backward(saved(name), name, "cpu", type_name, exactly=True)
        tolerance, expected = max(tolerance, 3 * distance(expected, exact)), exact
    assert distance(found, expected) <= tolerance


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
