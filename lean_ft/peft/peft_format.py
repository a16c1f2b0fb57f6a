"""Save a model's adapter in PEFT's format, and put stored adapters into a model.

Modules have Hugging Face's names here, so tensors have PEFT's names and nothing is permuted.

For a mixture's experts, PEFT uses `target_parameters`: it wraps each of the two stacked projections, one wrapper inside
the other, so the outer one's tensors are named after the experts and the inner one's after `base_layer`.

For rows of new tokens, PEFT uses `trainable_token_indices`: the ids are in the config, the rows among the tensors.

PiSSA is saved as an adapter of twice the rank over the unchanged model, which any LoRA reader can load.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from lean_ft.gguf.cache import gguf_file
from lean_ft.hub.download import cached_name
from lean_ft.models import Decoder
from lean_ft.models.beside import files_beside, write_beside
from lean_ft.models.config_json import kind_of_scores, labels_tokens
from lean_ft.models.frozen_weight import as_frozen
from lean_ft.models.moe import Router, experts_of
from lean_ft.models.safetensors_file import StoredTensor, read_same, write_file
from lean_ft.models.source import name_in_language_model, source_of
from lean_ft.models.stored_weights import first_few, weights_fingerprint
from lean_ft.models.vision.config import SPELLINGS
from lean_ft.peft.expert_pairs import names_by_expert, stack_pairs
from lean_ft.peft.experts import PROJECTIONS
from lean_ft.peft.layers import AdaptedLayer, AdapterShape, adapted_layers, linear_shape
from lean_ft.peft.lora import OUTPUT, SCORE, has_adapter, put_adapter
from lean_ft.peft.new_rows import EMBEDDING, ENDING, TrainedRows, trained_rows
from lean_ft.peft.stored_adapter import (
    CONFIG_FILE,
    LABELS_FILE,
    MAGNITUDE,
    OF_EMBEDDING,
    OF_LINEAR,
    PREFIX,
    WEIGHTS_FILE,
    StoredAdapter,
    read_adapter,
    read_factors,
    read_tensor,
    stored_shape,
    task_type,
)
from lean_ft.peft.targets import TIED, is_adaptable, is_parameter_to_peft, is_projection_of_experts
from lean_ft.system.log import say
from lean_ft.system.shards import ALONE, Part, Ranks, part_of
from lean_ft.system.whole_files import write_json

_ALONE = "Load one adapter alone, or merge the others first (leanft export --merge)."
_OF_ONE_EXPERT = re.compile(r"\bexperts\.(\d+\.|\w+\.\d+$)", re.ASCII)
_NO_TARGETS = "dummy-target-modules"  # PEFT's value for an adapter without layers


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
    write_file(folder / WEIGHTS_FILE, {PREFIX + name: part for name, part in parts.items()}, {"format": "pt"}, ranks)
    ranks.on_rank_zero(lambda: write_json(folder / CONFIG_FILE, _config(model, adapted_layers(model))))
    ranks.on_rank_zero(lambda: write_beside(model.source.beside, folder))
    if model.config.num_scores > 1:  # PEFT's format has no place for labels
        config = model.source.config
        labels = {name: config[name] for name in ("id2label", "label2id", "problem_type") if name in config}
        labels |= {"architectures": config["architectures"]} if labels_tokens(config) else {}
        ranks.on_rank_zero(lambda: write_json(folder / LABELS_FILE, labels))


def check_trained(model: nn.Module) -> None:
    """Raise ValueError if a model with an adapter trains parameters that are not the adapter's: they would not be
    saved."""
    layers = adapted_layers(model) | trained_rows(model)
    saved = {f"{name}.{ending}" for name, layer in layers.items() for ending, _ in layer.named_parameters()} | {
        *_score(model)
    }
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if outside := trained - saved:
        raise ValueError(
            "the model trains parameters that are not its adapter's, and an adapter's folder cannot hold them: "
            f"{first_few(outside)}. Freeze them. A module that trains besides the model is an argument of its own: "
            "Run(..., carried=module)."
        )


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
    return None if folder is None else weights_fingerprint(folder)


@torch.no_grad()
def restore_adapter(path: str | Path, model: Decoder) -> None:
    """Load a saved adapter into the model's adapter, bit for bit.

    Raises ValueError if the names, shapes or dtypes differ from the model's adapter.
    """
    folder, parts, layers = Path(path), adapter_parts(model), adapted_layers(model)
    by_name = {name_in_language_model(name, SPELLINGS) or name: part for name, part in parts.items()}
    stored = cast(dict[str, StoredTensor], read_adapter(folder).tensors)  # only `_with_own_names` stacks pairs
    read_same(stored, by_name, folder, what="adapter", begun_with="the lora settings")
    for name, layer in layers.items():
        if layer.start_A is not None:  # the file has PiSSA's two pairs as one, so `parts` has copies
            stem = _stem(model, name, layers)
            _set_values(layer, {suffix: parts[stem + suffix].values for suffix in _tensors(layer)})


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
        scores = [adapter.tensors[name] for adapter in adapters if name in adapter.tensors]
        if len(scores) > 1:
            raise ValueError("several adapters have an output layer for scores. Load one of them.")
        if scores:
            score.copy_(read_tensor(scores[0]))
            model.source.score_is_new = False
    for adapter in adapters:
        model.source.beside |= files_beside(adapter.folder)
        for name, ids in adapter.rows.items():
            _put_stored_rows(model, name, ids, read_tensor(adapter.tensors[name + ENDING]))


def fit_adapter(model: Decoder, path: str | Path) -> StoredAdapter:
    """The adapter of a folder, with the names of the model's layers. Raises ValueError if it does not fit the model."""
    adapter = _with_own_names(model, read_adapter(Path(path)))
    _check_fits(model, adapter)
    return adapter


def _score(model: nn.Module) -> dict[str, Tensor]:
    """The output layer of a reward model by name; it is trained and saved whole."""
    score = getattr(model, SCORE, None)
    return {} if score is None else {f"{SCORE}.{name}": part.detach() for name, part in score.named_parameters()}


def _rows(model: nn.Module) -> dict[str, Tensor]:
    source = source_of(model)
    return {source.module_name(name) + ENDING: layer.rows.detach() for name, layer in trained_rows(model).items()}


# Writing -------------------------------------------------------------------------------------------------------


def _endings(layer: nn.Module) -> tuple[str, str]:
    """Suffixes of the names of a layer's matrices A and B."""
    return OF_EMBEDDING if isinstance(getattr(layer, "base_layer", layer), nn.Embedding) else OF_LINEAR


def _tensors(layer: AdaptedLayer) -> dict[str, Tensor]:
    """The layer's adapter as it is stored: tensors by the suffixes of their names."""
    # Without PiSSA, these are the sharded parameters themselves.
    tensors = dict(zip(_endings(layer), layer.factors(), strict=True))
    if layer.lora_magnitude_vector is not None:
        tensors[MAGNITUDE] = layer.lora_magnitude_vector
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
        "task_type": task_type(model),
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
        "fan_in_fan_out": any(model.source.is_transposed(f"{name}.weight") for name in layers),
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

    In a multimodal model, the vision tower has layers of these names too.
    """
    short = sorted({name.rpartition(".")[2] for name in names})
    meant = {
        name
        for name, module in (
            (model.source.module_name(module_name), module) for module_name, module in model.named_modules()
        )
        if isinstance(getattr(module, "base_layer", module), nn.Linear | nn.Embedding | Router)
        and name.rpartition(".")[2] in short
    }
    return short if meant == set(names) and not model.source.part_of else names


# Reading -------------------------------------------------------------------------------------------------------


def _with_own_names(model: Decoder, adapter: StoredAdapter) -> StoredAdapter:
    """The adapter with our modules' names. Tensors of experts are assigned to projections by their shapes."""
    if model.vision is None:
        adapter = adapter.without_tower()
    if adapter.outside:
        unread = f"{len(adapter.outside)} tensors outside the language model, such as {adapter.outside[0]}"
        if not adapter.tensors:
            raise ValueError(f"{adapter.folder} has only {unread}, and lean_ft computes text.")
        say("adapter", f"{adapter.folder}: not read are {unread}")
    adapter = stack_pairs(model, adapter)
    modules, stacks, shapes = dict(model.named_modules()), experts_of(model), dict(adapter.shapes)
    own_names = _names_of_older_transformers(model)
    own_names |= {model.source.module_name(model_name, in_whole=False): model_name for model_name in modules}
    renamed = {theirs: model_name for theirs, model_name in own_names.items() if model_name not in stacks}
    for name, shape in adapter.shapes.items():
        place = own_names.get(name.removesuffix(".base_layer"), "")
        if place not in stacks:
            continue
        stored = [adapter.tensors[name + ending].shape for ending in OF_LINEAR if name + ending in adapter.tensors]
        for projection in PROJECTIONS:
            num_experts, num_outputs, num_inputs = _sizes(model, layer := f"{place}.{projection}")
            if [sides[axis] for sides, axis in zip(stored, (1, 0), strict=False)] == [num_inputs, num_outputs]:
                renamed[name] = layer
                in_file = f"{adapter.names[name].removesuffix('.base_layer')}.{projection}"
                shapes[name] = stored_shape(adapter.config, in_file, shape.rank // num_experts)

    def own(name: str) -> str:
        layer, *ending = re.split(r"(?=\.lora_|\.token_adapter\.)", name, maxsplit=1)
        return "".join([renamed.get(layer, layer), *ending])

    shapes, tensors, rows = (
        {own(name): value for name, value in by_name.items()} for by_name in (shapes, adapter.tensors, adapter.rows)
    )
    return replace(adapter, shapes=shapes, tensors=tensors, rows=rows)


def _names_of_older_transformers(model: Decoder) -> dict[str, str]:
    """Our names of layers by those of transformers 4, in which modules had the names of the folder's tensors."""
    places = {
        name: model.source.places(f"{name}.weight") for name, module in model.named_modules() if is_adaptable(module)
    }
    return {stored.removesuffix(".weight"): name for name, (stored, *further) in places.items() if not further}


def _sizes(model: Decoder, name: str) -> tuple[int, int, int]:
    """(layers, outputs, inputs) of an adaptable layer or stack of layers. Raises AttributeError for any other name."""
    place, _, last_name = name.rpartition(".")
    owner: Any = model.get_submodule(place)
    if is_projection_of_experts(model, name):
        return linear_shape(as_frozen(getattr(owner, last_name)), owner.input_first_in_adapters)
    layer = getattr(owner, last_name)
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
            lack = _lack(model, name, what)
            raise ValueError(f"{adapter.folder} adapts {name}, {lack}. {other}") from None
        a, b = _endings(modules[name]) if name in modules else OF_LINEAR
        expected[name + a] = (shape.rank * num_layers, num_inputs)
        expected[name + b] = (num_outputs, shape.rank * num_layers)
        if shape.dora:
            expected[name + MAGNITUDE] = (num_outputs,)
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
                f"{adapter.folder} has a row for token {max(ids)}, but {what} has {num_rows} rows. Save a resized "
                "model first."
            )
        expected[name + ENDING] = (len(ids), layer.weight.shape[1])
    expected |= {name: tuple(score.shape) for name, score in _score(model).items() if name in adapter.tensors}
    for name, stored in adapter.tensors.items():
        if name not in expected:
            if _is_own_weight(model, adapter, name):  # PEFT also saves the weight of an adapted embedding
                continue
            if name == f"{SCORE}.weight":
                scores = kind_of_scores(stored.shape[0])
                raise ValueError(
                    f"{adapter.folder} adapts {scores}, which gives scores and no text. Use `leanft score`."
                )
            raise ValueError(
                f"{stored.file}: {name} is not part of a LoRA or DoRA adapter and differs from the weight of {what}. "
                f"It was trained whole, which is not supported, or belongs to another base model. {other}"
            )
        if stored.shape != (shape := expected[name]):
            raise ValueError(
                f"{stored.file}: {name} has shape {list(stored.shape)}; {what} needs {list(shape)}. {other}"
            )


def _lack(model: Decoder, name: str, what: str) -> str:
    """Why the model takes no adapter of a layer, as a clause after its name."""
    if name in dict(model.named_modules()):
        return "which cannot be adapted here"
    stacks = list(experts_of(model).values())
    if not stacks or not _OF_ONE_EXPERT.search(name):
        return f"which {what} does not have"
    names = f"{', '.join(names_by_expert(model))}, with * from 0 to {stacks[0].config.num_experts - 1}"
    return f"a layer of one expert with an unknown name or number. Expected {names}"


def _is_own_weight(model: Decoder, adapter: StoredAdapter, name: str) -> bool:
    """Whether a stored tensor equals the model's weight except for the adapter's rows, or repeats rows of a tied
    layer."""
    stored = adapter.tensors[name]
    if model.config.tied_embeddings and name.startswith("lm_head."):
        name = name.replace("lm_head", EMBEDDING)
    if name in adapter.tensors and name.endswith(ENDING):
        return torch.equal(read_tensor(stored), read_tensor(adapter.tensors[name]))
    name = name.replace(".token_adapter", "").replace(".base_layer.", ".")
    weight = dict(model.named_parameters()).get(name)
    if weight is None or weight.shape != stored.shape:
        return False
    is_same = (read_tensor(stored).to(weight) == weight.detach()).view(len(weight), -1).all(1)
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
        values[MAGNITUDE] = read_tensor(adapters[0].tensors[name + MAGNITUDE])
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
        layer.lora_magnitude_vector.copy_(values[MAGNITUDE])
