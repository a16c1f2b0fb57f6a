"""Whether this machine can compile Triton kernels."""

import os
import shutil
from importlib.util import find_spec

_C_COMPILER = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")  # as Triton looks for one
HAS_TRITON = _C_COMPILER is not None and find_spec("triton") is not None
