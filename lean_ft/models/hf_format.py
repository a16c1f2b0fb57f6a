"""Load and save Hugging Face model folders.

Every tensor is checked against config.json before memory is allocated. A missing, unexpected or misshapen tensor raises an
error. Each tensor is then read straight into its parameter, so the peak while loading is the size of the model. Pickled
weights (.bin, .pth) can run code when they are opened, so only safetensors files are read.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor, nn

from lean_ft.hub.download import home_of_links
from lean_ft.hub.paths import resolve_model_path
from lean_ft.models.config import DecoderConfig
from lean_ft.models.config_json import (
    MAX_LAYERS,
    OF_REWARD,
    as_its_family,
    decoder_config,
    gives_scores,
    kind_of_scores,
    language_model_config,
    score_config,
)
from lean_ft.models.decoder import Decoder
from lean_ft.models.dequantized import Readable, dequantized
from lean_ft.models.float32_products import use_float32_products
from lean_ft.models.gguf_tensors import GGUF_INDEX, gguf_file, gguf_tensors
from lean_ft.models.layers import XIELU_START
from lean_ft.models.names_on_disk import name_in_language_model, parameters_on_disk
from lean_ft.models.safetensors_file import StoredTensor, read_header, write_file
from lean_ft.models.source import Source, source_of
from lean_ft.settings import ModelConfig, spelled_out
from lean_ft.system.shards import ALONE, Part, Ranks, part_of, remember_cuts
from lean_ft.system.whole_files import read_json, write_json, write_whole
from lean_ft.system.world import world
from lean_ft.tokenizers import load_tokenizer
from lean_ft.torch_private import without_modes

_WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_STORED_DTYPES = (*_DTYPES, torch.float64)

_FINGERPRINT_PAGES = 8192
# Tensors with one row per token, and the config.json field with their number of rows.
_ROWS_PER_TOKEN = {
    "model.embed_tokens.weight": "vocab_size",
    "lm_head.weight": "vocab_size",
    "lm_head.bias": "vocab_size",
    "model.embed_tokens_per_layer.weight": "vocab_size_per_layer_input",
}

_CONFIG_PURPOSE = "it describes the model. Set model.path to a model's folder."
AfterModule = Callable[[Decoder, str], None]
Fill = Callable[[str, Tensor], None]


class Unread:
    """Weights of a model built on the meta device; call `into()` after sharding. `fill` sets the values of one parameter."""

    def __init__(self, fill: Fill) -> None:
        self.fill = fill

    def into(self, model: Decoder) -> None:
        for name, tensor in _tensors(model):
            self.fill(name, tensor)


def load_model(
    path: str | Path | ModelConfig,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | str = torch.float32,
    random_init: bool = False,
    router_aux_loss_coef: float | None = None,
    after_module: AfterModule | None = None,
    scores: bool | dict[str, Any] | None = False,
    new_ids: Sequence[int] = (),
) -> Decoder:
    """Load a Hugging Face folder, a Hub repository (`org/name`) or the embedded `tiny` model, with parameters in `dtype`.

    Peak memory is the model plus 1 MiB. On the device `meta` the model has shapes only, until `read_weights`.

    Args:
        path: with a `ModelConfig`, its settings replace `dtype`, `random_init`, `router_aux_loss_coef` and `new_ids`; its
            float16 means mixed precision with float32 parameters.
        random_init: draw weights as transformers does; only config.json is needed.
        router_aux_loss_coef: None uses config.json's coefficient if `output_router_logits` is true there.
        after_module: called with the model and each module's name once the module has its weights. It may replace the
            module by a smaller one before the next module takes memory.
        scores: True loads a reward model, or adds a zero-initialized score layer to a language model. False refuses models
            that give scores. None accepts both kinds. A dict adds or expects a classifier with these label fields of config.json.
        new_ids: ids of added tokens. Their rows are the mean of the rows before the first new id.

    Raises:
        ValueError: if config.json or the weights are not as expected; nothing is allocated before this check.
    """
    if isinstance(path, ModelConfig):
        dtype = torch.float32 if path.dtype == "float16" else getattr(torch, path.dtype)
        random_init, router_aux_loss_coef = path.random_init, path.router_aux_loss_coef
        new_ids, path = new_token_ids(path), path.path
    dtype = torch_dtype(dtype)

    def fill(model: Decoder, weights: Fill | None) -> None:
        if weights is None:
            use_float32_products()
            assert model.source.folder is not None
            weights = _random_weights(model.config) if random_init else _stored_weights(model.source.folder, model)
        if torch.device(device).type == "meta":
            model.source.unread = Unread(weights)
            if after_module is not None:
                for name in [name for name, _ in model.named_modules()]:
                    after_module(model, name)
        else:
            _fill(model, device, weights, after_module)

    return _from_folder(path, not random_init, fill, dtype, router_aux_loss_coef, scores, new_ids)


def _from_folder(
    path: str | Path, weights: bool, fill: Callable[[Decoder, Fill | None], None] | None, *facts: Any
) -> Decoder:
    """Find a model's folder, with its weights if needed, and build and fill the model. `facts`: of `_meta_model`."""
    return world().model(
        path,
        find=lambda path: resolve_model_path(path, weights=weights),
        build=lambda folder: _meta_model(folder, *facts),
        fill=fill,
    )


def torch_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """A dtype of weights from a torch.dtype or a name: `bfloat16`, `torch.bfloat16` or `bf16`."""
    name = spelled_out(dtype)
    found = next((known for known in _DTYPES if str(known) == f"torch.{name}"), None)
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


def stored_dtype(folder: Path) -> torch.dtype:
    """The narrowest of bfloat16, float16 and float32 that holds every stored tensor exactly. Tensors that a model always
    keeps in float32 do not count."""
    dtype: torch.dtype | None = None
    config = language_model_config(as_its_family(read_json(folder / "config.json", _CONFIG_PURPOSE)))
    mixture = decoder_config(config, where=str(folder / "config.json")).mixture
    always_float32 = () if mixture is None else mixture.in_float32
    for name, tensor in dequantized(stored_tensors(folder), config.get("quantization_config") or {}).items():
        if tensor.dtype in _STORED_DTYPES and not name.endswith(always_float32):  # load_model refuses other dtypes
            dtype = tensor.dtype if dtype is None else torch.promote_types(dtype, tensor.dtype)
    return dtype if dtype in _DTYPES else torch.float32


def weights_fingerprint(folder: Path) -> str | None:
    """A SHA-256 digest of names, dtypes, shapes and sampled bytes of all tensors; None for a folder without weights.

    The digest does not depend on the folder's path, file names, sharding or file times. It reads about 8,192 pages, which
    takes seconds. A change that lies entirely between the sampled pages is not detected.
    """
    if not any((folder / name).is_file() for name in (_WEIGHTS, WEIGHTS_INDEX, GGUF_INDEX)):
        return None
    tensors, digest = stored_tensors(folder), hashlib.sha256()
    for name, stored in sorted(tensors.items()):
        digest.update(f"{name} {stored.dtype_name} {list(stored.shape)}\n".encode())
        for page in stored.pieces(4096, at_most=max(2, _FINGERPRINT_PAGES // len(tensors))):
            digest.update(page)
    return digest.hexdigest()


def empty_model(
    path: str | Path,
    dtype: torch.dtype,
    router_aux_loss_coef: float | None = None,
    new_ids: Sequence[int] = (),
    *,
    is_quantized: bool = False,
) -> Decoder:
    """The model that `load_model` would return, on the meta device and without reading weights. `is_quantized` ignores the
    quantization in config.json, which `load_model` checks."""
    return _from_folder(path, False, None, dtype, router_aux_loss_coef, None, new_ids, is_quantized)


def _meta_model(
    folder: Path,
    dtype: torch.dtype,
    router_aux_loss_coef: float | None,
    scores: bool | dict[str, Any] | None,
    new_ids: Sequence[int] = (),
    is_quantized: bool = False,
) -> Decoder:
    """The model of a folder's config.json on the meta device; for a multimodal model, its language model."""
    file, purpose = folder / "config.json", _CONFIG_PURPOSE
    if (folder / "adapter_config.json").is_file():
        purpose = (
            "it is an adapter. Set model.path to its base model, and adapter= to this folder to generate with both. For a "
            f"model of both, run `leanft export {folder} merged --merge` and use the folder merged."
        )
    whole_config = as_its_family(read_json(file, purpose))
    if is_quantized:
        whole_config = {key: value for key, value in whole_config.items() if key != "quantization_config"}
    stored_config = hf_config = language_model_config(whole_config, where=str(file))
    if scores:
        hf_config = score_config(stored_config, str(file), OF_REWARD if scores is True else scores)
    score_is_new = bool(scores) and not gives_scores(stored_config)
    num_rows = max(new_ids, default=-1) + 1
    sizes = {size: hf_config[size] for size in set(_ROWS_PER_TOKEN.values()) if size in hf_config}
    hf_config = {**hf_config, **{size: max(n, num_rows) for size, n in sizes.items() if isinstance(n, int)}}
    model = _empty_decoder(decoder_config(hf_config, where=str(file)), dtype)
    if model.config.scores and scores is False:
        kind = kind_of_scores(model.config.scores)
        raise ValueError(f"{folder} is {kind}: it gives scores and no text. Use `leanft score`.")
    model.source = Source(
        folder=folder,
        config={key: value for key, value in hf_config.items() if key != "quantization_config"},
        part_of="" if stored_config is whole_config else whole_config["model_type"],
        new_ids=list(new_ids),
        quantization=hf_config.get("quantization_config") or {},
        score_is_new=score_is_new,
    )
    generation_config = folder / "generation_config.json"
    ends = read_json(generation_config).get("eos_token_id")
    if not all(end is None or type(end) is int for end in (ends if isinstance(ends, list) else [ends])):
        raise ValueError(f"{generation_config}: eos_token_id is {ends!r}; expected an id or a list of ids.")
    model.source.generation_config = generation_config.read_bytes() if generation_config.is_file() else None
    if router_aux_loss_coef is not None:
        model.router_aux_loss_coef = router_aux_loss_coef
    if model.router_aux_loss_coef and (model.mixture is None or model.mixture.score != "softmax"):
        reason = "has no experts" if model.mixture is None else f"scores experts by {model.mixture.score}"
        coefficient = f"router_aux_loss_coef is {model.router_aux_loss_coef}"
        raise ValueError(f"{coefficient}: it balances a softmax over experts, and {folder} {reason}. Set it to 0.")
    return model


def build_decoder(
    config: DecoderConfig, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> Decoder:
    """A decoder with random weights: normal of standard deviation `initializer_range`, zero biases, norms of scale 1."""
    model = _empty_decoder(config, dtype)
    _fill(model, device, _random_weights(config))
    return model


def save_model(
    model: Decoder,
    path: str | Path,
    max_shard_bytes: int = 5_000_000_000,
    *,
    ranks: Ranks = ALONE,
    weights: Mapping[str, Part] | None = None,
) -> None:
    """Write config.json and safetensors files that `load_model` and transformers' `from_pretrained` read.

    Weights above `max_shard_bytes` are split into several files with an index. config.json is the loaded config with the
    current dtype; generation_config.json is copied. Each file is written atomically, and weight files of an earlier save are
    removed. For a sharded model all `ranks` call this, and each rank writes its rows.

    Args:
        weights: values to write instead of the model's, such as copies of `parts_on_disk(model)`.

    Raises:
        ValueError: if the model has no config.json, or its parameters are not those of its config (such as with an adapter).
    """
    if not model.source.config:
        raise ValueError("the model was not loaded from a folder, so there is no config.json to save with it.")
    expected = dict(_empty_decoder(model.config, torch.float32).named_parameters())
    if different := expected.keys() ^ dict(model.named_parameters()).keys():
        raise ValueError(
            f"the model's parameters differ from those of its config.json: {_first_few(different)}. Save an adapter by "
            "lean_ft.peft.save_adapter, or merge it first."
        )
    from huggingface_hub import split_state_dict_into_shards_factory  # a slow import

    folder = Path(path)
    ranks.on_rank_zero(lambda: folder.mkdir(parents=True, exist_ok=True))
    parts = parts_on_disk(model) if weights is None else weights
    split = split_state_dict_into_shards_factory(
        dict(parts),
        get_storage_size=lambda part: part.whole_bytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_bytes,
    )
    for file_name, names in split.filename_to_tensors.items():
        write_file(folder / file_name, {name: parts[name] for name in names}, {"format": "pt"}, ranks)
    ranks.on_rank_zero(lambda: _write_index_and_configs(model, folder, split))


def _write_index_and_configs(model: Decoder, folder: Path, split: Any) -> None:
    """Write the index and the configs, and remove weight files of an earlier save."""
    current = set(split.filename_to_tensors)
    if split.is_sharded:
        weight_map = dict(sorted(split.tensor_to_filename.items()))
        write_json(folder / WEIGHTS_INDEX, {"metadata": split.metadata, "weight_map": weight_map})
        current.add(WEIGHTS_INDEX)
    for stale in [folder / WEIGHTS_INDEX, *folder.glob("model*.safetensors")]:
        if stale.name not in current:
            stale.unlink(missing_ok=True)
    write_configs(model, folder)


def write_configs(model: Decoder, folder: Path, **more: Any) -> None:
    """Write config.json with the model's dtype and the fields `more`, and the loaded generation_config.json."""
    spelled = [key for key in ("dtype", "torch_dtype") if key in model.source.config] or ["dtype"]
    dtype = str(model.dtype).removeprefix("torch.")
    write_json(folder / "config.json", {**model.source.config, **dict.fromkeys(spelled, dtype), **more})
    if model.source.generation_config is not None:
        with write_whole(folder / "generation_config.json") as temporary:
            temporary.write_bytes(model.source.generation_config)


def tensors_on_disk(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model's folder by name, without gradients.

    If the family stores a parameter as several tensors, these are views of the parameter, not copies.
    """
    hf_config, tensors = source_of(model).config, {}
    for name, parameter in _tensors(model):
        tensors.update(parameters_on_disk(hf_config, name, parameter.detach()))
    return tensors


def own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and persistent buffers of a module, without its submodules'."""
    yield from module.named_parameters(recurse=False)
    for name, buffer in module.named_buffers(recurse=False):
        if name not in module._non_persistent_buffers_set:
            yield name, buffer


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for place, module in model.named_modules():
        for name, tensor in own_tensors(module):
            yield f"{place}.{name}" if place else name, tensor


def parts_on_disk(model: nn.Module) -> dict[str, Part]:
    """As `tensors_on_disk`, for a model that may be sharded: this rank's part of each tensor."""
    hf_config, parts = source_of(model).config, {}
    for name, parameter in _tensors(model):
        parts.update(_parts_of_parameter(hf_config, name, parameter))
    return parts


def _parts_of_parameter(hf_config: Mapping[str, Any], name: str, parameter: Tensor) -> Iterator[tuple[str, Part]]:
    """Yield the stored tensors of a parameter by name, each with this rank's elements."""
    here = part_of(parameter)
    if here.values.shape == here.shape:
        for place, tensor in parameters_on_disk(hf_config, name, here.values):
            yield place, Part(tensor, tuple(tensor.shape), 0, here.is_kept_by_others)
        return
    pieces = parameters_on_disk(hf_config, name, torch.empty(here.shape, device="meta"))  # views that take no memory
    if here.run is not None:  # a layer's matrix, which every family stores as one tensor
        ((place, _),) = pieces
        yield place, here
        return
    flat, end = here.values.view(-1), here.first + here.values.numel()
    for place, piece in pieces:
        start = min(max(here.first, piece.storage_offset()), piece.storage_offset() + piece.numel())
        stop = max(start, min(end, piece.storage_offset() + piece.numel()))
        values = flat[start - here.first : stop - here.first] if stop > start else flat[:0]
        yield place, Part(values, tuple(piece.shape), int(start - piece.storage_offset()), here.is_kept_by_others)


def _empty_decoder(config: DecoderConfig, dtype: torch.dtype) -> Decoder:
    """A decoder on the meta device."""
    try:
        with without_modes(), torch.device("meta"):
            model = Decoder(config)
            wide = () if model.mixture is None else model.mixture.in_float32
            for name, tensor in _tensors(model):
                if not name.endswith(wide):
                    tensor.data = tensor.data.to(dtype)
            return model
    except RuntimeError as error:  # the number of bytes exceeds 64 bits
        raise ValueError(f"config.json describes a tensor that is too large for any machine: {error}") from None


@torch.no_grad()
def _fill(model: Decoder, device: str | torch.device, fill: Fill, after_module: AfterModule | None = None) -> None:
    """Allocate and fill the parameters of a meta model, one module at a time."""
    # A list of names, not of modules, so that modules replaced by `after_module` are freed.
    for name in [name for name, _ in model.named_modules()]:
        module = model.get_submodule(name)
        module.to_empty(device=device, recurse=False)
        for own_name, tensor in own_tensors(module):
            fill(f"{name}.{own_name}" if name else own_name, tensor)
        del module
        if after_module is not None:
            after_module(model, name)


def _random_weights(config: DecoderConfig) -> Fill:

    def draw(name: str, parameter: Tensor) -> None:
        here = part_of(parameter)
        if here.values.shape != here.shape:  # draw the whole, so that the numbers do not depend on the number of ranks
            whole = torch.empty(here.shape, dtype=parameter.dtype, device=here.values.device)
            draw(name, whole)
            here.values.copy_(here.within(whole))
        elif name.endswith(("dt_bias", "mamba.D", "layer_scalar", "router.scale", "per_expert_scale")):
            here.values.fill_(1.0)
        elif name.endswith("mamba.A_log"):
            here.values.copy_(torch.arange(1.0, len(here.values) + 1).log_())
        elif name.endswith("A_log"):
            here.values.copy_(torch.empty_like(here.values, dtype=torch.float32).uniform_(0.01, 16.0).log_())
        elif name.endswith("bias"):
            here.values.zero_()
        elif (own_name := name.rpartition(".")[2]) in XIELU_START:
            here.values.fill_(XIELU_START[own_name])
        elif re.search(r"norm(_\d)?\.weight$", name):
            has_offset = not name.endswith(("linear_attn.norm.weight", "mamba.norm.weight"))
            here.values.fill_(1.0 - (config.norm_weight_offset if has_offset else 0.0))
        else:
            here.values.normal_(0.0, config.initializer_range)

    return draw


def _stored_weights(folder: Path, model: Decoder) -> Fill:
    """Read the folder's weights. Raises ValueError unless they match the model's parameters."""
    stored = dequantized(stored_tensors(folder), model.source.quantization)
    if model.source.part_of:
        stored = {own: tensor for name, tensor in stored.items() if (own := name_in_language_model(name)) is not None}
    stored = _match(model, stored, folder)

    def read(name: str, parameter: Tensor) -> None:
        if model.source.score_is_new and name == "score.weight":
            part_of(parameter).values.zero_()
            return
        for place, part in _parts_of_parameter(model.source.config, name, parameter):
            if model.source.new_ids and place in _ROWS_PER_TOKEN:
                _read_and_add_rows(stored[place], part, model.source.new_ids)
            else:
                stored[place].read_part(part)

    return read


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


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of the folder's safetensors files, or of its GGUF file, by name; only headers are read."""
    if gguf_file(folder) is not None:
        return gguf_tensors(folder)
    if (folder / _WEIGHTS).exists():
        return read_header(_inside(folder, _WEIGHTS, folder))
    if not (folder / WEIGHTS_INDEX).exists():
        raise ValueError(_no_weights(folder))
    index = read_json(folder / WEIGHTS_INDEX, "it lists the weight files.")
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ValueError(f"{folder / WEIGHTS_INDEX}: expected an object weight_map from tensor names to file names.")
    headers = {name: read_header(_inside(folder, name, folder / WEIGHTS_INDEX)) for name in set(weight_map.values())}
    absent = [name for name, file_name in weight_map.items() if name not in headers[file_name]]
    if absent:
        file = folder / weight_map[absent[0]]
        raise ValueError(
            f"{file} lacks {_first_few(absent)}, which {WEIGHTS_INDEX} lists. Download or copy the folder again."
        )
    return {name: headers[file_name][name] for name, file_name in weight_map.items()}


def _inside(folder: Path, name: str, source: Path) -> Path:
    """The path of a file in the folder. Raises ValueError if the name or a link leads out of the folder."""
    relative = PurePosixPath(name)
    if relative.is_absolute() or ".." in relative.parts or "\\" in name or ":" in name:
        raise ValueError(f"{source} names the weight file {name!r}; expected the name of a file in {folder}.")
    file = folder / relative
    if not file.is_file():
        raise ValueError(f"{source} names the weight file {name!r}, which is missing from {folder}.")
    target, home = file.resolve(), folder.resolve()
    if not target.is_relative_to(home) and not target.is_relative_to(home_of_links(home)):
        raise ValueError(
            f"the weight file {name!r} of {folder} is a link to {target}, outside the folder. Copy the file into it."
        )
    return file


def _match(model: Decoder, stored: dict[str, Readable], folder: Path) -> dict[str, Readable]:
    """The stored tensors of the model's parameters. Raises ValueError unless they match one to one."""
    config = model.config
    # Not read, as in transformers: rotary frequencies of early Llama folders, and layers for multi-token prediction.
    first, num_drafting = config.num_layers, _num_drafting_layers(model.source.config)
    unread = ("mtp.", *(f"model.layers.{i}." for i in range(first, first + num_drafting)))
    # Some folders store keys and values of layers that use another layer's.
    keys_elsewhere = [i for i, layer in enumerate(config.layers) if layer.kv_from_layer is not None]
    unread += tuple(
        f"model.layers.{i}.self_attn.{own}" for i in keys_elsewhere for own in ("k_proj.", "v_proj.", "k_norm.")
    )
    unread += ("lm_head.",) if model.source.score_is_new else ()
    stored = {
        name: tensor
        for name, tensor in stored.items()
        if not name.startswith(unread) and not name.endswith(".rotary_emb.inv_freq")
    }
    expected = {name: tuple(tensor.shape) for name, tensor in tensors_on_disk(model).items()}
    if model.source.score_is_new:
        del expected["score.weight"]
    if missing := expected.keys() - stored.keys():
        lacking = f"the weights lack {_first_few(missing)}"
        raise ValueError(f"{folder}: {lacking}. They are incomplete, or config.json belongs to another model.")
    if config.tied_embeddings and "lm_head.weight" in stored:
        _check_tied(stored["model.embed_tokens.weight"], stored.pop("lm_head.weight"))
    if unexpected := stored.keys() - expected.keys():
        file, names = stored[min(unexpected)].file, _first_few(unexpected)
        raise ValueError(
            f"{file}: unexpected tensors: {names}. config.json belongs to another model, or lacks a field."
        )
    for name, tensor in stored.items():
        shape = expected[name]
        if model.source.new_ids and name in _ROWS_PER_TOKEN and 0 < tensor.shape[0] <= shape[0]:
            shape = (tensor.shape[0], *shape[1:])  # the folder has no rows of new tokens
        if tensor.shape != shape:
            shapes = f"{list(tensor.shape)}; expected from config.json: {list(shape)}"
            raise ValueError(f"{tensor.file}: {name} has the shape {shapes}.")
        if tensor.dtype not in _STORED_DTYPES:
            stored_as = f"{name} is stored as {tensor.dtype_name}; expected F32, BF16, F16 or F64"
            raise ValueError(f"{tensor.file}: {stored_as}. Use the unquantized model.")
    return stored


def _num_drafting_layers(hf_config: Mapping[str, Any]) -> int:
    """Number of layers after the last that draft tokens for speculative decoding."""
    number = next((n for key in ("num_nextn_predict_layers", "num_mtp_layers") if (n := hf_config.get(key))), 0)
    return number if isinstance(number, int) and 0 <= number < MAX_LAYERS else 0


def _check_tied(embedding: Readable, head: Readable) -> None:
    """Raise ValueError unless a stored tied output layer equals the embedding."""
    is_alike = (embedding.shape, embedding.dtype) == (head.shape, head.dtype) and head.dtype in _STORED_DTYPES
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


def _no_weights(folder: Path) -> str:
    pickled = [f.name for f in sorted(folder.iterdir()) if f.suffix in (".bin", ".pth", ".pt", ".ckpt")]
    if pickled:
        return (
            f"{folder} has weights only as {_first_few(pickled)}. Pickled files can run code when opened, so they are not "
            "read. If you trust them, load the folder with transformers and save it with save_pretrained()."
        )
    others = [f.name for f in sorted(folder.glob("*.safetensors"))]
    found = f" It has {_first_few(others)}, which is not the name of a whole model." if others else ""
    return (
        f"{folder} has no weights: expected {_WEIGHTS}, or {WEIGHTS_INDEX} and its files.{found} Set random_init to build "
        "the model with random weights."
    )


def _first_few(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
