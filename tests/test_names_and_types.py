"""No two public classes of lean_ft share a name, and public functions of losses and optimizers have types."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import lean_ft

PACKAGE = Path(lean_ft.__file__).parent


def test_no_two_public_classes_share_a_name() -> None:
    files = defaultdict(list)
    for file in PACKAGE.rglob("*.py"):
        for name in re.findall(r"^class ([A-Za-z]\w*)", file.read_text(encoding="utf-8"), re.MULTILINE):
            files[name].append(str(file.relative_to(PACKAGE)))
    shared = {name: places for name, places in files.items() if len(places) > 1}
    assert len(files) > 200
    assert not shared, shared


def public_functions(body: list[ast.stmt]) -> Iterator[ast.FunctionDef]:
    """Yield public functions and the methods of public classes; not those of autograd's functions, whose context has no type."""
    for node in body:
        is_public = not getattr(node, "name", "_").startswith("_") or getattr(node, "name", "") in (
            "__init__",
            "__call__",
        )
        if isinstance(node, ast.FunctionDef) and is_public:
            yield node
        elif isinstance(node, ast.ClassDef) and is_public and "Function" not in "".join(map(ast.unparse, node.bases)):
            yield from public_functions(node.body)


def test_public_functions_of_losses_and_optimizers_have_types_without_any() -> None:
    functions, vague = 0, []
    for file in [*PACKAGE.glob("losses/*.py"), *PACKAGE.glob("optim/*.py")]:
        for node in public_functions(ast.parse(file.read_text(encoding="utf-8")).body):
            functions += 1
            signature = f"{ast.unparse(node.args)} -> {ast.unparse(node.returns) if node.returns else 'Any'}"
            vague += [f"{file.name}: {node.name}({signature})"] if re.search(r"\bAny\b", signature) else []
    assert functions > 150
    assert not vague, "\n".join(vague)
