"""With its adapter off, a model computes bitwise what the plain model does, and afterwards its adapter is on again."""

from typing import Any

import pytest
import torch

from lean_ft.models import load_model
from lean_ft.peft import adapter_off, apply_lora
from lean_ft.settings import LoRAConfig
from tests.peft.conftest import IDS, randomize

KINDS: list[tuple[str, dict[str, Any]]] = [
    ("llama_biases", {}),
    ("llama_biases", {"targets": ["all-linear", "embed_tokens", "lm_head"]}),
    ("llama_biases", {"targets": ["all-linear", "embed_tokens", "lm_head"], "dora": True}),
    ("llama_biases", {"init": "pissa"}),
    ("mixtral", {}),
]


@pytest.mark.first(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("case", "settings"), KINDS, ids=str)
def test_off_it_is_the_model_without_one(
    case: str, settings: dict[str, Any], dtype: torch.dtype, make_checkpoint
) -> None:
    folder, _ = make_checkpoint(case)
    plain, adapted = load_model(folder, dtype=dtype), load_model(folder, dtype=dtype)
    torch.manual_seed(0)
    apply_lora(adapted, LoRAConfig.model_validate({"rank": 4, **settings}))
    randomize(adapted)
    with torch.no_grad():
        expected, on = plain(IDS), adapted(IDS)
        with adapter_off(adapted):
            off = adapted(IDS)
        assert torch.equal(adapted(IDS), on)
    assert torch.equal(off, expected)
    assert (on - off).norm() > 0.1 * off.norm()


@pytest.mark.long
def test_compiled_code_checks_whether_the_adapter_is_on() -> None:
    torch._dynamo.reset()
    plain, adapted = load_model("tiny"), load_model("tiny")
    for model in (plain, adapted):
        del model.model.layers[1:]
    apply_lora(adapted, LoRAConfig.model_validate({"rank": 4}))
    randomize(adapted)
    adapted.layers[0].compile(fullgraph=True, backend="aot_eager")
    ids = IDS[:, :16]
    with torch.no_grad():
        on = adapted(ids)
        with adapter_off(adapted):
            torch.testing.assert_close(adapted(ids), plain(ids), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(adapted(ids), on)


def test_it_is_on_again_after_an_error_and_there_has_to_be_one() -> None:
    model = load_model("tiny")
    with pytest.raises(ValueError, match="no adapter"), adapter_off(model):
        pass
    apply_lora(model, LoRAConfig.model_validate({}))
    with pytest.raises(KeyError), adapter_off(model):
        raise KeyError
    assert all(module.is_on for module in model.modules() if hasattr(module, "is_on"))
