"""sentence-transformers, imported when a test first uses it, since the import takes 10 CPU seconds."""

from importlib import import_module
from typing import Any


class Lazily:
    """A module that is imported with the first use of one of its names."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(import_module(self._name), attribute)


library = Lazily("sentence_transformers")
modules = Lazily("sentence_transformers.sentence_transformer.modules")
util = Lazily("sentence_transformers.util")
