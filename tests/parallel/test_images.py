"""Two ranks that train with images, of which one has all images, equal one process."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.parallel.processes import on_ranks, selected, supported
from tests.recipes.conftest import run_recipe
from tests.training.image_runs import model_folder, write_rows
from tests.training.toy_runs import metrics

SETTINGS = ("model.dtype=float32", "device=cpu", "plan=false", "schedule.name=constant", "memory.host_pool=false")
# Micro-batches of one row each. With two ranks, the second one has those without images.
SETTINGS += ("batch_size=1", "gradient_accumulation_steps=2", "data.shuffle=false", "epochs=2", "optimizer.lr=0.01")
SETTINGS += ("optimizer.eps=0.001", "eval_every=2")
IMAGES = [[0], [], [1], [], [2, 3], []]
ADAPTER = ("model.images=train", "lora.rank=4", "lora.targets=[q_proj,vision.blocks.*]")
CASES = supported(
    {
        "frozen": ("model.images=frozen",),
        "trained": ("model.images=train", "memory.activation_checkpointing=full"),
        "in backward, replicated": ("model.images=train", "optimizer.in_backward=true", "clip_grad_norm=null"),
        "adapter": ADAPTER,
        "4-bit base": ("model.images=frozen", "lora.rank=4", "lora.quantize=nf4"),
        "vocabulary": ("model.images=train",),
    }
)
OF_RANKS = {"in backward, replicated": ["parallel.replicate=2"], "vocabulary": ["parallel.vocabulary=cut"]}


KEYS = ("loss", "eval_loss", "grad_norm", "target_tokens")


def run(folder: Path, output: str, *settings: str) -> None:
    rows = [f"data.{name}={folder / 'rows' / 'photos.jsonl'}" for name in ("source", "validation_source")]
    run_recipe("finetune", folder / output, f"model.path={folder / 'model'}", *rows, *SETTINGS, *settings)


def run_all(folder: Path, place: str, of_ranks: bool, wanted: set[str]) -> None:
    """All runs on the same processes, which take seconds to start."""
    for name in sorted(wanted & CASES.keys()):
        run(folder, f"{name} on {place}", *CASES[name], *(OF_RANKS.get(name, []) if of_ranks else []))


@pytest.fixture(scope="module")
def folder(tmp_path_factory, request) -> Path:
    top = tmp_path_factory.mktemp("images")
    model_folder("qwen3_vl", top / "model")
    write_rows("qwen3_vl", top / "rows", IMAGES)
    run_all(top, "one", False, selected(request))
    on_ranks(2, run_all, top, "two", True, selected(request))
    return top


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_equal_one_process(folder, name):
    one, two = (metrics(folder / f"{name} on {place}") for place in ("one", "two"))
    for ours, theirs in zip(one, two, strict=True):
        expected = {key: theirs[key] for key in KEYS if theirs.get(key) is not None}
        assert {key: ours[key] for key in expected} == pytest.approx(expected, rel=1e-5)
    weights = [load_file(next((folder / f"{name} on {n}").glob("step_00000006/*.safetensors"))) for n in ("one", "two")]
    assert weights[0].keys() == weights[1].keys()
    for key, tensor in weights[0].items():
        assert (weights[1][key] - tensor).norm() <= 1e-5 * tensor.norm(), key
