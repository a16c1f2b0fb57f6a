"""Write the tables of other tools' settings into docs/coming_from_*.md and docs/other_tools.md.

    python scripts/make_other_tools_tables.py           # write
    python scripts/make_other_tools_tables.py --check   # exit with 1 if a page is not current

The settings and their equivalents are in lean_ft/assets/other_tools.yaml. A table stands between two comments that name
it.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lean_ft.settings.describing import describe  # noqa: E402
from lean_ft.settings.other_tools import RECIPE, VALUE, by_name, read_equivalent, tools  # noqa: E402
from lean_ft.system import catalog  # noqa: E402

MARKS = "<!-- settings: {} -->\n", "<!-- end of settings -->"
KEYS = {s.key for file in catalog.recipes().values() for s in describe(catalog.load_recipe(file).Config)}


def in_code(text: str) -> str:
    """Put our settings in a sentence into backticks."""
    parts = re.split(r"(`[^`]*`)", text)
    pattern = r"(?<![\w.`])([a-z_]+(?:\.[a-z_0-9]+)+)(=(?:\[[^\]]*\]|[\w.:]+(?:/[\w@]+)?)(?:\.\*\])?)?"

    def mark(found: re.Match[str]) -> str:
        return f"`{found[0]}`" if found[1] in KEYS else found[0]

    return "".join(part if part.startswith("`") else re.sub(pattern, mark, part) for part in parts)


def cell(text: str) -> str:
    """Return an answer as it stands in a table."""
    answer = read_equivalent(text)
    if answer.verdict:
        return f"{answer.verdict}: {in_code(answer.note)}"
    found = []
    for settings in answer.alternatives:
        recipe = [f"the recipe `{settings[RECIPE]}`"] if RECIPE in settings else []
        written = " ".join(assignment(key, value) for key, value in settings.items() if key != RECIPE)
        found.append(" with ".join(filter(None, [*recipe, written])))
    return " or ".join(found) + (f"; {in_code(answer.note)}" if answer.note else "")


def assignment(key: str, value: str) -> str:
    """Return our setting with its value. Where their value is a part of it, say how."""
    if value == VALUE:
        return f"`{key}`"
    if VALUE not in value:
        return f"`{key}={value}`"
    computed = {"1/VALUE": "1 / their value", "1-VALUE": "1 - their value", "VALUE/60": "their value / 60"}
    return f"`{key}`" + (f" ({computed[value]})" if value in computed else " (a list)" if value == f"[{VALUE}]" else "")


PATTERNS = {"0.*": "a number below 1", "*(* *^* *$*": "a regular expression", "*{*": "a template as text"}
"""Values with wildcards, as a table names them."""


def row(names: str, answer: str | dict[str, str]) -> str:
    theirs = ", ".join(f"`{name}`" for name in names.split())
    if isinstance(answer, str):
        return f"| {theirs} | {cell(answer)} |"
    several = [
        f"{PATTERNS.get(values, 'otherwise' if values == 'any' else ', '.join(values.split()))}: {cell(text)}"
        for values, text in answer.items()
    ]
    return f"| {theirs} | {'<br>'.join(several) if len(answer) > 1 else cell(answer['any'])} |"


def table(tool: str, section: str) -> str:
    part = tools()[tool]
    rows = [row(names, answer) for names, answer in part[section].items()]
    return "\n".join([f"| {part['title']} | lean_ft |", "|---|---|", *rows]) + "\n"


def counts() -> str:
    """Return a table of how many settings there are, how many have an equivalent, and how many a reason."""
    lines = [
        "| tool | version | settings | with an equivalent | not needed | not supported |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for part in tools().values():
        found = [0, 0, 0]
        for answer in (by_name(part["common"]) | by_name(part["rest"])).values():
            texts = list(answer.values()) if isinstance(answer, dict) else [answer]
            verdicts = [read_equivalent(text).verdict for text in texts]
            found[0 if "" in verdicts else 1 if "not needed" in verdicts else 2] += 1
        lines.append(f"| {part['title']} | {part['version']} | {sum(found)} | {' | '.join(map(str, found))} |")
    return "\n".join(lines) + "\n"


def filled(page: str) -> str:
    """Return a page with its tables current."""

    def content(found: re.Match[str]) -> str:
        tool, _, section = found[1].partition(" ")
        return MARKS[0].format(found[1]) + (counts() if tool == "counts" else table(tool, section)) + MARKS[1]

    begin, end = MARKS[0].replace("{}", r"([\w ]+)"), re.escape(MARKS[1])
    return re.sub(f"{begin}.*?{end}", content, page, flags=re.DOTALL)


def main() -> int:
    pages = [*sorted((ROOT / "docs").glob("coming_from_*.md")), ROOT / "docs" / "other_tools.md"]
    changed = [page for page in pages if filled(page.read_text()) != page.read_text()]
    for page in changed if "--check" not in sys.argv else ():
        page.write_text(filled(page.read_text()))
    print("\n".join(f"{page.relative_to(ROOT)} changed" for page in changed) or "all tables are current")
    return 1 if changed and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
