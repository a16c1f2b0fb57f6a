"""Learning from a teacher: a student comes to predict what a frozen model with the same tokenizer predicts.

leanft run distill --config tiny/distill
leanft run distill --config tiny/distill distill.divergence=reverse_kl output_dir=runs/reverse   # docs/distillation.md
leanft cp  distill mine.py                         # edit the loop, then: leanft run mine.py --config tiny/distill

This is finetune with another loss: how far two models' predictions of each token are apart.
"""

from lean_ft.data import sft_batches
from lean_ft.frozen import load_teacher
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
    SFTDataConfig,
)
from lean_ft.tokenizers import load_tokenizer
from lean_ft.training import Run, apply_regularization, start


class Config(RecipeConfig):
    model: ModelConfig
    data: SFTDataConfig
    distill: DistillConfig
    generation: SamplingConfig = SamplingConfig()
    lora: LoRAConfig | None = None  # null: all parameters train
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    memory: MemoryConfig = MemoryConfig()


def main(cfg: Config) -> None:
    device = start(cfg)
    ranks = join(cfg.parallel, device)  # who else trains; of one process, what is asked of them changes nothing
    tokenizer = load_tokenizer(cfg.model, cfg.data.chat_template)
    batches, held_out = sft_batches(cfg.data, tokenizer, batch_size=cfg.batch_size, seed=cfg.seed)
    teacher = load_teacher(cfg, tokenizer, device, batches, held_out, ranks)  # in memory, or what it said before
    model = load_with_adapter(cfg.model, cfg.lora, device, ranks)  # what is frozen is quantised as it is read
    apply_regularization(model, cfg)  # what `freeze` and `train` say; NEFTune
    cut(model, cfg.parallel, ranks)  # layers, by tokens, heads or experts, where `parallel` says so
    apply_memory(model, cfg.memory, compile=cfg.compile)
    parallelize(model, cfg.parallel, ranks)  # each rank reads and keeps its rows; one device: all of them
    optimizer = build_optimizer(model, cfg, lr_ratios=lr_ratios(cfg.lora), ranks=ranks)
    on_policy = OnPolicy(cfg, model, tokenizer)  # the student's own answers, in as many steps as it is told
    distillation = Distillation(model, cfg, ranks)  # of hidden states: two logits exist a chunk of tokens at a time
    run = Run(
        cfg, model=model, optimizer=optimizer, batches=batches, held_out=held_out, tokenizer=tokenizer, ranks=ranks
    )

    for step in run.steps():
        lr = learning_rate(cfg, step, run.total_steps)
        optimizer.set_lr(lr)  # before backward: with optimizer.in_backward the update happens there

        micro_batches = batches.take(cfg.gradient_accumulation_steps)  # fewer at the end of an epoch
        if on_policy.samples(step):
            micro_batches = on_policy.answered(step, micro_batches)  # the same prompts
        num_targets = max(1, sum(batch.num_targets for batch in micro_batches))
        statistics = TokenStatistics(ranks)
        for batch, is_last in ranks.share(micro_batches):
            here = batch.to(device)
            said = teacher(here)  # first: nothing waits for a backward pass yet
            # Sum, then divide once by the step's targets: a mean of means would overweight short answers.
            loss = distillation(model, here, said, statistics) / num_targets
            # A step with a loss that is not finite is skipped, and its batch kept.
            optimizer.scale(loss, last=is_last).backward()

        grad_norm = optimizer.finish_gradients(max_norm=cfg.clip_grad_norm)  # unscales, measures, clips
        optimizer.step()
        optimizer.zero_grad()
        run.log(lr=lr, grad_norm=grad_norm, micro_batches=micro_batches, **statistics.means(num_targets))

        if run.evaluation_due():
            run.log_evaluation(**distillation.evaluate(model, teacher, run.held_out()))
