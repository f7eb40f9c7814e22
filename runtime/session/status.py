"""What a session tells of itself."""

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from teraplan.runtime.session.why_unplanned import why_unplanned
from teraplan.runtime.state.host_updates.host_updates import HostUpdates
from teraplan.runtime.state.memory.training_state import TrainingState
from teraplan.runtime.storage.disk_counters import disk_counters
from teraplan.units import format_nbytes
from teraplan.values.run_record import Direction, RunRecord, TransferRecord
from teraplan.values.status import Status, StoreStatus

if TYPE_CHECKING:
    from teraplan.runtime.session.session import Session

_MEDIAN_OF = 5
_DAY_NS = 86_400 * 10**9


def first_words(session: "Session", budget_bytes: int) -> str:
    """What trains where, for people, before the first step."""
    stores = ", ".join(f"{s.directory} ({s.path})" for s in session.device.stores())
    return (
        f"teraplan on {session.device.name}: device budget {format_nbytes(budget_bytes)}, storage "
        f"{stores}; measuring {session.config.profile_steps + 1} steps before planning"
    )


def describe(session: "Session") -> str:
    """What is going on now, for people. From anywhere, a signal handler too: takes no lock."""
    engine = session.engine
    site = engine.recorder.num_sites if engine.recorder is not None else 0
    plan = "without a plan" if engine.unplanned else "under a plan"
    return (
        f"teraplan on {session.device.name}: step {session.steps}, after site {site}, {plan}; "
        f"{format_nbytes(engine.mover.managed_bytes)} of saved activations on the device, "
        f"{len(engine.mover.faults)} faults in this step\n{session.device.describe()}"
    )


def status_of(session: "Session") -> Status:
    """The session as it stands now."""
    case = session.active
    planned = case is not None and case.schedule is not None
    slots = sum(table.saved_bytes for table in session.tables.values())
    left = [item for t in session.tables.values() for item in t.uncovered]
    uncovered = sum(nbytes for _, nbytes, _ in left)
    recorder, host_updates = session.engine.recorder, session.host_updates
    stores = _stores(session)
    status = {
        "phase": _phase(session),
        "steps": session.steps,
        "graphs": len(session.tables),
        "sites": recorder.num_sites if recorder is not None else 0,
        "coverage": slots / (slots + uncovered) if slots + uncovered else 0.0,
        "uncovered": tuple(sorted(left, key=lambda item: -item[1])[:10]),
        "device_budget_bytes": session.device_budget_bytes() if case is not None else -1,
        "diverged_steps": session.diverged_steps,
        "bytes_out": _moved(session.last_transfers, Direction.OUT),
        "bytes_back": _moved(session.last_transfers, Direction.BACK),
        "stores": stores,
        "endurance_used": _endurance_used(session, stores),
        "fallbacks": tuple(
            dict.fromkeys(
                (
                    *session.fallbacks,
                    *session.device.fallbacks,
                    *session.keeper.fallbacks,
                    *session.reports.fallbacks,
                    *host_updates.placement.fallbacks,
                )
            )
        ),
    }
    if session.keeper.state is not None:
        status |= _of_state(session.keeper.state)
    if session.keeper.update_counts is not None:
        early, late = session.keeper.update_counts
        status |= {"updates_in_backward": early, "updates_in_step": late}
    if host_updates.wanted:
        status |= _of_host_updates(host_updates)
    if case is not None:
        status["unplanned_because"] = why_unplanned(
            case, num_kinds=len(session.cases), profile_steps=session.config.profile_steps
        )
    if case is not None and case.runs:
        status |= _waits(case.runs[-1])
    if planned:
        status |= _of_plan(session)
        if case is not None and case.runs and case.runs_of is case.schedule:
            status |= _of_runs(case.runs)
            recomputer = session.engine.recomputer
            status["recomputed_bytes"], status["recomputed_ns"] = recomputer.last_step
    return Status(**status)  # type: ignore[arg-type]  # a dict of mixed types


def _of_state(state: TrainingState) -> dict[str, object]:
    return {
        "moving_state_bytes": state.arena.total_bytes,
        "moving_state_budget_bytes": state.limit_bytes,
        "state_written_bytes": state.last_step.written_bytes,
        "state_read_bytes": state.last_step.read_bytes,
        "state_to_host_bytes": state.last_step.to_host_bytes,
        "state_from_host_bytes": state.last_step.from_host_bytes,
        "state_wait_ns": state.last_step.waited_ns,
    }


def _of_host_updates(host_updates: HostUpdates) -> dict[str, object]:
    return {
        "host_state_bytes": host_updates.placement.state.nbytes,
        "host_updates": host_updates.last.num_updates,
        "host_gradients_sent_early": host_updates.last.num_sent_early,
        "host_update_ns": host_updates.last.busy_ns,
        "host_wait_ns": host_updates.last.waited_ns,
    }


def _phase(session: "Session") -> str:
    case = session.active
    if case is None:
        return "idle"
    if case.schedule is not None:
        return "planned"
    if not case.repeats:
        return "unplanned"
    return "measuring" if session.steps else "first step"


def _of_plan(session: "Session") -> dict[str, object]:
    case = session.active
    assert case is not None
    assert case.schedule is not None
    plan = case.schedule.plan
    prediction, moves = plan.prediction, session.keeper.moves
    measured_bytes = case.memory.state_bytes if case.memory else plan.trace.state_bytes
    held_back_bytes = max(0, plan.trace.state_bytes - measured_bytes)
    paths = {what: session.reports.path(what, case.number) for what in ("plan", "trace", "run")}
    return {
        "state_bytes": plan.trace.state_bytes - held_back_bytes,
        "held_back_bytes": held_back_bytes,
        "unlimited_peak_bytes": prediction.unlimited_peak_bytes,
        "predicted_peak_bytes": case.expected_bytes,
        "predicted_managed_peak_bytes": prediction.managed_peak_bytes,
        "ideal_step_ns": prediction.ideal_ns,
        "plans": case.num_plans,
        "slowdown": case.calibration.slowdown,
        "link_speed": case.calibration.link_speed,
        "predicted_step_ns": prediction.step_ns + case.calibration.unplanned_wait_ns,
        "actual_peak_bytes": session.actual_peak_bytes(),
        "recomputed": len(plan.recomputed),
        **({"moving_state_budget_bytes": case.schedule.state_peak_bytes} if moves else {}),
        **{
            f"{what}_path": str(path) if path is not None and path.exists() else ""
            for what, path in paths.items()
        },
    }


def _of_runs(runs: list[RunRecord]) -> dict[str, object]:
    return {
        "managed_peak_bytes": runs[-1].managed_peak_bytes,
        "actual_step_ns": int(statistics.median(r.duration_ns for r in runs[-_MEDIAN_OF:])),
    }


def _waits(run: RunRecord) -> dict[str, object]:
    """Of the last planned step, also where another plan is for the next."""
    stalls: Counter[str] = Counter()
    for stall in run.stalls:
        stalls[stall.tensor] += stall.duration_ns
    return {"stall_ns": sum(stalls.values()), "stalls": tuple(stalls.most_common())}


def _moved(transfers: Sequence[TransferRecord], direction: Direction) -> dict[str, int]:
    """Bytes by tier."""
    moved: Counter[str] = Counter()
    for transfer in transfers:
        if transfer.direction is direction:
            moved[transfer.tier.value] += transfer.nbytes
    return dict(moved)


def _endurance_used(session: "Session", stores: Sequence[StoreStatus]) -> float:
    endurance = session.config.endurance
    if endurance is None or not endurance.nbytes:
        return -1.0
    return sum(store.written_bytes for store in stores) / endurance.nbytes


def _stores(session: "Session") -> tuple[StoreStatus, ...]:
    return tuple(
        StoreStatus(
            directory=str(store.directory),
            path=store.path,
            file_system=store.file_system,
            written_bytes=store.written_bytes,
            read_bytes=store.read_bytes,
            written_per_day_bytes=store.written_bytes * _DAY_NS // max(store.open_ns, 1),
            disks=tuple(str(disk_counters(name)) for name in sorted(store.physical)),
        )
        for store in session.device.stores()
    )
