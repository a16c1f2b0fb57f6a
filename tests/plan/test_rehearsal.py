"""Plans of recipes, compared with sizes computed by hand and with real training steps."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING

from lean_ft.hub.paths import resolve_model_path
from lean_ft.models import load_model
from lean_ft.optim import build_optimizer
from lean_ft.optim.streamed import StreamedState
from lean_ft.plan import world
from lean_ft.plan.devices import CPU, find_device
from lean_ft.plan.labels import STATES
from lean_ft.plan.rehearsal import rehearse
from lean_ft.plan.trace import Trace
from lean_ft.settings.text import load_config
from lean_ft.system.catalog import find_recipe, load_recipe
from lean_ft.system.host_link import HostLink
from tests.models.family_cases import CASES, SIZES

RECIPE = "full_finetune_single_device"
ROWS, COLUMNS = 2, 256


def settings(tmp_path: Path, *overrides: str):
    recipe = load_recipe(find_recipe(RECIPE))
    own = [f"batch_size={ROWS}", f"data.max_length={COLUMNS}", "model.path=tiny", "data.source=none.jsonl"]
    return recipe, load_config(recipe.Config, None, [*own, f"output_dir={tmp_path / 'run'}", *overrides])


def planned(tmp_path: Path, *overrides: str, device=CPU):
    return rehearse(*settings(tmp_path, *overrides), device)


@pytest.fixture(scope="module")
def tiny_model():
    return load_model("tiny", dtype=torch.bfloat16)


@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["sgd", "adamw", "adamw_8bit", "adamw_8bit_torchao", "adamw_4bit", "adafactor"])
def test_weights_and_optimizer_state_are_their_real_bytes(tmp_path: Path, tiny_model, name: str):
    recipe, cfg = settings(tmp_path, f"optimizer.name={name}")
    optimizer = build_optimizer(tiny_model, cfg)
    parts = rehearse(recipe, cfg, CPU).peak.bytes_by_label
    assert parts["weights"] == sum(p.nbytes for p in tiny_model.parameters())
    # The optimizer's lookup tables take a few KiB in addition to its state.
    assert 0 <= parts.get("optimizer state", 0) - optimizer.state_bytes < 2**18


def test_stepping_in_backward_keeps_one_gradient_at_a_time(tmp_path: Path, tiny_model):
    weights = sum(p.nbytes for p in tiny_model.parameters())
    at_once = planned(tmp_path, "optimizer.name=sgd", "data.max_length=8", "batch_size=1")
    one_by_one = planned(
        tmp_path, "optimizer.name=sgd", "data.max_length=8", "batch_size=1", "optimizer.in_backward=true"
    )
    assert at_once.peak_bytes > 1.9 * weights
    assert one_by_one.peak_bytes < at_once.peak_bytes


def test_a_plan_for_a_gpu_counts_the_launches_of_a_gpu(tmp_path: Path, tiny_model):
    """For each gradient its norm, two launches that zero it unless the norm is finite, and the update."""
    ledger = planned(tmp_path, "optimizer.in_backward=true", device=find_device("H100")).ledger
    counts: Counter[str] = Counter()
    for (_, operation), launches in ledger.items():
        counts[operation] += int(launches.number)
    num_gradients = len(list(tiny_model.parameters()))
    assert counts["linalg_vector_norm"] == num_gradients + 1  # and the norm over all
    assert counts["le"] == num_gradients <= counts["optimizer step"]
    assert not counts["dot"], "a CPU sums the squares slice by slice"


def test_checkpointing_keeps_the_layers_inputs(tmp_path: Path, tiny_model):
    plain = planned(tmp_path, "optimizer.name=sgd")
    full = planned(tmp_path, "optimizer.name=sgd", "memory.activation_checkpointing=full")
    selective = planned(tmp_path, "optimizer.name=sgd", "memory.activation_checkpointing=selective")
    assert full.peak_bytes < selective.peak_bytes < plain.peak_bytes
    assert full.step_seconds > plain.step_seconds


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "overrides",
    [
        ("compile=true", "optimizer.name=adamw_8bit", "optimizer.in_backward=true"),
        ("compile=true", "memory.activation_checkpointing=selective", "data.packing=bfd"),
        ("model.dtype=float16", "gradient_accumulation_steps=4", "clip_grad_norm=1.0"),
        ("optimizer.stochastic_rounding=true", "optimizer.name=adamw"),
    ],
)
def test_every_kind_of_setting_can_be_rehearsed(tmp_path: Path, overrides: tuple[str, ...]):
    rehearsal = planned(tmp_path, *overrides)
    assert rehearsal.peak_bytes == sum(rehearsal.peak.bytes_by_label.values()) > 0
    assert rehearsal.step_seconds > 0
    assert rehearsal.tokens == ROWS * COLUMNS * (4 if "gradient_accumulation_steps=4" in overrides else 1)


def test_a_rehearsal_needs_and_leaves_nothing(tmp_path: Path):
    """No data and no run directory; afterwards torch.compile is restored."""
    before = torch.compile, torch.Tensor.backward
    planned(tmp_path)
    assert (torch.compile, torch.Tensor.backward) == before
    assert list(tmp_path.iterdir()) == []


def test_an_edited_recipe_is_planned_as_it_was_edited(tmp_path: Path):
    """A copy of the recipe that keeps an 8 MiB tensor during the step takes 8 MiB more."""
    source = find_recipe(RECIPE).read_text().replace("from lean_ft.data", "import torch\nfrom lean_ft.data", 1)
    edited = tmp_path / "mine.py"
    edited.write_text(
        source.replace(
            "    for step in run.steps():",
            "    kept = torch.ones(2**23, dtype=torch.uint8)\n    for step in run.steps():",
        )
    )
    recipe, cfg = settings(tmp_path)
    plain = rehearse(recipe, cfg, CPU)
    changed = rehearse(load_recipe(edited), cfg, CPU)
    assert changed.peak_bytes - plain.peak_bytes == 2**23


@pytest.mark.long
def test_a_recipe_with_a_second_model_that_reads_values_is_planned(tmp_path: Path):
    """Like a recipe with a reference: its weights count, its pass saves nothing, and the host reads an arbitrary
    value."""
    source = find_recipe(RECIPE).read_text()
    edited = tmp_path / "mine.py"
    edited.write_text(
        source.replace("    apply_memory(", "    reference = load_model(cfg.model, device)\n    apply_memory(")
        .replace(
            "            # Sum, then divide",
            "            with torch.no_grad():\n"
            "                expected = reference(batch.input_ids, batch.positions, return_hidden=True)\n"
            "            if not expected.isfinite().all() or float(expected.sum()) == 0.0 or tokenizer.eos_id is None:\n"
            "                continue\n"
            "            # Sum, then divide",
        )
        .replace("from lean_ft.data", "import torch\nfrom lean_ft.data", 1)
    )
    recipe, cfg = settings(tmp_path)
    plain, two = rehearse(recipe, cfg, CPU), rehearse(load_recipe(edited), cfg, CPU)
    weights = [rehearsal.peak.bytes_by_label["weights"] for rehearsal in (plain, two)]
    assert weights[1] == 2 * weights[0]
    assert two.num_parameters == 2 * plain.num_parameters
    assert two.peak_bytes - plain.peak_bytes == pytest.approx(weights[0], rel=0.2)


@pytest.mark.long
def test_what_goes_round_many_times_is_planned_in_a_few(tmp_path: Path):
    """A step of a billion tokens takes no longer to plan; a number of elements beyond 64 bits is an error."""
    few, many = (planned(tmp_path, f"batch_size={rows}", "memory.loss_chunk_tokens=512") for rows in (16, 10**6))
    assert many.step_seconds / few.step_seconds == pytest.approx(10**6 / 16, rel=0.1)
    assert many.planning_seconds < 10 * max(1.0, few.planning_seconds)
    with pytest.raises(ValueError, match="more elements than 64 bits can count"):
        planned(tmp_path, "data.max_length=1000000000")


def test_asking_a_tensor_for_its_device_takes_no_time():
    trace = Trace(CPU)
    with FakeTensorMode(), trace:
        large = torch.empty(2**30)
        before = trace.time.spent.seconds
        for _ in range(10):
            _ = large.device, large.dtype, large.shape
    assert trace.time.spent.seconds == before


@pytest.mark.long
def test_what_lies_in_the_hosts_memory_is_counted_there_and_not_on_the_device(tmp_path: Path, monkeypatch):
    card, settings = find_device("A100 80GB"), ("optimizer.name=adamw", "optimizer.in_backward=true")
    on_device = planned(tmp_path, *settings, device=card)
    monkeypatch.setattr(
        StreamedState.__init__, "__kwdefaults__", {"smallest_bytes": 2**12, "ahead_bytes": 0, "part_bytes": 2**14}
    )
    monkeypatch.setattr(world, "IN_FLIGHT_BYTES", 0)
    monkeypatch.setattr(HostLink.__init__, "__defaults__", (0,))
    streamed = planned(tmp_path, *settings, "optimizer.state=streamed", device=card)
    state_bytes = on_device.peak.bytes_by_label[STATES]
    assert on_device.pinned_bytes == 0 and 0.98 * state_bytes < streamed.pinned_bytes <= state_bytes
    assert streamed.peak_bytes < on_device.peak_bytes - 0.5 * state_bytes


def test_parts_of_pinned_memory_take_nothing_of_the_device():
    trace = Trace(find_device("A100 80GB"))
    with FakeTensorMode(), trace:
        with trace.uncounted():
            host = torch.empty(1000)
        trace.memory.pin(host)
        part = host[10:20]
        assert trace.memory.live_bytes == 0 and trace.memory.pinned_bytes == 4000
        del host, part
        trace.memory.pin(torch.empty(500))
    assert trace.memory.pinned_bytes == 4000  # the peak


@pytest.mark.long
@pytest.mark.parametrize("device", [CPU, find_device("H100")], ids=["cpu", "gpu"])
def test_layers_that_keep_a_state_are_planned(tmp_path: Path, device):
    """Packed and compiled; their operations count, and are linear in the row length, not quadratic."""
    model_type, sizes = CASES["qwen3_5_text"]
    sizes = {**SIZES, **sizes, "layer_types": ["linear_attention"] * 3}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG_MAPPING[model_type](**sizes).to_dict()))
    for file in Path(str(resolve_model_path("tiny"))).glob("tokenizer*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    own = (f"model.path={tmp_path}", "model.random_init=true", "data.packing=bfd", "optimizer.in_backward=true")
    plain = planned(tmp_path, *own, device=device)
    model = load_model(tmp_path, random_init=True, dtype=torch.bfloat16)
    assert plain.peak.bytes_by_label["weights"] == sum(p.nbytes for p in model.parameters())
    compiled = planned(tmp_path, *own, "compile=true", "memory.activation_checkpointing=full", device=device)
    assert 0 < compiled.peak_bytes <= plain.peak_bytes
    ids = torch.zeros(1, 2048, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(ids[:, :1024])
        half = counter.get_total_flops()
        model(ids)
    assert counter.get_total_flops() - half == 2 * half
    assert counter.flop_counts["Global"][torch.ops.lean_ft.linear_attention] > 0


@pytest.mark.long
def test_quantized_weights_count_with_their_dense_shapes(tmp_path: Path) -> None:
    model_type, fields = CASES["gpt_oss"]
    config = CONFIG_MAPPING[model_type](**{**SIZES, **fields, "hidden_size": 64, "intermediate_size": 64}).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    recipe = load_recipe(find_recipe("finetune"))
    own = [
        f"model.path={tmp_path}",
        "model.random_init=true",
        "data.source=none.jsonl",
        f"output_dir={tmp_path / 'run'}",
    ]
    numbers = {
        form: rehearse(
            recipe, load_config(recipe.Config, None, [*own, f"lora.quantize={form}", "lora.rank=4"]), CPU
        ).num_parameters
        for form in ("none", "auto", "nf4", "float8")
    }
    assert len(set(numbers.values())) == 1, numbers


def test_rows_that_wait_for_a_reply_have_a_second_cache(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("env.py").write_text("class Env:\n    def reset(self, row): ...\n    def step(self, action): ...\n")
    recipe = load_recipe(find_recipe("grpo"))
    shape = ["batch_size=1", "gradient_accumulation_steps=64", "generation.cache_gib=1", "data.max_prompt_length=100"]
    own = ["model.path=tiny", "data.source=none.jsonl", "output_dir=run", *shape]
    with_turns = ["environment=env.py:Env", "rewards=[environment]", "generation.max_given_tokens=300"]
    cases = {
        1: ["rewards=[length]", "generation.max_new_tokens=500"],
        2: [*with_turns, "generation.max_new_tokens=200"],
    }
    cache_bytes = 64 * 600 * 2 * 2 * 32 * 4 * 2  # rows, tokens, keys and values, heads, features, layers, bytes
    for num_caches, settings in cases.items():
        parts = rehearse(recipe, load_config(recipe.Config, None, [*own, *settings]), CPU).peak.bytes_by_label
        assert num_caches * cache_bytes <= parts["generation"] < (num_caches + 0.5) * cache_bytes


@pytest.mark.long
def test_more_kinds_of_layers_compile_than_the_compiler_recompiles_by_default(tmp_path: Path):
    model_type, fields = CASES["gemma3n_text"]
    sizes = {"num_hidden_layers": 9, "intermediate_size": list(range(16, 25)), "num_kv_shared_layers": 0}
    sizes |= {"layer_types": ["full_attention"] * 9, "activation_sparsity_pattern": [0.0] * 9}
    config = CONFIG_MAPPING[model_type](**{**SIZES, **fields, **sizes}).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config))
    planned(tmp_path, f"model.path={tmp_path}", "model.random_init=true", "compile=true")
