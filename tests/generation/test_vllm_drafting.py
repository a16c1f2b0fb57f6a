"""A real vLLM server drafts with the layers of a saved folder, and accepts as many drafts as lean_ft counts.

Takes a minute. `benchmarks/drafting.py` compares trained layers.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.vllm_server import draft_counters, greedy_ids, vllm_server
from lean_ft.data.columns import Document
from lean_ft.generation import Sampling, sample
from lean_ft.generation.drafting import accepted_in_steps
from lean_ft.hub.paths import resolve_model_path
from lean_ft.models import load_model, save_model
from lean_ft.settings import ModelConfig
from tests.models.drafting_checkpoints import checkpoint_with_drafting

pytestmark = pytest.mark.long
# Sizes that vLLM's kernels support.
SIZES = {"vocab_size": 768, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "head_dim": 32}
SIZES |= {"num_key_value_heads": 2, "moe_intermediate_size": 32, "attention_bias": False}


@torch.no_grad()
def test_vllm_accepts_the_drafts_that_are_counted(tmp_path: Path) -> None:
    made = checkpoint_with_drafting(tmp_path / "model", "glm4_moe", 1, **SIZES)
    stored = load_file(made.folder / "model.safetensors")
    stored["lm_head.weight"][2:] *= 0.01  # so that some drafts are accepted
    save_file(stored, made.folder / "model.safetensors", {"format": "pt"})
    model = load_model(ModelConfig(path=str(made.folder), dtype="float32", mtp="train")).eval()
    saved = tmp_path / "saved"
    save_model(model, saved)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (saved / name).write_bytes((resolve_model_path("tiny") / name).read_bytes())
    prompts = [Document.of(ids.tolist()) for ids in torch.randint(3, 700, (6, 12))]
    sampling = Sampling(32)
    own = [completion.ids for completion in sample(model, prompts, sampling)]
    drafts = ("--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": 1}))
    with vllm_server(saved, "--max-model-len", "256", *drafts, log=tmp_path / "log") as server:
        served = [greedy_ids(server.url, saved, prompt.ids.tolist(), 32) for prompt in prompts]
        counted = draft_counters(server.url)
    assert served == own
    steps = [
        number
        for prompt, ids in zip(prompts, own, strict=True)
        for number in accepted_in_steps(model, [*prompt.ids.tolist(), *ids], len(prompt), 1)
    ]
    # vLLM replaces the embedding at position 0 by zeros, which moves a draft at the edge.
    assert counted["accepted_tokens_per_pos0"] == pytest.approx(sum(steps), abs=2 + 0.02 * len(steps))
    assert sum(steps) > 5
