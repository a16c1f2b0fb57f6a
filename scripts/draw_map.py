"""Write the packages of lean_ft and their imports into docs/design.md, as a table from the top layer to the lowest.

    python scripts/draw_map.py            # rewrite the map
    python scripts/draw_map.py --check    # exit 1 if the map is stale

A row names the packages that a package imports. Imports that follow from others are left out, as are `system`, `settings`
and `torch_private`, which almost every package imports. `hub.upload` has a row of its own, because it imports `export`.
"""

import re
import sys
from pathlib import Path

import grimp

PAGE = Path(__file__).resolve().parents[1] / "docs" / "design.md"
MAP = re.compile(r"<!-- map -->\n.*?<!-- /map -->\n", re.S)
EVERYWHERE = ("system", "settings", "torch_private")


def imports() -> dict[str, set[str]]:
    """The packages that each package imports."""
    graph = grimp.build_graph("lean_ft", cache_dir=None, exclude_type_checking_imports=True)
    found: dict[str, set[str]] = {}
    for module in graph.modules:
        package = _package(module)
        if package in (*EVERYWHERE, ""):
            continue
        others = {_package(other) for other in graph.find_modules_directly_imported_by(module)}
        found.setdefault(package, set()).update(others - {package, *EVERYWHERE, ""})
    return found


def _package(module: str) -> str:
    names = module.split(".")[1:]
    return "hub.upload" if names == ["hub", "upload"] else names[0] if names and names[0] != "__main__" else ""


def reachable(package: str, edges: dict[str, set[str]], seen: set[str]) -> set[str]:
    """Add to `seen` all packages that `package` imports, directly or through packages not in `seen`."""
    for other in edges.get(package, set()) - seen:
        seen.add(other)
        reachable(other, edges, seen)
    return seen


def _implied(package: str, other: str, edges: dict[str, set[str]]) -> bool:
    """Whether another import of `package` leads to `other`. Of two packages that import each other, the first by name counts."""
    return any(
        other in reachable(nearer, edges, {package})
        and (nearer not in reachable(other, edges, {package}) or nearer < other)
        for nearer in edges[package] - {other}
    )


def draw() -> str:
    """The table with its markers."""
    edges = imports()
    lines = ["<!-- map -->", "| package | imports |", "|---|---|"]
    for package, others in sorted(edges.items(), key=lambda edge: (-len(reachable(edge[0], edges, set())), edge[0])):
        direct = [f"`{other}`" for other in sorted(others) if not _implied(package, other, edges)]
        lines += [f"| `{package}` | {', '.join(direct)} |"] if direct else []
    return "\n".join([*lines, "<!-- /map -->", ""])


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    drawn = MAP.sub(lambda _: draw(), page)
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(drawn, encoding="utf-8")
    elif drawn != page:
        sys.exit("docs/design.md: the map is stale. Run python scripts/draw_map.py.")


if __name__ == "__main__":
    main()
