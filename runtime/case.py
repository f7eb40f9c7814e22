"""One kind of step (the same first graph and input sizes) on its way from unknown to planned."""

import logging
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from teraplan.hardware import Budgets
from teraplan.run_record import TRAINING_STATE, RunRecord
from teraplan.runtime.recorder import Signature, StepRecorder
from teraplan.runtime.schedule import Schedule
from teraplan.runtime.state.block import Block
from teraplan.step_trace import Recompute, StepTrace

log = logging.getLogger(__name__)

_AS_PREDICTED = 0.03
_COMPARED_RUNS = 5
_MAX_ATTEMPTS = 4
"""Measurements of unequal steps before a kind of step counts as one that never repeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """What the step in which memory was measured has found."""

    signature: Signature
    state_bytes: int
    overhead_bytes: int
    """What the process held beside tensors."""
    workspaces_bytes: tuple[int, ...]


@dataclass(slots=True)
class Case:
    """Measurements and plan of one kind of step."""

    number: int
    memory: MemoryProfile | None = None
    durations_ns: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    schedule: Schedule | None = None
    budgets: Budgets | None = None
    reserve_bytes: int = 0
    """Held back because the process took more than what its tensors explain."""
    slowdown: float = 1.0
    """Times of the computation in planned steps over those in the measured ones."""
    unplanned_wait_ns: int = 0
    """For training state that the trace does not know, in planned steps."""
    calibrations: int = 0
    """How often actual times were taken over, since they were not as predicted."""
    corrections: int = 0
    gave_back: bool = False
    """Too much had been held back."""
    attempts: int = 0
    runs: list[RunRecord] = field(default_factory=list[RunRecord])
    runs_of: Schedule | None = None
    """What the runs ran under."""
    last: StepRecorder | None = None
    recomputes: dict[int, Recompute | None] = field(default_factory=dict[int, "Recompute | None"])
    """By tensor: how it can be computed again, as measured; None if that gave other bits once."""

    @property
    def repeats(self) -> bool:
        """False if this kind of step was different every time it was measured."""
        return self.attempts < _MAX_ATTEMPTS

    @property
    def lacks_memory(self) -> bool:
        """True if the next step of this kind can be one in which memory is measured."""
        return self.schedule is None and self.memory is None and self.repeats

    @property
    def state_blocks(self) -> Sequence[Block]:
        """The training state of the latest step of which it is known, in order of first use."""
        if self.schedule is not None:
            return [block for _, block in sorted(self.schedule.state_blocks.items())]
        return self.last.state.blocks if self.last is not None else ()

    def rehearsal_limits(self, budget_bytes: int) -> tuple[int, ...]:
        """Most managed bytes at each site of a step in which times are measured; else empty.

        Within a site only what lives in the intervals before and after it is there besides.
        """
        if self.schedule is not None or self.memory is None:
            return ()
        room, workspaces = budget_bytes - self.memory.state_bytes, self.memory.workspaces_bytes
        before = (workspaces[-1], *workspaces)
        return tuple(room - min(pair) for pair in zip(before, workspaces, strict=False))

    def measured(self, num_steps: int) -> bool:
        """True if memory and at least `num_steps` steps' times have been measured."""
        return self.memory is not None and len(self.durations_ns) >= num_steps

    def add(self, recorder: StepRecorder) -> None:
        """Take in a finished step."""
        signature = recorder.signature()
        if recorder.measure_memory:
            self.memory = MemoryProfile(
                signature=signature,
                state_bytes=recorder.state_bytes,
                overhead_bytes=recorder.process_overhead_bytes,
                workspaces_bytes=recorder.workspaces_bytes(),
            )
        elif self.memory is not None and self.memory.signature == signature:
            self.durations_ns.append(recorder.durations_ns())
        else:
            self.attempts += 1
            self.memory = None
            self.durations_ns.clear()
            self.recomputes.clear()
        self.last = recorder

    def add_rehearsed(self, rehearsed: Mapping[int, Recompute | None]) -> None:
        """Take in what the last measured step has found of computing again: the fastest counts."""
        for number, new in rehearsed.items():
            old = self.recomputes.get(number, new)
            if old is None or new is None or old.sources != new.sources:
                self.recomputes[number] = None
            else:
                self.recomputes[number] = min(old, new, key=lambda r: r.duration_ns)

    def calibrate(self, *, may_slow_down: bool = True) -> bool:
        """Take over how fast planned steps compute; False if that is what their plan predicted.

        The faster half of the last runs counts: what else the machine does makes steps slower. The
        first step under a plan touches much memory for the first time and counts for nothing.

        Args:
            may_slow_down: also if the steps are slower than predicted.
        """
        assert self.schedule is not None
        plan, latest = self.schedule.plan, self.runs[1:][-_COMPARED_RUNS:]
        runs = sorted(latest, key=lambda run: run.duration_ns)[: (len(latest) + 1) // 2]
        computed_ns = statistics.median(
            run.duration_ns - sum(stall.duration_ns for stall in run.stalls) for run in runs
        )
        took_ns = statistics.median(run.duration_ns for run in runs)
        predicted_ns = plan.prediction.step_ns + self.unplanned_wait_ns
        if abs(predicted_ns / took_ns - 1) <= _AS_PREDICTED:
            return False
        if took_ns > predicted_ns and not may_slow_down:
            return False
        self.calibrations += 1
        self.unplanned_wait_ns = int(statistics.median(map(_unplanned_wait_ns, runs)))
        measured_ns = min((sum(durations) for durations in self.durations_ns), default=0)
        if measured_ns:
            again_ns = self.schedule.step.duration_ns - plan.trace.duration_ns
            self.slowdown = (computed_ns - again_ns) / measured_ns
        return measured_ns > 0

    def trace(self, *, torch_version: str, kernels: str) -> StepTrace:
        """The measured step: memory of the one step, times of the fastest of the others.

        What makes a step slower than another of its kind is no part of the computation: memory
        touched for the first time, other programs. What planned steps take longer than that,
        because I/O and computation share cores and memory, all of their sites take in proportion.
        """
        assert self.memory is not None
        assert self.last is not None
        fastest = min(self.durations_ns, key=sum, default=(0,) * self.last.num_sites)
        return self.last.trace(
            state_bytes=self.memory.state_bytes + self.reserve_bytes,
            durations_ns=tuple(int(duration * self.slowdown) for duration in fastest),
            workspaces_bytes=self.memory.workspaces_bytes,
            torch_version=torch_version,
            kernels=kernels,
            recomputes={
                number: replace(it, duration_ns=int(it.duration_ns * self.slowdown))
                for number, it in self.recomputes.items()
                if it is not None
            },
        )


def _unplanned_wait_ns(run: RunRecord) -> int:
    return sum(stall.duration_ns for stall in run.stalls if stall.tensor == TRAINING_STATE)
