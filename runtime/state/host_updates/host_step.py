"""The host's part of one optimizer step: bucket after bucket, each copied, updated, copied back.

    slot 0   out(b0) update(b0) back(b0)  out(b2) ...
    slot 1           out(b1)              update(b1) back(b1) ...

Each update is the optimizer's own step, called on an object that stands in for it with the twins of
the bucket's parameters. It runs in any thread, beside the device's part of the step.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from teraplan.errors import HostUpdateError, StorageFullError, TeraplanError, UnsupportedError
from teraplan.runtime.host_lane import HostLane, Wait
from teraplan.runtime.process.names import all_described
from teraplan.runtime.state.host_updates.host_twins import Sent, Twin, twins_in
from teraplan.runtime.state.memory.host_memory import host_bytes
from teraplan.runtime.state.updates.host_state import SHARES_MEMORY, HostState, State, shares_memory
from teraplan.runtime.state.updates.stand_in import (
    Values,
    is_of_torch,
    stand_in,
    values_beside_state,
    values_to_host,
)
from teraplan.runtime.state.updates.update_trial import plain_step
from teraplan.units import format_nbytes

Optimizer = torch.optim.Optimizer
Bucket = Sequence[torch.Tensor]


class Access(Protocol):
    """Sees that tensors are in memory."""

    def __call__(
        self, tensors: Sequence[torch.Tensor], *, writes: bool
    ) -> AbstractContextManager[None]:
        """Within it they are."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlace:
    """Where updates on the host have their memory, and how they get there."""

    lane: HostLane
    slots: Sequence[torch.Tensor]
    """Two, (nbytes,), uint8, each with room for any bucket."""
    state: HostState
    access: Access
    sent: Mapping[int, Sent]
    """Gradients that are on their way already, by identity of the parameter."""


class HostStep:
    """See the module's text. After `run`, `updated` has the state of each updated parameter."""

    def __init__(
        self,
        optimizer: Optimizer,
        buckets: Sequence[Bucket],
        place: HostPlace,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        missing_bytes: dict[int, int],
    ) -> None:
        """Called in the training thread.

        Args:
            optimizer: the user's, or a stand-in.
            buckets: parameters with gradients.
            place: memory and copies.
            args: of its step, but for the optimizer.
            kwargs: of its step.
            missing_bytes: of the state that the step will make, by identity of its parameter.
        """
        self._optimizer, self._buckets, self._place = optimizer, buckets, place
        self.args, self.kwargs = args, kwargs
        self.parameters = {id(p) for bucket in buckets for p in bucket}
        """Identities."""
        self.num_sent = len(place.sent)
        """Of their gradients, those that are on their way already."""
        self._missing_bytes = missing_bytes
        self._grad_enabled = torch.is_grad_enabled()
        self.ended = threading.Event()
        self.stopped = False
        """Set it, and no further bucket begins."""
        self.error: BaseException | None = None
        self.updated: list[tuple[Twin, State | None]] = []
        self.unfit: list[torch.Tensor] = []
        """Parameters whose state has not found room in host memory."""
        self.values: Values | None = None
        """What the last bucket has left beside `state`."""
        self.busy_ns = 0
        """Time that the updates themselves took."""
        self._number = 0
        """Of the bucket that is being updated."""

    @property
    def what(self) -> str:
        """What is being updated, for errors."""
        bucket = self._buckets[self._number]
        some = "; ".join(all_described(bucket[:3]))
        return f"parameters ({some}{f' and {len(bucket) - 3} more' if len(bucket) > 3 else ''})"

    def run(self, *, in_worker: bool) -> None:
        """Do all buckets, in a thread of its own or the training thread; see `error`."""
        try:
            if in_worker:
                self._place.lane.enter()
            with torch.set_grad_enabled(self._grad_enabled):
                self._run()
        except BaseException as error:  # noqa: BLE001  the training thread raises it
            self.error = error
        finally:
            self.ended.set()

    def raise_error(self) -> None:
        """Raise what has ended the step before its time, if anything has."""
        error = self.error
        if error is None:
            return
        if isinstance(error, TeraplanError) or not isinstance(error, Exception):
            raise error
        raise HostUpdateError(
            f"the update of {self.what} on the host failed: {type(error).__name__}: {error}. They "
            f"have their values from before; {len(self.updated)} others on the host have been "
            'updated. Set host_updates to "never" to update on the device alone'
        ) from error

    def _run(self) -> None:
        coming = self._bring(0)
        for number in range(len(self._buckets)):
            if self.stopped:
                return
            twins, waits = coming
            if number + 1 < len(self._buckets):
                coming = self._bring(number + 1)
            self._number = number
            for wait in waits:
                wait()
            self._update(twins)

    def _bring(self, number: int) -> tuple[list[Twin], list[Wait]]:
        place, bucket = self._place, self._buckets[number]
        twins = twins_in(place.slots[number % len(place.slots)], bucket, place.sent)
        waits: list[Wait] = []
        for twin in twins:
            with place.access((twin.parameter, twin.gradient), writes=False):
                waits += twin.out(place.lane)
        return twins, waits

    def _update(self, twins: Sequence[Twin]) -> None:
        place = self._place
        made = self._standing_in(twins)
        reserved = self._reserve(twins)
        is_known = is_of_torch(self._optimizer)
        for twin in twins:
            twin.give_gradient(to_write=not is_known)
        start_ns = time.perf_counter_ns()
        plain_step(made)(made, *self.args, **self.kwargs)
        self.busy_ns += time.perf_counter_ns() - start_ns
        unscaled = getattr(made, "grad_scale", None) is not None
        for twin in twins:
            state = made.state.get(twin.tensor)
            if not is_known and shares_memory(state or {}, twin.tensor):
                raise UnsupportedError(
                    f"{type(self._optimizer).__name__} {SHARES_MEMORY}, which it did not in the "
                    'steps before: set host_updates to "never"'
                )
            with place.access((twin.parameter, twin.gradient), writes=True):
                twin.back(place.lane, unscaled=unscaled)
            if state is not None and not place.state.take_in(state):
                self.unfit.append(twin.parameter)
            self.updated.append((twin, state))
        del reserved
        self.values = values_beside_state(made)

    def _standing_in(self, twins: Sequence[Twin]) -> Optimizer:
        """The optimizer with these twins in the places of their parameters."""
        made = stand_in(self._optimizer, frozenset())
        values_to_host(made)
        by_parameter = {id(twin.parameter): twin.tensor for twin in twins}
        for group, theirs in zip(made.param_groups, self._optimizer.param_groups, strict=True):
            found = [p for p in theirs["params"] if id(p) in by_parameter]
            group["params"] = [by_parameter[id(p)] for p in found]
            for p in found:
                if p in self._optimizer.state:
                    made.state[by_parameter[id(p)]] = self._optimizer.state[p]
        return made

    def _reserve(self, twins: Sequence[Twin]) -> torch.Tensor | None:
        """Host memory for state that the step makes, until it has been taken in."""
        nbytes = sum(self._missing_bytes.get(id(twin.parameter), 0) for twin in twins)
        if not nbytes:
            return None
        reserved = host_bytes(self._place.state.pool, nbytes)
        if reserved is None:
            free_bytes = self._place.state.pool.free_bytes
            raise StorageFullError(
                f"the first update of {self.what} makes {format_nbytes(nbytes)} of optimizer state "
                f"in host memory, of which {format_nbytes(free_bytes)} are free; raise host_budget"
            )
        return reserved
