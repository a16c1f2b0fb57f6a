"""Best-fit decreasing: whole documents into rows of a fixed length, with little waste.

The longest document goes first, each into the fullest row that still holds it. Documents of one length are placed
together: while a row holds more of them it stays the fullest that does, so a row with room r takes r // length at once.
Rows are kept by the room they have left; a Python integer with bit r set where there are rows with room r finds the
fullest in one shift. The result is that of placing documents one by one (Johnson 1974), for a million in about a second.
"""

import numpy as np


def best_fit_decreasing(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Packs documents of `lengths` (N,) into rows of `capacity` tokens.

    Returns `documents` (N,), indices into `lengths`, row after row, and `offsets` (R + 1,): row r holds
    `documents[offsets[r]:offsets[r + 1]]`. Every length must be from 1 to `capacity`.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    assert len(lengths) == 0 or (lengths.min() >= 1 and lengths.max() <= capacity)
    longest_first = np.argsort(-lengths, kind="stable")
    row_of = np.empty(len(lengths), dtype=np.int64)  # of every document, in order of placing
    rows_with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0  # bit r: rows_with_room[r] is not empty
    num_rows = 0

    def place(rows: list[int], room: int, length: int, first: int, last: int) -> None:
        """Fills documents [first, last) into `rows`, each with `room`; the last row may stay partly full."""
        nonlocal rooms
        per_row = room // length
        row_of[first:last] = np.repeat(rows, per_row)[: last - first]
        num_full, rest = divmod(last - first, per_row)
        for num_left, some in ((room - per_row * length, rows[:num_full]), (room - rest * length, rows[num_full:])):
            if some:
                rows_with_room[num_left].extend(some)
                rooms |= 1 << num_left

    counts = np.bincount(lengths, minlength=capacity + 1)
    first = 0
    for length in np.flatnonzero(counts)[::-1].tolist():
        last = first + int(counts[length])
        while first < last and (wide_enough := rooms >> length):
            room = length + (wide_enough & -wide_enough).bit_length() - 1
            num_needed = -(-(last - first) // (room // length))
            rows = rows_with_room[room][-num_needed:]
            del rows_with_room[room][-num_needed:]
            if not rows_with_room[room]:
                rooms &= ~(1 << room)
            placed = min(last, first + len(rows) * (room // length))
            place(rows, room, length, first, placed)
            first = placed
        if first < last:
            num_needed = -(-(last - first) // (capacity // length))
            place(list(range(num_rows, num_rows + num_needed)), capacity, length, first, last)
            num_rows += num_needed
            first = last

    documents = longest_first[np.argsort(row_of, kind="stable")]
    offsets = np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=num_rows))])
    return documents, offsets
