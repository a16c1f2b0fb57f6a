"""with_values.py -P -m MODULE ARGUMENTS: like python's `-P -m`, with kernels that compute values. For processes that
tests start."""

import runpy
import sys

from lean_ft.system.before_torch import prepare_torch

prepare_torch()

from tests.pretended_gpu import device_values, plugin  # noqa: E402

device_values.install()
plugin.compile_without_triton()
assert sys.argv[1:3] == ["-P", "-m"]
del sys.argv[:3]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
