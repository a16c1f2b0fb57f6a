"""Rows with images: their ids equal those of transformers' processors, and batches show each document the images of its
row."""

import base64
import hashlib
import io
import json
import os
import random
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import Qwen3VLModel
from typer.testing import CliRunner

from lean_ft.cli.main import app
from lean_ft.data import Batch, Batches, largest_batch, prepare_batches, prompt_rows
from lean_ft.data.documents import renderer_of
from lean_ft.data.images import ImageKind, has_images, rules_in
from lean_ft.data.report import DataReport
from lean_ft.data.rows import Row
from lean_ft.images.pixels import Upright
from lean_ft.images.reading import Size, decoded, open_image, reference
from lean_ft.notebook import _write_rows
from lean_ft.settings import (
    ClassificationDataConfig,
    ModelConfig,
    PreferenceDataConfig,
    PromptDataConfig,
    SFTDataConfig,
    UnpairedDataConfig,
)
from lean_ft.tokenizers import Tokenizer, load_tokenizer
from tests.data.image_folders import WRITTEN, make_folder
from tests.images.their_processors import TheirProcessor, empty_torchvision

SIZES = {"wide.png": (130, 60), "tall.png": (50, 150), "dot.png": (1, 1), "wide2.png": (131, 60)}
ANSWER = {"role": "assistant", "content": "a cat"}


class Family(NamedTuple):
    name: str
    tokenizer: Tokenizer
    theirs: Any
    """The tokenizer of transformers."""
    pictures: Path
    """Folder of pictures and of rows."""

    @property
    def image_id(self) -> int:
        rules = rules_in(self.tokenizer)
        assert rules is not None
        return self.theirs.convert_tokens_to_ids(rules.token)

    def write(self, *rows: Any) -> str:
        path = self.pictures / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    def documents(self, row: dict[str, Any], kind: Any = SFTDataConfig, **settings: Any) -> Any:
        """The documents of one row, and the report."""
        config = kind.model_validate({"source": self.write(row), **settings})
        return renderer_of(config, self.tokenizer, config.source)([Row(row, "row 1", folder=self.pictures)])

    def expected_ids(self, messages: list[Any], names: list[str], prompt: bool = False) -> list[int]:
        """The ids of a chat by transformers: its template, its processor's text of each image, its tokenizer."""
        written = self.theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        rules = rules_in(self.tokenizer)
        assert rules is not None
        first, *pieces = written.split(rules.placeholder)
        with empty_torchvision():
            processor = TheirProcessor(self.name)
            for name, piece in zip(names, pieces, strict=True):
                first += processor(Image.open(self.pictures / name))[1] + piece
        return self.theirs(first, add_special_tokens=False)["input_ids"]


@pytest.fixture(scope="module")
def family_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    @cache
    def made(name: str) -> Family:
        folder = tmp_path_factory.mktemp(name)
        theirs = make_folder(folder / "model", name)
        draw = np.random.default_rng(0)
        for picture, (width, height) in SIZES.items():
            Image.fromarray(draw.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(folder / picture)
        tokenizer = load_tokenizer(ModelConfig(path=str(folder / "model"), images="frozen"))
        return Family(name, tokenizer, theirs, folder)

    return made


@pytest.fixture(scope="module", params=WRITTEN)
def family(request: pytest.FixtureRequest, family_of: Callable[[str], Family]) -> Family:
    return family_of(request.param)


@pytest.fixture(scope="module")
def qwen(family_of: Callable[[str], Family]) -> Family:
    """For tests that need one family."""
    return family_of("qwen3_vl")


# Rows -----------------------------------------------------------------------------------------------------------------


def image(**value: Any) -> dict[str, Any]:
    return {"type": "image", **value}


def text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def asked(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def forms(pictures: Path) -> dict[str, tuple[dict[str, Any], list[Any]]]:
    """Rows with the images wide.png and tall.png in this order, and the messages that they are."""
    wide, tall = ((pictures / name).read_bytes() for name in ("wide.png", "tall.png"))
    encoded, of_tall = base64.b64encode(wide).decode(), base64.urlsafe_b64encode(tall).decode()
    between = [asked(text("one\n\n"), image(), text("\n"), image(), text("\n\ntwo"))]
    marks = "one\n\n<image>\n<image>\n\ntwo"
    names, before = ["wide.png", "tall.png"], [asked(image(), image(), text("\n what?"))]

    def parts(*values: dict[str, Any]) -> dict[str, Any]:
        first, second = values
        return {"messages": [asked(text("one\n\n"), first, text("\n"), second, text("\n\ntwo")), ANSWER]}

    return {
        "paths": (parts(image(path="wide.png"), image(image=str(pictures / "tall.png"))), between),
        "base64": (parts(image(base64=encoded), image(url="tall.png", text=None)), between),
        "OpenAI": (
            parts(
                {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}", "detail": "low"}},
                {"type": "image_url", "image_url": "tall.png"},
            ),
            between,
        ),
        "texts in base64": (
            parts(image(), image()) | {"images": [encoded, base64.encodebytes(tall).decode()]},
            between,
        ),
        "base64 in parts": (parts({"image": encoded}, {"type": "image_url", "image_url": {"url": of_tall}}), between),
        "datasets in JSON": (parts(image(), image()) | {"images": [{"bytes": encoded}, {"base64": of_tall}]}, between),
        "Anthropic": (
            parts(
                image(source={"type": "base64", "media_type": "image/png", "data": encoded}),
                image(source={"type": "url", "url": f"data:image/png;base64,{of_tall}"}),
            ),
            between,
        ),
        "bytes": (parts(image(bytes=wide), image(image={"bytes": tall, "path": None})), between),
        "Qwen": (parts({"image": "wide.png"}, {"image": f"file://{pictures}/tall.png"}), between),
        "column": (parts(image(), image()) | {"images": names}, between),
        "datasets": (
            parts(image(), image()) | {"images": [{"bytes": wide, "path": "x"}, {"path": "tall.png"}]},
            between,
        ),
        "half a column": (parts(image(path="wide.png"), image()) | {"image": "tall.png"}, between),
        "marks": ({"messages": [{"role": "user", "content": marks}, ANSWER], "images": names}, between),
        "JSON": ({"messages": [{"role": "user", "content": marks}, ANSWER], "images": json.dumps(names)}, between),
        "ShareGPT": (
            {"conversations": [{"from": "human", "value": marks}, {"from": "gpt", "value": "a cat"}], "images": names},
            between,
        ),
        "prompts": ({"prompt": marks, "completion": "a cat", "images": names}, between),
        "Alpaca": (
            {"instruction": "one", "input": "<image>\n<image>\n\ntwo", "output": "a cat", "images": names},
            between,
        ),
        "TRL": ({"messages": [{"role": "user", "content": "\n what?"}, ANSWER], "images": names}, before),
        "TRL prompt": (
            {"prompt": [{"role": "user", "content": "\n what?"}], "completion": [ANSWER], "images": names},
            before,
        ),
    }


@pytest.mark.first
def test_ids_of_every_form_equal_those_of_transformers(family: Family) -> None:
    for name, (row, messages) in forms(family.pictures).items():
        [document], report = family.documents(row) if name not in ("bytes", "datasets") else with_bytes(family, row)
        expected = family.expected_ids([*messages, ANSWER], ["wide.png", "tall.png"])
        assert document.ids.tolist() == expected, name
        assert family.tokenizer.decode(document.ids[document.trained].tolist()) == "a cat<|im_end|>", name
        assert [*report.unread] == (["messages.content.detail"] if name == "OpenAI" else [])
        is_image = document.ids == family.image_id
        assert document.per_token["image_row"][is_image].tolist() == list(range(1, is_image.sum() + 1))
        assert not document.per_token["image_row"][~is_image].any()
        everything = with_bytes(family, row, train_on="all")[0][0]
        assert not everything.trained[is_image].any()
        assert everything.trained.sum() > 20


def with_bytes(family: Family, row: dict[str, Any], **settings: Any) -> Any:
    config = SFTDataConfig.model_validate(
        {"source": family.write({"messages": [ANSWER]}), "format": format_of(row), **settings}
    )
    return renderer_of(config, family.tokenizer, config.source)([Row(row, "row 1", folder=family.pictures)])


def format_of(row: dict[str, Any]) -> str:
    of = {"messages": "messages", "conversations": "sharegpt", "instruction": "alpaca", "prompt": "prompt_completion"}
    return next(name for field, name in of.items() if field in row)


@pytest.mark.first
def test_rows_of_other_objectives_equal_those_of_transformers(family: Family) -> None:
    names = ["wide.png", "tall.png"]
    messages = [asked(text("see "), image(), image(), text(" what?"))]
    prompt = "see <image><image> what?"
    no = {"role": "assistant", "content": "no"}
    both = [
        family.expected_ids([*messages, answer], names)[:-1] for answer in (ANSWER, no)
    ]  # without the last line break
    asked_alone = family.expected_ids(messages, names, prompt=True)
    cases: list[tuple[Any, dict[str, Any], list[list[int]]]] = [
        (PreferenceDataConfig, {"prompt": prompt, "chosen": "a cat", "rejected": "no"}, both),
        (PreferenceDataConfig, {"chosen": [{"role": "user", "content": prompt}, ANSWER], "rejected": [{"role": "user",
            "content": prompt}, no]}, both),
        (UnpairedDataConfig, {"prompt": prompt, "completion": "a cat", "label": True}, both[:1]),
        (UnpairedDataConfig, {"prompt": prompt, "chosen": "a cat", "rejected": "no"}, both),
        (ClassificationDataConfig, {"text": prompt, "label": "x"}, [asked_alone]),
    ]  # fmt: skip
    for kind, row, expected in cases:
        documents, _ = family.documents(row | {"images": names}, kind)
        assert [document.ids.tolist() for document in documents] == expected
        for document in documents:
            assert len(document.per_document["image_tiles"]) == 2
    config = PromptDataConfig(
        source=family.write({"prompt": prompt, "images": names, "answer": 4}, {"prompt": "hi"}),
        shuffle=False,
        max_prompt_length=2000,
    )
    prompts, _ = prompt_rows(config, family.tokenizer, seed=0)
    assert prompts[0].ids == asked_alone
    assert prompts[0].columns == {"images": names, "answer": 4}
    assert [has_images(prompt.text) for prompt in prompts] == [True, False]


def test_positions_equal_those_of_transformers(qwen: Family) -> None:
    model: Any = Qwen3VLModel
    config = SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2))
    theirs = SimpleNamespace(
        config=config, get_vision_position_ids=model.get_vision_position_ids.__get__(SimpleNamespace(config=config))
    )
    for names in ([], ["wide.png"], ["tall.png", "wide.png", "dot.png"]):
        row = {"messages": [asked(*(image(path=name) for name in names), text("q")), ANSWER]}
        [document], _ = qwen.documents(row)
        is_image = torch.tensor(document.ids == qwen.image_id, dtype=torch.int32)
        grids = torch.tensor(document.per_document["image_grids"]).reshape(-1, 2)
        grids = torch.cat([torch.ones(len(grids), 1, dtype=torch.int32), grids], 1)
        positions, _ = model.get_rope_index(
            theirs, torch.tensor(document.ids)[None].long(), is_image[None], grids if names else None
        )
        assert (np.arange(len(document)) + document.per_token["position_shift"]).tolist() == positions[0, 0].tolist()


REFUSED = [
    ({"images": ["wide.png"]}, "has 1 image in its field `images`, and its texts have <image> 2 times"),
    ({"images": ["wide.png"] * 3}, "has 3 images in its field `images`, and its texts have <image> 2 times"),
    ({"images": ["wide.png"] * 2, "image": "tall.png"}, "has the fields `images` and `image`. Keep one"),
    ({"messages": [asked(image(), text("q")), ANSWER]},
        "has 0 images in its field `images`, and 1 empty content part of the type image"),
    ({"messages": [asked(image(path="wide.png")), ANSWER], "images": ["wide.png"]},
        "1 image in its field .* and 0 empty content parts"),
    ({"messages": [asked({"type": "video", "video": "a.mp4"}), ANSWER]},
        "of the type video; only text and images are read"),
    ({"messages": [asked({"type": "input_audio"}), ANSWER]}, "content part of the type input_audio"),
    ({"messages": [asked({"type": "tool"}), ANSWER]}, "neither text nor an image"),
    ({"messages": [asked(text("\ud800"), image(path="wide.png")), ANSWER]}, "half a surrogate pair"),
    ({"messages": [{"role": "user", "content": "q", "images": ["wide.png"]}, ANSWER]},
        "a message has the key `images`"),
    ({"messages": [ANSWER], "image": "wide.png"}, "has an image and no user message"),
    ({"messages": [asked(image(path="wide.png", max_pixels=1024)), ANSWER]},
        "`max_pixels`, and all images .*data.image_tokens"),
    ({"messages": [asked(image(image={"path": "wide.png", "resized_height": 32})), ANSWER]},
        "`resized_height`, and all images"),
    ({"messages": [asked(image(path="wide.png", url="tall.png")), ANSWER]},
        "has a content part with the images url and path. Keep"),
    ({"messages": [asked(image(path="wide.png", text="cat")), ANSWER]}, "an image and a text. Write two parts"),
    ({"messages": [asked(image(index=1)), ANSWER], "images": ["wide.png"]},
        "have the `index` 1. Give each empty part an index from 0"),
    ({"messages": [asked(image(index=0), image()), ANSWER], "images": ["wide.png"] * 2}, "have the `index` 0. Give"),
    ({"messages": [asked(image(index="0")), ANSWER], "images": ["wide.png"]},
        "the `index` '0'; expected a whole number"),
    ({"messages": [asked(text("q")), ANSWER], "img": "wide.png"},
        "`img`, which looks like an image, .*data.columns.images=img"),
    ({"messages": [asked(text("q")), ANSWER], "crop": "data:image/png;base64,AAAA"},
        "`crop`, which looks like an image"),
    ({"videos": ["a.mp4"]}, "the field `videos`, and only text and images are read"),
]  # fmt: skip
UNREADABLE = {
    "missing.png": "No such file",
    "http://example.org/cat.png": "URLs are not fetched",
    "rows.jsonl": "in none of the formats",
    "": "",
    "../": "not a regular file",
    "data:image/png;base64,AAAA": "in none of the formats",
}


def test_bad_rows_name_their_fault(qwen: Family) -> None:
    row = {"messages": [{"role": "user", "content": "<image> and <image>"}, ANSWER]}
    for extra, message in REFUSED:
        with pytest.raises(ValueError, match=f"row 1: .*{message}"):
            qwen.documents(row | extra)
    pair = {"prompt": "q", "chosen": [asked(image(path="wide.png")), ANSWER], "rejected": [asked(text("q")), ANSWER]}
    with pytest.raises(ValueError, match="an image behind the prompt|must begin with the same messages"):
        qwen.documents(pair, PreferenceDataConfig)
    for bad in ({"text": "<|image_pad|>"}, {"input_ids": [qwen.image_id, 1]}):
        with pytest.raises(ValueError, match="1 image tokens <|image_pad|>, and its images need 0"):
            qwen.documents(bad)
    with pytest.raises(ValueError, match="has the field `image`, and images are read from chats"):
        qwen.documents({"text": "t", "image": "wide.png"})
    with pytest.raises(ValueError, match="the field `image`, which needs a chat template"):
        qwen.documents({"prompt": "q", "completion": "a", "image": "wide.png"}, chat=False)
    for path, reason in UNREADABLE.items():
        rows = {
            "messages": [asked(image(path="wide.png"), image(image={"path": path} if path else [1]), text("q")), ANSWER]
        }
        with pytest.raises(ValueError, match=f"row 1: .*{reason}.* To skip such rows, set data.on_bad_row=skip"):
            qwen.documents(rows)
        documents, report = qwen.documents(rows, on_bad_row="skip")
        assert not documents
        assert (report.bad_rows, report.unreadable, report.dropped) == (1, {"image": 1}, {})
        assert f"1 unreadable row skipped (first: row 1: {'an image is' if not path else ''}" in str(report)
        assert reason in str(report)


def test_missing_images_count_towards_the_most_bad_rows(qwen: Family) -> None:
    source = qwen.write(*[row_of(["gone.png"], "q")] * 7, row_of(["wide.png"], "q"))

    def report(**settings: Any) -> DataReport:
        config = SFTDataConfig.model_validate({"source": source, "cache_dir": qwen.pictures / "cache bad", **settings})
        return prepare_batches(config, qwen.tokenizer, batch_size=1, seed=0)[0].report

    with pytest.raises(ValueError, match=r"rows.jsonl, line 1: cannot read the image .*gone.png.*: No such file"):
        report()
    with pytest.raises(ValueError, match=r"more than data.max_bad_rows=6 rows cannot be read[\s\S]*No such file"):
        report(on_bad_row="skip", max_bad_rows=6)
    found = report(on_bad_row="skip", max_bad_rows=7)
    assert (found.kept, found.bad_rows, found.left_out) == (1, 7, "7 of 8 rows were not used: 7 (unreadable)")


def test_the_index_of_a_part_is_its_image_in_the_field(qwen: Family) -> None:
    parts = [image(index=1), image(index=0), text("q"), image(index=1.0)]
    [document], report = qwen.documents({"messages": [asked(*parts), ANSWER], "images": ["wide.png", "tall.png"]})
    [expected], _ = qwen.documents(
        {"messages": [asked(image(path="tall.png"), image(path="wide.png"), text("q"), image(path="tall.png")), ANSWER]}
    )
    assert document.identity == expected.identity
    assert not report.unread
    [own], report = qwen.documents({"messages": [asked(image(path="wide.png", index=7)), ANSWER], "img": "tall.png"})
    assert has_images(own)
    assert [*report.unread] == ["img", "messages.content.index"]  # a row that shows an image may have further data


def test_a_run_that_reads_images_and_finds_none_names_where_they_may_be(qwen: Family) -> None:
    chat = [asked(text("q")), ANSWER]
    rows = [{"messages": chat, "file_name": "wide.png"}, {"messages": chat, "file_name": None}]

    def batches(*rows: Any, **settings: Any) -> Any:
        config = SFTDataConfig.model_validate({"source": qwen.write(*rows), "num_processes": 1, **settings})
        return prepare_batches(config, qwen.tokenizer, batch_size=1, seed=0)[0].report

    with pytest.raises(
        ValueError,
        match="no row shows an image, while the field `file_name` of 1 row looks like.*data.columns.images=file_name",
    ):
        batches(*rows)
    assert batches(*rows, columns={"images": "file_name"}).of_kinds["image"][0] == 1
    assert [*batches(*rows, {"messages": chat, "images": ["tall.png"]}).unread] == ["file_name"]
    marked = {"messages": [asked(text("<image>q")), ANSWER]}
    with pytest.raises(
        ValueError, match="no row shows an image, and 1 row has <image> in texts. Set data.columns.images=FIELD"
    ):
        batches(marked, {"messages": chat})
    config = PromptDataConfig(source=qwen.write({"prompt": "q", "file_name": "wide.png"}))
    with pytest.raises(ValueError, match="data.columns.images=file_name"):
        prompt_rows(config, qwen.tokenizer, seed=0)


def test_without_images_a_row_with_an_image_is_bad(qwen: Family) -> None:
    text_alone = qwen._replace(tokenizer=load_tokenizer(qwen.tokenizer.folder))
    for _, (row, _) in forms(qwen.pictures).items():
        if "bytes" not in str(row):
            with pytest.raises(
                ValueError, match="row 1: the row has an image, and model.images=none ignores images. Set"
            ):
                text_alone.documents(row)
    [document], _ = text_alone.documents({"messages": [{"role": "user", "content": "a <image>"}, ANSWER]})
    assert not document.per_token
    assert [*document.per_document] == ["row_values"]
    with pytest.raises(ValueError, match="data.image_tokens=9 needs images"):
        text_alone.documents({"messages": [ANSWER]}, image_tokens=9)


def test_typed_control_tokens_stay_text(family: Family) -> None:
    typed = "".join(WRITTEN[family.name][1]) + "<image>"
    row = {"messages": [asked(text(typed), image(path="wide.png"), text(typed)), {**ANSWER, "content": f"{typed}!"}]}
    [document], _ = family.documents(row)
    [plain], _ = family.documents({"messages": [asked(image(path="wide.png")), ANSWER]})
    assert (document.ids == family.image_id).sum() == (plain.ids == family.image_id).sum()
    assert family.tokenizer.decode(document.ids.tolist()).count(typed) == 3


@pytest.mark.parametrize("has_tags", [False, True], ids=["turns", "generation tags"])
def test_no_token_around_an_image_is_trained(family: Family, has_tags: bool, tmp_path: Path) -> None:
    source = str(family.tokenizer.chat_template)
    if has_tags:
        turn = source[source.index("{% if m.content") : source.index("<|im_end|>") + len("<|im_end|>")]
        own = f"{{% generation %}}{turn}{{% endgeneration %}}"
        source = source.replace(turn, f"{{% if m.role == 'assistant' %}}{own}{{% else %}}{turn}{{% endif %}}")
    (file := tmp_path / "template.jinja").write_text(source)
    tokenizer = load_tokenizer(ModelConfig(path=str(family.tokenizer.folder), images="frozen"), file)
    crop = [image(path="wide.png"), text("Here."), image(path="tall.png")]
    row = {"messages": [asked(text("Crop."), image(path="dot.png")), {"role": "assistant", "content": crop}]}
    for train_on in ("completion", "assistant", "last", "all"):
        [document], _ = family._replace(tokenizer=tokenizer).documents(row, train_on=train_on)
        trained = tokenizer.decode(document.ids[document.trained].tolist()).replace("\n", "")
        before = "<|im_start|>userCrop.<|im_end|><|im_start|>assistant" if train_on == "all" else ""
        assert trained == f"{before}Here.<|im_end|>"


def test_a_plain_text_trains_no_token_around_an_image(qwen: Family) -> None:
    [document], _ = qwen.documents({"text": "a<|vision_start|>b"})
    assert qwen.tokenizer.decode(document.ids[document.trained].tolist()) == "ab<|im_end|>"


def test_a_template_must_write_a_placeholder_for_each_image(qwen: Family) -> None:
    row = {"messages": [asked(image(path="wide.png"), text("q")), ANSWER]}
    for source, times, hint in (
        ("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}", 0, "It may read texts only"),
        (
            "{% for m in messages %}<|im_start|>{{ m.content }}<|image_pad|><|im_end|>{% endfor %}",
            2,
            "Set data.chat_template",
        ),
    ):
        (file := qwen.pictures / "template.jinja").write_text(source)
        other = load_tokenizer(ModelConfig(path=str(qwen.tokenizer.folder), images="frozen"), file)
        with pytest.raises(
            ValueError, match=rf"1 image, and the chat template wrote <.image_pad.> {times} times.*{hint}"
        ):
            qwen._replace(tokenizer=other).documents(row)


def test_a_template_that_reads_parts_alone_gets_parts(qwen: Family) -> None:
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}:{% for p in m.content %}{% if p.type == 'image' %}"
        "<|image_pad|>{% else %}{{ p.text }}{% endif %}{% endfor %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
    )
    (file := qwen.pictures / "template.jinja").write_text(source)
    other = load_tokenizer(ModelConfig(path=str(qwen.tokenizer.folder), images="frozen"), file)
    [document], _ = qwen._replace(tokenizer=other).documents(
        {"messages": [asked(image(path="dot.png"), text("q")), ANSWER]}
    )
    assert (
        other.decode(document.ids.tolist()).replace("<|image_pad|>", "")
        == "<|im_start|>user:q<|im_end|><|im_start|>assistant:a cat<|im_end|>"
    )
    assert other.decode(document.ids[document.trained].tolist()) == "a cat<|im_end|>"


# Lengths --------------------------------------------------------------------------------------------------------------


@pytest.mark.first
@pytest.mark.parametrize("side", ["left", "right"])
def test_an_image_is_never_cut(family: Family, side: str) -> None:
    row = {"messages": [asked(text("abc"), image(path="wide.png"), text("de"), image(path="tall.png")), ANSWER,
        asked(text("f"), image(path="wide.png")), ANSWER]}  # fmt: skip
    [whole], _ = family.documents(row)
    rows, reasons = whole.per_token["image_row"], set()
    count = int((rows > 0).sum())
    wide = (
        count
        - int(
            (family.documents({"messages": [asked(image(path="tall.png")), ANSWER]})[0][0].ids == family.image_id).sum()
        )
    ) // 2
    bounds = {0, wide, count - wide, count}
    for length in range(2, len(whole) + 1):
        documents, report = family.documents(row, max_length=length, truncation_side=side, train_on="all")
        kept = slice(0, length) if side == "right" else slice(len(whole) - length, len(whole))
        shown = whole.per_token["image_row"][kept]
        shown = shown[shown > 0]
        fits = not len(shown) or ({int(shown[0]) - 1, int(shown[-1])} <= bounds)
        assert len(documents) == fits, length
        reasons |= set(report.dropped)
        if fits:
            assert documents[0].ids.tolist() == whole.ids[kept].tolist()
            assert documents[0].per_token["image_row"].tolist() == whole.per_token["image_row"][kept].tolist()
    assert reasons == {"a whole image does not fit in max_length"}
    if side == "right":
        last = int(np.flatnonzero(rows)[-1])
        assert not family.documents(row, max_length=last)[0]
        assert family.documents(row, max_length=last + 1)[0]


@pytest.mark.first
def test_the_prompt_of_a_pair_is_never_cut_in_an_image(family: Family) -> None:
    row = {"prompt": "ab<image>cd", "images": ["wide.png"], "chosen": "yes", "rejected": "no"}
    [whole, _], _ = family.documents(row, PreferenceDataConfig)
    places = np.flatnonzero(whole.per_token["image_row"])
    prompt = int(whole.trained.argmax())
    for length in range(1, prompt + 1):
        documents, report = family.documents(row, PreferenceDataConfig, max_prompt_length=length)
        begins = prompt - length
        is_cut = places[0] < begins <= places[-1]
        assert (not documents) == is_cut == ("a whole image does not fit in max_length" in report.dropped)


@pytest.mark.first
def test_image_tokens_limits_images(family: Family) -> None:
    def count(**settings: Any) -> int:
        [document], _ = family.documents({"messages": [asked(image(path="wide.png")), ANSWER]}, **settings)
        return int((document.ids == family.image_id).sum())

    usual, least = count(), {"gemma3": 4, "smolvlm": 16}.get(family.name, 1)
    for limit in range(least, usual + 2):
        assert least <= count(image_tokens=limit) <= limit
    assert count(image_tokens=usual) == count() == usual  # the next settings count
    if least > 1:
        with pytest.raises(ValueError, match=f"data.image_tokens is {least - 1}, but"):
            count(image_tokens=least - 1)


# Batches --------------------------------------------------------------------------------------------------------------

Shown = list[tuple[int, int, str]]
"""Of each token of a document: its id, its position on the time axis, and the pixels that its embedding is made
from."""


def digests(patches: np.ndarray, merge: int) -> list[str]:
    tokens = patches.reshape(-1, merge**2 * patches[0].size)
    return [hashlib.blake2b(one.tobytes(), digest_size=6).hexdigest() for one in tokens]


def expected(family: Family, document: Any, names: list[str]) -> Shown:
    """What a document shows, by its row's pictures."""
    rules = rules_in(family.tokenizer)
    assert rules is not None
    pixels = [decoded(open_image(reference(name, family.pictures))) for name in names]
    colors = [digest for one in pixels for digest in digests(rules.patches(Upright(one)), rules.merge)]
    shift = document.per_token.get("position_shift", np.zeros(len(document), dtype=int))
    rows = document.per_token["image_row"]
    return [(int(i), n + int(shift[n]), colors[rows[n] - 1] if rows[n] else "") for n, i in enumerate(document.ids)]


def shown(family: Family, batch: Batch) -> list[Shown]:
    """What the documents of a batch show, in the order of the batch: by the arguments of the model alone."""
    rules = rules_in(family.tokenizer)
    assert rules is not None
    inputs, colors = batch.inputs, [""] * batch.input_ids.numel()
    if (images := inputs.get("images")) is not None:
        assert sum(rows * columns for rows, columns in images.grids) == len(images.patches) == batch.counted["patches"]
        of_rows = digests(images.patches.numpy(), rules.merge)
        for place, row in zip(images.places.tolist(), images.rows.tolist(), strict=True):
            colors[place] = of_rows[row]
    shift = inputs.get("position_shift", torch.zeros_like(batch.positions)).flatten()
    tokens = [
        *zip(batch.input_ids.flatten().tolist(), (batch.positions.flatten() + shift).tolist(), colors, strict=True)
    ]
    is_token = inputs["is_token"].flatten().tolist()
    if batch.cu_seqlens is None:
        width = batch.input_ids.shape[1]
        spans = [(start, start + width) for start in range(0, len(tokens), width)]
    else:
        bounds = batch.cu_seqlens.tolist()
        spans = [*pairwise(bounds)]
    prefixes = batch.prefixes.tolist() if batch.prefixes is not None else [[0, 0]] * len(spans)
    found = []
    for (start, end), prefix in zip(spans, prefixes, strict=False):
        own = [i for i in range(start, end) if is_token[i]]
        if own:
            found.append([tokens[i] for i in [*range(*prefix), *own]])
    return found


def num_grids(family: Family) -> dict[str, int]:
    rules = rules_in(family.tokenizer)
    assert rules is not None
    return {name: len(rules.layout(Size(*size)).grids) for name, size in SIZES.items()}


def row_of(names: list[str], words: str) -> dict[str, Any]:
    return {"messages": [asked(*(image(path=name) for name in names), text(words)), ANSWER]}


@pytest.mark.first
@pytest.mark.parametrize("number", [12, pytest.param(25, marks=pytest.mark.long)])
def test_batches_show_each_document_the_images_of_its_row(family: Family, number: int):
    @settings(max_examples=number, deadline=None)
    @given(st.data())
    def check(data: Any):
        draw = data.draw
        contents = draw(
            st.lists(
                st.tuples(st.lists(st.sampled_from([*SIZES]), max_size=3), st.text("abc", max_size=9)),
                min_size=1,
                max_size=6,
            )
        )
        packing = draw(st.sampled_from(["none", "bfd", "padding_free"]))
        kind: Any = draw(st.sampled_from([SFTDataConfig, PreferenceDataConfig, UnpairedDataConfig]))
        share = kind is PreferenceDataConfig and draw(st.booleans())
        rows = [row_of(names, words) for names, words in contents]
        if kind is not SFTDataConfig:
            rows = [{"prompt": [row["messages"][0]], "chosen": "yes", "rejected": "no"} for row in rows]
        source, sides = family.write(*rows), 2 if kind is not SFTDataConfig else 1
        config = kind(source=source, packing=packing, max_length=2000, cache_dir=family.pictures / "cache")
        batches, _ = prepare_batches(
            config,
            family.tokenizer,
            batch_size=draw(st.integers(1, 3)),
            seed=0,
            **({"share_prompts": True} if share else {}),
        )
        documents = [family.documents(row, kind)[0] for row in rows]
        flat = [
            expected(family, one, names) for some, (names, _) in zip(documents, contents, strict=True) for one in some
        ]
        tiles, seen = num_grids(family), []
        for batch in batches.take(batches.batches_per_epoch):
            numbers = batch.documents.tolist()
            assert shown(family, batch) == [flat[number] for number in numbers]
            used = {name for number in numbers for name in contents[number // sides][0]}
            assert (batch.counted["patches"] > 0) == bool(used)
            assert len(batch.inputs["images"].grids if used else ()) == sum(tiles[name] for name in used)  # read once
            seen += numbers
            if kind is UnpairedDataConfig:
                mixed = shown(family, batch.mismatched)
                for i, number in enumerate(numbers):
                    begins = [int(documents[n // 2][n % 2].trained.argmax()) for n in (number, numbers[i - 1])]
                    prompt, answer = flat[number][: begins[0]], flat[numbers[i - 1]][begins[1] :]
                    assert mixed[i][: begins[0]] == prompt
                    assert [token[0] for token in mixed[i][begins[0] :]] == [token[0] for token in answer]
                    assert [token[1] for token in mixed[i][begins[0] - 1 :]] == [
                        prompt[-1][1] + n for n in range(len(answer) + 1)
                    ]
        assert sorted(seen) == list(range(len(flat)))

    check()


def many_rows(number: int) -> list[dict[str, Any]]:
    draw = random.Random(0)
    return [row_of(draw.choices([*SIZES], k=draw.randrange(4)), "a" * draw.randrange(300)) for _ in range(number)]


@pytest.mark.first(2)
@pytest.mark.parametrize("packing", ["bfd", "none", "padding_free"])
def test_the_first_two_batches_have_the_most_tokens_and_the_most_patches(qwen: Family, packing: Any) -> None:
    config = SFTDataConfig(
        source=qwen.write(*many_rows(40)), packing=packing, max_length=600, cache_dir=qwen.pictures / "cache"
    )
    for seed in range(3):
        batches, _ = prepare_batches(config, qwen.tokenizer, batch_size=4, seed=seed)
        columns, every = batches.layout.columns, [*batches.first(batches.batches_per_epoch)]
        grids = [
            [columns[int(i)].per_document["image_grids"].reshape(-1, 2) for i in batch.documents] for batch in every
        ]
        patches = [sum(int(one.prod(1).sum()) for one in some) for some in grids]  # with repeats
        assert max(batch.num_tokens for batch in every) == every[0].num_tokens
        assert max(patches) in patches[:2]


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(3, marks=pytest.mark.long)])
def test_batches_built_ahead_are_those_built_when_needed(qwen: Family, ranks: int) -> None:
    """Each rank builds one of so many batches."""
    config = SFTDataConfig(source=qwen.write(*many_rows(23)), cache_dir=qwen.pictures / "cache")

    def fresh() -> Batches:
        return prepare_batches(config, qwen.tokenizer, batch_size=2, seed=0)[0]

    plain = [shown(qwen, batch) for batch in fresh().first(24)]
    for rank in range(ranks):
        batches, found = fresh(), {}
        for first in range(0, 24, 12):
            some = [*batches.take(12)]
            found |= {first + i: shown(qwen, some[i]) for i in range(rank, 12, ranks)}
        assert found == {i: plain[i] for i in found}
        assert len(found) == 24 // ranks


@pytest.mark.first(3)
@pytest.mark.parametrize("kind", [SFTDataConfig, PreferenceDataConfig, UnpairedDataConfig])
def test_the_largest_batch_has_as_many_patches_as_fit(family: Family, kind: Any) -> None:
    rules = rules_in(family.tokenizer)
    assert rules is not None
    long = 600 if family.name == "smolvlm" else 50
    for share in {False, kind is PreferenceDataConfig}:
        batch = largest_batch(kind(source="x", max_length=long), 3, share, [ImageKind(rules)])
        images = batch.inputs["images"]
        least = 3 * long * rules.merge**2 * 2 // 3
        assert (
            least
            <= len(images.patches)
            == sum(rows * columns for rows, columns in images.grids)
            <= 3 * long * rules.merge**2
        )
        assert images.rows.max() + 1 == len(images.patches) // rules.merge**2
        assert images.places.max() < batch.input_ids.numel()
        assert len(images.places.unique()) == len(images.places) == len(images.rows)
        assert ("position_shift" in batch.inputs) == rules.shifts_positions
        assert (
            "images" not in largest_batch(kind(source="x", max_length=2), 3, share, [ImageKind(rules)]).inputs
            or family.name != "gemma3"
        )


@pytest.mark.long
def test_processes_make_the_same_documents(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, found = [row_of(["wide.png"], "a"), row_of(["missing.png"], "a")] * 3, []
    for few in (0, 100):
        monkeypatch.setattr("lean_ft.data.documents.FEW_ROWS", few)
        config = SFTDataConfig(
            source=family.write(*rows), num_processes=2, cache_dir=family.pictures / f"cache {few}", image_tokens=20,
            on_bad_row="skip",
        )  # fmt: skip
        batches, _ = prepare_batches(config, family.tokenizer, batch_size=3, seed=0)
        found.append((batches.layout.columns.content(), str(batches.report), batches.fingerprint))
    assert found[0] == found[1]
    assert "3 unreadable rows skipped (first: " in found[0][1]
    assert "3 images with " in found[0][1]


# Files ----------------------------------------------------------------------------------------------------------------


def repaint(path: Path, size: tuple[int, int], color: str) -> None:
    Image.new("RGB", size, color).save(path)
    os.utime(path, ns=(0, path.stat().st_mtime_ns + random.Random(color).randrange(1 << 40)))


def test_files_that_change_are_read_anew_or_are_an_error(qwen: Family, tmp_path: Path) -> None:
    def batches(folder: str) -> Batches:
        rows = [row_of(["cat.png"], "q"), row_of([], "q")]
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        source = str(tmp_path / folder / "rows.jsonl")
        config = SFTDataConfig(source=source, cache_dir=tmp_path / "cache", on_bad_row="skip")
        return prepare_batches(config, qwen.tokenizer, batch_size=2, seed=0)[0]

    def patches(of: Batches) -> int:
        return len(of.take(1)[0].inputs["images"].patches)

    assert batches("a").report.unreadable == {"image": 1}
    repaint(tmp_path / "a/cat.png", (64, 64), "red")
    first = batches("a")  # the image that was missing is there
    assert first.report.bad_rows == 0
    assert patches(first) == 16
    repaint(tmp_path / "a/cat.png", (64, 128), "blue")
    with pytest.raises(ValueError, match="cat.png: the image changed after the data was prepared"):
        patches(first)
    second = batches("a")
    assert patches(second) == 32
    assert second.fingerprint != first.fingerprint
    assert patches(batches("a")) == 32
    (tmp_path / "b").mkdir()
    repaint(tmp_path / "b/cat.png", (96, 64), "green")  # the same rows in another folder have other images
    assert patches(batches("b")) == 24
    (tmp_path / "a/cat.png").unlink()
    assert batches("a").report.unreadable == {"image": 1}


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_an_image_that_is_broken_behind_its_header_makes_a_bad_row(qwen: Family, tmp_path: Path, kind: str) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (64, 96, 3), dtype=np.uint8)
    for name in ("cut", "whole"):
        Image.fromarray(noise).save(tmp_path / f"{name}.img", kind)
    (tmp_path / "cut.img").write_bytes((tmp_path / "cut.img").read_bytes()[:-100])
    rows = [json.dumps(row_of([f"{name}.img"], "q")) for name in ("cut", "whole")]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    config = SFTDataConfig(source=str(tmp_path / "rows.jsonl"), cache_dir=tmp_path / "cache", on_bad_row="skip")
    batches, _ = prepare_batches(config, qwen.tokenizer, batch_size=1, seed=0)
    assert batches.report.unreadable == {"image": 1}
    assert "cut.img is broken or incomplete" in batches.report.bad_row_examples[0]
    [batch] = batches.take(2)
    assert len(batch.inputs["images"].grids) == 1


def test_images_in_parquet_files_and_datasets(qwen: Family, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    encoded = (qwen.pictures / "wide.png").read_bytes()
    rows = {
        "messages": [[{"role": "user", "content": [image(image=None, text=None), {"type": "text", "text": "q",
            "image": None}]}, {"role": "assistant", "content": [{"type": "text", "text": "a", "image": None}]}]],
        "images": [[{"bytes": encoded, "path": None}]],
    }  # fmt: skip
    dataset = datasets.Dataset.from_dict(rows)
    dataset = dataset.cast_column("images", datasets.List(datasets.Image()))
    dataset.save_to_disk(str(tmp_path / "saved"))
    dataset.to_parquet(str(tmp_path / "rows.parquet"))
    for source in ("saved", "rows.parquet"):
        config = SFTDataConfig(source=str(tmp_path / source), cache_dir=tmp_path / "cache")
        batches, _ = prepare_batches(config, qwen.tokenizer, batch_size=1, seed=0)
        [tokens] = shown(qwen, batches.take(1)[0])
        [document], _ = qwen.documents(
            {"messages": [asked(image(path="wide.png"), text("q")), {"role": "assistant", "content": "a"}]}
        )
        assert tokens == expected(qwen, document, ["wide.png"])


def test_images_in_rows_from_python(qwen: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("LEAN_FT_CACHE", str(tmp_path))
    monkeypatch.chdir(qwen.pictures)  # paths are relative to it
    picture = Image.open(qwen.pictures / "wide.png")
    encoded = (qwen.pictures / "wide.png").read_bytes()
    dataset = datasets.Dataset.from_dict(
        row := {"messages": [[{"role": "user", "content": "q"}, ANSWER]], "image": [encoded]}
    )
    dataset = dataset.cast_column("image", datasets.Image())
    before = dataset.features.copy()
    for rows in ([row_of(["wide.png"], "q")], [{"messages": row["messages"][0], "image": picture}], dataset):
        config = SFTDataConfig(source=str(_write_rows(rows, "data.source")))
        batches, _ = prepare_batches(config, qwen.tokenizer, batch_size=1, seed=0)
        [document], _ = qwen.documents(row_of(["wide.png"], "q"))
        assert shown(qwen, batches.take(1)[0]) == [expected(qwen, document, ["wide.png"])]
    assert dataset.features == before
    with pytest.raises(ValueError, match="a row holds what JSON cannot: Object of type object"):
        _write_rows([{"image": object()}], "data.source")


def test_the_command_line_shows_images(qwen: Family) -> None:
    source = qwen.write(row_of(["wide.png", "tall.png"], "what?"))
    arguments = [source, f"model.path={qwen.tokenizer.folder}", "model.images=frozen"]
    found = CliRunner().invoke(app, ["data", "preview", *arguments])
    assert "[image 130x60, 8 tokens]" in found.output, found.output
    page = qwen.pictures / "page.html"
    CliRunner().invoke(app, ["data", "preview", *arguments, "--html", str(page)])
    pictures = [one.partition('"')[0] for one in page.read_text().split("data:image/jpeg;base64,")[1:]]
    sizes = [Size(*Image.open(io.BytesIO(base64.b64decode(one))).size) for one in pictures]
    assert sizes == [(130, 60), (50, 150)]
    found = CliRunner().invoke(app, ["data", "stats", *arguments])
    assert "2 images with 18 tokens" in found.output
    assert "tokens per image, at most: 50% 8, 99% 10, 100% 10" in found.output


# Random rows ----------------------------------------------------------------------------------------------------------

_VALUES: Any = st.sampled_from(
    [
        None, "", "wide.png", "missing.png", "<image>", "a<image>b", "[", '["tall.png"]', "data:image/png;base64,AA",
        "\ud800",
        "\0", 0, -1, 1.5, True, [], {}, [[]], [None], ["wide.png", "tall.png"], {"bytes": None, "path": "wide.png"},
        {"url": {}},
    ]
)  # fmt: skip
_KEYS = st.sampled_from(["type", "text", "image", "image_url", "url", "path", "bytes", "base64", "detail"])
_TYPES = st.sampled_from(["text", "image", "image_url", "input_image", "video", "file", "", None, 3, []])
_PARTS: Any = st.one_of(
    st.fixed_dictionaries({"type": st.just("image"), "path": st.sampled_from(["wide.png", "tall.png"])}),
    st.fixed_dictionaries({"type": st.just("image")}),
    st.fixed_dictionaries({"type": st.just("text"), "text": st.sampled_from(["", "q", "<image>"])}),
    st.builds(lambda name, others: {**others, "type": name}, _TYPES, st.dictionaries(_KEYS, _VALUES, max_size=3)),
    _VALUES,
)
_CONTENTS = st.one_of(st.lists(_PARTS, max_size=3), _VALUES, st.sampled_from(["q", "<image> q"]))
_MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "assistant", "tool"]), "content": _CONTENTS}),
    max_size=3,
)
_IMAGES = {"images": st.one_of(_VALUES, st.lists(_VALUES, max_size=3)), "image": _VALUES}
_ROWS: dict[Any, Any] = {
    SFTDataConfig: st.one_of(
        st.fixed_dictionaries({"messages": _MESSAGES.map(lambda some: [*some, ANSWER])}, optional=_IMAGES),
        st.fixed_dictionaries({"messages": st.one_of(_MESSAGES, _VALUES)}, optional=_IMAGES),
        st.fixed_dictionaries({"prompt": _CONTENTS, "completion": st.just("a")}, optional=_IMAGES),
    ),
    PreferenceDataConfig: st.fixed_dictionaries(
        {"prompt": st.one_of(_MESSAGES, _CONTENTS), "chosen": st.sampled_from(["yes", [ANSWER]]),
            "rejected": st.just("no")},
        optional=_IMAGES,
    ),
    ClassificationDataConfig: st.fixed_dictionaries({"text": _CONTENTS, "label": st.just("x")}, optional=_IMAGES),
}  # fmt: skip


@pytest.mark.first
@pytest.mark.parametrize("kind", _ROWS)
@pytest.mark.parametrize("number", [60, pytest.param(5000, marks=pytest.mark.long)])
def test_random_rows_are_read_or_refused_with_a_reason(qwen: Family, kind: Any, number: int) -> None:
    others = {"labels": ["x", "y"]} if kind is ClassificationDataConfig else {}
    names = {SFTDataConfig: "messages", PreferenceDataConfig: "preference", ClassificationDataConfig: "classification"}
    source = qwen.write({"messages": [ANSWER], "text": "t", "label": "x", "chosen": "a", "rejected": "b"})
    config = kind(source=source, format=names[kind], **others)
    refused, seen = list[str](), set[str]()

    @settings(max_examples=number, deadline=None, derandomize=True)
    @given(_ROWS[kind])
    def check(fields: dict[str, Any]) -> None:
        its = config.model_copy(update={"format": format_of(fields) if kind is SFTDataConfig else config.format})
        render = renderer_of(its, qwen.tokenizer, its.source)
        try:
            documents, report = render([Row(fields, "row 1", folder=qwen.pictures)])
        except ValueError as error:
            refused.append(str(error))
            return
        seen.update(report.dropped or ["kept"])
        for document in documents:
            shows = len(document.per_document["image_tiles"])
            assert document.per_token["image_row"].max() == (document.ids == qwen.image_id).sum()
            assert (shows > 0) == bool(document.per_token["image_row"].any())

    check()
    assert refused
    assert all(reason.startswith("row 1: ") for reason in refused)
    assert "kept" in seen
    assert any("data.on_bad_row=skip" in reason for reason in refused)
