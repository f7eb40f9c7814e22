"""When what lasts is counted again."""

import gc
from collections.abc import Iterator

import pytest
import torch

from teraplan.runtime.cpu.device import CpuDevice
from teraplan.runtime.session.state_count import StateCount
from teraplan.runtime.storage import Storage, default_directory
from teraplan.units import MIB

GRAPHS = {"g0": None}


@pytest.fixture
def count() -> Iterator[StateCount]:
    gc.collect()  # what other tests have left is garbage, and would be counted
    device = CpuDevice(storage=Storage.open([default_directory()], deadline_s=20.0), host_bytes=0)
    yield StateCount(device)
    device.close()


def _run(count: StateCount, steps: range) -> int:
    """How many of the steps are counted."""
    return sum(count.refresh(GRAPHS, below=None, step=step) for step in steps)


def test_each_of_the_first_steps_then_fewer_and_fewer(count: StateCount) -> None:
    assert _run(count, range(8)) == 8
    assert 3 <= _run(count, range(8, 40)) <= 6
    assert 1 <= _run(count, range(1000, 1128)) <= 3


def test_tensors_are_counted_to_the_byte(count: StateCount) -> None:
    """And not as the difference of two readings of the process's memory."""
    gc.collect()
    for step in range(8):
        _run(count, range(step, step + 1))
        assert count.state_bytes == count._device.state_bytes()


def test_at_once_where_the_process_has_grown(count: StateCount) -> None:
    """By much of what it holds, which is what other tests have left in it."""
    _run(count, range(40))
    before_bytes = count.state_bytes
    much = 96 * MIB + count._device.resident_bytes() // 4
    new = torch.ones(much // 4)
    assert count.refresh(GRAPHS, below=None, step=40)
    assert count.state_bytes >= before_bytes + new.nbytes


def test_at_once_where_there_is_a_new_graph_or_state_begins_to_move(count: StateCount) -> None:
    _run(count, range(40))
    assert count.refresh({"g1": None}, below=None, step=40)
    assert count.refresh(GRAPHS, below=1 << 16, step=40)
    assert not count.refresh(GRAPHS, below=1 << 16, step=40)


def test_a_graph_in_the_middle_of_a_step_is_asked_for_its_parameters_once(
    count: StateCount,
) -> None:
    # Without an optimizer all parameters would count: an earlier test's may still be there.
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    _run(count, range(40))
    before_bytes = count.gradients_bytes
    parameter = torch.nn.Parameter(torch.ones(16 * MIB // 4))
    optimizer.add_param_group({"params": [parameter]})
    count.meet("g0", below=None)
    assert count.gradients_bytes == before_bytes
    count.meet("g1", below=None)
    assert count.gradients_bytes == before_bytes + parameter.nbytes
