"""Plans of rounds that a server samples, compared with files, and with bytes and times computed by hand."""

from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open

from lean_ft.hub.paths import resolve_model_path
from lean_ft.peft import save_adapter
from lean_ft.peft.lora import load_with_adapter
from lean_ft.plan.devices import FIXED_SECONDS, Machines, find_device
from lean_ft.plan.engine import FILE_BYTES_PER_SECOND, OWN_SHARE
from lean_ft.plan.rehearsal import rehearse
from lean_ft.plan.result import EngineRound, Rehearsal
from tests.recipes.conftest import config_of, planned, recipe_module

SERVER = ("generation.engine=vllm", "loss.correction=token_truncate", "rewards=[length]", "data.source=none.jsonl")
SHAPE = ("batch_size=8", "gradient_accumulation_steps=2", "data.max_prompt_length=96", "generation.max_new_tokens=160")


def engine_of(plan: Rehearsal) -> EngineRound:
    assert plan.engine is not None
    return plan.engine


def plan(*settings: str, card: str = "H100") -> Rehearsal:
    return planned("grpo", *SERVER, *SHAPE, *settings, device=card)


def tensor_bytes(file: Path) -> int:
    with safe_open(file, "pt") as tensors:
        return sum(tensors.get_tensor(name).nbytes for name in tensors.keys())  # noqa: SIM118


@pytest.mark.long
def test_the_bytes_that_move_are_those_of_the_files(tmp_path: Path):
    (file,) = resolve_model_path("tiny").glob("*.safetensors")
    stored = tensor_bytes(file)
    merged = engine_of(plan("model.path=tiny"))
    assert (merged.way, merged.published_bytes, merged.weight_bytes) == ("merged", stored, stored)
    own = ("model.path=tiny", "lora.rank=3", "lora.targets=[q_proj,down_proj]")
    adapter = engine_of(plan(*own, "lora.quantize=nf4"))
    cfg = config_of("grpo", *SERVER, *own)
    save_adapter(load_with_adapter(cfg.model, cfg.lora), tmp_path)
    assert (adapter.way, adapter.weight_bytes) == ("adapter", stored)  # served in bfloat16, not in 4 bits
    assert adapter.published_bytes == tensor_bytes(tmp_path / "adapter_model.safetensors") < adapter.weight_bytes / 10
    link = find_device("H100").host_bytes_per_second
    seconds = adapter.published_bytes * (2 / link + 2 / FILE_BYTES_PER_SECOND)
    assert adapter.publication_seconds == pytest.approx(seconds)

    whole = engine_of(plan(*own, "generation.engine_weights=nccl", "generation.engine_url=http://other:8000"))
    assert whole.published_bytes == stored
    assert whole.publication_seconds == pytest.approx(
        whole.published_bytes / find_device("H100").network_bytes_per_second
    )


@pytest.mark.long
def test_the_cache_and_the_time_of_a_token_equal_those_by_hand(small_model: Path):
    """2 layers of 2 heads for keys and values with 32 features, 16 completions of 96 + 160 tokens, in bfloat16."""
    found, card = engine_of(plan(f"model.path={small_model}")), find_device("H100")
    token_bytes = 2 * 2 * 2 * 32 * 2
    assert (found.completions, found.rows, found.new_tokens) == (16, 16, 160)
    assert found.cache_bytes == 16 * (96 + 160) * token_bytes
    assert card.memory_bytes is not None and found.memory_bytes == int(OWN_SHARE * card.memory_bytes)
    # A token reads all weights but the norms, and the keys and values of half of the new tokens and the prompt.
    read = found.weight_bytes + 16 * (96 + 80) * token_bytes
    kernels = 2 * (7 + 1) + 1  # products and attention of the layers, and the output layer
    by_hand = read / (card.bytes_per_second * card.memory_share) + kernels * FIXED_SECONDS
    assert found.token_seconds == pytest.approx(by_hand, rel=0.1)
    assert found.sampling_seconds == pytest.approx(found.prompt_seconds + 160 * found.token_seconds)


@pytest.mark.long
def test_a_server_on_the_training_card_takes_its_share_of_the_memory(small_model: Path):
    cfg = config_of("grpo", *SERVER, *SHAPE, f"model.path={small_model}", "generation.ahead=1")
    card = find_device("H100")
    apart = rehearse(recipe_module("grpo"), cfg, card)
    beside = rehearse(recipe_module("grpo"), cfg, card, Machines(engine_share=0.25))
    assert card.memory_bytes is not None
    assert (apart.engine_bytes, beside.engine_bytes) == (0, card.memory_bytes // 4)
    assert beside.reserved_bytes == apart.reserved_bytes
    # Two programs on one card take turns, so that sampling ahead gains nothing.
    one, two = engine_of(beside), engine_of(apart)
    together = one.publication_seconds + one.sampling_seconds + beside.step_seconds
    assert beside.whole_step_seconds == pytest.approx(together)
    assert apart.whole_step_seconds == pytest.approx(
        two.publication_seconds + max(two.sampling_seconds, apart.step_seconds)
    )
    wired = config_of("grpo", *SERVER, *SHAPE, f"model.path={small_model}", "generation.engine_weights=nccl")
    with pytest.raises(ValueError, match="connects two GPUs"):
        rehearse(recipe_module("grpo"), wired, card, Machines(engine_share=0.25))
    small = replace(card, memory_bytes=4 * (one.weight_bytes + 5 * one.cache_bytes // one.rows))
    few = engine_of(rehearse(recipe_module("grpo"), cfg, small, Machines(engine_share=0.25)))
    assert few.rows == 5  # of 16, so that four turns are needed
    assert few.sampling_seconds == pytest.approx(few.prompt_seconds + 4 * 160 * few.token_seconds)
    assert engine_of(rehearse(recipe_module("grpo"), cfg, small, Machines(engine_share=0.01))).rows == 0


def test_a_round_ahead_takes_the_longer_of_sampling_and_training():
    found = EngineRound(
        completions=300,
        rows=256,
        new_tokens=10,
        weight_bytes=1,
        cache_bytes=1,
        memory_bytes=None,
        shares_device=False,
        prompt_seconds=1.0,
        token_seconds=0.5,
        way="merged",
        published_bytes=1,
        publication_seconds=0.25,
        steps=4,
        is_ahead=True,
    )
    assert found.sampling_seconds == 11.0  # two turns
    assert found.seconds(2.0, is_ahead=False) == 0.25 + 11 + 8
    assert found.seconds(2.0, is_ahead=True) == 0.25 + 11
    assert found.seconds(3.0, is_ahead=True) == 0.25 + 12
    assert replace(found, shares_device=True).seconds(2.0, is_ahead=True) == 0.25 + 11 + 8


def test_the_own_engine_is_planned_as_before(small_model: Path):
    found = planned("grpo", f"model.path={small_model}", "rewards=[length]", "data.source=none.jsonl", *SHAPE)
    assert found.engine is None and found.engine_bytes == 0 and found.whole_step_seconds == found.step_seconds


@pytest.mark.long
def test_rounds_are_planned_on_two_devices(small_model: Path):
    own = (f"model.path={small_model}", "rewards=[length]", "data.source=none.jsonl", *SHAPE)
    one, two = (planned("grpo", *own, processes=number) for number in (1, 2))
    assert two.tokens == one.tokens and two.step_seconds < one.step_seconds
