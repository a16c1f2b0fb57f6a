"""Completions on the GPU equal the CPU's for each kind of layer; and the memory of an online run while it samples."""

import gc
import json
import threading
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING

from lean_ft.generation import Sampling, generate, sample
from lean_ft.generation.server import ChatServer
from lean_ft.generation.texts import open_model
from lean_ft.models import load_model
from lean_ft.optim.adamw import AdamW
from lean_ft.optim.adamw_8bit import AdamW8bit
from lean_ft.optim.optimizer import Optimizer
from lean_ft.settings.text import load_config
from lean_ft.system.catalog import find_preset, find_recipe, load_recipe
from lean_ft.system.host_link import HostLink
from tests.models.family_cases import CASES, SIZES
from tests.pretended_gpu.test_order import RULE

# Plain, windowed, shared and latent key-value caches, sinks, and each kind of recurrent state.
MIXERS = (
    "llama",
    "gemma3_text",
    "gemma4_text",
    "deepseek_v3",
    "gpt_oss",
    "qwen3_5_text",
    "lfm2",
    "falcon_h1",
    "nemotron_h",
)


@pytest.mark.cards("T4", "H100")
@pytest.mark.parametrize(
    ("case", "compile"), [*((case, False) for case in MIXERS), ("llama", True), ("gemma3_text", True)]
)
def test_what_is_drawn_is_drawn_on_the_cpu_too(case: str, compile: bool, tmp_path: Path) -> None:
    model_type, settings = CASES[case]
    (tmp_path / "config.json").write_text(json.dumps(CONFIG_MAPPING[model_type](**{**SIZES, **settings}).to_dict()))
    found = {}
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = load_model(tmp_path, device="cpu", dtype=torch.float32, random_init=True).to(device)
        prompts = [[5, 6, 7], [8], list(range(3, 30))]
        sampling = Sampling(max_new_tokens=10, temperature=1.0, top_p=0.9)
        more = {"cache_gib": 0.1, "records_experts": True, "compile": compile and device == "cuda"}
        found[device] = sample(model, prompts, sampling, **more)
    for own, expected in zip(found["cuda"], found["cpu"], strict=True):
        assert (own.ids, own.experts) == (expected.ids, expected.experts)
        assert own.log_probs == pytest.approx(expected.log_probs, abs=1e-4)


def test_served_answers_are_the_cpus() -> None:
    asked = [{"role": "user", "content": "What is the capital of Zanemar?"}]
    model, tokenizer = open_model("tiny", device="cuda", dtype="float32")
    (expected,) = generate(load_model("tiny"), [asked], tokenizer, max_new_tokens=12, temperature=1.0, seed=3)
    with ChatServer(model, tokenizer, "mine") as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        body = json.dumps({"model": "mine", "messages": asked, "max_tokens": 12, "temperature": 1.0, "seed": 3})
        request = Request(f"{server.url}/chat/completions", body.encode(), {"Content-Type": "application/json"})
        answer = json.loads(urlopen(request, timeout=300).read())
        server.shutdown()
    assert answer["choices"][0]["message"]["content"] == expected


@pytest.mark.parametrize(("rule", "state_bytes"), [(AdamW(**RULE), 8 * 2**20), (AdamW8bit(paged=False, **RULE), 2**21)])
def test_state_is_away_and_comes_back_as_it_was(rule: AdamW | AdamW8bit, state_bytes: int) -> None:
    gc.collect()  # tensors of earlier tests, which would leave in between
    parameter = nn.Parameter(torch.randn(1024, 1024, device="cuda"))
    optimizer = Optimizer([("weight", parameter)], rule, in_backward=False)
    parameter.grad = torch.randn_like(parameter)
    optimizer.set_lr(1e-3)
    optimizer.finish_gradients()
    optimizer.step()
    optimizer.zero_grad()

    def state() -> dict[str, Tensor]:
        return {name: value.cpu().clone() for name, value in optimizer.state_dict().items()}

    link, before, allocated = HostLink(torch.device("cuda", 0)), state(), torch.cuda.memory_allocated()
    for _ in range(2):
        with optimizer.state_away(link):
            assert torch.cuda.memory_allocated() <= allocated - state_bytes
        assert torch.cuda.memory_allocated() == allocated
    assert all(torch.equal(value, before[name]) for name, value in state().items())


def test_a_run_whose_state_goes_away_is_the_same(tmp_path: Path) -> None:
    def run(*more: str) -> list[dict]:
        recipe, folder = load_recipe(find_recipe("grpo")), tmp_path / str(len(more))
        given = [f"output_dir={folder}", "device=cuda", "plan=false", "data.validation_source=null", "batch_size=8"]
        recipe.main(load_config(recipe.Config, find_preset("tiny/grpo"), [*given, "max_steps=3", *more]))
        return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

    names = ("loss", "grad_norm", "reward", "completion_length")
    here, away = run(), run("generation.offload_training_state=true")
    assert [[row[name] for name in names] for row in here] == [[row[name] for name in names] for row in away]
    with pytest.raises(ValueError, match="is always in host memory"):
        run("generation.offload_training_state=true", "optimizer.state=streamed")
