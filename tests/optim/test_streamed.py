"""Streamed state gives the same bits as state on the device, is prefetched, and takes no more memory after a resume."""

from typing import Any
from unittest import mock

import pytest
import torch

from lean_ft import optim
from lean_ft.optim.streamed import StreamedState
from lean_ft.system.host_link import HostLink
from tests.late_link import LateLink
from tests.optim.tiny_training import TinyModel, build, make_batches, same_weights, train

LRS = [3e-3, 1e-2, 1e-3, 5e-3]
LARGE = 2**12  # bytes from which state is streamed here


def streamed(
    model: TinyModel,
    settings: dict[str, Any],
    in_flight_bytes: int = 0,
    ahead_bytes: int = 2**14,
    link: HostLink | None = None,
    part_bytes: int = 2**20,
):
    """The optimizer with streamed state over `link`, or over a link with the latest possible copies."""
    link = LateLink(in_flight_bytes) if link is None else link
    away = StreamedState(link, smallest_bytes=LARGE, ahead_bytes=ahead_bytes, part_bytes=part_bytes)
    with mock.patch.object(optim.build, "stream_state", return_value=away):
        return build(model, {**settings, "state": "streamed"}), link


@pytest.mark.parametrize(
    ("in_backward", "in_flight_bytes", "part_bytes"),
    [
        (True, 2**30, 3000),
        pytest.param(False, 0, 3000, marks=pytest.mark.long),
        pytest.param(True, 0, 2**20, marks=pytest.mark.long),
    ],
)
def test_weights_equal_those_of_state_on_the_device_bitwise(
    settings: dict[str, Any], in_backward: bool, in_flight_bytes: int, part_bytes: int
) -> None:
    if settings["name"] == "paged_adamw_8bit":
        pytest.skip("paged state cannot be streamed")
    settings = {**settings, "in_backward": in_backward}
    plain, away = TinyModel(), TinyModel()
    torch.manual_seed(5)
    train(plain, build(plain, settings), make_batches(4, 2), LRS)
    torch.manual_seed(5)
    optimizer, link = streamed(away, settings, in_flight_bytes, part_bytes=part_bytes)
    train(away, optimizer, make_batches(4, 2), LRS)
    assert same_weights(plain, away)
    large = [key for key, value in optimizer.state_dict().items() if value.nbytes >= LARGE]
    assert bool(large) == bool([size for what, size in link.log if what == "copy"])


@pytest.mark.first(2)
@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "adamw_4bit"])
@pytest.mark.parametrize("in_backward", [False, True])
def test_a_resumed_run_is_bitwise_the_uninterrupted_one_and_holds_no_more(name: str, in_backward: bool) -> None:
    settings = {"name": name, "in_backward": in_backward}
    whole, first, second = TinyModel(), TinyModel(), TinyModel(seed=1)
    batches = make_batches(4)
    train(whole, streamed(whole, settings)[0], batches, LRS)

    optimizer, _ = streamed(first, settings)
    train(first, optimizer, batches[:2], LRS[:2])
    saved = {key: value.clone() for key, value in optimizer.state_dict().items()}
    train(first, optimizer, batches[2:], LRS[2:])  # reading the state changes nothing
    assert same_weights(first, whole)

    before = TinyModel()
    train(before, streamed(before, settings)[0], batches[:2], LRS[:2])
    second.load_state_dict(before.state_dict())
    resumed, link = streamed(second, settings)
    places = {key: value.data_ptr() for key, value in resumed.state_dict().items() if value.nbytes >= LARGE}
    resumed.load_state_dict(saved)
    train(second, resumed, batches[2:], LRS[2:])
    assert same_weights(second, whole)
    assert resumed.state_bytes == optimizer.state_bytes
    assert places == {key: value.data_ptr() for key, value in resumed.state_dict().items() if value.nbytes >= LARGE}
    assert len(link._leaving) == 0 and len(link._queued) == 0


def test_loading_over_a_run_under_way_leaves_nothing_of_it() -> None:
    settings = {"name": "adamw_8bit", "in_backward": True}
    model, other = TinyModel(), TinyModel(seed=3)
    optimizer, _ = streamed(model, settings, in_flight_bytes=2**30)
    train(model, optimizer, make_batches(2), LRS[:2])
    saved = {key: value.clone() for key, value in streamed(other, settings)[0].state_dict().items()}
    optimizer.load_state_dict(saved)
    assert all(torch.equal(value, saved[key]) for key, value in optimizer.state_dict().items())


def test_from_the_second_step_state_is_fetched_before_its_update_asks_for_it() -> None:
    model = TinyModel()
    optimizer, link = streamed(model, {"name": "adamw", "in_backward": True}, ahead_bytes=2**20)
    train(model, optimizer, make_batches(1), LRS[:1])
    link.log.clear()
    train(model, optimizer, make_batches(1), LRS[:1])
    large = [value.nbytes for value in optimizer.state_dict().values() if value.nbytes >= LARGE]
    assert sum(size for what, size in link.log if what == "copy") == 2 * sum(large)  # in and out, once each
    # The step's first update, of the norm, starts the copies of all later ones.
    assert [what for what, _ in link.log[: len(large)]] == ["copy"] * len(large)


@pytest.mark.parametrize("name", ["sgd", "adamw", "adamw_8bit", "adamw_8bit_torchao", "adamw_4bit"])
def test_of_a_large_parameter_no_more_than_a_few_parts_are_on_the_device(name: str) -> None:
    """After one step has recorded the order, each part is prefetched, and copied back while the next ones are
    updated."""
    momentum = {"momentum": 0.9} if name == "sgd" else {}
    model = torch.nn.Embedding(2**12, 64).bfloat16()
    link = LateLink(in_flight_bytes=2**15)
    away = StreamedState(link, smallest_bytes=LARGE, ahead_bytes=2**15, part_bytes=2**14)
    with mock.patch.object(optim.build, "stream_state", return_value=away):
        optimizer = build(model, {"name": name, **momentum, "state": "streamed"})
    kept = [value for value in optimizer.state_dict().values() if value.nbytes >= LARGE]
    on_device: list[int] = []
    update = optimizer.rules[0].update
    with mock.patch.object(optimizer.rules[0], "update") as watched:
        watched.side_effect = lambda states, info: (on_device.append(bytes_in_flight(link)), update(states, info))
        for _ in range(2):
            on_device.clear()
            link.log.clear()
            optimizer.set_lr(1e-3)
            optimizer.scale(model(torch.arange(2**12)).float().square().mean(), last=True).backward()
            optimizer.finish_gradients()
            optimizer.step()
            optimizer.zero_grad()
    assert max(on_device) <= 2**17 < sum(value.nbytes for value in kept)
    copied = sum(size for what, size in link.log if what == "copy")
    assert copied == 2 * sum(value.nbytes for value in kept)  # in and out, once each
    assert min(on_device[1:-1]) > 2**14  # more than the part being updated: others are being copied


def bytes_in_flight(link: LateLink) -> int:
    leaving, arriving = link._leaving, link._arriving.values()
    return sum(sent.source.nbytes for sent in leaving) + sum(value.nbytes for value, _ in arriving)


def test_a_cpu_is_refused() -> None:
    for state, words in {"streamed": "which already uses host memory", "paged": "CUDA managed memory"}.items():
        with pytest.raises(ValueError, match=f"optimizer.state={state} .*{words}.* optimizer.state=device"):
            build(TinyModel(), {"name": "adamw_8bit", "state": state})


@pytest.mark.gpu
def test_on_a_gpu_weights_stay_and_state_leaves() -> None:
    models = [TinyModel().cuda(), TinyModel().cuda()]
    batches = [[ids.cuda() for ids in step] for step in make_batches(4)]
    here = build(models[0], {"name": "adamw"})
    away, _ = streamed(models[1], {"name": "adamw"}, link=HostLink(torch.device("cuda")))
    for model, optimizer, on_gpu in zip(models, (here, away), (True, False), strict=True):
        train(model, optimizer, batches, LRS)
        assert optimizer.state_dict()["embed.weight.exp_avg"].is_cuda == on_gpu
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
