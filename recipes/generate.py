"""Generates text with whatever training left: a run, a checkpoint, an adapter, any Hugging Face model, or `tiny`.

leanft run generate model.path=runs/tiny prompt="What is the capital of Zanemar?"
leanft run generate model.path=tiny chat=false temperature=0.8 prompt="The capital of Zanemar"
leanft run generate adapter=runs/tiny_lora prompt="What is the capital of Zanemar?"
leanft run generate model.path=runs/tiny prompts_file=questions.jsonl output=answers.jsonl batch_size=8
"""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt
from rich.progress import track

from lean_ft.generation import answers, open_model, read_prompts, stream
from lean_ft.log import console
from lean_ft.settings import ModelConfig, Settings


class AskedModelConfig(ModelConfig):
    """The model that is asked."""

    path: str = Field(
        "auto",
        description="A run (its newest whole checkpoint), a checkpoint, an adapter, a Hugging Face model folder, a "
        "repository of the hub (`org/name`, or `org/name@revision`), or the embedded model: `tiny`. `auto` is the model "
        "that `adapter` is of.",
    )


class Config(Settings):
    model: AskedModelConfig = AskedModelConfig()
    adapter: str | list[str] = Field(
        [],
        description="Folder of an adapter in PEFT's format, or a run that trained one; or a list of them that add up.",
    )
    prompt: str | None = Field(None, description="What to answer or go on from.")
    prompts_file: Path | None = Field(
        None,
        description='In place of `prompt`, a file of them: JSONL, JSON, CSV or Parquet of {"prompt": ...} or '
        '{"messages": [...]}, one chat\'s messages as JSON, or a text file, one a line.',
    )
    output: Path | None = Field(
        None, description="A new JSONL file for the answers: the rows of prompts_file, each with its `generated_text`."
    )
    batch_size: PositiveInt = Field(
        1, description="Prompts of prompts_file that are answered together; what is drawn does not depend on it."
    )
    chat: Literal["auto"] | bool = Field(
        "auto",
        description="Whether the prompt is a user's message, written with the chat template; `auto`: where there is one.",
    )
    max_new_tokens: PositiveInt = Field(256, description="Tokens after which to stop, if the text has not ended.")
    temperature: NonNegativeFloat = Field(0.0, description="0 takes the likeliest token; above it, tokens are drawn.")
    top_k: PositiveInt | None = Field(None, description="Draw among this many likeliest tokens.")
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = Field(
        None, description="Draw among the fewest tokens whose probabilities reach this share."
    )
    min_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = Field(
        None, description="Draw among the tokens at least so likely as this share of the likeliest's probability."
    )
    stop: list[str] = Field([], description="Texts that end an answer, and are left out of it.")
    seed: NonNegativeInt = Field(0, description="Seeds the drawing.")
    device: Literal["auto", "cuda", "cpu", "mps"] = Field("auto", description="`auto` takes cuda, then mps, then cpu.")


def main(cfg: Config) -> None:
    if (cfg.prompt is None) == (cfg.prompts_file is None):
        came = "neither" if cfg.prompt is None else "both"
        raise ValueError(f'expected prompt="..." or prompts_file=PATH, came {came}.')
    if cfg.output is not None and cfg.output.exists():
        raise ValueError(f"output={cfg.output} is there already; name a new file.")
    rows = [{"prompt": cfg.prompt}] if cfg.prompts_file is None else read_prompts(cfg.prompts_file)
    model, tokenizer = open_model(cfg.model.path, cfg.adapter, cfg.device, cfg.model.dtype, cfg.model.random_init)
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "stop", "chat", "seed")
    sampling = {name: getattr(cfg, name) for name in names}

    if cfg.prompt is not None and cfg.output is None:
        for text in stream(model, tokenizer, cfg.prompt, **sampling):
            print(text, end="", flush=True)
        print()
        return
    with cfg.output.open("x", encoding="utf-8") if cfg.output else nullcontext() as output:
        texts = answers(model, tokenizer, rows, batch_size=cfg.batch_size, **sampling)
        shown = track(texts, "answering", total=len(rows), console=console, disable=output is None)
        for row, text in zip(rows, shown, strict=True):
            line = f"> {last_question(row)}\n{text}"
            if output is not None:
                line = json.dumps({**row, "generated_text": text}, ensure_ascii=False)
            print(line, file=output, flush=True)


def last_question(row: dict[str, Any]) -> str:
    asked = row.get("messages", row.get("prompt"))
    return asked if isinstance(asked, str) else [m["content"] for m in asked if m["role"] != "assistant"][-1]
