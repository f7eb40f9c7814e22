"""How close to unlimited memory does training under a budget come?

Plain Inductor, teraplan with a budget that needs no offload, teraplan under 50 % and 30 % (training
state and so much of the rest of the unlimited peak), activation checkpointing, and every saved
tensor on the same disk by PyTorch's hooks. One step each in turn; ratios are medians over rounds.

    python -m bench.bench_step_rate [--rounds 7] [--quick] [--no-peers] [--beside teraio]
                                    [--family bert|gpt2|llama|t5|resnet] [--disk-alone]

`--disk-alone` adds plain Inductor beside as many bytes out and back as each budget is short of:
what the disk takes from the cores, whoever plans. `--beside` asks another question: how fast are
the plans of our policy and of another one, really? `--family` trains such a model of Hugging Face's
library instead of our GPT.
"""

import argparse
import platform
from typing import Any

import torch

from bench.contender import SETTLING_STEPS, Contender
from bench.models.hugging_face import FAMILIES
from bench.race import race
from bench.results import write_results
from teraplan.units import format_nbytes, format_ns

MODEL: dict[str, object] = {
    "context": 512,
    "num_layers": 8,
    "num_heads": 8,
    "width": 512,
    "vocab_size": 256,
}
QUICK: dict[str, object] = MODEL | {"num_layers": 3, "width": 256}


def main() -> None:
    """Find the unlimited peak, race, print the table, write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--quick", action="store_true", help="a small model")
    parser.add_argument("--no-peers", action="store_true", help="without the other methods")
    parser.add_argument("--beside", metavar="POLICY", help="only our policy's plans and this one's")
    parser.add_argument("--disk-alone", action="store_true", help="the disk's own cost, too")
    parser.add_argument("--family", choices=("gpt", *FAMILIES), default="gpt")
    parser.add_argument("--device", default="cpu", help="type of the device to train on")
    wanted = parser.parse_args()
    is_gpt = wanted.family == "gpt"
    model = QUICK if wanted.quick else MODEL
    common: dict[str, Any] = {
        "model": model,
        "family": wanted.family,
        "device": wanted.device,
        "batch_size": wanted.batch_size,
    }

    def ours(name: str, budget: object, policy: str = "teraplan") -> Contender:
        return Contender(
            name=name,
            backend="teraplan",
            options={"device_budget": budget, "policy": policy},
            warmup_steps=SETTLING_STEPS,
            **common,
        )

    print("measuring the unlimited peak")
    status = race([ours("unlimited", "1000%")], 1)["unlimited"]["status"]
    state, peak = status["state_bytes"], status["unlimited_peak_bytes"]
    shares = {share: state + (peak - state) * share // 100 for share in (50, 30)}
    policies = ["teraplan", wanted.beside] if wanted.beside else ["teraplan"]
    contenders = [
        Contender(name="inductor", **common),
        ours("teraplan, ample", "1000%"),
        *(
            ours(f"{policy}, {share} %", budget, policy)
            for share, budget in shares.items()
            for policy in policies
        ),
    ]
    if wanted.disk_alone:
        for share, budget in shares.items():
            name = f"disk alone, {share} %"
            contenders.append(Contender(name=name, disk_load_bytes=peak - budget, **common))
    if not wanted.no_peers and not wanted.beside and is_gpt:
        recomputing: dict[str, Any] = common | {"model": model | {"checkpoint": True}}
        contenders.append(Contender(name="checkpointing", **recomputing))
        contenders.append(Contender(name="hooks to disk", disk_hooks=True, **common))
    results = race(contenders, wanted.rounds)
    print(_table(results, state))
    name = "step_rate" if is_gpt else f"step_rate_{wanted.family}"
    write_results(
        f"{name}_beside_{wanted.beside}" if wanted.beside else name,
        {
            "model": model if is_gpt else wanted.family,
            "batch_size": wanted.batch_size,
            "rounds": wanted.rounds,
            "warmup_steps": SETTLING_STEPS,
            "state_bytes": state,
            "unlimited_peak_bytes": peak,
            "machine": platform.processor() or platform.machine(),
            "torch": torch.__version__,
            "results": results,
        },
    )


def _table(results: dict[str, dict[str, Any]], state: int) -> str:
    rows = [
        f"{'':18}{'step':>10}{'rate':>7}{'budget':>12}{'predicted':>12}{'process':>12}"
        f"{'step pred.':>12}{'off by':>8}"
    ]
    for name, result in results.items():
        status = result["status"]
        budget = status["device_budget_bytes"]
        predicted, step_ns = status["predicted_peak_bytes"], status["predicted_step_ns"]
        own = result["median_step_ns"]
        rows.append(
            f"{name:18}{format_ns(own):>10}{result['relative_rate']:>7.3f}"
            f"{_or_dash(budget):>12}{_or_dash(predicted):>12}"
            f"{format_nbytes(result['peak_bytes']):>12}"
            + (f"{format_ns(step_ns):>12}{step_ns / own - 1:>+8.1%}" if step_ns > 0 else "")
        )
    rows.append(f"training state {format_nbytes(state)}; rate: steps per second over inductor's")
    return "\n".join(rows)


def _or_dash(nbytes: int) -> str:
    return format_nbytes(nbytes) if nbytes >= 0 else "-"


if __name__ == "__main__":
    main()
