"""Whether two runs are equal and the second kept its budget, and a table of both."""

import statistics
from collections.abc import Callable, Iterator

from bench.demo.outcome import Outcome
from teraplan.units import MIB, format_nbytes, format_ns

ALLOWANCE, ALLOWANCE_BYTES = 0.05, 16 * MIB
"""By how much what the operating system counts may exceed the budget, as a share of it and in
bytes: it counts whole pages, and memory that the allocator keeps between two tensors."""


def problems(unlimited: Outcome, limited: Outcome) -> list[str]:
    """What is not as promised; empty if all is."""
    return [*_differences(unlimited, limited), *_overruns(unlimited, limited)]


def _differences(unlimited: Outcome, limited: Outcome) -> Iterator[str]:
    for step, (left, right) in enumerate(zip(unlimited.losses, limited.losses, strict=True), 1):
        if left != right:
            yield f"the loss of step {step} has bits {left} with unlimited memory, {right} without"
            break
    if unlimited.parameters != limited.parameters:
        yield "the parameters after the last step differ"
    if unlimited.optimizer_state != limited.optimizer_state:
        yield "the optimizer's state after the last step differs"


def _overruns(unlimited: Outcome, limited: Outcome) -> Iterator[str]:
    budget = limited.budget_bytes
    if limited.bytes_out == 0:
        yield "nothing was moved, so the budget was not tested"
    if limited.actual_peak_bytes > budget * (1 + ALLOWANCE) + ALLOWANCE_BYTES:
        yield (
            f"the peak of {format_nbytes(limited.actual_peak_bytes)} is over the budget of "
            f"{format_nbytes(budget)}"
        )
    counted = limited.measured_peak_bytes - beside_the_step(unlimited)
    if counted > budget * (1 + ALLOWANCE) + ALLOWANCE_BYTES:
        yield (
            f"the operating system counts {format_nbytes(counted)}, over the budget of "
            f"{format_nbytes(budget)}"
        )


def kept(limited: Outcome) -> str:
    """How well a run without problems has kept its budget."""
    over = limited.actual_peak_bytes / limited.budget_bytes - 1
    if over <= 0:
        return "the budget was kept"
    return (
        f"the peak is {over:.1%} over the budget, by memory that is free between two tensors "
        f"({ALLOWANCE:.0%} and {format_nbytes(ALLOWANCE_BYTES)} are allowed for it)"
    )


def beside_the_step(unlimited: Outcome) -> int:
    """Bytes of a process beside its step: the compiler's and Python's, in both runs the same."""
    return max(0, unlimited.measured_peak_bytes - unlimited.unlimited_peak_bytes)


def table(unlimited: Outcome, limited: Outcome) -> str:
    """Predicted and actual numbers of both runs as text."""
    nbytes, duration = _known(format_nbytes), _known(format_ns)
    rows = [
        ("", "unlimited", "budget", "predicted"),
        ("device budget", "", nbytes(limited.budget_bytes), ""),
        ("training state", *(nbytes(o.state_bytes) for o in (unlimited, limited)), ""),
        ("held back", "", nbytes(limited.held_back_bytes), ""),
        (
            "peak of the step",
            nbytes(unlimited.actual_peak_bytes),
            nbytes(limited.actual_peak_bytes),
            nbytes(limited.predicted_peak_bytes),
        ),
        (
            "peak of the process",
            nbytes(unlimited.measured_peak_bytes),
            nbytes(limited.measured_peak_bytes),
            "",
        ),
        (
            "step time",
            format_ns(_median(unlimited)),
            format_ns(_median(limited)),
            duration(limited.predicted_step_ns),
        ),
        ("waits in the step", "", duration(limited.stall_ns), ""),
        ("moved out / back", "", _moved(limited), ""),
        ("activations covered", "", f"{limited.coverage:.1%}", ""),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        "  ".join(
            [
                row[0].ljust(widths[0]),
                *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)),
            ]
        ).rstrip()
        for row in rows
    )


def _known(show: Callable[[int], str]) -> Callable[[int], str]:
    return lambda value: show(value) if value >= 0 else "unknown"


def _median(outcome: Outcome) -> int:
    return int(statistics.median(outcome.step_ns))


def _moved(outcome: Outcome) -> str:
    return f"{format_nbytes(outcome.bytes_out)} / {format_nbytes(outcome.bytes_back)}"
