"""Send weights to a vLLM server over NCCL, from the training GPU to the server's GPUs, without files.

The server's workers and this process join one NCCL communicator, whose id this process draws and sends over HTTP; this
process is rank 0. Then each layer is announced by a request, which the server answers when it has received the layer's
tensors, one broadcast each.

Sharded weights are gathered on rank 0, a layer at a time.

Source: vLLM 0.32, distributed/weight_transfer/nccl_engine.py and nccl_common.py (`nccl_unique_id_b64`).
"""

import time
from base64 import b64encode
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from lean_ft.models import Decoder
from lean_ft.online.engines import nccl
from lean_ft.online.engines.client import Client, ServerError, ServerRefusal
from lean_ft.online.engines.replies import ServerFacts
from lean_ft.online.engines.threads import in_thread
from lean_ft.peft.published import published_parts
from lean_ft.system.shards import Part, Ranks

_POLL_SECONDS = 0.001
_REFUSAL_SECONDS = 0.2  # in which a server refuses to join


class Broadcast:
    """Weights over NCCL."""

    name, is_repeatable, keeps_base = "nccl", False, False
    remedy = 'Start it with --weight-transfer-config \'{"backend": "nccl"}\', or set generation.engine_weights=merged.'

    def __init__(self, client: Client, ranks: Ranks, model: Decoder, facts: ServerFacts) -> None:
        """Raises ValueError if the server or the model cannot use NCCL."""
        if facts.weight_transfer != "nccl":
            found = f"was started with {facts.weight_transfer or 'none'}"
            raise ValueError(f"generation.engine_weights=nccl: the server {found}. {self.remedy}")
        if model.device.type != "cuda":
            raise ValueError(
                f"generation.engine_weights=nccl needs a GPU, and the run is on {model.device}. Set merged."
            )
        self._client, self._ranks, self._device = client, ranks, model.device
        self._stream = torch.cuda.Stream(model.device)
        self._communicator: nccl.Communicator | None = None
        self._problem: ServerError | None = None

    def write(self, model: Decoder, version: str) -> int:
        """Send the weights. All ranks gather each layer, and rank 0 sends it. If the server fails, rank 0 keeps
        gathering, because the other ranks wait for it."""
        size, self._problem = 0, None
        self._try(self._begin)
        for _, parts in published_parts(model, self._ranks, on_rank_zero=True):
            self._try(partial(self._send, parts))
            size += sum(part.whole_bytes for part in parts.values())
        return size

    def load(self, version: str) -> None:
        if self._problem is not None:
            with suppress(ServerError):  # the first problem is the one to report
                self._client.ask("resume", {})
            raise self._problem
        self._client.ask("finish_weight_update", {"weight_version": version})
        self._client.ask("resume", {})

    def _try(self, work: Callable[[], None]) -> None:
        """Work on rank 0, until the server fails."""
        if self._ranks.rank == 0 and self._problem is None:
            try:
                work()
            except ServerError as error:
                self._problem = error
            except (OSError, RuntimeError) as error:
                self._problem = ServerError(f"The weights were not sent over NCCL: {error}.")

    def _begin(self) -> None:
        self._client.ask("pause?mode=wait", {})
        if self._communicator is None:
            self._communicator = self._connect()
        self._client.ask("start_weight_update", {})

    def _connect(self) -> nccl.Communicator:
        """Join one communicator with the server's workers."""
        workers = self._client.ask("get_world_size").get("world_size")
        if type(workers) is not int or workers < 1:
            raise ServerRefusal(f"{self._client.url} says that it has {workers!r:.40} workers; expected a number.")
        unique_id, size = nccl.unique_id(), workers + 1
        joining = {"nccl_unique_id_b64": b64encode(unique_id).decode(), "rank_offset": 1, "world_size": size}
        answer = in_thread(lambda: self._client.ask("init_weight_transfer_engine", {"init_info": joining}))
        _fail_early(answer)
        with torch.cuda.device(self._device):
            communicator = nccl.Communicator(unique_id, size)
            # The workers begin with a sum of one element.
            one = torch.zeros(1, device=self._device)
            communicator.all_reduce(one)
            torch.cuda.synchronize(self._device)
        answer.result()
        return communicator

    def _send(self, parts: Mapping[str, Part]) -> None:
        """Send the tensors of a layer."""
        # Weights that are streamed are in host memory.
        tensors = [part.values.to(self._device).contiguous() for part in parts.values()]
        announced = {
            "names": list(parts),
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
            "shapes": [list(tensor.shape) for tensor in tensors],
        }
        answer = in_thread(lambda: self._client.ask("update_weights", {"update_info": announced}))
        communicator = self._communicator
        assert communicator is not None
        # A separate stream: if the server fails, the device can continue with other work.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for tensor in tensors:
                communicator.broadcast(tensor)
        sent = self._stream.record_event()
        while not sent.query():
            if answer.done():
                answer.result()  # raises the server's error
            time.sleep(_POLL_SECONDS)
        answer.result()


def _fail_early(answer: Future[Any]) -> None:
    """Raise the server's error if it refuses at once, instead of waiting for it in a collective."""
    try:
        answer.exception(timeout=_REFUSAL_SECONDS)
    except TimeoutError:
        return
    answer.result()
