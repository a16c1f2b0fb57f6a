"""lean_ft against TRL's SFTTrainer: one model shape, one text, one length, in fresh processes that take turns.

    python benchmarks/compare_trl.py                                   # Qwen2.5-0.5B, 8 x 512, three rounds
    python benchmarks/compare_trl.py --lengths 4,32,128,512,1024 --rounds 1 --settle-steps 0   # peaks of the first steps
    python benchmarks/compare_trl.py --shape tiny --rounds 1                                   # small: of long runs, too
    python benchmarks/compare_trl.py --lengths 1024 --only ours
    python benchmarks/compare_trl.py --recipe lora                     # rank 16 on all linear layers, TRL's by peft
    python benchmarks/compare_trl.py --objective distill                # from a teacher of the shape, TRL's GKDTrainer
    python benchmarks/compare_trl.py --objective dpo                   # its DPOTrainer: compare_dpo.py tells of that
    python benchmarks/compare_trl.py --objective grpo                  # its GRPOTrainer: compare_grpo.py

Ours: bfloat16 weights and arithmetic, compiled layers and loss, logits a chunk at a time; full finetuning with selective
checkpointing and 8-bit AdamW that steps in backward, LoRA with selective checkpointing, distillation as full finetuning with a
teacher in bfloat16. TRL: its defaults, which `trl_sft.py` states and the result records; in distillation
nothing on-policy. The two differ in precision, then, each being what its users get; what that does to training is another
measurement.

In every round the other side goes first, so that neither always meets the warmer machine. A ratio is formed within
a round and the median over the rounds is told. TRL is the `compare` extra: pip install 'lean-ft[compare]'.

Writes `results/compare_trl_<shape>_<batch>x<lengths>_<hardware>.json`, with `lora_` before the shape for LoRA.
"""

import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import product_rate
import typer
from measure import Budget, measure_training, recipe_command
from memory_ladder import outcome, rung_settings
from results import RESULTS, console, peaks, print_result, require_hardware, tokens_per_second, write_result
from shapes import EMBEDDED_MODEL, num_parameters, write_model_folder, write_text_rows

SIDES = ("ours", "trl")


class Recipe(StrEnum):
    """What is compared."""

    full = "full"
    lora = "lora"
    distill = "distill"


class Objective(StrEnum):
    """Which of TRL's trainers it is compared with."""

    sft = "sft"
    dpo = "dpo"
    grpo = "grpo"
    distill = "distill"


class Sides(NamedTuple):
    """How each side runs a recipe, and how the table calls it."""

    title: str
    recipe: str
    settings: dict[str, Any]
    label: str
    trl_arguments: tuple[str, ...] = ()


LORA_RANK = 16
# What the last rung saves is spent on speed: attention is kept, and the output weight sums in bfloat16 over big chunks.
_LEAN = rung_settings("adamw_8bit") | {
    "memory.activation_checkpointing": "selective",
    "memory.loss_accumulation_dtype": "weight",
}
RECIPES = {
    Recipe.full: Sides(
        "full finetuning",
        "full_finetune_single_device",
        _LEAN,
        "selective checkpointing, compile, chunked cross-entropy with bfloat16 sums and 8-bit AdamW in backward",
    ),
    # Frozen weights have neither gradients nor states.
    Recipe.lora: Sides(
        f"LoRA of rank {LORA_RANK} on all linear layers",
        "lora_finetune_single_device",
        {
            "lora.rank": LORA_RANK,
            "compile": True,
            "memory.activation_checkpointing": "selective",
            "memory.selective_keeps": "products",
            "memory.loss_chunk_tokens": 512,
        },
        "checkpointing that keeps matrix products, compile and chunked cross-entropy",
        ("--lora-rank", str(LORA_RANK)),
    ),
    Recipe.distill: Sides(
        "distillation by the Jensen-Shannon divergence from a frozen model of its own shape",
        "distill",
        {**_LEAN, "distill.divergence": "jsd", "data.train_on": "all"},
        "selective checkpointing, compile, both models' logits a chunk at a time, bfloat16 sums and 8-bit AdamW in backward",
        ("--distill",),
    ),
}


def ours_command(
    sides: Sides, model: Path, text: Path, run: Path, *, length: int, batch_size: int, steps: int, device: str
) -> list:
    """The recipe with techniques that a CPU has, too."""
    settings = {
        "model.path": model,
        "model.random_init": True,
        "data.source": text,
        "data.max_length": length,
        "batch_size": batch_size,
        "max_steps": steps,
        "epochs": 100,
        "device": device,
        "output_dir": run,
        **({"distill.teacher": model} if sides.recipe == "distill" else {}),
        **sides.settings,
    }
    return recipe_command(sides.recipe, settings)


def trl_command(
    sides: Sides, model: Path, text: Path, run: Path, facts: Path, *, length: int, batch_size: int, steps: int
) -> list:
    """TRL in its defaults."""
    return [
        sys.executable,
        Path(__file__).with_name("trl_sft.py"),
        *("--model-folder", model, "--data", text, "--run-directory", run, "--facts-file", facts),
        *("--batch-size", str(batch_size), "--length", str(length), "--steps", str(steps)),
        *sides.trl_arguments,
    ]


def write_weights(model: Path) -> None:
    """Writes random weights into a model's folder, for both sides' teacher."""
    import torch

    from lean_ft import load_model, save_model

    torch.manual_seed(0)
    save_model(load_model(model, dtype=torch.bfloat16, random_init=True), model)


def make_answers(file: Path, model: Path, length: int) -> None:
    """Makes each row's text the answer of a chat of `length` tokens, which TRL's GKDTrainer does not cut."""
    from lean_ft.tokenizers import load_tokenizer

    tokenizer, rows = load_tokenizer(model), []
    for line in file.read_text().splitlines():
        words = json.loads(line)["text"].split(" ")
        while True:
            chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": " ".join(words)}]
            if len(tokenizer.render(chat)[0]) <= length:
                break
            words.pop()
        rows.append(json.dumps({"messages": chat}) + "\n")
    file.write_text("".join(rows))


def measure_sides(
    sides: list[str],
    *,
    recipe: Recipe = Recipe.full,
    shape: str,
    batch_size: int,
    lengths: list[int],
    rounds: int,
    steps: int,
    warmup_steps: int,
    device: str,
    budget: Budget,
    settle_steps: int = 0,
    tokenizer_folder: Path = EMBEDDED_MODEL,
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """Measures the sides in turns; returns a row for each process, and what TRL's defaults came to."""
    rows: list[dict[str, Any]] = []
    trl_defaults = None
    num_steps = max(warmup_steps + steps, settle_steps) + 1  # one more than is waited for, so that nothing is saved
    # The text is drawn on the CPU side of a GPU as well: what is hidden there is only where it runs.
    environment = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    with tempfile.TemporaryDirectory(prefix="lean_ft_compare_") as folder:
        model = write_model_folder(shape, Path(folder) / "model", tokenizer_folder)
        if recipe is Recipe.distill:
            write_weights(model)
        facts = Path(folder) / "trl_defaults.json"
        for length in lengths:
            text = write_text_rows(Path(folder) / f"text_{length}.jsonl", num_steps * batch_size, length)
            if recipe is Recipe.distill:
                make_answers(text, model, length)
            common: dict[str, Any] = {"length": length, "batch_size": batch_size, "steps": num_steps}
            for turn in range(rounds):
                for side in sides if turn % 2 == 0 else sides[::-1]:

                    def command(run: Path, side: str = side, text: Path = text, common: dict = common) -> list:
                        if side == "ours":
                            return ours_command(RECIPES[recipe], model, text, run, device=device, **common)
                        return trl_command(RECIPES[recipe], model, text, run, facts, **common)

                    rate = int(subprocess.check_output(product_rate.command(device), text=True))
                    row = measure_training(
                        command,
                        steps=steps,
                        warmup_steps=warmup_steps,
                        tokens_per_step=batch_size * length,
                        timeout_seconds=budget.timeout_seconds(),
                        settle_steps=settle_steps,
                        # GKDTrainer's collator leaves off a token or two of a row.
                        token_slack=0.01 if recipe is Recipe.distill and side == "trl" else 0.0,
                        environment=environment,
                    )
                    rows.append({"side": side, "length": length, "round": turn, "product_gflops": rate, **row})
                    line = f"length {length:<5} round {turn + 1}  {side:<5} {outcome(row)}"
                    console.print(f"{line}; products at {rate} GFLOP/s before", markup=False)
            if facts.exists():
                trl_defaults = json.loads(facts.read_text())
    return rows, trl_defaults


def summarize(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row a length: the sides' medians over the rounds, and the ratios, each formed within a round."""
    summary = []
    for length in dict.fromkeys(row["length"] for row in rows):
        line: dict[str, Any] = {"length": length}
        rounds: dict[int, dict[str, dict[str, Any]]] = {}
        for side in SIDES:
            own = [row for row in rows if row["length"] == length and row["side"] == side]
            good = [row for row in own if row["status"] == "ok"]
            if not own:
                continue
            # One failure among the rounds is told as such: a number from the rest would hide it.
            bad = next((row for row in own if row["status"] != "ok"), None)
            line[side] = {"status": bad["status"], "reason": bad["reason"]} if bad else _median_of(good)
            for row in good:
                rounds.setdefault(row["round"], {})[side] = row
        pairs = [sides for sides in rounds.values() if len(sides) == len(SIDES)]
        if pairs and all(line.get(side, {}).get("status") == "ok" for side in SIDES):
            line["speed_ratio"] = statistics.median(
                pair["ours"]["tokens_per_second"] / pair["trl"]["tokens_per_second"] for pair in pairs
            )
            line["memory_ratio"] = statistics.median(
                pair["ours"]["peak_memory_bytes"] / pair["trl"]["peak_memory_bytes"] for pair in pairs
            )
        summary.append(line)
    return summary


def _median_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    speeds = [row["tokens_per_second"] for row in rows]
    return {
        "status": "ok",
        "rounds": len(rows),
        "tokens_per_second": statistics.median(speeds),
        "slowest_tokens_per_second": min(speeds),
        "fastest_tokens_per_second": max(speeds),
        **{
            peak: statistics.median(row[peak] for row in rows)
            for peak in ("peak_memory_bytes", "first_peak_memory_bytes")
            if all(peak in row for row in rows)
        },
    }


COLUMNS = ["max length", "ours: peak", "TRL: peak", "ours / TRL", "ours: tokens/s", "TRL: tokens/s", "ours / TRL"]


def describe(result: dict[str, Any]) -> str:
    """What the table is of."""
    settings, trl = result["settings"], result["versions"]["trl"]
    sides = RECIPES[Recipe(settings.get("recipe", Recipe.full))]
    defaults = settings["trl_defaults"] or {}
    said = ", ".join(
        text
        for key, text in {
            "weights": f"{defaults.get('weights')} weights",
            "bf16_autocast": "bfloat16 autocast",
            "gradient_checkpointing": "gradient checkpointing",
            "optimizer": str(defaults.get("optimizer")),
        }.items()
        if defaults.get(key)
    )
    peer = f"; TRL {trl} in its defaults ({said})" if said else ""
    until = ", then on until the peak stands still" if settings.get("settle_steps") else ""
    return (
        f"{sides.title} of {settings['shape']} ({settings['parameters']:,} parameters, random weights), batch of "
        f"{settings['batch_size']}; lean_ft in bfloat16 with {sides.label}{peer}; medians over {settings['rounds']} alternating rounds of fresh processes, "
        f"{settings['steps']} steps each{until}{_told_rates(result['rows'])}"
    )


def _told_rates(rows: list[dict[str, Any]]) -> str:
    rates = [row["product_gflops"] for row in rows if "product_gflops" in row]
    return f"; before each, bfloat16 products ran at {min(rates)} to {max(rates)} GFLOP/s" if rates else ""


def table_cells(result: dict[str, Any]) -> list[list[str]]:
    """The table's text; a side that gave no number shows why."""
    cells = []
    for line in result["summary"]:
        ours, trl = ({"status": "-"} | line.get(side, {}) for side in SIDES)
        memory = [peaks(side) if side["status"] == "ok" else side["status"] for side in (ours, trl)]
        speeds = [tokens_per_second(side.get("tokens_per_second")) for side in (ours, trl)]
        memory_ratio = f"{line['memory_ratio']:.2f}" if "memory_ratio" in line else "-"
        speed_ratio = f"{line['speed_ratio']:.2f}x" if "speed_ratio" in line else "-"
        cells.append([str(line["length"]), *memory, memory_ratio, *speeds, speed_ratio])
    return cells


def main(
    shape: Annotated[str, typer.Option(help="A name from shapes.py.")] = "qwen2_5_0_5b",
    recipe: Annotated[Recipe, typer.Option(help="What is compared: full finetuning, or LoRA.")] = Recipe.full,
    objective: Annotated[
        Objective, typer.Option("--objective", help="TRL's SFTTrainer, its DPOTrainer, GRPOTrainer or GKDTrainer.")
    ] = Objective.sft,
    batch_size: Annotated[int | None, typer.Option(help="Rows a step, answers for grpo: 8; pairs for dpo: 4.")] = None,
    lengths: Annotated[str, typer.Option(help="Maximum lengths, with commas; half of one is grpo's prompt.")] = "",
    rounds: Annotated[int, typer.Option(help="How often each side runs.")] = 3,
    steps: Annotated[int, typer.Option(help="Steps that count.")] = 3,
    warmup_steps: Annotated[int, typer.Option(help="Steps before them that do not.")] = 2,
    settle_steps: Annotated[
        int, typer.Option(help="On a CPU: go on, for at most so many steps, until the peak stands still. 0: do not.")
    ] = 200,
    only: Annotated[str, typer.Option(help="`ours` or `trl`: that side alone; for dpo one of its comparisons.")] = "",
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    timeout_seconds: Annotated[float, typer.Option(help="Longest that one process may take.")] = 3600,
    budget_seconds: Annotated[
        float | None, typer.Option(help="Time for all of them; what is left over is not run.")
    ] = None,
    results_dir: Annotated[Path, typer.Option(help="Where the JSON goes.")] = RESULTS,
) -> None:
    """Compares lean_ft with one of TRL's trainers on speed and peak memory."""
    lengths = lengths or ("256" if objective is Objective.grpo else "512")
    if objective is Objective.grpo:
        import compare_grpo

        compare_grpo.compare(
            shape=shape,
            answers=batch_size or 8,
            tokens=(int(lengths) // 2, int(lengths) // 2),
            rounds=rounds,
            steps=steps,
            warmup_steps=warmup_steps,
            settle_steps=settle_steps,
            only=only,
            device=device,
            budget=Budget(timeout_seconds, budget_seconds),
            results_dir=results_dir,
        )
        return
    if objective is Objective.dpo:
        from compare_dpo import compare

        compare(
            shape=shape,
            batch_size=batch_size or 4,
            length=int(lengths),
            rounds=rounds,
            steps=steps,
            warmup_steps=warmup_steps,
            settle_steps=settle_steps,
            only=only,
            device=device,
            budget=Budget(timeout_seconds, budget_seconds),
            results_dir=results_dir,
        )
        return
    if objective is Objective.distill:
        recipe = Recipe.distill
    batch_size = batch_size or (4 if recipe is Recipe.distill else 8)
    if only not in ("", *SIDES):
        raise typer.BadParameter(f"expected ours or trl, came {only!r}", param_hint="--only")
    sides = [only] if only else list(SIDES)
    if "trl" in sides and importlib.util.find_spec("trl") is None:
        console.print("TRL is not installed, so there is nothing to compare with: pip install 'lean-ft[compare]'")
        raise typer.Exit(2)
    hardware = require_hardware(device)
    settle_steps = settle_steps if hardware["device"] == "cpu" else 0
    all_lengths = [int(length) for length in lengths.split(",")]
    console.print(f"{shape}, {num_parameters(shape):,} parameters, batch {batch_size}, on {hardware.short_name}")
    rows, trl_defaults = measure_sides(
        sides,
        recipe=recipe,
        shape=shape,
        batch_size=batch_size,
        lengths=all_lengths,
        rounds=rounds,
        steps=steps,
        warmup_steps=warmup_steps,
        device=device,
        budget=Budget(timeout_seconds, budget_seconds),
        settle_steps=settle_steps,
    )
    whose = f"_{only}" if only else ""
    adapter = "" if recipe is Recipe.full else f"{recipe}_"
    path = write_result(
        f"compare_trl_{adapter}{shape}_{batch_size}x{'-'.join(map(str, all_lengths))}{whose}",
        benchmark="compare_trl",
        hardware=hardware,
        settings={
            "recipe": recipe,
            "shape": shape,
            "parameters": num_parameters(shape),
            "batch_size": batch_size,
            "lengths": all_lengths,
            "rounds": rounds,
            "steps": steps,
            "warmup_steps": warmup_steps,
            "settle_steps": settle_steps,
            "ours": RECIPES[recipe].settings,
            "trl_defaults": trl_defaults,
        },
        rows=rows,
        summary=summarize(rows),
        folder=results_dir,
    )
    print_result(path, describe, COLUMNS, table_cells)


if __name__ == "__main__":
    typer.run(main)
