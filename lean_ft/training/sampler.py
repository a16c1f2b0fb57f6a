"""The answers of the model in training to prompts, as `generation` in the settings says they are drawn."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

from lean_ft.data import Prompt
from lean_ft.distributed import generating
from lean_ft.generation import Sample, Sampling, sample, stop_ids
from lean_ft.models import Decoder
from lean_ft.settings import GenerationConfig
from lean_ft.shards import ALONE, Ranks
from lean_ft.tokenizers import Tokenizer
from lean_ft.training.rewards import Rewards


class SamplingConfig(Protocol):
    """What the Config of a recipe that samples its answers has."""

    generation: GenerationConfig
    seed: int


class Sampler:
    """`sampler(prompts, seed)`: an answer to each, which depends on the weights, the prompt, the seed and on how often the same
    prompt stands before it alone. Many ranks share the prompts out, and all get all answers."""

    def __init__(self, cfg: SamplingConfig, model: Decoder, tokenizer: Tokenizer, ranks: Ranks = ALONE) -> None:
        self._generation, self._seed, self._model, self._tokenizer = cfg.generation, cfg.seed, model, tokenizer
        self._ranks = ranks
        self._stop_ids = stop_ids(model, tokenizer)

    def __call__(self, prompts: Sequence[Prompt], seed: int, temperature: float | None = None) -> list[Sample]:
        """temperature: null is that of training. Raises as `lean_ft.generation.sample` does."""
        generation = self._generation
        how = Sampling(
            temperature=generation.temperature if temperature is None else temperature,
            seed=seed,
            stop_ids=self._stop_ids,
            stop_texts=tuple(generation.stop),
            **generation.drawn,
        )
        asked, seen, numbers = [prompt.ids for prompt in prompts], Counter[tuple[int, ...]](), list[int]()
        for ids in asked:
            numbers.append(seen[tuple(ids)])
            seen[tuple(ids)] += 1
        # Neighbours, and the answers to one prompt on one rank, which reads it once.
        groups = -(-len(asked) // generation.num_answers)
        share = -(-groups // self._ranks.size) * generation.num_answers
        mine = slice(self._ranks.rank * share, (self._ranks.rank + 1) * share)

        def answer() -> list[Sample]:
            with generating(self._model, self._ranks, generation.gather):
                return sample(
                    self._model,
                    asked[mine],
                    how,
                    numbers=numbers[mine],
                    decode=self._tokenizer.decode,
                    cache_gib=generation.cache_gib,
                )

        return [one for answers in self._ranks.everywhere(answer) for one in answers]

    def evaluate(self, held_out: Sequence[Prompt], rewards: Rewards) -> dict[str, Any]:
        """The mean reward and length of answers to held-out prompts, at `generation.eval_temperature`; the same draws each
        time."""
        answers = self(held_out, self._seed, self._generation.eval_temperature)
        worth = [total for total in rewards(held_out, answers).totals if total is not None]
        num_tokens = sum(len(answer.ids) for answer in answers)
        return {"eval_reward": sum(worth) / max(1, len(worth)), "eval_completion_length": num_tokens / len(answers)}
