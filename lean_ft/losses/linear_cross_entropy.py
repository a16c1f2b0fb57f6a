"""Output projection and cross-entropy in one pass over chunks of tokens.

Each chunk of tokens is processed completely, from hidden states to logits, loss and gradients, before the next chunk
(`chunked_softmax`). Gradients are computed during the forward pass; backward only scales them. Positions without a
label are dropped before the projection.

Relative error of a bfloat16 weight's gradient against float64, for 2,048 random targets: 3.0e-3 for the plain bfloat16
computation, 3.4e-3 here with 16 chunks and float32 sums, 5.4e-3 with bfloat16 sums. Rounding the exact gradient to
bfloat16 costs 1.7e-3. The tests check these bounds.

The same passes over a chunk apply the model's soft cap, label smoothing and the z-loss, which keeps the softmax
normalizer near 1. They also sum the number of correct predictions and the entropy, without synchronizing with the
device.

Source: Liger Kernel's fused linear cross-entropy (Hsu et al., 2024, arXiv:2410.10989) for gradients in the forward pass
over chunks; PaLM (Chowdhery et al., 2022, arXiv:2204.02311) for the z-loss. Not supported: class weights.

Shapes: N target tokens, C tokens per chunk, D hidden size, V vocabulary.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from lean_ft.losses.chunked_softmax import (
    ENTROPY,
    IS_RIGHT,
    LOSS,
    Terms,
    WeightGradient,
    Work,
    compute_dtype,
    describe_with_gradient,
    logits_in_chunks,
    sum_dtype,
)
from lean_ft.losses.statistics import TokenStatistics
from lean_ft.system.autograd import AutogradContext

if TYPE_CHECKING:
    from lean_ft.parallel.vocabulary import CutVocabulary

IGNORED_LABEL = -100


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    num_targets: int | None = None,
    chunk_tokens: int = 1024,
    accumulation_dtype: Literal["float32", "weight"] = "float32",
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    statistics: TokenStatistics | None = None,
    compile: bool = False,
    cut: "CutVocabulary | None" = None,
) -> Tensor:
    """Return the cross-entropy of `softmax(hidden @ weight.T)`, summed over the positions that have a label.

    Divide the sum by the number of targets in the optimizer step: a mean of means overweights short completions.

    Args:
        hidden: the decoder's last hidden states, (..., D).
        weight: the output projection, (V, D).
        labels: the target token of each position, (...) int64; `IGNORED_LABEL` for untrained positions.
        num_targets: number of labels that are not ignored; None counts them, which synchronizes with a GPU.
        chunk_tokens: target tokens per chunk of logits; 0 processes all at once.
        accumulation_dtype: dtype in which the weight's gradient is summed over chunks.
        softcap: replace logits by `softcap * tanh(logit / softcap)` (Gemma 2); None leaves them unchanged.
        label_smoothing: share of each target's probability that is spread over the whole vocabulary.
        z_loss: coefficient of the squared log of the softmax normalizer, added to each token's loss.
        statistics: receives `token_accuracy`, the number of correct predictions, and `entropy`; without gradients.
        compile: fuse the passes over a chunk's logits with torch.compile.
        cut: a `lean_ft.parallel.vocabulary.CutVocabulary` if `weight` has only this rank's rows. All ranks call this
            with their own positions, and call backward on the result times the same factor. A chunk has `chunk_tokens`
            of all ranks together.

    Returns:
        The sum, a float32 scalar (float64 for float64 inputs); exactly zero if no position has a label.

    Raises ValueError if shapes do not match, or a value is out of range.
    """
    check_range("softcap", softcap is None or softcap > 0, softcap, "a number above 0, or None")
    check_range("label_smoothing", 0 <= label_smoothing < 1, label_smoothing, "0 or more and less than 1")
    check_range("z_loss", z_loss >= 0, z_loss, "0 or more")
    terms = Terms(softcap, label_smoothing, z_loss, vocab_size=0 if cut is None else cut.vocab_size)
    check_shapes("linear_cross_entropy", hidden, weight, labels)
    labels, hidden = select_targets(labels, num_targets, hidden)
    passes: TokenPasses = Passes(describe_with_gradient(terms, compile), chunk_tokens or max(len(labels), 1))
    if cut is not None:
        needs_gradient = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
        passes = cut.passes(len(labels), chunk_tokens, terms, compile, needs_gradient)
    passes = passes if statistics is None else statistics.watched(passes)
    loss, sums = SumOfLosses.apply(
        hidden,
        weight,
        labels,
        passes,
        sum_dtype(weight, accumulation_dtype),
        compute_dtype(weight),
        torch.is_grad_enabled(),
        terms.num_columns,
    )
    if statistics is not None:
        statistics.add(token_accuracy=sums[IS_RIGHT], entropy=sums[ENTROPY])
    return loss


def check_shapes(loss: str, hidden: Tensor, weight: Tensor, labels: Tensor) -> None:
    if hidden.shape[:-1] != labels.shape or weight.ndim != 2 or hidden.shape[-1] != weight.shape[1]:
        shapes = f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and labels {tuple(labels.shape)}"
        raise ValueError(f"{loss}: expected hidden (..., D), weight (V, D) and labels (...); got {shapes}.")


def check_range(name: str, is_valid: bool, value: float | None, expected: str) -> None:
    if not is_valid:
        raise ValueError(f"{name} is {value}; expected {expected}.")


def select_targets(labels: Tensor, num_targets: int | None, *states: Tensor) -> tuple[Tensor, ...]:
    """Select labels (...) and states (..., D) at the N positions that have a label: (N,) and (N, D) each."""
    labels, states = labels.flatten(), tuple(state.flatten(0, -2) for state in states)
    if num_targets is None:
        num_targets = int((labels != IGNORED_LABEL).sum())
    if num_targets == labels.numel():
        return labels, *states
    # With a known size, the host does not wait for the GPU to count the positions.
    targets = torch.nonzero_static(labels != IGNORED_LABEL, size=num_targets).squeeze(1)
    return labels.index_select(0, targets), *(state.index_select(0, targets) for state in states)


class TokenPasses(Protocol):
    """The work of `SumOfLosses` on each chunk of tokens. `lean_ft.parallel.vocabulary` has the passes of a sharded
    vocabulary."""

    def chunks(self, hidden: Tensor, projection: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield each chunk's slice of the tokens, its hidden states (C, D) and its logits (C, V)."""
        ...

    def work(self, chunk: slice, logits: Tensor, labels: Tensor, rows: Tensor) -> None:
        """Overwrite the logits (C, V) with their gradient and write each token's values to `rows` (C, columns)."""
        ...

    def gradient_of_hidden(self, grad_logits: Tensor, projection: Tensor) -> Tensor: ...


class Passes(NamedTuple):
    """The passes of a whole vocabulary.

    `work_of_chunk` gets logits (C, V), labels (C,), the tensors that `beside` returns for the chunk, and rows (C,
    columns). It overwrites the logits with their gradient and writes each token's values to the rows, the loss first.
    """

    work_of_chunk: Work
    chunk_tokens: int
    beside: Callable[[slice], tuple[Tensor, ...]] = lambda chunk: ()

    def chunks(self, hidden: Tensor, projection: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        return logits_in_chunks(hidden, projection, self.chunk_tokens)

    def work(self, chunk: slice, logits: Tensor, labels: Tensor, rows: Tensor) -> None:
        self.work_of_chunk(logits, labels, *self.beside(chunk), rows)

    def gradient_of_hidden(self, grad_logits: Tensor, projection: Tensor) -> Tensor:
        return grad_logits @ projection


class _SumContext(AutogradContext[()]):
    # Both until backward has used them, and None if the call needs no gradient of the tensor.
    grad_hidden: Tensor | None
    weight_sum: WeightGradient | None


class SumOfLosses(torch.autograd.Function):
    """Sum of token losses, with gradients computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: _SumContext,
        hidden: Tensor,  # (N, D)
        weight: Tensor,  # (V, D)
        labels: Tensor,  # (N,)
        passes: TokenPasses,
        accumulation_dtype: torch.dtype,
        compute_dtype: torch.dtype,
        grad_enabled: bool,
        num_columns: int,
    ) -> tuple[Tensor, Tensor]:
        needs_hidden, needs_weight = (grad_enabled and needed for needed in ctx.needs_input_grad[:2])
        projection = weight.to(compute_dtype)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        weight_sum = WeightGradient(weight, accumulation_dtype) if needs_weight else None

        losses_dtype = torch.promote_types(compute_dtype, torch.float32)
        sums = torch.zeros(num_columns, dtype=losses_dtype, device=hidden.device)
        for chunk, chunk_hidden, logits in passes.chunks(hidden, projection):
            of_chunk = labels[chunk]
            rows = torch.empty(len(of_chunk), num_columns, dtype=losses_dtype, device=hidden.device)
            passes.work(chunk, logits, of_chunk, rows)
            sums += rows.sum(0)
            if grad_hidden is not None:
                grad_hidden[chunk] = passes.gradient_of_hidden(logits, projection)[: len(of_chunk)]
            if weight_sum is not None:
                weight_sum.add(logits, chunk_hidden)
        ctx.grad_hidden, ctx.weight_sum = grad_hidden, weight_sum
        ctx.mark_non_differentiable(sums)
        return sums[LOSS].clone(), sums

    @staticmethod
    def backward(ctx: _SumContext, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grad_hidden is None and ctx.weight_sum is None:
            raise RuntimeError(
                "the gradients of this loss were used already. Compute the loss again for a second backward."
            )
        scale, _ = grad_outputs
        grad_hidden = ctx.grad_hidden.mul_(scale) if ctx.grad_hidden is not None else None
        grad_weight = ctx.weight_sum.scaled(scale) if ctx.weight_sum is not None else None
        ctx.grad_hidden = ctx.weight_sum = None
        return grad_hidden, grad_weight, *(None,) * (len(ctx.needs_input_grad) - 2)
