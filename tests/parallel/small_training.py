"""A small decoder and a recipe's training loop, on one or several ranks."""

import hashlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from lean_ft.data import Batch
from lean_ft.losses import CrossEntropy, TokenStatistics
from lean_ft.memory import apply_memory
from lean_ft.models import Decoder
from lean_ft.models.config import DecoderConfig, LayerConfig
from lean_ft.models.new_model import build_decoder
from lean_ft.models.rope import RopeConfig
from lean_ft.optim import Optimizer, build_optimizer
from lean_ft.parallel import cut, join, parallelize
from lean_ft.peft import apply_lora
from lean_ft.settings import (
    LoRAConfig,
    LossConfig,
    MemoryConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RecipeConfig,
    ScheduleConfig,
)
from lean_ft.system.shards import Ranks, part_of

CPU = torch.device("cpu")
VOCAB, TOKENS = 512, 48


class Config(RecipeConfig):
    output_dir: Path = Path("unused")
    model: ModelConfig = ModelConfig(path="unused", dtype="float32")
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    loss: LossConfig = LossConfig()
    memory: MemoryConfig = MemoryConfig(loss_chunk_tokens=16)
    parallel: ParallelConfig = ParallelConfig()


def small_model(
    *,
    tied: bool = False,
    dtype: torch.dtype = torch.float32,
    layer: dict[str, Any] | None = None,
    config: DecoderConfig | None = None,
    **settings: Any,
) -> Decoder:
    """Two layers with the facts `layer` and `settings`, or the decoder of `config`."""
    torch.manual_seed(0)
    if config is not None:
        return build_decoder(config, dtype=dtype)
    layers = tuple(LayerConfig(**{"rope": RopeConfig(theta=10000.0), **(layer or {})}) for _ in range(2))
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    config = DecoderConfig(
        **{"vocab_size": VOCAB, **sizes, **settings},
        layers=layers,
        max_positions=512,
        initializer_range=0.05,
        tied_embeddings=tied,
        norm_eps=1e-6,
    )
    return build_decoder(config, dtype=dtype)


def make_batch(number: int, vocab: int = VOCAB) -> Batch:
    """Two packed rows of three documents each."""
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(0, vocab, (2, TOKENS), generator=generator)
    cuts = [0, 7 + number % 13, 30, TOKENS]
    labels = torch.full_like(ids, -100)
    for begin, end in pairwise(cuts):
        labels[:, begin + 1 : end - 1] = ids[:, begin + 2 : end]
    boundaries = [0, *cuts[1:], *(TOKENS + cut for cut in cuts[1:])]
    positions = torch.cat([torch.arange(end - begin) for begin, end in pairwise(cuts)])
    cu_seqlens = torch.tensor(boundaries, dtype=torch.int32)
    return Batch(
        {"input_ids": ids, "positions": positions.expand(2, -1), "cu_seqlens": cu_seqlens},
        labels,
        num_targets=int((labels != -100).sum()),
        num_tokens=ids.numel(),
    )


def build(cfg: Config, lora: LoRAConfig | None = None, **settings: Any) -> tuple[Decoder, Optimizer, Ranks]:
    """This rank's model and optimizer."""
    model = small_model(dtype=getattr(torch, cfg.model.dtype), **settings)
    if lora is not None:
        apply_lora(model, lora)
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B"):  # if it were zero, A would get no gradient
                torch.nn.init.normal_(parameter, std=0.05)
    ranks = join(cfg.parallel, CPU)
    cut(model, cfg.parallel, ranks)
    apply_memory(model, cfg.memory, compile=cfg.compile)
    parallelize(model, cfg.parallel, ranks, tokens=2 * TOKENS)
    return model, build_optimizer(model, cfg, ranks=ranks), ranks


def train(
    cfg: Config, model: Decoder, optimizer: Optimizer, ranks: Ranks, *, steps: int = 3, spoil: Any = None
) -> Iterator[tuple[float, float]]:
    """Yield each step's loss and gradient norm; `spoil(step, rank, loss)` may change a loss."""
    cross_entropy = CrossEntropy(model, cfg, ranks)
    for step in range(steps):
        optimizer.set_lr(1e-2)
        first = step * cfg.gradient_accumulation_steps
        micro_batches = [make_batch(first + i, model.config.vocab_size) for i in range(cfg.gradient_accumulation_steps)]
        num_targets = sum(batch.num_targets for batch in micro_batches)
        statistics = TokenStatistics(ranks)
        for batch, is_last in ranks.share(micro_batches):
            loss = cross_entropy(model, batch, statistics) / num_targets
            loss = loss if spoil is None else spoil(step, ranks.rank, loss)
            optimizer.scale(loss, last=is_last).backward()
        norm = optimizer.finish_gradients(max_norm=cfg.clip_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        yield float(statistics.means(num_targets)["loss"]), float(norm)


def whole_tensors(model: Decoder, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """Weights and optimizer state of one process, assembled from all parts."""
    import torch.distributed as dist

    parts = {name: part_of(param) for name, param in model.named_parameters()} | optimizer.state_parts()
    if not dist.is_initialized():
        return {name: part.values.clone() for name, part in parts.items()}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, parts)
    whole = {}
    for name, mine in parts.items():
        flat = torch.full((torch.Size(mine.shape).numel(),), 77, dtype=mine.values.dtype)
        for theirs in (parts[name] for parts in everyone):
            if not theirs.is_kept_by_others:
                values = iter(theirs.values.reshape(-1).split([number for _, number in theirs.runs()]))
                for first, number in theirs.runs():
                    flat[first : first + number] = next(values)
        whole[name] = flat.view(mine.shape)
    return whole


def digest(tensors: dict[str, torch.Tensor]) -> str:
    total = hashlib.sha256()
    for name in sorted(tensors):
        total.update(name.encode() + tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()
