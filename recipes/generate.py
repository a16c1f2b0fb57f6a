"""Generate text with a run, a checkpoint, an adapter, a Hugging Face model or `tiny`.

leanft generate runs/tiny prompt="What is the capital of Zanemar?"
leanft generate tiny chat=false temperature=0.8 prompt="The capital of Zanemar"
leanft generate runs/tiny_lora prompt="What is the capital of Zanemar?"
leanft generate Qwen/Qwen3-VL-4B-Instruct prompt="What is this?" image=photo.jpg
leanft generate runs/tiny prompts_file=questions.jsonl output=answers.jsonl batch_size=8
"""

import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveInt
from rich.progress import track

from lean_ft.data.parts import as_text
from lean_ft.generation import answers, open_model, read_prompts, shows_images, stream
from lean_ft.settings import AskConfig, FilePath, Name
from lean_ft.system.log import console, show


class Config(AskConfig):
    prompt: str | None = None
    """The question to answer or the text to continue."""
    image: Name | list[Name] = Field([])
    """An image file to show before the prompt, or a list of them. `<image>` in the prompt marks another place."""
    prompts_file: FilePath | None = None
    """A file of prompts, instead of `prompt`: JSONL, JSON, CSV or Parquet with rows of {"prompt": ...} or {"messages":
    [...]}, and `images`; JSON with the messages of one chat; or a text file with one prompt per line. A chat that ends
    with an assistant message is continued. Paths of images are relative to the file."""
    output: FilePath | None = None
    """A new JSONL file for the results: the rows of prompts_file with `generated_text` added."""
    batch_size: PositiveInt = 1
    """Prompts per batch. The sampled tokens do not depend on it."""
    chat: Literal["auto"] | bool = "auto"
    """Wrap the prompt as a user message with the chat template; `auto`: if the model has a template."""


def main(cfg: Config) -> list[str]:
    if (cfg.prompt is None) == (cfg.prompts_file is None):
        found = "neither" if cfg.prompt is None else "both"
        raise ValueError(f'expected prompt="..." or prompts_file=PATH, found {found}.')
    if cfg.output is not None and cfg.output.exists():
        raise ValueError(f"output={cfg.output} already exists. Name a new file.")
    images = [os.path.expanduser(one) for one in ([cfg.image] if isinstance(cfg.image, str) else cfg.image)]
    if images and cfg.prompt is None:
        raise ValueError("image=... is shown with prompt=..., and prompts_file has its own images. Remove image.")
    row = {"prompt": cfg.prompt, **({"images": images} if images else {})}
    rows, folder = (
        ([row], Path()) if cfg.prompts_file is None else (read_prompts(cfg.prompts_file), cfg.prompts_file.parent)
    )
    tower = cfg.model.images if any(map(shows_images, rows)) else "none"
    opened = cfg.model.path, cfg.adapter, cfg.device, cfg.model.dtype, cfg.model.random_init, tower
    new_tokens = -(-len(rows) // cfg.batch_size) * cfg.max_new_tokens
    model, tokenizer = open_model(*opened, new_tokens=new_tokens, family=cfg.model.family)
    sampling = {**cfg.sampling, "chat": cfg.chat}

    if cfg.prompt is not None and cfg.output is None:
        parts = list[str]()
        for text in stream(model, tokenizer, row, **sampling):
            parts.append(text)
            show(text, end="")
        print()
        return ["".join(parts)]
    with cfg.output.open("x", encoding="utf-8") if cfg.output else nullcontext() as output:
        texts = answers(model, tokenizer, rows, batch_size=cfg.batch_size, folder=folder, **sampling)
        shown = track(texts, "answering", total=len(rows), console=console, disable=output is None)
        generated = list[str]()
        for row, text in zip(rows, shown, strict=True):
            generated.append(text)
            if output is None:
                show(f"> {last_question(row)}\n{text}")
            else:
                print(json.dumps({**row, "generated_text": text}, ensure_ascii=False), file=output, flush=True)
    return generated


def last_question(row: dict[str, Any]) -> str:
    asked = row.get("messages", row.get("prompt"))
    return asked if isinstance(asked, str) else [as_text(m["content"]) for m in asked if m["role"] != "assistant"][-1]
