"""The device budget of a session, and what moving training state and all else have of it.

Before there is a plan each has a fixed share: first by what the graphs predict, then by what was
measured. A plan divides the budget anew at each site.
"""

import copy
import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from teraplan.config import Config
from teraplan.errors import InfeasibleBudgetError
from teraplan.runtime.device import Device
from teraplan.runtime.session.budget import GraphForecast
from teraplan.runtime.session.case import Case
from teraplan.runtime.session.feedback import HEADROOM_FRACTION
from teraplan.runtime.state.host_updates.host_updates import HostUpdates
from teraplan.runtime.state.keeper import StateKeeper
from teraplan.units import format_nbytes
from teraplan.values.graph_table import GraphTable

_HEADROOM_BYTES = 8 << 20
"""With a share of the budget, the headroom of `Device.keep_under`: so much free memory may lie
between tensors."""
_STATE_COULD_MOVE = (
    "Parameters, gradients and optimizer state stay on the device here; "
    'training_state="moves" lets them leave, too'
)


class BudgetShares:
    """Of one session."""

    def __init__(
        self, config: Config, device: Device, keeper: StateKeeper, host_updates: HostUpdates
    ) -> None:
        self._given = config.device_budget
        self._device, self._keeper, self._host_updates = device, keeper, host_updates
        self._budget_bytes = 0
        """In steps without a plan."""
        self.rest_bytes = 0
        """What of the budget is not the moving training state's, in steps without a plan."""
        self._least_bytes: int
        """What that state was known to need at once when the budget was divided last."""
        self._certainly = self._waits = False
        """The last refusal's `certainly`; it waits for the backward, when all graphs are known."""
        self._refused: InfeasibleBudgetError | None = None
        self.start_anew()

    def start_anew(self) -> None:
        """Forget what the graphs have said, and what was measured."""
        self.forecast = GraphForecast(self._device)
        self._divided = self._divided_by_measurement = self._waits = False
        self._least_bytes, self._refused = 0, None

    @property
    def lacks_state(self) -> bool:
        """True if optimizers were to make state when the last step without a plan began."""
        return self.forecast.optimizer_bytes > 0

    def budget_bytes(self, case: Case | None) -> int:
        """The device budget in force."""
        if case is not None and case.schedule is not None:
            return case.schedule.plan.budgets.device_bytes
        if case is not None and case.budgets is not None:  # the step has been measured
            return case.budgets.device_bytes
        if self._given is None or (self._given.percent is not None and self.forecast.says_nothing):
            return self._device.capacity_bytes()
        return self._given.resolve(self.forecast.unlimited_peak_bytes + self._keeper.step_bytes)

    @property
    def binds(self) -> bool:
        """True if the budget does not hold all that the graphs predict."""
        needed = self.forecast.unlimited_peak_bytes + self._keeper.step_bytes
        return self._budget_bytes < needed

    def refuse_state_alone(self) -> None:
        """Raise InfeasibleBudgetError if not even the state fits, and it cannot start to move."""
        if self._given is None or self._given.nbytes is None or self._keeper.may_start:
            return
        self._refresh(Case(number=0))
        self._keeper.share_out(self._given.nbytes, self.forecast.least_bytes)
        moving = self._keeper.limit_bytes
        rest = self._given.nbytes - moving
        shared = self._keeper.shared_bytes
        self.forecast.refuse(rest, certainly=False, moving_bytes=moving, shared_bytes=shared)

    def divide(self, case: Case, *, step: int, may_start: bool) -> None:
        """A step without a plan begins.

        Args:
            case: the step's kind.
            step: how many have been taken.
            may_start: the training state, which stays, can still start to move.

        Raises:
            InfeasibleBudgetError: the graphs predict that the budget is too small.
        """
        self._keeper.take_in_optimizers()
        is_counted = self._refresh(case, step=step)
        if self._host_updates.wanted and step == 0:
            self._host_updates.expect(self.forecast.least_bytes - self.budget_bytes(case))
            self._refresh(case)
        is_new, self._divided = not self._divided, True
        divide = partial(self._divide, case, is_new=is_new, may_start=may_start)
        with self._when_all_is_known(case, may_wait=not may_start):
            try:
                divide()
            except InfeasibleBudgetError:
                if not gc.collect() and is_counted:
                    raise
            else:
                return
            self._refresh(case)  # models that are gone were still there, or had been counted
            divide()

    @contextmanager
    def _when_all_is_known(self, case: Case, *, may_wait: bool) -> Iterator[None]:
        """A refusal within this waits for the first backward if graphs still to run may need more.

        Else it would name a budget that is refused, too, as soon as they run. Until then what can
        leave the device does; if it has no memory for the rest of the forward, nothing waits.
        """
        try:
            yield
        except InfeasibleBudgetError:
            trains = any(table.backward.gradients_bytes for table in case.tables.values())
            is_first = case.is_first and case.memory is None
            if not (may_wait and is_first and trains):
                raise
            if self.forecast.knows_all_graphs and not self._waits:  # of forwards that are dropped
                raise
            if self.forecast.least_bytes + self._keeper.limit_bytes > self._device.capacity_bytes():
                raise
            self._waits = True

    def _divide(self, case: Case, *, is_new: bool, may_start: bool) -> None:
        self._budget_bytes = budget = self.budget_bytes(case)
        if is_new:
            self._keeper.share_out(budget, self.forecast.least_bytes)
        elif case.memory is None:
            self._share_out_again(budget)
        self.rest_bytes = budget - self._keeper.limit_bytes
        trains = is_new or may_start or self._trains_more
        may_not_fit = is_new or (case.memory is None and (trains or not case.is_first))
        if self._given is not None and may_not_fit:
            # What moves can have less than its share, so that a little more is needed beside it.
            has_way_out = may_start or (is_new and self._keeper.moves)
            certainly = self._given.nbytes is None or not has_way_out
            beside_bytes = None if trains else self.forecast.beside_forwards_bytes
            self._refuse(case, certainly=certainly, beside_bytes=beside_bytes)
        self._least_bytes = self._keeper.least_bytes

    @property
    def _trains_more(self) -> bool:
        """True if parameters are trained that were not when the budget was divided last.

        Else a graph may be for a larger validation, which does without its backward.
        """
        return self._keeper.least_bytes > self._least_bytes or self.lacks_state

    def _share_out_again(self, budget_bytes: int) -> None:
        """Graphs were compiled since, so that the state or all else may need more."""
        self._keeper.share_out(budget_bytes, max(self.forecast.least_bytes, self.rest_bytes))

    def meet(self, case: Case, table: GraphTable) -> None:
        """A graph is about to run that is new, or at larger sizes, in the middle of a step.

        Raises:
            InfeasibleBudgetError: it needs far more than the budget, and nothing can be done.
        """
        self.forecast.meet(
            table,
            update_bytes=self._keeper.update_bytes,
            elsewhere_bytes=self._host_updates.missing_bytes(),
        )
        is_planned = case.schedule is not None and case.knows(table)
        if self._given is None or (is_planned and not self._trains_more):
            return
        self._budget_bytes = budget = self.budget_bytes(case)
        self._share_out_again(budget)
        self.rest_bytes = budget - self._keeper.limit_bytes
        if not self._may_move_instead(case):
            trains = self._trains_more or (case.is_first and case.memory is None)
            beside_bytes = None if trains else table.forward.least_bytes
            with self._when_all_is_known(case, may_wait=trains):
                self._refuse(case, certainly=True, beside_bytes=beside_bytes)

    @property
    def has_refused(self) -> bool:
        """True if the step cannot go on since a backward was refused that had to wait for that."""
        return self._refused is not None

    def meet_backward(self, case: Case, table: GraphTable, waiting: Callable[[], set[str]]) -> None:
        """A backward is about to run: the step, which may have been an evaluation, is none.

        Args:
            case: the step's kind.
            table: of the call.
            waiting: gives the names of all graphs whose forwards wait for their backward.

        Raises:
            InfeasibleBudgetError: it needs far more than the budget, and nothing can be done.
        """
        if self._refused is not None:
            raise copy.copy(self._refused)
        was_refused = case.is_first and case.memory is None and not self._waits  # if it has to be
        if self._given is None or was_refused or case.knows(table):
            return
        if self._may_move_instead(case):
            return
        if self._waits:
            self._refuse_at_last(case, waiting())
            return
        beside_bytes = self.forecast.beside_backward_bytes(table)
        try:
            self._refuse(case, certainly=True, beside_bytes=beside_bytes)
        except InfeasibleBudgetError as error:
            self.explain(error, "", case)
            case.tables.pop(table.graph, None)
            raise

    def _refuse_at_last(self, case: Case, waiting: set[str]) -> None:
        """The forward has run that a refusal has waited for: what was dropped does not count.

        Args:
            case: the step's kind.
            waiting: names of the graphs whose forwards wait for their backward.
        """
        tables = case.tables.items()
        case.tables = {n: t for n, t in tables if n in waiting or not t.saved_bytes}
        self.forecast.know_only(case.tables.values())
        try:
            self._refuse(case, certainly=self._certainly, has_run=True)
        except InfeasibleBudgetError as error:
            self.explain(error, "", case)
            self._refused = copy.copy(error)
            raise
        self._waits = False

    def _may_move_instead(self, case: Case) -> bool:
        """True if the next step can begin to move the training state: one goes over before.

        Under a plan none does that, so that it would go over again and again.
        """
        return self._keeper.may_start and case.schedule is None

    def saw(self, case: Case, saved_bytes: int) -> None:
        """So much has been saved in one step of this kind, so far."""
        self.forecast.saved_bytes = case.saved_bytes = max(case.saved_bytes, saved_bytes)

    def _refuse(
        self,
        case: Case,
        *,
        certainly: bool,
        beside_bytes: int | None = None,
        has_run: bool = False,
    ) -> None:
        """Raise InfeasibleBudgetError if the budget is too small, as far as can be known.

        Args:
            case: the step's kind.
            certainly: only if measuring would show the same.
            beside_bytes: what the graphs that run for certain take; None: all of the step's do.
            has_run: all of its forward has.
        """
        assert self._given is not None
        self._certainly = certainly
        moving, rest, given = self._keeper.limit_bytes, self.rest_bytes, ""
        if self._given.percent is not None and case.memory is None:
            # Of another kind a first graph tells little, and the largest step met is as much.
            if self.forecast.has_sizes_of_values or not case.is_first:
                return
            peak = self.forecast.most_peak_bytes + self._keeper.step_bytes
            rest = self._given.resolve(peak) - moving
            given = f"{self._given.percent:g} % of the step's peak, that is at most "
        self.forecast.refuse(
            rest,
            certainly=certainly,
            moving_bytes=moving,
            shared_bytes=self._keeper.shared_bytes,
            given=given,
            beside_bytes=beside_bytes,
            count_staying=self._keeper.count_staying,
            has_run=has_run,
        )

    def explain(self, error: InfeasibleBudgetError, fault: str, case: Case | None) -> None:
        """Add what else users can do; `fault`: what storage has said before, if anything."""
        percent = self._given.percent if self._given is not None else None
        if percent and case is not None and case.budgets is not None:
            peak_bytes = case.budgets.device_bytes * 100 / percent
            enough = math.ceil(error.least_budget_bytes * 100 / peak_bytes)
            error.args = (
                f"{error}. device_budget is {percent:g} % of what the step takes with nothing "
                f"moved, {format_nbytes(int(peak_bytes))}: {enough} % is enough",
            )
        if self._keeper.could_move:
            error.add_note(_STATE_COULD_MOVE)
        if self._keeper.refusal:
            error.add_note(self._keeper.refusal)
        if fault:
            error.args = (f"{error}. Storage has failed before: {fault}",)

    def divide_again(self, case: Case, least_bytes: int, most_bytes: int) -> None:
        """Once memory has been measured: the state gets what is left of the budget.

        Args:
            case: the step's kind.
            least_bytes: what all else needs.
            most_bytes: the same with nothing moved.
        """
        budget = self.budget_bytes(case)
        other = max(least_bytes, min(most_bytes, (budget + least_bytes) // 2))
        self._keeper.share_out(budget, max(other, budget - self._keeper.step_bytes))
        self._divided_by_measurement = True
        self.rest_bytes = budget - self._keeper.limit_bytes

    def may_divide_again(self, case: Case) -> bool:
        """True if memory has been measured for the first time."""
        is_new = case.memory is not None and not self._divided_by_measurement
        return is_new and self._keeper.moves

    def safe_limit(self, case: Case) -> int:
        """Most managed bytes that keep a step without a plan under the budget."""
        if case.memory is not None:
            return self.rest_bytes - case.memory.state_bytes - max(case.memory.workspaces_bytes)
        return self.rest_bytes - self.forecast.other_bytes

    def limits(self, case: Case) -> tuple[int, tuple[int, int, int] | None, tuple[int, ...]]:
        """Those that `Engine.begin_step` takes."""
        rehearsal_limits = case.rehearsal_limits(self.rest_bytes)
        return self.safe_limit(case), self._resident_limits(case), rehearsal_limits

    def _resident_limits(self, case: Case) -> tuple[int, int, int] | None:
        """What `keep_under` is told; None until it is known what the process has beside tensors."""
        overhead = case.memory.overhead_bytes if case.memory else self.forecast.overhead_bytes
        if overhead is None:
            return None
        schedule = case.schedule
        budget = schedule.plan.budgets.device_bytes if schedule else self._budget_bytes
        if self._keeper.moves:  # free memory waits wherever the plan leaves room
            budget -= case.reserve_bytes
        headroom = int(budget * HEADROOM_FRACTION) + _HEADROOM_BYTES
        free_bytes = headroom if self._keeper.moves and case.keeps_free else 0
        return budget + overhead, headroom, free_bytes

    def _refresh(self, case: Case, *, step: int | None = None) -> bool:
        """True if the state was counted anew; with the number of a step, an older count may do."""
        self.forecast.saved_bytes = case.saved_bytes
        return self.forecast.refresh(
            case.tables.values(),
            update_bytes=self._keeper.update_bytes,
            elsewhere_bytes=self._host_updates.missing_bytes(),
            state_moves=self._keeper.moves,
            step=step,
        )
