"""GGUF files against transformers' reader, the `gguf` package, and llama.cpp's tokenizers."""

import json
import shutil
import sys
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from tokenizers import AddedToken, normalizers
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import models as hf_models

from lean_ft.export import export_gguf
from lean_ft.gguf.open import GGUF_FAMILIES
from lean_ft.models import load_model
from lean_ft.tokenizers import load_tokenizer
from tests.export.conftest import LLAMA3_ROPE, qwen_tokenizer
from tests.gguf.cases import GEMMA3N, ROUTED
from tests.tokenizers.conftest import byte_level_tokenizer, word_start_tokenizer

IDS = torch.arange(60).view(2, 30)
SPM = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.fixture
def file(tmp_path) -> Path:
    return tmp_path / "model.gguf"


def field(file: Path, key: str):
    found = reader(file, file.stat().st_mtime_ns).get_field(key)
    return None if found is None else found.contents()


@lru_cache(maxsize=1)  # parsing a file of 32,000 tokens takes seconds
def reader(file: Path, written_at: int) -> gguf.GGUFReader:
    return gguf.GGUFReader(file)


def stored(file: Path) -> dict[str, np.ndarray]:
    """The dequantized tensors by their names in the file."""
    reader = gguf.GGUFReader(file)
    return {tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}


@pytest.mark.first(3)
@pytest.mark.parametrize("case", ["mistral", "llama/tied_wide_heads", "llama/linear_rope", "qwen2/rope"])
def test_transformers_reads_the_same_model_from_it(case, exported):
    source, file = exported(case)
    reference = transformers.AutoModelForCausalLM.from_pretrained(source)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    if case == "llama/linear_rope":  # its reader ignores the scaling
        assert (field(file, "llama.rope.scaling.type"), field(file, "llama.rope.scaling.factor")) == ("linear", 4.0)
        theirs.config.rope_parameters = reference.config.rope_parameters
        theirs.model.rotary_emb = type(theirs.model.rotary_emb)(reference.config)
    assert theirs.config.rope_parameters["rope_theta"] == reference.config.rope_parameters["rope_theta"]
    assert theirs.config.max_position_embeddings == reference.config.max_position_embeddings
    torch.testing.assert_close(theirs(IDS).logits, reference(IDS).logits, atol=1e-4, rtol=1e-4)


def test_rows_of_a_head_are_reordered_biases_too(make_model_folder, file):
    """llama.cpp turns features (0, 1), (2, 3) ... of a head by the angles that Hugging Face gives (0, D/2) ..."""
    source = make_model_folder(tokenizer=qwen_tokenizer(), attention_bias=True, num_key_value_heads=2)
    export_gguf(source, file, "f32")
    weights = transformers.AutoModelForCausalLM.from_pretrained(source).state_dict()
    for theirs, ours, num_heads in (("q_proj", "attn_q", 4), ("k_proj", "attn_k", 2)):
        for ending in ("weight", "bias"):
            rows = weights[f"model.layers.1.self_attn.{theirs}.{ending}"].numpy()
            half = len(rows) // num_heads // 2
            order = [head * 2 * half + feature + pair * half for head in range(num_heads) for feature in range(half) for pair in (0, 1)]  # fmt: skip  # noqa: E501
            np.testing.assert_array_equal(stored(file)[f"blk.1.{ours}.{ending}"], rows[order])
    unmoved = weights["model.layers.1.self_attn.v_proj.bias"].numpy()
    np.testing.assert_array_equal(stored(file)["blk.1.attn_v.bias"], unmoved)


def test_llama3_rope_is_a_tensor_of_divisors(make_model_folder, file):
    source = make_model_folder(tokenizer=qwen_tokenizer(), rope_parameters=LLAMA3_ROPE)
    export_gguf(source, file, "bf16")
    config = transformers.AutoConfig.from_pretrained(source)
    scaled = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0].numpy()
    plain = 10_000.0 ** (-np.arange(0, 16, 2) / 16)
    divisors = stored(file)["rope_freqs.weight"]
    assert divisors.dtype == np.float32
    np.testing.assert_allclose(divisors, plain / scaled, rtol=1e-5)
    assert divisors[0] == 1.0 and divisors[-1] == pytest.approx(8.0)


def test_how_numbers_are_stored(make_model_folder, file):
    source = make_model_folder(tokenizer=qwen_tokenizer(), intermediate_size=80)
    weights = transformers.AutoModelForCausalLM.from_pretrained(source).state_dict()
    up, norm = weights["model.layers.0.mlp.up_proj.weight"], weights["model.norm.weight"]
    for kind, dtype in (("f32", torch.float32), ("f16", torch.float16), ("bf16", torch.bfloat16)):
        export_gguf(source, file, kind, force=True)
        np.testing.assert_array_equal(stored(file)["blk.0.ffn_up.weight"], up.to(dtype).float().numpy())
        np.testing.assert_array_equal(stored(file)["output_norm.weight"], norm.numpy())
    exported = export_gguf(source, file, "q8_0", force=True)
    blocks = up.view(-1, 32)
    scale = blocks.abs().amax(dim=1, keepdim=True) / 127
    rounded = (blocks / scale).round() * scale.half().float()
    torch.testing.assert_close(torch.from_numpy(stored(file)["blk.0.ffn_up.weight"]).view(-1, 32), rounded, atol=1e-6,
        rtol=1e-5)  # fmt: skip
    assert "2 tensors as f16" in str(exported)  # ffn_down of two layers, with rows of 80
    np.testing.assert_array_equal(stored(file)["output_norm.weight"], norm.numpy())
    assert field(file, "general.file_type") == 7


def byte_bpe_of(file: Path) -> HFTokenizer:
    """A byte-level BPE built from the file alone, with llama.cpp's splitting rule for its `pre`."""
    like = {"qwen2": qwen_tokenizer, "gpt-2": byte_level_tokenizer}[field(file, "tokenizer.ggml.pre")]()
    tokens, types = field(file, "tokenizer.ggml.tokens"), field(file, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in field(file, "tokenizer.ggml.merges")]
    vocab = {token: i for i, token in enumerate(tokens) if types[i] == 1}
    made = HFTokenizer(hf_models.BPE(vocab=vocab | {t: i for i, t in enumerate(tokens) if types[i] > 1}, merges=merges))
    made.pre_tokenizer, made.normalizer = like.pre_tokenizer, like.normalizer
    for i, token in enumerate(tokens):
        if types[i] in (3, 4):
            made.add_tokens([AddedToken(token, special=types[i] == 3, normalized=False)])
    return made


@pytest.mark.parametrize("make", [qwen_tokenizer, byte_level_tokenizer])
def test_byte_level_tokens_merges_and_special_ids(make, make_model_folder, file, texts):
    config = {
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": "{{ messages }}",
    }
    source = make_model_folder(tokenizer=make(), tokenizer_config=config, vocab_size=640)
    export_gguf(source, file)
    tokenizer, made = load_tokenizer(source), byte_bpe_of(file)
    for text in [*texts, "<|im_start|>user\nhi<|im_end|> <think>x"]:
        assert made.encode(text, add_special_tokens=False).ids == tokenizer.encode(text)
    assert len(field(file, "tokenizer.ggml.tokens")) == 640
    assert field(file, "tokenizer.ggml.tokens")[-1] == "[PAD639]"
    assert field(file, "tokenizer.ggml.token_type")[-1] == 5
    assert field(file, "tokenizer.ggml.eos_token_id") == tokenizer.eos_id
    assert field(file, "tokenizer.ggml.padding_token_id") == tokenizer.pad_id
    assert field(file, "tokenizer.ggml.bos_token_id") == 1  # config.json's, since the tokenizer has none
    assert field(file, "tokenizer.ggml.add_bos_token") is False
    assert field(file, "tokenizer.chat_template") == "{{ messages }}"


def test_bytes_without_a_token_are_dropped_as_by_transformers(make_model_folder, file):
    made = json.loads(qwen_tokenizer().to_str())
    vocab = made["model"]["vocab"]
    vocab["unused"] = vocab.pop("ô")  # the byte 0xF4, in no merge; characters from U+100000 on begin with it
    source = make_model_folder(tokenizer=HFTokenizer.from_str(json.dumps(made)), vocab_size=640)
    export_gguf(source, file)
    tokenizer, theirs = byte_bpe_of(file), transformers.AutoTokenizer.from_pretrained(source)
    for text in ("It costs $3.", "a \U00100000 b"):
        assert tokenizer.encode(text).ids == theirs.encode(text) == load_tokenizer(source).encode(text)


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
PUBLISHED = {  # other spellings of splitting rules in published tokenizer.json
    "deepseek-v3": [
        r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^CRLF\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[CRLF]*|"""  # noqa: E501
        r"\s*[CRLF]+|\s+(?!\S)|\s+", BYTES,
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_spellings_of_a_rule(name, make_model_folder, file):
    made = json.loads(qwen_tokenizer().to_str())
    made["pre_tokenizer"]["pretokenizers"] = [
        {"type": "Split", "pattern": {"Regex": step.replace("CRLF", "\r\n")}, "behavior": "Isolated", "invert": False}
        if isinstance(step, str) else step for step in PUBLISHED[name]
    ]  # fmt: skip
    export_gguf(make_model_folder(tokenizer=HFTokenizer.from_str(json.dumps(made)), vocab_size=640), file)
    assert field(file, "tokenizer.ggml.pre") == name


def spm_ids(file: Path, texts: list[str]) -> list[list[int]]:
    """Ids of each text by llama.cpp's SentencePiece algorithm."""
    tokens, scores = field(file, "tokenizer.ggml.tokens"), field(file, "tokenizer.ggml.scores")
    types = field(file, "tokenizer.ggml.token_type")
    ids = {token: i for i, token in enumerate(tokens) if types[i] in (1, 2, 6)}
    prefix = "▁" if field(file, "tokenizer.ggml.add_space_prefix") else ""
    return [join_pieces((prefix if text else "") + text.replace(" ", "▁"), ids, scores) for text in texts]


def join_pieces(text: str, ids: dict[str, int], scores: list[float]) -> list[int]:
    """Join the neighbors whose piece has the highest score first; the leftmost in a tie."""
    parts = list(text)
    while True:
        pairs = [(-scores[ids[a + b]], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ids]
        if not pairs:
            break
        _, i = min(pairs)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    found = [[ids[p]] if p in ids else [ids[f"<0x{byte:02X}>"] for byte in p.encode()] for p in parts]
    return [token_id for part in found for token_id in part]


@pytest.mark.parametrize("kind", [pytest.param("tokenizer.model", marks=pytest.mark.long), "tokenizer.json"])
def test_sentencepiece_scores_give_the_same_ids(kind, make_model_folder, file, texts, shared_data):
    if kind == "tokenizer.model":
        given, size = shared_data / "tokenizers" / "llama2_sentencepiece.model", 32_000
    else:
        given, size = word_start_tokenizer("first"), 1000  # Llama 2's own file has these two normalizers instead
        given.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        given.pre_tokenizer = None
    config = {**SPM, "added_tokens_decoder": {str(size): {"content": "<|x|>", "special": True}}} if size > 1000 else SPM
    source = make_model_folder(tokenizer=given, tokenizer_config=config, vocab_size=size + 8, hidden_size=32)
    export_gguf(source, file)
    tokenizer = load_tokenizer(source)
    for text, expected in zip(texts, spm_ids(file, texts), strict=True):
        assert tokenizer.encode(text) == expected, text
    assert field(file, "tokenizer.ggml.model") == "llama"
    types = field(file, "tokenizer.ggml.token_type")
    assert types[tokenizer.bos_id] == types[tokenizer.eos_id] == 3
    assert types.count(6) == 256
    assert field(file, "tokenizer.ggml.unknown_token_id") == tokenizer.token_id("<unk>")
    assert field(file, "tokenizer.ggml.add_bos_token") is True
    if size > 1000:
        assert types[size] == 3 and field(file, "tokenizer.ggml.tokens")[size] == "<|x|>"


@pytest.mark.parametrize("truncate", [True, False])
def test_a_difference_of_llama_cpp_is_reported(truncate, make_model_folder, file):
    rope = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "truncate": truncate}
    rope["rope_theta"] = 500.0
    source = make_model_folder(
        "GptOss", tokenizer=qwen_tokenizer(), num_local_experts=4, head_dim=16, rope_parameters=rope
    )
    assert ("llama.cpp rounds the bounds of yarn's frequencies" in str(export_gguf(source, file))) == (not truncate)


def test_the_deviation_of_gates_is_reported(make_model_folder, file):
    settings = {**GEMMA3N, "num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.95] * 2}
    source = make_model_folder("Gemma3n", tokenizer=qwen_tokenizer(), **settings)
    assert "divides the squares of I gates by I - 1" in str(export_gguf(source, file))


@pytest.mark.parametrize("activation", ["gelu", "gelu_fast"])
def test_another_gelu_is_reported(activation, make_model_folder, file):
    source = make_model_folder("GPTNeoX", tokenizer=qwen_tokenizer(), hidden_act=activation)
    assert ("llama.cpp computes GELU with tanh" in str(export_gguf(source, file))) == (activation == "gelu")
    assert load_model(file).config.activation == "gelu_tanh"


class TestRefusals:
    @pytest.fixture
    def folder(self, qwen_folder, tmp_path) -> Path:
        """A copy to modify."""
        return Path(shutil.copytree(qwen_folder, tmp_path / "folder"))

    def test_an_existing_file_is_kept(self, folder, file):
        file.write_text("mine")
        with pytest.raises(ValueError, match="exists.*--force"):
            export_gguf(folder, file)
        assert file.read_text() == "mine"
        export_gguf(folder, file, force=True)
        assert file.read_bytes()[:4] == b"GGUF"

    @pytest.mark.parametrize(("name", "kind", "message"), [
        ("model", "bf16", "is not the name of a GGUF file"),
        ("model.gguf", "q4_k", r"--gguf is 'q4_k'; expected f32, f16, bf16, q8_0"),
    ])  # fmt: skip
    def test_names_and_kinds(self, folder, tmp_path, name, kind, message):
        with pytest.raises(ValueError, match=message):
            export_gguf(folder, tmp_path / name, kind)

    @pytest.mark.parametrize(
        ("name", "change", "message"),
        [
            ("config.json", {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 0,
                "layer_types": None},
                "qwen2 does not compute the model: its file: attention.sliding_window is 32; expected none"),
            ("tokenizer.json", {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": r"\d+|\s+"},
                "behavior": "Isolated", "invert": False}}, "llama.cpp would give other ids"),
        ],
    )  # fmt: skip
    def test_what_llama_cpp_reads_differently(self, folder, file, name, change, message):
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | change))
        with pytest.raises(ValueError, match=message):
            export_gguf(folder, file)

    def test_bytes_without_a_token_that_become_unknown(self, folder, file):
        spec = json.loads((folder / "tokenizer.json").read_text())
        spec["model"]["vocab"].pop("ô")  # in no merge
        spec["model"]["unk_token"] = "!"
        (folder / "tokenizer.json").write_text(json.dumps(spec))
        with pytest.raises(ValueError, match=r"encodes 1 bytes .*'ô'.* as '!'"):
            export_gguf(folder, file)

    def test_folders_without_a_tokenizer_that_fits(self, make_model_folder, file):
        word_start = {"tokenizer": word_start_tokenizer("first"), "tokenizer_config": SPM, "vocab_size": 1000}
        for settings, message in (
            (word_start, r"marks the start of words .*tokenizer\.model into"),
            ({"tokenizer": qwen_tokenizer(), "vocab_size": 300}, "tokenizer has 401 ids and the model only 300"),
            ({}, "has no tokenizer, which a GGUF file needs"),
        ):
            with pytest.raises(ValueError, match=message):
                export_gguf(make_model_folder(**settings), file)

    @pytest.mark.first(8)
    @pytest.mark.parametrize(
        ("family", "settings", "message"),
        [
            ("Llama", {"hidden_act": "gelu"},
                "architecture llama does not compute the model: activation is gelu, and it always computes with silu"),
            ("Gemma", {"head_dim": 16, "tie_word_embeddings": False},
                "gemma does not .*: it has no tensor lm_head.weight"),
            ("Olmo2", {"tie_word_embeddings": True}, "olmo2 .* tied_embeddings is True, .* with False"),
            ("Qwen2", {"head_dim": 24}, "qwen2 .*key_length is 24; expected 16"),
            ("Qwen2", {"rope_parameters": LLAMA3_ROPE},
                "rotary scaling is llama3, .* qwen2 computes with default or linear or yarn"),
            ("Qwen3", {"head_dim": 16, "attention_bias": True}, "qwen3 .* qkv_bias is True"),
            ("SmolLM3", {"num_hidden_layers": 5, "pad_token_id": 0, "mlp_bias": True}, "mlp_bias is True"),
            ("Mixtral", {"sliding_window": 16}, "sliding_window is 16; expected none"),
            ("Qwen3Moe", {**EXPERTS, "norm_topk_prob": False}, "weights_sum_to_one of the mixture of layer 0 is False"),
            ("Qwen3Moe", {**EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [1]},
                "has no tensor model.layers.1.mlp.gate_proj.weight"),
            ("Qwen3Next", {**EXPERTS, "linear_value_head_dim": 64},
                "value_dim of the mixer of layer 0 is 64, .* with 128"),
            ("Qwen3_5", {"layer_types": ["full_attention"] * 2}, "lacks the metadata ssm.state_size"),
            ("Lfm2", {"conv_bias": True, "full_attn_idxs": [1]}, "bias of the mixer of layer 0 is True"),
            ("GptOss", {"layer_types": ["full_attention"] * 2, "num_local_experts": 4, "head_dim": 16},
                "lacks the metadata attention.sliding_window .* Export a Hugging Face folder"),
            ("DeepseekV2", {**ROUTED, "topk_method": "group_limited_greedy", "q_lora_rank": None},
                "expert_group_count is 4; expected 1"),
            ("Afmoe", {**EXPERTS, "head_dim": 16, "layer_types": ["full_attention", "sliding_attention"],
                "mup_enabled": True}, "expected a window in three of four layers"),
            ("Starcoder2", {"sliding_window": 32}, "sliding_window is 32; expected none"),
            ("GPTNeoX", {"hidden_act": "relu"}, "activation is relu, and it always computes with gelu_tanh"),
            ("Gemma3n", {**GEMMA3N, "num_hidden_layers": 5, "num_kv_shared_layers": 0},
                "gate_sparsity of layer 0 is 0.0, .* with 0.95"),
            ("Gemma3n", {**GEMMA3N, "num_hidden_layers": 21, "num_kv_shared_layers": 0},
                "kv_from_layer of layer 20 is None, .* with 18"),
            ("Gemma3n", {**GEMMA3N, "num_hidden_layers": 21, "num_kv_shared_layers": 1,
                "layer_types": ["sliding_attention"] * 21}, "expected a window in layer 18 and none in layer 19"),
            ("Gemma3n", {**GEMMA3N, "num_hidden_layers": 12, "num_kv_shared_layers": 0, "laurel_rank": 32},
                "branch_rank is 32, .* with 64"),
            ("Gemma3n", {**GEMMA3N, "num_hidden_layers": 12, "num_kv_shared_layers": 0, "altup_num_inputs": 3},
                "number of the streams is 3, .* with 4"),
            ("MiMoV2Flash", {**ROUTED, "head_dim": 24, "v_head_dim": 16, "routed_scaling_factor": 2.0},
                "weights_factor of the mixture of layer 1 is 2.0, .* with 1.0"),
            ("MiMoV2Flash", {**ROUTED, "head_dim": 16, "v_head_dim": 16},
                "dimension_count is 5; expected an even number"),
            ("Phimoe", {"num_local_experts": 4}, "does not compute phimoe as it was trained: it has RMSNorm instead"),
        ],
    )  # fmt: skip
    def test_variants_that_llama_cpp_cannot_run(self, family, settings, message, make_model_folder, file):
        with pytest.raises(ValueError, match=message):
            export_gguf(make_model_folder(family, tokenizer=qwen_tokenizer(), **settings), file)
        assert not file.exists()

    def test_a_missing_package(self, folder, file, monkeypatch):
        monkeypatch.setitem(sys.modules, "gguf", None)
        with pytest.raises(ValueError, match=r"pip install -e .*\[gguf\]"):
            export_gguf(folder, file)

    def test_unsupported_families(self, folder, file, monkeypatch):
        monkeypatch.delitem(GGUF_FAMILIES, "qwen2")
        with pytest.raises(
            ValueError,
            match=r"the families llama, mistral, .*gemma4_unified_text, but this is qwen2\. Export a Hugging",
        ):
            export_gguf(folder, file)
