"""Chat in the terminal with a run, a checkpoint, an adapter or any model that has a chat template.

leanft chat runs/tiny
leanft chat runs/tiny_lora system="Answer in one word." temperature=0.7
leanft chat my-model tools=my_tools.py:search  # runs the functions that the model calls
leanft chat runs/tiny < questions.txt       # one question per line; only answers are printed

Press Ctrl-C to stop an answer. /help lists the commands.
"""

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lean_ft.data.images import image_part
from lean_ft.generation import CallingTurn, converse, open_model
from lean_ft.settings import AskConfig, ToolsConfig
from lean_ft.system.log import show
from lean_ft.tokenizers import Tokenizer
from lean_ft.tools import Tools

HELP = """\
/reset       start a new conversation
/system TEXT start again with this system message; without TEXT, with none
/image FILE  show the model an image with the next message; repeat for several
/save FILE   append the conversation to a JSONL file, as a row for data.source
/help        print this help
/quit        exit; so does Ctrl-D
Ctrl-C stops an answer; the part that was printed stays in the conversation."""


class Config(AskConfig):
    system: str | None = None
    """The system message at the start of the conversation."""
    tools: ToolsConfig = ToolsConfig.model_validate({})


def main(cfg: Config) -> None:
    model, tokenizer = open_model(cfg.model, cfg.adapter, cfg.device, new_tokens=cfg.max_new_tokens)
    if tokenizer.chat_template is None:
        raise ValueError(
            f"{cfg.model.path} has no chat template, so it cannot chat. Use `leanft generate` to continue a text."
        )
    if not cfg.tools.functions and cfg.tools != ToolsConfig.model_validate({}):
        raise ValueError("the settings of tools are used only with tools.functions. Set it, or remove tools.")
    system, tools = cfg.system, Tools(cfg.tools)
    CallingTurn(tokenizer, tools.schemas)  # raises for a chat template without tools
    messages, images = _beginning(system), list[dict[str, Any]]()
    in_terminal = sys.stdin.isatty()
    if in_terminal:
        print("Type a question, or /help for the commands.")
    with _ctrl_c_interrupts():
        for line in _lines("> " if in_terminal else ""):
            command, _, argument = line.partition(" ")
            if command == "/quit":
                return
            if command in ("/reset", "/system"):
                system = system if command == "/reset" else argument.strip() or None
                messages, images = _beginning(system), []
            elif command == "/image":
                images += _image(argument.strip(), tokenizer)
            elif command == "/save":
                _save({"messages": messages} | ({"tools": tools.schemas} if tools.schemas else {}), argument.strip())
            elif command == "/help":
                print(HELP)
            elif line.startswith("/"):
                print(f"unknown command {command}; /help lists the commands.")
            elif line:
                content = [*images, {"type": "text", "text": line}] if images else line
                messages.append({"role": "user", "content": content})
                images = []
                with suppress(KeyboardInterrupt):
                    for text in converse(model, tokenizer, messages, tools, cfg.tools.calls, **cfg.sampling):
                        show(text, end="")
                print(flush=True)


def _beginning(system: str | None) -> list[dict[str, Any]]:
    return [] if system is None else [{"role": "system", "content": system}]


def _lines(prompt: str) -> Iterator[str]:
    """Yield input lines until end of file. In a terminal, readline gives editing and history."""
    with suppress(ImportError):
        import readline  # noqa: F401  (input() then uses it)
    while True:
        try:
            yield input(prompt).strip()
        except KeyboardInterrupt:
            print()
        except EOFError:
            return


def _image(name: str, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    try:
        part, num_tokens = image_part(name, tokenizer)
    except ValueError as error:
        show(str(error))
        return []
    print(f"{name}: {num_tokens:,} tokens, shown with the next message.")
    return [part]


def _save(row: dict[str, Any], name: str) -> None:
    if not name:
        print("/save needs a file name, as in /save chat.jsonl.")
        return
    try:
        with Path(name).expanduser().open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    except OSError as error:
        print(f"{name}: {error.strerror}.")
    else:
        print(f"{len(row['messages'])} messages added to {name}.")


@contextmanager
def _ctrl_c_interrupts() -> Iterator[None]:
    """Make Ctrl-C raise KeyboardInterrupt inside the block, instead of ending the run."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
