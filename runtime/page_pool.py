"""Touched memory that waits for its next use, whole or in pieces, or goes back to the system.

    given -> waits by its size -> taken by a tensor of that size
                               -> broken up: scraps -> part of a block of another size
                                                    -> unmapped

What has waited longest, by size, is broken up first. The pool of CPU tensors and the training state
both keep their free memory in one of these.
"""

from collections import OrderedDict

from teraplan.runtime import pages
from teraplan.runtime.page_scraps import PageScraps, Piece


class PageBlock:
    """Memory of one tensor: pieces in a row, each by one mapping or one move."""

    __slots__ = ("address", "nbytes", "pieces")

    def __init__(self, address: int, pieces: list[Piece]) -> None:
        self.address = address
        self.pieces = pieces
        self.nbytes = sum(piece.nbytes for piece in pieces)

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
        """A new block, `reused_bytes` of it out of what waits, if there are so many."""
        start = end = pages.take(nbytes)
        pieces: list[Piece] = []
        self._break_up(reused_bytes)
        for piece in self._scraps.take(reused_bytes):
            _move(piece, end)
            self.nbytes -= piece.nbytes
            pieces.append(Piece(end, piece.nbytes))
            end += piece.nbytes
        if end < start + nbytes:
            pieces.append(Piece(end, start + nbytes - end))
        return PageBlock(start, pieces)

    def shrink(self, nbytes: int) -> None:
        """Unmap at least `nbytes` of what waits, or all there is; huge pages go as a whole."""
        nbytes = pages.round_up(max(0, nbytes))
        self._break_up(nbytes)
        for piece in self._scraps.take_least(nbytes):
            self.nbytes -= piece.nbytes
            pages.release(piece.address, piece.nbytes)

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
