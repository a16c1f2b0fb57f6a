"""Names of `lora.targets` mean the same layers of a vision tower as in PEFT, or are refused."""

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from lean_ft.models import Decoder, load_model
from lean_ft.peft import apply_lora
from lean_ft.peft.targets import describe_targets, find_targets
from lean_ft.settings import LoRAConfig
from tests.models.vision import documents
from tests.models.vision.documents import CASES

tuners = pytest.importorskip("peft.tuners.tuners_utils")


@pytest.fixture(scope="module", params=CASES)
def both(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module]:
    """A model's folder, and transformers' model."""
    folder, case = tmp_path_factory.mktemp(request.param), CASES[request.param]
    return documents.save(case, folder), documents.reference(case)


def chosen_by_peft(theirs: nn.Module, targets: list[str]) -> set[str]:
    config = tuners.PeftConfig()
    config.target_modules, config.exclude_modules, config.layers_to_transform = set(targets), None, None
    return {name for name, _ in theirs.named_modules() if tuners.check_target_module_exists(config, name)}


def ends(model: Decoder, *, of_tower: bool) -> set[str]:
    """The ends of the names of linear layers in transformers."""
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    names = [model.source.module_name(name) for name in layers if name.startswith("vision.") == of_tower]
    return {name.rpartition(".")[2] for name in names if not name[-1:].isdigit()}


@pytest.mark.first(5)
def test_a_trained_tower_gets_the_adapters_of_peft(both: tuple[Path, nn.Module]) -> None:
    folder, theirs = both
    model = load_model(folder, images="train")
    for end in sorted(ends(model, of_tower=True)):
        expected = {
            name for name in chosen_by_peft(theirs, [end]) if "language_model" not in name and "text_model" not in name
        }
        assert expected
        others = [name for name in expected if not isinstance(theirs.get_submodule(name), nn.Linear)]
        if others:  # PEFT adapts convolutions too
            with pytest.raises(ValueError, match=f"'{end}' matches vision.*, a Conv.*such as"):
                find_targets(model, [end])
        else:
            found = [name for name in find_targets(model, [end]) if name.startswith("vision.")]
            assert {model.source.module_name(name) for name in found} == expected, end
    assert not any(name.startswith("vision.") for name in find_targets(model, ["all-linear"]))


@pytest.mark.first(5)
def test_a_tower_that_does_not_train_is_named(both: tuple[Path, nn.Module]) -> None:
    folder, _ = both
    frozen, none = (load_model(folder, images=images) for images in ("frozen", "none"))
    alone = ends(frozen, of_tower=True) - ends(frozen, of_tower=False)
    for end in sorted(alone):
        with pytest.raises(
            ValueError, match=rf"'{end}' matches only layers of the vision tower \(vision\..*images=train"
        ):
            find_targets(frozen, [end])
        with pytest.raises(
            ValueError, match=f"'{end}' matches only layers of the model's vision tower, and model.images=none"
        ):
            find_targets(none, [end])
    both_have = sorted(ends(frozen, of_tower=True) & ends(frozen, of_tower=False))
    for end in both_have:
        assert find_targets(frozen, [end]) == find_targets(none, [end])


def test_a_pattern_of_the_tower_leaves_the_others_to_the_language_model(tmp_path: Path) -> None:
    model = load_model(documents.save(CASES["gemma3"], tmp_path), images="train")
    names = find_targets(model, ["q_proj", "vision.blocks.0.*", "fc2"])
    tower = [name for name in names if name.startswith("vision.")]
    assert sum("q_proj" in name for name in names) == 3 + 1
    assert [name.endswith("linear_fc2") for name in tower].count(
        True
    ) == 3  # no layer of the language model has this name
    apply_lora(model, LoRAConfig(targets=["q_proj", "fc2"]))
    assert describe_targets(model) == "language model: q_proj (3 layers); vision tower: q_proj, linear_fc2 (6 layers)"
    frozen = load_model(tmp_path, images="frozen")
    apply_lora(frozen, LoRAConfig(targets=["q_proj"]))
    assert describe_targets(frozen) == "language model: q_proj (3 layers); vision tower: no layer"
