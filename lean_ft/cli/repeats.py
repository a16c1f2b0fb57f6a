"""`leanft data stats` with `--duplicates` or `--contamination TASKS`: rows that repeat others, or evaluation tasks."""

from collections.abc import Sequence
from difflib import SequenceMatcher
from itertools import islice
from typing import TYPE_CHECKING

from rich.text import Text

from lean_ft.cli.output import print_note, print_table, progress, stdout
from lean_ft.settings import DataConfig
from lean_ft.system.redaction import escaped
from lean_ft.system.units import counted

if TYPE_CHECKING:
    from lean_ft.data.contamination import TaskOverlaps
    from lean_ft.data.formats import RowReader
    from lean_ft.data.near_duplicates import NearDuplicates
    from lean_ft.data.row_words import RowContents
    from lean_ft.tokenizers import Tokenizer

_EXAMPLES = 3  # of a kind
_SHOWN_CHARACTERS = 60
_MOST_WORDS = 2000  # of a text whose differences are shown


def print_repeats(
    data: DataConfig, tokenizer: "Tokenizer", duplicates: bool, contamination: str | None, peak: bool
) -> None:
    """Print near-duplicates among the rows, and what training rows share with evaluation tasks.

    Raises ValueError for rows or tasks that cannot be read, and with `peak`, which needs lengths.
    """
    if peak:
        raise ValueError("--peak predicts the memory of lengths, which are not printed here. Remove it.")
    tasks = None if contamination is None else _names(contamination)
    from lean_ft.data.documents import renderer_of

    reader = renderer_of(data.model_copy(update={"near_duplicates": "keep"}), tokenizer).reader
    if duplicates:
        _print_duplicates(reader)
    if tasks is not None:
        _print_contamination(reader, tasks)


def _names(contamination: str) -> list[str]:
    names = [name.strip() for name in contamination.strip().removeprefix("[").removesuffix("]").split(",")]
    if not all(names):
        raise ValueError(
            f"--contamination={contamination!r} names no task. Pass the names or YAML files of tasks, such as "
            "--contamination arc_easy,gsm8k or --contamination my_task.yaml"
        )
    return names


# Near-duplicates ------------------------------------------------------------------------------------------------------


def _print_duplicates(reader: "RowReader") -> None:
    from lean_ft.data.near_duplicates import SHINGLE, SIMILAR, near_duplicates

    config, console = reader.config, stdout()
    with progress() as tell:
        tell("comparing rows")
        found = near_duplicates(config, reader)
    if found.num_held_out + found.num_trained == 1:
        raise ValueError(f"--duplicates compares rows, and {config.source} has 1 row. Pass a file with more rows.")
    held_out = f" and {counted(found.num_held_out, 'held-out rows')}" if config.validation_source is not None else ""
    lines = [f"compared {counted(found.num_trained, 'training rows')}{held_out}"]
    of_held_out = found.rows < found.num_held_out
    kinds = [("training rows nearly repeat an earlier one", ~of_held_out & ~found.between)]
    if config.validation_source is not None:
        kinds.append(("training rows nearly repeat a held-out row", found.between))
        kinds.append(("held-out rows nearly repeat an earlier one", of_held_out))
    for what, are in kinds:
        equal = int((found.similarity[are] == 1).sum())
        verb = what if are.sum() != 1 else what.replace("rows", "row", 1).replace("repeat", "repeats", 1)
        lines.append(f"  {int(are.sum()):,} {verb}" + (f" ({equal:,} word for word)" if equal else ""))
    lines.append(f"similarity: of all runs of {SHINGLE} words in two rows, the share that both have;")
    lines.append(f"  near-duplicates have {SIMILAR} or more")
    for line in lines:
        console.print(Text(escaped(line)), soft_wrap=True)
    chosen = [i for _, are in kinds for i in are.nonzero()[0][:_EXAMPLES].tolist()]
    for line in _examples(found, reader, chosen):
        console.print(Text(escaped(line)), soft_wrap=True)
    trained, others = int((~of_held_out).sum()), int(of_held_out.sum())
    if config.validation_fraction and config.validation_source is None:
        print_note("held-out rows are drawn from these rows, so they may repeat training rows")
    if len(found.rows):
        more = f" and {counted(others, 'held-out rows')}" if others else ""
        console.print(Text(f"data.near_duplicates=drop leaves out {counted(trained, 'training rows')}{more}"))


def _examples(found: "NearDuplicates", reader: "RowReader", chosen: Sequence[int]) -> list[str]:
    """One line for each of the near-duplicates `chosen`: the two places, their similarity, and what differs."""
    wanted = {int(row) for i in chosen for row in (found.rows[i], found.of[i])}
    texts = _texts_of_rows(reader, wanted, found.num_held_out)
    lines = []
    for i in chosen:
        (place, words), (earlier, other) = texts[int(found.rows[i])], texts[int(found.of[i])]
        similarity = float(found.similarity[i])
        lines.append(f"{place} ~ {earlier}: similarity {similarity:.2f}; {_difference(other, words)}")
    return ["", *lines, ""] if lines else []


def _texts_of_rows(reader: "RowReader", wanted: set[int], num_held_out: int) -> dict[int, tuple[str, list[str]]]:
    """The places and words of the rows `wanted`, which count from the first held-out row."""
    from lean_ft.data.formats import NUM_ROWS_TO_DETECT
    from lean_ft.data.row_words import RowContents
    from lean_ft.data.sources import RowSources

    found, config = dict[int, tuple[str, list[str]]](), reader.config
    for source, first, end in (
        (config.validation_source, 0, num_held_out),
        (config.source, num_held_out, max(wanted, default=0) + 1),
    ):
        here = [row for row in wanted if first <= row < end]
        if source is None or not here:
            continue
        sources = RowSources.of(config, source)
        own = type(reader).of(sources, sources.first_rows(NUM_ROWS_TO_DETECT), reader.tokenizer)
        for number, row in enumerate(islice(sources.rows(), max(here) - first + 1), start=first):
            if number in wanted:
                found[number] = row.place, _words(RowContents.of(row, own))
    return found


def _words(contents: "RowContents") -> list[str]:
    from lean_ft.data.row_words import words_of

    ids = [] if contents.ids is None else contents.ids[:_MOST_WORDS].tolist()
    return [*map(str, ids), *words_of(contents.text, symbols=True)][:_MOST_WORDS]


def _difference(before: Sequence[str], after: Sequence[str]) -> str:
    """The first words that differ between two texts."""
    changes = [
        (" ".join(before[a:b]), " ".join(after[c:d]))
        for kind, a, b, c, d in SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
        if kind != "equal"
    ]
    if not changes:
        return "the same words"
    gone, new = (f'"{_shortened(text)}"' if text else "" for text in changes[0])
    change = f"{gone} became {new}" if gone and new else f"without {gone}" if gone else f"with {new}"
    return change + (f" and {counted(len(changes) - 1, 'more changes')}" if len(changes) > 1 else "")


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 4]} ..."


# Evaluation tasks -----------------------------------------------------------------------------------------------------


def _print_contamination(reader: "RowReader", tasks: Sequence[str]) -> None:
    from lean_ft.data.contamination import task_overlaps
    from lean_ft.data.sources import RowSources
    from lean_ft.generation.task_questions import questions_of  # here, because it imports torch

    console = stdout()
    with progress() as tell:
        tell("comparing rows with the tasks' questions")
        found, num_rows = task_overlaps(questions_of(tasks), RowSources.of(reader.config).rows(), reader)
    console.print(Text(f"{counted(num_rows, 'training rows')} compared with the questions of evaluation tasks"))
    print_table(
        ("task", ">questions", ">compared", ">words of a run", ">overlap", ">in whole"),
        [_row_of(task) for task in found],
    )
    for line in (
        "compared: with as many words as a run, whose length is as in GPT-3's appendix C",
        "overlap: a training row has a run of the question; in whole: rows have all of its runs\n",
    ):
        console.print(Text(line), soft_wrap=True)
    for task in found:
        for one in task.overlaps[:_EXAMPLES]:
            where = f"{task.task}, question {one.number} ~ {one.place}: {one.share:.0%} of its runs"
            console.print(Text(escaped(f'{where}; "{_shortened(one.words)}"')), soft_wrap=True)


def _row_of(task: "TaskOverlaps") -> tuple[str, ...]:
    whole = sum(one.share == 1 for one in task.overlaps)
    share = f" ({len(task.overlaps) / task.num_compared:.1%})" if task.num_compared else ""
    return (
        task.task,
        f"{task.num_questions:,}",
        f"{task.num_compared:,}",
        str(task.run),
        f"{len(task.overlaps):,}{share}",
        f"{whole:,}",
    )
