"""Upload a run's model to the Hugging Face Hub, with a model card.

The upload is the newest complete checkpoint, or the given one, without its training state: a model folder, or an
adapter in PEFT's format. README.md is the card, config.yaml has all settings, and curves.png is added if matplotlib is
installed. All files are one commit, so the repository never has a partial upload. The client uploads (Xet or LFS) and
reads the token.
"""

import tempfile
from pathlib import Path
from typing import Any

from lean_ft.export.model_card import PICTURE, model_card
from lean_ft.export.places import CARD, files_of_model
from lean_ft.hub.errors import DownloadFailed, explained
from lean_ft.hub.paths import repository_name
from lean_ft.peft.finished_models import find_finished
from lean_ft.system.installation import install_command
from lean_ft.system.redaction import redact
from lean_ft.system.run_directory import CONFIG_FILE, METRICS_FILE
from lean_ft.training.curves import draw_curves


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
    if run is not None and (run / CONFIG_FILE).is_file():
        files[CONFIG_FILE] = redact((run / CONFIG_FILE).read_text(encoding="utf-8")).encode()
    files |= {CARD: card.encode()} | ({PICTURE: picture} if picture is not None else {})
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
        picture = Path(temporary) / PICTURE
        try:
            draw_curves([run], picture)
        except ValueError:
            return None
        return picture.read_bytes()
