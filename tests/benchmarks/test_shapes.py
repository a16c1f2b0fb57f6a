"""Shapes equal the published ones, and text fills every position."""

import pytest
import torch
import transformers
from shapes import num_parameters, shape_of

# As the model cards and the safetensors headers on the hub count them.
PUBLISHED_PARAMETERS = {
    "llama3_2_1b": 1_235_814_400,
    "llama3_2_3b": 3_212_749_824,
    "llama3_1_8b": 8_030_261_248,
    "qwen2_5_0_5b": 494_032_768,
    "qwen2_5_1_5b": 1_543_714_304,
    "qwen2_5_7b": 7_615_616_512,
    "qwen3_0_6b": 596_049_920,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "gemma3_1b": 999_885_952,
    "gemma3_4b": 3_880_263_168,
    "phi4_14b": 14_659_507_200,
    "phi4_mini": 3_836_021_760,
    "mistral_7b": 7_248_023_552,
    "smollm2_135m": 134_515_008,
    "smollm2_360m": 361_821_120,
    "smollm2_1_7b": 1_711_376_384,
    "smollm3_3b": 3_075_098_624,
    "olmo2_1b": 1_484_916_736,
    "olmo2_7b": 7_298_617_344,
    "olmo3_7b": 7_298_011_136,
    "gpt_oss_20b": 20_914_757_184,
    "qwen3_30b_a3b": 30_532_122_624,
    # The language models of folders that see too: the hub counts those as a whole.
    "qwen3_5_0_8b": 752_393_024,
    "qwen3_5_2b": 1_881_825_088,
    "qwen3_5_4b": 4_205_751_296,
    "qwen3_5_9b": 8_953_803_264,
    "gemma4_e2b": 4_628_569_344,
    "gemma4_e4b": 7_463_013_376,
    "gemma4_12b": 11_907_350_272,
    "ministral3_3b": 3_429_006_336,
    "ministral3_8b": 8_489_553_920,
}


FIRST = ("gpt_oss_20b",)


@pytest.mark.first(len(FIRST))
@pytest.mark.parametrize("name", dict.fromkeys([*FIRST, *PUBLISHED_PARAMETERS]))
def test_a_shape_has_the_published_number_of_parameters(name):
    shape = {key: value for key, value in shape_of(name).items() if key != "architectures"}
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**shape))
    assert theirs.num_parameters() == PUBLISHED_PARAMETERS[name]
    assert num_parameters(name) == PUBLISHED_PARAMETERS[name]
