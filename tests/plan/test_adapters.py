"""Plans with adapters: the frozen model has no gradients or optimizer state, and a quantized model is small."""

import pytest
import torch

from lean_ft.models import load_model
from lean_ft.models.frozen_weight import quantized_weights
from lean_ft.peft import apply_lora, quantize_as_loaded
from lean_ft.settings import LoRAConfig
from tests.recipes.conftest import planned


@pytest.mark.long
@pytest.mark.parametrize("lora", [{"quantize": "nf4"}, {}, {"dora": True}], ids=str)
def test_weights_and_states_are_their_real_bytes(lora, small_model):
    own = ["batch_size=2", "data.max_length=256", f"model.path={small_model}", "data.source=none.jsonl", "lora.rank=4"]
    own += [f"lora.{name}={str(value).lower()}" for name, value in lora.items()]
    parts = planned("lora_finetune_single_device", *own, device=None).peak.bytes_by_label

    cfg = LoRAConfig(rank=4, **lora)
    model = load_model(small_model, random_init=True, dtype=torch.bfloat16, quantize=quantize_as_loaded(cfg.quantize))
    apply_lora(model, cfg)
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    weights = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    # In the plan all matrices of the quantized model share one table of levels; here each has its own.
    slack = 2**20 if quantized_weights(model) else 2**12
    assert abs(parts["weights"] - weights) < slack
    assert 0 <= parts["optimizer state"] - 2 * trained < 2**18
    assert parts.get("gradients", 0) <= trained
