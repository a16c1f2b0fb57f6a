"""What vLLM's replies say, checked field by field: the server may be another version, or another program.

Source: vLLM 0.32, entrypoints/scale_out/token_in_token_out/protocol.py and entrypoints/rl/online/api_router.py.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lean_ft.online.engines.client import ServerRefusal

BYTES_PER_TOKEN = 512  # of a reply: an id with its log-probability takes about 200


@dataclass(frozen=True)
class ServedTurn:
    """The tokens that the server sampled after a prompt."""

    ids: list[int]
    log_probs: list[float]
    ended: bool  # by a stop id or a stop text, rather than by the limit
    versions: list[str]  # of the weights that sampled the tokens


@dataclass(frozen=True)
class ServerFacts:
    """How a server was started."""

    version: str  # of vLLM
    max_tokens: int | None  # of a prompt and its completion
    returns_sampled_log_probs: bool
    max_adapter_rank: int  # 0: it loads no adapters
    weight_transfer: str  # the backend, or empty
    device: str  # cpu, cuda, ...
    dtype: str  # torch.float32, ...
    cuts_prompts: bool  # whether it may read a prompt in several passes
    unties_output: bool  # whether its command sets tie_word_embeddings=false


def read_turn(reply: Mapping[str, Any], max_tokens: int, vocab_size: int, prompt: Sequence[int] | None) -> ServedTurn:
    """The turn of a reply of /inference/v1/generate. prompt: the ids that the server must have read, if it expanded the
    prompt's placeholders.

    Raises ServerRefusal if the reply lacks a field, or has other values than a turn of at most `max_tokens` tokens.
    """
    choices = reply.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise ServerRefusal(f"the server's reply has the `choices` {_short(choices)}; expected one.")
    choice = choices[0]
    ids, reason = choice.get("token_ids"), choice.get("finish_reason")
    if reason not in ("stop", "length"):
        raise ServerRefusal(f"the server ended a completion by {_short(reason)}; expected stop or length.")
    if not isinstance(ids, list) or not 0 < len(ids) <= max_tokens or not all(_is_id(one, vocab_size) for one in ids):
        raise ServerRefusal(
            f"the server returned the `token_ids` {_short(ids)}; expected 1 to {max_tokens:,} ids below {vocab_size:,}."
        )
    if prompt is not None and reply.get("prompt_token_ids") != list(prompt):
        found = reply.get("prompt_token_ids")
        raise ServerRefusal(
            f"the server read a prompt of {len(found) if isinstance(found, list) else 'no'} tokens, and the run trains "
            f"one of {len(prompt)}: its processor computes other image tokens. Serve the folder that the run reads."
        )
    spans = choice.get("weight_versions")
    versions = [span.get("version") for span in spans if isinstance(span, dict)] if isinstance(spans, list) else []
    return ServedTurn(ids, _log_probs(choice, ids), reason == "stop", [_short(version) for version in versions])


def read_facts(info: Mapping[str, Any], version: Mapping[str, Any]) -> ServerFacts:
    """The facts in the replies of /server_info?config_format=json and /version. Raises ServerRefusal without them."""
    config = info.get("vllm_config")
    model = config.get("model_config") if isinstance(config, dict) else None
    if not isinstance(config, dict) or not isinstance(model, dict):
        raise ServerRefusal("the server describes no `vllm_config`. It is not vLLM, or an older one than 0.32.")
    scheduler = config.get("scheduler_config")
    adapters, transfer = config.get("lora_config"), config.get("weight_transfer_config")
    rank = adapters.get("max_lora_rank") if isinstance(adapters, dict) else 0
    backend = transfer.get("backend") if isinstance(transfer, dict) else ""
    limit, overrides, device = model.get("max_model_len"), model.get("hf_overrides"), config.get("device_config")
    return ServerFacts(
        version=_short(version.get("version")),
        max_tokens=limit if type(limit) is int and limit > 0 else None,
        returns_sampled_log_probs=model.get("logprobs_mode") == "processed_logprobs",
        max_adapter_rank=rank if type(rank) is int else 0,
        weight_transfer=backend if isinstance(backend, str) else "",
        device=_short(device.get("device")) if isinstance(device, dict) else "",
        dtype=_short(model.get("dtype")),
        cuts_prompts=isinstance(scheduler, dict) and scheduler.get("enable_chunked_prefill") is True,
        unties_output=isinstance(overrides, dict) and overrides.get("tie_word_embeddings") is False,
    )


def _log_probs(choice: Mapping[str, Any], ids: Sequence[int]) -> list[float]:
    """One log-probability per id."""
    logprobs = choice.get("logprobs")
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    entries = content if isinstance(content, list) else []
    found_ids = [entry.get("token_id") for entry in entries if isinstance(entry, dict)]
    values: list[Any] = [entry.get("logprob") for entry in entries if isinstance(entry, dict)]
    # Roundings may be a little above 0.
    if found_ids != list(ids) or not all(type(one) in (int, float) and -math.inf < one < 1e-3 for one in values):
        found = f"{len(ids)} tokens, and {_short(values)} as the log-probabilities of {_short(found_ids)}"
        raise ServerRefusal(f"the server returned {found}; expected a finite number below 0 for each.")
    return [float(value) for value in values]


def _is_id(value: object, vocab_size: int) -> bool:
    return type(value) is int and 0 <= value < vocab_size


def _short(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 80 else f"{text[:80]} ..."
