"""Train a reranker, which reads a query and a passage together and gives one score: all parameters or an adapter.

leanft run rerank --config tiny/rerank
leanft run rerank --config tiny/rerank loss.name=listnet output_dir=runs/listnet
leanft cp  rerank mine.py                          # edit the loop, then: leanft run mine.py --config tiny/rerank

This is classify with one label, on the rows of embed. With `loss.yes_no`, the score is a difference of two logits, as
in Qwen3-Reranker. sentence-transformers opens the result as a CrossEncoder.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from lean_ft.data import prepare_batches
from lean_ft.data.embedding import EmbeddingBatch, with_negatives
from lean_ft.data.reranking import RerankingDataConfig
from lean_ft.embedding import RowRanking, check_relevance, ids_of_words, keep_scores
from lean_ft.frozen.scoring import set_padding_apart
from lean_ft.losses import TokenStatistics
from lean_ft.losses.reranking import relevance, reranking_losses
from lean_ft.memory import apply_memory
from lean_ft.models import REWARD_LABELS
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
from lean_ft.settings.embedding_losses import RerankingLossConfig, check_passages
from lean_ft.tokenizers import load_tokenizer
from lean_ft.training import Run, apply_regularization, evaluating, shares_prompts, start


class Config(RecipeConfig):
    model: ModelConfig
    data: RerankingDataConfig
    lora: LoRAConfig | None = None  # null: all parameters train
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    loss: RerankingLossConfig = RerankingLossConfig()
    memory: MemoryConfig = MemoryConfig()


def main(cfg: Config) -> None:
    device = start(cfg)
    ranks = join(cfg.parallel, device)  # process group; a no-op for a single process
    tokenizer = load_tokenizer(cfg.model, cfg.data.chat_template)
    data = with_negatives(cfg.data)  # as many as the rows have
    check_passages(cfg.loss, len(data.sides))
    yes_no = ids_of_words(cfg.loss.yes_no, tokenizer)
    batches, held_out = prepare_batches(
        data, tokenizer, batch_size=cfg.batch_size, seed=cfg.seed, share_prompts=shares_prompts(cfg, data)
    )
    check_relevance(cfg.loss, batches)
    scores = REWARD_LABELS if yes_no is None else None  # one output, for the relevance
    model = load_with_adapter(cfg.model, cfg.lora, device, ranks, scores, cfg.memory)
    if yes_no is None:
        set_padding_apart(model, tokenizer, batches, held_out)
    keep_scores(model, data, yes_no)  # how scores are made: saved with the model
    apply_regularization(model, cfg)  # `freeze`, `train` and NEFTune
    cut(model, cfg.parallel, ranks)  # tensor, context, expert and vocabulary parallelism
    apply_memory(model, cfg.memory, compile=cfg.compile)
    parallelize(model, cfg.parallel, ranks)  # each rank reads and keeps its shard
    optimizer = build_optimizer(model, cfg, lr_ratios=lr_ratios(cfg.lora), ranks=ranks)
    run = Run(
        cfg, model=model, optimizer=optimizer, batches=batches, held_out=held_out, tokenizer=tokenizer, ranks=ranks
    )

    def scores_and_losses(batch: EmbeddingBatch) -> tuple[Tensor, Tensor]:
        """Scores (P, S) of the passages of P rows, and the losses of rows (P,); batch: on the device."""
        scores = relevance(model, batch, yes_no, is_float16=cfg.model.dtype == "float16").view_as(batch.scores)
        return scores, reranking_losses(scores, batch.scores, cfg.loss)

    @evaluating(model)
    def evaluate(held_out: Iterable[EmbeddingBatch]) -> dict[str, Any]:
        statistics, ranking, num_rows = TokenStatistics(ranks), RowRanking(ranks), 0
        for batch in statistics.following(held_out):
            scores, losses = scores_and_losses(batch := batch.to(device))
            ranking.add(scores, batch.scores, batch.sources)
            statistics.add_rows(loss=losses)
            num_rows += batch.num_rows
        return statistics.means(ranks.total(num_rows), "eval_") | ranking.metrics()

    if run.evaluation_due():  # the one in which an earlier start was interrupted
        run.log_evaluation(**evaluate(run.held_out()))
    for step in run.steps():
        lr = learning_rate(cfg, step, run.total_steps)
        optimizer.set_lr(lr)  # before backward: with optimizer.in_backward the update happens there

        micro_batches = batches.take(cfg.gradient_accumulation_steps)  # fewer at the end of an epoch
        # Ranks that share a micro-batch's tokens all compute its rows.
        num_rows = ranks.num_sharing * sum(batch.num_rows for batch in micro_batches)
        statistics = TokenStatistics(ranks)
        for batch, is_last in ranks.share(micro_batches):
            _, losses = scores_and_losses(batch.to(device))
            loss = losses.sum() / num_rows  # sums, divided once by the rows of the whole step
            statistics.add(loss=loss * num_rows)
            optimizer.scale(loss, last=is_last).backward()

        grad_norm = optimizer.finish_gradients(max_norm=cfg.clip_grad_norm)  # unscales, measures, clips
        optimizer.step()
        optimizer.zero_grad()
        run.log(lr=lr, grad_norm=grad_norm, micro_batches=micro_batches, **statistics.means(num_rows))

        if run.evaluation_due():
            run.log_evaluation(**evaluate(run.held_out()))
