"""What happens at a block's address when its bytes have left, and when they have come back."""

from teraplan.runtime import pages
from teraplan.runtime.state.block import Block
from teraplan.runtime.state.digests import check_landed
from teraplan.runtime.tiers import Tiers


def take_out(block: Block, tiers: Tiers) -> int:
    """Show the block's record at its address; returns that of the pages which were there."""
    assert block.record is not None
    waiting = pages.take(block.nbytes)
    pages.move(block.address, waiting, block.nbytes)
    address = block.address
    for fd, offset, nbytes in tiers.pieces(block.record):
        pages.show_file(address, nbytes, fd, offset)
        address += nbytes
    assert address == block.address + block.nbytes, "a block is whole pages: it has no ends"
    return waiting


def land(block: Block) -> None:
    """Let the pages that have been read be at the block's address.

    Raises:
        IntegrityError: they do not hold what left.
    """
    check_landed(block)
    pages.move(block.landing, block.address, block.nbytes)
    pages.release(block.landing, block.nbytes)
