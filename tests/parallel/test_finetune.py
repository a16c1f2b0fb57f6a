"""The recipe on two ranks is the recipe on one: the same numbers, the same files, and either goes on with the other's."""

import json
import os
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
from tests.parallel.processes import on_ranks
from tests.training.toy_runs import QWEN, TIMES, digests, metrics

SETTINGS = (
    "model.path=tiny",
    "model.dtype=float32",
    "data.source=tiny/validation.jsonl",
    "data.max_length=64",
    "optimizer.lr=1e-3",
    "schedule.name=constant",
    "batch_size=4",
    "gradient_accumulation_steps=2",
    "max_steps=3",
    "memory.host_pool=false",
    "memory.loss_chunk_tokens=16",
    "plan=false",
    "device=cpu",
)
# With two micro-batches a step, each of two ranks has one, and their sum has the same bits in either order.
SAME_BITS = {
    "plain": (),
    "8 bits in backward": ("optimizer.name=adamw_8bit", "optimizer.in_backward=true", "model.dtype=bfloat16"),
    "recomputed": ("memory.activation_checkpointing=full", "data.packing=bfd"),
    "random": ("model.random_init=true", "save_async=true", "save_every=1"),
    "adapter": ("lora.rank=4", "data.shuffle=false"),
    "evaluated and asked in float16": (
        "model.dtype=float16",
        "data.validation_fraction=0.1",
        "eval_every=2",
        "eval_answers=2",
    ),
    "mixture of experts": ("model.path=MIXTURE", "optimizer.in_backward=true"),
    "new rows": ("lora.targets=[]", 'model.new_tokens=["e s"," of th"]'),
    "4 bits below an adapter": ("lora.rank=4", "lora.dora=true", "lora.quantize=nf4", "model.dtype=bfloat16"),
}
ON_COPIES = ("8 bits in backward", "4 bits below an adapter")  # too
# 56 rows are 14 batches, so an epoch's fifth step of three has two: fewer than go round.
CLOSE = ("gradient_accumulation_steps=3", "max_steps=6", "optimizer.name=sgd", "data.validation_fraction=0.3")


def run(folder: Path, *settings: str, recipe_name: str = "finetune") -> None:
    recipe = load_recipe(find_recipe(recipe_name))
    given = [setting.replace("MIXTURE", os.environ.get("MIXTURE", "")) for setting in settings]
    recipe.main(load_config(recipe.Config, None, [*SETTINGS, f"output_dir={folder}", *given]))


def make_mixture(folder: Path) -> None:
    """A model whose experts are stacks in memory, cut between experts, and a tensor each in the folder.

    No vector is cut below 8 numbers: a CPU's fused kernel rounds the rest of a vector of its own otherwise.
    """
    mixture = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [0]}
    mixture |= {"model_type": "qwen3_moe", "vocab_size": 768, "head_dim": 16}
    mixture |= {"router_aux_loss_coef": 0.1, "output_router_logits": True, "norm_topk_prob": True}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**QWEN, **mixture}))
    save_model(load_model(folder, random_init=True), folder)
    for file in resolve_model_path("tiny").glob("*token*"):
        shutil.copy(file, folder)


ADAPTERS = {"lora": LoRAConfig(rank=4), "qlora": LoRAConfig(rank=4, quantize="nf4")}


def held_bytes(adapter: str) -> int:
    """Of weights and adapter, by this process."""
    ranks = join(ParallelConfig(), torch.device("cpu"))
    cfg = ModelConfig(path="tiny", random_init=True)
    model = load_with_adapter(cfg, ADAPTERS[adapter], "cpu", ranks)
    parallelize(model, ParallelConfig(), ranks)
    return sum(local(tensor).nbytes for tensor in [*model.parameters(), *model.buffers()])


def test_a_rank_holds_its_part_of_a_frozen_base(on_two):
    for name in ADAPTERS:
        alone = held_bytes(name)
        for said in on_two[1]:
            # Each quantised layer has a table of 1 KiB, and a mean, on every rank.
            assert said["held"][name] < 0.5 * alone + 64 * 1024


def refusal(folder: Path, *settings: str, recipe_name: str = "finetune") -> str:
    with pytest.raises(ValueError) as raised:
        run(folder, *settings, recipe_name=recipe_name)
    return str(raised.value)


def work(folder: Path) -> dict[str, Any]:
    """All that is tested on two ranks, in processes that are started once."""
    rank = int(os.environ["RANK"])
    for name, settings in SAME_BITS.items():
        run(folder / name, *settings)
    for name in ON_COPIES:
        run(folder / f"{name} on copies", *SAME_BITS[name], "parallel.replicate=2")
    run(folder / "close", *CLOSE)
    run(folder / "alone then two", "max_steps=3")
    said: dict[str, Any] = {"held": {name: held_bytes(name) for name in ADAPTERS}}
    said["settings"] = refusal(folder / "different", f"optimizer.lr={1e-3 * (1 + rank)}")
    said["batches"] = refusal(folder / "few", "gradient_accumulation_steps=1")
    said["offload"] = refusal(folder / "few", "memory.activation_offload=true")
    (own := folder / f"disk_{rank}").mkdir()
    os.chdir(own)
    said["disk"] = refusal(Path("run"))
    rows = [{"prompt": "a", "completion": f"{rank} {i}"} for i in range(40)]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    said["data"] = refusal(folder / "other data", "data.source=rows.jsonl")
    pairs = [{"prompt": "a", "chosen": f"{rank} {i}", "rejected": "c"} for i in range(40)]
    Path("pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    said["pairs"] = refusal(
        folder / "other pairs", "data.source=pairs.jsonl", f"data.cache_dir={own}", recipe_name="full_dpo_distributed"
    )
    said["references"] = [path.name for path in own.glob("reference-*")]
    os.chdir(folder)

    take, calls = Batches.take, iter(range(100))

    def take_and_signal(self: Batches, n: int) -> Any:
        if rank == 1 and next(calls) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return take(self, n)

    Batches.take = take_and_signal  # type: ignore[method-assign]
    with pytest.raises(SystemExit) as stopped:
        run(folder / "stopped", "max_steps=9")
    said["exit"] = stopped.value.code
    return said


@pytest.fixture(scope="module")
def on_two(tmp_path_factory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("two")
    make_mixture(folder / "mixture")
    os.environ["MIXTURE"] = str(folder / "mixture")
    run(folder / "alone then two", "max_steps=2")
    return folder, on_ranks(2, work, folder)


def numbers(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in TIMES} for row in metrics(folder)]


def assert_close(
    found: list[dict[str, Any]], expected: list[dict[str, Any]], without: frozenset[str] = frozenset()
) -> None:
    assert [row.keys() for row in found] == [row.keys() for row in expected]
    for row, other in zip(found, expected, strict=True):
        ours, theirs = ({k: v for k, v in one.items() if k not in without} for one in (row, other))
        # Ranks add up the squares of their parts, in float32 as one process does, but in another order.
        assert ours.pop("grad_norm", 0.0) == pytest.approx(theirs.pop("grad_norm", 0.0), rel=3e-6), row["step"]
        assert ours == pytest.approx(theirs, rel=1e-6), row["step"]


@pytest.mark.parametrize("name", SAME_BITS)
def test_two_ranks_write_the_files_of_one(on_two, tmp_path, name):
    run(tmp_path / "one", *SAME_BITS[name])
    theirs = [on_two[0] / name, *([on_two[0] / f"{name} on copies"] if name in ON_COPIES else [])]
    for folder in theirs:
        assert digests(folder / "step_00000003") == digests(tmp_path / "one" / "step_00000003")
        assert_close(numbers(folder), numbers(tmp_path / "one"))


def test_an_uneven_end_of_an_epoch_is_that_of_one_rank(on_two, tmp_path):
    run(tmp_path / "one", *CLOSE)
    ours, theirs = numbers(tmp_path / "one"), numbers(on_two[0] / "close")
    assert_close(theirs, ours)
    assert len({row["tokens"] for row in ours if "tokens" in row}) > 1
    assert ours[-1]["eval_loss"] is not None


def test_either_goes_on_with_the_others_checkpoint(on_two, tmp_path):
    """One rank, then two, then one again."""
    folder = on_two[0] / "alone then two"
    run(folder, "max_steps=5")
    run(tmp_path / "one", "max_steps=5")
    assert digests(folder / "step_00000005") == digests(tmp_path / "one" / "step_00000005")
    assert_close(numbers(folder), numbers(tmp_path / "one"))
    assert [start.get("processes") for start in json.loads((folder / "run.json").read_text())["starts"]] == [
        None,
        2,
        None,
    ]


def test_a_signal_to_one_rank_saves_once_and_stops_all(on_two):
    folder, said = on_two
    assert [one["exit"] for one in said] == [128 + signal.SIGTERM] * 2
    assert [path.name for path in (folder / "stopped").glob("step_*")] == ["step_00000002"]
    assert len(metrics(folder / "stopped")) == 2
    assert "after step 2 of 9, all of it saved" in (folder / "stopped" / "rank_00001.log").read_text()


def test_what_ranks_cannot_do_together_is_refused_on_all(on_two):
    for said in on_two[1]:
        assert "is of another run than rank 0" in said["settings"]
        assert "optimizer.lr: 0.001 on rank 0, 0.002 on rank 1" in said["settings"]
        assert (
            "gradient_accumulation_steps=1 counts the batches of a step over all processes, and there are 2"
            in said["batches"]
        )
        assert "memory.activation_offload=true is for one process so far" in said["offload"]
        assert "output_dir=run is not the folder of rank 0 for rank 1" in said["disk"]
        for kind in ("data", "pairs"):
            assert "is of another run than rank 0" in said[kind] and "data fingerprint: " in said[kind]
        assert said["references"] == []  # refused before the reference model has computed anything


FOUR = ("gradient_accumulation_steps=4", "model.dtype=float32")
TWO_COPIES_OF_TWO = {
    "plainly": ("max_steps=12",),
    "state in 8 bits": ("optimizer.name=adamw_8bit", "optimizer.in_backward=true"),
    "state in 4 bits": ("optimizer.name=adamw_4bit",),
    "base in 4 bits": ("lora.rank=4", "lora.dora=true", "lora.quantize=nf4"),
}


def run_in_two_ways(folder: Path, whole: str, *settings: str) -> None:
    run(folder / whole, *FOUR, "max_steps=12")
    if whole == "four":
        for name, more in TWO_COPIES_OF_TWO.items():
            run(folder / name, *FOUR, *more, "parallel.replicate=2")
    run(folder / "parts", *FOUR, *settings)


@pytest.mark.long
def test_one_two_and_four_ranks_are_one_run(tmp_path):
    """Sums of four in another order; a run that two, one and four ranks share is that run as well."""
    on_ranks(2, run_in_two_ways, tmp_path, "two", "max_steps=4")
    run_in_two_ways(tmp_path, "one", "max_steps=8")
    on_ranks(4, run_in_two_ways, tmp_path, "four", "max_steps=12")
    for name in ("two", "four", "parts", "plainly"):
        assert_close(numbers(tmp_path / name), numbers(tmp_path / "one"), without=frozenset({"grad_norm"}))
    for name, settings in list(TWO_COPIES_OF_TWO.items())[1:]:
        run(tmp_path / f"one, {name}", *FOUR, *settings)
        ours = numbers(tmp_path / f"one, {name}")
        assert_close(numbers(tmp_path / name), ours, without=frozenset({"grad_norm"}))
        run(tmp_path / f"one, {name}", *FOUR, *settings, "max_steps=4")
        run(tmp_path / name, *FOUR, *settings, "max_steps=4")  # one process goes on with what four wrote
        assert_close(numbers(tmp_path / name), numbers(tmp_path / f"one, {name}"), without=frozenset({"grad_norm"}))


def resident_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024


def peak_of_loading(folder: Path) -> tuple[int, int]:
    """Bytes that loading took at its peak beyond what was there, and those of the rows that are here."""
    ranks = join(ParallelConfig(), torch.device("cpu"))
    parallelize(load_model("tiny", "meta"), ParallelConfig(), ranks)  # what is imported and opened once
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
