"""Adapter of models and sampling to EleutherAI's lm-evaluation-harness (the extra `eval`).

Rows of similar lengths are batched up to a number of tokens, and logits are computed only for the scored tokens. The
rest follows the harness's class for transformers: texts are truncated on the left to the model's context, an empty
context becomes bos, and a completion ends at the task's stop texts.
"""

from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch.nn.utils.rnn import pad_sequence

from lean_ft.generation.choosing import Sampling
from lean_ft.generation.decoding import longest_first, sample
from lean_ft.generation.stopping import stop_ids
from lean_ft.models import Decoder
from lean_ft.system.passes import evaluating
from lean_ft.tokenizers import Tokenizer
from lean_ft.tokenizers.loading import context_length

TOKENS_AT_A_TIME = 8192  # positions of a forward pass, padding included
LOGITS_AT_A_TIME = 512  # positions whose logits are in memory
_DEFAULT_CONTEXT = 2048  # tokens, as in the harness, if config.json has no context length
_SAMPLED = {"temperature", "top_p", "top_k", "min_p"}


class HarnessModel(TemplateLM):
    """A model for `lm_eval.simple_evaluate`. Raises ValueError for unknown generation settings of a task."""

    def __init__(
        self, model: Decoder, tokenizer: Tokenizer, seed: int = 0, tokens_at_a_time: int = TOKENS_AT_A_TIME
    ) -> None:
        super().__init__()
        self._tokens_at_a_time = tokens_at_a_time
        self.model, self.tokenizer, self._seed = model, tokenizer, seed  # pyright: ignore[reportAttributeAccessIssue]
        self._tokens = tokenizer
        self.max_length = context_length(model.source.config) or _DEFAULT_CONTEXT

    @property
    def eot_token_id(self) -> int:
        return self.prefix_token_id if self._tokens.eos_id is None else self._tokens.eos_id

    @property
    def prefix_token_id(self) -> int:
        first = self._tokens.eos_id if self._tokens.bos_id is None else self._tokens.bos_id
        return self._tokens.pad_id if first is None else first

    @property
    def tokenizer_name(self) -> str:
        return str(self.model.source.folder or "model").replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **unused: Any) -> list[int]:
        begins = string.startswith(self._tokens.token_text(self.prefix_token_id))
        return self._tokens.encode(
            string, add_special_tokens=not begins if add_special_tokens is None else add_special_tokens
        )

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        if not add_generation_prompt:
            raise ValueError(
                "a task continues the text of an answer, which chat=true does not support. Set chat=false."
            )
        return self._tokens.passage(list(chat_history), add_generation_prompt=True).text

    def _loglikelihood_tokens(self, requests: Sequence[Any], **unused: Any) -> list[tuple[float, bool]]:
        """Return each continuation's log-probability given its context, and whether it is the greedy one."""
        found = dict[int, tuple[float, bool]]()
        asked = [((list(context) + list(ids))[-self.max_length - 1 :], len(ids)) for _, context, ids in requests]
        for rows in longest_first([len(ids) for ids, _ in asked], self._tokens_at_a_time):
            texts = [torch.tensor(asked[i][0][:-1], dtype=torch.int64) for i in rows]
            padded = pad_sequence(texts, batch_first=True)
            # A model in training may be compiled for fixed shapes and for a backward pass.
            with evaluating(self.model), torch.compiler.set_stance("force_eager"):
                hidden = self.model(padded.to(self.model.device), return_hidden=True)  # (B, T, D)
                for row, i in enumerate(rows):
                    ids, count = asked[i]
                    found[i] = self._score(hidden[row, len(ids) - 1 - count : len(ids) - 1], ids[-count:])
        return [found[i] for i in range(len(asked))]

    def _score(self, hidden: torch.Tensor, ids: list[int]) -> tuple[float, bool]:
        """Return the log-probability of `ids`, and whether they are greedy, from the hidden states (N, D) that predict
        them."""
        total, is_greedy = 0.0, True
        for start in range(0, len(ids), LOGITS_AT_A_TIME):
            some = hidden[start : start + LOGITS_AT_A_TIME]
            labels = torch.tensor(ids[start : start + LOGITS_AT_A_TIME], device=hidden.device)
            log_probs = self.model.logits(some).float().log_softmax(-1)  # (N, V)
            total += log_probs.gather(1, labels[:, None]).sum().item()
            is_greedy &= bool((log_probs.argmax(1) == labels).all())
        return total, is_greedy

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each text; a text longer than the context is scored in windows."""
        windows = []
        for place, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            rolled = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1)
            windows += [(place, *make_disjoint_window(window)) for window in rolled]
        totals = [0.0] * len(requests)
        for (place, *_), (log_prob, _) in zip(windows, self._loglikelihood_tokens(windows), strict=True):
            totals[place] += log_prob
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the text generated after each context, up to the task's stop texts."""
        answers, decode = dict[int, str](), self._tokens.decode
        eos = decode([self.eot_token_id])
        for settings, places in _alike([request.args[1] for request in requests]):
            given: dict[str, Any] = dict(normalize_gen_kwargs(settings, default_max_gen_toks=256))
            until, most = handle_stop_sequences(given.pop("until", None), eos=eos), given.pop("max_gen_toks")
            given.pop("do_sample", None)
            if unknown := given.keys() - _SAMPLED:
                raise ValueError(f"a task sets {', '.join(sorted(unknown))}, which lean_ft does not support.")
            room = self.max_length - most
            if room < 1:
                raise ValueError(f"a task generates {most} tokens, more than the model's context of {self.max_length}.")
            how = Sampling(
                most,
                **given,
                seed=self._seed,
                stop_ids=stop_ids(self.model, self._tokens),
                stop_texts=tuple(filter(None, until)),
            )
            prompts = [self.tok_encode(requests[place].args[0])[-room:] for place in places]
            for place, answer in zip(places, sample(self.model, prompts, how, decode=decode), strict=True):
                text = decode(answer.ids, skip_special_tokens=True)
                answers[place] = postprocess_generated_text(text, until, None)
        return [answers[i] for i in range(len(requests))]


def _alike(settings: list[dict[str, Any]]) -> list[tuple[dict[str, Any], list[int]]]:
    """Group equal settings: each distinct value with the indices that have it."""
    found: list[tuple[dict[str, Any], list[int]]] = []
    for place, one in enumerate(settings):
        places = next((places for other, places in found if other == one), None)
        found.append((one, [place])) if places is None else places.append(place)
    return found
