"""Tiny models with an adapter, ours and PEFT's as the reference."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lean_ft import load_model
from lean_ft.models import Decoder
from lean_ft.models.families import FAMILIES as ROWS
from lean_ft.peft import apply_lora, load_adapter, save_adapter
from lean_ft.settings import LoRAConfig
from tests.models.conftest import make_checkpoint
from tests.models.family_cases import CASES, FIRST_CASES, IN_ORDER

__all__ = ["make_checkpoint"]

# One case per family; Gemma 4 has experts in a separate case, and Nemotron-H's first case has none.
FIRST = [case for case in IN_ORDER if case in FIRST_CASES.values()]
DENSE = ("gemma4_text", "nemotron_h")
MIXTURES = [case for case in FIRST if ROWS[CASES[case][0]].mixture and case not in DENSE] + ["gemma4_text_experts"]
FAMILIES = ["llama", "gpt_bigcode", *FIRST, "llama_biases", "granitemoehybrid_dense_tied"]
FAMILIES = [case for case in dict.fromkeys(FAMILIES) if case not in MIXTURES]

IDS = torch.randint(0, 101, (2, 40), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def randomize(model: nn.Module, seed: int = 3) -> None:
    """Set every trained parameter to values that reveal a wrong formula: none zero, magnitudes unequal to the norms."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        noise = torch.randn(parameter.shape, generator=generator)
        if "magnitude" in name:
            parameter.mul_(1.0 + 0.3 * noise)
        else:
            parameter.copy_(0.2 * noise)


def loss_of(logits: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), IDS[:, 1:].flatten())


def from_peft(folder: Path, base: nn.Module, destination: Path, config: Any) -> tuple[Decoder, nn.Module]:
    """Our model with a random adapter that PEFT saved, with only the adapter trained, and PEFT's model."""
    import peft

    reference = peft.get_peft_model(base, config)
    randomize(reference)
    reference.save_pretrained(destination)
    model = load_model(folder)
    load_adapter(model, destination)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("base_layer" not in name and "lora" in name)
    return model, reference


def assert_peft_computes_it(model: Decoder, base: nn.Module, folder: Path, bound: float = 5e-4) -> None:
    """Save the adapter. PEFT and a new model of ours compute the same logits with it."""
    import peft

    save_adapter(model, folder)
    expected = model(IDS)
    again = load_model(model.source.folder)
    load_adapter(again, folder)
    for logits in (peft.PeftModel.from_pretrained(base, folder)(IDS).logits, again(IDS)):
        torch.testing.assert_close(logits, expected, atol=bound, rtol=bound)


@pytest.fixture(scope="session")
def tiny_folder(make_checkpoint) -> Path:
    """A model with biases and untied embeddings."""
    folder, _ = make_checkpoint("llama_biases")
    return folder


@pytest.fixture
def adapted(tiny_folder: Path) -> Callable[..., Decoder]:
    """A function that returns our model with a random adapter, by default of rank 4."""

    def make(randomized: bool = True, dtype: torch.dtype = torch.float32, **settings) -> Decoder:
        torch.manual_seed(0)
        model = load_model(tiny_folder, dtype=dtype)
        apply_lora(model, LoRAConfig(**{"rank": 4, **settings}))
        if randomized:
            randomize(model)
        return model

    return make
