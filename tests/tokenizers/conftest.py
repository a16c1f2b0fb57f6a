import importlib.util
import json
import re
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as HFTokenizer

from lean_ft.tokenizers import Tokenizer, load_tokenizer

CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|end|>"]
PLAIN_ADDED_TOKENS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]

# Control tokens in published templates, and tags of reasoning and calls.
TOKENS = re.compile(r"<[|｜][^<>\s'\"+]{1,40}[|｜]>|<(?:start|end)_of_turn>|<\|turn>|<turn\|>|</?think>|</?tool_call>")

TEXTS = [
    "Hello, world! Don't stop; it's 12345 o'clock.",
    "def f(x):\n    if x:\n\t\treturn {'a': [1, 2]}  # done\n\n\n",
    "Привет мир. 你好，世界。 こんにちは。 مرحبا بالعالم. नमस्ते 세계",
    "👩‍👩‍👧‍👦 😀🦙 e\u0301 \u00e9 \u200b \u00a0x",
    "   leading and trailing   ",
    "\t\n \n\n  mixed\r\n   whitespace \u2003 runs      here",
    "a" * 60 + " " * 30 + "b" * 60,
    "",
    " ",
    "naïve café — “quotes” … ½ ™",
]


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return TEXTS


def byte_level_tokenizer() -> HFTokenizer:
    """A byte-level BPE in the manner of GPT-2 and Qwen, trained on the texts above."""
    tokenizer = HFTokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=CONTROL_TOKENS,
        show_progress=False,
    )
    tokenizer.train_from_iterator([*TEXTS, "user assistant system " * 20], trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in PLAIN_ADDED_TOKENS])
    return tokenizer


def word_start_tokenizer(prepend_scheme: str) -> HFTokenizer:
    """A BPE that marks word starts with ▁ and falls back to bytes, in the manner of Llama 2's
    tokenizer.json."""
    tokenizer = HFTokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme, split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator([*TEXTS[:2], "user assistant system [INST] hello " * 20], trainer)
    model = json.loads(tokenizer.to_str())
    for token in bytes_:  # pieces of the model, which byte_fallback looks up; no text spells them
        model["model"]["vocab"][token] = len(model["model"]["vocab"])
    tokenizer = HFTokenizer.from_str(json.dumps(model))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


@cache
def published_templates() -> dict[str, str]:
    """Published chat templates by name, which TRL ships, some also with generation tags (`_training`). Empty without
    TRL."""
    spec = importlib.util.find_spec("trl")
    folder = Path(spec.origin).parent / "chat_templates" if spec and spec.origin else Path("none")
    return {file.stem: file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.jinja"))}


def with_tokens(tokenizer: HFTokenizer, templates: Iterable[str], more: Iterable[str] = ()) -> HFTokenizer:
    """A copy with the control tokens that the templates write, with `more`, <bos> and <eos>. Tags are plain tokens."""
    copy = HFTokenizer.from_str(tokenizer.to_str())
    tokens = sorted({*(token for source in templates for token in TOKENS.findall(source)), *more, "<bos>", "<eos>"})
    plain = [token for token in tokens if "think" in token or token in ("<tool_call>", "</tool_call>")]
    copy.add_tokens([AddedToken(token, normalized=False, special=token not in plain) for token in tokens])
    return copy


@pytest.fixture(scope="session")
def published() -> dict[str, str]:
    return published_templates() or pytest.skip("needs TRL, which ships published chat templates")


@pytest.fixture(scope="session")
def with_template(byte_level: HFTokenizer, make_folder: Callable[..., Path]) -> Callable[..., Tokenizer]:
    """Loads a tokenizer with a chat template: `with_template(template, control tokens)`. The first two are bos and
    eos."""

    @cache
    def folder_of(control: tuple[str, ...]) -> Path:
        tokenizer = HFTokenizer.from_str(byte_level.to_str())
        tokenizer.add_tokens([AddedToken(token, normalized=False, special=True) for token in control])
        return make_folder(tokenizer, bos_token=control[0], eos_token=control[1])

    def make(template: str, control: tuple[str, ...]) -> Tokenizer:
        (folder := folder_of(control)).joinpath("chat_template.jinja").write_text(template)
        return load_tokenizer(folder)

    return make


@pytest.fixture(scope="session")
def make_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a tokenizer folder: `make_folder(tokenizer_or_model_file, **tokenizer_config)`."""

    def make(tokenizer: HFTokenizer | Path | None, *, files: dict[str, Any] | None = None, **config: Any) -> Path:
        folder = tmp_path_factory.mktemp("tokenizer")
        if isinstance(tokenizer, HFTokenizer):
            tokenizer.save(str(folder / "tokenizer.json"))
        elif isinstance(tokenizer, Path):
            (folder / "tokenizer.model").write_bytes(tokenizer.read_bytes())
        if config:
            config.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
            (folder / "tokenizer_config.json").write_text(json.dumps(config))
        for name, value in (files or {}).items():
            text = value if isinstance(value, str) else json.dumps(value)
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
        return folder

    return make


@pytest.fixture(scope="session")
def byte_level() -> HFTokenizer:
    return byte_level_tokenizer()


@pytest.fixture(scope="session", params=["first", "always"])
def word_start(request: pytest.FixtureRequest) -> HFTokenizer:
    return word_start_tokenizer(request.param)
