"""A run's model on the Hugging Face hub, with a card that says how it was made.

What goes there is the newest whole checkpoint, or the one that is named, without its training state: a model's folder, or an
adapter's in PEFT's format. Beside it README.md, the card, and curves.png where matplotlib is installed. All of it is one commit, so that
the repository never shows a half. The client's way to upload is the hub's (Xet, or LFS); nothing here holds a token.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from lean_ft.export.places import files_of_model
from lean_ft.hub.errors import DownloadFailed, explained
from lean_ft.hub.paths import repository_name
from lean_ft.peft import is_adapter
from lean_ft.settings.strict_yaml import to_yaml
from lean_ft.system.redaction import redact
from lean_ft.system.units import gibibytes, number
from lean_ft.training.curves import draw_curves
from lean_ft.training.finished_models import find_finished
from lean_ft.training.run_directory import METRICS_FILE, read_starts

_CARD, _PICTURE = "README.md", "curves.png"
_FACTS = ("lean_ft", "torch", "python", "device", "processes", "git_commit", "data_fingerprint", "started")


def push(source: str | Path, repo: str, *, public: bool = False) -> str:
    """Uploads the model of a run, a checkpoint or a folder to the repository `repo` (org/name), made private unless `public`
    where there is none yet; returns the address of the commit.

    Raises ValueError where the source is not whole, the name is none, or the hub takes no token or none that may write;
    DownloadFailed for what else goes wrong on the way.
    """
    from huggingface_hub import CommitOperationAdd, HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError

    name = repository_name(repo)
    if name is None or name.revision is not None:
        raise ValueError(f"{repo} is no repository's name; expected org/name.")
    folder = find_finished(source)
    run = folder.parent if (folder.parent / METRICS_FILE).is_file() else None
    if get_token() is None:
        raise ValueError("pushing needs a token that may write: `hf auth login`, or the variable HF_TOKEN.")
    with tempfile.TemporaryDirectory() as temporary:
        picture = Path(temporary) / _PICTURE
        if run is not None:
            try:
                draw_curves([run], picture, Path(temporary) / "curves.html")
            except ValueError:  # without matplotlib the card has no picture
                picture.unlink(missing_ok=True)
        card = model_card(folder, run, repo, has_picture=picture.exists())
        files: dict[str, Any] = {_CARD: card.encode()} | ({_PICTURE: str(picture)} if picture.exists() else {})
        theirs = {file.relative_to(folder).as_posix(): str(file) for file in files_of_model(folder)}
        files = theirs | files
        operations = [
            CommitOperationAdd(path_in_repo=place, path_or_fileobj=content) for place, content in files.items()
        ]
        hub = HfApi()
        try:
            hub.create_repo(repo, private=not public, exist_ok=True)
            return hub.create_commit(repo, operations, commit_message=f"{folder.name}, by lean_ft").commit_url
        except HfHubHTTPError as error:
            status = error.response.status_code
            if status in (401, 403):
                raise ValueError(
                    f"the Hugging Face hub does not let your token write to {repo} (error {status}). Give one that may: `hf auth "
                    "login`, or the variable HF_TOKEN."
                ) from None
            raise DownloadFailed(
                f"the Hugging Face hub answered with error {status}, and {repo} is as it was. Give the same command again later."
            ) from None
        except Exception:
            with explained(repo, None):
                raise
    raise AssertionError


def model_card(folder: Path, run: Path | None, repo: str, has_picture: bool) -> str:
    """The card of the model in `folder`, a checkpoint of `run`: data, losses, settings and versions, without tokens and homes."""
    starts = read_starts(run) if run is not None else []
    settings: dict[str, Any] = starts[-1]["settings"] if starts else {}
    base, adapter = settings.get("model.path"), is_adapter(folder)
    base_name = repository_name(base) if base else None
    head: dict[str, Any] = {"library_name": "peft" if adapter else "transformers", "tags": ["lean_ft"]}
    if base_name is not None:
        head |= {"base_model": base_name.repo, "base_model_relation": "adapter" if adapter else "finetune"}
    if not settings.get("loss.per_token") and "centering" not in "".join(settings):  # a reward model generates nothing
        head["pipeline_tag"] = "text-generation"
    kind = "An adapter for" if adapter else "A model finetuned from"
    lines = [f"# {repo.partition('/')[2]}", ""]
    if starts and run is not None:
        facts = starts[-1]
        lines += [f"{kind} `{base}`, by the recipe `{facts['recipe']}` of lean_ft; {folder.name} of the run.", ""]
        lines += [*_table(_results(run, folder)), ""]
        if has_picture:
            lines += [f"![Curves of the run]({_PICTURE})", ""]
        sources = {
            key: value for key, value in settings.items() if key.startswith("data.") and "source" in key and value
        }
        lines += ["## Data", "", *(f"- `{key}`: `{json.dumps(value)}`" for key, value in sources.items()), ""]
        lines += ["## Settings", "", "```yaml", to_yaml(settings).rstrip(), "```", ""]
        lines += [
            "## Versions",
            "",
            *(f"- {fact}: {facts[fact]}" for fact in _FACTS if facts.get(fact) is not None),
            "",
        ]
    return redact(f"---\n{to_yaml(head)}---\n\n" + "\n".join(lines))


def _results(run: Path, folder: Path) -> dict[str, str]:
    """What metrics.jsonl tells up to the checkpoint."""
    rows = [json.loads(line) for line in (run / METRICS_FILE).read_text(encoding="utf-8").splitlines()]
    step = folder.name.removeprefix("step_")
    rows = [row for row in rows if not step.isdigit() or row["step"] <= int(step)]
    steps = [row for row in rows if "tokens" in row]
    told = {"optimizer steps": f"{rows[-1]['step']:,}"} if rows else {}
    if steps:
        told["tokens"] = f"{sum(row['tokens'] for row in steps):,}"
        told["loss, first and last"] = f"{number(steps[0].get('loss'))}, {number(steps[-1].get('loss'))}"
    for name in sorted({key for row in rows for key in row if key.startswith("eval_")}):
        value = [row[name] for row in rows if row.get(name) is not None][-1:]
        if value and isinstance(value[0], int | float):
            told[name.replace("eval_", "held-out ", 1)] = number(value[0])
    if steps:
        told["memory at the peak"] = gibibytes(max(row["peak_memory_bytes"] for row in steps))
    return told


def _table(told: dict[str, str]) -> list[str]:
    return ["| | |", "|---|---:|", *(f"| {name} | {value} |" for name, value in told.items())]
