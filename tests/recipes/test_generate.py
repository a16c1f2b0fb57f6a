"""The generate recipe, against transformers' own generation on the embedded model."""

from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lean_ft.catalog import find_recipe, load_recipe
from lean_ft.models import load_model, save_model
from lean_ft.paths import resolve_model_path
from lean_ft.settings_text import load_config
from lean_ft.tokenizers import load_tokenizer

QUESTION = "What is the capital of Zanemar?"


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    return load_recipe(find_recipe("generate"))


@pytest.fixture
def generate(recipe: ModuleType, capsys: pytest.CaptureFixture[str]):
    def run(**settings: object) -> str:
        settings = {"model.path": "tiny", "model.dtype": "float32", "device": "cpu", "max_new_tokens": 20} | {
            name.replace("model_", "model."): value for name, value in settings.items()
        }
        recipe.main(load_config(recipe.Config, None, [f"{name}={value}" for name, value in settings.items()]))
        return capsys.readouterr().out

    return run


def transformers_says(ids: list[int]) -> str:
    folder = resolve_model_path("tiny")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    out = model.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False)
    return AutoTokenizer.from_pretrained(folder).decode(out[0, len(ids) :], skip_special_tokens=True) + "\n"


def test_greedy_equals_transformers_on_a_chat(generate) -> None:
    tokenizer = AutoTokenizer.from_pretrained(resolve_model_path("tiny"))
    message = [{"role": "user", "content": QUESTION}]
    ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)["input_ids"]
    expected = transformers_says(ids)
    assert generate(prompt=QUESTION) == generate(prompt=QUESTION, chat="true") == expected


def test_greedy_equals_transformers_on_plain_text(generate) -> None:
    tokenizer = AutoTokenizer.from_pretrained(resolve_model_path("tiny"))
    expected = transformers_says(tokenizer("The capital of").input_ids)
    assert generate(prompt="The capital of", chat="false") == expected


def test_the_seed_decides_what_is_drawn(generate) -> None:
    drawn = [generate(prompt=QUESTION, temperature=3, top_k=300, seed=seed) for seed in (0, 0, 1, 2)]
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) == 3


def test_drawing_from_one_token_is_greedy(generate) -> None:
    greedy = generate(prompt=QUESTION)
    assert generate(prompt=QUESTION, temperature=5, top_k=1, seed=3) == greedy
    assert generate(prompt=QUESTION, temperature=5, top_p=1e-6, seed=3) == greedy


def test_a_saved_folder_says_the_same(generate, tmp_path: Path) -> None:
    save_model(load_model("tiny"), tmp_path)
    load_tokenizer("tiny").save(tmp_path)
    assert generate(prompt=QUESTION, model_path=tmp_path) == generate(prompt=QUESTION)


def test_a_file_of_prompts_is_answered_line_by_line(generate, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text(f"{QUESTION}\n\nHello\n")
    expected = f"> {QUESTION}\n" + generate(prompt=QUESTION) + "> Hello\n" + generate(prompt="Hello")
    assert generate(prompts_file=file) == expected


@pytest.mark.parametrize("settings", [{}, {"prompt": "a", "prompts_file": "b"}])
def test_one_source_of_prompts_is_needed(generate, settings: dict) -> None:
    with pytest.raises(ValueError, match=r"prompts_file=PATH, came (neither|both)"):
        generate(**settings)


def test_the_generation_config_names_further_ends(generate, tmp_path: Path) -> None:
    """As Llama 3's does: a token that is not the tokenizer's eos ends the text too."""
    save_model(load_model("tiny"), tmp_path)
    tokenizer = load_tokenizer("tiny")
    tokenizer.save(tmp_path)
    full = generate(prompt=QUESTION).removesuffix("\n")
    third = tokenizer.encode(full)[2]
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": [{tokenizer.eos_id}, {third}]}}')
    assert len(tokenizer.encode(generate(prompt=QUESTION, model_path=tmp_path).removesuffix("\n"))) <= 3


def test_the_stream_cuts_no_character(recipe: ModuleType) -> None:
    tokenizer = load_tokenizer("tiny")
    text = "fig 日本 🙂 é, saw"
    ids = tokenizer.encode(text)
    pieces = list(recipe.stream(tokenizer, iter(ids)))
    assert "".join(pieces) == text
    assert len(pieces) > 5
    assert not any("\ufffd" in piece for piece in pieces)


def test_the_stream_ends_with_half_a_character_if_the_model_did(recipe: ModuleType) -> None:
    tokenizer = load_tokenizer("tiny")
    ids = tokenizer.encode("ok 🙂")[:-1]
    assert "".join(recipe.stream(tokenizer, iter(ids))) == tokenizer.decode(ids)
