"""One word has one meaning: no two public classes of lean_ft share a name."""

import ast
from collections import defaultdict
from pathlib import Path

import lean_ft

PACKAGE = Path(lean_ft.__file__).parent
# Names that two classes still have. Remove a name with its second class.
SHARED = {"Answer", "Answers", "Block", "Documents", "Fields", "Layout", "Moment", "Pairs", "Plan"}


def test_no_two_public_classes_share_a_name() -> None:
    files = defaultdict(list)
    for file in PACKAGE.rglob("*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files[node.name].append(str(file.relative_to(PACKAGE)))
    shared = {name: places for name, places in files.items() if len(places) > 1}
    assert len(files) > 200
    assert shared.keys() <= SHARED, {name: places for name, places in shared.items() if name not in SHARED}
