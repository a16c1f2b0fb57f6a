"""Layers with an adapter: a frozen layer plus two trained low-rank matrices.

    LoRA  y = W x + scaling * B A x + bias
    DoRA  y = m / |W + scaling * B A| * (W + scaling * B A) x + bias, where | | is the norm of each row

DoRA's magnitude m scales the product but not the bias, and backward treats the norm as a constant (paper, section 4.3).
The squared norm of each row is |W|^2 + 2 scaling (W A^T) . B + scaling^2 (B A A^T) . B, which needs only low-rank
products: W + scaling * B A is never formed. Dropout applies only to the input of A.

PiSSA starts from W's largest singular directions. W does not change; instead the initial product B0 A0 is subtracted:
W + scaling * (B A - B0 A0), which equals the paper's residual plus adapter. The two pairs form one adapter of twice the
rank, which is how it is saved.

Sources: Hu et al. 2021, https://arxiv.org/abs/2106.09685 (LoRA); Kalajdzievski 2023, https://arxiv.org/abs/2312.03732
(scaling by alpha / sqrt(rank)); Liu et al. 2024, https://arxiv.org/abs/2402.09353 (DoRA); Meng et al. 2024,
https://arxiv.org/abs/2404.02948 (PiSSA).

Shapes: I inputs, O outputs, R rank, V vocabulary, D hidden size. An embedding is a linear map with V inputs and D
outputs whose weight is stored transposed.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lean_ft.models.frozen_weight import Frozen, as_frozen, expands_together
from lean_ft.models.layers import is_on_cuda
from lean_ft.peft.joint_products import joint_low_rank_linears
from lean_ft.peft.low_rank import low_rank_linear

_PISSA_OVERSAMPLING = 16  # additional singular directions, for accuracy
_PISSA_ITERATIONS = 4


@dataclass(frozen=True)
class AdapterShape:
    """The hyperparameters of one layer's adapter."""

    rank: int
    alpha: float
    rslora: bool = False
    dora: bool = False
    dropout: float = 0.0

    @property
    def scaling(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


class AdaptedLayer(nn.Module):
    """Base class: a frozen `base_layer`, and trained `lora_A` (R, I) and `lora_B` (O, R)."""

    base_layer: nn.Module
    lora_A: nn.Parameter
    lora_B: nn.Parameter
    start_A: Tensor | None
    start_B: Tensor | None
    square_norms: Tensor  # of the frozen weight's rows; only for DoRA
    is_on = True  # `adapter_off` sets False: the layer then computes what the frozen layer does
    is_transposed = False  # whether the frozen weight is stored as (I, O)
    in_float8 = False  # whether the frozen weight multiplies in float8; `float8_products` sets True

    def __init__(self, base_layer: nn.Module, shape: AdapterShape, dtype: torch.dtype) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.shape = shape
        num_matrices, num_outputs, num_inputs = linear_shape(self.frozen, self.is_transposed)
        rank, device = num_matrices * shape.rank, self.frozen.tensors[0].device
        self.lora_A = nn.Parameter(torch.empty(rank, num_inputs, dtype=dtype, device=device))
        self.lora_B = nn.Parameter(torch.empty(num_outputs, rank, dtype=dtype, device=device))
        self.lora_magnitude_vector: nn.Parameter | None = None
        self.register_buffer("start_A", None, persistent=False)  # PiSSA's first pair
        self.register_buffer("start_B", None, persistent=False)
        if shape.dora:
            norms = row_norms(self.linear_weight())
            self.register_buffer("square_norms", norms.square(), persistent=False)
            self.lora_magnitude_vector = nn.Parameter(norms.to(dtype))

    @property
    def frozen(self) -> Frozen:
        """The frozen weight as it is stored."""
        weight: Any = self.base_layer.weight
        return as_frozen(weight, in_float8=self.in_float8)

    @property
    def out_features(self) -> int:
        return self.lora_B.shape[0]

    def linear_weight(self) -> Tensor:
        """The frozen weight as a linear map (O, I)."""
        weight = self.frozen.whole()
        return weight.mT if self.is_transposed else weight

    @torch.no_grad()
    def start_at_zero(self) -> None:
        """Draw A and set B to zero: the layer starts equal to the frozen layer."""
        bound = 1.0 / math.sqrt(self.lora_A.shape[1])
        self.lora_A.uniform_(-bound, bound)
        self.lora_B.zero_()

    @torch.no_grad()
    def start_at_largest_singular_directions(self) -> None:
        """PiSSA: set scaling * B A to the weight's best approximation of this rank, and subtract the same product.

        Raises ValueError if the weight has fewer singular directions than the rank.
        """
        weight, rank = self.linear_weight().float(), self.shape.rank
        if rank > min(weight.shape):
            raise ValueError(
                f"lora.rank={rank} exceeds the {min(weight.shape)} singular directions of a weight of shape "
                f"{tuple(weight.shape)}. Set a smaller rank, or lora.init=zero instead of pissa."
            )
        num_directions = min(rank + _PISSA_OVERSAMPLING, *weight.shape)
        left, values, right = torch.svd_lowrank(weight, q=num_directions, niter=_PISSA_ITERATIONS)
        roots = (values[:rank] / self.shape.scaling).sqrt()
        self.lora_A.copy_(roots[:, None] * right[:, :rank].T)
        self.lora_B.copy_(left[:, :rank] * roots)
        self.start_A, self.start_B = self.lora_A.detach().clone(), self.lora_B.detach().clone()

    def factors(self) -> tuple[Tensor, Tensor]:
        """A (R, I) and B (O, R) of all pairs; R is twice the rank with PiSSA, and 0 while the adapter is off."""
        if not self.is_on:
            return self.lora_A[:0], self.lora_B[:, :0]
        if self.start_A is None or self.start_B is None:
            return self.lora_A, self.lora_B
        return torch.cat([self.lora_A, self.start_A]), torch.cat([self.lora_B, -self.start_B], dim=1)

    def magnitude_ratio(self, a: Tensor, b: Tensor) -> Tensor:
        """DoRA's m / |W + scaling * b a|, (O,), in the magnitude's dtype; backward treats the norm as a constant."""
        assert self.lora_magnitude_vector is not None
        with torch.no_grad():
            weight, scaling = self.linear_weight(), self.shape.scaling
            a, b = a.to(self.square_norms.dtype), b.to(self.square_norms.dtype)
            across = (weight @ a.T.to(weight.dtype)).to(b.dtype)  # (O, R)
            square = self.square_norms + ((2.0 * scaling * across + scaling**2 * (b @ (a @ a.T))) * b).sum(1)
            norm = square.clamp(min=torch.finfo(square.dtype).tiny).sqrt()
        return self.lora_magnitude_vector / norm.to(self.lora_magnitude_vector.dtype)

    @torch.no_grad()
    def merged_weight(self) -> Tensor:
        """The weight with the adapter merged, a new float32 tensor of the frozen weight's shape."""
        a, b = (factor.float() for factor in self.factors())
        merged = torch.addmm(self.linear_weight().float(), b, a, alpha=self.shape.scaling)
        if self.lora_magnitude_vector is not None:
            merged.mul_((self.lora_magnitude_vector.float() / row_norms(merged))[:, None])
        return merged.mT.contiguous() if self.is_transposed else merged


class LoRALinear(AdaptedLayer):
    """A frozen linear layer, quantized or not, with an adapter."""

    def forward(self, x: Tensor) -> Tensor:
        frozen, shape = self.frozen, self.shape
        bias: Tensor | None = self.base_layer.bias  # pyright: ignore[reportAssignmentType]
        dropout = shape.dropout if self.training else 0.0
        a, b = self.factors()
        if self.lora_magnitude_vector is None or not self.is_on:
            return low_rank_linear(x, frozen, bias, a, b, shape.scaling, dropout)
        product = low_rank_linear(x, frozen, None, a, b, shape.scaling, dropout)
        # Round the ratio's difference from 1, because bfloat16 has little precision near 1.
        change = (self.magnitude_ratio(a, b) - 1.0).to(x.dtype)
        scaled = torch.addcmul(product, product, change)
        return scaled if bias is None else scaled + bias

    @staticmethod
    def joint_forward(layers: "Sequence[LoRALinear]", x: Tensor) -> tuple[Tensor, ...]:
        """The outputs of layers with the same input on a GPU, where few launches matter, in one tensor or each.

        Empty where they have no joint form: with dropout, DoRA, products in float8, quantized weights other than NF4,
        or factors that differ.
        """
        frozen, factors = [layer.frozen for layer in layers], [layer.factors() for layer in layers]
        if len(layers) < 2 or not is_on_cuda(x) or not all(layer.is_on for layer in layers):
            return ()
        is_plain = all(form.kind == "plain" for form, _ in frozen) or expands_together(frozen)
        if not is_plain or any(form.in_float8 for form, _ in frozen):
            return ()
        if any(layer.lora_magnitude_vector is not None or (layer.training and layer.shape.dropout) for layer in layers):
            return ()
        if len({(layer.shape.scaling, layer.lora_A.dtype) for layer in layers}) > 1:
            return ()
        biases: list[Tensor | None] = [layer.base_layer.bias for layer in layers]  # pyright: ignore[reportAssignmentType]
        return joint_low_rank_linears(x, frozen, biases, factors, layers[0].shape.scaling)


class LoRAEmbedding(AdaptedLayer):
    """A frozen embedding with an adapter."""

    is_transposed = True

    @torch.no_grad()
    def start_at_zero(self) -> None:
        self.lora_A.zero_()
        self.lora_B.normal_()

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden, shape = self.base_layer(input_ids), self.shape  # (B, T, D)
        if not self.is_on:
            return hidden
        a, b = self.factors()
        inner = F.embedding(input_ids, a.T).to(hidden.dtype)  # (B, T, R)
        hidden = hidden + F.linear(inner, b.to(hidden.dtype)) * shape.scaling
        if self.lora_magnitude_vector is None:
            return hidden
        return torch.addcmul(hidden, hidden, (self.magnitude_ratio(a, b) - 1.0).to(hidden.dtype))


class LoRAOutput(AdaptedLayer):
    """The frozen output layer with an adapter.

    Losses take the output layer as a weight and multiply by it chunk by chunk. So the adapter is added to a copy of the
    weight, and its gradient comes through that copy.
    """

    @property
    def weight(self) -> Tensor:
        """The weight (V, D) with the adapter added, in the frozen weight's dtype; a new tensor on each access."""
        a, b = self.factors()
        weight = self.linear_weight()
        if not self.is_on:
            return weight
        merged = torch.addmm(weight, b.to(weight.dtype), a.to(weight.dtype), alpha=self.shape.scaling)
        if self.lora_magnitude_vector is None:
            return merged
        return torch.addcmul(merged, merged, (self.magnitude_ratio(a, b) - 1.0).to(merged.dtype)[:, None])

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight)


def adapted_layers(model: nn.Module) -> dict[str, AdaptedLayer]:
    """The model's layers with an adapter, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, AdaptedLayer)}


def base_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the model's modules by name, without those that an adapter or trained rows added."""
    return ((name, module) for name, module in model.named_modules() if not hasattr(module, "base_layer"))


def linear_shape(weight: Frozen, is_transposed: bool) -> tuple[int, int, int]:
    """The number of matrices of a weight or a stack, their outputs and their inputs."""
    num_matrices, outputs, inputs = (1, *weight.form.shape)[-3:]
    return (num_matrices, inputs, outputs) if is_transposed else (num_matrices, outputs, inputs)


def row_norms(weight: Tensor) -> Tensor:
    """Norms (O,), at least float32, of the rows of (O, I), without a float32 copy."""
    return torch.linalg.vector_norm(weight.detach(), dim=1, dtype=torch.promote_types(weight.dtype, torch.float32))
