"""Sharded parameters: the weights and the optimizer's state equal one process."""

from typing import Any

import pytest
import torch

from lean_ft.parallel import join
from lean_ft.settings import MemoryConfig, ModelConfig, OptimizerConfig, ParallelConfig
from tests.parallel.processes import assert_refused, on_ranks, refusal, selected
from tests.parallel.small_training import CPU, Config, build, digest, train, whole_tensors

SHARDED, REPLICATED = ParallelConfig(), ParallelConfig(replicate=2)


def config(
    name: str,
    *,
    dtype: Any = "float32",
    steps: int = 2,
    clip: float | None = None,
    memory: dict[str, Any] | None = None,
    **optimizer: Any,
) -> Config:
    return Config(
        model=ModelConfig(path="unused", dtype=dtype),
        optimizer=OptimizerConfig(name=name, weight_decay=0.1, **optimizer),  # type: ignore[arg-type]
        gradient_accumulation_steps=steps,
        clip_grad_norm=clip,
        memory=MemoryConfig(**{"loss_chunk_tokens": 16, **(memory or {})}),
    )


# Two micro-batches per step, one on each of two ranks: their sum has the same bits in either order.
BITWISE: dict[str, tuple[Config, bool]] = {
    f"{rule} {dtype} {'in backward' if in_backward else 'plain'}": (
        config(rule, dtype=dtype, in_backward=in_backward),
        tied,
    )
    for rule in ("adamw", "sgd", "adamw_8bit", "adamw_4bit")
    for dtype, in_backward, tied in (("float32", False, False), ("bfloat16", True, True))
} | {
    "learning rates by name": (config("adamw", lr_ratios={"layers.0": 0.1, "embed_tokens": 4.0}), False),
    "8 bits, recomputed, tiled": (
        config("adamw_8bit", in_backward=True, memory={"activation_checkpointing": "full", "tile_mlp": 2}),
        False,
    ),
}
# Sums over ranks are in another order than sums over rows or micro-batches.
CLOSE: dict[str, tuple[Config, bool]] = {
    "clipped": (config("sgd", clip=0.5), False),
    "accumulated": (config("sgd", steps=4, momentum=0.9), False),
    "accumulated in backward": (config("sgd", steps=4, in_backward=True), True),
    "fewer micro-batches at the end": (config("sgd", steps=3, in_backward=True), False),
    "update clipping": (config("adamw", update_clipping=True, in_backward=True), False),
    "adafactor": (config("adafactor"), True),
    "adafactor in backward": (config("adafactor", in_backward=True), False),
    "muon on replicas": (config("muon"), False),
    "apollo on replicas": (config("apollo_mini"), False),
    "stochastic rounding on replicas": (config("adamw", dtype="bfloat16", stochastic_rounding=True), False),
}
# For sharded parameters these are refused, or noise is drawn per shard.
ON_REPLICAS = ("muon on replicas", "apollo on replicas", "stochastic rounding on replicas")


def outcome(cfg: Config, parallel: ParallelConfig, tied: bool) -> tuple[list[tuple[float, float]], dict[str, Any]]:
    cfg = cfg.model_copy(update={"parallel": parallel})
    model, optimizer, ranks = build(cfg, tied=tied)
    numbers = list(train(cfg, model, optimizer, ranks))
    return numbers, whole_tensors(model, optimizer)


def all_outcomes(cases: dict[str, tuple[Config, bool]]) -> dict[tuple[str, str], Any]:
    found = {}
    for name, (cfg, tied) in cases.items():
        for layout, parallel in {"sharded": SHARDED, "replicated": REPLICATED}.items():
            if layout == "sharded" and name in ON_REPLICAS:
                continue
            found[name, layout] = outcome(cfg, parallel, tied)
    return found


def work(cases: dict[str, tuple[Config, bool]]) -> tuple[dict[tuple[str, str], Any], list[Any], list[str]]:
    """Everything that is tested on two ranks, so that the processes start once."""
    return (
        all_outcomes(cases),
        [spoiled_steps(*case) for case in SPOILED],
        [refusal(build, cfg, **sizes) for cfg, sizes, _ in REFUSED],
    )


@pytest.fixture(scope="module")
def on_two(request: pytest.FixtureRequest) -> list[Any]:
    wanted = selected(request)
    return on_ranks(2, work, {name: case for name, case in (BITWISE | CLOSE).items() if name in wanted})


@pytest.fixture(scope="module")
def outcomes(on_two) -> dict[tuple[str, str], Any]:
    (first, *_), (second, *_) = on_two
    for key, (numbers, tensors) in first.items():
        assert numbers == second[key][0], key
        assert digest(tensors) == digest(second[key][1]), key
    return first


@pytest.mark.first(1)
@pytest.mark.parametrize("name", BITWISE)
def test_two_ranks_make_the_bits_of_one_process(outcomes, name):
    cfg, tied = BITWISE[name]
    numbers, tensors = outcome(cfg, ParallelConfig(), tied)
    for layout in ("sharded", "replicated"):
        theirs, whole = outcomes[name, layout]
        assert digest(whole) == digest(tensors), (layout, [n for n in tensors if not torch.equal(whole[n], tensors[n])])
        for step, expected in zip(theirs, numbers, strict=True):
            assert step == pytest.approx(expected, rel=1e-6)


@pytest.mark.first(1)
@pytest.mark.parametrize("name", CLOSE)
def test_two_ranks_make_the_numbers_of_one_process(outcomes, name):
    cfg, tied = CLOSE[name]
    numbers, tensors = outcome(cfg, ParallelConfig(), tied)
    for layout in ("replicated",) if name in ON_REPLICAS else ("sharded", "replicated"):
        theirs, whole = outcomes[name, layout]
        for step, expected in zip(theirs, numbers, strict=True):
            assert step == pytest.approx(expected, rel=3e-6)
        for key, tensor in tensors.items():
            torch.testing.assert_close(whole[key], tensor, rtol=1e-4, atol=2e-6, msg=f"{layout}: {key}")


def spoiled_steps(in_backward: bool, what: str) -> tuple[list[int], list[str], dict[str, Any]]:
    """Skipped steps and digests after each of three steps; the second step is not finite on the last rank."""
    cfg = config("adamw", in_backward=in_backward)
    model, optimizer, ranks = build(cfg)

    def spoil(step: int, rank: int, loss: torch.Tensor) -> torch.Tensor:
        if step != 1 or rank != ranks.size - 1:
            return loss
        if what == "loss":
            return loss * torch.nan
        # Adds 0, with a NaN gradient.
        return loss + (model.output_weight * 0).sum().sqrt()

    skipped, digests = [], []
    for _ in train(cfg, model, optimizer, ranks, spoil=spoil):
        skipped.append(optimizer.skipped_steps)
        tensors = whole_tensors(model, optimizer)
        digests.append(digest({name: t for name, t in tensors.items() if name not in ("step", "skipped_steps")}))
    return skipped, digests, tensors


SPOILED = [(in_backward, what) for in_backward in (False, True) for what in ("loss", "gradient")]


@pytest.mark.long
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all(on_two):
    for of_rank in (found := [spoiled for _, spoiled, _ in on_two]):
        for case, (skipped, digests, tensors) in zip(SPOILED, of_rank, strict=True):
            alone = spoiled_steps(*case)
            assert all(tensor.isfinite().all() for tensor in tensors.values()), case
            assert skipped == alone[0], case
            if case != (True, "gradient"):  # counts as zero: in backward, others may have been updated already
                assert skipped == [0, 1, 1]
                assert digests[0] == digests[1] != digests[2], case
            assert digests == alone[1], case
    assert [x[:2] for x in found[0]] == [x[:2] for x in found[1]]


REFUSED = [
    (config("muon"), {}, "optimizer.name=muon works on whole matrices"),
    (config("apollo_mini"), {}, "optimizer.name=apollo_mini works on whole matrices"),
    (
        config("adamw_8bit"),
        {"vocab_size": 514},  # 257 rows of 64
        "embed_tokens.weight of shape [514, 64] is split within such a block, every 257 rows",
    ),
    (config("adamw", state="streamed"), {}, "optimizer.state=streamed is for one process"),
]


def test_unsupported_optimizers_are_refused_by_name(on_two):
    assert_refused([refused for _, _, refused in on_two], [message for *_, message in REFUSED])


@pytest.mark.parametrize(
    ("environment", "parallel", "message"),
    [
        ({}, ParallelConfig(shard=8), "parallel.replicate=1 x shard=8 needs 8 processes, and there is 1 process"),
        (
            {"WORLD_SIZE": "3"},
            ParallelConfig(replicate=2),
            "needs a multiple of 2 processes, and there are 3 processes",
        ),
        (
            {"WORLD_SIZE": "2", "RANK": "0"},
            ParallelConfig(),
            "LOCAL_RANK, MASTER_ADDR, MASTER_PORT is not in the environ",
        ),
    ],
    ids=str,
)
def test_join_refuses_a_wrong_environment(monkeypatch, environment, parallel, message):
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert message in refusal(join, parallel, CPU)
