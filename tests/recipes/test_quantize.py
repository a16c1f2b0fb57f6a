"""Quantization against torchao's functions and transformers' reading of the result."""

import json
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization import Int8DynamicActivationIntxWeightConfig, IntxWeightOnlyConfig, PerGroup, quantize_
from torchao.quantization.qat import QATConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

from lean_ft.data import sft_batches
from lean_ft.hub.paths import resolve_data_path
from lean_ft.losses import CrossEntropy
from lean_ft.models import load_model
from lean_ft.models.moe import Experts
from lean_ft.optim import build_optimizer
from lean_ft.quantize import quantize
from lean_ft.settings.text import load_config
from lean_ft.system.catalog import find_recipe, load_recipe
from lean_ft.tokenizers import load_tokenizer

KINDS = ("int8", "int4", "float8", "int8_dynamic_int8_weight", "int8_dynamic_int4_weight")
IDS = torch.arange(48).reshape(2, 24) * 13 % 768


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    return load_recipe(find_recipe("quantize"))


def run(recipe: ModuleType, **settings: object) -> None:
    given = {"model.path": "tiny", "model.dtype": "float32", **settings}
    recipe.main(
        load_config(recipe.Config, None, [f"{name.replace('__', '.')}={value}" for name, value in given.items()])
    )


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_computes_the_same(
    recipe: ModuleType, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(resolve_data_path("tiny/validation.jsonl").read_text().splitlines()[:24]))
    run(recipe, kind=kind, output=tmp_path / "q", data__source=rows, batch_size=5)
    theirs, whole = AutoModelForCausalLM.from_pretrained(tmp_path / "q"), load_model("tiny")
    ours = load_model("tiny")
    assert quantize(ours, kind) == 28
    with torch.inference_mode():
        expected, logits = ours(IDS), theirs(IDS).logits
        # Activations are rounded to 1/127 of a token's maximum. Sums in another order can round to the neighboring step.
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


def _plain_loss(model: nn.Module, rows: Path) -> float:
    """Return the mean cross-entropy of the held-out rows from whole logits."""
    config = load_config(load_recipe(find_recipe("finetune")).Config, None, [*TRAINING, "output_dir=x"])
    data = config.data.model_copy(update={"source": str(rows)})
    batches, _ = sft_batches(data, load_tokenizer("tiny"), batch_size=24, seed=0)
    total, count = 0.0, 0
    with torch.inference_mode():
        for batch in batches.take(batches.batches_per_epoch):
            logits = model(batch.input_ids)
            total += nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum").item()
            count += batch.num_targets
    return total / count


TRAINING = ["model.path=tiny", "model.dtype=float32", "data.source=tiny/train.jsonl", "batch_size=4", "device=cpu"]
TRAINING += ["max_steps=3", "optimizer.lr=1e-3", "schedule.name=constant", "plan=false", "clip_grad_norm=1.0"]


@pytest.mark.parametrize("kind", ["int4", "int8_dynamic_int4_weight"])
def test_training_and_conversion_equal_torchao_bitwise(recipe: ModuleType, kind: str, tmp_path: Path) -> None:
    finetune = load_recipe(find_recipe("finetune"))
    given = [*TRAINING, f"quantize.train={kind}", f"output_dir={tmp_path / 'run'}"]
    finetune.main(load_config(finetune.Config, None, given))
    run(recipe, model__path=tmp_path / "run", kind=kind, output=tmp_path / "q")

    cfg = load_config(finetune.Config, None, [*TRAINING, "output_dir=x"])
    torch.manual_seed(cfg.seed)
    group = PerGroup(32)
    base = {
        "int4": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=group),
        "int8_dynamic_int4_weight": Int8DynamicActivationIntxWeightConfig(
            weight_dtype=torch.int4, weight_granularity=group
        ),
    }[kind]
    model, unprepared = load_model("tiny"), load_model("tiny")
    batches, _ = sft_batches(cfg.data, load_tokenizer("tiny"), batch_size=4, seed=cfg.seed)
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


def test_memory_settings_change_no_bit_of_quantization_aware_training(tmp_path: Path) -> None:
    finetune = load_recipe(find_recipe("finetune"))
    losses = []
    for name, more in {
        "plain": [],
        "small": ["optimizer.in_backward=true", "memory.activation_checkpointing=full"],
    }.items():
        given = [*TRAINING[:-1], "quantize.train=int8_dynamic_int4_weight", f"output_dir={tmp_path / name}", *more]
        finetune.main(load_config(finetune.Config, None, given))
        rows = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(row)["loss"] for row in rows])
    assert losses[0] == losses[1]
    weights = [load_file(next((tmp_path / name).glob("step_*3")) / "model.safetensors") for name in ("plain", "small")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["quantize.train=nvfp4"], "nvfp4 is not done here: .* GPUs from Blackwell on"),
        (["quantize.train=int4", "lora.rank=4"], "an adapter freezes them"),
        (["quantize.train=int4", "memory.float8_products=true"], "both round the layers' products"),
        (["quantize.train=int4", "quantize.group_size=48"], "128 inputs, which is not a multiple of group_size=48"),
    ],
)
def test_invalid_settings_are_refused(settings: list[str], message: str, tmp_path: Path) -> None:
    finetune = load_recipe(find_recipe("finetune"))
    with pytest.raises(ValueError, match=message):
        finetune.main(load_config(finetune.Config, None, [*TRAINING, *settings, f"output_dir={tmp_path / 'run'}"]))


def test_gpu_kinds_and_mixtures_are_refused(recipe: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="int4_packed is not done here: its kernels"):
        run(recipe, kind="int4_packed", output=tmp_path / "q")
    model = load_model("tiny")
    model.experts = Experts.__new__(Experts)
    nn.Module.__init__(model.experts)
    with pytest.raises(ValueError, match="this model has experts"):
        quantize(model, "int8")
