"""Memory that the simulated allocator requests from the driver, compared with sizes computed by hand."""

import itertools
import random

from lean_ft.plan.allocator import CachingAllocator

MIB = 2**20


def test_large_and_small_tensors_come_from_ranges_of_their_own_in_whole_pages():
    allocator = CachingAllocator()
    blocks = [allocator.allocate(1), allocator.allocate(MIB)]
    assert allocator.reserved_bytes == 2 * MIB
    blocks.append(allocator.allocate(MIB + 1))
    assert allocator.reserved_bytes == 22 * MIB
    blocks.append(allocator.allocate(30 * MIB))  # 18.9995 MiB are free at the end of the segment
    assert allocator.reserved_bytes == 42 * MIB
    assert allocator.allocate(0) is None
    assert blocks[0].num_bytes == 512
    assert blocks[2].num_bytes == MIB + 512


def test_what_is_free_is_used_again_merged_and_the_end_last():
    allocator = CachingAllocator()
    a, b, c, d = (allocator.allocate(mib * MIB) for mib in (10, 12, 8, 10))
    allocator.free(b)
    allocator.free(d)
    assert allocator.allocate(9 * MIB) is b, "between the others, though the end is nearer in size"
    allocator.free(b)
    allocator.free(a)  # merged with b: 22 MiB
    assert allocator.allocate(20 * MIB).address == 0
    assert allocator.reserved_bytes == 40 * MIB
    allocator.free(c)  # merged with d
    allocator.allocate(21 * MIB)
    assert allocator.reserved_bytes == 60 * MIB, "the end grew by what was lacking"


def test_a_hole_that_nothing_fits_costs_its_size():
    allocator = CachingAllocator()
    hole, _ = allocator.allocate(20 * MIB), allocator.allocate(20 * MIB)
    allocator.free(hole)
    allocator.allocate(40 * MIB)
    assert allocator.reserved_bytes == 80 * MIB


def test_whatever_the_order_blocks_never_overlap_and_all_of_it_comes_back():
    generator = random.Random(0)
    allocator, blocks, wanted = CachingAllocator(), [], 0
    for _ in range(3000):
        if blocks and generator.random() < 0.5:
            block = blocks.pop(generator.randrange(len(blocks)))
            wanted -= block.num_bytes
            allocator.free(block)
        else:
            block = allocator.allocate(generator.choice([700, MIB // 2, 3 * MIB, 17 * MIB]))
            wanted += block.num_bytes
            blocks.append(block)
        assert allocator.reserved_bytes >= wanted
    for owner in {block.owner for block in blocks}:
        spans = sorted((block.address, block.address + block.num_bytes) for block in blocks if block.owner is owner)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert spans[-1][1] <= owner.num_bytes
    for block in blocks:
        allocator.free(block)
    before = allocator.reserved_bytes
    allocator.allocate(max(owner.num_bytes for owner in {block.owner for block in blocks}))
    assert allocator.reserved_bytes == before, "all of a range is one free block again"
