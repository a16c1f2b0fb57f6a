"""Plan a round of completions that a vLLM server samples: its memory, its time, and the weights that it gets.

The server has the run's model in the run's dtype, without quantization, on one device of the planned kind. Its time is
that of the model's own passes on shapes: one over the different prompts, and for each token the matrix products and the
attention of all rows at half of a completion's length. CUDA graphs launch them, and its other kernels are fused with
them. The server computes as many completions at a time as it gets requests and as its KV cache holds.

Source: vLLM 0.32; the share of the memory is `gpu_memory_utilization` of config/cache.py.
"""

from dataclasses import replace

import torch

from lean_ft.data.largest import full_document
from lean_ft.generation.decoding import PROMPT_TOKENS, forward_as_written, padded_inputs
from lean_ft.models import Decoder, empty_model
from lean_ft.online.engines.client import Client
from lean_ft.online.engines.server import MOST_REQUESTS
from lean_ft.online.engines.weights import why_no_adapter
from lean_ft.online.rollouts import Rounds
from lean_ft.peft import adapter_bytes
from lean_ft.plan.devices import Device, Machines
from lean_ft.plan.result import EngineRound
from lean_ft.plan.time import ATTENTION, Spent
from lean_ft.plan.trace import Trace
from lean_ft.settings import OnlineConfig
from lean_ft.system.passes import evaluating
from lean_ft.torch_private import FakeTensorMode, without_modes

OWN_SHARE = 0.92  # of a device's memory that vLLM takes by default
# To write files with weights, and to read them: in /dev/shm, by the CPU time of one core (2.0 to 2.3 GB/s and 2.2 to
# 2.9 GB/s); between machines, over 10 Gbit/s.
FILE_BYTES_PER_SECOND = 2e9
SHARED_FILE_BYTES_PER_SECOND = 1e9


def plan_engine(rounds: Rounds, cfg: OnlineConfig, policy: Decoder, device: Device, machines: Machines) -> EngineRound:
    """The round that a server samples for a run. Raises ValueError if weights cannot reach it as the settings say."""
    is_here = Client(cfg.generation.engine_url).is_local
    is_alone = not machines.engine_share and not (device.is_cpu and is_here)
    way = _way(cfg.generation.engine_weights, policy)
    if way == "nccl" and not is_alone:
        raise ValueError(
            "generation.engine_weights=nccl connects two GPUs, and this plan has training and engine on one. Remove "
            "--engine-share, or set generation.engine_weights=auto."
        )
    capacity = cfg.data.max_prompt_length + cfg.completion_tokens
    with without_modes(), FakeTensorMode(allow_non_fake_inputs=True):
        model = empty_model(cfg.model, is_quantized=True).to_empty(device="cpu")
        weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
        row_bytes = model.cache_bytes(1, capacity)
        room = device.memory_bytes and int((machines.engine_share or OWN_SHARE) * device.memory_bytes)
        fitting = MOST_REQUESTS if room is None else max(0, room - weight_bytes) // row_bytes
        rows = min(rounds.num_completions, MOST_REQUESTS, fitting)
        time = _Passes(model, device)
        prompt_seconds = time.of_prompts(rounds, cfg.data.max_prompt_length)
        token_seconds = time.of_token(max(1, rows), capacity - cfg.generation.max_new_tokens // 2)
    published_bytes = adapter_bytes(policy) if way == "adapter" else weight_bytes
    generation = cfg.generation
    return EngineRound(
        completions=rounds.num_completions,
        rows=rows,
        new_tokens=generation.max_new_tokens,
        weight_bytes=weight_bytes,
        cache_bytes=max(1, rows) * row_bytes,
        memory_bytes=room,
        shares_device=not is_alone,
        prompt_seconds=prompt_seconds,
        token_seconds=token_seconds,
        way=way,
        published_bytes=published_bytes,
        publication_seconds=published_bytes * _seconds_per_byte(way, device, is_here),
        steps=generation.steps_per_round * generation.passes,
        is_ahead=bool(generation.ahead),
    )


class _Passes:
    """The time of a server's passes."""

    def __init__(self, model: Decoder, device: Device) -> None:
        self._model, self._trace = model, Trace(replace(device, launch_seconds=0.0))

    @torch.no_grad()
    def of_prompts(self, rounds: Rounds, length: int) -> float:
        """Of all different prompts, each of which is read once."""
        at_once = min(rounds.num_prompts, max(1, PROMPT_TOKENS // length))
        documents = [full_document(length, rounds.kinds, i) for i in range(at_once)]
        inputs = padded_inputs(documents, self._model.device)
        spent = self._run(length, at_once, inputs, filled=0)
        return spent.seconds * rounds.num_prompts / at_once

    @torch.no_grad()
    def of_token(self, rows: int, length: int) -> float:
        """Of a token of each row behind `length - 1` others: matrix products and attention."""
        inputs = {"input_ids": torch.zeros(rows, 1, dtype=torch.int64)}
        spent = self._run(length, rows, inputs, filled=length - 1)
        return sum(
            launches.seconds
            for (_, name), launches in spent.ledger.items()
            if launches.flops or any(part in name for part in ATTENTION)
        )

    def _run(self, length: int, rows: int, inputs: dict[str, torch.Tensor], filled: int) -> Spent:
        trace, model = self._trace, self._model
        trace.time.spent, trace.time.longest_document = Spent(), length
        with trace, evaluating(model):
            cache = model.new_cache(rows, length)
            cache.filled = filled
            hidden = forward_as_written(model, cache=cache, **inputs)
            model.logits(hidden[:, -1])
        return trace.time.spent


def _way(asked: str, policy: Decoder) -> str:
    if asked != "auto":
        return asked
    return "merged" if why_no_adapter(policy) else "adapter"


def _seconds_per_byte(way: str, device: Device, is_here: bool) -> float:
    """Of weights on their way from one device to the other. Files are written and read, behind two copies."""
    if way == "nccl":
        return 1 / (device.peer_bytes_per_second if is_here else device.network_bytes_per_second)
    file_rate = FILE_BYTES_PER_SECOND if is_here else SHARED_FILE_BYTES_PER_SECOND
    return 2 / file_rate + 2 / device.host_bytes_per_second
