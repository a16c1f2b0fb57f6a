"""generate, chat and evaluate with images, on a small random model."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from lean_ft.generation import generate, open_model
from tests.recipes.conftest import config_of, recipe_module
from tests.training.image_runs import model_folder, write_rows

ASKED = "What is this?"
DRAWN = {"max_new_tokens": 12, "temperature": 2.0}  # greedy tokens of a random model are often no text
MODEL = ("model.dtype=float32", "device=cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `model`, and `rows` with photos.jsonl and the pictures 0.png to 3.png."""
    top = tmp_path_factory.mktemp("images")
    model_folder("qwen3_vl", top / "model")
    write_rows("qwen3_vl", top / "rows")
    return top


@pytest.fixture
def expected(folder: Path) -> Any:
    model, tokenizer = open_model(folder / "model", device="cpu", dtype="float32")

    def of(*numbers: int, prompt: str = ASKED) -> str:
        images = [str(folder / "rows" / f"{number}.png") for number in numbers]
        return generate(model, [{"prompt": prompt, "images": images}], tokenizer, **DRAWN)[0]

    return of


def run(recipe: str, folder: Path, *settings: str) -> Any:
    longest = () if recipe == "evaluate" else [f"{name}={value}" for name, value in DRAWN.items()]
    return recipe_module(recipe).main(config_of(recipe, f"model.path={folder / 'model'}", *MODEL, *longest, *settings))


@pytest.mark.long
def test_generate(folder: Path, expected: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder / "rows")
    assert expected(0) != expected(1) != expected()
    assert run("generate", folder, f"prompt={ASKED}", "image=0.png") == [expected(0)]
    assert run("generate", folder, f"prompt={ASKED}", "image=[2.png,3.png]") == [expected(2, 3)]
    marked = "First <image> and then <image>."
    assert run("generate", folder, f"prompt={marked}", "image=[2.png,3.png]") == [expected(2, 3, prompt=marked)]
    monkeypatch.chdir(folder)
    rows = [{"prompt": ASKED, "images": ["1.png"]}, {"prompt": ASKED}, {"prompt": ASKED, "image": "0.png"}]
    (folder / "rows" / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    answers = run("generate", folder, "prompts_file=rows/asked.jsonl", "batch_size=2")
    assert answers == [expected(1), expected(), expected(0)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["image=missing.png"], "cannot read the image"),
        (["image=https://example.com/a.png"], "URLs are not fetched"),
        (["image=rows/0.png", "model.images=none"], "the model reads texts alone"),
        (["image=rows/0.png", "chat=false"], "needs a chat template"),
        (
            ["image=rows/0.png", "prompt=<image> <image>"],
            "1 image in its field `images`, and its texts have <image> 2 times",
        ),
    ],
)
def test_generate_refuses(folder: Path, settings: list[str], message: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)
    with pytest.raises(ValueError, match=message):
        run("generate", folder, f"prompt={ASKED}", *settings)


def test_a_text_prompt_needs_no_tower(folder: Path, monkeypatch: pytest.MonkeyPatch, expected: Any):
    opened: list[str] = []
    module = recipe_module("generate")
    monkeypatch.setattr(
        module, "open_model", lambda *given, **kw: opened.append(given[0].images) or open_model(*given, **kw)
    )
    assert (run("generate", folder, f"prompt={ASKED}"), opened) == ([expected()], ["none"])


@pytest.mark.long
def test_chat(folder: Path, expected: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    (folder / "rows" / "broken.png").write_bytes((folder / "rows" / "0.png").read_bytes()[:900])
    monkeypatch.chdir(folder / "rows")
    lines = ["/image 2.png", "/image '3.png'", "/image broken.png", "/image missing.png", ASKED, "/save ../kept.jsonl"]
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in [*lines, "/reset", ASKED])))
    run("chat", folder)
    told = capsys.readouterr().out.removesuffix("\n").split("\n")  # tokens can be other line breaks
    assert told[:2] == [
        "2.png: 8 tokens, shown with the next message.",
        "'3.png': 9 tokens, shown with the next message.",
    ]
    assert "is broken or incomplete" in told[2] and "cannot read the image" in told[3]
    answer = expected(2, 3)
    assert "\n".join(told[4:]) == f"{answer}\n2 messages added to ../kept.jsonl.\n{expected()}"
    (saved,) = map(json.loads, (folder / "kept.jsonl").read_text().splitlines())
    monkeypatch.chdir(folder)  # the row is read from any folder
    model, _ = open_model(folder / "model", device="cpu", dtype="float32")
    assert generate(model, [saved["messages"][:1]], **DRAWN) == [answer]


def test_evaluate(folder: Path):
    rows = f"data.source={folder / 'rows' / 'photos.jsonl'}"
    found = run("evaluate", folder, rows, "data.max_length=256", "loss=true", f"output={folder / 'results.json'}")
    assert found["answers"]["num_questions"] == 4
    assert 0 < found["answers"]["loss"] < 20
