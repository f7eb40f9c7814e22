"""Which planner gives the fastest step, how near is it to the best possible, how long does it take.

    python -m bench.bench_planning paper      TERAIO's three models on its machine, 32 and 16 bits
    python -m bench.bench_planning grid       models x machines x budgets
    python -m bench.bench_planning small      the same with one or two layers, every policy
    python -m bench.bench_planning speed      planning time and memory, 1 k to 1 M sites
    python -m bench.bench_planning splits     with and without tensors in two tiers
    python -m bench.bench_planning published  what others have measured, beside the simulator

All of it is simulated; the machine that this runs on matters for planning times alone.
"""

import argparse
import contextlib
import resource
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from bench.planning_cases import AMPLE, MACHINES, Case, grid_cases, paper_cases
from bench.published import published
from bench.results import FOLDER, write_results
from teraplan.bounds.relaxation import relaxed_bound_ns
from teraplan.errors import InfeasibleBudgetError
from teraplan.library.machines import GB, machine_of_teraio
from teraplan.library.models import Workload, trace_of
from teraplan.planners import POLICIES, make_plan
from teraplan.planners.base import Problem
from teraplan.simulation.memory_curve import device_curve, peak
from teraplan.values.hardware import Budgets
from teraplan.values.plan import Plan

_ONE_READING = ("teraplan", "teraio", "g10", "lru", "belady", "zero-infinity")
"""Without the other two readings of TERAIO's score, each of which takes as long as it."""


def _measured(case: Case, policy: str) -> dict[str, object]:
    start = time.process_time()
    plan: Plan | None = None
    with contextlib.suppress(InfeasibleBudgetError):
        plan = make_plan(case.trace, case.machine.hardware, case.budgets, policy)
    seconds = time.process_time() - start
    said = None if plan is None else plan.prediction
    return {
        "policy": policy,
        "planning_s": round(seconds, 2),
        "step_ns": said.step_ns if said else None,
        "part_of_ideal": round(said.ideal_ns / said.step_ns, 4) if said else None,
        "out_bytes": {t.value: n for t, n in said.out_bytes.items()} if said else None,
        "back_bytes": {t.value: n for t, n in said.back_bytes.items()} if said else None,
    }


def _compare(cases: Iterable[Case], policies: Sequence[str]) -> list[dict[str, object]]:
    results: list[dict[str, object]] = []
    for case in cases:
        rows = [_measured(case, policy) for policy in policies]
        most = peak(device_curve(case.trace))
        pressure = round(most / case.budgets.device_bytes, 2)
        start = time.process_time()
        bound_ns = _bound_ns(case)
        seconds = round(time.process_time() - start, 2)
        gap = _number(rows[0]["step_ns"]) / bound_ns - 1
        results.append(
            {
                "case": case.name,
                "peak_over_budget": pressure,
                "bound_ns": bound_ns,
                "bound_s": seconds,
                "gap_of_first": round(gap, 4),
                "policies": rows,
            }
        )
        parts = [f"{row['policy']} {row['part_of_ideal']}" for row in rows]
        print(f"{case.name}, {pressure}x: {', '.join(parts)}; gap {gap:.1%}", flush=True)
    return results


def _bound_ns(case: Case) -> int:
    problem = Problem.of(case.trace, case.machine.hardware, case.budgets)
    return relaxed_bound_ns(
        problem.lifetimes, problem.hardware, problem.pressure(), problem.tier_bytes
    )


def _paper(policies: Sequence[str], dtype: str) -> dict[str, object]:
    found = _compare(paper_cases(dtype), policies)
    means: dict[str, float] = {}
    for index, policy in enumerate(policies):
        parts = [_number(_rows(case)[index]["part_of_ideal"]) for case in found]
        means[policy] = round(statistics.mean(parts), 4)
        print(f"  mean of {policy} in {dtype}: {means[policy]:.3f}")
    return {"cases": found, "mean_part_of_ideal": means}


def _rows(result: dict[str, object]) -> list[dict[str, object]]:
    rows = result["policies"]
    assert isinstance(rows, list), "as put in"
    return rows


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0


def _grid(cases: Iterable[Case], policies: Sequence[str]) -> dict[str, object]:
    found = _compare(cases, policies)
    slower = 0
    gaps: list[float] = []
    for result in found:
        rows = _rows(result)
        ours = _number(rows[0]["step_ns"])
        slower += sum(0 < _number(row["step_ns"]) < ours for row in rows[1:])
        if _number(result["peak_over_budget"]) <= 4:
            gaps.append(_number(result["gap_of_first"]))
    median = statistics.median(gaps) if gaps else 0.0
    print(f"{len(found)} cases; slower than another policy: {slower}; ", end="")
    print(f"median gap to the bound where the peak is at most 4 budgets: {median:.1%}")
    return {"cases": found, "slower": slower, "median_gap": median}


def _speed(largest: int) -> dict[str, object]:
    """The same step in ever finer sites, and TERAIO's largest with a quarter of a million."""
    rows: list[dict[str, object]] = []
    machine = machine_of_teraio(85 * GB)
    for kernels in (1, 2, 6, 20, 60, 200, 740):
        workload = Workload(
            model="llama3-8b", dtype="float32", batch=4, micro_batches=2, stages=2, kernels=kernels
        )
        trace = trace_of(workload, machine)
        if len(trace.sites) > largest:
            break
        budgets = Budgets(device_bytes=50 * GB, host_bytes=85 * GB, storage_bytes=AMPLE)
        case = Case(name="llama3-8b", trace=trace, machine=machine, budgets=budgets)
        rows.append({"sites": len(trace.sites), **_measured(case, "teraplan")})
        print(f"{len(trace.sites)} sites: {rows[-1]['planning_s']} s", flush=True)
    for name, batch, host in (("llama3-70b", 2, 385), ("llama3-8b", 4, 85)):
        machine = machine_of_teraio(host * GB)
        workload = Workload(
            model=name,
            dtype="float32",
            batch=batch,
            micro_batches=16,
            stages=2,
            kernels=10,
        )
        trace = trace_of(workload, machine)
        budgets = Budgets(device_bytes=94 * GB, host_bytes=host * GB, storage_bytes=AMPLE)
        case = Case(name=name, trace=trace, machine=machine, budgets=budgets)
        rows.append({"model": name, "sites": len(trace.sites), **_measured(case, "teraplan")})
        print(f"{name}, {len(trace.sites)} sites: {rows[-1]['planning_s']} s", flush=True)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"most memory of the process: {memory / 2**30:.2f} GiB")
    _plot(rows, FOLDER.parent / "results" / "planning_speed.png")
    return {"rows": rows, "process_peak_bytes": memory}


def _splits() -> dict[str, object]:
    """Each case with tensors as a whole, and with tensors split between host and storage."""
    rows: list[dict[str, object]] = []
    cases = [*paper_cases("float32"), *paper_cases("bfloat16"), *grid_cases(), *_own_links()]
    for case in cases:
        steps: list[int] = []
        for split in (False, True):
            start = time.process_time()
            plan = make_plan(case.trace, case.machine.hardware, case.budgets, split=split)
            seconds = time.process_time() - start
            steps.append(plan.prediction.step_ns)
        split_tensors = len({m.tensor_id for m in plan.migrations if m.host_bytes})
        rows.append(
            {
                "case": case.name,
                "whole_ns": steps[0],
                "split_ns": steps[1],
                "split_tensors": split_tensors,
                "planning_s": round(seconds, 2),
            }
        )
        print(f"{case.name}: {steps[0] / steps[1]:.4f}, {split_tensors} split", flush=True)
    return {"cases": rows}


def _own_links() -> list[Case]:
    """The grid's first machine with storage on lanes of its own, not behind the device's slot."""
    return [
        replace(
            case,
            name=f"{case.name}, no port",
            machine=replace(
                case.machine, hardware=replace(case.machine.hardware, device_port=None)
            ),
        )
        for case in grid_cases(MACHINES[:1])
    ]


def _plot(rows: Sequence[dict[str, object]], path: Path) -> None:
    from matplotlib.figure import Figure

    grown = [row for row in rows if "model" not in row]
    figure = Figure(figsize=(6.0, 4.0), layout="constrained")
    axes = figure.subplots()
    sites = [_number(row["sites"]) for row in grown]
    axes.loglog(sites, [_number(row["planning_s"]) for row in grown], marker="o", label="planning")
    scale = _number(grown[-1]["planning_s"]) / sites[-1]
    axes.loglog(sites, [scale * n for n in sites], linestyle="--", label="in proportion to sites")
    axes.set_xlabel("sites")
    axes.set_ylabel("s of one core")
    axes.legend()
    figure.savefig(path, format="png", dpi=120)


def main() -> None:
    """Runs one of the six, or all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = ("paper", "grid", "small", "speed", "splits", "published")
    parser.add_argument("what", nargs="?", choices=kinds, default=None)
    parser.add_argument("--policies", default=None, help="with commas; all if not given")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="of `paper`")
    parser.add_argument("--machines", default=None, help="of `grid` and `small`, with commas")
    parser.add_argument("--largest", type=int, default=1_200_000, help="most sites of `speed`")
    options = parser.parse_args()
    policies = options.policies.split(",") if options.policies else None
    if options.what in (None, "paper"):
        for dtype in options.dtypes.split(","):
            results = _paper(policies or ("teraplan", "teraio"), dtype)
            write_results(f"planning_paper_{dtype}", results)
    machines = options.machines.split(",") if options.machines else MACHINES
    for what, fitting in (("grid", _ONE_READING), ("small", tuple(POLICIES))):
        for machine in machines if options.what in (None, what) else ():
            cases = grid_cases([machine], small=what == "small")
            name = machine.partition(":")[0]
            write_results(f"planning_{what}_{name}", _grid(cases, policies or fitting))
    if options.what in (None, "speed"):
        write_results("planning_speed", _speed(options.largest))
    if options.what in (None, "splits"):
        write_results("planning_splits", _splits())
    if options.what in (None, "published"):
        write_results("planning_published", published())


if __name__ == "__main__":
    main()
