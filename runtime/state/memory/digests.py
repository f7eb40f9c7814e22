"""Tells by digests whether a block's bytes are those that were written to its record."""

import ctypes

from teraplan.errors import IntegrityError
from teraplan.runtime.process import pages
from teraplan.runtime.state.memory.block import Block, Place
from teraplan.runtime.storage.memory import digest
from teraplan.units import MIB, format_nbytes

_PIECE_BYTES = 2 * MIB
"""Of a file that is shown, copied at once."""


def is_as_written(block: Block) -> bool:
    """True if a block in memory has the bytes that its record got."""
    return digest(block.address, block.nbytes) == block.digest


def is_as_it_left(block: Block) -> bool:
    """True if a block is away, and nothing has touched its address since it left."""
    if block.place is Place.MEMORY:
        return False
    touched = pages.touched_bytes(block.address, block.nbytes)
    return not touched and not block.touched  # in this order: the trimmer may come in between


def _copy_shown(block: Block) -> None:
    """Copy what is shown where the block is away, of which little is in memory at once."""
    for offset in range(0, block.nbytes, _PIECE_BYTES):
        nbytes = min(_PIECE_BYTES, block.nbytes - offset)
        ctypes.memmove(block.landing + offset, block.address + offset, nbytes)
        pages.drop_mapped(block.address + offset, nbytes)


def has_landed(block: Block) -> bool:
    """See whether what has come back is what left, or what has been written there since.

    Then `block.changed` says which. False if it is neither: something has changed it on its way.
    """
    touched = block.touched or bool(pages.touched_bytes(block.address, block.nbytes))
    if touched:  # perhaps after the read, and the mapping always has the latest
        _copy_shown(block)
    block.changed = digest(block.landing, block.nbytes) != block.digest
    return touched or not block.changed


def came_back_changed(block: Block, where: str) -> IntegrityError:
    """The error that tells so; `where`: its record is."""
    found = digest(block.landing, block.nbytes)
    return IntegrityError(
        f"{block.label}: {format_nbytes(block.nbytes)} came back changed twice from the spill "
        f"file, {where} (digest {found:016x}, written {block.digest:016x}); the disk, its driver "
        "or the memory is faulty"
    )
