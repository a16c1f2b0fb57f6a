"""Export a model as a folder of PyTorch's distributed checkpoints (DCP).

    .metadata, __0_0.distcp; and config.json, generation_config.json, tokenizer files, which DCP ignores

Tensors have the names of the Hugging Face folder, including a tied output layer, so
`torch.distributed.checkpoint.load(model.state_dict(), checkpoint_id=...)` fills a transformers model that is sharded
over any number of ranks. `.metadata` is a pickle, so load such a folder only if you trust its author. A run's own
checkpoints use another format for this reason.
"""

import warnings
from pathlib import Path

from lean_ft.export.places import (
    Exported,
    check_destination,
    check_tower_is_unchanged,
    read_source,
    room_for,
    settings_of_run,
)
from lean_ft.models.drafting import lost_drafting
from lean_ft.models.load_options import torch_dtype
from lean_ft.models.saving import write_configs
from lean_ft.models.source import tensors_on_disk
from lean_ft.peft.finished_models import find_finished
from lean_ft.system.whole_files import write_whole
from lean_ft.training.view import save_view


def export_dcp(
    source: str | Path,
    destination: str | Path,
    dtype: str | None = None,
    force: bool = False,
    merge: bool = False,
    base: str | Path | None = None,
) -> Exported:
    """Write the model of a checkpoint, run directory or model folder to the new DCP folder `destination`.

    Arguments and errors are those of `export_folder`. Needs memory for the model in `dtype`.
    """
    from torch.distributed.checkpoint.state_dict_saver import save

    wanted_dtype = None if dtype is None else torch_dtype(dtype)
    folder, destination = find_finished(source), Path(destination).expanduser()
    check_destination(destination, folder, force)
    remark = check_tower_is_unchanged(folder, "a DCP folder")
    model, tokenizer, merged = read_source(folder, merge, base, wanted_dtype)
    tensors = tensors_on_disk(model)
    if model.ties_output:
        tensors["lm_head.weight"] = model.output_weight.detach()
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    destination.parent.mkdir(parents=True, exist_ok=True)
    with write_whole(destination) as temporary, room_for(num_bytes, destination):
        with warnings.catch_warnings():  # that it runs in a single process, which is intended
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            save(dict(tensors), checkpoint_id=temporary, no_dist=True)
        write_configs(model, temporary)
        if tokenizer is not None:
            save_view(temporary, tokenizer, settings_of_run(folder))
    details = (
        f"{len(tensors)} tensors in {str(model.dtype).removeprefix('torch.')}, "
        f"{num_bytes / 1e9:.3g} GB, with the names of the Hugging Face folder.\n"
        "The file .metadata is a pickle: load the folder only if you trust its author."
        f"{lost_drafting(model.source)}{remark}"
    )
    return Exported(folder, destination, details, merged)
