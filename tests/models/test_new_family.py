"""scripts/new_family.py finds rows that were left out, and explains what other families lack."""

import ast
import shutil
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
import transformers

from lean_ft.models import decoder_config, load_model
from lean_ft.models.families import FAMILIES
from scripts import new_family
from scripts.family_source import insert
from tests.models.family_cases import CASES, SIZES

ROOT = Path(__file__).parents[2]


pytestmark = pytest.mark.usefixtures("own_families")  # the search replaces rows


def configs_of(family):
    cases = [settings for model_type, settings in CASES.values() if model_type == family]
    return [transformers.AutoConfig.for_model(family, **{**SIZES, **settings}).to_dict() for settings in cases]


@pytest.mark.long
def test_a_row_that_is_left_out_is_found_and_written(capsys, tmp_path):
    """It reads the family's configurations as the row that a person wrote."""
    expected = [decoder_config(config) for config in configs_of("olmo2")]
    assert new_family.main(["olmo2", "--again"]) == 0
    progress = capsys.readouterr().out
    row, case, other_case, draws, line = (part.strip() for part in progress.split("\n\n")[-5:])
    assert "2 tensors without a match: self_attn.k_norm [16], self_attn.q_norm [48] of the folder" in progress
    assert 'norm_placement="post"' in progress and "equal" in progress
    assert line.startswith("| `olmo2` | allenai/OLMo-2-")
    files = [
        "lean_ft/models/families/dense.py",
        "tests/models/family_cases.py",
        "tests/models/random_configurations.py",
        "docs/families.md",
    ]
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    insert(tmp_path, "olmo2", row, [case, other_case], draws, line)
    modules = []
    for file in files[:2]:
        spec = spec_from_file_location("written", tmp_path / file)
        modules.append(module_from_spec(spec))
        spec.loader.exec_module(modules[-1])
    assert (tmp_path / files[2]).read_text().count('"olmo2": SQUARE,') == 1
    printed = ast.literal_eval(f"{{{case}{other_case}}}")
    assert printed.items() <= modules[1].CASES.items()
    assert printed["olmo2_others"][1].items() >= {"rms_norm_eps": 1e-3, "attention_bias": True}.items()
    assert line in (tmp_path / "docs" / "families.md").read_text().splitlines()
    FAMILIES["olmo2"] = modules[0].DENSE["olmo2"]
    assert [decoder_config(config) for config in configs_of("olmo2")] == expected


@pytest.mark.long
def test_a_family_that_needs_another_fact_is_explained(capsys):
    """BitNet has a norm before each output projection, which no row has."""
    assert new_family.main(["bitnet"]) == 1
    printed = capsys.readouterr().out
    assert "No row and no combination of facts computes bitnet." in printed
    assert "- 2 tensors without a match: mlp.ffn_sub_norm [80], self_attn.attn_sub_norm [48] of the folder" in printed
    assert "modeling_bitnet.py" in printed


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("kolibr1", "has no model_type 'kolibr1'. Did you mean 'kolibri1'?"),
        ("vit", "vit is not a causal language model"),
        ("bert", "lean_ft refuses bert: it is an encoder"),
        ("deepseek_v32", "lean_ft refuses deepseek_v32: an indexer chooses"),
        ("llama", "lean_ft reads llama already. Pass --again"),
        ("kimi_k2", "lean_ft reads kimi_k2 already, as deepseek_v3"),
        ("llava", "lean_ft reads llava: the language model inside is llama or"),
    ],
)
def test_a_type_without_a_search_has_one_line(model_type, message):
    with pytest.raises(SystemExit) as exited:
        new_family.main([model_type])
    assert message in exited.value.code and "\n" not in exited.value.code


@pytest.mark.long
@pytest.mark.parametrize("model_type", ["gpt_neo", "mamba2", "zamba2", "beam"])
def test_fields_that_must_suit_the_sizes_do(model_type, capsys):
    search = new_family.Search(model_type)
    assert len(search.checkpoints) == 3 and search.checkpoints[2].model.config.num_hidden_layers == 7
    assert search.defaults and "does not compute" not in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("gemma4_assistant", "ValueError: hidden_size_per_layer_input must be 0, got 256"),
        ("xlnet", "The model xlnet is one of the few models that has no sequence length limit"),
        ("musicgen_melody", "transformers does not compute the small checkpoints"),
    ],
)
def test_a_type_that_transformers_does_not_compute_has_its_reason(model_type, reason):
    with pytest.raises(SystemExit) as exited:
        new_family.main([model_type])
    assert (
        f"{model_type}: transformers does not compute the small checkpoints that the search compares: "
        in exited.value.code
    )
    assert reason in exited.value.code and "\n" not in exited.value.code


@pytest.mark.long
@pytest.mark.parametrize("family", ["kolibri1", "dots1", "glm4_moe", "cohere", "starcoder2", "exaone4"])
def test_larger_families_are_found(family, make_checkpoint, capsys):
    """The found row gives transformers' logits on the cases that people wrote, or refuses a field of them."""
    assert new_family.main([family, "--again"]) == 0
    assert f'"{family}"] = Family(' in capsys.readouterr().out
    num_equal = 0
    for case, (model_type, _) in CASES.items():
        if model_type != family:
            continue
        folder, reference = make_checkpoint(case)
        ids = torch.randint(0, 101, (2, 40), generator=torch.Generator().manual_seed(1))
        try:
            model = load_model(folder)
        except ValueError:
            continue
        torch.testing.assert_close(model(ids), reference(ids).logits, atol=1e-4, rtol=1e-4)
        num_equal += 1
    assert num_equal


@pytest.mark.long
def test_an_order_of_layers_that_no_row_has_is_asked_for(capsys):
    assert new_family.main(["flint", "--again"]) == 1
    assert "One function is missing: has_window(fields, layer)" in capsys.readouterr().out
