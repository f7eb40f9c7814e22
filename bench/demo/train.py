"""One training run, in a process of its own so that its memory is its own.

python -m bench.demo.train --name budget --device-budget 700MiB --report DIR --outcome FILE
"""

import argparse
import logging
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import teraplan
from bench.demo.corpus import standard_library_text, text_batch
from bench.demo.memory import PeakMeter
from bench.demo.outcome import Outcome, hash_of, loss_bits
from bench.demo.size import TINY, Size, fitting_size
from bench.models import gpt


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and write the outcome to a file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--name", required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--backend", default="teraplan")
    parser.add_argument("--device-budget")
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--outcome", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    wanted = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    repeat_exactly()
    device = torch.device(wanted.device)
    options: dict[str, object] | None = None
    if wanted.backend == "teraplan":
        options = {"device_budget": wanted.device_budget, "report": str(wanted.report)}
    size = TINY if wanted.tiny else fitting_size(device)
    train(size, device, wanted.name, wanted.backend, options).write(wanted.outcome)


def repeat_exactly() -> None:
    """Choose kernels whose sums have one order, so that two equal runs have equal bits."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def train(
    size: Size, device: torch.device, name: str, backend: str, options: dict[str, object] | None
) -> Outcome:
    """Train a GPT; the part of this file that a user would write is here."""
    text = standard_library_text()
    meter = PeakMeter(device)
    model = gpt.build(size.model).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    model.compile(backend=backend, options=options)

    losses: list[str] = []
    step_ns: list[int] = []
    for step in range(size.steps):
        if step == size.warmup_steps:
            meter.reset()
        start_ns = time.perf_counter_ns()
        tokens, targets = (
            x.to(device) for x in text_batch(text, size.model, size.batch_size, step)
        )
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        value = loss.item()
        del loss
        losses.append(loss_bits(value))
        step_ns.append(time.perf_counter_ns() - start_ns)
        meter.update()
        print_step(name, step, size, value, step_ns[-1])
    return outcome(model, optimizer, losses, step_ns[size.warmup_steps :], meter.peak_bytes)


def print_step(name: str, step: int, size: Size, loss: float, duration_ns: int) -> None:
    """One line of progress."""
    phase = "warm-up" if step < size.warmup_steps else "measured"
    print(
        f"  {name:9}  {phase:8}  step {step + 1:2}/{size.steps}  loss {loss:.6f}"
        f"  {duration_ns / 1e9:6.2f} s/step",
        flush=True,
    )


def outcome(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    losses: Sequence[str],
    step_ns: Sequence[int],
    measured_peak_bytes: int,
) -> Outcome:
    """What the run gave, with what teraplan says of it."""
    status = teraplan.status()
    return Outcome(
        losses=tuple(losses),
        parameters=hash_of(model.parameters()),
        optimizer_state=hash_of(state_tensors(optimizer)),
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        measured_peak_bytes=measured_peak_bytes,
        step_ns=tuple(step_ns),
        coverage=status.coverage,
        budget_bytes=status.device_budget_bytes,
        state_bytes=status.state_bytes,
        held_back_bytes=status.held_back_bytes,
        unlimited_peak_bytes=status.unlimited_peak_bytes,
        predicted_peak_bytes=status.predicted_peak_bytes,
        actual_peak_bytes=status.actual_peak_bytes,
        predicted_step_ns=status.predicted_step_ns,
        actual_step_ns=status.actual_step_ns,
        stall_ns=status.stall_ns,
        bytes_out=sum(status.bytes_out.values()),
        bytes_back=sum(status.bytes_back.values()),
        stores=tuple(
            f"{store.directory}: {store.path} on {store.file_system}" for store in status.stores
        ),
        plan_path=status.plan_path,
        trace_path=status.trace_path,
        run_path=status.run_path,
    )


def state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """The tensors of an optimizer's state, in order of its parameters."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            yield from (state[key] for key in sorted(state) if isinstance(state[key], Tensor))


if __name__ == "__main__":
    main()
