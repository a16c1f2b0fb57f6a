"""Rows of docs/coming_from_*.md do what their left side does: compared with TRL, transformers or a closed form."""

import dataclasses
import json
import random
import re
from itertools import chain
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import yaml
from torch import nn

from lean_ft.data import prepare_batches
from lean_ft.hub.paths import resolve_model_path
from lean_ft.models import load_model
from lean_ft.optim import build_optimizer, num_warmup_steps
from lean_ft.settings import PolicyLossConfig, PreferenceLossConfig, ScheduleConfig, UnpairedLossConfig
from lean_ft.settings.describing import describe
from lean_ft.settings.other_tools import are_in, equivalent, filled
from lean_ft.system import catalog
from lean_ft.tokenizers import load_tokenizer
from lean_ft.training.regularization import freeze_parameters
from tests.recipes.conftest import TINY, config_of

transformers = pytest.importorskip("transformers")
DOCS = Path(__file__).resolve().parents[1] / "docs"
CHAT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "What is 6 x 7?"},
    {"role": "assistant", "content": "It is 42."},
    {"role": "user", "content": "And 2 + 2?"},
    {"role": "assistant", "content": "4"},
]


@pytest.fixture(scope="module")
def their_tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(resolve_model_path("tiny"))


def write_rows(folder: Path, rows: list[Any]) -> Path:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "rows.jsonl"


def trained(folder: Path, rows: list[Any], *settings: str) -> list[tuple[list[int], list[bool]]]:
    """The ids of each row of a batch, in the order of the files, and which of them are targets."""
    source = write_rows(folder, rows)
    fixed = (*TINY, f"data.source={source}", "data.shuffle=false", f"data.cache_dir={folder}")
    config = config_of("finetune", *fixed, *settings)
    batches, _ = prepare_batches(config.data, load_tokenizer("tiny"), batch_size=1, seed=0)
    found = []
    for batch in batches.take(batches.batches_per_epoch):
        length = int(batch.is_token[0].sum())
        found.append((batch.input_ids[0, :length].tolist(), [False, *(batch.labels[0, : length - 1] >= 0).tolist()]))
    return found


# Texts and masks ------------------------------------------------------------------------------------------------------


def rendered(tokenizer: Any, chat: list[Any], **settings: Any) -> Any:
    return tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True, **settings)


def test_assistant_only_loss(their_tokenizer, tmp_path):
    theirs = rendered(their_tokenizer, CHAT, return_assistant_tokens_mask=True)
    for settings, mask in (
        (["data.train_on=assistant"], theirs["assistant_masks"]),
        ([], theirs["assistant_masks"]),
        (["data.train_on=all"], [0] + [1] * (len(theirs["input_ids"]) - 1)),  # the first token is no target
    ):
        assert trained(tmp_path, [{"messages": CHAT}], *settings) == [(theirs["input_ids"], [bool(x) for x in mask])]


@pytest.mark.parametrize("start", [2, 4])
def test_completion_only_loss_of_chats(start, their_tokenizer, tmp_path):
    """With a completion of one message, as TRL: all tokens after the prompt. In a longer one, only assistant
    messages."""
    whole = rendered(their_tokenizer, CHAT, return_assistant_tokens_mask=True)
    ids, first = (
        whole["input_ids"],
        len(rendered(their_tokenizer, CHAT[:start], add_generation_prompt=True)["input_ids"]),
    )
    row = {"prompt": CHAT[:start], "completion": CHAT[start:]}
    [(ours, mask)] = trained(tmp_path, [row], "data.train_on=completion")
    assert ours == ids
    assert mask == [i >= first and bool(x) for i, x in enumerate(whole["assistant_masks"])]
    assert (mask == [i >= first for i in range(len(ids))]) is (start == 4)
    [(ours, mask)] = trained(tmp_path, [row], "data.train_on=all")
    assert (ours, mask) == (ids, [i > 0 for i in range(len(ids))])


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "abc", "completion": "def"},
        {"prompt": "What is 6 x 7? ", "completion": "It is 42."},  # the space joins the completion's first token
        {"prompt": "x =", "completion": " 5\n"},
        {"text": "Hello there."},
    ],
    ids=str,
)
def test_plain_text_with_chat_false(row, their_tokenizer, tmp_path):
    """TRL joins prompt, completion and eos as text, and trains from where the tokens differ from the prompt's."""
    text = row.get("text") or row["prompt"] + row["completion"]
    ids = their_tokenizer(text + their_tokenizer.eos_token)["input_ids"]
    prompt = their_tokenizer(row["prompt"])["input_ids"] if "prompt" in row else ids[:1]
    first = next((i for i, (one, other) in enumerate(zip(prompt, ids, strict=False)) if one != other), len(prompt))
    assert trained(tmp_path, [row], *["data.chat=false"] * ("prompt" in row)) == [
        (ids, [i >= first for i in range(len(ids))])
    ]


@pytest.mark.parametrize("side", ["right", "left"])
def test_truncation_mode(side, tmp_path):
    ids = list(range(5, 45))
    [(kept, _)] = trained(
        tmp_path, [{"input_ids": ids, "labels": ids}], f"data.truncation_side={side}", "data.max_length=16"
    )
    assert kept == (ids[:16] if side == "right" else ids[-16:])


def test_max_samples_is_a_slice_of_each_source(tmp_path):
    rows = [{"input_ids": [n, n + 1], "labels": [n, n + 1]} for n in range(10, 60, 2)]
    found = [ids for ids, _ in trained(tmp_path, rows, "data.split=train[:4]")]
    assert found == [row["input_ids"] for row in rows[:4]]
    sources = f"data.source=[{tmp_path}/rows.jsonl,{{path: {tmp_path}/other.jsonl}}]"
    (tmp_path / "other.jsonl").write_text("".join(json.dumps(row) + "\n" for row in reversed(rows)))
    found = [ids for ids, _ in trained(tmp_path, rows, "data.split=train[:4]", sources)]
    assert sorted(found) == sorted(row["input_ids"] for row in (*rows[:4], *rows[-4:]))


@pytest.mark.long
def test_packing_strategies(tmp_path):
    """`wrapped` makes TRL's rows. The others arrange the same documents, or pieces, in other rows, and not in more."""
    datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl")
    draw = random.Random(0)
    texts = [[draw.randrange(5, 500) for _ in range(draw.randrange(3, 40))] for _ in range(60)]
    for strategy in ("bfd", "bfd_split", "wrapped"):
        theirs = trl.pack_dataset(datasets.Dataset.from_dict({"input_ids": texts}), 24, strategy)["input_ids"]
        rows = [{"input_ids": text, "labels": text} for text in texts]
        found = trained(tmp_path, rows, f"data.packing={strategy}", "data.max_length=24")
        ours = [ids for ids, _ in found]
        assert sorted(chain(*ours)) == sorted(chain(*theirs)), strategy
        assert len(ours) <= len(theirs), strategy
        assert (ours == list(theirs)) is (strategy == "wrapped")


@pytest.mark.long
@pytest.mark.parametrize("mode", ["keep_start", "keep_end"])
def test_truncation_of_pairs(mode, tmp_path):
    """TRL cuts each completion with its prompt. With keep_end, lean_ft cuts the shared prompt for the longer
    completion."""
    fewer = {"keep_start": 0, "keep_end": 2}[mode]  # tokens that the shorter completion has in addition in TRL
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    prompt, chosen, rejected = "abc " * 6, "de " * 4, "fg " * 3
    source = write_rows(tmp_path, [{"prompt": prompt, "chosen": chosen, "rejected": rejected}])
    tokenizer, side = load_tokenizer("tiny"), {"keep_start": "right", "keep_end": "left"}[mode]
    settings = (*TINY, f"data.source={source}", "data.chat=false", f"data.cache_dir={tmp_path}")
    whole, cut = (
        prepare_batches(config_of("dpo", *settings, *more).data, tokenizer, batch_size=1, seed=0)[0].take(1)[0]
        for more in ((), ("data.max_length=24", f"data.truncation_side={side}"))
    )
    texts = [ids[keep].tolist() for ids, keep in zip(whole.input_ids, whole.is_token, strict=True)]
    num_prompt = [len(text) - int(n) for text, n in zip(texts, whole.answer_tokens[0], strict=True)]
    example = {"prompt_ids": texts[0][: num_prompt[0]], "chosen_ids": texts[0][num_prompt[0] :]}
    example["rejected_ids"] = texts[1][num_prompt[1] :]
    theirs = DataCollatorForPreference(0, max_length=24, truncation_mode=mode)([example])
    assert max(map(len, texts)) > 24
    for row in range(2):
        ours = cut.input_ids[row][cut.is_token[row]].tolist()
        assert ours == theirs["input_ids"][row][theirs["attention_mask"][row] == 1].tolist()[row * fewer :]


# Steps ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.03, 0.1, 0.5])
@pytest.mark.parametrize("total", [7, 100])
def test_warmup_steps_below_one_are_a_ratio(share, total):
    theirs = transformers.TrainingArguments(output_dir="unused", warmup_steps=share, use_cpu=True)
    assert num_warmup_steps(ScheduleConfig(warmup_ratio=share), total) == theirs.get_warmup_steps(total)


def test_weight_decay_reaches_the_parameters_that_transformers_decays():
    theirs = transformers.AutoModelForCausalLM.from_pretrained(resolve_model_path("tiny"))
    decayed = set(transformers.Trainer.get_decay_parameter_names(None, theirs))
    model = load_model("tiny")
    config = config_of("finetune", *TINY, "data.source=x", "optimizer.weight_decay=0.5", "optimizer.lr=0.1")
    optimizer = build_optimizer(model, config)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.set_lr(0.1)
    optimizer.finish_gradients(max_norm=None)
    optimizer.step()
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == decayed & before.keys() < before.keys()  # a tied output layer is the embedding


def test_freeze_trainable_layers_by_names():
    model = nn.ModuleDict({"model": nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(1, 1) for _ in range(44)])})})
    model["lm_head"] = nn.Linear(1, 1)
    freeze_parameters(model, [], ["model.layers.[2-3][0-9].*"])
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert names == {f"model.layers.{n}.{part}" for n in range(20, 40) for part in ("weight", "bias")}


# Names and defaults ---------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_every_loss_of_trl_is_named():
    """A loss has the same name in lean_ft, a row with another name (`exo_pair: ...`), or is listed as not available."""
    trl, page = pytest.importorskip("trl"), (DOCS / "coming_from_trl.md").read_text()
    missing = page.partition("Not available in lean_ft:")[2]
    for config, ours in (
        (trl.DPOConfig, PreferenceLossConfig),
        (trl.KTOConfig, UnpairedLossConfig),
        (trl.GRPOConfig, PolicyLossConfig),
    ):
        [field] = [field for field in dataclasses.fields(config) if field.name == "loss_type"]
        listed = field.metadata["help"].partition("values are")[2].partition(". ")[0]
        names = field.metadata.get("choices") or re.findall(r"'(\w+)'", listed)
        assert len(names) > 1
        own = {name for part in get_args(ours.model_fields["name"].annotation) for name in get_args(part) or [part]}
        for name in names:
            is_missing = re.search(rf"\b{name}\b", missing) is not None
            is_renamed = re.search(rf"\b{name}(?: [a-z ]+)?: `loss\.|\*\*{name}\.\*\*", page) is not None
            assert is_missing + is_renamed + (name in own) == 1, name


RECIPES_OF_TRAINERS = {"SFT's": ["finetune"], "DPO's": ["dpo"], "GRPO's": ["grpo"], "distillation with": ["distill"]}


def test_what_the_page_calls_not_available_does_not_exist():
    """No setting of the recipe, and no value of one, has a name that the page lists as missing."""
    page = (DOCS / "coming_from_trl.md").read_text()
    listed = page.partition("Not available in lean_ft:")[2].partition("\n\n")[0]
    seen = []
    for part in listed.replace("\n", " ").split(";"):
        owner = next((owner for owner in RECIPES_OF_TRAINERS if owner in part), "")
        names = re.findall(r"\w+", re.sub(r"\b(and|or|the|aggregation)\b", " ", part.replace(owner, "")))
        for recipe in RECIPES_OF_TRAINERS.get(owner, chain(*RECIPES_OF_TRAINERS.values())):
            ours = describe(catalog.load_recipe(catalog.find_recipe(recipe)).Config)
            exist = {one.key.rpartition(".")[2] for one in ours}
            exist |= {name for one in ours for name in re.split(r" \| | or ", one.type)}
            assert exist.isdisjoint(names), (recipe, exist & set(names))
        seen += names
    assert {"dft", "discopop", "vespo", "normalize_then_sum", "min_p", "sync_ref_model"} < set(seen)


TRAINERS = {"SFT": "finetune", "Model": "finetune", "DPO": "dpo", "KTO": "kto", "Reward": "reward", "GRPO": "grpo"}
TRAINERS |= {"RLOO": "grpo", "Distillation": "distill"}
NULL_IS = {"loss.beta": 0.1, "loss.epsilon": 0.2, "loss.label_smoothing": 0, "generation.top_p": 1}
# Arguments without a default that could be ours: names and places, and those that another argument switches on.
WITHOUT_DEFAULT = {
    *("output_dir", "project", "eval_steps", "dataset_text_field", "shuffle_dataset", "chat_template_kwargs"),
    *("packing_strategy", "lora_target_parameters", "load_in_4bit", "bnb_4bit_quant_type", "normalize_advantages"),
    *("ds3_gather_for_generation", "max_tool_calling_iterations", "vllm_server_base_url", "vllm_server_host"),
    *("vllm_server_port", "vllm_importance_sampling_correction", "vllm_importance_sampling_clip_max"),
    "vllm_importance_sampling_cap",
}


def as_value(text: str) -> Any:
    try:
        return float(text)  # YAML takes 1e-05 for text
    except ValueError:
        return yaml.safe_load(text)


@pytest.mark.long
@pytest.mark.parametrize(("trainer", "recipe"), TRAINERS.items())
def test_defaults_that_are_not_listed_are_the_same(trainer, recipe):
    """What lean_ft/assets/other_tools.yaml gives for a default of TRL is our default."""
    trl, page = pytest.importorskip("trl"), (DOCS / "coming_from_trl.md").read_text()
    listed = set(re.findall(r"^\| `((?:\w+\.)?\w+)` \| [^|]* \| [^|]*`[\w.]+` \| [^|]* \|$", page, re.MULTILINE))
    config_class = catalog.load_recipe(catalog.find_recipe(recipe)).Config
    settings = {one.key: one.default for one in describe(config_class)}
    null_is = NULL_IS | {"optimizer.lr": config_class.usual_lr.all_parameters}
    compared = 0
    for field in dataclasses.fields(getattr(trl, f"{trainer}Config")):
        if {field.name, f"{trainer}Config.{field.name}"} & (listed | WITHOUT_DEFAULT):
            continue
        is_missing = field.default is dataclasses.MISSING
        default = field.default_factory() if is_missing else getattr(field.default, "value", field.default)
        default = default[0] if isinstance(default, list) and len(default) == 1 else default
        text = "null" if default is None else str(default).lower() if isinstance(default, bool) else str(default)
        answers = [] if (found := equivalent("trl", field.name, text)) is None else found.alternatives
        for key, value in next((one for one in answers if are_in(settings, one)), {}).items():
            ours = settings[key] if settings[key] is not None else null_is.get(key)
            ours = list(ours) if isinstance(ours, tuple) else ours
            assert ours == as_value(filled(value, text)), field.name
            compared += 1
    assert compared > (4 if trainer == "Model" else 18)


def test_a_row_of_a_table_has_the_columns_of_its_head():
    """A pipe in a cell, also in code, ends the cell."""
    for page in DOCS.glob("coming_from_*.md"):
        for table in re.findall(r"(?:^\|.*\n)+", page.read_text(), re.MULTILINE):
            assert len({line.count("|") for line in table.splitlines()}) == 1, table[:200]
