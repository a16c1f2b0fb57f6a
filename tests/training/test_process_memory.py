import numpy as np
import pytest
import torch

from lean_ft.training import peak_memory_bytes, peak_rss_bytes, rss_bytes
from lean_ft.training.process_memory import own_rss_bytes

BLOCK = 200 * 2**20


def test_peak_keeps_what_resident_size_gives_back():
    before = rss_bytes()
    block = np.ones(BLOCK, dtype=np.uint8)
    assert rss_bytes() - before == pytest.approx(BLOCK, rel=0.05)
    del block
    assert rss_bytes() - before < BLOCK / 2
    assert peak_rss_bytes() >= before + BLOCK * 0.95
    assert peak_memory_bytes(torch.device("cpu")) == pytest.approx(peak_rss_bytes(), rel=0.01)


def test_pages_of_files_are_not_a_runs_own(tmp_path):
    np.ones(BLOCK, dtype=np.uint8).tofile(tmp_path / "data")
    resident, own = rss_bytes(), own_rss_bytes()
    data = np.memmap(tmp_path / "data", mode="r")
    assert data.sum() == BLOCK
    assert rss_bytes() - resident > 0.9 * BLOCK
    assert own_rss_bytes() - own < 0.1 * BLOCK


@pytest.mark.gpu
def test_peak_on_a_gpu_is_the_allocators():
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    block = torch.ones(BLOCK, dtype=torch.uint8, device="cuda")
    del block
    assert peak_memory_bytes(torch.device("cuda")) - before == pytest.approx(BLOCK, rel=0.05)
