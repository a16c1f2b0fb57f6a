"""Compare the planner's memory with figures that other projects publish. Runs on one CPU.

    python benchmarks/published_memory.py
    python benchmarks/published_memory.py --only unsloth

Each figure is the memory that another project says one training run needs on one card. The planner runs our nearest
settings: same model, method, batch and length, with activation checkpointing. If the project does not state the length,
ours is 2,048 tokens. Nothing of the others is run here. A project's GB may be 10^9 or 2^30 bytes; the comparison takes
10^9.

Writes `results/published_memory_<hardware>.json` after each figure. With --only, other figures keep their numbers.
"""

import json
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from measure import overrides
from results import RESULTS, console, describe_hardware, print_result, write_result
from shapes import EMBEDDED_MODEL, write_model_folder

from lean_ft.plan.devices import CUDA_CONTEXT_BYTES, find_device
from lean_ft.plan.rehearsal import rehearse
from lean_ft.settings.text import load_config
from lean_ft.system.catalog import find_recipe, load_recipe

COLUMNS = ["figure", "their settings", "published", "ours: allocated", "ours: with driver", "ours / published"]
GIB, GB = 2**30, 10**9
TORCHTUNE = "https://github.com/pytorch/torchtune/blob/0031bfb080bd/README.md"
UNSLOTH = "https://github.com/unslothai/unsloth/blob/000252c947fe/README.md"
UNSLOTH_SIZES = "https://unsloth.ai/docs/get-started/fine-tuning-for-beginners/unsloth-requirements"
UNSLOTH_QWEN = "https://unsloth.ai/docs/models/qwen3.5/fine-tune"
UNSLOTH_MIXTURES = "https://unsloth.ai/docs/new/faster-moe"
FACTORY = "https://github.com/hiyouga/LLaMA-Factory/blob/00409ff28a30/README.md"
FACTORY_WIKI = "https://github.com/hiyouga/LLaMA-Factory/wiki/Performance-comparison"
AXOLOTL = "https://github.com/axolotl-ai-cloud/axolotl/blob/15f7910d33b4/examples/llama-3/README.md"
QWEN_3GB = "https://thread-easy.com/pt/thread/1998908056126812250"

_LLAMA2_7B = {
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "vocab_size": 32_000,
    "max_position_embeddings": 131_072,
    "rope_scaling": None,
}


@dataclass(frozen=True)
class Figure:
    """A published figure in bytes. is_allocated: the allocator's peak, without the driver. settings: ours."""

    label: str
    theirs: str
    published: float
    source: str
    shape: str
    settings: dict[str, Any] = field(default_factory=dict)
    unit: str = "GB"
    is_allocated: bool = False


def figures() -> list[Figure]:
    base = {"data.packing": "bfd", "memory.activation_checkpointing": "full", "optimizer.name": "adamw_8bit"}
    base |= {"memory.loss_chunk_tokens": 1024}
    four_bits = {"lora.quantize": "nf4"}

    def adapter(rank: int, rows: int, length: int) -> dict[str, Any]:
        return base | {"lora.rank": rank, "batch_size": rows, "data.max_length": length}

    def full(rows: int, length: int) -> dict[str, Any]:
        return base | {"batch_size": rows, "data.max_length": length, "optimizer.in_backward": True}

    long = {"memory.activation_offload": True, "memory.tile_mlp": 8}
    packed = "2 x 2,048 packed, compiled"
    tune = {"source": TORCHTUNE, "shape": "llama3_1_8b", "unit": "GiB", "is_allocated": True}
    found = [
        Figure("Llama 3.1 8B full", packed, 18.9, settings=full(2, 2048) | {"optimizer.state": "streamed"}, **tune),
        Figure("Llama 3.1 8B LoRA", packed, 16.2, settings=adapter(8, 2, 2048), **tune),
        Figure("Llama 3.1 8B QLoRA", packed, 7.4, settings=adapter(8, 2, 2048) | four_bits, **tune),
    ]
    minimum = "batch and length not stated, an absolute minimum"
    for shape, name, quantized, plain in (
        ("llama3_2_3b", "3B", 3.5, 8),
        ("llama3_1_8b", "8B", 6, 22),
        ("phi4_14b", "14B", 8.5, 33),
    ):
        for method, published, own in (("QLoRA", quantized, four_bits), ("LoRA", plain, {})):
            settings = adapter(16, 1, 2048) | own
            found.append(Figure(f"{name} {method}", minimum, published, UNSLOTH_SIZES, shape, settings))
    settings = adapter(16, 1, 2048) | four_bits
    found.append(Figure("Qwen3 4B QLoRA", "not stated; quoted by a third party", 3, QWEN_3GB, "qwen3_4b", settings))
    wiki = {1024: 5, 4096: 7, 16_384: 10, 65_536: 25, 100_000: 37}
    for length, published in wiki.items():
        settings = adapter(8, 1, length) | four_bits | (long if length > 4096 else {})
        theirs = f"Unsloth and FlashAttention 2, rank 8, 1 x {length:,}"
        found.append(Figure("Llama 2 7B QLoRA", theirs, published, FACTORY_WIKI, "llama2_7b", settings))
    for length, published in {2972: 8, 40_724: 16, 78_475: 24, 342_733: 80}.items():
        settings = adapter(32, 1, length) | four_bits | (long if length > 4096 else {})
        theirs = f"rank 32, the longest row of that card: 1 x {length:,}"
        found.append(Figure("Llama 3.1 8B QLoRA", theirs, published, UNSLOTH, "llama3_1_8b", settings))
    settings = adapter(8, 4, 1024)
    theirs = "Unsloth and FlashAttention 2, rank 8, 4 x 1,024"
    found.append(Figure("Llama 2 7B LoRA", theirs, 16, FACTORY_WIKI, "llama2_7b", settings))
    found.append(Figure("Llama 2 7B QLoRA", theirs, 7, FACTORY_WIKI, "llama2_7b", settings | four_bits))
    found += [
        Figure("7B full, pure bf16", "an estimate", 60, FACTORY, "llama2_7b", full(1, 2048)),
        Figure("Llama 3 8B full", "1 x 8,192 packed, paged 8-bit AdamW", 48, AXOLOTL, "llama3_1_8b", full(1, 8192)),
    ]
    for shape, name, published in (("qwen3_5_2b", "2B", 5), ("qwen3_5_4b", "4B", 10), ("qwen3_5_9b", "9B", 22)):
        settings = adapter(16, 1, 2048)
        found.append(Figure(f"Qwen3.5 {name} LoRA", "not stated", published, UNSLOTH_QWEN, shape, settings))
    attention = {"lora.targets": "[q_proj, k_proj, v_proj, o_proj]", "memory.frozen_embeddings": "host"}
    attention |= adapter(16, 1, 2048)
    lean = {"memory.activation_offload": True, "memory.tile_mlp": 4}
    found += [
        Figure("gpt-oss 20B QLoRA", "not stated", 12.8, UNSLOTH_MIXTURES, "gpt_oss_20b", attention | four_bits | lean),
        Figure("Qwen3 30B-A3B QLoRA", "not stated", 17.5, UNSLOTH, "qwen3_30b_a3b", attention | four_bits),
        Figure("Qwen3 30B-A3B LoRA", "not stated", 63, UNSLOTH_MIXTURES, "qwen3_30b_a3b", attention),
        Figure("Qwen3.5 35B-A3B LoRA", "not stated", 74, UNSLOTH_QWEN, "qwen3_5_35b_a3b", attention),
    ]
    return sorted(found, key=lambda figure: "memory.tile_mlp" in figure.settings)  # their plans take longest


def planned(figure: Figure) -> dict[str, int]:
    """Our peak and what the card needs for it, in bytes."""
    with tempfile.TemporaryDirectory(prefix="lean_ft_memory_") as name:
        shape = "llama3_1_8b" if figure.shape == "llama2_7b" else figure.shape
        folder = write_model_folder(shape, Path(name) / "model", EMBEDDED_MODEL)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config |= _LLAMA2_7B if figure.shape == "llama2_7b" else {}
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        own = {"model.path": folder, "model.random_init": True, "data.source": "not-read.jsonl"}
        own |= {"output_dir": Path(name) / "run", **figure.settings}
        recipe = load_recipe(find_recipe("finetune" if "lora.rank" in own else "full_finetune_single_device"))
        found = rehearse(recipe, load_config(recipe.Config, None, overrides(own)), find_device("A100 80GB"))
    return {"peak_bytes": found.peak_bytes, "needed_bytes": found.reserved_bytes + CUDA_CONTEXT_BYTES}


def describe(result: dict[str, Any]) -> str:
    return (
        "memory that other projects publish, next to lean_ft's planned memory for an A100 without compilation; ours "
        "has checkpointing and 8-bit AdamW, full fine-tuning also steps in backward, and adapters on rows of 16,384 "
        "tokens and more, and on gpt-oss, offload activations and tile the MLP; mixtures have adapters on attention "
        "and embeddings on the host; with driver: reserved by the allocator, plus 0.5 GiB. Nothing is measured here: "
        "planned"
    )


def table_cells(result: dict[str, Any]) -> list[list[str]]:
    cells = []
    for row in result["rows"]:
        published = row["published"] * (GIB if row["unit"] == "GiB" else GB)
        ours = row["peak_bytes"] if row["is_allocated"] else row["needed_bytes"]
        project = (
            "Unsloth" if "unsloth" in row["source"] else row["source"].split("/")[4 if "github" in row["source"] else 2]
        )
        cells.append([
            f"[{project}]({row['source']}): {row['label']}",
            row["theirs"],
            f"{row['published']:g} {row['unit']}",
            f"{row['peak_bytes'] / GIB:.2f} GiB",
            f"{row['needed_bytes'] / GIB:.2f} GiB",
            f"{ours / published:.2f}",
        ])  # fmt: skip
    return cells


def main(
    only: Annotated[str, typer.Option(help="Only figures whose source or label contains this.")] = "",
    results_dir: Annotated[Path, typer.Option(help="Folder for the JSON result.")] = RESULTS,
) -> None:
    """Plan every figure."""
    hardware = describe_hardware("cpu")
    path = results_dir / f"published_memory_{hardware.slug}.json"
    before = json.loads(path.read_text(encoding="utf-8"))["rows"] if only and path.exists() else []
    rows = {(row["source"], row["label"], row["theirs"]): row for row in before}
    for figure in figures():
        if only.lower() not in f"{figure.source} {figure.label}".lower():
            continue
        row = {"status": "ok", **asdict(figure), **planned(figure)}
        rows[figure.source, figure.label, figure.theirs] = row
        console.print(f"{figure.label}, {figure.theirs}: {row['needed_bytes'] / GIB:.2f} GiB", markup=False)
        path = write_result(
            "published_memory", benchmark="published_memory", hardware=hardware, settings={}, rows=[*rows.values()],
            folder=results_dir
        )  # fmt: skip
    print_result(path, describe, COLUMNS, table_cells)


if __name__ == "__main__":
    typer.run(main)
