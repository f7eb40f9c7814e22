"""How fast training goes when parameters, gradients and optimizer state do not fit the budget.

    python -m bench.bench_training_state --help

Each point runs in a process of its own: the step rate of unlimited memory, then that of budgets in
per cent of the training state. Writes a table and a picture. With `--budget`, one point: how much
the process grows from the construction of the model to the last step, the compiler's own code left
out.
"""

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.results import write_results

FRACTIONS = (1.0, 0.75, 0.5, 0.35, 0.25)


def main() -> None:
    """Run all points, or one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=512, help="length of a sequence")
    parser.add_argument("--batch", type=int, default=4, help="sequences in a step")
    parser.add_argument("--kernels", default="inductor")
    parser.add_argument("--checkpoint", action="store_true", help="recompute each block")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--storage", default="", help="directory of the spill file")
    parser.add_argument("--fractions", type=float, nargs="*", default=list(FRACTIONS))
    parser.add_argument("--budget", type=int, default=0, help="one point only: bytes")
    parser.add_argument("--unlimited", action="store_true", help="one point only")
    parser.add_argument("--output", type=Path, default=Path("bench/results/training_state"))
    parser.add_argument("--record", default="", help="one point only: name to write it down under")
    options = parser.parse_args()
    if options.budget or options.unlimited:
        result = point(options)
        print(json.dumps(result))
        if options.record:
            write_results(options.record, result)
        return
    table = [spawn("--unlimited")]
    for fraction in options.fractions:
        budget = int(fraction * table[0]["training_state_bytes"]) + table[0]["beside_bytes"]
        table.append(spawn("--budget", str(budget)) | {"fraction": fraction})
    show(table, options.output)


def spawn(*arguments: str) -> dict[str, Any]:
    """The result of one point, measured in a fresh process."""
    command = [sys.executable, "-m", "bench.bench_training_state", *sys.argv[1:], *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(result))
    return result


def point(options: argparse.Namespace) -> dict[str, Any]:
    """Train for some steps under one budget."""
    import torch

    import teraplan
    from bench.models.gpt import GPT, GPTConfig, batch
    from teraplan.runtime import process_memory

    importlib.import_module("teraplan.backend")  # the compiler: its code is not training's memory
    torch.set_num_threads(os.cpu_count() or 1)
    budget = options.budget or 1 << 40
    settings: dict[str, object] = {"device_budget": budget, "profile_steps": 1}
    settings["kernels"] = options.kernels
    if options.storage:
        settings["storage"] = [options.storage]
    before = process_memory.resident_bytes()
    watch = process_memory.PeakWatch()
    config = GPTConfig(
        vocab_size=options.vocabulary,
        width=options.width,
        num_layers=options.layers,
        num_heads=options.width // 64,
        context=options.tokens,
        checkpoint=options.checkpoint,
    )
    torch.manual_seed(0)
    with torch.device("meta"):
        model = GPT(config)
    teraplan.materialize(model, options=settings, initialize=initialize)
    parameters = sum(p.nbytes for p in model.parameters())
    model.compile(backend="teraplan", options=settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    times, losses, traffic, peaks = [], [], [], []
    for step in range(options.steps):
        tokens, targets = batch(config, options.batch, step)
        start, io_before = time.perf_counter(), written_bytes()
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
        times.append(time.perf_counter() - start)
        traffic.append(written_bytes() - io_before)
        peaks.append(watch.nbytes - before)
        peak = f"peak {peaks[-1] / 2**20:.0f} MiB"
        print(f"step {step}: {times[-1]:.2f} s, {peak}", file=sys.stderr, flush=True)
    status = teraplan.status()
    print(status, [round(t, 2) for t in times], losses[-1], file=sys.stderr)
    last = times[max(3, len(times) // 2) :]
    return {
        "budget_bytes": options.budget,
        "training_state_bytes": 4 * parameters,
        "beside_bytes": max(0, status.unlimited_peak_bytes - 4 * parameters),
        "step_s": statistics.median(last),
        "peak_bytes": watch.nbytes - before,
        "allowed_peak_bytes": int(1.1 * options.budget) + (64 << 20),
        "peak_bytes_until_step": peaks,
        "step_times_s": times,
        "predicted_step_s": status.predicted_step_ns / 1e9,
        "actual_peak_bytes": status.actual_peak_bytes,
        "written_bytes": status.state_written_bytes,
        "kernel_written_bytes": statistics.median(traffic[-3:]),
        "read_bytes": status.state_read_bytes,
        "loss": losses[-1],
        "command": " ".join(["python -m bench.bench_training_state", *sys.argv[1:]]),
    }


def initialize(module: object) -> None:
    """Normal weights, as GPT-2 has them; the other parameters as torch sets them."""
    from torch import nn

    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
        bias: object = getattr(module, "bias", None)
        if isinstance(bias, nn.Parameter):
            nn.init.zeros_(bias)
    elif isinstance(module, nn.LayerNorm):
        module.reset_parameters()
    else:
        assert isinstance(module, nn.Module)
        nn.init.zeros_(module.get_parameter("positions"))


def written_bytes() -> int:
    """What the kernel has counted for this process as written to storage."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("write_bytes"))


def show(table: list[dict[str, Any]], output: Path) -> None:
    """Print the points, and draw rate against budget."""
    unlimited = table[0]["step_s"]
    for row in table:
        print(
            f"{row.get('fraction', 0) * 100:5.0f} %  {row['budget_bytes'] / 2**20:8.0f} MiB  "
            f"{row['step_s']:7.2f} s  rate {unlimited / row['step_s']:.3f}  "
            f"peak {row['peak_bytes'] / 2**20:8.0f} MiB  "
            f"written {row['written_bytes'] / 1e6:8.0f} MB  read {row['read_bytes'] / 1e6:8.0f} MB"
        )
    output.parent.mkdir(parents=True, exist_ok=True)
    output.with_suffix(".json").write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    try:
        from matplotlib import pyplot
    except ImportError:
        print("no picture: matplotlib is not installed")
        return
    figure, axes = pyplot.subplots(figsize=(6, 4))
    points = table[1:]
    rates = [unlimited / p["step_s"] for p in points]
    axes.plot([100 * p["fraction"] for p in points], rates, "o-")
    axes.set_xlabel("device budget beside activations, % of the training state")
    axes.set_ylabel("step rate, of unlimited memory")
    axes.set_ylim(0, 1.1)
    axes.invert_xaxis()
    axes.grid(alpha=0.3)
    figure.savefig(output.with_suffix(".png"), dpi=120, bbox_inches="tight")


if __name__ == "__main__":
    main()
