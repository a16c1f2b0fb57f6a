"""The formulas that merge one tensor of several models. They compute in float32, from blocks of the models' values.

No formula holds a whole tensor: what it needs of the whole, such as a norm or the k-th largest magnitude, it finds by
reading the tensor first. `linear` gives mergekit's bits; the others give mergekit's numbers, up to rounding.

Sources: Wortsman et al. 2022, https://arxiv.org/abs/2203.05482 (linear); Yadav et al. 2023,
https://arxiv.org/abs/2306.01708 (TIES); Yu et al. 2023, https://arxiv.org/abs/2311.03099 (DARE); Shoemake 1985 (SLERP);
mergekit, https://github.com/arcee-ai/mergekit, for normalization and rescaling.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from lean_ft.merging.settings import MergeSettings
from lean_ft.system.spelling import did_you_mean

Rescaling = Literal["l1", "density", "none"]
Read = Callable[[int, int], Tensor]
"""The values of a tensor as a flat float32 copy, by the index of the first and their number."""

BLOCK = 2**20  # numbers that are read at a time; a random mask is drawn per block
_PARALLEL = 0.9995  # cosine from which SLERP is linear
_SMALL_NORM, _SMALL_SUM, _SMALL_WEIGHTS = 1e-8, 1e-7, 1e-8


@dataclass(frozen=True)
class MergeMethod:
    """A row of `METHODS`."""

    title: str
    source: str
    options: tuple[str, ...]  # fields of `MergeSettings` that it reads
    has_task_vectors: bool = False  # it merges the differences from a base model
    elects_signs: bool = False  # a number of a task vector counts only if its sign is that of the sum
    normalize: bool = True  # the default
    at_random: bool = False  # drops numbers of task vectors at random, instead of the smallest


METHODS = {
    "linear": MergeMethod("weighted average", "https://arxiv.org/abs/2203.05482", ("weights", "normalize")),
    "ties": MergeMethod(
        "TIES",
        "https://arxiv.org/abs/2306.01708",
        ("weights", "normalize", "density"),
        has_task_vectors=True,
        elects_signs=True,
    ),
    "dare": MergeMethod(
        "DARE",
        "https://arxiv.org/abs/2311.03099",
        ("weights", "normalize", "density", "seed", "rescale"),
        has_task_vectors=True,
        normalize=False,
        at_random=True,
    ),
    "dare_ties": MergeMethod(
        "DARE with TIES",
        "https://arxiv.org/abs/2311.03099",
        ("weights", "normalize", "density", "seed", "rescale"),
        has_task_vectors=True,
        elects_signs=True,
        normalize=False,
        at_random=True,
    ),
    "slerp": MergeMethod("SLERP", "https://en.wikipedia.org/wiki/Slerp", ("t",)),
}
# Names in mergekit and PEFT, and what they are called here.
_ELSEWHERE = {
    "dare_linear": "--method dare",
    "task_arithmetic": "--method dare --density 1",
    "magnitude_prune": "--method ties",
    "cat": "--method linear, which concatenates the ranks of adapters",
    "svd": "--method linear --rank R",
    "average": "--method linear",
}


@dataclass(frozen=True)
class Formula:
    """A method with all its numbers."""

    name: str
    weights: tuple[float, ...]  # of each model
    normalize: bool  # divide by the sum of the weights
    density: float  # share of each task vector that is kept
    rescale: Rescaling  # after dropping at random: to the same sum of magnitudes, by 1 / density, or not
    seed: int  # of the random masks
    t: float  # from the first model (0) to the second (1)

    @property
    def method(self) -> MergeMethod:
        return METHODS[self.name]

    def facts(self) -> dict[str, float | int | bool | str]:
        """The numbers that the method reads, without the weights."""
        names = [name for name in self.method.options if name != "weights"]
        return {name: getattr(self, name) for name in names}


def formula_of(options: MergeSettings, num_models: int) -> Formula:
    """Check the options for this number of models. Raises ValueError with the option's name."""
    name = options.method
    if name not in METHODS:
        here = _ELSEWHERE.get(name)
        hint = f" Use {here}." if here else did_you_mean(name, list(METHODS))
        raise ValueError(f"--method {name}: no such method.{hint} Expected one of {', '.join(METHODS)}.")
    method = METHODS[name]
    for option in ("weights", "normalize", "density", "rescale", "seed", "t"):
        if getattr(options, option) is not None and option not in method.options:
            users = ", ".join(name for name, other in METHODS.items() if option in other.options)
            raise ValueError(f"--{option} is only used with --method {users}; the method is {name}. Remove it.")
    if name == "slerp" and num_models != 2:
        raise ValueError(f"--method slerp merges exactly 2 models; found {num_models}. Merge in steps, or use linear.")
    normalize = method.normalize if options.normalize is None else options.normalize
    density = 1.0 if options.density is None else options.density
    if not 0 < density <= 1:
        raise ValueError(f"--density is {density:g}; expected a number above 0 and at most 1, the share that is kept.")
    if method.has_task_vectors and options.density is None:
        example = "0.5" if method.at_random else "0.2"
        raise ValueError(
            f"--method {name} needs --density, the share of each task vector that is kept: --density {example}. "
            "--density 1 keeps all."
        )
    rescale = "l1" if options.rescale is None else options.rescale
    if rescale not in get_args(Rescaling):
        raise ValueError(f"--rescale is {rescale!r}; expected one of {', '.join(get_args(Rescaling))}.")
    t, seed = 0.5 if options.t is None else options.t, options.seed or 0
    if not 0 <= t <= 1:
        raise ValueError(f"--t is {t:g}; expected a number from 0, the first model, to 1, the second.")
    if not 0 <= seed < 2**63:
        raise ValueError(f"--seed is {seed}; expected a number from 0 to 2^63 - 1.")
    weights = _weights(options.weights, num_models, normalize)
    return Formula(name, weights, normalize, density, rescale, seed, t)  # pyright: ignore[reportArgumentType]


def _weights(given: Sequence[float] | None, num_models: int, normalize: bool) -> tuple[float, ...]:
    weights = tuple(given or [1.0] * num_models)
    shown = " ".join(f"{weight:g}" for weight in weights)
    if len(weights) != num_models:
        raise ValueError(f"--weights is {shown}: {len(weights)} for {num_models} models. Give a number per model.")
    if not all(math.isfinite(weight) and abs(weight) < torch.finfo(torch.float32).max for weight in weights):
        raise ValueError(f"--weights is {shown}; expected finite numbers.")
    if not any(weights):
        raise ValueError(f"--weights is {shown}: no model counts. Give a weight other than 0.")
    if normalize and abs(math.fsum(weights)) < _SMALL_WEIGHTS:
        raise ValueError(
            f"--weights is {shown}: the sum is 0, and the result is divided by it. Change a weight, or add "
            "--no-normalize."
        )
    return weights


def merged_values(
    formula: Formula, name: str, inputs: Sequence[Read], base: Read | None, numel: int, keys: Sequence[str]
) -> Read:
    """The merged values of one tensor, with `numel` numbers in each model.

    `base`: the base model's values, for a method with task vectors; None if the inputs are differences already. `name`
    and the models' `keys` choose the random masks.
    """
    if formula.name == "slerp":
        one, other = inputs
        return _slerp(formula.t, one, other, numel)
    if not formula.method.has_task_vectors:
        return partial(_linear, formula, inputs)
    vectors = [read if base is None else partial(_difference, read, base) for read in inputs]
    if formula.density < 1 and formula.method.at_random:
        vectors = [
            dropped_at_random(vector, numel, formula, f"{name}\n{key}")
            for vector, key in zip(vectors, keys, strict=True)
        ]
    elif formula.density < 1:
        vectors = [largest_kept(vector, numel, formula.density) for vector in vectors]
    return partial(_task_vectors, formula, vectors, base)


def _linear(formula: Formula, inputs: Sequence[Read], first: int, number: int) -> Tensor:
    weights = torch.tensor(formula.weights, dtype=torch.float32)
    total = torch.zeros(number)
    for read, weight in zip(inputs, weights, strict=True):
        total.addcmul_(read(first, number), weight)  # not add_(alpha=): it rounds once where mergekit rounds twice
    return total.div_(weights.sum()) if formula.normalize else total


def _difference(read: Read, base: Read, first: int, number: int) -> Tensor:
    return read(first, number).sub_(base(first, number))


def _task_vectors(formula: Formula, vectors: Sequence[Read], base: Read | None, first: int, number: int) -> Tensor:
    """The base plus the weighted sum of task vectors; with signs elected, of the numbers that agree with its sign."""
    weights = torch.tensor(formula.weights, dtype=torch.float32)
    weighted = [read(first, number).mul_(weight) for read, weight in zip(vectors, weights, strict=True)]
    total = _sum(weighted)
    if formula.method.elects_signs:
        sign = torch.where(total >= 0, 1.0, -1.0)
        agree = [vector * sign > 0 for vector in weighted]
        total = _sum([vector.mul_(same) for vector, same in zip(weighted, agree, strict=True)])
        if formula.normalize:
            shares = _sum([same * weight for same, weight in zip(agree, weights, strict=True)])
            total.div_(shares.masked_fill_(shares == 0, 1.0))
    elif formula.normalize:
        total.div_(weights.sum())
    return total if base is None else base(first, number).add_(total)


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


def blocks(numel: int) -> Iterator[tuple[int, int]]:
    """Yield the first index and the length of each block of a tensor with `numel` numbers."""
    for first in range(0, numel, BLOCK):
        yield first, min(BLOCK, numel - first)


def largest_kept(read: Read, numel: int, density: float) -> Read:
    """The values with all but the `density` of largest magnitude set to 0. At least one is kept. Of equal magnitudes,
    the first are kept."""
    if not numel:
        return read
    threshold, last = _threshold(read, numel, max(1, int(density * numel)))

    def kept(first: int, number: int) -> Tensor:
        values = read(first, number)
        bits = _bits(values)
        num_before = max(0, last + 1 - first)  # numbers of which the threshold itself is kept
        stays = torch.cat([bits[:num_before] >= threshold, bits[num_before:] > threshold])
        return values.mul_(stays)

    return kept


def _threshold(read: Read, numel: int, num_kept: int) -> tuple[int, int]:
    """The `num_kept`-th largest magnitude, as the bits of a float32, and the index of the last number of this magnitude
    that is kept. Counts the upper 16 bits, then the lower ones."""
    upper = torch.zeros(2**15, dtype=torch.int64)
    for first, number in blocks(numel):
        upper += torch.bincount(_bits(read(first, number)) >> 16, minlength=2**15)
    high, above = _place(upper, num_kept)
    lower = torch.zeros(2**16, dtype=torch.int64)
    for first, number in blocks(numel):
        bits = _bits(read(first, number))
        lower += torch.bincount(bits[bits >> 16 == high] & 0xFFFF, minlength=2**16)
    low, above_low = _place(lower, num_kept - above)
    threshold, remaining = high << 16 | low, num_kept - above - above_low
    if remaining == lower[low]:
        return threshold, numel
    for first, number in blocks(numel):
        places = (_bits(read(first, number)) == threshold).nonzero()
        if remaining <= len(places):
            return threshold, first + int(places[remaining - 1])
        remaining -= len(places)
    raise AssertionError


def _place(counts: Tensor, num_kept: int) -> tuple[int, int]:
    """The highest bin that, with those above, has `num_kept` numbers, and how many are above it."""
    downwards = counts.flip(0).cumsum(0)
    place = int(torch.searchsorted(downwards, num_kept))
    return len(counts) - 1 - place, int(downwards[place] - counts[len(counts) - 1 - place])


def _bits(values: Tensor) -> Tensor:
    """The magnitudes as int32, which have the order of the float32 numbers."""
    return values.abs().view(torch.int32)


def dropped_at_random(read: Read, numel: int, formula: Formula, name: str) -> Read:
    """The values, each set to 0 unless its mask keeps it, and rescaled. `name`: chooses the mask, with the seed."""

    def masked(first: int, number: int) -> Tensor:
        return read(first, number).mul_(random_mask(formula.density, formula.seed, name, first, number))

    scale = 1 / formula.density if formula.rescale == "density" else 1.0
    if formula.rescale == "l1":
        before = math.fsum(_magnitude(read, numel))
        after = math.fsum(_magnitude(masked, numel))
        scale = before / after if min(before, after) >= _SMALL_SUM else 1.0
    return (lambda first, number: masked(first, number).mul_(scale)) if scale != 1.0 else masked


def _magnitude(read: Read, numel: int) -> Iterator[float]:
    return (read(first, number).abs_().sum(dtype=torch.float64).item() for first, number in blocks(numel))


def random_mask(density: float, seed: int, name: str, first: int, number: int) -> Tensor:
    """Which numbers of a tensor are kept, as bool (number,). It depends on the seed, the name and the place in the
    tensor alone."""
    kept, last = [], first + number
    for block in range(first // BLOCK, -(-last // BLOCK)):
        digest = hashlib.sha256(f"{seed}\n{name}\n{block}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)
        begin = block * BLOCK
        drawn = torch.rand(min(BLOCK, last - begin), generator=generator)
        kept.append(drawn[max(0, first - begin) :] < density)
    return torch.cat(kept) if kept else torch.empty(0, dtype=torch.bool)


def _slerp(t: float, one: Read, other: Read, numel: int) -> Read:
    """Along the great circle from one tensor to the other, all numbers as one vector."""
    products = torch.zeros(3, dtype=torch.float64)
    for first, number in blocks(numel):
        x, y = one(first, number).double(), other(first, number).double()
        products += torch.stack([x @ x, x @ y, y @ y])
    coefficients = slerp_coefficients(t, *products.tolist())

    def turned(first: int, number: int) -> Tensor:
        x, y = one(first, number), other(first, number)
        return x.mul_(coefficients[0]).add_(y.mul_(coefficients[1]))

    return turned


def slerp_coefficients(t: float, square: float, product: float, other_square: float) -> tuple[float, float]:
    """The factors of two vectors x and y in their spherical interpolation, from x x, x y and y y. Vectors that are
    almost parallel or opposite are interpolated linearly."""
    norms = [root if root > _SMALL_NORM else 1.0 for root in (math.sqrt(square), math.sqrt(other_square))]
    cosine = max(-1.0, min(1.0, product / (norms[0] * norms[1])))
    if abs(cosine) > _PARALLEL:
        return 1 - t, t
    angle = math.acos(cosine)
    return math.sin((1 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle)
