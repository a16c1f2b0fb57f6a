"""Text embeddings for retrieval and similarity: all parameters or an adapter.

leanft run embed --config tiny/embed
leanft run embed --config tiny/embed gradient_accumulation_steps=16   # 16 times as many negatives, same memory
leanft run embed --config tiny/embed loss.matryoshka=[128,64,32] output_dir=runs/matryoshka
leanft embed runs/tiny_embed tiny/notes_validation.jsonl --field positive --search "Who bakes bread in Tameton?"
leanft cp  embed mine.py                           # edit the loop, then: leanft run mine.py --config tiny/embed

All rows of a step are compared with each other. sentence-transformers opens the result.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lean_ft.data import prepare_batches
from lean_ft.data.embedding import EmbeddingBatch, EmbeddingDataConfig
from lean_ft.embedding import (
    StepVectors,
    check_vectors,
    completed_data,
    embedding_folder,
    evaluation_of,
    rows_per_step,
    text_vectors,
)
from lean_ft.losses.embedding import embedding_loss
from lean_ft.memory import apply_memory
from lean_ft.models import VECTORS
from lean_ft.optim import build_optimizer, learning_rate
from lean_ft.parallel import cut, join, parallelize
from lean_ft.peft import load_with_adapter, lr_ratios
from lean_ft.settings import (
    LoRAConfig,
    MemoryConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RecipeConfig,
    ScheduleConfig,
)
from lean_ft.settings.embedding import PoolingConfig
from lean_ft.settings.embedding_losses import EmbeddingLossConfig, check_rows
from lean_ft.tokenizers import load_tokenizer
from lean_ft.training import Run, apply_regularization, evaluating, shares_prompts, start


class Config(RecipeConfig):
    model: ModelConfig
    data: EmbeddingDataConfig
    vectors: PoolingConfig = PoolingConfig()
    lora: LoRAConfig | None = None  # null: all parameters train
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    loss: EmbeddingLossConfig = EmbeddingLossConfig()
    memory: MemoryConfig = MemoryConfig()


def main(cfg: Config) -> None:
    device = start(cfg)
    ranks = join(cfg.parallel, device)  # process group; a no-op for a single process
    tokenizer = load_tokenizer(cfg.model, cfg.data.chat_template)
    data = completed_data(cfg.data, tokenizer)  # with the number of negatives that the rows have
    check_rows(cfg.loss, data.scored is True, len(data.sides) - 1, rows_per_step(cfg, data))
    batches, held_out = prepare_batches(
        data, tokenizer, batch_size=cfg.batch_size, seed=cfg.seed, share_prompts=shares_prompts(cfg, data)
    )
    model = load_with_adapter(cfg.model, cfg.lora, device, ranks, VECTORS, cfg.memory)  # without its output layer
    folder = embedding_folder(model, cfg.vectors, data, tokenizer)  # how vectors are made: saved with the model
    check_vectors(cfg.loss, folder, model, batches)
    apply_regularization(model, cfg)  # `freeze`, `train` and NEFTune
    cut(model, cfg.parallel, ranks)  # tensor, context, expert and vocabulary parallelism
    apply_memory(model, cfg.memory, compile=cfg.compile)
    parallelize(model, cfg.parallel, ranks)  # each rank reads and keeps its shard
    optimizer = build_optimizer(model, cfg, lr_ratios=lr_ratios(cfg.lora), ranks=ranks)
    run = Run(
        cfg, model=model, optimizer=optimizer, batches=batches, held_out=held_out, tokenizer=tokenizer, ranks=ranks
    )

    def embed(batch: EmbeddingBatch) -> Tensor:
        """The vectors of the batch's rows, (rows, texts of a row, D)."""
        vectors = text_vectors(model, batch, folder.pooling, is_float16=cfg.model.dtype == "float16")
        return vectors.unflatten(0, (-1, len(data.sides)))

    @evaluating(model)
    def evaluate(held_out: Iterable[EmbeddingBatch]) -> dict[str, Any]:
        return evaluation_of(embed, held_out, cfg.loss, device, ranks, normalizes=folder.normalize)

    if run.evaluation_due():  # the one in which an earlier start was interrupted
        run.log_evaluation(**evaluate(run.held_out()))
    for step in run.steps():
        lr = learning_rate(cfg, step, run.total_steps)
        optimizer.set_lr(lr)  # before backward: with optimizer.in_backward the update happens there

        micro_batches = batches.take(cfg.gradient_accumulation_steps)  # fewer at the end of an epoch
        scores, identities = (
            torch.cat([getattr(batch, name) for batch in micro_batches]).to(device) for name in ("scores", "identities")
        )
        vectors = StepVectors(embed, micro_batches, device, ranks, compiled=cfg.compile)  # of all rows of the step
        loss, num_masked = embedding_loss(vectors.all, scores, identities, cfg.loss, normalizes=folder.normalize)
        loss.backward()  # up to the vectors
        for product, is_last in vectors.again():  # each micro-batch with gradients
            optimizer.scale(product, last=is_last).backward()

        grad_norm = optimizer.finish_gradients(max_norm=cfg.clip_grad_norm)  # unscales, measures, clips
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss.detach(), lr=lr, grad_norm=grad_norm, micro_batches=micro_batches, duplicates=num_masked)

        if run.evaluation_due():
            run.log_evaluation(**evaluate(run.held_out()))
