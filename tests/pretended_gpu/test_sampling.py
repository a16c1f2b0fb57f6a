"""What an online run keeps on the GPU while it samples."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lean_ft.catalog import find_preset, find_recipe, load_recipe
from lean_ft.host_link import HostLink
from lean_ft.optim.adamw import AdamW
from lean_ft.optim.adamw_8bit import AdamW8bit
from lean_ft.optim.optimizer import Optimizer
from lean_ft.settings_text import load_config
from tests.pretended_gpu.test_order import RULE


@pytest.mark.parametrize(("rule", "state_bytes"), [(AdamW(**RULE), 8 * 2**20), (AdamW8bit(paged=False, **RULE), 2**21)])
def test_state_is_away_and_comes_back_as_it_was(rule: AdamW | AdamW8bit, state_bytes: int) -> None:
    parameter = nn.Parameter(torch.randn(1024, 1024, device="cuda"))
    optimizer = Optimizer([("weight", parameter)], rule, in_backward=False)
    parameter.grad = torch.randn_like(parameter)
    optimizer.set_lr(1e-3)
    optimizer.finish_gradients()
    optimizer.step()
    optimizer.zero_grad()

    def state() -> dict[str, Tensor]:
        return {name: value.cpu().clone() for name, value in optimizer.state_dict().items()}

    link, before, allocated = HostLink(torch.device("cuda", 0)), state(), torch.cuda.memory_allocated()
    for _ in range(2):
        with optimizer.state_away(link):
            assert torch.cuda.memory_allocated() <= allocated - state_bytes
        assert torch.cuda.memory_allocated() == allocated
    assert all(torch.equal(value, before[name]) for name, value in state().items())


def test_a_run_whose_state_goes_away_is_the_same(tmp_path: Path) -> None:
    def run(*more: str) -> list[dict]:
        recipe, folder = load_recipe(find_recipe("grpo")), tmp_path / str(len(more))
        given = [f"output_dir={folder}", "device=cuda", "plan=false", "data.validation_source=null", "batch_size=8"]
        recipe.main(load_config(recipe.Config, find_preset("tiny/grpo"), [*given, "max_steps=3", *more]))
        return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

    names = ("loss", "grad_norm", "reward", "completion_length")
    here, away = run(), run("generation.offload_training_state=true")
    assert [[row[name] for name in names] for row in here] == [[row[name] for name in names] for row in away]
    with pytest.raises(ValueError, match="is in the host's memory at all times"):
        run("generation.offload_training_state=true", "optimizer.state=streamed")
