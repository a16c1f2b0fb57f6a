"""An exported folder can be read by other programs, is complete or absent, and replaces no other files."""

import errno
import json
import shutil
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
import transformers

from lean_ft.export import export_folder

IDS = torch.arange(20)[None]
PLAIN = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {n: t for file in folder.glob("*.safetensors") for n, t in safetensors.torch.load_file(file).items()}


def damage(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.fixture
def destination(tmp_path) -> Path:
    return tmp_path / "exports" / "model"


def files_beside(destination: Path) -> list[str]:
    return [path.name for path in destination.parent.iterdir()] if destination.parent.is_dir() else []


def test_a_runs_newest_checkpoint_becomes_a_plain_folder(run_directory, destination):
    exported = export_folder(run_directory, destination)
    assert exported.source == run_directory / "step_00000002"
    assert "in bfloat16, 1 weight file, a tokenizer.\n" in str(exported) and "largest difference 0)" in str(exported)
    assert {path.name for path in destination.iterdir()} == PLAIN
    assert files_beside(destination) == ["model"]
    for name in PLAIN:
        assert (destination / name).read_bytes() == (exported.source / name).read_bytes()

    model, report = transformers.AutoModelForCausalLM.from_pretrained(destination, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert (model.model.norm.weight == 2).all()
    tokenizer = transformers.AutoTokenizer.from_pretrained(destination)
    messages = [{"role": "user", "content": "Hello"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<|im_start|>Hello<|im_end|>"


def test_the_layout_that_other_programs_read(qwen_folder, destination):
    """vLLM and llama.cpp's converter read `architectures` and the dtype of config.json; transformers requires the
    format in each file; all read the index."""
    export_folder(qwen_folder, destination, max_shard_size="40KB")
    config = json.loads((destination / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    assert config["dtype"] == "bfloat16"
    index = json.loads((destination / "model.safetensors.index.json").read_text())
    files = sorted(file.name for file in destination.glob("*.safetensors"))
    assert len(files) > 2
    assert sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in stored(destination).values())
    for file in files:
        with safetensors.safe_open(destination / file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            assert set(opened.keys()) == {name for name, where in index["weight_map"].items() if where == file}
    reopened = transformers.AutoModelForCausalLM.from_pretrained(destination)
    assert torch.equal(reopened(IDS).logits, transformers.AutoModelForCausalLM.from_pretrained(qwen_folder)(IDS).logits)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_weights_are_those_of_the_source_rounded_once(make_model_folder, destination, dtype):
    source = make_model_folder(dtype=torch.float32)
    exported = export_folder(source, destination, dtype)
    assert "NO tokenizer" in str(exported) and "largest difference 0)" in str(exported)
    wanted = getattr(torch, dtype)
    for name, tensor in stored(source).items():
        assert torch.equal(stored(destination)[name], tensor.to(wanted))
    assert json.loads((destination / "config.json").read_text())["dtype"] == dtype


def test_a_weight_too_large_for_float16_is_named(make_model_folder, destination):
    source = make_model_folder(dtype=torch.bfloat16)
    tensors = stored(source)
    tensors["model.embed_tokens.weight"][-1, -1] = 70_000.0
    safetensors.torch.save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ValueError, match=r"model\.embed_tokens\.weight has a value above 65504, which float16 cannot hold"
    ):
        export_folder(source, destination, "float16")
    assert files_beside(destination) == []


def test_a_damaged_checkpoint_is_skipped_or_rejected(run_directory, destination, capsys):
    damage(run_directory / "step_00000002" / "model.safetensors")
    exported = export_folder(run_directory, destination)
    assert exported.source == run_directory / "step_00000001"
    assert "step_00000002" in capsys.readouterr().out
    with pytest.raises(ValueError, match="does not match its checksum"):
        export_folder(run_directory / "step_00000002", destination, force=True)
    damage(run_directory / "step_00000001" / "model.safetensors")
    with pytest.raises(ValueError, match=r"No whole checkpoint is left in .*step_00000001"):
        export_folder(run_directory, destination, force=True)


class TestDestination:
    def test_an_export_is_replaced_only_with_force(self, qwen_folder, destination):
        destination.mkdir(parents=True)  # an empty folder is replaced without it
        export_folder(qwen_folder, destination, max_shard_size="40KB")
        with pytest.raises(ValueError, match="exists.*--force"):
            export_folder(qwen_folder, destination)
        export_folder(qwen_folder, destination, force=True)
        assert {path.name for path in destination.iterdir()} == PLAIN
        assert files_beside(destination) == ["model"]

    @pytest.mark.parametrize("name", ["thesis.tex", "training_state/optimizer.safetensors", "adapter.safetensors"])
    def test_other_files_are_never_replaced(self, qwen_folder, destination, name):
        (destination / name).parent.mkdir(parents=True)
        (destination / name).write_text("my work")
        for place, reason in (
            (destination, r"has files that no export writes.*--force does not replace it"),
            (destination / name, "is a file"),
        ):
            with pytest.raises(ValueError, match=reason):
                export_folder(qwen_folder, place, force=True)
        assert (destination / name).read_text() == "my work"

    @pytest.mark.parametrize("place", [".", "inside", ".."])
    def test_source_and_destination_do_not_contain_one_another(self, run_directory, place):
        source = run_directory / "step_00000001"
        with pytest.raises(ValueError, match="contain one another"):
            export_folder(source, source / place, force=True)


class TestFailures:
    def test_too_little_disk_space_is_found_first(self, qwen_folder, destination, monkeypatch):
        monkeypatch.setattr("lean_ft.export.places.free_bytes", lambda _: 1000)
        with pytest.raises(OSError, match=r"the export needs .* MiB, and .* has 1000 B free"):
            export_folder(qwen_folder, destination)
        assert files_beside(destination) == []

    def test_a_disk_that_fills_up_leaves_nothing(self, qwen_folder, destination, monkeypatch):
        def full(*_, **__):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr("lean_ft.models.saving.write_file", full)
        with pytest.raises(OSError, match=r"became full during the export.*Nothing was kept"):
            export_folder(qwen_folder, destination)
        assert files_beside(destination) == []

    def test_a_folder_that_does_not_compute_the_same_is_not_kept(self, qwen_folder, destination, monkeypatch):
        def save_another(model, folder, max_shard_bytes, whole):
            save_model(model, folder, max_shard_bytes)
            tensors = stored(folder)
            tensors["model.layers.1.mlp.down_proj.weight"] *= 2
            safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})

        from lean_ft.models import save_model

        monkeypatch.setattr("lean_ft.export.folder.save_model", save_another)
        with pytest.raises(RuntimeError, match="logits differ from the source's"):
            export_folder(qwen_folder, destination)
        assert files_beside(destination) == []

    def test_a_model_that_is_not_finite_is_refused(self, qwen_folder, destination, tmp_path):
        source = Path(shutil.copytree(qwen_folder, tmp_path / "broken"))
        tensors = stored(source)
        tensors["model.norm.weight"][3] = float("nan")
        safetensors.torch.save_file(tensors, source / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match=r"model\.norm\.weight has a value .*not finite in the source"):
            export_folder(source, destination)
