from hypothesis import given, settings
from hypothesis import strategies as st

from teraplan.runtime.storage.extents import GRANULE_BYTES, ExtentAllocator, round_up


def test_takes_the_smallest_hole_that_fits() -> None:
    extents = ExtentAllocator()
    extents.extend(100 * GRANULE_BYTES)
    sizes = [8, 1, 4, 1, 6, 1]
    starts = [extents.take(size * GRANULE_BYTES, owner) for owner, size in enumerate(sizes)]
    for owner in (0, 2, 4):
        extents.give_back(owner)
    assert extents.take(5 * GRANULE_BYTES, 6) == starts[4]
    assert extents.take(4 * GRANULE_BYTES, 7) == starts[2]
    assert extents.take(8 * GRANULE_BYTES, 8) == starts[0]


def test_growing_counts_the_free_end_of_the_file() -> None:
    extents = ExtentAllocator()
    extents.extend(10 * GRANULE_BYTES)
    extents.take(7 * GRANULE_BYTES, 0)
    assert extents.missing_bytes(3 * GRANULE_BYTES) == 0
    assert extents.missing_bytes(5 * GRANULE_BYTES) == 2 * GRANULE_BYTES
    extents.extend(2 * GRANULE_BYTES)
    assert extents.take(5 * GRANULE_BYTES, 1) == 7 * GRANULE_BYTES


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40_000)), max_size=60))
def test_extents_never_overlap_and_all_room_comes_back(calls: list[tuple[bool, int]]) -> None:
    runs = []
    for _ in range(2):
        extents = ExtentAllocator()
        taken: list[tuple[int, int, int]] = []
        history = []
        for owner, (is_take, number) in enumerate(calls):
            if is_take or not taken:
                if missing := extents.missing_bytes(number):
                    extents.extend(missing)
                start = extents.take(number, owner)
                end = start + round_up(number)
                assert start % GRANULE_BYTES == 0
                assert end <= extents.size_bytes
                assert all(end <= a or a + round_up(n) <= start for _, a, n in taken)
                taken.append((owner, start, number))
                history.append(start)
            else:
                extents.give_back(taken.pop(number % len(taken))[0])
            assert extents.taken_bytes == sum(round_up(n) for _, _, n in taken)
        for owner, _, _ in taken:
            extents.give_back(owner)
            extents.give_back(owner)  # has nothing any more
        assert extents.free_bytes == extents.size_bytes
        if extents.size_bytes:
            assert extents.missing_bytes(extents.size_bytes) == 0, "holes were not joined"
        runs.append(history)
    assert runs[0] == runs[1], "the same calls must give the same extents"
