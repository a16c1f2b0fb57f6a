"""Downloads by the Hub's real client from a server on loopback."""

import errno
import socket
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants, file_download

from lean_ft.hub import download as hub
from lean_ft.hub import errors as hub_errors
from tests.hub.hub_server import SIGNATURE, TOKEN, Repository

OLD, NEW = "a" * 40, "b" * 40
FILES = {
    "README.md": b"# A model",
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": bytes(range(256)) * 800,
    "pytorch_model.bin": b"pickle",
    "original/consolidated.00.pth": b"pickle",
    "onnx/model.onnx": b"onnx",
    "consolidated.safetensors": b"once more",
}
TAKEN = {"README.md", "config.json", "tokenizer.json", "model.safetensors"}


@pytest.fixture
def repository():
    return Repository({OLD: {**FILES, "config.json": b'{"old": true}'}, NEW: dict(FILES)}, {"main": NEW, "v1": OLD})


@pytest.fixture
def server(hub_server, repository):
    hub_server.repositories["org/model"] = repository
    return hub_server


@pytest.fixture
def no_network(server, monkeypatch):
    """Make the Hub unreachable when called."""

    def cut() -> None:
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", url)

    return cut


def fill_the_disk(*arguments, **options):
    raise OSError(errno.ENOSPC, "No space left on device")


def files_in(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# Names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", ("org/name", None, "")),
        ("meta-llama/Llama-3.2-1B@v1.0", ("meta-llama/Llama-3.2-1B", "v1.0", "")),
        ("org/name@refs/pr/3", ("org/name", "refs/pr/3", "")),
        ("org/name:q4/model-Q4_K_M.gguf", ("org/name", None, "q4/model-Q4_K_M.gguf")),
        ("org/name@v1:x.gguf", ("org/name", "v1", "x.gguf")),
        *(
            (text, None)
            for text in ("name", "a/b/c", "/org/name", "./name/x", "../name", "org/name@", "org/..", "~/name")
        ),
        *(
            (text, None)
            for text in (
                "org/name@../x",
                "org/na me",
                "org/name?x",
                "org/name:x.bin",
                "org/name:../x.gguf",
                "https://huggingface.co/org/name",
            )
        ),
    ],
)
def test_repository_names(text, expected):
    assert hub.parse_name(text) == expected


# Downloading ------------------------------------------------------------------------------------------------------


def test_needed_files_are_fetched_once_into_the_hubs_cache_weights_last(server):
    snapshot = hub.download("org/model")
    assert snapshot.commit == NEW
    assert files_in(snapshot.folder) == {name: FILES[name] for name in TAKEN}
    assert (snapshot.num_files, snapshot.size_bytes) == (4, sum(len(FILES[name]) for name in TAKEN))
    assert server.fetched()[-2:] == ["config.json", "model.safetensors"]
    server.requests.clear()
    cached = huggingface_hub.snapshot_download("org/model", local_files_only=True, allow_patterns=list(TAKEN))
    assert cached == str(hub.download("org/model").folder) == str(snapshot.folder)
    assert server.fetched() == []


def test_the_modules_of_a_model_of_vectors_are_fetched_before_its_weights(server, repository):
    """The snapshot counts as complete once the model's weights are there, so a dense layer comes before them."""
    modules = ("modules.json", "config_sentence_transformers.json", "sentence_roberta_config.json")
    modules += ("1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors")
    repository.commits[NEW] |= {name: name.encode() for name in (*modules, "2_Dense/pytorch_model.bin")}
    assert files_in(hub.download("org/model").folder).keys() == {*TAKEN, *modules}
    contents = [request.path for request in server.requests if request.method == "GET" and "/api/" not in request.path]
    assert "2_Dense/model.safetensors" in contents[-2] and "2_Dense" not in contents[-1]


@pytest.mark.parametrize("revision", ["v1", OLD])
def test_a_revision(server, revision):
    snapshot = hub.download("org/model", revision)
    assert snapshot.commit == OLD
    assert (snapshot.folder / "config.json").read_bytes() == b'{"old": true}'


def test_an_output_folder(server, tmp_path):
    for _ in range(2):  # the second download keeps the files
        folder = hub.download("org/model", output_dir=tmp_path / "mine").folder
        assert folder == tmp_path / "mine"
        assert {p.name for p in folder.iterdir() if p.is_file()} == TAKEN
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "config.json").write_text("precious")
    with pytest.raises(ValueError, match="were not downloaded"):
        hub.download("org/model", output_dir=tmp_path / "full")
    with pytest.raises(ValueError, match="is a file"):
        hub.download("org/model", output_dir=tmp_path / "full" / "config.json")


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        (["original/"], [], {"original/consolidated.00.pth"}),
        (["*.bin", "config.json"], [], {"pytorch_model.bin", "config.json"}),
        ([], ["*.md"], TAKEN - {"README.md"}),
        (["*"], ["onnx/*"], FILES.keys() - {"onnx/model.onnx"}),
    ],
)
def test_patterns(server, include, exclude, expected):
    assert files_in(hub.download("org/model", include=include, exclude=exclude).folder).keys() == expected


def test_invalid_sizes_and_names_and_a_repository_without_safetensors(server, repository):
    with pytest.raises(ValueError, match="is not a repository of the Hugging Face Hub; expected org/name"):
        hub.download("a/b/c")
    assert server.requests == []
    for size in ("10", -1):
        server.lies = {"size": size}
        with pytest.raises(hub_errors.DownloadFailed, match="returned an invalid value"):
            hub.download("org/model")
    server.lies = {}
    del repository.commits[NEW]["model.safetensors"]
    with pytest.raises(ValueError, match=r"no safetensors weights.*it has consolidated\.safetensors, onnx/model\.onnx"):
        hub.download("org/model")
    assert hub.model_folder(hub.parse_name("org/model"), weights=False).name == NEW  # the tokenizer is there


@pytest.mark.first(20)
@pytest.mark.parametrize("what", ["sha", "ETag", "X-Linked-ETag", "X-Repo-Commit", "missing"])
@pytest.mark.parametrize("lie", ["../../../../../evil", "{outside}/evil", "a/b", "..", "x" * 300])
@pytest.mark.parametrize("own_folder", [False, True])
def test_answers_that_would_become_paths_are_rejected(server, tmp_path, what, lie, own_folder):
    outside = tmp_path / "outside"
    outside.mkdir()
    server.lies = {what: lie.format(outside=outside)}
    before = {path for path in tmp_path.rglob("*") if "evil" in path.name}
    with pytest.raises(hub_errors.DownloadFailed, match="returned an invalid value"):
        hub.download("org/model", output_dir=tmp_path / "own" if own_folder else None)
    assert {path for path in tmp_path.rglob("*") if "evil" in path.name} == before
    assert not list(outside.iterdir())


def test_a_file_that_is_cut_short_is_not_taken(server):
    weights = hub.download("org/model").folder / "model.safetensors"
    blob = weights.resolve()
    blob.write_bytes(FILES["model.safetensors"][:1000])
    with pytest.raises(
        hub_errors.DownloadFailed, match=r"model.safetensors has 1,000 bytes, and the Hub's file has 204,800"
    ):
        hub.download("org/model")
    blob.unlink()
    assert (hub.download("org/model").folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]


@pytest.mark.parametrize("name", ["../evil.safetensors", "/etc/evil.safetensors", "a\0.safetensors", "a" * 300])
def test_an_unsafe_file_name(server, repository, name):
    repository.commits[NEW][name] = b"evil"
    with pytest.raises(ValueError, match="unsafe file name"):
        hub.download("org/model")
    assert server.fetched() == []


def test_a_broken_transfer_resumes_and_signed_addresses_are_not_logged(server, monkeypatch, capfd):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 4096)  # instead of 10 MiB
    server.breaks["model.safetensors"] = [100_000, 50_000]
    folder = hub.download("org/model").folder
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    ranges = [r.range for r in server.requests if r.method == "GET" and "/storage/" in r.path]
    assert ranges[0] is None
    starts = [int(r.removeprefix("bytes=").removesuffix("-")) for r in ranges[1:] if r]
    assert len(starts) == 2
    assert 0 < starts[0] <= 100_000
    assert starts[0] < starts[1] <= 150_000
    printed = capfd.readouterr()
    assert SIGNATURE not in printed.out + printed.err


# Failing ----------------------------------------------------------------------------------------------------------


def test_an_unknown_repository(server, monkeypatch):
    with pytest.raises(hub_errors.RepositoryNotFound, match=r"'org/modle'.*error 401.*search=modle.*HF_TOKEN"):
        hub.download("org/modle")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(hub_errors.RepositoryNotFound, match=r"'org/modle'.*error 404.*of an account that may read it"):
        hub.download("org/modle")


@pytest.mark.parametrize("stored", [True, False])
def test_a_private_repository_needs_a_token(server, repository, monkeypatch, stored):
    repository.private = True
    with pytest.raises(hub_errors.RepositoryNotFound):
        hub.download("org/model")
    if stored:
        Path(constants.HF_TOKEN_PATH).parent.mkdir()
        Path(constants.HF_TOKEN_PATH).write_text(TOKEN)
    else:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert hub.download("org/model").commit == NEW


def test_a_gated_repository_names_its_license_page(server, repository, monkeypatch):
    repository.gated = True
    with pytest.raises(ValueError, match=rf"gated \(error 401\).*{server.url}/org/model, then give a token"):
        hub.download("org/model")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(ValueError, match=rf"gated \(error 403\).*{server.url}/org/model, with the account of"):
        hub.download("org/model")
    repository.license_accepted = True
    assert hub.download("org/model").commit == NEW


def test_too_little_disk_space_is_found_before_the_download(server, monkeypatch):
    usage = hub.shutil.disk_usage("/")
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(
        hub_errors.DownloadFailed, match=r"needs 0\.2 MB more.*0\.0 MB free.*Nothing was downloaded.*HF_HOME"
    ):
        hub.download("org/model")
    assert server.fetched() == []


def test_a_disk_that_fills_up(server, monkeypatch):
    monkeypatch.setattr(file_download, "http_get", fill_the_disk)
    with pytest.raises(hub_errors.DownloadFailed, match=r"the disk is full.*are kept.*HF_HOME"):
        hub.download("org/model")


# Folders for a run ------------------------------------------------------------------------------------------------


def test_a_cached_model_works_without_a_network(server, no_network, caplog):
    name = hub.parse_name("org/model")
    folder = hub.model_folder(name)
    assert folder.name == NEW
    no_network()
    assert hub.model_folder(name) == folder
    assert hub.model_folder(name, weights=False) == folder
    warning = f"org/model: cannot reach the Hugging Face Hub; using the cached commit {NEW}."
    assert [record.message for record in caplog.records] == [warning] * 2
    server.requests.clear()
    assert hub.model_folder(hub.RepositoryName("org/model", NEW)) == folder
    assert server.requests == []


def test_weights_are_fetched_when_needed(server):
    name = hub.parse_name("org/model")
    folder = hub.model_folder(name, weights=False)
    assert "model.safetensors" not in files_in(folder)
    assert hub.find_cached(name) is None
    assert hub.find_cached(name, weights=False) == folder
    assert "model.safetensors" in files_in(hub.model_folder(name))


def test_an_incomplete_new_commit_does_not_replace_the_old_one(server, repository, no_network, monkeypatch):
    repository.revisions["main"] = OLD
    old = hub.model_folder(hub.parse_name("org/model"))
    repository.revisions["main"] = NEW
    with monkeypatch.context() as patch:
        patch.setattr(file_download, "http_get", fill_the_disk)
        with pytest.raises(hub_errors.DownloadFailed):
            hub.model_folder(hub.parse_name("org/model"))
    no_network()
    assert hub.model_folder(hub.parse_name("org/model")) == old


@pytest.mark.parametrize("index", ["{}", "[]", "nonsense", '{"weight_map": {"a": "there", "b": "not-there"}}'])
def test_an_incomplete_cached_copy_is_detected(tmp_path, index):
    (tmp_path / "there").touch()
    (tmp_path / hub.INDEX).write_text(index)
    assert not hub._has_weights(tmp_path)
    (tmp_path / hub.INDEX).write_text('{"weight_map": {"a": "there"}}')
    assert hub._has_weights(tmp_path)
