"""Text generation: opens models, runs and adapters, and completes prompts and chats.

`lean_ft.generation.decoding` samples the tokens. This module finds folders, renders prompts, sets stop conditions and
decodes text.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from lean_ft.data.chats import read_content, read_variables
from lean_ft.data.columns import Document
from lean_ft.data.foreign_fields import is_given
from lean_ft.data.images import read_image, rules_in
from lean_ft.data.parts import PART_FIELDS, documents_of, kinds_of, measured, take_parts
from lean_ft.data.sources import RowSources
from lean_ft.generation.choosing import Sampling
from lean_ft.generation.decoding import pack_for_generation, sample, sample_numbers, sample_steps
from lean_ft.generation.stopping import stop_ids
from lean_ft.images.rules import image_rules
from lean_ft.models import Decoder, load_model
from lean_ft.models.device import check_dtype, resolve_device
from lean_ft.models.load_options import torch_dtype
from lean_ft.models.own_families import check_own_families
from lean_ft.models.saving import PROCESSOR_FILES
from lean_ft.models.vision.config import VISION_FAMILIES
from lean_ft.peft import ids_of_rows, is_adapter, load_adapter
from lean_ft.peft.finished_models import find_base, find_finished, tokenizer_of
from lean_ft.quantize import is_quantized, load_quantized
from lean_ft.settings import SFTDataConfig
from lean_ft.system.user_functions import use_family
from lean_ft.system.whole_files import read_json, read_text
from lean_ft.tokenizers import Tokenizer
from lean_ft.tokenizers.loading import context_length

Messages = Sequence[Mapping[str, Any]]
Prompt = str | Messages | Mapping[str, Any]
"""A text; a chat's messages; or a row {"prompt": text or messages} or {"messages": ...}, optionally with `tools` and
`images`."""
Images = Literal["auto", "none", "frozen"]


class PromptTooLong(ValueError):
    """A prompt that fills the model's context."""


_ROWS = {".jsonl", ".json", ".csv", ".tsv", ".parquet"}


def open_model(
    path: str | Path = "auto",
    adapter: str | Path | Sequence[str | Path] = (),
    device: str = "auto",
    dtype: str | torch.dtype = "bfloat16",
    random_init: bool = False,
    images: Images = "auto",
    new_tokens: int = 0,
    family: str | None = None,
) -> tuple[Decoder, Tokenizer]:
    """Return a model for generation, and its tokenizer.

    path: a model folder, a checkpoint, a run (its newest complete checkpoint), a Hub repository, `tiny`, or an adapter
    or a run that trained one, which is loaded on its base model; `auto` is the base model of the first adapter. Several
    adapters add up. A folder of `leanft quantize` is opened on a CPU. images: whether the vision tower is loaded
    (`frozen`);
    `auto`: if the folder has one that lean_ft knows, and a file of its image processor. new_tokens: the most tokens
    that the model will generate. From 32 on, the layers of a 16-bit model on a CPU are packed (`pack_in_place`): the
    model then cannot be
    trained or saved. family: as model.family. Raises ValueError if a folder is missing or incomplete, if that file is
    broken, or for an invalid device.
    """
    use_family(family)
    adapters = [find_finished(one, quick=True) for one in ([adapter] if isinstance(adapter, str | Path) else adapter)]
    if path == "auto" and not adapters:
        raise ValueError("no model is set. Set model.path, or adapter to use the adapter's base model.")
    folder = adapters[0] if path == "auto" else find_finished(path, quick=True, weights=not random_init)
    if is_adapter(folder):
        adapters = adapters if path == "auto" else [folder, *adapters]
        folder = find_finished(find_base(folder), quick=True)
    where = resolve_device(device)
    dtype = torch_dtype(dtype)
    check_dtype(str(dtype).removeprefix("torch."), where)
    if not random_init and is_quantized(folder):
        if adapters:
            fix = "Merge the adapter into the unquantized model: leanft quantize ADAPTER kind=... output=..."
            raise ValueError(f"{folder} is quantized, and adapters need an unquantized model. {fix}")
        if where.type != "cpu":
            raise ValueError(
                f"{folder} is quantized by torchao, which runs on a CPU here, not on {where}. Set device=cpu."
            )
        model = load_quantized(folder, dtype)
    else:
        tower = _tower_of(folder) if images == "auto" else images
        new_ids = ids_of_rows(*adapters)
        model = load_model(folder, where, dtype=dtype, random_init=random_init, new_ids=new_ids, images=tower)
    check_own_families(family)
    if adapters:
        load_adapter(model, *adapters)
    pack_for_generation(model, new_tokens)
    return model, tokenizer_of(*adapters[:1], folder, has_tower=model.vision is not None)


def reads_images(folder: Path) -> bool:
    """Whether the folder's model has a vision tower that lean_ft knows, and a file of its image processor."""
    has_tower = str(read_json(folder / "config.json").get("model_type")) in VISION_FAMILIES
    return has_tower and any((folder / name).is_file() for name in PROCESSOR_FILES)


def _tower_of(folder: Path) -> Literal["none", "frozen"]:
    """`images` of a folder's model. Raises ValueError if its tower cannot be used."""
    if not reads_images(folder):
        return "none"
    try:
        image_rules(folder)
    except ValueError as error:
        raise ValueError(f"{error} To read texts alone, set model.images=none (`leanft serve`: --no-images).") from None
    return "frozen"


def answers(
    model: Decoder,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    *,
    batch_size: int,
    chat: Literal["auto"] | bool = "auto",
    folder: Path = Path(),
    **sampling: Any,
) -> Iterator[str]:
    """Yield the completion of each prompt, in order, `batch_size` prompts at a time. Paths of images are relative to
    `folder`. Other arguments are those of `generate`.

    Samples do not depend on the batches: equal prompts are numbered across all batches.
    """
    how, asked = asked_of(model, tokenizer, prompts, chat, sampling, folder)
    numbers = sample_numbers(asked)
    for start in range(0, len(asked), batch_size):
        some = slice(start, start + batch_size)
        for answer in sample(model, asked[some], how, numbers=numbers[some], decode=tokenizer.decode):
            yield before_stop(tokenizer.decode(answer.ids, skip_special_tokens=True), how.stop_texts)


def generate(
    model: Decoder | str | Path,
    prompts: Prompt | Sequence[Prompt],
    tokenizer: Tokenizer | None = None,
    *,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    stop: Sequence[str] = (),
    chat: Literal["auto"] | bool = "auto",
    chat_template_kwargs: dict[str, Any] | None = None,
    seed: int = 0,
) -> list[str]:
    """Return the completion of each prompt. All prompts run together, as far as they fit in memory.

    model: a loaded model, or a path for `open_model`; tokenizer: None loads the one in the model's folder; chat: render
    a text as a user message with the chat template; `auto` does so if there is a template; stop: texts that end a
    completion and are removed from it; chat_template_kwargs: variables of the chat template, which replace those of the
    model's run. If messages end with an assistant message, the completion continues it. Other arguments are those of
    `Sampling`. Raises ValueError as `open_model` and `Sampling` do, and for an invalid prompt.
    """
    if not isinstance(model, Decoder):
        model, own = open_model(model, new_tokens=max_new_tokens)
        tokenizer = tokenizer or own
    if tokenizer is None:
        if model.source.folder is None:
            raise ValueError("the model was not loaded from a folder, so its tokenizer is unknown. Pass tokenizer=...")
        tokenizer = tokenizer_of(model.source.folder, has_tower=model.vision is not None)
    several: Sequence[Any] = [prompts] if isinstance(prompts, str | Mapping) or _is_chat(prompts) else prompts
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "stop": stop, "seed": seed}
    sampling |= {"max_new_tokens": max_new_tokens, "batch_size": max(1, len(several))}  # all at once
    sampling |= {"chat_template_kwargs": chat_template_kwargs}
    return list(answers(model, tokenizer, several, chat=chat, **sampling))


def stream(
    model: Decoder, tokenizer: Tokenizer, prompt: Prompt, *, chat: Literal["auto"] | bool, **sampling: Any
) -> Iterator[str]:
    """Yield the text of `generate` in pieces. Incomplete characters and possible beginnings of a stop text are held
    back."""
    how, asked = asked_of(model, tokenizer, [prompt], chat, sampling)
    tokens = (token for (token,) in sample_steps(model, asked, how, tokenizer.decode))
    return (text for text in text_of(tokenizer, tokens, how.stop_texts) if text)


def text_of(tokenizer: Tokenizer, tokens: Iterable[int | None], stop_texts: Sequence[str] = ()) -> Iterator[str]:
    """Yield the text of tokens as it grows: a piece per item of `tokens`, possibly empty, and the rest at the end.

    Each step decodes the last few tokens alone, so the time is linear in the length of the text.
    """
    ids: list[int] = []
    start = end = 0  # ids[start:end] is decoded before a new token, so that the tokenizer sees what precedes it
    pending = text = ""
    for token in tokens:
        if token is not None:
            ids.append(token)
            text = _text_after(tokenizer, ids, start, end)
            if text and not text.endswith("\ufffd"):  # hold back a character that is split between two tokens
                pending += text
                start, end, text = end, len(ids), ""
        piece = before_stop(pending, stop_texts, or_a_beginning=True)
        pending = pending[len(piece) :]
        yield piece
    if rest := before_stop(pending + text, stop_texts):
        yield rest


def _text_after(tokenizer: Tokenizer, ids: list[int], start: int, end: int) -> str:
    """Return the text that ids[end:] add to the text of ids[start:end]."""
    before = tokenizer.decode(ids[start:end], skip_special_tokens=True)
    return tokenizer.decode(ids[start:], skip_special_tokens=True)[len(before) :]


def before_stop(text: str, stop_texts: Sequence[str], or_a_beginning: bool = False) -> str:
    """Return `text` up to the first stop text, or with `or_a_beginning` up to the beginning of a stop text at its
    end."""
    end = min((at for stop in stop_texts if (at := text.find(stop)) >= 0), default=len(text))
    if or_a_beginning and end == len(text):
        lengths = (n for stop in stop_texts for n in range(1, len(stop)) if text.endswith(stop[:n]))
        end -= max(lengths, default=0)
    return text[:end]


def read_prompts(file: Path) -> list[dict[str, Any]]:
    """Return the prompts of a file as rows.

    The file is JSON, JSONL, CSV, TSV or Parquet with the columns `prompt` or `messages`, JSON with the messages of one
    chat, or a text file with one prompt per line. Raises ValueError for an invalid row, with its place.
    """
    if not _ROWS & set(file.suffixes):
        lines = read_text(file).splitlines()
        return [{"prompt": line} for line in lines if line.strip()]
    rows = list(RowSources.of(SFTDataConfig.model_validate({"source": str(file)})).rows())
    if _is_chat([row.fields for row in rows]):
        for row in rows:
            row.check()
        return [{"messages": [row.fields for row in rows]}]
    for row in rows:
        try:
            row.check()
            _asked(row.fields)
        except ValueError as error:
            raise ValueError(f"{row.place}: {row.problem or error}") from None
    return [row.fields for row in rows]


def _is_chat(messages: Any) -> bool:
    return isinstance(messages, Sequence) and all(isinstance(m, Mapping) and "role" in m for m in messages[:1] or [0])


def _asked(prompt: Prompt) -> Any:
    """Return the text or the messages of a prompt. Raise ValueError if it has neither."""
    asked = prompt.get("messages", prompt.get("prompt")) if isinstance(prompt, Mapping) else prompt
    if isinstance(asked, str) or _is_chat(asked):
        return asked
    raise ValueError(
        f'a prompt is {prompt!r:.80}; expected text, a list of messages {{"role": ..., "content": ...}}, '
        '{"prompt": text or messages} or {"messages": [...]}.'
    )


def asked_of(
    model: Decoder,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    chat: Literal["auto"] | bool,
    settings: dict[str, Any],
    folder: Path = Path(),
) -> tuple[Sampling, list[Document]]:
    """Return the sampling settings and the tokenized prompts. Raises PromptTooLong."""
    chat = tokenizer.chat_template is not None if chat == "auto" else chat
    settings = dict(settings)
    stop_texts, kwargs = tuple(settings.pop("stop", ())), settings.pop("chat_template_kwargs", None) or {}
    tokenizer.check_template_kwargs(kwargs, tokenizer.template_names if chat else ())
    sampling = Sampling(**settings, stop_texts=stop_texts, stop_ids=stop_ids(model, tokenizer))
    context, asked = context_length(model.source.config), list[Document]()
    for number, prompt in enumerate(prompts, start=1):
        asked.append(_document(tokenizer, prompt, chat, kwargs, folder))
        if context is not None and len(asked[-1]) >= context:
            which = f"prompt {number}" if len(prompts) > 1 else "the prompt"
            raise PromptTooLong(
                f"{which} has {len(asked[-1]):,} tokens, which leaves no room in the model's context of {context:,} "
                "tokens. Shorten it."
            )
    return sampling, asked


def _document(tokenizer: Tokenizer, prompt: Prompt, chat: bool, kwargs: dict[str, Any], folder: Path) -> Document:
    asked, row = _asked(prompt), prompt if isinstance(prompt, Mapping) else {}
    if isinstance(asked, str) and not chat:
        if any(is_given(row.get(name)) for name in PART_FIELDS):
            raise ValueError(
                "a prompt has an image, which needs a chat template. Remove chat=false, or use a chat model."
            )
        document = Document.of(tokenizer.encode(asked, add_special_tokens=True))
        return documents_of([document], tokenizer, kinds_of(tokenizer))[0]
    messages, parts = take_parts(_messages(asked), row)
    if parts and not tokenizer.media:
        raise ValueError(
            "a prompt has an image, and the model reads texts alone. Use a vision model with model.images=frozen."
        )
    tools, kwargs = row.get("tools") or None, kwargs | read_variables(row.get("chat_template_kwargs"))
    if messages[-1].get("role") == "assistant":
        passage = tokenizer.continued(messages, tools, kwargs)
    else:
        passage = tokenizer.passage(messages, tools, add_generation_prompt=True, template_kwargs=kwargs)
    if "tools" in passage.unread:
        raise ValueError("the chat template does not write tools. Remove `tools`, or use a model that calls tools.")
    passage = measured(replace(passage, parts=parts), folder, kinds_of(tokenizer))
    return documents_of([passage], tokenizer, kinds_of(tokenizer))[0]


def _messages(asked: str | Messages) -> list[dict[str, Any]]:
    """The messages of a prompt, with content parts as `take_parts` reads them."""
    if isinstance(asked, str):
        return [{"role": "user", "content": asked}]
    messages = [dict(message) for message in asked]
    for number, message in enumerate(messages, start=1):
        if isinstance(message.get("content"), list):
            message["content"] = read_content(message["content"], message, f"message {number}")
    return messages


def shows_images(prompt: Prompt) -> bool:
    """Whether a prompt has an image."""
    row = prompt if isinstance(prompt, Mapping) else {}
    return bool(take_parts(_messages(_asked(prompt)), row)[1])


def image_part(path: str, tokenizer: Tokenizer) -> tuple[dict[str, Any], int]:
    """Return an image file as a content part of a message, and its number of tokens. Raises ValueError if it cannot be
    read."""
    if (rules := rules_in(tokenizer)) is None:
        raise ValueError("the model reads texts alone, or was loaded with model.images=none.")
    file = str(Path(path.strip("'\"")).expanduser().resolve())  # terminals write dropped files in quotes
    return {"type": "image", "path": file}, sum(read_image(file, Path(), rules).layout.runs)
