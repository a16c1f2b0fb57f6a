"""Sampling by a vLLM server, in its own processes and on its own devices, with the weights of the policy.

`publish` gives the server the current weights (`lean_ft.online.engines.weights`), and `sample` samples with them.
Nothing of vLLM is imported here. Each turn of a completion is one request, so a completion that waits for a reply
delays no other; the next turn's prompt is all ids so far, and the server finds most of them in its prefix cache. The
server returns token ids with their log-probabilities and the version of the weights that sampled them. The
log-probabilities differ from the trainer's at least by rounding; `loss.correction` weighs tokens by the ratio.

If the server stops answering, requests wait for it. If it was restarted, it loads the present weights again, and
samples the turns again that it had begun.

With several training processes, rank 0 speaks with the server.

Source: vLLM 0.32, entrypoints/scale_out/token_in_token_out and entrypoints/rl/online.
"""

import math
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Lock, Semaphore
from typing import Any
from uuid import uuid4

import torch

from lean_ft.data.columns import Document
from lean_ft.data.kinds import engine_prompt
from lean_ft.generation import Completion, Sampling
from lean_ft.generation.decoding import running_rows
from lean_ft.generation.turns import Replies, RunningRow
from lean_ft.models import Decoder
from lean_ft.online.engines.client import Client, ServerError, ServerRefusal, Unreachable
from lean_ft.online.engines.replies import BYTES_PER_TOKEN, ServedTurn, ServerFacts, read_facts, read_turn
from lean_ft.online.engines.threads import in_thread
from lean_ft.online.engines.weights import Way, choose_way
from lean_ft.peft.layers import adapted_layers
from lean_ft.settings import GenerationConfig
from lean_ft.system.log import say, slow_calls_reported
from lean_ft.system.shards import ALONE, Ranks
from lean_ft.system.units import gibibytes
from lean_ft.tokenizers import Tokenizer
from lean_ft.tokenizers.loading import context_length
from lean_ft.training.bad_steps import TrainingFailed

COMMAND = (
    "VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve MODEL --enable-scale-out --logprobs-mode "
    "processed_logprobs"
)
MOST_REQUESTS = 256  # at once
REPLY_SECONDS = 0.02  # between two looks for replies, while requests are under way
QUIET_SECONDS = 60.0  # without any reply, until the log says so
_PAUSE_SECONDS = 1.0  # between two attempts to reach the server
_MOST_OUTAGES = 3  # during one turn
_BEGUN = "default"  # version of the weights that a server was started with
_PROBE = "Hello, wörld! 12 + 345 = 357\n"


class VLLMServer:
    """A vLLM server that samples for a run."""

    def __init__(
        self, generation: GenerationConfig, run: Path, longest: int, tokenizer: Tokenizer, ranks: Ranks = ALONE
    ) -> None:
        """run: the run's directory; longest: tokens of a prompt with its completion. All ranks call it.

        Waits for a server that does not answer yet. Raises ValueError if none answers, or if it was started without
        what a run needs.
        """
        self._client, self._ranks, self._run = Client(generation.engine_url), ranks, run
        self.url = self._client.url
        self._tokenizer = tokenizer
        self._weights, self._patience_seconds = generation.engine_weights, generation.engine_seconds
        self._way: Way | None = None
        self.num_published, self._moved = 0, ""
        self._published, self._vocab_size = "", 0
        self._context: int | None = None  # of the model
        self._places, self._repair = Semaphore(MOST_REQUESTS), Lock()
        self.facts: ServerFacts = ranks.on_rank_zero(partial(self._meet, longest))
        ranks.on_rank_zero(self._check_tokenizer)

    def _meet(self, longest: int) -> ServerFacts:
        url, remedy = self._client.url, f"Start it with `{COMMAND}`, and set generation.engine_url."
        try:
            self._until_it_answers()
            facts = read_facts(self._client.ask("server_info?config_format=json"), self._client.ask("version"))
        except ServerRefusal as error:
            raise ValueError(f"generation.engine=vllm: {error} {remedy}") from None
        except Unreachable as error:
            waited = f"The run waited generation.engine_seconds={self._patience_seconds:g}."
            raise ValueError(f"generation.engine=vllm: {error} {waited} {remedy}") from None
        if not facts.returns_sampled_log_probs:
            raise ValueError(
                f"generation.engine=vllm: {url} returns log-probabilities from before the temperature, top_k, top_p "
                "and min_p. Start it with --logprobs-mode processed_logprobs."
            )
        if facts.device == "cpu" and facts.cuts_prompts:
            raise ValueError(
                f"generation.engine=vllm: {url} runs on a CPU, where vLLM fails if it reads the prompt of a request "
                "with a seed in several passes. Start it with --no-enable-chunked-prefill."
            )
        if facts.max_tokens is not None and facts.max_tokens < longest:
            raise ValueError(
                f"generation.engine=vllm: {url} reads {facts.max_tokens:,} tokens, and a prompt with its completion "
                f"has up to {longest:,}. Start it with --max-model-len {longest}, or lower data.max_prompt_length or "
                "generation.max_new_tokens."
            )
        return facts

    def _check_tokenizer(self) -> None:
        """Raise ValueError if the server writes texts with other ids. Servers without a tokenizer are not checked."""
        own = self._tokenizer.encode(_PROBE)
        try:
            reply = self._client.ask("tokenize", {"prompt": _PROBE, "add_special_tokens": False})
        except ServerRefusal:
            return
        if isinstance(found := reply.get("tokens"), list) and found != own:
            raise ValueError(
                f"generation.engine=vllm: {self._client.url} has another tokenizer: it writes {_PROBE!r} as "
                f"{str(found[:12])[:100]}, and the run's as {own[:12]}. Serve the folder that model.path names."
            )

    # Weights ----------------------------------------------------------------------------------------------------------

    def publish(self, model: Decoder) -> None:
        """Give the server the model's weights; all ranks call it. Raises TrainingFailed if it does not load them, and
        ValueError if it cannot load weights of this kind."""
        if self._way is None:
            self._way = choose_way(self._weights, self.facts, model, self._client, self._ranks, self._run)
            self._ranks.on_rank_zero(partial(self._check_base, self._way))
        way = self._way
        version = self._ranks.on_rank_zero(lambda: f"{way.name}-{uuid4().hex}")
        size = way.write(model, version)
        self._published = version
        self._context, self._vocab_size = context_length(model.source.config), model.config.vocab_size

        self._ranks.on_rank_zero(partial(self._load, way, version))
        self.num_published += 1
        self._moved = f"weights: {way.name}, {gibibytes(size)}"

    def is_exact(self, model: Decoder) -> bool:
        """Whether the server computes in float32 with the weights of the model, which does so too."""
        quantized = any(layer.frozen.form.kind != "plain" for layer in adapted_layers(model).values())
        other_base = self._keeps_base and quantized
        return model.dtype == torch.float32 and self.facts.dtype == "torch.float32" and not other_base

    @property
    def _keeps_base(self) -> bool:
        return self._way is not None and self._way.keeps_base

    def report(self, difference: float) -> None:
        """Log how the run samples. difference: the largest one of log-probabilities."""
        if self.num_published == 1 and self._ranks.rank == 0:
            agreed = f"log-probabilities differ from the run's by up to {difference:.2g}"
            say("engine", f"vLLM {self.facts.version} at {self._client.url}; {self._moved}; {agreed}")

    def _check_base(self, way: Way) -> None:
        """Raise ValueError if an adapter would be added to weights that another run has changed."""
        here = self._until_it_answers()
        if way.keeps_base and here != _BEGUN and not here.startswith(f"{way.name}-"):
            raise ValueError(
                f"{self._client.url} has weights of version {here:.40}, from another run, and this run sends its "
                "adapter alone. Restart the server, or set generation.engine_weights=merged."
            )

    def _load(self, way: Way, version: str) -> None:
        """Let the server load the written weights, in spite of a few outages."""
        for left in reversed(range(_MOST_OUTAGES)):
            try:
                way.load(version)
                break
            except ServerRefusal as error:
                raise TrainingFailed(f"The server did not load the weights. {error} {way.remedy}") from None
            except Unreachable:
                if not left or not way.is_repeatable:
                    raise
                self._until_it_answers()
        self._check_version()

    def _check_version(self) -> None:
        """Raise TrainingFailed if the server has other weights than the last ones."""
        if (here := self._until_it_answers()) != self._published:
            found = f"has weights of version {here:.40}; expected {self._published}"
            raise TrainingFailed(f"{self._client.url} {found}. Another run uses it.")

    # Completions ------------------------------------------------------------------------------------------------------

    def sample(
        self,
        prompts: Sequence[Document],
        how: Sampling,
        numbers: Sequence[int],
        replies: Replies | None = None,
        max_given_tokens: int = 0,
    ) -> list[Completion]:
        """Return a completion of each prompt, as `lean_ft.generation.sample` does; rank 0 alone calls it. Raises
        TrainingFailed if the server fails."""
        rows, left = running_rows(prompts, how, numbers), dict[int, RunningRow]()
        if self._context is not None:
            for row in rows:
                row.longest = max(self._context, len(row.prompt) + 1)
        with slow_calls_reported(f"the wait for a reply of {self.url}", QUIET_SECONDS) as began:
            asked = {in_thread(partial(self._add_turn, row, how)) for row in rows}
            while asked or left:
                done, asked = wait(asked, REPLY_SECONDS if left else None, FIRST_COMPLETED)
                if done:
                    began[0] = time.monotonic() if asked else math.inf
                for row in [one.result() for one in done]:
                    if replies is not None:
                        replies.ended(row.place, row.completion)
                        if row.completion.ended:
                            left[row.place] = row
                for place, given in replies.ready(wait=not asked).items() if replies is not None and left else ():
                    row = left.pop(place)
                    if given is not None and row.give(given, how, max_given_tokens):
                        began[0] = began[0] if asked else time.monotonic()
                        asked.add(in_thread(partial(self._add_turn, row, how)))
        return [row.completion for row in rows]

    def _add_turn(self, row: RunningRow, how: Sampling) -> RunningRow:
        """Sample a turn. Its seed depends on the round's, the prompt, the sample number and the position."""
        completion, seed = row.completion, row.key.at(len(row.completion.ids))[0] & (2**31 - 1)
        with self._places:
            turn = self._turn(row.text, replace(how, max_new_tokens=int(row.room(how)), seed=seed))
        completion.ended = turn.ended
        completion.sampled += [True] * len(turn.ids) if completion.sampled else []
        completion.ids += turn.ids
        completion.log_probs += turn.log_probs
        return row

    def _turn(self, text: Document, how: Sampling) -> ServedTurn:
        """Sample after a text with the present weights, in spite of a few outages."""
        outage = ServerError()
        for _ in range(_MOST_OUTAGES):
            version = self._published
            try:
                turn = self._ask_turn(text, how)
                if turn.versions == [version]:
                    return turn
                versions = ", ".join(turn.versions) or "none"
                outage = Unreachable(f"{self._client.url} sampled with weights of version {versions}.")
            except Unreachable as error:
                outage = error
            except ServerRefusal as error:
                # A server that ends answers 500, and one that was restarted has no adapter.
                if error.code != 500 and not self._keeps_base:
                    raise
                outage = error
            self._outlast(outage)
        raise outage

    def _ask_turn(self, text: Document, how: Sampling) -> ServedTurn:
        prompt = engine_prompt(text, self._tokenizer)
        request: dict[str, Any] = {
            "token_ids": prompt.ids,
            "sampling_params": {
                "max_tokens": how.max_new_tokens,
                # Send every setting: the server takes missing ones from the model's generation_config.json.
                "temperature": how.temperature,
                "top_p": 1.0 if how.top_p is None else how.top_p,
                "top_k": how.top_k or 0,
                "min_p": how.min_p or 0.0,
                "repetition_penalty": 1.0,
                "seed": how.seed,
                "stop": list(how.stop_texts),
                "stop_token_ids": sorted(how.stop_ids),
                "logprobs": 0,  # only for the sampled token
            },
        }
        if self._keeps_base:
            request["model"] = self._published  # the adapter's name
        if prompt.parts:  # the server returns the ids that it has made of their placeholders
            request |= {"content_parts": prompt.parts, "return_token_ids": True}
        size = BYTES_PER_TOKEN * (how.max_new_tokens + len(text) + 2**12)
        reply = self._client.ask("inference/v1/generate", request, max_bytes=size)
        expanded = text.ids.tolist() if prompt.parts else None
        return read_turn(reply, how.max_new_tokens, self._vocab_size, expanded)

    # Outages ----------------------------------------------------------------------------------------------------------

    def _until_it_answers(self) -> str:
        """Wait until the server answers. Return the version of its weights.

        Raises Unreachable after `generation.engine_seconds`, and ServerRefusal if another program answers.
        """
        deadline, is_told = time.monotonic() + self._patience_seconds, False
        while True:
            try:
                return str(self._client.ask("weight_info").get("weight_version"))
            except ServerError as error:
                if time.monotonic() > deadline or (isinstance(error, ServerRefusal) and error.code != 500):
                    raise
                if not is_told:
                    say("waiting", f"{error} The run waits for up to {self._patience_seconds:.0f} s.")
                is_told = True
                time.sleep(min(_PAUSE_SECONDS, self._patience_seconds))

    def _outlast(self, outage: ServerError) -> None:
        """Return when the server answers and has the present weights; a server that was restarted loads them again.

        Raises Unreachable if it takes too long, and TrainingFailed if the server has other weights.
        """
        with self._repair:  # one thread waits and loads, for all
            try:
                version = self._until_it_answers()
            except Unreachable:
                raise Unreachable(
                    f"{outage} It did not answer within generation.engine_seconds={self._patience_seconds:g}. Start "
                    "it again, then run the same command again."
                ) from None
            if version == _BEGUN:
                if self._way is None or not self._way.is_repeatable:
                    raise TrainingFailed(f"{self._client.url} was restarted. Run the same command again.")
                say("engine", f"{self._client.url} was restarted; it loads the weights again")
                self._way.load(self._published)
            self._check_version()
