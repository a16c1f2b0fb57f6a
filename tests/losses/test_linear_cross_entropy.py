"""The chunked loss compared with the plain computation in float64, and its memory for different numbers of chunks."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from lean_ft.losses import IGNORED_LABEL, TokenStatistics, linear_cross_entropy
from lean_ft.losses.chunked_softmax import VOCAB_SLICE


def plain(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and gradients of the plain computation, in float64."""
    hidden = hidden.detach().double().requires_grad_()
    weight = weight.detach().double().requires_grad_()
    logits = hidden.flatten(0, -2) @ weight.T
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    loss = F.cross_entropy(
        logits, labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum", label_smoothing=label_smoothing
    )
    is_target = labels.flatten() != IGNORED_LABEL
    loss = loss + z_loss * logits.logsumexp(1)[is_target].square().sum()
    loss.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return loss.detach(), hidden.grad, weight.grad


def problem(
    shape: tuple[int, ...] = (3, 17),
    dim: int = 24,
    vocab: int = 101,
    dtype: torch.dtype = torch.float32,
    ignored: float = 0.3,
) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(*shape, dim).to(dtype).requires_grad_()
    weight = (torch.randn(vocab, dim) * 0.3).to(dtype).requires_grad_()
    labels = torch.randint(0, vocab, shape)
    labels[torch.rand(shape) < ignored] = IGNORED_LABEL
    labels.view(-1)[0] = 3  # at least one target
    return hidden, weight, labels


def error(value: Tensor | None, exact: Tensor) -> float:
    assert value is not None
    return float((value.double() - exact).norm() / exact.norm())


TERMS = [
    {"softcap": softcap, "label_smoothing": label_smoothing, "z_loss": z_loss}
    for softcap in (None, 1.5)
    for label_smoothing in (0.0, 0.2)
    for z_loss in (0.0, 0.01)
]
F32, F64 = torch.float32, torch.float64
CASES = [  # dtype, share of ignored labels, tokens of a chunk, terms
    *((dtype, ignored, size, {}) for dtype in (F32, F64) for ignored in (0.0, 0.3, 0.95) for size in (0, 1, 1024)),
    *((F64, 0.3, 7, terms) for terms in TERMS),
    (F32, 0.3, 7, {"softcap": 0.8}),
]


@pytest.mark.parametrize(("dtype", "ignored", "chunk_tokens", "terms"), CASES, ids=str)
def test_loss_and_gradients_equal_the_plain_computation(
    dtype: torch.dtype, ignored: float, chunk_tokens: int, terms: dict[str, Any]
) -> None:
    hidden, weight, labels = problem(dtype=dtype, ignored=ignored)
    loss = linear_cross_entropy(hidden, weight, labels, chunk_tokens=chunk_tokens, **terms)
    (loss / 5).backward()
    exact_loss, exact_hidden, exact_weight = plain(hidden, weight, labels, **terms)
    bound = 2e-6 if dtype == F32 else 1e-14
    assert abs(loss.item() - exact_loss.item()) <= bound * exact_loss.item()
    assert error(hidden.grad, exact_hidden / 5) < bound
    assert error(weight.grad, exact_weight / 5) < bound
    if any(terms.values()):
        assert error(exact_weight, plain(hidden, weight, labels)[2]) > 1e-3  # the terms have an effect


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_accuracy_and_entropy_are_those_of_the_plain_logits_and_take_no_gradient(softcap: float | None) -> None:
    hidden, weight, labels = problem(dtype=torch.float64)
    logits = hidden.detach().flatten(0, 1) @ weight.detach().T
    right = logits.argmax(1)
    labels.view(-1)[::3] = right[::3]  # some predictions are correct
    statistics = TokenStatistics()
    settings = {"chunk_tokens": 7, "softcap": softcap, "label_smoothing": 0.1}
    for rows in (slice(0, 1), slice(1, 3)):
        linear_cross_entropy(hidden[rows], weight, labels[rows], **settings, statistics=statistics)  # type: ignore[arg-type]
    is_target = labels.flatten() != IGNORED_LABEL
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    means = statistics.means(int(is_target.sum()))
    accuracy = (right == labels.flatten())[is_target].double().mean()
    entropy = torch.distributions.Categorical(logits=logits[is_target]).entropy().mean()
    assert 0.2 < accuracy < 1
    assert not any(mean.requires_grad for mean in means.values())
    assert means["token_accuracy"].item() == pytest.approx(accuracy.item(), rel=1e-6)
    assert means["entropy"].item() == pytest.approx(entropy.item(), rel=1e-6)


@pytest.mark.parametrize(("highest", "share"), [([0, 1], 0.5), ([1], 0.0), (range(8), 1 / 8), ([0], 1.0)])
def test_a_prediction_of_several_tokens_is_right_by_a_share(highest: Any, share: float) -> None:
    weight = torch.zeros(8, 4)
    weight[list(highest)] = 1.0
    statistics = TokenStatistics()
    linear_cross_entropy(torch.ones(2, 4), weight, torch.tensor([0, 0]), statistics=statistics)
    assert statistics.means(2)["token_accuracy"].item() == share


def test_a_vocabulary_of_several_slices_sums_every_one() -> None:
    hidden, weight, labels = problem(vocab=20_000)
    linear_cross_entropy(hidden, weight, labels, chunk_tokens=8).backward()
    assert error(weight.grad, plain(hidden, weight, labels)[2]) < 1e-6


@pytest.mark.first(1)
@pytest.mark.parametrize(("accumulation", "bound"), [("float32", 3.6e-3), ("weight", 6.0e-3)])
def test_the_bfloat16_weight_gradient_stays_within_the_stated_error(accumulation: str, bound: float) -> None:
    hidden, weight, labels = problem((1, 2048), 64, 2000, torch.bfloat16, ignored=0.0)
    linear_cross_entropy(hidden, weight, labels, chunk_tokens=128, accumulation_dtype=accumulation).backward()  # type: ignore[arg-type]
    exact = plain(hidden, weight, labels)[2]
    assert error(exact.bfloat16(), exact) < error(weight.grad, exact) < bound


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_bfloat16_rounds_no_worse_than_the_plain_bfloat16_computation(softcap: float | None) -> None:
    hidden, weight, labels = problem((4, 64), 64, 1000, torch.bfloat16)
    loss = linear_cross_entropy(hidden, weight, labels, chunk_tokens=50, softcap=softcap)
    loss.backward()
    ours = hidden.grad, weight.grad
    exact_loss, exact_hidden, exact_weight = plain(hidden, weight, labels, softcap=softcap)
    hidden.grad = weight.grad = None
    logits = hidden @ weight.T
    logits = logits if softcap is None else torch.tanh(logits / softcap) * softcap
    F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum").backward()
    assert abs(loss.item() - exact_loss.item()) < 2e-3 * exact_loss.item()
    assert error(ours[0], exact_hidden) < 1.2 * error(hidden.grad, exact_hidden)
    assert error(ours[1], exact_weight) < 1.2 * error(weight.grad, exact_weight)


def test_no_label_gives_an_exact_zero_and_zero_gradients() -> None:
    hidden, weight, labels = problem()
    labels.fill_(IGNORED_LABEL)
    loss = linear_cross_entropy(hidden, weight, labels)
    loss.backward()
    assert loss.item() == 0.0
    assert hidden.grad is not None
    assert weight.grad is not None
    assert hidden.grad.abs().sum() == 0
    assert weight.grad.abs().sum() == 0


def test_uneven_micro_batches_add_up_to_the_gradients_of_the_whole_batch() -> None:
    hidden, weight, labels = problem((6, 20))
    labels[:3, 2:] = IGNORED_LABEL  # short completions first
    whole = plain(hidden, weight, labels)[2] / (labels != IGNORED_LABEL).sum()
    num_targets = int((labels != IGNORED_LABEL).sum())
    for rows in (slice(0, 3), slice(3, 4), slice(4, 6)):
        (linear_cross_entropy(hidden[rows], weight, labels[rows]) / num_targets).backward()
    assert error(weight.grad, whole) < 1e-6


def test_a_known_number_of_targets_changes_nothing() -> None:
    hidden, weight, labels = problem()
    counted = linear_cross_entropy(hidden, weight, labels)
    assert torch.equal(
        counted, linear_cross_entropy(hidden, weight, labels, num_targets=int((labels != IGNORED_LABEL).sum()))
    )


def test_frozen_inputs_get_no_gradient_and_cost_none() -> None:
    hidden, weight, labels = problem()
    linear_cross_entropy(hidden, weight.detach(), labels).backward()
    assert error(hidden.grad, plain(hidden, weight, labels)[1]) < 1e-6
    with torch.no_grad():
        assert not linear_cross_entropy(hidden, weight, labels).requires_grad


def test_float16_autocast_keeps_float32_weights_and_their_gradients() -> None:
    hidden, weight, labels = problem((4, 64), 64, 1000)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = linear_cross_entropy(hidden, weight, labels, chunk_tokens=50)
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    assert error(weight.grad, plain(hidden, weight, labels)[2]) < 2e-3


@pytest.mark.long
@pytest.mark.parametrize("terms", [TERMS[-1], pytest.param({}, marks=pytest.mark.long)], ids=str)
@pytest.mark.usefixtures("compiler")
def test_compiled_it_equals_the_plain_computation_for_every_length_with_one_compilation(terms: dict[str, Any]) -> None:
    counters = torch._dynamo.utils.counters
    counters.clear()
    for length in (33, 16, 50):
        hidden, weight, labels = problem((1, length))
        loss = linear_cross_entropy(hidden, weight, labels, chunk_tokens=16, compile=True, **terms)
        loss.backward()
        exact_loss, exact_hidden, exact_weight = plain(hidden, weight, labels, **terms)
        assert abs(loss.item() - exact_loss.item()) <= 2e-6 * exact_loss.item()
        assert error(hidden.grad, exact_hidden) < 2e-6
        assert error(weight.grad, exact_weight) < 1e-6
    assert counters["stats"]["unique_graphs"] <= (4 if terms else 2)  # a soft cap is compiled by itself


def test_a_second_backward_is_refused() -> None:
    hidden, weight, labels = problem()
    loss = linear_cross_entropy(hidden, weight, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="were used already"):
        loss.backward()


def test_shapes_that_do_not_belong_together_are_refused() -> None:
    hidden, weight, labels = problem()
    with pytest.raises(ValueError, match=r"hidden \(\.\.\., D\)"):
        linear_cross_entropy(hidden, weight[:, :-1], labels)


@pytest.mark.parametrize(
    "value", [{"softcap": 0.0}, {"label_smoothing": 1.0}, {"label_smoothing": -0.1}, {"z_loss": -1.0}]
)
def test_values_out_of_range_are_refused(value: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(value))} is .*; expected"):
        linear_cross_entropy(*problem(), **value)  # pyright: ignore[reportArgumentType]


class PeakMemory(TorchDispatchMode):
    """Records the peak bytes of new storages, and the bytes still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[StorageWeakRef, int] = {}
        self.peak_bytes = 0

    @property
    def alive_bytes(self) -> int:
        self.storages = {ref: size for ref, size in self.storages.items() if not ref.expired()}
        return sum(self.storages.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {StorageWeakRef(arg.untyped_storage()) for arg in args if isinstance(arg, Tensor)} - set(self.storages)
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor) and (ref := StorageWeakRef(tensor.untyped_storage())) not in known:
                self.storages[ref] = tensor.untyped_storage().nbytes()
        self.peak_bytes = max(self.peak_bytes, self.alive_bytes)
        return out


@pytest.mark.first(2)
@pytest.mark.parametrize("accumulation", ["float32", "weight"])
@pytest.mark.parametrize("num_chunks", [2, 4, 16])
def test_peak_memory_is_a_chunk_of_logits_however_many_chunks_there_are(accumulation: str, num_chunks: int) -> None:
    chunk_tokens, dim, vocab = 64, 16, 9000
    hidden, weight, labels = problem((1, chunk_tokens * num_chunks), dim, vocab, torch.bfloat16, ignored=0.0)
    with PeakMemory() as memory:
        loss = linear_cross_entropy(hidden, weight, labels, chunk_tokens=chunk_tokens, accumulation_dtype=accumulation)  # type: ignore[arg-type]
        held_bytes = memory.alive_bytes
        loss.backward()
    logits_bytes, eager_bytes, sum_bytes = chunk_tokens * vocab * 2, 4 * (1 << 20) * 4, vocab * dim * 4
    assert held_bytes < sum_bytes + hidden.nbytes + labels.nbytes + 4096  # no logits
    assert memory.peak_bytes < logits_bytes + eager_bytes + 2 * sum_bytes + 2 * hidden.nbytes + 65536


def test_a_sum_in_the_weights_own_type_becomes_the_gradient_where_it_lies() -> None:
    hidden, weight, labels = problem((1, 64), 16, 20_000, torch.bfloat16, ignored=0.0)
    loss = linear_cross_entropy(hidden, weight, labels, chunk_tokens=16, accumulation_dtype="weight")
    with PeakMemory() as memory:
        loss.backward()
    assert memory.peak_bytes < weight.nbytes // 10
    assert error(weight.grad, plain(hidden, weight, labels)[2]) < 1e-2


def test_a_float32_sum_costs_no_copies_inside_the_cpus_kernels() -> None:
    """A CPU kernel for mixed dtypes converts a whole operand to the wider dtype, which a dispatch mode does not see."""
    hidden, weight, labels = problem((1, 12), 256, 2 * VOCAB_SLICE, torch.bfloat16, ignored=0.0)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        linear_cross_entropy(hidden, weight, labels, chunk_tokens=4).backward()
    slice_bytes = VOCAB_SLICE * 256 * 4
    large = [event.name for event in profiled.events() or () if event.self_cpu_memory_usage >= slice_bytes]
    assert len(large) == 3, f"two slices of the sum, and the gradient in bfloat16, but got {large}"
