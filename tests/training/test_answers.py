"""Completions of held-out prompts, compared with transformers' greedy generation for each prompt alone."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from lean_ft.data import EvalBatches, prepare_batches
from lean_ft.hub.paths import resolve_model_path
from lean_ft.models import Decoder, load_model
from lean_ft.models.source import Source
from lean_ft.settings import PreferenceDataConfig, RecipeConfig, SFTDataConfig
from lean_ft.tokenizers import Tokenizer, load_tokenizer
from lean_ft.training.answers import answer_held_out, say_answers

QUESTIONS = ["What is 7 plus 5?", "Count the words: fig, saw.", "Hello", "Reverse this list: red, fox, axe, nail."]
MAX_NEW_TOKENS = 12


@pytest.fixture(scope="module")
def model() -> Decoder:
    return load_model("tiny")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer("tiny")


@pytest.fixture(scope="module")
def greedy(tokenizer: Tokenizer) -> dict[str, str]:
    """transformers' completion of each prompt alone, with a limited length."""
    theirs = AutoModelForCausalLM.from_pretrained(resolve_model_path("tiny"), dtype=torch.float32)
    answers = {}
    for question in QUESTIONS:
        ids, _ = tokenizer.render([{"role": "user", "content": question}], add_generation_prompt=True)
        out = theirs.generate(torch.tensor([ids]), max_new_tokens=MAX_NEW_TOKENS, do_sample=False, eos_token_id=None)
        said = out[0, len(ids) :].tolist()
        if tokenizer.eos_id in said:
            said = said[: said.index(tokenizer.eos_id)]
        answers[question] = tokenizer.decode(said, skip_special_tokens=True).strip()
    return answers


def held_out(tmp_path: Path, tokenizer: Tokenizer, rows: list[dict], packing: str = "none", **settings) -> EvalBatches:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = SFTDataConfig(source=str(file), validation_source=str(file), max_length=96, packing=packing, **settings)
    batches = prepare_batches(config, tokenizer, batch_size=2, seed=0)[1]
    assert batches is not None
    return batches


def chat(question: str, answer: str) -> dict:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


@pytest.mark.parametrize("packing", ["none", "bfd"])
def test_answers_are_those_given_alone(
    tmp_path: Path, model: Decoder, tokenizer: Tokenizer, greedy: dict[str, str], packing: str
) -> None:
    # A correct completion of MAX_NEW_TOKENS - 1 tokens and the end token: the maximum length.
    filler = tokenizer.decode(tokenizer.encode(" fig" * (MAX_NEW_TOKENS - 1)))
    assert len(tokenizer.encode(filler)) == MAX_NEW_TOKENS - 1
    batches = held_out(tmp_path, tokenizer, [chat(question, filler) for question in QUESTIONS], packing)
    report = answer_held_out(model, tokenizer, batches, max_questions=99)
    assert {answer.question for answer in report.answers} == set(QUESTIONS)
    for answer in report.answers:
        assert answer.given == greedy[answer.question]
        assert answer.expected == filler.strip()
        assert not answer.right


class Parrot(torch.nn.Module):
    """A model that completes every prompt with `script`: its one-hot hidden state selects script[n] as n-th new
    token."""

    def __init__(self, script: list[int], vocab_size: int):
        super().__init__()
        self.output_weight = torch.nn.Parameter(torch.eye(vocab_size))
        self.script, self.device = script, torch.device("cpu")
        self.rotary, self.source, self.experts = {}, Source(), None

    def new_cache(self, batch_size: int, capacity: int, records_experts: bool) -> "Parrot":
        self.said = 0
        return self

    def cache_bytes(self, batch_size: int, capacity: int) -> int:
        return 1

    def part(self, start: int, end: int) -> "Parrot":
        return self

    def spread(self, parts: list, counts: list[int]) -> torch.Tensor:
        return torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))

    def keep(self, rows: list[int]) -> tuple[list[int], torch.Tensor]:
        return rows, torch.tensor(rows, dtype=torch.int64)

    def forward(self, ids: torch.Tensor, cache: "Parrot", return_hidden: bool, lengths: object = None) -> torch.Tensor:
        token = self.script[min(cache.said, len(self.script) - 1)]
        cache.said += 1
        return self.output_weight[token].expand(*ids.shape, -1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.output_weight.T


@pytest.mark.parametrize(
    ("said", "right"),
    [
        ("Twelve.<|end|>", 1),
        ("Twelve.<|end|> and more", 1),  # text after the end token is ignored
        ("Twelve<|end|>", 0),
        ("twelve.<|end|>", 0),
        ("Twelve. It is so.<|end|>", 0),
        ("Twelve." + " fig" * 20, 0),  # does not end
        ("Twelve.<|pad|><|pad|><|pad|>", 0),  # the text is correct, but it does not end
    ],
)
def test_only_the_very_answer_is_right(tmp_path: Path, tokenizer: Tokenizer, said: str, right: int) -> None:
    rows = [chat("What is 7 plus 5?", "Twelve."), chat("Hello", "A longer answer, " * 2)]
    parrot = Parrot(tokenizer.encode(said), tokenizer.vocab_size)
    report = answer_held_out(parrot, tokenizer, held_out(tmp_path, tokenizer, rows), 10)
    assert (report.num_right, report.exact_match) == (right, right / 2)


def test_asks_about_the_last_turn_of_chats_from_all_over(tmp_path: Path, tokenizer: Tokenizer) -> None:
    turns = [chat("One?", "Yes."), chat("Two?", "No.")]
    rows = [{"messages": [message for turn in turns for message in turn["messages"]]}]
    rows += [chat(f"Question {i}?", "No.") for i in range(1, 10)]
    parrot = Parrot(tokenizer.encode("No.<|end|>"), tokenizer.vocab_size)
    answers = answer_held_out(parrot, tokenizer, held_out(tmp_path, tokenizer, rows), max_questions=4).answers
    assert [answer.question for answer in answers] == ["One?Yes.Two?", *(f"Question {i}?" for i in (2, 5, 7))]
    assert all((answer.expected, answer.right) == ("No.", True) for answer in answers)


@pytest.mark.parametrize(
    ("said", "answers", "right"),
    [
        ("6 + 6 = 12\n#### 12", "5 + 7 = 12 #### 12", 1),  # another derivation, the same result
        ("#### 12\nNo:\n#### 13", "#### 12", 0),  # the last match counts
        ("Twelve.", "#### 12", 0),  # without a match
        ("#### 12" + " fig" * 20, "#### 12", 0),  # the group matches the following text, and it does not end
        ("a way that takes longer than the right answer does #### 12", "A short way to get there #### 12", 1),
    ],
)
def test_a_pattern_compares_what_it_finds_last(
    tmp_path: Path, tokenizer: Tokenizer, said: str, answers: str, right: int
) -> None:
    batches = held_out(tmp_path, tokenizer, [chat("What is 7 plus 5?", answers)])
    parrot = Parrot(tokenizer.encode(f"{said}<|end|>"), tokenizer.vocab_size)
    report = answer_held_out(parrot, tokenizer, batches, 10, pattern="#### (.*)")
    assert (report.num_right, report.answers[0].expected) == (right, "12")


def test_what_cannot_be_asked_is_refused(tmp_path: Path, tokenizer: Tokenizer, model: Decoder) -> None:
    with pytest.raises(ValueError, match=r"finds nothing in the expected answer that ends in 'Twelve\.'"):
        answer_held_out(model, tokenizer, held_out(tmp_path, tokenizer, [chat("7 + 5?", "Twelve.")]), 10, "#### (.*)")
    with pytest.raises(ValueError, match=r"'#### \(' is not a regular expression: missing \)"):
        RecipeConfig(output_dir=tmp_path, eval_pattern="#### (")
    with pytest.raises(ValueError, match=r"data\.validation_source"):
        say_answers("before", model, tokenizer, None, 5)
    with pytest.raises(ValueError, match="no question"):
        answer_held_out(model, tokenizer, held_out(tmp_path, tokenizer, [{"text": "Just text."}]), 5)


def test_says_the_share_and_what_is_right_with_short_samples(
    tmp_path: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [chat(f"Question {i}?" + " and so on" * 30, "Yes." if i else "No.") for i in range(4)]
    batches = held_out(tmp_path, tokenizer, rows, truncation_side="left")
    parrot = Parrot(tokenizer.encode("Yes.<|end|>"), tokenizer.vocab_size)
    say_answers("before training", parrot, tokenizer, batches, 4)
    said, *samples = capsys.readouterr().out.splitlines()
    assert "before training: 3 of 4 held-out questions right (75.0%); exact match of the whole answer" in said
    assert len(samples) == 3 and all(len(sample) < 120 for sample in samples)
    assert "->  Yes.  (expected: No.)" in samples[0] and "->  Yes.  (right)" in samples[1]
    say_answers("before training", parrot, tokenizer, batches, 4, pattern="(.)")
    assert "exact match of the text that (.) finds last" in capsys.readouterr().out


@pytest.mark.parametrize("share_prompts", [False, True])
@pytest.mark.parametrize("packing", ["none", "bfd"])
def test_of_a_pair_the_chosen_answer_is_the_right_one(packing, share_prompts, tokenizer, tmp_path):
    pairs = [{"prompt": question, "chosen": "good", "rejected": "b"} for question in QUESTIONS]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    config = PreferenceDataConfig(source=str(tmp_path / "pairs.jsonl"), max_length=64, packing=packing)
    batches, _ = prepare_batches(config, tokenizer, 3, 0, share_prompts)
    taken, decode = batches.take(batches.batches_per_epoch), tokenizer.decode
    asked = [(decode(prompt.ids.tolist()), decode(answer)) for batch in taken for prompt, answer in batch.questions()]
    assert {answer for _, answer in asked} == {"good<|end|>"}
    assert sorted(question for prompt, _ in asked for question in QUESTIONS if question in prompt) == sorted(QUESTIONS)


def test_sample_lines_show_the_last_user_message(
    tmp_path: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    system, earlier = {"role": "system", "content": "Answer in one word."}, chat("And before?", "No.")["messages"]
    rows = [{"messages": [system, *earlier, *chat("What is 7 plus 5?", "Yes.")["messages"]]}]
    parrot = Parrot(tokenizer.encode("Yes.<|end|>"), tokenizer.vocab_size)
    report = say_answers("at step 0", parrot, tokenizer, held_out(tmp_path, tokenizer, rows), 4)
    assert report is not None and "Answer in one word." in report.answers[0].question
    assert capsys.readouterr().out.splitlines()[1].split("  ->  ")[0].strip() == "What is 7 plus 5?"
