"""One training run: decides for each step whether it is measured, planned for, or follows a plan.

    step 0      graphs are compiled; the engine keeps to the budget by itself
    step 1      memory is measured (`StepRecorder`, exactly and slowly)
    step 2..    times are measured, `profile_steps` of them
    then        a plan is made, and every following step of this kind runs under it

Where a step ends and the next begins, `step_bounds` says. Steps whose first graph or input sizes
differ are different kinds (`cases`), each planned by itself, and anew where steps no longer follow
the plan. Of a kind that comes later, the first step is not measured either: there may be no other.
"""

import copy
import functools
import logging
import time
import weakref
from collections.abc import Callable, Iterable, Sequence

from torch import nn
from torch.utils.hooks import RemovableHandle

from teraplan.config import Config
from teraplan.errors import (
    FallbackRefusedError,
    InfeasibleBudgetError,
    PlanMismatchError,
    StateHasToMoveError,
    TeraplanError,
)
from teraplan.report.summary import plan_banner
from teraplan.runtime.device import Device, DeviceStall
from teraplan.runtime.engine.engine import Engine
from teraplan.runtime.engine.planned_step import run_record
from teraplan.runtime.engine.recompute import CompiledRecipe
from teraplan.runtime.engine.recorder import StepRecorder
from teraplan.runtime.engine.schedule import Schedule
from teraplan.runtime.process import fallbacks
from teraplan.runtime.session.budget_shares import BudgetShares
from teraplan.runtime.session.case import Case
from teraplan.runtime.session.cases import Cases
from teraplan.runtime.session.feedback import learn
from teraplan.runtime.session.peaks import Peaks
from teraplan.runtime.session.plan_maker import PlanMaker
from teraplan.runtime.session.report_files import ReportFiles
from teraplan.runtime.session.status import describe, first_words, status_of
from teraplan.runtime.session.step_bounds import StepBounds
from teraplan.runtime.session.step_faults import StepFaults
from teraplan.runtime.session.why_unplanned import OFF_PLAN, do_without_plan, tell_why_unplanned
from teraplan.runtime.state.host_updates.host_updates import HostUpdates
from teraplan.runtime.state.keeper import StateKeeper
from teraplan.runtime.state.updates.optimizer_watch import watch_optimizers
from teraplan.units import format_nbytes
from teraplan.values.graph_table import MIN_SLOT_BYTES, GraphTable
from teraplan.values.plan import Plan
from teraplan.values.run_record import TransferRecord
from teraplan.values.status import Status

log = logging.getLogger(__name__)


class Session:
    """The graphs that were compiled under one configuration, and their steps."""

    def __init__(
        self,
        config: Config,
        device: Device,
        compile_recipe: Callable[[str], CompiledRecipe],
        models: Callable[[], Iterable[nn.Module]],
        replayed: Plan | None,
    ) -> None:
        """A session before its first graph.

        Args:
            config: as it is in force; of a plan that is replayed, with its budgets.
            device: to train on; closed with the session.
            compile_recipe: compiles the program of a recipe.
            models: those that users have compiled to run in it.
            replayed: followed from the second step on, and never planned anew.
        """
        self.config = config
        self.device = device
        self.engine = Engine(device)
        chunk_bytes = replayed.trace.fingerprint.chunk_bytes if replayed is not None else None
        self.keeper = keeper = StateKeeper(config, device, models, chunk_bytes)
        self.host_updates = HostUpdates(config, device, self.keeper)
        self._shares = BudgetShares(config, device, self.keeper, self.host_updates)
        self.tables: dict[str, GraphTable] = {}
        self.cases = Cases()
        self.active: Case | None = None
        self.steps = self.diverged_steps = self.last_used_ns = 0
        self.fallbacks: list[str] = []
        self._compiles = self._compiles_entered = self._compiles_seen = self._num_measured = 0
        self._rehearses = False
        """The step under way is unlike those that follow."""
        self._called = False
        self._bounds = StepBounds(self.engine)
        self._error: TeraplanError | None = None
        self._fault = ""
        self._peaks = Peaks(device)
        self._compile_recipe = compile_recipe
        self.last_transfers: tuple[TransferRecord, ...] = ()
        """Of the last whole step."""
        self._faults = StepFaults(self.engine)
        self.reports = ReportFiles(config.report, strict=config.strict)
        self.plans = PlanMaker(config, device, self.reports, lambda: keeper.chunk_bytes, replayed)
        self._hook = watch_optimizers(self)
        self._finalizer = weakref.finalize(
            self, _close, device, self._hook, self.keeper, self.host_updates
        )

    # -- what compiled graphs tell -------------------------------------------------------------

    def compiling(self, inputs: Sequence[object]) -> None:
        """Another graph is being compiled, or another session's comes to this one."""
        self._compiles += 1
        self.keeper.meet(inputs)
        self.engine.take_state(self.keeper.state)
        self.host_updates.meet(inputs)

    @property
    def has_compiled(self) -> bool:
        """True if a graph has been compiled, also one that saves nothing."""
        return self._compiles > 0

    def start_moving_state(self) -> None:
        """The training state moves from here on; what was measured while it stayed is forgotten."""
        self.keeper.start()
        self.engine.take_state(self.keeper.state)
        self._start_anew()
        self._compiles += 1  # the step under way is as unlike others as if graphs were compiled
        self.device.run_fast()  # gives back what parameters have left in the heap

    def _start_anew(self) -> None:
        """Forget the steps, and the graphs that have run in them."""
        self.engine.recorder, self.active = None, None
        self.cases.clear()
        self.tables.clear()
        self._shares.start_anew()

    def optimizer_stepped(self) -> None:
        """Some optimizer has updated its parameters."""
        self._compiles_entered = self._compiles  # also what saves nothing, as an evaluation
        self._bounds.optimizer_stepped()

    def end_call(self) -> None:
        """A compiled graph has run. Where it had no op, nothing has looked at the budget yet.

        Raises:
            InfeasibleBudgetError: after the first call, if not even the training state fits.
        """
        if self._called:
            return
        if self.keeper.refusal:
            self.fall_back(self.keeper.refusal)
        if self.engine.recorder is None:
            self._shares.refuse_state_alone()
        self._called = True

    def enter_forward(self, table: GraphTable, shapes: tuple[object, ...]) -> int:
        """A forward graph begins; returns the number of its call in the step.

        Raises:
            TeraplanError: training cannot go on within the budget, or with the given plan.
            StateHasToMoveError: it can, if the training state starts to move.
        """
        self.last_used_ns = time.perf_counter_ns()
        if self._error is not None:
            raise copy.copy(self._error)
        if self._shares.has_refused:  # the step before, in its backward
            self._start_anew()
        try:
            is_new = table.graph not in self.tables
            if is_new:
                self._meet(table)
            if self._bounds.at_begin():
                self._begin_step(table, shapes)
            elif is_new or self.engine.unplanned or not self._knows(table):
                assert self.active is not None and self.engine.recorder is not None
                self._shares.saw(self.active, self.engine.recorder.saved_bytes)
                if self.active.meet(table):
                    self._shares.meet(self.active, table)
                self.engine.limit_bytes = self._shares.safe_limit(self.active)
        except InfeasibleBudgetError as error:
            if self._may_start:
                raise StateHasToMoveError from None
            self._shares.explain(error, self._fault, self.active)
            if self.active is not None:
                self.active.tables.pop(table.graph, None)
            if all(case.last is None for case in self.cases.values()):  # nothing is measured yet
                self._start_anew()  # so that a smaller batch may fit
            raise
        except (FallbackRefusedError, PlanMismatchError) as error:
            self._error = copy.copy(error)  # not its traceback: that holds the user's model
            raise
        self._compiles_entered = self._compiles
        return self.engine.enter(table)

    def status(self) -> Status:
        """The session as it stands now."""
        return status_of(self)

    def describe(self) -> str:
        """What is going on now, for people. From anywhere, a signal handler too: takes no lock."""
        return describe(self)

    def close(self) -> None:
        """Release files, threads and memory."""
        self.engine.drop_all()
        self._finalizer()

    # -- steps ---------------------------------------------------------------------------------

    def _begin_step(self, table: GraphTable, shapes: tuple[object, ...]) -> None:
        if self._bounds.end():
            self._finish_step()
        elif self.engine.recorder is not None:
            self._peaks.leave_out_what_followed(self.engine.recorder)
        before, self.active = self.active, self.cases.begun((table.graph, shapes))
        case = self.active
        case.meet(table)
        case.num_begun += 1
        self.engine.at_backward = functools.partial(self._shares.meet_backward, case)
        self._plan(case)
        lacks_state = not self._bounds.optimizer_known and self._shares.lacks_state
        self._rehearses = self.keeper.rehearses or lacks_state or case.may_be_alone
        is_new = self._compiles != self._compiles_seen or self._rehearses
        measure_memory = case.lacks_memory and not is_new
        if measure_memory and self.plans.may_recompute(short=bool(self.last_transfers)):
            self.engine.recomputer.prepare(self.tables.values(), self._compile_recipe)
        recorder = StepRecorder(self.device, measure_memory=measure_memory)
        if case.schedule is None:
            self._shares.divide(case, step=self.steps, may_start=self._may_start)
        if self.steps == 0:
            log.info("%s", first_words(self, self._shares.rest_bytes))
            self.device.has_compiled()
        elif case is not before:
            self.device.give_back_heap(cycles=False)  # of steps of other kinds
        self.engine.begin_step(recorder, case.schedule, *self._shares.limits(case))
        self._bounds.begin()

    def _finish_step(self) -> None:
        recorder, case = self.engine.recorder, self.active
        if recorder is None or case is None:
            return
        recorder.finish()
        self._shares.saw(case, recorder.saved_bytes)
        self._peaks.leave_out_what_followed(recorder)
        self.steps += 1
        self.last_transfers, stalls = self.device.take_transfers(), self.device.take_stalls()
        compiled = self._compiles_entered != self._compiles_seen
        self._compiles_seen = self._compiles_entered  # what came later is the next step's
        faults = self._faults.take()
        if case.schedule is not None:
            if self.engine.diverged_at is None:
                self._finish_planned_step(case, recorder, stalls)
            else:
                self._finish_diverged_step(case, with_new_graphs=compiled)
        elif not case.repeats:
            case.count_pause()
        elif not (compiled or self._rehearses or self._faults.spoil or case.lets_grow(recorder)):
            case.add(recorder)
            case.add_rehearsed(self.engine.recomputer.rehearsed)
            if self._shares.may_divide_again(case):
                self._shares.divide_again(case, *self.plans.needs(case))
            if recorder.measure_memory:
                self._num_measured += 1
                self.device.run_fast()
        if case.is_unexplained and (case.is_alone or not self.cases.tell_apart(case)):
            self.fall_back(tell_why_unplanned(case))
        self.cases.ended(recorder)
        if faults:
            self._plan_around(case, faults)

    def _plan_around(self, case: Case, faults: list[str]) -> None:
        """Storage takes less than before: plan anew with what it takes now."""
        case.forget_plans()
        self._fault = faults[0]
        self.plans.forget_room(case)
        self.fall_back(f"of {len(faults)} faults of storage the first: {faults[0]}")

    def _finish_planned_step(
        self, case: Case, recorder: StepRecorder, stalls: Iterable[DeviceStall]
    ) -> None:
        assert case.schedule is not None
        engine, moved = self.engine, self.last_transfers
        case.num_diverged = 0
        self._peaks.add(case, recorder)
        if self.device.waits_to_tell and not case.samples_run():
            return
        plan, step = case.schedule.plan, case.schedule.step
        case.add_run(run_record(self.steps - 1, step, recorder, engine, moved, stalls))
        self.reports.write_runs(case.number, plan, case.runs, num_runs=case.num_runs)
        peak_bytes, budget_bytes = self.actual_peak_bytes(), plan.budgets.device_bytes
        expected_bytes = min(budget_bytes, plan.prediction.device_peak_bytes)
        now = case.num_plans, self._compiles + self._num_measured
        if peak_bytes > expected_bytes and case.overhead_counted_at != now:
            self._count_overhead_anew(case, now)
            peak_bytes = self.actual_peak_bytes()
        lesson = learn(case, self.plans, peak_bytes=peak_bytes, budget_bytes=budget_bytes)
        if lesson.fallback:
            self.fall_back(lesson.fallback)
        self.fallbacks = [told for told in self.fallbacks if told != lesson.withdrawn]
        if lesson.plan is not None:
            self._follow(case, lesson.plan, anew=not lesson.only_predicts)
            self.device.give_back_heap(cycles=not lesson.only_predicts)
        if lesson.held_back_bytes:
            self.device.hold_less(lesson.held_back_bytes)
            self._peaks.forget(case)

    def _finish_diverged_step(self, case: Case, *, with_new_graphs: bool) -> None:
        """It says nothing of its plan, but that the plan is perhaps for steps of the past."""
        self.diverged_steps += 1
        self.device.take_peak()
        is_replayed = self.plans.replayed is not None
        if not case.diverged(for_good=with_new_graphs and not is_replayed):
            return
        if not is_replayed:
            log.info("steps of kind %d go another way than planned: measured anew", case.number)
            self.cases.renew(case)
        elif OFF_PLAN not in self.fallbacks:
            self.fall_back(OFF_PLAN)

    def _count_overhead_anew(self, case: Case, now: tuple[int, int] = (-1, -1)) -> None:
        """The process has grown since memory was measured: by code, by what planning keeps."""
        if self.keeper.state is not None:
            self.keeper.state.tidy()
        case.take_overhead(self.device.overhead_bytes(), now)
        self.device.take_peak()  # what counting takes is no step's

    # -- plans ---------------------------------------------------------------------------------

    def _plan(self, case: Case) -> None:
        """Follow a plan if the case has been measured and has none."""
        self.plans.give_more_room(case)
        if case.schedule is not None or self._compiles != self._compiles_seen:
            return
        try:
            plan = self.plans.plan(case)
        except InfeasibleBudgetError:
            if not (case.forget_odd_step() or do_without_plan(case, self.device_budget_bytes())):
                raise
            return
        if plan is not None:
            self._follow(case, plan)
            self.device.run_fast()  # with no free memory left over
            self._count_overhead_anew(case)
            self._peaks.forget(case)

    def _knows(self, table: GraphTable) -> bool:
        return self.active is not None and self.active.knows(table)

    def _meet(self, table: GraphTable) -> None:
        """Take in a graph; one that a replayed plan does not know is an error at once."""
        self.tables[table.graph] = table
        self.keeper.uses_at_once(table.parameters_bytes)
        for name, nbytes, why in table.uncovered:
            if nbytes >= MIN_SLOT_BYTES:
                size = format_nbytes(nbytes)
                self.fall_back(f"the saved activation {name} ({size}) cannot move: {why}")
        self.plans.require_known(table)

    def _follow(self, case: Case, plan: Plan, *, anew: bool = True) -> None:
        """`anew`: it is not the one in force with another prediction."""
        case.follow(Schedule(plan, case.state_blocks), anew=anew)
        self.reports.write_plan(case.number, plan)
        if anew:
            log.info("%s", plan_banner(plan))

    # -- budgets before there is a plan --------------------------------------------------------

    @property
    def _may_start(self) -> bool:
        """True if the training state can start to move now."""
        return self.keeper.may_start and self.engine.idle

    def device_budget_bytes(self) -> int:
        """The device budget in force."""
        return self._shares.budget_bytes(self.active)

    def actual_peak_bytes(self) -> int:
        """The most memory that tensors took in steps under the plan in force; -1 if unknown."""
        return self._peaks.of_tensors(self.active, self.engine.recorder)

    def fall_back(self, what: str) -> None:
        """`what`, a sentence, is done in the place of something better; see `fallbacks.allow`."""
        fallbacks.allow(what, strict=self.config.strict)
        self.fallbacks.append(what)
        log.warning("%s", what)


def _close(
    device: Device, hook: RemovableHandle, keeper: StateKeeper, host_updates: HostUpdates
) -> None:
    hook.remove()
    host_updates.close()
    keeper.close()
    device.close()
    keeper.close()  # what was still being written then is not any more
