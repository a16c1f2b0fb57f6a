"""Each family's form of calls, as its published templates and models write it."""

import random
from typing import Any

import pytest

from lean_ft.tools.calls import FORMS, Call, read_turn

STRING, NUMBER, OTHER = {"type": "string"}, {"type": "integer"}, {"type": ["string", "integer"], "nullable": True}
TYPES = {"f": {"x": STRING, "n": NUMBER, "o": OTHER, "maybe": {"type": "string", "nullable": True}}}
ARGUMENTS = '{"x": "a b", "n": 3}'
CALL = Call("f", {"x": "a b", "n": 3})
CODER = (
    "<tool_call>\n<function=f>\n<parameter=x>\na "
    "b\n</parameter>\n<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>"
)
GLM = (
    "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>a "
    "b</arg_value>\n<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
)
V3 = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜>"
V31 = f"<｜tool▁call▁begin｜>f<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>"
HARMONY = f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{ARGUMENTS}"
HERMES = f'<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>'
LLAMA = f'{{"name": "f", "parameters": {ARGUMENTS}}}'
MISTRAL = f'{{"name": "f", "arguments": {ARGUMENTS}, "id": "a1b2c3d4e"}}'

# form, text, content, calls
READ: list[tuple[str, str, str, list[Call]]] = [
    ("Hermes", HERMES, "", [CALL]),
    ("Hermes", f"Yes.\n{HERMES}\n{HERMES}", "Yes.\n\n", [CALL, CALL]),
    ("Hermes", HERMES.removesuffix("</tool_call>"), "", [CALL]),  # the model stops after the call
    ("Hermes", '<tool_call>{"name": "f", "arguments": {"x": "a\nb"}}</tool_call>', "", [Call("f", {"x": "a\nb"})]),
    ("Hermes", '<tool_call>{"name": "f", "arguments": "{\\"n\\": 1}"}</tool_call>', "", [Call("f", {"n": 1})]),
    ("Hermes", f"<think>I would {HERMES}</think>\n{HERMES}", f"<think>I would {HERMES}</think>\n", [CALL]),
    ("Hermes", f"<think>I would {HERMES}", f"<think>I would {HERMES}", []),
    ("Hermes", "No call.", "No call.", []),
    ("Qwen3-Coder", CODER, "", [CALL]),
    ("Qwen3-Coder", f"A {CODER} B {CODER}", "A  B ", [CALL, CALL]),
    ("Qwen3-Coder", "<tool_call><function=f></function></tool_call>", "", [Call("f", {})]),
    ("GLM", GLM, "", [CALL]),
    ("GLM", GLM.replace("\n", ""), "", [CALL]),  # GLM-4.7
    ("GLM", "<tool_call>f\n</tool_call>", "", [Call("f", {})]),
    ("Mistral", f"[TOOL_CALLS] [{MISTRAL}, {MISTRAL}]", "", [CALL._replace(id="a1b2c3d4e")] * 2),
    ("Mistral", f"A[TOOL_CALLS]f[ARGS]{ARGUMENTS}[TOOL_CALLS]f[CALL_ID]abc[ARGS]{ARGUMENTS}", "A",
        [CALL, CALL._replace(id="abc")]),
    ("DeepSeek", f"A<｜tool▁calls▁begin｜>{V3}\n{V3}", "A<｜tool▁calls▁begin｜>\n", [CALL, CALL]),
    ("DeepSeek", V31 + V31, "", [CALL, CALL]),
    ("gpt-oss", HARMONY, "", [CALL]),
    ("gpt-oss", f" to=functions.f<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>", "", [CALL]),
    ("gpt-oss", f"<|channel|>analysis<|message|>to=functions.f?<|end|><|start|>assistant{HARMONY}", "to=functions.f?",
        [CALL]),
    ("gpt-oss", "<|channel|>final<|message|>Done.", "Done.", []),
    ("FunctionGemma", "<start_function_call>call:f{x:<escape>a b<escape>,n:3}<end_function_call>", "", [CALL]),
    ("Gemma 4", '<|tool_call>call:f{x:<|"|>a b<|"|>,n:3}<tool_call|>', "", [CALL]),
    ("Gemma 4", '<|channel>thought\nhm<channel|><|tool_call>call:f{n:3,x:<|"|>a b<|"|>}<tool_call|>',
        "<|channel>thought\nhm<channel|>", [CALL]),
    ("Gemma 4", '<|tool_call>call:f{x:{a:[<|"|>{b:None, c:<|"|>,None,{d:true}]}}<tool_call|>', "",
        [Call("f", {"x": {"a": ["{b:None, c:", None, {"d": True}]}})]),
    ("LFM2", "A<|tool_call_start|>[f(x='a b', n=3), f(x=\"a b\", n=3)]<|tool_call_end|>", "A", [CALL, CALL]),
    ("LFM2", "<|tool_call_start|>[f(x=[{'a': None}, {\"b\": null}, true, -1])]<|tool_call_end|>", "",
        [Call("f", {"x": [{"a": None}, {"b": None}, True, -1]})]),
    ("Llama 3", LLAMA, "", [CALL]),
    ("Llama 3", f"<|python_tag|>{LLAMA}", "", [CALL]),
    ("Llama 3", f"{LLAMA}; {LLAMA}\n{LLAMA}", "", [CALL, CALL, CALL]),
    ("Llama 3", 'An answer: {"name": 1}', 'An answer: {"name": 1}', []),
    ("Llama 3", '{"answer": 1}', '{"answer": 1}', []),
    ("Llama 4", "[f(x='a b', n=3)]", "", [CALL]),
    ("Llama 4", "[1] says so", "[1] says so", []),
]  # fmt: skip


def form_of(name: str) -> Any:
    return next(form for names, form in FORMS.items() if names.startswith(name))


@pytest.mark.parametrize(("form", "text", "content", "calls"), READ)
def test_the_forms(form: str, text: str, content: str, calls: list[Call]) -> None:
    assert read_turn(form_of(form), text, TYPES) == (content, calls)


def test_a_turn_inside_of_reasoning_that_the_prompt_opened() -> None:
    assert read_turn(form_of("Hermes"), f"Hm {HERMES}</think>{HERMES}", TYPES, "<think>") == (
        f"Hm {HERMES}</think>",
        [CALL],
    )
    assert read_turn(form_of("Hermes"), f"Hm {HERMES}", TYPES, "<think>") == (f"Hm {HERMES}", [])


@pytest.mark.parametrize("form", ["Qwen3-Coder", "GLM"])
@pytest.mark.parametrize(
    ("parameter", "text", "value"),
    [
        ("x", "3", "3"),
        ("x", "null", "null"),
        ("maybe", "None", None),
        ("maybe", "no", "no"),
        ("n", "3", 3),
        ("n", "three", "three"),
        ("o", "3", 3),
        ("o", "True", True),
        ("o", '[1, {"a": null}]', [1, {"a": None}]),
        ("unknown", '"a"', "a"),
        ("x", " a\n\n b ", " a\n\n b "),
    ],
)
def test_plain_values_have_the_type_of_the_schema(form: str, parameter: str, text: str, value: Any) -> None:
    coder = f"<tool_call>\n<function=f>\n<parameter={parameter}>\n{text}\n</parameter>\n</function>\n</tool_call>"
    glm = f"<tool_call>f\n<arg_key>{parameter}</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
    turn = read_turn(form_of(form), coder if form == "Qwen3-Coder" else glm, TYPES)
    assert turn.calls == [Call("f", {parameter: value})]


MALFORMED = [
    *[("Hermes", f"<tool_call>{body}</tool_call>") for body in (
        "", "{", "[1]", "1", '{"name": "f"}', '{"name": 1, "arguments": {}}', '{"name": "f", "arguments": []}',
        "[" * 100_000,
        '{"name": "f", "arguments": {"x": NaN}}', '{"name": "f", "arguments": {"x": 1e999}}',
        '{"name": "f", "arguments": {"x": "\\ud800"}}',
        '{"name": "f", "arguments": {"\\ud800": 1}}', '{"name": "\\ud800", "arguments": {}}',
        '{"name": "f", "arguments": {"x": "\\ufdd0"}}',
        f'{{"name": "f", "arguments": {{"n": {"9" * 5000}}}}}', f"{HERMES[11:-12]} and more",
    )],
    ("Qwen3-Coder", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
    ("Qwen3-Coder", "<tool_call><function=f><parameter=x>a"),
    ("Qwen3-Coder", "<tool_call><function=f><parameter=x>a</function></tool_call>"),
    ("GLM", "<tool_call>f<arg_key>x</arg_key>"),
    ("Mistral", "[TOOL_CALLS]f{}"),
    ("DeepSeek", "<｜tool▁call▁begin｜>f{}<｜tool▁call▁end｜>"),
    ("gpt-oss", "<|channel|>commentary to=functions.f<|message|>{x: 1}"),
    ("gpt-oss", "<|channel|>commentary to=functions.<|message|>{}"),
    ("Gemma 4", "<|tool_call>call:f<tool_call|>"),
    ("LFM2", "<|tool_call_start|>[f(1)]<|tool_call_end|>"),
    ("LFM2", "<|tool_call_start|>[f(x=open('/etc/passwd'))]<|tool_call_end|>"),
    ("LFM2", "<|tool_call_start|>[f(x={1, 2})]<|tool_call_end|>"),
    ("LFM2", "<|tool_call_start|>[f(x=" + "-" * 100_000 + "1)]<|tool_call_end|>"),
    ("LFM2", "<|tool_call_start|>[f(x='\\d\0')]<|tool_call_end|>"),
    ("Llama 3", '{"name": "f"'),
    ("Llama 3", "<|python_tag|>print(1)"),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text"), MALFORMED, ids=[text[:60].replace("\0", "0") for _, text in MALFORMED])
def test_a_malformed_call_is_one_error(form: str, text: str) -> None:
    """Its text stays in the content, for reward functions and samples."""
    content, [call] = read_turn(form_of(form), text, TYPES)
    assert content == text
    assert call.arguments == {} and call.error.startswith("error: malformed tool call: ") and len(call.error) < 300


def test_the_text_of_a_malformed_call_stays_beside_a_call() -> None:
    broken = '<tool_call>{"name": "f"</tool_call>'
    content, calls = read_turn(form_of("Hermes"), f"<think>Hm</think>A {broken} B {HERMES} C", TYPES)
    assert content == f"<think>Hm</think>A {broken} B  C"
    assert [(call.name, bool(call.error)) for call in calls] == [("", True), ("f", False)]
    assert read_turn(form_of("LFM2"), "<|tool_call_start|>[]<|tool_call_end|>",
        TYPES) == ("<|tool_call_start|>[]<|tool_call_end|>", [])  # fmt: skip


def test_random_changes_of_calls_raise_nothing() -> None:
    chance = random.Random(0)
    parts = [text for _, text, _, _ in READ] + [text[:200] for _, text in MALFORMED]
    for _ in range(2000):
        one, other = chance.choice(parts), chance.choice(parts)
        text = one[: chance.randrange(len(one) + 1)] + other[chance.randrange(len(other) + 1) :]
        for form in FORMS.values():
            for call in read_turn(form, text, TYPES).calls:
                assert bool(call.error) != bool(call.name)
