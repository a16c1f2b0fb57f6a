"""Gradient norms without copies, and in-place scaling."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lean_ft.optim.slices import flat, slice_length
from lean_ft.system.world import in_chunks
from lean_ft.torch_private import foreach_mul_, foreach_norm

_BITS = {2: torch.int16, 4: torch.int32}  # by an element's size in bytes


def gradient_norm(grad: Tensor, device_type: str) -> Tensor:
    """The 2-norm of one gradient as a float32 scalar on its device, which is of `device_type`.

    On a CPU the squares are summed in float32 per slice: torch's norm of a bfloat16 tensor is off by 0.2% for an
    embedding's gradient, even with dtype=float32.
    """
    if device_type != "cpu":
        return torch.linalg.vector_norm(grad.detach(), dtype=torch.float32)
    vector = flat(grad.contiguous())
    total = torch.zeros((), dtype=torch.float64)
    for part in in_chunks(vector.numel(), slice_length(device_type, compiled=False)):
        values = vector[part].float()
        total += values.dot(values)
    return total.sqrt().float()


def gradient_norms(grads: Sequence[Tensor], device_type: str) -> Tensor:
    """`gradient_norm` of each gradient, (gradients,). On a GPU, a few launches for all gradients of one dtype."""
    if len(grads) == 1:
        return gradient_norm(grads[0], device_type).view(1)
    if device_type != "cuda":
        return torch.stack([gradient_norm(grad, device_type) for grad in grads])
    norms: dict[int, Tensor] = {}
    for members in _by_dtype(grads):
        norms_of_members = foreach_norm([grads[i].detach() for i in members], 2, dtype=torch.float32)
        norms |= dict(zip(members, norms_of_members, strict=True))
    return torch.stack([norms[i] for i in range(len(grads))])


def _by_dtype(grads: Sequence[Tensor]) -> Iterable[list[int]]:
    """The positions of the gradients of each dtype: torch's functions for many tensors need one dtype to be fast."""
    by_dtype: dict[torch.dtype, list[int]] = defaultdict(list)
    for i, grad in enumerate(grads):
        by_dtype[grad.dtype].append(i)
    return by_dtype.values()


def global_norm(norms: Sequence[Tensor], device: torch.device) -> Tensor:
    """The 2-norm over all gradients from their norms, a float32 scalar on the device; 0 without gradients."""
    return torch.linalg.vector_norm(torch.stack(list(norms))) if norms else torch.zeros((), device=device)


def scale_gradients(grads: Sequence[Tensor], factor: float | Tensor) -> None:
    """Multiply gradients by one factor in place.

    A factor on a GPU is rounded to the gradients' dtype, as in `torch.nn.utils.clip_grad_norm_`; the host does not
    wait.
    """
    # torch's Python function: called directly, the operator of that name would read a tensor factor from the device.
    if not (isinstance(factor, Tensor) and factor.is_cuda):
        foreach_mul_(list(grads), factor)
        return
    for members in _by_dtype(grads):  # a few kernel launches per dtype
        foreach_mul_([grads[i] for i in members], factor.to(grads[members[0]].dtype))


def all_finite(scalars: Sequence[Tensor]) -> bool:
    """Whether all scalars are finite. The host waits for the device once."""
    return not scalars or bool(torch.stack([scalar.reshape(()).float() for scalar in scalars]).isfinite().all())


def zero_unless_finite(grads: Sequence[Tensor], norms: Tensor, device_type: str) -> None:
    """Set all gradients to zero in place if one of their `norms` is not finite. On a GPU the host does not wait."""
    if device_type == "cuda":
        highest = norms[0] if len(norms) == 1 else norms.amax()  # NaN if a norm is
        for members in _by_dtype(grads):
            # Every comparison with NaN is false. As floats, NaN times zero would stay NaN.
            bits = [grads[i].view(_BITS[grads[i].itemsize]) for i in members]
            foreach_mul_(bits, torch.le(highest, torch.finfo(norms.dtype).max, out=bits[0].new_empty(())))
    elif not all_finite([norms.amax()]):
        for grad in grads:
            grad.zero_()
