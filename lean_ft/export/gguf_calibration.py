"""The importance of input features for a quantized GGUF file, and how much the file differs from the model.

The importance of an input feature of a matrix is the mean square of that input. It comes from a file of llama.cpp's
`llama-imatrix`, or from the model's own forward passes.

Source: llama.cpp, tools/imatrix/imatrix.cpp and common/imatrix-loader.cpp.

Shapes: R rows and C columns of a matrix, E experts.
"""

import math
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lean_ft.data import Batch, EvalBatches, sft_batches
from lean_ft.export.gguf_contents import layout_of
from lean_ft.export.gguf_facts import Facts
from lean_ft.export.gguf_families import GGUFFamily
from lean_ft.export.gguf_import import read_header, stored_parameters
from lean_ft.export.gguf_quants import serial_operations
from lean_ft.models import Decoder
from lean_ft.models.gguf_layouts import by_side, store
from lean_ft.models.gguf_tensors import GGUFTensor
from lean_ft.models.moe import Experts
from lean_ft.models.source import parts_on_disk
from lean_ft.quantize import mean_loss
from lean_ft.settings import SFTDataConfig
from lean_ft.system.shards import Part
from lean_ft.tokenizers import Tokenizer

_STRIP = 2**18  # weights compared at a time
_DATA = {"max_length": 2048, "batch_tokens": 2048}  # of a forward pass

Importance = dict[str, Tensor]
"""Matrix of the file, such as blk.0.attn_q.weight -> the importance of its input features, (C,), or (E, C) for experts."""


def read_imatrix(file: Path) -> Importance:
    """Read an importance matrix of llama.cpp, in GGUF or in the older binary format. Raises ValueError if it is damaged."""
    if not file.is_file():
        raise ValueError(f"--imatrix: no such file: {file}. Pass a file that llama-imatrix wrote.")
    with file.open("rb") as stream:
        is_gguf = stream.read(4) == b"GGUF"
    found = _read_gguf(file) if is_gguf else _read_binary(file)
    for name, importance in found.items():
        if not bool((importance.isfinite() & (importance >= 0)).all()):
            raise ValueError(f"--imatrix: {file} has a negative or infinite number for {name}. Make it again.")
    return found


def _read_gguf(file: Path) -> Importance:
    found, (_, tensors) = Importance(), read_header(file)
    for name, stored in tensors.items():
        matrix = name.removesuffix(".in_sum2")
        counts = tensors.get(f"{matrix}.counts")
        if matrix == name or counts is None or {stored.kind, counts.kind} != {"F32"}:
            continue
        sums, number = (
            torch.from_numpy(np.fromfile(file, np.float32, math.prod(one.shape), offset=one.offset))
            for one in (stored, counts)
        )
        sums = sums.view(-1, stored.shape[-1])  # one dimension in the file of a single matrix
        if len(number) not in (1, len(sums)):
            raise ValueError(f"--imatrix: {file} is damaged: {matrix} has {len(number)} counts. Make it again.")
        found[matrix] = _mean(sums, number[:, None])
    if not found:
        raise ValueError(
            f"--imatrix: {file} has no importance, only other tensors. Pass a file that llama-imatrix wrote."
        )
    return found


def _read_binary(file: Path) -> Importance:
    content, found, place = file.read_bytes(), Importance(), 4
    try:
        for _ in range(struct.unpack_from("<I", content)[0]):
            (length,) = struct.unpack_from("<I", content, place)
            name = content[place + 4 : place + 4 + length].decode()
            num_calls, size = struct.unpack_from("<iI", content, place + 4 + length)
            place += 12 + length
            sums = torch.frombuffer(bytearray(content[place : place + 4 * size]), dtype=torch.float32)
            if len(sums) != size or name in found or num_calls < 0:
                raise ValueError("truncated")
            found[name], place = sums / max(1, num_calls), place + 4 * size
    except (struct.error, ValueError):  # also of bytes that are not UTF-8, and of an empty buffer
        found.clear()
    if not found:
        raise ValueError(
            f"--imatrix: {file} is damaged, or not an importance matrix. Pass a file that llama-imatrix wrote."
        )
    return found


def check_importance(importance: Importance, shapes: Mapping[str, tuple[int, ...]], source: str) -> Importance:
    """Return the importance of the matrices `shapes` of the file, in the shape for `quantize`.

    Raises ValueError if a matrix has none, or one of another size. source: where the importance comes from.
    """
    remedy = "Make it with llama-imatrix from this model, or use --calibrate."
    if missing := [name for name in shapes if name not in importance]:
        raise ValueError(
            f"{source} lacks {len(missing)} of the {len(shapes)} matrices to quantize, such as {missing[0]}. {remedy}"
        )
    checked = Importance()
    for name, shape in shapes.items():
        expected = shape[-1] * (shape[0] if len(shape) == 3 else 1)
        if importance[name].numel() != expected:
            found = f"{importance[name].numel():,} numbers for {name}; expected {expected:,}"
            raise ValueError(f"{source} has {found}, as it is of another model. {remedy}")
        checked[name] = importance[name].view(*shape[:-2], -1)
    return checked


class Calibration(NamedTuple):
    """The forward passes of a model over the rows of `--calibrate`."""

    batches: EvalBatches
    loss: float
    """Mean cross-entropy."""
    importance: Importance


def calibrate(model: Decoder, family: GGUFFamily, tokenizer: Tokenizer, data: str) -> Calibration:
    """Run the rows of `data` through the model. Raises ValueError if they cannot be read."""
    try:
        rows, _ = sft_batches(SFTDataConfig.model_validate(_DATA | {"source": data}), tokenizer, batch_size=1, seed=0)
    except ValueError as error:
        raise ValueError(f"--calibrate, which takes no data settings: {error}") from None
    batches = EvalBatches(rows.layout, rows.report)
    sums, counts = dict[str, Tensor](), dict[str, Tensor]()
    is_token = torch.ones(0, dtype=torch.bool)

    def watched() -> Iterator[Batch]:
        nonlocal is_token
        for batch in batches:
            is_token = torch.ones_like(batch.input_ids) if batch.is_token is None else batch.is_token
            is_token = is_token.flatten().bool()
            yield batch

    def add(parameter: str, inputs: Tensor, number: int = 0, of: int = 1) -> None:
        """Add the inputs (N, C) of matrix `number` of a stack."""
        if parameter not in sums:
            sums[parameter] = torch.zeros(of, inputs.shape[-1], dtype=torch.float64)
            counts[parameter] = torch.zeros(of, 1, dtype=torch.float64)
        sums[parameter][number] += inputs.float().square().sum(0)
        counts[parameter][number] += len(inputs)

    def watch_linear(name: str, module: nn.Module, inputs: tuple[Tensor]) -> None:
        add(f"{name}.weight", inputs[0].flatten(0, -2)[is_token])

    def watch_experts(name: str, module: Experts, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
        tokens, weights, chosen = inputs
        for expert in range(module.config.num_experts):
            of_expert = (chosen == expert) & is_token[:, None]
            rows = tokens[of_expert.any(-1)]
            if module.config.scales_input:
                rows = rows * weights[of_expert][:, None]
            add(f"{name}.gate_up_proj", rows, expert, module.config.num_experts)
            add(f"{name}.down_proj", module.inner(rows, expert), expert, module.config.num_experts)

    hooks = list[RemovableHandle]()
    for name, module in model.named_modules():
        watch = watch_experts if isinstance(module, Experts) else watch_linear if type(module) is nn.Linear else None
        if ".layers." in name and watch is not None:
            hooks.append(module.register_forward_pre_hook(partial(watch, name)))
    try:
        loss = mean_loss(model, watched())
    finally:
        for hook in hooks:
            hook.remove()
    means = {name: _mean(sums[name], counts[name]) for name in sums}
    importance = {}
    for owner, mean in means.items():
        steps, names = layout_of(owner, model, family)
        mean = store(mean[None], by_side(steps)[1])[0][0]
        of_file = dict(zip(names, store(model.get_parameter(owner).detach().to("meta"), steps), strict=True))
        for name, tensor in of_file.items():
            is_of_columns = tensor.shape[-1] == mean.shape[-1]
            # llama.cpp multiplies keys of latents with queries, whose importance is not known.
            own = mean if is_of_columns else torch.ones(tensor.shape[-1])
            importance[name] = own.expand(len(tensor), -1) if tensor.ndim == 3 else own
    return Calibration(batches, loss, importance)


def _mean(sums: Tensor, counts: Tensor) -> Tensor:
    """The importance (C,) or (E, C). All features of an expert that saw no token count the same."""
    return torch.where(counts > 0, sums / counts, 1.0).float().squeeze(0)


@serial_operations()
def compare(file: Path, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, float]:
    """Return the relative error of the quantized matrices of each kind, and of `all`: |stored - tensor| / |tensor|.

    tensors: the file's tensors before quantization.
    """
    _, header = read_header(file)
    sums = defaultdict[str, Tensor](lambda: torch.zeros(2, dtype=torch.float64))
    for name, tensor in tensors:
        stored = header[name]
        if stored.kind in ("F32", "F16", "BF16"):
            continue
        of_file, rows = GGUFTensor(file, *stored), tensor.flatten(0, -2)
        for strip in _strips(rows):
            expected = rows[strip].float()
            values = torch.empty_like(expected)
            of_file.read_part(Part(values, stored.shape, strip.start * rows.shape[1]))
            norms = [torch.linalg.vector_norm(x, dtype=torch.float64) for x in (values - expected, expected)]
            sums[stored.kind.lower()] += torch.stack(norms).square()
    if len(sums) > 1:
        sums = {"all": torch.stack([*sums.values()]).sum(0), **sums}
    return {kind: float((error / size).sqrt()) for kind, (error, size) in sums.items()}


@torch.no_grad()
def read_back(file: Path, model: Decoder, family: GGUFFamily) -> None:
    """Replace a model's parameters by those of its file."""
    stored = stored_parameters(Facts(file, family.architecture, *read_header(file)), model, family)
    for place, part in parts_on_disk(model).items():
        stored[place].read_part(part)


def _strips(rows: Tensor) -> Iterator[slice]:
    """Slices of a few MiB of rows (R, C)."""
    step = max(1, _STRIP // rows.shape[1])
    return (slice(first, first + step) for first in range(0, len(rows), step))
