"""Frozen embeddings on the host change no number, and take memory on the device only while the loss needs them."""

import pytest
import torch

from lean_ft.losses import linear_cross_entropy
from lean_ft.memory import apply_memory, keep_embeddings_on_host
from lean_ft.models import Decoder
from lean_ft.peft import apply_lora, load_with_adapter
from lean_ft.settings import LoRAConfig, MemoryConfig, ModelConfig
from tests.late_link import LateLink
from tests.memory.tiny_step import backward, batch, tiny

ON_HOST = MemoryConfig(frozen_embeddings="host")


def adapted() -> Decoder:
    model = tiny()
    torch.manual_seed(0)
    apply_lora(model, LoRAConfig(rank=4))
    return model


def test_gradients_are_bitwise_those_of_embeddings_on_the_device() -> None:
    plain, model, link = adapted(), adapted(), LateLink()
    keep_embeddings_on_host(model, link)
    expected = backward(plain)
    for _ in range(2):
        found = backward(model)
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    assert [size for what, size in link.log if what == "copy"] == [plain.output_weight.nbytes] * 2  # one for each loss
    assert not link._arriving and not link._leaving


def test_an_output_layer_with_its_own_weight_stays_on_the_device() -> None:
    model, link = adapted(), LateLink()
    model.lm_head = torch.nn.Linear(*model.model.embed_tokens.weight.T.shape, bias=False)
    keep_embeddings_on_host(model, link)
    assert model.output_weight is model.lm_head.weight
    backward(model)
    assert not link.log


def test_trained_embeddings_and_a_cpu_are_refused() -> None:
    with pytest.raises(ValueError, match=r"embed_tokens is trained. Set memory.frozen_embeddings=device"):
        keep_embeddings_on_host(tiny(), LateLink())
    with pytest.raises(ValueError, match=r"is on cpu.* Set memory.frozen_embeddings=device"):
        apply_memory(adapted(), ON_HOST, compile=False)


@pytest.mark.gpu
def test_a_gpu_reads_rows_from_the_host() -> None:
    found, expected = backward_on_gpu(ON_HOST), backward_on_gpu(MemoryConfig())
    assert found.keys() == expected.keys() and any(grad.any() for grad in found.values())
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-5, atol=1e-6)


def backward_on_gpu(memory: MemoryConfig) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = load_with_adapter(ModelConfig(path="tiny", dtype="float32"), LoRAConfig(rank=4), "cuda", memory=memory)
    apply_memory(model, memory, compile=False)
    on_device = sum(p.nbytes for p in model.parameters() if p is not model.model.embed_tokens.weight)
    if memory.frozen_embeddings == "host":
        assert model.model.embed_tokens.weight.is_cuda
        assert torch.cuda.max_memory_allocated() - before < on_device + model.model.embed_tokens.weight.nbytes / 2
    ids, labels = (values.cuda() for values in batch())
    linear_cross_entropy(model(ids, return_hidden=True), model.output_weight, labels, chunk_tokens=32).backward()
    torch.cuda.synchronize()
    return {name: param.grad.cpu() for name, param in model.named_parameters() if param.grad is not None}
