"""A sharded vocabulary gives the numbers of one process, and no rank has a tensor of the whole weight's size."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from lean_ft.generation import Sampling, sample
from lean_ft.losses import CrossEntropy, TokenStatistics
from lean_ft.models.config import DecoderConfig
from lean_ft.models.decoder import Decoder
from lean_ft.parallel.vocabulary import why_gathered
from lean_ft.settings import LossConfig, ParallelConfig
from lean_ft.system.shards import local
from tests.parallel.processes import on_ranks
from tests.parallel.small_training import Config, build, make_batch, small_model, train, whole_tensors
from tests.parallel.test_training import config

pytestmark = pytest.mark.long

CUT, GATHERED = ParallelConfig(vocabulary="cut"), ParallelConfig(vocabulary="gathered")
TERMS = LossConfig(label_smoothing=0.1, z_loss=1e-3)

CASES: dict[str, tuple[Config, dict[str, Any]]] = {
    "two weights": (config("sgd", momentum=0.9), {}),
    "two weights in backward, recomputed": (
        config("sgd", in_backward=True, memory={"activation_checkpointing": "full"}),
        {},
    ),
    "tied": (config("sgd", momentum=0.9), {"tied": True}),
    "tied in backward, uneven micro-batches": (config("sgd", steps=3, in_backward=True), {"tied": True}),
    "a vocabulary that does not divide evenly, clipped": (config("sgd", clip=0.5), {"vocab_size": 515}),
    "all terms, and a cap": (config("sgd").model_copy(update={"loss": TERMS}), {"logits_softcap": 5.0, "tied": True}),
    "all logits at once": (config("sgd", memory={"loss_chunk_tokens": 0}), {}),
    "8 bits": (config("adamw_8bit", in_backward=True), {"tied": True}),
}


def outcome(cfg: Config, settings: dict[str, Any]) -> dict[str, Any]:
    """Results of three steps and an evaluation."""
    model, optimizer, ranks = build(cfg, **settings)
    numbers = list(train(cfg, model, optimizer, ranks))
    cross_entropy = CrossEntropy(model, cfg, ranks)
    held_out = [make_batch(100 + i, model.config.vocab_size) for i in range(3)]
    evaluation = cross_entropy.evaluate(model, (batch for batch, _ in ranks.share(held_out)))
    return {
        "numbers": numbers,
        "evaluation": {name: float(value) for name, value in evaluation.items()},
        "answers": [answer.ids for answer in sample(model, [[1, 2, 3], [5, 6]], Sampling(4))],
        "weights": {name: tensor for name, tensor in whole_tensors(model, optimizer).items() if "." in name},
    }


class Largest(TorchDispatchMode):
    """Records the bytes of the largest storage that any operation returns."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                self.num_bytes = max(self.num_bytes, local(tensor).untyped_storage().nbytes())
        return result


def largest_of_a_step(parallel: ParallelConfig, tied: bool) -> int:
    cfg = config("sgd", in_backward=True).model_copy(update={"parallel": parallel})
    model, optimizer, ranks = build(cfg, tied=tied, vocab_size=8192)
    with Largest() as largest:
        list(train(cfg, model, optimizer, ranks, steps=1))
    return largest.num_bytes


def uneven_batches(parallel: ParallelConfig) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Loss, entropy and gradients of batches with different widths and numbers of targets, one without targets."""
    cfg = config("sgd").model_copy(update={"parallel": parallel})
    model, optimizer, ranks = build(cfg, tied=True)
    statistics = TokenStatistics(ranks)
    batches = []
    for i in range(4):
        batch = make_batch(i)
        width = 48 - 7 * i
        labels = batch.labels[:, :width] if i < 3 else torch.full((2, width), -100)
        batches.append(
            SimpleNamespace(
                inputs={"input_ids": batch.input_ids[:, :width]}, labels=labels, num_targets=int((labels != -100).sum())
            )
        )
    cross_entropy = CrossEntropy(model, cfg, ranks)
    for batch, is_last in ranks.share(batches):
        optimizer.scale(cross_entropy(model, batch, statistics) / 100, last=is_last).backward()
    means = statistics.means(100)
    for param in model.parameters():
        with torch.no_grad():
            param.copy_(param.grad)
    return float(means["loss"]), float(means["entropy"]), whole_tensors(model, optimizer)


def bfloat16_weights(parallel: ParallelConfig) -> dict[str, torch.Tensor]:
    cfg = config("sgd", dtype="bfloat16").model_copy(update={"parallel": parallel})
    model, optimizer, ranks = build(cfg)
    list(train(cfg, model, optimizer, ranks, steps=1))
    return whole_tensors(model, optimizer)


def work() -> dict[str, Any]:
    found = {
        name: outcome(cfg.model_copy(update={"parallel": CUT}), settings) for name, (cfg, settings) in CASES.items()
    }
    found["largest"] = [largest_of_a_step(parallel, tied) for parallel in (CUT, GATHERED) for tied in (False, True)]
    found["uneven"] = uneven_batches(CUT)
    found["bfloat16"] = bfloat16_weights(CUT)
    return found


@pytest.fixture(scope="module")
def on_two() -> list[dict[str, Any]]:
    return on_ranks(2, work)


@pytest.mark.parametrize("name", CASES)
def test_a_cut_vocabulary_gives_the_numbers_of_one_process(on_two, name):
    expected = outcome(*CASES[name])
    is_coded = name == "8 bits"  # a step between codes is larger than the differences of sums in another order
    for found in (of_rank[name] for of_rank in on_two):
        for ours, theirs in zip(found["numbers"], expected["numbers"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5 if is_coded else 1e-6)
        assert found["evaluation"] == pytest.approx(expected["evaluation"], rel=1e-6)
        assert found["answers"] == expected["answers"]
        assert found["weights"].keys() == expected["weights"].keys()
        for key, tensor in expected["weights"].items():
            if is_coded:
                if tensor.is_floating_point():
                    assert (found["weights"][key] - tensor).norm() <= 1e-3 * tensor.norm(), key
                continue
            torch.testing.assert_close(found["weights"][key], tensor, rtol=1e-6, atol=2e-7, msg=key)


def test_no_rank_has_a_tensor_of_the_whole_weights_size(on_two):
    whole = 8192 * 64 * 4
    for of_rank in on_two:
        *cut, gathered, gathered_tied = of_rank["largest"]
        assert max(cut) <= whole // 2
        assert min(gathered, gathered_tied) >= whole


def test_batches_of_different_widths_and_without_targets_equal_one_process(on_two):
    loss, entropy, gradients = uneven_batches(ParallelConfig())
    for of_rank in on_two:
        assert of_rank["uneven"][:2] == pytest.approx((loss, entropy), rel=1e-6)
        for key, tensor in gradients.items():
            torch.testing.assert_close(of_rank["uneven"][2][key], tensor, rtol=1e-6, atol=2e-7, msg=key)


def test_in_bfloat16_it_rounds_about_as_much_as_one_process(on_two):
    exact = bfloat16_weights(ParallelConfig())
    before = dict(small_model(dtype=torch.bfloat16).named_parameters())
    for of_rank in on_two:
        for key, weight in before.items():
            moved = (exact[key].float() - weight.float()).norm()
            assert (of_rank["bfloat16"][key].float() - exact[key].float()).norm() <= 0.15 * moved, key


def decoder(hidden_size: int, vocab_size: int, tied: bool = False) -> Decoder:
    sizes = {"intermediate_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "initializer_range": 0.02}
    sizes |= {"max_positions": 512, "norm_eps": 1e-6, "layers": ()}
    with torch.device("meta"):
        config = DecoderConfig(vocab_size=vocab_size, hidden_size=hidden_size, tied_embeddings=tied, **sizes)
        return Decoder(config).to(torch.bfloat16)


@pytest.mark.parametrize(
    ("asked", "sizes", "num_shards", "tokens", "answer"),
    [
        ("auto", (4096, 128256), 8, 4096, ""),
        (
            "auto",
            (4096, 128256),
            64,
            4096,
            "exchanging the 262,144 tokens of 64 processes would send more than gathering",
        ),
        ("auto", (64, 768), 2, 64, "the weight is smaller than 256 MiB"),
        ("auto", (4096, 128256), 8, None, "this recipe's loss needs the whole output layer"),
        ("auto", (4096, 128256), 1, 4096, "each process has a replica of the model"),
        ("gathered", (4096, 128256), 8, 4096, "parallel.vocabulary=gathered"),
        ("cut", (4096, 128256), 64, 4096, ""),
        ("cut", (64, 768), 2, 64, ""),
        ("cut", (64, 768), 1, 64, ValueError("each process has a replica of the model")),
        ("cut", (64, 768), 2, None, ValueError("this recipe's loss needs the whole output layer")),
        ("cut", (64, 5), 4, 64, ValueError("a vocabulary of 5 tokens is too small for 4 processes")),
    ],
    ids=str,
)
def test_auto_gives_its_reason(asked, sizes, num_shards, tokens, answer):
    cfg, ranks = ParallelConfig(vocabulary=asked), SimpleNamespace(num_shards=num_shards)
    arguments: Any = (decoder(*sizes), cfg, ranks, tokens)
    if isinstance(answer, ValueError):
        with pytest.raises(ValueError, match=str(answer)):
            why_gathered(*arguments)
    else:
        why = why_gathered(*arguments)
        assert why.startswith(answer) if answer else not why


def four_ranks(cfg: Config) -> Any:
    model, optimizer, ranks = build(cfg, tied=True)
    return list(train(cfg, model, optimizer, ranks)), whole_tensors(model, optimizer)


@pytest.mark.parametrize("replicate", [1, 2])
@pytest.mark.parametrize("in_backward", [False, True])
def test_four_ranks_and_copies_of_two_are_one_process(replicate, in_backward):
    cfg = config("sgd", steps=8, in_backward=in_backward)
    numbers, weights = four_ranks(cfg)
    parallel = ParallelConfig(vocabulary="cut", replicate=replicate)
    for found, tensors in on_ranks(4, four_ranks, cfg.model_copy(update={"parallel": parallel})):
        assert found == [pytest.approx(step, rel=1e-6) for step in numbers]
        for key, tensor in weights.items():
            torch.testing.assert_close(tensors[key], tensor, rtol=1e-6, atol=2e-7, msg=key)
