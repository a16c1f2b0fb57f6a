"""What a merge was made of: in merge.json, from which cards are written, and in words."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import lean_ft
from lean_ft.export.model_card import model_card
from lean_ft.export.places import CARD, MERGE_FILE
from lean_ft.merging.methods import Formula
from lean_ft.system.foreign_values import JSON
from lean_ft.system.whole_files import write_json


@dataclass(frozen=True)
class MergeFacts:
    """The models of a merge and its formula."""

    formula: Formula
    models: Sequence[str]  # as the user named them
    base: str | None
    rank: int | None = None  # of a merged adapter that was decomposed again

    def __str__(self) -> str:
        is_weighted = "weights" in self.formula.method.options
        weights = self.formula.weights if is_weighted else (None,) * len(self.models)
        named = [
            model if weight is None else f"{model} ({weight:g})"
            for model, weight in zip(self.models, weights, strict=True)
        ]
        numbers = [_shown(name, value) for name, value in self.formula.facts().items()]
        numbers += [f"rank {self.rank}"] if self.rank is not None else []
        is_read = self.formula.method.has_task_vectors and self.rank is None  # an adapter is a difference itself
        base = [f"base {self.base}"] if self.base is not None and is_read else []
        return ", ".join([f"merged {' + '.join(named)} by {self.formula.method.title}", *base, *numbers])

    def write(self, folder: Path) -> None:
        is_weighted = "weights" in self.formula.method.options
        models: list[JSON] = [
            {"model": model, **({"weight": weight} if is_weighted else {})}
            for model, weight in zip(self.models, self.formula.weights, strict=True)
        ]
        facts: dict[str, JSON] = {"lean_ft": lean_ft.__version__, "method": self.formula.name, "models": models}
        facts |= {"base": self.base} if self.base is not None else {}
        facts |= self.formula.facts()
        facts |= {"rank": self.rank} if self.rank is not None else {}
        write_json(folder / MERGE_FILE, facts)


def _shown(name: str, value: float | int | bool | str) -> str:
    if isinstance(value, bool):
        return "normalized" if value else "not normalized"
    return f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"


def write_facts(folder: Path, name: str, facts: MergeFacts) -> None:
    """Write merge.json and a model card into a finished folder, which will be called `name`."""
    facts.write(folder)
    (folder / CARD).write_text(model_card(folder, None, f"ORG/{name}", has_picture=False), encoding="utf-8")


@dataclass(frozen=True)
class MergeResult:
    """The result of a merge; `str()` describes it."""

    folder: Path
    facts: MergeFacts
    contents: str
    notes: Sequence[str] = ()

    def __str__(self) -> str:
        return "\n".join([f"{self.facts}.", f"wrote {self.folder}: {self.contents}.", *self.notes])
