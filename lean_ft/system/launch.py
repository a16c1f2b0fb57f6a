"""Start the processes of a run, on one machine or several, and watch them until they end.

This is torchrun's agent, configured by arguments: one agent per machine. Agents meet by c10d rendezvous at an endpoint,
assign ranks, watch the processes, and restart all of them (up to `max_restarts` times) when one dies. A restarted run
resumes from its newest checkpoint. Only rank 0 and this process print messages: the error that ended the run is printed
once, with rank, host and reason.

Source: torch.distributed.elastic. Left out: torchrun's static rendezvous at a port of the first process, since after a
restart processes would find the addresses of dead ones there.
"""

import json
import logging
import os
import platform
import shlex
import signal
import socket
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

from lean_ft.system.environment import usable_cores
from lean_ft.system.interrupts import STOPPING
from lean_ft.system.redaction import redact

COMMAND_VARIABLE = "LEANFT_COMMAND"  # environment variable of each process: the command that started all of them
ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
SHUTDOWN_SECONDS = 600  # time to save after a signal
JOIN_SECONDS = 600  # time for all machines to join
JOIN_TIME = f"{JOIN_SECONDS // 60} minutes"
LOST_PEER_SIGNS = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "Socket", "TCPStore")
FAILURE_KEY = "what ended a process"  # of the store that all processes share
POLL_SECONDS = 2
STOP_CODES = tuple(128 + number for number in STOPPING)


class LaunchFailed(RuntimeError):
    """A process ended the run; the message names the process, its host and the reason."""


class RefusedByRank(ValueError):
    """A process rejected its input."""


@dataclass(frozen=True)
class Launch:
    """How many processes to start, and how machines meet."""

    processes_per_node: int
    min_nodes: int = 1
    max_nodes: int = 1
    endpoint: str = ""
    """HOST:PORT of one of the machines; empty for a single machine."""
    run_id: str = "leanft"
    max_restarts: int = 0
    is_host: bool | None = None
    """Whether the endpoint is on this machine; None: decided by the host name."""

    @property
    def nodes(self) -> str:
        """The value of --nnodes."""
        return f"{self.min_nodes}" if self.min_nodes == self.max_nodes else f"{self.min_nodes}:{self.max_nodes}"


def _elastic_config(plan: Launch) -> Any:
    """Return PyTorch's settings for the processes of a plan."""
    from torch.distributed.launcher.api import LaunchConfig

    alone, rendezvous = plan.max_nodes == 1, dict[str, Any](join_timeout=JOIN_SECONDS)
    if plan.is_host is not None:
        rendezvous["is_host"] = plan.is_host
    # torch 2.11 lacks this argument and gives processes 30 s to end.
    has_timeout = "shutdown_timeout" in {field.name for field in fields(LaunchConfig)}
    shutdown: dict[str, Any] = {"shutdown_timeout": SHUTDOWN_SECONDS} if has_timeout else {}
    return LaunchConfig(
        min_nodes=plan.min_nodes,
        max_nodes=plan.max_nodes,
        nproc_per_node=plan.processes_per_node,
        run_id=str(uuid.uuid4()) if alone else plan.run_id,
        rdzv_backend="c10d",
        rdzv_endpoint=plan.endpoint or "localhost:0",
        rdzv_configs=rendezvous,
        max_restarts=plan.max_restarts,
        local_addr="localhost" if alone else None,
        **shutdown,
    )


def launch(plan: Launch, arguments: list[str], timeout_minutes: float = 30) -> None:
    """Run `leanft ARGUMENTS` in the processes of the plan, and return when all have ended.

    A process that stays stopped (SIGSTOP) for `timeout_minutes` is killed, since it ignores other signals and blocks
    its peers. Raises RefusedByRank or LaunchFailed if a process failed, SystemExit if the processes were stopped and
    have saved, and ValueError if the machines do not meet.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError, RendezvousTimeoutError
    from torch.distributed.launcher.api import launch_agent

    alone = plan.max_nodes == 1
    if not alone:
        check_host(plan.endpoint.rpartition(":")[0], f"--rdzv-endpoint {plan.endpoint}")
        print(f"{'waiting':<12}at most {JOIN_TIME} for {plan.nodes} machines to meet at {plan.endpoint}", flush=True)
        _await_endpoint(plan)
    os.environ[COMMAND_VARIABLE] = shlex.join(["leanft", *sys.argv[1:]])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // plan.processes_per_node)))
    # The agent prints why it restarts; this process prints why the run ended.
    level = logging.ERROR if plan.max_restarts else logging.CRITICAL
    logging.getLogger("torch.distributed.elastic").setLevel(level)
    previous = signal.signal(signal.SIGUSR1, _ask_first_child_to_save)
    stopped: set[int] = set()
    done = threading.Event()
    threading.Thread(target=_kill_stopped, args=(60 * timeout_minutes, stopped, done), daemon=True).start()
    try:
        launch_agent(_elastic_config(plan), sys.executable, ["-u", "-P", "-m", "lean_ft", *arguments])
    except SignalException as signaled:
        raise SystemExit(128 + signaled.sigval) from None
    except ChildFailedError as failed:
        if not alone:
            time.sleep(2 * POLL_SECONDS)  # this machine may host the store, where other machines read the reason
        raise _first_failure(failed, plan.max_restarts, stopped) from None
    except RendezvousError as error:
        timed_out = isinstance(error, RendezvousTimeoutError)
        why = f"fewer joined within {JOIN_TIME}." if timed_out else str(error) or "no machine answered"
        raise ValueError(
            f"the machines did not meet at --rdzv-endpoint {plan.endpoint} for --nnodes {plan.nodes}: {why} Start the "
            "same command on each machine, with the host name and a free port of a machine that all can reach. If one "
            "of them has ended, its message says why."
        ) from None
    finally:
        done.set()
        signal.signal(signal.SIGUSR1, previous)


def check_host(host: str, given_as: str) -> None:
    """Raise ValueError if `host` cannot be resolved. torch would retry until its timeout, with a warning per second."""
    try:
        socket.getaddrinfo(host.strip("[]"), None)
    except OSError as error:
        raise ValueError(
            f"{given_as}: cannot resolve {host!r} ({error.strerror}). Give the name or address of a machine that all "
            "can reach."
        ) from None


def _await_endpoint(plan: Launch) -> None:
    """Wait until the endpoint's machine answers, which may start last; torch would give up after one minute."""
    from lean_ft.torch_private import is_this_machine

    host, _, port = plan.endpoint.rpartition(":")
    if is_this_machine(host) if plan.is_host is None else plan.is_host:
        return
    deadline = time.monotonic() + JOIN_SECONDS
    while True:
        try:
            return socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise ValueError(
                    f"no answer from --rdzv-endpoint {plan.endpoint} within {JOIN_TIME} ({error.strerror or error}). "
                    f"Start the same command on {host} too, and check that its port can be reached from this machine."
                ) from None
        time.sleep(1)


def _ask_first_child_to_save(number: int, frame: object) -> None:
    """Forward SIGUSR1 to one rank, which is sufficient."""
    for child in _local_ranks():
        os.kill(child, signal.SIGUSR1)
        return


def _local_ranks() -> Iterator[int]:
    """Yield the process ids of the ranks that this process started."""
    for task in Path("/proc/self/task").glob("*/children"):
        for child in task.read_text().split():
            if b"lean_ft" in Path(f"/proc/{child}/cmdline").read_bytes():
                yield int(child)


def _kill_stopped(seconds: float, killed: set[int], done: threading.Event) -> None:
    """Until `done`, kill each rank that stays stopped for so many seconds, and add it to `killed`. Time during which
    this process is stopped too (Ctrl-Z) does not count."""
    num_polls: Counter[int] = Counter()
    while not done.wait(POLL_SECONDS):
        with suppress(OSError):  # a rank that has just ended
            for child in _local_ranks():
                state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
                num_polls[child] = num_polls[child] + 1 if state == "T" else 0
                if num_polls[child] * POLL_SECONDS >= seconds:
                    killed.add(child)
                    os.kill(child, signal.SIGKILL)


def _first_failure(failed: Any, max_restarts: int, stopped: Collection[int] = ()) -> BaseException:
    """Return the error that caused the others, as an exception to raise."""
    failures = sorted(failed.failures.items(), key=lambda item: (item[1].timestamp, item[0]))
    codes = {failure.exitcode for _, failure in failures}
    if codes <= set(STOP_CODES):  # all have saved, and printed so
        return SystemExit(min(codes))

    def is_consequence(failure: Any) -> bool:
        """Whether the process failed only because another one was gone."""
        return failure.exitcode == -signal.SIGTERM or bool(failure.error_file_data.get("lost_peer"))

    rank, failure = next((item for item in failures if not is_consequence(item[1])), failures[0])
    report = failure.error_file_data if isinstance(failure.error_file_data.get("message"), str) else {}
    message = report.get("message", "")
    if report.get("exit_code", 1) == 2:
        return RefusedByRank(message)
    if failure.exitcode < 0:
        message = f"was killed by {signal.Signals(-failure.exitcode).name}"
        if failure.pid in stopped:
            message = "was stopped (SIGSTOP) for longer than the timeout"
        elif failure.exitcode == -signal.SIGKILL:
            message += "; the system does this when memory is full"
    elif not report or message == "<NONE>":
        message = f"ended with exit code {failure.exitcode}"
    else:
        message = f"failed: {message}"
    error = LaunchFailed(f"rank {rank} on {report.get('host', platform.node())} (process {failure.pid}) {message}")
    automatic = "" if max_restarts else "; --max-restarts 3 does so automatically"
    error.add_note(f"The same command resumes from the newest checkpoint{automatic}.")
    return error


def report_to_launcher(message: str, exit_code: int) -> bool:
    """Save this process's error for the `launch` that started it, and return True; return False in any other
    process."""
    file = os.environ.get(ERROR_FILE_VARIABLE)
    if file is None or COMMAND_VARIABLE not in os.environ:
        return False
    message = redact(message)
    lost_peer = exit_code != 2 and any(sign in message for sign in LOST_PEER_SIGNS)
    if os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):
        message = _share_failure(message, lost_peer)
    report = {
        "message": message,
        # The agent reports the earliest failure. A process that lost a peer may fail before the agent sees the peer's
        # end.
        "timestamp": int(time.time()) + (SHUTDOWN_SECONDS if lost_peer else 0),
        "exit_code": exit_code,
        "host": platform.node(),
        "lost_peer": lost_peer,
    }
    Path(file).write_text(json.dumps(report), encoding="utf-8")
    return True


def _share_failure(message: str, lost_peer: bool) -> str:
    """Share this process's error with other machines, whose agents do not see its end. If a peer was lost, return the
    peer's error instead of `message`."""
    with suppress(RuntimeError):  # raised by torch if the store is gone as well
        store = shared_store(timedelta(seconds=10))
        if not lost_peer:
            # The first error stays.
            store.compare_set(FAILURE_KEY, "", f"rank {os.environ['RANK']} on {platform.node()}: {message}")
        elif store.check([FAILURE_KEY]):
            return store.get(FAILURE_KEY).decode()
    return message


def decided_by_rank_zero(name: str, decide: Callable[[], str]) -> str:
    """Return the value of `decide()` on rank 0, in every process of a launched run, and again after a restart."""
    store = shared_store(timedelta(seconds=JOIN_SECONDS), of_attempt=False)
    if os.environ["RANK"] == "0" and not store.check([name]):
        store.set(name, decide())
    return store.get(name).decode()


def shared_store(timeout: timedelta, *, of_attempt: bool = True) -> Any:
    """Return a store that all processes of a run share, or of this attempt, since a store of the launcher outlives
    restarted processes. Raises torch's DistError if it cannot be reached in time."""
    from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]
    from torch.distributed.rendezvous import rendezvous

    store, _, size = next(rendezvous("env://", timeout=timeout))
    # The agent's store still has the addresses of processes that have ended.
    attempt = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)} of {size}"
    return PrefixStore(attempt if of_attempt else "run", store)
