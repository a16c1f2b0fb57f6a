"""Compare steps of text embeddings with sentence-transformers' cached loss: new processes that alternate.

    python benchmarks/embeddings.py                                  # Qwen2.5 0.5B's shape, 512 pairs, 32 at a time
    python benchmarks/embeddings.py --shape tiny --steps 20          # the first 20 losses, in a minute
    python benchmarks/embeddings.py --dtypes bfloat16 --only ours

Both sides compute InfoNCE of the same pairs of random words in two passes (GradCache) with last-token pooling and an
update by SGD, float32 or bfloat16 weights, random but equal. lean_ft packs a micro-batch without padding;
sentence-transformers pads it, and is also measured with its `mini_batch_num_tokens`, which sorts texts by length.

Time is CPU seconds of all threads per step, without the first step. Memory is the peak resident size above the size
after loading, without the first step's. sentence-transformers is in the extra `dev`.

Writes `results/embeddings_<shape>_<pairs>x<micro-batch>_<hardware>.json`.
"""

import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from results import RESULTS, console, describe_hardware, gibibytes, print_result, write_result
from shapes import EMBEDDED_MODEL, write_model_folder

OURS = {"ours": "none", "ours_selective": "selective"}  # activation checkpointing
LABELS = {
    "ours": "lean_ft",
    "ours_selective": "lean_ft, selective activation checkpointing",
    "peer": "sentence-transformers, cached loss",
    "peer_sorted": "sentence-transformers, cached loss, sorted by length",
}
COLUMNS = ["side", "dtype", "CPU s per step", "ratio", "memory above load", "padding", "first and last loss"]
LR = 1e-4


def write_pairs(file: Path, number: int, model: Path) -> None:
    """Write pairs of texts of 5 to 60 tokens."""
    from lean_ft.tokenizers import load_tokenizer

    drawn, tokenizer = random.Random(0), load_tokenizer(model)
    words = [f"{a}{b}" for a in ("ba", "ko", "lin", "mar", "so", "tu") for b in ("ra", "ne", "di", "fo", "gum")]

    def text() -> str:
        wanted, chosen = drawn.randint(5, 60), [drawn.choice(words)]
        while len(tokenizer.encode(" ".join(chosen), add_special_tokens=True)) < wanted:
            chosen.append(drawn.choice(words))
        return " ".join(chosen)

    file.write_text("".join(json.dumps({"query": text(), "positive": text()}) + "\n" for _ in range(number)))


# In the process of one side ------------------------------------------------------------------------------------------


def ours(
    model_folder: Path, file: Path, dtype: Any, pairs: int, micro: int, checkpointing: Any
) -> tuple[Any, Any, Any]:
    """The model, a function that computes the loss and runs backward, and the share of padding."""
    import torch

    from lean_ft.memory import apply_memory
    from lean_ft.memory.host_memory import return_freed_memory
    from lean_ft.memory.host_pool import pool_host_memory
    from lean_ft.settings import MemoryConfig

    return_freed_memory()  # as a run on a CPU does
    pool_host_memory()

    from lean_ft.data import prepare_batches
    from lean_ft.data.embedding import EmbeddingDataConfig, with_negatives
    from lean_ft.embedding import StepVectors, text_vectors
    from lean_ft.losses.embedding import embedding_loss
    from lean_ft.models import VECTORS, load_model
    from lean_ft.settings.embedding_losses import EmbeddingLossConfig
    from lean_ft.tokenizers import load_tokenizer

    config = with_negatives(EmbeddingDataConfig(source=str(file), shuffle=False, max_length=128))
    batches, _ = prepare_batches(config, load_tokenizer(model_folder), batch_size=micro, seed=0)
    micro_batches = [batch.built for batch in batches.take(pairs // micro)]
    model = load_model(model_folder, dtype=dtype, scores=VECTORS)
    apply_memory(model, MemoryConfig(activation_checkpointing=checkpointing), compile=False)
    scores, identities = (torch.cat([getattr(one, name) for one in micro_batches]) for name in ("scores", "identities"))

    def embed(batch: Any) -> Any:
        return text_vectors(model, batch, "last").unflatten(0, (-1, 2))

    def step() -> float:
        vectors = StepVectors(embed, micro_batches, torch.device("cpu"))
        loss, _ = embedding_loss(vectors.all, scores, identities, EmbeddingLossConfig())
        loss.backward()
        for product, _ in vectors.again():
            product.backward()
        return float(loss)

    tokens = sum(int(one.lengths.sum()) for one in micro_batches)
    return model, step, 1 - tokens / sum(one.num_tokens for one in micro_batches)


def peer(model_folder: Path, file: Path, dtype: Any, pairs: int, micro: int, is_sorted: bool) -> tuple[Any, Any, Any]:
    """The same with sentence-transformers."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import losses
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    texts = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
    arguments = {"dtype": dtype, "attn_implementation": "sdpa"}
    transformer = Transformer(
        str(model_folder),
        transformer_task="feature-extraction",
        modality_config=texts,
        module_output_name="token_embeddings",
        model_kwargs=arguments,
    )
    width = transformer.model.config.hidden_size
    model = SentenceTransformer(
        modules=[transformer, Pooling(width, pooling_mode="lasttoken"), Normalize()], device="cpu"
    )
    model.max_seq_length = 128
    rows = [json.loads(line) for line in file.read_text().splitlines()][:pairs]
    features = [model.preprocess([row[name] for row in rows]) for name in ("query", "positive")]
    # As many tokens as a micro-batch of ours has on average, so that both hold as many activations.
    mean = sum(int(one["attention_mask"].sum()) for one in features) // (2 * pairs)
    more = {"mini_batch_num_tokens": mean * micro} if is_sorted else {}
    loss_of = losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=micro, **more)
    model.train()

    def step() -> float:
        loss = loss_of([dict(one) for one in features], None)
        loss.backward()
        return float(loss)

    padding = 1 - sum(int(one["attention_mask"].sum()) for one in features) / sum(
        one["attention_mask"].numel() for one in features
    )
    return model, step, None if is_sorted else padding


def resident_bytes(name: str) -> int:
    """A size of this process in /proc, such as VmHWM."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) * 1024


def work(side: str, model_folder: Path, file: Path, dtype_name: str, pairs: int, micro: int, steps: int) -> None:
    if side in OURS:
        from lean_ft.system.before_torch import prepare_torch

        prepare_torch()
    import torch

    arguments = model_folder, file, getattr(torch, dtype_name), pairs, micro
    model, step, padding = ours(*arguments, OURS[side]) if side in OURS else peer(*arguments, side == "peer_sorted")
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    loaded, seconds, losses = resident_bytes("VmRSS"), list[float](), list[float]()
    for _ in range(steps):
        started = time.process_time()
        losses.append(step())
        seconds.append(time.process_time() - started)
        optimizer.step()
        optimizer.zero_grad()
    found = {
        "cpu_seconds_per_step": min(seconds[1:] or seconds),
        "memory_bytes": resident_bytes("VmHWM") - loaded,
        "padding": padding,
        "losses": losses,
    }
    print(json.dumps(found))


# In the parent --------------------------------------------------------------------------------------------------------


def main(
    shape: Annotated[str, typer.Option(help="Shape of the model.")] = "qwen2_5_0_5b",
    pairs: Annotated[int, typer.Option(help="Pairs of a step.")] = 512,
    micro_batch: Annotated[int, typer.Option(help="Pairs of a micro-batch.")] = 32,
    steps: Annotated[int, typer.Option(help="Steps of a process; the first is not timed if there are others.")] = 2,
    rounds: Annotated[int, typer.Option(help="Processes of each side, which alternate.")] = 1,
    dtypes: Annotated[str, typer.Option(help="Comma-separated.")] = "float32,bfloat16",
    only: Annotated[str, typer.Option(help=f"Sides, comma-separated: {', '.join(LABELS)}.")] = ",".join(LABELS),
    results_dir: Path = RESULTS,
) -> None:
    """Measure each side, and print the table."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="lean_ft_embeddings_") as scratch:
        folder = write_random_model(shape, Path(scratch) / "model")
        file = Path(scratch) / "pairs.jsonl"
        write_pairs(file, pairs, folder)
        for dtype in dtypes.split(","):
            found: dict[str, list[dict[str, Any]]] = {}
            for _ in range(rounds):
                for side in only.split(","):
                    settings = [side, str(folder), str(file), dtype, str(pairs), str(micro_batch), str(steps)]
                    command = [sys.executable, __file__, "work", *settings]
                    done = subprocess.run(command, capture_output=True, text=True)
                    if done.returncode:
                        raise RuntimeError(f"{side} failed:\n{done.stderr[-3000:]}")
                    found.setdefault(side, []).append(json.loads(done.stdout.splitlines()[-1]))
                    console.print(side, dtype, found[side][-1], markup=False)
            rows += [{"label": side, "status": "ok", "dtype": dtype, "rounds": ones} for side, ones in found.items()]
    settings = {"shape": shape, "pairs": pairs, "micro_batch": micro_batch, "steps": steps, "lr": LR}
    path = write_result(
        f"embeddings_{shape}_{pairs}x{micro_batch}",
        benchmark="embeddings",
        hardware=describe_hardware("cpu"),
        settings=settings,
        rows=rows,
        folder=results_dir,
    )
    print_result(path, describe, COLUMNS, table_cells)


def write_random_model(shape: str, folder: Path) -> Path:
    """Write a model folder of the shape with random weights in float32."""
    from lean_ft.models import load_model, save_model

    folder = write_model_folder(shape, folder, EMBEDDED_MODEL)
    save_model(load_model(folder, random_init=True), folder)
    return folder


def describe(result: dict[str, Any]) -> str:
    """The caption of the table."""
    settings = result["settings"]
    return (
        f"text embeddings, {settings['shape']}'s shape, {settings['pairs']} pairs of 5 to 60 tokens in "
        f"micro-batches of {settings['micro_batch']}"
    )


def table_cells(result: dict[str, Any]) -> list[list[str]]:
    """The rows of the table."""
    cells = []
    for row in result["rows"]:
        own = min(one["cpu_seconds_per_step"] for one in row["rounds"])
        peers = [other for other in result["rows"] if other["label"] == "peer" and other["dtype"] == row["dtype"]]
        of_peer = min((one["cpu_seconds_per_step"] for other in peers for one in other["rounds"]), default=None)
        first = row["rounds"][0]
        cells.append(
            [
                LABELS[row["label"]],
                row["dtype"],
                f"{own:.1f}",
                "" if of_peer is None else f"{own / of_peer:.2f}",
                gibibytes(max(one["memory_bytes"] for one in row["rounds"])),
                "" if first["padding"] is None else f"{first['padding']:.0%}",
                f"{first['losses'][0]:.6f}, {first['losses'][-1]:.6f}",
            ]
        )
    return cells


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        work(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]), sys.argv[5], *map(int, sys.argv[6:9]))
    else:
        typer.run(main)
