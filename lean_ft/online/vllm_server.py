"""Sampling by a vLLM server, in its own processes and on its own devices, with the current weights of the policy.

Before each round, the weights are written to a folder that both processes see, one layer at a time with the adapter
merged, and the server loads them: vLLM's weight transfer with the backend `disk`, which needs neither vLLM nor NCCL in
this process. The server returns token ids with their log-probabilities. These differ from the trainer's at least by
rounding; `loss.correction` weighs tokens by the ratio.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "disk"}' --logprobs-mode
    processed_logprobs

Source: vLLM, docs/training/weight_transfer/disk.md, and its routes in entrypoints/serve/dev/rlhf and openai/completion.
"""

import json
import urllib.error
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from lean_ft.generation import Sample, Sampling
from lean_ft.models import Decoder
from lean_ft.models.safetensors_file import write_file
from lean_ft.peft import plain_tensors
from lean_ft.training.bad_steps import TrainingFailed

LONGEST_SECONDS = 3600.0  # for one request: a round of completions
_OPTIONS = '--weight-transfer-config \'{"backend": "disk"}\' --logprobs-mode processed_logprobs'


class VLLMServer:
    """`server(model, prompts, how)`: a completion of each prompt by the current weights."""

    def __init__(self, url: str, folder: Path) -> None:
        """folder: for the weights; the server must see it under the same absolute path. Raises ValueError if no server
        answers, or it does not follow this protocol."""
        self._url, self._folder = url.rstrip("/"), folder.absolute()
        # The server is on this machine or network, so the environment's proxy does not apply.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            self._name = self._ask("v1/models")["data"][0]["id"]
            self._ask("init_weight_transfer_engine", {"init_info": {}})
        except TrainingFailed as error:
            raise ValueError(
                f"generation.engine=vllm: {error} Start it with `VLLM_SERVER_DEV_MODE=1 vllm serve MODEL {_OPTIONS}`, and set "
                "generation.engine_url."
            ) from None

    def __call__(self, model: Decoder, prompts: Sequence[Sequence[int]], how: Sampling) -> list[Sample]:
        """prompts: a prompt with several completions is repeated. Raises TrainingFailed if the server fails."""
        self._give_weights(model)
        asked = Counter(tuple(prompt) for prompt in prompts)
        given: dict[tuple[int, ...], list[Sample]] = defaultdict(list)
        for number in sorted(set(asked.values())):
            together = [list(prompt) for prompt, times in asked.items() if times == number]
            choices = self._ask("v1/completions", self._request(together, number, how))["choices"]
            if len(choices) != number * len(together):
                raise TrainingFailed(
                    f"{self._url} returned {len(choices)} completions; expected {number * len(together)}."
                )
            for choice in choices:
                given[tuple(together[choice["index"] // number])].append(_sample(choice))
        return [given[tuple(prompt)].pop(0) for prompt in prompts]

    def _request(self, prompts: list[list[int]], number: int, how: Sampling) -> dict[str, Any]:
        return {
            "model": self._name,
            "prompt": prompts,
            "n": number,
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

    def _give_weights(self, model: Decoder) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        source, own_names = model.source, model.source.own_names
        for layer, tensors in groupby(plain_tensors(model), key=lambda named: _layer_of(named[0])):
            of_layer = {
                own_names.get(place, place): source.turned(place, part)
                for name, tensor in tensors
                for place, part in source.stored(name, tensor.detach(), as_read=True)
            }
            write_file(self._folder / f"{layer}.safetensors", of_layer, {"format": "pt"})
        self._ask("pause?mode=wait", {})  # also clears the prefix cache
        self._ask("start_weight_update", {})
        self._ask("update_weights", {"update_info": {"path": str(self._folder)}})
        self._ask("finish_weight_update", {})
        self._ask("resume", {})

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


def _layer_of(name: str) -> str:
    """Return the file name of a tensor: its layer's name, or outside of layers its module's."""
    parts = name.split(".")
    return ".".join(parts[:3] if parts[:2] == ["model", "layers"] else parts[:-1])


def _sample(choice: dict[str, Any]) -> Sample:
    ids, log_probs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
    if not ids or log_probs is None or len(ids) != len(log_probs):
        raise TrainingFailed(
            "the server's completions have no token_ids with log-probabilities. Use a vLLM version that supports return_token_ids."
        )
    return Sample(ids, log_probs, choice["finish_reason"] == "stop")
