"""Handlers of signals: what a signal does, and that the previous actions come back."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from lean_ft.system.interrupts import OutsideTraining, StopSignals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_outside_training_a_signal_ends_at_once_and_says_that_nothing_is_lost(number, capfd):
    def interrupted():
        with OutsideTraining("leanft run this"):
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), number)

    with pytest.raises(SystemExit) as stopped:
        interrupted()
    assert stopped.value.code == 128 + number
    err = capfd.readouterr().err
    assert "SIGUSR1: not in a training step" in err
    assert f"{number.name}: stopped outside the training steps; there is nothing to save." in err
    assert "leanft run this" in err
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_forked_worker_ends_as_if_it_had_no_handler(capfd):
    with OutsideTraining(""):
        worker = os.fork()
        if not worker:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == -signal.SIGTERM
    assert capfd.readouterr().err == ""


def test_previous_actions_come_back():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with StopSignals():
        assert signal.getsignal(signal.SIGINT) != before[0]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received == signal.SIGTERM
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGINT)
            assert signals.received is None
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_run_in_a_thread_installs_no_handler():
    with ThreadPoolExecutor(1) as thread:  # signal.signal raises outside of the main thread
        assert thread.submit(lambda: StopSignals().__enter__().received).result() is None
