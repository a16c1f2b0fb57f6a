"""One training step of the embedded model, for tests of what changes no number."""

import torch
from torch import Tensor

from lean_ft import load_model
from lean_ft.losses import linear_cross_entropy
from lean_ft.models import Decoder


def batch(num_tokens: int = 48) -> tuple[Tensor, Tensor]:
    """Token ids with repetitions and labels, (2, T) each."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 40, (2, num_tokens), generator=generator)
    return ids, torch.randint(0, 500, ids.shape, generator=generator)


def tiny(dtype: torch.dtype = torch.float32) -> Decoder:
    return load_model("tiny").to(dtype)


def backward(model: Decoder, num_tokens: int = 48) -> dict[str, Tensor]:
    """The gradients of one batch, by parameter."""
    ids, labels = batch(num_tokens)
    model.zero_grad()
    linear_cross_entropy(model(ids, return_hidden=True), model.output_weight, labels, chunk_tokens=32).backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def relative_error(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """The largest over the parameters, in the Frobenius norm."""
    assert found.keys() == exact.keys()
    return max(
        float((found[name].double() - exact[name].double()).norm() / exact[name].double().norm()) for name in exact
    )
