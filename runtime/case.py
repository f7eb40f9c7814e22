"""One kind of step (the same first graph and input sizes) on its way from unknown to planned."""

import logging
from dataclasses import dataclass, field

from teraplan.hardware import Budgets
from teraplan.run_record import RunRecord
from teraplan.runtime.recorder import Signature, StepRecorder
from teraplan.runtime.schedule import Schedule
from teraplan.step_trace import StepTrace

log = logging.getLogger(__name__)

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
    corrections: int = 0
    unchecked_runs: int = 0
    """Planned steps since peak and budget were compared."""
    attempts: int = 0
    runs: list[RunRecord] = field(default_factory=list[RunRecord])
    runs_of: Schedule | None = None
    """What the runs ran under."""
    last: StepRecorder | None = None

    @property
    def repeats(self) -> bool:
        """False if this kind of step was different every time it was measured."""
        return self.attempts < _MAX_ATTEMPTS

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
        self.last = recorder

    def trace(self, *, torch_version: str, kernels: str) -> StepTrace:
        """The measured step: memory of the one step, times of the fastest of the others.

        What makes a step slower than another of its kind is no part of the computation: memory
        touched for the first time, other programs.
        """
        assert self.memory is not None
        assert self.last is not None
        return self.last.trace(
            state_bytes=self.memory.state_bytes + self.reserve_bytes,
            durations_ns=min(self.durations_ns, key=sum, default=(0,) * self.last.num_sites),
            workspaces_bytes=self.memory.workspaces_bytes,
            torch_version=torch_version,
            kernels=kernels,
        )
