"""The peer: TRL's GRPOTrainer in its defaults, run by compare_grpo.py in a process of its own.

Given are the answers, their length, which is the same for all, the number of steps, that nothing is reported or saved, and a log
at every step. All else is TRL's default, as `trl_sft.py` says of its SFTTrainer: it samples with transformers' generate, in the
process that trains. What a step spends on sampling and rewards is told beside its time.
"""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from datasets import load_dataset
from letters_reward import letters
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl_sft import StepMetrics


def main(
    model_folder: Annotated[Path, typer.Option()],
    data: Annotated[Path, typer.Option()],
    run_directory: Annotated[Path, typer.Option()],
    facts_file: Annotated[Path, typer.Option(help="Where what the defaults came to is written.")],
    answers: Annotated[int, typer.Option(help="To the one prompt of a step.")],
    prompt_tokens: Annotated[int, typer.Option()],
    new_tokens: Annotated[int, typer.Option()],
    steps: Annotated[int, typer.Option()],
) -> None:
    run_directory.mkdir(parents=True)
    use_cpu = {} if torch.cuda.is_available() else {"use_cpu": True}  # without it, bf16 asks for a GPU
    args = GRPOConfig(
        output_dir=str(run_directory),
        per_device_train_batch_size=answers,
        num_generations=answers,
        max_completion_length=new_tokens,
        generation_kwargs={"min_new_tokens": new_tokens},
        max_steps=steps,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        **use_cpu,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_folder), dtype=torch.float32)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=letters,
        args=args,
        train_dataset=load_dataset("json", data_files=str(data), split="train", cache_dir=str(run_directory / "cache")),
        processing_class=AutoTokenizer.from_pretrained(model_folder),
    )
    counts = {"tokens": answers * (prompt_tokens + new_tokens), "target_tokens": answers * new_tokens}
    sample = trainer._generate_and_score_completions

    def timed(inputs: Any) -> Any:
        started = time.perf_counter()
        result = sample(inputs)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        counts["sampling_seconds"] = time.perf_counter() - started
        sizes = result["prompt_ids"].shape[1], result["completion_ids"].shape[1]
        assert sizes == (prompt_tokens, new_tokens), f"tokens of prompts and answers were {sizes}"
        return result

    trainer._generate_and_score_completions = timed
    trainer.add_callback(StepMetrics(run_directory / "metrics.jsonl", counts))
    facts = {
        "weights": str(next(model.parameters()).dtype).removeprefix("torch."),
        "bf16_autocast": args.bf16,
        "gradient_checkpointing": args.gradient_checkpointing,
        "optimizer": str(getattr(args.optim, "value", args.optim)),
        "attention": model.config._attn_implementation,
        "loss": args.loss_type,
        "kl_weight": args.beta,
        "torch_compile": args.torch_compile,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "device": str(args.device),
    }
    facts_file.write_text(json.dumps(facts) + "\n", encoding="utf-8")
    trainer.train()


if __name__ == "__main__":
    typer.run(main)
