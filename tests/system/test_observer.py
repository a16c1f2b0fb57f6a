"""Runs and optimizers tell observers what they do, so product code replaces no method of another object."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lean_ft
from lean_ft.optim import Optimizer
from lean_ft.optim.sgd import SGD
from lean_ft.system.observer import Observer
from lean_ft.system.world import World, inside

PACKAGE = Path(lean_ft.__file__).parent
ALWAYS_METHODS = {"forward", "backward", "__call__"}
MAKES_FUNCTIONS = {"partial", "MethodType", "staticmethod", "classmethod"}
# A technique changes the forward pass of the model that it gets: that is the purpose of its module.
TECHNIQUES = {
    *("memory/checkpointing.py", "memory/offload.py", "memory/tied_gradient.py", "memory/tiling.py"),
    *("parallel/experts.py", "parallel/tensor.py", "parallel/vocabulary.py"),
    *("models/few_rows.py", "generation/compiled_layers.py"),
}
ALLOWED = {
    "memory/streamed_experts.py: module.stacks",  # a technique, too
    # Attributes that are declared to hold a function.
    "memory/frozen_embeddings.py: model.tied_output_weight",
    "memory/tied_gradient.py: model.tied_output_weight",
    "models/hf_format.py: source.form_in_folder",
    # Parameters and modules by their names.
    "parallel/tensor.py: setattr(owner, name)",
    "peft/experts.py: setattr(experts, projection)",
    "peft/lora.py: setattr(module, projection)",
    "peft/published.py: setattr(module, name)",
    "quantize/float8.py: setattr(owner, name)",
    "quantize/torchao_kinds.py: setattr(model.get_submodule(place), own)",
    # Other values: fields of records, a number with the name of a function, a mark of the compiler, a recipe's
    # settings.
    "online/episodes.py: vars(episode).update",
    "plan/memory.py: known.num_bytes",
    "plan/fusion.py: vars(call)['_boxed_call']",
    "system/catalog.py: vars(module)['Config']",
    # Other libraries, which ask nobody: a harness that runs git, a user's function that would end the process, and the
    # picture of a figure in notebooks.
    "generation/tasks.py: harness.get_git_commit_hash",
    "system/user_functions.py: os._exit",
    "training/curves.py: figure._repr_png_",
}


def test_product_code_replaces_no_method_of_another_object() -> None:
    """PyTorch's functions are replaced in torch_private.py alone. Elsewhere, let the object call an `Observer`."""
    found = {
        f"{file}: {place}"
        for path in PACKAGE.rglob("*.py")
        if (file := path.relative_to(PACKAGE).as_posix()) != "torch_private.py"
        for place in replaced_methods(ast.parse(path.read_text()))
        if not (file in TECHNIQUES and place.endswith(("forward", "'forward')")))
    }
    assert found == ALLOWED


@pytest.mark.parametrize(
    ("code", "place"),
    [
        ("run.steps, run.log = 3, lambda: None", "run.log"),
        ("def note(): ...\noptimizer.scale = note", "optimizer.scale"),
        ("norm.forward, norm.backward = map(staticmethod, before)", "norm.backward norm.forward"),
        ("rounds.take = partial(take, 3)", "rounds.take"),
        ("rounds.take = other.take_all\nclass Other:\n  def take_all(self): ...", "rounds.take"),
        ("setattr(rounds, 'take', lambda: 1)", "setattr(rounds, 'take')"),
        ("for name, work in all.items(): setattr(rounds, name, work)", "setattr(rounds, name)"),
        ("vars(rounds).update({'take': 1})", "vars(rounds).update"),
        ("rounds.__dict__['take'] = 1", "rounds.__dict__['take']"),
        ("from unittest.mock import patch", "unittest.mock"),
        ("self.take = partial(take, 3)\nrun.step = 3\nsetattr(self, name, 3)\nsetattr(run, 'step', 3)", ""),
    ],
)
def test_the_search_finds_replaced_methods(code: str, place: str) -> None:
    assert " ".join(sorted(replaced_methods(ast.parse(code)))) == place


def replaced_methods(tree: ast.Module) -> Iterator[str]:
    """Places that replace a method of an object other than `self`, or may do so."""
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}

    def is_function(value: ast.expr) -> bool:
        match value:
            case ast.Lambda():
                return True
            case ast.Call():
                return ast.unparse(value.func).rpartition(".")[2] in MAKES_FUNCTIONS
            case ast.Name() | ast.Attribute():
                return ast.unparse(value).rpartition(".")[2] in functions
        return False

    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module="unittest.mock") | ast.Import(names=[ast.alias(name="unittest.mock")]):
                yield "unittest.mock"
            case ast.Assign():
                for target, value in (pair for whole in node.targets for pair in pairs(whole, node.value)):
                    match target:
                        case ast.Attribute(attr=name) if not is_own(target.value):
                            if name in ALWAYS_METHODS or is_function(value):
                                yield ast.unparse(target)
                        case ast.Subscript() if is_namespace(target.value):
                            yield ast.unparse(target)
            case ast.Call(func=ast.Name(id="setattr"), args=[of, name, value]) if not is_own(of):
                is_known = isinstance(name, ast.Constant) and name.value not in ALWAYS_METHODS
                if not is_known or is_function(value):
                    yield f"setattr({ast.unparse(of)}, {ast.unparse(name)})"
            case ast.Call(func=ast.Attribute(value=of, attr="update")) if is_namespace(of):
                yield ast.unparse(node.func)


def pairs(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    """Each target of an assignment with its value."""
    if not isinstance(target, ast.Tuple):
        return [(target, value)]
    values = value.elts if isinstance(value, ast.Tuple) else [value] * len(target.elts)
    return [pair for one, its in zip(target.elts, values, strict=False) for pair in pairs(one, its)]


def is_own(of: ast.expr) -> bool:
    return isinstance(of, ast.Name) and of.id in ("self", "cls")


def is_namespace(value: ast.expr) -> bool:
    """Whether an expression is the namespace of an object other than `self`."""
    match value:
        case ast.Call(func=ast.Name(id="vars"), args=[of]):
            return not is_own(of)
        case ast.Attribute(value=of, attr="__dict__"):
            return not is_own(of)
    return False


@pytest.mark.parametrize("in_backward", [False, True])
def test_an_optimizer_calls_its_observer_once_per_pass_and_update(in_backward: bool) -> None:
    class Told(Observer):
        def __init__(self) -> None:
            self.calls: list[str] = []

        def begin_optimizer(self, optimizer: Optimizer) -> None:
            for state in optimizer.states:  # before the optimizer's own hook, which frees the gradient
                state.whole.register_post_accumulate_grad_hook(self.note)

        def note(self, parameter: Tensor) -> None:
            assert parameter.grad is not None
            self.calls.append("gradient")

        def begin_backward(self) -> None:
            self.calls.append("backward")

        def update(self, optimizer, states) -> None:
            self.calls.append("update")
            super().update(optimizer, states)

    told, world, weight = Told(), World(), nn.Parameter(torch.ones(2))
    rule = SGD(momentum=0.0, weight_decay=0.0, stochastic_rounding=False, compile=False)
    world.observer = told
    with inside(world):
        optimizer = Optimizer([("weight", weight)], rule, in_backward=in_backward)
    assert not told.calls
    optimizer.set_lr(0.5)
    for is_last in (False, True):
        optimizer.scale(weight.sum(), last=is_last).backward()
    optimizer.finish_gradients()
    optimizer.step()
    assert told.calls == ["backward", "gradient", "backward", "gradient", "update"]
    assert weight.tolist() == [0.0, 0.0], "the update was made: 1 - 0.5 * 2"
