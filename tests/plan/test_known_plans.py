"""Plans of the same settings are made once; everything that a plan depends on makes it anew."""

import shutil
from dataclasses import replace

import pytest

from lean_ft.plan import known_plans, rehearsal
from lean_ft.plan.devices import CPU, DEVICES, ONE_DEVICE, Machines
from lean_ft.plan.known_plans import known, known_or_new, todays_cpu
from lean_ft.plan.result import Launches, Peak, Rehearsal
from lean_ft.settings.text import load_config
from lean_ft.system.catalog import load_recipe, recipes

T4 = DEVICES["T4"]


@pytest.fixture
def configure(tmp_path, monkeypatch, small_model):
    """The user's own recipe and model, and an empty cache."""
    monkeypatch.setenv("LEAN_FT_CACHE", str(tmp_path / "cache"))
    shutil.copyfile(recipes()["full_finetune_single_device"], tmp_path / "mine.py")
    shutil.copytree(small_model, tmp_path / "model")

    def of(*overrides):
        recipe = load_recipe(tmp_path / "mine.py")
        own = [f"model.path={tmp_path / 'model'}", "data.source=unread", "data.max_length=32", "output_dir=unread"]
        own += ["optimizer.name=sgd"]
        return recipe, load_config(recipe.Config, None, [*own, *overrides])

    return of


@pytest.fixture
def rehearsed(configure, tmp_path, monkeypatch):
    """Rehearsals return this plan, and the list has their settings."""
    read = [str(tmp_path / "model" / "config.json")]
    ledger = {("layers.*", "mm"): Launches(3, 1e9, 2e6, 0.5, 0.25)}
    made = Rehearsal(Peak("loss", {"weights": 7}), 1.0, 64, 8, [], ledger=ledger, model_files=read)
    settings = []
    monkeypatch.setattr(rehearsal, "rehearse", lambda recipe, cfg, *_: settings.append(cfg) or made)
    return made, settings


def is_known(recipe, cfg, device=T4, machines=ONE_DEVICE):
    try:
        return known(recipe, cfg, device, machines) is not None
    except LookupError:
        return False


def test_a_plan_is_known_until_something_that_it_depends_on_changes(configure, rehearsed, tmp_path, monkeypatch):
    recipe, cfg = configure()
    assert not is_known(recipe, cfg)
    made = known_or_new(recipe, cfg, T4)
    monkeypatch.setattr(rehearsal, "rehearse", None)
    assert known_or_new(recipe, cfg, T4) == made
    assert is_known(*configure("output_dir=elsewhere"))
    assert not is_known(*configure("batch_size=3"))
    assert not is_known(recipe, cfg, device=DEVICES["L4"])
    assert not is_known(recipe, cfg, device=replace(T4, memory_bytes=1))
    assert not is_known(recipe, cfg, machines=Machines(2))
    for name in ("mine.py", "model/config.json"):
        file = tmp_path / name
        before = file.read_text()
        file.write_text(before + "\n")
        assert not is_known(recipe, cfg), name
        file.write_text(before)
        assert is_known(recipe, cfg), name
    own = next(file for file in known_plans._sources() if file.endswith("lean_ft/plan/trace.py"))
    digest = known_plans._digest
    monkeypatch.setattr(known_plans, "_digest", lambda file: "edited" if str(file) == own else digest(file))
    assert not is_known(recipe, cfg)


def test_a_damaged_or_foreign_file_is_ignored(configure, rehearsed, tmp_path):
    recipe, cfg = configure()
    made, settings = rehearsed
    known_or_new(recipe, cfg, T4)
    (file,) = (tmp_path / "cache" / "plans").iterdir()
    whole = file.read_text()
    other_type = whole.replace('"tokens": ', '"tokens": "many", "others": ')
    for content in ("", "{", "[]", "{}", '{"sources": {}}', '{"sources": {"no/such.py": "1"}}', other_type):
        file.write_text(content)
        assert not is_known(recipe, cfg), content
    assert known_or_new(recipe, cfg, T4) == made
    assert settings == [cfg, cfg] and is_known(recipe, cfg)


def test_few_plans_are_kept_and_none_where_nothing_can_be_written(configure, rehearsed, tmp_path, monkeypatch):
    monkeypatch.setattr(known_plans, "_MOST_PLANS", 2)
    monkeypatch.setattr(known_plans, "_sources", dict)  # to save time
    for batch_size in (1, 2, 3):
        known_or_new(*configure(f"batch_size={batch_size}"), T4)
    assert len(list((tmp_path / "cache" / "plans").iterdir())) == 2
    assert not is_known(*configure("batch_size=1")) and is_known(*configure("batch_size=3"))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LEAN_FT_CACHE", str(tmp_path / "file"))
    assert known_or_new(*configure(), T4).peak_bytes > 0


def test_a_cpu_is_measured_once_a_day(configure, monkeypatch):
    measured = []
    monkeypatch.setattr(
        "lean_ft.plan.devices.measured_cpu", lambda: measured.append(1) or replace(CPU, flops_32bit=7e9)
    )
    assert todays_cpu() == todays_cpu() == replace(CPU, flops_32bit=7e9)
    assert measured == [1]
