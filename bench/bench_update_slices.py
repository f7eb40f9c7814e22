"""What an optimizer's update takes as a whole and in slices, as where the training state moves.

    python -m bench.bench_update_slices [--millions 8 60] [--rounds 9]

AdamW over matrices of a transformer's layer, with memory from the pool of large tensors, as in
training (`teraplan/runtime/cpu/pool.py`). Both ways in turns, on the same numbers; what they become
is compared bit for bit.
"""

import argparse
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench.results import write_results
from teraplan.runtime.cpu.pool import CpuPool
from teraplan.runtime.state.updates.sliced_update import step_in_slices
from teraplan.runtime.state.updates.stand_in import stand_in
from teraplan.runtime.state.updates.update_trial import plain_step

_LAYERS = 3
_ELEMENTS_OF_LAYER = 12
"""Times the square of its width: attention in and out, and twice the MLP."""

Optimizer = torch.optim.Optimizer
Step = Callable[[Optimizer], None]


def main() -> None:
    """Print and write down the times of both ways."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--millions", type=int, nargs="*", default=[8, 60], help="of parameters")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    pool = CpuPool()
    if refusal := pool.serve():
        raise SystemExit(f"no memory as in training: {refusal}")
    print(
        f"{'parameters':>12}{'whole':>12}{'in slices':>12}{'ratio':>8}{'page faults of both':>24}"
    )
    results = [compare(millions, options.rounds) for millions in options.millions]
    write_results("update_slices", {"rounds": options.rounds, "results": results})


def compare(millions: int, rounds: int) -> dict[str, object]:
    """Both ways in turns, on a model of so many million parameters."""
    whole, sliced = _Way(millions, _step_whole), _Way(millions, _step_sliced)
    for number in range(rounds):
        for way in (whole, sliced) if number % 2 == 0 else (sliced, whole):
            way.step()
    pairs = zip(whole.parameters, sliced.parameters, strict=True)
    assert all(torch.equal(a, b) for a, b in pairs), "slices have become something else"
    ratio = statistics.median(s / w for w, s in zip(whole.times_s, sliced.times_s, strict=True))
    times = [statistics.median(way.times_s) for way in (whole, sliced)]
    faults = [statistics.median(way.faults) for way in (whole, sliced)]
    number_of = sum(p.numel() for p in whole.parameters)
    print(f"{number_of:12,}{times[0]:10.4f} s{times[1]:10.4f} s{ratio:8.2f}{faults!s:>24}")
    return {
        "parameters": number_of,
        "whole_s": times[0],
        "in_slices_s": times[1],
        "ratio": ratio,
        "page_faults": faults,
    }


def _step_whole(optimizer: Optimizer) -> None:
    plain_step(optimizer)(optimizer)


def _step_sliced(optimizer: Optimizer) -> None:
    step_in_slices(optimizer, (), {})


@dataclass
class _Way:
    """One of the ways, on parameters of its own."""

    millions: int
    how: Step

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        width = int((self.millions * 10**6 / _LAYERS / _ELEMENTS_OF_LAYER) ** 0.5) // 64 * 64
        shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
        values = [torch.randn(shape) for _ in range(_LAYERS) for shape in shapes]
        self.parameters = [torch.nn.Parameter(value) for value in values]
        for p in self.parameters:
            p.grad = torch.randn_like(p)
        self._optimizer = torch.optim.AdamW(self.parameters)
        self._optimizer.step()  # makes the state
        self.times_s: list[float] = []
        self.faults: list[int] = []
        self.step()
        self.times_s.clear()
        self.faults.clear()

    def step(self) -> None:
        """One update, measured."""
        made = stand_in(self._optimizer, {id(p) for p in self.parameters})
        faults, start_s = _faults(), time.perf_counter()
        self.how(made)
        self.times_s.append(time.perf_counter() - start_s)
        self.faults.append(_faults() - faults)


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


if __name__ == "__main__":
    main()
