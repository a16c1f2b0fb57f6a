"""Samples completions from the model in training, as the `generation` settings say."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import Any

from lean_ft.data import Prompt
from lean_ft.data.by_source import means_by_source
from lean_ft.data.columns import Document
from lean_ft.generation import Completion, Sampling, sample, sample_numbers, stop_ids
from lean_ft.models import Decoder
from lean_ft.online.engines import VLLMServer
from lean_ft.online.engines.agreement import NUM_PROMPTS, NUM_TOKENS, check_agreement
from lean_ft.online.engines.threads import in_thread
from lean_ft.online.episodes import Episodes, Round
from lean_ft.online.rewards import Rewards
from lean_ft.optim import Optimizer
from lean_ft.parallel import generating
from lean_ft.settings import OnlineConfig
from lean_ft.system.host_link import open_link
from lean_ft.system.shards import ALONE, Ranks
from lean_ft.tokenizers import Tokenizer
from lean_ft.tokenizers.loading import context_length


class Sampler:
    """`sampler(prompts, seed)` returns a completion of each prompt.

    A completion depends only on the weights, the prompt, the seed and the number of equal prompts before it. Ranks
    divide the prompts among them, and each rank gets all completions.
    """

    def __init__(
        self,
        cfg: OnlineConfig,
        model: Decoder,
        tokenizer: Tokenizer,
        optimizer: Optimizer,
        ranks: Ranks = ALONE,
        episodes: Episodes | None = None,
    ) -> None:
        """optimizer: whose state makes room, with `generation.offload_training_state`. episodes: needed with tools or
        an environment."""
        self._generation, self._seed, self._model, self._tokenizer = cfg.generation, cfg.seed, model, tokenizer
        self._ranks = ranks
        self._stop_ids = stop_ids(model, tokenizer)
        self._makes_room: Callable[[], AbstractContextManager[None]] = nullcontext
        if cfg.generation.offload_training_state:
            setting = "generation.offload_training_state"
            link = open_link(model.device, f"{setting}=true", f"{setting}=false")
            self._makes_room = partial(optimizer.state_away, link)
        if ranks.size > 1 and cfg.generation.compile:
            raise ValueError(
                "generation.compile=true needs a single process, but there are several. Remove the setting."
            )
        if cfg.generation.router_replay and model.mixture is None:
            raise ValueError(
                "generation.router_replay=true repeats the choices of a mixture's routers, and this model has no "
                "experts. Remove generation.router_replay."
            )
        self._output_dir, self._longest = cfg.output_dir, cfg.data.max_prompt_length + cfg.completion_tokens
        self._max_given_tokens = cfg.completion_tokens - cfg.generation.max_new_tokens
        if cfg.has_turns and episodes is None:
            raise ValueError(
                "this recipe samples no turns with tools or an environment: it passes no Episodes to the Sampler. "
                "Copy the recipe again with `leanft cp`, or remove tools and environment."
            )
        self._episodes = episodes if cfg.has_turns else None
        self._published_for: int | None = None  # seed of the round that the server has the weights for
        self._under_way: Future[list[Completion]] | None = None  # a round that is sampled ahead

    @cached_property
    def _server(self) -> VLLMServer | None:
        if self._generation.engine == "own":
            return None
        longest = min(self._longest, context_length(self._model.source.config) or self._longest)
        return VLLMServer(self._generation, self._output_dir, longest, self._tokenizer, self._ranks)

    @property
    def model(self) -> Decoder:
        """The policy."""
        return self._model

    def __call__(self, prompts: Sequence[Prompt], seed: int) -> list[Completion]:
        """seed: of the round. Raises as `lean_ft.generation.sample`, `Round` and `VLLMServer` do."""
        self._begin(prompts, seed)
        return self._completions(prompts, self._how(seed), self._episodes)

    def ahead(self, prompts: Sequence[Prompt], seed: int) -> Callable[[], list[Completion]]:
        """Sample with the present weights in another thread of rank 0. Return a function that waits for the
        completions; all ranks call it."""
        self._begin(prompts, seed)
        if self._ranks.rank == 0:
            numbers = sample_numbers([prompt.text for prompt in prompts])
            self._under_way = in_thread(partial(self._play, prompts, numbers, self._how(seed), self._episodes))
        return partial(self._ranks.on_rank_zero, self._wait)

    def _wait(self) -> list[Completion]:
        assert self._under_way is not None
        return self._under_way.result()

    def _begin(self, prompts: Sequence[Prompt], seed: int | None = None) -> None:
        """seed: of a round."""
        # Several attempts at one round sample with the same weights.
        if (server := self._server) is not None and (seed is None or seed != self._published_for):
            self._published_for = seed
            wait([] if self._under_way is None else [self._under_way])
            for kind in prompts[0].text.kinds if not server.num_published else ():
                kind.check_engine(self._tokenizer)
            server.publish(self._model)
            if server.num_published <= 2:  # an adapter changes nothing before its first update
                texts = [prompt.text for prompt in prompts[:: self._generation.num_answers]][:NUM_PROMPTS]
                how = Sampling(max_new_tokens=NUM_TOKENS, stop_ids=self._stop_ids)
                own = self._sample_own(texts, how, sample_numbers(texts), None)
                served = self._ranks.on_rank_zero(lambda: server.sample(texts, how, sample_numbers(texts)))
                server.report(check_agreement(own, served, server.is_exact(self._model), server.url))
        if self._episodes is not None and seed is not None:
            self._episodes.results.begin(seed % 2**32)

    def first_turns(self, prompts: Sequence[Prompt], seed: int) -> list[Completion]:
        """The completions up to the first call or observation. For plans, which run no tools."""
        return self._completions(prompts, self._how(seed), None)

    def _how(self, seed: int, temperature: float | None = None) -> Sampling:
        generation = self._generation
        return Sampling(
            temperature=generation.temperature if temperature is None else temperature,
            seed=seed,
            stop_ids=self._stop_ids,
            stop_texts=tuple(generation.stop),
            **generation.drawn,
        )

    def _completions(self, prompts: Sequence[Prompt], how: Sampling, episodes: Episodes | None) -> list[Completion]:
        numbers = sample_numbers([prompt.text for prompt in prompts])
        if self._server is not None:
            return self._ranks.on_rank_zero(lambda: self._play(prompts, numbers, how, episodes))
        # Consecutive prompts, and all completions of a prompt on one rank, which reads it once. Ranks that share
        # attention heads sample for the same prompts.
        groups, alike = -(-len(prompts) // self._generation.num_answers), self._ranks.num_alike
        share = -(-groups * alike // self._ranks.size) * self._generation.num_answers
        place = self._ranks.rank // alike
        mine = slice(place * share, (place + 1) * share)
        parts = self._ranks.on_every_rank(lambda: self._play(prompts[mine], numbers[mine], how, episodes))
        return [one for completions in parts[::alike] for one in completions]

    def _play(
        self, prompts: Sequence[Prompt], numbers: Sequence[int], how: Sampling, episodes: Episodes | None
    ) -> list[Completion]:
        """Sample completions, or play episodes, in this process."""
        if episodes is None:
            return self._sample([prompt.text for prompt in prompts], how, numbers, None)
        # The main thread trains meanwhile, with this process's random generators.
        is_ahead = self._generation.ahead
        with nullcontext() if is_ahead else episodes.tools.unchanged_process(how.seed % 2**32):
            played = Round(episodes, prompts, numbers, how.seed)
            completions = self._sample(played.asked, how, numbers, played)
            return [*played.finish(completions, keeps_environments=self._ranks.size == 1)]

    def _sample(
        self, texts: Sequence[Document], how: Sampling, numbers: Sequence[int], played: Round | None
    ) -> list[Completion]:
        if self._server is not None:
            return self._server.sample(texts, how, numbers, played, self._max_given_tokens)
        return self._sample_own(texts, how, numbers, played)

    def _sample_own(
        self, texts: Sequence[Document], how: Sampling, numbers: Sequence[int], played: Round | None
    ) -> list[Completion]:
        generation = self._generation
        with self._makes_room(), generating(self._model, self._ranks, generation.gather):
            return sample(
                self._model,
                texts,
                how,
                numbers=numbers,
                decode=self._tokenizer.decode,
                cache_gib=generation.cache_gib,
                compile=generation.compile,
                records_experts=generation.router_replay,
                replies=played,
                max_given_tokens=self._max_given_tokens,
            )

    def evaluate(self, held_out: Sequence[Prompt], rewards: Rewards) -> dict[str, Any]:
        """Return the mean reward (if any has one) and length of completions of held-out prompts, sampled at
        `generation.eval_temperature` with a fixed seed."""
        self._begin(held_out)
        completions = self._completions(
            held_out, self._how(self._seed, self._generation.eval_temperature), self._episodes
        )
        of_prompts = rewards(held_out, completions).totals
        totals = [total for total in of_prompts if total is not None]
        lengths = [sum(one.sampled) if one.sampled else len(one.ids) for one in completions]
        metrics = {"eval_completion_length": sum(lengths) / len(completions)}
        metrics |= {"eval_reward": sum(totals) / len(totals)} if totals else {}
        return metrics | means_by_source("eval_reward", [prompt.source for prompt in held_out], of_prompts)
