"""The kinds of passes of a model: training, evaluation, and the first of the two passes of gradient caching.

`module.training` alone says whether a pass trains. The grad mode says only whether autograd records it: the first pass
of gradient caching records nothing, and has to compute the same bits as the second, with dropout and noise.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

_is_first = ContextVar("whether this is the first of two passes", default=False)


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Context manager and decorator: evaluation mode without gradients. Afterwards each module has its earlier mode.

    Without it, dropout and NEFTune act in an evaluation, a rollout or a reference pass of a model that is trained.
    """
    trained = [module for model in models for module in model.modules() if module.training]
    for module in trained:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module in trained:
            module.training = True


@contextmanager
def first_pass(*, compiled: bool) -> Iterator[None]:
    """Context manager for a pass that is repeated with gradients. It keeps nothing for backward.

    Compiled layers are other code without gradients, whose sums can be rounded otherwise. `compiled` therefore records
    gradients and drops each tensor that backward would read. Detach the results.
    """
    before = _is_first.set(True)
    try:
        with saved_tensors_hooks(lambda _: None, _read_back) if compiled else torch.no_grad():
            yield
    finally:
        _is_first.reset(before)


def _read_back(_: None) -> torch.Tensor:
    raise RuntimeError("the first pass of gradient caching kept nothing for backward.")


def is_first_pass() -> bool:
    """Whether the pass is repeated with gradients, so that it is not counted and its activations are not needed."""
    return _is_first.get()
