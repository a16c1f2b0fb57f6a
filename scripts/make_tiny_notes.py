"""Write the rows of `tiny/embed` and `tiny/rerank`: notes about invented people, and questions that one note answers.

    python scripts/make_tiny_notes.py [FOLDER]

Each note is about one person: a name, a trade, a town and a good. A question names the person or the trade, and the
town; no other person shares both. No name and no pair of a trade and a town of a held-out note is in a
training row. A wrong passage is about someone with the same trade, town or family name.
"""

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

DATA = Path(__file__).resolve().parents[1] / "lean_ft/assets/tiny/data"
NUM_TRAINING, NUM_HELD_OUT = 3000, 1000

_words = str.split
FIRST = _words("Ana Bela Dora Elin Fara Gita Hana Ines Jora Kira Lena Mira Nila Olga Petra Runa Sila Tara Una Vera")
FIRST += _words(
    "Arno Bren Carl Davin Emil Falk Goran Hugo Ivan Joren Karl Lars Milan Nico Oskar Paul Ralf Sven Timo Ulf"
)
HEADS = _words("Bal Bren Cor Dal El Fen Gal Hal Jor Kal Lor Mar Nor Pel Ros Sol Tam Ul Ver Zan")
MIDDLES = _words("a e i o u")
ENDS = _words("mann berg stein wick lund sen")
TRADES = {
    "keeps bees": "honey", "bakes bread": "bread", "carves wood": "spoons", "mends nets": "rope", "grows olives": "oil",
    "paints boats": "boats", "makes cheese": "cheese", "repairs clocks": "clocks", "weaves wool": "cloth",
    "picks apples": "apples", "catches fish": "fish", "blows glass": "bottles", "prints books": "books",
    "raises goats": "milk", "bends iron": "nails", "shapes clay": "bowls", "sews coats": "coats",
    "tunes pianos": "pianos",
    "digs salt": "salt", "plants roses": "roses",
}  # fmt: skip
TOWN_ENDS = _words("burg ton vale ford haven")
TOWNS = [head + middle + end for head in HEADS for middle in MIDDLES for end in TOWN_ENDS]


class Person(NamedTuple):
    first: str
    family: str
    trade: str
    town: str

    @property
    def name(self) -> str:
        return f"{self.first} {self.family}"


def people(rng: random.Random) -> Iterator[Person]:
    """Yield people without end. No two have one name, or one trade in one town."""
    names, places = set[str](), set[tuple[str, str]]()
    families = [head + middle + end for head in HEADS for middle in MIDDLES for end in ENDS]
    while True:
        one = Person(rng.choice(FIRST), rng.choice(families), rng.choice(list(TRADES)), rng.choice(TOWNS))
        if one.name not in names and (one.trade, one.town) not in places:
            names.add(one.name)
            places.add((one.trade, one.town))
            yield one


def note(one: Person, rng: random.Random) -> str:
    good = TRADES[one.trade]
    return rng.choice(
        [
            f"{one.name} lives in {one.town} and {one.trade}.",
            f"In {one.town}, {one.name} {one.trade} and sells {good}.",
            f"{one.name} {one.trade}. You can buy {good} in {one.town}.",
            f"People of {one.town} know {one.name}, who {one.trade}.",
        ]
    )


def question(one: Person, rng: random.Random) -> str:
    verb, thing = one.trade.split()
    return rng.choice(
        [
            f"Who {one.trade} in {one.town}?",
            f"I look for someone in {one.town} who {one.trade}.",
            f"What does {one.name} of {one.town} do?",
            f"Tell me about {one.name} in {one.town}.",
            f"{thing} and {one.town}: who {verb} them?",
        ]
    )


def row(one: Person, alike: dict[str, list[Person]], rng: random.Random) -> dict[str, str]:
    others = [other for fact in one[1:] for other in alike[fact] if other != one]
    return {
        "query": question(one, rng),
        "positive": note(one, rng),
        "negative": note(rng.choice(others), rng),
    }


def main(folder: Path = DATA) -> None:
    rng = random.Random(11)
    found = people(rng)
    for part, number in (("train", NUM_TRAINING), ("validation", NUM_HELD_OUT)):
        some = [next(found) for _ in range(number)]
        alike = dict[str, list[Person]]()  # by family name, trade and town
        for one in some:
            for fact in one[1:]:
                alike.setdefault(fact, []).append(one)
        file = folder / f"notes_{part}.jsonl"
        file.write_text("".join(json.dumps(row(one, alike, rng)) + "\n" for one in some))
        print(f"{file.name}: {number} rows")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
