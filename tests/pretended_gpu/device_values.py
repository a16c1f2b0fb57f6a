"""Correct values on the simulated GPU: the CPU computes the results of its empty kernels in the same memory.

Each CUDA operation of PyTorch and bitsandbytes first runs its own host code (checks, allocations, launches). Then the
CPU operation of the same name runs on the same memory, which is host memory on this GPU. Operations that the CPU lacks
have a reference below. Not
reproduced: the order of sums on a GPU, atomics, random numbers (seeded from the GPU's generator, drawn by the CPU's),
Triton kernels.

While a CUDA graph is captured, the CPU operations are kept and run when the graph is launched.
"""

import ctypes
import hashlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lean_ft.models.attention.row_attention import Rows, attend_rows, attend_rows_backward
from lean_ft.models.frozen_weight import _expand_stepwise, _nf4_scales
from lean_ft.models.grouped_matmul import grouped_matmul, grouped_outer
from lean_ft.models.mix import ExpertFormula, activation, activation_gradient
from lean_ft.models.state.chunks import Tokens
from lean_ft.models.state.convolution import _in_blocks, _in_blocks_backward, causal_convolution
from lean_ft.models.state.decoding import Rates, Token
from lean_ft.models.state.linear_attention import _by_chunks, _by_chunks_backward, linear_attention
from lean_ft.models.state.state_mixer import log_decay_of
from lean_ft.optim.adamw import Scalars
from lean_ft.optim.adamw_8bit import AdamW8bit
from tests.optim.hashed_noise import HashedNoise

# Operations whose result shape depends on values, or whose host code reads values. Their host code does not run,
# because an empty kernel has not written the values.
_VALUES_ALONE = {
    "_linalg_eigh", "_linalg_svd", "_unique", "_unique2", "bincount", "geqrf", "histc",
    "linalg_householder_product", "linalg_lu_factor_ex", "linalg_qr", "masked_select", "multinomial", "nonzero",
    "repeat_interleave", "unique_consecutive", "unique_dim", "unique_dim_consecutive",
}  # fmt: skip
# Operations that only run host code or copy memory.
_HOST_ALONE = {
    "_cuda_getCurrentRawStream", "_cudnn_init_dropout_state", "_debug_has_internal_overlap",
    "_fused_sdp_choice", "_is_all_true", "_local_scalar_dense", "_nested_view_from_buffer", "_pin_memory",
    "_reshape_alias", "alias", "as_strided", "empty", "empty_strided", "is_pinned", "is_set_to",
    "record_stream", "resize_", "set_", "unfold", "view", "view_as_real",
}  # fmt: skip
_HOST_ALONE_PREFIXES = ("_cudnn", "cudnn", "miopen", "_sparse", "sparse", "_nested", "quantize", "_cslt", "_weight_int")
_RANDOM = {
    "_standard_gamma", "bernoulli", "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_",
    "multinomial", "native_dropout", "normal", "normal_", "poisson", "rand", "randint", "randn", "random",
    "random_", "randperm", "uniform", "uniform_",
}  # fmt: skip
_BITSANDBYTES = (
    "dequantize_4bit",
    "dequantize_blockwise",
    "optimizer_update_32bit",
    "optimizer_update_8bit_blockwise",
    "quantize_4bit",
    "quantize_blockwise",
)

_libraries: list[torch.library.Library] = []
_kernel_copy: Any = None
_races: ctypes.CDLL | None = None  # the library, while it looks for races
_twins: dict[int, torch.Generator] | None = None  # seed -> CPU generator that replaces a GPU generator
_left_empty = False  # True: kernels compute nothing, as without this module
_in_graphs: list[Callable[[], None]] = []  # what launched graphs compute, in the order of capture
_inside = threading.local()  # set while a thread runs host code of an operation; nested operations then stay empty


def install() -> None:
    """Replace the CUDA operations of PyTorch and bitsandbytes in this process. Cannot be undone."""
    global _kernel_copy
    if _libraries:
        return
    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN is not replaced
    torch.cuda.init()

    from lean_ft.models import expand_kernel, expert_kernels, grouped_kernels  # these import Triton
    from lean_ft.models.attention import flash_kernels
    from lean_ft.models.state import convolution_kernels, decoding_kernels, linear_attention_kernels
    from lean_ft.optim import adamw_8bit_kernel

    aten = torch.library.Library("aten", "IMPL")
    _libraries.append(aten)
    for full_name in sorted(torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")):
        namespace, _, name = full_name.partition("::")
        packet, _, overload = name.partition(".")
        if namespace != "aten" or packet == "copy_" or packet in _HOST_ALONE or packet.startswith(_HOST_ALONE_PREFIXES):
            continue
        try:
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
            host_code = torch.library.get_kernel(full_name, "CUDA")
        except (AttributeError, RuntimeError):  # no Python binding, or no kernel
            continue
        aten.impl(name, _with_values(op, host_code), "CUDA", with_keyset=True, allow_override=True)
    _kernel_copy = torch.library.get_kernel("aten::copy_", "CUDA")
    aten.impl("copy_", _copy, "CUDA", allow_override=True)

    def sleep(cycles: int) -> None:
        ctypes.CDLL("libcuda.so.1").pretended_sleep(ctypes.c_double(cycles / 1.98e6))  # an H100's cycles in 1 ms

    torch.cuda._sleep = sleep
    for name in ("multiply", "multiply_outer"):  # Triton kernels
        setattr(grouped_kernels, name, partial(_grouped_product, getattr(grouped_kernels, name)))
    expert_kernels.sum_rows = partial(_summed, expert_kernels.sum_rows)
    expand_kernel.expand = partial(_expanded, expand_kernel.expand)
    adamw_8bit_kernel.update = partial(_updated, adamw_8bit_kernel.update)
    expand_kernel.expand_nf4 = partial(_expanded_nf4, expand_kernel.expand_nf4)
    expert_kernels.activate = partial(_expert_activation, expert_kernels.activate)
    for kernels, name, values in (
        (flash_kernels, "attend", _attend),
        (flash_kernels, "attend_backward", _attend_backward),
        (flash_kernels, "join_sinks", _join_sinks),
        (flash_kernels, "sink_gradients", _sink_gradients),
        (linear_attention_kernels, "forward", _by_chunks),
        (linear_attention_kernels, "backward", _linear_attention_backward),
        (convolution_kernels, "convolve", lambda *args: (_in_blocks(*args, block=128),)),
        (convolution_kernels, "convolve_backward", partial(_in_blocks_backward, block=128)),
        (decoding_kernels, "convolve", _convolution_step),
        (decoding_kernels, "step", _recurrent_step),
        (decoding_kernels, "gated_norm", _gated_norm),
    ):
        setattr(kernels, name, partial(_with_reference, getattr(kernels, name), values))

    import bitsandbytes  # noqa: F401

    own = torch.library.Library("bitsandbytes", "IMPL")
    _libraries.append(own)
    for name in _BITSANDBYTES:
        op = getattr(torch.ops.bitsandbytes, name).default
        host_code = torch.library.get_kernel(f"bitsandbytes::{name}", "CUDA")
        own.impl(name, _with_values(op, host_code), "CUDA", with_keyset=True, allow_override=True)


@contextmanager
def empty_kernels() -> Iterator[None]:
    """Kernels compute nothing, as without this module. For tests of allocations and launches at real sizes."""
    global _left_empty
    _left_empty = True
    try:
        yield
    finally:
        _left_empty = False


@contextmanager
def drawn_as_on_a_cpu() -> Iterator[None]:
    """The GPU draws the CPU's random numbers, so that the same seed gives the same run on both."""
    global _twins
    _twins = {}
    try:
        yield
    finally:
        _twins = None


def _compute(values: Callable[[], Any]) -> None:
    """Compute a kernel's values now, or at each launch of the graph that is captured. Memory is kept by address, not by
    tensors."""
    if torch.cuda.is_current_stream_capturing():
        _in_graphs.append(values)
        ctypes.CDLL("libcuda.so.1").pretended_capture(_compute_in_graph, ctypes.c_ulonglong(len(_in_graphs) - 1))
    else:
        values()


@ctypes.CFUNCTYPE(None, ctypes.c_ulonglong)
def _compute_in_graph(number: int) -> None:
    with torch._C._AutoDispatchBelowADInplaceOrView(), torch._C._DisableTorchDispatch(), torch.no_grad():
        _in_graphs[number]()


def _grouped_product(
    host_code: Callable[..., Tensor], left: Tensor, right: Tensor, ends: Tensor, *total: Tensor | None
) -> Tensor:
    out = host_code(left, right, ends, *total)
    product = grouped_matmul if right.ndim == 3 else grouped_outer
    target, *factors = map(on_cpu, (out, left, right, ends))
    write = target.add_ if total else target.copy_
    _compute(lambda: write(product(*factors)))
    return out


def _summed(host_code: Callable[..., None], rows: Tensor, places: Tensor, out: Tensor) -> None:
    host_code(rows, places, out)
    target, *given = map(on_cpu, (out, rows, places))
    _compute(lambda: target.copy_(torch.nn.functional.embedding_bag(given[1], given[0], mode="sum")))


def _updated(
    host_code: Callable[..., None], tensors: Sequence[Tensor], tables: object, step: Scalars, keys: Any
) -> None:
    host_code(tensors, tables, step, keys)
    unused: dict[str, Any] = {"betas": (0.0, 0.0), "eps": 0.0, "weight_decay": 0.0, "stochastic_rounding": False}
    rule, noise = AdamW8bit(paged=False, compile=False, **unused), None if keys is None else HashedNoise(keys)
    given, lr = list(map(on_cpu, tensors)), on_cpu(step.lr) if isinstance(step.lr, Tensor) else step.lr
    _compute(lambda: rule._update_slices("cpu", given, *step._replace(lr=lr), noise=noise))


def _expanded(host_code: Callable[..., None], numbers: Tensor, scales: Tensor, out: Tensor) -> None:
    host_code(numbers, scales, out)
    target, *stored = map(on_cpu, (out, numbers, scales))
    _compute(lambda: target.copy_(_expand_stepwise(*stored, target.dtype)))


def _expanded_nf4(host_code: Callable[..., None], *args: Any) -> None:
    host_code(*args)
    *stored, scale_levels, out = ([on_cpu(t) for t in x] if isinstance(x, Sequence) else on_cpu(x) for x in args)

    def values() -> None:
        first = 0
        for numbers, *scales in zip(*stored, strict=True):
            part, first = out[first:][: 2 * numbers.numel()], first + 2 * numbers.numel()
            part.copy_(_expand_stepwise(numbers, _nf4_scales(*scales, scale_levels), out.dtype).view(-1))

    _compute(values)


def _expert_activation(host_code: Callable[..., None], results: Sequence[Tensor], *args: Any) -> None:
    host_code(results, *args)
    factors, weights, bias, experts, grad, needs_inner = (on_cpu(x) if isinstance(x, Tensor) else x for x in args[:6])
    activation_name, _, *facts = args[6:]
    formula = ExpertFormula(activation_name, *facts)
    targets = [on_cpu(result) for result in results]

    def values() -> None:
        given = factors.float() if bias is None else factors.float() + bias[experts].float()
        weighed = given * weights if formula.scales_input else given
        inner = activation(weighed, formula)
        if grad is not None:
            grad_factors = activation_gradient(weighed, grad.float(), formula)
            products = given * grad_factors if formula.scales_input else inner * grad.float()
            targets[1].copy_(grad_factors * weights)
            targets[2].copy_(products.sum(-1))
        if needs_inner:
            targets[0].copy_(inner if formula.scales_input else inner * weights)

    _compute(values)


def _with_reference(host_code: Callable[..., Any], values: Callable[..., Any], *args: Any) -> Any:
    """Run the host code of a Triton kernel, then compute its results. `values` returns those of the host code, or the
    first arguments if it writes in place."""
    result = host_code(*args)
    targets, cpu_args = _to_cpu(args if result is None else result), [_to_cpu(x) for x in args]
    targets = [targets] if isinstance(targets, Tensor) else targets

    def compute() -> None:
        for target, wanted in zip(targets, values(*cpu_args), strict=False):
            if target is not None:
                target.copy_(wanted)

    if not (_left_empty or getattr(_inside, "host_code", False)):
        _compute(compute)
    return result


def watch_accesses(wanted: bool) -> None:
    """Report the memory that each kernel reads and writes to the library, which looks for races."""
    global _races
    _races = ctypes.CDLL("libcuda.so.1") if wanted else None


def on_cpu(tensor: Tensor) -> Tensor:
    """A CPU tensor over the memory of a tensor on the simulated GPU."""
    if not tensor.is_cuda:
        return tensor
    storage = tensor.untyped_storage()
    shared = (
        torch._C._construct_storage_from_data_pointer(storage.data_ptr(), torch.device("cpu"), storage.nbytes())
        if storage.nbytes()
        else torch.UntypedStorage(0)
    )
    view = torch.empty(0, dtype=tensor.dtype)
    return view.set_(shared, tensor.storage_offset(), tensor.size(), tensor.stride())


def _with_values(op: Any, host_code: Any) -> Callable[..., Any]:
    """Return the operation that runs host code, then computes the values."""
    name = op._schema.name.partition("::")[2]
    reference = _REFERENCES.get(op._schema.name.partition("::")[2])
    values_alone, is_random = name in _VALUES_ALONE, name in _RANDOM
    wants_tensor = [str(argument.type) in ("Tensor", "Optional[Tensor]") for argument in op._schema.arguments]

    def is_number(wants: bool, value: Any) -> bool:
        return wants and isinstance(value, (bool, int, float, complex))

    def run(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        # A Python kernel receives plain numbers; a C++ kernel receives tensors instead.
        has_numbers = any(map(is_number, wants_tensor, args))
        host_args = [torch.tensor(x) if is_number(w, x) else x for w, x in zip(wants_tensor, args, strict=False)]
        with torch._C._AutoDispatchBelowADInplaceOrView(), torch._C._DisableTorchDispatch(), torch.no_grad():
            if (_left_empty or getattr(_inside, "host_code", False)) and not values_alone:
                return host_code.call_boxed(keyset, *host_args, **kwargs)
            is_captured = torch.cuda.is_current_stream_capturing()
            if is_captured and (values_alone or is_random):
                raise RuntimeError(
                    f"{op}: waits for the device or draws random numbers, which a captured graph cannot here"
                )
            seed = _seed(args, kwargs) if is_random else None  # before the host code advances the generator
            cpu_args, cpu_kwargs = _to_cpu(args), {key: _to_cpu(value) for key, value in kwargs.items()}
            result = None
            if not values_alone:
                _inside.host_code = True
                try:
                    result = host_code.call_boxed(keyset, *host_args, **kwargs)
                finally:
                    _inside.host_code = False
            _note_accesses(op, args, kwargs, result)
            compute = reference or (op.overloadpacket if has_numbers else op)
            if is_captured and isinstance(result, (Tensor, list, tuple)):
                found = _to_cpu(result)
                _compute(lambda: _put(found, compute(*cpu_args, **cpu_kwargs), op))
                return result
            if is_random:
                wanted = _drawn(compute, seed, cpu_args, cpu_kwargs)
            else:
                wanted = compute(*cpu_args, **cpu_kwargs)
            if values_alone:
                return _to_gpu(wanted)
            if not isinstance(result, (Tensor, list, tuple)):
                return wanted if wanted is not None else result  # `equal` returns a bool
            _put(result, wanted, op)
            return result

    return run


def _copy(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """aten::copy_: cudaMemcpyAsync where CUDA copies bytes, otherwise a kernel, which is empty."""
    with torch._C._AutoDispatchBelowADInplaceOrView(), torch._C._DisableTorchDispatch(), torch.no_grad():
        same = self.dtype == source.dtype and self.shape == source.shape and self.stride() == source.stride()
        is_bytes = same and not self.is_conj() and _is_dense(self)
        if is_bytes or (self.is_cuda and source.is_cuda):
            _kernel_copy.call_boxed(torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), self, source, non_blocking)
            if self.is_cuda and source.is_cuda and not (_left_empty or getattr(_inside, "host_code", False)):
                _note_accesses(torch.ops.aten.copy_.default, (self, source), {}, self)
                target, values = on_cpu(self), on_cpu(source)
                _compute(lambda: target.copy_(values))
        else:  # CUDA uses a temporary buffer here and waits for memory that is not pinned
            on_host = source if self.is_cuda else self
            if not (non_blocking and on_host.is_pinned()):
                torch.cuda.current_stream().synchronize()
            _note_accesses(torch.ops.aten.copy_.default, (self, source), {}, self)
            target, values = on_cpu(self), on_cpu(source)
            _compute(lambda: target.copy_(values))
        return self


def _to_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return on_cpu(value)
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    if isinstance(value, (list, tuple)):
        each = [_to_cpu(each) for each in value]
        return type(value)(*each) if hasattr(value, "_fields") else type(value)(each)
    return value


def _to_gpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        moved = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="cuda")
        on_cpu(moved).copy_(value)
        return moved
    if isinstance(value, (list, tuple)):
        return type(value)(_to_gpu(each) for each in value)
    return value


def _put(result: Any, wanted: Any, op: Any) -> None:
    """Write the correct values into the tensors that the empty kernel returned."""
    if isinstance(result, Tensor):
        if wanted is None or result.numel() == 0:
            return
        target = on_cpu(result)
        if target.data_ptr() == wanted.data_ptr():
            return
        if target.shape != wanted.shape:
            # A reference may return no indices (argsort and similar).
            if wanted.numel() == 0:
                return
            raise RuntimeError(f"{op}: the CPU gives {tuple(wanted.shape)}, CUDA's host code {tuple(target.shape)}")
        target.copy_(wanted)
    elif isinstance(result, (list, tuple)):
        for each, value in zip(result, wanted, strict=False):
            _put(each, value, op)


def _note_accesses(op: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
    """Report what an operation on the current stream reads and writes, while the library looks for races.

    bitsandbytes' optimizers always launch on the default stream.
    """
    if _races is None:
        return
    is_elsewhere = op._schema.name.startswith("bitsandbytes::optimizer")
    stream = torch.cuda.default_stream() if is_elsewhere else torch.cuda.current_stream()
    _races.pretended_begin_kernel(ctypes.c_void_p(stream.cuda_stream), op._schema.name.encode())

    def note(value: Any, is_write: bool) -> None:
        if isinstance(value, (list, tuple)):
            for each in value:
                note(each, is_write)
        elif isinstance(value, Tensor) and value.numel() and _races is not None:
            last = sum((size - 1) * stride for size, stride in zip(value.size(), value.stride(), strict=True))
            num_bytes = ctypes.c_size_t((last + 1) * value.element_size())
            _races.pretended_access(ctypes.c_void_p(value.data_ptr()), num_bytes, int(is_write))

    named = dict(zip((argument.name for argument in op._schema.arguments), args, strict=False)) | kwargs
    for argument in op._schema.arguments:
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        note(named.get(argument.name), is_written)
    note(result, True)


def _is_dense(tensor: Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _seed(args: Any, kwargs: Any) -> int | None:
    """Return a seed computed from the state of the operation's generator; None for a CPU generator."""
    own = _generator(args, kwargs)
    generator = torch.cuda.default_generators[torch.cuda.current_device()] if own is None else own
    if generator.device.type != "cuda":
        return None
    if _twins is not None and own is not None and generator.get_offset() == 0:  # not used yet
        _twins[own.initial_seed()] = torch.Generator().manual_seed(own.initial_seed())
    return int.from_bytes(hashlib.sha256(generator.get_state().numpy().tobytes()).digest()[:7], "little")


def _generator(args: Any, kwargs: dict[str, Any]) -> torch.Generator | None:
    return next((x for x in (*args, *kwargs.values()) if isinstance(x, torch.Generator)), None)


def _drawn(compute: Callable[..., Any], seed: int | None, args: Any, kwargs: dict[str, Any]) -> Any:
    twin = None  # the CPU's default generator replaces the GPU's default generator
    if _twins is not None and (generator := _generator(args, kwargs)) is not None:
        twin = _twins[generator.initial_seed()]
    if seed is not None:
        args = tuple(twin if isinstance(x, torch.Generator) else x for x in args)
        kwargs = {key: twin if isinstance(x, torch.Generator) else x for key, x in kwargs.items()}
    if seed is None or _twins is not None:
        return compute(*args, **kwargs)
    state = torch.get_rng_state()
    try:
        torch.default_generator.manual_seed(seed)
        return compute(*args, **kwargs)
    finally:
        torch.set_rng_state(state)


# Operations that the CPU lacks. Attention over one sequence: queries (T, H, D), keys and values (S, K, D), in float32.
# -----


def _visible(num_queries: int, num_keys: int, causal: bool, left: int | None, right: int | None) -> Tensor:
    """Return the mask (T, S) of visible keys. The last query is aligned with the last key."""
    query = torch.arange(num_queries)[:, None] + (num_keys - num_queries)
    key = torch.arange(num_keys)[None]
    seen = torch.ones(num_queries, num_keys, dtype=torch.bool)
    if causal:
        seen &= key <= query
    if right is not None and right >= 0:
        seen &= key <= query + right
    if left is not None and left >= 0:
        seen &= key >= query - left
    return seen


def _weights(query: Tensor, key: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the softmax (H, T, S) and its log-sum-exp (H, T); query (H, T, D), key (H, S, D)."""
    scores = (query @ key.mT * scale).masked_fill(~seen, -math.inf)
    return scores.softmax(-1), scores.logsumexp(-1)


def _by_head(num_heads: int, *tensors: Tensor) -> list[Tensor]:
    """Return (T, heads, D) as float32 (H, T, D), with a key head repeated for each query head of its group."""
    return [x.float().transpose(0, 1).repeat_interleave(num_heads // x.shape[1], 0) for x in tensors]


def _parts(query: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None) -> list[tuple[Any, Any]]:
    """Return the indices of each sequence's queries and keys: documents of (N, H, D), or rows of (B, T, H, D)."""
    if cum_seq_q is None or cum_seq_k is None:
        return [(row, row) for row in range(len(query))]
    bounds = (pairwise(bounds.tolist()) for bounds in (cum_seq_q, cum_seq_k))
    return [(slice(*of_q), slice(*of_k)) for of_q, of_k in zip(*bounds, strict=True) if of_q[0] < of_q[1]]


def _flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    **_: Any,
) -> tuple[Any, ...]:
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    num_heads, out = query.shape[-2], torch.zeros_like(query)
    lse = torch.zeros(num_heads, len(query)) if query.ndim == 3 else torch.zeros(len(query), num_heads, query.shape[1])
    for i, (part, keys) in enumerate(_parts(query, cum_seq_q, cum_seq_k)):
        if seqused_k is not None:
            keys = slice(keys.start, keys.start + int(seqused_k[i]))
        q, k, v = _by_head(num_heads, query[part], key[keys], value[keys])
        seen = _visible(q.shape[1], k.shape[1], is_causal, window_size_left, window_size_right)
        weights, found = _weights(q, k, seen, scale)
        out[part] = (weights @ v).transpose(0, 1).to(out.dtype)
        if query.ndim == 3:
            lse[:, part] = found
        else:
            lse[part] = found
    return out, lse, None, None, None


def _flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor | None,
    unused: Tensor | None,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    num_heads, num_kv_heads = query.shape[-2], key.shape[-2]
    grads = [torch.zeros_like(x) for x in (query, key, value)]
    for part, keys in _parts(query, cum_seq_q, cum_seq_k):
        q, k, v, grad, result = _by_head(num_heads, query[part], key[keys], value[keys], grad_out[part], out[part])
        seen = _visible(q.shape[1], k.shape[1], is_causal, window_size_left, window_size_right)
        # As the kernel: from the given log-sum-exp and output, which a sink may have joined.
        sizes = logsumexp[:, part] if query.ndim == 3 else logsumexp[part]  # (H, T)
        weights = (q @ k.mT * scale - sizes[..., None]).exp().masked_fill(~seen, 0.0)
        grad_scores = weights * (grad @ v.mT - (grad * result).sum(-1, keepdim=True)) * scale
        found = [grad_scores @ k, grad_scores.mT @ q, weights.mT @ grad]
        found[1:] = [x.unflatten(0, (num_kv_heads, -1)).sum(1) for x in found[1:]]
        for target, place, grad_part in zip(grads, (part, keys, keys), found, strict=True):
            target[place] = grad_part.transpose(0, 1).to(target.dtype)
    return tuple(grads)


def _attend(query: Tensor, key: Tensor, value: Tensor, of_rows: Rows) -> tuple[Tensor, ...]:
    """The output alone: `_attend_backward` needs no log-sum-exp."""
    return (attend_rows(query, key, value, of_rows),)


def _attend_backward(grad: Tensor, out: Tensor, lse: Tensor, *inputs: Any) -> tuple[Tensor | None, ...]:
    return attend_rows_backward(grad, *inputs)


def _linear_attention_backward(tokens_of: Tokens, kept: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    grads = tuple(torch.empty_like(x) for x in tokens_of[:5])
    _by_chunks_backward(tokens_of, kept, grad, grads)
    return grads


def _convolution_step(
    x: Tensor, inputs: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> tuple[Tensor, ...]:
    seen = torch.cat((inputs, x), 1)
    inputs.copy_(seen[:, 1:])
    return (causal_convolution(seen, weight, bias, None, activation)[:, -1:],)


def _recurrent_step(token: Token, rates: Rates, state: Tensor, corrects: bool) -> tuple[Tensor, ...]:
    query, key, value, step, share = token
    step = torch.nn.functional.softplus(step.float() + rates.bias).clamp(rates.lowest, rates.highest)
    share = share.sigmoid() if corrects else step
    read, states = linear_attention(query, key, value, log_decay_of(rates.log, step), share, None, state, corrects)
    state.copy_(states[-1])
    return (read if rates.skip is None else (read + value.float() * rates.skip[:, None]).to(read.dtype),)


def _gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, num_groups: int, gates_first: bool
) -> tuple[Tensor, ...]:
    opening, values = torch.nn.functional.silu(gate.float()), x.float()
    values = values * opening if gates_first else values
    if weight is not None:
        groups = values.unflatten(-1, (num_groups, -1))
        groups = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)
        values = (groups * weight.view(-1, groups.shape[-1])).flatten(-2).to(x.dtype)
    return (values if gates_first else values * opening,)


def _join_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, ...]:
    joined = torch.logaddexp(lse, sinks.float()[:, None])
    return out * (lse - joined).exp().T[..., None], joined


def _sink_gradients(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, ...]:
    delta = (grad.float() * out.float()).sum(-1).T  # (H, N)
    return (-((sinks.float()[:, None] - lse).exp() * delta).sum(1),)


def _sdpa_flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out, lse, *_ = _flash_forward(q, k, v, None, None, 0, 0, 0.0, is_causal, False, scale=scale)
    return out.transpose(1, 2), lse, *[None] * 7


def _sdpa_flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    grad, q, k, v = (x.transpose(1, 2) for x in (grad_out, query, key, value))
    rows = out.transpose(1, 2), logsumexp
    grads = _flash_backward(grad, q, k, v, *rows, None, None, 0, 0, 0.0, is_causal, None, None, scale=scale)
    return tuple(x.transpose(1, 2) for x in grads)


def _sdpa_efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query.float() @ key.float().mT * scale
    if attn_bias is not None:
        scores = scores + attn_bias.float()
    seen = _visible(query.shape[2], key.shape[2], is_causal, None, None)
    return scores.masked_fill(~seen, -math.inf).softmax(-1) @ value.float(), None, None, None


def _sdpa_efficient_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    dropout_p: float,
    grad_input_mask: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor | None, ...]:
    if attn_bias is not None:
        raise NotImplementedError("the reference for efficient attention has no gradients with a bias")
    grad, q, k, v = (x.transpose(1, 2) for x in (grad_out, query, key, value))
    result, lse, *_ = _flash_forward(q, k, v, None, None, 0, 0, 0.0, is_causal, False, scale=scale)
    grads = _flash_backward(grad, q, k, v, result, lse, None, None, 0, 0, 0.0, is_causal, None, None, scale=scale)
    return *(x.transpose(1, 2) for x in grads), None


def _rms_norm(x: Tensor, shape: Any, weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    wide = x.float()
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + (torch.finfo(torch.float32).eps if eps is None else eps))
    normed = wide * rstd
    return normed if weight is None else normed * weight.float(), rstd


def _rms_norm_backward(
    grad: Tensor, x: Tensor, shape: Any, rstd: Tensor, weight: Tensor | None, mask: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    normed, grad = x.float() * rstd, grad.float()
    grad_weight = (grad * normed).flatten(0, -2).sum(0) if weight is not None and mask[1] else None
    if weight is not None:
        grad = grad * weight.float()
    return rstd * (grad - normed * (grad * normed).mean(-1, keepdim=True)) if mask[0] else None, grad_weight


def _layer_norm(
    x: Tensor, shape: Any, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    dims = tuple(range(x.ndim - len(shape), x.ndim))
    wide = x.float()
    mean = wide.mean(dims, keepdim=True)
    rstd = torch.rsqrt((wide - mean).square().mean(dims, keepdim=True) + eps)
    out = (wide - mean) * rstd
    if weight is not None:
        out = out * weight.float()
    return out if bias is None else out + bias.float(), mean, rstd


def _layer_norm_backward(
    grad: Tensor,
    x: Tensor,
    shape: Any,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: list[bool],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    dims, rest = tuple(range(x.ndim - len(shape), x.ndim)), tuple(range(x.ndim - len(shape)))
    normed, grad = (x.float() - mean) * rstd, grad.float()
    grad_weight = (grad * normed).sum(rest) if mask[1] else None
    grad_bias = grad.sum(rest) if mask[2] else None
    if weight is not None:
        grad = grad * weight.float()
    grad_x = grad - grad.mean(dims, keepdim=True) - normed * (grad * normed).mean(dims, keepdim=True)
    return rstd * grad_x, grad_weight, grad_bias


def _grouped_mm(a: Tensor, b: Tensor, offs: Tensor, bias: Any = None, out_dtype: torch.dtype | None = None) -> Tensor:
    ends, dtype = offs.tolist(), out_dtype or a.dtype
    groups = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    if b.ndim == 3:
        products = [a[group].float() @ b[i].float() for i, group in enumerate(groups)]
        return torch.cat(products).to(dtype)
    return torch.stack([a[:, group].float() @ b[group].float() for group in groups]).to(dtype)


def _scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    out = (a.float() * scale_a) @ (b.float() * scale_b)
    return (out if bias is None else out + bias.float()).to(out_dtype or torch.bfloat16)


def _log_sigmoid_backward(grad: Tensor, x: Tensor, buffer: Tensor, grad_input: Tensor | None = None) -> Tensor:
    """The buffer is empty on a GPU; the CPU operation needs it."""
    return grad * torch.sigmoid(-x)


def _bmm(left: Tensor, right: Tensor, out_dtype: torch.dtype | None = None, **out: Tensor) -> Tensor:
    wide = left.dtype if out_dtype is None else out_dtype
    return torch.bmm(left.to(wide), right.to(wide), **out)


def _mm(left: Tensor, right: Tensor, out_dtype: torch.dtype | None = None, **out: Tensor) -> Tensor:
    wide = left.dtype if out_dtype is None else out_dtype
    return torch.mm(left.to(wide), right.to(wide), **out)


def _addmm(total: Tensor, left: Tensor, right: Tensor, out_dtype: torch.dtype | None = None, **more: Any) -> Tensor:
    wide = left.dtype if out_dtype is None else out_dtype
    return torch.addmm(total, left.to(wide), right.to(wide), **more)


_REFERENCES: dict[str, Callable[..., Any]] = {
    "_flash_attention_backward": _flash_backward,
    "_flash_attention_forward": _flash_forward,
    "_fused_rms_norm": _rms_norm,
    "_fused_rms_norm_backward": _rms_norm_backward,
    "_grouped_mm": _grouped_mm,
    "_scaled_dot_product_efficient_attention": _sdpa_efficient,
    "_scaled_dot_product_efficient_attention_backward": _sdpa_efficient_backward,
    "_scaled_dot_product_flash_attention": _sdpa_flash,
    "_scaled_dot_product_flash_attention_backward": _sdpa_flash_backward,
    "_scaled_mm": _scaled_mm,
    "addmm": _addmm,
    "bmm": _bmm,
    "mm": _mm,
    "log_sigmoid_backward": _log_sigmoid_backward,
    "native_layer_norm": _layer_norm,
    "native_layer_norm_backward": _layer_norm_backward,
}
