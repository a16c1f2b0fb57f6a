"""Saved folders of the embedded model, as a run writes them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lean_ft.embedding.folder import ScoresOf, VectorsOf
from lean_ft.models import REWARD_LABELS, Decoder, load_model, save_model
from lean_ft.peft import apply_lora, save_adapter
from lean_ft.settings import LoRAConfig
from lean_ft.tokenizers import load_tokenizer

Save = Callable[..., Path]


def with_adapter(model: Decoder) -> Decoder:
    """The model with an adapter that changes it."""
    apply_lora(model, LoRAConfig(rank=4))
    chance = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1, generator=chance)
    return model


@pytest.fixture(scope="session")
def save_folder(tmp_path_factory: pytest.TempPathFactory) -> Save:
    """Writes a folder: `save_folder(how, kind="full" | "adapter", chats=True)`. Without `chats`, its tokenizer has no
    chat template."""

    def save(how: VectorsOf | ScoresOf, kind: str = "full", *, chats: bool = True) -> Path:
        folder = tmp_path_factory.mktemp("folder")
        scores = None if isinstance(how, VectorsOf) or how.yes_no is not None else REWARD_LABELS
        torch.manual_seed(0)
        model = load_model("tiny", dtype=torch.float32, scores=scores)
        tokenizer = load_tokenizer("tiny")
        files = how.files(model.config.hidden_size) if isinstance(how, VectorsOf) else how.files()
        model.source.beside = files
        if scores is not None:
            model.source.config["pad_token_id"] = tokenizer.pad_id
        if kind == "adapter":
            save_adapter(with_adapter(model), folder)
        else:
            save_model(model, folder)
        tokenizer.save(folder)
        if not chats:
            config = json.loads((folder / "tokenizer_config.json").read_text())
            del config["chat_template"]
            (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return folder

    return save
