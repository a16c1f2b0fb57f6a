"""Write the packages of lean_ft and their imports into docs/design.md, as a table from the top layer to the lowest.

    python scripts/draw_map.py            # rewrite the map
    python scripts/draw_map.py --check    # exit 1 if the map is stale, or the imports are not as they should be

A row names the packages that a package imports. Imports that follow from others are left out, as are `system`,
`settings` and `torch_private`, which almost every package imports. `gguf` has two rows, because its modules belong to
different layers: `gguf.write` stands for those that import `models`.

It also prints the number of circles of modules that import each other, the largest circle, the largest circle of whole
packages, and the number of upward arrows: a package that imports one of a row above. A circle has at most 3 modules,
and 4 packages. No module of lean_ft is imported by a string, because no rule of import-linter sees such an import,
except by tables of lazy exports and for packages of others.
"""

import ast
import re
import sys
from pathlib import Path

import grimp

PAGE = Path(__file__).resolve().parents[1] / "docs" / "design.md"
MAP = re.compile(r"<!-- map -->\n.*?<!-- /map -->\n", re.S)
EVERYWHERE = ("system", "settings", "torch_private")
OWN_ROWS = {f"gguf.{name}": "gguf.write" for name in ("write", "quantize", "vocabulary", "tensors", "names")}
MOST_IN_CIRCLE, MOST_PACKAGES_IN_CIRCLE = 3, 4
# Tables of lazy exports, and objectives by the name in the settings
LAZY = {"__init__.py", "data/__init__.py", "data/objective.py", "generation/__init__.py"}


def graph_of(root: Path = PAGE.parents[1]) -> grimp.ImportGraph:
    """The imports of lean_ft, or of another tree with a package `lean_ft`."""
    sys.path.insert(0, str(root))
    return grimp.build_graph("lean_ft", cache_dir=None, exclude_type_checking_imports=True)


def imports(graph: grimp.ImportGraph) -> dict[str, set[str]]:
    """The packages that each package imports."""
    found: dict[str, set[str]] = {}
    for module in graph.modules:
        package = _package(module)
        if package in (*EVERYWHERE, ""):
            continue
        others = {_package(other) for other in graph.find_modules_directly_imported_by(module)}
        found.setdefault(package, set()).update(others - {package, *EVERYWHERE, ""})
    return found


def imports_of_packages(graph: grimp.ImportGraph) -> dict[str, set[str]]:
    """The packages that each whole package imports."""
    packages = graph.find_children("lean_ft")
    return {
        package: {
            other
            for other in packages - {package}
            if graph.direct_import_exists(importer=package, imported=other, as_packages=True)
        }
        for package in packages
    }


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules, each of which imports all others of its group, directly or not."""
    above = {module: reachable(module, edges, set()) for module in edges}
    groups = {tuple(sorted(m for m in above[module] if module in above.get(m, ()))) for module in edges}
    return [[*group] for group in groups if len(group) > 1]


def imports_by_string(folder: Path) -> list[str]:
    """Each call that imports a module of lean_ft by a string, or by a name that is computed: file, line and code."""
    found = []
    for file in sorted(folder.rglob("*.py")):
        path = file.relative_to(folder).as_posix()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            function = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
            if function not in ("import_module", "__import__") or path in LAZY:
                continue
            name = node.args[0]
            of_others = isinstance(name, ast.Constant) and not str(name.value).startswith(("lean_ft", "."))
            if not of_others and "_SERVICES" not in ast.unparse(node):  # packages of loggers
                found.append(f"lean_ft/{path}:{node.lineno}: {ast.unparse(node)}")
    return found


def _package(module: str) -> str:
    names = module.split(".")[1:]
    of_module = OWN_ROWS.get(".".join(names[:2]))
    return of_module or (names[0] if names and names[0] != "__main__" else "")


def reachable(package: str, edges: dict[str, set[str]], seen: set[str]) -> set[str]:
    """Add to `seen` all packages that `package` imports, directly or through packages not in `seen`."""
    for other in edges.get(package, set()) - seen:
        seen.add(other)
        reachable(other, edges, seen)
    return seen


def _implied(package: str, other: str, edges: dict[str, set[str]]) -> bool:
    """Whether another import of `package` leads to `other`. Of two packages that import each other, the first by name
    counts."""
    return any(
        other in reachable(nearer, edges, {package})
        and (nearer not in reachable(other, edges, {package}) or nearer < other)
        for nearer in edges[package] - {other}
    )


def draw(edges: dict[str, set[str]]) -> str:
    """The table with its markers."""
    lines = ["<!-- map -->", "| package | imports |", "|---|---|"]
    for package in rows(edges):
        direct = [f"`{other}`" for other in sorted(edges[package]) if not _implied(package, other, edges)]
        lines += [f"| `{package}` | {', '.join(direct)} |"] if direct else []
    return "\n".join([*lines, "<!-- /map -->", ""])


def rows(edges: dict[str, set[str]]) -> list[str]:
    """The packages. The first one imports the most others, directly or not."""
    return sorted(edges, key=lambda package: (-len(reachable(package, edges, set())), package))


def main() -> None:
    page, graph = PAGE.read_text(encoding="utf-8"), graph_of()
    edges = imports(graph)
    drawn = MAP.sub(lambda _: draw(edges), page)
    found = circles({module: graph.find_modules_directly_imported_by(module) for module in graph.modules})
    order, largest = rows(edges), max(map(len, found), default=0)
    arrows = [(a, b) for a in order for b in sorted(edges[a]) if b in order and order.index(b) < order.index(a)]
    packages = max(circles(imports_of_packages(graph)), key=len, default=[])
    print(f"circles of modules: {len(found)}, the largest of {largest}")
    print(f"largest circle of packages: {len(packages)} {', '.join(packages)}".rstrip())
    print(f"upward arrows between packages: {len(arrows)} {', '.join(f'{a} -> {b}' for a, b in arrows)}".rstrip())
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(drawn, encoding="utf-8")
        return
    problems = ["docs/design.md: the map is stale. Run python scripts/draw_map.py."] if drawn != page else []
    problems += [f"a circle of imports: {', '.join(circle)}" for circle in found if len(circle) > MOST_IN_CIRCLE]
    if len(packages) > MOST_PACKAGES_IN_CIRCLE:
        problems.append(f"a circle of {len(packages)} packages: {', '.join(packages)}")
    problems += [
        f"{one}: imported by a string, which no rule sees" for one in imports_by_string(PAGE.parents[1] / "lean_ft")
    ]
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
