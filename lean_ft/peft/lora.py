"""Adapters on a model: put there, found again, and their learning rates.

A technique of one call: `apply_lora(model, cfg.lora)` freezes the model and puts an adapter beside each layer that the
settings name. Everything after it sees a model whose few trained parameters are the adapter's.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from lean_ft.models import Decoder, load_model
from lean_ft.models.hf_format import AfterModule, new_token_ids
from lean_ft.models.moe import Experts
from lean_ft.peft.cut_loading import UnreadBesideAdapter
from lean_ft.peft.experts import ExpertsAdapter, LoRAExperts
from lean_ft.peft.layers import AdaptedLayer, AdapterShape, LoRAEmbedding, LoRALinear, LoRAOutput
from lean_ft.peft.new_rows import EMBEDDING, TrainedRows, put_rows
from lean_ft.peft.targets import find_targets, is_parameter_to_peft, is_projection_of_experts
from lean_ft.quantize.nf4 import NF4Linear, check_available
from lean_ft.settings import LoRAConfig, ModelConfig
from lean_ft.system.shards import ALONE, Ranks

_OUTPUT = "lm_head"
SCORE = "score"


def load_with_adapter(
    model_cfg: ModelConfig,
    lora: LoRAConfig | None,
    device: str | torch.device = "cpu",
    ranks: Ranks = ALONE,
    scores: bool = False,
) -> Decoder:
    """Returns the model of the settings with an adapter beside its frozen layers; without `lora` the model as it is.

    One that is going to be cut over many `ranks` is of shapes alone until then (`cut_loading`). Quantised layers replace
    the others while it loads, so that it never stands in memory whole. What is frozen needs no float32 copy: with
    `model.dtype=float16` it is in that type. `scores` makes it a reward model, as `load_model` does, whose output layer
    trains beside an adapter. Raises as `load_model` and `apply_lora` do.
    """
    if lora is None:
        return load_model(model_cfg, device if ranks.size == 1 else "meta", scores=scores)
    model = load_model(
        model_cfg.path,
        device if ranks.size == 1 else "meta",
        dtype=getattr(torch, model_cfg.dtype),
        random_init=model_cfg.random_init,
        router_aux_loss_coef=model_cfg.router_aux_loss_coef,
        after_module=quantize_as_loaded(lora),
        scores=scores,
        new_ids=new_token_ids(model_cfg),
    )
    apply_lora(model, lora)
    if model.source.unread is not None:
        model.source.unread = UnreadBesideAdapter(model.source.unread.fill)
    return model


def apply_lora(model: Decoder, cfg: LoRAConfig) -> int:
    """Freezes the model, puts an adapter on each layer that `cfg.targets` matches, and returns how many those are. Rows of
    tokens that are new to the model train beside it, or alone where there are no targets.

    Raises ValueError where a target matches nothing or takes no adapter, or settings contradict the model.
    """
    if has_adapter(model):
        raise ValueError("the model has an adapter already; load it anew to give it another.")
    if not cfg.targets and not model.source.new_ids:
        raise ValueError(
            "lora.targets=[] trains the rows of model.new_tokens alone, and there are none. Name tokens there, or layers, as "
            "[all-linear]."
        )
    weight = model.output_weight
    if cfg.dtype == "model" and weight.dtype == torch.float16:
        raise ValueError(
            "lora.dtype=model would train float16 weights, in which small updates vanish. Set lora.dtype=float32."
        )
    names = find_targets(model, cfg.targets)
    if model.config.head_bias and (_OUTPUT in names or model.source.new_ids):
        asked = "model.new_tokens" if model.source.new_ids else f"{_OUTPUT} in lora.targets"
        raise ValueError(
            f"{asked}: this model's output layer has a bias, beside which no adapter is supported. Leave it out."
        )
    if _OUTPUT in names and cfg.dropout:
        raise ValueError(
            f"lora.dropout={cfg.dropout:g} drops inputs of the adapter, and that of {_OUTPUT} is added to the weight, "
            f"which has none. Set lora.dropout=0, or take {_OUTPUT} from lora.targets."
        )
    shape = AdapterShape(rank=cfg.rank, alpha=cfg.alpha, rslora=cfg.rslora, dora=cfg.dora, dropout=cfg.dropout)
    for name in names:
        if is_parameter_to_peft(model, name):
            _check_suits_parameter(name, shape, cfg.init, is_stack=is_projection_of_experts(model, name))
    if SCORE in names:
        raise ValueError(f"lora.targets: {SCORE} is one row and trains whole beside an adapter. Leave it out.")
    if model.source.new_ids and (taken := {EMBEDDING, _OUTPUT}.intersection(names)):
        raise ValueError(
            f"lora.targets has {min(taken)}, of which the rows of model.new_tokens train. Take it from lora.targets."
        )
    model.requires_grad_(False)
    dtype = weight.dtype if cfg.dtype == "model" else torch.float32
    if model.score is not None:
        model.score.weight = nn.Parameter(model.score.weight.detach().to(dtype))
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
    """Raises ValueError for an adapter that PEFT does not have for what it adapts as a parameter."""
    asked = {
        "lora.dora": shape.dora,
        f"lora.dropout={shape.dropout:g}": is_stack and shape.dropout > 0,
        f"lora.init={init}": is_stack and init != "zero",
    }
    if wrong := [setting for setting, is_set in asked.items() if is_set]:
        what = "is a stack of experts, whose adapters are" if is_stack else "is to PEFT a parameter, whose adapter is"
        raise ValueError(
            f"{name} {what} plain LoRA there, so that nothing could read another: {', '.join(wrong)} cannot be "
            "honoured. Leave it out, or name other layers in lora.targets, as [q_proj,k_proj,v_proj,o_proj]."
        )


def put_adapter(model: Decoder, name: str, shape: AdapterShape, dtype: torch.dtype) -> AdaptedLayer:
    """Replaces the layer `name` of the model by one with an adapter, whose values are not set, and returns it.

    A projection of a mixture's experts counts as a layer of its own.
    """
    if is_projection_of_experts(model, name):
        return _put_experts_adapter(model, name, shape, dtype)
    base = model.get_submodule(name)
    of_matrix = LoRAEmbedding if isinstance(base, nn.Embedding) else LoRALinear
    layer = (LoRAOutput if name == _OUTPUT else of_matrix)(base, shape, dtype)
    model.set_submodule(name, layer)
    return layer


def _put_experts_adapter(model: Decoder, name: str, shape: AdapterShape, dtype: torch.dtype) -> AdaptedLayer:
    place, _, projection = name.rpartition(".")
    experts = model.get_submodule(place)
    if isinstance(experts, Experts):
        experts = LoRAExperts(experts)
        model.set_submodule(place, experts)
    assert isinstance(experts, LoRAExperts)
    layer = ExpertsAdapter(experts.base_layer, projection, shape, dtype)
    setattr(experts, projection, layer)
    return layer


def take_adapters_off(model: nn.Module) -> None:
    """Puts every adapted layer's frozen one back in its place."""
    for name, module in list(model.named_modules()):
        if isinstance(module, LoRAExperts) or (
            isinstance(module, AdaptedLayer | TrainedRows) and not isinstance(module, ExpertsAdapter)
        ):
            model.set_submodule(name, module.base_layer)


def has_adapter(model: nn.Module) -> bool:
    """Whether layers of the model have an adapter, or rows that train alone."""
    return any(isinstance(module, AdaptedLayer | TrainedRows) for module in model.modules())


def adapted_layers(model: nn.Module) -> dict[str, AdaptedLayer]:
    """The layers with an adapter by name; none for a model without."""
    return {name: module for name, module in model.named_modules() if isinstance(module, AdaptedLayer)}


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """Inside, the model computes what it would without its adapter, bit for bit what it does while that is zero. Raises
    ValueError for a model without one."""
    layers = [module for module in model.modules() if isinstance(module, AdaptedLayer | TrainedRows)]
    if not layers:
        raise ValueError("the model has no adapter that could be off.")
    for layer in layers:
        layer.is_on = False
    try:
        yield
    finally:
        for layer in layers:
            layer.is_on = True


def lr_ratios(cfg: LoRAConfig | None) -> dict[str, float]:
    """LoRA+ for `build_optimizer`: ends of parameter names, with what their learning rate is multiplied by.

    Source: Hayou et al. 2024, https://arxiv.org/abs/2402.12354.
    """
    return {} if cfg is None or cfg.lr_ratio == 1.0 else {".lora_B": cfg.lr_ratio}


def quantize_as_loaded(cfg: LoRAConfig) -> AfterModule | None:
    """For `load_model` to call after each module: replaces a linear one by its quantised self; None quantises none.

    The output layer, a reward model's too, and the embedding stay as they are. Raises ValueError where bitsandbytes cannot be used (on a GPU: at
    the first module), and for a mixture of experts, whose stacks of matrices are not quantised.
    """
    if cfg.quantize == "none":
        return None
    check_available(on_gpu=False)

    def quantize(model: Decoder, name: str) -> None:
        module = model.get_submodule(name)
        if isinstance(module, Experts):
            raise ValueError(
                "lora.quantize=nf4: the experts of this model are stacks of matrices, which are not quantised, and they "
                "are most of it. Set lora.quantize=none."
            )
        if isinstance(module, nn.Linear) and name not in (_OUTPUT, SCORE):
            check_available(on_gpu=module.weight.is_cuda)
            model.set_submodule(name, NF4Linear(module))

    return quantize
