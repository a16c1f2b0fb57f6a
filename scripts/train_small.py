"""Train a small language model from random weights with lean_ft, for checks and comparisons.

    python scripts/train_small.py gsm8k_train.jsonl gsm8k_validation.jsonl models/trained

Random weights hide sharp attention and large activations. Rows need the fields `question` and `answer`, as in GSM8K.
The result is a Hugging Face folder of a Llama with 5.2 million parameters and tied embeddings. Like SmolLM2's, its
byte-level BPE vocabulary contains only bytes of the training text, so an emoji or a Chinese character has no ids.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 3072
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + "
    "'\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "dtype": "float32",
}


def write_untrained_model(folder: Path, rows: list[dict[str, str]]) -> None:
    """Write config.json and a tokenizer trained on the rows."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    # No initial alphabet: bytes missing in the text get no token.
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=SPECIAL_TOKENS, show_progress=False)
    tokenizer.train_from_iterator((text for row in rows for text in (row["question"], row["answer"])), trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONFIG["max_position_embeddings"],
        "chat_template": CHAT_TEMPLATE,
    }
    generation_config = {name: CONFIG[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for name, value in [
        ("config.json", CONFIG),
        ("tokenizer_config.json", tokenizer_config),
        ("generation_config.json", generation_config),
    ]:
        (folder / name).write_text(json.dumps(value, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("train", type=Path, help="JSONL rows with `question` and `answer`")
    parser.add_argument("validation", type=Path, help="held-out rows")
    parser.add_argument("out", type=Path, help="folder to write; must not exist")
    parser.add_argument("overrides", nargs="*", help="settings of the run, e.g. max_steps=600")
    arguments = parser.parse_args()
    if arguments.out.exists():
        parser.error(f"{arguments.out} exists already")
    rows = [json.loads(line) for line in arguments.train.read_text(encoding="utf-8").splitlines()]
    leanft = [sys.executable, "-m", "lean_ft"]
    with tempfile.TemporaryDirectory() as temporary:
        untrained, run = Path(temporary) / "untrained", arguments.out.with_name(arguments.out.name + "_run")
        write_untrained_model(untrained, rows)
        settings = [
            f"model.path={untrained}",
            "model.random_init=true",
            "model.dtype=float32",
            f"data.source={arguments.train}",
            f"data.validation_source={arguments.validation}",
            "data.columns.prompt=question",
            "data.columns.completion=answer",
            "data.train_on=all",
            "data.max_length=512",
            "data.packing=bfd",
            "batch_size=4",
            "optimizer.lr=2.5e-3",
            "optimizer.betas=[0.9, 0.95]",
            "optimizer.weight_decay=0.1",
            "schedule.warmup_steps=40",
            "clip_grad_norm=1.0",
            "max_steps=600",
            "epochs=10",
            "eval_every=300",
            "save_every=0",
            f"output_dir={run}",
            *arguments.overrides,
        ]
        subprocess.run([*leanft, "run", "full_finetune_single_device", *settings], check=True)
        last = max(run.glob("step_*"))
        shutil.copytree(last, arguments.out, ignore=shutil.ignore_patterns("training_state", "manifest.json"))
    shutil.rmtree(run)


if __name__ == "__main__":
    main()
