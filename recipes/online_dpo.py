"""Online DPO: sample completions, rank them by rewards, and train with dpo on the best and the worst.

leanft run online_dpo --config tiny/online_dpo
leanft run online_dpo --config tiny/online_dpo loss.name=ipo output_dir=runs/online_ipo   # losses: docs/preferences.md
leanft run online_dpo --config tiny/online_dpo rewards='[runs/reward]'     # a reward model judges
leanft cp  online_dpo mine.py                      # edit the loop, then: leanft run mine.py --config tiny/online_dpo

The best and the worst completion of a prompt form a pair. A prompt whose completions have equal rewards is skipped.
"""

from lean_ft.data import prompt_rows
from lean_ft.frozen import load_reference
from lean_ft.losses import AnswerLogProbs, TokenStatistics, pair_losses
from lean_ft.memory import apply_memory
from lean_ft.online import Episodes, PairRollouts, Rewards, SampleLog, Sampler
from lean_ft.optim import build_optimizer, learning_rate
from lean_ft.parallel import cut, join, parallelize
from lean_ft.peft import load_with_adapter, lr_ratios
from lean_ft.settings import GenerationConfig, OnlineConfig, ParallelConfig, PreferenceLossConfig
from lean_ft.tokenizers import load_tokenizer
from lean_ft.training import Run, apply_regularization, shares_prompts, start


class Config(OnlineConfig):
    generation: GenerationConfig = GenerationConfig(num_answers=2)
    parallel: ParallelConfig = ParallelConfig()
    loss: PreferenceLossConfig = PreferenceLossConfig()


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
    log_probs = AnswerLogProbs(model, cfg)  # of whole completions; logits exist one chunk at a time
    reference = load_reference(cfg, model, log_probs, ranks=ranks)  # the model before training
    optimizer = build_optimizer(model, cfg, lr_ratios=lr_ratios(cfg.lora), ranks=ranks)
    rollouts = PairRollouts(cfg, prompts, tokenizer.pad_id, ranks, shares_prompts(cfg))  # a round's completions
    run = Run(
        cfg, model=model, optimizer=optimizer, batches=rollouts, held_out=held_out, tokenizer=tokenizer, ranks=ranks
    )
    score.run = run  # so that reward functions can read `trainer_state` and call `log_metric`
    samples = SampleLog(run, cfg.sample_every)
    answer = Sampler(cfg, model, tokenizer, optimizer, ranks, episodes)  # samples with the current weights

    if (held_out is not None and run.start_step == 0) or run.evaluation_due():  # before training, or interrupted
        run.log_evaluation(None, **answer.evaluate(held_out, score))
    for step in run.steps():
        lr = learning_rate(cfg, step, run.total_steps)
        optimizer.set_lr(lr)  # before backward: with optimizer.in_backward the update happens in backward
        if rollouts.used_up:
            rollouts.sample(answer, score)
            rollouts.begin()

        micro_batches = rollouts.take()
        copies = ranks.num_sharing  # ranks that share a micro-batch's tokens each compute all of its pairs
        pairs_found = sum(batch.num_pairs for batch in micro_batches)  # fewer if completions have equal rewards
        num_pairs = copies * max(1, pairs_found)
        num_targets = copies * max(1, sum(batch.num_targets for batch in micro_batches))
        num_chosen = copies * max(1, sum(int(batch.answer_tokens[:, 0].sum()) for batch in micro_batches))  # tokens
        tokens, pairs = TokenStatistics(ranks), TokenStatistics(ranks)
        for batch, is_last in ranks.share(micro_batches):
            batch = batch.to(device)
            frozen = reference(batch)  # (P, 2); computed first, while no activations are held for backward
            answers = log_probs(model, batch, tokens)
            # A sum, divided once by the count of the whole step.
            loss = pair_losses(cfg.loss, answers, frozen, batch.answer_tokens, pairs).sum() / num_pairs
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
        metrics = pairs.means(num_pairs) | tokens.means(num_targets) | rollouts.metrics()
        run.log(lr=lr, grad_norm=grad_norm, micro_batches=micro_batches, **metrics)
        samples.write(step, rollouts)
        if run.evaluation_due():
            run.log_evaluation(None, **answer.evaluate(held_out, score))
