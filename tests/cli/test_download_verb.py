"""`leanft download`, and Hub models in `leanft run`: output and exit codes."""

import shlex
import signal
import subprocess
import sys

import pytest
from huggingface_hub import constants

from lean_ft.hub.paths import resolve_model_path
from tests.hub.hub_server import SIGNATURE, TOKEN, Repository

COMMIT = "c" * 40


@pytest.fixture
def repository(hub_server):
    """`org/tiny`: the embedded model, plus weight files that lean_ft does not read."""
    files = {file.name: file.read_bytes() for file in resolve_model_path("tiny").iterdir()}
    repository = Repository({COMMIT: {**files, "pytorch_model.bin": b"pickle"}}, {"main": COMMIT, "v1": COMMIT})
    hub_server.repositories["org/tiny"] = repository
    return repository


def told(answer):
    return dict(line.split(maxsplit=1) for line in answer.out.splitlines())


def test_what_came_and_what_to_run_next(leanft, repository):
    answer = leanft.quiet("download", "org/tiny")
    lines = told(answer)
    assert lines["commit"] == COMMIT
    assert lines["folder"].endswith(f"models--org--tiny/snapshots/{COMMIT}")
    files = repository.commits[COMMIT]
    size = sum(map(len, files.values())) - len(files["pytorch_model.bin"])
    assert lines["size"] == f"{size / 1e6:.1f} MB in {len(files) - 1} files"
    program, *arguments = shlex.split(lines["next"])
    assert (program, arguments[0]) == ("leanft", "run")
    assert "model.path=org/tiny" in arguments
    assert leanft("validate", *arguments[1:]).code == 0  # the command is valid as printed


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("arguments", "runs"),
    [
        (["org/tiny@v1"], "model.path=org/tiny@v1 "),
        (["org/tiny", "--revision", "v1"], "model.path=org/tiny@v1 "),
        (["org/tiny", "--output-dir", "mine", "--exclude", "*.md"], "model.path=mine "),
        (["org/tiny", "--include", "*.bin"], None),  # parts of a repository are not run
    ],
)
def test_what_to_run(leanft, repository, tmp_path, monkeypatch, arguments, runs):
    monkeypatch.chdir(tmp_path)
    told_next = told(leanft("download", *arguments)).get("next")
    assert told_next is None if runs is None else runs in told_next


def test_a_preset_for_the_model_is_what_to_run(leanft, repository, shipped):
    (shipped / "configs" / "tiny" / "org.yaml").write_text("model: {path: org/tiny}\n")
    assert told(leanft("download", "org/tiny"))["next"].endswith("--config tiny/org")
    assert told(leanft("download", "org/tiny@v1"))["next"].endswith("--config tiny/org model.path=org/tiny@v1")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["org/tinny"], 2, "has no repository 'org/tinny'"),
        (["tinny"], 2, "expected org/name"),
        (["org/tiny", "--revision", "v9"], 2, "no revision 'v9'"),
        (["org/tiny", "--include", "*.zip"], 2, "no file of org/tiny matches"),
        (["org/tiny", "--output-dir", "/dev/null"], 2, "is a file"),
        (["org/tiny@v1", "--revision", "main"], 2, "names a revision, and so does --revision main"),
    ],
)
def test_what_the_user_can_put_right(leanft, repository, arguments, code, words):
    answer = leanft("download", *arguments)
    assert (answer.code, answer.out) == (code, "")
    assert answer.err.startswith("error: ")
    assert answer.err.count("\n") == 1
    assert words in answer.err


def test_what_fails_has_one_message_and_code_1(leanft, repository, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    answer = leanft("download", "org/tiny")
    assert (answer.code, answer.out) == (1, "")
    assert answer.err.startswith("error: the connection to the Hugging Face Hub at http://127.0.0.1:9")
    assert "Traceback" not in answer.err
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    answer = leanft("download", "org/tiny")
    assert (answer.code, answer.out) == (1, "")
    assert answer.err.startswith("error: HF_HUB_OFFLINE is set")


def test_a_token_is_nowhere_to_be_read(leanft, repository, hub_server, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    repository.gated = True
    refused = leanft("download", "org/tiny", "--debug")
    assert refused.code == 2
    assert f"accept its license at {hub_server.url}/org/tiny" in refused.err
    hub_server.accepted_token = "another"
    unknown = leanft("download", "org/tiny", "--debug")
    assert unknown.code == 2
    assert "rejects your token" in unknown.err
    hub_server.accepted_token, repository.license_accepted = TOKEN, True
    hub_server.breaks["model.safetensors"] = [1000]
    fetched = leanft.ok("download", "org/tiny", "--debug")
    for answer in (refused, unknown, fetched):
        assert TOKEN not in answer.out + answer.err
        assert SIGNATURE not in answer.out + answer.err
    for file in tmp_path.rglob("*"):
        assert file.is_dir() or TOKEN.encode() not in file.read_bytes()


@pytest.mark.long
def test_ctrl_c_says_what_stays_and_the_same_command_goes_on(leanft, repository, hub_server):
    hub_server.stalls = True
    process = subprocess.Popen(
        [sys.executable, "-m", "lean_ft", "download", "org/tiny"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert hub_server.stalled.wait(60)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    num_files = len(repository.commits[COMMIT]) - 1
    assert (process.returncode, out) == (130, "")
    assert err.startswith(f"error: interrupted.\n{num_files - 1} of {num_files} files of org/tiny are complete")
    hub_server.stalls = False
    hub_server.requests.clear()
    leanft.ok("download", "org/tiny")
    assert hub_server.fetched() == ["model.safetensors"]


def test_validating_asks_no_hub(leanft, repository, hub_server, tmp_path):
    command = ["validate", "finetune", "model.path=org/tiny", "data.source=tiny/train.jsonl"]
    answer = leanft(*command, f"output_dir={tmp_path}/run")
    assert (answer.code, hub_server.requests) == (0, [])
    assert "# org/tiny is not on this machine. The run downloads it." in answer.out


def test_a_repository_answers_as_its_folder_does_without_a_network_too(leanft, repository, hub_server, monkeypatch):
    settings = ["prompt=What is the capital of Zanemar?", "model.dtype=float32", "max_new_tokens=5", "device=cpu"]
    by_name = leanft.ok("run", "generate", "model.path=org/tiny", *settings)
    assert by_name.out == leanft("run", "generate", "model.path=tiny", *settings).out
    hub_server.requests.clear()
    assert leanft("run", "generate", f"model.path=org/tiny@{COMMIT}", *settings).out == by_name.out
    assert hub_server.requests == []
    hub_server.failing_status = 400
    assert leanft("run", "generate", "model.path=org/tiny", *settings).code == 1
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert leanft("run", "generate", "model.path=org/tiny", *settings).out == by_name.out
