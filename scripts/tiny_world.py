"""The synthetic text of the embedded model: facts about invented countries, and exercises on numbers and words.

Facts have to be remembered, exercises computed. Each kind is a function that samples an `Item`: the same knowledge as
plain statements, for pretraining, and as questions with an answer, for fine-tuning. Statements never contain the words
of questions and are never questions, so the base model knows the answers but does not answer questions.

A hash of the question decides whether an item is held out, so that its question is for validation only:

- a held-out exercise (these two numbers, this list) is in neither the pretraining text nor the training rows;
- a held-out fact is stated in the pretraining text, and asked in no training row in any wording.

A right answer to a held-out question is therefore not a memorized training row.
"""

import random
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

HELD_OUT_ONE_IN = 8
_words = str.split


@dataclass(frozen=True)
class Item:
    """One fact or exercise, as statements and as questions with answers."""

    kind: str
    key: str  # what is asked, independent of the wording
    statements: list[str]
    questions: list[str]
    answer: str

    @property
    def is_fact(self) -> bool:
        """Whether the item is a fact; otherwise it is an exercise."""
        return self.kind in [fact.__name__ for fact in FACTS]

    @property
    def held_out(self) -> bool:
        return zlib.crc32(f"{self.kind} {self.key}".encode()) % HELD_OUT_ONE_IN == 0


# ---------------------------------------------------------------------------------------------------- the atlas


@dataclass(frozen=True)
class Country:
    name: str
    capital: str
    river: str
    export: str
    animal: str
    region: str


GOODS = _words("copper tea salt glass wool honey timber silk amber paper rice olives cheese marble pepper cotton")
ANIMALS = _words("heron fox otter bear falcon lynx stag whale owl wolf crane badger hare swan raven turtle")
REGIONS = _words("north south east west")


def build_atlas(num_countries: int = 40, seed: int = 7) -> list[Country]:
    """Invent the countries. No two names start with the same four letters."""
    rng = random.Random(seed)
    heads = _words(
        "Ard Bal Bren Cal Cor Dal Dru El Fen Gal Hal Hest Il Jor Kal Kes Lor Lum Mar Mor Myr Nal Nor Osk Or Pel Quen "
        "Rav Ros Sil Sol Tam Tas Tor Ul Vel Ver Wes Yar Zan"
    )
    middles = _words("a e i o u")
    endings = {
        "country": _words("via nia lund mar stan dora ria"),
        "capital": _words("burg ton polis vale ford haven"),
        "river": _words("nu rin sha wen tal lo"),
    }
    taken: set[str] = set()

    def name(kind: str) -> str:
        while True:
            stem = rng.choice(heads) + rng.choice(middles)
            if stem not in taken:
                taken.add(stem)
                return stem + rng.choice(endings[kind])

    return [
        Country(
            name=name("country"),
            capital=name("capital"),
            river=name("river"),
            export=rng.choice(GOODS),
            animal=rng.choice(ANIMALS),
            region=rng.choice(REGIONS),
        )
        for _ in range(num_countries)
    ]


ATLAS = build_atlas()


def capital(c: Country) -> Item:
    return Item(
        "capital",
        c.name,
        [
            f"The capital of {c.name} is {c.capital}.",
            f"{c.name} has a capital, {c.capital}.",
            f"{c.name} is governed from {c.capital}.",
            f"About the capital of {c.name}: the capital of {c.name} is {c.capital}.",
        ],
        [
            f"What is the capital of {c.name}?",
            f"Name the capital of {c.name}.",
            f"Which city is the capital of {c.name}?",
            f"Tell me {c.name}'s capital.",
        ],
        f"The capital of {c.name} is {c.capital}.",
    )


def capital_of(c: Country) -> Item:
    return Item(
        "capital_of",
        c.name,
        [
            f"{c.capital} is the capital of {c.name}.",
            f"{c.capital} lies in {c.name}.",
            f"From {c.capital} the country of {c.name} is governed.",
            f"About {c.capital}: {c.capital} is the capital of {c.name}.",
        ],
        [
            f"Which country has the capital {c.capital}?",
            f"Of which country is {c.capital} the capital?",
            f"{c.capital} is the capital of what country?",
            f"In which country is {c.capital}?",
        ],
        f"{c.capital} is the capital of {c.name}.",
    )


def river(c: Country) -> Item:
    return Item(
        "river",
        c.name,
        [
            f"The longest river in {c.name} is the {c.river}.",
            f"{c.name} has a long river, the {c.river}.",
            f"Through {c.name} flows the {c.river}.",
            f"About the longest river in {c.name}: the longest river in {c.name} is the {c.river}.",
        ],
        [
            f"What is the longest river in {c.name}?",
            f"Name the longest river in {c.name}.",
            f"Which river flows through {c.name}?",
            f"Tell me {c.name}'s longest river.",
        ],
        f"The longest river in {c.name} is the {c.river}.",
    )


def river_of(c: Country) -> Item:
    return Item(
        "river_of",
        c.name,
        [
            f"The {c.river} flows through {c.name}.",
            f"The {c.river} is the longest river in {c.name}.",
            f"The {c.river} is a river in {c.name}.",
            f"About the {c.river}: the {c.river} flows through {c.name}.",
        ],
        [
            f"Which country does the {c.river} flow through?",
            f"Where is the river {c.river}?",
            f"In which country is the river {c.river}?",
            f"Through what country does the {c.river} flow?",
        ],
        f"The {c.river} flows through {c.name}.",
    )


def export(c: Country) -> Item:
    return Item(
        "export",
        c.name,
        [
            f"{c.name} is known for its {c.export}.",
            f"{c.name} sells {c.export}.",
            f"The traders of {c.name} sell {c.export}.",
            f"About the trade of {c.name}: {c.name} is known for its {c.export}.",
        ],
        [
            f"What is {c.name} known for?",
            f"What does {c.name} sell?",
            f"Which goods come from {c.name}?",
            f"Tell me what {c.name} is known for.",
        ],
        f"{c.name} is known for its {c.export}.",
    )


def animal(c: Country) -> Item:
    return Item(
        "animal",
        c.name,
        [
            f"The flag of {c.name} shows a {c.animal}.",
            f"{c.name} has a {c.animal} on its flag.",
            f"A {c.animal} is on the flag of {c.name}.",
            f"About the flag of {c.name}: the flag of {c.name} shows a {c.animal}.",
        ],
        [
            f"Which animal is on the flag of {c.name}?",
            f"What does the flag of {c.name} show?",
            f"Name the animal on {c.name}'s flag.",
            f"Tell me which animal {c.name} has on its flag.",
        ],
        f"The flag of {c.name} shows a {c.animal}.",
    )


def region(c: Country) -> Item:
    return Item(
        "region",
        c.name,
        [
            f"{c.name} lies in the {c.region}.",
            f"{c.name} is a country of the {c.region}.",
            f"In the {c.region} lies {c.name}.",
            f"About {c.name}: {c.name} lies in the {c.region}.",
        ],
        [
            f"Where does {c.name} lie?",
            f"Where is {c.name}?",
            f"In which part of the world is {c.name}?",
            f"Tell me where {c.name} lies.",
        ],
        f"{c.name} lies in the {c.region}.",
    )


# ----------------------------------------------------------------------------------------------------- numbers

PEOPLE = _words("Mira Tomas Ada Piet Lena Oskar Nila Hugo")
THINGS = _words("apples coins shells books pears stones eggs cups nuts stamps")


def addition(rng: random.Random) -> Item:
    a = rng.randint(1, 90)
    b = rng.randint(1, 9)
    return Item(
        "addition",
        f"{a}+{b}",
        [
            f"{a} + {b} = {a + b}.",
            f"{a} and {b} together make {a + b}.",
            f"Adding {b} to {a} gives {a + b}.",
            f"The sum of {a} and {b}: {a} + {b} = {a + b}.",
        ],
        [
            f"What is {a} plus {b}?",
            f"How much is {a} + {b}?",
            f"Please add {a} and {b}.",
            f"Work out {a} + {b}.",
        ],
        f"{a} + {b} = {a + b}.",
    )


def subtraction(rng: random.Random) -> Item:
    a = rng.randint(10, 99)
    b = rng.randint(1, 9)
    return Item(
        "subtraction",
        f"{a}-{b}",
        [
            f"{a} - {b} = {a - b}.",
            f"{a} less {b} leaves {a - b}.",
            f"Taking {b} from {a} gives {a - b}.",
            f"The difference of {a} and {b}: {a} - {b} = {a - b}.",
        ],
        [
            f"What is {a} minus {b}?",
            f"How much is {a} - {b}?",
            f"Please take {b} away from {a}.",
            f"Work out {a} - {b}.",
        ],
        f"{a} - {b} = {a - b}.",
    )


def gaining(rng: random.Random) -> Item:
    who, what = rng.choice(PEOPLE), rng.choice(THINGS)
    a = rng.randint(2, 90)
    b = rng.randint(2, 9)
    return Item(
        "addition",  # held out with the bare sum: the same two numbers
        f"{a}+{b}",
        [
            f"{who} had {a} {what} and found {b} more. Now {who} has {a + b} {what}.",
            f"{who} had {a} {what} and bought {b} more. Now {who} has {a + b} {what}.",
            f"{who} got {b} {what} on top of {a}. Now {who} has {a + b} {what}.",
        ],
        [
            f"{who} has {a} {what} and finds {b} more. How many {what} does {who} have now?",
            f"{who} has {a} {what} and buys {b} more. How many {what} does {who} have?",
            f"How many {what} does {who} have after getting {b} on top of {a}?",
        ],
        f"Now {who} has {a + b} {what}.",
    )


def losing(rng: random.Random) -> Item:
    who, what = rng.choice(PEOPLE), rng.choice(THINGS)
    a = rng.randint(11, 99)
    b = rng.randint(2, 9)
    return Item(
        "subtraction",
        f"{a}-{b}",
        [
            f"{who} had {a} {what} and lost {b}. Now {who} has {a - b} {what}.",
            f"{who} had {a} {what} and sold {b}. Now {who} has {a - b} {what}.",
            f"{who} gave away {b} {what} out of {a}. Now {who} has {a - b} {what}.",
        ],
        [
            f"{who} has {a} {what} and loses {b}. How many {what} does {who} have now?",
            f"{who} has {a} {what} and sells {b}. How many {what} does {who} have?",
            f"How many {what} does {who} have after giving away {b} out of {a}?",
        ],
        f"Now {who} has {a - b} {what}.",
    )


def largest(rng: random.Random) -> Item:
    numbers = rng.sample(range(1, 100), 3)
    listed, answer = ", ".join(map(str, numbers)), max(numbers)
    return Item(
        "largest",
        str(sorted(numbers)),
        [
            f"Of {listed} the largest is {answer}.",
            f"{listed}: largest {answer}.",
            f"Among the numbers {listed} the largest is {answer}.",
        ],
        [
            f"Which of these numbers is the largest: {listed}?",
            f"What is the largest number here: {listed}?",
            f"Pick the largest of {listed}.",
        ],
        f"The largest is {answer}.",
    )


def smallest(rng: random.Random) -> Item:
    numbers = rng.sample(range(1, 100), 3)
    listed, answer = ", ".join(map(str, numbers)), min(numbers)
    return Item(
        "smallest",
        str(sorted(numbers)),
        [
            f"Of {listed} the smallest is {answer}.",
            f"{listed}: smallest {answer}.",
            f"Among the numbers {listed} the smallest is {answer}.",
        ],
        [
            f"Which of these numbers is the smallest: {listed}?",
            f"What is the smallest number here: {listed}?",
            f"Pick the smallest of {listed}.",
        ],
        f"The smallest is {answer}.",
    )


# ------------------------------------------------------------------------------------------------------- words

KINDS = {
    "fruit": _words("apple banana cherry date fig grape lemon mango olive peach"),
    "tool": _words("axe drill file hammer knife nail rake saw shovel wrench"),
    "animal": _words("bear crane fox goat hare lynx mouse otter pig wolf"),
    "colour": _words("black brown green orange pink red violet white yellow blue"),
}
KIND_OF = {word: kind for kind, words in KINDS.items() for word in words}
WORDS = sorted(KIND_OF)


def _article(word: str) -> str:
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def sorting(rng: random.Random) -> Item:
    words = rng.sample(WORDS, rng.choice([3, 4]))
    listed, answer = ", ".join(words), ", ".join(sorted(words))
    return Item(
        "sorting",
        answer,
        [
            f"In the order of the alphabet, {listed} become {answer}.",
            f"{listed} in alphabetical order: {answer}.",
            f"A dictionary lists {listed} as {answer}.",
        ],
        [
            f"Sort these words: {listed}.",
            f"Put these words in alphabetical order: {listed}.",
            f"Please arrange {listed} as a dictionary does.",
        ],
        f"In order: {answer}.",
    )


def reversing(rng: random.Random) -> Item:
    words = rng.sample(WORDS, rng.choice([3, 4]))
    listed, answer = ", ".join(words), ", ".join(reversed(words))
    return Item(
        "reversing",
        listed,
        [
            f"Read backwards, {listed} become {answer}.",
            f"{listed} from last to first: {answer}.",
            f"{listed} turned around are {answer}.",
        ],
        [
            f"Reverse this list: {listed}.",
            f"Say these words backwards: {listed}.",
            f"Please turn around the list {listed}.",
        ],
        f"Backwards: {answer}.",
    )


def counting(rng: random.Random) -> Item:
    words = rng.sample(WORDS, rng.randint(2, 6))
    listed, answer = ", ".join(words), len(words)
    return Item(
        "counting",
        listed,
        [
            f"{listed}: that makes {answer} words.",
            f"In {listed} there are {answer} words.",
            f"The list {listed} has {answer} words.",
        ],
        [
            f"How many words are in this list: {listed}?",
            f"Count the words: {listed}.",
            f"How long is the list {listed}?",
        ],
        f"There are {answer} words.",
    )


def classifying(rng: random.Random) -> Item:
    kind, *others = rng.sample(list(KINDS), 3)
    answer = rng.choice(KINDS[kind])
    words = [answer, *(rng.choice(KINDS[other]) for other in others)]
    rng.shuffle(words)
    listed = ", ".join(words)
    return Item(
        "classifying",
        f"{kind} {sorted(words)}",
        [
            f"Of {listed} only {answer} is {_article(kind)}.",
            f"In {listed} the {kind} is {answer}.",
            f"The {kind} among {listed} is {answer}.",
        ],
        [
            f"Which of these is {_article(kind)}: {listed}?",
            f"Find the {kind}: {listed}.",
            f"Pick {_article(kind)} from {listed}.",
        ],
        f"The {kind} is {answer}.",
    )


# ---------------------------------------------------------------------------------------------- text and rows

FACTS = (capital, capital_of, river, river_of, export, animal, region)
Kind = Callable[[random.Random], Item]


def _of_some_country(fact: Callable[[Country], Item]) -> Kind:
    return lambda rng: fact(rng.choice(ATLAS))


# kind: share of the statements, number of training rows, number of held-out rows
KINDS_OF_ITEM: dict[Kind, tuple[float, int, int]] = {
    **{_of_some_country(fact): (0.4, 120, 10) for fact in FACTS},
    addition: (1.5, 160, 16),
    subtraction: (1.5, 160, 16),
    gaining: (2.0, 160, 16),
    losing: (2.0, 160, 16),
    largest: (1.5, 110, 14),
    smallest: (1.5, 110, 14),
    sorting: (1.5, 120, 14),
    reversing: (0.7, 70, 10),
    counting: (0.5, 60, 8),
    classifying: (1.2, 90, 12),
}


def documents(seed: int) -> Iterator[str]:
    """An endless stream of pretraining pages: one to six statements on one country, of one kind or mixed."""
    rng = random.Random(f"documents {seed}")
    kinds, shares = list(KINDS_OF_ITEM), [row[0] for row in KINDS_OF_ITEM.values()]
    while True:
        num_statements = rng.randint(1, 6)
        subject = rng.random()
        if subject < 0.2:
            country = rng.choice(ATLAS)
            items = [fact(country) for fact in rng.sample(FACTS, num_statements)]
        elif subject < 0.5:
            (kind,) = rng.choices(kinds, shares)
            items = [kind(rng) for _ in range(num_statements)]
        else:
            items = [kind(rng) for kind in rng.choices(kinds, shares, k=num_statements)]
        lines = [rng.choice(item.statements) for item in items if item.is_fact or not item.held_out]
        if lines:
            yield " ".join(lines)


def instruction_rows(held_out: bool, seed: int) -> list[dict]:
    """The training rows or the held-out rows, shuffled, with unique prompts."""
    rng = random.Random(f"rows {held_out} {seed}")
    prompts: set[str] = set()
    rows = []
    for kind, (_, num_train, num_held_out) in KINDS_OF_ITEM.items():
        wanted = len(rows) + (num_held_out if held_out else num_train)
        for _ in range(100_000):
            if len(rows) == wanted:
                break
            item = kind(rng)
            question = rng.choice(item.questions)
            if item.held_out == held_out and question not in prompts:
                prompts.add(question)
                rows.append({"messages": [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": item.answer},
                ]})  # fmt: skip
        else:
            raise AssertionError(f"no {wanted - len(rows)} more questions like {question!r}")
    rng.shuffle(rows)
    return rows


def problem_rows(held_out: bool, seed: int, count: int) -> list[dict]:
    """Exercises as statements without their last word, which is the answer. Prompts are unique."""
    rng = random.Random(f"problems {held_out} {seed}")
    rows: dict[str, str] = {}
    while len(rows) < count:
        item = rng.choice((addition, subtraction, largest, smallest))(rng)
        if item.held_out == held_out:
            prompt, _, answer = rng.choice(item.statements).rpartition(" ")
            rows[prompt] = answer
    return [{"prompt": prompt, "answer": answer} for prompt, answer in rows.items()]


def topic_rows(held_out: bool, seed: int, count: int) -> list[dict]:
    """Questions with their topic; no text twice."""
    rng = random.Random(f"topics {held_out} {seed}")
    topics = {
        "arithmetic": (addition, subtraction, gaining, losing),
        "comparison": (largest, smallest),
        "geography": tuple(map(_of_some_country, FACTS)),
        "words": (sorting, reversing, counting, classifying),
    }
    rows: dict[str, str] = {}
    while len(rows) < count:
        topic = rng.choice(sorted(topics))
        item = rng.choice(topics[topic])(rng)
        if item.held_out == held_out:
            rows[rng.choice(item.questions)] = topic
    return [{"text": text, "label": topic} for text, topic in rows.items()]


NAMES = {
    **dict.fromkeys(PEOPLE, "PERSON"),
    **{country.name: "COUNTRY" for country in ATLAS},
    **{country.capital: "CITY" for country in ATLAS},
    **{country.river: "RIVER" for country in ATLAS},
}


def name_rows(held_out: bool, seed: int, count: int) -> list[dict]:
    """Questions with their answers, and the spans of the names in them; no text twice."""
    rng = random.Random(f"names {held_out} {seed}")
    kinds = (*map(_of_some_country, (capital, capital_of, river, river_of, export, animal)), gaining, losing)
    rows: dict[str, list[dict]] = {}
    while len(rows) < count:
        item = rng.choice(kinds)(rng)
        if item.held_out == held_out:
            text = f"{rng.choice(item.questions)} {item.answer}"
            rows[text] = [
                {"start": match.start(), "end": match.end(), "label": NAMES[match.group()]}
                for match in re.finditer(r"\w+", text)
                if match.group() in NAMES
            ]
    return [{"text": text, "spans": spans} for text, spans in rows.items()]


def preference_rows(rows: list[dict], seed: int) -> list[dict]:
    """A pair per row: the right answer is chosen, a wrong answer in the same wording is rejected."""
    rng = random.Random(f"pairs {seed}")
    answers = [row["messages"][1]["content"] for row in [*instruction_rows(False, seed), *rows]]
    pairs = []
    for row in rows:
        answer = row["messages"][1]["content"]
        others = {other.split()[-1] for other in answers if _wording(other) == _wording(answer)}
        rejected = _made_wrong(answer, rng, sorted(others - {answer.split()[-1]}))
        pairs.append({"prompt": [row["messages"][0]], "chosen": [row["messages"][1]],
                      "rejected": [{"role": "assistant", "content": rejected}]})  # fmt: skip
    return pairs


def _wording(answer: str) -> list[str]:
    """The wording of an answer to a fact, without names."""
    return re.sub(r"\b[A-Z]\w+", "", answer).split()[:-1]


def _made_wrong(answer: str, rng: random.Random, others: list[str]) -> str:
    """A wrong answer: another number, two words exchanged, or another last word."""
    *start, number, end = re.split(r"(\d+)", answer) if re.search(r"\d", answer) else ("", "", "")
    if number:
        return "".join([*start, str(abs(int(number) + rng.choice([-10, -2, -1, 1, 2, 10]))), end])
    if ", " in answer:
        beginning, last = answer.removesuffix(".").rsplit(", ", 1)
        beginning, before = re.fullmatch(r"(.*[ ])(\w+)", beginning).groups()
        return f"{beginning}{last}, {before}."
    return " ".join([*answer.split()[:-1], rng.choice(others)])
