"""`leanft download`: download a model from the Hugging Face Hub."""

import shlex
from typing import Annotated

import typer

from lean_ft.cli.arguments import Debug, run_command
from lean_ft.hub import download as hub
from lean_ft.settings.text import preset_values
from lean_ft.system import catalog


def download(
    repo: Annotated[
        str, typer.Argument(metavar="REPO", help="A repository: org/name or org/name@revision.", show_default=False)
    ],
    revision: Annotated[str | None, typer.Option("--revision", "-r", help="A branch, tag or commit.")] = None,
    output_dir: Annotated[
        str | None,
        typer.Option(
            "--output-dir", "-o", metavar="FOLDER", help="Download into this folder instead of the Hub cache."
        ),
    ] = None,
    include: Annotated[
        list[str] | None,
        typer.Option("--include", metavar="PATTERN", help="Download only matching files: --include 'original/*'"),
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option("--exclude", metavar="PATTERN", help="Skip matching files: --exclude '*.md'")
    ] = None,
    debug: Debug = False,
) -> None:
    """Download a model from the Hugging Face Hub.

    Skips original/ and formats that training does not read, such as .bin, .pth, .gguf and onnx.
    Use --include to download them. Resumes an earlier download.
    A gated model needs a token: run `hf auth login` or set the variable HF_TOKEN.
    """
    name = hub.parse_name(repo)
    if name is not None and name.file:
        raise ValueError(
            f"{repo} names a file. Use `{shlex.join(['leanft', 'download', name.repo, '--include', name.file])}`."
        )
    if name is not None and name.revision is not None:
        if revision is not None:
            raise ValueError(f"{repo} names a revision, and so does --revision {revision}. Remove one of them.")
        repo, revision = name.repo, name.revision
    snapshot = hub.download(repo, revision, output_dir, include or (), exclude or ())
    path = str(snapshot.folder) if output_dir is not None else repo if revision is None else f"{repo}@{revision}"
    typer.echo(f"commit  {snapshot.commit}")
    typer.echo(f"folder  {snapshot.folder}")
    typer.echo(f"size    {hub.gigabytes(snapshot.size_bytes)} in {snapshot.num_files} files")
    if not include:
        typer.echo(f"next    {_training_command(repo, path)}")


def _training_command(repo: str, path: str) -> str:
    """Return a command that trains the model, with the model's preset if there is one."""
    for name, preset in catalog.presets().items():
        if preset_values(preset).get("model.path") == repo:
            settings = [] if path == repo else [f"model.path={path}"]
            return run_command("--config", name, *settings, preset=preset)
    settings = [f"model.path={path}", "data.source=tiny/train.jsonl"]
    return shlex.join(["leanft", "run", "full_finetune_single_device", *settings])
