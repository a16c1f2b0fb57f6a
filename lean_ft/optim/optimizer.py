"""One optimizer for every update rule, stepping after backward or inside it.

A plain step needs all gradients at once. Stepping in backward updates a parameter as soon as its gradient is complete
and frees the gradient immediately, so only about one layer's gradients are alive (Lv et al. 2023,
https://arxiv.org/abs/2306.09782). Both call the same rule with the same arguments and give bitwise the same weights.

Both use the same loop:

    optimizer.set_lr(lr)                                    # before backward: the hooks read it
    for i, batch in enumerate(micro_batches):
        optimizer.scale(loss, last=i == len(micro_batches) - 1).backward()
    grad_norm = optimizer.finish_gradients(max_norm)
    optimizer.step()
    optimizer.zero_grad()

A gradient that is not finite never reaches the weights. If a loss or the global norm is not finite, the step is
skipped: weights and state do not change. In backward, the loss is checked before the first update, so that step is
skipped too. But if a finite loss gives a gradient that is not finite, other parameters may already have been updated.
That gradient then counts as zero, and so do those that are updated with it (`by_layer`): their parameters move by
momentum and decay alone, and the returned norm is not finite.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType

import torch
from torch import Tensor, nn

from lean_ft.optim.gradients import all_finite, global_norm, gradient_norms, scale_gradients, zero_unless_finite
from lean_ft.optim.loss_scaler import LossScaler
from lean_ft.optim.rule import ParameterState, Rule, StepInfo
from lean_ft.optim.streamed import SMALLEST_BYTES, StreamedState
from lean_ft.system.host_link import HostLink
from lean_ft.system.shards import ALONE, Part, Ranks, local, part_of
from lean_ft.system.world import world


class Optimizer:
    """Updates named parameters by a rule; with `in_backward`, from hooks during backward.

    `rule` is one rule for all parameters, or a function from a parameter to its rule. Frozen parameters are left out,
    and a tied parameter counts once. `lr_ratios` multiplies learning rates, by the names of parameters.
    With `streamed`, the state is in host memory.

    A compiled layer delivers all its gradients at once. `by_layer` then updates its parameters together in backward,
    which takes a quarter of the kernel launches.

    With several `ranks`, each rank updates its own rows and keeps their state, and all ranks skip the same steps. Every
    rank must make the same calls in the same order.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        rule: Rule | Callable[[nn.Parameter], Rule],
        *,
        in_backward: bool,
        by_layer: bool = False,
        lr_ratios: Mapping[str, float] = MappingProxyType({}),
        streamed: StreamedState | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        trainable: dict[nn.Parameter, str] = {}
        for name, param in named_parameters:
            if param.requires_grad:
                trainable.setdefault(param, name)
        if not trainable:
            raise ValueError("The optimizer got no parameter that requires a gradient: nothing would be trained.")
        self.in_backward = in_backward
        self.scaler = LossScaler(enabled=False)
        self.lr = 0.0
        self.step_count = 0
        self.skipped_steps = 0  # because a loss or gradients were not finite
        self.is_whole = True  # False from a step's first update to its end, when weights and state belong to no step
        self.streamed = streamed
        self.notes: list[str] = []  # adjustments of the settings, for the log
        self.ranks = ranks
        here = world()
        self._observer = here.observer
        self.states: list[ParameterState] = []
        for index, (param, name) in enumerate(trainable.items()):
            own_rule = rule if isinstance(rule, Rule) else rule(param)
            tensors = own_rule.init_state(local(param))
            tensors = streamed.init_state(tensors) if streamed else tensors
            ratio, device_type = lr_ratios.get(name, 1.0), here.device_type(param.device)
            self.states.append(ParameterState(name, param, index, own_rule, ratio, tensors, ranks, device_type))
        self._device, self._device_type = self.states[0].param.device, self.states[0].device_type
        self.rules = list(dict.fromkeys(state.rule for state in self.states))
        self._updates_now = False  # whether hooks update in the next backward
        self._losses: list[Tensor] = []  # of the current step's micro-batches
        self._skips = False  # whether the current step is skipped
        self._noise_seed: int | None = None
        self._norms: dict[int, Tensor] = {}  # in backward: gradient norms of the updated parameters
        self._arrived: set[int] = set()  # in backward: the parameters whose gradients are complete
        self._observer.begin_optimizer(self)
        if in_backward:
            groups: dict[str, list[ParameterState]] = defaultdict(list)
            for state in self.states:
                layer = re.match(r".*\blayers\.\d+\.", state.name) if by_layer else None
                groups[layer[0] if layer else state.name].append(state)
            for group in groups.values():
                for state in group:
                    state.whole.register_post_accumulate_grad_hook(
                        lambda _, state=state, group=group: self._gradient_arrived(state, group)
                    )

    def scale_losses(self) -> None:
        """Scale losses for float16, and skip steps whose gradients overflow."""
        assert not self.in_backward, "the overflow check needs every gradient before any update"
        self.scaler = LossScaler(enabled=True)

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the next step. Call it before backward, when hooks read it."""
        self.lr = lr

    def scale(self, loss: Tensor, *, last: bool) -> Tensor:
        """Return the loss to call backward on: multiplied for float16, else unchanged.

        `last` marks the backward that completes the step's gradients; stepping in backward, this one updates. A step
        with a loss that is not finite is skipped. The host waits for the losses here if the backward updates, otherwise
        in `finish_gradients`.
        """
        self._losses.append(loss.detach())
        self._updates_now = last and self.in_backward
        if self._updates_now:
            self._skips = self._any_rank(not all_finite(self._losses))
        scaled = self.scaler.scale(loss)
        self._observer.begin_backward()
        return scaled

    @torch.no_grad()
    def finish_gradients(self, max_norm: float | None = None) -> Tensor:
        """Unscale the gradients, clip their global norm to `max_norm`, and return the norm before clipping.

        The norm is a float32 scalar on the device. The host waits for it, to skip the step if it is not finite.
        Stepping in backward, the norm comes from the hooks; it is NaN if the step is skipped.
        """
        if self.in_backward:
            assert max_norm is None, "clipping needs every gradient before any update"
            self._update_leftovers()
            norm = global_norm([self._norms[index] for index in sorted(self._norms)], self._device)
            return norm * torch.nan if self._skips else norm
        grads = [local(state.whole.grad) for state in self.states if state.whole.grad is not None]
        scale = self.scaler.value
        norms = gradient_norms(grads, self._device_type).unbind() if grads else ()
        norm = self._norms_of_all_rows(global_norm(norms, self._device)) / scale
        self._skips = self._any_rank(not all_finite([norm, *self._losses]))
        self.scaler.update(overflowed=self._skips)
        if grads and not self._skips:
            if max_norm is not None:
                scale_gradients(grads, (max_norm / (norm + 1e-6)).clamp(max=1.0) / scale)
            elif scale != 1.0:
                scale_gradients(grads, 1.0 / scale)
        return norm

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters that have a gradient and end the step; in backward, they are updated already."""
        if self.in_backward:
            self._update_leftovers()
        elif not self._skips:
            self._observer.update(self, [state for state in self.states if state.whole.grad is not None])
        if not self._skips:
            self._end_for_others()
        self.step_count += not self._skips
        self.skipped_steps += self._skips
        self._noise_seed = None
        self._norms.clear()
        self._arrived.clear()
        self._losses.clear()
        self._updates_now = self._skips = False
        self.is_whole = True

    def _end_for_others(self) -> None:
        """Tell the rules which parameters the step has not updated."""
        others = [
            state
            for state in self.states
            if (state.index not in self._norms if self.in_backward else state.whole.grad is None)
        ]
        if others and self.streamed is not None:
            self.streamed.forget()
        for (rule, _), members in _by_rule(others).items():
            rule.left_out(members)

    def zero_grad(self) -> None:
        """Free the gradients."""
        for state in self.states:
            state.whole.grad = None

    @property
    def state_bytes(self) -> int:
        return sum(tensor.nbytes for state in self.states for tensor in state.tensors.values())

    @contextmanager
    def state_away(self, link: HostLink) -> Iterator[None]:
        """Context manager between steps that moves optimizer state to pinned host memory, to free device memory."""
        moved = [
            (state.tensors, name)
            for state in self.states
            for name, tensor in state.tensors.items()
            if tensor.untyped_storage().nbytes() >= SMALLEST_BYTES  # also a small part of the vector of many parameters
        ]
        for tensors, name in moved:
            tensors[name] = link.host_copy(tensors[name])
        try:
            yield
        finally:
            for tensors, name in moved:
                tensors[name] = link.bring_back(tensors[name])

    def state_dict(self) -> dict[str, Tensor]:
        """`<parameter>.<state>` -> the live tensor, and `step`, `skipped_steps` -> int64 scalars."""
        return {name: part.values for name, part in self.state_parts().items()}

    def state_parts(self) -> dict[str, Part]:
        """`state_dict` with each tensor's place in the unsharded tensor, for saving and loading on all ranks."""
        if self.streamed is not None:
            self.streamed.settle()
        else:
            self._await_device()
        counts = {"step": self.step_count, "skipped_steps": self.skipped_steps}
        parts = {name: Part(torch.tensor(n), (), 0, self.ranks.rank > 0) for name, n in counts.items()}
        for state in self.states:
            parts |= {f"{state.name}.{key}": part for key, part in _state_parts(state).items()}
        return parts

    @torch.no_grad()
    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Load a state_dict, or this rank's parts of its tensors (see `state_parts`).

        Raises ValueError if it was saved by another model or rule.
        """
        saved: dict[str, dict[str, str]] = defaultdict(dict)  # parameter -> state -> its name in the mapping
        for name in tensors:
            if name not in ("step", "skipped_steps"):
                parameter, _, key = name.rpartition(".")
                saved[parameter][key] = name
        unknown = saved.keys() - {state.name for state in self.states}
        missing = {"step", "skipped_steps"} - set(tensors)
        if unknown or missing:
            problem = f"{sorted(unknown)[:3]} are not trained here" if unknown else f"it lacks {sorted(missing)}"
            raise ValueError(
                f"The saved optimizer state does not belong to this model: {problem}. Resume with that run's model and "
                "settings."
            )
        if self.streamed is not None:
            self.streamed.forget()
        else:
            self._await_device()
        for state in self.states:  # one parameter at a time, because the mapping may read from disk
            names = saved.get(state.name, {})
            state.rule.load_state(state, {key: tensors[name] for key, name in names.items()})
        self.step_count = int(tensors["step"])
        self.skipped_steps = int(tensors["skipped_steps"])

    def _await_device(self) -> None:
        """Wait until the host may access paged state."""
        if any(state.param.is_cuda for state in self.states):
            torch.cuda.synchronize()

    @torch.no_grad()
    def _gradient_arrived(self, state: ParameterState, group: list[ParameterState]) -> None:
        """Called in backward with each complete gradient. Update `group` when all its gradients are complete."""
        if not self._updates_now:
            return
        assert self._skips or state.index not in self._arrived, (
            f"{state.name} got a gradient twice in one step, and the incomplete first one has updated it: "
            "caused by reentrant checkpointing or a second backward"
        )
        self._arrived.add(state.index)
        if all(member.index in self._arrived for member in group):
            self._update_and_free(group)

    def _update_and_free(self, states: Sequence[ParameterState]) -> None:
        if not self._skips:
            grads = [local(state.whole.grad) for state in states if state.whole.grad is not None]
            norms = self._norms_of_all_rows(gradient_norms(grads, self._device_type))
            self._norms |= {state.index: norm for state, norm in zip(states, norms, strict=True)}
            zero_unless_finite(grads, norms, self._device_type)
            self._observer.update(self, states)
        for state in states:
            state.whole.grad = None

    def _update_leftovers(self) -> None:
        """Update parameters that the last micro-batch did not use but earlier ones did."""
        leftovers = [state for state in self.states if state.whole.grad is not None]
        assert self._updates_now or not leftovers, "call a step's last backward on optimizer.scale(loss, last=True)"
        for state in leftovers:
            self._update_and_free([state])

    def _norms_of_all_rows(self, norms: Tensor) -> Tensor:
        """The norms over all shards from the norms of this rank's rows."""
        return norms if self.ranks.num_shards == 1 else self.ranks.sum_shards(norms.double().square()).sqrt().float()

    def _any_rank(self, flag: bool) -> bool:
        return bool(self.ranks.highest(flag)[0])

    def apply_rules(self, states: Sequence[ParameterState]) -> None:
        """Update parameters, those with the same rule and learning rate in one call."""
        self.is_whole = False
        if self._noise_seed is None and any(rule.draws_noise for rule in self.rules):
            # From torch's global generator, whose state is in checkpoints, so that a resumed run rounds the same way.
            drawn = int(torch.randint(2**31, ()))
            self._noise_seed = self.ranks.highest(drawn if self.ranks.rank == 0 else 0)[0]
        for (rule, lr_ratio), members in _by_rule(states).items():
            seed = self._noise_seed if rule.draws_noise else None
            step = StepInfo(lr=self.lr * lr_ratio, number=self.step_count + 1, noise_seed=seed)
            if self.streamed is None:
                rule.update(members, step)
            else:
                for state in members:
                    for here in self.streamed.on_device(state, step.number):
                        rule.update([here], step)

    def joint_groups(self, states: Sequence[ParameterState]) -> list[list[ParameterState]]:
        """The parameters that `apply_rules` updates in the same launches."""
        if self.streamed is not None:
            return [[state] for state in states]
        return [group for (rule, _), members in _by_rule(states).items() for group in rule.joint_groups(members)]


def _by_rule(states: Sequence[ParameterState]) -> dict[tuple[Rule, float], list[ParameterState]]:
    """The parameters with the same rule and learning rate."""
    groups: dict[tuple[Rule, float], list[ParameterState]] = defaultdict(list)
    for state in states:
        groups[state.rule, state.lr_ratio].append(state)
    return groups


def _state_parts(state: ParameterState) -> dict[str, Part]:
    """Where this rank's state tensors are in the state of the unsharded parameter."""
    of_param = part_of(state.whole)
    if of_param.values.shape == of_param.shape:
        return {key: Part(t, tuple(t.shape), 0, of_param.is_kept_by_others) for key, t in state.tensors.items()}
    if of_param.run is not None:
        return _by_columns(state, of_param)
    rows_before = of_param.first // math.prod(of_param.shape[1:])

    def shapes(num_rows: int) -> dict[str, torch.Size]:
        """Shapes of the state of a parameter with `num_rows` rows."""
        tensors = state.rule.init_state(torch.empty(num_rows, *of_param.shape[1:], device="meta"))
        return {key: tensor.shape for key, tensor in tensors.items()}

    parts, whole, before = {}, shapes(of_param.shape[0]), shapes(rows_before)
    for key, tensor in state.tensors.items():
        if tensor.shape == whole[key]:  # shared by all rows, and equal on every rank
            parts[key] = Part(tensor, tuple(whole[key]), 0, of_param.is_kept_by_others or state.ranks.shard > 0)
        else:
            parts[key] = Part(tensor, tuple(whole[key]), before[key].numel(), of_param.is_kept_by_others)
    return parts


def _by_columns(state: ParameterState, of_param: Part) -> dict[str, Part]:
    """`_state_parts` of a matrix that is cut by columns; state entries belong to neighboring elements."""
    assert of_param.run is not None
    whole = state.rule.init_state(torch.empty(of_param.shape, device="meta"))
    parts = {}
    for key, tensor in state.tensors.items():
        block, rest = divmod(math.prod(of_param.shape), whole[key].numel())
        assert not rest and of_param.run % block == 0, "build_optimizer refuses columns cut within a block"
        shape, places = tuple(whole[key].shape), (of_param.first, of_param.run, of_param.stride)
        first, run, stride = (place // block for place in places)
        parts[key] = Part(tensor, shape, first, of_param.is_kept_by_others, run, stride)
    return parts
