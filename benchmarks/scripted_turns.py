"""Episodes with two calls of a tool for compare_trl.py: both sides sample every token, and a script replaces it.

    python benchmarks/scripted_turns.py run grpo model.path=FOLDER ...    # `leanft run grpo ...` with the script

A model with random weights writes no calls. Both sides compute all logits and draw from them, and then take the token
of the script: twice some words and a call of `look_up`, then some words. The turns of all completions have the same
lengths, so both sides train on the same tokens and no row is padded. The tokenizer is trained on the chat template of
Qwen2.5, which TRL's package contains.
"""

import importlib.util
import json
import random
import sys
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from lean_ft.tools.schemas import json_schema

NUM_CALLS = 2
WORDS = ("sun", "hill", "river", "stone", "wind")
END = "<|im_end|>"
CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", END, "<tool_call>", "</tool_call>"]
FOUND = "You find the sun, the hill, the river, the stone and the wind. " * 2


def look_up(place: int) -> str:
    """Return what is written at a place.

    Args:
        place: The number of the place.
    """
    return FOUND


def letters(completions: list[list[dict[str, Any]]], **columns: Any) -> list[float]:
    """A cheap reward that differs between episodes."""
    return [float(sum(character.isalpha() for character in chat[-1]["content"])) for chat in completions]


def write_tokenizer(folder: Path) -> Path:
    """Write a byte-level tokenizer with the chat template into a folder, and return the folder."""
    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.origin is not None
    template = (Path(spec.origin).parent / "chat_templates" / "qwen2_5.jinja").read_text(encoding="utf-8")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=2000, initial_alphabet=alphabet, special_tokens=CONTROL_TOKENS[:3], show_progress=False
    )
    tokenizer.train_from_iterator([template, json.dumps(json_schema(look_up)), " ".join((FOUND, *WORDS))], trainer)
    tokenizer.add_tokens(CONTROL_TOKENS[3:])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": CONTROL_TOKENS[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps({**names, "chat_template": template}))
    return folder


def write_chat_rows(path: Path, num_rows: int, prompt_tokens: int, folder: Path) -> Path:
    """Write rows whose prompts have this number of tokens, with the tool's schema, and return the path."""
    from lean_ft import load_tokenizer

    tokenizer, schemas, draw = load_tokenizer(folder), [json_schema(look_up)], random.Random(0)
    rows = []
    for _ in range(num_rows):
        words, length = draw.choices(WORDS, k=prompt_tokens), sys.maxsize
        while length > prompt_tokens:
            words.pop()
            chat = [{"role": "user", "content": " ".join(words)}]
            length = len(tokenizer.apply_chat_template(chat, schemas, add_generation_prompt=True))
        assert length == prompt_tokens, "too few tokens for the tool's schema: raise --lengths"
        rows.append(json.dumps({"prompt": chat}) + "\n")
    path.write_text("".join(rows), encoding="utf-8")
    return path


def num_given(folder: Path) -> int:
    """The tokens after the calls of an episode, which are not sampled."""
    written = f"\n<|im_start|>user\n<tool_response>\n{FOUND}\n</tool_response>{END}\n<|im_start|>assistant\n"
    return NUM_CALLS * len(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(written).ids)


def scripted(folder: Path, sampled_tokens: int, num_completions: int) -> list[Iterator[int]]:
    """The sampled tokens of each completion of a round, and so of all rounds."""
    tokenizer, streams = Tokenizer.from_file(str(folder / "tokenizer.json")), list[Iterator[int]]()
    for number in range(num_completions):
        ids, draw = list[int](), random.Random(number)
        for turn in range(NUM_CALLS + 1):
            call = {"name": "look_up", "arguments": {"place": 10 * turn + number}}
            written = f"\n<tool_call>\n{json.dumps(call)}\n</tool_call>{END}" if turn < NUM_CALLS else END
            last = tokenizer.encode(written).ids
            size = sampled_tokens * (turn + 1) // (NUM_CALLS + 1) - len(ids) - len(last)
            words = tokenizer.encode(" ".join(draw.choices(WORDS, k=sampled_tokens))).ids
            assert 0 < size <= len(words), "too few tokens for the calls: raise --lengths"
            ids += [*words[:size], *last]
        streams.append(cycle(ids))
    return streams


def main(arguments: list[str]) -> None:
    """Run the command line of lean_ft. The sampled token of a row is the next one of the script."""
    from lean_ft.cli.main import run_command_line
    from lean_ft.generation import decoding

    given = dict(one.split("=", 1) for one in arguments if "=" in one)
    streams = scripted(
        Path(given["model.path"]), int(given["generation.max_new_tokens"]), int(given["generation.num_answers"])
    )
    choose = decoding.choose

    class NumberedKey(decoding.RowKey):
        def __init__(self, seed: int, prompt: bytes, sample: int) -> None:
            super().__init__(seed, prompt, sample)
            self._sample = sample

        def at(self, position: int) -> tuple[int, int]:
            return self._sample, super().at(position)[1]

    def choose_scripted(logits: Any, keys: Any, *others: Any) -> Any:
        ids, log_probs = choose(logits, keys, *others)  # the log-probabilities are not used in training
        return ids.new_tensor([next(streams[number]) for number in keys[:, 0].tolist()]), log_probs

    decoding.RowKey, decoding.choose = NumberedKey, choose_scripted
    run_command_line(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
