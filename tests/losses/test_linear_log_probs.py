"""Chunked log-probabilities: both schemes compared with plain float64 autograd, and their memory for different
chunks."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lean_ft.losses import TokenStatistics, linear_log_probs
from tests.losses.test_linear_cross_entropy import PeakMemory, error


def problem(
    shape: tuple[int, ...] = (3, 17),
    dim: int = 24,
    vocab: int = 101,
    num_pairs: int = 40,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    """Pairs with unordered and repeated positions, as after a shared prompt."""
    generator = torch.Generator().manual_seed(0)
    positions = int(torch.tensor(shape).prod())
    return {
        "hidden": torch.randn(*shape, dim, generator=generator).to(dtype).requires_grad_(),
        "weight": (torch.randn(vocab, dim, generator=generator) * 0.3).to(dtype).requires_grad_(),
        "index": torch.randint(0, positions, (num_pairs,), generator=generator),
        "label": torch.randint(0, vocab, (num_pairs,), generator=generator),
    }


def plain_logits(given: dict[str, Tensor], temperature: float = 1.0, softcap: float | None = None) -> Tensor:
    logits = given["hidden"].flatten(0, -2)[given["index"]] @ given["weight"].T
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    return logits / temperature


def coupled_loss(log_probs: Tensor) -> Tensor:
    """A loss that is not a sum over tokens: each token's gradient depends on the others."""
    halves = log_probs.view(2, -1).sum(1)
    return -F.logsigmoid(0.1 * (halves[0] - halves[1])) + 0.01 * log_probs.square().mean()


@pytest.mark.parametrize("frozen", [(), ("weight",), ("hidden",)], ids=str)
@pytest.mark.parametrize("terms", [{}, {"temperature": 0.7}, {"softcap": 1.5}, {"temperature": 1.3, "softcap": 0.8}])
@pytest.mark.parametrize("chunk_tokens", [0, 7, 1024])
def test_values_and_gradients_equal_the_plain_computation(frozen: Any, terms: Any, chunk_tokens: int) -> None:
    given = problem()
    for name in frozen:
        given[name].requires_grad_(False)
    trained = [given[name] for name in ("hidden", "weight") if name not in frozen]
    expected = plain_logits(given, **terms).log_softmax(1).gather(1, given["label"][:, None]).squeeze(1)
    expected_gradients = torch.autograd.grad(coupled_loss(expected), trained)
    log_probs = linear_log_probs(**given, chunk_tokens=chunk_tokens, **terms)
    gradients = torch.autograd.grad(coupled_loss(log_probs), trained)
    assert error(log_probs.detach(), expected.detach()) < 1e-14
    for ours, exact in zip(gradients, expected_gradients, strict=True):
        assert error(ours, exact) < 1e-13
    with torch.no_grad():
        assert torch.equal(linear_log_probs(**given, chunk_tokens=chunk_tokens, **terms), log_probs)


@pytest.mark.long
@pytest.mark.parametrize("frozen", [(), ("weight",)], ids=str)
@pytest.mark.usefixtures("compiler")
def test_compiled_it_equals_the_plain_computation(frozen: Any) -> None:
    terms: Any = {"temperature": 1.3, "softcap": 0.8}
    given = problem(dtype=torch.float32)
    for name in frozen:
        given[name].requires_grad_(False)
    exact = {k: v.detach().double().requires_grad_() if v.is_floating_point() else v for k, v in given.items()}
    expected = plain_logits(exact, **terms).log_softmax(1).gather(1, exact["label"][:, None]).squeeze(1)
    coupled_loss(expected).backward()
    log_probs = linear_log_probs(**given, chunk_tokens=16, compile=True, **terms)
    coupled_loss(log_probs).backward()
    assert log_probs.dtype == torch.float32
    assert error(log_probs, expected.detach()) < 1e-6
    for name in {"hidden", "weight"} - set(frozen):
        assert exact[name].grad is not None
        assert error(given[name].grad, exact[name].grad) < 3e-6
    with torch.no_grad():
        assert torch.equal(linear_log_probs(**given, chunk_tokens=16, compile=True, **terms), log_probs)


def test_what_it_tells_beside_is_that_of_the_plain_logits() -> None:
    given, terms = problem(), {"temperature": 0.7, "softcap": 1.5}
    right = plain_logits(given).argmax(1)
    given["label"][::3] = right[::3]
    probabilities = plain_logits(given, **terms).softmax(1).detach()
    statistics, log_sum_squares = TokenStatistics(), torch.empty(len(right), dtype=torch.float64)
    linear_log_probs(**given, chunk_tokens=7, log_sum_squares=log_sum_squares, statistics=statistics, **terms)
    means = statistics.means(len(right))
    assert error(log_sum_squares, probabilities.square().sum(1).log()) < 1e-14
    assert means["entropy"].item() == pytest.approx(torch.distributions.Categorical(probabilities).entropy().mean())
    assert means["token_accuracy"].item() == pytest.approx((right == given["label"]).double().mean().item())


def test_bfloat16_rounds_no_worse_than_the_plain_bfloat16_computation() -> None:
    given = problem((4, 64), 64, 1000, 200, torch.bfloat16)
    exact = {k: v.detach().double().requires_grad_() if v.is_floating_point() else v for k, v in given.items()}
    coupled_loss(plain_logits(exact).log_softmax(1).gather(1, exact["label"][:, None]).squeeze(1)).backward()
    coupled_loss(linear_log_probs(**given, chunk_tokens=50)).backward()
    ours = given["hidden"].grad, given["weight"].grad
    given["hidden"].grad = given["weight"].grad = None
    coupled_loss(plain_logits(given).float().log_softmax(1).gather(1, given["label"][:, None]).squeeze(1)).backward()
    for gradient, name in zip(ours, ("hidden", "weight"), strict=True):
        assert exact[name].grad is not None
        assert error(gradient, exact[name].grad) < 1.2 * error(given[name].grad, exact[name].grad)


@pytest.mark.first(2)
@pytest.mark.parametrize("frozen", [(), ("weight",)], ids=str)
@pytest.mark.parametrize("num_chunks", [2, 16])
def test_peak_memory_is_a_chunk_of_logits_however_many_chunks_there_are(frozen: Any, num_chunks: int) -> None:
    chunk_tokens, dim, vocab = 64, 16, 9000
    num_pairs = chunk_tokens * num_chunks
    given = problem((1, num_pairs), dim, vocab, num_pairs, torch.bfloat16)
    for name in frozen:
        given[name].requires_grad_(False)
    with PeakMemory() as memory:
        loss = coupled_loss(linear_log_probs(**given, chunk_tokens=chunk_tokens))
        held_bytes = memory.alive_bytes
        loss.backward()
    of_tokens = given["hidden"].nbytes + num_pairs * 4 * 16
    assert held_bytes < 2 * of_tokens + 4096  # no logits, and no tensor of the weight's size
    eager_bytes, sum_bytes = 4 * (1 << 20) * 4, vocab * dim * 4 * (not frozen)
    assert memory.peak_bytes < chunk_tokens * vocab * 2 + eager_bytes + 2 * sum_bytes + 4 * of_tokens + 65536


def test_what_cannot_be_is_refused() -> None:
    given = problem()
    with pytest.raises(ValueError, match="expected a number above 0"):
        linear_log_probs(**given, temperature=0.0)
    with pytest.raises(ValueError, match=r"softcap is -1\.0; expected"):
        linear_log_probs(**given, softcap=-1.0)
    with pytest.raises(ValueError, match=r"label \(N,\)"):
        linear_log_probs(given["hidden"], given["weight"], given["index"][1:], given["label"])
