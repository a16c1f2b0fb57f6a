"""8- and 4-bit quantization of the layers' projections by torchao, and quantization-aware training (QAT) with the same
rounding.

`quantize` replaces the weights of linear projections inside the layers; embedding, output layer and norms stay.
`save_quantized` writes a folder that `load_quantized` reads, and that transformers opens if torchao is installed.
`fake_quantize` makes these projections round their weights (and for some kinds their inputs) as torchao's kernels do,
and pass gradients straight through. The weights keep their dtype, so checkpoints are those of the original model, and
`quantize` converts them as torchao's own conversion does.

All kinds run on a CPU and are tested there; kinds that torchao supports only on GPUs are not offered.

Source: torchao's quantize_ and QATConfig; straight-through estimation, Bengio et al. 2013, arXiv:1308.3432.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn

from lean_ft.models import Decoder, empty_model
from lean_ft.models.safetensors_file import StoredTensor, read_header, write_file
from lean_ft.models.saving import write_configs
from lean_ft.models.source import tensors_on_disk
from lean_ft.models.stored_weights import DTYPES
from lean_ft.quantize.cpu_linear import fast_linear
from lean_ft.settings import LoRAConfig, MemoryConfig, QuantizeConfig, QuantizedKind, RecipeConfig
from lean_ft.system.whole_files import read_json, why_unusable
from lean_ft.tokenizers import Tokenizer

if TYPE_CHECKING:
    from torchao.core.config import AOBaseConfig

_INT4: torch.dtype = getattr(torch, "int4")  # noqa: B009  (missing in torch's annotations)
KINDS = get_args(get_args(QuantizedKind)[0])
GROUPED = ("int4", "int8_dynamic_int4_weight")
"""The kinds with a scale for each group of inputs."""
_NOT_QUANTIZED = ["lm_head", "score"]  # linear layers outside of `layers`, by transformers' names


def quantize(model: Decoder, kind: str, group_size: int = 32) -> int:
    """Quantize the weights of the layers' projections in place, and return their number.

    kind: as `quantize.kind` of the recipe. group_size: inputs that share a scale, for 4-bit weights. Raises ValueError
    if the model's layers cannot be quantized this way.
    """
    from torchao.quantization import quantize_

    return _apply(quantize_, model, torchao_config(kind, group_size), kind, group_size)


def fake_quantize(model: Decoder, cfg: RecipeConfig) -> None:
    """Prepare the model for training with the rounding of `quantize.train`, if set, as torchao's QATConfig does.

    Raises ValueError with adapters, float8 products or several processes, and for layers that cannot be quantized this
    way.
    """
    quantization = cfg.group(QuantizeConfig)
    if quantization is None or quantization.train is None:
        return
    setting, memory = f"quantize.train={quantization.train}", cfg.group(MemoryConfig)
    if cfg.group(LoRAConfig) is not None:
        raise ValueError(
            f"{setting} rounds trained weights, and an adapter freezes them. Remove lora or quantize.train."
        )
    if memory is not None and memory.float8_products:
        raise ValueError(f"{setting} and memory.float8_products=true both round the layers' products. Set one of them.")
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(f"{setting} supports one process, and {dist.get_world_size()} were started.")
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig
    from torchao.quantization.qat.api import QATStep

    base = torchao_config(quantization.train, quantization.group_size)
    _apply(quantize_, model, QATConfig(base, step=QATStep.PREPARE), quantization.train, quantization.group_size)


def torchao_config(kind: str, group_size: int) -> "AOBaseConfig":
    """torchao's config of a kind."""
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
    if model.mixture is not None or any(f"{name}.weight" not in stored for name in projections):
        raise ValueError("quantization does not support models with experts or fused projections. Use another model.")
    for name, linear in projections.items():
        if kind in GROUPED and linear.in_features % group_size:
            inputs = f"{name} has {linear.in_features} inputs"
            raise ValueError(
                f"{inputs}, which is not a multiple of group_size={group_size}. Set group_size to a divisor."
            )
    quantize_(model, config, filter_fn=lambda module, name: name in projections)
    return len(projections)


def is_quantized(folder: Path) -> bool:
    """Whether the weights of a model folder are quantized by torchao."""
    quantization = read_json(folder / "config.json").get("quantization_config")
    return isinstance(quantization, dict) and quantization.get("quant_method") == "torchao"


def load_quantized(folder: Path, dtype: torch.dtype) -> Decoder:
    """Load a folder that `save_quantized` wrote onto the CPU, frozen, with fast products where there are any
    (`fast_linear`).

    Raises ValueError if the file is not as expected, or `dtype` is not the dtype in which the model was quantized.
    """
    from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict

    model, file = empty_model(folder, dtype=dtype, is_quantized=True), folder / "model.safetensors"
    header, kind, group_size = read_header(file), *_kind_of(folder)
    _check_pieces(file, header, empty_model(folder, dtype=dtype, is_quantized=True), kind, group_size)
    stored = {name: tensor.read() for name, tensor in header.items()}
    try:
        with safe_open(file, "pt") as opened:
            tensors, others = unflatten_tensor_state_dict(stored, opened.metadata())
    except Exception as error:  # its metadata can be any text
        raise ValueError(
            f"{file} has no weights of torchao: {why_unusable(error)}. Quantize the model again."
        ) from None
    expected = {name: (parameter.shape, dtype) for name, parameter in model.named_parameters()}
    found = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    for name in sorted({*expected, *found, *others}):
        if name not in expected or name not in found or expected[name][0] != found[name][0]:
            raise ValueError(f"{file}: {name} does not fit config.json. Quantize the model again.")
        if expected[name] != found[name]:
            stored_dtype = str(found[name][1]).removeprefix("torch.")
            raise ValueError(f"{folder} was quantized in {stored_dtype}. Set dtype to {stored_dtype}.")
    for name in expected:
        place, _, own = name.rpartition(".")
        setattr(model.get_submodule(place), own, nn.Parameter(tensors.pop(name), requires_grad=False))
    del stored
    for name, linear in list(model.named_modules()):
        if isinstance(linear, nn.Linear) and hasattr(linear.weight, "qdata"):
            model.set_submodule(name, fast_linear(linear, kind, group_size))
    return model


def _kind_of(folder: Path) -> tuple[str, int]:
    """The kind and group size that `save_quantized` wrote to config.json. Raises ValueError for other settings of
    torchao."""
    from torchao.core.config import config_to_dict

    quant_type = read_json(folder / "config.json")["quantization_config"].get("quant_type")
    group_sizes = re.findall(r"'group_size': (\d{1,6})\b", str(quant_type))
    group_size = max(1, int(group_sizes[0])) if group_sizes else 32
    kinds = (kind for kind in KINDS if quant_type == {"default": config_to_dict(torchao_config(kind, group_size))})
    if (kind := next(kinds, None)) is None:
        found = f"{folder / 'config.json'}: quant_type is {quant_type!r:.200}"
        raise ValueError(f"{found}; expected that of a model which `leanft run quantize` wrote: {', '.join(KINDS)}.")
    return kind, group_size


def _check_pieces(file: Path, stored: Mapping[str, StoredTensor], like: Decoder, kind: str, group_size: int) -> None:
    """Raise ValueError unless the file has the numbers, scales and zero points of each weight, in their shapes and
    dtypes.

    like: the model on the meta device, which is quantized here for comparison. Wider or narrower floats are compared
    later.
    """
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    quantize(like, kind, group_size)
    weights: Any = {name: parameter.detach() for name, parameter in like.named_parameters()}
    pieces, _ = flatten_tensor_state_dict(weights)
    if different := sorted(pieces.keys() ^ stored.keys()):
        is_missing = different[0] in pieces
        found = f"{different[0]} is {'missing' if is_missing else 'unexpected'}"
        raise ValueError(
            f"{file} has no weights of torchao as its config.json describes them: {found}. Quantize the model again."
        )
    for name, piece in pieces.items():
        dtypes = (piece.dtype, stored[name].dtype)
        if stored[name].shape != tuple(piece.shape) or (
            piece.dtype != stored[name].dtype and not set(dtypes) <= {*DTYPES}
        ):
            weight = re.sub(r"\._weight_\w+$", ".weight", name)
            found = f"{stored[name].dtype_name} of the shape {list(stored[name].shape)}"
            raise ValueError(f"{file}: {weight} does not fit config.json: {name} is {found}. Quantize the model again.")


def save_quantized(model: Decoder, tokenizer: Tokenizer | None, folder: Path, kind: str, group_size: int) -> None:
    """Write a quantized model in transformers' format for torchao: one safetensors file, and the quantization in
    config.json. `folder` must exist."""
    from torchao.core.config import config_to_dict
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    weights: Mapping[str, Tensor] = {name: parameter.detach() for name, parameter in model.named_parameters()}
    tensors, metadata = flatten_tensor_state_dict(weights)  # pyright: ignore[reportArgumentType]
    write_file(folder / "model.safetensors", tensors, {"format": "pt", **metadata})
    quantization = {
        "quant_method": "torchao",
        "quant_type": {"default": config_to_dict(torchao_config(kind, group_size))},
        "modules_to_not_convert": _NOT_QUANTIZED,
        "include_input_output_embeddings": False,
        "untie_embedding_weights": False,
    }
    write_configs(model, folder, quantization_config=quantization)
    if tokenizer is not None:
        tokenizer.save(folder)
