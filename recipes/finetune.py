"""Fine-tune all parameters or an adapter, on one device or many. The loop below is plain PyTorch.

leanft run finetune --config tiny/full
leanft run finetune --config tiny/lora             # LoRA, DoRA, QLoRA: settings `lora.*`
leanft run --nproc-per-node 2 finetune --config tiny/full gradient_accumulation_steps=2    # FSDP, DDP: `parallel.*`
leanft cp  finetune mine.py                        # edit the loop, then: leanft run mine.py --config tiny/lora

This is full_finetune_single_device with adapters and ranks. An adapter's checkpoint holds only the adapter, in PEFT's
format.
"""

from lean_ft.data import prepare_batches
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
    lora: LoRAConfig | None = None  # null: train all parameters
    parallel: ParallelConfig = ParallelConfig()
    quantize: QuantizeConfig = QuantizeConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    loss: LossConfig = LossConfig()
    memory: MemoryConfig = MemoryConfig()


def main(cfg: Config) -> None:
    device = start(cfg)
    ranks = join(cfg.parallel, device)  # the process group; a no-op for one process
    tokenizer = load_tokenizer(cfg.model, cfg.data.chat_template)
    batches, held_out = prepare_batches(cfg.data, tokenizer, batch_size=cfg.batch_size, seed=cfg.seed)
    model = load_with_adapter(cfg.model, cfg.lora, device, ranks, memory=cfg.memory)  # quantizes while loading
    apply_regularization(model, cfg)  # `freeze`, `train` and NEFTune
    fake_quantize(model, cfg)  # quantization-aware training, if `quantize.train` is set
    cut(model, cfg.parallel, ranks)  # context, tensor and expert parallelism, if `parallel` sets them
    apply_memory(model, cfg.memory, compile=cfg.compile)
    parallelize(model, cfg.parallel, ranks, tokens=cfg.pass_tokens)  # FSDP or DDP; each rank loads only its shard
    optimizer = build_optimizer(model, cfg, lr_ratios=lr_ratios(cfg.lora), ranks=ranks)
    cross_entropy = CrossEntropy(model, cfg, ranks)  # logits exist for one chunk of tokens at a time
    run = Run(
        cfg, model=model, optimizer=optimizer, batches=batches, held_out=held_out, tokenizer=tokenizer, ranks=ranks
    )

    if run.evaluation_due():  # the one in which an earlier start was interrupted
        run.log_evaluation(**cross_entropy.evaluate(model, run.held_out()))
    for step in run.steps():
        lr = learning_rate(cfg, step, run.total_steps)
        optimizer.set_lr(lr)  # before backward: with optimizer.in_backward the update happens in backward

        micro_batches = batches.take(cfg.gradient_accumulation_steps)  # may be fewer at the end of an epoch
        num_targets = max(1, sum(batch.num_targets for batch in micro_batches))
        statistics = TokenStatistics(ranks)
        for batch, is_last in ranks.share(micro_batches):
            # Sum, then divide once by the step's targets: a mean of means would overweight short completions.
            loss = cross_entropy(model, batch.to(device), statistics) / num_targets
            # If the loss is not finite, the step is skipped and its batch is saved.
            optimizer.scale(loss, last=is_last).backward()

        grad_norm = optimizer.finish_gradients(max_norm=cfg.clip_grad_norm)  # unscale, measure the norm, clip
        optimizer.step()
        optimizer.zero_grad()
        run.log(lr=lr, grad_norm=grad_norm, micro_batches=micro_batches, **statistics.means(num_targets))

        if run.evaluation_due():
            run.log_evaluation(**cross_entropy.evaluate(model, run.held_out()))
