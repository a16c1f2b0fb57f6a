"""Merged folders: their numbers, their files, what is refused by name, and what a failure leaves."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch import Tensor

from lean_ft.export import export_folder
from lean_ft.export.upload import prepare
from lean_ft.merging import MergeSettings, merge_models
from lean_ft.merging.methods import random_mask
from lean_ft.models import load_model
from lean_ft.models.stored_weights import weights_fingerprint
from tests.export.conftest import write_model_folder
from tests.merging.conftest import TOKENIZER_CONFIG, stored

IDS = torch.arange(20)[None]


def edit(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = stored(folder)
    change(tensors)
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_a_weighted_average_of_dtypes_and_shards(models, tmp_path):
    """The dtype is that of the first model, the computation float32. transformers and lean_ft read the folder."""
    output = tmp_path / "merged"
    one, other = models["bfloat16"], models["float32"]
    assert (one / "model.safetensors.index.json").is_file()
    merged = merge_models([one, other], output, MergeSettings(weights=(0.7, 0.3), max_shard_size="40KB"))
    a, b, found = stored(one), stored(other), stored(output)
    assert found.keys() == a.keys()
    for name, tensor in found.items():
        expected = torch.zeros(a[name].shape).addcmul_(a[name].float(), torch.tensor(0.7))
        expected = expected.addcmul_(b[name], torch.tensor(0.3)).div_(torch.tensor([0.7, 0.3]).sum())
        assert torch.equal(tensor, expected.bfloat16()), name
    index = json.loads((output / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == a.keys()
    assert f"{sum(t.numel() for t in a.values()):,} parameters" in str(merged)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(output, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    torch.testing.assert_close(load_model(output)(IDS), model.float()(IDS).logits, atol=1e-4, rtol=1e-4)
    messages = [{"role": "user", "content": "Hello"}]
    tokenizers = [transformers.AutoTokenizer.from_pretrained(folder) for folder in (one, output)]
    ids = [tokenizer.apply_chat_template(messages)["input_ids"] for tokenizer in tokenizers]
    assert ids[0] == ids[1]
    assert json.loads((output / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("method", ["ties", "dare", "dare_ties", "slerp"])
def test_each_method_is_its_formula_on_every_tensor(models, base, tmp_path, method):
    folders, density, seed = [models["float32"], models["other"]], 0.4, 3
    options: dict[str, Any] = {"t": 0.25}
    if method != "slerp":
        options = {"base": str(base), "density": density, "weights": (0.7, 0.4)}
        options |= {} if method == "ties" else {"seed": seed}
    merge_models(folders, tmp_path / "merged", MergeSettings(method=method, **options))
    inputs, start = [stored(folder) for folder in folders], stored(base)
    for name, found in stored(tmp_path / "merged").items():
        one, other = (tensors[name] for tensors in inputs)
        if method == "slerp":
            angle = torch.nn.functional.cosine_similarity(one.flatten(), other.flatten(), dim=0).acos()
            expected = (torch.sin(0.75 * angle) * one + torch.sin(0.25 * angle) * other) / angle.sin()
        else:
            vectors = [tensor - start[name].float() for tensor in (one, other)]
            for i, vector in enumerate(vectors):
                if method == "ties":
                    number = max(1, int(density * vector.numel()))
                    vector[vector.abs() < vector.abs().flatten().sort(descending=True).values[number - 1]] = 0
                    continue
                key = weights_fingerprint(folders[i])
                mask = random_mask(density, seed, f"{name}\n{key}", 0, vector.numel()).view(vector.shape)
                vectors[i] = vector * mask * (vector.abs().sum() / (vector * mask).abs().sum())
            weighted = torch.stack([0.7 * vectors[0], 0.4 * vectors[1]])
            total, normalize = weighted.sum(0), method == "ties"
            if method != "dare":
                agree = weighted.sign() == torch.where(total >= 0, 1.0, -1.0)
                total = (weighted * agree).sum(0)
                share = (torch.tensor([0.7, 0.4]).view(-1, *[1] * one.dim()) * agree).sum(0)
                total = total / torch.where(share == 0, 1.0, share) if normalize else total
            expected = start[name].float() + total
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6, msg=name)


def test_dare_depends_on_neither_the_order_nor_the_shards(models, base, tmp_path):
    export_folder(models["float32"], tmp_path / "sharded", max_shard_size="30KB")
    settings = {"method": "dare", "base": str(base), "density": 0.5, "dtype": "float32"}
    one, other = models["float32"], models["other"]
    for name, folders, weights in (
        ("a", [one, other], (0.7, 0.4)),
        ("b", [other, one], (0.4, 0.7)),
        ("c", [tmp_path / "sharded", other], (0.7, 0.4)),
    ):
        merge_models(folders, tmp_path / name, MergeSettings(**settings, weights=weights))
    first = stored(tmp_path / "a")
    for name in ("b", "c"):
        assert all(torch.equal(tensor, first[key]) for key, tensor in stored(tmp_path / name).items())


def test_checkpoints_of_runs_are_merged(models, tmp_path):
    """The newest whole checkpoint of each run, without its training state."""
    from lean_ft.system.shards import part_of
    from lean_ft.tokenizers import load_tokenizer
    from lean_ft.training.checkpoint import CheckpointState, write_checkpoint

    for i, name in enumerate(("one", "two")):
        (tmp_path / name).mkdir()
        model = load_model(models["bfloat16"], dtype=torch.bfloat16)
        with torch.no_grad():
            model.model.norm.weight.fill_(i)
        state = CheckpointState({"step": 1}, random={}, optimizer={"exp_avg": part_of(torch.ones(3))})
        write_checkpoint(tmp_path / name, 1, model, load_tokenizer(models["bfloat16"]), state)
    merge_models([tmp_path / "one", tmp_path / "two"], tmp_path / "merged")
    assert (stored(tmp_path / "merged")["model.norm.weight"] == 0.5).all()
    names = {"README.md", "config.json", "generation_config.json", "merge.json", "model.safetensors"}
    assert {file.name for file in (tmp_path / "merged").iterdir()} == names | {
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_a_tied_output_layer_that_one_folder_stores(changed, tmp_path):
    one = changed("one", tie_word_embeddings=True, hidden_size=64)
    other = tmp_path / "other"
    shutil.copytree(one, other)
    edit_tensors(
        other, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    )
    merge_models([one, other], tmp_path / "merged")
    found = stored(tmp_path / "merged")
    assert "lm_head.weight" not in found
    assert all(torch.equal(tensor, found[name]) for name, tensor in stored(one).items())


def test_the_card_names_the_method_also_after_a_push(models, base, tmp_path):
    output = tmp_path / "merged"
    settings = MergeSettings(method="ties", base=str(base), density=0.5, weights=(1, 0.5))
    merge_models([models["float32"], models["other"]], output, settings)
    uploaded = prepare(output, "me/merged")[1]["README.md"].decode()
    for card in ((output / "README.md").read_text(), uploaded):
        assert "2 models, merged by lean_ft's method `ties`." in card
        assert f"| `{models['other']}` | 0.5 |" in card
        assert "- density: `0.5`" in card and "- merge\n" in card


def test_only_an_earlier_merge_is_replaced_and_only_with_force(models, tmp_path):
    output, folders = tmp_path / "merged", [models["float32"], models["other"]]
    merge_models(folders, output)
    with pytest.raises(ValueError, match="exists.*--force"):
        merge_models(folders, output)
    merge_models(folders, output, MergeSettings(method="slerp"), force=True)
    assert json.loads((output / "merge.json").read_text())["method"] == "slerp"
    (output / "thesis.tex").write_text("my work")
    with pytest.raises(ValueError, match="has files that no export writes"):
        merge_models(folders, output, force=True)
    own = tmp_path / "own"
    own.mkdir()
    (own / "README.md").write_text("my words")
    with pytest.raises(ValueError, match="has files that no export writes"):
        merge_models(folders, own, force=True)
    for model in folders:
        with pytest.raises(ValueError, match="contain one another"):
            merge_models(folders, model, force=True)


def rename_token(folder: Path) -> None:
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace("<think>", "<other>"))


def set_config(**fields: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder / "config.json", lambda config: config.update(fields))


def set_rope(folder: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        config["rope_parameters"] = {**config["rope_parameters"], "rope_theta": 500000.0}

    edit(folder / "config.json", change)


def as_special(folder: Path) -> None:
    def change(spec: dict[str, Any]) -> None:
        next(token for token in spec["added_tokens"] if token["content"] == "<think>")["special"] = True

    edit(folder / "tokenizer.json", change)


DIFFERENT: dict[str, tuple[Callable[[Path], object], str]] = {
    "token": (rename_token, r"vocabularies differ: id \d+ is '<think>' in .*float32 and '<other>' in .*changed"),
    "special": (as_special, "vocabularies differ: '<think>' is a special token in .*changed and not in .*float32"),
    "normalizer": (
        lambda folder: edit(folder / "tokenizer.json", lambda spec: spec.update(normalizer={"type": "NFC"})),
        "have another normalizer in tokenizer.json.*copy the tokenizer's files",
    ),
    "template": (
        lambda folder: edit(
            folder / "tokenizer_config.json",
            lambda config: config.update(chat_template="{% for m in messages %}X{% endfor %}"),
        ),
        "chat templates differ from character 23 on: .*<.im_start.>.* in .*float32 and 'X.* in .*--chat-template",
    ),
    "no template": (
        lambda folder: edit(folder / "tokenizer_config.json", lambda config: config.pop("chat_template")),
        "float32 has a chat template and .*changed has none.*--chat-template",
    ),
    "rope": (set_rope, r"config.json has rope_parameters.rope_theta=10000.0 in .*float32 and 500000.0 in .*changed"),
    "norm": (set_config(rms_norm_eps=1e-5), "config.json has rms_norm_eps=1e-06 in .*float32 and 1e-05 in .*changed"),
    "window": (
        set_config(use_sliding_window=True, sliding_window=8, max_window_layers=0, layer_types=None),
        "config.json has .*sliding_window",
    ),
    "quantized": (
        set_config(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}),
        r"changed has quantized weights \(bitsandbytes\).*leanft export",
    ),
    "fp8": (set_config(quantization_config={"quant_method": "fp8"}), r"quantized weights \(fp8\)"),
    "broken": (
        lambda folder: edit_tensors(folder, lambda tensors: tensors["model.norm.weight"].fill_(float("nan"))),
        "changed/model.safetensors: model.norm.weight has a number that is not finite",
    ),
    "dtype": (
        lambda folder: edit_tensors(
            folder, lambda tensors: tensors.update({"model.norm.weight": tensors["model.norm.weight"].double()})
        ),
        "model.norm.weight is stored as F64; expected F32, BF16 or F16",
    ),
    "pickled": (
        lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
        "Pickled files can run code",
    ),
    "outside": (
        lambda folder: (
            (folder / "model.safetensors").unlink(),
            (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../x.safetensors"}}'),
        ),
        "names the weight file '../../x.safetensors'",
    ),
}


@pytest.mark.first(9)
@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs_is_refused_by_name(models, changed, tmp_path, name):
    damage, message = DIFFERENT[name]
    folder = changed()
    damage(folder)
    with pytest.raises(ValueError, match=message):
        merge_models([models["float32"], folder], tmp_path / "out" / "merged")
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vocab_size": 420}, r"vocab_size=416 in .*float32 and 420 in .*changed"),
        ({"num_hidden_layers": 3}, "num_hidden_layers=2 in .* and 3 in"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=false in .* and true in"),
    ],
)
def test_other_shapes_are_refused_by_name(models, changed, tmp_path, settings, message):
    folder = changed(**{"tie_word_embeddings": False} | settings)
    with pytest.raises(ValueError, match=f"the models compute differently: config.json has .*{message}"):
        merge_models([models["float32"], folder], tmp_path / "merged")


def test_a_tensor_that_one_folder_lacks_or_has_in_another_shape(tmp_path):
    """Tensors that lean_ft does not read, such as drafting layers, are compared too."""
    one = write_model_folder(tmp_path / "one", "Qwen2", hidden_size=64)
    other = tmp_path / "other"
    shutil.copytree(one, other)
    edit_tensors(one, lambda tensors: tensors.update({"mtp.fc.weight": torch.ones(2, 3)}))
    with pytest.raises(ValueError, match="other lacks the tensor mtp.fc.weight, which .*one has"):
        merge_models([one, other], tmp_path / "merged")
    edit_tensors(other, lambda tensors: tensors.update({"mtp.fc.weight": torch.ones(3, 2)}))
    with pytest.raises(ValueError, match=r"mtp.fc.weight has the shape \[2, 3\] in .*one and \[3, 2\] in .*other"):
        merge_models([one, other], tmp_path / "merged")


def test_a_base_may_lack_tokens_and_templates(models, base, tmp_path):
    plain = tmp_path / "plain"
    shutil.copytree(base, plain)
    edit(plain / "tokenizer_config.json", lambda config: config.pop("chat_template"))
    edit(plain / "tokenizer.json", lambda spec: spec["added_tokens"].pop())
    settings = MergeSettings(method="ties", base=str(plain), density=0.5)
    merge_models([models["float32"], models["other"]], tmp_path / "merged", settings)
    renamed = tmp_path / "renamed"
    shutil.copytree(base, renamed)
    rename_token(renamed)
    settings = MergeSettings(method="ties", base=str(renamed), density=0.5)
    with pytest.raises(ValueError, match="vocabularies differ: id .* '<think>' .* and '<other>'"):
        merge_models([models["float32"], models["other"]], tmp_path / "refused", settings)


def test_a_chat_template_is_chosen(models, changed, tmp_path):
    folder = changed()
    template = "{% for m in messages %}<|im_start|>{{ m.content }} and more<|im_end|>{% endfor %}"
    edit(folder / "tokenizer_config.json", lambda config: config.update(chat_template=template))
    (tmp_path / "own.jinja").write_text(template)
    for chosen, expected in (
        (folder, template),
        (tmp_path / "own.jinja", template),
        (models["float32"], TOKENIZER_CONFIG["chat_template"]),
    ):
        settings = MergeSettings(chat_template=str(chosen))
        merge_models([models["float32"], folder], tmp_path / "merged", settings, force=True)
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "merged")
        assert tokenizer.chat_template == expected


def test_numbers_that_the_dtype_cannot_hold_are_refused(models, tmp_path):
    settings = MergeSettings(weights=(1e8, 1e8), normalize=False, dtype="float16")
    with pytest.raises(ValueError, match=r"the merged .* has a number that float16 cannot hold.*--dtype bfloat16"):
        merge_models([models["float32"], models["other"]], tmp_path / "merged", settings)
    assert not any(tmp_path.iterdir())


def test_whole_numbers_are_copied_if_they_are_the_same(changed, tmp_path):
    """Such a tensor is one that lean_ft does not read."""
    one, other = changed("one", 1), changed("other", 2)
    for folder in (one, other):
        edit_tensors(folder, lambda tensors: tensors.update({"mtp.ids": torch.arange(5)}))
    merge_models([one, other], tmp_path / "merged")
    assert torch.equal(stored(tmp_path / "merged")["mtp.ids"], torch.arange(5))
    edit_tensors(other, lambda tensors: tensors.update({"mtp.ids": torch.arange(5) + 1}))
    with pytest.raises(ValueError, match=r"mtp.ids has whole numbers \(I64\), and they differ"):
        merge_models([one, other], tmp_path / "merged", force=True)


_MERGE = """
import sys
from lean_ft.merging import MergeSettings, merge_models, folders
inner = folders.MergedTensor.read_part
def slow(self, part):
    inner(self, part)
    print("wrote", flush=True)
    import time; time.sleep(0.2)
folders.MergedTensor.read_part = slow
merge_models(sys.argv[1:3], sys.argv[3])
"""


@pytest.mark.long
def test_a_killed_merge_leaves_no_folder_of_this_name(models, tmp_path):
    arguments = [sys.executable, "-c", _MERGE, models["float32"], models["other"], tmp_path / "merged"]
    process = subprocess.Popen([*map(str, arguments)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"wrote\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    left = [path.name for path in tmp_path.iterdir()]
    assert left and all(re.fullmatch(r"\.merged\.tmp-\d+", name) for name in left)
    merge_models([models["float32"], models["other"]], tmp_path / "merged")


_PEAKS = """
import json, sys
from pathlib import Path
from lean_ft.merging import MergeSettings, merge_models

pytestmark = pytest.mark.long  # one case of each runs in continuous integration
def size(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
def merge(models, base, options):
    own = {"base": base} if "density" in options else {}
    merge_models(models, f"{models[0]}-merged", MergeSettings(**options, **own), force=True)
small, large, all_options = json.loads(sys.argv[1])
for options in all_options:
    merge(*small, options)
    Path("/proc/self/clear_refs").write_text("5")
    before = size("VmRSS")
    merge(*large, options)
    print(size("VmHWM") - before)
"""


@pytest.mark.long
def test_no_tensor_is_in_memory_whole(tmp_path):
    """Embeddings of 98 MiB each, two or three per merge."""
    groups = []
    for size, vocabulary in (("small", 416), ("large", 200_000)):
        folders = [tmp_path / f"{size}-{i}" for i in range(3)]
        write_model_folder(folders[0], "Qwen2", vocab_size=vocabulary, hidden_size=128, tie_word_embeddings=True)
        for i, folder in enumerate(folders[1:], start=1):
            shutil.copytree(folders[0], folder)
            edit_tensors(folder, lambda tensors, i=i: [tensor.add_(tensor.roll(i)) for tensor in tensors.values()])
        groups.append(([*map(str, folders[1:])], str(folders[0])))
    options = [{}, {"method": "ties", "density": 0.2}, {"method": "dare_ties", "density": 0.5}, {"method": "slerp"}]
    arguments = [sys.executable, "-c", _PEAKS, json.dumps([*groups, options])]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert max(map(int, done.stdout.split())) < 90 * 2**20, done.stdout
