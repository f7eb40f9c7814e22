"""How much memory does a process take that trains a model larger than its budget?

    python -m bench.bench_state_memory [--budget BYTES] [--steps 8] [--record NAME]

A GPT is built on the meta device and trained with AdamW: how much the process grows from the
construction of the model to the last step, the compiler's own code left out.
"""

import argparse
import importlib
import json
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench.models.gpt import GPT, batch
from bench.results import write_results
from bench.state_model import (
    add_arguments,
    command,
    model_config,
    run_settings,
    training_state_bytes,
)

if TYPE_CHECKING:
    from teraplan.values.status import Status

_BUDGET_BYTES = 256 << 20
"""Of the default model, activations take 190 MiB and the training state 117 MiB."""


def main() -> None:
    """Train, print the result, and write it down."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument("--budget", type=int, default=_BUDGET_BYTES, help="bytes")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--record", default="", help="name to write the result down under")
    options = parser.parse_args()
    result = point(options)
    print(json.dumps(result))
    if options.record:
        write_results(options.record, result)


def point(options: argparse.Namespace) -> dict[str, Any]:
    """Train for some steps under one budget."""
    import teraplan
    from teraplan.runtime.process import process_memory

    importlib.import_module("teraplan.backend")  # the compiler: its code is not training's memory
    torch.set_num_threads(options.threads)
    settings = run_settings(options, options.budget) | {"profile_steps": 1}
    before = process_memory.resident_bytes()
    watch = process_memory.PeakWatch()
    config = model_config(options)
    torch.manual_seed(0)
    with torch.device("meta"):
        model = GPT(config)
    teraplan.materialize(model, options=settings, initialize=initialize)
    state_bytes = training_state_bytes(config)
    model.compile(backend="teraplan", options=settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    times, losses, counted, traffic, peaks = [], [], [], [], []
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
        counted.append(said_to_be_written(teraplan.status()))
        peaks.append(watch.nbytes - before)
        peak = f"peak {peaks[-1] / 2**20:.0f} MiB"
        print(f"step {step}: {times[-1]:.2f} s, {peak}", file=sys.stderr, flush=True)
    status = teraplan.status()
    print(status, [round(t, 2) for t in times], losses[-1], file=sys.stderr)
    first = max(3, len(times) // 2)
    last = times[first:]
    return {
        "budget_bytes": options.budget,
        "training_state_bytes": state_bytes,
        "beside_bytes": max(0, status.unlimited_peak_bytes - state_bytes),
        "step_s": statistics.median(last),
        "peak_bytes": watch.nbytes - before,
        "allowed_peak_bytes": int(1.1 * options.budget) + (64 << 20),
        "peak_bytes_until_step": peaks,
        "step_times_s": times,
        "predicted_step_s": status.predicted_step_ns / 1e9,
        "actual_peak_bytes": status.actual_peak_bytes,
        # Means: what leaves at the end of a step may be written in the next one.
        "written_bytes": statistics.mean(counted[first:]),
        "kernel_written_bytes": statistics.mean(traffic[first:]),
        "read_bytes": status.state_read_bytes,
        "loss": losses[-1],
        "command": command("bench.bench_state_memory"),
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


def said_to_be_written(status: "Status") -> int:
    """Bytes that the last step has written to storage, by our own account."""
    return max(0, int(status.state_written_bytes)) + status.bytes_out.get("storage", 0)


def written_bytes() -> int:
    """What the kernel has counted for this process as written to storage."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("write_bytes"))


if __name__ == "__main__":
    main()
