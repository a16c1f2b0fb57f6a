"""Streamed experts change no number, and the stacks of two layers are on the device."""

import gc
import json
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING

from lean_ft.losses import linear_cross_entropy
from lean_ft.memory import apply_memory, stream_experts
from lean_ft.models import Decoder
from lean_ft.models.moe import experts_of
from lean_ft.peft import load_with_adapter
from lean_ft.settings import LoRAConfig, MemoryConfig, ModelConfig
from lean_ft.system.passes import evaluating
from tests.late_link import LateLink
from tests.memory.tiny_step import tiny
from tests.models.family_cases import SIZES

NUM_LAYERS = 4
IDS = torch.randint(0, 100, (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = CONFIG_MAPPING["gpt_oss"](**SIZES | {"num_hidden_layers": NUM_LAYERS, "num_local_experts": 4}).to_dict()
    config |= {"hidden_size": 64, "intermediate_size": 64, "quantization_config": {"quant_method": "mxfp4"}}
    path = tmp_path_factory.mktemp("mixture")
    (path / "config.json").write_text(json.dumps(config))
    return path


def adapted(folder: Path, form: str, memory: MemoryConfig | None = None, device: str = "cpu") -> Decoder:
    torch.manual_seed(0)
    cfg = ModelConfig.model_validate({"path": str(folder), "random_init": True, "dtype": "bfloat16"})
    lora = LoRAConfig.model_validate({"rank": 4, "quantize": form, "targets": ["q_proj", "*.experts.down_proj"]})
    model = load_with_adapter(cfg, lora, device, memory=memory)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, 0.0, 0.1)
    return model


def stored_tensors(model: Decoder) -> list[torch.Tensor]:
    with evaluating(model):
        return [tensor for own in experts_of(model).values() for frozen in own.stacks() for tensor in frozen.tensors]


def gradients(model: Decoder) -> dict[str, torch.Tensor]:
    model.zero_grad()
    ids = IDS.to(model.device)
    linear_cross_entropy(model(ids, return_hidden=True), model.output_weight, ids, chunk_tokens=32).backward()
    return {name: param.grad.cpu() for name, param in model.named_parameters() if param.grad is not None}


@pytest.mark.first(1)
@pytest.mark.parametrize("form", ["as_stored", "nf4", "none"])
@pytest.mark.parametrize("num_tiles", [0, 2])
def test_gradients_are_bitwise_those_of_experts_on_the_device(form: str, num_tiles: int, folder: Path) -> None:
    plain, model, link = adapted(folder, form), adapted(folder, form), LateLink()
    assert stream_experts(model, link) == NUM_LAYERS
    for each in (plain, model):
        apply_memory(each, MemoryConfig(activation_checkpointing="full", tile_mlp=num_tiles), compile=False)
    expected = gradients(plain)
    assert any("experts" in name and grad.any() for name, grad in expected.items())
    per_layer = sum(tensor.nbytes for tensor in stored_tensors(model)) // NUM_LAYERS
    for num_copies in (2 * NUM_LAYERS, 2 * NUM_LAYERS - 2):  # the stacks that a step ends with serve the next one
        link.log.clear()
        found = gradients(model)
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
        assert sum(size for what, size in link.log if what == "copy") == num_copies * per_layer
        with evaluating(model, plain):
            assert torch.equal(model(IDS), plain(IDS))


def test_after_a_forward_pass_alone_the_next_one_begins_at_the_first_layer(folder: Path) -> None:
    model, link = adapted(folder, "nf4"), LateLink()
    expected = adapted(folder, "nf4")(IDS)
    stream_experts(model, link)
    num_tensors = len(stored_tensors(model)) // NUM_LAYERS
    for _ in range(3):
        assert torch.equal(model(IDS), expected)
        assert len(link._arriving) == num_tensors  # of one layer


def test_what_cannot_be_streamed_is_refused(folder: Path) -> None:
    streamed = MemoryConfig(experts="streamed", activation_checkpointing="full")
    with pytest.raises(ValueError, match=r"this model has none. Set memory.experts=device"):
        stream_experts(tiny(), LateLink())
    with pytest.raises(ValueError, match=r"needs frozen experts, but the model's experts are trained"):
        stream_experts(adapted(folder, "none").requires_grad_(True), LateLink())
    with pytest.raises(ValueError, match=r"is on cpu.* Set memory.experts=device"):
        adapted(folder, "nf4", streamed)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["as_stored", "nf4", "none"])
def test_a_gpu_loads_stacks_to_the_host_and_copies_them_back(form: str, folder: Path) -> None:
    (found, allocated), (expected, allocated_before) = (on_gpu(folder, form, where) for where in ("streamed", "device"))
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    stacks = stored_tensors(adapted(folder, form))
    assert allocated + sum(tensor.nbytes for tensor in stacks) <= allocated_before


def on_gpu(folder: Path, form: str, experts: str) -> tuple[dict[str, torch.Tensor], int]:
    """The gradients of a second step, and the memory that the model takes before the first."""
    memory = MemoryConfig.model_validate({"experts": experts, "activation_checkpointing": "full", "tile_mlp": 2})
    gc.collect()
    before = torch.cuda.memory_allocated()
    model = adapted(folder, form, memory, "cuda")
    apply_memory(model, memory, compile=False)
    allocated = torch.cuda.memory_allocated() - before
    gradients(model)
    return gradients(model), allocated
