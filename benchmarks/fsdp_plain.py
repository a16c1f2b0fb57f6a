"""The peer of compare_fsdp.py: PyTorch's `fully_shard` or DDP with a plain loop and AdamW, started by torchrun.

transformers' model in bfloat16 with random weights, sharded by layer as in PyTorch's tutorial; the model's own loss
with full logits; `torch.optim.AdamW` with its fused update; rows of random tokens.

Writes metrics.jsonl as lean_ft does: one line per step, with the largest peak of the processes.
"""

import json
import os
import time
from pathlib import Path
from typing import Annotated

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist
import typer
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM


def peak_memory_bytes() -> int:
    """The largest resident size of this process so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) * 1024


def main(
    model_folder: Annotated[Path, typer.Option()],
    run_directory: Annotated[Path, typer.Option()],
    batch_size: Annotated[int, typer.Option()],
    length: Annotated[int, typer.Option()],
    steps: Annotated[int, typer.Option()],
    copies: Annotated[bool, typer.Option(help="DDP instead of FSDP.")] = False,
) -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_folder), dtype=torch.bfloat16)
    vocab_size = model.config.vocab_size
    if copies:
        model = DistributedDataParallel(model)
    else:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    run_directory.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(rank)
    for step in range(1, steps + 1):
        ids = torch.randint(0, vocab_size, (batch_size, length))
        started = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach())
        seconds, peak = time.perf_counter() - started, torch.tensor(peak_memory_bytes())
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        if rank == 0:
            tokens = size * ids.numel()
            row = {
                "step": step,
                "loss": float(loss.detach()),
                "tokens": tokens,
                "target_tokens": tokens - size * batch_size,
            }
            row |= {"step_seconds": seconds, "peak_memory_bytes": int(peak)}
            with (run_directory / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
