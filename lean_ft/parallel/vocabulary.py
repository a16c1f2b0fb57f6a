"""Vocabulary parallelism: each rank keeps its rows of the embedding and output layer, which are never gathered.

Ranks exchange hidden states instead of weights. For each chunk of target tokens, all ranks gather the hidden states,
multiply them by their own rows, and exchange 6 numbers per token (`chunked_softmax.whole_of_parts`) to compute the full
softmax. The gradient of the hidden states is reduced to the ranks that they came from, in float32; the gradient of the
rows already covers all ranks' tokens. For the embedding, ids are gathered, each rank looks up its rows, and the results
are summed. A tied weight is one part with one gradient.

This sends about 10 D bytes per token and rank. Gathering two (V, D) weights and reducing their gradients sends 8 V D
bytes, which is more if the ranks together have fewer than V tokens at a time. A sharded vocabulary always takes less
memory.

Source: Megatron-LM's vocabulary-parallel cross-entropy (Shoeybi et al. 2019, arXiv:1909.08053), here over data-parallel
ranks and in chunks. Left out: losses other than cross-entropy, adapters on the embedding or output layer, and gradients
of `logits`.

Shapes: n ranks that share a replica, N tokens of this rank, C tokens per chunk and rank, D hidden size, V vocabulary, P
rows of this rank.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lean_ft.losses.chunked_softmax import (
    NUM_PART_COLUMNS,
    ChunkLogits,
    Terms,
    Work,
    describe_part,
    gradient,
    whole_of_parts,
)
from lean_ft.losses.linear_cross_entropy import IGNORED_LABEL
from lean_ft.models import Decoder
from lean_ft.parallel.ranks import REPLICATE, SHARD, ManyRanks
from lean_ft.settings import ParallelConfig
from lean_ft.system.autograd import AutogradContext
from lean_ft.system.world import in_chunks

LOOKED_UP_TOKENS = 4096  # tokens of all ranks per exchange of embedding rows
SMALL_WEIGHT_BYTES = 256 * 2**20  # `auto` gathers smaller weights: little memory, and sums in one process's order


def why_gathered(model: Decoder, cfg: ParallelConfig, ranks: ManyRanks, tokens: int | None) -> str:
    """The reason to gather the vocabulary; empty if it stays sharded.

    `tokens` is the maximum of one rank's forward pass, or None if the loss needs the whole output weight. Raises
    ValueError if `parallel.vocabulary=cut` is not supported.
    """
    if cfg.vocabulary == "gathered":
        return "parallel.vocabulary=gathered"
    embedding, head, num_ranks = model.model.embed_tokens, model.head, ranks.num_shards
    vocab_size = model.config.vocab_size
    rows = -(-vocab_size // num_ranks)
    cannot = ""
    if num_ranks == 1:
        cannot = "each process has a replica of the model (parallel.shard=1)"
    elif tokens is None:
        cannot = "this recipe's loss needs the whole output layer"
    elif model.config.head_bias:
        cannot = "the output layer has a bias"
    elif type(embedding) is not nn.Embedding or (head is not None and type(head) is not nn.Linear):
        cannot = "the embedding or the output layer has an adapter"
    elif rows * (num_ranks - 1) >= vocab_size:
        cannot = f"a vocabulary of {vocab_size} tokens is too small for {num_ranks} processes"
    if cfg.vocabulary == "cut":
        if cannot:
            raise ValueError(f"parallel.vocabulary=cut: {cannot}. Set parallel.vocabulary=auto.")
        return ""
    assert tokens is not None or cannot
    if not cannot and model.config.hidden_size * vocab_size * embedding.weight.element_size() < SMALL_WEIGHT_BYTES:
        return f"the weight is smaller than {SMALL_WEIGHT_BYTES // 2**20} MiB"
    if not cannot and tokens is not None and num_ranks * tokens > vocab_size:
        return (
            f"exchanging the {num_ranks * tokens:,} tokens of {num_ranks} processes would send more than gathering "
            f"{vocab_size:,} rows (parallel.vocabulary=cut takes less memory)"
        )
    return cannot


class CutVocabulary:
    """A model's embedding and output layer, sharded by rows over `mesh`; replaces the embedding's forward."""

    def __init__(self, model: Decoder, ranks: ManyRanks, mesh: DeviceMesh) -> None:
        self.ranks, self.group, self.size = ranks, ranks.mesh.get_group(SHARD), ranks.num_shards
        self.copies = ranks.mesh.get_group(REPLICATE) if ranks.mesh[REPLICATE].size() > 1 else None
        self.vocab_size = model.config.vocab_size
        self.first = ranks.shard * -(-self.vocab_size // self.size)
        self.embedding, self.head = model.model.embed_tokens, model.head
        self.parameters = {
            self._keep_own_rows(module, mesh) for module in (self.embedding, self.head) if isinstance(module, nn.Module)
        }
        self._tied_rows: Tensor | None = None  # (P, D), an output of the last look-up's autograd node
        setattr(self.embedding, "forward", self.look_up)  # noqa: B010  (pyright: an attribute of the instance)
        model.tied_output_weight = None
        model.sharding.vocabulary = self

    def _keep_own_rows(self, module: nn.Module, mesh: DeviceMesh) -> nn.Parameter:
        from torch.distributed.tensor import DTensor, Replicate, Shard

        whole: nn.Parameter = module.weight  # type: ignore[assignment]
        rows = whole.detach()[self.first : self.first + -(-self.vocab_size // self.size)].clone()
        placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
        part = DTensor.from_local(rows, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())
        parameter = nn.Parameter(part, requires_grad=whole.requires_grad)
        setattr(module, "weight", parameter)  # noqa: B010
        return parameter

    def look_up(self, ids: Tensor) -> Tensor:
        """The embedding's rows (..., D) of `ids` (...)."""
        flat = ids.flatten()
        (most,) = self.ranks.highest(len(flat))
        rows, tied_rows = _LookUp.apply(flat, _rows(self.embedding), self, most)
        self._tied_rows = tied_rows if self.head is None else None
        return rows.view(*ids.shape, -1)

    def output_rows(self) -> Tensor:
        """(P, D): the output layer's rows of this rank; if tied, those of the last look-up."""
        if self.head is not None:
            rows = _rows(self.head)
            if rows.requires_grad and self.copies is not None:  # for a tied weight, the look-up's backward does this
                rows.register_hook(self.sum_copies)
            return rows
        if self._tied_rows is None or not torch.is_grad_enabled():
            return _rows(self.embedding)
        return self._tied_rows

    def passes(
        self, num_targets: int, chunk_tokens: int, terms: Terms, compile: bool, needs_gradient: bool
    ) -> "_Passes":
        """The passes of `linear_cross_entropy` over chunks of all ranks' tokens, of which this rank has
        `num_targets`."""
        (most,) = self.ranks.highest(num_targets)
        chunk = min(most, -(-chunk_tokens // self.size)) if chunk_tokens else most
        work = describe_part(terms, compile), gradient(terms, compile, is_capped=True)
        return _Passes(self, most, max(chunk, 1), terms, *work, needs_gradient)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """(..., V) from hidden (..., D), without gradients. All ranks call it."""
        flat = hidden.flatten(0, -2)
        (most,) = self.ranks.highest(len(flat))
        gathered = self.gather(_padded(flat, most))  # (n N, D)
        rows = -(-self.vocab_size // self.size)
        local_rows = self.output_rows()
        parts = hidden.new_zeros(len(gathered), rows)
        parts[:, : len(local_rows)] = gathered @ local_rows.T
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=self.group)
        whole = received.view(self.size, most, rows).transpose(0, 1).reshape(most, -1)
        return whole[: len(flat), : self.vocab_size].view(*hidden.shape[:-1], -1)

    def gather(self, values: Tensor) -> Tensor:
        """All-gather: (n C, ...) from each rank's (C, ...)."""
        gathered = values.new_empty(self.size * len(values), *values.shape[1:])
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
        gather(gathered, values.contiguous(), group=self.group)
        return gathered

    def sum_back(self, gathered: Tensor) -> Tensor:
        """Reduce-scatter: this rank's (C, ...) of the sum of all ranks' (n C, ...)."""
        values = gathered.new_empty(len(gathered) // self.size, *gathered.shape[1:])
        sum_back = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        sum_back(values, gathered, group=self.group)
        return values

    def sum_copies(self, gradient: Tensor) -> Tensor:
        """Sum a gradient over the model's replicas, in place."""
        if self.copies is not None:
            dist.all_reduce(gradient, group=self.copies)
        return gradient

    def place(self, ids: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        """Each id's row of this rank's `num_rows`, and whether the rank has it; otherwise the row is arbitrary."""
        row = ids - self.first
        is_here = (row >= 0) & (row < num_rows)
        return row.remainder(num_rows), is_here


def _rows(module: Any) -> Tensor:
    """(P, D): this rank's rows of the module's weight, with their gradient."""
    return module.weight.to_local()


def _padded(values: Tensor, length: int, fill: int = 0) -> Tensor:
    """The values (N, ...) padded with `fill` to (length, ...)."""
    if len(values) == length:
        return values
    return torch.cat([values, values.new_full((length - len(values), *values.shape[1:]), fill)])


class _LookUpContext(AutogradContext[Tensor]):  # ids
    cut: CutVocabulary
    most: int
    shape: torch.Size  # of the weight, as its dtype
    dtype: torch.dtype


class _LookUp(torch.autograd.Function):
    """Returns the embedding rows of this rank's ids and the rank's part of the weight, for a tied output layer's
    gradient."""

    @staticmethod
    def forward(
        ctx: _LookUpContext, ids: Tensor, weight: Tensor, cut: CutVocabulary, most: int
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(ids)
        ctx.cut, ctx.most, ctx.shape, ctx.dtype = cut, most, weight.shape, weight.dtype
        ctx.set_materialize_grads(False)
        rows = weight.new_empty(len(ids), weight.shape[1])
        for chunk, gathered in _ids_in_chunks(ids, most, cut):
            row, is_here = cut.place(gathered, len(weight))
            embedded = weight.index_select(0, row).masked_fill_(~is_here[:, None], 0)
            rows[chunk] = cut.sum_back(embedded)[: len(rows[chunk])]
        return rows, weight.detach()

    @staticmethod
    def backward(ctx: _LookUpContext, *grad_outputs: Tensor | None) -> tuple[None, Tensor | None, None, None]:
        (ids,) = ctx.saved_tensors
        grad_rows, gradient = grad_outputs
        if grad_rows is None:
            return None, None if gradient is None else ctx.cut.sum_copies(gradient.clone()), None, None
        wide = torch.promote_types(ctx.dtype, torch.float32)
        total = torch.zeros(ctx.shape, dtype=wide, device=grad_rows.device)
        for chunk, gathered in _ids_in_chunks(ids, ctx.most, ctx.cut):
            row, is_here = ctx.cut.place(gathered, len(total))
            gradients = ctx.cut.gather(_padded(grad_rows[chunk], len(gathered) // ctx.cut.size))
            total.index_add_(0, row, gradients.to(wide).masked_fill_(~is_here[:, None], 0))
        # In place: the loss made this gradient for this node alone.
        gradient = total.to(ctx.dtype) if gradient is None else gradient.contiguous().add_(total)
        return None, ctx.cut.sum_copies(gradient), None, None


def _ids_in_chunks(ids: Tensor, most: int, cut: CutVocabulary) -> Iterator[tuple[slice, Tensor]]:
    """Each chunk's slice of this rank's ids (N,) and the ids of all ranks; the number of chunks is equal on all
    ranks."""
    length = max(1, LOOKED_UP_TOKENS // cut.size)
    for chunk in in_chunks(most, length):
        yield chunk, cut.gather(_padded(ids[chunk], chunk.stop - chunk.start, fill=-1))


class _Passes(NamedTuple):
    """As `lean_ft.losses.linear_cross_entropy.Passes`, for the tokens of all ranks and this rank's rows of the
    weight."""

    cut: CutVocabulary
    most: int  # targets of one rank
    chunk_tokens: int  # of each rank
    terms: Terms
    describe: Work
    write_gradient: Work
    needs_gradient: bool

    def chunks(self, hidden: Tensor, projection: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield each chunk's slice of this rank's tokens, the hidden states of all ranks (n C, D) and their logits (n
        C, P)."""
        logits_of = ChunkLogits(projection)
        for chunk in in_chunks(self.most, self.chunk_tokens, shown=2):
            states = hidden[chunk].to(projection.dtype)
            gathered = self.cut.gather(_padded(states, chunk.stop - chunk.start))
            yield chunk, gathered, logits_of(gathered)

    def work(self, chunk: slice, logits: Tensor, labels: Tensor, rows: Tensor) -> None:
        cut, length = self.cut, chunk.stop - chunk.start
        ids = cut.gather(_padded(labels, length, fill=IGNORED_LABEL))  # (n C,)
        parts = torch.empty(len(ids), NUM_PART_COLUMNS, dtype=rows.dtype, device=rows.device)
        self.describe(logits, ids - cut.first, parts)
        parts = cut.gather(parts).view(cut.size, len(ids), NUM_PART_COLUMNS)
        of_all, log_total = whole_of_parts(parts, self.terms)
        rows.copy_(of_all[cut.ranks.shard * length :][: len(rows)])
        if self.needs_gradient:
            self.write_gradient(logits, ids - cut.first, log_total, (ids != IGNORED_LABEL).to(rows.dtype))

    def gradient_of_hidden(self, grad_logits: Tensor, projection: Tensor) -> Tensor:
        # In float32, because the parts are larger than their sum.
        part = grad_logits @ projection
        return self.cut.sum_back(part.to(torch.promote_types(part.dtype, torch.float32)))
