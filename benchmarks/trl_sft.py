"""The peer: TRL's SFTTrainer in its defaults, run by compare_trl.py in a process of its own.

Given are the length, the batch, the number of steps, that nothing is reported or saved, and a log at every step (to
have the loss). All else is TRL's default: at version 1.16 float32 weights, bfloat16 autocast, gradient checkpointing,
PyTorch's fused AdamW, scaled-dot-product attention, no packing. What the defaults came to is written beside the
metrics and becomes part of the result.

With `--lora-rank` it trains a LoRA adapter of peft's on all linear layers, again with peft's other defaults. With `--distill`
it is TRL's GKDTrainer, whose teacher is the folder's own model, as TRL loads one by its path; no step is on-policy.

The weights are random, in float32, the type in which TRL loads a model that is given by its path.

Writes metrics.jsonl as lean_ft does: one line a step, from the end of the one before, so that collating counts.
"""

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import typer
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer


def peak_memory_bytes() -> int:
    """The allocator's peak on a GPU, the peak resident size of this process on a CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class StepMetrics(TrainerCallback):
    """Writes a line a step. The loss is logged after the step ends, so a line waits for it."""

    def __init__(self, path: Path, counts: dict[str, int]) -> None:
        self._path = path
        self._counts = counts
        self._last = 0.0
        self._row: dict[str, Any] = {}

    def _now(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._last = self._now()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = self._now()
        self._row = {
            "step": state.global_step,
            "step_seconds": now - self._last,
            "peak_memory_bytes": peak_memory_bytes(),
            **self._counts,
        }
        self._last = now

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if self._row and logs and "loss" in logs:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**self._row, "loss": logs["loss"]}) + "\n")
            self._row = {}


def main(
    model_folder: Annotated[Path, typer.Option()],
    data: Annotated[Path, typer.Option()],
    run_directory: Annotated[Path, typer.Option()],
    facts_file: Annotated[Path, typer.Option(help="Where what the defaults came to is written.")],
    batch_size: Annotated[int, typer.Option()],
    length: Annotated[int, typer.Option()],
    steps: Annotated[int, typer.Option()],
    lora_rank: Annotated[int, typer.Option(help="Rank of an adapter to train in place of the model; 0: none.")] = 0,
    distill: Annotated[
        bool, typer.Option("--distill", help="Learn from the folder's model, by the GKDTrainer.")
    ] = False,
) -> None:
    run_directory.mkdir(parents=True)
    beside = {} if torch.cuda.is_available() else {"use_cpu": True}  # without it, bf16 asks for a GPU
    config_class, trainer_class, teacher = SFTConfig, SFTTrainer, {}
    if distill:
        from trl.experimental.gkd import GKDConfig, GKDTrainer

        config_class, trainer_class = GKDConfig, GKDTrainer
        beside["lmbda"], teacher["teacher_model"] = 0.0, str(model_folder)
    args = config_class(
        output_dir=str(run_directory),
        max_length=length,
        per_device_train_batch_size=batch_size,
        max_steps=steps,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        **beside,
    )
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    dataset = load_dataset("json", data_files=str(data), split="train", cache_dir=str(run_directory / "cache"))
    adapter = LoraConfig(r=lora_rank, target_modules="all-linear") if lora_rank else None
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    trainer = trainer_class(
        model=model,
        args=args,
        train_dataset=dataset,
        processing_class=AutoTokenizer.from_pretrained(model_folder),
        peft_config=adapter,
        **teacher,
    )

    # Every row is longer than the length, so the first batch tells the size of all of them.
    batch = next(iter(trainer.get_train_dataloader()))
    num_tokens = batch["input_ids"].numel()
    num_targets = int((batch["labels"][:, 1:] != -100).sum())
    counts = {"tokens": num_tokens, "target_tokens": num_targets}
    trainer.add_callback(StepMetrics(run_directory / "metrics.jsonl", counts))
    facts = {
        "weights": str(next(model.parameters()).dtype).removeprefix("torch."),
        "bf16_autocast": args.bf16,
        "gradient_checkpointing": args.gradient_checkpointing,
        "optimizer": str(getattr(args.optim, "value", args.optim)),
        "attention": model.config._attn_implementation,
        "loss": args.loss_type,
        "packing": args.packing,
        "torch_compile": args.torch_compile,
        "parameters": num_parameters,
        "trained_parameters": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
        "device": str(args.device),
        **({"beta": args.beta, "lmbda": args.lmbda, "teacher": str(trainer.teacher_model.dtype)} if distill else {}),
    }
    facts_file.write_text(json.dumps(facts) + "\n", encoding="utf-8")
    trainer.train()


if __name__ == "__main__":
    typer.run(main)
