"""Keep what CPU tensors free for the tensors to come, and never more than was once in use.

A training step makes and frees gigabytes of activations. Given back to the system each time, they cost a step a good
part of its time, for the kernel must find and clear their pages anew; kept by malloc, they cost memory, for what lives
between them leaves holes that nothing fits into, the more of them the more the lengths of rows differ. The pool keeps whole ranges of pages, merges neighbours, and gives back
as much as would take alive and free together beyond the most that was ever alive: its peak is the peak of what is alive,
and from the second step on hardly a page is new.

The allocator is one file of C++, `host_pool.cpp`, built once, in four seconds, with the compiler that torch.compile
needs too, and kept where torch keeps such (`TORCH_EXTENSIONS_DIR`).

Source: PyTorch's caching allocator for GPUs, whose place this takes on a CPU; the bound is our own.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

from lean_ft.settings import MemoryConfig
from lean_ft.system.whole_files import write_whole

SMALLEST_BYTES = 2**17  # smaller tensors stay with malloc
_SOURCE = Path(__file__).with_name("host_pool.cpp")


def wants_host_pool(memory: MemoryConfig) -> bool:
    """Whether a run on a CPU pools its memory: as `memory.host_pool` says, and where that is null, wherever it can."""
    if memory.host_pool is None:
        return platform.system() == "Linux"
    return memory.host_pool


@cache
def pool_host_memory(smallest_bytes: int = SMALLEST_BYTES) -> None:
    """From now on has CPU tensors of `smallest_bytes` or more come from the pool; for the whole process and for good.

    Raises RuntimeError, telling why, where the pool cannot be built; nothing has changed then.
    """
    if platform.system() != "Linux":
        raise RuntimeError(f"it is made of Linux's system calls, and this is {platform.system()}")
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, ("g++", "c++", "clang++"))), None)
    if compiler is None:
        raise RuntimeError("it is built with a C++ compiler, and there is no g++, c++ or clang++ here")
    key = hashlib.sha256(f"{torch.__version__} {compiler} ".encode() + _SOURCE.read_bytes()).hexdigest()[:16]
    user_cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or f"{user_cache}/torch_extensions").expanduser() / "lean_ft"
    library = folder / f"host_pool_{key}.so"
    with tempfile.TemporaryDirectory(prefix="lean_ft_host_pool_") as scratch:
        if not library.is_file():
            built = Path(scratch) / library.name
            _build(compiler, built)
            try:
                folder.mkdir(parents=True, exist_ok=True)
                with write_whole(library) as part:  # others may be building it at the same time
                    shutil.copyfile(built, part)
            except OSError:  # no such place to keep it: it is built again the next time
                library = built
        huge_pages = os.environ.get("THP_MEM_ALLOC_ENABLE") == "1"  # torch's own variable for its own allocator
        install = ctypes.CDLL(str(library)).lean_ft_host_pool_install
        install(ctypes.c_size_t(smallest_bytes), ctypes.c_bool(huge_pages))


def _build(compiler: str, library: Path) -> None:
    torch_folder = Path(torch.__file__).parent
    command = [compiler, "-O2", "-std=c++20", "-shared", "-fPIC", str(_SOURCE), "-o", str(library)]
    command += [f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}", "-lc10"]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise RuntimeError(f"the C++ compiler {compiler} does not start ({error.strerror})") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or [""]
        raise RuntimeError(f"the C++ compiler {compiler} could not build it ({lines[0].strip()})")
