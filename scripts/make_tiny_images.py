"""Make everything in lean_ft/assets/tiny-images: pictures of dots with questions, tokenizer and a small model that
cannot see yet.

    python scripts/make_tiny_images.py                 # all of it
    python scripts/make_tiny_images.py --only data     # only the rows; or `tokenizer`, `model`

The model has the layers of Qwen3-VL. It is trained here to answer by guessing: each picture has the answers of another
picture. So it knows the form of an answer, and its accuracy on held-out pictures is that of chance. The seed determines
the tokenizer and the rows to the byte. It determines the weights only for one machine and number of threads.
"""

import base64
import gzip
import io
import json
import tempfile
from itertools import combinations
from pathlib import Path
from random import Random

import torch
from make_tiny import make_parts, write_json
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from lean_ft.models import load_model, save_model
from lean_ft.notebook import run

SEED = 0
NUM_PICTURES = {"train": 2400, "validation": 200}  # with two questions each
FOLDER = Path(__file__).parents[1] / "lean_ft" / "assets" / "tiny-images"

COLORS = {
    "red": (220, 40, 40), "green": (40, 200, 40), "blue": (40, 60, 220), "yellow": (230, 220, 50),
    "purple": (200, 60, 200),
    "cyan": (60, 210, 210),
}  # fmt: skip
COUNTS = ("one", "two", "three", "four")
SIDE, CELL = 32, 8  # pixels of a picture and of the square that holds one dot
QUESTIONS = {"color": "What color are the dots?", "count": "How many dots are there?"}

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
IMAGE = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
SPECIAL_TOKENS = [PAD, START, END, *IMAGE]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.content is string %}{% set content = message.content %}{% else %}{% set content %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endset %}{% endif %}"
    "{% if message.role == 'assistant' %}{% generation %}{{ content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
VOCAB_SIZE = 320
MODEL = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "image_token_id": SPECIAL_TOKENS.index("<|image_pad|>"),
    "video_token_id": SPECIAL_TOKENS.index("<|video_pad|>"),
    "vision_start_token_id": SPECIAL_TOKENS.index("<|vision_start|>"),
    "vision_end_token_id": SPECIAL_TOKENS.index("<|vision_end|>"),
    "tie_word_embeddings": True,
    "text_config": {
        "model_type": "qwen3_vl_text",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True
        },
        "attention_bias": False,
        "initializer_range": 0.1,
        "bos_token_id": None,
        "eos_token_id": SPECIAL_TOKENS.index(END),
        "pad_token_id": SPECIAL_TOKENS.index(PAD),
        "dtype": "bfloat16",
    },
    "vision_config": {
        "model_type": "qwen3_vl",
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "in_channels": 3,
        "patch_size": CELL,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 96,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [],
        "hidden_act": "gelu_pytorch_tanh",
        "initializer_range": 0.1,
    },
}  # fmt: skip
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "processor_class": "Qwen3VLProcessor",
    "patch_size": CELL,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": SIDE**2, "longest_edge": 16 * SIDE**2},  # numbers of pixels: an image has 4 to 64 tokens
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "resample": 3,
}


def picture(random: Random, color: str, cells: tuple[int, ...]) -> bytes:
    """A PNG file with a round dot in each of these cells of a 4 x 4 grid, in shades of one color on a dark
    background."""
    image = Image.new("P", (SIDE, SIDE), 0)
    shades = [(random.randrange(50),) * 3]
    draw = ImageDraw.Draw(image)
    for cell in cells:
        left, top = (CELL * n + random.randrange(3) for n in reversed(divmod(cell, SIDE // CELL)))
        draw.ellipse((left, top, left + 5, top + 5), fill=len(shades))
        shades.append(tuple(min(255, max(0, c + random.randint(-25, 25))) for c in COLORS[color]))
    image.putpalette([c for shade in shades for c in shade])
    file = io.BytesIO()
    image.save(file, "PNG", bits=4 if len(shades) > 4 else 2, optimize=True)
    return file.getvalue()


def rows(name: str, guessed: bool = False) -> list[dict]:
    """Two rows for each picture. No color has dots in the same cells in training and held-out pictures.

    guessed: the answers are those of another picture.
    """
    random, kinds = Random(SEED), {}
    for number in range(1, len(COUNTS) + 1):
        of_number = [(color, cells) for color in COLORS for cells in combinations(range(16), number)]
        random.shuffle(of_number)
        held_out = len(of_number) // 4
        kinds[number] = of_number[:held_out] if name == "validation" else of_number[held_out:]
    random, written = Random(f"{SEED} {name}"), []
    for i in range(NUM_PICTURES[name]):
        number = 1 + i % len(COUNTS)
        color, cells = random.choice(kinds[number])
        url = "data:image/png;base64," + base64.b64encode(picture(random, color, cells)).decode()
        if guessed:
            color, number = random.choice(list(COLORS)), random.randint(1, len(COUNTS))
        asked = [("color", color), ("count", COUNTS[number - 1])]
        random.shuffle(asked)
        for question, answer in asked:
            messages = [
                {"role": "user", "content": QUESTIONS[question]},
                {"role": "assistant", "content": answer},
            ]
            written.append({"messages": messages, "images": [url]})
    return written


def make_data(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in NUM_PICTURES:
        lines = [json.dumps(row) + "\n" for row in rows(name)]
        (folder / f"{name}.jsonl.gz").write_bytes(gzip.compress("".join(lines).encode(), mtime=0))
        print(f"{name}.jsonl.gz: {len(lines)} rows")


def make_tokenizer(folder: Path) -> None:
    """A byte-level BPE whose merges are those of the questions and answers."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = ["user\n", "assistant\n", *QUESTIONS.values(), *COLORS, *COUNTS] * 2
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "vision_bos_token": "<|vision_start|>",
        "vision_eos_token": "<|vision_end|>",
    }
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)  # transformers' processors look for it here
    write_json(folder / "tokenizer_config.json", settings)
    write_json(folder / "config.json", MODEL)
    write_json(folder / "preprocessor_config.json", PROCESSOR)
    ends = {"eos_token_id": SPECIAL_TOKENS.index(END), "pad_token_id": SPECIAL_TOKENS.index(PAD)}
    write_json(folder / "generation_config.json", ends)
    print(f"tokenizer.json: {tokenizer.get_vocab_size()} tokens")


def make_model(folder: Path, num_threads: int) -> None:
    """Random weights, then 60 steps in which only the language model trains, on pictures with the answers of others."""
    torch.set_num_threads(num_threads)
    with tempfile.TemporaryDirectory() as scratch:
        settings = {
            "model": {"path": folder, "dtype": "float32", "images": "frozen", "random_init": True},
            "data": {"source": rows("train", guessed=True)},
            "optimizer": {"lr": 2e-3},
            "output_dir": f"{scratch}/run",
            "batch_size": 32,
            "max_steps": 60,
            "seed": SEED,
        }
        checkpoint = max(run("full_finetune_single_device", **settings).glob("step_*"))
        save_model(load_model(checkpoint, images="train").bfloat16(), Path(scratch) / "model")
        (Path(scratch) / "model" / "model.safetensors").replace(folder / "model.safetensors")


if __name__ == "__main__":
    make_parts(FOLDER, 1, make_data, make_tokenizer, make_model)
