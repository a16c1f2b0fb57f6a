"""Files and folders are complete or absent, whatever happens while they are written."""

import os
import signal
from pathlib import Path

import pytest

from lean_ft.system import whole_files
from lean_ft.system.whole_files import LEFTOVER, MAX_JSON_BYTES, delete_whole, open_in_place, read_json, write_whole


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write_file(place: Path, text: str) -> None:
    place.write_text(text)


def write_folder(place: Path, text: str) -> None:
    (place / "inner").mkdir(parents=True)
    (place / "inner/file").write_text(text)


def read(path: Path) -> str:
    return (path / "inner/file" if path.is_dir() else path).read_text()


@pytest.fixture(params=[write_file, write_folder])
def write(request):
    return request.param


@pytest.mark.parametrize("on_disk", [False, True])
def test_the_new_file_replaces_the_old_one_when_the_block_ends(write, on_disk, tmp_path):
    for text in ("old", "new"):
        with write_whole(tmp_path / "it", on_disk=on_disk) as place:
            write(place, text)
            assert names(tmp_path) == sorted([place.name, *(["it"] if text == "new" else [])])
        assert read(tmp_path / "it") == text
        assert names(tmp_path) == ["it"]


@pytest.mark.parametrize("before", [False, True])
def test_a_block_that_fails_leaves_only_the_old_file(write, before, tmp_path):
    if before:
        write(tmp_path / "it", "old")

    def fail():
        with write_whole(tmp_path / "it") as place:
            write(place, "new")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert names(tmp_path) == ["it"] * before
    assert not before or read(tmp_path / "it") == "old"


def test_a_killed_process_leaves_no_partial_file_under_the_name(write, tmp_path):
    write(tmp_path / "it", "old")
    child = os.fork()
    if not child:
        with write_whole(tmp_path / "it") as place:
            write(place, "half")
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    (leftover,) = (name for name in names(tmp_path) if name != "it")
    assert LEFTOVER.fullmatch(leftover)
    assert read(tmp_path / "it") == "old"


def test_everything_is_synced_before_it_is_renamed(write, tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(whole_files, "sync", lambda path: synced.append((path, (tmp_path / "it").exists())))
    with write_whole(tmp_path / "it", on_disk=True) as place:
        write(place, "new")
        inside = {place, *place.rglob("*")} if place.is_dir() else {place}
    assert {path for path, named in synced if not named} == inside
    assert synced[-1] == (tmp_path, True)


def test_an_interrupted_deletion_leaves_nothing_under_the_name(tmp_path, monkeypatch):
    write_folder(tmp_path / "it", "old")
    with monkeypatch.context() as patch:
        patch.setattr(whole_files.shutil, "rmtree", lambda path: (_ for _ in ()).throw(OSError("cut short")))
        with pytest.raises(OSError, match="cut short"):
            delete_whole(tmp_path / "it")
    (leftover,) = names(tmp_path)
    assert LEFTOVER.fullmatch(leftover)


@pytest.mark.parametrize("make", ["link", "dangling link", "pipe", "folder"])
@pytest.mark.parametrize("mode", ["a", "a+", "rb+"])
def test_only_regular_files_are_opened_in_place(tmp_path, make, mode):
    target, path = tmp_path / "target", tmp_path / "metrics.jsonl"
    if make == "link":
        target.write_text("mine")
    if "link" in make:
        path.symlink_to(target)
    elif make == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(ValueError, match="does not write to it"):
        open_in_place(path, mode)
    assert target.read_text() == "mine" if make == "link" else not target.exists()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"[" * 100_000, "not valid JSON"),
        (b"\xff\xfe\x00", "not valid JSON"),
        (b"9" * 5000, "not valid JSON"),
        (b"[1]", "expected a JSON object, found a list"),
        (b" " * (MAX_JSON_BYTES + 1), "larger than 48 MiB"),
        (None, "no file.json: it says"),
    ],
)
def test_invalid_json_gives_one_error(tmp_path, content, reason):
    path = tmp_path / "file.json"
    if content is None:
        os.mkfifo(path)
    else:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=reason) as raised:
        read_json(path, "it says")
    assert str(tmp_path) in str(raised.value)
