"""Odd tensors of an adapter's file are a ValueError."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from lean_ft import load_model
from lean_ft.models import REWARD_LABELS
from lean_ft.peft import apply_lora, load_adapter, save_adapter
from lean_ft.peft.stored_adapter import labels_of
from lean_ft.settings import LoRAConfig


@pytest.mark.parametrize("shape", [(), (0, 4), (0,)], ids=str)
def test_tensors_without_values_are_refused(shape, make_checkpoint, tmp_path):
    folder = make_checkpoint("qwen2")[0]
    model = load_model(folder, scores=REWARD_LABELS)
    apply_lora(model, LoRAConfig(rank=2, dora=True))
    save_adapter(model, tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    for name in ("score.weight", "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"):
        found = next(key for key in tensors if key.endswith(name))
        save_file({**tensors, found: torch.zeros(shape)}, file)
        (tmp_path / "labels.json").unlink(missing_ok=True)
        for read in (labels_of, lambda adapter: load_adapter(load_model(folder), adapter)):
            with pytest.raises(
                ValueError, match=rf"{name} has the shape .*; expected a vector or a matrix with values"
            ):
                read(tmp_path)
