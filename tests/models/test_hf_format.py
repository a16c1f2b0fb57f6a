"""Loading and saving against transformers and the safetensors library, and folders that must be refused."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
import transformers

from lean_ft.models import build_decoder, load_model, save_model
from lean_ft.models.stored_weights import weights_fingerprint

IDS = torch.arange(40).view(2, 20)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, read by the library."""
    return {n: t for f in folder.glob("*.safetensors") for n, t in safetensors.torch.load_file(f).items()}


def edit_config(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def replace_weights(folder: Path, change) -> None:
    tensors = stored(folder)
    change(tensors)
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.fixture
def folder(checkpoint, tmp_path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(checkpoint("qwen2_tied")[0], tmp_path / "model"))


def test_a_fingerprint_does_not_depend_on_path_or_sharding(folder, make_checkpoint, tmp_path):
    fingerprint = weights_fingerprint(folder)
    _, reference = make_checkpoint("qwen2_tied")
    for place, max_shard_size in (("moved", "5GB"), ("cut", "40KB")):
        reference.save_pretrained(tmp_path / place, max_shard_size=max_shard_size)
        os.utime(tmp_path / place / "config.json", (0, 0))
        assert weights_fingerprint(tmp_path / place) == fingerprint
    (folder / "model.safetensors").unlink()
    assert weights_fingerprint(folder) is None


@pytest.mark.parametrize("change", ["a value", "a type", "a name", "a shape"])
def test_changed_weights_change_the_fingerprint(change, folder):
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.1.mlp.up_proj.weight"
        weight = tensors.pop(name)
        if change == "a value":
            weight[3, 5] += 1e-6
        tensors[name + "s" if change == "a name" else name] = {"a type": weight.half(), "a shape": weight.T}.get(
            change, weight
        ).contiguous()

    fingerprint = weights_fingerprint(folder)
    replace_weights(folder, edit)
    assert weights_fingerprint(folder) != fingerprint


@pytest.mark.parametrize("case_name", ["llama", "qwen2_tied"])
def test_shards_are_read_and_written(make_checkpoint, case_name, tmp_path):
    source, reference = make_checkpoint(case_name)
    reference.save_pretrained(tmp_path / "theirs", max_shard_size="40KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 2
    model = load_model(tmp_path / "theirs")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, reference.state_dict()[name])

    save_model(model, tmp_path / "ours", max_shard_bytes=40_000)
    files = sorted((tmp_path / "ours").glob("*.safetensors"))
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert all(f.stat().st_size < 45_000 for f in files)
    index = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())
    for name, file_name in index["weight_map"].items():
        with safetensors.safe_open(tmp_path / "ours" / file_name, "pt") as file:
            assert name in file.keys()  # noqa: SIM118
            assert file.metadata() == {"format": "pt"}
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in stored(source).values())
    assert all(torch.equal(stored(tmp_path / "ours")[name], t) for name, t in stored(source).items())
    reopened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert torch.equal(reopened(IDS).logits, reference(IDS).logits)


def test_saving_again_removes_earlier_weight_files(folder):
    model = load_model(folder)
    (folder / "tokenizer.json").write_text("{}")
    with torch.no_grad():
        model.output_weight.fill_(0.5)
    names = {"config.json", "generation_config.json", "tokenizer.json"}
    for max_shard_bytes in (10**9, 1, 30_000, 60_000, 10**9):
        save_model(model, folder, max_shard_bytes)
        weights = {f.name for f in folder.iterdir()} - names
        reopened = transformers.AutoModelForCausalLM.from_pretrained(folder)
        assert (reopened.get_output_embeddings().weight == 0.5).all()
    assert weights == {"model.safetensors"}


@pytest.mark.parametrize("stored_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_weights_are_cast_as_they_are_read_and_the_config_follows(make_checkpoint, stored_dtype, tmp_path):
    source, reference = make_checkpoint("llama", dtype=stored_dtype)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model = load_model(source, dtype=dtype)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, reference.state_dict()[name].to(dtype))
        save_model(model, tmp_path)
        assert json.loads((tmp_path / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
        assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").dtype == dtype


def test_the_config_is_saved_in_its_original_spelling(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    config["torch_dtype"] = config.pop("dtype")
    (folder / "config.json").write_text(json.dumps({**config, "my_note": {"ä": [1, 2]}}))
    save_model(load_model(folder, dtype=torch.bfloat16), tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert saved == {**config, "my_note": {"ä": [1, 2]}, "torch_dtype": "bfloat16"}


def test_random_init_needs_only_the_config(folder, tmp_path):
    (folder / "model.safetensors").unlink()
    torch.manual_seed(0)
    model = load_model(folder, dtype=torch.bfloat16, random_init=True)
    assert not any(p.is_meta for p in model.parameters())
    assert model(IDS).isfinite().all()
    save_model(model, tmp_path / "saved")
    reopened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    torch.testing.assert_close(reopened(IDS).logits, load_model(tmp_path / "saved")(IDS), atol=1e-5, rtol=1e-5)


def test_a_model_without_a_folder_is_not_saved(folder, tmp_path):
    model = build_decoder(load_model(folder).config)
    with pytest.raises(ValueError, match=r"there is no config\.json"):
        save_model(model, tmp_path / "saved")


def test_rotary_frequencies_of_early_folders_are_ignored(folder):
    before = load_model(folder)(IDS)
    replace_weights(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    assert torch.equal(load_model(folder)(IDS), before)


def test_a_stored_tied_output_layer_must_be_the_embedding(folder):
    before = load_model(folder)(IDS)
    replace_weights(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert torch.equal(load_model(folder)(IDS), before)
    replace_weights(folder, lambda t: t["lm_head.weight"][-1, -1].add_(1e-3))
    with pytest.raises(ValueError, match=r"lm_head\.weight differs .* tie_word_embeddings of config\.json is true"):
        load_model(folder)


def test_snapshots_of_the_hub_cache_are_read(folder, tmp_path):
    blobs = tmp_path / "models--org--name" / "blobs"
    snapshot = tmp_path / "models--org--name" / "snapshots" / "0123abcd"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(folder.iterdir()):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert torch.equal(load_model(snapshot)(IDS), load_model(folder)(IDS))


Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "has no config.json: it describes the model"),
        (lambda f: (f / "config.json").write_text("{,"), r"config\.json is not valid JSON"),
        (lambda f: (f / "config.json").write_text("[]"), r"config\.json: expected a JSON object"),
        (lambda f: (f / "config.json").write_bytes(b"\xff\xfe"), r"config\.json is not valid JSON"),
        (lambda f: edit_config(f, model_type="bert"), r"config\.json: model_type is 'bert'"),
        (lambda f: (f / "model.safetensors").unlink(), "has no weights: expected model.safetensors.*random_init"),
        (
            lambda f: (f / "model.safetensors").rename(f / "adapter_model.safetensors"),
            r"It has adapter_model\.safetensors",
        ),
        (
            lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
            r"only as pytorch_model\.bin.*can run code when opened.*save_pretrained",
        ),
        (lambda f: (f / "model.safetensors").rename(f / "consolidated.00.pth"), r"only as consolidated\.00\.pth"),
        (
            lambda f: replace_weights(f, lambda t: t.pop(Q_PROJ)),
            r"the weights lack model\.layers\.0\.self_attn\.q_proj\.weight\. They are incomplete",
        ),
        (
            lambda f: edit_config(f, num_hidden_layers=4, layer_types=None),
            r"the weights lack model\.layers\.2\..* and 20 more",
        ),
        (
            lambda f: replace_weights(f, lambda t: t.update(extra=torch.ones(1))),
            r"model\.safetensors: unexpected tensors: extra",
        ),
        (
            lambda f: edit_config(f, num_hidden_layers=1, layer_types=None),
            r"unexpected tensors: model\.layers\.1\..* and 8 more",
        ),
        (
            lambda f: replace_weights(f, lambda t: t.update({Q_PROJ: t[Q_PROJ][:, 1:].contiguous()})),
            r"model\.safetensors: model\.layers\.0\.self_attn\.q_proj\.weight has the shape \[48, 47\]; .* \[48, 48\]",
        ),
        (
            lambda f: replace_weights(f, lambda t: t.update({Q_PROJ: t[Q_PROJ].to(torch.int8)})),
            r"q_proj\.weight is stored as I8; expected F32, BF16, F16 or F64",
        ),
        (
            lambda f: replace_weights(f, lambda t: t.update({Q_PROJ: t[Q_PROJ].to(torch.float8_e4m3fn)})),
            r"q_proj\.weight is stored as F8_E4M3",
        ),
        (
            lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-1]),
            r"model\.safetensors is damaged",
        ),
        (
            lambda f: (
                shutil.move(f / "model.safetensors", f.parent / "elsewhere"),
                (f / "model.safetensors").symlink_to(f.parent / "elsewhere"),
            ),
            r"is a link to .*elsewhere, outside the folder",
        ),
    ],
    ids=range(18),
)
def test_a_damaged_folder_is_refused(folder, damage, message):
    load_model(folder)  # is fine before
    damage(folder)
    with pytest.raises(ValueError, match=message) as error:
        load_model(folder)
    assert str(folder) in str(error.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "../weights.safetensors",
            r"names the weight file '\.\./weights\.safetensors'; expected the name of a file in",
        ),
        ("/etc/passwd", "names the weight file '/etc/passwd'; expected the name"),
        ("sub/../../weights.safetensors", "expected the name of a file in"),
        ("..\\weights.safetensors", "expected the name of a file in"),
        ("link/weights.safetensors", "is a link to .*, outside the folder"),
        ("absent.safetensors", r"names the weight file 'absent\.safetensors', which is missing"),
        ("other.safetensors", r"other\.safetensors lacks model\..*, which model\.safetensors\.index\.json lists"),
        (7, "expected an object weight_map"),
    ],
)
def test_an_index_cannot_lead_out_of_the_folder(folder, name, message):
    shutil.move(folder / "model.safetensors", folder.parent / "weights.safetensors")
    (folder / "link").symlink_to(folder.parent, target_is_directory=True)
    safetensors.torch.save_file({"x": torch.ones(1)}, folder / "other.safetensors")
    names = safetensors.torch.load_file(folder.parent / "weights.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, name)}))
    with pytest.raises(ValueError, match=message):
        load_model(folder)


def test_an_unsupported_dtype_is_refused(folder):
    for dtype in (torch.int8, "int8", "bf32"):
        with pytest.raises(ValueError, match=rf"dtype is {dtype}; expected float32, bfloat16 or float16"):
            load_model(folder, dtype=dtype)


def test_a_dtype_can_be_given_by_name(folder):
    for name, short in (("float32", "fp32"), ("bfloat16", "bf16"), ("float16", "fp16")):
        for dtype in (getattr(torch, name), name, f"torch.{name}", short):
            assert load_model(folder, dtype=dtype).dtype == getattr(torch, name)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads a process's peak memory from /proc")
def test_loading_takes_only_the_models_memory(make_checkpoint, tmp_path):
    # 150 MB in bfloat16, so that the heap's own few megabytes do not count.
    sizes = {"vocab_size": 20_000, "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8}
    warm_up, _ = make_checkpoint("llama")
    edit_config(large := make_checkpoint("llama")[0], **sizes, head_dim=128)
    folders = [tmp_path / "bfloat16", tmp_path / "float32"]
    for folder, dtype in zip(folders, (torch.bfloat16, torch.float32), strict=True):
        save_model(load_model(large, dtype=dtype, random_init=True), folder)
    script = """
import sys, torch
from lean_ft.models import load_model
models = []
def peak():
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(status["VmHWM"].split()[0]) * 1024
for folder in sys.argv[1:]:
    before = peak()
    models.append(load_model(folder, dtype=torch.bfloat16))
    print(peak() - before, sum(p.nbytes for p in models[-1].parameters()))
"""
    command = [sys.executable, "-c", script, str(warm_up), *map(str, folders)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    _, same_dtype, cast = ([int(x) for x in line.split()] for line in output.splitlines())
    for taken, model_bytes in (same_dtype, cast):
        assert 0.9 < taken / model_bytes < 1.1


def test_kimi_k2_is_loaded_and_saved_as_deepseek_v3(make_checkpoint, tmp_path):
    """Its config.json is DeepSeek V3's with another name and custom code."""
    folder, reference = make_checkpoint("deepseek_v3")
    config = json.loads((folder / "config.json").read_text())
    custom = {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}
    edit_config(folder, model_type="kimi_k2", auto_map=custom)
    model, ids = load_model(folder), torch.arange(3, 23)[None]
    torch.testing.assert_close(model(ids), reference(ids).logits, atol=1e-4, rtol=1e-4)
    save_model(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == config


@torch.no_grad()
def test_folders_of_gpt_2_as_published_are_read(make_checkpoint, tmp_path):
    """Without the prefix of all names, and with the masks of early versions; matrices are transposed there."""
    folder, reference = make_checkpoint("gpt2")
    shutil.copytree(folder, tmp_path / "old")

    def as_published(tensors: dict[str, torch.Tensor]) -> None:
        old = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
        tensors.clear()
        tensors.update(old, **{"h.0.attn.bias": torch.ones(1, 1, 8, 8), "h.1.attn.masked_bias": torch.ones(())})

    replace_weights(tmp_path / "old", as_published)
    model = load_model(tmp_path / "old")
    torch.testing.assert_close(model(IDS), reference(IDS).logits, atol=1e-4, rtol=1e-4)
    weight = reference.transformer.h[1].attn.c_attn.weight
    assert torch.equal(model.model.layers[1].self_attn.qkv_proj.weight, weight.T)
    save_model(model, tmp_path / "saved")
    assert (tmp_path / "saved" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
