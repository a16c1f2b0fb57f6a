"""grpo against TRL's GRPOTrainer: one prompt a step, answered several times at a fixed length, in fresh processes in turns.

    python benchmarks/compare_trl.py --objective grpo                       # Qwen2.5-0.5B, 8 answers, 128 + 128 tokens
    python benchmarks/compare_trl.py --objective grpo --shape tiny --rounds 1

Ours is as `compare_trl.py` says of full finetuning, and samples in the same bfloat16 weights; TRL's is its default, which
`trl_grpo.py` states and the result records. Both learn by dapo's loss, without a reference. A step's time is told whole, and what
of it sampling and rewards take.
"""

import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import product_rate
import typer
from compare_trl import RECIPES, SIDES, Recipe
from measure import Budget, measure_training, recipe_command
from memory_ladder import outcome
from results import console, peaks, print_result, require_hardware, write_result
from shapes import num_parameters, write_model_folder, write_pair_rows

SETTINGS = RECIPES[Recipe.full].settings
COLUMNS = ["grpo", "peak", "steps an hour", "seconds a step", "of them sampling", "learning"]


def ours_command(
    model: Path, rows: Path, run: Path, *, answers: int, tokens: tuple[int, int], steps: int, device: str
) -> list:
    """tokens: of the prompt and of an answer."""
    settings = {
        "model.path": model,
        "model.random_init": True,
        "data.source": rows,
        "data.chat": False,
        "data.max_prompt_length": tokens[0],
        "rewards": f"[{Path(__file__).with_name('letters_reward.py')}:letters]",
        "generation.num_answers": answers,
        "generation.max_new_tokens": tokens[1],
        "batch_size": answers,
        "max_steps": steps,
        "epochs": 100,
        "sample_every": 0,
        "device": device,
        "output_dir": run,
        **SETTINGS,
    }
    return recipe_command("grpo", settings)


def trl_command(
    model: Path, rows: Path, run: Path, facts: Path, *, answers: int, tokens: tuple[int, int], steps: int
) -> list:
    return [
        sys.executable,
        Path(__file__).with_name("trl_grpo.py"),
        *("--model-folder", model, "--data", rows, "--run-directory", run, "--facts-file", facts),
        *("--answers", str(answers), "--prompt-tokens", str(tokens[0]), "--new-tokens", str(tokens[1])),
        *("--steps", str(steps)),
    ]


def measure_sides(
    sides: list[str],
    *,
    shape: str,
    answers: int,
    tokens: tuple[int, int],
    rounds: int,
    steps: int,
    warmup_steps: int,
    settle_steps: int,
    device: str,
    budget: Budget,
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """Measures the sides in turns; returns a row for each process, and what TRL's defaults came to."""
    num_steps = max(warmup_steps + steps, settle_steps) + 1  # one more than is waited for, so that nothing is saved
    environment = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    rows = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="lean_ft_compare_") as folder:
        model, facts = write_model_folder(shape, Path(folder) / "model"), Path(folder) / "defaults.json"
        text = write_pair_rows(Path(folder) / "prompts.jsonl", num_steps, tokens[0], 1)
        common: dict[str, Any] = {"answers": answers, "tokens": tokens, "steps": num_steps}
        for turn in range(rounds):
            for side in sides if turn % 2 == 0 else sides[::-1]:

                def command(run: Path, side: str = side) -> list:
                    if side == "trl":
                        return trl_command(model, text, run, facts, **common)
                    return ours_command(model, text, run, device=device, **common)

                rate = int(subprocess.check_output(product_rate.command(device), text=True))
                row = measure_training(
                    command,
                    steps=steps,
                    warmup_steps=warmup_steps,
                    tokens_per_step=answers * sum(tokens),
                    timeout_seconds=budget.timeout_seconds(),
                    settle_steps=settle_steps,
                    environment=environment,
                )
                rows.append({"side": side, "round": turn, "product_gflops": rate, **row})
                line = f"round {turn + 1}  {side:<5} {outcome(row)}"
                console.print(f"{line}; products at {rate} GFLOP/s before", markup=False)
        return rows, json.loads(facts.read_text()) if facts.exists() else None


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Both sides' medians over the rounds, and of the ratios, each formed within a round."""
    summary: dict[str, Any] = {}
    for side in SIDES:
        own = [row for row in rows if row["side"] == side]
        # One failure among the rounds is told as such: a number from the rest would hide it.
        bad = next((row for row in own if row["status"] != "ok"), None)
        if bad is not None:
            summary[side] = {"status": bad["status"], "reason": bad["reason"]}
        elif own:
            medians = ("step_seconds", "sampling_seconds", "peak_memory_bytes")
            summary[side] = {"status": "ok"} | {key: statistics.median(row[key] for row in own) for key in medians}
    if all(summary.get(side, {}).get("status") == "ok" for side in SIDES):
        pairs = list(zip(*([row for row in rows if row["side"] == side] for side in SIDES), strict=True))
        for name, key in (("step", "step_seconds"), ("sampling", "sampling_seconds"), ("memory", "peak_memory_bytes")):
            summary[f"{name}_ratio"] = statistics.median(ours[key] / theirs[key] for ours, theirs in pairs)
    return summary


def describe(result: dict[str, Any]) -> str:
    """What the table is of."""
    s, trl = result["settings"], result["versions"]["trl"]
    rates = [row["product_gflops"] for row in result["rows"]]
    return (
        f"GRPO of {s['shape']} ({s['parameters']:,} parameters, random weights), a prompt of {s['prompt_tokens']} tokens and "
        f"{s['answers']} answers of {s['new_tokens']} a step; lean_ft in bfloat16 as in the comparison of finetuning; TRL {trl} in "
        "its defaults (float32 weights, bfloat16 autocast, gradient checkpointing, AdamW; transformers' generate); medians over "
        f"{s['rounds']} alternating rounds of fresh processes, {s['steps']} steps each; before each, bfloat16 products ran at "
        f"{min(rates)} to {max(rates)} GFLOP/s"
    )


def table_cells(result: dict[str, Any]) -> list[list[str]]:
    """The table's text: a line a side, and their ratios; a side that gave no number shows why."""
    summary, cells = result["summary"], []
    for side, title in zip(SIDES, ("lean_ft", "TRL"), strict=True):
        one = {"status": "-"} | summary.get(side, {})
        if one["status"] != "ok":
            cells.append([title, one["status"], "-", "-", "-", "-"])
            continue
        whole, sampling = one["step_seconds"], one["sampling_seconds"]
        times = (f"{3600 / whole:.0f}", f"{whole:.2f}", f"{sampling:.2f}", f"{whole - sampling:.2f}")
        cells.append([title, peaks(one), *times])
    if "step_ratio" in summary:
        ratios = (1 / summary["step_ratio"], summary["step_ratio"], summary["sampling_ratio"])
        cells.append(["lean_ft / TRL", f"{summary['memory_ratio']:.2f}", *(f"{ratio:.2f}" for ratio in ratios), "-"])
    return cells


def compare(
    *,
    shape: str,
    answers: int,
    tokens: tuple[int, int],
    rounds: int,
    steps: int,
    warmup_steps: int,
    settle_steps: int,
    only: str,
    device: str,
    budget: Budget,
    results_dir: Path,
) -> None:
    """Compares grpo with TRL's GRPOTrainer, writes the result and prints its table."""
    if only not in ("", *SIDES):
        raise typer.BadParameter(f"expected ours or trl, came {only!r}", param_hint="--only")
    sides = [only] if only else list(SIDES)
    if importlib.util.find_spec("trl") is None and "trl" in sides:
        console.print("TRL is not installed, so there is nothing to compare with: pip install 'lean-ft[compare]'")
        raise typer.Exit(2)
    hardware = require_hardware(device)
    settle_steps = settle_steps if hardware["device"] == "cpu" else 0
    rows, trl_defaults = measure_sides(
        sides,
        shape=shape,
        answers=answers,
        tokens=tokens,
        rounds=rounds,
        steps=steps,
        warmup_steps=warmup_steps,
        settle_steps=settle_steps,
        device=device,
        budget=budget,
    )
    path = write_result(
        f"compare_grpo_{shape}_{answers}x{tokens[0]}+{tokens[1]}" + (f"_{only}" if only else ""),
        benchmark="compare_grpo",
        hardware=hardware,
        settings={
            "shape": shape,
            "parameters": num_parameters(shape),
            "answers": answers,
            "prompt_tokens": tokens[0],
            "new_tokens": tokens[1],
            "rounds": rounds,
            "steps": steps,
            "warmup_steps": warmup_steps,
            "settle_steps": settle_steps,
            "ours": SETTINGS,
            "trl_defaults": trl_defaults,
        },
        rows=rows,
        summary=summarize(rows),
        folder=results_dir,
    )
    print_result(path, describe, COLUMNS, table_cells)
