"""Every private name of torch in the table exists in this torch and does what the table says it is for."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from lean_ft import torch_private
from lean_ft.models.few_rows import _can_pack
from lean_ft.torch_private import PRIVATE_NAMES, PrivateName, missing_names


def _graph_is_kept() -> bool:
    seen = []

    class Note(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append(torch_private.graph_is_kept())
            return grad

    y = Note.apply(torch.ones(1, requires_grad=True))
    y.backward(retain_graph=True)
    y.backward()
    return seen == [True, False]


def _adamw_moves_against_the_gradient() -> bool:
    weight, grad, first, second = torch.ones(3), torch.ones(3), torch.zeros(3), torch.zeros(3)
    torch_private.fused_adamw_(
        [weight], [grad], [first], [second], [], [torch.ones(())],
        lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip
    return torch.allclose(weight, torch.full((3,), 0.9))


def _foreach_mul() -> bool:
    tensors = [torch.ones(2), torch.ones(3)]
    torch_private.foreach_mul_(tensors, 3.0)
    return all((tensor == 3).all() for tensor in tensors)


def _foreach_lerp() -> bool:
    tensors = [torch.zeros(2), torch.zeros(3)]
    torch_private.foreach_lerp_(tensors, [torch.ones(2), torch.ones(3)], 0.25)
    return all((tensor == 0.25).all() for tensor in tensors)


def _foreach_copy() -> bool:
    tensors = [torch.ones(2), torch.ones(3)]
    torch_private.foreach_copy_(tensors, [torch.full((2,), 3.0), torch.full((3,), 3.0)])
    return all((tensor == 3).all() for tensor in tensors)


def _foreach_norm() -> bool:
    norms = torch_private.foreach_norm([torch.full((4,), 3.0).bfloat16(), torch.ones(9)], 2, dtype=torch.float32)
    return [norm.item() for norm in norms] == [6.0, 3.0]


def _assert_on_device() -> bool:
    torch_private.assert_on_device(torch.tensor(True), "fine")
    with pytest.raises(RuntimeError, match="not fine"):
        torch_private.assert_on_device(torch.tensor(False), "not fine")
    return True


def _softmax_backward() -> bool:
    scores = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    weights, grad = scores.softmax(-1), torch.randn(2, 5, dtype=torch.float64)
    (expected,) = torch.autograd.grad(weights, scores, grad)
    return torch.allclose(torch_private.softmax_backward(grad, weights.detach(), -1, torch.float64), expected)


def _flash_attention() -> bool:
    """The arguments and the shapes of results; the values are tested on a GPU."""
    query, bounds = torch.empty(10, 4, 64, dtype=torch.bfloat16, device="meta"), torch.empty(2, device="meta").int()
    sizes, windows = (bounds, bounds, 10, 10, 0.0), {"window_size_left": 3, "window_size_right": 0}
    out, lse, *unused, _ = torch_private.flash_attention_forward(*[query] * 3, *sizes, False, False, **windows)
    inputs = query, query, query, query, out, lse
    grads = torch_private.flash_attention_backward(*inputs, *sizes, False, *unused, scale=None, **windows)
    return lse.shape == (4, 10) and all(grad.shape == query.shape for grad in grads)


@torch.no_grad()
def _packed_linear() -> bool:
    x, weight, bias = torch.randn(3, 32).bfloat16(), torch.randn(48, 32).bfloat16(), torch.randn(48).bfloat16()
    if not _can_pack(torch.bfloat16):  # a CPU with AVX2 alone
        with pytest.raises(RuntimeError, match="needs the cpu support"):
            torch_private.pack_linear(weight, 8)
        return True
    found = torch_private.packed_linear(x, torch_private.pack_linear(weight, 8), bias, "none", [], "")
    return torch.allclose(found.float(), torch.nn.functional.linear(x, weight, bias).float(), atol=0.1, rtol=0.02)


def _int8_linear() -> bool:
    """With small numbers, which do not overflow on a CPU without VNNI."""
    x, weight = torch.randint(120, 136, (3, 32), dtype=torch.uint8), torch.randint(-3, 4, (48, 32), dtype=torch.int8)
    scales, zeros = torch.ones(48), torch.zeros(48, dtype=torch.int32)
    packed = torch_private.pack_int8_linear(weight, None)
    found = torch_private.int8_linear(x, 1.0, 128, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], "")
    return torch.equal(found, (x.float() - 128) @ weight.float().T)


def _weight_only(bits: int) -> bool:
    x, weight, scale = torch.randn(3, 64).bfloat16(), torch.randint(-8, 8, (48, 64), dtype=torch.int8), 0.5
    if bits == 8:
        found = torch_private.int8_weight_linear(x, weight, torch.full((48,), scale).bfloat16())
    else:
        packed = torch_private.pack_int4_weight(weight.int() + 8, 1)
        scales = torch.tensor([scale, 0.0]).expand(2, 48, 2).contiguous().bfloat16()  # and offsets
        found = torch_private.int4_weight_linear(x, packed, 32, scales)
    return torch.allclose(found.float(), x.float() @ weight.float().T * scale, rtol=0.02, atol=0.1)


def _shapes_only() -> bool:
    seen = []

    class Watch(torch_private.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert isinstance(func, torch_private.OpOverload)
            if func is torch_private.read_scalar:
                seen.append(func)
                return 1.0
            return func(*args, **(kwargs or {}))

    with torch_private.FakeTensorMode(), Watch():
        total = torch.ones(4).sum()
        assert isinstance(total, torch_private.FakeTensor)
        with torch_private.without_modes():
            assert not isinstance(torch.ones(1), torch_private.FakeTensor)
        total.item()
    return len(seen) == 1


def _compiled_backend() -> bool:
    """The planner's backend: graphs by AOTAutograd and the min-cut partitioner, copies dropped as Inductor drops
    them."""
    graphs = []

    def compiler(graph, inputs):
        torch_private.reinplace_operations(graph.graph)
        torch_private.decompose_auto_functionalized(graph.graph)
        torch_private.donated_inputs()  # None outside of a backward graph
        graphs.append(graph)

        def call(arguments):
            return graph(*arguments)

        call._boxed_call = True
        return call

    backend = torch_private.aot_autograd(
        fw_compiler=compiler, bw_compiler=compiler, partition_fn=torch_private.min_cut_partition
    )
    x = torch.randn(3, requires_grad=True)
    torch.compile(lambda x: x.sin().cos(), backend=backend)(x).sum().backward()
    torch_private.dynamo.reset()
    return len(graphs) == 2 and torch.allclose(x.grad, -x.sin().sin() * x.cos())


def _fake_group() -> bool:
    """FSDP2 on a group that sends nothing: its gathering is watched, and a rank keeps half of the rows."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    calls = []

    def wrap(function, resizes):
        def call(*args, **kwargs):
            calls.append(resizes)
            return function(*args, **kwargs)

        return call

    dist.init_process_group("fake", store=torch_private.FakeStore(), rank=0, world_size=2)
    try:
        gathered = torch_private.collectives.all_gather_into_tensor(torch.ones(2), 2, dist.group.WORLD.group_name)
        assert torch_private.collectives.wait_tensor(gathered).shape == (4,)
        layer = nn.Linear(4, 6)
        with torch_private.wrapped_gathering(wrap):
            fully_shard(layer)
            layer(torch.ones(1, 4)).sum().backward()
        assert torch_private.fsdp_common.FSDPMeshInfo
        return torch_private.local_rows(layer.weight).shape == (3, 4) and {True, False} == set(calls)
    finally:
        dist.destroy_process_group()


def _num_compiled_graphs() -> bool:
    before = torch_private.num_compiled_graphs()
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    return torch_private.num_compiled_graphs() == before + 1


def _uncompiled() -> bool:
    layer = nn.Linear(2, 2)
    layer.compile(backend="eager")
    compiled = layer._compiled_call_impl
    with torch_private.uncompiled([layer]):
        assert layer._compiled_call_impl is None
    return layer._compiled_call_impl is compiled is not None


def _constant_for_compiler() -> bool:
    answers = [1, 2]
    answer = torch_private.constant_for_compiler(lambda: answers.pop(0))
    compiled = torch.compile(lambda x: x + answer(), backend="eager", fullgraph=True)
    return [compiled(torch.zeros(())).item() for _ in range(3)] == [1, 1, 1] and answers == [2]


def _version() -> bool:
    tensor = torch.ones(2)
    before = torch_private.version_of(tensor)
    return torch_private.version_of(tensor.add_(1)) == before + 1


def _node_numbers():
    """A node's backward has the number that its forward saw."""
    numbers = []
    y = torch.ones(2, requires_grad=True) * 2
    numbers.append(torch_private.next_node_number() - 1)
    assert torch_private.backward_node_number() is None

    class Seen(torch_private.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            numbers.append(torch_private.backward_node_number())
            return func(*args, **(kwargs or {}))

    with Seen():
        y.backward(torch.ones(2))
    return numbers[0] in numbers[1:]


def _storage() -> bool:
    tensor = torch.ones(4)
    key = torch_private.storage_key(tensor.untyped_storage())
    return (
        key
        == torch_private.storage_key(tensor[2:].untyped_storage())
        != torch_private.storage_key(torch.ones(4).untyped_storage())
    )


def _inductor() -> bool:
    return torch_private.pick_vec_isa().bit_width() >= 0 and callable(torch_private.lookup_backend("inductor"))


def _budget() -> bool:
    with torch_private.functorch_config.patch(activation_memory_budget=0.5):
        return torch_private.functorch_config.activation_memory_budget == 0.5


USES = {
    "foreach_mul_": _foreach_mul,
    "foreach_copy_": _foreach_copy,
    "foreach_lerp_": _foreach_lerp,
    "foreach_norm": _foreach_norm,
    "fused_adamw_": _adamw_moves_against_the_gradient,
    "assert_on_device": _assert_on_device,
    "softmax_backward": _softmax_backward,
    **dict.fromkeys(["flash_attention_forward", "flash_attention_backward"], _flash_attention),
    "graph_is_kept": _graph_is_kept,
    "is_wrapper_tensor": lambda: not torch_private.is_wrapper_tensor(torch.ones(1)),
    "dynamo": lambda: torch_private.dynamo.config.recompile_limit > 0 and torch_private.dynamo.mark_static,
    **dict.fromkeys(["pick_vec_isa", "lookup_backend"], _inductor),
    "functorch_config": _budget,
    "tree_iter": lambda: list(torch_private.tree_iter({"a": [1, (2,)]})) == [1, 2],
    "is_this_machine": lambda: torch_private.is_this_machine("localhost"),
    "version_of": _version,
    "storage_key": _storage,
    **dict.fromkeys(["next_node_number", "backward_node_number"], _node_numbers),
    "constant_for_compiler": _constant_for_compiler,
    "num_compiled_graphs": _num_compiled_graphs,
    "uncompiled": _uncompiled,
    **dict.fromkeys(["pack_linear", "packed_linear"], _packed_linear),
    **dict.fromkeys(["pack_int8_linear", "int8_linear"], _int8_linear),
    "int8_weight_linear": lambda: _weight_only(8),
    **dict.fromkeys(["pack_int4_weight", "int4_weight_linear"], lambda: _weight_only(4)),
    **dict.fromkeys(
        ["read_scalar", "FakeTensor", "FakeTensorMode", "without_modes", "TorchDispatchMode", "OpOverload"],
        _shapes_only,
    ),
    **dict.fromkeys(
        [
            *("aot_autograd", "min_cut_partition", "decompose_auto_functionalized", "reinplace_operations"),
            "donated_inputs",
        ],
        _compiled_backend,
    ),
    **dict.fromkeys(
        ["FakeStore", "collectives", "fsdp_common", "fsdp_param", "fsdp_param_group", "local_rows"], _fake_group
    ),
}


def test_each_name_has_a_use_here():
    assert set(USES) == set(PRIVATE_NAMES)
    assert missing_names() == {}


@pytest.mark.first(len({*USES.values()}) - 1)  # the last one imports it
@pytest.mark.parametrize(
    "use", sorted(dict.fromkeys(USES.values()), key=lambda use: use is _inductor), ids=lambda use: use.__name__
)
def test_names_do_what_they_are_for(use):
    assert use()


def test_a_name_that_torch_lacks_is_reported(monkeypatch):
    gone = PrivateName("torch:_no_such_name", "nothing", "nothing fails")
    monkeypatch.setitem(PRIVATE_NAMES, "gone", gone)
    assert missing_names() == {"gone": gone}
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = torch_private.gone


def test_private_names_stand_nowhere_else():
    """The pattern of the lint, which also runs here: pre-commit is not part of `make test`."""
    root = Path(__file__).parents[1]
    config = (root / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    pattern = re.compile(config.split("id: private-torch")[1].split("entry: '")[1].split("'\n")[0])
    assert pattern.search("from torch._dynamo import config") and pattern.search("torch.ops.aten._softmax(x)")
    found = [
        f"{path.relative_to(root)}: {match.group()}"
        for folder in ("lean_ft", "recipes")
        for path in (root / folder).rglob("*.py")
        if path.name != "torch_private.py"
        if (match := pattern.search(path.read_text(encoding="utf-8")))
    ]
    assert not found
