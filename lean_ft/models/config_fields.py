"""Checked access to the fields of a config.json."""

from collections.abc import Iterable, Mapping
from typing import Any

MAX_COUNT = 2**24  # larger counts in config.json are damage, and would be computed for hours
MAX_NUMBER = 1e30  # leaves room for products; an integer of config.json may not fit a float


class ConfigFields:
    """The fields of a config.json over their defaults. `read` collects the names read, so that other fields can be refused.

    As in transformers, null for an object of settings means absent. Any other null is a value, which the reader accepts (no
    window, no soft cap) or refuses.
    """

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any], where: str) -> None:
        self.config = config
        self.values = {
            name: value
            for name, value in [*defaults.items(), *config.items()]
            if value is not None or not isinstance(defaults.get(name), dict)
        }
        self.where = where
        self.read: set[str] = set()

    def get(self, name: str) -> Any:
        """The value; None if it is absent or null."""
        self.read.add(name)
        return self.values.get(name)

    def count(self, name: str, least: int = 1, most: int = MAX_COUNT) -> int:
        value = self._required(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            expected = "a positive integer" if least == 1 else f"an integer of at least {least}"
            raise ValueError(f"{self.where}: {name} is {value!r}; expected {expected}.")
        if value > most:
            raise ValueError(f"{self.where}: {name} is {str(value)[:30]}; expected at most {most:,}.")
        return value

    def positive(self, name: str, or_0: bool = False) -> float:
        value = self._required(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not (1 / MAX_NUMBER < value < MAX_NUMBER or (value == 0 and or_0)):
            expected = (
                f"{'0 or ' if or_0 else ''}a positive number, below {MAX_NUMBER:.0e} and above {1 / MAX_NUMBER:.0e}"
            )
            raise ValueError(f"{self.where}: {name} is {value!r}; expected {expected}.")
        return float(value)

    def positive_or_null(self, name: str) -> float | None:
        return None if self.get(name) is None else self.positive(name)

    def flag(self, name: str) -> bool:
        value = self._required(name)
        if not isinstance(value, bool):
            raise ValueError(f"{self.where}: {name} is {value!r}; expected true or false.")
        return value

    def of_each_layer(self, name: str) -> list[Any]:
        """A list with one entry per layer."""
        value, num_layers = self._required(name), self.count("num_hidden_layers")
        if not isinstance(value, list) or len(value) != num_layers:
            raise ValueError(f"{self.where}: {name} is {value!r}; expected a list of {num_layers}, one per layer.")
        return value

    def layer_numbers(self, name: str) -> list[int] | None:
        value = self.get(name)
        if value is not None and not isinstance(value, list):
            raise ValueError(f"{self.where}: {name} is {value!r}; expected a list of layer numbers.")
        return value

    def _required(self, name: str) -> Any:
        if self.get(name) is None:
            raise ValueError(f"{self.where}: the field {name} is missing; it is required to build the model.")
        return self.values[name]


def head_dim_of(fields: ConfigFields) -> int:
    """Features of an attention head: the field head_dim, or the hidden size divided by the number of heads."""
    hidden_size, num_heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    if fields.get("qk_rope_head_dim") is not None:  # latent attention: the rotated features
        head_dim = fields.count("qk_rope_head_dim")
    elif fields.get("head_dim") is not None:
        head_dim = fields.count("head_dim")
    elif hidden_size % num_heads == 0:
        head_dim = hidden_size // num_heads
    else:
        raise ValueError(
            f"{fields.where}: hidden_size is {hidden_size}, which is not a multiple of {num_heads} attention heads. Set "
            "head_dim, or correct one of the two."
        )
    if head_dim % 2:
        raise ValueError(f"{fields.where}: head_dim is {head_dim}; rotary embeddings need an even number.")
    return head_dim


def listed(names: Iterable[str]) -> str:
    """Sorted names for a message."""
    return ", ".join(sorted(names))
