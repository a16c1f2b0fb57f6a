"""What is kept of products whose shapes never come again: by torch on its own, and as a run has it."""

import os
import subprocess
import sys

import pytest
import torch

MIB = 2**20
# 600 products, each of another shape. Prints how many bytes more are resident after the last than after the 100th.
PATTERN = """
import sys

if "bounded" in sys.argv:
    from lean_ft.allocators import keep_compiled_products

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

pytestmark = pytest.mark.skipif(
    not os.path.exists("/proc/self/statm") or not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="reads /proc, and wants a CPU whose bfloat16 products are oneDNN's",
)


def grown_bytes(*arguments: str, **variables: str) -> int:
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES} | variables
    command = [sys.executable, "-c", PATTERN, *arguments]
    return int(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


def test_products_of_ever_new_shapes_take_no_more_memory_and_a_users_own_choice_stands():
    assert grown_bytes() > 100 * MIB
    assert grown_bytes("bounded") < 10 * MIB
    # Each of the two caches alone keeps them.
    assert grown_bytes("bounded", LRU_CACHE_CAPACITY="1024") > 40 * MIB
    assert grown_bytes("bounded", DNNL_PRIMITIVE_CACHE_CAPACITY="1024") > 100 * MIB
