"""When it is time, by a count of steps, by epochs and by parts of them."""

import pytest

from lean_ft.training.intervals import is_due, num_due


@pytest.mark.parametrize(
    ("every", "steps_per_epoch", "due"),
    [
        (0, 5, []),
        (1, 5, list(range(1, 13))),
        (5, 7, [5, 10]),
        ("epoch", 5, [5, 10]),
        (0.5, 5, [3, 5, 8, 10]),  # never before half of the epoch is done, and at its end
        (0.1, 10, list(range(1, 13))),
        (0.3, 10, [3, 6, 9, 12]),
        (0.1, 3, list(range(1, 13))),  # more often than there are steps
    ],
)
def test_what_is_due(every, steps_per_epoch, due):
    assert [step for step in range(1, 13) if is_due(every, step, steps_per_epoch)] == due
    if steps_per_epoch > 3:
        assert num_due(every, 12, steps_per_epoch) == len(due)
