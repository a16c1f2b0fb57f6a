"""The files that several ranks write for a sampling engine equal those of one process with the same weights."""

import gc
import hashlib
import json
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from lean_ft.memory.host_memory import return_freed_memory
from lean_ft.models import Decoder, load_model, save_model
from lean_ft.models.safetensors_file import read_header, write_file
from lean_ft.parallel import cut, join, parallelize
from lean_ft.peft import load_with_adapter, published_parts
from lean_ft.settings import LoRAConfig, ModelConfig, ParallelConfig
from lean_ft.system.shards import Ranks, local, part_of, whole_shape
from tests.parallel.processes import needs_parts, on_ranks, selected
from tests.parallel.test_finetune import make_four_bits, make_mixture, resident_bytes
from tests.training.toy_runs import QWEN

pytestmark = [pytest.mark.long, needs_parts]

CPU = torch.device("cpu")
NOTHING: dict[str, Any] = {}


class Case(NamedTuple):
    parallel: dict[str, Any] = NOTHING
    lora: LoRAConfig | None = None
    path: str = "tiny"
    model: dict[str, Any] = NOTHING
    dtype: str = "bfloat16"


ENDS = ["q_proj", "embed_tokens", "lm_head"]
ROWS = {"new_tokens": ["e s", " of th"]}
TWO = {
    "shards": Case(),
    "shards in float32": Case(dtype="float32"),
    "shards of experts": Case(path="mixture"),
    "vocabulary": Case({"vocabulary": "cut"}),
    "gathered after forward": Case({"reshard_after_forward": False}, LoRAConfig(rank=3)),
    "replicas, adapter": Case({"replicate": 2}, LoRAConfig(rank=3)),
    "dora": Case(lora=LoRAConfig(rank=3, dora=True), dtype="float32"),
    "embedding and output layer": Case(lora=LoRAConfig(rank=3, dora=True, targets=ENDS), path="untied"),
    "new rows": Case(lora=LoRAConfig(rank=3), model=ROWS),
    "experts' adapters": Case(lora=LoRAConfig(rank=3), path="mixture"),
    "nf4": Case(lora=LoRAConfig(rank=3, dora=True, quantize="nf4", targets=["q_proj", "down_proj"])),
    "experts in nf4": Case(lora=LoRAConfig(rank=3, quantize="nf4"), path="mixture"),
    "experts in mxfp4": Case(lora=LoRAConfig(rank=3, quantize="nf4"), path="four_bits"),
    "float8": Case(lora=LoRAConfig(rank=3, quantize="float8")),
    "tensor": Case({"tensor": 2}),
    "tensor, adapter": Case({"tensor": 2}, LoRAConfig(rank=3), dtype="float32"),
    "experts": Case({"experts": 2}, path="mixture"),
    "experts, adapter": Case({"experts": 2}, LoRAConfig(rank=3, dora=True, targets=["q_proj", "o_proj"]), "mixture"),
}
FOUR = {
    "shards of four": Case(path="mixture", dtype="float32"),
    "replicas of shards, nf4": Case({"replicate": 2}, LoRAConfig(rank=3, quantize="nf4")),
    "tensor, sharded": Case({"shard": 2, "tensor": 2}, LoRAConfig(rank=3), dtype="float32"),
    "tensor over replicas": Case({"replicate": 2, "tensor": 2}, LoRAConfig(rank=3)),
    "experts, sharded": Case({"experts": 2}, path="mixture"),
}


@torch.no_grad()
def trained(folder: Path, case: Case, parallel: ParallelConfig) -> tuple[Decoder, Ranks]:
    """A model whose trained parameters have the same random values for any number of ranks."""
    ranks = join(parallel, CPU)
    path = case.path if case.path == "tiny" else str(folder / case.path)
    model = load_with_adapter(ModelConfig(path=path, dtype=case.dtype, **case.model), case.lora, CPU, ranks)
    cut(model, parallel, ranks)
    parallelize(model, parallel, ranks, tokens=64)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            values = 1.0 + 0.3 * torch.randn(whole_shape(parameter), generator=generator)
            part = part_of(parameter)
            part.values.copy_(part.within(values))
    return model, ranks


def write(folder: Path, model: Decoder, ranks: Ranks) -> None:
    ranks.on_rank_zero(lambda: folder.mkdir(parents=True))
    for layer, parts in published_parts(model, ranks):
        write_file(folder / f"{layer}.safetensors", parts, {"format": "pt"}, ranks)


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def held_bytes() -> int:
    """Bytes of all tensors that are alive in this process."""
    gc.collect()
    storages = {}
    for tensor in (one for one in gc.get_objects() if isinstance(one, torch.Tensor) and not one.is_meta):
        storage = local(tensor).untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def on_rank_zero(model: Decoder, ranks: Ranks) -> dict[str, str]:
    """Hashes of the tensors that rank 0 gets whole, by name; other ranks get none."""
    found = dict[str, str]()
    for _, parts in published_parts(model, ranks, on_rank_zero=True):
        for name, part in parts.items():
            if ranks.rank:
                assert part.is_kept_by_others and not part.values.numel()
            else:
                found[name] = hash_of(part.values)
    return found


def hash_of(values: torch.Tensor) -> str:
    return hashlib.sha256(values.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def work(folder: Path, cases: dict[str, Case]) -> list[dict[str, str]]:
    found = []
    for name, case in cases.items():
        model, ranks = trained(folder, case, ParallelConfig(**case.parallel))
        before = dict(model.named_parameters())
        for _ in range(2 if name == "gathered after forward" else 0):
            ranks.gather_no_more(model)
            held = held_bytes()
            with torch.no_grad():
                model(torch.arange(3, 11)[None], return_hidden=True)
            assert held_bytes() > held, "the layers are not gathered"
        held = held_bytes() if name != "gathered after forward" else held
        write(folder / "many" / name, model, ranks)
        assert held_bytes() <= held + 4096, name  # small buffers come and go; weights are larger
        found.append(on_rank_zero(model, ranks))
        after = dict(model.named_parameters())
        assert before.keys() == after.keys() and all(after[key] is parameter for key, parameter in before.items())
    return found


def folders(folder: Path) -> Path:
    make_mixture(folder / "mixture")
    make_four_bits(folder / "four_bits")
    make_mixture(folder / "untied", tie_word_embeddings=False)
    return folder


def ranks_of(size: int, cases: dict[str, Case], factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    folder, wanted = folders(factory.mktemp("ranks")), selected(request)
    found = on_ranks(size, work, folder, {name: case for name, case in cases.items() if name in wanted})
    return folder, dict(zip([name for name in cases if name in wanted], found[0], strict=True))


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    return ranks_of(2, TWO, tmp_path_factory, request)


@pytest.fixture(scope="module")
def on_four(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    return ranks_of(4, FOUR, tmp_path_factory, request)


def check(found: Any, name: str, case: Case) -> None:
    folder, whole = found
    write(folder / "one" / name, *trained(folder, case, ParallelConfig()))
    assert digests(folder / "many" / name) == digests(folder / "one" / name)
    stored = {}
    for file in (folder / "one" / name).iterdir():
        stored |= {key: hash_of(tensor.read()) for key, tensor in read_header(file).items()}
    assert whole[name] == stored


@pytest.mark.parametrize("name", TWO)
def test_two_ranks_publish_the_files_of_one(on_two: Any, name: str) -> None:
    check(on_two, name, TWO[name])


@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_publish_the_files_of_one(on_four: Any, name: str) -> None:
    check(on_four, name, FOUR[name])


def peak_of_publishing(folder: Path, lora: LoRAConfig) -> int:
    """Additional peak bytes, the second time that the weights are written."""
    return_freed_memory()
    ranks = join(ParallelConfig(), CPU)
    model = load_with_adapter(ModelConfig(path=str(folder), dtype="bfloat16"), lora, CPU, ranks)
    parallelize(model, ParallelConfig(), ranks)
    write(folder / "first", model, ranks)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_bytes("VmRSS")
    write(folder / "second", model, ranks)
    return resident_bytes("VmHWM") - before


@pytest.mark.parametrize("quantize", ["none", "nf4"])
def test_publishing_holds_one_layer_at_a_time(tmp_path: Path, quantize: str) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "vocab_size": 1024}
    (tmp_path / "config.json").write_text(json.dumps({**QWEN, **sizes, "num_attention_heads": 16}))
    save_model(load_model(tmp_path, dtype=torch.bfloat16, random_init=True), tmp_path)
    matrix = 2 * 1024 * 4096  # bytes; a layer has three, and smaller ones
    lora = LoRAConfig(rank=16, quantize=quantize)  # type: ignore[arg-type]
    for peak in on_ranks(2, peak_of_publishing, tmp_path, lora):
        assert peak < (4 + 1 + 2 * 2) * matrix
    whole = sum(file.stat().st_size for file in (tmp_path / "second").iterdir())
    assert whole > 8 * 3 * matrix
