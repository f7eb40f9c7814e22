"""What planned steps say of the model that they were planned with: of times and of links.

    step = computation                        + waits
           as measured x `slowdown`             as simulated with links x `link_speed`

While a step moves tensors its computation shares cores and memory with I/O, and links share what
they have with the computation. Neither shows when each is measured alone.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from teraplan.simulation.simulate import predict
from teraplan.values.plan import Plan
from teraplan.values.run_record import TRAINING_STATE, RunRecord
from teraplan.values.step_trace import StepTrace

_AS_PREDICTED = 0.03
_EQUAL = 0.01
"""Of the step: by less no two of them are told apart."""
_COMPARED_RUNS = 5
_MOST_LINK_CHANGE = 16
_BISECTIONS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What planned steps have shown of one kind of step."""

    slowdown: float = 1.0
    """Times of the computation in planned steps over those in the measured ones."""
    link_speed: float = 1.0
    """Speed of all links in planned steps over what they have alone."""
    unplanned_wait_ns: int = 0
    """For training state that the trace does not know, in planned steps."""
    contention_ns_per_byte: float = 0.0
    """By which the computation takes longer for each byte that is moved beside it: what planned
    steps were slower when that was first seen. Later that has other reasons, too."""

    def when_moving(self, nbytes: int, before_bytes: int, measured_ns: int) -> "Calibration":
        """For a plan that moves `nbytes`, where this is for one that moves `before_bytes`."""
        more_ns = (nbytes - before_bytes) * self.contention_ns_per_byte
        if not more_ns:
            return self
        return replace(self, slowdown=self.slowdown + more_ns / measured_ns)

    def is_like(self, other: "Calibration", step_ns: int) -> bool:
        """True if plans made with either are about the same."""
        return (
            abs(self.slowdown / other.slowdown - 1) <= _EQUAL
            and abs(self.link_speed / other.link_speed - 1) <= 2 * _EQUAL
            and abs(self.unplanned_wait_ns - other.unplanned_wait_ns) <= _EQUAL * step_ns
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPlan:
    """A plan that was run."""

    plan: Plan
    took_ns: int


def typical(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Those of a plan's runs that say how fast it is.

    The faster half of the last ones: what else the machine does makes steps slower. The first step
    under a plan touches much memory for the first time and counts for nothing.
    """
    latest = runs[1:][-_COMPARED_RUNS:]
    return sorted(latest, key=lambda run: run.duration_ns)[: (len(latest) + 1) // 2]


def typical_ns(runs: Sequence[RunRecord]) -> int:
    """How long a step under a plan with these runs takes."""
    return int(statistics.median(run.duration_ns for run in typical(runs)))


def calibrated(
    known: Calibration,
    plan: Plan,
    runs: Sequence[RunRecord],
    measured_ns: int,
    *,
    may_slow_down: bool,
) -> Calibration | None:
    """What `runs` under `plan` say; None if that is nothing new, or the step is as predicted.

    Args:
        known: what the plan was made with.
        plan: in force.
        runs: under it.
        measured_ns: computation of the step as it was measured before there was a plan.
        may_slow_down: also if the steps are slower than predicted.
    """
    chosen, took_ns = typical(runs), typical_ns(runs)
    predicted_ns = plan.prediction.step_ns + known.unplanned_wait_ns
    if abs(predicted_ns / took_ns - 1) <= _AS_PREDICTED or not measured_ns:
        return None
    if took_ns > predicted_ns and not may_slow_down:
        return None
    computed_ns = statistics.median(run.duration_ns - _waited_ns(run) for run in chosen)
    again_ns = plan.step.duration_ns - plan.trace.duration_ns
    slowdown = max(computed_ns - again_ns, 1) / measured_ns
    unplanned_ns = int(statistics.median(_waited_ns(run, TRAINING_STATE) for run in chosen))
    change = _link_change(plan, slowdown / known.slowdown, took_ns - unplanned_ns)
    contention = known.contention_ns_per_byte
    if not contention and slowdown > 1 + _EQUAL and plan.prediction.moved_bytes:
        contention = (slowdown - 1) * measured_ns / plan.prediction.moved_bytes
    found = Calibration(
        slowdown=slowdown,
        link_speed=known.link_speed * change,
        unplanned_wait_ns=unplanned_ns,
        contention_ns_per_byte=contention,
    )
    return None if found.is_like(known, took_ns) else found


def _link_change(plan: Plan, slower: float, took_ns: int) -> float:
    """By how much links have to be faster so that the plan takes `took_ns`, if that helps at all.

    Args:
        plan: that was run.
        slower: its computation took so many times what it was predicted to take.
        took_ns: its steps.
    """
    trace, within_ns = with_durations(plan.trace, slower), int(_EQUAL * took_ns)

    def late_ns(change: float) -> int:
        hardware = plan.hardware.with_links(change).paced(plan.storage_pace)
        return predict(trace, hardware, *plan.choices).step_ns - took_ns

    late_now_ns = late_ns(1) if plan.migrations else 0
    if abs(late_now_ns) <= within_ns:
        return 1.0
    sign = 1 if late_now_ns > 0 else -1  # of the logarithm of the change
    near, far = 1.0, 2.0**sign
    while sign * late_ns(far) > within_ns:
        if max(far, 1 / far) >= _MOST_LINK_CHANGE:
            return far
        near, far = far, far * 2.0**sign
    for _ in range(_BISECTIONS):
        middle = (near * far) ** 0.5
        if sign * late_ns(middle) > within_ns:
            near = middle
        else:
            far = middle
    return far


def with_durations(trace: StepTrace, factor: float) -> StepTrace:
    """The trace with all of its computation taking `factor` times as long."""
    return replace(
        trace,
        sites=tuple(replace(s, duration_ns=int(s.duration_ns * factor)) for s in trace.sites),
        tensors=tuple(
            t
            if t.recompute is None
            else replace(
                t,
                recompute=replace(t.recompute, duration_ns=int(t.recompute.duration_ns * factor)),
            )
            for t in trace.tensors
        ),
    )


def _waited_ns(run: RunRecord, tensor: str | None = None) -> int:
    return sum(stall.duration_ns for stall in run.stalls if tensor in (None, stall.tensor))
