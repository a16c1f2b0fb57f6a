"""Episodes: completions of several turns, in which the model calls tools or acts in an environment.

After its prompt, an episode is one list of ids: sampled tokens, given tokens (the results of calls, or an observation),
sampled tokens, and so on. Nothing is rendered or tokenized again, so the trained tokens are the sampled ones. An
episode ends after a turn without a call, when the environment is done, or at a limit; then it counts as cut.
"""

import json
import queue
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from hashlib import blake2b
from pathlib import Path
from threading import Thread
from typing import Any

from lean_ft.data import Prompt
from lean_ft.data.chats import read_variables
from lean_ft.data.columns import Document
from lean_ft.data.formats import SYSTEM_ROLES, as_chat
from lean_ft.generation import Completion
from lean_ft.online.environments import Environment, Reply, failing
from lean_ft.online.recorded_results import RecordedResults
from lean_ft.settings import OnlineConfig
from lean_ft.system.log import say, slow_calls_reported
from lean_ft.system.user_code import TookTooLong
from lean_ft.tokenizers import Tokenizer
from lean_ft.tools import Tools, ToolTurns, Turn
from lean_ft.training.bad_steps import TrainingFailed


@dataclass
class Episode(Completion):
    """A completion of several turns."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    """The assistant's turns with their `tool_calls`, the results (role `tool`) and observations (role `user`)."""
    turns: int = 0
    calls: int = 0
    steps: int = 0
    """Turns that the environment was to answer."""
    errors: int = 0
    """Calls and steps whose result is an error message."""
    reward: float | None = None
    """The environment's."""
    asked: list[int] = field(default_factory=list)
    """The prompt's ids, if the environment changed the prompt."""
    prompt: Any = None
    """The prompt's messages, if the environment changed them."""
    environment: Any = None
    is_cut: bool = False
    """Whether a limit ended the episode after a turn."""

    @property
    def summary(self) -> dict[str, Any]:
        """What a round keeps."""
        return {name: getattr(self, name) for name in ("messages", "turns", "calls", "steps", "errors")}


@dataclass(frozen=True)
class TurnOutcome:
    """What follows a turn."""

    given: list[int] | None  # None: the episode is over
    messages: list[dict[str, Any]] = field(default_factory=list)
    reward: float | None = None
    errors: int = 0
    is_cut: bool = False


Work = Callable[[], TurnOutcome]
"""Finds what follows a turn: runs its calls, or acts in the environment. It runs in a thread."""


class Episodes:
    """The tools and the environment of a run. They are loaded when something asks for them, which a plan never does.

    Loading raises ValueError if a tool or the environment cannot be loaded, or the chat template cannot write their
    turns.
    """

    def __init__(self, cfg: OnlineConfig, tokenizer: Tokenizer, rank: int = 0) -> None:
        self.cfg, self.tokenizer, self._rank = cfg, tokenizer, rank
        self._folder = cfg.output_dir.absolute()  # user code may change the current folder
        self.turns_of = cache(lambda variables: ToolTurns(tokenizer, self.tools.schemas, json.loads(variables)))

    @cached_property
    def environment(self) -> Environment | None:
        return None if self.cfg.environment is None else Environment(self.cfg.environment, self.cfg.tools)

    @cached_property
    def methods(self) -> list[Callable[..., Any]]:
        """The environment's methods that are tools."""
        return [] if self.environment is None else self.environment.methods_of(self.environment.objects[0])

    @cached_property
    def tools(self) -> Tools:
        return Tools(self.cfg.tools, self.methods)

    @cached_property
    def results(self) -> RecordedResults:
        files = [*self.cfg.tools.functions, *([self.cfg.environment] if self.cfg.environment else [])]
        return RecordedResults(self._folder, self._rank, files)

    def schemas(self) -> list[dict[str, Any]]:
        """The JSON schemas of the tools and of the environment's methods."""
        if self.cfg.has_turns:
            self.turns_of(self.variables_of({}))
        return self.tools.schemas

    def variables_of(self, columns: dict[str, Any]) -> str:
        """The variables of the chat template for a row with these columns, as JSON."""
        given = read_variables(columns.get("chat_template_kwargs"))
        return json.dumps(self.cfg.data.chat_template_kwargs | given, sort_keys=True)


class Player:
    """Plays one episode with the tools and the environment of a run, and has its state."""

    def __init__(self, episodes: Episodes, place: int, prompt: Prompt, number: int, seed: int) -> None:
        """place: in the round, and of the environment's object; number: of the sample; seed: of the round.

        Raises TrainingFailed if the environment's `reset` fails, or its prompt is too long.
        """
        self._shared, self._place, self._prompt, self._number, self._seed = episodes, place, prompt, number, seed
        self.episode = Episode()
        self.asked = prompt.text if episodes.environment is None else self._begin(episodes.environment)

    def _begin(self, environment: Environment) -> Document:
        """Reset the environment. Return the prompt, which it may change."""
        cfg, prompt, episode = self._shared.cfg, self._prompt, self.episode
        row = prompt.columns | {"prompt": prompt.asked}
        # One seed for all completions of a prompt, whose rewards are compared.
        seed = blake2b(repr((self._seed, Path(prompt.place).name)).encode(), digest_size=4).digest()
        with failing(environment.name, "cannot be made"):
            episode.environment = environment.object(self._place)
        with failing(environment.name, f"failed in reset at {prompt.place}"):
            reset = partial(environment.reset, self._place, row, int.from_bytes(seed))
            observation = self._recorded(reset, prompt.ids)
            if observation is None:
                return prompt.text
            following = [] if isinstance(observation, str) else as_chat(observation, "result of reset").messages
        chat = [*as_chat(prompt.asked, "prompt").messages, *following]
        if isinstance(observation, str):
            chat[-1] = {**chat[-1], "content": f"{chat[-1]['content']}{observation}"}
        episode.prompt = chat
        if cfg.data.system and chat[0]["role"] not in SYSTEM_ROLES:
            chat = [{"role": "system", "content": cfg.data.system}, *chat]
        variables = json.loads(self._shared.variables_of(prompt.columns))
        with failing(environment.name, f"failed in reset at {prompt.place}"):
            schemas = self._shared.tools.schemas or None
            episode.asked, _ = self._shared.tokenizer.render(chat, schemas, True, "all", variables)
        if len(episode.asked) > cfg.data.max_prompt_length:
            raise TrainingFailed(
                f"{prompt.place}: with the observation of environment={environment.name}, the prompt has "
                f"{len(episode.asked)} tokens, more than data.max_prompt_length={cfg.data.max_prompt_length}. Raise "
                "it, or return a shorter observation."
            )
        return Document.of(episode.asked)

    def play(self) -> Generator[Work | None, Completion | TurnOutcome, None]:
        """The course of the episode. It yields None and is sent the completion when a turn has ended; then it yields
        the work on what follows the turn and is sent its TurnOutcome. It returns after a turn that nothing follows."""
        episode, discount = self.episode, self._shared.cfg.generation.turn_discount
        outcome, start, num_rewards = TurnOutcome([]), 0, 0
        while outcome.given is not None:
            completion = yield None  # without a next turn, the given tokens did not fit
            assert isinstance(completion, Completion)
            start += len(outcome.given)
            episode.messages += outcome.messages
            ids, start = completion.ids[start:], len(completion.ids)
            if (work := self._work(completion, ids)) is None:
                return
            outcome = yield work
            assert isinstance(outcome, TurnOutcome)
            episode.is_cut, episode.errors = outcome.is_cut, episode.errors + outcome.errors
            if outcome.reward is not None:
                episode.reward = (episode.reward or 0) + discount**num_rewards * outcome.reward
                num_rewards += 1

    def _work(self, completion: Completion, ids: list[int]) -> Work | None:
        """Read a turn, the `ids` at the end of the completion. Return the work on what follows it, if anything does."""
        episode, environment = self.episode, self._shared.environment
        turn = self._turns.read(ids)
        steps = environment is not None and environment.has_steps and not turn.calls
        asks = bool(turn.calls) or steps
        episode.turns += 1
        episode.is_cut = asks and episode.turns > self._shared.cfg.tools.calls
        is_answered = asks and completion.ended and not episode.is_cut
        if turn.calls and not is_answered:
            turn = Turn(self._turns.text(ids), [])  # the calls are not made
        episode.messages.append(_message(turn))
        if not is_answered:
            return None
        episode.calls, episode.steps = episode.calls + len(turn.calls), episode.steps + steps
        return partial(self._step if steps else self._call, turn, ids, list(completion.ids))

    def finish(self, completion: Completion) -> Episode:
        """Return the episode with the tokens of the whole completion."""
        episode, environment = self.episode, self._shared.environment
        vars(episode).update(vars(completion))
        if environment is not None and not environment.has_steps:
            with failing(environment.name, f"failed in get_reward at {self._prompt.place}"):
                try:
                    episode.reward = environment.reward(self._place)
                except TookTooLong as late:
                    self._leave(environment, "get_reward", late)
                    episode.is_cut, episode.errors = True, episode.errors + 1
        episode.ended = completion.ended and not episode.is_cut
        return episode

    @cached_property
    def _turns(self) -> ToolTurns:
        return self._shared.turns_of(self._shared.variables_of(self._prompt.columns))

    def _leave(self, environment: Environment, method: str, late: TookTooLong) -> None:
        """Warn about an environment that does not return, and drop it. Later rounds get a new one."""
        say("WARNING", f"environment={environment.name} in {method}: {late}. Its episode counts as cut")
        environment.leave(self._place)

    # In threads -------------------------------------------------------------------------------------------------------

    def _call(self, turn: Turn, ids: list[int], all_ids: list[int]) -> TurnOutcome:
        """Run the calls of a turn whose results are not recorded."""
        environment, recorded, asked = self._shared.environment, self._shared.results, self.asked.ids.tolist()
        keys = [recorded.key(self._seed, asked, self._number, all_ids, i) for i in range(len(turn.calls))]
        rows = {i: row for i, key in enumerate(keys) if (row := recorded.take(key)) is not None}
        known = {i: (row["result"], row["failed"]) for i, row in rows.items()}
        names_of_methods = {method.__name__ for method in self._shared.methods}

        def finished(i: int, result: str, failed: bool) -> None:
            if turn.calls[i].name not in names_of_methods:  # an environment needs all calls for its state
                recorded.add(keys[i], result=result, failed=failed)

        of_environment = {}
        if environment is not None:
            methods = environment.methods_of(self.episode.environment)
            of_environment = {"methods": methods, "thread": environment.thread(self._place)}
        run_calls = partial(self._shared.tools.results, turn.calls, known, finished, **of_environment)
        acts = any(call.name in names_of_methods for call in turn.calls)
        results = self._recorded(run_calls, asked, all_ids) if acts else run_calls()
        given = self._turns.reply(ids, turn.calls, [text for text, _ in results])
        messages = [
            {"role": "tool", "name": call.name, "content": text}
            for call, (text, _) in zip(turn.calls, results, strict=True)
        ]
        return TurnOutcome(given, messages, errors=sum(failed for _, failed in results))

    def _step(self, turn: Turn, ids: list[int], all_ids: list[int]) -> TurnOutcome:
        environment = self._shared.environment
        assert environment is not None
        with failing(environment.name, f"failed in step at {self._prompt.place}"):
            step = partial(environment.step, self._place, turn.content)
            try:
                reply = Reply(*self._recorded(step, self.asked.ids.tolist(), all_ids))
            except TookTooLong as late:
                self._leave(environment, "step", late)
                return TurnOutcome(None, errors=1, is_cut=True)
        if reply.done:
            return TurnOutcome(None, reward=reply.reward)
        messages = [{"role": "user", "content": reply.observation}]
        return TurnOutcome(self._turns.observation(ids, messages), messages, reply.reward, int(reply.failed))

    def _recorded(self, act: Callable[[], Any], *ids: list[int]) -> Any:
        """What an act on the environment returns. With `state_dict`, a resumed run takes it and the state after it from
        its records."""
        environment = self._shared.environment
        assert environment is not None
        if not environment.has_state:
            return act()
        results = self._shared.results
        key, where = results.key(self._seed, ids, self._number), self._prompt.place
        if (row := results.take(key)) is not None:
            with failing(environment.name, f"failed in load_state_dict at {where}"):
                environment.load_state(self._place, row["state"])
            return row["found"]
        returned = act()
        with failing(environment.name, f"failed in state_dict at {where}"):
            state = environment.state(self._place)
        results.add(key, found=returned, state=state)
        return returned


class Round:
    """The episodes of some prompts, one for each. `lean_ft.generation.sample` asks it for given tokens (`Replies`)."""

    def __init__(self, episodes: Episodes, prompts: Sequence[Prompt], numbers: Sequence[int], seed: int) -> None:
        """numbers: of the samples. Raises TrainingFailed as `Player` does."""
        numbered = enumerate(zip(prompts, numbers, strict=True))
        self._players = [Player(episodes, place, prompt, number, seed) for place, (prompt, number) in numbered]
        self.asked = [player.asked for player in self._players]
        self._plays = dict(enumerate(player.play() for player in self._players))
        self._outcomes: queue.SimpleQueue[tuple[int, TurnOutcome | BaseException]] = queue.SimpleQueue()
        for play in self._plays.values():
            next(play)  # it waits for its first turn

    def ended(self, place: int, completion: Completion) -> None:
        """Read a turn, and begin to work on what follows it."""
        if (work := self._continue(place, completion)) is not None:
            Thread(target=self._run, args=(place, work), daemon=True).start()
        elif completion.ended:
            self._outcomes.put((place, TurnOutcome(None)))

    def ready(self, wait: bool) -> dict[int, list[int] | None]:
        """What follows turns that have ended, by place; with `wait`, of at least one."""
        replies: dict[int, list[int] | None] = {}
        with slow_calls_reported("a tool or the environment") if wait else nullcontext():
            while True:
                try:
                    # Rows that continue together are computed together, so a first result waits a moment for the
                    # others.
                    place, outcome = self._outcomes.get(wait, timeout=0.01 if replies else 0.1)
                except queue.Empty:
                    if replies or not wait:
                        return replies
                    continue
                if isinstance(outcome, BaseException):
                    raise outcome
                self._continue(place, outcome)
                replies[place] = outcome.given

    def finish(self, completions: Sequence[Completion], keeps_environments: bool = True) -> list[Episode]:
        """Return the episodes with these tokens. Environments cannot be sent to other processes."""
        self._plays.clear()
        players = zip(self._players, completions, strict=True)
        episodes = [player.finish(completion) for player, completion in players]
        for episode in () if keeps_environments else episodes:
            episode.environment = None
        return episodes

    def _continue(self, place: int, sent: Completion | TurnOutcome) -> Work | None:
        """Continue an episode with a turn, or with what follows it. Return the work that it waits for, if there is
        any."""
        try:
            return self._plays[place].send(sent)
        except StopIteration:
            return None

    def _run(self, place: int, work: Work) -> None:  # in a thread
        try:
            self._outcomes.put((place, work()))
        except BaseException as error:
            self._outcomes.put((place, error))


def _message(turn: Turn) -> dict[str, Any]:
    """A turn as a message. Malformed calls are in its content."""
    calls = [
        {"type": "function", "function": {"name": one.name, "arguments": one.arguments}}
        for one in turn.calls
        if not one.error
    ]
    return {"role": "assistant", "content": turn.content} | ({"tool_calls": calls} if calls else {})
