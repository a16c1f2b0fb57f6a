"""The work that losses share: logits in chunks, what a softmax makes of them, and the sum of the weight's gradient.

Logits are the largest tensor of a finetune: 4,096 tokens of a 151,936-word vocabulary take 1.2 GB in bfloat16, and
the plain computation holds several copies of them. Here a chunk of tokens goes all the way before the next one starts,
in one tensor that serves them all; the logits' gradient is written over the logits, and nothing of size (tokens,
vocabulary) outlives its chunk.

The gradient of the output weight is a sum over chunks. In bfloat16 every partial sum is rounded, so the sum is kept
in float32 by default, in slices of the vocabulary that are turned into the weight's type one at a time: the float32
copy shrinks while the gradient grows. A sum in the weight's own type becomes the gradient where it lies.

The passes over a chunk are three functions of one body: what a loss says of each token (`describe`), the gradient of
that over the logits (`gradient`), or both in one (`describe_with_gradient`), fused by torch.compile or a few rows at a time.

Shapes: N target tokens, C tokens a chunk, D hidden size, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lean_ft.system.shapes_only import device_type, repeated

VOCAB_SLICE = 8192  # rows of the output weight whose gradient is summed at a time
# float32 elements that the uncompiled softmax may hold at a time
EAGER_ELEMENTS = {"cpu": 1 << 20, "other": 1 << 25}
ADDED_ELEMENTS = 1 << 18  # of a product that a CPU adds to a wider sum at a time

LOSS, IS_RIGHT, ENTROPY, LOG_Z = range(4)  # what is told of each token
LOG_SUM_SQUARES = 4  # and where it is asked for, the logarithm of the sum of the squared probabilities


class Terms(NamedTuple):
    """What the loss has beside the plain cross-entropy."""

    softcap: float | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    temperature: float = 1.0
    tells_squares: bool = False
    vocab_size: int = 0  # of the whole where logits are of a part of it; 0: they are of all

    @property
    def num_columns(self) -> int:
        return LOG_SUM_SQUARES + self.tells_squares


def compute_dtype(weight: Tensor) -> torch.dtype:
    """The type of the products with `weight`: its own, or autocast's."""
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


def sum_dtype(weight: Tensor, accumulation_dtype: str) -> torch.dtype:
    """The type of the weight's gradient while it is summed, as the setting `float32` or `weight` says."""
    return weight.dtype if accumulation_dtype == "weight" else torch.promote_types(weight.dtype, torch.float32)


def logits_in_chunks(hidden: Tensor, projection: Tensor, chunk_tokens: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """For each chunk of hidden (N, D): where it lies, its rows (C, D) and its logits (C, V), in the type of `projection`
    (V, D). The logits are the caller's to write over until the next chunk."""
    logits_of = ChunkLogits(projection)
    for start in repeated(range(0, hidden.shape[0], chunk_tokens), shown=2):  # the first begins the sums
        chunk = slice(start, start + chunk_tokens)
        chunk_hidden = hidden[chunk].to(projection.dtype)  # (C, D)
        yield chunk, chunk_hidden, logits_of(chunk_hidden)


class ChunkLogits:
    """The logits (C, V) of a chunk's hidden states (C, D), in one tensor for all chunks but a shorter last: mapping a fresh
    one costs a CPU as much as the softmax."""

    def __init__(self, projection: Tensor) -> None:
        self._projection = projection  # (V, D)
        self._logits = projection.new_empty(0, projection.shape[0])

    def __call__(self, chunk_hidden: Tensor) -> Tensor:
        if self._logits.shape[0] != chunk_hidden.shape[0]:
            self._logits.resize_(chunk_hidden.shape[0], self._logits.shape[1])
        return torch.mm(chunk_hidden, self._projection.T, out=self._logits)


class WeightGradient:
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

    def scaled(self, scale: Tensor | float) -> Tensor:
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


# The passes over a chunk's logits, capped already; terms that are off leave no trace in the code that is compiled. ------------

# (logits (C, V), then what is known or told of each token, (C,) or (C, columns)): writes in place.
Work = Callable[..., None]


def told_of(values: Tensor, labels: Tensor, terms: Terms) -> tuple[Tensor, Tensor]:
    """Of values (C, V), what is told of each token (C, columns), and log Z (C, 1)."""
    # The exponentials are computed twice, once to be summed and once to be written, so that a compiler has no
    # reason to keep them in float32, which would take twice the memory of the logits.
    highest = values.amax(dim=1, keepdim=True)
    below = values - highest
    weights = below.exp()
    total = weights.sum(dim=1, keepdim=True)
    columns = []
    if terms.tells_squares:
        columns = [weights.square().sum(dim=1, keepdim=True).log() - 2 * total.log()]
    mean_below = weights.mul_(below).sum(dim=1, keepdim=True) / total
    log_total = total.log() + highest
    of_label = values.gather(1, labels)

    losses = log_total - of_label
    if terms.label_smoothing:
        losses = losses + terms.label_smoothing * (of_label - values.mean(dim=1, keepdim=True))
    if terms.z_loss:
        losses = losses + terms.z_loss * log_total.square()
    # Of several highest logits each counts as a share of the prediction: a model whose logits are all alike knows nothing.
    num_highest = (below == 0).to(values.dtype).sum(dim=1, keepdim=True).clamp(min=1)  # of NaN none is
    right = (of_label == highest).to(values.dtype) / num_highest
    return torch.cat([losses, right, total.log() - mean_below, log_total, *columns], 1), log_total


NUM_PART_COLUMNS = 6  # told of each token by the part of the vocabulary whose logits are here: `_describe_part`


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
    """Of what `describe_part` told of each token, parts (n, C, columns), what `describe` tells of the whole, (C, columns),
    and log Z, (C,)."""
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
    """Of each token's loss over the logits, (C, V); `values` are those over the temperature."""
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
    rows.copy_(told_of(values, labels[:, None], terms)[0])


def _describe_with_gradient(terms: Terms, logits: Tensor, labels: Tensor, rows: Tensor) -> None:
    wide, values = _warmed(logits, rows.dtype, terms)
    told, log_total = told_of(values, labels[:, None], terms)
    rows.copy_(told)
    logits.copy_(gradient_of(wide, values, labels[:, None], log_total, terms))


def _write_gradient(terms: Terms, logits: Tensor, labels: Tensor, log_total: Tensor, scale: Tensor) -> None:
    wide, values = _warmed(logits, log_total.dtype, terms)
    logits.copy_(gradient_of(wide, values, labels[:, None], log_total[:, None], terms) * scale[:, None])


def _cap(logits: Tensor, softcap: float) -> None:
    # A pass of its own: in one with the softmax, a compiler would keep the tanh of every logit in float32.
    wide = torch.promote_types(logits.dtype, torch.float32)
    logits.copy_((logits.to(wide) / softcap).tanh() * softcap)


def capping(softcap: float, compile: bool) -> Work:
    """work(logits): caps them, in place."""
    return _compiled_cap(softcap) if compile else _in_blocks(lambda terms, logits: None, Terms(), softcap)


def work_of(function: Callable[..., None], terms: Any, compile: bool, is_capped: bool = False) -> Work:
    """The pass `function(terms, logits (C, V), what is known or told of each token ...)`, over capped logits; `is_capped` says
    that another pass has been over them."""
    softcap = None if is_capped else terms.softcap
    return _compiled(function, terms, softcap) if compile else _in_blocks(function, terms, softcap)


# Of `Terms` and whether to compile. work(logits, labels (C,), rows (C, columns)): writes what is told of each token to the rows.
describe = partial(work_of, _describe)
# The same, and writes the gradient of each token's loss over its logits.
describe_with_gradient = partial(work_of, _describe_with_gradient)
# work(logits, labels (C,), rows (C, NUM_PART_COLUMNS)): writes what a part of the vocabulary tells of each token; labels are
# counted from its first word, and may lie outside of it.
describe_part = partial(work_of, _describe_part)
# work(logits, labels (C,), log Z (C,), scale (C,)): writes the gradient of each loss, times its scale, over the logits.
gradient = partial(work_of, _write_gradient)


def _in_blocks(function: Callable[..., None], terms: Any, softcap: float | None) -> Work:
    """Without a compiler: a few rows at a time, so that the float32 copies stay small."""

    def work(logits: Tensor, *of_tokens: Tensor) -> None:
        limit = EAGER_ELEMENTS["cpu" if device_type(logits.device) == "cpu" else "other"]
        num_rows = max(1, limit // logits.shape[1])
        for start in repeated(range(0, logits.shape[0], num_rows)):
            block = slice(start, start + num_rows)
            if softcap is not None:
                _cap(logits[block], softcap)
            function(terms, logits[block], *(some[block] for some in of_tokens))

    return work


# The last chunk is shorter, so the number of rows is a symbol from the start: one compilation serves them all.
# Not tuned on a GPU: for each run of a kernel that writes over the logits, tuning copies them to the host and back.
_COMPILER: dict[str, Any] = {"dynamic": True, "fullgraph": True, "options": {"triton.autotune_pointwise": False}}


@cache
def _compiled_cap(softcap: float) -> Work:
    return torch.compile(lambda logits: _cap(logits, softcap), **_COMPILER)


@cache
def _compiled(function: Callable[..., None], terms: Any, softcap: float | None) -> Work:
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
