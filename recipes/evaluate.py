"""Evaluate a model on tasks of lm-evaluation-harness (extra `eval`), or by exact match on the questions of a file.

leanft evaluate runs/tiny data.source=tiny/validation.jsonl
leanft evaluate runs/tiny tasks=arc_easy,gsm8k limit=100
leanft evaluate runs/tiny_lora tasks=my_task.yaml       # your own task file; needs no network
leanft evaluate runs/notes tasks=mteb:NFCorpus          # of embeddings and rerankers (extra `mteb`)

Results are added to evaluation.json in the run directory, or to the file `output`; the answers are in a file beside it.
"""

from typing import Any

from pydantic import Field, NonNegativeInt, PositiveInt

from lean_ft.data import EvalBatches, prepare_batches
from lean_ft.embedding.mteb_tasks import model_of_mteb, run_mteb_tasks, split_tasks
from lean_ft.generation import open_model
from lean_ft.generation.drafting import measure_drafts
from lean_ft.generation.tasks import find_tasks, run_tasks
from lean_ft.models import Decoder
from lean_ft.settings import AskedModelConfig, Device, FilePath, Name, Settings, SFTDataConfig
from lean_ft.settings.base import RegularExpression
from lean_ft.system.log import say
from lean_ft.system.units import number
from lean_ft.tokenizers import Tokenizer
from lean_ft.training import answer_held_out
from lean_ft.training.answers import AnswerReport, all_are_questions
from lean_ft.training.by_source import held_out_losses
from lean_ft.training.kept_evaluations import ResultsFile


class Config(Settings):
    model: AskedModelConfig = AskedModelConfig.model_validate({})
    adapter: Name | list[Name] = Field([])
    """An adapter, or a run that trained an adapter; or a list, whose adapters are summed."""
    tasks: list[Name] = Field([])
    """Names of lm-evaluation-harness tasks, which it downloads, or your own YAML files; or for a model of embeddings or
    a reranker, names of MTEB's tasks after `mteb:`."""
    num_fewshot: NonNegativeInt | None = None
    """Number of solved examples before each question; null: the task's default."""
    limit: PositiveInt | None = None
    """Maximum number of questions per task or file; null: all."""
    chat: bool = False
    """Wrap the tasks' questions as user messages with the chat template."""
    chat_template_kwargs: dict[str, Any] = Field({})
    """With chat: variables of the chat template. They replace those of the model's run."""
    data: SFTDataConfig | None = None
    """Rows whose questions are asked: the held-out rows if there are any, otherwise all."""
    pattern: RegularExpression | None = None
    """With data: compare only the first group of this regular expression's last match in each answer."""
    loss: bool = False
    """With data: also compute the mean loss over the rows' targets. Plain text is not asked then."""
    drafts: NonNegativeInt = 0
    """With data: instead of answers, measure greedy speculative decoding with the model's drafting layers: the mean
    number of tokens per step if it drafts this many tokens. 0 measures none. See docs/drafting.md."""
    output: FilePath | None = None
    """A JSON file for the results; null: evaluation.json in the run."""
    seed: NonNegativeInt = 0
    """Seed for tasks that sample."""
    device: Device = "auto"


def main(cfg: Config) -> dict[str, Any]:
    if not cfg.tasks and cfg.data is None:
        raise ValueError("nothing to evaluate: set tasks=..., data.source=FILE, or both.")
    if cfg.drafts and cfg.data is None:
        raise ValueError(f"drafts={cfg.drafts} are measured on the answers to rows of a file. Set data.source=FILE.")
    if split_tasks(cfg.tasks)[1]:
        return evaluate_vectors(cfg)
    if cfg.tasks:
        find_tasks(cfg.tasks)  # fails before the model is loaded
    asked = cfg.model.for_texts() if cfg.data is None or cfg.drafts else cfg.model
    asked = asked.model_copy(update={"mtp": "train"}) if cfg.drafts else asked
    model, tokenizer = open_model(asked, cfg.adapter, cfg.device)
    adapters = [cfg.adapter] if isinstance(cfg.adapter, str) else cfg.adapter
    file = ResultsFile.of([*([cfg.model.path] if cfg.model.path != "auto" else []), *adapters], cfg.output)
    results: dict[str, Any] = {}
    if cfg.data is not None:
        results["answers"], report = ask_file(cfg, cfg.data, model, tokenizer)
        file.keep_answers(questions_of(cfg, cfg.data), results["answers"], report)
    if cfg.tasks:
        tokenizer.check_template_kwargs(cfg.chat_template_kwargs, tokenizer.template_names if cfg.chat else ())
        tokenizer.chat_template_kwargs |= cfg.chat_template_kwargs
        how = {"num_fewshot": cfg.num_fewshot, "limit": cfg.limit, "chat": cfg.chat, "seed": cfg.seed}
        results["tasks"] = run_tasks(model, tokenizer, cfg.tasks, **how)
        kwargs = {"chat_template_kwargs": cfg.chat_template_kwargs} if cfg.chat_template_kwargs else {}
        file.keep_tasks(how | kwargs, results["tasks"])
    tell(results, file)
    return results


def evaluate_vectors(cfg: Config) -> dict[str, Any]:
    """The metrics of a model of embeddings, or a reranker, in MTEB's tasks."""
    path = model_of_mteb(cfg.model_dump(exclude_defaults=True))
    file = ResultsFile.of([path], cfg.output)
    dtype = cfg.model.dtype if "dtype" in cfg.model.model_fields_set else None  # of the files
    results = {"tasks": run_mteb_tasks(path, split_tasks(cfg.tasks)[1], cfg.device, dtype)}
    file.keep_tasks({}, results["tasks"])
    tell(results, file)
    return results


def tell(results: dict[str, Any], file: ResultsFile) -> None:
    """Print the metrics of tasks, and where all results are."""
    for task, metrics in results.get("tasks", {}).items():
        say(task, ", ".join(f"{name} {number(value)}" for name, value in metrics.items()))
    where = "printed only, because the model is not in a run directory; set output=FILE to save them"
    say("results", str(file.path or where))


def ask_file(
    cfg: Config, data: SFTDataConfig, model: Decoder, tokenizer: Tokenizer
) -> tuple[dict[str, Any], AnswerReport | None]:
    """The mean loss and the share of right answers, and the answers, if questions were asked."""
    batches, held_out = prepare_batches(data, tokenizer, batch_size=8, seed=cfg.seed)
    questions = EvalBatches(batches.layout, batches.report) if held_out is None else held_out
    found: dict[str, Any] = {}
    if cfg.loss:
        found = held_out_losses(model, questions)
    if cfg.drafts:
        found["drafts"] = measure_drafts(model, tokenizer, questions, cfg.drafts, cfg.limit)
    if cfg.drafts or (cfg.loss and not all_are_questions(questions)):
        return found, None
    report = answer_held_out(model, tokenizer, questions, cfg.limit or len(questions.layout), pattern=cfg.pattern)
    say("answers", f"{report.num_right} of {len(report.answers)} right ({report.exact_match:.1%})")
    answers = {"exact_match": report.exact_match, "num_right": report.num_right, "num_questions": len(report.answers)}
    return found | answers, report


def questions_of(cfg: Config, data: SFTDataConfig) -> dict[str, Any]:
    """The settings that choose the questions and compare the answers."""
    asked = data.model_dump(mode="json", exclude_defaults=True, exclude={"num_processes", "cache_dir", "cache_gib"})
    seed = {"seed": cfg.seed} if data.validation_fraction else {}
    return {"data": asked, "pattern": cfg.pattern, "limit": cfg.limit, **seed}
