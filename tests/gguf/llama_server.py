"""Run llama.cpp's server in a separate process: when a server is deleted, its process sometimes hangs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


class LlamaServer:
    """Serves a GGUF file, with keys and values in float32, until the object is deleted. `adapter`, `mmproj`: GGUF files
    too; `embeds`: serve embeddings alone."""

    def __init__(
        self, file: Path, adapter: Path | None = None, mmproj: Path | None = None, *, embeds: bool = False
    ) -> None:
        pytest.importorskip("xllamacpp", reason="llama.cpp's server is not installed")
        command = [
            sys.executable,
            __file__,
            str(file),
            str(adapter or ""),
            str(mmproj or ""),
            "embeds" if embeds else "",
        ]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.listening_address = self._process.stdout.readline().strip()
        assert self.listening_address, "llama.cpp does not open the file"

    def __del__(self) -> None:
        if "_process" in vars(self):  # not if the test was skipped
            self._process.kill()
            self._process.communicate()


def main(file: str, adapter: str, mmproj: str, embeds: str) -> None:
    """Serve until the parent process closes this one's standard input."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.warmup, params.port = file, 128, False, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1  # threads that wait for one another do so busily
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.embedding = bool(embeds)
    if adapter:
        params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(adapter, 1.0)]
    params.mmproj.path, params.mmproj_use_gpu = mmproj, False
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
