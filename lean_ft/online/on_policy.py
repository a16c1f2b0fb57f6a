"""On-policy distillation: in some steps the student trains on its own completions instead of the data's.

The seed and the step alone determine which steps these are and what they sample, so a resumed run samples the same
completions. A prompt is everything before the last trained span of a document, as in `answers`. Each rank samples the
completions of all prompts of a step; they are the same on all ranks.

Source: Agarwal et al. 2023, arXiv:2306.13649. As there, no gradient flows through the sampling.
"""

from collections.abc import Sequence
from itertools import takewhile

import numpy as np

from lean_ft.data import Batch
from lean_ft.data.collate import Layout, batch_of
from lean_ft.data.columns import Document
from lean_ft.data.objective import objective_of
from lean_ft.generation import Sampling, sample, stop_ids
from lean_ft.models import Decoder
from lean_ft.settings import DataConfig, DistillConfig, RecipeConfig, SamplingConfig
from lean_ft.tokenizers import Tokenizer


class OnPolicy:
    """Replaces completions of the data by the student's own in some steps."""

    def __init__(self, cfg: RecipeConfig, model: Decoder, tokenizer: Tokenizer) -> None:
        self._share, self._sampling = cfg.needed(DistillConfig).on_policy, cfg.needed(SamplingConfig)
        self._data, self._seed, self._model, self._tokenizer = cfg.needed(DataConfig), cfg.seed, model, tokenizer
        self._objective = objective_of(self._data)

    def samples(self, step: int) -> bool:
        """Return True for a random fraction `distill.on_policy` of the steps, drawn by the seed."""
        return np.random.default_rng([self._seed, step]).random() < self._share

    def answered(self, step: int, micro_batches: Sequence[Batch]) -> list[Batch]:
        """Return the prompts of the batches, each followed by the student's completion, whose tokens are trained.

        Prompt and completion have at most `data.max_length` tokens, and with a context for the teacher at most
        `data.max_teacher_length`. Raises ValueError for a document without a prompt.
        """
        asked = [list(batch.questions()) for batch in micro_batches]
        prompts = [prompt for of_batch in asked for prompt, _ in of_batch]
        if not prompts:
            return list(micro_batches)
        if min(map(len, prompts)) < 2:  # a bos token alone is not a prompt
            raise ValueError(
                "a document is trained from its start, so the student has no prompt to answer. Set "
                "distill.on_policy=0 for plain text and for data.train_on=all."
            )
        room = [self._objective.room(prompt, self._data) for prompt in prompts]
        sampling = Sampling(
            min(self._sampling.max_new_tokens, max(room)),
            temperature=self._sampling.temperature,
            seed=int(np.random.SeedSequence([self._seed, step]).generate_state(1, np.uint32)[0]),
            stop_ids=stop_ids(self._model, self._tokenizer),
        )
        # All prompts of the step at once, so that micro-batches do not change the completions.
        completions = [self._known(one.ids) for one in sample(self._model, prompts, sampling)]
        texts = [(prompt, ids[:most]) for prompt, ids, most in zip(prompts, completions, room, strict=True)]
        ends_at = np.cumsum([len(of_batch) for of_batch in asked]).tolist()
        own = [texts[end - len(of_batch) : end] for of_batch, end in zip(asked, ends_at, strict=True)]
        return [self._batch(mine) if mine else batch for mine, batch in zip(own, micro_batches, strict=True)]

    def _known(self, ids: list[int]) -> list[int]:
        """Return the completion up to the first id without a token: the student's vocabulary may be padded."""
        return list(takewhile(lambda token: token < self._tokenizer.vocab_size, ids))

    def _batch(self, texts: list[tuple[Document, list[int]]]) -> Batch:
        never = frozenset[int]().union(*(kind.never_trained for kind in texts[0][0].kinds))
        answered = self._objective.answered
        documents = [answered(prompt, ids, [token not in never for token in ids]) for prompt, ids in texts]
        kind = "padded" if self._data.packing == "none" else "flat"
        layout: Layout = {"kind": kind, "row_tokens": self._data.max_length}
        return batch_of(documents, self._objective, pad_id=self._tokenizer.pad_id, **layout)
