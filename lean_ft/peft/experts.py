"""Adapters for a mixture's experts: one low-rank pair per expert for each of the two stacked projections.

The experts' backward pass adds the low-rank products, so W + scaling * B A is never formed and nothing more is kept for
backward. DoRA, dropout and PiSSA are not supported for stacks, because PEFT has no format for them.

Source: Hu et al. 2021, https://arxiv.org/abs/2106.09685, with the layout of PEFT's `target_parameters`.

Shapes: E experts, R rank, I inputs, O outputs of the projection.
"""

import torch
from torch import Tensor, nn

from lean_ft.models.frozen_weight import Frozen, as_frozen, product_dtype
from lean_ft.models.moe import Experts
from lean_ft.peft.layers import AdaptedLayer, AdapterShape

PROJECTIONS = ("gate_up_proj", "down_proj")
_MERGED_NUMBERS = 2**26  # weights merged at a time


class ExpertsAdapter(AdaptedLayer):
    """The adapter of one stacked projection: `lora_A` (E * R, I) and `lora_B` (O, R * E), in PEFT's layout."""

    def __init__(self, base_layer: Experts, projection: str, shape: AdapterShape, dtype: torch.dtype) -> None:
        self.projection, self.formula = projection, base_layer.formula
        self.is_transposed = base_layer.input_first_in_adapters  # PEFT's interpretation
        super().__init__(base_layer, shape, dtype)

    @property
    def frozen(self) -> Frozen:
        return as_frozen(getattr(self.base_layer, self.projection))

    def thin(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The factors (E, I, R) and (E, R, O), whose product is added to the matrix that a row is multiplied by."""
        a = self.lora_A.unflatten(0, (-1, self.shape.rank)) * self.shape.scaling  # (E, R, I)
        b = self.lora_B.unflatten(1, (self.shape.rank, -1)).permute(2, 0, 1)  # (E, O, R)
        a, b = a.to(dtype), b.to(dtype)
        return (a.mT, b.mT) if self.is_transposed == self.formula.input_first else (b, a)

    @torch.no_grad()
    def merged_weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """As of one matrix, or rounded once to `dtype`. Some experts at a time take memory besides the result."""
        left, right = self.thin(torch.float32)
        frozen = self.frozen
        merged = torch.empty(frozen.form.shape, dtype=dtype, device=frozen.tensors[0].device)
        step = max(1, _MERGED_NUMBERS // merged[0].numel())
        for some in (slice(first, first + step) for first in range(0, len(merged), step)):
            a, b = left[some], right[some]
            # In the dtype that products use, if it is quantized.
            weight = frozen.whole(experts=some).float()
            merged[some] = torch.baddbmm(weight, *((a, b) if self.formula.input_first else (b.mT, a.mT)))
        return merged


class LoRAExperts(nn.Module):
    """A mixture's frozen experts with an adapter on one or both projections."""

    def __init__(self, base_layer: Experts) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.gate_up_proj: ExpertsAdapter | None = None
        self.down_proj: ExpertsAdapter | None = None

    def forward(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """tokens (N, D); weights (N, K) of the chosen experts (N, K); returns (N, D)."""
        dtype, adapters = product_dtype(tokens), (self.gate_up_proj, self.down_proj)
        pairs = (None if adapter is None or not adapter.is_on else adapter.thin(dtype) for adapter in adapters)
        return self.base_layer(tokens, weights, chosen, *pairs)


def put_experts_adapter(model: nn.Module, name: str, shape: AdapterShape, dtype: torch.dtype) -> ExpertsAdapter:
    """Add an uninitialized adapter to the stacked projection `name`, and return it."""
    place, _, projection = name.rpartition(".")
    experts = model.get_submodule(place)
    if not isinstance(experts, LoRAExperts):
        assert isinstance(experts, Experts)
        experts = LoRAExperts(experts)
        model.set_submodule(place, experts)
    layer = ExpertsAdapter(experts.base_layer, projection, shape, dtype)
    setattr(experts, projection, layer)
    return layer
