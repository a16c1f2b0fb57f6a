"""Compare data preparation with TRL: read, render, tokenize, mask, pack and write, in new processes that alternate.

    python benchmarks/data_preparation.py                          # GSM8K repeated to 300,000 rows, packed to 1,024
    python benchmarks/data_preparation.py --rows 20000 --rounds 3
    python benchmarks/data_preparation.py --data questions.jsonl   # other rows with `question` and `answer`

Rows are prompt and completion messages, numbered so that no two are equal. The tokenizer is a byte-level BPE of 16,000
tokens, trained on the same text, with Qwen2.5's pre-tokenizer and a ChatML template without `{% generation %}` blocks,
so both sides find trained tokens by rendering twice. Both get one process per core. lean_ft starts twice: the second
start uses the cache of the first.

Writes `results/data_preparation_<rows>x<length>_<hardware>.json`. TRL is in the extra `compare`.
"""

import importlib.util
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated, Any

import typer
from measure import Budget, run_measured
from results import RESULTS, console, gibibytes, print_result, require_hardware, write_result
from shapes import find_gsm8k
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SIDES = ("ours", "trl")
VOCABULARY_SIZE = 16_000
# The pre-tokenizer pattern of Qwen2.5's tokenizer.json.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHATML = """\
{%- if messages[0]['role'] != 'system' %}{{- '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""  # noqa: E501


def read_questions(data: Path) -> list[dict[str, str]]:
    with data.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def write_rows(path: Path, questions: list[dict[str, str]], num_rows: int) -> Path:
    """Write `num_rows` different rows."""
    with path.open("w", encoding="utf-8") as file:
        for number, row in enumerate(islice(cycle(questions), num_rows), start=1):
            prompt = [{"role": "user", "content": f"Question {number}: {row['question']}"}]
            completion = [{"role": "assistant", "content": row["answer"]}]
            file.write(json.dumps({"prompt": prompt, "completion": completion}) + "\n")
    return path


def write_tokenizer(folder: Path, texts: Iterator[str]) -> Path:
    """Train a tokenizer on `texts` and write it for both sides."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY_SIZE, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(t) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": CHATML}))
    return folder


def measure_side(
    side: str, label: str, data: Path, tokenizer: Path, cache: Path, *, length: int, num_processes: int, budget: Budget
) -> dict[str, Any]:
    """Prepare once in a new process. Returns a row of plain values."""
    facts = cache / f"{label}.json"
    cache.mkdir(exist_ok=True)
    command = [
        *(sys.executable, Path(__file__).with_name("prepare_data.py")),
        *("--side", side, "--data", data, "--tokenizer-folder", tokenizer, "--cache", cache, "--facts-file", facts),
        *("--length", str(length), "--num-processes", str(num_processes)),
    ]
    # Print plain tracebacks, whose last line is not wrapped.
    environment = {"HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "TYPER_STANDARD_TRACEBACK": "1"}
    measured = run_measured(command, timeout_seconds=budget.timeout_seconds(), environment=environment)
    row = asdict(measured)
    output = row.pop("output")
    row["process_seconds"] = row.pop("seconds")
    if measured.status == "ok":
        row |= json.loads(facts.read_text())
    else:
        row["output"] = output[-2000:]
    return {"label": label, "side": side, **{k: v for k, v in row.items() if k not in ("steps", "peak_device_bytes")}}


def summarize(rows: list[dict[str, Any]], num_rows: int) -> list[dict[str, Any]]:
    """One line per label: medians over the rounds, and the speed relative to TRL, computed per round."""
    summary = []
    for label in dict.fromkeys(row["label"] for row in rows):
        own = [row for row in rows if row["label"] == label]
        bad = next((row for row in own if row["status"] != "ok"), None)
        if bad:
            summary.append({"label": label, "status": bad["status"]})
            continue
        seconds = statistics.median(row["seconds"] for row in own)
        peer = {row["round"]: row["seconds"] for row in rows if row["side"] == "trl" and row["status"] == "ok"}
        ratios = [peer[row["round"]] / row["seconds"] for row in own if row["round"] in peer]
        summary.append(
            {
                "label": label,
                "status": "ok",
                "seconds": seconds,
                "rows_per_second": num_rows / seconds,
                "tokens": own[0]["tokens"],
                "packed_rows": own[0]["packed_rows"],
                "peak_tree_rss_bytes": statistics.median(row["peak_tree_rss_bytes"] for row in own),
                "times_as_fast": statistics.median(ratios) if ratios else None,
            }
        )
    return summary


COLUMNS = ["", "seconds", "rows/s", "speed vs TRL", "peak memory", "packed rows", "filled"]


def describe(result: dict[str, Any]) -> str:
    """The caption of the table."""
    settings = result["settings"]
    return (
        f"preparing {settings['rows']:,} chats ({settings['distinct']:,} rows of {settings['data']}, repeated and "
        f"numbered; {settings['megabytes']:.0f} MB) from a JSONL file to packed rows of {settings['length']:,} tokens "
        f"on disk (best-fit decreasing); {settings['num_processes']} processes each, TRL {result['versions']['trl']}; "
        f"peak memory is the resident size of all processes together; median of {settings['rounds']} rounds"
    )


def table_cells(result: dict[str, Any]) -> list[list[str]]:
    """The rows of the table. A side without a number shows its status."""
    cells = []
    for line in result["summary"]:
        if line["status"] != "ok":
            cells.append([line["label"], line["status"], *["-"] * (len(COLUMNS) - 2)])
            continue
        ratio = line["times_as_fast"]
        full = line["tokens"] / (line["packed_rows"] * result["settings"]["length"])
        cells.append(
            [
                line["label"],
                f"{line['seconds']:.2f}" if line["seconds"] < 10 else f"{line['seconds']:.0f}",
                f"{line['rows_per_second']:,.0f}",
                "-" if ratio is None else f"{ratio:.1f}x" if ratio < 100 else f"{ratio:,.0f}x",
                gibibytes(line["peak_tree_rss_bytes"]),
                f"{line['packed_rows']:,}",
                f"{full:.2%}",
            ]
        )
    return cells


def main(
    data: Annotated[Path | None, typer.Option(help="JSONL with question and answer; GSM8K's training split.")] = None,
    rows: Annotated[int, typer.Option(help="Rows to prepare.")] = 300_000,
    length: Annotated[int, typer.Option(help="Tokens per packed row.")] = 1024,
    rounds: Annotated[int, typer.Option(help="Rounds.")] = 1,
    only: Annotated[str, typer.Option(help="Only `ours` or `trl`.")] = "",
    timeout_seconds: Annotated[float, typer.Option(help="Time limit of one process in seconds.")] = 3600,
    results_dir: Annotated[Path, typer.Option(help="Folder for the JSON result.")] = RESULTS,
) -> None:
    """Compare speed and peak memory of data preparation with TRL."""
    if only not in ("", *SIDES):
        raise typer.BadParameter(f"expected ours or trl, came {only!r}", param_hint="--only")
    sides = [only] if only else list(SIDES)
    if "trl" in sides and importlib.util.find_spec("trl") is None:
        console.print("TRL is not installed, so there is nothing to compare with: pip install -e '.[compare]'")
        raise typer.Exit(2)
    data = data or find_gsm8k()
    if data is None or not data.is_file():
        raise typer.BadParameter("expected GSM8K's training split as JSONL", param_hint="--data")
    hardware = require_hardware("cpu")
    budget = Budget(timeout_seconds)
    questions = read_questions(data)
    measured: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="lean_ft_preparation_") as name:
        folder = Path(name)
        source = write_rows(folder / "rows.jsonl", questions, rows)
        texts = (f"{row['question']}\n{row['answer']}" for row in questions)
        tokenizer = write_tokenizer(folder / "tokenizer", texts)
        settings = {"length": length, "num_processes": hardware["cores"], "budget": budget}
        for turn in range(rounds):
            for side in sides if turn % 2 == 0 else sides[::-1]:
                cache = folder / f"{side}_{turn}"
                for label in ("lean_ft", "lean_ft, second start") if side == "ours" else ("TRL",):
                    row = measure_side(side, label, source, tokenizer, cache, **settings)
                    measured.append({"round": turn, **row})
                    said = f"{row['seconds']:.2f} s" if row["status"] == "ok" else f"{row['status']}: {row['reason']}"
                    console.print(f"round {turn + 1}  {label:<22} {said}", markup=False)
        megabytes = source.stat().st_size / 1e6
    path = write_result(
        f"data_preparation_{rows}x{length}{f'_{only}' if only else ''}",
        benchmark="data_preparation",
        hardware=hardware,
        settings={
            "data": data.stem,
            "distinct": len(questions),
            "rows": rows,
            "megabytes": megabytes,
            "length": length,
            "rounds": rounds,
            "num_processes": hardware["cores"],
            "vocabulary_size": VOCABULARY_SIZE,
        },
        rows=measured,
        summary=summarize(measured, rows),
        folder=results_dir,
    )
    print_result(path, describe, COLUMNS, table_cells)


if __name__ == "__main__":
    typer.run(main)
