"""Select modules and parameters by patterns of their names.

A pattern is the end of the name of a parameter or of a module that holds it (`embed_tokens`, `layers.0.mlp`), also with
wildcards (`model.layers.[0-3].*`). `freeze`, `train` and `optimizer.lr_ratios` use these rules.
"""

from collections.abc import Collection
from fnmatch import fnmatchcase
from itertools import accumulate

from lean_ft.system.spelling import did_you_mean


def matches_name(name: str, pattern: str) -> bool:
    """Whether a pattern equals the name, its last parts, or matches it with wildcards."""
    return name == pattern or name.endswith("." + pattern) or fnmatchcase(name, pattern)


def matched_parameters(names: Collection[str], pattern: str, setting: str | None = None) -> set[str]:
    """The parameters that a pattern matches, by their own names or by a module's that holds them.

    With the name of a setting, raises ValueError if there are none.
    """

    def matches(name: str) -> bool:
        holders = accumulate(name.split("."), "{}.{}".format)  # model, model.layers, model.layers.0 ... and itself
        return any(matches_name(holder, pattern) for holder in holders)

    matched = set(filter(matches, names))
    if setting and not matched:
        parts = {part for name in names for part in name.split(".") if not part.isdigit()}
        raise ValueError(
            f"{setting}: {pattern!r} matches no trained parameter.{did_you_mean(pattern, parts)} Expected the end of a "
            f"name, or one with wildcards such as model.layers.0.*, among {', '.join(sorted(parts))}."
        )
    return matched
