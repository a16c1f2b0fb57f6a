import platform
import subprocess
import sys

import pytest

from lean_ft.memory import host_memory

# Blocks of 6 MiB between small survivors, after a freed 31 MiB block has taught malloc to keep such sizes in its heap:
# what a few steps of training on a CPU do. Prints the resident bytes that stay when the blocks are freed.
PATTERN = """
import ctypes, pathlib, runpy, sys

host_memory = runpy.run_path(sys.argv[1])  # by itself, without torch


def rss_bytes():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4096


libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
if "bounded" in sys.argv:
    assert host_memory["return_freed_memory"]()
libc.free(libc.malloc(31 << 20))
before = rss_bytes()
blocks = []
for _ in range(40):
    blocks.append(libc.malloc(6 << 20))
    ctypes.memset(blocks[-1], 1, 6 << 20)
    libc.malloc(100_000)
for block in blocks:
    libc.free(block)
print(rss_bytes() - before)
if "trim" in sys.argv:
    assert host_memory["trim_heap"]()
    print(rss_bytes() - before)
"""


def resident_after_freeing(*arguments: str) -> list[int]:
    command = [sys.executable, "-c", PATTERN, host_memory.__file__, *arguments]
    return [int(line) for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt's thresholds are glibc's")
def test_freed_blocks_go_back_to_the_system():
    kept, trimmed = resident_after_freeing("trim")
    (bounded,) = resident_after_freeing("bounded")
    assert kept > 200 * 2**20  # glibc by itself keeps nearly all of the 240 MiB
    assert bounded < 20 * 2**20
    assert trimmed < 20 * 2**20


def test_other_c_libraries_are_left_alone(monkeypatch):
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert not host_memory.return_freed_memory()
    assert not host_memory.trim_heap()
