"""What torch and its libraries are told before they start; a user's own choice, in the environment, stands.

Each variable is read once by torch or a library in it:

- `PYTORCH_ALLOC_CONF=expandable_segments:True`: the CUDA allocator grows its segments, which fragment less.
- `THP_MEM_ALLOC_ENABLE=1`: large CPU tensors lie on huge pages (Linux). Activations come and go at every layer, and
  each time the kernel maps and clears their pages anew: writing a fresh 40 MB tensor took 22 ms on pages of 4 KiB and
  8 ms on pages of 2 MiB, on two cores; writing it again takes 7 ms.
- `ONEDNN_PRIMITIVE_CACHE_CAPACITY`: a CPU's 16-bit products run code compiled for their shape, which is kept for the
  next of that shape, 0.5 MB each. By default 1,024 of them are, so that rows of ever new lengths take 500 MB more in a
  run's first hundred steps. Here as many are kept as come again in a step; compiling another takes 0.4 ms.
- `LRU_CACHE_CAPACITY=1`: torch's own layer above that library keeps 1,024 as well, 0.2 MB more each, and finds them no
  faster.
- `GOMP_SPINCOUNT=10000`: how long a CPU's thread that waits for another spins before it sleeps. By default that is some
  milliseconds, and where cores are shared it spins away the time in which the thread that it waits for could run. On two
  cores a step of the embedded model took 15 s beside a dozen other processes, 1.1 to 1.5 s with this, and 0.2 s where
  threads sleep at once (OMP_WAIT_POLICY=PASSIVE); but alone that makes 4,700 tokens a second, this 11,700, spinning 12,600.
  At half a billion parameters it costs 3 % (15.6 s a step, 15.1 with 300,000); 30,000 costs 1 %, and beside fifteen others
  took twice the time of this. A machine of one's own has GOMP_SPINCOUNT=300000 for it.
- `TORCHINDUCTOR_CACHE_DIR`: with `ATEN_CPU_CAPABILITY` set, a cache of compiled code for that capability alone. torch.compile
  finds code by a key without the capability: code written for 16 numbers at a time, compiled again for 8, computes nonsense.
- `TORCH_CPP_LOG_LEVEL=ERROR`: a machine that loses another is told so in a line, and not in C++'s stack, forty lines of it.
- `KINETO_LOG_LEVEL=99`: what profiles (`profile=true`) says nothing of its own beginning and end.
- `OMP_NUM_THREADS`: as many as the container may use at once. torch counts the machine's cores, of which a quota may leave
  a share: 64 threads in the time of two wait for each other.

Source: PyTorch's notes on CUDA memory management; libgomp's manual, "OMP_WAIT_POLICY" and "GOMP_SPINCOUNT"; the kernel's
on cgroups, cpu.max and cpu.cfs_quota_us; c10/core/impl/alloc_cpu.cpp; oneDNN's guide, "Primitive Cache"; ideep's
lru_cache.hpp. Figures of caches and threads: an Intel Xeon with AMX, torch 2.13.
"""

import math
import os
import tempfile
from pathlib import Path

# The first of these that is set is the one torch takes.
CUDA_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
WAITING_VARIABLES = ("OMP_WAIT_POLICY", "KMP_BLOCKTIME", "GOMP_SPINCOUNT")  # of GNU's library, Intel's, and either
PRODUCTS_VARIABLES = ("DNNL_PRIMITIVE_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")


def prepare_torch() -> None:
    """Sets the variables that the user has not set. Call it before torch is imported: allocators read theirs with the
    first tensor, threads before."""
    _set_default(CUDA_ALLOCATOR_VARIABLES, "expandable_segments:True")
    _set_default(("THP_MEM_ALLOC_ENABLE",), "1")
    _set_default(WAITING_VARIABLES, "10000")
    _set_default(("TORCH_CPP_LOG_LEVEL",), "ERROR")
    _set_default(("KINETO_LOG_LEVEL",), "99")
    if capability := os.environ.get("ATEN_CPU_CAPABILITY"):
        user = os.getuid() if hasattr(os, "getuid") else 0
        _set_default(("TORCHINDUCTOR_CACHE_DIR",), f"{tempfile.gettempdir()}/torchinductor_{user}_{capability}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1  # elsewhere there are no quotas
    if (quota := _quota()) is not None and quota < cores:
        _set_default(("OMP_NUM_THREADS",), str(math.ceil(quota)))


def _quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """The cores' worth of time that a container's processes may take together; None where nothing limits them."""
    version_1 = [root / "cpu" / f"cpu.cfs_{name}_us" for name in ("quota", "period")]
    files = [root / "cpu.max"] if (root / "cpu.max").exists() else version_1
    try:
        quota, period = " ".join(file.read_text() for file in files).split()
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError):  # no such file, or "max"
        return None


def keep_compiled_products(num_shapes: int) -> None:
    """Bounds what is kept of 16-bit products on a CPU; call it before the first of them."""
    _set_default(PRODUCTS_VARIABLES, str(num_shapes))
    _set_default(("LRU_CACHE_CAPACITY",), "1")


def _set_default(names: tuple[str, ...], value: str) -> None:
    """Sets the last of several names for the same thing, where none is set."""
    if not any(name in os.environ for name in names):
        os.environ[names[-1]] = value
