"""PyTorch's CUDA caching allocator, as far as it decides how much memory it takes from the driver.

What is allocated is not all that a run takes: sizes are rounded, and what lies free between blocks that are in use may fit
nothing that is asked for next. With expandable segments, which lean_ft turns on, there is one range of addresses for small
tensors and one for large; a request takes the smallest free block that it fits into, a block is split and merges with its
neighbours when it is free again, and where nothing fits the range grows at its end by whole pages. None of it is given
back. So the order of a step's allocations says what is reserved, and a plan knows that order.

Left out: several streams, each of which has ranges of its own (copies to and from the host allocate on the computing one),
and giving memory back where the card is full.

Source: c10/cuda/CUDACachingAllocator.cpp of PyTorch 2.13.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

_ROUNDING_BYTES = 512
_LARGEST_SMALL_BYTES = 2**20
_SMALL_PAGE_BYTES, _LARGE_PAGE_BYTES = 2 * 2**20, 20 * 2**20


@dataclass(eq=False)
class Block:
    """Neighbouring bytes of one range, in use or free."""

    address: int
    num_bytes: int
    owner: "_Range"
    is_free: bool = False
    before: "Block | None" = None
    after: "Block | None" = None


class CachingAllocator:
    """Blocks of an unlimited device; `reserved_bytes` is what they were taken from the driver in."""

    def __init__(self) -> None:
        self._small, self._large = _Range(_SMALL_PAGE_BYTES), _Range(_LARGE_PAGE_BYTES)

    @property
    def reserved_bytes(self) -> int:
        return self._small.num_bytes + self._large.num_bytes

    def allocate(self, num_bytes: int) -> Block | None:
        """A block of at least so many bytes; none for nothing."""
        if num_bytes == 0:
            return None
        rounded = -(-num_bytes // _ROUNDING_BYTES) * _ROUNDING_BYTES
        return (self._small if rounded <= _LARGEST_SMALL_BYTES else self._large).take(rounded)

    def free(self, block: Block | None) -> None:
        if block is not None:
            block.owner.give_back(block)


class _Range:
    """One expandable segment."""

    def __init__(self, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self.num_bytes = 0
        self._last: Block | None = None
        self._free: list[tuple[int, int]] = []  # (size, address), sorted
        self._at: dict[int, Block] = {}  # the free ones by address

    def take(self, num_bytes: int) -> Block:
        block = self._smallest_that_fits(num_bytes) or self._grow(num_bytes)
        self._forget(block)
        if block.num_bytes > num_bytes:
            rest = Block(block.address + num_bytes, block.num_bytes - num_bytes, self, True, block, block.after)
            self._link(rest)
            block.num_bytes, block.after = num_bytes, rest
            self._remember(rest)
        return block

    def give_back(self, block: Block) -> None:
        if block.before is not None and block.before.is_free:
            self._forget(block.before)
            block = self._join(block.before, block)
        if block.after is not None and block.after.is_free:
            self._forget(block.after)
            block = self._join(block, block.after)
        self._remember(block)

    def _smallest_that_fits(self, num_bytes: int) -> Block | None:
        place = bisect_left(self._free, (num_bytes, 0))
        found = [self._at[address] for _, address in self._free[place : place + 2]]
        # The block at the end counts as large as it can grow: any other one is taken first.
        if len(found) == 2 and found[0] is self._last:
            return found[1]
        return found[0] if found else None

    def _grow(self, num_bytes: int) -> Block:
        """Takes as many pages as are lacking, which join the block at the end where that is free."""
        last = self._last
        lacking = num_bytes - (last.num_bytes if last is not None and last.is_free else 0)
        grown = Block(self.num_bytes, -(-lacking // self._page_bytes) * self._page_bytes, self, True, last)
        self.num_bytes += grown.num_bytes
        self._link(grown)
        if last is not None and last.is_free:
            self._forget(last)
            grown = self._join(last, grown)
        self._remember(grown)
        return grown

    def _link(self, block: Block) -> None:
        """Tells the block's neighbours of it."""
        if block.before is not None:
            block.before.after = block
        if block.after is not None:
            block.after.before = block
        else:
            self._last = block

    def _join(self, first: Block, second: Block) -> Block:
        first.num_bytes += second.num_bytes
        first.after = second.after
        self._link(first)
        return first

    def _remember(self, block: Block) -> None:
        block.is_free = True
        insort(self._free, (block.num_bytes, block.address))
        self._at[block.address] = block

    def _forget(self, block: Block) -> None:
        block.is_free = False
        del self._free[bisect_left(self._free, (block.num_bytes, block.address))]
        del self._at[block.address]
