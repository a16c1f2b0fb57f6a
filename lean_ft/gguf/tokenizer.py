"""The tokenizer of a GGUF file as tokenizer.json and tokenizer_config.json: what `lean_ft.gguf.vocabulary` reverses."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lean_ft.gguf.splitting import ADD_BOS, RULES
from lean_ft.system.spelling import did_you_mean

WORD_START = "▁"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # gguf.TokenType
_TYPES: dict[str, type] = {"pre": str} | dict.fromkeys(("tokens", "token_type", "scores", "merges"), list)
_TYPES |= dict.fromkeys(("add_bos_token", "add_eos_token", "add_space_prefix"), bool)
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "eot": "eot", "eom": "eom"}
_MAX_WORK = 2**27  # characters compared to find the merges of a SentencePiece vocabulary; Gemma's needs about 2**24
_PLAIN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


def _checked_values(file: Path, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of the tokenizer without their prefix, with a score for each token. Raises ValueError for
    another tokenizer, and for values of the wrong type or number."""
    values = {k.removeprefix("tokenizer.ggml."): v for k, v in metadata.items() if k.startswith("tokenizer.ggml.")}
    model, tokens, types = values.get("model"), values.get("tokens"), values.get("token_type")
    if model not in ("gpt2", "llama", "gemma4"):
        raise ValueError(
            f"{file} has the tokenizer {model!r}; expected gpt2 (byte-level BPE), llama (SentencePiece BPE) or gemma4. "
            "WordPiece (bert), unigram (t5), RWKV and PLaMo 2 are not supported. Use the model's Hugging Face folder "
            "instead."
        )
    kinds = {f"tokenizer.ggml.{key}": kind for key, kind in _TYPES.items()}
    kinds |= {key: str for key in metadata if re.fullmatch(r"tokenizer\.chat_template(\..*)?", key, re.DOTALL)}
    for key, kind in kinds.items():
        if type(metadata.get(key, kind())) is not kind:
            found = str(metadata[key])[:100]
            raise ValueError(f"{file}: {key} is {found}, which is of the wrong type. Download the file again.")
    scores = values.get("scores") if model == "llama" else [0.0] * len(tokens or ())
    entries: Any
    for key, entries, kind in (("tokens", tokens, str), ("token_type", types, int), ("scores", scores, float)):
        whole = isinstance(entries, list) and len(entries) == len(tokens or ()) > 0
        if not whole or not all(type(entry) is kind for entry in entries):
            found = f"{len(entries)} entries" if isinstance(entries, list) else "none"
            raise ValueError(
                f"{file}: tokenizer.ggml.{key} has {found}; expected one {kind.__name__} for each of "
                f"{len(tokens or ())} tokens. Download the file again."
            )
    return {**values, "scores": scores}


def tokenizer_files(file: Path, metadata: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the content of each file by name. Raises ValueError for a tokenizer that lean_ft cannot read."""
    values = _checked_values(file, metadata)
    model, tokens, types, scores = (values[name] for name in ("model", "tokens", "token_type", "scores"))
    pre = values.get("pre", "default") if model == "gpt2" else None
    is_bytes = model == "gpt2" and pre != "gemma4"
    special = _special_tokens(file, values, tokens)
    named = {values.get(f"{name}_token_id") for name in _SPECIAL.values()}  # used, whatever their type says
    types = [CONTROL if kind == UNUSED and i in named else kind for i, kind in enumerate(types)]
    vocab = {token: i for i, token in enumerate(tokens) if types[i] != UNUSED}
    added = [
        {"id": i, "content": token, **_PLAIN, "special": types[i] in (CONTROL, UNKNOWN)}
        for token, i in vocab.items()
        if types[i] in (CONTROL, USER_DEFINED) or (types[i] == UNKNOWN and not is_bytes)
    ]
    spec: dict[str, Any] = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added}
    merges = [str(merge).split(" ", 1) for merge in values.get("merges") or ()]
    if is_bytes:
        spec |= _byte_level(file, pre, merges)
    elif model == "llama":
        merges = _sentencepiece_merges(file, vocab, types, scores)
        spec |= _word_starts(merges, BYTE in types, special, values.get("add_space_prefix", True))
    else:
        spec |= _word_starts(merges, BYTE in types, special, False)
        newlines = {"type": "Split", "pattern": {"Regex": r"[^\n]+|\n+"}, "behavior": "Isolated", "invert": False}
        spec["pre_tokenizer"] = newlines
    spec["model"] |= {"vocab": vocab, "dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    adds_bos = values.get("add_bos_token", model == "llama" or pre in ADD_BOS) or model == "gemma4"
    adds_bos = adds_bos and special["bos_token"]
    adds_eos = values.get("add_eos_token", False) and special["eos_token"]
    around = [special["bos_token"]] * bool(adds_bos) + [None] + [special["eos_token"]] * bool(adds_eos)
    if len(around) > 1:
        spec["post_processor"] = _template(around, vocab)
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {key: token for key, token in special.items() if token is not None or key == "bos_token"}
    template = metadata.get("tokenizer.chat_template")
    named = [
        {"name": key.removeprefix("tokenizer.chat_template."), "template": value}
        for key, value in metadata.items()
        if key.startswith("tokenizer.chat_template.")
    ]
    if template is not None:
        config["chat_template"] = [{"name": "default", "template": template}, *named] if named else template
    return {"tokenizer.json": spec, "tokenizer_config.json": config}


def _special_tokens(file: Path, values: Mapping[str, Any], tokens: list[str]) -> dict[str, str | None]:
    """Return bos_token, eos_token, unk_token and pad_token."""
    special: dict[str, str | None] = {}
    for key, name in _SPECIAL.items():
        token_id = values.get(f"{name}_token_id")
        if token_id is not None and (type(token_id) is not int or not 0 <= token_id < len(tokens)):
            raise ValueError(
                f"{file}: tokenizer.ggml.{name}_token_id is {token_id!r}; expected an id below {len(tokens)}."
            )
        if key != name or key in ("bos", "eos"):  # the others end a turn
            special[f"{key}_token"] = None if token_id is None else tokens[token_id]
    return special


def _byte_level(file: Path, pre: Any, merges: list[list[str]]) -> dict[str, Any]:
    if pre not in RULES:
        raise ValueError(
            f"{file} splits text by the rule {pre!r}; expected one of {', '.join(sorted(RULES))}."
            f"{did_you_mean(str(pre), RULES)} Use the model's Hugging Face folder instead."
        )
    steps: list[dict[str, Any]] = []
    settings = dict[str, Any]()
    for kind, setting in RULES[pre]:
        if kind == "Split":
            steps.append({"type": "Split", "pattern": {"Regex": setting}, "behavior": "Isolated", "invert": False})
        elif kind == "Digits":
            steps.append({"type": "Digits", "individual_digits": setting})
        elif kind == "ByteLevel":
            steps.append({"type": kind, "add_prefix_space": False, "trim_offsets": False, "use_regex": setting})
        else:
            settings[kind] = setting
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    model = {"type": "BPE", "unk_token": None, "fuse_unk": False, "byte_fallback": False, **settings}
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": None,
        "decoder": byte_level,
        "model": {**model, "merges": merges},
    }


def _sentencepiece_merges(file: Path, vocab: dict[str, int], types: list[int], scores: list[float]) -> list[list[str]]:
    """Every way to join two pieces into a third is a merge. Merges of higher scores come first."""
    pieces = {token: i for token, i in vocab.items() if types[i] in (NORMAL, USER_DEFINED)}
    lengths, tokens, work = {len(piece) for piece in pieces}, {i: piece for piece, i in pieces.items()}, 0
    merges: list[tuple[float, int, int]] = []
    for token, i in pieces.items():
        for cut in range(1, len(token)):
            if cut in lengths and len(token) - cut in lengths:
                work += len(token)
                left, right = pieces.get(token[:cut]), pieces.get(token[cut:])
                if left is not None and right is not None:
                    merges.append((-scores[i], left, right))
        if work > _MAX_WORK:
            raise ValueError(
                f"{file} has a tokenizer of long tokens that begin and end alike. Download the file again."
            )
    return [[tokens[left], tokens[right]] for _, left, right in sorted(merges)]


def _word_starts(
    merges: list[list[str]], has_bytes: bool, special: Mapping[str, str | None], marks_start: bool
) -> dict[str, Any]:
    """BPE of text, in which a mark replaces spaces. With `marks_start` the mark is also put before every text."""
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": WORD_START}
    steps = [{"type": "Prepend", "prepend": WORD_START}] * marks_start + [spaces]
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": WORD_START}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    decoders += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * marks_start
    model = {"type": "BPE", "unk_token": special["unk_token"], "fuse_unk": True, "byte_fallback": has_bytes}
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {**model, "ignore_merges": False, "merges": merges},
    }


def _template(around: list[str | None], vocab: Mapping[str, int]) -> dict[str, Any]:
    """Return a post-processor that puts control tokens around a text, which is None in the list."""

    def pieces(sequences: str) -> list[dict[str, Any]]:
        text = [{"Sequence": {"id": one, "type_id": 0}} for one in sequences]
        parts = ([{"SpecialToken": {"id": token, "type_id": 0}}] if token else text for token in around)
        return [piece for part in parts for piece in part]

    tokens = {token: {"id": token, "ids": [vocab[token]], "tokens": [token]} for token in around if token}
    return {"type": "TemplateProcessing", "single": pieces("A"), "pair": pieces("AB"), "special_tokens": tokens}
