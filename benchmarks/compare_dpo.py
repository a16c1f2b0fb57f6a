"""dpo against TRL's DPOTrainer, and against itself where it computes every prompt twice, in fresh processes that take turns.

    python benchmarks/compare_trl.py --objective dpo                       # Qwen2.5-0.5B, 4 pairs x 512, all of COMPARISONS
    python benchmarks/compare_trl.py --objective dpo --only long_prompts   # one of them
    python benchmarks/compare_trl.py --objective dpo --shape tiny --rounds 1

Ours is as `compare_trl.py` says of a recipe, with prompts shared as by default; TRL's is its default, which `trl_dpo.py`
states and the result records. Prompts are an eighth of the length; in `long_prompts` three quarters, which is the case that
shared prompts are for.

Speeds are in the tokens of rows that each have their prompt, whoever computes how many of them: pairs a second times 2 x
length. A cache of references is filled before the steps that are timed, on both sides.
"""

import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import product_rate
import typer
from compare_trl import LORA_RANK, RECIPES, Recipe
from measure import Budget, measure_training, recipe_command
from memory_ladder import outcome
from results import console, peaks, print_result, require_hardware, tokens_per_second, write_result
from shapes import EMBEDDED_MODEL, num_parameters, write_model_folder, write_pair_rows

OURS, SEPARATE, TRL = "ours", "ours, each its prompt", "trl"


class Comparison(NamedTuple):
    """What is run in turns, and how each side runs it."""

    title: str
    recipe: Recipe
    settings: dict[str, Any]
    other: str  # what ours is compared with
    prompt_share: float = 1 / 8  # of the length
    trl_arguments: tuple[str, ...] = ()


COMPARISONS = {
    "cached": Comparison(
        "full, references cached",
        Recipe.full,
        {"reference.kind": "cached"},
        TRL,
        trl_arguments=("--reference", "cached"),
    ),
    "resident": Comparison("full, reference resident", Recipe.full, {"reference.kind": "model"}, TRL),
    "lora": Comparison(
        f"LoRA of rank {LORA_RANK}",
        Recipe.lora,
        {"reference.kind": "adapter_off", "memory.selective_keeps": "attention"},  # of rows twice as many
        TRL,
        trl_arguments=("--lora-rank", str(LORA_RANK)),
    ),
    "long_prompts": Comparison(
        "full, references cached, prompts of three quarters", Recipe.full, {"reference.kind": "cached"}, SEPARATE, 3 / 4
    ),
}


def ours_command(
    comparison: Comparison, side: str, model: Path, rows: Path, run: Path, *, length: int, batch_size: int, steps: int,
    device: str,
) -> list:  # fmt: skip
    settings = {
        "model.path": model,
        "model.random_init": True,
        "data.source": rows,
        "data.max_length": length,
        "data.max_prompt_length": round(length * comparison.prompt_share),
        "data.cache_dir": run.parent / "cache",
        "data.shared_prompt": side == OURS,
        "batch_size": batch_size,
        "max_steps": steps,
        "epochs": 100,
        "device": device,
        "output_dir": run,
        **RECIPES[comparison.recipe].settings,
        **comparison.settings,
    }
    return recipe_command("dpo" if comparison.recipe is Recipe.full else "lora_dpo_single_device", settings)


def trl_command(
    comparison: Comparison, model: Path, rows: Path, run: Path, facts: Path, *, length: int, batch_size: int, steps: int
) -> list:
    return [
        sys.executable,
        Path(__file__).with_name("trl_dpo.py"),
        *("--model-folder", model, "--data", rows, "--run-directory", run, "--facts-file", facts),
        *("--batch-size", str(batch_size), "--length", str(length), "--steps", str(steps)),
        *comparison.trl_arguments,
    ]


def measure_comparison(
    name: str,
    *,
    sides: list[str],
    shape: str,
    batch_size: int,
    length: int,
    rounds: int,
    steps: int,
    warmup_steps: int,
    settle_steps: int,
    device: str,
    budget: Budget,
    tokenizer_folder: Path = EMBEDDED_MODEL,
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """Measures the sides of one comparison in turns; returns a row for each process, and what TRL's defaults came to."""
    comparison, rows = COMPARISONS[name], list[dict[str, Any]]()
    prompt = round(length * comparison.prompt_share)
    num_steps = max(warmup_steps + steps, settle_steps) + 1  # one more than is waited for, so that nothing is saved
    environment = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    separate_tokens = 2 * batch_size * length
    with tempfile.TemporaryDirectory(prefix="lean_ft_compare_") as folder:
        model, facts = (
            write_model_folder(shape, Path(folder) / "model", tokenizer_folder),
            Path(folder) / "defaults.json",
        )
        text = write_pair_rows(Path(folder) / "pairs.jsonl", num_steps * batch_size, prompt, length - prompt)
        common: dict[str, Any] = {"length": length, "batch_size": batch_size, "steps": num_steps}
        for turn in range(rounds):
            for side in sides if turn % 2 == 0 else sides[::-1]:

                def command(run: Path, side: str = side) -> list:
                    if side == TRL:
                        return trl_command(comparison, model, text, run, facts, **common)
                    return ours_command(comparison, side, model, text, run, device=device, **common)

                computed = batch_size * (2 * length - prompt) if side == OURS else separate_tokens
                rate = int(subprocess.check_output(product_rate.command(device), text=True))
                row = measure_training(
                    command,
                    steps=steps,
                    warmup_steps=warmup_steps,
                    tokens_per_step=computed,
                    timeout_seconds=budget.timeout_seconds(),
                    settle_steps=settle_steps,
                    environment=environment,
                )
                if row["status"] == "ok":
                    row |= {"computed_tokens": computed, "tokens_per_second": separate_tokens / row["step_seconds"]}
                rows.append({"comparison": name, "side": side, "round": turn, "product_gflops": rate, **row})
                line = f"{comparison.title:<52} round {turn + 1}  {side:<22} {outcome(row)}"
                console.print(f"{line}; products at {rate} GFLOP/s before", markup=False)
        return rows, json.loads(facts.read_text()) if facts.exists() else None


def summarize(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line a comparison: both sides' medians over the rounds, and the ratios, each formed within a round."""
    summary = []
    for name in dict.fromkeys(row["comparison"] for row in rows):
        own = [row for row in rows if row["comparison"] == name]
        line: dict[str, Any] = {"comparison": name}
        for side in (OURS, COMPARISONS[name].other):
            of_side = [row for row in own if row["side"] == side]
            # One failure among the rounds is told as such: a number from the rest would hide it.
            bad = next((row for row in of_side if row["status"] != "ok"), None)
            if bad is not None:
                line[side] = {"status": bad["status"], "reason": bad["reason"]}
            elif of_side:
                medians = ("tokens_per_second", "peak_memory_bytes")
                line[side] = {"status": "ok"} | {key: statistics.median(row[key] for row in of_side) for key in medians}
        both = [line.get(side, {}).get("status") == "ok" for side in (OURS, COMPARISONS[name].other)]
        if all(both):
            rounds = {row["round"]: {} for row in own}
            for row in own:
                rounds[row["round"]][row["side"]] = row
            pairs = [(sides[OURS], sides[COMPARISONS[name].other]) for sides in rounds.values()]
            for ratio, key in (("speed_ratio", "tokens_per_second"), ("memory_ratio", "peak_memory_bytes")):
                line[ratio] = statistics.median(ours[key] / theirs[key] for ours, theirs in pairs)
        summary.append(line)
    return summary


COLUMNS = ["dpo", "compared with", "ours: peak", "its peak", "ours / it", "ours: tokens/s", "its tokens/s", "ours / it"]


def describe(result: dict[str, Any]) -> str:
    """What the table is of."""
    settings, trl = result["settings"], result["versions"]["trl"]
    rates = [row["product_gflops"] for row in result["rows"]]
    return (
        f"DPO of {settings['shape']} ({settings['parameters']:,} parameters, random weights), {settings['batch_size']} pairs "
        f"of 2 x {settings['length']} tokens, prompts of an eighth of that but where it is said; lean_ft in bfloat16 as in "
        f"the comparison of finetuning, prompts shared; TRL {trl} in its defaults (float32 weights, bfloat16 autocast, "
        "gradient checkpointing, AdamW; its fused head needs Triton and takes its fallback on a CPU); tokens are those of rows "
        f"that each have their prompt; medians over {settings['rounds']} alternating rounds of fresh processes, "
        f"{settings['steps']} steps each; before each, bfloat16 products ran at {min(rates)} to {max(rates)} GFLOP/s"
    )


def table_cells(result: dict[str, Any]) -> list[list[str]]:
    """The table's text; a side that gave no number shows why."""
    cells = []
    for line in result["summary"]:
        comparison = COMPARISONS[line["comparison"]]
        sides = [{"status": "-"} | line.get(side, {}) for side in (OURS, comparison.other)]
        memory = [peaks(side) if side["status"] == "ok" else side["status"] for side in sides]
        speeds = [tokens_per_second(side.get("tokens_per_second")) for side in sides]
        memory_ratio = f"{line['memory_ratio']:.2f}" if "memory_ratio" in line else "-"
        speed_ratio = f"{line['speed_ratio']:.2f}x" if "speed_ratio" in line else "-"
        other = "TRL" if comparison.other == TRL else comparison.other
        cells.append([comparison.title, other, *memory, memory_ratio, *speeds, speed_ratio])
    return cells


def compare(
    *,
    shape: str,
    batch_size: int,
    length: int,
    rounds: int,
    steps: int,
    warmup_steps: int,
    settle_steps: int,
    only: str,
    device: str,
    budget: Budget,
    results_dir: Path,
) -> None:
    """Compares dpo with TRL's DPOTrainer, writes the result and prints its table."""
    names = [only] if only else [*COMPARISONS]
    if only not in ("", *COMPARISONS):
        raise typer.BadParameter(f"expected one of {', '.join(COMPARISONS)}, came {only!r}", param_hint="--only")
    if importlib.util.find_spec("trl") is None and any(COMPARISONS[name].other == TRL for name in names):
        console.print("TRL is not installed, so there is nothing to compare with: pip install 'lean-ft[compare]'")
        raise typer.Exit(2)
    hardware = require_hardware(device)
    console.print(f"{shape}, {num_parameters(shape):,} parameters, {batch_size} pairs, on {hardware.short_name}")
    rows, trl_defaults = list[dict[str, Any]](), dict[str, Any]()
    for name in names:
        found, defaults = measure_comparison(
            name,
            sides=[OURS, COMPARISONS[name].other],
            shape=shape,
            batch_size=batch_size,
            length=length,
            rounds=rounds,
            steps=steps,
            warmup_steps=warmup_steps,
            settle_steps=settle_steps if hardware["device"] == "cpu" else 0,
            device=device,
            budget=budget,
        )
        rows += found
        trl_defaults[name] = defaults
    path = write_result(
        f"compare_dpo_{shape}_{batch_size}x{length}" + (f"_{only}" if only else ""),
        benchmark="compare_dpo",
        hardware=hardware,
        settings={
            "shape": shape,
            "parameters": num_parameters(shape),
            "batch_size": batch_size,
            "length": length,
            "rounds": rounds,
            "steps": steps,
            "warmup_steps": warmup_steps,
            "settle_steps": settle_steps,
            "ours": {name: RECIPES[COMPARISONS[name].recipe].settings | COMPARISONS[name].settings for name in names},
            "trl_defaults": trl_defaults,
        },
        rows=rows,
        summary=summarize(rows),
        folder=results_dir,
    )
    print_result(path, describe, COLUMNS, table_cells)
