"""Settings of data: where rows come from, how long they may be, and what each objective makes of them."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator, model_validator

from lean_ft.settings.base import Fraction, OwnFunction, Settings
from lean_ft.system.own_functions import check_function

FormatName = Annotated[
    Literal[
        "auto",
        "messages",
        "sharegpt",
        "alpaca",
        "prompt_completion",
        "input_output",
        "text",
        "tokens",
        "preference",
        "unpaired",
    ]
    | OwnFunction,
    AfterValidator(check_function),
]


class Source(Settings):
    """One of several sources of rows."""

    path: str = Field(description="A file, a glob, or a Hugging Face dataset.")
    format: FormatName | None = Field(default=None, description="As data.format, for this source alone.")
    columns: dict[str, str] | None = Field(default=None, description="As data.columns, for this source alone.")
    weight: PositiveFloat = Field(
        default=1.0,
        description="How often an epoch shows each row of this source: 2 shows all twice, 0.5 a half of them, drawn by "
        "the seed and the same in every epoch.",
    )
    subset: str | None = Field(default=None, description="As data.subset, for this source alone.")
    split: str | None = Field(default=None, description="As data.split, for this source alone.")


Sources = str | list[str | Source]


class RowsConfig(Settings):
    """Where rows come from and how they are read."""

    source: Sources = Field(
        description="A JSONL, JSON, CSV, TSV, TXT or Parquet file (text ones may be gzip or zstd), a glob of them, or a "
        "Hugging Face dataset (org/name, or a folder that save_to_disk wrote); or a list of these, each a path or "
        "{path, format, columns, weight, subset, split}."
    )
    format: FormatName = Field(
        "auto",
        description="How a row is read. `auto` decides from the fields of the first rows of a source. `my_rows.py:convert` is a "
        "function of your own from a row to one of the formats.",
    )
    columns: dict[str, str] = Field(
        default_factory=dict, description="Field names, ours to yours: `columns.prompt=question`."
    )
    subset: str | None = Field(
        None, description="The subset (configuration) of a Hugging Face dataset that has several."
    )
    split: str = Field(
        "train",
        description="The split of a Hugging Face dataset, or a slice of it, in percent or rows: `train[:95%]`, "
        "`train[100:200]`. A file has the one split `train`.",
    )
    streaming: bool = Field(False, description="Read a Hugging Face dataset as it arrives, without storing it first.")
    on_bad_row: Literal["raise", "skip"] = Field(
        "raise",
        description="What a row that cannot be read does: stop with its file, line, field and reason, or be left out and "
        "counted.",
    )
    max_bad_rows: NonNegativeInt = Field(
        100, description="Bad rows that `on_bad_row=skip` leaves out before it stops after all."
    )
    validation_source: Sources | None = Field(
        None, description="Held-out rows for evaluation; what `source` takes, without weights."
    )
    validation_fraction: Fraction = Field(
        0.0,
        description="Share of the source's rows held out for evaluation when there is no validation_source.",
    )
    chat_template: Path | None = Field(
        None, description="A file of a Jinja chat template, in place of the model's; it is saved with the checkpoints."
    )
    system: str | None = Field(
        None, description="A system message put in front of every chat that does not begin with one."
    )
    separator: str | None = Field(
        None,
        description="What stands between a prompt and its completion where a model without a chat template reads them as "
        "one text; in a shell 'data.separator=\"\\n\"' is a line break. null: nothing, and an empty line in alpaca.",
    )
    chat: Literal["auto"] | bool = Field(
        "auto",
        description="Whether a prompt and a completion that are plain strings become a user's and an assistant's message, "
        "written with the chat template. `auto`: if the model has one. `false`: plain text, joined by `separator` and ended "
        "by eos. Rows of messages are always chats.",
    )
    shuffle: bool = Field(
        True,
        description="Draw a new order of rows for each epoch. `false`: rows in the order of the files, packed rows in the "
        "order they were packed, the same in every epoch. The first batch is then not the largest one.",
    )

    @model_validator(mode="after")
    def _says_what_is_held_out(self) -> "RowsConfig":
        held_out = [self.validation_source] if isinstance(self.validation_source, str) else self.validation_source or []
        unsaid = next((one for one in held_out if isinstance(one, str) or one.split is None), None)
        if "[" in self.split and unsaid is not None:
            path = unsaid if isinstance(unsaid, str) else unsaid.path
            raise ValueError(
                f"split={self.split} is a part of source, and validation_source={path} does not say which part is held out. Write "
                f"validation_source=[{{path: {path}, split: 'train[95%:]'}}], or split: train for all rows."
            )
        return self

    @field_validator("validation_source")
    @classmethod
    def _has_no_weights(cls, sources: Sources | None) -> Sources | None:
        if not isinstance(sources, str | None) and any(isinstance(s, Source) and s.weight != 1 for s in sources):
            raise ValueError("a weight says how often a row is trained on; held-out rows are each seen once.")
        return sources


class PromptDataConfig(RowsConfig):
    """Prompts that the model answers itself, with what its answers are judged by."""

    max_prompt_length: PositiveInt = Field(
        512, description="Tokens that a prompt may have; rows with longer ones are left out and counted."
    )


class DataConfig(RowsConfig):
    """What every objective's data has: where rows come from, how long they may be, and how they become batches.

    A recipe's `data` is of a subclass, and that tells `lean_ft.data` how a row is rendered: SFTDataConfig,
    PreferenceDataConfig, or a recipe's own subclass of one of them.
    """

    sides: ClassVar[tuple[str, ...]] = ("",)
    """The sequences that a row of data becomes, by their names; they stay together in one batch."""
    tells: ClassVar[Literal["", "label", "margin"]] = ""
    """What a row tells of them beside their text."""

    max_length: Annotated[int, Field(ge=2)] = Field(2048, description="Longest sequence, in tokens.")
    overflow: Literal["truncate", "drop", "raise"] = Field(
        "truncate", description="What happens to a row longer than max_length."
    )
    truncation_side: Literal["right", "left"] = Field(
        "right", description="Where `overflow=truncate` cuts: `right` keeps the beginning, `left` the end."
    )
    packing: Literal["none", "bfd", "bfd_split", "wrapped", "padding_free"] = Field(
        "none",
        description="`none` pads each batch to its longest row. `bfd` fills rows of max_length with whole documents "
        "(best-fit decreasing) that cannot see each other; `bfd_split` does so after cutting longer documents, and loses "
        "nothing. `wrapped` lays all documents end to end and cuts every max_length tokens: those in one row see each "
        "other. `padding_free` makes a batch of whole documents, however long, one row without padding.",
    )
    batch_tokens: PositiveInt | None = Field(
        None,
        description="Most positions of a batch, padding included, for packing=none: batches hold as many rows of about "
        "one length as fit, in place of batch_size.",
    )
    num_processes: PositiveInt | None = Field(
        None, description="Processes that tokenise many rows; null starts one for every core that this one may use."
    )
    cache_dir: Path | None = Field(
        None,
        description="Where prepared data is kept for the next start; null is the environment's LEAN_FT_CACHE, or "
        "lean_ft/data in the user's cache (~/.cache). It can be deleted at any time.",
    )
    cache_gib: PositiveFloat = Field(
        50.0, description="Size, in GiB, above which the data that was not used for longest is deleted from cache_dir."
    )

    @property
    def packs_rows(self) -> bool:
        """Whether rows of one length are filled with documents."""
        return self.packing not in ("none", "padding_free")

    @property
    def longest(self) -> int | None:
        """Tokens that one sequence may have; None where packing takes any length."""
        return self.max_length if self.packing in ("none", "bfd") else None

    @model_validator(mode="after")
    def _check_packing(self) -> "DataConfig":
        if self.longest is None and self.overflow != "truncate":
            raise ValueError(
                f"overflow={self.overflow} cannot be with packing={self.packing}, to which no row is too long. Leave it "
                "out, or set packing=bfd or packing=none."
            )
        if self.batch_tokens is not None and self.packing != "none":
            raise ValueError(
                f"batch_tokens={self.batch_tokens} cannot be with packing={self.packing}: it is for rows that are not "
                "packed. Set packing=none, or leave it out and set batch_size."
            )
        if self.batch_tokens is not None and not self.shuffle:
            raise ValueError(
                f"batch_tokens={self.batch_tokens} groups rows of similar length, and shuffle=false keeps the order of the "
                "files. Leave one of them out."
            )
        if self.batch_tokens is not None and self.batch_tokens < self.max_length * len(self.sides):
            times = f" for each of {len(self.sides)} answers" if len(self.sides) > 1 else ""
            raise ValueError(
                f"batch_tokens={self.batch_tokens} is less than max_length={self.max_length}{times}, so the longest row would "
                "fit into no batch. Raise the one or lower the other."
            )
        return self


class SFTDataConfig(DataConfig):
    """Single answers to learn from."""

    train_on: Literal["completion", "assistant", "last", "all"] = Field(
        "assistant",
        description="Which tokens of a chat carry a label: every assistant message (`assistant`), only those behind the "
        "prompt of a prompt/completion row (`completion`; in other rows the same as `assistant`), only the last one "
        "(`last`), or all tokens. Each includes the token that ends its turn. A message with `train: false` or "
        "`weight: 0` never does. Rows of `text` are trained whole; `tokens` follow their labels.",
    )


class AnswerDataConfig(DataConfig):
    """Answers to learn from as a whole, each behind its prompt."""

    max_prompt_length: PositiveInt | None = Field(
        None, description="Tokens of a prompt, of which the last ones are kept; null keeps all."
    )
    max_completion_length: PositiveInt | None = Field(
        None, description="Tokens of a chosen or rejected answer, of which the first ones are kept; null keeps all."
    )
    truncation_side: Literal["right", "left"] = Field(
        "right",
        description="What `overflow=truncate` cuts of prompt and answer together, after the two limits above: the end of "
        "the longer answer (`right`), or the beginning of the prompt (`left`), which both answers share.",
    )

    @property
    def longest(self) -> int | None:
        return self.max_length

    @model_validator(mode="after")
    def _keeps_answers_whole(self) -> "AnswerDataConfig":
        if self.packing in ("bfd_split", "wrapped"):
            raise ValueError(
                f"packing={self.packing} cuts sequences, and the answers of a pair are compared whole. Set packing=bfd, "
                "packing=padding_free or packing=none."
            )
        return self


class PreferenceDataConfig(AnswerDataConfig):
    """Pairs of a chosen and a rejected answer to learn from."""

    sides: ClassVar[tuple[str, ...]] = ("chosen", "rejected")

    shared_prompt: Literal["auto"] | bool = Field(
        "auto",
        description="Compute the prompt of a pair once for both answers, which stand behind it in one row and do not see each "
        "other: P + C + R positions in place of 2P + C + R, and the same numbers to rounding. `auto` does where the model "
        "allows it: all do but those whose rotary scaling changes with the length of the text within max_length.",
    )


class UnpairedDataConfig(AnswerDataConfig):
    """Single answers, each with a label that says whether it is desirable; of a pair both answers, each by itself."""

    tells: ClassVar[Literal["", "label", "margin"]] = "label"


class RewardDataConfig(PreferenceDataConfig):
    """Pairs of a chosen and a rejected answer, which may tell by how much the one is better: their `margin`."""

    tells: ClassVar[Literal["", "label", "margin"]] = "margin"
