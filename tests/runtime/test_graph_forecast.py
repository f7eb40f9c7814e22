"""Which budgets are refused before anything has been measured."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from teraplan.errors import InfeasibleBudgetError
from teraplan.runtime.cpu.device import CpuDevice
from teraplan.runtime.session.budget import GraphForecast
from teraplan.runtime.storage import Storage, default_directory
from teraplan.units import MIB, format_nbytes
from teraplan.values.graph_table import GraphMemory, GraphTable, Slot

STATE, BESIDE = 100 * MIB, 400 * MIB
TABLE = GraphTable(
    graph="g0",
    slots=(),
    uncovered=(),
    forward=GraphMemory(workspace_bytes=90 * MIB, least_bytes=200 * MIB),
    backward=GraphMemory(workspace_bytes=90 * MIB, least_bytes=BESIDE),
)


Make = Callable[[GraphTable], GraphForecast]


@pytest.fixture
def forecast() -> Iterator[Make]:
    device = CpuDevice(storage=Storage.open([default_directory()], deadline_s=20.0), host_bytes=0)

    def make(table: GraphTable) -> GraphForecast:
        made = GraphForecast(device)
        made.state_bytes = STATE
        made.add(table)
        return made

    yield make
    device.close()


def is_refused(made: GraphForecast, budget_bytes: int, *, certainly: bool) -> bool:
    try:
        made.refuse(budget_bytes, certainly=certainly)
    except InfeasibleBudgetError:
        return True
    return False


def test_the_least_is_the_larger_of_forward_and_backward_and_a_little_more(forecast: Make) -> None:
    least = forecast(TABLE).least_bytes
    assert STATE + BESIDE < least < 1.03 * (STATE + BESIDE)


@pytest.mark.parametrize(("sizes_vary", "fraction"), [(False, 5 / 8), (True, 1 / 4)])
def test_certain_below_a_part_of_what_is_beside_the_state(
    forecast: Make, sizes_vary: bool, fraction: float
) -> None:
    """Sizes that vary may have been larger when the graph was compiled."""
    made = forecast(replace(TABLE, sizes_vary=sizes_vary))
    limit = STATE + fraction * BESIDE
    assert is_refused(made, int(0.98 * limit), certainly=True)
    assert not is_refused(made, int(1.03 * limit), certainly=True)
    assert is_refused(made, int(1.03 * limit), certainly=False)


def test_one_graph_whose_sizes_vary_is_enough(forecast: Make) -> None:
    made = forecast(TABLE)
    made.add(replace(TABLE, graph="g1", sizes_vary=True))
    assert not is_refused(made, STATE + BESIDE // 3, certainly=True)


@pytest.mark.parametrize("moving_bytes", [0, 64 * MIB])
def test_the_budget_that_is_named_is_enough(forecast: Make, moving_bytes: int) -> None:
    made = forecast(TABLE)
    with pytest.raises(InfeasibleBudgetError, match=r"device_budget is 1\d\d\.00 MiB") as refusal:
        made.refuse(STATE, certainly=True, moving_bytes=moving_bytes)
    named = refusal.value.least_budget_bytes
    assert f"set device_budget to {format_nbytes(named)} ({named} bytes)" in str(refusal.value)
    assert not is_refused(made, named - moving_bytes, certainly=False)
    assert ("for the training state that moves" in str(refusal.value)) == bool(moving_bytes)


def test_what_is_named_has_room_for_what_kernels_take_more(forecast: Make) -> None:
    """A refusal after measuring would come too late."""

    def margin(table: GraphTable, *, certainly: bool) -> int:
        made = forecast(table)
        with pytest.raises(InfeasibleBudgetError) as refusal:
            made.refuse(STATE, certainly=certainly)
        return refusal.value.least_budget_bytes - made.least_bytes

    saved = replace(TABLE, slots=(Slot(name="x", layer="", nbytes=800 * MIB),))
    wide = 4 * MIB + BESIDE // 8
    assert wide < margin(saved, certainly=True) < wide + 4 * MIB
    tenth = (STATE + BESIDE) // 10
    assert tenth < margin(saved, certainly=False) < tenth + 4 * MIB, "where the state moves"
    moving = forecast(saved)
    moving.refresh([saved], update_bytes=0, state_moves=True)
    with pytest.raises(InfeasibleBudgetError) as refusal:
        moving.refuse(0, certainly=True, moving_bytes=8 * MIB)
    named = refusal.value.least_budget_bytes - moving.least_bytes - 8 * MIB
    assert named < moving.least_bytes // 10 + 4 * MIB, "there, too, in the middle of a step"
    for certainly in (True, False):
        assert margin(TABLE, certainly=certainly) < 5 * MIB, "what would hold it all is enough"
