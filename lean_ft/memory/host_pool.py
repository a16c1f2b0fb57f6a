"""A caching allocator for CPU tensors whose resident memory never exceeds the peak of live tensors.

A training step allocates and frees gigabytes of activations. Returning them to the system each time is slow, because
the kernel must find and clear pages again. Leaving them to malloc wastes memory, because live blocks in between leave
holes that nothing fits into. The pool keeps whole ranges of pages, merges neighbors, and returns pages to the system
whenever live and free memory together would exceed the highest live size so far. From the second step on, almost no
page is new.

The allocator is one C++ file, `host_pool.cpp`. It is built once, in 4 s, with the compiler that torch.compile also
needs, and cached in torch's extensions folder (`TORCH_EXTENSIONS_DIR`).

Source: PyTorch's caching allocator for GPUs; the bound is our own.
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
    """Whether a CPU run uses the pool: `memory.host_pool`, or on Linux if that is null."""
    return platform.system() == "Linux" if memory.host_pool is None else memory.host_pool


@cache
def pool_host_memory(smallest_bytes: int = SMALLEST_BYTES) -> None:
    """Allocate CPU tensors of `smallest_bytes` or more from the pool, in the whole process from now on.

    Raises RuntimeError with the reason if the pool cannot be built; nothing has changed then.
    """
    if platform.system() != "Linux":
        raise RuntimeError(f"the pool needs Linux, and this is {platform.system()}")
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, ("g++", "c++", "clang++"))), None)
    if compiler is None:
        raise RuntimeError("the pool needs a C++ compiler, and there is no g++, c++ or clang++")
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
                with write_whole(library) as part:  # another process may build it at the same time
                    shutil.copyfile(built, part)
            except OSError:  # the cache is not writable: build again the next time
                library = built
        huge_pages = os.environ.get("THP_MEM_ALLOC_ENABLE") == "1"  # torch's variable for its allocator
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
        raise RuntimeError(f"the C++ compiler {compiler} could not build the pool ({lines[0].strip()})")
