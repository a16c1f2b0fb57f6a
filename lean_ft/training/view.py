"""What turns rows and images into tokens, in the folder of a model: so that other programs show the model what its run showed it.

Settings that a file can say are written into it: a chat template with its variables, the limit of images, new tokens, the pad token.
The others are sentences that an export and a model card print.
"""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lean_ft.images.limits import difference, write_limit
from lean_ft.images.rules import ImageRules
from lean_ft.models.saving import PROCESSOR_FILES
from lean_ft.peft.finished_models import template_kwargs
from lean_ft.tokenizers import Tokenizer

# Settings that files of the folder have: `save_view`, and the tokenizer's own files.
IN_FILES = ("data.chat_template", "data.chat_template_kwargs", "data.image_tokens", "model.new_tokens")
# Settings that no file has, with a sentence for people who use the model elsewhere.
TOLD: Mapping[str, Callable[[Any], str]] = {
    "data.system": lambda text: f"begin each chat with the run's system message (data.system): {text!r}",
    "data.chat": lambda chat: "" if chat else "give prompts as plain text, without the chat template, as the run did (data.chat=false)",
    "data.separator": lambda text: f"end each prompt with {text!r}, as the run did (data.separator)",
    "tools.functions": lambda names: f"give the model the schemas of the run's tools (tools.functions): {', '.join(names)}" if names else "",
    "environment": lambda name: f"the run's prompts had the observations and tools of environment={name}",
}  # fmt: skip


def save_view(folder: Path, tokenizer: Tokenizer, settings: Mapping[str, Any]) -> None:
    """Write the tokenizer, its chat templates and the image processor into the folder of a model or an adapter.

    settings: of the run, by dotted key; empty for a model without one.
    """
    tokenizer.save(folder, template_kwargs(settings))
    if (rules := tokenizer.image_rules) is not None:
        for name in PROCESSOR_FILES:  # an adapter's folder has none yet
            if (tokenizer.folder / name).is_file() and not (folder / name).is_file():
                shutil.copyfile(tokenizer.folder / name, folder / name)
        write_limit(folder, rules)


def not_in_files(settings: Mapping[str, Any], rules: ImageRules | None = None) -> list[str]:
    """Sentences about what no file of a model's folder says. rules: of a run with images."""
    told = [tell(settings[name]) for name, tell in TOLD.items() if settings.get(name) is not None]
    if rules is not None and (images := difference(rules)):
        told.append(f"the run scaled images down to data.image_tokens={rules.max_tokens}; {images}")
    return [sentence for sentence in told if sentence]
