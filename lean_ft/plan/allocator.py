"""A model of PyTorch's CUDA caching allocator that computes how much memory it reserves from the driver.

A run reserves more than it allocates: sizes are rounded, and free gaps between used blocks may be too small for the
next request. With expandable segments, which lean_ft turns on, there is one address range for small tensors and one for
large. A request takes the smallest free block that fits. Blocks are split, and merge with free neighbors when they are
freed. If no block fits, the range grows at its end by whole pages. Nothing is returned to the driver. So reserved
memory follows from the order of a step's allocations, which a plan knows.

Left out: several streams in one allocator (`Trace` has one allocator per stream), and returning memory when the card is
full.

Source: c10/cuda/CUDACachingAllocator.cpp of PyTorch 2.13.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

_ROUNDING_BYTES = 512
_LARGEST_SMALL_BYTES = 2**20
_SMALL_PAGE_BYTES, _LARGE_PAGE_BYTES = 2 * 2**20, 20 * 2**20


@dataclass(eq=False)
class MemoryBlock:
    """Contiguous bytes of one range, used or free."""

    address: int
    num_bytes: int
    owner: "_Range"
    is_free: bool = False
    before: "MemoryBlock | None" = None
    after: "MemoryBlock | None" = None


class CachingAllocator:
    """The allocator of a device with unlimited memory."""

    def __init__(self) -> None:
        self._small, self._large = _Range(_SMALL_PAGE_BYTES), _Range(_LARGE_PAGE_BYTES)

    @property
    def reserved_bytes(self) -> int:
        return self._small.num_bytes + self._large.num_bytes

    def allocate(self, num_bytes: int) -> MemoryBlock | None:
        """A block of at least `num_bytes`; None for 0 bytes."""
        if num_bytes == 0:
            return None
        rounded = -(-num_bytes // _ROUNDING_BYTES) * _ROUNDING_BYTES
        return (self._small if rounded <= _LARGEST_SMALL_BYTES else self._large).take(rounded)

    def free(self, block: MemoryBlock | None) -> None:
        if block is not None:
            block.owner.give_back(block)


class _Range:
    """One expandable segment."""

    def __init__(self, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self.num_bytes = 0
        self._last: MemoryBlock | None = None
        self._free: list[tuple[int, int]] = []  # (size, address), sorted
        self._at: dict[int, MemoryBlock] = {}  # free blocks by address

    def take(self, num_bytes: int) -> MemoryBlock:
        block = self._smallest_that_fits(num_bytes) or self._grow(num_bytes)
        self._forget(block)
        if block.num_bytes > num_bytes:
            rest = MemoryBlock(block.address + num_bytes, block.num_bytes - num_bytes, self, True, block, block.after)
            self._link(rest)
            block.num_bytes, block.after = num_bytes, rest
            self._remember(rest)
        return block

    def give_back(self, block: MemoryBlock) -> None:
        if block.before is not None and block.before.is_free:
            self._forget(block.before)
            block = self._join(block.before, block)
        if block.after is not None and block.after.is_free:
            self._forget(block.after)
            block = self._join(block, block.after)
        self._remember(block)

    def _smallest_that_fits(self, num_bytes: int) -> MemoryBlock | None:
        place = bisect_left(self._free, (num_bytes, 0))
        found = [self._at[address] for _, address in self._free[place : place + 2]]
        # The last block can grow, so any other block is taken first.
        if len(found) == 2 and found[0] is self._last:
            return found[1]
        return found[0] if found else None

    def _grow(self, num_bytes: int) -> MemoryBlock:
        """Add the missing pages at the end, merged with the last block if it is free."""
        last = self._last
        lacking = num_bytes - (last.num_bytes if last is not None and last.is_free else 0)
        grown = MemoryBlock(self.num_bytes, -(-lacking // self._page_bytes) * self._page_bytes, self, True, last)
        self.num_bytes += grown.num_bytes
        self._link(grown)
        if last is not None and last.is_free:
            self._forget(last)
            grown = self._join(last, grown)
        self._remember(grown)
        return grown

    def _link(self, block: MemoryBlock) -> None:
        """Link the block's neighbors to it."""
        if block.before is not None:
            block.before.after = block
        if block.after is not None:
            block.after.before = block
        else:
            self._last = block

    def _join(self, first: MemoryBlock, second: MemoryBlock) -> MemoryBlock:
        first.num_bytes += second.num_bytes
        first.after = second.after
        self._link(first)
        return first

    def _remember(self, block: MemoryBlock) -> None:
        block.is_free = True
        insort(self._free, (block.num_bytes, block.address))
        self._at[block.address] = block

    def _forget(self, block: MemoryBlock) -> None:
        block.is_free = False
        del self._free[bisect_left(self._free, (block.num_bytes, block.address))]
        del self._at[block.address]
