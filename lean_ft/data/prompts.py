"""Prompts for sampling completions, with the other columns of each row as inputs for rewards.

A row has a `prompt` (text or messages) or `messages`. If `messages` end with an assistant message, that message becomes
the column `answer`. With a chat template, a plain-text prompt is wrapped as a user message unless `data.chat=false`.
All prompts are kept in memory.
"""

from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from lean_ft.data.chats import Chat, check_text, parse_if_json, read_chat
from lean_ft.data.columns import Document
from lean_ft.data.documents import Renderer, renderer_of
from lean_ft.data.foreign_fields import is_given
from lean_ft.data.formats import (
    FORMATS,
    Fields,
    RowReader,
    as_chat,
    how_to_rename,
    join,
    reading,
    refuse_in_plain_text,
    writes_chats,
)
from lean_ft.data.keys import contents_of_tokenizer, hash_of, tokenizer_digest
from lean_ft.data.media import UNREAD_FIELDS, refuse_media
from lean_ft.data.mixing import SourceMix
from lean_ft.data.near_duplicates import decided_by, note_held_out
from lean_ft.data.objective import Objective
from lean_ft.data.parts import PART_FIELDS, kinds_of, units_read, units_shown, unread_part_keys, without_contents
from lean_ft.data.report import DataReport
from lean_ft.data.rows import Digest, NamedDigest, Row, names_of
from lean_ft.settings import PromptDataConfig, PromptRowsConfig
from lean_ft.settings.source_names import source_names
from lean_ft.system.contents import UNRECORDED, Content, Contents
from lean_ft.system.world import world
from lean_ft.tokenizers import Passage, Tokenizer

# Names under which reward functions and environments get the run's own values (`lean_ft.online.rewards`).
TAKEN_NAMES = {"prompts", "completions", "prompt_ids", "completion_ids", "ended", "environments", "environment_reward"}
TAKEN_NAMES |= {"trainer_state", "log_metric", "log_extra"}


@dataclass(frozen=True)
class Prompt:
    """A tokenized prompt with the columns of its row."""

    ids: list[int]
    asked: Any
    """The prompt as in the row: text or messages, without the contents of parts that are not text."""
    columns: dict[str, Any]
    place: str
    """Location of the row for messages, such as `train.jsonl, line 12`."""
    document: Document | None = None
    """The ids with the columns of kinds; None in a run without kinds of columns."""
    source: str | None = None
    """The name of the row's source, if the rows have several."""

    @property
    def text(self) -> Document:
        """The prompt as a document without labels."""
        return Document.of(self.ids) if self.document is None else self.document


class Prompts:
    """Endless prompts. The order depends on the seed and the epoch; with `shuffle=False`, it is the file order. The
    caller tracks the position."""

    def __init__(
        self,
        prompts: list[Prompt],
        *,
        seed: int,
        report: DataReport,
        fingerprint: str,
        contents: Contents = UNRECORDED,
        shuffle: bool = True,
    ) -> None:
        self._prompts, self._seed, self._shuffle = prompts, seed, shuffle
        self.report, self.fingerprint, self.contents = report, fingerprint, contents
        self._orders: dict[int, np.ndarray] = {}  # the current epoch only

    def __len__(self) -> int:
        return len(self._prompts)

    def take(self, first: int, count: int) -> list[int]:
        """Return the numbers of `count` prompts from position `first`, counted across epochs."""
        return [self._at(place) for place in range(first, first + count)]

    def __getitem__(self, number: int) -> Prompt:
        return self._prompts[number]

    def _at(self, place: int) -> int:
        epoch, i = divmod(place, len(self._prompts))
        if not self._shuffle:
            return i
        if epoch not in self._orders:
            self._orders = {epoch: np.random.default_rng([self._seed, epoch]).permutation(len(self._prompts))}
        return int(self._orders[epoch][i])


def prompt_rows(
    config: PromptDataConfig, tokenizer: Tokenizer, seed: int, tools: Callable[[], list[dict[str, Any]]] = list
) -> tuple[Prompts, list[Prompt] | None]:
    """Return the prompts of `config.source`, and the held-out prompts, if any.

    tools: returns JSON schemas of functions, which the chat template writes into each prompt. Held-out prompts come
    from `validation_source`, or are a `validation_fraction` drawn with `seed`. Raises ValueError with the place for
    unreadable files and rows, and if no prompt is left.
    """

    def instead() -> tuple[Prompts, None]:
        kinds = kinds_of(tokenizer, config)
        document = replace(Document.of([0] * config.max_prompt_length), kinds=kinds)
        prompt = Prompt(document.ids.tolist(), "", {}, "", document)
        return Prompts([prompt], seed=seed, report=DataReport("prompts"), fingerprint=""), None

    return world().read(lambda: _read_prompts(config, tokenizer, seed, tools()), instead)


def _read_prompts(
    config: PromptDataConfig, tokenizer: Tokenizer, seed: int, tools: list[dict[str, Any]]
) -> tuple[Prompts, list[Prompt] | None]:
    digest, rows = NamedDigest(), config.rows(tools)
    mix = SourceMix.of(rows, seed)
    (prompts, report), held_out = _read(renderer_of(rows, tokenizer), digest), None
    kept = np.arange(len(prompts))
    if config.validation_source is not None:
        held_out, of_held_out = _read(renderer_of(rows, tokenizer, config.validation_source), digest)
        note_held_out(report, of_held_out)
    elif config.validation_fraction > 0:
        count = max(1, round(len(prompts) * config.validation_fraction))
        drawn = set(np.random.default_rng(seed).permutation(len(prompts))[:count].tolist())
        held_out = [prompts[i] for i in sorted(drawn)]
        kept = np.array([i for i in range(len(prompts)) if i not in drawn], dtype=np.int64)
    if not len(kept):
        raise ValueError(
            f"no prompt of {config.source} is left: {report.nothing_left()}. Raise data.max_prompt_length."
        )
    lengths = np.array([len(prompt.ids) for prompt in prompts], dtype=np.int64)
    mixture = mix.mixture(report.kept_by_source, lengths, np.zeros_like(lengths), kept)
    prompts = [prompts[i] for i in kept[mixture.rows]]
    report.kept, report.sources = len(prompts), mixture.uses()
    settings = config.model_dump(mode="json", include={"columns", "max_prompt_length", "system", "separator", "chat"})
    settings |= {"chat_template_kwargs": config.chat_template_kwargs} if config.chat_template_kwargs else {}
    settings |= {} if config.shuffle else {"shuffle": False}
    settings |= {"tools": tools} if tools else {}
    others = decided_by(rows)
    settings |= {} if mix.is_plain else {"mix": [*mix.identity, seed]}
    draws = settings, config.validation_fraction, *others
    fingerprint = hash_of(digest.hexdigest(), tokenizer_digest(tokenizer), *draws)
    schemas = [(str(tool.get("function", tool).get("name")), hash_of(tool)) for tool in tools]
    of_tools = [Content(f"the schema of the tool {name}", schema) for name, schema in schemas]
    contents = Contents([*digest.contents(), *contents_of_tokenizer(tokenizer), *of_tools, *others])
    made = Prompts(
        prompts, seed=seed, report=report, fingerprint=fingerprint, contents=contents, shuffle=config.shuffle
    )
    return made, held_out


def _read(render: Renderer, digest: Digest) -> tuple[list[Prompt], DataReport]:
    reader = render.reader
    assert isinstance(reader, PromptReader)
    report, prompts = render.empty_report(), list[Prompt]()
    names = source_names(render.sources.source)
    several = len({*names}) > 1
    for row in render.sources.rows(digest):
        documents, counts = render([row])
        report.add(counts)
        report.check_bad_rows(render.config.max_bad_rows)
        for one in documents:
            document = None if not one.kinds else replace(one, trained=np.zeros(len(one), dtype=bool))
            asked, columns = reader.read(row)
            source = names[row.source] if several else None
            prompts.append(Prompt(one.ids.tolist(), without_contents(asked), columns, row.place, document, source))
    for kind in render.kinds:
        kind.check(report)
    return prompts, report


@dataclass(frozen=True)
class PromptReader(RowReader):
    """Converts a row to a prompt. All other fields of the row are columns for rewards."""

    known: ClassVar[dict[str, Fields]] = {
        "prompts": Fields((), chat="messages", prompts=(("prompt",),), completion="answer")
    }

    def unread(self, row: Row) -> list[str]:
        renamed = self.formats[row.source].columns
        replaced = [ours for ours, theirs in renamed.items() if ours in row.fields and theirs != ours]
        return replaced + unread_part_keys(self.read(row)[0])

    def columns(self, row: Row) -> dict[str, Any]:
        return self.read(row)[1]

    def contents(self, row: Row) -> dict[str, Any]:
        asked, columns = self.read(row)
        return {"prompt": asked} | {name: columns[name] for name in PART_FIELDS if name in columns}

    def read(self, row: Row) -> tuple[Any, dict[str, Any]]:
        """Return the prompt, a text or messages, and the columns. Raises ValueError with the row's place."""
        columns = self.formats[row.source].columns
        with reading(row):
            row.check()
            if absent := [f"{ours}={theirs}" for ours, theirs in columns.items() if theirs not in row.fields]:
                raise ValueError(f"data.columns.{absent[0]}: the row has {names_of(row.fields)}.")
            fields = {name: value for name, value in row.fields.items() if name not in columns.values()}
            fields |= {ours: row.fields[theirs] for ours, theirs in columns.items()}
            if taken := sorted(TAKEN_NAMES.intersection(fields)):
                raise ValueError(
                    f"the rows have the column `{taken[0]}`, and reward functions and environments get another value "
                    "under this name. Rename the column in the data, or set "
                    f"data.columns.my_{taken[0]}={columns.get(taken[0], taken[0])}."
                )
            asked = parse_if_json(fields.pop("prompt", None), "prompt")
            if asked is None and "messages" in fields:
                asked = read_chat(fields.pop("messages"), "messages").messages
                if asked[-1]["role"] == "assistant":
                    fields.setdefault("answer", asked.pop()["content"])
            if asked is None or asked == []:
                raise ValueError(
                    f"the row has {names_of(row.fields)}; expected `prompt` (a text or messages) or `messages`. "
                    f"{how_to_rename(fields, [('prompt',), ('messages',)])}"
                )
            return asked, fields

    def passages(self, row: Row) -> list[Passage | Document]:
        asked, fields = self.read(row)
        with reading(row):
            if not isinstance(asked, list) and not writes_chats(self.config, self.tokenizer):
                refuse_in_plain_text(fields)
                text = check_text(asked, "`prompt`") + (self.config.separator or "")
                ids = np.array(self.tokenizer.encode(text, add_special_tokens=True), dtype=np.int32)
                return [Document(ids, np.zeros(len(ids), dtype=bool))]
            present = {name: value for name, value in fields.items() if is_given(value)}
            for name, reason in UNREAD_FIELDS.items():
                if name in present and f"<{name.removesuffix('s')}>" in str(asked):
                    raise ValueError(f"the prompt has a placeholder for `{name}`, and {reason}.")
            shown = units_shown({**fields, "prompt": asked})
            refuse_media(present, of_prompt=True, shown=shown, read=units_read(self.tokenizer))
            chat = join(as_chat(asked, "prompt"), Chat([]), train_prompt=False)
            read = {name: fields.get(name) for name in ("tools", "chat_template_kwargs", *PART_FIELDS)}
            assert isinstance(self.config, PromptRowsConfig)
            if self.config.tools:
                if is_given(fields.get("tools")):
                    raise ValueError(
                        "the row has `tools`, and the run sets tools.functions or an environment. Remove one of them."
                    )
                read["tools"] = self.config.tools
            return [self.render(chat, read, is_prompt=True)]

    def fit(self, documents: list[Document], place: str, report: DataReport) -> list[Document]:
        if len(documents[0]) <= self.config.max_length:
            return documents
        report.drop("longer than max_prompt_length")
        return []


class PromptData(Objective):
    """Prompts without a label."""

    reader = PromptReader
    unit = "prompts"
    recipe = "grpo"

    def is_of_file(self, fields: Set[str], format_name: str) -> bool:
        return "prompt" in fields and not any(fields >= {*format.required} for format in FORMATS.values())


OBJECTIVE = PromptData()
