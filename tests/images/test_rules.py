"""Sizes, texts and pixels equal those of the processors of transformers."""

import io
import json
import math
import pickle
import random
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from lean_ft.images.cuts import Tiles, tiled, tiled_by_shape, within_tokens
from lean_ft.images.limits import difference, write_limit
from lean_ft.images.pixels import Upright
from lean_ft.images.reading import Size, decoded, open_image, reference, size_of
from lean_ft.images.rules import ImageLayout, ImageRules, image_rules
from tests.images.pictures import odd_picture
from tests.images.their_processors import FAMILIES, TheirProcessor, empty_torchvision, write_folder

SOME = (14, 21, 23, 35, 40)  # numbers of pictures: small, in several modes, some turned
SPECIAL = r"<\|?[a-z][-a-z0-9_]*\|?>|<image\|>|\[IMG[A-Z_]*\]"


@pytest.fixture(scope="module", autouse=True)
def torchvision() -> Iterator[None]:
    with empty_torchvision():
        yield


def tiles_of(rules: ImageRules, image: Image.Image, layout: ImageLayout) -> list[np.ndarray]:
    """The normalized pixels (3, height, width) of each tile, put together from patches."""
    tiles, side, merge, patches = [], rules.patch_size, rules.merge, rules.patches(Upright(image))
    assert patches.dtype == np.uint8
    assert len(patches) == sum(rows * columns for rows, columns in layout.grids)
    colors = (patches / 255 - np.reshape(rules.mean, (3, 1, 1))) / np.reshape(rules.std, (3, 1, 1))
    for rows, columns in layout.grids:
        tile, colors = colors[: rows * columns], colors[rows * columns :]
        tile = tile.reshape(rows // merge, columns // merge, merge, merge, 3, side, side)
        tiles.append(tile.transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, rows * side, columns * side))
    return tiles


def expanded(layout: ImageLayout, token: str) -> str:
    pieces = layout.text.split(token)
    return pieces[0] + "".join(token * run + piece for run, piece in zip(layout.runs, pieces[1:], strict=True))


def byte_tokenizer(text: str) -> Tokenizer:
    """A tokenizer of bytes with all special tokens in a text."""
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in sorted(set(re.findall(SPECIAL, text)))])
    return tokenizer


def same_as_theirs(rules: ImageRules, theirs: TheirProcessor, encoded: bytes, folder: Path) -> bool:
    """Compare an image. False if both refuse it, or if transformers fails on a very flat one."""
    with open_image(reference(encoded, folder)) as image:
        size, upright = size_of(image), decoded(image)
    assert upright.size == size
    try:
        image = ImageOps.exif_transpose(Image.open(io.BytesIO(encoded)))
        if image.mode == "I;16":  # which Pillow's `convert` clips
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        tiles, text = theirs(image)
    except ValueError as error:
        reason = str(error)
    else:
        layout = rules.layout(size)
        ours = tiles_of(rules, open_image(reference(encoded, folder)), layout)
        assert [tile.shape for tile in ours] == [tile.shape for tile in tiles], size
        assert max(np.abs(a - b).max() for a, b in zip(ours, tiles, strict=True)) < 1e-6, size
        assert expanded(layout, rules.token) == text
        return True
    if "mistral3" in theirs.family:  # transformers computes a height of 0; here it is one token
        assert re.search(r"(height|width)=0", reason)
        assert min(rules.layout(size).grids[0]) == rules.merge
    else:
        with pytest.raises(ValueError, match="differ by at most 200|too flat"):
            rules.layout(size)
    return False


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("numbers", [SOME, pytest.param(range(300), marks=pytest.mark.long)], ids=["some", "all"])
def test_images_equal_those_of_transformers(tmp_path, family, numbers):
    rules, theirs = image_rules(write_folder(tmp_path, family)), TheirProcessor(family)
    same = [same_as_theirs(rules, theirs, odd_picture(i), tmp_path) for i in numbers]
    assert sum(same) >= 0.75 * len(numbers)


def test_sizes_of_published_models_equal_those_of_transformers():
    """Sizes up to 16,384 pixels, with published settings, and longest sides beyond SmolVLM's limit of 4,096."""
    gemma, smol = (import_module(f"transformers.models.{name}") for name in (
        "gemma4.image_processing_pil_gemma4", "smolvlm.image_processing_pil_smolvlm"
    ))  # fmt: skip
    lfm = object.__new__(import_module("transformers.models.lfm2_vl.image_processing_lfm2_vl").Lfm2VlImageProcessor)
    tiles = Tiles(16, 32, least=64, most=256, tile=512, min_tiles=2, max_tiles=10, thumbnail=True)
    draw = random.Random(0)
    for _ in range(2000):
        width, height = size = Size(*(int(2 ** draw.uniform(0, 14)) for _ in "wh"))
        tokens, longest = draw.choice((70, 140, 280, 560, 1120)), draw.choice((1, 100, 447, 1536, 2048, 4097, 5001))
        high, wide = gemma.get_aspect_ratio_preserving_size(height, width, 16, tokens * 9, 3)
        assert within_tokens(size, tokens, multiple=48).sizes == ((wide, high),)
        high, wide = smol._resize_output_size_rescale_to_max_len(height, width, max_len=longest)
        high, wide = smol._resize_output_size_scale_below_upper_bound(high, wide, max_len=4096)
        assert tiled(size, longest, tile=512, split=True).sizes[0] == (wide, high)
        whole = lfm.smart_resize(height, width, 2, 64, 256, 16)
        if math.prod(whole) > 512**2:
            continue  # too flat
        cut = tiled_by_shape(size, 11 * 256, tiles=tiles)
        if lfm._is_image_too_large(height, width, 256, 16, 2, 2.0):
            assert (cut.columns, cut.rows) == lfm._get_grid_layout(height, width, 2, 10, 512)[:2]
            assert cut.thumbnail == whole
        else:
            assert cut.sizes == (whole,)


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma4", "smolvlm"])
def test_absent_settings_have_the_processors_defaults(tmp_path, family):
    rules = image_rules(write_folder(tmp_path, family, settings={}))
    theirs = TheirProcessor(family, {"return_row_col_info": True} if family == "smolvlm" else {})
    for width, height in ((600, 400), (90, 900), (2000, 1500)):
        image = Image.fromarray(np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8))
        ours, (tiles, _) = tiles_of(rules, image, rules.layout(Size(width, height))), theirs(image)
        assert max(np.abs(a - b).max() for a, b in zip(ours, tiles, strict=True)) < 1e-6


@pytest.mark.parametrize("family", FAMILIES)
def test_repeated_tokens_have_the_ids_of_the_whole_text(tmp_path, family):
    rules = image_rules(write_folder(tmp_path, family))
    for size in (Size(600, 400), Size(30, 500)):
        layout = rules.layout(size)
        whole = f"a\n{expanded(layout, rules.token)}\nb"
        tokenizer, runs = byte_tokenizer(whole), iter(layout.runs)
        image_id = tokenizer.get_vocab()[rules.token]
        ids = [
            one
            for id in tokenizer.encode(f"a\n{layout.text}\nb").ids
            for one in [id] * (next(runs) if id == image_id else 1)
        ]
        assert ids == tokenizer.encode(whole).ids
        assert ids.count(image_id) == sum(layout.runs) == sum(r * c for r, c in layout.grids) // rules.merge**2


@pytest.mark.parametrize("family", FAMILIES)
def test_marks_are_all_tokens_that_their_processor_writes(tmp_path, family):
    folder, theirs = write_folder(tmp_path, family), TheirProcessor(family)
    texts = [theirs(Image.new("RGB", size))[1] for size in ((600, 400), (300, 900), (20, 30))]
    beside = ["<|vision_start|>", "<|vision_end|>"] if "qwen" in family else []  # its chat template writes them
    written = sorted({*re.findall(SPECIAL, "".join(texts)), *beside})
    ids = {token: number for number, token in enumerate([*written, "<|im_end|>", "<end_of_turn>", "<think>", "[INST]"])}
    assert {ids[token] for token in written} <= image_rules(folder, added_tokens=ids).marks <= set(range(len(written)))


@pytest.mark.parametrize("family", FAMILIES)
def test_max_tokens_scales_images_down_and_never_up(tmp_path, family):
    usual = image_rules(write_folder(tmp_path, family))
    least = {"gemma3": 4, "smolvlm": 16, "lfm2_vl": 4}.get(family, 1)
    for max_tokens in (*range(least, 41, 3), 100):
        rules = image_rules(tmp_path, max_tokens)
        for size in (Size(8, 8), Size(640, 480), Size(480, 640), Size(400, 30), Size(30, 400), Size(3000, 2000)):
            tokens, before = sum(rules.layout(size).runs), sum(usual.layout(size).runs)
            assert tokens <= min(max_tokens, before)
            if before <= max_tokens:
                assert rules.layout(size) == usual.layout(size)
            elif size == (640, 480) and family not in ("gemma3", "smolvlm", "lfm2_vl"):
                assert tokens > 0.6 * max_tokens - 1  # uses what it may
    if family in ("gemma3", "smolvlm"):
        with pytest.raises(ValueError, match=f"data.image_tokens is {least - 1}, but .* has at least {least} tokens"):
            image_rules(tmp_path, least - 1)


@pytest.mark.first
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_limit_in_the_folder_gives_as_many_tokens_in_transformers(tmp_path, family, nested):
    least = {"gemma3": 4, "smolvlm": 80, "gemma4": 70, "gemma4_unified": 70}.get(family, 16)
    for max_tokens in (least, least + 7, 100, 140, 200):
        folder = write_folder(tmp_path, family, nested=nested)
        rules = image_rules(folder, max_tokens)
        write_limit(folder, rules)
        file = json.loads((folder / ("processor_config.json" if nested else "preprocessor_config.json")).read_text())
        written = file["image_processor"] if nested else file
        assert written.keys() >= FAMILIES[family][1].keys()
        again = image_rules(folder, max_tokens)
        if difference(rules) and "gemma4" in family:
            assert written == FAMILIES[family][1]
            continue
        theirs = TheirProcessor(family, written)
        for size in (Size(8, 8), Size(640, 480), Size(481, 640), Size(400, 130), Size(130, 900), Size(1500, 1000)):
            ours, text = rules.layout(size), theirs(Image.new("RGB", size))[1]
            if difference(rules):
                assert text.count(rules.token) <= max_tokens
            else:
                assert expanded(ours, rules.token) == text, (max_tokens, size)
                assert again.layout(size) == ours


@pytest.mark.parametrize("family", FAMILIES)
def test_rules_are_read_from_either_file_and_small_to_send(tmp_path, family):
    rules = image_rules(write_folder(tmp_path / "own", family), 70)
    nested = image_rules(write_folder(tmp_path / "nested", family, nested=True), 70)
    sent = pickle.loads(pickle.dumps(rules))
    assert len(pickle.dumps(rules)) < 2000
    assert rules.shifts_positions == family.startswith("qwen")
    for size in (Size(8, 8), Size(640, 480), Size(1000, 300)):
        assert rules.layout(size) == nested.layout(size) == sent.layout(size)


def test_images_longer_than_a_window_are_refused(tmp_path):
    for family, text, is_refused in (
        ("gemma4_unified", {"sliding_window": 69}, True),
        ("gemma4_unified", {"sliding_window": 70}, False),
        ("gemma4_unified", {"sliding_window": 9, "use_bidirectional_attention": None}, False),
        ("gemma4", {"sliding_window": 9, "use_bidirectional_attention": "vision"}, False),  # programs agree
    ):
        file = write_folder(tmp_path, family) / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"text_config": text}))
        rules = image_rules(tmp_path)
        if is_refused:
            with pytest.raises(
                ValueError, match="images have up to 70 tokens, and .* windows of 69.*data.image_tokens=69"
            ):
                rules.check()
            rules = rules.limited(69)
        rules.check()


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("gemma3", {"do_pan_and_scan": True}, "do_pan_and_scan is True; expected False"),
    ("gemma3", {"size": {"height": 112, "width": 224}}, "size: width is 224; expected 112, as in config.json"),
    ("gemma3", {}, "size: height is 224; expected 112, as in config.json"),
    ("gemma3", {"size": 112}, "size is 112; expected an object"),
    ("qwen3_vl", {"do_resize": False}, "do_resize is False; expected True"),
    ("qwen3_vl", {"patch_size": 14}, "patch_size is 14; expected 16, as in config.json"),
    ("qwen3_vl", {"size": {"longest_edge": 1024}}, "the field min_pixels is missing; it is required"),
    ("qwen3_vl", {"image_mean": [0.5, 0.5]}, "image_mean is .*expected a list of 3 numbers"),
    ("qwen3_vl", {"image_std": [0.5, 0.5, 0]}, "image_std is .*expected a list of 3 numbers"),
    ("qwen3_vl", {"rescale_factor": 1}, "rescale_factor is 1; expected 0.0039"),
    ("qwen3_vl", {"resample": 9}, "resample is 9; expected one of 0, 1, 2, 3, 4, 5"),
    ("qwen3_vl", {"size": {"shortest_edge": 1 << 28, "longest_edge": 1 << 28}, "patch_size": 16,
        "min_pixels": 1 << 40}, "min_pixels"),
    ("mistral3", {"size": {"longest_edge": "1540"}}, "size: longest_edge is '1540'"),
    ("mistral3", {"do_center_crop": True}, "do_center_crop is True; expected False"),
    ("smolvlm", {"max_image_size": {"longest_edge": 100}}, "longest_edge is 100; expected a multiple of 2 patches"),
    ("smolvlm", {"size": {"longest_edge": 1 << 28}, "max_image_size": {"longest_edge": 28}},
        "would enlarge it too much"),
    ("lfm2_vl", {"max_pixels_tolerance": 1.5}, "max_pixels_tolerance is 1.5; expected 2.0"),
    ("gemma4", {"do_normalize": 1}, "do_normalize is 1; expected true or false"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "settings", "message"), REFUSED)
def test_a_setting_that_is_not_implemented_is_refused(tmp_path, family, settings, message):
    with pytest.raises(ValueError, match=message if "would" in message else rf"preprocessor_config\.json: .*{message}"):
        image_rules(write_folder(tmp_path, family, settings=settings))


def test_a_folder_that_reads_no_images_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ValueError, match="model_type is 'llama'; expected a model that reads images: gemma3, gemma4"):
        image_rules(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3"}))
    with pytest.raises(ValueError, match=r"has no preprocessor_config\.json: it is needed to read images"):
        image_rules(tmp_path)
