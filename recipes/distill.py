"""Distillation: train a student to match the predictions of a teacher that has the same tokenizer.

leanft run distill --config tiny/distill
leanft run distill --config tiny/distill distill.divergence=reverse_kl output_dir=runs/reverse   # docs/distillation.md
leanft run distill --config tiny/self_distill      # the teacher is the student, which reads a context
leanft cp  distill mine.py                         # edit the loop, then: leanft run mine.py --config tiny/distill

This is finetune with another loss: the divergence between two models' predictions of each token, or between one
model's predictions with and without a context.
"""

from lean_ft.data import prepare_batches
from lean_ft.frozen import load_teacher, self_teacher
from lean_ft.losses import Distillation, TokenStatistics
from lean_ft.memory import apply_memory
from lean_ft.online import OnPolicy
from lean_ft.optim import build_optimizer, learning_rate
from lean_ft.parallel import cut, join, parallelize
from lean_ft.peft import load_with_adapter, lr_ratios
from lean_ft.settings import (
    DistillConfig,
    LoRAConfig,
    MemoryConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RecipeConfig,
    SamplingConfig,
    ScheduleConfig,
    TaughtDataConfig,
)
from lean_ft.tokenizers import load_tokenizer
from lean_ft.training import Run, apply_regularization, start


class Config(RecipeConfig):
    model: ModelConfig
    data: TaughtDataConfig
    distill: DistillConfig
    generation: SamplingConfig = SamplingConfig()
    lora: LoRAConfig | None = None  # null: train all parameters
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    memory: MemoryConfig = MemoryConfig()


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
    optimizer = build_optimizer(model, cfg, lr_ratios=lr_ratios(cfg.lora), ranks=ranks)
    # The student itself; else another model in memory, or its cached predictions.
    teacher = self_teacher(cfg, model, optimizer) or load_teacher(cfg, tokenizer, device, batches, held_out, ranks)
    on_policy = OnPolicy(cfg, model, tokenizer)  # replaces some completions with the student's own
    distillation = Distillation(model, cfg, ranks)  # both models' logits exist for one chunk of tokens at a time
    run = Run(
        cfg, model=model, optimizer=optimizer, batches=batches, held_out=held_out, tokenizer=tokenizer, ranks=ranks
    )

    if run.evaluation_due():  # the one in which an earlier start was interrupted
        run.log_evaluation(**distillation.evaluate(model, teacher, run.held_out()))
    for step in run.steps():
        lr = learning_rate(cfg, step, run.total_steps)
        optimizer.set_lr(lr)  # before backward: with optimizer.in_backward the update happens in backward

        micro_batches = batches.take(cfg.gradient_accumulation_steps)  # may be fewer at the end of an epoch
        if on_policy.samples(step):
            micro_batches = on_policy.answered(step, micro_batches)  # same prompts, sampled completions
        num_targets = max(1, sum(batch.num_targets for batch in micro_batches))
        statistics = TokenStatistics(ranks)
        for batch, is_last in ranks.share(micro_batches):
            here = batch.to(device)
            said = teacher(here)  # computed first, while no activations are held for backward
            # Sum, then divide once by the step's targets: a mean of means would overweight short completions.
            loss = distillation(model, here, said, statistics) / num_targets
            # If the loss is not finite, the step is skipped and its batch is saved.
            optimizer.scale(loss, last=is_last).backward()

        grad_norm = optimizer.finish_gradients(max_norm=cfg.clip_grad_norm)  # unscale, measure the norm, clip
        optimizer.step()
        optimizer.zero_grad()
        run.log(lr=lr, grad_norm=grad_norm, micro_batches=micro_batches, **statistics.means(num_targets))

        if run.evaluation_due():
            run.log_evaluation(**distillation.evaluate(model, teacher, run.held_out()))
