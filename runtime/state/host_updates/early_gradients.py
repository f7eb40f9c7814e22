"""Gradients that go to the host in the backward, for updates on its cores.

    backward     p.grad is complete: its sums, and its copy to the host behind the computation
    the step     the same tensor with the same sums: the host has it
                 another one: it goes to the host with its bucket, as it is now

In between anybody may change a gradient, some in ways that leave no trace: clipping, a GradScaler,
an all-reduce, `.data`. The sums are those of its 1,024 columns as integers, so they cost the device
one pass over it. Of several backwards for one step the last one's counts: as many as in the last
step. Where what was sent is of no use in two steps, as with clipping, nothing is sent any more.
"""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from teraplan.runtime.host_lane import HostLane
from teraplan.runtime.process.pinned_pool import PinnedPool
from teraplan.runtime.process.untraced import untraced
from teraplan.runtime.state.host_updates.host_choice import has_fitting_gradient
from teraplan.runtime.state.host_updates.host_twins import Sent, bytes_of
from teraplan.runtime.state.memory.host_memory import host_bytes

_NUM_COLUMNS = 1024
_MOST_USELESS_STEPS = 2


@dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    """A gradient as it was when it was sent."""

    source: torch.Tensor
    """Its memory lives until the step has looked at it."""
    version: int
    """Writes to it, as torch counts them."""
    sums: torch.Tensor
    sent: Sent

    def is_of(self, gradient: torch.Tensor | None) -> bool:
        """True if it is that tensor, untouched as far as torch counts writes."""
        return gradient is self.source and self.source._version == self.version


@dataclass(slots=True, eq=False)
class _Gradient:
    """What is known of one parameter's."""

    handle: RemovableHandle
    memory: torch.Tensor | None = None
    """On the host, (nbytes,), uint8."""
    num_arrived: int = 0
    """Backwards since the last step."""
    num_expected: int = 1
    copy: _Copy | None = None


class EarlyGradients:
    """Those of one session. Memory is what host memory has left; without any nothing is sent."""

    def __init__(self, pool: PinnedPool, lane: HostLane) -> None:
        self._pool, self._lane = pool, lane
        self._known = WeakIdKeyDictionary()
        self._under_way: dict[int, torch.Tensor] = {}
        """Memory by identity, to which a copy may be going although its parameter is gone."""
        self._num_useless = 0

    def watch(self, parameters: Iterable[torch.Tensor], chosen: Sequence[torch.Tensor]) -> None:
        """From the next backward on send the gradients of those that are `chosen`, not others'."""
        wanted = {id(p) for p in chosen} if self._num_useless < _MOST_USELESS_STEPS else set()
        for parameter in parameters:
            if id(parameter) not in wanted:
                self.forget(parameter)
            elif parameter not in self._known:
                self._known[parameter] = _Gradient(_hook(self, parameter))

    def forget(self, parameter: torch.Tensor) -> None:
        """Send its gradient no more."""
        known = self._of(parameter)
        if known is not None:
            known.handle.remove()
            del self._known[parameter]

    def close(self) -> None:
        """Send nothing, and need no memory, until `watch` is called again."""
        self._lane.finish()
        self._under_way.clear()
        for parameter in list(self._known):
            self.forget(parameter)

    def arrived(self, parameter: torch.Tensor) -> None:
        """A backward has given the parameter its gradient, or added to it."""
        known = self._of(parameter)
        if known is None:
            return
        known.num_arrived += 1
        known.copy = None
        gradient = parameter.grad
        if known.num_arrived < known.num_expected or not has_fitting_gradient(parameter):
            return
        assert gradient is not None, "a gradient that fits is one"
        if known.memory is None:
            known.memory = host_bytes(self._pool, gradient.nbytes)
        if known.memory is None or known.memory.nbytes != gradient.nbytes:
            return
        sums = sums_of(gradient)
        self._under_way[id(known.memory)] = known.memory
        self._lane.follow()
        sent = Sent(known.memory, self._lane.out(bytes_of(gradient), known.memory))
        known.copy = _Copy(gradient, gradient._version, sums, sent)

    def take(self, parameters: Sequence[torch.Tensor]) -> dict[int, Sent]:
        """The optimizer steps: what the host has of the gradients of `parameters`, by identity."""
        copies: dict[int, _Copy] = {}
        num_sent = num_copied = 0
        for parameter in parameters:
            known = self._of(parameter)
            if known is None:
                continue
            copy, known.copy = known.copy, None
            num_sent += copy is not None
            num_copied += self._under_way.pop(id(known.memory), None) is not None
            known.num_expected, known.num_arrived = max(1, known.num_arrived), 0
            if copy is not None and copy.is_of(parameter.grad):
                copies[id(parameter)] = copy
        same = [(sums_of(copy.source) == copy.sums).all() for copy in copies.values()]
        flags = torch.stack(same).tolist() if same else []
        found = {key: copies[key].sent for key, flag in zip(copies, flags, strict=True) if flag}
        if num_sent:
            self._num_useless = 0 if found else self._num_useless + 1
        if len(found) < num_copied:
            self._lane.finish()  # nobody waits for the others
        return found

    def _of(self, parameter: torch.Tensor) -> _Gradient | None:
        if parameter not in self._known:
            return None
        found: _Gradient = self._known[parameter]
        return found


def sums_of(tensor: torch.Tensor) -> torch.Tensor:
    """Sums of the columns of a dense tensor's words, row-major, (1024,), int64, on its device."""
    data = bytes_of(tensor)
    wide = data.numel() % 4 == 0
    words = data.view(torch.int32) if wide else data
    num_whole = words.numel() // _NUM_COLUMNS * _NUM_COLUMNS
    sums = words[:num_whole].view(-1, _NUM_COLUMNS).sum(0, dtype=torch.int64)
    rest = words[num_whole:]
    sums[: rest.numel()] += rest
    return sums


def _hook(early: EarlyGradients, parameter: torch.Tensor) -> RemovableHandle:
    found = weakref.ref(early)

    def after(owner: torch.Tensor) -> None:
        alive = found()
        if alive is not None:
            alive.arrived(owner)

    # A compiled function of the user may call `backward`.
    hook = untraced(after)
    handle: RemovableHandle
    handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return handle
