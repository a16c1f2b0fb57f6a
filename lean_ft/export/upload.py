"""Upload a run's model to the Hugging Face Hub, with a model card.

The upload is the newest complete checkpoint, or the given one, without its training state: a model folder, or an
adapter in PEFT's format. README.md is the card; curves.png is added if matplotlib is installed. All files are one
commit, so the repository never has a partial upload. The client uploads (Xet or LFS) and reads the token.
"""

import json
import re
import tempfile
from pathlib import Path
from typing import Any

from lean_ft.export.places import files_of_model, sentences_not_in_files
from lean_ft.hub.errors import DownloadFailed, explained
from lean_ft.hub.paths import repository_name
from lean_ft.peft import is_adapter
from lean_ft.peft.finished_models import find_finished
from lean_ft.settings.strict_yaml import to_yaml
from lean_ft.system.installation import install_command
from lean_ft.system.redaction import on_one_line, redact
from lean_ft.system.run_directory import METRICS_FILE, NAME, read_rows, read_starts
from lean_ft.system.units import gibibytes, number
from lean_ft.training.curves import draw_curves
from lean_ft.training.metrics import is_number

CARD, _PICTURE = "README.md", "curves.png"
_FACTS = ("lean_ft", "torch", "python", "device", "processes", "git_commit", "data_fingerprint", "started")


def push(source: str | Path, repo: str, *, public: bool = False, license: str | None = None) -> str:
    """Upload the model of a run, a checkpoint or a folder to the repository `repo` (org/name), and return the commit's
    URL.

    A new repository is private unless `public`. `license` is the Hub's id of the model's license, for the card. Raises
    ValueError if the source is not complete, the name is invalid, or no token may write to the repository, and
    DownloadFailed for other failures of the network or the Hub.
    """
    from huggingface_hub import CommitOperationAdd, HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError

    folder, files, _ = prepare(source, repo, license)
    if get_token() is None:
        raise ValueError("push needs a token that may write: `hf auth login`, or the variable HF_TOKEN.")
    operations = [CommitOperationAdd(path_in_repo=path, path_or_fileobj=file) for path, file in files.items()]
    hub = HfApi()
    try:
        hub.create_repo(repo, private=not public, exist_ok=True)
        return hub.create_commit(repo, operations, commit_message=f"{folder.name}, by lean_ft").commit_url
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise ValueError(
                f"your token may not write to {repo} (error {status}). Use a token that may: `hf auth login`, or the "
                "variable HF_TOKEN."
            ) from None
        raise DownloadFailed(
            f"the Hugging Face Hub answered with error {status}; {repo} is unchanged. Repeat the command later."
        ) from None
    except Exception:
        with explained(repo, None):
            raise
    raise AssertionError


def prepare(source: str | Path, repo: str, license: str | None = None) -> tuple[Path, dict[str, Any], list[str]]:
    """Return the model's folder, the files to upload (path in the repository -> file or content), and what the card
    lacks.

    Raises ValueError if the source is not complete or the name is invalid.
    """
    from huggingface_hub import get_token
    from huggingface_hub.utils import validate_repo_id

    name = repository_name(repo)
    if name is None or name.revision is not None or name.file:
        raise ValueError(f"{repo} is not the name of a repository; expected org/name.")
    try:
        validate_repo_id(repo)
    except ValueError as error:  # of a subclass, which would show its traceback
        raise ValueError(f"{error}") from None
    folder = find_finished(source)
    run = folder.parent if (folder.parent / METRICS_FILE).is_file() else None
    picture = _picture(run) if run is not None else None
    card = model_card(folder, run, repo, has_picture=picture is not None, license=license)
    files: dict[str, Any] = {file.relative_to(folder).as_posix(): file for file in files_of_model(folder)}
    files |= {CARD: card.encode()} | ({_PICTURE: picture} if picture is not None else {})
    remarks = {
        "no token was found. Before the push, run `hf auth login` or set HF_TOKEN.": get_token() is None,
        "the card has no license. Read the license of the base model, and pass --license ID.": license is None,
        "the card names no base model, because the run did not start from a model of the Hub.": "base_model:"
        not in card,
        "the card has no results, because the folder is not part of a run.": run is None,
        f"the card has no curves. Run {install_command('plots')}": run is not None and picture is None,
    }
    return folder, files, [remark for remark, applies in remarks.items() if applies]


def _picture(run: Path) -> bytes | None:
    """Return the PNG of a run's curves, or None without matplotlib."""
    with tempfile.TemporaryDirectory() as temporary:
        picture = Path(temporary) / _PICTURE
        try:
            draw_curves([run], picture)
        except ValueError:
            return None
        return picture.read_bytes()


def model_card(folder: Path, run: Path | None, repo: str, has_picture: bool, license: str | None = None) -> str:
    """Return the model card of `folder`, a checkpoint of `run`: results, data, settings and versions, redacted."""
    starts = read_starts(run) if run is not None else []
    settings: dict[str, Any] = starts[-1]["settings"] if starts else {}
    base, adapter = settings.get("model.path"), is_adapter(folder)
    base_name = repository_name(base) if isinstance(base, str) and base else None
    head: dict[str, Any] = {"library_name": "peft" if adapter else "transformers", "tags": ["lean_ft"]}
    if license is not None:
        head["license"] = license
    if base_name is not None:
        head |= {"base_model": base_name.repo, "base_model_relation": "adapter" if adapter else "finetune"}
    if not settings.get("loss.per_token") and "centering" not in "".join(
        settings
    ):  # a reward model does not generate text
        head["pipeline_tag"] = "text-generation"
    kind = "An adapter for" if adapter else "A model finetuned from"
    lines = [f"# {repo.partition('/')[2]}", ""]
    if starts and run is not None:
        facts = starts[-1]
        recipe, name = _code(facts.get("recipe")), _escaped(folder.name)
        lines += [f"{kind} {_code(base)}, trained with lean_ft's recipe {recipe} ({name} of the run).", ""]
        lines += [*_table(_results(run, folder)), ""]
        if has_picture:
            lines += [f"![Curves of the run]({_PICTURE})", ""]
        if notes := sentences_not_in_files(folder):
            lines += ["## Use", "", *(f"- {sentence[0].upper()}{sentence[1:]}." for sentence in notes), ""]
        keys = [key for key, value in settings.items() if key.startswith("data.") and "source" in key and value]
        lines += ["## Data", "", *(f"- {_code(key)}: {_code(json.dumps(settings[key]))}" for key in keys), ""]
        values = to_yaml(settings).rstrip()
        fence = _fence(values, 3)
        lines += ["## Settings", "", f"{fence}yaml", values, fence, ""]
        known = [fact for fact in _FACTS if facts.get(fact) is not None]
        lines += ["## Versions", "", *(f"- {fact}: {_escaped(facts[fact])}" for fact in known), ""]
    return redact(f"---\n{to_yaml(head)}---\n\n" + "\n".join(lines))


def _results(run: Path, folder: Path) -> dict[str, str]:
    """Summarize metrics.jsonl up to the checkpoint."""
    step = NAME.fullmatch(folder.name)
    rows = [row for row in read_rows(run / METRICS_FILE) if step is None or row["step"] <= int(step[1])]
    steps = [row for row in rows if row.get("tokens") is not None]
    results = {"optimizer steps": f"{rows[-1]['step']:,}"} if rows else {}
    if steps:
        results["tokens"] = f"{sum(row['tokens'] for row in steps):,}"
        results["loss, first and last"] = f"{number(steps[0].get('loss'))}, {number(steps[-1].get('loss'))}"
    for name in sorted({key for row in rows for key in row if key.startswith("eval_")}):
        value = [row[name] for row in rows if row.get(name) is not None][-1:]
        if value and is_number(value[0]):
            results[name.replace("eval_", "held-out ", 1)] = number(value[0])
    if steps:
        results["peak memory"] = gibibytes(max(row.get("peak_memory_bytes") or 0 for row in steps))
    return results


def _table(results: dict[str, str]) -> list[str]:
    return ["| | |", "|---|---:|", *(f"| {_escaped(name)} | {value} |" for name, value in results.items())]


def _escaped(text: Any) -> str:
    """Foreign text as Markdown that shows it, redacted first, since a secret between backslashes is not found."""
    return re.sub(r"([\\`*{}\[\]<>|#~$&])", r"\\\1", on_one_line(redact(str(text))))


def _code(text: Any) -> str:
    """Foreign text as a code span of Markdown."""
    text = on_one_line(str(text))
    fence = _fence(text, 1)
    return f"{fence}{text}{fence}" if fence == "`" else f"{fence} {text} {fence}"


def _fence(text: str, least: int) -> str:
    """More backticks than any in `text`, and at least `least`."""
    return "`" * max([least - 1, *map(len, re.findall("`+", text))]) + "`"
