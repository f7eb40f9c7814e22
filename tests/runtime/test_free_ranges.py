"""Ranges of free memory: numbers alone, no memory behind them."""

import itertools
import random
from itertools import pairwise

import pytest

from teraplan.runtime.cpu.free_ranges import FreeRanges, PageBlock
from teraplan.runtime.cpu.page_scraps import Piece
from teraplan.runtime.process.pages import HUGE_PAGE_BYTES
from teraplan.units import MIB

_START = 1 << 40


def _block(offset: int, nbytes: int, mapping: int) -> PageBlock:
    return PageBlock(
        _START + offset, [Piece(_START + offset, nbytes, mapping)], is_large=nbytes >= MIB
    )


def _where(block: PageBlock | None) -> tuple[int, int]:
    assert block is not None
    return block.address - _START, block.nbytes


def test_the_range_that_fits_best_is_taken() -> None:
    ranges = FreeRanges(MIB)
    for offset, nbytes in ((0, 9), (20, 4), (40, 6)):
        ranges.add(_block(offset * MIB, nbytes * MIB, offset))
    assert _where(ranges.take(5 * MIB)) == (41 * MIB, 5 * MIB), "the end of 6 MiB"
    assert _where(ranges.take(4 * MIB)) == (20 * MIB, 4 * MIB), "all of 4 MiB"
    assert _where(ranges.take(2 * HUGE_PAGE_BYTES)) == (0, 4 * MIB), "huge pages from a start"
    assert ranges.take(6 * MIB) is None, "1 and 5 MiB are not neighbours"
    assert ranges.nbytes == 6 * MIB


def test_free_neighbours_are_joined_and_what_was_one_mapping_moves_as_one() -> None:
    ranges = FreeRanges(MIB)
    ranges.add(_block(0, 8 * MIB, 1))
    ranges.add(_block(8 * MIB, 8 * MIB, 2))
    taken = [ranges.take(3 * MIB) for _ in range(5)]
    assert ranges.nbytes == MIB
    for block in taken:
        assert block is not None
        ranges.add(block)
    whole = ranges.take(16 * MIB)
    assert whole is not None
    assert whole.pieces == [Piece(_START, 8 * MIB, 1), Piece(_START + 8 * MIB, 8 * MIB, 2)]
    assert ranges.nbytes == 0


def test_what_is_cut_off_leaves_whole_units() -> None:
    ranges = FreeRanges(HUGE_PAGE_BYTES)
    ranges.add(_block(0, 9 * MIB, 1))
    assert _where(ranges.cut_off(2 * MIB)) == (6 * MIB, 3 * MIB)
    assert _where(ranges.cut_off(7 * MIB)) == (0, 6 * MIB), "the largest, where all are smaller"
    assert ranges.nbytes == 0


def test_a_range_of_several_pieces_gives_what_one_of_them_has() -> None:
    ranges = FreeRanges(MIB)
    ranges.add(_block(0, 3 * MIB, 1))
    ranges.add(_block(3 * MIB, 5 * MIB, 2))
    assert ranges.take_piece(6 * MIB) is None
    assert ranges.take_piece(4 * MIB) == _START + 3 * MIB, "all huge pages, of the second one"
    assert _where(ranges.take(3 * MIB)) == (0, 3 * MIB)
    assert ranges.nbytes == MIB


def test_what_can_move_on_by_one_move_is_of_one_piece() -> None:
    ranges = FreeRanges(MIB)
    for offset, nbytes in ((0, 3), (3, 3), (10, 5), (20, 9)):
        ranges.add(_block(offset * MIB, nbytes * MIB, offset))
    assert ranges.take_piece(4 * MIB) == _START + 10 * MIB, "6 MiB are two pieces; huge pages"
    assert ranges.take_piece(3 * MIB) == _START, "all of the first piece of two"
    assert ranges.take_piece(5 * MIB) == _START + 24 * MIB, "the end of 9 MiB"
    assert ranges.take_piece(5 * MIB) is None
    assert ranges.nbytes == 8 * MIB
    assert [_where(ranges.take(n * MIB)) for n in (1, 3, 4)] == [
        (14 * MIB, MIB),
        (3 * MIB, 3 * MIB),
        (20 * MIB, 4 * MIB),
    ]


@pytest.mark.parametrize("seed", range(20))
def test_no_byte_is_lost_or_given_twice(seed: int) -> None:
    chance, ranges, held = random.Random(seed), FreeRanges(HUGE_PAGE_BYTES), list[PageBlock]()
    new_mapping = itertools.count(100).__next__
    total = 64
    for number in range(total // 4):
        ranges.add(_block(number * 4 * MIB, 4 * MIB, number))
    for _ in range(300):
        if held and chance.random() < 0.5:
            ranges.add(held.pop(chance.randrange(len(held))))
            continue
        nbytes, way = chance.randrange(1, 12) * MIB, chance.random()
        if way < 0.2:
            address = ranges.take_piece(min(nbytes, 4 * MIB))
            if address is not None:
                held.append(_block(address - _START, min(nbytes, 4 * MIB), new_mapping()))
            block = None
        elif way < 0.8 or not ranges.nbytes:
            block = ranges.take(nbytes)
        else:
            block = ranges.cut_off(nbytes)
        if block is not None:
            held.append(block)
        used = sorted((b.address, b.end) for b in held)
        assert all(end <= start for (_, end), (start, _) in pairwise(used))
        assert sum(b.nbytes for b in held) + ranges.nbytes == total * MIB
        for block in held:
            ends = [block.address, *(piece.end for piece in block.pieces)]
            assert [piece.address for piece in block.pieces] == ends[:-1]
            assert ends[-1] == block.end
            mappings = [piece.mapping for piece in block.pieces]
            assert all(one != other for one, other in pairwise(mappings)), "else they are one"
