"""Triton's kernels: whether this machine can compile them, and their launch."""

import os
import shutil
from importlib.util import find_spec
from typing import Any

_C_COMPILER = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")  # as Triton looks for one
HAS_TRITON = _C_COMPILER is not None and find_spec("triton") is not None


def launch(kernel: Any, grid: tuple[int, ...], *args: object, **constants: object) -> None:
    """Launch programs of a Triton kernel, which a type checker takes for a function."""
    kernel[grid](*args, **constants)
