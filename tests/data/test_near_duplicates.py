"""Near-duplicates equal those of a comparison of all pairs, and runs that drop them can be repeated."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from lean_ft.data import prepare_batches
from lean_ft.data.documents import renderer_of
from lean_ft.data.keys import settings_of_batches, settings_of_documents
from lean_ft.data.near_duplicates import BANDS, PER_BAND, SIMILAR, StoredWords, bands, find, near_duplicates
from lean_ft.data.prompts import prompt_rows
from lean_ft.data.row_words import RowContents
from lean_ft.settings import DataConfig, PreferenceDataConfig, PromptDataConfig, SFTDataConfig

pytestmark = pytest.mark.long  # one case of each runs in continuous integration

VOCABULARY = [f"w{i}" for i in range(400)]


def shingles(text: str) -> set[tuple[str, ...]]:
    words = text.split()
    return {tuple(words[i : i + 5]) for i in range(max(1, len(words) - 4))}


def jaccard(ours: str, theirs: str) -> float:
    one, other = shingles(ours), shingles(theirs)
    return len(one & other) / len(one | other)


def compared(texts: Sequence[str]) -> dict[int, tuple[int, float]]:
    """Each row that is similar to an earlier one which stays: the first such, of all pairs."""
    found: dict[int, tuple[int, float]] = {}
    for row, text in enumerate(texts):
        similar = ((i, jaccard(text, texts[i])) for i in range(row) if i not in found)
        if (first := next((one for one in similar if one[1] >= SIMILAR), None)) is not None:
            found[row] = first
    return found


def found_in(texts: Sequence[str], folder: Path) -> dict[int, tuple[int, float]]:
    rows, of, similarity = find(StoredWords([RowContents([text]) for text in texts], folder))
    return {row: (i, s) for row, i, s in zip(rows.tolist(), of.tolist(), similarity.tolist(), strict=True)}


def texts_with_repeats(count: int) -> list[str]:
    """Texts of 3 to 120 words; many repeat others, with up to a third of the words replaced."""
    draw, texts = np.random.default_rng(5), list[list[str]]()
    for _ in range(count):
        words = draw.choice(VOCABULARY, draw.integers(3, 120)).tolist()
        if len(texts) > 9 and draw.random() < 0.6:
            words = list(texts[draw.integers(len(texts))])
            for place in draw.integers(len(words), size=draw.integers(1 + len(words) // 12)).tolist():
                words[place] = str(draw.choice(VOCABULARY))
        texts.append(words)
    return [" ".join(words) for words in texts]


def test_near_duplicates_are_those_of_all_pairs(tmp_path: Path) -> None:
    texts = texts_with_repeats(160)
    expected, found = compared(texts), found_in(texts, tmp_path)
    assert found.keys() == expected.keys()
    assert 30 < len(found) < 130
    assert {1.0} < {similarity for _, similarity in found.values()}
    for row, (other, similarity) in found.items():
        assert other < row
        assert other not in found
        assert similarity == pytest.approx(jaccard(texts[row], texts[other]), abs=1e-6)


@pytest.mark.parametrize("similarity", [0.5, 0.7, 0.8])
def test_a_band_is_shared_with_the_known_probability(similarity: float) -> None:
    """1 - (1 - s^r)^b, for sets of random shingles with this Jaccard index."""
    pairs, size, draw = 600, 90, np.random.default_rng(1)
    shared = round(2 * size * similarity / (1 + similarity))
    exact = shared / (2 * size - shared)
    sets = draw.integers(1 << 63, size=(pairs, 2, size), dtype=np.uint64)
    sets[:, 1, :shared] = sets[:, 0, :shared]
    keys = bands(sets.ravel(), np.arange(0, sets.size + 1, size)).reshape(BANDS, pairs, 2)
    met = (keys[..., 0] == keys[..., 1]).any(axis=0).mean()
    expected = 1 - (1 - exact**PER_BAND) ** BANDS
    assert met == pytest.approx(expected, abs=4 * np.sqrt(expected * (1 - expected) / pairs) + 1e-3)


def test_rows_without_words_are_never_near_duplicates_and_short_ones_only_if_equal(tmp_path: Path) -> None:
    texts = [
        "",
        " ",
        "yes",
        "Yes!",
        "yes sir",
        "sir yes",
        "",
        "!!",
        "!!",
        "7 + 1",
        "7 - 1",
        "a b c d e",
        "a b c d e f",
        "a b c d",
    ]
    assert found_in(texts, tmp_path).keys() == {3, 8}


def test_equal_rows_are_compared_once_each(tmp_path: Path) -> None:
    stored = StoredWords((RowContents(["the same words in each of these rows"]) for _ in range(3000)), tmp_path)
    with mock.patch.object(StoredWords, "first_similar", autospec=True, side_effect=StoredWords.first_similar) as calls:
        rows, of, _ = find(stored)
    assert (rows.tolist(), {*of.tolist()}) == (list(range(1, 3000)), {0})
    assert sum(len(call.args[2]) for call in calls.call_args_list) == 2999


def test_many_rows_that_share_most_words_are_compared_with_few(tmp_path: Path) -> None:
    draw = np.random.default_rng(2)
    instruction = " ".join(draw.choice(VOCABULARY, 150))
    texts = [f"{instruction} {' '.join(draw.choice(VOCABULARY, 60))}" for _ in range(400)]
    texts.append(texts[7].replace(" ", " new ", 1))
    stored = StoredWords((RowContents([text]) for text in texts), tmp_path)
    with mock.patch.object(StoredWords, "first_similar", autospec=True, side_effect=StoredWords.first_similar) as calls:
        rows, of, _ = find(stored)
    assert (rows.tolist(), of.tolist()) == ([400], [7])
    assert max(len(call.args[2]) for call in calls.call_args_list) <= 8


# Runs -----------------------------------------------------------------------------------------------------------------

SENTENCE = "The river {} flows by the old town and its mill, and no one has counted the birds on it since {}."
TRAINED = [SENTENCE.format(name, name) for name in ("Anu", "Bela", "Celo", "Doro")]


def rows_of(texts: Sequence[str]) -> list[dict[str, str]]:
    return [{"text": text} for text in texts]


@pytest.fixture
def repeated(write: Callable[..., str]) -> Callable[..., SFTDataConfig]:
    """6 training rows, of which 1 repeats another and 1 a held-out row; 3 held-out rows, of which 1 repeats another."""

    def make(**settings: Any) -> SFTDataConfig:
        others = [" ".join(VOCABULARY[i : i + 30]) for i in range(0, 180, 30)]
        trained = [*others[:3], others[3] + " more", others[1].upper(), others[4]]
        held_out = [others[3], others[5], others[5] + "!"]
        files = {"source": write(rows_of(trained)), "validation_source": write(rows_of(held_out), "held_out.jsonl")}
        return SFTDataConfig(**{**files, "near_duplicates": "drop", **settings})

    return make


def texts_of(batches: Any, tokenizer: Any) -> Iterator[str]:
    for batch in batches:
        for ids in batch.input_ids.tolist():
            yield tokenizer.decode(ids).split("<|end|>")[0]


def test_dropped_rows_are_counted_and_held_out_rows_win(
    repeated: Callable[..., SFTDataConfig], plain_tokenizer
) -> None:
    batches, held_out = prepare_batches(repeated(shuffle=False), plain_tokenizer, 1, seed=0)
    assert held_out is not None
    read = [json.loads(line)["text"] for line in Path(str(repeated().source)).read_text().splitlines()]
    assert [*texts_of(batches.take(4), plain_tokenizer)] == [read[0], read[1], read[2], read[5]]
    assert batches.num_rows == 4
    dropped = {"near-duplicates of earlier rows": 1, "near-duplicates of held-out rows": 1}
    assert (batches.report.rows, batches.report.kept, batches.report.dropped) == (6, 4, dropped)
    assert "1 held-out rows dropped (near-duplicates of earlier rows)" in str(batches.report)
    assert len([*texts_of(held_out, plain_tokenizer)]) == 2
    kept, all_held_out = prepare_batches(repeated(near_duplicates="keep"), plain_tokenizer, 1, seed=0)
    assert all_held_out is not None
    assert (kept.num_rows, len(all_held_out), kept.report.dropped) == (6, 3, {})


def test_the_fingerprint_covers_the_rows_that_are_compared(
    repeated: Callable[..., SFTDataConfig], write: Callable[..., str], plain_tokenizer
) -> None:
    def fingerprint(config: SFTDataConfig) -> str:
        return prepare_batches(config, plain_tokenizer, 2, seed=0)[0].fingerprint

    kept, dropped = repeated(near_duplicates="keep"), repeated()
    before = fingerprint(kept), fingerprint(dropped)
    assert before[0] != before[1]
    for settings in (settings_of_documents, settings_of_batches):  # the keys of runs from before the setting
        assert "near_duplicates" not in settings(kept)
        assert settings(dropped)["near_duplicates"] == "drop"
    write(rows_of(["Another held-out row."]), "held_out.jsonl")
    assert fingerprint(kept) == before[0]
    assert fingerprint(dropped) != before[1]
    batches, _ = prepare_batches(dropped, plain_tokenizer, 2, seed=0)
    assert batches.report.dropped == {"near-duplicates of earlier rows": 1}


@pytest.mark.long  # starts processes
def test_batches_are_the_same_from_the_cache_and_from_several_processes(
    repeated: Callable[..., SFTDataConfig], tmp_path: Path, plain_tokenizer
) -> None:
    found = []
    with mock.patch("lean_ft.data.documents.FEW_ROWS", 2):
        for folder, number in (("a", 1), ("a", 1), ("b", 2)):
            config = repeated(num_processes=number, cache_dir=tmp_path / folder, validation_fraction=0.0)
            batches, _ = prepare_batches(config, plain_tokenizer, 1, seed=3)
            found.append((batches.fingerprint, [*texts_of(batches.take(4), plain_tokenizer)], str(batches.report)))
            state = batches.state_dict()
            batches.load_state_dict(state)
    assert found[0] == found[1] == found[2]


def test_weights_and_held_out_fractions_apply_to_the_rows_that_stay(write: Callable[..., str], plain_tokenizer) -> None:
    texts = [" ".join(VOCABULARY[i : i + 20]) for i in range(0, 200, 20)]
    first, second = write(rows_of(texts), "a.jsonl"), write(rows_of([*texts[:4], "One more row of its own"]), "b.jsonl")
    sources = [{"path": first, "weight": 1}, {"path": second, "weight": 3}]
    config = SFTDataConfig.model_validate({"source": sources, "near_duplicates": "drop", "validation_fraction": 0.2})
    batches, held_out = prepare_batches(config, plain_tokenizer, 1, seed=1)
    assert held_out is not None
    trained, validated = ({*texts_of(some, plain_tokenizer)} for some in (batches.take(99), held_out))
    assert not trained & validated
    assert len(trained | validated) == 11
    assert batches.report.kept_by_source == [10, 1]


def test_pairs_and_prompts(write: Callable[..., str], chat_tokenizer) -> None:
    texts = [" ".join(VOCABULARY[i : i + 20]) for i in (0, 20, 0)]
    pairs = [{"prompt": text, "chosen": f"Yes {text}", "rejected": f"No {text}"} for text in texts]
    config = PreferenceDataConfig(source=write(pairs), near_duplicates="drop")
    batches, _ = prepare_batches(config, chat_tokenizer, 1, seed=0)
    assert (batches.num_rows, batches.report.dropped) == (2, {"near-duplicates of earlier rows": 1})
    asked = write([{"prompt": text, "answer": str(i)} for i, text in enumerate(texts)], "prompts.jsonl")
    held_out = write([{"prompt": texts[1]}], "held_out.jsonl")
    found = []
    for given in ("keep", "drop"):
        made = PromptDataConfig(source=asked, validation_source=held_out, near_duplicates=given)  # pyright: ignore
        prompts, others = prompt_rows(made, chat_tokenizer, seed=0)
        assert others is not None
        found.append((prompts.fingerprint, [prompts[i].columns["answer"] for i in range(len(prompts))], len(others)))
    assert [kept for _, *kept in found] == [[["0", "1", "2"], 1], [["0"], 1]]
    assert found[0][0] != found[1][0]


def test_a_system_prompt_does_not_make_rows_similar(write: Callable[..., str], chat_tokenizer) -> None:
    def chat(*contents: str) -> dict[str, Any]:
        roles = ("system", "user", "assistant")
        return {"messages": [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)]}

    system = " ".join(VOCABULARY[:300])
    rows = [chat(system, f"What is {i}?", f"It is a number, {i}.") for i in range(20)]
    rows.append(chat("Another one.", "What is 3?", "It is a number, 3."))
    config = SFTDataConfig(source=write(rows))
    found = near_duplicates(config, renderer_of(config, chat_tokenizer).reader)
    assert (found.rows.tolist(), found.of.tolist()) == ([20], [3])


def test_bad_rows_are_refused_or_skipped_as_before(write: Callable[..., str], plain_tokenizer) -> None:
    texts = [" ".join(VOCABULARY[i : i + 20]) for i in (0, 20, 0)]
    rows: list[dict[str, Any]] = rows_of(texts)  # type: ignore[assignment]
    rows.insert(1, {"text": 3})
    config: DataConfig = SFTDataConfig(source=write(rows), near_duplicates="drop")
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 2: .* expected a string"):
        prepare_batches(config, plain_tokenizer, 1, seed=0)
    config = config.model_copy(update={"on_bad_row": "skip"})
    report = prepare_batches(config, plain_tokenizer, 1, seed=0)[0].report
    assert (report.rows, report.kept, report.bad_rows) == (4, 2, 1)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"streaming": True}, "near_duplicates=drop compares all rows before the first"),
        ({"source": "a.jsonl", "validation_source": "a.jsonl"}, "leaves no training row"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        SFTDataConfig(**{"source": "b.jsonl", "near_duplicates": "drop", **settings})
    SFTDataConfig(**{"source": "b.jsonl", **settings})
