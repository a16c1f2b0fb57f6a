"""`leanft check`: verify a checkpoint on this machine."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from lean_ft.cli.arguments import Debug, Overrides, Preset, find
from lean_ft.cli.errors import explain
from lean_ft.cli.output import print_lines, print_table, progress
from lean_ft.cli.run import quiet_libraries
from lean_ft.settings.text import load_config, preset_recipe, preset_values
from lean_ft.system import catalog

_RECIPES = ("finetune", "full_finetune_single_device")
_KEYS = ("optimizer.name", "optimizer.state", "optimizer.in_backward", "optimizer.stochastic_rounding")
_KEYS += ("compile", "data.packing")  # with memory.* and lora.*, the settings that choose a technique
_NOT_COMMON = ("data.packing", "data.validation_source", "data.validation_fraction")
_CHATS, _TEXTS = "tiny/train.jsonl", "tiny/problems_train.jsonl"  # the latter for a model without a chat template


def check(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A folder, a checkpoint, a run, a GGUF file, org/name or tiny.", show_default=False
        ),
    ],
    overrides: Overrides = None,
    config: Preset = None,
    quick: Annotated[bool, typer.Option("--quick", help="Skip compiled checks and the timed training steps.")] = False,
    debug: Debug = False,
) -> None:
    """Verify a model on this machine with its own weights, tokenizer and chat template.

    Compares logits, gradients, greedy tokens and token ids with transformers, if installed.
    Compares a training step with each technique to a plain step.
    Saves, exports and reads the model back. Times 3 training steps.
    With --config, checks the preset's techniques, each alone and all together.
    KEY=VALUE settings of techniques replace the default list.
    Other settings apply to the timed steps.
    Uses 8 rows of data.source, by default the embedded data.
    Exits with 1 if anything differs, and with 2 if lean_ft does not read the model.
    """
    path, preset, overrides = find("finetune", config, overrides)
    recipe = catalog.load_recipe(path)
    if preset is not None and preset_recipe(preset) not in _RECIPES:
        raise ValueError(
            f"--config {config} is for the recipe {preset_recipe(preset)}. Pass a preset for {' or '.join(_RECIPES)}."
        )

    # Imported here because torch is slow to import and most verbs do not need it.
    from lean_ft.check import TECHNIQUES, Check
    from lean_ft.system.log import console
    from lean_ft.tokenizers import load_tokenizer

    folder = _readable_model(model)
    settings = preset_values(preset) if preset else {}
    settings |= {key: value for key, _, value in (text.partition("=") for text in overrides)}
    if any(text.startswith("model.path=") for text in overrides):
        raise ValueError(f"model.path cannot be set: MODEL is {model}. Remove model.path.")
    settings.setdefault("data.source", _CHATS if load_tokenizer(folder).chat_template else _TEXTS)
    settings.setdefault("data.max_length", "256")
    start = ["output_dir=unused", f"model.path={folder}", f"data.source={settings['data.source']}"]
    load_config(recipe.Config, preset, [*start, *overrides])  # raises ValueError for invalid settings
    common = [f"{k}={v}" for k, v in settings.items() if k == "device" or (k[:5] == "data." and k not in _NOT_COMMON)]

    def configure(technique: Sequence[str]) -> Any:
        return load_config(recipe.Config, None, [*start, *common, *technique])

    techniques = _techniques(settings) or dict(zip(TECHNIQUES, TECHNIQUES, strict=True))
    if quick:
        techniques = {name: text for name, text in techniques.items() if "compile=true" not in text}
    command = ["finetune", *(["--config", config] if config else []), *overrides]
    command += [*start[1:], "data.validation_source=null", "eval_answers=0"]
    quiet_libraries()
    console.stderr, rows = True, []  # only the table goes to stdout
    try:
        with progress() as tell:
            for name, result in Check(folder, configure, techniques, None if quick else command).run():
                tell(f"checking {name}")
                try:
                    rows += result()
                except Exception as error:
                    message, code = explain(error)
                    verdict = "skipped" if code == 2 else "FAILED"
                    rows.append((name, "", "", "", f"{verdict}: {message.splitlines()[0]}"))
    finally:
        console.stderr = False
    # Reasons are printed below the table, which otherwise would not fit a terminal.
    reasons: dict[str, list[str]] = {}
    for name, *_, verdict in rows:
        if ": " in verdict:
            reasons.setdefault(verdict, []).append(name)
    columns = ("check", "what was compared", "result", "allowed", "verdict")
    print_table(columns, [(*cells, verdict.partition(": ")[0]) for *cells, verdict in rows])
    for verdict, names in reasons.items():
        print_lines(f"{verdict} ({', '.join(names)})")
    wrong = [row[0] for row in rows if row[-1].startswith(("DIFFERS", "FAILED"))]
    if all(row[-1].startswith("skipped") for row in rows):
        raise ValueError(f"nothing was checked: all of the {len(rows)} checks were skipped, for the reasons above.")
    if wrong:
        typer.echo(f"{len(wrong)} of {len(rows)} checks failed: {', '.join(wrong)}", err=True)
        raise typer.Exit(1)


def _readable_model(model: str) -> Path:
    """Find a model's folder. Raises ValueError for a model that lean_ft does not read, without importing
    transformers."""
    from lean_ft.models import empty_model, load_model, stored_labels
    from lean_ft.peft import is_adapter
    from lean_ft.peft.finished_models import find_finished
    from lean_ft.quantize import is_quantized

    folder = find_finished(model)
    if is_adapter(folder):
        raise ValueError(f"{model} is an adapter. Check the merged model: leanft export {quote(model)} DEST --merge")
    if is_quantized(folder):
        empty_model(folder, is_quantized=True)
    else:
        load_model(folder, "meta", scores=stored_labels(folder))
    return folder


def _techniques(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the techniques that the settings enable by name: each alone (LoRA settings count as one) and all
    together."""
    techniques: dict[str, list[str]] = {}
    for key, value in settings.items():
        if key in _KEYS or key.startswith(("memory.", "lora")):
            techniques.setdefault("lora" if key.startswith("lora") else key, []).append(f"{key}={value}")
    texts = [" ".join(group) for group in techniques.values()]
    together = [text for text in texts if not text.startswith("optimizer.stochastic_rounding")]
    more = {"all of these together, in float32": " ".join(together)} if len(together) > 1 else {}
    return dict(zip(texts, texts, strict=True)) | more
