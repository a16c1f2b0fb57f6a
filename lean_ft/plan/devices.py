"""Devices to plan for: their memory, and their speed.

Rates are the makers' published figures for dense 16-bit (float32 accumulation) and float32 products and for memory.
Kernels reach a share of them that depends on their class: matrix products, attention, memory traffic
(`Device.kernel_seconds`). The shares come from half of the published figures in docs/speed_tables.md.
"""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from lean_ft.system.spelling import did_you_mean
from lean_ft.system.units import GIB

_LINKS = 0.8  # share of a link's published rate
# The share of a card's instructions per second that the arithmetic of an update reaches: half of the published float32
# rate, where each multiply-add counts twice. On an H200, 3.2 billion parameters of 122 instructions each
# (`AdamW8bit`, in compiled slices) took 64 ms in a profile in which other processes slowed products down by 1.42.
_ISSUED = 0.26
# The driver's context and kernel code, in addition to what PyTorch's allocator reserves.
CUDA_CONTEXT_BYTES = GIB // 2
# From PyTorch's getChosenWorkspaceSize; most cards have 8.125 MiB.
_HOPPERS = ("H100", "H100 PCIe", "H100 NVL", "H200", "H200 NVL")
_WORKSPACES: dict[str, int] = dict.fromkeys((*_HOPPERS, "B200"), 32 * 2**20)
# L2 cache in MiB.
_CACHES = {
    "T4": 4, "V100": 6, "RTX 3060": 3, "RTX 3090": 6, "RTX 4060 Ti": 32, "RTX 4090": 72, "RTX 5090": 96, "RTX A6000": 6,
    "A10G": 6, "L4": 48, "L40S": 96, "A100 40GB": 40, "A100 80GB": 40, "B200": 126, "MI300X": 4,
    **dict.fromkeys(_HOPPERS, 50), "V100 16GB": 6,
}  # fmt: skip


@dataclass(frozen=True)
class Device:
    """A device to plan for, with its published rates and the share of them that kernels reach. `memory_bytes` is None
    if unknown."""

    name: str
    memory_bytes: int | None
    flops_16bit: float
    flops_32bit: float
    bytes_per_second: float
    launch_seconds: float  # of the host per launch, while the device computes
    host_bytes_per_second: float  # to and from host memory
    peer_bytes_per_second: float = 10e9  # to devices of the same machine
    network_bytes_per_second: float = 1e9  # to other machines
    l2_cache_bytes: int = 0
    cublas_workspace_bytes: int = 0  # that PyTorch keeps for each thread that multiplies matrices
    fixed_seconds: float = 0.0  # of the device per kernel
    product_share: float = 1.0
    attention_share: float = 1.0
    memory_share: float = 1.0
    num_processors: int = 0  # streaming multiprocessors; 0: no tiles are counted
    capability: tuple[int, int] = (8, 0)  # compute capability, which decides the kernels that run

    @property
    def is_cpu(self) -> bool:
        return self.name == "cpu"

    def limit_seconds(self, kernel: "Kernel") -> float:
        """Time at the published rates: the longer of arithmetic and memory traffic (the roofline of Williams et al.
        2009)."""
        return max(kernel.flops / self._peak(kernel), kernel.moved_bytes / self.bytes_per_second)

    def kernel_seconds(self, kernel: "Kernel") -> float:
        """Time that an operation takes. Its first kernel takes the longest of arithmetic, traffic and instructions;
        further kernels move memory. A matrix product also computes, on average, half a wave of tiles in vain."""
        share = self.attention_share if kernel.is_attention else self.product_share
        rows, columns = (min(size, tile) for size, tile in zip(kernel.shape, _TILE, strict=False))
        idle_flops = self.num_processors * rows * columns * kernel.shape[2]  # half of 2 FLOPs per element
        flops = kernel.flops + min(idle_flops, kernel.flops) + kernel.idle_flops
        rate = self.bytes_per_second * self.memory_share
        first = max(
            flops / (self._peak(kernel) * share),
            (kernel.moved_bytes - kernel.later_bytes) / rate,
            kernel.instructions / (self.flops_32bit / 2 * _ISSUED),
        )
        return first + kernel.later_bytes / rate + self.fixed_seconds * kernel.number

    def _peak(self, kernel: "Kernel") -> float:
        if kernel.itemsize == 1 and self.capability >= _FLOAT8_CAPABILITY:
            return 2 * self.flops_16bit
        return self.flops_16bit if kernel.itemsize <= 2 else self.flops_32bit


@dataclass(frozen=True)
class Kernel:
    """An operation: its arithmetic, memory traffic and number of launches.

    shape: (M, N, K) of a matrix product. idle_flops: computed in vain, beside half a wave of a product's tiles.
    later_bytes: the part of `moved_bytes` that kernels after the first move. instructions: of all threads, for kernels
    that are limited by neither products nor traffic.
    """

    flops: float
    moved_bytes: float
    itemsize: int = 2
    is_attention: bool = False
    shape: tuple[int, int, int] = (0, 0, 0)
    number: float = 1
    idle_flops: float = 0.0
    later_bytes: float = 0.0
    instructions: float = 0.0


@dataclass(frozen=True)
class Machines:
    """Machines and devices that train one model."""

    devices_each: int = 1
    count: int = 1
    engine_share: float = 0.0  # of a training device's memory, which a sampling server takes; 0: it has its own device

    @property
    def num_devices(self) -> int:
        return self.devices_each * self.count


ONE_DEVICE = Machines()

# GB/s of a card to others of its machine (NVLink or similar), and its share of the network in the makers' own machines
# (DGX). Other cards send over PCIe, and have a network of 100 Gbit/s each.
_PEERS = {
    "V100": (150, 12.5),
    "V100 16GB": (150, 12.5),
    "A100 40GB": (300, 25),
    "A100 80GB": (300, 25),
    "H100": (450, 50),
    "H200": (450, 50),
    "B200": (900, 50),
    "MI300X": (448, 50),
}
_NETWORK_GB_S = 12.5
# Streaming multiprocessors (compute units of an AMD card), and the tile of a product that each computes at a time.
_PROCESSORS = {
    "T4": 40, "V100": 80, "RTX 3060": 28, "RTX 3090": 82, "RTX 4060 Ti": 34, "RTX 4090": 128, "RTX 5090": 170,
    "RTX A6000": 84,
    "A10G": 80, "L4": 58, "L40S": 142, "A100 40GB": 108, "A100 80GB": 108, "H100": 132, "H200": 132, "B200": 148,
    "MI300X": 304,
    "V100 16GB": 80, "H100 PCIe": 114, "H100 NVL": 132, "H200 NVL": 132,
}  # fmt: skip
_TILE = (128, 128)
# To fill and drain the card, and until the next kernel starts. On an H200, single passes of a sort took 6.1 us, updates
# of small matrices 4.4 to 5.9 us, and the shortest kernels 2 us, without the gap of about 1 us between kernels.
FIXED_SECONDS = 6e-6
# Compute capabilities; other cards are planned as an A100, 8.0.
_CAPABILITIES = {
    "T4": (7, 5), "V100": (7, 0), "V100 16GB": (7, 0), "B200": (10, 0), "RTX 5090": (12, 0), "MI300X": (9, 4),
    **dict.fromkeys(_HOPPERS, (9, 0)),
    **dict.fromkeys(("RTX 3060", "RTX 3090", "RTX A6000", "A10G"), (8, 6)),
    **dict.fromkeys(("RTX 4060 Ti", "RTX 4090", "L4", "L40S"), (8, 9)),
}  # fmt: skip
_FLOAT8_CAPABILITY = (8, 9)  # a run on an older card refuses float8 products
_MEASURED = 1024  # rows and columns of the products that measure a CPU
# Large products: cards with half-rate float32 accumulation reach almost all of their rate. Cards that the power limit
# slows down reach less. Attention reaches less than products, the least on the cards with the fastest products.
_PRODUCT_SHARES: dict[str, float] = {
    **dict.fromkeys(("RTX 3060", "RTX 3090", "RTX 4060 Ti", "RTX 4090", "RTX 5090"), 0.95),
    **dict.fromkeys(("V100", "V100 16GB", "A100 40GB", "A100 80GB"), 0.85),
}
_ATTENTION_SHARES: dict[str, float] = dict.fromkeys((*_HOPPERS, "B200", "MI300X"), 0.3)


def _card(name: str, gib: float, tflops_16bit: float, tflops_32bit: float, gb_s: float, link_gb_s: float) -> Device:
    peer_gb_s, network_gb_s = _PEERS.get(name, (link_gb_s, _NETWORK_GB_S))
    return Device(
        name,
        int(gib * GIB),
        tflops_16bit * 1e12,
        tflops_32bit * 1e12,
        gb_s * 1e9,
        launch_seconds=20e-6,
        fixed_seconds=FIXED_SECONDS,
        product_share=_PRODUCT_SHARES.get(name, 0.75),
        attention_share=_ATTENTION_SHARES.get(name, 0.4),
        memory_share=0.75,
        num_processors=_PROCESSORS.get(name, 0),
        capability=_CAPABILITIES.get(name, (8, 0)),
        host_bytes_per_second=link_gb_s * 1e9 * _LINKS,
        peer_bytes_per_second=peer_gb_s * 1e9 * _LINKS,
        network_bytes_per_second=network_gb_s * 1e9 * _LINKS,
        l2_cache_bytes=_CACHES.get(name, 0) * 2**20,
        cublas_workspace_bytes=_WORKSPACES.get(name, 8320 * 1024),
    )


# GiB as the driver reports them, TFLOP/s of 16-bit and 32-bit products, GB/s of memory and of the link to the host.
# Source: data sheets.
DEVICES = {
    card.name: card
    for card in (
        _card("T4", 14.6, 65, 8.1, 320, 16),
        _card("V100", 31.7, 125, 15.7, 900, 16),
        _card("V100 16GB", 15.8, 125, 15.7, 900, 16),
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
        _card("H100 PCIe", 79.1, 756, 51.2, 2000, 64),
        _card("H100 NVL", 93.1, 835, 60, 3938, 64),
        _card("H200", 139.8, 989, 66.9, 4800, 64),
        _card("H200 NVL", 139.8, 835, 60, 4800, 64),
        _card("B200", 178.3, 2250, 80, 8000, 64),
        _card("MI300X", 191.7, 1307, 163.4, 5300, 64),
        # TFLOP/s from cores times clock, which Apple does not publish. Memory: the 3/4 that Metal allows one process.
        _card("Apple M2 Ultra", 144.0, 27.2, 27.2, 800, 800),
        _card("Apple M3 Max", 96.0, 16.3, 16.3, 400, 400),
        _card("Apple M4 Max", 96.0, 18.4, 18.4, 546, 546),
    )
}

# Typical of two cores with AVX512-BF16. `measured_cpu` has this machine's rates. The share: a step's products are of
# many shapes, and reach 0.8 to 0.9 of a large product's rate.
CPU = Device(
    "cpu",
    None,
    flops_16bit=600e9,
    flops_32bit=170e9,
    bytes_per_second=10e9,
    launch_seconds=0.0,
    host_bytes_per_second=10e9,
    fixed_seconds=5e-6,
    product_share=0.85,
)


def measured_cpu() -> Device:
    """This machine's CPU, with the rates of large products and of large tensors in memory, measured in about a
    second."""
    import torch

    from lean_ft.models.float32_products import slow_dtypes

    def seconds(work: Callable[[], Any]) -> float:
        """The shortest of four repetitions, without the first."""
        times = []
        for _ in range(5):
            began = time.perf_counter()
            work()
            times.append(time.perf_counter() - began)
        return min(times[1:])

    def flops_per_second(dtype: torch.dtype) -> float:
        left, right = torch.ones(_MEASURED, _MEASURED, dtype=dtype), torch.ones(_MEASURED, _MEASURED, dtype=dtype)
        return 2 * _MEASURED**3 / seconds(lambda: torch.mm(left, right))

    flops_32bit = flops_per_second(torch.float32)
    is_slow = torch.bfloat16 in slow_dtypes()  # then layers multiply in float32
    large, sums = torch.ones(2**25), torch.ones(2**25)
    return replace(
        CPU,
        flops_16bit=flops_32bit if is_slow else flops_per_second(torch.bfloat16),
        flops_32bit=flops_32bit,
        bytes_per_second=2 * large.nbytes / seconds(lambda: torch.add(large, 1.0, out=sums)),
    )


# Parts of the names that drivers and clouds print, beside the card's own: a maker or series, a form factor, a kind of
# memory, and a virtual function of an AMD card.
_MAKERS = re.compile(r"^gpu \d+: |\(uuid: .*|nvidia|geforce|tesla|quadro|amd|instinct|gpu$")
_FORM = re.compile(r"sxm\d?|pcie|hbm\d?e?|vf")
_MEMORY = re.compile(r"(\d+)gi?b?")
_GIB_PER_GB = (0.95, 1.12)  # memory in a card's name, divided by the memory that the driver reports


def find_device(name: str) -> Device:
    """The card of a name in any spelling, also as torch and `nvidia-smi -L` print it (`NVIDIA A100-SXM4-80GB`), or the
    only card whose name ends in it (`4090`). Raises ValueError with the nearest name."""
    if (card := _named(name)) is not None:
        return card
    wanted = "".join(_words(name))
    found = [card for card in DEVICES.values() if wanted and "".join(_words(card.name)).endswith(wanted)]
    if len(found) == 1:
        return found[0]
    raise ValueError(
        f"unknown device {name!r}.{did_you_mean(name, DEVICES)} Expected one of {', '.join(DEVICES)}. For another "
        "card, set --budget to its memory."
    )


def _named(name: str) -> Device | None:
    """Return the card of a full name: as it is, without its form factor, or without a memory that fits the card's."""
    cards = {"".join(_words(card.name)): card for card in DEVICES.values()}
    words = _words(name)
    of_any_form = [word for word in words if not _FORM.fullmatch(word)]
    for some in (words, of_any_form):
        if (card := cards.get("".join(some))) is not None:
            return card
    sizes = [int(size[1]) for word in of_any_form if (size := _MEMORY.fullmatch(word))]
    card = cards.get("".join(word for word in of_any_form if not _MEMORY.fullmatch(word)))
    if card is None or card.memory_bytes is None or len(sizes) != 1:
        return None
    least, most = _GIB_PER_GB
    return card if least <= sizes[0] * GIB / card.memory_bytes <= most else None


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9.]+", _MAKERS.sub(" ", name.strip().lower()))


def choose_device(name: str | None, setting: str) -> Device:
    """The device to plan for: the named card, else the device that `device=setting` runs on.

    An installed GPU that is not in the list has its own memory and an A100's rates.
    """
    if name is not None:
        return find_device(name)
    import torch

    if setting != "cpu" and torch.cuda.is_available():
        here = torch.cuda.get_device_properties(0)
        own = "".join(_words(here.name))
        # Such as RTX 3090 for an RTX 3090 Ti.
        related = [card for card in DEVICES.values() if "".join(_words(card.name)) in own]
        known = _named(here.name) or max(related, key=lambda card: len(card.name), default=DEVICES["A100 80GB"])
        return replace(
            known,
            name=here.name,
            memory_bytes=here.total_memory,
            l2_cache_bytes=here.L2_cache_size,
            capability=(here.major, here.minor),
        )
    if setting == "cuda":
        return DEVICES["A100 80GB"]
    return CPU
