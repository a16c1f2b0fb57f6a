"""Sampling by a server, with a small one that implements the routes of vLLM 0.32 on top of lean_ft's models.
`test_vllm.py` has the real one."""

import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lean_ft import load_model, load_tokenizer
from lean_ft.data import Prompt
from lean_ft.data.columns import Document
from lean_ft.generation import Sampling
from lean_ft.generation.turns import RunningRow
from lean_ft.models.source import tensors_on_disk
from lean_ft.online import Sampler
from lean_ft.online.engines import VLLMServer
from lean_ft.online.engines import server as server_module
from lean_ft.online.engines.client import Client
from lean_ft.online.engines.weights import Merged
from lean_ft.online.episodes import Player
from lean_ft.optim import Optimizer
from lean_ft.peft import load_merged
from lean_ft.settings import GenerationConfig
from lean_ft.system.shards import ALONE
from lean_ft.tools import ToolTurns
from lean_ft.training.bad_steps import TrainingFailed
from tests.models.conftest import whole_model
from tests.online.test_episodes import episodes_of, read_as_calls
from tests.online.test_episodes import files as files
from tests.online.vllm_standin import FACTS, Server
from tests.recipes.conftest import PROBLEMS, run_recipe
from tests.training.toy_runs import digests, metrics

SETTINGS = (*PROBLEMS, "rewards=[length]", "generation.num_answers=4", "generation.temperature=1.3", "save_every=1")
SETTINGS += (
    "loss.correction=token_truncate",
    "optimizer.lr=1e-3",
    "batch_size=8",
    "max_steps=2",
    "gradient_accumulation_steps=1",
)
UPDATES = ["pause", "collective_rpc", "update_weight_version", "resume"]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    plain = server_module.running_rows
    with Server() as server:

        def watched(*arguments: Any) -> list[RunningRow]:
            server.rows += (rows := plain(*arguments))
            return rows

        monkeypatch.setattr(server_module, "running_rows", watched)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def train(tmp_path: Path, server: Server) -> Callable[..., Path]:
    def run(*settings: str, output: str = "run", recipe: str = "grpo") -> Path:
        url = f"generation.engine_url=http://127.0.0.1:{server.server_port}"
        own = [url] if any(setting.startswith("generation.engine=") for setting in settings) else []
        given = [one for one in SETTINGS if recipe == "grpo" or not one.startswith("loss.")]
        run_recipe(recipe, tmp_path / output, *given, *own, *settings)
        return tmp_path / output

    return run


def assert_close(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Equal up to the rounding of the server's log-probabilities."""
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert value == (
                pytest.approx(other[name], rel=1e-3, abs=1e-6) if isinstance(value, float) else other[name]
            )


@pytest.mark.first(2)
@cache
def own_lines(*settings: str) -> list[dict[str, Any]]:
    """The numbers of a run that samples by itself."""
    with tempfile.TemporaryDirectory() as folder:
        run_recipe("grpo", Path(folder) / "run", *SETTINGS, *settings)
        return metrics(Path(folder) / "run", timed=False)


@pytest.mark.long
def test_a_server_with_the_weights_answers_as_the_model_itself(train: Callable[..., Path], server: Server) -> None:
    short = "generation.max_new_tokens=6"
    lines = metrics(train("generation.engine=vllm", short), timed=False)
    assert_close(lines, own_lines(short))
    assert server.asked == 2 * UPDATES
    assert any(not torch.equal(server.weights[0][name], tensor) for name, tensor in server.weights[1].items())


@pytest.mark.long
def test_an_adapter_is_sent_alone(train: Callable[..., Path], server: Server) -> None:
    """Each version has a name of its own, and the server keeps one."""
    server.restart()
    server.facts["lora_config"] = {"max_lora_rank": 4}
    lines = metrics(train("generation.engine=vllm", "lora.rank=4", "model.dtype=float32"), timed=False)
    assert_close(lines, own_lines("lora.rank=4", "model.dtype=float32"))
    load = ["v1/load_lora_adapter", "update_weight_version"]
    assert server.asked == [*load, *load, "v1/unload_lora_adapter"] and not server.weights
    with pytest.raises(ValueError, match="adapters of rank 4, and the run's has 8. Start it with --enable-lora --max"):
        train("generation.engine=vllm", "lora.rank=8", "generation.engine_weights=adapter", output="other")
    server.version = "merged-1"
    with pytest.raises(ValueError, match="weights of version merged-1, from another run, and this run sends its adap"):
        train("generation.engine=vllm", "lora.rank=4", output="other")


@pytest.mark.long
def test_attempts_at_a_round_share_its_weights(train: Callable[..., Path], server: Server) -> None:
    """No completion is right, so each round has two attempts."""
    train("generation.engine=vllm", "rewards=[{function: format, pattern: ----}]", "generation.most_attempts=2")
    assert server.asked == 2 * UPDATES and len(server.prompts) == 2 * 2 * 8


@pytest.mark.long
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
    asked = list[dict[str, Any]]()
    monkeypatch.setattr(Client, "ask", lambda self, route, content=None: asked.append(content) or {})
    way = Merged(Client("http://server"), ALONE, tmp_path / "weights", writes_output=False)
    way.write(load_model(tmp_path / "model"), "1")
    way.load("1")
    assert {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path / "weights")}} in asked
    given = {name for file in (tmp_path / "weights").glob("*.safetensors") for name in load_file(file)}
    assert given == {name for name in load_file(tmp_path / "model" / "model.safetensors") if "language_model" in name}


@pytest.mark.long
def test_episodes_are_those_of_the_model_itself(
    server: Server,
    files: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Turns with calls, stop texts and limits. The first call ends when another completion has asked for its next
    turn."""
    monkeypatch.setattr(ToolTurns, "read", read_as_calls)
    plain, went_on, waited = Player._call, threading.Event(), list[bool]()

    def call(self: Player, *arguments: Any) -> Any:
        if server.prompts and not waited:
            waited.append(True)
            waited[0] = went_on.wait(60)
        return plain(self, *arguments)

    monkeypatch.setattr(Player, "_call", call)
    server.before_an_answer = lambda: went_on.set() if len(server.prompts[-1]) > len(ids) else None
    stops = "generation.stop=[1,2,3,4,5,6,7,8,9]"
    given = ("tools.functions=[TMP/mine.py:add]", stops, "generation.max_new_tokens=24", "generation.temperature=1.5")
    url = f"generation.engine_url=http://127.0.0.1:{server.server_port}"
    given += ("generation.num_answers=16", "tools.calls=3")
    at_server = ("generation.engine=vllm", url, "loss.correction=token_truncate")
    chat, found = [{"role": "user", "content": "5 + 5"}], []
    for settings in ((), at_server):
        episodes = episodes_of(files, *given, *settings)
        ids = episodes.tokenizer.apply_chat_template(chat, episodes.schemas(), add_generation_prompt=True)
        sampler = Sampler(episodes.cfg, load_model("tiny"), episodes.tokenizer, None, episodes=episodes)  # pyright: ignore[reportArgumentType]
        found.append(sampler([Prompt(ids, chat, {}, "")] * 16, 7))
        (files / "tool_results.jsonl").unlink()
    for own, one in zip(*found, strict=True):
        torch.testing.assert_close(torch.tensor(one.log_probs), torch.tensor(own.log_probs), rtol=1e-4, atol=1e-4)
        own.log_probs = one.log_probs
        assert one == own
    assert max(one.turns for one in found[0]) > 2 and {one.ended for one in found[0]} == {True, False}
    assert waited == [True]


@pytest.mark.long
def test_the_next_round_is_sampled_while_this_one_trains(
    train: Callable[..., Path], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server answers for a round that is sampled ahead only after the step that trains meanwhile."""
    plain, steps = Optimizer.step, 0

    def step(self: Optimizer) -> None:
        nonlocal steps
        plain(self)
        steps += 1

    def wait() -> None:
        deadline = time.monotonic() + 60
        while steps < len(server.weights) - 1:
            assert time.monotonic() < deadline, "the training step waits for the round"
            time.sleep(0.01)

    monkeypatch.setattr(Optimizer, "step", step)
    server.before_an_answer = wait
    ahead = ("generation.engine=vllm", "generation.ahead=1", "loss.correction_max=0.9")
    whole = train(*ahead, "max_steps=4")
    assert len(server.prompts) == 5 * 8
    sent = [load_file(whole / f"step_0000000{number}" / "model.safetensors") for number in (1, 2, 3)]
    assert len(server.weights) == 5
    for weights, expected in zip(server.weights, [server.weights[0], server.weights[0], *sent], strict=True):
        assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    lines = metrics(whole, timed=False)
    assert all(0 < line["correction_share"] < 1 for line in lines[1:])
    # A run that is resumed trains on the round that its checkpoint has, and samples no token again.
    steps = 0
    server.prompts.clear()
    server.weights.clear()
    train(*ahead, "max_steps=2", output="resumed")
    steps = 99
    resumed = train(*ahead, "max_steps=4", output="resumed")
    assert len(server.prompts) == 5 * 8
    assert metrics(resumed, timed=False) == lines
    assert digests(resumed / "step_00000004") == digests(whole / "step_00000004")


@pytest.mark.long
def test_the_next_round_calls_its_tools_while_this_one_trains(
    train: Callable[..., Path],
    server: Server,
    files: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Episodes of a round that is sampled ahead are part of the checkpoint, with their messages."""
    monkeypatch.setattr(ToolTurns, "read", read_as_calls)
    rows = [json.dumps({"prompt": [{"role": "user", "content": f"{n} + {n}"}], "answer": "7"}) for n in range(9)]
    (files / "rows.jsonl").write_text("\n".join(rows))
    given = ("generation.engine=vllm", "generation.ahead=1", f"tools.functions=[{files}/mine.py:add]", "tools.calls=1")
    given += ("tools.process=true", f"data.chat_template={files}/template.jinja", f"data.source={files}/rows.jsonl")
    given += (
        "data.chat=true",
        "data.max_prompt_length=256",
        "generation.max_new_tokens=32",
        "generation.stop=[1,2,3,4,5,6,7,8,9]",
        "batch_size=4",
    )
    whole = train(*given, "max_steps=2", "sample_every=1")
    assert max(line["turns"] for line in metrics(whole)) > 1
    train(*given, "max_steps=1", "sample_every=1", output="resumed")
    resumed = train(*given, "max_steps=2", "sample_every=1", output="resumed")
    assert metrics(resumed, timed=False) == metrics(whole, timed=False)
    assert (resumed / "samples.jsonl").read_text() == (whole / "samples.jsonl").read_text()


@pytest.mark.long
def test_pairs_are_sampled_ahead(train: Callable[..., Path], server: Server) -> None:
    train("generation.engine=vllm", "generation.ahead=1", "batch_size=2", recipe="online_dpo")
    assert len(server.weights) == 3


@pytest.mark.long
def test_what_cannot_be_is_refused(tmp_path: Path, train: Callable[..., Path], server: Server) -> None:
    with pytest.raises(ValueError, match="loss.correction=token_truncate"):
        train("generation.engine=vllm", "loss.correction=none")
    gone = "generation.engine_url=http://127.0.0.1:9"
    with pytest.raises(ValueError, match="engine=vllm.*does not answer.*Start it with `VLLM_SERVER_DEV_MODE=1"):
        train("generation.engine=vllm", "generation.engine_seconds=0.1", gone)
    for change, message in (
        ({"logprobs_mode": "raw_logprobs"}, "Start it with --logprobs-mode processed_logprobs"),
        ({"max_model_len": 20}, "reads 20 tokens, and a prompt with its completion has up to 40. Start it with --max"),
    ):
        server.facts["model_config"] = FACTS["model_config"] | change
        with pytest.raises(ValueError, match=message):
            train("generation.engine=vllm")
    server.facts = {**FACTS, "device_config": {"device": "cpu"}, "scheduler_config": {"enable_chunked_prefill": True}}
    with pytest.raises(ValueError, match="Start it with --no-enable-chunked-prefill"):
        train("generation.engine=vllm")
    server.facts = {**FACTS, "device_config": {"device": "cpu"}}
    with pytest.raises(ValueError, match="keeps an old copy of a tied output layer"):
        train("generation.engine=vllm")
    server.facts = dict(FACTS)
    server.tokenizer = load_tokenizer("tiny-images")
    with pytest.raises(ValueError, match="has another tokenizer: it writes 'Hello, "):
        train("generation.engine=vllm")
    server.tokenizer = load_tokenizer("tiny")
    server.load = lambda path: None  # other weights than the run's
    with pytest.raises(ValueError, match="computes another model: .* the same first token for 0 of 2 prompts"):
        train("generation.engine=vllm")


def engine_of(server: Server, folder: Path, **settings: Any) -> VLLMServer:
    url = f"http://127.0.0.1:{server.server_port}"
    generation = GenerationConfig.model_validate({"engine": "vllm", "engine_url": url, **settings})
    return VLLMServer(generation, folder, 100, server.tokenizer)


HOW = Sampling(4, seed=3, temperature=1.0)


def test_the_run_outlasts_a_restart_and_half_a_reply(tmp_path: Path, server: Server) -> None:
    """Turns are sampled again with the weights that the run had given."""
    engine, prompts = engine_of(server, tmp_path), [Document.of([1, 2, number]) for number in (3, 4)]
    engine.publish(load_model("tiny"))
    expected = engine.sample(prompts, HOW, [0, 0])
    cuts = [True]
    server.cuts = lambda: bool(server.prompts) and bool(cuts) and cuts.pop()
    assert engine.sample(prompts, HOW, [0, 0]) == expected
    server.restart()
    server.asked.clear()
    assert engine.sample(prompts, HOW, [0, 0]) == expected
    assert server.asked == UPDATES
    server.version = "of another run"
    with pytest.raises(TrainingFailed, match="has weights of version of another run; expected merged-"):
        engine.sample(prompts, HOW, [0, 0])


def test_files_of_another_model_are_not_published(tmp_path: Path, server: Server) -> None:
    """A killed run leaves its files, and another model may follow in its directory."""
    plain, folders = server.load, list[Path]()
    server.load = lambda path: folders.append(path) or plain(path)
    for _ in range(2):
        engine_of(server, tmp_path).publish(server.model)
        save_file({"lm_head.weight": torch.zeros(1)}, folders[-1] / "lm_head.safetensors")
    assert folders[0] == folders[1] and len(server.weights) == 2
    assert server.weights[0].keys() == server.weights[1].keys()


def test_a_server_that_does_not_come_back_ends_the_run(tmp_path: Path, server: Server) -> None:
    engine = engine_of(server, tmp_path, engine_seconds=0.1)
    engine.publish(load_model("tiny"))
    server.cuts = lambda: True
    with pytest.raises(TrainingFailed, match="bytes. It did not answer within generation.engine_seconds=0.1. Start it"):
        engine.sample([Document.of([1])], HOW, [0])


@pytest.mark.parametrize(
    ("ids", "log_probs", "reason", "message"),
    [
        ([], [], "abort", "ended a completion by abort; expected stop or length"),
        ([5, 9999], [-1.0, -1.0], "stop", r"`token_ids` \[5, 9999\]; expected 1 to 4 ids below 768"),
        ([5] * 5, [-1.0] * 5, "stop", "expected 1 to 4 ids"),
        ([5, 6], [-1.0, float("nan")], "stop", "as the log-probabilities of"),
        ([5, 6], [-1.0, 0.5], "stop", "as the log-probabilities of"),
    ],
)
def test_replies_are_checked(
    ids: list[int], log_probs: list[float], reason: str, message: str, tmp_path: Path, server: Server
) -> None:
    engine = engine_of(server, tmp_path)
    engine.publish(server.model)
    server.complete = lambda *_: (ids, log_probs, reason)
    with pytest.raises(TrainingFailed, match=message):
        engine.sample([Document.of([1])], HOW, [0])


def test_a_reply_has_a_limit(server: Server) -> None:
    client = Client(f"http://127.0.0.1:{server.server_port}")
    server.answer = lambda *_: "x" * 2000
    with pytest.raises(TrainingFailed, match="more than 1,000 bytes"):
        client.ask("version", max_bytes=1000)
    with pytest.raises(ValueError, match="expected a URL of http or https"):
        Client("file:///etc/passwd")
