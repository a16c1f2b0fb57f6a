"""Files against the safetensors library, and damaged files."""

import json

import pytest
import safetensors.torch
import torch

from lean_ft.models import safetensors_file
from lean_ft.models.safetensors_file import read_header, write_file
from lean_ft.system.shards import part_of

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool]


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {f"some.{str(dtype)[6:]}": torch.randn(3, 5, generator=generator).to(dtype) for dtype in DTYPES}
    return made | {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4), "names/é": torch.ones(7)}


def test_written_bytes_equal_the_librarys(tmp_path):
    write_file(tmp_path / "ours", tensors(), {"format": "pt"})
    safetensors.torch.save_file(tensors(), tmp_path / "theirs", {"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert sorted(f.name for f in tmp_path.iterdir()) == ["ours", "theirs"]


def test_views_of_other_tensors_are_written(tmp_path):
    write_file(tmp_path / "file", {"column": torch.arange(12.0).view(3, 4)[:, 1]}, {})
    assert safetensors.torch.load_file(tmp_path / "file")["column"].tolist() == [1.0, 5.0, 9.0]


@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_reading_equals_the_library_and_a_cast(tmp_path, target, monkeypatch):
    monkeypatch.setattr("lean_ft.models.safetensors_file._STAGING_BYTES", 16)  # several parts a tensor
    safetensors.torch.save_file(tensors(), tmp_path / "file")
    stored = read_header(tmp_path / "file")
    expected = safetensors.torch.load_file(tmp_path / "file")
    assert stored.keys() == expected.keys()
    for name, tensor in stored.items():
        result = torch.full(tensor.shape, 77.0, dtype=target)
        tensor.read_part(part_of(result))
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(result, expected[name].to(target)), name


def test_damage_is_noticed(tmp_path):
    file = tmp_path / "file.safetensors"
    write_file(file, {"a": torch.ones(4), "b": torch.ones(2, 2)}, {})
    whole = file.read_bytes()
    length = int.from_bytes(whole[:8], "little")

    def with_header(change) -> bytes:
        header = json.loads(whole[8 : 8 + length])
        change(header)
        encoded = json.dumps(header).encode()
        return len(encoded).to_bytes(8, "little") + encoded + whole[8 + length :]

    damaged = {
        "its header does not fit": [b"", whole[:5], whole[: length - 1], b"\xff" * 64],
        "expected 32 bytes of tensors, found 31": [whole[:-1]],
        "expected 32 bytes of tensors, found 33": [whole + b"\0"],
        "header cannot be read": [
            whole[:8] + b"x" + whole[9:],
            with_header(lambda h: h["a"].pop("shape")),
            with_header(lambda h: h.update(a=[1, 2])),
        ],
        "the bytes of a do not match its shape": [with_header(lambda h: h["a"].update(shape=["4"]))],
        "the bytes of b do not match its shape": [
            with_header(lambda h: h["b"].update(shape=[2, 3])),
            with_header(lambda h: h["b"].update(dtype="F16")),
            with_header(lambda h: h["b"].update(data_offsets=[0, 16])),
        ],
    }
    for message, contents in damaged.items():
        for content in contents:
            file.write_bytes(content)
            with pytest.raises(ValueError, match=message):
                read_header(file)


def test_a_file_cut_while_reading_is_noticed(tmp_path):
    file = tmp_path / "file.safetensors"
    write_file(file, {"a": torch.ones(400)}, {})
    stored = read_header(file)["a"]
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ValueError, match="is truncated"):
        stored.read_part(part_of(torch.empty(400)))


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    file = tmp_path / "file.safetensors"
    write_file(file, {"a": torch.ones(4)}, {})

    def full(_: torch.Tensor) -> memoryview:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lean_ft.models.safetensors_file._bytes_of", full)
    with pytest.raises(OSError, match="No space left"):
        write_file(file, {"a": torch.zeros(4)}, {})
    assert [f.name for f in tmp_path.iterdir()] == [file.name]
    assert safetensors.torch.load_file(file)["a"].tolist() == [1.0] * 4


@pytest.mark.parametrize(("number", "name"), [(101, "{}"), (1, "{}" + "a" * 1001)])
def test_a_header_of_too_many_or_too_long_names_is_refused(tmp_path, monkeypatch, number, name):
    monkeypatch.setattr(safetensors_file, "MAX_TENSORS", 100)
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({name.format(i): entry for i in range(number)}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match="at most 100 tensors, with names of 1,000 characters"):
        read_header(file)
