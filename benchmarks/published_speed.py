"""Compare the planner's speeds with published figures. Runs on one CPU.

    python benchmarks/published_speed.py
    python benchmarks/published_speed.py --only torchtune

Each figure is a training speed, the time of one operation, or the time of a round of GRPO (sampling, scoring, learning)
that another project measured on a card. The planner runs our nearest settings: same model, batch, length, checkpointing
and adapter. Every second speed and operation in sorted order was held back when the shares of `lean_ft/plan/devices.py`
were chosen; no round took part. A ratio compares two neighboring figures of one source on one card.

Excluded: torchtune's Llama 3.1 8B on one "A6000" (2,579 and 4,699 tokens/s), which is more than an RTX A6000's
published rate allows; figures in float8; and rows of unknown length.

Writes `results/published_speed_<hardware>.json`. With --only, other figures keep their numbers.
"""

import itertools
import json
import math
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from measure import rehearse_recipe
from results import RESULTS, console, describe_hardware, print_result, write_result
from shapes import EMBEDDED_MODEL, write_model_folder
from torch import Tensor
from torch.nn import functional as F

COLUMNS = ["figure", "card", "published", "planned", "planned / published", "held back"]
TORCHTUNE = "https://github.com/pytorch/torchtune/blob/bd2a0fc7c314/README.md"
AUTOMODEL = "https://github.com/NVIDIA-NeMo/Automodel/blob/36044ad3d139/docs/performance-summary.mdx"
QWEN = "https://github.com/QwenLM/Qwen/blob/2df8e8ac450f/README.md"
TITAN = "https://github.com/pytorch/torchtitan/blob/041336434916/docs/performance.md"
TITAN_H100 = "https://github.com/pytorch/torchtitan/blob/b5bcd76c66d0/benchmarks/llama3_h100_202412_torchtitan.md"
NEMO = "https://github.com/NVIDIA-NeMo/RL/blob/{}/docs/about/performance-summary.md"
LIGER = "https://github.com/linkedin/Liger-Kernel/blob/ead96b618e5c/benchmark/data/all_benchmark_data.csv"

_CHANGES: dict[str, dict[str, Any]] = {  # shapes that differ from one of shapes.py in these fields
    "qwen_1_8b": {
        "hidden_size": 2048,
        "intermediate_size": 5504,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "vocab_size": 151_936,
        "max_position_embeddings": 8192,
    },
    "llama2_13b": {
        "hidden_size": 5120,
        "intermediate_size": 13_824,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 40,
        "vocab_size": 32_000,
        "max_position_embeddings": 4096,
    },
}
_CHANGES["qwen_7b"] = _CHANGES["qwen_1_8b"] | {
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
}
_BASES = {"qwen_1_8b": "qwen2_5_7b", "qwen_7b": "qwen2_5_7b", "llama2_13b": "llama3_1_8b"}


@dataclass(frozen=True)
class Figure:
    """A published figure: tokens/s of each card, milliseconds of an operation, or seconds of a round. settings:
    ours."""

    label: str
    card: str
    source: str
    published: float
    shape: str = ""
    recipe: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    num_gpus: int = 1
    operation: Callable[[], Any] | None = None

    @property
    def unit(self) -> str:
        if self.operation is not None:
            return "ms"
        return "s" if self.recipe == "grpo" else "tokens/s"


def figures() -> list[Figure]:
    """All figures in sorted order, the rounds last."""
    found = [*_torchtune(), *_automodel(), *_qwen(), *_titan(), *_liger()]
    return [*sorted(found, key=lambda figure: (figure.source, figure.card, figure.label)), *_rounds()]


def is_held_back(index: int) -> bool:
    """Whether the figure of this index in `figures` took no part in choosing the planner's shares."""
    return index % 2 == 1 or figures()[index].unit == "s"


_FULL, _LORA = "full_finetune_single_device", "lora_finetune_single_device"
_ALL_LINEAR = {"lora.rank": 16}


def _torchtune() -> list[Figure]:
    packed = {"data.packing": "bfd", "data.max_length": 4096, "batch_size": 2, "memory.loss_chunk_tokens": 0}
    ladder: list[tuple[str, float, dict[str, Any]]] = [
        ("1 packed", 7075, {}),
        ("2 + compile", 8998, {"compile": True}),
        ("3 + chunked loss", 9174, {"memory.loss_chunk_tokens": 1024}),
        ("4 + checkpointing", 7210, {"memory.activation_checkpointing": "full"}),
        ("5 + step in backward", 7309, {"optimizer.in_backward": True}),
        ("6 + activation offload", 7301, {"memory.activation_offload": True}),
        ("7 + 8-bit AdamW", 6960, {"optimizer.name": "adamw_8bit"}),
    ]
    found, settings = [], packed
    for label, speed, added in ladder:
        settings = settings | added
        found.append(Figure(f"3B {label}", "A100 80GB", TORCHTUNE, speed, "llama3_2_3b", _FULL, settings))
    adapter = packed | ladder[1][2] | ladder[2][2] | ladder[3][2] | ladder[5][2] | {"lora.rank": 64}
    for label, speed, added in (("8 LoRA", 8210, {}), ("9 QLoRA", 8035, {"lora.quantize": "nf4"})):
        found.append(Figure(f"3B {label}", "A100 80GB", TORCHTUNE, speed, "llama3_2_3b", _LORA, adapter | added))
    card = packed | {"data.max_length": 2048, "compile": True, "memory.activation_checkpointing": "full"}
    card |= {"memory.loss_chunk_tokens": 1024}
    rank = {"lora.rank": 8}
    full = {"optimizer.in_backward": True, "optimizer.name": "adamw_8bit", "optimizer.state": "streamed"}
    return [
        *found,
        Figure("8B full, states paged", "RTX 4090", TORCHTUNE, 1650, "llama3_1_8b", _FULL, card | full),
        Figure("8B LoRA", "RTX 4090", TORCHTUNE, 3083, "llama3_1_8b", _LORA, card | rank),
        Figure("8B QLoRA", "RTX 4090", TORCHTUNE, 2413, "llama3_1_8b", _LORA, card | rank | {"lora.quantize": "nf4"}),
    ]


def _automodel() -> list[Figure]:
    settings = {"data.packing": "bfd", "data.max_length": 4096, "batch_size": 2, "gradient_accumulation_steps": 16}
    settings |= {"lora.rank": 16, "memory.loss_chunk_tokens": 0}
    return [
        Figure("8B LoRA", "H100", AUTOMODEL, 12_472.87, "llama3_1_8b", _LORA, settings),
        Figure("Qwen2.5 7B LoRA", "H100", AUTOMODEL, 14_110.05, "qwen2_5_7b", _LORA, settings),
    ]


def _qwen() -> list[Figure]:
    """Seconds per step of 8 rows, one at a time, on one A100."""
    lengths = (256, 512, 1024, 2048, 4096, 8192)
    seconds = {"1_8b": (1.0, 1.0, 1.1, 1.7, 3.3, 6.8), "7b": (1.2, 1.5, 2.8, 5.2, 10.1, 21.3)}
    found = []
    for size, own in seconds.items():
        for length, second in zip(lengths, own, strict=True):
            settings = {"data.packing": "bfd", "data.max_length": length, "batch_size": 1, "lora.rank": 64}
            settings |= {"gradient_accumulation_steps": 8, "memory.activation_checkpointing": "full"}
            settings |= {"memory.loss_chunk_tokens": 0}
            label = f"{size.replace('_', '.').upper()} LoRA, {length:4} tokens"
            found.append(Figure(label, "A100 80GB", QWEN, 8 * length / second, f"qwen_{size}", _LORA, settings))
    return found


def _titan() -> list[Figure]:
    long = {
        "data.packing": "bfd",
        "data.max_length": 8192,
        "batch_size": 1,
        "compile": True,
        "memory.loss_chunk_tokens": 0,
    }
    short = long | {"data.max_length": 4096, "batch_size": 2}
    layers = {"memory.activation_checkpointing": "every_n"}
    products = {"memory.activation_checkpointing": "selective", "memory.selective_keeps": "products"}
    two = long | {"batch_size": 2} | products
    return [
        Figure(
            "8B, half of the layers, 64 GPUs", "A100 80GB", TITAN, 2904, "llama3_1_8b", "finetune", long | layers, 64
        ),
        Figure("8B, selective, 64 GPUs", "A100 80GB", TITAN, 2973, "llama3_1_8b", "finetune", long | products, 64),
        Figure("13B, 64 GPUs", "A100 80GB", TITAN, 2162, "llama2_13b", "finetune", short, 64),
        Figure(
            "13B, half of the layers, 64 GPUs", "A100 80GB", TITAN, 1914, "llama2_13b", "finetune", short | layers, 64
        ),
        Figure("13B, selective, 64 GPUs", "A100 80GB", TITAN, 1904, "llama2_13b", "finetune", short | products, 64),
        Figure("8B, 8 GPUs", "H100", TITAN_H100, 5762, "llama3_1_8b", "finetune", two | {"compile": False}, 8),
        Figure("8B, compile, 8 GPUs", "H100", TITAN_H100, 6667, "llama3_1_8b", "finetune", two, 8),
    ]


def _rounds() -> list[Figure]:
    """Rounds of 64 prompts with 32 completions each, by vLLM and Megatron, of up to 4,096 tokens with their prompts.
    All of ours have the published mean length; the prompts' share of it, 128 tokens, is an assumption."""
    v04, v05 = (NEMO.format(commit) for commit in ("cff17f83b", "108bffdab"))
    found = []
    for label, card, num_gpus, source, length, seconds in (
        ("8B GRPO, 16 GPUs", "H100", 16, v04, 1060, 97.7),
        ("8B GRPO, 16 GPUs", "H100", 16, v05, 1019, 92.8),
        ("8B GRPO, 8 GPUs", "B200", 8, v05, 1066, 91.0),  # GB200
    ):
        settings: dict[str, Any] = {"rewards": ["length"], "generation.num_answers": 32, "data.max_prompt_length": 128}
        settings |= {"generation.max_new_tokens": length - 128, "batch_size": 32, "gradient_accumulation_steps": 64}
        settings |= {"memory.activation_checkpointing": "full"}
        found.append(Figure(label, card, source, seconds, "llama3_1_8b", "grpo", settings, num_gpus))
    return found


def _liger() -> list[Figure]:
    """Forward and backward of plain PyTorch operations, which Liger's kernels are compared with."""
    found: list[Figure] = []

    def add(label: str, card: str, times: dict[int, float], operation: Callable[[int], Any]) -> None:
        found.extend(
            Figure(f"{label} {size:6}", card, LIGER, ms, operation=lambda size=size: operation(size))
            for size, ms in times.items()
        )

    def mlp(tokens: int) -> None:
        x, up, gate = _leaf(2, tokens, 2048), _leaf(4096, 2048), _leaf(4096, 2048)
        y = F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), _leaf(2048, 4096))
        y.backward(torch.empty_like(y))

    def output(tokens: int) -> None:
        logits = F.linear(_leaf(tokens, 4096), _leaf(128_256, 4096)).float()
        F.cross_entropy(logits, torch.zeros(tokens, dtype=torch.int64)).backward()

    def gated(size: int) -> None:
        first, second = torch.chunk(_leaf(2048, 4, 2 * size), 2, -1)
        y = F.silu(first) * second
        y.backward(torch.empty_like(y))

    def squared(size: int) -> None:
        y = torch.square(F.relu(_leaf(4096, size)))
        y.backward(torch.empty_like(y))

    def softmax(size: int, dtype: torch.dtype) -> None:
        y = F.softmax(_leaf(2048, size, dtype=dtype), -1)
        y.backward(torch.empty_like(y))

    def divergence(tokens: int) -> None:
        student = _leaf(tokens, 128_256, dtype=torch.float32)
        teacher = torch.empty(tokens, 128_256)
        mean = torch.lerp(student.exp(), teacher.exp(), 0.5)
        sums = [F.kl_div(mean.log(), one, reduction="none", log_target=True).sum(-1) for one in (teacher, student)]
        ((0.5 * sums[0] + 0.5 * sums[1]).sum() / tokens).backward()

    add("gated MLP", "RTX 4090", {1024: 2.252, 2048: 4.589, 4096: 9.233, 8192: 17.870, 16_384: 35.344}, mlp)
    add("output layer", "A100 80GB", {4096: 55.967, 8192: 111.455, 16_384: 220.784, 32_768: 452.471}, output)
    add("SwiGLU", "H100", {4096: 0.603, 8192: 1.170, 16_384: 2.296, 32_768: 4.573}, gated)
    add("squared ReLU", "H100", {4096: 0.178, 8192: 0.331, 16_384: 0.635}, squared)
    add("softmax float32", "RTX 3090", {1024: 0.084, 2048: 0.183, 4096: 0.331}, lambda n: softmax(n, torch.float32))
    add("softmax bfloat16", "RTX 3090", {2048: 0.126, 4096: 0.198}, lambda n: softmax(n, torch.bfloat16))
    add("JSD", "B200", {1024: 5.922, 2048: 12.200, 4096: 24.146, 8192: 50.453}, divergence)
    return found


def _leaf(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, requires_grad=True)


def planned(figure: Figure) -> float:
    """The planner's number for a figure, in its unit."""
    from lean_ft.plan.devices import Machines, find_device
    from lean_ft.plan.trace import Trace
    from lean_ft.torch_private import FakeTensorMode

    device = find_device(figure.card)
    if figure.operation is not None:
        trace = Trace(device)
        with FakeTensorMode(), trace:
            figure.operation()
        return trace.time.spent.seconds * 1e3  # Liger's timer waits for the device, not for the host
    with tempfile.TemporaryDirectory(prefix="lean_ft_speed_") as name:
        folder = write_model_folder(_BASES.get(figure.shape, figure.shape), Path(name) / "model", EMBEDDED_MODEL)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | _CHANGES.get(figure.shape, {})
        if figure.shape == "llama2_13b":
            config |= {"head_dim": 128, "rope_scaling": None}
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        own = {
            "model.path": folder,
            "model.random_init": True,
            "data.source": "not-read.jsonl",
            "output_dir": Path(name) / "run",
            **figure.settings,
        }
        machines = None
        if figure.num_gpus > 1:
            own.setdefault("gradient_accumulation_steps", figure.num_gpus)
            machines = Machines(8, figure.num_gpus // 8)
        found = rehearse_recipe(figure.recipe, own, device, machines)
        return found["step_seconds"] if figure.unit == "s" else found["tokens_per_second"] / figure.num_gpus


def ratio_errors(rows: list[dict[str, Any]]) -> list[float]:
    """Errors of the ratios between neighboring figures of one source, card and unit."""
    pairs = (
        (one["planned"] / other["planned"]) / (one["published"] / other["published"])
        for one, other in itertools.pairwise(rows)
        if all(one[name] == other[name] for name in ("source", "card", "unit", "kind"))
    )
    return [abs(math.expm1(math.log(pair))) for pair in pairs]


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Median absolute errors: of the figures for choosing, of those held back, and of ratios."""
    errors = {
        half: [
            abs(row["planned"] / row["published"] - 1)
            for row in rows
            if row["held_back"] is half and row["unit"] != "s"
        ]
        for half in (False, True)
    }
    training = [row for row in rows if row["unit"] == "tokens/s" and row["held_back"]]
    named = {
        "chosen": errors[False],
        "held_back": errors[True],
        "held_back_training": [abs(row["planned"] / row["published"] - 1) for row in training],
        "ratios": ratio_errors(rows),
        "rounds": [abs(row["planned"] / row["published"] - 1) for row in rows if row["unit"] == "s"],
    }
    return {name: statistics.median(values) for name, values in named.items() if values}


def main(
    only: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Only figures whose source or card contains this.")
    ] = None,
    results_dir: Path = RESULTS,
) -> None:
    """Plan every figure and print the errors."""
    hardware = describe_hardware("cpu")
    path = results_dir / f"published_speed_{hardware.slug}.json"
    before = json.loads(path.read_text(encoding="utf-8"))["rows"] if only is not None and path.exists() else []
    known = {(row["source"], row["card"], row["label"]): row for row in before}
    rows: list[dict[str, Any]] = []
    num_planned = 0
    for index, figure in enumerate(figures()):
        if only is not None and only.lower() not in f"{figure.source} {figure.card} {figure.label}".lower():
            rows += [known[key] for key in [(figure.source, figure.card, figure.label)] if key in known]
            continue
        num_planned += 1
        facts = {name: value for name, value in asdict(figure).items() if name != "operation"}
        facts |= {"status": "ok", "unit": figure.unit, "held_back": is_held_back(index), "planned": planned(figure)}
        facts["kind"] = figure.label.rpartition(" ")[0] if figure.operation else figure.shape
        rows.append(facts)
        console.print(f"{figure.card}: {figure.label}: {facts['planned'] / figure.published:.2f}", markup=False)
    if not num_planned:
        raise typer.BadParameter("no figure contains this text", param_hint="--only")
    path = write_result(
        "published_speed", benchmark="published_speed", hardware=hardware, settings=summary(rows), rows=rows,
        folder=results_dir
    )  # fmt: skip
    print_result(path, describe, COLUMNS, table_cells)


def describe(result: dict[str, Any]) -> str:
    """The caption of the table."""
    errors, cards = result["settings"], {row["card"] for row in result["rows"]}
    medians = {
        "chosen": "of the half for choosing the planner's shares",
        "held_back": "of the half held back",
        "held_back_training": "of its training speeds alone",
        "ratios": "of ratios between neighboring figures of one source and model",
        "rounds": "of rounds of GRPO",
    }
    listed = ", ".join(f"{text}: {errors[name]:.0%}" for name, text in medians.items() if name in errors)
    return (
        f"predicted by the planner, next to {len(result['rows'])} figures that other projects measured on {len(cards)} "
        f"kinds of cards; median error {listed}"
    )


def table_cells(result: dict[str, Any]) -> list[list[str]]:
    """The rows of the table."""
    return [
        [
            f"[{row['source'].split('/')[4]}]({row['source']}): {row['label']}",
            row["card"],
            *(
                f"{row[name]:,.{0 if row['unit'] == 'tokens/s' else 2}f} {row['unit']}"
                for name in ("published", "planned")
            ),
            f"{row['planned'] / row['published']:.2f}",
            "yes" if row["held_back"] else "no",
        ]
        for row in result["rows"]
    ]


if __name__ == "__main__":
    typer.run(main)
