"""Output projection and cross-entropy in one pass over chunks of tokens.

Logits are the largest tensor of a finetune: 4,096 tokens of a 151,936-word vocabulary take 1.2 GB in bfloat16, and
the plain computation holds several copies of them. Here a chunk of tokens goes all the way, from hidden states to
logits to loss to gradients, before the next one starts; the logits' gradient is written over the logits, and nothing
of size (tokens, vocabulary) outlives its chunk. The gradients are thus computed during the forward pass, and backward
only scales them. Positions without a label are dropped before the projection, so they cost nothing.

The gradient of the output weight is a sum over chunks. In bfloat16 every partial sum is rounded, so the sum is kept
in float32 by default, in slices of the vocabulary that backward turns into the weight's type one at a time: the
float32 copy shrinks while the gradient grows. A sum in the weight's own type becomes the gradient where it lies.
Relative error of a bfloat16 weight's gradient against float64, for 2,048 random targets: 3.0e-3 for the plain
computation in bfloat16, 3.4e-3 here with 16 chunks and float32 sums, 5.4e-3 with bfloat16 sums; rounding the exact
gradient to bfloat16 alone costs 1.7e-3. The tests hold these bounds.

Whatever else a loss wants of the logits is had in the same passes over a chunk: the model's soft cap, label
smoothing, the z-loss that keeps the softmax's normaliser near 1, and, as sums that nothing waits for, how many tokens
were predicted right and the entropy of the predictions.

Source: the idea of gradients in the forward pass over chunks is Liger Kernel's fused linear cross-entropy (Hsu et
al., 2024, arXiv:2410.10989); the z-loss is PaLM's (Chowdhery et al., 2022, arXiv:2204.02311). Left out: class weights.

Shapes: N target tokens, C tokens a chunk, D hidden size, V vocabulary.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lean_ft.losses.statistics import TokenStatistics
from lean_ft.shapes_only import counted_as, device_type, repeated

IGNORED_LABEL = -100

VOCAB_SLICE = 8192  # rows of the output weight whose gradient is summed at a time
EAGER_ELEMENTS = {
    "cpu": 1 << 20,
    "other": 1 << 25,
}  # float32 elements that the uncompiled softmax may hold at a time
ADDED_ELEMENTS = 1 << 18  # of a product that a CPU adds to a wider sum at a time


@counted_as("loss")
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
) -> Tensor:
    """Sums the cross-entropy of `softmax(hidden @ weight.T)` over the positions that have a label.

    Divide the sum by the optimizer step's number of targets: a mean of means would overweight short answers.

    Args:
        hidden: the decoder's last hidden states, (..., D).
        weight: the output projection, (V, D); it may be tied to the embedding.
        labels: the token that each position must predict, (...) of int64; `IGNORED_LABEL` where nothing is trained.
        num_targets: how many labels are not ignored, if the caller knows it; else it is counted, which makes a GPU wait.
        chunk_tokens: target tokens whose logits exist at a time; 0 takes all of them at once.
        accumulation_dtype: what sums the weight's gradient over chunks, `float32` or the weight's own type.
        softcap: logits become `softcap * tanh(logit / softcap)` first, as some models want (Gemma 2); None leaves them.
        label_smoothing: share of each target's probability that is spread over the whole vocabulary.
        z_loss: coefficient of the squared logarithm of the softmax's normaliser, which is added to each token's loss.
        statistics: where to add `token_accuracy`, the number of right predictions, and `entropy`; without gradients.
        compile: fuse the passes over a chunk's logits with torch.compile.

    Returns:
        The sum, a float32 scalar (float64 for float64 inputs); an exact zero when no position has a label.

    Raises:
        ValueError: when the shapes do not belong together, or a term is out of its range.
    """
    terms = _Terms(softcap, label_smoothing, z_loss)
    if (softcap is not None and softcap <= 0) or not 0 <= label_smoothing < 1 or z_loss < 0:
        raise ValueError(
            "linear_cross_entropy expects softcap above 0 or None, label_smoothing from 0 to below 1 and z_loss of 0 or "
            f"more, but got softcap={softcap}, label_smoothing={label_smoothing} and z_loss={z_loss}"
        )
    if hidden.shape[:-1] != labels.shape or weight.ndim != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            "linear_cross_entropy expects hidden (..., D), weight (V, D) and labels (...), "
            f"but got hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and labels {tuple(labels.shape)}"
        )
    hidden, labels = hidden.flatten(0, -2), labels.flatten()
    if num_targets is None:
        num_targets = int((labels != IGNORED_LABEL).sum())
    if num_targets < labels.numel():
        # The size is known, so a GPU need not tell the host how many positions it found.
        targets = torch.nonzero_static(labels != IGNORED_LABEL, size=num_targets).squeeze(1)
        hidden, labels = hidden.index_select(0, targets), labels.index_select(0, targets)
    if torch.is_autocast_enabled(hidden.device.type):
        compute_dtype = torch.get_autocast_dtype(hidden.device.type)
    else:
        compute_dtype = weight.dtype
    loss, sums = _LinearCrossEntropy.apply(
        hidden,
        weight,
        labels,
        chunk_tokens or max(num_targets, 1),
        weight.dtype if accumulation_dtype == "weight" else torch.promote_types(weight.dtype, torch.float32),
        compute_dtype,
        torch.is_grad_enabled(),
        _compiled_softmax_gradient(terms) if compile else partial(_softmax_gradient_in_blocks, terms=terms),
    )
    if statistics is not None:
        statistics.add(token_accuracy=sums[0], entropy=sums[1])
    return loss


class _Terms(NamedTuple):
    """What the loss has beside the plain cross-entropy."""

    softcap: float | None
    label_smoothing: float
    z_loss: float


# (logits (C, V), labels (C,), rows (C, 3)): writes the gradient of the logits over them, and to the rows each token's
# loss, whether its prediction was right, and its entropy.
SoftmaxGradient = Callable[[Tensor, Tensor, Tensor], None]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # (N, D)
        weight: Tensor,  # (V, D)
        labels: Tensor,  # (N,)
        chunk_tokens: int,
        accumulation_dtype: torch.dtype,
        compute_dtype: torch.dtype,
        grad_enabled: bool,
        softmax_gradient: SoftmaxGradient,
    ) -> tuple[Tensor, Tensor]:
        needs_hidden, needs_weight = (grad_enabled and needed for needed in ctx.needs_input_grad[:2])
        projection = weight.to(compute_dtype)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        weight_sum = _WeightGradient(weight, accumulation_dtype) if needs_weight else None

        losses_dtype = torch.promote_types(compute_dtype, torch.float32)
        sums = torch.zeros(3, dtype=losses_dtype, device=hidden.device)
        # One tensor serves all chunks but a shorter last: mapping a fresh one costs a CPU as much as the softmax.
        logits = hidden.new_empty(0, weight.shape[0], dtype=compute_dtype)
        for start in repeated(range(0, hidden.shape[0], chunk_tokens), shown=2):  # the first begins the sums
            chunk = slice(start, start + chunk_tokens)
            chunk_hidden = hidden[chunk].to(compute_dtype)  # (C, D)
            if logits.shape[0] != chunk_hidden.shape[0]:
                logits.resize_(chunk_hidden.shape[0], logits.shape[1])
            torch.mm(chunk_hidden, projection.T, out=logits)  # (C, V)
            rows = torch.empty(logits.shape[0], 3, dtype=losses_dtype, device=hidden.device)
            softmax_gradient(logits, labels[chunk], rows)
            sums += rows.sum(0)
            if grad_hidden is not None:
                grad_hidden[chunk] = logits @ projection
            if weight_sum is not None:
                weight_sum.add(logits, chunk_hidden)
        ctx.grad_hidden, ctx.weight_sum = grad_hidden, weight_sum
        loss, statistics = sums[0].clone(), sums[1:]
        ctx.mark_non_differentiable(statistics)
        return loss, statistics

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grad_hidden is None and ctx.weight_sum is None:
            raise RuntimeError("linear_cross_entropy gives its gradients once; call it again for a second backward")
        scale, _ = grad_outputs
        grad_hidden = ctx.grad_hidden.mul_(scale) if ctx.grad_hidden is not None else None
        grad_weight = ctx.weight_sum.scaled(scale) if ctx.weight_sum is not None else None
        ctx.grad_hidden = ctx.weight_sum = None
        return grad_hidden, grad_weight, *(None,) * 6


class _WeightGradient:
    """The running sum of the output weight's gradient, (V, D), in slices of the vocabulary.

    In the weight's own type the slices are parts of one tensor, which becomes the gradient where it lies.
    """

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        self.weight, self.dtype = weight, dtype
        self.gradient: Tensor | None = None  # (V, D)
        self.slices: list[Tensor] = []

    def add(self, grad_logits: Tensor, hidden: Tensor) -> None:
        """Adds grad_logits.T (V, C) @ hidden (C, D)."""
        parts = grad_logits.split(VOCAB_SLICE, dim=1)
        if not self.slices:
            self._begin(parts, hidden)
            return
        product = torch.empty_like(self.slices[0], dtype=hidden.dtype)
        for total, part in zip(self.slices, parts, strict=True):
            if total.dtype == hidden.dtype:
                total.addmm_(part.T, hidden)
            else:
                _add_narrower(total, torch.mm(part.T, hidden, out=product[: part.shape[1]]))

    def _begin(self, parts: Sequence[Tensor], hidden: Tensor) -> None:
        if self.dtype != self.weight.dtype:
            self.slices = [(part.T @ hidden).to(self.dtype) for part in parts]
            return
        self.gradient = torch.empty_like(self.weight, memory_format=torch.contiguous_format)
        self.slices = list(self.gradient.split(VOCAB_SLICE))
        for total, part in zip(self.slices, parts, strict=True):
            if total.dtype == hidden.dtype:
                torch.mm(part.T, hidden, out=total)
            else:
                total.copy_(part.T @ hidden)

    def scaled(self, scale: Tensor) -> Tensor:
        """The gradient times a scalar, in the weight's type; a sum in another is given up slice by slice."""
        if not self.slices:
            return torch.zeros_like(self.weight)
        if self.gradient is not None:
            return self.gradient.mul_(scale)
        gradient = torch.empty_like(self.weight)
        self.slices.reverse()
        for rows in gradient.split(VOCAB_SLICE):
            rows.copy_(self.slices.pop().mul_(scale))
        return gradient


def _add_narrower(total: Tensor, product: Tensor) -> None:
    """total += product, both (S, D), in blocks: a CPU first copies an operand of another type, whole, to the wider."""
    rows = len(total)
    if total.device.type == "cpu":
        rows = max(1, ADDED_ELEMENTS // total.shape[1])
    for block, more in zip(total.split(rows), product.split(rows), strict=True):
        block.add_(more)


def _softmax_gradient(logits: Tensor, labels: Tensor, rows: Tensor, terms: _Terms) -> None:
    """The work on a chunk's logits, capped already; terms that are off leave no trace in the code that is compiled."""
    softcap, label_smoothing, z_loss = terms
    # The exponentials are computed twice, once to be summed and once to be written, so that a compiler has no
    # reason to keep them in float32, which would take twice the memory of the logits.
    values = logits.to(rows.dtype)
    highest = values.amax(dim=1, keepdim=True)
    below = values - highest
    weights = below.exp()
    total = weights.sum(dim=1, keepdim=True)
    mean_below = weights.mul_(below).sum(dim=1, keepdim=True) / total
    log_total = total.log() + highest
    labels = labels[:, None]
    of_label = values.gather(1, labels)

    losses = log_total - of_label
    if label_smoothing:
        losses = losses + label_smoothing * (of_label - values.mean(dim=1, keepdim=True))
    if z_loss:
        losses = losses + z_loss * log_total.square()
    # Of several highest logits each counts as a share of the prediction: a model whose logits are all alike knows nothing.
    num_highest = (below == 0).to(rows.dtype).sum(dim=1, keepdim=True).clamp(min=1)  # of NaN none is
    right = (of_label == highest).to(rows.dtype) / num_highest
    rows.copy_(torch.cat([losses, right, total.log() - mean_below], 1))

    gradient = (values - log_total).exp()
    if z_loss:
        gradient = gradient * (1 + 2 * z_loss * log_total)
    is_label = torch.arange(logits.shape[1], device=logits.device) == labels
    if label_smoothing:
        gradient = gradient - (is_label.to(rows.dtype) * (1 - label_smoothing) + label_smoothing / logits.shape[1])
    else:
        gradient = gradient - is_label.to(rows.dtype)
    if softcap is not None:
        gradient = gradient * (1 - (values / softcap).square())
    logits.copy_(gradient)


def _cap(logits: Tensor, softcap: float) -> None:
    # A pass of its own: in one with the softmax, a compiler would keep the tanh of every logit in float32.
    wide = torch.promote_types(logits.dtype, torch.float32)
    logits.copy_((logits.to(wide) / softcap).tanh() * softcap)


def _softmax_gradient_in_blocks(logits: Tensor, labels: Tensor, rows: Tensor, terms: _Terms) -> None:
    """The same without a compiler: a few rows at a time, so that the float32 copies stay small."""
    limit = EAGER_ELEMENTS["cpu" if device_type(logits.device) == "cpu" else "other"]
    num_rows = max(1, limit // logits.shape[1])
    for start in repeated(range(0, logits.shape[0], num_rows)):
        block = slice(start, start + num_rows)
        if terms.softcap is not None:
            _cap(logits[block], terms.softcap)
        _softmax_gradient(logits[block], labels[block], rows[block], terms=terms)


@cache
def _compiled_softmax_gradient(terms: _Terms) -> SoftmaxGradient:
    def softmax_gradient(logits: Tensor, labels: Tensor, rows: Tensor) -> None:
        _softmax_gradient(logits, labels, rows, terms)

    # The last chunk is shorter, so the number of rows is a symbol from the start: one compilation serves them all.
    # Not tuned on a GPU: for each run of a kernel that writes over the logits, tuning copies them to the host and back.
    settings: dict[str, Any] = {"dynamic": True, "fullgraph": True, "options": {"triton.autotune_pointwise": False}}
    compiled = torch.compile(softmax_gradient, **settings)
    softcap = terms.softcap
    if softcap is None:
        return compiled
    cap = torch.compile(lambda logits: _cap(logits, softcap), **settings)

    def capped(logits: Tensor, labels: Tensor, rows: Tensor) -> None:
        cap(logits)
        compiled(logits, labels, rows)

    return capped
