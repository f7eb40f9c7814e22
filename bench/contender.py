"""One training run that takes a step when it is told to, so that runs can be compared in turns.

python -m bench.contender '{"backend": "teraplan", "options": {"device_budget": "2GiB"}, ...}'

Reads one line per step from standard input and answers each with one line of JSON: the step's time,
its loss as hexadecimal, the peak of the process since the warm-up, and how much of that is growth
since before the model (on a device with memory of its own: the peak of its tensors). Answers once
by itself after the warm-up. On "end" it answers with teraplan's status and a hash of the
parameters, and ends.
"""

import dataclasses
import hashlib
import json
import sys
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import teraplan
from bench.disk_hooks import saved_on_disk
from bench.disk_load import DiskLoad
from bench.models import gpt, hugging_face
from bench.slow_storage import slow_down_storage
from teraplan.runtime.process import process_memory

SETTLING_STEPS = 24
"""Graphs, memory, times, and the steps after which plans are made anew: what the process takes
beside its tensors is held back, and each such plan begins with no memory mapped."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """What to train and how."""

    name: str
    backend: str = "inductor"
    options: dict[str, object] | None = None
    model: dict[str, object] = dataclasses.field(default_factory=dict[str, object])
    """Fields of a GPT's configuration."""
    family: str = "gpt"
    """Another one has sizes of its own: see `bench.models.hugging_face`."""
    device: str = "cpu"
    """Type of the device that it is trained on."""
    batch_size: int = 4
    accumulate: int = 1
    """Micro-batches in a step, of `batch_size` sequences each."""
    warmup_steps: int = 6
    threads: int = dataclasses.field(default_factory=torch.get_num_threads)
    """That compute."""
    disk_hooks: bool = False
    """Write every saved tensor to disk and read it back, with PyTorch's own hooks."""
    disk_load_bytes: int = 0
    """To a file and as many back beside each step: what a plan moves, without a plan."""
    storage_bytes_per_s: int = 0
    """What teraplan's storage carries, both directions together; 0: what it can."""
    deterministic: bool = False
    """Kernels that give the same bits in every run, for comparing parameters."""
    interpreter: str = sys.executable
    module: str = "bench.contender"
    """What is run in it; another one understands the same and answers the same."""


def main() -> None:
    """Warm up, then step on demand."""
    contender = Contender(**json.loads(sys.argv[1]))
    torch.set_num_threads(contender.threads)
    torch.use_deterministic_algorithms(contender.deterministic)
    torch.manual_seed(0)  # for dropout: a process's own seed is another one each time
    before = process_memory.resident_bytes()
    accelerator = _accelerator(contender)
    model, data = _model_and_data(contender)
    model.to(contender.device)
    data = [(x.to(contender.device), y.to(contender.device)) for x, y in data]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if contender.storage_bytes_per_s:
        slow_down_storage(contender.storage_bytes_per_s)
    model.compile(backend=contender.backend, options=contender.options)

    load = DiskLoad(contender.disk_load_bytes) if contender.disk_load_bytes else None

    def step() -> dict[str, object]:
        value = 0.0
        with load.beside_step() if load is not None else nullcontext():
            start_ns = time.perf_counter_ns()
            for micro_batch in data:
                with _hooks(contender):
                    loss = model(*micro_batch)
                loss.backward()
                value += loss.item()
            optimizer.step()
            optimizer.zero_grad()
            if accelerator is not None:
                accelerator.synchronize()
            elapsed = time.perf_counter_ns() - start_ns
        return {"step_ns": elapsed, "loss": value.hex()}

    for _ in range(contender.warmup_steps):
        step()
    watch = process_memory.PeakWatch()
    if accelerator is not None:
        accelerator.reset_peak_memory_stats()
    _answer({"ready": True})
    for line in sys.stdin:
        if line.strip() == "end":
            break
        answer, peak = step(), watch.nbytes
        own = peak - before if accelerator is None else accelerator.max_memory_allocated()
        _answer(answer | {"peak_bytes": own, "process_peak_bytes": peak})
    parameters = hashlib.sha256()
    for parameter in model.parameters():
        parameters.update(parameter.detach().cpu().numpy().tobytes())
    _answer({"status": dataclasses.asdict(teraplan.status()), "parameters": parameters.hexdigest()})


def _model_and_data(contender: Contender) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    """What is trained, and a batch for each micro-batch of a step."""
    family, size, numbers = contender.family, contender.batch_size, range(contender.accumulate)
    if family != "gpt":
        data = [hugging_face.batch(family, size, number) for number in numbers]
        return hugging_face.build(family), data
    config = gpt.GPTConfig(**contender.model)  # type: ignore[arg-type]
    return gpt.build(config), [gpt.batch(config, size, number) for number in numbers]


def _accelerator(contender: Contender) -> Any:  # noqa: ANN401  torch.cuda, or one like it
    return None if contender.device == "cpu" else torch.get_device_module(contender.device)


def _hooks(contender: Contender) -> AbstractContextManager[object]:
    if not contender.disk_hooks:
        return nullcontext()
    return saved_on_disk(Path(tempfile.gettempdir()))


def _answer(what: dict[str, object]) -> None:
    sys.stdout.write("@" + json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
