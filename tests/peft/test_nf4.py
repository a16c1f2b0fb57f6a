"""Quantized weights equal bitsandbytes', and the unquantized model is never in memory."""

import json
import subprocess
import sys

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

from lean_ft import load_model, save_model
from lean_ft.memory import apply_memory
from lean_ft.models.frozen_weight import FrozenLinear, quantized_weights
from lean_ft.peft import apply_lora, quantize_as_loaded
from lean_ft.quantize.nf4 import to_nf4
from lean_ft.settings import LoRAConfig, MemoryConfig
from tests.peft.conftest import IDS, loss_of, randomize
from tests.training.toy_runs import QWEN

NF4 = LoRAConfig(quantize="nf4", rank=4)


def quantized(linear: nn.Linear) -> FrozenLinear:
    return FrozenLinear(to_nf4(linear.weight.detach()), linear.bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_numbers_equal_bitsandbytes_and_take_4_bits(dtype):
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    torch.manual_seed(0)
    linear = nn.Linear(192, 1024, bias=True).to(dtype)
    layer = quantized(linear)
    assert 8 * layer.weight.frozen.nbytes / linear.weight.numel() == pytest.approx(4.127, abs=0.05)
    assert [name for name, _ in layer.named_parameters()] == ["bias"]
    expected = dequantize_4bit(*quantize_4bit(linear.weight.data, quant_type="nf4", compress_statistics=True))
    weight = layer.weight.frozen.whole()
    assert torch.equal(weight, expected)
    assert weight.dtype == dtype
    assert (expected - linear.weight).norm() < 0.1 * linear.weight.norm()
    x = torch.randn(3, 7, 192, dtype=dtype, requires_grad=True)
    y, reference = layer(x), nn.functional.linear(x, expected, linear.bias)
    assert torch.equal(y, reference)
    seed = torch.randn_like(y)
    torch.testing.assert_close(*(torch.autograd.grad(out, x, seed)[0] for out in (y, reference)))


@pytest.mark.gpu
def test_compiled_on_a_gpu_the_numbers_are_the_same():
    """Compiled code decodes the scales itself. A fused multiply-add may round them differently in the last bit."""
    torch.manual_seed(0)
    layer = quantized(nn.Linear(192, 320).cuda())  # 960 scales, so that the last block of scales is not full
    x = torch.randn(5, 192, device="cuda")
    torch.testing.assert_close(torch.compile(layer, fullgraph=True)(x), layer(x), rtol=1e-5, atol=1e-5)


def test_a_quantized_model_equals_one_with_the_dequantized_weights(tiny_folder):
    model = load_model(tiny_folder, quantize=quantize_as_loaded("nf4"))
    weights = quantized_weights(model)
    assert len(weights) == 2 * 7
    reference = load_model(tiny_folder)
    with torch.no_grad():
        for name, weight in weights.items():
            reference.get_parameter(name).copy_(weight.frozen.whole())
    for each in (model, reference):
        apply_lora(each, NF4)
        randomize(each)
        loss_of(each(IDS)).backward()
    torch.testing.assert_close(model(IDS), reference(IDS), atol=1e-5, rtol=1e-5)
    expected = {name: p.grad for name, p in reference.named_parameters()}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert (parameter.grad - expected[name]).norm() <= 1e-4 * expected[name].norm(), name


@pytest.mark.long
@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="compilers before torch 2.13 keep some values of a checkpointed layer"
)
@pytest.mark.parametrize(("targets", "num_tiles", "num_made"), [("up_proj", 0, 13), ("q_proj", 3, 11)])
def test_weights_that_a_compiled_layer_dequantizes_in_backward(tiny_folder, targets, num_tiles, num_made):
    """Seven weights, and all but the last one again for recomputation; tiles use two weights for both."""
    model = load_model(tiny_folder, quantize=quantize_as_loaded("nf4"))
    apply_lora(model, LoRAConfig(quantize="nf4", rank=4, targets=[targets]))
    apply_memory(model, MemoryConfig(activation_checkpointing="full", tile_mlp=num_tiles), compile=False)
    made = []

    def backward(graph, inputs):
        made.append(sum(node.target is torch.ops.bitsandbytes.dequantize_4bit.default for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    compiler = aot_autograd(
        fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward),
        bw_compiler=backward,
        partition_fn=min_cut_rematerialization_partition,
    )
    layer = model.layers[1]
    layer.compile(fullgraph=True, backend=compiler)
    loss_of(model(IDS)).backward()
    assert made == [num_made]


def test_weights_are_quantized_one_by_one_while_loading(tiny_folder):
    largest = 0

    def watch(model, name):
        nonlocal largest
        quantize_as_loaded("nf4")(model, name)
        layers = [m for n, m in model.named_modules() if n.startswith("model.layers.")]
        whole = [m for m in layers if type(m) is nn.Linear and not m.weight.is_meta]
        largest = max(largest, len(whole))

    load_model(tiny_folder, quantize=watch)
    assert largest == 0
    load_model(tiny_folder, random_init=True, quantize=watch)
    assert largest == 0


def test_random_weights_are_the_same_quantized_or_not(tiny_folder):
    torch.manual_seed(0)
    plain = load_model(tiny_folder, random_init=True)
    torch.manual_seed(0)
    model = load_model(tiny_folder, random_init=True, quantize=quantize_as_loaded("nf4"))
    assert torch.equal(model.model.embed_tokens.weight, plain.model.embed_tokens.weight)
    last = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(
        quantized_weights(model)[last].frozen.whole(), to_nf4(plain.get_parameter(last).detach()).whole()
    )


def test_quantized_weights_are_not_saved(tiny_folder, tmp_path):
    model = load_model(tiny_folder, quantize=quantize_as_loaded("nf4"))
    with pytest.raises(ValueError, match="differ from those of its config.json"):
        save_model(model, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_without_bitsandbytes_the_setting_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes.cextension", None)
    with pytest.raises(ValueError, match=r"lora\.quantize=nf4 needs bitsandbytes.*pip install"):
        quantize_as_loaded("nf4")


def test_only_values_of_the_setting_are_kinds():
    with pytest.raises(ValueError, match="expected one of auto, none, nf4, as_stored, float8"):
        quantize_as_loaded(NF4)  # type: ignore


GROWTH = """
import sys, torch, bitsandbytes.functional
from lean_ft.models import load_model
from lean_ft.peft import quantize_as_loaded
from lean_ft.quantize.nf4 import to_nf4
from lean_ft.settings import LoRAConfig
from lean_ft.memory.host_memory import return_freed_memory
from lean_ft.training.process_memory import peak_memory_bytes
return_freed_memory()
to_nf4(torch.zeros(64, 64))  # memory that libraries allocate on first use
before = peak_memory_bytes(torch.device("cpu"))
model = load_model(sys.argv[1], dtype=torch.bfloat16, random_init=True,
                   quantize=quantize_as_loaded("nf4"))
print(peak_memory_bytes(torch.device("cpu")) - before)
"""


@pytest.mark.long
def test_quantizing_while_loading_never_holds_the_whole_model(tmp_path):
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({**QWEN, **sizes, "num_hidden_layers": 12}))
    done = subprocess.run([sys.executable, "-c", GROWTH, tmp_path], capture_output=True, text=True, check=True)
    bfloat16_bytes = 2 * 12 * (2 * 1024 * 1024 + 2 * 1024 * 256 + 3 * 1024 * 4096)
    assert int(done.stdout) < 0.6 * bfloat16_bytes  # the NF4 weights take 0.26 of it
