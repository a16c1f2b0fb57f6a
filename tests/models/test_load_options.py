"""Options of `load_model`: by name, or from the settings of a model."""

from dataclasses import fields
from typing import get_type_hints

import pytest
import torch

from lean_ft.models import REWARD_LABELS, LoadOptions, empty_model, label_fields, load_model, save_model, stored_labels
from lean_ft.models.load_options import LoadKeywords, load_options
from lean_ft.peft import load_with_adapter
from lean_ft.settings import ModelConfig


def test_each_option_is_a_keyword():
    assert {field.name for field in fields(LoadOptions)} == get_type_hints(LoadKeywords).keys()


@pytest.mark.parametrize(
    ("dtype", "keywords", "expected"),
    [
        ("bfloat16", {}, torch.bfloat16),
        ("float16", {}, torch.float32),  # mixed precision
        ("float16", {"dtype": "float16"}, torch.float16),
        ("bfloat16", {"dtype": torch.float32}, torch.float32),
    ],
)
def test_options_by_name_replace_settings(dtype: str, keywords: LoadKeywords, expected: torch.dtype):
    cfg = ModelConfig.model_validate({"path": "tiny", "dtype": dtype, "new_tokens": ["<a>", "<b>"]})
    path, options = load_options(cfg, keywords)
    assert (path, options.dtype, len(options.new_ids)) == ("tiny", expected, 2)
    assert load_options(cfg, {"new_ids": (), **keywords})[1].new_ids == ()
    assert empty_model(cfg, **keywords).dtype == expected


def test_scores_are_labels():
    for load in (
        lambda: load_model("tiny", scores=True),
        lambda: load_with_adapter(ModelConfig(path="tiny"), None, scores=True),
    ):  # type: ignore
        with pytest.raises(ValueError, match="scores is True; expected labels from lean_ft.models: REWARD_LABELS"):
            load()


@pytest.mark.parametrize("labels", [REWARD_LABELS, label_fields(["no", "yes", "maybe"], is_multi=True)])
def test_stored_labels_load_a_folder_as_it_is(tmp_path, labels):
    assert stored_labels(load_model("tiny", "meta").source.folder) is None
    model = load_model("tiny", scores=labels)
    torch.nn.init.normal_(model.output_weight)
    save_model(model, tmp_path)
    with pytest.raises(ValueError, match="it gives scores and no text"):
        load_model(tmp_path)
    again = load_model(tmp_path, scores=stored_labels(tmp_path))
    torch.testing.assert_close(dict(again.named_parameters()), dict(model.named_parameters()), rtol=0, atol=0)
    assert {name: again.source.config[name] for name in labels} == labels
