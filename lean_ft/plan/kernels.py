"""What a GPU runs for an operation: its number of launches, or plain operations where it has no kernel.

The numbers of launches are those of PyTorch 2.13 on a simulated GPU (`benchmarks/planned_launches.py`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from lean_ft.models.attention.row_attention import Rows, attend_rows, attend_rows_backward
from lean_ft.models.state.convolution import causal_convolution, causal_convolution_backward
from lean_ft.models.state.linear_attention import has_kernels, linear_attention, linear_attention_backward
from lean_ft.plan.devices import Device
from lean_ft.system.installation import install_command
from lean_ft.torch_private import python_function

_LAUNCHES = {
    "lean_ft.document_attention": 2,  # flash attention, and zeros for its random state
    "lean_ft.document_attention_backward": 4,  # products with the output, the gradients, and the queries' in 16 bits
    "_foreach_norm": 2,
    "topk": 2,
    "sort": 11,  # a pass for each byte of 64-bit keys, and three for counts and indices
}
_LARGEST_FLASH_HEAD = 256
_NO_FLASH = {"sinks": "sinks", "softcap": "soft cap", "ends": "tokens that see later ones"}
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


def launches_of(name: str, args: Any) -> int:
    """The number of launches of an operation on a GPU."""
    number = _LAUNCHES.get(name, 1)
    if name == "lean_ft.document_attention_backward" and args[2].shape[1] > args[3].shape[1]:
        number += 2  # sums of the gradients of keys and values over a group of heads
    return number


def plain_operations(func: Any, args: Any, device: Device) -> SlowPath | None:
    """The plain operations that a GPU runs for an operation of lean_ft; None if it has a kernel."""
    name = func.name()
    if name.startswith("lean_ft::document_attention"):
        names = [argument.name for argument in func._schema.arguments]
        return _attention_in_blocks(dict(zip(names, args, strict=False)), device)
    if name not in _RECURRENT or (has_kernels() and args[-1] is not False):
        return None
    why = f"recurrent layers run without their CUDA kernels (slow). Run {install_command('hybrid')}"
    return SlowPath(partial(python_function(_RECURRENT[name]), *args), why)


def _attention_in_blocks(given: dict[str, Any], device: Device) -> SlowPath | None:
    """Attention that PyTorch's flash kernels do not compute. given: arguments of `document_attention` or its backward."""
    if (why := _why_no_flash(given, device)) is None:
        return None
    defaults: dict[str, Any] = {**dict.fromkeys(Rows._fields), "num_ahead": 0}
    given = defaults | given
    query, key, value = (given.pop(name) for name in ("query", "key", "value"))
    grad_out, given["num_tokens"] = given.pop("grad_out", None), given.pop("row_tokens", 0) or len(query)
    given.pop("out", None)
    rows = Rows(**given)
    run = attend_rows if grad_out is None else partial(attend_rows_backward, grad_out)
    return SlowPath(
        partial(run, query, key, value, rows), f"attention runs in blocks of plain operations (slow): {why}"
    )


def _why_no_flash(given: dict[str, Any], device: Device) -> str | None:
    query = given["query"]
    if query.itemsize != 2:
        return "flash attention needs 16 bits. Set model.dtype=bfloat16"
    if device.before_ampere:
        return "flash attention needs a card since Ampere"
    if query.shape[-1] > _LARGEST_FLASH_HEAD:
        return (
            f"flash attention has heads of at most {_LARGEST_FLASH_HEAD} features, and the model has {query.shape[-1]}"
        )
    found = [words for name, words in _NO_FLASH.items() if given.get(name) is not None]
    return f"flash attention has no {found[0]}" if found else None
