"""Plans of recipes, compared with sizes computed by hand and with real training steps."""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING

from lean_ft.hub.paths import resolve_model_path
from lean_ft.models import Decoder, load_model
from lean_ft.optim import build_optimizer
from lean_ft.optim.streamed import StreamedState
from lean_ft.plan import step
from lean_ft.plan.devices import CPU, Kernel, find_device
from lean_ft.plan.labels import STATES
from lean_ft.plan.rehearsal import Rehearsal, rehearse
from lean_ft.plan.trace import Trace
from lean_ft.system.catalog import find_recipe, load_recipe
from lean_ft.system.host_link import HostLink
from tests.models.family_cases import CASES, SIZES
from tests.recipes.conftest import config_of, planned

RECIPE = "full_finetune_single_device"
ROWS, COLUMNS = 2, 256
Plan = Callable[..., Rehearsal]


@pytest.fixture
def settings(small_model: Path) -> tuple[str, ...]:
    return (
        f"batch_size={ROWS}",
        f"data.max_length={COLUMNS}",
        f"model.path={small_model}",
        "data.source=none.jsonl",
        "optimizer.name=sgd",
    )


@pytest.fixture
def plan(settings: tuple[str, ...]) -> Plan:
    """Plan the recipe with more settings, on a CPU or on a card."""
    return lambda *overrides, device=None: planned(RECIPE, *settings, *overrides, device=device)


@pytest.fixture(scope="module")
def model(small_model: Path) -> Decoder:
    return load_model(small_model, random_init=True, dtype=torch.bfloat16)


@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["sgd", "adamw", "adamw_8bit", "adamw_8bit_torchao", "adamw_4bit", "adafactor"])
def test_weights_and_optimizer_state_are_their_real_bytes(plan: Plan, settings, model: Decoder, name: str):
    optimizer = build_optimizer(model, config_of(RECIPE, *settings, f"optimizer.name={name}"))
    parts = (plan() if name == "sgd" else plan(f"optimizer.name={name}")).peak.bytes_by_label
    assert parts["weights"] == sum(p.nbytes for p in model.parameters())
    # The optimizer's lookup tables take a few KiB in addition to its state.
    assert 0 <= parts.get("optimizer state", 0) - optimizer.state_bytes < 2**18


@pytest.mark.long
def test_stepping_in_backward_keeps_one_gradient_at_a_time(plan: Plan, model: Decoder):
    weights = sum(p.nbytes for p in model.parameters())
    at_once, one_by_one = (
        plan("data.max_length=8", "batch_size=1", f"optimizer.in_backward={is_on}") for is_on in ("false", "true")
    )
    assert at_once.peak_bytes > 1.9 * weights
    assert one_by_one.peak_bytes < at_once.peak_bytes


@pytest.mark.parametrize("compiled", [True, False])
def test_uncompiled_norms_are_kernels_of_a_gpu(settings, model: Decoder, compiled: bool):
    """One in forward and one in backward, which computes the gradient of the input alone. The first layer's input has
    no gradient. Compiled layers have none of these kernels, also the first."""
    ledger = planned("lora_finetune_single_device", *settings, f"compile={compiled}".lower(), device="A100 80GB").ledger
    counts = {module: launches.number for (module, operation), launches in ledger.items() if operation == "rms_norm"}
    number = 2 * model.config.num_layers
    layers = {} if compiled else {"input_layernorm": number - 1, "post_attention_layernorm": number}
    assert counts == {"model.norm": 2} | layers


def test_a_plan_for_a_gpu_counts_the_launches_of_a_gpu(plan: Plan, model: Decoder):
    """For each gradient its norm, two launches that zero it unless the norm is finite, and the update."""
    counts: Counter[str] = Counter()
    for (_, operation), launches in plan(
        "optimizer.name=adamw_8bit", "optimizer.in_backward=true", device="H100"
    ).ledger.items():
        counts[operation] += int(launches.number)
    num_gradients = len(list(model.parameters()))
    assert counts["linalg_vector_norm"] == num_gradients + 1  # and the norm over all
    assert counts["le"] == num_gradients <= counts["optimizer step"]
    assert not counts["dot"], "a CPU sums the squares slice by slice"


def test_attention_counts_the_tokens_of_whole_documents(plan: Plan, model: Decoder):
    """Two products of each query with half of its document, in each layer."""
    found = plan("data.packing=bfd", device="H100").ledger
    flops = sum(own.flops for (_, name), own in found.items() if name == "lean_ft.document_attention")
    width = model.config.num_heads * model.config.head_dim
    assert flops == model.config.num_layers * 2 * (ROWS * COLUMNS) * width * COLUMNS


def test_an_update_in_compiled_slices_takes_the_time_of_its_instructions(settings, model: Decoder):
    """bitsandbytes' kernel, without stochastic rounding, takes the time of its memory traffic."""
    card = find_device("H100")
    num_bytes = 10e9  # of a billion parameters

    def seconds(rounding: str) -> float:
        cfg = config_of(RECIPE, *settings, "optimizer.name=adamw_8bit", f"optimizer.stochastic_rounding={rounding}")
        state = build_optimizer(model, cfg).states[0]
        return card.kernel_seconds(Kernel(0.0, num_bytes, instructions=1e9 * state.rule.instructions(state)))

    fast, slow = seconds("false"), seconds("true")
    assert fast == pytest.approx(num_bytes / (card.bytes_per_second * card.memory_share), rel=0.01)
    assert 3 * fast < slow < 6 * fast


@pytest.mark.first(1)
@pytest.mark.parametrize(("lean", "fast"), [("full", "none"), ("full", "selective"), ("selective", "none")])
def test_checkpointing_keeps_the_layers_inputs(plan: Plan, lean: str, fast: str):
    given = {kind: [f"memory.activation_checkpointing={kind}"] for kind in (lean, fast)} | {"none": []}
    less, more = plan(*given[lean]), plan(*given[fast])
    assert less.peak_bytes < more.peak_bytes
    assert less.step_seconds > more.step_seconds


@pytest.mark.long
@pytest.mark.parametrize(
    "overrides",
    [
        ("model.dtype=float16", "gradient_accumulation_steps=4", "clip_grad_norm=1.0"),
        ("compile=true", "optimizer.name=adamw_8bit", "optimizer.in_backward=true"),
        ("compile=true", "memory.activation_checkpointing=selective", "data.packing=bfd"),
        ("optimizer.stochastic_rounding=true", "optimizer.name=adamw"),
    ],
)
def test_every_kind_of_setting_can_be_rehearsed(plan: Plan, overrides: tuple[str, ...]):
    rehearsal = plan(*overrides)
    assert rehearsal.peak_bytes == sum(rehearsal.peak.bytes_by_label.values()) > 0
    assert rehearsal.step_seconds > 0
    assert rehearsal.tokens == ROWS * COLUMNS * (4 if "gradient_accumulation_steps=4" in overrides else 1)


def edited(folder: Path, *changes: tuple[str, str]) -> ModuleType:
    """A copy of the recipe with more lines before some of its lines."""
    text = find_recipe(RECIPE).read_text()
    for line, more in (("from lean_ft.data", "import torch\n"), *changes):
        assert line in text
        text = text.replace(line, more + line, 1)
    (folder / "mine.py").write_text(text)
    return load_recipe(folder / "mine.py")


def test_an_edited_recipe_is_planned_as_it_was_edited_and_nothing_is_left(plan: Plan, settings, small_model, tmp_path):
    """A recipe that keeps an 8 MiB tensor during the step takes 8 MiB more. No data and no run directory are needed,
    and torch.compile is restored."""
    kept = "    kept = torch.ones(2**23, dtype=torch.uint8)\n"
    recipe = edited(tmp_path, ("    for step in run.steps():", kept))
    before = torch.compile, torch.Tensor.backward
    changed = rehearse(recipe, config_of(RECIPE, *settings, folder=tmp_path / "run"), CPU)
    assert changed.peak_bytes - plan().peak_bytes == 2**23
    assert str(small_model / "config.json") in changed.model_files
    assert (torch.compile, torch.Tensor.backward) == before
    assert [file.name for file in tmp_path.iterdir() if file.name != "__pycache__"] == ["mine.py"]


@pytest.mark.long
def test_a_recipe_with_a_second_model_that_reads_values_is_planned(plan: Plan, settings, tmp_path: Path):
    """Like a recipe with a reference: its weights count, its pass saves nothing, and the host reads an arbitrary
    value."""
    passes = (
        "            with torch.no_grad():\n"
        "                expected = reference(batch.input_ids, batch.positions, return_hidden=True)\n"
        "            if not expected.isfinite().all() or float(expected.sum()) == 0.0 or tokenizer.eos_id is None:\n"
        "                continue\n"
    )
    loads = "    reference = load_model(cfg.model, device)\n"
    recipe = edited(tmp_path, ("    apply_memory(", loads), ("            # Sum, then divide", passes))
    two, plain = rehearse(recipe, config_of(RECIPE, *settings), CPU), plan()
    weights = plain.peak.bytes_by_label["weights"]
    assert two.peak.bytes_by_label["weights"] == 2 * weights
    assert two.num_parameters == 2 * plain.num_parameters
    assert two.peak_bytes - plain.peak_bytes == pytest.approx(weights, rel=0.2)


@pytest.mark.long
def test_what_goes_round_many_times_is_planned_in_a_few(plan: Plan, monkeypatch):
    """A step of 16 million tokens takes hardly more operations to plan than one of 4,096; a larger one is refused."""
    operations, dispatch = Counter[int](), Trace.__torch_dispatch__
    plans = dict[int, Rehearsal]()

    def counted(self: Trace, *arguments: Any, **more: Any) -> Any:
        operations[len(plans)] += 1
        return dispatch(self, *arguments, **more)

    monkeypatch.setattr(Trace, "__torch_dispatch__", counted)
    for rows in (16, 2**16):
        plans[rows] = plan(f"batch_size={rows}", "memory.loss_chunk_tokens=512")
    assert plans[2**16].step_seconds / plans[16].step_seconds == pytest.approx(2**16 / 16, rel=0.1)
    assert operations[1] < 1.5 * operations[0]
    with pytest.raises(ValueError, match="at most 16,777,216 can be planned"):
        plan("data.max_length=1000000000")


def test_asking_a_tensor_for_its_device_takes_no_time():
    trace = Trace(CPU)
    with FakeTensorMode(), trace:
        large = torch.empty(2**30)
        before = trace.time.spent.seconds
        for _ in range(10):
            _ = large.device, large.dtype, large.shape
    assert trace.time.spent.seconds == before


@pytest.mark.long
def test_what_lies_in_the_hosts_memory_is_counted_there_and_not_on_the_device(plan: Plan, monkeypatch):
    given = ("optimizer.name=adamw", "optimizer.in_backward=true")
    on_device = plan(*given, device="A100 80GB")
    monkeypatch.setattr(
        StreamedState.__init__, "__kwdefaults__", {"smallest_bytes": 2**12, "ahead_bytes": 0, "part_bytes": 2**14}
    )
    monkeypatch.setattr(step, "IN_FLIGHT_BYTES", 0)
    monkeypatch.setattr(HostLink.__init__, "__defaults__", (0,))
    streamed = plan(*given, "optimizer.state=streamed", "seed=7", device="A100 80GB")  # no other test has this seed
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


def config_folder(folder: Path, case: str, **changes: Any) -> str:
    """Write the config.json of a family's case; return the setting that names its folder."""
    model_type, sizes = CASES[case]
    config = CONFIG_MAPPING[model_type](**{**SIZES, **sizes, **changes}).to_dict()
    (folder / "config.json").write_text(json.dumps(config))
    for file in resolve_model_path("tiny").glob("tokenizer*"):
        shutil.copy(file, folder)
    return f"model.path={folder}"


@pytest.mark.long
@pytest.mark.parametrize("device", [None, "H100"], ids=["cpu", "gpu"])
def test_layers_that_keep_a_state_are_planned(plan: Plan, tmp_path: Path, device: str | None):
    """Packed and compiled; their operations count, and are linear in the row length, not quadratic."""
    own = (
        config_folder(tmp_path, "qwen3_5_text", layer_types=["linear_attention"] * 3),
        "model.random_init=true",
        "data.packing=bfd",
        "optimizer.in_backward=true",
    )
    plain = plan(*own, device=device)
    model = load_model(tmp_path, random_init=True, dtype=torch.bfloat16)
    assert plain.peak.bytes_by_label["weights"] == sum(p.nbytes for p in model.parameters())
    compiled = plan(*own, "compile=true", "memory.activation_checkpointing=full", device=device)
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
    folder = config_folder(
        tmp_path,
        "gpt_oss",
        hidden_size=64,
        intermediate_size=64,
        quantization_config={"quant_method": "mxfp4"},
    )
    own = (folder, "model.random_init=true", "data.source=none.jsonl", "lora.rank=4")
    numbers = {
        form: planned("finetune", *own, f"lora.quantize={form}", device=None).num_parameters
        for form in ("none", "auto", "nf4", "float8")
    }
    assert len(set(numbers.values())) == 1, numbers


@pytest.mark.long
@pytest.mark.parametrize("num_caches", [2, 1])
def test_rows_that_wait_for_a_reply_have_a_second_cache(num_caches: int, small_model, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("env.py").write_text("class Env:\n    def reset(self, row): ...\n    def step(self, action): ...\n")
    shape = ["batch_size=1", "gradient_accumulation_steps=64", "generation.cache_gib=1", "data.max_prompt_length=100"]
    with_turns = ["environment=env.py:Env", "rewards=[environment]", "generation.max_given_tokens=300"]
    turns = {
        1: ["rewards=[length]", "generation.max_new_tokens=500"],
        2: [*with_turns, "generation.max_new_tokens=200"],
    }[num_caches]
    found = planned("grpo", f"model.path={small_model}", "data.source=none.jsonl", *shape, *turns, device=None)
    cache_bytes = 64 * 600 * 2 * 2 * 32 * 2 * 2  # rows, tokens, keys and values, heads, features, layers, bytes
    assert num_caches * cache_bytes <= found.peak.bytes_by_label["generation"] < (num_caches + 0.5) * cache_bytes


@pytest.mark.long
def test_more_kinds_of_layers_compile_than_the_compiler_recompiles_by_default(plan: Plan, tmp_path: Path):
    sizes = {"num_hidden_layers": 9, "intermediate_size": list(range(16, 25)), "num_kv_shared_layers": 0}
    sizes |= {"layer_types": ["full_attention"] * 9, "activation_sparsity_pattern": [0.0] * 9}
    plan(config_folder(tmp_path, "gemma3n_text", **sizes), "model.random_init=true", "compile=true")
