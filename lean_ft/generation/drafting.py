"""How many drafted tokens a model accepts in greedy speculative decoding with its drafting layers.

A step runs the model once, over the newest token and the drafts behind it. It gives the model's own next token after
the drafts that equal the model's choices, and those drafts. Greedy speculative decoding therefore gives the tokens of
greedy decoding, and only the number of steps depends on the drafts. So completions are sampled without drafts, and then
the drafts at all their positions are computed in one pass, as decoding computes them: from the hidden states of
verified tokens. The steps follow from which drafts are right.

With more drafts than drafting layers, a single layer runs again on its own output, as in vLLM.

Shapes: T tokens of a text, D hidden size, S starts of a chain of drafts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lean_ft.data import Batch
from lean_ft.data.columns import Document
from lean_ft.generation.choosing import Sampling
from lean_ft.generation.decoding import longest_first, sample
from lean_ft.generation.stopping import stop_ids
from lean_ft.models import Decoder
from lean_ft.models.attention.attention import Sight
from lean_ft.models.block import Pass
from lean_ft.models.families.drafting_forms import DraftingFamily
from lean_ft.models.inserts import Inserts
from lean_ft.models.positions import positions_of
from lean_ft.system.foreign_values import JSON
from lean_ft.system.log import say
from lean_ft.system.passes import evaluating
from lean_ft.system.units import counted
from lean_ft.tokenizers import Tokenizer

_POSITIONS = 16384  # tokens of the completions that are sampled together
_ROWS = 1024  # logits at a time
_STARTS = 64  # chains of drafts in one pass of a layer, each of which reads the text before it


@dataclass(frozen=True)
class AcceptedDrafts:
    """Drafts of greedy speculative decoding, over all completions."""

    steps: int
    """Passes of the model with drafts, which the pass over the prompt is not."""
    accepted: tuple[int, ...]
    """Accepted drafts, by their place in the step."""

    @property
    def tokens_per_step(self) -> float:
        """Mean number of tokens of a step: 1 and the accepted drafts. 0 without a step."""
        return 1 + sum(self.accepted) / self.steps if self.steps else 0.0

    @property
    def shares(self) -> list[float]:
        """The share of steps in which the draft at each place was accepted."""
        return [number / max(1, self.steps) for number in self.accepted]


def measure_drafts(
    model: Decoder, tokenizer: Tokenizer, questions: Iterable[Batch], num_drafts: int, limit: int | None
) -> dict[str, JSON]:
    """Decode the answers to at most `limit` questions of batches, print the tokens per step and return the numbers.

    An answer has at most the tokens of the longest expected one. Raises ValueError as `accepted_drafts`, and for rows
    of plain text.
    """
    check_drafts(model, num_drafts)
    asked = [pair for batch in questions for pair in batch.questions()][:limit]
    if any(len(prompt) < 2 for prompt, _ in asked):  # a bos token asks nothing
        raise ValueError(
            "drafts are measured on answers to prompts, and the data has plain text. Set another data.source."
        )
    longest = max(len(answer) for _, answer in asked)
    sampling = Sampling(longest, stop_ids=stop_ids(model, tokenizer))
    found = accepted_drafts(model, [prompt for prompt, _ in asked], sampling, num_drafts, _POSITIONS)
    shares = ", ".join(f"{share:.1%}" for share in found.shares)
    say(
        "drafts",
        f"{found.tokens_per_step:.3f} tokens per step; accepted: {shares} of {counted(found.steps, 'steps')}",
    )
    return {
        "num_drafts": num_drafts,
        "tokens_per_step": found.tokens_per_step,
        "accepted": [*found.accepted],
        "num_steps": found.steps,
        "num_questions": len(asked),
    }


def accepted_drafts(
    model: Decoder, prompts: Sequence[Document], sampling: Sampling, num_drafts: int, positions: int
) -> AcceptedDrafts:
    """Complete the prompts greedily, at most `positions` tokens together, and count the steps and accepted drafts.

    Raises ValueError for more drafts than a model with several drafting layers has, and as `sample`.
    """
    check_drafts(model, num_drafts)
    steps, accepted = 0, [0] * num_drafts
    lengths = [len(prompt) + sampling.max_new_tokens for prompt in prompts]
    for indices in longest_first(lengths, positions):
        some = [prompts[i] for i in indices]
        for prompt, completion in zip(some, sample(model, some, sampling), strict=True):
            ids = [*prompt.ids.tolist(), *completion.ids]
            of_steps = accepted_in_steps(model, ids, len(prompt), num_drafts)
            steps += len(of_steps)
            for number in of_steps:
                for place in range(number):
                    accepted[place] += 1
    return AcceptedDrafts(steps, tuple(accepted))


def check_drafts(model: Decoder, num_drafts: int) -> None:
    """Raise ValueError if the model cannot draft so many tokens."""
    number, row = model.config.num_drafting, model.source.family
    if not number or (isinstance(row, DraftingFamily) and row.is_new):
        raise ValueError(
            f"drafts is {num_drafts}, and {model.source.folder} has no drafting layers. Train them with "
            "model.mtp=train, or remove drafts."
        )
    if 1 < number < num_drafts:
        raise ValueError(
            f"drafts is {num_drafts}, and the model has {number} drafting layers, each for one token. Set drafts to "
            f"{number} or less."
        )


def accepted_in_steps(model: Decoder, ids: Sequence[int], num_prompt: int, num_drafts: int) -> list[int]:
    """The number of accepted drafts of each step that decodes a text.

    ids: the prompt's `num_prompt` tokens and the model's greedy completion, whose first token the pass over the prompt
    gives.
    """
    with evaluating(model):
        drafts = _Drafts(model, ids, num_prompt, num_drafts)
    newest, last, found = num_prompt, len(ids) - 1, list[int]()
    while newest < last:
        most = min(num_drafts, last - newest)
        number = next((place for place in range(most) if not drafts.is_right(place, newest)), most)
        found.append(number)
        newest += number + 1
    return found


class _Drafts:
    """Which drafts of a text are its tokens."""

    def __init__(self, model: Decoder, ids: Sequence[int], num_prompt: int, num_drafts: int) -> None:
        self._model, self._ids = model, torch.tensor(ids)
        self._first = num_prompt - 1  # the place of the states of the first drafts
        self._hidden, drafts = model(self._ids[None].to(model.device), return_hidden=True, return_drafts=True)
        # By the place of a draft in its step: whether it equals the text, for each newest token of the step.
        self._are_right = [self._compared(states[0], place) for place, states in enumerate(drafts[:num_drafts])]
        self._chains = [drafts[0][0]]  # of a single layer: (T, D) of each draft
        while len(self._are_right) < num_drafts:
            self._are_right.append(self._run_again())

    def is_right(self, place: int, newest: int) -> bool:
        return bool(self._are_right[place][newest])

    def _compared(self, states: Tensor, place: int) -> Tensor:
        """Whether the drafts from hidden states (T, D) of the token before the newest are the text's, (T,) on the CPU,
        False in the prompt and where the text has ended."""
        right = torch.zeros(len(self._ids), dtype=torch.bool)
        ahead, last = place + 2, len(self._ids) - place - 2
        for start in range(self._first, last, _ROWS):
            rows = slice(start, min(start + _ROWS, last))
            drafted = self._model.logits(states[rows]).argmax(-1)
            right[rows.start + 1 : rows.stop + 1] = drafted.cpu() == self._ids[rows.start + ahead : rows.stop + ahead]
        return right

    def _run_again(self) -> Tensor:
        """As `_compared`, of the layer on its own output, where all drafts before are right."""
        place = len(self._chains)
        states = torch.zeros_like(self._chains[0])
        goes_on = torch.stack(self._are_right).all(0).nonzero().flatten() - 1  # places of the first drafts' states
        for starts in goes_on.to(states.device).split(_STARTS) if len(goes_on) else ():
            states[starts] = self._chain(starts, place)
        self._chains.append(states)
        return self._compared(states, place)

    def _chain(self, starts: Tensor, length: int) -> Tensor:
        """The hidden states (S, D) of the layer after `length` runs on its own output. Each chain continues the text up
        to its start."""
        model, ids = self._model, self._ids.to(starts.device)
        num_tokens, steps = len(ids), torch.arange(1, length + 1, device=ids.device)
        own = torch.stack([chain[starts] for chain in self._chains], 1).flatten(0, 1)  # (S * length, D)
        own_ids = ids[(starts[:, None] + 1 + steps).flatten()]
        hidden = torch.cat((self._hidden[0], own))[None]
        sizes = torch.tensor([num_tokens, *[length] * len(starts)], device=ids.device)
        bounds = torch.cat((sizes.new_zeros(1), sizes.cumsum(0))).to(torch.int32)
        ends = torch.cat((starts.new_zeros(1), starts + 1))
        prefixes = torch.stack((torch.zeros_like(ends), ends), 1).to(torch.int32)
        next_ids = torch.cat((ids.roll(-1), own_ids))[None]
        positions = positions_of(next_ids, None, bounds, None, None, prefixes)
        embedded = model.model.embedded(next_ids, positions)
        rotations = model.rotations(positions, hidden.dtype, bounds, None, Inserts())
        sight = Sight.of(prefixes, int(ends.sum()), bounds, next_ids.numel())
        place = model.config.num_layers
        context = Pass(*rotations[model.config.rotation_of(place)], bounds, sight=sight)
        states, _ = model.drafting[0](hidden, embedded, context)
        return states[0, num_tokens:].view(len(starts), length, -1)[:, -1]
