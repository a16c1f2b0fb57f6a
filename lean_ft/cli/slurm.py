"""`leanft slurm`: print a job script that runs a recipe on several machines and resumes by itself."""

import shlex
from typing import Annotated

import typer

from lean_ft.cli.arguments import Debug, Overrides, Preset, Recipe, batches_of, load_run
from lean_ft.settings import RecipeConfig
from lean_ft.system.redaction import redact

# srun starts one agent per machine, which starts the machine's processes. Before the time limit, Slurm signals only the
# script (B:). The script forwards the signal to the agents and requeues the job after they have saved.
_SCRIPT = """\
#!/bin/bash
{directives}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
warned=
trap 'warned=1; scancel --signal=TERM "$SLURM_JOB_ID"' TERM

srun --kill-on-bad-exit=1 {command} &
step=$!
wait $step
code=$?
if [ -n "$warned" ]; then
    wait $step  # the first wait ended with the signal
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
fi
exit $code
"""


def slurm(
    recipe: Recipe = None,
    overrides: Overrides = None,
    config: Preset = None,
    nodes: Annotated[int, typer.Option(min=1, help="Number of machines.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs per machine, with one process each.")] = 8,
    time: Annotated[str, typer.Option(metavar="HH:MM:SS", help="Time limit of the job.")] = "24:00:00",
    save_minutes: Annotated[
        int, typer.Option(min=1, help="Minutes before the time limit at which the run saves.")
    ] = 10,
    partition: Annotated[str | None, typer.Option(metavar="NAME", help="Slurm partition.")] = None,
    account: Annotated[str | None, typer.Option(metavar="NAME", help="Slurm account that is charged.")] = None,
    max_restarts: Annotated[int, typer.Option(min=0, help="Restarts after a process dies, within the same job.")] = 3,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port that is free on every machine.")] = 29500,
    debug: Debug = False,
) -> None:
    """Print a Slurm job that runs a recipe: leanft slurm RECIPE ... > job.sbatch

    Before the time limit, the run saves a checkpoint and the job is queued again.
    The run then resumes from the newest checkpoint.
    output_dir must be on a disk that all machines share.
    """
    # Report invalid settings now instead of when the job starts.
    _, cfg = load_run(recipe, config, overrides, processes=(num_processes := nodes * gpus_per_node))
    if isinstance(cfg, RecipeConfig) and num_processes > 1:
        from lean_ft.training.device import refuse_on_many  # here, because it imports torch

        refuse_on_many(cfg, num_processes)
    given = [*([recipe] if recipe else []), *(["--config", config] if config else []), *(overrides or [])]
    given += batches_of(cfg, given) if num_processes > 1 else []
    if secret := next((word for word in given if "[token]" in redact(word)), None):
        raise ValueError(
            f"{secret.partition('=')[0]} holds a secret, which the job script would keep. Put this setting into a preset that "
            "only you can read, and pass --config PATH."
        )
    directives = [
        "--job-name=leanft",
        f"--nodes={nodes}",
        "--ntasks-per-node=1",
        f"--gpus-per-node={gpus_per_node}",
        f"--time={time}",
        f"--signal=B:TERM@{save_minutes * 60}",
        "--requeue",
        "--open-mode=append",
        *([f"--partition={partition}"] if partition else []),
        *([f"--account={account}"] if account else []),
    ]
    flags = ["--nproc-per-node", str(gpus_per_node), "--nnodes", str(nodes), "--max-restarts", str(max_restarts)]
    meeting = f'--rdzv-endpoint "$head:{port}" --rdzv-id "$SLURM_JOB_ID"'
    command = f"leanft run {shlex.join(flags)} {meeting} {shlex.join(given)}"
    print(_SCRIPT.format(directives="\n".join(f"#SBATCH {line}" for line in directives), command=command), end="")
