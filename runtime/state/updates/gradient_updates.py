"""Updates parameters in the backward, as soon as their gradients are complete.

    step 0    plain; then it is known which optimizer updates which parameters
    step 1    plain, and watched (`gradient_rehearsal`): does anything want to see gradients?
    step 2..  backward     settle -> the optimizer's own step on a stand-in with one parameter;
                           a `TakenGradient` takes the gradient's place
              step()       all other parameters, counters, hooks: one step of the whole

What is updated in the backward, nobody may have wanted otherwise: from there to the end of
`step()` everything else that is done with gradients, parameters or `param_groups` is an error, or
the rehearsal has seen it and the optimizer updates at its step.
"""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from teraplan.errors import GradientGoneError, UnsupportedError
from teraplan.runtime.process.census import STATES_OF_UNKNOWN, states_to_come
from teraplan.runtime.process.names import described
from teraplan.runtime.state.memory.block import Block
from teraplan.runtime.state.memory.gradient_hooks import has_hooks_of_the_user, is_accumulated
from teraplan.runtime.state.memory.training_state import TrainingState
from teraplan.runtime.state.updates import attachment
from teraplan.runtime.state.updates.bits import Bits, StateBits
from teraplan.runtime.state.updates.gradient_rehearsal import (
    BETWEEN,
    Rehearsal,
    as_gradient_of,
    is_given_more,
)
from teraplan.runtime.state.updates.half_done import half_done, too_early
from teraplan.runtime.state.updates.sliced_update import step_in_slices
from teraplan.runtime.state.updates.stand_in import (
    Values,
    equal,
    parameters_of,
    share_state,
    stand_in,
    values_beside_state,
)
from teraplan.runtime.state.updates.taken_gradient import TakenGradient
from teraplan.runtime.state.updates.update_needs import TEMPORARIES, tensors_of

Optimizer = torch.optim.Optimizer

_PATIENCE = 2
"""Steps that a rehearsal may take to find any gradient of its optimizer."""


@dataclass(slots=True, eq=False)
class _Update:
    """One parameter that has been updated in the backward."""

    parameter: torch.Tensor
    version: int = -1
    taken: torch.Tensor | None = None
    """What autograd has made of what stands for the gradient."""
    left: tuple[Bits, StateBits] | None = None
    """The parameter and its optimizer state as the update has left them."""


@dataclass(slots=True, eq=False)
class _Watch:
    """What is known of one optimizer."""

    optimizer: "weakref.ref[Optimizer]"
    name: str
    rehearsal: Rehearsal | None
    """Until it has been seen to the end."""
    patience: int = _PATIENCE
    refusal: str = ""
    """Why it updates at its step."""
    eligible: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)
    """Parameters whose gradients are each complete within one graph."""
    updates: dict[int, _Update] = field(default_factory=dict[int, _Update])
    """In the step under way, by identity."""
    ready: frozenset[int] = frozenset()
    """Identities of its parameters whose state exists."""
    values: Values | None = None
    """Beside `state`, when the first of them was updated."""
    left: Values | None = None
    """The same as its update has left it."""
    counts: tuple[int, int] = (0, 0)
    """Parameters updated in the last backward, and in the step itself."""


class GradientUpdates:
    """Of one training state. Called by the thread that runs the backward."""

    def __init__(self, state: TrainingState, make_room: Callable[[int], None]) -> None:
        self._state = state
        self._make_room = make_room
        self._watches: weakref.WeakKeyDictionary[Optimizer, _Watch] = weakref.WeakKeyDictionary()
        self._watch_of = WeakIdKeyDictionary()
        """By parameter."""
        self._done: dict[int, _Watch] = {}
        """By address of parameters whose gradient has come, and whose optimizer's step has not."""
        self._given: set[int] = set()
        """Addresses of the parameters that graphs have given a gradient in this step."""
        self._several, self._several_before = set[int](), set[int]()
        """Of these, those of several gradients, such as a tied weight; and of the step before."""
        self._path: list[int] = []
        """Addresses of the parameters that graphs have used in this step before any gradient."""
        self._path_before: list[int] = []
        """The same of the step before."""
        self._follows: bool | None = None
        """Both are equal; None until the first gradient."""

    @property
    def rehearses(self) -> bool:
        """True if the step that begins is to be watched, so that the next one is another."""
        return any(w.rehearsal is not None and w.patience > 0 for w in self._watches.values())

    @property
    def counts(self) -> tuple[int, int]:
        """Parameters updated in the last backward, and in the last steps of their optimizers."""
        counts = [watch.counts for watch in self._watches.values()]
        return sum(early for early, _ in counts), sum(late for _, late in counts)

    @property
    def fallbacks(self) -> Iterator[str]:
        """One sentence for each optimizer that updates at its step although it should not."""
        for watch in list(self._watches.values()):
            if watch.refusal:
                yield (
                    f"{watch.name} updates all parameters in its step although update is "
                    f'"gradient": {watch.refusal}'
                )

    # -- what the training state tells -----------------------------------------------------------

    def begin_step(self) -> None:
        """See `AtGradients`."""
        self._path, self._follows = [], None
        self._given.clear()
        self._several_before, self._several = self._several, set()
        for watch in self._watches.values():
            watch.patience -= watch.rehearsal is not None

    def used(self, parameter: torch.Tensor, block: Block, *, in_step: bool) -> None:
        """See `AtGradients`.

        Raises:
            GradientGoneError: the parameter has been updated, and its optimizer has not stepped.
        """
        if in_step and self._follows is None:
            self._path.append(_address(parameter))
        watch = self._done.get(_address(parameter))
        if watch is None:
            return
        if watch.rehearsal is None:
            raise too_early(parameter, f"a graph uses it {BETWEEN}")
        watch.rehearsal.refuse(
            f"graphs use parameters {BETWEEN} (several backwards for a step, evaluation)"
        )

    def settle(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor | None:
        """See `AtGradients`.

        Raises:
            GradientGoneError: it has been updated in a backward already.
        """
        self._note_gradient()
        watch, block = self._watch(parameter), self._state.arena.block_of(parameter)
        if watch is None or block is None or watch.refusal:
            return None
        if watch.rehearsal is not None:
            watch.rehearsal.settle(parameter, gradient)
            return None
        address = _address(parameter)
        if address in self._done:
            raise too_early(
                parameter,
                f"it gets another gradient {BETWEEN}: there is a second backward, "
                "or a graph uses it once more than in the steps before",
            )
        optimizer = watch.optimizer()
        if address in self._given:
            self._several.add(address)
        self._given.add(address)
        if optimizer is None or address in self._several_before:
            return None
        if not self._may_update(watch, optimizer, parameter, gradient):
            return None
        self._done[address] = watch
        self._update(watch, optimizer, parameter, gradient)
        return TakenGradient(parameter)

    def arrived(self, parameter: torch.Tensor) -> None:
        """See `AtGradients`."""
        watch = self._watch(parameter)
        optimizer = watch.optimizer() if watch is not None else None
        if watch is None or optimizer is None or watch.refusal:
            return
        if watch.rehearsal is not None:
            self._note_gradient()
            watch.rehearsal.arrived(optimizer, parameter)
            if self._state.arena.block_of(parameter) is not None:
                self._done[_address(parameter)] = watch
        elif id(parameter) in watch.updates:
            update = watch.updates[id(parameter)]
            update.version, update.taken = parameter._version, parameter.grad

    def explain(self, error: Exception) -> None:
        """See `AtGradients`."""
        for watch in self._watches.values():
            optimizer, begun = watch.optimizer(), len(watch.updates)
            if optimizer is not None and begun:
                done = sum(update.left is not None for update in watch.updates.values())
                error.add_note(half_done(optimizer, done, num_begun=begun - done))

    # -- what the optimizer's step tells ---------------------------------------------------------

    def before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[frozenset[int], Values | None]:
        """The step itself begins, all hooks of the user have run.

        Args:
            optimizer: the user's.
            args: of its step, but for the optimizer.
            kwargs: of its step.

        Returns:
            Identities of the parameters that have been updated, and what their updates have left
            beside `state`.

        Raises:
            GradientGoneError: they should have been updated in another way.
        """
        watch = self._watches.get(optimizer)
        if watch is None:
            return frozenset(), None
        if watch.rehearsal is not None and watch.rehearsal.has_begun:
            for parameter in watch.rehearsal.end(optimizer, args, kwargs):
                watch.eligible[parameter] = True
        for problem in self._problems(watch, optimizer, args, kwargs):
            raise GradientGoneError(
                f"{problem}, and {len(watch.updates)} parameters have been updated without that: "
                'update is "gradient". Set it to "step", and load a checkpoint'
            )
        parameters = parameters_of(optimizer)
        late = sum(p.grad is not None and id(p) not in watch.updates for p in parameters)
        watch.counts = len(watch.updates), late
        return frozenset(watch.updates), watch.left

    def after_step(self, optimizer: Optimizer, *, draws_random_numbers: bool) -> None:
        """The step is over."""
        watch = self._watches.get(optimizer)
        if watch is None:
            rehearsal = Rehearsal(self._state.arena)
            watch = _Watch(weakref.ref(optimizer), type(optimizer).__name__, rehearsal)
            self._watches[optimizer] = watch
        elif watch.rehearsal is not None and watch.rehearsal.has_begun:
            watch.refusal = watch.refusal or watch.rehearsal.reason
            watch.rehearsal = None
        if draws_random_numbers:
            watch.refusal = "it draws random numbers"
        for parameter in parameters_of(optimizer):
            other = self._watch(parameter)
            if other is not None and other is not watch and other.optimizer() is not None:
                other.refusal = watch.refusal = "another optimizer has some of its parameters, too"
            self._watch_of[parameter] = watch
        self._begin_anew(watch)

    def forget(self, optimizer: Optimizer) -> None:
        """Its state is another one: what has been updated before does not count."""
        watch = self._watches.get(optimizer)
        if watch is not None:
            self._begin_anew(watch)

    def _begin_anew(self, watch: _Watch) -> None:
        watch.updates.clear()
        watch.values = watch.left = None
        self._done = {address: w for address, w in self._done.items() if w is not watch}

    def _watch(self, parameter: torch.Tensor) -> _Watch | None:
        """Of the optimizer that updates the parameter, as far as that is known."""
        found: _Watch | None = self._watch_of.get(parameter)  # type: ignore[no-untyped-call]
        return found

    # -- updates ---------------------------------------------------------------------------------

    def _note_gradient(self) -> None:
        if self._follows is None:
            self._follows = self._path == self._path_before
            self._path_before = self._path

    def _may_update(
        self,
        watch: _Watch,
        optimizer: Optimizer,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
    ) -> bool:
        """True if this is all of the gradient, and nobody else is to see it."""
        if not self._follows or parameter not in watch.eligible or parameter.grad is not None:
            return False
        if attachment.is_detached(optimizer) or torch.is_grad_enabled():
            return False
        if torch.is_anomaly_enabled():  # looks into every gradient
            return False
        if watch.values is None:
            watch.values = values_beside_state(optimizer)
            to_come = states_to_come(optimizer, unknown=STATES_OF_UNKNOWN)
            missing = {id(p) for p, count in to_come if count}
            watch.ready = frozenset(map(id, parameters_of(optimizer))) - missing
        return (
            id(parameter) in watch.ready
            and (gradient.shape, gradient.dtype) == (parameter.shape, parameter.dtype)
            and not has_hooks_of_the_user(parameter)
            and is_accumulated(parameter)
        )

    def _update(
        self,
        watch: _Watch,
        optimizer: Optimizer,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
    ) -> None:
        made = stand_in(optimizer, {id(parameter)})
        random = torch.get_rng_state()
        parameter.grad = as_gradient_of(parameter, gradient)
        temporary_bytes = TEMPORARIES * parameter.nbytes
        try:
            self._make_room(temporary_bytes)
            self._state.expect(0, temporary_bytes=temporary_bytes)
            with (
                self._state.using(tensors_of(made, [parameter]), writes=True),
                torch.autocast(device_type="cpu", enabled=False),
            ):
                watch.updates[id(parameter)] = update = _Update(parameter)
                try:
                    step_in_slices(made, (), {})
                finally:
                    share_state(made)
                if self._state.arena.block_of(parameter) is None:  # it has been given other memory
                    self._state.adopt_parameters([parameter])
                    self._done[_address(parameter)] = watch
                arena = self._state.arena
                state = StateBits.of(optimizer.state.get(parameter, {}), arena)
                update.left = Bits.of(parameter, arena), state
        finally:
            parameter.grad = None
            self._state.end_expecting()
        self._state.adopt_state(optimizer.state.get(parameter, {}))
        left = values_beside_state(made)
        same = watch.left is None or equal(watch.left, left)
        if not same or not torch.equal(random, torch.get_rng_state()):
            raise UnsupportedError(
                f"{watch.name} does not update each parameter by itself: it draws random numbers, "
                "or what it keeps in param_groups, in attributes of its own or in state under a "
                'name depends on all of them; set update to "step"'
            )
        watch.left = left

    def _problems(
        self, watch: _Watch, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[str]:
        """Why what was updated in the backward should have been updated in another way."""
        if not watch.updates:
            return
        if is_given_more(args, kwargs):
            yield "the optimizer's step is given arguments that are no closure"
        if watch.values is not None and not equal(watch.values, values_beside_state(optimizer)):
            yield f"param_groups, such as the learning rate, have changed {BETWEEN}"
        if torch.is_autocast_enabled("cpu"):
            yield "the optimizer's step runs under autocast"
        members = {id(p) for p in parameters_of(optimizer)}
        for update in watch.updates.values():
            what = self._changed(update, optimizer)
            if id(update.parameter) not in members:
                what = "a parameter", "taken from the optimizer"
            if what is not None:
                yield f"{what[0]} ({described(update.parameter)}) was {what[1]} {BETWEEN}"

    def _changed(self, update: _Update, optimizer: Optimizer) -> tuple[str, str] | None:
        """What somebody has done to the parameter since the update."""
        arena, parameter = self._state.arena, update.parameter
        if update.taken is None or parameter.grad is not update.taken:
            return "the gradient of a parameter", "dropped or replaced"
        if update.left is None:
            return None
        value, state = update.left
        if parameter._version != update.version or not value.are_those_of(parameter, arena):
            return "a parameter", "changed"
        if not state.are_those_of(optimizer.state.get(parameter, {}), arena):
            return "the optimizer state of a parameter", "changed"
        return None


def _address(parameter: torch.Tensor) -> int:
    """Of its memory, also of a view."""
    return parameter.untyped_storage().data_ptr()
