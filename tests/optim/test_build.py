"""Unsupported combinations raise an error that names the setting, the reason and a fix."""

import pytest
import torch

from tests.optim.tiny_training import TinyModel, build


def test_stochastic_rounding_is_for_bfloat16_weights() -> None:
    model = TinyModel()
    model.norm.float()
    with pytest.raises(ValueError, match=r"norm.weight is torch.float32.*stochastic_rounding=false"):
        build(model, {"stochastic_rounding": True})


def test_clipping_and_loss_scaling_are_for_the_plain_step() -> None:
    build(TinyModel(torch.float32), {"name": "adamw_8bit"}, clip_grad_norm=1.0, float16=True)


def test_paged_state_without_cuda_is_ordinary_memory_and_said_so() -> None:
    paged, plain = build(TinyModel(), {"name": "paged_adamw_8bit"}), build(TinyModel(), {"name": "adamw_8bit"})
    assert len(paged.notes) == 1 and "ordinary memory" in paged.notes[0]
    assert plain.notes == []
    assert paged.state_bytes == plain.state_bytes


@pytest.mark.gpu
@pytest.mark.parametrize("setting", ["update_clipping", "stochastic_rounding"])
def test_what_the_paged_kernel_lacks_is_refused_on_a_gpu(setting: str) -> None:
    with pytest.raises(ValueError, match=f"{setting}=true is not in bitsandbytes' kernel.*adamw_8bit"):
        build(TinyModel().cuda(), {"name": "paged_adamw_8bit", setting: True})
