"""How llama.cpp arranges parameters that it does not store as Hugging Face folders do, as steps in both directions.

A step is a name of `STEPS` and its numbers, so a layout can be written to a file. Export runs the steps in order; import
runs their inverses in reverse order.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lean_ft.gguf.rows import Step

Stored = Tensor | Sequence[Tensor]  # several tensors after a step that splits


class _Directions(NamedTuple):
    store: Callable[..., Stored]
    load: Callable[..., Tensor]
    is_exact: bool = True
    """Whether a 16-bit number stays one."""


def _by_rows(change: Callable[[Tensor, float], Tensor]) -> Callable[..., Tensor]:
    """Change stretches of rows: numbers are the size and the factor of each."""

    def changed(x: Tensor, *numbers: float) -> Tensor:
        sizes, factors = numbers[::2], numbers[1::2]
        parts = x.float().split(list(map(int, sizes)))
        return torch.cat([change(part, factor) for part, factor in zip(parts, factors, strict=True)])

    return changed


def _pair(x: Tensor, num_heads: int, size: int) -> Tensor:
    """Make rows i and i + size / 2 of each head neighbors."""
    heads = x.unflatten(0, (num_heads, -1))
    turned = heads[:, :size].unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    return torch.cat((turned, heads[:, size:]), 1).flatten(0, 1)


def _unpair(x: Tensor, num_heads: int, size: int) -> Tensor:
    heads = x.unflatten(0, (num_heads, -1))
    turned = heads[:, :size].unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
    return torch.cat((turned, heads[:, size:]), 1).flatten(0, 1)


def _tile(x: Tensor, dim: int, first: int, outer: int, inner: int) -> Tensor:
    """Reorder the features from `first` on: (outer, inner, ...) becomes (inner, outer, ...)."""
    kept, moved = x.split((first, x.shape[dim] - first), dim)
    heads = moved.unflatten(dim, (outer, inner, -1))
    return torch.cat((kept, heads.transpose(dim, dim + 1).flatten(dim, dim + 2)), dim)


def _ungroup(x: Tensor, num_groups: int, *sizes: int) -> Tensor:
    """Turn the parts of each group into all groups' first parts, all second parts, ..."""
    parts = x.unflatten(0, (num_groups, -1)).split(sizes, 1)
    return torch.cat([part.flatten(0, 1) for part in parts])


def _group(x: Tensor, num_groups: int, *sizes: int) -> Tensor:
    parts = x.split([num_groups * size for size in sizes])
    return torch.cat([part.unflatten(0, (num_groups, -1)) for part in parts], 1).flatten(0, 1)


def _keys_and_values(x: Tensor, num_heads: int, key_dim: int, value_dim: int) -> list[Tensor]:
    """Split the projection of latents by head. Keys are transposed: llama.cpp multiplies queries with them."""
    keys, values = x.unflatten(0, (num_heads, -1)).split((key_dim, value_dim), 1)
    return [keys.mT, values]


STEPS = {
    "add": _Directions(lambda x, number: x.float() + number, lambda x, number: x - number, is_exact=False),
    "multiply": _Directions(lambda x, factor: x.float() * factor, lambda x, factor: x / factor, is_exact=False),
    "multiply_rows": _Directions(_by_rows(torch.mul), _by_rows(torch.div), is_exact=False),
    "twice": _Directions(  # with two factors
        lambda x, *factors: [x.float() * factor for factor in factors], lambda parts, a, b: parts[0] / a, is_exact=False
    ),
    "decay": _Directions(lambda x: -x.float().exp(), lambda x: (-x).log(), is_exact=False),
    "reshape": _Directions(lambda x, *shape: x.reshape(shape), lambda x, *shape: x),  # the caller knows the shape
    "transpose": _Directions(lambda x: x.mT, lambda x: x.mT),
    "pair": _Directions(_pair, _unpair),
    "tile": _Directions(_tile, lambda x, dim, first, outer, inner: _tile(x, dim, first, inner, outer)),
    "ungroup": _Directions(_ungroup, _group),
    "split": _Directions(
        lambda x, dim, *sizes: x.split(sizes, dim), lambda parts, dim, *_: torch.cat(list(parts), dim)
    ),
    "unzip": _Directions(
        lambda x, dim: x.unflatten(dim, (-1, 2)).unbind(dim + 1),
        lambda parts, dim: torch.stack(list(parts), dim + 1).flatten(dim, dim + 1),
    ),
    "keys_and_values": _Directions(
        _keys_and_values, lambda parts, *_: torch.cat((parts[0].mT, parts[1]), 1).flatten(0, 1)
    ),
}


def store(x: Tensor, steps: Sequence[Step]) -> list[Tensor]:
    """Return the tensors of a file for a parameter."""
    stored: Stored = x
    for name, *numbers in steps:
        stored = STEPS[name].store(stored, *numbers)
    return [stored] if isinstance(stored, Tensor) else list(stored)


def load(stored: Sequence[Tensor], steps: Sequence[Step], shape: tuple[int, ...]) -> Tensor:
    """Return the parameter, of `shape`, for the tensors of a file. Raises ValueError if their shapes do not fit."""
    parameter: Stored = stored if len(stored) > 1 else stored[0]
    try:
        for name, *numbers in reversed(steps):
            parameter = STEPS[name].load(parameter, *numbers)
        assert isinstance(parameter, Tensor)
        return parameter.reshape(shape)
    except RuntimeError:
        found = ", ".join(str(list(one.shape)) for one in stored)
        raise ValueError(f"tensors of the shapes {found} do not fit a parameter of {list(shape)}") from None


def by_side(steps: Sequence[Step]) -> tuple[list[Step], list[Step]]:
    """The steps that change a matrix's rows, and those that reorder its columns."""
    of_columns = [step for step in steps if step[:2] == ("tile", 1)]
    return [step for step in steps if step not in of_columns], of_columns


def is_exact(steps: Sequence[Step]) -> bool:
    """Whether a parameter in 16 bits is one in the file too."""
    return all(STEPS[name].is_exact for name, *_ in steps)
