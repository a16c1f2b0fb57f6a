"""KTO and related losses: train on single completions labeled good or bad, all parameters or an adapter.

leanft run kto --config tiny/kto
leanft run kto --config tiny/kto loss.name=bco output_dir=runs/bco     # docs/preferences.md has the losses
leanft cp  kto mine.py                             # edit the loop, then: leanft run mine.py --config tiny/kto

This is dpo for rows of prompt, completion and label. In rows of pairs, each completion counts by itself.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from lean_ft.data import UnpairedBatch, prepare_batches
from lean_ft.frozen import load_reference
from lean_ft.losses import AnswerLogProbs, Answers, Baseline, TokenStatistics, UnpairedStatistics, answer_losses
from lean_ft.memory import apply_memory
from lean_ft.optim import build_optimizer, learning_rate
from lean_ft.parallel import cut, join, parallelize
from lean_ft.peft import load_with_adapter, lr_ratios
from lean_ft.settings import AnswersConfig, ParallelConfig, UnpairedDataConfig, UnpairedLossConfig
from lean_ft.tokenizers import load_tokenizer
from lean_ft.training import Run, apply_regularization, evaluating, start


class Config(AnswersConfig):
    data: UnpairedDataConfig
    parallel: ParallelConfig = ParallelConfig()
    loss: UnpairedLossConfig = UnpairedLossConfig()


def main(cfg: Config) -> None:
    device = start(cfg)
    ranks = join(cfg.parallel, device)  # the process group; a no-op for one process
    tokenizer = load_tokenizer(cfg.model, cfg.data.chat_template)
    batches, held_out = prepare_batches(cfg.data, tokenizer, batch_size=cfg.batch_size, seed=cfg.seed)
    model = load_with_adapter(cfg.model, cfg.lora, device, ranks, memory=cfg.memory)  # quantizes while loading
    apply_regularization(model, cfg)  # `freeze`, `train` and NEFTune
    cut(model, cfg.parallel, ranks)  # context, tensor and expert parallelism, if `parallel` sets them
    apply_memory(model, cfg.memory, compile=cfg.compile)
    parallelize(model, cfg.parallel, ranks)  # FSDP or DDP; each rank loads only its shard
    log_probs = AnswerLogProbs(model, cfg)  # of whole completions; logits exist one chunk at a time
    reference = load_reference(cfg, model, log_probs, batches, held_out, ranks)  # the model before training
    optimizer = build_optimizer(model, cfg, lr_ratios=lr_ratios(cfg.lora), ranks=ranks)
    baseline = Baseline(cfg.loss, log_probs, reference, device)  # bco's baseline is saved in checkpoints
    run = Run(
        cfg,
        model=model,
        optimizer=optimizer,
        batches=batches,
        held_out=held_out,
        tokenizer=tokenizer,
        ranks=ranks,
        carried=baseline,
    )

    def losses_of(
        batch: UnpairedBatch, tokens: TokenStatistics, statistics: UnpairedStatistics
    ) -> tuple[Tensor, Answers]:
        """The loss of each completion, (P,), and its log-probabilities. The batch is on the device."""
        compared_with = baseline(model, batch)  # computed first, while no activations are held for backward
        frozen = reference(batch)
        answers = log_probs(model, batch, tokens)
        losses = answer_losses(cfg.loss, answers, frozen, compared_with, batch.is_desirable, statistics)
        return losses, answers

    @evaluating(model)
    def evaluate(held_out: Iterable[UnpairedBatch]) -> dict[str, Any]:
        tokens, statistics, num_targets = TokenStatistics(ranks), UnpairedStatistics(ranks), 0
        for batch in statistics.following(held_out):
            statistics.count(batch.is_desirable)
            losses, _ = losses_of(batch.to(device), tokens, statistics)
            statistics.add_rows(loss=losses)
            num_targets += batch.num_targets
        statistics.total_counts()
        return tokens.means(ranks.total(num_targets), "eval_") | statistics.answer_means("eval_")

    if run.evaluation_due():  # the one in which an earlier start was interrupted
        run.log_evaluation(**evaluate(run.held_out()))
    for step in run.steps():
        lr = learning_rate(cfg, step, run.total_steps)
        optimizer.set_lr(lr)  # before backward: with optimizer.in_backward the update happens in backward

        micro_batches = batches.take(cfg.gradient_accumulation_steps)  # may be fewer at the end of an epoch
        copies = ranks.num_sharing  # ranks that share a micro-batch's tokens each compute all of its completions
        num_answers = copies * sum(batch.num_pairs for batch in micro_batches)
        num_targets = copies * sum(batch.num_targets for batch in micro_batches)
        tokens, statistics = TokenStatistics(ranks), UnpairedStatistics(ranks, counted=micro_batches * copies)
        for batch, is_last in ranks.share(micro_batches):
            # A sum, divided once by the count of the whole step.
            losses, answers = losses_of(batch.to(device), tokens, statistics)
            loss = losses.sum() / num_answers
            if answers.router_loss is not None:  # mixture of experts
                loss = loss + answers.router_loss * (batch.num_pairs / num_answers)
                statistics.add(router_aux_loss=answers.router_loss * batch.num_pairs)
            statistics.add(loss=loss * num_answers)
            # If the loss is not finite, the step is skipped and its batch is saved.
            optimizer.scale(loss, last=is_last).backward()

        grad_norm = optimizer.finish_gradients(max_norm=cfg.clip_grad_norm)  # unscale, measure the norm, clip
        optimizer.step()
        optimizer.zero_grad()
        metrics = statistics.answer_means() | tokens.means(num_targets)
        baseline.add(metrics["gain"], num_answers // copies)
        run.log(lr=lr, grad_norm=grad_norm, micro_batches=micro_batches, **metrics)

        if run.evaluation_due():
            run.log_evaluation(**evaluate(run.held_out()))
