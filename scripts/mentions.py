"""Count the files outside a capability's own rooms that name it.

    python scripts/mentions.py images            the files, with the lines of code and of prose in each
    python scripts/mentions.py images --lines    the lines too

A capability's own rooms are free. Each file outside them that names it must be read and changed with it, so a new
capability may touch at most 12 (CONTRIBUTING.md). With a WORD that is not in the table below, every file of the package
counts.
"""

import argparse
import ast
import io
import re
import tokenize
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
            "lean_ft/data/image_requests.py",
            "lean_ft/data/media.py",
            "lean_ft/generation/image_parts.py",
            "lean_ft/gguf/wholes.py",
            "lean_ft/peft/tower.py",
        ),
    ),
    "tools": Capability(
        r"\btools?\b|tool_",
        ("lean_ft/tools", "lean_ft/online/episodes.py", "lean_ft/online/environments.py"),
    ),
    "embeddings": Capability(
        # `VECTORS` of lean_ft.models, not of lean_ft.optim; `use_bidirectional_attention` is of Gemma's images too
        r"\bembedder|lean_ft\.embedding|embedding_(data|losses|server)|rerank|(gives|makes|of)_vectors"
        r"|\b(import|return|==).*(?<!\()\bVECTORS\b(?!, Rule)|\"VECTORS\"|(?<!use_)bidirectional(?!_attention)"
        r"|modules_json",
        (
            *("lean_ft/embedding", "lean_ft/cli/embed.py", "lean_ft/models/dense.py", "lean_ft/models/modules_json.py"),
            *("lean_ft/models/families/encoders.py", "lean_ft/models/beside.py"),
            *(f"lean_ft/{room}/{name}.py" for room in ("data", "losses") for name in ("embedding", "reranking")),
            *(f"lean_ft/settings/{name}.py" for name in ("embedding", "embedding_losses")),
            *(f"lean_ft/generation/{name}.py" for name in ("embedding_server", "embedding_requests")),
            "lean_ft/tokenizers/pair_templates.py",
        ),
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


class Mentions(NamedTuple):
    """Lines of a file that name a capability, with their numbers."""

    code: list[tuple[int, str]]
    prose: list[tuple[int, str]]  # comments and docstrings


def lines_of_prose(text: str) -> set[int]:
    """The numbers of the lines that are comments or parts of docstrings."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = {one.start[0] for one in tokens if one.type == tokenize.COMMENT and one.line.lstrip().startswith("#")}
    documented = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr)]
    texts = [node for node in documented if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return comments.union(*(range(node.lineno, (node.end_lineno or node.lineno) + 1) for node in texts))


def mentions(capability: Capability) -> dict[str, Mentions]:
    """Return the lines outside the rooms that name a capability, by path."""
    found = {}
    for path in sorted((ROOT / "lean_ft").rglob("*.py")):
        name, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        if any(name == room or name.startswith(f"{room}/") for room in capability.rooms):
            continue
        lines = enumerate(text.splitlines(), start=1)
        named = [(number, line) for number, line in lines if re.search(capability.pattern, line, re.IGNORECASE)]
        if named:
            prose = lines_of_prose(text)
            code = [one for one in named if one[0] not in prose]
            found[name] = Mentions(code, [one for one in named if one[0] in prose])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("capability", metavar="CAPABILITY", help=f"one of {', '.join(CAPABILITIES)}, or a word")
    parser.add_argument("--lines", action="store_true", help="print the lines")
    arguments = parser.parse_args()
    word = re.escape(arguments.capability)
    found = mentions(CAPABILITIES.get(arguments.capability, Capability(word, ())))
    print(" code  prose")
    for name, (code, prose) in sorted(found.items(), key=lambda item: (len(item[1].code), len(item[1].prose))):
        print(f"{len(code):5d}  {len(prose):5d}  {name}")
        for number, line in sorted(code + prose) if arguments.lines else ():
            print(f"{number:18d}  {line.strip()}")
    in_code = sum(bool(one.code) for one in found.values())
    print(f"{len(found)} files outside its rooms, {in_code} of them in code")


if __name__ == "__main__":
    main()
