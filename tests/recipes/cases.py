"""What the tests of all training recipes read.

A recipe without an entry gets entries of its preset `configs/tiny/NAME.yaml`: the tests run it on the preset's rows.
Add an entry for what else holds of it. Tests of other folders may read these tables too. Importing this module imports
no torch.
"""

import json
import math
from dataclasses import dataclass
from typing import Any

import yaml

from lean_ft.hub.paths import resolve_data_path
from lean_ft.settings.strict_yaml import to_yaml
from lean_ft.settings.text import dotted
from lean_ft.system import catalog

Settings = tuple[str, ...]
Row = dict[str, Any]

# Short runs on the embedded model
# ---------------------------------------------------------------------------------------

TINY = ("model.path=tiny", "model.dtype=float32", "device=cpu", "plan=false")
CHATS = (*TINY, "data.source=tiny/validation.jsonl", "data.max_length=64", "optimizer.lr=1e-3", "batch_size=4")
CHATS += ("max_steps=6",)
SHORT = ("data.max_length=96", "batch_size=4", "max_steps=6", "schedule.name=constant")
PAIRS = (*TINY, "data.source=tiny/pairs_validation.jsonl", *SHORT)
PROBLEMS = (*TINY, "data.source=tiny/problems_validation.jsonl", "data.chat=false", "data.max_prompt_length=32")
PROBLEMS += ("generation.max_new_tokens=8", "gradient_accumulation_steps=2")
SAMPLED = (*PROBLEMS, "rewards=[length]", "optimizer.lr=1e-4", "max_steps=3")
LIVE = ("distill.teacher=tiny",)
STUDENT = ("model.random_init=true", *LIVE)

SETTINGS: dict[str, Settings] = {
    "full_finetune_single_device": CHATS,
    "finetune": CHATS,
    "dpo": (*PAIRS, "optimizer.lr=1e-4"),
    "kto": (*PAIRS, "optimizer.lr=1e-4"),
    "reward": (*PAIRS, "optimizer.lr=1e-3"),
    "classify": (*PAIRS, "data.source=tiny/topics_validation.jsonl", "optimizer.lr=1e-3"),
    "distill": (*CHATS, "schedule.name=constant"),
    "grpo": (
        *(*PROBLEMS, "rewards=[exact_answer]", "generation.num_answers=4", "optimizer.lr=3e-4"),
        *("batch_size=8", "max_steps=4"),
    ),
    "ppo": (*SAMPLED, "generation.passes=2", "batch_size=4"),
    "online_dpo": (*SAMPLED, "generation.num_answers=3", "batch_size=2"),
}
OTHERS = {"chat", "evaluate", "generate", "quantize"}  # recipes that do not train
DERIVED = [name for name in catalog.recipes() if name not in SETTINGS.keys() | OTHERS]


def preset_of(recipe: str) -> dict[str, Any]:
    """The preset of a recipe on the embedded model."""
    file = catalog.presets().get(f"tiny/{recipe}")
    assert file is not None, f"write configs/tiny/{recipe}.yaml: the tests of all recipes run it"
    return yaml.safe_load(file.read_text(encoding="utf-8"))


for _name in DERIVED:
    _groups = {key: value for key, value in preset_of(_name).items() if key in ("model", "data")}
    _given = [f"{key}={to_yaml(value, flow=True)}" for key, value in dotted(_groups) if "validation" not in key]
    SETTINGS[_name] = (*_given, *TINY, *SHORT, "optimizer.lr=1e-3")
OWN_CACHE = ("dpo", "lora_dpo_single_device", "kto", "reward")  # the tests of these recipes count cache hits

# What holds of a run: tests/recipes/test_runs.py
# ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Equal:
    """Settings that change no number of a run: of these names, or all but times."""

    settings: Settings
    rel: float
    names: Settings = ()
    is_long: bool = False


@dataclass(frozen=True)
class Run:
    """A short run with these settings beside `SETTINGS`, and what holds of it. `TMP` is a folder with the files of
    `prepare`."""

    settings: Settings
    stops: tuple[int, ...] = ()  # stopped after one of these steps and resumed, it has the same bits
    first_loss: float | None = None  # in the first step all margins are 0, and the loss is this
    equals: tuple[Equal, ...] = ()


LORA = ("lora.rank=4", "lora.dropout=0.1")
# The teacher's prompts have an answer or a chat of another row.
ITSELF = ("data.source=TMP/contexts.jsonl", "data.columns.context=context", "data.max_teacher_length=160")
ITSELF += ("distill.teacher=self", "epochs=3")
AVERAGED = ("distill.teacher_kind=ema", "optimizer.ema=0.8")
CACHED, SECOND, OFF = ("reference.kind=cached",), ("reference.kind=model",), ("reference.kind=adapter_off", *LORA)
BFD, PADDING_FREE = "data.packing=bfd", "data.packing=padding_free"
FULL, BFLOAT16, FLOAT16 = "memory.activation_checkpointing=full", "model.dtype=bfloat16", "model.dtype=float16"
LEAN = ("optimizer.in_backward=true", "memory.loss_chunk_tokens=16")
CONSTANT = "schedule.name=constant"
TWO_OF_TWO = ("gradient_accumulation_steps=2", "max_steps=2")
THREE = ("batch_size=2", "gradient_accumulation_steps=3")
REPEATED = ("data.shared_prompt=false",)
LOSS = ("loss",)
NORM = (*LOSS, "grad_norm")
TOKENS = ("data.labels_per=token", "data.source=tiny/names_validation.jsonl")
LN_2 = math.log(2)
# Packing changes which rows share a batch, so each step uses all rows.
ALL_ROWS = ("batch_size=6", "epochs=3", "max_steps=3")
TEXTS, ALL_PAIRS = (("data.source=TMP/texts.jsonl", *ALL_ROWS), ("data.source=TMP/pairs.jsonl", *ALL_ROWS))
NOTES = ("data.source=TMP/notes.jsonl", *ALL_ROWS)
WEIGHED = ("loss.ld_alpha=0.5", "loss.wpo=true")
HELD_OUT = ("data.validation_fraction=0.1", *WEIGHED)
ROUNDS = ("generation.steps_per_round=2", "generation.passes=2")  # 4 steps each
VALUES = (*NORM, "value_loss", "policy_loss", "kl", "entropy", "reward")
SAMPLES = ("reward", "completion_length")
# Everything that a run of grpo keeps between steps.
STATEFUL = (*ROUNDS, "batch_size=4", "generation.temperature=1.3", "sample_every=2")
STATEFUL += (
    "rewards=['TMP/mine.py:right', 'TMP/mine.py:short']",
    "generation.most_attempts=2",
    "loss.entropy_share=0.8",
)
STATEFUL += (*LORA, "max_steps=5", "gradient_accumulation_steps=1")
REWARDS = '''
import asyncio

def right(prompts, completions, answer):
    """Part of the way for a number at all, and none known for some."""
    return [None if len(said) % 5 == 0 else float(said.strip() == a) for said, a in zip(completions, answer)]

async def short(completions, completion_ids, ended, **columns):
    await asyncio.sleep(0)
    assert set(columns) == {"prompts", "answer", "trainer_state", "log_metric", "log_extra"}
    return [0.1 * done - 0.01 * len(ids) for ids, done in zip(completion_ids, ended)]

'''
OF_POLICY = (
    Equal(("batch_size=4", "gradient_accumulation_steps=4"), 1e-5, (*SAMPLES, *NORM)),
    Equal(("batch_size=16", "gradient_accumulation_steps=1"), 1e-5, (*SAMPLES, *NORM)),
    Equal((FULL, *LEAN[1:], "memory.tile_mlp=2"), 1e-5, (*SAMPLES, *NORM)),
    Equal(("generation.cache_gib=0.0001", "optimizer.in_backward=true"), 1e-5, SAMPLES),
    Equal(REPEATED, 1e-5, (*SAMPLES, *NORM)),
)
OF_ALL_ROWS = (
    Equal(THREE, 1e-5, NORM),
    Equal((*THREE, FULL, *LEAN[:1], "memory.tile_mlp=2"), 1e-5, LOSS),
    Equal((BFD,), 1e-5, NORM),
    Equal(("data.packing=none",), 1e-5, NORM),
    Equal((*THREE, "compile=true"), 1e-4, NORM),
)
# About 20 rows per epoch, of which the first source's repeat.
SHARES, PROMPT_SHARES = (
    f"data.source=[{{path: tiny/{name}_validation.jsonl, split: 'train[:5]', share: 0.6}}, "
    f"{{path: tiny/{name}_train.jsonl, split: 'train[:15]'}}]"
    for name in ("pairs", "problems")
)
RUNS: dict[str, list[Run]] = {
    "full_finetune_single_device": [
        Run(
            (),
            equals=(
                Equal(("batch_size=2", "gradient_accumulation_steps=2"), 1e-4, (*NORM, "target_tokens")),
                Equal((*LEAN, FULL), 1e-5, LOSS),
                Equal((BFLOAT16,), 0.06, LOSS),
            ),
        ),
        Run((BFD,), equals=(Equal((FLOAT16,), 0.06, LOSS),)),
    ],
    "finetune": [
        Run(
            ("lora.rank=4", "lora.dropout=0.2", "lora.lr_ratio=4", CONSTANT),
            stops=(3,),
        ),
        Run(("lora.rank=4", CONSTANT), equals=(Equal((BFLOAT16,), 0.06, LOSS), Equal((FLOAT16,), 0.06, LOSS))),
        Run((*LORA, BFD, CONSTANT), equals=(Equal((*LEAN, "memory.activation_checkpointing=selective"), 1e-5, LOSS),)),
        Run(("lora.rank=4", "lora.dora=true", "optimizer.in_backward=true", CONSTANT), stops=(3,)),
        Run(("lora.rank=4", "lora.quantize=nf4", "optimizer.name=adamw_8bit", BFLOAT16, CONSTANT), stops=(3,)),
        Run(("lora.rank=4", "lora.init=pissa", "lora.rslora=true", CONSTANT), stops=(3,)),
    ],
    "dpo": [
        Run((*OFF, "max_steps=4"), stops=(2,), first_loss=LN_2),
        Run(ALL_PAIRS, equals=(Equal((BFD,), 1e-4),)),
        Run(CACHED, stops=(3,), first_loss=LN_2),
        Run((*CACHED, SHARES), stops=(3,), first_loss=LN_2),
        Run((*SECOND, PADDING_FREE), stops=(3,), first_loss=LN_2),
        Run((*CACHED, *LORA, BFD), stops=(3,), first_loss=LN_2),
        Run((*OFF, BFLOAT16, BFD, "memory.tile_mlp=3", "max_steps=2"), first_loss=LN_2),
        Run((*CACHED, FLOAT16, FULL, "max_steps=2"), first_loss=LN_2),
        Run((*SECOND, BFLOAT16, "data.batch_tokens=800", "max_steps=2"), first_loss=LN_2),
        Run(HELD_OUT, equals=(Equal(REPEATED, 1e-4),)),
        Run((*HELD_OUT, PADDING_FREE), equals=(Equal(REPEATED, 1e-4),)),
        Run(("loss.name=simpo", "loss.sft_weight=0.5", "batch_size=6"), equals=(Equal(THREE, 2e-4),)),
        Run(("loss.name=ipo", *WEIGHED, "loss.sft_weight=0.5", "batch_size=6"), equals=(Equal(THREE, 2e-4),)),
    ],
    "kto": [
        Run(CACHED, stops=(3,), first_loss=0.5),
        Run((*OFF, BFD, "batch_size=2"), stops=(3,), first_loss=0.5),
        Run((*CACHED, "loss.name=bco", "log_every=2"), stops=(3,), first_loss=LN_2),
        Run((*CACHED, *LORA, BFD, "batch_size=2", "max_steps=2"), first_loss=0.5),
        Run((*SECOND, PADDING_FREE, "loss.name=apo_zero_unpaired", *TWO_OF_TWO), first_loss=0.5),
        Run((*OFF, BFLOAT16, FULL, "max_steps=2"), first_loss=0.5),
        Run((*SECOND, FLOAT16, "data.batch_tokens=400", "max_steps=2"), first_loss=0.5),
    ],
    "reward": [
        Run((), stops=(3,), first_loss=LN_2),
        Run((*LORA, BFD), stops=(3,)),
        Run(("loss.per_token=true",), stops=(3,)),
    ],
    "classify": [
        Run((BFD, "loss.class_weights=balanced"), stops=(3,)),
        Run(LORA, stops=(3,)),
        Run(
            (*TOKENS, "loss.class_weights=balanced"),
            stops=(3,),
            equals=(Equal(("batch_size=2", "gradient_accumulation_steps=2", "memory.tile_mlp=2"), 1e-4, NORM),),
        ),
    ],
    # gradient_accumulation_steps is the number of micro-batches whose vectors are cached: all rows are compared.
    "embed": [
        Run((*NOTES, "data.negatives=1"), equals=OF_ALL_ROWS),
        Run((*NOTES, "loss.name=triplet", "data.negatives=1", "loss.matryoshka=[128,16]"), equals=OF_ALL_ROWS[:1]),
        Run((*THREE, *LORA, "neftune_alpha=5", "data.negatives=1"), stops=(3,)),
        Run((*THREE, FLOAT16, FULL), stops=(3,), equals=(Equal(("model.dtype=float32",), 0.06, LOSS),)),
        Run((*THREE, BFLOAT16, *LEAN[:1]), stops=(3,), equals=(Equal(("model.dtype=float32",), 0.06, LOSS),)),
    ],
    "rerank": [
        Run((*NOTES, "loss.name=listnet"), equals=OF_ALL_ROWS),
        Run((*NOTES, "loss.yes_no=[a,b]", "loss.name=lambda"), stops=(2,), equals=OF_ALL_ROWS),
        Run((*THREE, *LORA, "neftune_alpha=5", FLOAT16), stops=(3,), equals=(Equal((FULL,), 1e-5, LOSS),)),
    ],
    "distill": [
        Run((*STUDENT, *LEAN[:1], BFD), stops=(3,)),
        Run((*STUDENT, *LORA, "distill.teacher_dtype=nf4"), stops=(3,)),
        Run((STUDENT[0], "distill.cached=TMP/kept", "gradient_accumulation_steps=2"), stops=(3,)),
        Run(
            (*STUDENT, *TEXTS),
            equals=(
                Equal(("batch_size=2", "gradient_accumulation_steps=3"), 2e-4),
                Equal((BFD,), 2e-4),
                Equal((BFD, "compile=true"), 2e-4),
            ),
        ),
        Run(
            (*STUDENT, "distill.on_policy=1", "generation.max_new_tokens=4", "max_steps=2", "batch_size=6"),
            equals=(Equal(THREE, 2e-4, (*LOSS, "cross_entropy", "target_tokens")),),
        ),
        Run((*ITSELF, *LORA, "distill.on_policy=0.5", "generation.max_new_tokens=6"), stops=(3,)),
        Run((*ITSELF, *LEAN[:1], BFD, "distill.teacher_kind=current"), stops=(2,)),
        Run((*ITSELF, *AVERAGED, "distill.on_policy=0.5", "generation.max_new_tokens=6"), stops=(3,)),
        Run((*ITSELF, *AVERAGED, *LORA, *LEAN[:1]), stops=(2,)),
        Run((*ITSELF, *AVERAGED, *ALL_ROWS), equals=(Equal((*THREE, *LEAN), 2e-4, LOSS), Equal((BFD,), 2e-4))),
        Run(
            (*ITSELF, *ALL_ROWS),
            equals=(
                Equal(THREE, 2e-4),
                Equal((BFD,), 2e-4),
                Equal((PADDING_FREE, FULL, *LEAN[1:]), 2e-4),
                Equal((BFD, "compile=true"), 2e-4),
                Equal(("data.batch_tokens=384",), 2e-4),
            ),
        ),
    ],
    "online_dpo": [
        Run((), first_loss=LN_2),
        Run((*ROUNDS, *LORA, "max_steps=5"), stops=(1, 4), first_loss=LN_2),
        Run(("loss.name=ipo", "max_steps=2"), first_loss=25),
    ],
    "ppo": [
        Run(("generation.num_answers=4", "max_steps=2"), equals=(Equal(REPEATED, 1e-3, VALUES),)),
        Run(("generation.num_answers=4", "max_steps=2", "lora.rank=4"), equals=(Equal(REPEATED, 1e-3, VALUES),)),
        Run(("save_async=true", "max_steps=5"), stops=(1,)),
        Run(("lora.rank=4", "optimizer.name=adamw_8bit", "max_steps=5"), stops=(2,)),
    ],
    "grpo": [
        Run(STATEFUL, stops=(3, 1, 4)),
        Run((*STATEFUL, "max_steps=7"), stops=(6,)),
        Run((*STATEFUL, PROMPT_SHARES), stops=(3,)),
        Run((*STATEFUL, "generation.compile=true"), stops=(3,)),
        *(Run((f"loss.name={loss}", "max_steps=2"), equals=OF_POLICY) for loss in ("dapo", "grpo")),
    ],
}

RUNS |= {name: [Run((BFD,), stops=(3,)), Run(LORA, stops=(3,)), *RUNS.get(name, ())] for name in DERIVED}

# Commands with the required settings alone: tests/recipes/test_first_commands.py
# -----------------------------------------------


def rows_of(file: str, count: int) -> list[Row]:
    lines = resolve_data_path(f"tiny/{file}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines[:count]]


def rows_of_preset(recipe: str, count: int) -> list[Row]:
    lines = resolve_data_path(preset_of(recipe)["data"]["source"]).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines[:count]]


def _texts(row: Row) -> tuple[str, str]:
    question, answer = row["messages"]
    return question["content"], answer["content"]


_CHATS, _PAIRS = rows_of("train", 4), rows_of("pairs_train", 4)
_PROBLEMS, _TOPICS = rows_of("problems_train", 16), rows_of("topics_train", 4)
_SHAREGPT = [
    {"conversations": [{"from": who, "value": text} for who, text in zip(("human", "gpt"), _texts(row), strict=True)]}
    for row in _CHATS
]
_UNPAIRED = [
    {"prompt": row["prompt"], "completion": row[kind], "label": kind == "chosen"}
    for row in _PAIRS[:2]
    for kind in ("chosen", "rejected")
]
REQUIRED: dict[str, Settings] = {  # besides model.path and data.source
    "distill": LIVE,
    **dict.fromkeys(("grpo", "online_dpo", "ppo"), ("rewards=[exact_answer]",)),
}
FORMATS: dict[str, dict[str, list[Row]]] = {  # rows for two steps in each format that a recipe reads
    "full_finetune_single_device": {
        "messages": _CHATS,
        "sharegpt": _SHAREGPT,
        "alpaca": [{"instruction": _texts(row)[0], "output": _texts(row)[1]} for row in _CHATS],
        "prompt_completion": [{"prompt": _texts(row)[0], "completion": _texts(row)[1]} for row in _CHATS],
        "text": [{"text": " ".join(_texts(row))} for row in _CHATS],
    },
    "finetune": {"messages": _CHATS},
    "distill": {"messages": _CHATS},
    "dpo": {"preference": _PAIRS},
    "reward": {"preference": _PAIRS},
    "kto": {"preference": _PAIRS[:2], "unpaired": _UNPAIRED},
    "classify": {"label": _TOPICS, "labels": [{"text": row["text"], "labels": [row["label"]]} for row in _TOPICS]},
    "grpo": {
        "prompt": _PROBLEMS[:2],
        "messages": [
            {"messages": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in _PROBLEMS[:2]
        ],
    },
    "ppo": {"prompt": _PROBLEMS[:4]},
    "online_dpo": {"prompt": _PROBLEMS},
}
FORMATS |= {name: {"preset": rows_of_preset(name, 4)} for name in DERIVED}
FORMATS |= {name: FORMATS[alias.file.stem] for name, alias in catalog.aliases().items()}

# How a step's size is printed: tests/training/test_summary.py
# -----------------------------------------------------------------

SIZES: list[tuple[str, Settings, str]] = [  # recipe, settings, size of a step
    ("finetune", ("batch_size=3", BFD), "3 packed rows per step"),
    ("dpo", ("gradient_accumulation_steps=2",), "2 x 4 pairs per step"),
    ("finetune", ("batch_size=1",), "1 sequence per step"),
    ("finetune", ("data.batch_tokens=128",), "up to 128 positions per step"),
    ("classify", ("batch_size=2",), "2 texts per step"),
    ("kto", (), "4 answers per step"),
    ("grpo", (), "2 x 8 completions per step"),
    ("online_dpo", (), "2 x 2 pairs per step"),
]

# What a run learns on rows that it does not train on: tests/recipes/test_learning.py
# ------------------------------------------

_HELD_OUT_PAIRS = ("data.source=tiny/pairs_train.jsonl", "data.validation_source=tiny/pairs_validation.jsonl")
_ONLINE = ("rewards=[exact_answer]", "data.source=tiny/problems_train.jsonl", "optimizer.lr=3e-4")
_ONLINE += ("data.validation_source=tiny/problems_validation.jsonl", "gradient_accumulation_steps=1")
ABOVE, BELOW = 1, -1
LEARNED: dict[str, tuple[Settings, dict[str, tuple[int, float]]]] = {  # settings, bounds of the last evaluation
    "grpo": (
        (*_ONLINE, "generation.num_answers=8", "batch_size=64", "max_steps=12", "seed=1"),
        {"eval_reward": (ABOVE, 0.45)},  # from 0.22
    ),
    "online_dpo": (
        (*_ONLINE, "generation.num_answers=8", "batch_size=16", "max_steps=12"),
        {"eval_reward": (ABOVE, 0.4)},
    ),
    "ppo": (
        (*_ONLINE, "generation.passes=4", "batch_size=64", "max_steps=16"),
        {"eval_reward": (ABOVE, 0.45)},
    ),
    "dpo": (
        (*_HELD_OUT_PAIRS, "batch_size=16", "optimizer.lr=1e-3", "max_steps=20"),
        {"eval_rewards/accuracies": (ABOVE, 0.6), "eval_loss": (BELOW, LN_2)},
    ),
    "kto": (
        (*_HELD_OUT_PAIRS, "batch_size=32", "optimizer.lr=3e-4", "max_steps=40"),
        {"eval_rewards/accuracies": (ABOVE, 0.55), "eval_loss": (BELOW, 0.497), "eval_rewards/margins": (ABOVE, 0)},
    ),
    "reward": (
        (*_HELD_OUT_PAIRS, "batch_size=16", "max_steps=30", "eval_every=30"),
        {"eval_rewards/accuracies": (ABOVE, 0.52), "eval_loss": (BELOW, 0.692)},
    ),
}

# Settings that a recipe refuses once it has read its data, model and rewards: tests/recipes/test_refused_settings.py
# ------------ Those that conflict without them are in tests/settings/test_conflicts.py.

QAT = "quantize.train=int4"
REFUSED: dict[str, dict[Settings, str]] = {
    "dpo": {
        ("reference.kind=streamed",): "the model is on cpu.*Set reference.kind=model",
        ("loss.name=dpo",): "Did you mean 'loss.name=sigmoid'",
        ("loss.gamma=1",): "gamma=1 has no effect with the loss sigmoid, only with simpo",
        ("loss.name=exo", "loss.label_smoothing=0"): "takes its logarithm",
        ("loss.label_smoothing=0.5",): "number >= 0 and < 0.5",
        ("data.source=tiny/validation.jsonl",): "this recipe trains on preference pairs",
        ("data.packing=wrapped",): "the answers of a pair are compared whole",
    },
    "kto": {
        ("loss.label_smoothing=0.1",): "label_smoothing",
        ("data.source=tiny/validation.jsonl",): "this recipe trains on completions labeled",
        ("data.max_length=2", "data.max_prompt_length=1"): "no row of .* is left to train on|no completion left",
    },
    "reward": {
        ("pad_token=<|end|>",): "pad token '<|end|>' also ends sequences.*Set pad_token",
        ("pad_token=<|edn|>",): "not a control token of this tokenizer. Did you mean",
        ("lora.targets=[score]",): "which is trained whole",
        ("loss.per_token=true", "data.shared_prompt=true"): "data.shared_prompt=true",
        ("loss.beta=1",): "beta",
    },
    "classify": {
        ("lora.targets=[score]",): "score, which is trained whole",
        ("data.packing=wrapped",): "data.packing",
        ("loss.class_weights={c: 2}",): "loss.class_weights.c: no such label",
        ("data.labels=[a,b]",): "the label is .*; expected one of a, b",
    },
    "embed": {
        ("vectors.pooling=cls",): "the first token, which sees no other token in a causal model",
        ("loss.matryoshka=[256,8]",): "the vectors of this model have 128 features",
        ("loss.name=cosent",): "learns scores, and the rows have none",
        ("loss.name=kl", "data.negatives=1"): "a teacher's `scores` of its passages",
        ("loss.name=triplet",): "the rows have 1. Add a field `negative`",
        ("batch_size=1",): "a step has 1 row without negatives",
        ("loss.hardness_mode=hard_negatives",): "the rows have no negatives",
        ("data.negatives=2",): "the row has 1 wrong passage, and data.negatives=2",
        ("data.scored=true", "loss.name=cosent"): "no field `scores` with a number for each passage",
    },
    "rerank": {
        ("loss.yes_no=[yes,no]",): "'yes' is 2 tokens of this model",
        ("loss.name=ranknet", "data.negatives=0"): "the rows have 1. Add a field `negative`",
        ("loss.name=ranknet", "loss.k=1"): "loss.k=1 has no effect",
        ("data.max_length=6",): "the template and the query leave no room in max_length for the passage",
        ("data.template=x",): "needs {query}, and {passage} once",
    },
    "distill": {
        STUDENT[:1]: "expected one of teacher=MODEL and cached=FOLDER.*found neither",
        (STUDENT[0], "distill.teacher=./nowhere"): "nowhere",
        (STUDENT[0], "distill.cached=nowhere"): "distill.cached=nowhere is not a folder of a teacher's predictions",
        (*STUDENT, "distill.divergence=forward"): "forward_kl",
        (*STUDENT, "distill.beta=0.5"): "beta=0.5 has no effect with divergence=forward_kl",
        (*STUDENT, "distill.cross_entropy_weight=1"): "gives the teacher no weight",
        (*STUDENT, "distill.temperature=0"): "> 0",
        (*STUDENT, "distill.on_policy=1.5"): "<= 1",
        ("distill.teacher=Self",): "teacher=Self: did you mean self, the student",
        (*STUDENT, "distill.teacher_kind=model"): "teacher_kind=model chooses the weights of teacher=self",
        ("distill.teacher=self", "distill.teacher_kind=base"): "adapter_off",
        (*ITSELF[1:], "data.columns.context=who"): "columns.context=who: .* have no column `who`; they have messages",
        (*ITSELF, "distill.teacher_kind=current", "distill.teacher_dtype=nf4"): "with teacher_kind=current there is",
        (
            "distill.teacher=self",
            "distill.teacher_kind=current",
            "distill.cross_entropy_weight=0.5",
        ): "so the divergence is 0 and trains nothing",
    },
    "grpo": {
        (
            "generation.num_answers=3",
        ): "16 completions, which is not a multiple of generation.num_answers=3. Set gradient_accumulation_steps=3",
        ("generation.offload_training_state=true",): "to host memory, but the model is on cpu",
        ("generation.router_replay=true",): "this model has no experts",
        ("loss.name=cispo", "loss.epsilon=0.1"): "epsilon=0.1 has no effect with the loss cispo",
        ("data.max_prompt_length=2",): "no prompt of .* is left: 100 rows, 100 dropped .longer",
        ("data.columns.prompt=question",): "data.columns.prompt=question: the row has prompt, answer",
        ("rewards=[]",): "rewards is empty",
        ("rewards=[exact]",): "unknown reward 'exact'. Did you mean 'exact_answer'",
        ("rewards=[format]",): "needs `pattern`, a regular expression",
        ("rewards=[{model: tiny}]",): "not a reward model: it has no output layer",
        ("rewards=[{weight: 2}]",): "expected a function or a model, found neither",
    },
    "ppo": {
        ("lora.rank=4", "value.path=tiny"): "with an adapter the value model is an output layer on the policy",
        ("generation.top_k=5",): "sample from other probabilities",
    },
    "finetune": {
        ("quantize.train=nvfp4",): "nvfp4 is not supported: .* GPU from Blackwell on",
        (QAT, "lora.rank=4"): "an adapter freezes them",
        (QAT, "memory.float8_products=true"): "both round the layers' products",
        (QAT, "quantize.group_size=48"): "128 inputs, which is not a multiple of group_size=48",
    },
}
