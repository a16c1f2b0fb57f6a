"""Facts about this machine and installation, for `leanft env`, bug reports and benchmark results.

They contain no secrets: no user names, no tokens, and only the environment variables of the allocator and the threads.
"""

import logging
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lean_ft.system.before_torch import CUDA_ALLOCATOR_VARIABLES, WAITING_VARIABLES
from lean_ft.system.units import gibibytes
from lean_ft.system.world import world

if TYPE_CHECKING:
    import torch

_PACKAGES = ("torch", "bitsandbytes", "torchao", "safetensors", "tokenizers", "transformers", "pydantic", "numpy")
_EXTRAS = ("matplotlib", "datasets", "gguf", "zstandard", "tensorboard", "wandb", "mlflow-skinny", "lm_eval")
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
    facts |= {name: _version(name) for name in _PACKAGES} | {"torch": torch.__version__}  # names the build too
    facts["extras"] = ", ".join(f"{name} {_version(name)}" for name in _EXTRAS)
    facts["platform"] = f"{platform.system()} {platform.release()} {platform.machine()}"
    facts["compiler"] = _compiler()
    facts["cpu"] = _cpu_info("model name") or platform.processor() or platform.machine()
    features = [feature for feature in _CPU_FEATURES if feature in cpu_features()]
    facts["cpu features"] = features or "none of those that lean_ft uses"
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


def _gpus(torch: ModuleType) -> list[str]:
    if not torch.cuda.is_available():
        return []
    gpus = []
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
        bf16 = "bfloat16" if gpu.major >= 8 else "no fast bfloat16"
        gpus.append(
            f"{gpu.name} (compute {gpu.major}.{gpu.minor}, {gibibytes(total_bytes)}, {gibibytes(free_bytes)} free, "
            f"{bf16})"
        )
    return gpus


def _driver_version() -> str:
    if shutil.which("nvidia-smi") is None:
        return "no nvidia-smi"
    return _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or "unknown"


def _compiler() -> str:
    """Return the C++ compiler that torch.compile calls on a CPU, with its version."""
    name = os.environ.get("CXX") or next((n for n in ("g++", "clang++") if shutil.which(n)), None)
    if name is None or shutil.which(name) is None:
        return "none (torch.compile needs one on a CPU)"
    return _first_line(name, "--version")


def _first_line(program: str, *arguments: str) -> str:
    """Return the first line that a program prints, or a note that it failed."""
    try:
        answer = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=20, check=True)
    except subprocess.TimeoutExpired:
        return f"{program} did not answer"
    except (subprocess.SubprocessError, OSError):
        return f"{program} failed"
    return answer.stdout.strip().partition("\n")[0]


def _cpu_info(*fields: str) -> str:
    """Return the first value of one of these fields in /proc/cpuinfo, or an empty string."""
    path = Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.exists() else []:
        field, _, value = line.partition(":")
        if field.strip() in fields:
            return value.strip()
    return ""


def cpu_features() -> list[str]:
    """Return the CPU's features as Linux names them; none on other systems."""
    return _cpu_info("flags", "Features").split()


def usable_cores() -> int:
    """Return the number of cores that this process may use, which may be less than the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory() -> str:
    total_bytes, limit_bytes = _host_memory()
    if total_bytes is None:
        return "unknown"
    limit = "" if limit_bytes is None else f", limited to {gibibytes(limit_bytes)} in this container"
    return gibibytes(total_bytes) + limit


@contextmanager
def without_current_folder() -> Iterator[None]:
    """Context manager in which libraries start Python processes that import nothing from the current folder."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        del os.environ["PYTHONSAFEPATH"]
        os.environ.update({} if before is None else {"PYTHONSAFEPATH": before})


def user_cache() -> Path:
    """Return lean_ft's folder in the user's cache. It may not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lean_ft"


def memory_bytes(device: "torch.device") -> int | None:
    """Return the total memory of a GPU, or of the host within its container's limit; None if unknown."""

    def measure() -> int | None:
        if device.type == "cuda":
            import torch

            return torch.cuda.get_device_properties(device).total_memory
        total_bytes, limit_bytes = _host_memory()
        return total_bytes if limit_bytes is None else limit_bytes

    return world().memory_bytes(measure)


def _host_memory() -> tuple[int | None, int | None]:
    """Return the machine's memory in bytes, and the container's limit if it is lower."""
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return None, None
    total_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        limit = path.read_text().strip() if path.exists() else ""
        if limit.isdigit() and int(limit) < total_bytes:
            return total_bytes, int(limit)
    return total_bytes, None


def available_bytes() -> int | None:
    """Return the host memory that is still available, within the container's limit; None if unknown."""
    available = proc_bytes(Path("/proc/meminfo"), "MemAvailable")
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if available is not None and limit.exists() and (text := limit.read_text().strip()).isdigit():
        available = min(available, max(0, int(text) - int(used.read_text())))
    return available


def proc_bytes(file: Path, field: str) -> int | None:
    """Return the value of a line `field:  1234 kB` of a file in /proc, in bytes; None if there is no such line."""
    with suppress(OSError):
        for line in file.read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    return None


def bitsandbytes_problem(*, on_gpu: bool) -> str | None:
    """Return why bitsandbytes cannot be used on a GPU or (with its Python operations) on a CPU, or None if it can.

    Without its compiled library, bitsandbytes can be imported but fails at its first GPU kernel.
    """
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")  # it warns about an inference kernel that we do not use
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        from bitsandbytes.cextension import lib
    except (ImportError, OSError, RuntimeError) as error:
        return f"it cannot be imported: {error}"
    finally:
        logger.setLevel(level)
    if on_gpu and not lib.compiled_with_cuda:
        reason = vars(lib).get("error_msg")  # set by the stand-in for a library that failed to load
        return "it has no library compiled for this GPU" + (f": {reason}" if reason else "")
    return None
