"""Metrics of runs and hashes of checkpoint files, for comparisons in tests."""

import hashlib
import json
from pathlib import Path
from typing import Any

RECIPE = Path(__file__).with_name("toy_recipe.py")

QWEN = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 64, "hidden_size": 16}
QWEN |= {"intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
QWEN |= {"max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu"}
QWEN |= {"tie_word_embeddings": True, "use_sliding_window": False, "initializer_range": 0.02, "torch_dtype": "float32"}

TIMES = {"tokens_per_second", "target_tokens_per_second", "step_seconds", "sampling_seconds"}
TIMES |= {"peak_memory_bytes", "rss_bytes", "rss_growth_bytes"}


def metrics(directory: Path, *, timed: bool = True) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return rows if timed else [{k: v for k, v in row.items() if k not in TIMES} for row in rows]


def digests(checkpoint: Path) -> dict[str, str]:
    """A checkpoint's files by name, each with its content's hash, except those that name their own run."""
    return {
        path.relative_to(checkpoint).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in checkpoint.rglob("*")
        if path.is_file() and path.name not in ("manifest.json", "training_state.json")
    }
