"""Adapters with a pair of matrices per expert equal PEFT, and transformers with weights that are merged by hand."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lean_ft import load_model
from lean_ft.export import export_folder
from lean_ft.peft import adapted_layers, load_adapter, load_merged
from tests.peft.conftest import IDS, MIXTURES, assert_peft_computes_it

peft = pytest.importorskip("peft")

PREFIX = "base_model.model."
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
TRANSPOSED = ("gpt_oss", "llama4_text")  # Unsloth has their experts in lists of modules, with transposed matrices
WITH_PAIRS = [family for family in MIXTURES if "granite" not in family]
QUICK = {"mixtral", "gpt_oss"}
MARKED = [case if case in QUICK else pytest.param(case, marks=pytest.mark.long) for case in WITH_PAIRS]


def matrices_of_experts(weights, are_transposed):
    """Views (O, I) of the experts' matrices in a folder's weights, by their names in transformers 4 or in Unsloth."""
    found = {}
    for name, weight in weights.items():
        if re.search(r"experts\.\d+\..*weight$", name):
            found[name.removesuffix(".weight")] = weight
        elif re.search(r"experts\.(gate_up|down)_proj$", name):
            found |= {f"{name}s.{i}": matrix.mT if are_transposed else matrix for i, matrix in enumerate(weight)}
    return found


def write_adapter(folder, destination, *, even=True, keep=lambda name: True, others=(), **config):
    """Write a random adapter of the experts' matrices, and the folder `merged`, whose weights include it.

    Uneven: ranks and alphas differ per layer. others: further layers of the adapter.
    """
    generator = torch.Generator().manual_seed(4)
    weights = load_file(folder / "model.safetensors")
    are_transposed = json.loads((folder / "config.json").read_text())["model_type"] in TRANSPOSED
    matrices = {name: one for name, one in matrices_of_experts(weights, are_transposed).items() if keep(name)}
    matrices |= {name: weights[f"{name}.weight"] for name in others}
    assert matrices
    tensors, alphas = {}, {}
    for number, (name, matrix) in enumerate(matrices.items()):
        rank = 2 if even else 1 + number % 3
        a, b = (
            0.2 * torch.randn(shape, generator=generator)
            for shape in ((rank, matrix.shape[1]), (matrix.shape[0], rank))
        )
        tensors |= {f"{PREFIX}{name}.lora_A.weight": a, f"{PREFIX}{name}.lora_B.weight": b}
        alpha = 4
        if not even and number % 5 == 0:
            alpha = alphas[name] = 7
        matrix += alpha / (rank**0.5 if config.get("use_rslora") else rank) * b @ a
    destination.mkdir()
    save_file(tensors, destination / "adapter_model.safetensors", {"format": "pt"})
    fields = CONFIG | config | {"base_model_name_or_path": str(folder), "alpha_pattern": alphas}
    (destination / "adapter_config.json").write_text(json.dumps(fields))
    merged = shutil.copytree(folder, destination / "merged")
    save_file(weights, merged / "model.safetensors", {"format": "pt"})
    return destination, merged


def logits_of(folder):
    return AutoModelForCausalLM.from_pretrained(folder).eval()(IDS).logits


def assert_close(logits, expected):
    torch.testing.assert_close(logits, expected, atol=2e-5 * expected.abs().max().item(), rtol=0)


@pytest.mark.parametrize("family", MARKED)
def test_pairs_per_expert_equal_a_merge_by_hand(family, make_checkpoint, tmp_path):
    """Ranks and alphas that differ per expert, experts without a pair, and PEFT's names of the saved adapter."""
    folder, base = make_checkpoint(family)
    keep = re.compile(r"experts\.(\w+\.)?[0-2]\b|layers\.1\.").search
    source, merged = write_adapter(folder, tmp_path / "adapter", even=False, keep=keep, use_rslora=True)
    expected = logits_of(merged)
    assert (expected - logits_of(folder)).abs().max() > 0.1
    model = load_model(folder)
    load_adapter(model, source)
    assert_close(model(IDS), expected)
    assert_close(load_merged(source, dtype=torch.float32)[0](IDS), expected)
    assert_peft_computes_it(model, base, tmp_path / "again", 1e-4)


@pytest.mark.first(1)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_peft_computes_the_same(family, make_checkpoint, tmp_path):
    """With the adapter as PEFT saved it under transformers 4, and layers beside the experts under names of that
    time."""
    folder, base = make_checkpoint(family)
    others = [f"model.layers.{i}.self_attn.q_proj" for i in range(2)]
    others += [f"model.layers.{i}.block_sparse_moe.gate" for i in range(2)] if family == "mixtral" else []
    names = {"mixtral": ["w1", "w2", "w3", "gate"], "qwen3_moe": ["gate_proj", "up_proj", "down_proj"]}
    targets = ["q_proj", *names[family]]
    source, merged = write_adapter(folder, tmp_path / "adapter", others=others, target_modules=targets)
    expected = logits_of(merged)
    model = load_model(folder)
    load_adapter(model, source)
    assert_close(model(IDS), expected)
    assert_close(peft.PeftModel.from_pretrained(base, source).eval()(IDS).logits, expected)
    export_folder(source, tmp_path / "exported", merge=True)
    assert_close(logits_of(tmp_path / "exported"), expected)


def test_one_of_the_fused_matrices_alone(make_checkpoint, tmp_path):
    folder, _ = make_checkpoint("qwen3_moe")
    source, merged = write_adapter(folder, tmp_path / "adapter", keep=re.compile("up_proj").search)
    model = load_model(folder)
    load_adapter(model, source)
    assert {name.rpartition(".")[2]: layer.shape.rank for name, layer in adapted_layers(model).items()} == {
        "gate_up_proj": 2
    }
    assert_close(model(IDS), logits_of(merged))


def rename(pattern, replacement):
    def change(tensors):
        return {re.sub(pattern, replacement, name): tensor for name, tensor in tensors.items()}

    return change


def with_stack(tensors):
    name = f"{PREFIX}model.layers.0.mlp.experts.lora_"
    return tensors | {f"{name}A.weight": torch.ones(8, 6), f"{name}B.weight": torch.ones(24, 8)}


def without(ending):
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if not name.endswith(ending)}


def wide(tensors):
    name = f"{PREFIX}model.layers.0.mlp.experts.0.gate_proj.lora_"
    return tensors | {f"{name}A.weight": torch.ones(5000, tensors[f"{name}A.weight"].shape[1]),
                      f"{name}B.weight": torch.ones(tensors[f"{name}B.weight"].shape[0], 5000)}  # fmt: skip


REFUSED = {
    "a name": (rename("gate_proj", "wi_0"), {},
        r"adapts model.layers.0.mlp.experts.0.wi_0, a layer of one expert with an unknown"
               r" name or number. Expected experts.\*.gate_proj, experts.\*.up_proj, experts.gate_up_projs.\*"),
    "a number": (rename(r"experts\.3", "experts.90"), {}, r"experts.90.down_proj, a layer of one .* \* from 0 to 5"),
    "DoRA": (dict, {"use_dora": True}, "is a DoRA adapter with magnitudes of single experts"),
    "no B": (without("0.mlp.experts.1.up_proj.lora_B.weight"), {},
        "lacks model.layers.0.mlp.experts.1.up_proj.lora_B.weight"),
    "shape": (lambda tensors: {name: tensor[:, :5] for name, tensor in tensors.items()}, {},
        "has shape .* the model needs"),
    "twice": (with_stack, {},
        "adapts both model.layers.0.mlp.experts and model.layers.0.mlp.experts.0.* the same experts"),
    "rank": (wide, {}, "has a rank of 5000 for an expert of model.layers.0.mlp.experts.gate_up_proj; expected at most"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_pairs_that_cannot_be_read(case, make_checkpoint, tmp_path):
    folder, _ = make_checkpoint("qwen3_moe")
    change, config, message = REFUSED[case]
    source, _ = write_adapter(folder, tmp_path / "adapter", **config)
    file = source / "adapter_model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in change(load_file(file)).items()}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=message):
        load_adapter(load_model(folder), source)
