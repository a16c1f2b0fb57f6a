"""How far a student's predictions are from a teacher's, with neither's logits in memory for more than a chunk of tokens.

A chunk of tokens is projected twice, by the student's output layer and by the teacher's, whose hidden sizes may differ;
what follows is `linear_cross_entropy`'s pass, gradients included (`chunked_softmax`). Divergences of the student's
probabilities s from the teacher's t, both at one temperature, and their gradients over the student's logits times that:

    forward_kl    sum t (log t - log s)                            s - t
    reverse_kl    sum s (log s - log t)                            s (log s - log t - KL(s || m)), m = t
    jsd           beta KL(t || m) + (1 - beta) KL(s || m)          (1 - beta) s (log s - log m - KL(s || m))
                  with m = (1 - beta) s + beta t

jsd goes to 0 with beta at either end; there it is *defined* as forward_kl (0) and reverse_kl (1), as in its paper. A loss is
not multiplied by the square of the temperature, as some do. It may be mixed with the cross-entropy of the labels.

Vocabularies of one tokenizer may be padded to different sizes: then the rows that both have are compared, and the
others of the larger are left out, as if no softmax knew them.

A teacher that does not fit beside the student can be asked beforehand (`top_log_probs`): for each token its k likeliest next
ones are kept, and how likely it is to be any of the rest. The divergence is then over k + 1 outcomes. Without the last the
student could gain by moving probability to where nobody looks, and a KL would fall below 0.

Source: Agarwal et al., On-Policy Distillation of Language Models, 2023 (arXiv:2306.13649), for the divergences; the chunks
are our own. Left out: a symmetric KL, and weights of tokens.

Shapes: N target tokens, C tokens a chunk, D and E hidden sizes of student and teacher, V their shared vocabulary, k tokens
kept, G outcomes that are compared (V or k + 1).
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

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
    told_of,
    work_of,
)
from lean_ft.losses.linear_cross_entropy import SumOfLosses, select_targets
from lean_ft.losses.statistics import TokenStatistics

# What is told of each token, behind its loss, IS_RIGHT and ENTROPY, and what one pass tells the next.
CROSS_ENTROPY, DIVERGENCE, KL, LOG_Z, LOG_Z_STUDENT, LOG_Z_TEACHER = range(3, 9)
NUM_COLUMNS = 9

Divergence = Literal["forward_kl", "reverse_kl", "jsd"]


class TeacherStates(NamedTuple):
    """A teacher that is there: what its output layer makes its logits of."""

    hidden: Tensor  # (..., E), at the student's positions
    weight: Tensor  # (V or more, E)
    softcap: float | None = None


class TopLogProbs(NamedTuple):
    """What was kept of a teacher's predictions of N targets, at the temperature of the loss."""

    # (N, k + 1) float32: of the k likeliest tokens, and of all others together; (N, k) where k is all.
    log_probs: Tensor
    ids: Tensor  # (N, k) int64
    vocab_size: int  # that the teacher chose from


class Mixture(NamedTuple):
    """What a token's loss is made of."""

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
    """Sums over the positions that have a label the divergence of `softmax(hidden @ weight.T / temperature)` from the
    teacher's, and the cross-entropy of the label, by their weights.

    Divide the sum by the optimizer step's number of targets: a mean of means would overweight short answers.

    Args:
        hidden: the student's last hidden states, (..., D).
        weight: its output projection, (V or more, D); it may be tied to the embedding.
        labels: the token that each position must predict, (...) of int64; `IGNORED_LABEL` where nothing is trained.
        teacher: its hidden states and output projection, or what was kept of its predictions. Nothing of it gets gradients.
        divergence: which, as the module says; beta is jsd's.
        temperature: what the logits of both are divided by for the divergence. Of what was kept, that of the student's.
        cross_entropy_weight: the share of the labels' cross-entropy, from 0 to 1; the divergence has the rest.
        num_targets: how many labels are not ignored, if the caller knows it; else it is counted, which makes a GPU wait.
        chunk_tokens: target tokens whose logits exist at a time; 0 takes all of them at once.
        accumulation_dtype: what sums the weight's gradient over chunks, `float32` or the weight's own type.
        softcap: the student's logits become `softcap * tanh(logit / softcap)` first; None leaves them.
        statistics: where to add `divergence`, `cross_entropy`, `token_accuracy` (the number of right predictions) and
            `entropy`, the last three at temperature 1; without gradients.
        compile: fuse the passes over a chunk's logits with torch.compile. What was kept of a teacher is compared without.

    Returns:
        The sum, a float32 scalar (float64 for float64 inputs); an exact zero when no position has a label.

    Raises:
        ValueError: when the shapes do not belong together, or a setting is out of its range.
    """
    mixture = _mixture(divergence, beta, temperature, cross_entropy_weight, softcap)
    if hidden.shape[:-1] != labels.shape or weight.ndim != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            "linear_distillation expects hidden (..., D), weight (V, D) and labels (...), "
            f"but got hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and labels {tuple(labels.shape)}"
        )
    vocab_size = min(len(weight), len(teacher.weight) if isinstance(teacher, TeacherStates) else teacher.vocab_size)
    if vocab_size < len(weight):
        weight = weight[:vocab_size]  # its gradient is filled up with zeros
    if isinstance(teacher, TeacherStates):
        if teacher.hidden.shape[:-1] != labels.shape or teacher.hidden.shape[-1:] != teacher.weight.shape[1:]:
            raise ValueError(
                f"linear_distillation expects the teacher's hidden states at the labels {tuple(labels.shape)}, and its weight "
                f"(V, E), but got {tuple(teacher.hidden.shape)} and {tuple(teacher.weight.shape)}"
            )
        labels, hidden, states = select_targets(labels, num_targets, hidden, teacher.hidden)
        beside = _logits_of(states, teacher.weight[:vocab_size], teacher.softcap, compile)
        passes = [
            work_of(function, mixture, compile, is_capped=i > 0)
            for i, function in enumerate((_normalize, _compare_logits, _write_gradient))
        ]
    else:
        labels, hidden = select_targets(labels, num_targets, hidden)
        kept = teacher.log_probs, teacher.ids
        if any(len(tensor) != len(labels) for tensor in kept):
            raise ValueError(
                f"linear_distillation expects what was kept of the teacher for {len(labels)} targets, but got "
                f"{' and '.join(str(tuple(tensor.shape)) for tensor in kept)}"
            )
        beside: Beside = lambda chunk: (kept[0][chunk], kept[1][chunk])  # noqa: E731
        # A compiler would keep logits from which the kept tokens are taken out, in float32.
        passes = [work_of(_compare_kept, mixture, compile=False)]

    def work(*of_chunk: Tensor) -> None:
        for one in passes:
            one(*of_chunk)

    loss, sums = SumOfLosses.apply(
        hidden,
        weight,
        labels,
        chunk_tokens or max(len(labels), 1),
        sum_dtype(weight, accumulation_dtype),
        compute_dtype(weight),
        torch.is_grad_enabled(),
        work,
        NUM_COLUMNS,
        beside,
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
    """Of the teacher's predictions, where there is a label, the log-probabilities of the `top_k` likeliest tokens and of all
    others together.

    Args:
        teacher: its hidden states (..., E) and output projection (V, E).
        labels: (...) of int64; `IGNORED_LABEL` where nothing is kept.
        top_k: from 1 to V; of V nothing is left for the others.

    Raises:
        ValueError: for a `top_k` or temperature out of range.
    """
    vocab_size = len(teacher.weight)
    if not 1 <= top_k <= vocab_size or temperature <= 0:
        raise ValueError(
            f"top_log_probs expects top_k from 1 to the vocabulary's {vocab_size} and temperature above 0, but got "
            f"top_k={top_k} and temperature={temperature}"
        )
    labels, hidden = select_targets(labels, num_targets, teacher.hidden)
    has_rest = top_k < vocab_size
    dtype = torch.promote_types(teacher.weight.dtype, torch.float32)
    log_probs = torch.empty(len(labels), top_k + has_rest, dtype=dtype, device=hidden.device)
    ids = torch.empty(len(labels), top_k, dtype=torch.int64, device=hidden.device)
    work = work_of(_keep_top, _mixture("forward_kl", 0.5, temperature, 0.0, teacher.softcap), compile=False)
    for chunk, _, logits in logits_in_chunks(hidden, teacher.weight, chunk_tokens or max(len(labels), 1)):
        work(logits, log_probs[chunk], ids[chunk])
    return TopLogProbs(log_probs, ids, vocab_size)


def _mixture(
    divergence: Divergence, beta: float, temperature: float, cross_entropy_weight: float, softcap: float | None
) -> Mixture:
    if divergence not in ("forward_kl", "reverse_kl", "jsd"):
        raise ValueError(f"divergence is {divergence!r}; expected forward_kl, reverse_kl or jsd")
    in_range = 0 <= beta <= 1 and 0 <= cross_entropy_weight <= 1 and temperature > 0
    if not in_range or (softcap is not None and softcap <= 0):
        raise ValueError(
            "a distillation expects beta and cross_entropy_weight from 0 to 1, temperature above 0 and softcap above 0 or "
            f"None, but got beta={beta}, cross_entropy_weight={cross_entropy_weight}, temperature={temperature} and "
            f"softcap={softcap}"
        )
    if divergence == "jsd" and beta in (0, 1):
        divergence = "forward_kl" if beta == 0 else "reverse_kl"
    return Mixture(divergence, beta, temperature, cross_entropy_weight, softcap)


Beside = Callable[[slice], tuple[Tensor, ...]]


def _logits_of(hidden: Tensor, weight: Tensor, softcap: float | None, compile: bool) -> Beside:
    """The teacher's logits of a chunk, in its own type."""
    logits_of = ChunkLogits(weight)
    cap: Work = capping(softcap, compile) if softcap is not None else lambda logits: None

    def beside(chunk: slice) -> tuple[Tensor, ...]:
        logits = logits_of(hidden[chunk].to(weight.dtype))
        cap(logits)
        return (logits,)

    return beside


# The passes over a chunk's logits, capped already. --------------------------------------------------------------------------

# Three where both have logits, each compiled by itself: of one that needed a probability in two of them, a compiler would keep
# all probabilities in float32, which takes four times the memory of the logits.


def _normalize(mixture: Mixture, logits: Tensor, labels: Tensor, teacher: Tensor, rows: Tensor) -> None:
    """What is told of the student's logits (C, V), and the logarithms of both softmaxes' normalisers."""
    wide = logits.to(rows.dtype)
    told, log_total = told_of(wide, labels[:, None], Terms())
    log_z = log_total if mixture.temperature == 1 else _log_z(wide / mixture.temperature)
    of_teacher = _log_z(teacher.to(rows.dtype) / mixture.temperature)
    later = torch.zeros_like(log_z)
    rows.copy_(
        torch.cat([later, told[:, IS_RIGHT:CROSS_ENTROPY], told[:, :1], later, later, log_total, log_z, of_teacher], 1)
    )


def _compare_logits(mixture: Mixture, logits: Tensor, labels: Tensor, teacher: Tensor, rows: Tensor) -> None:
    """The divergence and the mixed loss."""
    divergence, kl = _divergence(mixture, *_log_probs(mixture, logits, teacher, rows))
    share = mixture.cross_entropy_weight
    known = rows.split(1, 1)
    loss = (1 - share) * divergence + share * known[CROSS_ENTROPY]
    rows.copy_(torch.cat([loss, *known[IS_RIGHT:DIVERGENCE], divergence, kl, *known[LOG_Z:]], 1))


def _write_gradient(mixture: Mixture, logits: Tensor, labels: Tensor, teacher: Tensor, rows: Tensor) -> None:
    """The mixed loss's gradient over the student's logits, in their place."""
    gradient = _gradient(mixture, *_log_probs(mixture, logits, teacher, rows), rows[:, KL : KL + 1])
    logits.copy_(_mixed(mixture, gradient, logits.to(rows.dtype), labels, rows[:, LOG_Z : LOG_Z + 1]))


def _compare_kept(
    mixture: Mixture, logits: Tensor, labels: Tensor, log_probs: Tensor, ids: Tensor, rows: Tensor
) -> None:
    """All three of the student's logits, (C, V), and of what was kept of the teacher."""
    wide = logits.to(rows.dtype)
    values = wide / mixture.temperature
    top, rest, log_rest = _without_top(values, ids, has_rest=log_probs.shape[1] > ids.shape[1])
    student = (top if rest is None else torch.cat([top, log_rest], 1)).log_softmax(1)  # (C, G)
    divergence, kl = _divergence(mixture, student, log_probs.to(rows.dtype))
    of_outcomes = _gradient(mixture, student, log_probs.to(rows.dtype), kl)
    # Of the rest's probability a token gets its share of the gradient.
    gradient = torch.zeros_like(values) if rest is None else rest.sub_(log_rest).exp_().mul_(of_outcomes[:, -1:])
    gradient.scatter_(1, ids, of_outcomes[:, : ids.shape[1]])
    told, log_total = told_of(wide, labels[:, None], Terms())
    cross_entropy, share = told[:, :1], mixture.cross_entropy_weight
    loss = (1 - share) * divergence + share * cross_entropy
    later = torch.zeros_like(loss)
    rows.copy_(torch.cat([loss, told[:, IS_RIGHT:CROSS_ENTROPY], cross_entropy, divergence, kl, *(later,) * 3], 1))
    logits.copy_(_mixed(mixture, gradient, wide, labels, log_total))


def _keep_top(mixture: Mixture, logits: Tensor, log_probs: Tensor, ids: Tensor) -> None:
    values = logits.to(log_probs.dtype) / mixture.temperature
    ids.copy_(values.topk(ids.shape[1], dim=1).indices)
    top, rest, log_rest = _without_top(values, ids, has_rest=log_probs.shape[1] > ids.shape[1])
    log_probs.copy_((top if rest is None else torch.cat([top, log_rest], 1)).log_softmax(1))


def _without_top(values: Tensor, ids: Tensor, has_rest: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """Of values (C, V) those of `ids` (C, k); the others, with -inf in place of these; and the logarithm of the sum of the
    others' exponentials (C, 1), which is exact however little that is."""
    top = values.gather(1, ids)
    if not has_rest:
        return top, None, top
    rest = values.scatter(1, ids, -math.inf)
    return top, rest, rest.logsumexp(1, keepdim=True)


def _log_z(values: Tensor) -> Tensor:
    highest = values.amax(1, keepdim=True)
    return (values - highest).exp().sum(1, keepdim=True).log() + highest


def _log_probs(mixture: Mixture, logits: Tensor, teacher: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Those of the student and of the teacher at the temperature, (C, V)."""
    student, other = (of.to(rows.dtype) / mixture.temperature for of in (logits, teacher))
    return student - rows[:, LOG_Z_STUDENT : LOG_Z_STUDENT + 1], other - rows[:, LOG_Z_TEACHER : LOG_Z_TEACHER + 1]


def _middle(mixture: Mixture, student: Tensor, teacher: Tensor) -> Tensor:
    """What the student's log-probabilities are compared with, (C, G); not for forward_kl."""
    if mixture.divergence == "reverse_kl":
        return teacher
    return torch.logaddexp(student + math.log1p(-mixture.beta), teacher + math.log(mixture.beta))


def _divergence(mixture: Mixture, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Of log-probabilities (C, G) the divergence, and KL(s || m), which its gradient needs; (C, 1) each."""
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
    """The divergence's over the student's logits at the temperature, (C, G)."""
    if mixture.divergence == "forward_kl":
        return student.exp() - teacher.exp()
    gradient = student.exp() * (student - _middle(mixture, student, teacher) - kl)
    return gradient if mixture.divergence == "reverse_kl" else gradient * (1 - mixture.beta)


def _mixed(mixture: Mixture, gradient: Tensor, wide: Tensor, labels: Tensor, log_total: Tensor) -> Tensor:
    """The divergence's gradient (C, V) with its share, the cross-entropy's, and the way through the soft cap."""
    share = mixture.cross_entropy_weight
    gradient = gradient * ((1 - share) / mixture.temperature)
    if share:
        gradient = gradient + share * gradient_of(wide, wide, labels[:, None], log_total, Terms())
    if mixture.softcap is not None:
        gradient = gradient * (1 - (wide / mixture.softcap).square())
    return gradient
