"""Sampling by a vLLM or SGLang server, in its own processes and on its own devices, with the weights of the policy.

Before a round, the weights are written to a folder that both processes see, one layer at a time with the adapter
merged, and the server loads them. This needs neither the server's package nor NCCL in this process. Each turn of a
completion is one request, so a completion that waits for a reply delays no other; the next turn's prompt is all ids so
far, and the server finds most of them in its prefix cache. The server returns token ids with their log-probabilities.
These differ from the trainer's at least by rounding; `loss.correction` weighs tokens by the ratio.

Source: vLLM, the routes in entrypoints/rl/online and entrypoints/serve/dev/rpc; SGLang, entrypoints/http_server.py.
"""

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from threading import Semaphore, Thread
from typing import Any, TypeVar
from uuid import uuid4

from lean_ft.data.columns import Document
from lean_ft.generation import Completion, Sampling
from lean_ft.generation.decoding import running_rows
from lean_ft.generation.turns import Replies, RunningRow
from lean_ft.models import Decoder
from lean_ft.models.safetensors_file import write_file
from lean_ft.peft import published_parts
from lean_ft.system.shards import ALONE
from lean_ft.tokenizers.loading import context_length
from lean_ft.training.bad_steps import TrainingFailed

LONGEST_SECONDS = 3600.0  # for one request
MOST_REQUESTS = 256  # at once
REPLY_SECONDS = 0.02  # between two looks for replies, while requests are under way
T = TypeVar("T")


class Server:
    """`give_weights(model)` sends the current weights, and `sample` samples with them. A subclass speaks one
    protocol."""

    setting = ""
    command = ""  # that starts it
    version_route = ""

    def __init__(self, url: str, folder: Path) -> None:
        """folder: for the weights; the server must see it under the same absolute path. Raises ValueError if no server
        answers, or it does not follow this protocol."""
        self._url, self._folder, self._weight_version = url.rstrip("/"), folder.absolute(), ""
        self._context: int | None = None  # of the model
        self._places = Semaphore(MOST_REQUESTS)
        # The server is on this machine or network, so the environment's proxy does not apply.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            self._ask(self.version_route)
        except TrainingFailed as error:
            raise ValueError(
                f"generation.engine={self.setting}: {error} Start it with `{self.command}`, and set "
                "generation.engine_url."
            ) from None

    def give_weights(self, model: Decoder) -> None:
        """Raises TrainingFailed if the server does not load them."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for layer, parts in published_parts(model, ALONE):
            write_file(self._folder / f"{layer}.safetensors", parts, {"format": "pt"})
        self._weight_version, self._context = uuid4().hex, context_length(model.source.config)
        self._load(str(self._folder), self._weight_version)
        self._check_version()

    def sample(
        self,
        prompts: Sequence[Document],
        how: Sampling,
        numbers: Sequence[int],
        replies: Replies | None = None,
        max_given_tokens: int = 0,
    ) -> list[Completion]:
        """Return a completion of each prompt, as `lean_ft.generation.sample` does. Raises TrainingFailed if the server
        fails."""
        rows, left = running_rows(prompts, how, numbers), dict[int, RunningRow]()
        if replies is not None and self._context is not None:
            for row in rows:
                row.longest = max(self._context, len(row.prompt) + 1)
        asked = {in_thread(partial(self._add_turn, row, how)) for row in rows}
        while asked or left:
            done, asked = wait(asked, REPLY_SECONDS if left else None, FIRST_COMPLETED)
            for row in [one.result() for one in done]:
                if replies is not None:
                    replies.ended(row.place, row.completion)
                    if row.completion.ended:
                        left[row.place] = row
            for place, given in replies.ready(wait=not asked).items() if replies is not None and left else ():
                row = left.pop(place)
                if given is not None and row.give(given, how, max_given_tokens):
                    asked.add(in_thread(partial(self._add_turn, row, how)))
        self._check_version()
        return [row.completion for row in rows]

    def _add_turn(self, row: RunningRow, how: Sampling) -> RunningRow:
        """Sample a turn. Its seed depends on the round's, the prompt, the sample number and the position."""
        completion, seed = row.completion, row.key.at(len(row.completion.ids))[0] & (2**31 - 1)
        with self._places:
            now = replace(how, max_new_tokens=int(row.room(how)), seed=seed)
            ids, log_probs, reason = self._turn(row.text.ids.tolist(), now)
        if not ids or len(ids) != len(log_probs) or reason not in ("stop", "length"):
            raise TrainingFailed(
                f"{self._url} returned {len(ids)} tokens with {len(log_probs)} log-probabilities, ended by {reason}; "
                f"expected an end by stop or length. Start the server with `{self.command}`."
            )
        completion.ended = reason == "stop"
        completion.sampled += [True] * len(ids) if completion.sampled else []
        completion.ids += ids
        completion.log_probs += log_probs
        return row

    def _check_version(self) -> None:
        """Raise TrainingFailed if the server has other weights than the last ones, as after a restart."""
        here = self._ask(self.version_route)["weight_version"]
        if here != self._weight_version:
            raise TrainingFailed(
                f"{self._url} has weights of version {here}; expected {self._weight_version}. It was restarted, or "
                "another run uses it."
            )

    def _ask(self, route: str, content: dict[str, Any] | None = None) -> Any:
        """Return the response to a POST of `content`, or to a GET if it is None."""
        body = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(f"{self._url}/{route}", body, {"Content-Type": "application/json"})
        try:
            with self._opener.open(request, timeout=LONGEST_SECONDS) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            said = error.read(500).decode(errors="replace")
            raise TrainingFailed(f"{self._url}/{route} answered {error.code}: {said}.") from None
        except (OSError, ValueError) as error:
            raise TrainingFailed(f"{self._url}/{route} does not answer: {error}.") from None

    # By protocol ------------------------------------------------------------------------------------------------------

    def _load(self, folder: str, version: str) -> None:
        """Let the server load the weights in a folder, and forget what it computed with others."""
        raise NotImplementedError

    def _turn(self, ids: list[int], how: Sampling) -> tuple[list[int], list[float], str]:
        """Sample after these ids. Return the new ids, their log-probabilities, and why they end."""
        raise NotImplementedError


class VLLMServer(Server):
    """vLLM with its development routes. Prefix caching stays on: a pause clears the cache."""

    setting = "vllm"
    command = "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs"
    version_route = "weight_info"

    @cached_property
    def _name(self) -> str:
        return self._ask("v1/models")["data"][0]["id"]

    def _load(self, folder: str, version: str) -> None:
        self._ask("pause?mode=wait", {})
        self._ask("collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}})
        self._ask("update_weight_version", {"new_version": version})
        self._ask("resume", {})

    def _turn(self, ids: list[int], how: Sampling) -> tuple[list[int], list[float], str]:
        asked = {
            "model": self._name,
            "prompt": ids,
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
            "return_token_ids": True,
        }
        (choice,) = self._ask("v1/completions", asked)["choices"]
        return choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"]


class SGLangServer(Server):
    """SGLang's native routes. Log-probabilities are those at the temperature, before top-k, top-p and min-p."""

    setting = "sglang"
    command = "python -m sglang.launch_server --model-path MODEL --enable-deterministic-inference"
    version_route = "model_info"

    def _load(self, folder: str, version: str) -> None:
        # This waits for the requests under way, and clears the prefix cache.
        self._ask("update_weights_from_disk", {"model_path": folder, "weight_version": version})

    def _turn(self, ids: list[int], how: Sampling) -> tuple[list[int], list[float], str]:
        params = {
            "max_new_tokens": how.max_new_tokens,
            # Send every setting: the server takes missing ones from the model's generation_config.json.
            "temperature": how.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "sampling_seed": how.seed,
            "stop": list(how.stop_texts),
            "stop_token_ids": sorted(how.stop_ids),
        }
        answer = self._ask("generate", {"input_ids": ids, "sampling_params": params, "return_logprob": True})
        found = answer["meta_info"]
        tokens = found["output_token_logprobs"]
        return [token for _, token, _ in tokens], [value for value, _, _ in tokens], found["finish_reason"]["type"]


SERVERS: dict[str, type[Server]] = {kind.setting: kind for kind in (VLLMServer, SGLangServer)}


def in_thread(work: Callable[[], T]) -> Future[T]:
    """Begin `work` in a thread that does not delay the end of the process."""
    future = Future[T]()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future
