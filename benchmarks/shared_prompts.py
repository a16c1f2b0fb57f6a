"""GRPO with shared prompts: a prompt computed once for its completions, against a copy of it in front of each.

    python benchmarks/shared_prompts.py                   # SmolLM2 135M's shape, 8 completions of 128 tokens to a prompt of 512
    python benchmarks/shared_prompts.py --shape tiny      # small, to see that it runs

Both sides take training steps (the recipe's loss, AdamW) on the same completions, in fresh processes that take turns.
Times are
processor time of one thread: other processes on the machine change it less than the clock.

Writes `results/shared_prompts_<shape>_<completions>x<prompt>+<completion>_<hardware>.json`.
"""  # noqa: E501

import json
import statistics
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from measure import Budget, measure_contestants, overrides
from results import RESULTS, gibibytes, print_result, require_hardware, write_result
from shapes import write_model_folder

LABELS = {"true": "prompt computed once", "false": "prompt repeated"}
COLUMNS = ["side", "positions", "step", "memory of a step"]


def work(share: str, shape: str, completions: int, prompt: int, completion: int, report: Path) -> None:
    """Measure the steps of one side and write the result."""
    import torch
    from timing import measure_calls

    from lean_ft.data import Prompt
    from lean_ft.data.prompts import Prompts
    from lean_ft.data.report import DataReport
    from lean_ft.generation import Completion
    from lean_ft.losses import TokenLogProbs, batch_loss
    from lean_ft.memory import apply_memory
    from lean_ft.models import load_model
    from lean_ft.online import Rollouts
    from lean_ft.online.rewards import Scores
    from lean_ft.optim import build_optimizer
    from lean_ft.settings.text import load_config
    from lean_ft.system.catalog import find_recipe, load_recipe
    from lean_ft.training import shares_prompts

    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as place:
        settings = {
            "model.path": write_model_folder(shape, Path(place) / "model"),
            "model.random_init": True,
            "data.source": "unread",
            "data.shared_prompt": share,
            "rewards": "[length]",
            "generation.num_answers": completions,
            "batch_size": completions,
            "output_dir": Path(place) / "run",
        }
        cfg = load_config(load_recipe(find_recipe("grpo")).Config, None, overrides(settings))
        model = load_model(cfg.model, "cpu")
        share_prompts = shares_prompts(cfg)
    apply_memory(model, cfg.memory, compile=False)
    optimizer, log_probs = build_optimizer(model, cfg), TokenLogProbs(model, cfg)
    ids = torch.randint(3, model.config.vocab_size, (completions, prompt + completion))
    asked = Prompts(
        [Prompt(ids[0, :prompt].tolist(), "", {}, "")], seed=0, report=DataReport("prompts"), fingerprint=""
    )
    samples = [Completion(row[prompt:].tolist(), [-10.0] * completion, True) for row in ids]
    rollouts = Rollouts(cfg, asked, 0, share_prompts=share_prompts)
    scores = Scores([float(i) for i in range(completions)], [[]] * completions, [""] * completions)
    rollouts.sample(lambda *_: samples, lambda *_: scores)  # pyright: ignore[reportArgumentType]
    rollouts.begin()
    (batch,) = rollouts.take()

    def step() -> None:
        optimizer.set_lr(1e-6)
        now = log_probs(model, batch)
        batch_loss(cfg, batch, now, num_answers=completions, num_tokens=batch.num_targets).backward()
        optimizer.finish_gradients(max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()

    timing = measure_calls(step, torch.device("cpu"), repeats=1, warmup=1)
    row = {"status": "ok", "reason": None, "positions": batch.num_tokens, **timing._asdict()}
    report.write_text(json.dumps(row))


def describe(result: dict[str, Any]) -> str:
    s = result["settings"]
    return (
        f"GRPO on {s['shape']}: {s['completions']} completions of {s['completion']} tokens to a prompt of {s['prompt']}"
    )


def table_cells(result: dict[str, Any]) -> list[list[str]]:
    """A row per side, with ratios against the repeated prompts."""
    repeated, cells = result["rows"][-1], []
    for row in result["rows"]:
        if row["status"] != "ok" or repeated["status"] != "ok":
            cells.append([row["label"], row["status"], "-", "-"])
            continue
        faster = repeated["cpu_seconds"] / row["cpu_seconds"]
        time, memory = f"{row['cpu_seconds']:.2f} s ({faster:.2f}x as fast)", gibibytes(row["extra_bytes"])
        cells.append([row["label"], f"{row['positions']:,}", time, memory])
    return cells


def main(
    shape: Annotated[str, typer.Option(help="A name from shapes.py.")] = "smollm2_135m",
    completions: Annotated[int, typer.Option(help="Completions of the prompt.")] = 8,
    prompt: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 512,
    completion: Annotated[int, typer.Option(help="Tokens of each completion.")] = 128,
    rounds: Annotated[int, typer.Option(help="Processes of each side; their median is shown.")] = 3,
    timeout_seconds: Annotated[float, typer.Option(help="Most seconds for one round.")] = 1800,
    results_dir: Annotated[Path, typer.Option(help="Folder for the JSON file.")] = RESULTS,
    worker: Annotated[str, typer.Option(hidden=True)] = "",
    report: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Compare both sides on time and memory."""
    if worker and report is not None:
        work(worker, shape, completions, prompt, completion, report)
        return
    settings = {"shape": shape, "completions": completions, "prompt": prompt, "completion": completion}
    arguments = [str(part) for name, value in settings.items() for part in (f"--{name}", value)]
    every = [measure_contestants(__file__, LABELS, arguments, Budget(timeout_seconds)) for _ in range(rounds)]
    rows = every[0]
    for i, row in enumerate(rows):
        if all(of_round[i]["status"] == "ok" for of_round in every):
            for name in ("cpu_seconds", "extra_bytes"):
                row[name] = statistics.median(of_round[i][name] for of_round in every)
    path = write_result(
        f"shared_prompts_{shape}_{completions}x{prompt}+{completion}",
        benchmark="shared_prompts",
        hardware=require_hardware("cpu"),
        settings=settings | {"rounds": rounds},
        rows=rows,
        folder=results_dir,
    )
    print_result(path, describe, COLUMNS, table_cells)


if __name__ == "__main__":
    typer.run(main)
