"""Join settings of axolotl and LLaMA-Factory that act together, or whose unit is the run.

Every function takes the settings of a configuration by dotted key and changes them, so that each can be converted by itself. It
adds remarks about settings that are lost.
"""

import math
import re
from typing import Any

from lean_ft.settings.converted_preset import Preset, Values

_FREE = ("liger.LigerPlugin", "cut_cross_entropy.CutCrossEntropyPlugin", "kernels.KernelsPlugin")  # change no numbers
_LINEAR = re.compile(r"(q|k|v|o|qkv|gate|up|down|gate_up|in|out)_proj")  # names that all-linear includes


def use_counts_of_steps(left: Values, epochs: Any, preset: Preset) -> None:
    """Turn `eval_steps`, `save_steps` and `logging_steps` below 1, which are shares of the run, into steps or shares of an epoch,
    and counts such as 500.0 into whole numbers."""
    for key, value in left.items():
        if key.endswith("steps") and type(value) is float and value >= 1 and value.is_integer():
            left[key] = int(value)
    steps = left.get("max_steps")
    for key in ("eval_steps", "save_steps", "logging_steps"):
        share = left.get(key)
        if type(share) is not float or not 0 < share < 1:
            continue
        if type(steps) is int and steps > 0:
            left[key] = math.ceil(steps * share)
        elif key == "logging_steps":
            del left[key]
            preset.remark(f"{key}: a share of the run ({share:g}) has no equivalent. log_every counts steps.")
        else:
            of_epoch = round(share * float(epochs), 6)
            left[key] = of_epoch if of_epoch < 1 else "epoch"
            if of_epoch > 1:
                preset.remark(
                    f"{key}: every {of_epoch:g} epochs has no equivalent. The preset does so after each epoch."
                )


def keep_one_warmup(left: Values) -> None:
    """A number of warm-up steps wins over a ratio."""
    if left.get("warmup_steps"):
        left.pop("warmup_ratio", None)


def join_revision(left: Values, model: str, revision: str) -> None:
    """Append a revision to the name of a repository."""
    name = left.get(model)
    if left.get(revision) not in (None, "main") and isinstance(name, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        left[model] = f"{name}@{left.pop(revision)}"


def join_axolotl(left: Values, preset: Preset) -> None:
    """Settings of axolotl, as its loaders and builders combine them."""
    join_revision(left, "base_model", "revision_of_model")
    for per_epoch, steps, *strategies in (
        ("evals_per_epoch", "eval_steps", "eval_strategy", "evaluation_strategy"),
        ("saves_per_epoch", "save_steps", "save_strategy"),
    ):
        winner = next((key for key in (per_epoch, steps) if left.get(key)), None)
        for key in (steps, *strategies) if winner == per_epoch else strategies if winner else ():
            left.pop(key, None)
    use_counts_of_steps(left, left.get("num_epochs") or 1, preset)
    if left.get("warmup_steps") is None and left.get("warmup_ratio") is None:
        left["warmup_ratio"] = 0.03
        preset.remark(
            "warmup_ratio: axolotl's default is 3 % of the run's steps, and at most 100 steps. The preset has 3 %."
        )
    keep_one_warmup(left)
    sequences, micro_batch = left.pop("batch_size", None), left.get("micro_batch_size") or 1
    if not left.get("gradient_accumulation_steps") and type(sequences) is int and type(micro_batch) is int:
        left["gradient_accumulation_steps"] = max(1, sequences // micro_batch)
    _join_dtype(left)
    _join_targets(left, preset)
    for key in ("batch_flattening", "pretraining_sample_concatenation"):
        if left.get("sample_packing"):
            left.pop(key, None)
    if left.get("qat.activation_dtype") == "int8" and left.get("qat.weight_dtype") == "int4":
        del left["qat.weight_dtype"]  # lean_ft has one kind for both
    if not left.get("tiled_mlp"):
        left.pop("tiled_mlp_num_shards", None)
    elif left.get("tiled_mlp_num_shards"):
        del left["tiled_mlp"]
    losses = left.get("dpo_loss_type")
    if isinstance(losses, list) and len(losses) == 1:
        left["dpo_loss_type"] = losses[0]
    plugins = left.get("plugins")
    if isinstance(plugins, list):
        left["plugins"] = [one for one in plugins if not str(one).endswith(_FREE)] or None
    if isinstance(patterns := left.get("unfrozen_parameters"), list):
        left["unfrozen_parameters"] = [re.sub(r"^\^|\$$", "", str(one)).replace(".*", "*") for one in patterns]
    _join_rewards(left)
    _join_template(left, preset)


def _join_dtype(left: Values) -> None:
    """axolotl loads and trains the weights in float32 if bf16 and fp16 are false, and in bfloat16 if they are not given."""
    keys = ("bf16", "bfloat16", "fp16", "float16")
    if not any(left.get(key) is not None for key in keys):
        return
    given = {key: left.pop(key, None) for key in keys}
    is_auto = given["bf16"] in (None, "auto") and given["bfloat16"] is None
    if given["bfloat16"] or given["bf16"] in (True, "full") or (is_auto and not (given["fp16"] or given["float16"])):
        left["bf16"] = True
    elif given["fp16"] or given["float16"] or left.get("load_in_8bit"):
        left["fp16"] = True
    else:
        left["float32"] = True


def _join_targets(left: Values, preset: Preset) -> None:
    """`lora_target_linear` and `lora_target_parameters` add to `lora_target_modules`."""
    named = left.get("lora_target_modules")
    if isinstance(named, str) and re.search(r"[\\()|^$+]", named):
        del left["lora_target_modules"]
        preset.remark(
            f"lora_target_modules: {named} is a regular expression. lora.targets takes ends of names, and names with wildcards "
            "such as model.layers.[0-3].*. The preset has all-linear."
        )
        named = None
    modules = named if isinstance(named, list) else [named] if named else []
    if left.get("lora_target_linear"):
        others = [name for name in modules if not _LINEAR.fullmatch(str(name).rpartition(".")[2])]
        left["lora_target_modules"] = ["all-linear", *(name for name in others if name != "all-linear")]
        left.pop("lora_target_linear")


def _join_rewards(left: Values) -> None:
    """Weights belong to the functions; host and port to the server's address."""
    functions, weights = left.get("trl.reward_funcs"), left.get("trl.reward_weights")
    if isinstance(functions, list) and isinstance(weights, list) and len(functions) == len(weights):
        del left["trl.reward_weights"]
        pairs = zip(functions, weights, strict=True)
        left["trl.reward_funcs"] = [{"function": name, "weight": weight} for name, weight in pairs]
    for group in ("trl.vllm_server_", "vllm."):
        host, port = left.pop(f"{group}host", None), left.pop(f"{group}port", None)
        if (host or port) and not left.get("trl.vllm_server_base_url"):
            host = "127.0.0.1" if host in (None, "0.0.0.0") else host
            left["trl.vllm_server_base_url"] = f"http://{host}:{port or 8000}"


def _join_template(theirs: Values, preset: Preset, group: str = "") -> None:
    """`chat_template_jinja` is a file or the template itself, and is used with `chat_template: jinja` or none."""
    key = f"{group}chat_template_jinja"
    template = theirs.get(key)
    if theirs.get(f"{group}chat_template") not in (None, "jinja"):
        theirs.pop(key, None)
    elif isinstance(template, str) and re.search(r"[{\n]", template):
        del theirs[key]
        preset.remark(
            f"{key}: a template in a configuration has no equivalent. Save it as a file, and set data.chat_template to it."
        )


def join_axolotl_source(theirs: Values, preset: Preset) -> None:
    """Settings of one of axolotl's data sets."""
    _join_template(theirs, preset)
    if "from" in (theirs.get("message_property_mappings.role"), theirs.get("message_field_role")):
        theirs.pop("type", None)  # the keys decide: sharegpt
    known: dict[str, str] = {"human": "user", "gpt": "assistant"}
    for key, names in list(theirs.items()):
        role = key.removeprefix("roles.")
        listed = names if isinstance(names, list) else [names]
        if role != key and all(known.get(str(name), name) == role for name in listed):
            del theirs[key]
    trained = theirs.get("roles_to_train")
    if isinstance(trained, list) and trained and {*map(str, trained)} <= {"assistant", "gpt"}:
        del theirs["roles_to_train"]


def join_llama_factory(left: Values, preset: Preset) -> None:
    """Settings of LLaMA-Factory, as its parser and the Trainer combine them."""
    join_revision(left, "model_name_or_path", "model_revision")
    for steps, *strategies in (("eval_steps", "eval_strategy", "evaluation_strategy"), ("save_steps", "save_strategy")):
        if any(left.get(key, "steps") not in (None, "steps") for key in strategies):
            left.pop(steps, None)
    use_counts_of_steps(left, left.get("num_train_epochs") or 3, preset)
    keep_one_warmup(left)
    if left.get("packing") is None and left.get("stage") == "pt":
        left["packing"] = True  # as LLaMA-Factory does
    if left.get("neat_packing"):
        left.pop("packing", None)
    for key in ("add_tokens", "add_special_tokens"):
        if isinstance(left.get(key), str):
            left[key] = [token.strip() for token in left[key].split(",")]
    if left.get("freeze_vision_tower") is not None or left.get("freeze_multi_modal_projector") is not None:
        tower, projector = (left.pop(f"freeze_{part}", True) for part in ("vision_tower", "multi_modal_projector"))
        left["freeze_vision_tower"] = bool(tower)
        if tower and projector is False:
            preset.remark(
                "freeze_multi_modal_projector: false beside a frozen tower has no equivalent. freeze takes parameter names."
            )
        elif not tower and projector is not False:
            left["freeze_multi_modal_projector"] = True
    is_full = left.get("finetuning_type") in ("full", "freeze")
    if is_full and left.get("bf16") and not left.get("pure_bf16"):
        preset.remark(
            "bf16: LLaMA-Factory keeps trained weights in float32 and computes in bfloat16. The preset's weights are bfloat16; "
            "optimizer.stochastic_rounding=true keeps small updates."
        )
