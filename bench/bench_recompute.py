"""Does computing activations again beat moving all of them where storage is the limit?

A GPT with unlimited memory, and under budgets of some shares (training state and so much of the
rest of the unlimited peak) with recompute="never" and "auto". Storage is a real file behind a limit
of bandwidth. One step each in turn; ratios are medians over rounds. Losses of all steps, and all
parameters after the last, have to be equal in every bit. With `--state-moves` parameters, gradients
and optimizer state move as well, and shares are of the whole peak.

    python -m bench.bench_recompute [--rounds 5] [--shares 50] [--storage-mb-per-s 100]
                                    [--state-moves]
"""

import argparse
import statistics
from typing import Any

from bench.contender import Contender
from bench.race import race
from bench.results import write_results
from teraplan.units import format_bandwidth, format_nbytes, format_ns

MODEL: dict[str, object] = {
    "context": 256,
    "num_layers": 4,
    "num_heads": 4,
    "width": 256,
    "vocab_size": 256,
}
_WARMUP_STEPS = 12
"""Seven of them are under plans, which are made anew while the process takes more than expected."""


def main() -> None:
    """Find the unlimited peak, race, print the table, write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--storage-mb-per-s", type=int, default=100)
    parser.add_argument("--shares", type=int, nargs="+", default=[50], help="in percent")
    parser.add_argument("--state-moves", action="store_true")
    wanted = parser.parse_args()
    state_moves: bool = wanted.state_moves
    bytes_per_s = wanted.storage_mb_per_s * 10**6

    moving = {"training_state": "moves"} if state_moves else {}

    def ours(name: str, budget: object, recompute: str) -> Contender:
        return Contender(
            name=name,
            backend="teraplan",
            options={"device_budget": budget, "recompute": recompute, **moving},
            storage_bytes_per_s=bytes_per_s,
            deterministic=True,
            model=MODEL,
            batch_size=wanted.batch_size,
            warmup_steps=_WARMUP_STEPS,
        )

    print("measuring the unlimited peak")
    status = race([ours("unlimited", "1000%", "never")], 1)["unlimited"]["status"]
    state, peak = status["state_bytes"], status["unlimited_peak_bytes"]
    fixed = 0 if state_moves else state
    contenders = [ours("unlimited", "1000%", "never")]
    contenders += [
        ours(f"{share} %, {recompute}", fixed + (peak - fixed) * share // 100, recompute)
        for share in wanted.shares
        for recompute in ("never", "auto")
    ]
    results = race(contenders, wanted.rounds)
    gains = {f"{share} %": _gain(results, f"{share} %") for share in wanted.shares}
    print(_table(results))
    for share, gain in gains.items():
        print(f"{share}: {gain:.3f} times as fast with it, storage {format_bandwidth(bytes_per_s)}")
    equal = len({(*result["losses"], result["parameters"]) for result in results.values()}) == 1
    print(f"losses and parameters: {'equal in every bit' if equal else 'DIFFERENT'}")
    write_results(
        "recompute_moving_state" if state_moves else "recompute",
        {
            "model": MODEL,
            "batch_size": wanted.batch_size,
            "rounds": wanted.rounds,
            "storage_bytes_per_s": bytes_per_s,
            "state_bytes": state,
            "unlimited_peak_bytes": peak,
            "losses_and_parameters_equal": equal,
            "rate_with_over_without": gains,
            "results": results,
        },
    )


def _gain(results: dict[str, dict[str, Any]], share: str) -> float:
    """Median over rounds of the step time without computing again over the one with it."""
    without, with_it = (results[f"{share}, {how}"]["step_ns"] for how in ("never", "auto"))
    return statistics.median(float(a / b) for a, b in zip(without, with_it, strict=True))


def _table(results: dict[str, dict[str, Any]]) -> str:
    rows = [
        f"{'':14}{'step':>10}{'rate':>7}{'predicted':>12}{'budget':>12}{'process':>12}"
        f"{'moved out':>12}{'recomputed':>12}"
    ]
    for name, result in results.items():
        status = result["status"]
        rows.append(
            f"{name:14}{format_ns(result['median_step_ns']):>10}{result['relative_rate']:>7.3f}"
            f"{format_ns(status['predicted_step_ns']):>12}"
            f"{format_nbytes(status['device_budget_bytes']):>12}"
            f"{format_nbytes(result['peak_bytes']):>12}"
            f"{format_nbytes(sum(status['bytes_out'].values())):>12}"
            f"{format_nbytes(max(0, status['recomputed_bytes'])):>12}"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    main()
