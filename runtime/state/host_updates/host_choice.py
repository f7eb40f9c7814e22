"""Which parameters of an optimizer are updated on the host, within the host budget.

Those of the last layers come first: in a step their gradients are there first, and their values are
needed last. One parameter at least stays on the device, since the user's own call of `step` has to
have something to do.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch

from teraplan.runtime.process.census import STATES_OF_UNKNOWN, states_to_come
from teraplan.runtime.process.pinned_pool import PAGE_BYTES
from teraplan.runtime.state.host_updates.host_twins import ALIGNMENT
from teraplan.runtime.state.memory.movable import is_dense, is_plain
from teraplan.runtime.state.updates.stand_in import parameters_of
from teraplan.units import MIB
from teraplan.values.graph_table import MIN_SLOT_BYTES

BUCKET_BYTES = 32 * MIB
"""Of parameters: enough to keep cores and link busy, and little to have two of."""

Optimizer = torch.optim.Optimizer


def missing_bytes(optimizer: Optimizer) -> dict[int, int]:
    """Bytes of host memory for the state that a step will make, by identity of the parameter."""
    to_come = states_to_come(optimizer, unknown=STATES_OF_UNKNOWN)
    return {id(p): count * (p.nbytes + PAGE_BYTES) for p, count in to_come}


def state_bytes(optimizer: Optimizer, missing: dict[int, int]) -> dict[int, int]:
    """Bytes of host memory for each parameter's state, made already or not."""
    found = dict(missing)
    for parameter in parameters_of(optimizer):
        if id(parameter) not in found:
            values = optimizer.state[parameter].values()
            tensors = [v for v in values if isinstance(v, torch.Tensor)]
            found[id(parameter)] = sum(
                t.nbytes + PAGE_BYTES for t in tensors if t.nbytes >= MIN_SLOT_BYTES
            )
    return found


def fits(parameter: torch.Tensor, device_type: str) -> bool:
    """True if the parameter is worth updating on the host, and its bytes can be copied there."""
    return (
        parameter.device.type == device_type
        and parameter.nbytes >= MIN_SLOT_BYTES
        and is_plain(parameter)
        and is_dense(parameter)
    )


def has_fitting_gradient(parameter: torch.Tensor) -> bool:
    """True if the parameter has a gradient that can be copied to the host."""
    gradient = parameter.grad
    return (
        gradient is not None
        and is_dense(gradient)
        and gradient.nbytes == parameter.nbytes
        and gradient.device == parameter.device
    )


def candidates(
    optimizer: Optimizer, ours: Callable[[torch.Tensor], bool], device_type: str
) -> list[torch.Tensor]:
    """Parameters that could be updated on the host, those of the last layers first."""
    everything = list(parameters_of(optimizer))
    strided = [p for p in everything if p.layout == torch.strided and is_plain(p)]
    holders = Counter(p.untyped_storage().data_ptr() for p in strided)
    stays = min(everything, key=lambda p: p.nbytes, default=None)
    found = []
    for group in reversed(optimizer.param_groups):
        if group.get("capturable") or group.get("differentiable"):
            continue
        for p in reversed(group["params"]):
            if p is not stays and ours(p) and fits(p, device_type):
                alone = holders[p.untyped_storage().data_ptr()] == 1
                found += [p] if alone else []
    return found


def smallest(parameters: Sequence[torch.Tensor]) -> set[int]:
    """Identity of the smallest of those that have gradients, or of any; none of none."""
    found = [p for p in parameters if p.grad is not None] or list(parameters)
    return {id(min(found, key=lambda p: p.nbytes))} if found else set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Parameters to be updated on the host, and what did not fit there."""

    parameters: tuple[torch.Tensor, ...]
    left_out_bytes: int = 0
    """Of parameters that were wanted there and have no room."""


def choose(
    found: Sequence[torch.Tensor],
    *,
    already: Collection[int],
    wanted_bytes: float,
    states: dict[int, int],
    missing: dict[int, int],
    others: Sequence[torch.Tensor],
    room_bytes: int,
) -> Choice:
    """As many of `found`, in order, until `wanted_bytes` of parameters are reached.

    Args:
        found: candidates.
        already: identities of those that are on the host.
        wanted_bytes: of parameters, including those.
        states: bytes of each one's state, by identity.
        missing: of these, what the next step makes.
        others: that are on the host already, of this or another optimizer.
        room_bytes: host memory for new ones' state, for two slots, and for what the first update of
            a bucket makes.
    """
    chosen = [p for p in found if id(p) in already]
    nbytes = sum(p.nbytes for p in chosen)
    left_out = 0
    for p in found:
        if nbytes >= wanted_bytes:
            break
        if id(p) in already:
            continue
        new = [q for q in (*chosen, p) if id(q) not in already]
        if _needs(new, [*others, *new], states, missing) > room_bytes:
            left_out += p.nbytes
            continue
        chosen.append(p)
        nbytes += p.nbytes
    return Choice(parameters=tuple(chosen), left_out_bytes=left_out)


def without_room(
    chosen: Sequence[torch.Tensor], missing: dict[int, int], room_bytes: int
) -> list[torch.Tensor]:
    """Those for whose first update, which makes state, there is no room beside the others'.

    Args:
        chosen: in the order in which they are updated.
        missing: bytes of the state that is made, by identity.
        room_bytes: host memory that is free.
    """
    found: list[torch.Tensor] = []
    made, largest = 0, 0
    for bucket in buckets_of(chosen):
        of_bucket = 0
        for p in bucket:
            new = missing.get(id(p), 0)
            # What a bucket makes is there twice until it has been taken in.
            if new and made + new + max(largest, of_bucket + new) > room_bytes:
                found.append(p)
                continue
            made, of_bucket = made + new, of_bucket + new
        largest = max(largest, of_bucket)
    return found


def slot_bytes(chosen: Sequence[torch.Tensor]) -> int:
    """Size of a slot for any bucket of some of these."""
    largest = max((p.nbytes for p in chosen), default=0)
    total = sum(p.nbytes for p in chosen)
    return 2 * (min(total, max(BUCKET_BYTES, largest)) + ALIGNMENT * len(chosen))


def buckets_of(parameters: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The parameters in order, in buckets of at most `BUCKET_BYTES`, or of one that is larger."""
    bucket: list[torch.Tensor] = []
    nbytes = 0
    for parameter in parameters:
        if bucket and nbytes + parameter.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, nbytes = [], 0
        bucket.append(parameter)
        nbytes += parameter.nbytes
    if bucket:
        yield bucket


def _needs(
    new: Sequence[torch.Tensor],
    chosen: Sequence[torch.Tensor],
    states: dict[int, int],
    missing: dict[int, int],
) -> int:
    """Host memory that is needed at most for the state of `new` and the updates of `chosen`."""
    slot = slot_bytes(chosen)
    made = sum(missing.get(id(p), 0) for p in new)
    times = max((missing.get(id(p), 0) / p.nbytes for p in new), default=0.0)
    at_once = min(made, int(times * slot / 2))
    return sum(states[id(p)] for p in new) + 2 * (slot + PAGE_BYTES) + at_once
