"""A column that a reader adds reaches the model beside the right tokens, and nothing in between names it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lean_ft.data import Batch, prepare_batches
from lean_ft.data.collate import batch_of
from lean_ft.data.columns import OF_LOSS, Columns, Document, identity
from lean_ft.data.largest import largest_batch
from lean_ft.data.objective import Objective
from lean_ft.data.sft import SFTReader
from lean_ft.frozen.teacher_cache import keep_teacher
from lean_ft.models import Decoder, load_model
from lean_ft.quantize.held_out_loss import mean_loss
from lean_ft.settings import KeepTeacherConfig, PreferenceDataConfig, SFTDataConfig, UnpairedDataConfig
from lean_ft.tokenizers import load_tokenizer
from tests.data.tone_readers import IDS, PLACES, READERS
from tests.recipes.conftest import TINY, run_recipe

ROWS = [{"prompt": "p" * (i % 5 + 1), "completion": f"{i}" + "c" * (7 * i % 40)} for i in range(24)]
PAIRS = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": f"no {i}"} for i, row in enumerate(ROWS)]
KINDS = {"sft": ROWS, "pairs": PAIRS, "shared": PAIRS, "unpaired": PAIRS}
UNCUT = ("bfd_split", "wrapped")  # answers are not cut
LAYOUTS = [{"packing": p} for p in ("none", "bfd", "bfd_split", "wrapped", "padding_free")]
LAYOUTS += [{"packing": "none", "truncation_side": "left"}, {"packing": "none", "num_processes": 2}]
CASES = [(kind, layout) for kind in KINDS for layout in LAYOUTS if kind == "sft" or layout["packing"] not in UNCUT]
# Each kind and each layout once.
SHORT = [
    ("sft", LAYOUTS[1]),
    ("sft", LAYOUTS[3]),
    ("pairs", LAYOUTS[5]),
    ("shared", LAYOUTS[4]),
    ("unpaired", LAYOUTS[0]),
]


@pytest.fixture
def tones(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Readers add `tone`, and each forward pass checks it. The tones of all passes."""
    for name, reader in READERS.items():
        monkeypatch.setattr(type(import_module(f"lean_ft.data.{name}").OBJECTIVE), "reader", reader)
    monkeypatch.setattr("lean_ft.data.documents.FEW_ROWS", 2)
    seen, forward = list[Tensor](), Decoder.forward

    def heard(
        self: Decoder, input_ids: Tensor, *args: Any, tone: Tensor, pair: Tensor, is_token: Tensor, **more: Any
    ) -> Any:
        assert torch.equal(pair[is_token], torch.stack([tone, input_ids], 2)[is_token])
        assert torch.equal((tone - 1)[is_token] % IDS, input_ids[is_token])
        assert not tone[~is_token].any()
        seen.append(tone)
        return forward(self, input_ids, *args, is_token=is_token, **more)

    monkeypatch.setattr(Decoder, "forward", heard)
    return seen


def texts_of(batch: Batch) -> Iterator[Tensor]:
    """The tones of each text, with the shared prompt that it continues."""
    tone, width = batch.inputs["tone"].flatten(), batch.labels.shape[1]
    bounds = range(0, batch.num_tokens + 1, width) if batch.cu_seqlens is None else batch.cu_seqlens.tolist()
    prefixes = [(0, 0)] * len(bounds) if batch.prefixes is None else batch.prefixes.tolist()
    for (start, end), prefix in zip(pairwise(bounds), prefixes, strict=False):
        text = torch.cat((tone[slice(*prefix)], tone[start:end]))
        if (text := text[text > 0]).numel():
            yield (text - 1) // IDS


def prepared(kind: str, layout: dict[str, Any], write: Any, folder: Path) -> list[Any]:
    config_type = {"sft": SFTDataConfig, "unpaired": UnpairedDataConfig}.get(kind, PreferenceDataConfig)
    source = write(KINDS[kind])
    layout = {"max_length": 24, "validation_fraction": 0.2, "chat": False, "num_processes": 1} | layout
    config = config_type(source=source, cache_dir=folder, **layout)
    sharing = {"share_prompts": True} if kind == "shared" else {}
    return list(prepare_batches(config, load_tokenizer("tiny"), 3, 0, **sharing))


@pytest.mark.first(len(SHORT))
@pytest.mark.parametrize(
    ("kind", "layout"),
    SHORT + [case for case in CASES if case not in SHORT],
    ids=lambda one: one if isinstance(one, str) else " ".join(map(str, one.values())),
)
def test_each_value_stands_beside_its_token(
    tones: list[Tensor], kind: str, layout: dict[str, Any], write: Any, tmp_path: Path
) -> None:
    """Through truncation, packing, shared prompts, held-out rows, worker processes and the cache on disk."""
    found = []
    for _ in range(2):  # the second start reads the cache
        batches, held_out = prepared(kind, layout, write, tmp_path)
        taken = [*batches.take(batches.batches_per_epoch), *held_out]
        found.append([batch.inputs["tone"] for batch in taken])
        for part in (batches.layout, held_out.layout):
            for document in part.columns:
                number = int(document.per_token["tone"][-1] - 1) // IDS // PLACES // 2
                assert document.per_document["marks"].tolist() == (np.arange(number % 4) + number).tolist()
    assert all(map(torch.equal, *found))
    model, places = load_model("tiny"), list[int]()
    with torch.no_grad():
        for batch in taken:
            for one in filter(None, (batch, getattr(batch, "mismatched", None))):
                model(**one.inputs)
                assert "marks" not in one.inputs
            for text in texts_of(batch):
                places += text.tolist()
                steps = text.diff()
                if kind != "sft":  # the prompt's values are the chosen text's: one step to the other side
                    steps = steps[steps != PLACES + 1]
                assert (steps == 1).all() or layout["packing"] == "wrapped"
            halves = [batch.part_of_rows(i, 2).inputs["tone"] for i in range(2)]
            assert torch.equal(torch.cat(halves, 1), batch.inputs["tone"])
    assert len(tones) == len(taken) * (2 if kind == "unpaired" else 1)
    if kind == "sft" and layout["packing"] != "none":  # packed rows lose no token but those of truncation
        everything = {place for part in (batches, held_out) for place in _places(part.layout.columns)}
        assert set(places) == everything
        assert len(places) == len(everything)


@pytest.mark.parametrize("on_bad_row", ["skip", "raise"])
def test_a_row_without_its_column_is_a_bad_row(monkeypatch: Any, write: Any, tmp_path: Path, on_bad_row: str) -> None:
    class Refusing(SFTReader):
        def with_columns(self, row: Any, documents: Any) -> Any:
            if row.fields["completion"].startswith("3c"):
                raise ValueError(f"{row.place}: no tone")
            return documents

    monkeypatch.setattr(type(import_module("lean_ft.data.sft").OBJECTIVE), "reader", Refusing)
    config = SFTDataConfig(source=write(ROWS), cache_dir=tmp_path, chat=False, num_processes=1, on_bad_row=on_bad_row)
    if on_bad_row == "raise":
        with pytest.raises(ValueError, match="row 4: no tone|line 4: no tone"):
            prepare_batches(config, load_tokenizer("tiny"), 3, 0)
    else:
        report = prepare_batches(config, load_tokenizer("tiny"), 3, 0)[0].report
        assert (report.kept, report.bad_rows) == (len(ROWS) - 1, 1)


def _places(columns: Columns) -> list[int]:
    return [place for document in columns for place in ((document.per_token["tone"] - 1) // IDS).tolist()]


@pytest.mark.long
def test_other_models_and_other_passes_get_the_column(tones: list[Tensor], write: Any, tmp_path: Path) -> None:
    """A teacher in memory and its cache, references, a quantized model's held-out loss, and batches of KTO."""

    def passes(recipe: str, rows: list[Any], *settings: str) -> int:
        tones.clear()
        given = (f"data.source={write(rows)}", "data.max_length=48", "data.chat=false", "max_steps=2", "batch_size=4")
        run_recipe(recipe, Path(mkdtemp(dir=tmp_path)), *TINY, *given, *settings)
        return len(tones)

    assert passes("finetune", ROWS, "data.packing=bfd", "eval_answers=0") == 2
    assert passes("distill", ROWS, "distill.teacher=tiny") == 4
    assert passes("dpo", PAIRS, "reference.kind=model", "data.shared_prompt=true") == 4
    assert passes("dpo", PAIRS, "reference.kind=cached", f"data.cache_dir={tmp_path}", "epochs=1") == 4
    assert passes("kto", PAIRS, "reference.kind=model") >= 4

    source = write(ROWS)
    data = SFTDataConfig(source=source, max_length=48, chat=False)
    batches, _ = prepare_batches(data, load_tokenizer("tiny"), 4, 0)
    tones.clear()
    mean_loss(load_model("tiny"), batches.take(2))
    assert len(tones) == 2
    tones.clear()
    keep_teacher(KeepTeacherConfig(model={"path": "tiny"}, data=data, destination=tmp_path / "kept", batch_size=8))
    assert len(tones) == 3
    assert passes("distill", ROWS, f"distill.cached={tmp_path / 'kept'}") == 2


def test_equal_ids_with_other_values_are_other_texts() -> None:
    ids, trained = np.arange(5, dtype=np.int32), np.arange(5) > 2
    text = Document(ids, trained)
    others = [
        replace(text, per_token={"tone": np.arange(5)}),
        replace(text, per_token={"tone": np.arange(5) + 1}),
        replace(text, per_document={"sizes": np.array([3, 4])}),
        replace(text, per_document={"sizes": np.array([4, 3])}),
        Document(ids[:4], trained[:4]),
    ]
    columns = [Columns.join([one]) for one in (text, *others)]
    assert len({one.content() for one in columns}) == len({int(one.digests()[0]) for one in columns}) == 6
    labeled = Columns.join([replace(text, per_document={"row_values": np.array([0.5])})])  # the model does not read it
    assert labeled.content() == columns[0].content()
    assert identity([3, 1]) == np.array([3, 1], dtype="<i4").tobytes() != identity([3, 1], {"x": np.array([1])})


@dataclass(frozen=True, kw_only=True)
class WeighedBatch(Batch):
    at_labels: Tensor  # (N, 2)
    in_rows: Tensor  # (B, T, 2)


class Weighed(Objective):
    """Two numbers per token, which only the loss reads: the token's id, and twice the id."""

    reader = SFTReader
    batch_type = WeighedBatch
    of_loss = (*OF_LOSS, "pair")

    def full(self, document: Document) -> Document:
        return replace(document, per_token={"pair": np.stack([document.ids, 2 * document.ids], 1)})

    def token_fields(self, columns: Columns, placed: Any, epoch: int) -> dict[str, Any]:
        return {"at_labels": placed.of_labels("pair"), "in_rows": placed.in_rows("pair")}


class Forgetful(Weighed):
    def full(self, document: Document) -> Document:
        return document


@pytest.mark.parametrize("kind", ["padded", "flat"])
def test_a_loss_reads_a_column_at_its_labels_and_in_rows(kind: Any) -> None:
    lengths = (5, 3, 8)
    documents = [
        Weighed().full(Document(np.arange(n, dtype=np.int32) + 10 * n, np.arange(n) % 3 != 1)) for n in lengths
    ]
    row_tokens = max(lengths) if kind == "padded" else sum(lengths)
    batch = batch_of(documents, Weighed(), pad_id=0, kind=kind, row_tokens=row_tokens)
    assert isinstance(batch, WeighedBatch) and "pair" not in batch.inputs
    labels = batch.labels[batch.labels >= 0]
    assert len(labels) == batch.num_targets > 0
    assert torch.equal(batch.at_labels, torch.stack([labels, 2 * labels], 1).to(batch.at_labels.dtype))
    ids = torch.where(batch.is_token, batch.input_ids, 0)
    assert torch.equal(batch.in_rows, torch.stack([ids, 2 * ids], 2).to(batch.in_rows.dtype))


def test_a_plan_has_the_columns_that_full_adds_and_the_error_of_a_missing_one_names_it() -> None:
    class WeighedData(SFTDataConfig):
        objective = Weighed()

    class ForgetfulData(SFTDataConfig):
        objective = Forgetful()

    batch = largest_batch(WeighedData(source="x.jsonl", max_length=16), 2)
    assert isinstance(batch, WeighedBatch)
    assert batch.in_rows.shape == (2, 16, 2) and batch.at_labels.shape == (batch.num_targets, 2)
    with pytest.raises(ValueError, match=r"no column `pair` of tokens\. .*`Objective.full`"):
        largest_batch(ForgetfulData(source="x.jsonl", max_length=16), 2)
