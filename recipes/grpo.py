"""GRPO and related losses: train on sampled completions scored by rewards, all parameters or an adapter.

leanft run grpo --config tiny/grpo
leanft run grpo --config tiny/grpo loss.name=gspo output_dir=runs/gspo        # docs/online.md has the losses
leanft run grpo --config tiny/grpo loss.name=my_loss.py:fn output_dir=runs/mine    # def fn(answers): one loss per token
leanft run grpo --config tiny/grpo rewards='[my_rewards.py:right]'            # your own function
leanft run --nproc-per-node 2 grpo --config tiny/grpo gradient_accumulation_steps=2    # and `parallel.*`
leanft cp  grpo mine.py                             # edit the loop, then: leanft run mine.py --config tiny/grpo

Each round, the model samples several completions per prompt, rewards score them, and training makes high-scoring
completions more likely. One round may serve several optimizer steps.
"""

from torch import Tensor

from lean_ft.data import PolicyBatch, prompt_rows
from lean_ft.frozen import load_policy_reference
from lean_ft.losses import TokenLogProbs, TokenStatistics, batch_loss
from lean_ft.memory import apply_memory
from lean_ft.online import Episodes, Rewards, Rollouts, SampleLog, Sampler
from lean_ft.optim import build_optimizer, learning_rate
from lean_ft.parallel import cut, join, parallelize
from lean_ft.peft import load_with_adapter, lr_ratios
from lean_ft.settings import OnlineConfig, ParallelConfig, PolicyLossConfig
from lean_ft.tokenizers import load_tokenizer
from lean_ft.training import Run, apply_regularization, evaluating, shares_prompts, start


class Config(OnlineConfig):
    parallel: ParallelConfig = ParallelConfig()
    loss: PolicyLossConfig = PolicyLossConfig()


def main(cfg: Config) -> None:
    device = start(cfg)
    ranks = join(cfg.parallel, device)  # the process group; a no-op for one process
    tokenizer = load_tokenizer(cfg.model, cfg.data.chat_template)
    episodes = Episodes(cfg, tokenizer, ranks.rank)  # with `tools` or an `environment`
    prompts, held_out = prompt_rows(cfg.data, tokenizer, cfg.seed, episodes.schemas)
    score = Rewards(cfg.rewards, tokenizer, device.type, ranks)
    model = load_with_adapter(cfg.model, cfg.lora, device, ranks, memory=cfg.memory)  # quantizes while loading
    apply_regularization(model, cfg)  # `freeze`, `train` and NEFTune
    cut(model, cfg.parallel, ranks)  # context, tensor and expert parallelism, if `parallel` sets them
    apply_memory(model, cfg.memory, compile=cfg.compile)
    parallelize(model, cfg.parallel, ranks)  # FSDP or DDP; each rank loads only its shard
    log_probs = TokenLogProbs(model, cfg)  # of sampled tokens; logits exist one chunk at a time
    reference = load_policy_reference(cfg, model, log_probs, ranks)  # the initial policy; None if it is not needed
    optimizer = build_optimizer(model, cfg, lr_ratios=lr_ratios(cfg.lora), ranks=ranks)
    rollouts = Rollouts(cfg, prompts, tokenizer.pad_id, ranks, shares_prompts(cfg))  # a round's completions
    run = Run(
        cfg, model=model, optimizer=optimizer, batches=rollouts, held_out=held_out, tokenizer=tokenizer, ranks=ranks
    )
    score.run = run  # so that reward functions can read `trainer_state` and call `log_metric`
    samples = SampleLog(run, cfg.sample_every)
    answer = Sampler(cfg, model, tokenizer, optimizer, ranks, episodes)  # samples with the current weights

    @evaluating(model)
    def sample_a_round() -> None:
        rollouts.sample(answer, score)
        for batch, _ in ranks.share(rollouts.to_remember()):  # computed before the round's first update
            batch = batch.to(device)
            frozen = reference(batch) if reference is not None and cfg.loss.kl_in_reward else None
            rollouts.remember(batch, log_probs(model, batch), frozen)
        rollouts.begin()

    def loss_of(batch: PolicyBatch, num_answers: int, num_tokens: int, tokens: TokenStatistics) -> Tensor:
        """The batch's share of the step's loss. The batch is on the device."""
        frozen = reference(batch) if reference is not None and not cfg.loss.kl_in_reward else None  # (B, A)
        now = log_probs(model, batch, tokens)
        loss = batch_loss(cfg, batch, now, frozen, num_answers=num_answers, num_tokens=num_tokens, statistics=tokens)
        if now.router_loss is not None:  # mixture of experts
            loss = loss + now.router_loss * (batch.num_targets / num_tokens)
        return loss

    if (held_out is not None and run.start_step == 0) or run.evaluation_due():  # before training, or interrupted
        run.log_evaluation(None, **answer.evaluate(held_out, score))
    for step in run.steps():
        lr = learning_rate(cfg, step, run.total_steps)
        optimizer.set_lr(lr)  # before backward: with optimizer.in_backward the update happens in backward
        if rollouts.used_up:
            sample_a_round()

        micro_batches = rollouts.take()
        copies = ranks.num_sharing  # ranks that share a micro-batch's tokens each compute all of its completions
        num_answers = copies * max(1, sum(batch.num_answers for batch in micro_batches))
        num_tokens = copies * max(1, sum(batch.num_targets for batch in micro_batches))
        tokens = TokenStatistics(ranks)
        for batch, is_last in ranks.share(micro_batches):
            # Each micro-batch adds its share: the denominators are those of the whole step.
            loss = loss_of(batch.to(device), num_answers, num_tokens, tokens)
            tokens.add(loss=loss * num_tokens)
            # If the loss is not finite, the step is skipped and its batch is saved.
            optimizer.scale(loss, last=is_last).backward()

        grad_norm = optimizer.finish_gradients(max_norm=cfg.clip_grad_norm)  # unscale, measure the norm, clip
        optimizer.step()
        optimizer.zero_grad()
        metrics = tokens.means(num_tokens) | rollouts.metrics()
        run.log(lr=lr, grad_norm=grad_norm, micro_batches=micro_batches, **metrics)
        samples.write(step, rollouts)
        if run.evaluation_due():
            run.log_evaluation(None, **answer.evaluate(held_out, score))
