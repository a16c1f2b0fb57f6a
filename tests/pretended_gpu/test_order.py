"""Side streams on the simulated GPU: the latest order that waits allow changes no result, and every wait is needed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lean_ft
from lean_ft.losses import linear_cross_entropy
from lean_ft.memory import checkpoint_layers, fuse_tied_gradient
from lean_ft.memory.offload import Offloaded, offload_to
from lean_ft.optim.adamw import AdamW
from lean_ft.optim.adamw_8bit import AdamW8bit
from lean_ft.optim.optimizer import Optimizer
from lean_ft.optim.rule import ParameterState, Rule, StepInfo
from lean_ft.optim.streamed import StreamedState
from lean_ft.system.host_link import HostLink
from tests.memory.tiny_step import tiny
from tests.pretended_gpu.order import host_uses, late_streams, watched_for_races, without

pytestmark = pytest.mark.simulated

LIBRARY = Path(lean_ft.__file__).parent
SMALLEST_BYTES, AHEAD_BYTES, IN_FLIGHT_BYTES = 2**12, 2**16, 2**16  # small enough that a tiny model's tensors are moved
RULE: dict[str, Any] = {
    "betas": (0.9, 0.99),
    "eps": 1e-8,
    "weight_decay": 0.1,
    "update_clipping": False,
    "stochastic_rounding": False,
    "compile": False,
}


def new_link() -> HostLink:
    return HostLink(torch.device("cuda", 0), IN_FLIGHT_BYTES)


def train(
    *, offload: bool, park: bool, stream: bool, in_backward: bool, eight_bit: bool, paged: bool = False
) -> dict[str, Tensor]:
    """Return weights and states after 3 steps of the embedded model with the given techniques."""
    model = tiny(torch.bfloat16).cuda()
    checkpoint_layers(model)
    if offload:
        away = offload_to(model, new_link())
        away._smallest_bytes, away._ahead_bytes = SMALLEST_BYTES, AHEAD_BYTES
    fuse_tied_gradient(model, new_link() if park else None)
    streamed = StreamedState(new_link(), smallest_bytes=SMALLEST_BYTES, ahead_bytes=AHEAD_BYTES) if stream else None
    rule = AdamW8bit(paged=paged, **RULE) if eight_bit else AdamW(**RULE)
    optimizer = Optimizer(model.named_parameters(), rule, in_backward=in_backward, streamed=streamed)
    saved: dict[str, Tensor] = {}
    for step, micro_batches in enumerate(batches(3)):
        optimizer.set_lr(1e-3)
        if step == 1:  # a graph that is dropped halfway: its prefetched tensors are never used
            last = next(model.layers[-1].parameters())
            torch.autograd.grad(model(micro_batches[0][0], return_hidden=True).square().mean(), last)
        for i, (ids, labels) in enumerate(micro_batches):
            hidden = model(ids, return_hidden=True)
            loss = linear_cross_entropy(hidden, model.output_weight, labels, chunk_tokens=32) / 256
            optimizer.scale(loss, last=i == len(micro_batches) - 1).backward()
            del hidden, loss
        optimizer.finish_gradients()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            saved = read(optimizer.state_dict())
        if step == 1:  # load the saved state while copies are under way
            optimizer.load_state_dict(saved)
    found = {f"state of {name}": value for name, value in read(optimizer.state_dict()).items()}
    return found | {name: param.detach().cpu() for name, param in model.named_parameters()}


def batches(num_steps: int) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Yield token ids and labels (2, 64) on the GPU, 2 micro-batches per step."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        ids = [torch.randint(0, 40, (2, 64), generator=generator) for _ in range(2)]
        yield [(x.cuda(), torch.randint(0, 500, x.shape, generator=generator).cuda()) for x in ids]


def read(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy the state to the host."""
    for value in state.values():
        if not value.is_cuda:
            host_uses(value, writes=False)
    return {name: value.cpu().clone() for name, value in state.items()}


_load_state = Rule.load_state


def load_state(self: Rule, state: ParameterState, saved: dict[str, Tensor]) -> None:
    for name in saved:
        if not state.tensors[name].is_cuda:
            host_uses(state.tensors[name], writes=True)
    _load_state(self, state, saved)


def share_and_drop() -> dict[str, Tensor]:
    """A tensor that two layers save stays on the device; its memory is reused after both free it."""
    model = torch.nn.Linear(1, 1)
    away = Offloaded(new_link(), model, smallest_bytes=0)
    shared = torch.randn(4096, device="cuda")
    packed = [away.pack(shared), away.pack(shared)]
    del shared, packed
    return {"next": torch.zeros(4096, device="cuda").add_(1).cpu()}


def differing(found: dict[str, Tensor], exact: dict[str, Tensor]) -> list[str]:
    """Return the names of tensors with an element that differs or is NaN."""
    assert found.keys() == exact.keys()
    return [name for name in exact if not torch.equal(found[name], exact[name])]


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("eight_bit", [False, True])
@pytest.mark.parametrize("away", ["offload", "park", "stream", "all"])
def test_late_streams_change_nothing(away: str, in_backward: bool, eight_bit: bool) -> None:
    rest = {"in_backward": in_backward, "eight_bit": eight_bit}
    exact = train(offload=False, park=False, stream=False, **rest)
    techniques = {name: away in (name, "all") for name in ("offload", "park", "stream")}
    with late_streams(), watched_for_races() as races:
        found = train(**techniques, **rest)
    assert differing(found, exact) == []
    assert races == []


def everything() -> dict[str, Tensor]:
    return train(offload=True, park=True, stream=True, in_backward=True, eight_bit=True)


def paged() -> dict[str, Tensor]:
    return train(offload=False, park=False, stream=False, in_backward=False, eight_bit=True, paged=True)


def test_each_wait_and_each_record_is_noticed_when_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rule, "load_state", load_state)
    monkeypatch.setattr("lean_ft.optim.adamw_8bit.MIN_PAGED_ELEMENTS", SMALLEST_BYTES)
    unnoticed, num_places = [], 0
    for workload in (everything, paged, share_and_drop):
        with without(None, LIBRARY) as places, late_streams(), watched_for_races() as races:
            exact = workload()
        assert races == []
        num_places += len(places)
        for missing in places:
            with without(missing, LIBRARY), late_streams(), watched_for_races() as races:
                try:
                    found = workload()
                except (IndexError, RuntimeError):  # values were read too early
                    continue
            if not races and not differing(found, exact):
                unnoticed.append((workload.__name__, missing))
    assert num_places >= 12
    # A tensor shared by several layers lives until the step ends, after waits for later copies of its stream: only the
    # last workload notices. Other waits protect the memory that is unpinned here; the next test covers `_unpin`.
    unnoticed = [place for place in unnoticed if not place[1].endswith("_unpin: synchronize")]
    kept = ("everything", "HostLink.keep > HostLink._wait: wait_event")
    assert [place for place in unnoticed if place != kept] == []


def test_memory_is_not_unpinned_under_a_copy() -> None:
    """Memory of a copy that may be under way is unpinned to make room for a larger copy."""

    def unpin() -> None:
        link = new_link()
        for num_elements in (2**10, 2**12):
            link.send(torch.ones(num_elements, device="cuda"))
            link.let_all_go()  # the compute stream waits for the copy, the host does not

    with without(None, LIBRARY) as places, late_streams(), watched_for_races() as races:
        unpin()
    assert races == []
    (wait,) = [place for place in places if place.endswith("empty_like > _unpin: synchronize")]
    with without(wait, LIBRARY), late_streams(), watched_for_races() as races:
        unpin()
    assert races and all(race.startswith("the host on stream -1 writes what") for race in races)


def test_memory_is_not_reused_under_a_copy_that_is_never_waited_for() -> None:
    """A tensor larger than the in-flight limit returns to memory of the compute stream."""

    def give_up() -> dict[str, Tensor]:
        link = new_link()
        link.prefetch(link.send(torch.ones(IN_FLIGHT_BYTES, device="cuda")))
        link.forget_arrivals()
        return {"next": torch.zeros(IN_FLIGHT_BYTES, device="cuda").add_(2).cpu()}

    with without(None, LIBRARY) as places, late_streams(), watched_for_races() as races:
        exact = give_up()
    assert races == []
    (wait,) = [place for place in places if place.startswith("HostLink.forget_arrivals")]
    with without(wait, LIBRARY), late_streams(), watched_for_races() as races:
        found = give_up()
    assert races or differing(found, exact)


def test_the_kernel_of_8_bit_adamw_waits_for_gradients_of_another_stream_and_is_waited_for() -> None:
    """bitsandbytes launches on the default stream; gradients of a sharded model arrive on another stream."""

    def update() -> None:
        param = torch.nn.Parameter(torch.zeros(4096, device="cuda"))
        rule = AdamW8bit(paged=False, **RULE)
        optimizer = Optimizer([("w", param)], rule, in_backward=False)
        optimizer.set_lr(1.0)
        param.grad = torch.ones(4096, device="cuda")
        rule.update(
            optimizer.states, StepInfo(1.0, 1, None)
        )  # the first update loads tables, and the host waits for them
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            param.grad = torch.ones(4096, device="cuda")
            rule.update(optimizer.states, StepInfo(1.0, 2, None))
            param.detach().mul(2.0)
        torch.cuda.synchronize()

    with without(None, LIBRARY) as places, watched_for_races() as races:
        update()
    assert races == []
    (waits,) = [place for place in places if "_update_by_bitsandbytes" in place]  # both waits have the same name
    with without(waits, LIBRARY), watched_for_races() as races:
        update()
    kernel = "bitsandbytes::optimizer_update_8bit_blockwise on stream 0"
    assert any(race.startswith(kernel) and "what aten::fill_" in race for race in races), races
    assert any(f"what {kernel} wrote" in race for race in races), races
