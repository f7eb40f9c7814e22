"""Where a step of training ends and the next begins, which no call of the user's says.

At the first forward after an optimizer has stepped, with no forward left that waits for its
backward. Before an optimizer has been seen: at the first forward after a backward.
"""

import threading

import torch

from teraplan.errors import UnsupportedError
from teraplan.runtime.engine.engine import Engine

_MAX_EVENTS = 1_000_000
_MAX_MERGED_STEPS = 3
"""So often an optimizer may step while a forward waits for a backward that may never come."""
_MOST_IN_VAIN = 2
"""So often a step goes on for a forward that turns out to have waited for none."""


class StepBounds:
    """Of the steps of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.optimizer_known = False
        """An optimizer has stepped."""
        self._optimizer_steps = 0
        self._backward = -1
        """Autograd's number of the one in which the last forward ran; -1: in none."""
        self._waiting = frozenset[int]()
        """Numbers of forwards that waited when one began after an optimizer had stepped."""
        self._num_in_vain = 0
        """Such waits in a row that no backward has ended."""
        self._between = False
        """One step has ended, and the next has not begun: an interrupt may come there."""
        self._thread = 0
        """Identity of the one whose step it is."""

    def optimizer_stepped(self) -> None:
        """Some optimizer has updated its parameters."""
        self.optimizer_known = True
        self._optimizer_steps += 1
        if self._engine.recorder is not None:
            self._engine.recorder.may_end_here()

    def at_begin(self) -> bool:
        """A forward begins: True if it is the first of a step. To be asked once.

        Raises:
            UnsupportedError: the step under way is another thread's.
        """
        engine = self._engine
        before, self._backward = self._backward, torch._C._current_graph_task_id()
        if engine.recorder is None or self._between:
            self._thread = threading.get_ident()
            return True
        if before == self._backward >= 0:  # checkpoints compute again
            return False
        if self._backward < 0:  # else it may be a thread of autograd's
            self._require_own_step()
        self._look_at_waits()
        if not engine.idle:  # a user who keeps a loss with its graph must not stop all steps
            return self._optimizer_steps > self._most_merged_steps
        if self._optimizer_steps > 0 or engine.recorder.num_sites > _MAX_EVENTS:
            return True
        return (not self.optimizer_known or engine.finished_plan) and engine.in_backward

    @property
    def _most_merged_steps(self) -> int:
        """How often an optimizer may step while a forward waits: the other half of a GAN, or a loss
        of the step before that is still somebody's."""
        return 0 if self._num_in_vain >= _MOST_IN_VAIN else _MAX_MERGED_STEPS

    def _look_at_waits(self) -> None:
        """Learn what became of forwards that waited after an optimizer had stepped."""
        engine = self._engine
        if self._optimizer_steps == 0:
            return
        waiting = frozenset(engine.waiting_calls)
        if self._waiting and not self._waiting & waiting:
            assert engine.recorder is not None
            went_back = engine.recorder.calls_gone_back & self._waiting
            self._num_in_vain = 0 if went_back else self._num_in_vain + 1
            self._waiting = frozenset()
        self._waiting = self._waiting or waiting

    def _require_own_step(self) -> None:
        here = threading.get_ident()
        if here == self._thread:
            return
        has_ended = self._optimizer_steps > 0 or (
            not self.optimizer_known and self._engine.in_backward
        )
        if not (self._engine.idle and has_ended):
            raise UnsupportedError(
                "two threads train at once under the same options: a forward runs while the step "
                "of another thread has not ended. Train in one thread, one after the other, or "
                "in a process for each"
            )
        self._thread = here

    def end(self) -> bool:
        """A step ends; False if this was said before, and something interrupted what followed."""
        is_new, self._between = not self._between, True
        state = self._engine.training_state
        if state is not None and self._engine.recorder is not None and not self.optimizer_known:
            state.stepped()  # by code of the user's own
        return is_new

    def begin(self) -> None:
        """The next step has begun."""
        self._optimizer_steps = 0
        self._waiting = frozenset()
        self._between = False
