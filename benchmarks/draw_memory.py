"""Draw the picture of README.md: memory of full fine-tuning, one technique added per row, next to torchtune.

    python benchmarks/draw_memory.py

Reads `results/`. lean_ft's bars of the upper panel are allocations on a simulated GPU (pretended_torchtune.py,
pretended_ladder.py), and those of the lower panel were measured on a CPU (compare_torchtune.py). torchtune's bars are
its published figures, and on the CPU its own recipe on the same machine. Writes `docs/assets/memory.png` and, for
phones, `memory_narrow.png`, and all of their words and numbers into the files' descriptions, which
tests/benchmarks/test_pictures.py compares with the results.
"""

import json
import textwrap
from typing import Any

import matplotlib
from make_tables import find_result
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from published_speed import TORCHTUNE
from results import GIB, RESULTS, ROOT, Hardware, console, narrow_path, save_picture, tokens_per_second

matplotlib.use("Agg")
from matplotlib import pyplot as plt

# `Peak Memory Active (GiB)` in torchtune's README (TORCHTUNE), by the label of the same technique in
# pretended_torchtune.py.
PUBLISHED = {
    "packed rows": 60.0,
    "+ compile": 51.0,
    "+ chunked cross-entropy": 42.9,
    "+ activation checkpointing": 24.9,
    "+ step in backward": 23.1,
    "+ activation offload": 21.8,
    "+ 8-bit AdamW": 17.6,
}
# Rows that only lean_ft has: the label in the picture, and in pretended_ladder.py.
FURTHER = {
    "+ bfloat16 sums in the loss,\ntied gradient on the host": "+ tied gradient on the host",
    "+ optimizer state streamed\nfrom the host": "+ optimizer state streamed",
}
PICTURE = ROOT / "docs" / "assets" / "memory.png"
INK, GREY, OURS, THEIRS = "#1b1f24", "#59616c", "#2f6fde", "#b4bcc8"


def read(name: str) -> dict[str, Any]:
    """The result of this name."""
    file = find_result(name, RESULTS)
    if file is None:
        raise SystemExit(f"benchmarks/results has no {name}_*.json")
    return json.loads(file.read_text(encoding="utf-8"))


def draw_bar(axes: Any, place: float, gib: float, color: str, narrow: bool) -> None:
    axes.barh(place, gib, height=0.26 if narrow else 0.36, color=color)
    at, ink = (gib + 0.6, INK) if narrow and gib < 10 else (0.6, "white" if color == OURS else INK)  # or inside
    axes.text(at, place, f"{gib:.1f} GiB", va="center", color=ink, size=9 if narrow else 10)


def frame(axes: Any, top: float, labels: list[str], widest: float, title: str, below: str, narrow: bool) -> None:
    """Label the rows of a panel, and write its title at the height `top` of the figure."""
    axes.set_yticks(range(len(labels)), [] if narrow else labels, color=INK, size=11)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    if narrow:  # labels are above their bars
        for place, label in enumerate(labels):
            axes.text(0, place - 0.3, " ".join(label.split()), va="bottom", color=INK, size=9)
        axes.set_ylim(len(labels) - 0.6, -0.7)
        title, below = (textwrap.fill(text, n, break_on_hyphens=False) for text, n in ((title, 40), (below, 58)))
    axes.set_xlim(0, widest)
    axes.set_xticks([])
    axes.tick_params(left=False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    size, line = (9, 0.0224) if narrow else (10, 0.028)
    axes.figure.text(0.02, top, title, size=12 if narrow else 14, weight="bold", color=INK, va="top")
    lines = title.count("\n") + 1
    axes.figure.text(0.02, top - line * lines, below, size=size, color=GREY, va="top", linespacing=1.4)


def real_gpu() -> str:
    """What a real GPU showed, next to the plan, in one sentence."""
    result = read("gpu_presets")
    rows = [row for row in result["rows"] if row["status"] == "ok"]
    largest = max(abs(row["allocated_bytes"] / row["predicted_bytes"] - 1) for row in rows)
    card = Hardware(result["hardware"]).short_name
    return f"On a real {card}, {len(rows)} presets allocated what the plan says, to {largest:.2%}."


def draw_gpu(axes: Any, top: float, narrow: bool) -> None:
    compared = {(row["label"], row["side"]): row for row in read("pretended_torchtune")["rows"]}
    ladder = {row["label"]: row for row in read("pretended_ladder_ladder")["rows"]}
    labels = [*PUBLISHED, *FURTHER]
    apart = 0.14 if narrow else 0.19  # of the two bars, from the row's middle
    for place, label in enumerate(labels):
        if label in PUBLISHED:
            draw_bar(axes, place - apart, PUBLISHED[label], THEIRS, narrow)
            again = compared[label, "torchtune"]["allocated_bytes"] / GIB
            axes.plot([again], [place - apart], marker="D", markersize=5, color=INK)
            gib = compared[label, "lean_ft"]["allocated_bytes"] / GIB
        else:
            gib = ladder[FURTHER[label]]["allocated_bytes"] / GIB
        alone = -apart if narrow else 0  # below its label
        draw_bar(axes, place + (apart if label in PUBLISHED else alone), gib, OURS, narrow)
    frame(
        axes,
        top,
        labels,
        64,
        "Peak allocated GPU memory of full fine-tuning, 3B model",
        "Llama-3.2-3B, 2 x 4,096 tokens in bfloat16, on a simulated A100, whose memory CUDA's own allocator serves.\n"
        f"Each row adds one technique. {real_gpu()}",
        narrow,
    )
    axes.legend(
        handles=[
            Rectangle((0, 0), 1, 1, color=THEIRS),
            Line2D([], [], marker="D", markersize=5, color=INK, linestyle=""),
            Rectangle((0, 0), 1, 1, color=OURS),
        ],
        labels=["torchtune, published: a real A100", "torchtune, simulated A100", "lean_ft, simulated A100"],
        loc="lower left" if narrow else "lower right",
        bbox_to_anchor=(-0.02, 0.985) if narrow else None,
        frameon=False,
        fontsize=9 if narrow else 11,
    )


def draw_cpu(axes: Any, top: float, narrow: bool) -> None:
    result = read("compare_torchtune_qwen2_5_0_5b_8x512")
    lines = [line for line in result["summary"] if line["status"] == "ok"]
    theirs = max(
        (line for line in lines if line["side"].startswith("peer")), key=lambda line: line["tokens_per_second"]
    )
    ours = min(
        (line for line in lines if not line["side"].startswith("peer")), key=lambda line: line["peak_memory_bytes"]
    )
    for place, (line, color) in enumerate([(theirs, THEIRS), (ours, OURS)]):
        gib = line["peak_memory_bytes"] / GIB
        axes.barh(place, gib, height=0.42 if narrow else 0.7, color=color)
        text = f"{gib:.2f} GiB, {tokens_per_second(line['tokens_per_second'])} tokens/s"
        inside = "white" if color == OURS else INK
        at, ink = (0.06, inside) if narrow else (gib + 0.06, INK)
        axes.text(at, place, text, va="center", color=ink, size=10)
    settings = result["settings"]
    rows = f"{settings['batch_size']} x {settings['length']} tokens"
    frame(
        axes,
        top,
        ["torchtune,\nfastest setting", "lean_ft,\nleast memory"],
        6 if narrow else 7.5,
        "Peak memory and speed on a CPU, 0.5B model, measured",
        f"Full fine-tuning of Qwen2.5-0.5B, {rows} in bfloat16; {Hardware(result['hardware']).short_name}.",
        narrow,
    )


def picture(narrow: bool = False) -> Figure:
    """Both panels in one picture; `narrow`: for phones, with the same words and numbers."""
    source = f"torchtune's published figures: {TORCHTUNE.removeprefix('https://')} (peak memory active)"
    if narrow:
        figure = plt.figure(figsize=(4.4, 9.8), dpi=200)
        draw_gpu(figure.add_axes((0.02, 0.235, 0.96, 0.565)), 0.99, narrow)
        draw_cpu(figure.add_axes((0.02, 0.045, 0.96, 0.11)), 0.235, narrow)
        figure.text(0.02, 0.01, textwrap.fill(source, 75), size=7, color=GREY)
        return figure
    figure = plt.figure(figsize=(9.6, 8.2), dpi=150)
    draw_gpu(figure.add_axes((0.26, 0.22, 0.73, 0.68)), 0.985, narrow)
    draw_cpu(figure.add_axes((0.26, 0.035, 0.73, 0.105)), 0.2, narrow)
    figure.text(0.02, 0.008, source, size=8, color=GREY)
    return figure


def main() -> None:
    """Draw the picture and its narrow form."""
    for path, narrow in ((PICTURE, False), (narrow_path(PICTURE), True)):
        save_picture(picture(narrow), path)
        console.print(str(path.relative_to(ROOT)), markup=False)


if __name__ == "__main__":
    main()
