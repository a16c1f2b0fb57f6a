"""Export a model as one GGUF file, for llama.cpp and programs based on it.

Tensors are written one at a time, so the peak memory is the model plus twice its largest tensor.
"""

from collections import Counter
from pathlib import Path

from lean_ft.export.ollama import modelfile
from lean_ft.export.places import Exported, check_destination, read_source, room_for
from lean_ft.generation import stop_ids
from lean_ft.gguf.check import gguf_family
from lean_ft.gguf.header import gguf_package
from lean_ft.gguf.importance import check_importance, compare, read_imatrix
from lean_ft.gguf.names import all_tensors, ropes
from lean_ft.gguf.quantize import FORMATS, Mix, num_bytes
from lean_ft.gguf.splitting import APPROXIMATED
from lean_ft.gguf.write import GGUF_KINDS, model_metadata, write_gguf
from lean_ft.models.config_json import kind_of_scores
from lean_ft.peft.finished_models import find_finished
from lean_ft.system.spelling import did_you_mean
from lean_ft.system.whole_files import write_whole
from lean_ft.training.checkpoint import small_files_bytes

_WEIGHED = ("q6_k", "q5_k_m", "q4_k_m", "q4_0", "iq4_nl")  # kinds that use the importance of input features


def export_gguf(
    source: str | Path,
    destination: str | Path,
    kind: str = "bf16",
    force: bool = False,
    merge: bool = False,
    base: str | Path | None = None,
    imatrix: str | Path | None = None,
    ollama: bool = False,
) -> Exported:
    """Write the model of a checkpoint, run directory or model folder to the GGUF file `destination`.

    `kind` is one of `GGUF_KINDS`; `merge` and `base` are as in `export_folder`. `imatrix` is a file of llama.cpp with the
    importance of inputs, for quantized kinds. `ollama` also writes a Modelfile.

    Raises ValueError if the source is missing or damaged, the destination exists, llama.cpp would compute the model or its
    tokenizer differently, importance is given for a kind that does not use it or for another model, or the `gguf` package is
    missing; OSError if the disk is full.
    """
    gguf_package()
    if kind not in GGUF_KINDS:
        raise ValueError(f"--gguf is {kind!r}; expected {', '.join(GGUF_KINDS)}.{did_you_mean(kind, GGUF_KINDS)}")
    if imatrix is not None and kind not in _WEIGHED:
        raise ValueError(f"--imatrix has no effect on {kind}. Remove it, or choose --gguf {', '.join(_WEIGHED)}.")
    importance = {} if imatrix is None else read_imatrix(Path(imatrix).expanduser())
    folder, destination = gguf_destination(source, destination, force)
    for_ollama = destination.with_name("Modelfile")
    if ollama and (for_ollama.is_dir() or (for_ollama.exists() and not force)):
        raise ValueError(f"{for_ollama} exists. Choose a destination in another folder, or overwrite it with --force.")
    model, tokenizer, merged = read_source(folder, merge, base)
    if model.config.num_scores:
        of_scores = kind_of_scores(model.config.num_scores)
        raise ValueError(f"{folder} is {of_scores}, which llama.cpp cannot run. Export it as a folder.")
    family = gguf_family(model, folder)
    if tokenizer is None:
        raise ValueError(f"{folder} has no tokenizer, which a GGUF file needs.")
    metadata = model_metadata(model, family, kind, destination.stem, tokenizer, stop_ids(model, tokenizer))
    text = modelfile(model, tokenizer, destination.name) if ollama else None
    mix = Mix(kind, family.architecture, model.config, has_importance=imatrix is not None)
    shapes = {name: tuple(tensor.shape) for name, tensor in all_tensors(model, family, "meta")}
    entries = {name: (mix.kind_of(name, shape), shape) for name, shape in shapes.items()}
    if imatrix is not None:
        weighed = {name: shape for name, (one, shape) in entries.items() if name.startswith("blk.") and one in FORMATS}
        importance = check_importance(importance, weighed, f"--imatrix {imatrix}")
    needed_bytes = sum(num_bytes(*entry) for entry in entries.values()) + small_files_bytes(tokenizer)

    destination.parent.mkdir(parents=True, exist_ok=True)
    with write_whole(destination, on_disk=True) as temporary, room_for(needed_bytes, destination):
        write_gguf(temporary, family.architecture, metadata, entries, all_tensors(model, family), importance)
        errors = compare(temporary, all_tensors(model, family))
    kinds = Counter(one for one, shape in entries.values() if len(shape) > 1)
    mixed = f" ({', '.join(f'{number} tensors as {one}' for one, number in kinds.items())})" if len(kinds) > 1 else ""
    size = f"{destination.stat().st_size / 1e9:.3g} GB"
    command = "llama-cli -m FILE"
    if text is not None:
        with write_whole(for_ollama, on_disk=True) as temporary:
            temporary.write_text(text, encoding="utf-8")
        command = f"ollama create NAME -f {for_ollama}"
    details = f"architecture {family.architecture}, {kind}{mixed}, {len(entries)} tensors, {size}. Try: {command}"
    if errors:
        details += f"\nrelative error of the weights: {', '.join(f'{one} {e:.2%}' for one, e in errors.items())}"
    if (rule := metadata["tokenizer.ggml.pre"]) in APPROXIMATED:
        details += f"\nllama.cpp's splitting rule {rule} differs from this tokenizer's {APPROXIMATED[rule]}, so ids may differ there."
    if not ropes(model.config)[0].truncate:
        details += "\nllama.cpp rounds the bounds of yarn's frequencies and this model does not, so its log-probabilities differ slightly."
    return Exported(folder, destination, details, merged)


def gguf_destination(source: str | Path, destination: str | Path, force: bool) -> tuple[Path, Path]:
    """Return the source's folder and the path of the file. Raises ValueError unless the file may be written."""
    folder, file = find_finished(source), Path(destination).expanduser()
    if file.suffix != ".gguf" or file.is_dir():
        raise ValueError(f"{file} is not the name of a GGUF file; expected a name that ends in .gguf.")
    check_destination(file, folder, force)
    return folder, file
