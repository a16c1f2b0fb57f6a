"""Drafting layers that are computed: their hidden states are those of transformers' modules, and their tensors are
saved under the folder's names."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lean_ft.models import load_model, save_model
from lean_ft.settings import ModelConfig
from tests.models.drafting_checkpoints import NAMES, checkpoint_with_drafting
from tests.models.family_cases import CASES

TRAIN = {"dtype": "float32", "mtp": "train"}
IDS = torch.randint(3, 90, (1, 17), generator=torch.Generator().manual_seed(2))
# Families whose layers come one after another, and a case with several.
COUNTED = {"glm4_moe": 2, "deepseek_v3": 2}


OF_FAMILIES = ["glm4_moe", "deepseek_v3", "qwen3_next"]
OF_FAMILIES += [case for case, (family, _) in CASES.items() if family in NAMES and case not in OF_FAMILIES]


@pytest.mark.first(3)
@pytest.mark.parametrize("case", OF_FAMILIES)
def test_hidden_states_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    made = checkpoint_with_drafting(tmp_path / "model", case, COUNTED.get(case, 1))
    model = load_model(ModelConfig(path=str(made.folder), **TRAIN))
    with torch.no_grad():
        hidden, drafts = model(IDS, return_hidden=True, return_drafts=True)
        torch.testing.assert_close(model.logits(hidden), made.model(IDS).logits, atol=2e-4, rtol=2e-4)
        for depth, (own, theirs) in enumerate(zip(drafts, made.drafted(IDS), strict=True), 1):
            torch.testing.assert_close(own[:, :-depth], theirs, atol=2e-4, rtol=2e-4)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained and all(int(name.split(".")[2]) >= model.config.num_layers for name in trained)
    save_model(model, tmp_path / "saved")
    before, after = load_file(made.folder / "model.safetensors"), load_file(tmp_path / "saved" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
