"""Stepping in backward equals the plain step bitwise, each parameter is updated once per step, and a resumed run is
exact."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lean_ft.optim import Optimizer, Rule, StepInfo
from tests.optim.tiny_training import TinyModel, build, loss_of, make_batches, same_weights, train

LRS = [0.0, 3e-3, 1e-2, 1e-3, 0.0, 5e-3]  # a schedule, to catch a hook that reads a stale or constant rate


class CountingSGD(Rule):
    """Plain SGD that counts the updates of every parameter."""

    def __init__(self) -> None:
        self.updates: Counter[str] = Counter()

    def init_state(self, param: Tensor) -> dict[str, Tensor]:
        return {}

    def update(self, states: Any, step: StepInfo) -> None:
        for state in states:
            self.updates[state.name] += 1
            state.param.sub_(step.lr * state.grad)


def counting(model: nn.Module, by_layer: bool = False) -> tuple[Optimizer, Counter[str]]:
    rule = CountingSGD()
    return Optimizer(model.named_parameters(), rule, in_backward=True, by_layer=by_layer), rule.updates


def test_in_backward_equals_the_plain_step_bitwise(settings: dict[str, Any]) -> None:
    batches = [step[: 1 + 2 * (i % 2)] for i, step in enumerate(make_batches(len(LRS), 3))]  # 1 or 3 micro-batches
    settings = {**settings, "lr_ratios": {"layers.1": 0.25, "norm": 3.0}}
    plain, in_backward = TinyModel(), TinyModel()
    torch.manual_seed(5)
    plain_norms = train(plain, build(plain, settings), batches, LRS)
    torch.manual_seed(5)
    norms = train(in_backward, build(in_backward, {**settings, "in_backward": True}), batches, LRS)
    assert same_weights(plain, in_backward)
    assert torch.equal(torch.stack(norms), torch.stack(plain_norms))
    assert not same_weights(plain, TinyModel())


@pytest.mark.parametrize("in_backward", [False, True])
def test_lr_ratios_are_parameter_groups(in_backward: bool) -> None:
    """Patterns are ends of names of parameters and modules, and wildcards; several that match are multiplied. The
    weights equal those of one optimizer per parameter bitwise, and torch's within float32's rounding."""
    ratios = {"layers.0": 0.5, "*.bias": 0.25, "embed": 4.0}
    expected = {"layers.0.weight": 0.5, "layers.0.bias": 0.125, "embed.weight": 4.0}
    expected |= dict.fromkeys(("layers.1.bias", "layers.2.bias", "norm.bias"), 0.25)
    ours, single, theirs = (TinyModel(torch.float32) for _ in range(3))
    optimizer = build(ours, {"weight_decay": 0.1, "lr_ratios": ratios, "in_backward": in_backward})
    lrs = {name: 1e-2 * expected.get(name, 1.0) for name, _ in ours.named_parameters()}
    alone = [(build(nn.ParameterList([p]), {"weight_decay": 0.1}), lrs[name]) for name, p in single.named_parameters()]
    groups = [
        {"params": [p], "lr": lrs[name], "weight_decay": 0.1 * (p.ndim > 1)} for name, p in theirs.named_parameters()
    ]
    plain = torch.optim.AdamW(groups)
    for batch in make_batches(4):
        train(ours, optimizer, [batch], [1e-2])
        for model in (single, theirs):
            loss_of(model, batch[0]).backward()
        for one, lr in alone:
            one.set_lr(lr)
            one.step()
            one.zero_grad()
        plain.step()
        plain.zero_grad()
    assert same_weights(ours, single)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (mine - other).abs().max() <= 3e-7


def test_an_lr_ratio_that_matches_nothing_trained_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        ValueError, match=r"optimizer.lr_ratios: 'embd' matches no trained parameter. Did you mean 'embed'"
    ):
        build(TinyModel(), {"lr_ratios": {"embd": 0.1}})
    model = TinyModel()
    model.norm.requires_grad_(False)
    with pytest.raises(ValueError, match="'norm' matches no trained parameter"):
        build(model, {"lr_ratios": {"norm": 0.1}})


@pytest.mark.parametrize("in_backward", [False, pytest.param(True, marks=pytest.mark.long)])
def test_learning_rate_zero_leaves_weights_bitwise(settings: dict[str, Any], in_backward: bool) -> None:
    """Also with weight decay, which is multiplied by the learning rate, and stochastic rounding, which keeps exact
    values."""
    model = TinyModel()
    train(model, build(model, {**settings, "in_backward": in_backward}), make_batches(3), [0.0] * 3)
    assert same_weights(model, TinyModel())


@pytest.mark.parametrize("in_backward", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_resumed_run_equals_the_uninterrupted_one_bitwise(
    settings: dict[str, Any], in_backward: bool, tmp_path: Path
) -> None:
    settings = {**settings, "in_backward": in_backward}
    batches = make_batches(6)
    whole = TinyModel()
    torch.manual_seed(5)
    train(whole, build(whole, settings), batches, LRS)

    first = TinyModel()
    optimizer = build(first, settings)
    torch.manual_seed(5)
    train(first, optimizer, batches[:3], LRS[:3])
    save_file(optimizer.state_dict(), tmp_path / "optimizer.safetensors")
    rng = torch.get_rng_state()

    second = TinyModel(seed=1)
    second.load_state_dict(first.state_dict())
    resumed = build(second, settings)
    bytes_before = resumed.state_bytes
    resumed.load_state_dict(load_file(tmp_path / "optimizer.safetensors"))
    assert resumed.state_bytes == bytes_before == optimizer.state_bytes
    torch.set_rng_state(rng)
    train(second, resumed, batches[3:], LRS[3:])
    assert same_weights(second, whole)
    assert resumed.step_count == 6


@pytest.mark.parametrize("how", ["plain", "checkpointed", "compiled"])
def test_every_parameter_is_updated_once_a_step(how: str) -> None:
    """The tied weight is used twice; with accumulation, only the last micro-batch updates."""
    model, plain = TinyModel(torch.float32), TinyModel(torch.float32)
    call = None
    if how == "checkpointed":
        call = lambda layer, x: checkpoint(layer, x, use_reentrant=False)  # noqa: E731
    if how == "compiled":
        for layer in model.layers:
            layer.compile(backend="aot_eager", fullgraph=True)
    optimizer, updates = counting(model)
    train(model, optimizer, make_batches(4, micro_batches=2), [0.1] * 4, call=call)
    assert updates == Counter({name: 4 for name, _ in model.named_parameters()})
    train(plain, build(plain, {"name": "sgd"}), make_batches(4, micro_batches=2), [0.1] * 4)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_two_gradients_for_one_parameter_in_one_step_are_an_assertion() -> None:
    """Reentrant checkpointing of a shared layer runs backward inside backward, once per use."""
    model = TinyModel(torch.float32)
    optimizer, _ = counting(model)
    shared = model.layers[0]
    x = model.embed(torch.tensor([[1, 2]]))
    for _ in range(2):
        x = checkpoint(shared, x, use_reentrant=True)
    with pytest.raises(AssertionError, match=r"layers\.0\.\w+ got a gradient twice"):
        optimizer.scale(x.sum(), last=True).backward()


def test_gradients_are_freed_while_backward_goes_on() -> None:
    """When a layer's hook runs, no other layer's gradient is alive."""
    model = TinyModel()
    optimizer = build(model, {"name": "sgd", "in_backward": True})
    alive = []
    for layer in model.layers:
        layer.weight.register_post_accumulate_grad_hook(
            lambda _: alive.append([name for name, p in model.named_parameters() if p.grad is not None])
        )
    optimizer.scale(loss_of(model, make_batches(1)[0][0]), last=True).backward()
    assert len(alive) == 3
    assert all(len(names) <= 2 for names in alive)  # the layer's own weight and bias


def test_without_last_gradients_are_kept_and_the_step_is_an_assertion() -> None:
    model = TinyModel()
    optimizer = build(model, {"name": "sgd", "in_backward": True})
    optimizer.scale(loss_of(model, make_batches(1)[0][0]), last=False).backward()
    assert all(param.grad is not None for param in model.parameters())
    with pytest.raises(AssertionError, match="last=True"):
        optimizer.step()


def test_by_layer_equals_one_by_one_bitwise_and_updates_a_layer_at_once() -> None:
    batches = [step[: 1 + 2 * (i % 2)] for i, step in enumerate(make_batches(len(LRS), 3))]  # 1 or 3 micro-batches
    models, norms, together = [TinyModel(), TinyModel()], [], []
    for model, by_layer in zip(models, (False, True), strict=True):
        optimizer, updates = counting(model, by_layer)
        apply_rules = optimizer.apply_rules
        calls: list[list[str]] = []
        optimizer.apply_rules = lambda states, calls=calls, apply=apply_rules: (
            calls.append([state.name for state in states]),
            apply(states),
        )
        norms.append(torch.stack(train(model, optimizer, batches, LRS)))
        assert set(updates.values()) == {len(LRS)}
        together.append(calls[:6])
    assert same_weights(*models) and torch.equal(*norms)
    assert max(map(len, together[0])) == 1
    assert [f"layers.{i}.weight" for i in (2, 1, 0)] == [names[0] for names in together[1] if len(names) == 2]


def test_by_layer_a_gradient_that_is_not_finite_zeroes_its_layer_alone() -> None:
    model, start = TinyModel(), TinyModel()
    optimizer, _ = counting(model, by_layer=True)
    optimizer.set_lr(0.1)
    model.layers[1].bias.register_hook(lambda grad: grad * torch.nan)
    optimizer.scale(loss_of(model, make_batches(1)[0][0]), last=True).backward()
    assert optimizer.finish_gradients().isnan()
    unchanged = {
        name for (name, a), b in zip(model.named_parameters(), start.parameters(), strict=True) if torch.equal(a, b)
    }
    assert unchanged == {"layers.1.weight", "layers.1.bias"}


def test_a_parameter_that_the_last_micro_batch_does_not_use_is_updated() -> None:
    ids = make_batches(1)[0][0]
    after = []
    for in_backward in (False, True):
        model = TinyModel()
        optimizer = build(model, {"name": "adamw", "in_backward": in_backward})
        optimizer.set_lr(1e-2)
        optimizer.scale(loss_of(model, ids), last=False).backward()
        optimizer.scale(model.embed(ids).float().square().sum(), last=True).backward()  # the layers get nothing
        optimizer.finish_gradients()
        optimizer.step()
        optimizer.zero_grad()
        after.append(model)
    assert same_weights(*after)
    assert not torch.equal(after[1].layers[0].weight, TinyModel().layers[0].weight)


def test_clipping_scales_gradients_to_the_norm_and_returns_the_one_before() -> None:
    model = TinyModel(torch.float32)
    optimizer = build(model, {"name": "sgd"}, clip_grad_norm=0.25)
    loss_of(model, make_batches(1)[0][0]).backward()
    grads = [param.grad.double() for param in model.parameters() if param.grad is not None]
    norm = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()
    returned = optimizer.finish_gradients(0.25)
    assert returned.item() == pytest.approx(norm.item(), rel=1e-5)
    assert norm > 0.25
    for param, grad in zip(model.parameters(), grads, strict=True):
        torch.testing.assert_close(param.grad.double(), grad * 0.25 / norm, rtol=1e-4, atol=1e-9)
    kept = [param.grad.clone() for param in model.parameters()]
    optimizer.finish_gradients(1.0)  # under the limit: nothing changes
    assert all(torch.equal(param.grad, grad) for param, grad in zip(model.parameters(), kept, strict=True))


def test_a_gradient_with_another_memory_layout_is_clipped_and_used() -> None:
    weights = []
    for transposed in (False, True):
        model = nn.Linear(40, 30, bias=False)
        nn.init.ones_(model.weight)
        torch.manual_seed(0)
        grad = torch.randn(30, 40)
        model.weight.grad = grad.t().contiguous().t() if transposed else grad
        optimizer = build(model, {"name": "sgd"}, clip_grad_norm=1.0)
        optimizer.set_lr(0.1)
        optimizer.finish_gradients(1.0)
        optimizer.step()
        weights.append(model.weight.detach())
    torch.testing.assert_close(*weights)
    assert (weights[0] - 1.0).norm().item() == pytest.approx(0.1, rel=1e-4)


def test_loss_scaling_gives_the_unscaled_update_and_skips_an_overflow() -> None:
    model, plain = TinyModel(torch.float32), TinyModel(torch.float32)
    ids = make_batches(1)[0][0]
    optimizer = build(model, {"name": "adamw"}, float16=True)
    optimizer.set_lr(1e-2)

    optimizer.scale(loss_of(model, ids), last=True).backward()
    model.norm.weight.grad[3] = float("inf")
    norm = optimizer.finish_gradients(0.5)
    optimizer.step()
    optimizer.zero_grad()
    assert not norm.isfinite()
    assert same_weights(model, plain)
    assert (optimizer.step_count, optimizer.skipped_steps, optimizer.scaler.value) == (0, 1, 2.0**15)

    optimizer.scale(loss_of(model, ids), last=True).backward()
    norm = optimizer.finish_gradients(0.5)
    optimizer.step()
    plain_norm = train(plain, build(plain, {"name": "adamw"}), [[ids]], [1e-2], max_norm=0.5)[0]
    torch.testing.assert_close(norm, plain_norm)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert optimizer.step_count == 1


@pytest.mark.parametrize("others", [{}, {"clip_grad_norm": 1.0}, {"float16": True}], ids=["plain", "clipped", "scaled"])
def test_a_step_without_any_gradient_moves_nothing(others: dict[str, Any]) -> None:
    model = TinyModel()
    optimizer = build(model, {"name": "adamw"}, **others)
    assert optimizer.finish_gradients(others.get("clip_grad_norm")).item() == 0.0
    optimizer.step()
    assert same_weights(model, TinyModel())


def test_a_resumed_optimizer_refuses_another_models_or_rules_state() -> None:
    model = TinyModel()
    saved = build(model, {"name": "adamw"}).state_dict()
    with pytest.raises(ValueError, match="keeps .* saved by another optimizer"):
        build(model, {"name": "adamw_8bit"}).load_state_dict(saved)
    model.layers[2].weight.requires_grad_(False)
    with pytest.raises(ValueError, match="does not belong to this model.*layers.2.weight"):
        build(model, {"name": "adamw"}).load_state_dict(saved)
    with pytest.raises(ValueError, match="Expected torch.float32"):
        build(TinyModel(torch.float32), {"name": "adamw"}).load_state_dict(saved)
    with pytest.raises(ValueError, match="lacks.*step"):
        build(TinyModel(), {"name": "adamw"}).load_state_dict({})


def test_frozen_parameters_are_left_out_and_none_to_train_is_refused() -> None:
    model = TinyModel()
    model.layers.requires_grad_(False)
    optimizer = build(model, {"name": "adamw"})
    assert not any(name.startswith("layers") for name in optimizer.state_dict())
    assert sum(name.startswith("embed.weight") for name in optimizer.state_dict()) == 2
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        build(model.requires_grad_(False), {"name": "sgd"})


@pytest.mark.parametrize(
    ("settings", "bytes_a_parameter"),
    [
        ({"name": "sgd"}, 0.0),
        ({"name": "sgd", "momentum": 0.9}, 2.0),
        ({"name": "adamw"}, 4.0),
        ({"name": "adamw_8bit"}, 2 + 8 / 256),
        ({"name": "adafactor"}, 4 / 256 + 4 / 64),
    ],
)
def test_state_bytes(settings: dict[str, Any], bytes_a_parameter: float) -> None:
    matrix = nn.Linear(256, 64, bias=False).bfloat16()
    assert build(matrix, settings).state_bytes == bytes_a_parameter * 256 * 64


@pytest.mark.gpu
@pytest.mark.parametrize("in_backward", [False, True])
def test_no_step_waits_for_the_device(
    settings: dict[str, Any], in_backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if settings["name"] == "paged_adamw_8bit":
        pytest.skip("pages are moved by the driver")
    model = TinyModel().cuda()
    optimizer = build(model, {**settings, "in_backward": in_backward})
    batches = [[ids.cuda() for ids in step] for step in make_batches(3)]
    train(model, optimizer, batches[:1], [1e-3])
    # The only number that the host waits for, to skip a bad step.
    monkeypatch.setattr("lean_ft.optim.optimizer.all_finite", lambda scalars: True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        train(model, optimizer, batches[1:], [1e-3] * 2)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_in_backward_equals_the_plain_step_bitwise_on_a_gpu(settings: dict[str, Any]) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    batches = [[ids.cuda() for ids in step] for step in make_batches(4, micro_batches=2)]
    models = [TinyModel().cuda(), TinyModel().cuda()]
    for model, in_backward in zip(models, (False, True), strict=True):
        torch.manual_seed(5)
        train(model, build(model, {**settings, "in_backward": in_backward}), batches, [3e-3, 1e-2, 1e-3, 0.0])
    torch.use_deterministic_algorithms(False)
    assert same_weights(*models)
