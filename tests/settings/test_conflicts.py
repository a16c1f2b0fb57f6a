"""Conflicting settings raise an error when a recipe's configuration is built, with all reasons in one message."""

import pytest

from lean_ft.settings.conflicts import CONFLICTS
from lean_ft.settings.text import load_config
from tests.settings.cases import REQUIRED, load_recipe

COMMON = ("model.path=tiny", "data.source=tiny/train.jsonl", "output_dir=run")
# For each row of the table: a recipe, settings that it rejects, and part of the message.
TOOLS = f"tools.functions=[{__file__}:load]"
ITSELF = "distill.teacher=self data.columns.context=c"
SERVER = "generation.engine=vllm loss.correction=token_truncate"
REFUSED = [
    ("finetune", "profile_steps=[1,1,1]", "is used only with profile"),
    ("dpo", "eval_tasks_every=2", "eval_tasks_every=2 is used only with eval_tasks"),
    ("finetune", "eval_tasks_limit=2", "eval_tasks_limit=2 is used only with eval_tasks"),
    ("finetune", "profile=true max_steps=4", "max_steps=4 is less"),
    ("grpo", "loss.kl=k1", "loss.kl=k1 is used only with loss.kl_weight above 0"),
    ("grpo", "generation.engine_url=http://127.0.0.1:9", "is used only with generation.engine=vllm"),
    ("grpo", "generation.max_given_tokens=9", "is used only with tools or an environment"),
    ("ppo", "generation.turn_discount=0.9", "is used only with tools or an environment"),
    ("grpo", "tools.seconds=5", "used only with tools.functions or an environment"),
    ("grpo", f"{TOOLS} data.chat=false", "need a chat template"),
    ("grpo", "generation.engine_weights=merged", "is used only with generation.engine=vllm"),
    ("grpo", "generation.engine_seconds=9", "is used only with generation.engine=vllm"),
    ("grpo", f"{SERVER} generation.engine_weights=adapter", "and the run trains no adapter. Set lora.rank"),
    ("online_dpo", "generation.ahead=1", "both need the same device and weights"),
    ("grpo", f"{SERVER} {TOOLS} generation.ahead=1", "Set tools.process=true"),
    ("grpo", f"{SERVER} environment={__file__}:load generation.ahead=1", "would run environment="),
    ("online_dpo", f"{TOOLS} model.images=frozen", "work with texts"),
    ("grpo", f"{TOOLS} parallel.tensor=2", "each of these ranks would call the tools"),
    ("grpo", "rewards=[environment]", "there is none. Set environment"),
    ("grpo", f"environment={__file__}:load tools.process=true", "which lacks the state of an environment"),
    ("finetune", "quantize.group_size=64", "quantize.group_size=64 is used only with quantize.train"),
    ("finetune", "keep_every=2 save_every=1", "keep_last=null keeps all"),
    ("finetune", "keep_best=2 save_every=1", "keep_last=null keeps all"),
    ("finetune", "keep_best=2 keep_last=1 save_every=3 eval_every=2", "some would have none"),
    ("finetune", "stop_after_evals=2", "stop_after_evals=2 compares evaluations"),
    ("finetune", "watched_source=chats", "is used only with stop_after_evals or keep_best"),
    ("grpo", "keep_best=1 keep_last=1 save_every=1 eval_every=1", "keep_best=1 compares held-out losses"),
    ("ppo", "stop_after_evals=1 eval_every=1", "stop_after_evals=1 compares held-out losses"),
    ("online_dpo", "eval_answers=2", "evaluates the rewards of sampled completions"),
    ("reward", "eval_answers=2", "gives scores and no text"),
    ("reward", "memory.loss_chunk_tokens=8", "memory.loss_chunk_tokens=8 is for the logits"),
    ("reward", "memory.loss_accumulation_dtype=weight", "memory.loss_accumulation_dtype=weight is for"),
    ("reward", "memory.tied_gradient=separate", "memory.tied_gradient=separate is for"),
    ("finetune", "memory.frozen_embeddings=host memory.tied_gradient=host", "embeddings that are not trained"),
    ("finetune", "memory.experts=streamed compile=true", "Set memory.activation_checkpointing=full and compile=false"),
    ("classify", "data.chat=false", "data.chat=False is for chats"),
    ("classify", "data.chat_template=x", "data.chat_template=x is for chats"),
    ("classify", "data.system=x", "data.system=x is for chats"),
    ("classify", "data.separator=x", "data.separator=x is for chats"),
    ("classify", "data.chat_template_kwargs.a=1", "data.chat_template_kwargs={'a': 1} is for chats"),
    ("finetune", "model.mtp_trunk=train", "model.mtp_trunk=train is used only with model.mtp=train"),
    ("finetune", "model.mtp=train model.mtp_weight=0.1", "is used only with model.mtp=train and model.mtp_trunk=train"),
    ("dpo", "model.mtp=train", "only the recipes finetune and full_finetune_single_device"),
    ("reward", "model.mtp=drop", "a model of scores drafts no tokens"),
    ("finetune", "model.mtp=drop lora.rank=4", "this run saves an adapter alone"),
    ("finetune", "model.mtp=train model.images=frozen", "drafting layers of the language model alone"),
    ("finetune", "model.mtp=train model.new_tokens=[<new>]", "model.mtp_trunk=frozen freezes them"),
    ("finetune", "model.mtp=train parallel.context=2", "parallel.context=2 does not divide drafting layers"),
    ("finetune", "model.mtp=train parallel.tensor=2", "parallel.tensor=2 does not divide drafting layers"),
    ("finetune", "model.mtp=train parallel.experts=2", "parallel.experts=2 does not divide drafting layers"),
    ("finetune", "model.mtp=train quantize.train=int4", "and not drafting layers"),
    ("finetune", "model.images=frozen data.packing=wrapped", "data.packing=wrapped cuts documents"),
    ("finetune", "model.images=train parallel.context=2", "parallel.context=2 divides the tokens of an image"),
    ("finetune", "model.images=train parallel.tensor=2", "parallel.tensor=2 divides the tokens of an image"),
    ("finetune", "optimizer.in_backward=true clip_grad_norm=1", "clip_grad_norm=1 needs every gradient"),
    ("finetune", "optimizer.in_backward=true model.dtype=float16", "model.dtype=float16 needs every gradient"),
    ("finetune", "optimizer.update_clipping=true optimizer.name=muon", "needs AdamW's second moment"),
    ("finetune", "optimizer.momentum=0.9", "adamw would ignore it"),
    ("finetune", "optimizer.betas=[0.5,0.5] optimizer.name=sgd", r"optimizer.betas=\(0.5, 0.5\) is for AdamW"),
    ("finetune", "optimizer.eps=1 optimizer.name=sgd", "optimizer.eps=1.0 is for AdamW"),
    ("finetune", "optimizer.state=paged", "works only with bitsandbytes' kernel"),
    ("finetune", "optimizer.state=streamed optimizer.name=paged_adamw_8bit", "CUDA managed memory"),
    ("dpo", "reference.kind=model loss.name=orpo", "with loss.name=orpo nothing reads a reference"),
    ("ppo", "reference.kind=model loss.kl_weight=0", "with loss.kl_weight=0 nothing reads a reference"),
    ("grpo", "reference.kind=none loss.kl_weight=1", "loss.kl_weight=1 needs a reference model"),
    ("kto", "reference.kind=adapter_off", "lora is null"),
    ("online_dpo", "reference.kind=cached", "completions are sampled again"),
    ("distill", "distill.teacher=null distill.cached=x data.packing=wrapped", "distill.cached=x holds whole documents"),
    ("distill", "generation.max_new_tokens=2", "generation.max_new_tokens=2 is for completions of the student"),
    ("distill", "generation.temperature=2", "generation.temperature=2.0 is for completions of the student"),
    ("distill", "distill.on_policy=1 data.packing=bfd", "data.packing=bfd and data.batch_tokens=None fill batches"),
    ("distill", "distill.on_policy=1 data.train_on=all", "distill.on_policy=1 needs prompts"),
    ("distill", "distill.teacher=self", "so the divergence is 0 and trains nothing. Set data.columns.context=COLUMN"),
    (
        "distill",
        f"{ITSELF} distill.teacher_kind=adapter_off",
        "distill.teacher_kind=adapter_off needs an adapter, but lora is null",
    ),
    ("distill", f"{ITSELF} model.random_init=true", "the second model of distill.teacher=self would have others"),
    ("distill", f"{ITSELF} distill.teacher_kind=ema", "needs averages of the weights, and optimizer.ema is null"),
    (
        "distill",
        "distill.teacher=null distill.cached=x data.columns.context=c",
        "distill.cached=x has predictions for the student's prompts",
    ),
    ("distill", f"{ITSELF} model.images=frozen", "model.images=frozen cannot be combined with data.columns.context"),
    ("distill", f"{ITSELF} parallel.context=2", "parallel.context=2 divides the tokens of a row"),
    ("distill", f"{ITSELF} parallel.tensor=2", "parallel.tensor=2 divides the tokens of a row"),
    ("grpo", "generation.num_answers=1", "nothing to compare a completion with"),
    ("online_dpo", "generation.num_answers=1", "makes no pair"),
    ("grpo", "generation.top_k=1", "set loss.correction=token_truncate"),
    ("grpo", "generation.engine=vllm", "generation.engine=vllm rounds differently"),
    ("ppo", "generation.router_replay=true generation.engine=vllm", "generation.engine=vllm does not return"),
    ("ppo", "generation.engine=vllm", "this recipe does not correct"),
    ("ppo", "generation.most_attempts=2", "generation.most_attempts=2 compares"),
    ("grpo", "generation.offload_training_state=true optimizer.state=streamed", "is always in host memory"),
    ("kto", "batch_size=1", "batch_size=1: kto needs another completion"),
]


def load(recipe: str, *settings: str) -> None:
    required = REQUIRED.get(recipe, ())
    load_config(load_recipe(recipe).Config, None, [*COMMON, *required, *settings])


@pytest.mark.parametrize("recipe", sorted({recipe for recipe, _, _ in REFUSED}))
def test_a_recipe_has_no_conflict_by_default(recipe: str) -> None:
    load(recipe)


@pytest.mark.parametrize(("recipe", "settings", "message"), REFUSED)
def test_a_conflict_is_refused_with_its_reason(recipe: str, settings: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(recipe, *settings.split())


def test_every_row_has_a_case() -> None:
    assert len(REFUSED) == len(CONFLICTS)


def test_all_conflicts_are_in_one_message() -> None:
    with pytest.raises(ValueError, match=r"clip_grad_norm=1 .*\n.*optimizer.momentum=0.5"):
        load("finetune", "optimizer.in_backward=true", "clip_grad_norm=1", "optimizer.momentum=0.5")
