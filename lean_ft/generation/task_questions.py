"""Texts of the questions of evaluation tasks: lm-evaluation-harness's, by name or from YAML files, and MTEB's."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from lean_ft.embedding.mteb_tasks import PREFIX, find_mteb_tasks, split_tasks
from lean_ft.generation.tasks import find_tasks
from lean_ft.system.foreign_values import JSON

_NOT_QUESTIONS = ("corpus", "relevant_docs", "top_ranked", "instruction")  # parts of a search besides its queries
_NOT_TEXTS = ("id", "_id", "title", "label", "labels")  # columns


def questions_of(tasks: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the name of a task and the text of each question that an evaluation asks, task after task.

    tasks: as in the recipe evaluate. A question is what the task names for comparisons with training data, or else its
    prompt without solved examples. Of MTEB's tasks, these are the queries of a search, or the texts that are compared.
    Raises ValueError if a task does not exist, if its package is not installed, or if its data cannot be downloaded.
    """
    names, of_mteb = split_tasks(tasks)
    try:
        if names:
            yield from _of_harness(names)
        for name, task in zip(of_mteb, find_mteb_tasks(of_mteb) if of_mteb else [], strict=True):
            task.load_data()
            splits = [*task.metadata.eval_splits]
            yield from ((f"{PREFIX}{name}", text) for text in _texts(task.dataset, splits))
    except (ConnectionError, FileNotFoundError) as error:
        raise ValueError(
            f"tasks: the data of {', '.join(tasks)} cannot be read: {error}. Check the network, or use a YAML file of "
            "your own whose dataset_kwargs name a local file (docs/using.md)."
        ) from error


def _of_harness(tasks: Sequence[str]) -> Iterator[tuple[str, str]]:
    manager, names = find_tasks(tasks)
    for name, task in manager.load(names)["tasks"].items():
        for document in task.eval_docs:
            named = task.config.doc_to_decontamination_query if task.should_decontaminate() else None
            text = _named_question(named, document)
            text = task.doc_to_text(document) if text is None else text
            # Some tasks complete one of several beginnings, by its index.
            yield name, str(task.doc_to_choice(document)[text] if isinstance(text, int) else text)


def _named_question(query: object, document: dict[str, JSON]) -> object:
    """The text that a task compares with training data: a field, a template or a function; None if it names none. The
    harness's own function evaluates the text as Python, which fails for most."""
    if not isinstance(query, str):
        return query(document) if callable(query) else None
    from lm_eval.utils import apply_template

    return document[query] if query in document else apply_template(query, document)


def _texts(data: object, splits: Sequence[str]) -> Iterator[str]:
    """The texts in MTEB's data: data sets by subset and split, or by part of a search."""
    if isinstance(data, Mapping):
        for name, part in data.items():
            if name not in _NOT_QUESTIONS and (name in splits or not {*data} & {*splits}):
                yield from _texts(part, splits)
    elif isinstance(data, Iterable):
        for row in data:
            for name, value in row.items():
                values = value if isinstance(value, list) else [value]
                yield from (text for text in values if isinstance(text, str) and name not in _NOT_TEXTS)
