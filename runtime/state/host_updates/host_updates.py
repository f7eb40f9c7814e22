"""Updates of some parameters on the host's cores, at the same time as the others' on the device.

    hooks of the user | host   b0 b1 b2 ...          | the user's own call: one parameter | hooks
                      | device all others but one    |

The chosen parameters' optimizer state lives in host memory; `optimizer.state` shows it there. Their
gradients come to the host in the backward (`early_gradients`) or with their values in the step; the
optimizer's own arithmetic updates them (`host_step`), and the values are copied back. The step ends
when both parts are done.

Where the training state moves by pages, host and device are the same cores: then the host's part
comes first, and `OptimizerSteps` does the rest in its buckets.
"""

import logging
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.optim.optimizer as torch_optimizer
from torch.utils.hooks import RemovableHandle

from teraplan.config import Config
from teraplan.errors import TeraplanError
from teraplan.runtime.device import Device
from teraplan.runtime.host_lane import PlainLane
from teraplan.runtime.process import census
from teraplan.runtime.state.host_updates import host_choice, host_rates
from teraplan.runtime.state.host_updates.early_gradients import EarlyGradients
from teraplan.runtime.state.host_updates.host_placement import HostPlacement
from teraplan.runtime.state.host_updates.host_records import HostReport, Known
from teraplan.runtime.state.host_updates.host_step import HostPlace, HostStep
from teraplan.runtime.state.host_updates.host_twins import Sent
from teraplan.runtime.state.host_updates.host_worker import HostWorker
from teraplan.runtime.state.keeper import StateKeeper
from teraplan.runtime.state.updates import attachment
from teraplan.runtime.state.updates.per_parameter import (
    KEPT_FOR_ALL,
    not_by_itself,
    why_not_by_itself,
    why_not_elsewhere,
)
from teraplan.runtime.state.updates.stand_in import (
    equal,
    keeps_anything_in,
    keeps_tensors_beside_state,
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
    put_in_order,
    put_innermost,
    steps_another,
)
from teraplan.runtime.state.updates.update_trial import plain_step

log = logging.getLogger(__name__)

Optimizer = torch.optim.Optimizer
_WHERE = "some of which run on the host"
_REMEDY = (
    "call teraplan.detach(optimizer), which lets its step run as a whole on the device, or set "
    'host_updates to "never"'
)


class HostUpdates:
    """The host's part of all optimizers that update parameters of one session's models."""

    def __init__(self, config: Config, device: Device, keeper: StateKeeper) -> None:
        self._config, self._device, self._keeper = config, device, keeper
        wanted = config.host_updates != "never"
        self._lane = device.open_lane() if wanted else PlainLane()
        self.placement = HostPlacement(device, self._lane, strict=config.strict)
        self._early = EarlyGradients(device.host_pool, self._lane)
        self.last = HostReport()
        self._known: weakref.WeakKeyDictionary[Optimizer, Known] = weakref.WeakKeyDictionary()
        self._tidied: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._worker = HostWorker(config.deadline_s)
        self._broken: TeraplanError | None = None
        self._needed_share = 0.0
        self._hook: RemovableHandle | None = None
        if wanted:
            hook = calling(weakref.ref(self), "_before_hooks")
            self._hook = torch_optimizer.register_optimizer_step_pre_hook(hook)

    # -- what the session tells ------------------------------------------------------------------

    @property
    def wanted(self) -> bool:
        """False if nothing is ever updated on the host."""
        return self._hook is not None

    def meet(self, inputs: Iterable[object]) -> None:
        """A graph with these inputs is about to be compiled."""
        for value in inputs if self.wanted else ():
            if isinstance(value, torch.nn.Parameter):
                self.placement.ours[value] = True

    def expect(self, over_bytes: int) -> None:
        """The first step begins; the device lacks `over_bytes` for what cannot leave it otherwise.

        The state that is to be on the host is chosen, and what of it exists goes there.
        """
        if not self.wanted:
            return
        optimizers = [o for o in census.optimizers() if self._is_to_run(o)]
        whole = 0
        for optimizer in optimizers:
            states = host_choice.state_bytes(optimizer, host_choice.missing_bytes(optimizer))
            whole += sum(states.values())
        if self._device.has_host_beside and whole:
            self._needed_share = min(1.0, max(0.0, over_bytes / whole))
        for optimizer in optimizers:
            self._meet_optimizer(optimizer)
            if not keeps_tensors_beside_state(optimizer):
                self._place(optimizer, self._first_share)

    def missing_bytes(self) -> int:
        """Of state that does not exist yet, and will not be on the device."""
        return self.placement.missing_bytes() if self._device.has_host_beside else 0

    def close(self) -> None:
        """Leave all optimizers alone from now on; state returns to the device."""
        if self._hook is not None:
            self._hook.remove()
        self._worker.close()
        self._early.close()
        # At the end of the process the main thread counts as dead, and nobody needs the state.
        needed = threading.main_thread().is_alive()
        for optimizer in list(self._known) if needed else ():
            try:
                self._let_go(optimizer)
            except torch.OutOfMemoryError as error:
                log.warning("optimizer state stays in host memory: %s", error)
        self.placement.close()

    # -- hooks -----------------------------------------------------------------------------------

    def _before_hooks(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ANN401
        """Let ours be the last hook before the step, but for that of the state that moves."""
        if is_nested(optimizer):
            return
        if not self._is_to_run(optimizer):
            self._let_go(optimizer)
            self._tidy(optimizer)
            return
        self._meet_optimizer(optimizer)
        before, after, _ = self._known[optimizer].handles
        put_innermost(optimizer, before, after)

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:  # noqa: ANN401
        """Do all updates but one, and leave that one to the call that the user has made."""
        known = self._known.get(optimizer)
        if known is None or is_nested(optimizer):
            return None
        known.left, known.made = None, None
        if self._broken is not None:
            raise self._broken
        args, kwargs = called_once(args, kwargs)
        if not self._can_be_divided(optimizer, known, args[1:], kwargs):
            return args, kwargs
        self._place(optimizer, max(self._first_share, self.placement.share_of(optimizer)))
        self._tidy(optimizer)
        left: Optimizer = args[0]
        chosen = self.placement.to_update(optimizer, left)
        sent = self._early.take(chosen)
        if chosen:
            made = self._run(optimizer, left, self._step(left, chosen, sent, args[1:], kwargs))
            args = (made, *args[1:])
        self._watch(optimizer, chosen)
        return args, kwargs

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ANN401
        known = self._known.get(optimizer)
        if known is None or is_nested(optimizer):
            return
        left, made, known.left, known.made = known.left, known.made, None, None
        if left is not None and made is not None:
            found = values_beside_state(made)
            if not all(equal(values, found) for values in known.values):
                raise not_by_itself(optimizer, KEPT_FOR_ALL, _REMEDY)
            take_over(left, made)
            if known.has_new_state:
                known.has_new_state = False
                put_in_order(optimizer)
        if not known.measured and self._config.host_updates == "auto" and not known.refused:
            self._measure(optimizer, known, args[1:], kwargs)

    def _loaded(self, optimizer: Optimizer) -> None:
        """A state_dict was loaded: what belongs on the host goes there."""
        self._early.close()  # state that was loaded comes first to have the room
        self.placement.take_in(optimizer)

    # -- optimizers ------------------------------------------------------------------------------

    def _is_to_run(self, optimizer: Optimizer) -> bool:
        if attachment.is_detached(optimizer) or steps_another(optimizer):
            return False
        parameters = list(parameters_of(optimizer))
        is_ours = any(p in self.placement.ours for p in parameters)
        if is_ours and attachment.is_attached(optimizer):
            for parameter in parameters:
                self.placement.ours[parameter] = True
        return is_ours

    def _meet_optimizer(self, optimizer: Optimizer) -> None:
        if optimizer in self._known:
            return
        before, after, loaded = hooks_of(self, _REMEDY)
        self._known[optimizer] = Known(
            handles=(
                optimizer.register_step_pre_hook(before),
                optimizer.register_step_post_hook(after),
                optimizer.register_load_state_dict_post_hook(loaded),
            )
        )

    def _let_go(self, optimizer: Optimizer) -> None:
        """The optimizer's step is its own again."""
        known = self._known.pop(optimizer, None)
        if known is not None:
            for handle in known.handles:
                handle.remove()
            self._early.watch(parameters_of(optimizer), ())
        self.placement.let_go(optimizer)

    def _tidy(self, optimizer: Optimizer) -> None:
        if optimizer not in self._tidied:
            self._tidied.add(optimizer)
            self.placement.send_strays_home(optimizer)

    @property
    def _first_share(self) -> float:
        wanted = self._config.host_updates
        return wanted if isinstance(wanted, float) else self._needed_share

    def _can_be_divided(
        self, optimizer: Optimizer, known: Known, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> bool:
        """True if the step of some parameters on the host is what it is on the device.

        Raises:
            UnsupportedError: it updates all parameters together.
        """
        if known.tried:
            return not known.refused
        attachment.refuse_by_name(optimizer, where=_WHERE, remedy=_REMEDY)
        why = ""
        if keeps_tensors_beside_state(optimizer):
            why = "keeps tensors in containers beside its state"
        elif name := keeps_anything_in(optimizer):
            why = f"keeps an object in {name}"
        elif why_not := why_not_by_itself(optimizer, args, kwargs, remedy=_REMEDY):
            raise not_by_itself(optimizer, why_not, _REMEDY)
        else:
            why = why_not_elsewhere(optimizer, args, kwargs)
        known.tried, known.refused = True, bool(why)
        if why:
            self.placement.let_go(optimizer)
            self.placement.note_stay(optimizer, why)
        return not known.refused

    def _measure(
        self, optimizer: Optimizer, known: Known, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        """Decide by rates how much the host is to do, once there is state to try it on."""
        known.measured = not self._device.has_host_beside
        tried = None if known.measured else host_rates.to_try(optimizer)
        if tried is None:
            return
        known.measured = True
        ours = [p for p in parameters_of(optimizer) if p in self.placement.ours]
        share = host_rates.faster_share(optimizer, tried, ours, self._device, args, kwargs)
        self._place(optimizer, max(share, self.placement.share_of(optimizer)))

    def _watch(self, optimizer: Optimizer, chosen: Sequence[torch.Tensor]) -> None:
        """Let gradients come early, but not where state that is still to be made needs the room."""
        if self._device.has_host_beside:
            may = not host_choice.missing_bytes(optimizer)
            self._early.watch(parameters_of(optimizer), chosen if may else ())

    def _place(self, optimizer: Optimizer, share: float) -> None:
        if not self.placement.is_placed(optimizer, share):
            self._early.close()  # state comes first to have the room
            self.placement.place(optimizer, share)

    # -- the step --------------------------------------------------------------------------------

    def _step(
        self,
        left: Optimizer,
        chosen: Sequence[torch.Tensor],
        sent: Mapping[int, Sent],
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> HostStep:
        place = HostPlace(
            lane=self._lane,
            slots=self.placement.slots,
            state=self.placement.state,
            access=self._access,
            sent=sent,
        )
        buckets = list(host_choice.buckets_of(chosen))
        return HostStep(left, buckets, place, args, kwargs, host_choice.missing_bytes(left))

    @contextmanager
    def _access(self, tensors: Sequence[torch.Tensor], *, writes: bool) -> Iterator[None]:
        state = self._keeper.state
        if state is None:
            yield
            return
        state.arena.user_may_have_run()
        with state.using(tensors, writes=writes):
            yield

    def _run(self, optimizer: Optimizer, left: Optimizer, step: HostStep) -> Optimizer:
        """Do the host's part, and the device's but for what is left to the user's call."""
        known = self._known[optimizer]
        rest = [p for p in parameters_of(left) if id(p) not in step.parameters]
        known.values = []
        waited_ns = 0
        self._lane.begin()
        try:
            if self._keeper.moves:  # what moves by pages belongs to this thread
                step.run(in_worker=False)
            else:
                self._worker.start(step)
                last = host_choice.smallest(rest)
                self._update_here(known, left, {id(p) for p in rest} - last, step)
                rest = [p for p in rest if id(p) in last]
                start_ns = time.perf_counter_ns()
                self._join(step)
                waited_ns = time.perf_counter_ns() - start_ns
        finally:
            if not step.ended.is_set():
                step.stopped = True
                self._join(step)
            self._finish(optimizer, left, step, waited_ns)
        step.raise_error()
        if step.values is not None:
            known.values.append(step.values)
        known.left, known.made = left, stand_in(left, {id(p) for p in rest})
        return known.made

    def _update_here(self, known: Known, left: Optimizer, bucket: set[int], step: HostStep) -> None:
        """The update on the device, at the same time as that of `step`."""
        if bucket:
            made = stand_in(left, bucket)
            try:
                plain_step(made)(made, *step.args, **step.kwargs)
            finally:
                share_state(made)
            known.values.append(values_beside_state(made))

    def _join(self, step: HostStep) -> None:
        try:
            self._worker.join(step)
        except TeraplanError as error:
            self._broken = error  # its thread may still write to anything
            raise

    def _finish(
        self, optimizer: Optimizer, left: Optimizer, step: HostStep, waited_ns: int
    ) -> None:
        """What has been updated is the user's, whatever happened to the rest."""
        self._lane.end()
        made = [(t.parameter, s) for t, s in step.updated if t.parameter not in left.state]
        for twin, _ in step.updated:
            twin.end()
        if made:
            left.state.update((p, s) for p, s in made if s is not None)
            self._known[optimizer].has_new_state = True
        for parameter in step.unfit:
            self.placement.give_up(optimizer, parameter)
        self.last = HostReport(len(step.updated), step.num_sent, step.busy_ns, waited_ns)
