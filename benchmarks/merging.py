"""Compare `leanft merge` with mergekit: the numbers, CPU time and memory of merges of the same folders.

    python benchmarks/merging.py                    # small models, and folders of 2 GB
    python benchmarks/merging.py --numbers-only     # small models, in two minutes

mergekit is installed once into a separate environment, which sees the packages of this one, so that both use the same
torch. The environment variable MERGEKIT_PYTHON names the Python of another environment. DARE's random masks are those
of lean_ft on both sides, and mergekit's sort is made stable. Time is CPU seconds of all threads; memory is the peak
resident size above that before the merge. mergekit maps files into memory, so its figure has the pages that it read.

Writes `results/merging_<hardware>.json`.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from merge_measures import measured
from results import RESULTS, ROOT, describe_hardware, gibibytes, print_result, write_result
from vllm_server import installed_once

VERSION = "0.1.5"
COLUMNS = ["merge", "models", "equal numbers", "largest difference", "CPU s", "mergekit", "memory", "mergekit"]
SMALL, LARGE = "small", "2 GB"
# Options of lean_ft, and mergekit's method with the fields of its configuration.
CASES: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "linear": ({"weights": (0.7, 0.3)}, "linear", {}),
    "linear, not normalized": ({"weights": (0.7, 0.5), "normalize": False}, "linear", {"normalize": False}),
    "TIES": ({"method": "ties", "weights": (0.7, 0.4), "density": 0.2}, "ties", {"density": 0.2}),
    "TIES, not normalized": (
        {"method": "ties", "weights": (1.0, -0.4), "density": 0.5, "normalize": False},
        "ties",
        {"density": 0.5, "normalize": False},
    ),
    "DARE": ({"method": "dare", "weights": (0.7, 0.4), "density": 0.5, "seed": 3}, "dare_linear", {"density": 0.5}),
    "DARE with TIES": (
        {"method": "dare_ties", "weights": (0.7, 0.4), "density": 0.3, "seed": 4},
        "dare_ties",
        {"density": 0.3},
    ),
    "SLERP": ({"method": "slerp", "t": 0.3}, "slerp", {"t": 0.3}),
}
# Dtypes of the two models. The output has the first one; mergekit's is made the same.
DTYPES = [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16"), ("bfloat16", "float32")]
SIZES = {"hidden_size": 96, "intermediate_size": 203, "num_hidden_layers": 3}
LARGE_SIZES = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22}


def mergekit_python() -> Path:
    """The Python of an environment with mergekit, which sees the packages of this one."""

    def install(folder: Path) -> None:
        for packages in folder.glob("lib/python*/site-packages"):
            (packages / "beside.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        pip = [folder / "bin" / "python", "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--no-deps"]
        subprocess.run([*pip, f"mergekit=={VERSION}", "immutables>=0.21", "click>=8.2.1,<9"], check=True)

    return installed_once(f"mergekit-{VERSION}", "MERGEKIT_PYTHON", install)


def write_models(place: Path, dtype: str, sizes: dict[str, int], shard: str) -> None:
    """Write random Qwen2 models: a base, and two with changes from it."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 769}
    torch.manual_seed(0)
    config = Qwen2Config(**sizes, **heads, tie_word_embeddings=False, max_position_embeddings=512)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(base := place / f"{dtype}-0", max_shard_size=shard)
    del model
    for i in (1, 2):
        model = AutoModelForCausalLM.from_pretrained(base, dtype=getattr(torch, dtype))
        for parameter in model.parameters():  # every number gets a share of another one
            parameter.data += 0.3 * parameter.data.view(-1).roll(7919 * i).view(parameter.shape)
        model.save_pretrained(place / f"{dtype}-{i}", max_shard_size=shard)


def ours(file: Path) -> None:
    """Merge the cases by lean_ft, in a separate process."""
    from lean_ft.merging import MergeSettings, merge_models

    results = list[dict[str, float]]()
    for case in json.loads(file.read_text()):
        with measured(results):
            merge_models(case["models"], case["output"], MergeSettings(**case["options"]))
    file.with_suffix(".results.json").write_text(json.dumps(results))


def case_of(name: str, models: list[Path], base: Path, dtype: str, output: Path) -> dict[str, Any]:
    """A merge as both sides read it. The output has `dtype`."""
    options, method, fields = CASES[name]
    has_base = method not in ("linear", "slerp")
    weights = options.get("weights", (1.0, 1.0))
    inputs = [
        {"model": str(model), "parameters": {"weight": weight} if method != "slerp" else {}}
        for model, weight in zip(models, weights, strict=True)
    ]
    config: dict[str, Any] = {"merge_method": method, "models": inputs, "parameters": fields, "out_dtype": dtype}
    if method != "linear":
        config |= {"base_model": str(base if has_base else models[0]), "dtype": "float32"}
    case = {"models": [*map(str, models)], "output": str(output), "config": config, "density": options.get("density")}
    return case | {"options": options | ({"base": str(base)} if has_base else {}), "seed": options.get("seed")}


def merge_all(side: str, cases: list[dict[str, Any]], place: Path, timeout_seconds: float) -> list[dict[str, float]]:
    """Merge the cases in one process of a side. Of several, the first is done twice, so that no import is counted."""
    file = place / f"{side}.json"
    cases = [{**case, "output": f"{case['output']}-{side}"} for case in cases]
    first = [{**cases[0], "output": f"{cases[0]['output']}-first"}] if cases[1:] else []
    file.write_text(json.dumps([*first, *cases]))
    script = [__file__, "--worker"] if side == "ours" else [str(ROOT / "benchmarks" / "mergekit_peer.py")]
    python = sys.executable if side == "ours" else mergekit_python()
    variables = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    subprocess.run([python, *script, file], env=variables, check=True, timeout=timeout_seconds)
    return json.loads(file.with_suffix(".results.json").read_text())[len(first) :]


def _differences(folder: Path, other: Path) -> dict[str, Any]:
    """The share of numbers with equal bits, and the largest difference relative to the tensor's largest number."""
    import torch

    from lean_ft.models.stored_weights import stored_tensors

    ours, theirs = stored_tensors(folder), stored_tensors(other)
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    equal = total = 0
    largest = 0.0
    for name, stored in ours.items():
        a, b = stored.read(), theirs[name].read()
        assert a.dtype == b.dtype and a.shape == b.shape, name
        equal += int((a == b).sum())
        total += a.numel()
        scale = b.abs().max().float().item() or 1.0
        largest = max(largest, (a.float() - b.float()).abs().max().item() / scale)
    return {"numbers": total, "equal": equal, "largest": largest, "epsilon": torch.finfo(a.dtype).eps}


def _is_large(row: dict[str, Any]) -> bool:
    """Whether the merge is large enough for its time and memory to be those of the weights."""
    return row["numbers"] > 10**8


def describe(result: dict[str, Any]) -> str:
    """The caption of the table."""
    settings, least = result["settings"], min(row["numbers"] for row in result["rows"])
    return (
        f"merges by lean_ft and by mergekit {settings['mergekit']}, two models of random weights ({least:,} numbers, "
        "or 2 GB); differences relative to a tensor's largest number; memory above that before the merge"
    )


def table_cells(result: dict[str, Any]) -> list[list[str]]:
    """The rows of the table."""
    return [
        [
            row["label"],
            row["models"],
            "all" if row["equal"] == row["numbers"] else f"all but {row['numbers'] - row['equal']:,}",
            f"{row['largest']:.1e}" if row["largest"] else "0",
            *(f"{row[side]['seconds']:.0f}" if _is_large(row) else "-" for side in ("ours", "mergekit")),
            *(gibibytes(row[side]["peak_bytes"]) if _is_large(row) else "-" for side in ("ours", "mergekit")),
        ]
        if row["status"] == "ok"
        else [row["label"], row["models"], *["-"] * 6]
        for row in result["rows"]
    ]


def main(
    file: Annotated[Path | None, typer.Argument(hidden=True)] = None,
    numbers_only: Annotated[bool, typer.Option("--numbers-only", help="Skip the folders of 2 GB.")] = False,
    timeout_seconds: Annotated[float, typer.Option(help="Time limit of a merge in seconds.")] = 600.0,
    results_dir: Annotated[Path, typer.Option(help="Folder for the JSON result.")] = RESULTS,
    worker: Annotated[bool, typer.Option("--worker", hidden=True)] = False,
) -> None:
    """Merge on both sides, print the table and write the result."""
    if worker and file is not None:
        ours(file)
        return
    rows = list[dict[str, Any]]()
    groups = [(SMALL, SIZES, DTYPES, [*CASES], "200KB")]
    if not numbers_only:
        groups.append((LARGE, LARGE_SIZES, [("bfloat16", "bfloat16")], ["linear", "TIES"], "500MB"))
    for size, sizes, dtypes, names, shard in groups:
        with tempfile.TemporaryDirectory(prefix="lean_ft_merging_") as place:
            folder = Path(place)
            for dtype in {dtype for pair in dtypes for dtype in pair}:
                write_models(folder, dtype, sizes, shard)
            pairs = [(one, other, name) for one, other in dtypes for name in names]
            cases = [
                case_of(
                    name, [folder / f"{one}-1", folder / f"{other}-2"], folder / f"{one}-0", one, folder / f"out-{i}"
                )
                for i, (one, other, name) in enumerate(pairs)
            ]
            at_once = len(cases) if size == SMALL else 1  # outputs of 2 GB are compared and deleted one by one
            for i in range(0, len(cases), at_once):
                some = cases[i : i + at_once]
                sides = [merge_all(side, some, folder, timeout_seconds) for side in ("ours", "mergekit")]
                for (one, other, name), case, mine, theirs in zip(pairs[i : i + at_once], some, *sides, strict=True):
                    models = ", ".join([size] * (size == LARGE) + [one if one == other else f"{one} and {other}"])
                    row = {"label": name, "models": models, "status": "ok", "reason": None}
                    outputs = [Path(f"{case['output']}-{side}") for side in ("ours", "mergekit")]
                    rows.append(row | {"ours": mine, "mergekit": theirs} | _differences(*outputs))
                    for output in outputs:
                        shutil.rmtree(output)
                path = write_result(
                    "merging",
                    benchmark="merging",
                    hardware=describe_hardware("cpu"),
                    settings={"mergekit": VERSION, "sizes": SIZES, "large_sizes": LARGE_SIZES},
                    rows=rows,
                    folder=results_dir,
                )
                print_result(path, describe, COLUMNS, table_cells)


if __name__ == "__main__":
    typer.run(main)
