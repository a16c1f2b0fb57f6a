"""Names and values of other tools: the file names settings that exist, it leaves no setting out, and messages use
it."""

import dataclasses
import importlib.metadata
import inspect
import re
import runpy
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from lean_ft.cli.main import VERBS
from lean_ft.settings.hints import hint_for_command, replacement
from lean_ft.settings.other_tools import (
    RECIPE,
    VALUE,
    Equivalent,
    are_in,
    by_name,
    equivalent,
    read_equivalent,
    table,
    tools,
)
from lean_ft.settings.text import load_config
from lean_ft.system import catalog
from tests.settings.cases import load_recipe, settings_of

ROOT = Path(__file__).resolve().parents[2]
RECIPES = [name for name in catalog.recipes() if name != "full_finetune_single_device"]


@cache
def known(recipe: str) -> set[str]:
    keys = settings_of(recipe).keys()
    return keys | {key.partition(".")[0] for key in keys}


def refusal(recipe: str, *overrides: str) -> str:
    """The message for overrides, or "" if only other settings or a package are missing."""
    try:
        load_config(load_recipe(recipe).Config, None, overrides)
    except ValueError as error:
        is_missing = "(command line)" not in str(error) or "is not installed here" in str(error)
        return "" if is_missing else str(error)
    return ""


def answers() -> Iterator[tuple[str, Equivalent]]:
    for part in ("values", "words", *tools()):
        for name, row in table(part).items():
            for text in row.values() if isinstance(row, dict) else [row]:
                yield f"{part}: {name}: {text}", read_equivalent(text)


# The file -------------------------------------------------------------------------------------------------------------


def test_every_setting_that_the_file_names_is_taken_by_a_recipe():
    keys, seen = {recipe: known(recipe) for recipe in RECIPES}, set[tuple[tuple[str, str], ...]]()
    for where, one in answers():
        assert one.alternatives or (one.verdict and one.note), where
        for settings in one.alternatives:
            if (pairs := tuple(settings.items())) in seen:
                continue
            seen.add(pairs)
            assert settings.get(RECIPE, "dpo") in RECIPES, where
            ours = {key: text for key, text in settings.items() if key != RECIPE}
            having = [recipe for recipe in RECIPES if are_in(keys[recipe], ours)]
            assert having, where
            fixed = [f"{key}={text}" for key, text in ours.items() if VALUE not in text]
            assert any(refusal(recipe, *fixed) == "" for recipe in having), where
    assert len(seen) > 200


def test_settings_of_single_recipes_are_in_the_recipe_that_the_file_names():
    for key, recipe in table("recipes").items():
        assert key in known(recipe), key
    common = set.intersection(*(known(recipe) for recipe in ("finetune", "classify", "dpo", "grpo")))
    typed_elsewhere = {name for part in ("words", *tools()) for name in table(part)}
    for setting in {setting for recipe in RECIPES for setting in known(recipe)} - common - typed_elsewhere:
        _, sentence = replacement(setting, "1", common)
        owner = sentence.removeprefix("The recipe ").partition(" has ")[0]
        assert owner in RECIPES and setting in known(owner), (setting, sentence)


@pytest.mark.parametrize("recipe", ["finetune", "full_finetune_single_device", "grpo", "generate"])
def test_every_name_gets_an_answer_in_every_recipe(recipe):
    keys = known(recipe)
    for part in ("words", *tools()):
        for name in (name for name in table(part) if name not in keys and "*" not in name):
            settings, sentence = replacement(name, "1", keys)
            assert are_in(keys, settings) and (settings or sentence), name


def test_no_name_has_two_rows():
    for part in tools().values():
        names = [name for section in ("common", "rest") for names in part[section] for name in names.split()]
        assert len(names) == len(set(names)), sorted(name for name in set(names) if names.count(name) > 1)
        assert part["version"] and part["title"]


def missing(tool: str, names: Any) -> list[str]:
    return [name for name in names if equivalent(tool, name, "1") is None]


def test_every_argument_of_transformers_is_in_the_file():
    transformers = pytest.importorskip("transformers")
    fields = dataclasses.fields(transformers.TrainingArguments)
    assert missing("transformers", [field.name for field in fields]) == []
    [optimizers] = [value for names, value in tools()["transformers"]["common"].items() if names == "optim"]
    names = {name.value for name in transformers.training_args.OptimizerNames}
    assert names <= by_name(optimizers).keys()
    [schedules] = [value for names, value in tools()["transformers"]["common"].items() if names == "lr_scheduler_type"]
    assert {name.value for name in transformers.SchedulerType} <= by_name(schedules).keys()


@pytest.mark.long
def test_every_argument_of_trl_is_in_the_file():
    trl = pytest.importorskip("trl")
    configs = [getattr(trl, name) for name in dir(trl) if name.endswith("Config")] + [trl.ScriptArguments]
    for name in ("gkd.GKD", "cpo.CPO", "orpo.ORPO", "online_dpo.OnlineDPO"):
        module, _, prefix = name.partition(".")
        configs.append(getattr(importlib.import_module(f"trl.experimental.{module}"), f"{prefix}Config"))
    assert len(configs) > 10
    for config in configs:
        assert missing("trl", [field.name for field in dataclasses.fields(config)]) == [], config
    for trainer in (trl.SFTTrainer, trl.DPOTrainer, trl.GRPOTrainer):
        own = {"self", "model", "ref_model", "args", "optimizers"}
        unknown = missing("trl", inspect.signature(trainer.__init__).parameters.keys() - own)
        assert unknown == [], trainer


@pytest.mark.long
def test_every_argument_of_sentence_transformers_is_in_the_file():
    library = pytest.importorskip("sentence_transformers")
    fields = dataclasses.fields(library.SentenceTransformerTrainingArguments)
    assert missing("sentence_transformers", [field.name for field in fields]) == []
    ranking = ("BinaryCrossEntropyLoss", "RankNetLoss", "ListNetLoss", "LambdaLoss")
    vectors = ("CachedMultipleNegativesRankingLoss", "CoSENTLoss", "TripletLoss", "MarginMSELoss", "DistillKLDivLoss")
    of_losses = tools()["sentence_transformers"]["common"]["loss"]
    for folder, names in (("cross_encoder", ranking), ("sentence_transformer", (*vectors, "MatryoshkaLoss"))):
        losses = importlib.import_module(f"sentence_transformers.{folder}.losses")
        for name in names:
            arguments = inspect.signature(getattr(losses, name).__init__).parameters.keys() - {
                "self",
                "model",
                "kwargs",
            }
            assert missing("sentence_transformers", arguments) == [] and name in by_name(of_losses), name


def test_every_setting_of_torchtunes_configurations_is_in_the_file():
    try:
        files = importlib.metadata.files("torchtune") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("torchtune is not installed")
    found = set[str]()

    def collect(values: dict[str, Any], prefix: str = "") -> None:
        for name, value in values.items():
            collect(value, f"{prefix}{name}.") if isinstance(value, dict) else found.add(f"{prefix}{name}")

    for file in (file for file in files if file.suffix == ".yaml"):
        collect(yaml.safe_load(file.read_text()))
    assert len(found) > 100
    groups = {name.rpartition(".")[0] for name in found}  # set to null in some files
    assert missing("torchtune", sorted(found - groups)) == []


def test_the_tables_of_the_pages_are_current():
    script = runpy.run_path(str(ROOT / "scripts" / "make_other_tools_tables.py"))
    pages = [*(ROOT / "docs").glob("coming_from_*.md"), ROOT / "docs" / "other_tools.md"]
    marks = "".join(page.read_text() for page in pages)
    assert all(f"<!-- settings: {tool} {section} -->" in marks for tool in tools() for section in ("common", "rest"))
    for page in pages:
        assert script["filled"](page.read_text()) == page.read_text(), f"{page.name}: run the script"


# Messages -------------------------------------------------------------------------------------------------------------

MEANT = {  # recipe -> what is typed -> what the message says
    "finetune": {
        "dtype=bf16": "Did you mean 'model.dtype'?",
        "data.path=x": "Did you mean 'data.source'?",
        "tokenizer.path=x": "Not needed: the tokenizer is in the model's folder.",
        "model=x": "Did you mean 'model.path=x'?",
        "report_to=wandb": "Did you mean 'log.to=wandb'?",
        "wandb_project=dogs": "Did you mean 'log.project=dogs log.to=wandb'?",
        "report_to=none": "Did you mean 'log.to=jsonl'?",
        "attn_implementation=flash_attention_2": "Not needed: attention always runs in the fastest kernel",
        "use_flash_attention_2=true": "Not needed: attention",
        "grad_accum=4": "Did you mean 'gradient_accumulation_steps'? lean_ft counts the micro-batches of all processes.",  # noqa: E501
        "adapter=qlora": "Did you mean 'lora.quantize=nf4'?",
        "adapter=lora": "Did you mean 'lora={}'?",
        "block_size=512": "Did you mean 'data.max_length'?",
        "gradient_checkpointing=true": "Did you mean 'memory.activation_checkpointing=full'?",
        "evals_per_epoch=4": "Did you mean 'eval_every=0.25'?",
        "ddp_timeout=3600": "Did you mean 'parallel.timeout_minutes=60'?",
        "optimizer=adamw_bnb_8bit": "Did you mean 'optimizer.name=adamw_8bit'?",
        "quantization_bit=8": "Not supported: frozen weights are stored in 4 bits (lora.quantize=nf4) or in model.dtype.",  # noqa: E501
        "training.max_seq_length=1": "Did you mean 'data.max_length'?",
        "rl=dpo": "Use the recipe dpo.",
        "rl=ipo": "Use the recipe dpo with loss.name=ipo.",
        "train_on_responses_only=true": "Did you mean 'data.train_on=assistant'?",
        "model_revision=x": "Not supported: write model.path=org/name@revision.",
        "lora_target=q_proj, v_proj": "Did you mean 'lora.targets=q_proj,v_proj'?",
        "teacher_model=x": "The recipe distill has distill.teacher.",
        "kd_ratio=0.3": "The recipe distill has distill.cross_entropy_weight=0.7.",
        "loss.beta=0.1": "The recipe dpo has loss.beta.",
        "problem_type=multi_label_classification": "The recipe classify has data.multi_label=true.",
        # values
        "lora=true": "Did you mean 'lora={}'?",
        "data.packing=true": "Did you mean 'data.packing=bfd'?",
        "memory.activation_checkpointing=true": "Did you mean 'memory.activation_checkpointing=full'?",
        "memory.attention=flash3": "Did you mean 'memory.attention=auto'? Auto uses FlashAttention 3 on Hopper",
        "model.dtype=auto": "Did you mean 'model.dtype=bfloat16'?",
        "clip_grad_norm=None": "Did you mean 'clip_grad_norm=null'?",
        "max_steps=-1": "Did you mean 'max_steps=null'?",
        "log.to=none": "Did you mean 'log.to=jsonl'?",
        "compile=1": "Did you mean 'compile=true'?",
        "optimizer.lr='1e-4'": "Write the number without quotes: 1e-4",
        "optimizer.name=adamw_torch": "Did you mean 'optimizer.name=adamw'?",
        "optimizer.name=adamw_bnb_8bit": "Did you mean 'optimizer.name=adamw_8bit'?",
        "optimizer.name=paged_adamw_32bit": "Did you mean 'optimizer.name=adamw'? On a GPU, optimizer.state=streamed",
        "optimizer.name=lion_8bit": "Not supported: copy lion_8bit from docs/own_optimizers.md and set optimizer.name=",
        "optimizer.name=soap": "Not supported: write its rule, optimizer.name=my_opt.py:Rule",
        "schedule.name=cosine_with_warmup": "Did you mean 'schedule.name=cosine'?",
        "schedule.name=constant_with_warmup": "Did you mean 'schedule.name=constant'? It warms up if",
    },
    "full_finetune_single_device": {
        "lora.rank=8": "The recipe finetune has the group lora.",
        "adapter=qlora": "The recipe finetune has lora.quantize=nf4.",
    },
    "dpo": {
        "loss.name=exo_pair": "Did you mean 'loss.name=exo'?",
        "loss.name=kto": "Use the recipe kto.",
        "loss.name=aot": "Not supported: `leanft cat dpo` lists the losses.",
        "beta=0.1": "Did you mean 'loss.beta'?",
        "ref_model=x": "Not supported: the reference is the model before training (reference.kind).",
    },
    "grpo": {
        "beta=0.1": "Did you mean 'loss.kl_weight'?",
        "cliprange=0.2": "Did you mean 'loss.epsilon'?",
        "temperature=0.7": "Did you mean 'generation.temperature'?",
        "reward_funcs=f.py:g": "Did you mean 'rewards=f.py:g'?",
        "reward_funcs=[environment, f.py:g]": "Did you mean 'rewards=environment,f.py:g'?",
        "environment_factory=My_env.py:Env": "Did you mean 'environment'? A class or a function that makes",
        "loss.name=sapo": "Not supported: use dapo,",
    },
    "ppo": {
        "reward_model_path=m": "Did you mean 'rewards=[{model: m}]'?",
        "lmbda=0.9": "Did you mean 'loss.gae_lambda'?",
    },
    "distill": {"lmbda=0.5": "Did you mean 'distill.on_policy'?", "teacher_model=x": "Did you mean 'distill.teacher'?"},
}


@pytest.mark.parametrize(("recipe", "typed"), [(recipe, typed) for recipe, cases in MEANT.items() for typed in cases])
def test_a_name_or_value_of_another_tool_is_answered(recipe, typed):
    assert MEANT[recipe][typed] in refusal(recipe, typed)


def test_commands_of_other_tools_are_answered_with_commands_that_exist():
    verbs = {verb.__name__.rpartition(".")[2].replace("_", "-") for verb in VERBS}
    for name, row in table("commands").items():
        assert name not in verbs | catalog.recipes().keys(), f"{name} is a command"
        for command in re.findall("`(leanft [^`]+)`", hint_for_command(name).replace("`leanft ls`", "")):
            _, verb, *words = shlex.split(command)
            assert verb in verbs | catalog.recipes().keys() | {"data", "--version"}, command
            settings = [word for word in words if "=" in word and "prompt" not in word]
            assert not settings or refusal(words[0], *settings) == "", command
        assert hint_for_command(name) and isinstance(row, str), name
    assert hint_for_command("Orpo") == " Run `leanft run dpo loss.name=orpo`."
    assert hint_for_command("resume") == " Not needed: a run resumes if you run the same command again."
    assert hint_for_command("rnu") == ""


def test_resume_has_the_values_of_other_tools():
    read = [
        load_config(load_recipe("finetune").Config, None, [*REQUIRED, f"resume={x}"]).resume
        for x in ("true", "false", "p")
    ]
    assert read == ["auto", "never", "p"]


REQUIRED = ("model.path=m", "data.source=d.jsonl", "output_dir=o")
