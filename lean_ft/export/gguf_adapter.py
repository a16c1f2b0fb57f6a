"""Export a LoRA adapter as a GGUF file, which llama.cpp applies to a GGUF file of the base model (`llama-cli --lora`).

llama.cpp computes W x + alpha / R * B (A x) for each pair of tensors, which are named after W in the base's file. B has the
rows of W, so `layout_of` has the name and the order of the rows. If the rows of W are stored as several tensors, each has the
same A. A file has one alpha, so B is multiplied in layers with another scaling (rank-stabilized LoRA, or alpha by layer).

Source: llama.cpp, convert_lora_to_gguf.py and src/llama-adapter.cpp.

Shapes: I inputs, O outputs, R rank, E experts, V vocabulary, D hidden size.
"""

from pathlib import Path

import torch
from torch import Tensor

from lean_ft.export.gguf import gguf_destination
from lean_ft.export.places import Exported, room_for
from lean_ft.gguf.check import gguf_family
from lean_ft.gguf.header import gguf_package
from lean_ft.gguf.layouts import by_side, store
from lean_ft.gguf.names import layout_of
from lean_ft.gguf.quantize import num_bytes
from lean_ft.gguf.write import GGUF_KINDS, write_gguf
from lean_ft.models import Decoder, load_model
from lean_ft.models.hf_format import empty_model
from lean_ft.models.moe import Experts
from lean_ft.peft import is_adapter
from lean_ft.peft.finished_models import find_base
from lean_ft.peft.lora import SCORE
from lean_ft.peft.new_rows import EMBEDDING
from lean_ft.peft.peft_format import fit_adapter
from lean_ft.peft.stored_adapter import StoredAdapter, read_adapter, read_factors
from lean_ft.peft.targets import is_projection_of_experts
from lean_ft.system.spelling import did_you_mean
from lean_ft.system.whole_files import write_whole

_KINDS = ("f32", "f16", "bf16")
_MERGE = "Export the merged model: --merge instead of --adapter."


def export_gguf_adapter(
    source: str | Path, destination: str | Path, kind: str = "f16", force: bool = False, base: str | Path | None = None
) -> Exported:
    """Write the adapter of a run, a checkpoint or a folder to the GGUF file `destination`.

    `kind` is f32, f16 or bf16. `base` replaces the base model that the adapter names. The base's weights are not read. Raises ValueError if the source has no adapter or is damaged, the destination exists, or llama.cpp cannot apply the
    adapter; OSError if the disk is full.
    """
    gguf_package()
    if kind not in _KINDS:
        raise ValueError(
            f"--gguf is {kind!r}; expected {', '.join(_KINDS)} with --adapter.{did_you_mean(kind, _KINDS)}"
        )
    folder, destination = gguf_destination(source, destination, force)
    if not is_adapter(folder):
        raise ValueError(f"{folder} has a whole model, not an adapter: leave out --adapter.")
    stored = read_adapter(folder)
    _check_is_lora(stored)
    model_name = base or find_base(folder)
    model = empty_model(model_name, torch.float32)
    if len(stored.tensors) > 2 * len(stored.shapes):  # PEFT copies the weight of an adapted embedding, to be compared
        model = load_model(model_name)
    family, adapter = gguf_family(model, Path(str(model_name))), fit_adapter(model, folder)
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
    return Exported(folder, destination, details, None)


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
    if experts.config.input_first or experts.config.input_first_in_adapters:
        raise ValueError(f"{name} is stored transposed, which --adapter with --gguf does not support. {_MERGE}")
    num_experts = experts.config.num_experts
    return a.unflatten(0, (num_experts, -1)), b.unflatten(1, (-1, num_experts)).permute(2, 0, 1)
