"""Generation against transformers' greedy search, alone and in batches, and sampling against the distribution."""

from dataclasses import replace

import pytest
import torch

from lean_ft.models import build_decoder, generate, generate_steps, generation, load_model

PROMPTS = [[5, 17, 3], [9], [44, 2, 71, 90, 13, 8, 60], [1, 2, 3, 4]]


@pytest.mark.parametrize("case", ["llama_llama3_rope", "llama_biases", "qwen2"])
def test_greedy_tokens_equal_transformers_and_do_not_depend_on_the_batch(make_checkpoint, case):
    folder, reference = make_checkpoint(case)
    model = load_model(folder)
    settings = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = [reference.generate(torch.tensor([p]), **settings)[0, len(p) :].tolist() for p in PROMPTS]
    assert len({tuple(tokens) for tokens in expected}) > 1
    assert generate(model, PROMPTS, max_new_tokens=24) == expected
    assert [generate(model, [p], max_new_tokens=24)[0] for p in PROMPTS] == expected
    assert generate(model, torch.tensor([PROMPTS[3]] * 2), max_new_tokens=24) == [expected[3]] * 2


def test_rows_end_with_the_first_stop_id(make_checkpoint):
    model = load_model(make_checkpoint("llama")[0])
    free = generate(model, PROMPTS, max_new_tokens=20)
    stop = free[0][6]
    expected = [tokens[: tokens.index(stop) + 1] if stop in tokens else tokens for tokens in free]
    assert min(map(len, expected)) < 20
    assert generate(model, PROMPTS, max_new_tokens=20, stop_ids=[stop]) == expected


@pytest.mark.parametrize(
    ("settings", "allowed"),
    [({}, 101), ({"top_k": 5}, 5), ({"top_p": 0.5}, None), ({"top_k": 1}, 1), ({"top_p": 1e-9}, 1)],
    ids=str,
)
def test_samples_follow_the_distribution(make_checkpoint, settings, allowed):
    folder, reference = make_checkpoint("llama")
    model = load_model(folder)
    temperature, count = 1.5, 4000
    probabilities = (reference(torch.tensor([PROMPTS[2]])).logits[0, -1] / temperature).softmax(-1)
    ordered, order = probabilities.sort(descending=True)
    if allowed is None:
        allowed = int((ordered.cumsum(-1) < settings["top_p"]).sum()) + 1
    expected = torch.zeros(101).index_copy(0, order[:allowed], ordered[:allowed] / ordered[:allowed].sum())

    generator = torch.Generator().manual_seed(3)
    tokens = generate(model, [PROMPTS[2]] * count, 1, temperature=temperature, generator=generator, **settings)
    counts = torch.bincount(torch.tensor(tokens).flatten(), minlength=101)
    assert counts[expected == 0].sum() == 0
    deviation = (expected * (1 - expected) / count).sqrt()
    assert ((counts / count - expected).abs() <= 4.5 * deviation + 1e-6).all()
    again = torch.Generator().manual_seed(3)
    assert tokens == generate(model, [PROMPTS[2]] * count, 1, temperature=temperature, generator=again, **settings)


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
    with pytest.raises(ValueError, match="holds 30 positions; 30 are taken and 1 more"):
        model(ids[:, :1], cache=cache)
    with pytest.raises(ValueError, match="neither cu_seqlens nor positions"):
        model(ids, cache=cache, positions=torch.zeros_like(ids))
    with pytest.raises(ValueError, match="lengths go with a cache alone"):
        model(ids, lengths=torch.tensor([30, 12]))


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_sinks_windows_and_caps_hold_with_a_cache(make_checkpoint, window, softcap):
    config = load_model(make_checkpoint("llama")[0]).config
    layers = tuple(replace(layer, window=window) for layer in config.layers)
    config = replace(config, layers=layers, attention_softcap=softcap, attention_sinks=True, initializer_range=0.3)
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


def test_texts_are_read_again_where_the_frequencies_change_and_nowhere_else(make_checkpoint):
    for case, lengths in (("llama_longrope", [20, 25]), ("llama_dynamic_rope", [20, 25, 26, 27]), ("llama", [20])):
        model, read = load_model(make_checkpoint(case)[0]), []
        model.register_forward_pre_hook(lambda model, args, read=read: read.append(args[0].shape[1]))
        generate(model, [list(range(20)), [1]], max_new_tokens=8)
        assert [length for length in read if length > 1] == lengths


@pytest.mark.parametrize(("prompt", "new", "said_before"), [(3, 6, None), (3, 9, 7), (9, 3, 1)])
def test_a_text_that_outgrows_the_context_is_said_once(make_checkpoint, capsys, prompt, new, said_before):
    folder, _ = make_checkpoint("llama", max_position_embeddings=8)
    generation._say_too_long.cache_clear()
    steps, said = generate_steps(load_model(folder), [[5] * prompt, [7]], new), []
    for step, _ in enumerate(steps, start=1):
        said += [step] * capsys.readouterr().out.count("longer than the model's context of 8 tokens")
    assert said == ([] if said_before is None else [said_before])


def test_nothing_to_do_gives_nothing(make_checkpoint):
    model = load_model(make_checkpoint("llama")[0])
    assert generate(model, [], 5) == []
    assert generate(model, [[1], [2, 3]], 0) == [[], []]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompt_ids": [[1], []]}, "prompt 1 is empty"),
        ({"max_new_tokens": -1}, "max_new_tokens is -1"),
        ({"temperature": -0.5}, "temperature is -0.5"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(make_checkpoint, settings, message):
    model = load_model(make_checkpoint("llama")[0])
    with pytest.raises(ValueError, match=message):
        generate(model, **{"prompt_ids": [[1]], "max_new_tokens": 1, **settings})
