"""Count the bytes that a mixture's experts read and write, without a GPU.

    python benchmarks/mixture_traffic.py

The experts of one layer run forward and backward on tensors that have shapes and no values: on a GPU with the fused
kernels, and with separate operations, as on a CPU. One unit is the size of one (rows, intermediate features) tensor in
bfloat16, and there is a row for each expert that a token chooses. Weights do not count, because their traffic does not
depend on how operations are fused. The frozen experts have no adapter, or adapters of rank 16 on both projections.

Writes `results/mixture_traffic_<hardware>.json`.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from results import RESULTS, ROOT, describe_hardware, print_result, write_result
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from lean_ft.models import decoder_config
from lean_ft.models.moe import Experts
from lean_ft.system.world import World, inside

PRESETS = ("gpt_oss_20b", "qwen3_30b_a3b")
GATHERING = ("index_select", "gather", "index", "embedding_bag")  # read only the rows of their result
PRODUCTS = ("grouped_matmul", "grouped_outer", "add_grouped_matmul")
NUM_TOKENS, RANK = 4096, 16


class OnDevice(World):
    """A world in which tensors without values count as being on a device of this type."""

    def __init__(self, device: str) -> None:
        self.device = device

    def device_type(self, device: Any) -> str:
        return self.device


class Counted(TorchDispatchMode):
    """Adds up the bytes of tensors with a row per token or choice, by operation."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.num_rows = num_rows
        self.moved: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func.overloadpacket).rpartition(".")[2]
        if not func.is_view and func.namespace != "prim" and not name.startswith(("empty", "new_empty")):
            read = args[1:] if name in GATHERING or name == "copy_" else args
            written = args[0] if name == "add_grouped_matmul" else result  # which returns nothing
            self.moved[name] += sum(map(self._bytes, tree_iter((read, written))))
            if name in GATHERING:  # each row is read once per choice
                self.moved[name] += self.num_rows * (args[0].nbytes // len(args[0]))
        return result

    def _bytes(self, value: Any) -> int:
        has_rows = isinstance(value, Tensor) and 1 <= value.ndim <= 2 and value.shape[0] in (NUM_TOKENS, self.num_rows)
        return value.numel() * value.element_size() if has_rows else 0


def moved(preset: str, device: str, rank: int) -> dict[str, Counter[str]]:
    """Units by operation, of the forward and of the backward pass."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    fields = json.loads((ROOT / "configs" / preset / "config.json").read_text())
    decoder = decoder_config(fields)
    config = next(layer.mixture for layer in decoder.layers if layer.mixture is not None)
    hidden, num_experts, inner = fields["hidden_size"], config.num_experts, config.intermediate_size
    num_rows = NUM_TOKENS * config.experts_per_token
    with FakeTensorMode(), inside(OnDevice(device)):
        torch.set_default_dtype(torch.bfloat16)
        experts = Experts(hidden, config).requires_grad_(False)
        torch.set_default_dtype(torch.float32)
        tokens = torch.empty(NUM_TOKENS, hidden, dtype=torch.bfloat16, requires_grad=True)
        weights = torch.empty(NUM_TOKENS, config.experts_per_token, requires_grad=True)
        chosen = torch.empty(NUM_TOKENS, config.experts_per_token, dtype=torch.int64)
        shapes = (hidden, rank), (rank, 2 * inner), (inner, rank), (rank, hidden)
        thin = [torch.empty(num_experts, *shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
        adapters = (thin[:2], thin[2:]) if rank else ()
        with Counted(num_rows) as forward:
            out = experts(tokens, weights, chosen, *adapters)
        with Counted(num_rows) as backward:
            out.backward(torch.empty_like(out))
    unit = num_rows * inner * 2
    passes = {"forward": forward, "backward": backward}
    return {name: Counter({op: n / unit for op, n in found.moved.items()}) for name, found in passes.items()}


def measure(preset: str, kernels: str, rank: int) -> list[dict[str, Any]]:
    """A row for each pass."""
    rows = []
    for name, units in moved(preset, "cuda" if kernels == "fused" else "cpu", rank).items():
        in_products = sum(count for op, count in units.items() if op in PRODUCTS)
        row = {"preset": preset, "kernels": kernels, "rank": rank, "pass": name, "status": "ok"}
        row |= {"units": units.total(), "units_in_products": in_products}
        rows.append(row | {"by_operation": {op: round(n, 3) for op, n in units.most_common() if n > 0.001}})
    return rows


COLUMNS = ["experts of", "adapter", "pass", "separate operations", "fused kernels", "of these, in products"]


def describe(result: dict[str, Any]) -> str:
    """The caption of the table."""
    return (
        "Memory units that a mixture's experts read and write; 1 unit is one (rows, intermediate features) tensor; "
        "counted from shapes"
    )


def table_cells(result: dict[str, Any]) -> list[list[str]]:
    """One row per preset, adapter and pass."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in result["rows"]:
        found.setdefault((row["preset"], row["rank"], row["pass"]), {})[row["kernels"]] = row
    return [
        [preset, f"rank {rank}" if rank else "none", name]
        + [f"{rows[kernels]['units']:.1f}" for kernels in ("separate", "fused")]
        + [f"{rows['fused']['units_in_products']:.1f}"]
        for (preset, rank, name), rows in found.items()
    ]


def main(results_dir: Annotated[Path, typer.Option(help="Folder for the JSON result.")] = RESULTS) -> None:
    """Count the memory traffic of the experts of two mixtures."""
    rows = [
        row
        for preset in PRESETS
        for rank in (0, RANK)
        for kernels in ("separate", "fused")
        for row in measure(preset, kernels, rank)
    ]
    path = write_result(
        "mixture_traffic",
        benchmark="mixture_traffic",
        hardware=describe_hardware("cpu"),
        settings={"num_tokens": NUM_TOKENS, "rank": RANK},
        rows=rows,
        folder=results_dir,
    )
    print_result(path, describe, COLUMNS, table_cells)


if __name__ == "__main__":
    typer.run(main)
