"""Compare token ids with the reference libraries and speed with transformers, on a whole data set.

    python benchmarks/tokenizers_gsm8k.py --data ../shared/data --rounds 3

Each tokenizer of `DATA/tokenizers` encodes every row of GSM8K (question and answer) with lean_ft, with the reference
library (tokenizers, sentencepiece, tiktoken) and with transformers, alternating. Times are medians of the rounds.
transformers 5 has a slow Python path only for SentencePiece; the others use its only path. Ids must be equal and decode
to the reference's text.

Writes `results/tokenizers_gsm8k_<hardware>.json`.
"""

import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from results import RESULTS, print_result, require_hardware, write_result

Encode = Callable[[str], list[int]]
TRANSFORMERS_PATHS = {"json": "fast", "sentencepiece": "slow", "tiktoken": "fast, converted"}


def contestants(file: Path) -> tuple[str, Any, Any, Callable[[list[int]], str], Any]:
    """The kind of a tokenizer file; the encoders of lean_ft, the reference and transformers; the reference's
    decoder."""
    from lean_ft.gguf.splitting import LLAMA3_PATTERN
    from lean_ft.tokenizers import load_tokenizer
    from lean_ft.tokenizers.tiktoken_model import is_rank_file

    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(file, Path(folder) / f"tokenizer{file.suffix}")
        ours = load_tokenizer(folder)
    if file.suffix == ".json":
        from tokenizers import Tokenizer
        from transformers import PreTrainedTokenizerFast

        library = Tokenizer.from_file(str(file))
        fast = PreTrainedTokenizerFast(tokenizer_file=str(file))
        return (
            "json",
            ours.encode,
            lambda text: library.encode(text).ids,
            library.decode,
            lambda text: fast(text).input_ids,
        )
    if is_rank_file(file):
        import tiktoken
        from tiktoken.load import load_tiktoken_bpe
        from transformers import PreTrainedTokenizerFast
        from transformers.convert_slow_tokenizer import TikTokenConverter

        ranks = load_tiktoken_bpe(str(file))
        encoding = tiktoken.Encoding("file", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens={})
        converted = TikTokenConverter(str(file), pattern=LLAMA3_PATTERN).converted()
        theirs = PreTrainedTokenizerFast(tokenizer_object=converted)
        return "tiktoken", ours.encode, encoding.encode, encoding.decode, lambda text: theirs(text).input_ids
    from sentencepiece import SentencePieceProcessor
    from transformers.tokenization_utils_sentencepiece import SentencePieceBackend

    processor = SentencePieceProcessor(model_file=str(file))
    slow = SentencePieceBackend(vocab_file=str(file), legacy=True, unk_token="<unk>")
    encode_slow = lambda text: slow(text, add_special_tokens=False).input_ids  # noqa: E731
    return "sentencepiece", ours.encode, processor.encode, processor.decode, encode_slow


def measure(file: Path, texts: list[str], rounds: int) -> dict[str, Any]:
    """Compare ids and text of every row, then time the three alternately."""
    from lean_ft.tokenizers import load_tokenizer

    kind, ours, library, decode, theirs = contestants(file)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(file, Path(folder) / f"tokenizer{file.suffix}")
        our_decode = load_tokenizer(folder).decode
    differing = sum(ours(text) != library(text) for text in texts)
    misread = sum(our_decode(library(text)) != decode(library(text)) for text in texts)
    differing_from_transformers = sum(ours(text) != theirs(text) for text in texts)
    seconds: dict[str, list[float]] = {"ours": [], "library": [], "transformers": []}
    for _ in range(rounds):
        for name, encode in (("ours", ours), ("library", library), ("transformers", theirs)):
            started = time.perf_counter()
            for text in texts:
                encode(text)
            seconds[name].append(time.perf_counter() - started)
    return {
        "label": f"{file.name} ({kind})",
        "status": "ok",
        "reason": None,
        "transformers_path": TRANSFORMERS_PATHS[kind],
        "num_rows": len(texts),
        "num_tokens": sum(len(library(text)) for text in texts),
        "rows_with_other_ids": differing,
        "rows_with_other_text": misread,
        "rows_with_other_ids_than_transformers": differing_from_transformers,
        **{f"{name}_seconds": statistics.median(values) for name, values in seconds.items()},
    }


COLUMNS = [
    "tokenizer",
    "tokens",
    "different ids",
    "different text",
    "lean_ft",
    "library",
    "transformers",
    "transformers / lean_ft",
]


def describe(result: dict[str, Any]) -> str:
    """The caption of the table."""
    return (
        f"encoding {result['settings']['num_rows']:,} rows one by one, median of {result['settings']['rounds']} rounds"
    )


def table_cells(result: dict[str, Any]) -> list[list[str]]:
    """The rows of the table."""
    return [
        [
            row["label"],
            f"{row['num_tokens']:,}",
            f"{row['rows_with_other_ids']} rows",
            f"{row['rows_with_other_text']} rows",
            f"{row['ours_seconds']:.2f} s",
            f"{row['library_seconds']:.2f} s",
            f"{row['transformers_seconds']:.2f} s ({row['transformers_path']})",
            f"{row['transformers_seconds'] / row['ours_seconds']:.2f}x",
        ]
        for row in result["rows"]
    ]


def main(
    data: Annotated[Path, typer.Option(help="Folder with gsm8k_train.jsonl and tokenizers/.")],
    rounds: Annotated[int, typer.Option(help="Rounds over the whole file.")] = 3,
    num_rows: Annotated[int | None, typer.Option(help="Number of rows; default: all.")] = None,
    results_dir: Annotated[Path, typer.Option(help="Folder for the JSON result.")] = RESULTS,
) -> None:
    """Measure, print the table and write the result."""
    hardware = require_hardware("cpu")
    with (data / "gsm8k_train.jsonl").open(encoding="utf-8") as file:
        texts = ["\n".join(map(str, json.loads(line).values())) for line in file][:num_rows]
    files = sorted((data / "tokenizers").iterdir())
    rows = [measure(file, texts, rounds) for file in files]
    settings = {"num_rows": len(texts), "rounds": rounds}
    path = write_result(
        "tokenizers_gsm8k",
        benchmark="tokenizers_gsm8k",
        hardware=hardware,
        settings=settings,
        rows=rows,
        folder=results_dir,
    )
    print_result(path, describe, COLUMNS, table_cells)


if __name__ == "__main__":
    typer.run(main)
