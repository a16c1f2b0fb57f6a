"""Learning from answers and from a teacher on two ranks that cut layers is that on one."""

import os
from pathlib import Path
from typing import Any

import pytest

from lean_ft.models.safetensors_file import read_header
from lean_ft.settings.text import load_config
from lean_ft.system.catalog import find_recipe, load_recipe
from tests.parallel.processes import on_ranks
from tests.parallel.test_finetune import make_mixture
from tests.training.toy_runs import TIMES, metrics

pytestmark = pytest.mark.long  # each starts processes, which takes half a minute; test_dpo and test_finetune stay

SETTINGS = (
    "model.path=tiny",
    "model.dtype=float32",
    "data.max_length=96",
    "optimizer.name=sgd",
    "optimizer.lr=1e-2",
    "schedule.name=constant",
    "batch_size=4",
    "gradient_accumulation_steps=2",
    "max_steps=2",
    "epochs=2",
    "memory.host_pool=false",
    "memory.loss_chunk_tokens=16",
    "plan=false",
    "device=cpu",
)
PAIRS, TEXTS = "data.source=tiny/pairs_validation.jsonl", "data.source=tiny/validation.jsonl"
HELD_OUT = ("data.validation_fraction=0.03", "eval_every=2")
ON_POLICY = ("distill.on_policy=1.0", "generation.max_new_tokens=8")
CASES = {
    "dpo context, cached": (PAIRS, "parallel.context=2", *HELD_OUT, "loss.sft_weight=0.5", "loss.ld_alpha=0.5"),
    "dpo tensor, cached": (PAIRS, "parallel.tensor=2", "loss.wpo=true", "data.packing=bfd", "optimizer.in_backward=true"),
    "dpo tensor, second model": (PAIRS, "parallel.tensor=2", "data.shared_prompt=false", "reference.kind=model", "lora.rank=4"),
    "dpo experts, cached": (PAIRS, "parallel.experts=2", "model.path=MIXTURE"),
    "dpo context, 4 bits": (PAIRS, "parallel.context=2", "reference.kind=nf4"),
    "kto context": (PAIRS, "parallel.context=2", *HELD_OUT),
    "kto tensor, bco": (PAIRS, "parallel.tensor=2", "loss.name=bco", "reference.kind=adapter_off", "lora.rank=4"),
    "reward tensor": (PAIRS, "parallel.tensor=2", *HELD_OUT),
    "reward context": (PAIRS, "parallel.context=2", "loss.per_token=true", "data.packing=padding_free"),
    "distill context": (TEXTS, "parallel.context=2", "distill.teacher=tiny", "model.random_init=true", *HELD_OUT),
    "distill tensor": (TEXTS, "parallel.tensor=2", "distill.teacher=tiny", "distill.divergence=jsd", "data.packing=bfd"),
    "distill tensor, on policy": (TEXTS, "parallel.tensor=2", "distill.teacher=tiny", *ON_POLICY, "data.packing=padding_free"),
    "distill context, on policy": (TEXTS, "parallel.context=2", "distill.teacher=tiny", *ON_POLICY),
}  # fmt: skip
REFUSED = {
    ("dpo", PAIRS, "parallel.tensor=2", "reference.kind=nf4"): "parallel.tensor=2 does not go with reference.kind=nf4",
    ("distill", TEXTS, "parallel.context=2", "distill.cached=x"): "does not go with distill.cached: what was kept",
    ("dpo", PAIRS, "parallel.context=2", "parallel.vocabulary=cut"): "this recipe's loss wants the whole output layer",
}  # fmt: skip


def run(name: str, folder: Path, *settings: str) -> None:
    recipe = load_recipe(find_recipe(name.partition(" ")[0]))
    given = [setting.replace("MIXTURE", os.environ["MIXTURE"]) for setting in settings]
    given = [setting for setting in given if "parallel" not in setting or "RANK" in os.environ]
    given = [*SETTINGS, f"data.cache_dir={folder.with_suffix('.cache')}", f"output_dir={folder}", *given]
    recipe.main(load_config(recipe.Config, None, given))


def work(folder: Path) -> list[str]:
    for name, settings in CASES.items():
        run(name, folder / name, *settings)
    said = []
    for name, *settings in REFUSED:
        with pytest.raises(ValueError) as error:
            run(name, folder / "refused", *settings)
        said.append(str(error.value))
    return said


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("two")
    make_mixture(folder / "mixture")
    os.environ["MIXTURE"] = str(folder / "mixture")
    return folder, on_ranks(2, work, folder, timeout=1800)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_train_what_one_does(on_two: tuple[Path, list[Any]], tmp_path: Path, name: str) -> None:
    theirs = on_two[0] / name
    run(name, tmp_path / "one", *CASES[name])
    for row, other in zip(metrics(theirs), metrics(tmp_path / "one"), strict=True):
        row, other = ({key: value for key, value in one.items() if key not in TIMES} for one in (row, other))
        # These are differences of sums near 100, whose last bit is 8e-6.
        differences, of_one = ([one.pop(key, 0.0) for key in ("gain", "baseline")] for one in (row, other))
        assert differences == pytest.approx(of_one, abs=1e-5), row["step"]
        assert row == pytest.approx(other, rel=1e-5, abs=2e-6), row["step"]
    step, weights = "step_00000002", 0
    for file in (tmp_path / "one" / step).glob("*.safetensors"):
        found, expected = read_header(theirs / step / file.name), read_header(file)
        assert found.keys() == expected.keys()
        for tensor, value in expected.items():
            assert (found[tensor].read() - value.read()).abs().max() < 1e-6, tensor
            weights += 1
    assert weights
    caches = [len(list(one.with_suffix(".cache").glob("reference-*"))) for one in (theirs, tmp_path / "one")]
    assert caches == [2 * ("cached" in name or name == "kto context")] * 2 or caches[0] == caches[1] <= 1


def test_what_is_of_whole_rows_or_layers_is_refused_by_name(on_two: tuple[Path, list[Any]]) -> None:
    for said in on_two[1]:
        for found, expected in zip(said, REFUSED.values(), strict=True):
            assert expected in found
