"""Learning online from pairs: the model answers, a judge picks the better and the worse answer, and dpo learns from both.

leanft run online_dpo --config tiny/online_dpo
leanft run online_dpo --config tiny/online_dpo loss.name=ipo output_dir=runs/online_ipo   # docs/preferences.md has the losses
leanft run online_dpo --config tiny/online_dpo rewards='[runs/reward]'     # a reward model judges
leanft cp  online_dpo mine.py                      # edit the loop, then: leanft run mine.py --config tiny/online_dpo

Sample, judge, learn: of the answers to a prompt the best and the worst are a pair; of answers that are worth the same nothing is
learned.
"""

from lean_ft.data import prompt_rows
from lean_ft.frozen import load_reference
from lean_ft.losses import AnswerLogProbs, TokenStatistics, pair_losses
from lean_ft.memory import apply_memory
from lean_ft.online import PairRollouts, Rewards, SampleLog, Sampler
from lean_ft.optim import build_optimizer, learning_rate
from lean_ft.parallel import cut, join, parallelize
from lean_ft.peft import load_with_adapter, lr_ratios
from lean_ft.settings import GenerationConfig, OnlineConfig, ParallelConfig, PreferenceLossConfig
from lean_ft.tokenizers import load_tokenizer
from lean_ft.training import Run, apply_regularization, start


class Config(OnlineConfig):
    generation: GenerationConfig = GenerationConfig(num_answers=2)
    parallel: ParallelConfig = ParallelConfig()
    loss: PreferenceLossConfig = PreferenceLossConfig()


def main(cfg: Config) -> None:
    device = start(cfg)
    ranks = join(cfg.parallel, device)  # who else trains; of one process, what is asked of them changes nothing
    tokenizer = load_tokenizer(cfg.model, cfg.data.chat_template)
    prompts, held_out = prompt_rows(cfg.data, tokenizer, cfg.seed)
    score = Rewards(cfg.rewards, tokenizer, device.type, ranks)
    model = load_with_adapter(cfg.model, cfg.lora, device, ranks)  # what is frozen is quantised as it is read
    apply_regularization(model, cfg)  # what `freeze` and `train` say; NEFTune
    cut(model, cfg.parallel, ranks)  # layers, by tokens, heads or experts, where `parallel` says so
    apply_memory(model, cfg.memory, compile=cfg.compile)
    parallelize(model, cfg.parallel, ranks)  # each rank reads and keeps its rows; one device: all of them
    log_probs = AnswerLogProbs(model, cfg)  # of whole answers: logits exist a chunk of tokens at a time
    reference = load_reference(cfg, model, log_probs, ranks=ranks)  # the model as it is now
    optimizer = build_optimizer(model, cfg, lr_ratios=lr_ratios(cfg.lora), ranks=ranks)
    rollouts = PairRollouts(cfg, prompts, tokenizer.pad_id, ranks)  # what a round has sampled, and its pairs
    run = Run(
        cfg, model=model, optimizer=optimizer, batches=rollouts, held_out=held_out, tokenizer=tokenizer, ranks=ranks
    )
    samples = SampleLog(run, cfg.sample_every)
    answer = Sampler(cfg, model, tokenizer, optimizer, ranks)  # as the model is now

    if held_out is not None and run.start_step == 0:
        samples.say_before(answer.evaluate(held_out, score))
    for step in run.steps():
        lr = learning_rate(cfg, step, run.total_steps)
        optimizer.set_lr(lr)  # before backward: with optimizer.in_backward the update happens there
        if rollouts.used_up:
            rollouts.sample(answer, score)
            rollouts.begin()

        micro_batches = rollouts.take()
        copies = ranks.num_sharing  # of a micro-batch: ranks that share its tokens have all of its pairs
        pairs_found = sum(batch.num_pairs for batch in micro_batches)  # fewer where answers are worth the same
        num_pairs = copies * max(1, pairs_found)
        num_targets = copies * max(1, sum(batch.num_targets for batch in micro_batches))
        num_chosen = copies * max(1, sum(int(batch.answer_tokens[:, 0].sum()) for batch in micro_batches))  # tokens
        tokens, pairs = TokenStatistics(ranks), TokenStatistics(ranks)
        for batch, is_last in ranks.share(micro_batches):
            batch = batch.to(device)
            frozen = reference(batch)  # (P, 2), first: nothing waits for a backward pass yet
            answers = log_probs(model, batch, tokens)
            # Sums, divided once by what the whole step has.
            loss = pair_losses(cfg.loss, answers, frozen, batch.answer_tokens, pairs).sum() / num_pairs
            if cfg.loss.sft_weight:
                loss = loss + cfg.loss.sft_weight * answers.chosen_loss / num_chosen
            if answers.router_loss is not None:  # of a mixture of experts
                loss = loss + answers.router_loss * (batch.num_pairs / num_pairs)
            pairs.add(loss=loss * num_pairs, nll=answers.chosen_loss * (num_pairs / num_chosen))
            # A step with a loss that is not finite is skipped, and its batch kept.
            optimizer.scale(loss, last=is_last).backward()

        grad_norm = optimizer.finish_gradients(max_norm=cfg.clip_grad_norm)  # unscales, measures, clips
        optimizer.step()
        optimizer.zero_grad()
        metrics = pairs.means(num_pairs) | tokens.means(num_targets) | rollouts.metrics()
        run.log(lr=lr, grad_norm=grad_norm, micro_batches=micro_batches, **metrics)
        samples.write(step, rollouts)
        if run.evaluation_due():
            run.log_evaluation(None, **answer.evaluate(held_out, score))
