"""What this machine and this installation are: for `leanft env`, bug reports and benchmark results.

Nothing here is a secret: no user names, tokens or variables beyond those that steer the allocator and the threads.
"""

import os
import platform
import shutil
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lean_ft.system.before_torch import CUDA_ALLOCATOR_VARIABLES, WAITING_VARIABLES
from lean_ft.system.shapes_only import stage
from lean_ft.system.units import gibibytes

if TYPE_CHECKING:
    import torch

_PACKAGES = ("torch", "bitsandbytes", "torchao", "safetensors", "tokenizers", "transformers", "pydantic", "numpy")
_EXTRAS = ("matplotlib", "datasets", "gguf", "zstandard", "tensorboard", "wandb", "mlflow-skinny", "lm_eval")
_EXTRAS += ("flash-linear-attention", "causal-conv1d")
_CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "asimd", "bf16", "sve")
_VARIABLES = (
    *CUDA_ALLOCATOR_VARIABLES,
    "THP_MEM_ALLOC_ENABLE",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY",
    "LRU_CACHE_CAPACITY",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    *WAITING_VARIABLES,
)


def describe_environment() -> dict[str, Any]:
    """Facts about versions, the CPU and the GPUs as name -> text or list of texts. Imports torch."""
    import torch

    import lean_ft

    facts: dict[str, Any] = {"lean_ft": lean_ft.__version__, "python": platform.python_version()}
    facts |= {name: _version(name) for name in _PACKAGES} | {"torch": torch.__version__}  # which tells the build, too
    facts["extras"] = ", ".join(f"{name} {_version(name)}" for name in _EXTRAS)
    facts["platform"] = f"{platform.system()} {platform.release()} {platform.machine()}"
    facts["compiler"] = _compiler()
    facts["cpu"] = _cpu_info("model name") or platform.processor() or platform.machine()
    facts["cpu features"] = _cpu_features() or "none of those that matter here"
    facts["cores"] = f"{usable_cores()}"
    facts["threads"] = f"{torch.get_num_threads()}"
    facts["memory"] = _memory()
    facts["cuda"] = f"{torch.version.cuda or 'not in this build of torch'}"
    facts["driver"] = _driver_version()
    facts["gpus"] = _gpus(torch) or "none"
    facts["mps"] = "yes" if torch.backends.mps.is_available() else "no"
    facts |= {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    return facts


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _gpus(torch: Any) -> list[str]:
    if not torch.cuda.is_available():
        return []
    gpus = []
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
        bf16 = "bfloat16" if gpu.major >= 8 else "no fast bfloat16"
        gpus.append(
            f"{gpu.name} (compute {gpu.major}.{gpu.minor}, {gibibytes(total_bytes)}, {gibibytes(free_bytes)} free, {bf16})"
        )
    return gpus


def _driver_version() -> str:
    if shutil.which("nvidia-smi") is None:
        return "no nvidia-smi"
    return _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or "unknown"


def _compiler() -> str:
    """The C++ compiler that torch.compile would call on a CPU, with its version."""
    name = os.environ.get("CXX") or next((n for n in ("g++", "clang++") if shutil.which(n)), None)
    if name is None or shutil.which(name) is None:
        return "none (torch.compile needs one on a CPU)"
    return _first_line(name, "--version")


def _first_line(program: str, *arguments: str) -> str:
    """Of what a program prints, or that it failed."""
    try:
        answer = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=20, check=True)
    except (subprocess.SubprocessError, OSError) as error:
        return f"{program} failed ({type(error).__name__})"
    return answer.stdout.strip().partition("\n")[0]


def _cpu_info(*fields: str) -> str:
    """The first value of one of these fields in /proc/cpuinfo; empty where there is none."""
    path = Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.exists() else []:
        field, _, value = line.partition(":")
        if field.strip() in fields:
            return value.strip()
    return ""


def _cpu_features() -> list[str]:
    present = _cpu_info("flags", "Features").split()
    return [feature for feature in _CPU_FEATURES if feature in present]


def usable_cores() -> int:
    """Cores that this process may use, which may be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory() -> str:
    """The machine's memory, and the container's limit where it is lower."""
    total_bytes, limit_bytes = _host_memory()
    if total_bytes is None:
        return "unknown"
    if limit_bytes is not None:
        return f"{gibibytes(total_bytes)}, of which this container may use {gibibytes(limit_bytes)}"
    return gibibytes(total_bytes)


def memory_bytes(device: "torch.device") -> int | None:
    """Memory that a process can have on `device` when nothing else is there: a GPU's own, or the host's less what its
    container may not use; None where the system does not tell."""
    if (watcher := stage()) is not None:
        return watcher.memory_bytes
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_properties(device).total_memory
    total_bytes, limit_bytes = _host_memory()
    return total_bytes if limit_bytes is None else limit_bytes


def _host_memory() -> tuple[int | None, int | None]:
    """Bytes of the machine, and the container's limit where it is lower."""
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return None, None
    total_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        limit = path.read_text().strip() if path.exists() else ""
        if limit.isdigit() and int(limit) < total_bytes:
            return total_bytes, int(limit)
    return total_bytes, None


def available_bytes() -> int | None:
    """Host memory that a process could still take, within its container's limit; None where the system does not tell."""
    available = told_bytes(Path("/proc/meminfo"), "MemAvailable")
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if available is not None and limit.exists() and (text := limit.read_text().strip()).isdigit():
        available = min(available, max(0, int(text) - int(used.read_text())))
    return available


def told_bytes(file: Path, field: str) -> int | None:
    """A line `field:  1234 kB` of a file in /proc in bytes; None where there is no such file or line."""
    with suppress(OSError):
        for line in file.read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    return None
