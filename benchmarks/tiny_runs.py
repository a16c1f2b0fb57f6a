"""Runs of the real recipe that take a fraction of a second, each in a fork of this process.

Importing torch takes seconds, and a run of 16 steps a tenth of a second. torch is therefore imported once, and every
run is a fork. The parent computes on one thread and never in parallel, so forking is safe.
"""

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from lean_ft.cli.errors import explain
from lean_ft.settings.text import load_config
from recipes import full_finetune_single_device as recipe

CONFIG = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 264,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "initializer_range": 0.02,
    "torch_dtype": "float32",
}
NUM_ROWS = 13  # seven batches of two, so that the last step of an epoch is half full
STEPS = 16
TIMES = {"tokens_per_second", "target_tokens_per_second", "step_seconds", "sampling_seconds", "peak_memory_bytes"}
TIMES |= {"rss_bytes", "rss_growth_bytes"}

torch.set_num_threads(1)


def write_inputs(folder: Path) -> Path:
    """Write a model folder with a byte-level tokenizer and rows to train on. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate([*alphabet, "<end>"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    rows = [{"prompt": f"{n} times {n} is ", "completion": str(n * n) * (1 + n % 4)} for n in range(NUM_ROWS)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "caches").mkdir(exist_ok=True)
    (folder / "caches").chmod(0o777)
    return folder


def config(inputs: Path, output_dir: Path, settings: list[str], recipe: Any = recipe) -> Any:
    """Settings of a run of 16 steps, 4 per epoch, or 4 per round in online recipes."""
    arguments = [f"model.path={inputs}", "model.random_init=true", "model.dtype=float32", "device=cpu"]
    arguments += [f"data.source={inputs / 'rows.jsonl'}", "gradient_accumulation_steps=2", f"output_dir={output_dir}"]
    arguments += ["optimizer.lr=0.01", "schedule.name=constant", "epochs=9", f"max_steps={STEPS}", "save_every=0"]
    if "generation" in recipe.Config.model_fields:
        arguments += ["data.max_prompt_length=32", "rewards=[length]", "generation.max_new_tokens=6", "sample_every=2"]
        arguments += ["generation.num_answers=2", "generation.steps_per_round=2", "generation.passes=2"]
        return load_config(recipe.Config, None, [*arguments, *settings])
    arguments += ["data.max_length=48"]
    # A cache of its own, because other users may not read this one.
    arguments += [f"data.cache_dir={inputs / 'caches' / str(os.getuid())}"]
    return load_config(recipe.Config, None, [*arguments, *settings])


def train(inputs: Path, output_dir: Path, settings: list[str], recipe: Any = recipe) -> None:
    recipe.main(config(inputs, output_dir, settings, recipe))


def fork(work: Callable[[], object], log: Path) -> int:
    """Start `work` in a fork of this process, what it prints going to `log`; returns its process id.

    It exits as `leanft` does: with 0, or the code of the error, whose message is the log's last line.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if process:
        return process
    code = 3  # an error of this harness, unless replaced below
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.chdir("/")  # no git repository to ask for its commit
        try:
            work()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException as error:
            message, code = explain(error)
            print(f"error: {message}")
        sys.stdout.flush()
    finally:
        os._exit(code)


def finish(process: int) -> int:
    """Wait for a fork and return its exit code, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def digests(checkpoint: Path) -> dict[str, str]:
    """Hashes of a checkpoint's files by name, except files that name their run."""
    return {
        path.relative_to(checkpoint).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in checkpoint.rglob("*")
        if path.is_file() and path.name not in ("manifest.json", "training_state.json")
    }


def metrics(directory: Path) -> list[dict[str, Any]]:
    """The metrics of a run, without times and memory."""
    rows = []
    with contextlib.suppress(FileNotFoundError):
        for line in (directory / "metrics.jsonl").read_text().splitlines():
            with contextlib.suppress(ValueError):
                rows.append({name: value for name, value in json.loads(line).items() if name not in TIMES})
    return rows
