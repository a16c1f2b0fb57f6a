"""On-disk cache: entries are complete or absent, reused, invalidated by source changes, and limited in size."""

import json
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lean_ft.data import prepare, prepare_batches
from lean_ft.settings import SFTDataConfig
from lean_ft.system import cache
from lean_ft.system.cache import cache_folder, content_digest, limit_size, load_entry, read_entry, write_entry

ROWS = [{"prompt": f"{i}", "completion": "c" * (i % 30)} for i in range(40)]


def write_numbers(folder: Path, key: str, count: int = 10) -> None:
    with write_entry(folder, key) as writer:
        for part in np.array_split(np.arange(count, dtype=np.int32), 3):
            writer.append({"numbers": part})
        writer.append({"none": np.empty(0, dtype=bool)})
        writer.about["said"] = {"of": key}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "files")  # `files` stores content hashes


class TestEntries:
    def test_arrays_come_back_mapped_and_read_only(self, tmp_path: Path):
        assert read_entry(tmp_path, "a") is None
        write_numbers(tmp_path, "a")
        entry = read_entry(tmp_path, "a")
        assert entry is not None
        arrays, about = entry
        assert arrays["numbers"].tolist() == list(range(10))
        assert (arrays["numbers"].dtype, arrays["none"].dtype, len(arrays["none"])) == (np.int32, bool, 0)
        assert about["said"] == {"of": "a"}
        with pytest.raises(ValueError, match="read-only"):
            arrays["numbers"][0] = 1
        assert (tmp_path / "a" / "numbers").read_bytes() == np.arange(10, dtype=np.int32).tobytes()

    def test_values_of_several_numbers_keep_their_shape_and_parts_must_agree(self, tmp_path: Path):
        values = np.arange(24, dtype=np.int16).reshape(6, 2, 2)
        with write_entry(tmp_path, "a") as writer:
            writer.append({"pairs": values[:1], "none": np.empty((0, 3))})
            writer.append({"pairs": values[1:]})
            with pytest.raises(ValueError, match="the column `pairs` has values of int16 .2,. in one row"):
                writer.append({"pairs": values[0]})
        entry = read_entry(tmp_path, "a")
        assert entry is not None
        assert np.array_equal(entry[0]["pairs"], values)
        assert entry[0]["none"].shape == (0, 3)

    def test_what_a_killed_run_left_is_no_entry_and_removed_later(self, tmp_path: Path):
        program = (
            "import os, sys, numpy; from pathlib import Path; from lean_ft.system.cache import write_entry\n"
            "with write_entry(Path(sys.argv[1]), 'a') as writer:\n"
            "    writer.append({'numbers': numpy.arange(3)}); os.kill(os.getpid(), 9)"
        )
        killed = subprocess.run([sys.executable, "-c", program, str(tmp_path)])
        assert killed.returncode == -9
        [left] = names(tmp_path)
        assert left.endswith(".unfinished")
        assert read_entry(tmp_path, "a") is None
        long_ago = time.time() - 1000
        os.utime(tmp_path / left, (long_ago, long_ago))
        write_numbers(tmp_path, "b")
        assert names(tmp_path) == ["b"]

    def test_what_is_being_written_is_left_alone_however_old(self, tmp_path: Path):
        with write_entry(tmp_path, "a") as writer:
            [begun] = tmp_path.iterdir()
            os.utime(begun, (0, 0))
            write_numbers(tmp_path, "b")
            writer.append({"numbers": np.arange(3)})
        assert names(tmp_path) == ["a", "b"]

    @pytest.mark.parametrize("damage", ["short", "no description", "half a description"])
    def test_a_damaged_entry_is_made_anew(self, tmp_path: Path, damage: str):
        write_numbers(tmp_path, "a")
        about = tmp_path / "a" / "about.json"
        if damage == "short":
            os.truncate(tmp_path / "a" / "numbers", 12)
        elif damage == "no description":
            about.unlink()
        else:
            about.write_bytes(about.read_bytes()[:40])
        assert read_entry(tmp_path, "a") is None
        write_numbers(tmp_path, "a")
        entry = read_entry(tmp_path, "a")
        assert entry is not None
        assert entry[0]["numbers"].tolist() == list(range(10))

    def test_the_least_used_go_when_there_is_too_much(self, tmp_path: Path):
        for i, key in enumerate("abc"):
            write_numbers(tmp_path, key, 1000)
            os.utime(tmp_path / key / "about.json", (i, i))
        entry = read_entry(tmp_path, "a")  # now the most recently used
        assert entry is not None
        assert limit_size(tmp_path, 1e6, keep=set()) == []
        assert limit_size(tmp_path, 9000, keep=set()) == ["b"]
        assert limit_size(tmp_path, 1, keep={"c"}) == ["a"]
        assert entry[0]["numbers"].sum() == 499_500  # still mapped after deletion


class TestFolder:
    def test_the_setting_then_the_environment_then_the_users_cache(self, tmp_path: Path, monkeypatch):
        monkeypatch.setenv("LEAN_FT_CACHE", str(tmp_path / "named"))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        assert cache_folder(tmp_path / "set") == tmp_path / "set"
        assert cache_folder(None) == tmp_path / "named"
        monkeypatch.delenv("LEAN_FT_CACHE")
        assert cache_folder(None) == tmp_path / "xdg" / "lean_ft" / "data"
        monkeypatch.delenv("XDG_CACHE_HOME")
        assert cache_folder(None) == tmp_path / "home" / ".cache" / "lean_ft" / "data"

    def test_one_that_cannot_be_made_is_refused(self, tmp_path: Path):
        (tmp_path / "file").write_text("")
        with pytest.raises(ValueError, match=r"cannot write prepared data to .*LEAN_FT_CACHE"):
            cache_folder(tmp_path / "file" / "cache")


class TestContent:
    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        file = tmp_path / "rows.jsonl"
        file.write_text("one")
        return file

    def test_a_change_is_noticed_even_of_one_size_and_time(self, file: Path, tmp_path: Path, monkeypatch):
        monkeypatch.setattr(cache, "SETTLED_SECONDS", -1.0)
        first, times = content_digest(file, tmp_path / "files"), file.stat()
        time.sleep(0.02)  # longer than a tick of the kernel's clock
        file.write_text("two")
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert content_digest(file, tmp_path / "files") != first

    def test_a_file_changed_just_now_is_not_remembered(self, file: Path, tmp_path: Path):
        os.utime(file, (time.time() + 1,) * 2)  # a later change may get the same time
        content_digest(file, tmp_path / "files")
        assert not (tmp_path / "files").exists()


class TestPrepared:
    """Batches from the cache equal batches from the rows, and rows are read only when needed."""

    @pytest.fixture
    def reads(self, monkeypatch) -> list[str]:
        """Log with an item for each source whose rows are read."""
        read: list[str] = []
        original = prepare.Parts.__init__

        def noted(self, render, *more) -> None:
            read.append(str(render.sources.source))
            original(self, render, *more)

        monkeypatch.setattr(prepare.Parts, "__init__", noted)
        return read

    @pytest.mark.parametrize("packing", ["none", "bfd", "bfd_split", "wrapped", "padding_free"])
    def test_a_second_start_gives_the_same_from_the_cache(
        self, packing: str, config: Callable[..., Any], tmp_path: Path, plain_tokenizer, reads: list[str]
    ):
        settings = config(ROWS, max_length=32, packing=packing, cache_dir=tmp_path / "c", validation_fraction=0.2)
        first, first_held_out = prepare_batches(settings, plain_tokenizer, 2, seed=0)
        packed_once = {path: path.stat().st_mtime_ns for path in (tmp_path / "c").glob("packing-*/documents")}
        second, second_held_out = prepare_batches(settings, plain_tokenizer, 2, seed=0)
        assert len(reads) == 1
        assert len(packed_once) == (2 if packing not in ("none", "padding_free") else 0)
        assert packed_once == {path: path.stat().st_mtime_ns for path in (tmp_path / "c").glob("packing-*/documents")}
        assert first.report == second.report
        assert first.fingerprint == second.fingerprint
        assert first_held_out is not None
        assert second_held_out is not None
        pairs = [*zip(first_held_out, second_held_out, strict=True)]
        for _ in range(first.batches_per_epoch + 2):
            pairs += zip(first.take(1), second.take(1), strict=True)
        for one, other in pairs:
            assert torch.equal(one.input_ids, other.input_ids)
            assert torch.equal(one.labels, other.labels)

    def test_what_decides_documents_is_noticed_and_nothing_else(
        self, write: Callable[..., str], tmp_path: Path, plain_tokenizer, chat_tokenizer, reads: list[str], monkeypatch
    ):
        def start(source: str, tokenizer: Any = plain_tokenizer, batch_size: int = 2, **settings: Any) -> int:
            """Prepare batches and return how many sources were read."""
            reads.clear()
            config = SFTDataConfig(**{"source": source, "max_length": 32, "cache_dir": tmp_path / "c", **settings})
            prepare_batches(config, tokenizer, batch_size, seed=0)
            return len(reads)

        path, moved = write(ROWS), write(ROWS, "moved.jsonl")
        assert start(path) == 1
        assert start(path) == start(moved) == start(path, batch_size=3) == start(path, validation_fraction=0.5) == 0
        assert start(path, packing="bfd") == start(path, num_processes=1, cache_gib=1.0) == 0
        assert start(path, max_length=16) == start(path, train_on="all") == start(path, tokenizer=chat_tokenizer) == 1
        assert start(path, packing="wrapped", max_length=20) == 1  # wrapped has no length limit
        assert start(path, packing="bfd_split", max_length=16) == 0
        write(ROWS[:-1])
        assert start(path) == 1
        monkeypatch.setattr(prepare, "code_digest", lambda: "other code")
        assert start(path) == 1

    def test_of_several_at_once_one_makes_it(self, tmp_path: Path):
        made, entries = [], []

        def write(writer: Any) -> None:
            made.append(1)
            time.sleep(0.3)
            writer.append({"x": np.arange(3)})

        threads = [
            threading.Thread(target=lambda: entries.append(load_entry(tmp_path, "key", write))) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(entries) == 4
        assert made == [1]
        assert names(tmp_path) == ["key"]

    def test_a_bad_row_leaves_no_entry(self, config: Callable[..., Any], tmp_path: Path, plain_tokenizer):
        with pytest.raises(ValueError, match="line 41"):
            prepare_batches(config([*ROWS, {"text": 1}], cache_dir=tmp_path / "c"), plain_tokenizer, 2, seed=0)
        assert names(tmp_path / "c") == []

    def test_a_file_that_grows_while_it_is_read_is_refused(
        self, config: Callable[..., Any], tmp_path: Path, plain_tokenizer, monkeypatch
    ):
        settings = config(ROWS, cache_dir=tmp_path / "c")
        original = prepare.Parts.__iter__

        def grows(self):
            yield from original(self)
            with open(settings.source, "a") as file:
                file.write(json.dumps(ROWS[0]) + "\n")

        monkeypatch.setattr(prepare.Parts, "__iter__", grows)
        with pytest.raises(ValueError, match="changed while it was read"):
            prepare_batches(settings, plain_tokenizer, 2, seed=0)
        assert names(tmp_path / "c") == []

    def test_nothing_in_it_is_pickled(self, config: Callable[..., Any], tmp_path: Path, plain_tokenizer):
        prepare_batches(config(ROWS, packing="bfd_split", cache_dir=tmp_path / "c"), plain_tokenizer, 2, seed=0)
        for entry in (tmp_path / "c").glob("*-*"):
            about = json.loads((entry / "about.json").read_bytes())
            assert names(entry) == sorted([*about["arrays"], "about.json"])
            for name, array in about["arrays"].items():
                assert (entry / name).stat().st_size == math.prod(array["shape"]) * np.dtype(array["dtype"]).itemsize
                assert np.dtype(array["dtype"]).kind in "iubf"

    def test_a_folder_deleted_under_a_run_takes_nothing_from_it(
        self, config: Callable[..., Any], tmp_path: Path, plain_tokenizer
    ):
        batches, _ = prepare_batches(config(ROWS, packing="bfd", cache_dir=tmp_path / "c"), plain_tokenizer, 2, seed=0)
        shutil.rmtree(tmp_path / "c")
        assert sum(batch.num_targets for batch in batches.take(100)) == batches.report.target_tokens
