"""What differs between the models of a merge, by name. Numbers of different models can be averaged only if they mean
the same: the same computation, the same vocabulary, the same prompts.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HFTokenizer

from lean_ft.models import Decoder
from lean_ft.models.safetensors_file import StoredTensor
from lean_ft.system.foreign_values import JSON
from lean_ft.system.redaction import on_one_line
from lean_ft.system.whole_files import read_bounded, read_json
from lean_ft.tokenizers import Tokenizer

# Fields of config.json that change neither the computation nor the meaning of ids, or that are compared otherwise.
_HARMLESS = {
    *("_name_or_path", "name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "architectures"),
    *("id2label", "label2id", "problem_type", "task_specific_params"),
    *("initializer_range", "max_position_embeddings", "auto_map", "bos_token_id", "eos_token_id", "pad_token_id"),
    *("_attn_implementation", "_attn_implementation_autoset", "attn_implementation", "model_name", "return_dict"),
    *("embd_pdrop", "attn_pdrop", "resid_pdrop", "attention_dropout", "hidden_dropout", "unsloth_version"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "router_aux_loss_coef", "unsloth_fixed"),
}
# Parts of tokenizer.json that decide about ids and texts.
_PARTS = ("normalizer", "pre_tokenizer", "model", "post_processor", "decoder")
_MOST_SHOWN = 4


@dataclass(frozen=True)
class MergeInput:
    """One model of a merge, its tensors not yet read."""

    given: str  # as the user names it
    folder: Path
    model: Decoder  # on the meta device
    config: dict[str, Any]  # of config.json
    tensors: dict[str, StoredTensor]  # by name in the folder
    tokenizer: Tokenizer | None

    def __str__(self) -> str:
        return self.given


def check_distinct(folders: Mapping[str, Path], number: int) -> None:
    """Raise ValueError unless the folders, by the names given for them, are `number` different ones."""
    by_place = dict[Path, str]()
    for given, folder in folders.items():
        if (other := by_place.setdefault(folder.resolve(), given)) != given:
            raise ValueError(f"{other} and {given} are the same folder. Name different models.")
    if len(folders) < number:
        raise ValueError(f"a model is given twice: {', '.join(folders)}. Name different models.")


def check_same_computation(first: MergeInput, other: MergeInput) -> None:
    """Raise ValueError with the fields of config.json that differ, unless both models compute the same from the same
    weights."""
    for field in ("model_type", *(["id2label"] if first.model.config.num_scores > 1 else [])):
        ours, theirs = first.config.get(field), other.config.get(field)
        if ours != theirs:
            raise ValueError(_differing(first, other, field, ours, theirs))
    ours, theirs = (replace(one.model.config, max_positions=0, initializer_range=0.0) for one in (first, other))
    different = list(_differences(first.config, other.config))
    if ours == theirs and (not first.model.source.part_of or not different):
        return
    if not different:
        different = list(_differences(_plain(ours), _plain(theirs)))
    different.sort(key=lambda difference: isinstance(difference[1], list | dict))  # short values first
    more = f" They also differ in {', '.join(name for name, *_ in different[1:_MOST_SHOWN])}." if different[1:] else ""
    raise ValueError(_differing(first, other, *different[0]) + more)


def _differing(first: MergeInput, other: MergeInput, field: str, ours: object, theirs: object) -> str:
    return (
        f"the models compute differently: config.json has {field}={_shown(ours)} in {first} and {_shown(theirs)} in "
        f"{other}. Merge models that were trained from the same model."
    )


def _shown(value: object) -> str:
    return "no value" if value is None else on_one_line(json.dumps(value, default=str))[:80]


def _differences(ours: Mapping[str, Any], theirs: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the fields that differ, groups by their dotted names, without the harmless ones."""
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        mine, others = ours.get(name), theirs.get(name)
        if name in _HARMLESS or mine == others:
            continue
        if isinstance(mine, dict) and isinstance(others, dict):
            yield from _differences(mine, others, f"{place}{name}.")
        else:
            yield f"{place}{name}", mine, others


def _plain(config: object) -> dict[str, Any]:
    """A configuration's fields by name, of layers by their index."""
    if isinstance(config, tuple | list):
        return {str(i): _plain(one) for i, one in enumerate(config)}
    if not is_dataclass(config):
        return {"": config}
    return {
        field.name: _plain(value) if is_dataclass(value) or isinstance(value, tuple) else value
        for field in fields(config)
        for value in (getattr(config, field.name),)
    }


def check_same_tensors(first: MergeInput, other: MergeInput) -> None:
    """Raise ValueError with a tensor's name unless both have the same tensors of the same shapes."""
    for one, lacking in ((first, other), (other, first)):
        if names := sorted(one.tensors.keys() - lacking.tensors.keys()):
            more = f" and {len(names) - 1} more" if names[1:] else ""
            raise ValueError(
                f"{lacking} lacks the tensor {names[0]}{more}, which {one} has. Merge folders of the same form: export "
                "both with leanft export, or save both with transformers."
            )
    for name, tensor in first.tensors.items():
        if tensor.shape != other.tensors[name].shape:
            raise ValueError(
                f"{name} has the shape {list(tensor.shape)} in {first} and {list(other.tensors[name].shape)} in "
                f"{other}. Merge models of the same shapes."
            )


def check_same_tokens(
    first: str, ours: Tokenizer, other: str, theirs: Tokenizer, *, may_lack_tokens: bool = False
) -> None:
    """Raise ValueError with the first token that differs, or the part of the tokenizer's file. `may_lack_tokens`: the
    other tokenizer is the base model's, which may lack added tokens."""
    for i in range(max(ours.vocab_size, theirs.vocab_size)):
        mine, others = ours.token_text(i), theirs.token_text(i)
        if mine != others and not (may_lack_tokens and not others):
            shown = [repr(token)[:60] if token else "no token" for token in (mine, others)]
            raise ValueError(
                f"the vocabularies differ: id {i} is {shown[0]} in {first} and {shown[1]} in {other}. Merge models of "
                "one vocabulary."
            )
    if not may_lack_tokens:
        different = sorted(ours.control_tokens ^ theirs.control_tokens)
        for token in different[:1]:
            one, another = (first, other) if token in ours.control_tokens else (other, first)
            raise ValueError(
                f"the vocabularies differ: {token!r:.60} is a special token in {one} and not in {another}. Merge "
                "models of one vocabulary."
            )
    mine, others = _parts(ours), _parts(theirs)
    for part in [*mine, *(part for part in others if part not in mine)]:
        if mine.get(part) != others.get(part):
            raise ValueError(
                f"the tokenizers differ: {first} and {other} have another {part}, so a text may get other ids. If they "
                "give the same ids, copy the tokenizer's files from one folder into the other."
            )


def _parts(tokenizer: Tokenizer) -> dict[str, object]:
    """What turns a text into ids besides the list of tokens, by name."""
    file = tokenizer.folder / "tokenizer.json"
    if not file.is_file():
        return {"tokenizer.model": read_bounded(tokenizer.folder / "tokenizer.model")}
    spec = json.loads(HFTokenizer.from_str(json.dumps(read_json(file))).to_str())  # spelled as the library writes it
    return {f"{part} in tokenizer.json": _without_offsets(spec.get(part)) for part in _PARTS}


def _without_offsets(part: JSON) -> JSON:
    """A part without `trim_offsets`, which changes no ids."""
    if isinstance(part, dict):
        return {name: _without_offsets(value) for name, value in part.items() if name != "trim_offsets"}
    return [*map(_without_offsets, part)] if isinstance(part, list) and any(isinstance(p, dict) for p in part) else part


def check_same_templates(first: str, ours: Tokenizer, other: str, theirs: Tokenizer) -> None:
    """Raise ValueError with the place of the first difference between the chat templates."""
    for name in sorted({*ours.chat_templates, *theirs.chat_templates}):
        mine, others = (one.chat_templates.get(name) for one in (ours, theirs))
        if (mine or "").strip() == (others or "").strip():
            continue
        remedy = "Choose one with --chat-template, the name of its model or a file."
        if not mine or not others:
            one, another = (first, other) if mine else (other, first)
            what = "a chat template" if name == "default" else f"the chat template {on_one_line(name)[:40]!r}"
            raise ValueError(f"{one} has {what} and {another} has none. {remedy}")
        place = next((i for i, (a, b) in enumerate(zip(mine, others, strict=False)) if a != b), 0)
        shown = [repr(text[place : place + 40]) for text in (mine, others)]
        raise ValueError(
            f"the chat templates differ from character {place} on: {shown[0]} in {first} and {shown[1]} in {other}. "
            f"{remedy}"
        )
