"""Shapes of published models with random weights, and text to train them on. Nothing is downloaded.

Memory and speed depend on a model's shape, not on its weights, so a `config.json` is enough. The tokenizer is the
embedded model's; its ids lie within the published vocabularies, and embedding and output layer keep their published
size. A row of text has more random words than the requested tokens, so that truncation fills every position.

Source: the config.json of each preset in configs/, with the fields of the model's repository on the Hugging Face Hub
that describe the language model's layers and the vision tower, and next to it the settings of images. Most token ids
and the encoders of sound are left out.
"""

import json
import math
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
EMBEDDED_MODEL = ROOT / "lean_ft" / "assets" / "tiny" / "model"
IMAGE_FILES = ("preprocessor_config.json", "processor_config.json")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")

Shape = dict[str, Any]

# The presets' models, by the name of their folder in configs/.
SHAPES: dict[str, Shape] = {
    file.parent.name: json.loads(file.read_text(encoding="utf-8"))
    for file in sorted((ROOT / "configs").glob("*/config.json"))
}
_LLAMA_70B = {"hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80, "num_attention_heads": 64}
SHAPES["llama3_1_70b"] = SHAPES["llama3_1_8b"] | _LLAMA_70B
# No published model: for trying the scripts in seconds.
_TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPES["tiny"] = SHAPES["qwen2_5_0_5b"] | _TINY | {"vocab_size": 8192, "max_position_embeddings": 4096}


def find_gsm8k() -> Path | None:
    """Find `shared/data/gsm8k_train.jsonl` next to this checkout or above it."""
    found = (parent / "shared" / "data" / "gsm8k_train.jsonl" for parent in ROOT.parents)
    return next((path for path in found if path.is_file()), None)


def shape_of(name: str) -> Shape:
    """The config.json of a shape's language model. Raises ValueError with the known names."""
    from lean_ft.models.config_json import language_model_config

    return language_model_config(whole_shape_of(name))


def whole_shape_of(name: str) -> Shape:
    """The config.json of a shape, with its vision tower if it has one. Raises ValueError with the known names."""
    if name not in SHAPES:
        raise ValueError(f"unknown shape {name!r}; expected one of {', '.join(SHAPES)}.")
    return SHAPES[name]


def num_parameters(name: str, images: bool = False) -> int:
    """Number of parameters of a shape's language model, and with `images` of its vision tower; a tied embedding counts
    once."""
    import torch

    from lean_ft.models import Decoder, decoder_config
    from lean_ft.models.config_json import language_model_config
    from lean_ft.models.vision.config import vision_config

    whole = whole_shape_of(name)
    config = decoder_config(language_model_config(whole, with_tower=images))
    if images:
        config = replace(config, vision=vision_config(whole, config))
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Decoder(config).parameters())


def write_model_folder(shape: str, folder: Path, tokenizer_folder: Path = EMBEDDED_MODEL) -> Path:
    """Write a Hugging Face folder without weights, for `model.random_init=true`, and return it.

    Raises ValueError if the shape is unknown, the tokenizer is missing, or it has ids beyond the shape's vocabulary.
    """
    config = whole_shape_of(shape)
    if not (tokenizer_folder / "tokenizer.json").is_file():
        raise ValueError(f"{tokenizer_folder}: no tokenizer.json. The benchmarks need it to tokenize text.")
    tokenizer = json.loads((tokenizer_folder / "tokenizer.json").read_text(encoding="utf-8"))
    ids = [*tokenizer["model"]["vocab"].values(), *(token["id"] for token in tokenizer.get("added_tokens", []))]
    vocab_size = config.get("text_config", config)["vocab_size"]
    if max(ids) >= vocab_size:
        raise ValueError(
            f"{tokenizer_folder} has token ids up to {max(ids)}, and {shape} has {vocab_size} of them; "
            "expected a smaller tokenizer."
        )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for source, names in ((tokenizer_folder, TOKENIZER_FILES), (ROOT / "configs" / shape, IMAGE_FILES)):
        for name in names:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
    return folder


def write_text_rows(path: Path, num_rows: int, tokens_per_row: int, seed: int = 0) -> Path:
    """Write JSONL rows `{"text": ...}` of at least `tokens_per_row` tokens each, and return the path."""
    words = _Words(seed)
    # A token never spans two words. One extra word covers tokens added or dropped at the ends.
    return _write(path, [words.text(tokens_per_row + 1) for _ in range(num_rows)])


def write_pair_rows(path: Path, num_rows: int, prompt_tokens: int, answer_tokens: int, seed: int = 0) -> Path:
    """Writes JSONL rows of a prompt of `prompt_tokens` and two answers of at least `answer_tokens` tokens each, by the
    embedded tokenizer, and returns the path."""
    from tokenizers import Tokenizer

    words, rows = _Words(seed), []
    tokenizer = Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
    for _ in range(num_rows):
        prompt = "a"
        while (length := len(tokenizer.encode(prompt).ids)) < prompt_tokens:
            # A word has up to six tokens, a single vowel one.
            prompt += " " + (words.text(1) if length < prompt_tokens - 8 else "a")
        assert length == prompt_tokens, (prompt_tokens, prompt)
        answers = {side: " " + words.text(answer_tokens + 1) for side in ("chosen", "rejected")}
        rows.append({"prompt": prompt, **answers})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_documents(path: Path, total_tokens: int, max_tokens: int, seed: int = 0) -> Path:
    """Writes JSONL rows `{"text": ...}` of many lengths, to be packed: at least `total_tokens` tokens of them.

    The number of words is log-uniform from `max_tokens / 256` to `max_tokens / 8`: a few long documents and many short
    ones. With the embedded tokenizer a word takes three to four tokens.
    """
    words = _Words(seed)
    shortest, longest = max(2, max_tokens // 256), max(3, max_tokens // 8)
    texts, written = [], 0
    while written < total_tokens:
        num_words = round(math.exp(words.random.uniform(math.log(shortest), math.log(longest))))
        texts.append(words.text(num_words))
        written += num_words
    return _write(path, texts)


class _Words:
    """Pronounceable random words, determined by a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
        self._words = ["".join(self.random.choices(syllables, k=self.random.randint(1, 3))) for _ in range(4096)]

    def text(self, num_words: int) -> str:
        return " ".join(self.random.choices(self._words, k=num_words))


def _write(path: Path, texts: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path
