"""Adapters of multimodal models equal PEFT's, both ways, in the module tree of the class that reads images too."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from lean_ft import load_model
from lean_ft.export import export_folder
from lean_ft.peft import apply_lora, load_adapter, restore_adapter, save_adapter
from lean_ft.settings import LoRAConfig
from tests.models.conftest import OTHER_WHOLES, WHOLES, whole_model
from tests.models.tiny_wholes import RENAMED_LAYERS
from tests.peft.conftest import randomize

peft = pytest.importorskip("peft")

QUICK = ("Gemma3", "Mistral3", "Qwen3VLMoe", "Qwen3_5Moe")
NAMES = [pytest.param(name, marks=[pytest.mark.long] * (name not in QUICK)) for name in WHOLES]
OTHERS = [one for one in OTHER_WHOLES if one.values[0] not in RENAMED_LAYERS]
IDS = torch.arange(3, 43).view(2, 20)
OF_TEXT = r".*(language|text)_model\..*\.(q_proj|o_proj|out_proj|up_proj|w3|in_proj_qkv)"
EXPERTS = {"Qwen3VLMoe", "Qwen3_5Moe", "Llama4"}
STACKS = ["experts.gate_up_proj", "experts.down_proj"]
CONFIGS = {
    "regex": {"target_modules": OF_TEXT},
    "dora": {"target_modules": OF_TEXT, "use_dora": True},
    "attention": {"target_modules": r".*(language|text)_model\..*\.(q_proj|o_proj|query_key_value)"},
    # A list selects layers of some image encoders too; they do not change the logits of a text.
    "list": {"target_modules": ["q_proj", "o_proj", "out_proj"]},
    "patterns": {
        "target_modules": OF_TEXT,
        "rank_pattern": {r".*layers\.1\..*o_proj": 2},
        "alpha_pattern": {
            "layers.1.self_attn.q_proj": 3,
            r"^model\.language_model\.layers\.1\.self_attn\.o_proj": 20,
            r"^model\.text_model\.layers\.1\.self_attn\.o_proj": 20,
            "language_model.model.layers.1.self_attn.o_proj": 20,
        },
    },
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    made = {}

    def folder(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            whole_model(name).save_pretrained(made[name])
        return made[name]

    return folder


def theirs(folder):
    return transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()


def with_older_names(folder, destination):
    """The folder under the names of transformers 4 if it has those of transformers 5, and the other way round."""
    destination.mkdir()
    (destination / "config.json").write_bytes((folder / "config.json").read_bytes())
    stored = load_file(folder / "model.safetensors")
    names = {"language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head."}
    if not any(name.startswith("language_model.") for name in stored):
        names = {new: old for old, new in names.items()}
    for old, new in names.items():
        stored = {name.replace(old, new, name.startswith(old)): tensor for name, tensor in stored.items()}
    save_file(stored, destination / "model.safetensors", {"format": "pt"})
    return destination


def assert_equal(logits, expected, plain):
    assert (expected - plain).abs().max() > 0.1
    torch.testing.assert_close(logits, expected, atol=2e-5 * expected.abs().max().item(), rtol=0)


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("name", "kind"),
    [pytest.param(*name.values, kind, marks=name.marks) for name in NAMES for kind in CONFIGS if kind != "attention"]
    + [pytest.param(*name.values, "attention", marks=name.marks) for name in OTHERS],
)
@torch.no_grad()
def test_an_adapter_of_peft_has_its_logits(name, kind, folder_of, tmp_path, capsys):
    folder = folder_of(name)
    plain = theirs(folder)(input_ids=IDS).logits
    stacks = STACKS if name in EXPERTS and kind in ("regex", "list") else None
    exclude = ".*vision_tower.*" if name == "Gemma4" else None  # PEFT refuses this encoder's layers
    config = peft.LoraConfig(r=3, lora_alpha=5, exclude_modules=exclude, target_parameters=stacks, **CONFIGS[kind])
    reference = peft.get_peft_model(theirs(folder), config)
    randomize(reference)
    reference.save_pretrained(tmp_path / "adapter")
    has_others = any("vision" in key for key in load_file(tmp_path / "adapter" / "adapter_model.safetensors"))
    expected = reference(input_ids=IDS).logits
    for base in (folder, with_older_names(folder, tmp_path / "older")):
        model = load_model(base)
        load_adapter(model, tmp_path / "adapter")
        assert_equal(model(IDS), expected, plain)
        assert ("tensors outside the language model" in capsys.readouterr().out) == has_others


SETTINGS = {
    "all": {},
    "some": {"targets": ["model.layers.1.*.o_proj", "*.self_attn.q*_proj"], "dora": True},
    "pissa": {"targets": ["o_proj", "lm_head"], "init": "pissa", "rank": 4},
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "kind"),
    [pytest.param(*name.values, kind, marks=name.marks) for name in NAMES for kind in SETTINGS]
    + [pytest.param(*name.values, "all", marks=name.marks) for name in OTHERS],
)
@torch.no_grad()
def test_peft_reads_what_was_saved_and_a_merge_computes_the_same(name, kind, folder_of, tmp_path, recwarn):
    folder = folder_of(name)
    model, plain = load_model(folder), theirs(folder)(input_ids=IDS).logits
    settings = SETTINGS[kind]
    if model.config.tied_embeddings and "lm_head" in settings.get("targets", ()):
        settings = {**settings, "targets": ["o_proj"]}
    apply_lora(model, LoRAConfig(**{"rank": 3, "alpha": 5, **settings}))
    randomize(model)
    save_adapter(model, tmp_path / "adapter")
    expected = model(IDS)
    reference = peft.PeftModel.from_pretrained(theirs(folder), tmp_path / "adapter")
    assert not any("missing adapter keys" in str(warning.message) for warning in recwarn)
    stored = [key for key in load_file(tmp_path / "adapter/adapter_model.safetensors") if "lora_A" in key]
    assert len(stored) == len([key for key, _ in reference.named_parameters() if "lora_A" in key])
    assert_equal(reference(input_ids=IDS).logits, expected, plain)
    export_folder(tmp_path / "adapter", tmp_path / "merged", merge=True, keep_vision=True, dtype="float32")
    assert_equal(theirs(tmp_path / "merged")(input_ids=IDS).logits, expected, plain)


@torch.no_grad()
def test_rows_of_new_tokens_and_checkpoints_with_names_of_the_language_model_are_read(folder_of, tmp_path):
    folder = folder_of("Gemma3")
    model = load_model(folder, new_ids=[99, 100])
    apply_lora(model, LoRAConfig(rank=2, targets=["q_proj"]))
    randomize(model)
    save_adapter(model, tmp_path / "adapter")
    reference = peft.PeftModel.from_pretrained(theirs(folder), tmp_path / "adapter")
    ids = IDS.clone()
    ids[:, 3] = 100
    assert_equal(reference(input_ids=ids).logits, model(ids), theirs(folder)(input_ids=ids).logits)

    about = tmp_path / "adapter" / "adapter_config.json"  # PEFT also takes a module's whole name
    full = {"model.language_model.embed_tokens": [99, 100]}
    about.write_text(json.dumps(json.loads(about.read_text()) | {"trainable_token_indices": full}))
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    twice = {name.replace("model.language_model.", "model."): tensor.clone() for name, tensor in tensors.items()}
    save_file({**tensors, **twice}, file, {"format": "pt"})
    with pytest.raises(ValueError, match="has two tensors for model"):
        load_adapter(load_model(folder, new_ids=[99, 100]), tmp_path / "adapter")
    save_file(tensors, file, {"format": "pt"})
    older = {name.replace("model.language_model.", "model."): tensor for name, tensor in load_file(file).items()}
    save_file(older, file, {"format": "pt"})
    again = load_model(folder, new_ids=[99, 100])
    load_adapter(again, tmp_path / "adapter")
    torch.testing.assert_close(again(ids), model(ids))
    resumed = load_model(folder, new_ids=[99, 100])
    apply_lora(resumed, LoRAConfig(rank=2, targets=["q_proj"]))
    restore_adapter(tmp_path / "adapter", resumed)
    torch.testing.assert_close(resumed(ids), model(ids))


def test_an_adapter_of_layers_that_see_images_is_not_lost_in_silence(folder_of, tmp_path):
    folder = folder_of("Gemma3")
    for targets, name in ((["q_proj"], "both"), (r".*vision_tower.*q_proj", "images")):
        model = peft.get_peft_model(theirs(folder), peft.LoraConfig(r=2, target_modules=targets))
        model.save_pretrained(tmp_path / name)
    with pytest.raises(ValueError, match="has only 2 tensors outside the language model, such as model.vision_tower"):
        load_adapter(load_model(folder), tmp_path / "images")
    where = {"base": folder, "merge": True, "dtype": "float32"}
    with pytest.raises(ValueError, match="--keep-vision would lose the adapter's model.vision_tower"):
        export_folder(tmp_path / "both", tmp_path / "merged", keep_vision=True, **where)
    export_folder(tmp_path / "both", tmp_path / "merged", **where)


def test_the_reason_of_a_refusal_is_true(folder_of, make_checkpoint, tmp_path):
    def saved(base, model, **settings):
        adapter = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        peft.get_peft_model(model, peft.LoraConfig(r=2, **settings)).save_pretrained(adapter)
        config = json.loads((adapter / "adapter_config.json").read_text()) | {"base_model_name_or_path": str(base)}
        (adapter / "adapter_config.json").write_text(json.dumps(config))
        return adapter

    def reason(base, adapter):
        with pytest.raises(ValueError) as error:
            load_adapter(load_model(base), adapter)
        return str(error.value)

    tied, model = make_checkpoint("gemma")
    adapter = saved(tied, model, target_modules=["q_proj", "lm_head"])
    assert "lm_head takes no adapter, because this model's embedding is also its output layer" in reason(tied, adapter)
    small, model = make_checkpoint("llama")
    assert f"The adapter names the base model {tied}" in reason(small, adapter)
    adapter = saved(small, model, target_modules=["q_proj"])
    assert f"The adapter names the base model {small}" in reason(tied, adapter)
    other = saved(tied, model, target_modules=["up_proj"])  # in truth of the other model
    assert f"The adapter names the base model {tied}" in reason(tied, other)
