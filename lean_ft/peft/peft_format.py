"""Adapters in PEFT's format, out and in: `adapter_config.json` and `adapter_model.safetensors`.

Our modules have Hugging Face's names, so a tensor is called here what PEFT calls it, and nothing is permuted. What is
adapted, and at which rank, is read from the tensors; the config gives the scaling. A field that would change what is
computed and that is not supported is refused by name. Only safetensors are read: a pickled adapter can run code.

A mixture's experts are `target_parameters` to PEFT: each of the two stacked projections is wrapped once, one wrapper
inside the other, so that the outer one's tensors are named after the experts and the inner one's after `base_layer`.

PiSSA is saved as an adapter of twice the rank over the unchanged model, so that anything that reads LoRA reads it.

Shapes: I inputs, O outputs, R rank.
"""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lean_ft.assets import checkpoint_hint
from lean_ft.models import Decoder
from lean_ft.models.moe import Experts, Router
from lean_ft.models.safetensors_file import StoredTensor, read_header, write_file
from lean_ft.peft.experts import PROJECTIONS, ExpertsAdapter
from lean_ft.peft.layers import AdaptedLayer, AdapterShape, LoRAEmbedding
from lean_ft.peft.lora import adapted_layers, put_adapter
from lean_ft.peft.nf4 import NF4Linear
from lean_ft.peft.targets import is_projection_of_experts

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."

_LINEAR_NAMES = {"lora_A": ".lora_A.weight", "lora_B": ".lora_B.weight"}
_EMBEDDING_NAMES = {"lora_A": ".lora_embedding_A", "lora_B": ".lora_embedding_B"}
_MAGNITUDE = ".lora_magnitude_vector"

# Fields that change nothing once an adapter is trained, or that the tensors answer for.
_ANSWERED = {
    "alpha_pattern",
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_alpha",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "r",
    "rank_pattern",
    "revision",
    "runtime_config",
    "target_modules",
    "target_parameters",
    "task_type",
    "use_dora",
    "use_rslora",
}
# What `init_lora_weights` may be: the other ways to begin change the model's own weights.
_HARMLESS_STARTS = (True, False, None, "gaussian", "eva", "mica", "orthogonal")


@dataclass(frozen=True)
class StoredAdapter:
    """An adapter on disk: what it adapts, and where its tensors lie."""

    folder: Path
    config: dict[str, Any]
    base_model: str | None
    shapes: dict[str, AdapterShape]  # by the name of the layer
    tensors: dict[str, StoredTensor]  # by the name in the file, without PEFT's prefix


def save_adapter(model: Decoder, path: str | Path) -> None:
    """Writes the model's adapter, and nothing of the model itself, to the folder `path`.

    Raises ValueError where the model has no adapter.
    """
    layers = adapted_layers(model)
    if not layers:
        raise ValueError("the model has no adapter to save; save_model saves the model itself.")
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {_PREFIX + name: tensor for name, tensor in _named_tensors(layers).items()}
    write_file(folder / WEIGHTS_FILE, tensors, {"format": "pt"})
    config = json.dumps(_config(model, layers), indent=2, ensure_ascii=False) + "\n"
    (folder / CONFIG_FILE).write_text(config, encoding="utf-8")


def adapter_bytes(model: nn.Module) -> int:
    """Room that the tensors of `save_adapter` take on the disk."""
    return sum(tensor.nbytes for layer in adapted_layers(model).values() for tensor in _tensors(layer).values())


@torch.no_grad()
def restore_adapter(path: str | Path, model: Decoder) -> None:
    """Reads what `save_adapter` wrote into the model's adapter, bit for bit.

    Raises ValueError where what is stored is not this model's adapter, by name, shape or type.
    """
    folder = Path(path)
    stored, layers = read_adapter(folder).tensors, adapted_layers(model)
    own = _named_tensors(layers)
    if different := sorted(stored.keys() ^ own.keys()):
        owner = folder if different[0] in stored else "the model"
        raise ValueError(f"{folder} is not a checkpoint of this adapter: only {owner} has {different[0]}.")
    for name, tensor in own.items():
        there, here = (stored[name].shape, stored[name].dtype), (tuple(tensor.shape), tensor.dtype)
        if there != here:
            raise ValueError(
                f"{name} is {there[0]} {there[1]} in {folder} and {here[0]} {here[1]} in the model. "
                "A run goes on with the lora settings it began with."
            )
    for name, layer in layers.items():
        stem = _stem(name, layers)
        _set_values(layer, {suffix: _read(stored[stem + suffix]) for suffix in _tensors(layer)})


def load_adapter(model: Decoder, *paths: str | Path) -> None:
    """Puts adapters in PEFT's format on a model, frozen; several add up, as PEFT's do when all are active.

    Several LoRA adapters of a layer are one, of the ranks' sum. Raises ValueError where a folder holds no adapter, one
    of another model, or one that asks for what is not supported.
    """
    if adapted_layers(model):
        raise ValueError("the model has an adapter already; load it anew to give it others.")
    adapters = [_with_experts_named(model, read_adapter(Path(path))) for path in paths]
    for adapter in adapters:
        _check_fits(model, adapter)
        if len(adapters) > 1 and any(shape.dora for shape in adapter.shapes.values()):
            raise ValueError(
                f"{adapter.folder} is a DoRA adapter, which sets the size of what it adapts and so does not add up with "
                "others. Give it alone, or merge it first: leanft export --merge."
            )
    model.requires_grad_(False)
    names = dict.fromkeys(name for adapter in adapters for name in adapter.shapes)
    for name in names:
        _put_stored(model, name, [adapter for adapter in adapters if name in adapter.shapes])


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter."""
    return (folder / CONFIG_FILE).is_file()


def base_model(folder: Path) -> str:
    """The model that the adapter in `folder` is of: a folder, or a repository of the hub. Raises ValueError without."""
    name = read_adapter(folder).base_model
    if name is None:
        raise ValueError(f"{folder} does not say which model it is of; give the model's folder.")
    return name


def read_adapter(folder: Path) -> StoredAdapter:
    """Returns what the adapter in `folder` is, its tensors not yet read.

    Raises ValueError where there is none, or one that asks for what is not supported.
    """
    config = _read_config(folder)
    if not (folder / WEIGHTS_FILE).is_file():
        pickled = " Its weights are pickled, and can run code when opened: have peft save it as safetensors."
        raise ValueError(f"{folder} has no {WEIGHTS_FILE}.{pickled if (folder / 'adapter_model.bin').exists() else ''}")
    tensors = {}
    for name, stored in read_header(folder / WEIGHTS_FILE).items():
        if not name.startswith(_PREFIX):
            raise ValueError(f"{stored.file}: {name} is no name that PEFT gives; expected {_PREFIX}...")
        # Older versions of PEFT end the magnitude's name as a weight's.
        name = name.removeprefix(_PREFIX)
        tensors[name.removesuffix(".weight") if name.endswith(f"{_MAGNITUDE}.weight") else name] = stored
    shapes = {}
    for name, stored in tensors.items():
        for suffix in (_LINEAR_NAMES["lora_A"], _EMBEDDING_NAMES["lora_A"]):
            if name.endswith(suffix):
                layer = name.removesuffix(suffix)
                shapes[layer] = _stored_shape(config, layer, rank=stored.shape[0])
    return StoredAdapter(folder, config, _named_model(config), shapes, tensors)


# Out -----------------------------------------------------------------------------------------------------------


def _suffixes(layer: nn.Module) -> dict[str, str]:
    return _EMBEDDING_NAMES if isinstance(layer, LoRAEmbedding | nn.Embedding) else _LINEAR_NAMES


def _tensors(layer: AdaptedLayer) -> dict[str, Tensor]:
    """The layer's adapter as it is stored: tensors by the ends of their names."""
    suffixes = _suffixes(layer)
    a, b = layer.factors()
    tensors = {suffixes["lora_A"]: a.detach(), suffixes["lora_B"]: b.detach()}
    if layer.lora_magnitude_vector is not None:
        tensors[_MAGNITUDE] = layer.lora_magnitude_vector.detach()
    return tensors


def _named_tensors(layers: dict[str, AdaptedLayer]) -> dict[str, Tensor]:
    """All tensors of an adapter by PEFT's names, without the prefix."""
    return {
        _stem(name, layers) + suffix: tensor
        for name, layer in layers.items()
        for suffix, tensor in _tensors(layer).items()
    }


def _stem(name: str, layers: dict[str, AdaptedLayer]) -> str:
    """What the names of a layer's tensors begin with: PEFT wraps experts for `gate_up_proj` first, then for the other."""
    if not isinstance(layers[name], ExpertsAdapter):
        return name
    place, _, projection = name.rpartition(".")
    is_inner = projection == "gate_up_proj" and f"{place}.down_proj" in layers
    return f"{place}.base_layer" if is_inner else place


def _config(model: Decoder, layers: dict[str, AdaptedLayer]) -> dict[str, Any]:
    shapes = {name: _stored_as(layer) for name, layer in layers.items()}
    (rank, alpha), _ = Counter((shape.rank, shape.alpha) for shape in shapes.values()).most_common(1)[0]
    first = next(iter(shapes.values()))
    parameters = {name: _named_as_parameter(model, name, layer) for name, layer in layers.items()}
    modules = {name: layer for name, layer in layers.items() if parameters[name] is None}
    name_or_path, revision = _base_model(model)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": name_or_path,
        "revision": revision,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": first.dropout,
        "target_modules": _target_modules(model, modules),
        "target_parameters": sorted(filter(None, parameters.values())) or None,
        "rank_pattern": {_exactly(name): s.rank for name, s in shapes.items() if s.rank != rank},
        "alpha_pattern": {_exactly(name): s.alpha for name, s in shapes.items() if s.alpha != alpha},
        "use_rslora": first.rslora,
        "use_dora": first.dora,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
    }


def _named_as_parameter(model: Decoder, name: str, layer: AdaptedLayer) -> str | None:
    """What PEFT calls the parameter that it is to adapt; None where it is to adapt a module.

    In a model with experts PEFT takes any module of these names for experts that an older version kept one by one, the
    plain layers between them too, and gives it twice the rank.
    """
    if isinstance(layer, ExpertsAdapter):
        return name
    is_mistaken = model.mixture is not None and name.rpartition(".")[2] in ("gate_proj", "up_proj", "down_proj")
    return f"{name}.weight" if is_mistaken else None


def _stored_as(layer: AdaptedLayer) -> AdapterShape:
    """The shape that goes with `_tensors`: of twice the rank with PiSSA, at the same scaling."""
    shape, rank = layer.shape, layer.factors()[0].shape[0]
    if isinstance(layer, ExpertsAdapter):
        return shape
    growth = rank / shape.rank
    return replace(shape, rank=rank, alpha=shape.alpha * (growth**0.5 if shape.rslora else growth))


def _target_modules(model: Decoder, layers: dict[str, AdaptedLayer]) -> list[str]:
    """The last parts of the adapted layers' names, where these mean the same layers to PEFT; else the names."""
    short = sorted({name.rpartition(".")[2] for name in layers})
    meant = {
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Embedding | NF4Linear | Router | AdaptedLayer)
        and name.rpartition(".")[2] in short
    }
    return short if meant == layers.keys() else list(layers)


def _base_model(model: Decoder) -> tuple[str | None, str | None]:
    """The model's repository and commit, where it lies in the hub's cache, or its folder."""
    folder = model.source_folder
    if folder is None:
        return None, None
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
        return folder.parent.parent.name.removeprefix("models--").replace("--", "/"), folder.name
    return str(folder), None


def _exactly(name: str) -> str:
    """A pattern, as PEFT's `rank_pattern` takes them, of this name alone."""
    return f"^{re.escape(name)}"


# In ------------------------------------------------------------------------------------------------------------


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise ValueError(
            f"{folder} holds no adapter: expected {CONFIG_FILE} and {WEIGHTS_FILE}, as PEFT saves them."
            f"{checkpoint_hint(folder)}"
        )
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        came = config.get("peft_type") if isinstance(config, dict) else config
        raise ValueError(f"{file}: peft_type is {came!r}; expected LORA, the one kind of adapter that is supported.")
    if config.get("init_lora_weights") not in _HARMLESS_STARTS:
        raise ValueError(
            f"{file}: init_lora_weights is {config['init_lora_weights']!r}: the adapter goes with a changed copy of the "
            "model's weights. Have peft convert it: save_pretrained(..., path_initial_model_for_weight_conversion=...)."
        )
    for name, value in config.items():
        known = name in (*_ANSWERED, "init_lora_weights") or (name == "bias" and value == "none")
        if not known and value not in (None, False, 0, "", [], {}):
            raise ValueError(f"{file}: {name} is {value!r}, which is not supported; expected it absent or null.")
    for name in ("r", "lora_alpha"):
        if isinstance(config.get(name), bool) or not isinstance(config.get(name), int | float) or config[name] <= 0:
            raise ValueError(f"{file}: {name} is {config.get(name)!r}; expected a positive number.")
    return config


def _named_model(config: dict[str, Any]) -> str | None:
    name, revision = config.get("base_model_name_or_path"), config.get("revision")
    return f"{name}@{revision}" if name and revision else name or None


def _stored_shape(config: dict[str, Any], layer: str, rank: int) -> AdapterShape:
    patterns = config.get("alpha_pattern") or {}
    alpha = next(
        (alpha for pattern, alpha in patterns.items() if re.match(rf"(.*\.)?({pattern})$", layer)), config["lora_alpha"]
    )
    return AdapterShape(
        rank=rank,
        alpha=float(alpha),
        rslora=bool(config.get("use_rslora")),
        dora=bool(config.get("use_dora")),
        dropout=0.0,
    )


def _with_experts_named(model: Decoder, adapter: StoredAdapter) -> StoredAdapter:
    """The adapter with its wrappers of experts under the names of the projections, which their shapes tell."""
    modules, shapes, tensors = dict(model.named_modules()), dict(adapter.shapes), dict(adapter.tensors)
    for name in adapter.shapes:
        place = name.removesuffix(".base_layer")
        experts = modules.get(place)
        if not isinstance(experts, Experts):
            continue
        names = [name + suffix for suffix in _LINEAR_NAMES.values()]
        stored = [adapter.tensors[n].shape for n in names if n in adapter.tensors]
        for projection in PROJECTIONS:
            num_experts, num_outputs, num_inputs = _linear_shape(experts, projection)
            if [shape[axis] for shape, axis in zip(stored, (1, 0), strict=False)] == [num_inputs, num_outputs]:
                rank = shapes.pop(name).rank // num_experts
                shapes[f"{place}.{projection}"] = _stored_shape(adapter.config, f"{place}.{projection}", rank)
                for old, suffix in zip(names, _LINEAR_NAMES.values(), strict=True):
                    tensors[f"{place}.{projection}{suffix}"] = tensors.pop(old)
    return replace(adapter, shapes=shapes, tensors=tensors)


def _linear_shape(experts: Experts, projection: str) -> tuple[int, int, int]:
    """(experts, outputs, inputs) of a stacked projection."""
    num_experts, *sides = getattr(experts, projection).shape
    num_outputs, num_inputs = reversed(sides) if experts.config.input_first else sides
    return num_experts, num_outputs, num_inputs


def _check_fits(model: Decoder, adapter: StoredAdapter) -> None:
    """Raises ValueError unless every tensor of the adapter has its place in the model."""
    modules, expected = dict(model.named_modules()), {}
    for name, shape in adapter.shapes.items():
        place, _, projection = name.rpartition(".")
        experts, rank = modules.get(place), shape.rank
        module = experts if isinstance(experts, Experts) else modules.get(name)
        if not isinstance(module, nn.Linear | nn.Embedding | NF4Linear | Router | Experts):
            raise ValueError(
                f"{adapter.folder} adapts {name}, which {_what(model)} has not. It is an adapter of another model"
                f"{f', {adapter.base_model}' if adapter.base_model else ''}."
            )
        if isinstance(module, Experts):
            num_experts, num_outputs, num_inputs = _linear_shape(module, projection)
            rank *= num_experts
        elif isinstance(module, nn.Embedding):
            num_inputs, num_outputs = module.num_embeddings, module.embedding_dim
            if model.config.tied_embeddings:
                raise ValueError(
                    f"{adapter.folder} adapts {name}, which is the output layer too in {_what(model)} "
                    "(tie_word_embeddings); an adapter that changes one of the two is not supported."
                )
        else:
            num_outputs, num_inputs = (
                module.weight.shape if isinstance(module, Router) else (module.out_features, module.in_features)
            )
        suffixes = _suffixes(module)
        expected[name + suffixes["lora_A"]] = (rank, num_inputs)
        expected[name + suffixes["lora_B"]] = (num_outputs, rank)
        if shape.dora:
            expected[name + _MAGNITUDE] = (num_outputs,)
    missing = sorted(expected.keys() - adapter.tensors.keys())
    if missing or not expected:
        raise ValueError(f"{adapter.folder / WEIGHTS_FILE} lacks {missing[0] if missing else 'any adapter'}.")
    for name, stored in adapter.tensors.items():
        if name not in expected:
            if _is_own_weight(model, name, stored):  # PEFT adds the embedding's where that has an adapter
                continue
            raise ValueError(
                f"{stored.file}: {name} is no part of a LoRA or DoRA adapter and not the model's own weight; whole "
                "layers that were trained beside an adapter are not supported."
            )
        if stored.shape != expected[name]:
            raise ValueError(
                f"{stored.file}: {name} has the shape {list(stored.shape)}; {_what(model)} makes it "
                f"{list(expected[name])}. It is an adapter of another model"
                f"{f', {adapter.base_model}' if adapter.base_model else ''}."
            )


def _is_own_weight(model: Decoder, name: str, stored: StoredTensor) -> bool:
    """Whether a stored tensor is the model's weight of that name, unchanged."""
    own = dict(model.named_parameters()).get(name.replace(".base_layer.", "."))
    return own is not None and own.shape == stored.shape and torch.equal(_read(stored).to(own), own.detach())


def _what(model: Decoder) -> str:
    return "the model" if model.source_folder is None else f"the model of {model.source_folder}"


def _put_stored(model: Decoder, name: str, adapters: Sequence[StoredAdapter]) -> None:
    """Puts the stored adapters of one layer on it, as one."""
    is_stack = is_projection_of_experts(model, name)
    suffixes = _LINEAR_NAMES if is_stack else _suffixes(model.get_submodule(name))
    first = adapters[0].shapes[name]
    matrices_a = [_read(adapter.tensors[name + suffixes["lora_A"]]) for adapter in adapters]
    matrices_b = [_read(adapter.tensors[name + suffixes["lora_B"]]).float() for adapter in adapters]
    if len(adapters) > 1 and is_stack:
        raise ValueError(
            f"{name} is a stack of experts, on which several adapters at a time are not supported. Give one, or merge "
            "the others first: leanft export --merge."
        )
    if len(adapters) > 1:
        for adapter, b in zip(adapters, matrices_b, strict=True):
            b.mul_(adapter.shapes[name].scaling)
        rank = sum(a.shape[0] for a in matrices_a)
        first = AdapterShape(rank=rank, alpha=float(rank))  # a scaling of 1: each has its own in B
    layer = put_adapter(model, name, first, torch.float32)
    values = {suffixes["lora_A"]: torch.cat(matrices_a), suffixes["lora_B"]: torch.cat(matrices_b, dim=1)}
    if first.dora:
        values[_MAGNITUDE] = _read(adapters[0].tensors[name + _MAGNITUDE])
    _set_values(layer, values)
    layer.requires_grad_(False)


@torch.no_grad()
def _set_values(layer: AdaptedLayer, values: dict[str, Tensor]) -> None:
    """Sets a layer's adapter to stored tensors, by the ends of their names; the second half is PiSSA's start."""
    suffixes, rank = _suffixes(layer), layer.lora_A.shape[0]
    a, b = values[suffixes["lora_A"]], values[suffixes["lora_B"]]
    layer.lora_A.copy_(a[:rank])
    layer.lora_B.copy_(b[:, :rank])
    if layer.start_A is not None and layer.start_B is not None:
        layer.start_A.copy_(a[rank:])
        layer.start_B.copy_(-b[:, rank:])
    if layer.lora_magnitude_vector is not None:
        layer.lora_magnitude_vector.copy_(values[_MAGNITUDE])


def _read(stored: StoredTensor) -> Tensor:
    if stored.dtype is None or not stored.dtype.is_floating_point:
        raise ValueError(f"{stored.file}: a tensor is stored as {stored.dtype_name}; expected F32, BF16 or F16.")
    return stored.read()
