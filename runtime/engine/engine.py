"""Executes a plan: moves tensors out and back at the sites of the running graphs.

Without a plan (the first steps, or a step that turned out differently) it keeps to the budget by
itself: when there is too much on the device, what was saved first leaves first, because backward
runs in the opposite order and needs it last.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch._C._autograd import _get_current_graph_task_keep_graph

from teraplan.errors import UnsupportedError
from teraplan.runtime.device import Device
from teraplan.runtime.engine.at_work import at_work
from teraplan.runtime.engine.mover import Mover
from teraplan.runtime.engine.planned_sizes import PlannedSizes
from teraplan.runtime.engine.recompute import Recomputer
from teraplan.runtime.engine.recorder import SiteKey, StepRecorder
from teraplan.runtime.engine.saved import Saved, View, detach_results, is_movable
from teraplan.runtime.engine.schedule import NOTHING, Schedule
from teraplan.runtime.engine.state_sites import StateSites
from teraplan.runtime.engine.tokens import make_token, release_lost
from teraplan.runtime.process.locks import if_free
from teraplan.runtime.state.memory.training_state import TrainingState
from teraplan.values.graph_table import GraphTable
from teraplan.values.step_trace import SiteKind


class Engine:
    """The saved activations of one session. Its methods run inside the migration ops."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.mover = Mover(device)
        self.recomputer = Recomputer(device, self.mover)
        self.training_state: TrainingState | None = None
        """Parameters, gradients and optimizer state, where they move."""
        self._state_sites: StateSites | None = None
        self.recorder: StepRecorder | None = None
        self.managed_peak_bytes = 0
        self.diverged_at: int | None = None
        self.limit_bytes = 0
        self._resident_limits: tuple[int, int, int] | None = None
        self._rehearsal_limits: Sequence[int] = ()
        self.at_backward: Callable[[GraphTable, Callable[[], set[str]]], None] | None = None
        """Told the call whose backward begins, and whom to ask for the names of all graphs whose
        forwards wait for theirs, it may refuse that by an error."""
        self.schedule: Schedule | None = None
        """Of the plan that the step runs under."""
        self._sizes = PlannedSizes()
        self._views: dict[int, View] = {}
        self._waiting: set[int] = set()
        """Keys of the step's tokens whose backward has not run."""
        self._by_storage: dict[int, Saved] = {}
        self._of_step: list[Saved] = []
        self._call = -1
        self.graph = ("", -1, False)
        """The call that has begun last: graph, number, backward?"""
        self.released: deque[int] = deque()
        self.lock = threading.Lock()

    @property
    def idle(self) -> bool:
        """True if no forward of this step waits for its backward."""
        return not self._waiting

    @property
    def waiting_calls(self) -> set[int]:
        """Numbers of the forwards that wait for their backward."""
        return {self._views[key].call for key in self._waiting}

    def _waiting_graphs(self) -> set[str]:
        return {self._views[key].table.graph for key in self._waiting}

    @property
    def in_backward(self) -> bool:
        """True if the graph that was entered last is a backward."""
        return self.graph[2]

    @property
    def unplanned(self) -> bool:
        """True if the step runs without a plan."""
        return self.schedule is None

    @property
    def finished_plan(self) -> bool:
        """True if the step has run all sites of its plan."""
        assert self.recorder is not None
        return self.schedule is not None and self.recorder.num_sites >= len(self.schedule.sites)

    def take_state(self, state: TrainingState | None) -> None:
        """From now on the steps' training state moves, too, if there is any."""
        if state is not None and state is not self.training_state:
            self._state_sites = state.sites = StateSites(self, state)
        self.training_state = state

    def begin_step(
        self,
        recorder: StepRecorder,
        schedule: Schedule | None,
        limit_bytes: int,
        resident_limits: tuple[int, int, int] | None,
        rehearsal_limits: Sequence[int] = (),
    ) -> None:
        """Start a step: under `schedule`, or without a plan under `limit_bytes`.

        Args:
            recorder: writes the step down.
            schedule: what to do, or None.
            limit_bytes: most managed bytes in a step without a plan.
            resident_limits: what `Device.keep_under` is to be told; None if not known.
            rehearsal_limits: most managed bytes at each site of a step in which computing again
                is tried; empty if it is not.
        """
        release_lost(self._views)
        if not self._views:
            self._forget_lost()
        self._resident_limits = resident_limits
        self.recorder = recorder
        self.schedule = schedule
        self._sizes = PlannedSizes()
        if self._state_sites is not None:
            self._state_sites.begin_step(schedule)
        self.limit_bytes = limit_bytes
        self.diverged_at = None
        self.managed_peak_bytes = self.mover.managed_bytes
        self._of_step = []
        self._waiting.clear()
        self._call = -1
        self.mover.begin_step(schedule.plan.storage_pace if schedule is not None else None)
        self._rehearsal_limits = rehearsal_limits
        self.recomputer.begin_step(rehearsing=bool(rehearsal_limits))

    @at_work
    def enter(self, table: GraphTable) -> int:
        """A forward graph begins; returns the number of its call."""
        self._call += 1
        self.graph = (table.graph, self._call, False)
        self._act(self._arrive((SiteKind.ENTER, *self.graph, None)))
        self._leave()
        return self._call

    @at_work
    def enter_backward(self, key: int) -> None:
        """The backward of a forward graph begins, to which the token with `key` belongs."""
        view = self._view(key)
        if self.at_backward:
            self.at_backward(view.table, self._waiting_graphs)
        self.graph = (view.table.graph, view.call, True)
        self._act(self._arrive((SiteKind.ENTER, *self.graph, None)))
        self._leave()

    @at_work
    def save(
        self,
        x: torch.Tensor,
        table: GraphTable,
        call: int,
        slot: int,
        beside: Sequence[torch.Tensor] = (),
    ) -> torch.Tensor:
        """`x` has had its last use in the forward; returns the token that stands for it."""
        storage = x.untyped_storage()
        saved = self._by_storage.get(storage._cdata)
        if saved is None or not self._holds(saved, x, call):
            saved = self._add(x, storage, table, call, slot)
        saved.tokens += 1
        key, token = make_token(self)
        byte_offset = int(x.storage_offset()) * x.element_size()
        self._views[key] = view = View(saved, byte_offset, x.stride(), call, table)
        self._waiting.add(key)
        self.recomputer.saved(view, x, table, slot, beside)
        site = self._arrive((SiteKind.SAVE, table.graph, call, False, saved.order))
        schedule = self.schedule
        if schedule is not None:
            more_bytes = self._sizes.compare(saved, schedule)
            if more_bytes is not None:
                self._leave_plan(schedule, site, more_bytes)
            elif saved.order in schedule.recomputed:
                self.mover.drop(saved)
        self._act(site)
        if site < len(self._rehearsal_limits):
            self.recomputer.rehearse(self._rehearsal_limits[site], self._bring)
            self.mover.make_room(0, self.limit_bytes)
        self._leave()
        return token

    @at_work
    def returned(self, results: Sequence[object]) -> None:
        """A forward graph has returned, and autograd knows its results."""
        detach_results(results, self._by_storage)

    @at_work
    def need(
        self, key: int, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """The tensor that the token with `key` stands for, on the device."""
        view = self._view(key)
        view.require(size, stride)
        saved = view.saved
        number = self._number_of(saved)
        self._act(self._arrive((SiteKind.NEED, view.table.graph, view.call, True, number)))
        if saved.tensor is None:
            self._bring(saved)
        saved.check_version()
        saved.in_use += 1
        result = view.on_device(size, stride, dtype)
        self._leave()
        return result

    @at_work
    def done(self, key: int) -> None:
        """The tensor that the token with `key` stands for has had its last use."""
        view = self._view(key)
        view.saved.in_use -= 1
        number = self._number_of(view.saved)
        site = self._arrive((SiteKind.DONE, view.table.graph, view.call, True, number))
        self._waiting.discard(key)
        if not _get_current_graph_task_keep_graph():  # else the backward may run again
            self._use_up(key)
        self._act(site)
        self._leave()

    @at_work
    def visit(
        self, key: SiteKey, before: Callable[[int], None], after: Callable[[int], None]
    ) -> None:
        """A site of the training state; `before` and `after` what the plan says are called."""
        site = self._arrive(key)
        before(site)
        self._act(site)
        after(site)
        self._leave()

    def drop_all(self) -> None:
        """Forget every saved activation: their backward will not run."""
        for key in list(self._views):
            self.release(key)
        self._forget_lost()

    def _forget_lost(self) -> None:
        """Nobody waits for anything: forget what an interrupt has left half done."""
        for saved in self._of_step:
            self.mover.forget(saved)
        self.mover.forget_all()
        self._by_storage.clear()

    def release(self, key: int) -> None:
        """A token is gone. Called from any thread at any time, also in the middle of an op here.

        The garbage collector may run in a thread of the storage engine that an op is waiting for:
        this must not wait for the op. What cannot be done now is done when the op ends.
        """
        if key in self._views:  # else its backward has run
            self.released.append(key)
            self.forget_released()

    def forget_released(self) -> None:
        """Use up the tokens that are gone, unless an op is at work, which does it in the end."""
        while self.released and if_free(self.lock, self._use_up_released):
            pass

    def _use_up_released(self) -> None:
        while self.released:
            self._use_up(self.released.popleft())

    def _use_up(self, key: int) -> None:
        """A token has been used up, or there will be no backward for it."""
        self._waiting.discard(key)
        view = self._views.pop(key, None)
        if view is None:
            return
        saved = view.saved
        saved.tokens -= 1
        if saved.tokens:
            return
        if self._by_storage.get(saved.address) is saved:
            del self._by_storage[saved.address]
        if self.recorder is not None and self._number_of(saved) is not None:
            self.recorder.give_up(saved.order)
        self.mover.forget(saved)

    def _view(self, key: int) -> View:
        view = self._views.get(key)
        if view is None:
            raise UnsupportedError(
                "the activations that this backward needs are gone, since their session has been "
                "closed: run the forward again"
            )
        return view

    def _add(
        self,
        x: torch.Tensor,
        storage: torch.UntypedStorage,
        table: GraphTable,
        call: int,
        slot: int,
    ) -> Saved:
        assert self.recorder is not None
        described = table.slots[slot]
        movable = is_movable(x, storage, given=described.given)
        version = x._version
        saved = Saved(
            name=f"{table.graph[:6]}.c{call}/{described.name}",
            nbytes=storage.nbytes() if movable else 0,
            address=storage._cdata,
            tensor=x,
            version=version,
            order=len(self._of_step),
            saved_version=version,
            saved_by=call,
        )
        self.recorder.add_tensor(saved, x.shape, x.dtype, described.layer)
        self._of_step.append(saved)
        self._by_storage[saved.address] = saved
        if movable:
            self.mover.add(saved)
        return saved

    def _holds(self, saved: Saved, x: torch.Tensor, call: int) -> bool:
        """True if `saved` has the bytes of `x`, which looks at the storage that it was made for."""
        if saved.expired or self._number_of(saved) is None:
            return False
        # Between two calls the user may have changed the tensor. Within one nobody can, and views
        # that kernels make have counters of their own.
        return saved.saved_by == call or saved.saved_version == x._version

    # -- sites ---------------------------------------------------------------------------------

    def _number_of(self, saved: Saved) -> int | None:
        """In the step; None if it was saved in an earlier one."""
        order, of_step = saved.order, self._of_step
        return order if order < len(of_step) and of_step[order] is saved else None

    def _arrive(self, key: SiteKey) -> int:
        """Record the site and compare it with the plan; returns its number."""
        assert self.recorder is not None
        self.mover.site = site = self.recorder.arrive(key)
        schedule = self.schedule
        if schedule is not None and (site >= len(schedule.keys) or schedule.keys[site] != key):
            self._leave_plan(schedule, site)
        return site

    def _leave_plan(self, schedule: Schedule, site: int, more_workspace_bytes: int = 0) -> None:
        """Go on without it, where kernels take so much more than it says."""
        self.diverged_at = site
        self.limit_bytes = max(0, schedule.rest_bytes - more_workspace_bytes)
        self.schedule = None
        if self._state_sites is not None:
            self.limit_bytes -= self._state_sites.diverge()

    def _act(self, site: int) -> None:
        """Do what the plan asks for at a site; without a plan, keep under the limit."""
        schedule, mover = self.schedule, self.mover
        if schedule is None:
            mover.make_room(0, self.limit_bytes)
            return
        if schedule.moves_state or site in schedule.actions:
            self._follow(schedule, site)
        limit_bytes = schedule.limits_bytes[site]
        if mover.managed_bytes > limit_bytes:
            mover.make_room(0, limit_bytes, strict=not self._sizes.any_larger)

    def _follow(self, schedule: Schedule, site: int) -> None:
        actions, mover = schedule.actions.get(site, NOTHING), self.mover
        for m in actions.leave:
            saved = self._of_step[m.tensor_id]
            mover.start_leaving(saved, m.tier, m.host_bytes, clean=m.clean)
        if schedule.moves_state and self._state_sites is not None:
            self._state_sites.act(schedule, site)
        for order in actions.gone:
            mover.finish_leaving(self._of_step[order])
        for order in actions.back:
            mover.start_back(self._of_step[order])

    def _bring(self, saved: Saved) -> None:
        """Wait until `saved` is on the device."""
        if not saved.resident:
            limit_bytes = self.limit_bytes if self.schedule is None else None
            if saved.copy is None:
                self.recomputer.remake(saved, self._bring, limit_bytes)
            elif limit_bytes is not None:
                self.mover.make_room(saved.nbytes, limit_bytes)
            self.mover.start_back(saved, urgent=True)
        self.mover.finish_back(saved)

    def _leave(self) -> None:
        assert self.recorder is not None
        if self._resident_limits is not None:
            self.device.keep_under(*self._resident_limits)
        # Not earlier: until here, what `save` adds counts as workspace of the interval before.
        managed_bytes = self.mover.managed_bytes
        state_bytes = self._state_sites.in_use_bytes if self._state_sites is not None else 0
        if managed_bytes + state_bytes > self.managed_peak_bytes:
            self.managed_peak_bytes = managed_bytes + state_bytes
        self.recorder.leave(managed_bytes, state_bytes)
