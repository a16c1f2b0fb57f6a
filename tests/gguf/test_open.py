"""Models read from GGUF files: against the folders they were exported from, transformers, the `gguf` package and
llama.cpp."""

import functools
import json
import os
import re
import shutil
import struct
import sys
import time
import unicodedata
import urllib.request
from collections import defaultdict
from itertools import cycle, islice
from pathlib import Path

import gguf
import jinja2
import numpy as np
import pytest
import torch
import transformers
from tokenizers.normalizers import Replace
from tokenizers.pre_tokenizers import Split

from lean_ft.cli.main import run_command_line
from lean_ft.export import export_gguf
from lean_ft.gguf import header, open
from lean_ft.gguf.cache import gguf_cache
from lean_ft.gguf.splitting import APPROXIMATED, PRE_TOKENIZERS, RULES
from lean_ft.gguf.tokenizer import _sentencepiece_merges
from lean_ft.hub.paths import path_at_commit, resolve_model_path
from lean_ft.models import load_model
from lean_ft.models.stored_weights import stored_tensors
from lean_ft.system.shards import Part
from lean_ft.tokenizers import load_tokenizer
from tests.export.conftest import TEMPLATE, qwen_tokenizer
from tests.gguf.cases import FAMILIES, QUICK
from tests.gguf.llama_server import LlamaServer
from tests.hub.hub_server import Repository
from tests.tokenizers.conftest import word_start_tokenizer

IDS = torch.arange(60).view(2, 30)
CHAT = [{"role": "user", "content": "Hi <|im_end|> there"}, {"role": "assistant", "content": "Hello."}]
SPM = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
CHAT_CONFIG = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": TEMPLATE}
# The file is read as another configuration that computes the same: weights have multipliers, scales are rounded, and so
# on.
EQUIVALENT = {"falcon_h1", "deepseek_v3", "granitemoehybrid/attention", "gemma3n_text"}


def leanft(arguments: list[str]) -> int:
    """Run a command and return its exit code."""
    with pytest.raises(SystemExit) as exited:
        run_command_line(arguments)
    assert isinstance(exited.value.code, int)
    return exited.value.code


@pytest.fixture
def file(tmp_path) -> Path:
    return tmp_path / "model.gguf"


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[pytest.mark.long] * (c not in QUICK)) for c in FAMILIES if c not in ("bamba", "gpt_oss")],
)
@torch.no_grad()
def test_an_exported_model_comes_back_unchanged(case, exported):
    source, file = exported(case)
    expected, model = load_model(source), load_model(file)
    assert (model.config == expected.config) == (case not in EQUIVALENT)
    torch.testing.assert_close(model(IDS), expected(IDS), atol=1e-4, rtol=1e-4)


def test_bamba_is_not_read(exported):
    with pytest.raises(ValueError, match="is a Bamba model that rotates a part of each head"):
        load_model(exported("bamba")[1])


@torch.no_grad()
def test_layers_that_draft_tokens_are_skipped(exported, file):
    """A file counts them among its layers, also in lists with one number per layer."""
    shutil.copy(exported("glm4_moe")[1], file)
    counts = {"block_count": 4, "nextn_predict_layers": 1, "attention.head_count_kv": [2, 2, 2, 2]}
    metadata = {f"glm4moe.{key}": value for key, value in counts.items()}
    other = edited(file, metadata, tensors={"blk.3.nextn.eh_proj.weight": np.ones((64, 128), np.float32)})
    other = other.rename(file.with_name("drafting.gguf"))
    assert torch.equal(load_model(other)(IDS), load_model(file)(IDS))


@pytest.mark.parametrize("family", ["Llama", "Qwen2"])
def test_an_exported_tokenizer_comes_back_unchanged(family, make_model_folder, file, texts):
    source = make_model_folder(family, tokenizer=qwen_tokenizer(), tokenizer_config=CHAT_CONFIG)
    export_gguf(source, file, "f32")
    tokenizer, original = load_tokenizer(file), load_tokenizer(source)
    for text in [*texts, "<|im_start|>user\nhi<|im_end|> <think>x"]:
        assert tokenizer.encode(text, True) == original.encode(text, True)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.render(CHAT) == original.render(CHAT)
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.bos_id) == (original.eos_id, original.pad_id, original.bos_id)
    assert tokenizer.vocab_size == original.vocab_size


def test_a_special_token_whose_type_says_unused_is_used(make_model_folder, file):
    export_gguf(make_model_folder("Qwen2", tokenizer=qwen_tokenizer(), tokenizer_config=CHAT_CONFIG), file, "f32")
    stored = header.read_header(file)[0]
    bos, pad = (stored["tokenizer.ggml.tokens"].index(token) for token in ("<|im_start|>", "a"))
    types = list(stored["tokenizer.ggml.token_type"])
    types[bos] = types[pad] = 5
    ids = {"bos_token_id": bos, "padding_token_id": pad, "add_bos_token": True, "token_type": types}
    tokenizer = load_tokenizer(edited(file, {f"tokenizer.ggml.{key}": value for key, value in ids.items()}))
    assert tokenizer.encode("b", True) == [bos, stored["tokenizer.ggml.tokens"].index("b")]
    assert (tokenizer.bos_id, tokenizer.pad_id) == (bos, pad)
    assert tokenizer.vocab_size == load_tokenizer(file).vocab_size


def test_a_file_has_no_generation_tags(make_model_folder, file):
    """Programs with other versions of Jinja cannot read them."""
    tagged = TEMPLATE.replace("{{ m.content }}", "  {%- generation %}\n{{ m.content }}  {%- endgeneration -%}\n")
    assert tagged != TEMPLATE
    source = make_model_folder(
        "Qwen2", tokenizer=qwen_tokenizer(), tokenizer_config={**CHAT_CONFIG, "chat_template": tagged}
    )
    export_gguf(source, file, "f32")
    stored = header.read_header(file)[0]["tokenizer.chat_template"]
    jinja2.Environment(trim_blocks=True, lstrip_blocks=True).parse(stored)
    assert load_tokenizer(file).render(CHAT)[0] == load_tokenizer(source).render(CHAT)[0]


@pytest.mark.long
def test_a_file_is_checked_with_transformers(make_model_folder, file, capsys):
    export_gguf(make_model_folder(tokenizer=qwen_tokenizer(), tokenizer_config=CHAT_CONFIG), file, "q8_0")
    assert leanft(["check", str(file), "--quick", "data.packing=bfd"]) == 0
    assert "skipped: transformers" not in capsys.readouterr().out


def test_an_exported_folder_opens_in_transformers_with_equal_logits(make_model_folder, file, tmp_path, capsys):
    source = make_model_folder(tokenizer=qwen_tokenizer(), tokenizer_config=CHAT_CONFIG)
    export_gguf(source, file, "f32")
    assert leanft(["export", str(file), str(tmp_path / "folder")]) == 0
    assert f"exported {file} to" in capsys.readouterr().out
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    expected = transformers.AutoModelForCausalLM.from_pretrained(source)
    assert torch.equal(theirs(IDS).logits, expected(IDS).logits)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "folder")
    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == load_tokenizer(source).apply_chat_template(CHAT,
        tokenize=False)  # fmt: skip


@pytest.mark.first(4)
@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K", "IQ4_NL", "MXFP4"])
def test_values_equal_those_of_the_gguf_package(kind, make_model_folder, file, tmp_path):
    """Matrices are stored as random bytes of the kind, in whole and in parts that do not start at a block."""
    source = make_model_folder("Qwen2", tokenizer=qwen_tokenizer(), hidden_size=256, intermediate_size=256)
    export_gguf(source, file, "f32")
    expected = requantize(file, tmp_path / "other.gguf", gguf.GGMLQuantizationType[kind])
    stored = stored_tensors(resolve_model_path(tmp_path / "other.gguf"))
    weight = stored["model.layers.1.mlp.down_proj.weight"]
    values = expected["blk.1.ffn_down.weight"]
    assert torch.equal(weight.read().float(), values)
    part = torch.empty(777)
    weight.read_part(Part(part, weight.shape, first=300))
    assert torch.equal(part, values.view(-1)[300:1077])
    columns = torch.empty(256, 64)  # of each row, as one of 4 ranks that divide the columns
    weight.read_part(Part(columns, weight.shape, first=64, run=64, stride=256))
    assert torch.equal(columns, values[:, 64:128])


def requantize(file: Path, other: Path, kind: gguf.GGMLQuantizationType) -> dict[str, torch.Tensor]:
    """Copy a file with random values of another kind in its layers' matrices, and return the package's values."""
    reader, random = gguf.GGUFReader(file), np.random.default_rng(0)
    writer = gguf.GGUFWriter(other, reader.get_field("general.architecture").contents())
    for key, found in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            sub_type = found.types[-1] if found.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, found.contents(), found.types[0], sub_type)
    values = {}
    for tensor in reader.tensors:
        data, stored = tensor.data, tensor.tensor_type
        if tensor.name.startswith("blk.") and data.ndim == 2:
            block, size = gguf.GGML_QUANT_SIZES[kind]
            data, stored = random.integers(0, 60, (len(data), data.shape[1] // block * size), dtype=np.uint8), kind
            if kind.name in ("F16", "BF16"):  # half of the bytes would be one number too large
                data = gguf.quants.quantize(tensor.data, kind).view(np.uint8).reshape(len(data), -1)
        values[tensor.name] = torch.from_numpy(gguf.quants.dequantize(data, stored).copy())
        writer.add_tensor(tensor.name, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def test_a_file_of_a_repository_is_one_download(qwen_folder, file, hub_server, tmp_path):
    export_gguf(qwen_folder, file, "bf16")
    commit = "ab" * 20
    files = {"q/model.gguf": file.read_bytes(), "q/other.gguf": b"x", "config.json": b"{}"}
    hub_server.repositories["org/model"] = Repository({commit: files}, {"main": commit})
    model = load_model("org/model:q/model.gguf", dtype=torch.bfloat16)
    assert load_tokenizer("org/model:q/model.gguf").eos_id == load_tokenizer(qwen_folder).eos_id
    assert path_at_commit("org/model:q/model.gguf") == f"org/model@{commit}:q/model.gguf"
    assert hub_server.fetched() == ["model.gguf"]  # no other file
    expected = load_model(qwen_folder, dtype=torch.bfloat16)
    assert all(map(torch.equal, model.parameters(), expected.parameters()))


@pytest.mark.long
def test_a_lora_trains_on_a_file_in_4_bits_and_the_adapter_finds_it_again(make_model_folder, file, tmp_path, capsys):
    source = make_model_folder(tokenizer=qwen_tokenizer(), tokenizer_config=CHAT_CONFIG)
    export_gguf(source, file, "q8_0")
    rows = [{"messages": CHAT}] * 8
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run = tmp_path / "run"
    settings = [f"model.path={file}", f"data.source={tmp_path / 'rows.jsonl'}", f"output_dir={run}", "max_steps=4"]
    settings += ["lora.quantize=nf4", "optimizer.lr=1e-2", "device=cpu", "model.dtype=float32", "data.max_length=64"]
    assert leanft(["run", "lora_finetune_single_device", *settings]) == 0
    losses = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines() if '"loss"' in line]
    assert len(losses) == 4 and losses[-1] < losses[0] - 0.5
    assert json.loads(next(run.glob("step_*/adapter_config.json")).read_text())["base_model_name_or_path"] == str(file)
    assert leanft(["export", str(run), str(tmp_path / "merged"), "--merge"]) == 0
    capsys.readouterr()
    assert leanft(["generate", f"model.path={file}", "prompt=Hi", "max_new_tokens=3", "device=cpu"]) == 0
    assert leanft(["data", "stats", "lora_finetune_single_device", *settings]) == 0
    assert leanft(["validate", "lora_finetune_single_device", *settings]) == 0


def edited(file: Path, metadata: dict | None = None, drop: str = "", tensors: dict | None = None) -> Path:
    """Write the file again with other metadata (None removes a key), without one tensor, or with other tensors."""
    reader, other = gguf.GGUFReader(file), file.with_name("edited.gguf")
    fields = {
        key: (found.contents(), found.types) for key, found in reader.fields.items() if not key.startswith("GGUF.")
    }
    writer = gguf.GGUFWriter(other, (metadata or {}).get("general.architecture", fields["general.architecture"][0]))
    for key, value in (metadata or {}).items():
        fields.pop(key, None)
        if value is not None and key != "general.architecture":
            writer.add_key_value(key, value, *kinds_of(value))
    for key, (value, types) in fields.items():
        if key != "general.architecture":
            writer.add_key_value(key, value, types[0], types[-1] if types[0] == gguf.GGUFValueType.ARRAY else None)
    for tensor in reader.tensors:
        if tensor.name != drop:
            writer.add_tensor(tensor.name, (tensors or {}).get(tensor.name, tensor.data))
    for name in (tensors or {}).keys() - {tensor.name for tensor in reader.tensors}:
        writer.add_tensor(name, (tensors or {})[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return other


def kinds_of(value):
    kind = gguf.GGUFValueType.get_type(value)
    return kind, gguf.GGUFValueType.get_type(value[0]) if kind == gguf.GGUFValueType.ARRAY else None


WRONG = {
    "architecture": ({"metadata": {"general.architecture": "lama"}},
        "architecture 'lama'; expected one of afmoe, apertus.* Did you mean 'llama'"),
    "a key that changes the computation": ({"metadata": {"qwen2.attention.scale": 0.5}},
        "metadata attention.scale, which"),
    "a missing key": ({"metadata": {"qwen2.block_count": None}}, "lacks the metadata block_count"),
    "a count of another type": ({"metadata": {"qwen2.block_count": "two"}},
        "block_count is 'two'; expected an integer"),
    "no tokens": ({"metadata": {"tokenizer.ggml.tokens": None}}, "tokenizer.ggml.tokens has none; expected one str"),
    "too few types": ({"metadata": {"tokenizer.ggml.token_type": [1]}}, "token_type has 1 entries; expected one int"),
    "a splitting rule": ({"metadata": {"tokenizer.ggml.pre": "qwen3"}}, "rule 'qwen3'.*Did you mean 'qwen35'"),
    "a tokenizer": ({"metadata": {"tokenizer.ggml.model": "bert"}}, "tokenizer 'bert'; expected gpt2"),
    "an id out of range": ({"metadata": {"tokenizer.ggml.eos_token_id": 9999}}, "eos_token_id is 9999; expected an id"),
    "an end of another type": ({"metadata": {"tokenizer.ggml.eot_token_id": ["x"]}},
        r"eot_token_id is \['x'\]; expected an id"),
    "a template of another type": ({"metadata": {"tokenizer.chat_template": 5}},
        "chat_template is 5, which is of the wrong type"),
    "a second template": ({"metadata": {"tokenizer.chat_template.tool_use": 1.5}},
        "tool_use is 1.5, which is of the wrong type"),
    "tokens of another type": ({"metadata": {"tokenizer.ggml.tokens": 5}}, "tokens is 5, which is of the wrong type"),
    "types of another type": ({"metadata": {"tokenizer.ggml.token_type": "x"}},
        "token_type is x, which is of the wrong"),
    "merges of another type": ({"metadata": {"tokenizer.ggml.merges": 5}}, "merges is 5, which is of the wrong type"),
    "a rule of another type": ({"metadata": {"tokenizer.ggml.pre": ["qwen2"]}},
        r"pre is \['qwen2'\], which is of the wrong"),
    "a flag of another type": ({"metadata": {"tokenizer.ggml.add_bos_token": "x"}},
        "add_bos_token is x, which is of the wrong"),
    "merges of no tokens": ({"metadata": {"tokenizer.ggml.merges": ["q q", "qq qq"]}},
        "makes no token of the vocabulary"),
    "a part": ({"metadata": {"split.count": 3}}, "one part of a split model. Join the parts"),
    "a missing tensor": ({"drop": "blk.1.ffn_up.weight"}, "lacks tensors of qwen2: blk.1.ffn_up.weight"),
    "an unexpected tensor": ({"tensors": {"blk.0.extra.weight": np.ones((4, 4), np.float32)}}, "unexpected tensors"),
    "a wrong shape": ({"tensors": {"blk.0.attn_norm.weight": np.ones(63, np.float32)}},
        r"shape \[63\]; expected \[64\]"),
    "integers": ({"tensors": {"blk.0.attn_norm.weight": np.ones(64, np.int32)}}, "as I32; expected one of F32, F16"),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    ["phi3/long", "mimo_v2_flash", "gemma4_text", "nemotron_h/experts", "qwen3_5_moe_text", "deepseek_v3", "apertus"],
)
def test_any_metadata_is_read_or_refused(case, exported, tmp_path, monkeypatch):
    """Every value in turn is missing, of another type, or absurd: an error message, or another model."""
    _, file = exported(case)
    metadata, tensors = header.read_header(file)
    prefix, errors = f"{metadata['general.architecture']}.", list[str]()
    for key in [key for key in metadata if key.startswith((prefix, "xielu."))]:
        for value in (None, 0, 1, 2**31, -1, "x", [], [1], True, 1e38, float("nan"), [3] * len(str(metadata[key]))):
            other = {**metadata, key: value}
            if value is None:
                del other[key]
            monkeypatch.setattr(open, "read_header", lambda _, other=other: (other, tensors))
            monkeypatch.setenv("LEAN_FT_CACHE", str(tmp_path / f"{key} {value}"[:200].replace("/", "")))
            try:
                load_model(file, device="meta")
            except ValueError as error:
                errors.append(str(error))
    assert len(errors) > 50 and all(str(file) in error for error in errors)


class TestWrongFiles:
    @pytest.fixture(scope="class")
    @classmethod
    def good(cls, qwen_folder, tmp_path_factory) -> Path:
        file = tmp_path_factory.mktemp("good") / "good.gguf"
        export_gguf(qwen_folder, file, "f32")
        return file

    def refused(self, file: Path, capsys, message: str) -> None:
        """Every command refuses the file with one message, without a traceback and with nothing written."""
        assert leanft(["export", str(file), str(file.with_name("out"))]) == 2
        error = capsys.readouterr().err
        assert re.search(message, error.replace("\n", " ")), error
        assert "Traceback" not in error and not file.with_name("out").exists()
        assert not list(gguf_cache().glob("*unfinished*"))

    @pytest.mark.first(12)
    @pytest.mark.parametrize("case", WRONG)
    def test_wrong_content(self, case, good, tmp_path, capsys):
        changes, message = WRONG[case]
        copy = tmp_path / "copy.gguf"
        copy.write_bytes(good.read_bytes())
        self.refused(edited(copy, **changes), capsys, message)

    def test_every_cut_is_noticed(self, good, tmp_path, capsys):
        whole, file = good.read_bytes(), tmp_path / "cut.gguf"
        for length in (0, 3, 4, 8, 23, 24, 100, 5000, len(whole) // 2, len(whole) - 100):
            file.write_bytes(whole[:length])
            self.refused(file, capsys, "is not a GGUF file" if length < 4 else "is truncated")

    def test_garbage_and_huge_counts(self, good, tmp_path, capsys):
        whole, file = good.read_bytes(), tmp_path / "bad.gguf"
        head = b"GGUF" + struct.pack("<I", 3)

        def tensors_at(*starts: int) -> bytes:
            """Two tensors of four numbers each, and room for them."""
            infos = [
                struct.pack("<Q1sIQIQ", 1, name, 1, 4, 0, at) for name, at in zip((b"a", b"b"), starts, strict=True)
            ]
            return b"".join(infos) + bytes(64)

        cases = [
            (b"garbage" * 100, "is not a GGUF file"),
            (b"GGUF" + struct.pack(">I", 3) + whole[8:], "version 50331648 of the format; expected 2 or 3"),
            (head + struct.pack("<QQ", 2**60, 1), "a count of 1,152,921,504,606,846,976"),
            (head + struct.pack("<QQQ", 0, 1, 2**62) + b"a", "is truncated"),
            (head + struct.pack("<QQQ1sIIQ", 0, 1, 1, b"a", 9, 8, 2**40), "a count of 1,099,511,627,776"),
            (head + struct.pack("<QQQ1sI", 0, 1, 1, b"a", 77), "unknown type 77"),
            (head + struct.pack("<QQQ1sI", 1, 0, 1, b"a", 200) + bytes(64), "200 dimensions of a"),
            (head + struct.pack("<QQQ1sIQIQ", 1, 0, 1, b"a", 1, 2**40, 0, 0), "is truncated: a ends at byte"),
            (head + struct.pack("<QQQ1sIQIQ", 1, 0, 1, b"a", 1, 32, 99, 0), "stores a as 99; expected one of"),
            (head + struct.pack("<QQQ1sI", 0, 1, 1, b"\xff", 4), "a text that is not UTF-8"),
            (head + struct.pack("<QQ", 0, 2) + struct.pack("<Q1sIB", 1, b"a", 0, 1) * 2, "two values of a"),
            (head + struct.pack("<QQ", 2, 0) + tensors_at(0, 0), "the tensor b at byte 96, inside another tensor"),
            (head + struct.pack("<QQ", 2, 0) + tensors_at(0, 15), "the tensor b at byte 111, inside another tensor"),
        ]
        for content, message in cases:
            file.write_bytes(content)
            self.refused(file, capsys, message)
        rng = np.random.default_rng(0)
        for _ in range(40):  # one byte of the header is another: an error message, or another model
            place = int(rng.integers(4, 6000))
            file.write_bytes(whole[:place] + bytes([whole[place] ^ int(rng.integers(1, 256))]) + whole[place + 1 :])
            try:
                load_model(file)
                load_tokenizer(file)
            except ValueError:
                pass

    def test_a_missing_package_and_a_file_that_moved(self, good, tmp_path, monkeypatch):
        copy = tmp_path / "moved.gguf"
        copy.write_bytes(good.read_bytes())
        folder = resolve_model_path(copy)
        copy.unlink()
        with pytest.raises(ValueError, match="moved.gguf, which holds the weights of .*, is missing"):
            load_model(folder)
        copy.write_bytes(good.read_bytes()[:-64])
        monkeypatch.setitem(sys.modules, "gguf", None)
        with pytest.raises(ValueError, match=r"pip install -e .*\[gguf\]"):
            resolve_model_path(copy)

    def test_a_strangers_folder_cannot_name_a_file(self, good, qwen_folder, tmp_path):
        stranger = tmp_path / "stranger"
        stranger.mkdir()
        for part in resolve_model_path(good).iterdir():
            (stranger / part.name).write_bytes(part.read_bytes())
        with pytest.raises(ValueError, match="has no weights"):
            load_model(stranger)


def llama_cpp_ids(file: Path, texts: list[str]) -> list[list[int]]:
    """The ids of each text from the server of llama.cpp."""
    server = LlamaServer(file)
    found = []
    for text in texts:
        body = json.dumps({"content": text, "add_special": True, "parse_special": True}).encode()
        request = urllib.request.Request(f"{server.listening_address}/tokenize", body,
            {"Content-Type": "application/json"})  # fmt: skip
        with urllib.request.urlopen(request, timeout=30) as answer:
            found.append(json.load(answer)["tokens"])
    return found


@functools.cache
def many_texts(shared_data: Path) -> list[str]:
    """2,000 texts: rows of real data, characters of every category, and letters and marks of every script, with spaces,
    digits and control tokens."""
    scripts, categories = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    for character in map(chr, range(sys.maxunicode + 1)):
        category = unicodedata.category(character)
        if category[0] != "C":
            categories[category].append(character)
        if category[0] in "LM":  # the names of a script's letters and marks begin with its name
            scripts[unicodedata.name(character, "").partition(" ")[0]].append(character)
    assert len(scripts) > 150
    rng = np.random.default_rng(0)
    rows = (shared_data / "gsm8k_train.jsonl").read_text().splitlines()[:400]
    texts = [json.loads(row)["question"] for row in rows]
    common = [*map(chr, range(32, 127)), " ", "  ", "12", "1234", "'s", "'LL", "\t", "\n", "\n\n", "\r\n", "camelCase"]
    for _ in range(400):
        drawn = [categories[one] if rng.random() < 0.3 else common for one in rng.choice([*categories], 16)]
        texts.append("".join(str(rng.choice(characters)) for characters in drawn))
    for letters in islice(cycle(scripts.values()), 2000 - len(texts)):
        words = ["".join(rng.choice(letters, 5)) for _ in range(6)]
        texts.append(" ".join(words) + f" {int(rng.integers(10**6))}\n\n  <s>x")
    return texts


def is_approximated(rule: str, text: str) -> bool:
    """Whether llama.cpp splits a text otherwise than in training, by `APPROXIMATED`."""
    anywhere = "capital letters outside" not in APPROXIMATED.get(rule, "outside")
    marks = any(unicodedata.category(x) in ("Mn", "Mc", "Me", "Lu", "Lt") and (anywhere or x > "~") for x in text)
    return rule in APPROXIMATED and (marks or ("numbers" in APPROXIMATED[rule] and re.search(r"\d", text) is not None))


ROWS = {name: rule for name, rule in RULES.items() if PRE_TOKENIZERS[rule].split()[0] == name}
ROWS |= {f"{names} as published": rule for rule, names in PRE_TOKENIZERS.items() if rule not in ROWS.values()}
ALL = ("llama", "gemma", "gemma4", *ROWS)


@pytest.mark.parametrize(
    ("kind", "of_all_scripts"), [("qwen2", False), *(pytest.param(kind, True, marks=pytest.mark.long) for kind in ALL)]
)
def test_ids_equal_llama_cpps(kind, of_all_scripts, make_model_folder, file, shared_data, texts):
    if kind == "llama":
        pieces = shared_data / "tokenizers" / "llama2_sentencepiece.model"
        source = make_model_folder(tokenizer=pieces, tokenizer_config=SPM, vocab_size=32_000, hidden_size=32)
    elif kind.startswith("gemma"):
        made = word_start_tokenizer("never")
        made.normalizer, made.pre_tokenizer = Replace(" ", "▁"), Split(" ", "merged_with_previous")
        source = make_model_folder(tokenizer=made, tokenizer_config=SPM, vocab_size=1000, hidden_size=32)
    else:
        made = qwen_tokenizer(ROWS[kind])
        source = make_model_folder("Qwen2", tokenizer=made, tokenizer_config=CHAT_CONFIG, vocab_size=640)
    export_gguf(source, file, "f16")
    if kind == "gemma4":
        merges = [" ".join(pair) for pair in json.loads(made.to_str())["model"]["merges"]]
        of_text = {"model": "gemma4", "merges": merges, "scores": None}
        file = edited(file, {f"tokenizer.ggml.{key}": value for key, value in of_text.items()})
    texts = many_texts(shared_data) if of_all_scripts else texts
    found = llama_cpp_ids(file, texts)
    for path in {"llama": [file], "gemma": [source], "gemma4": [file]}.get(kind, [source, file]):
        tokenizer = load_tokenizer(path)
        wrong = [
            text
            for text, ids in zip(texts, found, strict=True)
            if ids != tokenizer.encode(text, True) and "�" not in text and not is_approximated(kind, text)
        ]
        assert not wrong, (len(wrong), wrong[0], tokenizer.encode(wrong[0], True))


def header_of(*arrays: list[int] | list[str]) -> bytes:
    """A GGUF file with no tensors, and these arrays of bytes or texts."""
    parts = [b"GGUF", struct.pack("<IQQ", 3, 0, len(arrays))]
    for i, entries in enumerate(arrays):
        is_text = isinstance(entries[0], str)
        parts.append(struct.pack("<Q2sIIQ", 2, b"%02d" % i, 9, 8 if is_text else 0, len(entries)))
        parts += [struct.pack("<Q", len(text)) + text.encode() for text in entries] if is_text else [bytes(entries)]
    return b"".join(parts)


def test_all_arrays_share_one_budget(file, monkeypatch):
    monkeypatch.setattr(header, "_MAX_ENTRIES", 1000)
    file.write_bytes(header_of([1] * 400, ["x"] * 400, [1] * 200))
    assert [len(entries) for entries in header.read_header(file)[0].values()] == [400, 400, 200]
    file.write_bytes(header_of([1] * 400, ["x"] * 400, [1] * 201))
    with pytest.raises(ValueError, match="a count of 201, above 200"):
        header.read_header(file)
    file.write_bytes(header_of(["x" * 200] * 40, [1] * 200))
    monkeypatch.setattr(header, "MAX_JSON_BYTES", 4000)
    with pytest.raises(ValueError, match="its header has more than 0 MiB"):
        header.read_header(file)


def test_the_time_for_merges_is_bounded(file):
    """Every token begins and ends with other tokens, so that there are 2 million merges of 2 billion characters."""
    tokens = [letter * i for letter in "ab" for i in range(1, 1024)]
    tokens += ["a" * i + "b" * (1024 - i) for i in range(1, 1024)]
    vocab, started = {token: i for i, token in enumerate(tokens)}, time.process_time()
    with pytest.raises(ValueError, match="model.gguf has a tokenizer of long tokens"):
        _sentencepiece_merges(file, vocab, [1] * len(tokens), [0.0] * len(tokens))
    long = {"a": 0, "b" * 10**6: 1}
    assert _sentencepiece_merges(file, long, [1, 1], [0.0, 0.0]) == []
    assert time.process_time() - started < 5


def test_messages_name_the_file_as_given(make_model_folder, file, monkeypatch):
    export_gguf(make_model_folder("Qwen2", tokenizer=qwen_tokenizer(), tokenizer_config=CHAT_CONFIG), file, "f32")
    wrong = {"epsilon": "qwen2.attention.layer_norm_rms_epsilon", "merges": "tokenizer.ggml.merges"}
    for name, key in wrong.items():
        edited(file, {key: -1.0 if name == "epsilon" else ["q q"]}).rename(file.with_name(f"{name}.gguf"))
        monkeypatch.chdir(file.parent)
        with pytest.raises(ValueError, match=rf"{name}.gguf") as raised:
            (load_model if name == "epsilon" else load_tokenizer)(f"{name}.gguf")
        assert str(gguf_cache()) not in str(raised.value) and str(file.parent) not in str(raised.value)


def test_the_cache_is_bounded_and_killed_conversions_are_deleted(make_model_folder, file, tmp_path, monkeypatch):
    monkeypatch.setenv("LEAN_FT_CACHE", str(tmp_path / "cache"))
    export_gguf(make_model_folder(tokenizer=qwen_tokenizer()), file, "f16")
    first = resolve_model_path(file)
    left = gguf_cache() / "model-0123.unfinished"
    left.mkdir()
    os.utime(left, (0, 0))
    os.utime(first / "about.json", (0, 0))
    monkeypatch.setattr(open, "_CACHE_BYTES", 1)
    (other := file.with_name("other.gguf")).write_bytes(file.read_bytes())
    second = resolve_model_path(other)
    assert [*gguf_cache().iterdir()] == [second]
    assert load_model(file).config == load_model(other).config  # converted again


def test_a_cache_that_cannot_be_written_is_named(make_model_folder, file, tmp_path, monkeypatch):
    export_gguf(make_model_folder(tokenizer=qwen_tokenizer()), file, "f16")
    (tmp_path / "occupied").write_text("")
    monkeypatch.setenv("LEAN_FT_CACHE", str(tmp_path / "occupied"))
    with pytest.raises(
        ValueError, match=r"cannot write the cache folder .*occupied/gguf .* Set the environment variable LEAN_FT_CACHE"
    ):
        load_model(file)
