"""Weights and shares of sources: exact proportions, drawn by seed, held-out rows unchanged, and reports that equal a
count of the batches."""

import itertools
import json
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from lean_ft.data import prepare_batches, prompt_rows
from lean_ft.data.batches import Batches
from lean_ft.data.embedding import EmbeddingDataConfig
from lean_ft.data.mixing import divided, nearest_rows, weigh
from lean_ft.data.prepare import Preparation
from lean_ft.data.reranking import RerankingDataConfig
from lean_ft.data.statistics import most_used_rows
from lean_ft.settings import (
    ClassificationDataConfig,
    DataConfig,
    PreferenceDataConfig,
    PromptDataConfig,
    SFTDataConfig,
    UnpairedDataConfig,
)
from lean_ft.tokenizers import Tokenizer

pytestmark = pytest.mark.long  # one case of each runs in continuous integration


@pytest.mark.parametrize("weights", [(1, 1), (2, 0.5), (0.25, 3.3), (0.001, 1)])
def test_proportions(weights: tuple[float, float]):
    source_of = np.repeat([0, 1], [100, 37])
    taken = np.repeat(np.arange(len(source_of)), weigh(source_of, weights, seed=1))
    for source, weight in enumerate(weights):
        documents = np.flatnonzero(source_of == source)
        counts = Counter(taken[np.isin(taken, documents)].tolist())
        assert sum(counts.values()) == round(weight * len(documents))
        assert {counts[i] for i in documents.tolist()} <= {int(weight), int(weight) + 1}
        assert all(counts[i] >= int(weight) for i in documents.tolist())


def sources(write: Callable[..., str], weights: tuple[float, float]) -> list[dict[str, object]]:
    paths = [write([{"text": name * (i + 1)} for i in range(20)], f"{name}.jsonl") for name in "ab"]
    return [{"path": path, "weight": weight} for path, weight in zip(paths, weights, strict=True)]


def first_characters(batches, tokenizer) -> Counter[str]:
    return Counter(
        tokenizer.decode(row[:1])
        for batch in batches.take(batches.batches_per_epoch)
        for row in batch.input_ids.tolist()
    )


def test_an_epoch_shows_each_source_as_often_as_it_should(write: Callable[..., str], plain_tokenizer):
    config = SFTDataConfig(source=sources(write, (2, 0.5)))  # pyright: ignore
    batches, _ = prepare_batches(config, plain_tokenizer, batch_size=4, seed=0)
    assert first_characters(batches, plain_tokenizer) == {"a": 40, "b": 10}
    assert (batches.report.rows, batches.report.kept) == (40, 50)
    plain = SFTDataConfig(source=[source["path"] for source in sources(write, (1, 1))])  # pyright: ignore
    assert prepare_batches(plain, plain_tokenizer, 4, seed=0)[0].fingerprint != batches.fingerprint
    # The seed draws the half, so another seed gives other data.
    assert prepare_batches(config, plain_tokenizer, 4, seed=1)[0].fingerprint != batches.fingerprint


def test_held_out_rows_are_neither_repeated_nor_trained_on(write: Callable[..., str], plain_tokenizer):
    config = SFTDataConfig(source=sources(write, (3, 1)), validation_fraction=0.25)  # pyright: ignore
    batches, held_out = prepare_batches(config, plain_tokenizer, batch_size=1, seed=0)
    assert held_out is not None

    def rows(some) -> list[str]:
        return [plain_tokenizer.decode(batch.input_ids[0]).split("<|end|>")[0] for batch in some]

    trained, validated = rows(batches.take(batches.batches_per_epoch)), rows(held_out)
    assert len(validated) == len(set(validated)) == 10
    assert not set(trained) & set(validated)
    counts = Counter(trained)
    assert len(counts) == 30
    assert {(text[0], count) for text, count in counts.items()} == {("a", 3), ("b", 1)}


def test_weights_that_are_refused(write: Callable[..., str], plain_tokenizer):
    config = SFTDataConfig(source=sources(write, (0.01, 0.01)))  # pyright: ignore
    with pytest.raises(ValueError, match="leave no row to train on"):
        prepare_batches(config, plain_tokenizer, batch_size=4, seed=0)
    with pytest.raises(ValidationError, match="held-out rows have no weight"):
        SFTDataConfig(source="a.jsonl", validation_source=[{"path": "b.jsonl", "weight": 2.0}])  # pyright: ignore


@pytest.mark.parametrize("shares", [("0.7", "0.3"), ("1/3", "1/3", "1/3"), ("0.5", "0.25", "0.2499", "0.0001")])
@pytest.mark.parametrize("total", [0, 1, 7, 10, 99, 10**12 + 1])
def test_tokens_are_divided_by_the_largest_remainders(shares: tuple[str, ...], total: int):
    fractions = [Fraction(share) for share in shares]
    parts = divided(total, fractions)
    assert sum(parts) == total
    errors = [part - total * share for part, share in zip(parts, fractions, strict=True)]
    assert all(-1 < error < 1 for error in errors)
    # Hamilton's division is the one with the smallest sum of squared errors: no exchange of a token lowers it.
    for i, j in itertools.permutations(range(len(parts)), 2):
        assert (errors[i] + 1) ** 2 + (errors[j] - 1) ** 2 >= errors[i] ** 2 + errors[j] ** 2


def test_the_chosen_rows_are_as_near_as_any_subset():
    generator = np.random.default_rng(0)
    for number in range(1, 11):
        sizes = generator.integers(0, 40, number)
        sums = np.array([sum(subset) for subset in itertools.product(*((0, size) for size in sizes.tolist()))])
        for target in range(int(sizes.sum()) + 1):
            rows = nearest_rows(sizes, target, np.random.default_rng(target))
            assert len(set(rows.tolist())) == len(rows)
            assert abs(int(sizes[rows].sum()) - target) == np.abs(sums - target).min()


def test_many_rows_come_exactly_to_a_target_and_are_drawn_by_the_seed():
    sizes = np.random.default_rng(0).integers(20, 2000, 5000)
    target = int(sizes.sum()) // 3
    rows, again, other = (nearest_rows(sizes, target, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert sizes[rows].sum() == sizes[other].sum() == target
    assert (rows == again).all() and len(set(rows.tolist()) & set(other.tolist())) < 0.6 * len(rows)
    # The rows are a fair sample but for the last: their mean length is that of all within 4 standard errors.
    assert abs(sizes[rows].mean() - sizes.mean()) < 4 * sizes.std() / len(rows) ** 0.5
    equal = np.full(1000, 100)
    assert [len(nearest_rows(equal, n, np.random.default_rng(0))) for n in (0, 50, 51, 4949, 100_000)] == [
        0,
        0,
        1,
        49,
        1000,
    ]
    texts = np.random.default_rng(0).integers(10**7, 10**8, 200)  # long rows, counted in units
    rows = nearest_rows(texts, int(texts.sum()) // 2, np.random.default_rng(0))
    assert abs(int(texts[rows].sum()) - int(texts.sum()) // 2) < 1e-2 * texts.min()


# Batches of two sources, whose texts have other letters
# ----------------------------------------------------------------------------------------------------------------------


ANSWERS = {"prompt": "{0}{0}", "chosen": "{1}", "rejected": "{0}"}
OBJECTIVES: dict[str, tuple[type[DataConfig], dict[str, str], dict[str, Any]]] = {
    "sft": (SFTDataConfig, {"prompt": "{0}{0}", "completion": "{1}"}, {}),
    "batch_tokens": (SFTDataConfig, {"text": "{1}"}, {"batch_tokens": 128}),
    "bfd": (SFTDataConfig, {"prompt": "{0}", "completion": "{1}"}, {"packing": "bfd"}),
    "bfd_split": (SFTDataConfig, {"text": "{1}"}, {"packing": "bfd_split", "max_length": 16}),
    "wrapped": (SFTDataConfig, {"text": "{1}"}, {"packing": "wrapped", "max_length": 16}),
    "wrapped prompts": (SFTDataConfig, {"prompt": "{0}", "completion": "{1}"}, {"packing": "wrapped"}),
    "padding_free": (SFTDataConfig, {"text": "{1}"}, {"packing": "padding_free"}),
    "pairs": (PreferenceDataConfig, ANSWERS, {"packing": "bfd"}),
    "unpaired": (UnpairedDataConfig, {"prompt": "{0}", "completion": "{1}", "label": "true"}, {}),
    "pairs of unpaired": (UnpairedDataConfig, ANSWERS, {}),
    "classification": (ClassificationDataConfig, {"text": "{1}", "label": "x"}, {"labels": ["x", "y"]}),
    "embedding": (EmbeddingDataConfig, {"query": "{0}", "positive": "{1}"}, {}),
    "reranking": (RerankingDataConfig, {"query": "{0}", "positive": "{1}"}, {"template": "{query}{passage}"}),
}


def written(write: Callable[..., str], fields: dict[str, str], entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sources of 30 and 170 rows of other lengths, of `a` and `b`."""
    drawn, sources = np.random.default_rng(3), list[dict[str, Any]]()
    for letter, number, entry in zip("ab", (30, 170), entries, strict=True):
        texts = [letter * int(length) for length in drawn.integers(2, 60, number)]
        rows = [{name: text.format(letter, one) for name, text in fields.items()} for one in texts]
        rows = [{**row, "label": True} if row.get("label") == "true" else row for row in rows]
        sources.append({"path": write(rows, f"{letter}.jsonl"), **entry})
    return sources


def counted(batches: Batches, tokenizer: Tokenizer) -> Counter[tuple[str, str]]:
    """The tokens of an epoch's batches by letter, and those that have a label: of each text of a batch, its own."""
    found, of = Counter[tuple[str, str]](), {tokenizer.encode(letter)[0]: letter for letter in "ab"}
    columns, arrangement = batches.layout.columns, batches.layout.arrangement
    letters = [next(of[i] for i in document.ids.tolist() if i in of) for document in columns]
    for document, length in zip(arrangement.documents.tolist(), arrangement.lengths.tolist(), strict=True):
        found[letters[document], "all"] += length
    for batch in batches.take(batches.batches_per_epoch):
        labels = batch.labels.ravel().tolist()
        owner = [of.get(i) for i in batch.input_ids.ravel().tolist()]
        total = sum(label >= 0 for label in labels)
        for place, label in enumerate(labels):
            if label >= 0:  # a letter is of its source, and the end of a text of the letter before it
                letter = of.get(label) or next(name for name in reversed(owner[: place + 1]) if name is not None)
                found[letter, "trained"] += 1
        found["", "shared labels"] += batch.num_targets - total
    return found


@pytest.mark.first(len(OBJECTIVES))
@pytest.mark.parametrize(
    ("name", "share_of"), [(name, share_of) for share_of in ("trained", "all") for name in OBJECTIVES]
)
def test_an_epoch_has_the_tokens_that_the_report_says(write, plain_tokenizer, name: str, share_of: str):
    settings_class, fields, settings = OBJECTIVES[name]
    source = written(write, fields, [{"share": 0.7}, {}])
    settings = {"source": source, "share_of": share_of, "max_length": 48, **settings}
    config = settings_class.model_validate(settings)
    batches, _ = prepare_batches(config, plain_tokenizer, batch_size=4, seed=0)
    found, uses = counted(batches, plain_tokenizer), dict(zip("ab", batches.report.sources, strict=True))
    assert found["", "shared labels"] == 0
    for letter, use in uses.items():
        assert use.tokens == found[letter, "all"]
        assert use.trained == found[letter, "trained"]
    whole, _ = prepare_batches(
        settings_class.model_validate({**settings, "share_of": "trained", "source": [one["path"] for one in source]}),
        plain_tokenizer,
        batch_size=4,
        seed=0,
    )
    once = counted(whole, plain_tokenizer)
    total = once["a", share_of] + once["b", share_of]
    rows = len(batches.layout) if settings.get("packing") == "wrapped" and share_of == "trained" else 0
    for letter, share in (("a", 0.7), ("b", 0.3)):
        assert abs(found[letter, share_of] - share * total) <= 1 + 2 * rows  # a row's first token has no label
        if not rows:
            assert uses[letter].epochs == pytest.approx(found[letter, share_of] / once[letter, share_of])


def read(batches: Any, tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.decode(document.ids).split("<|end|>")[0] for document in batches.layout.columns]


def test_held_out_rows_are_taken_out_before_shares(write, plain_tokenizer):
    source = written(write, {"text": "{1}"}, [{"share": 0.6}, {"share": 0.4}])
    config = SFTDataConfig.model_validate({"source": source, "validation_fraction": 0.2})
    preparation = Preparation(config, plain_tokenizer, batch_size=4, seed=5)
    trained, held_out = preparation.parts(preparation.documents(config.source))
    assert held_out is not None and trained.mixture is not None
    assert not {*trained.documents.rows.tolist()} & {*held_out.documents.rows.tolist()}
    assert len({*trained.documents.rows.tolist()}) <= trained.mixture.counts.astype(bool).sum() <= 160
    uses, mixture = preparation.uses()
    assert mixture is not None and sum(use.num_rows for use in uses) == 160
    assert [use.off for use in uses] == [0, 0] and sum(use.trained for use in uses) == trained.mixture.trained.sum()


def test_the_rows_that_repeat_are_named(write, plain_tokenizer):
    rows = [{"text": "" if i % 7 == 0 else "b" * (2 + i % 5)} for i in range(60)]  # empty rows are dropped
    source = [write([{"text": "a" * 9}] * 40, "a.jsonl"), {"path": write(rows, "b.jsonl"), "share": 0.7}]
    config = SFTDataConfig.model_validate({"source": source, "on_bad_row": "skip"})
    preparation = Preparation(config, plain_tokenizer, batch_size=4, seed=0)
    uses, mixture = preparation.uses()
    assert mixture is not None
    whole, used = preparation.documents(config.source), preparation.parts(preparation.documents(config.source))[0]
    times = Counter(used.documents.rows.tolist())
    most = max(number for row, number in times.items() if row >= 40)
    lines = [i for i, row in enumerate(rows, start=1) if row["text"]]
    expected = [lines[row - 40] for row in range(40, whole.report.kept) if times[row] == most][:4]
    found = most_used_rows(config, plain_tokenizer, mixture, 1)
    lines_of_b = ", ".join(f"line {line}" for line in expected) + " ..."
    assert found == lines_of_b
    b1 = write(rows, "b1.jsonl")  # a glob names its files
    of_glob = SFTDataConfig.model_validate(
        {"source": [source[0], {"path": b1.replace("b1", "b[12]"), "share": 0.7}], "on_bad_row": "skip"}
    )
    assert most_used_rows(of_glob, plain_tokenizer, mixture, 1) == f"{b1}, {lines_of_b}"
    assert uses[1].times == Counter(times[row] for row in range(40, whole.report.kept))


def test_prompts_are_mixed_by_all_of_their_tokens_or_by_weights(write, plain_tokenizer):
    def prompts(*entries: dict[str, Any], **settings: Any):
        source = written(write, {"prompt": "{1}"}, [*entries])
        config = PromptDataConfig.model_validate({"source": source, "max_prompt_length": 50, **settings})
        return prompt_rows(config, plain_tokenizer, seed=0)

    def lengths(found) -> Counter[str]:
        counts = Counter[str]()
        for i in range(len(found)):
            counts[found[i].asked[0]] += len(found[i].ids)
        return counts

    plain, _ = prompts({}, {})
    once = lengths(plain)
    mixed, held_out = prompts({"share": 0.75}, {}, validation_fraction=0.1)
    assert held_out is not None and {one.place for one in held_out}.isdisjoint(
        mixed[i].place for i in range(len(mixed))
    )
    total = sum(once.values()) - sum(len(one.ids) for one in held_out)
    of_a = int(0.75 * total + 0.5)
    assert lengths(mixed) == {"a": of_a, "b": total - of_a}
    assert [use.tokens for use in mixed.report.sources] == [*lengths(mixed).values()]
    assert mixed.report.kept == len(mixed) and mixed.fingerprint != plain.fingerprint
    doubled, _ = prompts({"weight": 2}, {})
    assert lengths(doubled) == {"a": 2 * once["a"], "b": once["b"]}
    assert doubled.fingerprint != plain.fingerprint


def test_shares_decide_the_fingerprint_and_none_leave_it(write, plain_tokenizer):
    def prepared(*entries: dict[str, Any], seed: int = 0, **settings: Any) -> Batches:
        source = written(write, {"prompt": "{0}", "completion": "{1}"}, [*entries])
        config = SFTDataConfig.model_validate({"source": source, **settings})
        return prepare_batches(config, plain_tokenizer, batch_size=4, seed=seed)[0]

    plain, mixed = prepared({}, {}), prepared({"share": 0.7}, {})
    assert prepared({"share": 0.7}, {"share": 0.3}).fingerprint == mixed.fingerprint
    others = [
        plain,
        prepared({"share": 0.8}, {}),
        prepared({"share": 0.7}, {}, share_of="all"),
        prepared({"share": 0.7}, {}, seed=1),
    ]
    assert len({mixed.fingerprint, *(one.fingerprint for one in others)}) == 5
    state = mixed.state_dict()
    mixed.take(3)
    with pytest.raises(ValueError, match="data settings"):
        plain.load_state_dict(state)
    # Configs of runs that were recorded before shares existed are equal to those of today.
    assert "share" not in json.dumps(SFTDataConfig.model_validate({"source": [{"path": "a"}]}).model_dump()["source"])


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        *(
            ([{"path": "a", "share": share}, "b"], f"share is {found}; expected a number above 0 and up to 1")
            for share, found in (
                *((0, "0"), (-1, "-1"), (1.5, "1.5"), (True, "true"), (float("nan"), "nan"), (float("inf"), "inf")),
                *(("a lot", '"a lot"'), ([1], r"\[1\]")),
            )
        ),
        ([{"path": "a", "share": 70}, {"path": "b", "share": 30}], r"add up to 1. Write 0.7 for 70%"),
        ([{"path": "a", "share": 0.5}, {"path": "b", "share": 0.4}], "add up to 0.9; expected 1"),
        ([{"path": "a", "share": 0.5}], "add up to 0.5; expected 1"),
        ([{"path": "a", "share": 1}, "b"], "leaves nothing for b"),
        ([{"path": "a", "share": 0.5}, "b", {"path": "c"}], r"b, c have no share.*the rest \(0.5\)"),
        ([{"path": "a", "share": 0.5}, {"path": "b", "weight": 2}], "a has share=0.5 and b has weight=2"),
    ],
)
def test_shares_that_make_no_sense_are_refused(source: list[Any], problem: str):
    with pytest.raises(ValidationError, match=problem):
        SFTDataConfig.model_validate({"source": source})


def test_shares_without_rows_or_an_effect_are_refused(write, plain_tokenizer):
    with pytest.raises(ValidationError, match="share_of=all is used only with shares"):
        SFTDataConfig.model_validate({"source": ["a", "b"], "share_of": "all"})
    with pytest.raises(ValidationError, match="held-out rows have no share"):
        SFTDataConfig.model_validate({"source": "a", "validation_source": [{"path": "b", "share": 1}]})
    with pytest.raises(ValidationError, match="prompts have none"):
        PromptDataConfig.model_validate({"source": [{"path": "a", "share": 0.5}, "b"], "share_of": "trained"})
    source = written(write, {"text": "{1}"}, [{"share": 1e-9}, {}])
    with pytest.raises(ValueError, match=r"share of a is 0 tokens per epoch, and its shortest row has \d+, so none"):
        prepare_batches(SFTDataConfig.model_validate({"source": source}), plain_tokenizer, 4, seed=0)
    long = write([{"text": "c" * 99}], "long.jsonl")
    config = SFTDataConfig.model_validate(
        {"source": [{"path": long, "share": 0.5}, source[1]["path"]], "max_length": 64, "overflow": "drop"}
    )
    with pytest.raises(ValueError, match="long has a share, and no row to train on"):
        prepare_batches(config, plain_tokenizer, 4, seed=0)
    config = SFTDataConfig.model_validate({"source": [{"path": source[0]["path"], "weight": 1e30}]})
    with pytest.raises(ValueError, match=r"weight=1e\+30 of 30 rows is more than"):
        prepare_batches(config, plain_tokenizer, 4, seed=0)
