"""The places of chat templates in a model folder: files, or fields of other files."""

from collections.abc import Mapping
from pathlib import Path

from lean_ft.system.whole_files import read_json, write_json

TEMPLATE = "chat_template.jinja"
# Folders of named templates, next to `chat_template.jinja`. transformers 5 writes the first.
TEMPLATE_FOLDERS = ("additional_chat_templates", "chat_templates")
OLD_TEMPLATE = "chat_template.json"  # of processors


def write_templates(folder: Path, templates: Mapping[str, str]) -> None:
    """Write chat templates by name, and remove others from `folder`: transformers' processors prefer chat_template.json
    to chat_template.jinja, and llama.cpp's converter prefers the field of tokenizer_config.json."""
    (folder / OLD_TEMPLATE).unlink(missing_ok=True)
    for place in TEMPLATE_FOLDERS:
        for file in (folder / place).glob("*.jinja"):
            file.unlink()
    for name in ("tokenizer_config.json", "processor_config.json"):
        config = read_json(folder / name)
        if "chat_template" in config:
            write_json(folder / name, {key: value for key, value in config.items() if key != "chat_template"})
    for name, source in templates.items():
        file = folder / TEMPLATE if name == "default" else folder / TEMPLATE_FOLDERS[0] / f"{name}.jinja"
        file.parent.mkdir(exist_ok=True)
        file.write_text(source, encoding="utf-8", newline="")
