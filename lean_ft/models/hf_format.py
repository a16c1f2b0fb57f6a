"""Load Hugging Face model folders.

Every tensor is checked against config.json before memory is allocated. A missing, unexpected or misshapen tensor raises an
error. Each tensor is then read straight into its parameter, so the peak while loading is the size of the model.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any, Literal

import torch
from torch import Tensor

from lean_ft.gguf.cache import gguf_file, names_gguf_file
from lean_ft.hub.paths import resolve_model_path
from lean_ft.images.rules import image_rules
from lean_ft.models.config_json import (
    OF_REWARD,
    as_its_family,
    decoder_config,
    gives_scores,
    kind_of_scores,
    language_model_config,
    score_config,
)
from lean_ft.models.decoder import Decoder
from lean_ft.models.dequantized import Readable, dequantized, form_in_folder
from lean_ft.models.drafting import drafting_of, is_drafting
from lean_ft.models.families import MULTIMODAL
from lean_ft.models.float32_products import use_float32_products
from lean_ft.models.frozen_weight import TENSORS, Frozen
from lean_ft.models.moe import experts_of
from lean_ft.models.new_model import AfterModule, Fill, empty_decoder, fill_model, random_weights
from lean_ft.models.safetensors_file import StoredTensor
from lean_ft.models.source import Source, all_tensors, name_in_language_model, parts_on_disk, tensors_on_disk
from lean_ft.models.stored_weights import CONFIG_PURPOSE, DTYPES, STORED_DTYPES, first_few, stored_tensors
from lean_ft.models.vision.config import VISION_FAMILIES, vision_config
from lean_ft.settings import MemoryConfig, ModelConfig, spelled_out
from lean_ft.system.config_fields import end_ids
from lean_ft.system.shards import Part, part_of, remember_cuts
from lean_ft.system.user_functions import OWN_FAMILIES, use_family
from lean_ft.system.whole_files import read_json
from lean_ft.system.world import world
from lean_ft.tokenizers import load_tokenizer

# Tensors with one row per token, and the config.json field with their number of rows.
_ROWS_PER_TOKEN = {
    "model.embed_tokens.weight": "vocab_size",
    "lm_head.weight": "vocab_size",
    "lm_head.bias": "vocab_size",
    "model.embed_tokens_per_layer.weight": "vocab_size_per_layer_input",
}


class Unread:
    """Weights of a model built on the meta device; call `into()` after sharding. `fill` sets the values of one parameter."""

    def __init__(self, fill: Fill) -> None:
        self.fill = fill

    def into(self, model: Decoder) -> None:
        for name, tensor in all_tensors(model):
            self.fill(name, tensor)


@names_gguf_file
def load_model(
    path: str | Path | ModelConfig,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | str = torch.float32,
    random_init: bool = False,
    router_aux_loss_coef: float | None = None,
    after_module: AfterModule | None = None,
    scores: bool | dict[str, Any] = False,
    new_ids: Sequence[int] = (),
    may_score: bool = False,
    images: Literal["none", "frozen", "train"] = "none",
    memory: MemoryConfig | None = None,
) -> Decoder:
    """Load a Hugging Face folder, a Hub repository (`org/name`) or the embedded `tiny` model, with parameters in `dtype`.

    Peak memory is the model plus 1 MiB, or plus an expert's matrix if the folder has those transposed. On the device `meta` the
    model has shapes only, until `read_weights`.

    Args:
        path: with a `ModelConfig`, its settings replace `dtype`, `random_init`, `router_aux_loss_coef`, `new_ids` and `images`;
            its float16 means mixed precision with float32 parameters.
        random_init: draw weights as transformers does; only config.json is needed.
        router_aux_loss_coef: None uses config.json's coefficient if `output_router_logits` is true there.
        after_module: called with the model and each module's name while the model is on the meta device. It may replace
            weights by quantized ones, so that the others never take memory.
        scores: True loads a reward model, or adds a zero-initialized score layer to a language model. A dict loads or adds a
            classifier with these label fields of config.json. False loads the model as it is.
        new_ids: ids of added tokens. Their rows are the mean of the rows before the first new id.
        may_score: whether a reward model or classifier is accepted without `scores`.
        images: of a multimodal model, load the language model alone, or also the vision tower, frozen or to train.
        memory: frozen weights that these settings keep on the host are loaded there; None loads all to the device.

    Raises:
        ValueError: if config.json or the weights are not as expected; nothing is allocated before this check.
    """
    if isinstance(path, ModelConfig):
        if path.family not in [own.setting for own in OWN_FAMILIES.values()]:  # other settings named another row since
            use_family(path.family)
        dtype = torch.float32 if path.dtype == "float16" else getattr(torch, path.dtype)
        random_init, router_aux_loss_coef = path.random_init, path.router_aux_loss_coef
        images, new_ids, path = path.images, new_token_ids(path), path.path
    dtype = torch_dtype(dtype)
    labels = OF_REWARD if scores is True else scores or None

    def build(folder: Path) -> Decoder:
        model = _meta_model(folder, dtype, router_aux_loss_coef, labels, new_ids, images=images != "none")
        if model.vision is not None:
            model.vision.requires_grad_(images == "train")
        if model.config.num_scores and not scores and not may_score:
            kind = kind_of_scores(model.config.num_scores)
            raise ValueError(f"{folder} is {kind}: it gives scores and no text. Use `leanft score`.")
        if gguf_file(folder) is not None:
            stored_tensors(folder)  # raises unless the file has the model's weights
        return model

    def fill(model: Decoder, weights: Fill | None) -> None:
        if weights is None:
            use_float32_products()
            assert model.source.folder is not None
            weights = random_weights(model) if random_init else _stored_weights(model.source.folder, model)
        if after_module is not None:
            for name in [name for name, _ in model.named_modules()]:
                after_module(model, name)
        if torch.device(device).type == "meta":
            model.source.unread = Unread(weights)
        else:
            fill_model(model, device, weights, memory)

    return _from_folder(path, build, fill, weights=not random_init)


def _from_folder(
    path: str | Path,
    build: Callable[[Path], Decoder],
    fill: Callable[[Decoder, Fill | None], None] | None = None,
    *,
    weights: bool = False,
) -> Decoder:
    """Find a model's folder, with its weights if needed, and build and fill the model."""
    return world().model(path, lambda path: resolve_model_path(path, weights=weights), build, fill)


def torch_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """A dtype of weights from a torch.dtype or a name: `bfloat16`, `torch.bfloat16` or `bf16`."""
    name = spelled_out(dtype)
    found = next((known for known in DTYPES if str(known) == f"torch.{name}"), None)
    if found is None:
        raise ValueError(f"dtype is {dtype}; expected float32, bfloat16 or float16 (a torch.dtype or its name).")
    return found


def new_token_ids(cfg: ModelConfig) -> Sequence[int]:
    """The ids of `model.new_tokens`, in order."""
    return range(load_tokenizer(cfg).vocab_size)[-len(cfg.new_tokens) :] if cfg.new_tokens else ()


@torch.no_grad()
def read_weights(model: Decoder, device: str | torch.device) -> None:
    """Allocate and read the weights of a model that was loaded onto `meta`. A sharded model reads only this rank's rows."""
    assert model.source.unread is not None, "the weights were read before"
    model.to_empty(device=torch.device(device))
    remember_cuts(model.named_parameters(), model.sharding.cuts)
    model.source.unread.into(model)
    model.source.unread = None


@names_gguf_file
def empty_model(
    path: str | Path,
    dtype: torch.dtype,
    router_aux_loss_coef: float | None = None,
    new_ids: Sequence[int] = (),
    *,
    is_quantized: bool = False,
    images: bool = False,
) -> Decoder:
    """The model that `load_model` would return, on the meta device and without reading weights; with `images`, with its vision
    tower. `is_quantized` ignores the quantization in config.json, which `load_model` checks."""
    return _from_folder(
        path, lambda folder: _meta_model(folder, dtype, router_aux_loss_coef, None, new_ids, is_quantized, images)
    )


def _meta_model(
    folder: Path,
    dtype: torch.dtype,
    router_aux_loss_coef: float | None,
    labels: dict[str, Any] | None,
    new_ids: Sequence[int] = (),
    is_quantized: bool = False,
    images: bool = False,
) -> Decoder:
    """The model of a folder's config.json on the meta device; for a multimodal model, its language model, and with `images` its
    vision tower."""
    file, purpose = folder / "config.json", CONFIG_PURPOSE
    if (folder / "adapter_config.json").is_file():
        purpose = (
            "it is an adapter. Set model.path to its base model, and adapter= to this folder to generate with both. For a "
            f"model of both, run `leanft export {quote(str(folder))} merged --merge` and use the folder merged."
        )
    whole_config = as_its_family(read_json(file, purpose))
    if is_quantized:
        whole_config = {key: value for key, value in whole_config.items() if key != "quantization_config"}
    stored_config = hf_config = language_model_config(whole_config, str(file), images)
    if labels:
        hf_config = score_config(stored_config, str(file), labels)
    num_rows = max(new_ids, default=-1) + 1
    sizes = {size: hf_config[size] for size in set(_ROWS_PER_TOKEN.values()) if size in hf_config}
    hf_config = {**hf_config, **{size: max(n, num_rows) for size, n in sizes.items() if isinstance(n, int)}}
    config = decoder_config(hf_config, where=str(file))
    if images:
        tower, rules = vision_config(whole_config, config, str(file)), image_rules(folder)
        config = replace(config, vision=replace(tower, mean=rules.mean, std=rules.std))
    model = empty_decoder(config, dtype)
    model.source = Source(
        folder=folder,
        config={key: value for key, value in hf_config.items() if key != "quantization_config"},
        part_of="" if stored_config is whole_config else whole_config["model_type"],
        new_ids=list(new_ids),
        end_ids=end_ids(folder),
        quantization=hf_config.get("quantization_config") or {},
        score_is_new=labels is not None and not gives_scores(stored_config),
    )
    if images:  # as transformers writes them; `_stored_weights` replaces them by the folder's own
        if MULTIMODAL[model.source.part_of].stacks_experts:
            model.source.stacks = dict.fromkeys(_one_per_expert(model), False)
        model.source.names = {model.source.name_in_whole(place): place for place in tensors_on_disk(model)}
    if (generation_config := folder / "generation_config.json").is_file():
        model.source.generation_config = generation_config.read_bytes()
    elif model.source.part_of and (ends := model.source.end_ids):  # the whole model's win over its text_config's
        model.source.config["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    if router_aux_loss_coef is not None:
        model.router_aux_loss_coef = router_aux_loss_coef
    if model.router_aux_loss_coef and (model.mixture is None or model.mixture.score != "softmax"):
        reason = "has no experts" if model.mixture is None else f"scores experts by {model.mixture.score}"
        coefficient = f"router_aux_loss_coef is {model.router_aux_loss_coef}"
        raise ValueError(f"{coefficient}: it balances a softmax over experts, and {folder} {reason}. Set it to 0.")
    return model


def _stored_weights(folder: Path, model: Decoder) -> Fill:
    """Read the folder's weights. Raises ValueError unless they match the model's parameters."""
    whole = dequantized(stored_tensors(folder), model.source.quantization)
    spellings = None if model.vision is None else VISION_FAMILIES[model.source.part_of].spellings
    own_name = partial(name_in_language_model, spellings=spellings) if model.source.part_of else str
    names = {name: own_name(name) for name in whole}
    if (prefix := model.source.family.prefix_on_disk) != "model." and not any(n.startswith(prefix) for n in whole):
        names = {name: prefix + name for name in whole}  # a folder of the model without its output layer
    own = {own: whole[name] for name, own in names.items() if own is not None}
    stacks = {name: tensor for name in _one_per_expert(model) if isinstance(tensor := own.get(name), StoredTensor)}
    # The same for all, because some may have square matrices.
    shapes = [
        (tensor.shape, tensor.transposed.shape, model.get_parameter(name).shape) for name, tensor in stacks.items()
    ]
    are_transposed = any(plain != expected == transposed for plain, transposed, expected in shapes)
    model.source.stacks = dict.fromkeys(stacks, are_transposed)
    own |= {name: tensor.transposed for name, tensor in stacks.items() if are_transposed}
    stored = _match(model, own, folder)
    if not model.config.num_scores:  # models that give scores draft no tokens
        model.source.drafting = drafting_of(names, whole, model.source, model.config.vocab_size)
    if model.source.part_of:
        # Some folders store a tied output layer too.
        tied = {"lm_head.weight": "model.embed_tokens.weight"} if model.config.tied_embeddings else {}
        names = {name: tied.get(own or "", own) for name, own in names.items()}
        if model.source.score_is_new:
            names = {name: own for name, own in names.items() if not (own or "").startswith("lm_head.")}
            names["score.weight"] = "score.weight"
        has = {*stored, *(["score.weight"] if model.source.score_is_new else [])}
        model.source.names = {name: own if own in has else None for name, own in names.items()}

    def form(name: str) -> Frozen | None:
        parameter = model.get_parameter(name)
        pieces = [stored[place] for place, _ in model.source.stored(name, parameter, as_read=True) if place in stored]
        return form_in_folder(name, pieces, parameter.shape, parameter.dtype) if pieces else None

    model.source.form_in_folder = form

    def read(name: str, parameter: Tensor) -> None:
        owner, _, key = name.rpartition(".")
        if key in (*TENSORS["float8"], *TENSORS["mxfp4"]):  # of a weight that keeps its form
            for place, part in model.source.stored(owner, parameter, as_read=True):
                stored[place].read_stored(key, part)  # pyright: ignore[reportAttributeAccessIssue]
            return
        if model.source.score_is_new and name == "score.weight":
            part_of(parameter).values.zero_()
            return
        for place, part in model.source.stored(name, parameter, as_read=True):
            if model.source.new_ids and name in _ROWS_PER_TOKEN:
                _read_and_add_rows(stored[place], part, model.source.new_ids)
            else:
                stored[place].read_part(part)

    return read


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
    # Not read, as in transformers: drafting layers, rotary frequencies of early Llama folders, and keys and values of layers that
    # use another layer's.
    keys_elsewhere = [i for i, layer in enumerate(config.layers) if layer.kv_from_layer is not None]
    unread = tuple(
        f"model.layers.{i}.self_attn.{own}" for i in keys_elsewhere for own in ("k_proj.", "v_proj.", "k_norm.")
    )
    embedding, head = (model.source.places(f"{own}.weight")[0] for own in ("model.embed_tokens", "lm_head"))
    unread += (head.removesuffix("weight"),) if model.source.score_is_new else ()
    ends = (".rotary_emb.inv_freq", *model.source.family.unread)
    stored = {
        name: tensor
        for name, tensor in stored.items()
        if not name.startswith(unread) and not name.endswith(ends) and not is_drafting(name, model.source.config)
    }
    expected = {name: part.shape for name, part in parts_on_disk(model, as_read=True).items()}
    if model.source.score_is_new:
        del expected["score.weight"]
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
        f"{head.file}: lm_head.weight differs from model.embed_tokens.weight, but tie_word_embeddings of config.json is true. "
        "Set it to false if the model has its own output layer."
    )
