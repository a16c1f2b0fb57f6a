"""Read and write adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`.

Modules have Hugging Face's names here, so tensors have PEFT's names and nothing is permuted. The tensors define the
adapted layers and their ranks; the config defines the scaling. An unsupported field that would change the result is
refused by name. Only safetensors are read, because a pickled adapter can run code.

For a mixture's experts, PEFT uses `target_parameters`: it wraps each of the two stacked projections, one wrapper inside
the other, so the outer one's tensors are named after the experts and the inner one's after `base_layer`.

For rows of new tokens, PEFT uses `trainable_token_indices`: the ids are in the config, the rows among the tensors.

PiSSA is saved as an adapter of twice the rank over the unchanged model, which any LoRA reader can load.
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
from lean_ft.models.config_json import OF_REWARD, kind_of_scores, label_fields
from lean_ft.models.frozen_weight import as_frozen
from lean_ft.models.gguf_tensors import gguf_file
from lean_ft.models.hf_format import weights_fingerprint
from lean_ft.models.moe import Router, experts_of
from lean_ft.models.names_on_disk import module_on_disk, name_in_language_model
from lean_ft.models.safetensors_file import MAX_NAME_CHARACTERS, StoredTensor, read_header, read_same, write_file
from lean_ft.models.source import source_of
from lean_ft.peft.experts import PROJECTIONS
from lean_ft.peft.layers import AdaptedLayer, AdapterShape, adapted_layers, linear_shape
from lean_ft.peft.lora import OUTPUT, SCORE, has_adapter, put_adapter
from lean_ft.peft.new_rows import EMBEDDING, ENDING, TrainedRows, trained_rows
from lean_ft.peft.targets import TIED, is_adaptable, is_parameter_to_peft, is_projection_of_experts
from lean_ft.system.log import say
from lean_ft.system.shards import ALONE, Part, Ranks, part_of
from lean_ft.system.whole_files import read_json, write_json

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
LABELS_FILE = "labels.json"
_PREFIX = "base_model.model."
MAX_ALPHA = 1e6  # also of the rank; published adapters have at most thousands

_ALONE = "Load one adapter alone, or merge the others first (leanft export --merge)."
_NO_TARGETS = "dummy-target-modules"  # PEFT's value for an adapter without layers

# Suffixes of the names of a layer's two matrices.
_OF_LINEAR = (".lora_A.weight", ".lora_B.weight")
_OF_EMBEDDING = (".lora_embedding_A", ".lora_embedding_B")
_MAGNITUDE = ".lora_magnitude_vector"

# Fields that are read, that change nothing after training, or that follow from the tensors.
_KNOWN_FIELDS = {
    *("peft_type", "base_model_name_or_path", "revision", "lora_alpha", "alpha_pattern", "use_dora", "use_rslora"),
    *("r", "rank_pattern", "target_modules", "target_parameters", "exclude_modules", "layers_to_transform"),
    *("layers_pattern", "lora_dropout", "init_lora_weights", "corda_config", "eva_config", "loftq_config"),
    *("lora_ga_config", "auto_mapping", "inference_mode", "megatron_core", "peft_version", "qalora_group_size"),
    *("runtime_config", "task_type", "trainable_token_indices"),
}
_NAME_PATTERN = re.compile(r"(\^)?(?:\.\*\\\.)?((?:[\w.-]|\\[.-])+)\$?", re.ASCII)
# Values of `init_lora_weights` that do not change the model's own weights.
_HARMLESS_STARTS = (True, False, None, "gaussian", "eva", "mica", "orthogonal")


@dataclass(frozen=True)
class StoredAdapter:
    """An adapter on disk, its tensors not yet read."""

    folder: Path
    config: dict[str, Any]
    base_model: str | None
    shapes: dict[str, AdapterShape]  # by layer name
    tensors: dict[str, StoredTensor]  # by name in the language model, without PEFT's prefix
    rows: dict[str, list[int]]  # ids of tokens with stored rows, by layer name
    outside: list[str]  # tensors of a multimodal model's layers that are not in its language model


def save_adapter(
    model: Decoder, path: str | Path, *, ranks: Ranks = ALONE, weights: Mapping[str, Part] | None = None
) -> None:
    """Write the model's adapter to the folder `path`; all `ranks` call it.

    `weights` may be copies of the `adapter_parts`. Raises ValueError if the model has no adapter.
    """
    if not has_adapter(model):
        raise ValueError("the model has no adapter to save. Use save_model to save the model.")
    folder = Path(path)
    ranks.on_rank_zero(lambda: folder.mkdir(parents=True, exist_ok=True))
    parts = adapter_parts(model) if weights is None else weights
    write_file(folder / WEIGHTS_FILE, {_PREFIX + name: part for name, part in parts.items()}, {"format": "pt"}, ranks)
    ranks.on_rank_zero(lambda: write_json(folder / CONFIG_FILE, _config(model, adapted_layers(model))))
    if model.config.scores > 1:  # PEFT's format has no place for labels
        config = model.source.config
        labels = {name: config[name] for name in ("id2label", "label2id", "problem_type") if name in config}
        ranks.on_rank_zero(lambda: write_json(folder / LABELS_FILE, labels))


def labels_of(folder: str | Path) -> dict[str, Any] | None:
    """The fields of config.json about the labels of an adapter with a score layer; None for other adapters. PEFT's files do not
    have them, so a classifier that PEFT saved has transformers' default names."""
    if labels := read_json(Path(folder) / LABELS_FILE):
        return labels
    score = read_adapter(Path(folder)).tensors.get(f"{SCORE}.weight")
    if score is None or score.shape[0] == 1:
        return None if score is None else OF_REWARD
    return label_fields([f"LABEL_{i}" for i in range(score.shape[0])], is_multi=False)


def adapter_parts(model: nn.Module) -> dict[str, Part]:
    """This rank's parts of the adapter's tensors as they are saved, by transformers' names in the folder's model."""
    layers = adapted_layers(model)
    adapter = {
        _stem(model, name, layers) + suffix: tensor
        for name, layer in layers.items()
        for suffix, tensor in _tensors(layer).items()
    }
    return {name: part_of(tensor) for name, tensor in (adapter | _score(model) | _rows(model)).items()}


def adapter_bytes(model: nn.Module) -> int:
    """Size of the saved adapter's tensors."""
    return sum(part.whole_bytes for part in adapter_parts(model).values())


def base_fingerprint(model: nn.Module) -> str | None:
    """Fingerprint of the frozen base weights; None without an adapter or without stored weights."""
    if not has_adapter(model):
        return None
    folder = source_of(model).folder
    return None if folder is None else weights_fingerprint(folder)  # pyright: ignore[reportArgumentType]


@torch.no_grad()
def restore_adapter(path: str | Path, model: Decoder) -> None:
    """Load a saved adapter into the model's adapter, bit for bit.

    Raises ValueError if the names, shapes or dtypes differ from the model's adapter.
    """
    folder, own, layers = Path(path), adapter_parts(model), adapted_layers(model)
    by_name = {name_in_language_model(name) or name: part for name, part in own.items()}
    read_same(read_adapter(folder).tensors, by_name, folder, what="adapter", begun_with="the lora settings")
    for name, layer in layers.items():
        if layer.start_A is not None:  # the file has PiSSA's two pairs as one, so `own` has copies
            stem = _stem(model, name, layers)
            _set_values(layer, {suffix: own[stem + suffix].values for suffix in _tensors(layer)})


def load_adapter(model: Decoder, *paths: str | Path) -> None:
    """Add frozen adapters in PEFT's format to a model; several adapters are summed, as when all are active in PEFT.

    Raises ValueError if a folder has no adapter, an unsupported one, or one of another model.
    """
    if has_adapter(model):
        raise ValueError("the model already has an adapter; load the model again to add others.")
    adapters = [fit_adapter(model, path) for path in paths]
    for adapter in adapters:
        if len(adapters) > 1 and any(shape.dora for shape in adapter.shapes.values()):
            raise ValueError(f"{adapter.folder} is a DoRA adapter, which cannot be summed with others. {_ALONE}")
    model.requires_grad_(False)
    names = dict.fromkeys(name for adapter in adapters for name in adapter.shapes)
    for name in names:
        _put_stored(model, name, [adapter for adapter in adapters if name in adapter.shapes])
    for name, score in _score(model).items():
        found = [adapter.tensors[name] for adapter in adapters if name in adapter.tensors]
        if len(found) > 1:
            raise ValueError("several adapters have an output layer for scores. Load one of them.")
        if found:
            score.copy_(_read(found[0]))
            model.source.score_is_new = False
    for adapter in adapters:
        for name, ids in adapter.rows.items():
            _put_stored_rows(model, name, ids, _read(adapter.tensors[name + ENDING]))


def fit_adapter(model: Decoder, path: str | Path) -> StoredAdapter:
    """The adapter of a folder, with the names of the model's layers. Raises ValueError if it does not fit the model."""
    adapter = _with_own_names(model, read_adapter(Path(path)))
    _check_fits(model, adapter)
    return adapter


def read_factors(adapter: StoredAdapter, name: str) -> tuple[Tensor, Tensor]:
    """Read A (R, I) and B (O, R) of a layer."""
    a, b = _OF_EMBEDDING if name + _OF_EMBEDDING[0] in adapter.tensors else _OF_LINEAR
    return _read(adapter.tensors[name + a]), _read(adapter.tensors[name + b])


def ids_of_rows(*paths: str | Path) -> list[int]:
    """Ids of the adapters' token rows if they are contiguous, as new tokens are; `load_model` adds rows for them."""
    ids = sorted({id for path in paths for rows in read_adapter(Path(path)).rows.values() for id in rows})
    return ids if ids and ids[-1] - ids[0] == len(ids) - 1 else []


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter in PEFT's format."""
    return (folder / CONFIG_FILE).is_file()


def base_model(folder: Path) -> str:
    """The adapter's base model: a folder, or a Hub repository. Raises ValueError if the adapter does not name it."""
    name = read_adapter(folder).base_model
    if name is None:
        raise ValueError(f"{folder} does not name its base model. Pass the model's folder.")
    return name


def read_adapter(folder: Path) -> StoredAdapter:
    """Describe the adapter in `folder`. Raises ValueError if there is none or it is not supported."""
    config = _read_config(folder)
    if not (folder / WEIGHTS_FILE).is_file():
        pickled = " Its weights are pickled, which can run code when opened. Save it as safetensors with PEFT."
        raise ValueError(f"{folder} has no {WEIGHTS_FILE}.{pickled if (folder / 'adapter_model.bin').exists() else ''}")
    tensors, outside = dict[str, StoredTensor](), list[str]()
    for name, stored in read_header(folder / WEIGHTS_FILE).items():
        if not name.startswith(_PREFIX):
            raise ValueError(f"{stored.file}: {name} is not a PEFT tensor name; expected {_PREFIX}...")
        # Older versions of PEFT append .weight to the magnitude's name.
        name = name.removeprefix(_PREFIX)
        name = name.removesuffix(".weight") if name.endswith(f"{_MAGNITUDE}.weight") else name
        if (own := name_in_language_model(name)) is None:
            outside.append(name)
            continue
        if own in tensors:
            raise ValueError(f"{stored.file} has two tensors for {own}, under different names. Remove one of them.")
        tensors[own] = stored
    shapes = {}
    for name, stored in tensors.items():
        if name.endswith((_OF_LINEAR[0], _OF_EMBEDDING[0])):
            layer = name.removesuffix(_OF_LINEAR[0]).removesuffix(_OF_EMBEDDING[0])
            shapes[layer] = _stored_shape(config, layer, rank=stored.shape[0])
    model, revision = config.get("base_model_name_or_path"), config.get("revision")
    base = f"{model}@{revision}" if model and revision else model or None
    return StoredAdapter(folder, config, base, shapes, tensors, _stored_rows(folder, config, tensors), outside)


def _stored_rows(folder: Path, config: dict[str, Any], tensors: Mapping[str, StoredTensor]) -> dict[str, list[int]]:
    indices = config.get("trainable_token_indices") or {}
    rows = {}
    for layer in (name.removesuffix(ENDING) for name in tensors if name.endswith(ENDING)):
        ids = indices
        if isinstance(indices, dict):
            ids = next((ids for n, ids in indices.items() if layer.endswith(name_in_language_model(n) or n)), None)
        if ids is None and indices:  # a tied layer's rows, stored a second time
            continue
        if not isinstance(ids, list) or not ids or not all(isinstance(id, int) and id >= 0 for id in ids):
            field = f"{folder / CONFIG_FILE}: trainable_token_indices is {indices!r}"
            raise ValueError(f"{field}; expected the ids of the stored rows of {layer}.")
        rows[layer] = ids
    return rows


def _score(model: nn.Module) -> dict[str, Tensor]:
    """The output layer of a reward model by name; it is trained and saved whole."""
    score = getattr(model, SCORE, None)
    return {} if score is None else {f"{SCORE}.weight": score.weight.detach()}


def _rows(model: nn.Module) -> dict[str, Tensor]:
    source = source_of(model)
    return {source.module_name(name) + ENDING: layer.rows.detach() for name, layer in trained_rows(model).items()}


# Writing -------------------------------------------------------------------------------------------------------


def _endings(layer: nn.Module) -> tuple[str, str]:
    """Suffixes of the names of a layer's matrices A and B."""
    return _OF_EMBEDDING if isinstance(getattr(layer, "base_layer", layer), nn.Embedding) else _OF_LINEAR


def _tensors(layer: AdaptedLayer) -> dict[str, Tensor]:
    """The layer's adapter as it is stored: tensors by the suffixes of their names."""
    # Without PiSSA, these are the sharded parameters themselves.
    tensors = dict(zip(_endings(layer), layer.factors(), strict=True))
    if layer.lora_magnitude_vector is not None:
        tensors[_MAGNITUDE] = layer.lora_magnitude_vector
    return tensors


def _stem(model: nn.Module, name: str, layers: dict[str, AdaptedLayer]) -> str:
    """Prefix of the names of a layer's tensors. PEFT wraps experts for `gate_up_proj` first, then for `down_proj`."""
    if not is_projection_of_experts(model, name):
        return source_of(model).module_name(name)
    place, _, projection = name.rpartition(".")
    is_inner = projection == "gate_up_proj" and f"{place}.down_proj" in layers
    place = source_of(model).module_name(place)
    return f"{place}.base_layer" if is_inner else place


def _config(model: Decoder, layers: dict[str, AdaptedLayer]) -> dict[str, Any]:
    name_of = model.source.module_name
    shapes = {name_of(name): _stored_as(layer) for name, layer in layers.items()}
    first = next(iter(shapes.values()), AdapterShape(1, 1.0))  # arbitrary if only rows are trained
    (rank, alpha), _ = Counter((s.rank, s.alpha) for s in shapes.values() or [first]).most_common(1)[0]
    as_parameters = [name for name in layers if is_parameter_to_peft(model, name)]
    modules = [name_of(name) for name in layers if name not in as_parameters]
    parameters = [name_of(name) + ".weight" * (not is_projection_of_experts(model, name)) for name in as_parameters]
    row_ids = {name_of(name).rpartition(".")[2]: rows.ids.tolist() for name, rows in trained_rows(model).items()}
    folder = model.source.folder
    name_or_path, revision, *_ = (
        (None, None) if folder is None else cached_name(folder) or (str(gguf_file(folder) or folder), None)
    )
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if model.score is None else "SEQ_CLS",
        "base_model_name_or_path": name_or_path,
        "revision": revision,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0 if as_parameters else first.dropout,  # PEFT refuses dropout with target_parameters
        "target_modules": _target_modules(model, modules) if layers else _NO_TARGETS,
        "target_parameters": sorted(parameters) or None,
        "rank_pattern": {f"^{re.escape(name)}": s.rank for name, s in shapes.items() if s.rank != rank},
        "alpha_pattern": {f"^{re.escape(name)}": s.alpha for name, s in shapes.items() if s.alpha != alpha},
        "use_rslora": first.rslora,
        "use_dora": first.dora,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None if model.score is None else [SCORE],
        "trainable_token_indices": row_ids or None,
    }


def _stored_as(layer: AdaptedLayer) -> AdapterShape:
    """The shape of the `_tensors`: with PiSSA, twice the rank at the same scaling."""
    shape = layer.shape
    if layer.start_A is None:
        return shape
    rank = layer.lora_A.shape[0] + layer.start_A.shape[0]
    growth = rank / shape.rank
    return replace(shape, rank=rank, alpha=shape.alpha * (growth**0.5 if shape.rslora else growth))


def _target_modules(model: Decoder, names: list[str]) -> list[str]:
    """The last parts of the adapted layers' names if PEFT selects the same layers by them, otherwise the full names.

    In a multimodal model, image encoders have layers of these names too.
    """
    short = sorted({name.rpartition(".")[2] for name in names})
    meant = {
        name
        for name, module in ((model.source.module_name(own), module) for own, module in model.named_modules())
        if isinstance(getattr(module, "base_layer", module), nn.Linear | nn.Embedding | Router)
        and name.rpartition(".")[2] in short
    }
    return short if meant == set(names) and not model.source.part_of else names


# Reading -------------------------------------------------------------------------------------------------------


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / CONFIG_FILE
    if not file.is_file():
        hint = checkpoint_hint(folder)
        raise ValueError(f"{folder} has no adapter: expected PEFT's files {CONFIG_FILE} and {WEIGHTS_FILE}.{hint}")
    config = read_json(file, "it describes the adapter.")
    if (kind := config.get("peft_type")) != "LORA":
        raise ValueError(f"{file}: peft_type is {kind!r}, which is not supported; expected LORA.")
    if config.get("init_lora_weights") not in _HARMLESS_STARTS:
        raise ValueError(
            f"{file}: init_lora_weights is {config['init_lora_weights']!r}, so the adapter needs changed base weights. Convert "
            "it with PEFT: save_pretrained(..., path_initial_model_for_weight_conversion=...)."
        )
    for name, value in config.items():
        known = name in _KNOWN_FIELDS or (name == "bias" and value == "none")
        if name == "modules_to_save" and isinstance(value, list):
            known = all(module in (SCORE, "classifier") for module in value)
        if not known and value not in (None, False, 0, "", [], {}):
            raise ValueError(f"{file}: {name} is {value!r}, which is not supported; expected it absent or null.")
    for name in ("r", "lora_alpha"):
        if not _is_positive(value := config.get(name)):
            raise ValueError(f"{file}: {name} is {value!r}; expected a positive number of at most {MAX_ALPHA:.0e}.")
    base = [config.get(name) for name in ("base_model_name_or_path", "revision")]
    if not all(name is None or (isinstance(name, str) and len(name) < MAX_NAME_CHARACTERS) for name in base):
        raise ValueError(f"{file}: base_model_name_or_path or revision is {base!r}; expected a model's name or folder.")
    config["alpha_pattern"] = _alphas(config.get("alpha_pattern") or {}, file)
    return config


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= MAX_ALPHA


def _alphas(patterns: Any, file: Path) -> dict[str, tuple[int, float]]:
    """The (position, alpha) of each `alpha_pattern`, by a layer's name or, after a dot, the end of a name.

    PEFT accepts regular expressions, which in an untrusted file can run forever. PEFT itself writes names and ends of names.
    """
    found: dict[str, tuple[int, float]] = {}
    for pattern, alpha in patterns.items() if isinstance(patterns, dict) else [("", patterns)]:
        name = _NAME_PATTERN.fullmatch(pattern)
        if name is None or not _is_positive(alpha):
            raise ValueError(
                f"{file}: alpha_pattern has {alpha!r} for {pattern!r}; expected a positive number for a layer's name or its last "
                "parts. Regular expressions are not supported."
            )
        own = name[2].replace("\\", "")
        own = name_in_language_model(own) or own
        found.setdefault(("" if name[1] else ".") + own, (len(found), float(alpha)))
    return found


def _stored_shape(config: dict[str, Any], layer: str, rank: int) -> AdapterShape:
    alphas, parts = config["alpha_pattern"], layer.split(".")
    named = [layer, *("." + ".".join(parts[i:]) for i in range(len(parts)))]
    matching = [alphas[name] for name in named if name in alphas] if alphas else []
    _, alpha = min(matching, default=(0, float(config["lora_alpha"])))  # the first matching pattern
    return AdapterShape(rank, alpha, bool(config.get("use_rslora")), bool(config.get("use_dora")))


def _with_own_names(model: Decoder, adapter: StoredAdapter) -> StoredAdapter:
    """The adapter with our modules' names. Tensors of experts are assigned to projections by their shapes."""
    if adapter.outside:
        unread = f"{len(adapter.outside)} tensors outside the language model, such as {adapter.outside[0]}"
        if not adapter.tensors:
            raise ValueError(f"{adapter.folder} has only {unread}, and lean_ft computes text.")
        say("adapter", f"{adapter.folder}: not read are {unread}")
    modules, stacks, shapes = dict(model.named_modules()), experts_of(model), dict(adapter.shapes)
    own_names = {module_on_disk(model.source.config, own): own for own in modules}
    renamed = {theirs: own for theirs, own in own_names.items() if own not in stacks}
    for name, shape in adapter.shapes.items():
        place = own_names.get(stem := name.removesuffix(".base_layer"), "")
        if place not in stacks:
            continue
        stored = [adapter.tensors[name + ending].shape for ending in _OF_LINEAR if name + ending in adapter.tensors]
        for projection in PROJECTIONS:
            num_experts, num_outputs, num_inputs = _sizes(model, layer := f"{place}.{projection}")
            if [sides[axis] for sides, axis in zip(stored, (1, 0), strict=False)] == [num_inputs, num_outputs]:
                renamed[name] = layer
                shapes[name] = _stored_shape(adapter.config, f"{stem}.{projection}", shape.rank // num_experts)

    def own(name: str) -> str:
        layer, *ending = re.split(r"(?=\.lora_|\.token_adapter\.)", name, maxsplit=1)
        return "".join([renamed.get(layer, layer), *ending])

    shapes, tensors, rows = (
        {own(name): value for name, value in found.items()} for found in (shapes, adapter.tensors, adapter.rows)
    )
    return replace(adapter, shapes=shapes, tensors=tensors, rows=rows)


def _sizes(model: Decoder, name: str) -> tuple[int, int, int]:
    """(layers, outputs, inputs) of an adaptable layer or stack of layers. Raises AttributeError for any other name."""
    place, _, own = name.rpartition(".")
    owner: Any = model.get_submodule(place)
    if is_projection_of_experts(model, name):
        return linear_shape(as_frozen(getattr(owner, own)), owner.config.input_first_in_adapters)
    layer = getattr(owner, own)
    if not is_adaptable(layer):
        raise AttributeError(name)
    return linear_shape(as_frozen(layer.weight), isinstance(layer, nn.Embedding))


def _check_fits(model: Decoder, adapter: StoredAdapter) -> None:
    """Raise ValueError unless every tensor of the adapter fits the model."""
    modules, expected = dict(model.named_modules()), {}
    what = "the model" if model.source.folder is None else f"the model of {model.source.folder}"
    other = f"The adapter names the base model {adapter.base_model}." if adapter.base_model else ""
    for name, shape in adapter.shapes.items():
        if model.config.tied_embeddings and name in (OUTPUT, EMBEDDING):
            raise ValueError(f"{adapter.folder}: {name} {TIED}. Train an adapter of other layers.")
        try:
            num_layers, num_outputs, num_inputs = _sizes(model, name)
        except AttributeError:
            lack = "cannot be adapted here" if name in modules else f"{what} does not have"
            raise ValueError(f"{adapter.folder} adapts {name}, which {lack}. {other}") from None
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
                f"{adapter.folder} has rows of {name}, which {what} does not have, or has adapted. {other}"
            )
        if (num_rows := layer.weight.shape[0]) <= max(ids):
            raise ValueError(
                f"{adapter.folder} has a row for token {max(ids)}, but {what} has {num_rows} rows. Save a resized model first."
            )
        expected[name + ENDING] = (len(ids), layer.weight.shape[1])
    expected |= {name: tuple(score.shape) for name, score in _score(model).items() if name in adapter.tensors}
    for name, stored in adapter.tensors.items():
        if name not in expected:
            if _is_own_weight(model, adapter, name):  # PEFT also saves the weight of an adapted embedding
                continue
            if name == f"{SCORE}.weight":
                kind = kind_of_scores(stored.shape[0])
                raise ValueError(f"{adapter.folder} adapts {kind}, which gives scores and no text. Use `leanft score`.")
            raise ValueError(
                f"{stored.file}: {name} is not part of a LoRA or DoRA adapter and differs from the weight of {what}. It was trained "
                f"whole, which is not supported, or belongs to another base model. {other}"
            )
        if stored.shape != (shape := expected[name]):
            raise ValueError(
                f"{stored.file}: {name} has shape {list(stored.shape)}; {what} needs {list(shape)}. {other}"
            )


def _is_own_weight(model: Decoder, adapter: StoredAdapter, name: str) -> bool:
    """Whether a stored tensor equals the model's weight except for the adapter's rows, or repeats rows of a tied layer."""
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
    """Add the stored adapters of one layer to it, as one adapter with the sum of the ranks."""
    is_stack = is_projection_of_experts(model, name)
    first = adapters[0].shapes[name]
    matrices_a, matrices_b = zip(*(read_factors(adapter, name) for adapter in adapters), strict=True)
    matrices_b = [matrix.float() for matrix in matrices_b]
    if len(adapters) > 1:
        if is_stack:
            raise ValueError(f"{name} is a stack of experts, which takes one adapter at a time. {_ALONE}")
        for adapter, matrix in zip(adapters, matrices_b, strict=True):
            matrix.mul_(adapter.shapes[name].scaling)
        rank = sum(matrix.shape[0] for matrix in matrices_a)
        first = AdapterShape(rank=rank, alpha=float(rank))  # a scaling of 1: B includes each adapter's scaling
    layer = put_adapter(model, name, first, torch.float32)
    a, b = _endings(layer)
    values = {a: torch.cat(matrices_a), b: torch.cat(matrices_b, dim=1)}
    if first.dora:
        values[_MAGNITUDE] = _read(adapters[0].tensors[name + _MAGNITUDE])
    _set_values(layer, values)
    layer.requires_grad_(False)


@torch.no_grad()
def _put_stored_rows(model: Decoder, name: str, ids: Sequence[int], values: Tensor) -> None:
    if name in trained_rows(model):
        raise ValueError(f"several adapters have rows of new tokens of {name}. {_ALONE}")
    base = model.get_submodule(name)
    assert isinstance(base, nn.Embedding | nn.Linear)
    layer = TrainedRows(base, ids, torch.float32)
    layer.rows.copy_(values[torch.tensor(ids).argsort()])
    model.set_submodule(name, layer.requires_grad_(False))


@torch.no_grad()
def _set_values(layer: AdaptedLayer, values: dict[str, Tensor]) -> None:
    """Set a layer's adapter to stored tensors, by the suffixes of their names; their second half is PiSSA's start."""
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
        raise ValueError(f"{stored.file}: a tensor has dtype {stored.dtype_name}; expected F32, BF16 or F16.")
    return stored.read()
