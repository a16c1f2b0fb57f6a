"""`python -m lean_ft` is `leanft`."""

from lean_ft.cli.main import run_command_line

run_command_line()
