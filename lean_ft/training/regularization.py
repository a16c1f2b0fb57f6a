"""What holds a finetune back from fitting its few rows alone: parameters that keep their values, and noise on embeddings.

`freeze` and `train` only ever take parameters away from those that would train. NEFTune adds noise to each token's
embedding in training, and never in an evaluation: Jain et al. 2023, https://arxiv.org/abs/2310.05914.

Shapes: B batch, T tokens of a row, D hidden size.
"""

import inspect
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from lean_ft.models import Decoder
from lean_ft.peft.targets import matches_name
from lean_ft.settings import RecipeConfig
from lean_ft.system.spelling import did_you_mean

_applied: WeakSet[nn.Module] = WeakSet()


def apply_regularization(model: Decoder, cfg: RecipeConfig) -> None:
    """Applies `freeze`, `train` and `neftune_alpha`, after an adapter and before whatever depends on what trains.

    Raises ValueError as `freeze_parameters` does.
    """
    _applied.add(model)
    freeze_parameters(model, cfg.freeze, cfg.train)
    if cfg.neftune_alpha:
        add_embedding_noise(model, cfg.neftune_alpha)


def check_applied(model: nn.Module, cfg: RecipeConfig) -> None:
    """Raises ValueError where a recipe was told to freeze or to add noise and does not."""
    asked = [name for name in ("freeze", "train", "neftune_alpha") if getattr(cfg, name)]
    if asked and model not in _applied:
        raise ValueError(
            f"{asked[0]} is set, and this recipe would ignore it. Let it call "
            "lean_ft.training.apply_regularization(model, cfg) before apply_memory, or leave the setting out."
        )


def freeze_parameters(model: nn.Module, freeze: Sequence[str], train: Sequence[str] = ()) -> None:
    """Of the parameters that train, lets only those go on that `train` matches, if anything, and `freeze` does not.

    A pattern is the end of a parameter's name, or of the name of what holds it (`embed_tokens`, `layers.0.mlp`), or such
    a name with wildcards. Raises ValueError where one matches nothing that trains, and where nothing is left.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for setting, patterns in {"freeze": freeze, "train": train}.items():
        for pattern in patterns:
            if not _matched(trained, [pattern]):
                parts = {part for name in trained for part in name.split(".") if not part.isdigit()}
                raise ValueError(
                    f"{setting}: {pattern!r} matches no parameter that would train.{did_you_mean(pattern, parts)} Expected "
                    f"the end of a name, or one with wildcards such as model.layers.0.*, among {', '.join(sorted(parts))}."
                )
    kept = _matched(trained, train or ["*"]) - _matched(trained, freeze)
    if not kept and (freeze or train):
        raise ValueError("freeze and train leave no parameter to train. Take a pattern out of freeze.")
    for name in trained.keys() - kept:
        trained[name].requires_grad_(False)


def _matched(names: Iterable[str], patterns: Sequence[str]) -> set[str]:
    def matches(name: str) -> bool:
        holders = accumulate(name.split("."), "{}.{}".format)  # model, model.layers, model.layers.0 ... and itself
        return any(matches_name(holder, pattern) for holder in holders for pattern in patterns)

    return set(filter(matches, names))


def add_embedding_noise(model: Decoder, alpha: float) -> None:
    """Adds to each embedding in a training forward pass noise from -s to s, s = alpha / sqrt(L * D).

    L is the number of tokens of the sequence: of the document in a packed row, without the padding in others.
    """
    signature = inspect.signature(model.forward)
    lengths = torch.empty(0)  # (B, T or 1), of the forward pass under way

    def note_lengths(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal lengths
        given = signature.bind(*args, **kwargs).arguments
        shape, cu_seqlens, is_token = given["input_ids"].shape, given.get("cu_seqlens"), given.get("is_token")
        if cu_seqlens is not None:
            documents, prefixes = cu_seqlens.diff(), given.get("prefixes")
            texts = documents if prefixes is None else documents + prefixes.diff(dim=1)[:, 0]
            lengths = texts.repeat_interleave(documents, output_size=shape.numel()).view(shape)
        elif is_token is not None:
            lengths = is_token.sum(1, keepdim=True)
        else:
            lengths = torch.full((shape[0], 1), shape[1], device=given["input_ids"].device)

    def add_noise(module: nn.Module, _: Any, embedded: Tensor) -> Tensor:  # (B, T, D)
        if not (module.training and torch.is_grad_enabled()):
            return embedded
        scale = alpha / (lengths * embedded.shape[-1]).clamp(min=1).sqrt()
        noise = torch.empty_like(embedded).uniform_(-1, 1)
        return torch.addcmul(embedded, noise, scale.to(embedded.dtype)[..., None])

    model.register_forward_pre_hook(note_lengths, with_kwargs=True)
    model.model.embed_tokens.register_forward_hook(add_noise)
