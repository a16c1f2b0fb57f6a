"""Twenty steps of each model with recurrent layers next to transformers, whose losses show the updated weights."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from lean_ft.losses import linear_cross_entropy
from lean_ft.models import load_model
from tests.models.conftest import MakeCheckpoint
from tests.models.state.test_mixers import HYBRIDS
from tests.pretended_gpu.cards import IS_SIMULATED

NUM_STEPS, LR = 20, 1e-3


@pytest.mark.long
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu])])
@pytest.mark.parametrize("case", [*HYBRIDS, "lfm2_moe"])
def test_twenty_steps_equal_transformers(case: str, device: str, make_checkpoint: MakeCheckpoint) -> None:
    folder, theirs = make_checkpoint(case)
    own = load_model(folder, device=device, dtype=torch.float32)
    theirs.train()
    chance = torch.Generator().manual_seed(0)
    batches = [torch.randint(3, 100, (2, 70), generator=chance) for _ in range(NUM_STEPS)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01) for model in (own, theirs)]
    for ids in batches:
        expected = cross_entropy(theirs(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        hidden = own(ids.to(device), return_hidden=True)
        labels = torch.cat((ids[:, 1:], torch.full((2, 1), -100)), 1).to(device)
        sums = linear_cross_entropy(hidden, own.output_weight, labels, num_targets=2 * 69, chunk_tokens=64)
        loss = sums / (2 * 69)
        assert loss.item() == pytest.approx(expected.item(), rel=2e-5 if IS_SIMULATED or device == "cpu" else 2e-4)
        for one, optimizer in ((loss, optimizers[0]), (expected, optimizers[1])):
            one.backward()
            optimizer.step()
            optimizer.zero_grad()
