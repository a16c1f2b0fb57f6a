"""Write into a model's folder how its run turned rows into tokens, so that other programs do the same.

Settings that a file can hold are written: a chat template with its variables, limits of media, new tokens, the pad
token. For the others, an export and a model card print sentences.
"""

import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from lean_ft.models.vision.loading import PROCESSOR_FILES
from lean_ft.peft.finished_models import template_kwargs
from lean_ft.tokenizers import Tokenizer
from lean_ft.tokenizers.chat_template import with_defaults
from lean_ft.tokenizers.media import LIMITS, Media, media_of_run
from lean_ft.tokenizers.template_files import write_templates

# Settings that files of the folder have: `save_view`, and the tokenizer's own files.
IN_FILES = ("data.chat_template", "data.chat_template_kwargs", *LIMITS, "model.new_tokens")
# Settings that no file has, with a sentence for people who use the model elsewhere.
SENTENCES: Mapping[str, Callable[[Any], str]] = {
    "data.system": lambda text: f"begin each chat with the run's system message (data.system): {text!r}",
    "data.chat": lambda chat: (
        "" if chat else "give prompts as plain text, without the chat template, as the run did (data.chat=false)"
    ),
    "data.separator": lambda text: f"end each prompt with {text!r}, as the run did (data.separator)",
    "tools.functions": lambda names: (
        f"give the model the schemas of the run's tools (tools.functions): {', '.join(names)}" if names else ""
    ),
    "environment": lambda name: f"the run's prompts had the observations and tools of environment={name}",
}  # fmt: skip


def save_view(folder: Path, tokenizer: Tokenizer, settings: Mapping[str, Any]) -> None:
    """Write the tokenizer, its chat templates and the processor's settings into the folder of a model or an adapter.

    settings: of the run, by dotted key; empty for a model without one.
    """
    tokenizer.save(folder)
    if variables := template_kwargs(settings):
        write_templates(
            folder, {name: with_defaults(template, variables) for name, template in tokenizer.chat_templates.items()}
        )
    for media in media_of_run(tokenizer.media, settings):
        for name in PROCESSOR_FILES:  # an adapter's folder has none yet
            if (tokenizer.folder / name).is_file() and not (folder / name).is_file():
                shutil.copyfile(tokenizer.folder / name, folder / name)
        media.write_limits(folder)


def not_in_files(settings: Mapping[str, Any], media: Iterable[Media] = ()) -> list[str]:
    """Sentences about settings that no file of a model's folder holds. media: as the run reads them."""
    sentences = [write(settings[name]) for name, write in SENTENCES.items() if settings.get(name) is not None]
    sentences += [one.remark() for one in media]
    return [sentence for sentence in sentences if sentence]
