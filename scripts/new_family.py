"""Find the row of a model family that transformers has and lean_ft does not read.

    python scripts/new_family.py MODEL_TYPE [--write] [--again]

1. Build small random checkpoints with transformers.
2. Compare each row of lean_ft with them: first the names and shapes of tensors, then the outputs of each layer, its
   attention and its feed-forward layer. Each of these gets transformers' input, so a wrong fact shows only where it
   acts.
3. From each of the nearest rows, change one fact or two at a time while the distance falls. The values of a fact are
   those in any row, and readers of this configuration's own fields. Constants come first. The embedding of positions
   changes together with the rotation.
4. Change each field of the configuration once. If the row neither gives equal logits nor refuses the field, go on with
   that checkpoint too. If no facts compute it, the row refuses the other values of that field.
5. Print the row, its test cases and its line of docs/families.md. `--write` inserts them and runs the family's tests.

If no row suffices, print the nearest row and what differs, and exit with 1. `--again` leaves out the row of a type that
lean_ft reads and searches for it. docs/new_family.md walks through an example.
"""

import argparse
import inspect
import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from itertools import combinations, product
from operator import methodcaller
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import torch
import transformers
from transformers.models.auto import modeling_auto

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lean_ft.models import DecoderConfig, load_model  # noqa: E402
from lean_ft.models.config import FamilyParts, MixtureConfig  # noqa: E402
from lean_ft.models.config_json import _DEFAULTS, as_its_family  # noqa: E402
from lean_ft.models.families import ENCODERS, FAMILIES, MULTIMODAL, REFUSED, Family  # noqa: E402
from lean_ft.models.families.family import count, flag, no_rope, number  # noqa: E402
from lean_ft.system.config_fields import ConfigFields  # noqa: E402
from lean_ft.system.spelling import did_you_mean  # noqa: E402
from scripts.compare_family import (  # noqa: E402
    EQUAL,
    ERRORS,
    IDS,
    SIZES_OF_ALL,
    UNMATCHED,
    Checkpoint,
    changed_fields,
    checkpoint,
    compared,
    fitting,
    likeness,
    own_fields,
    place_of_layers,
    read,
    shapes_of,
    small_settings,
    step_errors,
)
from scripts.family_source import (  # noqa: E402
    MADE,
    WHOLE_FIELDS,
    if_flag,
    in_usual_spelling,
    insert,
    reader_of,
    run_tests,
    source_of_case,
    source_of_draws,
    source_of_row,
    table_line,
    text,
)
from tests.models.family_cases import SIZES  # noqa: E402

SECONDS = 60  # of CPU time, of a search from one row
SECONDS_FOR_A_FIELD = 25  # the same, to compute another value of one field
STARTS = 5  # rows to search from
SILENCE = 10  # seconds between lines that show that the search goes on
ABSENT = object()  # the value of a fact that an edit removes
# Sizes of the small checkpoints that change the model where a type reads them.
ARCHITECTURE = ("num_key_value_heads", "head_dim", "intermediate_size")
BARE = {"vocab_size": 10, "hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 8, "num_attention_heads": 32}
# Numbers that decide which layers have a window or experts, in files that do not list them. The search tries others.
GUESSES = {"sliding_window_pattern": 4, "first_k_dense_replace": 1}


class Edit(NamedTuple):
    """A change of a row: a fact, a fact of its mixture, a default, or another field of the row."""

    part: Literal["facts", "mixture", "defaults", "row"]
    name: str
    value: Any

    def __str__(self) -> str:
        return f"{self.name}={'absent' if self.value is ABSENT else text(self.value)}"


Change = tuple[Edit, ...]  # edits of one step of the search


class Search:
    """The checkpoints of a model_type, and the edits of rows that may help."""

    def __init__(self, model_type: str) -> None:
        self.model_type, self.start = model_type, time.monotonic()
        self.last_line = self.start
        self.checkpoints: list[Checkpoint] = []
        self.untried: dict[str, str] = {}  # flags whose other value transformers refuses, with its reason
        self.refused = ""  # the last reason of transformers against a checkpoint
        try:
            self.own = own_fields(model_type)
            sizes = {"hidden_size": 96, "num_attention_heads": 6, "num_hidden_layers": 5}
            try:
                other = own_fields(model_type, **sizes)
            except Exception:  # the sizes contradict other defaults
                other = own_fields(model_type, **fitting(model_type, self.own, sizes))
        except Exception as error:
            self.refused = reason_of(error)
            return
        # Defaults that do not follow from sizes.
        known = {name: value for name, value in self.own.items() if name not in SIZES_OF_ALL and other[name] == value}
        sizes = [value for name, value in known.items() if name.endswith("intermediate_size")]
        self.defaults = {**GUESSES, "intermediate_size": (*sizes, 1)[0], **known}
        names = transformers.CONFIG_MAPPING[model_type].attribute_map
        self.spellings = {names[size]: size for size in SIZES if names.get(size) in self.own and size not in self.own}
        fields_of_type = {*transformers.AutoConfig.for_model(model_type).to_dict(), *names, *names.values()}
        # Sizes that the small checkpoints set and transformers does not read.
        self.ignored = tuple(name for name in ARCHITECTURE if name not in fields_of_type)
        # Of changes that are equally good, the search takes the first: a constant, then the most similar name.
        singles = [(edit,) for edit in edits(self.own)]
        singles.sort(key=lambda one: (is_reader(one[0].value), -likeness(one[0].name, str(one[0]).partition("=")[2])))
        self.options: list[Change] = singles + together(singles)
        for settings in small_settings(self.own):
            tried = [settings, fitting(model_type, self.own, settings)]
            # Some need as many heads of keys as of queries.
            as_many = {"num_key_value_heads": SIZES["num_attention_heads"]}
            for some in (tried[0], {**tried[0], **as_many}, tried[1], {**tried[1], **as_many}):
                try:
                    self.checkpoints.append(checkpoint(model_type, some))
                    break
                except Exception as error:  # transformers refuses some values
                    self.refused = reason_of(error)
            else:
                self.say(f"transformers does not compute {settings}: {self.refused[:150]}")

    def say(self, line: str) -> None:
        self.last_line = time.monotonic()
        print(f"[{self.last_line - self.start:4.0f} s] {line}", flush=True)

    def beat(self, line: str) -> None:
        """Print the line if there was none for a while."""
        if time.monotonic() - self.last_line > SILENCE:
            self.say(f"... {line}")

    def distance(self, row: Family, bound: float = 1e9) -> float:
        """The sum over checkpoints; above 1000 if the first alone is above the bound."""
        first = compared(row, self.checkpoints[0]).distance
        return 1000 + first if first > bound else sum(compared(row, at).distance for at in self.checkpoints)

    def is_solved_by(self, row: Family) -> bool:
        return all(compared(row, at).distance < EQUAL for at in self.checkpoints)

    def difference(self, row: Family) -> str:
        """What differs in the checkpoint that differs most."""
        found = [compared(row, at) for at in self.checkpoints]
        return max(found, key=lambda one: one.distance).differs

    @cache  # noqa: B019
    def with_one_change(self, base: int) -> list[tuple[str, Any, Checkpoint]]:
        """Checkpoints that differ from checkpoint `base` by another value of one field, which is named."""
        found = []
        for name, value in changed_fields(self.own):
            self.beat(f"checkpoints with one changed field: {name}")
            try:
                settings = {**self.checkpoints[base].settings, name: value}
                found.append((name, value, checkpoint(self.model_type, settings)))
            except Exception as error:  # transformers refuses it
                if base == 0 and type(value) is bool:
                    self.untried[name] = reason_of(error)
        return found


def edits(own: Mapping[str, Any]) -> list[Edit]:
    """Each value that a fact has in any row or may have, and readers of this configuration's fields."""
    found: list[Edit] = []
    for row in (row for name, row in FAMILIES.items() if name not in ENCODERS):
        for part in ("facts", "mixture"):
            for name, value in getattr(row, part).items():
                found += [Edit(part, name, value), Edit(part, name, ABSENT)]
        found += [Edit("row", name, getattr(row, name)) for name in WHOLE_FIELDS]
    for part, config in (("facts", DecoderConfig), ("mixture", MixtureConfig)):
        for name, kind in get_type_hints(config).items():
            words = [get_args(one) for one in (kind, *get_args(kind)) if get_origin(one) is Literal]
            values = (True, False) if kind is bool else sum(words, ())
            found += [Edit(part, name, value) for value in values]
    readers = {"flag": (bool, flag), "count": (int, count), "positive": (float, number)}
    for part, name, value in list(found):
        method = reader_of(value)[0] if isinstance(value, methodcaller) else ""
        kind, reader = readers.get(method, (None, None))
        of_kind = [field for field, given in own.items() if type(given) is kind and field not in SIZES]
        found += [Edit(part, name, reader(field)) for field in of_kind if reader]
    usual = {one.name: one.default for one in fields(DecoderConfig)}
    flags = [name for name, value in own.items() if type(value) is bool]
    of_words = [edit for edit in found if edit.part == "facts" and isinstance(edit.value, str)]
    # A flag turns on a number only if their names share a word, because there are many of both.
    numbers = [edit for edit in found if edit.part == "facts" and isinstance(usual.get(edit.name), float)]
    turned_on = [
        *product(of_words, flags),
        *((edit, flag) for edit, flag in product(numbers, flags) if alike(edit, flag)),
    ]
    found += [Edit("facts", name, if_flag(value, flag, usual.get(name))) for (_, name, value), flag in turned_on]
    found.append(Edit("facts", "num_kv_heads", 1))
    found += [Edit("defaults", name, value) for name in GUESSES for value in range(7)]
    found += [Edit("row", "norm_eps_field", name) for name in own if "eps" in name]
    found += [
        Edit("row", "activation_field", name) for name in own if name.endswith(("_act", "activation", "_function"))
    ]
    return list({(edit.part, str(edit)): edit for edit in found}.values())


def is_reader(value: Any) -> bool:
    """Whether a fact reads a flag or number of config.json, rather than being a constant or a rule of another row."""
    return isinstance(value, methodcaller) or (callable(value) and value in MADE)


def alike(edit: Edit, flag: str) -> bool:
    """Whether the fact, a function or number that is no reader itself, shares the stem of a word with a flag."""
    stems = [{word[:5] for word in name.split("_") if len(word) > 3} for name in (edit.name, flag)]
    return edit.value is not ABSENT and not is_reader(edit.value) and bool(stems[0] & stems[1])


def together(singles: list[Change]) -> list[Change]:
    """Changes of facts that help only together: the embedding of positions and the rotation, of which a model has one,
    and LayerNorm with the parameters that only it has."""
    of_positions = [edit for (edit,) in singles if edit.name == "position_row"]
    learned = [(edit, Edit("row", "rope", no_rope)) for edit in of_positions if edit.value is not ABSENT]
    rotations = [edit for (edit,) in singles if edit.name == "rope" and edit.value is not no_rope]
    rotated = [(Edit("facts", "position_row", ABSENT), edit) for edit in rotations]
    centered = [Edit("facts", "norm_centered", True), Edit("facts", "norm_parameters", "weight_and_bias")]
    return [*learned, *rotated, tuple(centered)]


def edited(row: Family, *changes: Edit) -> Family:
    for part, name, value in changes:
        if part == "row":
            row = replace(row, **{name: value})
        else:
            others = {own: fact for own, fact in getattr(row, part).items() if own != name}
            row = replace(row, **{part: others if value is ABSENT else {**others, name: value}})
    return row


def readable(row: Family, search: Search) -> Family:
    """The row with this type's defaults, without facts that read a field which its configuration lacks."""
    first = search.checkpoints[0]
    config = first.config
    lacks_sizes = not {*search.spellings.values()} <= row.preprocessed(config).keys()
    if lacks_sizes or search.ignored:
        row = replace(row, preprocessed=in_usual_spelling(search.spellings, search.ignored))
    own = ConfigFields(row.preprocessed(config), {**_DEFAULTS, **search.defaults}, "config.json")

    def fails(fact: Any, *args: Any) -> bool:
        try:
            return callable(fact) and bool(fact(own, *args) and False)
        except ERRORS:
            return True

    (on_disk, layers), (in_memory, _) = map(place_of_layers, (first.tensors, first.model.state_dict()))
    row = replace(row, prefix_on_disk=on_disk, prefix_in_memory=in_memory, layers=layers)
    lists_windows = "sliding_attention" in own.values.get("layer_types", ())
    row = replace(row, defaults=search.defaults, scores_as="", reads_layer_types=row.reads_layer_types or lists_windows)
    for part in ("facts", "mixture"):
        row = edited(row, *(Edit(part, name, ABSENT) for name, fact in getattr(row, part).items() if fails(fact)))
    if row.own is not None and fails(row.own):
        row = replace(row, own=None, parts=FamilyParts())
    for name, args in {
        "has_window": (0,),
        "rope": (0, False),
        "layer_facts": ([False] * 99, 0),
        "has_mixture": (0,),
    }.items():
        rules = [option[0].value for option in search.options if len(option) == 1 and option[0].name == name]
        values = [getattr(row, name), getattr(Family(), name), *rules]
        row = replace(row, **{name: next((value for value in values if not fails(value, *args)), values[0])})
    return row


def improved(row: Family, search: Search, seconds: float = SECONDS) -> Family:
    """Change one fact, or two if one does not help, while the distance falls."""
    end = time.thread_time() + seconds  # a busy machine finds the same
    while not search.is_solved_by(row) and time.thread_time() < end:
        distance, bound = search.distance(row), 1.0001 * compared(row, search.checkpoints[0]).distance

        def distance_with(change: Change, row: Family = row, distance: float = distance, bound: float = bound) -> float:
            search.beat(f"distance {distance:.1f}; trying {' and '.join(map(str, change))[:90]}")
            return search.distance(edited(row, *change), bound)

        tried = [(distance_with(change), change) for change in search.options]
        best, changes = min(tried, key=lambda one: one[0])
        if best > 0.999 * distance:
            likely = [one for one in tried if edited(row, *one[1]) != row]
            if distance > UNMATCHED:  # constants change tensors more often than readers
                likely.sort(key=lambda one: (callable(one[1][0].value), one[0] > distance, one[0]))
            else:  # first those that change the logits
                likely.sort(key=lambda one: (one[0] == distance, one[0]))
            likely = [change for _, change in likely[:100]]
            pairs = (one + other for one, other in combinations(likely, 2) if time.thread_time() < end)
            changes = next((pair for pair in pairs if distance_with(pair) < 0.999 * distance), ())
        if not changes:
            break
        row = edited(row, *changes)
        search.say(f"{' and '.join(map(str, changes))}: {search.difference(row)[:150]}")
    return row


def shortened(row: Family, search: Search) -> Family:
    """Without the facts that change no checkpoint."""
    facts = [Edit(part, name, ABSENT) for part in ("facts", "mixture") for name in getattr(row, part)]
    for edit in facts + [Edit("row", name, getattr(Family(), name)) for name in (*WHOLE_FIELDS, "preprocessed")]:
        if search.is_solved_by(edited(row, edit)):
            row = edited(row, edit)
    return row


def counterexample(row: Family, search: Search) -> tuple[str, Checkpoint] | None:
    """A field and a checkpoint with another value of it that the row neither refuses nor computes."""
    # Some fields matter only beside others. The third checkpoint does not list the kinds of its layers.
    for base in [base for base in range(len(search.checkpoints)) if base != 2]:
        for name, value, changed in search.with_one_change(base):
            found = compared(row, changed)
            if found.distance > EQUAL and not found.is_refused:
                search.say(f"{name}={value} changes transformers' computation in another way: one more checkpoint")
                return name, changed
    return None


def without_untried(row: Family, search: Search) -> Family:
    """The row that refuses values with which nothing compared it: other texts in fields that it does not read, and the
    other value of flags with which transformers computes nothing."""
    config = search.checkpoints[0].config
    others: dict[str, Any] = {name: not config[name] for name in search.untried}
    others |= {name: f"not {value}" for name, value in search.own.items() if isinstance(value, str) and name in config}
    for name, other in others.items():
        if read(row, {**config, name: other}) == read(row, config):
            row = replace(row, only={**row.only, name: config[name]})
            search.say(f"the row refuses other values of {name} than {config[name]}: nothing was compared with them")
    return row


def ignored_fields(row: Family, search: Search) -> list[str]:
    """Fields that change transformers' model and not the decoder."""
    first, found = search.checkpoints[0], {}
    for name, value, changed in search.with_one_change(0):
        is_same = shapes_of(changed.tensors.items()) == shapes_of(first.tensors.items())
        differs = not is_same or step_errors(changed.steps, first.steps)["logits"] > EQUAL
        decoder = read(row, first.config)
        if differs and isinstance(decoder, DecoderConfig) and decoder == read(row, changed.config):
            found[name] = value
    return list(found)


def with_needed_defaults(row: Family, search: Search) -> Family:
    """The row without the defaults that change nothing where one field is absent, or all are."""
    bare = {"model_type": search.model_type, **BARE}
    for name in row.defaults:
        less = edited(row, Edit("defaults", name, ABSENT))
        configs = [bare, *({k: v for k, v in at.config.items() if k != name} for at in search.checkpoints)]
        if all(read(less, config) == read(row, config) for config in configs):
            row = less
    return row


def names_in_memory(on_disk: Mapping[str, tuple[str, ...]], at: Checkpoint) -> dict[str, str]:
    """The names of modules in transformers where they differ from the folder's."""
    found = {}
    for name, own in at.in_memory.items():
        part, place = next(((part, place) for part, (place, *_) in on_disk.items() if place in name), ("", "*"))
        start, _, end = name.partition(place)
        if "*" not in place and own.startswith(start) and own.endswith(end):
            found[part] = own.removeprefix(start).removesuffix(end)
    return found


def finished(row: Family, search: Search) -> Family:
    """The row with names, and with what float32 does not show."""
    on_disk: dict[str, tuple[str, ...]] = {}
    for at in search.checkpoints:
        on_disk |= compared(row, at).on_disk
    at = search.checkpoints[0]
    scores = modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(search.model_type, "")
    row = replace(row, on_disk=on_disk, in_memory=names_in_memory(on_disk, at))
    row = replace(row, scores_as=scores.removesuffix("ForSequenceClassification"))
    in_float32 = " ".join(at.model._keep_in_fp32_modules_strict or ())
    for part, fact in {
        "e_score_correction_bias": "router_in_float32",
        "gate.weight": "router_weight_in_float32",
    }.items():
        if row.mixture and part in in_float32:
            row = edited(row, Edit("mixture", fact, True))
    return row


def reason_of(error: Exception) -> str:
    """An error of transformers in one line."""
    return " ".join(f"{error}".split()) or type(error).__name__


def reason_against(model_type: str, again: bool) -> str:
    """Why a search makes no sense, or ""."""
    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    family = as_its_family({"model_type": model_type, "hidden_size": 48, "num_attention_heads": 6})["model_type"]
    if model_type in REFUSED:
        return f"lean_ft refuses {model_type}: {REFUSED[model_type]}."
    if model_type in MULTIMODAL:
        return (
            f"lean_ft reads {model_type}: the language model inside is {' or '.join(MULTIMODAL[model_type].families)}."
        )
    if family != model_type:
        return f"lean_ft reads {model_type} already, as {family}."
    if model_type in FAMILIES and not again:
        return f"lean_ft reads {model_type} already. Pass --again to leave out its row and search for it."
    if model_type not in transformers.CONFIG_MAPPING:
        meant = did_you_mean(model_type, causal)
        return f"transformers {transformers.__version__} has no model_type {model_type!r}.{meant}"
    if model_type not in causal:
        return f"{model_type} is not a causal language model in transformers, and lean_ft trains no others."
    return ""


def found_row(search: Search) -> tuple[str, Family, list[str]]:
    """The name of the row that the search starts from, the row made from it, and the kinds of layers whose order it
    lacks."""
    others = [name for name in FAMILIES if name != search.model_type and name not in ENCODERS]  # which give no text
    rows = {name: readable(FAMILIES[name], search) for name in others}
    nearest = sorted(rows, key=lambda name: search.distance(rows[name]))
    for name in nearest[:STARTS]:
        search.say(f"{name}: {search.difference(rows[name])[:150]}")
    name, row = improved_start({name: rows[name] for name in nearest[:STARTS]}, search)
    order: list[str] = []
    while True:
        # With layer_types, which the configuration of seven layers leaves out.
        listed = [replace(at, config=at.model.config.to_dict()) for at in search.checkpoints]
        if not search.is_solved_by(row) and all(compared(row, at).distance < EQUAL for at in listed):
            order, search.checkpoints = listed[2].config["layer_types"], listed
        if not search.is_solved_by(row):
            break
        row = shortened(row, search)
        found = counterexample(row, search)
        if found is None:
            break
        field, changed = found
        search.checkpoints.append(changed)
        computed = improved(row, search, SECONDS_FOR_A_FIELD)
        if search.is_solved_by(computed):
            row = computed
            continue
        search.checkpoints.pop()
        value = changed.model.config.to_dict().get(field)
        search.say(f"no facts compute {field}={value}: the row refuses it. {compared(computed, changed).differs[:150]}")
        row = replace(row, only={**row.only, field: search.checkpoints[0].config.get(field)})
    return name, row, order


def improved_start(rows: Mapping[str, Family], search: Search) -> tuple[str, Family]:
    """The first of the rows from which the search finds the family, or the one with the least distance."""
    ends: dict[str, Family] = {}
    for name, row in rows.items():
        search.say(f"from {name}:")
        ends[name] = improved(row, search)
        if search.is_solved_by(ends[name]):
            return name, ends[name]
    name = min(ends, key=lambda name: search.distance(ends[name]))
    return name, ends[name]


def explain(nearest: str, row: Family, search: Search) -> None:
    """Print what the nearest row lacks."""
    print(f"\nNo row and no combination of facts computes {search.model_type}. The nearest row, made from {nearest}:\n")
    print(source_of_row(search.model_type, replace(row, defaults={})), "\n\nWhat is left:")
    differs = {compared(row, at).differs: at.settings for at in reversed(search.checkpoints)}
    for difference, settings in reversed(differs.items()):
        if difference != "equal":
            print(f"- {difference}\n  with {settings}")
    ignored = ", ".join(ignored_fields(row, search))
    print(f"- fields that change transformers' model and that the row ignores: {ignored or 'none'}")
    print(f"transformers computes it in {inspect.getsourcefile(type(search.checkpoints[0].model))}.")
    print("docs/new_family.md shows how to add a fact. The family's tests need:\n")
    print(*cases_of(search), source_of_draws(search.model_type, row), sep="\n")


def cases_of(search: Search) -> list[str]:
    """The entries of the tests' `CASES` for the first two checkpoints."""
    model_type, ends = search.model_type, ("", "_others")
    pairs = zip(ends, search.checkpoints, strict=False)
    return [source_of_case(f"{model_type}{end}", model_type, at.settings) for end, at in pairs]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_type", help="model_type of config.json")
    parser.add_argument("--write", action="store_true", help="insert the row, its test cases and its line of the docs")
    parser.add_argument("--again", action="store_true", help="search for a type that lean_ft reads, without its row")
    given = parser.parse_args(arguments)
    if reason := reason_against(given.model_type, given.again):
        sys.exit(reason)
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    FAMILIES.pop(given.model_type, None)
    search = Search(given.model_type)
    if len(search.checkpoints) < 3:
        sys.exit(
            f"{given.model_type}: transformers does not compute the small checkpoints that the search compares: "
            f"{search.refused[:300]}"
        )
    search.say(f"{len(search.checkpoints)} checkpoints, {len(FAMILIES)} rows, {len(search.options)} values of facts")
    nearest, row, order = found_row(search)
    if not search.is_solved_by(row):
        explain(nearest, row, search)
        return 1
    row = with_needed_defaults(without_untried(finished(row, search), search), search)
    FAMILIES[given.model_type] = row
    for at in search.checkpoints:
        with torch.no_grad():
            torch.testing.assert_close(load_model(at.folder)(IDS), at.steps["logits"], atol=1e-4, rtol=1e-4)
    search.say(f"{len(search.checkpoints)} folders load with equal logits; each field changed once is equal or refused")
    cases = cases_of(search)
    source, line = source_of_row(given.model_type, row), table_line(given.model_type, row, nearest)
    draws = source_of_draws(given.model_type, row)
    print("", source, *cases, *filter(None, [draws]), line, sep="\n\n")
    if order:
        print(
            "\nOne function is missing: has_window(fields, layer), for a config.json without layer_types. No row "
            f"has\n{order}"
        )
        return 1
    if given.write:
        insert(ROOT, given.model_type, source, cases, draws, line)
        return run_tests(given.model_type)
    return 0


if __name__ == "__main__":
    sys.exit(main())
