"""The recipe on the embedded model: its first step, rewards, filters, and runs that are killed."""

import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerFast

from lean_ft import load_model, load_tokenizer, save_model
from lean_ft.data import Prompt, prompt_rows
from lean_ft.generation import Completion, decoding
from lean_ft.hub.paths import resolve_model_path
from lean_ft.losses import AnswerTokens, policy
from lean_ft.models import REWARD_LABELS
from lean_ft.online import Rewards, Rollouts, Sampler
from lean_ft.online.rewards import Scores
from lean_ft.settings import Reward
from lean_ft.system.user_functions import load_function
from tests.recipes import cases
from tests.recipes.cases import REWARDS, STATEFUL
from tests.recipes.conftest import Train, config_of, planned
from tests.tokenizers.conftest import byte_level_tokenizer
from tests.training.toy_runs import digests, metrics

RECIPE = "grpo"
SETTINGS = cases.SETTINGS[RECIPE]


@pytest.fixture
def own_settings(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "mine.py").write_text(REWARDS)
    return ()


def numbers(lines: list[dict[str, Any]]) -> list[tuple]:
    return [tuple(line.get(name) for name in ("loss", "grad_norm", "reward", "clip_share", "tokens")) for line in lines]


ROUNDS = (*cases.ROUNDS, "batch_size=4", "generation.temperature=1.3")
BEGINNINGS = [
    (*ROUNDS, "loss.name=gspo", "lora.rank=4", "lora.dropout=0.1", "loss.kl_weight=0.1"),
    (*ROUNDS, "loss.name=dapo", "loss.kl_weight=0.1", "loss.kl=in_reward"),
    ("loss.name=grpo", "loss.kl_weight=0.1"),
    (*ROUNDS, "loss.name=cispo", "model.dtype=bfloat16", "memory.activation_checkpointing=full"),
    (*ROUNDS, "loss.name=rloo", "model.dtype=float16"),
]


@pytest.mark.first(1)
@pytest.mark.parametrize("settings", BEGINNINGS, ids=str)
def test_it_begins_with_ratios_of_exactly_1_and_no_divergence(
    train: Train, settings: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    ratios: list[float] = []
    plain = policy.policy_loss

    def watched(name: str, now: Any, old: Any, *others: Any, **further: Any) -> Any:
        ratios.append((now - old)[others[1]].abs().max().item())
        return plain(name, now, old, *others, **further)

    monkeypatch.setattr(policy, "policy_loss", watched)
    lines = train(*settings, "max_steps=2")
    of_first_step = len(ratios) // 2
    assert ratios[:of_first_step] == [0.0] * of_first_step
    assert lines[0]["clip_share"] == 0
    if any("kl_weight" in setting for setting in settings):
        assert lines[0]["kl"] == 0
    if settings[0] == ROUNDS[0]:
        assert max(ratios[of_first_step:]) > 0  # the same answers, and another model
        assert lines[0]["reward"] == lines[1]["reward"]


def test_rewards_of_ones_own_are_added_up_by_their_weights(train: Train, tmp_path: Path) -> None:
    both = (
        "rewards=[{function: 'TMP/mine.py:right', weight: 2.0}, 'TMP/mine.py:short', {function: format, pattern: "
        "'\\d+\\.'}, length]"
    )
    train(both, "max_steps=1", "sample_every=1")
    rows = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert len(rows) == 8
    for row in rows:
        right, short, shaped, length = row["rewards"]
        assert (right is None) == (len(row["answer"]) % 5 == 0)
        assert shaped == float(row["answer"].strip()[:-1].isdigit() and row["answer"].strip().endswith("."))
        assert -1 <= length < 0 and (row["ended"] or length == -1)
        assert row["reward"] == pytest.approx(2 * (right or 0) + short + shaped + length)


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reward_model")
    model = load_model("tiny", scores=REWARD_LABELS)
    torch.nn.init.normal_(model.output_weight, generator=torch.Generator().manual_seed(0))
    save_model(model, folder)
    load_tokenizer("tiny").save(folder)
    return folder


def test_a_reward_model_judges_as_transformers_does(reward_model: Path) -> None:
    """The tokens themselves where they are its own; else the chat or the text, as its own tokenizer writes it."""
    tokenizer, theirs = load_tokenizer("tiny"), AutoTokenizer.from_pretrained(reward_model)
    judge = AutoModelForSequenceClassification.from_pretrained(reward_model)
    said, asked = ["Paris.", "It is 41, or so"], ["What is the capital?", "6 * 7 ="]
    samples = [Completion(ids=tokenizer.encode(text), ended=True) for text in said]
    prompts = [Prompt(tokenizer.encode(text), text, {}, "") for text in asked]

    def expected(sequences: list[list[int]]) -> list[float]:
        return [judge(torch.tensor([ids])).logits.item() for ids in sequences]

    own = Rewards([Reward(model=str(reward_model), weight=0.5)], tokenizer)(prompts, samples)
    tokens = [prompt.ids + sample.ids for prompt, sample in zip(prompts, samples, strict=True)]
    assert own.totals == pytest.approx([value / 2 for value in expected(tokens)], rel=1e-4)
    other = SimpleNamespace(vocab_size=2, token_text=str, decode=lambda ids, **_: tokenizer.decode(ids))
    chats = [
        [{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b in zip(asked, said, strict=True)
    ]
    written = Rewards([str(reward_model)], other)(prompts, samples)  # type: ignore[arg-type]
    ids = [theirs.apply_chat_template(chat, return_dict=False) for chat in chats]
    ends = {tuple(theirs(text, add_special_tokens=False).input_ids) for text in ("\n", "")}
    ids = [
        one[: len(one) - max((len(end) for end in ends if end and tuple(one[-len(end) :]) == end), default=0)]
        for one in ids
    ]
    assert written.totals == pytest.approx(expected(ids), rel=1e-4)


def sampled_round(*settings: str, lengths: list[int], rewards: list[float]) -> tuple[Any, Rollouts]:
    """Return the configuration and a round of one micro-batch: groups of 2 completions, with these rewards."""
    given = ("generation.num_answers=2", f"batch_size={len(lengths)}", "gradient_accumulation_steps=1")
    cfg = config_of("grpo", *SETTINGS, *given, *settings)
    prompts, _ = prompt_rows(cfg.data, load_tokenizer(cfg.model), cfg.seed)
    rollouts = Rollouts(cfg, prompts, pad_id=0)
    samples = [Completion([5] * length, [-1.0] * length, True) for length in lengths]
    scores = Scores(rewards, [[reward] for reward in rewards], [""] * len(rewards))
    rollouts.sample(lambda *_: samples, lambda *_: scores)  # type: ignore[arg-type]
    return cfg, rollouts


def test_a_divergence_that_alone_tells_answers_apart_is_not_rounded_away() -> None:
    """Beside rewards of -1 float32 would round it to 6e-8: a hundredth of what stands over a small deviation."""
    _, rollouts = sampled_round("loss.kl=in_reward", "loss.kl_weight=0.1", lengths=[2, 2], rewards=[-1.0, -1.0])
    (batch,) = rollouts.to_remember()
    now, apart = torch.full((2, 2), -1.0), torch.tensor([[11.0, 0.0], [90.0, 3.0]]) * 2**-20
    rollouts.remember(batch, AnswerTokens(now, now, None, now), now - apart)
    rollouts.begin()
    (batch,) = rollouts.take()
    half = 0.1 * float(apart[1].sum() - apart[0].sum()) / 2
    above = half / (2**0.5 * half + 1e-4)
    assert batch.advantages.tolist() == [pytest.approx([above] * 2, rel=1e-6), pytest.approx([-above] * 2, rel=1e-6)]


@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["dapo", "grpo", "dr_grpo", "gspo", "cispo"])
def test_tokens_of_low_entropy_stay_in_the_denominators_and_the_divergence(name: str) -> None:
    """Against TRL's own method (top_entropy_quantile, arXiv:2506.01939)."""
    from tests.losses.test_policy import LONGEST, trl_loss

    share, lengths, generator = 0.3, [9, 1, 4, 7, 2, 9], torch.Generator().manual_seed(0)
    old, now, reference, entropies = (-torch.rand(6, 9, generator=generator) for _ in range(4))
    now.requires_grad_()
    given = (f"loss.name={name}", f"loss.entropy_share={share}", "loss.kl_weight=0.1")
    rewards = [1.0, 0.0, 0.5, 0.1, 0.0, 2.0]
    cfg, rollouts = sampled_round(*given, f"generation.max_new_tokens={LONGEST}", lengths=lengths, rewards=rewards)
    (batch,) = rollouts.to_remember()
    rollouts.remember(batch, AnswerTokens(old, -entropies, None, now), None)
    rollouts.begin()
    (batch,) = rollouts.take()
    loss = policy.batch_loss(
        cfg, batch, AnswerTokens(now, -entropies, None, now), reference, num_answers=6, num_tokens=32
    )

    mask = torch.arange(9) < torch.tensor(lengths)[:, None]
    above = policy.advantages(torch.tensor(rewards).view(-1, 2), cfg.loss.advantage_of_loss).flatten()
    answers = {"logps": now, "old_logps": old, "reference": reference, "advantages": above, "entropies": -entropies}
    theirs = trl_loss(name, answers | {"mask": mask.float()}, beta=0.1, top_entropy_quantile=share)
    torch.testing.assert_close(loss, theirs, rtol=1e-5, atol=1e-6)
    grads = [torch.autograd.grad(one, now)[0] for one in (loss, theirs)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-6)


def test_prompts_come_in_order_without_shuffling() -> None:
    cfg = config_of("grpo", *SETTINGS)
    tokenizer = load_tokenizer(cfg.model)
    shuffled, _ = prompt_rows(cfg.data, tokenizer, cfg.seed)
    ordered, _ = prompt_rows(cfg.data.model_copy(update={"shuffle": False}), tokenizer, cfg.seed)
    number = len(ordered)
    assert ordered.take(number - 2, number) == [number - 2, number - 1, *range(number - 2)]
    assert shuffled.take(0, number) != sorted(shuffled.take(0, number)) == list(range(number))
    assert ordered.fingerprint != shuffled.fingerprint


def test_truncated_completions_are_left_out(train: Train) -> None:
    one = ("max_steps=1", "gradient_accumulation_steps=1")
    (whole,) = train(*one)
    (cut,) = train(*one, "loss.mask_truncated=true", output="cut")
    all_tokens = round(whole["completion_length"] * 8)
    assert whole["target_tokens"] == all_tokens
    assert 0 < whole["truncated"] < 1
    assert cut["target_tokens"] == all_tokens - round(whole["truncated"] * 8) * 8


@pytest.mark.long
def test_truncated_weights_and_more_attempts_change_the_round(train: Train) -> None:
    one = ("max_steps=1", "gradient_accumulation_steps=1")
    (whole,) = train(*one)
    corrected = ("generation.top_k=20", "loss.correction=sequence_truncate")
    (narrow,) = train(*one, *corrected, output="narrow")
    assert narrow["loss"] != whole["loss"]
    plain, sampled = (
        train(*one, f"generation.most_attempts={n}", "generation.num_answers=2", output=f"dynamic{n}")[0]
        for n in (1, 9)
    )
    assert plain["even_groups"] > 0 == sampled["even_groups"]


@pytest.mark.long
def test_a_run_that_is_killed_at_any_moment_ends_as_the_undisturbed_one(train: Train, tmp_path: Path) -> None:
    """SIGKILL at random moments: while it samples, scores, updates or saves."""
    often = (*STATEFUL, "save_every=1", "keep_last=9")
    train(*often)
    whole, generator = tmp_path / "run", random.Random(0)
    for run in range(6):
        output = tmp_path / f"killed{run}"
        given = [*SETTINGS, *often, f"output_dir={output}"]
        command = [sys.executable, "-m", "lean_ft", "run", "grpo"]
        command += [one.replace("TMP", str(tmp_path)) for one in given]
        for _ in range(6):
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ)
            try:
                process.wait(timeout=generator.uniform(3, 14))
                break
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        assert metrics(output, timed=False) == metrics(whole, timed=False)
        assert digests(output / "step_00000005") == digests(whole / "step_00000005")
        assert (output / "samples.jsonl").read_text() == (whole / "samples.jsonl").read_text()


UNTRAINED = {  # the reward of each completion, settings and what the log says
    "cut": (
        "float(len(said))",
        ("generation.max_new_tokens=1", "loss.mask_truncated=true"),
        "all completions that have a reward were cut at generation.max_new_tokens",
    ),
    "equal": ("1.0", (), "all completions of each prompt have the same reward. .*generation.most_attempts=4"),
    "none": ("None", (), "no completion has a reward, because all reward functions returned None"),
}


@pytest.mark.first(1)
@pytest.mark.parametrize("case", UNTRAINED)
def test_a_step_that_trains_nothing_says_why(train: Train, tmp_path: Path, case: str, capsys) -> None:
    value, settings, reason = UNTRAINED[case]
    (tmp_path / "none.py").write_text(f"def f(completions):\n    return [{value} for said in completions]\n")
    lines = train("rewards=['TMP/none.py:f']", *settings, "max_steps=2")
    said = capsys.readouterr().out
    assert len(re.findall(rf"WARNING     the rewards of this round train nothing: .*{reason}", said)) == 1
    assert "not finite" not in said
    for line in lines:
        assert line["loss"] == (0 if case == "equal" else None) and line["grad_norm"] == 0
        assert ("reward" in line) == (case != "none")
        assert {"completion_length", "truncated", "sampling_seconds"} < line.keys()
        assert ("entropy" in line) == (case == "equal")  # a mean over trained tokens
    assert ("loss        none: no step had a trained token" in said) == (case != "equal")


def test_functions_log_metrics_and_columns(train: Train, tmp_path: Path) -> None:
    """The line has the mean of a step's values. A name that the line has already is kept apart. A resumed round keeps
    columns."""
    (tmp_path / "logs.py").write_text(
        "import torch\n"
        "def f(completions, log_metric, log_extra, trainer_state, **kwargs):\n"
        "    log_metric('share', 1)\n    log_metric('share', torch.tensor(2.0))\n"
        "    for name in ('reward', 'loss', 'lr', 'step'):\n        log_metric(name, 7.0)\n"
        "    log_extra('size', torch.tensor([len(said) for said in completions]))\n"
        "    log_extra('odd', [float('nan')] * len(completions))\n    log_extra('answer', completions)\n"
        "    return [float(trainer_state.global_step)] * len(completions)\n"
        "def short(completions, log_extra):\n    log_extra('size', [1])\n    return [0.0] * len(completions)\n"
    )
    logs = "rewards=['TMP/logs.py:f']"
    held_out = ("data.validation_fraction=0.01", "eval_every=2", "sample_every=1", "generation.steps_per_round=2")
    given = (logs, *held_out, "gradient_accumulation_steps=1")
    rows = train(*given, "max_steps=1")
    assert rows[0].pop("eval_completion_length") > 0
    logged = {"eval_share": 1.5, "extra/eval_reward": 7, "extra/eval_loss": 7, "eval_lr": 7, "eval_step": 7}
    assert rows[0] == {"step": 0, "epoch": 0, "eval_loss": None, "eval_reward": 0, **logged}
    rows = train(*given, "max_steps=4")
    assert [row["reward"] for row in rows if "tokens" in row] == [0, 0, 2, 2]  # rounds begin after 0 and 2 steps
    assert [row["eval_reward"] for row in rows if "eval_reward" in row] == [0, 1, 2, 4]
    for row in rows[1:2]:
        assert (row["share"], row["extra/reward"], row["extra/loss"], row["extra/lr"], row["extra/step"]) == (
            1.5,
            7,
            7,
            7,
            7,
        )
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert [row["step"] for row in samples] == [step for step in (1, 2, 3, 4) for _ in range(8)]
    assert all(row["size"] == len(row["answer"]) and row["odd"] == "NaN" for row in samples)
    assert all(row["extra/answer"] == row["answer"] for row in samples)
    assert {tuple(row) for row in samples} == {tuple(samples[0])}
    with pytest.raises(RuntimeError, match=r"log_extra\('size', \.\.\.\) got 1 values for 16 answers"):
        train("rewards=['TMP/logs.py:short']", output="short")


TRL_REWARDS = """
import asyncio

received = []

def form(value):
    if isinstance(value, list):
        return [form(one) for one in value]
    return sorted(value.items()) if isinstance(value, dict) else value

def keep(name, given):
    state = given.pop("trainer_state", None)
    progress = [getattr(state, field) for field in ("global_step", "max_steps", "epoch", "num_train_epochs")] if state else []
    callables = sorted(key for key in given if callable(given[key]))
    given.pop("ended", None)
    received.append([name, progress, callables, {key: form(value) for key, value in given.items() if key not in callables}])

def everything(**kwargs):
    keep("everything", dict(kwargs))
    kwargs["log_metric"]("mean_size", sum(map(len, kwargs["completion_ids"])))
    kwargs["log_extra"]("level_seen", kwargs["level"])
    return [float(i) for i, _ in enumerate(kwargs["prompts"])]

async def some(prompts, completions, answer, **kwargs):
    await asyncio.sleep(0)
    keep("some", dict(prompts=prompts, completions=completions, answer=answer))
    return [None if a == "65" else 2.0 for a in answer]

class Judge:
    __name__ = "judge"

    def __call__(self, completions, **kwargs):
        return (len(str(one)) / 10 for one in completions)

judge = Judge()

async def trainer_only(trainer_state, completions, **kwargs):
    return [trainer_state.global_step + 0.5] * len(completions)
"""  # noqa: E501


@pytest.mark.long
@pytest.mark.parametrize("form", ["chat", "text"])
def test_functions_receive_what_trl_gives_them(train: Train, tmp_path: Path, form: str) -> None:
    """Two steps of TRL's GRPOTrainer with the same greedy completions. The weights do not change."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    file = tmp_path / "trl_rewards.py"
    file.write_text(TRL_REWARDS)
    names, weights = ["everything", "some", "judge", "trainer_only"], [1.0, 0.5, 2.0, 1.0]
    functions = [load_function(f"{file}:{name}") for name in names]
    received = functions[0].__globals__["received"]
    asked = ["What is 58 plus 7?", "What is 12 plus 9?"]
    prompts: list[Any] = [[{"role": "user", "content": one}] for one in asked] if form == "chat" else asked
    rows = [
        {"prompt": prompt, "answer": answer, "level": level, "tools_seen": ["a", "b"]}
        for prompt, answer, level in zip(prompts, ["65", "21"], [1, 2], strict=True)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = [{"function": f"{file}:{name}", "weight": weight} for name, weight in zip(names, weights, strict=True)]
    ours = train(
        f"data.source={tmp_path}/rows.jsonl", "data.shuffle=false", f"rewards={json.dumps(given)}",
        "generation.num_answers=2",
        "batch_size=4", "gradient_accumulation_steps=1", "max_steps=2", "epochs=2", "optimizer.lr=1e-30",
        "sample_every=1",
        "generation.temperature=1e-3", "data.max_prompt_length=64",
    )  # fmt: skip
    mine = received.copy()
    received.clear()
    folder = resolve_model_path("tiny")
    arguments = GRPOConfig(
        str(tmp_path / "trl"), per_device_train_batch_size=4, num_generations=2, max_completion_length=8, max_steps=2,
        learning_rate=1e-30, temperature=1e-3, reward_weights=weights, shuffle_dataset=False, logging_steps=1,
        bf16=False,
        use_cpu=True, report_to=[],
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    trainer = GRPOTrainer(model, functions, arguments, Dataset.from_list(rows), processing_class=tokenizer)
    trainer.train()
    assert mine == received and len(mine) == 4
    theirs = [line for line in trainer.state.log_history if "reward" in line]
    for our, their in zip(ours, theirs, strict=True):
        assert our["reward"] == pytest.approx(their["reward"])
        assert our["mean_size"] == their["mean_size"] > 0
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert [row["level_seen"] for row in samples] == [1, 1, 2, 2] * 2


@pytest.mark.long
@pytest.mark.parametrize("processes", [(), ("--nproc-per-node", "2")], ids=["1", "2"])
@pytest.mark.parametrize("how", ["rewards", "loss.name"])
def test_a_function_that_exits_ends_no_run_as_complete(tmp_path: Path, processes: tuple[str, ...], how: str) -> None:
    (tmp_path / "leaving.py").write_text("import os\ndef f(*given, **more):\n    os._exit(0)\n")
    (tmp_path / "rewards.py").write_text("import os\ndef f(completions):\n    os._exit(0)\n")
    own = ["rewards=[rewards.py:f]"] if how == "rewards" else ["loss.name=leaving.py:f"]
    command = [sys.executable, "-m", "lean_ft", "run", *processes, "grpo", *SETTINGS, *own, "output_dir=run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 1
    assert "your function called os._exit(0)" in done.stdout + done.stderr


FOUR = ("batch_size=4", "gradient_accumulation_steps=1")  # completions of a step


@pytest.mark.long
def test_a_failing_reward_keeps_the_run(train: Train, tmp_path: Path) -> None:
    rewards = tmp_path / "later.py"
    body = "    return [float(len(said)) for said in completions]\n"
    rewards.write_text(
        "calls = 0\ndef f(completions):\n    global calls\n    calls += 1\n    assert calls < 3, 'no'\n" + body
    )
    given = (f"rewards=['{rewards}:f']", "save_every=0", "max_steps=3", *FOUR)
    with pytest.raises(RuntimeError, match="failed at .*line [0-9]+: AssertionError: no"):
        train(*given)
    assert (tmp_path / "run" / "step_00000002").is_dir()
    rewards.write_text(f"def f(completions):\n{body}")
    lines = train(*given)
    assert numbers(lines) == numbers(train(*given, output="undisturbed"))


@pytest.mark.long
def test_the_planner_counts_it() -> None:
    """The peak includes the caches of sampling, and the reference model if there is one."""

    def peak(*settings: str) -> tuple[int, int]:
        found = planned("grpo", *SETTINGS, "optimizer.name=sgd", *settings, device=None)
        return found.peak_bytes, found.peak.bytes_by_label.get("generation", 0)

    assert peak("loss.kl_weight=0.1")[0] - peak()[0] == pytest.approx(885_888 * 4, rel=0.02)
    # 4 layers of 2 heads of 32 features, keys and values, in float32, for 512 completions of 40 tokens.
    bytes_of_cache = 2 * 4 * 2 * 32 * 4 * 40 * 512
    assert peak("generation.steps_per_round=32", "generation.num_answers=512")[1] >= bytes_of_cache
    assert peak()[1] < 1024  # only the lists of the round


# Two calls and an answer; a turn with two calls; two calls; an answer without a call.
SCRIPTED = [
    ["I add. {2,3}", "{5,13}", "It is eighteen."],
    ["{1,1} {2,2}", "Two and four."],
    ["{1,3}", "{7,8}", "15"],
    ["I know it: 9."],
]
ADD = '''
def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: A number.
        b: Another number.
    """
    return f"{a} + {b} is {a + b}"

def chars(completions, **_):
    return [sum(len(one.get("content") or "") for one in chat) / 7 for chat in completions]
'''


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("grpo", {}),
        ("dapo", {"epsilon_high": 0.28}),
        ("dr_grpo", {"scale_rewards": "none"}),
        ("cispo", {"epsilon_high": 5.0}),
    ],
)
def test_losses_of_calls_of_tools_equal_those_of_trls_trainer(
    name: str, settings: dict[str, Any], train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides sample the same turns. Each of them reads the calls, runs the tool and writes the results itself. The
    ratios of the second step differ from 1."""
    import trl
    from datasets import Dataset
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder, template = tmp_path / "model", Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja"
    byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = template.read_text()
    tokenizer.save_pretrained(folder)
    sizes = {
        "vocab_size": 640,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "initializer_range": 0.2,
    }
    torch.manual_seed(0)
    Qwen2ForCausalLM(
        Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2, eos_token_id=2)
    ).save_pretrained(folder)
    (tmp_path / "mine.py").write_text(ADD)
    rows = [{"prompt": [{"role": "user", "content": f"Add {word} numbers."}]} for word in ("some", "two")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def ids_of(text: str) -> list[int]:
        called = re.sub(
            r"{(\w+),(\w+)}", r'<tool_call>\n{"name": "add", "arguments": {"a": \1, "b": \2}}\n</tool_call>', text
        )
        return [*tokenizer.encode(called), tokenizer.eos_token_id]

    turns = [[ids_of(text) for text in one] for one in SCRIPTED]
    streams = [iter([token for turn in one for token in turn]) for one in turns]
    places: dict[Any, int] = {}

    class Scripted(decoding.RowKey):
        def __init__(self, *facts: Any) -> None:
            self.place = places.setdefault(facts[1:], len(places))

        def at(self, position: int) -> tuple[int, int]:
            return self.place, 0

    def choose(logits: torch.Tensor, keys: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.tensor([next(streams[place]) for place in keys[:, 0].tolist()])
        return ids, logits.float().log_softmax(-1).gather(1, ids[:, None])[:, 0]

    episodes: list[Any] = []

    def watched(self: Any, *given: Any) -> Any:
        episodes.extend(found := sampled(self, *given))
        return found

    sampled = Sampler.__call__
    monkeypatch.setattr(Sampler, "__call__", watched)
    monkeypatch.setattr(decoding, "RowKey", Scripted)
    monkeypatch.setattr(decoding, "choose", choose)
    ours = train(
        f"model.path={folder}", "data.source=TMP/rows.jsonl", "data.chat=true", "data.shuffle=false",
        "data.max_prompt_length=2048",
        "rewards=[TMP/mine.py:chars]", "tools.functions=[TMP/mine.py:add]", "generation.num_answers=2",
        "generation.passes=2",
        "generation.max_new_tokens=500", "batch_size=4", "gradient_accumulation_steps=1", "max_steps=2",
        f"loss.name={name}",
        "optimizer.lr=1e-2",
    )  # fmt: skip

    arguments = trl.GRPOConfig(
        str(tmp_path / "trl"), per_device_train_batch_size=4, num_generations=2, num_iterations=2,
        max_completion_length=500,
        max_steps=2, learning_rate=1e-2, lr_scheduler_type="constant", max_grad_norm=1e9, loss_type=name,
        shuffle_dataset=False,
        logging_steps=1, bf16=False, use_cpu=True, report_to=[], save_strategy="no", **settings,
    )  # fmt: skip
    tool, reward = (load_function(f"{tmp_path}/mine.py:{one}") for one in ("add", "chars"))
    model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    trainer = trl.GRPOTrainer(
        model, reward, arguments, Dataset.from_list(rows), processing_class=tokenizer, tools=[tool]
    )
    numbers, trained, score = iter(range(3)), list[Any](), trainer._generate_and_score_completions

    def single_turn(prompts: Any, *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        number = next(numbers)
        return [one[number] for one in turns if number < len(one)], None

    def kept(inputs: Any) -> Any:
        trained.append(score(inputs))
        return trained[-1]

    monkeypatch.setattr(trainer, "_generate_single_turn", single_turn)
    monkeypatch.setattr(trainer, "_generate_and_score_completions", kept)
    trainer.train()
    (batch,), lengths = trained, [len(one.ids) for one in episodes]
    assert batch["completion_mask"].sum(1).tolist() == lengths
    for i, (one, length) in enumerate(zip(episodes, lengths, strict=True)):
        assert one.ids == batch["completion_ids"][i, :length].tolist()
        assert (one.sampled or [True] * length) == batch["tool_mask"][i, :length].bool().tolist()
    theirs = [line for line in trainer.state.log_history if "loss" in line]
    for our, their in zip(ours, theirs, strict=True):
        assert (our["loss"], our["grad_norm"]) == pytest.approx((their["loss"], their["grad_norm"]), rel=1e-4, abs=1e-6)
    first = [theirs[0][one] for one in ("reward", "tools/call_frequency", "completions/mean_length")]
    assert [ours[0][one] for one in ("reward", "tool_calls", "completion_length")] == pytest.approx(first)
    assert ours[0]["tool_calls"] == 6 / 4 and ours[1]["clip_share"] > 0
