"""Texts to vectors, and queries with passages to scores: for `leanft embed`, `leanft serve` and Python.

Texts are sorted by length and lie in one row without padding, up to `TOKENS_AT_A_TIME` positions in a forward pass.

Shapes: M texts, T tokens of a pass, D features.
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from lean_ft.embedding.folder import ScoresOf, VectorsOf
from lean_ft.embedding.vectors import text_vectors
from lean_ft.models import Decoder, load_model, stored_labels
from lean_ft.models.config_json import Labels
from lean_ft.models.device import check_dtype, resolve_device
from lean_ft.models.load_options import torch_dtype
from lean_ft.models.own_families import check_own_families
from lean_ft.models.stored_weights import stored_dtype
from lean_ft.peft import ids_of_rows, is_adapter, labels_of, load_adapter
from lean_ft.peft.finished_models import find_base, find_finished, tokenizer_of
from lean_ft.tokenizers import Tokenizer
from lean_ft.tokenizers.loading import context_length
from lean_ft.tokenizers.pair_templates import encode_pairs

TOKENS_AT_A_TIME = 8192  # positions of a forward pass
UsedAs = Literal["query", "passage"]
Step = tuple[list[int], Tensor]
"""Indices of texts, and their vectors or scores."""


@dataclass(frozen=True)
class Embedder:
    """A model that makes vectors of texts."""

    model: Decoder
    tokenizer: Tokenizer
    how: VectorsOf
    is_guess: bool = False
    """Whether the model's folder does not say how vectors are made."""

    @property
    def size(self) -> int:
        """Numbers of a vector."""
        return self.how.dense[-1].out_features if self.how.dense else self.model.config.hidden_size

    @property
    def max_length(self) -> int | None:
        """Tokens of the longest text; None if nothing bounds it."""
        return self.how.max_length or context_length(self.model.source.config)

    def ids(self, texts: Sequence[str], used_as: UsedAs | None = None, *, cuts: bool = True) -> list[np.ndarray]:
        """Return the ids, int32, of each text with its prompt, within the tokens that the model expects around a text.
        cuts: cut texts that are too long on the right."""
        prompt = self.how.prompt(used_as)
        return self.tokenizer.encode_texts([prompt + text for text in texts], self.max_length if cuts else None)

    def encode(self, texts: Sequence[str], used_as: UsedAs | None = None, dimensions: int | None = None) -> Tensor:
        """Return the vectors of texts, (M, D) in float32 on the CPU.

        used_as: with the saved prompt of queries or passages; dimensions: the first D numbers only, scaled to length 1
        again if the model's vectors have that length. Raises ValueError for a text without tokens.
        """
        return self.encode_ids(self.ids(texts, used_as), dimensions)

    def encode_ids(self, ids: Sequence[Sequence[int] | np.ndarray], dimensions: int | None = None) -> Tensor:
        """Return the vectors of ids, as `encode` does. Raises ValueError for a text without ids."""
        vectors = torch.empty(len(ids), dimensions or self.size)
        for places, made in self.steps(ids, dimensions):
            vectors[places] = made
        return vectors

    def steps(
        self,
        ids: Sequence[Sequence[int] | np.ndarray],
        dimensions: int | None = None,
        tokens_at_a_time: int = TOKENS_AT_A_TIME,
    ) -> Iterator[Step]:
        """Yield the vectors of some texts at a time, with the indices of the texts."""
        if dimensions is not None and not 1 <= dimensions <= self.size:
            raise ValueError(f"dimensions is {dimensions}; expected 1 to {self.size}, the numbers of a vector.")
        for places, batch in _batches(ids, self.model.device, tokens_at_a_time):
            with torch.no_grad():
                made = text_vectors(self.model, batch, self.how.pooling)[:, :dimensions]
                made = normalize(made, dim=-1) if self.how.normalize else made
            yield places, made.float().cpu()


def computed_in_turns(size: int, steps: Iterator[Step]) -> Generator[None, None, Tensor]:
    """Yield after each step, and return the results of all texts, (size, ...)."""
    results: Tensor | None = None
    for places, made in steps:
        results = torch.empty(size, *made.shape[1:]) if results is None else results
        results[places] = made
        yield
    assert results is not None, "a request has a text"
    return results


@dataclass(frozen=True)
class Reranker:
    """A model that gives a query and a passage one score."""

    model: Decoder
    tokenizer: Tokenizer
    how: ScoresOf

    def scores(self, query: str, passages: Sequence[str]) -> Tensor:
        """Return a score per passage, (M,) in float32 on the CPU; its sigmoid is between 0 and 1. Raises ValueError if
        the template and the query leave no room for a passage."""
        return score_pairs(self.model, self.tokenizer, query, passages, self.how)

    def ids(self, query: str, passages: Sequence[str]) -> list[np.ndarray]:
        """Return the ids, int32, of the query with each passage. Raises ValueError as `scores` does."""
        return encode_pairs(self.tokenizer, self.how.template, query, list(passages), self.max_length)

    @property
    def max_length(self) -> int | None:
        """Tokens of the longest pair; None if nothing bounds it."""
        return self.how.max_length or context_length(self.model.source.config)


def score_pairs(model: Decoder, tokenizer: Tokenizer, query: str, passages: Sequence[str], how: ScoresOf) -> Tensor:
    """Return a score per passage, (M,) in float32 on the CPU, read at the last token of the template with the query and
    the passage.

    It is the output of the model's score layer, or with `how.yes_no` the logit of yes minus that of no. Raises
    ValueError if the template and the query leave no room for a passage.
    """
    longest = how.max_length or context_length(model.source.config)
    return score_ids(model, encode_pairs(tokenizer, how.template, query, list(passages), longest), how.yes_no)


def score_ids(model: Decoder, ids: Sequence[np.ndarray], yes_no: tuple[int, int] | None) -> Tensor:
    """Return the score at the last id of each text, (M,) in float32 on the CPU."""
    scores = torch.empty(len(ids))
    for places, made in score_steps(model, ids, yes_no):
        scores[places] = made
    return scores


def score_steps(
    model: Decoder,
    ids: Sequence[np.ndarray],
    yes_no: tuple[int, int] | None,
    tokens_at_a_time: int = TOKENS_AT_A_TIME,
) -> Iterator[Step]:
    """Yield the scores of some texts at a time, with the indices of the texts."""
    for places, batch in _batches(ids, model.device, tokens_at_a_time):
        with torch.no_grad():
            weight = model.output_weight if yes_no is None else model.output_weight[[*yes_no]]
            hidden = model(**batch.inputs, return_hidden=True).flatten(0, -2).index_select(0, batch.last)
            wide = torch.promote_types(hidden.dtype, torch.float32)
            read = hidden.to(wide) @ weight.to(wide).T
            if yes_no is not None and (cap := model.config.logits_softcap) is not None:
                read = torch.tanh(read / cap) * cap
            made = read[:, 0] if yes_no is None else read[:, 0] - read[:, 1]
        yield places, made.float().cpu()


def open_embedder(path: str | Path, device: str = "auto", dtype: str | None = None) -> Embedder:
    """Return a model for vectors.

    path: a folder, a run (its newest complete checkpoint), a checkpoint of a model or an adapter, a Hub repository, or
    `tiny`; dtype: None uses the dtype of the files. A causal model whose folder does not say how vectors are made gives
    the last token's hidden state, of length 1, and `is_guess` is set.

    Raises ValueError if the model is missing or incomplete, or is a reranker.
    """
    folder, base = _folders(path)
    how = VectorsOf.read(folder) or VectorsOf.read(base)
    model, tokenizer = _open(folder, base, device, dtype)
    if model.config.num_scores or (how is None and (ScoresOf.read(folder) or ScoresOf.read(base))):
        raise ValueError(f"{folder} gives scores and no vectors. A reranker is served by `leanft serve`.")
    return Embedder(model, tokenizer, how or VectorsOf(), is_guess=how is None)


def open_reranker(
    path: str | Path, device: str = "auto", dtype: str | None = None, how: ScoresOf | None = None
) -> Reranker:
    """Return a reranker. Arguments are those of `open_embedder`; how: instead of what the folder's files say.

    Raises ValueError if the model is missing or incomplete, or if nothing says how its scores are made.
    """
    folder, base = _folders(path)
    how = how or ScoresOf.read(folder) or ScoresOf.read(base)
    if how is None:
        raise ValueError(f"{folder} is not a reranker: no file says how a query and a passage are scored.")
    model, tokenizer = _open(folder, base, device, dtype)
    expected = 0 if how.yes_no is not None else 1
    if model.config.num_scores != expected:
        raise ValueError(f"{folder} has an output layer of {model.config.num_scores} scores; expected {expected}.")
    if how.yes_no is not None and max(how.yes_no) >= model.config.vocab_size:
        raise ValueError(f"{folder}: the ids {how.yes_no} of yes and no are outside the vocabulary.")
    return Reranker(model, tokenizer, how)


def kind_of_folder(path: str | Path) -> Literal["vectors", "scores"] | None:
    """Whether a model's folder says that it makes vectors or scores; None if it says neither."""
    folders = _folders(path)
    if any(VectorsOf.read(folder) is not None for folder in folders):
        return "vectors"
    return "scores" if any(ScoresOf.read(folder) is not None for folder in folders) else None


def _folders(path: str | Path) -> tuple[Path, Path]:
    """The folder of the model or adapter, and the base model's, which are equal without an adapter."""
    folder = find_finished(path, quick=True)
    return folder, find_finished(find_base(folder), quick=True) if is_adapter(folder) else folder


def _labels_of_adapter(folder: Path) -> Labels | None:
    return labels_of(folder) if is_adapter(folder) else None


def _open(folder: Path, base: Path, device: str, dtype: str | None) -> tuple[Decoder, Tokenizer]:
    where = resolve_device(device)
    kept = stored_dtype(base) if dtype is None else torch_dtype(dtype)
    check_dtype(str(kept).removeprefix("torch."), where)
    is_adapted = folder != base
    labels = _labels_of_adapter(folder)
    labels = stored_labels(base) if labels is None else labels
    new_ids = ids_of_rows(folder) if is_adapted else []
    model = load_model(base, where, dtype=kept, scores=labels, new_ids=new_ids)
    check_own_families()
    if is_adapted:
        load_adapter(model, folder)
    return model.requires_grad_(False).eval(), tokenizer_of(folder, base)


@dataclass(frozen=True)
class _Row:
    """Texts in one row of a forward pass."""

    inputs: dict[str, Any]
    last: Tensor  # (M,)
    lengths: Tensor  # (M,)
    continued: tuple[Tensor, Tensor] | None = None  # every text is whole


def _batches(
    ids: Sequence[Sequence[int] | np.ndarray], device: torch.device, tokens_at_a_time: int
) -> Iterator[tuple[list[int], _Row]]:
    """Yield indices of texts and the row that they share, texts of similar lengths together."""
    if not all(len(one) for one in ids):
        raise ValueError("a text has no token.")
    waiting = sorted(range(len(ids)), key=lambda i: -len(ids[i]))
    while waiting:
        count, num_tokens = 0, 0
        for i in waiting:
            num_tokens += len(ids[i])
            if count and num_tokens > tokens_at_a_time:
                break
            count += 1
        places, waiting = waiting[:count], waiting[count:]
        lengths = torch.tensor([len(ids[i]) for i in places], device=device)
        row = torch.tensor(np.concatenate([ids[i] for i in places]), dtype=torch.int64, device=device)
        ends = lengths.cumsum(0)
        bounds = torch.cat((ends.new_zeros(1), ends)).to(torch.int32)
        yield places, _Row({"input_ids": row[None], "cu_seqlens": bounds}, ends - 1, lengths)
