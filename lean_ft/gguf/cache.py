"""The cache of model folders made from GGUF files. A folder has config.json, tokenizer files, and an index of the
file's tensors."""

import os
import re
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

from lean_ft.system.environment import user_cache
from lean_ft.system.whole_files import read_json

GGUF_INDEX = "model.gguf.json"
_P = ParamSpec("_P")
_T = TypeVar("_T")


def gguf_cache() -> Path:
    """Return the part of the cache that has a model folder for each GGUF file in use."""
    return Path(os.environ.get("LEAN_FT_CACHE") or user_cache()).expanduser().absolute() / "gguf"


def gguf_file(folder: Path) -> Path | None:
    """Return the GGUF file whose weights the folder lists; None if the folder is not in the GGUF cache.

    Other folders are not trusted to name a file anywhere on the disk.
    """
    if folder.parent != gguf_cache() or not (folder / GGUF_INDEX).is_file():
        return None
    return Path(read_json(folder / GGUF_INDEX)["file"])


def names_gguf_file(load: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorate a function of a model's path, so that its errors name the GGUF file as given and not its folder in the
    cache."""

    @wraps(load)
    def named(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return load(*args, **kwargs)
        except ValueError as error:
            given = args[0] if args else kwargs["path"]
            message = with_given_name(str(error), getattr(given, "path", given))
            if message == str(error):
                raise
            raise ValueError(message) from None

    return named


def with_given_name(message: str, given: object, *others: Path) -> str:
    """Return an error's message with `given` in place of paths of the cache, and of `others`."""
    paths = [
        rf"{re.escape(str(gguf_cache()))}/[^/\n]{{0,100}}-[0-9a-f]{{16}}[^/\s]*(/[\w.]+)?",
        *(re.escape(str(path)) for path in others),
    ]
    return re.sub("|".join(paths), lambda _: str(given), message)
