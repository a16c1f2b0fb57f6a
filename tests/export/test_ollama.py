"""Modelfiles for Ollama: the Go template writes what the chat template writes, run as Jinja by translating its few
actions."""

import json
import re
from pathlib import Path

import jinja2
import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from lean_ft.export import export_gguf
from tests.export.conftest import qwen_tokenizer
from tests.tokenizers.conftest import published_templates

QUESTION, ANSWER, MORE = (
    {"role": "user", "content": "Was ist 1 + 1?\n{{ x }}"},
    {"role": "assistant", "content": "Zwei <b>"},
    {"role": "user", "content": "Und 你好?"},
)
CHATS = [[QUESTION], [QUESTION, ANSWER, MORE], [QUESTION, ANSWER, MORE, ANSWER, QUESTION]]
SYSTEM = {"role": "system", "content": "Antworte kurz."}
LLAMA2 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {% if loop.first or loop.previtem.role == "
    "'system' %}{% if messages[0].role == 'system' %}<<SYS>>\n{{ messages[0].content }}\n<</SYS>>\n\n{% endif %}{% "
    "endif %}{{ m.content }} [/INST]{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}{% endif %}{% "
    "endfor %}"
)
PLAIN = (
    "{% for m in messages %}### {{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}### "
    "assistant:{% endif %}"
)
ENDED = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ '<return>' if loop.last and m.role == 'assistant' else "
    "'<end>' }}{% endfor %}{% if messages[-1].role == 'user' %}<assistant>{% endif %}"
)
CLOSED_BY_THE_NEXT = (
    "<system>none</system>{% for m in messages %}{% if m.role == 'user' %}{% if not loop.first %}<close>{% endif "
    "%}<user>{{ m.content }}<end>{% else %}<assistant>{{ m.content }}{% endif %}{% endfor %}{% if "
    "add_generation_prompt %}<assistant>{% endif %}"
)
NUMBERED = "{% for m in messages %}{{ loop.index }}. {{ m.content }}\n{% endfor %}"


def as_jinja(go: str) -> str:
    """The Go template as a Jinja template of `system` and `messages`."""
    ends: list[str] = []

    def translated(match: re.Match[str]) -> str:
        action = match[1]
        if action == "end":
            return ends.pop()
        if action.startswith(("range", "if")):
            ends.append("{% endfor %}" if action.startswith("range") else "{% endif %}")
        for pattern, replacement in (
            (r"range \.Messages", "{% for m in messages %}"),
            (r'(else )?if eq \.Role "(\w+)"', lambda m: f'{{% {"elif" if m[1] else "if"} m.role == "{m[2]}" %}}'),
            (r"if not \.System", "{% if not system %}"),
            (r"if \$system", "{% if first.system %}"),
            (r"\$system := \.System", "{% set first = namespace(system=system) %}"),
            (r'\$system = ""', '{% set first.system = "" %}'),
            (r"\$system", "{{ first.system }}"),
            (r"\.Content", "{{ m.content }}"),
        ):
            if found := re.fullmatch(pattern, action):
                return replacement(found) if callable(replacement) else replacement
        raise AssertionError(action)

    return re.sub(r"\{\{ (.*?) \}\}", translated, go)


def read_modelfile(file: Path) -> tuple[dict[str, str], dict[str, list[str]]]:
    """The instructions and the parameters."""
    found = re.findall(r'^([A-Z]+) (?:"""(.*?)"""|(.*?))$', file.read_text(), flags=re.DOTALL | re.MULTILINE)
    parameters: dict[str, list[str]] = {}
    for name, _, value in found:
        if name == "PARAMETER":
            parameters.setdefault(value.split(" ")[0], []).append(value.split(" ", 1)[1].strip('"'))
    return {name: quoted or value for name, quoted, value in found if name != "PARAMETER"}, parameters


def export(make_model_folder, destination: Path, template: str | None, adds_bos: bool = False, **generation) -> Path:
    config, tokenizer = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}, qwen_tokenizer()
    if adds_bos:
        tokenizer.post_processor = TemplateProcessing("<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    if template is not None:
        config["chat_template"] = template
    source = make_model_folder("Qwen2", tokenizer=tokenizer, tokenizer_config=config)
    (source / "generation_config.json").write_text(json.dumps(generation))
    export_gguf(source, destination, "f16", ollama=True)
    return source


TRL = ["gemma", "gemma3", "llama3", "phi3", "qwen2_5", "qwen3", "qwen3_instruct_2507"]


@pytest.mark.first(3)
@pytest.mark.parametrize("name", ["llama2", "plain", "ended", "closed", *TRL])
def test_the_template_writes_the_same_chats(name, make_model_folder, tmp_path):
    if name in TRL:
        if (template := published_templates().get(name)) is None:
            pytest.skip(f"this version of TRL does not have {name}")
    else:
        template = {"llama2": LLAMA2, "plain": PLAIN, "ended": ENDED, "closed": CLOSED_BY_THE_NEXT}[name]
    source = export(make_model_folder, tmp_path / "model.gguf", template)
    instructions, _ = read_modelfile(tmp_path / "Modelfile")
    ours = jinja2.Environment(keep_trailing_newline=True).from_string(as_jinja(instructions["TEMPLATE"]))
    theirs, default = AutoTokenizer.from_pretrained(source), instructions.get("SYSTEM")
    has_system = name not in ("gemma", "closed")
    for chat in [*CHATS, *([SYSTEM, *chat] for chat in CHATS if has_system)]:
        expected = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        if chat[0]["role"] != "system" and default is not None:  # Ollama puts SYSTEM first
            chat = [{"role": "system", "content": default}, *chat]
        system = chat[0]["content"] if chat[0]["role"] == "system" else ""
        assert ours.render(messages=chat, system=system) == expected
    assert (default is not None) == (name == "qwen2_5")


def test_instructions_and_parameters(make_model_folder, tmp_path):
    sampling = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05, "do_sample": True}
    export(make_model_folder, tmp_path / "model.gguf", PLAIN, eos_token_id=[0, 2], **sampling)
    instructions, parameters = read_modelfile(tmp_path / "Modelfile")
    assert instructions["FROM"] == "./model.gguf"
    expected = {
        "temperature": ["0.7"],
        "top_k": ["20"],
        "top_p": ["0.8"],
        "repeat_penalty": ["1.05"],
        "num_ctx": ["128"],
    }
    assert parameters == {**expected, "stop": ["### user:", "<|im_end|>", "<|endoftext|>"]}


def test_without_a_chat_template_a_text_is_completed(make_model_folder, tmp_path):
    export(make_model_folder, tmp_path / "model.gguf", None)
    assert read_modelfile(tmp_path / "Modelfile")[0] == {"FROM": "./model.gguf", "TEMPLATE": "{{ .Prompt }}"}


def test_the_bos_token_is_llama_cpps(make_model_folder, tmp_path):
    for adds_bos in (False, True):
        folder = tmp_path / str(adds_bos)
        export(make_model_folder, folder / "model.gguf", "{{ bos_token }}" + PLAIN, adds_bos)
        assert ("<|im_start|>" in read_modelfile(folder / "Modelfile")[0]["TEMPLATE"]) != adds_bos


@pytest.mark.parametrize(("template", "message"), [
    (NUMBERED, "--ollama cannot convert the chat template.* other texts around its messages.*Export without --ollama"),
    ("{{ messages[-1].content }}", "--ollama cannot convert the chat template.* (it leaves out|does not write) "),
    (PLAIN + '"""', "it writes characters that a Modelfile cannot have"),
])  # fmt: skip
def test_templates_that_ollama_cannot_have(template, message, make_model_folder, tmp_path):
    with pytest.raises(ValueError, match=message):
        export(make_model_folder, tmp_path / "model.gguf", template)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_modelfile_is_kept(make_model_folder, tmp_path):
    (tmp_path / "Modelfile").write_text("mine")
    with pytest.raises(ValueError, match=r"Modelfile exists.*--force"):
        export(make_model_folder, tmp_path / "model.gguf", PLAIN)
    assert (tmp_path / "Modelfile").read_text() == "mine"
    assert not (tmp_path / "model.gguf").exists()
