"""Make everything in lean_ft/assets/tiny-tools: questions on numbers, calls of a calculator, tokenizer and a small
model that seldom calls it.

    python scripts/make_tiny_tools.py                 # all of it
    python scripts/make_tiny_tools.py --only data     # only the rows; or `tokenizer`, `model`

The chat template writes tools, calls and results in the form of Hermes. The model is trained here on chats. Some
answers call the calculator and repeat its result, and the others are the right number at once. The model is too small
to compute these numbers, so only its calls lead to right answers. In the last quarter of the chats calls are rare, so
the model can call, but seldom does. The seed determines the tokenizer and the rows to the byte. It determines the
weights only for one machine and number of threads.
"""

import json
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random

import torch
from make_tiny import MODEL as TINY
from make_tiny import make_parts, write_json
from tiny_world import Item
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from lean_ft.models import load_model, save_model
from lean_ft.notebook import run
from lean_ft.tools.calculator import calculator
from lean_ft.tools.schemas import json_schema

SEED = 0
NUM_PROMPTS = {"train": 512, "validation": 200}
NUM_CALLS = {"train": 192, "validation": 64}
NUM_CHATS, QUESTIONS = 8000, 4  # for the model: chats, and questions of a chat, after one description of the tool
CALLED = 0.7, 0.7, 0.7, 0.15  # share of the answers with a call, in each quarter of the chats: see above
FOLDER = Path(__file__).parents[1] / "lean_ft" / "assets" / "tiny-tools"

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = [PAD, START, END]
CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n<tools>' }}{% for tool in tools %}{{ '\n' ~ tool | tojson }}{% endfor %}{{ "
    "'\n</tools><|im_end|>\n' }}{% endif %}{% for message in messages %}{{ '<|im_start|>' ~ message.role ~ '\n' }}{% "
    "if message.role == 'assistant' %}{% generation %}{{ message.content or '' }}{% for call in message.tool_calls or "
    "[] %}{{ '<tool_call>\n{\"name\": ' ~ call.function.name | tojson ~ ', \"arguments\": ' ~ call.function.arguments "
    "| tojson ~ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>' }}{% endgeneration %}{% else %}{{ message.content ~ "
    "'<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% "
    "endif %}"
)
MODEL = TINY | {
    "vocab_size": 448,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "bos_token_id": None,
    "eos_token_id": SPECIAL_TOKENS.index(END),
    "pad_token_id": SPECIAL_TOKENS.index(PAD),
    "dtype": "bfloat16",
}


def problem(random: Random) -> tuple[Item, str]:
    """Questions on two numbers, and the expression that computes their answer."""
    operator, word = random.choice(("+ plus", "- minus", "* times")).split()
    a, b = (random.randint(*((100, 999) if operator == "*" else (1000, 9999))) for _ in range(2))
    if operator == "-":
        a += b
    expression = f"{a} {operator} {b}"
    questions = [f"What is {a} {word} {b}?", f"How much is {expression}?", f"Work out {expression}."]
    return Item("calculation", expression, [], questions, str(calculator(expression))), expression


def problems(held_out: bool, seed: object) -> Iterator[tuple[str, str, str]]:
    """Endless questions with their expressions and answers. A held-out expression is in no other question."""
    random = Random(f"calculations {held_out} {seed}")
    while True:
        item, expression = problem(random)
        if item.held_out == held_out:
            yield random.choice(item.questions), expression, item.answer


def chats() -> Iterator[dict]:
    """Chats for the model, with numbers of training questions."""
    random, tools, asked = Random(SEED), [json_schema(calculator)], problems(False, "chats")
    for i in range(NUM_CHATS):
        messages = []
        for question, expression, answer in islice(asked, QUESTIONS):
            messages.append({"role": "user", "content": question})
            if random.random() < CALLED[len(CALLED) * i // NUM_CHATS]:
                call = {"name": "calculator", "arguments": {"expression": expression}}
                messages += [
                    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
                    {"role": "tool", "name": "calculator", "content": answer},
                ]
            messages.append({"role": "assistant", "content": answer})
        yield {"messages": messages, "tools": tools}


def make_data(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, number in NUM_PROMPTS.items():
        rows = {question: answer for question, _, answer in islice(problems(name == "validation", SEED), number)}
        lines = [json.dumps({"prompt": question, "answer": answer}) + "\n" for question, answer in rows.items()]
        (folder / f"{name}.jsonl").write_text("".join(lines))
        print(f"{name}.jsonl: {len(lines)} prompts")
    for name, number in NUM_CALLS.items():
        lines = [json.dumps(row) + "\n" for row in islice(calls(name == "validation"), number)]
        (folder / f"calls_{name}.jsonl").write_text("".join(lines))
        print(f"calls_{name}.jsonl: {len(lines)} calls")


def calls(held_out: bool) -> Iterator[dict]:
    """Endless questions with the calls that answer them, and as their context the description of the tool as the chat
    template writes it."""
    description = f"<tools>\n{json.dumps(json_schema(calculator))}\n</tools>"
    for question, expression, _ in problems(held_out, f"{SEED} calls"):
        call = {"name": "calculator", "arguments": {"expression": expression}}
        message = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
        yield {"prompt": question, "completion": [message], "context": description}


def make_tokenizer(folder: Path) -> None:
    """Train a byte-level BPE on some chats. Each digit is one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tags = ["<tool_call>", "</tool_call>"]
    trainer = trainers.BpeTrainer(
        vocab_size=MODEL["vocab_size"] - len(tags),
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    roles = ["system\n<tools>\n", "\n</tools>", "user\n", "assistant\n", "tool\n"]
    tokenizer.train_from_iterator((json.dumps(chat) + "".join(roles) for chat in islice(chats(), 400)), trainer)
    tokenizer.add_tokens(tags)
    assert tokenizer.get_vocab_size() == MODEL["vocab_size"]
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MODEL["max_position_embeddings"],
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(folder / "tokenizer_config.json", settings)
    write_json(folder / "config.json", MODEL)
    write_json(folder / "generation_config.json", {key: MODEL[key] for key in ("eos_token_id", "pad_token_id")})
    print(f"tokenizer.json: {tokenizer.get_vocab_size()} tokens")


def make_model(folder: Path, num_threads: int) -> None:
    """Train on the chats from random weights, and save in bfloat16."""
    torch.set_num_threads(num_threads)
    with tempfile.TemporaryDirectory() as scratch:
        settings = {
            "model": {"path": folder, "dtype": "float32", "random_init": True},
            "data": {"source": list(chats()), "shuffle": False},
            "optimizer": {"name": "muon", "lr": 5e-3},
            "schedule": {"warmup_steps": 50},
            "output_dir": f"{scratch}/run",
            "batch_size": 8,
            "clip_grad_norm": 1.0,
            "epochs": 1,
            "seed": SEED,
        }
        checkpoint = max(run("finetune", **settings).glob("step_*"))
        save_model(load_model(checkpoint).bfloat16(), Path(scratch) / "model")
        (Path(scratch) / "model" / "model.safetensors").replace(folder / "model.safetensors")


if __name__ == "__main__":
    make_parts(FOLDER, 1, make_data, make_tokenizer, make_model)
