"""Find the row of a model family that transformers has and lean_ft lacks.

    python scripts/new_family.py MODEL_TYPE [--write]

Builds small random checkpoints with transformers and looks for a `Family` that gives their logits: starts from the nearest rows and borrows
facts from the other rows, one or two at a time, also read from this configuration's own fields. Names of tensors are matched by the renames of
all rows and by shape. Then changes each field of the configuration once: the row must give equal logits or refuse it, or the search goes on with
that checkpoint too. Prints the row, its test cases and the line of docs/families.md; `--write` inserts them and runs the family's parity tests. If no
row suffices, prints the nearest one, what differs and where, and exits with 1.
"""

import ast
import inspect
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from difflib import SequenceMatcher
from functools import cache, partial
from itertools import combinations, islice, permutations
from operator import methodcaller
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lean_ft.models import DecoderConfig, decoder_config, load_model  # noqa: E402
from lean_ft.models.config import MixtureConfig  # noqa: E402
from lean_ft.models.config_json import _DEFAULTS  # noqa: E402
from lean_ft.models.decoder import Decoder  # noqa: E402
from lean_ft.models.families import FAMILIES, Family  # noqa: E402
from lean_ft.models.families.family import count, flag, number  # noqa: E402
from lean_ft.models.new_model import empty_decoder, fill_model  # noqa: E402
from lean_ft.models.source import Source, all_tensors, tensors_on_disk  # noqa: E402
from lean_ft.system.config_fields import ConfigFields  # noqa: E402
from tests.models.conftest import reference_model  # noqa: E402
from tests.models.family_cases import SIZES, YARN  # noqa: E402

SECONDS = 100  # of the search from one row
EQUAL = 1e-4  # largest relative error of the logits
ABSENT = object()
# Fields that do not change the logits, or that name sizes which every checkpoint sets.
IDLE = re.compile(r"token|dropout|initializer|_range|cache|label|output_|return_|dtype|name|version|problem|aux|coef|chunk_size|arch")
# Small values of a configuration's own counts, by name.
SMALL = {
    "per_tok|top_?k|moe_k": 2, "shared_experts": 1, "experts": 6, "group": 1, "window|chunk": 7, "head_dim": 20,
    "rank": 12, "intermediate|ffn|_size|_dim": 24,
}  # fmt: skip
# Fields of a row that the search may borrow from another.
PARTS = ("has_window", "rope", "layer_facts", "reads_layer_types", "activation_field", "activations", "norm_eps_field", "has_mixture")


@dataclass
class Checkpoint:
    """A small random model of transformers, and its logits."""

    settings: dict[str, Any]
    config: dict[str, Any]
    folder: Path
    tensors: dict[str, torch.Tensor]
    logits: torch.Tensor


IDS = torch.randint(0, 101, (2, 24), generator=torch.Generator().manual_seed(1))


def checkpoint(model_type: str, settings: dict[str, Any]) -> Checkpoint:
    model, folder = reference_model(model_type, settings), Path(tempfile.mkdtemp(prefix="new_family_"))
    model.save_pretrained(folder)
    files = folder.glob("*.safetensors")
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    with torch.no_grad():
        return Checkpoint(settings, model.config.to_dict(), folder, tensors, model(IDS).logits)


def own_fields(model_type: str) -> dict[str, Any]:
    """The fields of the configuration that may change the computation, with transformers' defaults."""
    fields = transformers.AutoConfig.for_model(model_type).to_dict()
    return {name: value for name, value in fields.items() if not IDLE.search(name) and name not in ("model_type",)}


def small_settings(own: dict[str, Any]) -> list[dict[str, Any]]:
    """Settings of three checkpoints: plain; every flag, number and size changed; more layers, in the default order of their kinds."""
    sizes = {n: v for n, v in own.items() if type(v) is int and v > 4 and n not in SIZES}
    plain = {n: small for n in sizes for small in [next((v for k, v in SMALL.items() if re.search(k, n)), sizes[n])]}
    kinds = list(dict.fromkeys(own.get("layer_types") or []))
    listed = {"layer_types": [kinds[i % 2] for i in range(4)], "num_hidden_layers": 4} if len(kinds) == 2 else {}
    if own.get("mlp_only_layers"):
        plain["mlp_only_layers"] = [1]
    others = {n: not v for n, v in own.items() if type(v) is bool and re.search("bias|norm|tie", n)}
    others |= {n: v * (100 if "eps" in n else 0.7) for n, v in own.items() if type(v) is float}
    others |= {n: 3.0 for n in own if "softcap" in n} | ({"head_dim": 8} if "head_dim" in own else {})
    return [{**plain, **listed}, {**plain, **listed, **others, "num_key_value_heads": 6}, {**plain, "num_hidden_layers": 7}]


# Rows: what they may borrow.


@cache
def parsed(file: str) -> tuple[str, ast.Module]:
    return (source := Path(file).read_text()), ast.parse(source)


def text(value: Any) -> str:
    """The source of a fact."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{text(k)}: {text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, partial):
        given = [*map(text, value.args), *(f"{k}={text(v)}" for k, v in value.keywords.items())]
        return f"partial({', '.join([text(value.func), *given])})"
    if isinstance(value, methodcaller):
        kind, *args = value.__reduce__()[1]
        names = {"flag": "flag", "count": "count", "positive": "number", "positive_or_null": "number_or_null"}
        return f"{names[kind]}({', '.join(map(text, args))})"
    if getattr(value, "__name__", "") != "<lambda>":
        return value.__name__ if callable(value) else repr(value).replace("'", '"')
    code, (source, tree) = value.__code__, parsed(inspect.getsourcefile(value) or "")
    places = [p for p in code.co_positions() if p[0] and p[2] and p[1] == p[0] >= code.co_firstlineno]
    lambdas = [n for n in ast.walk(tree) if isinstance(n, ast.Lambda) and n.lineno == code.co_firstlineno]
    around = [n for n in lambdas if all((n.lineno, n.col_offset) <= (p[0], p[2]) <= (n.end_lineno, n.end_col_offset) for p in places)]
    found = re.sub(r"\s+", " ", ast.get_source_segment(source, max(around or lambdas, key=lambda n: n.col_offset)) or "")
    free = inspect.getclosurevars(value).nonlocals  # of a function that returns the lambda
    return re.sub(r"\b(" + "|".join(free) + r")\b", lambda m: text(free[m[1]]), found) if free else found


def inverse(field: str) -> Callable[[ConfigFields], float]:
    return lambda fields: 1 / fields.positive(field)


Edit = tuple[str, str, Any]  # facts, mixture or row; the name; the value


def edits(own: dict[str, Any]) -> list[Edit]:
    """Every value that a fact has in any row, or that this configuration's fields suggest."""
    found: dict[tuple[str, str, str], Edit] = {}

    def add(kind: str, name: str, value: Any) -> None:
        found.setdefault((kind, name, "" if value is ABSENT else text(value)), (kind, name, value))

    for row in FAMILIES.values():
        for kind, facts in (("facts", row.facts), ("mixture", row.mixture)):
            for name, value in facts.items():
                add(kind, name, value)
                add(kind, name, ABSENT)
        for name in PARTS:
            add("row", name, getattr(row, name))
        add("row", "mixture", row.mixture)
    readers = {"flag(": (flag, bool), "number": (number, float), "count(": (count, int)}
    for kind, name, value in list(found.values()):
        reader, kind_of_field = readers.get(text(value)[:5 if "flag" in text(value) else 6] if value is not ABSENT else "", (None, None))
        for field in (f for f, v in own.items() if reader and type(v) is kind_of_field):
            add(kind, name, reader(field))
            if reader is number:
                add(kind, name, inverse(field))
    for field in own:
        if "eps" in field or field.endswith(("_act", "activation", "activation_function")):
            add("row", "norm_eps_field" if "eps" in field else "activation_field", field)
    return list(found.values())


def edited(row: Family, edit: Edit) -> Family:
    kind, name, value = edit
    if kind == "row":
        return replace(row, **{name: value})
    facts = {n: v for n, v in getattr(row, kind).items() if n != name}
    return replace(row, **{kind: facts if value is ABSENT else {**facts, name: value}})


def repaired(row: Family, config: dict[str, Any], defaults: dict[str, Any], options: list[Edit]) -> Family:
    """The row without facts that read a field which this configuration lacks: absent, or the first option that can be read."""
    required = {f.name for f in fields(MixtureConfig) if f.default is f.default_factory}
    read = ConfigFields(config, {**_DEFAULTS, **defaults}, "config.json")

    def fails(call: Callable[..., Any], *args: Any) -> bool:
        try:
            call(read, *args)
            return False
        except (ValueError, TypeError, AttributeError, LookupError):
            return True

    row = replace(row, defaults=defaults, scores_as="")
    for kind in ("facts", "mixture"):
        for name, value in getattr(row, kind).items():
            if callable(value) and fails(value):
                others = [e[2] for e in options if e[:2] == (kind, name) and callable(e[2]) and not fails(e[2])]
                row = edited(row, (kind, name, others[0] if others and name in required else ABSENT))
    for name, args in (("has_window", (0,)), ("rope", (0, False)), ("layer_facts", ([False] * 99, 0)), ("has_mixture", (0,))):
        if fails(getattr(row, name), *args):
            row = replace(row, **{name: Family.__dataclass_fields__[name].default})
    return row


# Names of tensors.


def pattern(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", re.sub(r"\.\d+\.", ".#.", name, count=1))


def stored_prefix(tensors: dict[str, torch.Tensor]) -> tuple[str, str]:
    found = [m.groups() for name in tensors if (m := re.match(r"((?:\w+\.)*?)(\w+)\.\d+\.", name))]
    return max(set(found), key=found.count) if found else ("model.", "layers")


def renames(row: Family, model: Decoder, tensors: dict[str, torch.Tensor]) -> Iterator[tuple[dict[str, Any], list[str], list[str]]]:
    """Ways to name the decoder's tensors as in the folder: `on_disk`, and the names on either side that are left."""
    prefix, layers = stored_prefix(tensors)
    theirs: dict[str, tuple[int, ...]] = {}
    for name, tensor in tensors.items():
        name = re.sub(f"^{re.escape(prefix)}", "model.", name) if prefix else name if name == "lm_head.weight" else f"model.{name}"
        theirs.setdefault(pattern(name).replace(f"model.{layers}.#", "model.layers.#"), tuple(tensor.shape))
    own = {pattern(name): tuple(tensor.shape) for name, tensor in reversed([*all_tensors(model)]) if tensor.numel()}
    known = [*row.on_disk.items(), *(entry for other in FAMILIES.values() for entry in other.on_disk.items())]
    choices: dict[str, list[tuple[tuple[str, ...], Any]]] = {}
    for name, shape in own.items():
        for part, places in [("", ("",)), *known] if not any(p in name for p in row.on_disk) else [*known, ("", ("",))]:
            named = tuple(name.replace(part, place) if part else name for place in places)
            each = shape[1:] if "*" in places[0] else shape
            each = (each[0] // len(places), *each[1:]) if each else each
            if part in name and all(theirs.get(place) == each for place in named):
                choices.setdefault(name, []).append((named, (part, places) if part else None))
    taken: dict[str, str] = {}
    chosen: dict[str, Any] = {}

    def give(name: str, tried: set[str]) -> bool:
        for named, entry in choices.get(name, []):
            if tried & set(named):
                continue
            tried |= set(named)
            if all(place not in taken or give(taken[place], tried) for place in named):
                taken.update(dict.fromkeys(named, name))
                chosen[name] = entry
                return True
        return False

    left = [name for name in own if not give(name, set())]
    rest = [name for name in theirs if name not in taken]
    near = lambda a, b: SequenceMatcher(None, a.replace("#", ""), b.replace("#", "")).ratio()  # noqa: E731
    base = dict(entry for entry in chosen.values() if entry)
    ways = [p for p in islice(permutations(rest, len(left)), 5000) if all(own[a] == theirs[b] for a, b in zip(left, p, strict=True))]
    for way in sorted(ways, key=lambda p: -sum(near(a, b) for a, b in zip(left, p, strict=True)))[:12]:
        short = lambda n: re.sub(r"^model\.layers\.#\.|\.(weight|bias)$", "", n)  # noqa: E731
        entries = {short(a): (short(b),) for a, b in zip(left, way, strict=True)}
        yield {**entries, **base}, [], [name for name in rest if name not in way]
    if not ways:
        yield base, left, rest


# The search.


class Search:
    def __init__(self, model_type: str) -> None:
        self.model_type, self.start = model_type, time.monotonic()
        FAMILIES.pop(model_type, None)
        self.own = own_fields(model_type)
        needed = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
        self.defaults = {n: v for n, v in self.own.items() if n not in (*needed, "layer_types")}
        if "intermediate_size" not in self.own:
            self.defaults["intermediate_size"] = next(v for n, v in self.own.items() if n.endswith("intermediate_size"))
        self.options = edits(self.own)
        self.checkpoints: list[Checkpoint] = []
        for settings in small_settings(self.own):
            try:
                self.checkpoints.append(checkpoint(model_type, settings))
            except Exception as error:
                self.say(f"transformers does not build {settings}: {str(error)[:150]}")
        self.errors: dict[tuple[int, DecoderConfig], tuple[float, dict[str, Any], str]] = {}
        self.refused = ""

    def say(self, line: str) -> None:
        print(f"[{time.monotonic() - self.start:4.0f} s] {line}", flush=True)

    def built(self, row: Family, model: Decoder, on_disk: dict[str, Any], at: Checkpoint) -> Decoder:
        prefix, layers = stored_prefix(at.tensors)
        FAMILIES[self.model_type] = replace(row, on_disk=on_disk, prefix_on_disk=prefix, layers=layers)
        model.source = Source(config={"model_type": self.model_type})
        missing = [name for name in tensors_on_disk(model) if name not in at.tensors]
        if missing:
            raise ValueError(f"no tensor {missing[0]}")

        def fill(name: str, tensor: torch.Tensor) -> None:
            for place, part in model.source.stored(name, tensor):
                part.values.copy_(at.tensors[place])

        with torch.no_grad():
            fill_model(model, "cpu", fill)
        return model

    def compared(self, row: Family, number: int) -> tuple[float, dict[str, Any], str]:
        """The error on a checkpoint: of the logits, or above 10 with tensors that do not match; the renames; what does not match."""
        at = self.checkpoints[number]
        FAMILIES[self.model_type] = row
        try:
            config = decoder_config(at.config)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            return 100.0, {}, str(error)
        if (number, config) in self.errors:
            return self.errors[number, config]
        best: tuple[float, dict[str, Any], str] = (99.0, {}, "")
        try:
            for on_disk, left, rest in renames(row, empty_decoder(config, torch.float32), at.tensors):
                if left or rest:
                    named = f"tensors without a match: {', '.join(left) or 'none'} of lean_ft, {', '.join(rest) or 'none'} of the folder"
                    best = min(best, (10.0 + len(left) + len(rest), on_disk, named), key=lambda found: found[0])
                    continue
                with torch.no_grad():
                    logits = self.built(row, empty_decoder(config, torch.float32), on_disk, at)(IDS)
                error = float(((logits - at.logits).norm() / at.logits.norm()).nan_to_num(9.0).clamp(max=9.0))
                best = min(best, (error, on_disk, f"logits differ by {error:.1e}"), key=lambda found: found[0])
        except (ValueError, RuntimeError, AssertionError, NotImplementedError) as error:
            best = min(best, (50.0, {}, str(error)), key=lambda found: found[0])
        self.errors[number, config] = best
        return best

    def score(self, row: Family, limit: float = 1e9) -> float:
        total = 0.0
        for number in range(len(self.checkpoints)):
            total += self.compared(row, number)[0]
            if total >= limit:
                break
        return total

    def is_solved(self, score: float) -> bool:
        return score < EQUAL * len(self.checkpoints)

    def improved(self, row: Family, score: float) -> tuple[Family, float]:
        """Change one fact at a time, or two if one does not help, while the error falls."""
        end = time.monotonic() + SECONDS
        while not self.is_solved(score) and time.monotonic() < end:
            tried = [(self.score(edited(row, edit)), i) for i, edit in enumerate(self.options)]
            best, i = min(tried)
            steps = (self.options[i],)
            if best >= 0.999 * score:
                likely = [i for s, i in sorted(tried) if s < 10 * len(self.checkpoints) and abs(s - score) > 1e-9][:50]
                pairs = [p for p in combinations(likely, 2) if self.options[p[0]][:2] != self.options[p[1]][:2]]
                for pair in pairs:
                    if time.monotonic() > end:
                        break
                    both = self.score(edited(edited(row, self.options[pair[0]]), self.options[pair[1]]), best)
                    if both < 0.999 * min(score, best):
                        best, steps = both, tuple(self.options[i] for i in pair)
                        break
            if best >= 0.999 * score:
                break
            for step in steps:
                row = edited(row, step)
            score = best
            told = [f"{n}={'absent' if v is ABSENT else text(v)[:60]}" for _, n, v in steps]
            self.say(f"  {' and '.join(told)}: error {score:.2g}")
        return row, score

    def nearest(self) -> list[tuple[float, str, Family]]:
        config = self.checkpoints[0].config
        found = [(n, repaired(r, config, self.defaults, self.options)) for n, r in FAMILIES.items() if n != self.model_type]
        return sorted(((self.score(row), name, row) for name, row in found), key=lambda one: one[0])

    def shortened(self, row: Family) -> Family:
        """Without the facts that change nothing, in any checkpoint."""
        for kind in ("facts", "mixture"):
            for name in list(getattr(row, kind)):
                without = edited(row, (kind, name, ABSENT))
                if self.is_solved(self.score(without)):
                    row = without
        for name in PARTS:
            usual = edited(row, ("row", name, getattr(Family(), name)))
            if self.is_solved(self.score(usual)):
                row = usual
        return row
