"""mergekit's side of merging.py: merges by mergekit's own pipeline, in mergekit's environment.

    MERGEKIT_PYTHON benchmarks/mergekit_peer.py CASES.json

Each case has mergekit's configuration as `config`, and the place of the output. DARE's masks are those of lean_ft,
because mergekit draws its own from one stream for all tensors. Its sort is made stable, because otherwise TIES keeps
arbitrary ones of the numbers with equal magnitude.
"""

import functools
import json
import sys
from pathlib import Path
from typing import Any

import torch
from merge_measures import measured
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.merge_methods.task_adapter import ExecuteMergeMethodTask
from mergekit.options import MergeOptions

from lean_ft.merging.methods import random_mask
from lean_ft.models.stored_weights import weights_fingerprint


class OwnMasks:
    """Lets mergekit drop the same numbers as lean_ft, by the tensor's and the model's names, and sort stably."""

    def __init__(self) -> None:
        self._name, self._number = "", 0
        self.keys, self.density, self.seed = [""], 1.0, 0
        execute = ExecuteMergeMethodTask.execute

        def named(task: Any, **arguments: Any) -> Any:
            self._name, self._number = task.output_weight.name, 0
            return execute(task, **arguments)

        ExecuteMergeMethodTask.execute = named
        torch.bernoulli = self._mask  # type: ignore[assignment]
        torch.argsort = functools.partial(torch.argsort, stable=True)  # type: ignore[assignment]

    def _mask(self, probabilities: torch.Tensor) -> torch.Tensor:
        name = f"{self._name}\n{self.keys[self._number]}"
        self._number += 1
        mask = random_mask(self.density, self.seed, name, 0, probabilities.numel())
        return mask.view(probabilities.shape).to(probabilities.dtype)


def main(file: Path) -> None:
    """Merge each case, and write the CPU seconds and the memory above the start."""
    masks, results = OwnMasks(), []
    for case in json.loads(file.read_text()):
        if case["seed"] is not None:
            masks.keys = [weights_fingerprint(Path(model)) or "" for model in case["models"]]
            masks.density, masks.seed = case["density"], case["seed"]
        config = MergeConfiguration.model_validate(case["config"])
        with measured(results):
            run_merge(config, case["output"], MergeOptions(quiet=True, copy_tokenizer=False))
    file.with_suffix(".results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
