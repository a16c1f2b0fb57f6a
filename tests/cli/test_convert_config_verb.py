"""`leanft convert-config`: conversion of a torchtune configuration into a preset that `leanft validate` accepts."""

from lean_ft.hub.paths import resolve_model_path
from tests.settings.test_from_torchtune import BASE


def test_what_it_writes_is_valid_and_what_it_leaves_out_is_told(leanft, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    theirs, ours = tmp_path / "theirs.yaml", tmp_path / "ours.yaml"
    here = {
        "/tmp/Llama-3.2-1B-Instruct/\n": f"{resolve_model_path('tiny')}\n",
        "torchtune.datasets.alpaca_cleaned_dataset": "torchtune.datasets.chat_dataset, conversation_style: openai, "
        "conversation_column: messages, source: json, data_files: tiny/train.jsonl",
    }
    # Activation offloading is not valid on a CPU.
    here["enable_activation_offloading: True"] = "enable_activation_offloading: False"
    text = BASE
    for there, path in here.items():
        assert there in text
        text = text.replace(there, path)
    theirs.write_text(text + "cudnn_deterministic_mode: 3\n")
    converted = leanft("convert-config", theirs, "--output", ours)
    assert converted.code == 0, converted.err
    assert "cudnn_deterministic_mode: 3 has no equivalent" in converted.err
    assert f"# {converted.err.splitlines()[0]}" in ours.read_text()
    assert converted.out == f"{ours}: leanft run finetune --config {ours}\n"
    assert leanft("convert-config", theirs).out == ours.read_text()
    valid = leanft("validate", "--config", ours)
    assert valid.code == 0, valid.err
    assert leanft("convert-config", theirs, "-o", ours).code == 2  # no overwriting
    assert leanft("convert-config", ours).code == 2  # not a torchtune configuration
