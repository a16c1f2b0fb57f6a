"""The server's responses to OpenAI's client compared with the library's results."""

import contextlib
import http.client
import json
import random
import re
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import torch
from transformers import AutoTokenizer

from lean_ft.generation import Sampling, generate, sample, sample_steps
from lean_ft.generation.server import ChatServer
from lean_ft.generation.texts import asked_of
from lean_ft.hub.paths import resolve_model_path
from lean_ft.models import Decoder, load_model
from lean_ft.tokenizers import load_tokenizer

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is the capital of Zanemar?"}]
TOKEN = "ThisTokenMustNeverBeSeen"
FOREIGN_HOSTS = [
    *("evil.example", "evil.com@localhost", "localhost#.evil.com", "localhost?.evil.com", "localhost/.evil.com"),
    *("localhost.evil.com", "localhost\\.evil.com", "evil.com:80@localhost:80", "localhost:80:evil.com", "[::1"),
    *("[::1].evil.com", "127.0.0.1.evil.com", "localhost:80@evil.com", "[::1]@evil.com", "localhost, evil.com"),
    *("",),
]
# What clients send by default: vLLM's request, the page of llama.cpp's server, and what OpenAI's client writes out.
DEFAULTS = [
    {"top_k": -1, "min_p": 0, "repetition_penalty": 1.0, "seed": -1, "prediction": None},
    {"top_k": 0, "min_p": 0.0, "length_penalty": 1.0, "stop_token_ids": [], "ignore_eos": False, "min_tokens": 0},
    {
        "skip_special_tokens": True,
        "echo": False,
        "add_generation_prompt": True,
        "use_beam_search": False,
        "priority": 0,
    },
    {
        "continue_final_message": False,
        "add_special_tokens": False,
        "guided_json": None,
        "documents": None,
        "best_of": 1,
    },
    {"n": 1, "frequency_penalty": 0.0, "logit_bias": {}, "logprobs": False, "top_logprobs": 0, "tool_choice": "none"},
    {"max_tokens": -1, "repeat_penalty": 1, "repeat_last_n": 64, "typical_p": 1, "mirostat": 0, "dry_multiplier": 0.0},
    {"xtc_probability": 0, "xtc_threshold": 0.1, "dynatemp_range": 0, "cache_prompt": True, "timings_per_token": True},
    {"audio": None, "functions": None, "function_call": None, "reasoning_effort": None, "web_search_options": None},
    {"response_format": {"type": "text"}, "modalities": ["text"], "verbosity": "medium", "user": None, "unknown": None},
    {"stream_options": {"include_usage": False, "continuous_usage_stats": False}, "stop": [], "tools": []},
]


@pytest.fixture(scope="module")
def model() -> Decoder:
    return load_model("tiny")


@pytest.fixture(scope="module")
def server(model: Decoder) -> Iterator[ChatServer]:
    with ChatServer(model, load_tokenizer("tiny"), "mine", max_new_tokens=24) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture(scope="module")
def client(server: ChatServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    assert [one.id for one in client.models.list()] == ["mine"]
    assert client.models.retrieve("mine").owned_by == "lean_ft"
    with pytest.raises(openai.NotFoundError, match="no such model: 'other'"):
        client.models.retrieve("other")
    with pytest.raises(openai.NotFoundError, match="no such model: 'other'. This server has 'mine'"):
        client.chat.completions.create(model="other", messages=CHAT)


@pytest.mark.first(3)
@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0, "max_tokens": 9},
        {"temperature": 0, "stop": ["sum"]},
        {"temperature": 1.5, "seed": 3, "max_completion_tokens": 12, "top_p": 0.9, "extra_body": {"top_k": 9}},
        {"temperature": 2.0, "seed": 4, "extra_body": {"top_k": 5, "min_p": 0.01}},
        {"temperature": 0},
    ],
)
def test_answers_whole_and_streamed_are_the_librarys(client: openai.OpenAI, model: Decoder, settings: dict) -> None:
    most = settings.get("max_tokens") or settings.get("max_completion_tokens") or 24
    ours = {
        k: v for k, v in {**settings, **settings.get("extra_body", {})}.items() if k != "extra_body" and "max" not in k
    }
    tokenizer = load_tokenizer("tiny")
    (expected,) = generate(model, [CHAT], tokenizer, max_new_tokens=most, **ours)
    how, prompts = asked_of(model, tokenizer, [CHAT], True, {"max_new_tokens": most, **ours})
    (sampled,) = sample(model, prompts, how, decode=tokenizer.decode)
    whole = client.chat.completions.create(model="mine", messages=CHAT, **settings)
    assert whole.choices[0].message.content == expected
    usage = {"stream_options": {"include_usage": True}}
    *chunks, last = client.chat.completions.create(model="mine", messages=CHAT, stream=True, **usage, **settings)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    assert last.usage == whole.usage
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(prompts[0]), len(sampled.ids))
    reasons = {whole.choices[0].finish_reason, chunks[-1].choices[0].finish_reason}
    assert reasons == {"stop" if sampled.ended else "length"}


def test_several_clients_get_their_own_answers(client: openai.OpenAI) -> None:
    def ask(seed: int) -> str:
        made = client.chat.completions.create(model="mine", messages=CHAT, temperature=3, seed=seed, max_tokens=8)
        return made.choices[0].message.content or ""

    alone = [ask(seed) for seed in range(4)]
    assert len(set(alone)) == 4
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(4))) == alone


def test_a_prompt_that_is_read_in_parts_has_the_same_answer(model: Decoder) -> None:
    prompt, how = list(range(5, 305)), Sampling(6)
    (expected,) = sample(model, [prompt], how)
    steps = [token for (token,) in sample_steps(model, [prompt], how, prompt_part=64)]
    assert steps == [None] * 4 + expected.ids


def test_parts_of_text_are_read_as_one(client: openai.OpenAI) -> None:
    parts = [
        CHAT[0],
        {"role": "user", "content": [{"type": "text", "text": t} for t in ("What is the capital", " of Zanemar?")]},
    ]
    asked = [client.chat.completions.create(model="mine", messages=m, temperature=0) for m in (CHAT, parts)]
    assert asked[0].choices[0].message.content == asked[1].choices[0].message.content


@pytest.mark.first(4)
@pytest.mark.parametrize("defaults", DEFAULTS, ids=lambda one: ",".join(one)[:60])
def test_values_without_effect_are_accepted(client: openai.OpenAI, defaults: dict) -> None:
    plain = {"temperature": 0, "max_tokens": 6}
    given = {"max_completion_tokens": 6, "temperature": 0} if "max_tokens" in defaults else plain
    expected, found = (
        client.chat.completions.create(model="mine", messages=CHAT, **more)
        for more in (plain, {**given, "extra_body": defaults})
    )
    assert found.choices[0].message.content == expected.choices[0].message.content


def test_messages_that_clients_send_back_are_accepted(server: ChatServer) -> None:
    empty = dict.fromkeys(("refusal", "audio", "function_call", "tool_calls", "reasoning", "provider_specific_fields"))
    for answer in ({"role": "assistant", "content": None}, {"role": "assistant", "content": "a", **empty}):
        status, found = ask(server, json.dumps({"messages": [*CHAT, answer, CHAT[1]], "max_tokens": 1}).encode())
        assert status == 200, found
    called = {"role": "tool", "tool_call_id": "call_1", "content": "42"}
    _, found = ask(server, json.dumps({"messages": [*CHAT, called], "max_tokens": 1}).encode())
    assert "unknown" not in str(found)  # a template without this role refuses it


@pytest.mark.first(2)
@pytest.mark.parametrize("begun", ["The answer, in words, is", " two  \n", ""])
@pytest.mark.parametrize("before", [CHAT, []], ids=["chat", "alone"])
def test_a_last_assistant_message_is_continued(client: openai.OpenAI, model: Decoder, before: list, begun: str) -> None:
    if not before and not begun:
        pytest.skip("no text at all is refused")
    chat = [*before, {"role": "assistant", "content": begun}]
    theirs = AutoTokenizer.from_pretrained(resolve_model_path("tiny"))
    prompt = theirs.apply_chat_template(chat, continue_final_message=True, return_dict=False)
    tokenizer = load_tokenizer("tiny")
    how, _ = asked_of(model, tokenizer, [CHAT], True, {"max_new_tokens": 8})
    (expected,) = sample(model, [prompt], how)
    for more in ({}, {"continue_final_message": True, "add_generation_prompt": False}):
        found = client.chat.completions.create(
            model="mine", messages=chat, temperature=0, max_tokens=8, extra_body=more
        )
        assert found.usage.prompt_tokens == len(prompt)
        assert found.choices[0].message.content == tokenizer.decode(expected.ids, skip_special_tokens=True)


def test_requests_sent_in_part_delay_nobody_and_are_ended(model: Decoder, monkeypatch) -> None:
    monkeypatch.setattr("lean_ft.generation.connections.HEAD_SECONDS", 3)
    monkeypatch.setattr("lean_ft.generation.server.BODY_SECONDS", 3)
    monkeypatch.setattr("lean_ft.generation.connections.MOST_CONNECTIONS", 120)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: bearer %b\r\n" % TOKEN.encode()
    body = b"Content-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
    whole = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %b\r\n\r\n" % TOKEN.encode()
    with ChatServer(model, load_tokenizer("tiny"), "mine", token=TOKEN) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for before, sent in ((b"", b""), (b"", head), (b"", head + body), (whole, head)):
            held = [socket.create_connection(server.address) for _ in range(100)]
            for one in held:
                one.sendall(before)
                assert not before or one.recv(4096)
                one.sendall(sent)
            started = time.monotonic()
            own = openai.OpenAI(base_url=server.url, api_key=TOKEN, max_retries=0, timeout=30)
            assert own.models.retrieve("mine").id == "mine"
            assert time.monotonic() - started < 2.5  # before any of them is ended
            for one in held:
                one.settimeout(30)
                with contextlib.suppress(ConnectionResetError):
                    while one.recv(4096):
                        pass
                one.close()
        more = [socket.create_connection(server.address) for _ in range(200)]
        assert openai.OpenAI(base_url=server.url, api_key=TOKEN, max_retries=0).models.retrieve("mine").id == "mine"
        for one in more:
            one.close()


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        *(({"Host": host}, b"{}", 403) for host in FOREIGN_HOSTS),  # DNS rebinding
        *(
            ({"Host": host}, b"{", 400)
            for host in ("localhost", "LocalHost:8000", "127.1.2.3:80", "[::1]:8000", "[::1]")
        ),
        *(({"Content-Type": kind}, b"{", 400) for kind in ("Application/JSON", "application/json ; Charset=UTF-8")),
        ({"Content-Type": "application/jsonp"}, b"{}", 415),
        ({"Content-Type": "text/plain"}, b"{}", 415),  # browsers send it without a preflight request
        ({}, b"{", 400),
        ({}, b"[]", 400),
        ({"Content-Length": "99999999999"}, b"", 413),
    ],
)
def test_what_is_no_request_is_refused(server: ChatServer, headers: dict, body: bytes, status: int) -> None:
    connection = http.client.HTTPConnection(*server.address, timeout=30)
    connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json", **headers})
    answer = connection.getresponse()
    assert answer.status == status
    assert json.loads(answer.read())["error"]["message"]
    connection.close()


TOOL = '{"type": "function", "function": {"name": "f"}}'


def with_parameters(value: str, key: str = "enum") -> str:
    return f'{{"type": "function", "function": {{"name": "f", "parameters": {{"{key}": {value}}}}}}}'


def called(arguments: str) -> str:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return json.dumps({"role": "assistant", "tool_calls": [call]})


def ask(server: ChatServer, body: bytes) -> tuple[int, dict]:
    """Return the status and the body of the response."""
    connection = http.client.HTTPConnection(*server.address, timeout=60)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (f'"tools": [{TOOL}]', "the chat template writes no tools"),
        (f'"tools": [{TOOL}, {TOOL}]', "two tools have the same name"),
        (f'"tools": [{", ".join([TOOL] * 129)}]', "at most 128 items"),
        ('"tools": [{"type": "function", "function": {"name": "a b"}}]', "tool 1, function.name is 'a b'"),
        ('"tools": [{"type": "function", "name": "f"}]', "tool 1, function is missing"),
        ('"tools": [{"type": "custom", "custom": {}}]', "tool 1, type is 'custom': expected 'function'"),
        (f'"tools": [{with_parameters("[" * 190 + "]" * 190)}]', "nested too deeply: more than 100 containers"),
        (f'"tools": [{with_parameters("[" * 300 + "]" * 300)}]', "recursion limit exceeded"),
        (f'"tools": [{with_parameters(json.dumps("x" * 66_000))}]', "too many for the model's context"),
        (f'"tools": [{with_parameters("{}", "properties")}]', "the chat template writes no tools"),
        (f'"tools": [{with_parameters("[1]", "properties")}]', "expected an object as `properties`"),
        ('"tool_choice": "required"', "tool_choice is 'required': expected one of the tools (none is given)"),
        ('"tool_choice": "any"', "tool_choice.type is 'any': expected 'none', 'auto', 'required' or 'function'"),
        (
            f'"tools": [{TOOL}], "tool_choice": {{"type": "function", "function": {{"name": "g"}}}}',
            "expected one of the tools (f)",
        ),
        ('"parallel_tool_calls": 1', "parallel_tool_calls is 1"),
        ('"function_call": {"name": "f"}', "function_call is not supported"),
        (f'"messages": [{json.dumps(CHAT[1])}, {called("{}")}]', "the last message calls tools; send their results"),
        (f'"messages": [{called("{}")}, {{"role": "tool", "content": "1"}}]', "the chat template does not write"),
        (f'"messages": [{called("[1]")}]', "arguments is '[1]': expected a JSON object in a string"),
        (f'"messages": [{called("{")}]', "arguments is '{'"),
        (f'"messages": [{called("[" * 200)}]', "message 1, tool call 1, function.arguments is"),
        ('"n": 2', "n is not supported. Remove it"),
        ('"logprobs": true', "logprobs is not supported"),
        ('"repetition_penalty": 1.1', "repetition_penalty is not supported"),
        ('"continue_final_message": true', "a last message of the assistant is continued"),
        ('"add_generation_prompt": false', "a last message of the assistant is continued"),
        ('"top_k": -2', "top_k is -2"),
        ('"max_completion_tokens": -2', "max_completion_tokens is -2"),
        ('"messages": [{"role": "user", "content": null}]', "message 1, content is missing"),
        ('"max_tokens": 100000', "more than the model's context of 512"),
        ('"max_tokens": 0', "max_tokens is 0: expected greater than or equal to 1"),
        ('"temperature": -1', "temperature is -1: expected greater than or equal to 0"),
        ('"temperature": "hot"', "temperature is 'hot': expected a valid number"),
        ('"temprature": 1', "unknown field: temprature. Did you mean 'temperature'?"),
        ('"messages": []', "messages is []: List should have at least 1 item"),
        (
            '"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]',
            "message 1, content part 1, image_url.url is 'x': expected a data URL",
        ),
        ('"stream_options": 5', "stream_options is 5: expected an object"),
        ('"stop": [5]', "stop 1 is 5"),
        (f'"stop": "{"x" * 1_000_000}"', "at most 256 characters"),
        ('"stop": ["a", "b", "c", "d", "e"]', "at most 4 items"),
        ('"seed": 9223372036854775808', "seed is 9223372036854775808"),
        ('"temperature": 1e400', "temperature is inf"),
        ('"temperature": NaN', "temperature is nan"),
        ('"temperature": 1e-300', "temperature is 1e-300; expected 0 (the likeliest token), or 0.0001 or more"),
        ('"max_tokens": true', "max_tokens is True"),
        (f'"user": {"[" * 100_000}1{"]" * 100_000}', "not JSON"),
        (f'"messages": [{{"role": "user", "content": "{"word " * 200_000}"}}]', "too many for the model's context"),
        (
            f'"messages": [{{"role": "assistant", "content": "a", "reasoning_content": "{"word " * 200_000}"}}]',
            "too many for the model's context",
        ),
        ('"messages": [{"role": "nobody", "content": "a"}]', "message 1, role is 'nobody'"),
        ('"messages": [{"role": "user"}]', "message 1, content is missing"),
        ('"messages": [{"role": "user", "content": ""}]', "expected a message with text"),
        ('"messages": [{"role": "user", "content": "\\ud800"}]', "not JSON"),
    ],
    ids=lambda value: value[:40],
)
def test_a_field_out_of_its_bounds_is_a_message(server: ChatServer, fields: str, message: str) -> None:
    chat = "" if "messages" in fields else f'"messages": {json.dumps(CHAT)}, '
    status, answer = ask(server, f"{{{chat}{fields}}}".encode())
    assert status == 400
    assert message in answer["error"]["message"] and len(answer["error"]["message"]) < 300
    assert answer["error"]["type"] == "invalid_request_error"


HOSTILE = [
    None,
    True,
    -1,
    0,
    2**63,
    1e400,
    1e-300,
    "",
    "x" * 300,
    [],
    {},
    [[[]]],
    {"a": {"b": []}},
    [None],
    "\x00",
    "\u202e",
]


@pytest.mark.parametrize("count", [40, pytest.param(2000, marks=pytest.mark.long)])
def test_mutated_requests_leave_a_steady_client_its_answers(
    server: ChatServer, client: openai.OpenAI, count: int
) -> None:
    draw = random.Random(0)
    whole = {
        "messages": CHAT,
        "model": "mine",
        "stop": ["q"],
        "seed": 1,
        "max_tokens": 3,
        "temperature": 0.5,
        "top_p": 0.9,
    }
    whole |= {"top_k": 4, "n": 1, "stream_options": {"include_usage": True}, "min_p": 0.1, "user": "a"}

    def mutated() -> bytes:
        body = json.loads(json.dumps(whole))
        for _ in range(draw.randint(1, 3)):
            messages = body.get("messages")
            place = draw.choice([body, body, messages[0]] if isinstance(messages, list) and messages else [body])
            if isinstance(place, dict) and place:
                place[draw.choice([*place, "more"])] = draw.choice(HOSTILE)
        raw = json.dumps(body).encode()
        cut = draw.randrange(len(raw))
        return draw.choice([raw, raw, raw, raw[:cut], raw[:cut] + bytes([draw.randrange(256)]) + raw[cut + 1 :]])

    def steady() -> str:
        made = client.chat.completions.create(model="mine", messages=CHAT, temperature=0, max_tokens=8, timeout=60)
        return made.choices[0].message.content or ""

    def seconds_of(answer: str) -> float:
        started = time.perf_counter()
        assert steady() == answer
        return time.perf_counter() - started

    expected = steady()
    alone, beside = [seconds_of(expected) for _ in range(15 if count > 1000 else 1)], list[float]()
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, server, mutated()) for _ in range(count)]
        while not all(one.done() for one in asked):
            beside.append(seconds_of(expected))
    statuses = {one.result()[0] for one in asked}
    assert {200, 400} <= statuses <= {200, 400, 404}
    if count > 1000:  # its turn comes after at most 3 others, so it takes about 4 times as long at most
        assert statistics.median(beside) < 6 * statistics.median(alone)


def test_a_client_that_disconnects_costs_one_more_token(
    server: ChatServer, client: openai.OpenAI, capsys: pytest.CaptureFixture
) -> None:
    """Each pass of the model waits for the test."""
    passes, num_passes = threading.Semaphore(0), 0

    def wait(*_: object) -> None:
        nonlocal num_passes
        assert passes.acquire(timeout=60)
        num_passes += 1

    hook = server.model.register_forward_pre_hook(wait)
    try:
        given = {"temperature": 2, "seed": 1, "max_tokens": 400}
        stream = client.chat.completions.create(model="mine", messages=CHAT, stream=True, **given)
        passes.release(3)
        next(iter(stream))
        stream.close()
        deadline, told = time.monotonic() + 60, ""
        while "client disconnected" not in told:
            assert time.monotonic() < deadline
            time.sleep(0.02)
            told += capsys.readouterr().out
        passes.release(100)
        usage = client.chat.completions.create(model="mine", messages=CHAT, max_tokens=2, timeout=60).usage
    finally:
        hook.remove()
        passes.release(1000)
    # 3 before, the one that was waiting, and 2 for the next client.
    assert num_passes <= 3 + 1 + 2
    line = next(line for line in told.splitlines() if "client disconnected" in line)
    assert re.search(
        r"127\.0\.0\.1: [0-3] completion tokens, \d+ prompt tokens, \d+\.\d s, client disconnected", line
    ), line
    said = f"{usage.completion_tokens} completion tokens, {usage.prompt_tokens} prompt tokens"
    assert f"{said}, " in capsys.readouterr().out


def test_another_address_needs_a_token_that_stays_unseen(model: Decoder, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = load_tokenizer("tiny")
    for host in ("0.0.0.0", "::"):
        with pytest.raises(ValueError, match="Set the environment variable LEANFT_TOKEN"):
            ChatServer(model, tokenizer, "mine", host=host)
    with ChatServer(model, tokenizer, "mine", host="0.0.0.0", token=TOKEN) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = server.url.replace("0.0.0.0", "127.0.0.1")
        assert [m.id for m in openai.OpenAI(base_url=url, api_key=TOKEN, max_retries=0).models.list()] == ["mine"]
        for wrong in ("none", TOKEN[:-1], "é"):
            connection = http.client.HTTPConnection("127.0.0.1", server.address[1], timeout=30)
            connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {wrong}".encode()})
            answer = connection.getresponse()
            assert answer.status == 401 and TOKEN not in answer.read().decode()
        server.shutdown()
    assert TOKEN not in "".join(capsys.readouterr())


def test_an_answer_that_fails_is_an_error_and_the_server_goes_on(server: ChatServer, client: openai.OpenAI) -> None:
    weight = server.model.output_weight
    with torch.no_grad():
        kept = weight.clone()
        weight.fill_(float("nan"))
        for stream in (False, True):
            with pytest.raises(openai.APIError, match="not finite"):
                list(client.chat.completions.create(model="mine", messages=CHAT, stream=stream))
        weight.copy_(kept)
    assert client.chat.completions.create(model="mine", messages=CHAT, max_tokens=2).choices
