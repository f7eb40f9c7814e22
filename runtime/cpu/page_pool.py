"""Touched memory that waits for its next use, or goes back to the system.

    freed -> joined with its neighbours that wait, too
          -> a tensor takes the end of the range that fits best
          -> where none is large enough: pieces of several are moved into a row
          -> unmapped

The first two are `page_pool.cpp`, which each tensor asks; this is what is left to Python. A step's
tensors come in a few sizes, again and again, and most of the memory is in use. With blocks that
waited for their own size, half of all tensors found none and were made of moved pieces (93 of 196
in a step of an 8-layer GPT-2, 17 ms); with ranges that are split and joined it is 20.
"""

import ctypes
from collections.abc import Callable
from typing import Any

from teraplan.runtime.cpu.native import CPiece, library
from teraplan.runtime.cpu.page_scraps import PageScraps, Piece, new_mapping, total_nbytes
from teraplan.runtime.process import pages
from teraplan.runtime.process.pages import HUGE_PAGE_BYTES


class PagePool:
    """Memory that waits, and a count of what does not. Safe from any thread, but for `make`."""

    def __init__(self) -> None:
        self._library = library()
        self.handle = int(self._library.new_pool())
        """In the library."""
        self._counts = self._library.counts_of(self.handle).contents

    @property
    def nbytes(self) -> int:
        """All that waits."""
        return int(self._counts.waiting)

    @property
    def in_use_bytes(self) -> int:
        """Of blocks that tensors have."""
        return int(self._counts.in_use)

    @property
    def most_in_use_bytes(self) -> int:
        """The most of these at once, since it was lowered."""
        return int(self._counts.most_in_use)

    def owns(self, address: int) -> bool:
        """True if a block in use begins at `address`."""
        return bool(self._library.owns_block(self.handle, address))

    def lower_most(self, nbytes: int) -> None:
        """`most_in_use_bytes` is so much less from now on, but no less than what is in use."""
        self._library.lower_most(self.handle, nbytes)

    def join(self) -> None:
        """What has been freed is one with what waits beside it; until then it serves its size."""
        self._library.join_free(self.handle)

    def take_piece(self, nbytes: int) -> int | None:
        """Address of `nbytes` of touched memory that may move on by one move; None: there are none.

        The pages are the caller's.
        """
        return int(self._library.take_piece(self.handle, nbytes)) or None

    def give_piece(self, address: int, nbytes: int) -> None:
        """Keep memory that may move on by one move."""
        self._wait(Piece(address, nbytes, new_mapping()), is_large=nbytes >= HUGE_PAGE_BYTES)

    def make(self, nbytes: int, reused_bytes: int) -> None:
        """Let a new block wait, `reused_bytes` of it out of what waits, if there are so many.

        Where it could have a huge page and only pieces of some wait, these go back to the system
        and a fresh one takes their place. Else all memory would end in pieces, step by step.
        """
        start, is_large = pages.take(nbytes), nbytes >= HUGE_PAGE_BYTES
        whole_bytes = reused_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        huge = self._take_huge(whole_bytes) if whole_bytes else []
        scraps = self._break_up(reused_bytes - total_nbytes(huge))
        _release(scraps.take_least(whole_bytes - total_nbytes(huge)))
        small = scraps.take(reused_bytes - whole_bytes)
        self._keep(scraps)
        fresh = start + total_nbytes(huge)
        tail = start + nbytes - total_nbytes(small)
        pieces = _moved(huge, start)
        if tail > fresh:
            pieces.append(Piece(fresh, tail - fresh, new_mapping()))
        pieces += _moved(small, tail)
        array = (CPiece * len(pieces))(*(CPiece(*piece) for piece in pieces))
        self._library.add_block(self.handle, array, len(pieces), is_large)

    def shrink(self, nbytes: int) -> None:
        """Unmap at least `nbytes` of what waits, or all there is; huge pages go as a whole."""
        nbytes = pages.round_up(max(0, nbytes))
        scraps = self._break_up(nbytes)
        _release(scraps.take_least(nbytes))
        self._keep(scraps)

    def clear(self) -> None:
        """Unmap everything that waits."""
        self.shrink(self.nbytes)

    def close(self) -> None:
        """The same, and what is in use is unmapped when it is freed."""
        self._library.forget_taken(self.handle)
        self.clear()

    def cut_off(self, nbytes: int, *, is_large: bool) -> list[Piece]:
        """Pieces of a range that waits, `nbytes` or a little more; less if none is so large.

        They are the caller's.

        Args:
            nbytes: that are wanted.
            is_large: of mappings that may have huge pages.
        """
        return self._handed_over(self._library.cut_off, nbytes, is_large)

    def _take_huge(self, nbytes: int) -> list[Piece]:
        """Whole huge pages of `nbytes`, or as many as wait. They are the caller's."""
        return self._handed_over(self._library.take_huge, nbytes)

    def _handed_over(self, function: Callable[..., Any], *arguments: int) -> list[Piece]:
        count = ctypes.c_size_t()
        found = function(self.handle, *arguments, ctypes.byref(count))
        return [Piece(p.address, p.nbytes, p.mapping) for p in found[: count.value]]

    def _break_up(self, nbytes: int) -> PageScraps:
        """Pieces of at least `nbytes`, or all there are: of mappings without huge pages first."""
        scraps = PageScraps()
        for is_large in (False, True):
            while scraps.nbytes < nbytes:
                pieces = self.cut_off(nbytes - scraps.nbytes, is_large=is_large)
                for piece in pieces:
                    scraps.add(piece)
                if not pieces:
                    break
        return scraps

    def _keep(self, scraps: PageScraps) -> None:
        """What is left of them waits again."""
        for piece, is_large in scraps.rest():
            self._wait(piece, is_large=is_large)

    def _wait(self, piece: Piece, *, is_large: bool) -> None:
        self._library.add_piece(self.handle, CPiece(*piece), is_large)


def _moved(scraps: list[Piece], target: int) -> list[Piece]:
    """The scraps as pieces in a row from `target` on."""
    pieces: list[Piece] = []
    for scrap in scraps:
        _move(scrap, target)
        pieces.append(Piece(target, scrap.nbytes, new_mapping()))
        target += scrap.nbytes
    return pieces


def _release(scraps: list[Piece]) -> None:
    for scrap in scraps:
        pages.release(scrap.address, scrap.nbytes)


def _move(piece: Piece, target: int) -> None:
    """Put the piece's memory at `target`; where the kernel refuses, untouched memory instead."""
    try:
        pages.move(piece.address, target, piece.nbytes, keep_source=False)
    except OSError:
        pages.release(piece.address, piece.nbytes)
        pages.renew(target, piece.nbytes)
