"""Which ids a span of the text touches, found by bisection, is what looking at every id finds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from lean_ft.tokenizers.tokenizer_json import TokenizerJson
from lean_ft.tokenizers.vocabulary import SpanEncoding

TEXT = "naïve 日本語 🙂🙂 Ünïcödé the end e\u0301 a\u0300 ﬁne ½ — “so”\n"


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


def sentencepiece_like() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.ByteFallback()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=[f"<0x{i:02X}>" for i in range(256)], show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


@pytest.fixture(scope="module")
def vocabularies(tmp_path_factory: pytest.TempPathFactory) -> list[TokenizerJson]:
    folder = tmp_path_factory.mktemp("tokenizers")
    made = []
    for build in (byte_level, sentencepiece_like):
        path = folder / f"{build.__name__}.json"
        tokenizer = build()
        tokenizer.add_special_tokens(["<|end|>"])
        tokenizer.save(str(path))
        made.append(TokenizerJson(path, [], None, None))
    return made


TEXTS = st.text(st.sampled_from([*TEXT, "\u0301", "\u200d", "|", "Ω"]), max_size=30)
SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)).map(lambda s: (s[0], s[0] + s[1])), max_size=3)


@settings(max_examples=400, deadline=None)
@given(TEXTS, SPANS)
def test_bisection_finds_what_looking_at_every_id_does(vocabularies: list[TokenizerJson], text: str, spans):
    text = text[:12] + "<|end|>é" + text[12:]  # not ASCII: the library's own encoding
    for vocabulary in vocabularies:
        [encoding] = vocabulary.encode([text], [[]])
        library = vocabulary._tokenizer.encode(text, add_special_tokens=False)
        expected = SpanEncoding.of(library.ids, library.offsets).touches(spans)
        assert encoding.ids.tolist() == library.ids
        np.testing.assert_array_equal(encoding.touches(spans), expected)
