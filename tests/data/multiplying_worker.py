"""A worker for test_workers.py: multiplies, and does as it is told."""

import os
import signal
import sys

import numpy as np

from lean_ft.data.workers import Answer, serve


def begin(factor):
    if factor is None:
        raise ValueError("no factor")

    def answer(item):
        print("said by some library")
        if item == "modules":
            return Answer(sorted(sys.modules), [])
        if item == "process":
            return Answer(os.getpid(), [])
        if item == "exit":
            os._exit(3)
        if item == "die":
            signal.raise_signal(signal.SIGKILL)
        if isinstance(item, list):
            return Answer(None, [np.array(item, dtype=np.int32) * factor, np.array(item) > 1, np.empty(0, np.int64)])
        if isinstance(item, str):
            return Answer(factor * int(item), [])
        return Answer(factor * item["number"], [])

    return answer


if __name__ == "__main__":
    serve(begin)
