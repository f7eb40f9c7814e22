"""Which of many variants are quick, slow, or left to `make test-all`."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def by_cost(
    names: Iterable[str], *, quick: Collection[str] = (), rare: Collection[str] = ()
) -> list[Any]:
    """Parameters of a test: `quick` ones as they are, `rare` ones exhaustive, the others slow."""
    slow, exhaustive = pytest.mark.slow, [pytest.mark.slow, pytest.mark.exhaustive]
    return [
        name if name in quick else pytest.param(name, marks=exhaustive if name in rare else slow)
        for name in names
    ]
