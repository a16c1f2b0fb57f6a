"""A Hugging Face folder in, the same folder out.

Everything is checked against config.json before memory is taken: a missing, unexpected or misshapen tensor is an
error, never a warning. Then each tensor is read straight into its parameter, so the peak while loading is the model.
Only safetensors files are read; pickled weights (.bin, .pth) can run code when they are opened and are refused.
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
from lean_ft.models.config_json import MAX_LAYERS, as_its_family, decoder_config, language_model_config, score_config
from lean_ft.models.decoder import Decoder
from lean_ft.models.dequantized import Readable, dequantized
from lean_ft.models.float32_products import use_float32_products
from lean_ft.models.layers import XIELU_START
from lean_ft.models.names_on_disk import name_in_language_model, parameters_on_disk
from lean_ft.models.safetensors_file import StoredTensor, read_header, write_file
from lean_ft.models.source import source_of
from lean_ft.settings import ModelConfig, spelled_out
from lean_ft.system.shapes_only import outside, stage
from lean_ft.system.shards import ALONE, Part, Ranks, local, part_of, remember_cuts
from lean_ft.system.whole_files import read_json, write_json, write_whole
from lean_ft.tokenizers import load_tokenizer

_WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_STORED_DTYPES = (*_DTYPES, torch.float64)

_FINGERPRINT_PAGES = 8192
# What has a row a token, and the field that says how many.
_OF_TOKENS = {
    "model.embed_tokens.weight": "vocab_size",
    "lm_head.weight": "vocab_size",
    "lm_head.bias": "vocab_size",
    "model.embed_tokens_per_layer.weight": "vocab_size_per_layer_input",
}

AfterModule = Callable[[Decoder, str], None]
Fill = Callable[[str, Tensor], None]


class Unread:
    """How a model of shapes alone gets its weights, once it is cut and has memory: `fill` gives a parameter its values."""

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
    scores: bool | None = False,
    new_ids: Sequence[int] = (),
) -> Decoder:
    """Returns the model of a Hugging Face folder, of a repository of the hub (`org/name`), or `tiny`, the embedded one;
    every parameter in `dtype`. Settings in place of the path say all of that but the device; their float16 is mixed
    precision, with parameters in float32.

    With `random_init` config.json suffices, and weights are drawn as transformers draws them. Takes at most the
    model's own memory and 1 MiB. `router_aux_loss_coef` is that of the model; None takes config.json's where that asks
    for it by `output_router_logits`. `after_module` is called with the model and each module's name as soon as the
    module has its weights; it may put a smaller one in its place, before the next takes memory. On the device `meta` the
    model is of shapes alone until `read_weights`, so that it can be cut before it takes memory. With `scores` it is a
    reward model: that of the folder, or what a language model becomes with an output layer of zeros in place of its own;
    None takes either kind as it is. `new_ids` are tokens' that it gets rows for, each the mean of those before the first of them.
    Raises ValueError where the folder, its config.json or its weights are not what is expected, which without `scores` a
    reward model is not; nothing is allocated before that is known.
    """
    if isinstance(path, ModelConfig):
        dtype = torch.float32 if path.dtype == "float16" else getattr(torch, path.dtype)
        random_init, router_aux_loss_coef = path.random_init, path.router_aux_loss_coef
        new_ids, path = new_token_ids(path), path.path
    dtype = torch_dtype(dtype)
    watcher = stage()
    if watcher is None:
        use_float32_products()
    random_init = random_init or watcher is not None  # where shapes alone are computed, there is nothing to read
    folder = resolve_model_path(path, weights=not random_init)
    model = _described(folder, dtype, router_aux_loss_coef, scores, new_ids)
    fill = _drawn(model.config) if random_init else _read_from(folder, model)
    if torch.device(device).type == "meta":
        model.source.unread = Unread(fill)
        if after_module is not None:
            for name in [name for name, _ in model.named_modules()]:
                after_module(model, name)
    else:
        _fill(model, device, fill, after_module)
    generation_config = folder / "generation_config.json"
    ends = read_json(generation_config).get("eos_token_id")
    if not all(one is None or type(one) is int for one in (ends if isinstance(ends, list) else [ends])):
        raise ValueError(f"{generation_config}: eos_token_id is {ends!r}; expected an id, or a list of them.")
    model.source.generation_config = generation_config.read_bytes() if generation_config.is_file() else None
    if watcher is not None:
        watcher.watch(model)
    return model


def torch_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """A dtype that models compute in, given itself or by name: `bfloat16`, `torch.bfloat16` or `bf16`."""
    name = spelled_out(dtype)
    found = next((one for one in _DTYPES if str(one) == f"torch.{name}"), None)
    if found is None:
        raise ValueError(f"dtype is {dtype}; expected float32, bfloat16 or float16, as a torch.dtype or its name.")
    return found


def new_token_ids(cfg: ModelConfig) -> Sequence[int]:
    """The ids of the settings' `new_tokens`, in order; of none without."""
    return range(load_tokenizer(cfg).vocab_size)[-len(cfg.new_tokens) :] if cfg.new_tokens else ()


@torch.no_grad()
def read_weights(model: Decoder, device: str | torch.device) -> None:
    """Gives memory and values to a model that was loaded onto `meta`; where it is cut, to the rows that are here alone."""
    assert model.source.unread is not None, "it has its weights already"
    model.to_empty(device=torch.device(device))
    remember_cuts(model.named_parameters(), model.sharding.cuts)
    if stage() is None:
        model.source.unread.into(model)
    else:  # there is nothing to read; a CPU's memory is taken as it is written
        for tensor in [*model.parameters(), *model.buffers()]:
            local(tensor).zero_()
    model.source.unread = None


def stored_dtype(folder: Path) -> torch.dtype:
    """The dtype that holds every tensor in the folder's files as it is, but for those that are in float32 anyway: bfloat16,
    float16 or float32."""
    dtype: torch.dtype | None = None
    config = as_its_family(read_json(folder / "config.json", "it says what the model computes."))
    config = language_model_config(config)
    mixture = decoder_config(config, where=str(folder / "config.json")).mixture
    anyway = () if mixture is None else mixture.in_float32
    for name, tensor in dequantized(stored_tensors(folder), config.get("quantization_config") or {}).items():
        if tensor.dtype in _STORED_DTYPES and not name.endswith(anyway):  # load_model refuses others, with the name
            dtype = tensor.dtype if dtype is None else torch.promote_types(dtype, tensor.dtype)
    return dtype if dtype in _DTYPES else torch.float32


def weights_fingerprint(folder: Path) -> str | None:
    """Tells a folder's weights from others by a sample of every tensor's bytes; None for a folder without weights.

    Where the folder lies, how its files are called and cut and when they were written makes no difference. About 8,192
    pages are read, so that it takes seconds at most; other weights in places between them, and nowhere else, go unseen.
    """
    if not any((folder / name).is_file() for name in (_WEIGHTS, WEIGHTS_INDEX)):
        return None
    tensors, digest = stored_tensors(folder), hashlib.sha256()
    for name, stored in sorted(tensors.items()):
        digest.update(f"{name} {stored.dtype_name} {list(stored.shape)}\n".encode())
        for page in stored.pieces(4096, at_most=max(2, _FINGERPRINT_PAGES // len(tensors))):
            digest.update(page)
    return digest.hexdigest()


def empty_model(
    path: str | Path, dtype: torch.dtype, router_aux_loss_coef: float | None = None, new_ids: Sequence[int] = ()
) -> Decoder:
    """Returns the model that `load_model` would, of shapes alone: its parameters are on `meta`, and no weights are read."""
    return _described(resolve_model_path(path, weights=False), dtype, router_aux_loss_coef, None, new_ids)


def _described(
    folder: Path,
    dtype: torch.dtype,
    router_aux_loss_coef: float | None,
    scores: bool | None,
    new_ids: Sequence[int] = (),
) -> Decoder:
    """The model of a folder's config.json, of shapes alone; where that reads images too, its language model. None for
    `scores` takes either kind as it is."""
    file = folder / "config.json"
    purpose = "it says what the model computes; is this a model's folder?"
    if (folder / "adapter_config.json").is_file():
        purpose = (
            "it is an adapter's. Give its base model as model.path, and this folder as adapter= to generate with both."
        )
    whole = as_its_family(read_json(file, purpose))
    hf_config = language_model_config(whole, where=str(file))
    part_of, own = "" if hf_config is whole else whole["model_type"], hf_config
    if scores:
        hf_config = score_config(own, where=str(file))
    score_is_new = hf_config is not own
    num_rows = max(new_ids, default=-1) + 1
    sizes = {size: hf_config[size] for size in set(_OF_TOKENS.values()) if size in hf_config}
    hf_config = {**hf_config, **{size: max(n, num_rows) for size, n in sizes.items() if isinstance(n, int)}}
    model = _empty_decoder(decoder_config(hf_config, where=str(file)), dtype)
    quantization = hf_config.get("quantization_config") or {}
    hf_config = {key: value for key, value in hf_config.items() if key != "quantization_config"}
    if model.config.scores and scores is False:
        raise ValueError(
            f"{folder} is a reward model: it gives scores and no text. Expected a language model; leanft score and the "
            "recipe reward take it."
        )
    model.source.folder, model.source.config, model.source.part_of = folder, hf_config, part_of
    model.source.score_is_new, model.source.quantization, model.source.new_ids = (
        score_is_new,
        quantization,
        list(new_ids),
    )
    if router_aux_loss_coef and model.mixture is None:
        raise ValueError(
            f"router_aux_loss_coef is {router_aux_loss_coef}, but {folder} is no mixture of experts, so there is no "
            "load of experts to balance. Leave it out."
        )
    if router_aux_loss_coef is not None:
        model.router_aux_loss_coef = router_aux_loss_coef
    if model.router_aux_loss_coef and model.mixture is not None and model.mixture.score != "softmax":
        raise ValueError(
            f"router_aux_loss_coef is {model.router_aux_loss_coef}, whose loss is of a softmax over experts, and the router of "
            f"{folder} chooses by {model.mixture.score}. Leave it out, or set it to 0."
        )
    return model


def build_decoder(
    config: DecoderConfig, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> Decoder:
    """Returns a decoder with random weights: normal ones of `initializer_range`, biases 0, norms that scale by 1."""
    model = _empty_decoder(config, dtype)
    _fill(model, device, _drawn(config))
    return model


def save_model(
    model: Decoder,
    path: str | Path,
    max_shard_bytes: int = 5_000_000_000,
    *,
    ranks: Ranks = ALONE,
    weights: Mapping[str, Part] | None = None,
) -> None:
    """Writes the folder that `load_model` and transformers' `from_pretrained` read: config and safetensors.

    Weights above `max_shard_bytes` are split into several files with an index. config.json is the loaded one with its
    dtype brought up to date; generation_config.json is carried along. Each file appears whole or not at all, and
    weight files of an earlier save in the folder are removed. Of a model that is cut over `ranks`, all of them call it, and
    each writes its rows. `weights` may be copies of what `parts_on_disk` gives. Raises ValueError for a model without a
    config.json, and for one whose weights are not those that it calls for, as with an adapter.
    """
    if not model.source.config:
        raise ValueError("the model was not loaded from a folder, so there is no config.json to save with it.")
    expected = dict(_empty_decoder(model.config, torch.float32).named_parameters())
    if different := expected.keys() ^ dict(model.named_parameters()).keys():
        raise ValueError(
            f"the model's weights are not those of its config.json: {_some(different)}. With an adapter, save that "
            "(lean_ft.peft.save_adapter), or merge it."
        )
    from huggingface_hub import split_state_dict_into_shards_factory  # here, as it takes a while

    folder = Path(path)
    ranks.first(lambda: folder.mkdir(parents=True, exist_ok=True))
    parts = parts_on_disk(model) if weights is None else weights
    split = split_state_dict_into_shards_factory(
        dict(parts),
        get_storage_size=lambda part: part.whole_bytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_bytes,
    )
    for file_name, names in split.filename_to_tensors.items():
        write_file(folder / file_name, {name: parts[name] for name in names}, {"format": "pt"}, ranks)
    ranks.first(lambda: _write_what_is_beside(model, folder, split))


def _write_what_is_beside(model: Decoder, folder: Path, split: Any) -> None:
    """The index, the configs, and no file of an earlier save."""
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
    """Writes config.json, with the dtype of the model and what `more` says, and generation_config.json as it was."""
    spelled = [key for key in ("dtype", "torch_dtype") if key in model.source.config] or ["dtype"]
    dtype = str(model.dtype).removeprefix("torch.")
    write_json(folder / "config.json", {**model.source.config, **dict.fromkeys(spelled, dtype), **more})
    if model.source.generation_config is not None:
        with write_whole(folder / "generation_config.json") as temporary:
            temporary.write_bytes(model.source.generation_config)


def tensors_on_disk(model: nn.Module) -> dict[str, Tensor]:
    """Returns what the folder of a model holds, by name: its parameters, without gradients.

    Where the family stores a parameter in parts, they are views of it, so reading and writing them takes no copy.
    """
    hf_config = source_of(model).config
    return {
        place: tensor
        for name, parameter in _tensors(model)
        for place, tensor in parameters_on_disk(hf_config, name, parameter.detach())
    }


def own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What a folder holds of a module itself: its parameters, and the buffers that are no temporary ones."""
    yield from module.named_parameters(recurse=False)
    for name, buffer in module.named_buffers(recurse=False):
        if name not in module._non_persistent_buffers_set:
            yield name, buffer


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for place, module in model.named_modules():
        for name, tensor in own_tensors(module):
            yield f"{place}.{name}" if place else name, tensor


def parts_on_disk(model: nn.Module) -> dict[str, Part]:
    """The same of a model that may be cut over ranks: of each tensor what is here."""
    hf_config = source_of(model).config
    return {
        place: part
        for name, parameter in _tensors(model)
        for place, part in _parts_of_parameter(hf_config, name, parameter)
    }


def _parts_of_parameter(hf_config: Mapping[str, Any], name: str, parameter: Tensor) -> Iterator[tuple[str, Part]]:
    """What the folder holds of a parameter, by name, and which of its elements are here."""
    here = part_of(parameter)
    if here.values.shape == here.shape:
        for place, tensor in parameters_on_disk(hf_config, name, here.values):
            yield place, Part(tensor, tuple(tensor.shape), 0, here.is_kept_by_others)
        return
    if here.run is not None:  # a matrix of a layer, which every family stores as it is
        ((place, _),) = parameters_on_disk(hf_config, name, torch.empty(here.shape, device="meta"))
        yield place, here
        return
    flat, end = here.values.view(-1), here.first + here.values.numel()
    # Where the parts of the whole lie in it, views without memory tell.
    for place, piece in parameters_on_disk(hf_config, name, torch.empty(here.shape, device="meta")):
        start = min(max(here.first, piece.storage_offset()), piece.storage_offset() + piece.numel())
        stop = max(start, min(end, piece.storage_offset() + piece.numel()))
        values = flat[start - here.first : stop - here.first] if stop > start else flat[:0]
        yield place, Part(values, tuple(piece.shape), int(start - piece.storage_offset()), here.is_kept_by_others)


def _empty_decoder(config: DecoderConfig, dtype: torch.dtype) -> Decoder:
    """A decoder of shapes alone, on the meta device."""
    try:
        with outside(), torch.device("meta"):
            model = Decoder(config)
            wide = () if model.mixture is None else model.mixture.in_float32
            for name, tensor in _tensors(model):
                if not name.endswith(wide):
                    tensor.data = tensor.data.to(dtype)
            return model
    except RuntimeError as error:  # a shape has more bytes than 64 bits count
        raise ValueError(f"config.json describes a tensor that no machine can hold: {error}") from None


@torch.no_grad()
def _fill(model: Decoder, device: str | torch.device, fill: Fill, after_module: AfterModule | None = None) -> None:
    """Gives the parameters of a model of shapes alone memory and values, a module at a time."""
    # Names, and not the modules: what `after_module` has replaced must be free to go.
    for name in [name for name, _ in model.named_modules()]:
        module = model.get_submodule(name)
        module.to_empty(device=device, recurse=False)
        for own, tensor in own_tensors(module):
            fill(f"{name}.{own}" if name else own, tensor)
        del module
        if after_module is not None:
            after_module(model, name)


def _drawn(config: DecoderConfig) -> Fill:
    """Fills parameters with random numbers."""

    def draw(name: str, parameter: Tensor) -> None:
        here = part_of(parameter)
        if here.values.shape != here.shape:  # the same numbers as one rank draws, of which it keeps its rows
            whole = torch.empty(here.shape, dtype=parameter.dtype, device=here.values.device)
            draw(name, whole)
            here.values.copy_(here.within(whole))
        elif name.endswith(("dt_bias", "mamba.D", "layer_scalar", "router.scale", "per_expert_scale")):
            here.values.fill_(1.0)
        elif name.endswith("mamba.A_log"):
            here.values.copy_(torch.arange(1.0, len(here.values) + 1).log_())
        elif name.endswith("A_log"):
            here.values.copy_(torch.empty_like(here.values, dtype=torch.float32).uniform_(0.01, 16.0).log_())
        elif name.endswith("bias"):  # of experts too, whose stacks are not modules
            here.values.zero_()
        elif (own := name.rpartition(".")[2]) in XIELU_START:
            here.values.fill_(XIELU_START[own])
        elif re.search(r"norm(_\d)?\.weight$", name):
            has_offset = not name.endswith(("linear_attn.norm.weight", "mamba.norm.weight"))
            here.values.fill_(1.0 - (config.norm_weight_offset if has_offset else 0.0))
        else:
            here.values.normal_(0.0, config.initializer_range)

    return draw


def _read_from(folder: Path, model: Decoder) -> Fill:
    """Fills the model's parameters from the folder's files; raises ValueError unless they match."""
    stored = dequantized(stored_tensors(folder), model.source.quantization)
    if model.source.part_of:
        names = {name: name_in_language_model(name) for name in stored}
        stored = {own: stored[name] for name, own in names.items() if own is not None}
    stored = _match(model, stored, folder)

    def read(name: str, parameter: Tensor) -> None:
        if model.source.score_is_new and name == "score.weight":
            part_of(parameter).values.zero_()
            return
        for place, part in _parts_of_parameter(model.source.config, name, parameter):
            if model.source.new_ids and place in _OF_TOKENS:
                _read_and_grow(stored[place], part, model.source.new_ids)
            else:
                stored[place].read_part(part)

    return read


def _read_and_grow(stored: Readable, part: Part, new_ids: Sequence[int]) -> None:
    """Fills a matrix (V, D) with a row a token, of which the folder may have fewer rows; of a part of one it takes the whole's
    memory meanwhile."""
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
    """The tensors in the folder's safetensors files, by name, read from their headers."""
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
        raise ValueError(
            f"{folder / WEIGHTS_INDEX} places {_some(absent)} in {weight_map[absent[0]]}, which does not hold it. The files "
            "are not of one model: download or copy the folder again."
        )
    return {name: headers[file_name][name] for name, file_name in weight_map.items()}


def _inside(folder: Path, name: str, source: Path) -> Path:
    """The file `name` of the folder; refused where the name or a link leads out of it."""
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
    """The stored tensors that make up the parameters; raises ValueError unless they match one to one."""
    # Early Llama folders keep the rotary frequencies, which config.json determines.
    stored = {name: tensor for name, tensor in stored.items() if not name.endswith(".rotary_emb.inv_freq")}
    # Layers that predict several tokens at once are beside the model, and neither trained nor saved, as in transformers.
    stored = {name: tensor for name, tensor in stored.items() if not name.startswith("mtp.")}
    expected = {name: tuple(tensor.shape) for name, tensor in tensors_on_disk(model).items()}
    if model.source.score_is_new:
        del expected["score.weight"]
        stored.pop("lm_head.weight", None)
        stored.pop("lm_head.bias", None)
    for beyond in range(model.config.num_layers, model.config.num_layers + _num_drafting_layers(model.source.config)):
        stored = {name: tensor for name, tensor in stored.items() if not name.startswith(f"model.layers.{beyond}.")}
    # Keys and values that a layer takes from another are in some folders all the same.
    unused = [i for i, layer in enumerate(model.config.layers) if layer.keys_of is not None]
    for name in [f"model.layers.{i}.self_attn.{own}.weight" for i in unused for own in ("k_proj", "v_proj", "k_norm")]:
        stored.pop(name, None)
    missing = expected.keys() - stored.keys()
    if missing:
        raise ValueError(
            f"{folder}: the weights lack {_some(missing)}, which config.json calls for. The files are incomplete or of "
            "another model."
        )
    if model.config.tied_embeddings and "lm_head.weight" in stored:
        _check_tied(stored["model.embed_tokens.weight"], stored.pop("lm_head.weight"))
    unexpected = stored.keys() - expected.keys()
    if unexpected:
        first = min(unexpected)
        raise ValueError(
            f"{stored[first].file}: config.json has no place for {_some(unexpected)}. The weights are of another "
            "model, or config.json leaves out a field."
        )
    for name, tensor in stored.items():
        if model.source.new_ids and name in _OF_TOKENS and 0 < tensor.shape[0] <= expected[name][0]:
            expected[name] = (tensor.shape[0], *expected[name][1:])  # the others are to come
        if tensor.shape != expected[name]:
            raise ValueError(
                f"{tensor.file}: {name} has the shape {list(tensor.shape)}; config.json makes it "
                f"{list(expected[name])}."
            )
        if tensor.dtype not in _STORED_DTYPES:
            raise ValueError(
                f"{tensor.file}: {name} is stored as {tensor.dtype_name}; expected F32, BF16, F16 or F64. Quantized "
                "weights cannot be trained: take the model they were made from."
            )
    return stored


def _num_drafting_layers(hf_config: Mapping[str, Any]) -> int:
    """Layers behind the last that guess further tokens while serving, which transformers leaves out as well."""
    number = next((n for key in ("num_nextn_predict_layers", "num_mtp_layers") if (n := hf_config.get(key))), 0)
    return number if isinstance(number, int) and 0 <= number < MAX_LAYERS else 0


def _check_tied(embedding: Readable, head: Readable) -> None:
    """Some folders store a tied output layer as well; it must then be the embedding itself."""
    same = (embedding.shape, embedding.dtype) == (head.shape, head.dtype) and head.dtype in _STORED_DTYPES
    if isinstance(embedding, StoredTensor) and isinstance(head, StoredTensor):
        same = same and all(a == b for a, b in zip(embedding.pieces(2**24), head.pieces(2**24), strict=True))
    else:  # quantised, as no tied output layer is
        same = False
    if not same:
        raise ValueError(
            f"{head.file}: tie_word_embeddings is true in config.json, but lm_head.weight differs from "
            "model.embed_tokens.weight. Set tie_word_embeddings to false if the output layer is one of its own."
        )


def _no_weights(folder: Path) -> str:
    pickled = [f.name for f in sorted(folder.iterdir()) if f.suffix in (".bin", ".pth", ".pt", ".ckpt")]
    if pickled:
        return (
            f"{folder} has weights only as {_some(pickled)}. Such files are pickled and can run code when opened, so "
            "they are not read. Convert them where you trust them: load the folder with transformers and save it with "
            "save_pretrained(), which writes safetensors."
        )
    others = [f.name for f in sorted(folder.glob("*.safetensors"))]
    found = f" It has {_some(others)}, which is not a name transformers gives a whole model." if others else ""
    return (
        f"{folder} has no weights: expected {_WEIGHTS}, or {WEIGHTS_INDEX} with the files it names.{found} "
        "To build the model with random weights, set random_init."
    )


def _some(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
