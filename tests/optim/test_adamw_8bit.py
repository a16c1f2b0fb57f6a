"""8-bit AdamW against bitsandbytes' own, against AdamW in float64, and compiled against plain."""

import shutil
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lean_ft.optim import Optimizer
from lean_ft.optim.adamw_8bit import AdamW8bit
from lean_ft.optim.dynamic_code import code_values
from lean_ft.optim.rule import ParameterState, StepInfo
from tests.optim.tiny_training import build, train_both

LR = 1e-2


class Quadratic:
    """Noisy gradients of a quadratic whose curvatures span a factor of 100 within a block."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        torch.manual_seed(0)
        self.start, self.target = torch.randn(shape), 2 * torch.randn(shape)
        self.curvature = 10 ** (2 * torch.rand(shape) - 1)
        self.noise = torch.Generator().manual_seed(3)

    def grad(self, weight: Tensor) -> Tensor:
        noise = torch.randn(weight.shape, generator=self.noise)
        return self.curvature * (weight.detach().float() - self.target + 0.3 * noise)


def optimizer_of(param: nn.Parameter, **settings: Any) -> Optimizer:
    optimizer = build(nn.ParameterList([param]), {"name": "adamw_8bit", "weight_decay": 0.1, **settings})
    optimizer.set_lr(LR)
    return optimizer


def trained(shape: tuple[int, ...], steps: int) -> nn.Parameter:
    problem = Quadratic(shape)
    param = nn.Parameter(problem.start)
    optimizer = optimizer_of(param)
    for _ in range(steps):
        param.grad = problem.grad(param)
        optimizer.step()
    return param


def trained_in_float64(shape: tuple[int, ...], steps: int, decay: float = 0.1) -> Tensor:
    problem = Quadratic(shape)
    param = nn.Parameter(problem.start.double())
    optimizer = torch.optim.AdamW([param], lr=LR, weight_decay=decay)
    for _ in range(steps):
        param.grad = problem.grad(param).double()
        optimizer.step()
    return param.detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 128), (50, 101)], ids=["whole blocks", "ragged"])
def test_follows_bitsandbytes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """With gradients of one magnitude: for others, bitsandbytes on a CPU does not round to the nearest code."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    ours, theirs, tensors, state = train_both(
        torch.randn(shape).to(dtype),
        {"name": "adamw_8bit", "weight_decay": 0.1},
        lambda params: bitsandbytes.optim.AdamW8bit(params, lr=LR, weight_decay=0.1),
        [(torch.rand(shape).to(dtype) + 0.5) * (torch.randint(0, 2, shape) * 2 - 1) for _ in range(5)],
    )
    torch.testing.assert_close(ours, theirs, rtol=2**-7 if dtype == torch.bfloat16 else 1e-3, atol=1e-3)
    assert (ours - theirs).float().abs().mean() < 1e-2 * LR
    for name, key in (("exp_avg", "1"), ("exp_avg_sq", "2")):
        assert (tensors[name] == state[f"state{key}"]).float().mean() > 0.97
        torch.testing.assert_close(tensors[f"{name}_absmax"], state[f"absmax{key}"], rtol=5e-2, atol=1e-6)


def test_stays_near_adamw_in_float64() -> None:
    """Measured error: 1.6% of the distance moved after 2 steps, 5.6% after 120 (bitsandbytes on a CPU: 5.9%, 7.5%)."""
    start = Quadratic((96, 300)).start.double()
    for steps, bound in ((2, 0.03), (20, 0.07), (120, 0.08)):
        exact = trained_in_float64((96, 300), steps)
        ours = trained((96, 300), steps).detach().double()
        assert (ours - exact).norm() < bound * (exact - start).norm()


def test_no_update_explodes_where_a_second_moment_is_tiny_beside_its_block() -> None:
    """If it were rounded to zero, the first moment would be divided by eps alone."""
    param = nn.Parameter(torch.zeros(64, 256))
    optimizer = optimizer_of(param, weight_decay=0.0)
    grad = torch.full((64, 256), 3e-4)
    grad[:, 0] = 1.0  # squared, 1e7 times the others
    for factor in (1.0, 0.01):
        before = param.detach().clone()
        param.grad = factor * grad
        optimizer.step()
        assert (param.detach() - before).abs().max() < 1.1 * LR


def test_small_tensors_keep_float32_moments() -> None:
    ours = trained((4095,), 10)
    expected = trained_in_float64((4095,), 10, decay=0.0)
    torch.testing.assert_close(ours.detach().double(), expected, rtol=1e-4, atol=1e-5)
    for shape, dtype in {(1, 4095): torch.float32, (4096,): torch.float32, (1, 4096): torch.uint8}.items():
        state = optimizer_of(nn.Parameter(torch.zeros(shape))).state_dict()
        assert state["0.exp_avg"].dtype == dtype, shape


def test_update_clipping_divides_the_learning_rate_by_the_rms() -> None:
    torch.manual_seed(0)
    grads = [1e-2 * torch.randn(64, 256), 0.5 * torch.randn(64, 256)]
    steps = {}
    for clipping in (False, True):
        param = nn.Parameter(torch.ones(64, 256))
        optimizer = optimizer_of(param, update_clipping=clipping)
        for grad in grads:
            before = param.detach().clone()
            param.grad = grad
            optimizer.step()
        steps[clipping] = (param.detach() - before).double()
    first, second = (grad.double() for grad in grads)
    v_hat = (0.999 * 0.001 * first**2 + 0.001 * second**2) / (1 - 0.999**2)
    rms = (second**2 / v_hat).mean().sqrt()
    assert rms > 1.2
    torch.testing.assert_close(steps[True], steps[False] / rms, rtol=5e-2, atol=1e-6)


def test_gradients_that_are_not_finite_show_in_the_weights() -> None:
    param = nn.Parameter(torch.ones(64, 128))
    optimizer = optimizer_of(param)
    param.grad = torch.ones_like(param)
    param.grad[3, 5] = float("nan")
    for _ in range(2):
        optimizer.step()
    assert param[3, 5].isnan()


@pytest.mark.long
@pytest.mark.parametrize("name", ["adamw_8bit", "adamw_8bit_torchao"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_compiled_equals_plain_but_for_rounding_and_compiles_once(name: str, backend: str, monkeypatch) -> None:
    """For several sizes, one with an incomplete last block, and a learning rate and step number that change."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("Inductor needs a C++ compiler on a CPU")
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **settings: real(function, backend=backend, **settings))
    torch._dynamo.reset()
    counters.clear()
    weights = []
    for compile in (False, True):
        torch.manual_seed(0)
        shapes = [(96, 256), (700, 256), (77, 131) if name == "adamw_8bit" else (77, 256)]
        model = nn.ParameterList(torch.randn(shape).bfloat16() for shape in shapes)
        optimizer = build(model, {"name": name, "weight_decay": 0.1}, compile=compile)
        generator = torch.Generator().manual_seed(1)
        for step in range(4):
            for param in model:
                param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
            optimizer.set_lr(LR / (step + 1))
            optimizer.step()
        weights.append((model, optimizer.state_dict()))
    (plain, plain_state), (compiled, compiled_state) = weights
    assert counters["stats"]["unique_graphs"] == 1
    for a, b in zip(plain, compiled, strict=True):
        assert (a != b).float().mean() < 1e-3
        torch.testing.assert_close(a, b, rtol=2**-6, atol=1e-3)
    for name, tensor in plain_state.items():
        if tensor.dtype == torch.uint8:
            # Products of bfloat16 gradients are often halfway between two values.
            assert (tensor != compiled_state[name]).float().mean() < 1e-2


def small_parameters(device: str = "cpu") -> nn.ParameterList:
    """Of an adapter in two dtypes, two without whole blocks and one that is large."""
    torch.manual_seed(0)
    shapes = [(16, 256), (96, 64), (65, 64), (5, 1000), (16, 512), (1025, 1024)]
    params = [torch.randn(shape) for shape in shapes] + [torch.randn(64, 64).bfloat16() for _ in range(3)]
    return nn.ParameterList(param.to(device) for param in params)


def steps_of(params: nn.ParameterList, optimizer: Optimizer, number: int) -> dict[str, Tensor]:
    optimizer.set_lr(LR)
    for step in range(number):
        torch.manual_seed(step)
        for param in params:
            param.grad = torch.randn(param.shape).to(param)
        optimizer.step()
    return {**optimizer.state_dict(), **dict(params.named_parameters())}


def assert_equal_states(found: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert found.keys() == right.keys()
    for name, tensor in right.items():
        assert found[name].shape == tensor.shape and torch.equal(found[name], tensor), name


def test_small_parameters_are_updated_together_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, with the update in slices as its kernel: it does not know where a parameter ends either."""
    updated = list[int]()

    def in_slices(
        rule: AdamW8bit, param: Tensor, grad: Tensor, kept: list[Tensor], decay: float, step: StepInfo
    ) -> None:
        state = ParameterState("norm.weight", nn.Parameter(param, requires_grad=False), 0, rule)
        state.whole.grad, state.tensors = grad, dict(enumerate(kept))  # pyright: ignore[reportAttributeAccessIssue]
        updated.append(param.numel())
        rule.update_in_slices(state, step)

    monkeypatch.setattr(AdamW8bit, "_update_by_bitsandbytes", in_slices)
    results, settings = [], {"name": "adamw_8bit", "weight_decay": 0.0}
    for together in (True, False):
        params = small_parameters()
        optimizer = build(params, settings)
        for state in optimizer.states:
            state.device_type = "cuda" if together else "cpu"
        steps_of(params, optimizer, 2)
        saved = {name: tensor.clone() for name, tensor in optimizer.state_dict().items()}
        resumed = build(params, settings)
        for state in resumed.states:
            state.device_type = "cuda" if together else "cpu"
        resumed.load_state_dict(saved)
        results.append(steps_of(params, resumed, 2))
    # Three of whole blocks, two with an incomplete block, the large one, and three in bfloat16.
    assert sorted(updated) == sorted(4 * [4096 + 96 * 64 + 8192, 65 * 64, 5000, 1025 * 1024, 3 * 4096])
    assert_equal_states(*results)


@pytest.mark.gpu
def test_on_a_gpu_small_parameters_take_few_launches_and_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for together in (True, False):
        if not together:
            monkeypatch.setattr("lean_ft.optim.adamw_8bit.JOINT_ELEMENTS", 0)
        params = small_parameters("cuda")
        optimizer = build(params, {"name": "adamw_8bit", "weight_decay": 0.1})
        results.append(steps_of(params, optimizer, 3))
        groups = optimizer.joint_groups(optimizer.states)
        assert sorted(map(len, groups)) == ([1, 1, 1, 3, 3] if together else [1] * 9)
    assert_equal_states(*results)


@pytest.mark.gpu
def test_the_kernel_and_the_slices_agree() -> None:
    """bitsandbytes' kernel on the GPU and the sliced update on the CPU, with gradients of one magnitude."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(300, 512))]
    params.append(nn.Parameter(params[0].detach().cuda()))
    optimizers = [optimizer_of(param) for param in params]
    for _ in range(5):
        grad = (torch.rand(300, 512) + 0.5) * (torch.randint(0, 2, (300, 512)) * 2 - 1)
        for param, optimizer in zip(params, optimizers, strict=True):
            param.grad = grad.to(param.device)
            optimizer.step()
    torch.testing.assert_close(params[0].detach(), params[1].detach().cpu(), rtol=1e-3, atol=1e-3)
    states = [optimizer.state_dict() for optimizer in optimizers]
    values = {name: code_values(signed) for name, signed in (("0.exp_avg", True), ("0.exp_avg_sq", False))}
    for name, of_code in values.items():
        on_cpu, on_gpu = (of_code[state[name].cpu().long()] for state in states)
        assert (on_cpu == on_gpu).float().mean() > 0.97


@pytest.mark.gpu
def test_paged_state_gives_the_same_weights_and_stays_paged_after_a_resume() -> None:
    def step(param: nn.Parameter, optimizer: Optimizer, seed: int) -> None:
        param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(seed)).cuda()
        optimizer.step()

    start = torch.randn(512, 512).cuda()
    weights = {}
    for name in ("adamw_8bit", "paged_adamw_8bit"):
        param = nn.Parameter(start.clone())
        optimizer = optimizer_of(param, name=name)
        step(param, optimizer, 0)
        second = nn.Parameter(param.detach().clone())
        resumed = optimizer_of(second, name=name)
        resumed.load_state_dict({key: tensor.cpu().clone() for key, tensor in optimizer.state_dict().items()})
        assert getattr(resumed.state_dict()["0.exp_avg"], "is_paged", False) == (name == "paged_adamw_8bit")
        step(param, optimizer, 1)
        step(second, resumed, 1)
        torch.cuda.synchronize()
        assert torch.equal(param, second)
        weights[name] = param.detach()
    assert torch.equal(*weights.values())
