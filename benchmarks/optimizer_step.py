"""Seconds and workspace of one optimizer step over the weights of Qwen2.5-0.5B (494 M, bfloat16), a rule at
a time.

    python benchmarks/optimizer_step.py --rules adamw_8bit adamw sgd --compile both --threads 2

Gradients are random. Each rule runs in a process of its own, so that its peak resident size is its own.
`cpu_seconds` is the processor time of all threads: unlike `seconds`, it means something on a machine that
is shared.
"""

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path

HIDDEN, INTERMEDIATE, KEY_VALUE, LAYERS, VOCABULARY = 896, 4864, 128, 24, 151_936
RULES = ["sgd", "adafactor", "adamw", "adamw_8bit"]


def shapes() -> list[tuple[int, ...]]:
    layer = [
        (HIDDEN, HIDDEN),
        (HIDDEN,),
        (KEY_VALUE, HIDDEN),
        (KEY_VALUE,),
        (KEY_VALUE, HIDDEN),
        (KEY_VALUE,),
        (HIDDEN, HIDDEN),
        (INTERMEDIATE, HIDDEN),
        (INTERMEDIATE, HIDDEN),
        (HIDDEN, INTERMEDIATE),
        (HIDDEN,),
        (HIDDEN,),
    ]
    return [(VOCABULARY, HIDDEN), *layer * LAYERS, (HIDDEN,)]


def measure(rule: str, options: dict, compile: bool, steps: int) -> dict:
    import torch

    from lean_ft.optim import LossScaler, build_optimizer
    from lean_ft.settings import OptimizerConfig

    torch.manual_seed(0)
    model = torch.nn.ParameterList(torch.empty(shape, dtype=torch.bfloat16) for shape in shapes())
    for param in model:
        param.data.normal_(std=0.02)
        param.grad = torch.empty_like(param).normal_(std=1e-4)
    cfg = OptimizerConfig.model_validate({"name": rule, **options})
    optimizer = build_optimizer(model, cfg, clip_grad_norm=None, uses_loss_scaling=False, compile=compile)
    optimizer.set_lr(1e-5)
    scaler = LossScaler(enabled=False)
    for tensor in optimizer.state_dict().values():  # make its pages resident before counting
        tensor.add_(0)

    peak_before = peak_rss_bytes()
    optimizer.step()  # compiles, where it is asked to
    seconds, cpu_seconds, norm_seconds = [], [], []
    for _ in range(steps):
        start, cpu_start = time.perf_counter(), time.process_time()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu_start)
        start = time.process_time()
        optimizer.finish_gradients(scaler, max_norm=None)
        norm_seconds.append(time.process_time() - start)
    return {
        "rule": rule,
        **options,
        "compile": compile,
        "threads": torch.get_num_threads(),
        "seconds": round(min(seconds), 3),
        "cpu_seconds": round(min(cpu_seconds), 3),
        "norm_cpu_seconds": round(min(norm_seconds), 3),
        "state_mib": round(optimizer.state_bytes / 2**20),
        "workspace_mib": round((peak_rss_bytes() - peak_before) / 2**20),
        "steps": steps,
    }


def peak_rss_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rules", nargs="+", default=RULES)
    parser.add_argument("--compile", choices=["yes", "no", "both"], default="both")
    parser.add_argument("--option", action="append", default=[], help="a setting of the optimizer, KEY=true")
    parser.add_argument("--threads", type=int, default=0, help="0 leaves torch's default")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        import torch

        if args.threads:
            torch.set_num_threads(args.threads)
        print(json.dumps(measure(**json.loads(args.one), steps=args.steps)))
        return
    options = {key: json.loads(value) for key, value in (option.split("=") for option in args.option)}
    results = []
    for rule in args.rules:
        for compile in {"yes": [True], "no": [False], "both": [False, True]}[args.compile]:
            one = json.dumps({"rule": rule, "options": options, "compile": compile})
            command = [sys.executable, __file__, "--one", one, f"--threads={args.threads}"]
            done = subprocess.run([*command, f"--steps={args.steps}"], stdout=subprocess.PIPE, text=True, check=True)
            results.append(json.loads(done.stdout.splitlines()[-1]))
            print(results[-1], flush=True)
    if args.output:
        import torch

        versions = {"torch": torch.__version__, "python": platform.python_version()}
        args.output.write_text(json.dumps({"machine": platform.processor(), **versions, "results": results}, indent=2))


if __name__ == "__main__":
    main()
