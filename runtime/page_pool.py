"""Touched memory that waits for its next use, whole or in pieces, or goes back to the system.

    given -> waits by its size -> taken by a tensor of that size
                               -> broken up: scraps -> part of a block of another size
                                                    -> unmapped

What has waited longest, by size, is broken up first. The pool of CPU tensors and the training state
both keep their free memory in one of these.
"""

from collections import OrderedDict

from teraplan.runtime import pages
from teraplan.runtime.page_scraps import PageScraps, Piece, total_nbytes
from teraplan.runtime.pages import HUGE_PAGE_BYTES


class PageBlock:
    """Memory of one tensor: pieces in a row, each by one mapping or one move."""

    __slots__ = ("address", "nbytes", "pieces")

    def __init__(self, address: int, pieces: list[Piece]) -> None:
        self.address = address
        self.pieces = pieces
        self.nbytes = total_nbytes(pieces)

    @classmethod
    def whole(cls, address: int, nbytes: int) -> "PageBlock":
        """A block of one piece."""
        return cls(address, [Piece(address, nbytes)])


class PagePool:
    """Blocks that wait. Not thread safe."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, list[PageBlock]] = OrderedDict()
        """By size; sizes that have been given in the longest time ago come first."""
        self._scraps = PageScraps()
        self.nbytes = 0

    def take(self, nbytes: int) -> PageBlock | None:
        """A block of `nbytes` of touched memory, None if none of that size waits."""
        blocks = self._blocks.get(nbytes)
        if not blocks:
            return None
        self.nbytes -= nbytes
        return blocks.pop()

    def give(self, block: PageBlock) -> None:
        """Keep the memory of a block that nobody uses any more."""
        self._blocks.setdefault(block.nbytes, []).append(block)
        self._blocks.move_to_end(block.nbytes)
        self.nbytes += block.nbytes

    def make(self, nbytes: int, reused_bytes: int) -> PageBlock:
        """A new block, `reused_bytes` of it out of what waits, if there are so many.

        Where it could have a huge page and only pieces of some wait, these go back to the system
        and a fresh one takes their place. Else all memory would end in pieces, step by step.
        """
        start = pages.take(nbytes)
        self._break_up(reused_bytes)
        whole_bytes = reused_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        huge = self._scraps.take_huge(whole_bytes)
        self._release(self._scraps.take_least(whole_bytes - total_nbytes(huge)))
        small = self._scraps.take(reused_bytes - whole_bytes)
        fresh = start + total_nbytes(huge)
        tail = start + nbytes - total_nbytes(small)
        pieces = self._moved(huge, start)
        if tail > fresh:
            pieces.append(Piece(fresh, tail - fresh))
        return PageBlock(start, pieces + self._moved(small, tail))

    def shrink(self, nbytes: int) -> None:
        """Unmap at least `nbytes` of what waits, or all there is; huge pages go as a whole."""
        nbytes = pages.round_up(max(0, nbytes))
        self._break_up(nbytes)
        self._release(self._scraps.take_least(nbytes))

    def clear(self) -> None:
        """Unmap everything that waits."""
        self.shrink(self.nbytes)

    def _moved(self, scraps: list[Piece], target: int) -> list[Piece]:
        """The scraps as pieces in a row from `target` on."""
        pieces: list[Piece] = []
        for scrap in scraps:
            _move(scrap, target)
            pieces.append(Piece(target, scrap.nbytes))
            target += scrap.nbytes
            self.nbytes -= scrap.nbytes
        return pieces

    def _release(self, scraps: list[Piece]) -> None:
        for scrap in scraps:
            self.nbytes -= scrap.nbytes
            pages.release(scrap.address, scrap.nbytes)

    def _break_up(self, nbytes: int) -> None:
        """Make scraps of blocks until there are `nbytes`."""
        while self._scraps.nbytes < nbytes and self._blocks:
            size, blocks = next(iter(self._blocks.items()))
            if not blocks:
                del self._blocks[size]
                continue
            for piece in blocks.pop().pieces:
                self._scraps.add(piece)


def _move(piece: Piece, target: int) -> None:
    """Put the piece's memory at `target`; where the kernel refuses, untouched memory instead."""
    try:
        pages.move(piece.address, target, piece.nbytes, keep_source=False)
    except OSError:
        pages.release(piece.address, piece.nbytes)
        pages.renew(target, piece.nbytes)
