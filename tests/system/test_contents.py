"""What changed is named by file, setting and rank, and a hash is never shown."""

import re

import pytest

from lean_ft.system.contents import HASH, Content, Contents, Words, differences

TWO = [Content("a.jsonl", "1" * 32, 448), Content("b.jsonl", "2" * 32, 1)]


@pytest.mark.parametrize(
    ("now", "lines"),
    [
        (TWO, []),
        ([Content("moved/a.jsonl", "1" * 32, 448), TWO[1]], []),
        ([Content("a.jsonl", "3" * 32, 1453), TWO[1]], ["changed: a.jsonl (448 bytes then, 1,453 bytes now)"]),
        ([Content("a.jsonl", "3" * 32, 448), TWO[1]], ["changed: a.jsonl (the size is the same, 448 bytes)"]),
        ([TWO[1], Content("c.jsonl", "3" * 32, 2)], ["removed: a.jsonl", "added: c.jsonl"]),
        ([*TWO, TWO[0]], ["added: a.jsonl"]),
        (TWO[::-1], ["another order: a.jsonl then, where b.jsonl is now"]),
    ],
)
def test_files_are_named(now: list[Content], lines: list[str]) -> None:
    recorded = Contents.of(Contents(TWO).as_json())
    assert recorded.differences(Contents.of(Contents(now).as_json())) == lines


def test_many_files_are_counted() -> None:
    many = Contents(Content(f"{i}.txt", f"{i}", i) for i in range(1500))
    *named, last = Contents().differences(many)
    assert named == [f"added: {i}.txt" for i in range(10)] and last == "and 1,490 more"


@pytest.mark.parametrize("value", ["ab", [["a", "b"]], [["a", 1, 2]], [["a", "b", "c"]], [["a", "b", True]], {}])
def test_a_damaged_record_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="a name, a digest and a size"):
        Contents.of(value)


def test_values_without_hashes_and_unset_fields() -> None:
    ranks = Words("on rank 0", "on rank 1", "differs", "on rank 0 alone", "on rank 1 alone")
    rows = [f"/home/me/cache/rows/{'ab' * 16}.jsonl", f"/home/me/cache/rows/{'cd' * 16}.jsonl"]
    shown = [
        *differences("code", f"{HASH}1a", f"{HASH}2b"),
        *differences("data", Contents(TWO[:1]), Contents(TWO[1:]), ranks),
        *differences("data.source", *rows),
        *differences("data.source", rows[0], [{"path": "a.jsonl", "weight": 2, "split": None}]),
    ]
    assert shown == [
        "code: changed",
        "on rank 0 alone: a.jsonl",
        "on rank 1 alone: b.jsonl",
        "data.source: changed",
        'data.source: rows passed from Python then, [{"path": "a.jsonl", "weight": 2}] now',
    ]
    assert not re.search(r"[0-9a-f]{16}", "".join(shown))
