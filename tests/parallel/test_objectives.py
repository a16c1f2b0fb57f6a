"""Preference, reward and distillation recipes on two ranks equal one process: numbers, files and reference caches.

Also if the ranks split layers, where weights are equal up to rounding.
"""

import json
import os
from pathlib import Path

import pytest

from lean_ft.frozen.teacher_cache import keep_teacher
from lean_ft.hub.paths import resolve_data_path
from lean_ft.models.safetensors_file import read_header
from lean_ft.settings import KeepTeacherConfig, ScoreLossConfig
from lean_ft.settings.text import load_config
from lean_ft.system.catalog import find_recipe, load_recipe
from tests.parallel.processes import assert_refused, on_ranks, refusal, supported
from tests.parallel.test_finetune import TWO_MICRO_BATCHES, make_mixture, numbers
from tests.recipes.cases import DERIVED, preset_of
from tests.recipes.conftest import TINY
from tests.training.toy_runs import digests

pytestmark = pytest.mark.long  # test_finetune.py compares two ranks with one process in the default suite

SETTINGS = (*TINY, *TWO_MICRO_BATCHES, "data.source=tiny/pairs_validation.jsonl", "data.max_length=96")
SETTINGS += ("optimizer.lr=1e-4",)
TEXTS = ("data.source=tiny/validation.jsonl", "data.max_length=64", "model.random_init=true", "optimizer.lr=1e-3")
TEACHER = (*TEXTS, "distill.teacher=tiny")
ITSELF = ("model.path=tiny-tools", "data.source=tiny-tools/calls_train.jsonl", "data.columns.context=context")
ITSELF += ("data.max_teacher_length=256", "distill.teacher=self")
TOKENS = ("data.source=tiny/names_validation.jsonl", "data.labels_per=token")
HELD_OUT = ("data.validation_fraction=0.1", "eval_every=2")
# With two micro-batches per step, each of two ranks has one, and their sum has the same bits in either order.
SAME_BITS: dict[str, tuple[str, ...]] = {
    "dpo, cached": (*HELD_OUT, "loss.sft_weight=0.5"),
    "dpo, second model": ("reference.kind=model", "data.packing=bfd", "optimizer.in_backward=true"),
    "dpo, adapter off": ("reference.kind=adapter_off", "lora.rank=4", "memory.activation_checkpointing=full"),
    "dpo, 4 bits": ("reference.kind=nf4", "model.dtype=bfloat16", "optimizer.name=adamw_8bit", "loss.wpo=true"),
    "kto, cached": HELD_OUT,
    "kto, adapter": ("reference.kind=adapter_off", "lora.rank=4", "data.packing=bfd", "batch_size=2"),
    "kto, bco": ("loss.name=bco", "reference.kind=model", "optimizer.in_backward=true"),
    "reward": (*HELD_OUT, "optimizer.in_backward=true"),
    "reward, adapter": ("lora.rank=4", "loss.per_token=true"),
    "classify": ("data.source=tiny/topics_train.jsonl", *HELD_OUT),
    "classify, tokens": (*TOKENS, *HELD_OUT),
    "distill": (*TEACHER, "data.validation_fraction=0.3", "optimizer.in_backward=true", "parallel.shard=2"),
    "distill, replicas": (*TEACHER, "distill.divergence=jsd", "parallel.replicate=2"),
    "distill, adapter and 4 bits": (*TEACHER, "distill.teacher_dtype=nf4", "lora.rank=4"),
    "distill, itself": (*ITSELF, *HELD_OUT, "data.packing=padding_free"),
    "distill, its averages": (*ITSELF, "distill.teacher_kind=ema", "optimizer.ema=0.5", "optimizer.in_backward=true"),
    "distill, its averaged adapter": (*ITSELF, "distill.teacher_kind=ema", "optimizer.ema=0.5", "lora.rank=4"),
    "distill, its copy": (*ITSELF, "distill.teacher_kind=model", "distill.divergence=jsd", "data.packing=bfd"),
    "distill, its base": (*ITSELF, *HELD_OUT, "lora.rank=4", "memory.activation_checkpointing=full"),
    "distill, itself, on policy": (*ITSELF, "distill.on_policy=1", "generation.max_new_tokens=8", "lora.rank=4"),
    "distill, kept": (*TEXTS, "distill.cached=FOLDER/scores", "distill.cross_entropy_weight=0.3", "data.packing=bfd"),
}
SAME_BITS |= {name: (f"data.source={preset_of(name)['data']['source']}", *HELD_OUT) for name in DERIVED}
NOTES = ("data.source=tiny/notes_train.jsonl",)
HARD = (*NOTES, "data.negatives=1")
SAME_BITS |= {
    "embed, all directions": (*HARD, "loss.directions=[query_to_doc,doc_to_query,query_to_query,doc_to_doc]"),
    "embed, triplet": (*HARD, "loss.name=triplet", "lora.rank=4", "parallel.replicate=2"),
    "rerank, yes and no": (*NOTES, "loss.yes_no=[a,b]", "loss.name=listnet", "optimizer.in_backward=true"),
}
# Three micro-batches per step do not divide evenly over two ranks, and an epoch ends with fewer of them.
CLOSE = ("gradient_accumulation_steps=3", "max_steps=5", "epochs=2", "optimizer.name=sgd", "optimizer.lr=1e-2")
ANSWERS = (*CLOSE, "data.source=FOLDER/answers.jsonl")
UNEVEN: dict[str, tuple[str, ...]] = {
    "dpo": (*CLOSE, "max_steps=4", "optimizer.lr=1e-4", "data.source=FOLDER/few.jsonl", "data.validation_fraction=0.2"),
    "kto": ANSWERS,
    "kto, bco": (*ANSWERS, "loss.name=bco"),
    "classify, tokens": (*CLOSE, *TOKENS, "batch_size=6"),
    "embed": (*CLOSE, *HARD, "data.split=train[:13]", "data.validation_fraction=0.2"),
    "rerank": (*CLOSE, *NOTES, "data.split=train[:13]", "loss.name=ranknet"),
    "reward": (*CLOSE, "data.source=FOLDER/pairs.jsonl"),
    "distill": (*TEXTS, *CLOSE, "distill.cached=FOLDER/scores", "max_steps=19"),
}
SPLIT = ("optimizer.name=sgd", "optimizer.lr=1e-2", "max_steps=2", "epochs=2")
CONTEXT, TENSOR = (*SPLIT, "parallel.context=2"), (*SPLIT, "parallel.tensor=2")
ON_POLICY = ("distill.teacher=tiny", "distill.on_policy=1.0", "generation.max_new_tokens=8")
PADDING_FREE = "data.packing=padding_free"
SPLIT_LAYERS: dict[str, tuple[str, ...]] = supported(
    {
        "dpo, context, cached": (*CONTEXT, *HELD_OUT, "loss.sft_weight=0.5", "loss.ld_alpha=0.5"),
        "dpo, tensor, cached": (*TENSOR, "loss.wpo=true", "data.packing=bfd", "optimizer.in_backward=true"),
        "dpo, tensor, second model": (*TENSOR, "data.shared_prompt=false", "reference.kind=model", "lora.rank=4"),
        "dpo, experts, cached": (*SPLIT, "parallel.experts=2", "model.path=FOLDER/mixture"),
        "dpo, context, 4 bits": (*CONTEXT, "reference.kind=nf4"),
        "kto, context, cached": (*CONTEXT, *HELD_OUT),
        "kto, tensor, bco": (*TENSOR, "loss.name=bco", "reference.kind=adapter_off", "lora.rank=4"),
        "reward, tensor": (*TENSOR, *HELD_OUT),
        "classify, tokens, tensor": (*TENSOR, *TOKENS, *HELD_OUT),
        "classify, tokens, context": (*CONTEXT, *TOKENS, *HELD_OUT, PADDING_FREE),
        "embed, tensor": (*TENSOR, *HARD, *HELD_OUT),
        "embed, context": (*CONTEXT, *HARD, *HELD_OUT, PADDING_FREE),
        "rerank, tensor": (*TENSOR, *NOTES, *HELD_OUT),
        "rerank, context": (*CONTEXT, *NOTES, *HELD_OUT, PADDING_FREE),
        "reward, context": (*CONTEXT, "loss.per_token=true", PADDING_FREE),
        "distill, context": (*TEXTS, *CONTEXT, "distill.teacher=tiny", *HELD_OUT),
        "distill, tensor": (*TEXTS[:2], *TENSOR, "distill.teacher=tiny", "distill.divergence=jsd", "data.packing=bfd"),
        "distill, tensor, on policy": (*TEXTS[:2], *TENSOR, *ON_POLICY, PADDING_FREE),
        "distill, context, on policy": (*TEXTS[:2], *CONTEXT, *ON_POLICY),
    }
)
REFUSED = {
    ("dpo", *TENSOR, "reference.kind=nf4"): "parallel.tensor=2 cannot be combined with reference.kind=nf4",
    ("distill", *TEXTS, *CONTEXT, "distill.cached=x"): "cannot be combined with distill.cached: the cache",
    ("dpo", *CONTEXT, "parallel.vocabulary=cut"): "this recipe's loss needs the whole output layer",
}


def run(name: str, folder: Path, inputs: Path, *settings: str) -> None:
    recipe = load_recipe(
        find_recipe({"dpo": "full_dpo_distributed"}.get(objective := name.partition(",")[0], objective))
    )
    given = [setting.replace("FOLDER", str(inputs)) for setting in settings]
    given = [setting for setting in given if "parallel" not in setting or "RANK" in os.environ]
    places = [f"data.cache_dir={folder.with_suffix('.cache')}", f"output_dir={folder}"]
    # Models with a score layer have no logits to compute in chunks.
    loss = recipe.Config.model_fields.get("loss")  # distill has another group
    gives_scores = loss is not None and isinstance(loss.default, ScoreLossConfig)
    common = [one for one in SETTINGS if "loss_chunk_tokens" not in one or not gives_scores]
    recipe.main(load_config(recipe.Config, None, [*common, *places, *given]))


OnTwo = tuple[Path, list[list[str]]]


def work(folder: Path) -> list[str]:
    for name, settings in (SAME_BITS | SPLIT_LAYERS).items():
        run(name, folder / name, folder, *settings)
    for name, settings in UNEVEN.items():
        run(name, folder / f"{name} uneven", folder, *settings)
    return [refusal(run, name, folder / "refused", folder, *settings) for name, *settings in REFUSED]


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[str]]]:
    """A folder with the runs of two ranks, and what each rank refused."""
    folder = tmp_path_factory.mktemp("two")
    make_mixture(folder / "mixture")
    answers = [{"prompt": f"{i}", "completion": f"{i}", "label": i % 3 > 0} for i in range(13)]
    pairs = [{"prompt": f"{i}", "chosen": f"yes {i}", "rejected": "no"} for i in range(13)]
    for name, rows in {"answers": answers, "pairs": pairs}.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    lines = resolve_data_path("tiny/pairs_validation.jsonl").read_text().splitlines()
    (folder / "few.jsonl").write_text("\n".join(lines[:40]))
    given = ["model.path=tiny", SETTINGS[1], *TEXTS[:2], "device=cpu", "top_k=8", f"destination={folder / 'scores'}"]
    keep_teacher(load_config(KeepTeacherConfig, None, given))
    return folder, on_ranks(2, work, folder, timeout=1800)


def references(folder: Path) -> dict[str, bytes]:
    caches = folder.with_suffix(".cache").glob("reference-*")
    return {path.name: (path / "values").read_bytes() for path in caches}


@pytest.mark.parametrize("name", SAME_BITS)
def test_two_ranks_write_the_files_of_one_process(on_two: OnTwo, tmp_path: Path, name: str) -> None:
    run(name, tmp_path / "one", on_two[0], *SAME_BITS[name])
    assert digests(on_two[0] / name / "step_00000003") == digests(tmp_path / "one" / "step_00000003")
    theirs, ours = numbers(on_two[0] / name), numbers(tmp_path / "one")
    for row, expected in zip(theirs, ours, strict=True):
        assert row == pytest.approx(expected, rel=1e-5, abs=1e-6), row["step"]
    if name.startswith("dpo") and "4 bits" not in name:
        assert ours[0]["rewards/margins"] == theirs[0]["rewards/margins"]
    assert references(on_two[0] / name) == references(tmp_path / "one")
    assert bool(references(on_two[0] / name)) == ("cached" in name)


@pytest.mark.parametrize("name", SPLIT_LAYERS)
def test_two_ranks_that_split_layers_train_like_one_process(on_two: OnTwo, tmp_path: Path, name: str) -> None:
    run(name, tmp_path / "one", on_two[0], *SPLIT_LAYERS[name])
    for row, expected in zip(numbers(on_two[0] / name), numbers(tmp_path / "one"), strict=True):
        # These are differences of sums near 100, whose last bit is 8e-6.
        differences, known = ([one.pop(key, 0.0) for key in ("gain", "baseline")] for one in (row, expected))
        assert differences == pytest.approx(known, abs=1e-5), row["step"]
        assert row == pytest.approx(expected, rel=1e-5, abs=2e-6), row["step"]
    files = list((tmp_path / "one" / "step_00000002").glob("*.safetensors"))
    assert files
    for file in files:
        found, expected = read_header(on_two[0] / name / "step_00000002" / file.name), read_header(file)
        assert found.keys() == expected.keys()
        for tensor, value in expected.items():
            assert (found[tensor].read() - value.read()).abs().max() < 1e-6, tensor
    theirs, ours = references(on_two[0] / name), references(tmp_path / "one")
    assert len(theirs) == len(ours) and bool(ours) == ("cached" in name)


def test_unsupported_combinations_are_refused_by_name(on_two: OnTwo) -> None:
    assert_refused(on_two[1], REFUSED.values())


@pytest.mark.parametrize("name", UNEVEN)
def test_uneven_micro_batches_equal_one_process(on_two: OnTwo, tmp_path: Path, name: str) -> None:
    run(name, tmp_path / "one", on_two[0], *UNEVEN[name])
    ours, theirs = numbers(tmp_path / "one"), numbers(on_two[0] / f"{name} uneven")
    assert len({row["tokens"] for row in ours if "tokens" in row}) > 1
    for row, expected in zip(theirs, ours, strict=True):
        assert row == pytest.approx(expected, rel=1e-4 if name[:3] == "kto" else 1e-5, abs=1e-6), row["step"]


def test_one_process_uses_the_cache_of_two(on_two: OnTwo, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The key of the reference cache does not depend on the sharding."""
    shared = f"data.cache_dir={(on_two[0] / 'dpo, cached').with_suffix('.cache')}"
    run("dpo", tmp_path / "one", on_two[0], *SAME_BITS["dpo, cached"], shared)
    assert "computed log-probabilities of 0 of " in capsys.readouterr().out
    assert numbers(tmp_path / "one")[0]["rewards/margins"] == 0
