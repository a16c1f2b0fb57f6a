"""Slices of splits select the same rows as in `datasets`."""

from collections.abc import Callable

import pytest
from datasets.arrow_reader import ReadInstruction
from pydantic import ValidationError

from lean_ft.data import prepare_batches
from lean_ft.data.sources import RowSources
from lean_ft.data.splits import rows_of_split
from lean_ft.settings import DataSource, PromptDataConfig, RowsConfig, SFTDataConfig
from tests.data.conftest import first_rows, read_rows

Write = Callable[..., str]
SLICES = [
    "[:95%]",
    "[95%:]",
    "[33%:66%]",
    "[-5%:]",
    "[:-50%]",
    "[100:200]",
    "[:3]",
    "[7:]",
    "[-3:]",
    "[:-3]",
    "[2:-2]",
    "[:]",
]


@pytest.mark.parametrize("total", [1, 7, 200, 1003])
@pytest.mark.parametrize("part", SLICES)
def test_a_slice_names_the_rows_that_datasets_reads(part: str, total: int) -> None:
    [expected] = ReadInstruction.from_spec(f"train{part}").to_absolute({"train": total})
    first, last = rows_of_split(f"train{part}", lambda: total)
    assert range(total)[first:last] == range(total)[expected.from_ or 0 : total if expected.to is None else expected.to]


@pytest.mark.parametrize(
    "split", ["train[", "train[5]", "train[:150%]", "train[a:b]", "train+test", "", "train[:1%](closest)"]
)
def test_what_is_no_split_is_refused(split: str, write: Write) -> None:
    path = write([{"text": "a"}])
    with pytest.raises(ValueError, match=r"has only the split `train`"):
        list(read_rows([DataSource(path=path, split=split)]))


def test_a_slice_of_several_files_is_of_all_their_rows(write: Write, tmp_path) -> None:
    for name, rows in (("a.jsonl", range(3)), ("b.json", range(3, 10))):
        write([{"text": str(i)} for i in rows], name)
    source = DataSource(path=str(tmp_path / "*.js*"), split="train[20%:40%]")
    assert [row.fields["text"] for row in read_rows([source])] == ["2", "3"]
    assert [row.fields["text"] for row in first_rows([source], 1)] == ["2"]


def test_what_is_held_out_is_not_trained_on(write: Write, plain_tokenizer) -> None:
    path = write([{"text": f"{i:03}"} for i in range(40)])
    held_out = [DataSource(path=path, split="train[90%:]")]
    config = SFTDataConfig(source=path, split="train[:90%]", validation_source=held_out)
    batches, evaluation = prepare_batches(config, plain_tokenizer, batch_size=1, seed=0)
    assert evaluation is not None
    trained, held = (
        {int(plain_tokenizer.decode(batch.input_ids[0])[:3]) for batch in some}
        for some in (batches.take(batches.batches_per_epoch), evaluation)
    )
    assert (trained, held) == ({*range(36)}, {*range(36, 40)})


def test_the_slice_is_part_of_the_fingerprint(write: Write, tmp_path) -> None:
    path = write([{"text": f"row {i}"} for i in range(10)])
    of = {
        split: RowSources.of(SFTDataConfig(source=[DataSource(path=path, split=split)])).content(tmp_path)
        for split in ("train", "train[:5]", "train[5:]")
    }
    assert len(set(of.values())) == 3
    assert of["train"] == RowSources.of(SFTDataConfig(source=path)).content(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"split": "test"}, r"data\.split=test: .*rows\.jsonl is a file, which has only the split `train`"),
        ({"subset": "main"}, r"data\.subset=main: .*rows\.jsonl is a file"),
        ({"split": "train[5:]"}, r"data\.split=train\[5:\]: .*rows\.jsonl has no rows in this slice"),
        ({"streaming": True}, r"data\.streaming=true applies to Hugging Face datasets, but .*rows\.jsonl is a file"),
    ],
)
def test_settings_of_datasets_are_refused_for_files(write: Write, settings: dict, message: str) -> None:
    path = write([{"text": "a"}])
    config = PromptDataConfig(source=path, **settings).rows([])
    for read in (lambda: list(read_rows(path, None, config)), lambda: first_rows(path, 1, config)):
        with pytest.raises(ValueError, match=message):
            read()


def test_a_slice_of_what_is_trained_on_needs_one_of_what_is_held_out() -> None:
    with pytest.raises(ValidationError, match=r"validation_source=b\.jsonl has no split"):
        RowsConfig(source="a.jsonl", split="train[:95%]", validation_source="b.jsonl")
    given = [DataSource(path="b.jsonl", split="train")]
    assert RowsConfig(source="a.jsonl", split="train[:95%]", validation_source=given).validation_source == given
