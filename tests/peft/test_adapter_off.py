"""A model whose adapter is off computes what the model does that has none, bit for bit, and is itself again after."""

from typing import Any

import pytest
import torch

from lean_ft.models import load_model
from lean_ft.peft import adapter_off, apply_lora
from lean_ft.settings import LoRAConfig

KINDS: list[dict[str, Any]] = [
    {},
    {"dora": True},
    {"init": "pissa"},
    {"targets": ["all-linear", "embed_tokens"]},
    {"dropout": 0.3},
]


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("settings", KINDS, ids=str)
def test_off_it_is_the_model_without_one(settings: dict[str, Any], compile: bool) -> None:
    if compile and settings:
        pytest.skip("one kind tells whether compiled code asks again")
    ids = torch.randint(700, (2, 12), generator=torch.Generator().manual_seed(0))
    plain, adapted = load_model("tiny"), load_model("tiny")
    torch.manual_seed(0)
    apply_lora(adapted, LoRAConfig.model_validate({"rank": 4, **settings}))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    if compile:
        for layer in (*plain.layers, *adapted.layers):
            layer.compile(fullgraph=True)
    with torch.no_grad():
        expected, on = plain(ids), adapted(ids)
        with adapter_off(adapted):
            off = adapted(ids)
        assert torch.equal(adapted(ids), on)
    if compile:
        torch.testing.assert_close(off, expected)
    else:
        assert torch.equal(off, expected)
    assert (on - off).norm() > 0.1 * off.norm()


def test_it_is_on_again_after_an_error_and_there_has_to_be_one() -> None:
    model = load_model("tiny")
    with pytest.raises(ValueError, match="no adapter"), adapter_off(model):
        pass
    apply_lora(model, LoRAConfig.model_validate({}))
    with pytest.raises(KeyError), adapter_off(model):
        raise KeyError
    assert all(module.is_on for module in model.modules() if hasattr(module, "is_on"))
