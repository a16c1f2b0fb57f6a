"""Log-probabilities of tokens, for any loss, without full logits.

Input is a pair of position and token per label, not one label per position: the last position of a shared prompt
predicts the first token of several completions. Logits exist one chunk of pairs at a time (`chunked_softmax`). The
forward pass does not know the loss's gradient, so there are two schemes:

    trained output layer    forward stores log Z of each pair, backward recomputes each chunk of logits: 4 products
    frozen output layer     forward computes the gradient of each log-probability with respect to its hidden state,
                            (N, D), backward scales its rows: 2 products

For a plain sum over tokens use `linear_cross_entropy`, with 3 and 2 products.

Source: our own. The weight's gradient cannot be computed in the forward pass, since the loss weights each pair
differently.

Shapes: N pairs, C pairs per chunk, D hidden size, V vocabulary.
"""

from typing import Literal

import torch
from torch import Tensor

from lean_ft.losses.chunked_softmax import (
    ENTROPY,
    IS_RIGHT,
    LOG_SUM_SQUARES,
    LOG_Z,
    LOSS,
    Terms,
    WeightGradient,
    compute_dtype,
    describe,
    gradient,
    logits_in_chunks,
    sum_dtype,
)
from lean_ft.losses.linear_cross_entropy import check_range
from lean_ft.losses.statistics import TokenStatistics
from lean_ft.system.autograd import AutogradContext


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    index: Tensor,
    label: Tensor,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
    accumulation_dtype: Literal["float32", "weight"] = "float32",
    softcap: float | None = None,
    log_sum_squares: Tensor | None = None,
    entropies: Tensor | None = None,
    statistics: TokenStatistics | None = None,
    compile: bool = False,
) -> Tensor:
    """Return the log-probability of each token `label` under `softmax(hidden[index] @ weight.T / temperature)`.

    Further arguments are those of `linear_cross_entropy`.

    Args:
        hidden: the decoder's last hidden states, (..., D); flattened to positions.
        index: the flattened position that predicts, (N,) int64; positions may repeat.
        label: the predicted token, (N,) int64.
        temperature: divides the logits, after the soft cap.
        log_sum_squares: (N,), receives the log of the sum of the squared probabilities of all tokens.
        entropies: (N,), receives the entropy of each pair's distribution, in nats.

    Returns:
        (N,) float32 (float64 for float64 inputs), at most 0. Bitwise equal with and without gradients.

    Raises ValueError if shapes do not match, or the temperature or softcap is not above 0.
    """
    check_range("temperature", temperature > 0, temperature, "a number above 0")
    check_range("softcap", softcap is None or softcap > 0, softcap, "a number above 0, or None")
    if index.shape != label.shape or index.ndim != 1 or weight.ndim != 2 or hidden.shape[-1] != weight.shape[1]:
        shapes = " and ".join(str(tuple(tensor.shape)) for tensor in (hidden, weight, index, label))
        raise ValueError(
            f"expected hidden (..., D), weight (V, D), index (N,) and label (N,); got the shapes {shapes}."
        )
    terms = Terms(softcap, temperature=temperature, with_squares=log_sum_squares is not None)
    log_probs, rows = _LinearLogProbs.apply(
        hidden.flatten(0, -2).index_select(0, index),
        weight,
        label,
        chunk_tokens or max(len(label), 1),
        sum_dtype(weight, accumulation_dtype),
        compute_dtype(weight),
        torch.is_grad_enabled(),
        terms,
        compile,
    )
    if statistics is not None:
        sums = rows.sum(0)
        statistics.add(token_accuracy=sums[IS_RIGHT], entropy=sums[ENTROPY])
    if entropies is not None:
        entropies.copy_(rows[:, ENTROPY])
    if log_sum_squares is not None:
        log_sum_squares.copy_(rows[:, LOG_SUM_SQUARES])
    return log_probs


class _LogProbsContext(AutogradContext[Tensor, Tensor, Tensor, Tensor]):
    """Saves hidden, weight, label and log Z if backward recomputes the logits, otherwise nothing."""

    recomputes: bool
    settings: tuple[int, torch.dtype, torch.dtype, Terms, bool]  # only if it recomputes
    grad_hidden: Tensor | None  # of each log-probability, until backward has used it


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _LogProbsContext,
        hidden: Tensor,  # (N, D)
        weight: Tensor,  # (V, D)
        label: Tensor,  # (N,)
        chunk_tokens: int,
        accumulation_dtype: torch.dtype,
        compute_dtype: torch.dtype,
        grad_enabled: bool,
        terms: Terms,
        compile: bool,
    ) -> tuple[Tensor, Tensor]:
        needs_hidden, needs_weight = (grad_enabled and needed for needed in ctx.needs_input_grad[:2])
        projection = weight.to(compute_dtype)
        keeps_gradient = needs_hidden and not needs_weight
        grad_hidden = torch.empty_like(hidden) if keeps_gradient else None

        rows_dtype = torch.promote_types(compute_dtype, torch.float32)
        rows = torch.empty(hidden.shape[0], terms.num_columns, dtype=rows_dtype, device=hidden.device)
        # Use the same function with and without gradients: a differently compiled one would round differently.
        describe_chunk, with_gradient = describe(terms, compile), gradient(terms, compile, is_capped=True)
        minus_one = torch.full((min(chunk_tokens, len(label)),), -1.0, dtype=rows_dtype, device=hidden.device)
        for chunk, _, logits in logits_in_chunks(hidden, projection, chunk_tokens):
            describe_chunk(logits, label[chunk], rows[chunk])
            if grad_hidden is not None:
                with_gradient(logits, label[chunk], rows[chunk, LOG_Z], minus_one[: len(logits)])
                grad_hidden[chunk] = logits @ projection
        if needs_weight:
            ctx.save_for_backward(hidden, weight, label, rows[:, LOG_Z].clone())
            ctx.settings = chunk_tokens, accumulation_dtype, compute_dtype, terms, compile
        ctx.grad_hidden, ctx.recomputes = grad_hidden, needs_weight
        ctx.mark_non_differentiable(rows)
        return rows[:, LOSS].neg(), rows

    @staticmethod
    def backward(ctx: _LogProbsContext, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grad, _ = grad_outputs  # (N,)
        if not ctx.recomputes:
            if ctx.grad_hidden is None:
                raise RuntimeError("the gradients of these log-probabilities were used already. Compute them again.")
            grad_hidden, ctx.grad_hidden = ctx.grad_hidden.mul_(grad[:, None]), None
            return grad_hidden, *(None,) * 8
        with_gradients = recomputed_log_probs(
            grad, *ctx.saved_tensors, *ctx.settings, needs_hidden=ctx.needs_input_grad[0]
        )
        return *with_gradients, *(None,) * 7


def recomputed_log_probs(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    label: Tensor,
    log_z: Tensor,
    chunk_tokens: int,
    accumulation_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    terms: Terms,
    compile: bool,
    needs_hidden: bool,
) -> tuple[Tensor | None, Tensor]:
    """Recompute the logits and return the gradients of the hidden states and of the weight."""
    projection, scale = weight.to(compute_dtype), grad.to(log_z.dtype).neg()
    grad_hidden = torch.empty_like(hidden) if needs_hidden else None
    weight_sum, with_gradient = WeightGradient(weight, accumulation_dtype), gradient(terms, compile)
    for chunk, chunk_hidden, logits in logits_in_chunks(hidden, projection, chunk_tokens):
        with_gradient(logits, label[chunk], log_z[chunk], scale[chunk])
        if grad_hidden is not None:
            grad_hidden[chunk] = logits @ projection
        weight_sum.add(logits, chunk_hidden)
    return grad_hidden, weight_sum.scaled(1.0)
