"""Shapes of published models with random weights, and text to train them on. Nothing is downloaded.

Memory and speed depend on a model's shape, not on its weights, so a `config.json` is enough. The tokenizer is the embedded model's; its ids lie
within the published vocabularies, and embedding and output layer keep their published size. A row of text has more random words than the
requested tokens, so that truncation fills every position.

Source: the config.json of each model's repository on the Hugging Face Hub. Token ids are left out.
"""

import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
EMBEDDED_MODEL = ROOT / "lean_ft" / "assets" / "tiny" / "model"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")

Shape = dict[str, Any]


# Fields of a family's config.json other than sizes, and its class.
_FAMILIES: dict[str, Shape] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "attention_bias": False, "mlp_bias": False, "rms_norm_eps": 1e-05},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": None, "rms_norm_eps": 1e-05},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False, "rope_theta": 1_000_000.0},
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "head_dim": 128,
        "attention_bias": False,
        "use_sliding_window": False,
        "rope_theta": 1_000_000.0,
    },
    "gemma3_text": {
        "architectures": ["Gemma3ForCausalLM"],
        "head_dim": 256,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    },
    "phi3": {
        "architectures": ["Phi3ForCausalLM"],
        "original_max_position_embeddings": 16_384,
        "sliding_window": None,
        "rms_norm_eps": 1e-05,
    },
    "smollm3": {
        "architectures": ["SmolLM3ForCausalLM"],
        "no_rope_layer_interval": 4,
        "use_sliding_window": False,
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": 5_000_000.0,
    },
    "olmo2": {"architectures": ["Olmo2ForCausalLM"], "attention_bias": False, "rope_theta": 500_000.0},
    "olmo3": {
        "architectures": ["Olmo3ForCausalLM"],
        "attention_bias": False,
        "sliding_window": 4096,
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "attention_factor": 1.2079441541679836,
        },
    },
    "ministral3": {
        "architectures": ["Ministral3ForCausalLM"],
        "head_dim": 128,
        "sliding_window": None,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1_000_000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16_384,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "qwen3_5_text": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "head_dim": 256,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25},
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": 128,
        "attention_bias": False,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rope_theta": 1_000_000.0,
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        "head_dim": 64,
        "attention_bias": True,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "rms_norm_eps": 1e-05,
        "rope_theta": 150_000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
}
_GEMMA4: Shape = {
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    },
    "final_logit_softcapping": 30.0,
}
_FAMILIES["gemma4_text"] = {
    **_GEMMA4,
    "architectures": ["Gemma4ForCausalLM"],
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
}
_FAMILIES["gemma4_unified_text"] = {
    **_GEMMA4,
    "architectures": ["Gemma4UnifiedForCausalLM"],
    "sliding_window": 1024,
    "attention_k_eq_v": True,
}


def _shape(
    model_type: str,
    sizes: tuple[int, int, int, int, int],
    vocab_size: int,
    max_positions: int,
    *,
    tied: bool,
    **others: Any,
) -> Shape:
    """sizes: hidden and intermediate, layers, heads of queries and of keys."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    of_all = {"attention_dropout": 0.0, "initializer_range": 0.02, "rms_norm_eps": 1e-06}
    if "hidden_activation" not in _FAMILIES[model_type]:
        of_all["hidden_act"] = "silu"
    return {
        "model_type": model_type,
        **dict(zip(names, sizes, strict=True)),
        "vocab_size": vocab_size,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": tied,
        **of_all,
        **_FAMILIES[model_type],
        **others,
    }


def _llama3(*sizes: int, head_dim: int, rope_factor: float, tied: bool) -> Shape:
    scaling = {"rope_type": "llama3", "factor": rope_factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    others = {"head_dim": head_dim, "pretraining_tp": 1, "rope_theta": 500_000.0, "rope_scaling": scaling}
    return _shape("llama", (*sizes, 8), 128_256, 131_072, tied=tied, **others)


def _windows(layers: int, every: int) -> list[str]:
    """Layer kinds: sliding windows, with full attention in every `every`-th layer."""
    return ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(layers)]


SHAPES: dict[str, Shape] = {
    "llama3_2_1b": _llama3(2048, 8192, 16, 32, head_dim=64, rope_factor=32.0, tied=True),
    "llama3_2_3b": _llama3(3072, 8192, 28, 24, head_dim=128, rope_factor=32.0, tied=True),
    "llama3_1_8b": _llama3(4096, 14_336, 32, 32, head_dim=128, rope_factor=8.0, tied=False),
    "llama3_1_70b": _llama3(8192, 28_672, 80, 64, head_dim=128, rope_factor=8.0, tied=False),
    "qwen2_5_0_5b": _shape("qwen2", (896, 4864, 24, 14, 2), 151_936, 32_768, tied=True),
    "qwen2_5_1_5b": _shape("qwen2", (1536, 8960, 28, 12, 2), 151_936, 131_072, tied=True),
    "qwen2_5_7b": _shape("qwen2", (3584, 18_944, 28, 28, 4), 152_064, 131_072, tied=False),
    "qwen3_0_6b": _shape("qwen3", (1024, 3072, 28, 16, 8), 151_936, 40_960, tied=True),
    "qwen3_4b": _shape("qwen3", (2560, 9728, 36, 32, 8), 151_936, 40_960, tied=True),
    "qwen3_8b": _shape("qwen3", (4096, 12_288, 36, 32, 8), 151_936, 40_960, tied=False),
    "gemma3_1b": _shape("gemma3_text", (1152, 6912, 26, 4, 1), 262_144, 32_768, tied=True, sliding_window=512),
    "gemma3_4b": _shape("gemma3_text", (2560, 10_240, 34, 8, 4), 262_208, 131_072, tied=True, sliding_window=1024),
    "phi4_14b": _shape("phi3", (5120, 17_920, 40, 40, 10), 100_352, 16_384, tied=False, rope_theta=250_000.0),
    # Without its scaling for long texts, a list of 48 factors.
    "phi4_mini": _shape(
        "phi3", (3072, 8192, 32, 24, 8), 200_064, 16_384, tied=True, rope_theta=10_000.0, partial_rotary_factor=0.75
    ),
    "mistral_7b": _shape("mistral", (4096, 14_336, 32, 32, 8), 32_768, 32_768, tied=False, rope_theta=1_000_000.0),
    "smollm2_135m": _shape("llama", (576, 1536, 30, 9, 3), 49_152, 8192, tied=True, rope_theta=100_000),
    "smollm2_360m": _shape("llama", (960, 2560, 32, 15, 5), 49_152, 8192, tied=True, rope_theta=100_000),
    "smollm2_1_7b": _shape("llama", (2048, 8192, 24, 32, 32), 49_152, 8192, tied=True, rope_theta=130_000),
    "smollm3_3b": _shape("smollm3", (2048, 11_008, 36, 16, 4), 128_256, 65_536, tied=True),
    "olmo2_1b": _shape("olmo2", (2048, 8192, 16, 16, 16), 100_352, 4096, tied=False),
    "olmo2_7b": _shape("olmo2", (4096, 11_008, 32, 32, 32), 100_352, 4096, tied=False),
    "olmo3_7b": _shape("olmo3", (4096, 11_008, 32, 32, 32), 100_278, 65_536, tied=False, layer_types=_windows(32, 4)),
    "ministral3_3b": _shape("ministral3", (3072, 9216, 26, 32, 8), 131_072, 262_144, tied=True),
    "ministral3_8b": _shape("ministral3", (4096, 14_336, 34, 32, 8), 131_072, 262_144, tied=False),
    "qwen3_5_0_8b": _shape(
        "qwen3_5_text", (1024, 3584, 24, 8, 2), 248_320, 262_144, tied=True, linear_num_value_heads=16
    ),
    "qwen3_5_2b": _shape(
        "qwen3_5_text", (2048, 6144, 24, 8, 2), 248_320, 262_144, tied=True, linear_num_value_heads=16
    ),
    "qwen3_5_4b": _shape(
        "qwen3_5_text", (2560, 9216, 32, 16, 4), 248_320, 262_144, tied=True, linear_num_value_heads=32
    ),
    "qwen3_5_9b": _shape(
        "qwen3_5_text", (4096, 12_288, 32, 16, 4), 248_320, 262_144, tied=False, linear_num_value_heads=32
    ),
    "gemma4_e2b": _shape(
        "gemma4_text",
        (1536, 6144, 35, 8, 1),
        262_144,
        131_072,
        tied=True,
        layer_types=_windows(35, 5),
        num_kv_shared_layers=20,
        use_double_wide_mlp=True,
    ),
    "gemma4_e4b": _shape(
        "gemma4_text",
        (2560, 10_240, 42, 8, 2),
        262_144,
        131_072,
        tied=True,
        layer_types=_windows(42, 6),
        num_kv_shared_layers=18,
    ),
    "gemma4_12b": _shape(
        "gemma4_unified_text",
        (3840, 15_360, 48, 16, 8),
        262_144,
        262_144,
        tied=True,
        layer_types=_windows(48, 6),
        num_global_key_value_heads=1,
    ),
    "qwen3_30b_a3b": _shape(
        "qwen3_moe",
        (2048, 6144, 48, 32, 4),
        151_936,
        262_144,
        tied=False,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
    ),
    "gpt_oss_20b": _shape(
        "gpt_oss",
        (2880, 2880, 24, 64, 8),
        201_088,
        131_072,
        tied=False,
        num_local_experts=32,
        num_experts_per_tok=4,
        layer_types=["full_attention" if i % 2 else "sliding_attention" for i in range(24)],
    ),
    # No published model: for trying the scripts in seconds.
    "tiny": _shape("qwen2", (64, 128, 2, 4, 2), 8192, 4096, tied=True),
}


def find_gsm8k() -> Path | None:
    """Find `shared/data/gsm8k_train.jsonl` next to this checkout or above it."""
    found = (parent / "shared" / "data" / "gsm8k_train.jsonl" for parent in ROOT.parents)
    return next((path for path in found if path.is_file()), None)


def shape_of(name: str) -> Shape:
    """The config.json of a shape. Raises ValueError with the known names."""
    if name not in SHAPES:
        raise ValueError(f"unknown shape {name!r}; expected one of {', '.join(SHAPES)}.")
    return SHAPES[name]


def num_parameters(name: str) -> int:
    """Number of parameters of a shape; a tied embedding counts once."""
    import torch

    from lean_ft.models import Decoder, decoder_config

    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Decoder(decoder_config(shape_of(name))).parameters())


def write_model_folder(shape: str, folder: Path, tokenizer_folder: Path = EMBEDDED_MODEL) -> Path:
    """Write a Hugging Face folder without weights, for `model.random_init=true`, and return it.

    Raises ValueError if the shape is unknown, the tokenizer is missing, or it has ids beyond the shape's vocabulary.
    """
    config = shape_of(shape)
    if not (tokenizer_folder / "tokenizer.json").is_file():
        raise ValueError(f"{tokenizer_folder}: no tokenizer.json. The benchmarks need it to tokenize text.")
    tokenizer = json.loads((tokenizer_folder / "tokenizer.json").read_text(encoding="utf-8"))
    ids = [*tokenizer["model"]["vocab"].values(), *(token["id"] for token in tokenizer.get("added_tokens", []))]
    if max(ids) >= config["vocab_size"]:
        raise ValueError(
            f"{tokenizer_folder} has token ids up to {max(ids)}, and {shape} has {config['vocab_size']} of them; "
            "expected a smaller tokenizer."
        )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for name in TOKENIZER_FILES:
        if (tokenizer_folder / name).is_file():
            shutil.copyfile(tokenizer_folder / name, folder / name)
    return folder


def write_text_rows(path: Path, num_rows: int, tokens_per_row: int, seed: int = 0) -> Path:
    """Write JSONL rows `{"text": ...}` of at least `tokens_per_row` tokens each, and return the path."""
    words = _Words(seed)
    # A token never spans two words. One extra word covers tokens added or dropped at the ends.
    return _write(path, [words.text(tokens_per_row + 1) for _ in range(num_rows)])


def write_pair_rows(path: Path, num_rows: int, prompt_tokens: int, answer_tokens: int, seed: int = 0) -> Path:
    """Writes JSONL rows of a prompt of `prompt_tokens` and two answers of at least `answer_tokens` tokens each, by the
    embedded tokenizer, and returns the path."""
    from tokenizers import Tokenizer

    words, rows = _Words(seed), []
    tokenizer = Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
    for _ in range(num_rows):
        prompt = "a"
        while (length := len(tokenizer.encode(prompt).ids)) < prompt_tokens:
            # A word has up to six tokens, a single vowel one.
            prompt += " " + (words.text(1) if length < prompt_tokens - 8 else "a")
        assert length == prompt_tokens, (prompt_tokens, prompt)
        answers = {side: " " + words.text(answer_tokens + 1) for side in ("chosen", "rejected")}
        rows.append({"prompt": prompt, **answers})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_documents(path: Path, total_tokens: int, max_tokens: int, seed: int = 0) -> Path:
    """Writes JSONL rows `{"text": ...}` of many lengths, to be packed: at least `total_tokens` tokens of them.

    The number of words is log-uniform from `max_tokens / 256` to `max_tokens / 8`: a few long documents and many short
    ones. With the embedded tokenizer a word takes three to four tokens.
    """
    words = _Words(seed)
    shortest, longest = max(2, max_tokens // 256), max(3, max_tokens // 8)
    texts, written = [], 0
    while written < total_tokens:
        num_words = round(math.exp(words.random.uniform(math.log(shortest), math.log(longest))))
        texts.append(words.text(num_words))
        written += num_words
    return _write(path, texts)


class _Words:
    """Pronounceable random words, determined by a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
        self._words = ["".join(self.random.choices(syllables, k=self.random.randint(1, 3))) for _ in range(4096)]

    def text(self, num_words: int) -> str:
        return " ".join(self.random.choices(self._words, k=num_words))


def _write(path: Path, texts: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path
