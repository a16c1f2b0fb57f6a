"""A user's update rule, `optimizer.name=my_opt.py:Lion`: a subclass of `Rule`, or a function that returns rules.

Its parameters name the settings that it uses. A setting of the optimizer that it has no parameter for is refused,
because it would have no effect.
"""

import inspect
import json
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from lean_ft.optim.rule import Rule
from lean_ft.settings import OptimizerConfig
from lean_ft.system.shards import part_of, whole_shape
from lean_ft.system.spelling import did_you_mean

# Settings of the optimizer that a rule may use, by the values with which it may ignore them.
SETTINGS: Mapping[str, object] = {
    "betas": OptimizerConfig.model_fields["betas"].default,
    "eps": OptimizerConfig.model_fields["eps"].default,
    "momentum": None,
    "weight_decay": 0.0,
    "update_clipping": False,
    "stochastic_rounding": False,
}
ANY_KIND = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
PAGE = "docs/own_optimizers.md has an example."


def own_rule(cfg: OptimizerConfig, model: nn.Module, *, compile: bool) -> Rule | Callable[[nn.Parameter], Rule]:
    """The rule that `cfg.name` makes of its settings, or its function that returns the rule of a parameter.

    Raises ValueError for settings that it does not use, for parameters without a setting, for anything but a rule, and
    for a state of the model's trained parameters that cannot be saved, streamed or cut.
    """
    rule = _made(cfg, compile)
    for name, param in model.named_parameters():
        if param.requires_grad:
            _check_state(name, param, rule if isinstance(rule, Rule) else rule(param), f"optimizer.name={cfg.name}")
    return rule


def _made(cfg: OptimizerConfig, compile: bool) -> Rule | Callable[[nn.Parameter], Rule]:
    setting, make = f"optimizer.name={cfg.name}", cfg.rule
    if isinstance(make, type) and issubclass(make, torch.optim.Optimizer):
        raise ValueError(
            f"{setting} is an optimizer of torch, which needs all gradients at once. Write its update as a subclass of "
            f"lean_ft.optim.Rule. {PAGE}"
        )
    values = {name: getattr(cfg, name) for name in SETTINGS} | {"compile": compile}
    parameters = inspect.signature(make).parameters
    named = [name for name, parameter in parameters.items() if parameter.kind not in ANY_KIND]
    unknown = [name for name in named if name not in values and parameters[name].default is inspect.Parameter.empty]
    if unknown:
        raise ValueError(
            f"{setting} has a parameter {unknown[0]}, which no setting has. Parameters may be {', '.join(values)}. "
            f"Give others a default.{did_you_mean(unknown[0], values)}"
        )
    for name, ignorable in SETTINGS.items():
        if name not in named and values[name] != ignorable:
            raise ValueError(
                f"optimizer.{name}={values[name]} would have no effect: {setting} has no parameter {name}. Add the "
                f"parameter to your rule, or set optimizer.{name}={_as_typed(ignorable)}."
            )
    return _checked(make(**{name: values[name] for name in named if name in values}), setting)


def _checked(made: object, setting: str) -> Rule | Callable[[nn.Parameter], Rule]:
    if isinstance(made, Rule):
        for method in ("init_state", "update"):
            if getattr(type(made), method) is getattr(Rule, method):
                raise ValueError(f"{setting}: {type(made).__name__} has no method {method}. {PAGE}")
        return made
    if callable(made):
        return lambda param: _rule_of(made(param), setting)
    raise ValueError(
        f"{setting} returned a {type(made).__name__}; expected a lean_ft.optim.Rule, or a function that returns the "
        f"Rule of a parameter. {PAGE}"
    )


def _rule_of(made: object, setting: str) -> Rule:
    checked = _checked(made, setting)
    if not isinstance(checked, Rule):
        raise ValueError(f"{setting}: the function of a parameter returned a {type(made).__name__}; expected a Rule.")
    return checked


def _check_state(name: str, param: nn.Parameter, rule: Rule, setting: str) -> None:
    meta = torch.empty(whole_shape(param), dtype=param.dtype, device="meta")
    state, owner = rule.init_state(meta), f"{setting}: init_state of {type(rule).__name__}"
    if not isinstance(state, dict) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise ValueError(f"{owner} returned {state!r:.80}; expected a dictionary of tensors by name.")
    for key, tensor in state.items():
        if not isinstance(key, str) or not key or "." in key:
            raise ValueError(f"{owner} names a tensor {key!r}. Use a name without a dot.")
        if tensor.device.type != "meta":
            raise ValueError(
                f"{owner} put {key} on {tensor.device}, and not on the parameter's device. Make it by torch.zeros_like "
                "(param), or with device=param.device."
            )
        block = rule.updated_together
        entries = [(math.prod(meta.shape),), (-(-meta.numel() // block),)] if block else []
        if block and tensor.shape != meta.shape and tuple(tensor.shape) not in entries:
            raise ValueError(
                f"{owner} made {key} of shape {list(tensor.shape)} for {name} of shape {list(meta.shape)}. With "
                f"updated_together={block}, a tensor has an entry per element, or a vector an entry per {block} "
                "elements. Remove updated_together if the whole parameter is updated at once."
            )
        run = part_of(param).run
        if run is not None and (not tensor.numel() or meta.numel() % tensor.numel() or run % _span(meta, tensor)):
            raise ValueError(
                f"{owner} made {key} of shape {list(tensor.shape)} for {name} of shape {list(meta.shape)}, which "
                f"parallel.tensor splits every {run} columns. Set parallel.tensor=1, or keep an entry per element."
            )


def _span(param: Tensor, tensor: Tensor) -> int:
    """Elements of the parameter per entry of the state."""
    return param.numel() // tensor.numel()


def _as_typed(value: object) -> str:
    """The value as it is typed in a command."""
    return json.dumps(value)
