"""`leanft check`: table, exit codes and input errors."""

from lean_ft import check


def test_a_model_that_passes(leanft):
    given = ("memory.tile_mlp=2", "compile=true", "data.max_length=48", "device=cpu")
    answer = leanft("check", "tiny", "--quick", "--config", "tiny/lora", "lora.rank=4", *given)
    assert answer.code == 0, answer.out
    lines = answer.out.splitlines()
    assert lines[0].split() == ["check", "what", "was", "compared", "result", "allowed", "verdict"]
    names = [line.split("  ")[0] for line in lines[1:]]
    assert names[:3] == ["token ids", "chat template", "save and read back"]
    assert any("lora" in name for name in names), list(names)
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
