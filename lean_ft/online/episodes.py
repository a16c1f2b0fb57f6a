"""Episodes: completions of several turns, in which the model calls tools or acts in an environment.

After its prompt, an episode is one list of ids: sampled tokens, given tokens (the results of calls, or an observation),
sampled tokens, and so on. Nothing is rendered or tokenized again, so the trained tokens are the sampled ones. An episode
ends after a turn without a call, when the environment is done, or at a limit; then it counts as cut.
"""

import json
import os
import queue
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from hashlib import blake2b
from pathlib import Path
from threading import Lock, Thread
from typing import Any

from lean_ft.data import Prompt
from lean_ft.data.chats import read_variables
from lean_ft.data.columns import Document
from lean_ft.data.formats import SYSTEM_ROLES, as_chat
from lean_ft.generation import Sample
from lean_ft.online.environments import Environment, Reply, failing
from lean_ft.settings import OnlineConfig
from lean_ft.system.log import say, slow_calls_reported
from lean_ft.system.run_directory import TOOL_RESULTS_FILE, checkpoint_step, list_checkpoints, read_training_state
from lean_ft.system.user_code import TookTooLong
from lean_ft.system.user_functions import PASSED, file_digest
from lean_ft.system.whole_files import open_in_place, write_whole
from lean_ft.tokenizers import Tokenizer
from lean_ft.tools import Tools, ToolTurns, Turn
from lean_ft.training.bad_steps import TrainingFailed

PRIVATE = 0o600  # results may hold secrets, which are not redacted here


@dataclass
class Episode(Sample):
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
    def told(self) -> dict[str, Any]:
        """What a round keeps."""
        return {name: getattr(self, name) for name in ("messages", "turns", "calls", "steps", "errors")}


class RecordedResults:
    """The results of finished calls, in the run's folder: a run that was killed does not request them again.

    Of an environment with `state_dict`, they are its resets and turns, with the state after each. A key depends on everything that leads to a call: the tools' files, the seed, the prompt, the sample number, and all
    ids. Lines of rounds that are in a checkpoint are removed.
    """

    def __init__(self, folder: Path, rank: int, files: Sequence[str]) -> None:
        self._folder, self._path = folder, folder / (f"{rank}_{TOOL_RESULTS_FILE}" if rank else TOOL_RESULTS_FILE)
        self._lock, self._known, self.round = Lock(), defaultdict[str, list[dict[str, Any]]](list), 0
        self._digests = "".join(name if name in PASSED else file_digest(name) for name in files).encode()
        self._seen: Path | None = None  # the newest checkpoint
        if rows := self._rows():
            self._keep(rows)  # a kill can leave a part of a line at the end
        for row in rows:
            self._known[row["key"]].append(row)

    def key(self, *parts: Any) -> str:
        return blake2b(repr(parts).encode() + self._digests, digest_size=16).hexdigest()

    def take(self, key: str) -> dict[str, Any] | None:
        """What was added, if it is known. Each is returned once."""
        with self._lock:
            return self._known[key].pop(0) if self._known.get(key) else None

    def add(self, key: str, **values: Any) -> None:
        line = _with_sum({"round": self.round, "key": key, **values})
        with self._lock, open_in_place(self._path, "a", PRIVATE) as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def begin(self, number: int) -> None:
        """Begin the round of this number."""
        self.round = number
        newest = max(list_checkpoints(self._folder), key=checkpoint_step, default=None)
        if newest is not None and newest != self._seen and self._path.exists():
            self._seen, saved = newest, read_training_state(newest)["batches"]["round"]
            self._keep([row for row in self._rows() if row["round"] >= saved])

    def _keep(self, rows: list[dict[str, Any]]) -> None:
        with write_whole(self._path, on_disk=True) as file:
            file.touch(PRIVATE)
            file.write_text("".join(map(_with_sum, rows)))

    def _rows(self) -> list[dict[str, Any]]:
        """The lines that are as they were written. Others are left out with a remark: their calls are made again."""
        lines = self._path.read_bytes().splitlines(keepends=True) if self._path.exists() else []
        rows = [row for line in lines if (row := _row(line)) is not None]
        if other := len(lines) - len(rows):
            say("tools", f"{self._path}: {other} of {len(lines)} lines are cut or changed. Their calls are made again")
        return rows


def _with_sum(row: dict[str, Any]) -> str:
    """A line of the file, which ends with a checksum of the rest."""
    return json.dumps({**row, "sum": blake2b(json.dumps(row).encode(), digest_size=8).hexdigest()}) + "\n"


def _row(line: bytes) -> dict[str, Any] | None:
    """The row of a line that `_with_sum` wrote; None for any other."""
    try:
        row = json.loads(line)
        del row["sum"]
        return row if _with_sum(row).encode() == line else None
    except (ValueError, KeyError, TypeError, RecursionError):  # it was cut, or is not ours
        return None


@dataclass(frozen=True)
class TurnOutcome:
    """What follows a turn."""

    given: list[int] | None  # None: the episode is over
    messages: list[dict[str, Any]] = field(default_factory=list)
    reward: float | None = None
    errors: int = 0
    is_cut: bool = False


class Episodes:
    """The tools and the environment of a run. They are loaded when something asks for them, which a plan never does.

    Loading raises ValueError if a tool or the environment cannot be loaded, or the chat template cannot write their turns.
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


class Round:
    """The episodes of some prompts, one for each. `lean_ft.generation.sample` asks it for given tokens (`Replies`)."""

    def __init__(self, episodes: Episodes, prompts: Sequence[Prompt], numbers: Sequence[int], seed: int) -> None:
        """numbers: of the samples. Raises TrainingFailed if the environment's `reset` fails, or its prompt is too long."""
        self._all, self._prompts, self._numbers, self._seed = episodes, prompts, numbers, seed
        self._found = [Episode() for _ in prompts]
        self._starts = [0] * len(prompts)  # of the current turn in the ids
        self._pending = [TurnOutcome(None) for _ in prompts]  # whose tokens may not fit
        self._rewards: list[list[float]] = [[] for _ in prompts]
        self._outcomes: queue.SimpleQueue[tuple[int, TurnOutcome | BaseException]] = queue.SimpleQueue()
        self.asked = [self._begin(place, prompt) for place, prompt in enumerate(prompts)]

    def _begin(self, place: int, prompt: Prompt) -> Document:
        """The prompt of an episode, which the environment may change."""
        environment, episode = self._all.environment, self._found[place]
        if environment is None:
            return prompt.text
        row = prompt.columns | {"prompt": prompt.asked}
        # One seed for all completions of a prompt, whose rewards are compared.
        seed = blake2b(repr((self._seed, Path(prompt.place).name)).encode(), digest_size=4).digest()
        with failing(environment.name, "cannot be made"):
            episode.environment = environment.object(place)
        with failing(environment.name, f"failed in reset at {prompt.place}"):
            reset = partial(environment.reset, place, row, int.from_bytes(seed))
            seen = self._recorded(place, reset, prompt.ids)
            if seen is None:
                return prompt.text
            found = None if isinstance(seen, str) else as_chat(seen, "result of reset").messages
        cfg, chat = self._all.cfg, list(as_chat(prompt.asked, "prompt").messages)
        if found is None:
            chat[-1] = {**chat[-1], "content": f"{chat[-1]['content']}{seen}"}
        else:
            chat += found
        episode.prompt = chat
        if cfg.data.system and chat[0]["role"] not in SYSTEM_ROLES:
            chat = [{"role": "system", "content": cfg.data.system}, *chat]
        variables = json.loads(self._all.variables_of(prompt.columns))
        with failing(environment.name, f"failed in reset at {prompt.place}"):
            schemas = self._all.tools.schemas or None
            episode.asked, _ = self._all.tokenizer.render(chat, schemas, True, "all", variables)
        if len(episode.asked) > cfg.data.max_prompt_length:
            raise TrainingFailed(
                f"{prompt.place}: with the observation of environment={environment.name}, the prompt has {len(episode.asked)} "
                f"tokens, more than data.max_prompt_length={cfg.data.max_prompt_length}. Raise it, or return a shorter "
                "observation."
            )
        return Document.of(episode.asked)

    def _turns(self, place: int) -> ToolTurns:
        return self._all.turns_of(self._all.variables_of(self._prompts[place].columns))

    def ended(self, place: int, sample: Sample) -> None:
        """Read a turn, and begin to work on what follows it."""
        episode, environment, settings = self._found[place], self._all.environment, self._all.cfg.tools
        self._starts[place] += len(self._pending[place].given or [])
        episode.messages += self._pending[place].messages
        ids = sample.ids[self._starts[place] :]
        self._starts[place] = len(sample.ids)
        turns = self._turns(place)
        turn = turns.read(ids)
        episode.turns += 1
        steps = environment is not None and environment.has_steps and not turn.calls
        episode.is_cut = bool(turn.calls or steps) and episode.turns > settings.calls
        is_answered = sample.ended and not episode.is_cut
        if turn.calls and not is_answered:
            episode.messages.append(_message(Turn(turns.text(ids), [])))  # the calls are not made
        else:
            episode.messages.append(_message(turn))
        if not sample.ended:
            return
        if not is_answered or not (turn.calls or steps):
            self._outcomes.put((place, TurnOutcome(None)))
        else:
            episode.calls, episode.steps = episode.calls + len(turn.calls), episode.steps + steps
            work = self._step if steps else self._call
            Thread(target=self._try, args=(work, place, turn, ids, list(sample.ids)), daemon=True).start()

    def ready(self, wait: bool) -> dict[int, list[int] | None]:
        """What follows turns that have ended, by place; with `wait`, of at least one."""
        found: dict[int, list[int] | None] = {}
        with slow_calls_reported("a tool or the environment") if wait else nullcontext():
            self._collect(found, wait)
        return found

    def _collect(self, found: dict[int, list[int] | None], wait: bool) -> None:
        while True:
            try:
                # Rows that continue together are computed together, so a first result waits a moment for the others.
                place, outcome = self._outcomes.get(wait, timeout=0.01 if found else 0.1)
            except queue.Empty:
                if found or not wait:
                    return
                continue
            if isinstance(outcome, BaseException):
                raise outcome
            self._found[place].is_cut |= outcome.is_cut
            self._found[place].errors += outcome.errors
            self._rewards[place] += [] if outcome.reward is None else [outcome.reward]
            self._pending[place], found[place] = outcome, outcome.given

    def finish(self, samples: Sequence[Sample], keeps_environments: bool = True) -> list[Episode]:
        """Return the episodes with these ids. Environments cannot be sent to other processes."""
        for place, (episode, sample) in enumerate(zip(self._found, samples, strict=True)):
            vars(episode).update(vars(sample))
            episode.reward = self._reward(place)
            episode.ended = sample.ended and not episode.is_cut
            if not keeps_environments:
                episode.environment = None
        return self._found

    def _reward(self, place: int) -> float | None:
        """The environment's reward for an episode."""
        environment, episode = self._all.environment, self._found[place]
        if environment is None:
            return None
        if environment.has_steps:
            discount, rewards = self._all.cfg.generation.turn_discount, self._rewards[place]
            return sum(discount**turn * reward for turn, reward in enumerate(rewards)) if rewards else None
        with failing(environment.name, f"failed in get_reward at {self._prompts[place].place}"):
            try:
                return environment.reward(place)
            except TookTooLong as late:
                self._leave(place, "get_reward", late)
                episode.is_cut, episode.errors = True, episode.errors + 1
                return None

    def _leave(self, place: int, method: str, late: TookTooLong) -> None:
        """Warn about an environment that does not return, and drop it. Later rounds get a new one."""
        environment = self._all.environment
        assert environment is not None
        say("WARNING", f"environment={environment.name} in {method}: {late}. Its episode counts as cut")
        environment.leave(place)

    # In threads -------------------------------------------------------------------------------------------------------

    def _try(self, work: Callable[..., TurnOutcome], place: int, *arguments: Any) -> None:
        try:
            self._outcomes.put((place, work(place, *arguments)))
        except BaseException as error:
            self._outcomes.put((place, error))

    def _call(self, place: int, turn: Turn, ids: list[int], all_ids: list[int]) -> TurnOutcome:
        """Run the calls of a turn whose results are not recorded."""
        results, asked = self._all.results, self.asked[place].ids.tolist()
        keys = [results.key(self._seed, asked, self._numbers[place], all_ids, i) for i in range(len(turn.calls))]
        taken = {i: one for i, key in enumerate(keys) if (one := results.take(key)) is not None}
        known = {i: (one["result"], one["failed"]) for i, one in taken.items()}
        own = {method.__name__ for method in self._all.methods}

        def finished(i: int, result: str, failed: bool) -> None:
            if turn.calls[i].name not in own:  # an environment needs all calls for its state
                results.add(keys[i], result=result, failed=failed)

        environment = self._all.environment
        of_environment = {}
        if environment is not None:
            methods = environment.methods_of(self._found[place].environment)
            of_environment = {"methods": methods, "thread": environment.thread(place)}
        call = partial(self._all.tools.results, turn.calls, known, finished, **of_environment)
        acts = any(one.name in own for one in turn.calls)
        found = self._recorded(place, call, asked, all_ids) if acts else call()
        given = self._turns(place).reply(ids, turn.calls, [text for text, _ in found])
        said = [
            {"role": "tool", "name": call.name, "content": text}
            for call, (text, _) in zip(turn.calls, found, strict=True)
        ]
        return TurnOutcome(given, said, errors=sum(failed for _, failed in found))

    def _step(self, place: int, turn: Turn, ids: list[int], all_ids: list[int]) -> TurnOutcome:
        environment = self._all.environment
        assert environment is not None
        with failing(environment.name, f"failed in step at {self._prompts[place].place}"):
            step = partial(environment.step, place, turn.content)
            try:
                reply = Reply(*self._recorded(place, step, self.asked[place].ids.tolist(), all_ids))
            except TookTooLong as late:
                self._leave(place, "step", late)
                return TurnOutcome(None, errors=1, is_cut=True)
        if reply.done:
            return TurnOutcome(None, reward=reply.reward)
        said = [{"role": "user", "content": reply.observation}]
        return TurnOutcome(self._turns(place).observation(ids, said), said, reply.reward, int(reply.failed))

    def _recorded(self, place: int, act: Callable[[], Any], *ids: list[int]) -> Any:
        """What an act on the environment returns. With `state_dict`, a resumed run takes it and the state after it from
        its records."""
        environment = self._all.environment
        assert environment is not None
        if not environment.has_state:
            return act()
        key, where = self._all.results.key(self._seed, ids, self._numbers[place]), self._prompts[place].place
        if (known := self._all.results.take(key)) is not None:
            with failing(environment.name, f"failed in load_state_dict at {where}"):
                environment.load_state(place, known["state"])
            return known["found"]
        found = act()
        with failing(environment.name, f"failed in state_dict at {where}"):
            state = environment.state(place)
        self._all.results.add(key, found=found, state=state)
        return found


def _message(turn: Turn) -> dict[str, Any]:
    """A turn as a message. Malformed calls are in its content."""
    calls = [
        {"type": "function", "function": {"name": one.name, "arguments": one.arguments}}
        for one in turn.calls
        if not one.error
    ]
    return {"role": "assistant", "content": turn.content} | ({"tool_calls": calls} if calls else {})
