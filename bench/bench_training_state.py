"""How fast training goes when parameters, gradients and optimizer state do not fit the budget.

    python -m bench.bench_training_state [--rounds 7] [--percents 100 75 50 35 20]

A GPT with AdamW under plain Inductor, and under device budgets that leave some per cent of its
training state for that state, beside what the activations take at their peak (with `--strict` they
have to fit, too); a process each, one step each in turn. Writes a table, a picture, and how many
tokens a step needs for a rate by the break-even formula of docs/training-state.md.

With `--budget`, one point: how much the process grows from the construction of the model to the
last step, the compiler's own code left out.
"""

import argparse
import importlib
import json
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench.contender import Contender
from bench.models.gpt import GPT, GPTConfig
from bench.race import race
from bench.results import write_results
from teraplan.hardware import Link
from teraplan.units import format_nbytes, format_ns

PERCENTS = (100, 75, 50, 35, 20)
_UNLIMITED = "inductor"
_ASKED_RATE = 0.90
_STATES_PER_PARAMETER = 4
"""Parameter, gradient and two moments."""
_WARMUP_STEPS = 9
"""Graphs, memory, times, and four planned steps after which the plan is made anew."""
_UNLIMITED_WARMUP_STEPS = 3


def main() -> None:
    """Compare rates, or run one point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=512, help="length of a sequence")
    parser.add_argument("--batch", type=int, default=8, help="sequences in a micro-batch")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches in a step")
    parser.add_argument("--strict", action="store_true", help="activations within the per cent")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--kernels", default="inductor")
    parser.add_argument("--checkpoint", action="store_true", help="recompute each block")
    parser.add_argument("--storage", default="", help="directory of the spill file")
    parser.add_argument("--percents", type=int, nargs="*", default=list(PERCENTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=int, default=0, help="one point only: bytes")
    parser.add_argument("--steps", type=int, default=8, help="of one point")
    parser.add_argument("--record", default="", help="name to write the result down under")
    options = parser.parse_args()
    if options.budget:
        result = point(options)
        print(json.dumps(result))
        if options.record:
            write_results(options.record, result)
        return
    compare_rates(options)


def compare_rates(options: argparse.Namespace) -> None:
    """One step of each budget in turn; prints, draws and writes down."""
    from teraplan.runtime.links import storage_link
    from teraplan.runtime.storage import default_directory

    config = model_config(options)
    state_bytes = training_state_bytes(config)
    common: dict[str, Any] = {
        "model": asdict(config),
        "batch_size": options.batch,
        "accumulate": options.accumulate,
        "threads": options.threads,
    }
    beside_bytes = 0 if options.strict else activation_bytes(common, options.kernels)
    print(f"activations and workspace take {format_nbytes(beside_bytes)}")
    contenders = [Contender(name=_UNLIMITED, warmup_steps=_UNLIMITED_WARMUP_STEPS, **common)]
    common["warmup_steps"] = _WARMUP_STEPS
    for percent in options.percents:
        settings = run_settings(options, state_bytes * percent // 100 + beside_bytes)
        name = f"{percent} %"
        contenders.append(Contender(name=name, backend="teraplan", options=settings, **common))
    results = race(contenders, options.rounds)
    link = storage_link([Path(options.storage) if options.storage else default_directory()])
    tokens = options.tokens * options.batch * options.accumulate
    unlimited_ns = results[_UNLIMITED]["median_step_ns"]
    for name, result in results.items():
        if name != _UNLIMITED:
            result["tokens_for_rate"] = tokens_for_rate(
                _ASKED_RATE,
                written_bytes=result["status"]["state_written_bytes"],
                read_bytes=result["status"]["state_read_bytes"],
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
        "command": command(),
    }
    path = write_results(options.record or "training_state_rate", data)
    draw_rates(results, options.percents, tokens, path.with_suffix(".png"))


def activation_bytes(common: dict[str, Any], kernels: str) -> int:
    """What a step takes at its peak beside its training state."""
    settings: dict[str, object] = {"device_budget": "1000%", "training_state": "stays"}
    settings |= {"profile_steps": 1, "kernels": kernels}
    measured = Contender(
        name="what activations take", backend="teraplan", options=settings, warmup_steps=3, **common
    )
    status = race([measured], 1)[measured.name]["status"]
    return int(status["unlimited_peak_bytes"] - status["state_bytes"])


def model_config(options: argparse.Namespace) -> GPTConfig:
    """The GPT that was asked for, 64 channels to a head."""
    return GPTConfig(
        vocab_size=options.vocabulary,
        width=options.width,
        num_layers=options.layers,
        num_heads=options.width // 64,
        context=options.tokens,
        checkpoint=options.checkpoint,
    )


def run_settings(options: argparse.Namespace, budget_bytes: int) -> dict[str, object]:
    """What `model.compile` is given; the state moves even where it would just fit."""
    settings: dict[str, object] = {"device_budget": budget_bytes, "training_state": "moves"}
    settings["kernels"] = options.kernels
    if options.storage:
        settings["storage"] = [options.storage]
    return settings


def training_state_bytes(config: GPTConfig) -> int:
    """Parameters, gradients and the two moments of AdamW."""
    with torch.device("meta"):
        return _STATES_PER_PARAMETER * sum(p.nbytes for p in GPT(config).parameters())


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
    rows = [" " * 10 + "".join(f"{column:>11}" for column in columns)]
    for name, result in results.items():
        step_ns, status = result["median_step_ns"], result["status"]
        cells = [format_nbytes(status["device_budget_bytes"]), format_ns(step_ns)]
        cells.append(f"{result['relative_rate']:.3f}")
        if name == _UNLIMITED:
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
                format_nbytes(status["state_written_bytes"]),
                format_nbytes(status["state_read_bytes"]),
                format_ns(status["state_wait_ns"]),
                str(result["tokens_for_rate"]),
            ]
        rows.append(f"{name:10}" + "".join(f"{cell:>11}" for cell in cells))
    rows.append(f"training state {format_nbytes(state_bytes)}")
    return "\n".join(rows)


def draw_rates(
    results: dict[str, dict[str, Any]], percents: list[int], tokens: int, path: Path
) -> None:
    """Rate against budget as a picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.5), layout="constrained")
    axes = figure.subplots()
    rates = [results[f"{percent} %"]["relative_rate"] for percent in percents]
    axes.plot(percents, rates, marker="o", label=f"{tokens} tokens per step")
    axes.axhline(1, color="grey", linestyle="--", label="unlimited memory")
    axes.set_xlabel("memory for the training state, % of it")
    axes.set_ylabel("step rate, of unlimited memory")
    axes.set_ylim(0, 1.1)
    axes.invert_xaxis()
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, format="png", dpi=120)
    print(f"drawn to {path.name}")


def command() -> str:
    """What was called."""
    return " ".join(["python -m bench.bench_training_state", *sys.argv[1:]])


def point(options: argparse.Namespace) -> dict[str, Any]:
    """Train for some steps under one budget."""
    import teraplan
    from bench.models.gpt import batch
    from teraplan.runtime import process_memory

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
        "command": command(),
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


if __name__ == "__main__":
    main()
