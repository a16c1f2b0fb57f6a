"""Table of conflicting settings, checked when a recipe's configuration is built.

Recipes, `leanft validate` and `leanft plan` therefore reject the same combinations. A row applies to recipes that have
all of its groups. Each group checks conflicts among its own settings. Conflicts with the model, the data or the machine
are checked when those are loaded.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from pydantic import BaseModel

from lean_ft.settings.answers import GenerationConfig, SamplingConfig, ToolsConfig
from lean_ft.settings.base import Settings
from lean_ft.settings.data import DataConfig, PromptDataConfig, SFTDataConfig, TaughtDataConfig
from lean_ft.settings.devices import MemoryConfig, ParallelConfig
from lean_ft.settings.losses import (
    SELF,
    DistillConfig,
    LossConfig,
    PolicyLossConfig,
    PPOLossConfig,
    PreferenceLossConfig,
    ReferenceConfig,
    ReferencedLossConfig,
    ScoreLossConfig,
    UnpairedLossConfig,
)
from lean_ft.settings.model import LoRAConfig, ModelConfig, QuantizeConfig
from lean_ft.settings.optimizer import (
    ADAMW_RULES,
    BITSANDBYTES_RULES,
    CLIPPING_RULES,
    OptimizerConfig,
)
from lean_ft.system.user_functions import is_function_path

# Names of groups in the rows below. `recipe` is the whole configuration.
_GROUPS: dict[str, type[Settings]] = {
    "model": ModelConfig,
    "optimizer": OptimizerConfig,
    "quantize": QuantizeConfig,
    "memory": MemoryConfig,
    "parallel": ParallelConfig,
    "data": DataConfig,
    "sft_data": SFTDataConfig,
    "taught_data": TaughtDataConfig,
    "prompt_data": PromptDataConfig,
    "reference": ReferenceConfig,
    "distill": DistillConfig,
    "sampling": SamplingConfig,
    "generation": GenerationConfig,
    "tools": ToolsConfig,
    "pair_loss": PreferenceLossConfig,
    "unpaired_loss": UnpairedLossConfig,
    "policy_loss": PolicyLossConfig,
    "ppo_loss": PPOLossConfig,
    "score_loss": ScoreLossConfig,
    "loss": ReferencedLossConfig,
}


class Conflict(NamedTuple):
    """Conflicting settings, if `applies` returns True. The parameters of `applies` name the groups that it reads."""

    applies: Callable[..., bool]
    message: str  # format string with the same groups


def _names(rules: tuple[str, ...]) -> str:
    return "optimizer.name=" + "|".join(rules)


def _is_other(optimizer: OptimizerConfig, rules: tuple[str, ...]) -> bool:
    """Whether the rule is none of these. A user's rule names the settings that it uses when it is built."""
    return optimizer.name not in rules and not is_function_path(optimizer.name)


def _differs(group: Settings, name: str) -> bool:
    return getattr(group, name) != type(group).model_fields[name].default


def _is_multiple(every: int | float | str, other: int | float | str) -> bool:
    """Whether every save coincides with an evaluation, for any number of steps per epoch."""
    long, short = (1.0 if value == "epoch" else value for value in (every, other))
    if isinstance(long, str) or isinstance(short, str) or type(long) is not type(short) or not short:
        return False
    return abs(long / short - round(long / short)) < 1e-9


CONFLICTS = [
    # Settings that need another setting
    *(
        Conflict(
            lambda recipe, name=name, switch=switch: _differs(recipe, name) and not getattr(recipe, switch),
            f"{name}={{recipe.{name}}} is used only with {switch}. Set {switch}, or remove {name}.",
        )
        for name, switch in (
            ("profile_steps", "profile"),
            ("eval_tasks_every", "eval_tasks"),
            ("eval_tasks_limit", "eval_tasks"),
        )
    ),
    Conflict(
        lambda recipe: recipe.profile and recipe.max_steps is not None and recipe.max_steps < sum(recipe.profile_steps),
        "profile=true needs the steps of profile_steps={recipe.profile_steps} together, and "
        "max_steps={recipe.max_steps} is less. Set a larger max_steps or smaller profile_steps.",
    ),
    Conflict(
        lambda policy_loss: _differs(policy_loss, "kl") and not policy_loss.kl_weight,
        "loss.kl={policy_loss.kl} is used only with loss.kl_weight above 0. Set loss.kl_weight, or remove loss.kl.",
    ),
    *(
        Conflict(
            lambda generation, name=name: _differs(generation, name) and generation.engine == "own",
            f"generation.{name}={{generation.{name}}} is used only with generation.engine=vllm. Set generation.engine, "
            f"or remove generation.{name}.",
        )
        for name in ("engine_url", "engine_weights", "engine_seconds")
    ),
    Conflict(
        lambda recipe, generation: generation.engine_weights == "adapter" and recipe.lora is None,
        "generation.engine_weights=adapter, and the run trains no adapter. Set lora.rank, or remove the setting.",
    ),
    Conflict(
        lambda quantize: _differs(quantize, "group_size") and quantize.train is None,
        "quantize.group_size={quantize.group_size} is used only with quantize.train. Set quantize.train, or remove "
        "quantize.group_size.",
    ),
    # Checkpoints and evaluations
    *(
        Conflict(
            lambda recipe, name=name: recipe.most_kept is None and getattr(recipe, name),
            f"{name} keeps more than the newest checkpoints, and keep_last=null keeps all of them. Set keep_last (1 "
            f"keeps the newest), or remove {name}.",
        )
        for name in ("keep_every", "keep_best")
    ),
    Conflict(
        lambda recipe: (
            recipe.keep_best and recipe.save_every and not _is_multiple(recipe.save_every, recipe.eval_every)
        ),
        "keep_best={recipe.keep_best} compares checkpoints by their held-out loss, and with "
        "save_every={recipe.save_every} and eval_every={recipe.eval_every} some would have none. Set save_every to a "
        "multiple of eval_every.",
    ),
    Conflict(
        lambda recipe: recipe.stop_after_evals and not recipe.eval_every,
        "stop_after_evals={recipe.stop_after_evals} compares evaluations, and with eval_every=0 there is only the "
        "last. Set eval_every (epoch evaluates after each epoch), or remove it.",
    ),
    Conflict(
        lambda recipe: recipe.watched_source is not None and not (recipe.stop_after_evals or recipe.keep_best),
        "watched_source={recipe.watched_source} is used only with stop_after_evals or keep_best. Set one of them, or "
        "remove watched_source.",
    ),
    *(
        Conflict(
            lambda recipe, prompt_data, name=name: getattr(recipe, name),
            f"{name}={{recipe.{name}}} {reads}, but this recipe evaluates the rewards of sampled completions. Remove "
            "it.",
        )
        for name, reads in (
            ("keep_best", "compares held-out losses"),
            ("stop_after_evals", "compares held-out losses"),
            ("eval_answers", "compares completions with held-out ones"),
        )
    ),
    Conflict(
        lambda recipe, score_loss: recipe.eval_answers,
        "eval_answers={recipe.eval_answers} asks the model for answers, but this model gives scores and no text. "
        "Remove it.",
    ),
    # Data
    *(
        Conflict(
            lambda data, name=name: not data.reads_chats and _differs(data, name),
            f"data.{name}={{data.{name}}} is for chats and prompts, and this recipe reads texts as they are. Remove "
            "it.",
        )
        for name in ("chat", "chat_template", "chat_template_kwargs", "system")
    ),
    Conflict(
        lambda data: not data.reads_separator and _differs(data, "separator"),
        "data.separator={data.separator} is for chats and prompts, and this recipe reads texts as they are. Remove it.",
    ),
    # Drafting layers
    Conflict(
        lambda model: _differs(model, "mtp_trunk") and model.mtp != "train",
        "model.mtp_trunk={model.mtp_trunk} is used only with model.mtp=train. Set model.mtp, or remove it.",
    ),
    Conflict(
        lambda model: _differs(model, "mtp_weight") and (model.mtp != "train" or model.mtp_trunk == "frozen"),
        "model.mtp_weight={model.mtp_weight:g} is used only with model.mtp=train and model.mtp_trunk=train. Set them, "
        "or remove it.",
    ),
    Conflict(
        lambda recipe, model: model.mtp == "train" and recipe.group(LossConfig) is None,
        "model.mtp=train trains drafting layers by the next tokens of completions, which only the recipes finetune and "
        "full_finetune_single_device do. Train the model here with model.mtp=keep, and then its drafting layers there.",
    ),
    Conflict(
        lambda model, score_loss: model.mtp == "drop",
        "model.mtp=drop has no effect here: a model of scores drafts no tokens and is saved without drafting layers. "
        "Remove it.",
    ),
    Conflict(
        lambda recipe, model: model.mtp != "keep" and recipe.group(LoRAConfig) is not None,
        "model.mtp={model.mtp} is about the layers of a saved model, and this run saves an adapter alone. Remove it; "
        "merge the adapter with `leanft export`, and train drafting layers on the merged model.",
    ),
    Conflict(
        lambda model: model.mtp == "train" and model.images != "none",
        "model.mtp=train trains drafting layers of the language model alone. Set model.images=none.",
    ),
    Conflict(
        lambda model: model.trains_drafting_alone and model.new_tokens,
        "model.new_tokens adds rows that train, and model.mtp_trunk=frozen freezes them. Set model.mtp_trunk=train, or "
        "remove model.new_tokens.",
    ),
    *(
        Conflict(
            lambda model, parallel, name=name: model.mtp == "train" and getattr(parallel, name) > 1,
            f"parallel.{name}={{parallel.{name}}} does not divide drafting layers. Set parallel.{name}=1, or "
            "model.mtp=keep.",
        )
        for name in ("context", "tensor", "experts")
    ),
    Conflict(
        lambda model, quantize: model.mtp == "train" and quantize.train is not None,
        "quantize.train={quantize.train} quantizes the layers that engines quantize, and not drafting layers. Set "
        "model.mtp=keep, and train drafting layers in another run.",
    ),
    # Images
    Conflict(
        lambda model, data: model.images != "none" and data.packing in ("bfd_split", "wrapped"),
        "data.packing={data.packing} cuts documents, and model.images={model.images} keeps images whole. Set "
        "data.packing=bfd, padding_free or none.",
    ),
    Conflict(
        lambda model, parallel: model.images != "none" and parallel.context > 1,
        "parallel.context={parallel.context} divides the tokens of an image, which model.images={model.images} does "
        "not support. Set parallel.context=1.",
    ),
    Conflict(
        lambda model, parallel: model.images != "none" and parallel.tensor > 1,
        "parallel.tensor={parallel.tensor} divides the tokens of an image, which model.images={model.images} does not "
        "support. Set parallel.tensor=1.",
    ),
    Conflict(
        lambda recipe, optimizer: optimizer.in_backward and recipe.clip_grad_norm is not None,
        "clip_grad_norm={recipe.clip_grad_norm:g} needs every gradient before any update, but "
        "optimizer.in_backward=true updates during backward. Set clip_grad_norm=null (optimizer.update_clipping=true "
        f"limits each tensor's update with {_names(CLIPPING_RULES)}), or set optimizer.in_backward=false.",
    ),
    Conflict(
        lambda model, optimizer: optimizer.in_backward and model.dtype == "float16",
        "model.dtype=float16 needs every gradient before any update, to detect overflow, but "
        "optimizer.in_backward=true updates during backward. Set model.dtype=bfloat16, or set "
        "optimizer.in_backward=false.",
    ),
    Conflict(
        lambda optimizer: optimizer.update_clipping and _is_other(optimizer, CLIPPING_RULES),
        "optimizer.update_clipping=true needs AdamW's second moment, which optimizer.name={optimizer.name} does not "
        "keep for every tensor (adafactor already limits its updates). Set optimizer.update_clipping=false, or set "
        f"{_names(CLIPPING_RULES)}.",
    ),
    Conflict(
        lambda optimizer: optimizer.momentum is not None and _is_other(optimizer, ("sgd", "muon")),
        "optimizer.momentum={optimizer.momentum:g} is for optimizer.name=sgd|muon; {optimizer.name} would ignore it. "
        "Remove it. AdamW's momentum is the first of optimizer.betas.",
    ),
    *(
        Conflict(
            lambda optimizer, name=name: _is_other(optimizer, ADAMW_RULES) and _differs(optimizer, name),
            f"optimizer.{name}={{optimizer.{name}}} is for AdamW; {{optimizer.name}} would ignore it. Remove it, or "
            f"set {_names(ADAMW_RULES)}.",
        )
        for name in ("betas", "eps")
    ),
    Conflict(
        lambda optimizer: optimizer.state == "paged" and optimizer.name not in BITSANDBYTES_RULES,
        "optimizer.state=paged works only with bitsandbytes' kernel, which does not update "
        "optimizer.name={optimizer.name}. Set optimizer.state=streamed, or optimizer.name=adamw_8bit.",
    ),
    Conflict(
        lambda optimizer: optimizer.state == "streamed" and optimizer.name == "paged_adamw_8bit",
        "optimizer.name=paged_adamw_8bit keeps state in CUDA managed memory, but optimizer.state=streamed keeps it in "
        "pinned host memory. Set optimizer.name=adamw_8bit for streamed state.",
    ),
    # Memory
    Conflict(
        lambda memory: memory.frozen_embeddings == "host" and memory.tied_gradient == "host",
        "memory.frozen_embeddings=host is for embeddings that are not trained, and memory.tied_gradient=host is for "
        "their gradient. Remove one of them.",
    ),
    Conflict(
        lambda recipe, memory: (
            memory.experts == "streamed" and (memory.activation_checkpointing != "full" or recipe.compile)
        ),
        "memory.experts=streamed copies experts again when a layer is recomputed for its backward pass, and only "
        "between the operations of a layer that is not compiled. Set memory.activation_checkpointing=full and "
        "compile=false, or memory.experts=device.",
    ),
    *(
        Conflict(
            lambda memory, score_loss, name=name, default=default: getattr(memory, name) != default,
            f"memory.{name}={{memory.{name}}} is for the logits of a language model, and this model has none. Remove "
            "it.",
        )
        for name, default in (
            ("loss_chunk_tokens", "auto"),
            ("loss_accumulation_dtype", "float32"),
            ("tied_gradient", "fused"),
        )
    ),
    # Reference models
    Conflict(
        lambda reference, pair_loss: reference.kind not in ("auto", "none") and not pair_loss.needs_reference,
        "reference.kind={reference.kind}, but with loss.name={pair_loss.name} nothing reads a reference. Remove it, "
        "or choose another loss.name.",
    ),
    Conflict(
        lambda reference, loss: reference.kind not in ("auto", "none") and loss.divergence_weight == 0,
        "reference.kind={reference.kind}, but with loss.kl_weight=0 nothing reads a reference. Remove it, or set "
        "loss.kl_weight.",
    ),
    Conflict(
        lambda reference, loss: reference.kind == "none" and loss.divergence_weight,
        "reference.kind=none, but loss.kl_weight={loss.divergence_weight:g} needs a reference model. Set "
        "reference.kind=model, streamed or nf4, or loss.kl_weight=0.",
    ),
    Conflict(
        lambda recipe, reference, loss: (
            reference.kind == "adapter_off" and loss.needs_reference and recipe.group(LoRAConfig) is None
        ),
        "reference.kind=adapter_off needs an adapter, but lora is null: training changes all parameters of the model. "
        "Set reference.kind=model, or turn lora on.",
    ),
    Conflict(
        lambda reference, generation, loss: reference.kind == "cached" and loss.needs_reference,
        "reference.kind=cached cannot be used here: completions are sampled again in every round. Set "
        "reference.kind=model, streamed or nf4, or turn lora on.",
    ),
    # Distillation
    Conflict(
        lambda distill, data: distill.cached is not None and data.packing in ("bfd_split", "wrapped"),
        "data.packing={data.packing} cuts documents, but distill.cached={distill.cached} holds whole documents. Set "
        "data.packing=bfd, padding_free or none, or distill.teacher.",
    ),
    *(
        Conflict(
            lambda distill, sampling, name=name: not distill.on_policy and _differs(sampling, name),
            f"generation.{name}={{sampling.{name}}} is for completions of the student, and with distill.on_policy=0 it "
            "samples none. Remove it, or set distill.on_policy.",
        )
        for name in ("max_new_tokens", "temperature")
    ),
    Conflict(
        lambda distill, data: distill.on_policy and (data.packs_rows or data.batch_tokens is not None),
        "distill.on_policy={distill.on_policy:g} samples completions of unknown length, but "
        "data.packing={data.packing} and data.batch_tokens={data.batch_tokens} fill batches by length. Set "
        "data.packing=none or padding_free, and batch_size.",
    ),
    Conflict(
        lambda distill, sft_data: distill.on_policy and sft_data.train_on == "all",
        "distill.on_policy={distill.on_policy:g} needs prompts, but with data.train_on=all a document is trained from "
        "its start. Set data.train_on=assistant, or distill.on_policy=0.",
    ),
    Conflict(
        lambda recipe, distill, taught_data: (
            distill.teacher == SELF
            and not taught_data.has_context
            and (not distill.cross_entropy_weight or distill.teacher_kind == "current")
        ),
        "distill.teacher=self without data.columns.context: the teacher and the student are one model with one prompt, "
        "so the divergence is 0 and trains nothing. Set data.columns.context=COLUMN, a field of the rows that only the "
        "teacher reads. Or hold a model near its own weights: distill.cross_entropy_weight above 0, with another "
        "teacher_kind than current.",
    ),
    Conflict(
        lambda recipe, distill: distill.teacher_kind == "adapter_off" and recipe.group(LoRAConfig) is None,
        "distill.teacher_kind=adapter_off needs an adapter, but lora is null: training changes all parameters of the "
        "model. Set distill.teacher_kind=model, or turn lora on.",
    ),
    Conflict(
        lambda recipe, model, distill: (
            model.random_init and distill.kind_of_self(has_adapter=recipe.group(LoRAConfig) is not None) == "model"
        ),
        "model.random_init=true draws the weights, and the second model of distill.teacher=self would have others. Set "
        "distill.teacher_kind=ema or current, or remove model.random_init.",
    ),
    Conflict(
        lambda distill, optimizer: distill.teacher_kind == "ema" and optimizer.ema is None,
        "distill.teacher_kind=ema needs averages of the weights, and optimizer.ema is null. Set optimizer.ema, such as "
        "0.99, or another distill.teacher_kind.",
    ),
    Conflict(
        lambda distill, taught_data: distill.cached is not None and taught_data.has_context,
        "distill.cached={distill.cached} has predictions for the student's prompts, and with data.columns.context the "
        "teacher reads others. Set distill.teacher, or remove data.columns.context.",
    ),
    Conflict(
        lambda model, taught_data: model.images != "none" and taught_data.has_context,
        "model.images={model.images} cannot be combined with data.columns.context: the teacher's prompts are stored as "
        "tokens of text. Set model.images=none, or remove data.columns.context.",
    ),
    *(
        Conflict(
            lambda parallel, taught_data, name=name: taught_data.has_context and getattr(parallel, name) > 1,
            f"parallel.{name}={{parallel.{name}}} divides the tokens of a row among processes, and with "
            "data.columns.context a completion has other places in the teacher's rows than in the student's. Set "
            f"parallel.{name}=1 and shard with parallel.shard, or remove data.columns.context.",
        )
        for name in ("context", "tensor")
    ),
    # Sampled completions
    Conflict(
        lambda generation, policy_loss: generation.num_answers < 2,
        "generation.num_answers=1 leaves nothing to compare a completion with. Set 2 or more.",
    ),
    Conflict(
        lambda generation, pair_loss: generation.num_answers < 2,
        "generation.num_answers=1 makes no pair. Set 2 or more.",
    ),
    Conflict(
        lambda generation, policy_loss: policy_loss.correction == "none" and generation.narrows,
        "generation.top_k, top_p and min_p sample from other probabilities than the trained ones. Remove them, or set "
        "loss.correction=token_truncate.",
    ),
    Conflict(
        lambda generation, policy_loss: policy_loss.correction == "none" and generation.engine != "own",
        "generation.engine={generation.engine} rounds differently, so it samples from other probabilities than the "
        "trained ones. Set loss.correction=token_truncate.",
    ),
    Conflict(
        lambda generation, ppo_loss: generation.narrows or generation.engine != "own",
        "generation.top_k, top_p, min_p and engine sample from other probabilities than the trained ones, which this "
        "recipe does not correct. Remove them.",
    ),
    Conflict(
        lambda generation, ppo_loss: generation.most_attempts > 1,
        "generation.most_attempts={generation.most_attempts} compares the completions of a prompt, but this recipe "
        "compares each with its expected value. Set it to 1.",
    ),
    Conflict(
        lambda generation: generation.router_replay and generation.engine != "own",
        "generation.router_replay=true needs the experts that tokens choose while sampling, which generation.engine="
        "{generation.engine} does not return. Set generation.engine=own, or remove generation.router_replay.",
    ),
    *(
        Conflict(
            lambda recipe, generation, name=name: _differs(generation, name) and not recipe.has_turns,
            f"generation.{name}={{generation.{name}}} is used only with tools or an environment. Set tools or "
            f"environment, or remove generation.{name}.",
        )
        for name in ("max_given_tokens", "turn_discount")
    ),
    Conflict(
        lambda recipe, tools: not recipe.has_turns and tools != ToolsConfig.model_validate({}),
        "the settings of tools are used only with tools.functions or an environment. Set one of them, or remove tools.",
    ),
    Conflict(
        lambda recipe, prompt_data: recipe.has_turns and prompt_data.chat is False,
        "tools and environments need a chat template, and data.chat=false writes plain text. Remove data.chat.",
    ),
    Conflict(
        lambda generation: generation.ahead and generation.engine == "own",
        "generation.ahead=1 samples while the model trains, and with generation.engine=own both need the same device "
        "and weights. Set generation.engine=vllm, or remove generation.ahead.",
    ),
    Conflict(
        lambda generation, tools: generation.ahead and tools.functions and not tools.process,
        "generation.ahead=1 calls tools while this process trains, so their changes of its random generators cannot "
        "be undone. Set tools.process=true, or remove generation.ahead.",
    ),
    Conflict(
        lambda recipe, generation: generation.ahead and recipe.environment is not None,
        "generation.ahead=1 would run environment={recipe.environment} while this process trains, so its changes of "
        "the random generators could not be undone. Remove generation.ahead.",
    ),
    Conflict(
        lambda recipe, model: recipe.has_turns and model.images != "none",
        "tools and environments work with texts, and model.images={model.images} reads images. Set model.images=none.",
    ),
    Conflict(
        lambda recipe, parallel: recipe.has_turns and parallel.tensor > 1,
        "parallel.tensor={parallel.tensor}: each of these ranks would call the tools. Set parallel.tensor=1.",
    ),
    Conflict(
        lambda recipe, prompt_data: (
            recipe.environment is None
            and "environment" in [getattr(reward, "function", reward) for reward in recipe.rewards]
        ),
        "rewards=environment is the reward of an environment, and there is none. Set environment, or remove it from "
        "rewards.",
    ),
    Conflict(
        lambda recipe, tools: tools.process and recipe.environment is not None and not tools.functions,
        "tools.process=true runs each call in a new process, which lacks the state of an environment. Remove "
        "tools.process.",
    ),
    Conflict(
        lambda generation, optimizer: (
            generation.offload_training_state and (optimizer.state != "device" or optimizer.name == "paged_adamw_8bit")
        ),
        "generation.offload_training_state=true, but optimizer.state={optimizer.state} of {optimizer.name} is always "
        "in host memory. Remove generation.offload_training_state.",
    ),
    Conflict(
        lambda recipe, data, unpaired_loss: (
            unpaired_loss.needs_mismatched
            and recipe.batch_size == 1
            and data.batch_tokens is None
            and data.packing != "bfd"
        ),
        "batch_size=1: kto needs another completion in each micro-batch for its baseline. Set batch_size to 2 or more "
        "(8 gives a steadier baseline), or use loss.name=apo_zero_unpaired or bco.",
    ),
]


def check_conflicts(recipe: BaseModel) -> None:
    """Raise ValueError with the messages of all conflicts in a recipe's configuration."""
    groups: dict[str, Any] = {"recipe": recipe}
    for name, settings_class in _GROUPS.items():
        if (group := next((value for _, value in recipe if isinstance(value, settings_class)), None)) is not None:
            groups[name] = group
    messages = [
        conflict.message.format_map(groups)
        for conflict, names in _READS
        if groups.keys() >= set(names) and conflict.applies(**{name: groups[name] for name in names})
    ]
    if messages:
        raise ValueError("\n".join(messages))


# Each conflict and the groups that it reads; a parameter with a default is a constant of the row.
_READS = [
    (
        conflict,
        [
            name
            for name, parameter in inspect.signature(conflict.applies).parameters.items()
            if parameter.default is parameter.empty
        ],
    )
    for conflict in CONFLICTS
]
