"""The shapes of published models, with random weights, and text to train them on: nothing has to be downloaded.

Memory and speed depend on a model's shape and not on what its weights say, so a `config.json` is enough. The tokenizer
is the embedded model's, whose ids all lie within the published vocabularies; the output layer and the embedding keep
their published size. A row of text is random words, more of them than the tokens asked for: cut to the maximum length
it fills every position, so no padding flatters a number.

Source: the config.json of each model's repository on the Hugging Face hub. Token ids are left out: they belong to
tokenizers that are not used here.
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


def _llama(rope_factor: float, **sizes: Any) -> Shape:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **sizes,
        "vocab_size": 128_256,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-05,
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": rope_factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }


def _qwen2_5(max_positions: int, **sizes: Any) -> Shape:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        **sizes,
        "max_position_embeddings": max_positions,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1_000_000.0,
        "use_sliding_window": False,
    }


def _qwen3(hidden: int, intermediate: int, layers: int, *, heads: int, tied: bool) -> Shape:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1_000_000.0,
        "use_sliding_window": False,
        "tie_word_embeddings": tied,
    }


def _gemma3(
    hidden: int,
    intermediate: int,
    layers: int,
    *,
    heads: tuple[int, int],
    vocab_size: int,
    max_positions: int,
    window: int,
) -> Shape:
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": 256,
        "vocab_size": vocab_size,
        "max_position_embeddings": max_positions,
        "sliding_window": window,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "tie_word_embeddings": True,
    }


def _phi3(
    hidden: int,
    intermediate: int,
    layers: int,
    *,
    heads: tuple[int, int],
    vocab_size: int,
    tied: bool,
    rope_theta: float,
) -> Shape:
    return {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "vocab_size": vocab_size,
        "max_position_embeddings": 16_384,
        "original_max_position_embeddings": 16_384,
        "sliding_window": None,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-05,
        "rope_theta": rope_theta,
        "tie_word_embeddings": tied,
    }


def _smollm2(hidden: int, intermediate: int, layers: int, *, heads: tuple[int, int], rope_theta: float) -> Shape:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "vocab_size": 49_152,
        "max_position_embeddings": 8192,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-05,
        "rope_theta": rope_theta,
        "tie_word_embeddings": True,
    }


def _olmo2(hidden: int, intermediate: int, layers: int, *, heads: int) -> Shape:
    return {
        "architectures": ["Olmo2ForCausalLM"],
        "model_type": "olmo2",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": 100_352,
        "max_position_embeddings": 4096,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-06,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": False,
    }


def _qwen3_5(
    hidden: int, intermediate: int, layers: int, *, heads: tuple[int, int], value_heads: int, tied: bool
) -> Shape:
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": 256,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "vocab_size": 248_320,
        "max_position_embeddings": 262_144,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25},
        "tie_word_embeddings": tied,
    }


def _gemma4(
    model_type: str,
    hidden: int,
    intermediate: int,
    layers: int,
    *,
    heads: tuple[int, int],
    every: int,
    window: int,
    **facts: Any,
) -> Shape:
    """`every` layers one sees the whole text, with keys and values of their own size; the others see a window."""
    return {
        "architectures": ["Gemma4UnifiedForCausalLM" if "unified" in model_type else "Gemma4ForCausalLM"],
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": 256,
        "global_head_dim": 512,
        "layer_types": ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(layers)],
        "sliding_window": window,
        "vocab_size": 262_144,
        "max_position_embeddings": 131_072,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
        },
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
        **facts,
    }


def _ministral3(hidden: int, intermediate: int, layers: int, *, tied: bool) -> Shape:
    return {
        "architectures": ["Ministral3ForCausalLM"],
        "model_type": "ministral3",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 131_072,
        "max_position_embeddings": 262_144,
        "sliding_window": None,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
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
        "tie_word_embeddings": tied,
    }


SHAPES: dict[str, Shape] = {
    "llama3_2_1b": _llama(
        rope_factor=32.0,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        head_dim=64,
        tie_word_embeddings=True,
    ),
    "llama3_2_3b": _llama(
        rope_factor=32.0,
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=28,
        num_attention_heads=24,
        head_dim=128,
        tie_word_embeddings=True,
    ),
    "llama3_1_8b": _llama(
        rope_factor=8.0,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        head_dim=128,
        tie_word_embeddings=False,
    ),
    "llama3_1_70b": _llama(
        rope_factor=8.0,
        hidden_size=8192,
        intermediate_size=28_672,
        num_hidden_layers=80,
        num_attention_heads=64,
        head_dim=128,
        tie_word_embeddings=False,
    ),
    "qwen2_5_0_5b": _qwen2_5(
        max_positions=32_768,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=151_936,
        tie_word_embeddings=True,
    ),
    "qwen2_5_1_5b": _qwen2_5(
        max_positions=131_072,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        vocab_size=151_936,
        tie_word_embeddings=True,
    ),
    "qwen2_5_7b": _qwen2_5(
        max_positions=131_072,
        hidden_size=3584,
        intermediate_size=18_944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        vocab_size=152_064,
        tie_word_embeddings=False,
    ),
    "qwen3_0_6b": _qwen3(1024, 3072, 28, heads=16, tied=True),
    "qwen3_4b": _qwen3(2560, 9728, 36, heads=32, tied=True),
    "qwen3_8b": _qwen3(4096, 12_288, 36, heads=32, tied=False),
    "gemma3_1b": _gemma3(1152, 6912, 26, heads=(4, 1), vocab_size=262_144, max_positions=32_768, window=512),
    "gemma3_4b": _gemma3(2560, 10_240, 34, heads=(8, 4), vocab_size=262_208, max_positions=131_072, window=1024),
    "phi4_14b": _phi3(5120, 17_920, 40, heads=(40, 10), vocab_size=100_352, tied=False, rope_theta=250_000.0),
    "phi4_mini": {
        **_phi3(3072, 8192, 32, heads=(24, 8), vocab_size=200_064, tied=True, rope_theta=10_000.0),
        "partial_rotary_factor": 0.75,  # its scaling for long texts, a list of 48 factors, is left out
    },
    "mistral_7b": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32_768,
        "max_position_embeddings": 32_768,
        "sliding_window": None,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": False,
    },
    "smollm2_135m": _smollm2(576, 1536, 30, heads=(9, 3), rope_theta=100_000),
    "smollm2_360m": _smollm2(960, 2560, 32, heads=(15, 5), rope_theta=100_000),
    "smollm2_1_7b": _smollm2(2048, 8192, 24, heads=(32, 32), rope_theta=130_000),
    "smollm3_3b": {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "hidden_size": 2048,
        "intermediate_size": 11_008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "vocab_size": 128_256,
        "max_position_embeddings": 65_536,
        "no_rope_layer_interval": 4,
        "use_sliding_window": False,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-06,
        "rope_theta": 5_000_000.0,
        "tie_word_embeddings": True,
    },
    "olmo2_1b": _olmo2(2048, 8192, 16, heads=16),
    "olmo2_7b": _olmo2(4096, 11_008, 32, heads=32),
    "olmo3_7b": {
        **_olmo2(4096, 11_008, 32, heads=32),
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "vocab_size": 100_278,
        "max_position_embeddings": 65_536,
        "sliding_window": 4096,
        "layer_types": ["sliding_attention" if (i + 1) % 4 else "full_attention" for i in range(32)],
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
    "qwen3_5_0_8b": _qwen3_5(1024, 3584, 24, heads=(8, 2), value_heads=16, tied=True),
    "qwen3_5_2b": _qwen3_5(2048, 6144, 24, heads=(8, 2), value_heads=16, tied=True),
    "qwen3_5_4b": _qwen3_5(2560, 9216, 32, heads=(16, 4), value_heads=32, tied=True),
    "qwen3_5_9b": _qwen3_5(4096, 12_288, 32, heads=(16, 4), value_heads=32, tied=False),
    "gemma4_e2b": _gemma4(
        "gemma4_text",
        1536,
        6144,
        35,
        heads=(8, 1),
        every=5,
        window=512,
        num_kv_shared_layers=20,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=256,
        vocab_size_per_layer_input=262_144,
    ),
    "gemma4_e4b": _gemma4(
        "gemma4_text",
        2560,
        10_240,
        42,
        heads=(8, 2),
        every=6,
        window=512,
        num_kv_shared_layers=18,
        hidden_size_per_layer_input=256,
        vocab_size_per_layer_input=262_144,
    ),
    "gemma4_12b": _gemma4(
        "gemma4_unified_text",
        3840,
        15_360,
        48,
        heads=(16, 8),
        every=6,
        window=1024,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
    ),
    "ministral3_3b": _ministral3(3072, 9216, 26, tied=True),
    "ministral3_8b": _ministral3(4096, 14_336, 34, tied=False),
    "gpt_oss_20b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "vocab_size": 201_088,
        "max_position_embeddings": 131_072,
        "sliding_window": 128,
        "layer_types": ["full_attention" if i % 2 else "sliding_attention" for i in range(24)],
        "hidden_act": "silu",
        "attention_bias": True,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
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
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
    },
    "qwen3_30b_a3b": {
        **_qwen3(2048, 6144, 48, heads=32, tied=False),
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    # Of no published model: it tries the scripts themselves, in seconds.
    "tiny": _qwen2_5(
        max_positions=4096,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=8192,
        tie_word_embeddings=True,
    ),
}


def find_gsm8k() -> Path | None:
    """`shared/data/gsm8k_train.jsonl` beside this checkout or above it."""
    found = (parent / "shared" / "data" / "gsm8k_train.jsonl" for parent in ROOT.parents)
    return next((path for path in found if path.is_file()), None)


def shape_of(name: str) -> Shape:
    """The named shape's config.json. Raises ValueError with the names there are."""
    if name not in SHAPES:
        raise ValueError(f"no shape is called {name!r}; expected one of {', '.join(SHAPES)}.")
    return SHAPES[name]


def num_parameters(name: str) -> int:
    """Parameters of the named shape; a tied embedding counts once."""
    import torch

    from lean_ft.models import Decoder, decoder_config

    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Decoder(decoder_config(shape_of(name))).parameters())


def write_model_folder(shape: str, folder: Path, tokenizer_folder: Path = EMBEDDED_MODEL) -> Path:
    """Writes a Hugging Face folder without weights, for `model.random_init=true`, and returns it.

    Raises ValueError where the shape is unknown, the tokenizer is missing, or it has ids beyond the shape's vocabulary.
    """
    config = shape_of(shape)
    if not (tokenizer_folder / "tokenizer.json").is_file():
        raise ValueError(f"{tokenizer_folder} has no tokenizer.json, which the benchmarks tokenize their text with.")
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
    """Writes JSONL rows `{"text": ...}` of at least `tokens_per_row` tokens each, and returns the path."""
    words = _Words(seed)
    # A token never spans two words; one word more makes up for whatever a tokenizer may add or drop at the ends.
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
            # A word takes up to six tokens, and a single vowel one.
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
    """Pronounceable random words, the same for a seed."""

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
