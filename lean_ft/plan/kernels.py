"""What a GPU runs for an operation: its number of launches, or plain operations where it has no kernel.

The numbers of launches are those of PyTorch 2.13 on a simulated GPU (`benchmarks/planned_launches.py`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from lean_ft.models.attention.kernels import choose_kernel
from lean_ft.models.attention.row_attention import Rows, attend_rows, attend_rows_backward
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
# Launches of attention, forward and backward.
_ATTENTION = {
    "flash": (
        2,
        4,
    ),  # zeros for a random state; backward also products with the output, and the queries' gradient in 16 bits
    "flash and sinks": (2, 3),  # sinks join afterwards
    "own": (3, 5),  # two find each token's document; backward: products with the output, and two for gradients
}
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


class Attention(NamedTuple):
    """`document_attention` or its backward pass on a GPU. kernel, why: of `choose_kernel`; given: the arguments."""

    kernel: str
    why: str
    given: dict[str, Any]

    @property
    def is_backward(self) -> bool:
        return "grad_out" in self.given

    @property
    def num_launches(self) -> int:
        query, key, sinks = (self.given[name] for name in ("query", "key", "sinks"))
        is_flash = self.kernel == "flash"
        number = _ATTENTION["flash and sinks" if is_flash and sinks is not None else self.kernel][self.is_backward]
        if not self.is_backward:
            return number
        if is_flash and key.shape[1] < query.shape[1]:
            number += 2  # sums of the gradients of keys and values over a group of heads
        if sinks is not None and not is_flash:
            number += 1  # the sum of the sinks' gradients
        elif sinks is not None and sinks.requires_grad:
            number += 2  # products with the output, and their sum
        return number

    @property
    def repeated_bytes(self) -> int:
        """Traffic beyond reading each argument and writing each result once."""
        query, key, value, sinks = (self.given[name] for name in ("query", "key", "value", "sinks"))
        if self.kernel == "own" and self.is_backward:  # two kernels read all, and a third the gradient
            return 3 * query.nbytes + key.nbytes + value.nbytes + 2 * self.given["lse"].nbytes
        return 2 * query.nbytes if self.kernel == "flash" and sinks is not None and not self.is_backward else 0

    def temporary(self) -> list[int]:
        """Sizes of the temporary tensors inside the backward pass, in bytes.

        PyTorch's flash attention sums the queries' gradient in float32, with each document padded to 128 tokens and each head to
        32 or 64 features, and expands the gradients of keys and values to the query heads.
        """
        if not self.is_backward:
            return []
        query, key, sinks = (self.given[name] for name in ("query", "key", "sinks"))
        num_tokens, num_heads, head_dim = query.shape
        if self.kernel == "own":
            return [4 * num_heads * num_tokens] * (1 if sinks is None else 2)
        filled_tokens = num_tokens + 128 * (len(self.given["cu_seqlens"]) - 1)
        multiple = 32 if head_dim <= 128 else 64
        expanded = [query.nbytes] * 2 if key.shape[1] < num_heads else []
        return [*expanded, 4 * filled_tokens * num_heads * -(-head_dim // multiple) * multiple]


def attention_on(device: Device, func: Any, args: Any) -> Attention | None:
    """The attention that an operation computes on a GPU; None on a CPU and for other operations."""
    if device.is_cpu or not func.name().startswith("lean_ft::document_attention"):
        return None
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=True)}
    query, is_plain = given["query"], given["softcap"] is None and given["ends"] is None
    has_sinks = given["sinks"] is not None
    kernel, why = choose_kernel(
        query.shape[-1], query.dtype, device.capability, is_plain=is_plain, sinks=has_sinks, compiles=True
    )
    return Attention(kernel, why, given)


def launches_of(name: str, attention: Attention | None) -> int:
    """The number of launches of an operation on a GPU."""
    return _LAUNCHES.get(name, 1) if attention is None else attention.num_launches


def plain_operations(func: Any, args: Any, attention: Attention | None) -> SlowPath | None:
    """The plain operations that a GPU runs for an operation of lean_ft; None if it has a kernel."""
    name = func.name()
    if attention is not None:
        return _attention_in_blocks(attention) if attention.kernel == "eager" else None
    if name not in _RECURRENT or (has_kernels() and args[-1] is not False):
        return None
    why = f"recurrent layers run without their CUDA kernels (slow). Run {install_command('hybrid')}"
    return SlowPath(partial(python_function(_RECURRENT[name]), *args), why)


def _attention_in_blocks(attention: Attention) -> SlowPath:
    given = dict(attention.given)
    query, key, value = (given.pop(name) for name in ("query", "key", "value"))
    grad_out, given["num_tokens"] = given.pop("grad_out", None), given.pop("row_tokens") or len(query)
    rows = Rows(**{name: given[name] for name in Rows._fields})
    run = attend_rows if grad_out is None else partial(attend_rows_backward, grad_out)
    why = f"attention runs in blocks of eager operations (slow): {attention.why}"
    why += ". Set model.dtype=bfloat16" if query.itemsize > 2 else ""
    return SlowPath(partial(run, query, key, value, rows), why)
