"""Generation compared with transformers' greedy search, alone and in batches, and with reference draws."""

import base64
import gc
import random
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

from lean_ft.generation import Sampling, decoding, sample, sample_steps
from lean_ft.models import build_decoder, load_model
from lean_ft.models.families import FAMILIES
from lean_ft.models.families.gemma import Gemma2
from lean_ft.models.moe import MixtureOfExperts
from lean_ft.peft import apply_lora
from lean_ft.quantize import torchao_config
from lean_ft.settings import LoRAConfig
from tests.generation.plain_draws import samples

PROMPTS = [[5, 17, 3], [9], [44, 2, 71, 90, 13, 8, 60], [1, 2, 3, 4]]


def greedy(model, prompts, max_new_tokens: int, **settings) -> list[list[int]]:
    return [answer.ids for answer in sample(model, prompts, Sampling(max_new_tokens, **settings))]


def test_empty_prompts_are_refused_and_no_prompts_or_tokens_give_nothing(make_checkpoint):
    model = load_model(make_checkpoint("llama")[0])
    assert sample(model, [], Sampling(5)) == []
    assert greedy(model, [[1], [2, 3]], 0) == [[], []]
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        sample(model, [[1], []], Sampling(1))


@pytest.mark.first
@pytest.mark.parametrize(("case", "places"), [("llama", (6, 2)), ("deepseek_v3", (0, 4))])
def test_rows_end_with_the_first_of_several_stop_ids_and_leave_the_batch(make_checkpoint, case, places):
    model = load_model(make_checkpoint(case)[0])
    free = greedy(model, PROMPTS, 20)
    stops = {free[0][places[0]], free[3][places[1]]}
    ends = [next((i + 1 for i, token in enumerate(tokens) if token in stops), 20) for tokens in free]
    assert min(ends) < 20 and len(set(ends)) > 2
    widths = []
    model.register_forward_pre_hook(lambda model, args: widths.append(args[0].shape))
    found = sample(model, PROMPTS, Sampling(20, stop_ids=frozenset(stops)))
    assert [answer.ids for answer in found] == [tokens[:end] for tokens, end in zip(free, ends, strict=True)]
    assert [answer.ended for answer in found] == [
        tokens[end - 1] in stops for tokens, end in zip(free, ends, strict=True)
    ]
    assert [rows for rows, _ in widths[1:]] == [sum(end > n for end in ends) for n in range(1, max(ends))]


def test_what_is_drawn_depends_on_seed_prompt_sample_and_position_alone(make_checkpoint):
    """Draws equal the reference without a cache, for any batch, order, cache and early stops."""
    folder, reference = make_checkpoint("qwen2", num_hidden_layers=3)
    model = load_model(folder)
    asked = [(prompt, number) for prompt in PROMPTS for number in range(2)]
    expected = {
        (tuple(prompt), number): samples(lambda ids: reference(ids).logits, prompt, 10, 1.4, seed=7, sample=number)
        for prompt, number in asked
    }
    assert len({tuple(tokens) for tokens in expected.values()}) == len(asked)
    stop_ids = frozenset(range(0, 101, 17))
    for trial in range(6):
        mates = random.Random(trial).sample(asked, random.Random(trial).randint(1, len(asked)))
        prompts, numbers = [prompt for prompt, _ in mates], [number for _, number in mates]
        row_gib = model.cache_bytes(1, 7 + 10) / 2**30
        stops = stop_ids if trial % 2 else frozenset()
        sampling = Sampling(10 if trial < 4 else 6, 1.4, seed=7, stop_ids=stops)
        found = sample(
            model, prompts, sampling, numbers=numbers, cache_gib=[None, 1 * row_gib, 3.5 * row_gib][trial % 3]
        )
        for (prompt, number), answer in zip(mates, found, strict=True):
            whole = expected[tuple(prompt), number][: sampling.max_new_tokens]
            end = next((i + 1 for i, token in enumerate(whole) if token in stops), len(whole))
            assert answer.ids == whole[:end]
    assert sample(model, PROMPTS, Sampling(10, 1.4, seed=8)) != sample(model, PROMPTS, Sampling(10, 1.4, seed=7))


@pytest.mark.first
@pytest.mark.parametrize("case", ["qwen3_moe_some_layers", "gpt_oss", "gemma4_text_experts"])
def test_recorded_experts_are_those_of_a_pass_over_the_whole_text(make_checkpoint, case):
    """Also for rows that wait, that end early, and that move to other places of the cache."""
    model = load_model(make_checkpoint(case)[0]).double()
    prompts, sampling = [*PROMPTS, *PROMPTS], Sampling(9, 1.4, seed=7, stop_ids=frozenset(range(0, 101, 9)))
    answers = sample(model, prompts, sampling, cache_gib=2.5 * model.cache_bytes(1, 16) / 2**30, records_experts=True)
    assert len({len(answer.ids) for answer in answers}) > 2
    routers = [getattr(layer, "mixture", None) or layer.mlp for layer in model.layers]
    routers = [getattr(one, one.config.router_name) for one in routers if isinstance(one, MixtureOfExperts)]
    logits: list[torch.Tensor] = []
    for router in routers:
        router.register_forward_hook(lambda router, args, found: logits.append(found))
    for prompt, answer in zip(prompts, answers, strict=True):
        logits.clear()
        with torch.no_grad():
            model(torch.tensor([prompt + answer.ids[:-1]]))
        expected = torch.cat([found.topk(model.mixture.experts_per_token).indices + 1 for found in logits], -1)
        recorded = np.frombuffer(base64.b64decode(answer.experts), np.int16).reshape(
            len(prompt) + len(answer.ids) - 1, -1
        )
        assert recorded.tolist() == expected.tolist()
    assert sample(model, prompts[:1], sampling)[0].experts == ""


def test_a_prompt_is_read_once_for_all_its_samples_and_rows_that_wait_take_the_place_of_those_that_end(make_checkpoint):
    model, read, caches = load_model(make_checkpoint("llama")[0]), [], []
    model.register_forward_pre_hook(lambda model, args: read.append(args[0].shape))
    made = model.new_cache
    model.new_cache = lambda *shape: caches.append(shape[:2]) or made(*shape)
    prompts = [PROMPTS[2]] * 5 + [PROMPTS[0]] * 2 + [PROMPTS[3]]
    whole = sample(model, prompts, Sampling(4, 1.0))
    assert (read.pop(0), caches.pop(0)) == ((3, 7), (8, 11)) and set(read) == {(8, 1)}
    read.clear()
    gib = model.cache_bytes(3, 11) / 2**30
    by_three = sample(model, prompts, Sampling(4, 1.0), cache_gib=gib)
    assert [answer.ids for answer in by_three] == [answer.ids for answer in whole]
    assert caches == [(3, 11)]
    assert read == [(1, 7), *[(3, 1)] * 3, (2, 7), *[(3, 1)] * 3, (1, 3), *[(2, 1)] * 3]
    stops = Sampling(4, 1.0, stop_ids=frozenset(answer.ids[i % 3] for i, answer in enumerate(whole)))
    expected = sample(model, prompts, stops)
    rows = decoding.running_rows(prompts, stops, None)
    widths = [len(tokens) for tokens in decoding.Decoding(model, rows, stops, decoding.DecodingOptions(room=3)).steps()]
    assert [row.completion.ids for row in rows] == [answer.ids for answer in expected]
    assert len({len(answer.ids) for answer in expected}) > 1 and sum(width < 3 for width in widths) < 4
    with pytest.raises(ValueError, match="the KV cache of one completion takes 0.00 GiB at 11 tokens"):
        sample(model, prompts, Sampling(4), cache_gib=1e-9)


def test_the_same_prompts_are_samples_of_one_and_rows_come_longest_first():
    assert decoding.sample_numbers([[1, 2], [3], [1, 2], [1, 2], [3]]) == [0, 0, 1, 2, 1]
    lengths = [3, 9, 1, 4, 4]
    batches = list(decoding.longest_first(lengths, 8))
    assert batches == [[1], [3, 4], [0, 2]]  # a row longer than the limit is alone


def test_stop_texts_end_an_answer_wherever_tokens_are_cut(make_checkpoint):
    model = load_model(make_checkpoint("llama")[0])

    def decode(ids):
        return "".join(f"<{token}>" for token in ids)

    (free,) = greedy(model, PROMPTS[:1], 12)
    stop = decode(free[4:6])[1:-2]  # the end of one token and the beginning of the next
    end = next(n for n in range(1, 13) if stop in decode(free[:n]))
    (found,) = sample(model, PROMPTS[:1], Sampling(12, stop_texts=("nowhere", stop)), decode=decode)
    assert (found.ids, found.ended) == (free[:end], True)
    with pytest.raises(ValueError, match="stop_texts need `decode`"):
        sample(model, PROMPTS, Sampling(12, stop_texts=("x",)))


def test_the_cache_is_freed_without_a_garbage_collection(make_checkpoint):
    model, caches = load_model(make_checkpoint("llama")[0]), []
    made = model.new_cache

    def new_cache(*shape):
        caches.append(weakref.ref(cache := made(*shape)))
        return cache

    model.new_cache = new_cache
    gc.disable()
    try:
        sample(model, PROMPTS, Sampling(4, 1.0))
        steps = sample_steps(model, PROMPTS, Sampling(4, 1.0))
        next(steps)
        steps.close()
        assert [cache() for cache in caches] == [None, None]
    finally:
        gc.enable()


def test_logits_that_are_not_finite_end_it_with_a_reason(make_checkpoint):
    model = load_model(make_checkpoint("llama")[0])
    with torch.no_grad():
        model.output_weight[3] = float("nan")
    for temperature in (0.0, 1.0):
        with pytest.raises(FloatingPointError, match="the logits after token 7 are not finite"):
            sample(model, PROMPTS[2:3], Sampling(4, temperature))


@torch.no_grad()
def test_a_cache_goes_on_from_any_point(make_checkpoint):
    folder, reference = make_checkpoint("qwen2")
    model = load_model(folder)
    ids = torch.randint(0, 101, (2, 30), generator=torch.Generator().manual_seed(0))
    expected = reference(ids).logits
    cache = model.new_cache(batch_size=2, capacity=30)
    with torch.enable_grad(), pytest.raises(ValueError, match="keeps no gradients"):
        model(ids, cache=cache)
    parts = [model(ids[:, a:b], cache=cache) for a, b in ((0, 11), (11, 12), (12, 30))]
    torch.testing.assert_close(torch.cat(parts, 1), expected, atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="holds 30 positions; 30 are used and 1 more"):
        model(ids[:, :1], cache=cache)
    with pytest.raises(ValueError, match="cannot be combined with cu_seqlens or positions"):
        model(ids, cache=cache, positions=torch.zeros_like(ids))
    with pytest.raises(ValueError, match="lengths need a cache"):
        model(ids, lengths=torch.tensor([30, 12]))


@pytest.mark.first(2)
@torch.no_grad()
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_sinks_windows_and_caps_hold_with_a_cache(make_checkpoint, window, softcap):
    config = load_model(make_checkpoint("llama")[0]).config
    layers = tuple(replace(layer, window=window) for layer in config.layers)
    capped = {"parts": FAMILIES["gemma2"].parts, "own": Gemma2(softcap)}
    config = replace(config, layers=layers, attention_sinks=True, initializer_range=0.3, **capped)
    torch.manual_seed(0)
    model = build_decoder(config)
    ids = torch.randint(0, 101, (2, 20), generator=torch.Generator().manual_seed(0))
    expected = model(ids)
    cache = model.new_cache(batch_size=2, capacity=20)
    parts = [model(ids[:, a:b], cache=cache) for a, b in ((0, 7), (7, 8), (8, 15), (15, 20))]
    torch.testing.assert_close(torch.cat(parts, 1), expected, atol=1e-4, rtol=1e-4)
    for layer in model.layers:
        layer.self_attn.sinks.fill_(-1e9)
    assert (model(ids) - expected).abs().max() > 1e-2


@pytest.mark.first
@torch.no_grad()
@pytest.mark.parametrize("kind", ["plain", "window", "lora", "dora", "int8"])
def test_new_tokens_attend_to_latents_as_they_lie_in_the_cache(make_checkpoint, kind):
    """Cached latents are not expanded to keys or values, and weights updated between two calls are used in the next."""
    folder, reference = make_checkpoint("deepseek_v3")
    model, said = load_model(folder), reference.config
    torch.manual_seed(0)
    if kind == "window":
        layers = tuple(replace(layer, window=5) for layer in model.config.layers)
        model = build_decoder(replace(model.config, layers=layers, initializer_range=0.2))
    elif kind == "int8":
        pytest.importorskip("torchao.quantization").quantize_(
            model, torchao_config(kind, 32), filter_fn=lambda _, name: name.endswith("kv_b_proj")
        )
    elif kind != "plain":
        apply_lora(model, LoRAConfig(rank=3, alpha=3.0, targets=["kv_b_proj"], dora=kind == "dora"))
    made, token_bytes = [], (said.kv_lora_rank + said.qk_rope_head_dim) * 4
    for layer in model.layers:
        layer.self_attn.kv_b_proj.register_forward_hook(lambda *call: made.append(call[1][0].shape[:-1]))
    ids = torch.randint(0, 101, (2, 30), generator=torch.Generator().manual_seed(0))
    before = 0.0
    for _ in range(2):
        for layer in model.layers:
            trained = [p for p in layer.self_attn.kv_b_proj.parameters() if p.requires_grad]
            assert trained or kind == "int8"
            for parameter in trained:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        expected, cache = model(ids), model.new_cache(batch_size=2, capacity=30)
        assert kind == "int8" or (expected - before).abs().max() > 0.1
        first = model(ids[:, :11], cache=cache)
        made.clear()
        parts = [first, *(model(ids[:, a:b], cache=cache) for a, b in ((11, 12), (12, 29), (29, 30)))]
        torch.testing.assert_close(torch.cat(parts, 1), expected, atol=1e-5 * expected.abs().max().item(), rtol=1e-5)
        assert set(made) <= {(said.kv_lora_rank,)} and bool(made) == (kind in ("lora", "dora", "int8"))
        for (kept,) in cache.keys.values():
            assert kept.nbytes == 2 * 30 * token_bytes
        before = expected
    assert model.cache_bytes(2, 30) == 2 * 30 * 3 * token_bytes


def test_texts_are_read_again_where_the_frequencies_change_and_nowhere_else(make_checkpoint):
    for case, lengths in (("llama_longrope", [20, 25]), ("llama_dynamic_rope", [20, 25, 26, 27]), ("llama", [20])):
        model, read = load_model(make_checkpoint(case)[0]), []
        model.register_forward_pre_hook(lambda model, args, read=read: read.append(args[0].shape[1]))
        sample(model, [list(range(20)), [1]], Sampling(8))
        assert [length for length in read if length > 1] == lengths


@pytest.mark.parametrize(("prompt", "new", "said_before"), [(3, 6, None), (3, 9, 7), (9, 3, 1)])
def test_a_text_that_outgrows_the_context_is_said_once(make_checkpoint, capsys, prompt, new, said_before):
    folder, _ = make_checkpoint("llama", max_position_embeddings=8)
    decoding._say_too_long.cache_clear()
    steps, said = sample_steps(load_model(folder), [[5] * prompt, [7]], Sampling(new)), []
    for step, _ in enumerate(steps, start=1):
        said += [step] * capsys.readouterr().out.count("longer than the model's context of 8 tokens")
    assert said == ([] if said_before is None else [said_before])
