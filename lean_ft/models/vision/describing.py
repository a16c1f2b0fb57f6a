"""What people read about the vision towers of models."""

from collections.abc import Mapping

from torch import nn

from lean_ft.system.shards import whole_numel
from lean_ft.system.units import counted, gibibytes


def tower_of_part(tower: nn.Module | None) -> str:
    """How images are treated, for the line about a language model that is part of a multimodal model."""
    if tower is None:
        return "without its image encoder"
    parameters = list(tower.parameters())
    count, trained = (sum(map(whole_numel, some)) for some in (parameters, [p for p in parameters if p.requires_grad]))
    return f"with its image encoder: {count:,} parameters, {f'{trained:,} trained' if trained else 'frozen'}"


def planned_towers(num_bytes: int, in_batch: Mapping[str, int]) -> list[str]:
    """A line about the towers of a plan's models, with `num_bytes` of weights; in_batch: `Batch.counted` of the largest
    batch. None without towers."""
    if not num_bytes:
        return []
    patches = counted(in_batch.get("patches", 0), "patches")
    return [f"images: a vision tower of {gibibytes(num_bytes)}, and up to {patches} in a micro-batch"]
