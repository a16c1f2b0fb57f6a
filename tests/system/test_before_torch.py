"""Environment variables for torch: waiting threads, and caches of compiled products whose shapes never occur again."""

import os
import subprocess
import sys

import pytest
import torch

from lean_ft.system import before_torch

MIB = 2**20
# 600 products of different shapes. Prints the growth of resident memory after the 100th.
PATTERN = """
import sys

if "bounded" in sys.argv:
    from lean_ft.system.before_torch import keep_compiled_products

    keep_compiled_products(64)
import torch


def rss_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


rows, weight = torch.ones(700, 64, dtype=torch.bfloat16), torch.ones(64, 64, dtype=torch.bfloat16)
for n in range(64, 664):
    rows[:n] @ weight
    if n == 164:
        before = rss_bytes()
print(rss_bytes() - before)
"""
VARIABLES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")

reads_products = pytest.mark.skipif(
    not os.path.exists("/proc/self/statm") or not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="reads /proc, and wants a CPU whose bfloat16 products are oneDNN's",
)


def grown_bytes(*arguments: str, **variables: str) -> int:
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES} | variables
    command = [sys.executable, "-c", PATTERN, *arguments]
    return int(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


@pytest.mark.long
@reads_products
def test_products_of_new_shapes_take_no_more_memory():
    assert grown_bytes("bounded") < 10 * MIB


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2.0),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({}, None),
    ],
)
def test_the_quota_of_a_container(tmp_path, files, quota):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert before_torch._quota(tmp_path) == quota


@pytest.mark.parametrize(
    ("before", "quota", "cores", "after"),
    [
        ({}, None, 8, {"GOMP_SPINCOUNT": "10000"}),
        ({}, 1.5, 8, {"GOMP_SPINCOUNT": "10000", "OMP_NUM_THREADS": "2"}),
        ({}, 16.0, 8, {"GOMP_SPINCOUNT": "10000"}),
        ({"OMP_WAIT_POLICY": "ACTIVE", "OMP_NUM_THREADS": "5"}, 1.5, 8, {}),
        ({"GOMP_SPINCOUNT": "1000"}, None, 8, {}),
    ],
)
def test_thread_variables_follow_the_quota_and_keep_the_users_values(monkeypatch, before, quota, cores, after):
    monkeypatch.setattr(os, "environ", dict(before))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)), raising=False)
    monkeypatch.setattr(before_torch, "_quota", lambda: quota)
    before_torch.prepare_torch()
    assert {name: os.environ[name] for name in os.environ if "OMP" in name and name not in before} == after


def test_a_run_sets_them_before_torch_is_imported(tmp_path):
    (tmp_path / "recipe.py").write_text(
        "import os, sys\n"
        "assert 'torch' not in sys.modules and os.environ['GOMP_SPINCOUNT'] == '10000'\n"
        "print('checked')\nraise SystemExit\n"
    )
    kept = {name: value for name, value in os.environ.items() if name not in before_torch.WAITING_VARIABLES}
    command = [sys.executable, "-m", "lean_ft", "run", str(tmp_path / "recipe.py")]
    done = subprocess.run(command, env=kept, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("checked\n", "")
