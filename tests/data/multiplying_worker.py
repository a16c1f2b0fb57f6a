"""Worker function for test_workers.py: multiplies items and executes commands."""

import os
import signal
import sys
import time
from typing import Any


def work_on(item: Any) -> Any:
    if isinstance(item, int):
        return 3 * item
    if isinstance(item, dict):
        return item["number"]
    if item == "print":
        print("said by some library", flush=True)
    elif item == "modules":
        return sorted(sys.modules)
    elif item == "process":
        return os.getpid()
    elif item == "sleep":
        time.sleep(60)
    elif item == "exit":
        os._exit(3)
    elif item == "die":
        signal.raise_signal(signal.SIGKILL)
    else:
        return 3 * int(item)
