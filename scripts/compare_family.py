"""Compare a row of a model family with small random checkpoints of transformers, for scripts/new_family.py."""

import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from lean_ft.models import DecoderConfig, decoder_config
from lean_ft.models.decoder import Decoder
from lean_ft.models.families import FAMILIES, Family
from lean_ft.models.new_model import empty_decoder, fill_model
from lean_ft.models.source import Source, all_tensors, tensors_on_disk
from tests.models.conftest import reference_model
from tests.models.family_cases import SIZES, YARN

IDS = torch.randint(0, 101, (2, 24), generator=torch.Generator().manual_seed(1))
EQUAL = 1e-4  # largest relative error of equal logits
UNMATCHED, FAILED, REFUSED_BY_ROW = 10.0, 50.0, 100.0  # distances from here on
ERRORS = (ValueError, TypeError, LookupError, AttributeError)  # of a row that reads a foreign config.json
Shape = tuple[int, ...]
Renames = list[tuple[str, tuple[str, ...]]]
# Fields without an effect on the logits, and small values of counts by a part of the field's name.
IDLE = "token|drop|initializer|_range|cache|label|output_|return_|dtype|name|version|problem"
IDLE += "|aux|coef|chunk_size_feed|arch|model_type|is_encoder|pretraining_tp"
SMALL = {
    "group": 1,
    "kv_heads": 2,
    "per_tok|top_?k|moe_k": 2,
    "shared_experts": 1,
    "experts": 6,
    "window|chunk": 7,
    "head_dim": 20,
}
SMALL |= {"rank": 12, "intermediate|ffn|_size|_dim": 24}
SIZES_OF_ALL = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
FOLDERS = tempfile.TemporaryDirectory(prefix="new_family_")  # removed when the process ends


@dataclass(frozen=True)
class Comparison:
    """A row on one checkpoint."""

    distance: float  # at most 2 if all tensors match
    differs: str
    on_disk: dict[str, tuple[str, ...]] = field(default_factory=dict)  # the row's renames of tensors
    is_refused: bool = False  # the row refuses a field of the configuration


@dataclass(frozen=True)
class Checkpoint:
    """A small random model of transformers, in memory and as a folder."""

    settings: dict[str, Any]
    config: dict[str, Any]
    model: Any
    steps: dict[str, Tensor]  # of `steps_of`
    folder: Path
    tensors: dict[str, Tensor]
    in_memory: dict[str, str]  # transformers' names of the folder's tensors
    compared: dict[Any, Comparison] = field(default_factory=dict)


def own_fields(model_type: str, **sizes: Any) -> dict[str, Any]:
    """The fields of a configuration that may change the computation, without those that follow from others."""
    config = transformers.AutoConfig.for_model(model_type, **sizes)
    own = {*config.__dataclass_fields__, *config.attribute_map, *config.attribute_map.values()}
    return {name: v for name, v in config.to_dict().items() if name in own and not re.search(IDLE, name)}


def changed_fields(own: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Another value of each field, several of rotary settings."""
    for name, value in own.items():
        if type(value) is bool:
            yield name, not value
        elif type(value) is float:
            yield name, 1e-3 if "eps" in name else round(value * 0.7, 6) or 0.5
        elif type(value) is int and name not in SIZES_OF_ALL:
            yield name, SIZES.get(name, small(name, value)) + (4 if name in SIZES else 2 if "head_dim" in name else 1)
        elif name.endswith(("_act", "activation", "activation_function")):
            yield name, "gelu" if value != "gelu" else "silu"
        elif name == "rope_parameters" and "rope_type" in (value or {}):
            for change in ({"rope_theta": 700.0}, YARN, {"partial_rotary_factor": 0.5}):
                yield name, {**value, **change}
        elif value is None and re.search("softcap|window|scale|multiplier", name):
            yield name, 3


def small(name: str, value: int) -> int:
    return next((least for part, least in SMALL.items() if re.search(part, name)), value)


def small_settings(own: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of three checkpoints: plain; flags, numbers and heads changed; seven layers in the default order of their
    kinds."""
    counts = {
        name: value
        for name, value in own.items()
        if type(value) is int and (value > 4 or "group" in name) and name not in SIZES
    }
    unset = {name: 0 for name, value in own.items() if value is None and re.search("experts|per_tok", name)}
    plain = {name: small(name, value) for name, value in {**counts, **unset}.items()}
    if own.get("mlp_only_layers"):
        plain["mlp_only_layers"] = [1]
    kinds = list(dict.fromkeys(own.get("layer_types") or []))
    listed = {"layer_types": kinds * 2, "num_hidden_layers": 4} if len(kinds) == 2 else {}
    names = "bias|norm|tie|softcap|num_key_value_heads|head_dim"
    others = {name: new for name, new in changed_fields(own) if type(own[name]) is float or re.search(names, name)}
    return [{**plain, **listed}, {**plain, **listed, **others}, {**plain, "num_hidden_layers": 7}]


def fitting(model_type: str, own: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, with values that suit their sizes in fields that configurations compare with sizes: lists with an
    entry per layer, and numbers and widths of heads. `own` has the defaults."""
    names = transformers.CONFIG_MAPPING[model_type].attribute_map
    settings = {name: v for name, v in settings.items() if name not in {names.get(size) for size in SIZES}}
    sizes = {**SIZES, **settings}
    hidden, layers, heads = (sizes[size] for size in SIZES_OF_ALL if size != "vocab_size")
    num_default = own.get(names.get("num_hidden_layers", "num_hidden_layers"))
    found: dict[str, Any] = {"num_key_value_heads": sizes["num_key_value_heads"] if heads % 2 == 0 else heads}
    for name, value in own.items():
        if isinstance(value, list) and len(value) == num_default:
            kinds = list({str(kind): kind for kind in value}.values())
            first = value[:layers]
            found[name] = first if all(kind in first for kind in kinds) else (kinds * layers)[:layers]
    if isinstance(own.get("attention_types"), list):  # GPT-Neo: kinds, and how often they are repeated
        ((kinds, _), *_) = own["attention_types"]
        rest = [[kinds[: layers % len(kinds)], 1]] if layers % len(kinds) else []
        found["attention_types"] = [[kinds, layers // len(kinds)], *rest]
    if (expand := own.get("mamba_expand", own.get("expand"))) is not None:  # heads of Mamba-2
        of_mamba = "" if "expand" in own else "mamba"
        counts = [name for name in own if of_mamba in name and re.search("(num|n)_(mamba_)?heads$", name)]
        widths = [name for name in own if of_mamba in name and re.search("(d_head|head_?dim)$", name)]
        found |= dict.fromkeys(counts, heads) | dict.fromkeys(widths, int(expand * hidden) // heads)
    if "d_head" in own:
        found["d_head"] = hidden // heads
    return {**settings, **{name: value for name, value in found.items() if name in own}}


def checkpoint(model_type: str, settings: dict[str, Any]) -> Checkpoint:
    model, folder = reference_model(model_type, settings), Path(tempfile.mkdtemp(dir=FOLDERS.name))
    model.save_pretrained(folder)
    tensors = {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
    names = [(own, name) for own, name in product(model.state_dict(), tensors) if own != name]
    state = model.state_dict()
    in_memory = {name: own for own, name in names if name not in state and torch.equal(state[own], tensors[name])}
    # As a config.json that does not list the kinds of layers, unless the settings do.
    config = {name: v for name, v in model.config.to_dict().items() if name in settings or "layer_types" not in name}
    return Checkpoint(settings, config, model, steps_of(model), folder, tensors, in_memory)


@torch.no_grad()
def steps_of(model: nn.Module, given: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The logits after the outputs of each layer, its attention and its feed-forward layer, in the order of the
    computation.

    An output that `given` has replaces the model's own in all that follows.
    """
    steps: dict[str, Tensor] = {}
    hooks = []

    def record(place: str, module: nn.Module) -> None:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            own, *others = output if isinstance(output, tuple) else (output,)
            steps[place] = own.clone()  # falcon adds to the output in place
            if given is not None and place in given and given[place].shape == own.shape:
                own = given[place]
            return (own, *others) if isinstance(output, tuple) else own

        hooks.append(module.register_forward_hook(hook))

    layers = next((module for module in model.modules() if isinstance(module, nn.ModuleList)), None)
    if layers is None:
        raise ValueError(f"{type(model).__name__} has no list of layers")
    for n, layer in enumerate(layers):
        for kind, names in {"attention": "attn|attention", "feed-forward": "mlp|feed_forward|moe|ffn"}.items():
            parts = [part for name, part in layer.named_children() if re.search(names, name) and "norm" not in name]
            for part in parts[:1]:
                record(f"{kind} of layer {n}", part)
        record(f"layer {n}", layer)
    try:
        output = model(IDS)
    finally:
        for hook in hooks:
            hook.remove()
    if not isinstance(logits := output if isinstance(output, Tensor) else getattr(output, "logits", None), Tensor):
        raise ValueError(f"{type(model).__name__} returns no logits for the ids of tokens alone")
    return {**steps, "logits": logits}


def read(row: Family, config: Mapping[str, Any]) -> DecoderConfig | str:
    """The decoder that the row reads from a config.json, or the error."""
    FAMILIES[config["model_type"]] = row
    try:
        return decoder_config(config)
    except ERRORS as error:
        return str(error).removeprefix("config.json: ")


def compared(row: Family, at: Checkpoint) -> Comparison:
    config, refused = at.config, {}
    while isinstance(decoder := read(row, config), str):
        name = decoder.partition(" is ")[0]
        if "is not supported" not in decoder or name in refused:
            return Comparison(REFUSED_BY_ROW, f"refused: {decoder}", is_refused=True)
        config, refused = {**config, name: None}, {**refused, name: f"{name}={config.get(name)}"}
    key = decoder, row.prefix_on_disk, row.transposed
    if key not in at.compared:
        try:
            model = empty_decoder(decoder, torch.float32)
            ours = shapes_of(all_tensors(model))
            theirs = shapes_of(at.tensors.items(), f"{row.prefix_on_disk}{row.layers}")
            ways = [matched_names(ours, theirs, order) for order in (same_and_known(at), same_and_known(at)[::-1])]
            found = [compared_by_names(row, at, model, names) for names in (ways[:1] if ways[0] == ways[1] else ways)]
            at.compared[key] = min(found, key=lambda one: one.distance)
        except Exception as error:  # facts that no model combines fail anywhere
            at.compared[key] = Comparison(FAILED, f"fails: {error}")
    found = at.compared[key]
    if not refused:
        return found
    differs = f"refused: {', '.join(refused.values())}; without it {found.differs}"
    distance = found.distance + (0.5 * len(refused) if found.distance < UNMATCHED else 0.0)
    return replace(found, distance=distance, differs=differs, is_refused=True)


def compared_by_names(row: Family, at: Checkpoint, model: Decoder, names: "Names") -> Comparison:
    if number := len(names.ours) + len(names.theirs):
        rests = {"lean_ft": names.ours, "the folder": names.theirs}
        sides = [f"{with_shapes(rest)} of {owner}" for owner, rest in rests.items() if rest]
        # Renames and fused tensors show earlier if tensors that only lean_ft has count less.
        distance = UNMATCHED + number - 0.1 * len(names.ours) + 0.3 * names.guesses
        return Comparison(distance, f"{number} tensors without a match: {' and '.join(sides)}", names.on_disk)
    FAMILIES[at.config["model_type"]] = replace(row, on_disk=names.on_disk)
    model.source = Source(config=at.config)
    if missing := tensors_on_disk(model).keys() - at.tensors.keys():
        return Comparison(FAILED, f"the folder has no tensor {min(missing)}")

    def fill(name: str, tensor: Tensor) -> None:
        for place, part in model.source.stored(name, tensor):
            part.values.copy_(at.tensors[place])

    fill_model(model, "cpu", fill)
    errors = step_errors(steps_of(model, at.steps), at.steps)
    wrong = [f"{place} ({error:.0e})" for place, error in errors.items() if error > EQUAL]
    if wrong:
        differs = f"first output that differs: {wrong[0]}" + (f"; then {', '.join(wrong[1:])}" if wrong[1:] else "")
        return Comparison(1 + sum(errors.values()) / len(errors) + 0.1 * names.guesses, differs, names.on_disk)
    error = step_errors(steps_of(model), at.steps)["logits"]
    return Comparison(error, "equal" if error < EQUAL else "only the logits of the whole model differ", names.on_disk)


def step_errors(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> dict[str, float]:
    """The relative error of each step that both models have, at most 1."""
    both = [name for name in theirs if name in ours and ours[name].shape == theirs[name].shape]
    errors = {name: (ours[name] - theirs[name]).norm() / theirs[name].norm() for name in both}
    return {name: float(error.nan_to_num(1.0).clamp(max=1.0)) for name, error in errors.items()}


def shapes_of(tensors: Iterable[tuple[str, Tensor]], layers: str = "model.layers") -> dict[str, Shape]:
    """The shapes of the first layer with each tensor, by `pattern`."""
    found: dict[str, Shape] = {}
    for name, tensor in tensors:
        if tensor.numel():
            found.setdefault(pattern(name, layers), tuple(tensor.shape))
    return found


def pattern(name: str, layers: str = "model.layers") -> str:
    """A tensor's name with lean_ft's name of the layers, # for a layer's number and * for an expert's."""
    name = re.sub(rf"^{re.escape(layers)}\.\d+\.", "model.layers.#.", name)
    name = re.sub(rf"^{re.escape(layers.rpartition('.')[0])}\.(?!layers)", "model.", name)
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


class Names(NamedTuple):
    """A row's `on_disk` for a folder, the tensors on either side without a match, and the number matched by likeness
    alone."""

    on_disk: dict[str, tuple[str, ...]]
    ours: dict[str, Shape]
    theirs: dict[str, Shape]
    guesses: int


def same_and_known(at: Checkpoint) -> tuple[Renames, Renames]:
    """The rename that changes nothing, and those of transformers in this folder and of all rows."""
    own = [(short(pattern(own)), (short(pattern(name)),)) for name, own in at.in_memory.items()]
    return [("", ("",))], list(
        dict.fromkeys(own + [entry for row in FAMILIES.values() for entry in row.on_disk.items()])
    )


def matched_names(ours: Mapping[str, Shape], theirs: Mapping[str, Shape], order: tuple[Renames, Renames]) -> Names:
    """Match tensors of one shape by renames in this order, and the rest by the likeness of names."""
    on_disk, by_likeness, left, rest = {}, {}, dict(ours), dict(theirs)
    for name, (part, places) in [pair for renames in order for pair in product(ours, renames) if pair[1][0] in pair[0]]:
        named = [name.replace(part, place) if part else name for place in places]
        shape = ours[name][1:] if "*" in places[0] else ours[name]
        each = shape and (shape[0] // len(places), *shape[1:])
        if name in left and all(rest.get(place) == each for place in named):
            on_disk |= {part: places} if part else {}
            del left[name]
            for place in named:
                del rest[place]
    for own, place in sorted(product(left, rest), key=lambda pair: -likeness(*pair)):
        if own in left and place in rest and kind_of(own) == kind_of(place) and left[own] == rest[place]:
            by_likeness[short(own)] = (short(place),)
            del left[own], rest[place]
    return Names({**by_likeness, **on_disk}, left, rest, len(by_likeness))


@cache
def likeness(own: str, theirs: str) -> float:
    return SequenceMatcher(None, own, theirs).ratio()


def kind_of(name: str) -> tuple[bool, bool]:
    return name.endswith("bias"), "norm" in name or ".ln_" in name


def with_shapes(tensors: Mapping[str, Shape]) -> str:
    return ", ".join(f"{short(name)} {list(shape)}" for name, shape in tensors.items())


def place_of_layers(names: Iterable[str]) -> tuple[str, str]:
    """The prefix of parameters and the name of the layers: `model.` and `layers` of `model.layers.0.mlp.weight`."""
    places = Counter(found.groups() for name in names if (found := re.match(r"(.+?\.)?(\w+)\.\d+\.", name)))
    ((prefix, layers), _), *_ = places.most_common()
    return prefix or "", layers


def short(name: str) -> str:
    return re.sub(r"^model\.layers\.#\.|\.weight$", "", name)
