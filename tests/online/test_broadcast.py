"""Weights over NCCL, with a stand-in for NCCL and for the server that receives them."""

import base64
import ctypes
import queue
import shutil
import subprocess
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lean_ft import load_model
from lean_ft.models.source import tensors_on_disk
from lean_ft.online.engines import broadcast, nccl
from lean_ft.online.engines.broadcast import Broadcast
from lean_ft.online.engines.client import Client, ServerRefusal
from lean_ft.online.engines.replies import ServerFacts
from lean_ft.system.shards import ALONE
from lean_ft.training.bad_steps import TrainingFailed

FACTS = ServerFacts("0.32.0", None, True, 0, "nccl", "cuda", "torch.float32", False, False)


class StandIn:
    """NCCL with two ranks, and a server whose worker is the second one. It answers an announcement when it has received
    the tensors."""

    def __init__(self) -> None:
        self.sent, self.received = queue.Queue[Tensor](), dict[str, Tensor]()
        self.asked: list[str] = []
        self.joined: dict[str, Any] = {}

    def unique_id(self) -> bytes:
        return bytes(128)

    def Communicator(self, unique_id: bytes, size: int) -> "StandIn":
        assert (size, unique_id) == (3, bytes(128))
        return self

    def all_reduce(self, tensor: Tensor) -> None:
        assert tensor.numel() == 1
        self.sent.put(tensor)

    def broadcast(self, tensor: Tensor) -> None:
        assert tensor.is_contiguous()
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


# With the declarations of nccl.h. The handle is the address of the first bytes that a broadcast sends.
LIBRARY = """
#include <stddef.h>
#include <string.h>
typedef struct { char internal[128]; } ncclUniqueId;
static char seen[256];
const char* ncclGetErrorString(int code) { return code == 4 ? "invalid argument" : "other"; }
int ncclGetUniqueId(ncclUniqueId* id) { memset(id->internal, 7, 128); return 0; }
int ncclCommInitRank(void** handle, int size, ncclUniqueId id, int rank) {
  if (size < 1 || rank != 0 || id.internal[127] != 7) return 4;
  *handle = seen; return 0;
}
int ncclBroadcast(const void* from, void* to, size_t count, int type, int root, void* handle, void* stream) {
  if (from != to || root != 0 || handle != seen || type != 9) return 4;
  memcpy(seen, from, 2 * count); return 0;
}
int ncclAllReduce(const void* from, void* to, size_t count, int type, int op, void* handle, void* stream) {
  return from == to && count == 1 && type == 7 && op == 0 && handle == seen ? 0 : 4;
}
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="compiles a stand-in for NCCL")
def test_the_library_gets_what_its_header_declares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nccl.c").write_text(LIBRARY)
    built = tmp_path / "libnccl.so.2"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", built, tmp_path / "nccl.c"], check=True)
    monkeypatch.setattr(ctypes, "CDLL", partial(lambda load, _: load(str(built)), ctypes.CDLL))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0))
    nccl._library.cache_clear()
    try:
        unique_id = nccl.unique_id()
        assert unique_id == bytes([7]) * 128
        communicator = nccl.Communicator(unique_id, 2)
        communicator.all_reduce(torch.zeros(1))
        communicator.broadcast(torch.tensor([2.0, 3.0], dtype=torch.bfloat16))
        with pytest.raises(RuntimeError, match="ncclCommInitRank failed: invalid argument"):
            nccl.Communicator(unique_id, 0)
    finally:
        nccl._library.cache_clear()


@pytest.mark.gpu
def test_a_server_that_refuses_weights_ends_the_run(standin: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model("tiny", torch.device("cuda"))
    way, plain = Broadcast(Client("http://server"), ALONE, model, FACTS), standin.ask

    def ask(route: str, content: dict[str, Any] | None = None, **named: Any) -> dict[str, Any]:
        if route == "update_weights":
            raise ServerRefusal("answered 500: no such tensor.")
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
        Broadcast(client, ALONE, model, ServerFacts("0.32.0", None, True, 0, "", "cuda", "torch.float32", False, False))
