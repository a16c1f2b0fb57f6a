"""Chunked divergences compared with plain float64 autograd and other libraries, and their memory for different
chunks."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lean_ft.losses import (
    IGNORED_LABEL,
    TeacherStates,
    TokenStatistics,
    TopLogProbs,
    linear_cross_entropy,
    linear_distillation,
    top_log_probs,
)
from tests.losses.test_linear_cross_entropy import PeakMemory, error

V = 101


def problem(
    shape: tuple[int, ...] = (3, 17),
    *,
    dims: tuple[int, int] = (24, 40),
    vocab: int = V,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    """A student, and a teacher with another hidden size."""
    generator = torch.Generator().manual_seed(0)

    def draw(*sizes: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*sizes, generator=generator, dtype=torch.float64) * scale).to(dtype)

    labels = torch.randint(0, vocab - 4, shape, generator=generator)
    labels[torch.rand(shape, generator=generator) < 0.3] = IGNORED_LABEL
    labels.view(-1)[0] = 3  # at least one target
    return {
        "hidden": draw(*shape, dims[0]).requires_grad_(),
        "weight": draw(vocab, dims[0], scale=0.4).requires_grad_(),
        "labels": labels,
        "teacher_hidden": draw(*shape, dims[1]),
        "teacher_weight": draw(vocab, dims[1], scale=0.3),
    }


def in_dtype(given: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        name: tensor.detach().to(dtype).requires_grad_(tensor.requires_grad) if tensor.is_floating_point() else tensor
        for name, tensor in given.items()
    }


def assert_gradients(given: dict[str, Tensor], value: Tensor, expected: Tensor, bound: float) -> None:
    trained = [tensor for tensor in (given["hidden"], given["weight"]) if tensor.requires_grad]
    gradients = (torch.autograd.grad(loss / 5, trained) for loss in (value, expected))
    for gradient, exact in zip(*gradients, strict=True):
        assert error(gradient, exact) < bound


def plain(given: dict[str, Tensor], loss: dict[str, Any], teacher_softcap: float | None = None) -> Tensor:
    """The sum computed from full logits in float64, with torch's KL divergence."""
    is_target = given["labels"].flatten() != IGNORED_LABEL
    student = (given["hidden"].flatten(0, -2) @ given["weight"].T)[is_target]
    teacher = (given["teacher_hidden"].flatten(0, -2) @ given["teacher_weight"].T)[is_target]
    if (cap := loss.get("softcap")) is not None:
        student = torch.tanh(student / cap) * cap
    if teacher_softcap is not None:
        teacher = torch.tanh(teacher / teacher_softcap) * teacher_softcap
    shared = min(student.shape[1], teacher.shape[1])
    student, teacher = student[:, :shared], teacher[:, :shared]
    cross_entropy = F.cross_entropy(student, given["labels"].flatten()[is_target], reduction="sum")
    temperature, beta, weight = (
        loss.get("temperature", 1.0),
        loss.get("beta", 0.5),
        loss.get("cross_entropy_weight", 0.0),
    )
    s, t = (logits.div(temperature).log_softmax(1) for logits in (student, teacher))

    def kl(p: Tensor, q: Tensor) -> Tensor:
        return F.kl_div(q, p, reduction="sum", log_target=True)

    middle = ((1 - beta) * s.exp() + beta * t.exp()).log()
    divergence = {
        "forward_kl": kl(t, s),
        "reverse_kl": kl(s, t),
        "jsd": beta * kl(t, middle) + (1 - beta) * kl(s, middle),
    }[loss.get("divergence", "forward_kl")]
    return (1 - weight) * divergence + weight * cross_entropy


def teacher_of(given: dict[str, Tensor], softcap: float | None = None) -> TeacherStates:
    return TeacherStates(given["teacher_hidden"], given["teacher_weight"], softcap)


def ours(given: dict[str, Tensor], teacher: TeacherStates | TopLogProbs | None = None, **settings: Any) -> Tensor:
    own = {name: given[name] for name in ("hidden", "weight", "labels")}
    return linear_distillation(**own, teacher=teacher or teacher_of(given), **settings)


LOSSES: list[dict[str, Any]] = [
    {},
    {"divergence": "reverse_kl", "temperature": 0.6},
    {"divergence": "jsd", "beta": 0.3},
    {"divergence": "jsd", "beta": 0.9, "temperature": 2.5, "cross_entropy_weight": 0.4},
    {"divergence": "forward_kl", "cross_entropy_weight": 0.7, "softcap": 1.5},
    {"divergence": "reverse_kl", "softcap": 0.8, "temperature": 1.7, "cross_entropy_weight": 0.2},
]


ALL = [
    (loss, frozen, size, "") for loss in LOSSES for frozen in ((), ("weight",), ("hidden",)) for size in (0, 7, 1024)
]
ALL += [({"cross_entropy_weight": 0.4}, (), 7, smaller) for smaller in ("weight", "teacher_weight")]


@pytest.mark.parametrize(("loss", "frozen", "chunk_tokens", "smaller"), ALL, ids=str)
def test_value_and_gradients_equal_the_plain_computation(
    loss: Any, frozen: tuple[str, ...], chunk_tokens: int, smaller: str
) -> None:
    """Also if one vocabulary is smaller: tokens that only the other one has are left out."""
    given = problem()
    if smaller:
        given[smaller] = given[smaller].detach()[: V - 4].requires_grad_(smaller == "weight")
    for name in frozen:
        given[name].requires_grad_(False)
    expected = plain(given, loss, teacher_softcap=1.1)
    value = ours(given, teacher_of(given, 1.1), chunk_tokens=chunk_tokens, **loss)
    assert value.item() == pytest.approx(expected.item(), rel=1e-13)
    with torch.no_grad():
        assert ours(given, teacher_of(given, 1.1), chunk_tokens=chunk_tokens, **loss) == value
    assert_gradients(given, value, expected, 1e-12)


@pytest.mark.long
@pytest.mark.parametrize("loss", [LOSSES[i] for i in (1, 3, 5)], ids=str)
@pytest.mark.usefixtures("compiler")
def test_compiled_it_equals_the_plain_computation(loss: Any) -> None:
    exact = problem()
    given = in_dtype(exact, torch.float32)
    expected = plain(exact, loss, teacher_softcap=1.1)
    expected.backward()
    value = ours(given, teacher_of(given, 1.1), chunk_tokens=16, compile=True, **loss)
    value.backward()
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(expected.item(), rel=1e-6)
    for name in ("hidden", "weight"):
        assert exact[name].grad is not None
        assert error(given[name].grad, exact[name].grad) < 3e-6


@pytest.mark.parametrize(("beta", "divergence"), [(0.0, "forward_kl"), (1.0, "reverse_kl")])
def test_jsd_is_at_its_ends_what_it_is_defined_as(beta: float, divergence: Any) -> None:
    assert ours(problem(), divergence="jsd", beta=beta) == ours(problem(), divergence=divergence)
    assert ours(problem(), divergence="jsd", beta=0.5) < ours(problem(), divergence=divergence)


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 0.9])
def test_jsd_is_that_of_trl(beta: float, temperature: float) -> None:
    """TRL 1.16: GKDTrainer.generalized_jsd_loss, which returns the mean over the targets."""
    gkd = pytest.importorskip("trl.experimental.gkd.gkd_trainer")
    given = problem()
    student, teacher = given["hidden"] @ given["weight"].T, given["teacher_hidden"] @ given["teacher_weight"].T
    expected = gkd.GKDTrainer.generalized_jsd_loss(
        student, teacher, given["labels"], beta=beta, temperature=temperature
    )
    value = ours(given, divergence="jsd", beta=beta, temperature=temperature) / (given["labels"] != IGNORED_LABEL).sum()
    # TRL computes the logs of beta in float32.
    assert value.item() == pytest.approx(expected.item(), rel=1e-13 if beta in (0.0, 1.0) else 1e-6)
    assert_gradients(given, value, expected, 1e-6)


def test_a_student_like_its_teacher_costs_nothing_and_learns_nothing() -> None:
    given = problem()
    same = TeacherStates(given["hidden"].detach(), given["weight"].detach())
    for divergence in ("forward_kl", "reverse_kl", "jsd"):
        value = ours(given, same, divergence=divergence, temperature=0.7)
        assert abs(value.item()) < 1e-12
        for gradient in torch.autograd.grad(value, [given["hidden"], given["weight"]]):
            assert gradient.abs().max() < 1e-13


@pytest.mark.parametrize("scale", [10.0, 300.0])
@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize("kept", [None, 5, V])
def test_nothing_overflows_where_the_two_are_sure_of_different_tokens(scale: float, divergence: Any, kept: Any) -> None:
    given = problem(dtype=torch.float32)
    given["teacher_hidden"] = given["teacher_hidden"] * scale
    given["hidden"] = (given["hidden"].detach() * scale).requires_grad_()
    exact = in_dtype(given, torch.float64)
    teacher = None if kept is None else top_log_probs(teacher_of(given), given["labels"], kept)
    value = ours(given, teacher, divergence=divergence)
    gradient = torch.autograd.grad(value, given["hidden"])[0]
    assert value.isfinite()
    assert gradient.isfinite().all()
    if kept != 5 and scale < 100:
        expected = plain(exact, {"divergence": divergence}) if divergence != "jsd" else ours(exact, divergence="jsd")
        assert value.item() == pytest.approx(expected.item(), rel=1e-5)
        # For a confident model, the gradient is tiny and dominated by rounding.
        assert (gradient - torch.autograd.grad(expected, exact["hidden"])[0]).abs().max() < 1e-3


# Stored predictions of a teacher --------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", LOSSES, ids=str)
@pytest.mark.parametrize("top_k", [1, 8, V - 1])
def test_what_was_kept_is_compared_over_the_likeliest_tokens_and_one_bucket_of_the_rest(loss: Any, top_k: int) -> None:
    given, temperature = problem(), loss.get("temperature", 1.0)
    kept = top_log_probs(teacher_of(given, 1.1), given["labels"], top_k, temperature=temperature, chunk_tokens=7)
    is_target = given["labels"] != IGNORED_LABEL
    student = (given["hidden"] @ given["weight"].T)[is_target]
    teacher = torch.tanh((given["teacher_hidden"] @ given["teacher_weight"].T)[is_target] / 1.1) * 1.1
    if (cap := loss.get("softcap")) is not None:
        student = torch.tanh(student / cap) * cap
    s, t = (student / temperature).softmax(1), (teacher / temperature).softmax(1)
    top = t.topk(top_k, 1).indices
    s, t = (torch.cat([p.gather(1, top), 1 - p.gather(1, top).sum(1, keepdim=True)], 1) for p in (s, t))
    assert error(kept.log_probs, t.log()) < 1e-9  # the plain computation loses digits of a small rest
    beta, weight = loss.get("beta", 0.5), loss.get("cross_entropy_weight", 0.0)
    m = (1 - beta) * s + beta * t
    divergence = {
        "forward_kl": (t * (t / s).log()).sum(),
        "reverse_kl": (s * (s / t).log()).sum(),
        "jsd": beta * (t * (t / m).log()).sum() + (1 - beta) * (s * (s / m).log()).sum(),
    }[loss.get("divergence", "forward_kl")]
    expected = (1 - weight) * divergence + weight * F.cross_entropy(
        student, given["labels"][is_target], reduction="sum"
    )
    value = ours(given, kept, chunk_tokens=7, compile=True, **loss)
    assert value.item() == pytest.approx(expected.item(), rel=1e-9)
    assert_gradients(given, value, expected, 1e-8)


def test_fewer_tokens_kept_are_never_further_from_the_student_and_never_below_0() -> None:
    given = problem()
    values = [ours(given, top_log_probs(teacher_of(given), given["labels"], k)).item() for k in (1, 2, 8, 32, V)]
    assert values == sorted(values)
    assert values[0] > 0


def test_stored_predictions_over_more_ids_than_the_student_has_are_refused():
    given = problem()
    kept = top_log_probs(teacher_of(given), given["labels"], 8)
    given["weight"] = given["weight"].detach()[:-2]
    with pytest.raises(ValueError, match=f"over {V} ids, and the student has {V - 2}. Store the predictions again"):
        ours(given, kept)


# Memory, statistics and errors ----------------------------------------------------------------------------------------


def test_what_it_tells_beside_is_that_of_the_plain_logits() -> None:
    given = problem()
    logits = (given["hidden"] @ given["weight"].T).detach()
    given["labels"][0] = logits[0].argmax(1).clamp(max=V - 4)
    is_target = given["labels"] != IGNORED_LABEL
    right = (logits.argmax(-1) == given["labels"])[is_target].double().mean()
    statistics, cross_entropy = TokenStatistics(), TokenStatistics()
    ours(given, temperature=2.0, chunk_tokens=7, cross_entropy_weight=0.3, statistics=statistics)
    expected_loss = linear_cross_entropy(given["hidden"], given["weight"], given["labels"], statistics=cross_entropy)
    told, expected = statistics.means(1), cross_entropy.means(1)
    assert told["cross_entropy"].item() == pytest.approx(expected_loss.item(), rel=1e-12)
    assert told["divergence"].item() == pytest.approx(plain(given, {"temperature": 2.0}).item(), rel=1e-12)
    assert told["entropy"].item() == pytest.approx(expected["entropy"].item(), rel=1e-12)
    assert told["token_accuracy"].item() == pytest.approx(right.item() * int(is_target.sum()), rel=1e-12) != 0


def test_without_a_target_it_is_an_exact_zero() -> None:
    given = problem()
    given["labels"].fill_(IGNORED_LABEL)
    for teacher in (teacher_of(given), TopLogProbs(torch.empty(0, 4), torch.empty(0, 3, dtype=torch.int64), V)):
        value = ours(given, teacher, num_targets=0)
        value.backward()
        assert value == 0
        assert given["hidden"].grad is not None
        assert not given["hidden"].grad.any()


def test_bfloat16_rounds_no_worse_than_the_plain_bfloat16_computation() -> None:
    given = problem((4, 64), dims=(64, 80), vocab=1000, dtype=torch.bfloat16)
    loss: dict[str, Any] = {"divergence": "jsd", "temperature": 0.9}
    exact = in_dtype(given, torch.float64)
    plain(exact, loss).backward()
    rounded = []
    for value in (ours(given, chunk_tokens=50, **loss), plain(given, loss)):
        rounded.append(torch.autograd.grad(value, [given["hidden"], given["weight"]]))
    for name, gradient, theirs in zip(("hidden", "weight"), *rounded, strict=True):
        exact_gradient = exact[name].grad
        assert exact_gradient is not None
        assert error(gradient, exact_gradient) < 1.2 * error(theirs, exact_gradient)


@pytest.mark.first(2)
@pytest.mark.parametrize("kept", [None, 8])
@pytest.mark.parametrize("num_chunks", [2, 16])
def test_peak_memory_is_two_chunks_of_logits_however_many_chunks_there_are(kept: int | None, num_chunks: int) -> None:
    chunk_tokens, dim, vocab = 64, 16, 9000
    given = problem((1, chunk_tokens * num_chunks), dims=(dim, dim), vocab=vocab, dtype=torch.bfloat16)
    given["labels"].clamp_(min=0)
    teacher = None if kept is None else top_log_probs(teacher_of(given), given["labels"], kept)
    with PeakMemory() as memory:
        loss = ours(given, teacher, divergence="jsd", chunk_tokens=chunk_tokens)
        held_bytes = memory.alive_bytes
        loss.backward()
    eager_bytes, sum_bytes = 8 * (1 << 20) * 4, vocab * dim * 4
    of_tokens = 2 * given["hidden"].nbytes + given["labels"].nbytes
    assert held_bytes < sum_bytes + of_tokens + 4096  # no logits
    assert memory.peak_bytes < 2 * chunk_tokens * vocab * 2 + eager_bytes + 2 * sum_bytes + 2 * of_tokens + 65536


def test_what_cannot_be_is_refused() -> None:
    given = problem()
    with pytest.raises(ValueError, match="the teacher's hidden states and weight"):
        ours(given, TeacherStates(given["teacher_hidden"][:1], given["teacher_weight"]))
    with pytest.raises(ValueError, match="expected [0-9]+ targets"):
        ours(given, TopLogProbs(torch.zeros(2, 4), torch.zeros(2, 3, dtype=torch.int64), V))
    with pytest.raises(ValueError, match="divergence is 'reverse'; expected one of forward_kl, reverse_kl, jsd"):
        ours(given, divergence="reverse")
    for name, value in (("softcap", 0.0), ("temperature", 0.0), ("beta", 1.1), ("cross_entropy_weight", -0.1)):
        with pytest.raises(ValueError, match=f"{name} is {value}; expected"):
            ours(given, **{name: value})
    with pytest.raises(ValueError, match=r"temperature is 0\.0; expected"):
        top_log_probs(teacher_of(given), given["labels"], 3, temperature=0.0)
    with pytest.raises(ValueError, match="top_k is 102; expected 1 to 101"):
        top_log_probs(teacher_of(given), given["labels"], V + 1)
