"""Settings of the losses of embeddings and rerankers, and checks that rows have what a loss compares.

A default that several losses have is the one of sentence-transformers, so a run without further settings has its loss.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from lean_ft.settings.base import OwnFunction
from lean_ft.settings.losses import ScoreLossConfig
from lean_ft.system.units import enumerated
from lean_ft.system.user_functions import check_function

EmbeddingLossName = Literal["infonce", "cosent", "triplet", "margin_mse", "kl"]
RerankingLossName = Literal["bce", "ranknet", "listnet", "lambda"]
Direction = Literal["query_to_doc", "doc_to_query", "query_to_query", "doc_to_doc"]
Hardness = Literal["in_batch_negatives", "hard_negatives", "all_negatives"]
Distance = Literal["euclidean", "cosine", "manhattan"]
Similarity = Literal["dot", "cosine"]
Weighting = Literal["ndcg2pp", "ndcg2", "ndcg1", "lambdarank"]

LossTable = Mapping[str, Mapping[str, object]]
"""Losses by name, each with its own settings and their defaults."""

# The losses of embeddings: functions of `lean_ft.losses.embedding` by name, and their own arguments.
EMBEDDING_LOSSES: LossTable = {
    "infonce": {
        "temperature": 0.05,
        "directions": ("query_to_doc",),
        "partition_mode": "joint",
        "hardness_mode": None,
        "hardness_strength": None,
        "mask_duplicates": True,
        "chunk_rows": 512,
    },
    "cosent": {"temperature": 0.05},
    "triplet": {"margin": 5.0, "distance": "euclidean"},
    "margin_mse": {"similarity": "dot"},
    "kl": {"temperature": 1.0, "teacher_temperature": None, "similarity": "dot"},
}
LEARN_SCORES = ("cosent", "margin_mse", "kl")
"""Losses of embeddings that read the scores of rows."""
COMPARE_A_ROW = ("triplet", "margin_mse", "kl")
"""Losses of embeddings that compare the passages of a row, and no others."""
# Strength of `hardness_mode` in the papers: Lan et al. 2025, and EmbeddingGemma for explicit negatives.
HARDNESS_STRENGTHS: dict[Hardness, float] = {"in_batch_negatives": 9.0, "hard_negatives": 5.0, "all_negatives": 5.0}
# The losses of rerankers: functions of `lean_ft.losses.reranking` by name, and their own arguments.
RERANKING_LOSSES: LossTable = {
    "bce": {"positive_weight": 1.0},
    "ranknet": {"k": None, "sigma": 1.0},
    "listnet": {},
    "lambda": {"weighting": "ndcg2pp", "mu": 10.0, "k": None, "sigma": 1.0, "eps": 1e-10},
}


def _shown(value: object) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_shown, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def _only_of(losses: LossTable, name: str, meaning: str, null: str = "") -> Any:
    """A field for the setting `name`, which only some of the losses read; its description names them and their
    defaults, or says what `null` is."""
    defaults = {loss: _shown(own[name]) for loss, own in losses.items() if name in own}
    if not null:
        common = next(iter(defaults.values()))
        null = ", and ".join([common, *(f"{value} for {loss}" for loss, value in defaults.items() if value != common)])
    return Field(None, description=f"For {enumerated([*defaults])}: {meaning} null is {null}.")


class ComparisonLossConfig(ScoreLossConfig):
    """A loss chosen by name, which compares vectors or scores of texts. A setting that not all losses read is null
    unless given."""

    losses: ClassVar[LossTable]
    name: str

    @property
    def of_loss(self) -> dict[str, Any]:
        """The settings that the chosen loss reads, with its defaults for those that are null."""
        defaults = self.losses.get(self.name, {})
        given = {name: getattr(self, name) for name in defaults}
        return {name: defaults[name] if value is None else value for name, value in given.items()}

    @model_validator(mode="after")
    def _are_read(self) -> Self:
        names = {name: None for own in self.losses.values() for name in own}
        for name in names:
            value = getattr(self, name)
            if value is not None and name not in self.losses.get(self.name, {}):
                whose = " or ".join(f"loss.name={loss}" for loss, own in self.losses.items() if name in own)
                raise ValueError(
                    f"{name}={_shown(value)} has no effect with the loss {self.name}. Remove it, or set {whose}."
                )
        return self


class EmbeddingLossConfig(ComparisonLossConfig):
    """The loss of the vectors of all rows of a step; docs/embeddings.md has the formulas."""

    losses: ClassVar[LossTable] = EMBEDDING_LOSSES
    name: Annotated[EmbeddingLossName | OwnFunction, AfterValidator(check_function)] = "infonce"
    """Loss function. `infonce`: a query is closer to its own passage than to all other passages of the step. `cosent`:
    pairs of texts with a higher `score` are closer. `triplet`: a query is closer to its own passage than to the row's
    negatives, by a margin. `margin_mse` and `kl` learn the scores that a teacher gave to the row's passages.
    `my_loss.py:fn` is your own function of vectors (P, S, D) and scores (P, S - 1), which returns a scalar."""
    temperature: PositiveFloat | None = _only_of(EMBEDDING_LOSSES, "temperature", "divides similarities.")
    directions: list[Direction] | None = _only_of(
        EMBEDDING_LOSSES,
        "directions",
        "which similarities compete with that of a query and its own passage: of the query and all passages "
        "(query_to_doc, always part of it), of the passage and all queries (doc_to_query), of the query and other "
        "queries (query_to_query), of the passage and passages of other rows (doc_to_doc).",
    )
    partition_mode: Literal["joint", "per_direction"] | None = _only_of(
        EMBEDDING_LOSSES,
        "partition_mode",
        "one softmax over all directions (`joint`), or the mean of a softmax for each (`per_direction`).",
    )
    hardness_mode: Hardness | None = _only_of(
        EMBEDDING_LOSSES,
        "hardness_mode",
        "negatives whose weight in the softmax grows with their similarity to the query: the passages of other rows "
        "(in_batch_negatives), the row's own negatives (hard_negatives), or both (all_negatives).",
        null="no such weights",
    )
    hardness_strength: PositiveFloat | None = _only_of(
        EMBEDDING_LOSSES,
        "hardness_strength",
        "factor of the cosine that hardness_mode adds to a logit.",
        null=enumerated([f"{value:g} for {mode}" for mode, value in HARDNESS_STRENGTHS.items()]),
    )
    mask_duplicates: bool | None = _only_of(
        EMBEDDING_LOSSES,
        "mask_duplicates",
        "leave passages with the same text as the query's own passage out of its negatives, and queries with the same "
        "text or the same own passage.",
    )
    chunk_rows: PositiveInt | None = _only_of(
        EMBEDDING_LOSSES, "chunk_rows", "queries whose similarities to all passages are in memory at once."
    )
    margin: NonNegativeFloat | None = _only_of(
        EMBEDDING_LOSSES,
        "margin",
        "how much further than its own passage a negative should be from the query. Vectors of length 1 are at most 2 "
        "apart (euclidean, cosine), so a larger margin is never reached and all triplets count.",
    )
    distance: Distance | None = _only_of(EMBEDDING_LOSSES, "distance", "distance of two vectors.")
    similarity: Similarity | None = _only_of(
        EMBEDDING_LOSSES,
        "similarity",
        "similarity that learns the teacher's scores. Both are equal if the model scales vectors to length 1.",
    )
    teacher_temperature: PositiveFloat | None = _only_of(
        EMBEDDING_LOSSES, "teacher_temperature", "divides the teacher's scores.", null="the temperature"
    )
    matryoshka: list[PositiveInt] = Field([])
    """With any loss: sizes of shorter vectors, made of a vector's first numbers and scaled to length 1. The loss is the
    sum over these sizes. Name the full size too."""
    matryoshka_weights: list[PositiveFloat] = Field([])
    """Factor of the loss of each size of matryoshka. An empty list is 1 for each."""

    @property
    def of_loss(self) -> dict[str, Any]:
        own = super().of_loss
        if self.hardness_mode is not None and self.hardness_strength is None:
            own["hardness_strength"] = HARDNESS_STRENGTHS[self.hardness_mode]
        return own

    @model_validator(mode="after")
    def _directions_act(self) -> Self:
        directions: list[Direction] = ["query_to_doc"] if self.directions is None else self.directions
        if "query_to_doc" not in directions or len({*directions}) < len(directions):
            raise ValueError(
                f"directions={_shown(directions)}: expected query_to_doc, which has the own passage, and others once "
                "at most. Set for example directions=[query_to_doc, doc_to_query]."
            )
        if self.partition_mode == "per_direction":
            alike = [one for one in directions if one in ("query_to_query", "doc_to_doc")]
            if alike:
                raise ValueError(
                    f"partition_mode=per_direction: a softmax of {enumerated(alike)} has no right answer. Set "
                    "partition_mode=joint, or directions=[query_to_doc, doc_to_query]."
                )
            if len(directions) == 1:
                raise ValueError(
                    "partition_mode=per_direction has no effect with 1 direction. Remove it, or set "
                    "directions=[query_to_doc, doc_to_query]."
                )
        if self.hardness_strength is not None and self.hardness_mode is None:
            raise ValueError(
                f"hardness_strength={self.hardness_strength:g} has no effect without hardness_mode. Remove it, or set "
                "hardness_mode=in_batch_negatives."
            )
        return self

    @model_validator(mode="after")
    def _sizes_have_weights(self) -> Self:
        sizes, weights = self.matryoshka, self.matryoshka_weights
        if len({*sizes}) < len(sizes):
            raise ValueError(f"matryoshka={_shown(sizes)} has a size twice. Name each size once.")
        if weights and not sizes:
            raise ValueError(
                f"matryoshka_weights={_shown(weights)} has no effect without matryoshka. Remove it, or set matryoshka "
                "to a list of sizes."
            )
        if weights and len(weights) != len(sizes):
            raise ValueError(
                f"matryoshka_weights={_shown(weights)} has {len(weights)} factors for the {len(sizes)} sizes of "
                f"matryoshka={_shown(sizes)}. Give one factor for each size, or remove matryoshka_weights."
            )
        return self


class RerankingLossConfig(ComparisonLossConfig):
    """The loss of the scores of a query's passages; docs/embeddings.md has the formulas."""

    losses: ClassVar[LossTable] = RERANKING_LOSSES
    name: Annotated[RerankingLossName | OwnFunction, AfterValidator(check_function)] = "bce"
    """Loss function. `bce`: whether a passage is right, each by itself. `ranknet`: all pairs of passages with different
    labels. `listnet`: the passages as one distribution. `lambda` (LambdaLoss): pairs weighted by what their order
    changes in nDCG. `my_loss.py:fn` is your own function of scores and labels (P, S), which returns (P,)."""
    yes_no: tuple[str, str] | None = None
    """Two words of a language model, [yes, no], of one token each: the score is the difference of their logits, as in
    Qwen3-Reranker. null adds a layer with one output, or trains the model's own."""
    positive_weight: PositiveFloat | None = _only_of(
        RERANKING_LOSSES, "positive_weight", "factor of a right passage's loss."
    )
    weighting: Weighting | None = _only_of(
        RERANKING_LOSSES,
        "weighting",
        "weights of pairs: NDCG-Loss2++, NDCG-Loss2, NDCG-Loss1 or LambdaRank.",
    )
    mu: PositiveFloat | None = _only_of(
        RERANKING_LOSSES, "mu", "factor of NDCG-Loss2 in NDCG-Loss2++, which adds LambdaRank to it."
    )
    k: PositiveInt | None = _only_of(
        RERANKING_LOSSES, "k", "count only pairs of which one passage is among the first k.", null="all pairs"
    )
    sigma: PositiveFloat | None = _only_of(RERANKING_LOSSES, "sigma", "factor of the difference of two scores.")
    eps: Annotated[float, Field(gt=0.0, lt=1.0)] | None = _only_of(
        RERANKING_LOSSES, "eps", "lower bound of the best DCG of a row, which divides the weights."
    )

    @model_validator(mode="after")
    def _mu_acts(self) -> Self:
        if self.mu is not None and self.weighting not in (None, "ndcg2pp"):
            raise ValueError(
                f"mu={self.mu:g} has no effect with weighting={self.weighting}. Remove it, or set weighting=ndcg2pp."
            )
        if self.yes_no is not None and self.yes_no[0] == self.yes_no[1]:
            raise ValueError(f"yes_no={_shown(self.yes_no)} names one word twice. Name two words.")
        return self


def check_rows(cfg: EmbeddingLossConfig, has_scores: bool, num_passages: int, rows_per_step: int | None = None) -> None:
    """Raise ValueError if the rows lack what the loss compares.

    has_scores: whether rows have a `score`, or a teacher's scores of their passages; num_passages: passages of a row;
    rows_per_step: rows of an optimizer step, on all ranks; None leaves this check out.
    """
    loss, pair = f"loss.name={cfg.name}", num_passages == 1
    if cfg.name == "infonce" and has_scores and pair:
        raise ValueError(
            f"{loss} takes the second text of each row as right, but the rows have two texts and a `score`, which may "
            "be low. Set loss.name=cosent, or remove the field `score` from the rows."
        )
    if cfg.name in LEARN_SCORES and not has_scores:
        field = "a `score` of its two texts" if cfg.name == "cosent" else "a teacher's `scores` of its passages"
        raise ValueError(
            f"{loss} learns scores, and the rows have none. Give each row {field}, or set loss.name=infonce."
        )
    if cfg.name in COMPARE_A_ROW and pair:
        remedy = "loss.name=cosent" if has_scores else "loss.name=infonce, which takes other rows' passages"
        raise ValueError(
            f"{loss} compares the passages of a row, and the rows have 1. Add a field `negative` to the rows, or set "
            f"{remedy}."
        )
    if cfg.hardness_mode == "hard_negatives" and pair:
        raise ValueError(
            "loss.hardness_mode=hard_negatives has no effect: the rows have no negatives. Add a field `negative`, or "
            "set loss.hardness_mode=in_batch_negatives."
        )
    if cfg.name in ("infonce", "cosent") and pair and rows_per_step == 1:
        raise ValueError(
            f"{loss} compares the rows of a step, and a step has 1 row without negatives, whose gradient is 0. "
            "Raise batch_size or gradient_accumulation_steps, or add a field `negative` to the rows."
        )


def check_passages(cfg: RerankingLossConfig, num_passages: int) -> None:
    """Raise ValueError if the loss compares a row's passages and the rows have one, or if `k` leaves out no pair."""
    if num_passages == 1 and cfg.name in ("ranknet", "listnet", "lambda"):
        raise ValueError(
            f"loss.name={cfg.name} compares the passages of a row, and the rows have 1. Add a field `negative` to the "
            "rows, or set loss.name=bce."
        )
    if cfg.k is not None and cfg.k >= num_passages - 1:
        raise ValueError(
            f"loss.k={cfg.k} has no effect: each pair of a row's {num_passages} passages has one among the first "
            f"{cfg.k}. Remove it, or set a smaller loss.k or a larger data.negatives."
        )
