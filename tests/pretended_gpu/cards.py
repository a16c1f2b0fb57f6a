"""The card that tests of this folder run on: the simulated GPU's, or a real one."""

import os

# By compute capability: the simulated card whose tests run on a real card.
_CARDS = {
    (7, 5): "T4",
    (8, 0): "A100",
    (8, 6): "RTX4090",
    (8, 9): "RTX4090",
    (9, 0): "H100",
    (10, 0): "B200",
    (12, 0): "B200",
}
IS_SIMULATED = "PRETENDED_GPU" in os.environ


def card() -> str | None:
    """The name of the card as in `PRETENDED_GPU`; None without one."""
    if IS_SIMULATED:
        return os.environ["PRETENDED_GPU"]
    import torch

    return _CARDS.get(torch.cuda.get_device_capability()) if torch.cuda.is_available() else None


def triton_environment() -> dict[str, str]:
    """Environment of a process that imports `interpreter` and checks values of Triton kernels."""
    return {**os.environ, **({"TRITON_INTERPRET": "1"} if IS_SIMULATED else {})}
