"""Build an optimizer from settings; unsupported combinations raise an error."""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from lean_ft.optim.adafactor import Adafactor
from lean_ft.optim.adamw import AdamW, Moment
from lean_ft.optim.adamw_4bit import Moment4bit
from lean_ft.optim.adamw_8bit import AdamW8bit
from lean_ft.optim.adamw_8bit_torchao import Moment8bitTorchao
from lean_ft.optim.apollo_mini import ApolloMini
from lean_ft.optim.ema import averaged
from lean_ft.optim.muon import Muon
from lean_ft.optim.optimizer import Optimizer
from lean_ft.optim.own_rule import own_rule
from lean_ft.optim.rule import VECTORS, Rule
from lean_ft.optim.sgd import SGD
from lean_ft.optim.streamed import stream_state
from lean_ft.settings import MUON_MOMENTUM, OptimizerConfig, TrainingConfig
from lean_ft.settings.optimizer import BITSANDBYTES_RULES, MATRIX_RULES
from lean_ft.system.environment import bitsandbytes_problem
from lean_ft.system.parameter_names import matched_parameters
from lean_ft.system.shards import ALONE, Ranks, part_of, whole_numel, whole_shape
from lean_ft.system.user_functions import is_function_path
from lean_ft.system.world import device_type

# Smaller tensors and all vectors (norms, biases) keep float32 moments: quantizing them saves little. Over many ranks,
# a vector's shards would also be smaller than a block that shares a scale.
MIN_CODED_ELEMENTS = 4096
PAGED_WITHOUT_CUDA = (
    "optimizer.name=paged_adamw_8bit: paging needs CUDA; on this device the state is in ordinary memory, as with "
    "adamw_8bit."
)


def build_optimizer(
    model: nn.Module,
    recipe_cfg: TrainingConfig,
    *,
    lr_ratios: Mapping[str, float] = MappingProxyType({}),
    ranks: Ranks = ALONE,
) -> Optimizer:
    """Build the optimizer of a recipe's settings over the parameters of `model` that require gradients.

    `lr_ratios` are factors of the learning rate by patterns of names, besides those of `optimizer.lr_ratios`. A
    parameter that several patterns match gets the product. Raises ValueError for settings that contradict each other,
    the model, or its sharding over `ranks`.
    """
    cfg = recipe_cfg.optimizer
    trainable = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    if cfg.stochastic_rounding:
        for name, param in trainable:
            if param.dtype != torch.bfloat16:
                raise ValueError(
                    f"optimizer.stochastic_rounding=true is for bfloat16 weights, but {name} is {param.dtype}. Set "
                    "optimizer.stochastic_rounding=false or model.dtype=bfloat16."
                )
    if cfg.ema is not None:
        for name, param in trainable:
            if param.dtype not in (torch.float32, torch.bfloat16):
                raise ValueError(
                    f"optimizer.ema is for float32 and bfloat16 weights, but {name} is {param.dtype}. Remove "
                    "optimizer.ema, or set model.dtype=bfloat16."
                )
    devices = {device_type(param.device) for _, param in trainable}
    if cfg.name in BITSANDBYTES_RULES and "cuda" in devices:
        _refuse_without_kernel(cfg, on_gpu=any(param.is_cuda for _, param in trainable))
    if cfg.state == "paged" and devices and devices != {"cuda"}:
        device = min(devices - {"cuda"})
        raise ValueError(
            f"optimizer.state=paged uses CUDA managed memory, but the model is on {device}. Set optimizer.state=device."
        )
    paged = cfg.state == "paged" or cfg.name == "paged_adamw_8bit"
    on_gpu = devices == {"cuda"}
    rule = _rules(cfg, model, on_gpu=on_gpu, paged=paged and on_gpu, compile=recipe_cfg.compile)
    if cfg.ema is not None:
        rule = averaged(rule, cfg.ema, compile=recipe_cfg.compile and on_gpu)
    _refuse_what_cannot_be_cut(cfg, trainable, rule, ranks)
    optimizer = Optimizer(
        trainable,
        rule,
        in_backward=cfg.in_backward,
        by_layer=recipe_cfg.compile and on_gpu,
        lr_ratios=_ratios_by_name([name for name, _ in trainable], lr_ratios, cfg.lr_ratios),
        streamed=stream_state(trainable[0][1].device) if cfg.state == "streamed" and trainable else None,
        ranks=ranks,
    )
    if paged and not on_gpu:
        optimizer.notes.append(PAGED_WITHOUT_CUDA)
    if recipe_cfg.model.dtype == "float16":
        optimizer.scale_losses()
    return optimizer


def _ratios_by_name(
    names: list[str], of_recipe: Mapping[str, float], of_settings: Mapping[str, float]
) -> dict[str, float]:
    """The product of the ratios of all patterns that match a parameter. A pattern of the settings must match one."""
    ratios = dict.fromkeys(names, 1.0)
    for patterns, setting in ((of_recipe, None), (of_settings, "optimizer.lr_ratios")):
        for pattern, ratio in patterns.items():
            for name in matched_parameters(names, pattern, setting):
                ratios[name] *= ratio
    return ratios


def _refuse_what_cannot_be_cut(
    cfg: OptimizerConfig,
    trainable: list[tuple[str, nn.Parameter]],
    rule: Rule | Callable[[nn.Parameter], Rule],
    ranks: Ranks,
) -> None:
    """Raise ValueError if a rule cannot update the rows that a rank has."""
    if ranks.size > 1 and cfg.state == "streamed":
        raise ValueError(
            f"optimizer.state=streamed is for one process, and there are {ranks.size}. Set optimizer.state=device."
        )
    for name, param in trainable if ranks.num_shards > 1 else []:
        used = rule if isinstance(rule, Rule) else rule(param)
        if used.needs_whole_matrices:
            own = "" if cfg.name in MATRIX_RULES else " A rule that updates rows has needs_whole_matrices = False."
            raise ValueError(
                f"optimizer.name={cfg.name} works on whole matrices, but parallel.shard={ranks.num_shards} shards them "
                f"by rows. Set parallel.shard=1 with parallel.replicate={ranks.size}, or optimizer.name=adamw.{own}"
            )
        columns = part_of(param).run
        if columns is not None and (cfg.name == "adafactor" or columns % used.block):
            per_block = f"one scale per {used.block} neighboring elements"
            kept = "means of whole rows" if cfg.name == "adafactor" else per_block
            raise ValueError(
                f"optimizer.name={cfg.name} keeps {kept}, but parallel.tensor splits {name} of shape "
                f"{list(whole_shape(param))} every {columns} columns. Set parallel.tensor=1, or optimizer.name=adamw."
            )
        parts, num_rows = whole_shape(param)[0] // param.shape[0], param.shape[0]
        rows = -(-num_rows // param.device_mesh.size(-1))  # pyright: ignore[reportAttributeAccessIssue]
        ends = [rows] * (rows < num_rows) + [num_rows] * (parts > 1)
        if within := [end for end in ends if end * math.prod(param.shape[1:]) % used.block]:
            raise ValueError(
                f"optimizer.name={cfg.name} keeps one scale per {used.block} neighboring elements, but {name} of shape "
                f"{list(whole_shape(param))} is split within such a block, every {within[0]} rows. Set another "
                "parallel.shard, or optimizer.name=adamw."
            )


def _rules(
    cfg: OptimizerConfig, model: nn.Module, *, on_gpu: bool, paged: bool, compile: bool
) -> Rule | Callable[[nn.Parameter], Rule]:
    """One rule for all parameters, or a function that gives AdamW to parameters the named rule is not for."""
    if is_function_path(cfg.name):
        return own_rule(cfg, model, compile=compile)
    every: dict[str, Any] = {
        "weight_decay": cfg.weight_decay,
        "stochastic_rounding": cfg.stochastic_rounding,
        "compile": compile,
    }
    adamw: dict[str, Any] = {"betas": cfg.betas, "eps": cfg.eps, "update_clipping": cfg.update_clipping, **every}
    match cfg.name:
        case "sgd":
            return SGD(momentum=cfg.momentum or 0.0, **every)
        case "adafactor":
            return Adafactor(**every)
        case "adamw":
            return AdamW(**adamw)
        case "muon":
            named_rule: Rule = Muon(momentum=MUON_MOMENTUM if cfg.momentum is None else cfg.momentum, **every)
        case "apollo_mini":
            named_rule = ApolloMini(betas=cfg.betas, eps=cfg.eps, **every)
        case "adamw_8bit" | "paged_adamw_8bit":
            named_rule = AdamW8bit(paged=paged, **adamw)
        case "adamw_4bit":
            named_rule = AdamW(moments=(Moment4bit(signed=True), Moment4bit(signed=False)), **adamw)
        case "adamw_8bit_torchao":
            named_rule = AdamW(moments=(Moment8bitTorchao(signed=True), Moment8bitTorchao(signed=False)), **adamw)
        case name:
            raise AssertionError(f"the settings have an optimizer {name} without a rule")
    if cfg.name in MATRIX_RULES:
        is_matrix, adamw_rule = _is_matrix_of(model), AdamW(**adamw)
        return lambda param: named_rule if is_matrix(param) else adamw_rule
    if cfg.name == "adamw_8bit_torchao":  # as torchao does
        block, moments = Moment8bitTorchao.block, None
    else:
        block, moments = 1, (Moment(torch.float32), Moment(torch.float32))
    # On a CPU, a compiled update of few elements takes longer. On a GPU, it is two launches instead of 35.
    small = AdamW(moments=moments, **{**adamw, "compile": compile and on_gpu})

    def is_coded(param: nn.Parameter) -> bool:
        return param.ndim >= 2 and whole_numel(param) >= MIN_CODED_ELEMENTS and whole_numel(param) % block == 0

    return lambda param: named_rule if is_coded(param) else small


def _is_matrix_of(model: nn.Module) -> Callable[[nn.Parameter], bool]:
    """Whether a parameter is a layer's matrix or stack of matrices.

    Embeddings and the output layer do not count: their rows are tokens, whose gradients differ greatly in size. Stacks
    of biases and norms of heads do not count either, nor does the patch projection of a vision tower, which is stored
    as a convolution.
    """
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    excluded = {param for module in embeddings for param in module.parameters()}
    excluded |= {param for name, param in model.named_parameters() if name.endswith(VECTORS)}
    outputs = (getattr(module, "output_weight", None) for module in model.modules())  # two models may train together
    excluded |= {output for output in outputs if isinstance(output, nn.Parameter)}
    return lambda param: 2 <= param.ndim <= 3 and param not in excluded


def _refuse_without_kernel(cfg: OptimizerConfig, *, on_gpu: bool) -> None:
    """On a GPU, bitsandbytes' kernel makes the plain update, and only it can use paged state."""
    lacking = [name for name in ("update_clipping", "stochastic_rounding") if getattr(cfg, name)]
    if lacking and (cfg.name == "paged_adamw_8bit" or cfg.state == "paged"):
        raise ValueError(
            f"optimizer.{lacking[0]}=true is not in bitsandbytes' kernel, and only that kernel can use paged state. "
            f"Set optimizer.{lacking[0]}=false, or optimizer.name=adamw_8bit and optimizer.state=device."
        )
    if not lacking and (reason := bitsandbytes_problem(on_gpu=on_gpu)) is not None:
        raise ValueError(
            f"optimizer.name={cfg.name} on a GPU needs bitsandbytes, and {reason}. Run `pip install bitsandbytes`, or "
            "set optimizer.name=adamw_8bit_torchao."
        )
