"""Random numbers that depend on nothing but their seed, and leave the global generators alone."""

import contextlib
from collections.abc import Generator

import torch


@contextlib.contextmanager
def seeded(seed: int) -> Generator[None]:
    """Within it, CPU random numbers start from `seed`; afterwards all is as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def generator(*numbers: int) -> torch.Generator:
    """A CPU generator for these numbers, e.g. a seed and a step."""
    seed = 0
    for number in numbers:
        seed = (seed * 1_000_003 + number + 1) % (1 << 63)
    return torch.Generator().manual_seed(seed)
