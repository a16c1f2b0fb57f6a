"""Reward models: loading, scoring, and use as a reward function."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lean_ft.data.columns import Document
from lean_ft.data.images import has_images
from lean_ft.data.pairs import until_the_answer_ends
from lean_ft.generation import longest_first
from lean_ft.generation.decoding import Asked, as_document, padded_inputs
from lean_ft.generation.texts import reads_images
from lean_ft.models import Decoder, load_model
from lean_ft.models.device import check_dtype, resolve_device
from lean_ft.models.own_families import check_own_families
from lean_ft.models.stored_weights import stored_dtype, stored_labels
from lean_ft.peft import ids_of_rows, is_adapter, labels_of, load_adapter
from lean_ft.peft.finished_models import find_base, find_finished, tokenizer_of
from lean_ft.system.world import world
from lean_ft.tokenizers import Tokenizer

TOKENS_AT_A_TIME = 8192  # positions of a forward pass, padding included


def open_reward_model(
    path: str | Path, device: str = "auto", dtype: str | None = None, chat_template: Path | None = None
) -> tuple[Decoder, Tokenizer]:
    """Return a reward model or classifier and its tokenizer.

    path: a folder, a run (its newest complete checkpoint), a checkpoint of a model or an adapter, or a Hub repository;
    dtype: None uses the dtype of the files; chat_template: a file that replaces the tokenizer's template.

    Raises ValueError if the model is missing, incomplete, or gives no scores.
    """
    folder = adapter = find_finished(path, quick=True)
    if is_adapter(folder):
        folder = find_finished(find_base(folder), quick=True)
    where = resolve_device(device)
    kept = stored_dtype(folder) if dtype is None else getattr(torch, dtype)
    check_dtype(str(kept).removeprefix("torch."), where)
    labels, new_ids = (None, []) if adapter == folder else (labels_of(adapter), ids_of_rows(adapter))
    labels = stored_labels(folder) if labels is None else labels
    tower = "frozen" if reads_images(folder) else "none"
    model = load_model(folder, where, dtype=kept, scores=labels, new_ids=new_ids, images=tower)
    check_own_families()

    def add_adapter() -> bool:
        if adapter != folder:
            load_adapter(model, adapter)
        return not model.source.score_is_new

    if not model.config.num_scores or not world().read(add_adapter, lambda: True):
        raise ValueError(
            f"{adapter} is not a reward model: it has no output layer for scores. Train one: leanft run reward "
            f"model.path={path}."
        )
    return model, tokenizer_of(adapter, folder, chat_template=chat_template, has_tower=model.vision is not None)


def score(model: Decoder, sequences: Sequence[Asked], tokens_at_a_time: int = TOKENS_AT_A_TIME) -> list[list[float]]:
    """Return the score at every token of each sequence of ids, or document. The last score is the sequence's.

    Each forward pass has at most `tokens_at_a_time` positions, or one sequence. Raises ValueError for an empty
    sequence.
    """
    return [scores[:, 0].tolist() for scores in token_scores(model, sequences, tokens_at_a_time)]


@torch.no_grad()
def token_scores(model: Decoder, sequences: Sequence[Asked], tokens_at_a_time: int = TOKENS_AT_A_TIME) -> list[Tensor]:
    """Return C scores at each token of each sequence, (T, C) on the CPU; see `score`."""
    if not all(len(ids) for ids in sequences):
        raise ValueError("a sequence without a token has no score.")
    weight, found = model.output_weight.float(), dict[int, Tensor]()
    for rows in longest_first([len(ids) for ids in sequences], tokens_at_a_time):
        inputs = padded_inputs([as_document(sequences[i]) for i in rows], weight.device)
        hidden = model(**inputs, return_hidden=True)
        scores = (hidden.float() @ weight.T).cpu()
        found.update((i, scores[row][: len(sequences[i])]) for row, i in enumerate(rows))
    return [found[i] for i in range(len(sequences))]


class JudgingModel:
    """A reward model as a reward function: the reward is the score at the last token of prompt and completion.

    If the reward model has the policy's tokenizer, it reads the sampled token ids. Otherwise it encodes the texts with
    its own tokenizer: with the chat template, or without a template as one text that ends with eos.
    """

    def __init__(self, path: str, device: str, asked_with: Tokenizer) -> None:
        """Raise ValueError as `open_reward_model` does, and for a model with more than one score."""
        self._model, self._tokenizer = open_reward_model(path, device)
        if self._model.config.num_scores != 1:
            raise ValueError(
                f"{path} is a classifier of {self._model.config.num_scores} labels; a reward is one score."
            )
        self._model.requires_grad_(False).eval()
        ids, own = range(asked_with.vocab_size), self._tokenizer
        self._reads_tokens = all(own.token_text(i) == asked_with.token_text(i) for i in ids)
        self._sees = self._reads_tokens and self._model.vision is not None

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[str],
        documents: Sequence[Document],
        completion_ids: Sequence[list[int]],
    ) -> list[float]:
        if any(map(has_images, documents)) and not self._sees:
            raise ValueError(
                "a reward model judges prompts with images only if it has a vision tower and the policy's tokenizer."
            )
        if self._reads_tokens:
            texts = [asked.continued(said) for asked, said in zip(documents, completion_ids, strict=True)]
        else:
            texts = [self._written(asked, said) for asked, said in zip(prompts, completions, strict=True)]
        return [scores[-1] for scores in score(self._model, texts)]

    def _written(self, asked: Any, said: str) -> list[int]:
        tokenizer = self._tokenizer
        if tokenizer.chat_template is None and isinstance(asked, str):
            ends = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
            return tokenizer.encode(asked + said, add_special_tokens=True) + ends
        chat = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
        ids, mask = tokenizer.render([*chat, {"role": "assistant", "content": said}])
        return until_the_answer_ends(Document(np.array(ids), np.array(mask))).ids.tolist()
