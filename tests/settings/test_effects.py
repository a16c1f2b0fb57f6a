"""Every setting of every recipe has an effect: changing it changes a run or its plan, or raises the error that is
listed.

Each case runs a recipe twice on the embedded model and a few rows: unchanged, and with one setting changed. The two
runs must differ in their metrics, the files of the run directory or the printed text. Copies of the settings do not
count: config.yaml, log lines and recorded settings are excluded. For settings of GPUs, several devices and the
compiler, the test compares the planner's trace of a step instead.
"""

import contextlib
import hashlib
import io
import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from lean_ft.cli.run import run_recipe
from lean_ft.generation import texts
from lean_ft.hub.paths import resolve_model_path
from lean_ft.models import load_model, save_model
from lean_ft.plan.devices import CPU, Machines, find_device
from lean_ft.plan.rehearsal import rehearse
from lean_ft.settings import ModelConfig
from lean_ft.settings.text import load_config
from lean_ft.system import catalog
from lean_ft.tools import Call, Turn
from lean_ft.training import answers
from tests.parallel.processes import SHARDS_PARTS
from tests.recipes.cases import DERIVED, rows_of_preset
from tests.recipes.test_chat import TEMPLATE
from tests.settings.cases import BASE, CASES, LATE, OF_RECIPE, REASONS, SHORT, Case, case_of, load_recipe, settings_of
from tests.training.image_runs import model_folder, write_rows

REWARDS = """
def constant(completions):
    return [1.0 for _ in completions]

def score(completions):
    return [sum(map(ord, str(text))) / 100 for text in completions]
"""
TOOLS = """
import sys, time

def add(a: int, b: int) -> str:
    \'\'\'Add.

    Args:
        a: one
        b: one
    \'\'\'
    time.sleep(0.1)
    return "here" if "pytest" in sys.modules else "in a process, which gives another text"
"""
ENVIRONMENTS = """
class Counting:
    def reset(self, row):
        self.turn = 0

    def step(self, action):
        self.turn += 1
        return "Go on.", len(action) + self.turn, self.turn == 3
"""
FAMILY = """
from lean_ft.models.families import Family
mine = Family(scores_as="Llama")
"""
OTHER_FAMILY = FAMILY.replace("(", "(facts={'residual_multiplier': 0.3, 'embedding_multiplier': 30.0}, ")
TASK = """
task: ours
dataset_path: json
dataset_kwargs: {data_files: {test: IN/questions.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: ["wide", "long", "Rakora"]
doc_to_target: "{{answer}}"
metric_list: [{metric: brier_score}]
"""
VOLATILE = re.compile(r"seconds|per_second|memory|rss")  # fields of metrics.jsonl that differ between identical runs
RECORDS_OF_SETTINGS = ("config.yaml", "run.json", "manifest.json", ".lock", "metrics.jsonl", "loggers.json")


@pytest.fixture(scope="module", autouse=True)
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Create the folder that replaces IN in the settings."""
    global INPUTS
    INPUTS = folder = tmp_path_factory.mktemp("inputs")
    tiny, other = resolve_model_path("tiny"), folder / "other"
    shutil.copytree(tiny, other)
    weights = {name: tensor.roll(1, 0) for name, tensor in load_file(other / "model.safetensors").items()}
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    shutil.copytree(tiny, folder / "experts")
    config = json.loads((tiny / "config.json").read_text())
    config |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4}
    config |= {"num_experts_per_tok": 2, "intermediate_size": 32, "num_hidden_layers": 1}
    (folder / "experts" / "config.json").write_text(json.dumps(config))
    (folder / "experts" / "model.safetensors").unlink()
    shutil.copytree(folder / "experts", folder / "drafts")
    config |= {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "n_routed_experts": 4, "n_group": 1}
    config |= {"moe_intermediate_size": 32, "topk_group": 1, "num_nextn_predict_layers": 1, "num_local_experts": 1}
    config |= {"tie_word_embeddings": False}
    (folder / "drafts" / "config.json").write_text(json.dumps(config))
    drafting = ModelConfig(path=str(folder / "drafts"), dtype="float32", random_init=True, mtp="train")
    save_model(load_model(drafting), folder / "drafts")
    rows = [
        {"prompt": f"What is {i} plus {i}?" * (1 + i % 2), "completion": f"It is {2 * i}, I think."} for i in range(6)
    ]
    held_out = [{"prompt": f"What is {i} minus 1?", "completion": f"It is {i - 1}."} for i in range(7, 9)]

    def write(name: str, lines: list[dict[str, Any]]) -> None:
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    bad = [*rows, {"prompt": 3, "completion": "No."}]
    for name, of_kind, chosen in (
        ("rows", "{}", rows),
        ("others", "other_{}", rows[1:]),
        ("held_out", "held_out_{}", held_out),
        ("bad", "bad_{}", bad),
    ):
        write(name, [{**row, "answer": "4"} for row in chosen])
        numbered = list(enumerate(chosen))
        pairs = [{"prompt": r["prompt"], "chosen": r["completion"], "rejected": "No. " * (i + 1)} for i, r in numbered]
        write(of_kind.format("pairs"), pairs)
        texts = [{"text": r["prompt"], "other": f"Text {i}", "label": "aab"[i % 3]} for i, r in numbered]
        write(of_kind.format("texts"), texts)
    for recipe in DERIVED:
        of_preset = rows_of_preset(recipe, 8)
        files = {"": of_preset[:6], "other_": of_preset[1:6], "held_out_": of_preset[6:], "bad_": [*of_preset[:6], {}]}
        for prefix, chosen in files.items():
            write(f"{prefix}{recipe}", chosen)
    ranked = rows_of_preset("rerank", 8)
    judged = [{"scores": [0.3 + i / 20, i % 3 / 10, 0.05], "negative_1": f"Note {i}"} for i in range(len(ranked))]
    write("judged", [row | more for row, more in zip(ranked, judged, strict=True)])
    write("repeated", [{**row, "positive": ranked[i % 2]["positive"]} for i, row in enumerate(ranked)])
    model_folder("qwen3_vl", folder / "sees")
    write_rows("qwen3_vl", folder)
    photos = [json.loads(line) for line in (folder / "photos.jsonl").read_text().splitlines()]
    asked = [{"text": row["messages"][0]["content"], "images": row["images"]} for row in photos]
    answers = {"chosen": "Yes.", "rejected": "No, I think."}
    write("photos_pairs", [{"prompt": row["text"], **answers, "images": row["images"]} for row in asked])
    write("photos_texts", [{**row, "label": "ab"[i % 2]} for i, row in enumerate(asked)])
    write("questions", [{"question": f"The river {i} is", "answer": i % 3} for i in range(4)])
    (folder / "task.yaml").write_text(TASK.replace("IN", str(folder)))
    (folder / "prompts.txt").write_text("Who\nWhat\n")
    files = {"rewards": REWARDS, "tools": TOOLS, "environment": ENVIRONMENTS}
    for name, text in (files | {"family": FAMILY, "other_family": OTHER_FAMILY}).items():
        (folder / f"{name}.py").write_text(text)
    shutil.copytree(tiny, folder / "mine")
    (folder / "mine" / "config.json").write_text(
        (tiny / "config.json").read_text().replace('"model_type": "llama"', '"model_type": "mine"')
    )
    shutil.copytree(tiny, folder / "tooled")
    (folder / "tooled" / "chat_template.jinja").write_text(TEMPLATE)
    write("lists", [{"text": f"Text {i}", "labels": [i % 2, 1 - i % 2]} for i in range(4)])
    turn = "{{ m.role ~ effort ~ m.content ~ eos_token }}"
    prompt = "{% if add_generation_prompt %}assistant{{ effort }}{% endif %}"
    with_effort = f"{{% for m in messages %}}{turn}{{% endfor %}}{prompt}"
    (folder / "effort.jinja").write_text(with_effort)
    shutil.copytree(tiny, folder / "effort")
    (folder / "effort" / "chat_template.jinja").write_text(with_effort)
    (folder / "template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    yield
    observed.cache_clear()


@cache
def observed(recipe: str, settings: str, plan: str, counts: tuple[str, ...]) -> dict[str, Any]:
    """Return the outputs of a run of the recipe or of its plan, or the error that it raises."""
    module = load_recipe(recipe)
    given = [word.strip().replace("IN/", f"{INPUTS}/") for word in re.split(r" +(?=[\w.]+=)", settings)]
    try:
        cfg = load_config(module.Config, None, given)
        with contextlib.ExitStack() as stack:
            calls = {name: stack.enter_context(spy) for name, spy in spies().items() if name in (*counts, "rows")}
            seen = planned(module, cfg, plan) if plan else ran(module, cfg, "log" in counts)
    except (ValueError, RuntimeError, OSError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return seen | {
        name: [str(call.args[-2:]) + str(call.kwargs) for call in calls[name].call_args_list]
        for name in counts
        if name in calls
    }


def spies() -> dict[str, Any]:
    """Return mocks for effects that outputs do not show: a service, workers, a full cache, a profiler, a process
    group."""
    workers = mock.patch("lean_ft.data.documents.map_in_processes", side_effect=lambda f, items, number: map(f, items))
    return {
        "wandb": mock.patch("wandb.init", return_value=mock.MagicMock(id="run")),
        "workers": workers,
        "cache": mock.patch("lean_ft.data.prepare.limit_size"),
        "compiler": mock.patch("lean_ft.generation.decoding.CompiledLayers", return_value=contextlib.nullcontext()),
        "asked": mock.patch("lean_ft.training.answers.sample", wraps=answers.sample),
        "load": mock.patch("lean_ft.generation.texts.load_model", wraps=texts.load_model),
        "batches": mock.patch("lean_ft.generation.texts.sample", wraps=texts.sample),
        "turns": mock.patch(
            "lean_ft.tools.turns.ToolTurns.read", return_value=Turn("", [Call("add", {"a": 1, "b": 2})] * 2)
        ),
        "profiler": mock.patch("lean_ft.training.profiling.StepProfiler"),
        "process group": mock.patch("torch.distributed.new_group", wraps=torch.distributed.new_group),
        "rows": mock.patch("lean_ft.data.documents.FEW_ROWS", 2),
    }


def planned(module: Any, cfg: Any, plan: str) -> dict[str, Any]:
    number, _, card = plan.partition(" x ")
    device = CPU if plan == "cpu" else find_device(card)
    rehearsal = rehearse(module, cfg, device, Machines(int(number) if card else 1, 1))
    facts = ("peak", "timeline", "pinned_bytes", "reserved_bytes", "step_seconds", "sent_bytes", "exchange_seconds")
    return {name: str(getattr(rehearsal, name)) for name in facts}


def ran(module: Any, cfg: Any, counts_log: bool) -> dict[str, Any]:
    """Run a recipe and return its metrics, the checksums of its files, and its stdout."""
    torch.manual_seed(0)
    printed = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(io.StringIO()),
        mock.patch("sys.stdin", io.StringIO("What is it?\n")),
    ):
        run_recipe(module, cfg)
        seen: dict[str, Any] = {}
        for file in filter(Path.is_file, Path().rglob("*")):
            name = str(file.parent / re.sub(r"\d{5,}.*", "", file.name))
            if file.name == "metrics.jsonl":
                lines = [json.loads(line) for line in file.read_text().splitlines()]
                seen[name] = [{k: v for k, v in line.items() if not VOLATILE.search(k)} for line in lines]
            elif file.name == "training_state.json":
                seen[name] = {
                    k: v
                    for k, v in json.loads(file.read_text()).items()
                    if k not in ("settings", "batches", "data_fingerprint")
                }
            elif file.name not in RECORDS_OF_SETTINGS:
                seen[name] = hashlib.sha256(file.read_bytes()).hexdigest()
    is_log = not hasattr(cfg, "max_new_tokens")
    if counts_log or not is_log:
        seen["printed"] = re.sub(
            r"[\d.]+ (s|GiB|tok/s|tokens a second|(target )?tokens/s)|/tmp/\S+", "", printed.getvalue()
        )
    return seen


# Fields of list items: a setting, its value before and after.
ITEMS = [
    ("data.source", "[{path: IN/rows.jsonl}]", f"[{{path: IN/rows.jsonl, {field}}}]")
    for field in ("weight: 2", "format: text", "columns: {prompt: completion}", "subset: a", "split: 'train[:50%]'")
] + [
    ("data.source", "[{path: IN/rows.jsonl}]", "[{path: IN/others.jsonl}]"),
    (
        "data.source",
        "[{path: IN/rows.jsonl, share: 0.3}, IN/others.jsonl]",
        "[{path: IN/rows.jsonl, share: 0.8}, IN/others.jsonl]",
    ),
    (
        "data.validation_source",
        "[IN/held_out.jsonl, {path: IN/rows.jsonl}]",
        "[IN/held_out.jsonl, {path: IN/rows.jsonl, name: x}]",
    ),
    ("rewards", "[{function: IN/rewards.py:score}]", "[{function: IN/rewards.py:score, weight: 2}]"),
    ("rewards", "[{function: IN/rewards.py:score}]", "[{function: IN/rewards.py:constant}]"),
    ("rewards", "[{function: IN/rewards.py:score}]", "[{model: IN/none}]"),
    ("rewards", "[{function: format, pattern: zz}]", "[{function: format, pattern: '.*'}]"),
]


@pytest.mark.long
@pytest.mark.parametrize(("key", "before", "after"), ITEMS)
def test_a_field_of_a_lists_item_has_an_effect_or_is_refused(key: str, before: str, after: str) -> None:
    recipe = "grpo" if key == "rewards" else "finetune"
    first, second = (observed.__wrapped__(recipe, f"{BASE[recipe]} {key}={value}", "", ()) for value in (before, after))
    assert "error" not in first, first
    assert first != second


def walk() -> Iterator[Any]:
    """Yield every setting of every recipe. Refusals that recipes share are default in the first recipe."""
    seen = set[str]()
    for recipe in BASE:
        for key in settings_of(recipe):
            if OF_RECIPE.get(name := f"{recipe} {key}", ...) is None:
                continue
            is_new = name in OF_RECIPE.keys() | REASONS.keys() or key not in seen
            is_refused = is_new and case_of(recipe, key).refused and name not in LATE
            marks = () if is_refused or key in SHORT.get(recipe, "").split() else pytest.mark.long
            yield pytest.param(recipe, key, marks=marks, id=f"{recipe}-{key}")
            seen.add(key)


@pytest.mark.long
@pytest.mark.parametrize("recipe", BASE)
def test_a_second_run_with_the_same_settings_looks_the_same(recipe: str) -> None:
    case = CASES["profile_steps"] if "profile" in settings_of(recipe) else Case("")
    base = f"{BASE[recipe]} {case.companions}"
    assert observed(recipe, base, "", case.counts) == observed.__wrapped__(recipe, base, "", case.counts)


def test_every_recipe_and_setting_has_a_case_and_no_other() -> None:
    """`case_of` fails if a setting's type does not imply a value and CASES has none."""
    assert set(BASE) == set(catalog.recipes())
    names = {f"{recipe} {key}" for recipe in BASE for key in settings_of(recipe)}
    assert all(case_of(*name.split()) for name in names if OF_RECIPE.get(name, ...) is not None)
    assert CASES.keys() <= {name.split()[1] for name in names}
    assert OF_RECIPE.keys() | REASONS.keys() <= names


@pytest.mark.parametrize(("recipe", "key"), list(walk()))
def test_a_setting_has_an_effect_or_is_refused(recipe: str, key: str) -> None:
    if key in ("parallel.tensor", "parallel.experts") and not SHARDS_PARTS:
        pytest.skip(f"torch {torch.__version__} cannot shard split layers")
    case = case_of(recipe, key)
    base = f"{BASE[recipe]} {case.companions}"
    if case.plan.startswith("2 x"):
        base += " gradient_accumulation_steps=2"
    counts = case.counts
    if recipe == "evaluate" and key.startswith("data."):
        counts += ("asked",)
    elif recipe == "quantize":  # its log has the loss, which is all that the data is for
        counts += ("log",)
    after = observed.__wrapped__(recipe, f"{base} {key}={case.value}", case.plan, counts)
    if case.refused:
        assert case.refused in after["error"], after
        return
    before = observed(recipe, base, case.plan, counts)
    if "error" not in case.counts:
        assert "error" not in before | after, (before, after)
    assert after != before, (
        f"{recipe}: {key}={case.value} changes nothing in a run with {base}. Read the setting, refuse it where it has "
        "no effect, or give it a row of CASES or OF_RECIPE in tests/settings/cases.py, with companions under which it "
        "acts."
    )
