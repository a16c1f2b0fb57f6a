"""Ways to give a vLLM server the weights of the policy.

| `generation.engine_weights` | what moves | how |
|---|---|---|
| `adapter` | the adapter | a folder in PEFT's format, which the server loads under a new name |
| `merged` | all weights, with the adapter merged | safetensors files, one per layer, which the server loads |
| `nccl` | all weights, with the adapter merged | a broadcast between GPUs (`lean_ft.online.engines.broadcast`) |

Files are in memory (/dev/shm) if the server is on this machine and they fit, or else in the run's directory. Each
publication has a version, which the server returns with each token.

Source: vLLM 0.32, entrypoints/rl/online and entrypoints/serve/lora.
"""

import atexit
import hashlib
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from lean_ft.models import Decoder
from lean_ft.models.safetensors_file import write_file
from lean_ft.models.source import parts_on_disk
from lean_ft.online.engines.broadcast import Broadcast
from lean_ft.online.engines.client import Client, Refused
from lean_ft.online.engines.replies import ServerFacts
from lean_ft.peft.experts import ExpertsAdapter
from lean_ft.peft.layers import LoRAEmbedding, LoRAOutput, adapted_layers
from lean_ft.peft.lora import has_adapter
from lean_ft.peft.merging import published_parts
from lean_ft.peft.new_rows import trained_rows
from lean_ft.peft.peft_format import adapter_bytes, save_adapter
from lean_ft.system.shards import Ranks

SHARED_MEMORY = Path("/dev/shm")
_SPARE_BYTES = 2**28  # of /dev/shm, which other programs need too


class Way(Protocol):
    """One way to publish weights. All ranks write them, and rank 0 lets the server load them."""

    name: str
    remedy: str
    """What to do if the server refuses them."""
    is_repeatable: bool
    """Whether `load` can give the written weights to a server that was restarted."""

    def write(self, model: Decoder, version: str) -> int:
        """Write the weights; all ranks call it. Return their bytes."""
        ...

    def load(self, version: str) -> None:
        """Let the server load what was written. Raises Refused or Unreachable if it does not."""
        ...

    def model_of(self, version: str) -> str | None:
        """The name of the model that requests ask for; None for the only one."""
        ...


class Merged:
    """All weights as files of a folder."""

    name, is_repeatable = "merged", True

    def __init__(self, client: Client, ranks: Ranks, folder: Path, writes_output: bool) -> None:
        """writes_output: also a tied output layer, for a server that was told that it is not tied."""
        self._client, self._ranks, self._folder, self._writes_output = client, ranks, folder, writes_output
        self.remedy = f"Serve the model of model.path, and let the server see {folder}."

    def write(self, model: Decoder, version: str) -> int:
        self._ranks.on_rank_zero(lambda: self._folder.mkdir(parents=True, exist_ok=True))
        size = 0
        embedding, output = (model.source.places(f"{own}.weight")[0] for own in ("model.embed_tokens", "lm_head"))
        embedding = model.source.own_names.get(embedding, embedding)
        for layer, parts in published_parts(model, self._ranks):
            if self._writes_output and embedding in parts:
                parts = {**parts, output: parts[embedding]}
            write_file(self._folder / f"{layer}.safetensors", parts, {"format": "pt"}, self._ranks)
            size += sum(part.whole_bytes for part in parts.values())
        return size

    def load(self, version: str) -> None:
        with self._client.paused():
            reload = {"method": "reload_weights", "kwargs": {"weights_path": str(self._folder)}}
            self._client.ask("collective_rpc", reload)
            self._client.ask("update_weight_version", {"new_version": version})

    def model_of(self, version: str) -> str | None:
        return None


class Adapter:
    """The adapter as a folder in PEFT's format, over the weights that the server was started with."""

    name, is_repeatable = "adapter", True
    remedy = (
        "Start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora, or set generation.engine_weights=merged."
    )

    def __init__(self, client: Client, ranks: Ranks, folder: Path) -> None:
        self._client, self._ranks, self._folder = client, ranks, folder
        self._loaded = ""  # version that the server has
        self._has_stacks = False  # whether the adapter has pairs for stacked experts

    def write(self, model: Decoder, version: str) -> int:
        self._has_stacks = any(isinstance(layer, ExpertsAdapter) for layer in adapted_layers(model).values())
        save_adapter(model, self._folder / version, ranks=self._ranks)
        return adapter_bytes(model)

    def load(self, version: str) -> None:
        # A name of its own for each version: the prefix cache tells adapters apart by name.
        adapter = {"lora_name": version, "lora_path": str(self._folder / version)}
        self._client.ask("v1/load_lora_adapter", {**adapter, "is_3d_lora_weight": self._has_stacks})
        self._client.ask("update_weight_version", {"new_version": version})
        if self._loaded not in ("", version):
            with suppress(Refused):  # a server that was restarted does not have it
                self._client.ask("v1/unload_lora_adapter", {"lora_name": self._loaded})
            shutil.rmtree(self._folder / self._loaded, ignore_errors=True)
        self._loaded = version

    def model_of(self, version: str) -> str | None:
        return version


def choose_way(asked: str, facts: ServerFacts, model: Decoder, client: Client, ranks: Ranks, run: Path) -> Way:
    """The way of `generation.engine_weights`. run: the run's directory. Raises ValueError if the server was started
    without what it needs, or the model has no adapter."""
    url, size = client.url, sum(part.whole_bytes for part in parts_on_disk(model).values())
    if asked == "nccl":
        return Broadcast(client, ranks, model, facts)
    if asked == "adapter" and not has_adapter(model):
        raise ValueError("generation.engine_weights=adapter, but the run trains no adapter. Set lora.rank, or merged.")
    layers = adapted_layers(model).values()
    rank = max((layer.shape.rank * (1 if layer.start_A is None else 2) for layer in layers), default=0)
    if asked == "adapter" and facts.max_adapter_rank < rank:
        raise ValueError(
            f"generation.engine_weights=adapter: {url} loads adapters of rank {facts.max_adapter_rank}, and the run's "
            f"has {rank}. Start it with --enable-lora --max-lora-rank {rank}, or set generation.engine_weights=merged."
        )
    is_tied = model.config.tied_embeddings
    if asked == "adapter" and is_tied and facts.unties_output:
        raise ValueError(f"generation.engine_weights=adapter: {url} unties the output layer. Start it without that.")
    if asked == "adapter" or (
        asked == "auto" and rank and facts.max_adapter_rank >= rank and _suits_adapters(model, facts)
    ):
        folder = ranks.on_rank_zero(lambda: files_folder(client, run, 2 * adapter_bytes(model)))
        ranks.on_rank_zero(lambda: shutil.rmtree(folder, ignore_errors=True))  # of a run that was killed
        return Adapter(client, ranks, _removed_at_exit(folder, ranks))
    if is_tied and facts.device == "cpu" and not facts.unties_output:
        raise ValueError(
            f"{url} runs on a CPU, where vLLM keeps an old copy of a tied output layer when it loads weights. Start it "
            """with --hf-overrides '{"tie_word_embeddings": false}'."""
        )
    folder = ranks.on_rank_zero(lambda: files_folder(client, run, size))
    return Merged(client, ranks, _removed_at_exit(folder, ranks), facts.unties_output and is_tied)


def _suits_adapters(model: Decoder, facts: ServerFacts) -> bool:
    """Whether vLLM loads the adapter: it refuses DoRA, trained rows and adapters of embeddings. The server has the
    weights below the adapter, unless it unties the output layer."""
    if model.config.tied_embeddings and facts.unties_output:
        return False
    layers = adapted_layers(model).values()
    of_vocabulary = any(isinstance(layer, LoRAEmbedding | LoRAOutput) for layer in layers)
    return not (of_vocabulary or trained_rows(model) or any(layer.shape.dora for layer in layers))


def _removed_at_exit(folder: Path, ranks: Ranks) -> Path:
    """Return the folder, which rank 0 removes when its process ends."""
    if ranks.rank == 0:
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def files_folder(client: Client, run: Path, needed_bytes: int) -> Path:
    """The folder for files that the server reads: in memory if it is on this machine and `needed_bytes` fit, otherwise
    in the run's directory."""
    if client.is_local and SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK):
        # The same for each start of the run, so that a killed run leaves one copy at most.
        name = hashlib.blake2b(bytes(run.absolute()), digest_size=8).hexdigest()
        own = SHARED_MEMORY / f"lean_ft_{os.getuid()}_{name}"
        taken = sum(file.stat().st_size for file in own.rglob("*") if file.is_file()) if own.is_dir() else 0
        # A file is written beside the one that it replaces.
        if shutil.disk_usage(SHARED_MEMORY).free + taken >= 1.2 * needed_bytes + _SPARE_BYTES:
            return own
    return run.absolute() / "engine"
