"""`python -m lean_ft` is `leanft`."""

import os
import sys

# Python puts the current folder first, where a file yaml.py would hide the library. A checkout without installation
# stays.
if not sys.flags.safe_path and sys.path[0] == os.getcwd() != os.path.dirname(os.path.dirname(__file__)):
    del sys.path[0]

from lean_ft.cli.main import run_command_line

run_command_line()
