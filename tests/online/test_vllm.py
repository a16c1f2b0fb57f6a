"""Sampling by a real vLLM server, its CPU build, in a separate environment. Installing takes 3.5 GB."""

import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.vllm_server import ADAPTERS, UNTIED, VLLMProcess, random_model, vllm_server
from lean_ft import load_model, load_tokenizer
from lean_ft.data.columns import Document
from lean_ft.generation import Sampling, sample
from lean_ft.online.engines import VLLMServer
from lean_ft.online.engines.client import Client
from lean_ft.peft import apply_lora
from lean_ft.settings import GenerationConfig, LoRAConfig
from tests.recipes.conftest import PROBLEMS, run_recipe
from tests.training.toy_runs import digests, metrics

pytestmark = pytest.mark.long
SIZES = {"num_hidden_layers": 3, "intermediate_size": 256}
MODELS = {"llama": False, "qwen3": True}  # whether embeddings are tied
GREEDY = Sampling(24, stop_ids=frozenset([2]))
RUN = (*PROBLEMS, "rewards=[length]", "generation.engine=vllm", "generation.max_new_tokens=8", "save_every=1")
RUN += ("gradient_accumulation_steps=1", "batch_size=8", "generation.num_answers=4", "device=cpu", "plan=false")


@pytest.fixture(scope="module", params=MODELS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any]]:
    """A folder of a random model with the embedded tokenizer, and its server."""
    top, is_tied = tmp_path_factory.mktemp(request.param), MODELS[request.param]
    random_model(request.param, top / "model", **SIZES)
    flags = ("--max-model-len", "512", *ADAPTERS)
    with vllm_server(top / "model", *flags, *(UNTIED if is_tied else ()), log=top / "log") as server:
        yield top / "model", server


def engine_of(server: VLLMProcess, run: Path, **settings: Any) -> VLLMServer:
    generation = GenerationConfig.model_validate({"engine": "vllm", "engine_url": server.url, **settings})
    return VLLMServer(generation, run, 512, load_tokenizer("tiny"))


def documents() -> list[Document]:
    tokenizer = load_tokenizer("tiny")
    return [Document.of(tokenizer.encode(text)) for text in ("1 + 1 =", "Once upon a time", "57, 45, 95: smallest")]


def largest_gap(model: Any, engine: VLLMServer) -> float:
    """The largest difference of log-probabilities of greedy tokens, which are equal."""
    own = sample(model, documents(), GREEDY)
    found = engine.sample(documents(), GREEDY, [0, 0, 0])
    assert [one.ids for one in found] == [one.ids for one in own]
    assert [one.ended for one in found] == [one.ended for one in own]
    pairs = zip(found, own, strict=True)
    return max(abs(a - b) for one, other in pairs for a, b in zip(one.log_probs, other.log_probs, strict=True))


def changed(model: Any, seed: int) -> Any:
    """Change the weights, as an update would."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


@pytest.mark.parametrize("weights", ["adapter", "merged"])
def test_an_adapter_is_published(served: tuple[Path, Any], weights: str, tmp_path: Path) -> None:
    """The server needs the weights below an adapter that is sent alone, which other tests replace."""
    folder, server = served
    model = load_model(folder)
    if weights == "adapter" and model.config.tied_embeddings:
        pytest.skip("the server was told that the output layer is not tied")
    if weights == "adapter" and Client(server.url).ask("weight_info") != {"weight_version": "default"}:
        server.kill()
        server.start()
    engine = engine_of(server, tmp_path, engine_weights=weights)
    apply_lora(model, LoRAConfig(rank=4, alpha=8.0))
    for seed in (0, 1):
        torch.manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.normal_(0, 0.1)
        engine.publish(model)
        assert largest_gap(model, engine) < 5e-5


def test_greedy_tokens_and_log_probabilities_are_the_models_own(served: tuple[Path, Any], tmp_path: Path) -> None:
    """Before and after updates; each publication is a version."""
    folder, server = served
    engine, model = engine_of(server, tmp_path), load_model(folder)
    for seed in (0, 1, 2):
        engine.publish(model)
        assert largest_gap(model, engine) < 2e-5
        changed(model, seed)
    assert engine.num_published == 3


def test_a_killed_and_restarted_server_gets_the_weights_again(served: tuple[Path, Any], tmp_path: Path) -> None:
    folder, server = served
    engine, model = engine_of(server, tmp_path), changed(load_model(folder), 5)
    engine.publish(model)
    server.kill()
    restarted = threading.Thread(target=lambda: (time.sleep(2), server.start()))
    restarted.start()
    assert largest_gap(model, engine) < 2e-5  # waits for it
    restarted.join()


@pytest.mark.parametrize("recipe", ["grpo", "online_dpo"])
def test_runs_with_a_server(served: tuple[Path, Any], recipe: str, tmp_path: Path) -> None:
    """No token needs a correction, and a resumed run ends with the same bits as a whole one, since a checkpoint has the
    round."""
    folder, server = served
    given = [*RUN, f"model.path={folder}", f"generation.engine_url={server.url}", "optimizer.lr=1e-3"]
    given += ["loss.correction=token_truncate"] if recipe == "grpo" else ["batch_size=2"]
    given += ["generation.steps_per_round=2", "data.source=tiny/problems_train.jsonl"]
    run_recipe(recipe, tmp_path / "run", *given, "max_steps=3")
    lines = metrics(tmp_path / "run", timed=False)
    assert [line["step"] for line in lines] == [1, 2, 3]
    if recipe == "grpo":
        assert {line["correction_share"] for line in lines} == {0.0}
    # The second step of a round trains on completions of the checkpoint, without the server's part.
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "step_00000003")
    shutil.rmtree(tmp_path / "again" / "step_00000002")
    run_recipe(recipe, tmp_path / "again", *given, "max_steps=2")
    assert digests(tmp_path / "again" / "step_00000002") == digests(tmp_path / "run" / "step_00000002")


def test_another_model_is_refused(served: tuple[Path, Any], tmp_path: Path) -> None:
    """The server loads the weights of a model with fewer layers, and keeps its others."""
    folder, server = served
    kind = "qwen3" if "qwen3" in folder.parent.name else "llama"
    random_model(kind, tmp_path / "model", **SIZES | {"num_hidden_layers": 2})
    given = [*RUN, f"generation.engine_url={server.url}", "loss.correction=token_truncate", "max_steps=1"]
    with pytest.raises(ValueError, match="computes another model"):
        run_recipe("grpo", tmp_path / "run", *given, f"model.path={tmp_path / 'model'}")
