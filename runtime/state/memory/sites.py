"""What a step makes of the uses of training state."""

from collections.abc import Callable, Sequence
from typing import Protocol

from teraplan.runtime.state.memory.block import Block


class Sites(Protocol):
    """What makes sites of a step of the uses of training state, and does there what a plan says."""

    def use(
        self, blocks: Sequence[Block], bring: Callable[[], None], *, changes: bool, update: bool
    ) -> None:
        """Blocks are about to be used, after `bring`."""
        ...

    def end_use(self, blocks: Sequence[Block], done: Callable[[], None], *, update: bool) -> None:
        """Blocks have been used, which `done` says."""
        ...

    def make(self, make: Callable[[], Block]) -> None:
        """A block is made, and has been used."""
        ...
