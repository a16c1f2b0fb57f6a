"""Find near-duplicates among a million rows with planted ones: CPU time, memory, recall and precision.

    python benchmarks/near_duplicates.py                                     # 1,000,000 rows of 200 words
    python benchmarks/near_duplicates.py --rows 20000 --peer-python PYTHON   # PYTHON has datasketch

A tenth of the rows repeat an earlier row with 0 to 7 words replaced, so the similarities of these pairs, the Jaccard
index of their runs of five words, are known. Each side reads the same JSONL file in a new process: the rows' words,
signatures of 20 bands of 6 hash functions, candidates and their exact comparison. datasketch reads the first
`--peer-rows` rows, because its index of all rows does not fit in memory; its figures per row are comparable. A third
process compares the rows with the questions of a made-up evaluation task, 1% of which rows contain.

CPU time is that of the process, in all threads; peak memory is its largest resident size (VmHWM). Writes
`results/near_duplicates_<rows>_<hardware>.json`.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

WORDS, SHINGLE, SIMILAR = 200, 5, 0.8
BANDS, PER_BAND = 20, 6
PLANTED, MOST_REPLACED = 10, 7  # each 10th row; words replaced in it
VOCABULARY = 50_000
QUESTIONS = 10_000
QUESTION_WORDS = 30


# Rows -----------------------------------------------------------------------------------------------------------------


def write_rows(path: Path, count: int) -> list[tuple[int, int, int]]:
    """Write the rows; return the planted ones as (row, earlier row, replaced words)."""
    draw = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    vocabulary = np.array(["".join(draw.choice(letters, draw.integers(2, 10))) + str(i) for i in range(VOCABULARY)])
    planted, originals = [], list[tuple[int, list[str]]]()
    with path.open("w", encoding="utf-8") as file:
        for row in range(count):
            if row % PLANTED == PLANTED - 1:
                earlier, words = originals[draw.integers(len(originals))]
                replaced = int(draw.integers(MOST_REPLACED + 1))
                words = list(words)
                # Far enough apart that no run of words loses two of them.
                for place in draw.choice(np.arange(5, WORDS - 5, 10), replaced, replace=False).tolist():
                    words[place] = f"new{row}x{place}"
                planted.append((row, earlier, replaced))
            else:
                words = vocabulary[
                    (VOCABULARY * draw.random(WORDS) ** 2).astype(np.int64)
                ].tolist()  # some are frequent
                originals = [*originals[-999:], (row, words)]
            file.write(json.dumps({"text": " ".join(words)}) + "\n")
    return planted


def shingles(line: str) -> set[tuple[str, ...]]:
    words = json.loads(line)["text"].split()
    return {tuple(words[i : i + SHINGLE]) for i in range(len(words) - SHINGLE + 1)}


def check(path: Path, planted: list[tuple[int, int, int]], found: list[list[int]]) -> dict[str, Any]:
    """Recall by planted similarity, and the found pairs whose similarity, computed from sets, is too small."""
    offsets = np.append(0, np.cumsum([len(line) for line in path.open("rb")]))
    by_row = dict(found)
    with path.open("rb") as file:

        def line(row: int) -> str:
            file.seek(offsets[row])
            return file.readline().decode()

        def similarity(row: int, other: int) -> float:
            ours, theirs = shingles(line(row)), shingles(line(other))
            return len(ours & theirs) / len(ours | theirs)

        too_small = sum(similarity(*pair) < SIMILAR for pair in found)
    lost = np.arange(MOST_REPLACED + 1) * SHINGLE
    similarities = (WORDS - SHINGLE + 1 - lost) / (WORDS - SHINGLE + 1 + lost)
    of_kind, met = Counter(kind for _, _, kind in planted), Counter(k for row, _, k in planted if row in by_row)
    rows = [
        {"replaced": k, "similarity": float(similarities[k]), "planted": of_kind[k], "found": met[k]}
        for k in sorted(of_kind)
    ]
    similar = [one for one in rows if one["similarity"] >= SIMILAR]
    recall = sum(one["found"] for one in similar) / max(1, sum(one["planted"] for one in similar))
    return {"recall": recall, "precision": 1 - too_small / max(1, len(found)), "by_similarity": rows}


# Sides, in processes of their own -------------------------------------------------------------------------------------


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM"))


def ours(path: Path, cache: Path) -> dict[str, Any]:
    """Pairs that `leanft data stats --duplicates` finds."""
    from lean_ft.data.documents import renderer_of
    from lean_ft.data.near_duplicates import near_duplicates
    from lean_ft.settings import SFTDataConfig
    from lean_ft.settings.model import ModelConfig
    from lean_ft.tokenizers import load_tokenizer

    config = SFTDataConfig(source=str(path), cache_dir=cache)
    reader = renderer_of(config, load_tokenizer(ModelConfig(path="tiny"))).reader
    found = near_duplicates(config, reader)
    return {"rows": found.num_trained, "pairs": np.stack([found.rows, found.of], axis=1).tolist()}


def contamination(path: Path, cache: Path) -> dict[str, Any]:
    """Questions of a made-up task that `leanft data stats --contamination` finds; 1% are parts of rows."""
    from lean_ft.data.contamination import task_overlaps
    from lean_ft.data.documents import renderer_of
    from lean_ft.data.sources import RowSources
    from lean_ft.settings import SFTDataConfig
    from lean_ft.settings.model import ModelConfig
    from lean_ft.tokenizers import load_tokenizer

    with path.open(encoding="utf-8") as file:
        texts = [json.loads(line)["text"].split()[50 : 50 + QUESTION_WORDS] for line, _ in zip(file, range(QUESTIONS))]  # noqa: B905
    draw = np.random.default_rng(1)
    questions = [words if i % 100 == 0 else draw.permutation(words).tolist() for i, words in enumerate(texts)]
    config = SFTDataConfig(source=str(path), cache_dir=cache)
    reader = renderer_of(config, load_tokenizer(ModelConfig(path="tiny"))).reader
    asked = (("made_up", " ".join(words)) for words in questions)
    [task], num_rows = task_overlaps(asked, RowSources.of(config).rows(), reader)
    planted = {i + 1 for i in range(0, len(questions), 100)}
    return {"rows": num_rows, "right": {one.number for one in task.overlaps} == planted, "overlaps": len(task.overlaps)}


def datasketch(path: Path, cache: Path) -> dict[str, Any]:
    """Pairs that datasketch finds: the first earlier row of a band that is similar enough and stays itself."""
    from datasketch import MinHash, MinHashLSH

    index, kept, pairs = MinHashLSH(params=(BANDS, PER_BAND), num_perm=BANDS * PER_BAND), {}, []
    with path.open(encoding="utf-8") as file:
        for row, line in enumerate(file):
            own = shingles(line)
            signature = MinHash(BANDS * PER_BAND)
            signature.update_batch([" ".join(shingle).encode() for shingle in own])
            for other in sorted(index.query(signature)):
                if len(own & kept[other]) / len(own | kept[other]) >= SIMILAR:
                    pairs.append([row, other])
                    break
            else:
                index.insert(row, signature)
                kept[row] = own
    return {"rows": row + 1, "pairs": pairs}


SIDES = {"ours": ours, "datasketch": datasketch, "contamination": contamination}


def measure(side: str, path: Path, folder: Path, python: str) -> dict[str, Any]:
    facts = folder / f"{side}.json"
    command = [python, __file__, "--side", side, "--data", str(path), "--facts", str(facts)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return {"side": side, "status": "failed", "reason": reason}
    return {"side": side, "status": "ok", **json.loads(facts.read_text(encoding="utf-8"))}


COLUMNS = ["", "rows", "CPU s", "CPU ms per row", "peak memory", "recall", "precision"]


def describe(result: dict[str, Any]) -> str:
    return f"near-duplicates among rows of {WORDS} words, a tenth of them planted"


def table_cells(result: dict[str, Any]) -> list[list[str]]:
    return [list(_cells(row)) for row in result["rows"]]


def _cells(row: dict[str, Any]) -> Iterator[str]:
    yield row["side"]
    if row["status"] != "ok":
        yield from [row["status"], *["-"] * (len(COLUMNS) - 2)]
        return
    yield f"{row['rows']:,}"
    yield f"{row['cpu_seconds']:.0f}"
    yield f"{1000 * row['cpu_seconds'] / row['rows']:.3f}"
    yield f"{row['peak_bytes'] / 2**30:.2f} GiB"
    yield f"{row['recall']:.2%}" if "recall" in row else "-"
    yield f"{row['precision']:.2%}" if "precision" in row else "-"


def main(
    rows: Annotated[int, typer.Option(help="Rows.")] = 1_000_000,
    peer_rows: Annotated[int, typer.Option(help="Rows that datasketch reads.")] = 20_000,
    peer_python: Annotated[str, typer.Option(help="A Python that has datasketch.")] = sys.executable,
    results_dir: Annotated[Path | None, typer.Option(help="Folder for the JSON result.")] = None,
) -> None:
    """Measure near-duplicates and contamination, and compare with datasketch."""
    from results import RESULTS, print_result, require_hardware, write_result

    hardware, measured = require_hardware("cpu"), []
    with tempfile.TemporaryDirectory(prefix="lean_ft_duplicates_") as name:
        folder = Path(name)
        path, few = folder / "rows.jsonl", folder / "few.jsonl"
        planted = write_rows(path, rows)
        of_few = write_rows(few, min(peer_rows, rows))
        for one, file, python in (
            ("ours", path, sys.executable),
            ("datasketch", few, peer_python),
            ("contamination", path, sys.executable),
        ):
            row = measure(one, file, folder, python)
            if "pairs" in row:
                row |= check(file, of_few if file == few else planted, row.pop("pairs"))
            measured.append(row)
    settings = {"rows": rows, "peer_rows": peer_rows, "words": WORDS, "shingle": SHINGLE, "similar": SIMILAR}
    settings |= {"bands": BANDS, "per_band": PER_BAND, "questions": QUESTIONS, "question_words": QUESTION_WORDS}
    written = write_result(
        f"near_duplicates_{rows}",
        benchmark=Path(__file__).name,
        hardware=hardware,
        settings=settings,
        rows=measured,
        folder=results_dir or RESULTS,
    )
    print_result(written, describe, COLUMNS, table_cells)


def run_side(arguments: list[str]) -> None:
    """Run one side, and write what it found and used."""
    given = dict(zip(arguments[::2], arguments[1::2], strict=True))
    path, facts = Path(given["--data"]), Path(given["--facts"])
    found = SIDES[given["--side"]](path, facts.parent / "cache")
    used = {"cpu_seconds": time.process_time(), "peak_bytes": peak_bytes()}
    facts.write_text(json.dumps(found | used), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--side"]:  # a process of `measure`
        run_side(sys.argv[1:])
    else:
        typer.run(main)
