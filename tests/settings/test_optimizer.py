"""The learning rate that a recipe has if none is set."""

import pytest

from lean_ft.settings.describing import commented_yaml
from lean_ft.settings.text import dump, load_config
from tests.settings.cases import REQUIRED, load_recipe

# all parameters, an adapter: docs/hyperparameters.md has the published values.
RATES = {
    **dict.fromkeys(("finetune", "classify", "distill"), (2e-5, 2e-4)),
    **dict.fromkeys(("dpo", "kto", "grpo", "online_dpo", "ppo"), (1e-6, 1e-5)),
    "reward": (1e-5, 1e-4),
}


def config_of(recipe, *settings):
    given = ["model.path=tiny", "data.source=rows.jsonl", *REQUIRED.get(recipe, ())]
    return load_config(load_recipe(recipe).Config, None, [*given, *settings])


@pytest.mark.parametrize("recipe", RATES)
def test_an_adapter_has_a_default_rate_of_its_own(recipe):
    full, adapter = RATES[recipe]
    assert config_of(recipe).optimizer.lr == full
    assert config_of(recipe, "lora={}").optimizer.lr == config_of(recipe, "lora.rank=64").optimizer.lr == adapter
    assert config_of(recipe, "lora={}", "optimizer.lr=3e-3").optimizer.lr == 3e-3
    assert config_of(recipe, "lora={}", "optimizer.lr=3e-3", "optimizer.lr=null").optimizer.lr == adapter
    assert f"Here: {full:g}, or {adapter:g} for an adapter." in commented_yaml(load_recipe(recipe).Config, 500)


def test_the_record_of_a_run_has_the_number(tmp_path):
    adapted = config_of("finetune", "lora={}")
    (tmp_path / "config.yaml").write_text(dump(adapted))
    again = load_config(load_recipe("finetune").Config, tmp_path / "config.yaml", [])
    assert again == adapted and "lr" in again.optimizer.model_fields_set
