"""Build a `Tokenizer` from a model folder: the tokenizer file, special tokens, chat templates and context length."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from lean_ft.gguf.cache import names_gguf_file
from lean_ft.hub.paths import planned_model_path, resolve_model_path
from lean_ft.settings import ModelConfig
from lean_ft.system.catalog import is_shipped_config
from lean_ft.system.foreign_values import JSON
from lean_ft.system.whole_files import read_json, read_text
from lean_ft.system.world import world
from lean_ft.tokenizers.file_limits import MAX_ADDED
from lean_ft.tokenizers.media import read_media
from lean_ft.tokenizers.new_tokens import copy_with_new_tokens
from lean_ft.tokenizers.sentencepiece_model import SentencePieceModel
from lean_ft.tokenizers.template_files import OLD_TEMPLATE, TEMPLATE, TEMPLATE_FOLDERS
from lean_ft.tokenizers.tiktoken_model import TiktokenModel, is_rank_file
from lean_ft.tokenizers.tokenizer import NAMED_TOKENS, SpecialTokens, Tokenizer, TokenizerFiles
from lean_ft.tokenizers.tokenizer_json import TokenizerJson
from lean_ft.tokenizers.vocabulary import Vocabulary

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    TEMPLATE,
    OLD_TEMPLATE,
)
# Fields of tokenizer_config.json that would give text other ids.
_NOT_BESIDE_PIECES = ("sp_model_kwargs", "do_lower_case", "split_special_tokens")
_STRETCHED = ("linear", "dynamic", "yarn")  # rope scalings whose factor multiplies the original context


def load_tokenizer(path: str | Path | ModelConfig, chat_template: Path | None = None) -> Tokenizer:
    """Load the tokenizer of the model `path`: a folder, a Hub repository (`org/name`), or `tiny`, the embedded model.

    Reads `tokenizer.json` if there is one, else `tokenizer.model`: SentencePiece, or a tiktoken rank file as in Llama
    3. Special tokens and chat templates come from `tokenizer_config.json` and the files next to it, then from
    `generation_config.json` and `config.json`. `chat_template` is a template file that replaces the folder's. Model
    settings with `new_tokens` may replace the path. Raises ValueError if the folder has no tokenizer, if its files
    contradict each other, or if a new token exists already.
    """
    has_tower = False
    if isinstance(path, ModelConfig):
        has_tower = path.has_tower
        if path.new_tokens:
            path = _add_new_tokens(resolve_model_path(path.path, weights=False), path.new_tokens)
        else:
            path = path.path
    planned: dict[str, Callable[[], object]] = {
        "media": lambda: read_media(planned_model_path(path)) if has_tower else (),
        "id_of_word": lambda: lambda word: 0,  # the tokenizer of a plan may be another model's
    }

    def load_for_a_plan() -> Tokenizer:
        """A preset's folder has no tokenizer. A plan reads no text, so that of an embedded model has all it needs."""
        is_shipped = is_shipped_config(planned_model_path(path))
        return _load_tokenizer("tiny-tools" if is_shipped else path, chat_template, has_tower and not is_shipped)

    return world().tokenizer(lambda: _load_tokenizer(path, chat_template, has_tower), load_for_a_plan, planned)


def context_length(config: Mapping[str, Any]) -> int | None:
    """Return the number of tokens of the longest text that the model of this config.json was made for, or None if
    unknown.

    That is `max_position_embeddings`, or the original context times the factor of the rotary scaling if that is longer:
    many configs keep the unscaled number in `max_position_embeddings` (Qwen2.5 with yarn), since transformers reads
    both.
    """
    text = config.get("text_config")  # of a multimodal model
    config = text if isinstance(text, dict) else config
    longest = config.get("max_position_embeddings")
    if not isinstance(longest, int):
        return None
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(scaling, dict) or scaling.get("rope_type", scaling.get("type")) not in _STRETCHED:
        return longest
    original, factor = scaling.get("original_max_position_embeddings") or longest, scaling.get("factor")
    if not isinstance(original, int | float) or not isinstance(factor, int | float):
        return longest
    return max(longest, int(original * factor))


def _add_new_tokens(folder: Path, new: list[str]) -> Path:
    old = _load_tokenizer(folder, None)
    for i, token in enumerate(new):
        existing = f"has the id {old.token_id(token)} in {folder}" if old.token_id(token) is not None else None
        problem = "is empty" if not token else "is given twice" if token in new[:i] else existing
        if problem is not None:
            raise ValueError(f"model.new_tokens: {token!r} {problem}. Remove it.")
    return copy_with_new_tokens(folder, old.files, new, old.vocab_size, old.added_tokens, old.control_tokens)


@names_gguf_file
def _load_tokenizer(path: str | Path, chat_template: Path | None, has_tower: bool = False) -> Tokenizer:
    folder = resolve_model_path(path, weights=False)
    try:
        tokenizer = _read_folder(folder, chat_template)
        if has_tower:
            tokenizer.media = read_media(folder, tokenizer.added_tokens)
        return tokenizer
    except (AttributeError, KeyError, TypeError, UnicodeEncodeError) as error:  # a value of the wrong type
        raise ValueError(
            f"{folder}: tokenizer_config.json or a file next to it is malformed: a value is missing, or has another "
            "type than transformers writes. Get the files from the model's author again."
        ) from error


def _read_folder(folder: Path, chat_template: Path | None) -> Tokenizer:
    config = read_json(folder / "tokenizer_config.json")
    for key, value in read_json(folder / "special_tokens_map.json").items():
        config.setdefault(key, value)
    named = {key: _content(config[key]) for key in NAMED_TOKENS if config.get(key) is not None}
    added_tokens = _added_tokens(config, read_json(folder / "added_tokens.json"), named)
    if len(added_tokens) > MAX_ADDED:
        raise ValueError(
            f"{folder}: its files name {len(added_tokens):,} added tokens; expected at most {MAX_ADDED:,}."
        )

    vocabulary: Vocabulary
    tokenizer_json, tokenizer_model = folder / "tokenizer.json", folder / "tokenizer.model"
    if tokenizer_json.is_file():
        vocabulary = TokenizerJson(tokenizer_json, added_tokens, bos=named.get("bos_token"), eos=named.get("eos_token"))
    elif tokenizer_model.is_file() and is_rank_file(tokenizer_model):
        vocabulary = TiktokenModel(tokenizer_model, added_tokens)
        named.setdefault("bos_token", "<|begin_of_text|>")
        named.setdefault("eos_token", "<|eot_id|>" if "chat_template" in config else "<|end_of_text|>")
    elif tokenizer_model.is_file():
        vocabulary = _sentencepiece_model(tokenizer_model, config, added_tokens)
        for key, default in (("bos_token", "<s>"), ("eos_token", "</s>"), ("unk_token", "<unk>")):
            if key not in config and vocabulary.token_id(default) is not None:
                named[key] = default
    else:
        raise ValueError(_no_tokenizer(folder))

    named = {key: token for key, token in named.items() if vocabulary.token_id(token) is not None}
    ids = {key: vocabulary.token_id(token) for key, token in named.items()}
    for key in ("bos_token", "eos_token", "pad_token"):
        # An explicit null means that the model has no such token. Qwen2.5 still names a bos in its generation config.
        if key not in ids and (key == "pad_token" or key not in config):
            token_id = _id_from_model_configs(folder, f"{key}_id", vocabulary.size)
            if token_id is not None:
                ids[key] = token_id
                token = vocabulary.id_token(token_id)
                if token is not None and key != "pad_token":
                    named[key] = token
    pad_candidates = (ids.get("pad_token"), ids.get("eos_token"), ids.get("unk_token"), 0)
    files = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    if chat_template is None:
        templates = _chat_templates(folder, config)
        files += [file for name in TEMPLATE_FOLDERS for file in sorted((folder / name).glob("*.jinja"))]
    else:
        chat_template = chat_template.expanduser()
        templates = {"default": _read_template(chat_template)}
        files = [file for file in files if file.name != TEMPLATE]
    pad_id = next(token_id for token_id in pad_candidates if token_id is not None)
    special = SpecialTokens(named, ids.get("bos_token"), ids.get("eos_token"), pad_id)
    longest = context_length(read_json(folder / "config.json"))
    return Tokenizer(vocabulary, special, templates, TokenizerFiles(folder, files, chat_template), longest)


def _read_template(file: Path) -> str:
    try:
        return read_text(file)
    except OSError as error:
        raise ValueError(f"the chat template {file} cannot be read: {error.strerror}.") from None


def _sentencepiece_model(
    file: Path, config: dict[str, Any], added_tokens: list[tuple[int | None, AddedToken]]
) -> SentencePieceModel:
    of_config = file.with_name("tokenizer_config.json")
    if unread := [name for name in _NOT_BESIDE_PIECES if config.get(name)]:
        raise ValueError(
            f"{of_config}: {unread[0]} is {config[unread[0]]!r:.100}, which is not supported beside tokenizer.model. "
            "Save a tokenizer.json with transformers."
        )
    if not isinstance(prefix := config.get("add_prefix_space"), bool | None):
        raise ValueError(f"{of_config}: add_prefix_space is {prefix!r:.100}; expected true, false or null.")
    return SentencePieceModel(
        file,
        added_tokens,
        adds_bos=config.get("add_bos_token", True),
        adds_eos=config.get("add_eos_token", False),
        legacy=config.get("legacy") or False,
        add_prefix_space=prefix,
    )


def _content(token: JSON) -> str:
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str):
        raise ValueError(f"tokenizer_config.json or a file next to it names the token {token!r:.100}; expected a text.")
    return content


def _added_tokens(
    config: dict[str, Any], legacy_added: dict[str, int], named: dict[str, str]
) -> list[tuple[int | None, AddedToken]]:
    """Return every token that the configs name, with its id or None: declared tokens in order of id, then the
    others."""
    declared = dict[int, AddedToken]()
    for key, value in config.get("added_tokens_decoder", {}).items():
        if not re.fullmatch(r"\d{1,9}", key, re.ASCII):
            raise ValueError(f"tokenizer_config.json: added_tokens_decoder has the id {key!r:.100}; expected a number.")
        declared[int(key)] = _token(value)
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    extra = extra.values() if isinstance(extra, dict) else extra
    special = [*named.values(), *map(_content, extra)]
    if not declared:
        declared = {
            token_id: AddedToken(token, special=token in special, normalized=token not in special)
            for token, token_id in legacy_added.items()
        }
    tokens: list[tuple[int | None, AddedToken]] = [(token_id, declared[token_id]) for token_id in sorted(declared)]
    contents = {token.content for token in declared.values()}
    for content in special:
        if content not in contents:
            contents.add(content)
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
    config = read_json(folder / "config.json")
    text = config.get("text_config")
    for settings in (read_json(folder / "generation_config.json"), config, text if isinstance(text, dict) else {}):
        value = settings.get(key)
        if isinstance(value, list):
            value = value[0] if value else None
        if isinstance(value, int) and 0 <= value < vocab_size:
            return value
    return None


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return the templates by name. Files override the config, as in transformers."""
    in_config = config.get("chat_template")
    if in_config is None:
        in_config = read_json(folder / OLD_TEMPLATE).get("chat_template")
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
        message += " To convert its vocab.json and merges.txt, load and save it with transformers' AutoTokenizer."
    elif (folder / "tekken.json").is_file():
        message += " Its tekken.json is not supported; use the repository that has a tokenizer.json."
    return message
