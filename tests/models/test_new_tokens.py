"""Tokens that a run adds: their rows, the tokenizer that knows them, and what is saved, gone on with and exported."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file

from lean_ft.catalog import find_recipe, load_recipe
from lean_ft.export import export_folder
from lean_ft.models import load_model, save_model
from lean_ft.paths import resolve_model_path
from lean_ft.peft import load_with_adapter
from lean_ft.settings import LoRAConfig, ModelConfig
from lean_ft.settings_text import load_config
from lean_ft.tokenizers import load_tokenizer

NEW = ["<think>", "[[n]]"]
TEXT = "a question<think> with [[n]] an answer"


@pytest.fixture(params=["tied", "untied", "with rows to spare"])
def folder(request, make_checkpoint, tmp_path):
    """A model of 768 tokens, or of more rows than tokens."""
    sizes = {"vocab_size": 780 if request.param == "with rows to spare" else 768}
    path, _ = make_checkpoint("llama", tie_word_embeddings=request.param != "untied", **sizes)
    place = shutil.copytree(path, tmp_path / "model")
    for file in resolve_model_path("tiny").glob("*token*"):
        shutil.copy(file, place)
    return place


def test_new_rows_are_the_mean_and_transformers_opens_what_is_saved(folder, tmp_path):
    cfg = ModelConfig(path=str(folder), dtype="float32", new_tokens=NEW)
    model, tokenizer, plain = load_model(cfg), load_tokenizer(cfg), load_model(folder)
    ids = tokenizer.encode(TEXT)
    assert [tokenizer.token_id(token) for token in NEW] == [768, 769]
    assert ids.count(768) == ids.count(769) == 1 and tokenizer.decode(ids) == TEXT
    assert model.config.vocab_size == max(770, plain.config.vocab_size)
    for grown, old in {model.output_weight: plain.output_weight, model.model.embed_tokens.weight: None}.items():
        old = plain.model.embed_tokens.weight if old is None else old
        assert torch.equal(grown[:768], old[:768]) and torch.equal(grown[770:], old[770:])
        torch.testing.assert_close(grown[768:770], old[:768].mean(0).expand(2, -1))
    known = torch.arange(3, 23)[None]
    assert torch.equal(model(known)[..., :768], plain(known)[..., :768])

    save_model(model, tmp_path / "saved")
    tokenizer.save(tmp_path / "saved")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert theirs(TEXT, add_special_tokens=False)["input_ids"] == ids
    assert theirs.decode(ids) == TEXT
    reopened, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(report.values())
    with torch.no_grad():
        torch.testing.assert_close(
            reopened(torch.tensor([ids])).logits, model(torch.tensor([ids])), atol=1e-4, rtol=1e-4
        )
    assert load_tokenizer(tmp_path / "saved").encode(TEXT) == ids


@pytest.mark.parametrize(
    ("tokens", "message"),
    [(["<|pad|>"], "'<|pad|>' has the id 0"), (["<a>", "<a>"], "given twice"), ([""], "is empty")],
)
def test_a_token_that_is_there_is_refused(tokens, message):
    with pytest.raises(ValueError, match=r"model\.new_tokens: ") as refused:
        load_tokenizer(ModelConfig(path="tiny", new_tokens=tokens))
    assert message in str(refused.value)


def test_beside_an_adapter_they_are_refused():
    with pytest.raises(ValueError, match="rows that train with all of the model, and lora freezes it"):
        load_with_adapter(ModelConfig(path="tiny", new_tokens=NEW), LoRAConfig())


def test_a_run_trains_them_goes_on_with_them_and_is_exported(tmp_path):
    rows = [json.dumps({"text": f"{TEXT} {i}"}) + "\n" for i in range(8)]
    (tmp_path / "data.jsonl").write_text("".join(rows))
    recipe = load_recipe(find_recipe("full_finetune_single_device"))
    settings = ["model.path=tiny", f"model.new_tokens={json.dumps(NEW)}", f"data.source={tmp_path}/data.jsonl"]
    settings += ["data.max_length=32", "batch_size=2", "model.dtype=float32", "device=cpu", "plan=false", "log_every=1"]
    settings += ["schedule.name=constant", "optimizer.lr=1e-2", "memory.host_pool=false", "epochs=4"]

    def run(name: str, max_steps: int):
        given = [*settings, f"output_dir={tmp_path / name}", f"max_steps={max_steps}"]
        recipe.main(load_config(recipe.Config, None, given))
        return tmp_path / name / f"step_{max_steps:08d}"

    whole = run("whole", 4)
    run("halves", 2)
    assert (run("halves", 4) / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    start = load_model(ModelConfig(path="tiny", dtype="float32", new_tokens=NEW)).model.embed_tokens.weight
    rows = load_file(whole / "model.safetensors")["model.embed_tokens.weight"]
    assert rows.shape == start.shape and (rows[-2:] - start[-2:]).abs().max() > 1e-3
    exported = export_folder(whole, tmp_path / "exported").folder
    theirs = transformers.AutoTokenizer.from_pretrained(exported)
    assert theirs(TEXT, add_special_tokens=False)["input_ids"] == load_tokenizer(whole).encode(TEXT)
    assert json.loads((exported / "config.json").read_text())["vocab_size"] == len(rows) == 770
