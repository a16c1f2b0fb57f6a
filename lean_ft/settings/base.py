"""What every group of settings is: strict, frozen, and its values' common types."""

import re
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, NonNegativeInt

Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveShare = Annotated[float, Field(gt=0.0, le=1.0)]

# Optimizer steps, or what they are of an epoch.
Every = NonNegativeInt | Annotated[float, Field(gt=0.0, lt=1.0)] | Literal["epoch"]


def _is_regular_expression(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}.") from None
    return pattern


RegularExpression = Annotated[str, AfterValidator(_is_regular_expression)]


class Settings(BaseModel):
    """A group of settings: unknown keys are errors, values are checked and never silently converted."""

    model_config = ConfigDict(defer_build=True, extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


GroupT = TypeVar("GroupT", bound=Settings)
