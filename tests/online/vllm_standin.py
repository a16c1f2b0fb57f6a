"""A small server with the routes of vLLM 0.32 on top of lean_ft's models."""

import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from lean_ft import load_model, load_tokenizer
from lean_ft.generation import Sampling
from lean_ft.generation.choosing import RowKey, choose
from lean_ft.generation.turns import RunningRow
from lean_ft.models.source import tensors_on_disk
from lean_ft.peft import load_merged

FACTS = {
    "model_config": {
        "max_model_len": 512,
        "logprobs_mode": "processed_logprobs",
        "hf_overrides": {},
        "dtype": "torch.float32",
    },
    "device_config": {"device": "cuda"},
}


class Server(ThreadingHTTPServer):
    """It has no weights until it gets their folder. A request's seed names the row and the position whose random draws
    it makes."""

    request_queue_size = 128  # connections that wait

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.model, self.tokenizer = load_model("tiny"), load_tokenizer("tiny")
        self.rows: list[RunningRow] = []  # that were sampled here
        self.asked: list[str] = []
        self.prompts: list[list[int]] = []
        self.weights: list[dict[str, torch.Tensor]] = []
        self.version = "default"
        self.before_an_answer: Callable[[], None] = lambda: None
        self.cuts: Callable[[], bool] = lambda: False
        self.base, self.facts, self.adapters = "tiny", dict(FACTS), dict[str, Path]()
        for tensor in tensors_on_disk(self.model).values():
            tensor.zero_()

    def answer(self, route: str, body: dict[str, Any]) -> dict[str, Any] | str:
        if route == "server_info":
            return {"vllm_config": self.facts}
        if route == "weight_info":
            return {"weight_version": self.version}
        if route == "version":
            return {"version": "0.32.0"}
        if route == "tokenize":
            return {"tokens": self.tokenizer.encode(body["prompt"])}
        if route == "inference/v1/generate":
            return self.generate(body)
        self.asked.append(route)
        if route == "collective_rpc":
            assert body["method"] == "reload_weights"
            self.load(Path(body["kwargs"]["weights_path"]))
        if route == "v1/load_lora_adapter":
            self.adapters[body["lora_name"]] = Path(body["lora_path"])
            self.serve(load_merged(body["lora_path"], self.base, dtype=torch.float32)[0])
            return "Success"
        if route == "v1/unload_lora_adapter":
            self.adapters.pop(body["lora_name"])
        self.version = body.get("new_version") or self.version
        return {}

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        params, (name, *_) = body["sampling_params"], [*self.adapters, None]
        assert body.get("model") == name
        assert [params[one] for one in ("repetition_penalty", "top_k", "top_p", "min_p")] == [1.0, 0, 1.0, 0.0]
        ids, log_probs, reason = self.complete(body["token_ids"], params["seed"], params["max_tokens"], params)
        content = [{"token_id": token, "logprob": value} for token, value in zip(ids, log_probs, strict=True)]
        spans = [{"version": self.version, "start": 0, "end": len(ids)}]
        choice = {"token_ids": ids, "finish_reason": reason, "logprobs": {"content": content}}
        return {"choices": [{**choice, "weight_versions": spans}]}

    def restart(self) -> None:
        self.version, self.adapters = "default", {}
        self.serve(load_model(self.base))

    def serve(self, model: Any) -> None:
        for name, tensor in tensors_on_disk(self.model).items():
            tensor.copy_(tensors_on_disk(model)[name])

    def load(self, path: Path) -> None:
        assert path.is_absolute()
        self.weights.append({k: v for file in path.glob("*.safetensors") for k, v in load_file(file).items()})
        here = tensors_on_disk(self.model)
        assert here.keys() == self.weights[-1].keys()
        for name, tensor in here.items():
            tensor.copy_(self.weights[-1][name])

    @torch.no_grad()
    def complete(
        self, prompt: list[int], seed: int, most: int, told: dict[str, Any]
    ) -> tuple[list[int], list[float], str]:
        """One token after the other, without a cache."""
        if told["temperature"] == 0:
            return self.complete_greedily(prompt, most)
        self.prompts.append(prompt)
        self.before_an_answer()
        starts = [
            (row.key, len(prompt) - len(row.prompt))
            for row in self.rows
            if len(row.prompt) <= len(prompt) and row.key.at(len(prompt) - len(row.prompt))[0] & (2**31 - 1) == seed
        ]
        key, position = starts[0] if starts else (RowKey(seed, b"", 0), 0)
        ids, log_probs, how = list[int](), list[float](), Sampling(most, told["temperature"])
        for place in range(position, position + most):
            keys = torch.tensor([key.at(place)], dtype=torch.int32)
            token, log_prob = choose(self.model(torch.tensor([prompt + ids]))[:, -1], keys, how)
            ids.append(int(token))
            log_probs.append(float(log_prob))
            if ids[-1] in told["stop_token_ids"] or any(t in self.tokenizer.decode(ids[-5:]) for t in told["stop"]):
                return ids, log_probs, "stop"
        return ids, log_probs, "length"

    def complete_greedily(self, prompt: list[int], most: int) -> tuple[list[int], list[float], str]:
        ids, log_probs = list[int](), list[float]()
        for _ in range(most):
            values = self.model(torch.tensor([prompt + ids]))[0, -1].float().log_softmax(-1)
            ids.append(int(values.argmax()))
            log_probs.append(float(values.max()))
            if ids[-1] == 2:
                return ids, log_probs, "stop"
        return ids, log_probs, "length"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        server: Any = self.server
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        try:
            status, said = 200, server.answer(self.path[1:].partition("?")[0], body)
        except Exception as error:
            status, said = 400, {"error": {"message": repr(error)}}
        content = said.encode() if isinstance(said, str) else json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2 if server.cuts() else None])

    def log_message(self, *_: object) -> None:
        pass
