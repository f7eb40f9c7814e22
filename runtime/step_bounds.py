"""Where a step of training ends and the next begins, which no call of the user's says.

At the first forward after an optimizer has stepped, with no forward left that waits for its
backward. Before an optimizer has been seen: at the first forward after a backward.
"""

import torch

from teraplan.runtime.engine import Engine

_MAX_EVENTS = 1_000_000
_MAX_MERGED_STEPS = 3
"""So often an optimizer may step while a forward waits for a backward that may never come."""


class StepBounds:
    """Of the steps of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.optimizer_known = False
        """An optimizer has stepped."""
        self._optimizer_steps = 0
        self._backward = -1
        """Autograd's number of the one in which the last forward ran; -1: in none."""

    def optimizer_stepped(self) -> None:
        """Some optimizer has updated its parameters."""
        self.optimizer_known = True
        self._optimizer_steps += 1
        if self._engine.recorder is not None:
            self._engine.recorder.may_end_here()

    def at_begin(self) -> bool:
        """A forward begins: True if it is the first of a step. To be asked once."""
        engine = self._engine
        before, self._backward = self._backward, torch._C._current_graph_task_id()
        if engine.recorder is None:
            return True
        if before == self._backward >= 0:  # checkpoints compute again
            return False
        if not engine.idle:  # a user who keeps a loss with its graph must not stop all steps
            return self._optimizer_steps > _MAX_MERGED_STEPS
        if self._optimizer_steps > 0 or engine.recorder.num_sites > _MAX_EVENTS:
            return True
        return (not self.optimizer_known or engine.finished_plan) and engine.in_backward

    def begin(self) -> None:
        """A step begins."""
        self._optimizer_steps = 0
