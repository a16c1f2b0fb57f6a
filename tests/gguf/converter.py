"""llama.cpp's converter of Hugging Face folders as the judge of exported files: what both write for the same folder.

The converter is not part of any package. Set LLAMA_CPP to a folder of llama.cpp's sources to run it. What it wrote is
kept in converter_facts.json, which `python scripts/make_converter_facts.py` writes.
"""

import copy
import hashlib
import json
import math
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from lean_ft.gguf.header import read_header
from tests.export.conftest import SIZES, qwen_tokenizer, write_model_folder, write_tokenizer
from tests.gguf.cases import CASES, FAMILIES, PLAIN, YARN
from tests.models.tiny_wholes import tiny_whole

FACTS = Path(__file__).with_name("converter_facts.json")
_TOKENIZER_CONFIG = {"eos_token": "<|im_end|>"}
_QWEN35_MROPE = {"rope_parameters": {**PLAIN, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25}}
# config.json has what llama.cpp's converter takes from published models.
PUBLISHED: dict[str, dict[str, Any]] = {
    "cohere2": {"rotary_pct": 1.0},
    "cohere2/long_window": {"rotary_pct": 1.0},
    "deepseek_v3": {
        "rms_norm_eps": 1e-6,
        "scoring_func": "sigmoid",
        "rope_parameters": {**YARN, "mscale": 1.2, "mscale_all_dim": 1.2},
    },
    "deepseek_v3/no_query_latent": {"scoring_func": "sigmoid"},
    "falcon_h1": {"head_dim": 16, "lm_head_multiplier": 2.0},
    "falcon_h1/norm": {"head_dim": 16},
    "glm4_moe": {"num_nextn_predict_layers": 0},
    "gpt_neox": {"rotary_pct": 0.5, "rotary_emb_base": 10_000},
    "gpt_neox/serial": {"rotary_pct": 0.25, "rotary_emb_base": 10_000},
    "gpt2": {"n_ctx": 128},
    "gpt2/inner": {"n_ctx": 128},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba"]},
    "granitemoehybrid/rope": {"layer_types": ["attention", "mamba"]},
    "granitemoehybrid/attention": {"layer_types": ["attention"] * 2, "intermediate_size": 48},
    "hunyuan_v1_moe": {"moe_intermediate_size": [96], "moe_topk": [2], "num_shared_expert": [1]},
    "minimax_m2": {"rotary_dim": 8},
    "qwen3_5_text": _QWEN35_MROPE,
    "qwen3_5_moe_text": _QWEN35_MROPE,
    "mimo_v2_flash": {
        "swa_head_dim": 24,
        "swa_num_attention_heads": 8,
        "swa_v_head_dim": 16,
        "swa_num_key_value_heads": 4,
        "topk_method": "noaux_tc",
        "hybrid_layer_pattern": [0, 1, 1, 1],
        "layernorm_epsilon": 1e-5,
        "scoring_func": "sigmoid",
        "rope_parameters": None,
        "rope_theta": 5e6,
        "swa_rope_theta": 1e4,
        "partial_rotary_factor": 0.334,
    },
    "minicpm3": {"original_max_position_embeddings": 128, "rms_norm_eps": 1e-6},
    "ministral3": {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.9, "mscale": 1.0, "mscale_all_dim": 1.0}},
    "mistral4": {
        "architectures": ["Ministral3ForCausalLM"],
        "rms_norm_eps": 1e-6,
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "solar_open": {"partial_rotary_factor": 1.0, "first_k_dense_replace": 0},
}
# Published models have attention in every 4th layer, and the converter knows no other lists of layers.
_SETTINGS = {
    case: {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}
    for case in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
}
# transformers did not know these models when they were published, so the converter reads their config.json without it.
_WITH_OWN_CODE = {"mimo_v2_flash", "gpt_neox", "gpt_neox/serial"}
# The converter does not take the test's model: it knows no such class, or needs names of published layers or sizes.
NOT_CONVERTED = {
    "gpt_oss": "judged as published: gpt_oss/published",
    "gemma4_unified_text": "the converter has no class for this language model alone",
    "mimo_v2_flash/listed": "the converter needs fields that published folders have, beside the list of layers",
    "nemotron_h": "the converter needs heads of 64 features",
    "nemotron_h/experts": "the converter needs heads of 64 features",
    "stablelm/parallel": "the converter joins norms of as many query heads as key heads",
}

_MROPE = {"rope_parameters": {**PLAIN, "mrope_section": [2, 3, 3]}}
_MROPE24 = {"rope_parameters": {**PLAIN, "mrope_section": [4, 4, 4]}}
_HALF_MROPE = {"rope_parameters": {**PLAIN, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}}
# Models that read images -> the case of the language model, its model_type in text_config, settings, and transformers'
# class that a published text_config names.
WHOLES: dict[str, tuple[str, str, dict[str, Any], str | None]] = {
    "gemma3": ("gemma3_text", "gemma3_text", {}, None),
    "gemma4": ("gemma4_text", "gemma4_text", {}, None),
    "gemma4_unified": ("gemma4_unified_text", "gemma4_unified_text", {"moe_intermediate_size": None}, None),
    "mistral3": ("ministral3", "ministral3", PUBLISHED["ministral3"], None),
    "mistral3/mistral": ("mistral", "mistral", {}, None),
    "mistral3/mistral4": ("mistral4", "mistral4", PUBLISHED["mistral4"], None),
    "lfm2_vl": ("lfm2", "lfm2", {}, "Lfm2ForCausalLM"),
    "smolvlm": ("llama", "llama", {}, "LlamaForCausalLM"),
    "idefics3": ("llama", "llama", {}, "LlamaForCausalLM"),
    "internvl": ("qwen2", "qwen2", {}, "Qwen2ForCausalLM"),
    "lighton_ocr": ("qwen3", "qwen3", {}, "Qwen3ForCausalLM"),
    "llava": ("mistral", "mistral", {}, None),
    "qwen2_vl": ("qwen2", "qwen2_vl_text", _MROPE, None),
    "qwen2_5_vl": ("qwen2", "qwen2_5_vl_text", _MROPE, None),
    "qwen3_vl": ("qwen3", "qwen3_vl_text", _MROPE24, None),
    "qwen3_vl_moe": ("qwen3_moe", "qwen3_vl_moe_text", _MROPE24, None),
    "qwen3_5": ("qwen3_5_text", "qwen3_5_text", _QWEN35_MROPE, None),
    "qwen3_5_moe": ("qwen3_5_moe_text", "qwen3_5_moe_text", _QWEN35_MROPE, None),
    "minicpmv4_6": ("qwen3_5_text", "qwen3_5_text", _QWEN35_MROPE, None),
    "glm4v": ("glm4", "glm4v_text", _HALF_MROPE, None),
    "glm4v_moe": ("glm4_moe", "glm4v_moe_text", _HALF_MROPE, None),
    "glm_ocr": ("glm4", "glm_ocr_text", _HALF_MROPE, None),
    "paddleocr_vl": ("llama", "paddleocr_vl_text", {**_MROPE, "attention_bias": False}, None),
    "exaone4_5": ("exaone4/no_windows", "exaone4_5_text", {}, None),
    "llama4": ("llama4_text", "llama4_text", {}, None),
}
JUDGED = [*(case for case in FAMILIES if case not in NOT_CONVERTED), *WHOLES]


def write_folder(case: str, folder: Path) -> Path:
    """Write a new folder of a case, as published models of its family are."""
    if case in WHOLES:
        _write_whole(case, folder)
    else:
        name, settings = FAMILIES[case]
        write_model_folder(
            folder,
            name,
            tokenizer=qwen_tokenizer(),
            tokenizer_config=_TOKENIZER_CONFIG,
            **copy.deepcopy(settings | _SETTINGS.get(case, {})),
        )
        edit_json(folder / "config.json", lambda config: config | PUBLISHED.get(case, {}))
    edit_json(folder / "config.json", _with_ids)
    if case == "gemma3n_text":  # published folders have keys and values of every layer
        weights = load_file(folder / "model.safetensors")
        own = {name: weight for name, weight in weights.items() if re.search(r"\.2\.self_attn\.[kv]_", name)}
        more = {name.replace(".2.", f".{i}."): weight.clone() for name, weight in own.items() for i in range(20, 23)}
        save_file(weights | more, folder / "model.safetensors", {"format": "pt"})
    return folder


def edit_json(file: Path, change: Any) -> None:
    file.write_text(json.dumps(change(json.loads(file.read_text()))))


def _with_ids(config: dict[str, Any]) -> dict[str, Any]:
    """Tokens that the test's tokenizer has."""
    if "text_config" in config:
        config["text_config"] = _with_ids(config["text_config"])
        return {key: value for key, value in config.items() if key not in ("eos_token_id", "bos_token_id")}
    return config | {key: 1 for key in ("eos_token_id", "bos_token_id") if config.get(key) not in range(400)}


def _write_whole(case: str, folder: Path) -> None:
    of, text_type, settings, text_class = WHOLES[case]
    text = copy.deepcopy({**SIZES, **CASES[of][1], **_SETTINGS.get(of, {}), **settings})
    tiny_whole(case.partition("/")[0], text_type, text).save_pretrained(folder)
    write_tokenizer(folder, qwen_tokenizer(), _TOKENIZER_CONFIG)
    named = {} if text_class is None else {"architectures": [text_class]}
    edit_json(folder / "config.json", lambda config: config | {"text_config": config["text_config"] | named})
    if case == "qwen3_vl_moe":  # published folders have the matrices of experts transposed
        weights = load_file(folder / "model.safetensors")
        turned = {name: w.mT.contiguous() if ".mlp.experts." in name else w for name, w in weights.items()}
        save_file(turned, folder / "model.safetensors", {"format": "pt"})


# Of llama.cpp's converter only what tells its tokenizer's name is replaced, which needs a published tokenizer.
_SCRIPT = """
import json, sys, pathlib, traceback
import gguf, torch
from conversion import ModelBase, ModelType, get_model_architecture, get_model_class
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen2"
errors = {}
for case, source, out, as_it_is in json.load(sys.stdin):
    try:
        config = json.loads((pathlib.Path(source) / "config.json").read_text()) if as_it_is else None
        architecture = get_model_architecture(ModelBase.load_hparams(pathlib.Path(source), False), ModelType.TEXT)
        kind = get_model_class(architecture)
        own = dict(set_vocab=lambda self: self._set_vocab_gpt2(), model_arch=kind.model_arch, no_mtp=True)
        converter = type("Converter", (kind,), own)
        with torch.inference_mode():
            converter(pathlib.Path(source), gguf.LlamaFileType.ALL_F32, pathlib.Path(out), eager=True, hparams=config).write()
    except (Exception, SystemExit) as error:
        errors[case] = traceback.format_exc()
pathlib.Path(sys.argv[1]).write_text(json.dumps(errors))
"""  # noqa: E501


def convert(jobs: dict[str, tuple[Path, Path]], place: Path) -> dict[str, str]:
    """Convert folders to files by case, with llama.cpp's sources in LLAMA_CPP. Returns errors by case. place: a new
    file."""
    sources = Path(os.environ["LLAMA_CPP"])
    path = os.pathsep.join(map(str, (sources / "gguf-py", sources)))
    listed = [[case, str(source), str(out), case in _WITH_OWN_CODE] for case, (source, out) in jobs.items()]
    subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(place)],
        input=json.dumps(listed),
        text=True,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        check=True,
    )
    return json.loads(place.read_text())


def facts_of(file: Path) -> dict[str, Any]:
    """The architecture, the metadata and the tensors of a file, in few words. Long lists are hashed."""
    metadata, stored = read_header(file)
    prefix = f"{metadata['general.architecture']}."
    found = {key.removeprefix(prefix): _short(value) for key, value in metadata.items() if key[:8] != "general."}
    tensors: dict[str, list[int]] = defaultdict(list)
    for name, tensor in stored.items():
        (layer, rest) = re.fullmatch(r"(?:blk\.(\d+)\.)?(.+)", name).groups()  # type: ignore[union-attr]
        shape = [n for n in tensor.shape if n != 1]  # a dimension of 1 is as none
        tensors[f"{rest} {tensor.kind} {shape}"].append(int(layer or -1))
    return {
        "architecture": metadata["general.architecture"],
        "metadata": dict(sorted(found.items())),
        "tensors": {name: _ranges(layers) for name, layers in sorted(tensors.items())},
    }


def _ranges(layers: list[int]) -> str:
    """Numbers of layers, such as "0-3 5"; nothing for a tensor outside of the layers."""
    starts = [n for n in sorted(layers) if n >= 0 and n - 1 not in layers]
    ends = [n for n in sorted(layers) if n >= 0 and n + 1 not in layers]
    return " ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def _short(value: Any) -> Any:
    if not isinstance(value, list):
        return int(value) if isinstance(value, bool) else value
    numbers = [int(n) if isinstance(n, bool) else n for n in value]
    if numbers and isinstance(numbers[0], int | float) and len({*numbers}) == 1:
        return numbers[0]  # llama.cpp reads one number for all layers
    return (
        f"{len(value)}: {hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]}" if len(value) > 100 else numbers
    )


def differences(own: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """How the facts of an exported file differ from those of the converter's: "KEY: ours, theirs"."""
    found = []
    for part in ("metadata", "tensors"):
        for key in sorted(own[part].keys() | theirs[part].keys()):
            pair = own[part].get(key), theirs[part].get(key)
            if not _is_same(*pair):
                found.append(f"{key}: {pair[0]}, {pair[1]}")
    if own["architecture"] != theirs["architecture"]:
        found.insert(0, f"architecture: {own['architecture']}, {theirs['architecture']}")
    return found


def _is_same(own: Any, theirs: Any) -> bool:
    if isinstance(own, list) and isinstance(theirs, list):
        return len(own) == len(theirs) and all(map(_is_same, own, theirs))
    if isinstance(own, float) and isinstance(theirs, float):
        return math.isclose(own, theirs, rel_tol=1e-5)
    return own == theirs


_DEFAULT = "the file states what llama.cpp takes by default"
# Facts that only exported files have, in any family: why they change nothing.
ONLY_OURS = {
    "attention.head_count_kv": _DEFAULT,
    "attention.key_length": _DEFAULT,
    "attention.key_length_swa": _DEFAULT,
    "attention.q_lora_rank": _DEFAULT,
    "attention.recurrent_layers": "the list of layers, for which the converter has a period",
    "attention.sliding_window_pattern": "the list of layers, which llama.cpp knows for the family",
    "attention.value_length": _DEFAULT,
    "attention.value_length_swa": _DEFAULT,
    "expert_feed_forward_length": _DEFAULT,
    "expert_gating_func": _DEFAULT,
    "expert_shared_count": "llama.cpp takes expert_shared_feed_forward_length, or one expert",
    "expert_shared_feed_forward_length": "llama.cpp takes expert_shared_count",
    "expert_weights_norm": _DEFAULT,
    "interleave_moe_layer_step": _DEFAULT,
    "leading_dense_block_count": "llama.cpp takes interleave_moe_layer_step",
    "rope.dimension_count": _DEFAULT,
    "rope.dimension_count_swa": _DEFAULT,
    "rope.freq_base": _DEFAULT,
    "rope.freq_base_swa": _DEFAULT,
    "rope.scaling.attn_factor": "1 by default; of mistral3, what yarn_log_multiplier gives",
    "rope.scaling.factor": _DEFAULT,
    "rope.scaling.finetuned": _DEFAULT,
    "rope.scaling.original_context_length": _DEFAULT,
    "rope.scaling.type": "llama.cpp takes longrope from the file's divisors",
    "tokenizer.ggml.add_bos_token": _DEFAULT,
    "tokenizer.ggml.add_eos_token": _DEFAULT,
    "tokenizer.ggml.eot_token_id": "an end of generation_config.json, which the converter does not read",
    "vocab_size": "the number of tokens, which the file has too",
}
_NO_CAP = "the model has no cap of its logits, and llama.cpp's default is 30"
_CUT = "the converter cuts the rows of the embedding that have no token"
_NO_EXPERTS = "the model has no experts"
_NO_STATES = "the model has no recurrent layers"
_NO_ROPE = "the converter takes every model with recurrent layers for one without positions"
_NOT_READ = "llama.cpp does not read it for the family"
_NO_DRAFTS = "layers that draft tokens are not exported"
# Other differences of a case or a family, by key: why they change nothing, or which file is right.
DIFFERENT: dict[str, dict[str, str]] = {
    "bamba": {"rope.dimension_count": "the converter takes heads that rotate in part for heads that rotate as a whole"},
    "cohere": {"rope.scaling.type": _DEFAULT},
    "cohere2": {"rope.scaling.type": _DEFAULT},
    "deepseek_v2": {"expert_group_count": _DEFAULT, "expert_group_used_count": _DEFAULT},
    "deepseek_v3/no_query_latent": {"expert_group_count": _DEFAULT, "expert_group_used_count": _DEFAULT},
    "ernie4_5_moe": {
        "expert_shared_feed_forward_length": "the converter divides intermediate_size by the number of key heads, which gives the same for the published models"  # noqa: E501
    },
    "exaone_moe": {"rope.scaling.type": _DEFAULT, "nextn_predict_layers": _DEFAULT},
    **{
        family: {"token_embd.weight F32 [416, 64]": _CUT, "token_embd.weight F32 [404, 64]": _CUT,
            "final_logit_softcapping": _NO_CAP}
        for family in ("gemma3", "gemma3_text", "gemma4", "gemma4_text", "gemma4_unified")
    },
    "glm": {
        "attention.layer_norm_rms_epsilon": "the converter reads the fields of the first ChatGLM, which this config.json lacks",  # noqa: E501
        "context_length": "the converter reads the fields of the first ChatGLM, which this config.json lacks",
    },
    "glm4_moe": {"nextn_predict_layers": _DEFAULT},
    "gpt2/inner": {"feed_forward_length": "the converter does not read n_inner"},
    "granitemoehybrid": {
        "context_length": "the converter gives models without positions a context of 2 ** 20 tokens",
        "expert_count": _NO_EXPERTS,
        "expert_used_count": _NO_EXPERTS,
        "expert_shared_feed_forward_length": _NO_EXPERTS,
    },
    "granitemoehybrid/attention": {
        f"ssm.{key}": _NO_STATES for key in ("conv_kernel", "group_count", "inner_size", "state_size", "time_step_rank")
    },
    "granitemoehybrid/rope": {
        "feed_forward_length": "the converter takes intermediate_size, which the model does not have",
        "rope.scaling.finetuned": _NO_ROPE,
    },
    "mimo_v2_flash": dict.fromkeys(
        ("attention.head_count_kv", "attention.sliding_window_pattern", "block_count", "nextn_predict_layers"),
        _NO_DRAFTS
    ),
    "ministral3": {"rope.scaling.yarn_log_multiplier": "gives the scale that the file has as rope.scaling.attn_factor"},
    "mistral3": {"rope.scaling.yarn_log_multiplier": "gives the scale that the file has as rope.scaling.attn_factor"},
    "nemotron": {"rope.scaling.type": _DEFAULT},
    "phi3": {"attention.sliding_window": _DEFAULT, "rope.scaling.original_context_length": _NOT_READ},
}  # fmt: skip


def unexplained(case: str, found: list[str]) -> list[str]:
    """The differences without a reason in `ONLY_OURS` or `DIFFERENT`."""
    reasons = DIFFERENT.get(case.partition("/")[0], {}) | DIFFERENT.get(case, {})
    return [
        one
        for one in found
        if (key := one.partition(": ")[0]) not in reasons and not (one.endswith(", None") and key in ONLY_OURS)
    ]
