"""One kind of step (the same first graph and input sizes) on its way from unknown to planned."""

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from teraplan.runtime.device import MEASURED_WITHIN_BYTES
from teraplan.runtime.engine.recorder import StepRecorder
from teraplan.runtime.engine.schedule import Schedule
from teraplan.runtime.session.calibration import (
    Calibration,
    MeasuredPlan,
    calibrated,
    with_durations,
)
from teraplan.runtime.session.memory_profile import MemoryProfile, has_as_large
from teraplan.runtime.state.memory.block import Block
from teraplan.units import format_nbytes
from teraplan.values.graph_table import GraphTable
from teraplan.values.hardware import Budgets
from teraplan.values.plan import Plan
from teraplan.values.run_record import RunRecord
from teraplan.values.step_trace import Recompute, StepTrace

log = logging.getLogger(__name__)

_KEPT_RUNS, _KEPT_PEAKS = 64, 12
_ALL_SAMPLED, _SAMPLED_EVERY = 24, 8
"""Runs of one plan that are looked at, and one in how many after that, where looking takes time."""
_MAX_ODD = 3
"""Measured steps in a row with a forward that no backward follows which are not taken for the usual
ones, if memory is too little for them."""
_MAX_GROWN = 2
"""Steps in which the process has grown for good that are measured once more."""
_GROWN_FRACTION = 0.01
_MAX_ATTEMPTS, _MAX_ATTEMPTS_IN_TURN = 4, 2
"""Measurements of unequal steps before a kind of step counts as one that does not repeat."""
_FIRST_PAUSE = 16
"""Steps until such a kind is measured again; each further time twice as many."""
_MAX_DIVERGED, _MAX_DOUBLED = 3, 5
"""Steps in a row that went another way than planned, after which a kind of step is measured anew;
each further time twice as many, so often at most."""


@dataclass(slots=True)
class Case:
    """Measurements and plan of one kind of step."""

    number: int
    in_turn: bool = False
    """Its steps follow certain others, with which they begin alike (`cases`)."""
    num_begun: int = 0
    """Steps of this kind so far, the one under way among them."""
    tables: dict[str, GraphTable] = field(default_factory=dict[str, GraphTable])
    """Of the graphs that its steps have run, by their names, at the largest sizes."""
    saved_bytes: int = 0
    """The most that one of its steps has saved, as far as that was seen."""
    memory: MemoryProfile | None = None
    durations_ns: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    schedule: Schedule | None = None
    budgets: Budgets | None = None
    peaks_bytes: deque[int] = field(default_factory=lambda: deque[int](maxlen=_KEPT_PEAKS))
    """What the process took in the last steps under the plan in force."""
    reserve_bytes: int = 0
    """Held back because the process took more than what its tensors explain."""
    surplus_bytes: int = 0
    """What it takes more than they explain, where that is within the budget."""
    calibration: Calibration = field(default_factory=Calibration)
    """What planned steps have shown."""
    calibrations: int = 0
    """How often that was taken over, since steps were not as predicted."""
    num_plans: int = 0
    """That have come into force."""
    best: MeasuredPlan | None = None
    """The fastest so far of plans that hold."""
    overhead_counted_at: tuple[int, int] = (-1, -1)
    """When what the process holds beside tensors was counted anew: `num_plans`, and how many graphs
    had been compiled and steps been measured, which leave something in it."""
    settled: bool = False
    """A plan that was predicted to be faster was slower: only predictions still change."""
    corrections: int = 0
    keeps_free: bool = False
    """The process takes more than the budget, and the plan can hold nothing more back for it."""
    told: tuple[int, str] | None = None
    """The peak that was told of then, and in which words."""
    times_given_back: int = 0
    """Too much had been held back."""
    attempts: int = 0
    others: set[int] = field(default_factory=set[int])
    """Steps that were not as the measured one."""
    paused_steps: int = 0
    """Since the last of them, if there are no more."""
    num_pauses: int = 0
    told_pauses: int = 0
    is_alone: bool = False
    """A forward runs in it that no backward follows, so that no plan keeps to the budget."""
    num_diverged: int = 0
    """Of the latest planned steps, those that went another way than planned."""
    num_anew: int = 0
    """How often it was measured anew for that."""
    num_grown: int = 0
    """Of the steps in which memory was measured, those in which the process has grown."""
    num_odd: int = 0
    """Of the latest measured steps, those that were taken for odd ones."""
    runs: list[RunRecord] = field(default_factory=list[RunRecord])
    """The last ones under one schedule."""
    num_runs: int = 0
    """All under that schedule."""
    num_passed_over: int = 0
    """Steps since the last of them, where not all are looked at."""
    runs_of: Schedule | None = None
    """What the runs ran under."""
    last: StepRecorder | None = None
    recomputes: dict[int, Recompute | None] = field(default_factory=dict[int, "Recompute | None"])
    """By tensor: how it can be computed again, as measured; None if that gave other bits once."""

    @property
    def is_first(self) -> bool:
        """True if steps of this kind are the first there are; later ones may be evaluations."""
        return self.number == 0

    def knows(self, table: GraphTable) -> bool:
        """True if memory was measured with calls of this graph that took as much.

        Where nothing was measured, a plan that is replayed answers for itself.
        """
        if self.memory is None:
            return self.schedule is not None
        return has_as_large(self.memory.tables, table)

    @property
    def may_be_alone(self) -> bool:
        """True if no other step is known that is like the one under way: sizes may never repeat.

        Its memory is not measured, which takes far longer than a small step itself.
        """
        return not self.is_first and not self.in_turn and self.num_begun <= 1

    @property
    def repeats(self) -> bool:
        """False if this kind of step was different every time it was measured lately."""
        return self.attempts < (_MAX_ATTEMPTS_IN_TURN if self.in_turn else _MAX_ATTEMPTS)

    @property
    def is_unexplained(self) -> bool:
        """True if no plan can be made of what was measured, and nobody has been told yet."""
        return not self.repeats and self.told_pauses <= self.num_pauses

    def pause(self) -> None:
        """Do without a plan for a while."""
        self.attempts = _MAX_ATTEMPTS
        self._forget_measurements()

    def meet(self, table: GraphTable) -> bool:
        """A step runs this graph; true if none has run it before, or at sizes as large."""
        if has_as_large(self.tables, table):
            return False
        self.tables[table.graph] = table
        return True

    @property
    def pause_steps(self) -> int:
        """Steps that are not measured once those measured were different."""
        return _FIRST_PAUSE << self.num_pauses

    def count_pause(self) -> None:
        """A step was not measured. Users may have interrupted those that were."""
        self.paused_steps += 1
        if self.paused_steps >= self.pause_steps:
            self.paused_steps = self.attempts = 0
            self.is_alone = False
            self.num_pauses += 1

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

    def diverged(self, *, for_good: bool) -> bool:
        """A planned step went another way; true if those to come are to be measured anew.

        `for_good`: it ran graphs that are new.
        """
        self.num_diverged += 1
        return for_good or self.num_diverged >= self._most_diverged

    def anew(self) -> "Case":
        """The same kind of step as if never met, whose steps may go another way more often."""
        is_again = self.num_diverged >= self._most_diverged
        return Case(self.number, self.in_turn, self.num_begun, num_anew=self.num_anew + is_again)

    @property
    def _most_diverged(self) -> int:
        return _MAX_DIVERGED << min(self.num_anew, _MAX_DOUBLED)

    def measured(self, num_steps: int) -> bool:
        """True if memory and at least `num_steps` steps' times have been measured."""
        return self.memory is not None and len(self.durations_ns) >= num_steps

    def lets_grow(self, recorder: StepRecorder) -> bool:
        """True if memory is to be measured again: the process holds more now, beside tensors.

        It has loaded code or compiled something, and each interval would seem to take that.
        """
        usual = MEASURED_WITHIN_BYTES + int(recorder.state_bytes * _GROWN_FRACTION)
        if recorder.grown_bytes <= usual or self.num_grown >= _MAX_GROWN:
            return False
        self.num_grown += 1
        log.info("the process has grown by %s: once more", format_nbytes(recorder.grown_bytes))
        return True

    def add(self, recorder: StepRecorder) -> None:
        """Take in a finished step."""
        signature, memory = recorder.signature(), self.memory
        alike = memory is not None and memory.signature == signature
        if recorder.measure_memory:
            self.memory = MemoryProfile(
                signature=signature,
                state_bytes=recorder.state_bytes,
                overhead_bytes=recorder.process_overhead_bytes,
                workspaces_bytes=recorder.workspaces_bytes(),
                tables=dict(self.tables),
                saved_bytes=recorder.saved_bytes,
                most_bytes=recorder.most_bytes(),
            )
        elif memory is not None and alike and memory.is_outgrown(recorder.saved_bytes):
            self.attempts += 1
            self._forget_measurements()
        elif alike:
            self.durations_ns.append(recorder.durations_ns())
        else:
            self.attempts += 1
            if self.attempts > 1 and hash(signature) in self.others:  # it comes in turn
                self.attempts = _MAX_ATTEMPTS
            self.others.add(hash(signature))
            self._forget_measurements()
        if self.last is None or not alike or recorder.saved_bytes >= self.last.saved_bytes:
            self.last = recorder
        if not recorder.has_forwards_alone:
            self.num_odd = 0

    def forget_odd_step(self) -> bool:
        """Forget what was measured if the step may be unlike others; False if it is not.

        So is one in which a loss that is not finite has been passed over: two forwards, of which
        the first keeps all it has saved.
        """
        odd = self.last is not None and self.last.has_forwards_alone
        if not odd or self.num_odd >= _MAX_ODD or self.schedule is not None:
            return False
        self.num_odd += 1
        self._forget_measurements()
        return True

    def _forget_measurements(self) -> None:
        self.memory = None
        self.durations_ns.clear()
        self.recomputes.clear()

    def add_run(self, run: RunRecord) -> None:
        """Take in a finished step under the schedule in force."""
        if self.runs_of is not self.schedule:
            self.runs.clear()
            self.runs_of, self.num_runs = self.schedule, 0
        self.runs.append(run)
        self.num_runs += 1
        del self.runs[:-_KEPT_RUNS]

    def samples_run(self) -> bool:
        """A step under the schedule in force has ended: true if it is one to look at.

        Where that makes the device wait for the host, it is the first ones, and then some.
        """
        if self.runs_of is not self.schedule or self.num_runs < _ALL_SAMPLED:
            return True
        self.num_passed_over = (self.num_passed_over + 1) % _SAMPLED_EVERY
        return self.num_passed_over == 0

    def follow(self, schedule: Schedule, *, anew: bool) -> None:
        """It comes into force; if it is only another prediction, runs go on counting."""
        self.calibration = self.calibration_of(schedule.plan)
        self.schedule = schedule
        if anew:
            self.num_plans += 1
        else:
            self.runs_of = schedule

    def calibration_of(self, plan: Plan) -> Calibration:
        """For a plan that may move more or less than the one in force."""
        if self.schedule is None or not self.durations_ns:
            return self.calibration
        now_bytes = self.schedule.plan.prediction.moved_bytes
        return self.calibration.when_moving(
            plan.prediction.moved_bytes, now_bytes, self._measured_ns
        )

    @property
    def expected_bytes(self) -> int:
        """The peak of a step under the schedule in force."""
        assert self.schedule is not None
        return self.schedule.expected_bytes + self.surplus_bytes

    @property
    def _measured_ns(self) -> int:
        """Computation of the step; 0 if it has not been measured."""
        return min(map(sum, self.durations_ns), default=0)

    def take_overhead(self, nbytes: int, now: tuple[int, int]) -> None:
        """The process holds so much beside tensors now: what has come since is no tensor's."""
        assert self.memory is not None
        grown = max(nbytes, self.memory.overhead_bytes)
        self.memory = replace(self.memory, overhead_bytes=grown)
        self.overhead_counted_at = now

    def forget_speed(self) -> None:
        """The machine has changed: what steps took before says nothing of plans to come."""
        self.best, self.settled, self.calibrations = None, False, 0

    def forget_plans(self) -> None:
        """What tiers take is another: no plan so far counts, and links may have another speed."""
        self.schedule, self.best, self.settled = None, None, False
        self.calibration = replace(self.calibration, link_speed=1.0)

    def add_rehearsed(self, rehearsed: Mapping[int, Recompute | None]) -> None:
        """Take in what the last measured step has found of computing again: the fastest counts."""
        for number, new in rehearsed.items():
            old = self.recomputes.get(number, new)
            if old is None or new is None or old.sources != new.sources:
                self.recomputes[number] = None
            else:
                self.recomputes[number] = min(old, new, key=lambda r: r.duration_ns)

    def calibrate(self, *, may_slow_down: bool = True) -> bool:
        """Take over how fast planned steps and their transfers are; False if nothing is new.

        Args:
            may_slow_down: also if the steps are slower than predicted.
        """
        assert self.schedule is not None
        found = calibrated(
            self.calibration,
            self.schedule.plan,
            self.runs,
            self._measured_ns,
            may_slow_down=may_slow_down,
        )
        if found is None:
            return False
        self.calibration = found
        self.calibrations += 1
        return True

    def trace(
        self,
        *,
        torch_version: str,
        kernels: str,
        chunk_bytes: int,
        slowdown: float | None = None,
    ) -> StepTrace:
        """The measured step: memory of the one step, times of the fastest of the others.

        What makes a step slower than another of its kind is no part of the computation: memory
        touched for the first time, other programs. What planned steps take longer than that,
        because I/O and computation share cores and memory, all of their sites take in proportion.
        """
        assert self.memory is not None
        assert self.last is not None
        fastest = min(self.durations_ns, key=sum, default=(0,) * self.last.num_sites)
        measured = self.last.trace(
            state_bytes=self.memory.state_bytes + self.reserve_bytes,
            durations_ns=fastest,
            workspaces_bytes=self.memory.workspaces_bytes,
            torch_version=torch_version,
            kernels=kernels,
            chunk_bytes=chunk_bytes,
            recomputes={n: it for n, it in self.recomputes.items() if it is not None},
        )
        return with_durations(measured, self.calibration.slowdown if slowdown is None else slowdown)
