"""Tools that a model calls: the user's functions, the calls in sampled text, and the tokens of their results."""

from lean_ft.tools.calls import Call, Turn
from lean_ft.tools.functions import Tools
from lean_ft.tools.turns import ToolTurns

__all__ = ["Call", "ToolTurns", "Tools", "Turn"]
