"""Export a model or an adapter as one GGUF file, for llama.cpp and programs based on it.

Tensors are written one at a time, so the peak memory is the model plus twice its largest tensor.

llama.cpp applies an adapter to a GGUF file of the base model (`llama-cli --lora`). It computes W x + alpha / R * B (A
x) for each pair of tensors, which are named after W in the base's file. B has the rows of W, so `layout_of` has the
name and the order of the rows. If the rows of W are stored as several tensors, each has the same A. A file has one
alpha, so B is multiplied in layers with another scaling (rank-stabilized LoRA, or alpha by layer).

Source: llama.cpp, convert_lora_to_gguf.py and src/llama-adapter.cpp.

Shapes: I inputs, O outputs, R rank, E experts, V vocabulary, D hidden size.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from torch import Tensor

from lean_ft.embedding.gguf import metadata_of_vectors, remark_about_vectors
from lean_ft.export.ollama import modelfile
from lean_ft.export.places import (
    Exported,
    check_destination,
    check_tower_is_unchanged,
    read_source,
    room_for,
    whole_before,
)
from lean_ft.generation import stop_ids
from lean_ft.gguf.header import gguf_package
from lean_ft.gguf.names import all_tensors, by_side, layout_of, ropes, store
from lean_ft.gguf.quantize import Mix, num_bytes
from lean_ft.gguf.rows import GGUFFamily
from lean_ft.gguf.splitting import APPROXIMATED
from lean_ft.gguf.wholes import remark_about_tower, row_of
from lean_ft.gguf.write import GGUF_KINDS, gguf_family, model_metadata, write_gguf
from lean_ft.models import Decoder, empty_model, load_model
from lean_ft.models.config_json import kind_of_scores
from lean_ft.models.drafting import lost_drafting
from lean_ft.models.moe import Experts
from lean_ft.peft import is_adapter
from lean_ft.peft.finished_models import find_base, find_finished
from lean_ft.peft.lora import SCORE
from lean_ft.peft.new_rows import EMBEDDING
from lean_ft.peft.peft_format import fit_adapter
from lean_ft.peft.stored_adapter import StoredAdapter, read_adapter, read_factors
from lean_ft.peft.targets import is_projection_of_experts
from lean_ft.system.spelling import did_you_mean
from lean_ft.system.whole_files import write_whole
from lean_ft.training.checkpoint import small_files_bytes

_KINDS = ("f32", "f16", "bf16")
_TOWER = "Export a folder, and then export that folder with --gguf. llama.cpp reads the tower from a second file."
_MERGE = "Export the merged model: --merge instead of --adapter."


def export_gguf(
    source: str | Path,
    destination: str | Path,
    kind: str = "bf16",
    force: bool = False,
    merge: bool = False,
    base: str | Path | None = None,
    ollama: bool = False,
) -> Exported:
    """Write the model of a checkpoint, run directory or model folder to the GGUF file `destination`.

    `kind` is one of `GGUF_KINDS`; `merge` and `base` are as in `export_folder`. `ollama` also writes a Modelfile.

    Raises ValueError if the source is missing or damaged, the destination exists, llama.cpp would compute the model or
    its tokenizer differently, or the `gguf` package is missing; OSError if the disk is full.
    """
    gguf_package()
    if kind not in GGUF_KINDS:
        raise ValueError(f"--gguf is {kind!r}; expected {', '.join(GGUF_KINDS)}.{did_you_mean(kind, GGUF_KINDS)}")
    folder, destination = _gguf_destination(source, destination, force)
    for_ollama = destination.with_name("Modelfile")
    if ollama and (for_ollama.is_dir() or (for_ollama.exists() and not force)):
        raise ValueError(f"{for_ollama} exists. Choose a destination in another folder, or overwrite it with --force.")
    check_tower_is_unchanged(folder, "a GGUF file", _TOWER)
    model, tokenizer, merged = read_source(folder, merge, base)
    if model.config.bidirectional or model.config.dense:
        what = "tokens that see later ones" if model.config.bidirectional else "layers after pooling"
        raise ValueError(f"{folder}: a GGUF file of a model with {what} is not supported. Export it as a folder.")
    if model.config.num_scores:
        of_scores = kind_of_scores(model.config.num_scores)
        raise ValueError(f"{folder} is {of_scores}, which llama.cpp cannot run. Export it as a folder.")
    family = gguf_family(model, folder)
    if tokenizer is None:
        raise ValueError(f"{folder} has no tokenizer, which a GGUF file needs.")
    metadata = model_metadata(model, family, kind, destination.stem, tokenizer, stop_ids(model, tokenizer))
    of_vectors = metadata_of_vectors(folder, family.architecture, tokenizer)
    metadata |= of_vectors
    text = modelfile(model, tokenizer, destination.name) if ollama else None
    mix = Mix(kind, family.architecture, model.config)
    shapes = {name: tuple(tensor.shape) for name, tensor in all_tensors(model, family, "meta")}
    entries = {name: (mix.kind_of(name, shape), shape) for name, shape in shapes.items()}
    needed_bytes = sum(num_bytes(*entry) for entry in entries.values()) + small_files_bytes(tokenizer)

    destination.parent.mkdir(parents=True, exist_ok=True)
    with write_whole(destination, on_disk=True) as temporary, room_for(needed_bytes, destination):
        errors = write_gguf(temporary, family.architecture, metadata, entries, all_tensors(model, family))
    kinds = Counter(one for one, shape in entries.values() if len(shape) > 1)
    mixed = f" ({', '.join(f'{number} tensors as {one}' for one, number in kinds.items())})" if len(kinds) > 1 else ""
    size = f"{destination.stat().st_size / 1e9:.3g} GB"
    command = "llama-embedding -m FILE -p TEXT" if of_vectors else "llama-cli -m FILE"
    if text is not None:
        with write_whole(for_ollama, on_disk=True) as temporary:
            temporary.write_text(text, encoding="utf-8")
        command = f"ollama create NAME -f {quote(str(for_ollama))}"
    details = f"architecture {family.architecture}, {kind}{mixed}, {len(entries)} tensors, {size}. Try: {command}"
    if errors:
        details += f"\nrelative error of the weights: {errors}"
    details += _differences(model, metadata) + lost_drafting(model.source)
    details += remark_about_tower(model, whole_before(folder), folder, kind) + remark_about_vectors(folder)
    return Exported(folder, destination, details, merged)


def _differences(model: Decoder, metadata: Mapping[str, Any]) -> str:
    """Lines on what llama.cpp computes differently."""
    details = ""
    if (rule := metadata["tokenizer.ggml.pre"]) in APPROXIMATED:
        details += (
            f"\nllama.cpp's splitting rule {rule} differs from this tokenizer's {APPROXIMATED[rule]}, so ids may "
            "differ there."
        )
    if not ropes(model.config)[0].truncate:
        details += (
            "\nllama.cpp rounds the bounds of yarn's frequencies and this model does not, so its log-probabilities "
            "differ slightly."
        )
    if model.config.activation == "gelu":
        details += (
            "\nllama.cpp computes GELU with tanh and this model does not, so its log-probabilities differ slightly."
        )
    if difference := row_of(model).differs(model.config):
        details += f"\n{difference}, so its log-probabilities differ slightly."
    return details


def _adapter_tensors(folder: Path, model: Decoder, family: GGUFFamily, adapter: StoredAdapter) -> dict[str, Tensor]:
    """The factors of an adapter under llama.cpp's names. Raises ValueError for those that are not finite, and for
    layers to which llama.cpp applies no adapter."""
    alpha = next(iter(adapter.shapes.values())).alpha
    tensors = dict[str, Tensor]()
    for name, shape in adapter.shapes.items():
        a, b = (factor.float() for factor in read_factors(adapter, name))
        if not bool(a.isfinite().all() and b.isfinite().all()):
            raise ValueError(f"{folder}: the adapter of {name} is not finite. Export an earlier checkpoint of the run.")
        b = b * (shape.scaling * shape.rank / alpha)
        weight = f"{name}.weight"
        if any(part in weight for part in family.no_adapter):
            raise ValueError(f"{folder} adapts {name}, to which llama.cpp applies no adapter. {_MERGE}")
        if is_projection_of_experts(model, name):
            weight, (a, b) = name, _by_expert(model, name, a, b)
        if name == EMBEDDING:
            a = a.T  # (V, R): llama.cpp looks rows up
        steps, places = layout_of(weight, model, family)
        of_rows, of_columns = by_side(steps)
        (a,) = store(a, of_columns)
        for place, rows in zip(places, store(b, of_rows), strict=True):
            tensors |= {f"{place}.lora_a": a, f"{place}.lora_b": rows}
    return tensors


def export_gguf_adapter(
    source: str | Path, destination: str | Path, kind: str = "f16", force: bool = False, base: str | Path | None = None
) -> Exported:
    """Write the adapter of a run, a checkpoint or a folder to the GGUF file `destination`.

    `kind` is f32, f16 or bf16. `base` replaces the base model that the adapter names. The base's weights are not read.
    Raises ValueError if the source has no adapter or is damaged, the destination exists, or llama.cpp cannot apply the
    adapter; OSError if the disk is full.
    """
    gguf_package()
    if kind not in _KINDS:
        raise ValueError(
            f"--gguf is {kind!r}; expected {', '.join(_KINDS)} with --adapter.{did_you_mean(kind, _KINDS)}"
        )
    folder, destination = _gguf_destination(source, destination, force)
    if not is_adapter(folder):
        raise ValueError(f"{folder} has a whole model, not an adapter: leave out --adapter.")
    check_tower_is_unchanged(folder, "a GGUF file", _TOWER)
    stored = read_adapter(folder)
    _check_is_lora(stored)
    model_name = base or find_base(folder)
    model = empty_model(model_name)
    if len(stored.tensors) > 2 * len(stored.shapes):  # PEFT copies the weight of an adapted embedding, to be compared
        model = load_model(model_name)
    family, adapter = gguf_family(model, Path(str(model_name))), fit_adapter(model, folder)
    alpha = next(iter(adapter.shapes.values())).alpha
    tensors = _adapter_tensors(folder, model, family, adapter)
    metadata = {
        "general.type": "adapter",
        "general.name": destination.stem,
        "general.file_type": GGUF_KINDS[kind],
        "adapter.type": "lora",
        "adapter.lora.alpha": float(alpha),
    }
    entries = {name: (kind, tuple(tensor.shape)) for name, tensor in tensors.items()}
    destination.parent.mkdir(parents=True, exist_ok=True)
    needed_bytes = sum(num_bytes(*entry) for entry in entries.values())
    with write_whole(destination, on_disk=True) as temporary, room_for(needed_bytes, destination):
        write_gguf(temporary, family.architecture, metadata, entries, tensors.items())
    details = (
        f"a LoRA adapter of {len(adapter.shapes)} layers for {model_name}, architecture {family.architecture}, {kind}, "
    )
    details += f"{destination.stat().st_size / 1e6:.3g} MB. Try: llama-cli -m BASE.gguf --lora FILE"
    return Exported(folder, destination, details + remark_about_tower(model, whole_before(folder), folder, kind), None)


def _check_is_lora(stored: StoredAdapter) -> None:
    """Raise ValueError for an adapter that is more than pairs of low-rank matrices."""
    if f"{SCORE}.weight" in stored.tensors:
        raise ValueError(
            f"{stored.folder} adapts a model that gives scores, which llama.cpp cannot run. Leave out --gguf."
        )
    is_dora = any(shape.dora for shape in stored.shapes.values())
    more = "rows of new tokens" if stored.rows else "the magnitudes of DoRA" if is_dora else None
    if more is not None:
        raise ValueError(f"{stored.folder} has {more}, which llama.cpp does not read from an adapter. {_MERGE}")


def _by_expert(model: Decoder, name: str, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return (E, R, I) and (E, O, R) of a stack's factors (E * R, I) and (O, R * E)."""
    experts = model.get_submodule(name.rpartition(".")[0])
    assert isinstance(experts, Experts)
    if experts.formula.input_first or experts.input_first_in_adapters:
        raise ValueError(f"{name} is stored transposed, which --adapter with --gguf does not support. {_MERGE}")
    num_experts = experts.config.num_experts
    return a.unflatten(0, (num_experts, -1)), b.unflatten(1, (-1, num_experts)).permute(2, 0, 1)


def _gguf_destination(source: str | Path, destination: str | Path, force: bool) -> tuple[Path, Path]:
    """Return the source's folder and the path of the file. Raises ValueError unless the file may be written."""
    folder, file = find_finished(source), Path(destination).expanduser()
    if file.suffix != ".gguf" or file.is_dir():
        raise ValueError(f"{file} is not the name of a GGUF file; expected a name that ends in .gguf.")
    check_destination(file, folder, force)
    return folder, file
