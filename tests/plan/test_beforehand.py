"""The memory estimate before a run: a bound if it suffices, otherwise a rehearsal in another process."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from lean_ft.data import largest_batch, prepare_batches
from lean_ft.plan import beforehand
from lean_ft.plan.beforehand import as_long_as_its_data, foresee, upper_bound_bytes
from lean_ft.plan.devices import CPU
from lean_ft.plan.rehearsal import rehearse
from lean_ft.settings.text import load_config
from lean_ft.system.catalog import find_recipe, load_recipe, recipes
from lean_ft.system.units import GIB
from lean_ft.tokenizers import load_tokenizer


@pytest.fixture(scope="module")
def recipe():
    return load_recipe(find_recipe("full_finetune_single_device"))


@pytest.fixture
def configure(recipe, tmp_path, small_model):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "%s"}\n' % ("word " * 999) * 9)
    own = [f"model.path={small_model}", f"data.source={rows}", f"output_dir={tmp_path / 'run'}", "data.max_length=64"]
    return lambda *overrides: load_config(recipe.Config, None, [*own, "device=cpu", *overrides])


@pytest.fixture
def in_this_process(monkeypatch):
    """Rehearse without another process."""

    def run(command, *, input, **_):
        try:
            answer = beforehand._answer(json.loads(input))
        except ValueError:
            answer = None
        return SimpleNamespace(stdout=json.dumps({"result": answer}).encode())

    monkeypatch.setattr(beforehand.subprocess, "run", run)


@pytest.mark.long
@pytest.mark.parametrize(
    "overrides",
    [
        ("model.dtype=float32", "optimizer.name=adamw", "clip_grad_norm=1.0"),
        (),
        ("model.dtype=float16", "batch_size=8", "gradient_accumulation_steps=4", "memory.loss_chunk_tokens=0"),
    ],
)
def test_the_bound_is_one(recipe, configure, overrides):
    cfg = configure(*overrides)
    bound = upper_bound_bytes(cfg)
    assert bound is not None
    assert bound > rehearse(recipe, cfg, CPU).peak_bytes


def test_a_run_that_surely_fits_is_not_rehearsed(recipe, configure, monkeypatch):
    monkeypatch.setattr(beforehand, "_rehearse_apart", None)
    outlook = foresee(recipe, configure())
    assert outlook is not None and outlook.fits and not outlook.where
    assert "peak memory below" in str(outlook)


@pytest.mark.first(1)
@pytest.mark.parametrize("is_rehearsed", [False, True])
@pytest.mark.usefixtures("in_this_process")
def test_a_run_that_leaves_most_memory_free_names_a_faster_setting(recipe, configure, monkeypatch, is_rehearsed):
    """The advice comes from the bound or from a rehearsal. There is none if nothing is recomputed, or little memory is
    left."""
    recomputing = configure("memory.activation_checkpointing=full", "batch_size=4")
    if is_rehearsed:
        monkeypatch.setattr(beforehand, "_room_bytes", lambda setting: upper_bound_bytes(recomputing) - 1)
    outlook = foresee(recipe, recomputing)
    assert outlook is not None and bool(outlook.where) == is_rehearsed
    assert "memory.activation_checkpointing=none would be faster and fit too" in (outlook.advice or "")
    assert ("peak memory below" in (outlook.advice or "")) != is_rehearsed
    plain = foresee(recipe, configure("memory.activation_checkpointing=none", "batch_size=4"))
    assert plain is not None and plain.advice is None
    if is_rehearsed:
        monkeypatch.setattr(beforehand, "_room_bytes", lambda setting: int(1.5 * outlook.peak_bytes))
        assert (tight := foresee(recipe, recomputing)) is not None and tight.advice is None


def test_on_a_gpu_what_the_allocator_reserves_must_fit():
    outlook = beforehand.Outlook(10 * GIB, "loss", 11 * GIB, "A100", reserved_bytes=12 * GIB)
    assert not outlook.fits
    assert str(outlook).startswith(
        "peak memory 10.00 GiB (12.00 GiB reserved), reached in: loss; 11.00 GiB free on A100"
    )


@pytest.mark.parametrize("settings", [("batch_size=99",), ("data.batch_tokens=1000000000",)])
def test_rows_are_planned_as_long_and_as_many_as_the_data_has(recipe, configure, monkeypatch, tmp_path, settings):
    """Row limits that no row reaches, or that exceed the number of rows, cause no warning."""
    (tmp_path / "short.jsonl").write_text('{"text": "a few words"}\n{"text": "word word word"}\n{"text": "word"}\n')
    cfg = configure(f"data.source={tmp_path / 'short.jsonl'}", "data.max_length=131072", *settings)
    largest = prepare_batches(cfg.data, load_tokenizer("tiny"), cfg.batch_size, cfg.seed)[0].take(1)[0]
    planned = as_long_as_its_data(cfg)
    assert largest_batch(planned.data, planned.batch_size).input_ids.shape == largest.input_ids.shape
    assert upper_bound_bytes(planned) < upper_bound_bytes(cfg) / 100
    room_bytes = 3 * upper_bound_bytes(planned)
    monkeypatch.setattr(beforehand, "_room_bytes", lambda setting: room_bytes)
    outlook = foresee(recipe, cfg)
    assert outlook is not None and outlook.fits and not outlook.where


def test_pairs_are_planned_with_the_prompts_that_they_share(tmp_path):
    row = {"prompt": "p" * 60, "rejected": "r" * 13}
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row | {"chosen": f"{i}ccc"}) + "\n" for i in range(9)))
    given = (
        f"data.source={tmp_path / 'pairs.jsonl'}",
        "output_dir=unused",
        f"data.cache_dir={tmp_path}",
        "batch_size=4",
    )
    cfg = load_config(load_recipe(recipes()["dpo"]).Config, None, ["model.path=tiny", *given])
    batches, _ = prepare_batches(cfg.data, load_tokenizer("tiny"), cfg.batch_size, cfg.seed, share_prompts=True)
    (largest,) = batches.take(1)
    planned = as_long_as_its_data(cfg)
    longest = largest_batch(planned.data, planned.batch_size, share_prompts=True)
    assert largest.num_tokens <= longest.num_tokens <= largest.num_tokens + 4 * 8
    assert largest.num_targets <= longest.num_targets <= 2 * largest.num_targets


def test_rows_of_one_length_are_planned_without_data(configure):
    packed = configure("data.max_length=64", "data.packing=bfd", "data.source=none.jsonl")
    assert as_long_as_its_data(packed) is packed  # packed rows have one length, so no data is read


@pytest.fixture
def written(monkeypatch, tmp_path):
    """A function that writes a recipe with this `main`, for a run that may not fit."""
    monkeypatch.setattr(beforehand, "_room_bytes", lambda setting: 2**20)
    (tmp_path / "recipes_beside.py").write_text(
        "from lean_ft.system.catalog import find_recipe, load_recipe\n"
        "full = load_recipe(find_recipe('full_finetune_single_device'))\n"
    )

    def write(main: str):
        path = tmp_path / f"recipe_{abs(hash(main))}.py"
        path.write_text(
            f"import os, sys\nfrom recipes_beside import full\nConfig = full.Config\ndef main(cfg):\n    {main}\n"
        )
        return load_recipe(path)

    return write


@pytest.mark.long
@pytest.mark.usefixtures("in_this_process")
def test_a_run_that_may_not_fit_is_rehearsed_and_told(recipe, configure, monkeypatch):
    monkeypatch.setattr(beforehand, "_room_bytes", lambda setting: 2**20)
    outlook = foresee(recipe, cfg := configure())
    assert outlook is not None and not outlook.fits
    assert 2**20 < outlook.peak_bytes < (upper_bound_bytes(cfg) or 0)
    assert f"of the process itself, reached in: {outlook.where}" in str(outlook) and outlook.where
    assert outlook.process_bytes > 2**27  # torch alone
    assert replace(outlook, room_bytes=None).fits


@pytest.mark.long
def test_a_rehearsal_has_a_process_of_its_own(recipe, written, configure, capfd):
    """The process sees no GPU, tells prints of the recipe from its answer, and leaves nothing behind."""
    prints = "assert os.environ['CUDA_VISIBLE_DEVICES'] == ''; print('output of a recipe')"
    mine = written(f"{prints}; sys.modules.update(left_behind=sys); full.main(cfg)")
    outlook = foresee(mine, cfg := configure())
    assert outlook is not None and outlook.peak_bytes == rehearse(recipe, cfg, CPU).peak_bytes
    assert "output of a recipe" in capfd.readouterr().err and "left_behind" not in sys.modules


@pytest.mark.long
@pytest.mark.parametrize(("main", "failure"), [("os._exit(1)", "process died"), ("raise KeyError(5)", "KeyError: 5")])
def test_a_rehearsal_that_fails_says_so(written, configure, main, failure):
    with pytest.raises(RuntimeError, match=failure):
        foresee(written(main), configure())


@pytest.mark.long
def test_an_alias_is_rehearsed_with_its_own_settings(configure, written):
    lora = load_recipe(find_recipe("lora_finetune_single_device"))  # the alias has its own settings class
    adapted = lora.Config.model_validate({name: value for name, value in configure() if name != "lora"})
    outlook = foresee(lora, adapted)
    assert outlook is not None and outlook.peak_bytes == rehearse(lora, adapted, CPU).peak_bytes


@pytest.mark.gpu
def test_on_a_gpu_a_run_is_planned(recipe, configure, monkeypatch):
    monkeypatch.setattr(beforehand, "upper_bound_bytes", lambda cfg: None)
    torch.cuda.init()
    outlook = foresee(recipe, configure("device=cuda", "model.dtype=float32"))
    assert outlook is not None and outlook.where


@pytest.mark.usefixtures("in_this_process")
def test_the_run_reports_refused_settings(recipe, configure, monkeypatch):
    assert foresee(recipe, configure("model.path=no/such/folder/here")) is None
    monkeypatch.setattr(beforehand, "_room_bytes", lambda setting: 2**20)
    assert foresee(recipe, configure("memory.activation_offload=true")) is None
