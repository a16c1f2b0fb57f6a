"""The metadata of a GGUF file's architecture, with a check of every value that is read."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lean_ft.models.config_json import MAX_LAYERS

_MAX_COUNT = 2**24
_AGAIN = "Download the file again."


class Stored(NamedTuple):
    """A tensor of the file."""

    kind: str
    shape: tuple[int, ...]
    offset: int
    row_bytes: int


class Facts:
    """The metadata of the file's architecture, without its prefix, and the file's tensors by name."""

    def __init__(
        self, file: Path, architecture: str, metadata: Mapping[str, Any], tensors: Mapping[str, Stored]
    ) -> None:
        self.file, self.architecture, self.metadata, self.tensors = file, architecture, metadata, tensors
        prefix = f"{architecture}."
        values = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
        # Files of dense models may count 0 experts.
        self.values = {key: value for key, value in values.items() if value or not key.startswith("expert_")}
        self.read, self.num_layers = set[str](), 0
        num_drafting = self.count("nextn_predict_layers", 0)  # layers after the last, which draft tokens
        self.num_layers = (
            self.count("block_count", least=1 + num_drafting, most=MAX_LAYERS + num_drafting) - num_drafting
        )

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def _get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        value = self.values.get(key, default)
        if value is None:
            raise ValueError(f"{self.file} lacks the metadata {key} of its architecture. {_AGAIN}")
        return value

    def count(self, key: str, default: int | None = None, least: int = 0, most: int = _MAX_COUNT) -> int:
        """An integer; of a list with one per layer, the largest."""
        value = self._get(key, default)
        number = max(self.per_layer(key), default=None) if isinstance(value, list) else value
        if type(number) is not int or not least <= number <= most:
            raise ValueError(f"{self.file}: {key} is {value!r}; expected an integer from {least} to {most:,}. {_AGAIN}")
        return number

    def per_layer(self, key: str, default: int | None = None) -> list[int]:
        """An integer or flag per layer."""
        value = self._get(key, default)
        numbers = value[: self.num_layers] if isinstance(value, list) else [value] * self.num_layers
        if len(numbers) != self.num_layers or not all(type(n) in (int, bool) and 0 <= n <= _MAX_COUNT for n in numbers):
            raise ValueError(f"{self.file}: {key} is not one number per layer. {_AGAIN}")
        return numbers

    def pattern(self, period: int) -> list[int]:
        """Whether each layer has a sliding window: as the file lists, or all but every `period`th (0: all)."""
        value = self.values.get("attention.sliding_window_pattern")
        if isinstance(value, list):
            return self.per_layer("attention.sliding_window_pattern")
        period = self.count("attention.sliding_window_pattern", period)
        return [period == 0 or (i + 1) % period != 0 for i in range(self.num_layers)]

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if type(value) not in (int, float) or not abs(value) < 1e30:
            raise ValueError(f"{self.file}: {key} is {value!r}; expected a number. {_AGAIN}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if type(value) is not bool:
            raise ValueError(f"{self.file}: {key} is {value!r}; expected true or false. {_AGAIN}")
        return value

    def word(self, key: str, default: str, *others: str) -> str:
        value = self._get(key, default)
        if value not in (default, *others):
            raise ValueError(f"{self.file}: {key} is {value!r}; expected {', '.join((default, *others))}.")
        return value

    def has(self, name: str, layer: int | None = None) -> bool:
        """Whether a layer, or any, has a tensor, such as `attn_q.bias`."""
        layers = range(self.num_layers) if layer is None else (layer,)
        return any(f"blk.{i}.{name}" in self.tensors for i in layers)

    def num_rows(self, name: str) -> int:
        """The rows of a matrix outside the layers."""
        if name not in self.tensors:
            raise ValueError(f"{self.file} lacks the tensor {name}. {_AGAIN}")
        return self.tensors[name].shape[0]

    def of_layer(self, key: str, layer: int) -> float:
        """A number of a list with one per layer, among the metadata without a prefix."""
        numbers = self.metadata.get(key)
        if not isinstance(numbers, list) or len(numbers) != self.num_layers or type(numbers[layer]) not in (int, float):
            raise ValueError(f"{self.file}: {key} is not one number per layer. {_AGAIN}")
        return float(numbers[layer])
