"""Turn a GGUF file into a model folder of the cache: config.json, tokenizer files, and an index of the weights.

The weights stay in the file. `lean_ft.models.gguf_tensors` dequantizes them while they are read, so every command that takes
a model folder takes a GGUF file too. Only the header is read here, with a check of every size, because a damaged file must
not exhaust memory. Token ids are llama.cpp's: text is not normalized, and the space before the first word of a SentencePiece
vocabulary is also added after a control token.

Source: the GGUF specification (ggml, docs/gguf.md), and llama.cpp's src/llama-vocab.cpp and src/llama-model.cpp.
"""

import hashlib
import math
import re
import struct
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lean_ft.data.cache import limit_size, load_entry
from lean_ft.export.gguf_check import gguf_family
from lean_ft.export.gguf_config import USE_FOLDER, check_architecture, config_of, family_of
from lean_ft.export.gguf_contents import all_tensors, architecture_metadata, gguf_package, layout_of
from lean_ft.export.gguf_facts import Facts, Stored
from lean_ft.export.gguf_families import GGUFFamily
from lean_ft.export.gguf_tokenizer import tokenizer_files
from lean_ft.hub.paths import gguf_cache
from lean_ft.models import Decoder
from lean_ft.models.gguf_tensors import ArrangedTensor, GGUFTensor, InlineTensor, num_rows, write_index
from lean_ft.models.hf_format import empty_model
from lean_ft.models.safetensors_file import StoredTensor
from lean_ft.system.whole_files import MAX_JSON_BYTES, write_json
from lean_ft.tokenizers import load_tokenizer

_FORMAT = 4  # of the folder; part of its name
_CACHE_BYTES = 2**32  # of all folders; that of a large vocabulary has 30 MB
_MAX_ENTRIES = 2**21  # of all arrays together; the largest vocabularies have 300,000 tokens and 600,000 merges
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

# Metadata that tensors' shapes show, that repeats other metadata, or that changes nothing for text.
_UNCHECKED = {
    "block_count", "vocab_size", "feed_forward_length", "expert_feed_forward_length", "expert_shared_feed_forward_length",
    "rope.dimension_sections", "rope.scaling.finetuned", "rope.scaling.original_context_length", "attention.sliding_window_pattern", "full_attention_interval",
}  # fmt: skip


def gguf_folder(file: Path, given: str | Path | None = None) -> Path:
    """Return a model folder for a GGUF file: its configuration, its tokenizer, and an index of its weights. Cached.

    `given` is the file's name in messages, by default its path. Raises ValueError if the file is damaged, or has an architecture,
    a kind of weights or a tokenizer that lean_ft cannot read, or if the cache cannot be written.
    """
    file = file.expanduser().absolute()  # in the Hub's cache a link to a file without the ending .gguf
    about, cache = file.stat(), gguf_cache()
    key = f"{_FORMAT} {file} {about.st_size} {about.st_mtime_ns}"
    key = f"{file.stem[:100]}-{hashlib.sha256(key.encode(errors='replace')).hexdigest()[:16]}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        load_entry(cache, key, lambda writer: _write_named(file, writer.folder, given or file))
    except OSError as error:
        if error.filename == str(file):
            raise
        reason = error.strerror or error
        raise ValueError(
            f"cannot write the cache folder {cache} ({reason}). Set the environment variable LEAN_FT_CACHE to a writable folder."
        ) from None
    limit_size(cache, _CACHE_BYTES, keep={key})
    return cache / key


def _write_named(file: Path, folder: Path, given: str | Path) -> None:
    """Call `_write`. Messages name the file that the user gave in place of a file of the cache."""
    try:
        _write(file, folder)
    except ValueError as error:
        paths = rf"{re.escape(str(folder))}(/[\w.]+)?|{re.escape(str(file))}"
        raise ValueError(re.sub(paths, lambda _: str(given), str(error))) from None


def _write(file: Path, folder: Path) -> None:
    metadata, tensors = read_header(file)
    if metadata.get("general.type") == "adapter":
        raise ValueError(f"{file} is an adapter for llama.cpp. Use the run or the folder that it was exported from.")
    if metadata.get("split.count", 1) != 1:
        raise ValueError(
            f"{file} is one part of a split model. Join the parts: llama-gguf-split --merge FIRST ALL.gguf"
        )
    facts = Facts(file, check_architecture(file, metadata.get("general.architecture")), metadata, tensors)
    config, files = config_of(facts, family_of(facts)), tokenizer_files(file, metadata)
    ids = {key: metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("bos", "eos", "eot", "eom")}
    ends = [i for i in dict.fromkeys((ids["eos"], ids["eot"], ids["eom"])) if i is not None]
    config |= {"bos_token_id": ids["bos"], "eos_token_id": ids["eos"]}
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {"bos_token_id": ids["bos"], "eos_token_id": ends or None})
    for file_name, content in files.items():
        write_json(folder / file_name, content, indent=None)
    model = empty_model(folder, torch.float32)
    family = gguf_family(model, file)
    _check_metadata(facts, architecture_metadata(model, family))
    write_index(folder, file, stored_parameters(facts, model, family))
    load_tokenizer(folder)  # raises if the `tokenizers` library cannot read it


def _check_metadata(facts: Facts, own: Mapping[str, Any]) -> None:
    """Raise ValueError unless a file of the model that was read has the same metadata."""
    unused = {key for key in facts.values if key.startswith("ssm.") and facts.architecture.startswith("granite")}
    if unknown := sorted(facts.values.keys() - own.keys() - facts.read - _UNCHECKED - unused):
        raise ValueError(
            f"{facts.file} has the metadata {', '.join(unknown)}, which lean_ft does not read for {facts.architecture}. {USE_FOLDER}"
        )
    for key in facts.values.keys() & own.keys() - _UNCHECKED:
        if not _is_same(facts.values[key], own[key], facts.num_layers):
            raise ValueError(f"{facts.file}: {key} is {facts.values[key]}; expected {own[key]}. {USE_FOLDER}")


def _is_same(found: Any, own: Any, num_layers: int) -> bool:
    if isinstance(found, list) or isinstance(own, list):  # a file also counts the layers that draft tokens
        found, own = (one[:num_layers] if isinstance(one, list) else [one] * num_layers for one in (found, own))
    if isinstance(found, int | float) and isinstance(own, int | float):
        return math.isclose(found, own, rel_tol=1e-4)
    return found == own


def _fits(found: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    return [n for n in found if n != 1] == [n for n in expected if n != 1]


def stored_parameters(facts: Facts, model: Decoder, family: GGUFFamily) -> dict[str, StoredTensor]:
    """Return the model's tensors by their names on disk. Raises ValueError unless the file has them, in their shapes."""
    index, wrong, expected = dict[str, StoredTensor](), [], dict[str, tuple[int, ...]]()
    for name, shape in ((name, tuple(tensor.shape)) for name, tensor in all_tensors(model, family, "meta")):
        expected[name] = shape
        if name in facts.tensors and not _fits(facts.tensors[name].shape, shape):
            wrong.append((name, shape))
    unread = tuple(f"blk.{i}." for i in range(facts.num_layers, facts.count("block_count")))  # layers that draft tokens
    unexpected = {name for name in facts.tensors.keys() - expected.keys() if not name.startswith(unread)}
    unexpected -= {"rope_freqs.weight"}
    for problem, those in (("lacks", expected.keys() - facts.tensors.keys()), ("has unexpected", unexpected)):
        if those:
            names = sorted(those)
            few = ", ".join(names[:4]) + (f" and {len(those) - 4} more" if len(those) > 4 else "")
            raise ValueError(
                f"{facts.file} {problem} tensors of {facts.architecture}: {few}. Download the file again, or use another one."
            )
    for name, shape in wrong:
        raise ValueError(
            f"{facts.file}: {name} has the shape {list(facts.tensors[name].shape)}; expected {list(shape)} from the metadata. "
            "Download the file again."
        )
    for name, parameter in model.state_dict().items():
        steps, names = layout_of(name, model, family)
        pieces = list(model.source.stored(name, parameter))
        sources = [GGUFTensor(facts.file, *facts.tensors[one]) for one in names]
        if not names:
            number = facts.of_layer(f"xielu.{name.rpartition('.')[2]}", int(name.split(".")[2]))
            index[pieces[0][0]] = InlineTensor(facts.file, "F32", tuple(parameter.shape), 0, (number,))
        elif len(pieces) > 1:  # a stack, with a matrix or two of each expert on disk
            for number, (place, _) in enumerate(pieces):
                expert, source = divmod(number, len(sources))
                index[place] = sources[source].of_stack(expert)
        elif steps or sources[0].shape != tuple(parameter.shape):
            kind, offset = sources[0].dtype_name, sources[0].offset
            shape = tuple(pieces[0][1].shape)
            index[pieces[0][0]] = ArrangedTensor(facts.file, kind, shape, offset, tuple(sources), steps)
        else:
            index[pieces[0][0]] = sources[0]
    return index


class _Reader:
    """Numbers and strings of a header. One budget of bytes and one of entries hold for the whole header."""

    def __init__(self, file: Path) -> None:
        self.file, self.size, self.place, self.entries = file, file.stat().st_size, 0, _MAX_ENTRIES
        with file.open("rb") as stream:
            self.content = stream.read(MAX_JSON_BYTES)

    def bytes(self, length: int) -> bytes:
        start, self.place = self.place, self.place + length
        if self.place > self.size:
            raise ValueError(
                f"{self.file} is truncated: its header does not fit {self.size:,} bytes. Download it again."
            )
        if self.place > MAX_JSON_BYTES:
            raise self.damaged(f"more than {MAX_JSON_BYTES >> 20} MiB")
        return self.content[start : self.place]

    def number(self, code: str) -> Any:
        value = struct.unpack(f"<{code}", self.bytes(struct.calcsize(f"<{code}")))[0]
        return float(str(np.float32(value))) if code == "f" else value  # the shortest decimal, as in config.json

    def text(self) -> str:
        try:
            return self.bytes(self.number("Q")).decode("utf-8")
        except UnicodeDecodeError:
            raise self.damaged("a text that is not UTF-8") from None

    def count(self, most: int) -> int:
        number = self.number("Q")
        if number > most:
            raise self.damaged(f"a count of {number:,}, above {most:,}")
        return number

    def value(self, kind: int, in_array: bool = False) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY and not in_array:
            kind, length = self.number("I"), self.count(self.entries)
            self.entries -= length
            if kind not in _SCALARS:
                return [self.value(kind, in_array=True) for _ in range(length)]
            code = f"<{length}{_SCALARS[kind]}"
            return list(struct.unpack(code, self.bytes(struct.calcsize(code))))
        if kind not in _SCALARS:
            raise self.damaged(f"a value of the unknown type {kind}")
        return self.number(_SCALARS[kind])

    def damaged(self, found: str) -> ValueError:
        return ValueError(f"{self.file} is damaged: its header has {found}. Download it again.")


def read_header(file: Path) -> tuple[dict[str, Any], dict[str, Stored]]:
    """Return a GGUF file's metadata and tensors by name. Raises ValueError if it is damaged, or a kind of weights is unknown."""
    kinds = _kinds(gguf_package())
    metadata, tensors, starts = dict[str, Any](), dict[str, Stored](), dict[str, int]()
    reader = _Reader(file)
    if reader.content[:4] != b"GGUF":
        raise ValueError(f"{file} is not a GGUF file: it does not begin with GGUF. Expected a file for llama.cpp.")
    reader.place = 4
    if (version := reader.number("I")) not in (2, 3):
        raise ValueError(f"{file} has version {version} of the format; expected 2 or 3, in little-endian order.")
    num_tensors, num_values = reader.count(2**17), reader.count(2**17)
    for _ in range(num_values):
        if (key := reader.text()) in metadata:
            raise reader.damaged(f"two values of {key}")
        metadata[key] = reader.value(reader.number("I"))
    for _ in range(num_tensors):
        name, num_dims = reader.text(), reader.number("I")
        if name in tensors or not 1 <= num_dims <= 4:
            raise reader.damaged(f"two tensors {name}" if name in tensors else f"{num_dims} dimensions of {name}")
        shape = tuple(reader.number("Q") for _ in range(num_dims))[::-1]
        number, start = reader.number("I"), reader.number("Q")
        kind, block, block_bytes = kinds.get(number, (str(number), 0, 0))
        if not block:
            known = ", ".join(name for name, size, _ in kinds.values() if size)
            raise ValueError(
                f"{file} stores {name} as {kind}; expected one of {known}. Choose another file of the model."
            )
        columns = shape[-1] if num_dims > 1 else 1
        if (num_dims == 1 and block > 1) or columns % block or 0 in shape:
            raise reader.damaged(f"the shape {list(shape)} of {name}, which is stored as {kind}")
        tensors[name], starts[name] = Stored(kind, shape, 0, columns // block * block_bytes), start
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
        raise reader.damaged(f"the alignment {alignment!r}; expected a power of two")
    data = end = -(-reader.place // alignment) * alignment
    for name in sorted(tensors, key=lambda name: starts[name]):
        stored, start = tensors[name], data + starts[name]
        if start < end:
            raise reader.damaged(f"the tensor {name} at byte {start:,}, inside another tensor")
        end = start + num_rows(stored.shape) * stored.row_bytes
        if end > reader.size:
            raise ValueError(f"{file} is truncated: {name} ends at byte {end:,}, and the file has {reader.size:,}. Download it again.")  # fmt: skip
        tensors[name] = stored._replace(offset=start)
    return metadata, tensors


@lru_cache(maxsize=1)
def _kinds(gguf: Any) -> dict[int, tuple[str, int, int]]:
    """Each kind's name, and the numbers and bytes of its blocks; no numbers in a kind that cannot be dequantized."""
    found = {}
    for kind in gguf.GGMLQuantizationType:
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        try:
            if kind.name not in ("F32", "F16"):
                gguf.quants.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
        except NotImplementedError:
            block = 0
        found[int(kind)] = (kind.name, block, block_bytes)
    return found
