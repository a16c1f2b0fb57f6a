"""No message shows the name of a Python exception, or the text of an error that Python raised for a wrong value in a
foreign file."""

import ast
from collections.abc import Iterator
from pathlib import Path

LEAN_FT = Path(__file__).parents[1] / "lean_ft"
# Errors whose text tells of our code rather than of the input. Errors that name a file or a place in it (OSError,
# ValueError with its subclasses, syntax errors) are shown.
RAW = {
    "Exception",
    "BaseException",
    "AttributeError",
    "KeyError",
    "IndexError",
    "LookupError",
    "TypeError",
    "NameError",
}
RAW |= {
    "AssertionError",
    "ArithmeticError",
    "OverflowError",
    "ZeroDivisionError",
    "RecursionError",
    "RuntimeError",
    "MemoryError",
}
OWN = {"Failed", "RefusedImage", "_Problem"}  # errors of lean_ft, whose texts are messages
# Where a handler shows such an error, and why.
USER, LIBRARY = "the user's own code", "a library's words about a file that it reads, or about the machine"
SHOWN = {
    "check.py: _load_theirs": LIBRARY,
    "cli/run.py: _print_expected_memory": "a plan that fails changes nothing; its RuntimeErrors are ours",
    "cli/validate.py: _rehearse": "a plan that fails changes nothing; its RuntimeErrors are ours",
    "data/arrow_rows.py: read_parquet_file": LIBRARY,
    "data/sources.py: _converted": USER,
    "embedding/mteb_tasks.py: find_mteb_tasks": "the names that MTEB suggests",
    "hub/paths.py: _mentioning_folders": "our own errors",
    "models/own_families.py: naming_row": USER,
    "notebook.py: _write_rows": USER,
    "online/environments.py: failing": USER,
    "online/environments.py: state": USER,
    "online/engines/broadcast.py: _try": LIBRARY,
    "online/engines/server.py: _load": "our own error",
    "online/engines/server.py: _meet": "our own error",
    "plan/beforehand.py: answer_a_question": "sent to the process that asked",
    "system/catalog.py: load_recipe": USER,
    "system/environment.py: bitsandbytes_problem": LIBRARY,
    "system/user_functions.py: __call__": USER,
    "system/user_functions.py: _module": USER,
    "system/user_functions.py: _object_of": USER,
    "system/user_functions.py: check_function": USER,
    "tokenizers/chat_template.py: render": "the template's own failure, which jinja words",
    "tokenizers/sentencepiece_model.py: __init__": LIBRARY,
    "tokenizers/tokenizer_json.py: _explained": LIBRARY,
    "tools/schemas.py: json_schema": USER,
    "training/loggers.py: __init__": LIBRARY,
    "training/notebook_view.py: update": "the view of a notebook, which ends; the run goes on",
    "training/process.py: _settle_host_memory": LIBRARY,
    "training/run.py: _save_complete_steps": "a second error, while the first one is on its way",
}


def caught(handler: ast.ExceptHandler) -> list[str]:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return [ast.unparse(kind).removeprefix("*").rpartition(".")[2] if kind else "BaseException" for kind in kinds]


def is_shown(node: ast.AST, error: str, is_raw: bool) -> bool:
    """Whether an expression shows the error: its type's name or its repr, or of a raw error also its text."""
    if isinstance(node, ast.FormattedValue) and isinstance(node.value, ast.Name) and node.value.id == error:
        return is_raw or node.conversion == ord("r")
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and [ast.unparse(one) for one in node.args] == [error]
    ):
        return node.func.id == "repr" or (is_raw and node.func.id == "str")
    return isinstance(node, ast.Attribute) and node.attr == "__name__" and ast.unparse(node.value) == f"type({error})"


class Handlers(ast.NodeVisitor):
    """Collects the functions with a handler that shows its error."""

    def __init__(self) -> None:
        self.found, self._function = set[str](), ""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outer, self._function = self._function, self._function or node.name
        self.generic_visit(node)
        self._function = outer

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        self.generic_visit(node)
        if node.name is None:
            return
        is_raw = any(kind in RAW or not (kind in OWN or kind.lower().endswith("error")) for kind in caught(node))
        if any(is_shown(inner, node.name, is_raw) for statement in node.body for inner in ast.walk(statement)):
            self.found.add(self._function)


def functions_that_show_errors() -> Iterator[str]:
    for file in sorted(LEAN_FT.rglob("*.py")):
        handlers = Handlers()
        handlers.visit(ast.parse(file.read_text()))
        yield from (f"{file.relative_to(LEAN_FT).as_posix()}: {name}" for name in sorted(handlers.found))


def test_errors_of_our_code_are_shown_where_that_is_right() -> None:
    assert {*functions_that_show_errors()} == SHOWN.keys()
