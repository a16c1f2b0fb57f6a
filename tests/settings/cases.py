"""Tables that a new recipe or a new setting extends; `python scripts/missing.py setting NAME` prints what is missing.

IN is the folder of files that `tests/settings/test_effects.py` writes.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from lean_ft.settings import DataConfig, PromptDataConfig, ScoreLossConfig
from lean_ft.settings.describing import Setting, describe
from lean_ft.system import catalog
from tests.recipes.cases import DERIVED


@cache
def load_recipe(name: str) -> Any:
    """The module of a recipe that ships with lean_ft."""
    return catalog.load_recipe(catalog.find_recipe(name))


@cache
def settings_of(recipe: str) -> dict[str, Setting]:
    return {setting.key: setting for setting in describe(load_recipe(recipe).Config)}


# Recipes --------------------------------------------------------------------------------------------------------------

# Settings that a recipe requires, besides its model, data and output_dir.
REQUIRED = {"distill": ("distill.teacher=tiny",), **dict.fromkeys(("grpo", "online_dpo", "ppo"), ("rewards=[length]",))}
# The files of pairs.jsonl and so on, for recipes that read other rows than prompts and completions. Those of `DERIVED`
# are of the recipe's preset.
FILES_OF = {**dict.fromkeys(("dpo", "kto", "reward"), "pairs"), "classify": "texts", **{name: name for name in DERIVED}}
# A short run of each recipe.
TRAIN = "model.path=tiny model.dtype=float32 batch_size=2 max_steps=2 device=cpu output_dir=run plan=false"
PAIRS = f"{TRAIN} data.source=IN/pairs.jsonl data.validation_source=IN/held_out_pairs.jsonl data.max_length=64"
ROWS = "data.source=IN/rows.jsonl data.validation_source=IN/held_out.jsonl data.max_length=64"
ONLINE = (
    f"{TRAIN} data.source=IN/rows.jsonl data.validation_source=IN/held_out.jsonl data.chat=false "
    "rewards=[IN/rewards.py:score] generation.max_new_tokens=6 generation.stop=[a,n] batch_size=4 optimizer.lr=1e-3"
)
ASK = "model.path=tiny model.dtype=float32 device=cpu"
BASE = {
    "finetune": f"{TRAIN} {ROWS}",
    "full_finetune_single_device": f"{TRAIN} {ROWS}",
    "distill": f"{TRAIN} {ROWS} distill.teacher=IN/other",
    "dpo": PAIRS,
    "kto": PAIRS,
    "reward": PAIRS,
    "classify": f"{TRAIN} data.source=IN/texts.jsonl data.validation_source=IN/held_out_texts.jsonl data.max_length=64",
    "grpo": f"{ONLINE} generation.num_answers=2",
    "online_dpo": f"{ONLINE} batch_size=2",
    "ppo": ONLINE,
    "quantize": f"model.path=tiny model.dtype=float32 kind=int8 output=out {ROWS}",
    "generate": f"{ASK} prompt=River max_new_tokens=6",
    "chat": f"{ASK} max_new_tokens=6",
    "evaluate": f"{ASK} data.source=IN/rows.jsonl data.max_length=64 output=out.json",
    **{
        name: f"{TRAIN} data.source=IN/{name}.jsonl data.validation_source=IN/held_out_{name}.jsonl data.max_length=64"
        for name in DERIVED
    },
}


def _with_group(group: type, test: Callable[[Any], bool] = lambda group: True) -> list[str]:
    """Recipes that have settings of a class that passes the test."""
    found = list[str]()
    for recipe in BASE:
        classes = [field.annotation for field in load_recipe(recipe).Config.model_fields.values()]
        if any(isinstance(one, type) and issubclass(one, group) and test(one) for one in classes):
            found.append(recipe)
    return found


# By meaning: a row of the tables below holds of a new recipe too.
SCORES = _with_group(ScoreLossConfig)  # an output layer of scores
TEXTS = _with_group(DataConfig, lambda data: not data.reads_chats)
ONLINE_RECIPES = _with_group(PromptDataConfig)
ASKED, FINETUNE = ["generate", "chat", "evaluate"], ["finetune", "full_finetune_single_device"]
WHOLE_OUTPUT = [one for one in BASE if "parallel.vocabulary" in settings_of(one) and one != "finetune"]


# Settings -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """`value` replaces the setting's value in a run with `companions`. `plan` names cards to plan for instead of
    running."""

    value: str
    companions: str = ""
    plan: str = ""  # such as `2 x A100 80GB`
    counts: tuple[str, ...] = ()  # other outputs to compare: `log`, errors or calls
    refused: str = ""  # part of the error that the recipe raises instead; any other error fails the test


GPU, TWO_GPUS = "1 x A100 80GB", "2 x A100 80GB"
SAMPLED = "temperature=2 seed=3"
SEES = "model.path=IN/sees model.images=frozen data.source=IN/photos.jsonl data.validation_source=null data.chat=auto"
MIXTURE = "model.path=IN/experts model.random_init=true"
DRAFTS = "model.path=IN/drafts model.mtp=train"
TOOLED = "model.path=IN/tooled tools.functions=[IN/tools.py:add] tools.calls=1"
CALLING = {
    "process": "true",
    "seconds": "0.02",
    "result_characters": "3",
    "calls": "2",
    "parallel": "1",
}
# Rows of embed and rerank whose passages have a teacher's scores, and rows with equal passages.
JUDGED = "data.source=IN/judged.jsonl data.validation_source=IN/judged.jsonl"
REPEATED = "data.source=IN/repeated.jsonl batch_size=4"
BOTH_WAYS = "loss.directions=[query_to_doc,doc_to_query]"
ITSELF = "distill.teacher=self data.columns.context=completion data.max_teacher_length=200"
ENVIRONMENT = "data.chat=auto environment=IN/environment.py:Counting"
# Settings whose type does not imply a test value, or whose effect needs another setting.
CASES = {
    "model.path": Case("IN/other"),
    "model.dtype": Case("bfloat16"),
    "model.new_tokens": Case("[<new>]"),
    "model.images": Case("train", SEES),
    "model.family": Case("IN/other_family.py:mine", "model.path=IN/mine model.family=IN/family.py:mine"),
    "model.mtp": Case("drop", "model.path=IN/drafts"),
    "model.mtp_trunk": Case("train", DRAFTS),
    "model.mtp_weight": Case("1", f"{DRAFTS} model.mtp_trunk=train"),
    "data.image_tokens": Case("4", SEES),
    "model.router_aux_loss_coef": Case("0.5", "model.path=IN/experts model.random_init=true"),
    "epochs": Case("0.5", "max_steps=null"),
    "compile": Case("true", "memory.loss_chunk_tokens=32", GPU),
    "freeze": Case("[mlp]"),
    "train": Case("[mlp]"),
    "eval_every": Case("1"),
    "stop_after_evals": Case("1", "eval_every=1 max_steps=3 optimizer.lr=0"),
    "watched_source": Case(
        "second",
        "data.validation_source=[IN/held_out.jsonl, {path: IN/rows.jsonl, name: second}] eval_every=1 "
        "stop_after_evals=1 max_steps=3 optimizer.lr=0",
        counts=("log",),
    ),
    "eval_answers": Case("2", counts=("log",)),
    "eval_pattern": Case("()", "eval_answers=2", counts=("log",)),
    "eval_tasks": Case("[IN/task.yaml]"),
    "eval_tasks_every": Case("1", "eval_tasks=[IN/task.yaml]"),
    "eval_tasks_limit": Case("1", "eval_tasks=[IN/task.yaml]"),
    "save_every": Case("1"),
    "save_async": Case("true", "save_every=1", counts=("log",)),
    "keep_last": Case("1", "save_every=1"),
    "keep_every": Case("2", "save_every=1 keep_last=1 max_steps=3"),
    "keep_best": Case("1", "save_every=1 eval_every=1 keep_last=1 max_steps=3 optimizer.lr=0"),
    "max_bad_steps": Case("0", "neftune_alpha=1e300", refused="more than max_bad_steps=0"),
    "log_every": Case("2", counts=("log",)),
    "profile": Case("true", "max_steps=5 epochs=4", counts=("profiler",)),
    "log.to": Case("[csv]"),
    "log.project": Case("another", "log.to=[wandb]", counts=("wandb",)),
    "log.name": Case("another", "log.to=[wandb]", counts=("wandb",)),
    "log.offline": Case("true", "log.to=[wandb]", counts=("wandb",)),
    "profile_steps": Case("[1, 1, 1]", "profile=true profile_steps=[0, 1, 1] max_steps=3", counts=("profiler",)),
    "device": Case("cuda", refused="" if torch.cuda.is_available() else "device=cuda needs a cuda device"),
    "plan": Case("true", counts=("log",)),
    "output_dir": Case("other"),
    "resume": Case("IN/none", refused="no such folder"),
    "data.source": Case("IN/others.jsonl"),
    "data.share_of": Case("all", "data.source=[{path: IN/rows.jsonl, share: 0.85}, IN/others.jsonl]", counts=("log",)),
    "data.format": Case("text", "data.columns={text: completion}"),
    "data.columns": Case("{prompt: completion}"),
    "data.subset": Case("part", refused="is a file"),
    "data.streaming": Case("true", refused="applies to Hugging Face datasets"),
    "data.split": Case("train[:50%]", "data.validation_source=null"),
    "data.on_bad_row": Case("raise", "data.source=IN/bad.jsonl data.on_bad_row=skip", refused="expected a string"),
    "data.max_bad_rows": Case(
        "0", "data.source=IN/bad.jsonl data.on_bad_row=skip", refused="more than data.max_bad_rows=0"
    ),
    "data.validation_source": Case("IN/rows.jsonl"),
    "data.validation_fraction": Case("0.5", "data.validation_source=null"),
    "data.near_duplicates": Case("drop", "data.source=[IN/rows.jsonl,IN/rows.jsonl]"),
    "data.chat_template": Case("IN/template.jinja", "data.chat=auto"),
    "data.system": Case("Answer.", "data.chat=auto"),
    "data.chat_template_kwargs": Case("{effort: low}", "data.chat=auto data.chat_template=IN/effort.jinja"),
    "data.separator": Case(" so ", "data.chat=false"),
    "data.max_length": Case("16"),
    "data.overflow": Case("raise", "data.max_length=16", refused="more than data.max_length=16"),
    "data.truncation_side": Case("left", "data.max_length=16"),
    "data.chat": Case("false"),
    "data.packing": Case("bfd"),
    "data.batch_tokens": Case("256"),
    "data.num_processes": Case("3", "data.cache_dir=cache", counts=("workers",)),
    "data.cache_dir": Case("cache"),
    "data.cache_gib": Case("1e-9", "data.cache_dir=cache", counts=("cache",)),
    "data.train_on": Case("all"),
    "data.max_prompt_length": Case("9"),
    "data.max_completion_length": Case("2"),
    "data.shared_prompt": Case("false"),
    "lora.dtype": Case("model", "model.dtype=bfloat16"),
    "lora.targets": Case("[q_proj]"),
    "lora.quantize": Case("nf4"),
    "lora.rslora": Case("true", "lora.alpha=8"),
    "quantize.group_size": Case("16", "quantize.train=int4"),
    "optimizer.name": Case("sgd"),
    "optimizer.state": Case("streamed", "", GPU),
    "optimizer.in_backward": Case("true", "", GPU),
    "optimizer.momentum": Case("0.5", "optimizer.name=sgd max_steps=3"),
    "optimizer.stochastic_rounding": Case("true", "model.dtype=bfloat16"),
    "optimizer.weight_decay": Case("0.5"),
    "optimizer.eps": Case("0.1"),
    "optimizer.ema": Case("0.5"),
    "optimizer.update_clipping": Case("true", "optimizer.betas=[0.9,0.95] optimizer.lr=1e-2 max_steps=4"),
    "optimizer.lr_ratios": Case("{mlp: 0.5}"),
    "schedule.name": Case("linear", "max_steps=3"),
    "schedule.decay": Case("2", "schedule.name=wsd max_steps=4"),
    "schedule.decay_shape": Case("linear", "schedule.name=wsd schedule.decay=3 max_steps=4"),
    "schedule.min_lr_ratio": Case("0.5", "schedule.name=linear"),
    "schedule.warmup_ratio": Case("0.5"),
    "memory.selective_keeps": Case("products", "memory.activation_checkpointing=selective", GPU),
    "memory.activation_checkpointing": Case("full", "", GPU),
    "memory.activation_budget": Case("0", "memory.activation_checkpointing=budget compile=true", GPU),
    "memory.checkpoint_every_n": Case("3", "memory.activation_checkpointing=every_n", GPU),
    "memory.loss_chunk_tokens": Case("8", "", GPU),
    "memory.activation_offload": Case("true", "batch_size=256", GPU),
    "memory.tile_mlp": Case("2", "", GPU),
    "memory.attention": Case("own", refused="memory.attention=own is not possible: it needs a GPU"),
    "memory.tied_gradient": Case("separate", "", GPU),
    # A plan counts the plain products.
    "memory.float8_products": Case("true", refused="" if torch.cuda.is_available() else "the model is on cpu"),
    "memory.frozen_embeddings": Case("host", "lora.rank=4", GPU),
    "memory.experts": Case("streamed", f"{MIXTURE} lora.rank=4 memory.activation_checkpointing=full", GPU),
    "memory.loss_accumulation_dtype": Case("weight", "model.dtype=bfloat16 memory.loss_chunk_tokens=8"),
    "memory.host_pool": Case("false", "", "cpu"),
    "parallel.replicate": Case("2", "", TWO_GPUS),
    "parallel.shard": Case("1", "", TWO_GPUS, refused="Set values whose product is 2"),
    "parallel.context": Case("2", "", TWO_GPUS),
    "parallel.tensor": Case("2", "", TWO_GPUS),
    "parallel.experts": Case("2", "model.path=IN/experts model.random_init=true", TWO_GPUS),
    "parallel.reshard_after_forward": Case("false", "", TWO_GPUS),
    "parallel.vocabulary": Case("cut", "", TWO_GPUS),
    "parallel.timeout_minutes": Case("7", "", TWO_GPUS, counts=("process group",)),
    "reference.kind": Case("none"),
    "adapter": Case("IN/none", refused="does not exist"),
    "max_new_tokens": Case("3"),
    "chat_template_kwargs": Case("{effort: low}", "model.path=IN/effort"),
    "temperature": Case("2"),
    "top_k": Case("1", SAMPLED),
    "top_p": Case("0.01", SAMPLED),
    "min_p": Case("1", SAMPLED),
    "stop": Case("[a, e, i, o]"),
    "tasks": Case("[IN/task.yaml]"),
    "num_fewshot": Case("2", "tasks=[IN/task.yaml]"),
    "limit": Case("1"),
    "drafts": Case("1", "model.path=IN/drafts"),
    "pattern": Case("()"),
    "output": Case("elsewhere"),
    "distill.teacher": Case("tiny"),
    "distill.cached": Case("IN/none"),
    "distill.teacher_streamed": Case("true", "", GPU),
    "distill.beta": Case("0.2", "distill.divergence=jsd"),
    "distill.on_policy": Case("1"),
    "distill.teacher_kind": Case("current", f"{ITSELF} optimizer.lr=1e-2 max_steps=3"),
    "data.context_template": Case("'{prompt} {context}'", ITSELF),
    "data.max_teacher_length": Case("45", f"{ITSELF} data.max_length=40"),
    "generation.eval_temperature": Case("0"),
    "generation.max_new_tokens": Case("3"),
    "generation.top_k": Case("1"),
    "generation.top_p": Case("0.01"),
    "generation.min_p": Case("1"),
    "generation.stop": Case("[o]"),
    "generation.most_attempts": Case("2", "rewards=[IN/rewards.py:constant]"),
    "generation.cache_gib": Case("1e-9", refused="more than the limit of 0.00 GiB"),
    "generation.compile": Case("true", counts=("compiler",)),
    "generation.offload_training_state": Case("true", "", GPU),
    "generation.gather": Case("whole", "", TWO_GPUS),
    "generation.router_replay": Case(
        "true", "model.path=IN/experts model.random_init=true generation.passes=2 optimizer.lr=0.1"
    ),
    "generation.engine_url": Case(
        "http://127.0.0.1:2",
        "generation.engine=vllm loss.correction=token_truncate generation.engine_seconds=0.1",
        counts=("error",),
    ),
    "generation.engine_weights": Case("adapter", "generation.engine=vllm", refused="and the run trains no adapter"),
    "generation.engine_seconds": Case(
        "0.1",
        "generation.engine=vllm loss.correction=token_truncate generation.engine_url=http://127.0.0.1:2",
        refused="generation.engine_seconds=0.1",
    ),
    "sample_every": Case("1"),
    "rewards": Case("[IN/rewards.py:constant]"),
    "environment": Case("IN/environment.py:Counting", "data.chat=auto"),
    "generation.max_given_tokens": Case("2", ENVIRONMENT),
    "generation.turn_discount": Case("0.5", f"{ENVIRONMENT} rewards=[environment]"),
    "tools.functions": Case("[IN/tools.py:add]", "model.path=IN/tooled data.chat=auto"),
    **{f"tools.{name}": Case(value, f"data.chat=auto {TOOLED}", counts=("turns",)) for name, value in CALLING.items()},
    "value.path": Case("IN/other"),
    "loss.advantage": Case("mean"),
    "loss.gamma": Case("0.5", "loss.name=simpo"),
    "loss.alpha": Case("0.5", "loss.name=cpo"),
    "loss.beta": Case("0.5"),
    "loss.ld_alpha": Case("0.5"),
    "loss.label_smoothing": Case("0.3"),
    "loss.epsilon_max": Case("0.5", "loss.name=cispo"),
    "loss.kl": Case("k2", "loss.kl_weight=1 generation.passes=2"),
    "loss.epsilon": Case("0.01", "generation.passes=2"),
    "loss.epsilon_high": Case("0.01", "generation.passes=2"),
    "loss.correction": Case("none", "loss.correction=token_truncate generation.top_p=0.5"),
    "loss.correction_max": Case("0.1", "loss.correction=token_truncate generation.top_p=0.5"),
    "loss.mask_truncated": Case("true"),
    "loss.entropy_share": Case("0.2"),
    "data.negatives": Case("0"),
    "data.scored": Case("false", f"{JUDGED} loss.name=margin_mse", refused="learns scores, and the rows have none"),
    "data.query_prompt": Case("Question: "),
    "data.passage_prompt": Case("Note: "),
    "data.template": Case("{passage} {query}"),
    "vectors.pooling": Case("mean"),
    "vectors.normalize": Case("false"),
    "loss.temperature": Case("0.1"),
    "loss.directions": Case("[query_to_doc, doc_to_query]"),
    "loss.partition_mode": Case("per_direction", BOTH_WAYS),
    "loss.hardness_mode": Case("in_batch_negatives"),
    "loss.hardness_strength": Case("2", "loss.hardness_mode=in_batch_negatives"),
    "loss.mask_duplicates": Case("false", REPEATED),
    "loss.chunk_rows": Case("8", "batch_size=256", GPU),
    "loss.margin": Case("0.1", "loss.name=triplet"),
    "loss.distance": Case("cosine", "loss.name=triplet"),
    "loss.similarity": Case("cosine", f"{JUDGED} loss.name=margin_mse vectors.normalize=false"),
    "loss.teacher_temperature": Case("2", f"{JUDGED} loss.name=kl"),
    "loss.matryoshka": Case("[8]"),
    "loss.matryoshka_weights": Case("[0.5]", "loss.matryoshka=[8]"),
    "loss.yes_no": Case("[a, b]"),
    "loss.positive_weight": Case("2"),
    "loss.weighting": Case("ndcg1", "loss.name=lambda"),
    "loss.mu": Case("2", "loss.name=lambda"),
    "loss.k": Case("1", f"{JUDGED} loss.name=ranknet"),
    "loss.sigma": Case("2", "loss.name=ranknet"),
    "loss.eps": Case("0.9", f"{JUDGED} loss.name=lambda"),
    "pad_token": Case("<|system|>"),
    "prompt": Case("Who"),
    "prompts_file": Case("IN/prompts.txt", refused="both"),
    "kind": Case("int4"),
    "system": Case("Answer."),
}
# Exceptions per recipe; None if the setting needs another setting that this recipe rejects.
OF_RECIPE: dict[str, Case | None] = {
    "evaluate model.family": Case(
        "IN/other_family.py:mine", "model.path=IN/mine model.family=IN/family.py:mine loss=true"
    ),
    "ppo loss.gamma": Case("0.5"),
    "ppo model.mtp": Case("drop", "model.path=IN/drafts value.path=tiny"),
    "quantize data.near_duplicates": Case(
        "drop", "data.validation_source=null data.source=[IN/rows.jsonl,IN/others.jsonl]"
    ),
    "ppo loss.kl_weight": Case("1", "generation.passes=1"),
    **{f"{recipe} memory.loss_accumulation_dtype": Case("weight") for recipe in SCORES},
    "classify data.chat_template_kwargs": Case("{effort: low}"),
    "classify data.separator": Case(" so "),
    **{f"{recipe} data.columns": Case("{prompt: chosen}") for recipe in ("dpo", "kto", "reward")},
    **{f"{recipe} data.format": Case("text", refused="the rows are text") for recipe in ("dpo", "kto", "reward")},
    **{f"{recipe} data.format": Case("text", refused="jsonl, line 1: ") for recipe in DERIVED},
    **{
        f"{recipe} data.on_bad_row": Case(
            "raise", f"data.source=IN/bad_{recipe}.jsonl data.on_bad_row=skip", refused="line 7"
        )
        for recipe in DERIVED
    },
    **{f"{recipe} data.columns": Case("{nothing: x}", refused="no format of this recipe has") for recipe in DERIVED},
    "full_finetune_single_device memory.frozen_embeddings": Case("host", "", GPU, refused="needs a frozen embedding"),
    "full_finetune_single_device memory.experts": Case(
        "streamed", f"{MIXTURE} memory.activation_checkpointing=full", GPU, refused="needs frozen experts"
    ),
    "embed loss.name": Case("triplet"),
    **{f"{recipe} data.batch_tokens": Case("256", "data.packing=none") for recipe in DERIVED},
    **{
        f"{recipe} model.images": Case("frozen", "model.path=IN/sees", refused="compares texts alone")
        for recipe in DERIVED
    },
    **{f"{recipe} data.image_tokens": Case("4", refused="needs images. Set model.images") for recipe in DERIVED},
    "rerank data.scored": Case("false", JUDGED),
    **{
        f"{recipe} watched_source": Case("second", refused="is used only with stop_after_evals or keep_best")
        for recipe in ONLINE_RECIPES
    },
    "rerank data.truncation_side": Case("left", refused="cuts the end of the passage"),
    **{
        f"rerank data.{name}": Case("Note: ", refused="Write it in data.template")
        for name in ("query_prompt", "passage_prompt")
    },
    "classify data.format": Case("text", refused="no field `label`"),
    "evaluate data.format": Case("text", "data.columns={text: completion}", refused="trained from its first token"),
    # In float32, a plan traces the attention of each row.
    **{
        f"{recipe} memory.activation_offload": Case("true", "batch_size=256 model.dtype=bfloat16", GPU)
        for recipe in ("grpo", "online_dpo", "ppo")
    },
    **{
        f"{recipe} data.share_of": Case("trained", refused="prompts have none")
        for recipe in ("grpo", "online_dpo", "ppo")
    },
    "grpo batch_size": Case("2"),
    "grpo generation.num_answers": Case("4"),
    **{f"{recipe} data.max_prompt_length": Case("15") for recipe in ("grpo", "online_dpo", "ppo")},
    **{f"{one} {name}": None for one in SCORES for name in ("eval_pattern", "eval_tasks_every", "eval_tasks_limit")},
    "grpo eval_pattern": None,
    "online_dpo eval_pattern": None,
    "ppo eval_pattern": None,
    "ppo generation.engine_url": None,
    "online_dpo generation.engine_url": Case(
        "http://127.0.0.1:2", "generation.engine=vllm generation.engine_seconds=0.1", counts=("error",)
    ),
    "online_dpo generation.engine_seconds": Case(
        "0.1", "generation.engine=vllm", refused="generation.engine_seconds=0.1"
    ),
    "ppo generation.engine_seconds": None,
    "ppo generation.engine_weights": None,
    "online_dpo generation.engine": Case("vllm", "generation.engine_seconds=0.1", refused="does not answer"),
    "ppo loss.mask_truncated": Case("true", "generation.max_new_tokens=2"),
    "quantize model.router_aux_loss_coef": Case("0.5"),
    "classify data.columns": Case("{text: other}"),
    "classify data.labels": Case("[b, a]"),
    "classify data.multi_label": Case("true", refused="no field `labels`"),
    "classify data.labels_per": Case("token", refused="no field `spans`"),
    "classify loss.class_weights": Case("balanced"),
    **{f"{recipe} compile": Case("true", "", GPU) for recipe in SCORES},
    "evaluate seed": None,  # used only by tasks that sample
    "evaluate data.validation_source": Case("IN/others.jsonl"),
    # All rows are evaluated, in any order and batch.
    "evaluate data.shuffle": None,
    "evaluate data.batch_tokens": None,
    **{f"quantize {name}": None for name in ("batch_size", "data.shuffle", "data.batch_tokens", "data.packing")},
    "quantize data.share_of": Case(
        "all", "data.source=[{path: IN/rows.jsonl, share: 0.85}, IN/others.jsonl] data.validation_source=null"
    ),
    "quantize data.source": Case("IN/others.jsonl", "data.validation_source=null"),
    "quantize group_size": Case("16", "kind=int4"),
    # Rounding to bfloat16 rarely changes a sampled token.
    **{f"{recipe} model.dtype": Case("bfloat16", counts=("load",)) for recipe in ("generate", "chat")},
    **{f"{recipe} data.chat": Case("true") for recipe in ("grpo", "online_dpo", "ppo")},
    **{f"{recipe} seed": Case("1", "temperature=2") for recipe in ("generate", "chat")},
    "evaluate model.dtype": Case("bfloat16", "tasks=[IN/task.yaml]"),
    "evaluate model.random_init": Case("true", "tasks=[IN/task.yaml]"),
    **{f"{recipe} reference.kind": Case("nf4", "loss.kl_weight=1 generation.passes=2") for recipe in ("grpo", "ppo")},
    **{
        f"grpo generation.{name}": Case(value, "loss.correction=token_truncate")
        for name, value in (("top_k", "1"), ("top_p", "0.01"), ("min_p", "1"))
    },
    "grpo loss.correction": Case("sequence_mask", "loss.correction=token_truncate generation.top_p=0.5"),
    "distill generation.max_new_tokens": Case("3", "distill.on_policy=1"),
    "distill generation.temperature": Case("0.5", "distill.on_policy=1"),
    "online_dpo reference.kind": Case("none"),
    "generate batch_size": Case("2", "prompt=null prompts_file=IN/prompts.txt output=out.jsonl", counts=("batches",)),
    # Several turns are too long for the tiny model.
    **{f"chat tools.{name}": Case(value, TOOLED, counts=("turns", "error")) for name, value in CALLING.items()},
    "chat tools.functions": Case("[IN/tools.py:add]", "model.path=IN/tooled", counts=("turns", "error")),
    "generate chat": Case("false"),
    "generate image": Case("IN/0.png", f"model.path=IN/sees {SAMPLED}"),
    "quantize model.images": Case("frozen"),
    "quantize data.image_tokens": Case("4"),
    "distill model.images": Case("train", f"{SEES} distill.teacher=IN/sees"),
    "distill data.image_tokens": Case("4", f"{SEES} distill.teacher=IN/sees"),
    "generate model.images": Case("none", "model.path=IN/sees image=IN/0.png", refused="the model reads texts alone"),
    "chat model.images": Case("none", "model.path=IN/sees", counts=("load",)),
    "evaluate model.images": Case("none", SEES, refused="has an image"),
    "evaluate data.chat_template_kwargs": Case("{effort: low}", "model.path=IN/effort data.chat=auto"),
    "quantize data.chat_template_kwargs": Case("{effort: low}", "model.path=IN/effort data.chat=auto"),
    "evaluate chat_template_kwargs": Case("{effort: low}", "model.path=IN/effort chat=true tasks=[IN/task.yaml]"),
    "evaluate chat": Case("true", "tasks=[IN/task.yaml]"),
}
# Refusals, by part of the error: recipes and their settings.
REFUSED: dict[str, tuple[list[str], str]] = {
    "gives scores and no text": (SCORES, "eval_answers"),
    "eval_tasks needs a language model": (SCORES, "eval_tasks"),
    "is for the logits of a language model": (
        SCORES,
        "memory.loss_chunk_tokens memory.tied_gradient memory.loss_accumulation_dtype",
    ),
    "this recipe reads texts as they are": (
        TEXTS,
        "data.chat_template data.system data.chat_template_kwargs data.separator data.chat",
    ),
    "needs images. Set model.images": (["quantize"], "data.image_tokens"),
    "model.images is for training": (["quantize"], "model.images"),
    "this recipe evaluates the rewards of sampled completions": (
        ONLINE_RECIPES,
        "stop_after_evals eval_answers keep_best",
    ),
    "prompts are read from the field prompt or messages": (ONLINE_RECIPES, "data.format"),
    "which this recipe does not correct": (
        ["ppo"],
        "generation.top_k generation.top_p generation.min_p generation.engine",
    ),
    "Set loss.correction=token_truncate": (["grpo"], "generation.engine"),
    "both need the same device and weights": (ONLINE_RECIPES, "generation.ahead"),
    "compares each with its expected value": (["ppo"], "generation.most_attempts"),
    "new_tokens is for training": (["generate", "chat", "evaluate"], "model.new_tokens"),
    "router_aux_loss_coef is for training": (["generate", "chat", "evaluate"], "model.router_aux_loss_coef"),
    "router_aux_loss_coef and model.random_init are for training": (
        ["quantize"],
        "model.new_tokens model.router_aux_loss_coef model.random_init",
    ),
    "mtp is for training": ([*ASKED, "quantize"], "model.mtp"),
    "only the recipes finetune and full_finetune_single_device": (
        [one for one in BASE if one not in (*FINETUNE, *ASKED, "quantize")],
        "model.mtp_trunk model.mtp_weight",
    ),
    # The setting before these two, which the run without them has, is refused as well.
    "is for training": ([*ASKED, "quantize"], "model.mtp_trunk model.mtp_weight"),
    "a model of scores drafts no tokens": (SCORES, "model.mtp"),
    "loads its tokenizer without it": (["evaluate", "quantize"], "data.chat_template"),
    "the model reads texts alone": (["generate"], "model.images"),
    "Set model.images=frozen": (["evaluate"], "model.images"),
    "so it has no question": (["evaluate"], "data.train_on"),
    "expected one of teacher=MODEL and cached=FOLDER": (["distill"], "distill.cached"),
    "this recipe adds no router loss": (["embed", "rerank"], "model.router_aux_loss_coef"),
    "this model has no experts": (["distill"], "parallel.experts"),  # the teacher
    "has a different tokenizer": (["distill"], "model.new_tokens"),
    "loss needs the whole output layer": (WHOLE_OUTPUT, "parallel.vocabulary"),
}
REASONS = {f"{r} {s}": why for why, (rs, ss) in REFUSED.items() for r in rs for s in ss.split()}
# Runs by default, one of each kind of setting; the runs of other settings are long. Refusals are default.
SHORT = {
    "finetune": "freeze seed data.packing optimizer.name schedule.warmup_steps loss.label_smoothing lora.dropout",
    "generate": "temperature top_k top_p stop max_new_tokens chat output",
    "evaluate": "loss",
}
# Refusals that a run reaches late; they are long.
LATE = {
    *(
        "finetune max_bad_steps",
        "finetune data.on_bad_row",
        "finetune data.max_bad_rows",
        "finetune data.overflow",
        "evaluate data.format",
    ),
    *(f"{recipe} eval_tasks" for recipe in SCORES),
    *("distill model.new_tokens", "evaluate model.images"),
    *("evaluate data.train_on", "evaluate data.chat_template", "quantize data.chat_template"),
}


def _files_of(recipe: str, settings: str) -> str:
    """Return the settings with files in the recipe's row format."""
    kind = FILES_OF[recipe]
    settings = re.sub(r"IN/(held_out|bad|photos)\.jsonl", rf"IN/\1_{kind}.jsonl", settings)
    return settings.replace("IN/rows.jsonl", f"IN/{kind}.jsonl").replace("IN/others.jsonl", f"IN/other_{kind}.jsonl")


def case_of(recipe: str, key: str) -> Case:
    """Return the case in the tables, or a case with a value for the setting's type."""
    case, refused = _own_case(recipe, settings_of(recipe)[key]), REASONS.get(f"{recipe} {key}")
    return replace(case, refused=refused) if refused else case


def _own_case(recipe: str, setting: Setting) -> Case:
    case = CASES.get(setting.key)
    if recipe in FILES_OF and case and "data." in f"{setting.key} {case.companions}":
        case = replace(case, value=_files_of(recipe, case.value), companions=_files_of(recipe, case.companions))
    if case := OF_RECIPE.get(f"{recipe} {setting.key}") or case:
        return case
    companions = "lora.rank=4" if setting.key.startswith("lora.") else ""
    if "true or false" in setting.type:
        return Case(json.dumps(setting.default is not True), companions)
    if " | " in setting.type:
        choices = setting.type.split(" or ")[0].split(" | ")
        return Case(next(choice for choice in choices if choice != setting.default), companions)
    number: Any = setting.default or 0
    if "whole number" in setting.type:
        return Case(str(number + 1), companions)
    if "each number" in setting.type:
        return Case(str([number_ / 2 for number_ in number]), companions)
    assert "number" in setting.type, f"no value for {setting.key}: add it to CASES"
    return Case(str(number / 2 or 0.5), companions)
