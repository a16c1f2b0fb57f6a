"""DPO and related losses: train on pairs of a chosen and a rejected completion, all parameters or an adapter.

leanft run dpo --config tiny/dpo
leanft run dpo --config tiny/dpo loss.name=simpo output_dir=runs/simpo   # docs/preferences.md has the losses
leanft run dpo --config tiny/dpo loss.name=my_loss.py:fn output_dir=runs/mine   # def fn(pairs, beta): one loss per pair
leanft run --nproc-per-node 2 dpo --config tiny/dpo gradient_accumulation_steps=2   # FSDP, DDP: `parallel.*`
leanft cp  dpo mine.py                             # edit the loop, then: leanft run mine.py --config tiny/dpo

This is finetune with another loss: it compares the log-probabilities of whole completions under two models.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from lean_ft.data import PairBatch, prepare_batches
from lean_ft.frozen import load_reference
from lean_ft.losses import AnswerLogProbs, Answers, TokenStatistics, pair_losses
from lean_ft.memory import apply_memory
from lean_ft.optim import build_optimizer, learning_rate
from lean_ft.parallel import cut, join, parallelize
from lean_ft.peft import load_with_adapter, lr_ratios
from lean_ft.settings import AnswersConfig, ParallelConfig, PreferenceDataConfig, PreferenceLossConfig
from lean_ft.tokenizers import load_tokenizer
from lean_ft.training import Run, apply_regularization, evaluating, shares_prompts, start


class Config(AnswersConfig):
    data: PreferenceDataConfig
    parallel: ParallelConfig = ParallelConfig()
    loss: PreferenceLossConfig = PreferenceLossConfig()


def main(cfg: Config) -> None:
    device = start(cfg)
    ranks = join(cfg.parallel, device)  # the process group; a no-op for one process
    tokenizer = load_tokenizer(cfg.model, cfg.data.chat_template)
    batches, held_out = prepare_batches(
        cfg.data, tokenizer, batch_size=cfg.batch_size, seed=cfg.seed, share_prompts=shares_prompts(cfg)
    )
    model = load_with_adapter(cfg.model, cfg.lora, device, ranks, memory=cfg.memory)  # quantizes while loading
    apply_regularization(model, cfg)  # `freeze`, `train` and NEFTune
    cut(model, cfg.parallel, ranks)  # context, tensor and expert parallelism, if `parallel` sets them
    apply_memory(model, cfg.memory, compile=cfg.compile)
    parallelize(model, cfg.parallel, ranks)  # FSDP or DDP; each rank loads only its shard
    log_probs = AnswerLogProbs(model, cfg)  # of whole completions; logits exist one chunk at a time
    reference = load_reference(cfg, model, log_probs, batches, held_out, ranks)  # the model before training
    optimizer = build_optimizer(model, cfg, lr_ratios=lr_ratios(cfg.lora), ranks=ranks)
    run = Run(
        cfg, model=model, optimizer=optimizer, batches=batches, held_out=held_out, tokenizer=tokenizer, ranks=ranks
    )

    def losses_of(batch: PairBatch, tokens: TokenStatistics, pairs: TokenStatistics) -> tuple[Tensor, Answers]:
        """The loss of each pair, (P,), and its log-probabilities. The batch is on the device."""
        frozen = reference(batch)  # (P, 2); computed first, while no activations are held for backward
        answers = log_probs(model, batch, tokens)
        return pair_losses(cfg.loss, answers, frozen, batch.answer_tokens, pairs), answers

    @evaluating(model)
    def evaluate(held_out: Iterable[PairBatch]) -> dict[str, Any]:
        tokens, pairs, num_targets, num_pairs = TokenStatistics(ranks), TokenStatistics(ranks), 0, 0
        for batch in pairs.following(held_out):
            losses, _ = losses_of(batch.to(device), tokens, pairs)
            pairs.add_rows(loss=losses)
            num_targets, num_pairs = num_targets + batch.num_targets, num_pairs + batch.num_pairs
        num_targets, num_pairs = ranks.total(num_targets), ranks.total(num_pairs)
        return tokens.means(num_targets, "eval_") | pairs.means(num_pairs, "eval_")

    if run.evaluation_due():  # the one in which an earlier start was interrupted
        run.log_evaluation(**evaluate(run.held_out()))
    for step in run.steps():
        lr = learning_rate(cfg, step, run.total_steps)
        optimizer.set_lr(lr)  # before backward: with optimizer.in_backward the update happens in backward

        micro_batches = batches.take(cfg.gradient_accumulation_steps)  # may be fewer at the end of an epoch
        copies = ranks.num_sharing  # ranks that share a micro-batch's tokens each compute all of its pairs
        num_pairs = copies * sum(batch.num_pairs for batch in micro_batches)
        num_targets = copies * sum(batch.num_targets for batch in micro_batches)
        num_chosen = copies * sum(int(batch.answer_tokens[:, 0].sum()) for batch in micro_batches)  # tokens
        tokens, pairs = TokenStatistics(ranks), TokenStatistics(ranks)
        for batch, is_last in ranks.share(micro_batches):
            # A sum, divided once by the count of the whole step.
            losses, answers = losses_of(batch.to(device), tokens, pairs)
            loss = losses.sum() / num_pairs
            if cfg.loss.sft_weight:
                loss = loss + cfg.loss.sft_weight * answers.chosen_loss / num_chosen
            if answers.router_loss is not None:  # mixture of experts
                loss = loss + answers.router_loss * (batch.num_pairs / num_pairs)
                pairs.add(router_aux_loss=answers.router_loss * batch.num_pairs)
            pairs.add(loss=loss * num_pairs, nll=answers.chosen_loss * (num_pairs / num_chosen))
            # If the loss is not finite, the step is skipped and its batch is saved.
            optimizer.scale(loss, last=is_last).backward()

        grad_norm = optimizer.finish_gradients(max_norm=cfg.clip_grad_norm)  # unscale, measure the norm, clip
        optimizer.step()
        optimizer.zero_grad()
        metrics = pairs.means(num_pairs) | tokens.means(num_targets)
        run.log(lr=lr, grad_norm=grad_norm, micro_batches=micro_batches, **metrics)

        if run.evaluation_due():
            run.log_evaluation(**evaluate(run.held_out()))
