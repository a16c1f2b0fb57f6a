"""Scoring files with a reward model, and the pad token of a reward model.

transformers' sequence classifiers read the rightmost token of a padded row that is not the pad token. So the pad token
of a reward model must not end a sequence.
"""

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np

from lean_ft.data import Batches, EvalBatches
from lean_ft.data.documents import renderer_of
from lean_ft.data.formats import FORMATS, NUM_ROWS_TO_DETECT, formats_of
from lean_ft.data.pairs import PairReader
from lean_ft.data.sources import RowSources
from lean_ft.data.token_labels import SPANS, TokenLabelReader, spans_of
from lean_ft.frozen.reward_model import open_reward_model, score, token_scores
from lean_ft.losses.entities import are_bio
from lean_ft.models import Decoder
from lean_ft.models.config_json import label_names, labels_tokens
from lean_ft.settings import ClassificationDataConfig, DataConfig, PreferenceDataConfig, SFTDataConfig
from lean_ft.tokenizers import Tokenizer

__all__ = ["open_reward_model", "score", "score_lines", "score_rows", "set_padding_apart"]

ROWS_AT_A_TIME = 256  # rows of a file that are read, scored and written together


def set_padding_apart(model: Decoder, tokenizer: Tokenizer, *batches: Batches | EvalBatches | None) -> None:
    """Set the tokenizer's pad token in the model's config.json.

    Raises ValueError if the pad token is the eos token or ends a sequence of these batches.
    """
    layouts = [one.layout for one in batches if isinstance(one, Batches | EvalBatches)]
    if not layouts:  # a plan has no rows
        return
    pad_id, names = tokenizer.pad_id, {token_id: name for name, token_id in tokenizer.added_tokens.items()}
    ends_one = any(
        (one.columns.values["ids"][one.columns.starts + one.columns.lengths - 1] == pad_id).any() for one in layouts
    )
    if pad_id == tokenizer.eos_id or ends_one:
        kept_apart = sorted(
            token for token in tokenizer.control_tokens if any(part in token for part in ("pad", "reserved", "extra"))
        )
        advice = (
            f" such as {kept_apart[0]}" if kept_apart else f" of {', '.join(sorted(tokenizer.control_tokens))[:200]}"
        )
        raise ValueError(
            f"the tokenizer's pad token {names.get(pad_id, pad_id)!r} also ends sequences. Programs that open the "
            "model find the end of a padded row by this token, so they would read the score one token too early. Set "
            f"pad_token to a control token that never ends a sequence,{advice}."
        )
    model.source.config["pad_token_id"] = pad_id


def score_rows(
    model: Decoder, tokenizer: Tokenizer, data: str | DataConfig, per_token: bool = False
) -> Iterator[dict[str, Any]]:
    """Yield the rows of `data`, each with its `score`, or for pairs `chosen_score` and `rejected_score`.

    data: a value of `data.source`, or data settings; per_token: also add `token_scores` of the completion's tokens (for
    pairs, one list per side). Sequences are not truncated. Raises ValueError for an unreadable row, with its place.
    """
    settings = {"source": data} if isinstance(data, str) else data.model_dump()
    if labels_tokens(model.source.config):
        yield from _tagged(
            model, tokenizer, ClassificationDataConfig.model_validate(settings | {"labels_per": "token"})
        )
        return
    if model.config.num_scores > 1:
        yield from _classified(model, tokenizer, ClassificationDataConfig.model_validate(settings))
        return
    config: DataConfig = SFTDataConfig.model_validate(settings)
    sources = RowSources.of(config)
    formats = formats_of(sources, sources.first_rows(NUM_ROWS_TO_DETECT), PairReader.known | FORMATS).values()
    if any(format.fields.is_pair for format in formats):
        config = PreferenceDataConfig.model_validate(settings)
    render = renderer_of(config, tokenizer)
    rows = render.sources.rows()
    sides = [f"{side}_" if side else "" for side in config.sides]
    while some := list(islice(rows, ROWS_AT_A_TIME)):
        readable = render.whole(some)
        scores = iter(score(model, [one for _, documents in readable for one in documents]))
        for row, documents in readable:
            told: dict[str, Any] = {}
            for side, document in zip(sides, documents, strict=True):
                values = next(scores)
                told[f"{side}score"] = values[-1]
                if per_token:
                    told[f"{side}token_scores"] = np.array(values)[document.trained].tolist()
            yield {**row.fields, **told}


def _classified(model: Decoder, tokenizer: Tokenizer, config: ClassificationDataConfig) -> Iterator[dict[str, Any]]:
    """Yield the rows with the `probabilities` of the labels, and the likeliest label as `prediction`.

    With several labels per text, `predictions` are the labels with a probability of 50% or more.
    """
    config, names = config.model_copy(update={"labels": []}), label_names(model.source.config)  # rows need no labels
    is_multi = str(model.source.config.get("problem_type")).startswith("multi")
    render = renderer_of(config, tokenizer)
    rows = render.sources.rows()
    while some := list(islice(rows, ROWS_AT_A_TIME)):
        readable = render.whole(some)
        for (row, _), scores in zip(readable, token_scores(model, [one for _, [one] in readable]), strict=True):
            found = dict(
                zip(names, (scores[-1].sigmoid() if is_multi else scores[-1].softmax(0)).tolist(), strict=True)
            )
            likely = [name for name in names if found[name] >= 0.5]
            said = {"predictions": likely} if is_multi else {"prediction": max(names, key=found.__getitem__)}
            yield {**row.fields, **said, "probabilities": found}


def _tagged(model: Decoder, tokenizer: Tokenizer, config: ClassificationDataConfig) -> Iterator[dict[str, Any]]:
    """Yield the rows with the likeliest label of each word or step as `predictions`, and the `probabilities` of the
    labels, one list for each word. Both are None for a word without a token.

    Rows of `text` also get `words`, the (start, end) of each word, and if the labels are O, B-NAME and I-NAME,
    `predicted_spans`.
    """
    config, names = config.model_copy(update={"labels": []}), label_names(model.source.config)
    render = renderer_of(config, tokenizer)
    reader, rows = render.reader, render.sources.rows()
    assert isinstance(reader, TokenLabelReader)
    while some := list(islice(rows, ROWS_AT_A_TIME)):
        readable = [(row, reader.labeled(row)) for row, _ in render.whole(some)]
        scores_of_rows = token_scores(model, [labeled.ids.tolist() for _, labeled in readable])
        for (row, labeled), scores in zip(readable, scores_of_rows, strict=True):
            has_token = (labeled.places >= 0).tolist()
            found = scores[labeled.places].softmax(1)  # (U, C)
            likely = [names[i] if has else None for i, has in zip(found.argmax(1).tolist(), has_token, strict=True)]
            columns = dict(zip(names, found.T.tolist(), strict=True))
            said = {n: [p if has else None for p, has in zip(ps, has_token, strict=True)] for n, ps in columns.items()}
            more: dict[str, Any] = {}
            if reader.formats[row.source].name == SPANS:
                more["words"] = labeled.units.spans
                if are_bio(names):
                    more["predicted_spans"] = spans_of(labeled.units.spans, likely)
            yield {**row.fields, "predictions": likely, "probabilities": said, **more}


def score_lines(model: Decoder, tokenizer: Tokenizer, data: str | DataConfig, per_token: bool = False) -> Iterator[str]:
    """Yield the rows of `score_rows` as lines of JSON."""
    for row in score_rows(model, tokenizer, data, per_token):
        yield json.dumps(row, ensure_ascii=False, default=str)
