"""Tiny models with an adapter, ours and PEFT's as the reference."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lean_ft import load_model
from lean_ft.models import Decoder
from lean_ft.peft import apply_lora, load_adapter, save_adapter
from lean_ft.settings import LoRAConfig
from tests.models.conftest import reference_model
from tests.models.family_cases import CASES

MIXTURES = {"mixtral", "qwen3_moe", "olmoe", "gpt_oss", "qwen2_moe", "glm4_moe", "minimax_m2", "deepseek_v3", "phimoe"}
MIXTURES |= {"qwen3_next", "qwen3_5_moe_text", "granitemoehybrid", "gemma4_text_experts", "llama4_text", "ernie4_5_moe"}
MIXTURES |= {"granitemoe", "granitemoeshared", "granitemoe_swa", "lfm2_moe", "dots1", "solar_open", "hunyuan_v1_moe"}
MIXTURES |= {"exaone_moe", "flex_olmo", "hy_v3", "mellum", "deepseek_v2", "mistral4", "afmoe", "mimo_v2_flash"}
MIXTURES |= {"flint", "kolibri1"}
# One case per family, and one with biases.
FAMILIES = sorted({family: case for case, (family, _) in reversed(CASES.items())}.values())
FAMILIES = [family for family in (*FAMILIES, "llama_biases", "granitemoehybrid_dense_tied") if family not in MIXTURES]

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
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, nn.Module]]:
    """A function that returns a case's folder and a copy of its transformers model, which PEFT changes in place."""
    made: dict[str, tuple[Path, nn.Module]] = {}

    def make(case: str, **settings: float) -> tuple[Path, nn.Module]:
        key = f"{case} {sorted(settings.items())}"
        if key not in made:
            family, fields = CASES[case]
            folder, model = tmp_path_factory.mktemp(case), reference_model(family, {**fields, **settings})
            model.save_pretrained(folder)
            made[key] = folder, model
        folder, model = made[key]
        return folder, copy.deepcopy(model)

    return make


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
