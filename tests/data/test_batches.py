"""Batches match an independent computation of documents and labels, and their order can be resumed."""

import itertools
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lean_ft.data import Batch, Batches, largest_batch, prepare_batches
from lean_ft.settings import PreferenceDataConfig, SFTDataConfig, UnpairedDataConfig

Config = Callable[..., Any]
BATCH_SIZE = 4


def rows(number: int = 37) -> list[dict[str, str]]:
    generator = np.random.default_rng(0)
    return [
        {"prompt": "p" * int(generator.integers(1, 12)), "completion": f"{i}:" + "c" * int(generator.integers(0, 20))}
        for i in range(number)
    ]


def documents_of(batch: Batch) -> list[tuple[list[int], list[int], list[int]]]:
    """(ids, labels, positions) of each document and each padding segment, split by cu_seqlens or by rows."""
    num_rows, num_columns = batch.input_ids.shape
    if batch.cu_seqlens is None:
        bounds = list(range(0, num_rows * num_columns + 1, num_columns))
    else:
        bounds = batch.cu_seqlens.tolist()
    flat = [tensor.flatten().tolist() for tensor in (batch.input_ids, batch.labels, batch.positions)]
    return [tuple(values[first:last] for values in flat) for first, last in itertools.pairwise(bounds)]  # pyright: ignore


def expected_documents(rows: list[dict[str, str]], tokenizer: Any) -> list[tuple[list[int], list[int]]]:
    """(ids, labels) of each row, by counting characters: the tokenizer has one token per byte."""
    expected = []
    for row in rows:
        ids = [*tokenizer.encode(row["prompt"] + row["completion"]), tokenizer.eos_id]
        first_target = len(row["prompt"])
        labels = [ids[t + 1] if t + 1 >= first_target else -100 for t in range(len(ids) - 1)] + [-100]
        expected.append((ids, labels))
    return expected


def epoch(batches: Batches) -> list[Batch]:
    taken = []
    while len(taken) < batches.batches_per_epoch:
        taken += batches.take(3)
    return taken


@pytest.mark.parametrize("packing", ["none", "bfd", "bfd_split", "padding_free"])
def test_every_document_comes_once_with_its_labels(config: Config, plain_tokenizer, packing: str):
    batches, _ = prepare_batches(config(rows(), packing=packing), plain_tokenizer, BATCH_SIZE, seed=3)
    seen, num_known = [], 0
    for batch in epoch(batches):
        for ids, labels, positions in documents_of(batch):
            assert positions == list(range(len(ids)))
            if not ids:
                continue  # the end of cu_seqlens, repeated
            if packing == "none":
                num_real = max(t for t, label in enumerate(labels) if label != -100) + 2
                assert ids[num_real:] == [plain_tokenizer.pad_id] * (len(ids) - num_real)
                assert labels[num_real:] == [-100] * (len(ids) - num_real)
                ids, labels = ids[:num_real], labels[:num_real]
            if any(label != -100 for label in labels):
                seen.append((ids, labels))
            else:
                assert set(ids) == {plain_tokenizer.pad_id}
        has_label = batch.labels != -100
        assert batch.num_targets == int(has_label.sum())
        assert batch.num_tokens == batch.input_ids.numel()
        num_known += int(batch.is_token.sum())
        assert (batch.is_token | ~has_label).all()  # padding has no label, and is at the end of a row
        assert (batch.is_token[:, 1:] <= batch.is_token[:, :-1]).all()
        assert batch.input_ids.dtype == batch.labels.dtype == batch.positions.dtype == torch.int64
    assert sorted(seen) == sorted(expected_documents(rows(), plain_tokenizer))
    assert num_known == batches.report.tokens


def test_packed_rows_have_one_shape_and_boundaries_that_cover_it(config: Config, plain_tokenizer):
    batches, _ = prepare_batches(config(rows(), packing="bfd"), plain_tokenizer, BATCH_SIZE, seed=0)
    assert len({len(batch.cu_seqlens) for batch in epoch(batches) if batch.cu_seqlens is not None}) == 1
    for batch in epoch(batches):
        assert batch.input_ids.shape == (BATCH_SIZE, 64)
        assert batch.cu_seqlens is not None
        assert batch.cu_seqlens.dtype == torch.int32
        bounds = batch.cu_seqlens.tolist()
        assert bounds[: bounds.index(BATCH_SIZE * 64) + 1] == sorted(set(bounds))
        assert set(bounds[bounds.index(BATCH_SIZE * 64) :]) == {BATCH_SIZE * 64}  # only the repeated end follows
        assert (bounds[0], bounds[-1]) == (0, BATCH_SIZE * 64)
        assert set(range(0, BATCH_SIZE * 64, 64)) <= set(bounds)  # no document continues in the next row


def test_a_short_last_batch_is_filled_with_empty_rows_when_packed(config: Config, plain_tokenizer):
    texts = [{"text": "a" * 63}] * 5
    packed, _ = prepare_batches(config(texts, packing="bfd"), plain_tokenizer, BATCH_SIZE, seed=0)
    last = epoch(packed)[-1]
    assert last.input_ids.shape == (BATCH_SIZE, 64)
    assert last.cu_seqlens is not None
    assert last.cu_seqlens.tolist() == [0, 64, 128, 192, 256]
    assert last.num_targets == 63
    assert (last.labels[1:] == -100).all()
    padded, _ = prepare_batches(config(texts), plain_tokenizer, BATCH_SIZE, seed=0)
    assert epoch(padded)[-1].input_ids.shape == (1, 64)


@pytest.mark.parametrize(("length", "columns"), [(3, 8), (8, 8), (9, 16), (58, 60), (60, 60)])
def test_padding_goes_to_a_multiple_of_8_but_not_beyond_max_length(config: Config, plain_tokenizer, length, columns):
    texts = [{"text": "a" * (length - 1)}, {"text": "b"}]
    batches, _ = prepare_batches(config(texts, max_length=60), plain_tokenizer, 2, seed=0)
    [batch] = batches.take(1)
    assert batch.input_ids.shape == (2, columns)
    assert batch.cu_seqlens is None


def test_the_token_that_ends_a_text_is_a_label_though_padding_has_its_id(config: Config, plain_tokenizer):
    assert plain_tokenizer.pad_id == plain_tokenizer.eos_id
    for packing in ("none", "bfd"):
        batches, _ = prepare_batches(config([{"text": "ab"}], packing=packing), plain_tokenizer, 1, seed=0)
        [batch] = batches.take(1)
        a, b, end = plain_tokenizer.encode("ab<|end|>")
        assert batch.input_ids[0, :4].tolist() == [a, b, end, end]
        assert batch.labels[0, :4].tolist() == [b, end, -100, -100]


def test_padding_free_makes_a_batch_one_row_of_whole_documents(config: Config, plain_tokenizer):
    texts = [{"text": "a" * (20 * i + 7)} for i in range(7)]  # up to 127 bytes: max_length is 64
    batches, _ = prepare_batches(config(texts, packing="padding_free"), plain_tokenizer, 3, seed=0)
    assert (batches.report.truncated, batches.report.lost_tokens) == (0, 0)
    lengths = []
    for batch in epoch(batches):
        assert batch.cu_seqlens is not None
        assert len(batch.cu_seqlens) == 5
        documents = [len(labels) for _, labels, _ in documents_of(batch) if any(label != -100 for label in labels)]
        assert batch.input_ids.shape == (1, -(-sum(documents) // 8) * 8)  # padded only at its end, by at most 7
        assert batch.input_ids.shape[1] - sum(documents) < 8
        lengths += documents
    assert sorted(lengths) == [len(row["text"]) + 1 for row in texts]


class TestTokenBudget:
    def test_batches_fill_the_budget_with_rows_of_one_length(self, config: Config, plain_tokenizer):
        generator = np.random.default_rng(0)
        texts = [{"text": "a" * int(n)} for n in generator.integers(1, 63, size=400)]
        batches, held_out = prepare_batches(
            config(texts, batch_tokens=512, validation_fraction=0.25), plain_tokenizer, 1, seed=0
        )
        taken = epoch(batches)
        assert max(batch.num_tokens for batch in taken) <= 512
        positions, real = sum(batch.num_tokens for batch in taken), batches.report.tokens
        assert real / positions > 0.85  # rounding to 8 wastes 8% at these lengths; random batches waste 50%
        assert np.median([batch.num_tokens for batch in taken]) > 0.9 * 512
        assert sum(batch.num_targets for batch in taken) == batches.report.target_tokens
        assert held_out is not None
        assert sum(batch.num_targets for batch in held_out) == held_out.report.target_tokens

    def test_epochs_have_other_batches_but_as_many(self, config: Config, plain_tokenizer):
        texts = [{"text": f"{i:03}" + "a" * (i % 40)} for i in range(200)]
        batches, _ = prepare_batches(config(texts, batch_tokens=128), plain_tokenizer, 1, seed=0)
        first, second = ([batch.input_ids.tolist() for batch in epoch(batches)] for _ in range(2))
        assert len(first) == len(second)
        assert [len(ids[0]) for ids in first] != sorted(len(ids[0]) for ids in first)

        def rows(taken: list[Any]) -> list[str]:
            return sorted(plain_tokenizer.decode(row)[:3] for ids in taken for row in ids)

        assert rows(first) == rows(second) == [f"{i:03}" for i in range(200)]
        assert sorted(map(str, first)) != sorted(map(str, second))  # batches also group different rows

    @pytest.mark.parametrize(
        ("settings", "reason"),
        [
            ({"batch_tokens": 63}, "batch_tokens=63 is less than max_length=64"),
            ({"batch_tokens": 640, "packing": "bfd"}, "cannot be combined with packing=bfd"),
            ({"batch_tokens": 640, "shuffle": False}, "shuffle=false keeps the order of the files"),
            (
                {"overflow": "drop", "packing": "padding_free"},
                "overflow=drop cannot be combined with packing=padding_free",
            ),
        ],
    )
    def test_what_cannot_be_honoured_is_refused(self, config: Config, settings: dict[str, Any], reason: str):
        with pytest.raises(ValueError, match=reason):
            config([{"text": "a"}], **settings)


class TestOrder:
    def test_epochs_differ_and_repeat_by_seed(self, config: Config, plain_tokenizer):
        def orders(seed: int) -> list[list[int]]:
            batches, _ = prepare_batches(config(rows()), plain_tokenizer, BATCH_SIZE, seed=seed)
            return [torch.cat([b.input_ids[:, :3].flatten() for b in epoch(batches)]).tolist() for _ in range(2)]

        first, second = orders(0)
        assert first != second
        assert orders(0) == [first, second]
        assert orders(1)[0] != first

    def test_take_stops_at_the_end_of_an_epoch(self, config: Config, plain_tokenizer):
        batches, _ = prepare_batches(config(rows(18)), plain_tokenizer, BATCH_SIZE, seed=0)
        assert batches.batches_per_epoch == 5
        sizes, epochs = [], []
        for _ in range(6):
            sizes.append(len(batches.take(2)))
            epochs.append(batches.epoch)
        assert sizes == [2, 2, 1, 2, 2, 1]
        assert epochs == [0, 0, 0, 1, 1, 1]
        with pytest.raises(ValueError, match="take"):
            batches.take(0)

    @pytest.mark.parametrize("packing", ["none", "padding_free", "bfd"])
    def test_without_shuffling_rows_come_in_order_in_every_epoch(self, config: Config, plain_tokenizer, packing: str):
        settings = config(rows(), shuffle=False, packing=packing)
        batches, _ = prepare_batches(settings, plain_tokenizer, BATCH_SIZE, seed=0)
        found = []
        for _ in range(2):
            documents = [document[:2] for batch in epoch(batches) for document in documents_of(batch)]
            found.append([(ids, labels) for ids, labels in documents if set(labels) > {-100}])
        assert found[0] == found[1]
        if packing == "bfd":  # rows are in packing order: fullest first
            return
        for (ids, labels), (row, targets) in zip(found[0], expected_documents(rows(), plain_tokenizer), strict=True):
            assert (ids[: len(row)], labels[: len(row)]) == (row, targets)

    @pytest.mark.first(6)
    @pytest.mark.parametrize(
        ("layout", "num_rows"),
        [
            ({"packing": "none"}, 20),
            ({"packing": "none", "shuffle": False}, 20),
            ({"packing": "none", "batch_tokens": 100}, 20),
            ({"packing": "bfd"}, 60),
            ({"packing": "bfd_split", "max_length": 20}, 22),
            ({"packing": "wrapped"}, 60),
            ({"packing": "padding_free"}, 20),
        ],
        ids=lambda value: " ".join(map(str, value.values())) if isinstance(value, dict) else None,
    )
    @pytest.mark.parametrize("num_taken", [0, 1, 3, 5, 6, 11])
    def test_resuming_gives_the_same_batches(self, config: Config, plain_tokenizer, layout, num_rows, num_taken: int):
        settings = config(rows(num_rows), **layout)

        def fresh() -> Batches:
            batches = prepare_batches(settings, plain_tokenizer, BATCH_SIZE, seed=5)[0]
            assert 4 <= batches.batches_per_epoch <= 6  # num_taken covers the first epoch, its end, and later epochs
            return batches

        uninterrupted, interrupted, resumed = fresh(), fresh(), fresh()
        for _ in range(num_taken):
            uninterrupted.take(1)
            interrupted.take(1)
        resumed.load_state_dict(json.loads(json.dumps(interrupted.state_dict())))
        assert resumed.epoch == uninterrupted.epoch
        for _ in range(8):
            [expected], [got] = uninterrupted.take(1), resumed.take(1)
            for name in ("input_ids", "labels", "positions"):
                assert torch.equal(getattr(got, name), getattr(expected, name))
            assert resumed.epoch == uninterrupted.epoch

    def test_a_place_in_other_data_is_refused(self, config: Config, plain_tokenizer):
        def batches(number: int = 20, batch_size: int = 4, seed: int = 0, **settings: Any) -> Batches:
            return prepare_batches(config(rows(number), **settings), plain_tokenizer, batch_size, seed=seed)[0]

        begun = batches()
        begun.take(1)
        state = begun.state_dict()
        batches().load_state_dict(state)
        for other, reason in (
            (batches(seed=1), "seed changed"),
            (batches(batch_size=3), "batch_size changed"),  # four rows do not fill whole batches of three
            (batches(21), "data .* changed"),
            (batches(max_length=63), "data .* changed"),
            (batches(train_on="all"), "data .* changed"),
            (batches(batch_tokens=256), "data .* changed"),
            (batches(shuffle=False), "data .* changed"),
        ):
            with pytest.raises(ValueError, match=rf"cannot resume: the {reason}"):
                other.load_state_dict(state)


class TestEvaluation:
    def test_a_fraction_is_held_out_whole(self, config: Config, plain_tokenizer):
        for packing in ("none", "bfd"):
            settings = config(rows(), packing=packing, validation_fraction=0.25)
            batches, held_out = prepare_batches(settings, plain_tokenizer, BATCH_SIZE, seed=1)
            assert held_out is not None
            assert (batches.report.kept, held_out.report.kept) == (28, 9)

            def targets(some: list[Batch]) -> list[list[int]]:
                return sorted(
                    ids[: len([t for t in labels if t != -100]) + 1]
                    for batch in some
                    for ids, labels, _ in documents_of(batch)
                    if any(label != -100 for label in labels)
                )

            whole, _ = prepare_batches(config(rows(), packing=packing), plain_tokenizer, BATCH_SIZE, seed=1)
            assert sorted(targets(epoch(batches)) + targets(list(held_out))) == targets(epoch(whole))
            assert held_out.report.target_tokens == sum(batch.num_targets for batch in held_out)

    def test_a_file_of_its_own_in_fixed_order(self, config: Config, write, plain_tokenizer):
        path = write([{"text": f"row {i}"} for i in range(5)], "validation.jsonl")
        settings = config(rows(), validation_source=path)
        _, held_out = prepare_batches(settings, plain_tokenizer, 2, seed=0)
        assert held_out is not None
        assert len(held_out) == 3
        for _ in range(2):
            texts = [plain_tokenizer.decode(ids)[:5] for batch in held_out for ids in batch.input_ids.tolist()]
            assert texts == [f"row {i}" for i in range(5)]

    def test_a_fraction_that_leaves_nothing_is_refused(self, config: Config, plain_tokenizer):
        with pytest.raises(ValueError, match=r"validation_fraction=0.5 of 1 rows leaves no row to train on"):
            prepare_batches(config(rows(1), validation_fraction=0.5), plain_tokenizer, 2, seed=0)


@pytest.mark.parametrize("settings", [{}, {"packing": "padding_free"}, {"batch_tokens": 128}], ids=str)
def test_the_largest_batch_comes_first_of_all(config: Config, plain_tokenizer, settings: dict[str, Any]):
    largest_is_first = []
    for seed in range(6):
        batches, _ = prepare_batches(
            config(rows(), **settings), plain_tokenizer, BATCH_SIZE if settings else 1, seed=seed
        )
        sizes = [batch.num_tokens for batch in epoch(batches)]
        assert sizes[0] == max(sizes)
        later = [batch.num_tokens for batch in epoch(batches)]
        largest_is_first.append(later[0] == max(later))
    assert not all(largest_is_first), "later epochs come as they are drawn"


@pytest.mark.first(6)
@pytest.mark.parametrize(
    "settings",
    [*({"packing": p} for p in ("none", "bfd", "bfd_split", "wrapped", "padding_free")), {"batch_tokens": 300}],
    ids=str,
)
@pytest.mark.parametrize("kind", [SFTDataConfig, PreferenceDataConfig, "sharing"])
def test_rows_that_are_all_full_make_the_largest_batch(kind: Any, settings: dict[str, Any], write, plain_tokenizer):
    sharing = {}
    if kind == "sharing":
        kind, sharing = PreferenceDataConfig, {"share_prompts": True}
    if kind is PreferenceDataConfig:
        texts = [{"prompt": "p", "chosen": "c" * 62, "rejected": "r" * 62}] * 9
        prepare = prepare_batches
    else:
        texts, prepare = [{"prompt": "p", "completion": "c" * 62}] * 9, prepare_batches
    if kind is PreferenceDataConfig and settings.get("packing") in ("bfd_split", "wrapped"):
        return  # pairs are not cut
    config = kind(source=write(texts), max_length=64, **settings)
    batches, _ = prepare(config, plain_tokenizer, BATCH_SIZE, seed=0, **sharing)
    planned = largest_batch(config, BATCH_SIZE, **sharing)
    largest = max(epoch(batches), key=lambda batch: batch.num_tokens)
    if not sharing:
        assert planned.input_ids.shape == largest.input_ids.shape
        assert (planned.cu_seqlens is None) == (largest.cu_seqlens is None)
    assert planned.num_tokens == largest.num_tokens == planned.input_ids.numel()
    assert largest.num_targets <= planned.num_targets < planned.num_tokens  # nothing predicts a first token
    assert planned.inputs.keys() == largest.inputs.keys()


@pytest.mark.parametrize("packing", ["none", "padding_free"])
def test_the_largest_pairs_share_the_prompt_that_their_completions_leave(packing: Any, write, plain_tokenizer):
    row = {"prompt": "p" * 41, "chosen": "c" * 22, "rejected": "r" * 22}  # with an end token, 64 tokens
    config = PreferenceDataConfig(source=write([row] * 9), max_length=64, max_completion_length=23, packing=packing)
    batches, _ = prepare_batches(config, plain_tokenizer, BATCH_SIZE, 0, share_prompts=True)
    largest, planned = batches.take(1)[0], largest_batch(config, BATCH_SIZE, share_prompts=True)
    assert planned.input_ids.shape == largest.input_ids.shape
    for name in ("positions", "cu_seqlens", "prefixes"):
        assert torch.equal(planned.inputs[name], largest.inputs[name]), name
    assert planned.num_targets == largest.num_targets


@pytest.mark.first(8)
@pytest.mark.parametrize(
    "settings",
    [*({"packing": p} for p in ("none", "bfd", "bfd_split", "wrapped", "padding_free")), {"batch_tokens": 128}],
    ids=str,
)
@pytest.mark.parametrize("kind", ["texts", "pairs", "sharing", "unpaired"])
def test_a_batch_tells_what_it_has_before_it_is_built(kind: str, settings: dict[str, Any], write, plain_tokenizer):
    """Each rank builds only its own batches, but needs the counts of other ranks' batches."""
    texts, names = rows(), ["num_targets", "num_tokens"]
    if kind == "texts":  # trained from the first token
        texts = [{"text": row["completion"]} for row in texts]
    else:
        if settings.get("packing") in ("bfd_split", "wrapped"):
            return  # answers are not cut
        texts = [row | {"chosen": row["completion"], "rejected": row["prompt"], "label": i % 3 == 0} for i,
            row in enumerate(texts)]  # fmt: skip
        texts = [{name: row[name] for name in ("prompt",
            *(("completion", "label") if kind == "unpaired" else ("chosen",
                "rejected")))} for row in texts]  # fmt: skip
        names += ["num_pairs", "answer_tokens", "pairs", *(["is_desirable"] if kind == "unpaired" else [])]
    config_kind = {"texts": SFTDataConfig, "unpaired": UnpairedDataConfig}.get(kind, PreferenceDataConfig)
    config = config_kind(source=write(texts), max_length=16 if kind == "texts" else 32, **settings)
    batches, _ = prepare_batches(config, plain_tokenizer, BATCH_SIZE, 0, kind == "sharing")
    for batch in epoch(batches):
        told = [getattr(batch, name) for name in names]
        assert "built" not in vars(batch)
        for name, value in zip(names, told, strict=True):
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(getattr(batch.built, name))), name
        assert batch.num_targets == (batch.labels != -100).sum() or kind == "sharing"


def test_to_moves_every_tensor(config: Config, plain_tokenizer):
    batches, _ = prepare_batches(config(rows(), packing="bfd"), plain_tokenizer, BATCH_SIZE, seed=0)
    [batch] = batches.take(1)
    moved = batch.to("meta")
    tensors = (moved.input_ids, moved.labels, moved.positions, moved.cu_seqlens, moved.is_token)
    assert all(tensor is not None and tensor.device.type == "meta" for tensor in tensors)
    assert (moved.num_targets, moved.num_tokens) == (batch.num_targets, batch.num_tokens)
