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
from typing import Any, Literal, get_args, get_origin, get_type_hints

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
IDLE = re.compile(
    r"token|dropout|initializer|_range|cache|label|output_|return_|dtype|name|version|problem|aux|coef|chunk_size_feed|arch|model_type|is_encoder"
)
# Small values of a configuration's own counts, by name.
SMALL = {
    "per_tok|top_?k|moe_k": 2, "shared_experts": 1, "experts": 6, "group": 1, "window|chunk": 7, "head_dim": 20,
    "rank": 12, "intermediate|ffn|_size|_dim": 24,
}  # fmt: skip
PLACES = {"attention": "attn|attention", "feed-forward": "mlp|feed_forward|moe|ffn"}  # names of a layer's modules
# Fields of a row that the search may borrow from another.
PARTS = (
    "has_window",
    "rope",
    "layer_facts",
    "reads_layer_types",
    "activation_field",
    "activations",
    "norm_eps_field",
    "has_mixture",
)


@dataclass
class Checkpoint:
    """A small random model of transformers, and its logits."""

    settings: dict[str, Any]
    config: dict[str, Any]
    folder: Path
    tensors: dict[str, torch.Tensor]
    names: dict[str, tuple[int, ...]]  # as `patterns`
    model: torch.nn.Module
    steps: dict[str, torch.Tensor]


IDS = torch.randint(0, 101, (2, 24), generator=torch.Generator().manual_seed(1))


def checkpoint(model_type: str, settings: dict[str, Any]) -> Checkpoint:
    model, folder = reference_model(model_type, settings), Path(tempfile.mkdtemp(prefix="new_family_"))
    model.save_pretrained(folder)
    files = folder.glob("*.safetensors")
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    steps = steps_of(model, lambda: model(IDS).logits)
    return Checkpoint(settings, model.config.to_dict(), folder, tensors, patterns(tensors), model, steps)


@torch.no_grad()
def steps_of(
    model: torch.nn.Module, forward: Callable[[], torch.Tensor], given: dict[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """The logits, and inputs and outputs of layers and of their attention and feed-forward layer. Each step then continues with the
    tensors of `given`, so that a wrong fact shows only where it acts."""
    found, given, hooks = {}, given or {}, []

    def keep(name: str, tensor: torch.Tensor) -> torch.Tensor:
        found[name] = tensor
        return given[name] if name in given and given[name].shape == tensor.shape else tensor

    def before(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (keep(name, args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": keep(name, kwargs["hidden_states"])}

    def after(name: str, out: Any) -> Any:
        return (keep(name, out[0]), *out[1:]) if isinstance(out, tuple) else keep(name, out)

    layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
    for i, layer in enumerate(layers):
        parts = {
            kind: next((m for n, m in layer.named_children() if re.search(named, n) and "norm" not in n), None)
            for kind, named in PLACES.items()
        }
        for place, module in [
            (f"layer {i}", layer),
            *((f"layer {i}, {kind}", m) for kind, m in parts.items() if m is not None),
        ]:
            start, end = f"{place}: input", f"{place}: output"
            hooks.append(
                module.register_forward_pre_hook(
                    lambda _, args, kwargs, n=start: before(n, args, kwargs), with_kwargs=True
                )
            )
            hooks.append(module.register_forward_hook(lambda _, args, out, n=end: after(n, out)))
    try:
        found["logits"] = forward()
    finally:
        for hook in hooks:
            hook.remove()
    return found


def differences(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> dict[str, float]:
    """The relative error of each step that both have, at most 1."""
    pairs = {
        name: (ours[name], theirs[name]) for name in theirs if name in ours and ours[name].shape == theirs[name].shape
    }
    return {n: float(((a - b).norm() / b.norm()).nan_to_num(1.0).clamp(max=1.0)) for n, (a, b) in pairs.items()}


def own_fields(model_type: str, **settings: int) -> dict[str, Any]:
    """The fields of the configuration that may change the computation, with transformers' defaults."""
    config = transformers.AutoConfig.for_model(model_type, **settings).to_dict()
    return {name: value for name, value in config.items() if not IDLE.search(name)}


def small_settings(own: dict[str, Any]) -> list[dict[str, Any]]:
    """Settings of three checkpoints: plain; every flag, number and size changed; more layers, in the default order of their kinds."""
    sizes = {n: v for n, v in own.items() if type(v) is int and v > 4 and n not in SIZES}
    plain = {n: small for n in sizes for small in [next((v for k, v in SMALL.items() if re.search(k, n)), sizes[n])]}
    kinds = list(dict.fromkeys(own.get("layer_types") or []))
    listed = {"layer_types": [kinds[i % 2] for i in range(4)], "num_hidden_layers": 4} if len(kinds) == 2 else {}
    if own.get("mlp_only_layers"):
        plain["mlp_only_layers"] = [1]
    others = {n: not v for n, v in own.items() if type(v) is bool and re.search("bias|norm|tie", n)}
    others |= {n: 1e-3 if "eps" in n else v * 0.7 for n, v in own.items() if type(v) is float}
    others |= {n: 3.0 for n in own if "softcap" in n} | ({"head_dim": 8} if "head_dim" in own else {})
    return [
        {**plain, **listed},
        {**plain, **listed, **others, "num_key_value_heads": 6},
        {**plain, "num_hidden_layers": 7},
    ]


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
    around = [
        n
        for n in lambdas
        if all((n.lineno, n.col_offset) <= (p[0], p[2]) <= (n.end_lineno, n.end_col_offset) for p in places)
    ]
    found = re.sub(
        r"\s+", " ", ast.get_source_segment(source, max(around or lambdas, key=lambda n: n.col_offset)) or ""
    )
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
    for kind, config in (("facts", DecoderConfig), ("mixture", MixtureConfig)):
        for name, values in get_type_hints(config).items():
            for value in get_args(values) if get_origin(values) is Literal else (True, False) if values is bool else ():
                add(kind, name, value)
    readers = {"flag(": (flag, bool), "number": (number, float), "count(": (count, int)}
    for kind, name, value in list(found.values()):
        reader, kind_of_field = readers.get(
            text(value)[: 5 if "flag" in text(value) else 6] if value is not ABSENT else "", (None, None)
        )
        for field in (f for f, v in own.items() if reader and type(v) is kind_of_field and f not in SIZES):
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
    for name, args in (
        ("has_window", (0,)),
        ("rope", (0, False)),
        ("layer_facts", ([False] * 99, 0)),
        ("has_mixture", (0,)),
    ):
        if fails(getattr(row, name), *args):
            row = replace(row, **{name: Family.__dataclass_fields__[name].default})
    return row


# Names of tensors.


def pattern(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", re.sub(r"\.\d+\.", ".#.", name, count=1))


def stored_prefix(tensors: dict[str, torch.Tensor]) -> tuple[str, str]:
    found = [m.groups() for name in tensors if (m := re.match(r"((?:\w+\.)*?)(\w+)\.\d+\.", name))]
    return max(set(found), key=found.count) if found else ("model.", "layers")


def patterns(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    """The shapes of a folder's tensors, by names in which layers have no numbers and the usual prefix."""
    (prefix, layers), found = stored_prefix(tensors), {}
    for name, tensor in tensors.items():
        if name.startswith(prefix) and name != "lm_head.weight":
            name = "model." + name.removeprefix(prefix)
        found.setdefault(pattern(name).replace(f"model.{layers}.#", "model.layers.#"), tuple(tensor.shape))
    return found


Entries = list[tuple[str, tuple[str, ...]]]


def renames(
    row: Family, model: Decoder, theirs: dict[str, tuple[int, ...]], borrowed: Entries
) -> Iterator[tuple[dict[str, Any], list[str], list[str]]]:
    """Ways to name the decoder's tensors as in the folder: `on_disk`, and the names on either side that are left."""
    own = {pattern(name): tuple(tensor.shape) for name, tensor in reversed([*all_tensors(model)]) if tensor.numel()}
    known = [*row.on_disk.items(), *borrowed]
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
    ways = [
        p
        for p in islice(permutations(rest, len(left)), 5000)
        if all(own[a] == theirs[b] for a, b in zip(left, p, strict=True))
    ]
    for way in sorted(ways, key=lambda p: -sum(near(a, b) for a, b in zip(left, p, strict=True)))[:12]:
        short = lambda n: re.sub(r"^model\.layers\.#\.|\.(weight|bias)$", "", n)  # noqa: E731
        entries = {short(a): (short(b),) for a, b in zip(left, way, strict=True)}
        yield {**entries, **base}, [], [name for name in rest if name not in way]
    if not ways:
        yield base, left, rest


def names_in_memory(on_disk: dict[str, Any], at: Checkpoint) -> dict[str, str]:
    """The names of modules in transformers, where they differ from the folder's; found by equal values."""
    found = {}
    for name, tensor in at.tensors.items():
        same = [n for n, t in at.model.state_dict().items() if t.shape == tensor.shape and torch.equal(t, tensor)]
        entry = next(((part, place) for part, (place, *_) in on_disk.items() if place in name and "*" not in place), None)
        if entry is not None and same and name not in same:
            start, _, end = name.partition(entry[1])
            if same[0].startswith(start) and same[0].endswith(end):
                found[entry[0]] = same[0].removeprefix(start).removesuffix(end)
    return found


# The search.


class Search:
    def __init__(self, model_type: str) -> None:
        self.model_type, self.start = model_type, time.monotonic()
        FAMILIES.pop(model_type, None)
        self.own = own_fields(model_type)
        needed = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
        other = own_fields(model_type, hidden_size=96, num_attention_heads=6, num_hidden_layers=5)  # derived values differ
        self.defaults = {n: v for n, v in self.own.items() if n not in needed and other[n] == v}
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
        entries = [entry for row in FAMILIES.values() for entry in row.on_disk.items()]
        self.borrowed: Entries = list(dict.fromkeys(entries))

    def say(self, line: str) -> None:
        print(f"[{time.monotonic() - self.start:4.0f} s] {line}", flush=True)

    def fill(self, row: Family, model: Decoder, on_disk: dict[str, Any], at: Checkpoint) -> None:
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
            model = empty_decoder(config, torch.float32)
            for on_disk, left, rest in renames(row, model, at.names, self.borrowed):
                if left or rest:
                    named = f"tensors without a match: {', '.join(left) or 'none'} of lean_ft, {', '.join(rest) or 'none'} of the folder"
                    best = min(best, (10.0 + len(left) + len(rest), on_disk, named), key=lambda found: found[0])
                    continue
                self.fill(row, model, on_disk, at)
                steps = differences(steps_of(model, partial(model, IDS), at.steps), at.steps)
                error, told = sum(steps.values()) / len(steps), {n: f"{e:.1e}" for n, e in steps.items() if e > EQUAL}
                whole = 1.0 if told else differences(steps_of(model, partial(model, IDS)), at.steps)["logits"]
                best = min(best, (error + whole, on_disk, str(told or "equal")), key=lambda found: found[0])
        except Exception as error:  # facts that no model combines may fail anywhere
            best = min(best, (50.0, {}, str(error)), key=lambda found: found[0])
        self.errors[number, config] = best
        return best

    def score(self, row: Family, bound: float = 1e9) -> float:
        """The sum of the errors on all checkpoints; 1000 more if the first alone is above `bound`."""
        first = self.compared(row, 0)[0]
        return 1000 + first if first > bound else sum(self.compared(row, n)[0] for n in range(len(self.checkpoints)))

    def is_solved(self, score: float) -> bool:
        return score < EQUAL * len(self.checkpoints)

    def improved(self, row: Family) -> tuple[Family, float]:
        """Change one fact at a time, or two if one does not help, while the error falls."""
        end, score = time.monotonic() + SECONDS, self.score(row)
        required = {f.name for f in fields(MixtureConfig) if f.default is f.default_factory} - {"weights_sum_to_one"}
        options = [e for e in self.options if e[0] != "mixture" or e[1] not in required]
        while not self.is_solved(score) and time.monotonic() < end:
            bound = 1.0001 * self.compared(row, 0)[0]
            tried = sorted(((self.score(edited(row, edit), bound), i) for i, edit in enumerate(options)))
            best, steps = tried[0][0], [options[tried[0][1]]]
            if best >= 0.999 * score:
                likely = [
                    options[i] for s, i in tried if abs(s - score) > 1e-9 and s % 1000 < 10 * len(self.checkpoints)
                ]
                for pair in combinations(likely[:60], 2):
                    if pair[0][:2] != pair[1][:2] and time.monotonic() < end:
                        best = self.score(edited(edited(row, pair[0]), pair[1]), bound)
                        if best < 0.999 * score:
                            steps = list(pair)
                            break
                else:
                    break
            for step in steps:
                row = edited(row, step)
            score = best
            told = [f"{n}={'absent' if v is ABSENT else text(v)[:60]}" for _, n, v in steps]
            self.say(f"{' and '.join(told)}: {self.errors_of(row)}")
        return row, score

    def errors_of(self, row: Family) -> str:
        found = [self.compared(row, n)[0] for n in range(len(self.checkpoints))]
        return ", ".join(
            f"{e - 10:.0f} tensors" if 10 < e < 50 else "refused" if e >= 50 else f"{e:.1e}" for e in found
        )

    def nearest(self) -> list[tuple[float, str, Family]]:
        config = self.checkpoints[0].config
        found = [
            (n, repaired(r, config, self.defaults, self.options)) for n, r in FAMILIES.items() if n != self.model_type
        ]
        return sorted(((self.score(row), name, row) for name, row in found), key=lambda one: one[0])

    def shortened(self, row: Family) -> Family:
        """Without the facts that change nothing, in any checkpoint."""
        usual = [("row", name, getattr(Family(), name)) for name in PARTS]
        for edit in [(kind, name, ABSENT) for kind in ("facts", "mixture") for name in getattr(row, kind)] + usual:
            if self.is_solved(self.score(edited(row, edit), EQUAL)):
                row = edited(row, edit)
        return row

    def counterexample(self, row: Family) -> Checkpoint | None:
        """A checkpoint with one changed field that the row neither refuses nor computes."""
        for name, value in changed_fields(self.own):
            try:
                found = checkpoint(self.model_type, {**self.checkpoints[0].settings, name: value})
            except Exception:
                continue  # transformers refuses it
            self.checkpoints.append(found)
            error = self.compared(row, len(self.checkpoints) - 1)[0]
            if EQUAL < error < 10:
                self.say(f"{name}={value} changes transformers' logits in another way: one more checkpoint")
                return found
            self.checkpoints.pop()
            self.errors = {key: e for key, e in self.errors.items() if key[0] < len(self.checkpoints)}
        return None

    def is_idle(self, row: Family, name: str, value: Any) -> bool:
        """Whether the row reads the same with another value of a field."""
        FAMILIES[self.model_type], config = row, self.checkpoints[0].config
        try:
            return decoder_config({**config, name: value}) == decoder_config(config)
        except (ValueError, LookupError, TypeError, AttributeError):
            return False

    def with_defaults(self, row: Family) -> tuple[Family, bool]:
        """The row with the defaults of absent fields that it needs, and whether a configuration without fields is read with them."""
        config = transformers.AutoConfig.for_model(self.model_type, **BARE).to_dict()
        configs = [config, *({k: v for k, v in at.config.items() if k not in self.defaults} for at in self.checkpoints)]

        def reads(row: Family, config: dict[str, Any]) -> DecoderConfig | str:
            FAMILIES[self.model_type] = row
            try:
                return decoder_config(config)
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                return type(error).__name__

        bare = {"model_type": self.model_type, **BARE}

        def needed(row: Family) -> Family:
            for name in row.defaults:
                less = replace(row, defaults={n: v for n, v in row.defaults.items() if n != name})
                if all(reads(less, c) == reads(row, c) for c in [bare, *without(name)]):
                    row = less
            return row

        def without(name: str) -> list[dict[str, Any]]:
            return [{k: v for k, v in c.items() if k != name} for c in configs]

        for has_window in [row.has_window, *(value for _, name, value in self.options if name == "has_window")]:
            for nth in (None, 2, 3, 4, 5, 6):
                given = self.defaults | ({} if nth is None else {"sliding_window_pattern": nth})
                tried = replace(row, has_window=has_window, defaults=given)
                if reads(tried, bare) == reads(tried, config) and isinstance(reads(tried, bare), DecoderConfig):
                    return needed(tried), True
        return needed(row), False


BARE = {"vocab_size": 10, "hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 8, "num_attention_heads": 32}


def changed_fields(own: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Another value of each field."""
    for name, value in own.items():
        if type(value) is bool:
            yield name, not value
        elif type(value) is float:
            yield name, value * 100 if "eps" in name else value * 0.6 or 0.5
        elif type(value) is int and name not in (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
        ):
            small = next((v for k, v in SMALL.items() if re.search(k, name)), value)
            yield (
                name,
                SIZES[name] + 4 if name == "intermediate_size" else 1 if name == "num_key_value_heads" else small + 1,
            )
        elif name.endswith(("_act", "activation")):
            yield name, "gelu" if value != "gelu" else "silu"
        elif name == "rope_parameters" and "rope_type" in value:
            yield name, {**value, "rope_theta": 700.0}
            yield name, YARN
            yield name, {**value, "partial_rotary_factor": 0.5}
        elif value is None and re.search("softcap|window|scale|multiplier", name):
            yield name, 3


# What is written.


def wrapped(items: list[str], indent: int) -> str:
    """Items with commas, on lines of at most 120 characters."""
    lines = [""]
    for item in items:
        if lines[-1] and indent + len(lines[-1]) + len(item) + 2 > 120:
            lines.append("")
        lines[-1] += f"{' ' if lines[-1] else ''}{item},"
    return "\n".join(" " * indent + line for line in lines)


def assigned(name: str, value: Any) -> str:
    if not isinstance(value, dict) or len(text(value)) < 90:
        return f"{name}={text(value)}"
    return f"{name}={{\n{wrapped([f'{text(k)}: {text(v)}' for k, v in value.items()], 12)}\n        }}"


def row_text(model_type: str, row: Family) -> str:
    names = [f.name for f in fields(Family) if text(getattr(row, f.name)) != text(getattr(Family(), f.name))]
    given = [
        assigned(name, getattr(row, name)) for name in sorted(names, key=lambda n: (n != "scores_as", n == "defaults"))
    ]
    short, long = [g for g in given if "\n" not in g], [g for g in given if "\n" in g]
    lines = ([wrapped(short, 8)] if short else []) + [f"        {g}," for g in long]
    return f'    "{model_type}": Family(\n' + "\n".join(lines) + "\n    ),"


def case_text(name: str, model_type: str, settings: dict[str, Any]) -> str:
    return f'    "{name}": ("{model_type}", {{\n{wrapped([f"{text(k)}: {text(v)}" for k, v in settings.items()], 8)}\n    }}),'


def doc_text(model_type: str, row: Family, nearest: str) -> str:
    made = inspect.getsource(type(transformers.AutoConfig.for_model(model_type)))
    models = re.search(r'checkpoint="([^"]+)"', made)
    differs = [f"{n}={text(v)}" for n, v in row.facts.items() if text(v) != text(FAMILIES[nearest].facts.get(n))]
    differs += [f"{n}={text(v)}" for n, v in row.mixture.items() if text(v) != text(FAMILIES[nearest].mixture.get(n))]
    return (
        f"| `{model_type}` | {models[1] if models else model_type} | as `{nearest}`"
        + "".join(f", `{d}`" for d in differs)
        + " |"
    )


def write(model_type: str, row: str, cases: list[str], doc: str, has_experts: bool) -> None:
    """Insert the row, its cases and its line in the second table of docs/families.md."""
    families = ROOT / "lean_ft" / "models" / "families"
    file = families / ("mixtures.py" if has_experts else "dense.py")
    source = file.read_text()
    needed = {n.id for n in ast.walk(ast.parse(f"{{{row}}}".strip(), mode="eval")) if isinstance(n, ast.Name)}
    missing = sorted(
        name for name in needed if not re.search(rf"\b{name}\b", source) and name not in ("fields", "layer", "config")
    )
    for other in sorted(families.glob("*.py")):
        names = [n for n in missing if re.search(rf"^(def {n}\b|{n}\b.*=|.*\b{n}, )", other.read_text(), re.MULTILINE)]
        for name in names if other != file else []:
            source = re.sub(
                r"(?m)^(from lean_ft\.models\.families)",
                rf"from lean_ft.models.families.{other.stem} import {name}\n\1",
                source,
                count=1,
            )
            missing.remove(name)
    file.write_text(f"{row}\n}}\n# fmt: on".join(source.rsplit("}\n# fmt: on", 1)))
    tests = ROOT / "tests" / "models" / "family_cases.py"
    lines = tests.read_text()
    end = re.compile(r"^}$", re.MULTILINE).search(lines, lines.index("CASES: dict[str, tuple"))
    assert end is not None
    tests.write_text(lines[: end.start()] + "\n".join(cases) + "\n" + lines[end.start() :])
    if has_experts:
        adapters = ROOT / "tests" / "peft" / "conftest.py"
        adapters.write_text(re.sub(r"(?m)^(MIXTURES \|= .*)}$", rf'\1, "{model_type}"}}', adapters.read_text(), count=1))
    page = ROOT / "docs" / "families.md"
    head, marker, rest = page.read_text().partition("| `model_type` | models | architecture |")
    table, blank, after = rest.partition("\n\n")
    page.write_text(f"{head}{marker}{table}\n{doc}{blank}{after}")
    python = [sys.executable, "-m"]
    subprocess.run([*python, "ruff", "check", "-q", "--fix", "--select", "I", str(file)], check=False)
    subprocess.run([sys.executable, str(ROOT / "scripts" / "make_families_table.py"), model_type], check=False)
    sys.exit(
        subprocess.run(
            [*python, "pytest", "-q", "-k", model_type, "tests/models/test_families.py", "tests/models/test_parity.py"],
            cwd=ROOT,
        ).returncode
    )


def main() -> int:
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if len(sys.argv) < 2 or sys.argv[1] not in transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        sys.exit(
            f"{sys.argv[1:]}: expected a model_type of a causal language model of transformers, and --write or nothing."
        )
    search = Search(model_type := sys.argv[1])
    search.say(f"{len(search.checkpoints)} checkpoints, {len(FAMILIES)} rows, {len(search.options)} values of facts")
    started = search.nearest()
    for _, name, row in started[:5]:
        search.say(f"{name}: {search.errors_of(row)}")
    _, nearest, row = started[0]
    row, score = search.improved(row)
    while search.is_solved(score):
        row = search.shortened(row)
        if search.counterexample(row) is None:
            break
        row, score = search.improved(row)
    renamed: dict[str, Any] = {}
    for i in range(len(search.checkpoints)):
        renamed |= search.compared(row, i)[1]
    if not search.is_solved(score):
        print(
            f"\n{model_type} needs a fact that no row has. The nearest row, found from {nearest}, and what is left:\n"
        )
        print(row_text(model_type, replace(row, on_disk=renamed, defaults={})))
        for number, at in enumerate(search.checkpoints):
            print(f"\ncheckpoint {number}, {at.settings}:\n  {search.compared(row, number)[2]}")
        idle = [n for n, v in changed_fields(search.own) if search.is_idle(row, n, v)]
        print(f"\nfields of config.json that change nothing here: {', '.join(dict.fromkeys(idle)) or 'none'}")
        return 1
    prefix, layers = stored_prefix(search.checkpoints[0].tensors)
    scores = transformers.models.auto.modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(model_type, "")
    row = replace(row, on_disk=renamed, prefix_on_disk=prefix, prefix_in_memory=prefix, layers=layers)
    row = replace(row, in_memory=names_in_memory(renamed, search.checkpoints[0]), scores_as=scores.removesuffix("ForSequenceClassification"))
    wide = " ".join(getattr(search.checkpoints[0].model, "_keep_in_fp32_modules_strict", None) or ())
    for part, fact in (("e_score_correction_bias", "router_in_float32"), ("gate.weight", "router_weight_in_float32")):
        if row.mixture and part in wide:  # not visible in float32
            row = edited(row, ("mixture", fact, True))
    row, is_whole = search.with_defaults(row)
    if not is_whole:
        kinds = transformers.AutoConfig.for_model(model_type, **{**BARE, "num_hidden_layers": 14}).to_dict().get("layer_types")
        search.say(f"config.json without layer_types: no row has this order of 14 layers. Write has_window for it: {kinds}")
    FAMILIES[model_type] = row
    for at in search.checkpoints:
        with torch.no_grad():
            torch.testing.assert_close(load_model(at.folder)(IDS), at.steps["logits"], atol=1e-4, rtol=1e-4)
    search.say(
        f"{len(search.checkpoints)} folders load with equal logits; every field changed once is equal or refused"
    )
    settings = [search.checkpoints[0].settings, search.checkpoints[1].settings]
    cases = [
        case_text(name, model_type, s) for name, s in zip((model_type, f"{model_type}_others"), settings, strict=True)
    ]
    print(
        "\n"
        + row_text(model_type, row)
        + "\n\n"
        + "\n".join(cases)
        + "\n\n"
        + (doc := doc_text(model_type, row, nearest))
    )
    if "--write" in sys.argv and is_whole:
        write(model_type, row_text(model_type, row), cases, doc, bool(row.mixture))
    return int(not is_whole)


if __name__ == "__main__":
    sys.exit(main())
