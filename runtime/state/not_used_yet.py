"""Parameters that no graph has used yet: of compiled modules, or trained with such as one has.

They move from the first graph on, so that a model in several graphs needs no more memory than one
in a single graph. What no graph uses in the first step is for eager code: nothing would bring it,
so it returns to memory of its own, where the budget has room for that.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from teraplan.runtime.process.census import nbytes_with_state
from teraplan.runtime.state.memory.movable import is_shared
from teraplan.runtime.state.memory.training_state import TrainingState
from teraplan.runtime.state.updates.stand_in import parameters_of
from teraplan.runtime.state.updates.step_hooks import calling, is_nested
from teraplan.units import format_nbytes


class NotUsedYet:
    """Of one training state."""

    def __init__(self, state: TrainingState, least_bytes: Callable[[], int]) -> None:
        self._state, self._least_bytes = state, least_bytes
        self._seen = WeakIdKeyDictionary()
        """Parameters that a step has ended without: no more of them is expected."""
        hook = calling(weakref.ref(self), "_before_step")
        self._hook = register_optimizer_step_pre_hook(hook)

    def take_in(self, parameters: Iterable[torch.Tensor]) -> None:
        """Let these move: graphs to come use them."""
        mine = self._state.arena.block_of
        wanted = (p for p in parameters if p not in self._seen and mine(p) is None)
        new = [p for p in wanted if self._state.arena.takes(p) and not is_shared(p)]
        self._state.adopt_parameters(new)
        self._state.unused.update(dict.fromkeys(new, True))

    @property
    def fallbacks(self) -> Iterator[str]:
        """What is read where it lies, in a sentence."""
        left = [p for p in self._state.unused if p in self._seen]
        if left:
            yield (
                f"{len(left)} parameters ({format_nbytes(sum(p.nbytes for p in left))}) are used "
                "by no compiled graph, and the budget has no room for them: eager code reads them "
                "through the spill file"
            )

    def close(self) -> None:
        """No parameter returns from now on."""
        self._hook.remove()

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """What no graph has used until now returns, if it fits."""
        state = self._state
        waiting = [p for p in state.unused if p not in self._seen]
        if not waiting or is_nested(optimizer):
            return
        if all(state.arena.block_of(p) is None for p in parameters_of(optimizer)):
            return
        self._seen.update(dict.fromkeys(waiting, True))
        left_bytes = state.limit_bytes - sum(map(nbytes_with_state, waiting))
        if left_bytes >= self._least_bytes():
            state.arena.user_may_have_run()
            state.let_stay(waiting)
            state.set_limit(left_bytes)
