"""Classification with N labels, one or several per text or one per token: all parameters or an adapter.

leanft run classify --config tiny/classify
leanft run classify --config tiny/classify lora={} output_dir=runs/lora_classify   # an adapter and the output layer
leanft run classify model.path=MODEL data.source=rows.jsonl data.labels_per=token   # rows of `tokens` and `labels`
leanft score runs/tiny_classify rows.jsonl labeled.jsonl   # rows of `text`
leanft cp  classify mine.py                        # edit the loop, then: leanft run mine.py --config tiny/classify

This is finetune with an output layer for labels. transformers opens the result as AutoModelForSequenceClassification
or AutoModelForTokenClassification.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lean_ft.data import prepare_batches
from lean_ft.data.classification import TextBatch, label_weights, with_labels
from lean_ft.frozen.scoring import set_padding_apart
from lean_ft.losses import TokenStatistics, output_scores
from lean_ft.losses.classification import Predictions, classification_losses
from lean_ft.memory import apply_memory
from lean_ft.models import label_fields
from lean_ft.optim import build_optimizer, learning_rate
from lean_ft.parallel import cut, join, parallelize
from lean_ft.peft import load_with_adapter, lr_ratios
from lean_ft.settings import (
    ClassificationDataConfig,
    ClassificationLossConfig,
    LoRAConfig,
    MemoryConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RecipeConfig,
    ScheduleConfig,
)
from lean_ft.system.whole_files import write_json
from lean_ft.tokenizers import load_tokenizer
from lean_ft.training import Run, apply_regularization, evaluating, start


class Config(RecipeConfig):
    model: ModelConfig
    data: ClassificationDataConfig
    lora: LoRAConfig | None = None  # null: all parameters train
    parallel: ParallelConfig = ParallelConfig()
    pad_token: str | None = None
    """Control token for padding. null takes the tokenizer's own."""
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    loss: ClassificationLossConfig = ClassificationLossConfig()
    memory: MemoryConfig = MemoryConfig()


def main(cfg: Config) -> None:
    device = start(cfg)
    ranks = join(cfg.parallel, device)  # process group; a no-op for a single process
    tokenizer = load_tokenizer(cfg.model, cfg.data.chat_template)
    if cfg.pad_token is not None:
        tokenizer.pad_with(cfg.pad_token)
    data = with_labels(cfg.data)  # those that the rows have, if `data.labels` names none
    names = data.labels or []
    batches, held_out = prepare_batches(data, tokenizer, batch_size=cfg.batch_size, seed=cfg.seed)
    per_token = data.labels_per == "token"  # then "texts" below are tokens with a label
    scores = label_fields(names, data.multi_label is True, per_token=per_token)
    model = load_with_adapter(cfg.model, cfg.lora, device, ranks, scores, cfg.memory)
    if not per_token:
        set_padding_apart(model, tokenizer, batches, held_out)
    apply_regularization(model, cfg)  # `freeze`, `train` and NEFTune
    cut(model, cfg.parallel, ranks)  # tensor, context, expert and vocabulary parallelism
    apply_memory(model, cfg.memory, compile=cfg.compile)
    parallelize(model, cfg.parallel, ranks)  # each rank reads and keeps its shard
    optimizer = build_optimizer(model, cfg, lr_ratios=lr_ratios(cfg.lora), ranks=ranks)
    run = Run(
        cfg, model=model, optimizer=optimizer, batches=batches, held_out=held_out, tokenizer=tokenizer, ranks=ranks
    )
    given = label_weights(cfg.loss.class_weights, batches, names)
    weights = None if given is None else torch.tensor(given, device=device)

    def scores_and_losses(batch: TextBatch) -> tuple[Tensor, Tensor, Tensor | None]:
        """Scores (P, C), losses (P,), and the router loss of a mixture of experts; batch: on the device."""
        scores, router_loss = output_scores(model, batch, batch.last, is_float16=cfg.model.dtype == "float16")
        return scores, classification_losses(scores, batch.targets, weights), router_loss

    @evaluating(model)
    def evaluate(held_out: Iterable[TextBatch]) -> dict[str, Any]:
        statistics, num_texts = TokenStatistics(ranks), 0
        predictions = Predictions(len(names), device, ranks, tags=names if per_token else ())
        for batch in statistics.following(held_out):
            scores, losses, _ = scores_and_losses(batch := batch.to(device))
            is_right = predictions.add(scores, batch.targets, batch.text_of)
            statistics.add_rows(loss=losses)
            statistics.by_source(accuracy=is_right)
            num_texts += batch.num_texts
        num_texts = ranks.total(num_texts)
        metrics, confusion = predictions.metrics(num_texts // ranks.num_sharing)
        table = {"labels": names, "confusion": confusion, **metrics}
        ranks.on_rank_zero(lambda: write_json(cfg.output_dir / "confusion.json", table))
        return statistics.means(num_texts, "eval_") | metrics

    if run.evaluation_due():  # the one in which an earlier start was interrupted
        run.log_evaluation(**evaluate(run.held_out()))
    for step in run.steps():
        lr = learning_rate(cfg, step, run.total_steps)
        optimizer.set_lr(lr)  # before backward: with optimizer.in_backward the update happens there

        micro_batches = batches.take(cfg.gradient_accumulation_steps)  # fewer at the end of an epoch
        # Ranks that share a micro-batch's tokens all compute its texts.
        num_texts = ranks.num_sharing * sum(batch.num_texts for batch in micro_batches)
        statistics = TokenStatistics(ranks)
        for batch, is_last in ranks.share(micro_batches):
            _, losses, router_loss = scores_and_losses(batch.to(device))
            loss = losses.sum() / num_texts  # sums, divided once by the texts of the whole step
            if router_loss is not None:  # mixture of experts
                loss = loss + router_loss * (batch.num_texts / num_texts)
                statistics.add(router_aux_loss=router_loss * batch.num_texts)
            statistics.add(loss=loss * num_texts)
            optimizer.scale(loss, last=is_last).backward()

        grad_norm = optimizer.finish_gradients(max_norm=cfg.clip_grad_norm)  # unscales, measures, clips
        optimizer.step()
        optimizer.zero_grad()
        run.log(lr=lr, grad_norm=grad_norm, micro_batches=micro_batches, **statistics.means(num_texts))

        if run.evaluation_due():
            run.log_evaluation(**evaluate(run.held_out()))
