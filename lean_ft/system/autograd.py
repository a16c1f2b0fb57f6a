"""The context of a `torch.autograd.Function`, with types: PyTorch gives it none."""

from typing import Generic, TypeVarTuple

from torch.autograd.function import FunctionCtx

Saved = TypeVarTuple("Saved")


class AutogradContext(FunctionCtx, Generic[*Saved]):
    """What `forward` leaves to `backward`: the tensors that it saves, in order, and the attributes of a subclass.

    A function's context is an object of PyTorch's own class; this class is for annotations alone. `Tensor | None` is a
    tensor that a call may lack.
    """

    saved_tensors: tuple[*Saved]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: *Saved) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise NotImplementedError
