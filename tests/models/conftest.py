"""Random tiny checkpoints that transformers makes, and transformers' own model of each, as the reference."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.models.family_cases import CASES, LONG_CASES, SIZES

Reference = transformers.PreTrainedModel
MakeCheckpoint = Callable[..., tuple[Path, Reference]]


def reference_model(model_type: str, settings: dict[str, Any], seed: int = 0) -> Reference:
    """transformers' model with weights large enough that a wrong formula shows, norms and biases included."""
    config = transformers.AutoConfig.for_model(model_type, **{**SIZES, **settings})
    config._experts_implementation = "eager"  # its others want sizes in multiples of 16 bytes
    model = transformers.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            # Norms keep what they start with: 1, or 0 where the family adds 1 itself.
            parameter.copy_(parameter + 0.3 * noise if "norm" in name else 0.2 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
            elif name.endswith("layer_scalar"):
                buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))
    return model.eval()


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> MakeCheckpoint:
    """Makes the folder of a case, as transformers saves it, and transformers' model of it."""

    def make(case: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any):
        model_type, settings = CASES[case]
        model = reference_model(model_type, {**settings, **overrides}, seed)
        folder = tmp_path_factory.mktemp(case)
        model.to(dtype)
        for name, buffer in model.named_buffers():  # as from_pretrained has it
            if any(kept in name for kept in model._keep_in_fp32_modules_strict or ()):
                buffer.data = buffer.float()
        model.save_pretrained(folder)
        # Read back, since `to` has rounded the rotary frequencies too, which is not how a bfloat16 model is run.
        return folder, type(model).from_pretrained(folder, dtype=dtype).eval()

    return make


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.long] * (name in LONG_CASES)) for name in CASES])
def case(request: pytest.FixtureRequest) -> str:
    return request.param
