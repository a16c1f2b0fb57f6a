"""Projections with adapters that read the same input, in few products as on a GPU, equal the layers one by one."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lean_ft import load_model
from lean_ft.memory import apply_memory
from lean_ft.models.frozen_weight import Frozen, FrozenLinear, as_frozen
from lean_ft.peft import apply_lora, joint_products, layers, quantize_as_loaded
from lean_ft.peft.joint_products import joint_low_rank_linears
from lean_ft.peft.layers import AdapterShape, LoRALinear
from lean_ft.quantize.nf4 import to_nf4
from lean_ft.settings import LoRAConfig, MemoryConfig
from tests.peft.conftest import IDS, loss_of, randomize

NUM_INPUTS = 64


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Layers take their joint form; the list has the number of layers of each joint product."""
    taken = list[int]()

    def joint(x: Tensor, frozen: list[Frozen], *args: Any) -> tuple[Tensor, ...]:
        taken.append(len(frozen))
        return joint_low_rank_linears(x, frozen, *args)

    for module in (layers, joint_products):
        monkeypatch.setattr(module, "expands_together", lambda frozen: all(w.form.kind == "nf4" for w in frozen))
    monkeypatch.setattr(layers, "is_on_cuda", lambda x: True)
    monkeypatch.setattr(layers, "joint_low_rank_linears", joint)
    return taken


@pytest.mark.parametrize("biases", [(False, False, False), (True, False, True)], ids=["plain", "biases"])
@pytest.mark.parametrize(("quantized", "ranks"), [(False, (4, 2, 8)), (True, (4, 2, 8)), (True, (4, 100, 80))])
def test_values_and_gradients_equal_the_formula(
    quantized: bool, ranks: tuple[int, ...], biases: tuple[bool, ...], as_on_a_gpu: list[int]
) -> None:
    torch.manual_seed(0)
    linears = [nn.Linear(NUM_INPUTS, n, bias=bias) for n, bias in zip((96, 32, 64), biases, strict=True)]
    bases = [FrozenLinear(to_nf4(one.weight.detach()), one.bias) if quantized else one for one in linears]
    weights = [as_frozen(base.weight).whole().detach() for base in bases]
    x = torch.randn(2, 30, NUM_INPUTS, requires_grad=True)
    shapes = [(rank, len(weight)) for rank, weight in zip(ranks, weights, strict=True)]
    factors = [
        (torch.randn(r, NUM_INPUTS, requires_grad=True), torch.randn(o, r, requires_grad=True)) for r, o in shapes
    ]
    outputs = joint_low_rank_linears(
        x, [as_frozen(base.weight) for base in bases], [base.bias for base in bases], factors, 0.5
    )
    assert len(outputs) == (1 if quantized and sum(ranks) <= 128 else 3)
    found = torch.cat(outputs, -1)
    each = zip(weights, bases, factors, strict=True)
    expected = torch.cat([F.linear(x, weight + 0.5 * b @ a, base.bias) for weight, base, (a, b) in each], -1)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)
    leaves, seed = [x, *(factor for pair in factors for factor in pair)], torch.randn_like(found)
    grads = [torch.autograd.grad(y, leaves, seed) for y in (found, expected)]
    for grad, right in zip(*grads, strict=True):
        assert grad.is_contiguous() and (grad - right).norm() < 1e-5 * right.norm()


@pytest.mark.parametrize(
    ("case", "settings", "joint"),
    [
        ("llama_biases", {}, [3, 2]),
        ("llama_biases", {"quantize": "nf4"}, [3, 2]),
        ("llama_biases", {"targets": ["q_proj", "v_proj", "up_proj"]}, [2]),
        ("llama_biases", {"dora": True}, []),
        ("llama_biases", {"dropout": 0.3}, []),
        ("llama_biases", {"init": "pissa"}, [3, 2]),
    ],
    ids=str,
)
def test_a_model_has_the_same_loss_and_gradients(
    case: str,
    settings: dict[str, Any],
    joint: list[int],
    as_on_a_gpu: list[int],
    make_checkpoint: Any,
    monkeypatch: Any,
) -> None:
    cfg, results, (folder, _) = LoRAConfig(rank=4, **settings), [], make_checkpoint(case)
    for checkpointing in ("none", "full", None):
        if checkpointing is None:  # one by one
            monkeypatch.setattr(layers, "is_on_cuda", lambda x: False)
        torch.manual_seed(0)
        model = load_model(folder, quantize=quantize_as_loaded(cfg.quantize))
        apply_lora(model, cfg)
        randomize(model)
        apply_memory(model, MemoryConfig(activation_checkpointing=checkpointing or "none"), compile=False)
        as_on_a_gpu.clear()
        torch.manual_seed(1)
        loss = loss_of(model(IDS))
        taken = list(as_on_a_gpu)
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters() if p.requires_grad)])
        assert taken == ([] if checkpointing is None else joint * len(model.layers))
    for found in results[:2]:
        for value, right in zip(found, results[2], strict=True):
            assert value is not None and (value - right).norm() <= 1e-5 * right.norm()


@pytest.mark.long
@pytest.mark.parametrize("overwrites", [False, True])
def test_compiled_code_gives_the_same_gradients(
    overwrites: bool, as_on_a_gpu: list[int], tiny_folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With checkpointing, compiled code writes the gradients of gate and up over them."""
    grads, taken = [], list[int]()
    for compiled in (False, True):
        torch.manual_seed(0)
        model = load_model(tiny_folder, quantize=quantize_as_loaded("nf4"))
        del model.model.layers[1:]
        apply_lora(model, LoRAConfig(rank=4, quantize="nf4"))
        randomize(model)
        apply_memory(model, MemoryConfig(activation_checkpointing="full" if overwrites else "none"), compile=False)
        if compiled:
            assert taken == [3, 2]  # of the model before; compiled code cannot add to the list
            monkeypatch.setattr(layers, "joint_low_rank_linears", joint_low_rank_linears)
            model.layers[0].compile(fullgraph=True, backend="aot_eager_decomp_partition")
        as_on_a_gpu.clear()
        loss = loss_of(model(IDS))
        taken = list(as_on_a_gpu)
        loss.backward()
        grads.append([p.grad for p in model.parameters() if p.requires_grad])
    for found, right in zip(*grads, strict=True):
        assert (found - right).norm() <= 1e-5 * right.norm()


def test_other_layers_and_an_adapter_that_is_off_are_computed_one_by_one(as_on_a_gpu: list[int]) -> None:
    torch.manual_seed(0)
    shapes = [AdapterShape(4, 8.0), AdapterShape(4, 8.0), AdapterShape(8, 8.0)]
    adapted = [LoRALinear(nn.Linear(NUM_INPUTS, 32), shape, torch.float32) for shape in shapes]
    for layer in adapted:
        layer.start_at_zero()
    x = torch.randn(2, 5, NUM_INPUTS)
    assert len(LoRALinear.joint_forward(adapted[:2], x)) == 2
    assert LoRALinear.joint_forward(adapted[1:], x) == ()  # with another scaling
    adapted[0].is_on = False
    assert LoRALinear.joint_forward(adapted[:2], x) == ()
