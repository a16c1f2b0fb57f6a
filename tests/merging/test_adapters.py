"""Merged adapters: exact for weighted averages and SLERP, PEFT's values for SVDs and TIES, and what is refused."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import safetensors.torch
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from lean_ft.merging import MergeSettings, merge_models
from lean_ft.merging.methods import random_mask
from lean_ft.models import load_model
from lean_ft.peft import load_adapter
from lean_ft.peft.stored_adapter import read_adapter, read_factors
from tests.merging.conftest import stored

pytestmark = pytest.mark.long  # one case of each runs in continuous integration

IDS = torch.arange(20)[None]
FIRST = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
OTHERS: dict[str, dict[str, Any]] = {
    "same": FIRST | {"lora_alpha": 2},
    "rslora": FIRST | {"r": 6, "use_rslora": True, "lora_alpha": 3},
    "patterns": FIRST | {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.1.*down_proj": 5}},
    "other layers": FIRST | {"target_modules": ["q_proj", "up_proj", "embed_tokens"]},
    "one layer": FIRST | {"layers_to_transform": [1]},
}
Make = Callable[..., Path]


@pytest.fixture
def adapter(base, tmp_path) -> Make:
    """A function that writes a random adapter of the base model, as PEFT saves it."""

    def make(name: str, seed: int, model: Path = base, **settings: Any) -> Path:
        config = peft.LoraConfig(task_type="CAUSAL_LM", **FIRST | settings)
        wrapped = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), config)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter_name, parameter in wrapped.named_parameters():
                if "lora_" in parameter_name or "trainable_tokens" in parameter_name:
                    parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
        wrapped.save_pretrained(tmp_path / name, save_embedding_layers=False)
        return tmp_path / name

    return make


def deltas(folder: Path) -> dict[str, Tensor]:
    """The whole difference of each layer."""
    adapter = read_adapter(folder)
    pairs = {name: read_factors(adapter, name) for name in adapter.shapes}
    return {name: adapter.shapes[name].scaling * (b.float() @ a.float()) for name, (a, b) in pairs.items()}


def of_peft(base: Path, folders: list[Path], **options: Any) -> dict[str, Tensor]:
    """The differences of PEFT's merged adapter."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    wrapped = peft.PeftModel.from_pretrained(model, folders[0], "0")
    for i, folder in enumerate(folders[1:], start=1):
        wrapped.load_adapter(folder, str(i))
    wrapped.add_weighted_adapter([str(i) for i in range(len(folders))], adapter_name="merged", **options)
    found = {}
    for name, module in wrapped.base_model.model.named_modules():
        if hasattr(module, "lora_A") and ("merged" in module.lora_A or "merged" in module.lora_embedding_A):
            delta = module.get_delta_weight("merged").detach()
            found[name] = delta.T if "merged" in module.lora_embedding_A else delta
    return found


@pytest.mark.first(5)
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("normalize", [True, False])
def test_a_weighted_average_concatenates_the_ranks(adapter, base, tmp_path, other, normalize):
    folders, weights = [adapter("one", 1), adapter("other", 2, **OTHERS[other])], (0.9, 0.4)
    merged = merge_models(folders, tmp_path / "merged", MergeSettings(weights=weights, normalize=normalize))
    one, another, found = (deltas(folder) for folder in (*folders, tmp_path / "merged"))
    total = sum(weights) if normalize else 1.0
    assert found.keys() == one.keys() | another.keys()
    for name, delta in found.items():
        zero = torch.zeros_like(delta)
        expected = (weights[0] * one.get(name, zero) + weights[1] * another.get(name, zero)) / total
        torch.testing.assert_close(delta, expected, rtol=1e-5, atol=1e-6)
    shapes = [read_adapter(folder).shapes for folder in (*folders, tmp_path / "merged")]
    for name, shape in shapes[2].items():
        assert shape.rank == sum(one[name].rank for one in shapes[:2] if name in one)
    assert "SVD" not in str(merged)
    # PEFT and lean_ft compute the same with the new adapter.
    wrapped = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), tmp_path / "merged"
    )
    model = load_model(base)
    load_adapter(model, tmp_path / "merged")
    torch.testing.assert_close(wrapped(IDS).logits, model(IDS), rtol=5e-4, atol=5e-4)
    plain = load_model(base)
    assert (model(IDS) - plain(IDS)).abs().max() > 0.1


def test_concatenated_ranks_are_pefts(adapter, base, tmp_path):
    folders = [adapter("one", 1), adapter("other", 2, **OTHERS["rslora"])]
    merge_models(folders, tmp_path / "merged", MergeSettings(weights=(0.9, 0.4), normalize=False))
    expected = of_peft(base, folders, weights=[0.9, 0.4], combination_type="cat")
    found = deltas(tmp_path / "merged")
    assert found.keys() == expected.keys()
    for name, delta in found.items():
        torch.testing.assert_close(delta, expected[name], rtol=1e-5, atol=1e-6)


def relative(folder: Path, exact: dict[str, Tensor]) -> dict[str, float]:
    found = deltas(folder)
    return {name: ((found[name] - delta).norm() / delta.norm()).item() for name, delta in exact.items()}


def printed_errors(text: str) -> tuple[float, float]:
    overall, worst = re.findall(r"relative error ([\d.e-]+) over all layers, at most ([\d.e-]+) \(", text)[0]
    return float(overall), float(worst)


def test_a_rank_truncates_as_pefts_svd_does_and_prints_the_error(adapter, base, tmp_path):
    folders, settings = [adapter("one", 1), adapter("other", 2)], {"weights": (0.9, 0.4), "normalize": False}
    merged = merge_models(folders, tmp_path / "merged", MergeSettings(rank=5, **settings))
    expected = of_peft(base, folders, weights=[0.9, 0.4], combination_type="svd", svd_rank=5)
    found = deltas(tmp_path / "merged")
    for name, delta in found.items():
        torch.testing.assert_close(delta, expected[name], rtol=1e-4, atol=1e-4)
    assert {shape.rank for shape in read_adapter(tmp_path / "merged").shapes.values()} == {5}
    merge_models(folders, tmp_path / "exact", MergeSettings(**settings))
    exact = deltas(tmp_path / "exact")
    errors = relative(tmp_path / "merged", exact)
    overall = sum((found[name] - delta).norm() ** 2 for name, delta in exact.items()) / sum(
        delta.norm() ** 2 for delta in exact.values()
    )
    assert printed_errors(str(merged)) == pytest.approx((overall.item() ** 0.5, max(errors.values())), rel=1e-2)
    assert max(errors, key=lambda name: errors[name]) in str(merged)


def test_ties_is_pefts_for_equal_weights(adapter, base, tmp_path):
    """For other weights PEFT elects signs without them, and mergekit with them."""
    folders = [adapter("one", 1), adapter("other", 2)]
    settings = MergeSettings(method="ties", density=0.4, rank=20)
    merged = merge_models(folders, tmp_path / "merged", settings)
    expected = of_peft(
        base, folders, weights=[1.0, 1.0], combination_type="ties_svd", density=0.4, svd_rank=20,
        majority_sign_method="total",
    )  # fmt: skip
    for name, delta in deltas(tmp_path / "merged").items():
        torch.testing.assert_close(delta, expected[name], rtol=1e-3, atol=1e-3)
    assert 0 < printed_errors(str(merged))[0] < 0.5


def test_dare_is_the_formula_up_to_the_printed_error(adapter, tmp_path):
    folders = [adapter("one", 1), adapter("other", 2)]
    settings = MergeSettings(method="dare", density=0.8, seed=5, weights=(0.7, 0.4), rescale="density", rank=64)
    merged = merge_models(folders, tmp_path / "merged", settings)
    vectors, keys = [deltas(folder) for folder in folders], []
    for folder in folders:
        from lean_ft.merging.adapters import _open_adapter

        keys.append(_open_adapter(folder).key)
    exact = {}
    for name in vectors[0]:
        masked = [
            vector[name] * random_mask(0.8, 5, f"{name}\n{key}", 0, vector[name].numel()).view(vector[name].shape) / 0.8
            for vector, key in zip(vectors, keys, strict=True)
        ]
        exact[name] = 0.7 * masked[0] + 0.4 * masked[1]
    errors = relative(tmp_path / "merged", exact)
    assert max(errors.values()) < 1e-5  # the rank is that of the whole matrices
    assert printed_errors(str(merged))[1] < 1e-5


@pytest.mark.parametrize("other", ["same", "other layers"])
def test_slerp_of_whole_differences_without_an_svd(adapter, tmp_path, other):
    folders = [adapter("one", 1), adapter("other", 2, **OTHERS[other])]
    merged = merge_models(folders, tmp_path / "merged", MergeSettings(method="slerp", t=0.3))
    one, another, found = (deltas(folder) for folder in (*folders, tmp_path / "merged"))
    for name, delta in found.items():
        zero = torch.zeros_like(delta)
        x, y = one.get(name, zero).double(), another.get(name, zero).double()
        norms = [norm if norm > 0 else 1.0 for norm in (x.norm(), y.norm())]
        angle = ((x * y).sum() / (norms[0] * norms[1])).acos()
        expected = (torch.sin(0.7 * angle) * x + torch.sin(0.3 * angle) * y) / angle.sin()
        torch.testing.assert_close(delta.double(), expected, rtol=1e-4, atol=1e-5)
    assert "SVD" not in str(merged)


def test_large_matrices_are_decomposed_almost_as_exactly(monkeypatch):
    """A randomized SVD, whose error is that of the best matrix of the rank within 2%."""
    from lean_ft.merging import adapters

    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(300, 200, generator=generator) @ torch.diag(0.97 ** torch.arange(200.0))
    best = adapters._truncated(matrix, 16)
    monkeypatch.setattr(adapters, "_EXACT_SVD", 0)
    monkeypatch.setattr(adapters, "_OVERSAMPLING", 8)
    state = torch.random.get_rng_state()
    found = adapters._truncated(matrix, 16)
    assert torch.equal(torch.random.get_rng_state(), state)
    measured = (matrix - found.b @ found.a).norm() ** 2
    assert found.error == pytest.approx(measured.item(), rel=1e-3)
    assert best.error <= found.error * 1.001 and found.error <= best.error * 1.02


def test_trained_rows_are_averaged(adapter, base, tmp_path):
    """PEFT stores rows of new tokens whole. With weights that sum to 1, their average is that of the merged models."""
    rows = {"trainable_token_indices": {"embed_tokens": [3, 7]}}
    folders = [adapter("one", 1, **rows), adapter("other", 2, **rows)]
    merge_models(folders, tmp_path / "merged", MergeSettings(weights=(3, 1)))
    tensors = [safetensors.torch.load_file(f / "adapter_model.safetensors") for f in (*folders, tmp_path / "merged")]
    name = next(name for name in tensors[0] if "token_adapter" in name or "trainable_tokens" in name)
    torch.testing.assert_close(tensors[2][name], 0.75 * tensors[0][name] + 0.25 * tensors[1][name])
    model = load_model(base)
    load_adapter(model, tmp_path / "merged")
    torch.testing.assert_close(model.model.embed_tokens.weight[[3, 7]].float(), tensors[2][name], rtol=0, atol=1e-6)
    for settings in ({"method": "slerp"}, {"weights": (1, 1), "normalize": False}):
        with pytest.raises(ValueError, match="is a whole tensor, not a difference from the base"):
            merge_models(folders, tmp_path / "refused", MergeSettings(**settings))
    with pytest.raises(ValueError, match=r"trainable_token_indices is .*3, 7.* in .*one and null in"):
        merge_models([folders[0], adapter("third", 3)], tmp_path / "refused")


def test_the_order_of_adapters_changes_no_mask(adapter, tmp_path):
    folders, settings = [adapter("one", 1), adapter("other", 2)], {"method": "dare", "density": 0.5, "rank": 4}
    merge_models(folders, tmp_path / "a", MergeSettings(weights=(0.7, 0.4), **settings))
    merge_models(folders[::-1], tmp_path / "b", MergeSettings(weights=(0.4, 0.7), **settings))
    one, other = stored(tmp_path / "a"), stored(tmp_path / "b")
    assert all(torch.equal(one[name], other[name]) for name in one)


def edit(folder: Path, **fields: Any) -> Path:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return folder


def as_whole(folder: Path) -> Path:
    file = folder / "adapter_model.safetensors"
    tensors = safetensors.torch.load_file(file)
    safetensors.torch.save_file(tensors | {"base_model.model.model.norm.weight": torch.ones(64)}, file)
    return folder


def one_matrix(folder: Path) -> Path:
    file = folder / "adapter_model.safetensors"
    tensors = safetensors.torch.load_file(file)
    del tensors[next(name for name in tensors if "lora_B" in name)]
    safetensors.torch.save_file(tensors, file)
    return folder


REFUSED: dict[str, tuple[Callable[[Make], Path], str]] = {
    "dora": (lambda make: make("x", 2, use_dora=True), r"x is a DoRA adapter \(use_dora, .*leanft export --merge"),
    "base": (
        lambda make: edit(make("x", 2), base_model_name_or_path="org/other"),
        "different base models: .*one names .*base, and .*x names org/other.*--base",
    ),
    "experts": (
        lambda make: edit(make("x", 2), target_parameters=["mlp.experts.down_proj"]),
        "x adapts stacks of experts .*mlp.experts.down_proj",
    ),
    "task": (lambda make: edit(make("x", 2), task_type="SEQ_CLS"), 'task_type is "CAUSAL_LM" in .* and "SEQ_CLS" in'),
    "whole": (lambda make: as_whole(make("x", 2)), "one lacks model.norm.weight, which .*x has as a whole tensor"),
    "one matrix": (lambda make: one_matrix(make("x", 2)), r"has the matrices \[4, \d+\] and None; expected \(R, I\)"),
    "pissa": (lambda make: edit(make("x", 2), init_lora_weights="pissa"), "init_lora_weights is 'pissa'"),
    "another kind": (lambda make: edit(make("x", 2), peft_type="IA3"), "peft_type is 'IA3'"),
}


@pytest.mark.first(4)
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_merged_is_refused_by_name(adapter, tmp_path, name):
    make, message = REFUSED[name]
    folders = [adapter("one", 1), make(adapter)]
    with pytest.raises(ValueError, match=message):
        merge_models(folders, tmp_path / "out" / "merged")
    assert not (tmp_path / "out").exists()


def test_adapters_of_other_shapes_are_refused(adapter, base, changed, tmp_path):
    wider = changed("wider", intermediate_size=128)
    folders = [adapter("one", 1), edit(adapter("x", 2, wider), base_model_name_or_path=str(base))]
    with pytest.raises(ValueError, match="mlp.down_proj has 64 outputs and 96 inputs in .*one, and 64 and 128 in .*x"):
        merge_models(folders, tmp_path / "merged")
    with pytest.raises(ValueError, match="lora_A.* has shape"):
        merge_models([folders[0], adapter("third", 3)], tmp_path / "merged", MergeSettings(base=str(wider)))


def test_a_base_of_two_names_is_one_model(adapter, base, tmp_path):
    """Folders with the same weights; or the user names the base, which the new adapter then names."""
    moved = tmp_path / "moved"
    shutil.copytree(base, moved)
    folders = [adapter("one", 1), edit(adapter("x", 2), base_model_name_or_path=str(moved))]
    merge_models(folders, tmp_path / "merged")
    edit(folders[1], base_model_name_or_path="org/elsewhere")
    merge_models(folders, tmp_path / "named", MergeSettings(base=str(moved)))
    config = json.loads((tmp_path / "named" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == (str(moved), None)


def test_the_choice_of_layers_is_kept_if_it_is_shared(adapter, tmp_path):
    folders = [adapter("one", 1), adapter("other", 2)]
    merge_models(folders, tmp_path / "merged")
    config = json.loads((tmp_path / "merged" / "adapter_config.json").read_text())
    assert config["target_modules"] == sorted(FIRST["target_modules"])
    assert (config["r"], config["lora_alpha"], config["rank_pattern"]) == (8, 8, {})
    assert "2 adapters, merged by lean_ft's method `linear`" in (tmp_path / "merged" / "README.md").read_text()
