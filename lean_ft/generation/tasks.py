"""Tasks of lm-evaluation-harness (the extra `eval`) on a model in memory, by name or as YAML files of one's own."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lean_ft.models import Decoder
from lean_ft.tokenizers import Tokenizer

Results = dict[str, dict[str, float]]  # task -> metric -> value


def find_tasks(tasks: Sequence[str]) -> tuple[Any, list[str]]:
    """The harness's manager of tasks, and the tasks as it is asked for them. Raises ValueError where one is not there, or
    the harness is not."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError("tasks are lm-evaluation-harness's: pip install 'lean-ft[eval]', or leave them out.")
    from lm_eval.tasks import TaskManager

    files = {task: Path(task).expanduser().resolve() for task in tasks if task.endswith((".yaml", ".yml"))}
    if missing := [task for task, file in files.items() if not file.is_file()]:
        raise ValueError(f"tasks: there is no file {', '.join(missing)}.")
    manager = TaskManager(include_defaults=len(files) < len(tasks))
    if unknown := [task for task in tasks if task not in files and not manager.match_tasks([task])]:
        raise ValueError(f"tasks: the harness knows no {', '.join(unknown)}; `lm-eval ls tasks` lists what it knows.")
    return manager, [str(files.get(task, task)) for task in tasks]


def run_tasks(
    model: Decoder,
    tokenizer: Tokenizer,
    tasks: Sequence[str],
    *,
    num_fewshot: int | None = None,
    limit: int | None = None,
    chat: bool = False,
    seed: int = 0,
    tokens_at_a_time: int | None = None,
) -> Results:
    """What the model gets in each task; `limit` questions of each, and at most `tokens_at_a_time` positions a pass.

    Seeds the process's random number generators, as the harness does. Raises ValueError as `find_tasks` does.
    """
    manager, names = find_tasks(tasks)
    from lm_eval import evaluator

    from lean_ft.generation.harness import TOKENS_AT_A_TIME, HarnessModel

    harness: Any = evaluator  # whose wrappers hide its parameters
    # It would ask git for a commit, which says "fatal" where the working folder is no checkout.
    harness.get_git_commit_hash = lambda: None
    found = harness.simple_evaluate(
        HarnessModel(model, tokenizer, seed, tokens_at_a_time or TOKENS_AT_A_TIME),
        tasks=names,
        num_fewshot=num_fewshot,
        limit=limit,
        apply_chat_template=chat,
        task_manager=manager,
        bootstrap_iters=0,
    )
    return {
        task: {
            name.partition(",")[0]: value
            for name, value in told.items()
            if isinstance(value, int | float) and name != "sample_len"  # how many questions were asked
        }
        for task, told in found["results"].items()
    }
