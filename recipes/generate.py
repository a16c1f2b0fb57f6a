"""Generates text with any model folder: a Hugging Face model, a run's checkpoint, or the embedded one.

leanft run generate model.path=runs/tiny/step_00000100 prompt="What is the capital of Zanemar?"
leanft run generate model.path=tiny chat=false temperature=0.8 prompt="The capital of Zanemar"
leanft run generate model.path=tiny adapter=runs/tiny_lora/step_00000256 prompt="What is the capital of Zanemar?"
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from lean_ft.models import Decoder, generate_steps, load_model
from lean_ft.peft import load_adapter
from lean_ft.settings import ModelConfig, Settings
from lean_ft.tokenizers import Tokenizer, load_tokenizer
from lean_ft.training.device import check_dtype, resolve_device


class Config(Settings):
    model: ModelConfig
    adapter: str | list[str] = Field(
        [], description="Folder of an adapter in PEFT's format, or a list of them that add up."
    )
    prompt: str | None = Field(None, description="What to answer or go on from.")
    prompts_file: Path | None = Field(None, description="In place of `prompt`: a text file of them, one a line.")
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
    seed: NonNegativeInt = Field(0, description="Seeds the drawing; the same for every prompt.")
    device: Literal["auto", "cuda", "cpu", "mps"] = Field("auto", description="`auto` takes cuda, then mps, then cpu.")


def main(cfg: Config) -> None:
    prompts = read_prompts(cfg)
    device = resolve_device(cfg.device)
    check_dtype(cfg.model.dtype, device)
    tokenizer = load_tokenizer(cfg.model.path)
    dtype = getattr(torch, cfg.model.dtype)
    model = load_model(cfg.model.path, device=device, dtype=dtype, random_init=cfg.model.random_init)
    if adapters := [cfg.adapter] if isinstance(cfg.adapter, str) else cfg.adapter:
        load_adapter(model, *adapters)
    chat = tokenizer.chat_template is not None if cfg.chat == "auto" else cfg.chat
    sampling = {"temperature": cfg.temperature, "top_k": cfg.top_k, "top_p": cfg.top_p}

    for prompt in prompts:
        if chat:
            ids, _ = tokenizer.render([{"role": "user", "content": prompt}], add_generation_prompt=True)
        else:
            ids = tokenizer.encode(prompt, add_special_tokens=True)
        generator = torch.Generator(device).manual_seed(cfg.seed)
        steps = generate_steps(
            model, [ids], cfg.max_new_tokens, stop_ids=stop_ids(model, tokenizer), generator=generator, **sampling
        )
        if cfg.prompts_file is not None:
            print(f"> {prompt}")
        for text in stream(tokenizer, (token for (token,) in steps if token is not None)):
            print(text, end="", flush=True)
        print()


def read_prompts(cfg: Config) -> list[str]:
    if (cfg.prompt is None) == (cfg.prompts_file is None):
        came = "neither" if cfg.prompt is None else "both"
        raise ValueError(f'expected prompt="..." or prompts_file=PATH, came {came}.')
    if cfg.prompt is not None:
        return [cfg.prompt]
    assert cfg.prompts_file is not None
    return [line for line in cfg.prompts_file.read_text(encoding="utf-8").splitlines() if line.strip()]


def stop_ids(model: Decoder, tokenizer: Tokenizer) -> set[int]:
    """What ends a text: the tokenizer's eos, and the ids that the model's generation_config.json adds to it."""
    configured = json.loads(model.generation_config or b"{}").get("eos_token_id")
    ids = configured if isinstance(configured, list) else [configured]
    return {token for token in (*ids, tokenizer.eos_id) if token is not None}


def stream(tokenizer: Tokenizer, tokens: Iterable[int]) -> Iterator[str]:
    """The text of `tokens` as it grows. A character cut between two tokens waits for its second part."""
    ids: list[int] = []
    told = ""
    for token in tokens:
        ids.append(token)
        text = tokenizer.decode(ids, skip_special_tokens=True)
        if not text.endswith("\ufffd"):
            yield text[len(told) :]
            told = text
    if len(told) < len(text := tokenizer.decode(ids, skip_special_tokens=True)):
        yield text[len(told) :]
