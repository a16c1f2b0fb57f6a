"""Whether kernels for a GPU can be made at run time: by Triton, which wants a C compiler for what launches them."""

import os
import shutil
from functools import cache
from importlib.util import find_spec


@cache
def can_make_kernels() -> bool:
    """Whether Triton is there and finds a C compiler, as it looks for one."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    return compiler is not None and find_spec("triton") is not None
