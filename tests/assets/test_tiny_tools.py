"""The embedded model with a calculator equals transformers' and its script's, and learns to call it."""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import get_json_schema

from lean_ft.models import load_model
from lean_ft.settings.text import load_config
from lean_ft.system.catalog import find_preset
from lean_ft.tokenizers import load_tokenizer
from lean_ft.tools import Call, ToolTurns, Turn
from lean_ft.tools.calculator import calculator
from tests.recipes.conftest import recipe_module

ROOT = Path(__file__).parents[2]
ASSETS = ROOT / "lean_ft" / "assets" / "tiny-tools"
CALLED = {"name": "calculator", "arguments": {"expression": "382 * 517"}}
CHAT = [
    {"role": "user", "content": "What is 382 times 517?"},
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALLED}]},
    {"role": "tool", "name": "calculator", "content": "197494"},
    {"role": "assistant", "content": "197494"},
]


def rows(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (ASSETS / "data" / f"{name}.jsonl").read_text().splitlines()]


def test_ids_and_logits_equal_transformers() -> None:
    tokenizer, tools = load_tokenizer("tiny-tools"), [get_json_schema(calculator)]
    theirs = AutoTokenizer.from_pretrained(ASSETS / "model")
    expected = theirs.apply_chat_template(CHAT, tools, return_dict=True, return_assistant_tokens_mask=True)
    ids, mask = tokenizer.render(CHAT, tools)
    assert ids == expected["input_ids"]
    assert mask == [bool(trained) for trained in expected["assistant_masks"]]
    assert len(ids) - len(tokenizer.render(CHAT)[0]) <= 100, "the tokens of the tools"

    model = AutoModelForCausalLM.from_pretrained(ASSETS / "model", dtype=torch.float32)
    with torch.no_grad():
        ours, others = load_model("tiny-tools")(torch.tensor([ids])), model(torch.tensor([ids])).logits
    torch.testing.assert_close(ours, others, rtol=0, atol=1e-4)


def test_turns_follow_each_other_as_the_template_writes_them() -> None:
    tokenizer, tools = load_tokenizer("tiny-tools"), [get_json_schema(calculator)]
    turns, ids = ToolTurns(tokenizer, tools, {}), tokenizer.render(CHAT, tools)[0]
    asked, called = (tokenizer.render(CHAT[:n], tools, add_generation_prompt=n != 2)[0] for n in (1, 2))
    sampled = called[len(asked) :]
    sampled = sampled[: sampled.index(tokenizer.eos_id) + 1]
    turn = turns.read(sampled)
    assert turn == Turn("", [Call("calculator", CALLED["arguments"])])
    known = [*asked, *sampled, *turns.reply(sampled, turn.calls, ["197494"])]
    assert ids[: len(known)] == known


def test_answers_are_right_and_no_held_out_numbers_are_trained() -> None:
    words = {"plus": "+", "minus": "-", "times": "*", "+": "+", "-": "-", "*": "*"}
    asked: dict[str, set[tuple[str, str, str]]] = {}
    for part in ("train", "validation"):
        for row in rows(part):
            a, word, b = re.findall(r"\d+|plus|minus|times|[-+*]", row["prompt"])
            operator = words[word]
            right = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[operator]
            assert row["answer"] == str(right), row
            asked.setdefault(part, set()).add((a, operator, b))
    assert (len(rows("train")), len(rows("validation"))) == (512, 200)
    assert not asked["train"] & asked["validation"]


@pytest.mark.long
def test_the_preset_learns_to_call(tmp_path: Path) -> None:
    """On 200 held-out questions."""
    module = recipe_module("grpo")
    settings = (f"output_dir={tmp_path / 'run'}", "plan=false", "device=cpu", "save_every=0")
    module.main(load_config(module.Config, find_preset("tiny/tools"), settings))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    before, *_, after = [line["eval_reward"] for line in lines if "eval_reward" in line]
    assert before < 0.3 and after > 0.88  # with a standard error of 0.02
    first, *_, last = [line["tool_calls"] for line in lines if "tool_calls" in line]
    assert first < 0.4 and last > 0.9
