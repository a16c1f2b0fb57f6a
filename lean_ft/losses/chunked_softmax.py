"""Shared parts of the losses: chunked logits, softmax values and gradients, and the sum of the output weight's
gradient.

Logits are the largest tensor of finetuning: 4,096 tokens and a vocabulary of 151,936 take 1.2 GB in bfloat16, and the
plain computation holds several copies. Here each chunk of tokens is processed completely before the next one, in one
reused buffer. The gradient overwrites the logits, and no tensor of size (tokens, vocabulary) outlives its chunk.

The gradient of the output weight is a sum over chunks. bfloat16 would round every partial sum, so the sum is float32 by
default. It is stored in slices of the vocabulary that are converted to the weight's dtype one at a time and then freed.
A sum in the weight's own dtype is the gradient itself, without a copy.

The passes over a chunk compute the loss and metrics of each token (`describe`), the gradient with respect to the logits
(`gradient`), or both (`describe_with_gradient`). They are fused by torch.compile, or run on a few rows at a time.

Shapes: N target tokens, C tokens per chunk, D hidden size, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lean_ft.system.gpu_products import multiplies_into_float32
from lean_ft.system.world import device_type, in_chunks

VOCAB_SLICE = 8192  # rows of the output weight whose gradient is summed at a time
# float32 elements in memory at a time in the uncompiled softmax
EAGER_ELEMENTS = {"cpu": 1 << 20, "other": 1 << 25}
ADDED_ELEMENTS = 1 << 18  # elements that a CPU adds to a sum of a wider dtype at a time

LOSS, IS_RIGHT, ENTROPY, LOG_Z = range(4)  # columns with the values of each token
LOG_SUM_SQUARES = 4  # optional column: log of the sum of the squared probabilities


class Terms(NamedTuple):
    """Settings of the loss beyond the plain cross-entropy."""

    softcap: float | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    temperature: float = 1.0
    with_squares: bool = False
    vocab_size: int = 0  # size of the whole vocabulary if the logits cover only a part; 0: the logits cover all

    @property
    def num_columns(self) -> int:
        return LOG_SUM_SQUARES + self.with_squares


def compute_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype of products with `weight`: autocast's if enabled, else the weight's."""
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


def sum_dtype(weight: Tensor, accumulation_dtype: str) -> torch.dtype:
    """Return the dtype in which the weight's gradient is summed; `accumulation_dtype` is `float32` or `weight`."""
    return weight.dtype if accumulation_dtype == "weight" else torch.promote_types(weight.dtype, torch.float32)


def logits_in_chunks(hidden: Tensor, projection: Tensor, chunk_tokens: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield each chunk of hidden (N, D): its slice, its rows (C, D) and its logits (C, V), in the dtype of `projection`
    (V, D).

    The caller may overwrite the logits. The next chunk reuses their memory.
    """
    logits_of = ChunkLogits(projection)
    for chunk in in_chunks(hidden.shape[0], chunk_tokens, shown=2):  # the first chunk initializes the sums
        chunk_hidden = hidden[chunk].to(projection.dtype)  # (C, D)
        yield chunk, chunk_hidden, logits_of(chunk_hidden)


class ChunkLogits:
    """Computes logits (C, V) from a chunk's hidden states (C, D) in one reused buffer.

    On a CPU, mapping the memory of a new tensor takes as long as the softmax.
    """

    def __init__(self, projection: Tensor) -> None:
        self._projection = projection  # (V, D)
        self._logits = projection.new_empty(0, projection.shape[0])

    def __call__(self, chunk_hidden: Tensor) -> Tensor:
        if self._logits.shape[0] != chunk_hidden.shape[0]:
            self._logits.resize_(chunk_hidden.shape[0], self._logits.shape[1])
        return torch.mm(chunk_hidden, self._projection.T, out=self._logits)


class WeightGradient:
    """Running sum of the output weight's gradient, (V, D), in slices of the vocabulary.

    In the weight's own dtype the slices are views of one tensor, which becomes the gradient. A GPU whose
    products can be float32 adds them to the sum without a buffer, so there is one slice, and a chunk takes one kernel
    launch.
    """

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        self.weight, self.dtype = weight, dtype
        device_kind = device_type(weight.device)
        self.sums_in_products = device_kind == "cuda" and multiplies_into_float32(weight.dtype)
        self.added_elements = ADDED_ELEMENTS if device_kind == "cpu" else weight.numel()
        self.slice_rows = len(weight) if self.sums_in_products else VOCAB_SLICE
        self.gradient: Tensor | None = None  # (V, D)
        self.slices: list[Tensor] = []

    def add(self, grad_logits: Tensor, hidden: Tensor) -> None:
        """Add grad_logits.T (V, C) @ hidden (C, D)."""
        parts = grad_logits.split(self.slice_rows, dim=1)
        if not self.slices:
            self._begin(parts, hidden)
            return
        product = hidden.new_empty(0 if self.sums_in_products else len(self.slices[0]), hidden.shape[1])
        for total, part in zip(self.slices, parts, strict=True):
            if total.dtype == hidden.dtype:
                total.addmm_(part.T, hidden)
            elif self.sums_in_products:
                torch.addmm(total, part.T, hidden, out_dtype=total.dtype, out=total)
            else:
                self._add_narrower(total, torch.mm(part.T, hidden, out=product[: part.shape[1]]))

    def _begin(self, parts: Sequence[Tensor], hidden: Tensor) -> None:
        if self.dtype == self.weight.dtype:
            self.gradient = torch.empty_like(self.weight, memory_format=torch.contiguous_format)
            self.slices = list(self.gradient.split(self.slice_rows))
        else:
            self.slices = [self.weight.new_empty(part.shape[1], hidden.shape[1], dtype=self.dtype) for part in parts]
        for total, part in zip(self.slices, parts, strict=True):
            if total.dtype == hidden.dtype:
                torch.mm(part.T, hidden, out=total)
            elif self.sums_in_products:
                torch.mm(part.T, hidden, out_dtype=total.dtype, out=total)
            else:
                total.copy_(part.T @ hidden)

    def _add_narrower(self, total: Tensor, product: Tensor) -> None:
        """Compute total += product, both (S, D), in blocks: a CPU first converts a whole operand of another dtype."""
        rows = max(1, self.added_elements // total.shape[1])
        for block, more in zip(total.split(rows), product.split(rows), strict=True):
            block.add_(more)

    def scaled(self, scale: Tensor | float) -> Tensor:
        """Return the gradient times a scalar, in the weight's dtype. A sum in another dtype is freed slice by slice."""
        if not self.slices:
            return torch.zeros_like(self.weight)
        if self.gradient is not None:
            return self.gradient.mul_(scale)
        gradient = torch.empty_like(self.weight)
        self.slices.reverse()
        for rows in gradient.split(self.slice_rows):
            rows.copy_(self.slices.pop().mul_(scale))
        return gradient


# Passes over a chunk's logits, after the soft cap. Disabled terms are not part of the compiled code.

# work(logits (C, V), then tensors with values of each token, (C,) or (C, columns)): writes in place.
Work = Callable[..., None]


def token_values(values: Tensor, labels: Tensor, terms: Terms) -> tuple[Tensor, Tensor]:
    """Return the values of each token (C, columns) and log Z (C, 1), from logits over the temperature, (C, V)."""
    # The exponentials are computed twice, for the sum and for the gradient, so that a compiler does not store them in
    # float32, which takes twice the memory of the logits.
    highest = values.amax(dim=1, keepdim=True)
    below = values - highest
    weights = below.exp()
    total = weights.sum(dim=1, keepdim=True)
    columns = []
    if terms.with_squares:
        columns = [weights.square().sum(dim=1, keepdim=True).log() - 2 * total.log()]
    mean_below = weights.mul_(below).sum(dim=1, keepdim=True) / total
    log_total = total.log() + highest
    of_label = values.gather(1, labels)

    losses = log_total - of_label
    if terms.label_smoothing:
        losses = losses + terms.label_smoothing * (of_label - values.mean(dim=1, keepdim=True))
    if terms.z_loss:
        losses = losses + terms.z_loss * log_total.square()
    # Tied highest logits share the prediction, so a model with equal logits everywhere gets no credit.
    num_highest = (below == 0).to(values.dtype).sum(dim=1, keepdim=True).clamp(min=1)  # 0 for NaN
    right = (of_label == highest).to(values.dtype) / num_highest
    return torch.cat([losses, right, total.log() - mean_below, log_total, *columns], 1), log_total


NUM_PART_COLUMNS = 6  # values per token from one part of the vocabulary: `_describe_part`


def _describe_part(terms: Terms, logits: Tensor, labels: Tensor, rows: Tensor) -> None:
    _, values = _warmed(logits, rows.dtype, terms)
    labels = labels[:, None]
    highest = values.amax(dim=1, keepdim=True)
    below = values - highest
    weights = below.exp()
    total = weights.sum(dim=1, keepdim=True)
    num_highest = (below == 0).to(values.dtype).sum(dim=1, keepdim=True)
    is_here = (labels >= 0) & (labels < values.shape[1])
    of_label = torch.where(is_here, values.gather(1, labels.clamp(0, values.shape[1] - 1)), 0.0)
    weighted = weights.mul_(below).sum(dim=1, keepdim=True)
    rows.copy_(torch.cat([highest, total, weighted, of_label, values.sum(dim=1, keepdim=True), num_highest], 1))


def whole_of_parts(parts: Tensor, terms: Terms) -> tuple[Tensor, Tensor]:
    """Combine the output of `describe_part`, parts (n, C, columns), into the output of `describe`, (C, columns), and
    log Z, (C,)."""
    highests, totals, weighted, of_label, sums, nums = parts.unbind(2)  # (n, C) each
    highest = highests.amax(dim=0)
    lower = highests - highest
    shares = lower.exp()
    total = (totals * shares).sum(0)
    mean_below = ((weighted + totals * lower) * shares).sum(0) / total
    log_total = total.log() + highest
    of_label = of_label.sum(0)
    losses = log_total - of_label
    if terms.label_smoothing:
        losses = losses + terms.label_smoothing * (of_label - sums.sum(0) / terms.vocab_size)
    if terms.z_loss:
        losses = losses + terms.z_loss * log_total.square()
    num_highest = torch.where(lower == 0, nums, 0.0).sum(0).clamp(min=1)
    right = (of_label == highest).to(parts.dtype) / num_highest
    return torch.stack([losses, right, total.log() - mean_below, log_total], 1), log_total


def gradient_of(logits: Tensor, values: Tensor, labels: Tensor, log_total: Tensor, terms: Terms) -> Tensor:
    """Return the gradient of each token's loss with respect to the logits, (C, V). `values`: logits over the
    temperature."""
    gradient = (values - log_total).exp()
    if terms.z_loss:
        gradient = gradient * (1 + 2 * terms.z_loss * log_total)
    is_label = torch.arange(values.shape[1], device=values.device) == labels
    if terms.label_smoothing:
        smoothed = terms.label_smoothing / (terms.vocab_size or values.shape[1])
        gradient = gradient - (is_label.to(values.dtype) * (1 - terms.label_smoothing) + smoothed)
    else:
        gradient = gradient - is_label.to(values.dtype)
    if terms.temperature != 1:
        gradient = gradient / terms.temperature
    if terms.softcap is not None:
        gradient = gradient * (1 - (logits / terms.softcap).square())
    return gradient


def _warmed(logits: Tensor, dtype: torch.dtype, terms: Terms) -> tuple[Tensor, Tensor]:
    wide = logits.to(dtype)
    return wide, wide if terms.temperature == 1 else wide / terms.temperature


def _describe(terms: Terms, logits: Tensor, labels: Tensor, rows: Tensor) -> None:
    _, values = _warmed(logits, rows.dtype, terms)
    rows.copy_(token_values(values, labels[:, None], terms)[0])


def _describe_with_gradient(terms: Terms, logits: Tensor, labels: Tensor, rows: Tensor) -> None:
    wide, values = _warmed(logits, rows.dtype, terms)
    metrics, log_total = token_values(values, labels[:, None], terms)
    rows.copy_(metrics)
    logits.copy_(gradient_of(wide, values, labels[:, None], log_total, terms))


def _write_gradient(terms: Terms, logits: Tensor, labels: Tensor, log_total: Tensor, scale: Tensor) -> None:
    wide, values = _warmed(logits, log_total.dtype, terms)
    logits.copy_(gradient_of(wide, values, labels[:, None], log_total[:, None], terms) * scale[:, None])


def _cap(logits: Tensor, softcap: float) -> None:
    # A separate pass: if fused with the softmax, a compiler would store the tanh of every logit in float32.
    wide = torch.promote_types(logits.dtype, torch.float32)
    logits.copy_((logits.to(wide) / softcap).tanh() * softcap)


def capping(softcap: float, compile: bool) -> Work:
    """Return `work(logits)`, which caps logits in place."""
    return _compiled_cap(softcap) if compile else _in_blocks(lambda terms, logits: None, Terms(), softcap)


class Capped(Protocol):
    """Terms of a loss with a soft cap of the logits."""

    @property
    def softcap(self) -> float | None: ...


def work_of(function: Callable[..., None], terms: Capped, compile: bool, is_capped: bool = False) -> Work:
    """Return the pass `function(terms, logits (C, V), *values of each token)`, applied after the soft cap.

    is_capped: an earlier pass has already capped the logits.
    """
    softcap = None if is_capped else terms.softcap
    return _compiled(function, terms, softcap) if compile else _in_blocks(function, terms, softcap)


# Each takes `Terms` and `compile` and returns a pass.
# work(logits, labels (C,), rows (C, columns)): writes the values of each token to the rows.
describe = partial(work_of, _describe)
# The same; also overwrites the logits with the gradient of each token's loss.
describe_with_gradient = partial(work_of, _describe_with_gradient)
# work(logits, labels (C,), rows (C, NUM_PART_COLUMNS)): writes the values of one part of the vocabulary. Labels are
# relative to the part's first id and may lie outside the part.
describe_part = partial(work_of, _describe_part)
# work(logits, labels (C,), log Z (C,), scale (C,)): overwrites the logits with the gradient of each loss times its
# scale.
gradient = partial(work_of, _write_gradient)


def _in_blocks(function: Callable[..., None], terms: Capped, softcap: float | None) -> Work:
    """Return the uncompiled pass, which processes a few rows at a time to keep the float32 copies small."""

    def work(logits: Tensor, *of_tokens: Tensor) -> None:
        limit = EAGER_ELEMENTS["cpu" if device_type(logits.device) == "cpu" else "other"]
        num_rows = max(1, limit // logits.shape[1])
        for block in in_chunks(logits.shape[0], num_rows):
            if softcap is not None:
                _cap(logits[block], softcap)
            function(terms, logits[block], *(some[block] for some in of_tokens))

    return work


# The number of rows is dynamic, since the last chunk is shorter: one compilation serves all chunks.
# No autotuning on a GPU: it copies the logits to the host and back for each run of a kernel that overwrites them.
_COMPILER: dict[str, Any] = {"dynamic": True, "fullgraph": True, "options": {"triton.autotune_pointwise": False}}


@cache
def _compiled_cap(softcap: float) -> Work:
    return torch.compile(lambda logits: _cap(logits, softcap), **_COMPILER)


@cache
def _compiled(function: Callable[..., None], terms: Capped, softcap: float | None) -> Work:
    def work(logits: Tensor, *of_tokens: Tensor) -> None:
        function(terms, logits, *of_tokens)

    compiled = torch.compile(work, **_COMPILER)
    if softcap is None:
        return compiled
    cap = _compiled_cap(softcap)

    def capped(logits: Tensor, *of_tokens: Tensor) -> None:
        cap(logits)
        compiled(logits, *of_tokens)

    return capped
