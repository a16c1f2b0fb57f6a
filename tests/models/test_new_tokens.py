"""Added tokens: their rows, the tokenizer, and saving, resuming and exporting."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file

from lean_ft.export import export_folder
from lean_ft.generation.texts import open_model
from lean_ft.hub.paths import resolve_model_path
from lean_ft.models import load_model, save_model
from lean_ft.peft import (
    adapter_off,
    ids_of_rows,
    load_adapter,
    load_merged,
    load_with_adapter,
    published_parts,
    save_adapter,
)
from lean_ft.settings import LoRAConfig, ModelConfig
from lean_ft.system.shards import ALONE
from lean_ft.tokenizers import load_tokenizer
from tests.recipes.conftest import run_recipe

NEW = ["<think>", "[[n]]"]
TEXT = "a question<think> with [[n]] an answer"


@pytest.fixture(params=["tied", "untied", "with rows to spare"])
def folder(request, make_checkpoint, tmp_path):
    """A model with 768 tokens, or with more rows than tokens."""
    sizes = {"vocab_size": 780 if request.param == "with rows to spare" else 768}
    path, _ = make_checkpoint("llama", tie_word_embeddings=request.param != "untied", **sizes)
    place = shutil.copytree(path, tmp_path / "model")
    for file in resolve_model_path("tiny").glob("*token*"):
        shutil.copy(file, place)
    return place


@pytest.mark.first(2)
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
def test_an_existing_token_is_refused(tokens, message):
    with pytest.raises(ValueError, match=r"model\.new_tokens: ") as refused:
        load_tokenizer(ModelConfig(path="tiny", new_tokens=tokens))
    assert message in str(refused.value)


@pytest.mark.first(1)
@pytest.mark.parametrize("targets", [["q_proj", "down_proj"], []], ids=["beside an adapter", "alone"])
def test_new_rows_train_as_with_peft(folder, targets, tmp_path):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)  # an adapter is drawn by it
    cfg = ModelConfig(path=str(folder), dtype="float32", new_tokens=NEW)
    plain, model = load_model(cfg), load_with_adapter(cfg, LoRAConfig(rank=3, targets=targets))
    ids = torch.tensor([load_tokenizer(cfg).encode(TEXT)])
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert targets or {name.rpartition(".")[2] for name in trained} == {"rows"}
    with torch.no_grad():
        torch.testing.assert_close(model(ids), plain(ids))
        for parameter in trained.values():
            parameter.add_(
                0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
            )
    save_adapter(model, tmp_path / "ours")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    base.resize_token_embeddings(model.config.vocab_size)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "ours", is_trainable=True)
    logits, expected = model(ids), theirs(ids).logits
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    for found in (logits, expected):
        torch.nn.functional.cross_entropy(found[0, :-1], ids[0, 1:]).backward()
    rows = {name: p.grad for name, p in theirs.named_parameters() if p.requires_grad and "trainable_tokens" in name}
    own = {name: p.grad for name, p in trained.items() if name.endswith(".rows")}
    assert len(own) == len(rows) == (1 if model.config.tied_embeddings else 2)
    for grad, of_peft in zip(own.values(), rows.values(), strict=True):
        torch.testing.assert_close(grad, of_peft, atol=1e-6, rtol=1e-3)
    with torch.no_grad(), adapter_off(model):
        torch.testing.assert_close(model(ids), plain(ids))

    theirs.save_pretrained(tmp_path / "theirs")
    for saved in ("ours", "theirs"):
        again = load_model(folder, new_ids=ids_of_rows(tmp_path / saved))
        load_adapter(again, tmp_path / saved)
        torch.testing.assert_close(again(ids), expected, atol=1e-4, rtol=1e-4)
        merged, _ = load_merged(tmp_path / saved, folder, dtype=torch.float32)
        torch.testing.assert_close(merged(ids), expected, atol=1e-4, rtol=1e-4)
        parts = {name: part for _, layer in published_parts(again, ALONE) for name, part in layer.items()}
        assert parts.keys() == dict(merged.named_parameters()).keys()
        assert all(torch.equal(part.values, merged.get_parameter(name)) for name, part in parts.items())
    save_model(merged, tmp_path / "merged")
    reopened, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(report.values())
    torch.testing.assert_close(reopened(ids).logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.first(1)
def test_rows_of_peft_are_read_in_any_order_and_missing_rows_are_refused(folder, tmp_path):
    """PEFT's adapters may train rows of tokens that the model has."""
    peft = pytest.importorskip("peft")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[700, 5, 31])
    theirs = peft.get_peft_model(base, config)
    with torch.no_grad():
        theirs.get_input_embeddings().token_adapter.trainable_tokens_delta["default"].normal_()
    theirs.save_pretrained(tmp_path)
    ids = torch.tensor([[4, 5, 31, 32, 700, 701, 5]])
    model = load_model(folder, new_ids=ids_of_rows(tmp_path))
    load_adapter(model, tmp_path)
    torch.testing.assert_close(model(ids), theirs(ids).logits, atol=1e-4, rtol=1e-4)
    file = tmp_path / "adapter_config.json"
    said = json.loads(file.read_text())
    for changed, message in (([700, 5, 999], "a row for token 999"), ([], "expected the ids of the stored rows of")):
        file.write_text(json.dumps({**said, "trainable_token_indices": changed}))
        with pytest.raises(ValueError, match=message):
            load_adapter(load_model(folder), tmp_path)


@pytest.mark.parametrize("folder", ["untied"], indirect=True)
def test_invalid_targets_with_new_tokens_are_refused(folder):
    with pytest.raises(
        ValueError, match=r"lora\.targets=\[\] trains only the rows of model\.new_tokens, and there are none"
    ):
        load_with_adapter(ModelConfig(path=str(folder)), LoRAConfig(targets=[]))
    with pytest.raises(ValueError, match=r"lora\.targets has lm_head, but model\.new_tokens trains rows of it"):
        load_with_adapter(ModelConfig(path=str(folder), new_tokens=NEW), LoRAConfig(targets=["q_proj", "lm_head"]))


FULL = ("model.dtype=float32",)
ADAPTER = ("optimizer.in_backward=true", "optimizer.name=adamw_8bit", "clip_grad_norm=null")


@pytest.mark.long
@pytest.mark.parametrize("settings", [FULL, (*ADAPTER, "lora.rank=2"), (*ADAPTER, "lora.targets=[]")], ids=str)
def test_a_model_with_new_tokens_trains_resumes_and_is_exported(settings, tmp_path):
    rows = [json.dumps({"text": f"{TEXT} {i}"}) + "\n" for i in range(8)]
    (tmp_path / "data.jsonl").write_text("".join(rows))
    given = ["model.path=tiny", f"model.new_tokens={json.dumps(NEW)}", f"data.source={tmp_path}/data.jsonl"]
    given += ["data.max_length=32", "batch_size=2", "device=cpu", "plan=false", "log_every=1", *settings]
    given += ["schedule.name=constant", "optimizer.lr=1e-2", "memory.host_pool=false", "epochs=4"]
    is_full = settings == FULL

    def run(name: str, max_steps: int):
        recipe = "full_finetune_single_device" if is_full else "finetune"
        run_recipe(recipe, tmp_path / name, *given, f"max_steps={max_steps}")
        return tmp_path / name / f"step_{max_steps:08d}"

    whole = run("whole", 4)
    run("halves", 2)
    file = "model.safetensors" if is_full else "adapter_model.safetensors"
    assert (run("halves", 4) / file).read_bytes() == (whole / file).read_bytes()
    start = load_model(ModelConfig(path="tiny", dtype="float32", new_tokens=NEW)).model.embed_tokens.weight
    exported = export_folder(whole, tmp_path / "exported", merge=not is_full).destination
    rows = load_file(exported / "model.safetensors")["model.embed_tokens.weight"].float()
    assert (rows[-2:] - start[-2:]).abs().max() > 1e-3
    theirs = transformers.AutoTokenizer.from_pretrained(exported)
    assert theirs(TEXT, add_special_tokens=False)["input_ids"] == load_tokenizer(whole).encode(TEXT)
    assert json.loads((exported / "config.json").read_text())["vocab_size"] == len(rows) == 770
    if not is_full:
        assert torch.equal(rows[:-2], start[:-2].to(torch.bfloat16).float())
        model, tokenizer = open_model("auto", adapter=str(whole), device="cpu")
        assert model.model.embed_tokens.weight.shape[0] == tokenizer.vocab_size == 770
