"""Moves saved activations between the device and the other tiers, and counts what is on it."""

import time
from collections.abc import Iterator

import torch

from teraplan.errors import (
    BudgetExceededError,
    DeadlineError,
    StorageError,
    StorageFullError,
    bare,
)
from teraplan.runtime.device import Copy, Device
from teraplan.runtime.engine.saved import Saved
from teraplan.units import format_nbytes
from teraplan.values.hardware import Link, Tier
from teraplan.values.run_record import StallRecord


class Mover:
    """The saved activations of one engine, in whatever tier. Not safe from several threads."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.managed_bytes = 0
        """On the device, or on their way to or from it."""
        self.site = 0
        """Where the step is now."""
        self.stalls: list[StallRecord] = []
        self.faults: list[StorageError | DeadlineError] = []
        """Why tensors of this step could not leave, and stayed."""
        self._resident: dict[int, Saved] = {}
        """In the order in which they came."""
        self._start_ns = 0

    def begin_step(self, pace: Link | None) -> None:
        """From here on stalls and faults are another step's, and storage keeps to `pace`."""
        self._device.storage.keep_to(pace)
        self.stalls, self.faults = [], []
        self._start_ns = time.perf_counter_ns()
        if torch._C._current_graph_task_id() < 0:  # what an interrupted backward has left in use
            for saved in self._resident.values():
                saved.in_use = 0

    def add(self, saved: Saved) -> None:
        """A storage that can move is on the device."""
        self._resident[id(saved)] = saved
        self.managed_bytes += saved.nbytes

    def forget(self, saved: Saved) -> None:
        """Nobody needs `saved` any more: drop what there is of it."""
        self._give_back(saved)
        saved.tensor = saved.arrival = saved.remake = None
        if saved.copy is not None:
            saved.copy.drop()
            saved.copy = None

    def drop(self, saved: Saved) -> None:
        """Free the memory of `saved`, which can be computed again."""
        if saved.remake is None or saved.copy is not None or saved.modified:
            return
        if id(saved) in self._resident and not saved.in_use:
            saved.let_go()
            self._give_back(saved)

    def forget_all(self) -> None:
        """Nobody needs anything any more, and an interrupt may have left something half done."""
        self._resident.clear()
        self.managed_bytes = 0

    def start_leaving(
        self, saved: Saved, tier: Tier, host_bytes: int = 0, *, clean: bool = False
    ) -> None:
        """Start copying `saved` to `tier`, or to the other one if that has no room.

        With `host_bytes`, so many of its bytes go to the host and the rest to storage, if there is
        room for both parts. If `clean`, what it has left there when it was away before will do.
        """
        if saved.tensor is None or saved.tokens == 0 or id(saved) not in self._resident:
            return
        if saved.modified or (saved.copy is not None and clean):
            return
        if saved.copy is not None:
            saved.copy.drop()
            saved.copy = None
        other = Tier.STORAGE if tier is Tier.HOST else Tier.HOST
        saved.copy = self._start_out(saved, tier, other, host_bytes=host_bytes)

    def finish_leaving(self, saved: Saved) -> None:
        """Wait until `saved` has left, and free its memory."""
        if saved.copy is None or saved.tensor is None or saved.in_use:
            return
        try:
            self._stalled(saved, saved.copy.wait_out())
        except (StorageError, DeadlineError) as error:  # the tensor is whole
            self.faults.append(bare(error))
            saved.copy.drop()
            saved.copy = None if saved.modified else self._start_out(saved, Tier.HOST)
            if saved.copy is None:
                return
            saved.copy.wait_out()
        if saved.modified:  # while it was on its way out: the copy is of no use
            saved.copy.drop()
            saved.copy = None
            return
        saved.let_go()
        self._give_back(saved)

    def start_back(self, saved: Saved, *, urgent: bool = False) -> None:
        """Start bringing `saved` back, unless it is on the device or on its way to it."""
        if saved.copy is None or saved.resident or saved.tokens == 0:
            return
        saved.arrival = self._device.start_back(saved.copy, urgent=urgent)
        self.add(saved)

    def finish_back(self, saved: Saved) -> None:
        """Wait until `saved` has come back, if it is on its way."""
        if saved.arrival is None:
            return
        storage, offset, waited_ns = saved.arrival.wait()
        self._stalled(saved, waited_ns)
        tensor = torch.empty(0, dtype=torch.uint8, device=storage.device)
        saved.tensor = tensor.set_(storage, 0, (storage.nbytes(),), (1,))
        saved.version = saved.tensor._version
        saved.offset = offset
        saved.arrival = None

    def make_room(self, nbytes: int, limit_bytes: int, *, strict: bool = False) -> None:
        """Let the first-saved tensors leave until `nbytes` more fit under the limit.

        Raises:
            BudgetExceededError, StorageError, DeadlineError: they do not, and that is `strict` or
                because of a fault.
        """
        victims: Iterator[Saved] | None = None
        while self.managed_bytes + nbytes > limit_bytes:
            if victims is None:
                victims = iter([s for s in self._resident.values() if s.tensor is not None])
            victim = next(victims, None)
            if victim is None:
                if strict or self.faults:
                    self._overrun(nbytes, limit_bytes)
                return
            if victim.in_use or victim.tokens == 0 or victim.modified:
                continue
            if victim.copy is None:
                victim.copy = self._start_out(victim, Tier.STORAGE, Tier.HOST)
            self.finish_leaving(victim)

    def _start_out(self, saved: Saved, *tiers: Tier, host_bytes: int = 0) -> Copy | None:
        """Start copying `saved` to the first of the tiers that has room; None if none has."""
        assert saved.tensor is not None
        ways = [(tier, 0) for tier in tiers]
        if 0 < host_bytes < saved.nbytes:
            ways.insert(0, (Tier.STORAGE, host_bytes))
        errors: list[StorageError | DeadlineError] = []
        for tier, part_bytes in ways:
            try:
                out = self._device.start_out(saved.tensor, tier, saved.name, host_bytes=part_bytes)
            except StorageError as error:
                errors.append(bare(error))
            else:
                # That one tier is full is no fault where another one has room.
                self.faults += [e for e in errors if not isinstance(e, StorageFullError)]
                return out
        self.faults += errors
        return None

    def _give_back(self, saved: Saved) -> None:
        if self._resident.pop(id(saved), None) is not None:
            self.managed_bytes -= saved.nbytes

    def _overrun(self, nbytes: int, limit_bytes: int) -> None:
        needed = self.managed_bytes + nbytes
        coming = f", and {format_nbytes(nbytes)} more is needed now" if nbytes else ""
        what = (
            f"saved activations take {format_nbytes(self.managed_bytes)}{coming}, where "
            f"{format_nbytes(max(0, limit_bytes))} are left of device_budget, and none can leave: "
            f"raise device_budget by {format_nbytes(needed - limit_bytes)}"
        )
        if not self.faults:
            raise BudgetExceededError(what)
        fault = bare(self.faults[0])
        is_full = isinstance(fault, StorageFullError)
        instead = "make room in storage" if is_full else "name another directory as storage"
        fault.args = (f"{fault}; {what}, or {instead}",)
        raise fault

    def _stalled(self, saved: Saved, waited_ns: int) -> None:
        if waited_ns > 0:
            now = time.perf_counter_ns() - self._start_ns
            self.stalls.append(
                StallRecord(
                    site=self.site,
                    tensor=saved.name,
                    start_ns=max(0, now - waited_ns),
                    duration_ns=waited_ns,
                )
            )
