"""Devices to plan for: their memory, and rates for comparing settings.

Rates are the makers' published figures for dense 16-bit (float32 accumulation) and float32 products and for memory, times what
training reaches in practice: 60% of the arithmetic, 80% of the bandwidth.
"""

from dataclasses import dataclass, replace

from lean_ft.system.spelling import did_you_mean
from lean_ft.system.units import GIB

_ARITHMETIC, _BANDWIDTH = 0.6, 0.8
# The driver's context and kernel code, in addition to what PyTorch's allocator reserves.
CUDA_CONTEXT_BYTES = GIB // 2
# From PyTorch's getChosenWorkspaceSize; most cards have 8.125 MiB.
_WORKSPACES: dict[str, int] = dict.fromkeys(("H100", "H200", "B200"), 32 * 2**20)
# L2 cache in MiB.
_CACHES = {
    "T4": 4, "V100": 6, "RTX 3060": 3, "RTX 3090": 6, "RTX 4060 Ti": 32, "RTX 4090": 72, "RTX 5090": 96, "RTX A6000": 6,
    "A10G": 6, "L4": 48, "L40S": 96, "A100 40GB": 40, "A100 80GB": 40, "H100": 50, "H200": 50, "B200": 126, "MI300X": 4,
}  # fmt: skip


@dataclass(frozen=True)
class Device:
    """A device to plan for, with the rates that training reaches. `memory_bytes` is None if unknown."""

    name: str
    memory_bytes: int | None
    flops_16bit: float
    flops_32bit: float
    bytes_per_second: float
    launch_seconds: float
    host_bytes_per_second: float  # to and from host memory
    peer_bytes_per_second: float = 10e9  # to devices of the same machine
    network_bytes_per_second: float = 1e9  # to other machines
    l2_cache_bytes: int = 0
    cublas_workspace_bytes: int = 0  # that PyTorch keeps for each thread that multiplies matrices

    @property
    def is_cpu(self) -> bool:
        return self.name == "cpu"


@dataclass(frozen=True)
class Machines:
    """Machines and devices that train one model."""

    devices_each: int = 1
    count: int = 1

    @property
    def num_devices(self) -> int:
        return self.devices_each * self.count


ONE_DEVICE = Machines()

# GB/s of a card to others of its machine (NVLink or similar), and its share of the network in the makers' own machines (DGX).
# Other cards send over PCIe, and have a network of 100 Gbit/s each.
_PEERS = {
    "V100": (150, 12.5),
    "A100 40GB": (300, 25),
    "A100 80GB": (300, 25),
    "H100": (450, 50),
    "H200": (450, 50),
    "B200": (900, 50),
    "MI300X": (448, 50),
}
_NETWORK_GB_S = 12.5


def _card(name: str, gib: float, tflops_16bit: float, tflops_32bit: float, gb_s: float, link_gb_s: float) -> Device:
    peer_gb_s, network_gb_s = _PEERS.get(name, (link_gb_s, _NETWORK_GB_S))
    return Device(
        name,
        int(gib * GIB),
        tflops_16bit * 1e12 * _ARITHMETIC,
        tflops_32bit * 1e12 * _ARITHMETIC,
        gb_s * 1e9 * _BANDWIDTH,
        launch_seconds=5e-6,
        host_bytes_per_second=link_gb_s * 1e9 * _BANDWIDTH,
        peer_bytes_per_second=peer_gb_s * 1e9 * _BANDWIDTH,
        network_bytes_per_second=network_gb_s * 1e9 * _BANDWIDTH,
        l2_cache_bytes=_CACHES.get(name, 0) * 2**20,
        cublas_workspace_bytes=_WORKSPACES.get(name, 8320 * 1024),
    )


# GiB as the driver reports them, TFLOP/s of 16-bit and 32-bit products, GB/s of memory and of the link to the host. Source: data sheets.
DEVICES = {
    card.name: card
    for card in (
        _card("T4", 14.6, 65, 8.1, 320, 16),
        _card("V100", 31.7, 125, 15.7, 900, 16),
        _card("RTX 3060", 11.8, 51, 12.7, 360, 32),
        _card("RTX 3090", 23.6, 71, 35.6, 936, 32),
        _card("RTX 4060 Ti", 15.6, 88, 22, 288, 16),
        _card("RTX 4090", 23.5, 165, 82.6, 1008, 32),
        _card("RTX 5090", 31.4, 210, 104.8, 1792, 64),
        _card("RTX A6000", 47.5, 155, 38.7, 768, 32),
        _card("A10G", 22.3, 70, 31.2, 600, 32),
        _card("L4", 22.0, 121, 30.3, 300, 32),
        _card("L40S", 44.4, 362, 91.6, 864, 32),
        _card("A100 40GB", 39.4, 312, 19.5, 1555, 32),
        _card("A100 80GB", 79.1, 312, 19.5, 2039, 32),
        _card("H100", 79.1, 989, 66.9, 3350, 64),
        _card("H200", 139.8, 989, 66.9, 4800, 64),
        _card("B200", 178.3, 2250, 80, 8000, 64),
        _card("MI300X", 191.7, 1307, 163.4, 5300, 64),
        # TFLOP/s from cores times clock, which Apple does not publish. Memory: the 3/4 that Metal allows one process.
        _card("Apple M2 Ultra", 144.0, 27.2, 27.2, 800, 800),
        _card("Apple M3 Max", 96.0, 16.3, 16.3, 400, 400),
        _card("Apple M4 Max", 96.0, 18.4, 18.4, 546, 546),
    )
}

# Measured on two cores with AVX512-BF16: 600 and 170 GFLOP/s, about 10 GB/s through large tensors.
CPU = Device("cpu", None, 600e9, 170e9, 10e9, launch_seconds=5e-6, host_bytes_per_second=10e9)


def find_device(name: str) -> Device:
    """The card of that name, ignoring case and spaces, or the only card whose name ends in it (`4090`). Raises ValueError with
    the nearest name."""
    wanted = _plain(name)
    found = [card for card in DEVICES.values() if wanted and _plain(card.name).endswith(wanted)]
    found = [card for card in found if _plain(card.name) == wanted] or found
    if len(found) == 1:
        return found[0]
    raise ValueError(
        f"unknown device {name!r}.{did_you_mean(name, DEVICES)} Expected one of {', '.join(DEVICES)}. For another card, "
        "set --budget to its memory."
    )


def _plain(name: str) -> str:
    return name.lower().replace(" ", "").replace("nvidia", "").replace("geforce", "")


def choose_device(name: str | None, setting: str) -> Device:
    """The device to plan for: the named card, else the device that `device=setting` runs on.

    An installed GPU that is not in the list has its own memory and an A100's rates.
    """
    if name is not None:
        return find_device(name)
    import torch

    if setting != "cpu" and torch.cuda.is_available():
        here = torch.cuda.get_device_properties(0)
        known = max(
            (card for card in DEVICES.values() if _plain(card.name) in _plain(here.name)),
            key=lambda card: len(card.name),
            default=DEVICES["A100 80GB"],
        )
        return replace(known, name=here.name, memory_bytes=here.total_memory, l2_cache_bytes=here.L2_cache_size)
    if setting == "cuda":
        return DEVICES["A100 80GB"]
    return CPU
