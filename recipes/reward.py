"""Train a reward model, which gives a text one score, on pairs of a chosen and a rejected completion.

leanft run reward --config tiny/reward
leanft score runs/tiny_reward rows.jsonl scored.jsonl
leanft cp  reward mine.py                          # edit the loop, then: leanft run mine.py --config tiny/reward

This is dpo with another output layer and no reference. transformers opens the result as
AutoModelForSequenceClassification.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from lean_ft.data import PairBatch, prepare_batches
from lean_ft.frozen.scoring import set_padding_apart
from lean_ft.losses import TokenStatistics, add_scores, reward_loss, scores_of
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
    RewardDataConfig,
    RewardLossConfig,
    ScheduleConfig,
    UsualRates,
)
from lean_ft.tokenizers import load_tokenizer
from lean_ft.training import Run, apply_regularization, evaluating, shares_prompts, start


class Config(RecipeConfig):
    usual_lr = UsualRates(1e-5, adapter=1e-4)

    model: ModelConfig
    data: RewardDataConfig
    lora: LoRAConfig | None = None  # null: train all parameters
    parallel: ParallelConfig = ParallelConfig()
    pad_token: str | None = None
    """A control token for padding, which must not end a text; null: the tokenizer's pad token."""
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    loss: RewardLossConfig = RewardLossConfig()
    memory: MemoryConfig = MemoryConfig()


def main(cfg: Config) -> None:
    device = start(cfg)
    ranks = join(cfg.parallel, device)  # the process group; a no-op for one process
    tokenizer = load_tokenizer(cfg.model, cfg.data.chat_template)
    if cfg.pad_token is not None:
        tokenizer.pad_with(cfg.pad_token)
    share_prompts = not cfg.loss.per_token and shares_prompts(cfg)
    batches, held_out = prepare_batches(
        cfg.data, tokenizer, batch_size=cfg.batch_size, seed=cfg.seed, share_prompts=share_prompts
    )
    # A language model's output layer is replaced by zeros, so every score starts at 0.
    model = load_with_adapter(cfg.model, cfg.lora, device, ranks, scores=REWARD_LABELS, memory=cfg.memory)
    set_padding_apart(model, tokenizer, batches, held_out)
    apply_regularization(model, cfg)  # `freeze`, `train` and NEFTune
    cut(model, cfg.parallel, ranks)  # context, tensor and expert parallelism, if `parallel` sets them
    apply_memory(model, cfg.memory, compile=cfg.compile)
    parallelize(model, cfg.parallel, ranks)  # FSDP or DDP; each rank loads only its shard
    optimizer = build_optimizer(model, cfg, lr_ratios=lr_ratios(cfg.lora), ranks=ranks)
    run = Run(
        cfg, model=model, optimizer=optimizer, batches=batches, held_out=held_out, tokenizer=tokenizer, ranks=ranks
    )

    def losses_of(batch: PairBatch, pairs: TokenStatistics) -> tuple[Tensor, Tensor | None]:
        """The loss of each pair, (P,), and the router loss of a mixture of experts. The batch is on the device."""
        is_float16 = cfg.model.dtype == "float16"
        scores, router_loss = scores_of(model, batch, per_token=cfg.loss.per_token, is_float16=is_float16)
        add_scores(pairs, scores)
        return reward_loss(scores, batch.margins, centering=cfg.loss.centering), router_loss

    @evaluating(model)
    def evaluate(held_out: Iterable[PairBatch]) -> dict[str, Any]:
        pairs, num_pairs = TokenStatistics(ranks), 0
        for batch in pairs.following(held_out):
            losses, _ = losses_of(batch.to(device), pairs)
            pairs.add_rows(loss=losses)
            num_pairs += batch.num_pairs
        return pairs.means(ranks.total(num_pairs), "eval_")

    if run.evaluation_due():  # the one in which an earlier start was interrupted
        run.log_evaluation(**evaluate(run.held_out()))
    for step in run.steps():
        lr = learning_rate(cfg, step, run.total_steps)
        optimizer.set_lr(lr)  # before backward: with optimizer.in_backward the update happens in backward

        micro_batches = batches.take(cfg.gradient_accumulation_steps)  # may be fewer at the end of an epoch
        # Ranks that share a micro-batch's tokens each compute all of its pairs.
        num_pairs = ranks.num_sharing * sum(batch.num_pairs for batch in micro_batches)
        pairs = TokenStatistics(ranks)
        for batch, is_last in ranks.share(micro_batches):
            # A sum, divided once by the count of the whole step.
            losses, router_loss = losses_of(batch.to(device), pairs)
            loss = losses.sum() / num_pairs
            if router_loss is not None:  # mixture of experts
                loss = loss + router_loss * (batch.num_pairs / num_pairs)
                pairs.add(router_aux_loss=router_loss * batch.num_pairs)
            pairs.add(loss=loss * num_pairs)
            # If the loss is not finite, the step is skipped and its batch is saved.
            optimizer.scale(loss, last=is_last).backward()

        grad_norm = optimizer.finish_gradients(max_norm=cfg.clip_grad_norm)  # unscale, measure the norm, clip
        optimizer.step()
        optimizer.zero_grad()
        run.log(lr=lr, grad_norm=grad_norm, micro_batches=micro_batches, **pairs.means(num_pairs))

        if run.evaluation_due():
            run.log_evaluation(**evaluate(run.held_out()))
