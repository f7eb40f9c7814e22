"""Rates against budgets: how they are shown, and the break-even formula beside them."""

from pathlib import Path
from typing import Any

from teraplan.units import format_nbytes, format_ns
from teraplan.values.hardware import Link

UNLIMITED = "inductor"
"""Whose rate is 1."""
OURS = "teraplan"
"""The policy whose contenders are called by their budget alone."""


def name_of(percent: int, policy: str) -> str:
    """What a contender under so many per cent of its training state is called."""
    return f"{percent} %" if policy == OURS else f"{policy} {percent} %"


def tokens_for_rate(
    rate: float, *, written_bytes: int, read_bytes: int, link: Link, compute_ns_per_token: float
) -> int:
    """Tokens in a step from which on it has `rate` of the unlimited one, with nothing overlapped.

    A step of T tokens takes T c, and T c + t_io where all transfers are waited for.
    """
    io_ns = 1e9 * (written_bytes / link.out_bytes_per_s + read_bytes / link.back_bytes_per_s)
    return round(rate / (1 - rate) * io_ns / compute_ns_per_token)


def rate_table(results: dict[str, dict[str, Any]], state_bytes: int) -> str:
    """One line per contender."""
    columns = ["budget", "step", "rate", "predicted", "off", "peak", "pred. peak", "off"]
    columns += ["process", "written", "read", "waits", "tokens"]
    rows = [" " * 14 + "".join(f"{column:>11}" for column in columns)]
    for name, result in results.items():
        step_ns, status = result["median_step_ns"], result["status"]
        cells = [format_nbytes(status["device_budget_bytes"]), format_ns(step_ns)]
        cells.append(f"{result['relative_rate']:.3f}")
        if name == UNLIMITED:
            cells[0] = "-"
            cells += ["-"] * 5 + [format_nbytes(result["peak_bytes"])]
        else:
            peak, predicted = status["actual_peak_bytes"], status["predicted_peak_bytes"]
            cells += [
                format_ns(status["predicted_step_ns"]),
                f"{status['predicted_step_ns'] / step_ns - 1:+.1%}",
                format_nbytes(peak),
                format_nbytes(predicted),
                f"{predicted / peak - 1:+.1%}",
                format_nbytes(result["peak_bytes"]),
                format_nbytes(out_bytes(status)),
                format_nbytes(back_bytes(status)),
                format_ns(status["state_wait_ns"]),
                str(result["tokens_for_rate"]),
            ]
        rows.append(f"{name:14}" + "".join(f"{cell:>11}" for cell in cells))
    rows.append(f"training state {format_nbytes(state_bytes)}")
    return "\n".join(rows)


def out_bytes(status: dict[str, Any]) -> int:
    """Of training state that have left in the last step, for whichever tier."""
    return _sum(status, "state_written_bytes", "state_to_host_bytes")


def back_bytes(status: dict[str, Any]) -> int:
    """The same that have come back."""
    return _sum(status, "state_read_bytes", "state_from_host_bytes")


def _sum(status: dict[str, Any], *names: str) -> int:
    return sum(max(0, int(status[name])) for name in names)


def draw_rates(
    results: dict[str, dict[str, Any]],
    percents: list[int],
    policies: list[str],
    tokens: int,
    path: Path,
) -> None:
    """Rate against budget as a picture, a line for each policy."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.5), layout="constrained")
    axes = figure.subplots()
    for policy in policies:
        rates = [results[name_of(percent, policy)]["relative_rate"] for percent in percents]
        axes.plot(percents, rates, marker="o", label=f"{policy}, {tokens} tokens per step")
    axes.axhline(1, color="grey", linestyle="--", label="unlimited memory")
    axes.set_xlabel("memory for the training state, % of it")
    axes.set_ylabel("step rate, of unlimited memory")
    axes.set_ylim(0, 1.1)
    axes.invert_xaxis()
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, format="png", dpi=120)
    print(f"drawn to {path.name}")
