"""Offloaded activations give the same numbers, are prefetched, and leave nothing behind."""

import gc

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from lean_ft.memory import apply_memory
from lean_ft.memory.offload import Offloaded, offload_to
from lean_ft.settings import MemoryConfig
from lean_ft.system.host_link import HostLink
from tests.late_link import LateLink
from tests.memory.tiny_step import backward, batch, relative_error, tiny


def offloaded(in_flight_bytes: int = 0, ahead_bytes: int = 2**16, **memory):
    model, link = tiny(), LateLink(in_flight_bytes)
    apply_memory(model, MemoryConfig(**memory), compile=False)
    away = offload_to(model, link)
    away._smallest_bytes, away._ahead_bytes = 1024, ahead_bytes
    return model, link, away


@pytest.mark.first(2)
@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
@pytest.mark.parametrize(("in_flight_bytes", "ahead_bytes"), [(0, 2**16), (2**16, 0)])
def test_gradients_equal_those_of_activations_on_the_device_bitwise(
    checkpointing: str, in_flight_bytes: int, ahead_bytes: int
) -> None:
    model, link, _ = offloaded(in_flight_bytes, ahead_bytes, activation_checkpointing=checkpointing)
    exact = backward(tiny())
    for _ in range(2):
        found = backward(model)
        assert all(torch.equal(found[name], exact[name]) for name in exact)
        assert not link._arriving, "something was fetched that backward no longer needs"
    assert sum(size for what, size in link.log if what == "copy") > 2 * 96 * 128


def test_a_hundred_steps_leave_nothing_behind() -> None:
    link, layer = LateLink(2**12), torch.nn.Linear(16, 16)
    away = Offloaded(link, layer, smallest_bytes=0, ahead_bytes=2**14)
    model = torch.nn.Sequential(layer, torch.nn.Sigmoid(), layer, torch.nn.Tanh())  # which save their own results
    held = []
    for step in range(100):
        away.begin()
        with saved_tensors_hooks(away.pack, away.unpack):
            out = model(torch.randn(64, 16))
        if step % 3:  # some forward passes have no backward
            out.sum().backward()
        del out
        held.append((len(away._order), len(link._leaving), len(link._arriving), len(link._queued)))
    assert max(held[3:]) <= max(held[:3])
    away.begin()
    assert (away.num_away, away._order, len(link._leaving), len(link._arriving)) == (0, [], 0, 0)


def test_each_tensor_is_fetched_before_backward_asks_for_it() -> None:
    link = LateLink()
    model = torch.nn.Linear(1, 1)
    away = Offloaded(link, model, smallest_bytes=0, ahead_bytes=2 * 400)
    x = torch.randn(100, requires_grad=True)
    with saved_tensors_hooks(away.pack, away.unpack):
        y = x
        for _ in range(5):
            y = y.sin()  # saves one tensor of 400 bytes
    link.log.clear()
    y.sum().backward()
    # The last one is fetched on demand, with two more; after that each wait is for a copy that began earlier.
    assert [what for what, _ in link.log] == ["copy", "wait", *["copy"] * 2, *["wait", "copy"] * 2, "wait", "wait"]


def test_what_the_model_has_and_small_and_repeated_tensors_stay() -> None:
    link = LateLink(2**20)
    layer = torch.nn.Linear(64, 64, bias=False)
    layer.register_buffer("levels", torch.randn(64, 64), persistent=False)  # like a quantized weight
    away = Offloaded(link, layer, smallest_bytes=4096)
    x = torch.randn(32, 64)
    for kept in (layer.weight, layer.get_buffer("levels")):
        packed = away.pack(kept.t())
        assert isinstance(packed, torch.Tensor) and packed.data_ptr() == kept.data_ptr()
    assert away.pack(x[:2]).data_ptr() == x.data_ptr()
    assert isinstance(away.pack(x[:1].expand(64, 64)), torch.Tensor)
    first = away.pack(x)
    assert away.pack(x.view(32, 64)) is first
    x.add_(1)
    assert away.pack(x) is not first
    assert [what for what, _ in link.log].count("copy") == 2


def test_what_several_layers_save_is_sent_once_and_stays_on_the_device() -> None:
    link, layer = LateLink(2**20), torch.nn.Linear(1, 1)
    away = Offloaded(link, layer, smallest_bytes=0)
    shared, own = torch.randn(64), [torch.randn(64) for _ in range(6)]
    packed = [(away.pack(tensor), away.pack(shared)) for tensor in own]
    link.let_all_go()
    assert {id(sent) for _, sent in packed} == {id(packed[0][1])}
    assert packed[0][1].source is not None and all(sent.source is None for sent, _ in packed)
    assert [what for what, _ in link.log].count("copy") == 7
    assert all(torch.equal(away.unpack(sent), shared) for _, sent in reversed(packed))
    assert [what for what, _ in link.log].count("copy") == 7, "it was on the device, so nothing is copied"


def test_without_gradients_nothing_is_sent() -> None:
    model, link, _ = offloaded()
    with torch.no_grad():
        model(batch()[0])
    assert link.log == []


def test_a_cpu_is_refused() -> None:
    with pytest.raises(ValueError, match=r"is on cpu.* Set memory.activation_offload=false"):
        apply_memory(tiny(), MemoryConfig(activation_offload=True), compile=False)


def offload_on_gpu(model: torch.nn.Module) -> None:
    """`offload_activations` with thresholds for a tiny model."""
    away = offload_to(model, HostLink(torch.device("cuda"), in_flight_bytes=2**14))
    away._smallest_bytes, away._ahead_bytes = 2**12, 2**14


@pytest.mark.gpu
@pytest.mark.parametrize("compile", [False, True])
def test_on_a_gpu_gradients_stay_and_memory_falls(compile: bool) -> None:
    ids, held, gradients = batch(256)[0].cuda(), {}, {}
    for offload in (False, True):
        model = tiny().cuda()
        apply_memory(model, MemoryConfig(activation_checkpointing="full"), compile=compile)
        if offload:
            offload_on_gpu(model)
        for _ in range(4):
            model.zero_grad()
            gc.collect()  # the previous model is a reference cycle
            before = torch.cuda.memory_allocated()
            hidden = model(ids, return_hidden=True)
            held[offload] = torch.cuda.memory_allocated() - before
            hidden.square().mean().backward()
        torch.cuda.synchronize()
        gradients[offload] = {name: param.grad.cpu() for name, param in model.named_parameters()}
    assert held[True] < held[False]
    assert relative_error(gradients[True], gradients[False]) < 1e-5


@pytest.mark.gpu
def test_on_a_gpu_a_hundred_steps_leave_nothing_behind() -> None:
    model, ids = tiny().cuda(), batch()[0].cuda()
    offload_on_gpu(model)
    allocated = []
    for _ in range(100):
        model.zero_grad()
        model(ids, return_hidden=True).square().mean().backward()
        torch.cuda.synchronize()
        allocated.append(torch.cuda.memory_allocated())
    assert max(allocated[50:]) <= max(allocated[:10])
