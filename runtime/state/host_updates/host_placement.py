"""Whose optimizer state is in host memory, within its budget, for all optimizers of a session."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.utils.weak import WeakIdKeyDictionary

from teraplan.errors import StorageFullError
from teraplan.runtime.device import Device
from teraplan.runtime.host_lane import HostLane
from teraplan.runtime.process import fallbacks
from teraplan.runtime.process.census import states_to_come
from teraplan.runtime.state.host_updates import host_choice
from teraplan.runtime.state.memory.host_memory import host_bytes
from teraplan.runtime.state.updates import host_state
from teraplan.runtime.state.updates.host_state import (
    SHARES_MEMORY,
    HostState,
    send_to,
    shares_memory,
)
from teraplan.runtime.state.updates.stand_in import parameters_of
from teraplan.units import format_nbytes

Optimizer = torch.optim.Optimizer
_NUM_SLOTS = 2


@dataclass(slots=True, eq=False)
class _Placed:
    """One optimizer's parameters on the host."""

    share: float
    """Of the bytes of its parameters, the part that is to be updated on the host."""
    chosen: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)
    looked_at: tuple[int, ...] = ()
    """Identities of the parameters that the choice was made among."""


class HostPlacement:
    """Used by the training thread alone."""

    def __init__(self, device: Device, lane: HostLane, *, strict: bool) -> None:
        self.state = HostState(device.host_pool)
        self.slots: list[torch.Tensor] = []
        """Memory in which values and gradients come to the host."""
        self.fallbacks: list[str] = []
        self.ours = WeakIdKeyDictionary()
        """Parameters of the session's models."""
        self._device, self._lane, self._strict = device, lane, strict
        self._placed: weakref.WeakKeyDictionary[Optimizer, _Placed] = weakref.WeakKeyDictionary()

    def share_of(self, optimizer: Optimizer) -> float:
        """Of the bytes of its parameters, the part that is to be updated on the host."""
        placed = self._placed.get(optimizer)
        return placed.share if placed is not None else 0.0

    def is_placed(self, optimizer: Optimizer, share: float) -> bool:
        """True if `share` and the optimizer's parameters are those of last time."""
        placed = self._placed.get(optimizer)
        return (
            placed is not None
            and placed.share == share
            and placed.looked_at == _identities(optimizer)
        )

    def place(self, optimizer: Optimizer, share: float) -> None:
        """Choose the parameters to be updated on the host, and let their state go there.

        Raises:
            FallbackRefusedError: `strict` is set, and fewer fit into the host budget.
        """
        placed = self._placed.setdefault(optimizer, _Placed(0.0))
        placed.share, placed.looked_at = share, _identities(optimizer)
        choice = self._choice(optimizer, placed)
        if choice.left_out_bytes:
            self._report(choice.left_out_bytes)
        self._take_slots([*choice.parameters, *self._all_chosen()])
        for parameter in choice.parameters:
            placed.chosen[parameter] = True
            host_state.note(parameter)
        self.take_in(optimizer)

    def take_in(self, optimizer: Optimizer) -> None:
        """Let the state of the chosen parameters be in host memory, as after loading it."""
        placed = self._placed.get(optimizer)
        for parameter in list(placed.chosen) if placed is not None else ():
            state = optimizer.state.get(parameter)
            if state and shares_memory(state, parameter):
                self._send_home(optimizer, parameter)
                self.note_stay(optimizer, SHARES_MEMORY)
            elif state and not self.state.take_in(state):
                self.give_up(optimizer, parameter)

    def to_update(self, optimizer: Optimizer, left: Optimizer) -> list[torch.Tensor]:
        """What the host does in this step, the last layers first.

        Args:
            optimizer: the user's.
            left: it, or a stand-in with those of its parameters that are left to be updated.
        """
        placed, found = self._placed.get(optimizer), []
        if placed is None or not placed.chosen:
            return []
        for p in reversed(list(parameters_of(left))):
            if p not in placed.chosen or p.grad is None:
                continue
            if host_choice.fits(p, self._device.type) and host_choice.has_fitting_gradient(p):
                found.append(p)
            else:
                self._send_home(optimizer, p)
        missing = host_choice.missing_bytes(left)
        room_bytes = self._device.host_pool.free_bytes
        for p in host_choice.without_room(found, missing, room_bytes):
            self.give_up(optimizer, p)
        return [p for p in found if p in placed.chosen]

    def give_up(self, optimizer: Optimizer, parameter: torch.Tensor) -> None:
        """There is no host memory for its state: it is updated where it is, from now on."""
        self._send_home(optimizer, parameter)
        self._report(parameter.nbytes)

    def send_strays_home(self, optimizer: Optimizer) -> None:
        """Let state be where its parameters are, unless they are updated on the host.

        A copy of an optimizer has it where the original had it, and so has one whose session ended.
        Only those of torch are known to want it so.
        """
        if not type(optimizer).__module__.startswith("torch.optim"):
            return
        for group in optimizer.param_groups:
            for p in group["params"]:
                if not p.is_cpu and not host_state.is_updated_on_host(p):
                    send_to(optimizer.state.get(p, {}), p, group)

    def let_go(self, optimizer: Optimizer) -> None:
        """All of its parameters are updated where they are."""
        placed = self._placed.get(optimizer)
        for parameter in list(placed.chosen) if placed is not None else ():
            self._send_home(optimizer, parameter)
        self._placed.pop(optimizer, None)

    def missing_bytes(self) -> int:
        """Of state that does not exist yet, and will be in host memory, not on the device."""
        return sum(
            count * p.nbytes
            for optimizer, placed in list(self._placed.items())
            for p, count in states_to_come(optimizer, unknown=0)
            if p in placed.chosen
        )

    def note(self, text: str) -> None:
        """Something is updated on the device that was to be updated on the host."""
        fallbacks.allow(text, strict=self._strict)
        if text not in self.fallbacks:
            self.fallbacks.append(text)

    def note_stay(self, optimizer: Optimizer, why: str) -> None:
        """What an optimizer does is why it updates parameters on the device."""
        self.note(f"{type(optimizer).__name__} {why}: it updates on the device")

    def close(self) -> None:
        """Give back the memory for values and gradients."""
        self._lane.finish()
        self.slots.clear()

    def _choice(self, optimizer: Optimizer, placed: _Placed) -> host_choice.Choice:
        missing = host_choice.missing_bytes(optimizer)
        mine = sum(p.nbytes for p in parameters_of(optimizer) if p in self.ours)
        held = sum(slot.nbytes for slot in self.slots)
        return host_choice.choose(
            host_choice.candidates(optimizer, self.ours.__contains__, self._device.type),
            already={id(p) for p in placed.chosen},
            wanted_bytes=placed.share * mine,
            states=host_choice.state_bytes(optimizer, missing),
            missing=missing,
            others=self._all_chosen(),
            room_bytes=self._device.host_pool.free_bytes + held,
        )

    def _all_chosen(self) -> list[torch.Tensor]:
        return [p for placed in self._placed.values() for p in placed.chosen]

    def _take_slots(self, chosen: Sequence[torch.Tensor]) -> None:
        nbytes = host_choice.slot_bytes(chosen)
        if not nbytes or (self.slots and self.slots[0].nbytes >= nbytes):
            return
        self.close()
        for _ in range(_NUM_SLOTS):
            slot = host_bytes(self._device.host_pool, nbytes)
            if slot is None:
                self.slots.clear()
                raise StorageFullError(
                    f"{format_nbytes(nbytes)} in one piece, for gradients and values that are "
                    "updated on the host, are not free in host memory; raise host_budget"
                )
            self.slots.append(slot)

    def _send_home(self, optimizer: Optimizer, parameter: torch.Tensor) -> None:
        chosen = self._placed[optimizer].chosen
        if parameter in chosen:
            del chosen[parameter]
        host_state.forget(parameter)
        state = optimizer.state.get(parameter, {})
        for group in optimizer.param_groups:
            if any(p is parameter for p in group["params"]):
                send_to(state, parameter, group)
        self.state.release(state)  # what is still there: the device is the host itself

    def _report(self, nbytes: int) -> None:
        free_bytes = self._device.host_pool.free_bytes
        self.note(
            f"{format_nbytes(nbytes)} of parameters are updated on the device instead of the host: "
            f"their optimizer state does not fit in host memory, of which "
            f"{format_nbytes(free_bytes)} are free; raise host_budget"
        )


def _identities(optimizer: Optimizer) -> tuple[int, ...]:
    return tuple(id(p) for p in parameters_of(optimizer))
