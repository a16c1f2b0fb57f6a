"""Count the files outside a capability's own rooms that name it.

    python scripts/mentions.py images            the files, with the number of lines in each
    python scripts/mentions.py images --lines    the lines too

A capability's own rooms are free. Each file outside them that names it must be read and changed with it, so a new
capability may touch at most 12 (CONTRIBUTING.md). With a WORD that is not in the table below, every file of the package
counts.
"""

import argparse
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Capability(NamedTuple):
    pattern: str  # of a line that names it
    rooms: tuple[str, ...]  # folders and files of its own


CAPABILITIES = {
    "images": Capability(
        "image",
        (
            "lean_ft/images",
            "lean_ft/models/vision",
            "lean_ft/models/families/multimodal.py",
            "lean_ft/data/images.py",
            "lean_ft/data/image_batches.py",
            "lean_ft/data/media.py",
        ),
    ),
    "tools": Capability(
        r"\btools?\b|tool_",
        ("lean_ft/tools", "lean_ft/online/episodes.py", "lean_ft/online/environments.py"),
    ),
    "gguf": Capability("gguf", ("lean_ft/gguf", "lean_ft/export/gguf.py", "lean_ft/export/ollama.py")),
    "experts": Capability(
        r"\bexperts?\b",
        (
            *(f"lean_ft/models/{name}.py" for name in ("mix", "moe", "routing", "expert_kernels", "expand_kernel")),
            *(f"lean_ft/models/{name}.py" for name in ("grouped_kernels", "grouped_matmul", "few_rows")),
            "lean_ft/memory/streamed_experts.py",
            "lean_ft/parallel/experts.py",
        ),
    ),
}


def mentions(capability: Capability) -> dict[str, list[tuple[int, str]]]:
    """Return the lines outside the rooms that name a capability, with their numbers, by path."""
    found = {}
    for path in sorted((ROOT / "lean_ft").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if any(name == room or name.startswith(f"{room}/") for room in capability.rooms):
            continue
        lines = enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        named = [(number, line) for number, line in lines if re.search(capability.pattern, line, re.IGNORECASE)]
        if named:
            found[name] = named
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("capability", metavar="CAPABILITY", help=f"one of {', '.join(CAPABILITIES)}, or a word")
    parser.add_argument("--lines", action="store_true", help="print the lines")
    arguments = parser.parse_args()
    word = re.escape(arguments.capability)
    found = mentions(CAPABILITIES.get(arguments.capability, Capability(word, ())))
    for name, lines in sorted(found.items(), key=lambda item: len(item[1])):
        print(f"{len(lines):5d}  {name}")
        for number, line in lines if arguments.lines else ():
            print(f"{number:11d}  {line.strip()}")
    print(f"{len(found)} files outside its rooms, {sum(map(len, found.values()))} lines")


if __name__ == "__main__":
    main()
