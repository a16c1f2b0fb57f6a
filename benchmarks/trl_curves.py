"""Compare the learning curves of lean_ft's recipes with TRL's trainers: same rows, order, learning rate and AdamW.

    python benchmarks/trl_curves.py                            # the embedded model
    python benchmarks/trl_curves.py --model FOLDER --steps 100 # your own Hugging Face folder
    python benchmarks/trl_curves.py --only sft,dpo

Both sides train in float32 with TRL's defaults for AdamW, schedule (linear) and clipping (norm 1). Neither side is
patched. Rows are GSM8K as plain text, in file order. Both `lora` runs start from one adapter, which lean_ft writes and
peft reads. For `grpo`, lean_ft samples completions and records them with their rewards, and TRL reads both through its
`rollout_func`. Each round is used twice, so that ratios differ from 1.

Rounding makes two correct float32 implementations diverge, and AdamW amplifies this. As a yardstick, TRL runs a second
time with eager attention instead of scaled-dot-product attention.

Writes `results/trl_curves_<hardware>.json` and the chart of docs/correctness.md. Exits with 1 if the difference between
lean_ft and TRL is more than 10 times the difference between TRL's two runs and more than 1e-5 of the loss.
"""

import gc
import itertools
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from measure import read_steps, recipe_command, run_measured
from results import (
    RESULTS,
    ROOT,
    Hardware,
    console,
    narrow_path,
    print_result,
    require_hardware,
    save_picture,
    write_result,
)
from shapes import EMBEDDED_MODEL, find_gsm8k

os.environ.setdefault("HF_HUB_OFFLINE", "1")

FACTOR, FLOOR = 10, 1e-5  # limit relative to the difference between TRL's runs, and the smallest difference that counts
PICTURE = ROOT / "docs" / "trl_curves.png"
MAX_LENGTH = 192  # longer rows are left out, so that nothing is truncated

REWARD = '''"""Rewards of the comparison, recorded with what they are of."""

import json


def digits(prompt_ids, completion_ids, completions):
    rewards = [sum(character.isdigit() for character in text) / max(1, len(text)) for text in completions]
    with open({path!r}, "a") as file:
        for row in zip(prompt_ids, completion_ids, rewards):
            file.write(json.dumps(row) + "\\n")
    return rewards
'''


class Objective(NamedTuple):
    """A recipe and the trainer to compare."""

    label: str
    recipe: str
    settings: dict[str, Any]
    trainer: str
    arguments: dict[str, Any]


ADAPTER = {"lora.rank": 8, "lora.alpha": 16}
OBJECTIVES = {
    "sft": Objective(
        "full fine-tuning",
        "finetune",
        {"optimizer.lr": 3e-4, "batch_size": 2, "gradient_accumulation_steps": 2, "data.max_length": MAX_LENGTH},
        "SFT",
        {"max_length": MAX_LENGTH},
    ),
    "lora": Objective(
        "LoRA of rank 8",
        "finetune",
        {
            "optimizer.lr": 1e-3,
            "batch_size": 2,
            "gradient_accumulation_steps": 2,
            "data.max_length": MAX_LENGTH,
            **ADAPTER,
        },
        "SFT",
        {"max_length": MAX_LENGTH},
    ),
    "dpo": Objective(
        "DPO",
        "dpo",
        {"optimizer.lr": 5e-5, "batch_size": 2, "gradient_accumulation_steps": 2, "data.max_length": MAX_LENGTH},
        "DPO",
        {"max_length": MAX_LENGTH},
    ),
    "grpo": Objective(
        "GRPO",
        "grpo",
        {
            "optimizer.lr": 1e-4,
            "batch_size": 8,
            "loss.epsilon_high": 0.2,  # TRL's default
            "generation.num_answers": 8,
            "generation.max_new_tokens": 32,
            "generation.passes": 2,
        },
        "GRPO",
        {"num_generations": 8, "max_completion_length": 32, "num_iterations": 2, "shuffle_dataset": False},
    ),
}
COMMON = {
    "model.dtype": "float32",
    "data.chat": False,
    "data.shuffle": False,
    "schedule.name": "linear",
    "clip_grad_norm": 1.0,
    "plan": False,
}
COLUMNS = [
    "objective",
    "loss",
    "loss: lean_ft, TRL",
    "loss: TRL, TRL eager",
    "weights: lean_ft, TRL",
    "weights: TRL, TRL eager",
]


# What both train on ---------------------------------------------------------------------------------------------------


def rows_of(name: str, folder: Path, model: Path, number: int, per_step: int) -> list[dict[str, str]]:
    """The first `number` rows that fit; if there are fewer, whole steps of them for several epochs."""
    from lean_ft import load_tokenizer

    tokenizer = load_tokenizer(model)

    def lines(file: str) -> Iterator[dict[str, str]]:
        return map(json.loads, (folder / file).read_text(encoding="utf-8").splitlines())

    if name == "dpo":
        rows = ({**row, "prompt": row["prompt"] + "\n"} for row in lines("gsm8k_preferences.jsonl"))
    else:
        rows = ({"prompt": row["question"] + "\n", "completion": row["answer"]} for row in lines("gsm8k_train.jsonl"))
    fitting = (
        row
        for row in rows
        if all(len(tokenizer.encode(row["prompt"] + text)) < MAX_LENGTH for key, text in row.items() if key != "prompt")
    )
    found = list(itertools.islice(fitting, number))
    found = found[: len(found) // per_step * per_step]
    if not found:
        raise typer.BadParameter(f"fewer than {per_step} rows have at most {MAX_LENGTH} tokens")
    return [{"prompt": row["prompt"]} for row in found] if name == "grpo" else found


# The two sides --------------------------------------------------------------------------------------------------------


def run_recipe(objective: Objective, settings: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Run `leanft run` in `folder` and return the metrics of each step."""
    given = {**COMMON, **objective.settings, **settings, "output_dir": folder}
    measured = run_measured(recipe_command(objective.recipe, given), timeout_seconds=3600)
    if measured.status != "ok":
        raise RuntimeError(f"{objective.label}: {measured.reason}\n{measured.output}")
    return read_steps(folder / "metrics.jsonl")


def run_trainer(
    objective: Objective, model_folder: Path, data: Path, steps: int, start: Path, attention: str, folder: Path
) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """Run TRL's trainer. Returns its logs per step and the trained weights by name."""
    import torch
    import trl
    from datasets import load_dataset
    from peft import PeftModel, get_peft_model_state_dict
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback

    torch.manual_seed(0)
    lines: list[dict[str, float]] = []

    class Lines(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
            if "loss" in logs:
                lines.append({"loss": logs["loss"], "grad_norm": logs["grad_norm"]})

    ours = objective.settings
    args = getattr(trl, f"{objective.trainer}Config")(
        output_dir=str(folder),
        per_device_train_batch_size=ours["batch_size"],
        gradient_accumulation_steps=ours.get("gradient_accumulation_steps", 1),
        learning_rate=ours["optimizer.lr"],
        max_steps=steps,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        train_sampling_strategy="sequential",
        **objective.arguments,
    )
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, attn_implementation=attention)
    adapter = start / "adapter_model.safetensors"
    if adapter.exists():
        model = PeftModel.from_pretrained(model, start, is_trainable=True)
    further: dict[str, Any] = {}
    if objective.trainer == "GRPO":
        further = replayed(start / "rounds.jsonl")
    trainer = getattr(trl, f"{objective.trainer}Trainer")(
        model=model,
        args=args,
        train_dataset=load_dataset("json", data_files=str(data), split="train", cache_dir=str(folder / "cache")),
        processing_class=AutoTokenizer.from_pretrained(model_folder),
        callbacks=[Lines()],
        **further,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    trained = trainer.model
    weights = get_peft_model_state_dict(trained) if adapter.exists() else trained.state_dict()
    weights = {name: tensor.detach().clone() for name, tensor in weights.items()}
    del trainer, model, trained
    gc.collect()
    return lines, weights


def replayed(recorded: Path) -> dict[str, Callable[..., Any]]:
    """A rollout function and a reward function that replay the recorded completions in order."""
    rows = [json.loads(line) for line in recorded.read_text().splitlines()]
    asked, judged = iter(rows), iter(rows)

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        taken = list(itertools.islice(asked, len(prompts)))
        tokenizer = trainer.processing_class
        assert [tokenizer(prompt)["input_ids"] for prompt in prompts] == [ids for ids, _, _ in taken]
        return {
            "prompt_ids": [ids for ids, _, _ in taken],
            "completion_ids": [ids for _, ids, _ in taken],
            "logprobs": None,
        }

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        taken = list(itertools.islice(judged, len(completion_ids)))
        assert completion_ids == [ids for _, ids, _ in taken]
        return [value for _, _, value in taken]

    return {"rollout_func": rollout, "reward_funcs": reward}


# How far apart --------------------------------------------------------------------------------------------------------


def apart(one: list[float], other: list[float]) -> list[float]:
    """The difference of each step's losses, relative to the mean absolute loss."""
    size = sum(map(abs, other)) / len(other)
    return [abs(a - b) / size for a, b in zip(one, other, strict=True)]


def weights_apart(one: dict[str, Any], other: dict[str, Any], start: dict[str, Any]) -> float:
    """The distance between two trained models, relative to the distance that `other` moved."""
    between = sum((one[name].double() - other[name].double()).square().sum() for name in start)
    way = sum((other[name].double() - start[name].double()).square().sum() for name in start)
    return float((between / way).sqrt())


def read_weights(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def compare(name: str, model: Path, data: Path, steps: int, folder: Path) -> dict[str, Any]:
    """Run an objective on both sides."""
    objective = OBJECTIVES[name]
    settings: dict[str, Any] = {"model.path": model, "max_steps": steps, "epochs": steps, "device": "cpu"}
    per_step = objective.settings["batch_size"] * objective.settings.get("gradient_accumulation_steps", 1)
    rows = folder / "rows.jsonl"
    if name == "grpo":  # one prompt per round, whose completions are used twice
        per_step = 1
    given = rows_of(name, data, model, steps * per_step, per_step)
    rows.write_text("".join(json.dumps(row) + "\n" for row in given))
    settings["data.source"] = rows
    start = folder / "start"
    start.mkdir()
    if name == "lora":  # one step with learning rate 0 writes the initial adapter
        run_recipe(objective, {**settings, "optimizer.lr": 0, "max_steps": 1}, folder / "first")
        start = folder / "first" / "step_00000001"
    elif name == "grpo":
        (folder / "rewards.py").write_text(REWARD.format(path=str(start / "rounds.jsonl")))
        settings["rewards"] = f"[{folder / 'rewards.py'}:digits]"
    metrics = run_recipe(objective, settings, folder / "ours")
    curves = {"lean_ft": [line["loss"] for line in metrics]}
    norms = {"lean_ft": [line["grad_norm"] for line in metrics]}
    weights = {"lean_ft": read_weights(folder / "ours" / f"step_{steps:08d}")}
    for side, attention in (("TRL", "sdpa"), ("TRL, eager", "eager")):
        lines, weights[side] = run_trainer(objective, model, rows, steps, start, attention, folder / attention)
        curves[side], norms[side] = ([line[key] for line in lines] for key in ("loss", "grad_norm"))
    before = read_weights(start if name == "lora" else model)
    return {
        "name": name,
        "label": objective.label,
        "status": "ok",
        "settings": objective.settings,
        "losses": {side: [float(f"{loss:.9g}") for loss in losses] for side, losses in curves.items()},
        "rewards": [round(line["reward"], 5) for line in metrics] if name == "grpo" else None,
        "loss_apart": max(apart(curves["lean_ft"], curves["TRL"])),
        "loss_apart_of_trl": max(apart(curves["TRL, eager"], curves["TRL"])),
        "norm_apart": max(apart(norms["lean_ft"], norms["TRL"])),
        "norm_apart_of_trl": max(apart(norms["TRL, eager"], norms["TRL"])),
        "weights_apart": weights_apart(weights["lean_ft"], weights["TRL"], before),
        "weights_apart_of_trl": weights_apart(weights["TRL, eager"], weights["TRL"], before),
    }


def beyond(row: dict[str, Any]) -> bool:
    """Whether the difference from TRL is larger than rounding explains."""
    return row["loss_apart"] > max(FACTOR * row["loss_apart_of_trl"], FLOOR)


# What is shown --------------------------------------------------------------------------------------------------------


def describe(result: dict[str, Any]) -> str:
    settings = result["settings"]
    return (
        f"{settings['steps']} steps of a model of {settings['parameters']:,} parameters in float32, TRL "
        f"{result['versions']['trl']}: the largest difference of a step's loss, relative to the mean loss, and the "
        "distance between the final weights, relative to how far training moved them"
    )


def table_cells(result: dict[str, Any]) -> list[list[str]]:
    cells = []
    for row in result["rows"]:
        losses = row["losses"]["TRL"]
        ends = [sum(part) / len(part) for part in (losses[:10], losses[-10:])]
        of_both = [
            f"{row[key]:.1e}" for key in ("loss_apart", "loss_apart_of_trl", "weights_apart", "weights_apart_of_trl")
        ]
        cells.append([row["label"], f"{ends[0]:.3f} to {ends[1]:.3f}", *of_both])
    return cells


def picture(result: dict[str, Any], narrow: bool = False) -> Any:
    """A figure of each objective's curves, and their difference below; `narrow`, for phones, has it beside them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = result["rows"]
    shape, size = ((len(rows), 2), (5.2, 2.2 * len(rows))) if narrow else ((2, len(rows)), (3.4 * len(rows), 5.2))
    figure, axes = plt.subplots(*shape, figsize=size, dpi=160 if narrow else 90, sharex=True, squeeze=False)
    axes = axes.T if narrow else axes
    for row, above, below in zip(rows, axes[0], axes[1], strict=True):
        losses = row["losses"]
        steps = range(1, len(losses["TRL"]) + 1)
        above.plot(steps, losses["TRL"], color="#f0a202", lw=3.5, label="TRL")
        above.plot(steps, losses["lean_ft"], color="#1b1f24", lw=1.0, label="lean_ft")
        above.set_title(row["label"], loc="left", fontsize=10)
        if row["rewards"]:
            above.set_title("GRPO, and its mean reward", loc="left", fontsize=10)
            beside = above.twinx()
            beside.plot(steps, row["rewards"], color="#2b7bba", lw=0.8)
            beside.tick_params(labelsize=8, colors="#2b7bba")
            beside.spines["top"].set_visible(False)
        for side, label, color in (
            ("TRL, eager", "TRL and TRL, eager", "#f0a202"),
            ("lean_ft", "lean_ft and TRL", "#1b1f24"),
        ):
            below.plot(
                steps, [max(d, 1e-9) for d in apart(losses[side], losses["TRL"])], color=color, lw=1.0, label=label
            )
        below.set_yscale("log")
        below.set_ylim(5e-10, 1e-2)
        below.set_xlabel("step")
        for one in (above, below):
            one.spines[["top", "right"]].set_visible(False)
            one.tick_params(labelsize=8)
    axes[0][0].set_ylabel("loss")
    axes[1][0].set_ylabel("difference of the losses")
    place = (0.98, 0.97) if narrow else (1, 1)
    figure.legend(
        *axes[0][0].get_legend_handles_labels(),
        frameon=False,
        fontsize=9,
        loc="upper right",
        bbox_to_anchor=place,
        ncols=2,
    )
    axes[1][0].legend(frameon=False, fontsize=8, loc="upper right")
    figure.suptitle(
        f"lean_ft and TRL {result['versions']['trl']}, float32, {Hardware(result['hardware']).short_name}",
        x=0.01,
        ha="left",
        fontsize=10,
    )
    figure.tight_layout(rect=(0, 0, 1, 0.97) if narrow else None)
    return figure


def draw(result: dict[str, Any], path: Path) -> None:
    """Save the picture, and its narrow form beside it."""
    save_picture(picture(result), path)
    save_picture(picture(result, narrow=True), narrow_path(path))


def main(
    model: Annotated[Path, typer.Option(help="Folder of the model.", envvar="TRAINED_MODEL")] = EMBEDDED_MODEL,
    data: Annotated[Path | None, typer.Option(help="Folder of GSM8K's rows and preferences.")] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps per run.")] = 100,
    only: Annotated[
        str, typer.Option(help=f"Rows to run, comma-separated: {', '.join(OBJECTIVES)}, with commas.")
    ] = "",
    results_dir: Annotated[Path, typer.Option(help="Folder for the JSON result.")] = RESULTS,
    chart: Annotated[Path, typer.Option(help="Path of the chart.")] = PICTURE,
) -> None:
    """Compare learning curves with TRL's."""
    hardware = require_hardware("cpu")
    if data is None and (found := find_gsm8k()) is not None:
        data = found.parent
    if data is None:
        raise typer.BadParameter("expected the folder of GSM8K's rows", param_hint="--data")
    names = [name.strip() for name in only.split(",") if name.strip()] or list(OBJECTIVES)
    if unknown := [name for name in names if name not in OBJECTIVES]:
        raise typer.BadParameter(f"unknown objective {unknown[0]!r}; expected some of {', '.join(OBJECTIVES)}")
    rows = []
    for name in names:
        with tempfile.TemporaryDirectory(prefix="lean_ft_curves_") as folder:
            rows.append(compare(name, model, data, steps, Path(folder)))
    size = sum(tensor.numel() for tensor in read_weights(model).values())
    path = write_result(
        "trl_curves",
        benchmark="trl_curves",
        hardware=hardware,
        settings={"steps": steps, "parameters": size, "max_length": MAX_LENGTH, "common": COMMON},
        rows=rows,
        folder=results_dir,
    )
    result = print_result(path, describe, COLUMNS, table_cells)
    draw(result, chart)
    failed = [row["label"] for row in rows if beyond(row)]
    for label in failed:
        console.print(f"the difference from TRL is larger than rounding explains: {label}", markup=False)
    raise typer.Exit(1 if failed else 0)


if __name__ == "__main__":
    typer.run(main)
