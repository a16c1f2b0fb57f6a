"""The files that make a model's folder one of sentence-transformers: which modules read a text's vector or score.

    modules.json                       the modules in order, and their folders
    sentence_bert_config.json          the longest text; that texts are not written as chats
    config_sentence_transformers.json  prompts of queries and passages
    1_Pooling/config.json              how hidden states become a vector
    2_Dense/config.json ...            layers after pooling

Written names are those that every release since 2.3 reads; for rerankers since 5.4. Fields that would change a vector
and are not computed here are refused with the file's name.

Source: sentence-transformers 6.2.0: base/model.py, base/modules/transformer.py and dense.py, modules/pooling.py.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

from lean_ft.embedding.vectors import Pooling
from lean_ft.models.config import DenseConfig
from lean_ft.models.modules_json import (
    ACTIVATIONS,
    MODULES,
    Module,
    check_order,
    dense_config,
    fields_of_dense,
    read_modules,
    refuse_others,
)
from lean_ft.system.config_fields import MAX_COUNT, ConfigFields
from lean_ft.system.foreign_values import JSON, check_text
from lean_ft.system.whole_files import kind, read_json

PROMPTS = "config_sentence_transformers.json"
LENGTH = "sentence_bert_config.json"
_MOST_PROMPTS = 1000
_MOST_CHARACTERS = 100_000  # of a prompt or a template

_LENGTH_FILES = (
    LENGTH,
    *(
        f"sentence_{one}_config.json"
        for one in ("roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
    ),
)
_MODES: dict[Pooling, tuple[str, str]] = {
    "last": ("lasttoken", "pooling_mode_lasttoken"),
    "mean": ("mean", "pooling_mode_mean_tokens"),
    "cls": ("cls", "pooling_mode_cls_token"),
}
_OTHER_FLAGS = ("pooling_mode_max_tokens", "pooling_mode_mean_sqrt_len_tokens", "pooling_mode_weightedmean_tokens")
_PASSAGE_PROMPTS = ("document", "passage", "corpus")  # encode_document takes the first of them
_SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
# How the model's own files are opened, which lean_ft decides itself.
_OF_OPENING = ("model_args", "model_kwargs", "config_args", "config_kwargs", "tokenizer_args", "processor_kwargs")
_HARMLESS_OPENING = (
    "trust_remote_code",
    "padding_side",
    "use_fast",
    "attn_implementation",
    "torch_dtype",
    "dtype",
    "fix_mistral_regex",
    "device_map",
    "add_pooling_layer",
)
_QUERY, _PASSAGE = "{query}", "{passage}"


@dataclass(frozen=True)
class VectorsOf:
    """How the vector of a text is made, as a folder's files say."""

    pooling: Pooling = "last"
    normalize: bool = True
    """Scale vectors to length 1."""
    query_prompt: str = ""
    passage_prompt: str = ""
    max_length: int | None = None
    """Tokens of the longest text, with those that the tokenizer adds. None: the model's context."""
    dense: tuple[DenseConfig, ...] = ()
    other_prompts: Mapping[str, str] = field(default_factory=dict)
    """Further prompts by name, which are kept."""
    default_prompt: str | None = None
    """The name of the prompt of texts that are neither queries nor passages."""
    similarity: str = "cosine"

    def prompt(self, used_as: Literal["query", "passage"] | None) -> str:
        """Return the text that goes before a query, a passage, or a text that is neither."""
        if used_as is not None:
            return self.query_prompt if used_as == "query" else self.passage_prompt
        named = {**self.other_prompts, "query": self.query_prompt, "document": self.passage_prompt}
        return "" if self.default_prompt is None else named[self.default_prompt]

    @classmethod
    def read(cls, folder: Path) -> "VectorsOf | None":
        """Read a folder's files. None if it has no modules.json, or if its modules are a reranker's.

        Raises ValueError with the file's name for files that are malformed or ask for what lean_ft does not compute.
        """
        modules = read_modules(folder)
        if modules is None or _is_reranker(folder, modules):
            return None
        check_order(folder / MODULES, modules)
        dense = tuple(dense_config(folder, one.path) for one in modules if one.kind == "Dense")
        texts, prompts = _Length.read(folder, "feature-extraction"), _Prompts.read(folder, "SentenceTransformer")
        named = dict(prompts.named)
        query, passage = named.pop("query", ""), next((named.pop(n) for n in _PASSAGE_PROMPTS if n in named), "")
        default = (
            "document" if prompts.default in _PASSAGE_PROMPTS and prompts.default not in named else prompts.default
        )
        pooling = next(one.path for one in modules if one.kind == "Pooling")
        return cls(
            _pooling(folder / pooling / "config.json", any(prompts.named.values())),
            any(one.kind == "Normalize" for one in modules),
            query,
            passage,
            texts.max_length,
            dense,
            named,
            default,
            prompts.similarity,
        )

    def files(self, hidden_size: int) -> dict[str, JSON]:
        """Return the JSON values of the files by name. `hidden_size`: of the vectors that are pooled."""
        folders = [("Transformer", ""), ("Pooling", "1_Pooling"), *(("Dense", one.folder) for one in self.dense)]
        folders += [("Normalize", f"{len(folders)}_Normalize")] if self.normalize else []
        flags: dict[str, JSON] = {flag: mode == self.pooling for mode, (_, flag) in _MODES.items()}
        flags |= dict.fromkeys(_OTHER_FLAGS, False)
        texts = _texts_config("feature-extraction", False, "last_hidden_state", "token_embeddings", self.max_length)
        named: dict[str, JSON] = {**self.other_prompts, "query": self.query_prompt, "document": self.passage_prompt}
        dense: dict[str, JSON] = {f"{one.folder}/config.json": fields_of_dense(one) for one in self.dense}
        return {
            MODULES: _listed_modules(folders),
            LENGTH: texts,
            PROMPTS: {
                "model_type": "SentenceTransformer",
                "prompts": named,
                "default_prompt_name": self.default_prompt,
                "similarity_fn_name": self.similarity,
            },
            "1_Pooling/config.json": {"word_embedding_dimension": hidden_size, **flags, "include_prompt": True},
            **dense,
        }


@dataclass(frozen=True)
class ScoresOf:
    """How the score of a passage for a query is made, as a folder's files say."""

    template: str
    """The text that is scored at its last token, with `{query}` and `{passage}`; control tokens are spelled out."""
    yes_no: tuple[int, int] | None = None
    """Two ids, whose logits' difference is the score. None: the model has a score layer."""
    max_length: int | None = None
    """Tokens of the longest text; a longer one loses the end of its passage. None: the model's context."""

    @classmethod
    def read(cls, folder: Path) -> "ScoresOf | None":
        """Read a folder's files. None if it has no modules.json, or if its modules make vectors.

        Raises ValueError with the file's name for files that are malformed, or of a reranker without a template.
        """
        modules = read_modules(folder)
        if modules is None or not _is_reranker(folder, modules):
            return None
        if kinds := [one.kind for one in modules if one.kind not in ("Transformer", "LogitScore")]:
            raise ValueError(f"{folder / MODULES}: the module {kinds[0]} of a reranker is not supported.")
        logits = next((one for one in modules if one.kind == "LogitScore"), None)
        task = "sequence-classification" if logits is None else "text-generation"
        texts = _Length.read(folder, task)
        yes_no = None if logits is None else _yes_no(folder / logits.path / "config.json")
        own = _object(folder / PROMPTS).object("lean_ft")
        if own.get("template") is None:
            raise ValueError(
                f"{folder / PROMPTS} has no field lean_ft with the template of a query and a passage. Give the "
                "template that the model was trained with."
            )
        return cls(check_template(own.get("template"), f"{own.where}: template"), yes_no, texts.max_length)

    def files(self) -> dict[str, JSON]:
        """Return the JSON values of the files by name. CrossEncoder writes pairs with the template, and its `predict`
        returns the sigmoid of the score."""
        folders = [("Transformer", "")]
        folders += [] if self.yes_no is None else [("LogitScore", "1_LogitScore")]
        task, output = (
            ("sequence-classification", "scores") if self.yes_no is None else ("text-generation", "causal_logits")
        )
        texts = _texts_config(task, True, "logits", output, self.max_length)
        texts["processing_kwargs"] = {"chat_template": {"chat_template": as_chat_template(self.template)}}
        files: dict[str, JSON] = {
            MODULES: _listed_modules(folders),
            LENGTH: texts,
            PROMPTS: {
                "model_type": "CrossEncoder",
                "activation_fn": ACTIVATIONS["Sigmoid"],
                "prompts": {},
                "default_prompt_name": None,
                "lean_ft": {"template": self.template},
            },
        }
        if self.yes_no is not None:
            yes, no = self.yes_no
            files["1_LogitScore/config.json"] = {"true_token_id": yes, "false_token_id": no}
        return files


def as_chat_template(template: str) -> str:
    """Return the chat template of a pair's messages, of the roles `query` and `document`, that writes the template."""
    contents = {_QUERY: "query", _PASSAGE: "document"}
    pieces = []
    for piece in re.split(f"({re.escape(_QUERY)}|{re.escape(_PASSAGE)})", template):
        role = contents.get(piece)
        chosen = f"messages | selectattr('role', 'eq', '{role}') | map(attribute='content') | first"
        pieces.append(f"{{{{ {chosen if role else json.dumps(piece)} }}}}" if piece else "")
    return "".join(pieces)


def check_template(template: object, what: str) -> str:
    """Return the template. Raises ValueError unless it is a text with one `{passage}` and one or more `{query}`."""
    if not isinstance(template, str) or len(template) > _MOST_CHARACTERS:
        raise ValueError(f"{what} is {kind(template)}; expected a text of at most {_MOST_CHARACTERS:,} characters.")
    if template.count(_PASSAGE) != 1 or _QUERY not in template:
        raise ValueError(f"{what} is {template!r:.200}; expected {_QUERY}, and {_PASSAGE} once.")
    return check_text(template, what, markers=False)


# Reading -------------------------------------------------------------------------------------------------------------


def _is_reranker(folder: Path, modules: Iterable[Module]) -> bool:
    return (
        any(one.kind == "LogitScore" for one in modules)
        or read_json(folder / PROMPTS).get("model_type") == "CrossEncoder"
    )


def _object(file: Path) -> ConfigFields:
    return ConfigFields(read_json(file), {}, str(file), null_is_absent=True)


def _pooling(file: Path, has_prompts: bool) -> Pooling:
    fields = ConfigFields(read_json(file, "it says how a text's vector is pooled."), {}, str(file), True)
    for name in ("word_embedding_dimension", "embedding_dimension"):
        if fields.get(name) is not None:
            fields.count(name)
    flags: dict[str, Pooling | None] = {flag: mode for mode, (_, flag) in _MODES.items()}
    flags |= dict.fromkeys(_OTHER_FLAGS)
    chosen = [flag for flag in flags if fields.get(flag) is not None and fields.flag(flag)]
    found: list[Pooling | None]
    mode = fields.get("pooling_mode")
    if mode is not None:
        chosen = mode if isinstance(mode, list) else [mode]
        by_name: dict[object, Pooling] = {name: own for own, (name, _) in _MODES.items()}
        found = [by_name.get(one) if isinstance(one, str) else None for one in chosen]
    else:  # as sentence-transformers reads no flag at all
        found = [flags[flag] for flag in chosen] or ["mean"]
    pooling = found[0] if len(found) == 1 else None
    if pooling is None:
        named = ", ".join(f"{one!r:.80}" for one in chosen[:6])
        raise ValueError(f"{file}: the pooling {named} is not supported; expected one of lasttoken, mean and cls.")
    leaves_out = fields.get("include_prompt") is not None and not fields.flag("include_prompt")
    if leaves_out and pooling != "last" and has_prompts:
        raise ValueError(
            f"{file}: include_prompt is false, so {pooling} pooling leaves out the tokens of a prompt. That is not "
            "supported."
        )
    refuse_others(fields)
    return pooling


@dataclass(frozen=True)
class _Length:
    """sentence_bert_config.json."""

    max_length: int | None

    @classmethod
    def read(cls, folder: Path, task: str) -> "_Length":
        file = next((folder / name for name in _LENGTH_FILES if (folder / name).is_file()), folder / LENGTH)
        fields = _object(file)
        longest = _of_tokenizer(folder)
        if fields.get("max_seq_length") is not None:
            longest = fields.count("max_seq_length")
        fields.expect("lower-case texts by the normalizer of tokenizer.json instead", do_lower_case=False)
        fields.expect(transformer_task=task)
        for name in _OF_OPENING:
            for inner in fields.object(name).values:
                if inner not in _HARMLESS_OPENING:
                    raise ValueError(f"{file}: {name}.{inner:.80} is not supported.")
        modalities = fields.object("modality_config").values
        if task == "feature-extraction" and modalities:
            if "message" in modalities:
                raise ValueError(
                    f"{file}: modality_config has `message`, so texts are written as chats. lean_ft reads "
                    "them as they are."
                )
            expected = {"method": "forward", "method_output_name": "last_hidden_state"}
            if modalities.get("text") != expected:
                raise ValueError(
                    f"{file}: modality_config has the text {modalities.get('text')!r:.120}; expected {expected}."
                )
            fields.expect(module_output_name="token_embeddings")
        fields.read |= {"module_output_name", "unpad_inputs"}
        if task != "feature-extraction":
            fields.read.add("processing_kwargs")  # repeats the template
        refuse_others(fields)
        return cls(longest)


def _of_tokenizer(folder: Path) -> int | None:
    """The longest text by tokenizer_config.json. Tokenizers without a limit have a huge number."""
    longest = read_json(folder / "tokenizer_config.json").get("model_max_length")
    return longest if isinstance(longest, int) and 0 < longest <= MAX_COUNT else None


@dataclass(frozen=True)
class _Prompts:
    """config_sentence_transformers.json."""

    named: Mapping[str, str]
    default: str | None
    similarity: str

    @classmethod
    def read(cls, folder: Path, model_type: str) -> "_Prompts":
        fields = _object(folder / PROMPTS)
        fields.expect(model_type=model_type)
        named = fields.object("prompts").values
        if len(named) > _MOST_PROMPTS:
            raise ValueError(f"{fields.where}: {len(named):,} prompts; expected at most {_MOST_PROMPTS:,}.")
        for name, prompt in named.items():
            if not isinstance(prompt, str) or len(prompt) > _MOST_CHARACTERS:
                raise ValueError(
                    f"{fields.where}: the prompt {name!r:.80} is {kind(prompt)}; expected a text of at most "
                    f"{_MOST_CHARACTERS:,} characters."
                )
            check_text(name, f"{fields.where}: the name of a prompt")
            check_text(prompt, f"{fields.where}: the prompt {name!r:.80}")
        default = fields.get("default_prompt_name")
        if default is not None and (not isinstance(default, str) or default not in named):
            raise fields.wrong("default_prompt_name", "the name of a prompt")
        similarity = _SIMILARITIES[0]
        if fields.get("similarity_fn_name") is not None:
            similarity = fields.one_of("similarity_fn_name", _SIMILARITIES)
        fields.read |= {"__version__", "requirements"}
        refuse_others(fields)
        return cls(cast(dict[str, str], named), default, similarity)


def _yes_no(file: Path) -> tuple[int, int]:
    fields = ConfigFields(read_json(file, "it names the tokens whose logits are compared."), {}, str(file), True)
    yes_no = fields.count("true_token_id", least=0), fields.count("false_token_id", least=0)
    fields.expect(module_input_name="causal_logits")
    refuse_others(fields)
    return yes_no


# Writing -------------------------------------------------------------------------------------------------------------


def _listed_modules(folders: list[tuple[str, str]]) -> list[JSON]:
    logits = "sentence_transformers.cross_encoder.modules.logit_score"
    return [
        {
            "idx": i,
            "name": str(i),
            "path": path,
            "type": f"{logits if one == 'LogitScore' else 'sentence_transformers.models'}.{one}",
        }
        for i, (one, path) in enumerate(folders)
    ]


def _texts_config(task: str, as_chats: bool, read: str, output: str, max_length: int | None) -> dict[str, JSON]:
    """The value of sentence_bert_config.json. Without `modality_config`, releases since 5.4 may write a text as a chat
    if the tokenizer has a chat template."""
    how: dict[str, JSON] = {"method": "forward", "method_output_name": read}
    modalities: dict[str, JSON] = {"text": how}
    modalities |= {"message": {**how, "format": "flat"}} if as_chats else {}
    longest: dict[str, JSON] = {} if max_length is None else {"max_seq_length": max_length}
    return {
        **longest,
        "do_lower_case": False,
        "transformer_task": task,
        "modality_config": modalities,
        "module_output_name": output,
    }


__all__ = ["ScoresOf", "VectorsOf", "as_chat_template", "check_template"]
