"""Ids and special tokens equal those of transformers on the same files; the context length is the model card's."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, LlamaTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.tokenization_utils_base import generate_merges

from lean_ft.gguf.splitting import LLAMA3_PATTERN
from lean_ft.hub.paths import resolve_model_path
from lean_ft.tokenizers import load_tokenizer
from lean_ft.tokenizers.loading import context_length
from lean_ft.tokenizers.tiktoken_model import llama3_control_tokens

MakeFolder = Callable[..., Path]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WITH_CONTROL = ["<|im_start|>user\nhi <|im_end|>\n", "a<|endoftext|>b <think> c</think>", "x <|im_end|>"]


class TestTokenizerJson:
    def test_ids_and_decoding_equal_transformers(self, byte_level, make_folder: MakeFolder, texts):
        folder = make_folder(byte_level, eos_token="<|im_end|>", pad_token="<|endoftext|>")
        ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
        for text in texts + WITH_CONTROL:
            for special in (False, True):
                ids = ours.encode(text, add_special_tokens=special)
                assert ids == theirs(text, add_special_tokens=special)["input_ids"], text
            for skip in (False, True):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
        assert ours.vocab_size == len(theirs)

    @pytest.mark.parametrize("digits", [True, False], ids=["as SmolLM2", "as GPT-2"])
    def test_a_vocabulary_without_some_bytes_drops_them_as_transformers_does(
        self, make_folder: MakeFolder, texts, digits
    ):
        made = HFTokenizer(models.BPE())
        whole = pre_tokenizers.ByteLevel(add_prefix_space=False)
        steps = [pre_tokenizers.Digits(individual_digits=True), whole]
        made.pre_tokenizer = pre_tokenizers.Sequence(steps) if digits else whole
        made.decoder = decoders.ByteLevel()
        control = ["<|im_start|>", "<|im_end|>"]
        trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=control, show_progress=False)
        made.train_from_iterator(["How many? Tom has 48/2 = 24 apples, no more.\nuser assistant"], trainer)
        folder = make_folder(made, eos_token="<|im_end|>", chat_template=CHATML)
        ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
        for text in [*texts, *WITH_CONTROL]:
            ids = ours.encode(text)
            assert ids == theirs(text)["input_ids"], text
            assert ours.decode(ids) == theirs.decode(ids)
            question = {"role": "user", "content": text}
            messages = [question, {"role": "assistant", "content": f"Tom has {text.replace('<|', '')} apples"}]
            ids, mask = ours.render(messages)
            if "<|" not in text:  # control tokens in a message are text here
                assert ids == theirs.apply_chat_template(messages)["input_ids"]
            start, end = mask.index(True), len(mask) - mask[::-1].index(True)
            assert all(mask[start:end]) and sum(mask) == end - start
            answer = theirs.decode(ids[start:end])
            assert answer.startswith("Tom has ") and answer.endswith(" apples<|im_end|>")

    @pytest.mark.parametrize("config", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
    def test_word_start_marks_and_bos_equal_transformers(self, word_start, make_folder: MakeFolder, texts, config):
        folder = make_folder(word_start, bos_token="<s>", eos_token="</s>", unk_token="<unk>", **config)
        ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
        for text in [*texts, "a<s>b</s> c"]:
            for special in (False, True):
                assert ours.encode(text, special) == theirs(text, add_special_tokens=special)["input_ids"], text

    def test_tokens_that_only_the_config_names_get_transformers_ids(self, byte_level, make_folder: MakeFolder):
        size = byte_level.get_vocab_size()
        declared = {
            str(size + 1): {"content": "<|late|>", "special": True, "normalized": False},
            str(size): {"content": "<early>", "special": False, "normalized": False, "lstrip": True},
        }
        folder = make_folder(
            byte_level,
            added_tokens_decoder=declared,
            pad_token="<|pad|>",
            eos_token="<|im_end|>",
            extra_special_tokens=["<|extra|>"],
        )
        ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
        for text in ("x <early> y<|late|>z", "<|pad|>", "a <|extra|> b"):
            assert ours.encode(text) == theirs(text)["input_ids"]
        assert ours.pad_id == theirs.pad_token_id
        assert ours.vocab_size == len(theirs)

    def test_an_id_that_the_file_cannot_give_is_refused(self, byte_level, make_folder: MakeFolder):
        folder = make_folder(byte_level, added_tokens_decoder={"5000": {"content": "<|far|>", "special": True}})
        with pytest.raises(ValueError, match=r"'<\|far\|>' the id 5000.*same model"):
            load_tokenizer(folder)

    def test_truncation_and_padding_saved_in_the_file_are_off(self, byte_level, make_folder: MakeFolder):
        limited = HFTokenizer.from_str(byte_level.to_str())
        limited.enable_truncation(max_length=4)
        limited.enable_padding(length=50)
        text = "one two three four five six seven eight"
        assert load_tokenizer(make_folder(limited)).encode(text) == byte_level.encode(text).ids


# Scripts, emoji with joiners, runs of many kinds of space, code, control tokens.
PARTS = st.sampled_from(
    [
        *("<|im_start|>", "<|im_end|>", "<think>", "don't", "x_1=[i**2]", "12345", "你好", "مرحبا"),
        *("नमस्ते", "İ", "ﬁ", "½"),
        *("é", "👩\u200d👩\u200d👧\u200d👦", "🦙", " ", "   ", "\t", "\n\n", "\xa0", "\u3000", "\u200b"),
    ]
)
TEXT = st.lists(PARTS | st.text(st.characters(exclude_categories=["Cs"]), max_size=8), max_size=12).map("".join)


@pytest.fixture(scope="module")
def both(byte_level, make_folder: MakeFolder):
    """Our tokenizer and transformers', of one folder."""
    folder = make_folder(byte_level, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    return load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)


def test_the_names_that_transformers_uses(byte_level, make_folder: MakeFolder):
    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    template = (
        "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}{{ '>' if add_generation_prompt }}"
    )
    folder = make_folder(byte_level, chat_template=template, **special)
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder, padding_side="right")
    assert len(ours) == len(theirs)
    for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
        assert getattr(ours, name) == getattr(theirs, name) is not None
    for text in ("One more.", ["One more.", "and 两"], [""]):
        assert dict(ours(text)) == {name: theirs(text)[name] for name in ("input_ids", "attention_mask")}
        own, expected = ours(text, return_tensors="pt"), theirs(text, return_tensors="pt", padding=True)
        assert own.input_ids.tolist() == expected.input_ids.tolist()
        assert own.attention_mask.tolist() == expected.attention_mask.tolist()
    with pytest.raises(AttributeError, match="no attribute token_type_ids; an encoding has input_ids, attention_mask"):
        _ = ours("a").token_type_ids
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for asked in (True, False):
        expected = theirs.apply_chat_template(chat, add_generation_prompt=asked, return_dict=False)
        assert ours.apply_chat_template(chat, add_generation_prompt=asked) == expected
        text = theirs.apply_chat_template(chat, add_generation_prompt=asked, tokenize=False)
        assert ours.apply_chat_template(chat, add_generation_prompt=asked, tokenize=False) == text


@pytest.mark.parametrize("number", [50, pytest.param(150, marks=pytest.mark.long)])
def test_ids_of_any_text_equal_transformers(both, number: int):
    @settings(max_examples=number, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(text=TEXT)
    def check(text: str):
        ours, theirs = both
        ids = ours.encode(text, add_special_tokens=True)
        assert ids == theirs(text)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids)

    check()


@pytest.mark.parametrize("name", ["bytelevel_bpe_tokenizer.json", "llama2_sentencepiece.model", "tiktoken_small.model"])
def test_real_tokenizers_on_real_text(name: str, shared_data: Path, tmp_path: Path, texts):
    """Ids are those of the library that made each file. benchmarks/tokenizers_gsm8k.py compares all of GSM8K."""
    file = shared_data / "tokenizers" / name
    shutil.copy(file, tmp_path / ("tokenizer" + file.suffix))
    ours = load_tokenizer(tmp_path)
    if file.suffix == ".json":
        theirs = HFTokenizer.from_file(str(file))
        encode, decode = (lambda text: theirs.encode(text).ids), theirs.decode
    elif name.startswith("llama2"):
        from sentencepiece import SentencePieceProcessor

        theirs = SentencePieceProcessor(model_file=str(file))
        encode, decode = theirs.encode, theirs.decode
    else:
        import tiktoken
        from tiktoken.load import load_tiktoken_bpe

        ranks = load_tiktoken_bpe(str(file))
        theirs = tiktoken.Encoding("test", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens={})
        encode, decode = theirs.encode, theirs.decode
    with (shared_data / "gsm8k_train.jsonl").open(encoding="utf-8") as rows:
        lines = list(rows)[::200]
    for text in [*texts, *("\n".join(map(str, json.loads(line).values())) for line in lines)]:
        ids = ours.encode(text)
        assert ids == encode(text)
        assert ours.decode(ids) == decode(ids)


class TestSentencePiece:
    @pytest.fixture
    def model(self, shared_data: Path) -> Path:
        return shared_data / "tokenizers" / "llama2_sentencepiece.model"

    @pytest.mark.first
    @pytest.mark.parametrize("legacy", [False, True])
    def test_control_tokens_equal_transformers(self, model: Path, make_folder: MakeFolder, legacy: bool):
        theirs = llama_tokenizer(model, legacy=legacy)
        ours = load_tokenizer(make_folder(model, legacy=legacy, tokenizer_class="LlamaTokenizer"))
        # Without a space after a control token, where transformers 5 differs from SentencePiece's word-start mark.
        for text in ["<s>x</s>y <s>z", "hi<s>there</s>", "<s>[INST] Привет [/INST] 😀 ok</s>", "a<unk>b"]:
            ids = theirs(text, add_special_tokens=False)["input_ids"]
            assert ours.encode(text) == ids, text
            for skip in (False, True):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)

    @pytest.mark.first
    @pytest.mark.parametrize("legacy", [False, True])
    def test_no_text_begins_with_a_mark_if_add_prefix_space_is_false(
        self, model: Path, make_folder: MakeFolder, texts, legacy: bool
    ):
        theirs = llama_tokenizer(model, legacy=legacy, add_prefix_space=False)
        ours = load_tokenizer(
            make_folder(model, legacy=legacy, add_prefix_space=False, tokenizer_class="LlamaTokenizer")
        )
        assert ours.encode("Hello") != load_tokenizer(make_folder(model)).encode("Hello")
        for text in [*texts, "Hello", " Hello", "  two", "hi<s>there</s> x", "a<unk>b"]:
            ids = theirs(text, add_special_tokens=False)["input_ids"]
            assert ours.encode(text) == ids, text
            for skip in (False, True):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ({"add_prefix_space": "no"}, "add_prefix_space is 'no'; expected true, false or null"),
            (
                {"sp_model_kwargs": {"enable_sampling": True}},
                "sp_model_kwargs is .* not supported beside tokenizer.model",
            ),
            ({"do_lower_case": True}, "do_lower_case is True, which is not supported"),
        ],
    )
    def test_what_would_change_ids_is_refused(self, model: Path, make_folder: MakeFolder, config: dict, message: str):
        with pytest.raises(ValueError, match=message):
            load_tokenizer(make_folder(model, **config))

    def test_special_tokens(self, model: Path, make_folder: MakeFolder, texts):
        plain = load_tokenizer(make_folder(model))
        assert (plain.bos_id, plain.eos_id, plain.pad_id, plain.vocab_size) == (1, 2, 2, 32000)
        for text in texts:
            ids = plain.encode(text)
            assert plain.encode(text, add_special_tokens=True) == [1, *ids]
            assert plain.decode(ids) == text

    def test_added_tokens(self, model: Path, make_folder: MakeFolder):
        decoder = {
            "32000": {"content": "<|im_end|>", "special": True, "normalized": False},
            "32001": {"content": "<eats>", "special": True, "lstrip": True, "rstrip": True},
        }
        tokenizer = load_tokenizer(make_folder(model, added_tokens_decoder=decoder, eos_token="<|im_end|>"))
        assert (tokenizer.eos_id, tokenizer.vocab_size) == (32000, 32002)
        assert tokenizer.encode("Hello<|im_end|>") == [15043, 32000]
        assert tokenizer.encode("Hello  <eats>  ") == [15043, 32001]

    def test_an_id_that_the_model_has_elsewhere_is_refused(self, model: Path, make_folder: MakeFolder):
        decoder = {"7": {"content": "</s>", "special": True}}
        with pytest.raises(ValueError, match="the id 7, but in this model its id is 2"):
            load_tokenizer(make_folder(model, added_tokens_decoder=decoder))


def llama_tokenizer(model: Path, **settings: bool) -> LlamaTokenizer:
    """Transformers' tokenizer with the model's pieces and scores, built without its optional protobuf."""
    from sentencepiece import SentencePieceProcessor

    pieces = SentencePieceProcessor(model_file=str(model))
    vocab = {pieces.id_to_piece(i): i for i in range(len(pieces))}
    scores = {piece: pieces.get_score(i) for piece, i in vocab.items()}
    return LlamaTokenizer(vocab=vocab, merges=generate_merges(vocab, scores), **settings)


class TestTiktoken:
    @pytest.fixture
    def model(self, shared_data: Path) -> Path:
        return shared_data / "tokenizers" / "tiktoken_small.model"

    def test_ids_equal_transformers(self, model: Path, make_folder: MakeFolder, texts):
        names = llama3_control_tokens()
        converted = TikTokenConverter(str(model), pattern=LLAMA3_PATTERN, extra_special_tokens=names).converted()
        theirs = PreTrainedTokenizerFast(tokenizer_object=converted)
        ours = load_tokenizer(make_folder(model))
        for text in [*texts, "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>", "a<|begin_of_text|> b"]:
            ids = theirs(text, add_special_tokens=False)["input_ids"]
            assert ours.encode(text) == ids
            assert ours.decode(ids) == text

    def test_control_tokens_follow_the_ranks_as_in_llama_3(self, model: Path, make_folder: MakeFolder):
        tokenizer = load_tokenizer(make_folder(model))
        # Llama 3.1's tokenizer.json has the same order after 128,000 ranks.
        for token, place in {"<|begin_of_text|>": 0, "<|end_of_text|>": 1, "<|eot_id|>": 9}.items():
            assert tokenizer.encode(token) == [2000 + place]
        assert tokenizer.encode("<|reserved_special_token_247|>") == [2255]
        assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (2000, 2001, 2256)
        assert tokenizer.encode("x", add_special_tokens=True)[0] == 2000


@pytest.mark.parametrize(
    ("files", "config", "bos", "eos", "pad"),
    [
        ({"generation_config.json": {"eos_token_id": [2, 0], "bos_token_id": 1}}, {}, 1, 2, 2),
        ({"generation_config.json": {"bos_token_id": 0}}, {"bos_token": None, "eos_token": "<|im_end|>"}, None, 2, 2),
        ({"special_tokens_map.json": {"pad_token": {"content": "<|end|>"}}}, {"eos_token": "<|im_end|>"}, None, 2, 5),
    ],
    ids=["generation_config fills gaps", "a null stands", "special_tokens_map fills gaps"],
)
def test_which_file_names_a_special_token(byte_level, make_folder: MakeFolder, files, config, bos, eos, pad):
    tokenizer = load_tokenizer(make_folder(byte_level, files=files, **config))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (bos, eos, pad)


def test_there_is_always_a_pad_id(make_folder: MakeFolder):
    bare = HFTokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="b"))
    bare.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = load_tokenizer(make_folder(bare))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (None, None, 0)


class TestFolder:
    def test_save_copies_every_file(self, byte_level, make_folder: MakeFolder, tmp_path: Path, texts):
        folder = make_folder(
            byte_level,
            eos_token="<|im_end|>",
            files={"chat_template.jinja": "{{ messages }}", "chat_templates/tool_use.jinja": "{{ tools }}"},
        )
        load_tokenizer(folder).save(tmp_path / "copy")
        names = {file.relative_to(folder) for file in folder.rglob("*") if file.is_file()}
        assert {f.relative_to(tmp_path / "copy") for f in (tmp_path / "copy").rglob("*") if f.is_file()} == names
        for name in names:
            assert (tmp_path / "copy" / name).read_bytes() == (folder / name).read_bytes()

    @pytest.mark.parametrize(
        ("files", "hint"),
        [
            ({}, "expected tokenizer.json or tokenizer.model"),
            ({"vocab.json": {}, "merges.txt": ""}, "with transformers"),
            ({"tekken.json": {}}, "tekken.json is not supported"),
            ({"tokenizer.json": {"model": "llama"}}, r"tokenizer\.json: not a tokenizer\.json"),
            ({"tokenizer.model": "what is this"}, "not a SentencePiece model"),
            ({"tokenizer.model": "YQ== 0\nnot-a-rank\n"}, "line 2: expected a token in base64"),
        ],
    )
    def test_a_folder_without_a_tokenizer_that_can_be_read(self, make_folder: MakeFolder, files, hint):
        with pytest.raises(ValueError, match=hint):
            load_tokenizer(make_folder(None, files=files))

    def test_a_broken_config_is_named(self, byte_level, make_folder: MakeFolder):
        folder = make_folder(byte_level, files={"tokenizer_config.json": "{not json"})
        with pytest.raises(ValueError, match=r"tokenizer_config\.json is not valid JSON"):
            load_tokenizer(folder)
        (folder / "tokenizer_config.json").write_text(json.dumps([1]))
        with pytest.raises(ValueError, match="expected a JSON object, found a list"):
            load_tokenizer(folder)

    @pytest.mark.parametrize(
        "config",
        [
            *({"bos_token": token} for token in (5, ["x"], {"content": 5}, "\ud800")),
            *(
                {"added_tokens_decoder": declared}
                for declared in ([1], {"x": "<a>"}, {"1": 5}, {"1": {"content": None}})
            ),
            *({"chat_template": template} for template in (5, [1], [{"name": "x"}], {"default": 5})),
            {"extra_special_tokens": [5]},
            {"added_tokens_decoder": {"900": {"content": "<a>", "lstrip": "yes"}}},
        ],
        ids=str,
    )
    def test_values_of_the_wrong_type(self, byte_level, make_folder: MakeFolder, config):
        with pytest.raises(ValueError):
            load_tokenizer(make_folder(byte_level, files={"tokenizer_config.json": config}))


LLAMA3_1 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
QWEN2_5_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
GPT_OSS = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"max_position_embeddings": 32768}, 32768),
        ({"max_position_embeddings": 131072, "rope_scaling": LLAMA3_1}, 131072),
        ({"max_position_embeddings": 131072, "rope_scaling": {"type": "longrope", "long_factor": [1.0]}}, 131072),
        ({"max_position_embeddings": 32768, "rope_scaling": QWEN2_5_YARN}, 131072),
        ({"max_position_embeddings": 131072, "rope_parameters": GPT_OSS}, 131072),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}}, 16384),
        ({"model_type": "gemma3", "text_config": {"max_position_embeddings": 131072}}, 131072),
        ({}, None),
        ({"max_position_embeddings": "long"}, None),
        ({"max_position_embeddings": 512, "rope_scaling": {"type": "yarn", "factor": "x"}}, 512),
    ],
)
def test_the_context_length_is_that_of_the_model_card(config: dict[str, Any], tokens: int | None):
    assert context_length(config) == tokens


@pytest.mark.parametrize("name", ["llama2_sentencepiece.model", "tiktoken_small.model"])
def test_ids_beyond_the_tokenizer_decode_to_nothing(name, shared_data, tmp_path):
    """A model may have more embeddings than its tokenizer has tokens, and sample one of them."""
    (tmp_path / "tokenizer.model").write_bytes((shared_data / "tokenizers" / name).read_bytes())
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("Hello there")
    assert tokenizer.decode([*ids, tokenizer.vocab_size, 10**6]) == tokenizer.decode(ids) == "Hello there"


@pytest.mark.long
def test_many_added_tokens_take_linear_time(tmp_path):
    for file in resolve_model_path("tiny").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    size = load_tokenizer(tmp_path).vocab_size
    more = {str(size + i): {"content": f"<added {i}>", "special": i % 2 == 0} for i in range(12_000)}
    config["added_tokens_decoder"] = {**config.get("added_tokens_decoder", {}), **more}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    started = time.process_time()
    tokenizer = load_tokenizer(tmp_path)
    assert time.process_time() - started < 8  # 18 s, if each is added alone
    assert [tokenizer.token_id(f"<added {i}>") for i in (0, 1, 11_999)] == [size, size + 1, size + 11_999]
    config["added_tokens_decoder"] |= {str(10**6 + i): {"content": f"<more {i}>"} for i in range(70_000)}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"name 8\d,\d{3} added tokens; expected at most 65,536"):
        load_tokenizer(tmp_path)
