"""Steps as they ran under a plan, beside what was predicted of them.

                  predicted     median      least       most
step                 1.12 s     1.14 s     1.13 s     1.20 s
waits              37.50 ms   41.00 ms   38.20 ms   92.10 ms
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import median_low

from teraplan.report.summary import longest_waits, tensor_label
from teraplan.report.table import aligned
from teraplan.units import format_nbytes, format_ns
from teraplan.values.hardware import Tier
from teraplan.values.plan import Plan
from teraplan.values.run_record import Direction, RunRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One number of a step: what was predicted, and what it was in each step that ran."""

    name: str
    """ "step_ns", "device_peak_bytes" or the like."""
    label: str
    predicted: int
    actual: tuple[int, ...]

    def numbers(self) -> dict[str, int]:
        """What was predicted, and the median, the least and the most of what happened."""
        return {
            "predicted": self.predicted,
            "median": median_low(self.actual),
            "least": min(self.actual),
            "most": max(self.actual),
        }


def runs_text(plan: Plan, runs: Sequence[RunRecord]) -> str:
    """At least one run in a few lines; waits are those of a step on average, longest first."""
    rows = [("", "predicted", "median", "least", "most")]
    for measured in _measured(plan, runs):
        form = format_ns if measured.name.endswith("_ns") else format_nbytes
        one, two, three, four = map(form, measured.numbers().values())
        rows.append((measured.label, one, two, three, four))
    waits = longest_waits(_labelled_waits(plan, runs))
    lines = [f"As it ran in {_steps(runs)}", "", *aligned(rows, "<>>>>")]
    return "\n".join([*lines, "", f"Waits  {', '.join(waits)}"] if waits else lines)


def runs_json(plan: Plan, runs: Sequence[RunRecord]) -> dict[str, object]:
    """The facts of `runs_text` as JSON values."""
    facts: dict[str, object] = {
        measured.name: measured.numbers() for measured in _measured(plan, runs)
    }
    return facts | {"steps": [run.step for run in runs], "mean_wait_ns": _mean_waits(runs)}


def _measured(plan: Plan, runs: Sequence[RunRecord]) -> list[Measured]:
    prediction = plan.prediction
    rows = [
        Measured(
            name="step_ns",
            label="step",
            predicted=prediction.step_ns,
            actual=tuple(run.duration_ns for run in runs),
        ),
        Measured(
            name="wait_ns",
            label="waits",
            predicted=sum(prediction.stall_ns.values()),
            actual=tuple(sum(stall.duration_ns for stall in run.stalls) for run in runs),
        ),
        Measured(
            name="device_peak_bytes",
            label="peak of the device",
            predicted=prediction.device_peak_bytes,
            actual=tuple(run.device_peak_bytes for run in runs),
        ),
    ]
    for tier in (Tier.HOST, Tier.STORAGE):
        for direction in Direction:
            moved = _moved(plan, runs, tier, direction)
            if moved.predicted or any(moved.actual):
                rows.append(moved)
    return rows


def _moved(plan: Plan, runs: Sequence[RunRecord], tier: Tier, direction: Direction) -> Measured:
    out = direction is Direction.OUT
    predicted = plan.prediction.out_bytes if out else plan.prediction.back_bytes
    return Measured(
        name=f"{tier}_{direction}_bytes",
        label=f"out to {tier}" if out else f"back from {tier}",
        predicted=predicted.get(tier, 0),
        actual=tuple(
            sum(
                transfer.nbytes
                for transfer in run.transfers
                if (transfer.tier, transfer.direction) == (tier, direction)
            )
            for run in runs
        ),
    )


def _mean_waits(runs: Sequence[RunRecord]) -> dict[str, int]:
    """For each tensor that was waited for, how long in a step on average."""
    total: Counter[str] = Counter()
    for stall in chain.from_iterable(run.stalls for run in runs):
        total[stall.tensor] += stall.duration_ns
    return {name: total_ns // len(runs) for name, total_ns in total.items()}


def _labelled_waits(plan: Plan, runs: Sequence[RunRecord]) -> Iterator[tuple[int, str]]:
    """Waits and what `show` calls their tensors; those that the trace lacks have their name."""
    tensors = {tensor.name: tensor for tensor in plan.trace.tensors}
    for name, wait_ns in _mean_waits(runs).items():
        yield wait_ns, tensor_label(tensors[name]) if name in tensors else name


def _steps(runs: Sequence[RunRecord]) -> str:
    if len(runs) == 1:
        return f"step {runs[0].step}"
    first, last = min(run.step for run in runs), max(run.step for run in runs)
    some = f"{len(runs)} of " if len(runs) <= last - first else ""
    return f"{some}the steps {first} to {last}"
