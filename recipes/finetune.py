"""Finetuning of all parameters, or of an adapter beside them, on one device or many; the loop below is plain PyTorch.

leanft run finetune --config tiny/full
leanft run finetune --config tiny/lora             # LoRA, DoRA, QLoRA: settings `lora.*`
leanft run --nproc-per-node 2 finetune --config tiny/full gradient_accumulation_steps=2    # FSDP, DDP: `parallel.*`
leanft cp  finetune mine.py                        # edit the loop, then: leanft run mine.py --config tiny/lora

This is full_finetune_single_device with adapters and ranks. A checkpoint of an adapter holds it alone, in PEFT's format.
"""

from lean_ft.data import sft_batches
from lean_ft.losses import CrossEntropy, TokenStatistics
from lean_ft.memory import apply_memory
from lean_ft.optim import build_optimizer, learning_rate
from lean_ft.parallel import cut, join, parallelize
from lean_ft.peft import load_with_adapter, lr_ratios
from lean_ft.quantize import fake_quantize
from lean_ft.settings import (
    LoRAConfig,
    LossConfig,
    MemoryConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    QuantizeConfig,
    RecipeConfig,
    ScheduleConfig,
    SFTDataConfig,
)
from lean_ft.tokenizers import load_tokenizer
from lean_ft.training import Run, apply_regularization, start


class Config(RecipeConfig):
    model: ModelConfig
    data: SFTDataConfig
    lora: LoRAConfig | None = None  # null: all parameters train
    parallel: ParallelConfig = ParallelConfig()
    quantize: QuantizeConfig = QuantizeConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    loss: LossConfig = LossConfig()
    memory: MemoryConfig = MemoryConfig()


def main(cfg: Config) -> None:
    device = start(cfg)
    ranks = join(cfg.parallel, device)  # who else trains; of one process, what is asked of them changes nothing
    tokenizer = load_tokenizer(cfg.model, cfg.data.chat_template)
    batches, held_out = sft_batches(cfg.data, tokenizer, batch_size=cfg.batch_size, seed=cfg.seed)
    model = load_with_adapter(cfg.model, cfg.lora, device, ranks)  # what is frozen is quantised as it is read
    apply_regularization(model, cfg)  # what `freeze` and `train` say; NEFTune
    fake_quantize(model, cfg)  # rounds as the quantised model will, where `quantize.train` says so
    cut(model, cfg.parallel, ranks)  # layers, by tokens, heads or experts, where `parallel` says so
    apply_memory(model, cfg.memory, compile=cfg.compile)
    parallelize(model, cfg.parallel, ranks, tokens=cfg.pass_tokens)  # each rank reads and keeps its rows, or all
    optimizer = build_optimizer(model, cfg, lr_ratios=lr_ratios(cfg.lora), ranks=ranks)
    cross_entropy = CrossEntropy(model, cfg, ranks)  # of hidden states: logits exist a chunk of tokens at a time
    run = Run(
        cfg, model=model, optimizer=optimizer, batches=batches, held_out=held_out, tokenizer=tokenizer, ranks=ranks
    )

    for step in run.steps():
        lr = learning_rate(cfg, step, run.total_steps)
        optimizer.set_lr(lr)  # before backward: with optimizer.in_backward the update happens there

        micro_batches = batches.take(cfg.gradient_accumulation_steps)  # fewer at the end of an epoch
        num_targets = max(1, sum(batch.num_targets for batch in micro_batches))
        statistics = TokenStatistics(ranks)
        for batch, is_last in ranks.share(micro_batches):
            # Sum, then divide once by the step's targets: a mean of means would overweight short answers.
            loss = cross_entropy(model, batch.to(device), statistics) / num_targets
            # A step with a loss that is not finite is skipped, and its batch kept.
            optimizer.scale(loss, last=is_last).backward()

        grad_norm = optimizer.finish_gradients(max_norm=cfg.clip_grad_norm)  # unscales, measures, clips
        optimizer.step()
        optimizer.zero_grad()
        run.log(lr=lr, grad_norm=grad_norm, micro_batches=micro_batches, **statistics.means(num_targets))

        if run.evaluation_due():
            run.log_evaluation(**cross_entropy.evaluate(model, run.held_out()))
