"""Full finetuning on one device: every parameter trains, and the loop below is plain PyTorch.

leanft run full_finetune_single_device --config tiny/full
leanft cp  full_finetune_single_device mine.py     # edit the loop, then: leanft run mine.py --config tiny/full
"""

import torch
from pydantic import Field, NonNegativeInt
from torch import Tensor

from lean_ft.data import Batch, sft_batches
from lean_ft.losses import TokenStatistics, linear_cross_entropy
from lean_ft.memory import apply_memory, loss_chunk_tokens
from lean_ft.models import load_model
from lean_ft.optim import build_optimizer, learning_rate
from lean_ft.settings import (
    LossConfig,
    MemoryConfig,
    ModelConfig,
    OptimizerConfig,
    RecipeConfig,
    ScheduleConfig,
    SFTDataConfig,
)
from lean_ft.tokenizers import load_tokenizer
from lean_ft.training import Run, say_answers, start


class Config(RecipeConfig):
    model: ModelConfig
    data: SFTDataConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    loss: LossConfig = LossConfig()
    memory: MemoryConfig = MemoryConfig()
    eval_answers: NonNegativeInt = Field(
        0, description="Held-out questions that the model answers before and after training; 0 asks none."
    )


def main(cfg: Config) -> None:
    device = start(cfg)
    tokenizer = load_tokenizer(cfg.model.path)
    batches, eval_batches = sft_batches(cfg.data, tokenizer, batch_size=cfg.batch_size, seed=cfg.seed)

    # float16 is mixed precision: float32 master weights, float16 arithmetic, and a scaled loss.
    mixed = cfg.model.dtype == "float16"
    dtype = torch.float32 if mixed else getattr(torch, cfg.model.dtype)
    model = load_model(
        cfg.model.path,
        device=device,
        dtype=dtype,
        random_init=cfg.model.random_init,
        router_aux_loss_coef=cfg.model.router_aux_loss_coef,
    )
    apply_memory(model, cfg.memory, compile=cfg.compile)
    optimizer = build_optimizer(model, cfg)
    run = Run(cfg, model=model, optimizer=optimizer, batches=batches, tokenizer=tokenizer)

    chunk_tokens = loss_chunk_tokens(model, cfg.memory.loss_chunk_tokens)

    def loss_of(batch: Batch, statistics: TokenStatistics, more: LossConfig) -> Tensor:
        """The sum of the cross-entropy over a batch's targets; logits exist a chunk of tokens at a time."""
        with torch.autocast(device.type, torch.float16, enabled=mixed):
            hidden = model(batch.input_ids, batch.positions, batch.cu_seqlens, return_hidden=True)
            return linear_cross_entropy(
                hidden,
                model.output_weight,
                batch.labels,
                num_targets=batch.num_targets,
                chunk_tokens=chunk_tokens,
                softcap=model.config.logits_softcap,
                accumulation_dtype=cfg.memory.loss_accumulation_dtype,
                label_smoothing=more.label_smoothing,
                z_loss=more.z_loss,
                statistics=statistics,
                compile=cfg.compile,
            )

    say_answers(f"at step {run.start_step}", model, tokenizer, eval_batches, cfg.eval_answers)
    for step in run.steps():
        lr = learning_rate(cfg, step, run.total_steps)
        optimizer.set_lr(lr)  # before backward: with optimizer.in_backward the update happens there

        micro_batches = batches.take(cfg.gradient_accumulation_steps)  # fewer at the end of an epoch
        num_targets = max(1, sum(batch.num_targets for batch in micro_batches))
        step_loss, step_router_loss = torch.zeros(2, device=device)
        statistics = TokenStatistics(device)
        for i, batch in enumerate(micro_batches):
            batch = batch.to(device)
            # Sum, then divide once by the step's targets: a mean of means would overweight short answers.
            loss = loss_of(batch, statistics, cfg.loss) / num_targets
            # A mixture of experts also balances its load; a micro-batch counts by its share of the targets. Else 0.
            router_loss = model.auxiliary_loss(batch.is_token) * (batch.num_targets / num_targets)
            # A step with a loss that is not finite is skipped, and its batch kept.
            optimizer.scale(loss + router_loss, last=i == len(micro_batches) - 1).backward()
            step_loss += loss.detach()
            step_router_loss += router_loss.detach()

        grad_norm = optimizer.finish_gradients(max_norm=cfg.clip_grad_norm)  # unscales, measures, clips
        optimizer.step()
        optimizer.zero_grad()
        run.log(
            loss=step_loss,
            lr=lr,
            grad_norm=grad_norm,
            micro_batches=micro_batches,
            router_aux_loss=step_router_loss if model.router_aux_loss_coef else None,
            **statistics.means(num_targets),  # accuracy and entropy, from the loss's own pass
        )

        if eval_batches is not None and run.evaluation_due():
            num_targets, statistics = sum(batch.num_targets for batch in eval_batches), TokenStatistics(device)
            with torch.no_grad():
                held_out = run.until_stopped(eval_batches)
                losses = [loss_of(batch.to(device), statistics, LossConfig()) for batch in held_out]
            run.log_evaluation(torch.stack(losses).sum() / num_targets, **statistics.means(num_targets, "eval_"))
    say_answers(f"at step {run.total_steps}", model, tokenizer, eval_batches, cfg.eval_answers)
