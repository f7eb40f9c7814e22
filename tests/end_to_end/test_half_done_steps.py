"""What an error says of a step that has updated some parameters and cannot go on."""

import errno
import re

import pytest
import torch
from torch import Tensor

from teraplan.errors import StorageError
from tests.end_to_end.moving import adamw, model, run_moving
from tests.end_to_end.training import MLP, Run
from tests.end_to_end.updating_early import BUDGET
from tests.fakes.faulty_calls import Fault, injected

pytestmark = pytest.mark.slow

FAILING_STEP = 6
FOREVER = 10**9
SAID = r"half done: (\d+) of (\d+) parameters .* those after it(?:, up to (\d+) more may be)?"


def parameters(net: MLP) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def training(faults: list[Fault], *, in_backward: bool) -> tuple[list[list[Tensor]], Exception]:
    """Parameters after each step, and where the last one failed; and its error."""
    seen: list[list[Tensor]] = []
    raised: list[Exception] = []

    def program(this: Run) -> None:
        net = model()
        this.compile(net)
        optimizer = adamw(net.parameters())
        for step in range(FAILING_STEP + 1):
            fails = step == FAILING_STEP
            loss = net(*net.batch(step))
            try:
                with injected(*(faults if fails and in_backward else ())):
                    torch.autograd.backward(loss)
                with injected(*(faults if fails and not in_backward else ())):
                    optimizer.step()
            except StorageError as error:
                raised.append(error)
            optimizer.zero_grad()
            seen.append(parameters(net))

    run_moving(program, BUDGET, update="gradient" if in_backward else "step")
    if faults:
        (error,) = raised
        return seen, error
    return seen, StorageError("none")


@pytest.mark.parametrize("in_backward", [True, False])
@pytest.mark.parametrize("at", [1, 5, 9])
def test_how_many_parameters_are_those_after_it(in_backward: bool, at: int) -> None:
    """Where reads fail from one on, in the backward that updates, or in the optimizer's step."""
    reference, _ = training([], in_backward=in_backward)
    fault = Fault(call="read", what=errno.EIO, at=at, times=FOREVER)
    found, error = training([fault], in_backward=in_backward)
    assert found[-2] and all(map(torch.equal, found[-2], reference[-2]))
    num_updated = sum(map(torch.equal, found[-1], reference[-1]))
    num_before = sum(map(torch.equal, found[-1], reference[-2]))
    notes = "\n".join(getattr(error, "__notes__", ()))
    said = re.search(SAID, notes)
    if said is None:
        assert at == 1
        assert num_before == len(found[-1]), notes
        return
    done, total, begun = (int(number or 0) for number in said.groups())
    assert total == len(found[-1])
    assert done <= num_updated <= done + begun
    assert num_updated + num_before + begun >= total
