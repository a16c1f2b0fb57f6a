"""The formulas equal those of the papers and of mergekit on whole tensors, however the tensors are cut into blocks."""

from itertools import product

import pytest
import torch
from torch import Tensor

from lean_ft.merging import MergeSettings, methods
from lean_ft.merging.methods import formula_of, largest_kept, merged_values, random_mask

SHAPE, NUMEL = (37, 53), 37 * 53
KEYS = ["one", "other", "third"]


def reader(tensor: Tensor) -> methods.Read:
    flat = tensor.float().reshape(-1)
    return lambda first, number: flat[first : first + number].clone()


def merged(tensors: list[Tensor], base: Tensor | None = None, *, piece: int = 700, **options) -> Tensor:
    """The merged tensor, read some numbers at a time."""
    formula = formula_of(MergeSettings(**options), len(tensors))
    values = merged_values(
        formula, "name", [*map(reader, tensors)], base if base is None else reader(base), NUMEL, KEYS
    )
    pieces = [values(first, min(piece, NUMEL - first)) for first in range(0, NUMEL, piece)]
    return torch.cat(pieces).view(SHAPE)


@pytest.fixture
def tensors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(SHAPE, generator=generator) for _ in range(3)]


@pytest.fixture
def base() -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(methods, "BLOCK", 256)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("normalize", [True, False])
def test_linear_has_the_bits_of_mergekit(tensors, dtype, normalize):
    """mergekit adds product after product in float32, each rounded, and divides by the float32 sum of the weights."""
    weights = (0.7, 0.4, -0.2)
    tensors = [tensor.to(dtype) for tensor in tensors]
    expected = torch.zeros(1, *SHAPE)
    coefficients = torch.tensor([weights])
    for tensor, coefficient in zip(tensors, coefficients.unbind(1), strict=True):
        expected.addcmul_(tensor[None], coefficient.reshape(1, 1, 1))
    if normalize:
        expected.div_(coefficients.sum(dim=1).reshape(1, 1, 1))
    assert torch.equal(merged(tensors, weights=weights, normalize=normalize), expected[0])
    exact = sum(weight * tensor.double() for weight, tensor in zip(weights, tensors, strict=True))
    exact = exact / sum(weights) if normalize else exact
    torch.testing.assert_close(expected[0].double(), exact, rtol=1e-6, atol=1e-6)


def ties(vectors: list[Tensor], weights: tuple[float, ...], normalize: bool) -> Tensor:
    """TIES after trimming: elect signs by the weighted sum, average the numbers of this sign."""
    weighted = [weight * vector for weight, vector in zip(weights, vectors, strict=True)]
    sign = torch.where(sum(weighted) >= 0, 1.0, -1.0)
    total, share = torch.zeros(SHAPE), torch.zeros(SHAPE)
    for i, j in product(range(SHAPE[0]), range(SHAPE[1])):
        agreeing = [k for k, vector in enumerate(weighted) if vector[i, j].sign() == sign[i, j]]
        total[i, j] = sum(weighted[k][i, j] for k in agreeing)
        share[i, j] = sum(weights[k] for k in agreeing) or 1.0
    return total / share if normalize else total


def trimmed(vector: Tensor, density: float) -> Tensor:
    number = max(1, int(density * vector.numel()))
    kept = vector.abs().flatten().sort(descending=True, stable=True).indices[:number]
    return torch.zeros(NUMEL).index_copy(0, kept, vector.flatten()[kept]).view(SHAPE)


@pytest.mark.first(2)
@pytest.mark.parametrize(("density", "normalize"), [(0.2, True), (0.5, False), (1.0, True), (1e-9, True)])
def test_ties_is_the_papers(tensors, base, density, normalize):
    weights = (0.7, 0.4, 1.0)
    vectors = [trimmed(tensor - base, density) for tensor in tensors]
    found = merged(tensors, base, method="ties", weights=weights, density=density, normalize=normalize)
    torch.testing.assert_close(found, base + ties(vectors, weights, normalize), rtol=0, atol=1e-6)


def test_of_equal_magnitudes_the_first_are_kept():
    vector = torch.tensor([1.0, -2.0, 0.0, 2.0, 2.0, -1.0, 3.0, -2.0]).repeat(100)
    for density in (0.05, 0.125, 0.2, 0.51, 0.75, 0.9):
        kept = largest_kept(reader(vector), len(vector), density)
        number = int(density * len(vector))
        places = vector.abs().sort(descending=True, stable=True).indices[:number]
        expected = torch.zeros(len(vector)).index_copy(0, places, vector[places])
        assert torch.equal(torch.cat([kept(first, 100) for first in range(0, 800, 100)]), expected)


@pytest.mark.first(4)
@pytest.mark.parametrize("rescale", ["l1", "density", "none"])
@pytest.mark.parametrize("method", ["dare", "dare_ties"])
@pytest.mark.parametrize("normalize", [False, True])
def test_dare_is_the_formula_with_the_same_mask(tensors, base, method, rescale, normalize):
    weights, density = (0.7, 0.4, 1.0), 0.3
    vectors = []
    for tensor, key in zip(tensors, KEYS, strict=True):
        vector = tensor - base
        mask = random_mask(density, 5, f"name\n{key}", 0, NUMEL).view(SHAPE)
        scale = {"l1": vector.abs().sum() / (vector * mask).abs().sum(), "density": 1 / density, "none": 1.0}[rescale]
        vectors.append(vector * mask * scale)
    if method == "dare":
        expected = sum(weight * vector for weight, vector in zip(weights, vectors, strict=True))
        expected = expected / sum(weights) if normalize else expected
    else:
        expected = ties(vectors, weights, normalize)
    options = {"density": density, "seed": 5, "rescale": rescale, "normalize": normalize}
    found = merged(tensors, base, method=method, weights=weights, **options)
    torch.testing.assert_close(found, base + expected, rtol=1e-6, atol=2e-6)


def test_a_mask_depends_on_name_seed_and_place_alone(monkeypatch):
    mask = random_mask(0.3, 7, "a.weight\nkey", 0, 10_000)
    assert abs(mask.float().mean().item() - 0.3) < 0.02
    for first, number in ((0, 3), (250, 10), (256, 256), (999, 4001), (5000, 0)):
        assert torch.equal(random_mask(0.3, 7, "a.weight\nkey", first, number), mask[first : first + number])
    for seed, name in ((8, "a.weight\nkey"), (7, "b.weight\nkey"), (7, "a.weight\nother")):
        agreeing = (random_mask(0.3, seed, name, 0, 10_000) == mask).float().mean().item()
        assert abs(agreeing - (0.3**2 + 0.7**2)) < 0.03  # independent
    torch.manual_seed(1)
    assert torch.equal(random_mask(0.3, 7, "a.weight\nkey", 0, 10_000), mask)


@pytest.mark.parametrize("t", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("kind", ["any", "parallel", "opposite", "zero"])
def test_slerp_is_the_formula(tensors, kind, t):
    one = tensors[0].double()
    other = {"any": tensors[1].double(), "parallel": 2 * one, "opposite": -one, "zero": 0 * one}[kind]
    norms = [vector.norm() if vector.norm() > 0 else torch.tensor(1.0) for vector in (one, other)]
    cosine = (one / norms[0] * (other / norms[1])).sum().clamp(-1, 1)
    if abs(cosine) > 0.9995:
        expected = (1 - t) * one + t * other
    else:
        angle = cosine.acos()
        expected = (torch.sin((1 - t) * angle) * one + torch.sin(t * angle) * other) / angle.sin()
    found = merged([one, other], method="slerp", t=t)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("num_models", "options", "message"),
    [
        (2, {"method": "dare_linear"}, "--method dare_linear: no such method. Use --method dare."),
        (3, {"method": "slerp"}, "exactly 2 models; found 3"),
        (2, {"weights": (1, 2, 3)}, "--weights is 1 2 3: 3 for 2 models"),
        (2, {"weights": (1, float("nan"))}, "--weights is 1 nan; expected finite numbers"),
        (2, {"weights": (0, 0)}, "no model counts"),
        (2, {"weights": (1, -1)}, "the sum is 0, and the result is divided by it.*--no-normalize"),
        (2, {"t": 0.5}, "--t is only used with --method slerp; the method is linear"),
        (2, {"seed": 1}, "--seed is only used with --method dare, dare_ties"),
        (2, {"method": "slerp", "weights": (1, 2)}, "--weights is only used with --method linear, ties, dare"),
        (2, {"method": "slerp", "t": 1.5}, "--t is 1.5; expected a number from 0"),
        (2, {"method": "ties"}, "--method ties needs --density"),
        (2, {"method": "ties", "density": 0}, "--density is 0; expected a number above 0"),
        (2, {"method": "dare", "density": float("nan")}, "--density is nan"),
        (
            2,
            {"method": "dare", "density": 0.5, "rescale": "l2"},
            "--rescale is 'l2'; expected one of l1, density, none",
        ),
        (2, {"method": "dare", "density": 0.5, "seed": -1}, "--seed is -1; expected a number from 0"),
    ],
)
def test_wrong_options_are_named(num_models, options, message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        formula_of(MergeSettings(**options), num_models)
