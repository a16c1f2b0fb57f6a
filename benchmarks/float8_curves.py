"""Compare the loss of LoRA on frozen weights in float8 with LoRA on bfloat16 weights. Runs on one CPU.

    python benchmarks/float8_curves.py
    python benchmarks/float8_curves.py --only qwen3 --seeds 5

Each base model is small, and is trained for some steps on the embedded model's chats. LoRA then trains on its
arithmetic problems, once per seed and row of the table. A seed draws the adapter and the order of the data, and is the
same in all rows. Losses are means of the last steps. The noise is the standard deviation of bfloat16's loss over the
seeds. On a CPU, float8 products have a GPU's rounding of the factors, and sums in float32.

Writes `results/float8_curves_<hardware>.json` after each model; other models keep their numbers.
"""

import json
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from results import RESULTS, console, describe_hardware, print_result, write_result
from shapes import EMBEDDED_MODEL, TOKENIZER_FILES
from torch import Tensor, nn

from lean_ft import load_model, load_tokenizer, save_model
from lean_ft.losses import linear_cross_entropy
from lean_ft.memory import float8_products
from lean_ft.models import Decoder
from lean_ft.peft.lora import load_with_adapter
from lean_ft.settings import LoRAConfig, ModelConfig

ROWS, TOKENS, LAST_STEPS = 4, 64, 20
COLUMNS = [
    "model",
    "frozen weights",
    "products",
    "loss",
    "difference from bfloat16",
    "noise",
    "largest difference of a curve",
]
# Frozen weights, and whether they multiply in float8.
KINDS = {"bfloat16": ("none", False), "stored": ("float8", False), "products": ("none", True), "both": ("float8", True)}

_SIZES = {
    "vocab_size": 768,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"model_type": "qwen3", "num_hidden_layers": 4},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 192},
    "gpt_oss": {
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 192,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}


def batches(texts: str, seed: int) -> Iterator[Tensor]:
    """Endless batches (ROWS, TOKENS + 1) from random places of the texts of a file."""
    file, tokenizer = EMBEDDED_MODEL.parent / "data" / texts, load_tokenizer(EMBEDDED_MODEL)
    ids = tokenizer.encode(file.read_text(encoding="utf-8"))
    stream, generator = torch.tensor(ids), torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(0, len(ids) - TOKENS - 1, (ROWS, 1), generator=generator)
        yield stream[starts + torch.arange(TOKENS + 1)]


def train(model: Decoder, texts: str, seed: int, steps: int, lr: float) -> list[float]:
    """Train what requires gradients, and return the loss of each step."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, lr=lr, weight_decay=0.0), []
    for batch, _ in zip(batches(texts, seed), range(steps), strict=False):
        hidden = model(batch[:, :-1], return_hidden=True)
        loss = linear_cross_entropy(hidden, model.output_weight, batch[:, 1:]) / (ROWS * TOKENS)
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def write_base(name: str, folder: Path, steps: int) -> Path:
    """Train a base model from random weights, and write it in bfloat16."""
    config = folder / "config"
    config.mkdir()
    (config / "config.json").write_text(json.dumps({**_SIZES, **MODELS[name], "dtype": "bfloat16"}), encoding="utf-8")
    for file in TOKENIZER_FILES:
        if (EMBEDDED_MODEL / file).is_file():
            (config / file).write_bytes((EMBEDDED_MODEL / file).read_bytes())
    torch.manual_seed(0)
    model = load_model(config, random_init=True)
    losses = train(model, "train.jsonl", 0, steps, lr=3e-3)
    console.print(f"{name}: base trained from {losses[0]:.3f} to {losses[-1]:.3f}")
    save_model(model.to(torch.bfloat16), folder / "base")
    return folder / "base"


def compare(name: str, base: Path, seeds: int, steps: int) -> list[dict[str, Any]]:
    """The rows of one model: LoRA's losses of each kind, by seed."""
    rows, sizes = [], set[int]()
    for kind, (quantize, in_float8) in KINDS.items():
        curves = []
        for seed in range(seeds):
            torch.manual_seed(seed)
            lora = LoRAConfig.model_validate({"rank": 8, "quantize": quantize})
            settings = ModelConfig.model_validate({"path": str(base), "dtype": "bfloat16"})
            model = load_with_adapter(settings, lora)
            if in_float8:
                float8_products(model, emulate=True)
            sizes.add(sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad))
            assert len(sizes) == 1, f"{kind} trains other adapters"
            curves.append([round(loss, 5) for loss in train(model, "problems_train.jsonl", seed, steps, lr=2e-3)])
        last = statistics.fmean(statistics.fmean(curve[-LAST_STEPS:]) for curve in curves)
        console.print(f"{name} {kind}: {last:.4f}")
        rows.append({"status": "ok", "model": name, "kind": kind, "curves": curves})
    return rows


def describe(result: dict[str, Any]) -> str:
    settings = result["settings"]
    return (
        f"LoRA of rank 8 on all linear layers, {settings['steps']} steps of {ROWS} x {TOKENS} tokens, "
        f"{settings['seeds']} seeds; the loss is the mean of the last {LAST_STEPS} steps; noise is the standard "
        "deviation of bfloat16's loss over the seeds"
    )


def table_cells(result: dict[str, Any]) -> list[list[str]]:
    cells, plain = [], {}
    for row in result["rows"]:
        means = torch.tensor(row["curves"])  # (seeds, steps)
        ends = means[:, -LAST_STEPS:].mean(1)
        if row["kind"] == "bfloat16":
            plain = {"curve": means.mean(0), "loss": ends.mean(), "noise": ends.std()}
        quantize, in_float8 = KINDS[row["kind"]]
        cells.append([
            row["model"],
            "float8" if quantize == "float8" else "bfloat16",
            "float8" if in_float8 else "bfloat16",
            f"{ends.mean():.4f}",
            "-" if row["kind"] == "bfloat16" else f"{ends.mean() - plain['loss']:+.4f}",
            f"{plain['noise']:.4f}",
            "-" if row["kind"] == "bfloat16" else f"{(means.mean(0) - plain['curve']).abs().max():.4f}",
        ])  # fmt: skip
    return cells


def main(
    only: Annotated[str, typer.Option(help=f"Models, comma-separated: {', '.join(MODELS)}.")] = "",
    seeds: Annotated[int, typer.Option(help="Runs per row.")] = 3,
    steps: Annotated[int, typer.Option(help="Steps of LoRA.")] = 100,
    base_steps: Annotated[int, typer.Option(help="Steps of the base model.")] = 100,
) -> None:
    """Train LoRA on frozen weights in bfloat16 and in float8, and compare the losses."""
    hardware = describe_hardware("cpu")
    path = RESULTS / f"float8_curves_{hardware.slug}.json"
    for name in [name.strip() for name in only.split(",") if name.strip()] or MODELS:
        with tempfile.TemporaryDirectory(prefix="lean_ft_float8_") as folder:
            rows = compare(name, write_base(name, Path(folder), base_steps), seeds, steps)
        before = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
        others = [row for row in before if row["model"] != name]
        write_result(
            "float8_curves",
            benchmark="float8_curves",
            hardware=hardware,
            settings={"steps": steps, "seeds": seeds, "base_steps": base_steps},
            rows=sorted([*others, *rows], key=lambda row: [*MODELS].index(row["model"])),
        )
    print_result(path, describe, COLUMNS, table_cells)


if __name__ == "__main__":
    typer.run(main)
