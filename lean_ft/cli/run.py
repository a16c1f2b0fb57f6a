"""`leanft run`: run a recipe."""

import logging
import os
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from pydantic import BaseModel

from lean_ft.cli.arguments import Debug, Overrides, Preset, Recipe, batches_of, load_run
from lean_ft.cli.errors import add_place, is_out_of_memory
from lean_ft.settings import ParallelConfig, RecipeConfig
from lean_ft.system.before_torch import prepare_torch
from lean_ft.system.catalog import is_shipped
from lean_ft.system.environment import usable_cores
from lean_ft.system.interrupts import OutsideTraining
from lean_ft.system.launch import COMMAND_VARIABLE, Launch, launch
from lean_ft.system.redaction import as_given
from lean_ft.system.user_code import closing
from lean_ft.system.user_functions import without_os_exit


def _flag(name: str, metavar: str, help: str) -> Any:
    """Return an option of torchrun, spelled with dashes or underscores."""
    names = dict.fromkeys((f"--{name}", f"--{name.replace('-', '_')}"))
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel="Several processes", show_default=False)


def run(
    recipe: Recipe = None,
    overrides: Overrides = None,
    config: Preset = None,
    nproc_per_node: Annotated[
        str | None, _flag("nproc-per-node", "N|gpu|cpu", "Processes on this machine, each with its own GPU.")
    ] = None,
    nnodes: Annotated[
        str,
        _flag(
            "nnodes", "M|M:K", "Number of machines, or the smallest and largest number. Run the same command on each."
        ),
    ] = "1",
    rdzv_endpoint: Annotated[
        str | None,
        _flag("rdzv-endpoint", "HOST:PORT", "Address where the machines connect: one of them, with a free port."),
    ] = None,
    rdzv_id: Annotated[str, _flag("rdzv-id", "NAME", "Name of the run, if several runs use one endpoint.")] = "leanft",
    max_restarts: Annotated[int, _flag("max-restarts", "N", "How often all processes restart after one has died.")] = 0,
    node_rank: Annotated[int | None, typer.Option("--node-rank", "--node_rank", hidden=True)] = None,
    master_addr: Annotated[str | None, typer.Option("--master-addr", "--master_addr", hidden=True)] = None,
    master_port: Annotated[int, typer.Option("--master-port", "--master_port", hidden=True)] = 29500,
    rdzv_backend: Annotated[str, typer.Option("--rdzv-backend", "--rdzv_backend", hidden=True)] = "c10d",
    standalone: Annotated[bool, typer.Option("--standalone", hidden=True)] = False,
    debug: Debug = False,
) -> None:
    """Run a recipe.

    RECIPE is a name from `leanft ls` or your own file.
    KEY=VALUE overrides the preset, which overrides the recipe's defaults.
    `leanft cat RECIPE` prints all settings.
    """
    if nproc_per_node is not None or nnodes != "1":
        if rdzv_backend not in ("c10d", "static"):
            raise ValueError(f"--rdzv-backend {rdzv_backend} is not supported. Remove it; c10d is used.")
        if rdzv_endpoint is None and master_addr is not None:
            rdzv_endpoint = f"{master_addr}:{master_port}"
        plan = _planned(nproc_per_node or "gpu", nnodes, rdzv_endpoint, rdzv_id, max_restarts)
        if node_rank is not None and plan.max_nodes > 1:
            plan = replace(plan, is_host=node_rank == 0)
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # `prepare_torch` sets this for one process
        # Report invalid settings once, before any process starts.
        _, cfg = load_run(recipe, config, overrides, processes=plan.max_nodes * plan.processes_per_node, runs=True)
        words = [*([recipe] if recipe else []), *(["--config", config] if config else []), *(overrides or [])]
        words += batches_of(cfg, words)
        parallel = cfg.group(ParallelConfig) if isinstance(cfg, RecipeConfig) else None
        parallel = parallel or ParallelConfig()
        launch(plan, ["run", *words, *(["--debug"] if debug else [])], parallel.timeout_minutes)
        return
    command = os.environ.get(COMMAND_VARIABLE, shlex.join(["leanft", *sys.argv[1:]]))
    with OutsideTraining(command):  # before the import of torch, which takes seconds
        prepare_torch()
        quiet_libraries()
        run_recipe(*load_run(recipe, config, overrides, runs=True))


def _planned(processes: str, nodes: str, endpoint: str | None, run_id: str, max_restarts: int) -> Launch:
    """Parse the launch options. Raise ValueError for invalid values."""
    if processes.isdigit() and int(processes) > 0:
        number = int(processes)
    elif processes in ("gpu", "cpu", "auto"):
        from torch.cuda import device_count

        number = 0 if processes == "cpu" else device_count()
        if processes == "gpu" and number == 0:
            raise ValueError("--nproc-per-node gpu: this machine has no GPU. Pass a number: --nproc-per-node 2.")
        number = number or usable_cores()
    else:
        raise ValueError(f"--nproc-per-node {processes}: expected a number from 1, or gpu, cpu or auto.")
    least, _, most = nodes.partition(":")
    if not (least.isdigit() and (most.isdigit() or ":" not in nodes) and 1 <= int(least) <= int(most or least)):
        raise ValueError(f"--nnodes {nodes}: expected a number of machines, or the smallest and largest number: 1:4.")
    is_address = endpoint is not None and re.fullmatch(r"\S+:\d+", endpoint)
    if endpoint is not None and not is_address:
        raise ValueError(f"--rdzv-endpoint {endpoint}: expected a machine's name and a port, such as node1:29500.")
    if int(most or least) > 1 and endpoint is None:
        raise ValueError(
            f"--nnodes {nodes} needs --rdzv-endpoint HOST:PORT: the name of a machine that all others can reach, and a "
            "free port. Run the same command on each machine."
        )
    return Launch(number, int(least), int(most or least), endpoint or "", run_id, max_restarts=max_restarts)


def quiet_libraries() -> None:
    """Silence warnings of torchao about kernels for other devices, and of torch about torchao. Users cannot fix
    them."""
    from lean_ft.torch_private import PYTREE_LOGGER

    for name in ("torchao", PYTREE_LOGGER):
        logging.getLogger(name).setLevel(logging.ERROR)


def run_recipe(recipe: ModuleType, cfg: BaseModel) -> Any:
    """Choose the run directory, pin models to a commit or checkpoint, print the expected memory, and run a recipe.

    Returns what the recipe's `main` returns, or the run directory.
    """
    from lean_ft.training.starting import settled  # here, because it imports torch

    with closing(), settled(cfg) as cfg:
        if isinstance(cfg, RecipeConfig) and plans_itself(recipe, cfg) and not _is_one_of_many():
            _print_expected_memory(recipe, cfg)
        result = _run_main(recipe, cfg)
    if result is not None:
        return result
    folder = getattr(cfg, "output_dir", None)
    return as_given(folder) if isinstance(folder, Path) else folder


def _run_main(recipe: ModuleType, cfg: BaseModel) -> Any:
    try:
        with without_os_exit():
            result = recipe.main(cfg)
        if _is_one_of_many():
            _leave_process_group()
        return result
    except SystemExit as error:
        if error.code or not is_shipped(recipe):
            raise
        # With exit code 0, a caller would consider the run complete.
        raise RuntimeError(
            "your function ended the run by sys.exit(0). Raise an exception or return a value instead."
        ) from error
    except BrokenPipeError as error:
        raise RuntimeError("the run stopped, because the program that read its output has ended.") from error
    except Exception as error:
        if is_out_of_memory(error):
            error.add_note(memory_advice(cfg))
        add_place(error, Path(recipe.__file__ or ""), is_shipped(recipe), getattr(cfg, "output_dir", None))
        raise


def _is_one_of_many() -> bool:
    """Whether several processes train the model. The rehearsal before a run covers only a single process."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def _leave_process_group() -> None:
    """Destroy the process group. Not called after an error, because the other processes would not respond."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def plans_itself(recipe: ModuleType, cfg: RecipeConfig) -> bool:
    """Whether a run is rehearsed first. A user's own recipe may have side effects, so it is rehearsed only with
    plan=true."""
    return is_shipped(recipe) if cfg.plan == "auto" else cfg.plan


def _print_expected_memory(recipe: ModuleType, cfg: RecipeConfig) -> None:
    """Print the expected memory of the run before it loads weights."""
    from lean_ft.models.device import resolve_device
    from lean_ft.plan.beforehand import foresee
    from lean_ft.system.log import say

    resolve_device(cfg.device)  # report a missing device first
    try:
        outlook = foresee(recipe, cfg)
    except RuntimeError as error:
        say("plan", f"no memory estimate: {error}")
        return
    if outlook is not None:
        say("plan", str(outlook))
        if not outlook.fits:
            say("plan", "WARNING: not enough memory. `leanft plan` with the same arguments lists settings that fit.")
        elif outlook.advice is not None:
            say("plan", outlook.advice)


def memory_advice(cfg: BaseModel) -> str:
    """Return advice for a run that ran out of memory."""
    if not isinstance(cfg, RecipeConfig):
        return "Out of memory. Lower batch_size or the length of the texts."
    advice = "Out of memory. Run `leanft plan` with the same arguments: it prints settings that fit this device."
    if cfg.batch_size > 1:
        advice += " To resume this run, lower batch_size and raise gradient_accumulation_steps by the same factor."
    return advice
