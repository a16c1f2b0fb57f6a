"""`evaluate` gives the results of lm-evaluation-harness on the same model in transformers."""

import json
from pathlib import Path

import pytest

lm_eval = pytest.importorskip("lm_eval", reason="the extra `eval` is not installed")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from lean_ft.generation.harness import HarnessModel  # noqa: E402
from lean_ft.hub.paths import resolve_model_path  # noqa: E402
from lean_ft.models import load_model  # noqa: E402
from lean_ft.tokenizers import load_tokenizer  # noqa: E402
from tests.recipes.conftest import TINY, config_of, recipe_module, run_recipe  # noqa: E402

CHOICE = """
task: our_choice
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/choice.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
GENERATE = """
task: our_generate
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/generate.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n", " 2"], max_gen_toks: 12}
metric_list: [{metric: exact_match, ignore_case: true}]
"""
ROLLING = """
task: our_rolling
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/rolling.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}]
"""
QUESTIONS = ["What is the capital of Zanemar?", "20 + 1 =", "", "Nila has 60 apples and loses 6. " * 3]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("tasks")
    choices = [["Tasulo", "It is the town of Galostan", " 21"], ["21", " twenty", "apples and more apples"]]
    rows = {
        "choice": [{"question": q, "choices": choices[i % 2], "answer": i % 3} for i, q in enumerate(QUESTIONS)],
        "generate": [{"question": q or "So", "answer": " words"} for q in QUESTIONS],
        "rolling": [{"text": "The river flows through the country. " * n} for n in (1, 100)],
    }
    for name, content in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    for name, text in {"choice": CHOICE, "generate": GENERATE, "rolling": ROLLING}.items():
        (folder / f"{name}.yaml").write_text(text.replace("FOLDER", str(folder)))
    return [str(folder / f"{name}.yaml") for name in rows]


def test_log_likelihoods_and_completions_equal_those_of_transformers() -> None:
    ours = HarnessModel(load_model("tiny"), load_tokenizer("tiny"))
    theirs = HFLM(pretrained=str(resolve_model_path("tiny")), dtype="float32", device="cpu", batch_size=2)
    pairs = [(QUESTIONS[0], " It is the town of Galostan"), ("", "21 apples"), (QUESTIONS[1], " 21")]
    asked = [Instance("loglikelihood", {}, pair, 0) for pair in pairs]
    for one, other in zip(ours.loglikelihood(asked), theirs.loglikelihood(asked), strict=True):
        assert one == (pytest.approx(float(other[0]), abs=1e-4), bool(other[1]))
    asked = [Instance("generate_until", {}, (text, {"until": [" 2"], "max_gen_toks": 8}), 0) for text in QUESTIONS[:2]]
    assert ours.generate_until(asked) == theirs.generate_until(asked)


@pytest.mark.long
@pytest.mark.parametrize("chat", [False, True])
def test_the_harness_gives_the_results_of_transformers(tasks: list[str], chat: bool) -> None:
    ours = HarnessModel(load_model("tiny"), load_tokenizer("tiny"))
    folder = str(resolve_model_path("tiny"))
    theirs = HFLM(pretrained=folder, dtype="float32", device="cpu", batch_size=2)
    asked = tasks[:2] if chat else tasks
    settings = {"tasks": asked, "bootstrap_iters": 0, "apply_chat_template": chat, "num_fewshot": 0}
    told = [
        lm_eval.simple_evaluate(model, task_manager=TaskManager(include_defaults=False), **settings)
        for model in (ours, theirs)
    ]
    for task, results in told[1]["results"].items():
        for name, value in results.items():
            if isinstance(value, float):
                assert told[0]["results"][task][name] == pytest.approx(value, abs=1e-4), (task, name)
    for task, samples in told[1]["samples"].items():
        for our_sample, their_sample in zip(told[0]["samples"][task], samples, strict=True):
            assert our_sample["arguments"] == their_sample["arguments"]
            for (our,), (their,) in zip(our_sample["resps"], their_sample["resps"], strict=True):
                if isinstance(their, str):
                    assert our == their
                elif isinstance(their, float):
                    assert our == pytest.approx(their, abs=1e-3)  # a sum over 800 tokens
                else:
                    assert (our[0], our[1]) == (pytest.approx(float(their[0]), abs=1e-4), bool(their[1]))


def evaluate(*settings: str) -> None:
    recipe_module("evaluate").main(config_of("evaluate", *settings, "model.dtype=float32", "device=cpu"))


TRAINING = (*TINY, "data.source=tiny/train.jsonl", "batch_size=4")


@pytest.mark.long
def test_results_are_stored_in_the_run_by_step(tasks: list[str], tmp_path: Path) -> None:
    held_out = ("data.validation_source=tiny/validation.jsonl", "eval_answers=4")
    run_recipe("finetune", tmp_path, *TRAINING, *held_out, "max_steps=2", "save_every=1")
    evaluate(f"model.path={tmp_path}", f"tasks=[{tasks[0]}]", "data.source=tiny/validation.jsonl", "limit=3")
    evaluate(f"model.path={tmp_path / 'step_00000001'}", f"tasks=[{tasks[1]}]")
    kept = json.loads((tmp_path / "evaluation.json").read_text())
    assert kept.keys() == {"step_00000001", "step_00000002"}
    (task,), (answers,) = kept["step_00000002"]["tasks"], kept["step_00000002"]["answers"]
    assert task["task"] == "our_choice" and task["metrics"].keys() >= {"acc", "acc_norm"}
    assert (answers["num_right"], answers["num_questions"], answers["limit"]) == (0, 3, 3)
    assert 0 <= kept["step_00000001"]["tasks"][0]["metrics"]["exact_match"] <= 1


@pytest.mark.long
def test_evaluation_tasks_do_not_change_a_run(tasks: list[str], tmp_path: Path) -> None:
    """Bitwise, with random dropout and noise. The results equal those of `evaluate` on the same checkpoint."""
    given = (*TRAINING, "max_steps=3", "data.max_length=64", "lora={dropout: 0.2}", "neftune_alpha=5", "save_every=0")
    asked = (f"eval_tasks=[{tasks[0]},{tasks[1]}]", "eval_tasks_every=2", "eval_tasks_limit=2", "log.to=[csv]")
    without = run_recipe("finetune", tmp_path / "without", *given)
    lines = run_recipe("finetune", tmp_path / "with", *given, *asked)
    steps, told = [row for row in lines if "loss" in row], [row for row in lines if "loss" not in row]
    for row, expected in zip(steps, without, strict=True):
        assert (row["loss"], row["grad_norm"]) == (expected["loss"], expected["grad_norm"])
    files = [tmp_path / name / "step_00000003" / "adapter_model.safetensors" for name in ("without", "with")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert [row["step"] for row in told] == [2, 3]
    assert "eval_our_generate/exact_match" in (tmp_path / "with" / "metrics.csv").read_text().splitlines()[0]
    evaluate(f"adapter={tmp_path / 'with'}", f"tasks=[{tasks[0]}]", "limit=2")
    (kept,) = json.loads((tmp_path / "with" / "evaluation.json").read_text())["step_00000003"]["tasks"]
    assert kept["metrics"] == {
        name.removeprefix("eval_our_choice/"): v for name, v in told[-1].items() if "choice" in name
    }
    file = tmp_path / "with" / "metrics.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))  # as if killed in the last tasks
    repeated = run_recipe("finetune", tmp_path / "with", *given, *asked)
    assert [row for row in repeated if "loss" not in row] == told
    for wrong in ("eval_tasks=[no_such.yaml]", "eval_tasks=[no_such_task]"):
        with pytest.raises(ValueError, match="no_such"):
            run_recipe("finetune", tmp_path / "wrong", *given, wrong)


@pytest.mark.long
def test_answers_match_exactly_or_by_pattern(tmp_path: Path) -> None:
    from lean_ft.generation import generate

    said = generate(load_model("tiny"), [QUESTIONS[0]], max_new_tokens=60)[0].strip()
    rows = [{"prompt": QUESTIONS[0], "completion": said}, {"prompt": QUESTIONS[0], "completion": said + " x"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, more, right in (("whole", [], 1), ("pattern", [f"pattern={said[-6:-1]}"], 2)):
        output = tmp_path / f"{name}.json"
        evaluate("model.path=tiny", f"data.source={tmp_path / 'rows.jsonl'}", f"output={output}", *more)
        (told,) = json.loads(output.read_text()).values()
        assert [answers["num_right"] for answers in told["answers"]] == [right]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([], "set tasks=..., data.source=FILE, or both"),
        (["tasks=[nowhere.yaml]"], "no such file: nowhere.yaml"),
    ],
)
def test_invalid_settings_are_refused(settings: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate("model.path=tiny", *settings)
