"""Make everything in lean_ft/assets/tiny: tokenizer, instruction rows and a small pretrained model.

    python scripts/make_tiny.py                 # all of it
    python scripts/make_tiny.py --only data     # only the rows; or `tokenizer`, `model`

All text comes from tiny_world.py. The seed determines the tokenizer and the rows to the byte. It determines the weights
only for one machine and number of threads, because matrix products round differently elsewhere.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tiny_world import documents, instruction_rows, name_rows, preference_rows, problem_rows, topic_rows
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor

from lean_ft.models import build_decoder, decoder_config, save_model

SEED = 0
NUM_PAIRS = 800  # for training; all held-out rows have pairs
NUM_PROBLEMS = {"train": 800, "validation": 100}
NUM_TOPICS = {"train": 320, "validation": 80}
NUM_NAMES = {"train": 400, "validation": 80}
FOLDER = Path(__file__).parents[1] / "lean_ft" / "assets" / "tiny"

PAD, BEGIN, END = "<|pad|>", "<|begin|>", "<|end|>"
SPECIAL_TOKENS = [PAD, BEGIN, END, "<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('expected the role system, user or assistant, not ' ~ message.role) }}{% endif %}"
    "{{ '<|' ~ message.role ~ '|>' }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content ~ eos_token }}{% endgeneration %}"
    "{% else %}{{ message.content ~ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 768,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "bos_token_id": SPECIAL_TOKENS.index(BEGIN),
    "eos_token_id": SPECIAL_TOKENS.index(END),
    "pad_token_id": SPECIAL_TOKENS.index(PAD),
    "dtype": "float32",
}

STEPS = 5000
ROWS, COLUMNS = 16, 128  # a batch: rows of the running text, cut at the last column
PEAK_LR, WARMUP_STEPS = 3e-3, 100


def make_data(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, held_out in (("train", False), ("validation", True)):
        lines = [json.dumps(row) + "\n" for row in instruction_rows(held_out, SEED)]
        (folder / f"{name}.jsonl").write_text("".join(lines))
        print(f"{name}.jsonl: {len(lines)} rows")
        pairs = preference_rows(instruction_rows(held_out, SEED)[:NUM_PAIRS], SEED)
        lines = [json.dumps(pair) + "\n" for pair in pairs]
        (folder / f"pairs_{name}.jsonl").write_text("".join(lines))
        print(f"pairs_{name}.jsonl: {len(lines)} pairs")
        lines = [json.dumps(row) + "\n" for row in problem_rows(held_out, SEED, NUM_PROBLEMS[name])]
        (folder / f"problems_{name}.jsonl").write_text("".join(lines))
        print(f"problems_{name}.jsonl: {len(lines)} problems")
        lines = [json.dumps(row) + "\n" for row in topic_rows(held_out, SEED, NUM_TOPICS[name])]
        (folder / f"topics_{name}.jsonl").write_text("".join(lines))
        print(f"topics_{name}.jsonl: {len(lines)} texts")
        lines = [json.dumps(row) + "\n" for row in name_rows(held_out, SEED, NUM_NAMES[name])]
        (folder / f"names_{name}.jsonl").write_text("".join(lines))
        print(f"names_{name}.jsonl: {len(lines)} texts")


def make_tokenizer(folder: Path) -> None:
    """Train a byte-level BPE. Each digit is one token, so that sums can be computed digit by digit."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    questions = [message["content"] for row in instruction_rows(False, SEED) for message in row["messages"]]
    tokenizer.train_from_iterator(
        [*islice(documents(SEED), 6000), *questions],
        trainers.BpeTrainer(
            vocab_size=MODEL["vocab_size"],
            special_tokens=SPECIAL_TOKENS,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    bos = (BEGIN, SPECIAL_TOKENS.index(BEGIN))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[bos])
    assert tokenizer.get_vocab_size() == MODEL["vocab_size"]
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BEGIN,
            "eos_token": END,
            "pad_token": PAD,
            "clean_up_tokenization_spaces": False,
            "model_max_length": MODEL["max_position_embeddings"],
            "chat_template": CHAT_TEMPLATE,
        },
    )
    print(f"tokenizer.json: {tokenizer.get_vocab_size()} tokens")


def make_model(folder: Path, num_threads: int) -> None:
    """Pretrain on the running text and save the weights in bfloat16."""
    torch.set_num_threads(num_threads)
    torch.manual_seed(SEED)
    model = build_decoder(decoder_config(MODEL))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.05, fused=True)
    started = time.perf_counter()
    for step, ids in enumerate(islice(_running_text(folder), STEPS)):
        lr = PEAK_LR * min((step + 1) / WARMUP_STEPS, 0.5 + 0.5 * math.cos(math.pi * step / STEPS))
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == STEPS - 1:
            seconds = time.perf_counter() - started
            print(f"step {step:5d} of {STEPS}  loss {loss.item():.3f}  {seconds:.0f} s", flush=True)
    model.source.config = MODEL
    save_model(model.bfloat16(), folder)
    write_json(
        folder / "generation_config.json",
        {key: MODEL[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )


def _running_text(folder: Path) -> Iterator[Tensor]:
    """Batches (ROWS, COLUMNS + 1) of the pages' ids, each page with begin and end tokens."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    pages = documents(SEED + 1)
    ids: list[int] = []
    size = ROWS * (COLUMNS + 1)
    while True:
        while len(ids) < size:
            for encoding in tokenizer.encode_batch(list(islice(pages, 256))):
                ids += [*encoding.ids, SPECIAL_TOKENS.index(END)]
        yield torch.tensor(ids[:size]).view(ROWS, COLUMNS + 1)
        ids = ids[size:]


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def make_parts(folder: Path, num_threads: int, data: Any, tokenizer: Any, model: Any) -> None:
    """Make the parts of an embedded model that the command line asks for, in `folder` unless it names another."""
    parser = argparse.ArgumentParser(description=f"Makes everything in {folder.relative_to(folder.parents[2])}.")
    parser.add_argument("--out", type=Path, default=folder, help="folder to write (default: the package's)")
    parser.add_argument("--only", choices=["data", "tokenizer", "model"])
    parser.add_argument("--threads", type=int, default=num_threads)
    arguments = parser.parse_args()
    if arguments.only in (None, "data"):
        data(arguments.out / "data")
    if arguments.only in (None, "tokenizer"):
        tokenizer(arguments.out / "model")
    if arguments.only in (None, "model"):
        model(arguments.out / "model", arguments.threads)


if __name__ == "__main__":
    make_parts(FOLDER, 2, make_data, make_tokenizer, make_model)
