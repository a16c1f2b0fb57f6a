"""A hook of mkdocs (mkdocs.yml): every notebook in docs/notebooks becomes a page of the site, with its saved outputs.

Cells become Markdown, so that pages have the site's fonts and colors and load nothing from other servers. Pictures of
badges, which other servers hold, become plain links.
"""

import base64
import json
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page, and its pictures, for each notebook. The notebook stays, for download."""
    for notebook in sorted(Path(config.docs_dir, "notebooks").glob("*.ipynb")):
        name, pictures = f"notebooks/{notebook.stem}", list[bytes]()
        text = "\n\n".join(
            markdown(cell, notebook.stem, pictures) for cell in json.loads(notebook.read_text())["cells"]
        )
        text += f"\n\n[Download this notebook]({notebook.name})\n"
        files.append(File.generated(config, f"{name}.md", content=text))
        for number, picture in enumerate(pictures, start=1):
            files.append(File.generated(config, f"{name}_{number}.png", content=picture))
    return files


def markdown(cell: dict[str, Any], name: str, pictures: list[bytes]) -> str:
    """A cell in Markdown. Its pictures are added to `pictures`."""
    source = "".join(cell["source"])
    if cell["cell_type"] != "code":
        return re.sub(r"!\[([^\]]*)\]\(https?://[^)]*\)", r"\1", source)
    parts = [f"```python\n{source}\n```"]
    for output in cell["outputs"]:
        data = output.get("data", {})
        if "image/png" in data:
            pictures.append(base64.b64decode("".join(data["image/png"])))
            parts.append(f"![Output of the cell]({name}_{len(pictures)}.png)")
        elif text := "".join(output.get("text", data.get("text/plain", ""))).strip():
            parts.append(f"```text\n{_ANSI.sub('', text)}\n```")
    return "\n\n".join(parts)
