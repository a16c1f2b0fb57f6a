"""A file or folder that holds something else gives one message with exit code 2, without the name of a Python error."""

import builtins
import re
import shutil
from pathlib import Path

import pytest

import lean_ft

RAW = re.compile(
    rf"Traceback|\b({'|'.join(name for name in dir(builtins) if name.endswith(('Error', 'Exception')))})\b"
)
CONTENTS = {
    "half a pair": b'{"messages": [{"role": "user", "content": "\\ud800"}], "step": "\\ud800", "model_type": "\\ud800"}',  # noqa: E501
    "a list": b"[]",
    "nested": b"[" * 100_000,
    "empty": b"",
    "blank": b" \n\n",
    "binary": bytes(range(256)) * 20,
    "an object": b"{}",
    "a number": b"7",
    "no UTF-8": "é".encode("latin-1") * 9,
    "numbers": b'{"messages": 1e999, "step": -1, "model_type": 10, "vocab_size": 1e400, "lora_rank": '
    + b"9" * 5000
    + b"}",
}
FILES = {
    "rows": ["data", "stats", "finetune", "model.path=tiny", "data.source=rows.jsonl"],
    "rows shown": ["data", "preview", "finetune", "model.path=tiny", "data.source=rows.json"],
    "preset": ["validate", "finetune", "--config", "preset.yaml"],
    "other tool": ["convert-config", "other.yaml"],
    "prompts": ["run", "generate", "model.path=tiny", "prompts_file=prompts.jsonl", "max_new_tokens=1", "device=cpu"],
    "metrics": ["plot", "folder/metrics.jsonl"],
    "run.json": ["runs", "folder/run.json"],
    "config.json": ["export", "model/config.json", "out"],
    "tokenizer.json": ["data", "stats", "finetune", "model.path=model/tokenizer.json", "data.source=good.jsonl"],
    "manifest.json": ["export", "model/manifest.json", "out", "--dcp"],
    "adapter_config.json": ["export", "folder/adapter_config.json", "out", "--merge"],
    "weights": ["export", "model/model.safetensors", "out", "--gguf", "q8_0"],
}


@pytest.mark.first(1)
@pytest.mark.parametrize("content", CONTENTS)
def test_what_is_no_such_file_is_a_message(leanft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str):
    monkeypatch.chdir(tmp_path)
    Path("good.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    for kind, command in FILES.items():
        [named] = [word for word in command if re.search(r"\.(jsonl?|yaml|safetensors)$", word) and "good" not in word]
        place = Path(named.partition("=")[2] or named)
        words = [word.replace(str(place), str(place.parent)) if place.parent != Path() else word for word in command]
        for folder in ("model", "folder", "out"):
            shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(Path(lean_ft.__file__).parent / "assets/tiny/model", "model")
        Path("folder").mkdir()
        place.unlink(missing_ok=True)
        place.write_bytes(CONTENTS[content])
        answer = leanft(*words)
        assert answer.code in (0, 2), (kind, answer.err)
        assert not RAW.search(answer.out + answer.err), (kind, answer.err)
