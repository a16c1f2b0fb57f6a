"""The real recipe, with the real data, decoder and optimizers: a resumed run is the uninterrupted one, bit for bit."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from lean_ft.config import load_config
from recipes import full_finetune_single_device as recipe
from tests.training.toy_runs import QWEN, digests, metrics


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A model folder whose tokenizer has a token for every byte, and 13 rows of prompts and completions."""
    folder = tmp_path_factory.mktemp("inputs")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate([*alphabet, "<end>"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    (folder / "config.json").write_text(json.dumps({**QWEN, "vocab_size": 264}))
    rows = [{"prompt": f"{n} times {n} is ", "completion": str(n * n)[: 1 + n % 3] * (1 + n % 4)} for n in range(13)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def train(inputs):
    def run(output_dir, *settings):
        arguments = [f"model.path={inputs}", "model.random_init=true", "model.dtype=float32", "device=cpu"]
        arguments += [f"data.source={inputs / 'rows.jsonl'}", "data.max_length=48", "gradient_accumulation_steps=2"]
        arguments += ["optimizer.lr=0.01", "schedule.name=constant", "epochs=3", f"output_dir={output_dir}"]
        recipe.main(load_config(recipe.Config, None, [*arguments, *settings]))
        return output_dir

    return run


RULES = ("adamw", "adamw_8bit", "paged_adamw_8bit", "adafactor", "sgd")


@pytest.mark.parametrize(
    "settings",
    [
        *(
            [f"optimizer.name={rule}", f"optimizer.in_backward={in_backward}", f"data.packing={packing}"]
            for rule in RULES
            for in_backward in ("false", "true")
            for packing in ("none", "bfd")
        ),
        ["optimizer.name=adamw", "clip_grad_norm=0.5"],
        ["optimizer.name=adamw_8bit", "model.dtype=bfloat16", "optimizer.update_clipping=true"],
        ["optimizer.name=adamw", "model.dtype=bfloat16", "optimizer.stochastic_rounding=true"],
        ["optimizer.name=adamw", "model.dtype=float16"],
        ["optimizer.name=sgd", "optimizer.momentum=0.9", "memory.activation_checkpointing=full"],
    ],
    ids=" ".join,
)
def test_resumed_equals_uninterrupted(settings, train, tmp_path):
    whole = train(tmp_path / "whole", *settings)
    last = max(p.name for p in whole.glob("step_*"))
    train(tmp_path / "run", *settings, "max_steps=2")
    train(tmp_path / "run", *settings, "max_steps=5")
    train(tmp_path / "run", *settings)
    assert digests(tmp_path / "run" / last) == digests(whole / last)
    assert metrics(tmp_path / "run", timed=False) == metrics(whole, timed=False)
    losses = [row["loss"] for row in metrics(whole)]
    assert losses[-1] < losses[0]


def test_data_is_known_by_its_content(train, inputs, tmp_path):
    train(tmp_path / "run", "max_steps=2")
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes((inputs / "rows.jsonl").read_bytes())
    train(tmp_path / "run", "max_steps=4", f"data.source={moved}")
    assert (tmp_path / "run/step_00000004").exists()

    moved.write_text(moved.read_text().replace("5 times 5", "6 times 5"))
    refusal = r"other data, and.*\n  data\.source: .*rows.jsonl.* then, .*moved.jsonl.* now\n  data fingerprint: "
    with pytest.raises(ValueError, match=refusal):
        train(tmp_path / "run2", f"resume={tmp_path / 'run/step_00000002'}", f"data.source={moved}")
    with pytest.raises(ValueError, match=r"\n  data\.max_length: 48 then, 40 now"):
        train(tmp_path / "run", "data.max_length=40")
