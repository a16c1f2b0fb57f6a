"""Compare models with images with transformers', and write the table of docs/images.md, or print it if there is no such
page.

    python scripts/make_images_table.py

All models are small and random, in float32; their documents have 0 to 2 images, in padded and in packed rows. Exits
with 1 if a number is larger than the tests allow.
"""

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lean_ft.models import load_model  # noqa: E402
from tests.models.vision.documents import (  # noqa: E402
    CASES,
    COUNTS,
    Case,
    differences,
    draw_all,
    greedy_tokens,
    save,
    their_greedy_tokens,
)  # fmt: skip

PAGE = ROOT / "docs" / "images.md"
MARKS = "<!-- table -->", "<!-- end of table -->"
HEAD = (
    "| model | logits: largest difference | gradients: largest relative difference | greedy tokens |\n|---|---|---|---|"
)


def row(name: str, case: Case, folder: Path) -> str:
    found = [
        differences(case, load_model(folder, images="train"), draw_all(case, counts), packed=packed)
        for counts in COUNTS
        for packed in (False, True)
    ]
    of_logits, of_gradients = map(max, zip(*found, strict=True))
    documents = draw_all(case, [2, 0, 1], seed=3)
    theirs = [their_greedy_tokens(case, document) for document in documents]
    is_equal = greedy_tokens(case, load_model(folder, images="frozen"), documents) == theirs
    passes = of_logits <= case.tolerance and of_gradients <= 1e-3 and is_equal
    tokens = "equal" if is_equal else "differ"
    return f"| `{name}`{'' if passes else ' **fails**'} | {of_logits:.1e} | {of_gradients:.1e} | {tokens} |"


def main() -> int:
    lines = [HEAD]
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            lines.append(row(name, case, save(case, Path(folder))))
    table = "\n".join(lines)
    if PAGE.is_file() and MARKS[0] in (page := PAGE.read_text()):
        before, _, rest = page.partition(MARKS[0])
        PAGE.write_text(before + "\n\n".join([MARKS[0], table, MARKS[1]]) + rest.partition(MARKS[1])[2])
    else:
        print(table)
    return int("fails" in table)


if __name__ == "__main__":
    sys.exit(main())
