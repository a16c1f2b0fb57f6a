"""Base class of the groups of settings, and common types of values."""

import re
from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, NonNegativeInt

from lean_ft.system.redaction import on_one_line
from lean_ft.system.user_functions import as_factory, as_setting

Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveShare = Annotated[float, Field(gt=0.0, le=1.0)]

ValueT = TypeVar("ValueT")
NameT = TypeVar("NameT", str, Path)

# Alternative spellings of values -> lean_ft's spelling.
_SAME_VALUE = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "gpu": "cuda"}


def spelled_out(value: ValueT) -> ValueT | str:
    """Return lean_ft's spelling of a dtype or a device: `bf16` and `torch.bfloat16` become `bfloat16`, `gpu` becomes
    `cuda`. Return other values unchanged."""
    text = str(value).removeprefix("torch.") if str(value).startswith("torch.") else value
    return _SAME_VALUE.get(text, text) if isinstance(text, str) else text


Dtype = Annotated[Literal["bfloat16", "float32", "float16"], BeforeValidator(spelled_out)]
Device = Annotated[
    Literal["auto", "cuda", "cpu", "mps"],
    BeforeValidator(spelled_out),
    Field(description="`auto` takes cuda, then mps, then cpu. `leanft plan --device-name` takes the name of a card."),
]


def _has_no_control_characters(name: NameT) -> NameT:
    if on_one_line(str(name)) != str(name):
        raise ValueError(
            f"expected a path or a name on one line without control characters, found {str(name)!r}. Rename it: "
            "scripts, terminals and other programs that get this name could run a part of it."
        )
    return name


# A path or a name. lean_ft writes it into scripts, printed commands and logs.
Name = Annotated[str, AfterValidator(_has_no_control_characters)]
FilePath = Annotated[Path, AfterValidator(_has_no_control_characters)]
# `resume=true` and `resume=false`, as in other tools, are `auto` and `never`.
Resume = Annotated[
    Name, BeforeValidator(lambda value: {"true": "auto", "false": "never"}.get(str(value).lower(), value))
]

# Number of optimizer steps, a fraction of an epoch, or every epoch.
Every = NonNegativeInt | Annotated[float, Field(gt=0.0, lt=1.0)] | Literal["epoch"]


def _is_regular_expression(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}.") from None
    return pattern


RegularExpression = Annotated[str, AfterValidator(_is_regular_expression)]


# Text, or from Python a function, which becomes the text that stands for it.
FunctionName = Annotated[Name, BeforeValidator(as_setting)]
# FILE.py:FUNCTION, a user's function. A union with this type needs AfterValidator(check_function).
OwnFunction = Annotated[FunctionName, Field(pattern=r"\.py:\w+$", json_schema_extra={"format": "function"})]
# The same for a class or a function that makes objects. It is called for each object.
OwnFactory = Annotated[
    Annotated[Name, BeforeValidator(as_factory)], Field(pattern=r"\.py:\w+$", json_schema_extra={"format": "class"})
]


class Settings(BaseModel):
    """A group of settings. Unknown keys are errors. Values are checked and never converted. The text below a field
    describes it."""

    model_config = ConfigDict(
        defer_build=True,
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: object) -> None:
        for field in cls.model_fields.values():
            field.description = " ".join((field.description or "").split()) or None

    def without_contents(self) -> Self:
        """The same settings for a step of the same shapes that reads no rows, draws no numbers and calls no function of
        the user. Plans take such a step."""
        return self

    @classmethod
    def meanings_of_null(cls) -> dict[str, str]:
        """What null means for a setting whose default differs between recipes: texts by dotted key."""
        return {}

    def for_adapter(self) -> dict[str, object]:
        """The settings to change, by name, if an adapter trains instead of the model's weights."""
        return {}


GroupT = TypeVar("GroupT", bound=Settings)
