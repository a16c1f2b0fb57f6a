"""Quantization against torchao's functions and transformers' reading of the result."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization import Int8DynamicActivationIntxWeightConfig, IntxWeightOnlyConfig, PerGroup, quantize_
from torchao.quantization.qat import QATConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

from lean_ft.data import prepare_batches
from lean_ft.losses import CrossEntropy
from lean_ft.models import load_model
from lean_ft.models.config import MixtureConfig
from lean_ft.optim import build_optimizer
from lean_ft.quantize import quantize
from lean_ft.tokenizers import load_tokenizer
from tests.recipes import cases
from tests.recipes.conftest import Train, config_of, first_rows, recipe_module

RECIPE = "finetune"
SETTINGS = (*cases.CHATS, "max_steps=3", "schedule.name=constant", "clip_grad_norm=1.0")
KINDS = ("int8_dynamic_int4_weight", "float8", "int8", "int4", "int8_dynamic_int8_weight")
IDS = torch.arange(48).reshape(2, 24) * 13 % 768


@pytest.fixture
def own_settings() -> tuple[str, ...]:
    return SETTINGS


def run(*settings: str) -> None:
    recipe_module("quantize").main(config_of("quantize", "model.dtype=float32", *settings))


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_computes_the_same(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = first_rows("tiny/validation.jsonl", 24, tmp_path)
    run("model.path=tiny", f"kind={kind}", f"output={tmp_path / 'q'}", rows, "batch_size=5")
    theirs, whole = AutoModelForCausalLM.from_pretrained(tmp_path / "q"), load_model("tiny")
    ours = load_model("tiny")
    assert quantize(ours, kind) == 28
    with torch.inference_mode():
        expected, logits = ours(IDS), theirs(IDS).logits
        # Activations are rounded to 1/127 of a token's maximum. Sums in another order can round to the neighboring
        # step.
        assert (logits - expected).norm() < (0.03 if "dynamic" in kind else 1e-5) * expected.norm()
        assert (expected - whole(IDS)).abs().max() > 0.01  # it is quantized
    assert type(theirs.model.layers[0].mlp.up_proj.weight) is type(ours.model.layers[0].mlp.up_proj.weight)
    assert AutoTokenizer.from_pretrained(tmp_path / "q")("Hello").input_ids == load_tokenizer("tiny").encode(
        "Hello", True
    )
    before, after = map(float, re.findall(r"([\d.]+) (?:before|after)", capsys.readouterr().out))
    assert before == pytest.approx(_plain_loss(whole, rows), rel=1e-3)
    assert after == pytest.approx(_plain_loss(ours, rows), rel=1e-3) != pytest.approx(before, rel=1e-4)
    with pytest.raises(ValueError, match="quantization_config says the weights are quantized"):
        load_model(tmp_path / "q")


def _plain_loss(model: nn.Module, rows: str) -> float:
    """Return the mean cross-entropy of the held-out rows from whole logits."""
    data = config_of(RECIPE, *SETTINGS, rows).data
    batches, _ = prepare_batches(data, load_tokenizer("tiny"), batch_size=24, seed=0)
    total, count = 0.0, 0
    with torch.inference_mode():
        for batch in batches.take(batches.batches_per_epoch):
            logits = model(batch.input_ids)
            total += nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum").item()
            count += batch.num_targets
    return total / count


@pytest.mark.first(1)
@pytest.mark.parametrize("kind", ["int4", "int8_dynamic_int4_weight"])
def test_training_and_conversion_equal_torchao_bitwise(train: Train, kind: str, tmp_path: Path) -> None:
    train(f"quantize.train={kind}")
    run(f"model.path={tmp_path / 'run'}", f"kind={kind}", f"output={tmp_path / 'q'}")

    cfg = config_of(RECIPE, *SETTINGS)
    torch.manual_seed(cfg.seed)
    group = PerGroup(32)
    base = {
        "int4": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=group),
        "int8_dynamic_int4_weight": Int8DynamicActivationIntxWeightConfig(
            weight_dtype=torch.int4, weight_granularity=group
        ),
    }[kind]
    model, unprepared = load_model("tiny"), load_model("tiny")
    batches, _ = prepare_batches(cfg.data, load_tokenizer("tiny"), batch_size=4, seed=cfg.seed)
    quantize_(model, QATConfig(base, step="prepare"), lambda m, name: isinstance(m, nn.Linear) and ".layers." in name)
    optimizer, cross_entropy = build_optimizer(model, cfg), CrossEntropy(model, cfg)
    for _ in range(3):
        optimizer.set_lr(1e-3)
        (batch,) = batches.take(1)
        assert not torch.equal(model(batch.input_ids), unprepared(batch.input_ids))
        optimizer.scale(cross_entropy(model, batch) / batch.num_targets, last=True).backward()
        optimizer.finish_gradients(max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
    quantize_(model, QATConfig(base, step="convert"))
    expected, _ = flatten_tensor_state_dict({name: p.detach() for name, p in model.named_parameters()})
    written = load_file(tmp_path / "q" / "model.safetensors")
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in written)


@pytest.mark.long
def test_memory_settings_change_no_bit_of_quantization_aware_training(train: Train, tmp_path: Path) -> None:
    kind = ("quantize.train=int8_dynamic_int4_weight", "clip_grad_norm=null")
    lean = ("optimizer.in_backward=true", "memory.activation_checkpointing=full")
    plain, small = train(*kind), train(*kind, *lean, output="small")
    assert [line["loss"] for line in plain] == [line["loss"] for line in small]
    files = [tmp_path / name / "step_00000003" / "model.safetensors" for name in ("run", "small")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_gpu_kinds_and_mixtures_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="int4_packed is not supported: it needs the GPU kernels"):
        run("model.path=tiny", "kind=int4_packed", f"output={tmp_path / 'q'}")
    model = load_model("tiny")
    model.mixture = MixtureConfig(4, 2, 32, weights_sum_to_one=True)
    with pytest.raises(ValueError, match="does not support models with experts"):
        quantize(model, "int8")
