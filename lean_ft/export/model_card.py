"""The model card of an upload: results, code that uses the model, its data, and the settings that were set.

All foreign text is escaped, and secrets are removed.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lean_ft.export.places import MERGE_FILE, sentences_not_in_files
from lean_ft.hub.paths import repository_name
from lean_ft.peft import is_adapter
from lean_ft.settings.strict_yaml import to_yaml
from lean_ft.system.foreign_values import JSON
from lean_ft.system.redaction import on_one_line, redact
from lean_ft.system.run_directory import METRICS_FILE, NAME, read_rows, read_starts
from lean_ft.system.units import gibibytes, number
from lean_ft.system.whole_files import read_json
from lean_ft.tokenizers import load_tokenizer
from lean_ft.training.metrics import EXACT_MATCH, is_number

PICTURE = "curves.png"
_FACTS = ("lean_ft", "torch", "python", "device", "processes", "git_commit", "data_fingerprint", "started")
_NOT_OF_MODEL = ("output_dir", "resume", "plan", "data.num_processes", "data.cache_dir", "data.cache_gib")
# Ending of an architecture in config.json -> class of transformers, and of peft
_CLASSES = {
    "ForSequenceClassification": ("AutoModelForSequenceClassification", "AutoPeftModelForSequenceClassification"),
    "ForTokenClassification": ("AutoModelForTokenClassification", "AutoPeftModelForTokenClassification"),
    "ForConditionalGeneration": ("AutoModelForImageTextToText", "AutoPeftModel"),
    "ForCausalLM": ("AutoModelForCausalLM", "AutoPeftModelForCausalLM"),
}
_OF_ADAPTERS = {"SEQ_CLS": "ForSequenceClassification", "TOKEN_CLS": "ForTokenClassification"}


def model_card(folder: Path, run: Path | None, repo: str, has_picture: bool, license: str | None = None) -> str:
    """Return the model card of `folder`, a checkpoint of `run`: results, use, data, settings and versions, redacted."""
    starts = read_starts(run) if run is not None else []
    settings: dict[str, Any] = starts[-1]["settings"] if starts else {}
    base, adapter = settings.get("model.path"), is_adapter(folder)
    base_name = repository_name(base) if isinstance(base, str) and base else None
    architecture = _architecture(folder)
    head: dict[str, Any] = {"library_name": "peft" if adapter else "transformers", "tags": ["lean_ft"]}
    if license is not None:
        head["license"] = license
    if base_name is not None:
        head |= {"base_model": base_name.repo, "base_model_relation": "adapter" if adapter else "finetune"}
    if "Classification" not in architecture:
        head["pipeline_tag"] = "text-generation"
    merged = read_json(folder / MERGE_FILE)
    if merged:
        head |= _head_of_merge(merged)
    kind = "An adapter for" if adapter else "A model finetuned from"
    lines = [f"# {repo.partition('/')[2]}", ""]
    if starts and run is not None:
        recipe, name = _code(starts[-1].get("recipe")), _escaped(folder.name)
        lines += [f"{kind} {_code(base)}, trained with lean_ft's recipe {recipe} ({name} of the run).", ""]
        lines += ["## Results", "", *_table(_results(run, folder)), ""]
        if has_picture:
            lines += [f"![Curves of the run]({PICTURE})", ""]
    if merged:
        lines += _about_merge(merged, "adapters" if adapter else "models")
    lines += ["## Use", "", *_use(folder, repo, architecture, settings), ""]
    if notes := sentences_not_in_files(folder):
        lines += [*(f"- {sentence[0].upper()}{sentence[1:]}." for sentence in notes), ""]
    if starts:
        lines += _about_training(starts[-1], settings)
    return redact(f"---\n{to_yaml(head)}---\n\n" + "\n".join(lines))


def _models_of_merge(merged: Mapping[str, JSON]) -> list[tuple[str, JSON]]:
    """The models that a merge.json names, and their weights."""
    models = merged.get("models")
    entries = [entry for entry in models if isinstance(entry, dict)] if isinstance(models, list) else []
    return [(str(entry.get("model")), entry.get("weight")) for entry in entries]


def _head_of_merge(merged: Mapping[str, JSON]) -> dict[str, JSON]:
    names = [name for name, _ in _models_of_merge(merged)]
    base = merged.get("base")
    names += [base] if isinstance(base, str) else []
    repositories: list[JSON] = [found.repo for name in names if (found := repository_name(name)) is not None]
    head: dict[str, JSON] = {"tags": ["lean_ft", "merge"]}
    return head | ({"base_model": repositories, "base_model_relation": "merge"} if repositories else {})


def _about_merge(merged: Mapping[str, JSON], what: str) -> list[str]:
    """The section on a merge: its models with their weights, and the numbers of the method."""
    models, method = _models_of_merge(merged), merged.get("method")
    facts = {name: value for name, value in merged.items() if name not in ("models", "method", "lean_ft")}
    rows = [f"| {_code(name)} | {_escaped('' if weight is None else weight)} |" for name, weight in models]
    lines = [f"{len(models)} {what}, merged by lean_ft's method {_code(method)}.", "", "## Merge", ""]
    lines += ["| model | weight |", "|---|---:|", *rows, ""]
    return [*lines, *(f"- {_escaped(name)}: {_code(json.dumps(value))}" for name, value in facts.items()), ""]


def _architecture(folder: Path) -> str:
    """The ending of the model's architecture, a key of _CLASSES."""
    if is_adapter(folder):
        return _OF_ADAPTERS.get(str(read_json(folder / "adapter_config.json").get("task_type")), "ForCausalLM")
    names = str(read_json(folder / "config.json").get("architectures"))
    return next((ending for ending in _CLASSES if ending in names), "ForCausalLM")


def _use(folder: Path, repo: str, architecture: str, settings: Mapping[str, Any]) -> list[str]:
    """Code that loads the model from the Hub and asks it, with transformers or peft, and with lean_ft."""
    adapter, scores = is_adapter(folder), "Classification" in architecture
    name, module = _CLASSES[architecture][adapter], "peft" if adapter else "transformers"
    imports = [f"from peft import {name}", "from transformers import AutoTokenizer"]
    code = imports if adapter else [f"from transformers import {name}, AutoTokenizer"]
    code += ["", f'tokenizer = AutoTokenizer.from_pretrained("{repo}")', f'model = {name}.from_pretrained("{repo}")']
    chats = not scores and settings.get("data.chat") is not False and _has_chat_template(folder)
    if chats:
        code += [
            'messages = [{"role": "user", "content": "Write your question here."}]',
            "inputs = tokenizer.apply_chat_template(",
            '    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"',
            ")",
        ]
    else:
        code += ['inputs = tokenizer("Write your text here.", return_tensors="pt")']
    if scores:
        code += ["print(model(**inputs).logits)"]
    else:
        code += [
            "output = model.generate(**inputs, max_new_tokens=200)[0, inputs.input_ids.shape[1] :]",
            "print(tokenizer.decode(output, skip_special_tokens=True))",
        ]
    verb = f"score {repo} rows.jsonl" if scores else f"chat {repo}" if chats else f'generate {repo} prompt="Your text"'
    return [
        f"With {module}:",
        "",
        "```python",
        *code,
        "```",
        "",
        "With lean_ft:",
        "",
        "```bash",
        f"leanft {verb}",
        "```",
    ]


def _has_chat_template(folder: Path) -> bool:
    try:
        return load_tokenizer(folder).chat_template is not None
    except ValueError:  # the folder has no tokenizer
        return False


def _about_training(start: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """The sections on data, settings that differ from the recipe's defaults, and versions."""
    keys = [key for key, value in settings.items() if key.startswith("data.") and "source" in key and value]
    lines = ["## Data", "", *(f"- {_code(key)}: {_code(json.dumps(settings[key]))}" for key in keys), ""]
    changed = start.get("set")
    title, shown = "All settings are in config.yaml. These differ from the recipe's defaults:", settings
    if isinstance(changed, list):
        # A group that is on with its defaults, such as lora, is listed as the group.
        shown = {key: value for key, value in settings.items() if any(_overlap(key, str(name)) for name in changed)}
    else:  # a run of an early version
        title = "The settings of the run:"
    values = to_yaml({key: value for key, value in shown.items() if not _is_of_machine(key)}).rstrip()
    fence = _fence(values, 3)
    lines += ["## Settings", "", title, "", f"{fence}yaml", values, fence, ""]
    known = [fact for fact in _FACTS if start.get(fact) is not None]
    return [*lines, "## Versions", "", *(f"- {fact}: {_escaped(start[fact])}" for fact in known), ""]


def _overlap(key: str, other: str) -> bool:
    """Whether two dotted keys are equal, or one is a group of the other."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


def _is_of_machine(key: str) -> bool:
    return key in _NOT_OF_MODEL or key.startswith("log.")


def _results(run: Path, folder: Path) -> dict[str, str]:
    """Summarize metrics.jsonl up to the checkpoint."""
    step = NAME.fullmatch(folder.name)
    rows = [row for row in read_rows(run / METRICS_FILE) if step is None or row["step"] <= int(step[1])]
    steps = [row for row in rows if row.get("tokens") is not None]
    results = dict[str, str]()
    if right := [row for row in rows if is_number(row.get(EXACT_MATCH))]:
        first, last = right[0], right[-1]
        before = f"{first[EXACT_MATCH]:.1%} at step {first['step']:,}, " if len(right) > 1 else ""
        asked = f" of {last['eval_questions']}" if is_number(last.get("eval_questions")) else ""
        results[f"held-out questions right (exact match{asked})"] = (
            f"{before}{last[EXACT_MATCH]:.1%} at step {last['step']:,}"
        )
    results |= {"optimizer steps": f"{rows[-1]['step']:,}"} if rows else {}
    if steps:
        results["tokens"] = f"{sum(row['tokens'] for row in steps):,}"
        results["loss, first and last"] = f"{number(steps[0].get('loss'))}, {number(steps[-1].get('loss'))}"
    for name in sorted(
        {key for row in rows for key in row if key.startswith("eval_")} - {EXACT_MATCH, "eval_questions"}
    ):
        value = [row[name] for row in rows if row.get(name) is not None][-1:]
        if value and is_number(value[0]):
            results[name.replace("eval_", "held-out ", 1)] = number(value[0])
    if steps:
        results["peak memory"] = gibibytes(max(row.get("peak_memory_bytes") or 0 for row in steps))
    return results


def _table(results: dict[str, str]) -> list[str]:
    return ["| | |", "|---|---:|", *(f"| {_escaped(name)} | {value} |" for name, value in results.items())]


def _escaped(text: object) -> str:
    """Foreign text as Markdown that shows it, redacted first, since a secret between backslashes is not found."""
    return re.sub(r"([\\`*{}\[\]<>|#~$&])", r"\\\1", on_one_line(redact(str(text))))


def _code(text: object) -> str:
    """Foreign text as a code span of Markdown."""
    text = on_one_line(str(text))
    fence = _fence(text, 1)
    return f"{fence}{text}{fence}" if fence == "`" else f"{fence} {text} {fence}"


def _fence(text: str, least: int) -> str:
    """More backticks than any in `text`, and at least `least`."""
    return "`" * max([least - 1, *map(len, re.findall("`+", text))]) + "`"
