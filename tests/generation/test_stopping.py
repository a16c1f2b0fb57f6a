"""A model that has learned a chat stops by itself, in lean_ft, in transformers and in llama.cpp.

The tokens that end a turn in the chat template are not eos here, as in base models with a chat template (Qwen2.5).
"""

import json
import shutil
import urllib.request
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

import lean_ft
from lean_ft.export import export_folder, export_gguf
from lean_ft.generation import stop_ids
from lean_ft.models import load_model, save_model
from lean_ft.tokenizers import load_tokenizer
from tests.gguf.llama_server import LlamaServer
from tests.models.vision.documents import CASES, save

LOOP = "{% for m in messages %}"
ASKS = "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
HEADER = "{{ '<|' ~ m.role ~ '|>' ~ m.content }}"
TEMPLATES = {
    "own token": (LOOP + HEADER + "{{ '<|end|>' }}{% endfor %}" + ASKS, {"<|end|>"}),
    "not at the end of the chat": (
        LOOP + HEADER + "{% if not loop.last or m.role == 'user' %}{{ '<|end|>' }}{% endif %}{% endfor %}" + ASKS,
        {"<|end|>"},
    ),
    "the next turn's token": (LOOP + HEADER + "{% endfor %}" + ASKS, {"<|user|>"}),
    "no token": (
        LOOP
        + "{{ m.role ~ ':\\n' ~ m.content ~ '\n' }}{% endfor %}{% if add_generation_prompt %}assistant:\n{% endif %}",
        set(),
    ),
}
ANSWERS = {"What is 58 plus 7?": "The answer is 65.", "Which city?": "Ulopolis.", "Say a.": "a"}


def base_model(template: str, base: Path) -> Path:
    """The embedded model with this chat template, and with <|pad|> as the only token that ends a text."""
    shutil.copytree(Path(lean_ft.__file__).parent / "assets/tiny/model", base)
    special = {"eos_token": "<|pad|>", "pad_token": "<|pad|>", "chat_template": template}
    for file, fields in {
        "tokenizer_config.json": special,
        "config.json": {"eos_token_id": 0},
        "generation_config.json": {"eos_token_id": 0},
    }.items():
        (base / file).write_text(json.dumps(json.loads((base / file).read_text()) | fields))
    return base


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_base_model_stops_at_the_end_of_a_turn(name: str, tmp_path: Path):
    """Before training, no file of the model names the token."""
    template, ends = TEMPLATES[name]
    folder = base_model(template, tmp_path / "base")
    tokenizer = load_tokenizer(folder)
    assert stop_ids(load_model(folder), tokenizer) == {tokenizer.token_id(token) for token in {"<|pad|>", *ends}}


@pytest.mark.long
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_model_that_knows_its_answers_stops_after_them(name: str, tmp_path: Path):
    template, ends = TEMPLATES[name]
    base = base_model(template, tmp_path / "base")
    asked = [[{"role": "user", "content": question}] for question in ANSWERS]
    rows = [
        {"messages": [*chat, {"role": "assistant", "content": a}]}
        for chat, a in zip(asked, ANSWERS.values(), strict=True)
    ]
    run = lean_ft.run(
        "full_finetune_single_device",
        model={"path": str(base), "dtype": "float32"},
        data={"source": rows * 2, "validation_source": rows},
        optimizer={"lr": 2e-3},
        batch_size=6,
        epochs=40,
        output_dir=str(tmp_path / "run"),
    )
    model, tokenizer = lean_ft.open_model(run, dtype="float32")
    assert stop_ids(model, tokenizer) == {tokenizer.token_id(token) for token in {"<|pad|>", *ends}}
    ours = lean_ft.generate(model, asked, tokenizer, max_new_tokens=40)
    assert [text.strip() for text in ours] == list(ANSWERS.values())

    export_folder(run, tmp_path / "folder")
    theirs, their_tokenizer = (
        kind.from_pretrained(tmp_path / "folder") for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    export_gguf(run, tmp_path / "model.gguf", "f32")
    server = LlamaServer(tmp_path / "model.gguf")
    for chat, answer in zip(asked, ANSWERS.values(), strict=True):
        ids = their_tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        found = theirs.generate(**ids, max_new_tokens=40, do_sample=False)[0, ids["input_ids"].shape[1] :]
        assert their_tokenizer.decode(found, skip_special_tokens=True).strip() == answer
        body = {"prompt": ids["input_ids"][0].tolist(), "n_predict": 40, "temperature": 0.0}
        request = urllib.request.Request(
            f"{server.listening_address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            assert json.load(reply)["content"].strip() == answer


@pytest.mark.first(2)
@pytest.mark.parametrize(
    ("generation", "top", "text"),
    [
        (None, None, [3, 5]),
        (None, [7, 8], [3, 5]),
        (None, 7, None),
        (None, None, None),
        ({"eos_token_id": [9]}, [7, 8], [3, 5]),
        ({"do_sample": True}, [7, 8], [3, 5]),
    ],
)
def test_the_ids_of_config_json_are_those_of_transformers(generation, top, text, tmp_path: Path):
    """Without generation_config.json. Of a whole folder, and of its language model that is saved alone."""
    folder = save(CASES["gemma3"], tmp_path / "whole")
    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": top}
    config["text_config"]["eos_token_id"] = text
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").unlink()
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    theirs = AutoModelForImageTextToText.from_pretrained(folder).generation_config.eos_token_id
    model = load_model(folder)
    tokenizer = load_tokenizer("tiny")
    ids = theirs if isinstance(theirs, list) else [] if theirs is None else [theirs]
    assert model.source.end_ids == ids
    assert stop_ids(model, tokenizer) == {*ids, tokenizer.eos_id} | tokenizer.turn_ends
    save_model(model, tmp_path / "alone")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "alone").generation_config.eos_token_id == theirs
    for saved in (tmp_path / "alone", folder):
        tokenizer.save(saved)
        ends = json.loads((saved / "generation_config.json").read_text())["eos_token_id"]
        assert ends == [*ids, *sorted(tokenizer.turn_ends - {*ids})]


def test_ids_of_another_type_are_refused(tmp_path: Path):
    folder = save(CASES["gemma3"], tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "generation_config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": [1, "</s>"]}))
    with pytest.raises(
        ValueError, match=r"config.json: eos_token_id is \[1, '</s>'\]; expected an id or a list of ids"
    ):
        load_model(folder)
