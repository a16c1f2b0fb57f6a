"""`leanft launch-file`: run the written files with fake services, and with the dry run of Hugging Face's own client."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import yaml

FILES = ["mine.yaml", "my rows.jsonl", "my_model"]
RUN = [
    *("finetune", "--config", "mine.yaml", "data.source=my rows.jsonl", "model.path=my_model"),
    "gradient_accumulation_steps=2",
]
JOB = [*RUN, "output_dir=/runs/First-1"]
RECORDER = f"""#!{sys.executable}
import json, os, sys
with open(os.environ["CALLS"], "a") as file:
    print(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]), file=file)
"""
VOLUMES = {"skypilot": "my-runs", "modal": "my-runs", "hf-jobs": "me/my-runs"}
OF_TWO = ["--nproc-per-node", "2", "--max-restarts", "3"]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The current folder, with a user's files, and commands that record how they are called."""
    (tmp_path / "work" / "my_model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    Path("my rows.jsonl").write_text('{"text": "a"}\n')
    Path("mine.yaml").write_text("recipe: finetune\noutput_dir: here/First-1\n")
    Path("w.whl").write_text("")
    (tmp_path / "bin").mkdir()
    for name in ("hf", "pip", "leanft"):
        (tmp_path / "bin" / name).write_text(RECORDER)
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("HF_TOKEN", "hf_ThisTokenMustNeverBeSeen")
    return Path.cwd()


def written(leanft, kind: str, *more: str) -> str:
    given = (kind, *RUN, "--volume", VOLUMES[kind], "--secret", "HF_TOKEN", "--source", "w.whl", "-o", "job", *more)
    answer = leanft.ok("launch-file", *given)
    assert "my rows.jsonl" in answer.out and "my_model" in answer.out
    text = Path("job").read_text()
    assert os.environ["HF_TOKEN"] not in text
    return text


def calls() -> list[list[str]]:
    return [json.loads(line) for line in Path(os.environ["CALLS"]).read_text().splitlines()]


@pytest.mark.parametrize("gpu", ["H100:1", "A100-80GB:2"])
def test_skypilot(leanft, folder, tmp_path, monkeypatch, gpu: str):
    task = yaml.safe_load(written(leanft, "skypilot", "--gpu", gpu, "--image", "org/image:tag"))
    assert task["resources"]["accelerators"] == gpu and task["resources"]["image_id"] == "docker:org/image:tag"
    mounts = task["file_mounts"]
    assert mounts.pop("/runs") == {"name": "my-runs", "mode": "MOUNT_CACHED"}
    assert mounts == {f"~/job/{file}": file for file in [*FILES, "w.whl"]} and task["secrets"] == {"HF_TOKEN": None}
    assert shlex.split(task["setup"].splitlines()[-1])[-1] == "./w.whl[datasets]"
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "job").mkdir()
    (tmp_path / "leanft" / "bin").mkdir(parents=True)
    (tmp_path / "leanft" / "bin" / "activate").write_text("")
    assert subprocess.run(["bash", "-c", task["run"]], timeout=20).returncode == 0
    assert calls() == [["leanft", "run", *(OF_TWO if gpu.endswith("2") else []), *JOB]]


def test_modal(leanft, folder, monkeypatch):
    modal = MagicMock()
    modal.App.return_value.function.return_value = modal.App.return_value.local_entrypoint.return_value = lambda f: f
    monkeypatch.setitem(sys.modules, "modal", modal)
    module = {"__name__": "job"}
    exec(compile(written(leanft, "modal", "--gpu", "H100:2"), "job", "exec"), module)
    function = modal.App.return_value.function.call_args.kwargs
    assert (function["gpu"], function["timeout"], list(function["volumes"])) == ("H100:2", 24 * 3600, ["/runs"])
    modal.Volume.from_name.assert_called_once_with("my-runs", create_if_missing=True)
    modal.Secret.from_local_environ.assert_called_once_with(["HF_TOKEN"])
    added = [call.args for call in modal.Image.mock_calls if call[0].endswith(("add_local_file", "add_local_dir"))]
    assert added == [("w.whl", "/job/w.whl"), *((file, f"/job/{file}") for file in FILES)]
    process = MagicMock(wait=MagicMock(side_effect=[KeyboardInterrupt, 0]))
    popen = MagicMock(return_value=process)
    monkeypatch.setattr(subprocess, "Popen", popen)
    with pytest.raises(KeyboardInterrupt):  # a preemption
        module["train"]()  # pyright: ignore[reportCallIssue]
    process.terminate.assert_called_once()
    assert popen.call_args.args[0] == ["leanft", "run", *OF_TWO, *JOB]


@pytest.mark.parametrize("asks_client", [False, pytest.param(True, marks=pytest.mark.long)])
def test_hugging_face_jobs(leanft, folder, tmp_path, asks_client: bool):
    written(leanft, "hf-jobs", "--gpu", "a10g-largex2")
    assert subprocess.run(["bash", "job"], timeout=20).returncode == 0
    create, *uploads, run = calls()
    bucket = "hf://buckets/me/my-runs"
    assert create == ["hf", "buckets", "create", "me/my-runs", "--private", "--exist-ok"]
    kinds = ["cp", "cp", "sync", "cp"]
    assert uploads == [
        ["hf", "buckets", kind, file, f"{bucket}/leanft-first-1/{file}"]
        for kind, file in zip(kinds, [*FILES, "w.whl"], strict=True)
    ]
    script = run[-1].replace("/runs/leanft", f"{tmp_path}/leanft")
    assert subprocess.run(["bash", "-c", script], timeout=20).returncode == 0
    assert calls()[-1] == ["leanft", "run", *OF_TWO, *JOB]
    assert calls()[-2][-1] == "./w.whl[datasets]"
    if not asks_client:
        return
    client = Path(sys.executable).with_name("hf")
    checked = subprocess.run(
        [client, "jobs", "run", "--dry-run", "--namespace", "me", *run[3:]], capture_output=True, text=True, timeout=60
    )
    if "No such option" in checked.stderr:
        pytest.skip("this version of huggingface_hub has no `hf jobs run --dry-run`")
    assert checked.returncode == 0, checked.stderr
    for fact in ("a10g-largex2", "24h", "HF_TOKEN=***", f"{bucket}:/runs", "name=leanft-first-1"):
        assert fact in checked.stdout


@pytest.mark.first(6)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["modal", "--gpu", "H 100"], "--gpu H 100: expected a GPU of modal, such as H100:1"),
        (["hf-jobs", "--volume", "mine"], "--volume mine: expected ACCOUNT/BUCKET"),
        (["skypilot", "--volume", ""], "--volume is missing: expected NAME"),
        (["modal", "--secret", "hf_ThisTokenMustNeverBeSeen"], "--secret expects the name of a variable"),
        (["modal", "--secret", "A=hf_ThisTokenMustNeverBeSeen"], "expects the name of a variable"),
        (["modal", "data.source=gone.jsonl"], "data source gone.jsonl does not exist"),
        (["modal", "data.source=../mine.jsonl"], "data.source: ../mine.jsonl is not a path below the current folder"),
        (["modal", "--source", "none.whl"], "--source none.whl: no such file"),
        (["modal", "log.name=hf_ThisTokenMustNeverBeSeen"], "log.name holds a secret"),
        (["modal", "data.system=a\nb"], "data.system has several lines"),
        (["modal", "optimizer.lr=fast"], "optimizer.lr (command line): expected number"),
        (["modal", "-o", "mine.yaml"], "mine.yaml exists"),
        (["cloud"], "cloud"),
    ],
)
def test_what_a_job_could_not_use_is_refused(leanft, folder, words, message: str):
    Path("../mine.jsonl").write_text('{"text": "a"}\n')
    kind, *more = words
    answer = leanft("launch-file", kind, *RUN, "--volume", "runs", "--source", "w.whl", *more)
    assert (answer.code, message in answer.err) == (2, True), answer.err
    assert "hf_ThisTokenMustNeverBeSeen" not in answer.err
    assert sorted(path.name for path in folder.iterdir()) == sorted([*FILES, "w.whl"])


def test_extras_of_the_settings_are_installed(leanft, folder, monkeypatch):
    source = "git+https://example.org/lean_ft@abc"
    answer = leanft("launch-file", "modal", "finetune", "model.path=org/m", "data.source=org/rows", "log.to=[tensorboard]", "output_dir=o", "--volume", "r", "--source", source)  # fmt: skip
    assert answer.code == 0, answer.err
    assert f"'lean-ft[datasets,tensorboard] @ {source}'" in answer.out and "uploads   no files" in answer.out
    absent = leanft("launch-file", "modal", "finetune", "model.path=/runs/base", "data.source=org/rows", "output_dir=o", "--volume", "r", "--source", source, "--force")  # fmt: skip
    assert "model.path: /runs/base is not on this machine" in absent.err
