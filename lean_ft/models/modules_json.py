"""modules.json of a sentence-transformers folder: the steps from texts to vectors or scores, and the configurations of
layers after pooling.

The transformer is the model itself, in the folder itself. Each other module has a folder with its config.json. What
lean_ft does not compute is refused with the file's name.

Source: sentence-transformers 6.2.0: base/model.py and base/modules/dense.py.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lean_ft.models.config import DenseConfig
from lean_ft.system.config_fields import ConfigFields
from lean_ft.system.foreign_values import JSON
from lean_ft.system.spelling import did_you_mean
from lean_ft.system.whole_files import kind, read_json, read_json_value

MODULES = "modules.json"
_MOST_MODULES = 16
_READ = ("Transformer", "Pooling", "Dense", "Normalize")
ACTIVATIONS = {
    "Identity": "torch.nn.modules.linear.Identity",
    "Tanh": "torch.nn.modules.activation.Tanh",
    "ReLU": "torch.nn.modules.activation.ReLU",
    "GELU": "torch.nn.modules.activation.GELU",
    "SiLU": "torch.nn.modules.activation.SiLU",
    "Sigmoid": "torch.nn.modules.activation.Sigmoid",
}
"""Names of activations in `DenseConfig`, and in a folder's files."""


@dataclass(frozen=True)
class Module:
    """An entry of modules.json."""

    kind: str
    """The last part of its class's name."""
    path: str


def read_modules(folder: Path) -> list[Module] | None:
    """Return the modules of a folder, in order; None without a modules.json. Raises ValueError with its name for a
    file that is malformed, and for modules of other code."""
    file = folder / MODULES
    if not file.is_file():
        return None
    listed = read_json_value(file)
    if not isinstance(listed, list) or not 0 < len(listed) <= _MOST_MODULES:
        found = f"{len(listed)} entries" if isinstance(listed, list) else kind(listed)
        raise ValueError(f"{file}: expected a list of 1 to {_MOST_MODULES} modules, found {found}.")
    modules = []
    for number, one in enumerate(listed, start=1):
        if not isinstance(one, dict):
            raise ValueError(f"{file}: module {number} is {kind(one)}; expected an object.")
        of_class, path = one.get("type"), one.get("path")
        if not isinstance(of_class, str) or not isinstance(path, str):
            raise ValueError(
                f"{file}: module {number} has the type {of_class!r:.80} and the path {path!r:.80}; expected two texts."
            )
        if not of_class.startswith("sentence_transformers."):
            raise ValueError(
                f"{file}: module {number} is {of_class!r:.80}, the code of another library. Its vectors "
                "cannot be computed here."
            )
        if not re.fullmatch(r"(?!\.)[\w.-]{0,100}", path, re.ASCII):
            raise ValueError(f"{file}: module {number} has the path {path!r:.80}; expected a name in this folder.")
        if one.get("kwargs"):
            raise ValueError(f"{file}: module {number} has `kwargs`, which are not supported.")
        modules.append(Module(of_class.rpartition(".")[2], path))
    if modules[0].kind == "Transformer" and modules[0].path:
        raise ValueError(
            f"{file} has the model's weights in the folder {modules[0].path}. Set model.path to "
            f"{folder / modules[0].path}, which is read without the other modules."
        )
    if modules[0].kind != "Transformer":
        raise ValueError(
            f"{file}: the first module is {modules[0].kind}; expected a Transformer in this folder itself."
        )
    return modules


def check_order(file: Path, modules: Sequence[Module]) -> None:
    """Raise ValueError unless the modules are a transformer, its pooling, and what may follow."""
    kinds = [one.kind for one in modules]
    for name in kinds:
        if name not in _READ:
            raise ValueError(
                f"{file}: the module {name} is not supported; expected {', '.join(_READ)}.{did_you_mean(name, _READ)}"
            )
    if not re.fullmatch("Transformer Pooling( Dense)*( Normalize)?", " ".join(kinds)):
        raise ValueError(
            f"{file}: the modules are {', '.join(kinds)}; expected {', '.join(_READ)} in this order, Dense "
            "any number of times, and Normalize at most once."
        )


def dense_config(folder: Path, path: str) -> DenseConfig:
    """Return the configuration of a layer after pooling. Raises ValueError with the file's name for what lean_ft does
    not compute."""
    file = folder / path / "config.json"
    if not path:
        raise ValueError(f'{folder / MODULES}: a Dense module has the path ""; expected a folder of its own.')
    fields = ConfigFields(read_json(file, "it describes a layer after pooling."), {"bias": True}, str(file), True)
    sizes = fields.count("in_features"), fields.count("out_features")
    by_class: dict[str, str] = {name: own for own, name in ACTIVATIONS.items()}
    activation = fields.get("activation_function") or ACTIVATIONS["Tanh"]
    if not isinstance(activation, str) or activation not in by_class:
        raise fields.wrong("activation_function", f"one of {', '.join(by_class)}")
    for name in ("module_input_name", "module_output_name"):
        fields.expect(**{name: "sentence_embedding"})
    fields.expect(use_residual=False)
    layer = DenseConfig(path, *sizes, fields.flag("bias"), by_class[activation])
    refuse_others(fields)
    return layer


def fields_of_dense(layer: DenseConfig) -> dict[str, JSON]:
    """Return the value of the layer's config.json."""
    sizes: dict[str, JSON] = {"in_features": layer.in_features, "out_features": layer.out_features}
    return {**sizes, "bias": layer.bias, "activation_function": ACTIVATIONS[layer.activation]}


def refuse_others(fields: ConfigFields) -> None:
    """Raise ValueError for a field that was not read and has a value, since it might change a vector."""
    for name, value in fields.values.items():
        if name not in fields.read and value not in ({}, [], False, ""):
            raise ValueError(
                f"{fields.where}: the field {name!r:.80} is not known, so it is not clear what it changes."
            )
