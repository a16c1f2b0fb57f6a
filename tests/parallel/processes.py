"""Run a function in several processes connected by gloo, and return each rank's result."""

import multiprocessing
import os
import pickle
import random
import socket
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from lean_ft.torch_private import fsdp_common

TIMEOUT_SECONDS = 300
# FSDP2 of torch 2.11 and 2.12 shards neither weights that are split between ranks nor 4-bit weights; parallelize
# refuses both.
SHARDS_PARTS = hasattr(fsdp_common, "ShardPlacementResult")
needs_parts = pytest.mark.skipif(
    not SHARDS_PARTS, reason=f"torch {torch.__version__} cannot shard split layers or 4-bit weights"
)

# Processes are forked from one that has imported the library and has no threads, so they start quickly.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["lean_ft.training", "lean_ft.parallel", "recipes.finetune"])


def free_port() -> int:
    """A free port below those that the system gives to outgoing connections, which could take it before its server."""
    ports = random.SystemRandom()
    while True:
        port = ports.randrange(15_000, 32_000)
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def supported(cases: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Return the cases, settings by name, that this torch supports on several ranks."""
    refused = () if SHARDS_PARTS else ("parallel.tensor=", "parallel.experts=", "nf4")
    return {name: one for name, one in cases.items() if not any(part in " ".join(one) for part in refused)}


def on_ranks(size: int, work: Callable[..., Any], *arguments: Any, timeout: float = TIMEOUT_SECONDS) -> list[Any]:
    """Results of `work(*arguments)`, a module-level function, on `size` ranks, in rank order.

    Raises AssertionError with the traceback of the first rank that failed, or after the timeout.
    """
    results: Any = FORKS.SimpleQueue()
    common = (size, free_port(), results, work, arguments, dict(os.environ))
    processes = [FORKS.Process(target=_run, args=(rank, *common), daemon=True) for rank in range(size)]
    for process in processes:
        process.start()
    found: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    try:
        while len(found) < size:
            if results.empty():
                assert time.monotonic() < deadline, f"only ranks {sorted(found)} came back within {timeout} s"
                assert any(process.is_alive() for process in processes) or not results.empty(), "a rank died"
                time.sleep(0.02)
                continue
            rank, result, error = pickle.loads(results.get())
            assert error is None, f"rank {rank}: {error}"
            found[rank] = result
    finally:
        for process in processes:
            process.join(5 if len(found) == size else 0)
            process.kill()
            process.join()
    return [found[rank] for rank in range(size)]


def _run(
    rank: int,
    size: int,
    port: int,
    results: Any,
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
    environment: dict[str, str],
) -> None:
    os.environ |= environment | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    try:
        # Pickled, because tensors in shared memory would end with the process.
        results.put(pickle.dumps((rank, work(*arguments), None)))
    except BaseException:
        results.put(pickle.dumps((rank, None, traceback.format_exc())))
    finally:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()


def selected(request: pytest.FixtureRequest) -> set[str]:
    """The module's tests that pytest runs, and their cases (`name`), so that processes compute nothing else."""
    own = [item for item in request.session.items if item.path == request.path]
    names = [item.callspec.params.get("name") for item in own if hasattr(item, "callspec")]
    return {*(item.originalname for item in own), *filter(None, names)}


def refusal(work: Callable[..., Any], *arguments: Any, **settings: Any) -> str:
    """The message of the ValueError that `work` raises."""
    with pytest.raises(ValueError) as raised:
        work(*arguments, **settings)
    return str(raised.value)


def assert_refused(messages_of_ranks: list[list[str]], expected: Iterable[str]) -> None:
    """Every rank has the expected messages, in this order."""
    for messages in messages_of_ranks:
        for message, part in zip(messages, expected, strict=True):
            assert part in message
