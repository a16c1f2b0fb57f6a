"""Compare lean_ft with torchtune's own recipes on a CPU: one model shape, the same rows and length, new processes that
alternate.

    python benchmarks/compare_torchtune.py --peer-python torchtune-env/bin/python                # full, Qwen2.5-0.5B, 8 x 512
    python benchmarks/compare_torchtune.py --peer-python torchtune-env/bin/python --recipe lora  # rank 16 on all linear layers
    python benchmarks/compare_torchtune.py --peer-python torchtune-env/bin/python --recipe dpo   # 4 pairs x 512, LoRA of rank 16
    python benchmarks/compare_torchtune.py --only lean --rounds 1

Create a separate environment for torchtune, because its last version needs an older torchao:

    python -m venv torchtune-env && torchtune-env/bin/python -m pip install -c constraints.txt torch
    torchtune-env/bin/python -m pip install --no-deps torchtune==0.6.1 torchao==0.10.0 torchdata==0.11.0
    torchtune-env/bin/python -m pip install omegaconf kagglehub numpy tqdm datasets huggingface-hub safetensors
    sentencepiece tiktoken \
        tokenizers blobfile typer psutil

Both sides use bfloat16 weights. torchtune_peer.py names torchtune's settings; SIDES has those of lean_ft. Each side
runs in a new process per round, and the order is reversed in every second round. A run is stopped before it saves. The
table compares each side of lean_ft with torchtune's fastest and leanest side.

dpo: the reference is the model without its adapter. Prompts are 1/8 of the length; lean_ft computes each once for its
two completions, and torchtune twice. tokens/s counts it twice for both.

Writes `results/compare_torchtune_[lora_|qlora_|dpo_]<shape>_<batch>x<length>_<hardware>.json`.
"""  # noqa: E501

import json
import statistics
import subprocess
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import product_rate
import typer
from compare_trl import COMPARISONS, LEAN, LORA, LORA_RANK
from measure import Budget, measure_training, names_in, recipe_command
from memory_ladder import outcome
from results import RESULTS, console, peaks, print_result, require_hardware, tokens_per_second, write_result
from shapes import num_parameters, write_model_folder, write_pair_rows, write_text_rows


class Recipe(StrEnum):
    """The kind of training."""

    full = "full"
    lora = "lora"
    qlora = "qlora"
    dpo = "dpo"


class Side(NamedTuple):
    """One side: `settings` of lean_ft, or `arguments` of torchtune_peer.py."""

    label: str
    settings: dict[str, Any] | None = None
    arguments: tuple[str, ...] | None = None


_PEER_LORA = ("--lora-rank", str(LORA_RANK))
_NF4 = {"lora.quantize": "nf4"}
SIDES: dict[Recipe, dict[str, Side]] = {
    Recipe.full: {
        "lean": Side("lean_ft: 8-bit AdamW in backward, selective checkpointing, compiled", LEAN),
        # The plan's peak is 3.65 GiB, about half of torchtune's without compilation.
        "half": Side(
            "lean_ft: 8-bit AdamW in backward, 30% of activations kept, compiled",
            LEAN | {"memory.activation_checkpointing": "budget", "memory.activation_budget": 0.3},
        ),
        "fast": Side("lean_ft: 8-bit AdamW in backward, compiled", LEAN | {"memory.activation_checkpointing": "none"}),
        "peer": Side("torchtune: AdamW in backward, checkpointing", arguments=()),
        "peer_compiled": Side("torchtune: AdamW in backward, checkpointing, compiled", arguments=("--compile",)),
    },
    Recipe.lora: {
        "lean": Side(
            "lean_ft: LoRA, full checkpointing, compiled",
            {name: value for name, value in LORA.items() if name != "memory.selective_keeps"}
            | {"memory.activation_checkpointing": "full"},
        ),
        "fast": Side("lean_ft: LoRA, selective checkpointing that keeps matrix products, compiled", LORA),
        "peer": Side("torchtune: LoRA, checkpointing", arguments=_PEER_LORA),
        "peer_compiled": Side("torchtune: LoRA, checkpointing, compiled", arguments=(*_PEER_LORA, "--compile")),
    },
    Recipe.qlora: {
        "lean": Side("lean_ft: QLoRA, selective checkpointing, compiled", LORA | _NF4),
        "peer": Side("torchtune: QLoRA, checkpointing", arguments=(*_PEER_LORA, "--quantize")),
    },
    Recipe.dpo: {
        "lean": Side("lean_ft: DPO with LoRA, selective checkpointing, compiled", COMPARISONS["dpo_lora"].settings),
        "peer": Side("torchtune: DPO with LoRA, checkpointing", arguments=_PEER_LORA),
        "peer_compiled": Side(
            "torchtune: DPO with LoRA, checkpointing, compiled", arguments=(*_PEER_LORA, "--compile")
        ),
    },
}


def write_token_rows(file: Path, model: Path, num_rows: int, length: int) -> Path:
    """Write JSONL rows of `length` token ids, `input_ids`, and return the path."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    texts = [json.loads(line)["text"] for line in write_text_rows(file, num_rows, length).read_text().splitlines()]
    file.write_text("".join(json.dumps({"input_ids": tokenizer.encode(text).ids[:length]}) + "\n" for text in texts))
    return file


def write_token_pairs(pairs: Path, model: Path, length: int) -> Path:
    """Write the token ids of a file of pairs, as torchtune's DPO recipe reads them, and return the path."""
    from tokenizers import Tokenizer

    tokenizer, lines = Tokenizer.from_file(str(model / "tokenizer.json")), []
    for line in pairs.read_text().splitlines():
        pair, row = json.loads(line), dict[str, list[int]]()
        prompt = tokenizer.encode(pair["prompt"]).ids
        for side in ("chosen", "rejected"):
            ids = (prompt + tokenizer.encode(pair[side], add_special_tokens=False).ids)[:length]
            row |= {f"{side}_input_ids": ids, f"{side}_labels": [-100] * len(prompt) + ids[len(prompt) :]}
        lines.append(json.dumps(row) + "\n")
    file = pairs.with_name("token_pairs.jsonl")
    file.write_text("".join(lines))
    return file


LEAN_FT_RECIPES = {Recipe.full: "full_finetune_single_device", Recipe.dpo: COMPARISONS["dpo_lora"].recipe}


def measure_sides(
    recipe: Recipe, names: list[str], peer_python: Path, *, shape: str, batch_size: int, length: int, rounds: int,
    steps: int, warmup_steps: int,
    budget: Budget,
) -> list[dict[str, Any]]:  # fmt: skip
    """Measure the sides in turns. Returns one row per process."""
    rows, num_steps = list[dict[str, Any]](), warmup_steps + steps + 1  # one more: the run is stopped before it saves
    prompt_tokens = round(length * COMPARISONS["dpo_lora"].prompt_share) if recipe is Recipe.dpo else 0
    tokens = batch_size * length * (2 if recipe is Recipe.dpo else 1)
    with tempfile.TemporaryDirectory(prefix="lean_ft_compare_") as folder:
        model = write_model_folder(shape, Path(folder) / "model")
        file, num_rows = Path(folder) / "rows.jsonl", num_steps * batch_size
        if recipe is Recipe.dpo:
            data = write_pair_rows(file, num_rows, prompt_tokens, length - prompt_tokens)
            peer_data = write_token_pairs(data, model, length)
        else:
            data = peer_data = write_token_rows(file, model, num_rows, length)

        def command(run: Path, side: Side) -> list:
            if side.arguments is not None:
                program = [peer_python, Path(__file__).with_name("torchtune_peer.py")]
                files = ["--model-folder", model, "--data", peer_data, "--run-directory", run]
                sizes = ["--batch-size", batch_size, "--length", length, "--prompt-tokens", prompt_tokens]
                return [*program, *files, *map(str, sizes), *side.arguments]
            own = {
                "model.path": model,
                "model.random_init": True,
                "data.source": data,
                "data.max_length": length,
                "batch_size": batch_size,
                "max_steps": num_steps,
                "epochs": 100,
                "device": "cpu",
                "output_dir": run,
            }
            if recipe is Recipe.dpo:
                own["data.max_prompt_length"] = prompt_tokens
            return recipe_command(
                LEAN_FT_RECIPES.get(recipe, "lora_finetune_single_device"), own | (side.settings or {})
            )

        for turn in range(rounds):
            for name in names if turn % 2 == 0 else names[::-1]:
                side = SIDES[recipe][name]
                rate = int(subprocess.check_output(product_rate.command("cpu"), text=True))
                row = measure_training(
                    lambda run, side=side: command(run, side),
                    steps=steps,
                    warmup_steps=warmup_steps,
                    tokens_per_step=tokens - (batch_size * prompt_tokens if side.arguments is None else 0),
                    timeout_seconds=budget.timeout_seconds(),
                    environment={"CUDA_VISIBLE_DEVICES": ""},
                )
                if row["status"] == "ok":
                    row["tokens_per_second"] = tokens / row["step_seconds"]
                rows.append({"side": name, "round": turn, "product_gflops": rate} | row)
                console.print(
                    f"{side.label}, round {turn + 1}: {outcome(row)}; products at {rate} GFLOP/s before", markup=False
                )
    return rows


def summarize(recipe: Recipe, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per side, with medians over the rounds. A failed round makes the side failed."""
    summary = []
    for name in dict.fromkeys(row["side"] for row in rows):
        own = [row for row in rows if row["side"] == name]
        bad = next((row for row in own if row["status"] != "ok"), None)
        line: dict[str, Any] = {"side": name, "label": SIDES[recipe][name].label, "status": "ok"}
        if bad is not None:
            line |= {"status": bad["status"], "reason": bad["reason"]}
        else:
            keys = ("tokens_per_second", "step_seconds", "peak_memory_bytes")
            line |= {key: statistics.median(row[key] for row in own) for key in keys}
        summary.append(line)
    return summary


COLUMNS = [
    "settings",
    "peak memory",
    "tokens/s",
    "speed vs torchtune's fastest setting",
    "memory vs torchtune's fastest setting",
    "speed vs torchtune's leanest setting",
    "memory vs torchtune's leanest setting",
]


def describe(result: dict[str, Any]) -> str:
    """The caption of the table."""
    settings = result["settings"]
    rates = [row["product_gflops"] for row in result["rows"]]
    kind = {
        "full": "Full fine-tuning",
        "lora": f"LoRA of rank {LORA_RANK} on all linear layers",
        "qlora": "QLoRA",
        "dpo": f"DPO with LoRA of rank {LORA_RANK} on all linear layers",
    }[settings["recipe"]]
    rows = "pairs of rows" if settings["recipe"] == "dpo" else "rows"
    return (
        f"{kind} of {settings['shape']} ({settings['parameters']:,} parameters, random weights), "
        f"{settings['batch_size']} {rows} of {settings['length']} tokens, bfloat16; torchtune 0.6.1's own recipe; the "
        "columns on the right divide lean_ft's number by that of torchtune's fastest setting, and of its setting with "
        f"the least memory; median of {settings['rounds']} alternating rounds of new processes, {settings['steps']} "
        f"steps each; before each run, bfloat16 matrix products reached {min(rates)} to {max(rates)} GFLOP/s"
    )


def table_cells(result: dict[str, Any]) -> list[list[str]]:
    """The rows of the table. A side without a number shows its status."""
    peers = [line for line in result["summary"] if line["side"].startswith("peer") and line["status"] == "ok"]
    others = [max(peers, key=lambda line: line["tokens_per_second"]), min(peers, key=peaks_of)] if peers else []
    cells = []
    for line in result["summary"]:
        if line["status"] != "ok":
            cells.append([line["label"], line["status"], "-", "-", "-", "-", "-"])
            continue
        ratios = ["-"] * 4
        if others and not line["side"].startswith("peer"):
            speeds = [f"{line['tokens_per_second'] / other['tokens_per_second']:.2f}x" for other in others]
            shares = [f"{peaks_of(line) / peaks_of(other):.2f}" for other in others]
            ratios = [speeds[0], shares[0], speeds[1], shares[1]]
        cells.append([line["label"], peaks(line), tokens_per_second(line["tokens_per_second"]), *ratios])
    return cells


def peaks_of(line: dict[str, Any]) -> float:
    return line["peak_memory_bytes"]


def main(
    peer_python: Annotated[Path, typer.Option(help="Python of the environment that has torchtune.")] = Path(
        "torchtune-env/bin/python"
    ),
    recipe: Annotated[Recipe, typer.Option(help="full, lora, qlora or dpo.")] = Recipe.full,
    shape: Annotated[str, typer.Option(help="Model shape of the family qwen2, from shapes.py.")] = "qwen2_5_0_5b",
    batch_size: Annotated[int | None, typer.Option(help="Rows per step: 8; for dpo pairs: 4.")] = None,
    length: Annotated[int, typer.Option(help="Tokens per row.")] = 512,
    rounds: Annotated[int, typer.Option(help="Rounds.")] = 3,
    steps: Annotated[int, typer.Option(help="Counted steps.")] = 3,
    warmup_steps: Annotated[int, typer.Option(help="Warm-up steps before the counted steps.")] = 2,
    only: Annotated[str, typer.Option(help="Names of sides, comma-separated.")] = "",
    timeout_seconds: Annotated[float, typer.Option(help="Time limit of one process in seconds.")] = 3600,
    results_dir: Annotated[Path, typer.Option(help="Folder for the JSON result.")] = RESULTS,
) -> None:
    """Compare speed and peak memory with torchtune's recipe."""
    names = names_in(only, SIDES[recipe])
    if any(SIDES[recipe][name].arguments is not None for name in names) and not peer_python.exists():
        console.print(
            f"{peer_python} does not exist. This file's first lines show how to make torchtune's environment."
        )
        raise typer.Exit(2)
    hardware = require_hardware("cpu")
    common: dict[str, Any] = {
        "shape": shape,
        "batch_size": batch_size or (4 if recipe is Recipe.dpo else 8),
        "length": length,
        "rounds": rounds,
        "steps": steps,
        "warmup_steps": warmup_steps,
    }
    peer = peer_python if peer_python.is_absolute() else Path.cwd() / peer_python
    rows = measure_sides(recipe, names, peer, **common, budget=Budget(timeout_seconds))
    which = "" if recipe is Recipe.full else f"{recipe}_"
    path = write_result(
        f"compare_torchtune_{which}{shape}_{common['batch_size']}x{length}",
        benchmark="compare_torchtune",
        hardware=hardware,
        settings={
            **common,
            "recipe": recipe,
            "parameters": num_parameters(shape),
            "sides": {name: SIDES[recipe][name]._asdict() for name in names},
        },
        rows=rows,
        summary=summarize(recipe, rows),
        folder=results_dir,
    )
    print_result(path, describe, COLUMNS, table_cells)


if __name__ == "__main__":
    typer.run(main)
