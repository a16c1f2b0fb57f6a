"""The recipe on the embedded model equals an independent loop with any settings of memory and layout; its reference and
its loss."""

import json
import math
import shutil
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from lean_ft.data import PairBatch, prepare_batches
from lean_ft.hub.paths import resolve_model_path
from lean_ft.models import load_model
from lean_ft.system.user_functions import file_digest
from lean_ft.tokenizers import load_tokenizer
from tests.data.pair_texts import texts_of
from tests.recipes import cases
from tests.recipes.conftest import Train, config_of, planned, update

RECIPE = "dpo"
SETTINGS = cases.SETTINGS[RECIPE]


def numbers(lines: list[dict[str, Any]]) -> list[tuple]:
    return [(line["loss"], line["grad_norm"], line["rewards/margins"], line["tokens"]) for line in lines]


@pytest.mark.long
def test_a_4_bit_reference_is_close(train: Train) -> None:
    (first,) = train("reference.kind=nf4", "max_steps=1")
    assert 0 < abs(first["rewards/chosen"]) < 0.5
    assert first["loss"] == pytest.approx(math.log(2), rel=0.1)


@cache
def by_hand(settings: tuple[str, ...], num_steps: int = 4) -> tuple[list[float], list[float]]:
    """DPO written by hand: one completion at a time, whole logits, two transformers models, torch's AdamW.
    Return losses and mean margins. `settings` decide which pairs share a batch."""
    config = config_of("dpo", *SETTINGS, *settings)
    sharing = config.data.shared_prompt is not False
    batches, _ = prepare_batches(config.data, load_tokenizer("tiny"), config.batch_size, config.seed, sharing)
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
        losses.append(update(optimizer, loss))
        margins.append(h.mean().item())
    return losses, margins


EACH_ITS_PROMPT = ("data.shared_prompt=false",)
PACKED = ("data.packing=bfd", "batch_size=1")
# Settings that decide which pairs share a batch, and settings that change no number. All but two share prompts.
MEMORY = [
    (("batch_size=2",), ("batch_size=1", "gradient_accumulation_steps=2")),
    ((), ("memory.activation_checkpointing=full", "memory.loss_chunk_tokens=16", "memory.tile_mlp=2")),
    (("data.packing=padding_free",), ("reference.kind=model", "optimizer.in_backward=true")),
    (PACKED, ("memory.activation_checkpointing=selective", "memory.tied_gradient=separate")),
    (EACH_ITS_PROMPT, ("memory.activation_checkpointing=every_n",)),
    ((*EACH_ITS_PROMPT, *PACKED), ("memory.activation_checkpointing=full", "optimizer.in_backward=true")),
]


@pytest.mark.first(1)
@pytest.mark.parametrize(("rows", "settings"), MEMORY, ids=str)
def test_four_steps_equal_a_loop_by_hand(train: Train, rows: tuple[str, ...], settings: tuple[str, ...]) -> None:
    lines = train("max_steps=4", *rows, *settings)
    losses, margins = by_hand(rows)
    assert max(margins) > 1e-3
    # AdamW's first steps have full length for any gradient, even if rounding decides its sign.
    assert [line["loss"] for line in lines] == pytest.approx(losses, abs=5e-5)
    assert [line["rewards/margins"] for line in lines] == pytest.approx(margins, rel=1e-3, abs=1e-4)


@pytest.mark.long
def test_filling_the_cache_draws_no_random_number(train: Train) -> None:
    given = ("lora.dropout=0.5", "max_steps=2")
    filled = train(*given, "reference.kind=cached")
    found = train(*given, "reference.kind=cached", output="again")
    other = train(*given, "reference.kind=adapter_off", output="other")
    assert numbers(filled) == numbers(found) == numbers(other)


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


@pytest.mark.long
def test_prompts_are_not_shared_if_rotary_scaling_depends_on_the_length(
    train: Train, tmp_path: Any, capsys: pytest.CaptureFixture
) -> None:
    long = (f"model.path={with_longrope(tmp_path)}", "max_steps=1")
    train(*long)
    said = capsys.readouterr().out
    assert "prompts     computed for each completion: the model's rotary frequencies (longrope)" in said
    with pytest.raises(ValueError, match=r"frequencies \(longrope\) change with the length of a text"):
        train(*long, "data.shared_prompt=true", output="refused")
    train(*long, "data.max_length=64", "data.shared_prompt=true", output="short")


@pytest.mark.long
def test_the_alias_trains_an_adapter(train: Train, tmp_path: Any, capsys: pytest.CaptureFixture) -> None:
    train("max_steps=1", name="lora_dpo_single_device")
    assert (tmp_path / "run" / "step_00000001" / "adapter_model.safetensors").is_file()
    assert "adapter_off" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize(
    ("settings", "least", "most"),
    [
        (("reference.kind=model",), 2, 2),
        (("reference.kind=cached",), 1, 1),
        (("reference.kind=streamed",), 1.1, 1.6),  # the embedding, and at most 2 of the 4 layers
        (("reference.kind=adapter_off", "lora.rank=4"), 1, 1.2),
    ],
    ids=str,
)
def test_the_planner_counts_the_reference(settings: tuple[str, ...], least: float, most: float) -> None:
    weights = planned("dpo", *SETTINGS, *settings).peak.bytes_by_label["weights"]
    parameters = sum(parameter.nbytes for parameter in load_model("tiny").parameters())
    assert 0.99 * least <= weights / parameters <= 1.01 * most


@pytest.mark.long
def test_a_user_defined_loss_equals_the_built_in_one(train: Train, tmp_path: Any) -> None:
    (tmp_path / "own.py").write_text(
        "from torch.nn.functional import logsigmoid\ndef mine(pairs, beta): return -logsigmoid(beta * pairs.margin)\n"
    )
    own = train(f"loss.name={tmp_path / 'own.py'}:mine", "max_steps=1", output="own")
    assert numbers(own) == numbers(train("max_steps=1"))
    config = (tmp_path / "own" / "config.yaml").read_text()
    assert f"own.py: {file_digest(f'{tmp_path}/own.py:mine')}\n" in config and "own.py:mine\n" in config
