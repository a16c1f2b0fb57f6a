"""PPO: train on sampled completions scored by rewards, with a value model as the baseline.

leanft run ppo --config tiny/ppo
leanft run ppo --config tiny/ppo lora.rank=8 output_dir=runs/ppo_lora      # policy, values and reference share one base
leanft run ppo --config tiny/ppo rewards='[runs/reward]'                   # a model trained by `leanft run reward`
leanft run --nproc-per-node 2 ppo --config tiny/ppo gradient_accumulation_steps=2      # and `parallel.*`
leanft cp  ppo mine.py                              # edit the loop, then: leanft run mine.py --config tiny/ppo

This is grpo with a value model, which predicts the reward before each token. Advantages are per token, so one
completion per prompt is enough. Policy and value model train on each round several times.
"""

from torch import Tensor, nn

from lean_ft.data import PolicyBatch, prompt_rows
from lean_ft.frozen import load_policy_reference
from lean_ft.losses import TokenLogProbs, TokenStatistics, policy_loss, value_loss
from lean_ft.memory import apply_memory
from lean_ft.online import Episodes, Rewards, SampleLog, Sampler, ValuedRollouts, ValueModel
from lean_ft.optim import build_optimizer, learning_rate
from lean_ft.parallel import cut, join, parallelize
from lean_ft.peft import load_with_adapter, lr_ratios
from lean_ft.settings import GenerationConfig, OnlineConfig, ParallelConfig, PPOLossConfig, ValueConfig
from lean_ft.tokenizers import load_tokenizer
from lean_ft.training import Run, apply_regularization, evaluating, shares_prompts, start


class Config(OnlineConfig):
    generation: GenerationConfig = GenerationConfig(num_answers=1, passes=4)
    parallel: ParallelConfig = ParallelConfig()
    value: ValueConfig = ValueConfig()
    loss: PPOLossConfig = PPOLossConfig()


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
    value = ValueModel(cfg, model, ranks)  # predicts the reward still to come before each token
    reference = load_policy_reference(cfg, model, log_probs, ranks)  # the initial policy; None if it is not needed
    ratios = lr_ratios(cfg.lora) | {"value.*": cfg.value.lr_ratio}
    optimizer = build_optimizer(nn.ModuleDict({"policy": model, "value": value}), cfg, lr_ratios=ratios, ranks=ranks)
    rollouts = ValuedRollouts(cfg, prompts, tokenizer.pad_id, ranks, shares_prompts(cfg))  # a round's completions
    run = Run(
        cfg,
        model=model,
        optimizer=optimizer,
        batches=rollouts,
        held_out=held_out,
        tokenizer=tokenizer,
        ranks=ranks,
        carried=value,
    )
    score.run = run  # so that reward functions can read `trainer_state` and call `log_metric`
    samples = SampleLog(run, cfg.sample_every)
    answer = Sampler(cfg, model, tokenizer, optimizer, ranks, episodes)  # samples with the current weights

    @evaluating(model, value)
    def sample_a_round() -> None:
        rollouts.sample(answer, score)
        for batch, _ in ranks.share(rollouts.to_remember()):  # computed before the round's first update
            batch = batch.to(device)
            now, frozen = log_probs(model, batch), None if reference is None else reference(batch)
            rollouts.remember(batch, now, frozen, value(batch, now))
        rollouts.begin()

    def loss_of(batch: PolicyBatch, num_tokens: int, tokens: TokenStatistics) -> Tensor:
        """The batch's share of the step's policy and value loss. The batch is on the device."""
        now = log_probs(model, batch, tokens)
        # -min(r A, clip(r) A), a mean over the step's tokens
        policy = policy_loss(
            "dapo",
            now.log_probs,
            batch.old,
            batch.advantages,
            batch.counts,
            num_tokens=num_tokens,
            statistics=tokens,
            epsilon=cfg.loss.epsilon,
            epsilon_high=cfg.loss.epsilon,
        )
        values, epsilon = value(batch, now), cfg.loss.value_epsilon
        error = value_loss(values, batch.values, batch.returns, batch.counts, epsilon, num_tokens)
        tokens.add(policy_loss=policy * num_tokens, value_loss=error * num_tokens)
        loss = policy + cfg.loss.value_weight * error
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
        num_tokens = copies * max(1, sum(batch.num_targets for batch in micro_batches))
        tokens = TokenStatistics(ranks)
        for batch, is_last in ranks.share(micro_batches):
            # Each micro-batch adds its share: the denominators are those of the whole step.
            loss = loss_of(batch.to(device), num_tokens, tokens)
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
