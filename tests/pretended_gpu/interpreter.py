"""For processes that check values of Triton kernels: on a real GPU, tensors are on it; otherwise, with
TRITON_INTERPRET=1, Triton's interpreter gets the arithmetic of PTX's mma and cvt.rn. Import this module before the
kernels.

The interpreter multiplies bfloat16 bits as integers and truncates instead of rounding.
"""

import os
from typing import Any

import numpy
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_cast = InterpreterBuilder.cast_impl


def _wide(tile: Any) -> Any:
    return (tile.data.astype(numpy.uint32) << 16).view(numpy.float32) if tile.dtype.scalar == tl.bfloat16 else tile.data


def _create_dot(self: Any, a: Any, b: Any, total: Any, *_: Any) -> Any:
    assert a.dtype.scalar == b.dtype.scalar and total.data.dtype == numpy.float32
    return TensorHandle(numpy.matmul(_wide(a), _wide(b), dtype=numpy.float32) + total.data, total.dtype.scalar)


def _rounding_cast(self: Any, source: Any, to: Any, *_: Any) -> Any:
    if to.scalar != tl.bfloat16:
        return _cast(self, source, to)
    rounded = torch.from_numpy(numpy.ascontiguousarray(source.data)).to(torch.bfloat16)
    return TensorHandle(rounded.view(torch.uint16).numpy(), tl.bfloat16)


if os.environ.get("TRITON_INTERPRET") == "1":
    InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl = _create_dot, _rounding_cast
else:
    torch.set_default_device("cuda")
