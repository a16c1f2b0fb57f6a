"""Completions of prompts with images."""

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lean_ft.data.columns import Document
from lean_ft.data.images import read_image, with_columns
from lean_ft.generation import Sampling, open_model, sample, sample_numbers, sample_steps
from lean_ft.images.rules import ImageRules, image_rules
from lean_ft.models import Decoder, load_model
from tests.generation.test_turns import Delayed
from tests.models.vision.documents import CASES, IMAGE, Case, draw_all, reference, save
from tests.models.vision.documents import Document as Drawn
from tests.training.image_runs import model_folder

NEW = 8


@pytest.fixture(scope="module", params=[name for name in ("qwen3_vl", "qwen3_5", "gemma3") if name in CASES])
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="module")
def loaded(case: Case, tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, ImageRules]:
    folder = save(case, tmp_path_factory.mktemp(case.name))
    return load_model(folder, images="frozen"), image_rules(folder)


def as_prompt(drawn: Drawn, rules: ImageRules) -> Document:
    images = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in drawn.images]
    text = Document(np.array(drawn.ids, dtype=np.int32), np.zeros(len(drawn.ids), dtype=bool))
    return with_columns(text, [read_image(image, Path(), rules) for image in images], rules, IMAGE)


def greedy_of_transformers(case: Case, drawn: Drawn) -> list[int]:
    model: Any = reference(case)
    if hasattr(model.model, "rope_deltas"):
        model.model.rope_deltas = None
    ids = torch.tensor([drawn.ids])
    options = {
        "do_sample": False,
        "min_new_tokens": NEW,
        "max_new_tokens": NEW,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    given = case.inputs(case, drawn.images, ids) | {"attention_mask": torch.ones_like(ids)}
    with torch.no_grad():
        return model.generate(ids, **options, **given, suppress_tokens=[IMAGE, IMAGE + 1])[0, ids.shape[1] :].tolist()


@pytest.fixture
def model(loaded: tuple[Decoder, ImageRules], monkeypatch: pytest.MonkeyPatch) -> Decoder:
    """The model, which never chooses an image token."""
    model = loaded[0]
    logits = model.logits
    suppressed = torch.tensor([IMAGE, IMAGE + 1])
    monkeypatch.setattr(model, "logits", lambda hidden: logits(hidden).index_fill(-1, suppressed, -torch.inf))
    return model


@pytest.mark.first
def test_greedy_tokens_are_those_of_transformers(case: Case, loaded, model: Decoder):
    drawn, rules = draw_all(case, [2, 0, 1, 1], seed=3), loaded[1]
    prompts, expected = [as_prompt(one, rules) for one in drawn], [greedy_of_transformers(case, one) for one in drawn]
    row_gib = model.cache_bytes(1, max(map(len, prompts)) + NEW) / 2**30
    for rows in (4, 2):  # with a cache of 2 rows, the others wait
        found = sample(model, prompts, Sampling(NEW), cache_gib=rows * row_gib)
        assert [one.ids for one in found] == expected
    # The first part would end inside of an image.
    steps = list(sample_steps(model, prompts[:1], Sampling(NEW), prompt_part=9))
    assert [token for (token,) in steps if token is not None] == expected[0]


@pytest.mark.long
def test_turns_after_images_are_those_of_whole_texts(case: Case, loaded, model: Decoder):
    prompts = [as_prompt(one, loaded[1]) for one in draw_all(case, [2, 0, 1, 1], seed=3)]
    given, stops, expected = [7, 3, 9, 4, 11], frozenset(range(0, 2 * IMAGE, 3)), []
    for prompt in prompts:
        ids, left, turn = list[int](), 3 * NEW, 1
        while True:
            (one,) = sample(model, [prompt.continued(ids)], Sampling(left, stop_ids=stops))
            ids, left = ids + one.ids, left - len(one.ids)
            if turn == 3 or not one.ended or not left:
                break
            ids, turn = ids + given, turn + 1
        expected.append(ids)
    replies = Delayed(1, [0, 1, 2, 3], lambda place, turn: given if turn < 3 else None)
    found = sample(model, prompts, Sampling(3 * NEW, stop_ids=stops), replies=replies, max_given_tokens=10)
    assert [one.ids for one in found] == expected and any(False in one.sampled for one in found)


@pytest.mark.long
def test_samples_do_not_depend_on_the_other_rows(case: Case, loaded, model: Decoder):
    prompts = [as_prompt(one, loaded[1]) for one in draw_all(case, [1, 0, 2, 1], seed=5)]
    asked = [i for i in range(len(prompts)) for _ in range(2)]
    sampling, numbers = Sampling(NEW, temperature=1.3, seed=4), [i % 2 for i in range(len(asked))]

    def drawn(order: list[int]) -> dict[tuple[int, int], list[int]]:
        rows = [prompts[asked[i]] for i in order]
        found = sample(model, rows, sampling, numbers=[numbers[i] for i in order])
        return {(asked[i], numbers[i]): one.ids for i, one in zip(order, found, strict=True)}

    alone = {key: ids for i in range(len(asked)) for key, ids in drawn([i]).items()}
    for trial in range(3):
        order = random.Random(trial).sample(range(len(asked)), 5)
        assert drawn(order).items() <= alone.items()


@pytest.mark.first
def test_an_image_is_encoded_once_for_all_completions_of_its_prompt(case: Case, loaded, model: Decoder):
    (drawn,) = draw_all(case, [1])
    grids = []
    assert model.vision is not None
    handle = model.vision.register_forward_pre_hook(lambda tower, given: grids.append(given[1]))
    sample(model, [as_prompt(drawn, loaded[1])] * 4, Sampling(NEW, temperature=1.0))
    handle.remove()
    assert [len(some) for some in grids] == [1]


@pytest.mark.first
def test_equal_ids_with_different_images_are_different_prompts(case: Case, loaded, model: Decoder):
    (drawn,) = draw_all(case, [1])
    other = drawn._replace(images=[255 - image for image in drawn.images])
    prompts = [as_prompt(one, loaded[1]) for one in (drawn, other, drawn)]
    assert np.array_equal(prompts[0].ids, prompts[1].ids)
    assert sample_numbers(prompts) == [0, 0, 1]
    # Even tokens of a model that ignores its input differ, because the random keys do.
    model.logits = lambda hidden: torch.zeros(len(hidden), 90)  # type: ignore[method-assign]
    first, second, third = (
        one.ids for one in sample(model, prompts, Sampling(NEW, temperature=1.0), numbers=[0, 0, 0])
    )
    assert first == third != second
    # A text has the same key with and without columns of images.
    ids = list(range(20))
    text = as_prompt(Drawn(ids, [], []), loaded[1])
    of_text, alone = (sample(model, [prompt], Sampling(NEW, temperature=1.0))[0].ids for prompt in (text, ids))
    assert of_text == alone


def test_a_broken_processor_file_is_named_unless_the_model_reads_texts_alone(tmp_path: Path):
    folder = model_folder("gemma3", tmp_path)
    file = folder / "preprocessor_config.json"
    for images in ("auto", "frozen", "none"):
        model, tokenizer = open_model(folder, images=images)
        assert (model.vision is None) == (not tokenizer.media) == (images == "none")
    file.write_text('{"do_pan_and_scan": true}')
    message = re.escape(f"{file}: do_pan_and_scan is True; expected False")
    with pytest.raises(ValueError, match=f"{message}.* set model.images=none"):
        open_model(folder)
    with pytest.raises(ValueError, match=message):
        open_model(folder, images="frozen")
    assert open_model(folder, images="none")[0].vision is None
    file.unlink()
    assert open_model(folder)[0].vision is None
