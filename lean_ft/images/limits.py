"""Convert a maximum number of tokens per image to the limit of a family's processor: pixels, a longest side, or tokens.

A run with `data.image_tokens` applies the processor's own rule with this limit, and its checkpoints have the limit in
the processor's files. So other programs give an image as many tokens as the run did. `difference` names the exceptions:
processors that limit the longest side, while the run scales each image by its own shape, and Gemma 4's, which accepts
only a few numbers. An image that is more than N times as wide as high is scaled down further in every family.

Source: `image_processing_*.py` of each family in transformers 5.23.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lean_ft.images import cuts
from lean_ft.system.whole_files import read_json, write_json

if TYPE_CHECKING:
    from lean_ft.images.rules import ImageRules

_NUMBERS_OF_GEMMA_4 = (70, 140, 280, 560, 1120)  # that its processor accepts
Settings = Mapping[str, Any]


class _Limit(NamedTuple):
    """How to limit the number of tokens of one rule."""

    of_tokens: Callable[["ImageRules", int], int]
    """Return the limit at which images have at most this number of tokens, and no more than now."""
    written: Callable[["ImageRules", Settings], dict[str, Any]]
    """Return the settings to change in an image processor, from its present settings."""


def limit_of(rules: "ImageRules", tokens: int) -> int:
    """Return the limit of `rules` at which images have at most `tokens` tokens; the present limit if none fits all
    shapes."""
    return _limit(rules).of_tokens(rules, tokens)


def write_limit(folder: Path, rules: "ImageRules") -> None:
    """Write the limit for `data.image_tokens` of `rules` into the processor's files in `folder`."""
    for name in ("processor_config.json", "preprocessor_config.json"):
        content = read_json(folder / name)
        settings = content.get("image_processor") if name.startswith("processor") else content
        if settings and rules.max_tokens is not None:
            changed = {**settings, **_limit(rules).written(rules, settings)}
            if changed != settings:
                write_json(folder / name, changed if settings is content else {**content, "image_processor": changed})


def difference(rules: "ImageRules") -> str:
    """How images in other programs differ from those of a run with these rules; empty if they do not."""
    if rules.max_tokens is None or _function(rules) not in (cuts.within_longest, cuts.tiled, cuts.within_tokens):
        return ""
    if _function(rules) is not cuts.within_tokens:
        return "the folder's processor limits the longest side, so images that are not square have fewer tokens there"
    if rules.limit in _NUMBERS_OF_GEMMA_4:
        return ""
    return (
        f"the folder's processor takes only {', '.join(map(str, _NUMBERS_OF_GEMMA_4))}, so images have other sizes "
        "there"
    )


def _function(rules: "ImageRules") -> Any:
    return getattr(rules.cut, "func", rules.cut)


def _limit(rules: "ImageRules") -> _Limit:
    return _LIMITS[_function(rules)]


def _options(rules: "ImageRules") -> dict[str, Any]:
    """The arguments of the cut, by name."""
    return getattr(rules.cut, "keywords", {})


def _unit(rules: "ImageRules") -> int:
    """Side in pixels of the square that one token shows."""
    return rules.patch_size * rules.merge


def _written_pixels(rules: "ImageRules", settings: Settings) -> dict[str, Any]:
    least = min(_options(rules)["least"], rules.limit)
    older = {"min_pixels": least, "max_pixels": rules.limit}  # replace `size` where a folder has them
    size = {**(settings.get("size") or {}), "shortest_edge": least, "longest_edge": rules.limit}
    return {"size": size} | {name: value for name, value in older.items() if settings.get(name) is not None}


def _written_longest(rules: "ImageRules", settings: Settings) -> dict[str, Any]:
    """A square image has the most tokens."""
    assert rules.max_tokens is not None
    side = max(1, math.isqrt(rules.max_tokens)) * _unit(rules)
    return {"size": {**(settings.get("size") or {}), "longest_edge": min(rules.limit, side)}}


def _written_tiles(rules: "ImageRules", settings: Settings) -> dict[str, Any]:
    """A square of tiles and a thumbnail have the most tokens; one tile has no thumbnail."""
    assert rules.max_tokens is not None
    if not _options(rules)["split"]:
        return {}
    tile = _options(rules)["tile"]
    side = max(1, math.isqrt(max(0, rules.max_tokens // (tile // _unit(rules)) ** 2 - 1))) * tile
    return {"size": {**(settings.get("size") or {}), "longest_edge": min(rules.limit, side)}}


def _written_tokens(rules: "ImageRules", settings: Settings) -> dict[str, Any]:
    return {"max_soft_tokens": rules.limit} if rules.limit in _NUMBERS_OF_GEMMA_4 else {}


def _shapes_written(rules: "ImageRules", settings: Settings) -> dict[str, Any]:
    tiles, limit = _options(rules)["tiles"], rules.limit
    most = min(tiles.most, limit)
    number = (limit - tiles.most * tiles.thumbnail) * _unit(rules) ** 2 // tiles.tile**2
    number = min(tiles.max_tiles, number)
    splits = {"max_tiles": number} if number >= max(2, tiles.min_tiles) else {"do_image_splitting": False}
    return {"min_image_tokens": min(tiles.least, most), "max_image_tokens": most, **splits}


_LIMITS: dict[Any, _Limit] = {
    cuts.always: _Limit(lambda rules, _: rules.limit, lambda *_: {}),
    cuts.within_pixels: _Limit(lambda rules, n: min(rules.limit, n * _unit(rules) ** 2), _written_pixels),
    cuts.within_longest: _Limit(lambda rules, _: rules.limit, _written_longest),
    cuts.within_tokens: _Limit(lambda rules, n: min(rules.limit, n), _written_tokens),
    cuts.tiled: _Limit(lambda rules, _: rules.limit, _written_tiles),
    cuts.tiled_by_shape: _Limit(lambda rules, n: min(rules.limit, n), _shapes_written),
}
