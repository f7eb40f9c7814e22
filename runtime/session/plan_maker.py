"""Makes the plan for a kind of step: from its measurements, or from the file that is replayed."""

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from teraplan.checker.check_plan import require_valid
from teraplan.checker.same_step import require_same_program, require_same_step
from teraplan.config import Config
from teraplan.errors import InfeasibleBudgetError, PlanMismatchError
from teraplan.planners import make_plan, planner_named, with_choices_of
from teraplan.planners.base import Problem
from teraplan.planners.feasible import require_feasible
from teraplan.runtime.device import MEASURED_WITHIN_BYTES, Device
from teraplan.runtime.session.case import Case
from teraplan.runtime.session.report_files import ReportFiles
from teraplan.simulation.memory_curve import device_curve
from teraplan.units import format_nbytes, format_ns
from teraplan.values.graph_table import GraphTable
from teraplan.values.hardware import Budgets, Hardware, Tier
from teraplan.values.plan import Plan
from teraplan.values.recomputed_step import independent
from teraplan.values.step_trace import StepTrace, TensorKind

log = logging.getLogger(__name__)

_SAVED_AT_HAND = 2
"""Saved activations that are on the device where most others have left."""
_DAY_NS = 86_400 * 10**9
_WEAR_ATTEMPTS = 5
_MUCH_MORE = 0.02
"""Of a budget: by less it does not grow with a kind of step that is a little larger."""


class PlanMaker:
    """Plans within one configuration on one device, or has the plan that is replayed.

    Raises:
        ConfigError: (constructor) there is no such policy.
    """

    def __init__(
        self,
        config: Config,
        device: Device,
        reports: ReportFiles,
        chunk_bytes: Callable[[], int],
        replayed: Plan | None = None,
    ) -> None:
        self._config = config
        self._device = device
        self._reports = reports
        self._chunk_bytes = chunk_bytes
        self._machine: Hardware | None = None
        self._largest_bytes = 0
        """The most that a kind of step takes with nothing moved."""
        self.replayed = replayed
        planner_named(config.policy)  # an unknown one is told at once, not after measuring

    def require_known(self, table: GraphTable) -> None:
        """Raise PlanMismatchError if the plan to replay was made without this graph."""
        if self.replayed is None:
            return
        planned = self.replayed.trace.fingerprint
        actual = dataclasses.replace(
            planned,
            torch_version=torch.__version__,
            kernels=self._config.kernels,
            device=self._device.name,
            graphs=planned.graphs if table.graph in planned.graphs else (table.graph,),
        )
        with self._naming_the_file():
            require_same_program(self.replayed, actual)

    @contextmanager
    def _naming_the_file(self) -> Iterator[None]:
        try:
            yield
        except PlanMismatchError as error:
            raise PlanMismatchError(f"{self._config.plan}: {error}") from None

    def may_recompute(self, *, short: bool) -> bool:
        """True if a plan may compute activations again; `short`: memory does not suffice."""
        if self.replayed is not None:
            return bool(self.replayed.recomputed)
        return short and self._config.recompute == "auto"

    def plan(self, case: Case) -> Plan | None:
        """A plan for the case, None as long as its measurements are not complete.

        Raises:
            InfeasibleBudgetError: no plan fits; known as soon as memory has been measured.
            PlanMismatchError: the replayed plan is for another step.
        """
        if case.memory is None:
            return None
        if self.replayed is not None:
            with self._naming_the_file():
                require_same_step(self.replayed, self._trace(case))
            if self.replayed.recomputed:
                return self._rehearsed_replay(self.replayed, case)
            return self.replayed
        if not case.measured(self._config.profile_steps):
            if not case.durations_ns:
                self._require_feasible(case)
            return None
        return self.make(case)

    def _rehearsed_replay(self, plan: Plan, case: Case) -> Plan | None:
        """The plan, once what it computes again has been tried here; None as long as it has not.

        Raises:
            PlanMismatchError: something of it cannot be computed again here, bit for bit.
        """
        if not case.durations_ns:
            return None
        for choice in plan.recomputed:
            here = case.recomputes.get(choice.tensor_id)
            planned = plan.trace.tensors[choice.tensor_id]
            assert planned.recompute is not None, "the plan has been checked"
            if here is None or here.sources != planned.recompute.sources:
                raise PlanMismatchError(
                    f"the plan computes {planned.name} again, which here is not possible with "
                    "equal bits; plan again"
                )
        return plan

    def make(self, case: Case, like: Plan | None = None) -> Plan:
        """A new plan from the case's measurements.

        Args:
            case: has them.
            like: a plan that was made from them and shall be corrected a little: what it computes
                again is computed again, which saves most of the planning.
        """
        start_ns = time.perf_counter_ns()
        trace = self._trace(case)
        self._reports.write_trace(case.number, trace)
        budgets = self._budgets(case, trace)
        recompute = _recomputed_by(like, trace)
        make = partial(
            self._make_plan,
            trace,
            self._hardware(case),
            recompute=recompute,
            contention_ns_per_byte=case.calibration.contention_ns_per_byte,
        )
        plan = self._plan_within_wear(make, budgets)
        if plan.prediction.moved_bytes * case.calibration.contention_ns_per_byte:
            plan = self.predict_again(case, plan) or plan
        require_valid(plan)
        elapsed = format_ns(time.perf_counter_ns() - start_ns)
        log.info("planned %d sites in %s", len(trace.sites), elapsed)
        return plan

    def predict_again(self, case: Case, plan: Plan) -> Plan | None:
        """The choices of an older plan with what is known now; None if they no longer hold."""
        trace = self._trace(case, case.calibration_of(plan).slowdown)
        return with_choices_of(plan, trace, self._hardware(case))

    def _plan_within_wear(self, make: Callable[[Budgets], Plan], budgets: Budgets) -> Plan:
        """A plan that writes no more to storage per day than `daily_writes` allows.

        Planners know how much may lie in storage, not how much may be written. A step seldom uses
        the same room twice, so the one is scaled until the other fits.
        """
        daily = self._config.daily_writes
        plan = make(budgets)
        for attempt in range(_WEAR_ATTEMPTS):
            if daily is None or daily.nbytes is None:
                return plan
            step_ns, written = (
                plan.prediction.step_ns,
                plan.prediction.out_bytes.get(Tier.STORAGE, 0),
            )
            allowed = daily.nbytes * step_ns // _DAY_NS
            if written <= allowed:
                return plan
            is_last = attempt == _WEAR_ATTEMPTS - 2
            room = 0 if is_last else plan.prediction.storage_peak_bytes * allowed // written
            log.info("daily_writes leaves %s of storage", format_nbytes(room))
            budgets = dataclasses.replace(budgets, storage_bytes=room)
            try:
                plan = make(budgets)
            except InfeasibleBudgetError as error:
                error.args = (
                    f"{error}. daily_writes allows {format_nbytes(allowed)} to be written in each "
                    "step; raise it",
                )
                raise
        return plan

    def _make_plan(
        self,
        trace: StepTrace,
        hardware: Hardware,
        budgets: Budgets,
        *,
        recompute: bool | Sequence[int],
        contention_ns_per_byte: float = 0.0,
    ) -> Plan:
        make = partial(
            make_plan,
            trace,
            hardware,
            budgets,
            policy=self._config.policy,
            rules=self._rules(trace),
            contention_ns_per_byte=contention_ns_per_byte,
        )
        try:
            return make(recompute=recompute)
        except InfeasibleBudgetError:
            if isinstance(recompute, bool):
                raise
        # What they are computed from has to stay for longer than the budget now allows.
        return make(recompute=True)

    def _rules(self, trace: StepTrace) -> dict[str, Tier]:
        """Where training state goes if the device has only one way for it."""
        state = (t for t in trace.tensors if t.kind is not TensorKind.ACTIVATION)
        tiers = ((t.name, self._device.tier_of_state(t.kind)) for t in state)
        return {name: tier for name, tier in tiers if tier is not None}

    def machine(self) -> Hardware:
        """The machine, measured at the first call."""
        if self._machine is None:
            self._machine = self._device.hardware()
        return self._machine

    def _hardware(self, case: Case) -> Hardware:
        """The machine with links of the speed that they have in steps of this case."""
        return self.machine().with_links(case.calibration.link_speed)

    def forget_room(self, case: Case) -> None:
        """Look again at what storage can take before the next plan of this case."""
        self._machine = None
        if case.budgets is not None:
            room = self.machine().storage_capacity_bytes
            case.budgets = dataclasses.replace(case.budgets, storage_bytes=room)

    def needs(self, case: Case) -> tuple[int, int]:
        """Device memory that the case needs about at least, and with nothing moved.

        Training state that moves is left out.
        """
        trace = self._trace(case)
        saved = tuple(t for t in trace.tensors if t.kind is TensorKind.ACTIVATION)
        trace = dataclasses.replace(trace, tensors=saved)
        least = trace.state_bytes + max(site.workspace_bytes for site in trace.sites)
        largest = max((tensor.nbytes for tensor in trace.tensors), default=0)
        return least + _SAVED_AT_HAND * largest, int(device_curve(trace).max())

    def _trace(self, case: Case, slowdown: float | None = None) -> StepTrace:
        return case.trace(
            torch_version=torch.__version__,
            kernels=self._config.kernels,
            chunk_bytes=self._chunk_bytes(),
            slowdown=slowdown,
        )

    def _require_feasible(self, case: Case) -> None:
        trace = self._trace(case)
        problem = Problem.of(trace, self.machine(), self._budgets(case, trace))
        require_feasible(problem, margin_bytes=MEASURED_WITHIN_BYTES)

    def grown_bytes(self, case: Case) -> int:
        """By so much the tensors take more than when memory was measured; between two steps."""
        assert case.memory is not None
        return max(0, self._device.state_bytes() - case.memory.state_bytes)

    def _budgets(self, case: Case, trace: StepTrace) -> Budgets:
        """The case's budgets; percentages mean the step as it was first measured, or a larger one.

        The device is one, and small steps begin with the memory that a large one has left.
        """
        if case.budgets is None:
            self._largest_bytes = max(self._largest_bytes, int(device_curve(trace).max()))
            case.budgets = self._resolved()
            if self._config.host_budget is not None and self._config.host_budget.nbytes is None:
                self._device.limit_host(case.budgets.host_bytes)
        return case.budgets

    def _resolved(self) -> Budgets:
        machine, config, unlimited = self.machine(), self._config, self._largest_bytes
        device, host = config.device_budget, config.host_budget
        return Budgets(
            device_bytes=device.resolve(unlimited)
            if device is not None
            else machine.device_capacity_bytes,
            host_bytes=min(host.resolve(unlimited), machine.host_capacity_bytes)
            if host is not None
            else machine.host_capacity_bytes,
            storage_bytes=machine.storage_capacity_bytes,
        )

    def give_more_room(self, case: Case) -> None:
        """Forget plans under a percentage of less than what a kind met since then takes."""
        device = self._config.device_budget
        if case.budgets is None or device is None or device.percent is None:
            return
        now_bytes = device.resolve(self._largest_bytes)
        if now_bytes > case.budgets.device_bytes * (1 + _MUCH_MORE) and self.replayed is None:
            case.budgets = self._resolved()
            case.forget_plans()


def _recomputed_by(plan: Plan | None, trace: StepTrace) -> bool | Sequence[int]:
    """What is to be computed again in a plan that is like another; True: find out."""
    if plan is None or not plan.recomputed:
        return True
    chosen = [choice.tensor_id for choice in plan.recomputed]
    return chosen if list(independent(trace, chosen)) == chosen else True
