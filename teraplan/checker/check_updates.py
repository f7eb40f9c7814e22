"""The checker's rules of updates on the host, and what of the step they leave for the device.

Like `check_plan` it shares no code with what it checks.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from teraplan.checker.violations import Violation, ViolationKind
from teraplan.values.plan import HostUpdate, Plan
from teraplan.values.step_trace import Tensor, Update


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceView:
    """The tensors of a step as the device has them under a plan."""

    tensors: tuple[Tensor, ...]
    """A parameter that the host updates lives from its first use in the step to its last, its
    gradient to its last use before the update; state that is not on the device has no bytes."""
    moving: tuple[tuple[int, int, int], ...]
    """(start, end, bytes) of gradients that are going out and of parameters that came early."""
    absent: frozenset[int]
    """State of the host's updates."""
    updated: frozenset[int]
    """Parameters that the host updates."""
    host_bytes: int
    traffic: tuple[int, int]
    """Bytes of gradients that go out, and of parameters that come back."""
    idle_sites: frozenset[int]
    """Intervals in which the device would have updated."""

    @classmethod
    def of(cls, plan: Plan) -> "DeviceView":
        """The view of a plan whose host updates hold (`check_updates`)."""
        tensors, num_sites = list(plan.trace.tensors), len(plan.trace.sites)
        moving: list[tuple[int, int, int]] = []
        absent: set[int] = set()
        updated: set[int] = set()
        idle: set[int] = set()
        host_bytes = out = back = 0
        for h in plan.host_updates:
            update = plan.trace.updates[h.update]
            idle |= set(range(update.start, update.end))
            for i in update.states:
                host_bytes += tensors[i].nbytes
                tensors[i] = replace(tensors[i], nbytes=0)
                absent.add(i)
            for i in update.gradients:
                tensors[i] = _cut(tensors[i], update.start)
                moving.append((tensors[i].windows[-1][1], h.gone, tensors[i].nbytes))
                out += tensors[i].nbytes
            for i in update.parameters:
                tensors[i] = _cut(tensors[i], update.start)
                born = tensors[i].windows[0][0] + num_sites
                moving.append((h.back, born, tensors[i].nbytes))
                back += tensors[i].nbytes
                updated.add(i)
        return cls(
            tensors=tuple(tensors),
            moving=tuple(moving),
            absent=frozenset(absent),
            updated=frozenset(updated),
            host_bytes=host_bytes + out + back,
            traffic=(out, back),
            idle_sites=frozenset(idle),
        )


def _cut(tensor: Tensor, start: int) -> Tensor:
    """The tensor without its update, in which it is touched from `start` on."""
    windows = [list(window) for window in tensor.windows]
    if windows[-1][0] < start:
        windows[-1][1] = start
    else:
        windows.pop()
    changes = tuple(n for n in tensor.changes if n < len(windows)) if not tensor.persistent else ()
    return replace(
        tensor,
        windows=tuple((a, b) for a, b in windows),
        persistent=False,
        changed_in=changes,
    )


def check_updates(plan: Plan) -> Iterator[Violation]:
    """What is wrong with the updates on the host."""
    seen: set[int] = set()
    for index, h in enumerate(plan.host_updates):
        for why in _wrong(plan, h, seen):
            message = f"host update {index}: {why}"
            yield Violation(kind=ViolationKind.UPDATE, message=message)
        seen.add(h.update)


def _wrong(plan: Plan, h: HostUpdate, seen: set[int]) -> Iterator[str]:
    updates = plan.trace.updates
    if plan.hardware.host_cores is None or plan.hardware.host_link is None:
        yield "the machine has no host cores that update, or no link to the host"
    if not 0 <= h.update < len(updates):
        yield f"update {h.update} of {len(updates)}"
        return
    if h.update in seen:
        yield f"update {h.update} is on the host already"
    update = updates[h.update]
    if not h.flush <= h.gone <= h.back <= h.needed:
        yield (
            f"it has flush {h.flush}, gone {h.gone}, back {h.back}, needed {h.needed}; "
            "the order is flush <= gone <= back <= needed"
        )
        return
    yield from _wrong_sites(plan, h, update)


def _wrong_sites(plan: Plan, h: HostUpdate, update: Update) -> Iterator[str]:
    tensors, num_sites = plan.trace.tensors, len(plan.trace.sites)
    for i in update.gradients:
        used = _cut(tensors[i], update.start).windows[-1][1]
        if used > h.flush:
            yield f"{tensors[i].name} leaves at site {h.flush}, but is used until {used}"
    for i in update.parameters:
        cut = _cut(tensors[i], update.start)
        if cut.windows[-1][1] > h.back:
            yield f"{tensors[i].name} comes back at site {h.back}, but is used until then"
        first = cut.windows[0][0] + num_sites
        if h.needed > first:
            yield f"{tensors[i].name} is waited for at site {h.needed}, but used at {first}"
    if update.ready > h.back:
        yield f"its parameters come back at site {h.back}, but it begins at {update.ready}"
    if h.gone > num_sites:
        yield f"its gradients leave until site {h.gone}, after the step"
