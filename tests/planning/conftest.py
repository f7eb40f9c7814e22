"""What tests of planning share: they count simulations, never time."""

import pytest

from teraplan.simulation.simulator import LONGEST_NS, _Run


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Grows by one with each simulation of a plan."""
    counted: list[object] = []
    to_the_end = _Run.to_the_end

    def counting(run: _Run, below_ns: int = LONGEST_NS) -> None:
        counted.append(run)
        to_the_end(run, below_ns)

    monkeypatch.setattr(_Run, "to_the_end", counting)
    return counted
