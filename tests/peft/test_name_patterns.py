"""Patterns of names match as PEFT's do, in a bounded number of steps."""

import random
import time

import pytest
from peft.utils.other import get_pattern_key

from lean_ft.peft import name_patterns
from lean_ft.peft.name_patterns import NamePatterns

NAMES = [
    *(f"model.layers.{i}.{part}" for i in (0, 1, 7, 11) for part in ("self_attn.q_proj", "mlp.up_proj",
        "mlp.down_proj")),
    *("model.layers.1.mlp.experts.1.gate_proj", "model.layers.1.mlp.experts.12.gate_proj", "model.layers.1xmlp",
        "lm_head"),
    *("model.layers.1.mlp.experts.gate_up_proj", "model.language_model.layers.1.self_attn.q_proj",
        "transformer.h.1.attn.c_attn"),
]  # fmt: skip
PATTERNS = [
    # A dot matches any character, and an escaped one a dot.
    *("q_proj", "layers.1.mlp", r"layers\.1\.mlp", "layers.1.mlp.up_proj", "q.proj", ".up_proj", "_proj", "layers.11",
        ""),
    *("^model.layers.1.self_attn.q_proj", r"^model\.layers\.1\.mlp\.up_proj$", "^self_attn.q_proj", "q_proj$",
        "^lm_head"),
    *(r".*\.q_proj", r".*layers\.1\..*proj", r"layers\.\d\..*", r"layers\.\d+\.mlp.*",
        r"layers\.[01]\.mlp\.(up|down)_proj"),
    *("(q_proj|up_proj)", "q_proj|lm_head", r"(?:.*)\.[^.]+", r"model\.(layers|language_model)\..*",
        r"experts\.\d{2}\.\w+"),
    *(r"layers\.1{2}\..*", r"layers\.(1|11)\.mlp\.down_proj", ".*", ".+proj", "x?lm_head", r"[a-z_]+\.\d\.[\w.-]+",
        r"(a|)lm_head"),
    *(r"experts\.\d{1,2}\.gate_proj", r"experts\.\d{2,}\.gate_proj", r"l.*?d", r"(model\.)?(layers\.)*1\.mlp\..*",
        r"q\_proj", "1.mlp$"),
]  # fmt: skip


def test_each_pattern_matches_the_names_that_it_matches_in_peft():
    matches = 0
    for pattern in PATTERNS:
        for name in NAMES:
            expected = (
                get_pattern_key([pattern], name)
                if get_pattern_key([pattern], name) != name or pattern == name
                else None
            )
            assert NamePatterns({pattern: pattern}).find(name, None) == expected, (pattern, name)
            matches += expected is not None
    assert 100 < matches < len(PATTERNS) * len(NAMES) / 2


@pytest.mark.long
def test_the_first_of_several_patterns_counts_as_in_peft():
    generator = random.Random(0)
    for _ in range(300):
        patterns = generator.sample(PATTERNS, generator.randint(1, 8))
        found = NamePatterns({pattern: pattern for pattern in patterns})
        for name in NAMES:
            assert found.find(name, name) == get_pattern_key(patterns, name), (patterns, name)


@pytest.mark.parametrize("pattern", [
    "(", ")", "a)", "*a", "a**", "a*+", "[", "[z-a]", "[^]", r"\b", r"(a)\1", "(?i)a", "(?=a)", "(?P<x>a)", "a{2",
    "a{3,2}", "a{3}{2}",
    "^*", "\\", "(" * 11 + "a" + ")" * 11,
])  # fmt: skip
def test_what_is_not_supported_is_refused(pattern):
    with pytest.raises(ValueError, match="cannot be read as a regular expression from character"):
        NamePatterns({"q_proj": 1, pattern: 2})


def test_hostile_patterns_end_soon(monkeypatch):
    name, began = "a" * 200, time.process_time()
    for pattern in ("(a+)+x", "(a*)*(a*)*(a*)*x", "((a|aa)+)+x", "(.*)*(.*)*(.*)*x", "((a{999}){999}){999}x"):
        assert NamePatterns({pattern: 1}).find(name, 0) == 0
    with pytest.raises(ValueError, match="more than 4,194,304 characters"):
        NamePatterns({f"{i:09}": 1 for i in range(500_000)})
    monkeypatch.setattr(name_patterns, "_MAX_STEPS", 2**16)
    for patterns in ({f"(a{{9}}|b)*x{i}": 1 for i in range(100)}, {"." * i + "a": 1 for i in range(100)}):
        found = NamePatterns(patterns)
        with pytest.raises(ValueError, match="take too long to match"):
            [found.find(f"{name}{i}", 0) for i in range(10_000)]
    assert time.process_time() - began < 10


def test_a_pattern_per_layer_is_looked_up():
    names = [f"model.layers.{i}.mlp.experts.{j}.gate_proj" for i in range(48) for j in range(64)]
    patterns, began = NamePatterns({f"^{name}": i for i, name in enumerate(names)}), time.process_time()
    assert [patterns.find(name, -1) for name in names] == list(range(len(names)))
    assert time.process_time() - began < 5
