"""The peer: TRL's DPOTrainer in its defaults, run by compare_dpo.py in a process of its own.

Given are the length, the batch, the number of steps, that nothing is reported or saved, and a log at every step. All else
is TRL's default, as `trl_sft.py` says of its SFTTrainer; dropout is off in either. `--reference resident` gives it a copy
of the model, as it loads one itself for a model with a name; `cached` is its `precompute_ref_log_probs`. With `--lora-rank`
the reference is the model without its adapter, which is what it does then.
"""

import copy
import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer
from trl_sft import StepMetrics


def main(
    model_folder: Annotated[Path, typer.Option()],
    data: Annotated[Path, typer.Option()],
    run_directory: Annotated[Path, typer.Option()],
    facts_file: Annotated[Path, typer.Option(help="Where what the defaults came to is written.")],
    batch_size: Annotated[int, typer.Option(help="Pairs.")],
    length: Annotated[int, typer.Option()],
    steps: Annotated[int, typer.Option()],
    reference: Annotated[str, typer.Option(help="resident or cached; of a model without an adapter.")] = "resident",
    lora_rank: Annotated[int, typer.Option(help="Rank of an adapter to train in place of the model; 0: none.")] = 0,
) -> None:
    run_directory.mkdir(parents=True)
    use_cpu = {} if torch.cuda.is_available() else {"use_cpu": True}  # without it, bf16 asks for a GPU
    args = DPOConfig(
        output_dir=str(run_directory),
        max_length=length,
        per_device_train_batch_size=batch_size,
        max_steps=steps,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        precompute_ref_log_probs=reference == "cached",
        **use_cpu,
    )
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    dataset = load_dataset("json", data_files=str(data), split="train", cache_dir=str(run_directory / "cache"))
    trainer = DPOTrainer(
        model=model,
        ref_model=copy.deepcopy(model) if reference == "resident" and not lora_rank else None,
        args=args,
        train_dataset=dataset,
        processing_class=AutoTokenizer.from_pretrained(model_folder),
        peft_config=LoraConfig(r=lora_rank, target_modules="all-linear") if lora_rank else None,
    )

    # Every row is longer than the length, so the first batch tells the size of all of them.
    batch = next(iter(trainer.get_train_dataloader()))
    counts = {"tokens": batch["input_ids"].numel(), "target_tokens": int(batch["completion_mask"].sum())}
    trainer.add_callback(StepMetrics(run_directory / "metrics.jsonl", counts))
    facts = {
        "weights": str(next(model.parameters()).dtype).removeprefix("torch."),
        "bf16_autocast": args.bf16,
        "gradient_checkpointing": args.gradient_checkpointing,
        "optimizer": str(getattr(args.optim, "value", args.optim)),
        "attention": model.config._attn_implementation,
        "loss": args.loss_type,
        "torch_compile": args.torch_compile,
        "parameters": num_parameters,
        "trained_parameters": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
        "device": str(args.device),
    }
    facts_file.write_text(json.dumps(facts) + "\n", encoding="utf-8")
    trainer.train()


if __name__ == "__main__":
    typer.run(main)
