"""The recipe on the embedded model: its initial values, an independent loop, and settings of memory and layout that change no number."""

import json
import math
import shutil
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from lean_ft.data import PairBatch, preference_batches
from lean_ft.frozen.reference import _weights_digest
from lean_ft.hub.paths import resolve_data_path, resolve_model_path
from lean_ft.models import load_model
from lean_ft.plan.devices import choose_device
from lean_ft.plan.rehearsal import rehearse
from lean_ft.settings.text import load_config
from lean_ft.system.catalog import load_recipe, recipes
from lean_ft.system.shards import ALONE
from lean_ft.system.user_functions import file_digest
from lean_ft.tokenizers import load_tokenizer
from tests.data.pair_texts import texts_of
from tests.training.toy_runs import TIMES

RECIPE = "dpo"
SETTINGS = (
    "model.path=tiny",
    "model.dtype=float32",
    "data.source=tiny/pairs_validation.jsonl",
    "data.max_length=96",
    "optimizer.lr=1e-4",
    "schedule.name=constant",
    "batch_size=4",
    "max_steps=6",
    "device=cpu",
    "plan=false",
)
Train = Callable[..., list[dict[str, Any]]]
UNLIKE = TIMES | {"tokens"}  # may differ between runs with equal results


def numbers(lines: list[dict[str, Any]]) -> list[tuple]:
    return [(line["loss"], line["grad_norm"], line["rewards/margins"], line["tokens"]) for line in lines]


LORA = ("lora.rank=4", "lora.dropout=0.1")
BEGINNINGS = [
    ("reference.kind=cached",),
    ("reference.kind=cached", *LORA, "data.packing=bfd"),
    ("reference.kind=model", "data.packing=padding_free"),
    ("reference.kind=adapter_off", *LORA),
    ("reference.kind=adapter_off", *LORA, "model.dtype=bfloat16", "data.packing=bfd", "memory.tile_mlp=3"),
    ("reference.kind=cached", "model.dtype=float16", "memory.activation_checkpointing=full"),
    ("reference.kind=model", "model.dtype=bfloat16", "data.batch_tokens=800"),
]


@pytest.mark.parametrize("settings", BEGINNINGS, ids=str)
def test_margins_start_at_exactly_0_and_the_loss_at_ln_2(train: Train, settings: tuple[str, ...]) -> None:
    first, last = train(*settings, "gradient_accumulation_steps=2", "max_steps=2", "batch_size=2")
    assert first["rewards/chosen"] == first["rewards/rejected"] == first["rewards/margins"] == 0
    assert first["rewards/accuracies"] == 0.5
    assert first["loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert last["rewards/margins"] != 0


@pytest.mark.parametrize("packing", ["none", "bfd"])
def test_each_pair_has_its_own_reference_also_when_held_out(train: Train, packing: str, tmp_path: Any) -> None:
    """With lr=0 all margins stay 0, also in the second epoch's batches and the held-out set."""
    few = resolve_data_path("tiny/pairs_validation.jsonl").read_text().splitlines()[:24]
    (tmp_path / "few.jsonl").write_text("\n".join(few))
    rows = (f"data.source={tmp_path / 'few.jsonl'}", "data.validation_fraction=0.5", "epochs=2", "optimizer.lr=0")
    *lines, evaluation = train(*rows, "reference.kind=cached", f"data.packing={packing}")
    assert lines[-1]["epoch"] > 1
    for line in lines:
        assert line["rewards/margins"] == pytest.approx(0, abs=1e-5)
    assert evaluation["eval_rewards/chosen"] == evaluation["eval_rewards/margins"] == 0


def test_a_4_bit_reference_is_close(train: Train) -> None:
    (first,) = train("reference.kind=nf4", "max_steps=1")
    assert 0 < abs(first["rewards/chosen"]) < 0.5
    assert first["loss"] == pytest.approx(math.log(2), rel=0.1)


@cache
def by_hand(settings: tuple[str, ...], num_steps: int = 8) -> tuple[list[float], list[float]]:
    """DPO written by hand: one completion at a time, whole logits, two transformers models, torch's AdamW.
    Return losses and mean margins. `settings` decide which pairs share a batch."""
    config = load_config(load_recipe(recipes()["dpo"]).Config, None, [*SETTINGS, "output_dir=unused", *settings])
    sharing = config.data.shared_prompt is not False
    batches, _ = preference_batches(config.data, load_tokenizer("tiny"), config.batch_size, config.seed, sharing)
    policy, frozen = (
        AutoModelForCausalLM.from_pretrained(resolve_model_path("tiny"), dtype=torch.float32) for _ in range(2)
    )
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4, weight_decay=0.0)

    def log_prob(model: Any, ids: list[int], labels: list[int]) -> torch.Tensor:
        log_probs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        return sum(log_probs[t, label] for t, label in enumerate(labels) if label >= 0)

    losses, margins = [], []
    for _ in range(num_steps):
        batch = batches.take(1)[0].built
        assert isinstance(batch, PairBatch)
        gains = []
        for answer in (text for _, *pair in texts_of(batch) for text in pair):
            with torch.no_grad():
                expected = log_prob(frozen, *answer)
            gains.append(log_prob(policy, *answer) - expected)
        h = 0.1 * (torch.stack(gains[::2]) - torch.stack(gains[1::2]))
        loss = -F.logsigmoid(h).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        margins.append(h.mean().item())
    return losses, margins


EACH_ITS_PROMPT = ("data.shared_prompt=false",)
PACKED = ("data.packing=bfd", "batch_size=1")
# Settings that decide which pairs share a batch, and settings that change no number. All but two share prompts.
MEMORY = [
    ((), ("memory.activation_checkpointing=full", "memory.loss_chunk_tokens=16", "memory.tile_mlp=2")),
    ((), ("batch_size=1", "gradient_accumulation_steps=4")),
    (("data.packing=padding_free",), ("reference.kind=model", "optimizer.in_backward=true")),
    (PACKED, ("memory.activation_checkpointing=selective", "memory.tied_gradient=separate")),
    (EACH_ITS_PROMPT, ("memory.activation_checkpointing=every_n",)),
    ((*EACH_ITS_PROMPT, *PACKED), ("memory.activation_checkpointing=full", "optimizer.in_backward=true")),
]


@pytest.mark.parametrize(("rows", "settings"), MEMORY, ids=str)
def test_eight_steps_equal_a_loop_by_hand(train: Train, rows: tuple[str, ...], settings: tuple[str, ...]) -> None:
    lines = train("max_steps=8", *rows, *settings)
    losses, margins = by_hand(rows)
    assert max(margins) > 0.02
    # AdamW's first steps have full length for any gradient, even if rounding decides its sign.
    assert [line["loss"] for line in lines] == pytest.approx(losses, abs=5e-5)
    assert [line["rewards/margins"] for line in lines] == pytest.approx(margins, rel=1e-3, abs=1e-4)


def test_packed_rows_train_like_padded_rows(train: Train, tmp_path: Any) -> None:
    """All pairs in each step, since packing puts others together."""
    rows = resolve_data_path("tiny/pairs_validation.jsonl").read_text().splitlines()
    (tmp_path / "few.jsonl").write_text("\n".join(rows[:12]))
    settings = (f"data.source={tmp_path / 'few.jsonl'}", "batch_size=12", "max_steps=3", "epochs=3")
    padded, packed = train(*settings), train(*settings, "data.packing=bfd", output="packed")
    for line, expected in zip(packed, padded, strict=True):
        assert line["target_tokens"] == expected["target_tokens"]
        for name in ("loss", "rewards/margins", "logps/chosen", "nll", "entropy", "grad_norm"):
            assert line[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("packing", ["none", "padding_free"])
def test_sharing_prompts_computes_fewer_tokens_and_changes_no_number(train: Train, packing: str) -> None:
    settings = (f"data.packing={packing}", "data.validation_fraction=0.1", "loss.ld_alpha=0.5", "loss.wpo=true")
    shared, separate = (
        train(*settings, f"data.shared_prompt={value}", output=value, name="dpo") for value in ("true", "false")
    )
    for line, expected in zip(shared, separate, strict=True):
        for name in expected.keys() - UNLIKE:
            assert line[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
    tokens, expected_tokens = (sum(line.get("tokens", 0) for line in lines) for lines in (shared, separate))
    assert tokens < 0.85 * expected_tokens  # the prompts of these pairs are short


@pytest.mark.parametrize(
    "settings",
    [
        ("loss.name=simpo", "loss.sft_weight=0.5"),
        ("loss.name=ipo", "loss.ld_alpha=0.5", "loss.wpo=true", "loss.sft_weight=0.5"),
    ],
    ids=str,
)
def test_micro_batches_add_up_to_the_whole_batch(train: Train, settings: tuple[str, ...]) -> None:
    whole = train(*settings, "batch_size=6")
    parts = train(*settings, "batch_size=2", "gradient_accumulation_steps=3", output="parts")
    for line, expected in zip(parts, whole, strict=True):
        for name in ("loss", "grad_norm", "rewards/margins", "nll", "entropy"):
            assert line[name] == pytest.approx(expected[name], rel=2e-4, abs=1e-6), name


def test_a_reference_cache_is_reused_only_where_it_fits(train: Train, capsys: pytest.CaptureFixture) -> None:
    def computed(*settings: str) -> int:
        train("reference.kind=cached", *settings, output=f"run{len(outputs)}")
        outputs.append(capsys.readouterr().out)
        return int(outputs[-1].partition("log-probabilities of ")[2].split()[0].replace(",", ""))

    outputs: list[str] = []
    assert computed() == 24  # 6 steps of 4 pairs: only those that the run uses
    assert computed() == 0
    assert computed("max_steps=7") == 4
    assert computed("loss.name=ipo", "batch_size=2") == 0  # the loss is not part of the key
    assert computed("loss.ld_alpha=0.5") == 24
    assert computed("data.max_prompt_length=6") == 24
    assert computed("model.dtype=bfloat16") == 24


def test_the_cache_key_hashes_weights_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lean_ft.frozen.reference.SAMPLED_VALUES", 8)
    model = load_model("tiny", dtype=torch.bfloat16)
    whole = _weights_digest(model, ALONE)
    monkeypatch.setattr("lean_ft.frozen.reference.SLICE_VALUES", 2**12)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        assert _weights_digest(model, ALONE) == whole
    largest = max(event.nbytes() for event in watched.profiler.kineto_results.events() if event.name() == "[memory]")  # type: ignore[union-attr]
    assert 8 * 2**12 <= largest < model.output_weight.nbytes


def test_filling_the_cache_draws_no_random_number(train: Train) -> None:
    filled = train("lora.dropout=0.5", "reference.kind=cached")
    found = train("lora.dropout=0.5", "reference.kind=cached", output="again")
    other = train("lora.dropout=0.5", "reference.kind=adapter_off", output="other")
    assert numbers(filled) == numbers(found) == numbers(other)


@pytest.mark.long
def test_held_out_rows_are_evaluated_and_improve(train: Train, capsys: pytest.CaptureFixture) -> None:
    settings = ("data.source=tiny/pairs_train.jsonl", "data.validation_source=tiny/pairs_validation.jsonl")
    lines = train(*settings, "batch_size=16", "optimizer.lr=1e-3", "max_steps=20")
    (evaluation,) = [line for line in lines if "eval_loss" in line]
    assert evaluation["step"] == 20
    assert evaluation["eval_rewards/accuracies"] > 0.6  # 0.5 before
    assert evaluation["eval_loss"] < math.log(2)
    said = capsys.readouterr().out
    assert "reference   cached, each answer's" in said
    assert "% of pairs right" in said
    assert "right " in said.partition("step        20/20")[2].partition("\n")[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("reference.kind=adapter_off",), "lora is null"),
        (("reference.kind=streamed",), "the model is on cpu.*Set reference.kind=model"),
        (("loss.name=orpo", "reference.kind=model"), "with loss.name=orpo nothing reads a reference"),
        (("loss.name=dpo",), "Did you mean 'sigmoid'"),
        (("loss.gamma=1",), "gamma=1 is not read by the loss sigmoid, but by simpo"),
        (("loss.name=exo", "loss.label_smoothing=0"), "takes its logarithm"),
        (("loss.label_smoothing=0.5",), "number >= 0 and < 0.5"),
        (("data.source=tiny/validation.jsonl",), "this recipe learns from pairs"),
        (("data.packing=wrapped",), "the answers of a pair are compared whole"),
        (("data.shared_prompt=true", "model.path=LONG"), r"frequencies \(longrope\) change with the length of a text"),
    ],
    ids=str,
)
def test_invalid_settings_are_refused(train: Train, settings: tuple[str, ...], message: str, tmp_path: Any) -> None:
    if "model.path=LONG" in settings:
        settings = (settings[0], f"model.path={with_longrope(tmp_path)}")
    with pytest.raises(ValueError, match=message):
        train(*settings)


def with_longrope(folder: Any) -> Any:
    """The embedded model with rotary scaling that changes beyond 64 tokens."""
    shutil.copytree(resolve_model_path("tiny"), folder / "model")
    config = json.loads((folder / "model" / "config.json").read_text())
    num = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"]) // 2
    factors = {"short_factor": [1.0] * num, "long_factor": [2.0] * num}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64, **factors}
    config["rope_parameters"] = rope | {"factor": 4.0}
    (folder / "model" / "config.json").write_text(json.dumps(config))
    return folder / "model"


def test_prompts_are_not_shared_if_rotary_scaling_depends_on_the_length(
    train: Train, tmp_path: Any, capsys: pytest.CaptureFixture
) -> None:
    train(f"model.path={with_longrope(tmp_path)}", "max_steps=1")
    assert (
        "prompts     computed for each completion: the model's rotary frequencies (longrope)" in capsys.readouterr().out
    )
    train(
        f"model.path={tmp_path / 'model'}",
        "max_steps=1",
        "data.max_length=64",
        "data.shared_prompt=true",
        output="short",
    )


def test_the_alias_trains_an_adapter(train: Train, tmp_path: Any, capsys: pytest.CaptureFixture) -> None:
    train("max_steps=1", name="lora_dpo_single_device")
    assert (tmp_path / "run" / "step_00000001" / "adapter_model.safetensors").is_file()
    assert "adapter_off" in capsys.readouterr().out


def test_the_planner_counts_a_second_model_but_not_a_streamed_reference() -> None:
    def peaks(*settings: str) -> dict[str, int]:
        recipe = load_recipe(recipes()["dpo"])
        cfg = load_config(recipe.Config, None, [*SETTINGS, "output_dir=unused", *settings])
        return rehearse(recipe, cfg, choose_device("A100 80GB", "cuda")).peak.bytes_by_label

    cached, model = peaks("reference.kind=cached"), peaks("reference.kind=model")
    assert model["weights"] == 2 * cached["weights"]
    on_device = (peaks("reference.kind=streamed")["weights"] - cached["weights"]) / cached["weights"]
    assert 0.1 < on_device < 0.6  # the embedding, and at most 2 of the 4 layers
    assert peaks("reference.kind=adapter_off", "lora.rank=4")["weights"] < 1.2 * cached["weights"]


def test_a_batch_separates_its_completions() -> None:
    recipe = load_recipe(recipes()["dpo"])
    seen = {}
    for packing in ("none", "bfd", "padding_free", "none, shared"):
        cfg = load_config(
            recipe.Config, None, [*SETTINGS, "output_dir=unused", f"data.packing={packing.split(',')[0]}"]
        )
        batches, _ = preference_batches(cfg.data, load_tokenizer("tiny"), 4, 0, share_prompts="shared" in packing)
        found: dict[int, tuple[list[int], ...]] = {}
        for batch in batches.take(batches.batches_per_epoch):
            batch = batch.built
            assert isinstance(batch, PairBatch)
            if "shared" not in packing:
                assert torch.equal(batch.labels.flatten()[batch.index], batch.label)
            assert len(batch.label) == batch.num_targets == batch.answer_tokens.sum()
            answers = batch.label.split(batch.answer_tokens.flatten().tolist())
            for i, pair in enumerate(batch.pairs.tolist()):
                found[pair] = tuple(answer.tolist() for answer in answers[2 * i : 2 * i + 2])
        seen[packing] = found
    assert len(seen["none"]) == 206
    assert seen["none"] == seen["bfd"] == seen["padding_free"] == seen["none, shared"]
    tokenizer = load_tokenizer("tiny")
    first = json.loads(resolve_data_path("tiny/pairs_validation.jsonl").read_text().partition("\n")[0])
    for side, ids in zip(("chosen", "rejected"), seen["none"][0], strict=True):
        assert tokenizer.decode(ids) == first[side][0]["content"] + "<|end|>"


def test_a_user_defined_loss_equals_the_built_in_one(train: Train, tmp_path: Any) -> None:
    (tmp_path / "own.py").write_text(
        "from torch.nn.functional import logsigmoid\ndef mine(pairs, beta): return -logsigmoid(beta * pairs.margin)\n"
    )
    own = train(f"loss.name={tmp_path / 'own.py'}:mine", "max_steps=2", output="own")
    assert numbers(own) == numbers(train("max_steps=2"))
    config = (tmp_path / "own" / "config.yaml").read_text()
    assert f"own.py: {file_digest(f'{tmp_path}/own.py:mine')}\n" in config and "own.py:mine\n" in config
