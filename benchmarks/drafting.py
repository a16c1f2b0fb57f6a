"""Accepted drafts of drafting layers that lean_ft trained, next to a real vLLM server on this CPU.

    python benchmarks/drafting.py                       # about 10 minutes on two cores
    python benchmarks/drafting.py --folder CHECKPOINT   # of layers that are trained already

A small glm4_moe model is trained on the embedded data, then a drafting layer on the frozen trunk. The checkpoint is
served without drafts and with 1 and 2 drafts per step. Greedy completions of held-out questions are compared with
lean_ft's own, token by token, and vLLM's counters of drafts with `leanft evaluate drafts=K`.

Writes `results/drafting_<hardware>.json`.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from results import RESULTS, Hardware, print_result, require_hardware, write_result
from vllm_server import VERSION, draft_counters, greedy_ids, vllm_server

from lean_ft.data import EvalBatches, prepare_batches
from lean_ft.data.columns import Document
from lean_ft.generation import Sampling, open_model, sample, stop_ids
from lean_ft.generation.drafting import AcceptedDrafts, accepted_drafts
from lean_ft.hub.paths import resolve_model_path
from lean_ft.models import Decoder
from lean_ft.peft.finished_models import find_finished
from lean_ft.settings import AskedModelConfig, SFTDataConfig

COLUMNS = ["what", "equal completions", "steps, vLLM", "steps, lean_ft", "accepted, vLLM", "accepted, lean_ft"]
CONFIG = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "vocab_size": 768,
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 96,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "use_qk_norm": True,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
TRAIN = ("model.dtype=float32", "data.source=tiny/train.jsonl", "data.max_length=512", "batch_size=32")
TRAIN += ("optimizer.lr=3e-3", "schedule.warmup_steps=20", "clip_grad_norm=1", "device=cpu", "plan=false")


def train(top: Path) -> Path:
    """Train a trunk and its drafting layer; return the run of the latter."""
    untrained = top / "untrained"
    untrained.mkdir()
    (untrained / "config.json").write_text(json.dumps(CONFIG))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (untrained / name).write_bytes((resolve_model_path("tiny") / name).read_bytes())
    for given in (
        (f"model.path={untrained}", "model.random_init=true", "epochs=4", f"output_dir={top / 'trunk'}"),
        (f"model.path={top / 'trunk'}", "model.mtp=train", "epochs=2", f"output_dir={top / 'drafting'}"),
    ):
        subprocess.run([sys.executable, "-m", "lean_ft", "run", "finetune", *TRAIN, *given], check=True)
    return top / "drafting"


def held_out(model: Decoder, tokenizer: Any, limit: int) -> tuple[list[Document], Sampling]:
    batches, _ = prepare_batches(SFTDataConfig(source="tiny/validation.jsonl"), tokenizer, batch_size=8, seed=0)
    asked = [pair for batch in EvalBatches(batches.layout, batches.report) for pair in batch.questions()][:limit]
    longest = max(len(answer) for _, answer in asked)
    return [prompt for prompt, _ in asked], Sampling(longest, stop_ids=stop_ids(model, tokenizer))


def compare(folder: Path, top: Path, limit: int) -> list[dict[str, Any]]:
    rows = list[dict[str, Any]]()
    asked = AskedModelConfig.model_validate({"path": str(folder), "dtype": "float32", "images": "none"})
    model, tokenizer = open_model(asked.model_copy(update={"mtp": "train"}), device="cpu")
    prompts, sampling = held_out(model, tokenizer, limit)
    own = [completion.ids for completion in sample(model, prompts, sampling)]
    for number in (0, 1, 2):
        found = accepted_drafts(model, prompts, sampling, number, 16384) if number else AcceptedDrafts(0, ())
        drafts = ("--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": number}))
        with vllm_server(folder, "--max-model-len", "512", *(drafts if number else ()), log=top / "log") as server:
            served = [
                greedy_ids(server.url, folder, prompt.ids.tolist(), sampling.max_new_tokens, sampling.stop_ids)
                for prompt in prompts
            ]
            counted = draft_counters(server.url)
        equal = sum(one == other for one, other in zip(own, served, strict=True))
        rows.append(
            {
                "status": "ok",
                "label": f"{number} drafts per step",
                "equal": f"{equal} of {len(prompts)}",
                "steps_vllm": int(counted.get("drafts", 0)),
                "steps": found.steps,
                "accepted_vllm": [int(counted[f"accepted_tokens_per_pos{place}"]) for place in range(number)],
                "accepted": [*found.accepted],
                "tokens_per_step": found.tokens_per_step,
            }
        )
    return rows


def describe(result: dict[str, Any]) -> str:
    settings = result["settings"]
    return f"Drafts of a trained glm4_moe model, vLLM {settings['vllm']} and lean_ft, {settings['questions']} questions"


def table_cells(result: dict[str, Any]) -> list[list[str]]:
    return [
        [
            row["label"],
            row["equal"],
            *(f"{row[name]:,}" for name in ("steps_vllm", "steps")),
            *(", ".join(map(str, row[name])) or "-" for name in ("accepted_vllm", "accepted")),
        ]
        for row in result["rows"]
    ]


def main(
    folder: Annotated[Path | None, typer.Option(help="A checkpoint with trained drafting layers.")] = None,
    questions: Annotated[int, typer.Option(help="Held-out questions.")] = 100,
    results_dir: Annotated[Path, typer.Option(help="Folder for the results.")] = RESULTS,
) -> None:
    hardware: Hardware = require_hardware("cpu")
    with tempfile.TemporaryDirectory() as top:
        trained = find_finished(folder or train(Path(top)))
        rows = compare(trained, Path(top), questions)
    settings = {"vllm": VERSION, "questions": questions, "trained_here": folder is None}
    path = write_result(
        "drafting", benchmark="drafting", hardware=hardware, settings=settings, rows=rows, folder=results_dir
    )
    print_result(path, describe, COLUMNS, table_cells)


if __name__ == "__main__":
    typer.run(main)
