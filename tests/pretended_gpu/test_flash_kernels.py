"""Attention kernels on a GPU: the Triton kernels' values in Triton's interpreter, and the launches of a layer."""

import subprocess
import sys

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lean_ft.models.attention.attention import Scoring, attend_documents
from tests.pretended_gpu.cards import triton_environment
from tests.pretended_gpu.counters import counters

VALUES = """
import torch
import tests.pretended_gpu.interpreter
from lean_ft.models.attention.document_attention import document_attention
from lean_ft.models.attention.flash_kernels import attend, attend_backward, join_sinks, sink_gradients
from lean_ft.models.attention.row_attention import Rows, attend_rows, attend_rows_backward

def error(found, true):
    return ((found.double() - true).norm() / true.norm()).item()

torch.manual_seed(0)
query_device = torch.get_default_device().type
slack = 1.1 if query_device == "cpu" else 2  # on a real GPU, theirs may be PyTorch's kernel, which rounds at other places
bounds = torch.tensor([0, 1, 71, 135, 135, 264, 270], dtype=torch.int32)  # in 2 rows of 135
prefixes = torch.tensor([(0, 0), (0, 1), (1, 40), (0, 0), (135, 135), (150, 200)], dtype=torch.int32)
ends = torch.arange(1, 271, dtype=torch.int32)
for start, end in ((3, 9), (40, 64), (80, 135), (140, 230)):  # images
    ends[start:end] = end
every = {"scale": 0.3, "window": 17, "softcap": 1.5}
cases = [(64, 4, {}), (64, 2, every), (64, 1, {"ends": ends, "num_ahead": 89}), (96, 2, {"prefixes": prefixes})]
cases += [(96, 2, {**every, "ends": ends, "num_ahead": 89}), (256, 2, {**every, "prefixes": prefixes}), (512, 2, {"softcap": 1.5})]
for head_dim, num_kv_heads, rules in cases:
    # The matrix units of a real GPU round float32, which never reaches these kernels.
    for dtype in (torch.float32, torch.bfloat16)[head_dim > 64 or query_device == "cuda":]:
        for sinks in (None, torch.randn(4).to(dtype)):
            query, key, value, grad = (torch.randn(270, n, head_dim).to(dtype) for n in (4, num_kv_heads, num_kv_heads, 4))
            rows = Rows(**{"scale": None, "window": None, "softcap": None, **rules}, cu_seqlens=bounds, sinks=sinks, num_tokens=135)
            out, lse = attend(query, key, value, rows)
            found = [out, *attend_backward(grad, out, lse, query, key, value, rows)]
            wide = [x.double() for x in (query, key, value)]
            rows_wide = rows._replace(sinks=None if sinks is None else sinks.double())
            exact = [attend_rows(*wide, rows_wide), *attend_rows_backward(grad.double(), *wide, rows_wide)]
            errors = [error(one, true) for one, true in zip(found, exact) if true is not None]
            leaves = [x.clone().requires_grad_() for x in (query, key, value)]
            theirs = document_attention(*leaves, bounds, sinks, *rows[2:5], 135, *rows[6:])
            theirs = [theirs.detach(), *torch.autograd.grad(theirs, leaves, grad)]
            limits = [1e-6 if dtype == torch.float32 else slack * error(one, true) for one, true in zip(theirs, exact)]
            assert all(own < limit for own, limit in zip(errors, [*limits, 6e-3])), (head_dim, rules, dtype, errors, limits)
            if sinks is not None:  # as PyTorch's kernel and the sinks afterwards
                plain, joined = attend(query, key, value, rows._replace(sinks=None))
                join_sinks(plain, joined, sinks)
                rounding = 1e-6 if dtype == torch.float32 else 6e-3
                assert error(plain, exact[0]) < rounding and error(joined, lse.double()) < 1e-6
                assert error(sink_gradients(grad, plain, joined, sinks), exact[4]) < rounding
print("right")
"""  # noqa: E501


@pytest.mark.long
@pytest.mark.cards("H100")
def test_the_kernels_values_in_tritons_interpreter() -> None:
    """Against row attention in float64, which has its own tests against a dense softmax."""
    command = [sys.executable, "-W", "ignore", "-c", VALUES]
    done = subprocess.run(command, env=triton_environment(), capture_output=True, text=True, check=False)
    assert done.stdout == "right\n", done.stderr[-2000:]


@pytest.mark.simulated
@pytest.mark.cards("A100", "H100")
@pytest.mark.parametrize(
    ("scoring", "sinks_are", "most"),
    [(Scoring(), "trained", 11), (Scoring(window=128), "trained", 11), (Scoring(), "frozen", 9),
        (Scoring(softcap=50.0), "none", 11)],
    ids=str,
)  # fmt: skip
def test_launches_of_a_checkpointed_layer_do_not_grow_with_the_tokens(
    scoring: Scoring, sinks_are: str, most: int
) -> None:
    """Forward, forward again, and backward."""
    for num_tokens in (256, 2048):
        leaves = [torch.zeros(2, num_tokens, n, 64, device="cuda").bfloat16().requires_grad_() for n in (16, 4, 4)]
        trains = sinks_are == "trained"
        sinks = None if sinks_are == "none" else torch.zeros(16, device="cuda").bfloat16().requires_grad_(trains)
        bounds = torch.tensor([0, 100, num_tokens, 2 * num_tokens], dtype=torch.int32).cuda()
        before = counters()["kernels"]
        out = checkpoint(attend_documents, *leaves, bounds, scoring, sinks, use_reentrant=False)
        torch.autograd.grad(out, leaves + [sinks] * trains, out)
        assert counters()["kernels"] - before <= most
