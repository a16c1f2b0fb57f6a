"""Tasks of MTEB, on data in memory, next to the same tasks of sentence-transformers' model of the same folder."""

import re
from typing import Any

import pytest

from lean_ft.embedding.folder import ScoresOf, VectorsOf
from lean_ft.embedding.mteb_tasks import find_mteb_tasks, run_mteb_tasks, split_tasks
from lean_ft.settings.text import load_config
from lean_ft.system.catalog import find_recipe, load_recipe
from tests.embedding.conftest import Save
from tests.embedding.test_folder import TEMPLATE
from tests.embedding.theirs import library

TOPICS = ["rivers of Asia", "small birds", "old bridges", "red apples", "night trains", "warm bread"]
PASSAGES = [
    f"{topic} {what}" for topic in TOPICS for what in ("are described here", "and how many there are", "in May")
]


def own_task(kind: str) -> Any:
    """A task of MTEB whose data is in memory."""
    from datasets import Dataset
    from mteb.abstasks import AbsTaskRetrieval, AbsTaskSTS
    from mteb.abstasks.retrieval_dataset_loaders import RetrievalSplitData
    from mteb.abstasks.task_metadata import TaskMetadata

    metric = "cosine_spearman" if kind == "STS" else "ndcg_at_10"
    described = TaskMetadata(
        name=f"Own{kind}", description="Ours.", type=kind, category="t2t", eval_langs=["eng-Latn"], main_score=metric,
        dataset={"path": "unused/unused", "revision": "unused"}, reference=None, date=("2020-01-01", "2020-01-02"),
    )  # fmt: skip

    class STS(AbsTaskSTS):
        metadata = described

        def load_data(self, **_: Any) -> None:
            pairs = [(a, b, (i * 7 + j) % 6) for i, a in enumerate(TOPICS) for j, b in enumerate(PASSAGES[i : i + 9])]
            first, second, scores = zip(*pairs, strict=True)
            self.dataset = {"test": Dataset.from_dict({"sentence1": first, "sentence2": second, "score": scores})}
            self.data_loaded = True

    class Search(AbsTaskRetrieval):
        metadata = described

        def load_data(self, **_: Any) -> None:
            passages = {f"p{i}": text for i, text in enumerate(PASSAGES)}
            right = {f"q{i}": {f"p{3 * i}": 1, f"p{3 * i + 1}": 1} for i in range(len(TOPICS))}
            parts = RetrievalSplitData(
                queries=Dataset.from_list([{"id": f"q{i}", "text": text} for i, text in enumerate(TOPICS)]),
                corpus=Dataset.from_list([{"id": one, "text": text, "title": ""} for one, text in passages.items()]),
                relevant_docs=right,
                top_ranked={query: list(passages)[:12] for query in right} if kind == "Reranking" else None,
            )
            self.dataset = {"default": {"test": parts}}
            self.data_loaded = True

    return STS() if kind == "STS" else Search()


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    import mteb

    monkeypatch.setattr(mteb, "get_task", lambda name: own_task(name.removeprefix("Own")))


@pytest.mark.long
@pytest.mark.parametrize(
    "how",
    [
        VectorsOf("mean", query_prompt="Which passage answers: ", passage_prompt="Passage: "),
        VectorsOf("last", normalize=False, similarity="dot"),
        VectorsOf("last", normalize=False, similarity="euclidean"),
    ],
    ids=["prompts", "dot", "euclidean"],
)
def test_metrics_equal_those_of_sentence_transformers(how: VectorsOf, save_folder: Save, tasks: None) -> None:
    import mteb

    folder, names = save_folder(how), ["OwnRetrieval", "OwnReranking"]
    names += ["OwnSTS"] * (how.similarity != "euclidean")  # MTEB does not know the distances of pairs
    found = run_mteb_tasks(folder, names, "cpu")
    theirs = library.SentenceTransformer(str(folder), device="cpu")
    for name in names:
        task = mteb.get_task(name)
        expected = mteb.evaluate(theirs, task, cache=None, show_progress_bar=False).task_results[0].get_score()
        assert found[f"mteb:{name}"] == {task.metadata.main_score: pytest.approx(expected, abs=1e-6)}
        assert abs(expected) < 1


@pytest.mark.long
def test_a_reranker_orders_what_a_first_search_found(save_folder: Save, tasks: None) -> None:
    import mteb

    folder = save_folder(ScoresOf(TEMPLATE, (70, 71), 96))
    theirs = library.CrossEncoder(str(folder), device="cpu")
    expected = mteb.evaluate(theirs, own_task("Reranking"), cache=None, show_progress_bar=False).task_results[0]
    found = run_mteb_tasks(folder, ["OwnReranking"], "cpu")
    assert found == {"mteb:OwnReranking": {"ndcg_at_10": pytest.approx(expected.get_score(), abs=1e-6)}}
    with pytest.raises(ValueError, match="is a reranker, and OwnSTS needs vectors"):
        run_mteb_tasks(folder, ["OwnSTS"], "cpu")


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NFCorpu", "tasks: MTEB has no task 'NFCorpu'. Did you mean: 'NFCorpus'?"),
        ("CIFAR10", "tasks: mteb:CIFAR10 has image. Choose a task of texts."),
    ],
)
def test_tasks_that_cannot_be_evaluated_are_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        find_mteb_tasks([name])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["tasks=[mteb:STS12,arc_easy]", "limit=3"], "Remove tasks of lm-evaluation-harness, limit, or"),
        (["tasks=mteb:STS12", "adapter=a"], "one model or adapter, found a, tiny. Set model.path or adapter."),
        (["tasks=mteb:STS12", "model.random_init=true"], "Remove model.random_init, or"),
    ],
)
def test_tasks_of_mteb_are_evaluated_alone(settings: list[str], message: str) -> None:
    recipe = load_recipe(find_recipe("evaluate"))
    with pytest.raises(ValueError, match=message):
        recipe.main(load_config(recipe.Config, None, ["model.path=tiny", *settings]))


def test_the_tasks_of_a_list_are_told_apart() -> None:
    assert split_tasks(["arc_easy", "mteb:STS12", "my.yaml"]) == (["arc_easy", "my.yaml"], ["STS12"])
