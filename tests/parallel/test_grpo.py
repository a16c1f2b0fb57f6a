"""Online training on two ranks equals one process: completions, rewards, losses and files, for each
`generation.gather`."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from lean_ft import load_model
from lean_ft.parallel import refuse_cuts
from lean_ft.plan.devices import Machines, choose_device
from lean_ft.plan.rehearsal import rehearse
from lean_ft.settings.text import load_config
from lean_ft.system.catalog import find_recipe, load_recipe
from tests.parallel.processes import needs_parts, on_ranks, selected, supported
from tests.parallel.test_finetune import make_mixture
from tests.training.toy_runs import TIMES, digests, metrics

SETTINGS = (
    *("model.path=tiny", "model.dtype=float32", "data.source=tiny/problems_train.jsonl"),
    *("data.validation_source=tiny/problems_validation.jsonl", "data.chat=false", "data.max_prompt_length=32"),
    *("rewards=[length]", "generation.max_new_tokens=8", "generation.num_answers=2", "optimizer.lr=1e-4"),
    *("batch_size=2", "gradient_accumulation_steps=2", "max_steps=3", "sample_every=1", "memory.host_pool=false"),
    *("plan=false", "device=cpu"),
)
# With two micro-batches per step, each of two ranks has one, and their sum has the same bits in either order.
SAME_BITS = {
    "layer": (
        *("grpo", "loss.kl_weight=0.1", "generation.steps_per_round=2", "generation.passes=2"),
        "loss.entropy_share=0.8",
    ),
    "whole": (
        *("grpo", "generation.gather=whole", "loss.kl_weight=0.1", "loss.kl=in_reward"),
        "generation.cache_gib=0.0001",
    ),
    "kept": (
        *("grpo", "generation.gather=whole", "parallel.reshard_after_forward=false", "generation.most_attempts=2"),
        "data.shuffle=false",
    ),
    "copies": ("grpo", "loss.name=cispo", "parallel.replicate=2", "lora.rank=4", "loss.kl_weight=0.1"),
    "pairs": ("online_dpo", "generation.steps_per_round=2", "lora.rank=4", "loss.sft_weight=0.1"),
    "values": ("ppo", "schedule.name=constant"),
    "values of a base": (
        *("ppo", "lora.rank=4", "generation.gather=whole", "generation.steps_per_round=2", "generation.passes=1"),
        "optimizer.in_backward=true",
    ),
    "values, copies": ("ppo", "lora.rank=4", "parallel.replicate=2", "loss.kl_weight=0"),
}
# Each rank samples its own completions, except ranks that share attention heads, whose layers are split.
CUTS = supported(
    {
        "context": ("grpo", "parallel.context=2", "loss.kl_weight=0.1", "generation.passes=2"),
        "tensor": ("grpo", "parallel.tensor=2", "loss.entropy_share=0.8", "optimizer.in_backward=true"),
        "tensor, whole": (
            *("grpo", "parallel.tensor=2", "generation.gather=whole", "lora.rank=4", "loss.kl_weight=0.1"),
        ),
        "tensor, divergence in rewards": (
            *("grpo", "parallel.tensor=2", "lora.rank=4", "loss.kl_weight=0.1", "loss.kl=in_reward"),
        ),
        "experts, whole": ("grpo", "parallel.experts=2", "generation.gather=whole", "model.path=MIXTURE"),
        "pairs, tensor": ("online_dpo", "parallel.tensor=2", "loss.sft_weight=0.1"),
        "values, context": ("ppo", "parallel.context=2"),
        "values of a base, tensor": ("ppo", "parallel.tensor=2", "generation.gather=whole", "lora.rank=4"),
        "values, experts": ("ppo", "parallel.experts=2", "model.path=MIXTURE"),
    }
)
# The 2nd step's completions have equal rewards and differ only in divergences of 1e-5, which another order of summation
# rounds by 3e-6. So advantages of 0.015 differ by 0.0016, and so does the gradient norm, which is 0.4 in other steps.
OF_ROUNDED_DIVERGENCES = {"tensor, divergence in rewards": 2e-3}
REFUSED = {
    (
        *("grpo", "parallel.tensor=2", "loss.kl_weight=0.1", "reference.kind=nf4"),
    ): "cannot be combined with reference.kind=nf4",
    ("online_dpo", "parallel.context=2", "parallel.vocabulary=cut"): "this recipe's loss needs the whole output layer",
    ("ppo", "optimizer.name=muon"): "works on whole matrices",
}
# Three micro-batches and three groups do not divide evenly over two ranks.
CLOSE = (
    *("grpo", "gradient_accumulation_steps=3", "loss.name=gspo", "generation.steps_per_round=2"),
    "optimizer.name=sgd",
)


def run(folder: Path, name: str, *settings: str) -> None:
    recipe = load_recipe(find_recipe(name))
    given = [one.replace("MIXTURE", os.environ.get("MIXTURE", "")) for one in settings]
    given = [one for one in given if "parallel" not in one or "RANK" in os.environ]
    recipe.main(load_config(recipe.Config, None, [*SETTINGS, f"output_dir={folder}", *given]))


def work(folder: Path, wanted: set[str]) -> list[str]:
    for name in sorted(wanted & SAME_BITS.keys()):
        run(folder / name, *SAME_BITS[name])
    if "test_what_does_not_go_round_is_as_on_one" in wanted:
        run(folder / "close", *CLOSE)
    if "test_one_process_goes_on_with_two_models_of_two" in wanted:
        run(folder / "values", *SAME_BITS["values"])
        run(folder / "resumed", *SAME_BITS["values"], "max_steps=2")
    for name in sorted(wanted & CUTS.keys()):
        run(folder / name, *CUTS[name], "optimizer.name=sgd")
    if "test_what_does_not_go_with_a_cut_is_refused_by_name" not in wanted:
        return []
    said = []
    for settings in REFUSED:
        with pytest.raises(ValueError) as error:
            run(folder / "refused", *settings)
        said.append(str(error.value))
    return said


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> tuple[Path, list[list[str]]]:
    folder = tmp_path_factory.mktemp("two")
    make_mixture(folder / "mixture")
    os.environ["MIXTURE"] = str(folder / "mixture")
    return folder, on_ranks(2, work, folder, selected(request), timeout=1800)


@pytest.fixture(scope="module")
def on_two(two: tuple[Path, list[list[str]]]) -> Path:
    return two[0]


def numbers(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in TIMES and v is not None} for row in metrics(folder)]


def samples(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


@pytest.mark.long
@pytest.mark.parametrize("name", SAME_BITS)
def test_two_ranks_write_the_files_of_one(on_two: Path, tmp_path: Path, name: str) -> None:
    run(tmp_path / "one", *SAME_BITS[name])
    assert samples(on_two / name) == samples(tmp_path / "one")
    assert digests(on_two / name / "step_00000003") == digests(tmp_path / "one" / "step_00000003")
    for row, expected in zip(numbers(on_two / name), numbers(tmp_path / "one"), strict=True):
        assert row == pytest.approx(expected, rel=1e-6), row["step"]


@pytest.mark.long
def test_one_process_goes_on_with_two_models_of_two(on_two: Path) -> None:
    """In the middle of a round whose values and returns were computed by both ranks."""
    run(on_two / "resumed", *SAME_BITS["values"])
    assert digests(on_two / "resumed" / "step_00000003") == digests(on_two / "values" / "step_00000003")


@pytest.mark.long
def test_what_does_not_go_round_is_as_on_one(on_two: Path, tmp_path: Path) -> None:
    run(tmp_path / "one", *CLOSE)
    assert [row["answer"] for row in samples(on_two / "close")] == [row["answer"] for row in samples(tmp_path / "one")]
    for row, expected in zip(numbers(on_two / "close"), numbers(tmp_path / "one"), strict=True):
        assert row == pytest.approx(expected, rel=1e-5, abs=1e-7), row["step"]


@pytest.mark.long
@pytest.mark.parametrize("name", CUTS)
def test_ranks_that_cut_layers_learn_what_one_does(on_two: Path, tmp_path: Path, name: str) -> None:
    settings, of_norms = (*CUTS[name], "optimizer.name=sgd"), OF_ROUNDED_DIVERGENCES.get(name, 2e-6)
    learns_as_one(on_two / name, tmp_path / "one", *settings, of_norms=of_norms)


def learns_as_one(theirs: Path, folder: Path, *settings: str, of_norms: float = 2e-6) -> None:
    """The same completions, and the same numbers up to rounding."""
    run(folder, *settings)
    assert [row["answer"] for row in samples(theirs)] == [row["answer"] for row in samples(folder)]
    for row, expected in zip(numbers(theirs), numbers(folder), strict=True):
        norms = (one.pop("grad_norm", 0.0) for one in (row, expected))
        assert next(norms) == pytest.approx(next(norms), rel=1e-5, abs=of_norms), row["step"]
        assert row == pytest.approx(expected, rel=1e-5, abs=2e-6), row["step"]


@pytest.mark.long
@needs_parts
def test_four_ranks_of_which_two_answer_the_same(tmp_path: Path) -> None:
    settings = (
        *("grpo", "parallel.context=2", "parallel.tensor=2", "optimizer.name=sgd", "gradient_accumulation_steps=1"),
    )
    on_ranks(4, run, tmp_path / "four", *settings, timeout=900)
    learns_as_one(tmp_path / "four", tmp_path / "one", *settings)


@pytest.mark.long
def test_what_does_not_go_with_a_cut_is_refused_by_name(two: tuple[Path, list[list[str]]]) -> None:
    for said in two[1]:
        for found, expected in zip(said, REFUSED.values(), strict=True):
            assert expected in found


def test_rows_of_answers_that_do_not_go_round_are_refused_by_name() -> None:
    recipe = load_recipe(find_recipe("grpo"))
    cfg = load_config(recipe.Config, None, [*SETTINGS, "output_dir=unused", "parallel.context=3"])
    with pytest.raises(ValueError, match=r"rows of a multiple of 8 do not divide evenly. Set values whose product"):
        refuse_cuts(cfg)


@pytest.mark.long
def test_a_layer_at_a_time_does_not_hold_the_whole_model(tmp_path: Path) -> None:
    """Planned memory of the first of two devices, with the peak in sampling."""
    module = load_recipe(find_recipe("grpo"))

    def peak(gather: str) -> int:
        many = ("generation.steps_per_round=16", "optimizer.name=sgd", f"generation.gather={gather}")
        cfg = load_config(module.Config, None, [*SETTINGS, f"output_dir={tmp_path / 'run'}", *many])
        return rehearse(module, cfg, choose_device(None, "cpu"), Machines(2)).peak_bytes

    layer = sum(parameter.nbytes for parameter in load_model("tiny").layers[0].parameters())
    assert peak("whole") - peak("layer") == 3 * layer  # one of the 4 layers is gathered in both cases
