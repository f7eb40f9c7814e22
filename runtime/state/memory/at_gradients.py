"""What a training state tells of gradients to who may update parameters at them."""

from typing import Protocol

import torch

from teraplan.runtime.state.memory.block import Block


class AtGradients(Protocol):
    """Who is told of gradients, and may update parameters as soon as these are complete."""

    def begin_step(self) -> None:
        """The first graph after an optimizer's step begins."""
        ...

    def used(self, parameter: torch.Tensor, block: Block, *, in_step: bool) -> None:
        """A graph is about to use a parameter, or a view of it; and the block that it is in."""
        ...

    def settle(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor | None:
        """A graph has no more use for a parameter whose gradient it has computed.

        Returns what stands for the gradient if it has been used up, else None.
        """
        ...

    def arrived(self, parameter: torch.Tensor) -> None:
        """The parameter has been given its gradient of a backward."""
        ...

    def explain(self, error: Exception) -> None:
        """A graph cannot go on: note at the error what has been updated in the step under way."""
        ...
