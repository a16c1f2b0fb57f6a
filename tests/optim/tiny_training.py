"""A tiny model with a tied weight, and a training loop as recipes write it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lean_ft.optim import Optimizer, build_optimizer
from lean_ft.settings import ModelConfig, OptimizerConfig, RecipeConfig, ScheduleConfig

# Every rule with the settings that change its arithmetic.
CONFIGS: dict[str, dict[str, Any]] = {
    "sgd": {"name": "sgd"},
    "sgd_momentum": {"name": "sgd", "momentum": 0.9},
    "sgd_rounding": {"name": "sgd", "stochastic_rounding": True},
    "adamw": {"name": "adamw"},
    "adamw_ema": {"name": "adamw", "ema": 0.9},
    "adamw_clipping": {"name": "adamw", "update_clipping": True},
    "adamw_rounding": {"name": "adamw", "stochastic_rounding": True},
    "adamw_8bit": {"name": "adamw_8bit"},
    "adamw_8bit_clipping_rounding": {"name": "adamw_8bit", "update_clipping": True, "stochastic_rounding": True},
    "paged_adamw_8bit": {"name": "paged_adamw_8bit"},
    "adamw_8bit_ema": {"name": "adamw_8bit", "ema": 0.9},
    "adamw_8bit_torchao": {"name": "adamw_8bit_torchao"},
    "adamw_8bit_torchao_rounding": {"name": "adamw_8bit_torchao", "stochastic_rounding": True},
    "adamw_4bit": {"name": "adamw_4bit"},
    "adamw_4bit_clipping_rounding": {"name": "adamw_4bit", "update_clipping": True, "stochastic_rounding": True},
    "muon": {"name": "muon"},
    "muon_rounding": {"name": "muon", "stochastic_rounding": True},
    "apollo_mini": {"name": "apollo_mini"},
    "apollo_mini_rounding": {"name": "apollo_mini", "stochastic_rounding": True},
    "adafactor": {"name": "adafactor"},
    "adafactor_rounding": {"name": "adafactor", "stochastic_rounding": True},
}


class Layer(nn.Linear):
    """A subclass, because torch.compile skips modules of torch."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


class TinyModel(nn.Module):
    """Token ids (B, T) -> logits (B, T, 131); the embedding is the output weight too.

    131 * 72 and 72 * 72 are not multiples of an 8-bit block, and the norm is too small to be quantized.
    """

    def __init__(self, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(131, 72)
        self.norm = nn.LayerNorm(72)
        self.layers = nn.ModuleList(Layer(72, 72) for _ in range(3))
        self.head = nn.Linear(72, 131, bias=False)
        self.head.weight = self.embed.weight
        self.to(dtype)

    def forward(self, ids: Tensor, call: Callable[..., Tensor] | None = None) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + torch.relu(layer(x) if call is None else call(layer, x))
        return self.head(self.norm(x))


def make_batches(steps: int, micro_batches: int = 1, seed: int = 1) -> list[list[Tensor]]:
    """steps x micro_batches tensors of token ids (2, 9)."""
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randint(0, 131, (2, 9), generator=generator) for _ in range(micro_batches)] for _ in range(steps)]


def loss_of(model: nn.Module, ids: Tensor, **kwargs: Any) -> Tensor:
    logits = model(ids[:, :-1], **kwargs)
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


class Config(RecipeConfig):
    output_dir: Path = Path("unused")
    model: ModelConfig = ModelConfig(path="unused")
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()


def build(model: nn.Module, settings: dict[str, Any], *, float16: bool = False, **others: Any) -> Optimizer:
    """The optimizer that a recipe with these settings has."""
    loaded = ModelConfig(path="unused", dtype="float16" if float16 else "bfloat16")
    return build_optimizer(model, Config(model=loaded, optimizer=OptimizerConfig.model_validate(settings), **others))


def train(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Sequence[Sequence[Tensor]],
    lrs: Sequence[float],
    max_norm: float | None = None,
    **kwargs: Any,
) -> list[Tensor]:
    """The loop of a recipe; returns the gradient norms."""
    norms = []
    for micro_batches, lr in zip(batches, lrs, strict=True):
        optimizer.set_lr(lr)
        for i, ids in enumerate(micro_batches):
            loss = loss_of(model, ids, **kwargs) / len(micro_batches)
            optimizer.scale(loss, last=i == len(micro_batches) - 1).backward()
        norms.append(optimizer.finish_gradients(max_norm))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def same_weights(a: nn.Module, b: nn.Module) -> bool:
    """Bitwise."""
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def train_both(
    start: Tensor, settings: dict[str, Any], reference: Callable[[list[nn.Parameter]], Any], grads: Sequence[Tensor]
) -> tuple[Tensor, Tensor, dict[str, Tensor], dict[str, Any]]:
    """Update `start` with our optimizer and with a reference at lr 1e-2; returns both weights and both states."""
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizer, expected = build(nn.ParameterList([ours]), settings), reference([theirs])
    optimizer.set_lr(1e-2)
    for grad in grads:
        ours.grad, theirs.grad = grad.to(start.dtype), grad.to(start.dtype, copy=True)
        optimizer.step()
        expected.step()
    state = {name.removeprefix("0."): tensor for name, tensor in optimizer.state_dict().items()}
    return ours.detach(), theirs.detach(), state, expected.state[theirs]
