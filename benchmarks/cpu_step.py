"""Compare a training step on a CPU with the limit that its own matrix products set, and show where the rest of the time
goes.

    python benchmarks/cpu_step.py --recipe full        # Qwen2.5-0.5B, 8 x 512
    python benchmarks/cpu_step.py --recipe lora
    python benchmarks/cpu_step.py --recipe dpo_lora    # 4 pairs x 512
    python benchmarks/cpu_step.py --shape tiny --results-dir /tmp/results

lean_ft's recipe runs in this process with the settings of compare_trl.py. Some steps are timed without a profiler; the
last one is profiled, with the shapes and strides of every operation. Then each distinct product of that step runs
alone, and its fastest call counts. The limit is the sum of these times, each multiplied by the number of calls. A
second limit takes each product's fastest layout (operands or result transposed) and, in the loss, also half and twice
the tokens or the vocabulary of a chunk. It ignores the copies that another layout needs.

A product counts with everything it calls; all other time belongs to the innermost operation. The compiler marks its
fused kernels for the profiler (TORCHINDUCTOR_CPP_ENABLE_KERNEL_PROFILE). Time that no operation takes is Python's.

Writes `results/cpu_step_<recipe>_<shape>_<batch>x<length>_<hardware>.json`.
"""

import itertools
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from results import RESULTS, console, print_result, require_hardware, write_result
from shapes import num_parameters, shape_of, write_model_folder

COLUMNS = ["part of the step", "calls", "seconds", "share of the step", "products alone", "best layout and chunk"]
LAYERS, LOSS, ATTENTION, UPDATE = "layers", "loss", "attention", "optimizer update"
# Parts of the recipe by the names of their operations. Hooks of AccumulateGrad update parameters in backward.
PLACES = {"SumOfLosses": LOSS, "LinearLogProbs": LOSS, "::document_attention": ATTENTION, UPDATE: UPDATE,
    "AccumulateGrad": UPDATE}  # fmt: skip
COPIES = ("copy_", "cat", "fill_", "zero_", "index_select")
PRODUCTS, PYTHON, AS_IT_IS = "products: ", "Python and dispatch", "as in the step"
LIMITS = ("alone_seconds", "best_seconds")
LEAST_SHOWN = 0.01  # share of the step of a product with a row in the table
WARMUP_STEPS = 2

Row = dict[str, Any]


class Recipe(StrEnum):
    """Comparisons of compare_trl.py."""

    full = "full"
    lora = "lora"
    dpo_lora = "dpo_lora"


class Product(NamedTuple):
    """A kind of matrix product: `shapes` and `strides` of the left (..., M, K) and the right (..., K, N) operand."""

    place: str
    operation: str  # mm and bmm; addmm adds a bias, addmm_ adds to the result
    shapes: tuple[tuple[int, ...], ...]
    strides: tuple[tuple[int, ...], ...]
    dtype: str

    def __str__(self) -> str:
        sizes = " x ".join(f"{size:,}" for size in (*self.shapes[0], self.shapes[1][-1]))
        sides = zip(("left", "right"), self.shapes, self.strides, strict=True)
        turned = " and ".join(name for name, shape, stride in sides if stride[-1] != 1 < shape[-1])
        return f"{self.place}: {self.operation} {sizes}" + (f", {turned} transposed" if turned else "")


def profiled_step(recipe: Recipe, folder: Path, **sizes: int) -> tuple[list[float], Any]:
    """Run the recipe; return the seconds of each step and the profile of the last one."""
    from compare_trl import COMPARISONS, OURS, ours_command, write_rows
    from torch.profiler import ProfilerActivity, profile, record_function

    from lean_ft.settings.text import load_config
    from lean_ft.system.catalog import find_recipe, load_recipe
    from lean_ft.training import Run

    seconds, profiler = list[float](), profile(activities=[ProfilerActivity.CPU], record_shapes=True)

    class ProfiledRun(Run):
        def steps(self) -> Iterator[int]:
            for name in ("step", "finish_gradients"):
                setattr(self.optimizer, name, record_function(UPDATE)(getattr(self.optimizer, name)))
            for step in super().steps():
                with profiler if step + 1 == self.total_steps else nullcontext():
                    started = time.perf_counter()
                    yield step
                    seconds.append(time.perf_counter() - started)

    comparison, model = COMPARISONS[recipe], folder / "model"
    data = write_rows(comparison, folder, model, sizes["length"], sizes["batch_size"], sizes["steps"])
    name, *overrides = ours_command(comparison, OURS, model, data, folder / "run", device="cpu", **sizes)[4:]
    module = load_recipe(find_recipe(name))
    vars(module)["Run"] = ProfiledRun
    module.main(load_config(module.Config, None, overrides))
    return seconds, profiler


def divide(events: Any, step_seconds: float) -> tuple[dict[str, list[float]], dict[Product, list[float]]]:
    """Divide a profiled step into parts, and its products by kind: the seconds of each call."""
    parts, products = defaultdict[str, list[float]](list), defaultdict[Product, list[float]](list)

    def visit(event: Any, place: str) -> None:
        name = event.name.removeprefix("aten::")
        place = next((found for part, found in PLACES.items() if part in name), place)
        if name in ("mm", "bmm", "addmm", "addmm_"):
            sides = slice(1, 3) if "add" in name else slice(2)
            shapes, strides = (
                tuple(map(tuple, given[sides]))
                for given in (event.structured_input_shapes, event.structured_input_strides)
            )
            dtype = {"c10::BFloat16": "bfloat16", "float": "float32"}[event.input_dtypes[0]]
            for calls in products[Product(place, name, shapes, strides, dtype)], parts[PRODUCTS + place]:
                calls.append(event.cpu_time_total / 1e6)
            return
        is_fused = "cpp_fused" in name
        if not is_fused and ("::" not in event.name or name.startswith("autograd::")):
            kind = PYTHON
        elif place == LAYERS:
            kind = "fused elementwise kernels" if is_fused else "copies" if name in COPIES else "other operations"
        else:
            kind = place if place == UPDATE else f"{place}, without products"
        parts[kind].append(event.self_cpu_time_total / 1e6)
        for child in event.cpu_children:
            visit(child, place)

    for event in events:
        if event.cpu_parent is None:
            visit(event, LAYERS)
    parts[PYTHON].append(step_seconds - sum(map(sum, parts.values())))
    return parts, products


def limits(product: Product, whole: tuple[int, ...]) -> Row:
    """The seconds of a product alone, and at its best layout and chunk. `whole`: sizes that chunks do not divide."""
    import torch
    from timing import measure_calls

    dtype, (left, right) = getattr(torch, product.dtype), product.shapes
    sizes, turned = (*left, right[-1]), [stride[-1] != 1 for stride in product.strides]

    def matrix(shape: tuple[int, ...], turned: bool) -> torch.Tensor:
        return torch.ones(*shape[:-2], *shape[:-3:-1], dtype=dtype).mT if turned else torch.ones(shape, dtype=dtype)

    def seconds(left: torch.Tensor, right: torch.Tensor, of_result: bool = False) -> float:
        left, right = (right.mT, left.mT) if of_result else (left, right)
        out = torch.zeros(*left.shape[:-1], right.shape[-1], dtype=dtype)
        bias = torch.zeros((out.shape[-2], 1) if of_result else out.shape[-1], dtype=dtype)
        work = {
            "addmm_": lambda: out.addmm_(left, right),
            "addmm": lambda: torch.addmm(bias, left, right, out=out),
        }.get(product.operation, lambda: getattr(torch, product.operation)(left, right, out=out))
        repeats = 5 if out.numel() * left.shape[-1] > 1e9 else 15
        return min(measure_calls(work, torch.device("cpu"), repeats=repeats, warmup=1).all_seconds)

    given = [torch.empty_strided(*of_one, dtype=dtype).fill_(1.0) for of_one in zip(*product[2:4], strict=True)]
    found = {AS_IT_IS: seconds(given[0], given[1])}
    for flags in itertools.product((False, True), repeat=3):
        names = " and ".join(itertools.compress(("left", "right", "result"), flags)) or "nothing"
        found[f"{names} transposed"] = seconds(matrix(left, flags[0]), matrix(right, flags[1]), flags[2])
    for axis, size in enumerate(sizes if product.place == LOSS else ()):
        for other in () if size in whole else (size // 2, size * 2):
            m, k, n = (*sizes[:axis], other, *sizes[axis + 1 :])
            of_other = seconds(matrix((m, k), turned[0]), matrix((k, n), turned[1]))
            found[f"{m:,} x {k:,} x {n:,}"] = of_other * size / other
    best = min(found, key=found.__getitem__)
    return {"alone_seconds": found[AS_IT_IS], "best_seconds": found[best], "best": best}


def describe(result: Row) -> str:
    """The caption of the table."""
    settings, step = result["settings"], result["step"]
    alone, best = (step[key] / step["seconds"] for key in LIMITS)
    return (
        f"one step of {settings['title']} of {settings['shape']} ({settings['parameters']:,} parameters, random "
        f"weights), {settings['batch_size']} x {settings['length']}, lean_ft in bfloat16 with the settings of "
        f"compare_trl.py: {step['seconds']:.2f} s (median of {settings['steps']}), {step['profiled_seconds']:.2f} s "
        f"with the profiler, which the parts divide. Alone, the step's matrix products take {alone:.1%} of its time, "
        f"at their best layouts and chunks {best:.1%} (without the copies that other layouts need). Products below "
        f"{LEAST_SHOWN:.0%} of the step are not listed"
    )


def table_cells(result: Row) -> list[list[str]]:
    """The rows of the table: parts of the step, then the products that take most of it."""
    whole = result["step"]["profiled_seconds"]
    return [_cells(row, whole) for row in result["rows"] if "best" not in row or row["seconds"] >= LEAST_SHOWN * whole]


def _cells(row: Row, whole: float) -> list[str]:
    own = [f"{row[key]:.3f} s" if key in row else "-" for key in LIMITS]
    own[1] += f" ({row['best']})" if row.get("best", AS_IT_IS) != AS_IT_IS else ""
    return [row["label"], f"{row['calls']:,}", f"{row['seconds']:.3f} s", f"{row['seconds'] / whole:.1%}", *own]


def main(
    recipe: Annotated[Recipe, typer.Option(help="Comparison of compare_trl.py.")] = Recipe.full,
    shape: Annotated[str, typer.Option(help="Model shape, from shapes.py.")] = "qwen2_5_0_5b",
    batch_size: Annotated[int | None, typer.Option(help="Rows per step: 8; pairs for dpo_lora: 4.")] = None,
    length: Annotated[int, typer.Option(help="Tokens per row.")] = 512,
    steps: Annotated[int, typer.Option(help="Timed steps, after two that are not.")] = 3,
    results_dir: Annotated[Path, typer.Option(help="Folder for the JSON result.")] = RESULTS,
) -> None:
    """Time and profile a training step on a CPU, and measure its matrix products alone."""
    from lean_ft.system.before_torch import prepare_torch

    os.environ["TORCHINDUCTOR_CPP_ENABLE_KERNEL_PROFILE"] = "1"
    prepare_torch()
    from compare_trl import COMPARISONS  # imports torch

    batch_size = batch_size or (4 if recipe is Recipe.dpo_lora else 8)
    with tempfile.TemporaryDirectory(prefix="lean_ft_cpu_step_") as folder:
        write_model_folder(shape, Path(folder) / "model")
        sizes = {"length": length, "batch_size": batch_size, "steps": WARMUP_STEPS + steps + 1}
        seconds, profiler = profiled_step(recipe, Path(folder), **sizes)
    parts, products = divide(profiler.events(), seconds[-1])
    whole, of_parts, rows = (shape_of(shape)["hidden_size"], shape_of(shape)["vocab_size"]), list[Row](), list[Row]()
    for found, kinds in ((of_parts, parts), (rows, products)):
        for kind, calls in sorted(kinds.items(), key=lambda item: -sum(item[1])):
            row = {"label": str(kind), "status": "ok", "calls": len(calls), "seconds": sum(calls)}
            if isinstance(kind, Product):
                row |= limits(kind, whole)
                row |= {key: row[key] * len(calls) for key in LIMITS} | kind._asdict()
            found.append(row)
            console.print(" | ".join(_cells(row, seconds[-1])), markup=False)
    for part in of_parts:
        own = [row for row in rows if part["label"] == PRODUCTS + row["place"]]
        part |= {key: sum(row[key] for row in own) for key in LIMITS if own}
    step = {"seconds": statistics.median(seconds[WARMUP_STEPS:-1]), "profiled_seconds": seconds[-1]}
    settings = {"title": COMPARISONS[recipe].title, "shape": shape, "parameters": num_parameters(shape), "steps": steps}
    path = write_result(
        f"cpu_step_{recipe}_{shape}_{batch_size}x{length}",
        benchmark="cpu_step",
        hardware=require_hardware("cpu"),
        settings=settings | {"batch_size": batch_size, "length": length, "ours": COMPARISONS[recipe].settings},
        rows=of_parts + rows,
        folder=results_dir,
        step=step | {key: sum(row[key] for row in rows) for key in LIMITS} | {"all_seconds": seconds},
    )
    print_result(path, describe, COLUMNS, table_cells)


if __name__ == "__main__":
    typer.run(main)
