"""Models that give vectors: text encoders and folders without an output layer, against transformers."""

import json
from collections.abc import Callable

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES
from transformers.models.eurobert import modeling_eurobert
from transformers.models.modernbert import modeling_modernbert

from lean_ft.export import export_folder, export_gguf
from lean_ft.models import REWARD_LABELS, VECTORS, Decoder, decoder_config, load_model, save_model, stored_labels
from lean_ft.models.config_json import vectors_config
from lean_ft.models.families import ENCODERS, FAMILIES
from lean_ft.peft import apply_lora, load_adapter, load_merged, save_adapter
from lean_ft.settings import LoRAConfig
from tests.models.conftest import Reference, reference_model
from tests.models.family_cases import ENCODER_CASES, FIRST_CASES, NUM_TOKENS, SIZES
from tests.models.test_parity import depends_on_length, named_as_in_transformers, token_ids

LENGTHS = [NUM_TOKENS, 17, 1, 5]
BOUNDS = torch.tensor([0, 40, 57, 58, 63], dtype=torch.int32)
LANGUAGE_MODEL = "qwen3"


def norm_in_float64(norm: nn.Module, has_offset: bool) -> Callable[[Tensor], Tensor]:
    """RMSNorm's formula, which transformers computes in float32."""

    def forward(x: Tensor) -> Tensor:
        eps = getattr(norm, "variance_epsilon", None) or norm.eps
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (norm.weight + has_offset)

    return forward


@pytest.fixture(params=[torch.float64, torch.float32], ids=str)
def pair(request, encoder_case, checkpoint, monkeypatch) -> tuple[Decoder, Reference, float]:
    """Our model and transformers' in one dtype, and the largest error relative to the largest value."""
    folder, reference = checkpoint(encoder_case)
    dtype = request.param
    model, reference = load_model(folder, scores=VECTORS), type(reference).from_pretrained(folder).eval()
    if dtype == torch.float64:
        model.to(dtype), reference.to(dtype)
        monkeypatch.setattr(modeling_modernbert, "apply_rotary_pos_emb", modeling_eurobert.apply_rotary_pos_emb)
        for module in reference.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = norm_in_float64(module, has_offset="Gemma" in type(module).__name__)
        if encoder_case.startswith("gemma"):  # transformers rounds it to float32
            reference.embed_tokens.embed_scale = torch.tensor(reference.config.hidden_size, dtype=dtype).sqrt()
    return model, reference, 1e-10 if dtype == torch.float64 else 1e-5


@pytest.fixture(params=[pytest.param(c, marks=[pytest.mark.long] * c.endswith("biases")) for c in ENCODER_CASES])
def encoder_case(request) -> str:
    return request.param


def grads(model: nn.Module, hidden: Tensor) -> dict[str, Tensor]:
    """Gradients of a weighted sum of all hidden states (N, D)."""
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    parameters = named_as_in_transformers(model)
    found = torch.autograd.grad((hidden * weights.to(hidden.dtype)).sum(), list(parameters.values()))
    return dict(zip(parameters, found, strict=True))


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_hidden_states_and_gradients_equal_transformers(pair, packed):
    model, reference, limit = pair
    ids, is_token = token_ids(4, NUM_TOKENS), torch.arange(NUM_TOKENS) < torch.tensor(LENGTHS)[:, None]
    expected = reference(input_ids=ids, attention_mask=is_token.long()).last_hidden_state[is_token]
    if packed:
        hidden = model(ids[is_token][None], cu_seqlens=BOUNDS, return_hidden=True)[0]
    else:
        hidden = model(ids, is_token=is_token, return_hidden=True)[is_token]
    assert expected.std() > 0.3
    assert (hidden - expected).abs().max() <= limit * expected.abs().max()
    own, theirs = grads(model, hidden), grads(reference, expected)
    assert own.keys() == theirs.keys()
    largest = max(grad.abs().max() for grad in theirs.values())
    for name, grad in own.items():
        assert (grad - theirs[name]).abs().max() <= limit * largest, name


def test_a_text_never_sees_another_nor_padding(encoder_case, checkpoint):
    """Another first text leaves all other texts' hidden states as they were, bit for bit, and later tokens matter."""
    model = load_model(checkpoint(encoder_case)[0], scores=VECTORS)
    ids, is_token = token_ids(4, NUM_TOKENS), torch.arange(NUM_TOKENS) < torch.tensor(LENGTHS)[:, None]
    packed = ids[is_token][None]
    for shape, known, start in ((packed, {"cu_seqlens": BOUNDS}, (0, 39)), (ids, {"is_token": is_token}, (0, 39))):
        other = shape.clone()
        other[start] = (other[start] + 1) % 101
        before, after = (model(x, **known, return_hidden=True).flatten(0, 1) for x in (shape, other))
        assert torch.equal(before[40:], after[40:])
        assert (before[:40] != after[:40]).any(-1).sum() > (1 if "cu_seqlens" in known else 0)
    refilled = torch.where(is_token, ids, 77)
    assert torch.equal(*(model(x, is_token=is_token, return_hidden=True)[is_token] for x in (ids, refilled)))
    alone = [model(ids[i : i + 1, :n], return_hidden=True)[0] for i, n in enumerate(LENGTHS)]
    together = model(packed, cu_seqlens=BOUNDS, return_hidden=True)[0]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-5, rtol=1e-5)


def test_a_folder_without_an_output_layer_is_written_as_it_was(encoder_case, checkpoint, tmp_path):
    """With its window: transformers halves that of Gemma 3 when it reads it, and writes it whole."""
    folder, reference = checkpoint(encoder_case)
    assert stored_labels(folder) is VECTORS
    model = load_model(folder, scores=VECTORS)
    save_model(model, tmp_path)
    assert {f.name for f in tmp_path.iterdir()} == {f.name for f in folder.iterdir()}
    for file in folder.iterdir():
        if file.suffix == ".json":
            assert json.loads((tmp_path / file.name).read_text()) == json.loads(file.read_text())
        else:
            assert (tmp_path / file.name).read_bytes() == file.read_bytes()
    reopened, report = transformers.AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    ids = token_ids(2, 20)
    assert torch.equal(reopened(ids).last_hidden_state, reference(ids).last_hidden_state)


@pytest.mark.parametrize("model_type", ENCODERS)
def test_a_masked_language_model_is_saved_without_its_output_layers(model_type, tmp_path):
    config = transformers.AutoConfig.for_model(model_type, **{**SIZES, **ENCODER_CASES[model_type][1]})
    masked = transformers.AutoModelForMaskedLM.from_config(config).eval()
    masked.save_pretrained(tmp_path / "masked")
    model, ids = load_model(tmp_path / "masked", scores=VECTORS), token_ids(2, 20)
    expected = masked.model(ids).last_hidden_state
    torch.testing.assert_close(model(ids, return_hidden=True), expected, atol=1e-5, rtol=1e-5)
    save_model(model, tmp_path / "saved")
    reopened, report = transformers.AutoModel.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(report.values()) and reopened.config.architectures == [type(reopened).__name__]
    assert torch.equal(reopened(ids).last_hidden_state, expected)


SHOWN = ("qwen3", "gemma3_text", "gpt_neox", "opt")  # names and prefixes of their own
OF_TEXT = dict.fromkeys((*SHOWN, *(family for family in FIRST_CASES if family in MODEL_MAPPING_NAMES)))


def without_output(reference: Reference) -> nn.Module:
    """In Llama 4's class, the base model is an attribute under another name."""
    return reference.model if reference.base_model is reference else reference.base_model


@pytest.mark.first(4)
@pytest.mark.parametrize("family", OF_TEXT)
@torch.no_grad()
def test_a_language_model_for_vectors_is_saved_without_its_output_layer(family, checkpoint, tmp_path):
    """Its hidden states are those of transformers, without divisors of logits."""
    folder, reference = checkpoint(FIRST_CASES[family])
    model, ids = load_model(folder, scores=VECTORS), token_ids(2, NUM_TOKENS)
    assert model.head is None and not any("lm_head" in name for name, _ in model.named_parameters())
    if depends_on_length(reference):
        reference(ids[:, :1])
    expected = without_output(reference)(input_ids=ids).last_hidden_state
    torch.testing.assert_close(model(ids, return_hidden=True), expected, atol=1e-4, rtol=1e-4)
    save_model(model, tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["architectures"] == [type(without_output(reference)).__name__]
    reopened, report = transformers.AutoModel.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    reopened.config._experts_implementation = "eager"
    torch.testing.assert_close(reopened(input_ids=ids).last_hidden_state, expected, atol=1e-5, rtol=1e-5)
    again = load_model(tmp_path / "saved", scores=VECTORS)
    save_model(again, tmp_path / "again")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("saved", "again")]
    assert weights[0] == weights[1]


@pytest.mark.parametrize("tied", [True, False])
def test_a_bare_folder_under_a_language_models_name_keeps_both(tied, tmp_path):
    """Qwen3-Embedding is published so: Qwen3ForCausalLM, whose tensors are those of Qwen3Model."""
    reference = reference_model(LANGUAGE_MODEL, {"tie_word_embeddings": tied})
    reference.model.save_pretrained(tmp_path / "bare")
    config = json.loads((tmp_path / "bare" / "config.json").read_text()) | {"architectures": ["Qwen3ForCausalLM"]}
    (tmp_path / "bare" / "config.json").write_text(json.dumps(config))
    model, ids = load_model(tmp_path / "bare", scores=VECTORS), token_ids(2, 20)
    expected = reference.model(ids).last_hidden_state
    torch.testing.assert_close(model(ids, return_hidden=True), expected, atol=1e-5, rtol=1e-5)
    save_model(model, tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text()) == config
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("bare", "saved")]
    assert files[0] == files[1]
    if tied:
        torch.testing.assert_close(load_model(tmp_path / "bare")(ids), reference(ids).logits, atol=1e-4, rtol=1e-4)
    else:
        with pytest.raises(ValueError, match="lack lm_head.weight"):
            load_model(tmp_path / "bare")


def test_the_class_without_an_output_layer_is_that_of_transformers():
    causal = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    for family in FAMILIES:
        if family in causal and family in MODEL_MAPPING_NAMES:
            config = {"model_type": family, "architectures": [causal[family]]}
            assert vectors_config(config)["architectures"] == [MODEL_MAPPING_NAMES[family]], family


def test_an_encoder_gives_no_text(checkpoint, tmp_path):
    folder, _ = checkpoint("eurobert")
    for case in ENCODER_CASES:
        with pytest.raises(ValueError, match=r"gives vectors and no text: its tokens see later ones. Use `leanft run"):
            load_model(checkpoint(case)[0])
    reference_model(LANGUAGE_MODEL, {"tie_word_embeddings": True}).model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="gives vectors and no text: it has no output layer"):
        load_model(tmp_path)
    model, ids = load_model(folder, scores=VECTORS), token_ids(1, 9)
    for use, message in (
        (lambda: model(ids), "no output layer: call it with return_hidden"),
        (lambda: model.new_cache(1, 9), "has no cache: its tokens see later ones"),
    ):
        with pytest.raises(ValueError, match=message):
            use()
    prefixes = torch.zeros(1, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match="prefixes are not supported"):
        model(ids, cu_seqlens=torch.tensor([0, 9], dtype=torch.int32), prefixes=prefixes, return_hidden=True)
    with pytest.raises(ValueError, match="no sequence classification model of that family"):
        load_model(folder, scores=REWARD_LABELS)


@pytest.mark.parametrize("value", ["x", 1, 0.0, []])
def test_a_foreign_value_of_the_field_is_refused(value):
    config = transformers.AutoConfig.for_model("gemma3_text", **SIZES).to_dict()
    with pytest.raises(ValueError, match="use_bidirectional_attention is .*expected true, false or vision"):
        decoder_config(config | {"use_bidirectional_attention": value})


@torch.no_grad()
def test_an_encoder_of_gemma_3_with_a_score_layer_equals_transformers(checkpoint, tmp_path):
    folder, _ = checkpoint("gemma3_text_both_sides")
    model = load_model(folder, scores=REWARD_LABELS)
    model.output_weight.normal_(generator=torch.Generator().manual_seed(0))
    save_model(model, tmp_path)
    ids = token_ids(2, NUM_TOKENS).clamp(min=3)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)(ids).logits
    torch.testing.assert_close(model(ids)[:, -1], theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", [LANGUAGE_MODEL, "modernbert"])
@torch.no_grad()
def test_peft_opens_an_adapter_on_transformers_class_without_an_output_layer(case, checkpoint, tmp_path):
    from peft import PeftModel

    folder, _ = checkpoint(case)
    model, ids = load_model(folder, scores=VECTORS), token_ids(2, 20)
    apply_lora(model, LoRAConfig(rank=3))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    expected = model(ids, return_hidden=True)
    save_adapter(model, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["task_type"] == "FEATURE_EXTRACTION"
    theirs = PeftModel.from_pretrained(transformers.AutoModel.from_pretrained(folder).eval(), tmp_path)
    assert (theirs(input_ids=ids).last_hidden_state - expected).abs().max() < 1e-4
    assert (expected - load_model(folder, scores=VECTORS)(ids, return_hidden=True)).abs().max() > 0.01
    again = load_model(folder, scores=VECTORS)
    load_adapter(again, tmp_path)
    merged, _ = load_merged(tmp_path, dtype="float32")
    assert torch.equal(again(ids, return_hidden=True), expected)
    torch.testing.assert_close(merged(ids, return_hidden=True), expected, atol=1e-4, rtol=1e-4)


def test_bfloat16_is_as_near_to_float32_as_transformers(encoder_case, make_checkpoint):
    """The geometric mean of three draws of weights."""
    ratios = []
    for seed in range(3):
        folder, reference = make_checkpoint(encoder_case, seed=seed, dtype=torch.bfloat16)
        exact, ours = (load_model(folder, dtype=dtype, scores=VECTORS) for dtype in (torch.float32, torch.bfloat16))
        ids = token_ids(8, NUM_TOKENS)
        with torch.no_grad():
            true = exact(ids, return_hidden=True)
            found = ours(ids, return_hidden=True), reference(ids).last_hidden_state
        own, theirs = ((hidden.float() - true).norm() for hidden in found)
        ratios.append(own / theirs)
    assert torch.stack(ratios).log().mean().exp() <= 1.15, ratios


def test_a_gguf_file_of_a_model_without_an_output_layer_has_the_tensors_of_the_language_model(tmp_path):
    gguf = pytest.importorskip("gguf")
    folder = load_model("tiny", "meta").source.folder
    save_model(load_model(folder, scores=VECTORS), tmp_path / "bare")
    for file in folder.glob("tokenizer*"):
        (tmp_path / "bare" / file.name).write_bytes(file.read_bytes())
    tensors = []
    for name, source in (("bare", tmp_path / "bare"), ("whole", folder)):
        export_gguf(source, tmp_path / f"{name}.gguf", "f16")
        reader = gguf.GGUFReader(tmp_path / f"{name}.gguf")
        tensors.append({one.name: one.data.tobytes() for one in reader.tensors})
    assert tensors[0] == tensors[1]


def test_a_gguf_file_of_an_encoder_is_refused(checkpoint, tmp_path):
    with pytest.raises(ValueError, match="GGUF file of a model with tokens that see later ones is not supported"):
        export_gguf(checkpoint("eurobert")[0], tmp_path / "x.gguf", "f16")


def test_an_export_in_another_dtype_opens_in_transformers(checkpoint, tmp_path):
    folder, _ = checkpoint("modernbert")
    rounded = transformers.AutoModel.from_pretrained(folder, dtype=torch.bfloat16)
    export_folder(folder, tmp_path / "exported", dtype="bfloat16")
    reopened, report = transformers.AutoModel.from_pretrained(tmp_path / "exported", output_loading_info=True)
    assert not any(report.values())
    ids = token_ids(1, 20)
    assert torch.equal(reopened(ids).last_hidden_state, rounded(ids).last_hidden_state)
