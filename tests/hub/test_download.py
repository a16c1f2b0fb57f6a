"""Models by name, with the hub's real client against a server on loopback."""

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
    """A hub that nobody answers for."""

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
        ("org/name", ("org/name", None)),
        ("meta-llama/Llama-3.2-1B@v1.0", ("meta-llama/Llama-3.2-1B", "v1.0")),
        ("org/name@refs/pr/3", ("org/name", "refs/pr/3")),
        *(
            (text, None)
            for text in ("name", "a/b/c", "/org/name", "./name/x", "../name", "org/name@", "org/..", "~/name")
        ),
        *((text, None) for text in ("org/name@../x", "org/na me", "org/name?x", "https://huggingface.co/org/name")),
    ],
)
def test_what_a_repositorys_name_is(text, expected):
    assert hub.parse_name(text) == expected


# Downloading ------------------------------------------------------------------------------------------------------


def test_what_a_finetune_reads_is_fetched_weights_last(server):
    snapshot = hub.download("org/model")
    assert snapshot.commit == NEW
    assert files_in(snapshot.folder) == {name: FILES[name] for name in TAKEN}
    assert (snapshot.num_files, snapshot.size_bytes) == (4, sum(len(FILES[name]) for name in TAKEN))
    assert server.fetched()[-2:] == ["config.json", "model.safetensors"]


def test_the_cache_is_the_hubs_own(server):
    folder = hub.download("org/model").folder
    before = len(server.requests)
    taken = huggingface_hub.snapshot_download("org/model", local_files_only=True, allow_patterns=list(TAKEN))
    assert taken == str(folder)
    assert len(server.requests) == before


@pytest.mark.parametrize("revision", ["v1", OLD])
def test_a_revision(server, revision):
    snapshot = hub.download("org/model", revision)
    assert snapshot.commit == OLD
    assert (snapshot.folder / "config.json").read_bytes() == b'{"old": true}'


def test_what_is_there_is_not_fetched_again(server):
    hub.download("org/model")
    server.requests.clear()
    hub.download("org/model")
    assert server.fetched() == []


def test_a_folder_of_ones_own(server, tmp_path):
    for _ in range(2):  # the second goes on in it
        folder = hub.download("org/model", output_dir=tmp_path / "mine").folder
        assert folder == tmp_path / "mine"
        assert {p.name for p in folder.iterdir() if p.is_file()} == TAKEN
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "config.json").write_text("precious")
    with pytest.raises(ValueError, match="no download put there"):
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


def test_patterns_that_leave_nothing(server):
    with pytest.raises(ValueError, match=r"no file of org/model is left.*It has: README\.md, config\.json"):
        hub.download("org/model", include=["*.zip"])


def test_a_repository_without_safetensors(server, repository):
    del repository.commits[NEW]["model.safetensors"]
    with pytest.raises(ValueError, match=r"no safetensors weights.*It has consolidated\.safetensors, onnx/model\.onnx"):
        hub.download("org/model")
    assert hub.model_folder(hub.parse_name("org/model"), weights=False).name == NEW  # its tokenizer can be had


@pytest.mark.parametrize("what", ["sha", "ETag", "X-Linked-ETag", "X-Repo-Commit", "missing"])
@pytest.mark.parametrize("lie", ["../../../../../evil", "{outside}/evil", "a/b", "..", "x" * 300])
@pytest.mark.parametrize("own_folder", [False, True])
def test_an_answer_of_which_the_client_would_make_a_path(server, tmp_path, what, lie, own_folder):
    outside = tmp_path / "outside"
    outside.mkdir()
    server.lies = {what: lie.format(outside=outside)}
    before = {path for path in tmp_path.rglob("*") if "evil" in path.name}
    with pytest.raises(hub_errors.DownloadFailed, match="as no hub does"):
        hub.download("org/model", output_dir=tmp_path / "own" if own_folder else None)
    assert {path for path in tmp_path.rglob("*") if "evil" in path.name} == before
    assert not list(outside.iterdir())


@pytest.mark.parametrize("size", ["10", -1])
def test_a_size_that_is_none(server, size):
    server.lies = {"size": size}
    with pytest.raises(hub_errors.DownloadFailed, match="as no hub does"):
        hub.download("org/model")


@pytest.mark.parametrize("name", ["../evil.safetensors", "/etc/evil.safetensors", "a\0.safetensors", "a" * 300])
def test_a_file_that_leads_out_of_its_folder(server, repository, name):
    repository.commits[NEW][name] = b"evil"
    with pytest.raises(ValueError, match="leads out of its folder"):
        hub.download("org/model")
    assert server.fetched() == []


def test_a_broken_transfer_goes_on_where_it_broke(server, monkeypatch):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 4096)  # bytes that the client writes at a time; 10 MiB
    server.breaks["model.safetensors"] = [100_000, 50_000]
    folder = hub.download("org/model").folder
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    ranges = [r.range for r in server.requests if r.method == "GET" and "/storage/" in r.path]
    assert ranges[0] is None
    starts = [int(r.removeprefix("bytes=").removesuffix("-")) for r in ranges[1:] if r]
    assert len(starts) == 2
    assert 0 < starts[0] <= 100_000
    assert starts[0] < starts[1] <= 150_000


def test_an_interrupted_download_goes_on_with_what_is_missing(server, monkeypatch):
    fetch = huggingface_hub.hf_hub_download

    def interrupted(repo, file, **options):
        if file == "model.safetensors":
            raise KeyboardInterrupt
        return fetch(repo, file, **options)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", interrupted)
    with pytest.raises(KeyboardInterrupt) as stopped:
        hub.download("org/model")
    assert "3 of 4 files of org/model are complete" in stopped.value.__notes__[0]
    assert "goes on with model.safetensors" in stopped.value.__notes__[0]
    assert hub.find_cached(hub.RepositoryName("org/model", NEW)) is None
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch)
    server.requests.clear()
    hub.download("org/model")
    assert server.fetched() == ["model.safetensors"]


# Failing ----------------------------------------------------------------------------------------------------------


def test_a_name_that_the_hub_does_not_know(server, monkeypatch):
    with pytest.raises(hub_errors.RepositoryNotFound, match=r"'org/modle'.*error 401.*search=modle.*HF_TOKEN"):
        hub.download("org/modle")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(hub_errors.RepositoryNotFound, match=r"'org/modle'.*error 404.*of an account that may read it"):
        hub.download("org/modle")


def test_a_private_repository_needs_a_token(server, repository, monkeypatch):
    repository.private = True
    with pytest.raises(hub_errors.RepositoryNotFound):
        hub.download("org/model")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert hub.download("org/model").commit == NEW


def test_the_stored_token_serves_too(server, repository):
    repository.private = True
    Path(constants.HF_TOKEN_PATH).parent.mkdir()
    Path(constants.HF_TOKEN_PATH).write_text(TOKEN)
    assert hub.download("org/model").commit == NEW


def test_a_gated_repository_says_where_its_licence_is(server, repository, monkeypatch):
    repository.gated = True
    with pytest.raises(ValueError, match=rf"gated \(error 401\).*{server.url}/org/model, then give a token"):
        hub.download("org/model")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(ValueError, match=rf"gated \(error 403\).*{server.url}/org/model, with the account of"):
        hub.download("org/model")
    repository.licence_accepted = True
    assert hub.download("org/model").commit == NEW


def test_a_token_that_is_no_longer_one(server, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    server.accepted_token = "another"
    with pytest.raises(ValueError, match="does not accept your token") as refused:
        hub.download("org/model")
    assert TOKEN not in str(refused.value)


def test_a_revision_that_is_none(server):
    with pytest.raises(ValueError, match="no revision 'v9' .*branches, tags or full"):
        hub.download("org/model", "v9")


@pytest.mark.parametrize("name", ["model", "a/b/c", "../model", "org/model name"])
def test_a_name_that_is_none(server, name):
    with pytest.raises(ValueError, match="no repository of the Hugging Face hub; expected org/name"):
        hub.download(name)
    assert server.requests == []


def test_a_hub_that_is_out_of_order(server):
    server.failing_status = 400
    with pytest.raises(hub_errors.DownloadFailed, match="answered with error 400"):
        hub.download("org/model")


def test_no_network(server, no_network):
    no_network()
    with pytest.raises(hub_errors.HubUnreachable, match="the connection to the Hugging Face hub at http"):
        hub.download("org/model")


def test_offline_by_choice(server, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(hub_errors.HubUnreachable, match="HF_HUB_OFFLINE is set, so org/model is not fetched"):
        hub.download("org/model")
    assert server.requests == []


def test_a_disk_with_too_little_room_is_known_before(server, monkeypatch):
    usage = hub.shutil.disk_usage("/")
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(
        hub_errors.DownloadFailed, match=r"needs 0\.2 MB more.*0\.0 MB free.*Nothing was fetched.*HF_HOME"
    ):
        hub.download("org/model")
    assert server.fetched() == []


def test_a_disk_that_fills_up(server, monkeypatch):
    monkeypatch.setattr(file_download, "http_get", fill_the_disk)
    with pytest.raises(hub_errors.DownloadFailed, match=r"the disk is full.*goes on from there.*HF_HOME"):
        hub.download("org/model")


def test_a_signed_address_is_not_logged(server, capfd):
    server.breaks["model.safetensors"] = [1000]
    hub.download("org/model")
    told = capfd.readouterr()
    assert SIGNATURE not in told.out + told.err


# Folders for a run ------------------------------------------------------------------------------------------------


def test_a_model_is_fetched_once_and_serves_without_a_network(server, no_network, caplog):
    name = hub.parse_name("org/model")
    folder = hub.model_folder(name)
    assert folder.name == NEW
    no_network()
    assert hub.model_folder(name) == folder
    assert hub.model_folder(name, weights=False) == folder
    assert all(
        f"org/model: no way to the Hugging Face hub, so it is the copy in the cache, commit {NEW}" in record.message
        for record in caplog.records
    )
    assert len(caplog.records) == 2
    server.requests.clear()
    assert hub.model_folder(hub.RepositoryName("org/model", NEW)) == folder
    assert server.requests == []


def test_a_model_that_is_not_cached_needs_the_network(server, no_network):
    no_network()
    with pytest.raises(hub_errors.HubUnreachable):
        hub.model_folder(hub.parse_name("org/model"))


def test_weights_wait_until_they_are_wanted(server):
    name = hub.parse_name("org/model")
    folder = hub.model_folder(name, weights=False)
    assert "model.safetensors" not in files_in(folder)
    assert hub.find_cached(name) is None
    assert hub.find_cached(name, weights=False) == folder
    assert "model.safetensors" in files_in(hub.model_folder(name))


def test_a_branch_that_moved_while_half_fetched_leaves_the_whole_copy_in_service(
    server, repository, no_network, monkeypatch
):
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
def test_a_cached_copy_that_is_not_whole_is_told(tmp_path, index):
    (tmp_path / "there").touch()
    (tmp_path / hub.INDEX).write_text(index)
    assert not hub._has_weights(tmp_path)
    (tmp_path / hub.INDEX).write_text('{"weight_map": {"a": "there"}}')
    assert hub._has_weights(tmp_path)
