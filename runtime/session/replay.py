"""A plan file to replay. It was made for its own budgets, and the step keeps to these."""

import dataclasses
import logging
from pathlib import Path

from teraplan.config import Budget, Config
from teraplan.errors import FileFormatError, InvalidPlanError, PlanMismatchError, UnsupportedError
from teraplan.files.plan_file import read_plan
from teraplan.planners import as_it_is
from teraplan.units import format_nbytes
from teraplan.values.plan import Plan
from teraplan.values.step_trace import TensorKind

log = logging.getLogger(__name__)

_WITHIN_FRACTION = 0.02
"""Of its peak, by which a plan may be over a budget: percentages are of a peak that is measured."""


def replayed_plan(config: Config) -> Plan | None:
    """The plan of the file that is to be replayed; None if there is none.

    Raises:
        FileFormatError: the file is no plan.
        InvalidPlanError: the plan does not hold.
        PlanMismatchError: it takes more than the budgets of `config`, or moves training state
            that is to stay.
        UnsupportedError: it has updates on the host's cores.
    """
    if config.plan == "auto":
        return None
    try:
        written = read_plan(Path(config.plan))
    except FileFormatError as error:
        raise type(error)(f'{error}; mend the file, or plan anew with plan="auto"') from None
    try:
        plan = as_it_is(written)
    except InvalidPlanError as error:
        raise InvalidPlanError(f"{config.plan}: {error}") from None
    if plan is not written:
        log.info("%s was edited: what it says is predicted anew", config.plan)
    if plan.host_updates:
        raise UnsupportedError(
            f"{config.plan}: {len(plan.host_updates)} updates run on the host's cores in this "
            "plan; plans can be made and simulated so, but are not replayed. Plan again for a "
            "machine without host_cores; here the option host_updates has updates run on the host"
        )
    if config.training_state == "stays" and _has_state(plan):
        raise PlanMismatchError(
            f"{config.plan}: the plan moves parameters, gradients and optimizer state, and "
            'training_state is "stays"; leave training_state out, or plan again with it'
        )
    chunk_bytes = plan.trace.fingerprint.chunk_bytes or 0
    if chunk_bytes > plan.budgets.device_bytes:
        raise InvalidPlanError(
            f"{config.plan}: chunk_bytes is {format_nbytes(chunk_bytes)}, more than the device "
            f"budget of {format_nbytes(plan.budgets.device_bytes)}"
        )
    prediction = plan.prediction
    peaks = (
        ("device_budget", config.device_budget, prediction.device_peak_bytes),
        ("host_budget", config.host_budget, prediction.host_peak_bytes),
    )
    for name, budget, peak_bytes in peaks:
        _require_within(config.plan, name, budget, peak_bytes, prediction.unlimited_peak_bytes)
    return plan


def configured_for(plan: Plan, config: Config) -> Config:
    """`config` with what the plan takes for granted: whether training state moves, and where."""
    moves = _has_state(plan)
    if config.host_budget is None:
        config = dataclasses.replace(config, host_budget=Budget(nbytes=plan.budgets.host_bytes))
    if moves or config.device_budget is None:
        config = dataclasses.replace(config, device_budget=Budget(nbytes=plan.budgets.device_bytes))
    return dataclasses.replace(config, training_state="moves" if moves else "stays")


def _has_state(plan: Plan) -> bool:
    return any(tensor.kind is not TensorKind.ACTIVATION for tensor in plan.trace.tensors)


def _require_within(
    path: str, name: str, budget: Budget | None, peak_bytes: int, unlimited_bytes: int
) -> None:
    if budget is None:
        return
    allowed_bytes = budget.resolve(unlimited_bytes)
    if peak_bytes > allowed_bytes * (1 + _WITHIN_FRACTION):
        raise PlanMismatchError(
            f"{path}: the plan takes {format_nbytes(peak_bytes)}, and {name} is "
            f"{format_nbytes(allowed_bytes)}; raise {name}, leave it out, or plan again"
        )
