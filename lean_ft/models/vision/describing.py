"""What people read about the vision towers of models."""

from collections.abc import Mapping

from lean_ft.system.units import counted, gibibytes


def planned_towers(num_bytes: int, in_batch: Mapping[str, int]) -> list[str]:
    """A line about the towers of a plan's models, with `num_bytes` of weights; in_batch: `Batch.counted` of the largest
    batch. [] without towers."""
    if not num_bytes:
        return []
    patches = counted(in_batch.get("patches", 0), "patches")
    return [f"images: a vision tower of {gibibytes(num_bytes)}, and up to {patches} in a micro-batch"]
