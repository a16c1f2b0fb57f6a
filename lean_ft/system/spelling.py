"""Suggest the nearest valid name for a mistyped name, or for the name that another framework uses."""

from collections.abc import Iterable
from difflib import SequenceMatcher
from itertools import islice

MAX_NAMES, MAX_CHARACTERS = 2000, 300  # limits, since a comparison takes up to a millisecond
# Name in TRL, transformers, axolotl, LLaMA-Factory or torchtune -> name in lean_ft
ELSEWHERE = {
    theirs: ours
    for ours, names in {
        "model.path": "model_name_or_path base_model checkpoint_dir pretrained_model_name_or_path",
        "model.dtype": "bf16 fp16 torch_dtype compute_dtype",
        "data.source": "dataset datasets dataset_name dataset_path train_file data_files dataset_dir",
        "data.validation_source": "test_datasets eval_dataset validation_file dataset_val",
        "data.validation_fraction": "val_set_size val_size test_size",
        "data.max_length": "max_seq_length max_seq_len sequence_len cutoff_len model_max_length",
        "data.packing": "sample_packing packed",
        "data.train_on": "train_on_input train_on_inputs completion_only_loss assistant_only_loss",
        "data.columns": "dataset_text_field column_map",
        "data.system": "system_prompt default_system new_system_prompt",
        "data.shuffle": "shuffle_dataset train_sampling_strategy sequential_sampling",
        "data.num_processes": "dataset_num_proc dataset_processes preprocessing_num_workers",
        "optimizer.lr": "learning_rate",
        "optimizer.name": "optim optimizer_type",
        "optimizer.betas": "adam_beta1 adam_beta2",
        "optimizer.eps": "adam_epsilon adam_eps",
        "optimizer.in_backward": "optimizer_in_bwd",
        "schedule.name": "lr_scheduler lr_scheduler_type",
        "schedule.warmup_steps": "num_warmup_steps",
        "batch_size": "per_device_train_batch_size micro_batch_size train_batch_size",
        "gradient_accumulation_steps": "gradient_accumulation",
        "epochs": "num_train_epochs num_epochs",
        "max_steps": "max_steps_per_epoch",
        "clip_grad_norm": "max_grad_norm gradient_clipping",
        "compile": "torch_compile",
        "memory.activation_checkpointing": "gradient_checkpointing enable_activation_checkpointing",
        "memory.activation_offload": "activation_offloading enable_activation_offloading",
        "memory.loss_chunk_tokens": "num_output_chunks",
        "lora.rank": "r lora_r lora_rank peft_lora_r",
        "lora.alpha": "lora_alpha",
        "lora.dropout": "lora_dropout",
        "lora.targets": "target_modules lora_target_modules lora_target lora_attn_modules lora_target_linear",
        "lora.dora": "use_dora peft_use_dora",
        "lora.rslora": "use_rslora peft_use_rslora",
        "lora.lr_ratio": "loraplus_lr_ratio",
        "lora.quantize": "load_in_4bit quantization_bit quantize_base",
        "log_every": "logging_steps log_every_n_steps",
        "save_every": "save_steps",
        "eval_every": "eval_steps",
        "keep_last": "save_total_limit",
        "resume": "resume_from_checkpoint",
        "loss.name": "loss_type",
        "loss.gamma": "simpo_gamma",
        "loss.alpha": "cpo_alpha",
        "loss.sft_weight": "rpo_alpha",
        "loss.wpo": "use_weighting",
        "loss.centering": "center_rewards_coefficient",
        "reference.kind": "ref_model precompute_ref_log_probs reference_free cache_reference_logprobs",
        "loss.kl_weight": "kl_coef init_kl_coef",
        "loss.value_weight": "vf_coef",
        "loss.value_epsilon": "cliprange_value",
        "loss.gae_lambda": "lam",
        "value.path": "critic_model value_model reward_model_path",
        "loss.epsilon_high": "clip_ratio_high clip_higher",
        "loss.advantage": "scale_rewards",
        "loss.entropy_share": "top_entropy_quantile",
        "loss.mask_truncated": "mask_truncated_completions",
        "loss.correction": "vllm_importance_sampling_mode",
        "rewards": "reward_funcs reward_functions",
        "generation.num_answers": "num_generations num_generations_per_prompt rollout_n",
        "generation.max_new_tokens": "max_completion_length max_response_length",
        "generation.passes": "num_iterations ppo_epochs num_ppo_epochs",
        "generation.steps_per_round": "steps_per_generation",
        # roles
        "user": "human",
        "assistant": "gpt chatgpt bot ai",
        "tool": "function observation ipython",
        # and losses
        "sigmoid": "dpo",
        "sppo": "sppo_hard",
    }.items()
    for theirs in names.split()
}


def nearest(word: str, valid: Iterable[str]) -> str | None:
    """Return the valid name closest to `word`, or None if none is close.

    Dotted names are compared whole and by their last part, so `lr` finds `optimizer.lr`. A prefix of a name is close to it.
    """
    word = word.lower()
    valid = list(islice(valid, MAX_NAMES))
    if len(word) > MAX_CHARACTERS:
        return None
    if (ours := ELSEWHERE.get(word.rpartition(".")[2])) in valid:
        return ours

    def likeness(name: str) -> float:
        name = name.lower()
        whole = SequenceMatcher(None, word, name).ratio()
        last_part = SequenceMatcher(None, word.rpartition(".")[2], name.rpartition(".")[2]).ratio()
        beginning = 0.8 if len(word) >= 3 and name.startswith(word) else 0.0
        # The whole name decides between equal last parts or prefixes.
        return max(whole, 0.95 * last_part + 0.05 * whole, beginning + 0.05 * whole)

    best = max(valid, key=likeness, default=None)
    return best if best is not None and likeness(best) >= 0.6 else None


def did_you_mean(word: str, valid: Iterable[str]) -> str:
    """Return ` Did you mean 'name'?` for the end of a message, or an empty string."""
    name = nearest(word, valid)
    return f" Did you mean '{name}'?" if name else ""
