"""An adapter's folder in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`, read without a model.

The tensors define the adapted layers and their ranks; the config defines the scaling. An unsupported field that would
change the result is refused by name. Only safetensors are read, because a pickled adapter can run code.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Tensor

from lean_ft.hub.paths import checkpoint_hint
from lean_ft.models.config_json import REWARD_LABELS, VECTORS, Labels, label_fields, labels_tokens
from lean_ft.models.dense import makes_vectors
from lean_ft.models.safetensors_file import MAX_NAME_CHARACTERS, StoredTensor, read_header
from lean_ft.models.source import is_of_tower, name_in_language_model
from lean_ft.models.vision.config import SPELLINGS
from lean_ft.peft.layers import AdapterShape
from lean_ft.peft.lora import SCORE
from lean_ft.peft.name_patterns import NamePatterns
from lean_ft.peft.new_rows import ENDING
from lean_ft.system.foreign_values import JSON
from lean_ft.system.whole_files import read_json

if TYPE_CHECKING:
    from lean_ft.models.decoder import Decoder
    from lean_ft.peft.expert_pairs import StackedFactor

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
LABELS_FILE = "labels.json"
OF_VECTORS = "FEATURE_EXTRACTION"  # PEFT's task type of a model without an output layer
PREFIX = "base_model.model."
MAX_ALPHA = 1e6  # also of the rank; published adapters have at most thousands

# Suffixes of the names of a layer's two matrices.
OF_LINEAR = (".lora_A.weight", ".lora_B.weight")
OF_EMBEDDING = (".lora_embedding_A", ".lora_embedding_B")
MAGNITUDE = ".lora_magnitude_vector"

# Fields that are read, that change nothing after training, or that follow from the tensors.
_KNOWN_FIELDS = {
    *("peft_type", "base_model_name_or_path", "revision", "lora_alpha", "alpha_pattern", "use_dora", "use_rslora"),
    *("r", "rank_pattern", "target_modules", "target_parameters", "exclude_modules", "layers_to_transform"),
    *("layers_pattern", "lora_dropout", "init_lora_weights", "corda_config", "eva_config", "loftq_config"),
    *("lora_ga_config", "auto_mapping", "inference_mode", "megatron_core", "peft_version", "qalora_group_size"),
    *("runtime_config", "task_type", "trainable_token_indices", "fan_in_fan_out"),  # the last: how the base is stored
}
# Values of `init_lora_weights` that do not change the model's own weights.
_HARMLESS_STARTS = (True, False, None, "gaussian", "eva", "mica", "orthogonal")


@dataclass(frozen=True)
class StoredAdapter:
    """An adapter on disk, its tensors not yet read."""

    folder: Path
    config: dict[str, Any]
    base_model: str | None
    shapes: dict[str, AdapterShape]  # by layer name
    tensors: dict[str, "StoredTensor | StackedFactor"]  # by name in the language model, without PEFT's prefix
    rows: dict[str, list[int]]  # ids of tokens with stored rows, by layer name
    names: dict[str, str]  # of layers in the file, by their name in the language model
    outside: list[str]  # tensors of a multimodal model's layers that the model does not have

    def without_tower(self) -> "StoredAdapter":
        """The adapter for a model without its vision tower."""
        tensors, shapes = (
            {name: value for name, value in by_name.items() if not is_of_tower(name)}
            for by_name in (self.tensors, self.shapes)
        )
        outside = [*self.outside, *(f"model.{name}" for name in self.tensors if is_of_tower(name))]
        return replace(self, tensors=tensors, shapes=shapes, outside=outside)


def read_factors(adapter: StoredAdapter, name: str) -> tuple[Tensor, Tensor]:
    """Read A (R, I) and B (O, R) of a layer."""
    a, b = OF_EMBEDDING if name + OF_EMBEDDING[0] in adapter.tensors else OF_LINEAR
    return read_tensor(adapter.tensors[name + a]), read_tensor(adapter.tensors[name + b])


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
    tensors, in_file, outside = dict[str, "StoredTensor | StackedFactor"](), dict[str, str](), list[str]()
    for name, stored in read_header(folder / WEIGHTS_FILE).items():
        if not stored.shape or 0 in stored.shape:
            sentence = f"{name} has the shape {list(stored.shape)}"
            raise ValueError(f"{stored.file}: {sentence}; expected a vector or a matrix with values.")
        if not name.startswith(PREFIX):
            raise ValueError(f"{stored.file}: {name} is not a PEFT tensor name; expected {PREFIX}...")
        # Older versions of PEFT append .weight to the magnitude's name.
        name = name.removeprefix(PREFIX)
        name = name.removesuffix(".weight") if name.endswith(f"{MAGNITUDE}.weight") else name
        if (model_name := name_in_language_model(name, SPELLINGS)) is None:
            outside.append(name)
            continue
        if model_name in tensors:
            raise ValueError(
                f"{stored.file} has two tensors for {model_name}, under different names. Remove one of them."
            )
        tensors[model_name], in_file[model_name] = stored, name
    shapes, names = {}, {}
    for name, stored in tensors.items():
        if name.endswith((OF_LINEAR[0], OF_EMBEDDING[0])):
            layer = name.removesuffix(OF_LINEAR[0]).removesuffix(OF_EMBEDDING[0])
            if len(stored.shape) != 2 or not stored.shape[0]:
                shape = f"{name} has shape {list(stored.shape)}"
                raise ValueError(f"{stored.file}: {shape}; expected a matrix with at least one row, the rank.")
            names[layer] = in_file[name].removesuffix(OF_LINEAR[0]).removesuffix(OF_EMBEDDING[0])
            shapes[layer] = stored_shape(config, names[layer], rank=stored.shape[0])
    model, revision = config.get("base_model_name_or_path"), config.get("revision")
    base = f"{model}@{revision}" if model and revision else model or None
    rows = _stored_rows(folder, config, tensors)
    return StoredAdapter(folder, config, base, shapes, tensors, rows, names, outside)


def _stored_rows(folder: Path, config: dict[str, Any], tensors: Mapping[str, Any]) -> dict[str, list[int]]:
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


def task_type(model: "Decoder") -> str:
    """PEFT's name of what a model is for."""
    if model.score is None:
        return "CAUSAL_LM" if model.config.has_output else OF_VECTORS
    return "TOKEN_CLS" if labels_tokens(model.source.config) else "SEQ_CLS"


def labels_of(folder: str | Path) -> Labels | None:
    """The fields of config.json about the labels of an adapter with a score layer, `VECTORS` for an adapter of a model
    that gives vectors, and None for other adapters. PEFT's files do not have them, so a classifier that PEFT saved has
    transformers' default names."""
    if labels := read_json(Path(folder) / LABELS_FILE):
        return labels
    if read_json(Path(folder) / CONFIG_FILE).get("task_type") == OF_VECTORS or makes_vectors(Path(folder)):
        return VECTORS
    tensors = read_adapter(Path(folder)).tensors
    score, per_token = tensors.get(f"{SCORE}.weight"), f"{SCORE}.bias" in tensors
    if score is None or score.shape[0] == 1:
        return None if score is None else REWARD_LABELS
    return label_fields([f"LABEL_{i}" for i in range(score.shape[0])], is_multi=False, per_token=per_token)


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / CONFIG_FILE
    if not file.is_file():
        hint = checkpoint_hint(folder)
        raise ValueError(f"{folder} has no adapter: expected PEFT's files {CONFIG_FILE} and {WEIGHTS_FILE}.{hint}")
    config = read_json(file, "it describes the adapter.")
    if (peft_type := config.get("peft_type")) != "LORA":
        raise ValueError(f"{file}: peft_type is {peft_type!r}, which is not supported; expected LORA.")
    if config.get("init_lora_weights") not in _HARMLESS_STARTS:
        raise ValueError(
            f"{file}: init_lora_weights is {config['init_lora_weights']!r}, so the adapter needs changed base weights. "
            "Convert it with PEFT: save_pretrained(..., path_initial_model_for_weight_conversion=...)."
        )
    for name, value in config.items():
        is_supported = name in _KNOWN_FIELDS or (name == "bias" and value == "none")
        if name == "modules_to_save" and isinstance(value, list):
            is_supported = all(module in (SCORE, "classifier") for module in value)
        if not is_supported and value not in (None, False, 0, "", [], {}):
            raise ValueError(f"{file}: {name} is {value!r}, which is not supported; expected it absent or null.")
    for name in ("r", "lora_alpha"):
        if not _is_positive(value := config.get(name)):
            raise ValueError(f"{file}: {name} is {value!r}; expected a positive number of at most {MAX_ALPHA:.0e}.")
    base = [config.get(name) for name in ("base_model_name_or_path", "revision")]
    if not all(name is None or (isinstance(name, str) and len(name) < MAX_NAME_CHARACTERS) for name in base):
        raise ValueError(f"{file}: base_model_name_or_path or revision is {base!r}; expected a model's name or folder.")
    config["alpha_pattern"] = _alphas(config.get("alpha_pattern") or {}, file)
    return config


def _is_positive(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= MAX_ALPHA


def _alphas(patterns: JSON, file: Path) -> NamePatterns[float]:
    """The alphas of `alpha_pattern`, by patterns of layers' names."""
    if not isinstance(patterns, dict):
        raise ValueError(f"{file}: alpha_pattern is {patterns!r:.40}; expected an object of patterns and alphas.")
    alphas = dict[str, float]()
    for pattern, alpha in patterns.items():
        if not _is_positive(alpha):
            raise ValueError(
                f"{file}: alpha_pattern has {alpha!r} for {pattern!r}; expected a positive number of at most "
                f"{MAX_ALPHA:.0e} for a regular expression of layers' names."
            )
        alphas[pattern] = float(alpha)
    try:
        return NamePatterns(alphas)
    except ValueError as error:
        raise ValueError(f"{file}: alpha_pattern: {error}") from None


def stored_shape(config: dict[str, Any], layer: str, rank: int) -> AdapterShape:
    """The shape of the adapter of a layer, by its name in the file."""
    try:
        alpha = config["alpha_pattern"].find(layer, float(config["lora_alpha"]))
    except ValueError as error:
        raise ValueError(f"{CONFIG_FILE}: alpha_pattern: {error}") from None
    return AdapterShape(rank, alpha, bool(config.get("use_rslora")), bool(config.get("use_dora")))


def read_tensor(stored: "StoredTensor | StackedFactor") -> Tensor:
    if stored.dtype is None or not stored.dtype.is_floating_point:
        raise ValueError(f"{stored.file}: a tensor has dtype {stored.dtype_name}; expected F32, BF16 or F16.")
    return stored.read()
