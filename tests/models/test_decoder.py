"""The decoder against transformers' models: autocast, padding and packing; compiled, checkpointed; what it keeps."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from lean_ft.generation import Sampling, sample
from lean_ft.images.batch import Images
from lean_ft.losses.linear_cross_entropy import linear_cross_entropy
from lean_ft.memory import checkpoint_layers
from lean_ft.models import Decoder, build_decoder, load_model
from lean_ft.models.block import Pass
from lean_ft.peft import apply_lora
from lean_ft.settings import LoRAConfig


def token_ids(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 101, shape, generator=torch.Generator().manual_seed(seed))


def next_token_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_is_as_near_to_float32_as_transformers(make_checkpoint, dtype):
    folder, reference = make_checkpoint("qwen2")
    exact, ours, ids = load_model(folder), load_model(folder), token_ids(4, 60)
    logits = [exact(ids)]
    with torch.autocast("cpu", dtype):
        logits += [ours(ids), reference(ids).logits]
    for result in logits:
        next_token_loss(result, ids).backward()
    assert logits[1].dtype == dtype
    named = [dict(model.named_parameters()) for model in (exact, ours, reference)]

    def errors(which: int) -> tuple[float, float]:
        grads = [
            (named[which][n].grad - p.grad).norm() / p.grad.norm() for n, p in named[0].items() if "k_proj" not in n
        ]
        wrong = (logits[which].float() - logits[0]).norm() / logits[0].norm()
        return wrong.item(), torch.stack(grads).mean().item()

    for own, theirs in zip(errors(1), errors(2), strict=True):
        assert own <= 1.1 * theirs


def test_right_padding_changes_nothing_before_it(make_checkpoint):
    folder, reference = make_checkpoint("qwen2")
    model = load_model(folder)
    lengths = [37, 20, 5]
    ids = token_ids(3, 37)
    mask = torch.arange(37) < torch.tensor(lengths)[:, None]
    ids[~mask] = 0
    logits = model(ids)
    expected = reference(ids, attention_mask=mask.long()).logits
    for row, length in enumerate(lengths):
        torch.testing.assert_close(logits[row, :length], expected[row, :length], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(logits[row, :length], model(ids[row : row + 1, :length])[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("given_positions", [True, False])
def test_packed_documents_equal_transformers_on_each_alone(make_checkpoint, given_positions):
    folder, reference = make_checkpoint("llama_llama3_rope")
    model = load_model(folder)
    bounds = [0, 13, 14, 40, 60, 80]  # two rows of 40, the second of two documents
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    ids = token_ids(2, 40)
    documents = list(pairwise(bounds))
    positions = torch.cat([torch.arange(b - a) for a, b in documents]).view(2, 40) if given_positions else None
    logits = model(ids, positions=positions, cu_seqlens=cu_seqlens)
    expected = [reference(ids.view(-1)[a:b][None]).logits[0] for a, b in documents]
    torch.testing.assert_close(logits.flatten(0, 1), torch.cat(expected), atol=1e-4, rtol=1e-4)

    target = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    (logits * target).sum().backward()
    (torch.cat(expected) * target.flatten(0, 1)).sum().backward()
    grads = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, grads[name].grad, atol=1e-3, rtol=1e-3)


def test_return_hidden_leaves_the_output_layer_to_the_loss(make_checkpoint):
    for case in ("llama", "llama_wide_heads_tied"):
        folder, reference = make_checkpoint(case)
        model = load_model(folder)
        ids = token_ids(2, 9)
        hidden = model(ids, return_hidden=True)
        torch.testing.assert_close(hidden, reference.model(ids).last_hidden_state, atol=1e-4, rtol=1e-4)
        assert model.output_weight.shape == (101, 48)
        torch.testing.assert_close(hidden @ model.output_weight.T, model(ids))


def test_losses_see_the_bias_of_an_output_layer_and_answers_take_no_copy_of_it(make_checkpoint, monkeypatch):
    folder, reference = make_checkpoint("phimoe")
    model, ids = load_model(folder), torch.randint(0, 101, (2, 20), generator=torch.Generator().manual_seed(1))
    labels = F.pad(ids[:, 1:], (0, 1), value=-100)
    loss = linear_cross_entropy(model(ids, return_hidden=True), model.output_weight, labels, chunk_tokens=16)
    expected = F.cross_entropy(reference(ids).logits.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    for own, theirs in ((model.lm_head.weight, reference.lm_head.weight), (model.lm_head.bias, reference.lm_head.bias)):
        torch.testing.assert_close(own.grad, theirs.grad, atol=1e-5, rtol=1e-4)

    with pytest.raises(ValueError, match="lm_head in lora.targets is not supported for an output layer with a bias"):
        apply_lora(model, LoRAConfig(targets=["lm_head"]))
    monkeypatch.setattr(
        Decoder, "output_weight", property(lambda _: pytest.fail("a copy of the output layer was made"))
    )
    assert len(sample(model, [[5, 17], [9]], Sampling(4), cache_gib=0.1)) == 2


def test_the_multiplier_of_embeddings_is_rounded_as_it_was_in_training(make_checkpoint):
    """sqrt(48) = 6.928 is 6.9375 in bfloat16."""
    folder, reference = make_checkpoint("gemma", dtype=torch.bfloat16)
    ids, embedded = token_ids(2, 9), []
    model = load_model(folder, dtype=torch.bfloat16)
    model.layers[0].register_forward_pre_hook(lambda layer, args: embedded.append(args[0]))
    model(ids)
    assert torch.equal(embedded[0], reference.model.embed_tokens(ids))


def test_boundaries_of_another_batch_are_refused(make_checkpoint):
    model = load_model(make_checkpoint("llama")[0])
    with pytest.raises(ValueError, match="has a document longer than a row of 10 tokens"):
        model(token_ids(2, 10), cu_seqlens=torch.tensor([0, 11, 20], dtype=torch.int32))
    with pytest.raises(ValueError, match=r"or does not end with the batch, at 20"):
        model(token_ids(2, 10), cu_seqlens=torch.tensor([0, 10, 19], dtype=torch.int32))


def test_inputs_that_the_model_does_not_read_are_refused(make_checkpoint):
    model, ids = load_model(make_checkpoint("qwen2")[0]), token_ids(1, 5)
    assert torch.equal(model(ids, images=None), model(ids))
    with pytest.raises(ValueError, match="images are not supported: the model was loaded without its vision tower"):
        model(ids, images=Images(ids, (), ids[0], ids[0]))
    with pytest.raises(ValueError, match="the decoder has no input postions. Did you mean 'positions'"):
        model(ids, postions=ids)


def test_layers_keep_neither_scores_nor_float32_copies_for_backward(make_checkpoint):
    model = load_model(make_checkpoint("llama")[0], dtype=torch.bfloat16)
    hidden = torch.randn(1, 256, 48, dtype=torch.bfloat16, requires_grad=True)
    cos, sin = model.rotary[model.config.rotations[0]](torch.arange(256)[None], torch.bfloat16)
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.layers[0](hidden, Pass(cos, sin, torch.tensor([0, 100, 256], dtype=torch.int32)))
    parameters = {p.data_ptr() for p in model.parameters()} | {cos.data_ptr(), sin.data_ptr()}
    activations = [tensor for pointer, tensor in kept.items() if pointer not in parameters]
    # The inputs of both norms, what they give, queries and what is attended; keys and values; the gate, the
    # up-projection and their product. In float32: a number a token for each norm.
    assert sum(t.numel() for t in activations if t.dtype == torch.bfloat16) <= 256 * (6 * 48 + 2 * 16 + 3 * 80)
    assert sum(t.numel() for t in activations if t.dtype == torch.float32) <= 2 * 256


@pytest.mark.long
# gemma2 with sinks has all options of attention. The C++ compiler takes minutes, so generated code is a long test.
@pytest.mark.parametrize(
    ("case", "backend"), [pytest.param("qwen2", "inductor", marks=pytest.mark.long), ("gemma2", "aot_eager")]
)
def test_a_compiled_checkpointed_layer_has_the_same_gradients(make_checkpoint, case, backend):
    config = load_model(make_checkpoint(case, num_hidden_layers=1)[0]).config
    config = replace(config, attention_sinks=case == "gemma2", initializer_range=0.2)

    def build():
        torch.manual_seed(0)
        return build_decoder(config)

    ids = token_ids(2, 40)
    cu_seqlens = torch.tensor([0, 13, 40, 80], dtype=torch.int32)
    grads = []
    for compiled in (False, True):
        model = build()
        if compiled:
            torch.compiler.reset()
            torch._dynamo.utils.counters.clear()
            layer = model.layers[0]
            plain = layer.forward
            layer.forward = lambda *args, plain=plain: checkpoint(plain, *args, use_reentrant=False)
            layer.compile(fullgraph=True, backend=backend)
        loss = next_token_loss(model(ids, cu_seqlens=cu_seqlens), ids) + next_token_loss(model(ids), ids)
        loss.backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    samples = sample(model, [[1, 2, 3], [4]], Sampling(12))
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, atol=1e-5, rtol=1e-4, msg=name)
    assert samples == sample(build(), [[1, 2, 3], [4]], Sampling(12))


@pytest.mark.first(1)
@pytest.mark.parametrize("case", ["qwen2", "gemma3_text"])
def test_random_weights_are_drawn_as_transformers_draws_them(make_checkpoint, case):
    folder, _ = make_checkpoint(case, hidden_size=192, initializer_range=0.05)
    torch.manual_seed(0)
    model = build_decoder(load_model(folder).config, dtype=torch.bfloat16)
    reference = type(make_checkpoint(case, hidden_size=192)[1])
    config = reference.config_class.from_pretrained(folder)
    expected = dict(reference(config).named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.bfloat16
        torch.testing.assert_close(parameter.float().mean(), expected[name].mean(), atol=5e-3, rtol=0.0, msg=name)
        torch.testing.assert_close(parameter.float().std(), expected[name].std(), atol=0.0, rtol=0.05, msg=name)


def test_layers_that_share_keys_and_have_inputs_are_checkpointed_as_others(make_checkpoint):
    folder, _ = make_checkpoint("gemma4_text")
    plain, checkpointed, ids = load_model(folder), load_model(folder), token_ids(2, 40)
    assert checkpoint_layers(checkpointed, every=2) == 3
    for model in (plain, checkpointed):
        next_token_loss(model(ids), ids).backward()
    for expected, found in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        assert torch.equal(expected.grad, found.grad)


@torch.no_grad()
@pytest.mark.parametrize("case", ["gpt2", "opt"])
def test_a_text_beyond_the_learned_positions_is_refused(make_checkpoint, case):
    """Packed documents restart at the first position, so their row may be longer."""
    model = load_model(make_checkpoint(case, max_position_embeddings=16)[0])
    ids, halves = torch.arange(34)[None], torch.tensor([0, 16, 32], dtype=torch.int32)
    packed = model(ids[:, :32], cu_seqlens=halves)
    torch.testing.assert_close(packed.view(2, 16, -1), model(ids[:, :32].view(2, 16)), atol=1e-5, rtol=1e-5)
    refused = "longer than 16 tokens, and the model has embeddings of 16 positions"
    with pytest.raises(ValueError, match=refused):
        model(ids[:, :17])
    with pytest.raises(ValueError, match=refused):
        sample(model, [ids[0, :12].tolist()], Sampling(8))
