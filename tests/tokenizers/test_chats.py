"""Chats have the ids of transformers, and exactly the assistant's text and end-of-turn tokens are trained."""

import json
import unicodedata
from collections.abc import Callable
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import processors
from transformers import AutoTokenizer

from lean_ft.tokenizers import Passage, Tokenizer, load_tokenizer
from tests.tokenizers.conftest import word_start_tokenizer

MakeFolder = Callable[..., Path]

# In each template, [[ and ]] enclose the assistant's text. They become generation tags, or nothing.
CHATML = """\
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' %}[[{{ m.content + '<|im_end|>' }}]]{% else %}{{ m.content + '<|im_end|>' }}{% endif %}
{{- '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

WITH_BOS = """\
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'assistant' %}[[{{ ' ' + m.content | trim + ' ' + eos_token }}]]
{%- else %}{{ '[INST] ' + m.content + ' [/INST]' }}{% endif %}
{%- endfor %}"""


# As Mistral's: the system message is in the last user message, so earlier messages change with each new one.
MOVES_SYSTEM = """\
{%- set last = (messages | selectattr('role', '==', 'user') | list)[-1] %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<|user|>' + ('SYSTEM ' if m == last else '') + m.content }}
{%- elif m.role == 'assistant' %}{{ m.content + '<|end|>' }}{% endif %}
{%- endfor %}"""

CHAT = [
    {"role": "system", "content": "Be brief. 短く。"},
    {"role": "user", "content": "Hi  there!\n\n  How are you?"},
    {"role": "assistant", "content": "Fine 😀.\n"},
    {"role": "user", "content": "And the café? 🦙"},
    {"role": "assistant", "content": "  Открыто 12345"},
]


ALL = "{{ messages | map(attribute='content') | join }}"


def plain(template: str) -> str:
    return template.replace("[[", "").replace("]]", "")


def tagged(template: str) -> str:
    return template.replace("[[", "{% generation %}").replace("]]", "{% endgeneration %}")


def runs(tokenizer: Tokenizer, rendered: tuple[list[int], list[bool]]) -> list[str]:
    """The trained spans of a rendered chat, as text."""
    ids, mask = rendered
    assert len(ids) == len(mask)
    grouped = groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1])
    return [tokenizer.decode([token_id for token_id, _ in group]) for trained, group in grouped if trained]


@pytest.fixture
def tokenizer_with(byte_level, make_folder: MakeFolder) -> Callable[..., Tokenizer]:
    def make(template: str | None, **config: Any) -> Tokenizer:
        given = {} if template is None else {"chat_template": template}
        return load_tokenizer(make_folder(byte_level, eos_token="<|endoftext|>", **given, **config))

    return make


def chat(*contents: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


class TestAgainstTransformers:
    @pytest.mark.parametrize("spell", [plain, tagged])
    def test_ids_and_mask(self, byte_level, make_folder: MakeFolder, spell):
        ours = load_tokenizer(make_folder(byte_level, chat_template=spell(CHATML)))
        theirs = AutoTokenizer.from_pretrained(make_folder(byte_level, chat_template=tagged(CHATML)))
        expected = theirs.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = ours.render(CHAT)
        assert ids == expected["input_ids"]
        assert mask == [bool(trained) for trained in expected["assistant_masks"]]

    @pytest.mark.parametrize("spell", [plain, tagged])
    def test_the_template_adds_bos_once(self, word_start, make_folder: MakeFolder, spell):
        special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        ours = load_tokenizer(make_folder(word_start, chat_template=spell(WITH_BOS), **special))
        theirs = AutoTokenizer.from_pretrained(make_folder(word_start, chat_template=tagged(WITH_BOS), **special))
        expected = theirs.apply_chat_template(CHAT[1:], return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = ours.render(CHAT[1:])
        assert ids == expected["input_ids"]
        assert mask == [bool(trained) for trained in expected["assistant_masks"]]
        assert ids.count(ours.bos_id) == 1

    def test_generation_prompt(self, byte_level, make_folder: MakeFolder):
        folder = make_folder(byte_level, chat_template=plain(CHATML))
        ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
        for messages in (CHAT, CHAT[:-1]):
            rendered = ours.render(messages, add_generation_prompt=True)
            expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            assert rendered[0] == expected
            assert len(runs(ours, rendered)) == sum(m["role"] == "assistant" for m in messages)
            assert not rendered[1][-1]

    def test_functions_of_the_sandbox(self, byte_level, make_folder: MakeFolder):
        template = """\
{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}
{{ strftime_now('%Y') }}{{ messages | tojson(indent=2) }}
{% set found = namespace(a=dict(b=1)) %}{{ found.a.b }}"""
        folder = make_folder(byte_level, chat_template=template)
        ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
        ids, _ = ours.render(CHAT[:2], train_on="all")
        assert ids == theirs.apply_chat_template(CHAT[:2], return_dict=False)
        assert str(datetime.now().year) in ours.decode(ids)

    def test_a_template_file_of_the_user_is_the_only_one_and_is_saved(self, byte_level, make_folder, tmp_path):
        files = {"chat_template.jinja": "theirs", "additional_chat_templates/tool_use.jinja": "with tools"}
        folder = make_folder(byte_level, chat_template="in the config", files=files)
        (tmp_path / "mine.jinja").write_text("{% for m in messages %}{{ m.content }}!{% endfor %}")
        tokenizer = load_tokenizer(folder, tmp_path / "mine.jinja")
        assert list(tokenizer.chat_templates) == ["default"]
        tokenizer.save(tmp_path / "saved")
        for saved in (load_tokenizer(tmp_path / "saved"), tokenizer):
            ids, _ = saved.render(CHAT[:2], train_on="all")
            expected = AutoTokenizer.from_pretrained(tmp_path / "saved").apply_chat_template(
                CHAT[:2], return_dict=False
            )
            assert ids == expected
        with pytest.raises(ValueError, match=r"chat template .*none\.jinja cannot be read: No such file"):
            load_tokenizer(folder, tmp_path / "none.jinja")

    @pytest.mark.parametrize("named", ["additional_chat_templates", "chat_templates"])
    def test_template_files_win_over_the_config(self, byte_level, make_folder: MakeFolder, named: str):
        files = {"chat_template.jinja": f"plain{ALL}", f"{named}/tool_use.jinja": f"with tools{ALL}"}
        tokenizer = load_tokenizer(make_folder(byte_level, chat_template="in the config", files=files))
        assert tokenizer.chat_template == f"plain{ALL}"
        for tools, text in ((None, "plain"), ([{"type": "function"}], "with tools")):
            ids, _ = tokenizer.render(CHAT[1:2], tools=tools, train_on="all")
            assert tokenizer.decode(ids) == text + CHAT[1]["content"]

    def test_named_templates(self, byte_level, make_folder: MakeFolder, tmp_path: Path):
        templates = {"default": f"plain{ALL}", "tool_use": f"with tools{ALL}"}
        named = [{"name": name, "template": template} for name, template in templates.items()]
        folder = make_folder(byte_level, chat_template=named)
        AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "theirs")
        load_tokenizer(tmp_path / "theirs").save(tmp_path / "ours")
        for path in (folder, tmp_path / "ours"):
            ours, theirs = load_tokenizer(path), AutoTokenizer.from_pretrained(path)
            assert ours.chat_templates == theirs.chat_template == templates
            for tools in (None, [{"type": "function"}]):
                ids, _ = ours.render(CHAT, tools=tools, train_on="all")
                assert ids == theirs.apply_chat_template(CHAT, tools=tools, return_dict=False)


class TestMask:
    """Templates without tags reveal the assistant's turns only by how the beginnings of a chat render."""

    def test_the_end_of_a_turn_is_trained_and_text_after_it_is_not(self, tokenizer_with):
        tokenizer = tokenizer_with(plain(CHATML))
        assert runs(tokenizer, tokenizer.render(chat("a", "b", "c", "d"))) == ["b<|im_end|>", "d<|im_end|>"]
        assert runs(tokenizer, tokenizer.render(chat("a", "", "c", " \n"))) == ["<|im_end|>", " \n<|im_end|>"]
        assert all(tokenizer.render(CHAT, train_on="all")[1])
        assert not any(tokenizer.render(CHAT[:2])[1])
        for spell in (plain, tagged):
            tokenizer = tokenizer_with(spell(CHATML))
            rendered = tokenizer.render(chat("a", "b", "c", "d", "e"), train_on="last")
            assert runs(tokenizer, rendered) == ["d<|im_end|>"]

    def test_templates_without_control_tokens_train_their_line_break(self, tokenizer_with):
        tokenizer = tokenizer_with(
            "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
            "{% if add_generation_prompt %}assistant: {% endif %}"
        )
        trained = "".join(runs(tokenizer, tokenizer.render(chat("a", "b", "c", "d"))))
        assert (trained.replace(" ", "").replace("\n", ""), trained.count("\n")) == ("bd<|endoftext|>", 2)

    def test_a_turn_that_the_next_turns_token_ends(self, tokenizer_with):
        tokenizer = tokenizer_with(
            "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
        )
        assert runs(tokenizer, tokenizer.render(chat("a", "b", "c", "d"))) == ["b<|user|>", "d<|user|>"]

    @pytest.mark.parametrize(
        "template",
        [
            "[[{{ messages | map(attribute='content') | join }}]]",
            "{% for m in messages %}{% set last = messages[-1] %}[[{{ m.content }}]]{% endfor %}",
            "{% for m in messages %}{% if m.role == 'assistant' %}[[{{ m.content }}]]{% else %}{{ m.content }}{% "
            "endif %}{% endfor %}|[[end]]",
        ],
    )
    def test_blocks_outside_the_loop_cannot_be_left_out(self, tokenizer_with, template: str):
        tokenizer = tokenizer_with(tagged(template))
        assert tokenizer.passage(chat("a", "b", "c", "d")).trained
        assert tokenizer.passage(chat("a", "b", "c", "d"), untrained={1, 3}).trained == []
        for settings in ({"untrained": {1}}, {"train_on": "last"}, {"train_on": "all", "untrained": {3}}):
            with pytest.raises(ValueError, match="block outside its loop"):
                tokenizer.passage(chat("a", "b", "c", "d"), **settings)

    def test_a_turn_that_cannot_be_located_is_rejected(self, tokenizer_with):
        together = "{% if messages | length != 2 %}{{ raise_exception('two, please') }}{% endif %}{{ messages }}"
        with pytest.raises(
            ValueError, match=r"start of .* message 2.*rendering the messages before it failed.*two, please"
        ):
            tokenizer_with(together).render(chat("a", "b"))

    @pytest.mark.parametrize("model", ["llama2_sentencepiece.model", "tiktoken_small.model"])
    def test_other_kinds_of_tokenizer(self, shared_data: Path, make_folder: MakeFolder, model: str):
        end = "</s>" if "llama2" in model else "<|eot_id|>"
        template = CHATML.replace("<|im_start|>", "").replace("<|im_end|>", end)
        folders = [
            make_folder(shared_data / "tokenizers" / model, chat_template=spell(template)) for spell in (plain, tagged)
        ]
        tokenizer = load_tokenizer(folders[0])
        rendered = tokenizer.render(CHAT)
        assert [text.strip() for text in runs(tokenizer, rendered)] == ["Fine 😀.\n" + end, "Открыто 12345" + end]
        assert rendered == load_tokenizer(folders[1]).render(CHAT)
        ids, _ = tokenizer.render(chat(f"a {end} b", "c"))  # typed by the user: text
        assert ids.count(tokenizer.encode(end)[0]) == 2
        assert tokenizer.decode(ids).count(end) == 3


class TestTypedControlTokens:
    """Control tokens in a message have the ids of ordinary text, as by a tokenizer without these tokens."""

    def test_control_tokens_in_a_message_are_text(self, byte_level, make_folder: MakeFolder, tokenizer_with):
        typed = "say <|endoftext|><|im_end|> or <|im_start|>system 😀 <think>"
        tokenizer = tokenizer_with(plain(CHATML))
        ids, mask = tokenizer.render(chat(typed, "ok " + typed))
        spec = json.loads(byte_level.to_str())
        spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"][:2] != "<|"]
        ignorant = HFTokenizer.from_str(json.dumps(spec))
        start, end = (byte_level.token_to_id(token) for token in ("<|im_start|>", "<|im_end|>"))

        def text(string: str) -> list[int]:
            return ignorant.encode(string).ids

        prompt = [start, *text("user\n" + typed), end, *text("\n"), start, *text("assistant\n")]
        answer = [*text("ok " + typed), end]
        # "assistant\n" and "ok" are encoded together, which makes no difference with this vocabulary.
        assert ids == [*prompt, *answer, *text("\n")]
        assert mask == [False] * len(prompt) + [True] * len(answer) + [False]
        assert tokenizer.decode(ids).count(typed) == 2

    def test_word_starts_are_those_of_the_whole_text(self, word_start, make_folder: MakeFolder):
        special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        tokenizer = load_tokenizer(make_folder(word_start, chat_template=plain(WITH_BOS), **special))
        ids, mask = tokenizer.render(chat("what is </s>?", "an end"))
        spec = json.loads(word_start.to_str())
        spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] != "</s>"]
        ignorant = HFTokenizer.from_str(json.dumps(spec))
        assert ids == [*ignorant.encode("<s>[INST] what is </s>? [/INST] an end ", add_special_tokens=False).ids, 2]
        assert ids.count(2) == 1
        assert mask[-1]

    @pytest.mark.parametrize(
        ("template", "said", "reason"),
        [
            ("{% for m in messages %}{{ m.content.split('<|im_end|>') | join('+') }}{% endfor %}{% if false %}[[]]{% endif %}", "a<|im_end|>b", "does not write message 1|the chat template treats it as its own"),  # noqa: E501
            (plain(CHATML), "a\ufdd2b", r"messages: `\[0\].content` contains one of the Unicode noncharacters U\+FDD0"),
            (None, "a", r"no chat template.*data.chat_template=FILE"),
            ([{"name": "rag", "template": "x"}], "a", "no chat template named `default`"),
            ("{% for %}", "a", "does not compile"),
            ("{{ raise_exception('roles must alternate') }}", "a",
                "cannot render these messages: .*roles must alternate"),
            ("{{ messages[9].content.strip() }}", "a", "cannot render these messages: .*(no element 9|undefined)"),
            ("{{ messages.append(1) }}", "a", "cannot render these messages: .*(unsafe|not safe)"),
            ("{{ ''.__class__.__mro__ }}", "a", "cannot render these messages: .*unsafe"),
            ("{{ 1 + 'a' }}", "a", "cannot render these messages: .*unsupported operand"),
        ],
    )  # fmt: skip
    def test_chats_and_templates_that_are_rejected(self, tokenizer_with, template: Any, said: str, reason: str):
        with pytest.raises(ValueError, match=reason):
            tokenizer_with(tagged(template) if isinstance(template, str) else template).render(chat(said, "b"))


class TestPassages:
    """A prompt and its completion are encoded as one text and divided by characters."""

    @pytest.fixture(
        params=["byte_level", "trimmed", "word_start", "llama2_sentencepiece.model", "tiktoken_small.model"]
    )
    def tokenizer(self, request: pytest.FixtureRequest, make_folder: MakeFolder, byte_level) -> Tokenizer:
        if request.param.endswith(".model"):
            shared_data: Path = request.getfixturevalue("shared_data")
            return load_tokenizer(make_folder(shared_data / "tokenizers" / request.param))
        if request.param == "word_start":
            return load_tokenizer(make_folder(word_start_tokenizer("first"), bos_token="<s>", eos_token="</s>"))
        tokenizer = HFTokenizer.from_str(byte_level.to_str())
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=request.param == "trimmed")
        return load_tokenizer(make_folder(tokenizer, eos_token="<|endoftext|>"))

    def test_division(self, tokenizer: Tokenizer, texts):
        for prompt in texts:
            for completion in texts:
                # Composed, as one tokenizer does, and with a first character that no decoder strips.
                prompt = unicodedata.normalize("NFC", f">{prompt}")
                text = unicodedata.normalize("NFC", prompt + completion)
                [(ids, trained)] = tokenizer.tokenize([Passage(text, [(len(prompt), len(text))])])
                assert ids.tolist() == tokenizer.encode(text)
                first = int(np.argmax(trained)) if trained.any() else len(ids)
                assert trained[first:].all()
                # Only prompt precedes the first trained token, which reaches into the completion.
                assert len(tokenizer.decode(ids[:first].tolist()).rstrip("\ufffd")) <= len(prompt)
                if first < len(ids):
                    reached = tokenizer.decode(ids[: first + 1].tolist())
                    assert len(reached) > len(prompt) or reached.endswith("\ufffd")

    def test_bos_and_eos_are_added_once(self, tokenizer: Tokenizer):
        bos, eos = tokenizer.bos_id, tokenizer.eos_id
        [(ids, trained)] = tokenizer.tokenize([Passage("hello", [(0, 5)], add_bos=True, add_eos=True)])
        assert ids[-1] == eos
        assert trained[-1]
        assert ids.tolist().count(eos) == 1
        if bos is not None:
            assert ids[0] == bos
            assert not trained[0]
        written = tokenizer.decode(ids.tolist())
        [(again, _)] = tokenizer.tokenize([Passage(written, [(0, len(written))], add_bos=True, add_eos=True)])
        assert tokenizer.encode(written, add_special_tokens=True).count(bos) == int(bos is not None)
        assert (again[0], again[-1]) == (ids[0], eos)
        assert [again.tolist().count(token_id) for token_id in (bos, eos)] == [int(bos is not None), 1]
