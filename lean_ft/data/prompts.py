"""Prompts for sampling completions, with the other columns of each row as inputs for rewards.

A row has a `prompt` (text or messages) or `messages`. If `messages` end with an assistant message, that message becomes
the column `answer`. With a chat template, a plain-text prompt is wrapped as a user message unless `data.chat=false`.
All prompts are kept in memory.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from lean_ft.data.batch import Batch
from lean_ft.data.chats import Chat, check_text, parse_if_json, read_chat, read_tools
from lean_ft.data.foreign_fields import MEDIA, is_given, unwritten
from lean_ft.data.formats import (
    RENAME,
    check_chat_settings,
    reading,
    refuse_in_plain_text,
    variables_of,
    with_system,
    writes_chats,
)
from lean_ft.data.prepare import hash_of, tokenizer_digest
from lean_ft.data.report import unread_names
from lean_ft.data.rows import Row, names_of
from lean_ft.data.sources import list_sources, read_rows
from lean_ft.settings import PromptDataConfig, Sources
from lean_ft.system.shapes_only import stage
from lean_ft.system.units import counted
from lean_ft.tokenizers import Tokenizer


@dataclass(frozen=True)
class Prompt:
    """A tokenized prompt with the columns of its row."""

    ids: list[int]
    asked: Any
    """The prompt as in the row: text or messages."""
    columns: dict[str, Any]
    place: str
    """Location of the row for messages, such as `train.jsonl, line 12`."""
    unread: Sequence[str] = ()
    """Keys of messages and template variables that the chat template does not mention."""


@dataclass
class PromptReport:
    """Counts of the rows of a source."""

    rows: int = 0
    kept: int = 0
    too_long: int = 0
    bad_rows: int = 0
    left_out: str | None = None
    unit: str = "completions"  # of batches
    columns: list[str] = field(default_factory=list)
    """Columns for the rewards."""
    unread: dict[str, None] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [f"{counted(self.kept, 'prompts')} of {counted(self.rows, 'rows')}"]
        parts += [f"{self.too_long:,} dropped (longer than max_prompt_length)"] if self.too_long else []
        parts += [f"{self.bad_rows:,} unreadable rows skipped"] if self.bad_rows else []
        parts += [f"columns for rewards: {', '.join(self.columns)}"] if self.columns else []
        parts += unread_names(self.unread)
        return "; ".join(parts)


class Prompts:
    """Endless prompts. The order depends on the seed and the epoch; with `shuffle=False`, it is the file order. The
    caller tracks the position."""

    def __init__(
        self, prompts: list[Prompt], *, seed: int, report: PromptReport, fingerprint: str, shuffle: bool = True
    ) -> None:
        self._prompts, self._seed, self._shuffle = prompts, seed, shuffle
        self.report, self.fingerprint = report, fingerprint
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


def prompt_rows(config: PromptDataConfig, tokenizer: Tokenizer, seed: int) -> tuple[Prompts, list[Prompt] | None]:
    """Return the prompts of `config.source`, and the held-out prompts, if any.

    Held-out prompts come from `validation_source`, or are a `validation_fraction` drawn with `seed`. Raises ValueError
    with the place for unreadable files and rows, and if no prompt is left.
    """
    if stage() is not None:
        longest = Prompt([0] * config.max_prompt_length, "", {}, "")
        return Prompts([longest], seed=seed, report=PromptReport(), fingerprint=""), None
    digest = hashlib.blake2b(digest_size=16)
    report = PromptReport()
    prompts, held_out = list(_read(config, tokenizer, config.source, digest, report)), None
    if config.validation_source is not None:
        held_out = list(_read(config, tokenizer, config.validation_source, digest, PromptReport()))
    elif config.validation_fraction > 0:
        count = max(1, round(len(prompts) * config.validation_fraction))
        drawn = set(np.random.default_rng(seed).permutation(len(prompts))[:count].tolist())
        held_out = [prompts[i] for i in sorted(drawn)]
        prompts = [prompt for i, prompt in enumerate(prompts) if i not in drawn]
    if not prompts:
        raise ValueError(f"no prompt of {config.source} is left: {report}. Raise data.max_prompt_length.")
    report.kept = len(prompts)
    settings = config.model_dump(mode="json", include={"columns", "max_prompt_length", "system", "separator", "chat"})
    settings |= {"chat_template_kwargs": config.chat_template_kwargs} if config.chat_template_kwargs else {}
    settings |= {} if config.shuffle else {"shuffle": False}
    fingerprint = hash_of(digest.hexdigest(), tokenizer_digest(tokenizer), settings, config.validation_fraction)
    return Prompts(prompts, seed=seed, report=report, fingerprint=fingerprint, shuffle=config.shuffle), held_out


def _read(
    config: PromptDataConfig, tokenizer: Tokenizer, source: Sources, digest: Any, report: PromptReport
) -> Iterator[Prompt]:
    columns = [one.columns or {} for one in list_sources(source, config)]
    chat = writes_chats(config, tokenizer)
    check_chat_settings(config, tokenizer, None if tokenizer.chat_template else "this model has no chat template")
    for row in read_rows(source, digest, config):
        report.rows += 1
        try:
            with reading(row):
                prompt = _prompt(row, columns[row.source], config, tokenizer, chat)
        except ValueError:
            report.bad_rows += 1
            if config.on_bad_row == "raise" or report.bad_rows > config.max_bad_rows:
                raise
            continue
        if len(prompt.ids) > config.max_prompt_length:
            report.too_long += 1
            continue
        report.columns += [name for name in prompt.columns if name not in report.columns]
        report.unread |= dict.fromkeys(prompt.unread)
        yield prompt


def _prompt(row: Row, columns: dict[str, str], config: PromptDataConfig, tokenizer: Tokenizer, chat: bool) -> Prompt:
    if absent := [f"{ours}={theirs}" for ours, theirs in columns.items() if theirs not in row.fields]:
        raise ValueError(f"data.columns.{absent[0]}: the row has {names_of(row.fields)}.")
    fields = {name: value for name, value in row.fields.items() if name not in columns.values()}
    fields |= {ours: row.fields[theirs] for ours, theirs in columns.items() if theirs in row.fields}
    further = {name: value for name, value in fields.items() if name != "prompt"}  # for rewards
    asked = parse_if_json(fields.get("prompt"), "prompt")
    unread: list[str] = []
    if asked is None and "messages" in fields:
        asked = read_chat(further.pop("messages"), "messages").messages
        if asked[-1]["role"] == "assistant":
            further.setdefault("answer", asked[-1]["content"])
            asked = asked[:-1]
    if asked is None or asked == []:
        raise ValueError(
            f"the row has {names_of(row.fields)}; expected `prompt` (a text or messages) or `messages`. {RENAME}"
        )
    messages = read_chat(asked, "prompt").messages if isinstance(asked, list) else None
    if messages is None and not chat:
        refuse_in_plain_text({name: fields.get(name) for name in ("tools", "chat_template_kwargs")})
        refuse_in_plain_text(fields)
        text = check_text(asked, "`prompt`") + (config.separator or "")
        return Prompt(tokenizer.encode(text, add_special_tokens=True), asked, further, row.place, unread)
    if messages is None:
        messages = [{"role": "user", "content": check_text(asked, "`prompt`")}]
    messages = with_system(Chat(messages), config).messages
    tools, variables = read_tools(fields.get("tools")), variables_of(fields, config)
    unread += unwritten(messages, tools, variables, tokenizer.template_reads)
    if media := [name for name in MEDIA if is_given(fields.get(name)) and f"<{name.removesuffix('s')}>" in str(asked)]:
        raise ValueError(f"the prompt has a placeholder for `{media[0]}`, and {MEDIA[media[0]]}.")
    ids = tokenizer.render(messages, tools, add_generation_prompt=True, template_kwargs=variables)[0]
    return Prompt(ids, asked, further, row.place, unread)


# Batches --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PolicyBatch(Batch):
    """A batch of G sampled completions; A is the length of the longest completion in tokens.

    Each row holds a prompt and its completion. With shared prompts, the batch is one row: each prompt once, followed by
    its completions (`prefixes`).
    """

    index: Tensor  # (N,) int64: flattened position (0 to B * T - 1) that predicts a completion token
    label: Tensor  # (N,) int64
    place: Tensor  # (N,) int64: flattened position (0 to G * A - 1) of the token in (G, A)
    counts: Tensor  # (G, A) bool: trained tokens
    sampled: Tensor  # (G, A) float32: log-probabilities at sampling; 0 after the end of a completion
    old: Tensor | None  # (G, A) float32: log-probabilities of the policy before the update; None: current ones
    advantages: Tensor  # (G, A) float32
    answers: range
    """Indices of the completions in the rollout."""
    num_answers: int
    """Number of completions with a trained token; `num_targets` counts the tokens."""
    values: Tensor | None = None  # (G, A) float32: value model's prediction before each token, if the loss needs it
    returns: Tensor | None = None  # (G, A) float32: target of the prediction

    labels_whole_rows: ClassVar[bool] = True

    def without_targets(self) -> "PolicyBatch":
        return replace(super().without_targets(), counts=torch.zeros_like(self.counts), num_answers=0)
