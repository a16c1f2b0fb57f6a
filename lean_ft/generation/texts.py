"""Text generation: opens models, runs and adapters, and completes prompts and chats.

`lean_ft.generation.decoding` samples the tokens. This module finds folders, renders prompts, sets stop conditions and
decodes text.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Unpack

import torch

from lean_ft.data.columns import Document
from lean_ft.data.sources import RowSources
from lean_ft.generation.choosing import Sampling
from lean_ft.generation.decoding import pack_for_generation, sample, sample_numbers, sample_steps
from lean_ft.generation.prompts import Prompt, is_chat, prompt_document, text_or_messages
from lean_ft.generation.stopping import stop_ids
from lean_ft.models import Decoder, load_model
from lean_ft.models.device import check_dtype, resolve_device
from lean_ft.models.load_options import torch_dtype
from lean_ft.models.own_families import check_own_families
from lean_ft.peft import ids_of_rows, is_adapter, load_adapter
from lean_ft.peft.finished_models import find_base, find_finished, tokenizer_of
from lean_ft.quantize import is_quantized, load_quantized
from lean_ft.settings import AskedModel, AskedModelConfig, SFTDataConfig
from lean_ft.system.user_functions import use_family
from lean_ft.system.whole_files import read_text
from lean_ft.tokenizers import Tokenizer
from lean_ft.tokenizers.loading import context_length


class PromptTooLong(ValueError):
    """A prompt that fills the model's context."""


_ROWS = {".jsonl", ".json", ".csv", ".tsv", ".parquet"}


def open_model(
    path: str | Path | AskedModelConfig = "auto",
    adapter: str | Path | Sequence[str | Path] = (),
    device: str = "auto",
    *,
    new_tokens: int = 0,
    **settings: Unpack[AskedModel],
) -> tuple[Decoder, Tokenizer]:
    """Return a model for generation, and its tokenizer.

    path: a model folder, a checkpoint, a run (its newest complete checkpoint), a Hub repository, `tiny`, or an adapter
    or a run that trained one, which is loaded on its base model; `auto` is the base model of the first adapter; or
    settings, which have it. Several adapters add up. A folder of `leanft quantize` is opened on a CPU. new_tokens: the
    most tokens that the model will generate. From 32 on, the layers of a 16-bit model on a CPU are packed
    (`pack_in_place`): the model then cannot be trained or saved. settings: further settings of `AskedModelConfig`, by
    name. Raises ValueError if a folder is missing or incomplete, if a file of it is broken, or for an invalid device.
    """
    if not isinstance(path, AskedModelConfig):
        path = AskedModelConfig.model_validate({}).model_copy(update={"path": str(path)})
    opened = path.model_copy(update={**settings})
    use_family(opened.family)
    adapters = [find_finished(one, quick=True) for one in ([adapter] if isinstance(adapter, str | Path) else adapter)]
    if opened.path == "auto" and not adapters:
        raise ValueError("no model is set. Set model.path, or adapter to use the adapter's base model.")
    weights = not opened.random_init
    folder = adapters[0] if opened.path == "auto" else find_finished(opened.path, quick=True, weights=weights)
    if is_adapter(folder):
        adapters = adapters if opened.path == "auto" else [folder, *adapters]
        folder = find_finished(find_base(folder), quick=True)
    where, dtype = resolve_device(device), torch_dtype(opened.dtype)
    check_dtype(str(dtype).removeprefix("torch."), where)
    if weights and is_quantized(folder):
        model = _open_quantized(folder, dtype, where, has_adapters=bool(adapters))
    else:
        opened = opened.model_copy(update={"path": str(folder)})
        model = load_model(opened, where, dtype=dtype, new_ids=ids_of_rows(*adapters))
    check_own_families(opened.family)
    if adapters:
        load_adapter(model, *adapters)
    pack_for_generation(model, new_tokens)
    return model.eval(), tokenizer_of(*adapters[:1], folder, model=model)


def _open_quantized(folder: Path, dtype: torch.dtype, device: torch.device, *, has_adapters: bool) -> Decoder:
    if has_adapters:
        fix = "Merge the adapter into the unquantized model: leanft quantize ADAPTER kind=... output=..."
        raise ValueError(f"{folder} is quantized, and adapters need an unquantized model. {fix}")
    if device.type != "cpu":
        raise ValueError(
            f"{folder} is quantized by torchao, which runs on a CPU here, not on {device}. Set device=cpu."
        )
    return load_quantized(folder, dtype)


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
    """Yield the completion of each prompt, in order, `batch_size` prompts at a time. Paths in prompts are relative to
    `folder`. Other arguments are those of `generate`.

    Samples do not depend on the batches: equal prompts are numbered across all batches.
    """
    how, documents = asked_of(model, tokenizer, prompts, chat, sampling, folder)
    numbers = sample_numbers(documents)
    for start in range(0, len(documents), batch_size):
        some = slice(start, start + batch_size)
        for answer in sample(model, documents[some], how, numbers=numbers[some], decode=tokenizer.decode):
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
        model, its_tokenizer = open_model(model, new_tokens=max_new_tokens)
        tokenizer = tokenizer or its_tokenizer
    if tokenizer is None:
        if model.source.folder is None:
            raise ValueError("the model was not loaded from a folder, so its tokenizer is unknown. Pass tokenizer=...")
        tokenizer = tokenizer_of(model.source.folder, model=model)
    several: Sequence[Any] = [prompts] if isinstance(prompts, str | Mapping) or is_chat(prompts) else prompts
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "stop": stop, "seed": seed}
    sampling |= {"max_new_tokens": max_new_tokens, "batch_size": max(1, len(several))}  # all at once
    sampling |= {"chat_template_kwargs": chat_template_kwargs}
    return list(answers(model, tokenizer, several, chat=chat, **sampling))


def stream(
    model: Decoder, tokenizer: Tokenizer, prompt: Prompt, *, chat: Literal["auto"] | bool, **sampling: Any
) -> Iterator[str]:
    """Yield the text of `generate` in pieces. Incomplete characters and possible beginnings of a stop text are held
    back."""
    how, documents = asked_of(model, tokenizer, [prompt], chat, sampling)
    tokens = (token for (token,) in sample_steps(model, documents, how, tokenizer.decode))
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
    if is_chat([row.fields for row in rows]):
        for row in rows:
            row.check()
        return [{"messages": [row.fields for row in rows]}]
    for row in rows:
        try:
            row.check()
            text_or_messages(row.fields)
        except ValueError as error:
            raise ValueError(f"{row.place}: {row.problem or error}") from None
    return [row.fields for row in rows]


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
    context, documents = context_length(model.source.config), list[Document]()
    for number, prompt in enumerate(prompts, start=1):
        document = prompt_document(prompt, tokenizer, chat, kwargs, folder)
        documents.append(document)
        if context is not None and len(document) >= context:
            which = f"prompt {number}" if len(prompts) > 1 else "the prompt"
            raise PromptTooLong(
                f"{which} has {len(document):,} tokens, which leaves no room in the model's context of {context:,} "
                "tokens. Shorten it."
            )
    return sampling, documents
