"""The tokenizer class that all recipes use: text and chats to ids, with a mask of the trained tokens."""

import json
import re
import shutil
from collections.abc import Collection, Sequence
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from lean_ft.settings.other_tools import table
from lean_ft.system.config_fields import end_ids
from lean_ft.system.foreign_values import JSON, MARKERS, plain
from lean_ft.system.spelling import did_you_mean
from lean_ft.system.whole_files import read_json, write_json
from lean_ft.tokenizers.chat_template import LITERAL_END, LITERAL_START, ROLES, ChatTemplate, generation_blocks
from lean_ft.tokenizers.forms import Forms
from lean_ft.tokenizers.media import Media
from lean_ft.tokenizers.passages import Passage, Runs, spans_of, without, without_markers
from lean_ft.tokenizers.template_files import write_templates
from lean_ft.tokenizers.tokenizer_json import TokenizerJson
from lean_ft.tokenizers.turns import RenderedChat, RenderedTurn, outside_literals
from lean_ft.tokenizers.vocabulary import Encoding, Vocabulary, any_of

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
TrainOn = Literal["completion", "assistant", "last", "all"]
Messages = list[dict[str, Any]]
_LITERALS = re.compile(f"{LITERAL_START}(.*?){LITERAL_END}", re.DOTALL)


class BatchEncoding(dict[str, Any]):
    """`input_ids` and `attention_mask` of one or more texts, as items and as attributes."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"no attribute {name}; an encoding has {', '.join(self)}")
        return self[name]


class SpecialTokens(NamedTuple):
    """Special tokens as chat templates see them, by name, and the ids that lean_ft writes."""

    names: dict[str, str]
    bos_id: int | None
    eos_id: int | None
    pad_id: int


class TokenizerFiles(NamedTuple):
    """The files that a tokenizer was read from, and is saved from."""

    folder: Path
    files: list[Path]
    template: Path | None = None


class Tokenizer:
    """Text and chats to ids and back. Returned by `load_tokenizer`.

    Also has transformers' names: a call, `len`, `apply_chat_template`, `eos_token_id`. `bos_id` and `eos_id` are None
    if the model has no such token. `pad_id` is always an id and may equal `eos_id`: padding is recognized by position,
    never by id.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        special: SpecialTokens,
        chat_templates: dict[str, str],
        files: TokenizerFiles,
        context_length: int | None = None,
    ):
        self._vocabulary = vocabulary
        self._templates = {name: Forms(ChatTemplate(source)) for name, source in chat_templates.items()}
        self.vocab_size = vocabulary.size  # one more than the largest id
        self.added_tokens = vocabulary.added  # tokens that are matched before the text is split, with their ids
        self.control_tokens = vocabulary.control  # added tokens that only a chat template may write
        self.adds_bos, self.adds_eos = vocabulary.adds_bos, vocabulary.adds_eos  # whether the model expects them
        self.special_tokens = special.names  # `bos_token`, `eos_token` and so on, as chat templates see them
        self.chat_templates = chat_templates  # Jinja sources by name; `default` is for chats without tools
        self.chat_template = chat_templates.get("default")
        # Absolute, since a run saves the files again, and may change the current folder.
        self.template_file = files.template and files.template.absolute()  # replaces the folder's, or None
        self.bos_id, self.eos_id, self.pad_id = special.bos_id, special.eos_id, special.pad_id
        self.folder, self.files = files.folder.absolute(), [file.absolute() for file in files.files]
        self.context_length = context_length  # tokens of the longest text that the model was made for, if known
        self.chat_template_kwargs: dict[str, Any] = {}  # further variables of the chat template; a call's own win
        self.media: tuple[Media, ...] = ()  # how content parts that are not text become tokens; (): texts alone
        self._new_pad_token: str | None = None
        self._control = any_of(vocabulary.control)
        self._written_by_template = outside_literals(vocabulary.added)

    def __len__(self) -> int:
        return self.vocab_size

    bos_token_id = property(attrgetter("bos_id"))
    eos_token_id = property(attrgetter("eos_id"))
    pad_token_id = property(attrgetter("pad_id"))

    def __call__(
        self, text: str | Sequence[str], add_special_tokens: bool = True, return_tensors: Literal["pt"] | None = None
    ) -> BatchEncoding:
        """Encode one or more texts. `return_tensors="pt"` gives tensors (B, T), padded on the right."""
        is_single = isinstance(text, str)
        ids = [self.encode(part, add_special_tokens) for part in ([text] if is_single else text)]
        if return_tensors is None:
            masks = [[1] * len(part) for part in ids]
            return BatchEncoding(
                input_ids=ids[0] if is_single else ids, attention_mask=masks[0] if is_single else masks
            )
        import torch  # here, since processes that only tokenize do not need it

        longest = max(map(len, ids))
        padded = [part + [self.pad_id] * (longest - len(part)) for part in ids]
        masks = [[1] * len(part) + [0] * (longest - len(part)) for part in ids]
        return BatchEncoding(
            input_ids=torch.tensor(padded, dtype=torch.long), attention_mask=torch.tensor(masks, dtype=torch.long)
        )

    def apply_chat_template(
        self,
        messages: Messages,
        tools: list[dict[str, Any]] | None = None,
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        **template_kwargs: JSON,
    ) -> list[int] | str:
        """Return a chat as ids, or as text with `tokenize=False`. `render` also returns the mask of trained tokens."""
        full = self._rendered(messages, tools, add_generation_prompt, template_kwargs).full
        text, [literal] = without_markers(full, [[match.span(1) for match in _LITERALS.finditer(full)]])
        return self.tokenize([Passage(text, [], literal)])[0][0].tolist() if tokenize else text

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of `text`, in which control tokens are recognized.

        `add_special_tokens` adds the bos and eos that the model expects, unless the text has them already.
        """
        if add_special_tokens and isinstance(self._vocabulary, TokenizerJson):
            ids = self._vocabulary.encode_with_special_tokens(text)
            return ids[1:] if ids[:2] == [self.bos_id] * 2 and self.adds_bos else ids
        ids = self._vocabulary.encode_ids(text)
        if add_special_tokens and self.adds_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        if add_special_tokens and self.adds_eos and self.eos_id is not None and ids[-1:] != [self.eos_id]:
            ids.append(self.eos_id)
        return ids

    def id_of_word(self, word: str) -> int | None:
        """Return the id of a word of one token, without bos and eos; None for a word of several. A plan gives 0."""
        ids = self.encode(word)
        return ids[0] if len(ids) == 1 else None

    @cached_property
    def around(self) -> tuple[np.ndarray, np.ndarray]:
        """The ids, int32, that the model expects before and after every text: those of the post-processor in
        tokenizer.json, else bos and eos. Qwen3-Embedding ends texts with its pad token.

        Raises ValueError if the post-processor changes the text's own ids."""
        if isinstance(self._vocabulary, TokenizerJson):
            before, after = self._vocabulary.around()
        else:
            before = [self.bos_id] if self.adds_bos and self.bos_id is not None else []
            after = [self.eos_id] if self.adds_eos and self.eos_id is not None else []
        return np.array(before, dtype=np.int32), np.array(after, dtype=np.int32)

    def fitted(self, ids: np.ndarray, max_length: int | None, side: Literal["right", "left"] = "right") -> np.ndarray:
        """Put the ids of a text between those of `around`. If there are more than `max_length` then, the text loses
        ids on its `side`. Raises ValueError if none of them would be left."""
        before, after = self.around
        room = len(ids) if max_length is None else max_length - len(before) - len(after)
        if room < min(1, len(ids)):
            raise ValueError(
                f"max_length={max_length} has no room for a text: the tokenizer adds {len(before) + len(after)} tokens "
                f"to each. Set it to at least {len(before) + len(after) + 1}."
            )
        kept = ids[:room] if side == "right" else ids[max(0, len(ids) - room) :]
        return np.concatenate((before, kept, after))

    def encode_texts(
        self, texts: Sequence[str], max_length: int | None = None, side: Literal["right", "left"] = "right"
    ) -> list[np.ndarray]:
        """Return the ids, int32, of each text, with those of `around`: what transformers' tokenizers return with
        `truncation=True`. Control tokens are recognized. Raises ValueError as `fitted` does."""
        encodings = self._vocabulary.encode(list(texts), [[] for _ in texts])
        return [self.fitted(encoding.ids, max_length, side) for encoding in encodings]

    def encoding(self, text: str) -> Encoding:
        """Return the ids of `text` as `encode` does, without bos and eos, and the characters that each id covers."""
        return self._vocabulary.encode([text], [[]])[0]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of `ids`."""
        return self._vocabulary.decode(list(map(int, ids)), skip_special_tokens)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token as spelled in the tokenizer's file, or None."""
        return self._vocabulary.token_id(token)

    def token_text(self, token_id: int) -> str:
        """Return a token as spelled in the tokenizer's file, or an empty string if there is no such id."""
        return self._vocabulary.id_token(token_id) or ""

    def render(
        self,
        messages: Messages,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        train_on: TrainOn = "assistant",
        template_kwargs: dict[str, Any] | None = None,
    ) -> tuple[list[int], list[bool]]:
        """Return the ids of a chat and a mask of trained tokens: the assistant's text and the token that ends its turn.

        Each message is a dict with `role`, `content`, and any other keys that the chat template reads. Control tokens
        inside a message are ordinary text. If the chat template ends a turn differently when other messages follow
        (gpt-oss: `<|end|>` instead of `<|return|>`), that token is not trained. If the template writes no token after
        the last answer, one is
        appended: the first token of the next turn, or eos. Raises ValueError if there is no chat template, if it
        rejects the messages, or if a turn cannot be located.
        """
        passage = self.passage(messages, tools, add_generation_prompt, train_on, template_kwargs=template_kwargs)
        ids, mask = self.tokenize([passage])[0]
        return ids.tolist(), mask.tolist()

    def continued(
        self,
        messages: Messages,
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> Passage:
        """Return a chat up to the end of its last message's text, which a completion continues.

        Raises ValueError as `render` does, and if the last message has no text or the chat template changes it.
        """
        tag = "CONTINUE_THIS_MESSAGE"
        if not isinstance(text := messages[-1].get("content"), str):
            raise ValueError(f"the last message has no text to continue, but {text!r:.40}. Give its `content` as text.")
        tagged = [
            *messages[:-1],
            {**messages[-1], "content": f"{text}{tag} "},
        ]  # the space shows whether texts are stripped
        passage = self.passage(tagged, tools, train_on="all", template_kwargs=template_kwargs)
        before, tag_in_text, after = passage.text.rpartition(tag)
        if not tag_in_text or text.strip() not in before:
            raise ValueError("the chat template leaves out a part of the last message, so it cannot be continued.")
        before = before if after.startswith(" ") else before.rstrip()
        literal = [span for span in passage.literal if span[1] <= len(before)]
        return Passage(before, [], literal)

    def passage(
        self,
        messages: Messages,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        train_on: TrainOn = "assistant",
        untrained: Collection[int] = (),
        template_kwargs: dict[str, Any] | None = None,
    ) -> Passage:
        """Return the text of a chat with its trained spans; see `render`. The messages in `untrained` are not
        trained."""
        chat = self._rendered(messages, tools, add_generation_prompt, template_kwargs)
        turns = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
        wanted = [i for i in (turns[-1:] if train_on == "last" else turns) if (i in untrained) == (train_on == "all")]
        ends_trained = turns[-1:] == [len(messages) - 1] and turns[-1] not in untrained and not add_generation_prompt
        assistant_turns, end, add_eos, is_endless = list[RenderedTurn](), "", False, False
        if self._template(tools).template.marks_generation:
            spans = spans_of(wanted, turns, generation_blocks(chat.full))
            if ends_trained and train_on != "all":
                last_text = MARKERS.sub("", chat.full[slice(*spans[-1])]) if spans else ""
                is_endless = not last_text.rstrip().endswith(tuple(self.added_tokens))
        else:
            rendered = chat
            chat, assistant_turns = rendered.turns(wanted)
            spans = [turn.span for turn in assistant_turns]
            if ends_trained and rendered.is_open(assistant_turns[-1] if train_on != "all" else None):
                end = rendered.next_token()
                add_eos = not end
                is_endless = add_eos and self.eos_id is None
        if train_on == "all":
            spans = without([(0, len(chat.full))], spans)
        literal = [match.span(1) for match in _LITERALS.finditer(chat.full)]
        text, [trained, literal] = without_markers(chat.full, [spans, literal])
        return Passage(
            text + end,
            trained + [(len(text), len(text) + len(end))] * bool(end),
            literal,
            add_eos=add_eos,
            num_rewritten=sum(not turn.is_ended for turn in assistant_turns),
            num_other_prompts=sum(not turn.follows_prompt for turn in assistant_turns),
            is_endless=is_endless,
            num_empty=sum(_is_empty(messages[i]) for i in turns if i not in untrained),
            unread=chat.unread,
            developer_as_system=chat.developer_as_system,
        )

    def _rendered(
        self,
        messages: Messages,
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        template_kwargs: dict[str, Any] | None,
    ) -> RenderedChat:
        """Render a chat. Raises ValueError if the template rejects it, leaves out a text of it, or treats a typed
        control token as its own."""
        messages, tools = plain(list(messages), "the messages"), plain(tools, "the tools")
        kwargs = self.chat_template_kwargs | (template_kwargs or {})
        self.check_template_kwargs(kwargs)
        variables = self.special_tokens | kwargs
        forms = self._template(tools)
        for number, message in enumerate(messages, start=1):
            if (role := str(message.get("role"))) not in forms.template.roles:
                meant = table("roles").get(role)
                hint = f" Did you mean '{meant}'?" if meant in ROLES else did_you_mean(role, ROLES)
                raise ValueError(
                    f"message {number}: the chat template has no role {role!r}; expected one of "
                    f"{', '.join(ROLES)}.{hint}"
                )
        chat = forms.whole(messages, tools, add_generation_prompt, variables)
        marked_messages, num_literals = self._mark_literals(chat.messages)
        marked_tools, num_tool_literals = self._mark_literals(tools)

        def render(part: Sequence[dict[str, Any]], prompt: bool) -> str:
            return forms.template.render(list(part), marked_tools, prompt, variables)

        full = chat.text
        if num_literals + num_tool_literals:
            full = render(marked_messages, add_generation_prompt)
            typed = _LITERALS.findall(full)
            if (
                MARKERS.sub("", chat.text) != MARKERS.sub("", full)
                or full.count(LITERAL_START) != len(typed)
                or not self.control_tokens.issuperset(typed)
            ):
                raise ValueError(
                    "a message contains a control token, and the chat template treats it as its own. Remove the "
                    "control token from the message."
                )
        added, control = self._written_by_template, self.control_tokens
        notes = chat.unread, chat.developer_as_system
        return RenderedChat(full, add_generation_prompt, marked_messages, render, added, control, *notes)

    @cached_property
    def turn_ends(self) -> frozenset[int]:
        """Ids of the tokens that end an assistant's turn in the chat template; empty without a template.

        The model learns them as the end of an answer or a tool call, so generation stops at each of them.
        """
        call = {"type": "function", "id": "call00001", "function": {"name": "f", "arguments": {"x": "1"}}}
        question, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}
        called = {"role": "assistant", "content": "", "tool_calls": [call]}
        result = {"role": "tool", "name": "f", "content": "1", "tool_call_id": "call00001"}
        ends = set[str]()
        for turn, follower in ((answer, question), (called, result)):
            try:
                passages = [self.passage([question, turn]), self.passage([question, turn, follower])]
            except ValueError:  # no chat template, or it rejects such a chat
                continue
            if passages[0].add_eos:  # the template writes no token there, only perhaps one that ends a tool call
                continue
            last, earlier = (self._closing_tokens(passage) for passage in passages)
            # Phi-3 writes `<|end|>` in both, and eos after the last turn. gpt-oss also writes `<|end|>` inside of a
            # turn.
            ends |= {*last[:1], *(token for token in earlier[:1] if token in last and not passages[1].num_rewritten)}
        return frozenset(self.added_tokens[token] for token in ends)

    def _closing_tokens(self, passage: Passage) -> list[str]:
        """Return the added tokens at the end of a passage's trained text, the last one first."""
        tokens = list[str]()
        text = "".join(passage.text[start:end] for start, end in passage.trained).rstrip()
        while token_at_end := max((token for token in self.added_tokens if text.endswith(token)), key=len, default=""):
            tokens.append(token_at_end)
            text = text.removesuffix(token_at_end).rstrip()
        return tokens

    def tokenize(self, passages: Sequence[Passage]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return (ids int32, trained bool) of each passage. Each text is encoded whole."""
        encodings = self._vocabulary.encode([p.text for p in passages], [p.literal for p in passages])
        tokenized = []
        for passage, encoding in zip(passages, encodings, strict=True):
            ids, trained = encoding.ids, encoding.touches(passage.trained)
            for start, end in passage.literal:
                token = passage.text[start:end]
                if self.added_tokens[token] in ids[encoding.touches([(start, end)])]:
                    raise ValueError(
                        f"a message contains the control token {token!r}, which this tokenizer cannot encode as "
                        "ordinary text. Remove it from the message."
                    )
            bos_id = self.bos_id if passage.add_bos and self.adds_bos else None
            if bos_id is not None and (len(ids) == 0 or ids[0] != bos_id):
                ids, trained = np.insert(ids, 0, bos_id), np.insert(trained, 0, False)
            if passage.add_eos and self.eos_id is not None:
                if len(ids) == 0 or ids[-1] != self.eos_id:
                    ids, trained = np.append(ids, np.int32(self.eos_id)), np.append(trained, True)
                trained[-1] = True
            for runs in passage.runs:
                ids, trained = self._with_repeated_tokens(ids, trained, runs)
            tokenized.append((ids.astype(np.int32, copy=False), trained))
        return tokenized

    def _with_repeated_tokens(self, ids: np.ndarray, trained: np.ndarray, runs: Runs) -> tuple[np.ndarray, np.ndarray]:
        """Repeat the token of `runs`, which is not trained."""
        is_repeated = ids == self.token_id(runs.token)
        if is_repeated.sum() != len(runs.lengths):
            raise ValueError(
                f"the text has the {runs.unit} token {runs.token} {is_repeated.sum()} times, and its {runs.unit}s have "
                f"it {len(runs.lengths)} times. Remove the token from the messages, or set data.chat_template to a "
                "template that does not write it."
            )
        counts = np.ones(len(ids), dtype=np.int64)
        counts[is_repeated] = runs.lengths
        return np.repeat(ids, counts), np.repeat(trained & ~is_repeated, counts)

    def pad_with(self, token: str) -> None:
        """Use a control token for padding instead of the folder's pad token, also in saved files.

        Raises ValueError if there is no such control token.
        """
        if token not in self.control_tokens:
            raise ValueError(
                f"pad_token={token!r} is not a control token of this "
                f"tokenizer.{did_you_mean(token, self.control_tokens)} Choose one that does not end a turn: "
                f"{', '.join(sorted(self.control_tokens))[:400]}."
            )
        self._new_pad_token, self.pad_id = token, self.added_tokens[token]

    def save(self, path: str | Path) -> None:
        """Copy the tokenizer's files into the folder `path`. They change only if `pad_with` was called, or another chat
        template replaced the folder's.

        In a model's folder, add the ids that end a turn to generation_config.json, so that other programs stop there
        too.
        """
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        for file in self.files:
            target = folder / file.relative_to(self.folder)  # named templates are in a subfolder
            target.parent.mkdir(exist_ok=True)
            if not (target.exists() and target.samefile(file)):
                shutil.copyfile(file, target)
        if self.template_file is not None:
            write_templates(folder, self.chat_templates)
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            if self._new_pad_token is not None and (folder / name).is_file():
                config = json.loads((folder / name).read_text(encoding="utf-8"))
                write_json(folder / name, config | {"pad_token": self._new_pad_token})
        self._save_turn_ends(folder)

    def _save_turn_ends(self, folder: Path) -> None:
        generation_config = folder / "generation_config.json"
        if not (folder / "config.json").is_file() or not self.turn_ends:
            return
        ends = end_ids(folder)
        if missing := sorted(self.turn_ends.difference(ends)):
            settings = read_json(generation_config) or {"bos_token_id": self.bos_id}
            write_json(generation_config, settings | {"eos_token_id": ends + missing})

    @cached_property
    def template_names(self) -> frozenset[str]:
        """All words in the chat templates, such as variables and keys of messages."""
        return frozenset(re.findall(r"\w+", "\n".join(self.chat_templates.values())))

    def check_template_kwargs(self, kwargs: dict[str, Any], known: Collection[str] | None = None) -> None:
        """Raise ValueError for variables that a chat template must not get, or that are not in `known`."""
        if not kwargs:
            return
        reserved = {"messages", "tools", "add_generation_prompt", *NAMED_TOKENS, *self.special_tokens}
        for name in kwargs:
            if name in reserved or not name.isidentifier():
                raise ValueError(
                    f"chat_template_kwargs.{name}: expected the name of a variable of the chat template other than "
                    f"{', '.join(sorted(reserved))}. Remove it."
                )
            if known is not None and name not in known:
                reason = "the chat template does not mention it" if known else "the chat template is not used"
                raise ValueError(f"chat_template_kwargs.{name}: {reason}. Remove it.")
        if self._mark_literals(plain(kwargs, "chat_template_kwargs"))[1]:
            raise ValueError(f"chat_template_kwargs {kwargs!r:.80} has a control token of this tokenizer. Remove it.")

    def _template(self, tools: list[dict[str, Any]] | None) -> Forms:
        if tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" in self._templates:
            return self._templates["default"]
        named = f" named `default` (it has {', '.join(self._templates)})" if self._templates else ""
        raise ValueError(
            f"this tokenizer has no chat template{named}, so it cannot encode messages. Use the instruction-tuned "
            "version of the model, set data.chat_template=FILE to a Jinja chat template, or give the data as "
            "prompt/completion or text."
        )

    def _mark_literals(self, value: Any) -> tuple[Any, int]:
        """Put literal markers around the control tokens in the texts of a plain value, names included; also return
        their number."""
        num_literals = 0

        def marked(value: Any) -> Any:
            nonlocal num_literals
            if isinstance(value, str):
                if self._control.search(value):
                    value, number = self._control.subn(f"{LITERAL_START}\\g<0>{LITERAL_END}", value)
                    num_literals += number
                return value
            if isinstance(value, dict):
                return {marked(name): marked(inner) for name, inner in value.items()}
            return [marked(inner) for inner in value] if isinstance(value, list) else value

        return marked(value), num_literals


def _is_empty(message: dict[str, Any]) -> bool:
    values = [value for name, value in message.items() if name != "role"]
    return not any(value.strip() if isinstance(value, str) else value for value in values)
