"""A base model and models that were changed from it, as folders."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.export.conftest import TEMPLATE, qwen_tokenizer, write_model_folder, write_tokenizer

TOKENIZER_CONFIG = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": TEMPLATE}


def stored(folder: Path) -> dict[str, Tensor]:
    return {n: t for file in folder.glob("*.safetensors") for n, t in safetensors.torch.load_file(file).items()}


def write_changed(base: Path, folder: Path, seed: int, dtype: torch.dtype, max_shard_size: str = "5GB") -> Path:
    """A model with other weights than `base`, and the same tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    write_tokenizer(folder, qwen_tokenizer(), TOKENIZER_CONFIG)
    return folder


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "base"
    return write_model_folder(folder, "Qwen2", torch.bfloat16, qwen_tokenizer(), TOKENIZER_CONFIG)


@pytest.fixture(scope="session")
def models(base) -> dict[str, Path]:
    """`bfloat16` (in several files) and `float32` models, and `other`, each with other changes from the base."""
    made = {"bfloat16": (1, torch.bfloat16, "40KB"), "float32": (2, torch.float32, "5GB")}
    made["other"] = (3, torch.float32, "5GB")
    return {name: write_changed(base, base.parent / name, *arguments) for name, arguments in made.items()}


@pytest.fixture
def changed(base, tmp_path) -> Callable[..., Path]:
    """A new folder of a model changed from the base, which a test may damage."""

    def make(name: str = "changed", seed: int = 4, dtype: torch.dtype = torch.float32, **settings: Any) -> Path:
        if not settings:
            return write_changed(base, tmp_path / name, seed, dtype)
        return write_model_folder(tmp_path / name, "Qwen2", dtype, qwen_tokenizer(), TOKENIZER_CONFIG, **settings)

    return make
