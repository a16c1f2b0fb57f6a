"""A tool that ships with lean_ft: `tools=calculator`. Processes of tools load it without torch."""

import ast
import operator

_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_MOST_BITS = 10_000  # of a power, whose computation Python cannot interrupt


def calculator(expression: str) -> float:
    """Compute an arithmetic expression.

    Args:
        expression: Numbers with + - * / // % ** and parentheses.
    """
    value = _value(ast.parse(expression.strip(), mode="eval").body)
    if isinstance(value, complex):
        raise ValueError(f"the result {value} is not a real number")
    return value


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(int() | float() as number):
            return number
        case ast.UnaryOp(ast.UAdd(), operand):
            return _value(operand)
        case ast.UnaryOp(ast.USub(), operand):
            return -_value(operand)
        case ast.BinOp(left, kind, right) if type(kind) in _OPERATORS:
            a, b = _value(left), _value(right)
            if isinstance(kind, ast.Pow) and isinstance(a, int) and a.bit_length() * abs(b) > _MOST_BITS:
                raise ValueError(f"{ast.unparse(node)} is too large")
            return _OPERATORS[type(kind)](a, b)
    raise ValueError(f"{ast.unparse(node)} is not supported; expected numbers with + - * / // % ** and parentheses")
