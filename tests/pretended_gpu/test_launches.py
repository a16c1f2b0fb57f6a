"""Facts that host code decides: the launches of an update, and the amount of pinned host memory."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from lean_ft.optim import Optimizer
from lean_ft.optim.gradients import gradient_norms, scale_gradients
from lean_ft.system.host_link import HostLink
from tests.optim.tiny_training import build
from tests.pretended_gpu.counters import counters

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.simulated, pytest.mark.cards("H100")]


def counted(count: str, work: Any) -> int:
    before = counters()[count]
    work()
    return counters()[count] - before


def test_a_gradient_takes_three_launches_besides_its_update() -> None:
    """One for its norm, one to check that the norm is finite, and one to zero the gradient if it is not. A compiled
    layer's
    gradients take seven together: three for their norms, one to collect these, and one for the highest."""
    model = nn.Linear(128, 128, bias=False).cuda().bfloat16()
    optimizer = build(model, {"name": "sgd", "in_backward": True})
    model.weight.grad = torch.full_like(model.weight, 0.5)
    optimizer.set_lr(1.0)
    before = model.weight.detach().clone()
    with mock.patch.object(Optimizer, "apply_rules", lambda self, states: before.copy_(states[0].grad)):
        assert counted("kernels", lambda: optimizer._update_and_free(optimizer.states)) <= 4  # includes the copy
    assert bool((before == 0.5).all())
    layer = nn.Sequential(*(nn.Linear(128, 128) for _ in range(9))).cuda().bfloat16()
    optimizer = build(layer, {"name": "sgd", "in_backward": True})
    for param in layer.parameters():
        param.grad = torch.full_like(param, 0.5)
    optimizer.set_lr(1.0)
    with mock.patch.object(Optimizer, "apply_rules"):
        assert counted("kernels", lambda: optimizer._update_and_free(optimizer.states)) <= 7


def test_norms_and_clipping_of_many_gradients_take_few_launches() -> None:
    grads = [
        torch.ones(64, 8, device="cuda", dtype=dtype) for dtype in (torch.bfloat16, torch.float32) for _ in range(30)
    ]
    assert counted("kernels", lambda: gradient_norms(grads, "cuda")) <= 7
    factor = torch.tensor(0.5, device="cuda")
    assert counted("kernels", lambda: scale_gradients(grads, factor)) <= 6
    assert all(bool((grad == 0.5).all()) for grad in grads)


def test_what_is_pinned_is_what_is_kept() -> None:
    link = HostLink(torch.device("cuda", 0))
    shapes = [(3000, 1100), (70_000,), (5, 513, 257), (1,), (0, 3)]
    tensors = [
        torch.randn(shape, device="cuda").to(dtype) for shape in shapes for dtype in (torch.bfloat16, torch.float32)
    ]
    kept_bytes = sum(tensor.nbytes for tensor in tensors)
    start = counters()["pinned_bytes"]
    for _ in range(3):  # later rounds reuse the memory of earlier ones
        sent = [link.send(tensor) for tensor in tensors]
        link.synchronize()
        assert all(torch.equal(one.host, tensor.cpu()) for one, tensor in zip(sent, tensors, strict=True))
        assert counters()["pinned_bytes"] - start <= 1.001 * kept_bytes
        del sent
    wider = torch.randn(2 * kept_bytes // 4, device="cuda")  # free blocks are released to make room
    kept = link.host_copy(wider)
    assert torch.equal(kept, wider.cpu()) and counters()["pinned_bytes"] - start <= 1.001 * wider.nbytes
    assert kept.is_pinned()
    del kept, link
    assert counters()["pinned_bytes"] == start


def test_an_adapters_update_takes_few_launches() -> None:
    """For 100 matrices: their weights, gradients and update in one each, and two to copy the weights back."""
    params = nn.ParameterList(torch.randn(16, 4096, device="cuda") for _ in range(100))
    optimizer = build(params, {"name": "adamw_8bit"})
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()  # also makes tables and joins the state
    assert counted("kernels", optimizer.step) <= 6


@pytest.mark.long
@pytest.mark.parametrize("preset", ["qwen3_8b/qlora", "llama3_2_3b/lora"])
def test_a_plan_counts_the_launches_of_a_compiled_model_with_adapters(
    preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two layers. Products are counted exactly; the compiler makes a few kernels more than planned to put factors on
    a diagonal, and attention fewer."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    planned_launches = importlib.import_module("planned_launches")
    monkeypatch.setattr(planned_launches, "NUM_LAYERS", 2)
    row = {"label": preset, "recipe": "finetune", "preset": preset, "compiled": True}
    found = planned_launches.run(row, "H100", 500, None)
    assert found["status"] == "ok", found["reason"]
    assert found["planned"] == pytest.approx(found["counted"], rel=0.15) and found["host_waits"] == 0


TUNED = """
import os, torch
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from lean_ft.losses.chunked_softmax import Terms, describe_with_gradient
def benchmark(self, *args, **kwargs):
    raise AssertionError(f"{self.inductor_meta['kernel_name']} is tuned, and writes over {self.mutated_arg_names}")
CachingAutotuner.benchmark_all_configs = benchmark
terms = Terms(softcap=30.0)
logits, rows = (torch.empty(64, n, device="cuda", dtype=t) for n, t in ((4096, torch.bfloat16), (terms.num_columns, None)))
describe_with_gradient(terms, compile=True)(logits, torch.zeros(64, dtype=torch.int64, device="cuda"), rows)
print("not tuned", flush=True)
os._exit(0)
"""  # noqa: E501


def test_kernels_that_overwrite_the_logits_are_not_tuned(tmp_path: Any) -> None:
    """Tuning would copy the logits to the host and back for each run of a kernel: 884 GiB for a 3B model in one
    chunk."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", TUNED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout == "not tuned\n", done.stderr[-2000:]
