"""The gradient of tied embeddings is one tensor, fires one hook, and has the plain computation's numbers."""

import copy

import pytest
import torch
from torch import Tensor

from lean_ft.losses import linear_cross_entropy
from lean_ft.memory import apply_memory, fuse_tied_gradient
from lean_ft.settings import MemoryConfig
from tests.late_link import LateLink
from tests.memory.tiny_step import backward, batch, relative_error, tiny

EMBEDDING = "model.embed_tokens.weight"


@pytest.mark.first(1)
@pytest.mark.parametrize("link", [None, 0, 2**30], ids=["fused", "host", "host, still leaving"])
def test_gradients_are_those_of_autograd(link: int | None) -> None:
    model = tiny(torch.float64)
    exact = backward(model)
    fused = tiny(torch.float64)
    fuse_tied_gradient(fused, None if link is None else LateLink(link))
    for _ in range(2):
        assert relative_error(backward(fused), exact) < 1e-14


def test_bfloat16_rounds_no_more_than_autograd() -> None:
    exact = backward(tiny(torch.float64))[EMBEDDING]
    errors = []
    for fused in (False, True):
        model = tiny(torch.bfloat16)
        if fused:
            fuse_tied_gradient(model)
        errors.append(float((backward(model)[EMBEDDING].double() - exact).norm()))
    assert errors[1] <= 1.02 * errors[0]


def test_the_hook_fires_once_and_a_weight_that_waits_takes_no_memory() -> None:
    model, link = tiny(), LateLink()
    fuse_tied_gradient(model, link)
    weight = model.model.embed_tokens.weight
    fired = []
    weight.register_post_accumulate_grad_hook(lambda param: fired.append(param.grad.clone()))
    backward(model)
    assert len(fired) == 1
    assert torch.allclose(fired[0], backward(tiny())[EMBEDDING], atol=1e-5)
    copies = [size for what, size in link.log if what == "copy"]
    assert copies == [weight.nbytes] * 2  # there and back
    assert not link._arriving and not link._leaving


def test_the_gradient_is_away_while_the_layers_go_backward() -> None:
    model, link = tiny(), LateLink()
    fuse_tied_gradient(model, link)
    sent_before = {}
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(
            lambda _, name=name: sent_before.update({name: [what for what, _ in link.log].count("copy")})
        )
    backward(model)
    last = f"layers.{len(model.layers) - 1}."
    assert {count for name, count in sent_before.items() if last in name} == {1}, "sent before the last layer's update"
    assert sent_before["model.layers.0.mlp.gate_proj.weight"] == 1
    assert max(count for name, count in sent_before.items() if "layers.0.self_attn" in name) == 2, "on its way back"


def test_the_first_backward_of_two_forwards_and_a_loss_without_the_output_layer_lose_nothing() -> None:
    ids, _ = batch()
    gradients = []
    for fused in (False, True):
        model = tiny()
        if fused:
            fuse_tied_gradient(model)
        first, second = model(ids), model(ids.flip(0))  # as preference losses do
        (first.square().mean() + second.tanh().mean()).backward()
        model(ids, return_hidden=True).square().mean().backward()
        gradients.append({name: param.grad for name, param in model.named_parameters()})
    assert relative_error(gradients[1], gradients[0]) < 1e-5


def test_without_gradients_and_after_a_copy_the_weight_is_the_parameter() -> None:
    model = tiny()
    fuse_tied_gradient(model)
    backward(model)
    assert model.output_weight is not model.model.embed_tokens.weight
    other = copy.deepcopy(model)
    assert other.output_weight is other.model.embed_tokens.weight
    assert relative_error(backward(other), backward(tiny())) < 1e-6
    with torch.no_grad():
        model(batch()[0])
    assert model.output_weight is model.model.embed_tokens.weight


def test_untied_embeddings_and_host_memory_on_a_cpu_are_refused() -> None:
    model = tiny()
    with pytest.raises(ValueError, match=r"is on cpu.* Set memory.tied_gradient=fused"):
        apply_memory(model, MemoryConfig(tied_gradient="host"), compile=False)
    model.lm_head = torch.nn.Linear(4, 4)
    with pytest.raises(ValueError, match="has its own weight"):
        fuse_tied_gradient(model)
    with pytest.raises(ValueError, match="has its own weight"):
        apply_memory(model, MemoryConfig(tied_gradient="host"), compile=False)


@pytest.mark.gpu
def test_the_gradient_waits_in_host_memory_on_a_gpu() -> None:
    exact = backward_on_gpu(MemoryConfig(tied_gradient="separate"))
    for _ in range(3):
        assert relative_error(backward_on_gpu(MemoryConfig(tied_gradient="host")), exact) < 1e-5


def backward_on_gpu(memory: MemoryConfig) -> dict[str, Tensor]:
    model = tiny().cuda()
    apply_memory(model, memory, compile=False)
    ids, labels = (x.cuda() for x in batch())
    linear_cross_entropy(model(ids, return_hidden=True), model.output_weight, labels).backward()
    torch.cuda.synchronize()
    return {name: param.grad.cpu() for name, param in model.named_parameters() if param.grad is not None}
