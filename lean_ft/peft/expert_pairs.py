"""Adapters with a pair of matrices per expert, read as adapters of a mixture's stacked projections.

PEFT saved them with transformers 4, in which each expert's matrix was a module, and Unsloth has lists of modules
(`experts.gate_up_projs.0`). The rank of a stack's adapter is the sum of the ranks of its parts, such as gate and up,
whose pairs
do not mix: A has them side by side, and B in blocks. Zeros fill B beside these blocks, lower ranks, and experts without
a pair, so the product per expert is that of its own pairs.

Shapes: E experts, R rank of the stack's adapter, I inputs, O outputs of the projection.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from lean_ft.models import Decoder
from lean_ft.models.frozen_weight import as_frozen
from lean_ft.models.moe import Experts, experts_of
from lean_ft.models.safetensors_file import StoredTensor
from lean_ft.peft.experts import PROJECTIONS
from lean_ft.peft.layers import AdapterShape, linear_shape
from lean_ft.peft.stored_adapter import OF_LINEAR, StoredAdapter, read_tensor


@dataclass(frozen=True)
class Pair:
    """The pair of one expert's matrix, and where its rows and its ranks begin in the stack's adapter."""

    a: StoredTensor
    b: StoredTensor
    expert: int
    first_output: int
    first_rank: int
    factor: float  # of B, if the stack has another scaling


@dataclass(frozen=True)
class StackedFactor:
    """The A or the B of a stack's adapter, from those of all pairs: (E * R, features), or (features, R * E) with
    `experts_last`."""

    pairs: tuple[Pair, ...]
    num_experts: int
    rank: int
    num_features: int
    of_b: bool
    experts_last: bool

    dtype, dtype_name = torch.float32, "F32"

    @property
    def file(self) -> Path:
        return self.pairs[0].a.file

    @property
    def shape(self) -> tuple[int, ...]:
        shape = (self.num_experts * self.rank, self.num_features)
        return shape[::-1] if self.experts_last else shape

    def read(self) -> Tensor:
        """The matrix on the CPU."""
        whole = torch.zeros(self.num_experts, self.rank, self.num_features)
        for pair in self.pairs:
            rows = read_tensor(pair.b).float().T * pair.factor if self.of_b else read_tensor(pair.a)
            first = pair.first_output if self.of_b else 0
            whole[pair.expert, pair.first_rank :][: len(rows), first : first + rows.shape[1]] = rows
        return whole.permute(2, 1, 0).flatten(1) if self.experts_last else whole.flatten(0, 1)


def stack_pairs(model: Decoder, adapter: StoredAdapter) -> StoredAdapter:
    """The adapter with the pairs per expert as adapters of the model's stacks, under their names in the model.

    Raises ValueError if the pairs do not fit the model, or belong to a DoRA adapter.
    """
    tensors, shapes = dict(adapter.tensors), dict(adapter.shapes)
    for place, experts in experts_of(model).items():
        stacked = model.source.module_name(place, in_whole=False)
        for projection in PROJECTIONS:
            stack = f"{place}.{projection}"
            for parts in _names_by_expert(model, stack):
                names = {
                    (part, expert): name
                    for part, pattern in enumerate(parts)
                    for expert in range(experts.config.num_experts)
                    if (name := pattern.replace("*", str(expert))) in adapter.shapes
                }
                if not names:
                    continue
                if taken := [name for name in (stack, stacked, f"{stacked}.base_layer") if name in shapes]:
                    both = f"both {taken[0]} and {next(iter(names.values()))}"
                    raise ValueError(f"{adapter.folder} adapts {both}, which are the same experts. Remove one of them.")
                shapes[stack], of_stack = _stack(adapter, experts, stack, names, len(parts))
                for name in names.values():
                    del shapes[name], tensors[name + OF_LINEAR[0]], tensors[name + OF_LINEAR[1]]
                tensors |= {stack + ending: factor for ending, factor in zip(OF_LINEAR, of_stack, strict=True)}
                break
    return replace(adapter, tensors=tensors, shapes=shapes)


def names_by_expert(model: Decoder) -> list[str]:
    """Return the ends of the names that an expert's layers may have in an adapter of the model. `*` is the expert."""
    place = next(iter(experts_of(model)), None)
    if place is None:
        return []
    all_parts = (parts for projection in PROJECTIONS for parts in _names_by_expert(model, f"{place}.{projection}"))
    return [name[name.find("experts.") :] for parts in all_parts for name in parts]


def _names_by_expert(model: Decoder, stack: str) -> list[Sequence[str]]:
    """The names of a stack's parts in transformers 4, whose modules have the names of the folder's tensors, and in
    Unsloth."""
    place, _, projection = stack.rpartition(".")
    of_folder = [name.removesuffix(".weight") for name in model.source.places(stack)]
    of_unsloth = [f"{model.source.module_name(place, in_whole=False)}.{projection}s.*"]
    return [parts for parts in (of_folder, of_unsloth) if all("*" in part for part in parts)]


def _stack(
    adapter: StoredAdapter, experts: Experts, stack: str, names: Mapping[tuple[int, int], str], num_parts: int
) -> tuple[AdapterShape, tuple[StackedFactor, StackedFactor]]:
    """The shape of a stack's adapter, and its A and B. `names`: the adapted layers by their part of the stack and
    expert."""
    projection = stack.rpartition(".")[2]
    num_experts, outputs, inputs = linear_shape(as_frozen(getattr(experts, projection)), experts.formula.input_first)
    for name in names.values():
        _check_pair(adapter, name, inputs, outputs // num_parts)
    widths = [
        max((adapter.shapes[name].rank for (part, _), name in names.items() if part == number), default=0)
        for number in range(num_parts)
    ]
    if (rank := sum(widths)) > inputs + outputs:  # one expert's large rank would take the memory of all experts
        raise ValueError(
            f"{adapter.folder} has a rank of {max(widths)} for an expert of {stack}; expected at most "
            f"{inputs + outputs}."
        )
    first = adapter.shapes[next(iter(names.values()))]
    alpha = first.scaling * (math.sqrt(rank) if first.rslora else rank)
    pairs = tuple(
        Pair(
            *(adapter.tensors[name + ending] for ending in OF_LINEAR),  # pyright: ignore[reportArgumentType]
            expert=expert,
            first_output=part * (outputs // num_parts),
            first_rank=sum(widths[:part]),
            factor=adapter.shapes[name].scaling / first.scaling,
        )
        for (part, expert), name in names.items()
    )
    factors = [(inputs, False), (outputs, True)]
    if experts.formula.input_first != experts.input_first_in_adapters:  # PEFT takes the outputs for the inputs
        factors.reverse()
    a, b = (
        StackedFactor(pairs, num_experts, rank, num_features, of_b, experts_last)
        for (num_features, of_b), experts_last in zip(factors, (False, True), strict=True)
    )
    return replace(first, rank=rank, alpha=alpha), (a, b)


def _check_pair(adapter: StoredAdapter, name: str, num_inputs: int, num_outputs: int) -> None:
    """Raise ValueError unless the adapter of one expert's layer is a plain pair of the right sizes."""
    shape = adapter.shapes[name]
    if shape.dora:
        raise ValueError(
            f"{adapter.folder} is a DoRA adapter with magnitudes of single experts, such as of {name}, which are not "
            "read. Merge it with PEFT, and use the merged model."
        )
    expected = [(shape.rank, num_inputs), (num_outputs, shape.rank)]
    for ending, sizes in zip(OF_LINEAR, expected, strict=True):
        stored = adapter.tensors.get(name + ending)
        if stored is None:
            raise ValueError(f"{adapter.folder} lacks {name}{ending}.")
        if stored.shape != sizes:
            raise ValueError(
                f"{stored.file}: {name}{ending} has shape {list(stored.shape)}; the model needs {list(sizes)}."
            )
