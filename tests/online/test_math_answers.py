"""The reward `math_answer`: right, wrong and malformed answers."""

import pytest

from lean_ft.online.math_answers import math_answer
from lean_ft.online.rewards import check_rewards
from lean_ft.settings import Reward

RIGHT = [
    (r"So it is \boxed{42}.", "42"),
    ("We add.\n#### 42", "2 * 21 = 42\n#### 42"),
    ("The answer is 42.", 42),
    ("**Final answer:** $42$", "42"),
    ("42", "42"),
    ("1000", "1,000"),
    (r"\boxed{1,000}", "1000"),
    (r"\boxed{1{,}000.0}", 1000),
    ("#### 1,234,567.50", "1234567.5"),
    (r"\boxed{\frac{1}{2}}", "0.5"),
    (r"\boxed{\dfrac12}", "1/2"),
    (r"\boxed{2.5e3}", "2500"),
    (r"\boxed{\$18.00}", "18"),
    (r"\boxed{50\%}", "50"),
    (r"\boxed{x = -3}", "−3"),
    (r"\boxed{5 \text{ dollars}}", "5"),
    (r"\boxed{3 \text{ million}}", "3,000,000"),
    (r"\boxed{(1, 2)}", "(1,2)"),
    (r"\boxed{\text{Monday}}", "Monday"),
    (r"\boxed{\sqrt{2}}", r"Thus $\boxed{\sqrt{2}}$."),
    (r"First \boxed{1}, no, \boxed{42}", "42"),
    (r"<think>\boxed{1}</think>\boxed{42}", "42"),
]
WRONG = [
    (r"\boxed{41}", "42"),
    (r"\boxed{42}, no, \boxed{41}", "42"),
    (r"\boxed{420}", "42"),
    (r"\boxed{42", "42"),  # cut
    (r"\boxed{}", "42"),
    (r"\boxed", "42"),
    ("####", "42"),
    ("", "42"),
    ("It is 42 or 43", "42"),
    (r"<think>It may be \boxed{42}", "42"),
    (r"\boxed{1,00}", "100"),
    (r"\boxed{5x}", "5"),
    (r"\boxed{3 \text{ million}}", "3"),
    (r"\boxed{1/0}", "1"),
    (r"\boxed{.}", "0"),
    (r"\boxed{²}", "2"),
    ("\\boxed{" * 20_000, "1"),
    ("9" * 10_000, "9"),
    (r"\boxed{1e999999999}", "1"),
]


def test_equal_answers_get_1_and_others_0():
    for expected, cases in ((1.0, RIGHT), (0.0, WRONG)):
        completions, answers = zip(*cases, strict=True)
        for case, found in zip(cases, math_answer(None, completions, answers), strict=True):
            assert found == expected, case


@pytest.mark.parametrize("name", ["math_answer", "length"])
def test_a_pattern_that_nothing_reads_is_refused(name: str):
    with pytest.raises(ValueError, match=f"only exact_answer and format use `pattern`, and {name} does not"):
        check_rewards([Reward(function=name, pattern="x")])
