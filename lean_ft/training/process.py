"""`start`, the first line of a recipe: choose the device, seed the generators, and refuse what the device cannot do."""

import os
import random

import numpy as np
import torch

from lean_ft.memory import host_memory
from lean_ft.memory.host_pool import pool_host_memory, wants_host_pool
from lean_ft.models.attention.documents import num_product_shapes
from lean_ft.models.attention.kernels import use_attention
from lean_ft.models.device import check_dtype, describe, resolve_device
from lean_ft.parallel import check_number, refuse_cuts
from lean_ft.settings import LoRAConfig, MemoryConfig, ModelConfig, ParallelConfig, RecipeConfig
from lean_ft.system.before_torch import keep_compiled_products, prepare_torch
from lean_ft.system.log import log_to, say
from lean_ft.system.units import gibibytes
from lean_ft.system.world import world
from lean_ft.training.starting import decide_start

OTHER_SHAPES = 32  # product shapes in a step besides attention: projections, adapters, chunks of the loss


def start(cfg: RecipeConfig) -> torch.device:
    """Prepare this process for training with `cfg`, log the device and adjustments for it, and return the device.

    Seeds Python's, numpy's and torch's generators. float32 products keep IEEE precision, not TF32's 10 bits; use
    `model.dtype=bfloat16` for speed.

    Raises:
        ValueError: the device is missing or cannot compute in `model.dtype`, or `output_dir` cannot hold this run
            (checked here, before a model is loaded).
    """
    return world().start(cfg, _prepare)


def _prepare(cfg: RecipeConfig) -> torch.device:
    prepare_torch()  # for a recipe that was not started by the command line
    device = resolve_device(cfg.device)
    if (size := int(os.environ.get("WORLD_SIZE", "1"))) > 1 and "RANK" in os.environ:
        device = _device_of_rank(device)
        number = refuse_on_many(cfg, size)
        if cfg.gradient_accumulation_steps % number:
            say(
                "WARNING",
                f"gradient_accumulation_steps={cfg.gradient_accumulation_steps} is not a multiple of {number}, so some "
                f"of the {size} processes are idle in part of each step. Set a multiple of {number}",
            )
    model = cfg.group(ModelConfig)
    notes = check_dtype(model.dtype, device) if model is not None else []
    if model is not None and (memory := cfg.group(MemoryConfig)) is not None:
        use_attention(memory.attention, getattr(torch, model.dtype), device)
    decide_start(cfg)
    if (rank := int(os.environ.get("RANK", "0"))) > 0 and size > 1:  # rank 0 logs to the terminal
        cfg.output_dir.mkdir(parents=True, exist_ok=True)
        log_to(cfg.output_dir / f"rank_{rank:05d}.log")

    random.seed(cfg.seed)
    np.random.seed(cfg.seed % 2**32)
    torch.manual_seed(cfg.seed)
    torch.set_float32_matmul_precision("highest")

    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        notes.append(f"{gibibytes(free)} of {gibibytes(total)} free")
        if (allocator := os.environ.get("PYTORCH_ALLOC_CONF")) is not None:
            notes.append(f"allocator {allocator}")
    if device.type == "cpu":
        # One layer is compiled at a time, and a pool of compiler processes would outweigh a small model.
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        notes.append(_settle_host_memory(cfg))
    elif (memory := cfg.group(MemoryConfig)) is not None and memory.host_pool:
        raise ValueError(f"memory.host_pool=true needs device=cpu; found device={device.type}. Remove it.")
    say("device", "; ".join([describe(device), f"seed {cfg.seed}", *filter(None, notes)]))
    return device


def _device_of_rank(device: torch.device) -> torch.device:
    """This process's own GPU; a CPU as it is."""
    if device.type == "mps":
        raise ValueError("device=mps supports one process only. Set device=cpu, or start one process.")
    if device.type != "cuda":
        return device
    place, number = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if place >= number:
        raise ValueError(
            f"process {place} of this machine (from 0) has no GPU: there are {number}. Start {number} processes "
            f"(--nproc-per-node {number}), or set device=cpu."
        )
    torch.cuda.set_device(place)
    return torch.device("cuda", place)


def refuse_on_many(cfg: RecipeConfig, size: int) -> int:
    """Return the number of groups that `size` processes divide a step's batches over. Raises ValueError for settings
    that do not support so many processes."""
    parallel = cfg.group(ParallelConfig)
    if parallel is None:
        raise ValueError(
            f"this recipe has no `parallel` settings, so it needs one process, and {size} were started. Start one "
            "process, or run a recipe with `parallel` settings (finetune, dpo)."
        )
    check_number(parallel, size)
    refuse_cuts(cfg)
    sharing = parallel.context * parallel.tensor  # a micro-batch
    number = max(1, size // sharing)
    if cfg.gradient_accumulation_steps < number:
        groups = f"the {size} processes" if sharing == 1 else f"the {number} groups of {sharing} processes"
        raise ValueError(
            f"gradient_accumulation_steps={cfg.gradient_accumulation_steps} counts the batches of a step over all "
            f"processes, so some of {groups} would have no batch. Set gradient_accumulation_steps={number}, or a "
            "multiple."
        )
    memory, lora = cfg.group(MemoryConfig), cfg.group(LoRAConfig)
    alone = {
        "memory.activation_offload=true": memory is not None and memory.activation_offload,
        "memory.tied_gradient=host": memory is not None and memory.tied_gradient == "host",
        "memory.frozen_embeddings=host": memory is not None and memory.frozen_embeddings == "host",
        "memory.experts=streamed": memory is not None and memory.experts == "streamed",
        "memory.float8_products=true": memory is not None and memory.float8_products,
        "lora.init=pissa": lora is not None and lora.init == "pissa",
    }
    if unsupported := [setting for setting, is_set in alone.items() if is_set]:
        raise ValueError(f"{unsupported[0]} supports one process only, and there are {size}. Leave it out.")
    return number


def _settle_host_memory(cfg: RecipeConfig) -> str:
    """Choose the allocator of CPU tensors, and return a note for the log."""
    returned, memory = host_memory.return_freed_memory(), cfg.group(MemoryConfig)
    keep_compiled_products(num_product_shapes(cfg.row_tokens or 2048) + OTHER_SHAPES)
    if memory is None or not wants_host_pool(memory):
        return "malloc returns freed memory to the system" if returned else ""
    try:
        pool_host_memory()
    except RuntimeError as error:
        if memory.host_pool:
            raise ValueError(f"memory.host_pool=true is not possible: {error}. Set memory.host_pool=false.") from None
        return f"memory.host_pool=false: {error}"
    return "memory.host_pool=true"
