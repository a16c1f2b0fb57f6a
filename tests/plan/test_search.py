"""The search with a stub rehearsal: the ranking, the result if nothing fits."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from lean_ft.data.embedding import EmbeddingDataConfig
from lean_ft.plan import search as search_module
from lean_ft.plan.devices import CPU
from lean_ft.plan.rehearsal import Rehearsal
from lean_ft.plan.result import Peak
from lean_ft.plan.search import search, search_adapters
from lean_ft.settings import LoRAConfig, MemoryConfig, OptimizerConfig, RecipeConfig, SFTDataConfig

RECIPE = SimpleNamespace(__file__="mine.py")
# Saved bytes per row of the batch, and its time.
HOLES = 0  # free bytes between the tensors
ACTIVATIONS = {"none": (100, 1.0), "every_n": (60, 1.15), "selective": (30, 1.25), "full": (20, 1.3)}


class Config(RecipeConfig):
    optimizer: OptimizerConfig
    memory: MemoryConfig
    data: SFTDataConfig


@pytest.fixture
def cfg():
    return Config(
        batch_size=4,
        optimizer=OptimizerConfig(name="adamw"),
        memory=MemoryConfig(),
        data=SFTDataConfig(source="unread", max_length=512),
        output_dir=Path("unused"),
    )


@pytest.fixture(autouse=True)
def rehearsed(monkeypatch):
    """The rehearsed settings, in order."""
    settings = []

    def rehearse(recipe, cfg, device, machines=None):
        settings.append(cfg)
        kept, seconds = ACTIVATIONS[cfg.memory.activation_checkpointing]
        states = {"adamw": 400, "adamw_8bit": 200}[cfg.optimizer.name]
        gradients = 0 if cfg.optimizer.in_backward else 100
        sums = 20 if cfg.memory.loss_accumulation_dtype == "weight" else 40
        seconds *= 1.02 if cfg.optimizer.name == "adamw_8bit" else 1.0
        peak = Peak("loss", {"weights": 200, "rest": cfg.batch_size * kept + states + gradients + sums})
        return Rehearsal(peak, seconds, 1000, 100, [], reserved_bytes=peak.total_bytes + cfg.batch_size * HOLES)

    monkeypatch.setattr(search_module, "known_or_new", rehearse)
    return settings


def test_for_each_way_to_keep_the_state_the_fastest_that_fits(cfg, rehearsed):
    found = search(RECIPE, cfg, CPU, 800)
    # 8-bit moments leave room for every second layer's activations; 32-bit moments only for attention outputs.
    best = found.fitting[0]
    assert best.overrides == {
        "optimizer.in_backward": True,
        "memory.activation_checkpointing": "every_n",
        "optimizer.name": "adamw_8bit",
    }
    assert best.peak_bytes == 200 + 4 * 60 + 200 + 40
    assert best.command_line == (
        "optimizer.in_backward=true memory.activation_checkpointing=every_n optimizer.name=adamw_8bit"
    )
    speeds = [candidate.tokens_per_second for candidate in found.fitting]
    assert speeds == sorted(speeds, reverse=True)
    assert any("optimizer.name" not in candidate.overrides for candidate in found.fitting)
    assert len(rehearsed) <= 6, "bisection, not every rung"


def test_what_is_reserved_must_fit_and_not_the_peak_alone(cfg, monkeypatch):
    for holes, fits in ((0, True), (10, False)):
        monkeypatch.setitem(globals(), "HOLES", holes)
        found = search(RECIPE, cfg, CPU, 680)
        assert any(candidate.peak_bytes == 200 + 4 * 60 + 200 + 40 for candidate in found.fitting) is fits
        assert all(candidate.reserved_bytes <= 680 for candidate in found.fitting)


def test_where_nothing_fits_smaller_batches_are_tried_and_the_nearest_is_told(cfg):
    found = search(RECIPE, cfg, CPU, 470)
    assert found.fitting[0].overrides["batch_size"] == 2
    assert found.fitting[0].overrides["gradient_accumulation_steps"] == 2
    nothing = search(RECIPE, cfg, CPU, 100)
    assert nothing.fitting == []
    assert nothing.too_large[0].overrides["batch_size"] == 1
    assert nothing.too_large[0].peak_bytes == 200 + 20 + 200 + 20


def test_clipping_keeps_the_step_out_of_backward(cfg, rehearsed):
    search(RECIPE, cfg.model_copy(update={"clip_grad_norm": 1.0}), CPU, 10_000)
    assert not any(settings.optimizer.in_backward for settings in rehearsed)


def test_settings_that_the_recipe_refuses_are_passed_over_with_the_reason(cfg, monkeypatch):
    rehearse = search_module.known_or_new

    def refusing(recipe, cfg, device, machines=None):
        if cfg.memory.activation_checkpointing == "full":
            raise ValueError("not here")
        return rehearse(recipe, cfg, device)

    monkeypatch.setattr(search_module, "known_or_new", refusing)
    found = search(RECIPE, cfg, CPU, 650)
    assert found.fitting[0].overrides["memory.activation_checkpointing"] == "selective"
    assert set(found.refused.values()) == {"not here"}


def test_what_fits_as_it_is_comes_first_and_larger_chunks_of_the_loss_are_tried(cfg, rehearsed):
    cfg = cfg.model_copy(update={"data": SFTDataConfig(source="unread", max_length=4096)})
    own = search_module.known_or_new(RECIPE, cfg, CPU)
    found = search(RECIPE, cfg, CPU, 2000, own=own)
    assert found.fitting[0].overrides == {}
    assert found.fitting[0].rehearsal is own
    assert {settings.memory.loss_chunk_tokens for settings in rehearsed} == {"auto", 8192}


def test_slower_settings_that_fit_as_given_come_after_the_faster_ones(cfg, rehearsed):
    cfg = search_module.with_overrides(cfg, {"memory.activation_checkpointing": "full"})
    found = search(RECIPE, cfg, CPU, 2000, own=search_module.known_or_new(RECIPE, cfg, CPU))
    assert found.fitting[0].overrides, "the given settings are not the fastest"
    speeds = [candidate.tokens_per_second for candidate in found.fitting]
    assert speeds == sorted(speeds, reverse=True)
    assert any(candidate.overrides == {} for candidate in found.fitting)


def test_what_the_user_turned_on_to_save_memory_is_turned_off_if_there_is_room(cfg, rehearsed):
    given = {"memory.activation_checkpointing": "full", "memory.activation_offload": True, "memory.tile_mlp": 4}
    cfg = search_module.with_overrides(cfg, {**given, "clip_grad_norm": 1.0})
    best = search(RECIPE, cfg, CPU, 10_000).fitting[0]
    off = {"memory.activation_offload": False, "memory.tile_mlp": 0, "memory.activation_checkpointing": "none"}
    assert best.overrides == off
    cfg = search_module.with_overrides(cfg, {"optimizer.state": "streamed"})
    assert search(RECIPE, cfg, CPU, 10_000).fitting[0].overrides == {**off, "optimizer.state": "device"}


def test_memory_that_is_left_takes_larger_batches(cfg, rehearsed):
    cfg = search_module.with_overrides(cfg, {"gradient_accumulation_steps": 2, "optimizer.in_backward": True})
    found = search(RECIPE, cfg, CPU, 200 + 400 + 40 + 16 * 100)  # 16 rows per micro-batch fit, and not 32
    splits = [{"batch_size": 8, "gradient_accumulation_steps": 1}, {"batch_size": 16, "gradient_accumulation_steps": 1}]
    assert splits[0] in [candidate.overrides for candidate in found.fitting]
    assert [candidate.overrides for candidate in found.more_rows] == [splits[1]], "its steps have 16 rows, not 8"
    assert {candidate.overrides.get("batch_size") for candidate in found.too_large} == {32}


class Adaptable(Config):
    lora: LoRAConfig | None = None


@pytest.mark.parametrize(("budget", "techniques"), [(10_000, ["none"]), (300, ["none", "selective", "full"])])
def test_a_full_recipe_is_rehearsed_with_adapters_too(cfg, rehearsed, budget, techniques):
    without_adapters, cfg = cfg, Adaptable(**dict(cfg))
    found = search_adapters(RECIPE, cfg, CPU, budget)
    assert list(found) == ["mine lora.rank=16", "mine lora.rank=16 lora.quantize=nf4"]
    assert [settings.lora.quantize for settings in rehearsed[:: len(rehearsed) // 2]] == ["none", "nf4"]
    tried = [settings.memory.activation_checkpointing for settings in rehearsed]
    assert list(dict.fromkeys(tried)) == techniques, "the given settings, and more only if they do not fit"
    assert all(bool(adapter.fitting) is (budget == 10_000) for adapter in found.values())
    assert search_adapters(RECIPE, Adaptable(**{**dict(cfg), "lora": LoRAConfig()}), CPU, budget) == {}
    assert search_adapters(RECIPE, without_adapters, CPU, budget) == {}
    rounding = cfg.model_copy(update={"optimizer": cfg.optimizer.model_copy(update={"stochastic_rounding": True})})
    found = search_adapters(RECIPE, rounding, CPU, budget)
    assert all(name.endswith(" optimizer.stochastic_rounding=false") for name in found) and len(found) == 2
    assert not rehearsed[-1].optimizer.stochastic_rounding, "adapters are float32, and the optimizer refuses it"


class Compared(RecipeConfig):
    optimizer: OptimizerConfig
    memory: MemoryConfig
    data: EmbeddingDataConfig


@pytest.mark.parametrize("given", [(4, 8), (32, 1), (1, 32)])
def test_a_step_that_compares_its_rows_keeps_their_number(cfg, monkeypatch, given):
    """The largest micro-batch that fits has the fewest second passes."""

    def rehearse(recipe, cfg, device, machines=None):
        kept, seconds = ACTIVATIONS[cfg.memory.activation_checkpointing]
        second_passes = 1 - 1 / cfg.gradient_accumulation_steps
        peak = Peak("loss", {"weights": 200, "rest": cfg.batch_size * kept + 400})
        return Rehearsal(peak, seconds + second_passes / 3, 1000, 100, [], reserved_bytes=peak.total_bytes)

    monkeypatch.setattr(search_module, "known_or_new", rehearse)
    data = EmbeddingDataConfig(source="unread", max_length=512)
    cfg = Compared(**{**dict(cfg), "data": data, "batch_size": given[0], "gradient_accumulation_steps": given[1]})
    found = search(RECIPE, cfg, CPU, 200 + 400 + 16 * 100)
    chosen = search_module.with_overrides(cfg, found.fitting[0].overrides)
    assert found.more_rows == []
    assert (chosen.batch_size, chosen.gradient_accumulation_steps) == (16, 2)
    assert chosen.memory.activation_checkpointing == "none"
