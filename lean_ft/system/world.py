"""The world that a recipe runs in: the real one, or that of a plan.

A plan runs a recipe on tensors without contents: they have shapes, dtypes and lifetimes, and every value read from them
is 1 or True. Most of the library does not notice. Code that needs contents, a device or other processes passes the real
work to a method of `world()`. The real world is the base class here and does this work. The world of a plan
(`lean_ft.plan.world`) returns a stand-in of the same shape instead, and counts its memory and time.

A recipe, also a copied and edited one, is planned as it is written, as long as it calls the library.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, TypeVar

from lean_ft.system.observer import Observer

if TYPE_CHECKING:  # commands that train nothing do not wait for torch
    import torch
    from torch import Tensor

    from lean_ft.data import Batch
    from lean_ft.models import Decoder
    from lean_ft.settings import ParallelConfig, RecipeConfig
    from lean_ft.system.shards import Ranks
    from lean_ft.tokenizers import Tokenizer
    from lean_ft.training import Run

T = TypeVar("T")


class World:
    """The real world."""

    observer = Observer()  # of runs, optimizers and rounds of completions

    def start(self, cfg: "RecipeConfig", prepare: Callable[["RecipeConfig"], "torch.device"]) -> "torch.device":
        """Prepare this process for a run with `cfg`, and return its device."""
        return prepare(cfg)

    def join(
        self,
        cfg: "ParallelConfig",
        device: "torch.device",
        connect: Callable[["ParallelConfig", "torch.device"], "Ranks"],
    ) -> "Ranks":
        """Connect to the other processes of the run, and return the ranks. `cfg`: the `parallel` settings."""
        return connect(cfg, device)

    def read(self, contents: Callable[[], T], instead: Callable[[], T]) -> T:
        """Return what depends on the contents of files or on a user's code. A plan calls `instead`."""
        return contents()

    def tokenizer(
        self,
        load: Callable[[], "Tokenizer"],
        load_for_a_plan: Callable[[], "Tokenizer"],
        planned: Mapping[str, Callable[[], object]],
    ) -> "Tokenizer":
        """Load a tokenizer. A plan loads its own on first use, since it may not need one, and reads the attributes
        `planned` without it: each function returns the value of one."""
        return load()

    def batches(self, read: Callable[[], T], largest: Callable[[], "Batch"]) -> T:
        """Return training and held-out batches. In a plan, each batch is made by `largest`."""
        return read()

    def fill(self, model: "Decoder", open_weights: Callable[[], T], fill: Callable[[T], None]) -> None:
        """Fill a model on the meta device. `open_weights` returns a function that sets one parameter by its name, which
        `fill` gets. A plan opens no weights."""
        fill(open_weights())

    def generate(self, model: "Decoder", rows: list[T], capacity: int, packed_bytes: float, copies: int) -> list[T]:
        """Return the `rows` to sample together in a cache of `capacity` tokens: none in a plan, which has done it then.
        `packed_bytes`: memory for packed copies of the weights. `copies`: 2 if rows can wait, which then take a second
        cache."""
        return rows

    def prepare_compiler(self, prepare: Callable[[], None], activation_budget: float | None) -> None:
        """Prepare the compiler for layers that keep this share of their activations."""
        prepare()

    def begin_run(self, run: "Run", begin: Callable[[], None]) -> None:
        """Begin a run in its directory."""
        begin()

    def steps(self, loop: Callable[[], Iterator[int]]) -> Iterator[int]:
        """The steps of a run; in a plan, one step."""
        return loop()

    def device_type(self, device: "torch.device") -> str:
        """The type of a tensor's device. In a plan, the tensors are on the CPU, and the planned device may be a GPU."""
        return device.type

    def capability(self, device: "torch.device") -> tuple[int, int]:
        """The compute capability of a CUDA device."""
        import torch

        return torch.cuda.get_device_capability(device)

    def memory_bytes(self, measure: Callable[[], int | None]) -> int | None:
        """Total memory of the device."""
        return measure()

    def link(self, connect: Callable[[], T]) -> T:
        """Open a link between a GPU and host memory."""
        return connect()

    def repeat(self, parts: Sequence[T], shown: int) -> Iterable[T]:
        """The parts of a loop that all do the same work after the first `shown`. A plan runs `shown` of them."""
        return parts

    def kernel(self, name: str, compute: Callable[[], T], inputs: Sequence["Tensor"], launches: int) -> T:
        """Return what a GPU computes in so many launches. A plan counts these, and not the operations of `compute`."""
        return compute()


_world: ContextVar[World] = ContextVar("world", default=World())  # noqa: B039  the real world has no state


def world() -> World:
    """The world that this code runs in."""
    return _world.get()


@contextmanager
def inside(other: World) -> Iterator[None]:
    """Context manager in which `world()` is another world."""
    token = _world.set(other)
    try:
        yield
    finally:
        _world.reset(token)


def device_type(device: "torch.device") -> str:
    """The type of a tensor's device; in a plan, the type of the planned device."""
    return world().device_type(device)


def capability(device: "torch.device") -> tuple[int, int]:
    """The compute capability of a CUDA device; in a plan, of the planned card."""
    return world().capability(device)


def as_kernel(name: str, compute: Callable[[], T], inputs: Sequence["Tensor"], *, launches: int = 1) -> T:
    """Return `compute()`, which a GPU has a kernel for. Plans count the kernel's launches, its inputs and its results
    under this name."""
    return world().kernel(name, compute, inputs, launches)


def read_number(number: "Callable[[], Tensor]", most: int) -> int:
    """Return a number that the device computes, for which the host waits. A plan takes `most`."""
    return world().read(lambda: int(number()), lambda: most)


def in_chunks(total: int, size: int, shown: int = 1) -> Iterator[slice]:
    """Slices of `size` that cover `total`; the last one may be shorter. All do the same work after the first
    `shown`."""
    for start in world().repeat(range(0, total, size), shown):
        yield slice(start, min(start + size, total))
