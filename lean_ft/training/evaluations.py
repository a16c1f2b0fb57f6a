"""What a run evaluates besides its loop's held-out loss, and what it says about evaluations."""

from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from lean_ft.data.objective import objective_of
from lean_ft.generation.tasks import find_tasks, run_tasks
from lean_ft.models import Decoder
from lean_ft.settings import DataConfig, Every, RecipeConfig
from lean_ft.system.random_state import capture_random_state, restore_random_state
from lean_ft.system.shards import Ranks
from lean_ft.system.units import number
from lean_ft.tokenizers import Tokenizer
from lean_ft.training.answers import AnswerReport, check_questions
from lean_ft.training.by_source import in_brackets, values_of
from lean_ft.training.length import Length
from lean_ft.training.metrics import EXACT_MATCH, Row
from lean_ft.training.starting import Start


class Missing(NamedTuple):
    """The evaluations that the step at which a run starts lacks."""

    rows: bool = False
    """The loop's own, on held-out rows: an earlier start was interrupted in it."""
    tasks: bool = False
    answers: bool = False
    """The answers before the first step, or after the last step of a complete run."""


def check_evaluations(cfg: RecipeConfig, model: nn.Module, ranks: Ranks, *, has_held_out: bool) -> None:
    """Raise ValueError now, rather than after an hour, if an evaluation cannot run."""
    if cfg.stop_after_evals and not has_held_out:
        raise ValueError(
            f"stop_after_evals={cfg.stop_after_evals} needs held-out rows, and there are none. Set "
            "data.validation_source or data.validation_fraction, or remove stop_after_evals."
        )
    check_questions(cfg.eval_answers, has_held_out=has_held_out)
    if not cfg.eval_tasks:
        return
    if ranks.size > 1:
        raise ValueError(
            f"eval_tasks needs one process, and there are {ranks.size}. Remove it, and use leanft run evaluate after "
            "training."
        )
    if not isinstance(model, Decoder) or not model.config.gives_text:
        raise ValueError("eval_tasks needs a language model. Remove it.")
    find_tasks(cfg.eval_tasks)


def run_eval_tasks(cfg: RecipeConfig, model: Decoder, tokenizer: Tokenizer) -> Row:
    """Run `eval_tasks`, and return their metrics by name. Random number generators are left as they were."""
    device = next(model.parameters()).device
    random_state = capture_random_state(device)
    options = {"limit": cfg.eval_tasks_limit, "seed": cfg.seed, "tokens_at_a_time": cfg.pass_tokens}
    results = run_tasks(model, tokenizer, cfg.eval_tasks, **options)
    restore_random_state(random_state, device)
    return {f"eval_{task}/{name}": value for task, values in results.items() for name, value in values.items()}


def describe_evaluation(cfg: RecipeConfig, row: Row) -> str:
    """An evaluation's line of metrics in words: `held-out loss 1.234`, or the reward, and how many were right."""
    text = "no held-out token has a label"
    if "eval_completion_length" in row:
        reward = row.get("eval_reward")
        text = "no held-out completion got a reward" if reward is None else f"held-out reward {number(reward)}"
        text += in_brackets(values_of(row, "eval_reward"), number)
        text += f", completion length {number(row['eval_completion_length'])}"
    elif row["eval_loss"] is not None or "eval_loss" in row.get("non_finite", {}):
        text = f"held-out loss {number(row['eval_loss'])}"
        text += in_brackets(values_of(row, "eval_loss"), number, cfg.watched_source)
    name = "eval_accuracy" if "eval_accuracy" in row else "eval_rewards/accuracies"
    right = row.get(name)
    data = cfg.group(DataConfig)  # None: on sampled completions
    objective = None if data is None else objective_of(data)
    if right is not None:
        judged = "" if objective is None else f" of {objective.judged or objective.unit}"
        text += (
            f", {right:.1%}{judged} right{in_brackets(values_of(row, name), _format_in('{:.1%}'), cfg.watched_source)}"
        )
    formats = {} if objective is None else objective.shown_metrics
    shown = [
        words.format(row[name]) + in_brackets(values_of(row, name), _format_in(words), cfg.watched_source)
        for name, words in formats.items()
        if row.get(name) is not None
    ]
    return ", ".join([text, *shown])


def _format_in(words: str) -> Callable[[float | None], str]:
    """The format of the number in words such as `{:.1%} among 10`."""
    form = words[words.index("{") : words.index("}") + 1]
    return lambda value: "not finite" if value is None else form.format(value)


def answers_line(report: AnswerReport, pattern: str | None) -> Row:
    """The fields of metrics.jsonl for answered held-out questions: the share of right answers and the number of
    questions."""
    compared = {} if pattern is None else {"eval_pattern": pattern}
    return {EXACT_MATCH: report.exact_match, "eval_questions": len(report.answers), **compared}


def missing_evaluations(cfg: RecipeConfig, start: Start, length: Length, *, has_held_out: bool) -> Missing:
    """The evaluations that a run has to make, or repeat, before its next step."""
    answered = [row for row in start.rows if EXACT_MATCH in row and row.get("eval_pattern") == cfg.eval_pattern]
    if start.is_complete:
        answered = [
            row for row in answered if (row["step"], row.get("eval_questions")) == (start.step, cfg.eval_answers)
        ]
    answers = cfg.eval_answers > 0 and not answered
    if not start.is_own or start.folder is None:
        return Missing(answers=answers)

    def is_due(every: Every) -> bool:
        return start.is_complete or length.is_due(every, start.step)

    last = [row for row in start.rows if row["step"] == start.step]
    rows = has_held_out and is_due(cfg.eval_every) and start.step not in length.eval_losses
    tasks = is_due(cfg.eval_tasks_every) and all({"tokens", "eval_loss", EXACT_MATCH} & row.keys() for row in last)
    return Missing(rows, bool(cfg.eval_tasks) and tasks, answers)
