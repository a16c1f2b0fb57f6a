"""The pool never gives memory to two tensors, stays within its bound, and changes no number of a run.

Each test has its own process, because the pool cannot be uninstalled.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lean_ft.memory.host_pool import pool_host_memory
from lean_ft.settings import MemoryConfig
from lean_ft.training.process import start
from tests.parallel.small_training import Config

pytestmark = pytest.mark.skipif(
    platform.system() != "Linux" or shutil.which("g++") is None, reason="needs Linux and a C++ compiler"
)

MEBIBYTE = 2**20

# Memory use of a training step: many tensors are allocated, then freed in another order, with small objects in between.
STEPS = """
import random, resource, sys
import torch
from lean_ft.memory import pool_host_memory
from lean_ft.memory.host_memory import return_freed_memory

return_freed_memory()
if "pooled" in sys.argv:
    pool_host_memory()


def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def resident_bytes():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()


random.seed(0)
sizes = [random.choice([1, 3, 7, 20, 38]) * 2**20 + random.randrange(4096) for _ in range(40)]
order = random.sample(range(40), 40)
before, highest, most_alive = resident_bytes(), 0, 0
for step in range(4):
    started, kept = faults(), {}
    for index, size in enumerate(sizes):
        passing = torch.full((size // 2,), 7, dtype=torch.uint8)
        kept[index] = torch.full((size,), (index + step) % 251, dtype=torch.uint8), [0] * 1000
        most_alive = max(most_alive, sum(tensor.nbytes for tensor, _ in kept.values()) + passing.nbytes)
        del passing
        highest = max(highest, resident_bytes() - before)
    for index in order:
        tensor, _ = kept.pop(index)
        assert tensor.min() == tensor.max() == (index + step) % 251, "another tensor wrote there"
        gradient = torch.full((tensor.numel() // 3,), 9, dtype=torch.uint8)
        highest = max(highest, resident_bytes() - before)
        del tensor, gradient
print(highest, most_alive, faults() - started)
"""

# First each tensor is larger than all freed ones, and live tensors separate the free ranges. Then four threads allocate
# and free tensors at the same time.
GROWING = """
import threading
import torch
from lean_ft.memory import pool_host_memory

pool_host_memory()


def peak_bytes():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))


kept, before = [], peak_bytes()
for mebibytes in range(8, 72, 4):
    torch.full((mebibytes * 2**20,), 7, dtype=torch.uint8)
    kept.append(torch.full((2**20,), 7, dtype=torch.uint8))
print(peak_bytes() - before, mebibytes * 2**20 + sum(tensor.nbytes for tensor in kept))
wrong = []


def work(number):
    generator, kept = torch.Generator().manual_seed(number), []
    for turn in range(100):
        size = int(torch.randint(2**19, 2**23, (1,), generator=generator))
        kept.append((torch.full((size,), number * 50 + turn % 50, dtype=torch.uint8), number * 50 + turn % 50))
        if len(kept) > 6:
            tensor, value = kept.pop(int(torch.randint(0, 6, (1,), generator=generator)))
            if not tensor.min() == tensor.max() == value:
                wrong.append((number, turn))


threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
grown = torch.arange(2**20)
grown.resize_(2**21)  # what numpy and a resize hold is theirs
shared = torch.arange(2**20).numpy()
assert not wrong and grown[2**20 - 1] == 2**20 - 1 and shared[-1] == 2**20 - 1, wrong
"""


def python(source: str, *args: str, **env: str) -> str:
    done = subprocess.run([sys.executable, "-c", source, *args], capture_output=True, text=True, env=os.environ | env)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_the_second_step_finds_its_pages_and_the_peak_is_what_was_alive() -> None:
    peak, most_alive, faults = map(int, python(STEPS, "pooled").split())
    unpooled_peak, _, unpooled_faults = map(int, python(STEPS).split())
    assert peak < most_alive + 32 * MEBIBYTE
    assert peak < unpooled_peak + 32 * MEBIBYTE
    assert faults < unpooled_faults / 5


@pytest.mark.long
def test_unusable_memory_is_returned_before_more_is_taken_and_threads_do_not_share() -> None:
    peak, most_alive = map(int, python(GROWING).split())
    assert peak < most_alive + 16 * MEBIBYTE


@pytest.mark.long
def test_every_pair_of_settings_composes_with_it() -> None:
    """The matrix of pairs once more, in a process whose every tensor of a page or more is the pool's."""
    source = "import sys, pytest, lean_ft.memory as m; m.pool_host_memory(4096); sys.exit(pytest.main(sys.argv[1:]))"
    pairs = str(Path(__file__).with_name("test_pairs.py"))
    out = python(source, "-q", "-p", "no:xdist", "-p", "no:cacheprovider", pairs, "-m", "", "-k", "not compile")
    assert re.search(r"\d{3} passed", out), out


def test_without_a_compiler_it_is_refused_or_left_out_with_the_reason(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "built"))
    monkeypatch.setattr("lean_ft.memory.host_memory.return_freed_memory", lambda: True)
    # Not the cached function: an earlier test of this process may have installed the pool.
    monkeypatch.setattr("lean_ft.training.process.pool_host_memory", pool_host_memory.__wrapped__)
    reason = "the C++ compiler no-such-compiler does not start"
    with pytest.raises(ValueError, match=f"memory.host_pool=true is not possible: {re.escape(reason)}"):
        start(Config(memory=MemoryConfig(host_pool=True), device="cpu", output_dir=tmp_path / "run"))
    start(Config(device="cpu", output_dir=tmp_path / "run"))
    assert f"memory.host_pool=false: {reason}" in " ".join(capsys.readouterr().out.split())
