"""`leanft check`: table, exit codes and input errors."""

import json
import shutil

import pytest
import torch
import transformers

from lean_ft import check
from lean_ft.export.places import read_source
from lean_ft.hub.paths import resolve_model_path
from lean_ft.quantize.torchao_kinds import quantize, save_quantized


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Few rows and tokens, to save time."""
    monkeypatch.setattr(check, "NUM_ROWS", 3)
    monkeypatch.setattr(check, "NUM_GREEDY_TOKENS", 8)


@pytest.mark.long
def test_a_model_that_passes(leanft):
    given = ("memory.tile_mlp=2", "compile=true", "data.max_length=48", "device=cpu")
    answer = leanft.ok("check", "tiny", "--quick", "--config", "tiny/lora", "lora.rank=4", *given)
    lines = answer.out.splitlines()
    assert lines[0].split() == ["check", "what", "was", "compared", "result", "allowed", "verdict"]
    assert lines.pop() == "skipped: --quick (3 training steps)"
    names = [line.split("  ")[0] for line in lines[1:]]
    assert names[:3] == ["token ids", "chat template", "save and read back"]
    assert any("lora" in name for name in names), list(names)
    assert names[-2:] == ["memory.tile_mlp=2", "3 training steps"]  # --quick skips compile=true
    assert "checking memory.tile_mlp=2" in answer.err


def test_a_difference_or_a_crash_exits_with_1_and_a_refusal_does_not(leanft, monkeypatch):
    monkeypatch.setattr(check, "TEXTS", ())

    def plain(self):
        self.noise = {}
        yield "plain step", "", "2", "1", "DIFFERS"

    monkeypatch.setattr(check.Check, "_plain", plain)
    monkeypatch.setattr(check.Check, "_against_transformers", lambda self: iter([]))
    # The first technique fails without gradients to compare with. The second is refused on a CPU.
    answer = leanft("check", "tiny", "--quick", "memory.tile_mlp=2", "memory.activation_offload=true", "device=cpu")
    assert answer.code == 1
    verdicts = {line.split("  ")[0]: line.split("  ")[-1].strip() for line in answer.out.splitlines()}
    assert verdicts["memory.tile_mlp=2"] == "FAILED" and "FAILED: AttributeError" in answer.out
    together = "all of these together, in float32"
    assert verdicts["memory.activation_offload=true"] == verdicts[together] == "skipped"
    (reason,) = (line for line in answer.out.splitlines() if "memory.activation_offload=true moves" in line)
    assert reason.startswith("skipped: ") and reason.endswith(f"(memory.activation_offload=true, {together})")
    assert "2 of 9 checks failed: plain step, memory.tile_mlp=2\n" in answer.err


@pytest.mark.long
@pytest.mark.parametrize("kind", ["reward model", "quantized", "classifier"])
def test_a_healthy_folder_that_is_not_trained_as_text_passes(leanft, tmp_path, kind):
    folder = tmp_path / "model"
    if kind == "quantized":
        model, tokenizer, _ = read_source(resolve_model_path("tiny"), merge=False, dtype=torch.float32)
        quantize(model, "int8")
        folder.mkdir()
        save_quantized(model, tokenizer, folder, "int8", 32)
    else:
        names = {} if kind == "reward model" else {"num_labels": 3}
        load = transformers.AutoModelForSequenceClassification.from_pretrained
        load(resolve_model_path("tiny"), **{"num_labels": 1, **names}).save_pretrained(folder)
        for file in resolve_model_path("tiny").glob("*token*"):
            shutil.copy(file, folder)
    answer = leanft.ok("check", folder, "--quick", "memory.tile_mlp=2", "optimizer.name=adamw_8bit", "device=cpu")
    table, reasons = answer.out.split("skipped: ", 1)
    verdicts = {line.split("  ")[0]: line.split("  ")[-1].strip() for line in table.splitlines()[1:]}
    assert set(verdicts.values()) == {"ok", "skipped"} and max(map(len, table.splitlines())) <= 120
    assert verdicts["token ids"] == "ok" and verdicts["optimizer.name=adamw_8bit"] == "skipped"
    assert kind == "quantized" or verdicts["scores"] == verdicts["save and read back"] == "ok"
    assert {"quantized": "are quantized", "classifier": "is a classifier of 3 labels"}.get(
        kind, "is a reward"
    ) in reasons


UNREAD = {
    "model_type": (lambda config: config | {"model_type": "my-model"},
        "model_type is 'my-model', which lean_ft does not read"),
    "quantization": (lambda config: config | {"quantization_config": {"quant_method": "gptq"}},
        "weights are quantized (gptq)"),
    "sizes": (lambda config: config | {"hidden_size": 256},
        "has the shape [768, 128]; expected from config.json: [768, 256]"),
}  # fmt: skip


@pytest.mark.parametrize("what", UNREAD)
def test_a_model_that_is_not_read_is_refused_before_transformers_is_imported(leanft, tmp_path, monkeypatch, what):
    change, message = UNREAD[what]
    folder = shutil.copytree(resolve_model_path("tiny"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(change(config)))
    monkeypatch.setattr(check, "Check", None)
    assert message in leanft.refused("check", folder, "device=cpu")


def test_a_table_without_any_check_is_an_error(leanft, monkeypatch):
    skipped = ("token ids", lambda: [("token ids", "", "", "", "skipped: transformers is not installed")])
    monkeypatch.setattr(check.Check, "run", lambda self: iter([skipped, skipped]))
    refusal = leanft("check", "tiny", "--quick", "device=cpu")
    assert refusal.code == 2 and "all of the 2 checks were skipped" in refusal.err


@pytest.mark.long
def test_scores_that_differ_are_found(leanft, tmp_path, monkeypatch):
    load = transformers.AutoModelForSequenceClassification.from_pretrained
    load(resolve_model_path("tiny"), num_labels=3, dtype=torch.float32).save_pretrained(tmp_path)
    for file in resolve_model_path("tiny").glob("*token*"):
        shutil.copy(file, tmp_path)

    def changed(*arguments, **settings):
        model = load_model(*arguments, **settings)
        model.score.weight.data *= 1.001
        return model

    load_model = check.load_model
    monkeypatch.setattr(check, "load_model", changed)
    answer = leanft("check", tmp_path, "--quick", "memory.tile_mlp=2", "device=cpu")
    assert answer.code == 1 and "scores" in answer.err.rpartition("checks failed: ")[2]
