"""Every private name of PyTorch that lean_ft uses, in one table.

A private name can change in any release of torch. `PRIVATE_NAMES` says where each one lives, what lean_ft needs it for,
and what happens in a torch without it. `leanft env --check` reports the names that the installed torch lacks, a test
exercises each one, and the lint fails on a private name of torch anywhere else. lean_ft uses no private name of torchao
or bitsandbytes.

Import a name from here: `from lean_ft.torch_private import FakeTensorMode`. It is looked up at that moment and not
earlier, because the compiler takes a second to import. Attributes of objects, such as a tensor's version, have a
function below.
"""

import contextlib
from collections.abc import Callable, Iterator
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:  # commands that train nothing do not wait for torch
    import torch
    from torch import Tensor, nn
    from torch._ops import OpOverload as OpOverload
    from torch._ops import OpOverloadPacket as OpOverloadPacket

Function = TypeVar("Function", bound=Callable[..., Any])


class PrivateName(NamedTuple):
    """A private name: `module:attribute`, its purpose, and what fails in a torch without it.

    All names are in torch 2.11 and 2.13 to 2.15, unless `versions` says otherwise.
    """

    path: str
    purpose: str
    without: str
    versions: str = "2.11 to 2.15"


# Loggers of modules that warn about what lean_ft does on purpose.
CHECKPOINT_LOGGER = "torch._higher_order_ops.wrap"
PYTREE_LOGGER = "torch.utils._pytree"

_PLAN = "`leanft plan` and the memory estimate before a run fail"
_SHARDING = "`leanft plan --gpus N` fails"
_SINKS = "attention with sinks (gpt-oss) fails on a GPU in 16 bits"
_QUANTIZED = "generation with quantized weights on a CPU is slower"
_CUTS = "parallel.tensor, context, experts and vocabulary fail"

PRIVATE_NAMES = {
    # Operators without a public function.
    "foreach_mul_": PrivateName("torch:_foreach_mul_", "scale all gradients in a few launches", "clip_grad_norm fails"),
    "foreach_norm": PrivateName("torch:_foreach_norm", "norms of many gradients in a few launches", "training fails"),
    "foreach_copy_": PrivateName(
        "torch:_foreach_copy_",
        "copy the updated parameters of an adapter in a few launches",
        "optimizer.name=adamw_8bit fails",
    ),
    "foreach_lerp_": PrivateName(
        "torch:_foreach_lerp_", "move the averages of an adapter's weights in a few launches", "optimizer.ema fails"
    ),
    "fused_adamw_": PrivateName(
        "torch:ops.aten._fused_adamw_", "update many parameters in one launch", "optimizer.name=adamw fails"
    ),
    "assert_on_device": PrivateName(
        "torch:ops.aten._assert_async.msg", "check documents without waiting for the GPU", "packed rows fail on a GPU"
    ),
    "softmax_backward": PrivateName(
        "torch:ops.aten._softmax_backward_data", "the gradient of attention weights in one pass", "CPU attention fails"
    ),
    "flash_attention_forward": PrivateName(
        "torch:ops.aten._flash_attention_forward", "add sinks to the flash kernel's log-sum-exp", _SINKS
    ),
    "flash_attention_backward": PrivateName(
        "torch:ops.aten._flash_attention_backward", "gradients with the sinks' log-sum-exp", _SINKS
    ),
    "pack_linear": PrivateName(
        "torch:ops.mkldnn._reorder_linear_weight", "copy a weight into oneDNN's layout", "generation on a CPU is slower"
    ),
    "packed_linear": PrivateName(
        "torch:ops.mkldnn._linear_pointwise",
        "multiply with a weight in oneDNN's layout",
        "generation on a CPU is slower",
    ),
    "pack_int8_linear": PrivateName(
        "torch:ops.onednn.qlinear_prepack", "copy an 8-bit weight into oneDNN's layout", _QUANTIZED
    ),
    "int8_linear": PrivateName(
        "torch:ops.onednn.qlinear_pointwise",
        "multiply 8-bit inputs with an 8-bit weight in oneDNN's layout",
        _QUANTIZED,
    ),
    "int8_weight_linear": PrivateName(
        "torch:ops.aten._weight_int8pack_mm", "multiply with an 8-bit weight on a CPU", _QUANTIZED
    ),
    "pack_int4_weight": PrivateName(
        "torch:ops.aten._convert_weight_to_int4pack_for_cpu", "copy a 4-bit weight into its kernel's layout", _QUANTIZED
    ),
    "int4_weight_linear": PrivateName(
        "torch:ops.aten._weight_int4pack_mm_for_cpu", "multiply with a 4-bit weight on a CPU", _QUANTIZED
    ),
    "read_scalar": PrivateName(
        "torch:ops.aten._local_scalar_dense.default", "notice that the host reads a tensor's value", _PLAN
    ),
    "collectives": PrivateName(
        "torch:ops._c10d_functional", "collectives that the compiler can trace inside our autograd functions", _CUTS
    ),
    # Autograd and the compiler.
    "next_node_number": PrivateName("torch.autograd:_get_sequence_nr", "list a plan's launches by module", _PLAN),
    "backward_node_number": PrivateName("torch:_C._current_autograd_node", "list backward's launches by module", _PLAN),
    "graph_is_kept": PrivateName(
        "torch:_C._autograd._get_current_graph_task_keep_graph",
        "know whether backward may overwrite saved tensors",
        "gated feed-forward layers fail in backward",
    ),
    "is_wrapper_tensor": PrivateName(
        "torch.utils._python_dispatch:is_traceable_wrapper_subclass",
        "recognize a quantized weight",
        "latent attention (DeepSeek, Kimi) fails",
    ),
    "dynamo": PrivateName(
        "torch._dynamo", "mark static sizes, raise the recompile limit, forget compiled code", "compile=true fails"
    ),
    "pick_vec_isa": PrivateName(
        "torch._inductor.cpu_vec_isa:pick_vec_isa",
        "let the compiler try the CPU's instructions in a process that ignores the current folder",
        "compile=true fails",
    ),
    "lookup_backend": PrivateName(
        "torch._dynamo.backends.registry:lookup_backend",
        "run Inductor under an activation budget",
        "memory.activation_checkpointing=budget fails",
    ),
    "functorch_config": PrivateName(
        "torch._functorch.config", "set the activation budget", "memory.activation_checkpointing=budget fails"
    ),
    # The planner: tensors without contents, and the graphs that the compiler would run.
    "FakeTensor": PrivateName("torch._subclasses.fake_tensor:FakeTensor", "recognize tensors without contents", _PLAN),
    "FakeTensorMode": PrivateName("torch._subclasses.fake_tensor:FakeTensorMode", "run a recipe on shapes", _PLAN),
    "without_modes": PrivateName(
        "torch.utils._python_dispatch:_disable_current_modes", "make real tensors while planning", _PLAN
    ),
    "TorchDispatchMode": PrivateName(
        "torch.utils._python_dispatch:TorchDispatchMode", "see every operation while planning", _PLAN
    ),
    "tree_iter": PrivateName("torch.utils._pytree:tree_iter", "find the tensors among an operation's arguments", _PLAN),
    "OpOverload": PrivateName("torch._ops:OpOverload", "distinguish operators from functions in a graph", _PLAN),
    "aot_autograd": PrivateName(
        "torch._dynamo.backends.common:aot_autograd",
        "get the forward and backward graphs of compiled layers; the functions it calls set `_boxed_call`",
        _PLAN,
    ),
    "min_cut_partition": PrivateName(
        "torch._functorch.partitioners:min_cut_rematerialization_partition",
        "keep for backward what the compiler would keep",
        _PLAN,
    ),
    "decompose_auto_functionalized": PrivateName(
        "torch._inductor.fx_passes.post_grad:decompose_auto_functionalized", "drop copies that Inductor avoids", _PLAN
    ),
    "reinplace_operations": PrivateName(
        "torch._inductor.fx_passes.reinplace:reinplace_inplaceable_ops_core", "drop copies that Inductor avoids", _PLAN
    ),
    "donated_inputs": PrivateName(
        "torch._inductor.utils:get_donated_idxs", "know which inputs a compiled backward may overwrite", _PLAN
    ),
    "FakeStore": PrivateName(
        "torch.testing._internal.distributed.fake_pg:FakeStore", "join a process group that sends nothing", _SHARDING
    ),
    # Many devices.
    "fsdp_common": PrivateName(
        "torch.distributed.fsdp._fully_shard._fsdp_common",
        "shard the parameters of one layer over different ranks",
        "parallel.tensor and parallel.experts are refused",
        versions="2.13 to 2.15 with ShardPlacementResult; 2.11 and 2.12 lack that class",
    ),
    "fsdp_param": PrivateName(
        "torch.distributed.fsdp._fully_shard._fsdp_param", "count the memory of gathered weights", _SHARDING
    ),
    "fsdp_param_group": PrivateName(
        "torch.distributed.fsdp._fully_shard._fsdp_param_group", "count the memory of gathered weights", _SHARDING
    ),
    "is_this_machine": PrivateName(
        "torch.distributed.elastic.rendezvous.utils:_matches_machine_hostname",
        "decide as torchrun does whether --rdzv-endpoint is this machine",
        "runs on several machines do not start",
    ),
    # Attributes of objects, which the functions below read.
    "version_of": PrivateName(
        "torch:Tensor._version", "notice that a tensor changed after it was copied", "offload fails"
    ),
    "storage_key": PrivateName("torch:UntypedStorage._cdata", "identify a storage that may have no memory", _PLAN),
    "local_rows": PrivateName(
        "torch.distributed.tensor:DTensor._local_tensor", "read a rank's rows without an autograd node", _CUTS
    ),
    "constant_for_compiler": PrivateName(
        "torch._dynamo:assume_constant_result",
        "let the compiler keep an answer that it cannot trace",
        "compile=true fails in norms",
    ),
    "num_compiled_graphs": PrivateName(
        "torch._dynamo.utils:counters",
        "notice that layers were compiled again",
        "gradient caching with compile=true differs by roundings in the first steps",
    ),
    "uncompiled": PrivateName(
        "torch.nn:Module._compiled_call_impl",
        "sample from layers compiled for training",
        "generation.compile=true fails",
    ),
}


def __getattr__(name: str) -> Any:
    if name not in PRIVATE_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = resolve_name(PRIVATE_NAMES[name].path)
    return value


def missing_names() -> dict[str, PrivateName]:
    """Return the entries of `PRIVATE_NAMES` that the installed torch lacks."""
    missing = {}
    for name, entry in PRIVATE_NAMES.items():
        try:
            resolve_name(entry.path)
        except (ImportError, AttributeError):
            missing[name] = entry
    return missing


def version_of(tensor: "Tensor") -> int:
    """Return how often a tensor was written in place."""
    return tensor._version


def backward_node_number() -> int | None:
    """Return the sequence number of the autograd node whose backward runs now; None outside of backward."""
    import torch

    node: Any = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def storage_key(storage: "torch.UntypedStorage") -> int:
    """Return a number that identifies a storage for as long as it lives, also one without memory."""
    return storage._cdata


def python_function(operator: Any) -> Callable[..., Any]:
    """Return the function that computes an operator of `torch.library.custom_op`."""
    return operator._init_fn


def local_rows(tensor: "Tensor") -> "Tensor":
    """Return the rows of a sharded tensor that are on this rank, on the same memory; a plain tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def constant_for_compiler(function: Function) -> Function:
    """Mark a function whose result compiled code keeps, as `torch.compiler.assume_constant_result` does, which imports
    the compiler."""
    vars(function)["_dynamo_marked_constant"] = True
    return function


def num_compiled_graphs() -> int:
    """Return how many graphs the compiler has made in this process."""
    return resolve_name(PRIVATE_NAMES["num_compiled_graphs"].path)["stats"]["unique_graphs"]


@contextlib.contextmanager
def uncompiled(modules: "list[nn.Module]") -> Iterator[None]:
    """Context manager in which modules run without the code that `Module.compile` made for them."""
    before = [module._compiled_call_impl for module in modules]
    for module in modules:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, compiled in zip(modules, before, strict=True):
            module._compiled_call_impl = compiled


def without_modes() -> contextlib.AbstractContextManager[Any]:
    """Return a context manager in which tensors are real and unseen, also under the dispatch modes of a plan."""
    import torch

    if not torch._C._len_torch_dispatch_stack():  # the function below imports the tracer
        return contextlib.nullcontext()
    return resolve_name(PRIVATE_NAMES["without_modes"].path)()


@contextlib.contextmanager
def wrapped_gathering(wrap: Callable[[Callable[..., Any], bool], Callable[..., Any]]) -> Iterator[None]:
    """Context manager in which FSDP2's functions that allocate and free gathered weights are `wrap(function, resizes)`.

    FSDP2 resizes storages, which no operator and no public hook shows, so the planner would miss that memory. This is
    the only place where lean_ft replaces functions of another library. `resizes` is True for functions that resize
    their argument.
    """
    parameter, group = (resolve_name(PRIVATE_NAMES[name].path) for name in ("fsdp_param", "fsdp_param_group"))
    places = [
        (parameter, "alloc_storage", True),
        (parameter, "free_storage", True),
        (group, "alloc_storage", True),
        (group, "foreach_all_gather", False),
        (group, "foreach_all_gather_copy_out", False),
    ]
    before = [getattr(module, name) for module, name, _ in places]
    for (module, name, resizes), function in zip(places, before, strict=True):
        setattr(module, name, wrap(function, resizes))
    try:
        yield
    finally:
        for (module, name, _), function in zip(places, before, strict=True):
            setattr(module, name, function)
