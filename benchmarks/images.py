"""Compare training with images with TRL's SFTTrainer: one model, the same rows, new processes that alternate.

    python benchmarks/images.py                          # 37 M parameters, 4 rows with a picture each per step, two rounds
    python benchmarks/images.py --only ours_frozen,trl   # two of the sides
    python benchmarks/images.py --layers 2 --steps 4 --rounds 1      # in a minute

The model has the layers of Qwen3-VL and random weights: a vision tower with three deepstack mergers, and a language
model. Rows are chats about a picture of 6 to 40 KB with 64 to 121 image tokens, and answers of 10 to 80 words.

lean_ft uses bfloat16 weights, 8-bit AdamW in backward, selective checkpointing, chunked logits and no padding. TRL runs
with its defaults,
which train the vision tower (on a CPU: float32 weights, bfloat16 autocast, gradient checkpointing), and with care: the
vision tower frozen by hand, and with bfloat16 weights, 8-bit AdamW of bitsandbytes and checkpointing that keeps
attention. TRL refuses packing for rows with images. Both sides train on every token of text; TRL also trains on image
tokens.

Speed is real tokens (image tokens and text, without padding) per CPU second of all threads, so that other work on the
machine changes it little. It covers decoding, collating and the update, from the end of the third step. Memory is the
peak resident size of the process.

TRL is in the extra `compare`. It also imports torchvision, whose wheels on PyPI need CUDA's libraries, so a CPU build
of PyTorch cannot load their operators. No operator is used here, so the peer declares the two that the import names:
pip install --no-deps torchvision.

Writes `results/images_<rows per step>_<hardware>.json`.
"""  # noqa: E501

import importlib.util
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from measure import Budget, names_in, run_measured
from results import RESULTS, console, gibibytes, print_result, require_hardware, tokens_per_second, write_result
from shapes import ROOT

TINY = ROOT / "lean_ft" / "assets" / "tiny-images" / "model"
LABELS = {
    "ours_trained": "lean_ft, tower trained",
    "ours_frozen": "lean_ft, tower frozen",
    "trl": "TRL, defaults",
    "trl_frozen": "TRL, defaults, tower frozen",
    "trl_careful": "TRL, bfloat16 and 8-bit AdamW",
    "trl_careful_frozen": "TRL, bfloat16 and 8-bit AdamW, tower frozen",
}
WARMUP_STEPS = 3
SIZES = ((320, 240), (256, 256), (512, 160), (224, 336), (640, 160), (288, 256), (288, 416), (352, 352))
WORDS = [
    "red",
    "green",
    "blue",
    "yellow",
    "purple",
    "cyan",
    "one",
    "two",
    "three",
    "four",
    "dots",
    "are",
    "there",
    "how",
    "many",
    "what",
    "color",
    "the",
]
OURS = {
    "model.dtype": "bfloat16",
    "data.packing": "padding_free",
    "data.train_on": "all",
    "optimizer.name": "adamw_8bit",
    "optimizer.in_backward": True,
    "clip_grad_norm": None,
    "memory.activation_checkpointing": "selective",
    "memory.loss_chunk_tokens": 256,
    "memory.loss_accumulation_dtype": "weight",
    "plan": False,
}


def config(layers: int) -> dict[str, Any]:
    """The config.json of the measured model."""
    tiny = json.loads((TINY / "config.json").read_text(encoding="utf-8"))
    text = {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": layers}
    text |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 4096}
    text["rope_parameters"] = tiny["text_config"]["rope_parameters"] | {"mrope_section": [12, 10, 10]}
    vision = {"depth": layers, "hidden_size": 384, "intermediate_size": 1536, "num_heads": 6, "patch_size": 16}
    vision |= {"num_position_embeddings": 256, "out_hidden_size": 512}
    vision["deepstack_visual_indexes"] = sorted({layers * i // 4 for i in (1, 2, 3)})
    vision["initializer_range"] = text["initializer_range"] = 0.02
    return tiny | {"text_config": tiny["text_config"] | text, "vision_config": tiny["vision_config"] | vision}


def write_model(folder: Path, layers: int) -> dict[str, int]:
    """Write a folder with random weights in float32, for both sides. Returns numbers of parameters."""
    from lean_ft.models import load_model, save_model

    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "config.json").write_text(json.dumps(config(layers)))
    settings = json.loads((TINY / "preprocessor_config.json").read_text(encoding="utf-8"))
    settings |= {"patch_size": 16, "size": {"shortest_edge": 4 * 1024, "longest_edge": 256 * 1024}}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    videos = settings | {"video_processor_type": "Qwen3VLVideoProcessor"}  # read by the peer's processor, and not used
    (folder / "video_preprocessor_config.json").write_text(json.dumps(videos))
    model = load_model(folder, images="train", random_init=True)
    save_model(model, folder)
    of_tower = [parameter.numel() for name, parameter in model.named_parameters() if name.startswith("vision.")]
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "vision_parameters": sum(of_tower),
    }


def write_rows(folder: Path, num_rows: int) -> Path:
    """Write chats about pictures, and the pictures."""
    from PIL import Image

    drawn, rows = random.Random(0), []
    folder.mkdir()
    for i in range(num_rows):
        noise = Image.frombytes("RGB", (24, 24), drawn.randbytes(24 * 24 * 3))
        noise.resize(SIZES[i % len(SIZES)], Image.Resampling.BICUBIC).save(folder / f"{i}.jpg", quality=90)
        asked, answered = (" ".join(drawn.choices(WORDS, k=k)) for k in (8, drawn.randint(10, 80)))
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        rows.append({"messages": messages, "images": [f"{i}.jpg"]})
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


# In the process of one side ------------------------------------------------------------------------------------------


class Clock:
    """CPU seconds and real tokens at the end of each step."""

    def __init__(self) -> None:
        self.seconds, self.tokens, self.positions = list[float](), list[int](), list[int]()

    def tick(self) -> None:
        self.seconds.append(time.process_time())

    def report(self, **facts: Any) -> dict[str, Any]:
        start = WARMUP_STEPS - 1
        measured = sum(self.tokens[WARMUP_STEPS : len(self.seconds)])
        spent = self.seconds[-1] - self.seconds[start]
        peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
        return {
            "tokens_per_cpu_second": measured / spent,
            "cpu_seconds_per_step": spent / (len(self.seconds) - WARMUP_STEPS),
            "tokens": sum(self.tokens),
            "padding_share": 1 - sum(self.tokens) / sum(self.positions),
            "peak_memory_bytes": int(peak.split()[1]) * 1024,
            **facts,
        }


def train_ours(side: str, model: Path, data: Path, scratch: Path, batch_size: int, steps: int) -> dict[str, Any]:
    from lean_ft.notebook import run
    from lean_ft.training import Run

    clock, steps_of = Clock(), Run.steps

    def timed(self: Run) -> Iterator[int]:
        for step in steps_of(self):
            yield step
            clock.tick()

    Run.steps = timed
    settings = {
        "model.path": model,
        "model.images": "frozen" if side.endswith("frozen") else "train",
        "data.source": data,
        "batch_size": batch_size,
        "max_steps": steps,
        "epochs": 100,
        "device": "cpu",
        "save_every": 0,
        "output_dir": scratch / "run",
        "data.cache_dir": scratch / "cache",
    }
    run("finetune", **settings, **OURS)
    lines = [json.loads(line) for line in (scratch / "run" / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "step_seconds" in line]
    clock.tokens = clock.positions = [line["tokens"] for line in lines]
    return clock.report(losses=[line["loss"] for line in lines])


def train_trl(side: str, model: Path, data: Path, scratch: Path, batch_size: int, steps: int) -> dict[str, Any]:
    import torch

    if torch.version.cuda is None:
        operators = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    from datasets import Dataset, Features, Image, Sequence, Value
    from transformers import AutoProcessor, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    rows = [json.loads(line) for line in data.read_text().splitlines()]
    message = {"role": Value("string"), "content": Value("string")}
    features = Features({"messages": [message], "images": Sequence(Image())})
    table = {
        "messages": [row["messages"] for row in rows],
        "images": [[str(data.parent / name) for name in row["images"]] for row in rows],
    }
    clock = Clock()

    class Ticks(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            clock.tick()

    careful: dict[str, Any] = {
        "model_init_kwargs": {"dtype": "bfloat16"},
        "optim": "adamw_bnb_8bit",
        "gradient_checkpointing_kwargs": {"selective": True},
    }
    args = SFTConfig(
        output_dir=str(scratch / "run"),
        per_device_train_batch_size=batch_size,
        max_steps=steps,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        **(careful if "careful" in side else {}),
    )
    trainer = SFTTrainer(
        str(model),
        args=args,
        train_dataset=Dataset.from_dict(table, features=features),
        processing_class=AutoProcessor.from_pretrained(model),
        callbacks=[Ticks()],
    )
    if side.endswith("frozen"):
        trainer.model.model.visual.requires_grad_(False)
    collate = trainer.data_collator

    def counted(examples: list[Any]) -> Any:
        batch = collate(examples)
        clock.tokens.append(int(batch["attention_mask"].sum()))
        clock.positions.append(batch["input_ids"].numel())
        return batch

    trainer.data_collator = counted
    trainer.train()
    facts = {
        "weights": str(trainer.model.dtype).removeprefix("torch."),
        "bf16_autocast": args.bf16,
        "gradient_checkpointing": args.gradient_checkpointing,
        "optimizer": str(getattr(args.optim, "value", args.optim)),
        "max_length": args.max_length,
        "attention": trainer.model.config._attn_implementation,
    }
    return clock.report(**facts, losses=[line["loss"] for line in trainer.state.log_history if "loss" in line])


# -----------------------------------------------------------------------------------------------------------------------  # noqa: E501


def compare(
    sides: list[str], *, layers: int, batch_size: int, steps: int, rounds: int, threads: int, budget: Budget
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Measure each side in new processes; the order is reversed in every second round. Returns medians and the largest
    peak, and the model's numbers of parameters."""
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory(prefix="lean_ft_images_") as temporary:
        model, report = Path(temporary) / "model", Path(temporary) / "report.json"
        counts = write_model(model, layers)
        data = write_rows(Path(temporary) / "rows", batch_size * steps)
        for number in range(rounds):
            for side in sides if number % 2 == 0 else reversed(sides):
                scratch = Path(temporary) / f"{side}_{number}"
                scratch.mkdir()
                command = [sys.executable, __file__, "--worker", side, "--model", model, "--data", data]
                command += ["--scratch", scratch, "--report", report]
                command += ["--batch-size", str(batch_size), "--steps", str(steps)]
                environment = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
                row: dict[str, Any] = {"status": "not run", "reason": "trl or torchvision is not installed"}
                if side.startswith("ours") or all(map(importlib.util.find_spec, ("trl", "torchvision"))):
                    measured = run_measured(command, timeout_seconds=budget.timeout_seconds(), environment=environment)
                    row = {"status": measured.status, "reason": measured.reason}
                    if measured.status == "ok":
                        row |= json.loads(report.read_text())
                found[side].append(row)
                shown = f"{row['tokens_per_cpu_second']:.0f}" if row["status"] == "ok" else row["reason"]
                console.print(f"{LABELS[side]:<32} {row['status']}: {shown}", markup=False)
    rows: list[dict[str, Any]] = []
    for side, runs in found.items():
        done = [run for run in runs if run["status"] == "ok"]
        row = {"name": side, "label": LABELS[side], **(runs[-1] if len(done) < len(runs) else done[-1]), "runs": runs}
        if len(done) == len(runs):
            for name in ("tokens_per_cpu_second", "cpu_seconds_per_step"):
                row[name] = statistics.median(run[name] for run in done)
            row["peak_memory_bytes"] = max(run["peak_memory_bytes"] for run in done)
        rows.append(row)
    return rows, counts


COLUMNS = ["", "tokens per CPU second", "peak memory", "frozen next to it", "trained next to it"]


def describe(result: dict[str, Any]) -> str:
    """The caption of the table."""
    settings = result["settings"]
    return (
        f"chats about pictures, {settings['batch_size']} per step, {settings['parameters'] / 1e6:.0f} M parameters, of "
        f"which {settings['vision_parameters'] / 1e6:.0f} M read images; {settings['threads']} thread, median of "
        f"{settings['rounds']} rounds"
    )


def table_cells(result: dict[str, Any]) -> list[list[str]]:
    """The rows of the table, with the speed and the memory of lean_ft as ratios of each row's."""
    rows = {row["name"]: row for row in result["rows"] if row["status"] == "ok"}

    def ratios(ours: str, row: dict[str, Any]) -> str:
        if ours not in rows or row["name"].startswith("ours"):
            return "-"
        speed = rows[ours]["tokens_per_cpu_second"] / row["tokens_per_cpu_second"]
        return f"{speed:.2f}x at {rows[ours]['peak_memory_bytes'] / row['peak_memory_bytes']:.2f}"

    return [
        [row["label"], tokens_per_second(row["tokens_per_cpu_second"]), gibibytes(row["peak_memory_bytes"])]
        + [ratios(ours, row) for ours in ("ours_frozen", "ours_trained")]
        if row["status"] == "ok"
        else [row["label"], row["status"], "-", "-", "-"]
        for row in result["rows"]
    ]


def main(
    layers: Annotated[int, typer.Option(help="Layers of the vision tower, and of the language model.")] = 4,
    batch_size: Annotated[int, typer.Option(help="Rows per step, with one picture each.")] = 4,
    steps: Annotated[int, typer.Option(help="Steps; the first three are not timed.")] = 8,
    rounds: Annotated[int, typer.Option(help="Rounds.")] = 2,
    threads: Annotated[int, typer.Option(help="Threads of PyTorch. One wastes no CPU time on waiting.")] = 1,
    only: Annotated[str, typer.Option(help="Sides, separated by commas.")] = "",
    timeout_seconds: Annotated[float, typer.Option(help="Time limit of one process in seconds.")] = 1800,
    results_dir: Annotated[Path, typer.Option(help="Folder for the JSON result.")] = RESULTS,
    worker: Annotated[str, typer.Option(hidden=True)] = "",
    model: Annotated[Path | None, typer.Option(hidden=True)] = None,
    data: Annotated[Path | None, typer.Option(hidden=True)] = None,
    scratch: Annotated[Path | None, typer.Option(hidden=True)] = None,
    report: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Compare training with images with TRL."""
    if worker and model and data and scratch and report:
        train = train_ours if worker.startswith("ours") else train_trl
        report.write_text(json.dumps(train(worker, model, data, scratch, batch_size, steps)))
        os._exit(0)  # the checkpoint at the end is not measured, and libraries may wait for threads
    hardware = require_hardware("cpu")
    sides = names_in(only, LABELS)
    settings = {"layers": layers, "batch_size": batch_size, "steps": steps, "rounds": rounds, "threads": threads}
    rows, counts = compare(
        sides,
        layers=layers,
        batch_size=batch_size,
        steps=steps,
        rounds=rounds,
        threads=threads,
        budget=Budget(timeout_seconds),
    )
    path = write_result(
        f"images_{batch_size}",
        benchmark="images",
        hardware=hardware,
        settings=settings | counts | {"ours": OURS},
        rows=rows,
        folder=results_dir,
    )
    print_result(path, describe, COLUMNS, table_cells)


if __name__ == "__main__":
    typer.run(main)
