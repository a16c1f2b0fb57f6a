"""Checkpointing and compilation change memory and time, but no number."""

import copy
from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lean_ft import load_model
from lean_ft.memory import apply_memory, checkpoint_layers, compile_layers, compiling
from lean_ft.peft import apply_lora, quantize_as_loaded
from lean_ft.settings import LoRAConfig, MemoryConfig
from tests.models.conftest import kept_bytes

WIDTH, NUM_LAYERS = 16, 4


class Layer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            self.forwards += 1
        return x + self.dropout(self.down(self.up(x).sin()))


class Stack(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(NUM_LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def gradients(model: nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(2)).requires_grad_()
    model.zero_grad()
    model(x).square().sum().backward()
    return [param.grad for param in model.parameters() if param.grad is not None]


def saved_bytes(model: nn.Module) -> int:
    return kept_bytes(lambda: model(torch.randn(3, WIDTH)), model)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_checkpointing_leaves_the_gradients_as_they_are(dropout: float, every: int) -> None:
    plain = Stack(dropout)
    checkpointed = copy.deepcopy(plain)
    checkpoint_layers(checkpointed, every)
    for expected, got in zip(gradients(plain), gradients(checkpointed), strict=True):
        assert torch.equal(expected, got)


@pytest.mark.parametrize(("every", "recomputed"), [(1, [0, 1, 2, 3]), (2, [0, 2]), (3, [0, 3])])
def test_every_nth_layer_recomputes_its_forward_once(every: int, recomputed: list[int]) -> None:
    model = Stack()
    apply_memory(model, MemoryConfig(activation_checkpointing="every_n", checkpoint_every_n=every), compile=False)
    gradients(model)
    forwards = [layer.forwards for layer in model.layers]
    assert forwards == [2 if index in recomputed else 1 for index in range(NUM_LAYERS)]


def test_checkpointing_keeps_the_inputs_of_the_layers_alone() -> None:
    plain, checkpointed = Stack(), Stack()
    checkpoint_layers(checkpointed)
    assert saved_bytes(checkpointed) <= NUM_LAYERS * 3 * WIDTH * 4
    assert saved_bytes(plain) > 4 * saved_bytes(checkpointed)


def test_checkpointing_edits_the_instance_and_not_its_class() -> None:
    checkpoint_layers(Stack())
    other = Stack()
    gradients(other)
    assert [layer.forwards for layer in other.layers] == [1] * NUM_LAYERS


@pytest.mark.parametrize("technique", [checkpoint_layers, compile_layers])
def test_a_model_without_layers_is_refused(technique) -> None:
    with pytest.raises(ValueError, match="ModuleList `layers`"):
        technique(nn.Linear(2, 2))


def test_a_stride_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        checkpoint_layers(Stack(), 0)


@pytest.mark.first(1)
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_layers_share_one_compilation_and_deliver_gradients_per_layer(checkpointing: str, without_codegen) -> None:
    torch._dynamo.utils.counters.clear()
    plain = Stack()
    expected = gradients(plain)
    compiled = copy.deepcopy(plain)
    apply_memory(compiled, MemoryConfig(activation_checkpointing=checkpointing), compile=True)  # type: ignore[arg-type]

    alive, fired = [], Counter()

    def update(param: nn.Parameter) -> None:
        alive.append(sum(other.grad is not None for other in compiled.parameters()))
        fired[id(param)] += 1
        collected[id(param)], param.grad = param.grad, None

    collected: dict[int, Tensor | None] = {}
    for param in compiled.parameters():
        param.register_post_accumulate_grad_hook(update)
    gradients(compiled)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert max(alive) <= len(list(compiled.layers[0].parameters()))
    assert set(fired.values()) == {1}
    for want, param in zip(expected, compiled.parameters(), strict=True):
        torch.testing.assert_close(collected[id(param)], want)


class Count(TorchDispatchMode):
    """Counts forward passes of attention, and matrix products."""

    attention = products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.attention += "attention" in str(func) and "backward" not in str(func)
        self.products += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
        return func(*args, **(kwargs or {}))


def test_selective_checkpointing_recomputes_nothing_that_it_keeps_and_changes_no_gradient() -> None:
    tokens = torch.arange(24).view(2, 12)
    counts, gradients_of = {}, {}
    for kind in (("none", "attention"), ("full", "attention"), ("selective", "attention"), ("selective", "products")):
        model = load_model("tiny")
        memory = MemoryConfig(activation_checkpointing=kind[0], selective_keeps=kind[1])  # type: ignore[arg-type]
        apply_memory(model, memory, compile=False)
        with Count() as count:
            model(tokens).square().mean().backward()
        counts[kind], gradients_of[kind] = count, [param.grad for param in model.parameters()]
    none, full, attention, products = counts.values()
    assert full.attention == 2 * none.attention == 2 * attention.attention == 2 * products.attention > 0
    assert full.products == attention.products > none.products == products.products
    expected, *others = gradients_of.values()
    for grads in others:
        assert all(torch.equal(grad, plain) for grad, plain in zip(grads, expected, strict=True))


@pytest.mark.long
def test_a_smaller_budget_keeps_less_and_changes_no_gradient(without_codegen) -> None:
    expected, kept = gradients(Stack()), []
    for budget in (1.0, 0.0):
        torch._dynamo.reset()
        compiling._inductor_within.cache_clear()
        model = Stack()
        memory = MemoryConfig(activation_checkpointing="budget", activation_budget=budget)
        apply_memory(model, memory, compile=True)
        kept.append(saved_bytes(model))
        for want, got in zip(expected, gradients(model), strict=True):
            torch.testing.assert_close(got, want)
    assert kept[1] < kept[0]


@pytest.mark.parametrize(
    ("lora", "keep", "overwrites"),
    [
        ({}, "nothing", True),
        ({"quantize": "nf4"}, "attention", True),
        ({}, "products", False),
        (None, "nothing", False),
    ],
    ids=str,
)
def test_gate_and_up_are_overwritten_if_recomputed_beside_an_adapter(lora, keep, overwrites):
    if lora is None:
        model = load_model("tiny")
    else:
        cfg = LoRAConfig(**lora)
        model = load_model("tiny", dtype=torch.bfloat16, quantize=quantize_as_loaded(cfg.quantize))
        apply_lora(model, cfg)
    checkpoint_layers(model, keep=keep)
    assert {layer.mlp.overwrites for layer in model.layers} == {overwrites}
