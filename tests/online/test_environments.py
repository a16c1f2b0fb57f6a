"""Environments of Gymnasium and OpenEnv, with the real packages, and environments whose state is recorded."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lean_ft.generation import Completion
from lean_ft.online.completions import why_untrained
from lean_ft.online.rewards import Rewards
from lean_ft.system.user_code import closing
from lean_ft.training.bad_steps import TrainingFailed
from tests.online.test_episodes import TEMPLATE, asked, episodes_of, play


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    return tmp_path


def environment_of(folder: Path, text: str, name: str, *settings: str) -> Any:
    (folder / "mine.py").write_text(text)
    return episodes_of(folder, f"environment=TMP/mine.py:{name}", *settings)


# Gymnasium ----------------------------------------------------------------------------------------------------------

GYMNASIUM = """
import gymnasium
from gymnasium.spaces import Text

def blackjack():
    return gymnasium.make("Blackjack-v1")

def pendulum():
    return gymnasium.make("Pendulum-v1")

class Steered(gymnasium.Wrapper):
    def __init__(self):
        super().__init__(gymnasium.make("CartPole-v1"))
    def parse_action(self, text):
        return {"left": 0, "right": 1}[text]
    def format_observation(self, seen):
        return f"angle {seen[2]:.6f}"

class Echo(gymnasium.Env):
    action_space = observation_space = Text(8)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return f"{options['word']} {self.np_random.integers(10**9)}", {}
    def step(self, action):
        return action * 2, len(action), action == "end", action == "late", {}
"""


def test_gymnasium_episodes_equal_those_of_the_environment_alone(folder: Path) -> None:
    gymnasium = pytest.importorskip("gymnasium")
    episodes = environment_of(folder, GYMNASIUM, "blackjack")
    prompts = [asked("Play.", episodes, seed=seed) for seed in (3, 4)]
    turns = ["I hit: 1", "Perhaps. ", "7", "stick, 0"]
    for one, seed in zip(play(episodes, prompts, turns, turns), (3, 4), strict=True):
        alone = gymnasium.make("Blackjack-v1")
        seen, rewards, done = [alone.reset(seed=seed)[0]], [], False
        for action in (1, 0):
            if not done:
                observation, reward, done, _, _ = alone.step(action)
                seen.append(observation)
                rewards.append(reward)
        assert one.reward == sum(rewards)
        assert one.prompt[-1]["content"] == f"Play.\n{json.dumps(seen[0], default=int)}"
        told = [said["content"] for said in one.messages if said["role"] == "user"]
        wrong = ["error: this is no action. Actions: Discrete(2)."] * (2 if len(rewards) == 2 else 0)
        assert told == [json.dumps(observation, default=int) for observation in seen[1:2] if wrong] + wrong
        assert (one.steps, one.errors) == (len(wrong) + len(rewards), len(wrong))


def test_gymnasium_actions_and_observations_can_be_texts(folder: Path) -> None:
    gymnasium = pytest.importorskip("gymnasium")
    episodes = environment_of(folder, GYMNASIUM, "Echo")
    prompts = [asked("Say", episodes, word="a")] * 2
    prompts += [replace(prompts[0], place="rows.jsonl, line 2")]
    found = play(episodes, prompts, ["hey", "two words", "end"], ["late"], ["end"])
    told = [said["content"] for said in found[0].messages if said["role"] == "user"]
    assert told[0] == "heyhey"
    assert told[1].startswith("error: this is no action. Actions: Text(1, 8,")
    assert [one.reward for one in found] == [6.0, 4.0, 3.0]
    # The completions of a prompt have one seed. Other prompts and rounds have other seeds.
    texts = [one.prompt[-1]["content"] for one in found]
    again, other = (play(episodes, prompts[:1], ["end"], seed=seed)[0].prompt[-1]["content"] for seed in (0, 1))
    assert texts[0] == texts[1] == again
    assert len({texts[0], texts[2], other}) == 3

    steered = environment_of(folder, GYMNASIUM, "Steered", "tools.calls=99")
    (one,) = play(steered, [asked("Balance.", steered, seed=5)], ["left"] * 99)
    alone = gymnasium.make("CartPole-v1")
    angles, done = [alone.reset(seed=5)[0][2]], False
    while not done:
        seen, _, done, _, _ = alone.step(0)
        angles.append(seen[2])
    told = [one.prompt[-1]["content"][9:], *[said["content"] for said in one.messages if said["role"] == "user"]]
    assert told == [f"angle {angle:.6f}" for angle in angles[:-1]]
    assert one.reward == len(angles) - 1
    with pytest.raises(TrainingFailed, match="Steered failed in step at rows.jsonl, line 1: KeyError: 'up'"):
        play(steered, [asked("Balance.", steered)], ["up"])
    with pytest.raises(ValueError, match=r"action space Box\(.* Add parse_action\(self, text\)"):
        _ = environment_of(folder, GYMNASIUM, "pendulum").environment


# OpenEnv ------------------------------------------------------------------------------------------------------------

OPENENV = '''
import os
from openenv.core import GenericEnvClient
from openenv.core.client_types import StepResult
from openenv.core.env_client import EnvClient
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

class Say(Action):
    message: str

class Heard(Observation):
    text: str
    length: int = 0

class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    def __init__(self):
        super().__init__()
        self.said = []
    def reset(self, seed=None, word="none"):
        self.word, self.said = word, []
        return Heard(text=f"Say {word}")
    def step(self, action):
        self.said.append(action.message)
        return Heard(text=" ".join(self.said), length=len(self.said), reward=-0.5 + 2 * (action.message == self.word),
                     done=action.message == self.word)
    @property
    def state(self):
        return State(episode_id="one", step_count=len(self.said))

app = create_fastapi_app(Game, Say, Heard, max_concurrent_envs=9)

class Raw(EnvClient):
    def __init__(self):
        super().__init__(base_url=os.environ["SERVER"])
    def _step_payload(self, action):
        return {"message": action.message}
    def _parse_result(self, payload):
        return StepResult(Heard(**payload["observation"]), payload["reward"], payload["done"])
    def _parse_state(self, payload):
        return State(**payload)

class Client(Raw):
    def parse_action(self, text):
        if text == "quiet":
            raise ValueError("say something.")
        return Say(message=text)

class Generic(GenericEnvClient):
    def __init__(self):
        super().__init__(base_url=os.environ["SERVER"])
    def parse_action(self, text):
        return {"message": Client.parse_action(self, text).message}

def synchronous():
    return Client().sync() if hasattr(Client, "sync") else Client()

class Here(Game):
    parse_action = Client.parse_action
    def format_observation(self, seen):
        return f"{seen.length}: {seen.text}"

class ForTRL:
    """As in the examples of TRL."""
    def __init__(self):
        self.client = Raw().sync() if hasattr(Raw, "sync") else Raw()
    def reset(self, **row):
        self.total = 0.0
        return self.client.reset(word=row["word"]).observation.text
    def say(self, message: str) -> str:
        """Say something.

        Args:
            message: What to say.
        """
        found = self.client.step(Say(message=message))
        self.total += found.reward
        return found.observation.text
    def get_reward(self):
        return self.total
'''


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A server of OpenEnv on this machine."""
    pytest.importorskip("openenv.core")
    folder = tmp_path_factory.mktemp("server")
    (folder / "game.py").write_text(OPENENV)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [sys.executable, "-m", "uvicorn", "--port", str(port), "--log-level", "error", "game:app"]
    with subprocess.Popen(command, cwd=folder) as process:
        try:
            for _ in range(600):
                with socket.socket() as tried:
                    if tried.connect_ex(("127.0.0.1", port)) == 0:
                        break
                assert process.poll() is None
                time.sleep(0.1)
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("SERVER", f"http://127.0.0.1:{port}")
                yield
        finally:
            process.kill()


@pytest.mark.long
@pytest.mark.parametrize("name", ["Here", "Client", "synchronous", "Generic"])
def test_openenv_environments_are_stepped_with_the_users_actions(
    folder: Path, request: pytest.FixtureRequest, name: str
) -> None:
    """An environment in this process, and clients of a server, asynchronous or not."""
    if name != "Here":
        request.getfixturevalue("server")
    episodes = environment_of(folder, OPENENV, name)
    prompts = [asked("Go.", episodes, word=word) for word in ("tree", "sea")]
    found = play(episodes, prompts, ["no", "quiet", "tree"], ["sea"])
    first, heard = (
        ("0: Say {}", ["1: no"])
        if name == "Here"
        else ('{{"text": "Say {}", "length": 0}}', ['{"text": "no", "length": 1}'])
    )
    assert [one.prompt[-1]["content"] for one in found] == [f"Go.\n{first.format(word)}" for word in ("tree", "sea")]
    told = [said["content"] for said in found[0].messages if said["role"] == "user"]
    assert told == [*heard, "error: say something."]
    assert [(one.reward, one.errors, one.ended) for one in found] == [(1.0, 1, True), (1.5, 0, True)]
    assert play(episodes, prompts[1:], ["sea"])[0].reward == 1.5  # a second round, after a reset


@pytest.mark.long
def test_openenv_clients_work_in_trl_form(folder: Path, server: None) -> None:
    episodes = environment_of(folder, OPENENV, "ForTRL")
    assert [tool["function"]["name"] for tool in episodes.schemas()] == ["say"]
    prompts = [asked("Go. ", episodes, word="tree")]
    calls = [
        f'<tool_call>{{"name": "say", "arguments": {{"message": "{word}"}}}}</tool_call>' for word in ("no", "tree")
    ]
    (one,) = play(episodes, prompts, [*calls, "Done."])
    assert (one.prompt[-1]["content"], one.reward) == ("Go. Say tree", 1.0)
    assert [said["content"] for said in one.messages if said["role"] == "tool"] == ["no", "no tree"]
    with pytest.raises(ValueError, match=r"Raw has neither .* OpenEnv needs parse_action\(self, text\)"):
        _ = environment_of(folder, OPENENV, "Raw").environment


# The contract for user code -----------------------------------------------------------------------------------------

OWN = '''
import asyncio, os, sqlite3, threading, time

MESSAGES = [{"role": "user", "content": "Go on.", "extra": None}]
LOG = []

class Row:
    """Changes what it gets and what it returned."""
    def reset(self, row):
        LOG.append([*row["cards"]])
        self.cards = row["cards"]
        self.cards.pop()
        row["prompt"][0]["content"] = row["more"] = "changed"
        MESSAGES[0].pop("extra", None)
        return MESSAGES
    def step(self, action):
        MESSAGES[0]["content"] = "changed"
        return {"left": self.cards}, 1.0, False

class Methods:
    def reset(self, **row):
        LOG.append([*row["cards"]])
        row["cards"].clear()
        return MESSAGES[0]["content"]
    def take(self, cards: list) -> str:
        """Take.

        Args:
            cards: Which.
        """
        cards.append("changed")
        return "taken"
    def close(self): ...
    def render(self): ...
    def seed(self, seed): ...

class Gymnasium:
    class action_space:
        sample = contains = lambda *_: "a"
    def reset(self, *, seed=None, options=None):
        LOG.append([*options["cards"]])
        options["cards"].clear()
        return "seen", {}
    def step(self, action):
        return "seen", 0.0, True, False, {}

class OpenEnv:
    def reset(self, cards=None, seed=None):
        LOG.append([*cards])
        cards.clear()
        return "seen"
    def parse_action(self, text):
        return text
    def step(self, action):
        return None

class Bound:
    """Whatever belongs to a thread, such as a connection, is used in one alone."""
    def __init__(self):
        self.own = sqlite3.connect(":memory:")
        self.own.execute("create table said (words text)")
    def reset(self, **row):
        self.own.execute("delete from said")
    def say(self, words: str) -> str:
        """Say.

        Args:
            words: What.
        """
        time.sleep(0.2 * (words == "slow"))
        self.own.execute("insert into said values (?)", (words,))
        return " ".join(words for (words,) in self.own.execute("select words from said"))
    def get_reward(self):
        return self.own.execute("select count(*) from said").fetchone()[0]

class Odd:
    def reset(self, row):
        self.row = row
        return eval(row.get("reset", "None"))
    def step(self, action):
        return eval(self.row["step"])
    async def close(self):
        await asyncio.sleep(0)
        LOG.append("closed")

class Rewarded:
    def reset(self, **row):
        self.row = row
    def act(self) -> str:
        "Act."
        return "acted"
    def get_reward(self):
        return eval(self.row["reward"])
    def close(self):
        raise KeyError("close")

class Hanging:
    def reset(self, row):
        self.ended = threading.Event()
        time.sleep(row.get("seconds", 0))
        return row.get("text")
    def step(self, action):
        self.ended.wait()
    def close(self):
        LOG.append("closed")
        self.ended.set()
'''


def log_of(episodes: Any) -> list[Any]:
    return sys.modules[type(episodes.environment.objects[0]).__module__].LOG


@pytest.mark.parametrize("form", ["Row", "Methods", "Gymnasium", "OpenEnv"])
def test_environments_get_copies_and_return_copies(folder: Path, form: str) -> None:
    """Completions, later rounds and reward functions see the row as it was."""
    episodes = environment_of(folder, OWN, form)
    prompt = asked("Draw.", episodes, cards=["A", "B"])
    turn = '<tool_call>{"name": "take", "arguments": {"cards": ["A"]}}</tool_call>' if form == "Methods" else "turn"
    if form == "OpenEnv":
        with pytest.raises(TrainingFailed, match="step returned a NoneType; expected a result with reward and done"):
            play(episodes, [prompt], [turn])
    found = [] if form == "OpenEnv" else play(episodes, [prompt] * 2, *[[turn, "End."] * 9] * 2)
    assert log_of(episodes) == [["A", "B"]] * max(1, len(found))
    assert (prompt.asked, prompt.columns) == ([{"role": "user", "content": "Draw."}], {"cards": ["A", "B"]})
    if form == "Row":
        assert [one.prompt[-1]["content"] for one in found] == ["Go on."] * 2
        assert found[0].messages[1]["content"] == '{"left": ["A"]}'
    elif form == "Methods":
        assert found[0].messages[0]["tool_calls"][0]["function"]["arguments"] == {"cards": ["A"]}
        assert [tool["function"]["name"] for tool in episodes.schemas()] == ["take"]

    def changes(cards: list[Any], prompts: list[Any], trainer_state: Any = None) -> list[float]:
        seen = [len(one) for one in cards]
        cards[0].clear()
        prompts[0][0]["content"] = ""
        return [float(len(one)) for one in cards] + [0.0] * (seen != [2, 2])

    prompts = [prompt, prompt]
    samples = [Completion([5]), Completion([6])]
    assert Rewards([changes, changes], episodes.tokenizer, "cpu")(prompts, samples).each == [[0.0, 0.0], [2.0, 2.0]]
    assert prompt.columns == {"cards": ["A", "B"]}


def test_the_methods_of_an_environment_run_in_one_thread_in_the_order_of_the_calls(folder: Path) -> None:
    episodes = environment_of(folder, OWN, "Bound", "tools.seconds=20")
    said = "".join(
        f'<tool_call>{{"name": "say", "arguments": {{"words": "{word}"}}}}</tool_call>' for word in ("slow", "a", "b")
    )
    found = play(episodes, [asked("Say.", episodes)] * 2, *[[said, "End."]] * 2)
    for one in found:
        assert [said["content"] for said in one.messages if said["role"] == "tool"] == ["slow", "slow a", "slow a b"]
        assert one.reward == 3.0


def test_each_completion_has_its_own_environment(folder: Path) -> None:
    episodes = environment_of(folder, f"{OWN}\none = Row()\ndef make():\n    return one\n", "make")
    with pytest.raises(TrainingFailed, match="make cannot be made: it returned the same object twice"):
        play(episodes, [asked("Go.", episodes, cards=["A"])] * 2, ["a"], ["a"])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"reset": "3"}, "reset at rows.jsonl, line 1: reset returned a int; expected a text, messages or None"),
        ({"reset": "[{'content': 'a'}]"}, "reset at rows.jsonl, line 1: .*expected `role` and `content`"),
        ({"reset": "object()"}, "reset at rows.jsonl, line 1: reset returned a object, which is neither text nor JSON"),
        ({"step": "None"}, r"step at .*: step returned a NoneType; expected \(observation, reward, whether"),
        ({"step": "('a', 1.0)"}, "step at .*: step returned 2 values; expected"),
        ({"step": "('a', 'b', False)"}, "step at .*: step returned the reward b; expected a finite number or None"),
        ({"step": "('a', float('nan'), False)"}, "step at .*: step returned the reward nan"),
        ({"step": "('a', 1.0, 'False')"}, "step at .*: step returned 'False' for whether the episode is over"),
        ({"step": "(object(), 1.0, False)"}, "step at .*: step returned a object, which is neither text nor JSON"),
        ({"step": "1 / 0"}, "step at .*: ZeroDivisionError: division by zero"),
        ({"step": "exit(0)"}, "step at .*: SystemExit: 0"),
        ({"reward": "'1'"}, "get_reward at rows.jsonl, line 1: get_reward returned the reward 1; expected a finite"),
    ],
)
def test_an_error_names_the_environment_its_method_and_the_row(folder: Path, row: dict[str, str], message: str) -> None:
    episodes = environment_of(folder, OWN, "Rewarded" if "reward" in row else "Odd")
    with pytest.raises(TrainingFailed, match=f"^environment=.*mine.py:(Odd|Rewarded) failed in {message}"):
        play(episodes, [asked("Go.", episodes, **row)], ["a", "b"])


def test_texts_of_an_environment_are_valid_and_have_a_limit(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = {"reset": "'r' * 50", "step": "('\\ud800' + 's' * 50, None, False)"}
    half = {
        "reset": "[{'role': 'user', 'content': '\\udfff', 'name': '\\ud800'}]",
        "step": "({'\\ud800': float('inf')}, 1, True)",
    }
    episodes = environment_of(folder, OWN, "Odd", "tools.result_characters=20", "data.max_prompt_length=200")
    found = play(episodes, [asked("Go.", episodes, **row) for row in (long, half)], ["a"] * 9, ["b"])
    assert found[0].prompt[-1]["content"] == f"Go.{'r' * 20}\n[cut after 20 of 50 characters]"
    assert found[0].messages[1]["content"] == f"\ufffd{'s' * 19}\n[cut after 20 of 51 characters]"
    assert found[1].prompt[-1] == {"role": "user", "content": "\ufffd", "name": "\ufffd"}
    assert capsys.readouterr().out.count("which is cut after tools.result_characters=20") == 2  # of reset and step


def test_environments_are_closed_with_the_run_and_limits_hold(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with closing():
        episodes = environment_of(folder, OWN, "Odd")
        play(episodes, [asked("Go.", episodes, step="('', 1, True)")] * 2, ["a"], ["a"])
        assert (log := log_of(episodes)) == []
    assert log == ["closed"] * 2  # the coroutines too
    with closing():
        episodes = environment_of(folder, OWN, "Rewarded", "tools.seconds=0.5")
        call = '<tool_call>{"name": "act", "arguments": {}}</tool_call>'
        prompts = [asked("Go.", episodes, reward=reward) for reward in ("time.sleep(9)", "7")]
        late, other = play(episodes, prompts, [call, "End."], [call, "End."])
        assert (late.reward, late.ended, late.errors, other.reward, other.ended) == (None, False, 1, 7.0, True)
        assert play(episodes, prompts[1:], ["End."])[0].reward == 7.0
    said = capsys.readouterr().out
    assert "Rewarded in get_reward: it took longer than tools.seconds=0.5" in said
    assert "Rewarded failed in close: KeyError: 'close'" in said
    with closing():
        episodes = environment_of(folder, OWN, "Hanging", "tools.seconds=0.5")
        log = log_of(episodes)
        hung, other = play(episodes, [asked("Go.", episodes)] * 2, ["a"], ["b"])
        assert (hung.is_cut, other.is_cut, hung.errors) == (True, True, 1)
        assert log == ["closed"] * 2  # they were left, and others are made
        assert "in close" not in capsys.readouterr().out
        with pytest.raises(TrainingFailed, match="Hanging failed in reset at .* longer than tools.seconds=0.5. Raise"):
            play(episodes, [asked("Go.", episodes, seconds=9)], ["a"])


# State --------------------------------------------------------------------------------------------------------------

STATEFUL = '''
import os, time

class Sums:
    """Counts its real calls in a file."""
    def _called(self, what):
        with open(os.environ["CALLS"], "a") as file:
            file.write(f"{what}\\n")
        time.sleep(float(os.environ.get("DELAY", "0")))
    def state_dict(self):
        return {"seen": self.seen}
    def load_state_dict(self, state):
        self.seen = state["seen"]

class Steps(Sums):
    def reset(self, row):
        self._called(f"reset {row['answer']}")
        self.seen = [row["answer"]]
        return f" {row['answer']}."
    def step(self, action):
        self._called(f"step {self.seen} {action}")
        self.seen = [*self.seen, action]
        return f"{len(self.seen)}", float(len(action) % 7), len(self.seen) > 4

class Methods(Sums):
    def reset(self, **row):
        self._called(f"reset {row['answer']}")
        self.seen = [row["answer"]]
    def add(self, a: int, b: int) -> int:
        """Add.

        Args:
            a: A number.
            b: A number.
        """
        self._called(f"add {self.seen} {a} {b}")
        if a == 13:
            raise ValueError("thirteen")
        self.seen = [*self.seen, a + b]
        return sum(map(int, self.seen))
    def get_reward(self):
        return float(sum(map(int, self.seen)))
'''


def added(a: int, b: int) -> str:
    return f'<tool_call>{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}</tool_call>'


def test_a_state_that_is_not_json_names_the_environment(folder: Path) -> None:
    text = STATEFUL.replace('{"seen": self.seen}', '{"seen": {1, 2}}').replace('self._called(f"', '(f"')
    for name, turns in (("Steps", ["a"]), ("Methods", [added(1, 2), "End."])):
        episodes = environment_of(folder, text, name)
        message = (
            f"{name} failed in state_dict at rows.jsonl, line 1: state_dict returned a value that JSON cannot hold: "
            ".*set"
        )
        with pytest.raises(TrainingFailed, match=message):
            play(episodes, [asked("Go", episodes, answer="5")], turns)


@pytest.mark.parametrize(
    ("name", "turns"),
    [("Steps", ["a", "bcd", "ef", "ghij"]), ("Methods", [added(1, 2), added(13, 0) + added(2, 2), "End."])],
)
def test_recorded_turns_are_not_made_again_and_their_state_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, turns: list[str]
) -> None:
    """With the first lines of the records, as after a kill."""
    log, file = folder / "calls", folder / "tool_results.jsonl"
    monkeypatch.setenv("CALLS", str(log))

    def played() -> tuple[dict[str, Any], Any, list[str]]:
        log.unlink(missing_ok=True)
        episodes = environment_of(folder, STATEFUL, name)
        (one,) = play(episodes, [asked("Go", episodes, answer="5")], turns)
        made = log.read_text().splitlines() if log.exists() else []
        return vars(one) | {"environment": None}, one.environment.state_dict(), made

    found, state, calls = played()
    lines = file.read_text().splitlines()
    assert len(lines) == {"Steps": 5, "Methods": 3}[name]
    for kept in range(len(lines) + 1):
        file.write_text("".join(f"{line}\n" for line in lines[:kept]))
        again, now, made = played()
        assert (again, now) == (found, state)
        start = kept if name == "Steps" else [0, 1, 2, 4][kept]  # the second turn has two calls
        assert sorted(made) == sorted(calls[start:])
        assert file.read_text().splitlines() == lines


def test_a_round_without_a_step_of_the_environment_says_why() -> None:
    cut = {"truncated": 1.0, "turns": 1.0}
    assert "Raise generation.max_new_tokens" in why_untrained(cut, any_trained=False, has_values=False)
    for other in ({"truncated": 0.5, "turns": 1.0}, {"truncated": 1.0}):
        assert "all reward functions returned None" in why_untrained(other, any_trained=False, has_values=False)
