"""Attention on cards of 3 generations never holds all scores at once."""

import pytest
import torch

from lean_ft.models.attention.attention import Scoring, attend_documents, attend_rows
from tests.pretended_gpu.device_values import empty_kernels

pytestmark = [pytest.mark.simulated, pytest.mark.cards("T4", "A100", "H100")]

NUM_TOKENS, NUM_HEADS, HEAD_DIM = 4096, 32, 64
SCORES_BYTES = NUM_HEADS * NUM_TOKENS**2 * 2


@pytest.mark.parametrize(
    ("packed", "num_kv_heads", "window"), [(False, 8, None), (False, 32, None), (False, 8, 500), (True, 8, None)]
)
def test_no_card_holds_all_scores(packed: bool, num_kv_heads: int, window: int | None) -> None:
    heads = (NUM_HEADS, num_kv_heads, num_kv_heads)
    query, key, value = (
        torch.empty(1, NUM_TOKENS, n, HEAD_DIM, device="cuda", dtype=torch.float16).requires_grad_() for n in heads
    )
    scoring, bounds = Scoring(window=window), torch.tensor([0, 1000, NUM_TOKENS], dtype=torch.int32).cuda()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with empty_kernels():
        attended = (
            attend_documents(query, key, value, bounds, scoring) if packed else attend_rows(query, key, value, scoring)
        )
        attended.sum().backward()
    assert torch.cuda.max_memory_allocated() - before < SCORES_BYTES / 2
