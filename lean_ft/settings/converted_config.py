"""Presets from configurations of torchtune, axolotl and LLaMA-Factory, by assets/other_tools.yaml.

Each key of a configuration is converted by its row, or gets a remark with the reason. Rows apply in the order of the
table: of two keys for one of our settings, the later row wins, and a remark names both. Null and false without a row of
their own need no remark.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from shlex import quote
from typing import Any

from lean_ft.settings.base import spelled_out
from lean_ft.settings.describing import describe
from lean_ft.settings.other_tools import (
    NEEDLESS,
    RECIPE,
    UNSUPPORTED,
    VALUE,
    Equivalent,
    are_in,
    assigned,
    by_lower_value,
    equivalent,
    filled,
    table,
    tools,
)
from lean_ft.settings.strict_yaml import Plain, as_text, parse_yaml, read_yaml_file, to_yaml
from lean_ft.settings.text import dotted, problems_of
from lean_ft.system import catalog
from lean_ft.system.foreign_values import JSON

Values = dict[str, Any]  # dotted key -> value
MAX_REMARKS, MAX_CHARACTERS = 200, 1000
# Keys that choose what is trained. They come first, and an unsupported value ends the conversion.
_DECISIVE = ("model._component_", "loss._component_", "kd_loss._component_", "rl", "reward_model", "kd_trainer")
_DECISIVE += ("stage", "finetuning_type", "adapter")
_TORCHTUNE = {"optimizer", "checkpointer", "model", "dataset"}  # groups of a training configuration
# Keys that list data sets -> our setting.
_SOURCES = {"dataset": "data.source", "datasets": "data.source", "pretraining_dataset": "data.source"}
_SOURCES |= {"test_datasets": "data.validation_source", "eval_dataset": "data.validation_source"}
# What we read of a data set -> its names in their descriptions; the first that is set counts.
_PLACES = {"path": ("data_files", "path", "source", "hf_hub_url", "file_name"), "subset": ("subset", "name")}
_PLACES |= {"split": ("split",)}
_DESCRIBE = "A run recognizes rows by their fields; data.format and data.columns describe other rows."


@cache
def _defaults(recipe: str) -> dict[str, Any]:
    return {s.key: s.default for s in describe(catalog.load_recipe(catalog.recipes()[recipe]).Config)}


@dataclass
class Preset:
    """A converted configuration: a recipe, its settings, and remarks on the other keys."""

    tool: str  # as in other_tools.yaml
    recipe: str = "finetune"
    settings: Values = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    converted: list[str] = field(default_factory=list)  # their keys
    set_by: dict[str, str] = field(default_factory=dict)  # our setting -> the key that set it
    verdicts: dict[str, list[str]] = field(default_factory=dict)  # a reason -> their keys

    def remark(self, text: str) -> None:
        if len(self.remarks) < MAX_REMARKS:
            self.remarks.append(_one_line(text))

    def take(self, theirs: Values) -> None:
        """Convert settings by dotted key, with the tool's defaults that differ from ours."""
        tool, places = tools()[self.tool], {name: index for index, name in enumerate(table(self.tool))}
        defaults = {names.split()[0]: text for names, text in tool.get("defaults", {}).items()
                    if all(theirs.get(name) is None for name in names.split())}  # fmt: skip
        missing = {name: Plain(text).value() for name, text in defaults.items()}
        if shown := [f"{key}={to_yaml(value, flow=True)}" for key, value in missing.items() if value is not None]:
            self.remark(f"defaults of {tool['title']}: {', '.join(shown)}")
        for key in sorted({**theirs, **missing}, key=lambda key: (key not in _DECISIVE, places.get(key, len(places)))):
            self._take(key, missing.get(key, theirs.get(key)), is_default=key in missing)
        for reason, keys in sorted(self.verdicts.items(), reverse=True):
            names = ", ".join(dict.fromkeys(keys))
            self.remark(f"{names}: {reason}" if reason else f"not needed in lean_ft: {names}")
        if self.settings.get("lora", {}) is None:
            self.settings = {key: value for key, value in self.settings.items() if not f"{key}.".startswith("lora.")}

    def _take(self, key: str, value: JSON, is_default: bool = False) -> None:
        answer, row = self._answer(key, value), table(self.tool).get(key)
        is_named = isinstance(row, dict) and as_text(value).lower() in by_lower_value(row)
        if (value is None or value is False) and not is_named and (answer is None or value is None or answer.verdict):
            return
        if answer is None:
            self.remark(f"{key}: {to_yaml(value, flow=True)} has no equivalent.")
        elif answer.verdict == UNSUPPORTED and key in _DECISIVE:
            raise ValueError(f"{key}: {to_yaml(value, flow=True)} is not supported: {answer.note}.")
        elif answer.verdict:
            self.verdicts.setdefault("" if answer.verdict == NEEDLESS else f"not supported: {answer.note}.", []).append(
                key
            )
        elif not key.endswith("_component_") and any(
            ours.startswith("data.columns") for ours in answer.alternatives[0]
        ):
            self.remark(f"not converted: {self._described(key, key, value)}. {_DESCRIBE}")
        else:
            self._assign(key, value, answer, is_default)

    def _described(self, key: str, name: str, value: JSON) -> str:
        """Return a key that describes rows, with what replaces it; empty if nothing has to."""
        answer = equivalent(self.tool, key, as_text(value))
        if answer is not None and answer.verdict == NEEDLESS:
            return ""
        ours = [assigned(settings, as_text(value), is_whole=True) for settings in answer.alternatives] if answer else []
        meaning = " or ".join(ours) or (f"not supported: {answer.note}" if answer else "")
        return f"{name}: {to_yaml(value, flow=True)}" + (f" ({meaning})" if meaning else "")

    def _answer(self, key: str, value: JSON) -> Equivalent | None:
        """Return the row's answer, of a component by its full or last name. A part of a group takes the verdict on the
        group."""
        text, row = as_text(value), table(self.tool).get(key)
        if key.endswith("_component_") and isinstance(row, dict) and text.lower() not in by_lower_value(row):
            text = text.rpartition(".")[2]
        answer = equivalent(self.tool, key, text)
        if answer is None and "." in key:
            answer = self._answer(key.rpartition(".")[0], value)
            return answer if answer is not None and answer.verdict else None
        return answer

    def _assign(self, key: str, value: JSON, answer: Equivalent, is_default: bool) -> None:
        setting_names = {RECIPE, *_defaults(self.recipe)}
        setting_names |= {setting.partition(".")[0] for setting in setting_names}
        meant = next((ours for ours in answer.alternatives if RECIPE in ours or are_in(setting_names, ours)), None)
        if meant is None:
            self.remark(f"{key}: {to_yaml(value, flow=True)} has no equivalent in the recipe {self.recipe}.")
            return
        for ours, text in meant.items():
            if ours == RECIPE:
                self.recipe = text
            else:
                self._set(key, ours, _value(text, value), is_default)
        if not is_default:
            self.converted.append(key)
            if answer.note:
                self.remark(f"{key}: {answer.note}.")

    def _set(self, key: str, ours: str, value: JSON, is_default: bool = False) -> None:
        """Set one of our settings. If another key has set it, lists are joined and a default value is replaced."""
        before, earlier = self.settings.get(ours), self.set_by.get(ours, "")
        value = spelled_out(value) if ours == "model.dtype" else value
        if earlier and before != value and not earlier.endswith("_component_"):
            default = _defaults(self.recipe).get(ours)
            off = (None, default) if isinstance(default, bool | str) else (None,)  # a default number may be meant
            if is_default or value in off:
                return
            if isinstance(before, list) and isinstance(value, list) and ours != "optimizer.betas":
                value = [*before, *(item for item in value if item not in before)]
            elif before not in off:
                self.remark(
                    f"{earlier} and {key} both set {ours}. The preset has {to_yaml(value, flow=True)}, of {key}."
                )
        self.settings[ours], self.set_by[ours] = value, key

    def take_sources(self, key: str, ours: str, entries: list[Any]) -> None:
        """Set data.source or data.validation_source to the paths of data sets, and remark on what describes their
        rows."""
        sources = []
        for entry in [{"path": entry} if isinstance(entry, str) else entry for entry in entries]:
            if not isinstance(entry, dict):
                raise ValueError(f"{key} is {repr(entries)[:100]}; expected a list of data sets, each with a path.")
            left, source = {name: value for name, value in entry.items() if value is not None}, dict[str, Any]()
            for place, names in _PLACES.items():
                values = [left.pop(name) for name in names if name in left]
                source |= {place: values[0]} if values else {}
            group = "datasets" if self.tool == "axolotl" else key
            rest = [self._described(f"{group}.{name}", name, value) for name, value in left.items()]
            if rest := ", ".join(filter(None, rest)):
                self.remark(f"{key}: {as_text(source.get('path', ''))}: not converted: {rest}. {_DESCRIBE}")
            paths = source.pop("path", "")
            sources += [{"path": path} | source for path in (paths if isinstance(paths, list) else [paths])]
        if ours == "data.source" and len(sources) == 1:
            self.settings |= {f"data.{name}".replace("data.path", ours): part for name, part in sources[0].items()}
        elif sources:
            self.settings[ours] = [source["path"] if len(source) == 1 else source for source in sources]
        self.converted.append(key)

    def leave_refused_out(self) -> None:
        """Leave out settings whose values the recipe refuses, and remark on them, on missing ones and on those that
        conflict."""
        config = catalog.load_recipe(catalog.recipes()[self.recipe]).Config
        problems, missing = problems_of(config, self.nested())
        while refused := list(self._refused(problems)):
            for ours, text in refused:
                reason = text.removeprefix(f"{ours}: ").split("\n")[0]
                self.remark(f"{self.set_by.get(ours, ours)} is not converted: {ours}: {reason}")
                self.settings.pop(ours, None)
            problems, missing = problems_of(config, self.nested())
        for problem in (text for text in problems if "is not installed here" not in text):
            self.remark(f"{self.recipe} refuses this preset: {' '.join(problem.split())}")
        for setting in missing:
            self.remark(f"{setting.key} is required, and the file does not set it: {setting.description}")

    def _refused(self, problems: list[str]) -> Iterator[tuple[str, str]]:
        """Yield settings that have a problem of their own. A logger need not be installed here."""
        for text in problems:
            ours = next((ours for ours in self.settings if text.startswith(f"{ours}: ")), None)
            if ours is not None and "is not installed here" not in text:
                yield ours, text

    def nested(self) -> Values:
        """Return the settings that differ from their defaults, in groups."""
        defaults, nested = _defaults(self.recipe), Values()
        for key, value in self.settings.items():
            if value is not None and (key == "optimizer.lr" or defaults.get(key) != value):
                inside = nested
                for group in key.split(".")[:-1]:
                    inside = inside.setdefault(group, {})
                last = key.rpartition(".")[2]
                inside[last] = inside.get(last, {}) if value == {} else value
        return nested

    def text(self, source: str) -> str:
        """Return the preset as YAML without default values. Remarks become comments."""
        lines = (_one_line(f"From {tools()[self.tool]['title']}'s {source}."), *self.remarks)
        return "".join(f"# {line}\n" for line in lines) + to_yaml({RECIPE: self.recipe} | self.nested())


def convert_config(file: Path) -> Preset:
    """Convert a training configuration, whose tool is known by its keys. Raise ValueError for other files, and for what
    cannot be converted."""
    read, _ = read_yaml_file(file)
    tool = _tool_of(read)
    if tool is None or (tool == "torchtune" and not read.keys() >= _TORCHTUNE):
        raise ValueError(
            f"{file} is not a training configuration of torchtune (model, checkpointer, dataset and optimizer), "
            "axolotl (base_model) or LLaMA-Factory (model_name_or_path and stage). PPO of torchtune is not supported. "
            "For TRL and unsloth see docs/coming_from_trl.md and docs/coming_from_others.md."
        )
    try:
        preset, theirs = Preset(tool), flat(read)
        sources = {key: theirs.pop(key) for key in _SOURCES if theirs.get(key) and (key in theirs)}
        preset.take(_adapted(theirs, tool))
        for key, entries in sources.items():
            if tool == "llama_factory":
                entries = list(_described(entries, key, theirs, file))
            preset.take_sources(key, _SOURCES[key], entries if isinstance(entries, list) else [entries])
        preset.leave_refused_out()
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    return preset


def refuse_other_tools(preset: Path) -> None:
    """Raise ValueError with the command that converts it, if `preset` is a configuration of another tool."""
    if tool := _tool_of(read_yaml_file(preset)[0]):
        raise ValueError(
            f"{preset} is a configuration of {tools()[tool]['title']}. Convert it: leanft convert-config "
            f"{quote(str(preset))} -o converted.yaml, and then leanft run converted.yaml"
        )


def _tool_of(values: JSON) -> str | None:
    """Return the tool whose configuration has these keys; None for a preset of lean_ft and for other files."""
    if not isinstance(values, dict) or RECIPE in values:
        return None
    if any(key.endswith("_component_") for key, _ in dotted(values)):
        return "torchtune"
    if "base_model" in values:
        return "axolotl"
    is_llama_factory = {"stage", "finetuning_type", "template", "cutoff_len", "dataset"} & values.keys()
    return "llama_factory" if "model_name_or_path" in values and is_llama_factory else None


def _adapted(theirs: Values, tool: str) -> Values:
    """Return settings with references resolved, and with those joined that a table cannot join."""
    left = {key: _resolved(value, theirs) for key, value in theirs.items()}
    betas = {key: left[key] for key in ("adam_beta1", "adam_beta2") if left.get(key) is not None}
    left |= {key: [betas.get("adam_beta1", 0.9), betas.get("adam_beta2", 0.999)] for key in betas}
    if (
        tool == "llama_factory"
        and left.get("lora_alpha") is None
        and isinstance(rank := left.get("lora_rank") or 8, int)
    ):
        left["lora_alpha"] = 2 * rank
    if isinstance(names := left.get("model.lora_attn_modules"), list):
        left["model.lora_attn_modules"] = ["o_proj" if name == "output_proj" else name for name in names]
    if left.get("dataset.data_files"):
        left.pop("dataset.source", None)  # the kind of the files
    return left


def _resolved(value: JSON, theirs: Values) -> JSON:
    """Return a value of torchtune without its references to other keys, such as `${output_dir}/logs`."""
    for _ in range(16):  # a value may refer to itself
        if not isinstance(value, str) or len(value) > MAX_CHARACTERS:
            break
        if (reference := re.search(r"\$\{([\w.]+)\}", value)) is None or reference[1] not in theirs:
            break
        value = value.replace(reference[0], str(theirs[reference[1]])[:MAX_CHARACTERS], 1)
    return value


def _described(datasets: JSON, key: str, theirs: Values, file: Path) -> Iterator[Values]:
    """Yield LLaMA-Factory's descriptions of data sets, from dataset_info.json; a name that it lacks is a path."""
    names = [name.strip() for name in datasets.split(",")] if isinstance(datasets, str) else datasets
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{key} is {repr(datasets)[:100]}; expected names separated by commas.")
    folder = str(theirs.get("dataset_dir") or "data")
    places = [Path(folder) / "dataset_info.json", file.parent / folder / "dataset_info.json"]
    info = next((place for place in places if place.is_file()), None)
    described = read_yaml_file(info)[0] if info else {}
    for name in names:
        entry = flat(described[name]) if isinstance(described, dict) and isinstance(described.get(name), dict) else {}
        if info and "file_name" in entry and "hf_hub_url" not in entry:
            entry["file_name"] = str(info.parent / str(entry["file_name"]))
        yield {"path": name} | entry if not entry.keys() & {"hf_hub_url", "file_name"} else entry


def flat(values: Values) -> Values:
    """Return nested values by dotted key, without empty groups. Lists stay lists."""
    return {key: plain(value) for key, value in dotted(values) if value != {}}


def plain(value: JSON) -> JSON:
    if isinstance(value, list):
        return [flat(item) if isinstance(item, dict) else plain(item) for item in value]
    return value.value() if isinstance(value, Plain) else value


def _value(text: str, theirs: JSON) -> JSON:
    """Return a value of ours, such as `[VALUE]`, for a value of theirs. 500.0 is 500, and `a, b` is a list where ours
    is."""
    if text == f"[{VALUE}]":
        parts: list[JSON] = [part.strip() for part in theirs.split(",")] if isinstance(theirs, str) else [theirs]
        return theirs if isinstance(theirs, list) else parts
    if text == VALUE or isinstance(theirs, list):
        return int(theirs) if isinstance(theirs, float) and theirs.is_integer() and theirs >= 1 else theirs
    return plain(parse_yaml(filled(text, as_text(theirs)))[0])


def _one_line(text: str) -> str:
    """Escape line breaks, which would end a comment, and other control characters."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text[:MAX_CHARACTERS])
