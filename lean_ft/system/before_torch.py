"""Environment variables that torch and its libraries read once, when they start. Variables that the user has set stay.

- `PYTORCH_ALLOC_CONF=expandable_segments:True`: the CUDA allocator grows its segments, which reduces fragmentation.
- `THP_MEM_ALLOC_ENABLE=1`: large CPU tensors use huge pages (Linux). Each layer allocates activations anew, and the
  kernel maps and clears their pages each time: writing a new 40 MB tensor took 22 ms on 4 KiB pages and 8 ms on 2 MiB
  pages, on two cores; writing it again takes 7 ms.
- `ONEDNN_PRIMITIVE_CACHE_CAPACITY`: oneDNN compiles code for each shape of a 16-bit product on a CPU, and caches it,
  0.5 MB each. Its default of 1,024 entries adds 500 MB in the first hundred steps if row lengths vary. We keep as many
  as occur in a step; compiling one takes 0.4 ms.
- `LRU_CACHE_CAPACITY=1`: torch has a second cache above oneDNN's, with 1,024 entries of 0.2 MB that are no faster.
- `GOMP_SPINCOUNT=10000`: how long a waiting CPU thread spins before it sleeps. The default is several milliseconds; on
  shared cores, that takes the time of the thread that it waits for. On two cores next to a dozen other processes, a
  step of the embedded model took 15 s by default, 1.1 to 1.5 s with this setting, and 0.2 s if threads sleep at once
  (OMP_WAIT_POLICY=PASSIVE). On idle cores, the same three settings reach 12,600, 11,700 and 4,700 tokens/s. With half a
  billion parameters this setting costs 3% (15.6 s per step; 15.1 s with 300,000, the best value on a machine without
  other work).
- `TORCHINDUCTOR_CACHE_DIR`: with `ATEN_CPU_CAPABILITY` set, a separate cache of compiled code. torch.compile's cache
  keys lack the capability, and code generated for 16 numbers at a time, compiled for 8, computes wrong results.
- `TORCH_CPP_LOG_LEVEL=ERROR`: the loss of a peer is reported in one line, without a C++ stack trace.
- `KINETO_LOG_LEVEL=99`: profiles (`profile=true`) print no lines about their start and end.
- `OMP_NUM_THREADS`: the number of cores that the container's quota allows. torch counts the machine's cores, and 64
  threads that share the time of two cores wait for each other.

Sources: PyTorch's notes on CUDA memory management; libgomp's manual, "OMP_WAIT_POLICY" and "GOMP_SPINCOUNT"; the
kernel's cgroup documentation, cpu.max and cpu.cfs_quota_us; c10/core/impl/alloc_cpu.cpp; oneDNN's guide, "Primitive
Cache"; ideep's lru_cache.hpp. Measured on an Intel Xeon with AMX, torch 2.13.
"""

import math
import os
import tempfile
from pathlib import Path

# torch reads the first of these that is set.
CUDA_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
# Read by GNU's and Intel's OpenMP, by Intel's, and by GNU's.
WAITING_VARIABLES = ("OMP_WAIT_POLICY", "KMP_BLOCKTIME", "GOMP_SPINCOUNT")
PRODUCTS_VARIABLES = ("DNNL_PRIMITIVE_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")


def prepare_torch() -> None:
    """Set the variables that the user has not set. Call this before torch is imported."""
    _set_default(CUDA_ALLOCATOR_VARIABLES, "expandable_segments:True")
    _set_default(("THP_MEM_ALLOC_ENABLE",), "1")
    _set_default(WAITING_VARIABLES, "10000")
    _set_default(("TORCH_CPP_LOG_LEVEL",), "ERROR")
    _set_default(("KINETO_LOG_LEVEL",), "99")
    if capability := os.environ.get("ATEN_CPU_CAPABILITY"):
        user = os.getuid() if hasattr(os, "getuid") else 0
        _set_default(("TORCHINDUCTOR_CACHE_DIR",), f"{tempfile.gettempdir()}/torchinductor_{user}_{capability}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1  # other systems have no quotas
    if (quota := _quota()) is not None and quota < cores:
        _set_default(("OMP_NUM_THREADS",), str(math.ceil(quota)))


def _quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return the number of cores that the container's quota allows, or None without a quota."""
    version_1 = [root / "cpu" / f"cpu.cfs_{name}_us" for name in ("quota", "period")]
    files = [root / "cpu.max"] if (root / "cpu.max").exists() else version_1
    try:
        quota, period = " ".join(file.read_text() for file in files).split()
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError):  # no such file, or "max"
        return None


def keep_compiled_products(num_shapes: int) -> None:
    """Bound the caches of compiled 16-bit products on a CPU. Call this before the first product."""
    _set_default(PRODUCTS_VARIABLES, str(num_shapes))
    _set_default(("LRU_CACHE_CAPACITY",), "1")


def _set_default(names: tuple[str, ...], value: str) -> None:
    """Set the last of several equivalent variables, unless one of them is set."""
    if not any(name in os.environ for name in names):
        os.environ[names[-1]] = value
