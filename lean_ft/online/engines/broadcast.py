"""Send weights to a vLLM server over NCCL, from the training GPU to the server's GPUs, without files.

The server's workers and this process join one NCCL communicator, whose id this process draws and sends over HTTP; this
process is rank 0. Then each layer is announced by a request, which the server answers when it has received the layer's
tensors, one broadcast each.

Needs the whole weights in one process: no sharded model.

Source: vLLM 0.32, distributed/weight_transfer/nccl_engine.py and nccl_common.py (`nccl_unique_id_b64`).
"""

from base64 import b64encode
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor
from torch.cuda import nccl

from lean_ft.models import Decoder
from lean_ft.models.source import parts_on_disk
from lean_ft.online.engines.client import Client, Refused
from lean_ft.online.engines.replies import ServerFacts
from lean_ft.online.engines.threads import in_thread
from lean_ft.peft.merging import published_parts
from lean_ft.system.shards import Ranks


class Broadcast:
    """Weights over NCCL."""

    name, is_repeatable = "nccl", False
    remedy = 'Start it with --weight-transfer-config \'{"backend": "nccl"}\', or set generation.engine_weights=merged.'

    def __init__(self, client: Client, ranks: Ranks, model: Decoder, facts: ServerFacts) -> None:
        """Raises ValueError if the server or the model cannot use NCCL."""
        setting = "generation.engine_weights=nccl"
        if facts.weight_transfer != "nccl":
            found = f"was started with {facts.weight_transfer or 'none'}"
            raise ValueError(f"{setting}: the server {found}. {self.remedy}")
        if model.device.type != "cuda":
            raise ValueError(f"{setting} needs a GPU, and the model is on {model.device}. Set merged.")
        if ranks.num_shards > 1:
            raise ValueError(f"{setting} needs the whole weights in one process, and they are sharded. Set merged.")
        self._client, self._ranks, self._device = client, ranks, model.device
        self._communicator: Any = None
        self._model = model

    def write(self, model: Decoder, version: str) -> int:
        """Nothing is written: `load` sends the weights of the model of this run."""
        return sum(part.whole_bytes for part in parts_on_disk(model).values())

    def model_of(self, version: str) -> str | None:
        return None

    def load(self, version: str) -> None:
        with torch.cuda.device(self._device), self._client.paused():
            if self._communicator is None:
                self._communicator = self._connect()
            self._client.ask("start_weight_update", {})
            for _, parts in published_parts(self._model, self._ranks):
                self._send({name: part.values for name, part in parts.items()})
            self._client.ask("finish_weight_update", {"weight_version": version})

    def _connect(self) -> Any:
        """Join one communicator with the server's workers."""
        workers = self._client.ask("get_world_size").get("world_size")
        if type(workers) is not int or workers < 1:
            raise Refused(f"{self._client.url} says that it has {workers!r:.40} workers; expected a number.")
        unique_id, size = nccl.unique_id(), workers + 1
        joining = {"nccl_unique_id_b64": b64encode(unique_id).decode(), "rank_offset": 1, "world_size": size}
        answer = in_thread(lambda: self._client.ask("init_weight_transfer_engine", {"init_info": joining}))
        _fail_early(answer)
        communicator = nccl.init_rank(size, unique_id, 0)
        # The workers begin with a sum of one element.
        one = torch.zeros(1, device=self._device)
        nccl.all_reduce([one], [one], comms=[communicator])
        torch.cuda.synchronize(self._device)
        answer.result()
        return communicator

    def _send(self, tensors: dict[str, Tensor]) -> None:
        announced = {
            "names": list(tensors),
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
        }
        answer = in_thread(lambda: self._client.ask("update_weights", {"update_info": announced}))
        _fail_early(answer)
        for tensor in tensors.values():
            nccl.broadcast([tensor.contiguous()], comms=[self._communicator])
        torch.cuda.synchronize(self._device)
        answer.result()


def _fail_early(answer: Future[Any]) -> None:
    """Raise the server's error if it refuses at once, instead of waiting for it in a collective."""
    try:
        answer.exception(timeout=0.2)
    except TimeoutError:
        return
    answer.result()
