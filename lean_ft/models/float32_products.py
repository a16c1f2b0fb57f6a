"""16-bit matrix products in float32, for CPUs without 16-bit product instructions.

Such a CPU multiplies bfloat16 and float16 matrices 5 to 50 times slower than float32 ones. `use_float32_products`
replaces PyTorch's CPU kernels of matrix products for the whole process: forward and backward, eager and compiled, in
layers, losses and optimizers. Tensors keep their 16-bit dtype. A product converts its operands to float32 in blocks of
at most 16 MiB, sums in float32, and rounds the result once. A product of a few rows is bound by memory, so its blocks
fit the CPU's cache, and it reads 2 bytes per element where a float32 model reads 4.

The decision depends only on the CPU's capabilities and oneDNN's variable that limits them, so a resumed run computes
the same
numbers. Left out: PyTorch's fused attention, whose 16-bit kernel converts by itself.

Source: PyTorch's documentation of `torch.library.get_kernel`.

Shapes: a (M, K) times b (K, N) is (M, N), or each with a batch dimension B in front.
"""

import os
import warnings
from collections.abc import Callable, Collection
from functools import cache
from typing import Any

import torch
from torch import Tensor

# Product instructions of x86 and ARM that oneDNN uses.
_INSTRUCTIONS = {
    torch.bfloat16: ("avx512_bf16", "amx_bf16", "bf16"),
    torch.float16: ("avx512_fp16", "amx_fp16", "fp16_arith"),
}
_KNOWN_CPUS = ("sse2", "neon")  # x86 and ARM; PyTorch does not report the capabilities of other CPUs
# Values of ONEDNN_MAX_CPU_ISA that disable a dtype's instructions.
_LIMITS_OF_BFLOAT16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI")
_LIMITS = {torch.bfloat16: _LIMITS_OF_BFLOAT16, torch.float16: (*_LIMITS_OF_BFLOAT16, "AVX512_CORE_BF16")}

_VECTORS = 3  # PyTorch is as fast for up to this many rows, if sums run over consecutive elements
_FEW_ROWS = 64  # products of fewer rows are bound by memory
_CACHED_ELEMENTS = 2**18  # per block of such a product
_BLOCK_ELEMENTS = 2**22  # per block of other products, for an operand or the result
# The dimension of a, b and the result that is split, for each axis along which a product is split.
_SPLITS = {"B": (0, 0, 0), "M": (0, None, 0), "N": (None, 1, 1), "K": (1, 0, None)}

_converted: set[torch.dtype] = set()  # dtypes whose products are computed in float32
_torch_kernels: dict[str, Any] = {}


def slow_dtypes() -> frozenset[torch.dtype]:
    """The 16-bit dtypes for which this CPU has no product instructions."""
    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    if not any(capabilities.get(name) for name in _KNOWN_CPUS):
        return frozenset()
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", "")).upper()
    return frozenset(
        dtype
        for dtype, names in _INSTRUCTIONS.items()
        if not torch.backends.mkldnn.is_available()
        or limit in _LIMITS[dtype]
        or not any(capabilities.get(name) for name in names)
    )


def use_float32_products(dtypes: Collection[torch.dtype] | None = None) -> None:
    """Compute CPU products of `dtypes` (default: `slow_dtypes()`) in float32, in the whole process. An empty collection
    restores PyTorch's kernels."""
    _converted.clear()
    _converted.update(slow_dtypes() if dtypes is None else dtypes)
    if _converted:
        _replace_kernels()


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which products of tensors like `x` are computed."""
    return torch.float32 if x.dtype in _converted and x.device.type == "cpu" else x.dtype


def block_bytes(a: Tensor, b: Tensor) -> list[int]:
    """The bytes of the float32 blocks of `a`, `b` and the result that their product holds at a time."""
    axis, length = _blocks(a, b)
    sizes = {"B": a.shape[0] if a.ndim == 3 else 1, "M": a.shape[-2], "K": a.shape[-1], "N": b.shape[-1]}
    sizes[axis] = min(length, sizes[axis])
    return [4 * sizes["B"] * sizes[left] * sizes[right] for left, right in ("MK", "KN", "MN")]


@cache
def _replace_kernels() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")  # PyTorch's kernels return when it is freed
    sums = [name + variant for name in ("addmm", "baddbmm") for variant in ("", "_", ".out")]
    names = ["mm", "bmm", "mm.out", "bmm.out", *sums]
    _torch_kernels.update({name: torch.library.get_kernel(f"aten::{name}", "CPU") for name in names})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        for name in names:
            library.impl(name, _kernel(name), "CPU", with_keyset=True)
    return library


def _kernel(name: str) -> Callable[..., Tensor]:
    """A replacement of PyTorch's kernel `name`, which it calls for all but slow products."""

    def kernel(keys: Any, *tensors: Tensor, **settings: Any) -> Tensor:
        *added, a, b = tensors
        out = added[0] if name.endswith("_") else settings.get("out")
        if a.dtype not in _converted or not _is_slow(a, b, *added, *([] if out is None else [out])):
            return _torch_kernels[name].call_boxed(keys, *tensors, **settings)
        shape = (*a.shape[:-1], b.shape[-1])
        if out is None:
            out = a.new_empty(shape)
        elif out.shape != shape:
            out.resize_(shape)
        beta = settings.get("beta", 1)
        _multiply(keys, a, b, out, added[0] if added and beta else None, beta, settings.get("alpha", 1))
        return out

    return kernel


def _is_slow(a: Tensor, b: Tensor, *others: Tensor) -> bool:
    if any(x.dtype != a.dtype for x in (b, *others)) or a.shape[-1] != b.shape[-2] or 0 in (*a.shape, *b.shape):
        return False  # PyTorch computes or refuses these
    are_vectors = a.ndim == 2 and min(a.shape[0], b.shape[1]) <= _VECTORS
    return not (are_vectors and a.stride(1) == 1 and b.stride(0) == 1)


def _blocks(a: Tensor, b: Tensor) -> tuple[str, int]:
    """The axis along which a product is split into blocks, and the length of a block."""
    rows, inner, columns = a.shape[-2], a.shape[-1], b.shape[-1]
    if a.ndim == 3:
        return "B", max(1, _BLOCK_ELEMENTS // max(rows * inner, inner * columns, rows * columns))
    _, middle, longest = sorted((rows, inner, columns))
    if min(rows, inner, columns) >= _FEW_ROWS:
        axis = "M" if rows == longest else "N" if columns == longest else "K"
        return axis, max(1, _BLOCK_ELEMENTS // middle)
    # Read the largest matrix in the order of its memory.
    if inner < min(rows, columns):
        axis, other = "M", columns
    elif rows > columns:
        axis, other = ("M", inner) if a.stride(1) == 1 else ("K", rows)
    else:
        axis, other = ("N", inner) if b.stride(0) == 1 else ("K", columns)
    return axis, max(1, _CACHED_ELEMENTS // other)


def _multiply(keys: Any, a: Tensor, b: Tensor, out: Tensor, added: Tensor | None, beta: float, alpha: float) -> None:
    """out = beta * added + alpha * a @ b."""
    axis, length = _blocks(a, b)
    (a_dim, b_dim, out_dim), sums_blocks = _SPLITS[axis], axis == "K"
    left, right, total = _Wide(a, a_dim, length), _Wide(b, b_dim, length), _Wide(out, out_dim, length)
    if added is not None:
        added = (added.float() if added.ndim < out.ndim else added).expand(out.shape)
    size = b.shape[b_dim] if a_dim is None else a.shape[a_dim]
    for start in range(0, size, length):
        factors, result = (left.converted(start), right.converted(start)), total.room(start)
        if sums_blocks and start > 0:
            _torch_kernels["addmm.out"].call_boxed(keys, result, *factors, out=result)
        else:
            _torch_kernels["bmm.out" if axis == "B" else "mm.out"].call_boxed(keys, *factors, out=result)
        if sums_blocks and start + length < size:
            continue
        if alpha != 1:
            result.mul_(alpha)
        if added is not None:
            result.add_(_block(added, out_dim, start, length), alpha=beta)
        _block(out, out_dim, start, length).copy_(result)


class _Wide:
    """Memory for float32 values of a block of `x`, or of all of `x` if it is not split (`axis` None)."""

    def __init__(self, x: Tensor, axis: int | None, length: int) -> None:
        self._x, self._axis, self._length = x, axis, length
        shape = _block(x, axis, 0, length).shape
        if x.stride(-1) != 1 and x.stride(-2) == 1:  # the same memory order converts faster
            self._room = torch.empty((*shape[:-2], shape[-1], shape[-2]), dtype=torch.float32).mT
        else:
            self._room = torch.empty(shape, dtype=torch.float32)

    def room(self, start: int) -> Tensor:
        remaining = 0 if self._axis is None else self._x.shape[self._axis] - start
        return _block(self._room, self._axis, 0, remaining)

    def converted(self, start: int) -> Tensor:
        room = self.room(start)
        if self._axis is not None or start == 0:
            room.copy_(_block(self._x, self._axis, start, self._length))
        return room


def _block(x: Tensor, axis: int | None, start: int, length: int) -> Tensor:
    return x if axis is None else x.narrow(axis, start, min(length, x.shape[axis] - start))
