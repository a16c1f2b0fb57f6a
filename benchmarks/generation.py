"""Compare generation with transformers' `generate`, and shared prompts with repeated prompts.

    python benchmarks/generation.py                                   # Qwen2.5-0.5B's shape, some minutes
    python benchmarks/generation.py --shape tiny --rounds 1           # a quick trial
    python benchmarks/generation.py --device cuda --rows 32
    python benchmarks/generation.py --compile                         # as in a recipe with compile=true

One process, random weights in bfloat16, no end token. Comparisons, whose sides alternate:

    greedy      `--rows` prompts of `--prompt-tokens`: lean_ft and transformers
    drawn       the same, sampled at temperature 1 with log-probabilities; transformers with output_logits
    quantized   greedy on a CPU: lean_ft with `leanft quantize kind=int8_dynamic_int8_weight`, transformers in bfloat16
    shared      `--rows` completions of one prompt of `--shared-tokens`, and of as many separate prompts: both lean_ft

Ratios are computed per round; the median is reported.

Writes `results/generation_<shape>_<rows>x<prompt>+<new>_<hardware>.json`.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from results import RESULTS, print_result, require_hardware, tokens_per_second, write_result
from shapes import shape_of, write_model_folder

from lean_ft.generation import Sampling, sample
from lean_ft.models import Decoder, load_model, save_model
from lean_ft.quantize import load_quantized, quantize, save_quantized

COLUMNS = ["generation", "implementation", "tokens/s", "compared with", "tokens/s", "ratio"]
LABELS = {
    "greedy": "greedy",
    "drawn": "sampled, with log-probabilities",
    "quantized": "greedy, int8_dynamic_int8_weight",
    "shared": "completions of one long prompt",
}
SIDES = {
    "greedy": ("lean_ft", "transformers"),
    "drawn": ("lean_ft", "transformers"),
    "quantized": ("lean_ft", "transformers in bfloat16"),
    "shared": ("prompt computed once", "prompt computed per row"),
}


def describe(result: dict[str, Any]) -> str:
    """The caption of the table."""
    s = result["settings"]
    return (
        f"{s['shape']}, bfloat16, random weights: {s['rows']} rows of {s['prompt_tokens']} prompt tokens "
        f"({s['shared_tokens']} for the long prompt) and {s['new_tokens']} new tokens; tokens/s count new tokens; "
        f"{s['rounds']} rounds" + ("; lean_ft compiled" if s.get("compile") else "")
    )


def table_cells(result: dict[str, Any]) -> list[list[str]]:
    """The rows of the table."""
    return [
        [
            row["label"],
            row["sides"][0],
            tokens_per_second(row["tokens_per_second"][0]),
            row["sides"][1],
            tokens_per_second(row["tokens_per_second"][1]),
            f"{row['ratio']:.2f}",
        ]
        for row in result["rows"]
    ]


def contestants(
    folder: Path, device: torch.device, rows: int, tokens: dict[str, int], compile: bool
) -> dict[str, list[Callable]]:
    """The function of each side of each comparison, which returns its new tokens."""
    import transformers

    torch.manual_seed(0)
    ours = load_model(folder, device, dtype=torch.bfloat16, random_init=True)
    save_model(ours, folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
    vocab_size, new = ours.config.vocab_size, tokens["new"]
    prompts = torch.randint(vocab_size, (rows, tokens["prompt"]), device=device)
    long = torch.randint(vocab_size, (rows, tokens["shared"]), device=device)

    def with_ours(ids: torch.Tensor, temperature: float, model: Decoder = ours) -> Callable[[], int]:
        listed = ids.tolist()
        return lambda: sum(len(one.ids) for one in sample(model, listed, Sampling(new, temperature), compile=compile))

    def with_theirs(**how: Any) -> Callable[[], int]:
        settings = {"max_new_tokens": new, "min_new_tokens": new, "pad_token_id": 0, "return_dict_in_generate": True}

        @torch.no_grad()
        def run() -> int:
            out = theirs.generate(prompts, attention_mask=torch.ones_like(prompts), **settings, **how)
            if out.logits is not None:
                drawn = out.sequences[:, prompts.shape[1] :]
                for i, logits in enumerate(out.logits):
                    logits.float().log_softmax(-1).gather(1, drawn[:, i : i + 1])
            return out.sequences[:, prompts.shape[1] :].numel()

        return run

    drawn = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "output_logits": True}
    sides = {
        "greedy": [with_ours(prompts, 0.0), with_theirs(do_sample=False)],
        "drawn": [with_ours(prompts, 1.0), with_theirs(**drawn)],
        "shared": [with_ours(long[:1].expand(rows, -1), 1.0), with_ours(long, 1.0)],
    }
    if device.type == "cpu":
        kind, place = ("int8_dynamic_int8_weight", 32), folder / "quantized"
        place.mkdir()
        model = load_model(folder, dtype=torch.bfloat16)
        quantize(model, *kind)
        save_quantized(model, None, place, *kind)
        quantized = load_quantized(place, torch.bfloat16)
        sides["quantized"] = [with_ours(prompts, 0.0, quantized), with_theirs(do_sample=False)]
    return sides


def measure(sides: list[Callable[[], int]], rounds: int, device: torch.device) -> dict[str, Any]:
    """Tokens/s of both sides, which alternate, after one untimed pass each."""
    speeds: list[list[float]] = [[], []]
    for round_number in range(-1, rounds):
        for side in (0, 1) if round_number % 2 == 0 else (1, 0):
            started = time.perf_counter()
            made = sides[side]()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if round_number >= 0:
                speeds[side].append(made / (time.perf_counter() - started))
    ratios = [ours / theirs for ours, theirs in zip(*speeds, strict=True)]
    return {"tokens_per_second": [statistics.median(one) for one in speeds], "ratio": statistics.median(ratios)}


def main(
    shape: Annotated[str, typer.Option(help="Model shape, from shapes.py.")] = "qwen2_5_0_5b",
    rows: Annotated[int, typer.Option(help="Completions per batch.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = 128,
    new_tokens: Annotated[int, typer.Option(help="New tokens per prompt.")] = 128,
    shared_tokens: Annotated[int, typer.Option(help="Tokens of the shared prompt.")] = 512,
    rounds: Annotated[int, typer.Option(help="Timed rounds.")] = 3,
    compile: Annotated[bool, typer.Option(help="Compile lean_ft's layers.")] = False,
    only: Annotated[
        str, typer.Option(help="greedy, drawn, quantized (on a CPU) or shared; comma-separated.")
    ] = "greedy,drawn,shared",
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "cpu",
    results_dir: Annotated[Path, typer.Option(help="Folder for the JSON result.")] = RESULTS,
) -> None:
    """Measure, print the table and write the result."""
    hardware = require_hardware(device)
    where = torch.device("cuda" if hardware["gpu"] is not None and device != "cpu" else "cpu")
    wanted = only.split(",")
    if unknown := [name for name in wanted if name not in LABELS]:
        raise typer.BadParameter(f"expected some of {', '.join(LABELS)}, came {unknown[0]!r}", param_hint="--only")
    tokens = {"prompt": prompt_tokens, "new": new_tokens, "shared": shared_tokens}
    with tempfile.TemporaryDirectory(prefix="lean_ft_generation_") as place:
        sides = contestants(write_model_folder(shape, Path(place)), where, rows, tokens, compile)
        measured = [
            {"label": LABELS[name], "sides": SIDES[name], "status": "ok", **measure(sides[name], rounds, where)}
            for name in wanted
        ]
    settings = {
        "shape": shape,
        "model": shape_of(shape)["model_type"],
        "rows": rows,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "shared_tokens": shared_tokens,
        "rounds": rounds,
        "compile": compile,
        "threads": torch.get_num_threads(),
    }
    name = f"generation_{shape}_{rows}x{prompt_tokens}+{new_tokens}{'_compiled' if compile else ''}"
    path = write_result(
        name, benchmark="generation", hardware=hardware, settings=settings, rows=measured, folder=results_dir
    )
    print_result(path, describe, COLUMNS, table_cells)


if __name__ == "__main__":
    typer.run(main)
