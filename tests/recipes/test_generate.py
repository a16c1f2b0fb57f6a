"""The generate recipe against transformers' `generate` on the embedded model."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lean_ft import torch_private
from lean_ft.hub.paths import resolve_model_path
from lean_ft.models import load_model, save_model
from lean_ft.models.few_rows import _can_pack
from lean_ft.tokenizers import load_tokenizer
from tests.recipes.cases import CHATS
from tests.recipes.conftest import config_of, recipe_module, run_recipe

QUESTION = "What is the capital of Zanemar?"


@pytest.fixture
def generate(capsys: pytest.CaptureFixture[str]):
    def run(*settings: str) -> str:
        given = ("model.dtype=float32", "device=cpu", "max_new_tokens=20", *settings)
        recipe_module("generate").main(config_of("generate", *given))
        return capsys.readouterr().out

    return run


TINY_ASKED = ("model.path=tiny", f"prompt={QUESTION}")


def transformers_says(ids: list[int]) -> str:
    folder = resolve_model_path("tiny")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    out = model.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False)
    return AutoTokenizer.from_pretrained(folder).decode(out[0, len(ids) :], skip_special_tokens=True) + "\n"


def test_greedy_equals_transformers(generate) -> None:
    tokenizer = AutoTokenizer.from_pretrained(resolve_model_path("tiny"))
    message = [{"role": "user", "content": QUESTION}]
    chat = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert generate(*TINY_ASKED) == generate(*TINY_ASKED, "chat=true") == transformers_says(chat)
    plain = tokenizer("The capital of").input_ids
    assert generate("model.path=tiny", "prompt=The capital of", "chat=false") == transformers_says(plain)


@pytest.mark.first(2)
@pytest.mark.parametrize(
    ("settings", "packs"),
    [
        (["max_new_tokens=31"], False),
        (["max_new_tokens=32"], True),
        (["max_new_tokens=32", "model.dtype=float32"], False),
        (["max_new_tokens=10", "prompts_file=TMP", "batch_size=2"], False),
        (["max_new_tokens=10", "prompts_file=TMP", "batch_size=1"], True),  # 4 passes of 10 tokens
    ],
)
def test_many_tokens_of_a_16_bit_model_use_packed_weights(
    generate, monkeypatch, tmp_path: Path, settings: list[str], packs: bool
) -> None:
    calls, packed_linear = [], torch_private.packed_linear
    monkeypatch.setattr(torch_private, "packed_linear", lambda *args: calls.append(args) or packed_linear(*args))
    packs = packs and _can_pack(torch.bfloat16)  # oneDNN cannot on a CPU with AVX2 alone
    calls.clear()
    (tmp_path / "prompts.txt").write_text("a\nb\nc\nd\n")
    prompts = [] if any("prompts_file" in one for one in settings) else [f"prompt={QUESTION}"]
    given = [one.replace("TMP", str(tmp_path / "prompts.txt")) for one in settings]
    assert generate("model.path=tiny", "model.dtype=bfloat16", *prompts, *given)
    assert bool(calls) == packs


def test_the_seed_decides_the_samples(generate) -> None:
    drawn = [
        generate(*TINY_ASKED, "temperature=3", "top_k=300", "max_new_tokens=6", f"seed={seed}") for seed in (0, 0, 1, 2)
    ]
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) == 3


@pytest.mark.parametrize("settings", [(), ("prompt=a", "prompts_file=b")], ids=str)
def test_exactly_one_source_of_prompts_is_required(generate, settings: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"prompts_file=PATH, found (neither|both)"):
        generate("model.path=tiny", *settings)


def test_generation_config_adds_end_tokens(generate, tmp_path: Path) -> None:
    """As in Llama 3: a token other than the tokenizer's eos also ends the text."""
    save_model(load_model("tiny"), tmp_path)
    tokenizer = load_tokenizer("tiny")
    tokenizer.save(tmp_path)
    full = generate(*TINY_ASKED).removesuffix("\n")
    third = tokenizer.encode(full)[2]
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": [{tokenizer.eos_id}, {third}]}}')
    assert len(tokenizer.encode(generate(f"model.path={tmp_path}", f"prompt={QUESTION}").removesuffix("\n"))) <= 3


CHAT = [{"role": "user", "content": QUESTION}]
FILES = {
    "rows.jsonl": [{"prompt": QUESTION, "id": 7}, {"prompt": CHAT}, {"messages": CHAT}],
    "array.json": [{"messages": CHAT}],
    "chat.json": CHAT,
    "table.csv": f"prompt,id\n{QUESTION},7\n",
    "lines.txt": f"{QUESTION}\n\n{QUESTION}\n",
}


def test_an_assistant_message_at_the_end_is_continued(generate, tmp_path: Path) -> None:
    answer = generate(*TINY_ASKED).removesuffix("\n")
    begun, rest = " ".join(answer.split(" ")[:4]), "".join(f" {word}" for word in answer.split(" ")[4:])
    file, output = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    file.write_text(json.dumps({"messages": [*CHAT, {"role": "assistant", "content": begun}]}))
    generate("model.path=tiny", f"prompts_file={file}", f"output={output}")
    assert json.loads(output.read_text())["generated_text"].startswith(rest)


def test_a_prompt_that_fills_the_context_is_refused(generate, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": "a" * n}) + "\n" for n in (9, 5000)))
    for given, which in ((f"prompt={'a ' * 3000}", "the prompt"), (f"prompts_file={tmp_path}/rows.jsonl", "prompt 2")):
        with pytest.raises(ValueError, match=f"{which} has [0-9,]+ tokens, .* context of 512 tokens. Shorten it"):
            generate("model.path=tiny", given)


@pytest.mark.first(1)
@pytest.mark.parametrize("name", FILES)
def test_formats_of_prompt_files(generate, tmp_path: Path, name: str) -> None:
    """Each format asks the same question, and output rows keep their other fields."""
    content, answer = FILES[name], generate(*TINY_ASKED).removesuffix("\n")
    file, output = tmp_path / name, tmp_path / "out.jsonl"
    lines = content if isinstance(content, list) and name.endswith(".jsonl") else [content]
    texts = content if isinstance(content, str) else "".join(json.dumps(line) + "\n" for line in lines)
    file.write_text(texts)
    given = ("model.path=tiny", f"prompts_file={file}", f"output={output}", "batch_size=2")
    generate(*given)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["generated_text"] for row in rows] == [answer] * {"rows.jsonl": 3, "lines.txt": 2}.get(name, 1)
    if name == "rows.jsonl":
        assert [{k: v for k, v in row.items() if k != "generated_text"} for row in rows] == content
    with pytest.raises(ValueError, match="already exists"):
        generate(*given)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"question": "x"}', "line 2: a prompt is {'question': 'x'}; expected text, a list of messages {"),
        ("{", "line 2: malformed JSON"),
        ('{"prompt": 5}', "line 2: a prompt is {'prompt': 5}; expected"),
        ('{"messages": []}', "line 2: a prompt is {'messages': []}; expected"),
        ('{"messages": ["x"]}', "line 2: a prompt is {'messages': ['x']}; expected"),
    ],
)
def test_a_row_without_a_prompt_is_refused_before_sampling(generate, tmp_path: Path, row: str, message: str) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x"}\n' + row + "\n")
    with pytest.raises(ValueError, match=re.escape(message)):
        generate("model.path=tiny", f"prompts_file={tmp_path / 'rows.jsonl'}", f"output={tmp_path / 'out.jsonl'}")
    assert not (tmp_path / "out.jsonl").exists()


@pytest.fixture(scope="module")
def adapter_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 2 steps."""
    folder = tmp_path_factory.mktemp("runs") / "lora"
    run_recipe("finetune", folder, *CHATS, "lora.rank=4", "max_steps=2", "save_every=1", "optimizer.lr=1e-2")
    return folder


@pytest.fixture
def asked(generate):
    return lambda *settings: generate(*settings, f"prompt={QUESTION}", "max_new_tokens=8")


def test_a_run_means_its_newest_complete_checkpoint(adapter_run: Path, asked, tmp_path: Path) -> None:
    newest, earlier = (asked(f"model.path={adapter_run}/step_0000000{step}") for step in (2, 1))
    assert asked(f"model.path={adapter_run}") == newest != earlier
    damaged = shutil.copytree(adapter_run, tmp_path / "damaged")
    (damaged / "step_00000002" / "adapter_config.json").write_text("{}")
    answer = asked(f"model.path={damaged}")
    assert "step_00000002" in answer and "An earlier checkpoint is used." in answer
    assert answer.endswith(earlier)


def test_an_adapter_finds_its_base_model(adapter_run: Path, asked, tmp_path: Path) -> None:
    adapter = adapter_run / "step_00000002"
    expected = asked("model.path=tiny", f"adapter={adapter}")
    assert expected != asked("model.path=tiny")
    for settings in ([f"adapter={adapter}"], [f"adapter={adapter_run}"], [f"model.path={adapter_run}"]):
        assert asked(*settings) == expected


@pytest.mark.long
def test_several_adapters_and_adapters_from_elsewhere_find_their_base_model(
    adapter_run: Path, asked, tmp_path: Path
) -> None:
    adapter = adapter_run / "step_00000002"
    expected, two = asked(f"adapter={adapter}"), asked("model.path=tiny", f"adapter=[{adapter},{adapter}]")
    assert asked(f"adapter=[{adapter},{adapter}]") == asked(f"model.path={adapter}", f"adapter={adapter}") == two

    # As on another machine: the run's settings name the base model; without them it is unknown.
    elsewhere = shutil.copytree(adapter, tmp_path / "elsewhere")
    config = json.loads((elsewhere / "adapter_config.json").read_text())
    (elsewhere / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "/gone/away"}))
    (elsewhere / "manifest.json").unlink()
    assert asked(f"adapter={elsewhere}") == expected
    shutil.rmtree(elsewhere / "training_state")
    with pytest.raises(ValueError, match=r"no such base model: /gone/away"):
        asked(f"adapter={elsewhere}")


def test_a_model_or_an_adapter_is_required(asked) -> None:
    with pytest.raises(ValueError, match="no model is set. Set model.path, or adapter"):
        asked()
