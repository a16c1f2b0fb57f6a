"""Gradient norms without copies, and in-place scaling."""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from lean_ft.optim.slices import flat, slice_length, slices
from lean_ft.system.shapes_only import device_type
from lean_ft.torch_private import foreach_mul_

_BITS = {2: torch.int16, 4: torch.int32}  # by an element's size in bytes


def gradient_norm(grad: Tensor) -> Tensor:
    """The 2-norm of one gradient as a float32 scalar on its device.

    On a CPU the squares are summed in float32 per slice: torch's norm of a bfloat16 tensor is off by 0.2% for an
    embedding's gradient, even with dtype=float32.
    """
    if device_type(grad.device) != "cpu":
        return torch.linalg.vector_norm(grad.detach(), dtype=torch.float32)
    vector = flat(grad.contiguous())
    total = torch.zeros((), dtype=torch.float64)
    for part in slices(vector.numel(), slice_length(vector.device, compiled=False)):
        values = vector[part].float()
        total += values.dot(values)
    return total.sqrt().float()


def global_norm(norms: Sequence[Tensor], device: torch.device) -> Tensor:
    """The 2-norm over all gradients from their norms, a float32 scalar on the device; 0 without gradients."""
    return torch.linalg.vector_norm(torch.stack(list(norms))) if norms else torch.zeros((), device=device)


def scale_gradients(grads: Sequence[Tensor], factor: float | Tensor) -> None:
    """Multiply gradients by one factor in place.

    A factor on a GPU is rounded to the gradients' dtype, as in `torch.nn.utils.clip_grad_norm_`; the host does not wait.
    """
    # torch's Python function: called directly, the operator of that name would read a tensor factor from the device.
    if not (isinstance(factor, Tensor) and factor.is_cuda):
        foreach_mul_(list(grads), factor)
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for grad in grads:
        by_dtype[grad.dtype].append(grad)
    for dtype, members in by_dtype.items():  # a few kernel launches per dtype
        foreach_mul_(members, factor.to(dtype))


def all_finite(scalars: Sequence[Tensor]) -> bool:
    """Whether all scalars are finite. The host waits for the device once."""
    return not scalars or bool(torch.stack([scalar.reshape(()).float() for scalar in scalars]).isfinite().all())


def zero_unless_finite(grad: Tensor, norm: Tensor) -> None:
    """Set a gradient to zero in place if its norm is not finite. On a GPU the host does not wait."""
    if device_type(grad.device) == "cuda":
        # Two kernel launches. Every comparison with NaN is false. As floats, NaN times zero would stay NaN.
        grad.view(_BITS[grad.itemsize]).mul_(norm.le(torch.finfo(norm.dtype).max))
    elif not all_finite([norm]):
        grad.zero_()
