"""Stands in for torch.compile while planning: partitions as the compiler does, and counts as its fused kernels take.

AOTAutograd's own min-cut partitioner decides what forward keeps for backward, so that decision is the real one (and so
is `activation_memory_budget`). Of each graph, chains of elementwise operations and reductions become kernels that keep
their intermediates in registers; a value takes memory only where a matrix product or another opaque operation reads it,
or where it leaves the graph. That is how the Inductor backend fuses, but for its finer choices. On a GPU it also makes one
kernel of values of one size that read the same memory, wherever they stand: what that kernel reads and writes is there at
once, such as the six tensors of a gated layer's backward. But a result whose elements are made of those that lie in the same
places of something as large, which nothing else reads any more, is written over that.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

from torch import Tensor, fx

from lean_ft.plan.trace import Trace
from lean_ft.torch_private import (
    OpOverload,
    aot_autograd,
    decompose_auto_functionalized,
    donated_inputs,
    min_cut_partition,
    reinplace_operations,
    tree_iter,
)

# What an operation is called whose elements are not made of those that lie in their places.
_MOVING_NAMES = (
    *("permute", "transpose", "t", "expand", "slice", "select"),
    *("cat", "flip", "roll", "gather", "index", "repeat"),
)
_OPAQUE_NAMES = (
    *("mm", "addmm", "bmm", "baddbmm", "_scaled", "convolution", "embedding_dense_backward", "sort", "topk", "nonzero"),
    *("scatter", "index_put", "cumsum", "grouped", "_flash", "_efficient", "attention", "histc", "bincount"),
)


def fusing_backend(trace: Trace) -> Callable:
    """A backend for torch.compile whose compiled graphs report their memory and time to `trace`."""

    def compiler(graph: fx.GraphModule, inputs: Any, is_backward: bool) -> Callable:
        # What an operation writes to is a copy to AOTAutograd, and none to Inductor where nothing reads it later.
        reinplace_operations(graph.graph)
        decompose_auto_functionalized(graph.graph)
        kernels = _Kernels(graph, trace, set(donated_inputs() or ()) if is_backward else set())

        def call(arguments: list[Any]) -> Any:
            return kernels(arguments)

        vars(call)["_boxed_call"] = (
            True  # its arguments come in a list, which it empties, so that they are freed on the way
        )
        return call

    return aot_autograd(
        fw_compiler=partial(compiler, is_backward=False),
        bw_compiler=partial(compiler, is_backward=True),
        partition_fn=min_cut_partition,
        keep_inference_input_mutations=True,  # as Inductor does, or what is written in place would be written twice
    )


class _Kernels:
    """One compiled graph. donated: which of its inputs nothing else reads."""

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
        inputs = [node for node in self._nodes if node.op == "placeholder"]
        own = self._stored - returned | {inputs[i] for i in donated}
        self._written_over = {} if trace.device.is_cpu else _written_over(self._dead_after, self._reads, own, together)
        self._is_tuned = False

    def __call__(self, arguments: list[Any]) -> Any:
        trace, values = self._trace, {}
        trace.write(arguments)  # what the graph writes to, it is given
        placeholders = (node for node in self._nodes if node.op == "placeholder")
        for node, value in zip(placeholders, arguments, strict=True):
            values[node] = value
        arguments.clear()
        result: Any = None
        for node in self._nodes:
            if node.op == "get_attr":
                values[node] = getattr(self._module, str(node.target))
            elif node.op == "output":
                result = fx.map_arg(node.args[0], lambda n: values[n])
                trace.note(result)
            elif node.op == "call_function":
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: values[n])
                assert callable(node.target)
                with trace.uncounted():
                    values[node] = node.target(*args, **kwargs)
                if node in self._stored:
                    if node in self._written_over:
                        trace.overwrite(values[self._written_over[node]], values[node])
                    trace.note(values[node])
                    if not self._is_tuned and not _is_opaque(node):
                        trace.tune()
                    self._charge(node, args, kwargs, values)
                    args = kwargs = None
            for dead in self._dead_after.get(node, ()):
                del values[dead]
        self._is_tuned = True
        return result

    def _charge(self, node: fx.Node, args: Any, kwargs: Any, values: dict[fx.Node, Any]) -> None:
        if getattr(node.target, "namespace", None) == "_c10d_functional":
            self._trace.exchange(node.target, args)
        elif _is_opaque(node):
            self._trace.charge(node.target, args, kwargs, values[node])
        elif not getattr(node.target, "is_view", False):
            tensors = tree_iter([values[source] for source in self._reads[node] if source in values] + [values[node]])
            moved = sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))
            self._trace.spend(0.0, moved)


def _is_opaque(node: fx.Node) -> bool:
    target: Any = node.target
    if node.op != "call_function" or not isinstance(target, OpOverload):
        return False
    if target.namespace not in ("aten", "prims"):
        return True
    return any(part in target.__name__ for part in _OPAQUE_NAMES)


def _is_view(node: fx.Node) -> bool:
    target: Any = node.target
    return node.op == "call_function" and (
        not isinstance(target, OpOverload) or target.is_view or "view" in target.__name__
    )


def _readers(node: fx.Node) -> set[fx.Node]:
    """Who reads the node's value, through views."""
    readers = set()
    for user in node.users:
        readers |= _readers(user) if _is_view(user) else {user}
    return readers


def _sources(node: fx.Node, stored: set[fx.Node]) -> dict[fx.Node, None]:
    """The stored values and inputs that a kernel for `node` reads, in the order of its arguments."""
    sources: dict[fx.Node, None] = {}
    for source in node.all_input_nodes:
        if source in stored or source.op != "call_function":
            sources[source] = None
        else:
            sources |= _sources(source, stored)
    return sources


def _together(nodes: list[fx.Node], stored: set[fx.Node]) -> dict[fx.Node, fx.Node]:
    """For each stored value that one kernel makes with others, the last of these: until then it counts, and what it reads.

    A value joins the kernel of one of its size that reads what it reads, unless it needs what comes after that kernel.
    """
    kernels: list[list[fx.Node]] = []
    needs: dict[fx.Node, set[fx.Node]] = {}  # the stored values that come before each stored one
    for node in nodes:
        if node not in stored:
            continue
        sources = _sources(node, stored).keys()
        needs[node] = set().union(sources & stored, *(needs[source] for source in sources & stored))
        if _is_opaque(node) or not isinstance(value := node.meta.get("val"), Tensor) or _is_view(node):
            continue
        for kernel in kernels:
            alike = kernel[0].meta["val"].numel() == value.numel()
            later = any(needs[between] & set(kernel) for between in needs[node] - set(kernel))
            if alike and not later and any(sources & _sources(member, stored).keys() for member in kernel):
                kernel.append(node)
                break
        else:
            kernels.append([node])
    return {member: kernel[-1] for kernel in kernels for member in kernel}


def _dead_after(
    nodes: list[fx.Node], stored: set[fx.Node], together: dict[fx.Node, fx.Node]
) -> dict[fx.Node, list[fx.Node]]:
    """For each node, the values that nothing after it reads; one that is fused reads its inputs when it is read, one that a
    kernel makes with others when the last of them is made."""
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
    """For each value that its kernel writes over another, that one: the first that it reads of the graph's `own` that no other
    kernel reads beside products, and nothing later, through views neither."""
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
    """Whether each element of `node` is made of that of `source` in its place, and of others in sums alone, by what is fused
    between the two."""
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
    """What is reached by steps through nodes that are not stored."""
    reached = set[fx.Node]()
    while frontier:
        new = {node for node in step(frontier.pop()) if node not in stored} - reached
        reached |= new
        frontier += new
    return reached
