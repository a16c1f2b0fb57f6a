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
from lean_ft.models.new_model import empty_decoder
from lean_ft.models.safetensors_file import write_file
from lean_ft.online.engines.broadcast import Broadcast
from lean_ft.online.engines.client import Client, ServerRefusal
from lean_ft.online.engines.replies import ServerFacts
from lean_ft.peft.experts import ExpertsAdapter
from lean_ft.peft.layers import LoRAEmbedding, LoRAOutput, adapted_layers
from lean_ft.peft.new_rows import trained_rows
from lean_ft.peft.peft_format import adapter_bytes, save_adapter
from lean_ft.peft.published import published_parts
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
    keeps_base: bool
    """Whether the server adds an adapter to the weights that it was started with. The version is the adapter's name."""

    def write(self, model: Decoder, version: str) -> int:
        """Write the weights; all ranks call it. Return their bytes."""
        ...

    def load(self, version: str) -> None:
        """Let the server load what was written. Raises ServerRefusal or Unreachable if it does not."""
        ...


class Merged:
    """All weights as files of a folder."""

    name, is_repeatable, keeps_base = "merged", True, False

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


class Adapter:
    """The adapter as a folder in PEFT's format, over the weights that the server was started with."""

    name, is_repeatable, keeps_base = "adapter", True, True
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
        # Each version has its own name, because the prefix cache distinguishes adapters by name.
        adapter = {"lora_name": version, "lora_path": str(self._folder / version)}
        self._client.ask("v1/load_lora_adapter", {**adapter, "is_3d_lora_weight": self._has_stacks})
        self._client.ask("update_weight_version", {"new_version": version})
        if self._loaded not in ("", version):
            with suppress(ServerRefusal):  # a server that was restarted does not have it
                self._client.ask("v1/unload_lora_adapter", {"lora_name": self._loaded})
            shutil.rmtree(self._folder / self._loaded, ignore_errors=True)
        self._loaded = version


def choose_way(asked: str, facts: ServerFacts, model: Decoder, client: Client, ranks: Ranks, run: Path) -> Way:
    """The way of `generation.engine_weights`. run: the run's directory. Raises ValueError if the model is none that the
    way can send, or the server was started without what it needs."""
    if asked == "nccl":
        return Broadcast(client, ranks, model, facts)
    problem = _problem_of_adapter(model, facts)
    if asked == "adapter" and problem:
        raise ValueError(f"generation.engine_weights=adapter: {problem} Or set generation.engine_weights=merged.")
    if asked in ("adapter", "auto") and not problem:
        return Adapter(client, ranks, _folder(client, run, 2 * adapter_bytes(model), ranks))
    is_tied = model.config.tied_embeddings
    if is_tied and facts.device == "cpu" and not facts.unties_output:
        raise ValueError(
            f"{client.url} runs on a CPU, where vLLM keeps an old copy of a tied output layer when it loads weights. "
            """Start it with --hf-overrides '{"tie_word_embeddings": false}'."""
        )
    whole = empty_decoder(model.config, model.dtype)
    size = sum(tensor.nbytes for tensor in whole.parameters())
    return Merged(client, ranks, _folder(client, run, size, ranks), facts.unties_output and is_tied)


def why_no_adapter(model: Decoder) -> str:
    """Why no vLLM server gets the adapter alone; empty if one that was started for it does."""
    layers = adapted_layers(model).values()
    if not layers and not trained_rows(model):
        return "the run trains no adapter. Set lora.rank."
    if trained_rows(model) or any(isinstance(layer, LoRAEmbedding | LoRAOutput) for layer in layers):
        return "vLLM loads no adapter of the embedding or the output layer. Change lora.target_modules."
    if any(layer.shape.dora for layer in layers):
        return "vLLM loads no DoRA. Set lora.dora=false."
    return ""


def _problem_of_adapter(model: Decoder, facts: ServerFacts) -> str:
    """Why this server does not get the adapter alone; empty if it does."""
    if problem := why_no_adapter(model):
        return problem
    rank = max(layer.shape.rank * (1 if layer.start_A is None else 2) for layer in adapted_layers(model).values())
    if facts.max_adapter_rank < rank:
        start = f"Start it with --enable-lora --max-lora-rank {rank}."
        return f"the server loads adapters of rank {facts.max_adapter_rank}, and the run's has {rank}. {start}"
    if model.config.tied_embeddings and facts.unties_output:
        return "the server was told that the output layer is not tied, and has none of its own. Start it without that."
    return ""


def _folder(client: Client, run: Path, needed_bytes: int, ranks: Ranks) -> Path:
    """An empty folder for files that the server reads: in memory if the server is on this machine and they fit,
    otherwise in the run's directory. Rank 0 removes it when its process ends."""
    folder = ranks.on_rank_zero(lambda: _in_memory(run, needed_bytes) if client.is_local else None)
    folder = folder or run.absolute() / "engine"
    # Files of a run that was killed may be of another model, and the server would read them too.
    ranks.on_rank_zero(lambda: shutil.rmtree(folder, ignore_errors=True))
    if ranks.rank == 0:
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _in_memory(run: Path, needed_bytes: int) -> Path | None:
    """The run's folder in shared memory, if there is room. It is the same for each start of the run, so a killed run
    leaves one copy at most."""
    if not SHARED_MEMORY.is_dir() or not os.access(SHARED_MEMORY, os.W_OK):
        return None
    name = hashlib.blake2b(bytes(run.absolute()), digest_size=8).hexdigest()
    folder = SHARED_MEMORY / f"lean_ft_{os.getuid()}_{name}"
    with suppress(FileExistsError):
        folder.mkdir()
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        return None  # anyone can write to shared memory
    taken = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    # A file is written beside the one that it replaces.
    has_room = shutil.disk_usage(SHARED_MEMORY).free + taken >= 1.2 * needed_bytes + _SPARE_BYTES
    return folder if has_room else None
