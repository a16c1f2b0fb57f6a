"""Multimodal models of transformers with random weights, and documents with images as inputs of both sides."""

import functools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from lean_ft.images.batch import Images
from lean_ft.models import Decoder
from lean_ft.models.source import source_of

COUNTS = [[1], [2, 0], [1, 0, 2]]  # images of the documents of a batch
IMAGE, START, END = 90, 92, 93  # ids of an image's tokens, and around them; other ids are text

_TEXT = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
_TEXT |= {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512}
_IDS = {"image_token_id": IMAGE, "video_token_id": 91, "vision_start_token_id": START, "vision_end_token_id": END}
_HALF = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.5, 0.4, 0.3]}

Grid = tuple[int, int]


@dataclass(frozen=True)
class Case:
    """A model, and the grids of patches that its images may have."""

    name: str  # of transformers' classes
    text: dict[str, Any]
    vision: dict[str, Any]
    others: dict[str, Any]
    processor: dict[str, Any]  # preprocessor_config.json
    inputs: Callable[["Case", Sequence[Tensor], Tensor], dict[str, Any]]  # of images (C, H, W) and ids (1, T)
    grids: Sequence[Grid] = ((4, 6), (2, 10), (8, 4), (6, 6))
    is_exact: bool = True  # packed rows are bit-identical to each document alone
    tolerance: float = 1e-4  # of logits
    patch: int = 4  # pixels of a patch's side
    merge: int = 2
    settings: dict[str, Any] = field(default_factory=dict)


def _normalized(case: Case, images: Sequence[Tensor]) -> list[Tensor]:
    mean, std = (torch.tensor(case.processor[f"image_{of}"])[:, None, None] for of in ("mean", "std"))
    return [(image.float() / 255 - mean) / std for image in images]


def _patches(image: Tensor, side: int, merge: int) -> Tensor:
    """Patches (P, C, p, p) of an image (C, H, W), in blocks of merge x merge."""
    colors, height, width = image.shape
    blocks = image.view(colors, height // (side * merge), merge, side, width // (side * merge), merge, side)
    return blocks.permute(1, 4, 2, 5, 0, 3, 6).reshape(-1, colors, side, side)


def _qwen(case: Case, images: Sequence[Tensor], ids: Tensor) -> dict[str, Any]:
    patches = [_patches(image, case.patch, case.merge) for image in _normalized(case, images)]
    grids = [[1, image.shape[1] // case.patch, image.shape[2] // case.patch] for image in images]
    kwargs: dict[str, Any] = {"mm_token_type_ids": (ids == IMAGE).int()}
    if images:
        kwargs["pixel_values"] = torch.cat(patches)[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1)
        kwargs["image_grid_thw"] = torch.tensor(grids)
    return kwargs


def _gemma3(case: Case, images: Sequence[Tensor], ids: Tensor) -> dict[str, Any]:
    kwargs: dict[str, Any] = {"token_type_ids": (ids == IMAGE).int()}
    return kwargs | ({"pixel_values": torch.stack(_normalized(case, images))} if images else {})


def _mistral3(case: Case, images: Sequence[Tensor], ids: Tensor) -> dict[str, Any]:
    if not images:
        return {}
    sizes = torch.tensor([image.shape[1:] for image in images])
    height, width = sizes.amax(0).tolist()
    padded = [F.pad(x, (0, width - x.shape[2], 0, height - x.shape[1])) for x in _normalized(case, images)]
    return {"pixel_values": torch.stack(padded), "image_sizes": sizes}


def _raster(case: Case, images: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Of patches row by row, padded to the longest image: pixels with their colors (n, P, p * p * C), columns and rows
    (n, P, 2), which are -1 for padding, and the images' rows and columns (n, 2)."""
    grids = [(image.shape[1] // case.patch, image.shape[2] // case.patch) for image in images]
    patches = [_patches(image, case.patch, 1).movedim(1, -1).flatten(1) for image in _normalized(case, images)]
    places = [torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(1) for rows, columns in grids]
    padded = torch.nn.utils.rnn.pad_sequence(patches, batch_first=True)
    return padded, torch.nn.utils.rnn.pad_sequence(places, batch_first=True, padding_value=-1), torch.tensor(grids)


def _gemma4(case: Case, images: Sequence[Tensor], ids: Tensor) -> dict[str, Any]:
    kwargs: dict[str, Any] = {"mm_token_type_ids": (ids == IMAGE).int()}
    if images:
        kwargs["pixel_values"], kwargs["image_position_ids"], _ = _raster(case, images)
    return kwargs


def _smolvlm(case: Case, images: Sequence[Tensor], ids: Tensor) -> dict[str, Any]:
    return {"pixel_values": torch.stack(_normalized(case, images))[None]} if images else {}


def _lfm2_vl(case: Case, images: Sequence[Tensor], ids: Tensor) -> dict[str, Any]:
    if not images:
        return {}
    patches, places, grids = _raster(case, images)
    return {"pixel_values": patches, "pixel_attention_mask": (places[..., 0] >= 0).int(), "spatial_shapes": grids}


_QWEN_TOWER = {"depth": 3, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "out_hidden_size": 32}
_QWEN_TOWER |= {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 25}
_QWEN_PROCESSOR = _HALF | {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "resample": 3}
_QWEN_PROCESSOR |= {"size": {"shortest_edge": 256, "longest_edge": 65536}}
_HYBRID = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
_HYBRID |= {"num_hidden_layers": 4, "partial_rotary_factor": 0.5}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def _mrope(*sections: int, **more: Any) -> dict[str, Any]:
    settings = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections), "mrope_interleaved": True}
    return {"rope_parameters": settings | more}


_TOWER = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 4}
_SIGLIP = _TOWER | {"image_size": 24, "vision_use_head": False}
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 6}
_INDEX = {"image_token_index": IMAGE, "image_token_id": IMAGE}
_GEMMA3_PROCESSOR = _HALF | {"size": {"height": 24, "width": 24}, "resample": 2}
_PLAIN = {"image_mean": [0.0] * 3, "image_std": [1.0] * 3}
_GEMMA4_PROCESSOR = _PLAIN | {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 280}
_GEMMA4_TOWER = _TOWER | {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pooling_kernel_size": 2,
    "position_embedding_size": 16,
}
_GEMMA4_TEXT = {"global_head_dim": 16, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 6}
_GEMMA4_TEXT |= {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": 96}
_GEMMA4_IDS = {
    "image_token_id": IMAGE,
    "boi_token_id": START,
    "eoi_token_id": END,
    "video_token_id": 91,
    "audio_token_id": 94,
}
_SMOLVLM_PROCESSOR = _HALF | {"max_image_size": {"longest_edge": 24}, "size": {"longest_edge": 96}}
_QWEN2_5 = {"depth": 3, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "out_hidden_size": 32}
_QWEN2_5 |= {"patch_size": 4, "window_size": 16, "fullatt_block_indexes": [1]}
_PIXTRAL_PROCESSOR = _HALF | {"size": {"longest_edge": 64}, "patch_size": {"height": 4, "width": 4}, "resample": 3}

CASES = {
    "qwen3_vl": Case(
        "Qwen3VL", _mrope(3, 3, 2), _QWEN_TOWER | {"deepstack_visual_indexes": [0, 2]}, _IDS, _QWEN_PROCESSOR, _qwen,
        settings={"tie_word_embeddings": True},
    ),
    "qwen3_vl_moe": Case(
        "Qwen3VLMoe", _EXPERTS | _mrope(3, 3, 2), _QWEN_TOWER | {"deepstack_visual_indexes": [0, 2]}, _IDS,
        _QWEN_PROCESSOR,
        _qwen, is_exact=False,
    ),
    "qwen3_5": Case(
        "Qwen3_5", _HYBRID | _mrope(2, 1, 1, partial_rotary_factor=0.5), _QWEN_TOWER, _IDS, _QWEN_PROCESSOR, _qwen,
        is_exact=False,
    ),
    "qwen3_5_moe": Case(
        "Qwen3_5Moe", _HYBRID | _MOE | _mrope(2, 1, 1, partial_rotary_factor=0.5), _QWEN_TOWER, _IDS, _QWEN_PROCESSOR,
        _qwen,
        is_exact=False,
    ),
    "gemma3": Case(
        "Gemma3", _WINDOWS | {"query_pre_attn_scalar": 16}, _SIGLIP,
        _INDEX | {"mm_tokens_per_image": 9, "boi_token_index": START, "eoi_token_index": END}, _GEMMA3_PROCESSOR,
        _gemma3,
        grids=((6, 6),), settings={"tie_word_embeddings": True},
    ),
    "mistral3": Case(
        "Mistral3", {"model_type": "mistral", "sliding_window": None},
        _TOWER | {"model_type": "pixtral", "image_size": 64},
        _INDEX, _PIXTRAL_PROCESSOR, _mistral3,
    ),
    "ministral3": Case(
        "Mistral3", {"model_type": "ministral3"},
        _TOWER | {"model_type": "pixtral", "image_size": 64, "hidden_act": "silu"},
        _INDEX, _PIXTRAL_PROCESSOR, _mistral3, settings={"tie_word_embeddings": True},
    ),
    "gemma4": Case(
        "Gemma4", _GEMMA4_TEXT | {"hidden_size_per_layer_input": 8},
        _GEMMA4_TOWER | {"use_clipped_linears": True, "standardize": True}, _GEMMA4_IDS, _GEMMA4_PROCESSOR, _gemma4,
        settings={"tie_word_embeddings": True},
    ),
    "gemma4_large": Case(
        "Gemma4", _GEMMA4_TEXT | {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
            "use_bidirectional_attention": "vision"}, _GEMMA4_TOWER,
        _GEMMA4_IDS, _GEMMA4_PROCESSOR, _gemma4, settings={"tie_word_embeddings": True},
    ),
    "gemma4_unified": Case(
        "Gemma4Unified",
        {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2, "global_head_dim": 16}
        | {"sliding_window": 40, "use_bidirectional_attention": "vision"},
        {"patch_size": 4, "pooling_kernel_size": 2, "mm_embed_dim": 32, "mm_posemb_size": 16, "output_proj_dims": 32},
        _GEMMA4_IDS, _GEMMA4_PROCESSOR, _gemma4, grids=((2, 3), (1, 5), (4, 2), (3, 3)), patch=8, merge=1,
        settings={"tie_word_embeddings": True}, is_exact=False,
    ),
    "smolvlm": Case(
        "SmolVLM", {"model_type": "llama"}, _TOWER | {"image_size": 24}, {"image_token_id": IMAGE, "scale_factor": 2},
        _SMOLVLM_PROCESSOR, _smolvlm, grids=((6, 6),),
    ),
    "lfm2_vl": Case(
        "Lfm2Vl", {"model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"]},
        _TOWER | {"model_type": "siglip2_vision_model", "num_patches": 16, "vision_use_head": False},
        {"image_token_id": IMAGE, "projector_hidden_size": 20},
        _HALF | {"encoder_patch_size": 4, "downsample_factor": 2, "tile_size": 16}, _lfm2_vl, is_exact=False,
        settings={"tie_word_embeddings": True},
    ),
    "qwen2_5_vl": Case(
        "Qwen2_5_VL", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
            "head_dim": 8}, _QWEN2_5,
        _IDS, _QWEN_PROCESSOR, _qwen, grids=((4, 6), (2, 10), (8, 4), (10, 6)),
    ),
}  # fmt: skip


@functools.cache
def reference(case: Case) -> transformers.PreTrainedModel:
    """transformers' model, with weights large enough that a wrong formula shows."""
    config = getattr(transformers, f"{case.name}Config")(
        text_config=_TEXT | case.text, vision_config=case.vision,
        **{"tie_word_embeddings": False} | case.others | case.settings
    )  # fmt: skip
    config._attn_implementation = "eager"
    for part in (config, config.text_config):
        part._experts_implementation = "eager"
    model = getattr(transformers, f"{case.name}ForConditionalGeneration")(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() < 2:
                parameter.copy_(parameter * ("norm" in name) + 0.2 * noise)
            else:
                parameter.copy_(0.7 * noise / parameter.flatten(1).shape[1] ** 0.5)
    return model


Case.__hash__ = lambda self: hash(self.name + str(self.text))  # type: ignore[method-assign]


def save(case: Case, folder: Path) -> Path:
    """Save transformers' model, with the settings of its image processor."""
    reference(case).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(case.processor))
    return folder


def stack_experts(folder: Path, transposed: bool) -> None:
    """Rewrite a folder with one tensor per projection of experts, as published for Qwen3.5, or `transposed`, for
    Qwen3-VL."""
    tensors, stacks = load_file(folder / "model.safetensors"), dict[str, dict[str, Tensor]]()
    for name in list(tensors):
        if found := re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)_proj\.weight", name):
            stacks.setdefault(found[1], {})[f"{found[3]}{found[2]}"] = tensors.pop(name)
    for place, own in stacks.items():
        gate, up, down = (torch.stack([own[f"{of}{i}"] for i in range(len(own) // 3)]) for of in ("gate", "up", "down"))
        tensors |= {f"{place}.gate_up_proj": torch.cat((gate, up), 1), f"{place}.down_proj": down}
    for name in [name for name in tensors if ".experts." in name and transposed]:
        tensors[name] = tensors[name].mT.contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


class Document(NamedTuple):
    ids: list[int]
    images: list[Tensor]  # (C, H, W) bytes
    spans: list[tuple[int, int, int]]  # each image's first token, and its rows and columns of tokens


def draw(case: Case, grids: Sequence[Grid], seed: int) -> Document:
    """A document with images of these grids of patches, and text around them."""
    generator = torch.Generator().manual_seed(seed)

    def text(length: int) -> list[int]:
        return torch.randint(16, IMAGE, (length,), generator=generator).tolist()  # lower ids may be padding

    ids, images, spans = text(3 + seed % 4), [], []
    for rows, columns in grids:
        ids.append(START)
        spans.append((len(ids), rows // case.merge, columns // case.merge))
        ids += [IMAGE] * (rows * columns // case.merge**2) + [END, *text(3)]
        size = 3, rows * case.patch, columns * case.patch
        images.append(torch.randint(0, 256, size, generator=generator, dtype=torch.uint8))
    ids += text(-len(ids) % 8)  # matrix products round the last rows of other lengths differently
    return Document(ids, images, spans)


def draw_all(case: Case, counts: Sequence[int], seed: int = 0) -> list[Document]:
    """Documents with these numbers of images."""
    grids = iter([case.grids[i % len(case.grids)] for i in range(sum(counts))])
    return [draw(case, [next(grids) for _ in range(count)], seed + i) for i, count in enumerate(counts)]


def position_shift(document: Document) -> np.ndarray:
    """What each token's rotary position adds to its index (T,): images take as many positions as their longer side."""
    shifts, behind = np.zeros(len(document.ids), np.int32), 0
    for first, rows, columns in document.spans:
        end = first + rows * columns
        shifts[first:end] = first + behind - np.arange(first, end)
        behind += max(rows, columns) - rows * columns
        shifts[end:] = behind
    return shifts


def inputs(case: Case, model: Decoder, documents: Sequence[Document], *, packed: bool) -> dict[str, Any]:
    """Arguments of the decoder for these documents, in one packed row or in padded rows."""
    lengths = [len(document.ids) for document in documents]
    starts, width = np.cumsum([0, *lengths]), max(lengths)
    shape = (1, sum(lengths)) if packed else (len(documents), width)
    ids, shifts = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int32)
    for i, (document, start) in enumerate(zip(documents, starts, strict=False)):
        place = slice(start if packed else i * width, (start if packed else i * width) + lengths[i])
        ids.view(-1)[place] = torch.tensor(document.ids)
        shifts.view(-1)[place] = torch.from_numpy(position_shift(document))
    kwargs: dict[str, Any] = {"input_ids": ids}
    if packed:
        kwargs["cu_seqlens"] = torch.tensor(starts, dtype=torch.int32)
    if any(rope.axes for rope, _ in model.rotary):
        kwargs["position_shift"] = shifts
    if images := [image for document in documents for image in document.images]:
        kwargs["images"] = batch_of(case, images, (ids.flatten() == IMAGE).nonzero()[:, 0])
    return kwargs


def batch_of(case: Case, images: Sequence[Tensor], places: Tensor) -> Images:
    grids = tuple((image.shape[1] // case.patch, image.shape[2] // case.patch) for image in images)
    patches = torch.cat([_patches(image, case.patch, case.merge) for image in images])
    return Images(patches, grids, places, torch.arange(len(places)))


def split(outputs: Tensor, documents: Sequence[Document], *, packed: bool) -> list[Tensor]:
    """Each document's part of outputs (B, T, ...)."""
    lengths = [len(document.ids) for document in documents]
    if packed:
        return list(outputs[0].split(lengths))
    return [row[:length] for row, length in zip(outputs, lengths, strict=True)]


def differences(case: Case, model: Decoder, documents: Sequence[Document], *, packed: bool) -> tuple[float, float]:
    """The largest difference from transformers' logits, and the largest relative difference of a parameter's gradient,
    by norm."""
    theirs = [_their_logits(case, document) for document in documents]
    ours = split(model(**inputs(case, model, documents, packed=packed)), documents, packed=packed)
    of_logits = max((own - their).detach().abs().max().item() for own, their in zip(ours, theirs, strict=True))
    reference(case).zero_grad()
    _loss(theirs, documents).backward()
    _loss(ours, documents).backward()
    expected = {name: p.grad for name, p in reference(case).named_parameters() if p.grad is not None}
    gradients = _gradients_in_transformers(model)
    assert gradients.keys() == expected.keys()
    # Some gradients are 0 in theory, as of the keys' biases, so their noise is compared with the largest gradient.
    least = 1e-3 * max(gradient.norm() for gradient in expected.values())
    relative = [(gradients[name] - true).norm() / (true.norm() + least) for name, true in expected.items()]
    return of_logits, float(max(relative))


def _their_logits(case: Case, document: Document) -> Tensor:
    """transformers' logits (T, V) of one document by itself."""
    ids = torch.tensor([document.ids])
    return _fresh(case)(input_ids=ids, use_cache=False, **case.inputs(case, document.images, ids)).logits[0]


def _fresh(case: Case) -> Any:
    """transformers' model, which keeps positions of the last prompt."""
    model: Any = reference(case)
    if hasattr(model.model, "rope_deltas"):
        model.model.rope_deltas = None
    return model


def _loss(logits: Sequence[Tensor], documents: Sequence[Document]) -> Tensor:
    """The sum of the next tokens' cross-entropies."""
    pairs = zip(logits, documents, strict=True)
    return torch.stack(
        [F.cross_entropy(x[:-1], torch.tensor(document.ids[1:]), reduction="sum") for x, document in pairs]
    ).sum()


def _gradients_in_transformers(model: Decoder) -> dict[str, Tensor]:
    """The gradients by the names that transformers' model gives to the parameters."""
    source, gradients = source_of(model), {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        in_memory = ".experts." in name and [(name, parameter.grad)]  # stored as one tensor per expert
        for place, gradient in in_memory or [
            (place, part.values) for place, part in source.stored(name, parameter.grad)
        ]:
            gradients[source.name_in_whole(place)] = gradient
    return gradients


NUM_NEW = 10  # greedy tokens
_OPTIONS = {"do_sample": False, "min_new_tokens": NUM_NEW, "max_new_tokens": NUM_NEW, "eos_token_id": None}


def their_greedy_tokens(case: Case, document: Document) -> list[int]:
    """transformers' greedy tokens behind a document, without those of images."""
    ids = torch.tensor([document.ids])
    kwargs = case.inputs(case, document.images, ids) | _OPTIONS | {"attention_mask": torch.ones_like(ids)}
    generated = _fresh(case).generate(ids, pad_token_id=0, suppress_tokens=list(range(IMAGE, 96)), **kwargs)
    return generated[0, len(document.ids) :].tolist()


@torch.no_grad()
def greedy_tokens(case: Case, model: Decoder, documents: Sequence[Document]) -> list[list[int]]:
    """The same, of all documents in one batch with a cache."""
    lengths, rows = torch.tensor([len(document.ids) for document in documents]), torch.arange(len(documents))
    cache = model.new_cache(len(documents), int(lengths.max()) + NUM_NEW)
    logits = model(**inputs(case, model, documents, packed=False), cache=cache, lengths=lengths)[rows, lengths - 1]
    chosen: list[Tensor] = []
    while True:
        logits[:, IMAGE:] = -torch.inf
        chosen.append(logits.argmax(-1))
        if len(chosen) == NUM_NEW:
            return torch.stack(chosen, 1).tolist()
        logits = model(chosen[-1][:, None], cache=cache)[:, 0]
