"""`leanft check`: table, exit codes and input errors."""

import pytest

from lean_ft import check


def test_a_model_that_passes(leanft):
    answer = leanft("check", "tiny", "--quick", "memory.tile_mlp=2", "compile=true", "data.max_length=48", "device=cpu")
    assert answer.code == 0, answer.out
    lines = answer.out.splitlines()
    assert lines[0].split() == ["check", "what", "was", "compared", "result", "allowed", "verdict"]
    names = [line.split("  ")[0] for line in lines[1:]]
    assert names[:3] == ["token ids", "chat template", "save and read back"]
    assert names[-2:] == ["memory.tile_mlp=2", "3 training steps"]  # --quick skips compile=true
    assert "checking memory.tile_mlp=2" in answer.err


def test_a_difference_or_a_crash_exits_with_1_and_a_refusal_does_not(leanft, monkeypatch):
    monkeypatch.setattr(check, "TEXTS", ())
    monkeypatch.setattr(check.Check, "_plain", lambda self: iter([("plain step", "", "2", "1", "DIFFERS")]))
    monkeypatch.setattr(check.Check, "_against_transformers", lambda self: iter([]))
    # The first technique fails without a plain step to compare with. The second is refused on a CPU.
    answer = leanft("check", "tiny", "--quick", "memory.tile_mlp=2", "memory.activation_offload=true", "device=cpu")
    assert answer.code == 1
    verdicts = {line.split("  ")[0]: line.split("  ")[-1].strip() for line in answer.out.splitlines()}
    assert verdicts["memory.tile_mlp=2"] == "FAILED" and "AttributeError" in answer.out
    assert "memory.activation_offload=true moves" in verdicts["memory.activation_offload=true"]
    together = "all of these together, in float32"
    assert verdicts[together].startswith("skipped: memory.activation_offload=true moves")
    assert "2 of 9 checks failed: plain step, memory.tile_mlp=2\n" in answer.err


def test_a_preset_gives_its_techniques_and_the_training_steps(leanft, monkeypatch):
    """Each technique of the preset alone, and all except stochastic rounding together."""
    made = {}

    def note(self, folder, configure, techniques, command):
        made.update(techniques=techniques, command=command, cfg=configure([]))

    monkeypatch.setattr(check.Check, "__init__", note)
    monkeypatch.setattr(check.Check, "run", lambda self: iter([]))
    arguments = ("--config", "smollm2_135m/full", "data.max_length=99", "lora.rank=4", "lora.quantize=nf4")
    assert leanft("check", "tiny", *arguments).code == 0
    *alone, together = made["techniques"].values()
    assert alone == [
        "data.packing=bfd",
        "optimizer.name=adamw_8bit",
        "optimizer.in_backward=true",
        "optimizer.stochastic_rounding=true",
        "memory.activation_checkpointing=selective",
        "compile=true",
        "lora.rank=4 lora.quantize=nf4",
    ]
    assert together.split() == [word for text in alone for word in text.split() if "rounding" not in word]
    assert made["command"][:4] == ["finetune", "--config", "smollm2_135m/full", "data.max_length=99"]
    assert made["cfg"].data.max_length == 99 and made["cfg"].data.packing == "none"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("no/such/folder",), "no/such/folder"),
        (("tiny", "--config", "tiny/dpo"), "is for the recipe dpo; expected finetune or full_finetune_single_device"),
        (("tiny", "--config", "tiny/none"), "tiny/none"),
        (("tiny", "optimizer.nam=adamw"), "Did you mean 'optimizer.name'"),
        (("tiny", "memory.tile_mlp=many"), "memory.tile_mlp"),
        (("tiny", "data.source=none.jsonl"), "none.jsonl"),
        (("tiny", "model.path=tiny"), "model.path is MODEL"),
        (("tiny", "--fast"), "has no option --fast"),
    ],
    ids=str,
)
def test_wrong_input_exits_with_2(leanft, arguments, message):
    answer = leanft("check", *arguments)
    assert (answer.code, answer.out) == (2, "")
    assert message in answer.err
