"""The embedded model and tokenizer equal transformers', and the embedded rows are right and do not leak into
training."""

import json
import re
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lean_ft.data import prepare_batches
from lean_ft.hub.paths import resolve_data_path, resolve_model_path
from lean_ft.models import load_model
from lean_ft.settings import SFTDataConfig
from lean_ft.tokenizers import Tokenizer, load_tokenizer
from lean_ft.training.answers import answer_held_out

ROOT = Path(__file__).parents[2]
ASSETS = ROOT / "lean_ft" / "assets" / "tiny"
FOLDER = ASSETS / "model"


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (ASSETS / "data" / f"{name}.jsonl").read_text().splitlines()]


def questions_and_answers(name: str) -> Iterator[tuple[str, str]]:
    for row in rows(name):
        question, answer = row["messages"]
        assert (question["role"], answer["role"]) == ("user", "assistant")
        yield question["content"], answer["content"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer("tiny")


@pytest.fixture(scope="module")
def world() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "scripts"))
    import tiny_world

    yield tiny_world
    sys.path.remove(str(ROOT / "scripts"))


def test_names_of_the_embedded_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_model_path("tiny") == FOLDER
    assert resolve_data_path("tiny/train.jsonl") == ASSETS / "data" / "train.jsonl"
    assert resolve_data_path("tiny/absent.jsonl") == Path("tiny/absent.jsonl")
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "train.jsonl").write_text("{}")
    assert resolve_data_path("tiny/train.jsonl") == Path("tiny/train.jsonl"), "a file on disk wins"


def test_logits_equal_transformers() -> None:
    theirs = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    ids = torch.randint(theirs.config.vocab_size, (3, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(load_model("tiny")(ids), theirs(ids).logits, rtol=0, atol=1e-4)


def test_token_ids_equal_transformers(tokenizer: Tokenizer) -> None:
    theirs = AutoTokenizer.from_pretrained(FOLDER)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(tokenizer, name) == getattr(theirs, name)
    for row in [*rows("validation")[::4], {"messages": [{"role": "system", "content": "Überall 日本 🙂\n\tx"}]}]:
        text = row["messages"][-1]["content"]
        assert tokenizer.encode(text, add_special_tokens=True) == theirs(text).input_ids
        assert tokenizer.decode(tokenizer.encode(text)) == text
        rendered = theirs.apply_chat_template(row["messages"], return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = tokenizer.render(row["messages"])
        assert ids == rendered["input_ids"]
        assert mask == [bool(trained) for trained in rendered["assistant_masks"]]


def test_what_is_trained_is_the_answer_and_its_end(tokenizer: Tokenizer) -> None:
    for row in rows("train")[:200]:
        ids, mask = tokenizer.render(row["messages"])
        trained = [token for token, is_trained in zip(ids, mask, strict=True) if is_trained]
        assert tokenizer.decode(trained) == row["messages"][1]["content"] + "<|end|>"
        asked, _ = tokenizer.render(row["messages"][:1], add_generation_prompt=True)
        assert asked + trained == ids


def test_the_chat_template_refuses_other_roles(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="system, user or assistant, not tool"):
        tokenizer.render([{"role": "tool", "content": "x"}])


def test_no_held_out_question_is_trained() -> None:
    train, held_out = dict(questions_and_answers("train")), dict(questions_and_answers("validation"))
    assert len(train) == len(rows("train")) >= 2000, "no question twice"
    assert len(held_out) == len(rows("validation")) >= 200
    assert not train.keys() & held_out.keys()


def test_no_held_out_item_is_trained_in_other_words() -> None:
    """An item is the names and numbers in a question, and its answer."""

    def item(question: str, answer: str) -> tuple:
        names = re.findall(r"\b(?!Mira|Tomas|Ada|Piet|Lena|Oskar|Nila|Hugo)[A-Z][a-z]+\b", question[1:])
        numbers = re.findall(r"\d+", question)
        answer = re.sub(r"^Now .*? has (\d+) .*", r"\1", answer)  # the story around two numbers
        answer = re.sub(r"^.* = ", "", answer).rstrip(".")
        return sorted(names), sorted(numbers), answer

    train = {repr(item(*row)) for row in questions_and_answers("train") if re.search(r"\d|[A-Z]", row[0][1:])}
    for question, answer in questions_and_answers("validation"):
        assert repr(item(question, answer)) not in train, question


def test_answers_are_right() -> None:
    """Sums, extremes, orderings and so on are computed again from the question."""
    checked = set()
    for question, answer in [*questions_and_answers("train"), *questions_and_answers("validation")]:
        numbers = [int(number) for number in re.findall(r"\d+", question)]
        words = re.findall(r"[a-z]+(?=,)", question) + re.findall(r", ([a-z]+)(?:[.?]| as )", question)
        if answer.startswith("The largest"):
            right, kind = f"The largest is {max(numbers)}.", "largest"
        elif answer.startswith("The smallest"):
            right, kind = f"The smallest is {min(numbers)}.", "smallest"
        elif answer.startswith("In order"):
            right, kind = f"In order: {', '.join(sorted(words))}.", "sorting"
        elif answer.startswith("Backwards"):
            right, kind = f"Backwards: {', '.join(words[::-1])}.", "reversing"
        elif answer.startswith("There are"):
            right, kind = f"There are {len(words)} words.", "counting"
        elif "=" in answer:
            a, operator, b = re.fullmatch(r"(\d+) ([+-]) (\d+) = \d+\.", answer).groups()
            assert sorted([int(a), int(b)]) == sorted(numbers)
            right, kind = f"{a} {operator} {b} = {int(a) + int(b) * (1 if operator == '+' else -1)}.", "sum"
        elif answer.startswith("Now"):
            more = re.search(r"finds|buys|on top", question)
            total = sum(numbers) if more else max(numbers) - min(numbers)
            right, kind = re.sub(r"\d+", str(total), answer), "story"
        else:
            continue
        assert answer == right, question
        checked.add(kind)
    assert len(checked) == 7


@pytest.mark.long
def test_the_pretraining_text_states_facts_and_holds_no_held_out_exercise(world: ModuleType) -> None:
    text = " ".join(islice(world.documents(1), 30_000))
    for question, answer in questions_and_answers("validation"):
        if re.match(r"\d+ [+-] \d+", answer):
            assert f" {answer}" not in text, question
        elif re.match(r"The capital|The longest|The flag|\w+ lies|\w+ is known|\w+ is the capital", answer):
            assert answer in text, question


@pytest.mark.long
def test_the_base_model_cannot_answer_yet(tokenizer: Tokenizer) -> None:
    """It knows the facts but not the format, so that finetuning has a visible effect."""
    config = SFTDataConfig(source="tiny/train.jsonl", validation_source="tiny/validation.jsonl")
    _, held_out = prepare_batches(config, tokenizer, batch_size=32, seed=0)
    report = answer_held_out(load_model("tiny"), tokenizer, held_out, max_questions=64)
    assert len(report.answers) == 64
    assert report.exact_match < 0.05
