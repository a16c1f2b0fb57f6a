"""A model folder to a `Tokenizer`: which file it is, its special tokens, its chat template."""

import json
import re
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from tokenizers import AddedToken

from lean_ft.hub.paths import resolve_model_path
from lean_ft.settings import ModelConfig
from lean_ft.system.shapes_only import stage
from lean_ft.system.whole_files import read_json
from lean_ft.tokenizers.context_length import context_length
from lean_ft.tokenizers.new_tokens import copy_with_new_tokens
from lean_ft.tokenizers.sentencepiece_model import SentencePieceModel
from lean_ft.tokenizers.tiktoken_model import TiktokenModel, is_rank_file
from lean_ft.tokenizers.tokenizer import Tokenizer
from lean_ft.tokenizers.tokenizer_json import TokenizerJson
from lean_ft.tokenizers.vocabulary import Vocabulary

TEMPLATE = "chat_template.jinja"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    TEMPLATE,
    "chat_template.json",
)
# Named templates beside `chat_template.jinja`: transformers 5 writes the first.
TEMPLATE_FOLDERS = ("additional_chat_templates", "chat_templates")
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class _WhenAsked:
    """A tokenizer that is loaded when something of it is wanted: a recipe that is planned may need none."""

    def __init__(self, *arguments: Any) -> None:
        self._arguments = arguments

    @cached_property
    def _loaded(self) -> Tokenizer:
        return _load_tokenizer(*self._arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loaded, name)

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        return self._loaded(*arguments, **settings)

    def __len__(self) -> int:
        return len(self._loaded)


def load_tokenizer(path: str | Path | ModelConfig, chat_template: Path | None = None) -> Tokenizer:
    """Loads the tokenizer of the model `path`: a folder, a repository of the hub (`org/name`), or `tiny`, the embedded one.

    Takes `tokenizer.json` where there is one, else `tokenizer.model`: SentencePiece, or a tiktoken rank file
    as Llama 3 ships. Special tokens and the chat template come from `tokenizer_config.json` and the files
    beside it; what they do not say comes from `generation_config.json` and `config.json`. `chat_template` is a file of
    one to take in place of the folder's. Settings in place of the path may have `new_tokens`. Raises ValueError where the folder
    has no tokenizer or its files contradict each other, and for a new token that is there already.
    """
    if isinstance(path, ModelConfig):
        if path.new_tokens:
            path = _with_new_tokens(resolve_model_path(path.path, weights=False), path.new_tokens)
        else:
            path = path.path
    found = _WhenAsked(path, chat_template) if stage() is not None else _load_tokenizer(path, chat_template)
    return cast(Tokenizer, found)


def _with_new_tokens(folder: Path, new: list[str]) -> Path:
    own = _load_tokenizer(folder, None)
    for i, token in enumerate(new):
        if not token or token in new[:i] or own.token_id(token) is not None:
            known = f"has the id {own.token_id(token)} in the tokenizer of {folder}" if token else "is empty"
            said = "is given twice" if token in new[:i] else known
            raise ValueError(
                f"model.new_tokens: {token!r} {said}; expected tokens that are not there yet. Leave it out."
            )
    return copy_with_new_tokens(folder, own.files, new, own.vocab_size, own.added_tokens, own.control_tokens)


def _load_tokenizer(path: str | Path, chat_template: Path | None) -> Tokenizer:
    folder = resolve_model_path(path, weights=False)
    config = read_json(folder / "tokenizer_config.json")
    for key, value in read_json(folder / "special_tokens_map.json").items():
        config.setdefault(key, value)
    _check_config(config, folder / "tokenizer_config.json")
    named = {key: _content(config[key]) for key in NAMED_TOKENS if config.get(key) is not None}
    added_tokens = _added_tokens(config, read_json(folder / "added_tokens.json"), named)

    vocabulary: Vocabulary
    tokenizer_json, tokenizer_model = folder / "tokenizer.json", folder / "tokenizer.model"
    if tokenizer_json.is_file():
        vocabulary = TokenizerJson(tokenizer_json, added_tokens, bos=named.get("bos_token"), eos=named.get("eos_token"))
    elif tokenizer_model.is_file() and is_rank_file(tokenizer_model):
        vocabulary = TiktokenModel(tokenizer_model, added_tokens)
        named.setdefault("bos_token", "<|begin_of_text|>")
        named.setdefault("eos_token", "<|eot_id|>" if "chat_template" in config else "<|end_of_text|>")
    elif tokenizer_model.is_file():
        vocabulary = SentencePieceModel(
            tokenizer_model,
            added_tokens,
            adds_bos=config.get("add_bos_token", True),
            adds_eos=config.get("add_eos_token", False),
            legacy=config.get("legacy") or False,
        )
        for key, default in (("bos_token", "<s>"), ("eos_token", "</s>"), ("unk_token", "<unk>")):
            if key not in config and vocabulary.token_id(default) is not None:
                named[key] = default
    else:
        raise ValueError(_no_tokenizer(folder))

    named = {key: token for key, token in named.items() if vocabulary.token_id(token) is not None}
    ids = {key: vocabulary.token_id(token) for key, token in named.items()}
    for key in ("bos_token", "eos_token", "pad_token"):
        # An explicit null means that the model has none: Qwen2.5 names a bos in its generation config all the
        # same.
        if key not in ids and (key == "pad_token" or key not in config):
            token_id = _id_from_model_configs(folder, f"{key}_id", vocabulary.size)
            if token_id is not None:
                ids[key] = token_id
                token = vocabulary.id_token(token_id)
                if token is not None and key != "pad_token":
                    named[key] = token
    own = None if chat_template is None else chat_template.expanduser()
    pad_candidates = (ids.get("pad_token"), ids.get("eos_token"), ids.get("unk_token"), 0)
    return Tokenizer(
        vocabulary,
        special_tokens=named,
        chat_templates=_chat_templates(folder, config) if own is None else {"default": _read_template(own)},
        bos_id=ids.get("bos_token"),
        eos_id=ids.get("eos_token"),
        pad_id=next(token_id for token_id in pad_candidates if token_id is not None),
        folder=folder,
        files=[
            folder / name for name in TOKENIZER_FILES if (folder / name).is_file() and (own is None or name != TEMPLATE)
        ]
        + [file for name in TEMPLATE_FOLDERS if own is None for file in sorted((folder / name).glob("*.jinja"))],
        own_template=own,
        context_length=context_length(read_json(folder / "config.json")),
    )


def _check_config(config: dict[str, Any], path: Path) -> None:
    """Raise ValueError, naming the field, where one that is read is not of its kind."""

    def check(is_right: bool, field: str, expected: str) -> None:
        if not is_right:
            raise ValueError(f"{path}: {field} is {json.dumps(config[field])[:80]}; expected {expected}.")

    for field in NAMED_TOKENS:
        if config.get(field) is not None:
            check(_is_token(config[field]), field, "a token: text, or an object with its content")
    for field in ("additional_special_tokens", "extra_special_tokens"):
        tokens = config.get(field) or []
        tokens = list(tokens.values()) if isinstance(tokens, dict) else tokens
        check(isinstance(tokens, list) and all(map(_is_token, tokens)), field, "a list of tokens, or tokens by name")
    declared = config.get("added_tokens_decoder", {})
    right = isinstance(declared, dict) and all(
        re.fullmatch(r"[0-9]{1,9}", key) and _is_token(value) for key, value in declared.items()
    )
    check(right, "added_tokens_decoder", "an object from ids to tokens")
    template = config.get("chat_template")
    if isinstance(template, list):
        right = all(
            isinstance(entry, dict) and all(isinstance(entry.get(key), str) for key in ("name", "template"))
            for entry in template
        )
    elif isinstance(template, dict):
        right = all(isinstance(source, str) for source in template.values())
    else:
        right = template is None or isinstance(template, str)
    check(right, "chat_template", "a template's text, or templates by name")


def _is_token(value: Any) -> bool:
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    if isinstance(value, dict):
        return _is_token(value.get("content")) and all(isinstance(value.get(flag, False), bool) for flag in flags)
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


def _read_template(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: expected text in UTF-8, but byte {error.start} is not.") from None
    except OSError as error:
        raise ValueError(f"the chat template {file} cannot be read: {error.strerror}.") from None


def _content(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]


def _added_tokens(
    config: dict[str, Any], legacy_added: dict[str, int], named: dict[str, str]
) -> list[tuple[int | None, AddedToken]]:
    """Every token that the configs name, with its id where they give one: declared ones in order of id, then
    others."""
    declared = {int(key): _token(value) for key, value in config.get("added_tokens_decoder", {}).items()}
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    special = [
        *named.values(),
        *(_content(token) for token in (extra.values() if isinstance(extra, dict) else extra)),
    ]
    if not declared:
        declared = {
            token_id: AddedToken(token, special=token in special, normalized=token not in special)
            for token, token_id in legacy_added.items()
        }
    tokens: list[tuple[int | None, AddedToken]] = [(token_id, declared[token_id]) for token_id in sorted(declared)]
    known = {token.content for token in declared.values()}
    for content in special:
        if content not in known:
            known.add(content)
            in_full = (config[key] for key in NAMED_TOKENS if isinstance(config.get(key), dict))
            full = next((token for token in in_full if token.get("content") == content), content)
            tokens.append((None, _token(full, special=True)))
    return tokens


def _token(value: str | dict[str, Any], special: bool | None = None) -> AddedToken:
    if isinstance(value, str):
        return AddedToken(value, special=bool(special), normalized=not special)
    is_special = bool(value.get("special", False)) if special is None else special
    return AddedToken(
        value["content"],
        single_word=value.get("single_word", False),
        lstrip=value.get("lstrip", False),
        rstrip=value.get("rstrip", False),
        normalized=value.get("normalized", not is_special),
        special=is_special,
    )


def _id_from_model_configs(folder: Path, key: str, vocab_size: int) -> int | None:
    for name in ("generation_config.json", "config.json"):
        value = read_json(folder / name).get(key)
        if isinstance(value, list):
            value = value[0] if value else None
        if isinstance(value, int) and 0 <= value < vocab_size:
            return value
    return None


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Templates by name. Files win over the config, as in transformers."""
    in_config = config.get("chat_template")
    if in_config is None:
        in_config = read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(in_config, str):
        templates = {"default": in_config}
    elif isinstance(in_config, list):
        templates = {entry["name"]: entry["template"] for entry in in_config}
    else:
        templates = dict(in_config or {})
    if (folder / TEMPLATE).is_file():
        templates["default"] = _read_template(folder / TEMPLATE)
    for name in TEMPLATE_FOLDERS:
        for file in sorted((folder / name).glob("*.jinja")):
            templates[file.stem] = _read_template(file)
    return templates


def _no_tokenizer(folder: Path) -> str:
    message = f"{folder} has no tokenizer: expected tokenizer.json or tokenizer.model."
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        message += (
            " It has vocab.json and merges.txt; load it once with transformers' AutoTokenizer and save it, "
            "which writes a tokenizer.json."
        )
    elif (folder / "tekken.json").is_file():
        message += " It has tekken.json, which is not read; use the repository that ships tokenizer.json."
    return message
