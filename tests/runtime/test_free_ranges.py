"""Ranges of free memory: numbers alone, no memory behind them."""

import itertools
import random
from itertools import pairwise

import pytest

from teraplan.runtime.cpu.native import CPiece, library
from teraplan.runtime.cpu.page_pool import PagePool
from teraplan.runtime.cpu.page_scraps import Piece
from teraplan.runtime.process import pages
from teraplan.runtime.process.pages import HUGE_PAGE_BYTES
from teraplan.units import MIB

_START = 1 << 40
_MIB_OF_SEEDS = 1 << 20
"""Between the addresses of two seeds of a test: the library keeps them all."""


class _Ranges(PagePool):
    """In MiB from a start."""

    def __init__(self, start: int = _START) -> None:
        super().__init__()
        self.start = start

    def add(self, at: int, size: int, mapping: int = 0) -> None:
        """Free memory of one mapping."""
        piece = CPiece(self.start + at * MIB, size * MIB, mapping or 1 + at)
        library().add_piece(self.handle, piece, size * MIB >= HUGE_PAGE_BYTES)

    def take(self, size: int) -> int | None:
        """Where a block is, that is in use from now on; None if none is so large."""
        return self._offset(library().take_block(self.handle, size * MIB))

    def free(self, at: int) -> None:
        """The block there waits, joined with its neighbours."""
        assert library().free_block(self.start + at * MIB)
        self.join()

    def piece(self, size: int) -> int | None:
        """Where memory of one piece is."""
        return self._offset(self.take_piece(size * MIB) or 0)

    def cut(self, size: int) -> list[tuple[int, int]]:
        """(at, size) of the pieces of the end of a range."""
        return [
            (self._offset(p.address) or 0, p.nbytes // MIB)
            for p in self.cut_off(size * MIB, is_large=True)
        ]

    def _offset(self, address: int) -> int | None:
        return (address - self.start) // MIB if address else None


def test_the_range_that_fits_best_is_taken() -> None:
    ranges = _Ranges()
    for at, size in ((0, 9), (20, 4), (40, 6)):
        ranges.add(at, size)
    assert ranges.take(5) == 41, "the end of 6 MiB"
    assert ranges.take(4) == 20, "all of 4 MiB"
    assert ranges.take(4) == 0, "huge pages from a start"
    assert ranges.take(6) is None, "1 and 5 MiB are not neighbours"
    assert (ranges.nbytes, ranges.in_use_bytes) == (6 * MIB, 13 * MIB)


def test_free_neighbours_are_joined_and_what_was_one_mapping_moves_as_one() -> None:
    ranges = _Ranges()
    ranges.add(0, 8)
    ranges.add(8, 8)
    taken = [ranges.take(3) for _ in range(5)]
    assert ranges.nbytes == MIB
    for at in taken:
        assert at is not None
        ranges.free(at)
    assert ranges.cut(16) == [(0, 8), (8, 8)]
    assert ranges.nbytes == 0


def test_what_is_freed_serves_its_own_size_before_it_is_joined() -> None:
    ranges = _Ranges()
    ranges.add(0, 9)
    ranges.add(20, 5)
    first, second = ranges.take(5), ranges.take(4)
    assert (first, second) == (20, 0)
    assert library().free_block(_START)
    assert ranges.nbytes == 9 * MIB, "it waits"
    assert ranges.take(4) == 0, "not at the end of 5 MiB"
    assert library().free_block(_START)
    assert ranges.take(9) == 0, "joined, since nothing else was so large"


def test_of_what_is_freed_no_more_is_kept_apart_than_can_be_looked_through() -> None:
    ranges = _Ranges()
    ranges.add(0, 65)
    taken = sorted(ranges.take(1) or 0 for _ in range(65))
    assert taken == list(range(65))
    for at in reversed(taken):
        assert library().free_block(_START + at * MIB)
    assert ranges.take(1) == 64, "the end of all, not what was freed last"


def test_what_is_cut_off_leaves_whole_units() -> None:
    ranges = _Ranges()
    ranges.add(0, 9)
    assert ranges.cut(2) == [(6, 3)]
    assert ranges.cut(7) == [(0, 6)], "the largest, where all are smaller"
    assert ranges.cut(1) == []
    assert ranges.nbytes == 0


def test_small_tensors_leave_large_mappings_whole() -> None:
    ranges = _Ranges()
    ranges.add(0, 8)
    ranges.add(20, 1)
    ranges.add(22, 1)
    assert ranges.take(1) in (20, 22)
    assert ranges.take(1) in (20, 22)
    assert ranges.take(1) == 7
    assert ranges.take(2) == 0


def test_a_range_of_several_pieces_gives_what_one_of_them_has() -> None:
    ranges = _Ranges()
    ranges.add(0, 3)
    ranges.add(3, 5)
    assert ranges.piece(6) is None
    assert ranges.piece(4) == 3, "all huge pages, of the second one"
    assert ranges.take(3) == 0
    assert ranges.nbytes == MIB


def test_what_can_move_on_by_one_move_is_of_one_piece() -> None:
    ranges = _Ranges()
    for at, size in ((0, 3), (3, 3), (10, 5), (20, 9)):
        ranges.add(at, size)
    assert ranges.piece(4) == 10, "6 MiB are two pieces; huge pages"
    assert ranges.piece(3) == 0, "all of the first piece of two"
    assert ranges.piece(5) == 24, "the end of 9 MiB"
    assert ranges.piece(5) is None
    assert ranges.nbytes == 8 * MIB
    assert [ranges.take(size) for size in (1, 3, 4)] == [14, 3, 20]


@pytest.mark.parametrize("seed", range(20))
def test_no_byte_is_lost_or_given_twice(seed: int) -> None:
    chance, total = random.Random(seed), 64
    ranges = _Ranges(_START + (seed + 1) * _MIB_OF_SEEDS * MIB)
    taken, cut = dict[int, int](), list[tuple[int, int]]()
    new_mapping = itertools.count(100).__next__
    mappings = [number // 4 for number in range(total)]
    """Of each MiB."""
    for number in range(total // 4):
        ranges.add(4 * number, 4, 1 + number)
    for _ in range(300):
        if taken and chance.random() < 0.3:
            ranges.free(at := chance.choice(list(taken)))
            del taken[at]
            continue
        if cut and chance.random() < 0.3:
            at, size = cut.pop(chance.randrange(len(cut)))
            mappings[at : at + size] = [new_mapping()] * size
            piece = CPiece(ranges.start + at * MIB, size * MIB, 1 + mappings[at])
            library().add_piece(ranges.handle, piece, True)
            continue
        size, way = chance.randrange(2, 12), chance.random()
        if way < 0.2:
            found = ranges.piece(min(size, 4))
            cut += [(found, min(size, 4))] if found is not None else []
        elif way < 0.8:
            found = ranges.take(size)
            taken |= {found: size} if found is not None else {}
        else:
            pieces = ranges.cut(size)
            for at, length in pieces:
                assert len(set(mappings[at : at + length])) == 1, "one move takes it on"
            for (one, length), (other, _) in pairwise(pieces):
                assert one + length == other
                assert mappings[one] != mappings[other], "else they are one"
            cut += pieces
        used = sorted([*((at, at + size) for at, size in taken.items()), *_ends(cut)])
        assert all(end <= start for (_, end), (start, _) in pairwise(used))
        assert used == [] or (used[0][0] >= 0 and used[-1][1] <= total)
        assert ranges.in_use_bytes == sum(taken.values()) * MIB
        assert ranges.nbytes == (total - sum(taken.values()) - sum(n for _, n in cut)) * MIB
    assert ranges.most_in_use_bytes > 0


def _ends(cut: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [(at, at + size) for at, size in cut]


def test_of_a_closed_pool_nothing_is_owned_and_what_was_in_use_is_unmapped() -> None:
    pool, start = PagePool(), pages.take(MIB)
    library().add_block(pool.handle, CPiece(start, MIB, 1), 1, False)
    assert library().take_block(pool.handle, MIB) == start
    assert pool.owns(start)
    assert not pool.owns(start + pages.PAGE_BYTES)
    pool.close()
    assert (pool.nbytes, pool.in_use_bytes, pool.owns(start)) == (0, 0, False)
    assert library().free_block(start)
    assert not library().free_block(start), "it is gone"
    with pytest.raises(OSError, match="moving"):
        pages.move(start, pages.take(MIB), MIB)


def test_a_piece_is_what_the_library_says() -> None:
    assert Piece._fields == tuple(field[0] for field in CPiece._fields_)
