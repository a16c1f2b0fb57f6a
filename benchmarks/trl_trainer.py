"""The peer of compare_trl.py: one of TRL's trainers, with its defaults or configured with care, in its own process.

Set are the length, the batch, the number of steps, no reporting or saving, and logging at every step. All else is TRL's
default. In version 1.16 these are float32 weights, bfloat16 autocast, gradient checkpointing, PyTorch's fused AdamW,
scaled-dot-product attention and no packing. The resolved configuration is written to a file and becomes part of the
result. Weights are random, in float32, as TRL loads a model from a path.

`--careful` sets what else saves memory or time on a CPU:
- all objectives: bfloat16 weights (`model_init_kwargs={"dtype": "bfloat16"}`) and bitsandbytes' 8-bit AdamW;
- sft: compiled layers, packing, and checkpointing that keeps attention (`gradient_checkpointing_kwargs={"selective":
  True}`). Packing is `wrapped`, because `bfd` joins the whole batch to one row, whose attention without FlashAttention
  costs a multiple;
- distill: checkpointing that keeps attention, and micro-batches of one row, because GKDTrainer computes all logits of a
  micro-batch.

TRL 1.16 computes the loss of sft, dpo and grpo in chunks by default. DPOTrainer's `padding_free` is disabled in this
version. Liger's and the Hub's kernels need a GPU.

- `sft`: SFTTrainer; with `--lora-rank` a LoRA adapter of peft on all linear layers, with peft's other defaults.
- `distill`: GKDTrainer with a teacher of the same shape, and no on-policy steps.
- `dpo`: DPOTrainer, without dropout. `--reference resident` passes a copy of the model, as the trainer loads for a
  model with a name. `cached` is `precompute_ref_log_probs`. With an adapter, the reference is the model without it.
- `grpo`: GRPOTrainer, with completions of one length, sampled with transformers' generate in the training process. The
  time of sampling and rewards is recorded.
- `tools`: the same with a tool that each completion calls twice. A script replaces the sampled tokens
  (`scripted_turns.py`).

Writes metrics.jsonl as lean_ft does: one line per step, timed from the end of the previous step, so that collating
counts.
"""

import copy
import functools
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import scripted_turns
import torch
import typer
from datasets import load_dataset
from letters_reward import letters
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LogitsProcessorList, TrainerCallback


def peak_memory_bytes() -> int:
    """The allocator's peak on a GPU, the peak resident size of this process on a CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def now() -> float:
    """Synchronize the device and return the time in seconds."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class StepMetrics(TrainerCallback):
    """Write one line per step. TRL logs the loss after the step ends, so the line waits for it."""

    def __init__(self, path: Path, counts: dict[str, Any]) -> None:
        self._path = path
        self._counts = counts
        self._last = 0.0
        self._row: dict[str, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._last = now()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        ended = now()
        times = {"step": state.global_step, "step_seconds": ended - self._last}
        self._row = {**times, "peak_memory_bytes": peak_memory_bytes(), **self._counts}
        self._last = ended

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if self._row and logs and "loss" in logs:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**self._row, "loss": logs["loss"]}) + "\n")
            self._row = {}


def careful_settings(objective: str) -> dict[str, Any]:
    """TRL's arguments for a low peak and a high speed on a CPU, besides bfloat16 weights and micro-batches."""
    settings: dict[str, Any] = {"optim": "adamw_bnb_8bit"}
    if objective in ("sft", "distill"):
        settings["gradient_checkpointing_kwargs"] = {"selective": True}
    if objective == "sft":
        settings |= {"packing": True, "packing_strategy": "wrapped", "torch_compile": True}
    return settings


def time_sampling(trainer: Any, counts: dict[str, Any], prompt_tokens: int, new_tokens: int) -> None:
    """Make a GRPOTrainer record the seconds of each round in `counts` and fix the completion length."""
    sample = trainer._generate_and_score_completions

    def timed(inputs: Any) -> Any:
        started = time.perf_counter()
        result = sample(inputs)
        counts["sampling_seconds"] = now() - started
        sizes = result["prompt_ids"].shape[1], result["completion_ids"].shape[1]
        assert sizes == (prompt_tokens, new_tokens), f"tokens of prompts and answers were {sizes}"
        if "tool_mask" in result:
            assert result["tool_mask"].sum() == counts["target_tokens"], f"{result['tool_mask'].sum()} sampled tokens"
            counts["tool_calls"] = trainer._metrics["train"]["tools/call_frequency"][-1]
        return result

    trainer._generate_and_score_completions = timed


def sample_scripted(model: Any, folder: Path, sampled_tokens: int, num_completions: int) -> None:
    """Make `model.generate` compute and draw every token, and return those of the script."""
    streams = scripted_turns.scripted(folder, sampled_tokens, num_completions)

    def only_scripted(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        chosen = torch.tensor([next(stream) for stream in streams])
        return scores.fill_(-torch.inf).scatter_(1, chosen[:, None], 0.0)

    model.generate = functools.partial(model.generate, logits_processor=LogitsProcessorList([only_scripted]))


def main(
    objective: Annotated[str, typer.Option(help="sft, distill, dpo, grpo or tools.")],
    model_folder: Annotated[Path, typer.Option()],
    data: Annotated[Path, typer.Option()],
    run_directory: Annotated[Path, typer.Option()],
    facts_file: Annotated[Path, typer.Option(help="File for the resolved configuration.")],
    batch_size: Annotated[int, typer.Option(help="Rows, pairs, or completions per step.")],
    length: Annotated[int, typer.Option(help="Tokens per row, with the prompt.")],
    prompt_tokens: Annotated[int, typer.Option(help="Prompt tokens per row, for dpo, grpo and tools.")],
    steps: Annotated[int, typer.Option()],
    given_tokens: Annotated[int, typer.Option(help="Tokens of results per row, for tools.")] = 0,
    careful: Annotated[bool, typer.Option("--careful", help="Settings that save memory and time.")] = False,
    reference: Annotated[str, typer.Option(help="resident or cached, for a model without an adapter.")] = "resident",
    lora_rank: Annotated[int, typer.Option(help="LoRA rank; 0: full fine-tuning.")] = 0,
) -> None:
    run_directory.mkdir(parents=True)
    config = AutoConfig.from_pretrained(model_folder)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if careful else torch.float32)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    own: dict[str, Any] = {"max_length": length}
    beside: dict[str, Any] = {}
    told: tuple[str, ...] = ()
    if objective == "distill":
        from trl.experimental.gkd import GKDConfig as Config
        from trl.experimental.gkd import GKDTrainer as Trainer

        own["lmbda"], beside["teacher_model"] = 0.0, str(model_folder)
        told = ("packing", "beta", "lmbda")
    elif objective == "dpo":
        from trl import DPOConfig as Config
        from trl import DPOTrainer as Trainer

        own["precompute_ref_log_probs"] = reference == "cached"
        beside["ref_model"] = copy.deepcopy(model) if reference == "resident" and not lora_rank else None
    elif objective in ("grpo", "tools"):
        from trl import GRPOConfig as Config
        from trl import GRPOTrainer as Trainer

        new_tokens = length - prompt_tokens
        own = {"num_generations": batch_size, "max_completion_length": new_tokens}
        beside["reward_funcs"] = letters
        if objective == "tools":
            beside |= {"reward_funcs": scripted_turns.letters, "tools": [scripted_turns.look_up]}
            sample_scripted(model, model_folder, new_tokens - given_tokens, batch_size)
        else:
            own["generation_kwargs"] = {"min_new_tokens": new_tokens}
        told = ("beta",)
    else:
        from trl import SFTConfig as Config
        from trl import SFTTrainer as Trainer

        told = ("packing",)
    if careful:
        own |= careful_settings(objective)
    keeps_attention = "gradient_checkpointing_kwargs" in own  # the trainer removes the key
    num_micro_batches = batch_size if careful and objective == "distill" else 1
    args = Config(
        output_dir=str(run_directory),
        per_device_train_batch_size=batch_size // num_micro_batches,
        gradient_accumulation_steps=num_micro_batches,
        max_steps=steps,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        **({} if torch.cuda.is_available() else {"use_cpu": True}),  # otherwise bf16 requires a GPU
        **own,
    )
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=load_dataset("json", data_files=str(data), split="train", cache_dir=str(run_directory / "cache")),
        processing_class=AutoTokenizer.from_pretrained(model_folder),
        peft_config=LoraConfig(r=lora_rank, target_modules="all-linear") if lora_rank else None,
        **beside,
    )

    if objective in ("grpo", "tools"):
        num_sampled = new_tokens - given_tokens
        counts: dict[str, Any] = {"tokens": batch_size * length, "target_tokens": batch_size * num_sampled}
        time_sampling(trainer, counts, prompt_tokens, new_tokens)
    else:
        # Every row is longer than the length, so all batches have the size of the first.
        batch = next(iter(trainer.get_train_dataloader()))
        is_target = batch["completion_mask"] if objective == "dpo" else batch["labels"][:, 1:] != -100
        counts = {"tokens": batch["input_ids"].numel(), "target_tokens": int(is_target.sum())}
        counts = {name: count * num_micro_batches for name, count in counts.items()}
    trainer.add_callback(StepMetrics(run_directory / "metrics.jsonl", counts))
    facts = {
        "weights": str(next(model.parameters()).dtype).removeprefix("torch."),
        "bf16_autocast": args.bf16,
        "gradient_checkpointing": args.gradient_checkpointing,
        "keeps_attention": keeps_attention,
        "micro_batches": num_micro_batches,
        "optimizer": str(getattr(args.optim, "value", args.optim)),
        "attention": model.config._attn_implementation,
        "loss": args.loss_type,
        "torch_compile": args.torch_compile,
        "parameters": num_parameters,
        "trained_parameters": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
        "device": str(args.device),
        **{name: getattr(args, name) for name in told},
        **({"teacher": str(trainer.teacher_model.dtype)} if objective == "distill" else {}),
    }
    facts_file.write_text(json.dumps(facts) + "\n", encoding="utf-8")
    trainer.train()


if __name__ == "__main__":
    typer.run(main)
