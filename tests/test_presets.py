"""The presets for published models: short, true, and nothing in them that goes without saying.

What a preset's comment says of its size is computed here, from the model's shape. What it says of memory is a result of
`benchmarks/pretended_ladder.py`: what PyTorch's allocator reserves on a pretended card of the size that is named.
"""

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from lean_ft import catalog, hub
from lean_ft.paths import resolve_model_path
from lean_ft.plan.devices import find_device
from lean_ft.plan.rehearsal import rehearse
from lean_ft.settings_text import describe, load_config, preset_recipe, preset_values

GIB = 2**30
SPARE_BYTES = 0.75 * GIB  # of a card, for the driver's context and what shares the card
_RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
ROWS = {
    row["label"]: row for row in json.loads(next(_RESULTS.glob("pretended_ladder_presets_*.json")).read_text())["rows"]
}


@dataclass(frozen=True)
class Model:
    """A published model: its name, parameters by the hub's count, and shape by its config.json."""

    title: str
    repo: str
    num_parameters: int
    H: int  # hidden size
    I: int  # noqa: E741  # intermediate size
    L: int  # layers
    heads: tuple[int, int, int]  # of queries, of keys and values, and their size
    V: int  # vocabulary
    tied: bool
    small: str = ""  # what has few parameters: biases, norms

    @property
    def attention(self) -> tuple[int, int]:
        """Features of the queries, and of the keys, which are those of the values."""
        queries, keys, size = self.heads
        return queries * size, keys * size

    def layer_parameters(self) -> int:
        q, k = self.attention
        few = {
            "": 2 * self.H,
            "qkv biases": 2 * self.H + q + 2 * k,
            "norms of heads": 2 * self.H + 2 * self.heads[2],
            "norms of heads and outputs": 4 * self.H + 2 * self.heads[2],
            "norms of queries and keys": 2 * self.H + q + k,
        }
        return 2 * self.H * (q + k) + 3 * self.H * self.I + few[self.small]

    def count(self) -> int:
        return self.L * self.layer_parameters() + self.H + self.V * self.H * (1 if self.tied else 2)


MODELS = {
    "llama3_2_1b": Model(
        "Llama 3.2 1B Instruct (gated)", "meta-llama/Llama-3.2-1B-Instruct", 1_235_814_400,
        2048, 8192, 16, (32, 8, 64), 128_256, tied=True),
    "llama3_2_3b": Model(
        "Llama 3.2 3B Instruct (gated)", "meta-llama/Llama-3.2-3B-Instruct", 3_212_749_824,
        3072, 8192, 28, (24, 8, 128), 128_256, tied=True),
    "llama3_1_8b": Model(
        "Llama 3.1 8B Instruct (gated)", "meta-llama/Llama-3.1-8B-Instruct", 8_030_261_248,
        4096, 14_336, 32, (32, 8, 128), 128_256, tied=False),
    "qwen2_5_0_5b": Model(
        "Qwen2.5 0.5B Instruct", "Qwen/Qwen2.5-0.5B-Instruct", 494_032_768,
        896, 4864, 24, (14, 2, 64), 151_936, tied=True, small="qkv biases"),
    "qwen2_5_1_5b": Model(
        "Qwen2.5 1.5B Instruct", "Qwen/Qwen2.5-1.5B-Instruct", 1_543_714_304,
        1536, 8960, 28, (12, 2, 128), 151_936, tied=True, small="qkv biases"),
    "qwen2_5_7b": Model(
        "Qwen2.5 7B Instruct", "Qwen/Qwen2.5-7B-Instruct", 7_615_616_512,
        3584, 18_944, 28, (28, 4, 128), 152_064, tied=False, small="qkv biases"),
    "qwen3_0_6b": Model(
        "Qwen3 0.6B", "Qwen/Qwen3-0.6B", 596_049_920,
        1024, 3072, 28, (16, 8, 128), 151_936, tied=True, small="norms of heads"),
    "qwen3_4b": Model(
        "Qwen3 4B", "Qwen/Qwen3-4B", 4_022_468_096,
        2560, 9728, 36, (32, 8, 128), 151_936, tied=True, small="norms of heads"),
    "qwen3_8b": Model(
        "Qwen3 8B", "Qwen/Qwen3-8B", 8_190_735_360,
        4096, 12_288, 36, (32, 8, 128), 151_936, tied=False, small="norms of heads"),
    "gemma3_1b": Model(
    "Gemma 3 1B Instruct (gated)", "google/gemma-3-1b-it", 999_885_952,
        1152, 6912, 26, (4, 1, 256), 262_144, tied=True, small="norms of heads and outputs"),
    "gemma3_4b": Model(  # the hub counts 4,300,079,472 with its vision model
        "Gemma 3 4B Instruct (gated), its language model", "google/gemma-3-4b-it", 3_880_263_168,
        2560, 10_240, 34, (8, 4, 256), 262_208, tied=True, small="norms of heads and outputs"),
    "phi4_14b": Model(
        "Phi-4 14B", "microsoft/phi-4", 14_659_507_200,
        5120, 17_920, 40, (40, 10, 128), 100_352, tied=False),
    "phi4_mini": Model(
        "Phi-4-mini Instruct", "microsoft/Phi-4-mini-instruct", 3_836_021_760,
        3072, 8192, 32, (24, 8, 128), 200_064, tied=True),
    "mistral_7b": Model(
        "Mistral 7B Instruct v0.3", "mistralai/Mistral-7B-Instruct-v0.3", 7_248_023_552,
        4096, 14_336, 32, (32, 8, 128), 32_768, tied=False),
    "smollm2_135m": Model(
        "SmolLM2 135M Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct", 134_515_008,
        576, 1536, 30, (9, 3, 64), 49_152, tied=True),
    "smollm2_360m": Model(
        "SmolLM2 360M Instruct", "HuggingFaceTB/SmolLM2-360M-Instruct", 361_821_120,
        960, 2560, 32, (15, 5, 64), 49_152, tied=True),
    "smollm2_1_7b": Model(
        "SmolLM2 1.7B Instruct", "HuggingFaceTB/SmolLM2-1.7B-Instruct", 1_711_376_384,
        2048, 8192, 24, (32, 32, 64), 49_152, tied=True),
    "smollm3_3b": Model(
        "SmolLM3 3B", "HuggingFaceTB/SmolLM3-3B", 3_075_098_624,
        2048, 11_008, 36, (16, 4, 128), 128_256, tied=True),
    "olmo2_1b": Model(
        "OLMo 2 1B Instruct", "allenai/OLMo-2-0425-1B-Instruct", 1_484_916_736,
        2048, 8192, 16, (16, 16, 128), 100_352, tied=False, small="norms of queries and keys"),
    "olmo2_7b": Model(
        "OLMo 2 7B Instruct", "allenai/OLMo-2-1124-7B-Instruct", 7_298_617_344,
        4096, 11_008, 32, (32, 32, 128), 100_352, tied=False, small="norms of queries and keys"),
}  # fmt: skip


def comment(model: Model, name: str) -> str:
    """What a preset says of its model."""
    row, kind = ROWS[name], name.partition("/")[2]
    size = f"{model.num_parameters / 1e9:.2f} B parameters, {2 * model.num_parameters / 1e9:.1f} GB of weights"
    what = {"full": "", "lora": ", an adapter", "qlora": ", an adapter, its weights frozen in 4 bits"}[kind]
    return (
        f"# {model.title}{what}: {size}.\n"
        f"# {'All of it' if kind == 'full' else 'It'} trains on a GPU with {row['card_gb']} GB: "
        f"{row['reserved_bytes'] / GIB:.1f} GiB at the peak, by PyTorch's allocator on a pretended card.\n"
    )


PRESETS = {name: file for name, file in catalog.presets().items() if not name.startswith("tiny/")}


def recipe_name(preset: str) -> str:
    name = preset_recipe(catalog.find_preset(preset))
    assert name is not None
    return name


def test_every_model_has_a_preset():
    assert {name for name in PRESETS if name.endswith("/full")} == {f"{name}/full" for name in MODELS}


@pytest.mark.parametrize("name", MODELS)
def test_the_shape_has_as_many_parameters_as_the_hub_counts(name):
    assert MODELS[name].count() == MODELS[name].num_parameters


@pytest.mark.parametrize("name", PRESETS)
def test_the_comment_is_what_the_shape_and_the_allocator_give(name):
    file, model, row = catalog.find_preset(name), MODELS[name.partition("/")[0]], ROWS[name]
    cfg = load_config(catalog.load_recipe(catalog.find_recipe(recipe_name(name))).Config, file)
    assert file.read_text().startswith(comment(model, name))
    assert row["reserved_bytes"] + SPARE_BYTES <= row["memory_bytes"], "less than that would be left of the card"
    # What was measured is what the preset says now, but for where it takes its model and data from.
    assert row["values"] == preset_values(file), "run benchmarks/pretended_ladder.py --tables presets --again"
    assert cfg.model.path == model.repo
    assert hub.parse_name(cfg.model.path) is not None
    assert cfg.output_dir.name == name.removesuffix("/full").replace("/", "_")


def test_an_adapters_peak_is_the_planners(tmp_path):
    """Of a Llama; the others stand beside each other in docs/memory.md."""
    name = "llama3_1_8b/qlora"
    recipe = catalog.load_recipe(catalog.find_recipe(recipe_name(name)))
    folder, model = tmp_path / "model", MODELS["llama3_1_8b"]
    shutil.copytree(resolve_model_path("tiny"), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    queries, keys, head_dim = model.heads
    sizes = {
        "hidden_size": model.H,
        "intermediate_size": model.I,
        "num_hidden_layers": model.L,
        "num_attention_heads": queries,
        "num_key_value_heads": keys,
        "head_dim": head_dim,
        "vocab_size": model.V,
        "tie_word_embeddings": model.tied,
    }
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **sizes}))
    cfg = load_config(recipe.Config, catalog.find_preset(name), [f"model.path={folder}", f"output_dir={tmp_path}/run"])
    card = replace(find_device("RTX 4090"), memory_bytes=ROWS[name]["memory_bytes"])
    assert rehearse(recipe, cfg, card).reserved_bytes == pytest.approx(ROWS[name]["reserved_bytes"], rel=0.02)


@pytest.mark.parametrize("name", [*PRESETS, "tiny/full", "tiny/lora"])
def test_a_preset_states_nothing_that_goes_without_saying(name):
    recipe, file = catalog.load_recipe(catalog.find_recipe(recipe_name(name))), catalog.find_preset(name)
    cfg = load_config(recipe.Config, file).model_dump(mode="json")
    defaults = {setting.key: setting for setting in describe(recipe.Config)}
    for key in preset_values(file):
        if key not in defaults:  # a group without settings of its own: it is turned on
            assert preset_values(file)[key] == "{}"
            continue
        if defaults[key].required:
            continue
        value: Any = cfg
        for part in key.split("."):
            value = value[part]
        assert value != defaults[key].default, key
    text = file.read_text()
    assert text.startswith("# ")
    assert len(text.splitlines()) <= 20


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_validates_without_a_network(name, hub_server):
    from typer.testing import CliRunner

    from lean_ft.cli.main import app

    answer = CliRunner().invoke(app, ["validate", recipe_name(name), "--config", name])
    assert answer.exit_code == 0, answer.output
    assert "# ok" in answer.output
    assert hub_server.requests == []
