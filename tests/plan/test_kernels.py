"""Launches that a plan counts for attention and recurrent layers, compared with the operations that a GPU runs."""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import lean_ft
from lean_ft.models.attention.attention import attend_documents
from lean_ft.models.attention.document_attention import document_attention
from lean_ft.models.attention.row_attention import Rows, attend_rows, attend_rows_backward
from lean_ft.models.state.linear_attention import linear_attention
from lean_ft.plan.devices import Device, find_device
from lean_ft.plan.trace import Trace
from lean_ft.plan.world import PlannedWorld
from lean_ft.system.costs import cost_of
from lean_ft.system.world import inside

NUM_ROWS, NUM_TOKENS = 2, 512


class Operations(TorchDispatchMode):
    """The operations that are no views and allocate more than memory, and the bytes of their arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.number = self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        moved = sum(t.numel() * t.element_size() for t in _tensors((args, result)))
        makes_none = func.is_view or func.__name__.startswith(("empty", "new_", "_unsafe_view"))
        if moved and func.namespace == "aten" and not makes_none:
            self.number += 1
            self.num_bytes += moved
        return result


def _tensors(nested: Any) -> list[Tensor]:
    if isinstance(nested, list | tuple):
        return [tensor for part in nested for tensor in _tensors(part)]
    return [nested] if isinstance(nested, Tensor) else []


def given(dtype: torch.dtype = torch.bfloat16, head_dim: int = 64, sinks: bool = False) -> tuple[Any, ...]:
    query = torch.empty(NUM_ROWS * NUM_TOKENS, 8, head_dim, dtype=dtype)
    key, value = (torch.empty(NUM_ROWS * NUM_TOKENS, 2, head_dim, dtype=dtype) for _ in range(2))
    cu_seqlens = torch.empty(5, dtype=torch.int32)
    return query, key, value, cu_seqlens, torch.empty(8, dtype=dtype) if sinks else None


def planned(work: Any, device: Device) -> tuple[Trace, dict[str, Any]]:
    trace = Trace(device)
    world = PlannedWorld(trace)
    with inside(world), world.fake_mode, trace:
        work()
    return trace, {name: launches for (_, name), launches in trace.time.spent.ledger.items()}


@pytest.mark.first(2)
@pytest.mark.parametrize(
    ("card", "kind", "rules", "why"),
    [
        ("A100 80GB", {"head_dim": 640}, {"window": 128}, "heads of 640 features"),
        ("A100 80GB", {"dtype": torch.float32}, {"softcap": 30.0}, "float32. Set model.dtype=bfloat16"),
        ("T4", {"dtype": torch.float16, "sinks": True}, {}, "compute capability 7.5 is below 8.0"),
    ],
)
def test_attention_without_a_kernel_counts_the_operations_of_its_blocks(card, kind, rules, why) -> None:
    def work() -> None:
        query, key, value, cu_seqlens, sinks = given(**kind)
        leaves = [x.requires_grad_() for x in (query, key, value)]
        out = document_attention(*leaves, cu_seqlens, sinks, **rules, row_tokens=NUM_TOKENS)
        torch.autograd.grad(out, leaves, torch.empty_like(out))

    trace, found = planned(work, find_device(card))
    operations = Operations()
    with FakeTensorMode(allow_non_fake_inputs=True):
        query, key, value, cu_seqlens, sinks = given(**kind)
    with query.fake_mode, operations:
        rows = Rows(cu_seqlens, sinks, None, rules.get("window"), rules.get("softcap"), NUM_TOKENS)
        attend_rows(query, key, value, rows)
        attend_rows_backward(query, query, key, value, rows)
    if kind.get("dtype") == torch.float32:
        moved = sum(launches.moved_bytes for launches in found.values())
        assert moved == pytest.approx(operations.num_bytes, rel=1e-3)  # lookups read only some rows
    # Five of seven products of 16 bits are float32. They convert both factors on a CPU, and none on a GPU.
    converted = 0 if kind.get("dtype") == torch.float32 else 2 * 5 * found["bmm"].number / 7
    assert sum(launches.number for launches in found.values()) == operations.number - converted
    assert [why in slow for slow in trace.slow_paths] == [True]


@pytest.mark.parametrize(
    ("kind", "rules", "trains_sinks", "forward", "backward"),
    [
        ({}, {}, False, 2, 7),
        ({"sinks": True}, {"window": 128}, False, 2, 5),
        ({"sinks": True}, {}, True, 2, 7),
        ({}, {"softcap": 30.0}, False, 3, 5),
        ({}, {"num_ahead": 511}, False, 2, 7),
        ({"head_dim": 512}, {}, False, 3, 5),
        ({"sinks": True}, {"softcap": 30.0}, True, 3, 6),
    ],
)
def test_attention_is_a_few_launches(kind, rules, trains_sinks: bool, forward: int, backward: int) -> None:
    """Launches counted on a simulated H100."""

    def work(grads: bool) -> None:
        *qkv, cu_seqlens, sinks = given(**kind)
        leaves = [x.requires_grad_() for x in (*qkv, *([sinks] if trains_sinks else []))]
        out = document_attention(*qkv, cu_seqlens, sinks, **rules)
        if grads:
            torch.autograd.grad(out, leaves, torch.empty_like(out))

    for grads in (False, True):
        trace, found = planned(lambda: work(grads), find_device("H100"))  # noqa: B023
        number = sum(launches.number for launches in found.values())
        assert number == forward + grads * backward and not trace.slow_paths


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [{}, {"sinks": True}, {"head_dim": 512}], ids=["flash", "sinks", "own"])
def test_a_plan_saves_for_backward_what_a_card_saves(kind: dict[str, Any]) -> None:
    def saved_bytes(device: str) -> int:
        sizes = dict[int, int]()
        *qkv, cu_seqlens, sinks = (None if x is None else x.to(device) for x in given(**kind))
        leaves = [x.detach().requires_grad_() for x in qkv]
        bounds = torch.linspace(0, NUM_ROWS * NUM_TOKENS, len(cu_seqlens), dtype=torch.int32, device=device)

        def pack(x: Tensor) -> Tensor:
            sizes[x.untyped_storage()._cdata] = x.nbytes
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            attend_documents(*(x[None] for x in leaves), bounds, sinks=sinks)
        return sum(sizes.values())

    found = list[int]()
    planned(lambda: found.append(saved_bytes("cpu")), find_device("H100"))
    assert found[0] == pytest.approx(saved_bytes("cuda"), abs=1024)  # state of dropout


def test_each_operator_registers_its_cost() -> None:
    package = Path(lean_ft.__file__).parent
    operators = {}
    for file in package.rglob("*.py"):
        for name in re.findall(r'custom_op\(\s*"lean_ft::(\w+)"', file.read_text()):
            operators[name] = ".".join(file.relative_to(package.parent).with_suffix("").parts)
    assert len(operators) > 10
    for name, module in operators.items():
        import_module(module)
        assert cost_of(getattr(torch.ops.lean_ft, name)) is not None, (
            f"{module}: register_cost(torch.ops.lean_ft.{name})"
        )


@pytest.mark.parametrize(("dtype", "card"), [(torch.float32, "H100"), (torch.bfloat16, "T4")])
def test_recurrent_layers_without_their_kernels_name_the_reason(dtype: torch.dtype, card: str) -> None:
    """And their scans take two or three operations per chunk of 64 tokens."""

    def launches(num_tokens: int) -> float:
        def work() -> None:
            query, key, value = (torch.empty(1, num_tokens, 2, 16, dtype=dtype) for _ in range(3))
            decay = torch.empty(1, num_tokens, 2)
            linear_attention(query, key, value, decay, decay, torch.empty(3, dtype=torch.int32), None)

        trace, found = planned(work, find_device(card))
        reason = "float32" if card == "H100" else "compute capability 7.5 is below 8.0"
        assert [path.partition(" (slow): ")[2] for path in trace.slow_paths] == [reason]
        return sum(launches.number for launches in found.values())

    assert launches(512) - launches(256) == 3 * 4
