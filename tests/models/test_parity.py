"""Parity of every family with transformers.

Each test that is a key of `COLUMNS` runs over all cases, or over at least one case per family.
`scripts/make_families_table.py` writes the results to `docs/families.md`.
"""

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from lean_ft.export import export_folder
from lean_ft.generation import Sampling, sample
from lean_ft.models import Decoder, build_decoder, decoder_config, load_model, save_model
from lean_ft.models.config_json import as_its_family, language_model_config
from lean_ft.models.families import ENCODERS, FAMILIES, MULTIMODAL
from tests.generation.plain_draws import samples
from tests.models.conftest import OTHER_WHOLES, Reference, reference_model, whole_model
from tests.models.family_cases import CASES, NUM_TOKENS, with_all_experts
from tests.models.random_configurations import configurations
from tests.models.tiny_wholes import RENAMED_LAYERS, tiny_whole

# The columns of the table of families by test.
COLUMNS = {
    "test_logits_equal_transformers": "logits",
    "test_gradients_equal_transformers": "gradients",
    "test_bfloat16_is_as_near_to_float32_as_transformers": "bfloat16",
    "test_packed_documents_equal_each_alone": "packed",
    "test_generation_with_the_cache_equals_without": "generation",
    "test_loading_and_saving_gives_the_same_folder": "round trip",
    "test_an_export_in_another_dtype_opens_in_transformers": "export",
    "test_an_adapter_of_peft_has_its_logits_and_gradients": "PEFT",
    "test_peft_reads_what_was_saved": "PEFT",
    "test_peft_reads_what_was_saved_and_a_merge_computes_the_same": "PEFT",
}
LANGUAGE_MODELS = [family for family in FAMILIES if family not in ENCODERS]  # the others: test_encoders.py
BOUNDS = [0, 30, 31, 60, 80]  # documents of two packed rows of NUM_TOKENS; the first is longer than some windows


def token_ids(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 101, shape, generator=torch.Generator().manual_seed(seed))


def next_token_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def logits_of(reference: Reference, ids: torch.Tensor) -> torch.Tensor:
    """The reference's logits as if this text were its first: some models keep the frequencies of longer texts."""
    if depends_on_length(reference):
        with torch.no_grad():
            reference(ids[:, :1])
    return reference(ids).logits


def depends_on_length(reference: Reference) -> bool:
    return any(kind in str(getattr(reference.config, "rope_parameters", "")) for kind in ("dynamic", "longrope"))


def gradients(model: torch.nn.Module, logits: torch.Tensor, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    names, parameters = zip(*named_as_in_transformers(model).items(), strict=True)
    found = torch.autograd.grad(next_token_loss(logits, ids), parameters, allow_unused=True)
    grads = {name: grad for name, grad in zip(names, found, strict=True) if grad is not None}
    turned = transposed_in_transformers(model)
    return with_stacked_heads({name: grad.T if name in turned else grad for name, grad in grads.items()})


def with_stacked_heads(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Stack norms of heads that transformers has one by one."""
    found: dict[str, list[torch.Tensor]] = {}
    for name, tensor in tensors.items():
        found.setdefault(re.sub(r"_layernorm\.norms\.\d+", "_norm", name), []).append(tensor)
    return {name: tensors[name] if name in tensors else torch.stack(heads) for name, heads in found.items()}


def named_as_in_transformers(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters by transformers' names in memory: those on disk, except stacked experts."""
    # Score corrections are buffers, as in transformers in all families but two. So are scales without an effect.
    buffers = ["e_score_correction_bias", "mlp.expert_bias"]
    buffers += [] if getattr(model.config, "altup_correct_scale", True) else ["correct_output_scale"]
    parameters = {name: p for name, p in model.named_parameters() if not name.endswith(tuple(buffers))}
    if not isinstance(model, Decoder):
        return parameters
    return {model.source.module_name(name): parameter for name, parameter in parameters.items()}


def transposed_in_transformers(model: torch.nn.Module) -> set[str]:
    """The parameters of our model that transformers has transposed, by its names."""
    if not isinstance(model, Decoder):
        return set()
    source = model.source
    return {source.module_name(name) for name, _ in model.named_parameters() if source.is_transposed(name)}


def assert_gradients_equal(own: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert own.keys() == expected.keys()
    for name, grad in own.items():
        # Relative to the query's gradient too: a key's bias shifts all scores of a query, so its gradient is only
        # rounding.
        largest = max(expected[name].norm(), expected.get(name.replace("k_proj", "q_proj"), expected[name]).norm())
        assert (grad - expected[name]).norm() <= 1e-3 * largest, name


def test_logits_equal_transformers(checkpoint, case):
    folder, reference = checkpoint(case)
    ids = token_ids(2, NUM_TOKENS)
    expected = logits_of(reference, ids)
    assert expected.std() > 0.3
    torch.testing.assert_close(load_model(folder)(ids), expected, atol=1e-4, rtol=1e-4)


LATENT = {"kv_lora_rank": 12, "q_lora_rank": 14, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 10}
SAME_AS = {
    "internlm3": {},
    "iquestcoder": {"attention_bias": True, "mlp_bias": True},
    "helium": {"head_dim": 8},
    "glm4_moe_lite": LATENT
    | {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "num_hidden_layers": 3}
    | {"mlp_layer_types": ["dense", "dense", "sparse"], "num_key_value_heads": 6},
}


@pytest.mark.parametrize("name", SAME_AS)
def test_equivalent_models_are_loaded_and_saved_as_their_family(name, tmp_path):
    reference, ids = reference_model(name, SAME_AS[name]), token_ids(2, NUM_TOKENS)
    reference.save_pretrained(tmp_path / "own")
    model = load_model(tmp_path / "own")
    torch.testing.assert_close(model(ids), reference(ids).logits, atol=1e-4, rtol=1e-4)
    save_model(model, tmp_path / "saved")
    reopened, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(report.values()) and reopened.config.architectures == [type(reopened).__name__]
    torch.testing.assert_close(reopened(ids).logits, reference(ids).logits, atol=1e-4, rtol=1e-4)
    sizes = {"vocab_size": 10, "hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 8}
    sizes |= {"num_attention_heads": 32, "num_key_value_heads": 2}
    all_fields = transformers.AutoConfig.for_model(name, **sizes).to_dict()
    absent, present = (as_its_family({**fields, "model_type": name}) for fields in (sizes, all_fields))
    assert decoder_config(absent) == decoder_config(present)


def test_nemotron_h_limits_its_steps_as_in_training(make_checkpoint):
    """transformers 5.15 and 5.23 raise steps to `time_step_min`; training and the published code use `time_step_limit`.

    Wide enough that steps fall below 0.001, the default of `time_step_min`.
    """
    for limits in ((0.0, float("inf")), (0.0, 0.5), (0.2, 0.9)):
        folder, reference = make_checkpoint("nemotron_h", hidden_size=256, time_step_limit=limits)
        ours, ids = load_model(folder)(token_ids(2, NUM_TOKENS)), token_ids(2, NUM_TOKENS)
        mixers = [layer.mixer for layer in reference.model.layers if hasattr(layer.mixer, "time_step_limit")]
        assert mixers
        difference = {}
        for tried in (limits, (reference.config.time_step_min, float("inf"))):
            for mixer in mixers:
                mixer.time_step_limit = tried
            difference[tried] = (reference(ids).logits - ours).abs().max() / ours.std()
        right, wrong = difference.values()
        assert right < 1e-4 < 1e-3 < wrong, difference


@pytest.mark.first(14)
def test_gradients_equal_transformers(checkpoint, case):
    folder, reference = checkpoint(case)
    model, ids = load_model(folder), token_ids(2, NUM_TOKENS)
    expected = gradients(reference, logits_of(reference, ids), ids)
    assert_gradients_equal(gradients(model, model(ids), ids), expected)


@pytest.mark.first
def test_bfloat16_is_as_near_to_float32_as_transformers(make_checkpoint, case):
    """One draw of weights decides, unless its errors are too large: then the geometric mean of five draws does."""
    ratios = errors_relative_to_transformers(make_checkpoint, case, seed=0)
    if (ratios > 1.15).any():
        others = [errors_relative_to_transformers(make_checkpoint, case, seed) for seed in range(1, 5)]
        ratios = torch.stack([ratios, *others]).log().mean(0).exp()
    assert (ratios <= 1.15).all(), ratios


def errors_relative_to_transformers(make_checkpoint, case: str, seed: int) -> torch.Tensor:
    """The errors of our bfloat16 logits and gradients, divided by transformers' errors: (2,)."""
    folder, reference = make_checkpoint(case, seed=seed, dtype=torch.bfloat16, **with_all_experts(case))
    exact = load_model(folder)  # the same bfloat16 weights, computed in float32
    ours = load_model(folder, dtype=torch.bfloat16)
    ids = token_ids(8, NUM_TOKENS)
    logits = [exact(ids), ours(ids), logits_of(reference, ids)]
    assert logits[1].dtype == torch.bfloat16

    if CASES[case][0] == "phimoe":
        # Rounding swaps the experts of one or two tokens. Their texts are left out.
        errors = [(x.float() - logits[0]).norm(dim=-1) / logits[0].norm(dim=-1) for x in logits[1:]]
        is_steady = torch.stack([error.amax(-1) < 6 * error.median() for error in errors]).all(0)
        assert is_steady.sum() >= 4
        ids, logits = ids[is_steady], [x[is_steady] for x in logits]
    grads = [gradients(model, x, ids) for model, x in zip((exact, ours, reference), logits, strict=True)]

    def error(which: int) -> torch.Tensor:
        wrong = (logits[which].float() - logits[0]).norm() / logits[0].norm()
        wrong_grads = [
            (grads[which][n].float() - grad).norm() / grad.norm()
            for n, grad in grads[0].items()
            if "k_proj.bias" not in n
        ]
        return torch.stack([wrong, torch.stack(wrong_grads).mean()]).detach()

    return error(1) / error(2)


@pytest.mark.first(14)
@torch.no_grad()
def test_packed_documents_equal_each_alone(checkpoint, case):
    folder, reference = checkpoint(case)
    model, ids = load_model(folder), token_ids(2, NUM_TOKENS)
    cu_seqlens = torch.tensor(BOUNDS, dtype=torch.int32)
    packed = model(ids, cu_seqlens=cu_seqlens).flatten(0, 1)
    alone = [logits_of(reference, ids.view(1, -1)[:, a:b])[0] for a, b in pairwise(BOUNDS)]
    torch.testing.assert_close(packed, torch.cat(alone), atol=1e-4, rtol=1e-4)

    other = ids.clone().view(-1)
    other[:30] = token_ids(30, seed=9)
    changed = model(other.view(2, -1), cu_seqlens=cu_seqlens).flatten(0, 1)
    assert not torch.equal(changed[:30], packed[:30])
    if model.mixture is None:
        assert torch.equal(changed[30:], packed[30:])
    else:  # an expert's products are one matrix of all documents' tokens, whose kernel may go by its number of rows
        torch.testing.assert_close(changed[30:], packed[30:], atol=1e-5, rtol=1e-5)


@pytest.mark.first(6)
@torch.no_grad()
def test_generation_with_the_cache_equals_without(checkpoint, case):
    folder, reference = checkpoint(case)
    model = load_model(folder)
    long, short = token_ids(17).tolist(), token_ids(4, seed=3).tolist()
    prompts = [long, short, long]  # the first and the last share a prompt pass

    # The lengths cross the windows and original contexts of the cases. A sampled token depends on all logits.
    num_tokens = 8
    found = sample(model, prompts, Sampling(num_tokens, 1.3, seed=5))
    for prompt, number, answer in zip(prompts, (0, 0, 1), found, strict=True):
        plain = samples(lambda ids: logits_of(reference, ids), prompt, num_tokens, 1.3, seed=5, sample=number)
        assert answer.ids == plain
        whole = torch.tensor([[*prompt, *answer.ids]])
        if depends_on_length(reference):  # each token's logits depend on the length up to it
            ends = range(len(prompt), len(prompt) + num_tokens)
            logits = torch.stack([logits_of(reference, whole[:, :end])[0, -1] for end in ends])
        else:
            logits = logits_of(reference, whole)[0, len(prompt) - 1 : -1]
        expected = (logits / 1.3).log_softmax(-1).gather(1, whole[0, len(prompt) :, None]).squeeze(1).tolist()
        assert answer.log_probs == pytest.approx(expected, abs=2e-4)


@pytest.mark.first(8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_loading_and_saving_gives_the_same_folder(checkpoint, case, dtype, tmp_path):
    source, reference = checkpoint(case, dtype)
    model = load_model(source, dtype=dtype)
    assert model.source.folder == source
    of_theirs = {name: p.dtype for name, p in with_stacked_heads(named_as_in_transformers(reference)).items()}
    assert {name: p.dtype for name, p in named_as_in_transformers(model).items()} == of_theirs
    assert dtype in of_theirs.values()
    save_model(model, tmp_path)

    assert sorted(f.name for f in tmp_path.iterdir()) == sorted(f.name for f in source.iterdir())
    assert (tmp_path / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    assert (tmp_path / "generation_config.json").read_bytes() == (source / "generation_config.json").read_bytes()
    assert json.loads((tmp_path / "config.json").read_text()) == json.loads((source / "config.json").read_text())
    reopened, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    reopened.config._experts_implementation, ids = reference.config._experts_implementation, token_ids(2, 20)
    assert torch.equal(logits_of(reopened, ids), logits_of(reference, ids))


@pytest.mark.first(2)
@torch.no_grad()
def test_an_export_in_another_dtype_opens_in_transformers(checkpoint, case, tmp_path):
    source, _ = checkpoint(case)
    rounded = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    export_folder(source, tmp_path / "exported", dtype="bfloat16")
    path, ids = tmp_path / "exported", token_ids(1, 20)
    reopened, report = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(report.values())
    assert [p.dtype for p in reopened.parameters()] == [p.dtype for p in rounded.parameters()]
    assert reopened.get_output_embeddings().weight.dtype == torch.bfloat16
    assert torch.equal(logits_of(reopened, ids), logits_of(rounded, ids))


# Tensors that published folders have besides the language model's and the vision tower's.
UNREAD = {
    "Qwen3_5": {"mtp.norm.weight": torch.ones(48)},  # multi-token prediction
    "Qwen3_5Moe": {"mtp.norm.weight": torch.ones(48)},
    # Of a layer that uses another layer's keys.
    "Gemma4": {f"model.language_model.layers.5.self_attn.{n}.weight": torch.ones(3) for n in ("k_proj", "k_norm")},
}


KINDS_OF_WHOLES = [
    "Gemma3",
    "Mistral3",
    "Mistral4",
    "Qwen3VLMoe",
    "Qwen3_5",
    "Qwen3_5Moe",
    "Gemma4",
    "Llama4",
    *OTHER_WHOLES,
]


@pytest.mark.first(4)
@pytest.mark.parametrize("is_renamed", [False, True])
@pytest.mark.parametrize("kind", KINDS_OF_WHOLES)
def test_the_language_model_of_a_multimodal_model_is_loaded_and_saved(kind, is_renamed, tmp_path):
    """With tensor names of transformers 4 and of transformers 5."""
    whole = whole_model(kind)
    whole.save_pretrained(tmp_path / "whole")
    file = tmp_path / "whole" / "model.safetensors"
    stored = load_file(file)
    has_tower = any(part in name for part in ("vision", "visual", "image_tower") for name in stored)
    assert has_tower or kind == "gemma4_unified"  # by default it has none
    if kind in RENAMED_LAYERS:
        stored = {
            re.sub(r"^(language_model\.model\.)(blocks|encoder\.layers)", r"\1layers", n): t for n, t in stored.items()
        }
    if is_renamed:
        names = {"language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head."}
        if not any(name.startswith("language_model.") for name in stored):
            names = {new: old for old, new in names.items()}
        for old, new in names.items():
            stored = {name.replace(old, new, name.startswith(old)): tensor for name, tensor in stored.items()}
    save_file({**stored, **UNREAD.get(kind, {})}, file, {"format": "pt"})

    ids = token_ids(2, 20).clamp(max=95)
    with torch.no_grad():
        expected = whole(input_ids=ids).logits
    assert expected.std() > 0.3
    model = load_model(tmp_path / "whole")
    assert model.source.part_of == whole.config.model_type
    torch.testing.assert_close(model(ids), expected, atol=1e-4, rtol=1e-4)
    save_model(model, tmp_path / "alone")
    reopened, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "alone", output_loading_info=True)
    assert not any(report.values())
    with torch.no_grad():
        torch.testing.assert_close(reopened(input_ids=ids).logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("text_type", MULTIMODAL["llava"].families)
def test_a_multimodal_model_takes_language_models_of_several_families(text_type, tmp_path):
    for name in ("llava", "idefics3"):
        whole, ids = tiny_whole(name, text_type), token_ids(2, 20).clamp(max=95)
        whole.save_pretrained(tmp_path / name)
        with torch.no_grad():
            expected = whole(input_ids=ids).logits
        assert expected.std() > 0.3
        torch.testing.assert_close(load_model(tmp_path / name)(ids), expected, atol=1e-4, rtol=1e-4)


TYING = ["Gemma3", "Mistral3", "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe", "Gemma4", "Llama4"]
TYING += [one for one in OTHER_WHOLES if one.values[0] not in RENAMED_LAYERS]


@pytest.mark.first(2)
@pytest.mark.parametrize("levels", [(True, False), (False, True), (True, None)], ids=str)
@pytest.mark.parametrize("kind", TYING)
def test_whether_a_multimodal_model_ties_its_embeddings_is_read_as_in_transformers(kind, levels, tmp_path):
    """`tie_word_embeddings` differs between the top level and text_config, and the folder has no output layer."""
    whole = whole_model(kind)
    whole.save_pretrained(tmp_path)
    config, file = json.loads((tmp_path / "config.json").read_text()), tmp_path / "model.safetensors"
    for level, value in zip((config, config["text_config"]), levels, strict=True):
        level.pop("tie_word_embeddings", None)
        level |= {} if value is None else {"tie_word_embeddings": value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({n: t for n, t in load_file(file).items() if "lm_head" not in n}, file, {"format": "pt"})
    reference = type(whole).from_pretrained(tmp_path).eval()
    ids = token_ids(2, 20).clamp(max=95)
    if reference.get_output_embeddings().weight is not reference.get_input_embeddings().weight:
        with pytest.raises(ValueError, match="the weights lack lm_head.weight"):
            load_model(tmp_path)
        return
    with torch.no_grad():
        model, expected = load_model(tmp_path), reference(input_ids=ids).logits
        torch.testing.assert_close(model(ids), expected, atol=1e-4, rtol=1e-4)
        save_model(model, tmp_path / "alone")
        alone = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "alone").eval()
        torch.testing.assert_close(alone(input_ids=ids).logits, expected, atol=1e-4, rtol=1e-4)


def test_a_multimodal_model_with_an_unknown_language_model_is_refused():
    config = {"model_type": "mistral3", "text_config": {"model_type": "mixtral"}}
    with pytest.raises(ValueError, match="model_type 'mixtral'; expected for mistral3: ministral3, mistral"):
        language_model_config(config)


def decoder_of(reference: Reference) -> Decoder:
    """Our model of the reference's config and weights, without a folder."""
    model = build_decoder(decoder_config(reference.config.to_dict()))
    model.source.config = reference.config.to_dict()
    weights, own = with_stacked_heads(named_as_in_transformers(reference)), named_as_in_transformers(model)
    assert own.keys() == weights.keys()
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(weights[name].T if name in transposed_in_transformers(model) else weights[name])
        tensors = [*reference.named_buffers(), *reference.named_parameters()]
        tensors = {name.replace(".gate.", ".").replace(".moe_statics.", "."): tensor for name, tensor in tensors}
        for name, buffer in [(name, buffer) for name, buffer in model.named_buffers() if buffer.numel()]:
            place = model.source.module_name(name).replace(".gate.", ".").replace(".moe_statics.", ".")
            buffer.copy_(tensors[place])
    return model


@pytest.mark.first(1)
@pytest.mark.parametrize("model_type", LANGUAGE_MODELS)
@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), st.integers(1, 60))
def test_any_configuration_equals_transformers(model_type, data, num_tokens):
    """Each family draws its own configurations, so that a new family changes no other's."""
    reference = reference_model(model_type, data.draw(configurations(model_type)))
    model, ids = decoder_of(reference), token_ids(2, num_tokens + 1)
    logits, expected = model(ids), logits_of(reference, ids)
    # by norm: where a norm divides six features by nearly nothing, one token's logits differ by rounding alone
    assert (logits - expected).norm() <= 1e-4 * expected.norm()
    own, theirs = (gradients(m, x, ids) for m, x in ((model, logits), (reference, expected)))
    total = torch.stack([grad.norm() for grad in theirs.values()]).norm()
    for name, grad in own.items():
        assert (grad - theirs[name]).norm() <= 1e-3 * theirs[name].norm() + 1e-5 * total, name


def test_the_table_of_families_lists_every_family_and_each_passes():
    """The table is written by `scripts/make_families_table.py` from what the tests above found."""
    assert {model_type for model_type, _ in CASES.values()} == set(LANGUAGE_MODELS)
    text = (Path(__file__).parents[2] / "docs" / "families.md").read_text()
    table = text.split("<!-- table -->")[1].split("<!-- end of table -->")[0].strip().splitlines()
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    assert header[2:] == list(dict.fromkeys(COLUMNS.values()))
    counts = [sum(model_type == family for model_type, _ in CASES.values()) for family in LANGUAGE_MODELS]
    assert [row[:2] for row in rows] == [[f"`{f}`", str(n)] for f, n in zip(LANGUAGE_MODELS, counts, strict=True)]
    assert {cell for row in rows for cell in row[2:]} == {"passes"}
