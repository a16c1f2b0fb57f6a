"""Settings of data: sources, lengths, packing, and the data of each objective."""

from string import Formatter
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from lean_ft.settings.base import FilePath, Fraction, Name, OwnFunction, Settings
from lean_ft.settings.shares import TokenShare, shares_of
from lean_ft.settings.source_names import SourceName
from lean_ft.system.user_functions import check_function

if TYPE_CHECKING:
    from lean_ft.data.objective import Objective

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
        "classification",
        "tagged_words",
        "tagged_spans",
        "steps",
        "query_positive",
        "sentence1_sentence2_score",
        "passages",
    ]
    | OwnFunction,
    AfterValidator(check_function),
]


class DataSource(Settings):
    """One of several data sources."""

    path: Name
    """A file, a glob pattern, or a Hugging Face dataset."""
    format: FormatName | None = None
    """Same as data.format, for this source only."""
    columns: dict[str, str] | None = None
    """Same as data.columns, for this source only."""
    weight: PositiveFloat = 1.0
    """How often an epoch uses each row of this source. 2 uses all rows twice; 0.5 uses half of them, chosen by the seed
    and the same in every epoch."""
    share: TokenShare | None = None
    """Part of an epoch's tokens that this source gives, above 0 and up to 1; data.share_of says which tokens count. The
    shares of all sources add up to 1, and one source without a share gets the rest."""
    subset: Name | None = None
    """Same as data.subset, for this source only."""
    split: Name | None = None
    """Same as data.split, for this source only."""
    name: SourceName | None = None
    """Name of the source in evaluations, which show the held-out loss of each source. Sources with equal names count as
    one. null: the end of the path."""

    @model_serializer(mode="wrap")
    def _without_what_is_unset(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Records of runs without shares and names are as before these existed."""
        return {key: value for key, value in dump(self).items() if key not in ("share", "name") or value is not None}


Sources = Name | list[Name | DataSource]


class RowsConfig(Settings):
    """Data sources and how their rows are read."""

    source: Sources
    """A JSONL, JSON, CSV, TSV, TXT or Parquet file (text files may be gzip or zstd), a glob pattern, or a Hugging Face
    dataset (org/name, or a folder written by save_to_disk). A list combines several: each a path or {path, format,
    columns, weight, share, subset, split, name}."""
    share_of: Literal["trained", "all"] = "trained"
    """Which tokens the shares of sources count: those with a label (`trained`), or `all`."""
    format: FormatName = "auto"
    """How a row is read. `auto` decides from the fields of a source's first rows. `my_rows.py:convert` is your own
    function from a row to one of the formats."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Your field names for lean_ft's: `columns.prompt=question`."""
    subset: Name | None = None
    """Subset (configuration) of a Hugging Face dataset that has several."""
    split: Name = "train"
    """Split of a Hugging Face dataset, or a slice of it in percent or rows: `train[:95%]`, `train[100:200]`. A file has
    one split, `train`."""
    streaming: bool = False
    """Read the Hugging Face datasets of `source` and `validation_source` while they download, without storing them
    first. Files are read as usual."""
    on_bad_row: Literal["raise", "skip"] = "raise"
    """What happens with a row that cannot be read. `raise` stops and reports its file, line, field and reason. `skip`
    leaves it out and counts it."""
    max_bad_rows: NonNegativeInt = 100
    """With `on_bad_row=skip`: maximum number of bad rows before the run stops."""
    validation_source: Sources | None = None
    """Held-out rows for evaluation, given like `source`, without weights and shares."""
    validation_fraction: Fraction = 0.0
    """Fraction of the rows to hold out for evaluation if validation_source is not set."""
    near_duplicates: Literal["keep", "drop"] = "keep"
    """What happens with rows that nearly repeat an earlier row. `drop` keeps the first row of each group, and compares
    training rows with held-out rows of `validation_source` first, which win. Dropped rows are counted. `leanft data
    stats --duplicates` prints examples."""
    chat_template: FilePath | None = None
    """File with a Jinja chat template that replaces the model's. It is saved with the checkpoints."""
    system: str | None = None
    """System message to add to every chat that does not begin with one."""
    chat_template_kwargs: dict[str, Any] = Field({})
    """Variables of the chat template: `chat_template_kwargs.enable_thinking=false`. A row's own field
    `chat_template_kwargs` wins. `generate`, `chat` and `serve` use them for models of this run."""
    separator: str | None = None
    """Text between a prompt and its completion for a model without a chat template. In a shell, write
    'data.separator="\\n"' for a line break. null: nothing, and an empty line for alpaca."""
    chat: Literal["auto"] | bool = "auto"
    """Whether plain-text prompts and completions become a user and an assistant message in the chat template. `auto`:
    if the model has a template. `false`: plain text, joined by `separator` and ended by eos. Rows of messages are
    always chats."""
    image_tokens: PositiveInt | None = None
    """Maximum number of tokens of an image; larger images are scaled down. null: the model's own limit."""
    shuffle: bool = True
    """Shuffle rows differently in each epoch. `false` keeps the order of the files, and of packed rows the order in
    which they were packed. The first batch is then not the largest one."""

    @model_validator(mode="after")
    def _says_what_is_held_out(self) -> "RowsConfig":
        held_out = [self.validation_source] if isinstance(self.validation_source, str) else self.validation_source or []
        unsaid = next((source for source in held_out if isinstance(source, str) or source.split is None), None)
        if "[" in self.split and unsaid is not None:
            path = unsaid if isinstance(unsaid, str) else unsaid.path
            raise ValueError(
                f"split={self.split} is a part of source, and validation_source={path} has no split. Set the held-out "
                f"part: validation_source=[{{path: {path}, split: 'train[95%:]'}}], or split: train for all rows."
            )
        return self

    @model_validator(mode="after")
    def _shares_add_up(self) -> "RowsConfig":
        sources = [self.source] if isinstance(self.source, str) else self.source
        shares = shares_of([DataSource(path=source) if isinstance(source, str) else source for source in sources])
        if shares is None and self.share_of != type(self).model_fields["share_of"].default:
            raise ValueError(
                f"share_of={self.share_of} is used only with shares, and no entry of source has a share. Give the "
                "entries shares, such as source=[{path: a.jsonl, share: 0.7}, b.jsonl], or remove share_of."
            )
        return self

    @model_validator(mode="after")
    def _can_compare_rows(self) -> "RowsConfig":
        if self.near_duplicates == "drop" and self.streaming:
            raise ValueError(
                "near_duplicates=drop compares all rows before the first is used, and streaming=true reads them while "
                "they download. Remove one of them."
            )
        if self.near_duplicates == "drop" and self.source == self.validation_source:
            raise ValueError(
                f"near_duplicates=drop leaves no training row: validation_source={self.validation_source} has the same "
                "rows as source. Set validation_source to other rows, or set validation_fraction instead."
            )
        return self

    @field_validator("validation_source")
    @classmethod
    def _has_no_weights(cls, sources: Sources | None) -> Sources | None:
        entries = [] if isinstance(sources, str | None) else [one for one in sources if isinstance(one, DataSource)]
        weighted = "weight" if any(one.weight != 1 for one in entries) else None
        if name := weighted or ("share" if any(one.share is not None for one in entries) else None):
            raise ValueError(f"held-out rows have no {name}: an evaluation reads each row once. Remove {name}.")
        return sources


class PromptDataConfig(RowsConfig):
    """Prompts to sample completions for, with the fields that rewards read."""

    share_of: Literal["all"] = "all"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Which tokens the shares of sources count: `all` of the prompts, which have no trained tokens."""
    max_prompt_length: PositiveInt = 512
    """Maximum prompt length in tokens. Rows with longer prompts are dropped and counted."""
    shared_prompt: Literal["auto"] | bool = "auto"
    """Compute a prompt once for all of its completions in a micro-batch, which follow it in one row and do not see each
    other. `auto` does so except with a recurrent state, attention within chunks, a router loss, or rotary scaling that
    depends on the text length within max_prompt_length + generation.max_new_tokens."""

    @field_validator("share_of", mode="before")
    @classmethod
    def _counts_all(cls, share_of: object) -> object:
        if share_of == "trained":
            raise ValueError("share_of=trained counts tokens with a label, and prompts have none. Remove share_of.")
        return share_of

    @model_validator(mode="after")
    def _has_no_format(self) -> "PromptDataConfig":
        sources = [self.source, self.validation_source]
        items = [
            item for source in sources if isinstance(source, list) for item in source if isinstance(item, DataSource)
        ]
        formats = {self.format, *(item.format for item in items)} - {"auto", None}
        if formats:
            raise ValueError(
                f"format={min(map(str, formats))} is not supported: prompts are read from the field prompt or "
                "messages. Remove format, and rename fields with data.columns."
            )
        return self

    def rows(self, tools: list[dict[str, Any]]) -> "PromptRowsConfig":
        """The same settings for code that reads all kinds of rows. `max_length` is the prompt's.

        tools: JSON schemas of the run's tools, which the chat template writes into each prompt.
        """
        shared = {name: getattr(self, name) for name in RowsConfig.model_fields}
        more = {"format": "prompts", "max_length": self.max_prompt_length, "tools": tools}
        return PromptRowsConfig.model_construct(**shared | more)


class DataConfig(RowsConfig):
    """Settings of every objective's data: sources, lengths and batches.

    A recipe's `data` is an instance of a subclass, which sets the objective.
    """

    objective: ClassVar["str | Objective"] = ""
    """How rows are read and batches are built: an `Objective` of your own, or the name of a module of lean_ft.data."""
    sides: ClassVar[tuple[str, ...]] = ("",)
    """Names of the sequences of a row. They stay in the same batch."""
    reads_chats: ClassVar[bool] = True
    """Whether rows may be chats or prompts, which the settings of chats and templates are for."""

    max_length: Annotated[int, Field(ge=2)] = 2048
    """Maximum sequence length in tokens."""
    overflow: Literal["truncate", "drop", "raise"] = "truncate"
    """What happens to a row longer than max_length."""
    truncation_side: Literal["right", "left"] = "right"
    """Side that `overflow=truncate` cuts: `right` keeps the beginning, `left` keeps the end."""
    packing: Literal["none", "bfd", "bfd_split", "wrapped", "padding_free"] = "none"
    """`none` pads each batch to its longest row. `bfd` fills rows of max_length with whole documents with small gaps;
    they cannot see each other. `bfd_split` also splits longer documents and loses nothing. `wrapped` concatenates all
    documents and cuts every max_length tokens; documents in one row see each other. `padding_free` makes each batch one
    row of whole documents without padding."""
    batch_tokens: PositiveInt | None = None
    """Maximum positions per batch, with padding, for packing=none. Batches then hold as many rows of similar length as
    fit, instead of batch_size rows."""
    num_processes: PositiveInt | None = None
    """Number of processes that tokenize the rows. null uses one per available core."""
    cache_dir: FilePath | None = None
    """Folder for prepared data, reused by the next run. null uses the environment variable LEAN_FT_CACHE, or
    lean_ft/data in the user's cache (~/.cache). You can delete it at any time."""
    cache_gib: PositiveFloat = 50.0
    """Maximum size of cache_dir in GiB. The least recently used data is deleted above it."""

    @property
    def reads_separator(self) -> bool:
        """Whether `separator` has an effect on the rows."""
        return self.reads_chats

    @property
    def packs_rows(self) -> bool:
        """Whether documents are packed into rows of max_length tokens."""
        return self.packing not in ("none", "padding_free")

    @property
    def longest(self) -> int | None:
        """Maximum tokens of a sequence; None if packing accepts any length."""
        return self.max_length if self.packing in ("none", "bfd") else None

    def importable(self) -> "DataConfig":
        """The same settings without those of a recipe's own class, which worker processes cannot import. An objective
        of your own gets them all."""
        if not isinstance(self.objective, str):
            return self
        settings_class = next(
            settings_class for settings_class in type(self).__mro__ if settings_class.__module__ == __name__
        )
        return settings_class.model_construct(**{name: getattr(self, name) for name in settings_class.model_fields})

    @field_validator("format", mode="wrap")
    @classmethod
    def _may_be_of_the_objective(cls, name: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        """Accept the formats of an objective that the class itself has, besides `FormatName`."""
        is_own = not isinstance(cls.objective, str) and isinstance(name, str) and name in cls.objective.reader.known
        return name if is_own else handler(name)

    @model_validator(mode="after")
    def _check_packing(self) -> "DataConfig":
        if self.longest is None and self.overflow != "truncate":
            raise ValueError(
                f"overflow={self.overflow} cannot be combined with packing={self.packing}, which splits or keeps long "
                "rows. Remove overflow, or set packing=bfd or packing=none."
            )
        if self.batch_tokens is not None and self.packing != "none":
            raise ValueError(
                f"batch_tokens={self.batch_tokens} cannot be combined with packing={self.packing}. Set packing=none, "
                "or remove batch_tokens and set batch_size."
            )
        if self.batch_tokens is not None and not self.shuffle:
            raise ValueError(
                f"batch_tokens={self.batch_tokens} groups rows of similar length, and shuffle=false keeps the order of "
                "the files. Remove one of them."
            )
        if self.batch_tokens is not None and self.batch_tokens < self.max_length * len(self.sides):
            times = f" for each of {len(self.sides)} answers" if len(self.sides) > 1 else ""
            raise ValueError(
                f"batch_tokens={self.batch_tokens} is less than max_length={self.max_length}{times}, so the longest "
                "row would not fit into a batch. Raise batch_tokens or lower max_length."
            )
        return self


class SFTDataConfig(DataConfig):
    """Conversations or texts to train on."""

    objective: ClassVar["str | Objective"] = "sft"

    train_on: Literal["completion", "assistant", "last", "all"] = "assistant"
    """Which tokens of a chat are trained: every assistant message (`assistant`), only the completion of a
    prompt/completion row (`completion`; other rows as `assistant`), only the last message (`last`), or all tokens
    (`all`). Each includes the token that ends the turn. A message with `train: false` or `weight: 0` is not trained.
    Rows of `text` are trained whole; `tokens` follow their labels."""


class TaughtDataConfig(SFTDataConfig):
    """Conversations or texts to train on. With data.columns.context, a teacher reads more of each row than the
    student."""

    objective: ClassVar["str | Objective"] = "contexts"

    context_template: str | None = None
    """How a text of data.columns.context enters the teacher's prompt: a text with {context} and {prompt}, which
    replaces the last user message or the plain-text prompt. null: the context ends the system message, or stands before
    a plain-text prompt. A context of messages always stands before the prompt's messages."""
    max_teacher_length: Annotated[int, Field(ge=2)] | None = None
    """Maximum length of the teacher's sequence, with the context, in tokens. Longer rows are dropped, or refused by
    overflow=raise. null is max_length."""

    @property
    def has_context(self) -> bool:
        """Whether rows have a context for the teacher."""
        listed = [one for source in (self.source, self.validation_source) if isinstance(source, list) for one in source]
        columns = [one.columns for one in listed if isinstance(one, DataSource)]
        return any("context" in names for names in (self.columns, *columns) if names)

    @property
    def teacher_tokens(self) -> int:
        """Maximum tokens of the teacher's sequence."""
        return self.max_teacher_length or self.max_length

    def importable(self) -> DataConfig:
        found = super().importable()
        if self.has_context or not isinstance(self.objective, str):
            return found
        # The documents are those of other recipes, and so is their place in the cache.
        names = SFTDataConfig.model_fields
        return SFTDataConfig.model_construct(**{name: getattr(self, name) for name in names})

    @model_validator(mode="after")
    def _has_a_context(self) -> "TaughtDataConfig":
        for name in ("context_template", "max_teacher_length"):
            if (value := getattr(self, name)) is not None and not self.has_context:
                raise ValueError(
                    f"{name}={value!r} is for rows with a context. Set columns.context to the name of its column, or "
                    f"remove {name}."
                )
        if self.max_teacher_length is not None and self.max_teacher_length < self.max_length:
            raise ValueError(
                f"max_teacher_length={self.max_teacher_length} is less than max_length={self.max_length}, but the "
                "teacher's sequences have the context too. Raise it, or lower max_length."
            )
        if self.context_template is not None:
            check_context_template(self.context_template)
        return self

    @model_validator(mode="after")
    def _keeps_both_sequences_whole(self) -> "TaughtDataConfig":
        if not self.has_context:
            return self
        if self.packing in ("bfd_split", "wrapped"):
            raise ValueError(
                f"packing={self.packing} cuts sequences, and the teacher reads each completion behind a whole context. "
                "Set packing=bfd, packing=padding_free or packing=none."
            )
        if self.truncation_side != "right":
            raise ValueError(
                f"truncation_side={self.truncation_side} has no effect: rows with a context are never cut, because "
                "both sequences have the same completion. Remove it."
            )
        if self.train_on == "all":
            raise ValueError(
                "train_on=all also trains prompts, and the teacher's prompts have other tokens than the student's. Set "
                "train_on=assistant, last or completion."
            )
        return self


def check_context_template(template: str) -> None:
    """Raise ValueError unless the template has {context} and {prompt}, and no other field."""
    try:
        fields = [field for field in Formatter().parse(template) if field[1] is not None]
    except ValueError as error:
        raise ValueError(f"context_template={template!r} cannot be read: {error}. Write {{{{ for a brace.") from None
    names = [field[1] for field in fields]
    is_plain = not any(field[2] or field[3] for field in fields)
    if {*names} != {"context", "prompt"} or not is_plain:
        found = ", ".join(f"{{{name}}}" for name in names) or "no field"
        raise ValueError(
            f"context_template={template!r} has {found}; expected {{context}} and {{prompt}}, such as "
            r"'{context}\n\n{prompt}'. Write {{ for a brace."
        )


class AnswerDataConfig(DataConfig):
    """Prompts with completions that are compared as a whole."""

    max_prompt_length: PositiveInt | None = None
    """Maximum prompt length in tokens; the last tokens are kept. null keeps all."""
    max_completion_length: PositiveInt | None = None
    """Maximum completion length in tokens; the first tokens are kept. null keeps all."""
    truncation_side: Literal["right", "left"] = "right"
    """What `overflow=truncate` cuts after the two limits above: the end of the longer completion (`right`), or the
    beginning of the shared prompt (`left`)."""

    @property
    def longest(self) -> int | None:
        return self.max_length

    @model_validator(mode="after")
    def _keeps_answers_whole(self) -> "AnswerDataConfig":
        if self.packing in ("bfd_split", "wrapped"):
            raise ValueError(
                f"packing={self.packing} cuts sequences, and the answers of a pair are compared whole. Set "
                "packing=bfd, packing=padding_free or packing=none."
            )
        return self


class PreferenceDataConfig(AnswerDataConfig):
    """Preference pairs: a chosen and a rejected completion."""

    objective: ClassVar["str | Objective"] = "pairs"
    sides: ClassVar[tuple[str, ...]] = ("chosen", "rejected")

    shared_prompt: Literal["auto"] | bool = "auto"
    """Compute the prompt of a pair once for both completions, which follow it in one row and do not see each other.
    `auto` does so except with a recurrent state, attention within chunks, a router loss, or rotary scaling that depends
    on the text length within max_length."""


class UnpairedDataConfig(AnswerDataConfig):
    """Single completions, labeled desirable or not. A preference pair counts as two of them."""

    objective: ClassVar["str | Objective"] = "unpaired"


class RewardDataConfig(PreferenceDataConfig):
    """Preference pairs, optionally with a `margin`: by how much the chosen completion is better."""


class PromptRowsConfig(DataConfig):
    """Prompts as rows of data: `PromptDataConfig.rows`."""

    objective: ClassVar["str | Objective"] = "prompts"

    tools: list[dict[str, Any]] = Field([])
    """JSON schemas of the run's tools."""


class ClassificationDataConfig(DataConfig):
    """Texts with labels, or texts whose tokens have labels."""

    objective: ClassVar["str | Objective"] = "classification"
    reads_chats: ClassVar[bool] = False

    packing: Literal["none", "bfd", "padding_free"] = "none"  # pyright: ignore[reportIncompatibleVariableOverride]
    """`none` pads each batch. `bfd` fills rows of max_length with whole texts. `padding_free` makes each batch one row
    without padding."""
    labels_per: Literal["text", "token"] = "text"
    """`text`: each text has a label. `token`: words, spans of a text, or steps of a completion have labels, each at one
    token. Rows have `tokens` and `labels`; `text` and `spans`; or `prompt`, `completions` and `labels`."""
    separator: str | None = None
    """With labels_per=token: text between words, or after each step. null: a space, or a line break."""
    labels: list[str] | None = Field(None, min_length=2)
    """Names of the labels in the order of the model's outputs; integers in rows index them, unless names are numbers.
    null: all labels of the training rows, sorted, which integers do not index."""
    multi_label: Literal["auto"] | bool = "auto"
    """`false`: each row has one `label` (softmax). `true`: a list of `labels` (sigmoids): names, indices, or in all
    rows a 0 or 1 for each label. `auto`: true if the first rows have `labels` and no `label`."""

    @property
    def reads_separator(self) -> bool:
        return self.labels_per == "token"

    @model_validator(mode="after")
    def _has_one_label_per_token(self) -> "ClassificationDataConfig":
        if self.labels_per == "token" and self.multi_label is True:
            raise ValueError(
                "multi_label=true cannot be combined with labels_per=token: a token has one label. Remove multi_label."
            )
        return self

    def without_contents(self) -> "ClassificationDataConfig":
        return self.model_copy(update={"labels": self.labels or ["0", "1"], "multi_label": self.multi_label is True})
