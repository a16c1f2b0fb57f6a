"""Evaluation of a model in memory with tasks of lm-evaluation-harness (the extra `eval`), by name or from YAML
files."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

from lean_ft.models import Decoder
from lean_ft.system.installation import install_command
from lean_ft.tokenizers import Tokenizer

Results = dict[str, dict[str, float]]  # task -> metric -> value


def find_tasks(tasks: Sequence[str]) -> tuple[Any, list[str]]:
    """Return the harness's task manager, and the tasks' names or absolute paths.

    Raises ValueError if a task does not exist or the harness is not installed.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError(f"tasks need lm-evaluation-harness. Run {install_command('eval')}, or remove the tasks.")
    from lm_eval.tasks import TaskManager

    files = {task: Path(task).expanduser().resolve() for task in tasks if task.endswith((".yaml", ".yml"))}
    if missing := [task for task, file in files.items() if not file.is_file()]:
        raise ValueError(f"tasks: no such file: {', '.join(missing)}.")
    manager = TaskManager(include_defaults=len(files) < len(tasks))
    if unknown := [task for task in tasks if task not in files and not manager.match_tasks([task])]:
        raise ValueError(f"tasks: no such task: {', '.join(unknown)}. `lm-eval ls tasks` lists the tasks.")
    return manager, [str(files.get(task, task)) for task in tasks]


class TaskOptions(TypedDict, total=False):
    """How the harness asks its questions."""

    num_fewshot: int | None
    limit: int | None  # questions per task
    chat: bool  # in the chat template


def run_tasks(
    model: Decoder,
    tokenizer: Tokenizer,
    tasks: Sequence[str],
    *,
    seed: int = 0,
    tokens_at_a_time: int | None = None,
    **asked: Unpack[TaskOptions],
) -> Results:
    """Return the model's metrics in each task.

    tokens_at_a_time: maximum positions per forward pass. The harness seeds the process's random number generators.
    Raises ValueError as `find_tasks` does, and if the data of a task cannot be downloaded.
    """
    manager, names = find_tasks(tasks)
    from lm_eval import evaluator

    from lean_ft.generation.harness import TOKENS_AT_A_TIME, HarnessModel

    harness: Any = evaluator  # its decorators hide the parameters from type checkers
    # The harness runs git, which prints "fatal" outside of a checkout.
    harness.get_git_commit_hash = lambda: None
    try:
        found = harness.simple_evaluate(
            HarnessModel(model, tokenizer, seed, tokens_at_a_time or TOKENS_AT_A_TIME),
            tasks=names,
            num_fewshot=asked.get("num_fewshot"),
            limit=asked.get("limit"),
            apply_chat_template=asked.get("chat", False),
            task_manager=manager,
            bootstrap_iters=0,
        )
    except ConnectionError as error:
        raise ValueError(
            f"tasks: the data of {', '.join(tasks)} cannot be downloaded: {error}. Check the network, or use a YAML "
            "file of your own whose dataset_kwargs name a local file (docs/using.md)."
        ) from error
    return {
        task: {
            name.partition(",")[0]: value
            for name, value in metrics.items()
            if isinstance(value, int | float) and name != "sample_len"  # the number of questions
        }
        for task, metrics in found["results"].items()
    }
