"""Load Hugging Face model folders.

Every tensor is checked against config.json before memory is allocated. A missing, unexpected or misshapen tensor raises
an error. Each tensor is then read straight into its parameter, so the peak while loading is the size of the model.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Unpack

import torch
from torch import Tensor

from lean_ft.gguf.cache import gguf_file, names_gguf_file
from lean_ft.hub.paths import planned_model_path, resolve_model_path
from lean_ft.models.beside import files_beside
from lean_ft.models.config import DecoderConfig, DenseConfig
from lean_ft.models.config_json import (
    decoder_config,
    gives_scores,
    gives_vectors,
    kind_of_scores,
    labels_tokens,
    language_model_config,
    score_config,
    vectors_config,
)
from lean_ft.models.decoder import Decoder
from lean_ft.models.dense import read_dense, stored_dense
from lean_ft.models.dequantized import Readable, dequantized, form_in_folder
from lean_ft.models.drafting import (
    drafting_of,
    freeze_trunk,
    is_drafting,
    is_new_layer,
    new_layers,
    with_drafting_layers,
)
from lean_ft.models.families import MULTIMODAL
from lean_ft.models.float32_products import use_float32_products
from lean_ft.models.frozen_weight import TENSORS, Frozen
from lean_ft.models.load_options import LoadKeywords, LoadOptions, load_options
from lean_ft.models.moe import experts_of
from lean_ft.models.new_model import Fill, empty_decoder, fill_model, random_weights
from lean_ft.models.safetensors_file import StoredTensor
from lean_ft.models.source import Source, all_tensors, name_in_language_model, tensors_on_disk
from lean_ft.models.stored_weights import STORED_DTYPES, first_few, stored_config, stored_tensors
from lean_ft.models.vision.config import VISION_FAMILIES, read_tower
from lean_ft.settings import ModelConfig
from lean_ft.system.config_fields import end_ids
from lean_ft.system.shards import Part, part_of, remember_cuts
from lean_ft.system.world import world

# Tensors with one row per token, and the config.json field with their number of rows.
_ROWS_PER_TOKEN = {
    "model.embed_tokens.weight": "vocab_size",
    "lm_head.weight": "vocab_size",
    "lm_head.bias": "vocab_size",
    "model.embed_tokens_per_layer.weight": "vocab_size_per_layer_input",
}


class Unread:
    """Weights of a model built on the meta device; call `into()` after sharding. `fill` sets the values of one
    parameter."""

    def __init__(self, fill: Fill) -> None:
        self.fill = fill

    def into(self, model: Decoder) -> None:
        for name, tensor in all_tensors(model):
            self.fill(name, tensor)


@dataclass(frozen=True)
class Spec:
    """A model as its folder's config.json and the options describe it, without tensors."""

    config: DecoderConfig
    source: Source
    options: LoadOptions


def load_model(
    path: str | Path | ModelConfig, device: str | torch.device = "cpu", **options: Unpack[LoadKeywords]
) -> Decoder:
    """Load a Hugging Face folder, a Hub repository (`org/name`) or the embedded `tiny` model.

    Peak memory is the model plus 1 MiB, or plus an expert's matrix if the folder has those transposed. On the device
    `meta` the model has shapes only, until `read_weights`.

    Args:
        path: with a `ModelConfig`, its settings are the options that are not given; its float16 means mixed precision
            with float32 parameters.
        options: the fields of `LoadOptions`: dtype, random_init, images, scores, new_ids, router_aux_loss_coef,
            quantize and memory.

    Raises:
        ValueError: if config.json or the weights are not as expected, or without `scores` for a reward model, a
            classifier, a text encoder, and a model without an output layer; nothing is allocated before this check.
    """
    return _load(path, options, device)


def empty_model(
    path: str | Path | ModelConfig, *, is_quantized: bool = False, **options: Unpack[LoadKeywords]
) -> Decoder:
    """The model that `load_model` would return, on the meta device and without reading or quantizing weights; also a
    reward model or classifier without `scores`. `is_quantized` ignores the quantization in config.json, which
    `load_model` checks."""
    return _load(path, options, None, is_quantized)


@names_gguf_file
def _load(
    path: str | Path | ModelConfig,
    keywords: LoadKeywords,
    device: str | torch.device | None,
    is_quantized: bool = False,
) -> Decoder:
    """`load_model`; without a device `empty_model`."""
    here, (place, options) = world(), load_options(path, keywords)
    needs_weights = device is not None and not options.random_init
    folder = here.read(lambda: resolve_model_path(place, weights=needs_weights), lambda: planned_model_path(place))
    options = options.for_folder(folder)
    spec = read_spec(folder, options, is_quantized)
    settings = path if isinstance(path, ModelConfig) else None
    if settings is not None and settings.mtp == "train":
        spec = replace(spec, config=with_drafting_layers(spec.config, spec.source))
    if device is None:
        return build(spec)
    if spec.config.num_scores and options.scores is None:
        kind = kind_of_scores(spec.config.num_scores)
        raise ValueError(f"{folder} is {kind}: it gives scores and no text. Use `leanft score`.")
    if options.scores is None and gives_vectors(spec.source.config):
        why = "its tokens see later ones" if spec.config.bidirectional else "it has no output layer"
        raise ValueError(f"{folder} gives vectors and no text: {why}. Use `leanft run embed` or `leanft embed`.")
    if gguf_file(folder) is not None:
        stored_tensors(folder)  # raises unless the file has the model's weights
    model = build(spec)
    if settings is not None and settings.trains_drafting_alone:
        freeze_trunk(model)

    def open_weights() -> Fill:
        use_float32_products()
        if options.random_init:
            return random_weights(model)
        return _stored_weights(model, drops_drafting=settings is not None and settings.mtp == "drop")

    here.fill(model, open_weights, lambda fill: _fill(model, device, fill, options))
    return model


def _fill(model: Decoder, device: str | torch.device, fill: Fill, options: LoadOptions) -> None:
    """Quantize and fill a model on the meta device. For the device `meta`, it is filled by `read_weights`."""
    if options.quantize is not None:
        for name in [name for name, _ in model.named_modules()]:
            options.quantize(model, name)
    if torch.device(device).type == "meta":
        model.source.unread = Unread(fill)
    else:
        fill_model(model, device, fill, options.memory)


@torch.no_grad()
def read_weights(model: Decoder, device: str | torch.device) -> None:
    """Allocate and read the weights of a model that was loaded onto `meta`. A sharded model reads only this rank's
    rows."""
    assert model.source.unread is not None, "the weights were read before"
    model.to_empty(device=torch.device(device))
    remember_cuts(model.named_parameters(), model.sharding.cuts)
    model.source.unread.into(model)
    model.source.unread = None


def read_spec(folder: Path, options: LoadOptions, is_quantized: bool = False) -> Spec:
    """Read a folder's config.json; of a multimodal model, that of its language model, and with `options.has_tower` that
    of its vision tower. `is_quantized` ignores the quantization. Raises ValueError for an unsupported model."""
    where, whole = str(folder / "config.json"), stored_config(folder)
    if is_quantized:
        whole = {key: value for key, value in whole.items() if key != "quantization_config"}
    stored = hf_config = language_model_config(whole, where, options.has_tower)
    if options.gives_vectors:
        if options.has_tower:
            raise ValueError(f"model.images={options.images} is not supported for vectors of texts. Set it to none.")
        hf_config = vectors_config(stored)
    elif options.scores is not None:
        hf_config = score_config(stored, where, options.scores)
        if labels_tokens(hf_config) and stored is not whole:
            raise ValueError(
                f"{where}: model_type is {whole['model_type']!r}, and transformers has no token classification model "
                "of that multimodal family. Use a model of text alone."
            )
    num_rows = max(options.new_ids, default=-1) + 1
    sizes = {size: hf_config[size] for size in set(_ROWS_PER_TOKEN.values()) if size in hf_config}
    hf_config = {**hf_config, **{size: max(n, num_rows) for size, n in sizes.items() if isinstance(n, int)}}
    config = decoder_config(hf_config, where=where)
    if options.has_tower:
        config = replace(config, vision=read_tower(folder, whole, config))
    if options.gives_vectors:
        config = without_output(config, read_dense(folder, config.hidden_size))
    source = Source(
        folder=folder,
        config={key: value for key, value in hf_config.items() if key != "quantization_config"},
        part_of="" if stored is whole else whole["model_type"],
        new_ids=list(options.new_ids),
        end_ids=end_ids(folder),
        beside=files_beside(folder),
        quantization=hf_config.get("quantization_config") or {},
        is_bare=options.gives_vectors,
        dense=tuple(layer.folder for layer in config.dense),
        score_is_new=bool(config.num_scores) and not gives_scores(stored),
    )
    if (generation_config := folder / "generation_config.json").is_file():
        source.generation_config = generation_config.read_bytes()
    elif source.part_of and (ends := source.end_ids):  # the whole model's win over its text_config's
        source.config["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    return Spec(config, source, options)


def without_output(config: DecoderConfig, dense: tuple[DenseConfig, ...] = ()) -> DecoderConfig:
    """The same decoder without its output layer, and with layers after pooling."""
    of_logits = {"head_bias": False, "logits_softcap": None, "logits_divisor": 1.0}
    return replace(config, has_output=False, num_scores=0, dense=dense, **of_logits)


def build(spec: Spec) -> Decoder:
    """The model on the meta device. Raises ValueError for a router's coefficient that it cannot use."""
    model, options = empty_decoder(spec.config, spec.options.dtype), spec.options
    source = model.source = spec.source
    if model.vision is not None:
        model.vision.requires_grad_(options.trains_tower)
        # As transformers writes them; `_stored_weights` replaces them by the folder's own.
        if MULTIMODAL[source.part_of].stacks_experts:
            source.stacks = dict.fromkeys(_one_per_expert(model), False)
        source.names = {source.name_in_whole(place): place for place in tensors_on_disk(model)}
    if options.router_aux_loss_coef is not None:
        model.router_aux_loss_coef = options.router_aux_loss_coef
    if model.router_aux_loss_coef and (model.mixture is None or model.mixture.score != "softmax"):
        reason = "has no experts" if model.mixture is None else f"scores experts by {model.mixture.score}"
        coefficient = f"router_aux_loss_coef is {model.router_aux_loss_coef}"
        raise ValueError(
            f"{coefficient}: it balances a softmax over experts, and {source.folder} {reason}. Set it to 0."
        )
    return model


def _stored_weights(model: Decoder, drops_drafting: bool = False) -> Fill:
    """Read the folder's weights; with `drops_drafting`, as if it had no drafting layers. Raises ValueError unless they
    match the model's parameters."""
    source = model.source
    assert source.folder is not None
    whole = dequantized(stored_tensors(source.folder), source.quantization)
    names = _names_in_language_model(model, whole)
    if drops_drafting:
        names = {name: own for name, own in names.items() if own is None or not is_drafting(own, source.config)}
    own = {own: whole[name] for name, own in names.items() if own is not None}
    own |= stored_dense(source.folder, model.config.dense)
    stacks = {name: tensor for name in _one_per_expert(model) if isinstance(tensor := own.get(name), StoredTensor)}
    # The same for all, because some may have square matrices.
    shapes = [
        (tensor.shape, tensor.transposed.shape, model.get_parameter(name).shape) for name, tensor in stacks.items()
    ]
    are_transposed = any(plain != expected == transposed for plain, transposed, expected in shapes)
    source.stacks = dict.fromkeys(stacks, are_transposed)
    own |= {name: tensor.transposed for name, tensor in stacks.items() if are_transposed}
    draw = new_layers(model, own)
    stored = _match(model, own, source.folder)
    source.drafting = drafting_of(names, whole, model)
    if source.part_of:
        _keep_names(model, names, stored)

    def form(name: str) -> Frozen | None:
        parameter = model.get_parameter(name)
        pieces = [stored[place] for place, _ in source.stored(name, parameter, as_read=True) if place in stored]
        return form_in_folder(name, pieces, parameter.shape, parameter.dtype) if pieces else None

    source.form_in_folder = form

    def fill(name: str, parameter: Tensor) -> None:
        if draw is not None and is_new_layer(name, source):
            draw(name, parameter)
        else:
            _read(source, stored, name, parameter)

    return fill


def _names_in_language_model(model: Decoder, whole: Iterable[str]) -> dict[str, str | None]:
    """The names that a folder's tensors have in a folder of the language model; None for tensors that the model does
    not have."""
    source = model.source
    spellings = None if model.vision is None else VISION_FAMILIES[source.part_of].spellings
    names = dict[str, str | None]()
    for name in whole:
        names[name] = name_in_language_model(name, spellings) if source.part_of else name
    prefix, bare_prefix = source.family.prefix_on_disk, source.family.prefix_on_disk.partition(".")[2]
    if not any(own is not None and own.startswith(prefix) for own in names.values()):  # without its output layer
        names = {name: own and prefix + own.removeprefix(bare_prefix) for name, own in names.items()}
        if source.is_bare and source.folder is not None:  # saved under the name that it has
            source.config["architectures"] = stored_config(source.folder).get("architectures")
    if not source.is_bare:
        return names
    # Output layers are outside the prefix.
    of_model = {name: own for name, own in names.items() if own is not None and own.startswith(prefix)}
    own_names = {
        name: bare_prefix + own.removeprefix(prefix)
        for name, own in of_model.items()
        if not is_drafting(own, source.config)
    }
    return dict.fromkeys(names) | own_names


def _keep_names(model: Decoder, names: dict[str, str | None], stored: Mapping[str, Readable]) -> None:
    """Set `source.names` of a multimodal model's folder."""
    # Some folders store a tied output layer too.
    tied = {"lm_head.weight": "model.embed_tokens.weight"} if model.config.tied_embeddings else {}
    names = {name: tied.get(own or "", own) for name, own in names.items()}
    kept = {*stored}
    if model.source.score_is_new:
        names = {name: own for name, own in names.items() if not (own or "").startswith("lm_head.")}
        names["score.weight"] = "score.weight"
        kept.add("score.weight")
    model.source.names = {name: own if own in kept else None for name, own in names.items()}


def _read(source: Source, stored: Mapping[str, Readable], name: str, parameter: Tensor) -> None:
    """Fill a parameter, or this rank's part of it, from the folder."""
    owner, _, key = name.rpartition(".")
    if key in (*TENSORS["float8"], *TENSORS["mxfp4"]):  # of a weight that keeps its form
        for place, part in source.stored(owner, parameter, as_read=True):
            stored[place].read_stored(key, part)  # pyright: ignore[reportAttributeAccessIssue]
        return
    if source.score_is_new and name.startswith("score."):
        part_of(parameter).values.zero_()
        return
    for place, part in source.stored(name, parameter, as_read=True):
        if source.new_ids and name in _ROWS_PER_TOKEN:
            _read_and_add_rows(stored[place], part, source.new_ids)
        else:
            stored[place].read_part(part)


def _one_per_expert(model: Decoder) -> list[str]:
    """The parameters that stack the matrices of all experts and have a tensor per expert in the family's folders."""
    stacks = {f"{at}.{own}": p for at, experts in experts_of(model).items() for own, p in experts.named_parameters()}
    return [name for name, p in stacks.items() if next(model.source.stored(name, p))[0] != name]


def _read_and_add_rows(stored: Readable, part: Part, new_ids: Sequence[int]) -> None:
    """Fill a matrix (V, D) with one row per token; the folder may have fewer rows. For a part of the matrix, the whole
    matrix is allocated for a moment."""
    is_whole = part.values.shape == part.shape
    whole = part.values if is_whole else torch.empty(part.shape, dtype=part.dtype, device=part.values.device)
    num_stored = stored.shape[0]
    stored.read_part(part_of(whole[:num_stored]))
    mean = whole[: min(num_stored, new_ids[0])].mean(0, dtype=torch.float32).to(whole.dtype)
    whole[num_stored:] = mean
    whole[new_ids[0] : new_ids[-1] + 1] = mean
    if not is_whole:
        part.values.copy_(part.within(whole))


def _match(model: Decoder, stored: dict[str, Readable], folder: Path) -> dict[str, Readable]:
    """The stored tensors of the model's parameters. Raises ValueError unless they match one to one."""
    config = model.config
    # Not read, as in transformers: drafting layers, rotary frequencies of early Llama folders, and keys and values of
    # layers that use another layer's.
    keys_elsewhere = [i for i, layer in enumerate(config.layers) if layer.kv_from_layer is not None]
    unread = tuple(
        f"{model.source.prefix_on_disk}layers.{i}.self_attn.{own}"
        for i in keys_elsewhere
        for own in ("k_proj.", "v_proj.", "k_norm.")
    )
    embedding, head = (model.source.places(f"{own}.weight")[0] for own in ("model.embed_tokens", "lm_head"))
    unread += (head.removesuffix("weight"),) if model.source.score_is_new else ()
    ends = (".rotary_emb.inv_freq", *model.source.family.unread)
    stored = {
        name: tensor
        for name, tensor in stored.items()
        if not name.startswith(unread) and not name.endswith(ends) and not is_drafting(name, model.source.config)
    }
    expected = {
        place: part.shape
        for name, tensor in all_tensors(model)
        if not is_new_layer(name, model.source)
        for place, part in model.source.stored(name, tensor, as_read=True)
    }
    if model.source.score_is_new:
        expected = {name: shape for name, shape in expected.items() if not name.startswith("score.")}
    if missing := expected.keys() - stored.keys():
        lacking = f"the weights lack {first_few(missing)}"
        raise ValueError(f"{folder}: {lacking}. They are incomplete, or config.json belongs to another model.")
    if config.tied_embeddings and head in stored:
        _check_tied(stored[embedding], stored.pop(head))
    if unexpected := stored.keys() - expected.keys():
        file, names = stored[min(unexpected)].file, first_few(unexpected)
        raise ValueError(
            f"{file}: unexpected tensors: {names}. config.json belongs to another model, or lacks a field."
        )
    of_tokens = {place for own in _ROWS_PER_TOKEN for place in model.source.places(own)}
    for name, tensor in stored.items():
        shape = expected[name]
        if model.source.new_ids and name in of_tokens and 0 < tensor.shape[0] <= shape[0]:
            shape = (tensor.shape[0], *shape[1:])  # the folder has no rows of new tokens
        if tensor.shape != shape:
            shapes = f"{list(tensor.shape)}; expected from config.json: {list(shape)}"
            raise ValueError(f"{tensor.file}: {name} has the shape {shapes}.")
        if tensor.dtype not in STORED_DTYPES:
            stored_as = f"{name} is stored as {tensor.dtype_name}; expected F32, BF16, F16 or F64"
            raise ValueError(f"{tensor.file}: {stored_as}. Use the unquantized model.")
    return stored


def _check_tied(embedding: Readable, head: Readable) -> None:
    """Raise ValueError unless a stored tied output layer equals the embedding."""
    is_alike = (embedding.shape, embedding.dtype) == (head.shape, head.dtype) and head.dtype in STORED_DTYPES
    if is_alike and isinstance(embedding, StoredTensor) and isinstance(head, StoredTensor):  # neither is quantized
        is_alike = all(a == b for a, b in zip(embedding.pieces(2**24), head.pieces(2**24), strict=True))
    else:
        is_alike = False
    if is_alike:
        return
    raise ValueError(
        f"{head.file}: lm_head.weight differs from model.embed_tokens.weight, but tie_word_embeddings of config.json "
        "is true. Set it to false if the model has its own output layer."
    )
