"""The planner's backend for torch.compile: it partitions graphs as the compiler does, and counts the memory of fused
kernels.

AOTAutograd's min-cut partitioner decides what forward keeps for backward, as in a real run (also with
`activation_memory_budget`). In each graph, chains of elementwise operations and reductions become kernels with
intermediates in registers. A value takes memory only if a matrix product or another opaque operation reads it, or if it
leaves the graph.

On a GPU, Inductor also makes one kernel of values with the same size that read the same memory, anywhere in the graph.
All tensors of that kernel are alive at once, such as the six tensors of a gated layer's backward. And it writes a
result over an input of the same size if each element depends on the same position of that input and nothing reads the
input later. Without these two rules, the planned peaks of some presets are off by 0.1 to 0.8 GiB.
"""

import gc
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, fx

from lean_ft.plan.devices import Kernel
from lean_ft.plan.memory import num_bytes
from lean_ft.plan.time import short_name
from lean_ft.plan.trace import Charge, Trace
from lean_ft.torch_private import (
    FakeTensor,
    OpOverload,
    aot_autograd,
    decompose_auto_functionalized,
    donated_inputs,
    min_cut_partition,
    reinplace_operations,
    storage_key,
    tree_iter,
)

# Names of operations whose elements come from other positions of the input.
_MOVING_NAMES = (
    *("permute", "transpose", "t", "expand", "slice", "select"),
    *("cat", "flip", "roll", "gather", "index", "repeat"),
)
# Parts of names of PyTorch's operations that the compiler does not fuse. Operators of other libraries are never fused.
_OPAQUE_NAMES = (
    *("mm", "addmm", "bmm", "baddbmm", "_scaled", "convolution", "embedding_dense_backward", "sort", "topk", "nonzero"),
    *("scatter", "index_put", "cumsum", "grouped", "_flash", "_efficient", "attention", "histc", "bincount"),
)

_SHORT_ROW = 1024  # values that Inductor reduces in the kernel that also writes them


def fusing_backend(trace: Trace) -> Callable:
    """A torch.compile backend whose compiled graphs report memory and time to `trace`.

    Dynamo's reference cycles hold tensors of the traced call until Python collects them. The backend collects them
    before the first graph runs after a compilation, so that the peak does not depend on when Python would do so.
    """
    has_garbage = False

    def compiler(graph: fx.GraphModule, inputs: object, is_backward: bool) -> Callable:
        nonlocal has_garbage
        has_garbage = True
        # AOTAutograd copies a tensor before an operation writes to it; Inductor does not if nothing reads it later.
        with trace.uncounted():  # this calls the operations once
            reinplace_operations(graph.graph)
            decompose_auto_functionalized(graph.graph)
        kernels = _Kernels(graph, trace, set(donated_inputs() or ()) if is_backward else set())

        def call(arguments: list[Any]) -> Any:
            nonlocal has_garbage
            if has_garbage:
                gc.collect()
                has_garbage = False
            return kernels(arguments)

        vars(call)["_boxed_call"] = True  # arguments come in a list that is emptied, so that they are freed early
        return call

    return aot_autograd(
        fw_compiler=partial(compiler, is_backward=False),
        bw_compiler=partial(compiler, is_backward=True),
        partition_fn=min_cut_partition,
        keep_inference_input_mutations=True,  # as Inductor does; otherwise in-place writes would count twice
    )


class _Kernels:
    """A compiled graph. donated: indices of inputs that nothing else reads."""

    def __init__(self, graph: fx.GraphModule, trace: Trace, donated: set[int]) -> None:
        self._module, self._trace = graph, trace
        self._nodes = list(graph.graph.nodes)
        returned = set(next(node for node in self._nodes if node.op == "output").all_input_nodes)
        self._stored = {
            node
            for node in self._nodes
            if node.op == "call_function"
            and (_is_opaque(node) or node in returned or any(_is_opaque(user) for user in _readers(node)))
        }
        together = {} if trace.device.is_cpu else _together(self._nodes, self._stored)
        self._dead_after = _dead_after(self._nodes, self._stored, together)
        self._reads = {node: _sources(node, self._stored) for node in self._stored}
        self._kernel = {node: node for node in self._nodes if node in self._stored} | together
        self._read_first = _read_first(self._kernel, self._reads)
        self._writes = {} if trace.device.is_cpu else _writes(self._nodes, self._stored)
        inputs = [node for node in self._nodes if node.op == "placeholder"]
        own = self._stored - returned | {inputs[i] for i in donated}
        self._written_over = {} if trace.device.is_cpu else _written_over(self._dead_after, self._reads, own, together)
        self._tuned = {} if trace.device.is_cpu else _tuned(self._kernel, self._written_over, self._writes)
        self._is_tuned = False
        self._known: dict[tuple[object, ...], _Known] = {}  # by the shapes of the inputs

    def __call__(self, arguments: list[Any]) -> Any:
        trace, values = self._trace, {}
        trace.memory.write(arguments)  # a graph writes only to its arguments
        shapes = [
            (x.shape, x.stride(), x.dtype, trace.memory.counts(x)) if isinstance(x, Tensor) else x for x in arguments
        ]
        is_new = (key := (trace.time.longest_document, *shapes)) not in self._known
        known = self._known.setdefault(key, _Known())
        placeholders = (node for node in self._nodes if node.op == "placeholder")
        for node, value in zip(placeholders, arguments, strict=True):
            values[node] = value
        arguments.clear()
        args: Sequence[Any]
        kwargs: Mapping[str, Any]
        result: Any = None
        for node in self._nodes:
            args, kwargs = (), {}  # frees dead values
            if node.op == "get_attr":
                values[node] = getattr(self._module, str(node.target))
            elif node.op == "output":
                result = fx.map_arg(node.args[0], lambda n: values[n])
                trace.memory.note(result)
            elif node in known.skipped:
                if (viewed := known.viewed.get(node)) in values:
                    values[node] = values[viewed]  # keeps its memory alive
                trace.pay(known.costs.get(node))
            elif node.op == "call_function":
                is_exchange = getattr(node.target, "namespace", None) == "_c10d_functional"
                with trace.uncounted():
                    if node in known.made:
                        values[node] = known.made[node]()
                    else:
                        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: values[n])
                        assert callable(node.target)
                        values[node] = node.target(*args, **kwargs)
                        if is_new and not is_exchange:
                            known.add(node, values, trace)
                if node in self._stored:
                    if node in self._written_over:
                        trace.memory.overwrite(values[self._written_over[node]], values[node])
                    trace.memory.note(values[node])
                    self._tune(node)
                    if is_exchange:
                        trace.exchange(cast(OpOverload, node.target), args)
                    else:
                        if is_new:
                            known.costs[node] = self._cost(node, args, kwargs, values)
                        trace.pay(known.costs[node])
                elif node in self._writes:
                    self._tune(node)
                    if is_new:
                        kernel = Kernel(0.0, 2 * num_bytes(values[node]), number=self._writes[node])
                        known.costs[node] = Charge({"fused copy_": trace.time.launches(kernel)}, _module(node))
                    trace.pay(known.costs[node])
            for dead in self._dead_after.get(node, ()):
                values.pop(dead, None)
        self._is_tuned = True
        if is_new:
            known.skip_unneeded(self._nodes, self._stored | set(self._written_over.values()))
        return result

    def _tune(self, node: fx.Node) -> None:
        if not self._is_tuned and node in self._tuned:
            self._trace.memory.tune(self._tuned[node])

    def _cost(
        self, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any], values: Mapping[fx.Node, object]
    ) -> Charge | None:
        if _is_opaque(node):
            return self._trace.cost(cast(OpOverload, node.target), args, kwargs, values[node], _module(node))
        if _is_view(node):
            return None
        sources = [values[source] for source in self._read_first[node] if source in values]
        tensors = tree_iter([*sources, values[node]])
        moved = sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))
        name = getattr(getattr(node.target, "overloadpacket", node.target), "__name__", "")
        kernel = Kernel(0.0, moved, number=int(self._kernel[node] is node))
        return Charge({f"fused {name}": self._trace.time.launches(kernel)}, _module(node))


class _Known:
    """What a graph does with inputs of one shape. Layers of the same shape share a graph: the first layer runs all
    operations on shapes, and the others only make the tensors that take memory."""

    def __init__(self) -> None:
        self.made: dict[fx.Node, Callable[[], Tensor]] = {}  # nodes with a new tensor -> how to make it
        self.viewed: dict[fx.Node, fx.Node] = {}  # views -> a node with the same memory
        self.elements: set[fx.Node] = set()  # views of one of several tensors
        self.counted: set[fx.Node] = set()  # views of memory that is counted already
        self.costs: dict[fx.Node, Charge | None] = {}
        self.skipped: set[fx.Node] = set()

    def add(self, node: fx.Node, values: Mapping[fx.Node, object], trace: Trace) -> None:
        """Note what the value of a node is."""
        value, storages = values[node], _storages(values[node])
        for source in node.all_input_nodes:
            if storages & (given := _storages(values[source])):
                self.viewed[node] = source
                if storages != given:
                    self.elements.add(node)
                elif trace.memory.counts(value):
                    self.counted.add(node)
                return
        if isinstance(value, Tensor) and type(value) is FakeTensor:
            make = partial(torch.empty_strided, value.shape, value.stride(), dtype=value.dtype, device=value.device)
            if make().untyped_storage().nbytes() == value.untyped_storage().nbytes():
                self.made[node] = make

    def skip_unneeded(self, nodes: list[fx.Node], needed: set[fx.Node]) -> None:
        """From now on, skip nodes whose value takes no memory, unless the value of a `needed` node is a view of it."""
        needed = needed - self.counted | self.elements
        for node in reversed(nodes):
            if node.op == "output" or (node in needed and node not in self.made):
                needed.update(node.all_input_nodes)
        self.skipped = {node for node in nodes if node.op == "call_function"} - needed


def _storages(value: object) -> set[int]:
    return {storage_key(tensor.untyped_storage()) for tensor in tree_iter(value) if isinstance(tensor, Tensor)}


def _module(node: fx.Node) -> str:
    """The module that computes the node, or whose gradient it computes."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return short_name(list(stack.values())[-1][0]) if stack else ""


def _is_opaque(node: fx.Node) -> bool:
    target = node.target
    if node.op != "call_function" or not isinstance(target, OpOverload):
        return False
    if target.namespace not in ("aten", "prims"):
        return True
    return any(part in target.__name__ for part in _OPAQUE_NAMES)


def _is_view(node: fx.Node) -> bool:
    target = node.target
    return node.op == "call_function" and (
        not isinstance(target, OpOverload) or target.is_view or "view" in target.__name__
    )


def _readers(node: fx.Node) -> set[fx.Node]:
    """Nodes that read the node's value, also through views."""
    readers = set()
    for user in node.users:
        readers |= _readers(user) if _is_view(user) else {user}
    return readers


def _sources(node: fx.Node, stored: set[fx.Node]) -> dict[fx.Node, None]:
    """Stored values and graph inputs that a kernel for `node` reads, in argument order."""
    sources: dict[fx.Node, None] = {}
    for source in node.all_input_nodes:
        if source in stored or source.op != "call_function":
            sources[source] = None
        else:
            sources |= _sources(source, stored)
    return sources


def _writes(nodes: list[fx.Node], stored: set[fx.Node]) -> dict[fx.Node, int]:
    """Values that are only written into the graph's inputs, and the launches of each. Those of one size share a launch,
    also with one value of each short row, such as the scale of a block."""
    writes: dict[fx.Node, int] = {}
    for node in nodes:
        if _is_write(node) and node not in stored and node.args[1] not in stored:
            writes[node] = 0
    sizes = {node: node.meta["val"].numel() for node in writes}
    launched: list[int] = []
    for node, size in sorted(sizes.items(), key=lambda item: -item[1]):
        if not any(other % size == 0 and other <= _SHORT_ROW * size for other in launched if size):
            writes[node] = 1
            launched.append(size)
    return writes


def _tuned(
    kernel: Mapping[fx.Node, fx.Node], written_over: Collection[fx.Node], writes: Mapping[fx.Node, int]
) -> dict[fx.Node, list[int]]:
    """For the last node of each kernel that Inductor tunes, the sizes of what it copies to do so, in bytes: values
    written in place, and inputs of the graph twice, since each is an argument for reading and one for writing. Kernels
    that reduce have one version, so they are not tuned."""
    members: dict[fx.Node, list[fx.Node]] = {}
    for node, last in kernel.items():
        members.setdefault(last, []).append(node)
    tuned = {}
    for last, nodes in members.items():
        if not _is_opaque(last) and not any(_reduces(node, kernel) for node in nodes):
            times = {node: (node in written_over) + 2 * any(map(_is_write, _readers(node))) for node in nodes}
            tuned[last] = [_size(node) for node in nodes for _ in range(times[node])]
    opaque = set(filter(_is_opaque, kernel))
    for node, launches in writes.items():
        if launches and not _reduces(node, opaque):
            length = node.meta["val"].numel()
            tuned[node] = [_size(other) for other in writes if other.meta["val"].numel() == length for _ in range(2)]
    return tuned


def _size(node: fx.Node) -> int:
    value = node.meta.get("val")
    return int(num_bytes(value)) if isinstance(value, Tensor) else 0


def _is_write(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "").startswith("copy_.")


def _reduces(node: fx.Node, stored: Collection[fx.Node]) -> bool:
    """Whether a kernel for `node` reduces: `node` itself, or what it reads that is not `stored`."""
    fused = {node, *_within([node], lambda made: made.all_input_nodes, stored)}
    return any(isinstance(one.target, OpOverload) and torch.Tag.reduction in one.target.tags for one in fused)


def _read_first(
    kernel: Mapping[fx.Node, fx.Node | None], reads: dict[fx.Node, dict[fx.Node, None]]
) -> dict[fx.Node, set[fx.Node]]:
    """For each stored value, the values that its kernel reads for it and for none of the kernel's earlier outputs."""
    seen: dict[fx.Node | None, set[fx.Node]] = {}
    first = {}
    for node, last in kernel.items():
        known = seen.setdefault(last, set())
        first[node] = reads[node].keys() - known
        known |= first[node]
    return first


def _together(nodes: list[fx.Node], stored: set[fx.Node]) -> dict[fx.Node, fx.Node]:
    """For each stored value of a kernel with several outputs, the last output. Until then all outputs and inputs are
    alive.

    A value joins the kernel of a value with the same size and a common input, unless it needs a value computed after
    that kernel.
    """
    kernels: list[list[fx.Node]] = []
    needs: dict[fx.Node, set[fx.Node]] = {}  # the stored values that each stored value depends on
    read: dict[fx.Node, set[fx.Node]] = {}
    for node in nodes:
        if node not in stored:
            continue
        sources = read[node] = set(_sources(node, stored))
        needs[node] = set().union(sources & stored, *(needs[source] for source in sources & stored))
        if _is_opaque(node) or not isinstance(value := node.meta.get("val"), Tensor) or _is_view(node):
            continue
        for kernel in kernels:
            if kernel[0].meta["val"].numel() != value.numel() or all(sources.isdisjoint(read[n]) for n in kernel):
                continue
            if not any(needs[between] & set(kernel) for between in needs[node] - set(kernel)):
                kernel.append(node)
                break
        else:
            kernels.append([node])
    return {member: kernel[-1] for kernel in kernels for member in kernel}


def _dead_after(
    nodes: list[fx.Node], stored: set[fx.Node], together: dict[fx.Node, fx.Node]
) -> dict[fx.Node, list[fx.Node]]:
    """For each node, the values that nothing after it reads. A fused value reads its inputs when it is read; an output
    of a kernel with several outputs, when the last of them is computed."""
    last: dict[fx.Node, int] = {}
    index = {node: i for i, node in enumerate(nodes)}
    for node in reversed(nodes):
        read_at = index[together.get(node, node)]
        if node not in stored and node.op == "call_function":
            read_at = max(read_at, last.get(node, 0))
        last[node] = max(last.get(node, 0), read_at)
        for source in node.all_input_nodes:
            last[source] = max(last.get(source, 0), read_at)
    dead: dict[fx.Node, list[fx.Node]] = {}
    for node, i in last.items():
        if node.op != "output":
            dead.setdefault(nodes[i], []).append(node)
    return dead


def _written_over(
    dead_after: dict[fx.Node, list[fx.Node]],
    reads: dict[fx.Node, dict[fx.Node, None]],
    own: set[fx.Node],
    together: dict[fx.Node, fx.Node],
) -> dict[fx.Node, fx.Node]:
    """For each value that its kernel writes in place, the overwritten value: the first input that is the graph's `own`,
    is read by this kernel and products only, and is not read later, also through views."""
    over: dict[fx.Node, fx.Node] = {}
    num_readers = Counter(source for node in together for source in reads[node])
    for node, last in together.items():
        dead = set(dead_after.get(last, ())) & own
        for source in reads[node]:
            alone = source in dead and num_readers[source] == 1 and _views(source) <= set(dead_after[last])
            if alone and _is_made_in_place(node, source, reads.keys()):
                over[node] = source
                break
    return over


def _views(node: fx.Node) -> set[fx.Node]:
    views = {user for user in node.users if _is_view(user)}
    return views.union(*map(_views, views))


def _is_made_in_place(node: fx.Node, source: fx.Node, stored: Collection[fx.Node]) -> bool:
    """Whether each element of `node` depends on the same position of `source`, and on other positions only through
    reductions, in the operations fused between them."""
    value, given = node.meta.get("val"), source.meta.get("val")
    if not isinstance(value, Tensor) or not isinstance(given, Tensor):
        return False
    before = _within([node], lambda made: made.all_input_nodes, stored)
    after = _within([source], lambda made: made.users, stored)
    between = {node, *(before & after)}
    packets = [getattr(made.target, "overloadpacket", None) for made in between]
    moves = any(packet is not None and packet.__name__ in _MOVING_NAMES for packet in packets)
    return not moves and (value.dtype, value.numel()) == (given.dtype, given.numel())


def _within(
    frontier: list[fx.Node], step: Callable[[fx.Node], Iterable[fx.Node]], stored: Collection[fx.Node]
) -> set[fx.Node]:
    """Nodes reachable by `step` through nodes that are not stored."""
    reached = set[fx.Node]()
    while frontier:
        new = {node for node in step(frontier.pop()) if node not in stored} - reached
        reached |= new
        frontier += new
    return reached
