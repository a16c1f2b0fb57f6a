"""Weights over NCCL, with a stand-in for NCCL and for the server that receives them."""

import base64
import queue
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lean_ft import load_model
from lean_ft.models.source import tensors_on_disk
from lean_ft.online.engines import broadcast
from lean_ft.online.engines.broadcast import Broadcast
from lean_ft.online.engines.client import Client, Refused
from lean_ft.online.engines.replies import ServerFacts
from lean_ft.system.shards import ALONE
from lean_ft.training.bad_steps import TrainingFailed

FACTS = ServerFacts("0.32.0", None, True, 0, "nccl", "cuda", False)


class StandIn:
    """NCCL with two ranks, and a server whose worker is the second one. It answers an announcement when it has received
    the tensors."""

    def __init__(self) -> None:
        self.sent, self.received = queue.Queue[Tensor](), dict[str, Tensor]()
        self.asked: list[str] = []
        self.joined: dict[str, Any] = {}

    def unique_id(self) -> bytes:
        return bytes(128)

    def init_rank(self, size: int, unique_id: bytes, rank: int) -> str:
        assert (size, unique_id, rank) == (3, bytes(128), 0)
        return "communicator"

    def all_reduce(self, tensors: list[Tensor], outputs: list[Tensor], comms: list[str]) -> None:
        assert comms == ["communicator"] and tensors[0].numel() == 1
        self.sent.put(tensors[0])

    def broadcast(self, tensors: list[Tensor], comms: list[str]) -> None:
        assert comms == ["communicator"] and all(tensor.is_contiguous() for tensor in tensors)
        for tensor in tensors:
            self.sent.put(tensor.clone())

    def ask(self, route: str, content: dict[str, Any] | None = None, **_: Any) -> dict[str, Any]:
        self.asked.append(route)
        if route == "get_world_size":
            return {"world_size": 2}
        if route == "init_weight_transfer_engine" and content is not None:
            self.joined = content["init_info"]
            self.sent.get(timeout=10)
        if route == "update_weights" and content is not None:
            told = content["update_info"]
            for name, dtype, shape in zip(told["names"], told["dtype_names"], told["shapes"], strict=True):
                tensor = self.sent.get(timeout=10)
                assert (str(tensor.dtype), list(tensor.shape)) == (f"torch.{dtype}", shape)
                self.received[name] = tensor
        return {}


@pytest.fixture
def standin(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    standin = StandIn()
    monkeypatch.setattr(broadcast, "nccl", standin)
    monkeypatch.setattr(Client, "ask", lambda self, *given, **named: standin.ask(*given, **named))
    return standin


@pytest.mark.gpu
def test_each_layer_is_announced_and_sent(standin: StandIn) -> None:
    model = load_model("tiny", torch.device("cuda"))
    way = Broadcast(Client("http://server"), ALONE, model, FACTS)
    for version in ("1", "2"):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        assert way.write(model, version) == sum(tensor.nbytes for tensor in tensors_on_disk(model).values())
        way.load(version)
        expected = tensors_on_disk(model)
        assert standin.received.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in standin.received.items())
    assert standin.joined["rank_offset"] == 1 and standin.joined["world_size"] == 3
    assert base64.b64decode(standin.joined["nccl_unique_id_b64"]) == bytes(128)
    assert standin.asked.count("init_weight_transfer_engine") == 1
    assert standin.asked[-2:] == ["finish_weight_update", "resume"]


@pytest.mark.gpu
def test_a_server_that_refuses_weights_ends_the_run(standin: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model("tiny", torch.device("cuda"))
    way, plain = Broadcast(Client("http://server"), ALONE, model, FACTS), standin.ask

    def ask(route: str, content: dict[str, Any] | None = None, **named: Any) -> dict[str, Any]:
        if route == "update_weights":
            raise Refused("answered 500: no such tensor.")
        return plain(route, content, **named)

    monkeypatch.setattr(standin, "ask", ask)
    way.write(model, "1")
    with pytest.raises(TrainingFailed, match="no such tensor"):
        way.load("1")
    assert standin.asked[-1] == "resume"


def test_what_nccl_cannot_send_is_refused(tmp_path: Path) -> None:
    client, model = Client("http://server"), load_model("tiny")
    with pytest.raises(ValueError, match="nccl needs a GPU, and the run is on cpu"):
        Broadcast(client, ALONE, model, FACTS)
    with pytest.raises(ValueError, match="the server was started with none. Start it with --weight-transfer-config"):
        Broadcast(client, ALONE, model, ServerFacts("0.32.0", None, True, 0, "", "cuda", False))
