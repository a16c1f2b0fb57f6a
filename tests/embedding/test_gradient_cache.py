"""The two passes of gradient caching compute the same bits, and give the gradients of one large batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import cross_entropy, normalize

from lean_ft.data import Batch
from lean_ft.embedding.gradient_cache import StepVectors
from lean_ft.models import Decoder
from lean_ft.models.config import MixtureConfig
from lean_ft.models.routing import RoutingStatistics
from lean_ft.optim import Optimizer, build_optimizer
from lean_ft.settings import LoRAConfig, MemoryConfig, ModelConfig, OptimizerConfig, ParallelConfig
from lean_ft.system.shards import ALONE, Ranks
from lean_ft.training.regularization import add_embedding_noise
from tests.parallel.processes import on_ranks
from tests.parallel.small_training import CPU, VOCAB, Config, build, small_model, whole_tensors

TEXTS = 4  # a query, its passage and two other passages


@dataclass(frozen=True, kw_only=True)
class Rows(Batch):
    """Packed rows of TEXTS texts each."""

    last: Tensor  # (M,), each text's last token
    num_rows: int

    labels_whole_rows: ClassVar[bool] = True

    def without_targets(self) -> "Rows":
        return replace(super().without_targets(), last=self.last[:0], num_rows=0)


def make_rows(number: int, num_rows: int = 3) -> Rows:
    """A micro-batch in one row of the forward pass, padded to a multiple of 8."""
    generator = torch.Generator().manual_seed(number)
    lengths = torch.randint(2, 9, (num_rows * TEXTS,), generator=generator)
    ends = lengths.cumsum(0)
    size = -(-int(ends[-1]) // 8) * 8
    ids = torch.randint(0, VOCAB, (1, size), generator=generator)
    cu_seqlens = torch.tensor([0, *ends.tolist(), size], dtype=torch.int32)
    places = torch.arange(size)
    document = torch.bucketize(places, cu_seqlens, right=True) - 1
    inputs = {"input_ids": ids, "positions": (places - cu_seqlens[document])[None], "cu_seqlens": cu_seqlens}
    return Rows(inputs, ids, num_targets=0, num_tokens=size, last=ends - 1, num_rows=num_rows)


def embedder(model: Decoder) -> Callable[[Rows], Tensor]:
    def embed(batch: Rows) -> Tensor:
        hidden = model(**batch.inputs, return_hidden=True)
        tokens = model.sharding.row_tokens
        hidden = hidden if tokens is None else tokens.gather(hidden)
        vectors = hidden.flatten(0, 1).index_select(0, batch.last)
        wide = vectors.to(torch.promote_types(vectors.dtype, torch.float32))
        return wide.unflatten(0, (batch.num_rows, TEXTS))

    return embed


def infonce(vectors: Tensor) -> Tensor:
    """vectors: (P, TEXTS, D). Each query against all passages of all rows."""
    vectors = normalize(vectors, dim=-1)
    passages = vectors[:, 1:].transpose(0, 1).flatten(0, 1)
    return cross_entropy(vectors[:, 0] @ passages.T / 0.05, torch.arange(len(vectors)))


def config(*, dtype: Any = "float32", compile: bool = False, in_backward: bool = False, **memory: Any) -> Config:
    return Config(
        model=ModelConfig(path="unused", dtype=dtype),
        optimizer=OptimizerConfig(name="sgd", in_backward=in_backward),
        memory=MemoryConfig(**memory),
        compile=compile,
    )


def step(
    model: Decoder, cfg: Config, optimizer: Optimizer, micro_batches: Sequence[Rows], ranks: Ranks = ALONE
) -> tuple[float, list[Tensor]]:
    """The step of a recipe. Returns the loss, and the result of each forward pass in order."""
    passes, embed = [], embedder(model)

    def seen(batch: Rows) -> Tensor:
        with torch.autocast("cpu", torch.float16, enabled=cfg.model.dtype == "float16"):
            vectors = embed(batch)
        passes.append(vectors.detach().clone())
        return vectors

    optimizer.set_lr(0.1)
    vectors = StepVectors(seen, micro_batches, CPU, ranks, compiled=cfg.compile)
    loss = infonce(vectors.all)
    loss.backward()
    for product, is_last in vectors.again():
        optimizer.scale(product, last=is_last).backward()
    optimizer.finish_gradients(max_norm=None)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), passes


CONDITIONS = {
    "float32": config(),
    "bfloat16": config(dtype="bfloat16"),
    "checkpointing": config(activation_checkpointing="full"),
    "mixture": config(),
    "compile": config(dtype="bfloat16", compile=True),
    "compile and checkpointing": config(dtype="bfloat16", compile=True, activation_checkpointing="full"),
    "compile in backward": config(compile=True, in_backward=True),
}
MIXTURE = MixtureConfig(num_experts=4, experts_per_token=2, intermediate_size=32, weights_sum_to_one=True)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * ("compile" in name)) for name in CONDITIONS]
)
def test_both_passes_compute_the_same_bits_and_draw_once(name: str) -> None:
    """With dropout and NEFTune: without the random states of the first pass, the second would give other vectors."""
    torch._dynamo.reset()
    cfg, mixture = CONDITIONS[name], MIXTURE if name == "mixture" else None
    lora = LoRAConfig.model_validate({"rank": 4, "dropout": 0.0 if mixture else 0.3})
    model, optimizer, _ = build(cfg, lora, layer={"mixture": mixture})
    add_embedding_noise(model, 5.0)
    model.routing = RoutingStatistics() if mixture else None
    micro_batches = [make_rows(i) for i in range(3)]

    torch.manual_seed(1)
    _, passes = step(model, cfg, optimizer, micro_batches)
    after, routing = torch.rand(3), model.routing and model.routing.take(ALONE)

    first, kept = passes[:2], passes[2]  # the first pass ends with the micro-batch that the second begins with
    if cfg.compile:  # its layers were compiled for the second length too, so those that are not kept came again
        assert len(passes) == 3 * len(micro_batches) - 2
        first = passes[3:5]
    else:
        assert len(passes) == 2 * len(micro_batches) - 1
    again = passes[-2:]
    assert all(map(torch.equal, again, reversed(first)))
    assert not torch.equal(kept, again[0])

    model, optimizer, _ = build(cfg, lora, layer={"mixture": mixture})  # the weights before the step
    add_embedding_noise(model, 5.0)
    model.routing = RoutingStatistics() if mixture else None
    torch.manual_seed(1)
    plain = [embedder(model)(batch).detach() for batch in reversed(micro_batches)]
    assert all(map(torch.equal, plain, [*first, kept]))
    assert torch.equal(torch.rand(3), after)
    if routing:
        assert model.routing is not None
        assert routing == model.routing.take(ALONE)


@pytest.mark.parametrize("sizes", [(3, 3, 2), (2,), (1, 4)], ids=str)
def test_gradients_are_those_of_one_large_batch(sizes: tuple[int, ...]) -> None:
    model = small_model(dtype=torch.float64)
    micro_batches = [make_rows(i, num_rows) for i, num_rows in enumerate(sizes)]
    whole = infonce(torch.cat([embedder(model)(batch) for batch in micro_batches]))
    parameters = dict(model.model.named_parameters())
    expected = torch.autograd.grad(whole, list(parameters.values()))

    vectors = StepVectors(embedder(model), micro_batches, CPU)
    loss = infonce(vectors.all)
    loss.backward()
    for product, _ in vectors.again():
        product.backward()
    torch.testing.assert_close(loss, whole, rtol=1e-12, atol=0)
    for (name, parameter), gradient in zip(parameters.items(), expected, strict=True):
        assert parameter.grad is not None
        assert (parameter.grad - gradient).norm() <= 1e-12 * gradient.norm(), name


@pytest.mark.parametrize("compiled", [False, True], ids=["without gradients", "recorded"])
def test_the_activations_of_one_micro_batch_exist_at_a_time(compiled: bool) -> None:
    """`compiled` records gradients, and drops what they would read."""
    model, inputs, alive = small_model(), list[StorageWeakRef](), list[int]()

    def num_alive() -> int:
        return sum(not reference.expired() for reference in inputs)

    def note(_: object, arguments: tuple[Tensor, ...]) -> None:  # a linear layer keeps its input for backward
        inputs.append(StorageWeakRef(arguments[0].untyped_storage()))

    def embed(batch: Rows) -> Tensor:
        alive.append(num_alive())
        return embedder(model)(batch)

    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(note)
    vectors = StepVectors(embed, [make_rows(i) for i in range(4)], CPU, compiled=compiled)
    assert num_alive() > 0  # of the micro-batch that the second pass begins with
    infonce(vectors.all).backward()
    for product, _ in vectors.again():
        product.backward()
        del product
    assert alive == [0] * 7


@pytest.mark.parametrize("name", ["plain", "in backward", "float16"])
def test_a_step_changes_the_weights_as_one_large_batch_does(name: str) -> None:
    """With `optimizer.in_backward` each parameter is updated once; in float16 the loss is scaled."""
    is_float16, in_backward = "float16" in name, "backward" in name
    results = []
    for cut in (1, 3):
        model, _, _ = build(config())
        cfg = config(dtype="float16" if is_float16 else "float32", in_backward=in_backward)
        optimizer = build_optimizer(model, cfg)
        optimizer.scaler.value = min(optimizer.scaler.value, 64.0)  # the first steps would find a scale, and be skipped
        batches = [make_rows(i) for i in range(3)]
        step(model, cfg, optimizer, batches if cut == 3 else [joined(batches)])
        results.append({name: parameter.detach() for name, parameter in model.model.named_parameters()})
    start = dict(small_model().model.named_parameters())
    for name, one in results[0].items():
        moved = (one - start[name]).norm()
        assert moved > 0
        assert (one - results[1][name]).norm() <= (2e-2 if is_float16 else 1e-5) * moved, name


def joined(batches: Sequence[Rows]) -> Rows:
    """The micro-batches as one."""
    first, sizes = batches[0], [0]
    for batch in batches:
        sizes.append(sizes[-1] + batch.num_tokens)
    inputs = {name: torch.cat([batch.inputs[name] for batch in batches], 1) for name in ("input_ids", "positions")}
    bounds = [batch.inputs["cu_seqlens"] + size for batch, size in zip(batches, sizes, strict=False)]
    inputs["cu_seqlens"] = torch.cat([bounds[0], *(one[1:] for one in bounds[1:])])
    last = torch.cat([batch.last + size for batch, size in zip(batches, sizes, strict=False)])
    num_rows = sum(batch.num_rows for batch in batches)
    return replace(first, inputs=inputs, labels=inputs["input_ids"], num_tokens=sizes[-1], last=last, num_rows=num_rows)


LAYOUTS = {
    "sharded": (2, ParallelConfig()),
    "replicated": (2, ParallelConfig(replicate=2)),
    "context": (2, ParallelConfig(context=2)),
    "four sharded": (4, ParallelConfig()),
    "four, context": (4, ParallelConfig(context=2)),
    "four, replicated": (4, ParallelConfig(replicate=2)),
}
SIZES = (3, 2, 3, 3, 1)


def two_steps(cfg: Config) -> tuple[list[float], dict[str, Tensor]]:
    model, optimizer, ranks = build(cfg)
    losses = []
    for number in range(2):
        micro_batches = [make_rows(10 * number + i, size) for i, size in enumerate(SIZES)]
        losses.append(step(model, cfg, optimizer, micro_batches, ranks)[0])
    return losses, whole_tensors(model, optimizer)


@pytest.mark.long
@pytest.mark.parametrize("in_backward", [False, True], ids=["plain", "in backward"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_processes_equal_one(name: str, in_backward: bool) -> None:
    """Five micro-batches of several sizes: some ranks have one that is empty."""
    size, parallel = LAYOUTS[name]
    cfg = config(in_backward=in_backward)
    losses, expected = two_steps(cfg)
    for of_rank, tensors in on_ranks(size, two_steps, cfg.model_copy(update={"parallel": parallel})):
        assert of_rank == pytest.approx(losses, rel=1e-6)
        for tensor_name, whole in tensors.items():
            torch.testing.assert_close(whole, expected[tensor_name], rtol=0, atol=1e-6)
