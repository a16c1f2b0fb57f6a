"""The embedded model with images equals transformers' and its script's, and learns to see."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from lean_ft.data import prepare_batches
from lean_ft.images.reading import decoded, open_image, reference
from lean_ft.models import load_model
from lean_ft.settings import ModelConfig, SFTDataConfig
from lean_ft.settings.text import load_config
from lean_ft.system.catalog import find_preset
from lean_ft.tokenizers import load_tokenizer
from lean_ft.training.answers import answer_held_out
from tests.recipes.conftest import recipe_module

ROOT = Path(__file__).parents[2]
ASSETS = ROOT / "lean_ft" / "assets" / "tiny-images"
DATA = SFTDataConfig(source="tiny-images/train.jsonl.gz", validation_source="tiny-images/validation.jsonl.gz")


def rows(name: str) -> list[dict]:
    return [
        json.loads(line) for line in gzip.decompress((ASSETS / "data" / f"{name}.jsonl.gz").read_bytes()).splitlines()
    ]


def pixels(row: dict) -> np.ndarray:
    with open_image(reference(row["images"][0], ASSETS)) as image:
        return np.asarray(decoded(image)).astype(int)


def dots(row: dict) -> tuple[np.ndarray, np.ndarray]:
    """Which of the 4 x 4 cells have a dot, and the mean color of all dots."""
    picture = pixels(row)
    bright = picture.max(-1) > 100
    return bright.reshape(4, 8, 4, 8).any((1, 3)), picture[bright].mean(0)


def exact_match(path: Path | str, num_questions: int) -> float:
    model = ModelConfig(path=str(path), images="frozen", dtype="float32")
    tokenizer = load_tokenizer(model)
    _, held_out = prepare_batches(DATA, tokenizer, batch_size=32, seed=0)
    return answer_held_out(load_model(model), tokenizer, held_out, num_questions).exact_match


@pytest.mark.long
def test_ids_and_logits_equal_transformers() -> None:
    folder, row = ASSETS / "model", rows("validation")[0]
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    with open_image(reference(row["images"][0], ASSETS)) as image:
        seen = Qwen2VLImageProcessorPil.from_pretrained(folder)(decoded(image), return_tensors="pt")
    asked, answered = row["messages"]
    parts = [{"type": "image"}, {"type": "text", "text": asked["content"]}]
    text = transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template(
        [{"role": "user", "content": parts}, answered], tokenize=False
    )
    num_tokens = int(seen["image_grid_thw"].prod()) // 4
    ids = transformers.AutoTokenizer.from_pretrained(folder)(
        text.replace("<|image_pad|>", "<|image_pad|>" * num_tokens), return_tensors="pt"
    ).input_ids
    is_image = (ids == theirs.config.image_token_id).int()

    model = ModelConfig(path="tiny-images", images="frozen", dtype="float32")
    batch = next(iter(prepare_batches(DATA, load_tokenizer(model), batch_size=1, seed=0)[1]))
    assert batch.input_ids[:, : ids.shape[1]].tolist() == ids.tolist()
    with torch.no_grad():
        ours = load_model(model)(**batch.inputs)[:, : ids.shape[1]]
        expected = theirs(input_ids=ids, mm_token_type_ids=is_image, **seen).logits
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)


@pytest.mark.long
def test_answers_are_those_of_the_pictures() -> None:
    """Counted and named again from the pixels. No held-out picture has the color and the cells of a picture for
    training."""
    names = {"red": "100", "green": "010", "blue": "001", "yellow": "110", "purple": "101", "cyan": "011"}
    seen = {}
    for part, number in (("train", 4800), ("validation", 400)):
        assert len(rows(part)) == number
        for row in rows(part):
            asked, answered = (message["content"] for message in row["messages"])
            cells, color = dots(row)
            if asked == "How many dots are there?":
                assert ["one", "two", "three", "four"][cells.sum() - 1] == answered
            else:
                assert asked == "What color are the dots?"
                assert "".join("1" if value > 120 else "0" for value in color) == names[answered]
            key = (tuple((color > 120).tolist()), cells.tobytes())
            assert seen.setdefault(key, part) == part


@pytest.mark.long
def test_the_base_model_guesses() -> None:
    assert 0.1 < exact_match("tiny-images", 100) < 0.35


@pytest.mark.long
def test_the_preset_learns_to_see(tmp_path: Path) -> None:
    module = recipe_module("finetune")
    settings = (f"output_dir={tmp_path / 'run'}", "plan=false", "device=cpu", "eval_answers=0", "save_every=0")
    module.main(load_config(module.Config, find_preset("tiny/images"), settings))
    (checkpoint,) = (tmp_path / "run").glob("step_*")
    assert exact_match(checkpoint, 400) > 0.95
