"""The generate recipe against transformers' `generate` on the embedded model."""

import json
import re
import shutil
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lean_ft.generation.texts import text_of
from lean_ft.hub.paths import resolve_model_path
from lean_ft.models import load_model, save_model
from lean_ft.settings.text import load_config
from lean_ft.system.catalog import find_recipe, load_recipe
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


def test_the_seed_decides_the_samples(generate) -> None:
    drawn = [generate(prompt=QUESTION, temperature=3, top_k=300, seed=seed) for seed in (0, 0, 1, 2)]
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) == 3


def test_top_k_1_is_greedy(generate) -> None:
    greedy = generate(prompt=QUESTION)
    assert generate(prompt=QUESTION, temperature=5, top_k=1, seed=3) == greedy
    assert generate(prompt=QUESTION, temperature=5, top_p=1e-6, seed=3) == greedy


def test_a_saved_folder_gives_the_same_text(generate, tmp_path: Path) -> None:
    save_model(load_model("tiny"), tmp_path)
    load_tokenizer("tiny").save(tmp_path)
    assert generate(prompt=QUESTION, model_path=tmp_path) == generate(prompt=QUESTION)


def test_a_file_of_prompts_is_answered_line_by_line(generate, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text(f"{QUESTION}\n\nHello\n")
    expected = f"> {QUESTION}\n" + generate(prompt=QUESTION) + "> Hello\n" + generate(prompt="Hello")
    assert generate(prompts_file=file) == expected


@pytest.mark.parametrize("settings", [{}, {"prompt": "a", "prompts_file": "b"}])
def test_exactly_one_source_of_prompts_is_required(generate, settings: dict) -> None:
    with pytest.raises(ValueError, match=r"prompts_file=PATH, found (neither|both)"):
        generate(**settings)


def test_generation_config_adds_end_tokens(generate, tmp_path: Path) -> None:
    """As in Llama 3: a token other than the tokenizer's eos also ends the text."""
    save_model(load_model("tiny"), tmp_path)
    tokenizer = load_tokenizer("tiny")
    tokenizer.save(tmp_path)
    full = generate(prompt=QUESTION).removesuffix("\n")
    third = tokenizer.encode(full)[2]
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": [{tokenizer.eos_id}, {third}]}}')
    assert len(tokenizer.encode(generate(prompt=QUESTION, model_path=tmp_path).removesuffix("\n"))) <= 3


def test_streaming_splits_no_character() -> None:
    tokenizer = load_tokenizer("tiny")
    text = "fig 日本 🙂 é, saw"
    ids = tokenizer.encode(text)
    pieces = [piece for piece in text_of(tokenizer, iter(ids)) if piece]
    assert "".join(pieces) == text
    assert len(pieces) > 5
    assert not any("\ufffd" in piece for piece in pieces)


def test_streaming_ends_with_half_a_character_if_the_model_does() -> None:
    tokenizer = load_tokenizer("tiny")
    ids = tokenizer.encode("ok 🙂")[:-1]
    assert "".join(text_of(tokenizer, iter(ids))) == tokenizer.decode(ids)


CHAT = [{"role": "user", "content": QUESTION}]
FILES = {
    "rows.jsonl": [{"prompt": QUESTION, "id": 7}, {"prompt": CHAT}, {"messages": CHAT}],
    "array.json": [{"messages": [*CHAT, {"role": "assistant", "content": "what it should say"}]}],
    "chat.json": CHAT,
    "table.csv": f"prompt,id\n{QUESTION},7\n",
    "lines.txt": f"{QUESTION}\n\n{QUESTION}\n",
}


@pytest.mark.parametrize("name", FILES)
def test_formats_of_prompt_files(generate, tmp_path: Path, name: str) -> None:
    """Each format asks the same question, and output rows keep their other fields."""
    content, answer = FILES[name], generate(prompt=QUESTION).removesuffix("\n")
    file, output = tmp_path / name, tmp_path / "out.jsonl"
    lines = content if isinstance(content, list) and name.endswith(".jsonl") else [content]
    texts = content if isinstance(content, str) else "".join(json.dumps(line) + "\n" for line in lines)
    file.write_text(texts)
    generate(prompts_file=file, output=output, batch_size=2)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["generated_text"] for row in rows] == [answer] * {"rows.jsonl": 3, "lines.txt": 2}.get(name, 1)
    if name == "rows.jsonl":
        assert [{k: v for k, v in row.items() if k != "generated_text"} for row in rows] == content
    with pytest.raises(ValueError, match="already exists"):
        generate(prompts_file=file, output=output)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"question": "x"}', "line 2: a prompt is {'question': 'x'}; expected text, a list of messages,"),
        ("{", "line 2: malformed JSON"),
        ('{"prompt": 5}', "line 2: a prompt is {'prompt': 5}; expected"),
        ('{"messages": []}', "line 2: a prompt is {'messages': []}; expected"),
        ('{"messages": ["x"]}', "line 2: a prompt is {'messages': ['x']}; expected"),
    ],
)
def test_a_row_without_a_prompt_is_refused_before_sampling(generate, tmp_path: Path, row: str, message: str) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x"}\n' + row + "\n")
    with pytest.raises(ValueError, match=re.escape(message)):
        generate(prompts_file=tmp_path / "rows.jsonl", output=tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A full run and an adapter run, 2 steps each."""
    folder = tmp_path_factory.mktemp("runs")
    module = load_recipe(find_recipe("finetune"))
    settings = ["model.path=tiny", "model.dtype=float32", "data.source=tiny/train.jsonl", "optimizer.lr=5e-3"]
    settings += ["batch_size=4", "max_steps=2", "save_every=1", "device=cpu", "schedule.name=constant"]
    for name in ("full", "lora"):
        own = [f"output_dir={folder / name}"] + ["lora.rank=4"] * (name == "lora")
        module.main(load_config(module.Config, None, [*settings, *own]))
    return folder


class TestWhatIsAsked:
    """Ways to name a run."""

    @pytest.fixture
    def ask(self, recipe: ModuleType, capsys: pytest.CaptureFixture[str]):
        def run(*settings: str) -> str:
            given = [*settings, f"prompt={QUESTION}", "max_new_tokens=20", "model.dtype=float32", "device=cpu"]
            recipe.main(load_config(recipe.Config, None, given))
            return capsys.readouterr().out

        return run

    def test_a_run_means_its_newest_complete_checkpoint(self, runs: Path, ask, tmp_path: Path) -> None:
        full = runs / "full"
        newest, earlier = (ask(f"model.path={full}/step_0000000{step}") for step in (2, 1))
        assert ask(f"model.path={full}") == newest != earlier
        damaged = shutil.copytree(full, tmp_path / "damaged")
        (damaged / "step_00000002" / "config.json").write_text("{}")
        answer = ask(f"model.path={damaged}")
        assert "step_00000002" in answer and "An earlier checkpoint is used." in answer
        assert answer.endswith(earlier)

    def test_an_adapter_finds_its_base_model(self, runs: Path, ask, tmp_path: Path) -> None:
        adapter = runs / "lora" / "step_00000002"
        expected = ask("model.path=tiny", f"adapter={adapter}")
        assert expected != ask("model.path=tiny")
        for settings in ([f"adapter={adapter}"], [f"adapter={runs}/lora"], [f"model.path={runs}/lora"]):
            assert ask(*settings) == expected
        two = ask("model.path=tiny", f"adapter=[{adapter},{adapter}]")
        assert ask(f"adapter=[{adapter},{adapter}]") == ask(f"model.path={adapter}", f"adapter={adapter}") == two

        # As on another machine: the run's settings name the base model; without them it is unknown.
        elsewhere = shutil.copytree(adapter, tmp_path / "elsewhere")
        config = json.loads((elsewhere / "adapter_config.json").read_text())
        (elsewhere / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "/gone/away"}))
        (elsewhere / "manifest.json").unlink()
        assert ask(f"adapter={elsewhere}") == expected
        shutil.rmtree(elsewhere / "training_state")
        with pytest.raises(ValueError, match=r"its base model /gone/away is not here"):
            ask(f"adapter={elsewhere}")

    def test_a_model_or_an_adapter_is_required(self, ask) -> None:
        with pytest.raises(ValueError, match=r"expected model.path=\.\.\., or adapter="):
            ask()
