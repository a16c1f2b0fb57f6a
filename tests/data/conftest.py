import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, pre_tokenizers

from lean_ft.data.columns import Columns
from lean_ft.data.documents import Parts, Renderer, renderer_of
from lean_ft.data.formats import RowReader
from lean_ft.data.parts import kinds_of
from lean_ft.data.report import DataReport
from lean_ft.data.rows import Digest, Row
from lean_ft.data.sources import RowSources
from lean_ft.settings import DataConfig, SFTDataConfig, Sources
from lean_ft.tokenizers import Tokenizer, load_tokenizer

CHATML = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def bytes_tokenizer() -> HFTokenizer:
    """Tokenizer with one token per byte, so that tests can count tokens by hand."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = HFTokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|im_start|>", "<|im_end|>"])
    return tokenizer


def build(folder: Path, **config: Any) -> Tokenizer:
    folder.mkdir()
    bytes_tokenizer().save(str(folder / "tokenizer.json"))
    # The padding token is the eos token, so the code must not identify padding by its id.
    config = {"eos_token": "<|end|>", "pad_token": "<|end|>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(folder)


def read_rows(source: Sources, digest: Digest | None = None, config: DataConfig | None = None) -> Iterator[Row]:
    """The rows of `source`."""
    return RowSources.of(config or SFTDataConfig(source=source), source).rows(digest)


def first_rows(source: Sources, count: int, config: DataConfig | None = None) -> list[Row]:
    """The first rows of each part of `source`."""
    return RowSources.of(config or SFTDataConfig(source=source), source).first_rows(count)


def rendering(reader: type[RowReader], config: DataConfig, rows: Sequence[Row], tokenizer: Tokenizer) -> Renderer:
    """A renderer of `rows`, whose source need not exist."""
    sources = RowSources.of(config)
    return Renderer(sources, reader.of(sources, rows, tokenizer), tokenizer, kinds_of(tokenizer), "sequences")


def prepare(config: DataConfig, tokenizer: Tokenizer) -> tuple[Columns, DataReport]:
    """Render all documents of the source in memory, without the cache."""
    parts = Parts(renderer_of(config, tokenizer))
    documents = [document for part in parts for document in part]
    return Columns.join(documents), parts.report


@pytest.fixture(scope="session")
def plain_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return build(tmp_path_factory.mktemp("plain") / "tokenizer")


@pytest.fixture(scope="session")
def chat_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return build(
        tmp_path_factory.mktemp("chat") / "tokenizer",
        chat_template=CHATML,
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
    )


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Write rows as JSONL, or a string unchanged, and return the path."""

    def write(rows: list[Any] | str | bytes, name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        if isinstance(rows, list):
            rows = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        path.write_bytes(rows if isinstance(rows, bytes) else rows.encode("utf-8"))
        return str(path)

    return write


@pytest.fixture
def config(write: Callable[..., str]) -> Callable[..., SFTDataConfig]:
    """Write rows to a file and return settings for them."""

    def make(rows: list[Any] | str, **settings: Any) -> SFTDataConfig:
        return SFTDataConfig(**{"source": write(rows), "max_length": 64, **settings})

    return make
