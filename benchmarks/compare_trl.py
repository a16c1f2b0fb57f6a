"""Compare lean_ft with TRL's trainers: one model shape, the same rows and length, new processes that alternate.

    python benchmarks/compare_trl.py                                   # Qwen2.5-0.5B, 8 x 512, three rounds
    python benchmarks/compare_trl.py --lengths 4,32,128,512,1024 --rounds 1 --settle-steps 0   # peaks of the first steps
    python benchmarks/compare_trl.py --shape tiny --rounds 1                                   # small, and many steps
    python benchmarks/compare_trl.py --lengths 1024 --only ours        # or trl, or careful
    python benchmarks/compare_trl.py --recipe lora                     # rank 16 on all linear layers; TRL uses peft
    python benchmarks/compare_trl.py --objective distill               # teacher of the same shape, GKDTrainer
    python benchmarks/compare_trl.py --objective dpo                   # 4 pairs x 512, DPOTrainer, all four comparisons
    python benchmarks/compare_trl.py --objective dpo --only long_prompts   # one of them
    python benchmarks/compare_trl.py --objective grpo                  # 8 completions, 128 + 128 tokens, GRPOTrainer
    python benchmarks/compare_trl.py --objective tools                 # 8 episodes with two calls each, 256 + 256 tokens

lean_ft uses bfloat16 weights, compiled layers and chunked logits. Full fine-tuning and the other objectives add
selective checkpointing and 8-bit AdamW in backward; LoRA adds selective checkpointing.

TRL runs twice: with its defaults (on a CPU float32 weights), and configured with care, as a user who reads its
documentation would on the
same machine: bfloat16 weights and 8-bit AdamW; for sft also compiled layers, packing and checkpointing that keeps
attention; for distill micro-batches. `trl_trainer.py` lists both configurations, and the result records the resolved
values. The defaults differ from lean_ft in precision; trl_curves.py and convergence.py compare what they learn.

dpo: prompts are 1/8 of the length, and lean_ft computes each once for its two completions. In `long_prompts` they are
3/4, and the peer is lean_ft without shared prompts. tokens/s always counts the prompt once per completion: pairs per
second times 2 x length. Both sides fill the cache of reference log-probabilities before the timed steps.

grpo: one prompt per step, of half the length, with completions of a fixed length. Both sides train with dapo's loss and
no reference. The time for sampling and rewards is also reported.

tools: as grpo, and each completion has two calls of a tool that takes no time. Both sides sample with all logits and
then take the token of a script (`scripted_turns.py`), so that the calls are the same. Both must have the same numbers
of calls and of trained tokens.

The order of the sides is reversed in every second round. Ratios are computed per round; the median is reported. TRL is
in the extra `compare`: pip install -e '.[compare]'.

Writes `results/compare_trl_<shape>_<batch>x<lengths>_<hardware>.json`, with `lora_`, `distill_`, `dpo_`, `grpo_` or
`tools_` before the shape.
"""  # noqa: E501

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
import scripted_turns
import typer
from measure import Budget, measure_training, recipe_command
from memory_ladder import outcome, rung_settings
from results import RESULTS, console, peaks, print_result, require_hardware, tokens_per_second, write_result
from shapes import EMBEDDED_MODEL, num_parameters, write_model_folder, write_pair_rows, write_text_rows

OURS, TRL, CAREFUL, SEPARATE = "ours", "trl", "careful", "lean_ft, prompts not shared"
TITLES = {TRL: "TRL, defaults", CAREFUL: "TRL, with care"}  # of peers in tables
LORA_RANK = 16


class Recipe(StrEnum):
    """For sft: full fine-tuning or LoRA."""

    full = "full"
    lora = "lora"


class Objective(StrEnum):
    """The objective, which selects TRL's trainer."""

    sft = "sft"
    dpo = "dpo"
    grpo = "grpo"
    tools = "tools"
    distill = "distill"


class Comparison(NamedTuple):
    """A comparison of lean_ft with its peers, with the settings of each side."""

    objective: Objective
    title: str
    recipe: str
    settings: dict[str, Any]
    label: str  # lean_ft's techniques, for the caption
    trl_arguments: tuple[str, ...] = ()
    prompt_share: float = 0.0  # share of the length
    peers: tuple[str, ...] = (TRL, CAREFUL)


# The last rung, with two faster settings: attention is stored, and the output gradient accumulates in bfloat16.
LEAN = rung_settings("adamw_8bit") | {
    "memory.activation_checkpointing": "selective",
    "memory.loss_accumulation_dtype": "weight",
}
_LEAN_LABEL = (
    "selective checkpointing, compile, chunked cross-entropy with bfloat16 accumulation and 8-bit AdamW in backward"
)
# Frozen weights have neither gradients nor states.
LORA = {
    "lora.rank": LORA_RANK,
    "compile": True,
    "memory.activation_checkpointing": "selective",
    "memory.selective_keeps": "products",
    "memory.loss_chunk_tokens": 512,
}
_LORA_ARGUMENTS = ("--lora-rank", str(LORA_RANK))
_DPO_LABEL = "the settings of the fine-tuning comparison and shared prompts"
_CACHED = {"reference.kind": "cached"}
COMPARISONS = {
    "full": Comparison(Objective.sft, "full fine-tuning", "full_finetune_single_device", LEAN, _LEAN_LABEL),
    "lora": Comparison(
        Objective.sft,
        f"LoRA of rank {LORA_RANK} on all linear layers",
        "lora_finetune_single_device",
        LORA,
        "selective checkpointing that keeps matrix products, compile and chunked cross-entropy",
        _LORA_ARGUMENTS,
    ),
    "distill": Comparison(
        Objective.distill,
        "distillation from a frozen model of the same shape",
        "distill",
        {**LEAN, "distill.divergence": "jsd", "data.train_on": "all"},
        "Jensen-Shannon divergence, selective checkpointing, compile, both models' logits in chunks, bfloat16 "
        "accumulation and 8-bit AdamW in backward",
    ),
    "dpo_cached": Comparison(
        Objective.dpo,
        "DPO, cached reference",
        "dpo",
        LEAN | _CACHED,
        _DPO_LABEL,
        ("--reference", "cached"),
        1 / 8,
    ),
    "dpo_resident": Comparison(
        Objective.dpo,
        "DPO, resident reference",
        "dpo",
        LEAN | {"reference.kind": "model"},
        _DPO_LABEL,
        (),
        1 / 8,
    ),
    "dpo_lora": Comparison(
        Objective.dpo,
        f"DPO with LoRA of rank {LORA_RANK}",
        "lora_dpo_single_device",
        # A pair has two rows.
        LORA | {"reference.kind": "adapter_off", "memory.selective_keeps": "attention"},
        _DPO_LABEL,
        _LORA_ARGUMENTS,
        1 / 8,
    ),
    "dpo_long_prompts": Comparison(
        Objective.dpo,
        "DPO, cached reference, prompts of 3/4 of a row",
        "dpo",
        LEAN | _CACHED,
        _DPO_LABEL,
        (),
        3 / 4,
        (SEPARATE,),
    ),
    "grpo": Comparison(Objective.grpo, "GRPO", "grpo", LEAN, _LEAN_LABEL, (), 1 / 2),
    "tools": Comparison(Objective.tools, "GRPO with two calls of a tool", "grpo", LEAN, _LEAN_LABEL, (), 1 / 2),
}


def ours_command(
    comparison: Comparison, side: str, model: Path, data: Path, run: Path, *, length: int, batch_size: int, steps: int,
    given_tokens: int, device: str,
) -> list:  # fmt: skip
    """The command of lean_ft's recipe, with techniques that also work on a CPU."""
    prompt_tokens = round(length * comparison.prompt_share)
    online = {
        "data.max_prompt_length": prompt_tokens,
        "generation.num_answers": batch_size,
        "generation.max_new_tokens": length - prompt_tokens - given_tokens,
        "sample_every": 0,
    }
    scripts = Path(__file__).parent
    own = {
        Objective.sft: {"data.max_length": length},
        Objective.distill: {"data.max_length": length, "distill.teacher": model},
        Objective.dpo: {
            "data.max_length": length,
            "data.max_prompt_length": prompt_tokens,
            "data.cache_dir": run.parent / "cache",
            "data.shared_prompt": side == OURS,
        },
        Objective.grpo: {"data.chat": False, "rewards": f"[{scripts}/letters_reward.py:letters]", **online},
        Objective.tools: {
            "rewards": f"[{scripts}/scripted_turns.py:letters]",
            "tools.functions": f"[{scripts}/scripted_turns.py:look_up]",
            "generation.max_given_tokens": max(1, given_tokens),
            **online,
        },
    }[comparison.objective]
    settings = {
        "model.path": model,
        "model.random_init": True,
        "data.source": data,
        "batch_size": batch_size,
        "max_steps": steps,
        "epochs": 100,
        "device": device,
        "output_dir": run,
    }
    command = recipe_command(comparison.recipe, settings | own | comparison.settings)
    if comparison.objective is Objective.tools:
        command[1:3] = [str(scripts / "scripted_turns.py")]  # instead of `-m lean_ft`
    return command


def trl_command(
    comparison: Comparison, side: str, model: Path, data: Path, run: Path, facts: Path, *, length: int,
    batch_size: int, steps: int,
    given_tokens: int,
) -> list:  # fmt: skip
    """The command of TRL, with its defaults or with care."""
    prompt_tokens = round(length * comparison.prompt_share)
    return [
        *(sys.executable, Path(__file__).with_name("trl_trainer.py"), "--objective", comparison.objective.value),
        *("--model-folder", model, "--data", data, "--run-directory", run, "--facts-file", facts),
        *("--batch-size", str(batch_size), "--length", str(length), "--prompt-tokens", str(prompt_tokens)),
        *("--steps", str(steps), *comparison.trl_arguments, *(["--careful"] if side == CAREFUL else [])),
        *("--given-tokens", str(given_tokens)),
    ]


def write_weights(model: Path) -> None:
    """Write random weights into a model folder, as the teacher of both sides."""
    import torch

    from lean_ft import load_model, save_model

    torch.manual_seed(0)
    save_model(load_model(model, dtype=torch.bfloat16, random_init=True), model)


def make_answers(file: Path, model: Path, length: int) -> None:
    """Make each row's text the answer of a chat of `length` tokens, because GKDTrainer does not truncate."""
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


def write_rows(comparison: Comparison, folder: Path, model: Path, length: int, batch_size: int, steps: int) -> Path:
    """Write the data of a comparison and return its path."""
    file = folder / f"rows_{length}.jsonl"
    if comparison.prompt_share:
        prompt_tokens = round(length * comparison.prompt_share)
        if comparison.objective is Objective.tools:
            return scripted_turns.write_chat_rows(file, steps, prompt_tokens, model)
        num_rows = steps if comparison.objective is Objective.grpo else steps * batch_size
        return write_pair_rows(file, num_rows, prompt_tokens, length - prompt_tokens)
    write_text_rows(file, steps * batch_size, length)
    if comparison.objective is Objective.distill:
        make_answers(file, model, length)
    return file


def measure_sides(
    name: str,
    sides: list[str],
    *,
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
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Measure the sides in turns. Returns one row per process, and the resolved configuration of each of TRL's
    sides."""
    comparison, rows = COMPARISONS[name], list[dict[str, Any]]()
    is_pair = comparison.objective is Objective.dpo
    num_steps = max(warmup_steps + steps, settle_steps) + 1  # one more than needed: the run is stopped before it saves
    # Hide the GPU from both sides on a CPU run.
    environment = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    with tempfile.TemporaryDirectory(prefix="lean_ft_compare_") as folder:
        has_tools, given_tokens = comparison.objective is Objective.tools, 0  # the tokens of results per row
        if has_tools:
            tokenizer_folder = scripted_turns.write_tokenizer(Path(folder) / "tokenizer")
            given_tokens = scripted_turns.num_given(tokenizer_folder)
        model = write_model_folder(shape, Path(folder) / "model", tokenizer_folder)
        if comparison.objective is Objective.distill:
            write_weights(model)
        facts = {side: Path(folder) / f"{side}.json" for side in (TRL, CAREFUL)}
        for length in lengths:
            data = write_rows(comparison, Path(folder), model, length, batch_size, num_steps)
            common: dict[str, Any] = {
                "length": length,
                "batch_size": batch_size,
                "steps": num_steps,
                "given_tokens": given_tokens,
            }
            tokens = computed = batch_size * length * (2 if is_pair else 1)
            for turn in range(rounds):
                for side in sides if turn % 2 == 0 else sides[::-1]:

                    def command(run: Path, side: str = side, data: Path = data, common: dict = common) -> list:
                        if side in facts:
                            return trl_command(comparison, side, model, data, run, facts[side], **common)
                        return ours_command(comparison, side, model, data, run, device=device, **common)

                    # lean_ft computes a prompt once: for both completions of a pair, or for all of grpo's.
                    prompt = round(length * comparison.prompt_share)
                    once = batch_size - (not is_pair) if prompt and side == OURS else 0
                    computed = tokens - once * prompt
                    rate = int(subprocess.check_output(product_rate.command(device), text=True))
                    row = measure_training(
                        command,
                        steps=steps,
                        warmup_steps=warmup_steps,
                        tokens_per_step=computed,
                        timeout_seconds=budget.timeout_seconds(),
                        settle_steps=settle_steps,
                        # GKDTrainer's collator leaves off a token or two of a row.
                        token_slack=0.01 if comparison.objective is Objective.distill and side in facts else 0.0,
                        environment=environment,
                    )
                    if row["status"] == "ok":
                        row |= {"computed_tokens": computed, "tokens_per_second": tokens / row["step_seconds"]}
                        if has_tools:
                            num_trained = batch_size * (length - prompt - given_tokens)
                            found = row["target_tokens_per_step"], row["tool_calls"]
                            assert found == (num_trained, scripted_turns.NUM_CALLS), row
                    what = {"comparison": name, "side": side, "length": length, "round": turn, "product_gflops": rate}
                    what |= {"given_tokens": given_tokens} if has_tools else {}
                    rows.append(what | row)
                    line = f"{comparison.title}, length {length:<5} round {turn + 1}  {side:<5} {outcome(row)}"
                    console.print(f"{line}; products at {rate} GFLOP/s before", markup=False)
        return rows, {side: json.loads(file.read_text()) for side, file in facts.items() if file.exists()}


# The values of a side that are reported as medians, if present.
MEDIANS = ("tokens_per_second", "step_seconds", "sampling_seconds", "peak_memory_bytes", "first_peak_memory_bytes")
RATIOS = {"speed_ratio": "tokens_per_second", "memory_ratio": "peak_memory_bytes", "sampling_ratio": "sampling_seconds"}


def summarize(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per comparison, length and peer: medians over the rounds, and ratios computed per round."""
    summary = []
    for name, length in dict.fromkeys((row["comparison"], row["length"]) for row in rows):
        of_one = [row for row in rows if (row["comparison"], row["length"]) == (name, length)]
        peers = [peer for peer in COMPARISONS[name].peers if any(row["side"] == peer for row in of_one)]
        for peer in peers or [None]:
            own = {side: {row["round"]: row for row in of_one if row["side"] == side} for side in (OURS, peer) if side}
            line: dict[str, Any] = {"comparison": name, "length": length, "peer": peer}
            for side, of_side in own.items():
                # One failed round makes the side failed: a median of the others would hide it.
                bad = next((row for row in of_side.values() if row["status"] != "ok"), None)
                if bad is not None:
                    line[side] = {"status": bad["status"], "reason": bad["reason"]}
                elif of_side:
                    line[side] = {"status": "ok", "rounds": len(of_side)} | {
                        key: statistics.median(row[key] for row in of_side.values())
                        for key in MEDIANS
                        if all(key in row for row in of_side.values())
                    }
            if peer and all(line.get(side, {}).get("status") == "ok" for side in own):
                pairs = [(ours, own[peer][turn]) for turn, ours in own[OURS].items() if turn in own[peer]]
                for ratio, key in RATIOS.items():
                    if all(key in row for pair in pairs for row in pair):
                        line[ratio] = statistics.median(ours[key] / theirs[key] for ours, theirs in pairs)
            summary.append(line)
    return summary


COLUMNS = [
    "objective, tokens per row",
    "compared with",
    "lean_ft: peak memory",
    "other: peak memory",
    "memory vs other",
    "lean_ft: tokens/s",
    "other: tokens/s",
    "speed vs other",
]


def describe_trl(facts: dict[str, Any]) -> str:
    """The configuration of one of TRL's sides, in words."""
    words = {
        "weights": f"{facts.get('weights')} weights",
        "bf16_autocast": "bfloat16 autocast",
        "gradient_checkpointing": "gradient checkpointing",
        "keeps_attention": "attention kept",
        "torch_compile": "compiled",
        "packing": "packing",
        "micro_batches": f"{facts.get('micro_batches')} micro-batches" if facts.get("micro_batches", 1) > 1 else "",
        "optimizer": str(facts.get("optimizer")),
    }
    return ", ".join(text for key, text in words.items() if facts.get(key) and text)


def describe(result: dict[str, Any]) -> str:
    """The caption of the table."""
    settings, trl = result["settings"], result["versions"]["trl"]
    names = list(dict.fromkeys(line["comparison"] for line in result["summary"]))
    first = COMPARISONS[names[0]]
    rows = {
        Objective.dpo: "pairs, prompts of 1/8 of a row unless stated otherwise; tokens/s count the prompt once per completion; TRL's "  # noqa: E501
        "fused output layer needs Triton and uses its fallback on a CPU",
        Objective.grpo: "completions of one prompt, half of the tokens each",
        Objective.tools: f"episodes of one prompt, half of the tokens each; {result['rows'][0].get('given_tokens')} tokens of an "  # noqa: E501
        "episode are results, and a script replaces the sampled tokens",
    }.get(first.objective, "rows")
    peers = "".join(
        f"; TRL {trl} {how} ({describe_trl(facts)})"
        for key, how in {"trl_defaults": "with its defaults", "trl_careful": "configured with care"}.items()
        if (facts := next(filter(None, (settings.get(key, {}).get(name) for name in names)), None))
    )
    until = ", then more until the peak is stable" if settings.get("settle_steps") else ""
    rates = [row["product_gflops"] for row in result["rows"] if "product_gflops" in row]
    speed = f"; before each run, bfloat16 matrix products reached {min(rates)} to {max(rates)} GFLOP/s" if rates else ""
    return (
        f"{first.title if len(names) == 1 else first.objective.upper()} of {settings['shape']} "
        f"({settings['parameters']:,} parameters, random weights), batch of {settings['batch_size']} {rows}; lean_ft "
        f"in bfloat16 with {first.label}{peers}; median of {settings['rounds']} alternating rounds of new processes, "
        f"{settings['steps']} steps each{until}{speed}"
    )


def table_cells(result: dict[str, Any]) -> list[list[str]]:
    """The rows of the table. A side without a number shows its status."""
    cells = []
    for line in result["summary"]:
        comparison = COMPARISONS[line["comparison"]]
        peer = line.get("peer", comparison.peers[0])  # results before TRL's second side have no `peer`
        sides = [{"status": "-"} | line.get(side, {}) for side in (OURS, peer)]
        memory = [peaks(side) if side["status"] == "ok" else side["status"] for side in sides]
        speeds = [tokens_per_second(side.get("tokens_per_second")) for side in sides]
        memory_ratio = f"{line['memory_ratio']:.2f}" if "memory_ratio" in line else "-"
        speed_ratio = f"{line['speed_ratio']:.2f}x" if "speed_ratio" in line else "-"
        other = TITLES.get(peer, peer) or "-"
        title = f"{comparison.title}, {line['length']}"
        cells.append([title, other, *memory, memory_ratio, *speeds, speed_ratio])
        if comparison.objective is Objective.tools:
            batch = result["settings"]["batch_size"]
            rates = [f"{batch / side['step_seconds']:.2g}" if "step_seconds" in side else "-" for side in sides]
            cells.append(["episodes per second", other, "-", "-", "-", *rates, speed_ratio])
        if any("sampling_seconds" in side for side in sides):
            times = [
                f"{side['sampling_seconds']:.2f} of {side['step_seconds']:.2f}" if "sampling_seconds" in side else "-"
                for side in sides
            ]
            sampling_ratio = f"{1 / line['sampling_ratio']:.2f}x" if "sampling_ratio" in line else "-"
            cells.append(["seconds for sampling and rewards, of a step", other, "-", "-", "-", *times, sampling_ratio])
    return cells


def sentence(result: dict[str, Any]) -> str:
    """The result of the first comparison in words, for a page. A side of TRL without a number is named too."""
    name = result["summary"][0]["comparison"]
    ratios = {
        line.get("peer", COMPARISONS[name].peers[0]): line for line in result["summary"] if line["comparison"] == name
    }
    parts = []
    for peer, how in {TRL: "with its defaults", CAREFUL: "configured with care"}.items():
        if "speed_ratio" in (line := ratios.get(peer, {})):
            parts.append(
                f"{line['speed_ratio']:.2f}x the speed of TRL {how}, with {line['memory_ratio']:.2f} of its memory"
            )
        else:
            parts.append(f"no number for TRL {how} ({line.get(peer, {}).get('status', 'not measured yet')})")
    return f"{COMPARISONS[name].title[0].upper()}{COMPARISONS[name].title[1:]}: " + "; ".join(parts) + "."


def main(
    shape: Annotated[str, typer.Option(help="Model shape, from shapes.py.")] = "qwen2_5_0_5b",
    recipe: Annotated[Recipe, typer.Option(help="For sft: full fine-tuning or LoRA.")] = Recipe.full,
    objective: Annotated[Objective, typer.Option("--objective", help="TRL's trainer.")] = Objective.sft,
    batch_size: Annotated[
        int | None, typer.Option(help="Rows per step (completions for grpo): 8; for distill, and pairs for dpo: 4.")
    ] = None,
    lengths: Annotated[
        str, typer.Option(help="Row lengths, comma-separated; half is the prompt for grpo and tools.")
    ] = "",
    rounds: Annotated[int, typer.Option(help="Rounds.")] = 3,
    steps: Annotated[int, typer.Option(help="Counted steps.")] = 3,
    warmup_steps: Annotated[int, typer.Option(help="Warm-up steps before the counted steps.")] = 2,
    settle_steps: Annotated[
        int, typer.Option(help="On a CPU: maximum steps to wait until the peak is stable; 0: do not wait.")
    ] = 200,
    only: Annotated[str, typer.Option(help="Only `ours`, `trl` or `careful`; for dpo, one of its comparisons.")] = "",
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    timeout_seconds: Annotated[float, typer.Option(help="Time limit of one process in seconds.")] = 3600,
    budget_seconds: Annotated[
        float | None, typer.Option(help="Total time in seconds; remaining runs are skipped.")
    ] = None,
    results_dir: Annotated[Path, typer.Option(help="Folder for the JSON result.")] = RESULTS,
) -> None:
    """Compare speed and peak memory with one of TRL's trainers, with its defaults and configured with care."""
    names = [name for name, comparison in COMPARISONS.items() if comparison.objective is objective]
    wanted, side = names, only
    if objective is Objective.sft:
        wanted = [recipe.value]
    elif f"{objective}_{only}" in names:
        wanted, side = [f"{objective}_{only}"], ""
    if side not in ("", OURS, TRL, CAREFUL):
        expected = ", ".join(
            [OURS, TRL, CAREFUL, *(name.removeprefix("dpo_") for name in names if objective is Objective.dpo)]
        )
        raise typer.BadParameter(f"expected one of {expected}, came {only!r}", param_hint="--only")
    sides = {name: [s for s in (OURS, *COMPARISONS[name].peers) if side in ("", s)] for name in wanted}
    if any({TRL, CAREFUL} & set(of_one) for of_one in sides.values()) and importlib.util.find_spec("trl") is None:
        console.print("TRL is not installed, so there is nothing to compare with: pip install -e '.[compare]'")
        raise typer.Exit(2)
    hardware = require_hardware(device)
    batch_size = batch_size or (4 if objective in (Objective.dpo, Objective.distill) else 8)
    all_lengths = [int(length) for length in (lengths or ("256" if objective is Objective.grpo else "512")).split(",")]
    common: dict[str, Any] = {
        "shape": shape,
        "batch_size": batch_size,
        "lengths": all_lengths,
        "rounds": rounds,
        "steps": steps,
        "warmup_steps": warmup_steps,
        "settle_steps": settle_steps if hardware["device"] == "cpu" else 0,
    }
    console.print(f"{shape}, {num_parameters(shape):,} parameters, batch {batch_size}, on {hardware.short_name}")
    budget = Budget(timeout_seconds, budget_seconds)
    rows, resolved = list[dict[str, Any]](), dict[str, Any]()
    for name in wanted:
        found, resolved[name] = measure_sides(name, sides[name], device=device, budget=budget, **common)
        rows += found
    which = "lora_" if wanted == ["lora"] else "" if objective is Objective.sft else f"{objective}_"
    path = write_result(
        f"compare_trl_{which}{shape}_{batch_size}x{'-'.join(map(str, all_lengths))}" + (f"_{only}" if only else ""),
        benchmark="compare_trl",
        hardware=hardware,
        settings={
            "parameters": num_parameters(shape),
            **common,
            "ours": {name: COMPARISONS[name].settings for name in wanted},
            "trl_defaults": {name: of_one.get(TRL) for name, of_one in resolved.items()},
            "trl_careful": {name: of_one.get(CAREFUL) for name, of_one in resolved.items()},
        },
        rows=rows,
        summary=summarize(rows),
        folder=results_dir,
    )
    print_result(path, describe, COLUMNS, table_cells)


if __name__ == "__main__":
    typer.run(main)
