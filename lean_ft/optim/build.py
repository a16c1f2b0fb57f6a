"""From settings to an optimizer, refusing what cannot be honoured."""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import nn

from lean_ft.optim.adafactor import Adafactor
from lean_ft.optim.adamw import AdamW
from lean_ft.optim.adamw_8bit import AdamW8bit
from lean_ft.optim.optimizer import Optimizer
from lean_ft.optim.rule import Rule
from lean_ft.optim.sgd import SGD
from lean_ft.settings import OptimizerConfig

ADAMW_RULES = ("adamw", "adamw_8bit", "paged_adamw_8bit")


def build_optimizer(
    model: nn.Module,
    cfg: OptimizerConfig,
    *,
    clip_grad_norm: float | None,
    uses_loss_scaling: bool,
    compile: bool,
    lr_ratios: Mapping[str, float] = MappingProxyType({}),
) -> Optimizer:
    """The optimizer that `cfg` asks for, over the parameters of `model` that require gradients.

    `compile` compiles the rule's update; `lr_ratios` multiplies learning rates, by the ends of parameters' names. Raises ValueError for settings that contradict each other or the
    model.
    """
    _refuse_contradictions(cfg, clip_grad_norm=clip_grad_norm, uses_loss_scaling=uses_loss_scaling)
    trainable = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    if cfg.stochastic_rounding:
        for name, param in trainable:
            if param.dtype != torch.bfloat16:
                raise ValueError(
                    f"optimizer.stochastic_rounding=true rounds bfloat16 weights, but {name} is "
                    f"{param.dtype}, which "
                    "loses no update that matters. Set optimizer.stochastic_rounding=false or "
                    "model.dtype=bfloat16."
                )
    if cfg.name.endswith("8bit") and any(param.is_cuda for _, param in trainable):
        _refuse_without_kernel(cfg)
    return Optimizer(trainable, _rule(cfg, compile), in_backward=cfg.in_backward, lr_ratios=lr_ratios)


def _rule(cfg: OptimizerConfig, compile: bool) -> Rule:
    if cfg.name == "sgd":
        return SGD(
            momentum=cfg.momentum,
            weight_decay=cfg.weight_decay,
            stochastic_rounding=cfg.stochastic_rounding,
            compile=compile,
        )
    if cfg.name == "adamw":
        return AdamW(
            betas=cfg.betas,
            eps=cfg.eps,
            weight_decay=cfg.weight_decay,
            update_clipping=cfg.update_clipping,
            stochastic_rounding=cfg.stochastic_rounding,
            compile=compile,
        )
    if cfg.name in ("adamw_8bit", "paged_adamw_8bit"):
        return AdamW8bit(
            betas=cfg.betas,
            eps=cfg.eps,
            weight_decay=cfg.weight_decay,
            update_clipping=cfg.update_clipping,
            stochastic_rounding=cfg.stochastic_rounding,
            compile=compile,
            paged=cfg.name == "paged_adamw_8bit",
        )
    return Adafactor(weight_decay=cfg.weight_decay, stochastic_rounding=cfg.stochastic_rounding, compile=compile)


def _refuse_without_kernel(cfg: OptimizerConfig) -> None:
    """On a GPU, bitsandbytes' kernel makes the plain update, and it alone reaches paged state."""
    lacking = [name for name in ("update_clipping", "stochastic_rounding") if getattr(cfg, name)]
    if lacking and cfg.name == "paged_adamw_8bit":
        raise ValueError(
            f"optimizer.{lacking[0]}=true is not in bitsandbytes' kernel, which alone reaches the paged state of "
            f"optimizer.name=paged_adamw_8bit. Set optimizer.{lacking[0]}=false or optimizer.name=adamw_8bit."
        )
    if not lacking:
        try:
            import bitsandbytes  # noqa: F401
        except (ImportError, OSError, RuntimeError) as error:
            raise ValueError(
                f"optimizer.name={cfg.name} on a GPU needs bitsandbytes, which cannot be imported here ({error}). "
                "Install it for this CUDA version (`pip install bitsandbytes`), or set optimizer.name=adamw."
            ) from error


def _refuse_contradictions(cfg: OptimizerConfig, *, clip_grad_norm: float | None, uses_loss_scaling: bool) -> None:
    is_adamw = cfg.name in ADAMW_RULES
    adamw_names = "optimizer.name=" + "|".join(ADAMW_RULES)
    if cfg.in_backward and clip_grad_norm is not None:
        instead = " and optimizer.update_clipping=true, which limits each tensor's update by itself" if is_adamw else ""
        raise ValueError(
            f"clip_grad_norm={clip_grad_norm:g} needs every gradient before any update, but "
            "optimizer.in_backward=true updates each parameter and frees its gradient during backward. "
            f"Set clip_grad_norm=null{instead}, or set optimizer.in_backward=false."
        )
    if cfg.in_backward and uses_loss_scaling:
        raise ValueError(
            "model.dtype=float16 scales the loss, and whether the scaled gradients overflowed is known only "
            "when all are there, but optimizer.in_backward=true updates before that. "
            "Set model.dtype=bfloat16, or set optimizer.in_backward=false."
        )
    if cfg.update_clipping and not is_adamw:
        has_its_own = ", which limits its updates by itself," if cfg.name == "adafactor" else ""
        raise ValueError(
            "optimizer.update_clipping=true compares gradients with AdamW's second moment, but "
            f"optimizer.name={cfg.name}{has_its_own} keeps no such moment. "
            f"Set optimizer.update_clipping=false, or set {adamw_names}."
        )
    if cfg.momentum and cfg.name != "sgd":
        instead = " AdamW's momentum is the first of optimizer.betas." if is_adamw else ""
        raise ValueError(
            f"optimizer.momentum={cfg.momentum:g} is a setting of optimizer.name=sgd, and {cfg.name} would "
            f"ignore it. Remove it.{instead}"
        )
    for setting in ("betas", "eps"):
        value = getattr(cfg, setting)
        if not is_adamw and value != OptimizerConfig.model_fields[setting].default:
            raise ValueError(
                f"optimizer.{setting}={value} is a setting of AdamW, and {cfg.name} would ignore it. "
                f"Remove it, or set {adamw_names}."
            )
