"""Tasks of the Massive Text Embedding Benchmark (the extra `mteb`) for a model of vectors, or a reranker.

Source: MTEB, Muennighoff et al. 2022, https://arxiv.org/abs/2210.07316, whose package downloads the tasks and computes
the metrics.
"""

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from lean_ft.embedding.encode import Embedder, Reranker, kind_of_folder, open_embedder, open_reranker
from lean_ft.system.installation import install_command

PREFIX = "mteb:"  # of a task's name in `tasks`
_TEXT_BATCH = 1024  # texts that one call gets; the passes of a call are bounded by their tokens
_DISTANCES = {"euclidean": 2.0, "manhattan": 1.0}  # their powers
Vectors = Tensor | np.ndarray
Results = dict[str, dict[str, float]]  # task -> metric -> value


def split_tasks(tasks: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the tasks of other suites, and the names of MTEB's without `mteb:`."""
    of_mteb = [task.removeprefix(PREFIX) for task in tasks if task.startswith(PREFIX)]
    return [task for task in tasks if not task.startswith(PREFIX)], of_mteb


def model_of_mteb(given: Mapping[str, Any]) -> str:
    """Return the model or adapter that MTEB's tasks evaluate.

    given: the settings of the recipe evaluate that differ from their defaults. Raises ValueError for a setting that
    these tasks do not read, for other tasks beside them, and unless there is one model or adapter.
    """
    unread = [*(given.keys() - {"model", "adapter", "tasks", "output", "device"})]
    unread += [f"model.{name}" for name in given.get("model", {}).keys() - {"path", "dtype"}]
    others = ["tasks of lm-evaluation-harness"] * bool(split_tasks(given["tasks"])[0])
    if others or unread:
        what = ", ".join(others + sorted(unread))
        raise ValueError(f"tasks=mteb:... are evaluated alone. Remove {what}, or evaluate again without mteb:...")
    adapters = given.get("adapter", [])
    paths = [adapters] if isinstance(adapters, str) else [*adapters]
    paths += [given["model"]["path"]] if "path" in given.get("model", {}) else []
    if len(paths) != 1:
        found = ", ".join(paths) or "none"
        raise ValueError(f"tasks=mteb:... evaluate one model or adapter, found {found}. Set model.path or adapter.")
    return paths[0]


def find_mteb_tasks(names: Sequence[str]) -> list[Any]:
    """Return MTEB's tasks of these names.

    Raises ValueError if a task does not exist or has other data than texts, or if the package is not installed.
    """
    if importlib.util.find_spec("mteb") is None:
        raise ValueError(
            f"tasks: {PREFIX}... needs the package mteb. Run {install_command('mteb')}, or remove the task."
        )
    import mteb

    tasks = []
    for name in names:
        try:
            task = mteb.get_task(name)
        except KeyError as error:
            guess = str(error).partition("Did you mean")[2].strip('"')
            raise ValueError(f"tasks: MTEB has no task {name!r}." + f" Did you mean{guess}" * bool(guess)) from None
        if (kinds := set(task.metadata.modalities)) != {"text"}:
            others = ", ".join(sorted(kinds - {"text"}))
            raise ValueError(f"tasks: {PREFIX}{name} has {others}. Choose a task of texts.")
        tasks.append(task)
    return tasks


def run_mteb_tasks(path: str | Path, names: Sequence[str], device: str = "auto", dtype: str | None = None) -> Results:
    """Return the metrics of a model in MTEB's tasks: the mean over a task's subsets and languages of its main metric.

    path, device, dtype: as for `open_embedder`. Queries and passages of searches get the prompts that the model was
    saved with. Raises ValueError as `find_mteb_tasks` does, if a reranker is asked for vectors, and if the data of a
    task cannot be downloaded.
    """
    tasks = find_mteb_tasks(names)
    model: _Encoder | _CrossEncoder
    if kind_of_folder(path) == "scores":
        if other := [task.metadata.name for task in tasks if task.metadata.type != "Reranking"]:
            raise ValueError(
                f"tasks: {path} is a reranker, and {', '.join(other)} needs vectors. Choose tasks of the type "
                "Reranking."
            )
        model = _CrossEncoder(open_reranker(path, device, dtype))
    else:
        model = _Encoder(open_embedder(path, device, dtype))
    import mteb

    found: Results = {}
    for task in tasks:
        name, metric = task.metadata.name, task.metadata.main_score
        try:
            result = mteb.evaluate(
                cast(Any, model), task, cache=None, show_progress_bar=False, encode_kwargs={"batch_size": _TEXT_BATCH}
            )
        except (ConnectionError, FileNotFoundError) as error:
            raise ValueError(
                f"tasks: the data of {PREFIX}{name} cannot be downloaded: {error}. Check the network; a task that was "
                "downloaded before is read from the cache of the package datasets."
            ) from error
        found[PREFIX + name] = {metric: float(result.task_results[0].get_score())}
    return found


def _texts(batches: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(chain.from_iterable(batch["text"] for batch in batches))


def _description() -> Any:
    """MTEB's description of a model that it has no entry for."""
    from mteb.models import ModelMeta

    return ModelMeta.create_empty({"name": "lean_ft/model", "revision": "local", "modalities": ["text"]})


class _Encoder:
    """A model of vectors, as MTEB calls it (its `EncoderProtocol`)."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder, self.mteb_model_meta = embedder, _description()

    def encode(self, inputs: Iterable[Mapping[str, Any]], *, prompt_type: object = None, **asked: object) -> np.ndarray:
        """The vectors of all texts, (M, D). prompt_type: whether they are queries or documents of a search."""
        used_as = {"query": "query", "document": "passage"}.get(getattr(prompt_type, "value", ""))
        return self._embedder.encode(_texts(inputs), used_as).numpy()  # type: ignore[arg-type]

    def similarity(self, left: Vectors, right: Vectors) -> Tensor:
        """(M, N) of vectors (M, D) and (N, D), as the model's folder says."""
        left, right = self._compared(left), self._compared(right)
        power = _DISTANCES.get(self._embedder.how.similarity)
        return left @ right.T if power is None else -torch.cdist(left, right, p=power)

    def similarity_pairwise(self, left: Vectors, right: Vectors) -> Tensor:
        """(M,) of vectors (M, D) and (M, D)."""
        left, right = self._compared(left), self._compared(right)
        power = _DISTANCES.get(self._embedder.how.similarity)
        return (left * right).sum(-1) if power is None else -torch.linalg.vector_norm(left - right, power, dim=-1)

    def _compared(self, vectors: Vectors) -> Tensor:
        found = torch.as_tensor(vectors)
        return normalize(found, dim=-1) if self._embedder.how.similarity == "cosine" else found


class _CrossEncoder:
    """A reranker, as MTEB calls it (its `CrossEncoderProtocol`)."""

    def __init__(self, reranker: Reranker) -> None:
        self._reranker, self.mteb_model_meta = reranker, _description()

    def predict(
        self, inputs1: Iterable[Mapping[str, Any]], inputs2: Iterable[Mapping[str, Any]], **asked: object
    ) -> np.ndarray:
        """The scores of queries with passages, (M,)."""
        pairs = zip(_texts(inputs1), _texts(inputs2), strict=True)
        of_queries = groupby(pairs, key=lambda pair: pair[0])
        return np.concatenate(
            [self._reranker.scores(query, [passage for _, passage in some]).numpy() for query, some in of_queries]
        )
