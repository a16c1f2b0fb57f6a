"""`leanft export`: output and input errors."""

import shutil

import pytest


def test_a_folder_and_a_gguf_file(leanft, tmp_path):
    answer = leanft.ok("export", "tiny", tmp_path / "model", "--dtype", "float32", "--max-shard-size", "1MB")
    assert "float32" in answer.out and "4 weight files" in answer.out and "logits equal the source's" in answer.out
    assert (tmp_path / "model" / "model.safetensors.index.json").is_file()
    answer = leanft.ok("export", tmp_path / "model", tmp_path / "model.gguf", "--gguf", "q8_0")
    assert "architecture llama, q8_0" in answer.out
    assert (tmp_path / "model.gguf").is_file()


def test_an_adapter_is_merged_into_its_model(leanft, tmp_path, adapter):
    import peft
    import torch
    import transformers

    from lean_ft.hub.paths import resolve_model_path
    from lean_ft.models import load_model

    answer = leanft.ok("export", adapter, tmp_path / "merged", "--merge", "--dtype", "float32")
    assert "merged an adapter into" in answer.out and "error of rounding to float32" in answer.out
    assert (tmp_path / "merged" / "tokenizer.json").is_file()
    base = transformers.AutoModelForCausalLM.from_pretrained(resolve_model_path("tiny"), dtype=torch.float32)
    ids = torch.arange(3, 40)[None]
    expected = peft.PeftModel.from_pretrained(base, adapter)(ids).logits
    merged = load_model(tmp_path / "merged")(ids)
    assert (merged - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.long
def test_merging_and_converting_in_one_step_is_both(leanft, tmp_path, adapter):
    """The file equals the export of the merged folder. It has the model's tokenizer, because the adapter has none."""
    leanft.ok("export", adapter, tmp_path / "merged", "--merge")
    leanft.ok("export", tmp_path / "merged", tmp_path / "two" / "model.gguf", "--gguf", "q8_0")
    for base in ([], ["--base", "tiny"]):
        answer = leanft.ok("export", adapter, tmp_path / "one" / "model.gguf", "--merge", "--gguf", "q8_0", "-f", *base)
        assert "merged an adapter into" in answer.out and "architecture llama, q8_0" in answer.out
        assert (tmp_path / "one" / "model.gguf").read_bytes() == (tmp_path / "two" / "model.gguf").read_bytes()


def test_an_adapter_goes_alone_without_what_its_run_goes_on_from(leanft, tmp_path, adapter):
    shutil.copytree(adapter, source := tmp_path / "run")
    (source / "training_state").mkdir()
    (source / "training_state" / "random_state.json").write_text("{}")
    for options, code in (([], 0), ([], 2), (["--force"], 0)):
        answer = leanft("export", source, tmp_path / "out", "--adapter", *options)
        assert answer.code == code, answer.err
        files = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
        assert files == {file.name: file.read_bytes() for file in adapter.iterdir()}
    (source / "adapter_model.safetensors").write_bytes(b"\0" * 9)
    assert leanft("export", source, tmp_path / "damaged", "--adapter").code == 2
    assert not (tmp_path / "damaged").exists()


def test_adapters_and_models_are_not_mistaken_for_one_another(leanft, tmp_path, adapter):
    for arguments, message in [
        ([adapter, tmp_path / "out"], "has an adapter, not a model"),
        ([adapter, tmp_path / "out.gguf", "--gguf", "f32"], "has an adapter, not a model"),
        (["tiny", tmp_path / "out", "--merge"], "not an adapter: leave out --merge"),
        (["tiny", tmp_path / "out", "--base", "tiny"], "--base is only used with --merge"),
        (["tiny", tmp_path / "out", "--adapter"], "not an adapter: leave out --adapter"),
        ([adapter, tmp_path / "out", "--adapter", "--merge"], "--adapter cannot be combined with --merge"),
    ]:
        refusal = leanft.refused("export", *arguments)
        assert message in refusal
    assert list(tmp_path.iterdir()) == []
