"""Plans for several devices, compared with a traced run on two processes and with bytes computed by hand."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lean_ft.data import Batch, Batches
from lean_ft.hub.paths import resolve_model_path
from lean_ft.losses import IGNORED_LABEL
from lean_ft.plan.devices import CPU, Machines, find_device
from lean_ft.plan.memory import FREED
from lean_ft.plan.ranks import watched_sharding
from lean_ft.plan.rehearsal import Rehearsal, rehearse
from lean_ft.plan.result import Peak
from lean_ft.plan.search import search
from lean_ft.plan.trace import Trace
from lean_ft.settings.text import load_config
from lean_ft.system.catalog import find_recipe, load_recipe
from tests.parallel.processes import on_ranks, supported
from tests.training.toy_runs import QWEN

SIZES = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 2, "vocab_size": 4096}
SIZES |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
SETTINGS = (
    "model.random_init=true",
    "model.dtype=bfloat16",
    "data.source=tiny/train.jsonl",
    "data.packing=wrapped",
    "data.max_length=128",
    "batch_size=2",
    "gradient_accumulation_steps=4",
    "max_steps=1",
    "save_every=0",
    "plan=false",
    "device=cpu",
)
# All ways to shard and gather, with and without checkpointing, with one update for all parameters or one each.
TRACED = supported(
    {
        "in backward, recomputed": (
            "optimizer.in_backward=true",
            "optimizer.name=adamw_8bit",
            "memory.activation_checkpointing=full",
        ),
        "all gradients at once": ("optimizer.name=sgd", "memory.loss_chunk_tokens=64"),
        "layers cut by heads": (
            "parallel.tensor=2",
            "optimizer.in_backward=true",
            "memory.activation_checkpointing=full",
        ),
        "rows cut by tokens": ("parallel.context=2", "optimizer.name=sgd"),
        "copies, whose layers stay whole": ("parallel.replicate=2", "optimizer.in_backward=true"),
        "vocabulary cut": (
            "parallel.vocabulary=cut",
            "optimizer.in_backward=true",
            "memory.activation_checkpointing=full",
            "memory.loss_chunk_tokens=64",
        ),
    }
)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps({**QWEN, **SIZES}))
    for file in resolve_model_path("tiny").glob("*token*"):
        shutil.copy(file, folder)
    return folder


def configured(folder: Path, *overrides: str) -> tuple[Any, Any]:
    recipe = load_recipe(find_recipe("finetune"))
    own = [*SETTINGS, f"model.path={folder}", f"output_dir={folder / 'run'}", *overrides]
    return recipe, load_config(recipe.Config, None, own)


def planned(folder: Path, machines: Machines, *overrides: str, device: Any = CPU) -> Rehearsal:
    return rehearse(*configured(folder, *overrides), device, machines)


def traced(folder: Path) -> dict[str, int]:
    """Peaks of real runs on one of their ranks, with batches as planned: all but the last position of a row have a
    target.

    Bytes are counted like those of a host pool or a GPU, without memory that a CPU's heap retains after loading.
    """
    take = Batches.take
    Batches.take = lambda self, n: [with_all_targets(batch.built) for batch in take(self, n)]  # type: ignore[method-assign]
    found = {}
    for name, overrides in TRACED.items():
        recipe, cfg = configured(folder, "memory.host_pool=false", *overrides)
        trace = Trace(CPU, host_pool=True)
        with watched_sharding(trace), trace:
            recipe.main(cfg.model_copy(update={"output_dir": folder / name}))
        found[name] = without_freed(trace.memory.peak)
    return found


def with_all_targets(batch: Batch) -> Batch:
    labels = batch.input_ids.clone()
    labels[:, -1] = IGNORED_LABEL
    return replace(batch, labels=labels, num_targets=int((labels != IGNORED_LABEL).sum()))


def without_freed(peak: Peak) -> int:
    return peak.total_bytes - peak.bytes_by_label.get(FREED, 0)


@pytest.mark.long
def test_the_planned_peak_is_the_traced_one(model_folder):
    first, second = on_ranks(2, traced, model_folder)
    for name, overrides in TRACED.items():
        plan = planned(model_folder, Machines(2), "memory.host_pool=true", *overrides).peak
        assert first[name] == pytest.approx(without_freed(plan), rel=1e-3), (name, plan)
        assert second[name] <= 1.001 * without_freed(plan), name


def num_bytes(model_folder: Path) -> tuple[int, int]:
    """Bytes of the layers' weights and of the other weights, in bfloat16."""
    import torch

    from lean_ft.models.hf_format import empty_model

    model = empty_model(model_folder, dtype=torch.bfloat16)
    layers = sum(parameter.nbytes for parameter in model.layers.parameters())
    return layers, sum(parameter.nbytes for parameter in model.parameters()) - layers


@pytest.mark.long
@pytest.mark.parametrize(("devices", "count", "rounds"), [(2, 1, 1), (2, 2, 2), (8, 1, 2)])
def test_what_is_sent_is_what_is_gathered_and_summed(model_folder, devices: int, count: int, rounds: int):
    """Layers are gathered twice and their gradients reduced once; the tied output layer is gathered once.

    In each of `rounds` micro-batches of a rank."""
    layers, ends = num_bytes(model_folder)
    n = devices * count
    settings = (f"gradient_accumulation_steps={n * rounds}", "optimizer.name=sgd")
    plan = planned(model_folder, Machines(devices, count), *settings)
    here, away = (plan.sent_bytes, plan.sent_away_bytes) if count == 1 else (plan.sent_away_bytes, plan.sent_bytes)
    assert here == pytest.approx(rounds * (3 * layers + 2 * ends) * (n - 1) / n, rel=1e-3)
    assert away == 0


@pytest.mark.long
def test_whole_layers_and_replicas_send_less(model_folder):
    layers, ends = num_bytes(model_folder)
    whole = planned(model_folder, Machines(2), "parallel.reshard_after_forward=false", "gradient_accumulation_steps=2")
    assert whole.sent_bytes == pytest.approx((2 * layers + 2 * ends) / 2, rel=1e-3)
    # Replicas on two machines exchange the sums of their parts once per step.
    both = planned(model_folder, Machines(2, 2), "parallel.replicate=2", "gradient_accumulation_steps=8")
    assert both.sent_away_bytes == pytest.approx((layers + ends) / 2, rel=1e-3)
    assert both.sent_bytes == pytest.approx(2 * (3 * layers + 2 * ends) / 2, rel=1e-3)


@pytest.mark.long
def test_compiled_layers_send_what_others_do(model_folder):
    settings = ("parallel.context=2", "gradient_accumulation_steps=1", "optimizer.name=sgd")
    eager, compiled = (
        planned(model_folder, Machines(2), *settings, f"compile={on}").sent_bytes for on in ("false", "true")
    )
    assert compiled == pytest.approx(eager, rel=1e-3)


@pytest.mark.long
def test_a_vocabulary_that_stays_cut_takes_its_part(model_folder):
    card = find_device("H100")
    settings = ("gradient_accumulation_steps=8", "optimizer.in_backward=true", "optimizer.name=sgd")
    settings += ("memory.loss_chunk_tokens=32", "memory.activation_checkpointing=full")
    sizes = {**QWEN, **SIZES, "vocab_size": 65536}
    (model_folder / "large").mkdir()
    (model_folder / "large" / "config.json").write_text(json.dumps(sizes))
    for file in model_folder.glob("*token*.json"):
        (model_folder / "large" / file.name).write_bytes(file.read_bytes())
    peaks = {
        how: planned(
            model_folder / "large", Machines(8), *settings, f"parallel.vocabulary={how}", device=card
        ).peak_bytes
        for how in ("gathered", "cut")
    }
    weight = 2 * 65536 * 256
    assert peaks["gathered"] - peaks["cut"] > 1.5 * weight  # the full weight, and the float32 sum of its gradient


@pytest.mark.long
def test_a_search_varies_how_the_model_lies_on_the_devices(model_folder):
    recipe, cfg = configured(model_folder, "optimizer.name=sgd")
    machines, device = Machines(2, 2), find_device("H100")
    copies = rehearse(
        recipe, cfg.model_copy(update={"parallel": cfg.parallel.model_copy(update={"replicate": 4})}), device, machines
    )
    found = search(recipe, cfg, device, copies.reserved_bytes, machines=machines)
    layouts = {candidate.overrides.get("parallel.replicate", 1) for candidate in found.fitting}
    assert layouts == {1, 2, 4}
    assert all("activation_offload" not in name and "streamed" not in name for name in found.refused)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("gradient_accumulation_steps=1",),
            "counts the batches of a step over all processes, so some of the 4 processes",
        ),
        (("parallel.replicate=3",), "needs a multiple of 3 processes"),
        (("memory.activation_offload=true",), "supports one process only"),
        (("parallel.vocabulary=cut", "parallel.replicate=4"), "each process has a replica of the model"),
    ],
)
def test_what_a_run_refuses_its_plan_refuses(model_folder, overrides, message):
    with pytest.raises(ValueError, match=message):
        planned(model_folder, Machines(4), *overrides)
