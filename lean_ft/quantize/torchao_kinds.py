"""Numbers of 8 or 4 bits for the layers' projections, by torchao: weights for a model that is done, and the same rounding in
training, so that a model gets used to it (QAT).

`quantize` replaces the weights of the linear projections inside the layers; embedding, output layer and norms stay. `save_quantized`
writes what transformers opens, with torchao installed. `fake_quantize` has the same projections round their weights, and their
inputs where the kind says so, as torchao's kernels would, and pass gradients straight through; the weights themselves stay as they
are, so that checkpoints are of the model's own type, and `quantize` makes of them what torchao's own conversion would.

What is here runs on a CPU, and is tested there; kinds that torchao has for GPUs alone are refused.

Source: torchao's quantize_ and QATConfig; straight-through estimation, Bengio et al. 2013, arXiv:1308.3432.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from lean_ft.models import Decoder
from lean_ft.models.hf_format import tensors_on_disk, write_configs
from lean_ft.models.moe import Experts
from lean_ft.settings import LoRAConfig, MemoryConfig, QuantizeConfig, RecipeConfig
from lean_ft.tokenizers import Tokenizer

if TYPE_CHECKING:
    from torchao.core.config import AOBaseConfig

_INT4: torch.dtype = getattr(torch, "int4")  # noqa: B009  (which torch's own annotations leave out)
_IN_GROUPS = ("int4", "int8_dynamic_int4_weight")
_STAY = ["lm_head", "score"]  # linear layers outside of `layers`, as transformers wants them named


def quantize(model: Decoder, kind: str, group_size: int = 32) -> int:
    """Quantises the weights of the layers' projections in place, and returns how many those are.

    kind: as `quantize.kind` of the recipe; group_size: inputs that share a scale, for weights of 4 bits. Raises ValueError for a
    model whose layers cannot have it.
    """
    from torchao.quantization import quantize_

    return _apply(quantize_, model, torchao_config(kind, group_size), kind, group_size)


def fake_quantize(model: Decoder, cfg: RecipeConfig) -> None:
    """Prepares the model for training with the rounding of `quantize.train`, if that is set, as torchao's QATConfig does.

    Raises ValueError beside what else would not see the rounding, or for layers that cannot have it.
    """
    quantization = cfg.group(QuantizeConfig)
    if quantization is None or quantization.train is None:
        return
    setting, memory = f"quantize.train={quantization.train}", cfg.group(MemoryConfig)
    if cfg.group(LoRAConfig) is not None:
        raise ValueError(
            f"{setting} rounds weights that train, and beside an adapter they are frozen. Leave out lora, or quantize.train."
        )
    if memory is not None and memory.float8_products:
        raise ValueError(f"{setting} and memory.float8_products=true both round the layers' products. Set one of them.")
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"{setting} is for one process, and {dist.get_world_size()} were started: of a cut model it is not tested."
        )
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig
    from torchao.quantization.qat.api import QATStep

    base = torchao_config(quantization.train, quantization.group_size)
    _apply(quantize_, model, QATConfig(base, step=QATStep.PREPARE), quantization.train, quantization.group_size)


def torchao_config(kind: str, group_size: int) -> "AOBaseConfig":
    """What torchao calls it."""
    from torchao import quantization as ao

    group = ao.PerGroup(group_size)
    return {
        "int8": ao.Int8WeightOnlyConfig,
        "int4": lambda: ao.IntxWeightOnlyConfig(weight_dtype=_INT4, granularity=group),
        "float8": ao.Float8WeightOnlyConfig,
        "int8_dynamic_int8_weight": ao.Int8DynamicActivationInt8WeightConfig,
        "int8_dynamic_int4_weight": lambda: ao.Int8DynamicActivationIntxWeightConfig(
            weight_dtype=_INT4, weight_granularity=group
        ),
    }[kind]()


def _apply(quantize_: Any, model: Decoder, config: Any, kind: str, group_size: int) -> int:
    projections = {name: m for name, m in model.named_modules() if ".layers." in name and type(m) is nn.Linear}
    stored = tensors_on_disk(model)
    is_mixture = any(isinstance(module, Experts) for module in model.modules())
    if is_mixture or any(f"{name}.weight" not in stored for name in projections):
        raise ValueError(
            "quantisation is for models whose folder holds a matrix for each linear projection; a mixture's experts are "
            "stacked, and torchao would leave them as they are."
        )
    for name, linear in projections.items():
        if kind in _IN_GROUPS and linear.in_features % group_size:
            raise ValueError(
                f"{name} has {linear.in_features} inputs, which are no whole groups of {group_size}. Set group_size to what "
                "divides them."
            )
    quantize_(model, config, filter_fn=lambda module, name: name in projections)
    return len(projections)


def save_quantized(model: Decoder, tokenizer: Tokenizer | None, folder: Path, kind: str, group_size: int) -> None:
    """Writes a model that `quantize` has quantised, as transformers writes torchao's: one safetensors file, and in config.json
    what was done. `folder` exists."""
    from torchao.core.config import config_to_dict
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    weights: Mapping[str, Tensor] = {name: parameter.detach() for name, parameter in model.named_parameters()}
    tensors, told = flatten_tensor_state_dict(weights)  # pyright: ignore[reportArgumentType]
    save_file(
        {name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt", **told}
    )
    how = {
        "quant_method": "torchao",
        "quant_type": {"default": config_to_dict(torchao_config(kind, group_size))},
        "modules_to_not_convert": _STAY,
        "include_input_output_embeddings": False,
        "untie_embedding_weights": False,
    }
    write_configs(model, folder, quantization_config=how)
    if tokenizer is not None:
        tokenizer.save(folder)
