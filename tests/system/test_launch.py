"""The launcher kills a rank that stays stopped, and reports it."""

import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

from lean_ft.system import launch


def test_a_stopped_rank_is_killed_and_reported_as_stopped(monkeypatch):
    monkeypatch.setattr(launch, "POLL_SECONDS", 0.1)
    sleep = [sys.executable, "-c", "import time; time.sleep(60)  # as lean_ft does"]
    stopped, running = (subprocess.Popen(sleep) for _ in range(2))
    killed, done = set(), threading.Event()
    watch = threading.Thread(target=launch._kill_stopped, args=(1.0, killed, done))
    watch.start()
    try:
        stopped.send_signal(signal.SIGSTOP)
        assert stopped.wait(20) == -signal.SIGKILL
        assert running.poll() is None
        assert killed == {stopped.pid}
    finally:
        done.set()
        watch.join()
        running.kill()
        running.wait()
    lost = {"message": "gloo: Connection closed by peer", "exit_code": 1, "lost_peer": True}
    failures = {
        0: SimpleNamespace(exitcode=1, timestamp=5, pid=1, error_file_data=lost),
        1: SimpleNamespace(exitcode=-signal.SIGKILL, timestamp=9, pid=stopped.pid, error_file_data={}),
    }
    error = launch._first_failure(SimpleNamespace(failures=failures), 0, killed)
    assert f"(process {stopped.pid}) was stopped (SIGSTOP)" in str(error)
    assert str(error).startswith("rank 1 on ")
