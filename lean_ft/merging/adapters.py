"""Merge LoRA adapters of one model into a new adapter in PEFT's format.

`linear` and `slerp` are exact: the ranks are concatenated, so the new difference is the weighted sum of the adapters'.
TIES and DARE compute on whole differences, layer by layer, and an SVD makes a low-rank adapter of the result; so does
`--rank` with any method. The error of the SVD is measured.

Shapes: I inputs, O outputs, R rank.
"""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lean_ft.export.places import check_destination, room_for, settings_of_run
from lean_ft.merging.alike import check_distinct, check_same_templates, check_same_tokens
from lean_ft.merging.folders import set_template, tokenizer_of_input
from lean_ft.merging.methods import BLOCK, Formula, blocks, merged_values, slerp_coefficients
from lean_ft.merging.report import MergeFacts, MergeResult, write_facts
from lean_ft.merging.settings import MergeSettings
from lean_ft.models import load_model
from lean_ft.models.beside import files_beside, write_beside
from lean_ft.models.load_options import torch_dtype
from lean_ft.models.safetensors_file import read_header, write_file
from lean_ft.models.source import name_in_language_model
from lean_ft.models.stored_weights import weights_fingerprint
from lean_ft.models.vision.config import SPELLINGS
from lean_ft.peft.finished_models import find_finished
from lean_ft.peft.peft_format import fit_adapter
from lean_ft.peft.stored_adapter import (
    CONFIG_FILE,
    LABELS_FILE,
    OF_EMBEDDING,
    OF_LINEAR,
    PREFIX,
    WEIGHTS_FILE,
    StoredAdapter,
    ids_of_rows,
    labels_of,
    read_adapter,
    read_factors,
    read_tensor,
)
from lean_ft.system.foreign_values import JSON
from lean_ft.system.whole_files import read_json, write_json, write_whole
from lean_ft.tokenizers import Tokenizer
from lean_ft.training.view import save_view

_EXACT_SVD = 1024  # rows or columns up to which all singular values are computed
_OVERSAMPLING, _ITERATIONS = 32, 6  # of the randomized SVD (Halko et al. 2011, https://arxiv.org/abs/0909.4061)
_TO_WHOLE = "Merge it into its base (leanft export --merge), and then merge the whole models."


@dataclass(frozen=True)
class AdapterInput:
    """One adapter of a merge, its tensors not yet read."""

    given: str  # as the user names it
    folder: Path
    adapter: StoredAdapter
    in_file: dict[str, str]  # names of tensors in the file, by their names in the language model
    key: str  # digest of the tensors
    tokenizer: Tokenizer | None

    @property
    def config(self) -> dict[str, Any]:
        return self.adapter.config

    def __str__(self) -> str:
        return self.given

    def module(self, layer: str) -> tuple[str, tuple[str, str]]:
        """The name of a layer in the file, and the suffixes of its matrices."""
        endings = OF_EMBEDDING if layer + OF_EMBEDDING[0] in self.adapter.tensors else OF_LINEAR
        return self.in_file[layer + endings[0]].removesuffix(endings[0]), endings


@dataclass(frozen=True)
class _Factors:
    """A low-rank matrix B A, and the squares of its norm and of its distance from the wanted matrix."""

    a: Tensor  # (R, I)
    b: Tensor  # (O, R)
    square: float = 0.0
    error: float = 0.0


def merge_adapters(
    models: Sequence[str | Path], output: Path, formula: Formula, settings: MergeSettings, force: bool
) -> MergeResult:
    """Write the merged adapter, as `merge_models` describes."""
    if settings.max_shard_size is not None:
        raise ValueError("--max-shard-size is only used for whole models; an adapter is one file. Remove it.")
    if settings.rank is not None and settings.rank < 1:
        raise ValueError(f"--rank is {settings.rank}; expected a number of at least 1.")
    dtype = torch.float32 if settings.dtype is None else torch_dtype(settings.dtype)
    inputs = [_open_adapter(model) for model in models]
    for one in inputs:
        check_destination(output, one.folder, force)
    tokenizer = _check_alike(inputs, settings)
    base = settings.base or inputs[0].adapter.base_model
    is_exact = formula.name in ("linear", "slerp") and settings.rank is None
    largest = max((shape.rank for one in inputs for shape in one.adapter.shapes.values()), default=1)
    rank = None if is_exact else settings.rank or largest
    layers = list(dict.fromkeys(layer for one in inputs for layer in one.adapter.shapes))
    tensors, ranks, sizes = dict[str, Tensor](), dict[str, int](), dict[str, tuple[float, float]]()
    for layer in layers:
        factors = _merged_layer(layer, inputs, formula, rank)
        module, endings = next(one for one in inputs if layer in one.adapter.shapes).module(layer)
        for ending, matrix in zip(endings, (factors.a, factors.b), strict=True):
            tensors[PREFIX + module + ending] = _finite(matrix.to(dtype), layer)
        ranks[module], sizes[module] = len(factors.a), (factors.square, factors.error)
    tensors |= _whole_tensors(inputs, formula, dtype)
    facts = MergeFacts(formula, [*map(str, inputs)], base, rank)
    output.parent.mkdir(parents=True, exist_ok=True)
    needed_bytes = sum(tensor.nbytes for tensor in tensors.values())
    with write_whole(output) as temporary, room_for(needed_bytes, output):
        temporary.mkdir()
        write_file(temporary / WEIGHTS_FILE, tensors, {"format": "pt"})
        write_json(temporary / CONFIG_FILE, _config(inputs, ranks, base))
        _write_other_files(temporary, inputs[0], tokenizer, settings.chat_template)
        read_adapter(temporary)  # raises if it is damaged
        write_facts(temporary, output.name, facts)
    return MergeResult(output, facts, _contents(ranks), [] if is_exact else [_errors(sizes)])


def _contents(ranks: Mapping[str, int]) -> str:
    found = sorted({*ranks.values()})
    shown = ", ".join(map(str, found[:4])) + (" ..." if found[4:] else "")
    return f"an adapter of {len(ranks)} layers, rank {shown}" if ranks else "an adapter without layers"


def _errors(sizes: Mapping[str, tuple[float, float]]) -> str:
    """A sentence about the Frobenius norms of what the SVD dropped, relative to the merged differences."""
    relative = {module: math.sqrt(error / square) if square else 0.0 for module, (square, error) in sizes.items()}
    square, error = (sum(pair[i] for pair in sizes.values()) for i in (0, 1))
    worst = max(relative, key=lambda module: relative[module])
    return (
        f"SVD: relative error {math.sqrt(error / square) if square else 0.0:.3g} over all layers, at most "
        f"{relative[worst]:.3g} ({worst})."
    )


def _open_adapter(given: str | Path) -> AdapterInput:
    folder = find_finished(given)
    adapter = read_adapter(folder)
    if dora := [layer for layer, shape in adapter.shapes.items() if shape.dora]:
        raise ValueError(
            f"{given} is a DoRA adapter (use_dora, {dora[0]}), which scales the rows of its base's weights, so it is "
            f"no sum of matrices. {_TO_WHOLE}"
        )
    if experts := adapter.config.get("target_parameters"):
        shown = experts[0] if isinstance(experts, list) else experts
        raise ValueError(f"{given} adapts stacks of experts ({shown!r:.80}), whose ranks are stacked too. {_TO_WHOLE}")
    if adapter.outside:
        raise ValueError(f"{given} has {adapter.outside[0]}, a tensor of a part that lean_ft does not read.")
    in_file, digest = dict[str, str](), hashlib.sha256()
    for raw, stored in sorted(read_header(folder / WEIGHTS_FILE).items()):
        own = raw.removeprefix(PREFIX)
        in_file[name_in_language_model(own, SPELLINGS) or own] = own
        digest.update(f"{own} {stored.dtype_name} {list(stored.shape)}\n".encode())
        for piece in stored.pieces(2**20) if stored.dtype is not None else ():
            digest.update(piece)
    for layer in adapter.shapes:
        endings = OF_EMBEDDING if layer + OF_EMBEDDING[0] in adapter.tensors else OF_LINEAR
        a, b = (adapter.tensors.get(layer + ending) for ending in endings)
        if a is None or b is None or len(b.shape) != 2 or b.shape[1] != a.shape[0]:
            shapes = [None if matrix is None else list(matrix.shape) for matrix in (a, b)]
            raise ValueError(
                f"{given}: {layer} has the matrices {shapes[0]} and {shapes[1]}; expected (R, I) and (O, R)."
            )
    tokenizer = tokenizer_of_input(str(given), folder)
    return AdapterInput(str(given), folder, adapter, in_file, digest.hexdigest(), tokenizer)


# What differs --------------------------------------------------------------------------------------------------


def _check_alike(inputs: Sequence[AdapterInput], settings: MergeSettings) -> Tokenizer | None:
    """Raise ValueError for the first difference. Returns the tokenizer of the output."""
    first = inputs[0]
    check_distinct({str(one): one.folder for one in inputs}, len(inputs))
    for other in inputs[1:]:
        for field in ("task_type", "fan_in_fan_out", "modules_to_save", "trainable_token_indices"):
            ours, theirs = first.config.get(field) or None, other.config.get(field) or None
            if ours != theirs:
                raise ValueError(
                    f"the adapters differ: {field} is {json.dumps(ours)[:80]} in {first} and {json.dumps(theirs)[:80]} "
                    f"in {other}. {_TO_WHOLE}"
                )
        if read_json(first.folder / LABELS_FILE) != read_json(other.folder / LABELS_FILE):
            raise ValueError(
                f"the labels of {first} and {other} differ ({LABELS_FILE}). Merge classifiers of the same."
            )
        _check_same_base(first, other, settings.base)
        _check_shapes(first, other)
    if settings.base is not None:
        _check_fits(inputs, settings.base)
    with_tokenizer = [(str(one), one.tokenizer) for one in inputs if one.tokenizer is not None]
    for name, tokenizer in with_tokenizer[1:]:
        check_same_tokens(*with_tokenizer[0], name, tokenizer)
        if settings.chat_template is None:
            check_same_templates(*with_tokenizer[0], name, tokenizer)
    return with_tokenizer[0][1] if with_tokenizer else None


def _check_same_base(first: AdapterInput, other: AdapterInput, base: str | None) -> None:
    ours, theirs = first.adapter.base_model, other.adapter.base_model
    if base is not None or ours == theirs:
        return
    folders = [Path(name).expanduser() for name in (ours, theirs) if name]
    if len(folders) == 2 and all(folder.is_dir() for folder in folders):
        fingerprints = [*map(weights_fingerprint, folders)]
        if fingerprints[0] is not None and fingerprints[0] == fingerprints[1]:
            return
    shown = [name or "no base model" for name in (ours, theirs)]
    raise ValueError(
        f"the adapters have different base models: {first} names {shown[0]}, and {other} names {shown[1]}. If both "
        "mean the same model, pass it with --base."
    )


def _check_shapes(first: AdapterInput, other: AdapterInput) -> None:
    for layer in first.adapter.shapes.keys() & other.adapter.shapes.keys():
        sizes = [_sizes(one, layer) for one in (first, other)]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"{layer} has {sizes[0][0]} outputs and {sizes[0][1]} inputs in {first}, and {sizes[1][0]} and "
                f"{sizes[1][1]} in {other}. Merge adapters of one model."
            )


def _sizes(one: AdapterInput, layer: str) -> tuple[int, int]:
    """(O, I) of a layer."""
    _, (a, b) = one.module(layer)
    return one.adapter.tensors[layer + b].shape[0], one.adapter.tensors[layer + a].shape[1]


def _check_fits(inputs: Sequence[AdapterInput], base: str) -> None:
    """Raise ValueError unless the base has the adapters' layers. Adapters with tensors that are compared with the
    base's values are checked when they are loaded."""
    folders = [one.folder for one in inputs]
    model = load_model(base, "meta", scores=labels_of(folders[0]), new_ids=ids_of_rows(*folders))
    for one in inputs:
        if not _names_of_whole(one):
            fit_adapter(model, one.folder)


# Merging -------------------------------------------------------------------------------------------------------


def _merged_layer(layer: str, inputs: Sequence[AdapterInput], formula: Formula, rank: int | None) -> _Factors:
    """The merged matrices of one layer; an adapter without the layer counts as zeros. `rank`: of the result, or None
    for the exact one."""
    pairs = [_scaled_factors(one, layer) if layer in one.adapter.shapes else None for one in inputs]
    if formula.name in ("linear", "slerp"):
        exact = _concatenated(pairs, formula)
        return exact if rank is None else _truncated_product(exact, rank)
    shape = next(_sizes(one, layer) for one in inputs if layer in one.adapter.shapes)
    differences = [torch.zeros(shape) if pair is None else pair[1] @ pair[0] for pair in pairs]
    flat = [difference.view(-1) for difference in differences]
    reads = [lambda first, number, one=one: one[first : first + number].clone() for one in flat]
    merged, numel = torch.empty(shape), math.prod(shape)
    read = merged_values(formula, layer, reads, None, numel, [one.key for one in inputs])
    for first, number in blocks(numel):
        merged.view(-1)[first : first + number] = read(first, number)
    assert rank is not None
    return _truncated(_finite(merged, layer), rank)


def _scaled_factors(one: AdapterInput, layer: str) -> tuple[Tensor, Tensor]:
    """A, and B times the scaling, in float32."""
    a, b = read_factors(one.adapter, layer)
    return a.float(), b.float() * one.adapter.shapes[layer].scaling


def _concatenated(pairs: Sequence[tuple[Tensor, Tensor] | None], formula: Formula) -> _Factors:
    """The weighted sum of the adapters as one of the sum of their ranks."""
    if formula.name == "slerp":
        coefficients = _slerp_of_products(pairs, formula.t)
    else:
        total = math.fsum(formula.weights) if formula.normalize else 1.0
        coefficients = [weight / total for weight in formula.weights]
    present = [(a, b * c) for pair, c in zip(pairs, coefficients, strict=True) if pair is not None for a, b in (pair,)]
    return _Factors(torch.cat([a for a, _ in present]), torch.cat([b for _, b in present], dim=1))


def _slerp_of_products(pairs: Sequence[tuple[Tensor, Tensor] | None], t: float) -> list[float]:
    """The factors of two matrices B A in their spherical interpolation, from products of the ranks' size."""

    def product(one: tuple[Tensor, Tensor] | None, other: tuple[Tensor, Tensor] | None) -> float:
        if one is None or other is None:
            return 0.0
        (a, b), (c, d) = ([matrix.double() for matrix in pair] for pair in (one, other))
        return ((b.T @ d) * (a @ c.T)).sum().item()

    one, other = pairs
    return [*slerp_coefficients(t, max(0.0, product(one, one)), product(one, other), max(0.0, product(other, other)))]


def _truncated_product(product: _Factors, rank: int) -> _Factors:
    """The closest matrix of a lower rank to B A, without forming B A."""
    of_outputs, upper = torch.linalg.qr(product.b.double())
    of_inputs, lower = torch.linalg.qr(product.a.double().T)
    u, values, vt = torch.linalg.svd(upper @ lower.T, full_matrices=False)
    rank, squares = min(rank, len(values)), values.square()
    root = values[:rank].sqrt()
    a, b = (root[:, None] * (vt[:rank] @ of_inputs.T)).float(), (of_outputs @ u[:, :rank] * root).float()
    return _Factors(a, b, squares.sum().item(), squares[rank:].sum().item())


def _truncated(matrix: Tensor, rank: int) -> _Factors:
    """A matrix of this rank close to `matrix` (O, I): the closest, or for a large matrix almost."""
    rank = min(rank, *matrix.shape)
    if min(matrix.shape) <= _EXACT_SVD:
        u, values, vt = torch.linalg.svd(matrix, full_matrices=False)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            u, values, v = torch.svd_lowrank(matrix, min(rank + _OVERSAMPLING, *matrix.shape), _ITERATIONS)
        vt = v.T
    root = values[:rank].sqrt()
    a, b = root[:, None] * vt[:rank], u[:, :rank] * root
    error = sum(
        (matrix[i : i + 256] - b[i : i + 256] @ a).double().square().sum().item() for i in range(0, len(b), 256)
    )
    return _Factors(a.contiguous(), b, sum(row.double().square().sum().item() for row in matrix), error)


def _finite(tensor: Tensor, name: str) -> Tensor:
    if not tensor.isfinite().all():
        what = str(tensor.dtype).removeprefix("torch.")
        raise ValueError(f"the merged {name} has a number that is not finite, or that {what} cannot hold.")
    return tensor


# Tensors that an adapter has whole -----------------------------------------------------------------------------


def _names_of_whole(one: AdapterInput) -> set[str]:
    """Tensors beside the pairs: trained rows, an output layer for scores, a copy of an embedding."""
    return {name for name in one.adapter.tensors if not name.endswith((*OF_LINEAR, *OF_EMBEDDING))}


def _whole_tensors(inputs: Sequence[AdapterInput], formula: Formula, dtype: torch.dtype) -> dict[str, Tensor]:
    """The weighted averages of the tensors beside the pairs, by their names in the file. Raises ValueError for one that
    not all adapters have, or that the method cannot merge without the base's values."""
    first, tensors = inputs[0], dict[str, Tensor]()
    names = [_names_of_whole(one) for one in inputs]
    for name in sorted(set().union(*names)):
        if lacking := [one for one, own in zip(inputs, names, strict=True) if name not in own]:
            having = next(one for one, own in zip(inputs, names, strict=True) if name in own)
            raise ValueError(f"{lacking[0]} lacks {name}, which {having} has as a whole tensor. {_TO_WHOLE}")
        values = [read_tensor(one.adapter.tensors[name]) for one in inputs]
        if len({tuple(value.shape) for value in values}) > 1:
            shapes = " and ".join(f"{list(value.shape)} in {one}" for value, one in zip(values, inputs, strict=True))
            raise ValueError(f"{name} has the shapes {shapes}. Merge adapters of one model.")
        if all(value.dtype == values[0].dtype and torch.equal(value, values[0]) for value in values):
            tensors[PREFIX + first.in_file[name]] = values[0]
            continue
        is_average = formula.normalize or math.isclose(math.fsum(formula.weights), 1.0)
        if formula.name != "linear" or not is_average:
            raise ValueError(
                f"{name} is a whole tensor, not a difference from the base, so it can only be averaged: use --method "
                f"linear without --no-normalize. Otherwise: {_TO_WHOLE}"
            )
        flat = [value.float().view(-1) for value in values]
        reads = [lambda start, number, one=one: one[start : start + number].clone() for one in flat]
        read = merged_values(formula, name, reads, None, flat[0].numel(), [one.key for one in inputs])
        merged = torch.cat([read(start, min(BLOCK, len(flat[0]) - start)) for start in range(0, len(flat[0]), BLOCK)])
        tensors[PREFIX + first.in_file[name]] = _finite(merged.view(values[0].shape).to(dtype), name)
    return tensors


# Writing -------------------------------------------------------------------------------------------------------


def _config(inputs: Sequence[AdapterInput], ranks: Mapping[str, int], base: str | None) -> dict[str, Any]:
    """PEFT's configuration. alpha is the rank of each layer, because the matrices hold the scaling."""
    first = inputs[0].config
    rank = Counter(ranks.values()).most_common(1)[0][0] if ranks else 1
    others = {f"^{re.escape(module)}": float(own) for module, own in ranks.items() if own != rank}
    is_named = base is not None and base == inputs[0].adapter.base_model
    return {
        "peft_type": "LORA",
        "task_type": first.get("task_type"),
        "base_model_name_or_path": first.get("base_model_name_or_path") if is_named else base,
        "revision": first.get("revision") if is_named else None,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "target_modules": _target_modules(inputs, ranks),
        "target_parameters": None,
        "rank_pattern": {pattern: int(own) for pattern, own in others.items()},
        "alpha_pattern": others,
        "use_rslora": False,
        "use_dora": False,
        "bias": "none",
        "fan_in_fan_out": bool(first.get("fan_in_fan_out")),
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": first.get("modules_to_save"),
        "trainable_token_indices": first.get("trainable_token_indices"),
    }


def _target_modules(inputs: Sequence[AdapterInput], ranks: Mapping[str, int]) -> object:
    """The choice of layers that the adapters share, if they have the same layers; otherwise the layers' names."""
    selecting = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")
    first, chosen = inputs[0], [[_sorted(one.config.get(field)) for field in selecting] for one in inputs]
    are_alike = all(one.adapter.shapes.keys() == first.adapter.shapes.keys() for one in inputs)
    is_list = isinstance(chosen[0][0], list) and not any(chosen[0][1:])
    return chosen[0][0] if not ranks or (are_alike and is_list and chosen == chosen[:1] * len(chosen)) else list(ranks)


def _sorted(value: JSON) -> JSON:
    return sorted(value, key=str) if isinstance(value, list) else value or None


def _write_other_files(
    folder: Path, first: AdapterInput, tokenizer: Tokenizer | None, chat_template: str | None
) -> None:
    write_beside(files_beside(first.folder), folder)
    if labels := read_json(first.folder / LABELS_FILE):
        write_json(folder / LABELS_FILE, labels)
    if tokenizer is not None:
        save_view(folder, tokenizer, settings_of_run(first.folder))
    if chat_template is not None:
        if tokenizer is None:
            raise ValueError(
                f"--chat-template {chat_template}: no adapter has a tokenizer to write it beside. Remove it."
            )
        set_template(folder, chat_template)
