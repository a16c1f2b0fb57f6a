"""`generation.engine=vllm` with a small server that implements vLLM's protocol on top of lean_ft's sampling."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lean_ft import load_model
from lean_ft.generation import Sampling, sample
from lean_ft.models.source import tensors_on_disk
from lean_ft.online.vllm_server import VLLMServer
from lean_ft.peft import load_merged
from tests.models.conftest import whole_model
from tests.recipes.conftest import PROBLEMS, run_recipe
from tests.training.toy_runs import metrics

SETTINGS = (*PROBLEMS, "rewards=[length]", "generation.num_answers=4", "generation.temperature=1.3", "save_every=1")
SETTINGS += (
    "loss.correction=token_truncate",
    "optimizer.lr=1e-3",
    "batch_size=8",
    "max_steps=2",
    "gradient_accumulation_steps=1",
)
UPDATE = ["pause?mode=wait", "start_weight_update", "update_weights", "finish_weight_update", "resume"]


class Server(ThreadingHTTPServer):
    """Stub for `vllm serve tiny` with the `disk` backend: it has no weights until it gets their folder."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.model = load_model("tiny")
        self.asked: list[str] = []
        self.weights: list[dict[str, torch.Tensor]] = []
        for tensor in tensors_on_disk(self.model).values():
            tensor.zero_()

    def answer(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        if route == "v1/models":
            return {"object": "list", "data": [{"id": "tiny"}]}
        if route == "v1/completions":
            return {"choices": self.complete(body)}
        self.asked.append(route)
        if route == "init_weight_transfer_engine":
            assert body == {"init_info": {}}
        if route == "update_weights":
            path = Path(body["update_info"]["path"])
            assert path.is_absolute()
            self.weights.append({k: v for file in path.glob("*.safetensors") for k, v in load_file(file).items()})
            here = tensors_on_disk(self.model)
            assert here.keys() == self.weights[-1].keys()
            for name, tensor in here.items():
                tensor.copy_(self.weights[-1][name])
        return {"message": "done"}

    def complete(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        told = ("model", "repetition_penalty", "logprobs", "return_token_ids", "stop", "top_k", "top_p", "min_p")
        assert [body[name] for name in told] == ["tiny", 1.0, 0, True, [], 0, 1.0, 0.0]
        how = Sampling(
            body["max_tokens"], body["temperature"], seed=body["seed"], stop_ids=frozenset(body["stop_token_ids"])
        )
        found = sample(self.model, [prompt for prompt in body["prompt"] for _ in range(body["n"])], how)
        return [
            {
                "index": i,
                "token_ids": one.ids,
                "logprobs": {"token_logprobs": one.log_probs},
                "finish_reason": "stop" if one.ended else "length",
            }
            for i, one in enumerate(found)
        ]


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        server: Any = self.server
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        try:
            status, said = 200, server.answer(self.path[1:], body)
        except Exception as error:
            status, said = 500, {"error": repr(error)}
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(said).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def train(tmp_path: Path, server: Server) -> Callable[..., Path]:
    def run(*settings: str, output: str = "run") -> Path:
        url = f"generation.engine_url=http://127.0.0.1:{server.server_port}"
        own = [url] if "generation.engine=vllm" in settings else []
        run_recipe("grpo", tmp_path / output, *SETTINGS, *own, *settings)
        return tmp_path / output

    return run


def test_a_server_with_the_weights_answers_as_the_model_itself(train: Callable[..., Path], server: Server) -> None:
    assert metrics(train("generation.engine=vllm"), timed=False) == metrics(train(output="own"), timed=False)
    assert server.asked == ["init_weight_transfer_engine", *UPDATE, *UPDATE]
    assert any(not torch.equal(server.weights[0][name], tensor) for name, tensor in server.weights[1].items())


def test_an_adapter_is_merged_on_the_way(train: Callable[..., Path], server: Server) -> None:
    folder = train("generation.engine=vllm", "lora.rank=4")
    merged, _ = load_merged(folder / "step_00000001", dtype=torch.float32)
    for name, tensor in tensors_on_disk(merged).items():
        torch.testing.assert_close(server.weights[1][name], tensor, rtol=0, atol=0)
    assert any(not torch.equal(server.weights[0][name], tensor) for name, tensor in server.weights[1].items())


def test_the_server_gets_the_names_of_the_folder_that_it_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole_model("Gemma3").save_pretrained(tmp_path / "model")
    monkeypatch.setattr(VLLMServer, "_ask", lambda *_: {"data": [{"id": "model"}]})
    VLLMServer("http://server", tmp_path / "weights")._give_weights(load_model(tmp_path / "model"))
    given = {name for file in (tmp_path / "weights").glob("*.safetensors") for name in load_file(file)}
    assert given == {name for name in load_file(tmp_path / "model" / "model.safetensors") if "language_model" in name}


def test_what_cannot_be_is_refused(train: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match="loss.correction=token_truncate"):
        train("generation.engine=vllm", "loss.correction=none")
    with pytest.raises(ValueError, match="does not answer.*Start it with `VLLM_SERVER_DEV_MODE=1 vllm serve"):
        train("generation.engine=vllm", "generation.engine_url=http://127.0.0.1:9")
