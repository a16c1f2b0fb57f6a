"""Model folders with tokenizers, and checkpoints of a run, all made without training."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as HFTokenizer

from lean_ft.gguf.splitting import QWEN2_PATTERN
from lean_ft.models import load_model
from lean_ft.system.shards import part_of
from lean_ft.tokenizers import load_tokenizer
from lean_ft.training.checkpoint import CheckpointState, write_checkpoint
from tests.tokenizers.conftest import TEXTS

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3_ROPE |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def qwen_tokenizer(rule: tuple[tuple[str, Any], ...] = (("Split", QWEN2_PATTERN), ("ByteLevel", False))) -> HFTokenizer:
    """A byte-level BPE that splits text as Qwen2's does, or by another rule, step by step."""
    makers: dict[str, Callable[[Any], Any]] = {
        "Split": lambda pattern: pre_tokenizers.Split(Regex(pattern), "isolated"),
        "Digits": lambda individual: pre_tokenizers.Digits(individual_digits=individual),
        "ByteLevel": lambda use_regex: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex),
    }
    tokenizer = HFTokenizer(models.BPE(ignore_merges=dict(rule).get("ignore_merges", False)))
    steps = [makers[kind](setting) for kind, setting in rule if kind in makers]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens(["<think>"])
    return tokenizer


SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 416,
}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 128}


def write_model_folder(
    folder: Path,
    family: str = "Llama",
    dtype: torch.dtype = torch.float32,
    tokenizer: HFTokenizer | Path | None = None,
    tokenizer_config: dict[str, Any] | None = None,
    **settings: Any,
) -> Path:
    """Write a folder as transformers saves it, of a random model, with or without a tokenizer."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    of_class = getattr(transformers, f"{family}ForCausalLM", None) or getattr(transformers, f"{family}LMHeadModel")
    model = of_class(config(**{**SIZES, **settings}))
    with torch.no_grad():
        buffers = [pair for pair in model.named_buffers() if pair[0].endswith(("correction_bias", "layer_scalar"))]
        for name, parameter in (*model.named_parameters(), *buffers):
            noise = torch.randn(parameter.shape)
            is_norm = "norm" in name or ".ln_" in name
            is_scale = (is_norm and not name.endswith("bias")) or "scal" in name
            parameter.copy_(1.0 + 0.3 * noise if is_scale else 0.2 * noise)
    model.to(dtype).save_pretrained(folder)
    write_tokenizer(folder, tokenizer, tokenizer_config)
    return folder


def write_tokenizer(folder: Path, tokenizer: HFTokenizer | Path | None, config: dict[str, Any] | None = None) -> None:
    if isinstance(tokenizer, Path):
        (folder / "tokenizer.model").write_bytes(tokenizer.read_bytes())
    elif tokenizer is not None:
        tokenizer.save(str(folder / "tokenizer.json"))
    if tokenizer is not None:
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **(config or {})}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="session")
def make_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """As `write_model_folder`, in a new folder."""
    return lambda *args, **settings: write_model_folder(tmp_path_factory.mktemp("model"), *args, **settings)


@pytest.fixture(scope="session")
def qwen_folder(make_model_folder) -> Path:
    config = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": TEMPLATE}
    return make_model_folder("Qwen2", torch.bfloat16, qwen_tokenizer(), config)


@pytest.fixture
def run_directory(qwen_folder, tmp_path) -> Path:
    """A run with two checkpoints of different weights."""
    model = load_model(qwen_folder, dtype=torch.bfloat16)
    for step in (1, 2):
        with torch.no_grad():
            model.model.norm.weight.fill_(step)
        state = CheckpointState({"step": step}, random={}, optimizer={"exp_avg": part_of(torch.ones(3))})
        write_checkpoint(tmp_path, step, model, load_tokenizer(qwen_folder), state)
    return tmp_path


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return TEXTS
