"""How content parts that are not text become tokens: what a tokenizer carries for them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

from lean_ft.images.rules import image_rules


class Media(Protocol):
    """How a model prepares the content parts of one type, such as images. Cheap to pickle."""

    unit: ClassVar[str]
    """The type of the parts, for messages."""
    files: ClassVar[Sequence[str]]
    """Names of the files in the model's folder that decide it."""

    def of_run(self, settings: Mapping[str, Any]) -> Self:
        """With the limits of a run's settings, by dotted key. Raises ValueError for a limit that is too low."""
        ...

    def check(self) -> None:
        """Raise ValueError if programs differ in how the model reads such parts."""
        ...

    def write_limits(self, folder: Path) -> None:
        """Write limits other than the model's own into the processor's files in `folder`."""
        ...

    def remark(self) -> str:
        """A sentence about limits that those files cannot hold; empty if they hold all."""
        ...


LIMITS = ("data.image_tokens",)
"""Settings that limit how many tokens a part becomes; null by default. `Media.write_limits` writes them."""
MEDIA_PACKAGES = ("images",)
"""Packages of lean_ft whose code decides how parts become tokens."""


def read_media(folder: Path, added_tokens: Mapping[str, int] | None = None) -> tuple[Media, ...]:
    """How the model in `folder` prepares the parts that its towers read. added_tokens: of the tokenizer, with their
    ids. Raises ValueError if it has no tower, or an unsupported one."""
    return (image_rules(folder, added_tokens=added_tokens),)


def media_of_run(media: Sequence[Media], settings: Mapping[str, Any]) -> tuple[Media, ...]:
    """`media` as a run with these settings, by dotted key, reads parts; () if it reads texts alone."""
    return tuple(one.of_run(settings) for one in media) if settings.get("model.images", "none") != "none" else ()
