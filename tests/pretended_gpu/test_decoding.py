"""Generation on the GPU: launches and host waits per token, and the same tokens as on the CPU."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import CONFIG_MAPPING

from lean_ft.generation import Completion, Sampling, decoding, sample, step_graphs
from lean_ft.models import Decoder, load_model
from lean_ft.models.attention import attention, varlen
from tests.generation.test_turns import Delayed
from tests.models.family_cases import CASES, SIZES
from tests.pretended_gpu.counters import counters

pytestmark = pytest.mark.simulated

PROMPTS = [[5, 6, 7], [8], list(range(3, 30)), [8], [8], [11, 12], [5, 6, 7], [40] * 9, [41], [42], [43, 44]]


def models(case: str, folder: Path) -> tuple[Decoder, Decoder]:
    """The same model on the CPU and on the GPU, in float32."""
    model_type, settings = CASES[case]
    (folder / "config.json").write_text(json.dumps(CONFIG_MAPPING[model_type](**{**SIZES, **settings}).to_dict()))
    torch.manual_seed(0)
    on_cpu = load_model(folder, device="cpu", dtype=torch.float32, random_init=True)
    on_gpu = load_model(folder, device="cpu", dtype=torch.float32, random_init=True).cuda()
    on_gpu.load_state_dict(on_cpu.state_dict())
    return on_cpu, on_gpu


def counted(model: Decoder, sampling: Sampling) -> dict[str, int]:
    before = counters()
    sample(model, PROMPTS, sampling, cache_gib=0.1)
    return {name: count - before[name] for name, count in counters().items()}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_token_is_one_graph_launch_without_a_wait(temperature: float, tmp_path: Path) -> None:
    _, model = models("llama", tmp_path)
    counted(model, Sampling(2, temperature))
    few, many = (counted(model, Sampling(n, temperature)) for n in (20, 120))
    assert {name: many[name] - few[name] for name in ("graph_launches", "kernels", "host_waits")} == {
        "graph_launches": 100,
        "kernels": 0,
        "host_waits": 0,
    }
    # PyTorch waits once for each recorded shape.
    assert many["host_waits"] <= 1 and many["copies"] - few["copies"] <= 200


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("case", ["llama", "qwen3_5_text", "llama_dynamic_rope"])
def test_rows_end_without_a_wait(case: str, recorded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And rows leave, graphs of other shapes follow, and what rows compute after their end is not seen."""
    monkeypatch.setattr(step_graphs, "POSITIONS", 8)
    monkeypatch.setattr(step_graphs, "FEWEST_ROWS", 2)
    if not recorded:
        monkeypatch.setattr(decoding, "can_record", lambda model: False)
    on_cpu, on_gpu = models(case, tmp_path)
    free = sample(on_cpu, PROMPTS, Sampling(24, 1.0), cache_gib=0.1)
    sampling = Sampling(24, 1.0, stop_ids=frozenset(one.ids[2 * i] for i, one in enumerate(free) if i != 6))
    expected = sample(on_cpu, PROMPTS, sampling, cache_gib=0.1)
    assert len({len(one.ids) for one in expected}) > 4
    sample(on_gpu, PROMPTS[:2], Sampling(2, 1.0), cache_gib=0.1)  # copies the rotary frequencies, among others
    before = counters()
    found = sample(on_gpu, PROMPTS, sampling, cache_gib=0.1)
    spent = {name: count - before[name] for name, count in counters().items()}
    assert [(one.ids, one.ended) for one in found] == [(one.ids, one.ended) for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)
    assert (spent["graph_launches"] > 0) == (recorded and case != "llama_dynamic_rope")
    if case == "llama":
        assert spent["host_waits"] <= (9 if recorded else 0)  # recorded shapes


@pytest.mark.parametrize(
    ("case", "how"),
    [
        *(("qwen3_5_text", how) for how in ("recorded", "launched", "few rows")),
        *((case, "recorded") for case in ("llama", "gemma3_text", "gemma4_text", "llama_dynamic_rope")),
        ("deepseek_v3", "few rows"),
    ],
)
def test_rows_wait_for_replies_while_late_steps_run(
    case: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies of rows that wait are not changed by steps that were launched before their turn's end was known."""
    monkeypatch.setattr(step_graphs, "POSITIONS", 8)
    monkeypatch.setattr(step_graphs, "FEWEST_ROWS", 2)
    if how == "launched":
        monkeypatch.setattr(decoding, "can_record", lambda model: False)
    on_cpu, on_gpu = models(case, tmp_path)
    sampling = Sampling(24, 1.0, seed=4, stop_ids=frozenset(range(0, 101, 9)))
    places = [*range(len(PROMPTS))]
    gib = 8 * on_cpu.cache_bytes(1, 27 + 24 + 45) / 2**30 if how == "few rows" else 0.1  # 4 rows at a time

    def found(model: Decoder, seed: int | None) -> list[Completion]:
        replies = Delayed(seed, places)
        return sample(model, PROMPTS, sampling, cache_gib=gib, replies=replies, max_given_tokens=45)

    expected = found(on_cpu, None)
    assert sum(one.sampled.count(False) > 0 for one in expected) > 4
    for seed in (1, 2):
        before = counters()["graph_launches"]
        for own, one in zip(found(on_gpu, seed), expected, strict=True):
            assert (own.ids, own.ended, own.sampled) == (one.ids, one.ended, one.sampled)
            assert own.log_probs == pytest.approx(one.log_probs, abs=2e-5)
        assert (counters()["graph_launches"] > before) == (how != "launched" and case != "llama_dynamic_rope")


def test_a_model_that_waits_for_the_device_is_not_recorded(tmp_path: Path, capsys: Any) -> None:
    on_cpu, on_gpu = models("llama", tmp_path)
    on_gpu.layers[0].register_forward_hook(lambda module, args, out: out[0].sum().item() and None)
    before = counters()["graph_launches"]
    found = sample(on_gpu, PROMPTS, Sampling(12, 1.0), cache_gib=0.1)
    assert [one.ids for one in found] == [one.ids for one in sample(on_cpu, PROMPTS, Sampling(12, 1.0), cache_gib=0.1)]
    assert counters()["graph_launches"] == before
    assert (
        capsys.readouterr().out.count("without CUDA graphs, which is slower: CUDA error: operation not permitted") == 1
    )


@torch.no_grad()
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 6])
def test_a_token_attends_by_its_rows_length(
    window: int | None, has_sinks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel that takes lengths and attention with a mask agree."""
    _, model = models("llama_llama3_rope", tmp_path)
    model.bfloat16()
    for layer in model.layers:
        mixer: Any = layer.self_attn
        mixer.scoring = replace(mixer.scoring, window=window)
        if has_sinks:
            mixer.sinks = torch.nn.Parameter(torch.linspace(-1, 3, model.config.num_heads).cuda().bfloat16())
    ids = torch.randint(0, 101, (4, 12), generator=torch.Generator().manual_seed(0)).cuda()
    found, calls = [], mock.Mock(wraps=varlen.varlen_attn)
    monkeypatch.setattr(varlen, "varlen_attn", calls)
    for _ in range(2):
        cache = model.new_cache(batch_size=4, capacity=20)
        model(ids, cache=cache, lengths=torch.tensor([12, 5, 1, 9]).cuda())
        calls.reset_mock()
        found.append(torch.cat([model(ids[:, i : i + 1], cache=cache) for i in range(3)], 1))
        assert calls.call_count == (0 if len(found) == 2 else 3 * len(model.layers))
        monkeypatch.setattr(attention, "_has_length_kernel", lambda *_: False)
    torch.testing.assert_close(*found, atol=0.03, rtol=0.03)
