"""A decoder without stored weights: on the meta device, or with random weights."""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from lean_ft.models.config import DecoderConfig
from lean_ft.models.decoder import Decoder
from lean_ft.models.frozen_weight import FrozenParameter
from lean_ft.models.moe import Experts
from lean_ft.models.source import own_tensors
from lean_ft.settings import MemoryConfig
from lean_ft.system.host_link import open_link
from lean_ft.system.shards import part_of
from lean_ft.torch_private import without_modes

Fill = Callable[[str, Tensor], None]


def build_decoder(
    config: DecoderConfig, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> Decoder:
    """A decoder with random weights: normal of standard deviation `initializer_range`, zero biases, norms of scale
    1."""
    model = empty_decoder(config, dtype)
    fill_model(model, device, random_weights(model))
    return model


def empty_decoder(config: DecoderConfig, dtype: torch.dtype) -> Decoder:
    """A decoder on the meta device."""
    try:
        with without_modes(), torch.device("meta"):
            model = Decoder(config)
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                if not name.endswith(config.in_float32):
                    tensor.data = tensor.data.to(dtype)
            return model
    except RuntimeError as error:  # the number of bytes exceeds 64 bits
        raise ValueError("config.json describes a tensor that is too large for any machine.") from error


@torch.no_grad()
def fill_model(model: Decoder, device: str | torch.device, fill: Fill, memory: MemoryConfig | None = None) -> None:
    """Allocate and fill the parameters of a meta model, one module at a time, and one quantized weight at a time. Of
    the weights that `memory` keeps on the host, embeddings are read into host memory, and each stack of experts is
    moved there."""
    host_embeddings = memory is not None and memory.frozen_embeddings == "host"
    streams_experts = memory is not None and memory.experts == "streamed"
    name, value = ("frozen_embeddings", "host") if host_embeddings else ("experts", "streamed")
    setting, instead = f"memory.{name}={value}", f"memory.{name}=device"
    link = open_link(torch.device(device), setting, instead) if host_embeddings or streams_experts else None
    for name, module in list(model.named_modules()):
        if isinstance(module, FrozenParameter):
            model.set_submodule(name, FrozenParameter(module.load(name, device, fill)))
            name = name.rpartition(".")[0]
        elif link is not None and host_embeddings and name.startswith("model.embed_tokens"):
            assert isinstance(module, nn.Embedding)
            module.weight = link.weight_on_host(module.weight, partial(fill, f"{name}.weight"))
        else:
            module.to_empty(device=device, recurse=False)
            for own_name, tensor in own_tensors(module):
                fill(f"{name}.{own_name}" if name else own_name, tensor)
        if link is not None and streams_experts and isinstance(experts := model.get_submodule(name), Experts):
            for tensor in (tensor for frozen in experts.stacks() for tensor in frozen.tensors if not tensor.is_meta):
                link.keep_on_host(tensor)


def random_weights(model: Decoder) -> Fill:
    """Fill a parameter as a new model has it: by its module's `initial` (a number, or a function that fills the
    tensor), with zeros for a bias, or drawn."""
    initial = {
        f"{place}.{key}": value for place, module in model.named_modules() for key, value in _initial(module).items()
    }

    def draw(name: str, parameter: Tensor) -> None:
        here = part_of(parameter)
        if here.values.shape != here.shape:  # draw the whole, so that the numbers do not depend on the number of ranks
            whole = torch.empty(here.shape, dtype=parameter.dtype, device=here.values.device)
            draw(name, whole)
            here.values.copy_(here.within(whole))
        elif callable(value := initial.get(name)):
            value(here.values)
        elif value is not None or name.endswith("bias"):
            here.values.fill_(value or 0.0)
        elif name.endswith(".blocks"):  # all 4-bit numbers, whose root mean square is 2.9
            here.values.random_()
        elif name.endswith(".exponents"):
            here.values.fill_(127 + round(math.log2(model.config.initializer_range / 2.9)))
        else:
            here.values.normal_(0.0, model.config.initializer_range)

    return draw


def _initial(module: nn.Module) -> dict[str, float | Callable[[Tensor], object]]:
    return getattr(module, "initial", {"weight": 1.0} if isinstance(module, nn.LayerNorm) else {})
