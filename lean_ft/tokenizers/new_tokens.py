"""Add tokens to a model's tokenizer for a run: a copy of its files with new ids after the last one.

The copy has the tokenizer's own format, so everything that reads or saves tokenizer files can use it.
"""

import atexit
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lean_ft.system.whole_files import write_json

_MODEL_CONFIGS = ("config.json", "generation_config.json")  # these may name special tokens too


def copy_with_new_tokens(
    folder: Path,
    files: Sequence[Path],
    new: Sequence[str],
    first_id: int,
    ids: dict[str, int],
    special: frozenset[str],
) -> Path:
    """Return a temporary folder with the tokenizer `files` of `folder` and the tokens `new`, whose ids begin at
    `first_id`.

    `ids` maps the tokenizer's added tokens to their ids; those in `special` are control tokens. The folder is deleted
    when the process ends. Raises ValueError for a tokenizer without tokenizer.json.
    """
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(
            f"model.new_tokens needs a tokenizer.json, which {folder} lacks. Load and save the tokenizer with "
            "transformers' AutoTokenizer, which writes a tokenizer.json."
        )
    copy = Path(tempfile.mkdtemp(prefix="lean_ft_tokenizer_"))
    atexit.register(shutil.rmtree, copy, ignore_errors=True)
    for file in [*files, *(folder / name for name in _MODEL_CONFIGS)]:
        if file.is_file():
            target = copy / file.relative_to(folder)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, target)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    spec: dict[str, Any] = json.loads((copy / "tokenizer.json").read_text(encoding="utf-8"))
    present = {entry["content"] for entry in spec["added_tokens"]}
    # Tokens that only tokenizer_config.json declares come first, since their ids precede the new ones.
    added = {token: number for token, number in ids.items() if token not in present}
    added |= {token: first_id + i for i, token in enumerate(new)}
    spec["added_tokens"] += [
        {"id": number, "content": token, **flags, "special": token in special} for token, number in added.items()
    ]
    write_json(copy / "tokenizer.json", spec)
    if (copy / "tokenizer_config.json").is_file():
        config = json.loads((copy / "tokenizer_config.json").read_text(encoding="utf-8"))
        if "added_tokens_decoder" in config:
            for i, token in enumerate(new):
                config["added_tokens_decoder"][str(first_id + i)] = {"content": token, **flags, "special": False}
            write_json(copy / "tokenizer_config.json", config)
    return copy
