"""`leanft export`: what it prints, and how it refuses."""

import pytest


def test_a_folder_and_a_gguf_file(leanft, tmp_path):
    answer = leanft("export", "tiny", tmp_path / "model", "--dtype", "float32", "--max-shard-size", "1MB")
    assert answer.code == 0, answer.err
    assert "float32" in answer.out and "4 weight files" in answer.out and "logits equal the source's" in answer.out
    assert (tmp_path / "model" / "model.safetensors.index.json").is_file()
    answer = leanft("export", tmp_path / "model", tmp_path / "model.gguf", "--gguf", "q8_0")
    assert answer.code == 0, answer.err
    assert "architecture llama, q8_0" in answer.out
    assert (tmp_path / "model.gguf").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tyni", "out"], "does not exist"),
        (["tiny", "out", "--dtype", "int8"], "dtype is 'int8'; expected bfloat16, float16, float32."),
        (["tiny", "out", "--max-shard-size", "5"], "'5' is no size of a file"),
        (["tiny", "out.gguf", "--gguf", "f32", "--dtype", "float32"], "leave out --dtype"),
        (["tiny", "out", "--gguf", "f32"], "expected one that ends in .gguf"),
        (["tiny", "out", "--shard-size", "1GB"], "no option --shard-size. Did you mean '--max-shard-size'?"),
        (["tiny"], "DEST"),
    ],
)
def test_wrong_input_is_one_message(leanft, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    answer = leanft("export", *arguments)
    assert answer.code == 2
    assert message in answer.err
    assert answer.err.startswith("error: ") and "Traceback" not in answer.err
    assert list(tmp_path.iterdir()) == []
