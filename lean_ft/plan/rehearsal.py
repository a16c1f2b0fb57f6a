"""Runs one step of a real recipe on shapes alone, and says what it took.

The recipe's own `main` runs, line by line, on tensors without contents. What would touch a disk or wait for one is stood
in for, by identity: wherever the recipe's module holds `load_model`, `sft_batches`, `Run` and the like under whatever
name, it finds the stand-in. A copied and edited recipe is thus planned as it was edited, as long as it calls the library.

The batch is the longest there can be: every row `data.max_length` tokens, and every token a target.
"""

import contextlib
import importlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

import lean_ft.data
import lean_ft.losses
import lean_ft.memory
import lean_ft.memory.loss_chunk
import lean_ft.memory.offload
import lean_ft.models
import lean_ft.optim
import lean_ft.optim.streamed
import lean_ft.peft
import lean_ft.tokenizers
import lean_ft.training
from lean_ft.data import Batch, longest_batch
from lean_ft.environment import memory_bytes
from lean_ft.host_link import IN_FLIGHT_BYTES, HostLink, open_link
from lean_ft.memory import wants_host_pool
from lean_ft.models import empty_model
from lean_ft.optim.adamw_8bit import AdamW8bit
from lean_ft.optim.rule import ParameterState, StepInfo
from lean_ft.optim.slices import first_slice_only
from lean_ft.optim.streamed import Streamed
from lean_ft.peft import quantize_as_loaded
from lean_ft.plan.devices import Device
from lean_ft.plan.fusion import fusing_backend
from lean_ft.plan.trace import Moment, Trace

# The function of the same name hides the module in its package.
loss_module = importlib.import_module("lean_ft.losses.linear_cross_entropy")

WEIGHTS, STATES, GRADIENTS = "weights", "optimizer state", "gradients"
BATCH, ACTIVATIONS, LOSS, WORKSPACE = "batch", "activations", "loss", "workspace"
LABELS = (WEIGHTS, STATES, GRADIENTS, ACTIVATIONS, LOSS, WORKSPACE, BATCH)


@dataclass(frozen=True)
class Rehearsal:
    """What one optimizer step takes."""

    peak: Moment
    step_seconds: float  # estimated; good for comparing settings
    tokens: int  # of all micro-batches, every position counted
    num_parameters: int
    timeline: list[tuple[float, int, str]] = field(repr=False)  # (seconds, bytes alive, label)
    planning_seconds: float = 0.0

    @property
    def peak_bytes(self) -> int:
        return self.peak.total_bytes


def rehearse(recipe: ModuleType, cfg: Any, device: Device) -> Rehearsal:
    """Runs one step of `recipe.main(cfg)` for `device` without weights, data or that device.

    Raises ValueError as the recipe would for settings that contradict each other, for a model folder without a
    config.json, and for a recipe that takes no step.
    """
    started = time.perf_counter()
    memory = getattr(cfg, "memory", None)
    trace = Trace(device, host_pool=memory is not None and wants_host_pool(memory, compile=cfg.compile))
    stage = _Stage(cfg, trace)
    loss_module._compiled_softmax_gradient.cache_clear()
    torch._dynamo.reset()
    if (lora := getattr(cfg, "lora", None)) is not None:
        quantize_as_loaded(lora)  # its library makes tables when it is first used, and these must be real
    try:
        with stage.set_for(recipe), _quiet_compiler(), stage.fake_mode, trace:
            recipe.main(_for_shapes(cfg, device))
        raise ValueError(
            "the recipe ended without a step: what is planned is one step, from lean_ft.training.Run's steps() to its "
            "log(). A recipe that trains otherwise cannot be planned."
        )
    except _Curtain:
        pass
    finally:
        loss_module._compiled_softmax_gradient.cache_clear()
        torch._dynamo.reset()
    return Rehearsal(
        peak=trace.peak,
        step_seconds=max(trace.seconds, trace.link_seconds),  # copies run beside the computation
        tokens=stage.num_tokens,
        num_parameters=stage.num_parameters,
        timeline=trace.timeline,
        planning_seconds=time.perf_counter() - started,
    )


@contextlib.contextmanager
def _quiet_compiler() -> Iterator[None]:
    """What the compiler has to say of the recipe it says in the run; here nobody asked it."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _for_shapes(cfg: Any, device: Device) -> Any:
    """The settings as tensors on a pretended CPU can honour them.

    Of what a GPU alone can do, managed memory is counted as the GPU's own, which it is as long as there is room; and
    products in float8 as those in bfloat16, whose memory they take.
    """
    updates: dict[str, Any] = {"device": "cpu"}
    if not device.is_cpu:
        if getattr(cfg, "optimizer", None) is not None and cfg.optimizer.state == "paged":
            updates["optimizer"] = cfg.optimizer.model_copy(update={"state": "device"})
        if getattr(cfg, "memory", None) is not None:
            updates["memory"] = cfg.memory.model_copy(update={"float8_products": False})
    return cfg.model_copy(update=updates)


class _Curtain(BaseException):
    """The step has been taken; nothing after it matters."""


class _Stage:
    """The stand-ins, and what they note."""

    def __init__(self, cfg: Any, trace: Trace) -> None:
        self.cfg, self.trace = cfg, trace
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.num_tokens = self.num_parameters = 0
        self.in_flight: Tensor | None = None

    @contextlib.contextmanager
    def set_for(self, recipe: ModuleType) -> Iterator[None]:
        stand_ins: dict[int, Any] = {
            id(lean_ft.training.start): lambda cfg: torch.device("cpu"),
            id(lean_ft.training.Run): self.run,
            id(lean_ft.training.say_answers): lambda *args, **kwargs: None,
            id(lean_ft.tokenizers.load_tokenizer): lambda *args, **kwargs: None,
            id(lean_ft.data.sft_batches): lambda *args, **kwargs: (self, None),
            id(lean_ft.data.preference_batches): lambda *args, **kwargs: (self, None),
            id(lean_ft.models.load_model): self.load_model,
            id(lean_ft.peft.apply_lora): self.labelled(WEIGHTS, "adapter", lean_ft.peft.apply_lora),
            id(lean_ft.losses.linear_cross_entropy): self.linear_cross_entropy,
            id(lean_ft.optim.build_optimizer): self.build_optimizer,
            id(lean_ft.optim.LossScaler): lambda *args, **kwargs: lean_ft.optim.LossScaler(enabled=False),
        }
        stand_ins_inside = {  # of what the library calls for the recipe
            (lean_ft.memory, "open_link"): self.open_link,
            (lean_ft.memory.offload, "open_link"): self.open_link,
            (lean_ft.optim.streamed, "open_link"): self.open_link,
            (lean_ft.memory.loss_chunk, "memory_bytes"): self.memory_bytes,
            (loss_module, "_softmax_gradient_in_blocks"): self.softmax_of_first_block,
        }
        real_compile, backend = torch.compile, fusing_backend(self.trace)

        def planned_compile(*args: Any, **kwargs: Any) -> Any:
            kwargs.pop("mode", None)
            return real_compile(*args, **{**kwargs, "backend": backend})

        backward = self.labelled(WORKSPACE, "backward, at its start", torch.Tensor.backward)
        with contextlib.ExitStack() as stack:
            for name, value in list(vars(recipe).items()):
                if id(value) in stand_ins:
                    stack.enter_context(mock.patch.object(recipe, name, stand_ins[id(value)]))
            stack.enter_context(mock.patch.object(torch, "compile", planned_compile))
            stack.enter_context(mock.patch.object(torch.Tensor, "backward", backward))
            for (module, name), stand_in in stand_ins_inside.items():
                stack.enter_context(mock.patch.object(module, name, stand_in))
            stack.enter_context(first_slice_only("cpu" if self.trace.device.is_cpu else "cuda"))
            yield

    def labelled(self, label: str, where: str, function: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.trace.labelled(label, where):
                return function(*args, **kwargs)

        return call

    def load_model(
        self,
        path: Any,
        device: Any = "cpu",
        dtype: torch.dtype = torch.float32,
        random_init: bool = False,
        router_aux_loss_coef: float | None = None,
        after_module: Callable[[Any, str], None] | None = None,
    ) -> nn.Module:
        trace = self.trace
        with unset_fake_temporarily(), trace.uncounted():
            model = empty_model(path, dtype, router_aux_loss_coef)
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        for place in [name for name, _ in model.named_modules()]:
            with trace.labelled(WEIGHTS):
                with unset_fake_temporarily():
                    self._make_fake(model.get_submodule(place), place)
                if after_module is not None:
                    after_module(model, place)
        model.register_forward_pre_hook(lambda *args: self._enter(ACTIVATIONS, "forward"))
        return model

    def _make_fake(self, module: nn.Module, place: str) -> None:
        """Gives a module's own parameters a fake memory in place of none."""
        for name, parameter in list(module.named_parameters(recurse=False)):
            fake = self.fake_mode.fake_tensor_converter.from_meta_and_device(
                self.fake_mode, parameter.detach(), torch.device("cpu")
            )
            fake = nn.Parameter(fake)
            self.trace.note(fake)
            fake.register_post_accumulate_grad_hook(self._note_gradient(f"{place}.{name}"))
            setattr(module, name, fake)

    def _enter(self, label: str, where: str) -> None:
        self.trace.label, self.trace.where = label, where

    def _note_gradient(self, name: str) -> Callable[[Tensor], None]:
        def note(parameter: Tensor) -> None:
            self.trace.where = f"backward, at {name}"
            if parameter.grad is not None:
                self.trace.relabel(parameter.grad, GRADIENTS)

        return note

    def memory_bytes(self, device: torch.device) -> int | None:
        return memory_bytes(device) if self.trace.device.is_cpu else self.trace.device.memory_bytes

    def open_link(self, device: torch.device, setting: str, instead: str) -> HostLink:
        return open_link(device, setting, instead) if self.trace.device.is_cpu else _PlannedLink(self.trace)

    def linear_cross_entropy(self, *args: Any, **kwargs: Any) -> Any:
        with self.trace.labelled(LOSS):
            return lean_ft.losses.linear_cross_entropy(*args, **kwargs)

    def build_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        with self.trace.labelled(STATES):
            optimizer = lean_ft.optim.build_optimizer(*args, **kwargs)
        optimizer._noise_seed = 0  # drawing one asks a tensor for its value
        optimizer._all_finite = lambda scalars: True  # and so does this
        rule = optimizer.rule.rule if isinstance(optimizer.rule, Streamed) else optimizer.rule
        is_one_kernel = isinstance(rule, AdamW8bit) and not (rule.update_clipping or rule.draws_noise)
        if is_one_kernel and not self.trace.device.is_cpu:
            rule.update = lambda states, step: None  # bitsandbytes' own, which has no workspace
        if isinstance(optimizer.rule, Streamed):
            with self.trace.labelled(STATES):  # one step alone fetches nothing ahead
                in_flight = min(IN_FLIGHT_BYTES, optimizer.state_bytes)
                self.in_flight = torch.empty(in_flight, dtype=torch.uint8)
        optimizer.rule.update = self.update_once_a_shape(optimizer.rule.update)
        return optimizer

    def update_once_a_shape(self, update: Callable) -> Callable:
        """An update that is rehearsed for the first parameter of each shape, and takes the time of all.

        Its time is that of its traffic: gradients and states are read, states and weights are read and written.
        """
        seen: set[tuple] = set()

        def call(states: Sequence[ParameterState], step: StepInfo) -> None:
            new = {(state.param.shape, state.param.dtype): state for state in states}
            new = [state for kind, state in new.items() if kind not in seen]
            seen.update((state.param.shape, state.param.dtype) for state in new)
            seconds = self.trace.seconds
            if new:
                with self.trace.labelled(WORKSPACE, f"optimizer step of {new[0].name}"):
                    update(new, step)
            self.trace.seconds = seconds
            for state in states:
                kept = [state.param, *state.tensors.values()]
                if self.in_flight is not None:
                    self.trace.travel(2 * sum(t.nbytes for t in state.tensors.values()))
                self.trace.spend(0.0, 2 * sum(t.nbytes for t in kept) + state.grad.nbytes)

        return call

    def softmax_of_first_block(self, logits: Tensor, labels: Tensor, losses: Tensor, **settings: Any) -> None:
        """The loss's uncompiled passes over a chunk's logits go block by block; one block shows what they take."""
        limit = 1 << 20 if self.trace.device.is_cpu else 1 << 25
        rows = max(1, limit // logits.shape[1])
        seconds = self.trace.seconds
        loss_module._softmax_gradient(logits[:rows], labels[:rows], losses[:rows], **settings)
        self.trace.seconds += (self.trace.seconds - seconds) * max(0, logits.shape[0] / rows - 1)

    # The data ---------------------------------------------------------------------------------------------------------

    def take(self, n: int) -> list[Batch]:
        """The step's micro-batches: two stand for more, for the second finds the gradients of the first."""
        self.trace.longest_document = self.cfg.data.max_length
        with self.trace.labelled(BATCH):
            batches = [longest_batch(self.cfg.data, self.cfg.batch_size) for _ in range(min(n, 2))]
        self.num_tokens = n * batches[0].num_tokens
        return batches

    # The run ----------------------------------------------------------------------------------------------------------

    def run(self, *args: Any, **kwargs: Any) -> "_Stage":
        return self

    start_step, total_steps = 0, 1

    def steps(self) -> Iterator[int]:
        yield 0

    def log(self, **kwargs: Any) -> None:
        """The step is over: what is evaluated or saved after it takes less."""
        raise _Curtain


class _PlannedLink(HostLink):
    """Counts what stays on the device and how long the copies take; what is on the host costs nothing."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        super().__init__(torch.device("cpu"))

    def _open(self) -> None:
        pass

    def _host_memory(self, like: Tensor) -> Tensor:
        with self._trace.uncounted():
            return torch.empty_like(like)

    def host_copy(self, tensor: Tensor) -> Tensor:
        return self._host_memory(tensor)

    def _copy(self, source: Tensor, target: Tensor) -> Any:
        self._trace.travel(source.nbytes)
        return "the end of this copy"

    def _finish(self) -> None:
        pass

    def _wait(self, event: Any) -> None:
        pass
