"""The last user message, found in the text of a prompt of published chat templates."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lean_ft.tokenizers import load_tokenizer
from lean_ft.tokenizers.user_turns import UserTurns
from tests.tokenizers.conftest import with_tokens

SYSTEM = {"role": "system", "content": "You answer in one word. Never more."}
EARLIER = [{"role": "user", "content": "And before that?"}, {"role": "assistant", "content": "Nothing."}]
ASKED = {"role": "user", "content": "Which city is the capital of Halinia?"}
LLAMA_2 = (
    "{% if messages[0].role == 'system' %}{% set system = '<<SYS>>\\n' + messages[0].content + '\\n<</SYS>>\\n\\n' %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}{% for m in messages %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + (system if loop.first else '') + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("name", ["qwen3", "qwen2_5", "llama3", "gemma3", "phi3", "gptoss", "llama2"])
def test_the_last_user_message_is_found_behind_a_system_message(
    name: str, published: dict[str, str], byte_level, make_folder: Callable[..., Path]
) -> None:
    template = LLAMA_2 if name == "llama2" else published[name]
    tokenizer = load_tokenizer(
        make_folder(with_tokens(byte_level, [template]), chat_template=template, bos_token="<bos>", eos_token="<eos>")
    )
    turns = UserTurns.of(tokenizer)
    assert turns is not None
    for before in ([], [SYSTEM], EARLIER, [SYSTEM, *EARLIER]):
        ids = tokenizer.render([*before, ASKED], add_generation_prompt=True)[0]
        assert turns.last(tokenizer.decode(ids)).strip() == ASKED["content"], before
