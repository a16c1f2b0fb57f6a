"""Add adapters to a model, find them, and turn them off.

`apply_lora(model, cfg.lora)` freezes the model and adds an adapter to each layer that the settings name. Afterwards
only the adapters' parameters are trained.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import get_args

import torch
from torch import Tensor, nn

from lean_ft.models import Decoder, load_model
from lean_ft.models.config_json import Labels
from lean_ft.models.dequantized import as_in_folder
from lean_ft.models.frozen_weight import FrozenLinear, FrozenParameter, to_float8
from lean_ft.models.load_options import Quantize
from lean_ft.models.moe import Experts
from lean_ft.peft.cut_loading import UnreadBesideAdapter
from lean_ft.peft.experts import PROJECTIONS, put_experts_adapter
from lean_ft.peft.layers import AdaptedLayer, AdapterShape, LoRAEmbedding, LoRALinear, LoRAOutput, adapted_layers
from lean_ft.peft.new_rows import EMBEDDING, TrainedRows, put_rows, trained_rows
from lean_ft.peft.targets import find_targets, is_parameter_to_peft, is_projection_of_experts
from lean_ft.peft.tower import TOWER, check_suits_tower
from lean_ft.quantize.nf4 import check_available, to_nf4
from lean_ft.settings import FrozenKind, LoRAConfig, MemoryConfig, ModelConfig
from lean_ft.system.shards import ALONE, Ranks

OUTPUT = "lm_head"
SCORE = "score"


def load_with_adapter(
    model_cfg: ModelConfig,
    lora: LoRAConfig | None,
    device: str | torch.device = "cpu",
    ranks: Ranks = ALONE,
    scores: Labels | None = None,
    memory: MemoryConfig | None = None,
) -> Decoder:
    """Load the model of the settings and add an adapter to it; without `lora`, just load it.

    With several `ranks`, the model is on the meta device until it is sharded (`cut_loading`). Weights are quantized one
    by one while loading, so the unquantized model is never in memory. With `model.dtype=float16`, frozen weights are
    float16. `scores` loads a reward model or classifier with these labels, whose output layer is trained in addition to
    an adapter. Frozen weights that `memory` keeps on the host are loaded there. Raises the errors of `load_model` and
    `apply_lora`.
    """
    device = device if ranks.size == 1 else "meta"
    if lora is None:
        return load_model(model_cfg, device, scores=scores)
    quantize = quantize_as_loaded(lora.quantize)
    model = load_model(model_cfg, device, dtype=model_cfg.dtype, scores=scores, quantize=quantize, memory=memory)
    apply_lora(model, lora)
    if model.source.unread is not None:
        model.source.unread = UnreadBesideAdapter(model.source.unread.fill)
    return model


def apply_lora(model: Decoder, cfg: LoRAConfig) -> int:
    """Freeze the model, add an adapter to each layer that `cfg.targets` matches, and return their number.

    Rows of new tokens (`model.new_tokens`) are trained too. Raises ValueError if a target matches nothing or takes no
    adapter, or if settings contradict the model.
    """
    if has_adapter(model):
        raise ValueError("the model already has an adapter; load it again to add another one.")
    if not cfg.targets and not model.source.new_ids:
        none = "lora.targets=[] trains only the rows of model.new_tokens, and there are none"
        raise ValueError(f"{none}. Set model.new_tokens, or lora.targets=all-linear.")
    weight = model.output_weight
    if cfg.dtype == "model" and weight.dtype == torch.float16:
        raise ValueError("lora.dtype=model would train in float16, where small updates vanish. Set lora.dtype=float32.")
    names = find_targets(model, cfg.targets)
    if model.vision is not None:
        check_suits_tower([name for name in names if name.startswith(TOWER)], model.vision)
    if model.config.head_bias and model.score is None and (OUTPUT in names or model.source.new_ids):
        setting = "model.new_tokens" if model.source.new_ids else f"{OUTPUT} in lora.targets"
        raise ValueError(
            f"{setting} is not supported for an output layer with a bias, as this model has. Leave it out."
        )
    if OUTPUT in names and cfg.dropout:
        unsupported = f"lora.dropout={cfg.dropout:g} is not supported for {OUTPUT}"
        raise ValueError(f"{unsupported}. Set lora.dropout=0, or remove {OUTPUT} from lora.targets.")
    shape = AdapterShape(rank=cfg.rank, alpha=cfg.alpha, rslora=cfg.rslora, dora=cfg.dora, dropout=cfg.dropout)
    for name in names:
        if is_parameter_to_peft(model, name):
            _check_suits_parameter(name, shape, cfg.init, is_stack=is_projection_of_experts(model, name))
    if SCORE in names:
        raise ValueError(f"lora.targets has {SCORE}, which is trained whole. Remove it from lora.targets.")
    if model.source.new_ids and (taken := {EMBEDDING, OUTPUT}.intersection(names)):
        raise ValueError(
            f"lora.targets has {min(taken)}, but model.new_tokens trains rows of it. Remove it from lora.targets."
        )
    model.requires_grad_(False)
    dtype = weight.dtype if cfg.dtype == "model" else torch.float32
    if model.score is not None:
        for name, parameter in [*model.score.named_parameters()]:
            model.score.register_parameter(name, nn.Parameter(parameter.detach().to(dtype)))
    for name in names:
        layer = put_adapter(model, name, shape, dtype)
        if cfg.init == "pissa":
            layer.start_at_largest_singular_directions()
        else:
            layer.start_at_zero()
    if model.source.new_ids:
        put_rows(model, model.source.new_ids, dtype)
    return len(names)


def _check_suits_parameter(name: str, shape: AdapterShape, init: str, is_stack: bool) -> None:
    """Raise ValueError for an adapter that PEFT's `target_parameters` does not support."""
    unsupported = {
        "lora.dora": shape.dora,
        f"lora.dropout={shape.dropout:g}": is_stack and shape.dropout > 0,
        f"lora.init={init}": is_stack and init != "zero",
    }
    if wrong := [setting for setting, is_set in unsupported.items() if is_set]:
        what = "a stack of experts" if is_stack else "a parameter to PEFT"
        raise ValueError(
            f"{name} is {what}, for which PEFT's format has only plain LoRA: {', '.join(wrong)} is not supported. "
            "Leave it out, or set other lora.targets, such as [q_proj,k_proj,v_proj,o_proj]."
        )


def put_adapter(model: Decoder, name: str, shape: AdapterShape, dtype: torch.dtype) -> AdaptedLayer:
    """Replace the layer `name`, or projection of experts, by one with an uninitialized adapter, and return it."""
    if is_projection_of_experts(model, name):
        return put_experts_adapter(model, name, shape, dtype)
    base = model.get_submodule(name)
    of_matrix = LoRAEmbedding if isinstance(base, nn.Embedding) else LoRALinear
    layer = (LoRAOutput if name == OUTPUT else of_matrix)(base, shape, dtype)
    model.set_submodule(name, layer)
    return layer


def take_adapters_off(model: nn.Module) -> None:
    """Replace every adapted layer by its frozen layer."""
    wrappers = {name: module for name, module in model.named_modules() if hasattr(module, "base_layer")}
    for name, wrapper in wrappers.items():
        if name.rpartition(".")[0] not in wrappers:  # the adapters of experts go with their wrapper
            model.set_submodule(name, wrapper.base_layer)  # pyright: ignore[reportArgumentType]


def has_adapter(model: nn.Module) -> bool:
    """Whether any layer of the model has an adapter or trained rows."""
    return any(hasattr(module, "base_layer") for module in model.modules())


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """Context manager in which the model computes without its adapter, bitwise as with an adapter of zeros.

    Raises ValueError for a model without an adapter.
    """
    layers: list[AdaptedLayer | TrainedRows] = [*adapted_layers(model).values(), *trained_rows(model).values()]
    if not layers:
        raise ValueError("the model has no adapter to turn off.")
    for layer in layers:
        layer.is_on = False
    try:
        yield
    finally:
        for layer in layers:
            layer.is_on = True


def lr_ratios(cfg: LoRAConfig | None) -> dict[str, float]:
    """LoRA+ (Hayou et al. 2024, https://arxiv.org/abs/2402.12354): `lr_ratios` for `build_optimizer`."""
    return {} if cfg is None or cfg.lr_ratio == 1.0 else {"lora_B": cfg.lr_ratio}


def quantize_as_loaded(kind: FrozenKind) -> Quantize | None:
    """`quantize` of `load_model` for a value of `lora.quantize`: quantizes linear layers and experts; None for `none`.

    The embedding, the output layer and the vision tower are not quantized. Raises ValueError for another kind, if
    bitsandbytes
    cannot be used (on a GPU: at the first module), or if the model's folder or sizes do not suit `kind`.
    """
    if kind not in get_args(FrozenKind):
        raise ValueError(f"kind is {kind!r}; expected one of {', '.join(get_args(FrozenKind))}.")
    if kind == "none":
        return None
    if kind == "nf4":
        check_available(on_gpu=False)

    def quantize_module(model: Decoder, name: str) -> None:
        if kind == "as_stored" and not model.source.quantization:
            raise ValueError(
                "lora.quantize=as_stored keeps the quantized weights of a folder, and quantization_config of this "
                "model's config.json is absent. Set lora.quantize=nf4, float8 or none."
            )
        module = model.get_submodule(name)
        if isinstance(module, Experts):
            for projection in PROJECTIONS:
                if (frozen := _frozen(model, f"{name}.{projection}", getattr(module, projection), kind)) is not None:
                    delattr(module, projection)
                    setattr(module, projection, frozen)
        elif type(module) is not nn.Linear or name in (OUTPUT, SCORE) or name.startswith(TOWER):
            return
        elif (frozen := _frozen(model, f"{name}.weight", module.weight, kind)) is not None:
            model.set_submodule(name, FrozenLinear(frozen, module.bias))

    return quantize_module


def _frozen(model: Decoder, name: str, weight: Tensor, kind: FrozenKind) -> FrozenParameter | None:
    """The weight on the meta device in fewer bits; None if it stays dense."""
    keeps_form = kind != "nf4" or model.source.quantization.get("quant_method") == "mxfp4"  # which has 4 bits too
    if keeps_form and (frozen := as_in_folder(model.source, name, weight)) is not None:
        return frozen
    to_form = {"nf4": to_nf4, "float8": to_float8}.get(kind)
    return None if to_form is None else FrozenParameter(to_form(weight.detach()), to_form)
