"""Tiles change the memory of a feed-forward layer, but no number."""

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from lean_ft.memory import apply_memory, tile_mlp
from lean_ft.settings import MemoryConfig
from tests.memory.tiny_step import backward, relative_error, tiny


def test_bfloat16_sums_over_tiles_cost_less_than_a_second_rounding() -> None:
    exact = backward(tiny(torch.float64))
    plain, tiled = tiny(torch.bfloat16), tiny(torch.bfloat16)
    tile_mlp(tiled, 8)
    assert relative_error(backward(tiled), exact) < 1.5 * relative_error(backward(plain), exact)


@pytest.mark.first(2)
# 96 tokens: even, uneven, and more tiles than tokens.
@pytest.mark.parametrize(("num_tiles", "checkpointing"), [(2, "none"), (5, "full"), (100, "none")])
def test_hooks_fire_once_with_the_whole_gradient(num_tiles: int, checkpointing: str) -> None:
    model = tiny()
    memory = MemoryConfig.model_validate({"tile_mlp": num_tiles, "activation_checkpointing": checkpointing})
    apply_memory(model, memory, compile=False)
    fired: Counter[str] = Counter()
    seen: dict[str, Tensor] = {}
    for name, param in model.named_parameters():

        def note(param: Tensor, name: str = name) -> None:
            fired[name] += 1
            assert param.grad is not None
            seen[name] = param.grad.clone()

        param.register_post_accumulate_grad_hook(note)
    backward(model)
    assert fired == Counter({name: 1 for name, _ in model.named_parameters()})
    assert relative_error(seen, backward(tiny())) < 1e-5


def test_only_one_tile_of_inner_activations_exists() -> None:
    """The widest tensor that is ever made inside the layers has a tile's tokens."""
    model = tiny()
    inner = model.layers[0].mlp.down_proj.in_features
    tokens: list[int] = []
    for layer in model.layers:
        layer.mlp.down_proj.register_forward_pre_hook(lambda _, args: tokens.append(args[0].numel() // inner))
    tile_mlp(model, 4)
    backward(model)
    assert set(tokens) == {24}
    assert len(tokens) == 2 * 4 * len(model.layers)  # each tile forward, and again in backward


def test_a_layer_that_returns_more_than_its_result_is_tiled_too() -> None:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.expert = nn.Linear(8, 3), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            logits = self.router(x.flatten(0, -2))
            return self.expert(x) * logits.softmax(-1)[:, :1].view(*x.shape[:-1], 1), logits

    torch.manual_seed(0)
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Module()])
    mlp = model.layers[0].mlp = Mixture()
    x, found = torch.randn(2, 7, 8), []
    for tiles in (1, 3):
        if tiles > 1:
            tile_mlp(model, tiles)
        result, logits = mlp(x)
        assert result.shape == x.shape and logits.shape == (14, 3)
        mlp.zero_grad()
        (result.square().sum() + logits.square().sum()).backward()
        found.append({name: param.grad.clone() for name, param in mlp.named_parameters()})
    assert relative_error(found[1], found[0]) < 1e-6


def test_what_cannot_be_tiled_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 tiles"):
        tile_mlp(tiny(), 1)
    with pytest.raises(ValueError, match="have an `mlp`"):
        tile_mlp(nn.Linear(2, 2), 2)
