"""Ranges of free memory, by address and by size: best fit, and free neighbours are joined.

(Knuth, The Art of Computer Programming 1, section 2.5: dynamic storage allocation.)
"""

from bisect import bisect_left, insort

from teraplan.runtime.cpu.page_scraps import Piece
from teraplan.runtime.process.pages import HUGE_PAGE_BYTES


class PageBlock:
    """Memory in a row: pieces, each of one mapping or one move."""

    __slots__ = ("address", "is_large", "nbytes", "pieces")

    def __init__(self, address: int, pieces: list[Piece], *, is_large: bool) -> None:
        self.address = address
        self.pieces = pieces
        self.nbytes = pieces[-1].end - address
        self.is_large = is_large
        """It is, or was, part of a mapping that may have huge pages."""

    @property
    def end(self) -> int:
        """The first address behind it."""
        return self.address + self.nbytes

    def split(self, nbytes: int) -> tuple["PageBlock", "PageBlock"]:
        """The first `nbytes`, and the rest; each has some."""
        cut = self.address + nbytes
        at = bisect_left(self.pieces, (cut,))
        first, rest = self.pieces[:at], self.pieces[at:]
        piece = first[-1]
        if piece.end > cut:
            first[-1] = piece.first(cut - piece.address)
            rest.insert(0, piece.last(piece.end - cut))
        large = self.is_large
        return (
            PageBlock(self.address, first, is_large=large),
            PageBlock(cut, rest, is_large=large),
        )


class FreeRanges:
    """Ranges no two of which are neighbours."""

    def __init__(self, unit_bytes: int) -> None:
        self._unit_bytes = unit_bytes
        """What is cut off is a multiple of it, as far as possible."""
        self.nbytes = 0
        self._by_start: dict[int, PageBlock] = {}
        self._by_end: dict[int, PageBlock] = {}
        self._sizes: list[tuple[int, int]] = []
        """(bytes, start), sorted."""

    def add(self, block: PageBlock) -> None:
        """A block is free."""
        before, behind = self._by_end.get(block.address), self._by_start.get(block.end)
        if before is not None:
            block = _joined(self._remove(before), block)
        if behind is not None:
            block = _joined(block, self._remove(behind))
        self._insert(block)

    def take(self, nbytes: int) -> PageBlock | None:
        """`nbytes` of the smallest range that has so many, None if none has.

        Whole huge pages come from its start, other sizes from its end: so most ranges begin with
        a huge page.
        """
        at = bisect_left(self._sizes, (nbytes, 0))
        if at == len(self._sizes):
            return None
        found = self._by_start[self._sizes[at][1]]
        return self._cut_out(found, _place_in(found, nbytes), nbytes)

    def take_piece(self, nbytes: int) -> int | None:
        """Address of `nbytes` of one piece, in the smallest range that has it; None if none has.

        Where in the piece, see `take`.
        """
        for _, start in self._sizes[bisect_left(self._sizes, (nbytes, 0)) :]:
            block = self._by_start[start]
            piece = next((piece for piece in block.pieces if piece.nbytes >= nbytes), None)
            if piece is not None:
                return self._cut_out(block, _place_in(piece, nbytes), nbytes).address
        return None

    def cut_off(self, nbytes: int) -> PageBlock:
        """The end of a range, `nbytes` or a little more; the largest range if all are smaller."""
        at = bisect_left(self._sizes, (nbytes, 0))
        found = self._by_start[self._sizes[min(at, len(self._sizes) - 1)][1]]
        start = (found.end - nbytes) // self._unit_bytes * self._unit_bytes
        start = max(found.address, start)
        return self._cut_out(found, start, found.end - start)

    def recover(self) -> None:
        """After an interrupt within one of the above: all by start is right."""
        blocks = self._by_start.values()
        self._by_end = {block.end: block for block in blocks}
        self._sizes = sorted((block.nbytes, block.address) for block in blocks)
        self.nbytes = sum(block.nbytes for block in blocks)

    def _cut_out(self, block: PageBlock, address: int, nbytes: int) -> PageBlock:
        """What lies at `address`; the rest of the range, before it and behind, stays free."""
        found = self._remove(block)
        if address > found.address:
            before, found = found.split(address - found.address)
            self._insert(before)
        if found.nbytes > nbytes:
            found, behind = found.split(nbytes)
            self._insert(behind)
        return found

    def _insert(self, block: PageBlock) -> None:
        self._by_start[block.address] = self._by_end[block.end] = block
        insort(self._sizes, (block.nbytes, block.address))
        self.nbytes += block.nbytes

    def _remove(self, block: PageBlock) -> PageBlock:
        del self._by_start[block.address], self._by_end[block.end]
        del self._sizes[bisect_left(self._sizes, (block.nbytes, block.address))]
        self.nbytes -= block.nbytes
        return block


def _place_in(memory: PageBlock | Piece, nbytes: int) -> int:
    """Address at which `nbytes` are cut out of it; see `FreeRanges.take`."""
    return memory.end - nbytes if nbytes % HUGE_PAGE_BYTES else memory.address


def _joined(first: PageBlock, behind: PageBlock) -> PageBlock:
    """Two neighbours as one; a piece that was split is whole again."""
    last, following = first.pieces[-1], behind.pieces[0]
    if last.mapping != following.mapping:
        pieces = first.pieces + behind.pieces
    else:
        whole = Piece(last.address, last.nbytes + following.nbytes, last.mapping)
        pieces = [*first.pieces[:-1], whole, *behind.pieces[1:]]
    return PageBlock(first.address, pieces, is_large=first.is_large)
