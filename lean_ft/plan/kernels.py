"""What a GPU runs for an operation: its number of launches, or plain operations where it has no kernel.

The numbers of launches are those of PyTorch 2.13 on a simulated GPU (`benchmarks/planned_launches.py`).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from lean_ft.models.attention.kernels import choose_kernel
from lean_ft.models.attention.row_attention import Rows, attend_rows, attend_rows_backward
from lean_ft.models.grouped_matmul import GROUPED_CAPABILITIES
from lean_ft.models.state.convolution import causal_convolution, causal_convolution_backward
from lean_ft.models.state.linear_attention import has_kernels, linear_attention, linear_attention_backward
from lean_ft.plan.devices import Device
from lean_ft.system.installation import install_command
from lean_ft.torch_private import python_function

_LAUNCHES = {
    "_foreach_norm": 2,
    "topk": 2,
    "sort": 11,  # a pass for each byte of 64-bit keys, and three for counts and indices
}
_GROUPED = ("lean_ft::grouped_matmul", "lean_ft::grouped_outer")
_RECURRENT = {
    "lean_ft::linear_attention": linear_attention,
    "lean_ft::linear_attention_backward": linear_attention_backward,
    "lean_ft::causal_convolution": causal_convolution,
    "lean_ft::causal_convolution_backward": causal_convolution_backward,
}


class SlowPath(NamedTuple):
    """Plain operations in place of a kernel; and why, with what would mend it."""

    run: Callable[[], Any]
    why: str


class Launched(NamedTuple):
    """Launches of an operation, sizes of its temporary tensors, and traffic beyond reading each argument and writing each result once."""

    number: int = 1
    temporary: Sequence[int] = ()
    repeated_bytes: int = 0


def on_gpu(func: Any, args: Any, device: Device) -> Launched | SlowPath:
    """What a GPU runs for an operation."""
    name = func.name()
    if name.startswith("lean_ft::document_attention"):
        names = [argument.name for argument in func._schema.arguments]
        return _attention(dict(zip(names, args, strict=True)), device)
    if name in _GROUPED and args[0].dtype == torch.bfloat16 and device.capability in GROUPED_CAPABILITIES:
        return Launched(2)  # PyTorch's kernel, and its sizes and addresses
    if name not in _RECURRENT or (has_kernels() and args[-1] is not False):
        return Launched(_LAUNCHES.get(func.overloadpacket.__name__, 1))
    why = f"recurrent layers run without their CUDA kernels (slow). Run {install_command('hybrid')}"
    return SlowPath(partial(python_function(_RECURRENT[name]), *args), why)


def _attention(given: dict[str, Any], device: Device) -> Launched | SlowPath:
    """given: arguments of `document_attention` or its backward pass.

    PyTorch's flash attention sums the queries' gradient in float32, with each document padded to 128 tokens and each head to 32 or
    64 features, and expands the gradients of keys and values to the query heads.
    """
    query, key, value, sinks, grad_out = (given.get(name) for name in ("query", "key", "value", "sinks", "grad_out"))
    assert query is not None and key is not None and value is not None
    (num_tokens, num_heads, head_dim), has_sinks = query.shape, sinks is not None
    is_plain = given["softcap"] is None and given["ends"] is None
    card = head_dim, query.dtype, device.capability
    kernel, why = choose_kernel(*card, is_plain=is_plain, sinks=has_sinks, compiles=True)
    if kernel == "eager":
        why += ". Set model.dtype=bfloat16" if query.itemsize > 2 else ""
        given["num_tokens"] = given["row_tokens"] or num_tokens
        rows = Rows(**{name: given[name] for name in Rows._fields})
        run = attend_rows if grad_out is None else partial(attend_rows_backward, grad_out)
        return SlowPath(
            partial(run, query, key, value, rows), f"attention runs in blocks of eager operations (slow): {why}"
        )
    if grad_out is None:
        # Besides the kernel: two launches that find each token's document; or one for a random state, or for the sinks.
        return Launched(3 if kernel == "own" else 2)
    if kernel == "own":  # two kernels read all, and a third the gradient
        lse_bytes = 4 * num_heads * num_tokens
        again = 3 * query.nbytes + key.nbytes + value.nbytes + 2 * lse_bytes
        return Launched(5 + has_sinks, [lse_bytes] * (1 + has_sinks), again)
    filled_tokens = num_tokens + 128 * (len(given["cu_seqlens"]) - 1)
    multiple = 32 if head_dim <= 128 else 64
    sums = 4 * filled_tokens * num_heads * -(-head_dim // multiple) * multiple
    is_grouped = key.shape[1] < num_heads
    number = 5 + 2 * is_grouped  # one fills the gradient of the log-sum-exp with zeros
    if sinks is not None:  # neither these nor a random state; two kernels for gradients of sinks
        number += 0 if sinks.requires_grad else -2
    return Launched(number, [*[query.nbytes] * 2 * is_grouped, sums])
