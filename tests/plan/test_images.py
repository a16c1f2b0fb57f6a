"""Plans of runs with images need no download, and count the tower and the most patches."""

import numpy as np
import pytest
from typer.testing import CliRunner

from lean_ft.cli.main import app
from lean_ft.data import largest_batch
from lean_ft.data.images import ImageKind
from lean_ft.images.reading import Size
from lean_ft.images.rules import image_rules
from lean_ft.models import load_model
from lean_ft.plan.devices import CPU
from lean_ft.plan.rehearsal import rehearse
from lean_ft.settings import SFTDataConfig
from lean_ft.settings.text import load_config
from lean_ft.system.catalog import find_preset, find_recipe, load_recipe, presets

MODELS = [name.partition("/")[0] for name in presets() if name.endswith("/images") and not name.startswith("tiny")]


@pytest.mark.first(3)
@pytest.mark.parametrize("model", MODELS)
def test_no_images_of_one_size_fill_a_row_with_notably_more_patches(model):
    folder = find_preset(f"{model}/images").parent
    for max_tokens, length in ((None, 4096), (None, 2000), (None, 1400), (1000, 3000)):
        rules = image_rules(folder, max_tokens)
        images = largest_batch(SFTDataConfig(source="unread", max_length=length), 2, kinds=[ImageKind(rules)]).inputs[
            "images"
        ]
        planned = len(images.patches) // 2
        assert planned <= length * rules.merge**2
        assert len(images.places) == 2 * planned // rules.merge**2 and int(images.places[-1]) < 2 * length
        for width, height in np.random.default_rng(0).integers(16, 3000, (100, 2)).tolist():
            tokens = sum(rules.layout(Size(width, height)).runs)
            assert length // tokens * tokens * rules.merge**2 <= 1.05 * planned


@pytest.mark.long
def test_a_preset_with_images_is_planned_without_a_network(hub_server, tmp_path, monkeypatch):
    monkeypatch.setenv("LEAN_FT_CACHE", str(tmp_path))
    small = ["compile=false", "device=cpu", "data.max_length=160", "data.image_tokens=64"]
    answer = CliRunner().invoke(
        app, ["plan", "--config", "qwen3_5_0_8b/images", *small, f"output_dir={tmp_path / 'run'}"]
    )
    assert answer.exit_code == 0, answer.output
    assert "852,985,920 parameters" in answer.output
    assert "images: a vision tower of 0.19 GiB, and up to 600 patches in a micro-batch" in answer.output
    assert hub_server.requests == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("preset", "max_length", "num_patches", "pixel_bytes"),
    [("tiny/images", 96, 4 * 96, 2**17), ("smolvlm2_2b/images", 1400, 17 * 27**2, 2**27)],
)
def test_a_frozen_tower_adds_its_weights_and_no_activations_to_a_full_runs_peak(
    tmp_path, preset, max_length, num_patches, pixel_bytes
):
    """The peak of a longer row is in the decoder's backward pass."""
    recipe, file = load_recipe(find_recipe("finetune")), find_preset(preset)
    own = ["compile=false", "model.dtype=bfloat16", "batch_size=1", "optimizer.name=sgd", "clip_grad_norm=null"]
    own += [f"data.max_length={max_length}", f"output_dir={tmp_path}"]
    with_images, without = (
        rehearse(recipe, load_config(recipe.Config, file, [*own, f"model.images={images}"]), CPU)
        for images in ("frozen", "none")
    )
    folder = "tiny-images" if preset.startswith("tiny") else file.parent
    tower = load_model(folder, device="meta", random_init=True, images="frozen").vision
    assert with_images.tower_bytes == sum(parameter.nbytes for parameter in tower.to("meta").bfloat16().parameters())
    assert with_images.in_batch["patches"] == num_patches
    grown = with_images.peak_bytes - without.peak_bytes
    assert with_images.tower_bytes <= grown < with_images.tower_bytes + pixel_bytes
