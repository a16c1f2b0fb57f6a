"""Malicious files: each gives one message and exit code 2, and no file outside the run directory is written.

Each case once hung, exhausted memory, wrote through a link, or printed a traceback or a library's message.
"""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lean_ft.hub.paths import resolve_model_path
from lean_ft.system.redaction import MAX_MESSAGE_CHARACTERS

Case = tuple[Callable[[Path], Any], str]
LORA = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": "tiny", "target_modules": ["q_proj"]}
DEEP = "[" * 100_000


def in_json(name: str, **fields: Any) -> Callable[[Path], Any]:
    """Return a function that changes fields of one of the model's JSON files."""
    return lambda model: (model / name).write_text(json.dumps({**json.loads((model / name).read_text()), **fields}))


def text_in(name: str, text: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_text(text)


def rope(**fields: Any) -> Callable[[Path], Any]:
    return in_json("config.json", rope_scaling={"rope_type": "linear", **fields})


MODELS: dict[str, Case] = {
    "a factor too large": (rope(factor=1e308), "factor is 1e[+]308; expected a positive number, below 1e[+]30"),
    "a theta too small": (
        in_json("config.json", rope_parameters={"rope_type": "default", "rope_theta": 1e-44}),
        "rope_theta is 1e-44; expected a positive number",
    ),
    "a theta of one": (
        in_json("config.json", rope_parameters={"rope_type": "default", "rope_theta": 1}),
        "rope_theta is 1; expected more than 1",
    ),
    "labels with names for numbers": (
        in_json("config.json", architectures=["LlamaForSequenceClassification"], id2label={"good": 1, "bad": 0}),
        "config.json: id2label is .*good.*; expected labels by number",
    ),
    "labels that are a list": (
        in_json("config.json", architectures=["LlamaForSequenceClassification"], id2label=["good", "bad"]),
        "config.json: id2label is .*good.*; expected labels by number",
    ),
    "many factors": (
        rope(rope_type="longrope", short_factor=[1.0] * 10**5),
        r"short_factor is .{,250}; expected a list of 16 positive numbers",
    ),
    "many layer types": (in_json("config.json", layer_types=["x"] * 10**5), "layer_types"),
    "deep generation_config": (text_in("generation_config.json", DEEP), "generation_config.json is not valid JSON"),
    "eos that is none": (in_json("generation_config.json", eos_token_id="x"), "eos_token_id is 'x'; expected an id"),
    "a long name in the index": (
        lambda model: (
            (model / "model.safetensors").unlink(),
            text_in("model.safetensors.index.json", json.dumps({"weight_map": {"a": "a" * 300}}))(model),
        ),
        "File name too long",
    ),
    "tokenizer that panics": (
        lambda model: in_json(
            "tokenizer.json",
            model={
                **json.loads((model / "tokenizer.json").read_text())["model"],
                "continuing_subword_prefix": "x" * 10,
            },
        )(model),
        "lacks the continuing_subword_prefix",
    ),
}


def adapter(**fields: Any) -> Callable[[Path], Any]:
    def write(folder: Path) -> None:
        folder.mkdir()
        tensors = {
            f"base_model.model.model.layers.0.self_attn.q_proj.lora_{x}.weight": torch.zeros(2, 128) for x in "AB"
        }
        save_file(tensors, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps({**LORA, **fields}))

    return write


ADAPTERS: dict[str, Case] = {
    "a pattern without end": (
        adapter(alpha_pattern={"(a+)+$|(.*)*(.*)*(.*)*x": 2}),
        r"lora_B.weight has shape \[2, 128\]",  # the pattern was matched before
    ),
    "a pattern that is none": (
        adapter(alpha_pattern={"(": 2}),
        "alpha_pattern: '[(]': cannot be read as a regular expression from character 2",
    ),
    "alpha that is no number": (adapter(lora_alpha=float("nan")), "lora_alpha is nan; expected a positive number"),
    "alpha that overflows": (
        adapter(lora_alpha=1e29),
        "lora_alpha is 1e[+]29; expected a positive number of at most 1e[+]06",
    ),
    "a pattern's alpha that overflows": (
        adapter(alpha_pattern={"q_proj": 1e29}),
        "alpha_pattern has 1e[+]29 for 'q_proj'",
    ),
    "a base that is a number": (adapter(base_model_name_or_path=5), "base_model_name_or_path or revision is .5"),
    "a base of 6,000 characters": (adapter(base_model_name_or_path="a/" * 3000), "characters left out"),
}


def link(name: str) -> Callable[[Path], Any]:
    def write(run: Path) -> None:
        run.mkdir()
        (run.parent / "victim").write_text("mine")
        (run / name).symlink_to(run.parent / "victim")

    return write


def in_run(name: str, text: str) -> Callable[[Path], Any]:
    return lambda run: (run.mkdir(), (run / name).write_text(text))


RUNS: dict[str, Case] = {
    "starts that are none": (in_run("run.json", '{"starts": 5}'), "run.json is not a list of a run's starts"),
    "deep run.json": (in_run("run.json", DEEP), "run.json is not valid JSON"),
    "a name too long": (lambda run: None, "File name too long"),
    "a zero byte": (lambda run: None, "control characters"),
    "a loop of links": (lambda run: run.symlink_to(run), "loop|exists"),
    "lock is a link": (link(".lock"), "[.]lock is a link, so the run does not write to it"),
}
DIRECTORIES = {"a name too long": "a" * 300, "a zero byte": "a\0b"}


def is_one_message(answer: Any, expected: str) -> None:
    assert "Traceback" not in answer.out + answer.err
    assert "Use --debug" not in answer.err
    assert answer.err.count("error: ") == 1
    assert len(answer.err) <= MAX_MESSAGE_CHARACTERS + 10
    assert re.search(expected, answer.err.replace("\n", " ")), answer.err
    assert answer.code == 2


@pytest.mark.first(7)
@pytest.mark.parametrize("case", MODELS)
def test_a_model(leanft, tmp_path, case):
    change, expected = MODELS[case]
    shutil.copytree(resolve_model_path("tiny"), tmp_path / "model")
    change(tmp_path / "model")
    is_one_message(leanft("run", "generate", f"model.path={tmp_path}/model", "prompt=hi", "max_new_tokens=1"), expected)


@pytest.mark.first(4)
@pytest.mark.parametrize("case", ADAPTERS)
def test_an_adapter(leanft, tmp_path, case):
    write, expected = ADAPTERS[case]
    write(tmp_path / "adapter")
    is_one_message(leanft("run", "generate", f"adapter={tmp_path}/adapter", "prompt=hi", "max_new_tokens=1"), expected)


@pytest.mark.first(len(RUNS) - 1)  # the last one runs
@pytest.mark.parametrize("case", RUNS)
def test_a_run_folder(leanft, tmp_path, case):
    write, expected = RUNS[case]
    run = tmp_path / DIRECTORIES.get(case, "run")
    write(run)
    settings = ["plan=false", "device=cpu", "max_steps=1", "batch_size=1", "data.max_length=32", "eval_answers=0"]
    answer = leanft("run", "--config", "tiny/full", "data.validation_source=null", f"output_dir={run}", *settings)
    is_one_message(answer, expected)
    if (victim := tmp_path / "victim").exists():
        assert victim.read_text() == "mine"


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("name", "expected"), [("metrics.jsonl", "the reward .* failed"), ("samples.jsonl", "samples.jsonl is a link")]
)
def test_what_a_run_appends_to_is_no_link(leanft, tmp_path, name, expected):
    """The metrics file of an earlier start is renamed, whether or not it is a link."""
    link(name)(tmp_path / "run")
    os.mkfifo(tmp_path / "run" / "loggers.json")
    (tmp_path / "run" / "run.json").write_text('{"starts": []}')
    (tmp_path / "rewards.py").write_text("def f(completions): raise ValueError('x')\n")
    settings = ["plan=false", "device=cpu", "max_steps=1", "generation.max_new_tokens=1", "generation.num_answers=2"]
    settings += [f"rewards=[{tmp_path}/rewards.py:f]", "batch_size=2", "log.to=[csv]", f"output_dir={tmp_path}/run"]
    answer = leanft("run", "--config", "tiny/grpo", *settings)
    assert re.search(expected, answer.err)
    assert "Traceback" not in answer.out + answer.err
    assert (tmp_path / "victim").read_text() == "mine"


def test_thousands_of_unknown_settings(leanft, tmp_path):
    (tmp_path / "preset.yaml").write_text("".join(f"unknown_{i}: 1\n" for i in range(300)))
    answer = leanft("run", "finetune", "--config", tmp_path / "preset.yaml")
    is_one_message(answer, "problems in the settings.*and 2[89]. more")
