"""The recipe on two ranks that split its layers: one process reads and resumes what they write."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from lean_ft.models import load_model, save_model
from lean_ft.parallel import cut, join, parallelize
from lean_ft.settings import ParallelConfig
from tests.parallel.processes import assert_refused, needs_parts, on_ranks, refusal, selected
from tests.parallel.test_finetune import assert_close, make_mixture, numbers, run
from tests.training.toy_runs import digests

pytestmark = needs_parts

EVALUATED = ("data.validation_fraction=0.05", "eval_every=3")
ADAPTER = ("lora.rank=4", "data.packing=bfd", "optimizer.name=sgd")
MOMENTUM = ("optimizer.name=sgd", "optimizer.momentum=0.9", "parallel.vocabulary=cut")
CUTS = {
    "tensor": ("parallel.tensor=2", *MOMENTUM, "save_async=true", "save_every=2", "eval_answers=2"),
    "context, 4 bits": (
        "parallel.context=2",
        *ADAPTER,
        "lora.quantize=nf4",
        "parallel.vocabulary=cut",
        "eval_answers=2",
    ),
    "tensor, adapter": ("parallel.tensor=2", *ADAPTER),
    "experts": ("parallel.experts=2", *MOMENTUM, "model.path=MIXTURE"),
}
COPIED = {"tensor": "tiny", "experts": "MIXTURE"}
REFUSED = {
    (
        "parallel.tensor=2",
        "lora.rank=4",
        "lora.quantize=nf4",
    ): "tensor=2 cannot be combined with lora.quantize=nf4: blocks",
    ("parallel.tensor=2", "lora.rank=4", "lora.dora=true"): "cannot be combined with lora.dora=true: a row",
    ("parallel.tensor=2", "optimizer.name=adafactor"): "cannot be combined with optimizer.name=adafactor: a row",
    ("parallel.experts=2", "model.path=MIXTURE", "compile=true"): "experts=2 cannot be combined with compile=true",
    ("parallel.experts=2", "model.path=MIXTURE", "lora.rank=4"): "does not support the adapter of",
    ("parallel.experts=2",): "and this model has no experts",
    ("parallel.experts=3",): "does not divide the 2 processes that share a replica",
    ("parallel.context=2", "neftune_alpha=5"): "context=2 cannot be combined with neftune_alpha=5: the noise",
    ("parallel.tensor=2", "data.max_length=63"): "data.max_length=63 tokens, or a multiple of 8, do not divide evenly",
    ("parallel.tensor=2", "parallel.context=2"): "parallel.context=2 x tensor=2 needs a multiple of 4 processes",
}


def work(folder: Path, wanted: set[str]) -> list[str]:
    for name in sorted(wanted & CUTS.keys()):
        run(folder / name, *EVALUATED, *CUTS[name])
    for over, path in COPIED.items():
        if "test_split_layers_are_saved_like_those_of_one_process" in wanted:
            save_again(folder / over, over, os.environ.get(path, path))
    return [refusal(run, folder / "refused", *settings) for settings in REFUSED]


def save_again(folder: Path, over: str, path: str) -> None:
    """Load a model with split layers, and save it."""
    cfg = ParallelConfig.model_validate({over: 2})
    ranks = join(cfg, torch.device("cpu"))
    model = load_model(path, "meta", dtype=torch.bfloat16)
    cut(model, cfg, ranks)
    parallelize(model, cfg, ranks)
    save_model(model, folder / "saved", ranks=ranks)


@pytest.fixture(scope="module")
def on_two(tmp_path_factory, request) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("two")
    make_mixture(folder / "mixture")
    os.environ["MIXTURE"] = str(folder / "mixture")
    return folder, on_ranks(2, work, folder, selected(request), timeout=300)


@pytest.mark.long
@pytest.mark.parametrize("name", CUTS)
def test_one_process_resumes_a_run_of_two(on_two, tmp_path, name):
    """Losses, also held-out ones; from the third step on, with weights and state that two processes wrote."""
    theirs, more = on_two[0] / name, (*EVALUATED, *CUTS[name][1:])
    run(tmp_path / "one", "max_steps=4", *more)
    run(theirs, "max_steps=4", "save_every=0", *more)
    assert_close(numbers(theirs), numbers(tmp_path / "one"))


@pytest.mark.long
@pytest.mark.parametrize("over", COPIED)
def test_split_layers_are_saved_like_those_of_one_process(on_two, tmp_path, over):
    save_model(load_model(os.environ.get(COPIED[over], COPIED[over]), "cpu", dtype=torch.bfloat16), tmp_path)
    assert digests(on_two[0] / over / "saved") == digests(tmp_path)


def test_unsupported_combinations_are_refused_by_name(on_two):
    assert_refused(on_two[1], REFUSED.values())
