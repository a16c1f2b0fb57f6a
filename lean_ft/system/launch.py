"""Starts the processes of a run, on one machine or several, and sees them to their end.

It is torchrun's agent, told everything by arguments: one agent a machine, which meet by c10d rendezvous at an endpoint, give
ranks, watch the processes, and start all of them again, as often as they may, when one dies. A run that is started again
goes on from its newest checkpoint. Processes leave the words to rank 0 and to this one: what ended a run is told once, with
rank, host and reason.

Source: torch.distributed.elastic. A rendezvous at a fixed port of the first process, torchrun's older way, is left out: after a
restart it meets the old addresses.
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
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from lean_ft.system.environment import usable_cores
from lean_ft.system.redaction import redact

COMMAND_VARIABLE = "LEANFT_COMMAND"  # what started all processes, in the environment of each
ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
SHUTDOWN_SECONDS = 600  # that processes have to save in, after a signal
JOIN_SECONDS = 600  # that machines have to come in
WAITED = f"{JOIN_SECONDS // 60} minutes"
LOST_PEER_SIGNS = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "Socket", "TCPStore")
ENDED = "what ended a process"  # in the store of all of them
LOOK_SECONDS = 2  # between two looks for that
STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)


class LaunchFailed(RuntimeError):
    """A process ended the run; the message tells which, where and why."""


class RefusedByRank(ValueError):
    """What a process refused to begin with."""


@dataclass(frozen=True)
class Launch:
    """How many processes start, and how those of several machines meet."""

    processes_a_node: int
    min_nodes: int = 1
    max_nodes: int = 1
    endpoint: str = ""
    """HOST:PORT of one of the machines; of one machine alone none is needed."""
    run_id: str = "leanft"
    max_restarts: int = 0
    is_host: bool | None = None
    """Whether this machine is the endpoint's; None has it find out by the name."""

    @property
    def nodes(self) -> str:
        """As --nnodes has it."""
        return f"{self.min_nodes}" if self.min_nodes == self.max_nodes else f"{self.min_nodes}:{self.max_nodes}"


def launch(plan: Launch, arguments: list[str], timeout_minutes: float = 30) -> None:
    """Runs `leanft ARGUMENTS` in the processes of the plan, and returns when all are done.

    A process that stays stopped (SIGSTOP) for `timeout_minutes` is killed: it takes no other signal, and the others wait for it.
    Raises RefusedByRank or LaunchFailed where one of them failed, SystemExit where they were stopped and have saved, and
    ValueError where machines do not meet.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError, RendezvousTimeoutError
    from torch.distributed.launcher.api import LaunchConfig, launch_agent

    alone = plan.max_nodes == 1
    if not alone:
        find_host(plan.endpoint.rpartition(":")[0], f"--rdzv-endpoint {plan.endpoint}")
        print(f"{'waiting':<12}at most {WAITED} for {plan.nodes} machines to meet at {plan.endpoint}", flush=True)
        _await_endpoint(plan)
    os.environ[COMMAND_VARIABLE] = shlex.join(["leanft", *sys.argv[1:]])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // plan.processes_a_node)))
    # Why it starts again the agent says itself; of an end this process does.
    level = logging.ERROR if plan.max_restarts else logging.CRITICAL
    logging.getLogger("torch.distributed.elastic").setLevel(level)
    rendezvous: dict[str, Any] = {"join_timeout": JOIN_SECONDS}
    if plan.is_host is not None:
        rendezvous["is_host"] = plan.is_host
    config = LaunchConfig(
        min_nodes=plan.min_nodes,
        max_nodes=plan.max_nodes,
        nproc_per_node=plan.processes_a_node,
        run_id=str(uuid.uuid4()) if alone else plan.run_id,
        rdzv_backend="c10d",
        rdzv_endpoint=plan.endpoint or "localhost:0",
        rdzv_configs=rendezvous,
        max_restarts=plan.max_restarts,
        local_addr="localhost" if alone else None,
        shutdown_timeout=SHUTDOWN_SECONDS,
    )
    previous = signal.signal(signal.SIGUSR1, _ask_first_child_to_save)
    stopped: set[int] = set()
    done = threading.Event()
    threading.Thread(target=_kill_stopped, args=(60 * timeout_minutes, stopped, done), daemon=True).start()
    try:
        launch_agent(config, sys.executable, ["-u", "-m", "lean_ft", *arguments])
    except SignalException as signaled:
        raise SystemExit(128 + signaled.sigval) from None
    except ChildFailedError as failed:
        if not alone:
            time.sleep(2 * LOOK_SECONDS)  # the store may be here, in which other machines look for the reason
        raise _told_once(failed, plan.max_restarts, stopped) from None
    except RendezvousError as error:
        timed_out = isinstance(error, RendezvousTimeoutError)
        why = f"fewer came within {WAITED}." if timed_out else str(error) or type(error).__name__
        raise ValueError(
            f"the machines did not meet at --rdzv-endpoint {plan.endpoint} for --nnodes {plan.nodes}: {why} Start the same "
            "command on each of them, with the name and a free port of one that all can reach; if one has ended, what it "
            "said tells why."
        ) from None
    finally:
        done.set()
        signal.signal(signal.SIGUSR1, previous)


def find_host(host: str, given_as: str) -> None:
    """Raises ValueError where this machine knows no machine of that name; torch would go on asking for it until its time
    is up, with a warning a second."""
    try:
        socket.getaddrinfo(host.strip("[]"), None)
    except OSError as error:
        raise ValueError(
            f"{given_as}: this machine knows no {host!r} ({error.strerror}). Give the name or the address of a machine that "
            "all can reach."
        ) from None


def _await_endpoint(plan: Launch) -> None:
    """Returns when the machine where all meet answers, which may start last; torch would give up after one minute."""
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
                    f"nothing answered at --rdzv-endpoint {plan.endpoint} within {WAITED} ({error.strerror or error}). Start the "
                    f"same command on {host} too, and see that its port can be reached from here."
                ) from None
        time.sleep(1)


def _ask_first_child_to_save(number: int, frame: object) -> None:
    """Hands SIGUSR1 on: one rank suffices."""
    for child in _ranks_here():
        os.kill(child, signal.SIGUSR1)
        return


def _ranks_here() -> Iterator[int]:
    """The processes of ranks that this one started."""
    for task in Path("/proc/self/task").glob("*/children"):
        for child in task.read_text().split():
            if b"lean_ft" in Path(f"/proc/{child}/cmdline").read_bytes():
                yield int(child)


def _kill_stopped(seconds: float, killed: set[int], done: threading.Event) -> None:
    """Kill every rank that is stopped at each look for so long, and note it in `killed`, until `done`. Time in which this
    process is stopped too, as by Ctrl-Z, does not count."""
    looks: Counter[int] = Counter()
    while not done.wait(LOOK_SECONDS):
        with suppress(OSError):  # one that has ended meanwhile
            for child in _ranks_here():
                state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
                looks[child] = looks[child] + 1 if state == "T" else 0
                if looks[child] * LOOK_SECONDS >= seconds:
                    killed.add(child)
                    os.kill(child, signal.SIGKILL)


def _told_once(failed: Any, max_restarts: int, stopped: Collection[int] = ()) -> BaseException:
    """The error that began it, of all that processes ended with."""
    failures = sorted(failed.failures.items(), key=lambda item: (item[1].timestamp, item[0]))
    codes = {failure.exitcode for _, failure in failures}
    if codes <= set(STOPPED):  # they have saved, and said so
        return SystemExit(min(codes))

    def is_consequence(failure: Any) -> bool:
        """Whether it only met that another process was gone."""
        return failure.exitcode == -signal.SIGTERM or bool(failure.error_file_data.get("lost_peer"))

    rank, failure = next((item for item in failures if not is_consequence(item[1])), failures[0])
    told = failure.error_file_data if isinstance(failure.error_file_data.get("message"), str) else {}
    message, code = told.get("message", ""), told.get("exit_code", 1)
    if code == 2:
        return RefusedByRank(message)
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        message = f"was killed by {name}"
        if failure.pid in stopped:
            message = "was stopped, as by SIGSTOP, until the others' time to wait was over"
        elif failure.exitcode == -signal.SIGKILL:
            message += ", as the system does when memory is full"
    elif not told or message == "<NONE>":
        message = f"ended with exit code {failure.exitcode}"
    else:
        message = f"failed: {message}"
    host = told.get("host", platform.node())
    error = LaunchFailed(f"rank {rank} on {host} (process {failure.pid}) {message}")
    by_itself = "; --max-restarts 3 would have it do so by itself" if not max_restarts else ""
    error.add_note(f"The same command goes on from the newest checkpoint{by_itself}.")
    return error


def leave_word(message: str, exit_code: int) -> bool:
    """In a process that `launch` started: leaves it what this one ends with, and returns True; False in any other."""
    file = os.environ.get(ERROR_FILE_VARIABLE)
    if file is None or COMMAND_VARIABLE not in os.environ:
        return False
    lost_peer = exit_code != 2 and any(sign in message for sign in LOST_PEER_SIGNS)
    if os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):
        message = _tell_other_machines(message, lost_peer)
    word = {
        "message": redact(message),
        # The agent tells the earliest failure as the cause. Who lost a peer may say so before the agent has seen that one die.
        "timestamp": int(time.time()) + (SHUTDOWN_SECONDS if lost_peer else 0),
        "exit_code": exit_code,
        "host": platform.node(),
        "lost_peer": lost_peer,
    }
    Path(file).write_text(json.dumps(word), encoding="utf-8")
    return True


def _tell_other_machines(message: str, lost_peer: bool) -> str:
    """Has the processes of other machines, on which no agent ends them, know what ended this one. Returns the message, with what
    ended the peer where one was lost."""
    with suppress(RuntimeError):  # of torch's, where the store is gone as well
        store = shared_store(timedelta(seconds=10))
        if not lost_peer:
            # The first one stays.
            store.compare_set(ENDED, "", f"rank {os.environ['RANK']} on {platform.node()}: {message}")
        elif store.check([ENDED]):
            return store.get(ENDED).decode()
    return message


def shared_store(timeout: timedelta) -> Any:
    """What all processes of this attempt can write into and read. Raises torch's DistError where it is not reached in time."""
    from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]
    from torch.distributed.rendezvous import rendezvous

    store, _, size = next(rendezvous("env://", timeout=timeout))
    # The agent's store outlives processes that are started again, and the addresses of those before lie in it.
    return PrefixStore(f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)} of {size}", store)
