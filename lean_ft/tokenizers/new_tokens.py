"""Tokens that a run adds to those of its model: ids behind the last, written into files of the tokenizer's own format.

The files are a copy with a few lines more, so all that reads, saves or asks for a tokenizer's files takes them as any others.
"""

import atexit
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lean_ft.system.whole_files import write_json

# What of a model's folder tells special tokens, beside the tokenizer's own files.
_BESIDE = ("config.json", "generation_config.json")


def copy_with_new_tokens(
    folder: Path,
    files: Sequence[Path],
    new: Sequence[str],
    first_id: int,
    known: dict[str, int],
    special: frozenset[str],
) -> Path:
    """Returns a folder, there as long as the process, with the tokenizer `files` of a model's and the tokens `new` from
    `first_id` on; `known` are the ids of the tokens that are found in a text before it is split, of which some are `special`.

    Raises ValueError for a tokenizer without tokenizer.json.
    """
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(
            f"model.new_tokens: {folder} has no tokenizer.json to write them into. Load it once with transformers' AutoTokenizer "
            "and save it, which writes one."
        )
    copy = Path(tempfile.mkdtemp(prefix="lean_ft_tokenizer_"))
    atexit.register(shutil.rmtree, copy, ignore_errors=True)
    for file in [*files, *(folder / name for name in _BESIDE)]:
        if file.is_file():
            place = copy / file.relative_to(folder)
            place.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, place)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    spec: dict[str, Any] = json.loads((copy / "tokenizer.json").read_text(encoding="utf-8"))
    there = {entry["content"] for entry in spec["added_tokens"]}
    # Tokens that tokenizer_config.json alone declares come first, as they have the ids in between.
    added = {token: number for token, number in known.items() if token not in there}
    added |= {token: first_id + i for i, token in enumerate(new)}
    spec["added_tokens"] += [
        {"id": number, "content": token, **flags, "special": token in special} for token, number in added.items()
    ]
    write_json(copy / "tokenizer.json", spec)
    if (copy / "tokenizer_config.json").is_file():
        config = json.loads((copy / "tokenizer_config.json").read_text(encoding="utf-8"))
        if "added_tokens_decoder" in config:
            own = {str(first_id + i): {"content": token, **flags, "special": False} for i, token in enumerate(new)}
            write_json(
                copy / "tokenizer_config.json", {**config, "added_tokens_decoder": config["added_tokens_decoder"] | own}
            )
    return copy
