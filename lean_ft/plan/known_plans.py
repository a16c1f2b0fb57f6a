"""Plans that were made before, in the cache of prepared data: one JSON file per plan, without its timeline.

The name of a file is a hash of the settings, the device and the version of torch. The file lists the files that the
plan was made
from, with a digest of each: the modules of lean_ft, the recipe, the user's functions and the models' config.json. If
one changed, the plan is made anew. A file that is damaged or from another program is ignored.

Importing this module imports neither torch nor the tracer.
"""

import hashlib
import json
import platform
import sys
import sysconfig
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import date
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import TypeAdapter

from lean_ft.hub.paths import planned_model_path
from lean_ft.plan.devices import ONE_DEVICE, Device, Machines
from lean_ft.plan.result import Launches, Rehearsal
from lean_ft.settings import DataConfig, RecipeConfig, models_of
from lean_ft.system.cache import cache_folder
from lean_ft.system.whole_files import read_json, write_json

_FORMAT = 1
_MOST_PLANS = 500  # of about 20 KiB each; the oldest are deleted
_OPTIONAL = ("bitsandbytes", "torchao")  # packages whose kernels a step may use


def known_or_new(
    recipe: ModuleType, cfg: RecipeConfig, device: Device, machines: Machines = ONE_DEVICE, needs_timeline: bool = False
) -> Rehearsal:
    """The known plan, or a new one by `lean_ft.plan.rehearsal.rehearse`. Raises the errors of `rehearse`."""
    with suppress(LookupError):
        if not needs_timeline:
            return known(recipe, cfg, device, machines)
    from lean_ft.plan.rehearsal import rehearse

    found = rehearse(recipe, cfg, device, machines)
    with suppress(OSError, ValueError):
        ledger = [[*place, *launches] for place, launches in found.ledger.items()]
        content = asdict(replace(found, timeline=[], ledger={})) | {"ledger": ledger}
        _write(_file(recipe, cfg, device, machines), content, _sources() | _digests(found.model_files))
    return found


def known(recipe: ModuleType, cfg: RecipeConfig, device: Device, machines: Machines = ONE_DEVICE) -> Rehearsal:
    """The known plan. Raises LookupError if there is none."""
    try:
        content = _read(_file(recipe, cfg, device, machines))
        ledger = {(module, name): Launches(*numbers) for module, name, *numbers in content.pop("ledger")}
        return replace(TypeAdapter(Rehearsal).validate_python(content), ledger=ledger)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise LookupError("no plan with these settings") from error


def todays_cpu() -> Device:
    """This machine's CPU, measured once a day, because each measurement differs and other rates are another plan."""
    from lean_ft.plan.devices import measured_cpu

    name = f"cpu-{_hash([platform.node(), date.today(), version('torch')])}.json"
    with suppress(OSError, LookupError, ValueError, TypeError):
        return TypeAdapter(Device).validate_python(_read(cache_folder(None) / "plans" / name))
    measured = measured_cpu()
    with suppress(OSError, ValueError):
        _write(cache_folder(None) / "plans" / name, asdict(measured), {})
    return measured


def _file(recipe: ModuleType, cfg: RecipeConfig, device: Device, machines: Machines) -> Path:
    data = cfg.group(DataConfig)
    parts = [
        _FORMAT,
        [version("torch"), sys.version, [find_spec(name) is not None for name in _OPTIONAL]],
        Path(recipe.__file__ or "").resolve(),
        cfg.model_dump(exclude={"output_dir"}),
        [planned_model_path(path) for path in models_of(cfg).values()],  # a download replaces a shipped config.json
        [asdict(device), asdict(machines), platform.node() if device.is_cpu else None],
    ]
    return cache_folder(None if data is None else data.cache_dir) / "plans" / f"{_hash(parts)}.json"


def _hash(parts: Any) -> str:
    return hashlib.blake2b(json.dumps(parts, default=str, sort_keys=True).encode(), digest_size=16).hexdigest()


def _sources() -> dict[str, str]:
    """Digests of the loaded modules that are no installed package, by file, and those of lean_ft."""
    installed = tuple(sysconfig.get_paths().values())
    files = (
        file
        for name, module in list(sys.modules.items())
        if (file := getattr(module, "__file__", None)) and file.endswith(".py")
        if name.partition(".")[0] == "lean_ft" or not file.startswith(installed)
    )
    return _digests(files)


def _digests(files: Iterable[str | Path]) -> dict[str, str]:
    """torch deletes modules that it generates, so files may be missing."""
    return {str(file): _digest(Path(file)) for file in files if Path(file).is_file()}


def _digest(file: Path) -> str:
    return hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()


def _write(file: Path, content: dict[str, Any], sources: dict[str, str]) -> None:
    file.parent.mkdir(exist_ok=True)
    write_json(file, {"sources": sources, "content": content}, indent=None)
    by_age = sorted(file.parent.glob("*.json"), key=lambda other: other.stat().st_mtime)
    for old in by_age[:-_MOST_PLANS]:
        old.unlink(missing_ok=True)


def _read(file: Path) -> dict[str, Any]:
    """The content of a file. Raises LookupError or ValueError if there is none or a source changed."""
    kept = read_json(file)
    if any(_digest(Path(source)) != digest for source, digest in kept["sources"].items()):
        raise LookupError("a source changed")
    return kept["content"]
