"""Unsupported combinations raise an error that names the setting, the reason and a fix."""

from typing import Any

import pytest
import torch

from tests.optim.tiny_training import TinyModel, build


@pytest.mark.parametrize(
    ("settings", "kwargs", "words"),
    [
        (
            {"name": "adamw_8bit", "in_backward": True},
            {"clip_grad_norm": 1.0},
            ["clip_grad_norm=1", "every gradient", "clip_grad_norm=null (optimizer.update_clipping=true"],
        ),
        (
            {"name": "sgd", "in_backward": True},
            {"clip_grad_norm": 0.5},
            ["clip_grad_norm=0.5", "or set optimizer.in_backward=false"],
        ),
        ({"in_backward": True}, {"float16": True}, ["float16", "model.dtype=bfloat16"]),
        ({"name": "sgd", "update_clipping": True}, {}, ["optimizer.name=sgd", "update_clipping=false"]),
        ({"name": "adafactor", "update_clipping": True}, {}, ["adafactor already limits its updates"]),
        ({"name": "adamw", "momentum": 0.9}, {}, ["optimizer.name=sgd", "optimizer.betas"]),
        ({"name": "adafactor", "momentum": 0.9}, {}, ["optimizer.momentum=0.9", "adafactor would ignore it"]),
        ({"name": "sgd", "betas": (0.8, 0.9)}, {}, ["optimizer.betas=(0.8, 0.9)", "sgd would ignore it"]),
        ({"name": "adafactor", "eps": 1e-6}, {}, ["optimizer.eps=1e-06", "adafactor would ignore it"]),
    ],
)
def test_refusals(settings: dict[str, Any], kwargs: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        build(TinyModel(), settings, **kwargs)
    for word in words:
        assert word in str(error.value)


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
    assert plain.notes == ()
    assert paged.state_bytes == plain.state_bytes


@pytest.mark.gpu
@pytest.mark.parametrize("setting", ["update_clipping", "stochastic_rounding"])
def test_what_the_paged_kernel_lacks_is_refused_on_a_gpu(setting: str) -> None:
    with pytest.raises(ValueError, match=f"{setting}=true is not in bitsandbytes' kernel.*adamw_8bit"):
        build(TinyModel().cuda(), {"name": "paged_adamw_8bit", setting: True})
