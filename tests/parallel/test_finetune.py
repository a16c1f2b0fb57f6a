"""The recipe on two ranks equals one process: the same numbers and files, and each resumes the other's checkpoints."""

import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from lean_ft.data import Batches
from lean_ft.hub.paths import resolve_model_path
from lean_ft.models import load_model, save_model
from lean_ft.parallel import join, parallelize
from lean_ft.peft import load_with_adapter
from lean_ft.settings import LoRAConfig, ModelConfig, ParallelConfig
from lean_ft.settings.text import load_config
from lean_ft.system.catalog import find_recipe, load_recipe
from lean_ft.system.shards import local
from tests.models.test_dequantized import edit, in_4_bits
from tests.parallel.processes import SHARDS_PARTS, on_ranks, refusal, selected, supported
from tests.recipes.conftest import TINY
from tests.training.toy_runs import QWEN, TIMES, digests, metrics

TWO_MICRO_BATCHES = ("schedule.name=constant", "batch_size=4", "gradient_accumulation_steps=2", "max_steps=3")
TWO_MICRO_BATCHES += ("memory.host_pool=false", "memory.loss_chunk_tokens=16")
TEXTS = ("data.source=tiny/validation.jsonl", "data.max_length=64", "optimizer.lr=1e-3")
SETTINGS = (*TINY, *TWO_MICRO_BATCHES, *TEXTS)
RECOMPUTED = ("memory.activation_checkpointing=full", "data.packing=bfd")
FLOAT16 = ("model.dtype=float16", "data.validation_fraction=0.1", "eval_every=2", "eval_answers=2")
# With two micro-batches per step, each of two ranks has one, and their sum has the same bits in either order.
SAME_BITS = supported(
    {
        "random, recomputed": ("model.random_init=true", "save_async=true", "save_every=1", *RECOMPUTED),
        "8 bits in backward": (
            *("optimizer.name=adamw_8bit", "optimizer.in_backward=true", "model.dtype=bfloat16", "optimizer.ema=0.9"),
        ),
        "adapter and new rows": (
            *("lora.rank=4", 'model.new_tokens=["e s"," of th"]', "data.shuffle=false", "optimizer.ema=0.9"),
        ),
        "float16, evaluated": FLOAT16,
        "mixture of experts": ("model.path=MIXTURE", "optimizer.in_backward=true"),
        "4-bit base": ("lora.rank=4", "lora.dora=true", "lora.quantize=nf4", "model.dtype=bfloat16"),
        "experts in nf4": ("model.path=MIXTURE", "lora.rank=4", "lora.quantize=nf4", "optimizer.in_backward=true"),
        "experts in mxfp4": ("model.path=FOUR_BITS", "lora.rank=4", "lora.quantize=nf4"),
    }
)
ON_REPLICAS = SAME_BITS.keys() & {"8 bits in backward", "4-bit base"}  # also with parallel.replicate=2
# 20 rows are 5 batches, so the second step of three micro-batches has only two.
CLOSE = ("gradient_accumulation_steps=3", "max_steps=3", "optimizer.name=sgd", "data.validation_fraction=0.75")
UNEVEN = {"close": (), "close mixture": ("model.path=MIXTURE",)}


def run(folder: Path, *settings: str, recipe_name: str = "finetune") -> None:
    recipe = load_recipe(find_recipe(recipe_name))
    given = [re.sub("MIXTURE|FOUR_BITS", lambda name: os.environ.get(name[0], ""), setting) for setting in settings]
    recipe.main(load_config(recipe.Config, None, [*SETTINGS, f"output_dir={folder}", *given]))


def make_mixture(folder: Path, **settings: Any) -> None:
    """A model whose experts are stacks in memory, sharded between experts, and one tensor each on disk.

    Shards of vectors have at least 8 elements: a CPU's fused kernel rounds shorter remainders differently.
    """
    mixture = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [0]}
    mixture |= {"model_type": "qwen3_moe", "vocab_size": 768, "head_dim": 16}
    mixture |= {"router_aux_loss_coef": 0.1, "output_router_logits": True, "norm_topk_prob": True}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**QWEN, **mixture, **settings}))
    save_model(load_model(folder, random_init=True), folder)
    for file in resolve_model_path("tiny").glob("*token*"):
        shutil.copy(file, folder)


def make_four_bits(folder: Path) -> None:
    """A gpt-oss whose experts are stored in MXFP4, an odd number of them."""
    sizes = {
        "model_type": "gpt_oss",
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "sliding_window": 8,
    }
    sizes |= {
        "vocab_size": 768,
        "hidden_size": 64,
        "intermediate_size": 32,
        "swiglu_limit": 7.0,
        "attention_bias": True,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**QWEN, **sizes, "architectures": ["GptOssForCausalLM"]}))
    save_model(load_model(folder, dtype=torch.bfloat16, random_init=True), folder)
    edit(folder, in_4_bits, {"quant_method": "mxfp4"})
    for file in resolve_model_path("tiny").glob("*token*"):
        shutil.copy(file, folder)


ADAPTERS = {"lora": LoRAConfig(rank=4), **({"qlora": LoRAConfig(rank=4, quantize="nf4")} if SHARDS_PARTS else {})}


def held_bytes(adapter: str) -> int:
    """Bytes of weights and adapter on this process."""
    ranks = join(ParallelConfig(), torch.device("cpu"))
    cfg = ModelConfig(path="tiny", random_init=True)
    model = load_with_adapter(cfg, ADAPTERS[adapter], "cpu", ranks)
    parallelize(model, ParallelConfig(), ranks)
    return sum(local(tensor).nbytes for tensor in [*model.parameters(), *model.buffers()])


@pytest.mark.long
def test_a_rank_holds_its_part_of_a_frozen_base(on_two):
    for name in ADAPTERS:
        alone = held_bytes(name)
        for result in on_two[1]:
            # Each quantized layer has a table of 1 KiB, and a mean, on every rank.
            assert result["held"][name] < 0.5 * alone + 64 * 1024


def work(folder: Path, wanted: set[str]) -> dict[str, Any]:
    """Everything that is tested on two ranks, so that the processes start once."""
    rank = int(os.environ["RANK"])
    for name in sorted(wanted & SAME_BITS.keys()):
        run(folder / name, *SAME_BITS[name])
    for name in sorted(wanted & ON_REPLICAS):
        run(folder / f"{name} on replicas", *SAME_BITS[name], "parallel.replicate=2")
    for name in sorted(wanted & UNEVEN.keys()):
        run(folder / name, *CLOSE, *UNEVEN[name])
    if "test_each_resumes_the_others_checkpoint" in wanted:
        run(folder / "one then two", "max_steps=3")
    is_held = "test_a_rank_holds_its_part_of_a_frozen_base" in wanted
    result: dict[str, Any] = {"held": {name: held_bytes(name) for name in ADAPTERS if is_held}}
    result["settings"] = refusal(run, folder / "different", f"optimizer.lr={1e-3 * (1 + rank)}")
    result["batches"] = refusal(run, folder / "few", "gradient_accumulation_steps=1")
    result["offload"] = refusal(run, folder / "few", "memory.activation_offload=true")
    (own := folder / f"disk_{rank}").mkdir()
    os.chdir(own)
    result["disk"] = refusal(run, Path("run"))
    pairs = [{"prompt": "a", "chosen": f"{rank} {i}", "rejected": "c"} for i in range(40)]
    Path("pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    given = ("data.source=pairs.jsonl", f"data.cache_dir={own}")
    result["pairs"] = refusal(run, folder / "other pairs", *given, recipe_name="full_dpo_distributed")
    result["references"] = [path.name for path in own.glob("reference-*")]
    os.chdir(folder)

    take, calls = Batches.take, iter(range(100))

    def take_and_signal(self: Batches, n: int) -> Any:
        if rank == 1 and next(calls) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return take(self, n)

    Batches.take = take_and_signal  # type: ignore[method-assign]
    with pytest.raises(SystemExit) as stopped:
        run(folder / "stopped", "max_steps=9")
    result["exit"] = stopped.value.code
    return result


@pytest.fixture(scope="module")
def on_two(tmp_path_factory, request) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("two")
    make_mixture(folder / "mixture")
    make_four_bits(folder / "four_bits")
    os.environ |= {"MIXTURE": str(folder / "mixture"), "FOUR_BITS": str(folder / "four_bits")}
    run(folder / "one then two", "max_steps=2")
    return folder, on_ranks(2, work, folder, selected(request))


def numbers(folder: Path) -> list[dict[str, Any]]:
    """Rows of metrics without times, and without answers: a run that was extended has answered once more."""
    rows = [row for row in metrics(folder) if "eval_exact_match" not in row]
    return [{k: v for k, v in row.items() if k not in TIMES} for row in rows]


def assert_close(
    found: list[dict[str, Any]], expected: list[dict[str, Any]], without: frozenset[str] = frozenset()
) -> None:
    assert [row.keys() for row in found] == [row.keys() for row in expected]
    for row, other in zip(found, expected, strict=True):
        ours, theirs = ({k: v for k, v in one.items() if k not in without} for one in (row, other))
        # Ranks sum the squares of their parts in another order.
        assert ours.pop("grad_norm", 0.0) == pytest.approx(theirs.pop("grad_norm", 0.0), rel=3e-6), row["step"]
        assert ours == pytest.approx(theirs, rel=1e-6), row["step"]


@pytest.mark.first(1)
@pytest.mark.parametrize("name", SAME_BITS)
def test_two_ranks_write_the_files_of_one(on_two, tmp_path, name):
    run(tmp_path / "one", *SAME_BITS[name])
    theirs = [on_two[0] / name, *([on_two[0] / f"{name} on replicas"] if name in ON_REPLICAS else [])]
    for folder in theirs:
        assert digests(folder / "step_00000003") == digests(tmp_path / "one" / "step_00000003")
        assert_close(numbers(folder), numbers(tmp_path / "one"))


@pytest.mark.long
@pytest.mark.parametrize("name", ["experts in nf4", "experts in mxfp4"])
def test_a_run_with_experts_in_4_bits_resumes_bitwise(on_two, tmp_path, name):
    run(tmp_path / "parts", *SAME_BITS[name], "max_steps=1")
    run(tmp_path / "parts", *SAME_BITS[name])
    assert digests(tmp_path / "parts" / "step_00000003") == digests(on_two[0] / name / "step_00000003")


@pytest.mark.long
@pytest.mark.parametrize("name", UNEVEN)
def test_an_uneven_end_of_an_epoch_equals_one_process(on_two, tmp_path, name):
    run(tmp_path / "one", *CLOSE, *UNEVEN[name])
    ours, theirs = numbers(tmp_path / "one"), numbers(on_two[0] / name)
    assert_close(theirs, ours)
    assert len({row["tokens"] for row in ours if "tokens" in row}) > 1
    assert ours[-1]["eval_loss"] is not None


@pytest.mark.long
def test_each_resumes_the_others_checkpoint(on_two, tmp_path):
    """One process, then two, then one again."""
    folder = on_two[0] / "one then two"
    run(folder, "max_steps=4")
    run(tmp_path / "one", "max_steps=4")
    assert digests(folder / "step_00000004") == digests(tmp_path / "one" / "step_00000004")
    assert_close(numbers(folder), numbers(tmp_path / "one"))
    starts = json.loads((folder / "run.json").read_text())["starts"]
    assert [start.get("processes") for start in starts] == [None, 2, None]


def test_a_signal_to_one_rank_saves_once_and_stops_all(on_two):
    folder, results = on_two
    assert [result["exit"] for result in results] == [128 + signal.SIGTERM] * 2
    assert [path.name for path in (folder / "stopped").glob("step_*")] == ["step_00000002"]
    assert len(metrics(folder / "stopped")) == 2
    assert "after step 2 of 9; all steps are saved" in (folder / "stopped" / "rank_00001.log").read_text()


def test_all_ranks_refuse_with_the_reason(on_two):
    for result in on_two[1]:
        assert "differs from rank 0" in result["settings"]
        assert "optimizer.lr: 0.001 on rank 0, 0.002 on rank 1" in result["settings"]
        assert "gradient_accumulation_steps=1" in result["batches"] and "2 processes" in result["batches"]
        assert "memory.activation_offload=true" in result["offload"]
        assert "output_dir=run" in result["disk"] and "rank 1" in result["disk"]
        assert "differs from rank 0" in result["pairs"] and "\n  differs: pairs.jsonl (" in result["pairs"]
        assert result["references"] == []  # refused before the reference model computes anything


FOUR = ("gradient_accumulation_steps=4", "model.dtype=float32")
TWO_REPLICAS_OF_TWO = supported(
    {
        "plainly": ("max_steps=12",),
        "state in 8 bits": ("optimizer.name=adamw_8bit", "optimizer.in_backward=true"),
        "state in 4 bits": ("optimizer.name=adamw_4bit",),
        "base in 4 bits": ("lora.rank=4", "lora.dora=true", "lora.quantize=nf4"),
    }
)


def run_whole_and_in_parts(folder: Path, whole: str, *settings: str) -> None:
    run(folder / whole, *FOUR, "max_steps=12")
    if whole == "four":
        for name, more in TWO_REPLICAS_OF_TWO.items():
            run(folder / name, *FOUR, *more, "parallel.replicate=2")
    run(folder / "parts", *FOUR, *settings)


@pytest.mark.long
def test_one_two_and_four_ranks_are_one_run(tmp_path):
    """Sums of four are in another order. "parts" is one run that two, one and four ranks continue."""
    on_ranks(2, run_whole_and_in_parts, tmp_path, "two", "max_steps=4")
    run_whole_and_in_parts(tmp_path, "one", "max_steps=8")
    on_ranks(4, run_whole_and_in_parts, tmp_path, "four", "max_steps=12")
    for name in ("two", "four", "parts", "plainly"):
        assert_close(numbers(tmp_path / name), numbers(tmp_path / "one"), without=frozenset({"grad_norm"}))
    for name, settings in list(TWO_REPLICAS_OF_TWO.items())[1:]:
        run(tmp_path / f"one, {name}", *FOUR, *settings)
        ours = numbers(tmp_path / f"one, {name}")
        assert_close(numbers(tmp_path / name), ours, without=frozenset({"grad_norm"}))
        run(tmp_path / f"one, {name}", *FOUR, *settings, "max_steps=4")
        run(tmp_path / name, *FOUR, *settings, "max_steps=4")  # one process resumes what four wrote
        assert_close(numbers(tmp_path / name), numbers(tmp_path / f"one, {name}"), without=frozenset({"grad_norm"}))


def resident_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024


def peak_of_loading(folder: Path) -> tuple[int, int]:
    """Additional peak bytes of loading, and the bytes of this rank's rows."""
    ranks = join(ParallelConfig(), torch.device("cpu"))
    parallelize(load_model("tiny", "meta"), ParallelConfig(), ranks)  # imports everything
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_bytes("VmRSS")
    model = load_model(folder, "meta", dtype=torch.bfloat16)
    parallelize(model, ParallelConfig(), ranks)
    return resident_bytes("VmHWM") - before, sum(local(parameter).nbytes for parameter in model.parameters())


@pytest.mark.long
def test_each_rank_takes_memory_for_its_own_rows_alone(tmp_path):
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "vocab_size": 32000}
    (tmp_path / "config.json").write_text(json.dumps({**QWEN, **sizes, "num_attention_heads": 16}))
    save_model(load_model(tmp_path, dtype=torch.bfloat16, random_init=True), tmp_path)
    whole = (tmp_path / "model.safetensors").stat().st_size
    for size in (2, 4):
        for peak, own in on_ranks(size, peak_of_loading, tmp_path):
            assert own < 1.01 * whole / size
            assert peak < whole / size + 32 * 2**20
