"""Runs `optimizer.step()` in buckets: some parameters at a time, with all that belongs to them.

    hooks of the user | bucket n-1 | ... | bucket 1 | the user's own call: bucket 0 | hooks

Each bucket is the optimizer's own step, called on an object that stands in for the optimizer with
the bucket's parameters, so the arithmetic is its own. This is exact for every optimizer that
updates each parameter by itself.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.optim.optimizer as torch_optimizer
from torch.utils.hooks import RemovableHandle

from teraplan.runtime.state.memory.movable import is_plain
from teraplan.runtime.state.memory.training_state import TrainingState
from teraplan.runtime.state.updates import attachment, hidden_state
from teraplan.runtime.state.updates.gradient_updates import GradientUpdates
from teraplan.runtime.state.updates.half_done import half_done
from teraplan.runtime.state.updates.host_state import is_updated_on_host
from teraplan.runtime.state.updates.per_parameter import (
    KEPT_FOR_ALL,
    can_be_told,
    not_by_itself,
    why_not_by_itself,
)
from teraplan.runtime.state.updates.random_numbers import has_drawn, random_state
from teraplan.runtime.state.updates.sliced_update import Cut, cut_up, step_in_slices
from teraplan.runtime.state.updates.stand_in import (
    Values,
    equal,
    keeps_anything_in,
    parameters_of,
    share_state,
    stand_in,
    take_over,
    values_beside_state,
)
from teraplan.runtime.state.updates.step_hooks import (
    called_once,
    calling,
    hooks_of,
    is_nested,
    put_innermost,
    steps_another,
)
from teraplan.runtime.state.updates.update_needs import (
    TEMPORARIES,
    buckets_of,
    missing_bytes,
    temporary_bytes,
    tensors_of,
)

Optimizer = torch.optim.Optimizer


@dataclass(slots=True, eq=False)
class _Step:
    """A step under way: its last bucket is the optimizer's own to do, on a stand-in."""

    optimizer: Optimizer
    """What the hooks before ours have left to be stepped: the user's, or a stand-in for it."""
    random: tuple[torch.Tensor, ...]
    """State of the random numbers at its beginning."""
    num_updated: int
    """Parameters that the backward has updated, and those of the buckets that are done."""
    num_begun: int = 0
    """Of the bucket whose update has begun and is not done."""
    using: ExitStack = field(default_factory=ExitStack)
    bucket: Optimizer | None = None
    ours: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    """Its parameters whose memory moves."""
    cut: Cut | None = None
    """The same in slices, which is then what the user's own call steps."""
    values: Values | None = None
    """What the first update has left beside `state`."""


class OptimizerSteps:
    """The steps of all optimizers that update parameters of one training state."""

    def __init__(
        self,
        state: TrainingState,
        make_room: Callable[[int], None],
        *,
        at_gradients: bool = False,
    ) -> None:
        self._state = state
        self._device = state.arena.memory.device
        self._make_room = make_room
        """Called with the bytes that an update takes for a moment."""
        self._handles: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()
        self._steps: weakref.WeakKeyDictionary[Optimizer, _Step] = weakref.WeakKeyDictionary()
        self._tried: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        """Steps of each since it could be told that it updates each parameter by itself."""
        self._whole: weakref.WeakKeyDictionary[Optimizer, str] = weakref.WeakKeyDictionary()
        """Optimizers whose steps run as a whole, and what is said of each."""
        self._draws_nothing: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """Optimizers whose last step has used no random numbers."""
        self.at_gradients = GradientUpdates(state, make_room) if at_gradients else None
        """What is updated in the backward already."""
        state.at_gradients = self.at_gradients
        hook = calling(weakref.ref(self), "_before_hooks")
        self._hook = torch_optimizer.register_optimizer_step_pre_hook(hook)
        _alive.add(self)

    def close(self) -> None:
        """Leave all optimizers alone from now on."""
        self._state.at_gradients = None
        self._state.arena.user_may_have_run()
        for optimizer in list(self._steps):
            self._end(optimizer)
        self._hook.remove()
        for optimizer in list(self._handles):
            self._unhook(optimizer)
        _alive.discard(self)

    def take_in(self, optimizer: Optimizer) -> None:
        """Take the state that the optimizer has now, and its parameters if it is attached."""
        self._state.arena.user_may_have_run()
        if not self._is_to_run(optimizer):
            return
        if self._state.arena.memory.hides and optimizer not in self._handles:
            self._handles[optimizer] = self._hooked(optimizer)
        self._adopt(optimizer)

    def has_hooks(self, optimizer: Optimizer) -> bool:
        """True if a step of the optimizer that begins now begins here, too."""
        return optimizer in self._handles

    def begin_late(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:  # noqa: ANN401
        """Begin a step whose hooks were gathered before there was a training state to move.

        Returns:
            What the step is to be called with; None if it is none of ours.
        """
        return self._before(optimizer, args, kwargs) if self._is_to_run(optimizer) else None

    def end_late(self, optimizer: Optimizer) -> None:
        """Such a step has ended, if it was one; another one that has ended may have."""
        self._after(optimizer)

    # -- hooks -----------------------------------------------------------------------------------

    def _before_hooks(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ANN401
        """Let ours be the last hook before and the first after, if the optimizer updates ours."""
        if is_nested(optimizer):
            return
        self._state.arena.user_may_have_run()
        self._end(optimizer)
        if not self._is_to_run(optimizer):
            self._unhook(optimizer)
            hidden_state.bring_home(self._state.arena, optimizer)
            # Where all that is trained is too small to move, steps end with anybody's step.
            if not self._handles or any(self._is_ours(p) for p in parameters_of(optimizer)):
                self._state.stepped()
            return
        if optimizer not in self._handles:
            self._handles[optimizer] = self._hooked(optimizer)
            self._adopt(optimizer)  # what was loaded before this, its first step here
        before_handle, after_handle, *_ = self._handles[optimizer]
        put_innermost(optimizer, before_handle, after_handle)

    def _is_to_run(self, optimizer: Optimizer) -> bool:
        """True if the optimizer's step is to run in buckets; an attached one's parameters are ours.

        An optimizer that steps another one is left alone; that other one is not.
        """
        if attachment.is_detached(optimizer) or steps_another(optimizer):
            return False
        ours = any(self._is_ours(p) for p in parameters_of(optimizer))
        if ours and not attachment.is_attached(optimizer) and self._runs_whole(optimizer):
            return False
        if attachment.is_attached(optimizer) and (ours or alive() == [self]):
            others = [p for p in parameters_of(optimizer) if not self._is_ours(p)]
            self._state.adopt_parameters(others)
            return True
        return ours

    def _runs_whole(self, optimizer: Optimizer) -> bool:
        """True if nobody can tell what parts of its step would do; the status says so."""
        if optimizer not in self._whole:
            name = keeps_anything_in(optimizer)
            self._whole[optimizer] = name and (
                f"{type(optimizer).__name__} keeps an object in {name} that parts "
                "of a step may change: its step runs as a whole, and reads what is away from its "
                "file; if it updates each parameter by itself, call teraplan.attach(optimizer)"
            )
        return bool(self._whole[optimizer])

    @property
    def fallbacks(self) -> Iterator[str]:
        """One sentence for each optimizer whose steps run as a whole."""
        yield from filter(None, dict.fromkeys(self._whole.values()))

    def _hooked(self, optimizer: Optimizer) -> tuple[RemovableHandle, ...]:
        before, after, loaded = hooks_of(self, attachment.REMEDY)
        handles = (
            optimizer.register_step_pre_hook(before),
            optimizer.register_step_post_hook(after),
            optimizer.register_load_state_dict_post_hook(loaded),
        )
        if not self._state.arena.memory.hides:
            return handles
        hook = calling(weakref.ref(self), "_saved")
        return *handles, optimizer.register_state_dict_post_hook(hook)

    def _saved(self, _: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        return hidden_state.readable(self._state.arena, state_dict)

    def _loaded(self, optimizer: Optimizer) -> None:
        if self.at_gradients is not None:
            self.at_gradients.forget(optimizer)
        self.take_in(optimizer)

    def _unhook(self, optimizer: Optimizer) -> None:
        for handle in self._handles.pop(optimizer, ()):
            handle.remove()

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:  # noqa: ANN401
        """Run all buckets but one, and leave that one to the call that the user has made."""
        if is_nested(optimizer):
            return None
        attachment.refuse_by_name(optimizer)
        self._state.arena.user_may_have_run()
        args, kwargs = called_once(args, kwargs)
        self._state.arena.user_may_have_run()  # a closure may end with anything, such as clipping
        updated, values = self._updated(optimizer, args[1:], kwargs)
        self._try(optimizer, args[1:], kwargs)
        step = _Step(args[0], random_state(self._device), len(updated), values=values)
        self._steps[optimizer] = step
        try:
            order_matters = self._order_matters(optimizer)
            buckets = buckets_of(step.optimizer, updated, order_matters=order_matters)
            self._make_room(TEMPORARIES * max(p.nbytes for p in parameters_of(optimizer)))
            self._run(step, buckets[:-1], args[1:], kwargs)
            step.bucket = self._bring(step, buckets[-1])
            step.cut = cut_up(step.bucket, args[1:], kwargs)
        except BaseException as error:
            if step.num_updated or step.num_begun:
                done, begun = step.num_updated, step.num_begun
                error.add_note(half_done(optimizer, done, num_begun=begun))
            self._end(optimizer)
            raise
        stepped = step.bucket if step.cut is None else step.cut.optimizer
        return (stepped, *args[1:]), kwargs

    def _updated(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[frozenset[int], Values | None]:
        """What the backward has updated, by identity, and what that has left beside `state`."""
        if self.at_gradients is None:
            return frozenset(), None
        return self.at_gradients.before_step(optimizer, args, kwargs)

    def _after(self, optimizer: Optimizer, *_: object) -> None:
        if is_nested(optimizer) or optimizer not in self._steps:
            return
        step = self._steps[optimizer]
        assert step.bucket is not None
        try:
            if step.cut is not None:
                step.cut.join()
            self._compare(step, step.bucket)
            take_over(step.optimizer, step.bucket)
        finally:
            self._end(optimizer)
        draws = has_drawn(step.random, self._device)
        if draws:
            self._draws_nothing.discard(optimizer)
        else:
            self._draws_nothing.add(optimizer)
        if self.at_gradients is not None:
            self.at_gradients.after_step(optimizer, draws_random_numbers=draws)

    def _end(self, optimizer: Optimizer) -> None:
        """The last bucket is done, or never will be."""
        step = self._steps.pop(optimizer, None)
        if step is None:
            return
        self._state.stepped()
        step.using.close()
        if step.cut is not None:
            step.cut.drop()
        if step.bucket is not None:
            self._adopt(step.bucket, step.ours)
        self._state.end_expecting()

    # -- buckets ---------------------------------------------------------------------------------

    def _try(self, optimizer: Optimizer, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        known = self._tried.get(optimizer, 0)
        if known & (known - 1):  # once more after 1, 2, 4, .. steps: some begin something later
            self._tried[optimizer] += 1
            return
        if why := why_not_by_itself(optimizer, args, kwargs, remedy=attachment.REMEDY):
            raise not_by_itself(optimizer, why, attachment.REMEDY)
        if known or can_be_told(optimizer):
            self._tried[optimizer] = known + 1

    def _run(
        self,
        step: _Step,
        buckets: Sequence[set[int]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        for bucket in buckets:
            made = self._bring(step, bucket)
            step.num_begun = len(bucket)
            try:
                step_in_slices(made, args, kwargs)
                step.num_updated, step.num_begun = step.num_updated + len(bucket), 0
            except Exception as error:
                error.add_note(
                    f"teraplan runs the step of {type(made).__name__} for some parameters at a "
                    f"time; if it needs all of them at once, {attachment.REMEDY}"
                )
                raise
            finally:
                share_state(made)
            step.using.close()
            self._adopt(made, step.ours)
            self._state.end_expecting()
            self._compare(step, made)

    def _compare(self, step: _Step, made: Optimizer) -> None:
        """Raise an UnsupportedError if this bucket has left other values than those before it."""
        values = values_beside_state(made)
        if step.values is not None and not equal(step.values, values):
            raise not_by_itself(made, KEPT_FOR_ALL, attachment.REMEDY)
        step.values = values

    def _bring(self, step: _Step, bucket: set[int]) -> Optimizer:
        """The optimizer with this bucket alone, all of whose tensors are in memory."""
        made = stand_in(step.optimizer, bucket)
        step.ours = list(filter(self._is_ours, parameters_of(made)))
        tensors = tensors_of(made, parameters_of(made))
        self._state.expect(sum(missing_bytes(made).values()), temporary_bytes=temporary_bytes(made))
        step.using.enter_context(self._state.using(tensors, writes=True))
        return made

    def _adopt(self, optimizer: Optimizer, ours: Iterable[torch.Tensor] = ()) -> None:
        """Let its state move, and those of `ours` again that have been given other memory."""
        if replaced := [p for p in ours if not self._is_ours(p)]:
            self._state.adopt_parameters(replaced)
        for parameter in parameters_of(optimizer):
            if is_updated_on_host(parameter):
                continue
            if self._is_ours(parameter) and parameter in optimizer.state:
                self._state.adopt_state(optimizer.state[parameter])
        self._state.read_files.let_go()

    def _order_matters(self, optimizer: Optimizer) -> bool:
        """True where state is made, random numbers are drawn, or one memory is updated twice."""
        updated = [p for p in parameters_of(optimizer) if p.grad is not None]
        dense = [p for p in updated if p.layout == torch.strided and is_plain(p)]
        memories = {p.untyped_storage().data_ptr() for p in dense}
        return (
            optimizer not in self._draws_nothing
            or any(p not in optimizer.state for p in updated)
            or len(memories) < len(dense)
        )

    def _is_ours(self, parameter: torch.Tensor) -> bool:
        strided = parameter.layout == torch.strided
        return strided and self._state.arena.block_of(parameter) is not None


_alive: "weakref.WeakSet[OptimizerSteps]" = weakref.WeakSet()


def alive() -> list[OptimizerSteps]:
    """Those of all sessions."""
    return list(_alive)


def attach(optimizer: object) -> Optimizer:
    """See `teraplan.attach`."""
    found = attachment.note(optimizer, attached=True)
    for steps in alive():
        steps.take_in(found)
    return found


def detach(optimizer: object) -> Optimizer:
    """See `teraplan.detach`."""
    return attachment.note(optimizer, attached=False)
