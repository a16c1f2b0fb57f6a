"""`leanft cat`: the text of presets, and the settings of recipes as YAML."""

import json


def test_a_preset_is_printed_as_it_is(leanft, shipped):
    assert leanft("cat", "tiny/toy").out == (shipped / "configs" / "tiny" / "toy.yaml").read_text()


def test_a_recipes_settings_are_a_preset_that_runs(leanft, shipped, tmp_path):
    answer = leanft.ok("cat", "toy_single_device")
    assert "# Sequences a forward pass.\nbatch_size: 2  # whole number > 0" in answer.out
    preset = tmp_path / "all.yaml"
    preset.write_text(answer.out)
    assert leanft("run", "toy_single_device", "--config", preset, "model.path=m").out == "ran with m 2\n"
    refused = leanft.refused("run", "toy_single_device", "--config", preset)
    assert "model.path" in refused


def test_groups_and_settings_are_printed_alone(leanft, shipped):
    whole, alone = leanft("cat", "toy_single_device").out, leanft("cat", "toy_single_device", "optimizer.lr", "act").out
    assert [line for line in alone.splitlines() if line[:1] not in ("#", "") and not line.startswith("  #")] == [
        line for line in whole.splitlines() if line.startswith(("optimizer:", "  lr:", "act:"))
    ]
    refused = leanft.refused("cat", "toy_single_device", "lr")
    assert "no setting and no group is called 'lr'. Did you mean 'optimizer.lr'?" in refused
    assert "is a preset" in leanft("cat", "tiny/toy", "optimizer").err


def test_the_schema_is_json(leanft, shipped):
    schema = json.loads(leanft("cat", "toy_single_device", "--schema").out)
    assert "batch_size" in schema["properties"]
