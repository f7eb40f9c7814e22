"""Threads that train: one after the other, or an error that says so."""

import threading
from collections.abc import Callable

import pytest
import torch

from teraplan.errors import UnsupportedError
from tests.end_to_end.training import MLP


def _in_thread(work: Callable[[], object]) -> BaseException | None:
    """What `work` raises in a thread of its own."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  it is what the test asks for
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised[0] if raised else None


def _compiled() -> tuple[MLP, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = MLP(rows=256)
    net.compile(backend="teraplan", options={"kernels": "aot_eager", "device_budget": "1GiB"})
    return net, torch.optim.SGD(net.parameters(), lr=0.1)


def _step(net: MLP, optimizer: torch.optim.Optimizer, number: int) -> float:
    loss = net(*net.batch(number))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


def test_a_forward_within_the_step_of_another_thread_is_refused() -> None:
    torch._dynamo.reset()
    (net, optimizer), (other, other_optimizer) = _compiled(), _compiled()
    for number in range(3):
        _step(net, optimizer, number)
        _step(other, other_optimizer, number)
    loss = net(*net.batch(3))
    error = _in_thread(lambda: other(*other.batch(3)))
    assert isinstance(error, UnsupportedError)
    assert "two threads train at once" in str(error)
    loss.backward()
    optimizer.step()
    assert _in_thread(lambda: _step(other, other_optimizer, 3)) is None


@pytest.mark.slow
def test_threads_one_after_the_other() -> None:
    torch._dynamo.reset()
    net, optimizer = _compiled()
    expected = [_step(net, optimizer, number) for number in range(12)]
    torch._dynamo.reset()
    net, optimizer = _compiled()
    found: list[float] = []
    for first in range(0, 12, 3):
        numbers = range(first, first + 3)
        work = lambda numbers=numbers: found.extend(  # noqa: E731
            _step(net, optimizer, number) for number in numbers
        )
        assert _in_thread(work) is None
    assert found == expected
