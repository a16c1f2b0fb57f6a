"""Texts within the tokens that a model expects around them, cut to a length: ids equal transformers'."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer

from lean_ft.tokenizers import load_tokenizer

MakeFolder = Callable[..., Path]
# Post-processors of published embedding models, on tokens that both test vocabularies have or get.
TEMPLATES = {
    "Llama": "<bos> $A",
    "Qwen3-Embedding": "$A <eos>",
    "Gemma": "<bos> $A <eos>",
    "two on a side": "<bos> <eos> $A <eos> <bos>",
}


def _with_template(tokenizer: HFTokenizer, template: str, *, after_bytes: bool = False) -> HFTokenizer:
    copy = HFTokenizer.from_str(tokenizer.to_str())
    copy.add_special_tokens(["<bos>", "<eos>"])
    tokens = [(token, copy.token_to_id(token)) for token in ("<bos>", "<eos>")]
    last = processors.TemplateProcessing(single=template, pair="$A $B", special_tokens=tokens)
    first = processors.ByteLevel(trim_offsets=True)
    copy.post_processor = processors.Sequence([first, last]) if after_bytes else last
    return copy


def _word_pieces() -> HFTokenizer:
    """As BERT's: lower case, word pieces, and BertProcessing."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefghijklmnopqrstuvwxyz0123456789.,", "hello", "world", "##s"]
    words += [f"##{letter}" for letter in "abcdefghijklmnopqrtuvwxyz"]
    made = HFTokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    made.add_special_tokens(words[:4])
    return made


def _check(folder: Path, texts: list[str], num_around: int) -> None:
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert sum(map(len, ours.around)) == num_around
    for max_length in (None, 512, num_around + 1, 13):
        cut = {} if max_length is None else {"truncation": True, "max_length": max_length}
        expected = [theirs(text, **cut)["input_ids"] for text in texts]
        found = ours.encode_texts(texts, max_length)
        assert [ids.tolist() for ids in found] == expected
        assert all(ids.dtype == np.int32 for ids in found)
    theirs.truncation_side = "left"
    left = [theirs(text, truncation=True, max_length=9)["input_ids"] for text in texts]
    assert [ids.tolist() for ids in ours.encode_texts(texts, 9, side="left")] == left


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_ids_equal_those_of_transformers(byte_level, make_folder: MakeFolder, texts, template):
    made = _with_template(byte_level, template, after_bytes=template.startswith("$A"))
    folder = make_folder(made, eos_token="<|im_end|>", pad_token="<eos>", bos_token="<bos>")
    _check(folder, [*texts, "<bos>typed<eos>"], len(template.split()) - 1)


def test_ids_of_marked_words_equal_those_of_transformers(word_start, make_folder: MakeFolder, texts):
    _check(make_folder(word_start, bos_token="<s>", eos_token="</s>", unk_token="<unk>"), texts, 1)


def test_ids_of_word_pieces_equal_those_of_transformers(make_folder: MakeFolder, texts):
    named = {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]", "pad_token": "[PAD]"}
    _check(make_folder(_word_pieces(), **named), texts, 2)


def test_nothing_is_around_texts_without_a_post_processor(byte_level, make_folder: MakeFolder, texts):
    _check(make_folder(byte_level, eos_token="<|im_end|>", pad_token="<|endoftext|>"), texts, 0)


def test_a_length_without_room_for_the_text_is_refused(byte_level, make_folder: MakeFolder):
    tokenizer = load_tokenizer(make_folder(_with_template(byte_level, "<bos> $A <eos>"), eos_token="<eos>"))
    with pytest.raises(ValueError, match="max_length=2 has no room .* at least 3"):
        tokenizer.encode_texts(["word"], 2)


def test_a_post_processor_that_repeats_the_text_is_refused(byte_level, make_folder: MakeFolder):
    tokenizer = load_tokenizer(make_folder(_with_template(byte_level, "$A <eos> $A"), eos_token="<eos>"))
    with pytest.raises(ValueError, match="post_processor does not write a text between tokens"):
        _ = tokenizer.around
