"""How fast is training whose state is on a disk, ours beside DeepSpeed ZeRO-Infinity's?

    python -m bench.bench_deepspeed [--deepspeed PYTHON] [--rounds 5]

The same GPT with AdamW in float32, one step each in turn: DeepSpeed with optimizer and parameters
on NVMe in several settings, and teraplan under budgets in per cent of the training state. Compared
is with the fastest of DeepSpeed's settings. `--deepspeed` names an interpreter that has DeepSpeed
(docs/training-state.md says how to make one); without it only ours are run.
"""

import argparse
import importlib.util
import sys
from dataclasses import asdict
from typing import Any

import torch

from bench.contender import SETTLING_STEPS, Contender
from bench.models.gpt import GPT, GPTConfig
from bench.race import race
from bench.results import write_results
from bench.state_model import training_state_bytes
from teraplan.runtime.storage import default_directory
from teraplan.units import format_nbytes, format_ns

_PERSISTENT_ELEMENTS = 100_000
"""DeepSpeed keeps smaller parameters in memory, as it does by default."""
_SLACK = 1.03
_UNBOUNDED = 10**9
_SETTINGS = {
    "all slots": {"param_slots": 0, "live_parameters": _UNBOUNDED, "pipeline": False},
    "pipelined": {"param_slots": 0, "live_parameters": _UNBOUNDED, "pipeline": True},
    "5 slots": {"param_slots": 5, "live_parameters": 0, "pipeline": False},
}
"""0 slots: one for each parameter that moves; with fewer and its other defaults the second step
ends with an assertion. With pipelining it asks for twelve slots of optimizer state."""
_OPTIMIZER_SLOTS = {False: 5, True: 12}
_THEIRS_WARMUP_STEPS = 3


def main() -> None:
    """Race, print the table, write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--deepspeed", help="interpreter in which DeepSpeed is installed")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=128, help="length of a sequence")
    parser.add_argument("--batch", type=int, default=2, help="sequences in a step")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--percents", type=int, nargs="*", default=[50, 25])
    parser.add_argument("--settings", nargs="*", default=list(_SETTINGS), choices=list(_SETTINGS))
    options = parser.parse_args()
    interpreter = options.deepspeed or _installed_here()
    if not interpreter:
        print("DeepSpeed is not compared: not installed here; name its interpreter by --deepspeed")
    config = GPTConfig(
        vocab_size=options.vocabulary,
        width=options.width,
        num_layers=options.layers,
        num_heads=options.width // 64,
        context=options.tokens,
    )
    theirs = [_theirs(name, config, options, interpreter) for name in options.settings]
    ours = _ours(config, options)
    results = race([*(theirs if interpreter else []), *ours], options.rounds)
    peers = [results[contender.name] for contender in theirs if interpreter]
    best = min(peers, key=lambda result: result["median_step_ns"], default=None)
    print(table(results, best))
    arguments = ["PYTHON" if word == options.deepspeed else word for word in sys.argv[1:]]
    write_results(
        "deepspeed",
        {
            "deepspeed": "measured" if interpreter else "not installed: no interpreter named",
            "model": asdict(config),
            "batch_size": options.batch,
            "threads": options.threads,
            "rounds": options.rounds,
            "results": results,
            "command": " ".join(["python -m bench.bench_deepspeed", *arguments]),
        },
    )


def table(results: dict[str, dict[str, Any]], best: dict[str, Any] | None) -> str:
    """One line per contender; ratios are to the fastest of DeepSpeed's settings."""
    rows = [f"{'':24}{'step':>11}{'process':>12}{'grown by':>12}{'rate':>8}{'memory':>8}"]
    for name, result in results.items():
        cells = f"{format_ns(result['median_step_ns']):>11}"
        cells += f"{format_nbytes(result['process_peak_bytes']):>12}"
        cells += f"{format_nbytes(result['peak_bytes']):>12}"
        if best is not None:
            cells += f"{best['median_step_ns'] / result['median_step_ns']:>8.2f}"
            cells += f"{result['process_peak_bytes'] / best['process_peak_bytes']:>8.2f}"
        rows.append(f"{name:24}{cells}")
    return "\n".join(rows)


def _installed_here() -> str:
    return sys.executable if importlib.util.find_spec("deepspeed") else ""


def _theirs(
    name: str, config: GPTConfig, options: argparse.Namespace, interpreter: str
) -> Contender:
    with torch.device("meta"):
        sizes = [p.numel() for p in GPT(config).parameters()]
    setting: dict[str, object] = dict(_SETTINGS[name])
    moving = sum(size > _PERSISTENT_ELEMENTS for size in sizes)
    setting["param_slots"] = setting["param_slots"] or moving
    setting |= {
        "slot_elements": int(max(sizes) * _SLACK),
        "sub_group_elements": 10**7,
        "optimizer_slots": _OPTIMIZER_SLOTS[bool(setting["pipeline"])],
        "storage": str(default_directory()),
    }
    return Contender(
        name=f"DeepSpeed, {name}",
        options=setting,
        model=asdict(config),
        batch_size=options.batch,
        threads=options.threads,
        warmup_steps=_THEIRS_WARMUP_STEPS,
        interpreter=interpreter,
        module="bench.deepspeed_training",
    )


def _ours(config: GPTConfig, options: argparse.Namespace) -> list[Contender]:
    state_bytes = training_state_bytes(config)
    return [
        Contender(
            name=f"teraplan, {percent} %",
            backend="teraplan",
            options={
                "device_budget": state_bytes * percent // 100,
                "training_state": "moves",
            },
            model=asdict(config),
            batch_size=options.batch,
            threads=options.threads,
            warmup_steps=SETTLING_STEPS,
        )
        for percent in options.percents
    ]


if __name__ == "__main__":
    main()
