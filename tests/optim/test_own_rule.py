"""The rules of docs/own_optimizers.md equal the formula, also in backward and after loading, and mistakes are named."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lean_ft.settings import OptimizerConfig
from lean_ft.system.user_functions import content_digest
from lean_ft.training.records import CONTENT_OF_RULE, settings_of
from tests.optim.tiny_training import Config, ModelConfig, TinyModel, build, make_batches, same_weights, train

PAGE = Path(__file__).parents[2] / "docs" / "own_optimizers.md"
BETAS = (0.9, 0.99)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files of the page."""
    for name, source in re.findall(r"```python\n# (\S+)\n(.*?)```", PAGE.read_text(), re.DOTALL):
        (tmp_path / name).write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def lion_of(file: Path, name: str = "Lion", **settings: Any) -> dict[str, Any]:
    return {"name": f"{file}:{name}", "betas": BETAS, "weight_decay": 0.5, **settings}


def test_the_example_equals_the_formula(folder: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(40, 30)
    expected = {name: param.detach().double() for name, param in model.named_parameters()}
    momentum = {name: torch.zeros_like(weight) for name, weight in expected.items()}
    optimizer = build(model, lion_of(folder / "my_lion.py"))
    optimizer.set_lr(0.01)
    for _ in range(3):
        for name, param in model.named_parameters():
            param.grad = torch.randn_like(param)
            grad, decay = param.grad.double(), 0.5 if name == "weight" else 0.0
            sign = (0.9 * momentum[name] + 0.1 * grad).sign()
            expected[name] -= 0.01 * (sign + decay * expected[name])
            momentum[name] = 0.99 * momentum[name] + 0.01 * grad
        optimizer.step()
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.double(), expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("file", "name"), [("my_lion.py", "Lion"), ("my_lion_8bit.py", "lion_8bit")])
def test_steps_in_backward_and_after_loading_are_bitwise_the_same(folder: Path, file: str, name: str) -> None:
    settings, batches, lrs = lion_of(folder / file, name), make_batches(4, 2), [1e-3] * 4
    plain, early, later = TinyModel(), TinyModel(), TinyModel()
    optimizer = build(plain, settings)
    train(plain, optimizer, batches[:2], lrs[:2])
    later.load_state_dict(plain.state_dict())
    resumed = build(later, settings)
    resumed.load_state_dict({name: tensor.clone() for name, tensor in optimizer.state_dict().items()})
    train(plain, optimizer, batches[2:], lrs[2:])
    train(later, resumed, batches[2:], lrs[2:])
    train(early, build(early, {**settings, "in_backward": True}), batches, lrs)
    assert same_weights(plain, later) and same_weights(plain, early)


def test_the_8_bit_state_is_close_and_half_as_large(folder: Path) -> None:
    models = [TinyModel(), TinyModel()]
    rules = lion_of(folder / "my_lion.py"), lion_of(folder / "my_lion_8bit.py", "lion_8bit")
    optimizers = [build(model, rule) for model, rule in zip(models, rules, strict=True)]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, make_batches(3), [1e-3] * 3)
    plain, coded = (optimizer.state_dict()["embed.weight.momentum"] for optimizer in optimizers)
    assert coded.dtype == torch.uint8 and plain.dtype == torch.bfloat16
    assert optimizers[1].state_bytes < 0.55 * optimizers[0].state_bytes
    moved = [param.detach() for param in models[0].parameters()], [param.detach() for param in models[1].parameters()]
    same = sum(int((a == b).sum()) for a, b in zip(*moved, strict=True))
    assert same > 0.9 * sum(a.numel() for a in moved[0])


RULES = """
import torch
from lean_ft.optim import Rule
class Empty(Rule):
    pass
class Tuned(Rule):
    def __init__(self, *, betta):
        pass
class Dotted(Rule):
    updated_together = None
    def init_state(self, param):
        return {"a.b": torch.zeros_like(param)}
    def update(self, states, step):
        pass
class Short(Dotted):
    updated_together = 4
    def init_state(self, param):
        return {"a": torch.zeros(3, device=param.device)}
class Elsewhere(Dotted):
    def init_state(self, param):
        return {"a": torch.zeros(param.shape)}
class Adam(torch.optim.Adam):
    pass
def seven():
    return 7
def none():
    return lambda param: None
"""


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("Empty", {}, r"Empty has no method init_state. docs/own_optimizers.md"),
        ("Tuned", {}, r"has a parameter betta, which no setting has.*Did you mean 'betas'\?"),
        ("Dotted", {}, r"names a tensor 'a.b'. Use a name without a dot"),
        ("Dotted", {"weight_decay": 0.1}, r"optimizer.weight_decay=0.1 would have no effect.*weight_decay=0.0"),
        ("Dotted", {"betas": (0.5, 0.6)}, r"optimizer.betas=\(0.5, 0.6\) would have no effect.*betas=\[0.9, 0.999\]"),
        ("Dotted", {"momentum": 0.5}, r"optimizer.momentum=0.5 would have no effect.*momentum=null"),
        ("Short", {}, r"made a of shape \[3\] for embed.weight.*updated_together=4"),
        ("Elsewhere", {}, r"put a on cpu, and not on the parameter's device"),
        ("Adam", {}, r"is an optimizer of torch.*subclass of lean_ft.optim.Rule"),
        ("seven", {}, r"returned a int; expected a lean_ft.optim.Rule"),
        ("none", {}, r"returned a NoneType; expected a lean_ft.optim.Rule"),
        ("Dotted", {"state": "paged"}, r"state=paged works only with bitsandbytes' kernel"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, name: str, settings: dict[str, Any], message: str) -> None:
    file = tmp_path / "rules.py"
    file.write_text(RULES)
    with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
        build(TinyModel(), {"name": f"{file}:{name}", **settings})


def test_the_code_is_among_the_settings_that_a_resumed_run_compares(folder: Path) -> None:
    file = folder / "my_lion.py"

    def recorded() -> Any:
        optimizer = OptimizerConfig(name=f"{file}:Lion")
        return settings_of(Config(model=ModelConfig(path="unused"), optimizer=optimizer))[CONTENT_OF_RULE]

    before = recorded()
    assert before == f"hash {content_digest(f'{file}:Lion')}"
    file.write_text(file.read_text().replace("sign_()", "sign()"))
    assert recorded() != before
