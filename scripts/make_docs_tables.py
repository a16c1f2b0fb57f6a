"""Write the tables of recipes and row formats in README.md and docs from what they describe.

    python scripts/make_docs_tables.py [--check]

- The recipes of README.md are those of docs/recipes.md.
- The formats of docs/data.md are `Fields` of `FORMATS` and of the objectives' readers.
- The list of docs/data_by_example.md is that of `leanft data example`. A format without a section gets one, with its
  rows and their preview; edit its words afterwards.

With --check, write nothing, print the files that differ, and exit with 1.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lean_ft.cli.data import EXAMPLES  # noqa: E402
from lean_ft.data.formats import FORMATS, OF_PROMPTS, Fields  # noqa: E402
from lean_ft.data.objective import objectives  # noqa: E402

RECIPES, FORMATS_HEAD = "| recipe | trains on |", "| format | fields (optional fields in brackets) | trained as |"
SAMPLERS = "| `generate`, `chat`"  # the row of recipes that do not train, which README.md leaves out


def table_of(page: str, head: str) -> str:
    """The table with this first line."""
    found = re.search(rf"(?m)^{re.escape(head)}\n(?:\|.*\n)+", page)
    assert found, f"no table begins with {head}"
    return found[0]


def readme(page: str) -> str:
    """README.md with the recipes of docs/recipes.md."""
    lines = table_of((ROOT / "docs/recipes.md").read_text(encoding="utf-8"), RECIPES).splitlines(keepends=True)
    text = "".join(line for line in lines if not line.startswith(SAMPLERS))
    text = text.replace("](#", "](recipes.md#")
    return page.replace(table_of(page, RECIPES), re.sub(r"\]\((?=\w+\.md)", "](docs/", text))


def all_formats() -> dict[str, Fields]:
    """The formats in the order in which a recipe detects them: chats, those of one objective, and the others."""
    own = {name: fields for one in objectives() for name, fields in one.reader.known.items() if name not in FORMATS}
    chats = {name: fields for name, fields in FORMATS.items() if fields.chat}
    return chats | own | FORMATS


def data(page: str) -> str:
    """docs/data.md with the formats."""
    lines = [FORMATS_HEAD, "|---|---|---|"]
    for name, fields in all_formats().items():
        if not fields.becomes or fields.is_alias:  # prompts have their own page
            continue
        optional = [f"`{one}`" for one in fields.optional if one not in OF_PROMPTS and not _is_further(one)]
        named = [f"`{one}`" for one in fields.required] + ([f"[{', '.join(optional)}]"] if optional else [])
        lines.append(f"| `{name}` | {', '.join(named)} | {fields.becomes} |")
    return page.replace(table_of(page, FORMATS_HEAD), "".join(f"{line}\n" for line in lines))


def _is_further(field: str) -> bool:
    """Whether a field is one of a numbered series, after the first."""
    number = re.fullmatch(r".*_(\d+)", field)
    return number is not None and int(number[1]) > 1


def examples(page: str) -> str:
    """docs/data_by_example.md with the list of formats and a section for each."""
    formats: dict[str, dict[str, Any]] = yaml.safe_load(EXAMPLES.read_text(encoding="utf-8"))
    listed = _leanft("data", "example")
    page = re.sub(r"(?s)(?<=\$ leanft data example\n).*?(?=```)", lambda _: listed, page, count=1)
    names = [*formats]
    for name, after in reversed([*zip(names, [*names[1:], None], strict=True)]):
        if f"\n## `{name}`\n" not in page:
            section = _section(name, formats[name])
            place = page.index(f"\n## `{after}`\n" if after else "\n## Other shapes\n")
            page = page[:place] + section + page[place:]
    return page


def _section(name: str, example: dict[str, Any]) -> str:
    rows = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in example["rows"])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{name}.jsonl"
        file.write_text(rows.replace("\n\n", "\n") + "\n", encoding="utf-8")
        settings = ["model.path=tiny", f"data.source={file}", *example.get("settings", ())]
        shown = _leanft("data", "preview", example["recipes"][0], *settings, "-n", "9")
    shown = shown.rpartition("\nfrom ")[0].replace(f"{folder}/", "").strip()
    about = example["about"][0].upper() + example["about"][1:]
    return f"\n## `{name}`\n\n{about}.\n\n```json\n{rows}\n```\n\n```text\n{shown}\n```\n"


def _leanft(*arguments: str) -> str:
    command = [sys.executable, "-m", "lean_ft", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout


PAGES: dict[str, Callable[[str], str]] = {
    "README.md": readme,
    "docs/data.md": data,
    "docs/data_by_example.md": examples,
}


def differing(*, write: bool) -> list[str]:
    """Return the pages whose tables differ, and write them if asked to."""
    found = []
    for name, made in PAGES.items():
        page = (ROOT / name).read_text(encoding="utf-8")
        if (new := made(page)) != page:
            found.append(name)
            if write:
                (ROOT / name).write_text(new, encoding="utf-8")
    return found


if __name__ == "__main__":
    check = "--check" in sys.argv[1:]
    for page_name in (pages := differing(write=not check)):
        print(f"{page_name} {'differs; run python scripts/make_docs_tables.py' if check else 'written'}")
    sys.exit(bool(check and pages))
