"""Regularization against overfitting few rows: frozen parameters, and noise on embeddings.

`freeze` and `train` can only reduce the set of trained parameters. NEFTune adds noise to token embeddings in training,
never
in an evaluation: Jain et al. 2023, https://arxiv.org/abs/2310.05914.

Shapes: B batch, T tokens of a row, D hidden size.
"""

import inspect
from collections.abc import Collection, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from lean_ft.models import Decoder
from lean_ft.models.positions import text_lengths
from lean_ft.settings import RecipeConfig
from lean_ft.system.parameter_names import matched_parameters

_applied: WeakSet[nn.Module] = WeakSet()


def apply_regularization(model: Decoder, cfg: RecipeConfig) -> None:
    """Apply `freeze`, `train` and `neftune_alpha`. Call it after an adapter is added and before the optimizer is built.

    Raises ValueError as `freeze_parameters`.
    """
    _applied.add(model)
    freeze_parameters(model, cfg.freeze, cfg.train)
    if cfg.neftune_alpha:
        add_embedding_noise(model, cfg.neftune_alpha)


def check_applied(model: nn.Module, cfg: RecipeConfig) -> None:
    """Raise ValueError if a regularization setting is set and the recipe does not call `apply_regularization`."""
    ignored = [name for name in ("freeze", "train", "neftune_alpha") if getattr(cfg, name)]
    if ignored and model not in _applied:
        raise ValueError(
            f"{ignored[0]} is set, and this recipe ignores it. In the recipe, call "
            "lean_ft.training.apply_regularization(model, cfg) before apply_memory; or leave the setting out."
        )


def freeze_parameters(model: nn.Module, freeze: Sequence[str], train: Sequence[str] = ()) -> None:
    """Freeze the trained parameters that `train` does not match (if it is given) or `freeze` matches.

    `lean_ft.system.parameter_names` has the rules of patterns. Raises ValueError if a pattern matches no trained
    parameter, or no trained parameter is left.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    kept = _matched(trained, train, "train") if train else set(trained)
    kept -= _matched(trained, freeze, "freeze")
    if not kept and (freeze or train):
        raise ValueError("freeze and train leave no parameter to train. Remove a pattern from freeze.")
    for name in trained.keys() - kept:
        trained[name].requires_grad_(False)


def _matched(names: Collection[str], patterns: Sequence[str], setting: str) -> set[str]:
    return {name for pattern in patterns for name in matched_parameters(names, pattern, setting)}


def add_embedding_noise(model: Decoder, alpha: float) -> None:
    """Add uniform noise from -s to s to each embedding in a training forward pass, s = alpha / sqrt(L * D).

    L is the number of tokens of the sequence: of the document in a packed row, without padding in other rows.
    """
    signature = inspect.signature(model.forward)
    lengths = torch.empty(0)  # (B, T or 1), of the current forward pass

    def note_lengths(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal lengths
        lengths = text_lengths(**signature.bind(*args, **kwargs).arguments)

    def add_noise(module: nn.Module, _: object, embedded: Tensor) -> Tensor:  # (B, T, D)
        if not module.training:
            return embedded
        scale = alpha / (lengths * embedded.shape[-1]).clamp(min=1).sqrt()
        noise = torch.empty_like(embedded).uniform_(-1, 1)
        return torch.addcmul(embedded, noise, scale.to(embedded.dtype)[..., None])

    model.register_forward_pre_hook(note_lengths, with_kwargs=True)
    model.model.embed_tokens.register_forward_hook(add_noise)
