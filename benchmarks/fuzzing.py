"""Feed corrupted input to every reader of files and requests that may come from other people.

    python benchmarks/fuzzing.py                        # 1,000,000 cases: about 20 minutes on one core
    python benchmarks/fuzzing.py --cases 20000 --only config.json

A case is a valid input with a few changes: a JSON or YAML value is replaced by a hostile one (a huge number, deep
nesting, half a surrogate pair, another type), removed or doubled, or bytes are flipped, cut, repeated or inserted.
Inputs are small, so failures need no shrinking and hypothesis is not used. A target and a seed determine each case, so
runs with the same arguments repeat it. Slow targets get fewer cases.

A case passes if the input is accepted, or rejected with a message (ValueError, exit code 2) of at most 2,000 printable
characters. It fails with any other exception, after 10 s of CPU time, or with 2 GiB more memory; `images by memory`
after 2 s or with 200 MiB more in one case. A worker that dies or hangs is a failure of its current case.

Writes `results/fuzzing_<hardware>.json`.
"""

import copy
import gzip
import importlib
import io
import json
import math
import mmap
import os
import random
import re
import resource
import shutil
import signal
import struct
import tempfile
import time
import traceback
from base64 import b64encode
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
import yaml
from growing_images import break_image, growing_images
from odd_values import answers, break_answer, break_names, names_in_json
from PIL import Image
from results import RESULTS, ROOT, print_result, require_hardware, write_result
from tiny_runs import CONFIG, recipe, write_inputs

from lean_ft.cli.errors import explain
from lean_ft.data import prepare_batches
from lean_ft.data.contexts import ContextReader
from lean_ft.data.formats import NUM_ROWS_TO_DETECT
from lean_ft.data.near_duplicates import near_duplicates
from lean_ft.data.sft import SFTReader
from lean_ft.data.sources import RowSources
from lean_ft.export import export_gguf
from lean_ft.export.model_card import _results, model_card
from lean_ft.generation.stopping import stop_ids
from lean_ft.gguf.open import gguf_folder
from lean_ft.gguf.splitting import QWEN2_PATTERN
from lean_ft.images.pixels import Upright
from lean_ft.images.reading import Size, check, decoded, open_image, read_patches, reference, size_of
from lean_ft.images.rules import image_rules
from lean_ft.merging import MergeSettings, merge_models
from lean_ft.models import empty_model, load_model, save_model
from lean_ft.models.config import DenseConfig
from lean_ft.models.safetensors_file import read_header, write_file
from lean_ft.online.engines import replies
from lean_ft.online.engines.client import ServerError, read_object
from lean_ft.online.recorded_results import RecordedResults
from lean_ft.optim.loss_scaler import LossScaler
from lean_ft.peft import apply_lora, load_adapter, save_adapter
from lean_ft.peft.lora import quantize_as_loaded
from lean_ft.peft.stored_adapter import labels_of, read_adapter
from lean_ft.settings import LoRAConfig, SFTDataConfig, TaughtDataConfig, recipe_name
from lean_ft.settings.converted_config import convert_config
from lean_ft.settings.text import load_config
from lean_ft.system import catalog
from lean_ft.system.random_state import capture_random_state, restore_random_state
from lean_ft.system.redaction import MAX_MESSAGE_CHARACTERS, printable
from lean_ft.system.run_directory import (
    OPTIMIZER_FILE,
    RANDOM_STATE_FILE,
    TOOL_RESULTS_FILE,
    TRAINING_STATE_FILE,
    check_whole,
    from_checkpoint,
    read_random_state,
    read_starts,
    read_training_state,
    write_manifest,
)
from lean_ft.tokenizers import load_tokenizer
from lean_ft.tools.calls import FORMS, read_turn
from lean_ft.training import loggers, starting
from lean_ft.training.curves import read_curves
from lean_ft.training.metrics import trim_metrics
from lean_ft.training.records import settings_of

EMBEDDED_IMAGES = ROOT / "lean_ft" / "assets" / "tiny-images" / "model"
CASE_CPU_SECONDS = 10.0
CASE_MEMORY_BYTES = 2**31
WORKER_SILENCE_SECONDS = 120.0  # wall time: the machine may be busy
CASES_A_WORKER = 2000
COLUMNS = ["input", "cases", "accepted", "rejected with a message", "failed", "slowest", "peak memory", "cases/s"]
MESSAGES = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4"},
]
TEMPLATE = (
    "{% macro f(x) %}{{ x | tojson }}{% endmacro %}{{ f([1, 2]) }}{% for i in range(3) %}{{ i }}{% endfor %}{{ "
    "bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}<<{{ message.content | trim }}>>{% "
    "elif loop.first %}first {% endif %}{% set name = message.role ~ ':' %}{{ name.upper() }}{{ message['content'] }}"
    "{{ '\\n' * 2 }}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
TORCHTUNE = b"""
output_dir: runs/here
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, path: /tmp/x/tokenizer.model, max_seq_len: 512}
dataset: {_component_: torchtune.datasets.text_completion_dataset, source: json, data_files: a.json, packed: true, column_map: {a: b}}
model: {_component_: torchtune.models.llama3_2.lora_llama3_2_1b, lora_attn_modules: [q_proj], lora_rank: 8, lora_alpha: 16}
checkpointer: {_component_: c, checkpoint_dir: /tmp/Llama-3.2-1B-Instruct/, output_dir: "${output_dir}", checkpoint_files: [a]}
optimizer: {_component_: torch.optim.AdamW, lr: 0.00002, fused: true}
lr_scheduler: {_component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup, num_warmup_steps: 9}
loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}
kd_loss: {_component_: torchtune.modules.loss.ForwardKLLoss}
kd_ratio: 0.5
teacher_checkpointer: {_component_: c, checkpoint_dir: /tmp/Llama-3.1-8B-Instruct/, checkpoint_files: [a]}
batch_size: 4
epochs: 2
max_steps_per_epoch: 50
gradient_accumulation_steps: 1
ac_mode: selective
ac_option: 2
dtype: bf16
seed: 3
my_key: {a: [1], "b c": text}
metric_logger: {_component_: torchtune.training.metric_logging.DiskLogger, log_dir: "${output_dir}/logs"}
profiler: {_component_: p, enabled: true, wait_steps: 5, warmup_steps: 3, active_steps: 2}
"""  # noqa: E501
AXOLOTL = b"""
base_model: org/name
adapter: qlora
lora_r: 16
lora_target_modules: [q_proj, v_proj]
datasets:
- {path: a.jsonl, type: chat_template, field_messages: talk, message_property_mappings: {role: from, content: value}, split: train}
- {path: org/rows, type: {field_instruction: q, field_output: a}, data_files: [a.json, b.json]}
test_datasets: [{path: b.jsonl, type: alpaca}]
val_set_size: 0.05
sequence_len: 2048
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 3
evals_per_epoch: 4
optimizer: paged_adamw_32bit
lr_scheduler: cosine
learning_rate: 2e-4
adam_beta2: 0.95
warmup_ratio: 0.1
gradient_checkpointing: true
bf16: auto
rl: dpo
trl: {beta: 0.1, reward_funcs: [mine.reward]}
special_tokens: {pad_token: x}
wandb_project: mine
output_dir: ./out
"""  # noqa: E501
LLAMA_FACTORY = b"""
model_name_or_path: org/name
stage: sft
finetuning_type: lora
lora_rank: 8
lora_target: q_proj,v_proj
dataset: chats,pairs
dataset_dir: FOLDER
template: qwen
cutoff_len: 2048
max_samples: 1000
neat_packing: true
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
max_steps: -1
warmup_steps: 0.1
optim: adamw_torch
adam_beta1: 0.9
ddp_timeout: 180000000
report_to: [wandb]
quantization_bit: 4
val_size: 0.1
output_dir: out
"""
DATASET_INFO = b"""{"chats": {"file_name": "a.json", "formatting": "sharegpt", "columns": {"messages": "talk", "system": "s"},
"tags": {"role_tag": "role", "content_tag": "content"}}, "pairs": {"hf_hub_url": "org/pairs", "ranking": true, "subset": "main",
"split": "train", "num_samples": 5, "columns": {"prompt": "q", "chosen": "good", "rejected": "bad", "kto_tag": "ok"}}}"""  # noqa: E501
HOSTILE = [
    *(None, True, False, 0, -1, 1, 2, 3, 7, 2**31, 2**63, 10**40, -(2**63), 1e308, -1e308, 1e-320, 0.5, float("nan")),
    *(
        float("inf"),
        "",
        "x",
        "a\nlora.rank: 9\x85seed: 1\u2028x: 2",
        "${seed}${output_dir}",
        "\ud800",
        "\x00",
        "../../etc/passwd",
        "/etc/passwd",
        "é" * 9,
        "A" * 100_000,
        "1",
        "true",
    ),
    *([], {}, [[]], [None], {"": {}}, {"a": [1]}, [0] * 5000, ["x"], {"role": "user", "content": None}),
]
SNIPPETS = [
    *(b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"&a *a", b"!!python/object/apply:os.system [id]", b"{{", b"}}", b"{%"),
    *(b"[" * 2000, b'{"a":' * 2000, b"{% for i in range(10**9) %}", b"{{ 'a' * 10**10 }}", b"{{ ''.__class__ }}"),
    *(
        b"1e999",
        b"-",
        b": ",
        b"\n",
        b"\t",
        b"<<: *a",
        b'"',
        b"'",
        b"\\",
        b"\\ud800",
        b"NaN",
        b"9" * 5000,
        b"#",
        b"---\n",
    ),
]


# Making cases ---------------------------------------------------------------------------------------------------------


def break_bytes(content: bytes, chance: random.Random) -> bytes:
    """Flip, cut, repeat or insert a few bytes."""
    for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
        place = chance.randrange(len(content) + 1)
        end = min(len(content), place + chance.choice((1, 2, 5, 40)))
        act = chance.randrange(5)
        if act == 0 and place < len(content):
            turned = content[place] ^ 1 << chance.randrange(8)
            content = content[:place] + bytes([turned]) + content[place + 1 :]
        elif act == 1:
            content = content[:place] + content[end:]
        elif act == 2:
            content = content[:place] + content[place:end] * chance.choice((2, 3, 50)) + content[end:]
        elif act == 3:
            content = content[:place] + chance.choice(SNIPPETS) + content[place:]
        elif chance.random() < 0.3:
            content = content[:place]
    return content


def break_value(value: Any, chance: random.Random) -> Any:
    """A copy of a JSON value with something inside replaced, removed, doubled or nested."""
    if isinstance(value, dict | list) and value and chance.random() < 0.85:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = chance.choice(keys)
        act = chance.random()
        if act < 0.12:
            return (
                {k: value[k] for k in keys if k != key} if isinstance(value, dict) else value[:key] + value[key + 1 :]
            )
        if act < 0.16:
            if isinstance(value, dict):
                return {**value, str(chance.choice(keys)) + "x": value[key]}
            return [*value, value[key]]
        changed = dict(value) if isinstance(value, dict) else list(value)
        changed[key] = break_value(value[key], chance)
        return changed
    if chance.random() < 0.03:
        deep: Any = value
        for _ in range(chance.choice((20, 900, 5000))):
            deep = [deep]
        return deep
    if isinstance(value, int | float) and not isinstance(value, bool) and chance.random() < 0.4:
        return value * chance.choice((-1, 2, 3, 10**6, 10**15, 0.5)) + chance.choice((0, 0, 1, -1))
    return chance.choice(HOSTILE)


def as_json(value: Any) -> bytes:
    try:
        return json.dumps(value).encode("utf-8", "surrogatepass")
    except RecursionError:
        return b"[" * 5000 + b"]" * 5000


def break_json(content: bytes, chance: random.Random) -> bytes:
    """Break the JSON values, or sometimes the bytes."""
    if chance.random() < 0.3:
        return break_bytes(content, chance)
    value = json.loads(content)
    for _ in range(chance.choice((1, 1, 2, 3))):
        value = break_value(value, chance)
    return as_json(value)


def break_copy(content: bytes, chance: random.Random) -> bytes:
    """A line of JSON, and a broken copy of it."""
    return content + b"\n" + break_json(content, chance) + b"\n"


def break_yaml(content: bytes, chance: random.Random) -> bytes:
    if chance.random() < 0.5:
        return break_bytes(content, chance)
    value = break_value(yaml.safe_load(content), chance)
    try:
        return yaml.safe_dump(value, allow_unicode=chance.random() < 0.5).encode("utf-8", "surrogatepass")
    except (RecursionError, yaml.YAMLError):
        return b"[" * 5000


_ALIKE = (("U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "BOOL"), ("BF16", "F16", "I16"), ("F32", "I32"), ("F64", "I64"))


def read_otherwise(entry: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """A tensor's entry whose bytes are the same, in another shape or dtype of the same size."""
    shape = list(entry["shape"])
    if chance.random() < 0.4 or not shape:
        alike = next((names for names in _ALIKE if entry["dtype"] in names), (entry["dtype"],))
        return {**entry, "dtype": chance.choice(alike)}
    shapes = [shape[::-1], [math.prod(shape)], [1, *shape], [*shape, 1], [shape[0] * 2, *shape[1:]], shape[1:] or [1]]
    if shape[-1] % 2 == 0:
        shapes += [[2 * shape[0], *shape[1:-1], shape[-1] // 2], [*shape[:-1], 2, shape[-1] // 2]]
    return {**entry, "shape": chance.choice(shapes)}


def break_safetensors(content: bytes, chance: random.Random) -> bytes:
    """Break the header's values, its bytes, its length, or the whole file, or read a tensor's bytes otherwise."""
    length = int.from_bytes(content[:8], "little")
    header, data = content[8 : 8 + length], content[8 + length :]
    act = chance.random()
    if act < 0.25:
        entries = json.loads(header)
        for _ in range(chance.choice((1, 1, 2))):
            name = chance.choice([name for name in entries if name != "__metadata__"])
            entries[name] = read_otherwise(entries[name], chance)
        header = as_json(entries)
        length = len(header)
    elif act < 0.6:
        header = break_json(header, chance)
        length = len(header)
    elif act < 0.7:
        length = chance.choice((0, 1, length - 1, length + 1, 2**20, 2**40, 2**63, 2**64 - 1))
    else:
        return break_bytes(content, chance)
    return struct.pack("<Q", length) + header + data


# A GGUF file as lists of [key, type, value] and [name, shape, kind, offset]. In an array the value is [type, count,
# entries].
_GGUF_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_GGUF_TEXT, _GGUF_ARRAY = 8, 9
_GGUF_COUNTS = (0, 1, 2, 3, 2**16, 2**21, 2**22, 2**31, 2**32 - 1, 2**60, 2**63, 2**64 - 1)


@lru_cache(maxsize=8)
def _parse_gguf(content: bytes) -> tuple[list[Any], list[Any], bytes]:
    place = 8

    def take(code: str) -> Any:
        nonlocal place
        (value,) = struct.unpack_from(f"<{code}", content, place)
        place += struct.calcsize(f"<{code}")
        return value

    def value(kind: int) -> Any:
        if kind == _GGUF_ARRAY:
            inner, count = take("I"), take("Q")
            return [inner, count, [value(inner) for _ in range(count)]]
        return take(f"{take('Q')}s") if kind == _GGUF_TEXT else take(_GGUF_SCALARS[kind])

    num_tensors, num_values = take("Q"), take("Q")
    metadata = [[value(_GGUF_TEXT), kind := take("I"), value(kind)] for _ in range(num_values)]
    tensors = []
    for _ in range(num_tensors):
        name, num_dims = value(_GGUF_TEXT), take("I")
        tensors.append([name, [take("Q") for _ in range(num_dims)], take("I"), take("Q")])
    return metadata, tensors, content[-(-place // 32) * 32 :]


def _as_gguf(metadata: list[Any], tensors: list[Any], data: bytes, counts: tuple[int, int] | None = None) -> bytes:
    def value(kind: int, one: Any) -> bytes:
        if kind == _GGUF_TEXT:
            text = one if isinstance(one, bytes) else str(one).encode("utf-8", "surrogatepass")
            return struct.pack("<Q", len(text)) + text
        if kind == _GGUF_ARRAY:
            return struct.pack("<IQ", one[0], one[1]) + b"".join(value(one[0], entry) for entry in one[2])
        code = _GGUF_SCALARS.get(kind, "Q")
        try:
            return struct.pack(f"<{code}", one)
        except (struct.error, OverflowError, TypeError):
            return bytes(struct.calcsize(f"<{code}"))

    parts = [b"GGUF", struct.pack("<IQQ", 3, *(counts or (len(tensors), len(metadata))))]
    parts += [value(_GGUF_TEXT, key) + struct.pack("<I", kind) + value(kind, one) for key, kind, one in metadata]
    for name, shape, kind, offset in tensors:
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *(size % 2**64 for size in shape))
        parts.append(value(_GGUF_TEXT, name) + dims + struct.pack("<IQ", kind % 2**32, offset % 2**64))
    head = b"".join(parts)
    return head + bytes(-len(head) % 32) + data


def break_gguf(content: bytes, chance: random.Random) -> bytes:
    """Break metadata (types, values, counts), tensors (shapes, kinds, overlaps), the end of the file, or bytes."""
    if chance.random() < 0.15:
        return break_bytes(content, chance)
    metadata, tensors, data = _parse_gguf(content)
    metadata, tensors, counts = [*metadata], [*tensors], None
    for _ in range(chance.choice((1, 1, 2, 3))):
        act = chance.random() if metadata else 1.0
        i = chance.randrange(max(1, len(metadata)))
        key, kind, value = metadata[i] if metadata else (b"x", 4, 1)
        if act < 0.5:
            if kind == _GGUF_ARRAY and chance.random() < 0.6:
                inner, _, entries = value
                entries, j = [*entries], chance.randrange(max(1, len(entries)))
                entries[j : j + 1] = [chance.choice((*HOSTILE, *entries[:3]))] * chance.choice((0, 1, 1, 2, 400))
                inner = chance.choice((inner, inner, inner, 4, 6, 8, 9, 99))
                if inner not in (4, 6):
                    entries = [b"x" if inner == _GGUF_TEXT and isinstance(one, list | dict) else one for one in entries]
                inner = _GGUF_TEXT if inner == _GGUF_ARRAY else inner
                metadata[i] = [key, kind, [inner, chance.choice((len(entries),) * 8 + _GGUF_COUNTS), entries]]
            else:
                hostile = chance.choice((*HOSTILE, *_GGUF_COUNTS))
                kinds = {bool: 7, int: chance.choice((4, 5, 10, 11)), float: chance.choice((6, 12)), str: _GGUF_TEXT}
                kinds |= {list: _GGUF_ARRAY, dict: 77, type(None): kind}
                if isinstance(hostile, list):
                    hostile = [4, len(hostile), [0] * len(hostile)]
                metadata[i] = [key, kinds[type(hostile)] if not isinstance(hostile, list) else _GGUF_ARRAY, hostile]
                if hostile is None:
                    del metadata[i]
        elif act < 0.6:
            metadata.append(
                [chance.choice(metadata)[0], kind, value] if chance.random() < 0.5 else [key + b"x", kind, value]
            )
        elif act < 0.9 and tensors:
            j = chance.randrange(len(tensors))
            name, shape, stored, offset = tensors[j]
            other = chance.choice(tensors)
            tensors[j] = chance.choice((
                [name, shape, stored, other[3]],
                [name, shape, stored, max(0, offset - chance.choice((1, 4, 32)))],
                [name, shape, chance.choice((0, 1, 2, 8, 12, 20, 30, 39, 99)), offset],
                [name, [*shape, chance.choice(_GGUF_COUNTS)], stored, offset],
                [name, [size * chance.choice((1, 2, 2**20, 0)) for size in shape], stored, chance.choice(_GGUF_COUNTS)],
                [other[0], shape, stored, offset],
                [name, shape[::-1], stored, offset],
            ))  # fmt: skip
        elif act < 0.95 and tensors:
            tensors.remove(chance.choice(tensors))
        elif act < 0.97:
            counts = (chance.choice((len(tensors), *_GGUF_COUNTS)), chance.choice((len(metadata), *_GGUF_COUNTS)))
        else:
            data = data[: chance.randrange(len(data) + 1)]
    return _as_gguf(metadata, tensors, data, counts)


def break_parquet(content: bytes, chance: random.Random) -> bytes:
    """Write other rows, with repeated long texts, nulls, other types and other encodings, or break bytes."""
    if chance.random() < 0.5:
        return break_bytes(content, chance)
    pyarrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    num_rows, times = chance.choice((1, 3, 50, 1000)), chance.choice((1, 3, 50, 1000))
    group_rows = 1000
    text = chance.choice("aé") * chance.choice((1, 100, 10_000, 300_000))
    if len(text) * num_rows * times > 2**22:  # references to one text need no memory here
        column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * num_rows, "int32"), [text])
    else:
        value = chance.choice(
            (
                text,
                text.encode(),
                None,
                [text] * times,
                [1] * times,
                {"role": text},
                0.5,
                True,
                [{"content": text}] * times,
            )
        )
        column, group_rows = pyarrow.array([value] * num_rows), chance.choice((7, 1000))
    rows = {chance.choice(("prompt", "messages", "text", "x")): column, "completion": ["b"] * num_rows}
    stream = io.BytesIO()
    settings = {
        "use_dictionary": hasattr(column, "dictionary") or chance.random() < 0.7,
        "compression": chance.choice(("zstd", "snappy", "gzip", "none")),
    }
    settings["row_group_size"] = group_rows
    try:
        parquet.write_table(pyarrow.table(rows), stream, **settings)
    except (pyarrow.ArrowException, UnicodeError):
        return content
    written = stream.getvalue() if stream.tell() < 2**20 else content
    return break_bytes(written, chance) if chance.random() < 0.2 else written


# Feeding them ---------------------------------------------------------------------------------------------------------


class Target:
    """A file to corrupt, the function that reads it, and its share of all cases."""

    def __init__(
        self,
        share: int,
        file: Path,
        seeds: list[bytes],
        breaks: Callable[[bytes, random.Random], bytes],
        read: Callable[[], object],
        most: tuple[float, int] | None = None,  # seconds of CPU time and bytes of memory for each case
    ):
        self.share, self.file, self.seeds, self.breaks, self.read, self.most = share, file, seeds, breaks, read, most

    def case(self, name: str, seed: int, number: int) -> bytes:
        chance = random.Random(f"{name} {seed} {number}")
        return self.breaks(chance.choice(self.seeds), chance)


def targets(folder: Path) -> dict[str, Target]:
    """All targets, with valid files under `folder`."""
    found: dict[str, Target] = {}
    os.environ["LEAN_FT_CACHE"] = str(folder / "cache")
    for kind in _KINDS:
        (folder / kind.__name__).mkdir()
        found |= kind(folder / kind.__name__)
    for target in found.values():
        target.file.write_bytes(target.seeds[0])
        target.read()  # a rejected seed would find nothing
    return found


def _settings(folder: Path) -> dict[str, Target]:
    presets = [p.read_bytes() for p in sorted((ROOT / "configs").rglob("*.yaml"))]
    preset, overrides = folder / "settings.yaml", folder / "overrides"
    lines = b"batch_size=4\nmodel.path=x\noutput_dir=runs/a\noptimizer.betas=[0.9, 0.99]\ndata.source=[a, b]\n"
    lines += (
        b"optimizer.lr=1e-5\ndata.columns.prompt=question\nsave_async=true\nclip_grad_norm=null\ndata.source=a.jsonl"
    )

    def read_overrides() -> None:
        text = overrides.read_bytes().decode("utf-8", "surrogateescape")  # like sys.argv
        load_config(recipe.Config, None, text.split("\n"))

    def read_preset() -> None:
        load_config(recipe.Config, preset, ["output_dir=x"])

    theirs, factory, info = folder / "theirs.yaml", folder / "factory.yaml", folder / "dataset_info.json"
    catalog.load_recipe = cache(catalog.load_recipe)  # a command loads one recipe once

    def convert(theirs: Path = theirs) -> None:
        text = (preset := convert_config(theirs)).text(theirs.name)
        written = folder / "converted.yaml"
        written.write_text(text)
        comments = [line for line in text.splitlines() if line.startswith("#")]
        assert comments[1:] == [f"# {remark}" for remark in preset.remarks]  # no remark has a second line
        assert not yaml.safe_load(text).keys() - {setting.partition(".")[0] for setting in ("recipe", *preset.settings)}
        load_config(catalog.load_recipe(catalog.recipes()[preset.recipe]).Config, written)

    in_factory = LLAMA_FACTORY.replace(b"FOLDER", str(folder).encode())
    factory.write_bytes(in_factory)
    info.write_bytes(DATASET_INFO)
    (folder / "broken").mkdir()
    broken = folder / "broken" / "dataset_info.json"
    (folder / "broken.yaml").write_bytes(LLAMA_FACTORY.replace(b"FOLDER", str(folder / "broken").encode()))
    return {
        "torchtune configuration": Target(6, theirs, [TORCHTUNE], break_yaml, convert),
        "axolotl configuration": Target(6, theirs, [AXOLOTL], break_yaml, convert),
        "LLaMA-Factory configuration": Target(6, factory, [in_factory], break_yaml, lambda: convert(factory)),
        "LLaMA-Factory dataset_info.json": Target(
            6, broken, [DATASET_INFO], break_json, lambda: convert(folder / "broken.yaml")
        ),
        "settings YAML": Target(3, preset, presets, break_yaml, read_preset),
        "settings on the command line": Target(2, overrides, [lines], break_bytes, read_overrides),
    }


def _rows(folder: Path) -> dict[str, Target]:
    tokenizer = load_tokenizer(write_inputs(folder / "plain"))
    (write_inputs(folder / "templated") / "chat_template.jinja").write_text(TEMPLATE)
    templated = load_tokenizer(folder / "templated")
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    called = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}]
    chats: list[Any] = [
        {"messages": MESSAGES},
        {"prompt": "What?", "completion": "That."},
        {"prompt": MESSAGES[:2], "completion": MESSAGES[2:]},
        {"instruction": "Add.", "input": "2, 2", "output": "4"},
        {"text": "Once upon a time."},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]},
        {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]},
        {"messages": called, "tools": [{"type": "function", "function": {"name": "f"}}]},
    ]
    lines = [as_json(row) + b"\n" for row in chats]

    def reader(name: str, *tokenizers: Any) -> tuple[Path, Callable[[], None]]:
        def read_data() -> None:
            config = SFTDataConfig(source=str(folder / name))
            sources = RowSources.of(config)
            first = sources.first_rows(NUM_ROWS_TO_DETECT)
            readers = [SFTReader.of(sources, first, one) for one in tokenizers]
            for row in sources.rows():  # as a run does, which never has all rows in memory
                for reader in readers:
                    reader.passages(row)

        return folder / name, read_data

    jsonl, read_jsonl = reader("rows.jsonl", templated)
    found = {"rows of JSONL": Target(20, jsonl, lines, break_json, read_jsonl)}
    repeated, taught = folder / "repeated.jsonl", folder / "taught.jsonl"

    def read_repeats() -> None:
        config = SFTDataConfig(source=str(repeated))
        sources = RowSources.of(config)
        near_duplicates(config, SFTReader.of(sources, sources.first_rows(NUM_ROWS_TO_DETECT), templated))

    def read_contexts() -> None:
        config = TaughtDataConfig(source=str(taught), columns={"context": "hint"})
        sources = RowSources.of(config)
        contexts = ContextReader.of(sources, sources.first_rows(NUM_ROWS_TO_DETECT), templated)
        for row in sources.rows():
            contexts.passages(row)

    hints: list[Any] = ["Be brief.", MESSAGES[1:]]
    with_hints = [as_json({**row, "hint": hint}) for row in (chats[0], chats[2]) for hint in hints]
    found["repeats of rows"] = Target(
        10, repeated, [*map(as_json, chats)], break_copy, read_repeats, (2.0, 200 * 2**20)
    )
    found["rows with a context"] = Target(10, taught, with_hints, break_json, read_contexts)
    table = b'prompt,completion\nWhat?,That.\n"a ""b""","c\nd"\n'
    file, read = reader("rows.csv", tokenizer)
    found["rows of CSV"] = Target(5, file, [table, table.replace(b",", b";")], break_bytes, read)
    packed = [gzip.compress(lines[0] * 20)]
    try:
        packed.append(importlib.import_module("zstandard").compress(lines[0] * 20))
        file, read = reader("rows.parquet", tokenizer)
        pyarrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "a", "completion": "b"}] * 3), file)
        found["rows of Parquet"] = Target(10, file, [file.read_bytes()], break_parquet, read)
    except ImportError:
        pass
    file, read = reader("packed.jsonl", templated)
    return {**found, "rows of gzip and zstd": Target(5, file, packed, break_bytes, read)}


def _images(folder: Path) -> dict[str, Target]:
    exif, pictures = Image.Exif(), []
    exif[0x0112] = 6
    colors = random.Random(0).randbytes(24 * 16 * 4)
    for kind, mode in (
        ("JPEG", "RGB"),
        ("PNG", "RGBA"),
        ("WEBP", "RGBA"),
        ("TIFF", "CMYK"),
        ("GIF", "P"),
        ("BMP", "1"),
    ):
        stored = io.BytesIO()
        Image.frombytes("RGBA", (24, 16), colors).convert("RGB").convert(mode).save(stored, kind, exif=exif)
        pictures.append(stored.getvalue())
    file, small = folder / "image", Image.frombytes("RGBA", (24, 16), colors).convert("RGB")

    def read_image() -> None:
        with open_image(reference(file.name, folder)) as image:
            check(image)
        with open_image(reference(file.name, folder)) as image:
            size = size_of(image)
            assert decoded(image).size == size

    families: dict[str, Any] = {
        "qwen3_vl": {"patch_size": 16, "merge_size": 2, "size": {"shortest_edge": 4096, "longest_edge": 2**18}},
        "gemma3": {"size": {"height": 256, "width": 256}, "do_pan_and_scan": None, "image_mean": [0.5] * 3},
        "mistral3": {"size": {"longest_edge": 512}, "patch_size": {"height": 16, "width": 16}, "resample": 3},
        "gemma4": {"max_soft_tokens": 70, "pooling_kernel_size": 3, "do_normalize": False, "image_std": [1.0] * 3},
        "smolvlm": {"max_image_size": {"longest_edge": 128}, "size": {"longest_edge": 512}, "do_image_splitting": True},
        "lfm2_vl": {"tile_size": 128, "min_tiles": 2, "max_tiles": 4, "max_image_tokens": 16, "use_thumbnail": True},
    }
    vision = {"patch_size": 16, "spatial_merge_size": 2, "pooling_kernel_size": 3, "image_size": 256}
    configs = [{"model_type": name, "vision_config": vision, "mm_tokens_per_image": 16} for name in families]
    settings, config = folder / "preprocessor_config.json", folder / "all" / "config.json"
    for one in configs:
        (folder / one["model_type"]).mkdir()
        (folder / one["model_type"] / "config.json").write_bytes(as_json(one))
        (folder / one["model_type"] / settings.name).symlink_to(settings)
    settings.write_bytes(as_json(families["qwen3_vl"]))
    qwen, grown = image_rules(folder / "qwen3_vl"), folder / "grown"
    config.parent.mkdir()
    (config.parent / settings.name).write_bytes(b"{}")

    def prepare(model: Path) -> None:
        rules = image_rules(model, 2000)
        for size in (Size(1, 1), Size(3000, 20), Size(4000, 3000)):
            layout = rules.layout(size)
            assert sum(layout.runs) <= 2000
        assert len(rules.patches(Upright(small))) == sum(
            rows * columns for rows, columns in rules.layout(Size(*small.size)).grids
        )

    whole = Path(shutil.copytree(EMBEDDED_IMAGES, folder / "whole")) / "config.json"

    def read_settings() -> None:
        errors = []
        for name in families:
            try:
                prepare(folder / name)
            except ValueError as error:
                errors.append(error)
        if len(errors) == len(families):
            raise errors[0]

    def read_grown() -> None:
        found = reference(grown.name, folder)
        with open_image(found, qwen) as image:
            check(image)
        with open_image(found, qwen) as image:
            shape = sum(rows * columns for rows, columns in qwen.layout(size_of(image)).grids), 3, 16, 16
            read_patches(image, qwen, np.empty(shape, np.uint8))

    def break_grown(content: bytes, chance: random.Random) -> bytes:
        return break_image(content, chance, break_bytes)

    return {
        "images": Target(10, file, pictures, break_bytes, read_image),
        "images by memory": Target(2, grown, growing_images(), break_grown, read_grown, most=(2.0, 200 * 2**20)),
        "preprocessor_config.json": Target(6, settings, [as_json(one) for one in families.values()], break_json,
            read_settings),
        "config.json of images": Target(4, config, [as_json(one) for one in configs], break_json,
            lambda: prepare(config.parent)),
        "config.json with a vision tower": Target(4, whole, [whole.read_bytes()], break_json,
                                                  lambda: empty_model(whole.parent, images="frozen")),
    }  # fmt: skip


def _models(folder: Path) -> dict[str, Target]:
    inputs = write_inputs(folder / "model")
    model = load_model(inputs, random_init=True)
    write_file(inputs / "model.safetensors", {n: p.detach() for n, p in model.named_parameters()}, {"format": "pt"})
    weights = (inputs / "model.safetensors").read_bytes()
    families = [CONFIG]
    for name in ("llama", "mistral", "gemma2", "gemma3_text", "phi3", "qwen3", "qwen3_moe", "mixtral"):
        more: dict[str, Any] = {"model_type": name, "architectures": [name], "head_dim": 8, "sliding_window": 8}
        more |= {"num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
        more |= {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "query_pre_attn_scalar": 8, "pad_token_id": 0}
        families.append({**CONFIG, **more})
    broken = folder / "broken.safetensors"
    cut = write_inputs(folder / "cut")
    (cut / "part.safetensors").write_bytes(weights)
    index = as_json({"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(read_header(cut / "part.safetensors"),
        "part.safetensors")})  # fmt: skip
    (inputs / "generation_config.json").write_bytes(generation := b'{"eos_token_id": [256, 3], "temperature": 0.7}')

    def answer() -> None:
        stop_ids(load_model(inputs), tokenizer)

    tokenizer = load_tokenizer(inputs)
    return {
        "config.json": Target(12, inputs / "config.json", [as_json(c) for c in families], break_json,
            lambda: load_model(inputs)),
        "safetensors header": Target(12, broken, [weights], break_safetensors, lambda: _read_tensors(broken)),
        "model.safetensors.index.json": Target(4, cut / "model.safetensors.index.json", [index], break_json,
            lambda: load_model(cut)),
        "generation_config.json": Target(2, inputs / "generation_config.json", [generation], break_json, answer),
    }  # fmt: skip


def _gguf(folder: Path) -> dict[str, Target]:
    inputs = write_inputs(folder / "model")
    config = json.loads((inputs / "config.json").read_bytes())
    (inputs / "tokenizer_config.json").write_bytes(as_json({"eos_token": "<end>", "chat_template": TEMPLATE}))
    qwen = [{"type": "Split", "pattern": {"Regex": QWEN2_PATTERN}, "behavior": "Isolated", "invert": False}]
    qwen += [{"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}]
    spec = json.loads((inputs / "tokenizer.json").read_bytes())
    spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": qwen}
    (inputs / "tokenizer.json").write_bytes(as_json(spec))
    model = load_model(inputs, random_init=True)
    write_file(inputs / "model.safetensors", {n: p.detach() for n, p in model.named_parameters()}, {"format": "pt"})
    seeds = []
    for kind in ("f32", "bf16"):
        export_gguf(inputs, folder / f"{kind}.gguf", kind)
        seeds.append((folder / f"{kind}.gguf").read_bytes())
    metadata, tensors, data = _parse_gguf(seeds[0])
    pieces = [b"<unk>", *(b"<0x%02X>" % i for i in range(256)), b"a", b"b", b"ab", b"aba", b"abab", b"ababab"]
    pieces = (pieces + [b"<pad%d>" % i for i in range(config["vocab_size"])])[: config["vocab_size"]]
    ggml = b"tokenizer.ggml."
    others = {
        b"model": [8, b"llama"],
        b"tokens": [9, [8, len(pieces), pieces]],
        b"token_type": [9, [5, len(pieces), [2] + [6] * 256 + [1] * (len(pieces) - 257)]],
        b"scores": [9, [6, len(pieces), [-float(i) for i in range(len(pieces))]]],
    }
    kept = [
        entry
        for entry in metadata
        if entry[0] not in (ggml + b"pre", ggml + b"merges", *(ggml + key for key in others))
    ]
    seeds.append(_as_gguf(kept + [[ggml + key, *value] for key, value in others.items()], tensors, data))
    file = folder / "broken.gguf"

    def read() -> None:
        made = gguf_folder(file)
        try:
            load_model(made)
            load_tokenizer(made).encode("2 times 2")
        finally:
            shutil.rmtree(made)

    return {"GGUF": Target(12, file, seeds, break_gguf, read)}


def _quantized(folder: Path) -> dict[str, Target]:
    """Folders of quantized weights, read as dense numbers and as they are stored."""
    mixture = {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": 2,
        "hidden_size": 32,
    }
    mixture |= {
        "num_experts_per_tok": 1,
        "intermediate_size": 32,
        "head_dim": 16,
        "sliding_window": 8,
        "num_hidden_layers": 1,
    }
    fp8 = {"quant_method": "fp8", "weight_block_size": [8, 12], "activation_scheme": "dynamic"}
    found = {}
    for method, fields, quantization in (("MXFP4", mixture, {"quant_method": "mxfp4"}), ("fp8", {}, fp8)):
        inputs = write_inputs(folder / method)
        (inputs / "config.json").write_bytes(as_json({**CONFIG, **fields}))
        save_model(load_model(inputs, random_init=True), inputs)
        stored = {name: tensor.read() for name, tensor in read_header(inputs / "model.safetensors").items()}
        for name in [
            name for name, tensor in stored.items() if tensor.dim() > 1 and "proj" in name and "bias" not in name
        ]:
            if method == "fp8":
                rows, columns = stored[name].shape
                stored |= {name: stored[name].to(torch.float8_e4m3fn)}
                stored[f"{name}_scale_inv"] = torch.rand(-(-rows // 8), -(-columns // 12))
            elif "experts" in name:
                experts, columns, rows = stored.pop(name).shape
                stored[f"{name}_blocks"] = torch.randint(256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
                stored[f"{name}_scales"] = torch.randint(110, 130, (experts, rows, columns // 32), dtype=torch.uint8)
        write_file(inputs / "model.safetensors", stored, {"format": "pt"})
        config = as_json({**CONFIG, **fields, "quantization_config": quantization})
        (inputs / "config.json").write_bytes(config)

        def read(inputs: Path = inputs) -> None:
            for quantize in (None, quantize_as_loaded("auto")):
                load_model(inputs, quantize=quantize)

        weights = inputs / "model.safetensors"
        found[f"{method} weights"] = Target(6, weights, [weights.read_bytes()], break_safetensors, read)
        found[f"config.json of {method} weights"] = Target(3, inputs / "config.json", [config], break_json, read)
    return found


def _adapters(folder: Path) -> dict[str, Target]:
    inputs = write_inputs(folder / "model")
    model = load_model(inputs, random_init=True)
    adapted = copy.deepcopy(model)
    apply_lora(adapted, LoRAConfig(rank=2))
    save_adapter(adapted, folder / "adapter")
    config, weights = (folder / "adapter" / name for name in ("adapter_config.json", "adapter_model.safetensors"))
    seed = json.loads(config.read_bytes()) | {"alpha_pattern": {"^model\\.layers\\.0": 2, "q_proj": 3}}
    seed |= {"base_model_name_or_path": "tiny"}

    def load() -> None:
        read_adapter(folder / "adapter")
        load_adapter(copy.deepcopy(model), folder / "adapter")

    names = ["a", "b", "c"]
    labels = {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}
    scoring = load_model(inputs, random_init=True, scores={**labels, "problem_type": "single_label_classification"})
    with_scores = copy.deepcopy(scoring)
    apply_lora(with_scores, LoRAConfig(rank=2, dora=True))
    save_adapter(with_scores, folder / "scores")
    of_scores, of_labels = (folder / "scores" / name for name in ("adapter_model.safetensors", "labels.json"))

    def load_scores() -> None:
        found = labels_of(folder / "scores")
        load_adapter(load_model(inputs, random_init=True, scores=found), folder / "scores")

    return {
        "adapter_config.json": Target(12, config, [config.read_bytes(), as_json(seed)], break_json, load),
        "adapter_model.safetensors": Target(4, weights, [weights.read_bytes()], break_safetensors, load),
        "adapter of scores": Target(4, of_scores, [of_scores.read_bytes()], break_safetensors, load_scores),
        "labels.json": Target(2, of_labels, [of_labels.read_bytes()], break_json, load_scores),
    }  # fmt: skip


def _merges(folder: Path) -> dict[str, Target]:
    """The files of the second of two models, or of two adapters, and those of a merged model."""
    inputs = write_inputs(folder / "model")
    model = load_model(inputs, random_init=True)
    write_file(inputs / "model.safetensors", {n: p.detach() for n, p in model.named_parameters()}, {"format": "pt"})
    other = shutil.copytree(inputs, folder / "other")
    apply_lora(model, LoRAConfig(rank=2))
    adapters = [folder / name for name in ("adapter", "adapter-2")]
    for adapter in adapters:
        save_adapter(model, adapter)

    def merge(models: list[Path]) -> None:
        merge_models(models, folder / f"{models[0].name}-merged", MergeSettings(method="slerp"), force=True)

    merge([inputs, other])
    facts = folder / "model-merged" / "merge.json"
    targets = {
        "merge: config.json": Target(4, other / "config.json", [(other / "config.json").read_bytes()], break_json,
            lambda: merge([inputs, other])),
        "merge: tokenizer.json": Target(4, other / "tokenizer.json", [(other / "tokenizer.json").read_bytes()],
            break_json, lambda: merge([inputs, other])),
        "merge: weights": Target(4, other / "model.safetensors", [(other / "model.safetensors").read_bytes()],
            break_safetensors, lambda: merge([inputs, other])),
        "merge.json": Target(4, facts, [facts.read_bytes()], break_json,
            lambda: model_card(facts.parent, None, "org/name", has_picture=False)),
    }  # fmt: skip
    for name, breaks in (("adapter_config.json", break_json), ("adapter_model.safetensors", break_safetensors)):
        file = adapters[1] / name
        targets[f"merge: {name}"] = Target(4, file, [file.read_bytes()], breaks, lambda: merge(adapters))
    return targets


def _tokenizers(folder: Path) -> dict[str, Target]:
    def reader(name: str) -> tuple[Path, Callable[[], None]]:
        own = write_inputs(folder / name)

        def read() -> None:
            loaded = load_tokenizer(own)
            loaded.decode(loaded.encode("2 times 2 is <end>"))

        return own / name, read

    spec, read_spec = reader("tokenizer.json")
    seed = _smaller(json.loads(spec.read_bytes()))
    steps = [
        {"type": "Replace", "pattern": {"String": "a"}, "content": "bb"},
        {"type": "NFKC"},
        {"type": "Prepend", "prepend": "_"},
    ]
    split = {"type": "Split", "pattern": {"Regex": r"\d+| ?\p{L}+"}, "behavior": "Isolated", "invert": False}
    around = [{"SpecialToken": {"id": "<end>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    ends = {"<end>": {"id": "<end>", "ids": [256], "tokens": ["<end>"]}}
    more = {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, seed["pre_tokenizer"]]},
        "post_processor": {"type": "TemplateProcessing", "single": around, "pair": around, "special_tokens": ends},
    }
    pieces = [["<unk>", 0.0], *([piece, -float(i)] for i, piece in enumerate("abcdefghij <>"))]
    unigram = {**seed, "model": {"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": False}}
    words = {
        "type": "WordPiece",
        "unk_token": "<end>",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 9,
    }
    words |= {"vocab": {"<end>": 0, "2": 1, "##2": 2, "times": 3}}
    seeds = [seed, {**seed, **more}, unigram, {**seed, "model": words, "pre_tokenizer": {"type": "Whitespace"}}]
    config = {"eos_token": "<end>", "add_bos_token": False, "chat_template": TEMPLATE, "model_max_length": 64}
    config |= {"added_tokens_decoder": {"256": {"content": "<end>", "special": True}}}
    file, read_config = reader("tokenizer_config.json")
    jinja = write_inputs(folder / "templates")
    ranks = write_inputs(folder / "ranks")
    (ranks / "tokenizer.json").unlink()
    tiktoken = b"".join(b64encode(bytes([i])) + b" %d\n" % i for i in range(256))
    return {
        "tokenizer.json": Target(20, spec, [as_json(one) for one in seeds], break_json, read_spec),
        "tokenizer_config.json": Target(6, file, [as_json(config)], break_json, read_config),
        "chat template": Target(4, jinja / "chat_template.jinja", [TEMPLATE.encode()], break_bytes,
                                lambda: load_tokenizer(jinja).render(MESSAGES)),
        "tokenizer.model": Target(1, ranks / "tokenizer.model", [tiktoken], break_bytes,
            lambda: load_tokenizer(ranks).encode("a b")),
    }  # fmt: skip


def _runs(folder: Path) -> dict[str, Target]:
    checkpoint = folder / "step_00000004"
    (checkpoint / "training_state").mkdir(parents=True)
    data = folder / "rows.jsonl"
    data.write_text('{"text": "a b c"}\n' * 8)
    inputs = write_inputs(folder / "model")
    given = [f"model.path={inputs}", f"data.source={data}", f"output_dir={folder}", "device=cpu", "data.max_length=16"]
    cfg = load_config(recipe.Config, None, given)
    batches, _ = prepare_batches(cfg.data, load_tokenizer(inputs), batch_size=cfg.batch_size, seed=cfg.seed)
    state = {
        "format": 1,
        "step": 4,
        "total_steps": 9,
        "recipe": recipe_name(cfg),
        "settings": settings_of(cfg),
        "bad_steps": 0,
    }
    state |= {"data_fingerprint": batches.fingerprint, "batches": batches.state_dict(), "base_fingerprint": None}
    state |= {"data_contents": batches.contents.as_json()}
    state |= {"scaler": {"scale": 2.0, "good_steps": 1}}

    def resume() -> None:
        read = read_training_state(checkpoint)
        with from_checkpoint(checkpoint):
            starting._differences(starting._recorded_settings(read), settings_of(cfg))
            batches.load_state_dict(read["batches"])
            LossScaler(True).load_state_dict(read["scaler"])
        start = starting.Start(checkpoint, read)
        starting._compare_content(start, settings_of(cfg), batches, "x")

    def draw() -> None:
        with from_checkpoint(checkpoint, ValueError):
            restore_random_state(read_random_state(checkpoint), torch.device("cpu"))

    whole = folder / "whole" / "step_00000004"
    (whole / "training_state").mkdir(parents=True)
    for name in (TRAINING_STATE_FILE, RANDOM_STATE_FILE, OPTIMIZER_FILE):
        (whole / name).write_text("{}")
    write_manifest(whole, 4)
    manifest = (whole / "manifest.json").read_bytes()
    starts = as_json({"starts": [{"recipe": recipe_name(cfg), "settings": {"optimizer.lr": 1e-5, "log.to": ["csv"]}}]})
    lines = b"".join(
        as_json({"step": i, "loss": 2.5, "tokens": 9, "step_seconds": 0.1, "eval_loss": 1.0}) + b"\n" for i in (1, 2)
    )

    def curves() -> None:
        read_curves([folder])[0].results_as_text()
        json.dumps(_results(folder, checkpoint))
        trim_metrics(folder / "metrics.jsonl", 2)

    return {
        "training_state.json": Target(12, checkpoint / TRAINING_STATE_FILE, [as_json(state)], break_json, resume),
        "random_state.json": Target(3, checkpoint / RANDOM_STATE_FILE,
            [as_json(capture_random_state(torch.device("cpu")))], break_json, draw),
        "manifest.json": Target(8, whole / "manifest.json", [manifest], break_json, lambda: check_whole(whole)),
        "run.json": Target(10, folder / "run.json", [starts], break_json,
            lambda: [starting._changes(starting._recorded_settings(one), settings_of(cfg),
                starting.IDENTITY) for one in read_starts(folder)]),
        "metrics.jsonl": Target(10, folder / "metrics.jsonl", [lines], break_bytes, curves),
        "loggers.json": Target(2, folder / "loggers.json", [b'{"wandb": "abc"}'], break_json,
            lambda: loggers._records(folder)),
    }  # fmt: skip


def _requests(folder: Path) -> dict[str, Target]:
    """Requests to `leanft serve`, parsed as by its server."""
    from lean_ft.generation.requests import ChatRequest, Refused

    body = folder / "body"
    asked = {"messages": MESSAGES, "model": "x", "stream": True, "stream_options": {"include_usage": True}, "seed": 1}
    asked |= {"max_tokens": 5, "stop": ["a", "b"], "temperature": 0.5, "top_p": 0.9, "top_k": 4, "n": 1, "tools": []}
    schema = {"type": "object", "properties": {"x": {"type": "integer", "enum": [1, 2]}}, "required": ["x"]}
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": schema, "strict": True}}
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    called = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c1", "content": "7"}]
    with_tools = asked | {"messages": [*MESSAGES, *called], "tools": [tool], "parallel_tool_calls": False}
    with_tools["tool_choice"] = {"type": "function", "function": {"name": "f"}}

    def read() -> None:
        try:
            request = ChatRequest.read(body.read_bytes())
            json.dumps([request.chat, request.schemas, request.forced, request.num_characters])
        except Refused as refused:
            json.dumps(refused.body).encode()
            if refused.status >= 500:
                raise RuntimeError("the request is refused as the server's own failure") from None
            raise

    return {"requests": Target(12, body, [as_json(asked), as_json(with_tools)], break_json, read)}


def _embeddings(folder: Path) -> dict[str, Target]:
    """Files of sentence-transformers folders, and requests for vectors and scores."""
    from lean_ft.embedding.folder import ScoresOf, VectorsOf
    from lean_ft.generation.embedding_requests import EmbeddingRequest, RerankRequest
    from lean_ft.generation.requests import Refused

    how = VectorsOf("mean", True, "q: ", "p: ", 64, (DenseConfig("2_Dense", 8, 4, True, "Tanh"),), {"x": "y"}, "x")
    values = {"vectors": how.files(8), "scores": ScoresOf("{query} {passage}", (1, 2), 64).files()}
    seeds = {kind: {name: as_json(value) for name, value in files.items()} for kind, files in values.items()}
    seeds["vectors"]["tokenizer_config.json"] = b'{"model_max_length": 512}'
    for kind, files in seeds.items():
        for name, content in files.items():
            (folder / kind / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / kind / name).write_bytes(content)

    def read(kind: str) -> None:
        made = VectorsOf.read(folder / kind) or ScoresOf.read(folder / kind)
        if made is not None:  # writing it must work too
            as_json(made.files(8) if isinstance(made, VectorsOf) else made.files())

    def ask(request: type[EmbeddingRequest | RerankRequest], body: Path) -> None:
        try:
            request.read(body.read_bytes()).model_dump_json()
        except Refused as refused:
            json.dumps(refused.body).encode()
            raise

    def of_file(kind: str, name: str) -> Target:
        return Target(3, folder / kind / name, [seeds[kind][name]], break_json, lambda: read(kind))

    found = {f"{name} of {kind}": of_file(kind, name) for kind, files in seeds.items() for name in files}
    texts, pairs = folder / "texts", folder / "pairs"
    asked = [
        {"input": ["a", "b"], "dimensions": 3, "encoding_format": "base64", "model": "x"},
        {"input": [[1, 2], [3]]},
    ]
    ranked = {"query": "a", "documents": ["a", {"text": "b"}], "top_n": 1, "return_documents": True}
    of_texts = Target(6, texts, [*map(as_json, asked)], break_json, lambda: ask(EmbeddingRequest, texts))
    of_pairs = Target(4, pairs, [as_json(ranked)], break_json, lambda: ask(RerankRequest, pairs))
    return {**found, "requests for vectors": of_texts, "requests to rank": of_pairs}


def _turns(folder: Path) -> dict[str, Target]:
    """A model's turns with tool calls, read in every form."""
    turn, types = folder / "turn", {"f": {"x": {"type": "string"}, "n": {"type": ["integer", "null"]}}}
    arguments = '{"x": "a b", "n": [1, {"k": null}]}'
    seeds = [
        f'Hm. <tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>',
        "<think>a</think>\n<tool_call>\n<function=f>\n<parameter=x>\na\n</parameter>\n<parameter=n>\nTrue\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>a</arg_value>\n<arg_key>n</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
        f'<|python_tag|>{{"name": "f", "parameters": {arguments}}}; {{"name": "f", "parameters": {{}}}}',
        f'[TOOL_CALLS] [{{"name": "f", "arguments": {arguments}, "id": "a1b2c3d4e"}}]',
        f"[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{arguments}[TOOL_CALLS]f[ARGS]{{}}",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        f"<|constrain|>json<|message|>{arguments}<|call|>",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{arguments}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        '<|tool_call>call:f{n:[1,{k:null}],x:<|"|>a b<|"|>}<tool_call|>',
        "<start_function_call>call:f{n:1,x:<escape>a b<escape>}<end_function_call>",
        "<|tool_call_start|>[f(x='a b', n=[1, {'k': None}])]<|tool_call_end|>",
        "[f(x='a b', n=-1), f()]",
    ]

    def read() -> None:
        text = turn.read_bytes().decode(errors="replace")
        turns = [read_turn(form, text, types) for form in FORMS.values()]
        json.dumps(turns, ensure_ascii=False, allow_nan=False).encode()
        errors = [call.error for one in turns for call in one.calls]
        if all(errors):
            raise typer.BadParameter(errors[0] if errors else "a turn without calls")

    return {"turns with tool calls": Target(20, turn, [one.encode() for one in seeds], break_bytes, read)}


def _tool_results(folder: Path) -> dict[str, Target]:
    """Results of tool calls in a run's folder, of which a resumed run takes the whole lines."""
    written = RecordedResults(folder, 0, [])
    keys = [written.key(i) for i in range(3)]
    for key in keys:
        written.add(key, result="3 é", failed=False)
    written.add(keys[0], found=[["a", False]], state={"x": [1, None]})
    file = folder / TOOL_RESULTS_FILE

    def read() -> None:
        results = RecordedResults(folder, 0, [])
        taken = [found for key in keys for _ in range(2) if (found := results.take(key)) is not None]
        if not taken:
            raise typer.BadParameter("no whole line")
        assert all(one.get("result") == "3 é" or one["found"] == [["a", False]] for one in taken)

    return {
        "tool_results.jsonl": Target(
            6, file, [file.read_bytes(), file.read_bytes().splitlines(True)[0]], break_bytes, read
        )
    }


def _engine(folder: Path) -> dict[str, Target]:
    """What a sampling server answers."""
    file = folder / "reply.json"
    content = [{"token_id": token, "logprob": -0.5 * token} for token in (5, 6, 2)]
    spans = [{"version": "merged-1", "start": 0, "end": 3}]
    choice = {"token_ids": [5, 6, 2], "finish_reason": "stop", "logprobs": {"content": content}}
    turn = {"choices": [{**choice, "weight_versions": spans}], "prompt_token_ids": [1, 2]}
    model = {"max_model_len": 512, "logprobs_mode": "processed_logprobs", "hf_overrides": {}}
    info = {"model_config": model, "lora_config": {"max_lora_rank": 16}, "device_config": {"device": "cuda"}}

    def read() -> None:
        try:
            reply = read_object(file.read_bytes(), "the server")
            if "choices" in reply:
                turn = replies.read_turn(reply, 4, 100, [1, 2])
                assert len(turn.ids) == len(turn.log_probs) <= 4 and all(0 <= one < 100 for one in turn.ids)
            else:
                replies.read_facts(reply, reply)
        except ServerError as error:
            raise typer.BadParameter(str(error)) from None

    seeds = [as_json(one) for one in (turn, {"vllm_config": info, "version": "0.32.0"})]
    return {"replies of an engine": Target(6, file, seeds, break_json, read, (2.0, 200 * 2**20))}


def _odd_values(folder: Path) -> dict[str, Target]:
    """Names in the JSON of rows, and what environments and tools return."""
    rows, seeds, read_rows = names_in_json(folder)
    file, values, read_answers = answers(folder)
    return {
        "names in JSON": Target(15, rows, seeds, break_names, read_rows),
        "answers of environments and tools": Target(15, file, values, break_answer, read_answers),
    }


_KINDS = (
    _settings,
    _rows,
    _images,
    _models,
    _quantized,
    _gguf,
    _adapters,
    _merges,
    _tokenizers,
    _runs,
    _requests,
    _embeddings,
    _turns,
    _tool_results,
    _engine,
    _odd_values,
)


def _read_tensors(file: Path) -> None:
    """Read every tensor of the header into memory of its shape, as a model would."""
    for tensor in read_header(file).values():
        if tensor.dtype is not None:
            tensor.read()


def _smaller(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """A tokenizer with a small vocabulary, so that changes rarely hit a token's id."""
    vocabulary = tokenizer["model"]["vocab"]
    kept = {token: number for token, number in vocabulary.items() if token.isalnum() or token == "<end>"}
    return {**tokenizer, "model": {**tokenizer["model"], "vocab": kept}}


class _OutOfTime(BaseException):
    pass


# A message that shows Python's own errors. User code's errors name their type: they are the user's.
_RAW = re.compile(
    r"Traceback|\b(Attribute|Index|Key|Assertion|Type|Recursion|Overflow|ZeroDivision|Memory|Unicode\w+)Error\b"
)


def judge(target: Target, content: bytes) -> tuple[str, dict[str, Any] | None]:
    """Return `read`, `refused`, or `failed` with details."""
    target.file.write_bytes(content)

    def ring(number: int, frame: Any) -> None:
        raise _OutOfTime

    signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, CASE_CPU_SECONDS)
    try:
        target.read()
    except _OutOfTime as error:
        return "failed", _failure(f"took more than {CASE_CPU_SECONDS:.0f} s of processor time", error)
    except BaseException as error:  # a panic in Rust code raises it
        message, code = explain(error)
        shown = printable(message, MAX_MESSAGE_CHARACTERS)
        if isinstance(error, Exception) and code == 2 and len(shown.encode()) < 5000 and not _RAW.search(shown):
            return "refused", None
        return "failed", _failure(f"{type(error).__name__}: {message[:200]}", error)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return "read", None


def _failure(what: str, error: BaseException) -> dict[str, Any]:
    ours = [f for f in traceback.extract_tb(error.__traceback__) if f"{os.sep}lean_ft{os.sep}" in f.filename]
    last = ours[-1] if ours else None
    return {"what": what, "where": f"{Path(last.filename).relative_to(ROOT)}:{last.lineno}" if last else None}


def worker(
    target: Target, name: str, seed: int, numbers: range, deadline: float, current: mmap.mmap, answer: Path
) -> None:
    """Judge the cases with these numbers until the deadline, at least one, and write the outcome."""
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + CASE_MEMORY_BYTES, resource.RLIM_INFINITY))
    counts, failures, slowest = {"read": 0, "refused": 0, "failed": 0}, [], 0.0
    before, memory = _begin_peak(), 0
    for number in numbers:
        if number > numbers.start and time.perf_counter() > deadline:
            break
        struct.pack_into("q", current, 0, number)
        content = target.case(name, seed, number)
        began, resident = time.process_time(), 0 if target.most is None else _begin_peak()
        outcome, failure = judge(target, content)
        seconds = time.process_time() - began
        slowest, memory = max(slowest, seconds), max(memory, _status_bytes("VmHWM") - (resident or before))
        if target.most is not None and failure is None:
            grown = _status_bytes("VmHWM") - resident
            if seconds > target.most[0] or grown > target.most[1]:
                outcome, failure = "failed", {"what": f"took {seconds:.1f} s and {grown >> 20} MiB", "where": None}
        counts[outcome] += 1
        if failure is not None:
            failures.append({"case": number, **failure, "input": repr(content[:300])})
    told = {"counts": counts, "failures": failures[:50], "slowest": slowest, "cpu_seconds": time.process_time()}
    told["memory"] = memory
    answer.write_text(json.dumps(told))


def _begin_peak() -> int:
    """Begin a new peak of this process's memory, and return its memory."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def _status_bytes(name: str) -> int:
    """A line of this process's status, such as VmRSS."""
    return int(Path("/proc/self/status").read_text().partition(f"{name}:")[2].split()[0]) << 10


def feed(target: Target, name: str, seed: int, first: int, cases: int, deadline: float, place: Path) -> dict[str, Any]:
    """Run all cases of one target from number `first` on, in forked workers."""
    row: dict[str, Any] = {
        "label": name,
        "status": "ok",
        "reason": None,
        "cases": 0,
        "read": 0,
        "refused": 0,
        "failed": 0,
    }
    row |= {"slowest_seconds": 0.0, "memory_bytes": 0, "seconds": 0.0, "cpu_seconds": 0.0, "failures": []}
    current, answer = mmap.mmap(-1, 8), place / "answer"
    began = time.perf_counter()
    number, cases = first, first + cases
    while number < cases and (number == first or time.perf_counter() < deadline):
        numbers = range(number, min(cases, number + CASES_A_WORKER))
        answer.unlink(missing_ok=True)
        process = os.fork()
        if not process:
            try:
                worker(target, name, seed, numbers, deadline, current, answer)
            finally:
                os._exit(0)
        ended = _wait(process, current)
        if answer.exists():
            told = json.loads(answer.read_text())
            judged = sum(told["counts"].values())
            row["cases"] += judged
            number += judged
            for outcome, count in told["counts"].items():
                row[outcome] += count
            row["failures"] += told["failures"]
            row["slowest_seconds"] = max(row["slowest_seconds"], told["slowest"])
            row["memory_bytes"] = max(row["memory_bytes"], told["memory"])
            row["cpu_seconds"] = round(row["cpu_seconds"] + told["cpu_seconds"], 3)
            continue
        (last,) = struct.unpack_from("q", current)  # its earlier cases count as one
        row["cases"] += 1
        row["failed"] += 1
        row["failures"].append(
            {"case": last, "what": ended, "where": None, "input": repr(target.case(name, seed, last)[:300])}
        )
        number = last + 1
    target.file.write_bytes(target.seeds[0])
    row["seconds"] = round(time.perf_counter() - began, 1)
    return row


def _wait(process: int, current: mmap.mmap) -> str:
    """Wait for a worker and describe how it ended. Kill it if one case takes too long."""
    before, since = b"", time.perf_counter()
    while not os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        time.sleep(0.02)
        now = current[:8]
        if now != before:
            before, since = now, time.perf_counter()
        elif time.perf_counter() - since > WORKER_SILENCE_SECONDS:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            return f"did not come back within {WORKER_SILENCE_SECONDS:.0f} s"
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    return f"the process ended with {signal.Signals(-code).name if code < 0 else code}"


def describe(result: dict[str, Any]) -> str:
    """The caption of the table."""
    cases = sum(row["cases"] for row in result["rows"])
    failed = sum(row["failed"] for row in result["rows"])
    return f"{cases:,} corrupted inputs; {failed} failed"


def table_cells(result: dict[str, Any]) -> list[list[str]]:
    """The rows of the table."""
    return [
        [
            row["label"],
            f"{row['cases']:,}",
            f"{row['read']:,}",
            f"{row['refused']:,}",
            f"{row['failed']:,}",
            f"{row['slowest_seconds']:.2f} s",
            f"{row['memory_bytes'] / 2**20:,.0f} MiB",
            f"{row['cases'] / max(row['cpu_seconds'], 1e-3):,.0f}",
        ]
        for row in result["rows"]
    ]


def main(
    cases: Annotated[int, typer.Option(help="Number of cases, divided among the inputs.")] = 1_000_000,
    budget_seconds: Annotated[
        float, typer.Option(help="Time limit in seconds; remaining cases are skipped.")
    ] = 36_000.0,
    only: Annotated[str, typer.Option(help="Regular expression for the inputs to corrupt.")] = "",
    seed: Annotated[int, typer.Option(help="Seed of the cases.")] = 0,
    results_dir: Annotated[Path, typer.Option(help="Folder for the JSON result.")] = RESULTS,
) -> None:
    """Run all cases, print and write. Exits with 1 if a case failed."""
    hardware = require_hardware("cpu")
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="lean_ft_fuzzing_", dir=memory) as folder:
        chosen = {name: target for name, target in targets(Path(folder)).items() if re.search(only, name)}
        if not chosen:
            raise typer.BadParameter("no input has a name like that", param_hint="--only")
        rows = []
        shares = sum(target.share for target in chosen.values())
        started, ahead = time.perf_counter(), 0
        for name, target in chosen.items():
            ahead += target.share
            deadline = started + budget_seconds * ahead / shares
            rows.append(feed(target, name, seed, 0, -(-cases * target.share // shares), deadline, Path(folder)))
    path = write_result(
        "fuzzing",
        benchmark="fuzzing",
        hardware=hardware,
        settings={"cases": cases, "seed": seed, "case_cpu_seconds": CASE_CPU_SECONDS, "case_memory": CASE_MEMORY_BYTES},
        rows=[{**row, "failures": row["failures"][:20]} for row in rows],
        folder=results_dir,
    )
    print_result(path, describe, COLUMNS, table_cells)
    for row in rows:
        kinds: dict[str, list[Any]] = {}
        for failure in row["failures"]:
            kinds.setdefault(f"{failure['what'][:90]} at {failure['where']}", []).append(failure)
        for what, failures in kinds.items():
            first = failures[0]
            print(f"{row['label']}: {len(failures)} x {what}, such as case {first['case']}: {first['input'][:160]}")
    raise typer.Exit(1 if any(row["failed"] for row in rows) else 0)


if __name__ == "__main__":
    typer.run(main)
