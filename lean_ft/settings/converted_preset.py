"""A preset that is converted from another tool's configuration: settings by assets/other_tools.yaml, and remarks on the rest."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import cache
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
    by_name,
    equivalent,
    filled,
    table,
    tools,
)
from lean_ft.settings.strict_yaml import Plain, as_text, parse_yaml, to_yaml
from lean_ft.settings.text import dotted
from lean_ft.system import catalog

Values = dict[str, Any]  # dotted key -> value
MAX_REMARKS, MAX_CHARACTERS = 200, 1000
# Lists that several keys add to.
_JOINED = ("log.to", "freeze", "train", "model.new_tokens", "lora.targets", "eval_tasks")


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
    assumed: Collection[str] = ()  # their keys that are not set
    given: dict[str, str] = field(default_factory=dict)  # our setting -> the key that set it

    def remark(self, text: str) -> None:
        if len(self.remarks) < MAX_REMARKS:
            self.remarks.append(_one_line(text))

    def take_all(self, left: Values, first: Iterable[str] = ()) -> None:
        """Convert settings, `first` those that choose the recipe. Remark on those that cannot be converted, and list those
        that need no setting. Null and false need no remark."""
        verdicts: dict[str, list[str]] = {}  # sentence -> keys
        for key in sorted(left, key=lambda key: key not in first):
            value, row = left[key], table(self.tool).get(key)
            is_named = isinstance(row, dict) and as_text(value).lower() in by_name(row)
            if value is None and not is_named:
                continue
            named, one = self._equivalent(key, value)
            if one is not None and not one.verdict:
                self._assign(key, key.removeprefix(named), one, value)
            elif one is not None and one.verdict == UNSUPPORTED and key in first:
                raise ValueError(f"{key}: {to_yaml(value, flow=True)} is not supported: {one.note}.")
            elif one is not None and ((one.verdict == UNSUPPORTED and is_named) or value not in (None, False)):
                sentence = "" if one.verdict == NEEDLESS else f"{one.verdict}: {one.note}."
                verdicts.setdefault(sentence, []).append(named)
            elif one is None and value is not False and len(self.remarks) < MAX_REMARKS:
                self.remark(f"{key}: {to_yaml(value, flow=True)} has no equivalent.")
        for sentence, keys in sorted(verdicts.items(), reverse=True):
            names = ", ".join(dict.fromkeys(keys))
            self.remark(f"{names}: {sentence}" if sentence else f"not needed in lean_ft: {names}")
        self._adjust()

    def take_training(self, left: Values, first: Iterable[str]) -> None:
        """Convert the settings of a whole configuration, with the tool's defaults that differ from lean_ft's."""
        tool = tools()[self.tool]
        missing = {key: Plain(value).value() for key, value in tool["defaults"].items() if left.get(key) is None}
        self.assumed = missing.keys()
        shown = [f"{key}={to_yaml(value, flow=True)}" for key, value in missing.items() if value is not None]
        if shown:
            self.remark(f"defaults of {tool['title']}: {', '.join(shown)}")
        betas = (left.pop("adam_beta1", None), left.pop("adam_beta2", None))
        self.settings["optimizer.betas"] = [
            given if given is not None else ours for given, ours in zip(betas, (0.9, 0.999), strict=True)
        ]
        self.take_all(left | missing, first)
        if any(left.get(key) for key in ("deepspeed", "fsdp", "fsdp_version", "dp_shard_size", "dp_replicate_size")):
            counts = f"{tool['title']} counts per process. Multiply it by the number of processes."
            self.remark(f"gradient_accumulation_steps: {counts}")

    def _equivalent(self, key: str, value: Any) -> tuple[str, Equivalent | None]:
        """Return what replaces a setting. A part of a group takes the verdict on the group, or is an entry of our setting."""
        if (one := equivalent(self.tool, key, as_text(value))) is not None or "." not in key:
            return key, one
        named, one = self._equivalent(key.rpartition(".")[0], value)
        is_entry = one is not None and one.alternatives == [{"data.chat_template_kwargs": VALUE}]
        return named, one if one is not None and (one.verdict or is_entry) else None

    def _adjust(self) -> None:
        """Adjust settings that depend on each other, or whose units depend on the number."""
        if self.settings.get("lora", {}) is None:
            self.settings = {key: value for key, value in self.settings.items() if not f"{key}.".startswith("lora.")}
        if isinstance(steps := self.settings.get("schedule.warmup_steps"), float) and 0 < steps < 1:
            self.settings["schedule.warmup_ratio"] = self.settings.pop("schedule.warmup_steps")
        if isinstance(size := self.settings.get("data.validation_fraction"), int | float) and size >= 1:
            del self.settings["data.validation_fraction"]
            self.remark(
                f"data.validation_fraction: a number of rows ({size}) has no equivalent. Set a fraction below 1."
            )
        if not self.settings.get("quantize.train"):
            self.settings.pop("quantize.group_size", None)
        if self.settings.get("optimizer.in_backward") and "max_grad_norm" in self.assumed:
            self.settings.pop("clip_grad_norm", None)  # their layer-wise updates are not clipped either
        if self.recipe == "kto" and self.settings.get("batch_size") == 1:
            steps = self.settings.get("gradient_accumulation_steps")
            self.settings["gradient_accumulation_steps"] = -(-steps // 2) if isinstance(steps, int) else 1
            self.settings["batch_size"] = 2
            self.remark("batch_size: kto compares the completions of a micro-batch, so the preset has 2 in each.")

    def source(self, group: str, theirs: Values) -> tuple[Values, Values]:
        """Convert a data set. Return its entry of data.source, and its other settings of `data`, which are for all rows."""
        one = Preset(self.tool, self.recipe)
        one.take_all({f"{group}.{name}": value for name, value in theirs.items()})
        for text in one.remarks:
            if text not in self.remarks:
                self.remark(text)
        found = {key.removeprefix("data."): value for key, value in one.settings.items() if value not in (None, "auto")}
        columns = {key.removeprefix("columns."): found.pop(key) for key in [*found] if key.startswith("columns.")}
        names = [name for name in ("format", "subset", "split") if name in found]
        entry = {"path": found.pop("source", ""), **{name: found.pop(name) for name in names}, "columns": columns}
        return entry, found

    def set_sources(self, key: str, sources: list[Values]) -> None:
        """Set data.source or data.validation_source to a list of sources, or to the settings of a single one."""
        for source in sources:
            source["columns"] = {ours: field for ours, field in source.get("columns", {}).items() if ours != field}
        sources = [{name: value for name, value in source.items() if value not in (None, {})} for source in sources]
        if key == "data.source" and len(sources) == 1:
            self.settings[key] = sources[0].pop("path")
            self.settings |= {f"data.{name}": value for name, value in sources[0].items()}
        elif sources:
            self.settings[key] = sources
            self.settings.pop("data.format" if key == "data.source" else "", None)

    def component(self, key: str, name: str, uses: str) -> Values | None:
        """Return the settings for a component by its name. If there are none, remark what the preset uses instead."""
        one = equivalent(self.tool, f"{key}._component_", name or "null")
        if one is None or one.verdict or VALUE in one.alternatives[0].values():
            self.remark(f"{key}: {name} has no equivalent. {uses}" if name else f"{key}: not set. {uses}")
            return None
        if one.note:
            self.remark(f"{key}: {one.note}.")
        return {ours: _value(text, name) for ours, text in one.alternatives[0].items()}

    def _assign(self, key: str, entry: str, one: Equivalent, value: Any) -> None:
        known = {RECIPE, *_defaults(self.recipe)}
        known |= {setting.partition(".")[0] for setting in known}
        meant = next((ours for ours in one.alternatives if RECIPE in ours or are_in(known, ours)), None)
        if meant is None:
            if value is not None and value is not False:
                self.remark(f"{key}: {to_yaml(value, flow=True)} has no equivalent in the recipe {self.recipe}.")
            return
        for ours, text in meant.items():
            if ours == RECIPE:
                self.recipe = text
            elif value is not None or VALUE not in text:
                found = _value(text, value)
                self._set(key, ours + entry, spelled_out(found) if ours == "model.dtype" else found)
        self.converted += [] if key in self.assumed else [key]
        if one.note and isinstance(table(self.tool).get(key), dict):  # what only this value needs
            self.remark(f"{key}: {one.note}.")

    def _set(self, key: str, ours: str, value: Any) -> None:
        """Set one of our settings. If another key has set it, lists are joined, a default value is replaced, and two different
        values get a remark."""
        before = self.settings.get(ours)
        if (earlier := self.given.get(ours)) is not None and before != value:
            default = _defaults(self.recipe).get(ours)
            off = (None, default) if isinstance(default, bool | str) else (None,)  # a default number may be meant
            if ours in _JOINED and isinstance(before, list) and isinstance(value, list):
                value = [*before, *(one for one in value if one not in before)]
            elif value in off or key in self.assumed:
                return
            elif before not in off:
                self.remark(
                    f"{earlier} and {key} both set {ours}. The preset has {to_yaml(value, flow=True)}, of {key}."
                )
        self.settings[ours], self.given[ours] = value, key

    def share(self, found: Values) -> None:
        """Set settings that the tool has per data set, and lean_ft for all rows."""
        for name, value in found.items():
            before = self.settings.get(f"data.{name}", value)
            if before != value and f"data.{name}" in self.given:
                self.remark(
                    f"datasets: data.{name} is {before} for some rows and {value} for others. The preset has {value}."
                )
            self.settings[f"data.{name}"] = value
            self.given[f"data.{name}"] = "datasets"

    def text(self, source: str) -> str:
        """Return the preset as YAML without default values. Remarks become comments."""
        defaults, nested = _defaults(self.recipe), {RECIPE: self.recipe}
        for key, value in self.settings.items():
            if value is not None and (key == "optimizer.lr" or defaults.get(key) != value):
                inside: Any = nested
                for group in key.split(".")[:-1]:
                    inside = inside.setdefault(group, {})
                last = key.rpartition(".")[2]
                inside[last] = inside.get(last, {}) if value == {} else value
        title = tools()[self.tool]["title"]
        lines = (_one_line(f"From {title}'s {source}."), *self.remarks)
        return "".join(f"# {line}\n" for line in lines) + to_yaml(nested)


def flat(values: Values) -> Values:
    """Return nested values by dotted key, without empty groups. Lists stay lists."""
    return {key: plain(value) for key, value in dotted(values) if value != {}}


def plain(value: Any) -> Any:
    if isinstance(value, list):
        return [flat(item) if isinstance(item, dict) else plain(item) for item in value]
    return value.value() if isinstance(value, Plain) else value


def _value(text: str, theirs: Any) -> Any:
    """Return a value of ours, such as `[VALUE]`, for a value of theirs."""
    if text in (VALUE, f"[{VALUE}]"):
        return theirs if text == VALUE or isinstance(theirs, list) else [theirs]
    return plain(parse_yaml(filled(text, as_text(theirs)))[0])


def _one_line(text: str) -> str:
    """Escape line breaks, which would end a comment, and other control characters."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text[:MAX_CHARACTERS])
