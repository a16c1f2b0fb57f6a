"""The world of a plan: stand-ins for what a run has and a plan lacks, counted in a `Trace`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from lean_ft.data import Batch
from lean_ft.frozen.reference import choose_kind
from lean_ft.models import Decoder
from lean_ft.models.frozen_weight import num_parameters
from lean_ft.parallel import check_number
from lean_ft.plan.labels import ACTIVATIONS, BATCH, STATES
from lean_ft.plan.online import rehearse_generation
from lean_ft.plan.ranks import PlannedRanks
from lean_ft.plan.step import PlannedStep
from lean_ft.plan.time import Time
from lean_ft.plan.trace import Trace
from lean_ft.settings import (
    AnswersConfig,
    ParallelConfig,
    RecipeConfig,
    ReferenceConfig,
    ReferencedLossConfig,
    Settings,
)
from lean_ft.system.contents import UNRECORDED
from lean_ft.system.environment import memory_bytes
from lean_ft.system.host_link import HostLink
from lean_ft.system.shards import ALONE, Ranks, local
from lean_ft.system.world import World
from lean_ft.tokenizers import Tokenizer
from lean_ft.torch_private import FakeTensorMode, functorch_config, without_modes
from lean_ft.training import Run
from lean_ft.training.process import refuse_on_many

T = TypeVar("T")


def without_contents(cfg: RecipeConfig) -> RecipeConfig:
    """Settings for a step of the same shape that needs no rows, no drawn numbers and no user's schedule."""
    groups = {name: group.without_contents() for name, group in cfg if isinstance(group, Settings)}
    if isinstance(cfg, AnswersConfig) and cfg.group(ReferencedLossConfig) and choose_kind(cfg)[0] == "cached":
        groups["reference"] = cfg.needed(ReferenceConfig).model_copy(update={"kind": "none"})
    return cfg.model_copy(update=groups)


def _zero(name: str, tensor: Tensor) -> None:
    local(tensor).zero_()  # a CPU allocates memory when it is written


class PlannedWorld(World):
    """The world of a plan. Its tensors have no contents. They are on the CPU, and count as tensors of the planned
    device."""

    def __init__(self, trace: Trace, num_sharing: int = 1, takes_step: bool = True) -> None:
        """`num_sharing`: devices that share each micro-batch."""
        self.trace, self.num_sharing = trace, num_sharing
        self.observer = PlannedStep(trace, lambda largest, n: LargestBatches(self, largest).take(n), takes_step)
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.num_tokens = self.num_parameters = self.tower_bytes = 0
        self.in_batch: Mapping[str, int] = {}
        self.model_files: list[str] = []
        cpu = torch.device("cpu")
        self._memory_bytes = memory_bytes(cpu) if trace.device.is_cpu else trace.device.memory_bytes

    # What a recipe begins with ----------------------------------------------------------------------------------------

    def start(self, cfg: RecipeConfig, prepare: Callable[[RecipeConfig], torch.device]) -> torch.device:
        if (size := self.trace.machines.num_devices) > 1:
            refuse_on_many(cfg, size)
        return torch.device("cpu")

    def join(
        self, cfg: ParallelConfig, device: torch.device, connect: Callable[[ParallelConfig, torch.device], Ranks]
    ) -> Ranks:
        size = self.trace.machines.num_devices
        check_number(cfg, size)
        with without_modes():
            return ALONE if size == 1 else PlannedRanks(cfg, device)

    def device_type(self, device: torch.device) -> str:
        return "cpu" if self.trace.device.is_cpu else "cuda"

    def capability(self, device: torch.device) -> tuple[int, int]:
        return self.trace.device.capability

    def memory_bytes(self, measure: Callable[[], int | None]) -> int | None:
        return self._memory_bytes

    def link(self, connect: Callable[[], T]) -> T:
        return cast(T, _PlannedLink(self.trace))

    # Contents ---------------------------------------------------------------------------------------------------------

    def read(self, contents: Callable[[], T], instead: Callable[[], T]) -> T:
        return instead()

    def tokenizer(
        self,
        load: Callable[[], Tokenizer],
        load_for_a_plan: Callable[[], Tokenizer],
        planned: Mapping[str, Callable[[], object]],
    ) -> Tokenizer:
        return cast(Tokenizer, _LazyTokenizer(load_for_a_plan, planned))

    def batches(self, read: Callable[[], T], largest: Callable[[], Batch]) -> T:
        return cast(T, (LargestBatches(self, largest), None))

    def fill(self, model: Decoder, open_weights: Callable[[], T], fill: Callable[[T], None]) -> None:
        fill(cast(T, _zero))
        self._follow_model(model)

    def _follow_model(self, model: Decoder) -> None:
        """Count what the model's forward pass allocates as activations."""
        self.num_parameters += num_parameters(model)
        assert model.source.folder is not None
        files = ["config.json"]
        if model.vision is not None:
            self.tower_bytes += sum(parameter.nbytes for parameter in model.vision.parameters())
            files += ["processor_config.json", "preprocessor_config.json"]
        self.model_files += [str(model.source.folder / name) for name in files]
        self.trace.time.module_names |= {id(module): name for name, module in model.named_modules()}
        model.register_forward_pre_hook(lambda *args: self.trace.memory.enter(ACTIVATIONS, "forward"))

    def generate(self, model: Decoder, rows: list[T], capacity: int, packed_bytes: float, copies: int) -> list[T]:
        prompts = [cast(Any, row).prompt for row in rows]
        rehearse_generation(model, prompts, capacity, packed_bytes, copies, is_cpu=self.trace.device.is_cpu)
        return []

    # The step ---------------------------------------------------------------------------------------------------------

    def repeat(self, parts: Sequence[T], shown: int) -> Iterator[T]:
        """The first `shown` parts. The last of them is charged the time of all that follow."""
        return self.trace.time.charged(parts[:shown], shown - 1, len(parts) - shown)

    def kernel(self, name: str, compute: Callable[[], T], inputs: Sequence[Tensor], launches: int) -> T:
        return self.trace.kernel(name, compute, inputs, launches)

    def prepare_compiler(self, prepare: Callable[[], None], activation_budget: float | None) -> None:
        if activation_budget is not None:  # the planner's backend reads the process-wide setting
            functorch_config.activation_memory_budget = activation_budget

    def begin_run(self, run: Run, begin: Callable[[], None]) -> None:
        run.length.total_steps = 1

    def steps(self, loop: Callable[[], Iterator[int]]) -> Iterator[int]:
        """One step, which ends the rehearsal when it is logged."""
        self.observer.begin_step()
        yield 0


class _LazyTokenizer:
    """A tokenizer that is loaded on first use."""

    def __init__(self, load: Callable[[], Tokenizer], planned: Mapping[str, Callable[[], object]]) -> None:
        """planned: functions that return an attribute without the tokenizer."""
        self._load, self._planned = load, planned

    @cached_property
    def _loaded(self) -> Tokenizer:
        return self._load()

    def __getattr__(self, name: str) -> Any:
        if name not in self._planned:
            return getattr(self._loaded, name)
        value = vars(self)[name] = self._planned[name]()
        return value

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        return self._loaded(*arguments, **settings)

    def __len__(self) -> int:
        return len(self._loaded)


class LargestBatches:
    """Training batches of the largest possible size."""

    batches_per_epoch = 1
    fingerprint, contents = "", UNRECORDED

    def __init__(self, world: PlannedWorld, largest: Callable[[], Batch]) -> None:
        self._world, self._largest = world, largest

    def take(self, n: int) -> list[Batch]:
        """Rank 0's micro-batches of the step: at most two, which are charged the time of all. The second differs from
        the first, because it adds to gradients; later ones are like the second."""
        trace = self._world.trace
        with without_modes():
            largest = self._largest()
            passes = (largest, largest.for_teacher)
            trace.time.longest_document = max(int(batch.inputs["positions"].max()) for batch in passes) + 1
        if largest.compares_steps:
            return self._all(largest, n)
        num_own = -(-n * self._world.num_sharing // trace.machines.num_devices)
        with trace.memory.labelled(BATCH):
            batches = [largest.mapped(torch.zeros_like) for _ in range(min(num_own, 2))]
        self._world.num_tokens = n * batches[0].num_tokens
        self._world.in_batch = largest.counted
        return _Standing(batches, num_own, trace.time)

    def _all(self, largest: Batch, n: int) -> list[Batch]:
        """The micro-batches of all ranks. On a CPU all are in memory; on a GPU the one that is computed."""
        trace = self._world.trace
        with trace.memory.labelled(BATCH):
            batches = [largest.mapped(torch.zeros_like) for _ in range(n if trace.device.is_cpu else min(n, 2))]
        self._world.num_tokens = n * batches[0].num_tokens
        self._world.in_batch = largest.counted
        return batches + batches[-1:] * (n - len(batches))


class _Standing(list[T]):
    """A list of one or two items that is charged the time of `count` items."""

    def __init__(self, items: list[T], count: int, time: Time) -> None:
        super().__init__(items)
        self._count, self._time = count, time

    def __iter__(self) -> Iterator[T]:
        return self._time.charged(super().__iter__(), 0, self._count - len(self))


class _PlannedLink(HostLink):
    """Counts device memory and the time of copies. Host memory is counted as pinned."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        super().__init__(torch.device("cpu"))

    def _open(self) -> None:
        pass

    def _host_memory(self, like: Tensor, *, new: bool = False) -> Tensor:
        with self._trace.uncounted():
            host = torch.empty_like(like, device=self.device)
        self._trace.memory.pin(host)
        return host

    def host_copy(self, tensor: Tensor) -> Tensor:
        return self._host_memory(tensor)

    def seen_from_device(self, host: Tensor) -> Tensor:
        return host

    def _device_memory(self, like: Tensor) -> Tensor:
        memory = self._trace.memory
        with memory.on_stream("copying" if self._lies_apart(like) else memory.stream):
            return torch.empty_like(like)

    def _copy(self, source: Tensor, target: Tensor) -> Any:
        return self._trace.time.travel(source.nbytes)

    def bring_back(self, host: Tensor) -> Tensor:
        with self._trace.memory.labelled(STATES):
            return super().bring_back(host)

    def _finish(self) -> None:
        pass

    def _wait(self, event: Any) -> None:
        self._trace.time.wait_until(event)
