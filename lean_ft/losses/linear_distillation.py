"""Divergence of a student's predictions from a teacher's, with logits of one chunk of tokens at a time.

Each chunk is projected by the student's output layer and by the teacher's; their hidden sizes may differ. The rest is
the same as in `linear_cross_entropy`, including gradients in the forward pass (`chunked_softmax`). Divergences of the
student's probabilities s from the teacher's t at the same temperature, and their gradients with respect to the
student's logits, times the temperature:

    forward_kl    sum t (log t - log s)                            s - t
    reverse_kl    sum s (log s - log t)                            s (log s - log t - KL(s || m)), m = t
    jsd           beta KL(t || m) + (1 - beta) KL(s || m)          (1 - beta) s (log s - log m - KL(s || m))
                  with m = (1 - beta) s + beta t

jsd tends to 0 as beta approaches 0 or 1. At these values it is defined as forward_kl (0) and reverse_kl (1), as in the
paper. The loss is not multiplied by the squared temperature, unlike in some implementations. It can be mixed with the
cross-entropy of the labels.

If the vocabularies are padded to different sizes, only the ids that both models have are compared; the softmax omits
the rest. Stored predictions are over the teacher's tokens without the padding, so that they suit any student with
these.

If the teacher does not fit in memory next to the student, run it beforehand (`top_log_probs`): it stores the
log-probabilities of the k likeliest tokens and of all others together, and the divergence is over these k + 1 outcomes.
Without the last outcome, the student could lower the loss by moving probability to other tokens, and a KL could be
negative.

Source: Agarwal et al., On-Policy Distillation of Language Models, 2023 (arXiv:2306.13649), for the divergences; the
chunking is our own. Not supported: a symmetric KL, and weights of tokens.

Shapes: N target tokens, C tokens per chunk, D and E hidden sizes of student and teacher, V their shared vocabulary, k
stored tokens, G compared outcomes (V or k + 1).
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from lean_ft.losses.chunked_softmax import (
    ENTROPY,
    IS_RIGHT,
    ChunkLogits,
    Terms,
    Work,
    capping,
    compute_dtype,
    gradient_of,
    logits_in_chunks,
    sum_dtype,
    token_values,
    work_of,
)
from lean_ft.losses.linear_cross_entropy import Passes, SumOfLosses, check_range, check_shapes, select_targets
from lean_ft.losses.statistics import TokenStatistics

# Columns of each token's values after LOSS, IS_RIGHT and ENTROPY, including those that one pass writes for the next.
CROSS_ENTROPY, DIVERGENCE, KL, LOG_Z, LOG_Z_STUDENT, LOG_Z_TEACHER = range(3, 9)
NUM_COLUMNS = 9

Divergence = Literal["forward_kl", "reverse_kl", "jsd"]


class TeacherStates(NamedTuple):
    """Hidden states and output layer of a teacher in memory."""

    hidden: Tensor  # (..., E), at the student's positions; or (N, E), at the targets alone
    weight: Tensor  # (V or more, E)
    softcap: float | None = None


class TopLogProbs(NamedTuple):
    """Stored top-k predictions of a teacher for N targets, at the temperature of the loss."""

    # (N, k + 1) float32: the k likeliest tokens, then all others together; (N, k) if k is the whole vocabulary.
    log_probs: Tensor
    ids: Tensor  # (N, k) int64
    vocab_size: int  # the teacher's


class Mixture(NamedTuple):
    """Settings of the loss."""

    divergence: Divergence
    beta: float
    temperature: float
    cross_entropy_weight: float
    softcap: float | None


def linear_distillation(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    teacher: TeacherStates | TopLogProbs,
    *,
    divergence: Divergence = "forward_kl",
    beta: float = 0.5,
    temperature: float = 1.0,
    cross_entropy_weight: float = 0.0,
    num_targets: int | None = None,
    chunk_tokens: int = 1024,
    accumulation_dtype: Literal["float32", "weight"] = "float32",
    softcap: float | None = None,
    statistics: TokenStatistics | None = None,
    compile: bool = False,
) -> Tensor:
    """Return the weighted sum of divergence and cross-entropy over the positions that have a label.

    The divergence is between `softmax(hidden @ weight.T / temperature)` and the teacher's probabilities. Divide the sum
    by the number of targets in the optimizer step: a mean of means overweights short completions.

    Further arguments and the result are those of `linear_cross_entropy`.

    Args:
        hidden, weight: the student's last hidden states, (..., D), and output projection, (V or more, D).
        teacher: hidden states and output projection, or stored predictions. Neither gets gradients.
        divergence: `forward_kl`, `reverse_kl` or `jsd`; only jsd uses beta.
        temperature: divides the logits of both models in the divergence. Stored predictions must have the same
            temperature.
        cross_entropy_weight: share of the labels' cross-entropy, from 0 to 1; the divergence has the rest.
        softcap: of the student's logits.
        statistics: receives `divergence`, `cross_entropy`, `token_accuracy` (the number of correct predictions) and
            `entropy`, the last three at temperature 1; without gradients.
        compile: fuse the passes over a chunk's logits with torch.compile; ignored for stored predictions.

    Raises ValueError if shapes do not match, a value is out of range, or for an unknown divergence.
    """
    check_range("softcap", softcap is None or softcap > 0, softcap, "a number above 0, or None")
    check_range("temperature", temperature > 0, temperature, "a number above 0")
    for name, share in (("beta", beta), ("cross_entropy_weight", cross_entropy_weight)):
        check_range(name, 0 <= share <= 1, share, "0 to 1")
    if divergence not in get_args(Divergence):
        raise ValueError(f"divergence is {divergence!r}; expected one of {', '.join(get_args(Divergence))}.")
    if divergence == "jsd" and beta in (0, 1):
        divergence = "forward_kl" if beta == 0 else "reverse_kl"
    mixture = Mixture(divergence, beta, temperature, cross_entropy_weight, softcap)
    check_shapes("linear_distillation", hidden, weight, labels)
    vocab_size = min(len(weight), len(teacher.weight) if isinstance(teacher, TeacherStates) else teacher.vocab_size)
    if vocab_size < len(weight):
        weight = weight[:vocab_size]  # the gradient of the other rows is zero
    if isinstance(teacher, TeacherStates):
        states, is_of_targets = teacher.hidden, teacher.hidden.shape[:-1] != labels.shape
        if is_of_targets:
            labels, hidden = select_targets(labels, num_targets, hidden)
        if states.shape[:-1] != labels.shape or states.shape[-1:] != teacher.weight.shape[1:]:
            shapes = f"{tuple(states.shape)} and {tuple(teacher.weight.shape)}"
            raise ValueError(
                f"the teacher's hidden states and weight have the shapes {shapes}; expected (..., E) or (N, E) for N "
                "targets, and (V, E)."
            )
        if not is_of_targets:
            labels, hidden, states = select_targets(labels, num_targets, hidden, states)
        beside = _logits_of(states, teacher.weight[:vocab_size], teacher.softcap, compile)
        passes = [
            work_of(function, mixture, compile, is_capped=i > 0)
            for i, function in enumerate((_normalize, _compare_logits, _write_gradient))
        ]
    else:
        if teacher.vocab_size > len(weight):
            raise ValueError(
                f"the teacher's stored predictions are over {teacher.vocab_size} ids, and the student has "
                f"{len(weight)}. Store the predictions again (leanft score --top-k), or choose another student."
            )
        labels, hidden = select_targets(labels, num_targets, hidden)
        kept = teacher.log_probs, teacher.ids
        if any(len(tensor) != len(labels) for tensor in kept):
            shapes = " and ".join(str(tuple(tensor.shape)) for tensor in kept)
            raise ValueError(
                f"the teacher's stored predictions have the shapes {shapes}; expected {len(labels)} targets."
            )
        beside: Beside = lambda chunk: (kept[0][chunk], kept[1][chunk])  # noqa: E731
        # Not compiled: a compiler would store the logits without the top k in float32.
        passes = [work_of(_compare_kept, mixture, compile=False)]

    def work(*of_chunk: Tensor) -> None:
        for run_pass in passes:
            run_pass(*of_chunk)

    of_chunks = Passes(work, chunk_tokens or max(len(labels), 1), beside)
    loss, sums = SumOfLosses.apply(
        hidden,
        weight,
        labels,
        of_chunks if statistics is None else statistics.watched(of_chunks),
        sum_dtype(weight, accumulation_dtype),
        compute_dtype(weight),
        torch.is_grad_enabled(),
        NUM_COLUMNS,
    )
    if statistics is not None:
        statistics.add(
            divergence=sums[DIVERGENCE],
            cross_entropy=sums[CROSS_ENTROPY],
            token_accuracy=sums[IS_RIGHT],
            entropy=sums[ENTROPY],
        )
    return loss


@torch.no_grad()
def top_log_probs(
    teacher: TeacherStates,
    labels: Tensor,
    top_k: int,
    *,
    temperature: float = 1.0,
    num_targets: int | None = None,
    chunk_tokens: int = 1024,
) -> TopLogProbs:
    """Return the teacher's log-probabilities of the `top_k` likeliest tokens and of all others together, for each label
    (...) that is not `IGNORED_LABEL`.

    With the vocabulary's size as `top_k`, there is no column for the others. Raises ValueError for another `top_k` than
    1 to that size, or a temperature that is not above 0.
    """
    check_range("temperature", temperature > 0, temperature, "a number above 0")
    vocab_size = len(teacher.weight)
    if not 1 <= top_k <= vocab_size:
        raise ValueError(f"top_k is {top_k}; expected 1 to {vocab_size}, the size of the teacher's vocabulary.")
    labels, hidden = select_targets(labels, num_targets, teacher.hidden)
    has_rest = top_k < vocab_size
    dtype = torch.promote_types(teacher.weight.dtype, torch.float32)
    log_probs = torch.empty(len(labels), top_k + has_rest, dtype=dtype, device=hidden.device)
    ids = torch.empty(len(labels), top_k, dtype=torch.int64, device=hidden.device)
    work = work_of(_keep_top, Mixture("forward_kl", 0.5, temperature, 0.0, teacher.softcap), compile=False)
    for chunk, _, logits in logits_in_chunks(hidden, teacher.weight, chunk_tokens or max(len(labels), 1)):
        work(logits, log_probs[chunk], ids[chunk])
    return TopLogProbs(log_probs, ids, vocab_size)


Beside = Callable[[slice], tuple[Tensor, ...]]


def _logits_of(hidden: Tensor, weight: Tensor, softcap: float | None, compile: bool) -> Beside:
    """Return a function that computes the teacher's logits of a chunk, in the teacher's dtype."""
    logits_of = ChunkLogits(weight)
    cap: Work = capping(softcap, compile) if softcap is not None else lambda logits: None

    def beside(chunk: slice) -> tuple[Tensor, ...]:
        logits = logits_of(hidden[chunk].to(weight.dtype))
        cap(logits)
        return (logits,)

    return beside


# Passes over a chunk's logits, after the soft cap.

# With logits of both models there are 3 passes, compiled separately. If a probability were used twice in a fused pass,
# the compiler would store all probabilities in float32, which takes 4x the memory of the logits.


def _normalize(mixture: Mixture, logits: Tensor, labels: Tensor, teacher: Tensor, rows: Tensor) -> None:
    """Write the student's metrics, from logits (C, V), and the logs of both softmax normalizers."""
    wide = logits.to(rows.dtype)
    metrics, log_total = token_values(wide, labels[:, None], Terms())
    log_z = log_total if mixture.temperature == 1 else _log_z(wide / mixture.temperature)
    of_teacher = _log_z(teacher.to(rows.dtype) / mixture.temperature)
    later = torch.zeros_like(log_z)
    rows.copy_(
        torch.cat(
            [later, metrics[:, IS_RIGHT:CROSS_ENTROPY], metrics[:, :1], later, later, log_total, log_z, of_teacher], 1
        )
    )


def _compare_logits(mixture: Mixture, logits: Tensor, labels: Tensor, teacher: Tensor, rows: Tensor) -> None:
    """Write the divergence and the mixed loss."""
    divergence, kl = _divergence(mixture, *_log_probs(mixture, logits, teacher, rows))
    share = mixture.cross_entropy_weight
    columns = rows.split(1, 1)
    loss = (1 - share) * divergence + share * columns[CROSS_ENTROPY]
    rows.copy_(torch.cat([loss, *columns[IS_RIGHT:DIVERGENCE], divergence, kl, *columns[LOG_Z:]], 1))


def _write_gradient(mixture: Mixture, logits: Tensor, labels: Tensor, teacher: Tensor, rows: Tensor) -> None:
    """Overwrite the student's logits with the gradient of the mixed loss."""
    gradient = _gradient(mixture, *_log_probs(mixture, logits, teacher, rows), rows[:, KL : KL + 1])
    logits.copy_(_mixed(mixture, gradient, logits.to(rows.dtype), labels, rows[:, LOG_Z : LOG_Z + 1]))


def _compare_kept(
    mixture: Mixture, logits: Tensor, labels: Tensor, log_probs: Tensor, ids: Tensor, rows: Tensor
) -> None:
    """Do the work of all three passes for stored predictions; student logits (C, V)."""
    wide = logits.to(rows.dtype)
    values = wide / mixture.temperature
    top, rest, log_rest = _without_top(values, ids, has_rest=log_probs.shape[1] > ids.shape[1])
    student = (top if rest is None else torch.cat([top, log_rest], 1)).log_softmax(1)  # (C, G)
    divergence, kl = _divergence(mixture, student, log_probs.to(rows.dtype))
    of_outcomes = _gradient(mixture, student, log_probs.to(rows.dtype), kl)
    # The gradient of the last outcome is divided among the other tokens by their probabilities.
    gradient = torch.zeros_like(values) if rest is None else rest.sub_(log_rest).exp_().mul_(of_outcomes[:, -1:])
    gradient.scatter_(1, ids, of_outcomes[:, : ids.shape[1]])
    metrics, log_total = token_values(wide, labels[:, None], Terms())
    cross_entropy, share = metrics[:, :1], mixture.cross_entropy_weight
    loss = (1 - share) * divergence + share * cross_entropy
    later = torch.zeros_like(loss)
    rows.copy_(torch.cat([loss, metrics[:, IS_RIGHT:CROSS_ENTROPY], cross_entropy, divergence, kl, *(later,) * 3], 1))
    logits.copy_(_mixed(mixture, gradient, wide, labels, log_total))


def _keep_top(mixture: Mixture, logits: Tensor, log_probs: Tensor, ids: Tensor) -> None:
    values = logits.to(log_probs.dtype) / mixture.temperature
    ids.copy_(values.topk(ids.shape[1], dim=1).indices)
    top, rest, log_rest = _without_top(values, ids, has_rest=log_probs.shape[1] > ids.shape[1])
    log_probs.copy_((top if rest is None else torch.cat([top, log_rest], 1)).log_softmax(1))


def _without_top(values: Tensor, ids: Tensor, has_rest: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """Split values (C, V) into those at `ids` (C, k), a copy with -inf at `ids`, and the log-sum-exp of that copy (C,
    1).

    The log-sum-exp is exact even if the rest is tiny.
    """
    top = values.gather(1, ids)
    if not has_rest:
        return top, None, top
    rest = values.scatter(1, ids, -math.inf)
    return top, rest, rest.logsumexp(1, keepdim=True)


def _log_z(values: Tensor) -> Tensor:
    highest = values.amax(1, keepdim=True)
    return (values - highest).exp().sum(1, keepdim=True).log() + highest


def _log_probs(mixture: Mixture, logits: Tensor, teacher: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of student and teacher at the temperature, (C, V)."""
    student, other = (of.to(rows.dtype) / mixture.temperature for of in (logits, teacher))
    return student - rows[:, LOG_Z_STUDENT : LOG_Z_STUDENT + 1], other - rows[:, LOG_Z_TEACHER : LOG_Z_TEACHER + 1]


def _middle(mixture: Mixture, student: Tensor, teacher: Tensor) -> Tensor:
    """Return log m, (C, G); not for forward_kl."""
    if mixture.divergence == "reverse_kl":
        return teacher
    return torch.logaddexp(student + math.log1p(-mixture.beta), teacher + math.log(mixture.beta))


def _divergence(mixture: Mixture, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Return the divergence of log-probabilities (C, G), and KL(s || m) for its gradient; (C, 1) each."""
    if mixture.divergence == "forward_kl":
        divergence = (teacher.exp() * (teacher - student)).sum(1, keepdim=True)
        return divergence, torch.zeros_like(divergence)
    middle = _middle(mixture, student, teacher)
    kl = (student.exp() * (student - middle)).sum(1, keepdim=True)
    if mixture.divergence == "reverse_kl":
        return kl, kl
    other = (teacher.exp() * (teacher - middle)).sum(1, keepdim=True)
    return mixture.beta * other + (1 - mixture.beta) * kl, kl


def _gradient(mixture: Mixture, student: Tensor, teacher: Tensor, kl: Tensor) -> Tensor:
    """Return the gradient of the divergence with respect to the student's logits at the temperature, (C, G)."""
    if mixture.divergence == "forward_kl":
        return student.exp() - teacher.exp()
    gradient = student.exp() * (student - _middle(mixture, student, teacher) - kl)
    return gradient if mixture.divergence == "reverse_kl" else gradient * (1 - mixture.beta)


def _mixed(mixture: Mixture, gradient: Tensor, wide: Tensor, labels: Tensor, log_total: Tensor) -> Tensor:
    """Mix the gradients of divergence (C, V) and cross-entropy by their weights, and apply the soft cap's
    derivative."""
    share = mixture.cross_entropy_weight
    gradient = gradient * ((1 - share) / mixture.temperature)
    if share:
        gradient = gradient + share * gradient_of(wide, wide, labels[:, None], log_total, Terms())
    if mixture.softcap is not None:
        gradient = gradient * (1 - (wide / mixture.softcap).square())
    return gradient
