"""Checked access to the fields of a config.json, and of the files beside it."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lean_ft.system.whole_files import read_json

MAX_COUNT = 2**24  # larger counts in config.json are damage, and would be computed for hours
MAX_LAYERS = 1024  # each is a module
MAX_NUMBER = 1e30  # leaves room for products; an integer of config.json may not fit a float


class ConfigFields:
    """The fields of a JSON object over their defaults. `read` collects the names read, so that other fields can be
    refused.

    As in transformers, null for an object of settings means absent. Any other null is a value, which the reader accepts
    (no window, no soft cap) or refuses. With `null_is_absent` every null means absent.
    """

    def __init__(
        self, config: Mapping[str, Any], defaults: Mapping[str, Any], where: str, null_is_absent: bool = False
    ) -> None:
        self.config, self.where, self.null_is_absent = config, where, null_is_absent
        self.values = {
            name: value
            for name, value in [*defaults.items(), *config.items()]
            if value is not None or not (null_is_absent or isinstance(defaults.get(name), dict))
        }
        self.read: set[str] = set()

    def get(self, name: str) -> Any:
        """The value; None if it is absent or null."""
        self.read.add(name)
        return self.values.get(name)

    def object(self, name: str, **defaults: Any) -> "ConfigFields":
        """The fields of an object inside; all are absent if it is."""
        value = {} if self.get(name) is None else self.values[name]
        if not isinstance(value, Mapping):
            raise self.wrong(name, "an object")
        return ConfigFields(value, defaults, f"{self.where}: {name}", self.null_is_absent)

    def count(self, name: str, least: int = 1, most: int = MAX_COUNT, multiple_of: int = 1) -> int:
        value = self._required(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least or value % multiple_of:
            expected = "a positive integer" if least == 1 else f"an integer of at least {least}"
            raise self.wrong(name, expected if multiple_of == 1 else f"{expected}, a multiple of {multiple_of}")
        if value > most:
            raise ValueError(f"{self.where}: {name} is {str(value)[:30]}; expected at most {most:,}.")
        return value

    def positive(self, name: str, or_0: bool = False) -> float:
        value = self._required(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not (1 / MAX_NUMBER < value < MAX_NUMBER or (value == 0 and or_0)):
            bounds = f"below {MAX_NUMBER:.0e} and above {1 / MAX_NUMBER:.0e}"
            raise self.wrong(name, f"{'0 or ' if or_0 else ''}a positive number, {bounds}")
        return float(value)

    def positive_or_null(self, name: str) -> float | None:
        return None if self.get(name) is None else self.positive(name)

    def flag(self, name: str) -> bool:
        value = self._required(name)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def one_of(self, name: str, values: Sequence[Any]) -> Any:
        """A value of these, which have one type."""
        value = self._required(name)
        if type(value) is not type(values[0]) or value not in values:
            raise self.wrong(name, f"one of {', '.join(map(str, values))}")
        return value

    def expect(self, because: str = "the only value that is supported", /, **expected: Any) -> None:
        """Raise ValueError if a field is there and has another value."""
        for name, value in expected.items():
            self.read.add(name)
            if self.values.get(name, value) != value:
                raise self.wrong(name, f"{value!r}, {because}")

    def of_each_layer(self, name: str) -> list[Any]:
        """A list with one entry per layer."""
        value, num_layers = self._required(name), self.count("num_hidden_layers")
        if not isinstance(value, list) or len(value) != num_layers:
            raise self.wrong(name, f"a list of {num_layers}, one per layer")
        return value

    def layer_numbers(self, name: str) -> list[int] | None:
        value = self.get(name)
        if value is not None and not isinstance(value, list):
            raise self.wrong(name, "a list of layer numbers")
        return value

    def wrong(self, name: str, expected: str) -> ValueError:
        """An error about a field's value."""
        return ValueError(f"{self.where}: {name} is {self.values.get(name)!r:.200}; expected {expected}.")

    def _required(self, name: str) -> Any:
        if self.get(name) is None:
            raise ValueError(f"{self.where}: the field {name} is missing; it is required.")
        return self.values[name]


def end_ids(folder: Path) -> list[int]:
    """Return the ids that end a completion, as transformers reads them: from generation_config.json, or without this
    file from config.json or its text_config. Raises ValueError for anything but ids."""
    file = folder / "generation_config.json"
    file = file if file.is_file() else folder / "config.json"
    settings = read_json(file)
    ends, text = settings.get("eos_token_id"), settings.get("text_config")
    if ends is None and isinstance(text, dict) and file.name == "config.json":
        ends = text.get("eos_token_id")
    ids = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if not all(type(end) is int for end in ids):
        raise ValueError(f"{file}: eos_token_id is {ends!r:.200}; expected an id or a list of ids.")
    return ids


def listed(names: Iterable[str]) -> str:
    """Sorted names for a message."""
    return ", ".join(sorted(names))
