"""Adapters in PEFT's format, out and in: `adapter_config.json` and `adapter_model.safetensors`.

Our modules have Hugging Face's names, so a tensor is called here what PEFT calls it, and nothing is permuted. What is
adapted, and at which rank, is read from the tensors; the config gives the scaling. A field that would change what is
computed and that is not supported is refused by name. Only safetensors are read: a pickled adapter can run code.

A mixture's experts are `target_parameters` to PEFT: each of the two stacked projections is wrapped once, one wrapper
inside the other, so that the outer one's tensors are named after the experts and the inner one's after `base_layer`.

Rows of new tokens are its `trainable_token_indices`: the ids in the config, the rows themselves among the tensors.

PiSSA is saved as an adapter of twice the rank over the unchanged model, so that anything that reads LoRA reads it.

Shapes: I inputs, O outputs, R rank.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lean_ft.hub.download import cached_name
from lean_ft.hub.paths import checkpoint_hint
from lean_ft.models import Decoder
from lean_ft.models.config_fields import MAX_NUMBER
from lean_ft.models.hf_format import weights_fingerprint
from lean_ft.models.moe import Experts, Router
from lean_ft.models.names_on_disk import module_on_disk
from lean_ft.models.safetensors_file import MAX_NAME_CHARACTERS, StoredTensor, read_header, read_same, write_file
from lean_ft.models.source import source_of
from lean_ft.peft.experts import PROJECTIONS, ExpertsAdapter
from lean_ft.peft.layers import AdaptedLayer, AdapterShape, LoRAEmbedding
from lean_ft.peft.lora import SCORE, adapted_layers, has_adapter, put_adapter
from lean_ft.peft.new_rows import EMBEDDING, ENDING, TrainedRows, trained_rows
from lean_ft.peft.targets import is_parameter_to_peft, is_projection_of_experts
from lean_ft.quantize.nf4 import NF4Linear
from lean_ft.system.shards import ALONE, Part, Ranks, part_of
from lean_ft.system.whole_files import read_json, write_json

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."

_NO_TARGETS = "dummy-target-modules"  # to PEFT an adapter of no layer, which an empty list is not

# How the names of a layer's two matrices end.
_OF_LINEAR = (".lora_A.weight", ".lora_B.weight")
_OF_EMBEDDING = (".lora_embedding_A", ".lora_embedding_B")
_MAGNITUDE = ".lora_magnitude_vector"

# Fields that are read, and fields that change nothing once an adapter is trained or that the tensors answer for.
_ANSWERED = {
    *("peft_type", "base_model_name_or_path", "revision", "lora_alpha", "alpha_pattern", "use_dora", "use_rslora"),
    *("r", "rank_pattern", "target_modules", "target_parameters", "exclude_modules", "layers_to_transform"),
    *("layers_pattern", "lora_dropout", "init_lora_weights", "corda_config", "eva_config", "loftq_config"),
    *("lora_ga_config", "auto_mapping", "inference_mode", "megatron_core", "peft_version", "qalora_group_size"),
    *("runtime_config", "task_type", "trainable_token_indices"),
}
_NAME_PATTERN = re.compile(r"(\^)?(?:\.\*\\\.)?((?:[\w.-]|\\[.-])+)\$?", re.ASCII)
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
    rows: dict[str, list[int]]  # ids of tokens whose rows it holds, by the name of the layer


def save_adapter(
    model: Decoder, path: str | Path, *, ranks: Ranks = ALONE, weights: Mapping[str, Part] | None = None
) -> None:
    """Writes the model's adapter, and nothing of the model itself, to the folder `path`.

    Of a model that is cut over `ranks`, all of them call it. `weights` may be copies of what `adapter_parts` gives. Raises ValueError where the model has no adapter.
    """
    if not has_adapter(model):
        raise ValueError("the model has no adapter to save; save_model saves the model itself.")
    folder = Path(path)
    ranks.first(lambda: folder.mkdir(parents=True, exist_ok=True))
    parts = adapter_parts(model) if weights is None else weights
    write_file(folder / WEIGHTS_FILE, {_PREFIX + name: part for name, part in parts.items()}, {"format": "pt"}, ranks)
    ranks.first(lambda: write_json(folder / CONFIG_FILE, _config(model, adapted_layers(model))))


def adapter_parts(model: nn.Module) -> dict[str, Part]:
    """What is here of the model's adapter as it is saved, by PEFT's names without the prefix."""
    layers = adapted_layers(model)
    adapter = {
        _stem(model, name, layers) + suffix: tensor
        for name, layer in layers.items()
        for suffix, tensor in _tensors(layer).items()
    }
    return {name: part_of(tensor) for name, tensor in (adapter | _score(model) | _rows(model)).items()}


def adapter_bytes(model: nn.Module) -> int:
    """Room that the tensors of `save_adapter` take on the disk."""
    return sum(part.whole_bytes for part in adapter_parts(model).values())


def base_fingerprint(model: nn.Module) -> str | None:
    """Tells the weights beside the model's adapter from others; None without an adapter or without stored weights."""
    if not has_adapter(model):
        return None
    folder = source_of(model).folder
    return None if folder is None else weights_fingerprint(folder)  # pyright: ignore[reportArgumentType]


@torch.no_grad()
def restore_adapter(path: str | Path, model: Decoder) -> None:
    """Reads what `save_adapter` wrote into the model's adapter, bit for bit.

    Raises ValueError where what is stored is not this model's adapter, by name, shape or type.
    """
    folder, own, layers = Path(path), adapter_parts(model), adapted_layers(model)
    read_same(read_adapter(folder).tensors, own, folder, what="adapter", begun_with="the lora settings")
    for name, layer in layers.items():
        if layer.start_A is not None:  # PiSSA's two pairs are one in the file: what was read is a copy
            stem = _stem(model, name, layers)
            _set_values(layer, {suffix: own[stem + suffix].values for suffix in _tensors(layer)})


def load_adapter(model: Decoder, *paths: str | Path) -> None:
    """Puts adapters in PEFT's format on a model, frozen; several add up, as PEFT's do when all are active.

    Several LoRA adapters of a layer are one, of the ranks' sum. Raises ValueError where a folder holds no adapter, one
    of another model, or one that asks for what is not supported.
    """
    if has_adapter(model):
        raise ValueError("the model has an adapter already; load it anew to give it others.")
    adapters = [_with_own_names(model, read_adapter(Path(path))) for path in paths]
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
    for name, score in _score(model).items():
        found = [adapter.tensors[name] for adapter in adapters if name in adapter.tensors]
        if len(found) > 1:
            raise ValueError(
                "several adapters have an output layer for scores each, and a model has one. Give one of them."
            )
        if found:
            score.copy_(_read(found[0]))
            model.source.score_is_new = False
    for adapter in adapters:
        for name, ids in adapter.rows.items():
            _put_stored_rows(model, name, ids, _read(adapter.tensors[name + ENDING]))


def ids_of_rows(*paths: str | Path) -> list[int]:
    """The ids of tokens whose rows adapters hold, for `load_model` to make room for, where they lie side by side as new ones
    do."""
    ids = sorted({one for path in paths for rows in read_adapter(Path(path)).rows.values() for one in rows})
    return ids if ids and ids[-1] - ids[0] == len(ids) - 1 else []


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
        if name.endswith((_OF_LINEAR[0], _OF_EMBEDDING[0])):
            layer = name.removesuffix(_OF_LINEAR[0]).removesuffix(_OF_EMBEDDING[0])
            shapes[layer] = _stored_shape(config, layer, rank=stored.shape[0])
    model, revision = config.get("base_model_name_or_path"), config.get("revision")
    base = f"{model}@{revision}" if model and revision else model or None
    return StoredAdapter(folder, config, base, shapes, tensors, _stored_rows(folder, config, tensors))


def _stored_rows(folder: Path, config: dict[str, Any], tensors: Mapping[str, StoredTensor]) -> dict[str, list[int]]:
    said = config.get("trainable_token_indices") or {}
    rows = {}
    for layer in (name.removesuffix(ENDING) for name in tensors if name.endswith(ENDING)):
        ids = (
            next((ids for name, ids in said.items() if layer.endswith(name)), None) if isinstance(said, dict) else said
        )
        if ids is None and said:  # what is tied to the others is there a second time
            continue
        if not isinstance(ids, list) or not ids or not all(isinstance(one, int) and one >= 0 for one in ids):
            raise ValueError(
                f"{folder / CONFIG_FILE}: trainable_token_indices is {said!r}; expected the ids of the rows of {layer} that "
                f"{WEIGHTS_FILE} holds."
            )
        rows[layer] = ids
    return rows


def _score(model: nn.Module) -> dict[str, Tensor]:
    """The output layer of a reward model, which trains and is saved whole beside its adapter, by its name."""
    score = getattr(model, SCORE, None)
    return {} if score is None else {f"{SCORE}.weight": score.weight.detach()}


def _rows(model: nn.Module) -> dict[str, Tensor]:
    """The rows of new tokens, by PEFT's names."""
    return {_name_in_peft(model, name) + ENDING: layer.rows.detach() for name, layer in trained_rows(model).items()}


# Out -----------------------------------------------------------------------------------------------------------


def _endings(layer: nn.Module) -> tuple[str, str]:
    """How the names of the matrices A and B of a layer, adapted or not, end."""
    return _OF_EMBEDDING if isinstance(layer, LoRAEmbedding | nn.Embedding) else _OF_LINEAR


def _tensors(layer: AdaptedLayer) -> dict[str, Tensor]:
    """The layer's adapter as it is stored: tensors by the ends of their names."""
    tensors = dict(zip(_endings(layer), layer.factors(), strict=True))  # the parameters, which know their cut
    if layer.lora_magnitude_vector is not None:
        tensors[_MAGNITUDE] = layer.lora_magnitude_vector
    return tensors


def _name_in_peft(model: nn.Module, name: str) -> str:
    """What transformers, and so PEFT, calls a module."""
    return module_on_disk(source_of(model).config, name)


def _stem(model: nn.Module, name: str, layers: dict[str, AdaptedLayer]) -> str:
    """What the names of a layer's tensors begin with: PEFT wraps experts for `gate_up_proj` first, then for the other."""
    if not isinstance(layers[name], ExpertsAdapter):
        return _name_in_peft(model, name)
    place, _, projection = name.rpartition(".")
    is_inner = projection == "gate_up_proj" and f"{place}.down_proj" in layers
    place = _name_in_peft(model, place)
    return f"{place}.base_layer" if is_inner else place


def _config(model: Decoder, layers: dict[str, AdaptedLayer]) -> dict[str, Any]:
    shapes = {_name_in_peft(model, name): _stored_as(layer) for name, layer in layers.items()}
    first = next(iter(shapes.values()), AdapterShape(1, 1.0))  # any, where rows train alone
    (rank, alpha), _ = Counter((s.rank, s.alpha) for s in shapes.values() or [first]).most_common(1)[0]
    as_parameters = [name for name in layers if is_parameter_to_peft(model, name)]
    modules = [_name_in_peft(model, name) for name in layers if name not in as_parameters]
    name_or_path, revision = _base_model(model)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if model.score is None else "SEQ_CLS",
        "base_model_name_or_path": name_or_path,
        "revision": revision,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0 if as_parameters else first.dropout,  # PEFT takes no other of them, even to answer with
        "target_modules": _target_modules(model, modules) if layers else _NO_TARGETS,
        "target_parameters": sorted(
            _name_in_peft(model, name) + ("" if isinstance(layers[name], ExpertsAdapter) else ".weight")
            for name in as_parameters
        )
        or None,
        "rank_pattern": {_exactly(name): s.rank for name, s in shapes.items() if s.rank != rank},
        "alpha_pattern": {_exactly(name): s.alpha for name, s in shapes.items() if s.alpha != alpha},
        "use_rslora": first.rslora,
        "use_dora": first.dora,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None if model.score is None else [SCORE],
        "trainable_token_indices": {
            _name_in_peft(model, name).rpartition(".")[2]: layer.ids.tolist()
            for name, layer in trained_rows(model).items()
        }
        or None,
    }


def _stored_as(layer: AdaptedLayer) -> AdapterShape:
    """The shape that goes with `_tensors`: of twice the rank with PiSSA, at the same scaling."""
    shape, rank = layer.shape, layer.lora_A.shape[0] + (0 if layer.start_A is None else layer.start_A.shape[0])
    if isinstance(layer, ExpertsAdapter):
        return shape
    growth = rank / shape.rank
    return replace(shape, rank=rank, alpha=shape.alpha * (growth**0.5 if shape.rslora else growth))


def _target_modules(model: Decoder, names: list[str]) -> list[str]:
    """The last parts of the adapted layers' names, where these mean the same layers to PEFT; else the names."""
    short = sorted({name.rpartition(".")[2] for name in names})
    meant = {
        name
        for name, module in ((_name_in_peft(model, own), module) for own, module in model.named_modules())
        if isinstance(module, nn.Linear | nn.Embedding | NF4Linear | Router | AdaptedLayer)
        and name.rpartition(".")[2] in short
    }
    return short if meant == set(names) else names


def _base_model(model: Decoder) -> tuple[str | None, str | None]:
    """The model's repository and commit, where it lies in the hub's cache, or its folder."""
    folder = model.source.folder
    if folder is None:
        return None, None
    return cached_name(folder) or (str(folder), None)


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
    config = read_json(file, "it says what the adapter is.")
    if (kind := config.get("peft_type")) != "LORA":
        raise ValueError(f"{file}: peft_type is {kind!r}; expected LORA, the one kind of adapter that is supported.")
    if config.get("init_lora_weights") not in _HARMLESS_STARTS:
        raise ValueError(
            f"{file}: init_lora_weights is {config['init_lora_weights']!r}: the adapter goes with a changed copy of the "
            "model's weights. Have peft convert it: save_pretrained(..., path_initial_model_for_weight_conversion=...)."
        )
    for name, value in config.items():
        known = name in _ANSWERED or (name == "bias" and value == "none")
        known = known or (
            name == "modules_to_save" and isinstance(value, list) and all(one in (SCORE, "classifier") for one in value)
        )
        if not known and value not in (None, False, 0, "", [], {}):
            raise ValueError(f"{file}: {name} is {value!r}, which is not supported; expected it absent or null.")
    for name in ("r", "lora_alpha"):
        if not _is_positive(config.get(name)):
            raise ValueError(
                f"{file}: {name} is {config.get(name)!r}; expected a positive number, below {MAX_NUMBER:.0e}."
            )
    base = [config.get(name) for name in ("base_model_name_or_path", "revision")]
    if not all(one is None or (isinstance(one, str) and len(one) < MAX_NAME_CHARACTERS) for one in base):
        raise ValueError(f"{file}: base_model_name_or_path or revision is {base!r}; expected a model's name or folder.")
    config["alpha_pattern"] = _alphas(config.get("alpha_pattern") or {}, file)
    return config


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < MAX_NUMBER


def _alphas(patterns: Any, file: Path) -> dict[str, tuple[int, float]]:
    """The numbers of `alpha_pattern` in order, by the name of a layer or, after a dot, the end of one.

    PEFT takes regular expressions. Those of a stranger can take forever; names and ends of names are what PEFT writes.
    """
    found: dict[str, tuple[int, float]] = {}
    for pattern, alpha in patterns.items() if isinstance(patterns, dict) else [("", patterns)]:
        name = _NAME_PATTERN.fullmatch(pattern)
        if name is None or not _is_positive(alpha):
            raise ValueError(
                f"{file}: alpha_pattern has {alpha!r} for {pattern!r}; expected positive numbers by the names of layers or their "
                "last parts. Regular expressions are not supported: write the names."
            )
        found.setdefault(("" if name[1] else ".") + name[2].replace("\\", ""), (len(found), float(alpha)))
    return found


def _stored_shape(config: dict[str, Any], layer: str, rank: int) -> AdapterShape:
    alphas, parts = config["alpha_pattern"], layer.split(".")
    named = [layer, *("." + ".".join(parts[i:]) for i in range(len(parts)))]
    matching = [alphas[name] for name in named if name in alphas] if alphas else []
    _, alpha = min(matching, default=(0, float(config["lora_alpha"])))  # of several the first that is given
    return AdapterShape(rank, alpha, bool(config.get("use_rslora")), bool(config.get("use_dora")))


def _with_own_names(model: Decoder, adapter: StoredAdapter) -> StoredAdapter:
    """The adapter by the names of our modules, its wrappers of experts by those of the projections, which their shapes tell."""
    modules, shapes, tensors = dict(model.named_modules()), dict(adapter.shapes), dict(adapter.tensors)
    own_names = {_name_in_peft(model, own): own for own in modules}
    rows = {own_names.get(theirs, theirs): ids for theirs, ids in adapter.rows.items()}
    tensors |= {own_names.get(theirs, theirs) + ENDING: tensors.pop(theirs + ENDING) for theirs in adapter.rows}
    for theirs, own in own_names.items():
        if theirs != own and theirs in shapes and not isinstance(modules[own], Experts):
            shapes[own] = shapes.pop(theirs)
            for ending in (*_OF_LINEAR, _MAGNITUDE):
                if theirs + ending in tensors:
                    tensors[own + ending] = tensors.pop(theirs + ending)
    for name in adapter.shapes:
        place = own_names.get(name.removesuffix(".base_layer"), "")
        if not isinstance(modules.get(place), Experts):
            continue
        stored = [adapter.tensors[name + ending].shape for ending in _OF_LINEAR if name + ending in adapter.tensors]
        for layer in (f"{place}.{projection}" for projection in PROJECTIONS):
            num_experts, num_outputs, num_inputs = _sizes(modules, layer)
            if [shape[axis] for shape, axis in zip(stored, (1, 0), strict=False)] == [num_inputs, num_outputs]:
                shapes[layer] = _stored_shape(adapter.config, layer, shapes.pop(name).rank // num_experts)
                for ending in _OF_LINEAR:
                    tensors[layer + ending] = tensors.pop(name + ending)
    return replace(adapter, shapes=shapes, tensors=tensors, rows=rows)


def _sizes(modules: Mapping[str, nn.Module], name: str) -> tuple[int, int, int]:
    """(layers, outputs, inputs) of a layer, or a stack of them, that takes an adapter. Raises KeyError for any other."""
    place, _, projection = name.rpartition(".")
    experts, layer = modules.get(place), modules.get(name)
    if isinstance(experts, Experts) and projection in PROJECTIONS:
        num_experts, *sides = getattr(experts, projection).shape
        num_outputs, num_inputs = reversed(sides) if experts.config.input_first_in_adapters else sides
        return num_experts, num_outputs, num_inputs
    if isinstance(layer, nn.Embedding):
        return 1, layer.embedding_dim, layer.num_embeddings
    if isinstance(layer, nn.Linear | NF4Linear):
        return 1, layer.out_features, layer.in_features
    if isinstance(layer, Router):
        return 1, layer.weight.shape[0], layer.weight.shape[1]
    raise KeyError(name)


def _check_fits(model: Decoder, adapter: StoredAdapter) -> None:
    """Raises ValueError unless every tensor of the adapter has its place in the model."""
    modules, expected = dict(model.named_modules()), {}
    what = "the model" if model.source.folder is None else f"the model of {model.source.folder}"
    other = f"It is an adapter of another model{f', {adapter.base_model}' if adapter.base_model else ''}."
    for name, shape in adapter.shapes.items():
        try:
            num_layers, num_outputs, num_inputs = _sizes(modules, name)
        except KeyError:
            raise ValueError(f"{adapter.folder} adapts {name}, which {what} has not. {other}") from None
        if isinstance(modules.get(name), nn.Embedding) and model.config.tied_embeddings:
            raise ValueError(
                f"{adapter.folder} adapts {name}, which is the output layer too in {what} (tie_word_embeddings); an "
                "adapter that changes one of the two is not supported."
            )
        a, b = _endings(modules[name]) if name in modules else _OF_LINEAR
        expected[name + a] = (shape.rank * num_layers, num_inputs)
        expected[name + b] = (num_outputs, shape.rank * num_layers)
        if shape.dora:
            expected[name + _MAGNITUDE] = (num_outputs,)
    missing = sorted(expected.keys() - adapter.tensors.keys())
    if missing or not (expected or adapter.rows):
        raise ValueError(f"{adapter.folder / WEIGHTS_FILE} lacks {missing[0] if missing else 'any adapter'}.")
    for name, ids in adapter.rows.items():
        layer = modules.get(name)
        if not isinstance(layer, nn.Embedding | nn.Linear) or name in adapter.shapes:
            raise ValueError(
                f"{adapter.folder} has rows of {name}, which {what} has not, or not without an adapter. {other}"
            )
        if (num_rows := layer.weight.shape[0]) <= max(ids):
            raise ValueError(
                f"{adapter.folder} has a row of the token {max(ids)}, and {what} has {num_rows} rows. Expected a model with as "
                "many: save it resized first."
            )
        expected[name + ENDING] = (len(ids), layer.weight.shape[1])
    expected |= {name: tuple(score.shape) for name, score in _score(model).items() if name in adapter.tensors}
    for name, stored in adapter.tensors.items():
        if name not in expected:
            if _is_own_weight(model, adapter, name):  # PEFT adds the embedding's where that has an adapter
                continue
            raise ValueError(
                f"{stored.file}: {name} is no part of a LoRA or DoRA adapter and not the model's own weight; whole "
                "layers that were trained beside an adapter are not supported."
            )
        if stored.shape != expected[name]:
            raise ValueError(
                f"{stored.file}: {name} has the shape {list(stored.shape)}; {what} makes it {list(expected[name])}. "
                f"{other}"
            )


def _is_own_weight(model: Decoder, adapter: StoredAdapter, name: str) -> bool:
    """Whether a stored tensor is the model's weight of that name, unchanged but for rows that the adapter has, or these once
    more for an output layer that is the embedding."""
    stored = adapter.tensors[name]
    if model.config.tied_embeddings and name.startswith("lm_head."):
        name = name.replace("lm_head", EMBEDDING)
    if name in adapter.tensors and name.endswith(ENDING):
        return torch.equal(_read(stored), _read(adapter.tensors[name]))
    name = name.replace(".token_adapter", "").replace(".base_layer.", ".")
    own = dict(model.named_parameters()).get(name)
    if own is None or own.shape != stored.shape:
        return False
    is_same = (_read(stored).to(own) == own.detach()).view(len(own), -1).all(1)
    is_same[adapter.rows.get(name.removesuffix(".weight"), [])] = True
    return bool(is_same.all())


def _put_stored(model: Decoder, name: str, adapters: Sequence[StoredAdapter]) -> None:
    """Puts the stored adapters of one layer on it, as one."""
    is_stack = is_projection_of_experts(model, name)
    a, b = _OF_LINEAR if is_stack else _endings(model.get_submodule(name))
    first = adapters[0].shapes[name]
    matrices_a = [_read(adapter.tensors[name + a]) for adapter in adapters]
    matrices_b = [_read(adapter.tensors[name + b]).float() for adapter in adapters]
    if len(adapters) > 1:
        if is_stack:
            raise ValueError(
                f"{name} is a stack of experts, on which several adapters at a time are not supported. Give one, or "
                "merge the others first: leanft export --merge."
            )
        for adapter, matrix in zip(adapters, matrices_b, strict=True):
            matrix.mul_(adapter.shapes[name].scaling)
        rank = sum(matrix.shape[0] for matrix in matrices_a)
        first = AdapterShape(rank=rank, alpha=float(rank))  # a scaling of 1: each has its own in B
    layer = put_adapter(model, name, first, torch.float32)
    values = {a: torch.cat(matrices_a), b: torch.cat(matrices_b, dim=1)}
    if first.dora:
        values[_MAGNITUDE] = _read(adapters[0].tensors[name + _MAGNITUDE])
    _set_values(layer, values)
    layer.requires_grad_(False)


@torch.no_grad()
def _put_stored_rows(model: Decoder, name: str, ids: Sequence[int], values: Tensor) -> None:
    if name in trained_rows(model):
        raise ValueError(
            f"several adapters have rows of new tokens of {name} each. Give one, or merge the others first: leanft export --merge."
        )
    base = model.get_submodule(name)
    assert isinstance(base, nn.Embedding | nn.Linear)
    layer = TrainedRows(base, ids, torch.float32)
    layer.rows.copy_(values[torch.tensor(ids).argsort()])
    model.set_submodule(name, layer.requires_grad_(False))


@torch.no_grad()
def _set_values(layer: AdaptedLayer, values: dict[str, Tensor]) -> None:
    """Sets a layer's adapter to stored tensors, by the ends of their names; the second half is PiSSA's start."""
    rank = layer.lora_A.shape[0]
    a, b = (values[ending] for ending in _endings(layer))
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
