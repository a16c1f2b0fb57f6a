"""Images in requests of OpenAI's client."""

import base64
import io
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from PIL import Image

from lean_ft.generation import generate, open_model
from lean_ft.generation.server import ChatServer
from tests.training.image_runs import model_folder, picture


def data_url(image: Image.Image, kind: str = "PNG") -> str:
    file = io.BytesIO()
    image.save(file, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def asking(*urls: Any, text: str = "What is this?") -> list[Any]:
    parts = [{"type": "image_url", "image_url": url if isinstance(url, dict) else {"url": url}} for url in urls]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    return open_model(model_folder("qwen3_vl", tmp_path_factory.mktemp("model")), device="cpu", dtype="float32")


def serving(server: ChatServer) -> Iterator[openai.OpenAI]:
    with server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)
        server.shutdown()


@pytest.fixture(scope="module")
def client(opened: tuple[Any, Any]) -> Iterator[openai.OpenAI]:
    yield from serving(ChatServer(*opened, "mine", max_new_tokens=8))


def answer(client: openai.OpenAI, messages: list[Any]) -> Any:
    return client.chat.completions.create(model="mine", messages=messages, temperature=2.0, seed=0)


def test_completions_are_those_of_the_library(client: openai.OpenAI, opened: tuple[Any, Any]):
    images = [picture("qwen3_vl", number) for number in range(3)]
    for urls in ([0], [1], [1, 2], []):
        given: Any = {"prompt": "What is this?", "images": [data_url(images[number]) for number in urls]}
        (expected,) = generate(opened[0], [given], opened[1], max_new_tokens=8, temperature=2.0)
        answered = answer(client, asking(*(data_url(images[number]) for number in urls)))
        assert answered.choices[0].message.content == expected
        width, height = 16 * 2, 16 * 2
        tokens = sum(image.width // width * (image.height // height) for image in (images[number] for number in urls))
        assert answered.usage.prompt_tokens > tokens


@pytest.mark.long
def test_other_forms_of_an_image_equal_openais(client: openai.OpenAI):
    url = data_url(picture("qwen3_vl", 0))
    encoded = url.partition(",")[2]
    expected = answer(client, asking(url)).choices[0].message.content
    parts: list[Any] = [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encoded}},
        {"type": "image", "source": {"type": "url", "url": url}},
        {"type": "image", "image": encoded},
        {"type": "image", "base64": encoded},
        {"type": "input_image", "image_url": url, "detail": "auto"},
        {"type": "image_url", "image_url": encoded},
    ]
    for part in parts:
        asked = asking(url)
        content: Any = asked[0]["content"]
        content[[one["type"] for one in content].index("image_url")] = part
        assert answer(client, asked).choices[0].message.content == expected
    for part in (
        {"type": "image", "path": "/etc/passwd"},
        {"type": "image", "source": {"type": "url", "url": "file:///etc/passwd"}},
    ):
        with pytest.raises(openai.BadRequestError, match="fetches no URL and reads no file"):
            answer(client, [{"role": "user", "content": [part]}])  # pyright: ignore[reportArgumentType]
    with pytest.raises(openai.BadRequestError, match="an image is an object of"):
        answer(client, [{"role": "user", "content": [{"type": "image"}]}])  # pyright: ignore[reportArgumentType]


def big() -> str:
    file = io.BytesIO()
    Image.new("1", (20_000, 10_000)).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("https://example.com/cat.png", "fetches no URL"),
        ("/etc/passwd", "fetches no URL"),
        ("file:///etc/passwd", "fetches no URL"),
        ("data:image/png;base64,AAAA", "in none of the formats"),
        ("data:text/plain,hello", "expected data:image/png;base64"),
        (data_url(picture("qwen3_vl", 0))[:-400], "broken or incomplete"),
        ({"url": data_url(picture("qwen3_vl", 0)), "detail": "low"}, "'auto' or 'high'"),
        (data_url(Image.new("RGB", (900, 2))), "differ by at most 200 times"),
    ],
)
def test_other_images_are_refused(client: openai.OpenAI, url: Any, reason: str):
    with pytest.raises(openai.BadRequestError, match=reason):
        answer(client, asking(url))


@pytest.mark.long
def test_an_image_with_too_many_pixels_is_refused_before_it_is_decoded(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError, match="20000 x 10000 pixels; expected between 1 and"):
        answer(client, asking(big()))


def test_other_parts_and_models_without_a_tower_are_refused(client: openai.OpenAI, opened: tuple[Any, Any]):
    video: Any = [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "data:,"}}]}]
    with pytest.raises(openai.BadRequestError, match="video_url"):
        answer(client, video)
    text_alone = open_model(opened[0].source.folder, device="cpu", dtype="float32", images="none")
    for other in serving(ChatServer(*text_alone, "mine")):
        with pytest.raises(openai.BadRequestError, match="reads texts alone"):
            answer(other, asking(data_url(picture("qwen3_vl", 0))))
