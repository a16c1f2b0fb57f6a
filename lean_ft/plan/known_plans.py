"""Plans that were made before, in the cache of prepared data: one JSON file per plan, without its timeline.

The name of a file is a hash of the settings and of what else a plan depends on: the files that settings name, the device, and the
versions of torch and of optional packages. The file lists the source files that the plan ran: lean_ft, the recipe and the user's
functions. If one of them changed, the plan is made anew. A file that is damaged or from another program is ignored.

Importing this module imports neither torch nor the tracer.
"""

import hashlib
import json
import os
import platform
import site
import sys
import sysconfig
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import TypeAdapter

from lean_ft.data.cache import cache_folder
from lean_ft.hub.paths import resolve_model_path
from lean_ft.plan.devices import ONE_DEVICE, Device, Machines
from lean_ft.plan.result import Launches, Rehearsal
from lean_ft.settings import DataConfig, RecipeConfig, models_of
from lean_ft.system.environment import memory_bytes
from lean_ft.system.whole_files import read_json, write_json

_FORMAT = 1
_MOST_PLANS = 500  # of about 20 KiB each; the oldest are deleted
_READ_BYTES = 2**20  # larger files are known by their time
_PACKAGES = ("torch", "bitsandbytes", "torchao", "flash-linear-attention", "vllm")
_LIBRARIES = tuple({*site.getsitepackages(), *sysconfig.get_paths().values()})


def known_or_new(
    recipe: ModuleType, cfg: RecipeConfig, device: Device, machines: Machines = ONE_DEVICE, needs_timeline: bool = False
) -> Rehearsal:
    """The known plan, or a new one by `lean_ft.plan.rehearsal.rehearse`. Raises the errors of `rehearse`."""
    file = _file(recipe, cfg, device, machines)
    found = None if file is None or needs_timeline else _read(file)
    if found is None:
        from lean_ft.plan.rehearsal import rehearse

        found = rehearse(recipe, cfg, device, machines)
        if file is not None:
            with suppress(OSError):
                _write(file, found)
    return found


def known(recipe: ModuleType, cfg: RecipeConfig, device: Device, machines: Machines = ONE_DEVICE) -> Rehearsal:
    """The known plan. Raises LookupError if there is none."""
    file = _file(recipe, cfg, device, machines)
    if file is None or (found := _read(file)) is None:
        raise LookupError("no plan with these settings")
    return found


def _file(recipe: ModuleType, cfg: RecipeConfig, device: Device, machines: Machines) -> Path | None:
    """The file of a plan; None if the cache or a model cannot be read, which the plan itself reports."""
    settings, data = cfg.model_dump(exclude={"output_dir"}), cfg.group(DataConfig)
    try:
        folder = cache_folder(None if data is None else data.cache_dir) / "plans"
        files = [*_files_in(settings), *(resolve_model_path(path, weights=False) for path in models_of(cfg).values())]
        parts = {
            "format": _FORMAT,
            "python": sys.version,
            "packages": [_version(name) for name in _PACKAGES],
            "recipe": str(Path(recipe.__file__ or "").resolve()),
            "settings": settings,
            "files": [_state(file) for file in files],
            "device": asdict(device),
            "machines": asdict(machines),
            "here": _of_this_cpu() if device.is_cpu else None,
        }
    except (OSError, ValueError):
        return None
    return folder / f"{_hash(parts)}.json"


def _hash(parts: Any) -> str:
    return hashlib.blake2b(json.dumps(parts, default=str, sort_keys=True).encode(), digest_size=16).hexdigest()


def todays_cpu() -> Device:
    """This machine's CPU, measured once a day, because plans for other rates are other plans."""
    from lean_ft.plan.devices import measured_cpu

    parts = [
        _FORMAT,
        platform.node(),
        date.today(),
        os.cpu_count(),
        os.environ.get("OMP_NUM_THREADS"),
        _version("torch"),
    ]
    with suppress(OSError, ValueError):
        file = cache_folder(None) / "plans" / f"cpu-{_hash(parts)}.json"
        with suppress(ValueError):
            return TypeAdapter(Device).validate_python(read_json(file))
        measured = measured_cpu()
        file.parent.mkdir(exist_ok=True)
        write_json(file, asdict(measured))
        return measured
    return measured_cpu()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _of_this_cpu() -> list[Any]:
    import torch

    from lean_ft.models.float32_products import slow_dtypes

    return [memory_bytes(torch.device("cpu")), sorted(map(str, slow_dtypes()))]


def _files_in(settings: Any) -> list[Path]:
    """Files and folders that settings name."""
    if isinstance(settings, dict | list | tuple):
        values = settings.values() if isinstance(settings, dict) else settings
        return [file for value in values for file in _files_in(value)]
    if not isinstance(settings, str | Path):
        return []
    with suppress(OSError, ValueError):  # too long for a name
        if settings and (file := Path(settings).expanduser()).exists():
            return [file]
    return []


def _state(file: Path) -> list[Any]:
    """What changes if a file, or a file of a folder, is replaced."""
    parts = sorted(part for part in file.iterdir() if part.is_file()) if file.is_dir() else [file]
    sizes = [(part, part.stat()) for part in parts]
    return [
        [part.name, stat.st_size, _digest(part) if stat.st_size <= _READ_BYTES else stat.st_mtime_ns]
        for part, stat in sizes
    ]


def _digest(file: Path) -> str:
    return hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()


def _sources() -> dict[str, str]:
    """Digests of the loaded modules of lean_ft and of the user, by file."""
    files = {
        Path(file).resolve()
        for name, module in list(sys.modules.items())
        if (file := getattr(module, "__file__", None)) and file.endswith(".py")
        if name.partition(".")[0] == "lean_ft" or not file.startswith(_LIBRARIES)
    }
    return {str(file): _digest(file) for file in sorted(files) if file.is_file()}  # torch deletes modules that it generates


def _write(file: Path, found: Rehearsal) -> None:
    file.parent.mkdir(exist_ok=True)
    ledger = [[*place, *launches] for place, launches in found.ledger.items()]
    content = asdict(replace(found, timeline=[], ledger={})) | {"ledger": ledger}
    write_json(file, {"sources": _sources(), "plan": content}, indent=None)
    by_age = sorted(file.parent.glob("*.json"), key=lambda other: other.stat().st_mtime)
    for old in by_age[:-_MOST_PLANS]:
        old.unlink(missing_ok=True)


def _read(file: Path) -> Rehearsal | None:
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        content = read_json(file)
        if content and all(_digest(Path(source)) == digest for source, digest in content["sources"].items()):
            plan: dict[str, Any] = content["plan"]
            ledger = {(module, name): Launches(*numbers) for module, name, *numbers in plan.pop("ledger")}
            return replace(TypeAdapter(Rehearsal).validate_python(plan), ledger=ledger)
    return None
