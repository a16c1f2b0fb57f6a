"""Training with a real vLLM server on this CPU: equal tokens, rounds per minute, and runs and servers that are killed.

    python benchmarks/engines.py                   # about 15 minutes on two cores
    python benchmarks/engines.py --only tokens

`tokens`: greedy completions of the server next to lean_ft's own sampler in float32, before and after updates of the
weights: the share of equal tokens, and the largest difference of log-probabilities.

`rounds`: runs of `tiny/grpo` that sample themselves, with the server, and with rounds ahead of training: rounds per
minute without the first ones, the share of tokens whose importance ratio is clipped, and the held-out reward at the
end. The server and the training process share the cores.

`kills`: the server is killed (SIGKILL) and started again during a run, or the run is killed and started again, at
random moments: what is left of the run, and whether its steps are those of an undisturbed run.

Writes `results/engines_<hardware>.json`.
"""

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from results import RESULTS, ROOT, Hardware, print_result, require_hardware, write_result
from vllm_server import UNTIED, VERSION, VLLMProcess, random_model, vllm_server

from lean_ft import load_model, load_tokenizer
from lean_ft.data.columns import Document
from lean_ft.generation import Sampling, sample
from lean_ft.generation.stopping import stop_ids
from lean_ft.hub.paths import resolve_model_path
from lean_ft.online.engines import VLLMServer
from lean_ft.settings import GenerationConfig
from lean_ft.system.units import counted

COLUMNS = ["what", "found", "largest difference or clipped share", "rounds/min", "held-out reward"]
PARTS = ("tokens", "rounds", "kills")
TEXTS = ("1 + 1 =", "Once upon a time", "57, 45, 95: smallest", "The", "How many days has a week?", "3 * 4 - 2")
NUM_TOKENS, STEPS, SEEDS = 32, 60, 2


def compare_tokens(top: Path) -> list[dict[str, Any]]:
    rows = []
    models = {
        "llama, random": random_model("llama", top / "llama"),
        "qwen3, random, tied": random_model("qwen3", top / "qwen3"),
        "llama, embedded, tied": resolve_model_path("tiny"),
    }
    for name, folder in models.items():
        tokenizer, model = load_tokenizer(folder), load_model(folder)
        flags = UNTIED if model.config.tied_embeddings else ()
        documents = [Document.of(tokenizer.encode(text)) for text in TEXTS]
        with vllm_server(folder, "--max-model-len", "512", *flags, log=top / "log") as server:
            generation = GenerationConfig.model_validate({"engine": "vllm", "engine_url": server.url})
            engine = VLLMServer(generation, top, 512, tokenizer)
            for number_of_updates in range(3):
                engine.publish(model)
                how = Sampling(NUM_TOKENS, stop_ids=stop_ids(model, tokenizer))
                own, served = sample(model, documents, how), engine.sample(documents, how, [0] * len(documents))
                pairs = [*zip(own, served, strict=True)]
                equal = sum(a == b for one, other in pairs for a, b in zip(one.ids, other.ids, strict=False))
                gaps = [
                    abs(a - b)
                    for one, other in pairs
                    if one.ids == other.ids
                    for a, b in zip(one.log_probs, other.log_probs, strict=True)
                ]
                total = sum(len(one.ids) for one in own)
                what = f"{name}; {counted(number_of_updates, 'updates')}" if number_of_updates else name
                found = f"{equal} of {total} greedy tokens equal"
                rows.append({"status": "ok", "label": what, "found": found, "difference": max(gaps, default=None)})
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(torch.randn_like(parameter), alpha=0.01)
    return rows


def start_run(folder: Path, log: Path, *given: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "lean_ft", "run", "grpo", "--config", "tiny/grpo", f"output_dir={folder}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with open(log, "ab") as output:
        return subprocess.Popen(
            [*command, "device=cpu", "plan=false", *given],
            stdout=output,
            stderr=output,
            env=environment,
            cwd=log.parent,
        )


def finish(process: subprocess.Popen[bytes], log: Path) -> None:
    if process.wait():
        raise RuntimeError(log.read_text(errors="replace")[-2000:])


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def compare_rounds(top: Path, server: VLLMProcess) -> list[dict[str, Any]]:
    at_server = ["generation.engine=vllm", f"generation.engine_url={server.url}", "loss.correction=token_truncate"]
    ways = {
        "samples itself": [],
        "with the server": at_server,
        "with the server, rounds ahead": [*at_server, "generation.ahead=1"],
    }
    rows = []
    for name, given in ways.items():
        speeds, shares, rewards = [], [], []
        for seed in range(SEEDS):
            run, log = top / f"{name.replace(' ', '_')}_{seed}", top / "run.log"
            finish(start_run(run, log, *given, f"seed={seed}", f"max_steps={STEPS}"), log)
            steps = [line for line in lines_of(run) if "step_seconds" in line]
            speeds.append(60 * len(steps[10:]) / sum(line["step_seconds"] for line in steps[10:]))
            shares.append(statistics.mean(line.get("correction_share") or 0.0 for line in steps))
            rewards.append(lines_of(run)[-1]["eval_reward"])
        row = {"rounds_per_minute": statistics.median(speeds), "rewards": rewards, "difference": max(shares)}
        rows.append({"status": "ok", "label": name, "found": f"{SEEDS} seeds, {STEPS} rounds of 64", **row})
    return rows


def steps_of(run: Path) -> list[dict[str, Any]]:
    return [{name: line[name] for name in ("step", "reward", "loss")} for line in lines_of(run) if "reward" in line]


def compare_kills(top: Path, server: VLLMProcess) -> list[dict[str, Any]]:
    given = ["generation.engine=vllm", f"generation.engine_url={server.url}", "loss.correction=token_truncate"]
    given += ["max_steps=40", "eval_every=0", "save_every=1", "batch_size=32", "keep_last=2"]
    finish(start_run(top / "whole", top / "run.log", *given), top / "run.log")
    rows, chance = [], random.Random(0)
    for name in ("the server is killed", "the run is killed", "both are killed"):
        run, log, number = top / name.replace(" ", "_"), top / "run.log", 0
        process = start_run(run, log, *given)
        while process.poll() is None and number < 4:
            time.sleep(chance.uniform(4, 12))
            if process.poll() is not None:
                break
            number += 1
            if name != "the run is killed":
                server.kill()
                server.start(wait=False)
            if name != "the server is killed":
                process.send_signal(signal.SIGKILL)
                process.wait()
                process = start_run(run, log, *given)
        finish(process, log)
        server.wait()
        numbers = [{k: line[k] for k in ("step", "reward", "loss")} for line in lines_of(run) if "reward" in line]
        whole = [
            {k: line[k] for k in ("step", "reward", "loss")} for line in lines_of(top / "whole") if "reward" in line
        ]
        equal = sum(one == other for one, other in zip(numbers, whole, strict=True))
        share = max(line.get("correction_share") or 0.0 for line in lines_of(run))
        found = f"{number} kills; {len(numbers)} of 40 steps; {equal} with equal bits"
        rows.append({"status": "ok", "label": name, "found": found, "difference": share})
    return rows


def describe(result: dict[str, Any]) -> str:
    return f"vLLM {result['settings']['vllm']} (CPU build, float32) beside training on the same cores"


def table_cells(result: dict[str, Any]) -> list[list[str]]:
    cells = []
    for row in result["rows"]:
        difference, speed, rewards = row.get("difference"), row.get("rounds_per_minute"), row.get("rewards") or []
        shown = "-" if difference is None else f"{difference:.2g}"
        of_speed = "-" if speed is None else f"{speed:.1f}"
        cells.append([row["label"], row["found"], shown, of_speed, ", ".join(f"{one:.2f}" for one in rewards) or "-"])
    return cells


def main(
    only: Annotated[str, typer.Option(help="Parts, separated by commas.")] = ",".join(PARTS),
    results_dir: Annotated[Path, typer.Option(help="Folder for the results.")] = RESULTS,
) -> None:
    hardware: Hardware = require_hardware("cpu")
    parts, rows = only.split(","), []
    with tempfile.TemporaryDirectory() as folder:
        top = Path(folder)
        if "tokens" in parts:
            rows += compare_tokens(top)
        if {"rounds", "kills"} & {*parts}:
            with vllm_server(
                resolve_model_path("tiny"), "--max-model-len", "512", *UNTIED, log=top / "server.log"
            ) as server:
                rows += compare_rounds(top, server) if "rounds" in parts else []
                rows += compare_kills(top, server) if "kills" in parts else []
    settings = {"vllm": VERSION, "parts": parts}
    path = write_result(
        "engines", benchmark="engines", hardware=hardware, settings=settings, rows=rows, folder=results_dir
    )
    print_result(path, describe, COLUMNS, table_cells)


if __name__ == "__main__":
    typer.run(main)
