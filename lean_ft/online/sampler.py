"""Samples completions from the model in training, as the `generation` settings say."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import Any

from lean_ft.data import Prompt
from lean_ft.generation import Completion, Sampling, sample, sample_numbers, stop_ids
from lean_ft.models import Decoder
from lean_ft.online.episodes import Episodes, Round
from lean_ft.online.rewards import Rewards
from lean_ft.online.servers import SERVERS, Server, in_thread
from lean_ft.optim import Optimizer
from lean_ft.parallel import generating
from lean_ft.settings import OnlineConfig
from lean_ft.system.host_link import open_link
from lean_ft.system.shards import ALONE, Ranks
from lean_ft.tokenizers import Tokenizer


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
        uses_server = cfg.generation.engine != "own"
        if ranks.size > 1 and (cfg.generation.compile or uses_server):
            setting = "compile=true" if cfg.generation.compile else f"engine={cfg.generation.engine}"
            raise ValueError(f"generation.{setting} needs a single process, but there are several. Remove the setting.")
        if cfg.generation.router_replay and model.mixture is None:
            raise ValueError(
                "generation.router_replay=true repeats the choices of a mixture's routers, and this model has no "
                "experts. Remove generation.router_replay."
            )
        self._server_folder = cfg.output_dir / "engine"
        self._max_given_tokens = cfg.completion_tokens - cfg.generation.max_new_tokens
        if cfg.has_turns and episodes is None:
            raise ValueError(
                "this recipe samples no turns with tools or an environment: it passes no Episodes to the Sampler. "
                "Copy the recipe again with `leanft cp`, or remove tools and environment."
            )
        self._episodes = episodes if cfg.has_turns else None
        self._under_way: Future[list[Completion]] | None = None  # a round that is sampled ahead

    @cached_property
    def _server(self) -> Server | None:
        kind = SERVERS.get(self._generation.engine)
        return kind and kind(self._generation.engine_url, self._server_folder)

    @property
    def model(self) -> Decoder:
        """The policy."""
        return self._model

    def __call__(self, prompts: Sequence[Prompt], seed: int) -> list[Completion]:
        """seed: of the round. Raises as `lean_ft.generation.sample`, `Round` and `Server` do."""
        self._begin(seed)
        return self._completions(prompts, seed, None, self._episodes)

    def ahead(self, prompts: Sequence[Prompt], seed: int) -> Callable[[], list[Completion]]:
        """Sample with the present weights in another thread. Return a function that waits for the completions."""
        self._begin(seed)
        self._under_way = in_thread(partial(self._completions, prompts, seed, None, self._episodes))
        return self._under_way.result

    def _begin(self, seed: int | None = None) -> None:
        """seed: of a round."""
        if self._server is not None:
            wait([] if self._under_way is None else [self._under_way])
            self._server.give_weights(self._model)
        if self._episodes is not None and seed is not None:
            self._episodes.results.begin(seed % 2**32)

    def first_turns(self, prompts: Sequence[Prompt], seed: int) -> list[Completion]:
        """The completions up to the first call or observation. For plans, which run no tools."""
        return self._completions(prompts, seed, None, None)

    def _completions(
        self, prompts: Sequence[Prompt], seed: int, temperature: float | None, episodes: Episodes | None
    ) -> list[Completion]:
        generation = self._generation
        how = Sampling(
            temperature=generation.temperature if temperature is None else temperature,
            seed=seed,
            stop_ids=self._stop_ids,
            stop_texts=tuple(generation.stop),
            **generation.drawn,
        )
        asked = [prompt.text for prompt in prompts]
        numbers = sample_numbers(asked)
        # Consecutive prompts, and all completions of a prompt on one rank, which reads it once. Ranks that share
        # attention heads sample for the same prompts.
        groups, alike = -(-len(asked) // generation.num_answers), self._ranks.num_alike
        share = -(-groups * alike // self._ranks.size) * generation.num_answers
        place = self._ranks.rank // alike
        mine = slice(place * share, (place + 1) * share)

        def complete() -> Sequence[Completion]:
            if episodes is None:
                return sampled(None)
            # The main thread trains meanwhile, with this process's random generators.
            with nullcontext() if generation.ahead else episodes.tools.unchanged_process(seed % 2**32):
                return sampled(Round(episodes, prompts[mine], numbers[mine], seed))

        def sampled(played: Round | None) -> Sequence[Completion]:
            texts = asked[mine] if played is None else played.asked
            if self._server is not None:
                completions = self._server.sample(texts, how, numbers[mine], played, self._max_given_tokens)
            else:
                with self._makes_room(), generating(self._model, self._ranks, generation.gather):
                    completions = sample(
                        self._model,
                        texts,
                        how,
                        numbers=numbers[mine],
                        decode=self._tokenizer.decode,
                        cache_gib=generation.cache_gib,
                        compile=generation.compile,
                        records_experts=generation.router_replay,
                        replies=played,
                        max_given_tokens=self._max_given_tokens,
                    )
            if played is None:
                return completions
            return played.finish(completions, keeps_environments=self._ranks.size == 1)

        return [one for completions in self._ranks.on_every_rank(complete)[::alike] for one in completions]

    def evaluate(self, held_out: Sequence[Prompt], rewards: Rewards) -> dict[str, Any]:
        """Return the mean reward (if any has one) and length of completions of held-out prompts, sampled at
        `generation.eval_temperature` with a fixed seed."""
        self._begin()
        completions = self._completions(held_out, self._seed, self._generation.eval_temperature, self._episodes)
        totals = [total for total in rewards(held_out, completions).totals if total is not None]
        lengths = [sum(one.sampled) if one.sampled else len(one.ids) for one in completions]
        metrics = {"eval_completion_length": sum(lengths) / len(completions)}
        return metrics | ({"eval_reward": sum(totals) / len(totals)} if totals else {})
