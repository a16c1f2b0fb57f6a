"""`leanft slurm`: print a job script that runs a recipe on several machines and resumes by itself."""

import re
import shlex
from typing import Annotated

import typer

from lean_ft.cli.arguments import Debug, Overrides, Preset, Recipe
from lean_ft.cli.launch_file import render, words_of_job


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
    for option, value in {"--time": time, "--partition": partition, "--account": account}.items():
        if value is not None and not re.fullmatch(r"[\w.:,@+-]+", value):
            raise ValueError(f"{option} is {value!r}; expected letters, digits and . : , @ + - without spaces.")
    _, given = words_of_job(recipe, config, overrides, nodes * gpus_per_node)
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
    print(render("slurm.sh", directives=directives, command=command), end="")
