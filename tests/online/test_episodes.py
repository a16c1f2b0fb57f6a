"""Episodes: training on sampled tokens alone, calls of tools, environments, and runs that are killed."""

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from lean_ft import load_model, load_tokenizer
from lean_ft.data import Prompt
from lean_ft.data.prompts import Prompts
from lean_ft.data.report import DataReport
from lean_ft.generation import Completion
from lean_ft.hub.paths import resolve_model_path
from lean_ft.losses import (
    AnswerLogProbs,
    TokenLogProbs,
    batch_loss,
    policy_loss,
    value_loss,
)
from lean_ft.memory import apply_memory
from lean_ft.online import PairRollouts, Rollouts, Sampler, ValuedRollouts, ValueModel
from lean_ft.online.episodes import Episode, Episodes, Round
from lean_ft.online.rewards import Rewards, Scores
from lean_ft.tools import Call, ToolTurns, Turn
from lean_ft.training.bad_steps import TrainingFailed
from tests.recipes.conftest import config_of
from tests.training.toy_runs import metrics

# Two episodes of one prompt: ids, and which of them the model sampled.
PROMPT = [11, 12, 13, 14]
EPISODES = [
    ([21, 22, 23, 24, 25, 26, 27, 28], [1, 1, 0, 0, 0, 1, 1, 1]),
    ([31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41], [1, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1]),
]
REWARDS = [1.5, 0.25]
GIVEN = ("model.path=tiny", "data.source=unread", "rewards=[length]", "device=cpu", "generation.num_answers=2")
GIVEN += ("batch_size=2", "generation.max_new_tokens=16", f"tools.functions=[{__file__}:round_of]")


def round_of(cfg: Any, kind: type) -> Any:
    report = DataReport("prompts")
    prompts = Prompts([Prompt(PROMPT, "", {}, "")], seed=0, report=report, fingerprint="")
    samples = [
        Completion(ids, [-1.0 * s for s in mask], True, sampled=[s == 1 for s in mask]) for ids, mask in EPISODES
    ]
    rollouts = kind(cfg, prompts, 0, share_prompts=True)
    rollouts.sample(lambda *_: samples, lambda *_: Scores(list(REWARDS), [[], []], ["", ""]))
    return rollouts


def both_models(cfg: Any) -> tuple[Any, Any]:
    path = resolve_model_path("tiny")
    own = load_model(path, torch.device("cpu"), dtype=torch.float32).double()
    apply_memory(own, cfg.memory, compile=False)
    return own, AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).double()


def moved(*models: torch.nn.Module) -> None:
    """Change the weights of all models alike, as an update would."""
    for model in models:
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for _, parameter in sorted(model.named_parameters()):
                parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64), alpha=2e-3)


def by_hand(theirs: Any) -> list[tuple[Tensor, Tensor]]:
    """Log-probabilities of the sampled tokens of each episode, and the hidden states before them."""
    found = []
    for ids, mask in EPISODES:
        out = theirs(torch.tensor([PROMPT + ids]), output_hidden_states=True)
        places = [len(PROMPT) + i - 1 for i, sampled in enumerate(mask) if sampled]
        labels = torch.tensor([one for one, sampled in zip(ids, mask, strict=True) if sampled])
        log_probs = out.logits[0].log_softmax(-1)[places].gather(1, labels[:, None])[:, 0]
        found.append((log_probs, out.hidden_states[-1][0, places]))
    return found


def loss_by_hand(name: str, now: list[Tensor], old: list[Tensor]) -> Tensor:
    """The formulas of the papers, over the sampled tokens."""
    mean = sum(REWARDS) / 2
    std = torch.tensor(REWARDS, dtype=torch.float64).std() + 1e-4
    above = [reward - mean for reward in REWARDS]
    lengths = [len(one) for one in now]
    parts = []
    for advantage, new, was in zip(above, now, old, strict=True):
        ratio = (new - was).exp()
        match name:
            case "grpo" | "dapo" | "dr_grpo":
                scaled = advantage if name == "dr_grpo" else advantage / std
                high = 1.28 if name == "dapo" else 1.2
                value = torch.minimum(ratio * scaled, ratio.clamp(0.8, high) * scaled).sum()
                parts.append(-value / {"grpo": 2 * len(new), "dapo": sum(lengths), "dr_grpo": 2 * 16}[name])
            case "gspo":
                whole = ((new - was).sum() / len(new)).exp()
                value = torch.minimum(whole * advantage, whole.clamp(1 - 3e-4, 1 + 4e-4) * advantage) / std
                parts.append(-value / 2)
            case "cispo":
                parts.append(-(ratio.clamp(max=5).detach() * advantage / std * new).sum() / sum(lengths))
            case "rloo":
                whole, alone = (new - was).sum().exp(), 2 * advantage
                parts.append(-torch.minimum(whole * alone, whole.clamp(0.8, 1.2) * alone) / 2)
    return sum(parts)


def assert_equal(own: Any, theirs: Any, loss: Tensor, expected: Tensor, rtol: float = 1e-5) -> None:
    """A round keeps log-probabilities in float32, and transformers computes norms and rotary angles in float32."""
    torch.testing.assert_close(loss.double(), expected, rtol=rtol, atol=1e-7)
    loss.backward()
    expected.backward()
    gradients = dict(theirs.named_parameters())
    for name, parameter in own.named_parameters():
        assert (parameter.grad - gradients[name].grad).norm() <= rtol * gradients[name].grad.norm(), name


@pytest.mark.first(2)
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo"])
def test_losses_and_gradients_equal_those_by_hand_over_sampled_tokens(name: str) -> None:
    """In float64 with transformers, after an update, so that ratios differ from 1."""
    cfg = config_of("grpo", *GIVEN, f"loss.name={name}", "generation.passes=2")
    own, theirs = both_models(cfg)
    rollouts, log_probs = round_of(cfg, Rollouts), TokenLogProbs(own, cfg)
    with torch.no_grad():
        old = [one for one, _ in by_hand(theirs)]
        for batch in rollouts.to_remember():
            rollouts.remember(batch, log_probs(own, batch), None)
    rollouts.begin()
    moved(own, theirs)
    (batch,) = rollouts.take()
    num_sampled = sum(sum(mask) for _, mask in EPISODES)
    assert (batch.num_targets, rollouts.metrics()["completion_length"]) == (num_sampled, num_sampled / 2)
    loss = batch_loss(cfg, batch, log_probs(own, batch), num_answers=batch.num_answers, num_tokens=batch.num_targets)
    assert_equal(own, theirs, loss, loss_by_hand(name, [now for now, _ in by_hand(theirs)], old))


def test_ppo_equals_its_computation_by_hand_over_sampled_tokens() -> None:
    """The value before a sampled token follows the value before the last sampled one."""
    cfg = config_of("ppo", *GIVEN, "lora.rank=2", "loss.gamma=0.9", "loss.kl_weight=0.1")
    own, theirs = both_models(cfg)
    value = ValueModel(cfg, own)
    torch.nn.init.normal_(value.score.weight, 0.0, 0.3, torch.Generator().manual_seed(0))
    weight = value.score.weight.detach().clone().requires_grad_()
    rollouts, log_probs = round_of(cfg, ValuedRollouts), TokenLogProbs(own, cfg)
    with torch.no_grad():
        before = [(now, (hidden.float() @ weight.float().T)[:, 0]) for now, hidden in by_hand(theirs)]
        for batch in rollouts.to_remember():
            now = log_probs(own, batch)
            rollouts.remember(batch, now, now.log_probs * 0.5, value(batch, now))
    rollouts.begin()
    advantages, returns = [], []
    for (old, values), reward in zip(before, REWARDS, strict=True):
        given = -0.1 * (old - 0.5 * old)
        given[-1] += reward
        found, above = torch.empty_like(given), 0.0
        for i in reversed(range(len(given))):
            behind = values[i + 1] if i + 1 < len(values) else 0.0
            above = given[i] + 0.9 * behind - values[i] + 0.9 * 0.95 * above
            found[i] = above
        advantages.append(found)
        returns.append(found + values)
    flat = torch.cat(advantages)
    expected = torch.zeros((), dtype=torch.float64)
    moved(own, theirs)
    for (now, hidden), (old, values), above, target in zip(by_hand(theirs), before, advantages, returns, strict=True):
        even, ratio = (above - flat.mean()) / flat.std(), (now - old).exp()
        expected = expected - torch.minimum(ratio * even, ratio.clamp(0.8, 1.2) * even).sum() / len(flat)
        new = (hidden.float() @ weight.T)[:, 0]
        near = values + (new - values).clamp(-0.2, 0.2)
        expected = expected + 0.1 * 0.5 * torch.maximum((new - target) ** 2, (near - target) ** 2).sum() / len(flat)
    (batch,) = rollouts.take()
    now, number = log_probs(own, batch), batch.num_targets
    policy = policy_loss(
        "dapo",
        now.log_probs,
        batch.old,
        batch.advantages,
        batch.counts,
        num_tokens=number,
        epsilon=0.2,
        epsilon_high=0.2,
    )
    error = value_loss(value(batch, now), batch.values, batch.returns, batch.counts, 0.2, number)
    loss = policy + 0.1 * error
    # Advantages, returns and values are stored in float32.
    assert_equal(own, theirs, loss, expected)
    torch.testing.assert_close(value.score.weight.grad, weight.grad, rtol=1e-5, atol=1e-6)


def test_pairs_sum_the_log_probabilities_of_sampled_tokens() -> None:
    cfg = config_of("online_dpo", *GIVEN)
    own, theirs = both_models(cfg)
    rollouts = round_of(cfg, PairRollouts)
    rollouts.begin()
    (batch,) = rollouts.take()
    with torch.no_grad():
        found = AnswerLogProbs(own, cfg)(own, batch)
        expected = torch.stack([now.sum() for now, _ in by_hand(theirs)])[None]
    torch.testing.assert_close(found.log_probs, expected, rtol=1e-6, atol=1e-9)
    assert batch.answer_tokens.tolist() == [[sum(mask) for _, mask in EPISODES]]


# Episodes with scripted turns ---------------------------------------------------------------------------------------

TEMPLATE = """{{ bos_token }}
{%- if tools %}{{ '<|system|>' }}{% for tool in tools %}{{ tool.function.name ~ ' ' }}{% endfor %}{{ eos_token }}{% endif %}
{%- for m in messages %}{{ '<|' ~ ('user' if m.role == 'tool' else m.role) ~ '|>' }}{{ m.content }}
{%- for call in m.tool_calls or [] %}{{ '<tool_call>' ~ (call.function | tojson) ~ '</tool_call>' }}{% endfor %}
{{- eos_token }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""  # noqa: E501
TOOLS = '''
import json, os, time

def counted(call):
    if "CALLS" in os.environ:
        with open(os.environ["CALLS"], "a") as file:
            file.write(f"{call}\\n")
        time.sleep(0.3)

def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: A number.
        b: Another number.
    """
    counted(f"{a} {b}")
    if a == 13:
        raise ValueError("thirteen")
    return a + b

class Guess:
    """The number is in the row."""
    def reset(self, row):
        self.number, self.tries = row["number"], 0
        return f" below {row['number'] * 2}"
    def step(self, action):
        self.tries += 1
        if action == "hang":
            time.sleep(60)
        if action == "fail":
            raise KeyError("broken")
        right = action == str(self.number)
        return "higher" if action < str(self.number) else "lower", 1.0 if right else -0.5, right

class Counter:
    """TRL's form."""
    def reset(self, **row):
        self.total = 0
    def count(self, by: int) -> str:
        """Count.

        Args:
            by: How much.
        """
        self.total += by
        return f"{self.total}"
    def get_reward(self) -> float:
        return float(self.total)

class Stateful:
    def reset(self, row):
        counted(f"reset {row['answer']}")
        self.seen = [row["answer"]]
        return f" {row['answer']}."
    def step(self, action):
        counted(f"step {self.seen} {action}")
        self.seen = [*self.seen, action]
        return f"{len(self.seen)}", float(len(action) % 7), len(self.seen) > 3
    def state_dict(self):
        return {"seen": self.seen}
    def load_state_dict(self, state):
        self.seen = state["seen"]

class Endless:
    def reset(self, row): return [{"role": "user", "content": "Go on."}]
    def step(self, action): return "on", None, False
'''


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    (tmp_path / "mine.py").write_text(TOOLS)
    return tmp_path


def episodes_of(files: Path, *settings: str) -> Episodes:
    given = ["model.path=tiny", "data.source=unread", "rewards=[length]", "device=cpu", "generation.num_answers=2"]
    given += [
        f"data.chat_template={files}/template.jinja",
        "generation.max_given_tokens=400",
        "data.max_prompt_length=99",
    ]
    cfg = config_of("grpo", *given, *(one.replace("TMP", str(files)) for one in settings), folder=files)
    return Episodes(cfg, load_tokenizer(cfg.model, cfg.data.chat_template))


def play(episodes: Episodes, prompts: list[Prompt], *turns: list[str], seed: int = 0) -> list[Episode]:
    """What `sample` does, with these turns for each prompt."""
    with episodes.tools.unchanged_process(seed):
        played = Round(episodes, prompts, list(range(len(prompts))), seed)
        samples, texts = [Completion(sampled=[True]) for _ in prompts], [list(one) for one in turns]
        running = {place: [] for place in range(len(prompts))}
        while running:
            for place, given in running.items():
                one = samples[place]
                ids = [*episodes.tokenizer.encode(texts[place].pop(0)), episodes.tokenizer.eos_id]
                one.sampled = one.sampled[: len(one.ids)] + [False] * len(given) + [True] * len(ids)
                one.ids, one.ended = [*one.ids, *given, *ids], True
                played.ended(place, one)
            waiting, running = set(running), {}
            while waiting:
                found = played.ready(True)
                waiting -= found.keys()
                running |= {place: given for place, given in found.items() if given is not None}
        return played.finish(samples)


def asked(text: str, episodes: Episodes, **columns: Any) -> Prompt:
    chat = [{"role": "user", "content": text}]
    ids = episodes.tokenizer.apply_chat_template(chat, episodes.schemas() or None, add_generation_prompt=True)
    return Prompt(ids, chat, columns, "rows.jsonl, line 1")


def called(**arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': 'add', 'arguments': arguments})}</tool_call>"


def test_an_episode_has_the_ids_of_its_whole_chat_and_trains_the_sampled_ones(files: Path) -> None:
    episodes = episodes_of(files, "tools.functions=[TMP/mine.py:add]", "tools.parallel=2")
    prompt = asked("Add.", episodes)
    turns = [[called(a=2, b=3), called(a=13, b=1) * 3, "Done."], ["5."], [called(a=1), "No."]]
    found = play(episodes, [prompt] * 3, *turns)
    for one in found:
        whole = episodes.tokenizer.apply_chat_template([*prompt.asked, *one.messages], episodes.schemas())
        assert prompt.ids + one.ids == whole
        texts = [
            episodes.tokenizer.decode([t for t, s in zip(one.ids, one.sampled, strict=True) if s == kind])
            for kind in (True, False)
        ]
        assert texts[0] == "".join(f"{text}<|end|>" for text in turns[found.index(one)])
        assert "<tool_call>" not in texts[1]
    assert [(one.turns, one.calls, one.errors, one.ended) for one in found] == [
        (3, 4, 3, True),
        (1, 0, 0, True),
        (2, 1, 1, True),
    ]
    results = [said["content"] for said in found[0].messages if said["role"] == "tool"]
    assert results[0] == "5"
    assert "thirteen" in results[1]
    assert "too many" in results[3]


def test_recorded_results_are_not_requested_again(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Also those of a turn whose other call has no result yet; a line that was cut, or is no line of ours, is left
    out."""
    log = files / "calls"
    monkeypatch.setenv("CALLS", str(log))
    turns = [called(a=2, b=3) + called(a=13, b=4), "Done."]
    settings = ("tools.functions=[TMP/mine.py:add]",)
    episodes = episodes_of(files, *settings)
    first = play(episodes, [asked("Add.", episodes)], turns)
    recorded = files / "tool_results.jsonl"
    lines = recorded.read_text().splitlines()
    assert len(lines) == 2
    assert recorded.stat().st_mode & 0o777 == 0o600  # results may hold secrets
    row = json.loads(lines[1])
    odd = [
        {},
        [],
        None,
        5,
        "x",
        {"key": 1},
        {**row, "result": 5},
        {**row, "round": "x"},
        {"key": row["key"], "round": 0},
    ]
    others = [*map(json.dumps, odd), "[" * 5000, "9" * 5000, "", "\ud800", lines[1][:-9]]
    recorded.write_bytes("\n".join([*others, lines[0], others[-1]]).encode("utf-8", "surrogatepass"))
    capsys.readouterr()
    episodes = episodes_of(files, *settings)
    assert play(episodes, [asked("Add.", episodes)], turns) == first
    assert "tool_results.jsonl: 15 of 16 lines are cut or changed" in capsys.readouterr().out
    assert sorted(Counter(log.read_text().splitlines()).values()) == [1, 2]  # the one whose line was cut
    assert sorted(recorded.read_text().splitlines()) == sorted(lines)
    assert recorded.stat().st_mode & 0o777 == 0o600
    again = episodes_of(files, *settings)
    play(again, [asked("Add.", again)], turns, seed=1)  # another round
    (files / "mine.py").write_text(TOOLS + "# changed")
    changed = episodes_of(files, *settings)
    play(changed, [asked("Add.", changed)], turns)
    assert len(log.read_text().splitlines()) == 7


def test_limits_end_an_episode_as_cut(files: Path) -> None:
    episodes = episodes_of(files, "environment=TMP/mine.py:Endless", "tools.calls=3")
    (one,) = play(episodes, [asked("Go.", episodes)], ["a"] * 9)
    assert (one.turns, one.ended, one.reward) == (4, False, None)
    assert one.prompt[-1] == {"role": "user", "content": "Go on."}
    episodes = episodes_of(files, "tools.functions=[TMP/mine.py:add]", "tools.calls=2")
    (one,) = play(episodes, [asked("Go.", episodes)], [called(a=1, b=1)] * 9)
    assert (one.turns, one.calls, one.ended) == (3, 2, False)


def test_calls_that_are_not_made_are_text(files: Path) -> None:
    """In a turn that max_new_tokens cut, after the last turn with calls, and malformed ones."""
    episodes = episodes_of(files, "tools.functions=[TMP/mine.py:add]", "tools.calls=1")
    broken = '<tool_call>{"name": "add", "arg</tool_call>'
    turns = [f"So: {called(a=1, b=1)} {broken}", called(a=2, b=2)]
    (one,) = play(episodes, [asked("Go.", episodes)], turns)
    first, good, bad, last = one.messages
    assert (first["content"], last["content"]) == (f"So:  {broken}", turns[1])
    assert [call["function"]["arguments"] for call in first["tool_calls"]] == [{"a": 1, "b": 1}]
    assert (good["content"], bad["content"][:26], "tool_calls" in last) == ("2", "error: malformed tool call", False)
    assert (one.calls, one.errors, one.ended) == (2, 1, False)
    played = Round(episodes, [asked("Go.", episodes)], [0], 0)
    played.ended(0, sample := Completion(episodes.tokenizer.encode(turns[1]), ended=False))
    assert played.finish([sample])[0].messages == [{"role": "assistant", "content": turns[1]}]


def test_an_environment_has_its_observations_as_messages_and_its_rewards(files: Path) -> None:
    episodes = episodes_of(files, "environment=TMP/mine.py:Guess", "generation.turn_discount=0.5")
    prompts = [asked("A number", episodes, number=5), asked("A number", episodes, number=1)]
    found = play(episodes, prompts, ["3", "7", "5"], ["1"])
    assert [one.reward for one in found] == [-0.5 - 0.25 + 0.25, 1.0]
    for one, prompt, bound in zip(found, prompts, (10, 2), strict=True):
        chat = [{"role": "user", "content": f"A number below {bound}"}]
        assert one.prompt == chat
        assert one.asked + one.ids == episodes.tokenizer.apply_chat_template([*chat, *one.messages])
        assert prompt.asked[0]["content"] == "A number"
    said = [(said["role"], said["content"]) for said in found[0].messages]
    assert said == [("assistant", "3"), ("user", "higher"), ("assistant", "7"), ("user", "lower"), ("assistant", "5")]
    with pytest.raises(TrainingFailed, match=r"Guess failed in step at rows.jsonl, line 1: KeyError: 'broken'"):
        play(episodes, prompts[:1], ["fail"])
    with pytest.raises(TrainingFailed, match=r"Guess failed in reset at rows.jsonl, line 1: KeyError: 'number'"):
        play(episodes, [asked("A number", episodes)], ["1"])


def test_an_environment_that_hangs_counts_as_cut(files: Path) -> None:
    episodes = episodes_of(files, "environment=TMP/mine.py:Guess", "tools.seconds=0.5")
    prompts = [asked("A number", episodes, number=n) for n in (5, 1)]
    started = time.monotonic()
    hung, other = play(episodes, prompts, ["hang"], ["2", "1"])
    assert time.monotonic() - started < 10
    assert (hung.ended, hung.errors, other.ended, other.reward) == (False, 1, True, 0.5)
    assert play(episodes, prompts, ["5"], ["1"])[0].reward == 1.0


def test_methods_of_an_environment_are_tools_in_trl_form(files: Path) -> None:
    """Each episode has its own state; reward functions get the environments, as in TRL."""
    episodes = episodes_of(files, "environment=TMP/mine.py:Counter", "tools.functions=[TMP/mine.py:add]")
    assert [tool["function"]["name"] for tool in episodes.schemas()] == ["add", "count"]
    prompts = [asked("Count.", episodes)] * 2
    turns = [
        [f'<tool_call>{{"name": "count", "arguments": {{"by": {by}}}}}</tool_call>'] * n + ["End."]
        for by, n in ((2, 2), (5, 1))
    ]
    found = play(episodes, prompts, *turns)
    assert [one.reward for one in found] == [4.0, 5.0]
    assert [one.messages[-2]["content"] for one in found] == ["4", "5"]
    assert not (files / "tool_results.jsonl").exists()  # a resumed run needs the calls for the state

    def own(completions: list[Any], environments: list[Any], **_: Any) -> list[float]:
        assert [one[-1]["content"] for one in completions] == ["End."] * 2
        return [one.total * 10.0 for one in environments]

    scores = Rewards([own, "environment"], episodes.tokenizer, "cpu")(prompts, found)
    assert scores.each == [[40.0, 4.0], [50.0, 5.0]]
    assert scores.texts == ["End."] * 2


# Runs ---------------------------------------------------------------------------------------------------------------


def read_as_calls(turns: ToolTurns, ids: list[int]) -> Turn:
    """The embedded model writes no calls, so its tokens stand for some."""
    calls = [Call("add", {"a": ids[0], "b": len(ids)}), Call("add", {"a": len(ids), "b": ids[0]})]
    return Turn(turns._tokenizer.decode(ids, True), calls if (ids[0] + len(ids)) % 3 else [])


def test_sampled_tokens_have_their_log_probabilities_and_do_not_depend_on_waiting(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ToolTurns, "read", read_as_calls)
    stops = "generation.stop=[1,2,3,4,5,6,7,8,9]"
    given = ("tools.functions=[TMP/mine.py:add]", stops, "generation.max_new_tokens=40")
    cfg = episodes_of(files, *given).cfg
    path, tokenizer = resolve_model_path("tiny"), load_tokenizer(cfg.model, cfg.data.chat_template)
    model = load_model(path, torch.device("cpu"), dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    schemas = episodes_of(files, *given).schemas()
    chat = [{"role": "user", "content": "5 + 5"}]
    ids = tokenizer.apply_chat_template(chat, schemas, add_generation_prompt=True)
    found = []
    for is_slow in (False, True):
        if is_slow:
            (files / "tool_results.jsonl").unlink()
            monkeypatch.setenv("CALLS", str(files / "calls"))  # each call takes 0.3 s
        sampler = Sampler(cfg, model, tokenizer, None, episodes=episodes_of(files, *given))  # pyright: ignore[reportArgumentType]
        found.append(sampler([Prompt(ids, chat, {}, "")] * 16, 7))
    for one, other in zip(*found, strict=True):  # another batch size rounds differently
        assert other.log_probs == pytest.approx(one.log_probs, abs=1e-4)
        assert replace(other, log_probs=one.log_probs) == one
    assert {one.turns for one in found[0]} > {1, 2}
    for one in found[0]:
        out = theirs(torch.tensor([ids + one.ids])).logits[0].log_softmax(-1)[len(ids) - 1 : -1]
        expected = out.gather(1, torch.tensor(one.ids)[:, None])[:, 0]
        sampled = torch.tensor(one.sampled or [True] * len(one.ids))
        torch.testing.assert_close(torch.tensor(one.log_probs), expected * sampled, rtol=1e-4, atol=1e-4)
        assert sampled.sum() <= 40


DRIVER = """
from lean_ft.cli.main import run_command_line
from lean_ft.tools import ToolTurns
from tests.online.test_episodes import read_as_calls

ToolTurns.read = read_as_calls
run_command_line()
"""


@pytest.mark.long
@pytest.mark.parametrize("environment", ["", "environment=TMP/mine.py:Stateful"], ids=["tools", "and_an_environment"])
def test_a_run_that_is_killed_during_calls_ends_as_the_undisturbed_one(files: Path, environment: str) -> None:
    """SIGKILL at random moments. A call whose result was recorded is not made again, nor is a turn of an environment
    with its state."""
    (files / "driver.py").write_text(DRIVER)
    rows = [json.dumps({"prompt": [{"role": "user", "content": f"{n} + {n}"}], "answer": "7"}) for n in range(9)]
    (files / "rows.jsonl").write_text("\n".join(rows))
    given = f"""run grpo model.path=tiny model.dtype=float32 device=cpu plan=false data.source={files}/rows.jsonl
        data.chat_template={files}/template.jinja tools.functions=[{files}/mine.py:add] tools.calls=3
        rewards=[{"environment" if environment else "length"}] {environment.replace("TMP", str(files))}
        generation.num_answers=4 generation.max_new_tokens=48 generation.stop=[1,2,3,4,5,6,7,8,9] generation.temperature=1.5
        batch_size=8 max_steps=4 save_every=2 optimizer.lr=1e-3 sample_every=1""".split()  # noqa: E501

    def calls(output: Path) -> Counter[str]:
        log = Path(f"{output}.calls")
        return Counter(log.read_text().splitlines() if log.exists() else [])

    def run(output: Path, most: float = math.inf, delay: float = 0) -> bool:
        """Kill the run this many seconds after so many calls in all. Return whether it ended before."""
        variables = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "CALLS": f"{output}.calls"}
        command = [sys.executable, str(files / "driver.py"), *given, f"output_dir={output}"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=variables) as process:
            while process.poll() is None:
                if calls(output).total() >= most:
                    time.sleep(delay)
                    process.send_signal(signal.SIGKILL)
                    return False
                time.sleep(0.01)
            assert process.returncode == 0
            return True

    run(whole := files / "whole")
    lines, generator = metrics(whole, timed=False), random.Random(0)
    assert lines[0]["tool_calls"] > 0.5 < max(line["turns"] for line in lines)
    killed = files / "killed"
    for most in sorted(generator.sample(range(calls(whole).total()), 5)):
        assert not run(killed, most, generator.uniform(0, 0.6))
        results = killed / "tool_results.jsonl"  # absent if the first call was interrupted
        recorded = [line.partition(", ")[2] for line in results.read_text().splitlines()] if results.exists() else []
        assert len(recorded) == len(set(recorded))
    run(killed)
    assert metrics(killed, timed=False) == lines
    assert not [*whole.glob("*tool_results*"), *killed.glob("*tool_results*")]  # they go with the end of a run
    assert (killed / "samples.jsonl").read_text() == (whole / "samples.jsonl").read_text()
    # Each kill interrupts the calls that were running, and no others are made again.
    assert not calls(whole) - calls(killed)
    again = (calls(killed) - calls(whole)).total()
    print(f"{calls(whole).total()} calls, {again} of them again after 5 kills")
    assert again <= 5 * 8 * 2


MOVING = """
import os

class Moves:
    def __init__(self): os.chdir("/")
    def reset(self, row): os.chdir("/")
    def step(self, action):
        os.chdir("/")
        return "More.", 0.5, False
    def close(self): os.chdir("/")

def even(completions):
    os.chdir("/")
    return [float(i % 2) for i in range(len(completions))]

os.chdir("/")
"""


@pytest.mark.long
def test_a_run_writes_to_its_folder_whatever_folder_its_code_changes_to(files: Path) -> None:
    """All paths are relative."""
    (files / "mine.py").write_text(MOVING)
    (files / "rows.jsonl").write_text('{"prompt": [{"role": "user", "content": "Call."}]}\n')
    text = """run grpo model.path=tiny device=cpu plan=false data.source=rows.jsonl data.chat_template=template.jinja
        environment=mine.py:Moves rewards=[environment,mine.py:even] tools.calls=2 generation.num_answers=2
        generation.max_new_tokens=48 generation.stop=[1,2,3,4,5,6,7,8,9] batch_size=2 epochs=2 save_every=1 sample_every=1
        log.to=[csv] output_dir=runs/moved"""  # noqa: E501
    variables = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    program = "from lean_ft.cli.main import run_command_line; run_command_line()"
    done = subprocess.run(
        [sys.executable, "-c", program, *text.split()],
        cwd=files,
        capture_output=True,
        text=True,
        env=variables,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    written = files / "runs" / "moved"
    expected = {"config.yaml", "metrics.jsonl", "metrics.csv", "samples.jsonl", "step_00000001", "step_00000002"}
    assert expected <= {one.name for one in written.iterdir()}
    assert (written / "step_00000002" / "tokenizer.json").exists()
    assert metrics(written, timed=False)[0]["turns"] > 1
    assert "output_dir: runs/moved\n" in (written / "config.yaml").read_text()
    assert "saved       runs/moved/step_00000002" in done.stdout and str(files) not in done.stdout


UNRULY = '''
import os, subprocess, time

def fine(a: int) -> str:
    """Works.

    Args:
        a: A number.
    """
    return "fine"

def fails(a: int) -> str:
    """Raises.

    Args:
        a: A number.
    """
    raise ValueError("broken")

def hangs(a: int) -> str:
    """Never returns, and starts a process.

    Args:
        a: A number.
    """
    subprocess.Popen(["sleep", "600"])
    time.sleep(600)

def floods(a: int) -> str:
    """Returns too much.

    Args:
        a: A number.
    """
    return "x" * 10_000_000

def leaves(a: int) -> str:
    """Ends its process.

    Args:
        a: A number.
    """
    os._exit(3)
'''
CALLS_EACH = """
from lean_ft.cli.main import run_command_line
from lean_ft.tools import Call, ToolTurns, Turn
from lean_ft.training import run

NAMES = ("fine", "fails", "hangs", "floods", "leaves")

def read(turns, ids):
    return Turn("", [Call(NAMES[(ids[0] + len(ids)) % 5], {"a": 1})])

def record_end(directory, **_):
    pass  # the results would be removed

ToolTurns.read = read
run.record_end = record_end
run_command_line()
"""


@pytest.mark.long
def test_a_run_outlives_tools_in_processes_of_their_own(files: Path) -> None:
    """They raise, hang, return 10 MB and end their process. No process is left."""
    (files / "driver.py").write_text(CALLS_EACH)
    (files / "mine.py").write_text(UNRULY)
    (files / "rows.jsonl").write_text('{"prompt": [{"role": "user", "content": "Call."}]}\n')
    names = [f"{files}/mine.py:{name}" for name in ("fine", "fails", "hangs", "floods", "leaves")]
    given = f"""run grpo model.path=tiny model.dtype=float32 device=cpu plan=false data.source={files}/rows.jsonl
        data.chat_template={files}/template.jinja rewards=[length] tools.functions=[{",".join(names)}] tools.calls=2
        tools.process=true tools.seconds=3 tools.result_characters=50 generation.num_answers=8 generation.max_new_tokens=48
        generation.stop=[1,2,3,4,5,6,7,8,9] generation.temperature=1.5 batch_size=8 max_steps=2 output_dir={files}/run""".split()  # noqa: E501
    variables = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "RUN_OF_TEST": str(files)}
    command = [sys.executable, str(files / "driver.py"), *given]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (files / "run" / "tool_results.jsonl").read_text().splitlines()]
    cut = f"{'x' * 50}\n[cut after 50 of 10,000,000 characters]"
    kinds = {"fine": False, cut: False, "error: ValueError: broken": True}
    kinds |= {
        "error: the call took longer than 3 s.": True,
        "error: the tool ended its process with exit code 3.": True,
    }
    assert {row["result"]: row["failed"] for row in rows} == kinds
    for number, line in enumerate(metrics(files / "run", timed=False)):
        failed = [row["failed"] for row in rows if row["round"] == number]
        assert (line["tool_calls"], line["tool_errors"]) == pytest.approx((len(failed) / 8, sum(failed) / len(failed)))
    assert not [one.pid for one in psutil.process_iter() if variables["RUN_OF_TEST"] in environment_of(one).values()]


def environment_of(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:  # it has ended, or is another user's
        return {}
