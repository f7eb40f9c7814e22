"""Executes a plan: moves saved activations out and back at the sites of the running graphs.

Without a plan (the first steps, or a step that turned out differently) it keeps to the budget by
itself: when there is too much on the device, what was saved first leaves first, because backward
runs in the opposite order and needs it last.
"""

import copy
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from teraplan.errors import BudgetExceededError, DeadlineError, StorageError, UnsupportedError
from teraplan.graph_table import GraphTable
from teraplan.hardware import Tier
from teraplan.plan import Migration
from teraplan.run_record import StallRecord
from teraplan.runtime.device import Copy, Device
from teraplan.runtime.recorder import StepRecorder
from teraplan.runtime.saved import Saved, View
from teraplan.runtime.schedule import Schedule
from teraplan.runtime.state.training_state import TrainingState
from teraplan.runtime.tokens import key_of, make_token
from teraplan.step_trace import SiteKind
from teraplan.units import format_nbytes


class Engine:
    """The saved activations of one session. Its methods run inside the migration ops."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.training_state: TrainingState | None = None
        """Parameters, gradients and optimizer state, where they move."""
        self.recorder: StepRecorder | None = None
        self.managed_bytes = 0
        self.managed_peak_bytes = 0
        self.diverged_at: int | None = None
        self.limit_bytes = 0
        self._resident_limits: tuple[int, int] | None = None
        self.stalls: list[StallRecord] = []
        self.faults: list[StorageError | DeadlineError] = []
        """Why tensors of this step could not leave, and stayed."""
        self._schedule: Schedule | None = None
        self._views: dict[int, View] = {}
        self._by_storage: dict[int, Saved] = {}
        self._of_step: list[Saved] = []
        self._resident: dict[int, Saved] = {}
        self._call = -1
        self._start_ns = 0
        self._released: deque[int] = deque()
        self._lock = threading.Lock()

    @property
    def idle(self) -> bool:
        """True if no forward of this step waits for its backward."""
        return not any(self._is_of_step(view.saved) for view in list(self._views.values()))

    @property
    def unplanned(self) -> bool:
        """True if the step runs without a plan."""
        return self._schedule is None

    @property
    def finished_plan(self) -> bool:
        """True if the step has run all sites of its plan."""
        assert self.recorder is not None
        return self._schedule is not None and self.recorder.num_sites >= len(self._schedule.sites)

    def begin_step(
        self,
        recorder: StepRecorder,
        schedule: Schedule | None,
        limit_bytes: int,
        resident_limits: tuple[int, int] | None,
    ) -> None:
        """Start a step: under `schedule`, or without a plan under `limit_bytes`.

        Args:
            recorder: writes the step down.
            schedule: what to do, or None.
            limit_bytes: most managed bytes in a step without a plan.
            resident_limits: most bytes that the process is to hold of the device, and how many
                of these are to be left for allocations between two sites; None if not known.
        """
        if not self._views:
            self._forget_lost()
        self._resident_limits = resident_limits
        self.recorder = recorder
        self._schedule = schedule
        self.limit_bytes = limit_bytes
        self.diverged_at = None
        self.managed_peak_bytes = self.managed_bytes
        self.stalls = []
        self.faults = []
        self._of_step = []
        self._call = -1
        self._start_ns = time.perf_counter_ns()

    def enter(self, table: GraphTable) -> int:
        """A forward graph begins; returns the number of its call."""
        with self._at_work():
            self._call += 1
            self._act(self._arrive(SiteKind.ENTER, table.graph, self._call, False, None))
            self._leave()
            return self._call

    def enter_backward(self, token: torch.Tensor, table: GraphTable) -> None:
        """The backward of a forward graph begins."""
        with self._at_work():
            call = self._view(token).call
            self._act(self._arrive(SiteKind.ENTER, table.graph, call, True, None))
            self._leave()

    def save(self, x: torch.Tensor, table: GraphTable, call: int, slot: int) -> torch.Tensor:
        """`x` has had its last use in the forward; returns the token that stands for it."""
        with self._at_work():
            storage = x.untyped_storage()
            saved = self._by_storage.get(storage._cdata)
            if saved is None or not self._holds(saved, x, call):
                saved = self._add(x, storage, table, call, slot)
            saved.tokens += 1
            key, token = make_token(self)
            byte_offset = int(x.storage_offset()) * x.element_size()
            self._views[key] = View(saved, byte_offset, call, table.graph)
            self._act(self._arrive(SiteKind.SAVE, table.graph, call, False, saved))
            self._leave()
            return token

    def need(
        self, token: torch.Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """The tensor that `token` stands for, on the device."""
        with self._at_work():
            view = self._view(token)
            saved = view.saved
            self._act(self._arrive(SiteKind.NEED, view.graph, view.call, True, saved))
            self._bring(saved)
            saved.check_version()
            saved.in_use += 1
            assert saved.tensor is not None
            storage = saved.tensor.untyped_storage()
            offset = (saved.offset + view.byte_offset) // dtype.itemsize
            result = torch.empty(0, dtype=dtype, device=saved.tensor.device)
            result.set_(storage, offset, size, stride)
            self._leave()
            return result

    def done(self, token: torch.Tensor) -> None:
        """The tensor that `token` stands for has had its last use."""
        with self._at_work():
            key = key_of(token)
            view = self._view(token)
            view.saved.in_use -= 1
            site = self._arrive(SiteKind.DONE, view.graph, view.call, True, view.saved)
            self._use_up(key)
            self._act(site)
            self._leave()

    def drop_all(self) -> None:
        """Forget every saved activation: their backward will not run."""
        for key in list(self._views):
            self.release(key)
        self._forget_lost()

    def _forget_lost(self) -> None:
        """Nobody waits for anything: forget what an interrupt has left half done."""
        for saved in self._of_step:
            saved.tensor = saved.arrival = None
            if saved.copy is not None:
                saved.copy.drop()
                saved.copy = None
        self._by_storage.clear()
        self._resident.clear()
        self.managed_bytes = 0

    def release(self, key: int) -> None:
        """A token is gone. Called from any thread at any time, also in the middle of an op here.

        The garbage collector may run in a thread of the storage engine that an op is waiting for:
        this must not wait for the op. What cannot be done now is done when the op ends.
        """
        self._released.append(key)
        self._forget_released()

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Within this, nothing else changes what is saved."""
        with self._lock:
            yield
        self._forget_released()

    def _forget_released(self) -> None:
        while self._released and self._lock.acquire(blocking=False):
            try:
                while self._released:
                    self._use_up(self._released.popleft())
            finally:
                self._lock.release()

    def _use_up(self, key: int) -> None:
        """A token has been used up, or there will be no backward for it."""
        view = self._views.pop(key, None)
        if view is None:
            return
        saved = view.saved
        saved.tokens -= 1
        if saved.tokens:
            return
        if self._by_storage.get(saved.origin.cdata) is saved:
            del self._by_storage[saved.origin.cdata]
        self._give_back(saved)
        saved.tensor = saved.arrival = None
        if saved.copy is not None:
            saved.copy.drop()
            saved.copy = None

    def _view(self, token: torch.Tensor) -> View:
        view = self._views.get(key_of(token))
        if view is None:
            raise UnsupportedError(
                "backward ran a second time over activations that the first one has used up; "
                "retain_graph=True is not supported: run the forward again"
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
        movable = _is_movable(x, storage, given=described.given)
        saved = Saved(
            name=f"{table.graph[:6]}.c{call}/{described.name}",
            nbytes=storage.nbytes() if movable else 0,
            origin=StorageWeakRef(storage),  # type: ignore[no-untyped-call]
            tensor=x,
            version=x._version,
            order=len(self._of_step),
            saved_version=x._version,
            saved_by=call,
        )
        self._of_step.append(saved)
        self._by_storage[storage._cdata] = saved
        if movable:
            self._resident[id(saved)] = saved
            self._take(saved.nbytes)
        self.recorder.add_tensor(saved, tuple(x.shape), str(x.dtype)[6:], described.layer)
        return saved

    def _holds(self, saved: Saved, x: torch.Tensor, call: int) -> bool:
        """True if `saved` has the bytes of `x`, which looks at the storage that it was made for."""
        if _expired(saved) or not self._is_of_step(saved):
            return False
        # Between two calls the user may have changed the tensor. Within one nobody can, and views
        # that kernels make have counters of their own.
        return saved.saved_by == call or saved.saved_version == x._version

    # -- sites ---------------------------------------------------------------------------------

    def _arrive(
        self, kind: SiteKind, graph: str, call: int, backward: bool, saved: Saved | None
    ) -> int:
        """Record the site and compare it with the plan; returns its number."""
        recorder = self.recorder
        assert recorder is not None
        site = recorder.num_sites
        tensor = saved.order if saved is not None and self._is_of_step(saved) else None
        recorder.arrive(kind, graph, call, backward, tensor)
        schedule = self._schedule
        actual = (kind, graph, call, backward, tensor)
        if schedule is not None and not self._as_planned(schedule, site, actual):
            self._diverge(site)
        return site

    def _act(self, site: int) -> None:
        """Do what the plan asks for at a site; without a plan, keep under the limit."""
        schedule = self._schedule
        if schedule is None:
            self._make_room(0, self.limit_bytes)
            return
        actions = schedule.actions(site)
        for migration in actions.leave:
            self._start_leaving(self._of_step[migration.tensor_id], migration)
        for order in actions.gone:
            self._finish_leaving(self._of_step[order])
        for order in actions.back:
            self._start_back(self._of_step[order])
        if self.managed_bytes > schedule.limits_bytes[site]:
            self._make_room(0, schedule.limits_bytes[site], strict=True)

    def _leave(self) -> None:
        assert self.recorder is not None
        if self._resident_limits is not None:
            self.device.keep_under(*self._resident_limits)
        # Not earlier: until here, what `save` adds counts as workspace of the interval before.
        self.managed_peak_bytes = max(self.managed_peak_bytes, self.managed_bytes)
        self.recorder.leave(self.managed_bytes)

    def _is_of_step(self, saved: Saved) -> bool:
        return saved.order < len(self._of_step) and self._of_step[saved.order] is saved

    def _as_planned(
        self,
        schedule: Schedule,
        site: int,
        actual: tuple[SiteKind, str, int, bool, int | None],
    ) -> bool:
        if site >= len(schedule.sites):
            return False
        planned = schedule.sites[site]
        return actual == (
            planned.kind,
            planned.graph,
            planned.call,
            planned.backward,
            planned.tensor_id,
        )

    def _diverge(self, site: int) -> None:
        """The step does something else than the planned one: go on without a plan."""
        assert self._schedule is not None
        self.diverged_at = site
        self.limit_bytes = min(self._schedule.limits_bytes)
        self._schedule = None

    # -- movements -----------------------------------------------------------------------------

    def _start_leaving(self, saved: Saved, migration: Migration) -> None:
        if saved.tensor is None or saved.copy is not None or saved.tokens == 0:
            return
        if saved.modified or id(saved) not in self._resident:
            return
        other = Tier.STORAGE if migration.tier is Tier.HOST else Tier.HOST
        saved.copy = self._start_out(saved, migration.tier, other)

    def _start_out(self, saved: Saved, *tiers: Tier) -> Copy | None:
        """Start copying `saved` to the first of the tiers that has room; None if none has."""
        assert saved.tensor is not None
        for tier in tiers:
            try:
                return self.device.start_out(saved.tensor, tier, saved.name)
            except StorageError as error:
                self.faults.append(_bare(error))
        return None

    def _finish_leaving(self, saved: Saved) -> None:
        if saved.copy is None or saved.tensor is None or saved.in_use:
            return
        try:
            self._stalled(saved, saved.copy.wait_out())
        except (StorageError, DeadlineError) as error:  # the tensor is whole
            self.faults.append(_bare(error))
            saved.copy.drop()
            saved.copy = None if saved.modified else self._start_out(saved, Tier.HOST)
            if saved.copy is None:
                return
            saved.copy.wait_out()
        if saved.modified:  # while it was on its way out: the copy is of no use
            saved.copy.drop()
            saved.copy = None
            return
        saved.tensor = None
        self._give_back(saved)

    def _start_back(self, saved: Saved, *, urgent: bool = False) -> None:
        if saved.copy is None or saved.resident or saved.tokens == 0:
            return
        saved.arrival = self.device.start_back(saved.copy, urgent=urgent)
        self._resident[id(saved)] = saved
        self._take(saved.nbytes)

    def _bring(self, saved: Saved) -> None:
        """Wait until `saved` is on the device."""
        if not saved.resident:
            if self._schedule is None:
                self._make_room(saved.nbytes, self.limit_bytes)
            self._start_back(saved, urgent=True)
        if saved.arrival is None:
            return
        storage, offset, waited_ns = saved.arrival.wait()
        self._stalled(saved, waited_ns)
        tensor = torch.empty(0, dtype=torch.uint8, device=storage.device)
        saved.tensor = tensor.set_(storage, 0, (storage.nbytes(),), (1,))
        saved.version = saved.tensor._version
        saved.offset = offset
        saved.arrival = None

    def _make_room(self, nbytes: int, limit_bytes: int, *, strict: bool = False) -> None:
        """Let the first-saved tensors leave until `nbytes` more fit under the limit."""
        victims = iter([s for s in self._resident.values() if s.tensor is not None])
        while self.managed_bytes + nbytes > limit_bytes:
            victim = next(victims, None)
            if victim is None:
                if strict or self.faults:
                    self._overrun(limit_bytes)
                return
            if victim.in_use or victim.tokens == 0 or victim.modified:
                continue
            if victim.copy is None:
                victim.copy = self._start_out(victim, Tier.STORAGE, Tier.HOST)
            self._finish_leaving(victim)

    def _overrun(self, limit_bytes: int) -> None:
        what = (
            f"saved activations take {format_nbytes(self.managed_bytes)} where "
            f"{format_nbytes(max(0, limit_bytes))} are left of device_budget, and none can leave; "
            "raise device_budget"
        )
        if not self.faults:
            raise BudgetExceededError(what)
        fault = _bare(self.faults[0])
        fault.args = (f"{fault}; {what}, or make room in storage",)
        raise fault

    def _stalled(self, saved: Saved, waited_ns: int) -> None:
        if waited_ns > 0 and self.recorder is not None:
            now = time.perf_counter_ns() - self._start_ns
            self.stalls.append(
                StallRecord(
                    site=self.recorder.num_sites - 1,
                    tensor=saved.name,
                    start_ns=max(0, now - waited_ns),
                    duration_ns=waited_ns,
                )
            )

    def _take(self, nbytes: int) -> None:
        self.managed_bytes += nbytes

    def _give_back(self, saved: Saved) -> None:
        if self._resident.pop(id(saved), None) is not None:
            self.managed_bytes -= saved.nbytes


def _bare(error: StorageError | DeadlineError) -> StorageError | DeadlineError:
    """The error without its causes and their frames, which hold the user's tensors."""
    bare = copy.copy(error)
    bare.errno = error.errno
    return bare


_LARGEST_ITEM_BYTES = 16
_LARGEST_SHARE = 2


def _is_movable(x: torch.Tensor, storage: torch.UntypedStorage, *, given: bool) -> bool:
    """False if moving the storage is of no use or not possible.

    A graph's input may be a small part of something larger that the user holds, a batch of a data
    set: that must not travel. And memory that is not the allocator's may begin at any address, so
    that it would not be aligned for its type where it comes back to.
    """
    if storage.data_ptr() % _LARGEST_ITEM_BYTES:
        return False
    if not given or x.numel() == 0:
        return True
    last = sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
    return storage.nbytes() <= _LARGEST_SHARE * (last + 1) * x.element_size()


def _expired(saved: Saved) -> bool:
    """True if the storage that was saved is gone, so that its address may mean another one."""
    return bool(saved.origin.expired())  # type: ignore[no-untyped-call]
