"""Episodes: completions of several turns, in which the model calls tools or acts in an environment.

After its prompt, an episode is one list of ids: sampled tokens, given tokens (the results of calls, or an observation),
sampled tokens, and so on. Nothing is rendered or tokenized again, so the trained tokens are the sampled ones. An episode
ends after a turn without a call, when the environment is done, or at a limit; then it counts as cut.

An environment has one of two forms:

    class Env:                                        class Env:
        def reset(self, row): ...                         def reset(self, **row): ...
        def step(self, action): ...                       def any_method(self, word: str) -> str: ...
                                                          def get_reward(self): ...

On the left, `action` is the text of a turn without calls, and `step` returns (observation, reward, done). On the right, the
public methods are tools: TRL's `environment_factory`. `reset` returns a text that is added to the last message of the
prompt, messages that follow it, or None.
"""

import asyncio
import inspect
import json
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from pathlib import Path
from typing import Any

from lean_ft.data import Prompt
from lean_ft.data.chats import read_variables
from lean_ft.data.formats import SYSTEM_ROLES, as_chat
from lean_ft.generation import Sample, Sampling
from lean_ft.settings import OnlineConfig
from lean_ft.system.run_directory import TRAINING_STATE_FILE
from lean_ft.system.user_functions import PASSED, file_digest, load_function
from lean_ft.system.whole_files import open_in_place, read_json, write_whole
from lean_ft.tokenizers import Passage, Tokenizer
from lean_ft.training.bad_steps import TrainingFailed

FILE = "tool_results.jsonl"


@dataclass
class Episode(Sample):
    """A completion of several turns."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    """The assistant's turns with their `tool_calls`, the results (role `tool`) and observations (role `user`)."""
    turns: int = 0
    calls: int = 0
    errors: int = 0
    """Calls whose result is an error message."""
    reward: float | None = None
    """The environment's."""
    asked: list[int] = field(default_factory=list)
    """The prompt's ids, if the environment changed the prompt."""
    prompt: Any = None
    """The prompt's messages, if the environment changed them."""
    environment: Any = None

    @property
    def told(self) -> dict[str, Any]:
        """What a round keeps."""
        return {name: getattr(self, name) for name in ("messages", "turns", "calls", "errors")}
