"""Many steps under a tight budget: what the process holds stays flat, and nothing goes by RAM."""

import gc
import os
import threading
from pathlib import Path

import pytest
import torch

from teraplan.runtime.process import process_memory
from tests.end_to_end.training import MLP, sessions, tight, training, unlimited

STEPS = 2000
WARM_STEPS = 50
ROWS = 1024
SLACK_BYTES = 8 << 20
"""The allocator's and the interpreter's own ups and downs."""


def _page_cache_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Cached:"))


@pytest.mark.slow
@pytest.mark.exhaustive
def test_two_thousand_steps_leave_nothing_behind() -> None:
    program = training(lambda: MLP(rows=ROWS), MLP(rows=ROWS).batch, steps=6)
    budget = tight(program, unlimited(program), 0.5).options["device_budget"]
    assert isinstance(budget, int)
    torch._dynamo.reset()
    model = MLP(rows=ROWS)
    options: dict[str, object] = {"kernels": "aot_eager", "device_budget": budget * 5 // 4}
    model.compile(backend="teraplan", options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    peaks: list[int] = []
    held: list[tuple[int, int]] = []
    cache_bytes = 0
    for step in range(STEPS):
        model(*model.batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == WARM_STEPS:
            gc.collect()
            process_memory.reset_peak()
            cache_bytes = _page_cache_bytes()
        if step >= WARM_STEPS and step % 50 == 0:
            peaks.append(process_memory.peak_bytes())
            held.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
    (session,) = [s for s in sessions() if s.steps > STEPS // 2]
    (store,) = session.device.stores()
    assert store.written_bytes > 100 * SLACK_BYTES, "hardly anything was moved"
    assert "O_DIRECT" in store.path
    assert len(set(held)) == 1, f"descriptors and threads: {held}"
    assert peaks[-1] - peaks[1] < SLACK_BYTES, f"peaks: {peaks}"
    # Other programs read and write files as well: far less than what was spilled.
    assert _page_cache_bytes() - cache_bytes < store.written_bytes / 4
    assert store.used_bytes == 0
