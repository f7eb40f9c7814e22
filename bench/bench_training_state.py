"""How fast training goes when parameters, gradients and optimizer state do not fit the budget.

    python -m bench.bench_training_state [--rounds 7] [--percents 100 75 50 35 20] [--beside teraio]

A GPT with AdamW under plain Inductor, and under device budgets that leave some per cent of its
training state for that state, beside what the activations take at their peak (with `--strict` they
have to fit, too); a process each, one step each in turn. Writes a table, a picture, and how many
tokens a step needs for a rate by the break-even formula of docs/training-state.md. `--beside` asks
another question: how fast are the plans of our policy and of another one, really?
"""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.contender import SETTLING_STEPS, Contender
from bench.race import race
from bench.results import write_results
from bench.state_model import (
    add_arguments,
    command,
    model_config,
    run_settings,
    training_state_bytes,
)
from bench.state_rates import (
    OURS,
    UNLIMITED,
    back_bytes,
    draw_rates,
    name_of,
    out_bytes,
    rate_table,
    tokens_for_rate,
)
from teraplan.units import format_nbytes
from teraplan.values.hardware import Link

PERCENTS = (100, 75, 50, 35, 20)
_ASKED_RATE = 0.90
_UNLIMITED_WARMUP_STEPS = 3


def main() -> None:
    """Compare rates."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches in a step")
    parser.add_argument("--strict", action="store_true", help="activations within the per cent")
    parser.add_argument("--percents", type=int, nargs="*", default=list(PERCENTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--record", default="training_state_rate", help="name of the result")
    parser.add_argument("--beside", metavar="POLICY", help="plans of this policy, too")
    compare_rates(parser.parse_args())


def compare_rates(options: argparse.Namespace) -> None:
    """One step of each budget in turn; prints, draws and writes down."""
    config = model_config(options)
    state_bytes = training_state_bytes(config)
    common: dict[str, Any] = {
        "model": asdict(config),
        "device": options.device,
        "batch_size": options.batch,
        "accumulate": options.accumulate,
        "threads": options.threads,
    }
    beside_bytes = 0 if options.strict else activation_bytes(common, options.kernels)
    print(f"activations and workspace take {format_nbytes(beside_bytes)}")
    contenders = [Contender(name=UNLIMITED, warmup_steps=_UNLIMITED_WARMUP_STEPS, **common)]
    common["warmup_steps"] = SETTLING_STEPS
    policies = [OURS, options.beside] if options.beside else [OURS]
    for percent in options.percents:
        settings = run_settings(options, state_bytes * percent // 100 + beside_bytes)
        for policy in policies:
            name, chosen = name_of(percent, policy), settings | {"policy": policy}
            contenders.append(Contender(name=name, backend="teraplan", options=chosen, **common))
    results = race(contenders, options.rounds)
    link = _link_of_state(options)
    tokens = options.tokens * options.batch * options.accumulate
    unlimited_ns = results[UNLIMITED]["median_step_ns"]
    for name, result in results.items():
        if name != UNLIMITED:
            result["tokens_for_rate"] = tokens_for_rate(
                _ASKED_RATE,
                written_bytes=out_bytes(result["status"]),
                read_bytes=back_bytes(result["status"]),
                link=link,
                compute_ns_per_token=unlimited_ns / tokens,
            )
    print(rate_table(results, state_bytes))
    print(f"{tokens} tokens per step; the last column: enough for {_ASKED_RATE} by the formula")
    data: dict[str, object] = {
        "model": asdict(config),
        "tokens_per_step": tokens,
        "accumulate": options.accumulate,
        "threads": options.threads,
        "rounds": options.rounds,
        "training_state_bytes": state_bytes,
        "beside_bytes": beside_bytes,
        "link": asdict(link),
        "results": results,
        "command": command("bench.bench_training_state"),
    }
    path = write_results(options.record, data)
    draw_rates(results, options.percents, policies, tokens, path.with_suffix(".png"))


def _link_of_state(options: argparse.Namespace) -> Link:
    """The way that most of it takes: from a device with memory of its own to host memory."""
    from teraplan.runtime.links import host_link, storage_link
    from teraplan.runtime.storage import default_directory

    if options.device != "cpu":
        link = host_link(options.device)
    else:
        link = storage_link([Path(options.storage) if options.storage else default_directory()])
    assert link is not None
    return link


def activation_bytes(common: dict[str, Any], kernels: str) -> int:
    """What a step takes at its peak beside its training state."""
    settings: dict[str, object] = {"device_budget": "1000%", "training_state": "stays"}
    settings |= {"profile_steps": 1, "kernels": kernels}
    measured = Contender(
        name="what activations take", backend="teraplan", options=settings, warmup_steps=3, **common
    )
    status = race([measured], 1)[measured.name]["status"]
    return int(status["unlimited_peak_bytes"] - status["state_bytes"])


if __name__ == "__main__":
    main()
