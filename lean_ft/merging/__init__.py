"""Merge models, or adapters of one model, into a new one: weighted averages, TIES, DARE and SLERP."""

from collections.abc import Sequence
from pathlib import Path

from lean_ft.merging.adapters import merge_adapters
from lean_ft.merging.folders import merge_folders
from lean_ft.merging.methods import METHODS, formula_of
from lean_ft.merging.report import MergeResult
from lean_ft.merging.settings import MergeSettings
from lean_ft.peft import is_adapter
from lean_ft.peft.finished_models import find_finished

__all__ = ["METHODS", "MergeResult", "MergeSettings", "merge_models"]


def merge_models(
    models: Sequence[str | Path], output: str | Path, settings: MergeSettings | None = None, *, force: bool = False
) -> MergeResult:
    """Merge models into the new folder `output`: of whole models a Hugging Face folder, of adapters an adapter.

    `models`: at least two model folders, checkpoints, runs (their newest checkpoint) or Hub repositories, all whole
    models or all adapters of one model. Configuration, tokenizer and chat template are those of the first. `force`
    replaces an earlier merge or export at `output`.

    Computes in float32 with some MiB of memory per model, for adapters with one layer's matrices. Raises ValueError if
    the models differ in more than their weights, cannot be read, or the options do not fit; OSError if the disk is
    full. After an error, nothing is left behind.
    """
    settings = settings or MergeSettings()
    if len(models) < 2:
        found = f"found {models[0]} alone" if models else "found none"
        raise ValueError(f"merge needs at least two models; {found}. Name the folders one after another.")
    formula, destination = formula_of(settings, len(models)), Path(output).expanduser()
    are_adapters = [is_adapter(find_finished(model, quick=True)) for model in models]
    if all(are_adapters):
        return merge_adapters(models, destination, formula, settings, force)
    if any(are_adapters):
        adapter = models[are_adapters.index(True)]
        raise ValueError(
            f"{adapter} is an adapter, and {models[are_adapters.index(False)]} is a whole model. Merge the adapter "
            f"into its base first: leanft export {adapter} NEW --merge."
        )
    return merge_folders(models, destination, formula, settings, force)
